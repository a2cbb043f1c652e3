//! Which requests a worker may have died of, and which ones it did: a bounded memory of digests.
//!
//! A worker's death makes every request that it was working on a suspect: it is run again once, and by itself
//! ([`Room`](super::room::Room) sees to that). Where it then comes as far as it was before, it and everyone who asks the same
//! is cleared; where the worker dies again with nothing else begun, it is convicted, and the same request sent again is
//! refused without being run. One whose client has text of it is tried for nobody, and only while its death is unexplained. Both are forgotten after [`SUSPECT_MEMORY`]. What a request says is not kept: a digest is a hash of
//! its contents under keys that this process drew and tells nobody.
//!
//! A death for which there are suspects is no crash as long as one of them may have been its cause, and never one when that
//! one is convicted; when all are cleared it counts after all ([`Suspects::unexplained`]), or a machine that kills workers
//! at random would never be called failed. Absent: requests, queues, processes.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::io;
use std::time::Instant;

use gantry_engine::{GenerationParams, Priority, Turn};
use serde::Serialize;

use super::request::{GenerateRequest, PoolRequest};
use crate::limits::{CONTROL_AFTER_CONVICTIONS, MAX_OPEN_DEATHS, MAX_SUSPECT_DIGESTS, SUSPECT_MEMORY};

/// Names what a request asks, whoever asks it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Digest([u64; 2]);

/// What is known of a request's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing.
    Clear,
    /// A worker died while it worked on them.
    Suspected {
        /// What had come of it by then, in tokens or vectors: some past that it is cleared.
        reached: u64,
        /// It is being tried: who asks the same waits for how that ends.
        on_trial: bool,
    },
    /// A worker died of them.
    Convicted,
}

/// What becomes of a request whose worker died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It merely waited there, and goes back to where it was.
    Waits,
    /// It is run again, by itself.
    Tried,
    /// Its client has text of it, and is told that its worker died. It is run again all the same, by itself and for nobody: what one
    /// worker after the other dies of would else be taken for a fault of the model.
    TriedUnheard,
    /// It ends with its worker: it was run again already, and not alone, or its client has text of it and the worker was not working
    /// on it.
    Ends,
    /// The worker died of it.
    Convicted,
}

/// A request at its worker's death.
#[derive(Clone, Copy, Debug)]
pub(super) struct AtDeath {
    /// The worker was working on it,
    pub(super) begun: bool,
    /// and on nothing else.
    pub(super) alone: bool,
    /// It was run again because it is suspect.
    pub(super) tried: bool,
    /// Its client has had some of the answer, or may have.
    pub(super) told_output: bool,
}

impl AtDeath {
    pub(super) fn fate(self) -> Fate {
        match self {
            Self { begun: false, told_output: false, .. } => Fate::Waits,
            Self { begun: true, tried: true, alone: true, .. } => Fate::Convicted,
            Self { told_output: false, tried: false, .. } => Fate::Tried,
            Self { begun: true, tried: false, .. } => Fate::TriedUnheard,
            _ => Fate::Ends,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Suspicion {
    reached: u64,
    on_trial: bool,
    since: Instant,
}

/// A death that has suspects which have not been tried.
struct Death {
    worker: usize,
    at: Instant,
    open: BTreeSet<Digest>,
}

/// What digests are made with.
pub(super) struct DigestKeys([RandomState; 2]);

impl Default for DigestKeys {
    fn default() -> Self {
        Self([RandomState::new(), RandomState::new()])
    }
}

impl DigestKeys {
    /// Of what a request for text asks: not of its seed, its priority, its turn and how long it may wait, which change nothing that a
    /// worker could die of; several answers to one request are the same.
    pub(super) fn of_text(&self, request: &GenerateRequest) -> Digest {
        let mut params = request.params.clone();
        let GenerationParams { seed, priority, turn, queue_timeout_ms, .. } = &mut params;
        (*seed, *priority, *turn, *queue_timeout_ms) = (None, Priority::default(), Turn::default(), None);
        self.of(&(&*request.prompt, &params))
    }

    /// Of what a request for vectors or scores asks.
    pub(super) fn of_texts(&self, request: &PoolRequest) -> Digest {
        self.of(&request.work)
    }

    fn of(&self, contents: &impl Serialize) -> Digest {
        let mut hashers = Hashers(self.0.each_ref().map(BuildHasher::build_hasher));
        // What is hashed serialises, and a hasher takes everything.
        let _ = postcard::to_io(contents, &mut hashers);
        Digest(hashers.0.each_ref().map(Hasher::finish))
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Suspects {
    suspected: HashMap<Digest, Suspicion>,
    convicted: HashMap<Digest, Instant>,
    deaths: Vec<Death>,
    /// Deaths whose suspects were all cleared: whose they were, and when.
    unexplained: Vec<(usize, Instant)>,
    /// Convictions since something was answered.
    in_a_row: u32,
    /// Counts verdicts, for who waits for one.
    verdicts: u64,
}

impl Suspects {
    pub(super) fn standing(&self, digest: Digest, now: Instant) -> Standing {
        if self.convicted.get(&digest).is_some_and(|since| is_kept(*since, now)) {
            return Standing::Convicted;
        }
        match self.suspected.get(&digest) {
            Some(Suspicion { reached, on_trial, since }) if is_kept(*since, now) => {
                Standing::Suspected { reached: *reached, on_trial: *on_trial }
            }
            _ => Standing::Clear,
        }
    }

    /// A worker died while it worked on these, of which so much had come. Those that are to be `tried` may have been the cause.
    pub(super) fn died(
        &mut self,
        worker: usize,
        begun: impl Iterator<Item = (Digest, u64)>,
        tried: BTreeSet<Digest>,
        now: Instant,
    ) {
        self.forget_old(now);
        for (digest, reached) in begun {
            let before = self.suspected.get(&digest).map_or(0, |suspicion| suspicion.reached);
            let suspicion = Suspicion { reached: reached.max(before), on_trial: false, since: now };
            self.suspected.insert(digest, suspicion);
        }
        while self.suspected.len() > MAX_SUSPECT_DIGESTS {
            let Some(oldest) = self.suspected.iter().min_by_key(|(_, suspicion)| suspicion.since) else { break };
            let digest = *oldest.0;
            self.acquit(digest);
        }
        if !tried.is_empty() {
            if self.deaths.len() == MAX_OPEN_DEATHS {
                let oldest = self.deaths.remove(0);
                self.unexplained.push((oldest.worker, oldest.at));
            }
            self.deaths.push(Death { worker, at: now, open: tried });
        }
        self.drop_excess();
    }

    /// Whether a death is still to be explained of which it may be the cause.
    pub(super) fn is_open(&self, digest: Digest) -> bool {
        self.deaths.iter().any(|death| death.open.contains(&digest))
    }

    /// Deaths that are still to be explained.
    pub(super) fn open_deaths(&self) -> usize {
        self.deaths.len()
    }

    /// A suspect is run by itself.
    pub(super) fn begin_trial(&mut self, digest: Digest) {
        if let Some(suspicion) = self.suspected.get_mut(&digest) {
            suspicion.on_trial = true;
        }
    }

    /// That ended with nothing known: its client left, say.
    pub(super) fn end_trial(&mut self, digest: Digest) {
        if let Some(suspicion) = self.suspected.get_mut(&digest) {
            suspicion.on_trial = false;
            self.verdicts += 1;
        }
    }

    /// Nothing is held against it any more.
    pub(super) fn acquit(&mut self, digest: Digest) {
        if self.suspected.remove(&digest).is_none() {
            return;
        }
        self.verdicts += 1;
        let unexplained = &mut self.unexplained;
        self.deaths.retain_mut(|death| {
            if death.open.remove(&digest) && death.open.is_empty() {
                unexplained.push((death.worker, death.at));
                return false;
            }
            true
        });
        self.drop_excess();
    }

    fn drop_excess(&mut self) {
        let excess = self.unexplained.len().saturating_sub(MAX_OPEN_DEATHS);
        self.unexplained.drain(..excess);
    }

    /// A worker died of it, and so did those before whose suspect it was.
    pub(super) fn convict(&mut self, digest: Digest, now: Instant) {
        self.forget_old(now);
        self.suspected.remove(&digest);
        self.deaths.retain(|death| !death.open.contains(&digest));
        if self.convicted.len() >= MAX_SUSPECT_DIGESTS
            && let Some(oldest) = self.convicted.iter().min_by_key(|(_, since)| **since).map(|(digest, _)| *digest)
        {
            self.convicted.remove(&oldest);
        }
        self.convicted.insert(digest, now);
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.verdicts += 1;
    }

    /// A worker has answered somebody.
    pub(super) fn answered(&mut self) {
        self.in_a_row = 0;
    }

    /// Whether so many were convicted, and nobody was answered in between, that the model itself may be what kills: before
    /// anybody's request is run, one of the server's own has to be answered.
    pub(super) fn needs_control(&self) -> bool {
        self.in_a_row >= CONTROL_AFTER_CONVICTIONS
    }

    /// When this worker died without a cause, as is known now; each death is told once.
    pub(super) fn unexplained(&mut self, worker: usize) -> Vec<Instant> {
        self.unexplained.extract_if(.., |(whose, _)| *whose == worker).map(|(_, at)| at).collect()
    }

    /// Changes with each verdict.
    pub(super) fn verdicts(&self) -> u64 {
        self.verdicts
    }

    fn forget_old(&mut self, now: Instant) {
        self.convicted.retain(|_, since| is_kept(*since, now));
        let old: Vec<Digest> = self
            .suspected
            .iter()
            .filter(|(_, suspicion)| !is_kept(suspicion.since, now))
            .map(|(digest, _)| *digest)
            .collect();
        old.into_iter().for_each(|digest| self.acquit(digest));
    }
}

fn is_kept(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) < SUSPECT_MEMORY
}

/// Hashes what is written.
struct Hashers([DefaultHasher; 2]);

impl io::Write for Hashers {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.iter_mut().for_each(|hasher| hasher.write(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "suspects_tests.rs"]
mod tests;
