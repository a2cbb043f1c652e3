//! How far the load of a worker is, and when it will be done: by what the last load took, and by the share that is read.

use std::time::{Duration, Instant};

/// Below this share of the file what is left cannot be told from it.
const LEAST_SHARE: f32 = 0.05;

/// One worker's loads.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadClock {
    /// When the one that is going on began, or will; `None` while there is none.
    began: Option<Instant>,
    /// The share of the file that is read.
    share: f32,
    /// What the last one took that succeeded.
    last: Option<Duration>,
}

impl LoadClock {
    /// A load begins at this time.
    pub(crate) fn begin(&mut self, at: Instant) {
        (self.began, self.share) = (Some(at), 0.0);
    }

    /// So much of the file is read.
    pub(crate) fn read(&mut self, share: f32) {
        self.share = share;
    }

    /// The share of the file that is read.
    pub(crate) fn share(&self) -> f32 {
        self.share
    }

    /// The model is loaded.
    pub(crate) fn finish(&mut self, now: Instant) {
        if let Some(began) = self.began.take() {
            self.last = Some(now.saturating_duration_since(began));
        }
    }

    /// What the last one took that succeeded.
    pub(crate) fn last(&self) -> Option<Duration> {
        self.last
    }

    /// How long until the load that is going on is done, as far as can be told. `None`: there is none.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        let began = self.began?;
        let until_it_begins = began.saturating_duration_since(now);
        let elapsed = now.saturating_duration_since(began);
        let by_the_last = self.last.and_then(|last| last.checked_sub(elapsed));
        // One that takes longer than the last, or is the first, and has read nothing yet, is taken for half done.
        let by_the_share =
            if self.share >= LEAST_SHARE { elapsed.mul_f32((1.0 - self.share.min(1.0)) / self.share) } else { elapsed };
        Some(until_it_begins + by_the_last.unwrap_or(by_the_share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_follows_from_the_last_load_and_from_the_share_that_is_read() {
        let (mut clock, start) = (LoadClock::default(), Instant::now());
        let after = |s: u64| start + Duration::from_secs(s);
        let seconds = |clock: &LoadClock, s: u64| clock.left(after(s)).map(|left| left.as_secs_f32().round());
        assert_eq!(seconds(&clock, 0), None);
        clock.begin(start);
        assert_eq!(seconds(&clock, 3), Some(3.0), "nothing is known: half done");
        clock.read(0.25);
        assert_eq!(seconds(&clock, 10), Some(30.0));
        clock.finish(after(40));
        assert_eq!(seconds(&clock, 41), None);
        clock.begin(after(100));
        assert_eq!(seconds(&clock, 90), Some(50.0), "it begins in 10 s, and takes 40");
        clock.read(0.5);
        assert_eq!(seconds(&clock, 110), Some(30.0), "what it took is surer than what is read");
        assert_eq!(seconds(&clock, 150), Some(50.0), "it takes longer this time");
    }
}
