//! One accepted request: its ticket, its way to cancel, and the one place from which its events are sent.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use gantry_core::ShownPrompt;

use crate::answer::Piece;
use crate::backend::Token;
use crate::cache::{BlockHash, Fetched};
use crate::error::RequestError;
use crate::event::{
    Activity, ActivitySink, EventSink, FinishReason, GenerationEvent, PromptToken, StopCause, Timings, TokenLogprob,
    Usage,
};
use crate::lookup::Repeats;
use crate::output::{Reading, Signals};
use crate::params::GenerationParams;
use crate::sampler::Sampler;
use crate::stats::Stats;

/// A place among the requests that are in flight; given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Stats>);

impl Permit {
    /// Takes a place, unless `limit` requests are in flight.
    pub(crate) fn take(stats: &Arc<Stats>, limit: u32) -> Option<Self> {
        stats
            .in_flight
            .fetch_update(Relaxed, Relaxed, |n| (n < limit).then_some(n + 1))
            .ok()
            .map(|_| Self(stats.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Sends a request's events and sees to it that the last one is sent exactly once: dropped without it, it sends
/// `Failed`.
pub(crate) struct Emitter {
    sink: EventSink,
    activity: Option<ActivitySink>,
    stats: Arc<Stats>,
    /// Given back before the last event is sent, so that who hears of the end can submit again.
    permit: Option<Permit>,
    signals: Arc<Signals>,
}

impl Emitter {
    pub(crate) fn new(sink: EventSink, stats: Arc<Stats>, permit: Permit, signals: Arc<Signals>) -> Self {
        Self { sink, activity: None, stats, permit: Some(permit), signals }
    }

    /// Has the request's activity told, too.
    pub(crate) fn observed(mut self, activity: Option<ActivitySink>) -> Self {
        self.activity = activity;
        self
    }

    pub(crate) fn is(&self, activity: Activity) {
        if let Some(tell) = &self.activity {
            tell(activity);
        }
    }

    /// Where its activity is told, for who works on it while this is elsewhere.
    pub(crate) fn activity(&self) -> Option<ActivitySink> {
        self.activity.clone()
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.signals.cancelled.load(Relaxed)
    }

    pub(crate) fn started(&mut self, prompt_tokens: u32, files_left_out: u32) {
        self.send(GenerationEvent::Started { prompt_tokens, files_left_out });
    }

    /// Tells more of the prompt.
    pub(crate) fn echo(&mut self, text: String, tokens: Vec<PromptToken>) {
        self.send(GenerationEvent::Echo { text, tokens });
    }

    pub(crate) fn delta(&mut self, text: String, tokens: u32, logprobs: Vec<TokenLogprob>) {
        self.send(GenerationEvent::Text { text, tokens, logprobs });
    }

    /// Tells of a piece of an answer that is read; `logprobs` are told with text alone.
    pub(crate) fn piece(&mut self, piece: Piece, tokens: u32, logprobs: Vec<TokenLogprob>) {
        self.send(match piece {
            Piece::Text(text) => GenerationEvent::Text { text, tokens, logprobs },
            Piece::Reasoning(text) => GenerationEvent::Reasoning { text, tokens },
            Piece::Call { index, delta } => GenerationEvent::ToolCall { index, delta, tokens },
        });
    }

    /// Ends a request that asked what its prompt is.
    pub(crate) fn shown(&mut self, prompt: ShownPrompt) {
        self.send(GenerationEvent::Prompt(prompt));
        self.finished(FinishReason::Stop, None, Usage::default(), Timings::default());
    }

    pub(crate) fn finished(&mut self, reason: FinishReason, stop: Option<StopCause>, usage: Usage, timings: Timings) {
        if self.permit.take().is_some() {
            self.stats.finished.fetch_add(1, Relaxed);
            if reason == FinishReason::Cancelled {
                self.stats.cancelled.fetch_add(1, Relaxed);
            }
            self.send(GenerationEvent::Finished { reason, stop, usage, timings });
        }
    }

    /// Ends a request that was cancelled before it had a slot.
    pub(crate) fn cancelled(&mut self, prompt_tokens: u32, submitted_at: Instant) {
        let usage = Usage { prompt_tokens, ..Usage::default() };
        let timings = Timings { queue_ms: submitted_at.elapsed().as_secs_f64() * 1e3, ..Timings::default() };
        self.finished(FinishReason::Cancelled, None, usage, timings);
    }

    pub(crate) fn failed(&mut self, error: RequestError) {
        if self.permit.take().is_some() {
            self.stats.failed.fetch_add(1, Relaxed);
            self.send(GenerationEvent::Failed(error));
        }
    }

    /// A sink that panics harms its own request only, which is then cancelled.
    fn send(&mut self, event: GenerationEvent) {
        let sent = std::panic::catch_unwind(AssertUnwindSafe(|| (self.sink)(event)));
        if sent.is_err() {
            tracing::error!("a request's event sink panicked; the request is cancelled");
            self.signals.cancelled.store(true, Relaxed);
        }
    }
}

impl Drop for Emitter {
    fn drop(&mut self) {
        let error = if self.stats.shutting_down.load(Relaxed) {
            RequestError::ShuttingDown
        } else {
            RequestError::Internal(String::from("the request was dropped before it ended"))
        };
        self.failed(error);
    }
}

/// A request as it waits for a slot: its prompt is tokens, its stop strings are complete.
pub(crate) struct Request {
    /// The order of submission.
    pub(crate) ticket: u64,
    /// At least one.
    pub(crate) prompt: Vec<Token>,
    pub(crate) params: GenerationParams,
    pub(crate) emitter: Emitter,
    pub(crate) signals: Arc<Signals>,
    pub(crate) sampler: Box<Sampler>,
    /// How its answer is told.
    pub(crate) reading: Reading,
    /// The prompt's blocks, by name; none where prompts are not kept.
    pub(crate) blocks: Vec<BlockHash>,
    /// What was on disk of its prompt.
    pub(crate) fetched: Option<Fetched>,
    /// Where its prompt repeats itself, for guesses at its answer, if that was found out already.
    pub(crate) repeats: Option<Repeats>,
    pub(crate) submitted_at: Instant,
    /// When its prompt had become tokens.
    pub(crate) tokenized_at: Instant,
    /// When its first token is too late.
    pub(crate) deadline: Option<Instant>,
}

impl Request {
    pub(crate) fn prompt_len(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }

    /// Its prompt up to the first token that has to be decoded, whatever is kept of it: the last, for the logits after it, or the
    /// first where log-probabilities of the prompt are asked for.
    pub(crate) fn reusable(&self) -> &[Token] {
        reusable(&self.prompt, &self.params)
    }

    /// Ends a request whose first token can no longer come in time.
    pub(crate) fn expire(mut self, now: Instant) {
        self.emitter.failed(too_late(self.submitted_at, self.deadline, now));
    }

    /// Ends a request that was cancelled before it had a slot.
    pub(crate) fn finish_cancelled(mut self) {
        let prompt_tokens = self.prompt_len();
        self.emitter.cancelled(prompt_tokens, self.submitted_at);
    }
}

/// See [`Request::reusable`].
pub(crate) fn reusable<'t>(prompt: &'t [Token], params: &GenerationParams) -> &'t [Token] {
    if params.prompt_logprobs.is_some() { &prompt[..prompt.len().min(1)] } else { prompt }
}

/// That the first token of a request did not come in time.
pub(crate) fn too_late(submitted_at: Instant, deadline: Option<Instant>, now: Instant) -> RequestError {
    let since = |at: Instant| {
        let waited: Duration = at.saturating_duration_since(submitted_at);
        u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)
    };
    RequestError::DeadlineExceeded { waited_ms: since(now), limit_ms: deadline.map_or(0, since) }
}
