//! How far a fetch is, and how long it will take at the present rate.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::limits::PROGRESS_PERIOD;

/// How far a fetch is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchProgress {
    /// Bytes that are there.
    pub bytes: u64,
    /// Bytes of the file, once the server has said so.
    pub total: Option<u64>,
    /// Time left at the rate of this connection.
    pub eta: Option<Duration>,
    /// Bytes a second of this connection.
    pub bytes_per_second: Option<u64>,
    /// Which file it is, counted from 1, of how many that belong together; 0 where it is one by itself.
    pub part: usize,
    /// How many those are.
    pub parts: usize,
    /// Why nothing moves, the same for every try that fails alike; `None` while bytes come.
    pub note: Option<String>,
    /// Whether the last try, too, brought no byte.
    pub stands_still: bool,
}

/// Reports on one connection.
pub(super) struct Meter<'a> {
    out: &'a watch::Sender<FetchProgress>,
    start: (u64, Instant),
    reported: Instant,
    total: Option<u64>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(out: &'a watch::Sender<FetchProgress>, bytes: u64, total: Option<u64>, now: Instant) -> Self {
        out.send_modify(|progress| {
            (progress.bytes, progress.total, progress.eta) = (bytes, total, None);
            // A connection alone is no progress: why the last try failed stands until bytes come.
            progress.note = progress.note.take().filter(|_| progress.stands_still);
        });
        Self { out, start: (bytes, now), reported: now, total }
    }

    pub(super) fn at(&mut self, bytes: u64, now: Instant) {
        let stood_still = bytes > self.start.0 && self.out.borrow().stands_still;
        if stood_still || now.duration_since(self.reported) >= PROGRESS_PERIOD || self.total == Some(bytes) {
            self.reported = now;
            let (rate, eta) = (rate(self.start, (bytes, now)), eta(self.start, (bytes, now), self.total));
            self.out.send_modify(|progress| {
                (progress.bytes, progress.total, progress.eta) = (bytes, self.total, eta);
                (progress.bytes_per_second, progress.note, progress.stands_still) = (rate, None, false);
            });
        }
    }
}

fn rate(start: (u64, Instant), now: (u64, Instant)) -> Option<u64> {
    let seconds = now.1.duration_since(start.1).as_secs_f64();
    (seconds > 0.0).then(|| (now.0.saturating_sub(start.0) as f64 / seconds) as u64)
}

fn eta(start: (u64, Instant), now: (u64, Instant), total: Option<u64>) -> Option<Duration> {
    let came = now.0.saturating_sub(start.0);
    let left = total?.saturating_sub(now.0);
    let seconds = now.1.duration_since(start.1).as_secs_f64();
    if came == 0 || seconds <= 0.0 {
        return None;
    }
    Duration::try_from_secs_f64(left as f64 * seconds / came as f64).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_rate_of_this_connection() {
        let start = Instant::now();
        let later = start + Duration::from_secs(2);
        assert_eq!(eta((100, start), (300, later), Some(500)), Some(Duration::from_secs(2)));
        assert_eq!(eta((0, start), (500, later), Some(500)), Some(Duration::ZERO));
        assert_eq!(eta((100, start), (100, later), Some(500)), None);
        assert_eq!(eta((0, start), (100, later), None), None);
        assert_eq!((rate((100, start), (300, later)), rate((0, start), (9, start))), (Some(100), None));
    }
}
