//! Samples rows on several threads while the engine's thread waits: the rows of a step are independent, and what a
//! sampler does beyond looking for the largest logit takes longer than a context switch.
//!
//! A step's rows are copied once each, into buffers that are kept. The engine's thread takes jobs from the same queue,
//! so that a pool of no threads works as well.

use std::panic::AssertUnwindSafe;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::error::RequestError;
use crate::sampler::{Sampled, Sampler};

/// One row to sample from.
pub(crate) struct SampleJob {
    pub(crate) slot: usize,
    pub(crate) sampler: Box<Sampler>,
    pub(crate) row: Vec<f32>,
}

/// What became of it.
pub(crate) struct SampleDone {
    pub(crate) slot: usize,
    pub(crate) sampler: Box<Sampler>,
    pub(crate) result: Result<Sampled, RequestError>,
}

/// The threads.
pub(crate) struct SamplePool {
    jobs: Option<Sender<SampleJob>>,
    queue: Receiver<SampleJob>,
    done: Receiver<(SampleDone, Vec<f32>)>,
    report: Sender<(SampleDone, Vec<f32>)>,
    threads: Vec<JoinHandle<()>>,
    buffers: Vec<Vec<f32>>,
}

impl SamplePool {
    /// # Errors
    /// A thread could not be started.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let (jobs, queue) = unbounded();
        let (report, done) = unbounded();
        let mut pool = Self { jobs: Some(jobs), queue, done, report, threads: Vec::new(), buffers: Vec::new() };
        for i in 0..threads {
            let (queue, report) = (pool.queue.clone(), pool.report.clone());
            let thread = std::thread::Builder::new().name(format!("gantry-sample-{i}")).spawn(move || {
                for job in queue {
                    // The pool is dropped after its threads.
                    let _ = report.send(work(job));
                }
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// A copy of a row, in a buffer that was used before.
    pub(crate) fn copy(&mut self, row: &[f32]) -> Vec<f32> {
        let mut buffer = self.buffers.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(row);
        buffer
    }

    /// Samples all rows and returns when the last is done.
    pub(crate) fn run(&mut self, jobs: Vec<SampleJob>) -> Vec<SampleDone> {
        let total = jobs.len();
        for job in jobs {
            if let Some(sender) = &self.jobs {
                // The receiver is ours.
                let _ = sender.send(job);
            }
        }
        while let Ok(job) = self.queue.try_recv() {
            let _ = self.report.send(work(job));
        }
        let mut all = Vec::with_capacity(total);
        // Every job reports once, whatever happens to it.
        for (done, buffer) in self.done.iter().take(total) {
            self.buffers.push(buffer);
            all.push(done);
        }
        all
    }
}

fn work(job: SampleJob) -> (SampleDone, Vec<f32>) {
    let SampleJob { slot, mut sampler, row } = job;
    let result = sample(&mut sampler, &row);
    (SampleDone { slot, sampler, result }, row)
}

/// Samples a row. A bug in sampling harms its request only.
pub(crate) fn sample(sampler: &mut Sampler, row: &[f32]) -> Result<Sampled, RequestError> {
    match std::panic::catch_unwind(AssertUnwindSafe(|| sampler.sample(row))) {
        Ok(sampled) => sampled.map_err(|e| RequestError::Internal(e.to_string())),
        Err(_) => Err(RequestError::Internal(String::from("sampling panicked; see the server's log"))),
    }
}

impl Drop for SamplePool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a sampling thread panicked");
            }
        }
    }
}
