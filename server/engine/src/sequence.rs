//! One request in its slot: its tokens so far, how many of them the KV cache holds, and when it ends.
//!
//! Prompt and answer are one list of tokens, of which the cache holds a beginning: what is missing is decoded, and the
//! row after the last token gives the next one. So a request whose cells were taken away goes on by the same rule,
//! whether its state was saved or is computed again. Text is elsewhere ([`crate::output`]).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::backend::Token;
use crate::burst::Asking;
use crate::event::{Activity, ActivitySink, FinishReason};
use crate::lookup::{Acceptance, NgramIndex};
use crate::output::Signals;
use crate::params::{GenerationParams, Priority};
use crate::plan::Need;
use crate::sampler::Sampler;

/// Whether a sequence goes on after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Continue,
    Finished(FinishReason),
}

/// What the logits after a token are needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowUse {
    /// To choose what follows the last token, or a guess.
    Sample,
    /// To tell the log-probability of the prompt's next token.
    Score,
}

/// What guesses came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum GuessSource {
    /// Repetitions.
    #[default]
    Lookup,
    /// The draft model.
    Draft,
}

/// A request that holds a slot, or held one and waits for another.
pub(crate) struct Sequence {
    pub(crate) ticket: u64,
    /// Its priority, as raised by its waiting when it got its slot: the lowest gives way first.
    pub(crate) standing: Priority,
    /// How long it has waited in the queue, each time together.
    pub(crate) waited: Duration,
    pub(crate) params: GenerationParams,
    pub(crate) signals: Arc<Signals>,
    /// Hears whether it is worked on.
    pub(crate) activity: Option<ActivitySink>,
    /// Away while a thread of the pool samples.
    pub(crate) sampler: Option<Box<Sampler>>,
    /// Prompt and answer.
    pub(crate) tokens: Vec<Token>,
    pub(crate) prompt_len: u32,
    /// Tokens of the prompt after which the next one's log-probability has been told, where it is asked for.
    pub(crate) scored: u32,
    /// Tokens that the KV cache holds: a beginning of `tokens`.
    pub(crate) decoded: u32,
    /// Guesses at the tokens after the last, to be checked in the next step.
    pub(crate) drafts: Vec<Token>,
    pub(crate) guessed_by: GuessSource,
    /// Where repetitions are found, if they are looked for.
    pub(crate) index: Option<NgramIndex>,
    /// How often what was found there is right.
    pub(crate) lookup: Acceptance,
    /// How often the draft model is right.
    pub(crate) draft: Acceptance,
    /// How often it went on after a pause.
    pub(crate) resumes: u32,
    /// When it gave way last to a client that had no slot.
    pub(crate) gave_way_at: Option<Instant>,
    /// Tokens that the sequence can hold.
    pub(crate) positions: u32,
    pub(crate) submitted_at: Instant,
    /// When its first token is too late.
    pub(crate) deadline: Option<Instant>,
}

impl Sequence {
    pub(crate) fn priority(&self) -> Priority {
        self.params.priority
    }

    pub(crate) fn is(&self, activity: Activity) {
        if let Some(tell) = &self.activity {
            tell(activity);
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.signals.cancelled.load(Relaxed)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.signals.paused.load(Relaxed)
    }

    /// The text thread has ended the request.
    pub(crate) fn is_ended(&self) -> bool {
        self.signals.ended.load(Relaxed)
    }

    /// When it is given up: never, once it has its first token.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.generated() == 0)
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn generated(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// Cells that it takes in all if it generates as much as it may.
    pub(crate) fn worst_case(&self) -> u32 {
        let answer = self.params.max_tokens.unwrap_or(u32::MAX);
        self.prompt_len.saturating_add(answer).min(self.positions)
    }

    /// Tokens that may still come: no guess goes past them.
    pub(crate) fn left(&self) -> u32 {
        let answer = self.params.max_tokens.map_or(u32::MAX, |max| max.saturating_sub(self.generated()));
        answer.min((self.positions + 1).saturating_sub(self.len()))
    }

    /// What the next step should decode.
    pub(crate) fn need(&self) -> Need {
        match self.len() - self.decoded {
            1 => Need::Decode { drafts: u32::try_from(self.drafts.len()).unwrap_or(0) },
            remaining => {
                let scores = self.scored < self.to_score();
                Need::Prefill { remaining, age: self.ticket, priority: self.priority(), scores }
            }
        }
    }

    /// The same, with what decides who reads before whom.
    pub(crate) fn asking(&self) -> Asking {
        let (ticket, priority, started) = (self.ticket, self.priority(), self.generated() > 0);
        Asking { need: self.need(), ticket, priority, started, read: self.decoded, due: self.due(), followers: 0 }
    }

    /// Tokens of the prompt after which the next one's log-probability is to be told.
    fn to_score(&self) -> u32 {
        if self.params.prompt_logprobs.is_some() { self.prompt_len - 1 } else { 0 }
    }

    /// Its tokens up to the first that has to be decoded, whatever is kept of them: the last, for the logits after it, or the first
    /// of a prompt after which the next one's log-probability has yet to be told.
    pub(crate) fn reusable(&self) -> &[Token] {
        let first = if self.scored < self.to_score() { self.scored } else { self.len() - 1 };
        &self.tokens[..=first as usize]
    }

    /// The next `n` tokens with their positions, and for each what its logits are needed for.
    pub(crate) fn next_tokens(&self, n: u32) -> impl Iterator<Item = (Token, u32, Option<RowUse>)> + '_ {
        let (last, scored) = (self.len() - 1, self.scored..self.to_score());
        let known = self.tokens.iter().skip(self.decoded as usize).chain(&self.drafts);
        known.take(n as usize).zip(self.decoded..).map(move |(&token, at)| {
            let row = match at {
                at if at >= last => Some(RowUse::Sample),
                at if scored.contains(&at) => Some(RowUse::Score),
                _ => None,
            };
            (token, at, row)
        })
    }

    /// Takes the token that follows the last one, and says whether to go on.
    pub(crate) fn push(&mut self, token: Token, ends: bool) -> Progress {
        self.tokens.push(token);
        if let Some(index) = &mut self.index {
            index.push(token);
        }
        if ends {
            return Progress::Finished(FinishReason::Stop);
        }
        let enough = self.params.max_tokens.is_some_and(|max| self.generated() >= max);
        // The last token of an answer needs no cell: nothing follows it.
        if enough || self.len() > self.positions {
            return Progress::Finished(FinishReason::Length);
        }
        Progress::Continue
    }
}
