//! One admitted request, wherever it is: on its way to a worker, with one, or waiting for one.
//!
//! It has a place in admission from its submission to its end, and a [`Lease`] of a worker while it is with one. Until
//! its client has had text from it, it can be run again from the beginning, and nobody notices but by the time it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gantry_engine::{GenerationEvent, GenerationParams, Prompt, RequestError};
use tokio::sync::mpsc;

use super::admission::Place;
use super::desk::Lease;
use super::dispatch::Demand;
use super::generation::{GenerationError, Item};
use crate::limits::{BYTES_PER_TOKEN_ESTIMATE, REQUEST_ATTEMPTS};
use crate::protocol::{RequestId, ToWorker};

/// What a request asks of a version.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// From what to generate.
    pub prompt: Prompt,
    /// How.
    pub params: GenerationParams,
}

impl GenerateRequest {
    /// The KV cells that it will need where a sequence can have `cells_per_sequence`: an estimate for text, since only
    /// the worker has the tokeniser, and at least what it must need for tokens.
    pub(super) fn cells(&self, cells_per_sequence: u64) -> u64 {
        let (prompt, least) = match &self.prompt {
            Prompt::Text(text) | Prompt::Chat { messages_json: text } => (text.len() / BYTES_PER_TOKEN_ESTIMATE, 1),
            Prompt::Tokens(tokens) => (tokens.len(), tokens.len() as u64 + 1),
        };
        let answer = self.params.max_tokens.map_or(cells_per_sequence, u64::from);
        (prompt as u64).saturating_add(answer).min(cells_per_sequence).max(least)
    }
}

/// Whether to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Go,
    Stop,
}

impl Flow {
    pub(super) fn is_stop(self) -> bool {
        self == Self::Stop
    }
}

/// See the module.
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) demand: Demand,
    /// Given back when the worker has let go of the request.
    pub(super) lease: Option<Lease>,
    /// Whether it holds a sequence of its worker.
    pub(super) started: bool,
    asked: GenerateRequest,
    /// `None` once nobody listens.
    events: Option<mpsc::Sender<Item>>,
    /// The worker that has it, for its [`Generation`](super::Generation) to cancel it there.
    worker: Arc<AtomicUsize>,
    submitted: Instant,
    /// Workers that it was given to.
    attempts: u32,
    told_started: bool,
    told_text: bool,
    _place: Place,
}

impl Request {
    pub(super) fn new(
        id: RequestId,
        asked: GenerateRequest,
        demand: Demand,
        events: mpsc::Sender<Item>,
        place: Place,
    ) -> Box<Self> {
        Box::new(Self {
            id,
            demand,
            lease: None,
            started: false,
            asked,
            events: Some(events),
            worker: Arc::default(),
            submitted: Instant::now(),
            attempts: 0,
            told_started: false,
            told_text: false,
            _place: place,
        })
    }

    /// Where the number of the worker that has it is kept.
    pub(super) fn worker(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.worker)
    }

    /// Notes which worker gets it.
    pub(super) fn assign(&mut self, lease: Lease) {
        // Before the request is sent there: whoever cancels it after the worker has it must find it.
        self.worker.store(lease.worker(), Ordering::SeqCst);
        self.lease = Some(lease);
    }

    /// The message that gives it to a worker. Of the time that it may wait, what is left.
    pub(super) fn message(&mut self, now: Instant) -> ToWorker {
        self.attempts += 1;
        let mut params = self.asked.params.clone();
        if let Some(limit_ms) = params.queue_timeout_ms {
            let waited_ms = millis(now.saturating_duration_since(self.submitted));
            params.queue_timeout_ms = Some(limit_ms.saturating_sub(waited_ms).max(1));
        }
        ToWorker::Submit { id: self.id, prompt: self.asked.prompt.clone(), params }
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&mut self) {
        self.events = None;
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.events.as_ref().is_none_or(mpsc::Sender::is_closed)
    }

    /// Whether it may be given to another worker.
    pub(super) fn may_run_again(&self) -> bool {
        !self.told_text && self.attempts < REQUEST_ATTEMPTS
    }

    /// Whether it has waited longer than it may, at `now`.
    pub(super) fn overdue(&self, now: Instant) -> Option<RequestError> {
        let limit_ms = self.asked.params.queue_timeout_ms?;
        let waited_ms = millis(now.saturating_duration_since(self.submitted));
        (waited_ms >= limit_ms).then_some(RequestError::DeadlineExceeded { waited_ms, limit_ms })
    }

    /// The last event of a request that will not be answered.
    pub(super) fn fail(mut self: Box<Self>, error: GenerationError) {
        if let Some(events) = self.events.take() {
            // The last place is kept free for this; an error means that the client has gone.
            let _ = events.try_send(Err(error));
        }
    }

    /// Passes an event on. `Stop` means that the request should be cancelled.
    pub(super) fn pass(&mut self, event: GenerationEvent) -> Flow {
        let Some(events) = &self.events else { return Flow::Go };
        let terminal = event.is_terminal();
        match event {
            // It was run again; the client knows.
            GenerationEvent::Started { .. } if self.told_started => return Flow::Go,
            GenerationEvent::Started { .. } => self.told_started = true,
            GenerationEvent::Delta { .. } if !self.told_text => {
                self.told_text = true;
                // Never needed again, and it may be large.
                self.asked.prompt = Prompt::Text(String::new());
            }
            _ => {}
        }
        let item = match event {
            GenerationEvent::Failed(error) => Err(GenerationError::Request(error)),
            event if events.capacity() > 1 || terminal => Ok(event),
            _ => Err(GenerationError::SlowClient),
        };
        let slow = matches!(item, Err(GenerationError::SlowClient));
        let gone = events.try_send(item).is_err();
        if slow || gone {
            self.events = None;
        }
        if (slow || gone) && !terminal { Flow::Stop } else { Flow::Go }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_is_the_prompt_and_the_answer_within_a_sequence() {
        let cells = |prompt: Prompt, max_tokens| {
            let params = GenerationParams { max_tokens, ..GenerationParams::default() };
            GenerateRequest { prompt, params }.cells(1000)
        };
        let text = || Prompt::Text("x".repeat(100 * BYTES_PER_TOKEN_ESTIMATE));
        assert_eq!(cells(text(), Some(20)), 120);
        assert_eq!(cells(text(), None), 1000, "an answer may go on to the end of the context");
        assert_eq!(cells(text(), Some(5000)), 1000);
        assert_eq!(cells(Prompt::Tokens(vec![1; 5000]), Some(1)), 5001, "which no sequence has, and that is certain");
    }
}
