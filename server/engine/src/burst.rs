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
//! Where prompts begin alike, one of them is read first, and the others come when they can copy what they share. Such a
//! leader is read up to its last token, and then is one of their burst: else it would be a stream before them, that bounds
//! the steps in which they are read, and the first of those that end one by one.
//!
//! Nobody is made to wait for others of another kind: a prompt of a higher priority, one of less than half the length
//! ([`ALIKE`]), one whose deadline comes before the holding ends, and a sequence that gave way and comes back are read as
//! [`crate::plan`] says at any time. A burst always has the oldest prompt, so that none waits for more than one burst and
//! one holding each time that it might have been read.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::budget::StepCost;
use crate::params::Priority;
use crate::plan::{GROUP_TOKENS, Need};

/// The most that a burst may take to read, in ms, but for [`FEW`] more: its first prompt waits that long where it might
/// have waited a step.
pub(crate) const BURST_MS: f64 = 15_000.0;
/// A burst has so many prompts that their rows cost at least so many times what a step costs without any,
const ROWS_WORTH_A_BURST: f64 = 1.25;
/// and at least so many: fewer win little by it, and each waits for the others.
const LEAST_BURST: usize = GROUP_TOKENS as usize;
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
/// Nobody reads with others whose first token is due before so many times what that takes.
const DEADLINE_MARGIN: f64 = 2.0;
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
    /// Requests that wait for it to be read, to copy its beginning; known only of one that reads alone.
    pub(crate) followers: u32,
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
    /// A prompt is read, but for its last token, before those that follow it come.
    Leading(Member),
    Reading(Burst),
    Holding {
        burst: Burst,
        until: Instant,
    },
}

#[derive(Debug)]
struct Burst {
    /// Their leader, and then the oldest first.
    members: Vec<Member>,
    priority: Priority,
    /// What the oldest of those without it had to read.
    tokens: u32,
    began: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    ticket: u64,
    /// What it had to read when the burst began, or when it began to lead.
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
    pub(crate) fn up_to(&self, remaining: u32) -> Need {
        let scores = matches!(self.need, Need::Prefill { scores: true, .. });
        Need::Prefill { remaining, age: self.ticket, priority: self.priority, scores }
    }
}

impl Burst {
    /// The prompts that are read together, if there are enough of them; with the one that led them, of which only the last
    /// token is left.
    fn among(asking: &[Asking], leader: Option<Member>, cost: StepCost, now: Instant) -> Option<Self> {
        let mut readers: Vec<&Asking> = asking.iter().filter(|a| a.is_reading()).collect();
        readers.sort_unstable_by_key(|a| a.ticket);
        let oldest = readers.first()?;
        let (priority, tokens) = (oldest.priority, oldest.unread());
        // One that had less than half to read of what the others have does not wait for them.
        let leader = leader.filter(|leader| {
            let waits = |a: &Asking| a.ticket == leader.ticket && !a.is_reading() && a.priority == priority;
            leader.tokens >= tokens / ALIKE && asking.iter().any(waits)
        });
        let streams = asking.len() - readers.len() - leader.iter().len();
        // One who gave way has streamed before, and goes on as soon as may be.
        let goes_first = |a: &&Asking| a.started || a.priority > priority || a.unread() < tokens / ALIKE;
        if readers.iter().any(goes_first) {
            return None;
        }
        let alike =
            readers.iter().copied().filter(|a| a.priority == priority && a.unread() <= tokens.saturating_mul(ALIKE));
        let mut burst =
            Self { members: leader.into_iter().chain(alike.map(Member::of)).collect(), priority, tokens, began: now };
        burst.leave_out(asking, cost, now);
        let members = || asking.iter().filter(|a| burst.has(a));
        let ms: f64 = members().map(|a| cost.reading_ms(a.read, a.unread())).sum();
        let late = now + Duration::from_secs_f64(ms * DEADLINE_MARGIN / 1e3);
        let in_time = members().all(|a| a.due.is_none_or(|due| due > late));
        (in_time && is_worth_it(burst.members.len(), streams, cost)).then_some(burst)
    }

    /// Leaves out the youngest of which nothing has been read, so many that the others are read in time as far as is known
    /// now: what a token takes may have been learnt meanwhile. Those that are left, and the streams there are, come in whole
    /// groups of rows, since the others come later in any case.
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
        let streams = asking.iter().filter(|a| !a.is_reading() && !self.has(a)).count();
        let left_over = (streams + in_time) % GROUP_TOKENS as usize;
        let in_time = if left_over < in_time { in_time - left_over } else { in_time };
        let mut place = 0;
        self.members.retain(|member| {
            place += 1;
            let unread = by_ticket[&member.ticket].unread();
            place <= in_time || unread < member.tokens || unread <= 1
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

impl Member {
    fn of(asking: &Asking) -> Self {
        Self { ticket: asking.ticket, tokens: asking.unread() }
    }
}

/// Whether so many prompts are to begin together, beside so many streams.
pub(crate) fn is_worth_it(prompts: usize, streams: usize, cost: StepCost) -> bool {
    prompts >= LEAST_BURST && steps_of_rows(prompts, cost) >= ROWS_WORTH_A_BURST && streams * MOST_BESIDE <= prompts
}

/// What so many rows cost, in steps without any.
fn steps_of_rows(rows: usize, cost: StepCost) -> f64 {
    f64::from(u32::try_from(rows).unwrap_or(u32::MAX)) * cost.per_decode_row_ms / cost.fixed_ms
}

/// The prompt that is read before those that wait to copy its beginning, if it is to wait for them in turn.
fn leader(asking: &[Asking], cost: StepCost, now: Instant) -> Option<Member> {
    let only = &asking[only_reader(asking)?];
    let prompts = 1 + usize::try_from(only.followers).unwrap_or(usize::MAX);
    let has_time = only.due.is_none_or(|due| due > now + Duration::from_secs_f64(BURST_MS * DEADLINE_MARGIN / 1e3));
    let leads = !only.started && has_time && is_worth_it(prompts, asking.len() - 1, cost);
    leads.then(|| Member::of(only))
}

/// The place of the one that reads, if it is only one.
pub(crate) fn only_reader(asking: &[Asking]) -> Option<usize> {
    let mut readers = asking.iter().enumerate().filter(|(_, a)| a.is_reading());
    let (only, _) = readers.next()?;
    readers.next().is_none().then_some(only)
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
            // All but the last token, behind which a stream begins.
            State::Leading(leader) if a.ticket == leader.ticket => a.up_to(a.unread().saturating_sub(1)),
            State::None | State::Leading(_) => a.need,
            State::Reading(burst) if burst.has(a) => a.up_to(a.unread().saturating_sub(1)),
            State::Reading(burst) if burst.may_pass(a, burst.expected_end()) => a.need,
            State::Holding { burst, until } if burst.may_pass(a, *until) => a.need,
            State::Reading(_) | State::Holding { .. } => a.up_to(0),
        });
        needs.collect()
    }

    fn go_on(&mut self, asking: &[Asking], cost: StepCost, step_tokens: u32, now: Instant) {
        let rows = steps_of_rows(asking.iter().filter(|a| !a.is_reading()).count(), cost);
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
        let led_by = match self.state {
            State::Leading(leader) => Some(leader),
            _ => None,
        };
        let unread: u32 = asking.iter().filter(|a| a.is_reading()).map(Asking::unread).fold(0, u32::saturating_add);
        // What one step reads needs no order.
        let burst = if unread > step_tokens { Burst::among(asking, led_by, cost, now) } else { None };
        self.begun += u64::from(burst.is_some());
        self.state = match burst {
            Some(burst) => State::Reading(burst),
            None => {
                let leader = leader(asking, cost, now);
                // As it was when it began to lead.
                let same = led_by.filter(|led| leader.is_some_and(|leader| leader.ticket == led.ticket));
                same.or(leader).map_or(State::None, State::Leading)
            }
        };
    }
}

#[cfg(test)]
#[path = "burst_tests.rs"]
mod tests;
