//! How a version does with what it is asked: the requests that ended lately, and whether their figures pass limits.
//!
//! Kept by the front for each version, judged by whoever watches it after a switch ([`crate::rollout`]). What is a client's own
//! doing (a refusal, leaving early) is no figure. Absent: texts, of which only is known whether they repeat themselves.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gantry_crds::status::BreachStatus;

/// Requests that are remembered at most; of more, the oldest are forgotten before their time.
pub const SAMPLES_MAX: usize = 4_096;

/// How one request went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// It failed, and not by its own fault.
    pub failed: bool,
    /// How long its client waited for the first token of it.
    pub first_token: Option<Duration>,
    /// The mean time of each further token, where there were any.
    pub per_token: Option<Duration>,
    /// Its text repeats itself.
    pub degenerate: bool,
}

/// The requests of a version that ended lately.
#[derive(Debug, Default)]
pub struct Signals(Mutex<VecDeque<(Instant, Sample)>>);

/// What a version's figures may be. What is `None` is not looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SignalLimits {
    /// The largest share of requests that fail.
    pub error_rate: Option<f64>,
    /// The longest 95th percentile of the time to the first token.
    pub ttft_p95: Option<Duration>,
    /// The longest 95th percentile of the mean time of an answer's further tokens.
    pub tpot_p95: Option<Duration>,
    /// The largest share of answers that are degenerate.
    pub degenerate_output_rate: Option<f64>,
    /// The most by which either percentile may be above that of the version before, as a factor.
    pub regression: Option<f64>,
    /// Requests that ended before this time are not looked at.
    pub window: Duration,
    /// With fewer requests than this nothing is said.
    pub min_samples: usize,
}

/// What figures are of so many requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Requests.
    pub samples: usize,
    /// Share of them that failed.
    pub error_rate: f64,
    /// See [`SignalLimits::ttft_p95`]; `None` where none was measured.
    pub ttft_p95: Option<Duration>,
    /// See [`SignalLimits::tpot_p95`]; likewise.
    pub tpot_p95: Option<Duration>,
    /// Share of the answers that are degenerate.
    pub degenerate_output_rate: f64,
}

impl Signals {
    /// A request ended.
    pub fn ended(&self, sample: Sample, now: Instant) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() == SAMPLES_MAX {
            samples.pop_front();
        }
        samples.push_back((now, sample));
    }

    /// How long ago the first of the last so many requests ended; `None`: there were not so many.
    #[must_use]
    pub fn time_of(&self, count: usize, now: Instant) -> Option<Duration> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = samples.len().checked_sub(count.max(1))?;
        samples.get(first).map(|(at, _)| now.saturating_duration_since(*at))
    }

    /// The figures of the requests that ended within `window` before `now`.
    #[must_use]
    pub fn figures(&self, window: Duration, now: Instant) -> Figures {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lately: Vec<Sample> = samples
            .iter()
            .filter(|(at, _)| now.saturating_duration_since(*at) <= window)
            .map(|(_, sample)| *sample)
            .collect();
        drop(samples);
        let share = |count: usize| if lately.is_empty() { 0.0 } else { count as f64 / lately.len() as f64 };
        Figures {
            samples: lately.len(),
            error_rate: share(lately.iter().filter(|sample| sample.failed).count()),
            ttft_p95: p95(lately.iter().filter_map(|sample| sample.first_token)),
            tpot_p95: p95(lately.iter().filter_map(|sample| sample.per_token)),
            degenerate_output_rate: share(lately.iter().filter(|sample| sample.degenerate).count()),
        }
    }
}

/// The 95th percentile by the nearest rank.
fn p95(times: impl Iterator<Item = Duration>) -> Option<Duration> {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let rank = (times.len() * 95).div_ceil(100);
    times.get(rank.checked_sub(1)?).copied()
}

impl SignalLimits {
    /// The time by whose requests a version is judged that answers a share of them, since `watched_for`: the window or, where few
    /// came, as far back as it takes for enough.
    #[must_use]
    pub fn window_of(&self, signals: &Signals, watched_for: Duration, now: Instant) -> Duration {
        let of_enough = signals.time_of(self.min_samples, now).unwrap_or(watched_for);
        of_enough.max(self.window).min(watched_for)
    }

    /// Whether there are enough requests to say anything.
    #[must_use]
    pub fn can_judge(&self, figures: &Figures) -> bool {
        figures.samples >= self.min_samples.max(1)
    }

    /// The first figure that passes its limit. `before`: of the version that answered before, where there are enough. Times are
    /// judged only of a `whole_window`: the first requests find caches empty, and another version ends its answers beside them.
    #[must_use]
    pub fn breach(&self, figures: &Figures, before: Option<&Figures>, whole_window: bool) -> Option<BreachStatus> {
        if !self.can_judge(figures) {
            return None;
        }
        let before = before.filter(|before| self.can_judge(before));
        let breach = |signal: &str, value, limit| BreachStatus {
            signal: signal.to_owned(),
            value,
            limit,
            samples: i64::try_from(figures.samples).unwrap_or(i64::MAX),
        };
        let share = |signal, value: f64, limit: Option<f64>| {
            let limit = limit.filter(|limit| value > *limit)?;
            Some(breach(signal, percent(value), percent(limit)))
        };
        let time = |signal, value: Option<Duration>, limit: Option<Duration>| {
            let (value, limit) = value.zip(limit).filter(|(value, limit)| whole_window && value > limit)?;
            Some(breach(signal, millis(value), millis(limit)))
        };
        let slower = |what, value: Option<Duration>, of_before: fn(&Figures) -> Option<Duration>| {
            let (factor, of_before) = self.regression.filter(|_| whole_window).zip(before.and_then(of_before))?;
            let value = value.filter(|value| value.as_secs_f64() > of_before.as_secs_f64() * factor)?;
            let limit = format!("{factor} times the {} of the version that it takes the place of", millis(of_before));
            Some(breach("regression", format!("{what} {}", millis(value)), limit))
        };
        share("errorRate", figures.error_rate, self.error_rate)
            .or_else(|| share("degenerateOutputRate", figures.degenerate_output_rate, self.degenerate_output_rate))
            .or_else(|| time("ttftP95", figures.ttft_p95, self.ttft_p95))
            .or_else(|| time("tpotP95", figures.tpot_p95, self.tpot_p95))
            .or_else(|| slower("ttftP95", figures.ttft_p95, |before| before.ttft_p95))
            .or_else(|| slower("tpotP95", figures.tpot_p95, |before| before.tpot_p95))
    }
}

fn percent(share: f64) -> String {
    format!("{}%", (share * 1000.0).round() / 10.0)
}

fn millis(time: Duration) -> String {
    format!("{}ms", (time.as_secs_f64() * 10_000.0).round() / 10.0)
}

/// Bytes at the end of a text in which it is looked for a repetition.
const TAIL_BYTES: usize = 256;
/// The longest text that is repeated there.
const PERIOD_MAX: usize = TAIL_BYTES / 4;

/// The end of a text that comes piece by piece.
#[derive(Clone, Debug, Default)]
pub struct Tail(Vec<u8>);

impl Tail {
    /// More of the text.
    pub fn push(&mut self, text: &str) {
        let bytes = text.as_bytes();
        self.0.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
        // Moved once for many pieces.
        if self.0.len() > 4 * TAIL_BYTES {
            self.0.drain(..self.0.len() - TAIL_BYTES);
        }
    }

    /// Whether its last [`TAIL_BYTES`] say the same at least four times over: what a model that has lost its way does to the end.
    #[must_use]
    pub fn repeats_itself(&self) -> bool {
        let Some(tail) = self.0.len().checked_sub(TAIL_BYTES).map(|from| &self.0[from..]) else { return false };
        (1..=PERIOD_MAX).any(|period| tail[period..] == tail[..TAIL_BYTES - period])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn limits() -> SignalLimits {
        SignalLimits { window: ms(60_000), min_samples: 10, ..SignalLimits::default() }
    }

    fn figures_of(samples: impl IntoIterator<Item = Sample>) -> Figures {
        let (signals, now) = (Signals::default(), Instant::now());
        samples.into_iter().for_each(|sample| signals.ended(sample, now));
        signals.figures(ms(60_000), now)
    }

    fn failing(failed: usize, of: usize) -> Figures {
        figures_of((0..of).map(|number| Sample { failed: number < failed, ..Sample::default() }))
    }

    #[test]
    fn a_share_above_its_limit_is_a_breach_once_there_are_enough() {
        let limits = SignalLimits { error_rate: Some(0.2), ..limits() };
        assert_eq!(limits.breach(&failing(9, 9), None, true), None, "too few to tell");
        assert_eq!(limits.breach(&failing(2, 10), None, true), None, "at the limit");
        let breach = limits.breach(&failing(3, 10), None, true).unwrap();
        let (value, limit) = ("30%".to_owned(), "20%".to_owned());
        let wanted = BreachStatus { signal: "errorRate".to_owned(), value, limit, samples: 10 };
        assert_eq!(breach, wanted);
        assert_eq!(self::limits().breach(&failing(10, 10), None, true), None, "no limit is asked for");
    }

    #[test]
    fn what_was_long_ago_says_nothing_and_no_more_is_kept_than_may_be() {
        let (signals, then) = (Signals::default(), Instant::now());
        for _ in 0..SAMPLES_MAX + 5 {
            signals.ended(Sample { failed: true, ..Sample::default() }, then);
        }
        assert_eq!(signals.figures(ms(10), then + ms(10)).samples, SAMPLES_MAX);
        assert_eq!(signals.figures(ms(10), then + ms(11)), Figures::default());
    }

    #[test]
    fn where_few_requests_came_it_is_looked_further_back_for_enough_of_them() {
        let (limits, signals, began) = (limits(), Signals::default(), Instant::now());
        // One in 20 seconds: ten of them are the last three minutes.
        (0..30).for_each(|number| signals.ended(Sample::default(), began + ms(20_000 * number)));
        let now = began + ms(20_000 * 29);
        assert_eq!(signals.time_of(10, now), Some(ms(180_000)));
        assert_eq!(limits.window_of(&signals, ms(600_000), now), ms(180_000));
        assert_eq!(limits.window_of(&signals, ms(100_000), now), ms(100_000), "not before it was watched");
        assert_eq!(signals.figures(ms(180_000), now).samples, 10);
        assert_eq!(
            (signals.time_of(31, now), limits.window_of(&Signals::default(), ms(90_000), now)),
            (None, ms(90_000))
        );
        // Many: the window.
        (0..30).for_each(|_| signals.ended(Sample::default(), now));
        assert_eq!(limits.window_of(&signals, ms(600_000), now), ms(60_000));
    }

    #[test]
    fn percentiles_are_judged_by_their_limits_and_against_the_version_before() {
        let waits =
            |all: [u64; 20]| figures_of(all.map(|wait| Sample { first_token: Some(ms(wait)), ..Sample::default() }));
        // The 19th of 20 is the 95th percentile.
        let figures = waits([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 100, 900]);
        assert_eq!(figures.ttft_p95, Some(ms(100)));
        let at_most = |most| SignalLimits { ttft_p95: Some(ms(most)), ..limits() };
        assert_eq!(at_most(100).breach(&figures, None, true), None);
        assert_eq!(at_most(99).breach(&figures, None, true).unwrap().value, "100ms");
        assert_eq!(at_most(99).breach(&figures, None, false), None, "it has only begun");
        let factor = |factor| SignalLimits { regression: Some(factor), ..limits() };
        let before = waits([50; 20]);
        assert_eq!(factor(2.0).breach(&figures, Some(&before), true), None);
        let breach = factor(1.5).breach(&figures, Some(&before), true).unwrap();
        assert_eq!((breach.signal.as_str(), breach.value.as_str()), ("regression", "ttftP95 100ms"));
        assert_eq!(factor(1.5).breach(&figures, None, true), None, "nothing to compare it with");
        let few = Figures { samples: 9, ..before };
        assert_eq!(factor(1.5).breach(&figures, Some(&few), true), None, "too little");
    }

    #[test]
    fn a_text_that_says_the_same_again_and_again_is_known_however_its_pieces_come() {
        let tail = |text: &str, piece: usize| {
            let mut tail = Tail::default();
            let chars: Vec<char> = text.chars().collect();
            chars.chunks(piece).for_each(|piece| tail.push(&piece.iter().collect::<String>()));
            tail.repeats_itself()
        };
        let (loops, prose) = ("I am a model. ".repeat(100), include_str!("../../../README.md"));
        for piece in [1, 7, 5_000] {
            assert!(tail(&loops, piece) && tail(&"ä".repeat(2_000), piece), "{piece}");
            assert!(!tail(prose, piece) && !tail("short short short short", piece), "{piece}");
            assert!(tail(&format!("{prose}{loops}"), piece), "it began well: {piece}");
        }
    }
}
