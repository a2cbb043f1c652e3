//! How far a fetch is, and how long it will take at the present rate.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::limits::{PROGRESS_MIN_BYTES, PROGRESS_PERIOD, SILENCE_TOLD_AFTER};

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
    /// Whether the last try, too, brought nothing that had not been there before, or nothing comes just now.
    pub stands_still: bool,
    /// The most bytes that were there of the file: what is fetched again up to there is no progress.
    pub furthest: u64,
}

impl FetchProgress {
    /// Nothing moves, for this reason. Gives whether that tells anything new: figures alone do not.
    pub(super) fn stand_still(&mut self, note: &str) -> bool {
        let is_told = self.stands_still && self.note.as_deref().is_some_and(|told| is_same_cause(told, note));
        if !is_told {
            (self.note, self.stands_still) = (Some(note.to_owned()), true);
        }
        !is_told
    }
}

/// Whether two notes differ in their figures alone.
pub(super) fn is_same_cause(one: &str, other: &str) -> bool {
    let words =
        |text: &str| text.split(|c: char| c.is_ascii_digit()).filter(|part| !part.is_empty()).collect::<String>();
    words(one) == words(other)
}

/// Reports on one connection.
pub(super) struct Meter<'a> {
    out: &'a watch::Sender<FetchProgress>,
    start: (u64, Instant),
    /// Bytes that are there.
    bytes: u64,
    /// With so many bytes it goes on, whatever was told before.
    goes_on_at: u64,
    reported: Instant,
    total: Option<u64>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(out: &'a watch::Sender<FetchProgress>, bytes: u64, total: Option<u64>, now: Instant) -> Self {
        let mut furthest = bytes;
        out.send_modify(|progress| {
            (progress.bytes, progress.total, progress.eta) = (bytes, total, None);
            // A connection alone is no progress: why the last try failed stands until bytes come.
            progress.note = progress.note.take().filter(|_| progress.stands_still);
            furthest = furthest.max(progress.furthest);
        });
        Self { out, start: (bytes, now), bytes, goes_on_at: furthest + PROGRESS_MIN_BYTES, reported: now, total }
    }

    pub(super) fn at(&mut self, bytes: u64, now: Instant) {
        self.bytes = bytes;
        let goes_on = bytes >= self.goes_on_at || self.total == Some(bytes);
        let stands_still = self.out.borrow().stands_still;
        let is_over = stands_still && goes_on;
        if is_over || now.duration_since(self.reported) >= PROGRESS_PERIOD || self.total == Some(bytes) {
            self.reported = now;
            let (rate, eta) = (rate(self.start, (bytes, now)), eta(self.start, (bytes, now), self.total));
            self.out.send_modify(|progress| {
                (progress.bytes, progress.total, progress.eta) = (bytes, self.total, eta);
                progress.bytes_per_second = rate;
                if goes_on || !stands_still {
                    (progress.note, progress.stands_still) = (None, false);
                }
            });
        }
    }

    /// Nothing comes any more, which is told until enough has come again.
    pub(super) fn is_silent(&mut self, note: &str) {
        self.goes_on_at = self.goes_on_at.max(self.bytes + PROGRESS_MIN_BYTES);
        self.out.send_if_modified(|progress| {
            progress.bytes = self.bytes;
            progress.stand_still(note)
        });
    }
}

/// What is told of a source of which nothing comes, of an answer of which so many bytes are there.
pub(super) fn silence(address: &str, bytes: u64) -> String {
    let seconds = SILENCE_TOLD_AFTER.as_secs();
    format!(
        "{address} has sent nothing for more than {seconds} s (after {bytes} bytes); look at what is to answer there, or give another \
         address"
    )
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

    /// How far it is, and what is told of it.
    fn told(out: &watch::Sender<FetchProgress>) -> (u64, Option<String>, bool) {
        let progress = out.borrow();
        (progress.bytes, progress.note.clone(), progress.stands_still)
    }

    #[test]
    fn what_is_told_of_a_standstill_is_over_when_more_has_come_than_was_ever_there() {
        const MORE: u64 = PROGRESS_MIN_BYTES;
        let now = Instant::now();
        let note = || Some("half".to_owned());
        let stood = FetchProgress { note: note(), stands_still: true, furthest: 10 * MORE, ..FetchProgress::default() };
        let out = watch::channel(stood).0;
        let mut seen = out.subscribe();
        let mut meter = Meter::new(&out, 0, Some(20 * MORE), now);
        seen.mark_unchanged();
        meter.at(10 * MORE, now);
        assert!(!seen.has_changed().unwrap_or(true), "it has been there before");
        meter.at(11 * MORE - 1, now + PROGRESS_PERIOD);
        assert_eq!(told(&out), (11 * MORE - 1, note(), true));
        meter.at(11 * MORE, now + PROGRESS_PERIOD);
        assert_eq!(told(&out), (11 * MORE, None, false));
        meter.is_silent("silent for 1 s");
        let silent = Some("silent for 1 s".to_owned());
        assert_eq!(told(&out), (11 * MORE, silent.clone(), true));
        seen.mark_unchanged();
        meter.is_silent("silent for 2 s");
        assert!(!seen.has_changed().unwrap_or(true), "figures are no news");
        meter.at(11 * MORE + 1, now + 3 * PROGRESS_PERIOD);
        assert_eq!(told(&out), (11 * MORE + 1, silent, true));
        meter.at(12 * MORE, now + 3 * PROGRESS_PERIOD);
        assert_eq!(told(&out), (12 * MORE, None, false));
        meter.is_silent("silent");
        meter.at(20 * MORE, now + 4 * PROGRESS_PERIOD);
        assert_eq!(told(&out), (20 * MORE, None, false), "all of it is there");
    }
}
