//! What goes wrong on purpose: workers that are killed, that stand still for a while, or for longer than the server lets
//! them, and files of the disk cache that are cut, changed or removed.
//!
//! One worker is disturbed at a time, and the next only when the server has recovered, so that it is known which requests
//! a fault may excuse: those that were on their way while it lasted. Absent: what the server is to make of it.

use std::{
    collections::BTreeMap,
    fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Result, ensure};
use rand::{
    Rng, SeedableRng,
    rngs::StdRng,
    seq::{IndexedMutRandom, IndexedRandom},
};
use serde::Serialize;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    Run, WORKERS,
    watch::{Figures, figures},
};
use crate::processes;

/// The server calls a worker failed, and tries it again only now and then, when it died five times in ten minutes.
const MAX_DEATHS: usize = 4;
/// See [`MAX_DEATHS`].
const DEATHS_WINDOW: Duration = Duration::from_secs(610);
/// Longest time until the server has recovered.
const RECOVERY_LIMIT: Duration = Duration::from_secs(90);
/// How often it is looked at.
const POLL: Duration = Duration::from_millis(50);
/// A worker that stands still for so long, in milliseconds, is late and not yet given up.
const PAUSE_MS: std::ops::Range<u64> = 200..6_000;
/// Between two faults of workers, so many requests at least.
const REQUESTS_BETWEEN: u64 = 60;
/// The most faults of workers.
const MAX_WORKER_FAULTS: u64 = 120;
/// A soak of so many requests has workers that are stopped until they are given up.
const MIN_REQUESTS_FOR_HANGS: u64 = 2_000;
/// In the last of so many parts of the requests no worker is lost, so that the lives that begin before it are long enough
/// for their memory to be judged.
const PARTS: u64 = 4;
/// Time between two faults of files, in milliseconds.
const BETWEEN_FILES_MS: std::ops::Range<u64> = 100..1_500;

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A worker gets SIGKILL.
    Kill,
    /// A worker stands still for a while.
    Pause,
    /// A worker stands still until the server replaces it.
    Hang,
    /// A file of the disk cache is cut.
    Cut,
    /// A byte of one is changed.
    Flip,
    /// One is filled with something else.
    Overwrite,
    /// One is removed.
    Remove,
    /// All of a model's are.
    RemoveAll,
}

impl Fault {
    const FILES: [(Self, u32); 5] =
        [(Self::Cut, 4), (Self::Flip, 6), (Self::Overwrite, 4), (Self::Remove, 6), (Self::RemoveAll, 1)];

    /// Whether the worker is lost.
    fn is_death(self) -> bool {
        matches!(self, Self::Kill | Self::Hang)
    }
}

/// What was done, and when.
#[derive(Debug)]
pub struct Faults {
    address: SocketAddr,
    front: u32,
    disk: PathBuf,
    seed: u64,
    requests: u64,
    done: Mutex<Done>,
}

#[derive(Debug, Default)]
struct Done {
    counts: BTreeMap<Fault, u64>,
    /// When workers were disturbed; the last one may not have ended.
    spans: Vec<(Instant, Option<Instant>)>,
    deaths: Vec<(usize, Instant)>,
}

/// Goes on when it is dropped: a worker that stands still would outlive its server.
struct Standing(u32);

impl Drop for Standing {
    fn drop(&mut self) {
        // It may have been killed meanwhile.
        drop(processes::signal(self.0, "CONT"));
    }
}

impl Faults {
    pub(super) fn new(address: SocketAddr, front: u32, disk: PathBuf, seed: u64, requests: u64) -> Self {
        Self { address, front, disk, seed, requests, done: Mutex::default() }
    }

    fn done(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often each was done.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Fault, u64> {
        self.done().counts.clone()
    }

    /// Workers that were lost on purpose.
    #[must_use]
    pub fn deaths(&self) -> u64 {
        self.done().deaths.len() as u64
    }

    /// Bytes of the files of the disk cache.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        files_in(&self.disk).iter().filter_map(|file| fs::metadata(file).ok()).map(|metadata| metadata.len()).sum()
    }

    /// Whether a worker was disturbed at some time between these.
    #[must_use]
    pub fn overlap(&self, from: Instant, to: Instant) -> bool {
        let done = self.done();
        done.spans.iter().rev().any(|(begin, end)| *begin <= to && end.is_none_or(|end| from <= end))
    }

    /// Disturbs one worker after the other, as the requests advance, until it is told to stop.
    pub(super) async fn disturb_workers(self: Arc<Self>, run: Arc<Run>, stop: watch::Receiver<bool>) -> Result<()> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 1);
        let count = (self.requests / REQUESTS_BETWEEN).clamp(3, MAX_WORKER_FAULTS);
        let every = self.requests / (count + 1);
        // In the order in which they were started, which is theirs for as long as it is kept here.
        let mut workers: Vec<u32> = processes::children(self.front).into_iter().collect();
        ensure!(workers.len() == WORKERS as usize, "{WORKERS} workers were asked for, and there are {workers:?}");
        for number in 1..=count {
            while run.sent() < number * every && !*stop.borrow() {
                sleep(POLL).await;
            }
            // One of each in any case, however quick the requests are.
            if *stop.borrow() && number > 2 {
                return Ok(());
            }
            let worker = rng.random_range(0..workers.len());
            let last_part = run.sent() * PARTS >= self.requests * (PARTS - 1);
            let fault = self.choose(&mut rng, number, worker, last_part);
            self.disturb(&mut rng, fault, worker, &mut workers).await?;
        }
        Ok(())
    }

    fn choose(&self, rng: &mut StdRng, number: u64, worker: usize, last_part: bool) -> Fault {
        let now = Instant::now();
        let recent = |death: &&(usize, Instant)| death.0 == worker && now - death.1 < DEATHS_WINDOW;
        if self.done().deaths.iter().filter(recent).count() >= MAX_DEATHS {
            return Fault::Pause;
        }
        match rng.random_range(0..10) {
            // The first two are one of each, however few there are.
            _ if number == 1 => Fault::Kill,
            _ if number == 2 || last_part => Fault::Pause,
            0 if self.requests >= MIN_REQUESTS_FOR_HANGS => Fault::Hang,
            0..5 => Fault::Kill,
            _ => Fault::Pause,
        }
    }

    async fn disturb(&self, rng: &mut StdRng, fault: Fault, worker: usize, workers: &mut [u32]) -> Result<()> {
        let pid = workers[worker];
        let before = figures(self.address).await?;
        {
            let mut done = self.done();
            done.spans.push((Instant::now(), None));
            *done.counts.entry(fault).or_default() += 1;
            if fault.is_death() {
                done.deaths.push((worker, Instant::now()));
            }
        }
        match fault {
            Fault::Kill => processes::signal(pid, "KILL")?,
            _ => processes::signal(pid, "STOP")?,
        }
        let standing = (fault != Fault::Kill).then(|| Standing(pid));
        if fault == Fault::Pause {
            sleep(Duration::from_millis(rng.random_range(PAUSE_MS))).await;
            drop(standing);
            self.recovered(|now| now.restarts == before.restarts).await?;
        } else {
            self.recovered(|now| now.restarts > before.restarts).await?;
            let fresh = processes::children(self.front).into_iter().find(|pid| !workers.contains(pid));
            workers[worker] = fresh.ok_or_else(|| anyhow::anyhow!("a worker that died has no successor"))?;
        }
        if let Some(last) = self.done().spans.last_mut() {
            last.1 = Some(Instant::now());
        }
        Ok(())
    }

    /// Waits until all workers get requests again.
    async fn recovered(&self, is_over: impl Fn(&Figures) -> bool) -> Result<()> {
        let begun = Instant::now();
        loop {
            let now = figures(self.address).await?;
            if is_over(&now) && now.dispatchable == u64::from(WORKERS) {
                return Ok(());
            }
            ensure!(begun.elapsed() < RECOVERY_LIMIT, "the server has not recovered after {RECOVERY_LIMIT:?}: {now:?}");
            sleep(POLL).await;
        }
    }

    /// Damages one file after the other, until it is told to stop.
    pub(super) async fn damage_files(self: Arc<Self>, mut stop: watch::Receiver<bool>) -> Result<()> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ 2);
        loop {
            let pause = sleep(Duration::from_millis(rng.random_range(BETWEEN_FILES_MS)));
            tokio::select! {
                () = pause => {}
                // Whoever told is gone when all is over, too.
                _ = stop.wait_for(|stop| *stop) => return Ok(()),
            }
            let files = files_in(&self.disk);
            let Some(file) = files.choose(&mut rng) else { continue };
            let fault = Fault::FILES.choose_weighted(&mut rng, |fault| fault.1).map_or(Fault::Remove, |fault| fault.0);
            // The server may have removed it, or be about to: then there is nothing to damage.
            if damage(file, fault, &mut rng).is_ok() {
                *self.done().counts.entry(fault).or_default() += 1;
            }
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.counts();
        let of = |fault| counts.get(&fault).copied().unwrap_or_default();
        let files: u64 = Fault::FILES.iter().map(|(fault, _)| of(*fault)).sum();
        write!(f, "kills {} pauses {} hangs {} files {files}", of(Fault::Kill), of(Fault::Pause), of(Fault::Hang))
    }
}

/// The files of the disk cache: a folder for each model.
fn files_in(disk: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries(disk).flat_map(|model| entries(&model).collect::<Vec<_>>()).collect()
}

fn damage(file: &Path, fault: Fault, rng: &mut StdRng) -> std::io::Result<()> {
    let length = fs::metadata(file)?.len();
    match fault {
        Fault::Cut => fs::OpenOptions::new().write(true).open(file)?.set_len(rng.random_range(0..=length)),
        Fault::Flip => {
            let mut bytes = fs::read(file)?;
            if let Some(byte) = bytes.choose_mut(rng) {
                *byte ^= 1 << rng.random_range(0..8);
            }
            // In place, as a disk does it, and not as a new file.
            fs::OpenOptions::new()
                .write(true)
                .open(file)
                .and_then(|mut open| std::io::Write::write_all(&mut open, &bytes))
        }
        Fault::Overwrite => fs::write(file, vec![rng.random::<u8>(); usize::try_from(length).unwrap_or_default()]),
        Fault::RemoveAll => file.parent().map_or(Ok(()), fs::remove_dir_all),
        _ => fs::remove_file(file),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_fault_excuses_those_that_were_on_their_way() {
        let faults = Faults::new(([127, 0, 0, 1], 1).into(), 1, PathBuf::new(), 7, 100);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        faults.done().spans.extend([(at(10), Some(at(20))), (at(50), None)]);
        let excused = [(0, 9), (0, 10), (15, 16), (20, 30), (21, 49), (21, 50), (60, 70)];
        let overlaps = excused.map(|(from, to)| faults.overlap(at(from), at(to)));
        assert_eq!(overlaps, [false, true, true, true, false, true, true]);
    }

    #[test]
    fn no_worker_is_lost_in_the_last_part() {
        let faults = Faults::new(([127, 0, 0, 1], 1).into(), 1, PathBuf::new(), 7, 20_000);
        let mut rng = StdRng::seed_from_u64(3);
        let mut deaths =
            |last_part| (3..100).filter(|number| faults.choose(&mut rng, *number, 0, last_part).is_death()).count();
        assert!(deaths(false) > 0);
        assert_eq!(deaths(true), 0);
    }

    #[test]
    fn damage_is_damage() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        let mut rng = StdRng::seed_from_u64(3);
        for (fault, is_there, length) in [
            (Fault::Flip, true, Some(100)),
            (Fault::Overwrite, true, Some(100)),
            (Fault::Cut, true, None),
            (Fault::Remove, false, None),
            (Fault::RemoveAll, false, None),
        ] {
            fs::create_dir_all(&model).unwrap();
            let file = model.join("block.kv");
            fs::write(&file, [1; 100]).unwrap();
            assert_eq!(files_in(folder.path()), [file.as_path()]);
            damage(&file, fault, &mut rng).unwrap();
            let left = fs::read(&file).ok();
            assert_eq!(left.is_some(), is_there, "{fault:?}");
            assert!(left.as_deref() != Some(&[1; 100]), "{fault:?}");
            assert!(length.is_none() || left.map(|left| left.len()) == length, "{fault:?}");
        }
    }
}
