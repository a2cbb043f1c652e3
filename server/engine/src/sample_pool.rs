//! Samples rows on several threads while the engine's thread waits: the rows of a step are independent, and what a
//! sampler does beyond looking for the largest logit takes longer than a context switch.
//!
//! A step's rows are copied once each, into buffers that are kept.

use std::panic::AssertUnwindSafe;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::backend::Token;
use crate::error::RequestError;
use crate::sampler::{SampleError, Sampled, Sampler};

/// Rows of one sequence: the first follows its last token, the others a guess each.
pub(crate) struct SampleJob {
    /// What the caller knows it by.
    pub(crate) id: usize,
    pub(crate) sampler: Box<Sampler>,
    pub(crate) rows: Vec<Vec<f32>>,
    pub(crate) guesses: Vec<Token>,
    /// What earlier rows of it gave.
    pub(crate) sampled: SampledRows,
}

/// What became of it.
pub(crate) struct SampleDone {
    pub(crate) id: usize,
    pub(crate) sampler: Box<Sampler>,
    pub(crate) sampled: SampledRows,
}

/// The tokens of a sequence's rows, up to the first that is not the guess, which its sampler has accepted.
#[derive(Default)]
pub(crate) struct SampledRows {
    pub(crate) tokens: Vec<Sampled>,
    /// Why there is none after them.
    pub(crate) error: Option<RequestError>,
}

/// The threads.
pub(crate) struct SamplePool {
    jobs: Option<Sender<SampleJob>>,
    done: Receiver<(SampleDone, Vec<Vec<f32>>)>,
    threads: Vec<JoinHandle<()>>,
    buffers: Vec<Vec<f32>>,
}

impl SamplePool {
    /// So many threads, at least one.
    ///
    /// # Errors
    /// A thread could not be started.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let (jobs, queue) = unbounded::<SampleJob>();
        let (report, done) = unbounded();
        let mut pool = Self { jobs: Some(jobs), done, threads: Vec::new(), buffers: Vec::new() };
        for i in 0..threads.max(1) {
            let (queue, report) = (queue.clone(), report.clone());
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
                // The threads end when the pool is dropped.
                let _ = sender.send(job);
            }
        }
        let mut all = Vec::with_capacity(total);
        // Every job reports once, whatever happens to it.
        for (done, buffers) in self.done.iter().take(total) {
            self.buffers.extend(buffers);
            all.push(done);
        }
        all
    }
}

fn work(job: SampleJob) -> (SampleDone, Vec<Vec<f32>>) {
    let SampleJob { id, mut sampler, rows, guesses, mut sampled } = job;
    for (i, row) in rows.iter().enumerate() {
        if !sampled.sample(&mut sampler, row, guesses.get(i).copied()) {
            break;
        }
    }
    (SampleDone { id, sampler, sampled }, rows)
}

impl SampledRows {
    /// Samples the next row; whether the one after it counts, since the guess before that was right. A bug in sampling
    /// harms its request only.
    pub(crate) fn sample(&mut self, sampler: &mut Sampler, row: &[f32], guess: Option<Token>) -> bool {
        let sampled = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let sampled = sampler.sample(row)?;
            sampler.accept(sampled.token)?;
            Ok(sampled)
        }));
        match sampled {
            Ok(Ok(sampled)) => {
                let token = sampled.token;
                self.tokens.push(sampled);
                return guess == Some(token);
            }
            Ok(Err(error)) => self.error = Some(SampleError::into_request_error(error)),
            Err(_) => {
                self.error = Some(RequestError::Internal(String::from("sampling panicked; see the server's log")));
            }
        }
        false
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
