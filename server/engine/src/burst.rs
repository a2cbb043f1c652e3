//! Prompts that come at once are read together, and go on together.
//!
//! A row of the batch costs a step its fixed part only once, so that rows beside each other are cheap up to some number:
//! on a GPU hundreds, on a CPU a dozen. Where more prompts come at once than that, reading them one after the other
//! beside streams of which there is one more after each wins nothing and costs much: the streams' steps bound what is
//! read in one, and each part of a prompt has its own fixed cost. So:
//!
//! 1. *Reading.* As many prompts as can be read in [`BURST_MS`], the oldest first, are read up to their last token, and
//!    then get their first tokens in one step. Few streams may run meanwhile ([`MOST_BESIDE`]): they go on, and bound the
//!    steps as always.
//! 2. *Holding.* Where prompts found no room in it and the streams are so many that further ones are not cheap
//!    ([`ROWS_ENOUGH`]), prompts wait for streams to end, for at most [`HOLD_FACTOR`] times as long as 1. took.
//!
//! Nobody is made to wait for others of another kind: a prompt of a higher priority, one of less than half the length
//! ([`ALIKE`]), one whose deadline comes before the holding ends, and a sequence that gave way and comes back are read as
//! [`crate::plan`] says at any time. A burst always has the oldest prompt, so that none waits for more than one burst and
//! one holding each time that it might have been read.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::budget::StepCost;
use crate::params::Priority;
use crate::plan::Need;

/// The most that a burst may take to read, in ms, but for [`FEW`] more: its first prompt waits that long where it might
/// have waited a step.
pub(crate) const BURST_MS: f64 = 10_000.0;
/// A burst has so many prompts that their rows cost at least so many times what a step costs without any.
const ROWS_WORTH_A_BURST: f64 = 3.0;
/// Rows that cost so many times what a step costs without any: further ones would save at most an eighth of the time.
const ROWS_ENOUGH: f64 = 7.0;
/// Prompts that wait for streams to end do so until these cost less than so many times a step without any.
const ROWS_TOO_FEW: f64 = 3.5;
/// Prompts that have no room in it are read with it all the same if they are one for so many of the others: few streams
/// that come after many waste most of their steps.
const FEW: usize = 3;
/// Streams beside a burst: one for so many of its prompts.
const MOST_BESIDE: usize = 4;
/// Prompts of a burst are at most so many times as long as its oldest, and nobody waits whose prompt is so many times
/// shorter.
const ALIKE: u32 = 2;
/// After a burst prompts wait for its streams at most so many times as long as it took to read.
const HOLD_FACTOR: u32 = 2;

/// What a slot needs, and whose it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asking {
    pub(crate) need: Need,
    /// Its place among the requests, the oldest having the lowest.
    pub(crate) ticket: u64,
    pub(crate) priority: Priority,
    /// It has had its first token.
    pub(crate) started: bool,
    /// Tokens of it that are in the cache.
    pub(crate) read: u32,
    /// When its first token is too late.
    pub(crate) due: Option<Instant>,
}

/// Whether prompts are read as a burst.
#[derive(Debug, Default)]
pub(crate) struct Bursts {
    state: State,
    begun: u64,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    None,
    Reading(Burst),
    Holding {
        burst: Burst,
        until: Instant,
    },
}

#[derive(Debug)]
struct Burst {
    /// The oldest first.
    members: Vec<Member>,
    priority: Priority,
    /// What the oldest had to read.
    tokens: u32,
    began: Instant,
}

#[derive(Debug)]
struct Member {
    ticket: u64,
    /// What it had to read when the burst began.
    tokens: u32,
}

impl Asking {
    fn unread(&self) -> u32 {
        match self.need {
            Need::Decode { .. } => u32::from(!self.started),
            Need::Prefill { remaining, .. } => remaining,
        }
    }

    fn is_reading(&self) -> bool {
        matches!(self.need, Need::Prefill { .. })
    }

    /// The same with so much of its prompt to read.
    fn up_to(&self, remaining: u32) -> Need {
        Need::Prefill { remaining, age: self.ticket, priority: self.priority }
    }
}

impl Burst {
    /// The prompts that are read together, if there are enough of them.
    fn among(asking: &[Asking], cost: StepCost, now: Instant) -> Option<Self> {
        let mut readers: Vec<&Asking> = asking.iter().filter(|a| a.is_reading()).collect();
        readers.sort_unstable_by_key(|a| a.ticket);
        let streams = asking.len() - readers.len();
        let oldest = readers.first()?;
        let (priority, tokens) = (oldest.priority, oldest.unread());
        // One who gave way has streamed before, and goes on as soon as may be.
        let goes_first = |a: &&Asking| a.started || a.priority > priority || a.unread() < tokens / ALIKE;
        if readers.iter().any(goes_first) {
            return None;
        }
        let alike = readers.iter().filter(|a| a.priority == priority && a.unread() <= tokens.saturating_mul(ALIKE));
        let mut burst = Self {
            members: alike.map(|a| Member { ticket: a.ticket, tokens: a.unread() }).collect(),
            priority,
            tokens,
            began: now,
        };
        burst.leave_out(asking, cost, now);
        let rows = f64::from(u32::try_from(burst.members.len()).unwrap_or(u32::MAX));
        let is_worth_it = rows * cost.per_decode_row_ms >= ROWS_WORTH_A_BURST * cost.fixed_ms;
        (burst.members.len() >= 2 && is_worth_it && streams * MOST_BESIDE <= burst.members.len()).then_some(burst)
    }

    /// Leaves out the youngest of which nothing has been read, so many that the others are read in time as far as is known
    /// now: what a token takes may have been learnt meanwhile.
    fn leave_out(&mut self, asking: &[Asking], cost: StepCost, now: Instant) {
        let by_ticket: HashMap<u64, &Asking> = asking.iter().map(|a| (a.ticket, a)).collect();
        // Who is gone waits for nobody.
        self.members.retain(|member| by_ticket.contains_key(&member.ticket));
        let mut ms = now.saturating_duration_since(self.began).as_secs_f64() * 1e3;
        let is_in_time = |member: &&Member| {
            let asking = by_ticket[&member.ticket];
            ms += cost.reading_ms(asking.read, asking.unread());
            ms <= BURST_MS
        };
        let in_time = self.members.iter().take_while(is_in_time).count();
        if self.members.len() <= in_time + in_time / FEW {
            return;
        }
        let mut place = 0;
        self.members.retain(|member| {
            place += 1;
            place <= in_time || by_ticket[&member.ticket].unread() < member.tokens
        });
    }

    fn has(&self, asking: &Asking) -> bool {
        self.members.iter().any(|member| member.ticket == asking.ticket)
    }

    /// Whether one is read at once all the same, where others wait until then.
    fn may_pass(&self, asking: &Asking, until: Instant) -> bool {
        asking.started
            || asking.unread() <= 1
            || asking.priority > self.priority
            || asking.unread() < self.tokens / ALIKE
            || asking.due.is_some_and(|due| due <= until)
    }

    /// Until when it and its holding may last if it takes as long as it may.
    fn expected_end(&self) -> Instant {
        self.began + Duration::from_secs_f64(BURST_MS / 1e3) * (1 + HOLD_FACTOR)
    }
}

impl Bursts {
    /// Bursts that were begun.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// What each may get of the step before it: a prompt that has to wait has nothing to read. `step_tokens` is what
    /// prompts get of a step.
    pub(crate) fn shape(&mut self, asking: &[Asking], cost: StepCost, step_tokens: u32, now: Instant) -> Vec<Need> {
        self.go_on(asking, cost, step_tokens, now);
        let needs = asking.iter().map(|a| match &self.state {
            State::None => a.need,
            // All but the last token, behind which a stream begins.
            State::Reading(burst) if burst.has(a) => a.up_to(a.unread().saturating_sub(1)),
            State::Reading(burst) if burst.may_pass(a, burst.expected_end()) => a.need,
            State::Holding { burst, until } if burst.may_pass(a, *until) => a.need,
            State::Reading(_) | State::Holding { .. } => a.up_to(0),
        });
        needs.collect()
    }

    fn go_on(&mut self, asking: &[Asking], cost: StepCost, step_tokens: u32, now: Instant) {
        let rows = asking.iter().filter(|a| !a.is_reading()).count();
        let rows = f64::from(u32::try_from(rows).unwrap_or(u32::MAX)) * cost.per_decode_row_ms / cost.fixed_ms;
        if let State::Reading(burst) = &mut self.state {
            burst.leave_out(asking, cost, now);
            let unread: Vec<u32> = asking.iter().filter(|a| burst.has(a)).map(Asking::unread).collect();
            if unread.iter().any(|&tokens| tokens > 1) {
                return;
            }
            // All of it has been read, or is gone.
            let took = now.saturating_duration_since(burst.began);
            let until = now + took * HOLD_FACTOR;
            let others_wait = asking.iter().any(|a| a.is_reading() && !burst.may_pass(a, until));
            self.state = match std::mem::take(&mut self.state) {
                State::Reading(burst) if others_wait && rows >= ROWS_ENOUGH => State::Holding { burst, until },
                _ => State::None,
            };
        }
        if let State::Holding { until, .. } = &self.state {
            if now < *until && rows >= ROWS_TOO_FEW {
                return;
            }
            self.state = State::None;
        }
        let unread: u32 = asking.iter().filter(|a| a.is_reading()).map(Asking::unread).fold(0, u32::saturating_add);
        // What one step reads needs no order.
        if unread > step_tokens
            && let Some(burst) = Burst::among(asking, cost, now)
        {
            self.state = State::Reading(burst);
            self.begun += 1;
        }
    }
}

#[cfg(test)]
#[path = "burst_tests.rs"]
mod tests;
