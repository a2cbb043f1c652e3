//! The figures of a run, from what came back of its requests.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    client::Outcome,
    stats::{median, percentile, sorted},
};

/// Errors that a run tells in full.
const ERRORS_SHOWN: usize = 3;

/// What came of a run.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// The figures, by name.
    pub figures: BTreeMap<String, f64>,
    /// Times to the first text, in milliseconds.
    pub ttft_ms: Vec<f64>,
    /// Times between the events of a stream, in milliseconds.
    pub itl_ms: Vec<f64>,
    /// Some of what failed.
    pub errors: Vec<String>,
}

impl Run {
    fn set(&mut self, name: &str, value: impl Into<Option<f64>>) {
        if let Some(value) = value.into().filter(|value| value.is_finite()) {
            self.figures.insert(name.to_owned(), value);
        }
    }

    /// Of streams that ran beside each other; every answer is to have `tokens` tokens, or any number where that is 0.
    #[must_use]
    pub fn of_closed(outcomes: &[Outcome], tokens: u32) -> Self {
        let mut run = Self::of(outcomes, tokens);
        run.set("decode_tokens_per_s", decode_rate(outcomes));
        run
    }

    /// The figures that every way of loading has. An answer of another length than `tokens` has failed.
    fn of(outcomes: &[Outcome], tokens: u32) -> Self {
        let mut run = Self {
            ttft_ms: sorted(outcomes.iter().filter_map(Outcome::ttft_ms)),
            itl_ms: sorted(outcomes.iter().flat_map(|outcome| outcome.gaps_ms().map(|(_, gap)| gap))),
            ..Self::default()
        };
        let failures = outcomes.iter().filter_map(|outcome| failure(outcome, tokens));
        let failed = failures.clone().count();
        run.errors = failures.take(ERRORS_SHOWN).collect();
        let begun = outcomes.iter().map(|outcome| outcome.sent_s).fold(f64::INFINITY, f64::min);
        let wall_s = outcomes.iter().map(|outcome| outcome.ended_s).fold(0.0, f64::max) - begun;
        let sum = |of: fn(&Outcome) -> u64| precise(outcomes.iter().map(of).sum());
        let tokens = sum(tokens_of);
        run.set("requests", precise(outcomes.len() as u64));
        run.set("failed", precise(failed as u64));
        run.set("wall_s", wall_s);
        run.set("tokens", tokens);
        run.set("prompt_tokens", sum(|outcome| outcome.prompt_tokens));
        run.set("cached_tokens", sum(|outcome| outcome.cached_tokens));
        run.set("tokens_per_s", tokens / wall_s);
        run.set("requests_per_s", precise((outcomes.len() - failed) as u64) / wall_s);
        run.set("ttft_p50_ms", percentile(&run.ttft_ms, 50.0));
        run.set("ttft_p99_ms", percentile(&run.ttft_ms, 99.0));
        run.set("itl_p50_ms", percentile(&run.itl_ms, 50.0));
        run.set("itl_p99_ms", percentile(&run.itl_ms, 99.0));
        run.set("gap_max_ms", percentile(&run.itl_ms, 100.0));
        run
    }

    /// Of `count` streams that went on, with all their requests, and the one that came among them. `readyz_max`: the longest that
    /// an answer of `/readyz` took meanwhile, where there is one.
    #[must_use]
    pub fn of_intruder(
        victims: Vec<Outcome>,
        intruder: Outcome,
        count: usize,
        tokens: u32,
        readyz_max: Option<Duration>,
    ) -> Self {
        // All of them run once the last of them has its first text.
        let running_s = sorted(victims.iter().filter_map(|victim| victim.events_s.first().copied()))
            .get(count.saturating_sub(1))
            .copied()
            .unwrap_or(f64::INFINITY);
        let begun_s = intruder.sent_s;
        let ended_s = intruder.events_s.first().copied().unwrap_or(intruder.ended_s);
        let gaps: Vec<(f64, f64)> = victims.iter().flat_map(Outcome::gaps_ms).collect();
        let idle = sorted(gaps.iter().filter(|(at_s, _)| (running_s..begun_s).contains(at_s)).map(|(_, gap)| *gap));
        let during = sorted(
            gaps.iter().filter(|(at_s, gap)| *at_s > begun_s && at_s - gap / 1e3 < ended_s).map(|(_, gap)| *gap),
        );
        let intruder_ttft_ms = intruder.ttft_ms();
        let failed =
            failure(&intruder, tokens).into_iter().chain(victims.iter().filter_map(|victim| victim.error.clone()));
        let errors: Vec<String> = failed.collect();
        let everyone: Vec<Outcome> = victims.into_iter().chain([intruder]).collect();
        let mut run = Self::of(&everyone, 0);
        run.set("failed", precise(errors.len() as u64));
        run.errors = errors.into_iter().take(ERRORS_SHOWN).collect();
        let idle_itl_ms = percentile(&idle, 50.0);
        let victims_itl_p99_ms = percentile(&during, 99.0);
        run.set("idle_itl_p50_ms", idle_itl_ms);
        run.set("idle_itl_p99_ms", percentile(&idle, 99.0));
        run.set("victims_itl_p50_ms", percentile(&during, 50.0));
        run.set("victims_itl_p99_ms", victims_itl_p99_ms);
        run.set("victims_slowdown", victims_itl_p99_ms.zip(idle_itl_ms).map(|(during, idle)| during / idle));
        run.set("victims_gap_max_s", percentile(&during, 100.0).map(|gap| gap / 1e3));
        run.set("intruder_ttft_ms", intruder_ttft_ms);
        run.set("readyz_max_ms", readyz_max.map(|took| took.as_secs_f64() * 1e3));
        run.itl_ms = during;
        run
    }

    /// Of clients that stayed, clients that left in mid-stream, and those that came when these left.
    #[must_use]
    pub fn of_leaving(
        stayers: &[Outcome],
        leavers: &[Outcome],
        newcomers: &[Outcome],
        tokens: u32,
        newcomer_tokens: u32,
    ) -> Self {
        let everyone: Vec<Outcome> = [stayers, leavers, newcomers].concat();
        let mut run = Self::of(&everyone, 0);
        let lost: Vec<String> = stayers.iter().filter_map(|stayer| failure(stayer, tokens)).collect();
        let refused = newcomers.iter().filter_map(|newcomer| failure(newcomer, newcomer_tokens));
        let unwilling = leavers.iter().filter(|leaver| !leaver.left).map(|leaver| {
            format!("a client could not leave: {}", leaver.error.as_deref().unwrap_or("its answer ended before"))
        });
        run.set("stayers_lost", precise(lost.len() as u64));
        let errors: Vec<String> = lost.into_iter().chain(refused).chain(unwilling).collect();
        run.set("failed", precise(errors.len() as u64));
        run.errors = errors.into_iter().take(ERRORS_SHOWN).collect();
        run.set("newcomer_ttft_p50_ms", median(newcomers.iter().filter_map(Outcome::ttft_ms)));
        run.set(
            "newcomer_ttft_steps",
            median(newcomers.iter().filter_map(|newcomer| steps_to_first(newcomer, stayers))),
        );
        run
    }
}

/// How many steps of those who streamed all the while passed from a request to its first text, a part of a step counting
/// as that part. Steps differ in length, so that none of them is a measure for the others.
fn steps_to_first(newcomer: &Outcome, stayers: &[Outcome]) -> Option<f64> {
    let (from, to) = (newcomer.sent_s, *newcomer.events_s.first()?);
    let streams = |stayer: &&Outcome| {
        stayer.events_s.first().is_some_and(|first| *first <= from)
            && stayer.events_s.last().is_some_and(|last| *last >= to)
    };
    median(stayers.iter().filter(streams).map(|stayer| {
        let part =
            |pair: &[f64]| (pair[1].min(to) - pair[0].max(from)).max(0.0) / (pair[1] - pair[0]).max(f64::MIN_POSITIVE);
        stayer.events_s.windows(2).map(part).sum()
    }))
}

/// Tokens per second of all streams together while all of them decode.
fn decode_rate(outcomes: &[Outcome]) -> Option<f64> {
    let begin = outcomes
        .iter()
        .map(|outcome| outcome.events_s.first().copied())
        .try_fold(0.0, |begin, first| Some(f64::max(begin, first?)))?;
    let end = outcomes
        .iter()
        .map(|outcome| outcome.events_s.last().copied())
        .try_fold(f64::INFINITY, |end, last| Some(f64::min(end, last?)))?;
    let inside = outcomes.iter().flat_map(|outcome| &outcome.events_s).filter(|&&at| at > begin && at <= end).count();
    (end > begin).then(|| precise(inside as u64) / (end - begin))
}

/// What is wrong with an answer; `tokens` is its right length, 0 any.
fn failure(outcome: &Outcome, tokens: u32) -> Option<String> {
    if outcome.error.is_some() || outcome.left {
        return outcome.error.clone();
    }
    (tokens != 0 && outcome.completion_tokens != u64::from(tokens))
        .then(|| format!("an answer of {} tokens instead of {tokens}", outcome.completion_tokens))
}

/// Tokens of an answer; of one that was left, those that were seen.
fn tokens_of(outcome: &Outcome) -> u64 {
    outcome.completion_tokens.max(outcome.events_s.len() as u64)
}

#[allow(clippy::cast_precision_loss)]
fn precise(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::slice::from_ref;

    use super::*;

    fn outcome(sent_s: f64, events_s: &[f64]) -> Outcome {
        Outcome {
            sent_s,
            events_s: events_s.to_vec(),
            ended_s: *events_s.last().unwrap(),
            prompt_tokens: 10,
            completion_tokens: events_s.len() as u64,
            ..Outcome::default()
        }
    }

    #[test]
    fn figures_are_of_all_streams() {
        let outcomes = [outcome(0.0, &[0.5, 1.0, 1.5]), outcome(0.1, &[1.1, 1.3, 2.1]), outcome(0.1, &[0.2])];
        let run = Run::of(&outcomes, 3);
        let figure = |name: &str| (run.figures[name] * 1e6).round() / 1e6;
        assert_eq!((figure("requests"), figure("failed"), figure("tokens"), figure("wall_s")), (3.0, 1.0, 7.0, 2.1));
        assert_eq!((figure("ttft_p50_ms"), figure("gap_max_ms"), figure("itl_p50_ms")), (500.0, 800.0, 500.0));
        assert_eq!(run.errors, ["an answer of 1 tokens instead of 3"]);
    }

    #[test]
    fn the_decode_rate_counts_only_while_all_decode() {
        let outcomes = [outcome(0.0, &[1.0, 2.0, 3.0, 4.0, 5.0]), outcome(0.0, &[2.0, 3.0, 4.0])];
        assert_eq!(decode_rate(&outcomes), Some(2.0));
        assert_eq!(decode_rate(&[Outcome::default()]), None);
    }

    #[test]
    fn victims_are_judged_by_the_time_of_the_intruder() {
        let victim = outcome(0.0, &[0.1, 0.2, 0.3, 0.4, 1.4, 1.5, 1.6]);
        let intruder = outcome(0.45, &[1.45]);
        let run = Run::of_intruder(vec![victim], intruder, 1, 1, Some(Duration::from_millis(7)));
        let figure = |name: &str| (run.figures[name] * 1e6).round() / 1e6;
        assert_eq!(
            (figure("idle_itl_p50_ms"), figure("victims_gap_max_s"), figure("intruder_ttft_ms")),
            (100.0, 1.0, 1000.0)
        );
        assert_eq!((figure("victims_slowdown"), figure("failed"), figure("readyz_max_ms")), (10.0, 0.0, 7.0));
    }

    #[test]
    fn whoever_stays_loses_nothing() {
        let leaver = Outcome { left: true, ..outcome(0.0, &[0.1]) };
        let newcomer = outcome(0.15, &[0.3]);
        // Half of a step, and one that took twice as long; one who ended before says nothing.
        let stayers = [outcome(0.0, &[0.1, 0.2, 0.4]), outcome(0.0, &[0.1, 0.11, 0.12])];
        let run = Run::of_leaving(&stayers, from_ref(&leaver), from_ref(&newcomer), 3, 1);
        let figure = |name: &str| (run.figures[name] * 1e6).round() / 1e6;
        assert_eq!((figure("stayers_lost"), figure("failed"), figure("newcomer_ttft_steps")), (0.0, 0.0, 1.0));
        let run = Run::of_leaving(&[outcome(0.0, &[0.1, 0.2])], &[leaver], &[newcomer], 3, 1);
        assert_eq!((run.figures["stayers_lost"], run.figures["failed"]), (1.0, 1.0));
    }
}
