//! One request in its slot: how far its prompt is read, what it generated, when it ends.
//!
//! A sequence holds no reference to the backend: the scheduler tells it what was decoded and hands it a row of logits,
//! and it answers whether it goes on. So sampling and text could move to other threads with it.

use std::sync::Arc;
use std::time::Instant;

use crate::backend::{Token, Vocabulary};
use crate::error::RequestError;
use crate::event::{FinishReason, Timings, Usage};
use crate::plan::Need;
use crate::request::Request;
use crate::sampler::Sampler;
use crate::text::{StopFilter, Utf8Stream};

/// Whether a sequence goes on after a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Continue,
    Finished(FinishReason),
    Failed(RequestError),
}

/// A request that holds a slot.
pub(crate) struct Sequence {
    request: Request,
    vocabulary: Arc<dyn Vocabulary>,
    sampler: Sampler,
    utf8: Utf8Stream,
    stops: StopFilter,
    /// Tokens that the slot's KV cells hold.
    decoded: u32,
    /// Sampled, not yet decoded.
    next: Option<Token>,
    generated: u32,
    /// Generated since the last delta.
    unsent: u32,
    /// Tokens that the slot can hold.
    positions: u32,
    admitted_at: Instant,
    first_token_at: Option<Instant>,
    piece: Vec<u8>,
    text: String,
    /// A stop string came: no more text is sent.
    stopped: bool,
}

impl Sequence {
    /// Gives a request a slot that holds `positions` tokens, and tells it so.
    pub(crate) fn start(mut request: Request, vocabulary: Arc<dyn Vocabulary>, positions: u32) -> Self {
        let prompt_tokens = request.prompt_len();
        request.emitter.started(prompt_tokens);
        Self {
            sampler: Sampler::new(&request.params),
            stops: StopFilter::new(request.params.stop.clone()),
            request,
            vocabulary,
            utf8: Utf8Stream::default(),
            decoded: 0,
            next: None,
            generated: 0,
            unsent: 0,
            positions,
            admitted_at: Instant::now(),
            first_token_at: None,
            piece: Vec::new(),
            text: String::new(),
            stopped: false,
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.request.emitter.is_cancelled()
    }

    /// The order of submission.
    pub(crate) fn ticket(&self) -> u64 {
        self.request.ticket
    }

    /// Tokens in the slot's KV cells.
    pub(crate) fn decoded(&self) -> u32 {
        self.decoded
    }

    /// What the next step should decode.
    pub(crate) fn need(&self) -> Need {
        match self.next {
            Some(_) => Need::Decode,
            None => Need::Prefill { remaining: self.request.prompt_len() - self.decoded, age: self.request.ticket },
        }
    }

    /// The next `n` tokens with their positions, and for each whether its logits are needed: those of the last token of
    /// the prompt and of each token after it.
    pub(crate) fn next_tokens(&self, n: u32) -> impl Iterator<Item = (Token, u32, bool)> + '_ {
        let prompt_len = self.request.prompt_len();
        let from = self.decoded as usize;
        let tokens = match &self.next {
            Some(token) => std::slice::from_ref(token),
            None => self.request.prompt.get(from..).unwrap_or_default(),
        };
        tokens.iter().take(n as usize).zip(self.decoded..).map(move |(&token, at)| (token, at, at + 1 >= prompt_len))
    }

    /// The backend holds `n` more of this sequence's tokens.
    pub(crate) fn advance(&mut self, n: u32) {
        self.decoded += n;
        self.next = None;
    }

    /// Samples from the row after the last token, sends the text that completes, and says whether to go on.
    pub(crate) fn accept_logits(&mut self, logits: &[f32]) -> Progress {
        let vocabulary = self.vocabulary.clone();
        let banned: &[Token] = if self.request.params.ignore_eos { vocabulary.end_tokens() } else { &[] };
        let token = match self.sampler.sample(logits, banned) {
            Ok(token) => token,
            Err(e) => return Progress::Failed(RequestError::Internal(e.to_string())),
        };
        self.first_token_at.get_or_insert_with(Instant::now);
        self.generated += 1;
        self.unsent += 1;
        if vocabulary.end_tokens().contains(&token) {
            return Progress::Finished(FinishReason::Stop);
        }
        self.piece.clear();
        vocabulary.piece(token, &mut self.piece);
        let mut whole = String::new();
        self.utf8.push(&self.piece, &mut whole);
        self.stopped = self.stops.push(&whole, &mut self.text);
        if self.stopped {
            return Progress::Finished(FinishReason::Stop);
        }
        let enough = self.request.params.max_tokens.is_some_and(|max| self.generated >= max);
        if enough || self.decoded >= self.positions {
            return Progress::Finished(FinishReason::Length);
        }
        self.send_text();
        self.next = Some(token);
        Progress::Continue
    }

    /// Ends the request. Text that was held back for a stop string that did not come is sent first, but not to one that
    /// was cancelled: there the stop string might still have come.
    pub(crate) fn finish(mut self, reason: FinishReason) {
        if !self.stopped && reason != FinishReason::Cancelled {
            let mut rest = String::new();
            self.utf8.finish(&mut rest);
            if !self.stops.push(&rest, &mut self.text) {
                self.stops.finish(&mut self.text);
            }
        }
        self.send_text();
        let usage =
            Usage { prompt_tokens: self.request.prompt_len(), completion_tokens: self.generated, cached_tokens: 0 };
        let timings = self.timings();
        self.request.emitter.finished(reason, usage, timings);
    }

    pub(crate) fn fail(mut self, error: RequestError) {
        self.request.emitter.failed(error);
    }

    fn send_text(&mut self) {
        if !self.text.is_empty() {
            self.request.emitter.delta(std::mem::take(&mut self.text), std::mem::take(&mut self.unsent), Vec::new());
        }
    }

    fn timings(&self) -> Timings {
        let now = Instant::now();
        let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let first = self.first_token_at.unwrap_or(now);
        Timings {
            queue_ms: ms(self.request.submitted_at, self.admitted_at),
            prefill_ms: ms(self.admitted_at, first),
            decode_ms: ms(first, now),
        }
    }
}
