//! One admitted request, wherever it is: on its way to a worker, with one, or waiting for one.
//!
//! It has a place in admission from its submission to its end, and a [`Lease`] of a worker while it is with one. Until
//! its client has had text from it, it can be run again from the beginning, and nobody notices but by the time it takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gantry_core::Extent;
use gantry_engine::{
    AGEING_STEP, GenerationEvent, GenerationParams, PooledEvent, PooledOutput, PooledWork, Priority, Prompt,
    RequestError, TextInput,
};
use tokio::sync::oneshot;

use super::admission::QueuePlace;
use super::channel::{EventSender, Sent};
use super::desk::Lease;
use super::dispatch::Demand;
use super::generation::GenerationError;
use super::suspects::{AtDeath, Digest};
use crate::limits::{
    BYTES_PER_TOKEN_ESTIMATE, FAIR_ANSWER_TOKENS, MEMORY_REFUSALS, MESSAGE_MARKUP_BYTES_ESTIMATE, SUSPECT_ALONE_LIMIT,
};
use crate::protocol::{RequestId, ToWorker};

/// Text that a request asks of a version.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// From what to generate; shared by several answers.
    pub prompt: Arc<Prompt>,
    /// How.
    pub params: GenerationParams,
}

/// Vectors or scores that a request asks of a version.
#[derive(Clone, Debug)]
pub struct PoolRequest {
    /// Of what.
    pub work: PooledWork,
    /// Who goes first.
    pub priority: Priority,
    /// The most milliseconds until all of them are there; `None`: the version's own limit.
    pub timeout_ms: Option<u64>,
}

/// What is asked, and who waits for it.
// A request is in a box as a whole.
#[allow(clippy::large_enum_variant)]
enum Asked {
    Text {
        request: GenerateRequest,
        /// `None` once nobody listens.
        events: Option<EventSender>,
    },
    Pooled {
        request: PoolRequest,
        /// One for each text; empty while it is missing.
        vectors: Vec<Vec<f32>>,
        /// `None` once nobody listens.
        reply: Option<PooledReply>,
    },
}

/// Where a pooled request's answer goes.
pub(super) type PooledReply = oneshot::Sender<Result<PooledOutput, GenerationError>>;

impl GenerateRequest {
    /// The KV cells that it will need where a sequence can have `cells_per_sequence`: an estimate for text, since only
    /// the worker has the tokeniser, and at least what it must need for tokens.
    pub(super) fn cells(&self, cells_per_sequence: u64) -> u64 {
        if !self.is_computed() {
            return 0;
        }
        let prompt = self.prompt_tokens();
        let least = if let Prompt::Tokens(_) = &*self.prompt { prompt + 1 } else { 1 };
        let answer = self.params.max_tokens.map_or(cells_per_sequence, u64::from);
        prompt.saturating_add(answer).min(cells_per_sequence).max(least)
    }

    /// Whether tokens are computed for it; else it is told what its prompt is.
    pub(super) fn is_computed(&self) -> bool {
        self.params.extent == Extent::Answer
    }

    /// What it asks for, where clients share the service.
    pub(super) fn fair_tokens(&self) -> u64 {
        let answer = match self.params.extent {
            Extent::Answer => self.params.max_tokens.map_or(FAIR_ANSWER_TOKENS, |most| most.min(FAIR_ANSWER_TOKENS)),
            Extent::Prompt(_) => 0,
        };
        self.prompt_tokens().saturating_add(answer.into()).max(1)
    }

    /// Of the prompt, of which the front knows no more where it is text.
    fn prompt_tokens(&self) -> u64 {
        let tokens = match &*self.prompt {
            Prompt::Tokens(tokens) => tokens.len(),
            Prompt::Chat(chat) => {
                let markup = chat.messages.len() * MESSAGE_MARKUP_BYTES_ESTIMATE;
                (self.prompt.texts().map(str::len).sum::<usize>() + markup) / BYTES_PER_TOKEN_ESTIMATE
            }
            Prompt::Text(text) | Prompt::Markup(text) => text.len() / BYTES_PER_TOKEN_ESTIMATE,
            Prompt::Infill(infill) => {
                let tokens = if let TextInput::Tokens(tokens) = &infill.prefix { tokens.len() } else { 0 };
                tokens + infill.texts().map(str::len).sum::<usize>() / BYTES_PER_TOKEN_ESTIMATE
            }
        };
        tokens as u64
    }
}

impl PoolRequest {
    /// What it asks for, where clients share the service.
    pub(super) fn fair_tokens(&self) -> u64 {
        let bytes: usize = match &self.work {
            PooledWork::Embed(inputs) => inputs
                .iter()
                .map(|input| match input {
                    TextInput::Text(text) => text.len(),
                    TextInput::Tokens(tokens) => tokens.len() * BYTES_PER_TOKEN_ESTIMATE,
                })
                .sum(),
            PooledWork::Rank { queries, documents } => {
                let of_queries = match queries.as_slice() {
                    [query] => query.len().saturating_mul(documents.len()),
                    queries => queries.iter().map(String::len).sum(),
                };
                of_queries.saturating_add(documents.iter().map(String::len).sum())
            }
        };
        (bytes / BYTES_PER_TOKEN_ESTIMATE).max(1) as u64
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

/// What is to become of a request of which an event was passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    /// It goes on.
    Goes,
    /// Its sequence is to pause: more waits for its client than may.
    Pauses,
    /// It is to be cancelled: nobody listens any more.
    Stops,
}

/// A suspect that is run again.
#[derive(Clone, Copy)]
struct Trial {
    /// What came of it when its worker died.
    reached: u64,
    since: Instant,
    /// Nobody else gets to its worker.
    is_alone: bool,
}

/// See the module.
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) demand: Demand,
    /// Given back when the worker has let go of the request.
    pub(super) lease: Option<Lease>,
    /// Whether it is counted among those that its worker runs: it has begun there, and is not paused.
    pub(super) is_running: bool,
    /// Names what it asks.
    pub(super) digest: Digest,
    /// A worker died while it worked on it.
    pub(super) suspect: bool,
    /// Its client was told that it has ended: it goes on for it to be known whether a worker died of it.
    pub(super) is_unheard: bool,
    trial: Option<Trial>,
    /// Tokens, or vectors, that came of it from the worker that has it.
    outputs: u64,
    asked: Asked,
    /// The worker that has it, for its [`Generation`](super::Generation) to cancel it there.
    worker: Arc<AtomicUsize>,
    submitted: Instant,
    /// When the worker that has it got it.
    given: Instant,
    /// Workers that had no memory for it.
    refusals: u32,
    told_started: bool,
    told_output: bool,
    /// Whether its client gets nothing of it before its end, so that it may begin again: it is told so by another
    /// [`GenerationEvent::Started`], and what came before that is void.
    pub(super) is_whole: bool,
    /// Whether whoever submitted it takes it back where nothing of an answer was sent and the version makes room for another one.
    returns: Arc<AtomicBool>,
    place: QueuePlace,
}

impl Request {
    pub(super) fn new(
        id: RequestId,
        request: GenerateRequest,
        demand: Demand,
        events: EventSender,
        place: QueuePlace,
    ) -> Box<Self> {
        Self::of(id, Asked::Text { request, events: Some(events) }, demand, place)
    }

    /// One for vectors, which takes no KV cell of the engine's.
    pub(super) fn pooled(id: RequestId, request: PoolRequest, reply: PooledReply, place: QueuePlace) -> Box<Self> {
        let priority = request.priority;
        let asked = Asked::Pooled { request, vectors: Vec::new(), reply: Some(reply) };
        let demand = Demand { priority, ..Demand::default() };
        Self::of(id, asked, demand, place)
    }

    fn of(id: RequestId, asked: Asked, demand: Demand, place: QueuePlace) -> Box<Self> {
        let now = Instant::now();
        Box::new(Self {
            id,
            demand,
            lease: None,
            is_running: false,
            digest: Digest::default(),
            suspect: false,
            is_unheard: false,
            trial: None,
            outputs: 0,
            asked,
            worker: Arc::default(),
            submitted: now,
            given: now,
            refusals: 0,
            told_started: false,
            told_output: false,
            is_whole: false,
            returns: Arc::default(),
            place,
        })
    }

    /// Whether it may be given back, for its client to say when it may not any more.
    pub(super) fn returns(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.returns)
    }

    /// Gives it back where it may be, and is not under way; where its version has ended, also if it is and nothing of it was sent.
    /// Others are returned.
    pub(super) fn give_back(mut self: Box<Self>, ended: bool) -> Option<Box<Self>> {
        let is_unsent = if ended { self.is_whole || !self.told_output } else { !self.told_started };
        // One that a worker may have died of is not the next model's.
        if !is_unsent || self.suspect || !self.returns.swap(false, Ordering::SeqCst) {
            return Some(self);
        }
        self.tell_end(GenerationError::GaveWay);
        None
    }

    /// Its version has ended, and it was not answered: it is given back, or fails.
    pub(super) fn end(self: Box<Self>, gives_back: bool) {
        let left = if gives_back { self.give_back(true) } else { Some(self) };
        if let Some(request) = left {
            request.fail(GenerationError::Retired);
        }
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

    /// Its place among those that wait by its age, the earliest first: one of a lower priority goes as if it had been submitted later,
    /// and so in the end before those of a higher one that come after it.
    pub(super) fn age_order(&self) -> (Instant, RequestId) {
        let later = match self.priority() {
            Priority::High => Duration::ZERO,
            Priority::Normal => AGEING_STEP,
            Priority::Low => 2 * AGEING_STEP,
        };
        (self.submitted + later, self.id)
    }

    pub(super) fn priority(&self) -> Priority {
        match &self.asked {
            Asked::Text { request, .. } => request.params.priority,
            Asked::Pooled { request, .. } => request.priority,
        }
    }

    /// Its place among those of the same priority, the lowest first, whosever they are.
    pub(super) fn start_tag(&self) -> u64 {
        self.place.turn().start_tag
    }

    /// The message that gives it to a worker. Of the time that it may wait, what is left.
    pub(super) fn message(&mut self, now: Instant) -> ToWorker {
        self.given = now;
        self.outputs = 0;
        if self.told_output {
            // It begins again, and has not been waiting since it was submitted.
            (self.told_started, self.told_output, self.submitted) = (false, false, now);
        }
        let waited_ms = self.waited_ms(now);
        let left = |limit_ms: u64| limit_ms.saturating_sub(waited_ms).max(1);
        match &mut self.asked {
            Asked::Text { request, events } => {
                if let Some(events) = events {
                    events.restart();
                }
                let mut params = request.params.clone();
                params.queue_timeout_ms = params.queue_timeout_ms.map(left);
                params.turn = self.place.turn();
                ToWorker::Submit { id: self.id, prompt: Arc::clone(&request.prompt), params }
            }
            Asked::Pooled { request, vectors, .. } => {
                // What a worker that died had given counts no more.
                *vectors = vec![Vec::new(); request.work.len()];
                let timeout_ms = request.timeout_ms.map(left);
                let (work, priority) = (request.work.clone(), request.priority);
                ToWorker::Pool { id: self.id, work, priority, turn: self.place.turn(), timeout_ms }
            }
        }
    }

    /// Nobody waits for it any more.
    pub(super) fn abandon(&mut self) {
        match &mut self.asked {
            Asked::Text { events, .. } => *events = None,
            Asked::Pooled { reply, .. } => *reply = None,
        }
    }

    pub(super) fn is_abandoned(&self) -> bool {
        match &self.asked {
            Asked::Text { events, .. } => events.as_ref().is_none_or(EventSender::is_closed),
            Asked::Pooled { reply, .. } => reply.as_ref().is_none_or(oneshot::Sender::is_closed),
        }
    }

    /// A worker has no memory for it. Whether another one may be asked.
    pub(super) fn is_refused(&mut self) -> bool {
        self.refusals += 1;
        self.refusals < MEMORY_REFUSALS
    }

    /// It is run by itself, until more has come of it than `reached`.
    pub(super) fn begin_trial(&mut self, reached: u64, now: Instant) {
        self.trial = Some(Trial { reached, since: now, is_alone: true });
    }

    /// Whether it is being tried.
    pub(super) fn is_on_trial(&self) -> bool {
        self.trial.is_some()
    }

    /// It was tried in vain: the worker had not begun with it, or says nothing of it.
    pub(super) fn stop_trial(&mut self) -> bool {
        self.trial.take().is_some()
    }

    /// Whether what came of it clears it: past what had come of it and one more, since what a worker sent last may have been lost with
    /// it. True once.
    pub(super) fn passes_trial(&mut self) -> bool {
        let passes = self.trial.is_some_and(|trial| self.outputs > trial.reached + 1);
        if passes {
            self.trial = None;
            self.suspect = false;
        }
        passes
    }

    /// Whether it has been by itself for as long as others can wait. True once; it is still being tried.
    pub(super) fn outlasts_trial(&mut self, now: Instant) -> bool {
        let Some(trial) = self.trial.as_mut().filter(|trial| trial.is_alone) else { return false };
        let outlasts = now.saturating_duration_since(trial.since) >= SUSPECT_ALONE_LIMIT;
        trial.is_alone = !outlasts;
        outlasts
    }

    /// How its worker's death finds it. `begun`: whether the worker was working on it, and on nothing else.
    pub(super) fn at_death(&self, begun: bool, alone: bool) -> AtDeath {
        AtDeath { begun, alone, tried: self.trial.is_some(), told_output: self.told_output && !self.is_whole }
    }

    /// Tokens or vectors that have come of it.
    pub(super) fn outputs(&self) -> u64 {
        self.outputs
    }

    /// How many milliseconds it may wait; `None`: any time.
    pub(super) fn limit_ms(&self) -> Option<u64> {
        match &self.asked {
            Asked::Text { request, .. } => request.params.queue_timeout_ms,
            Asked::Pooled { request, .. } => request.timeout_ms,
        }
    }

    /// Whether it has waited longer than it may, at `now`.
    pub(super) fn overdue(&self, now: Instant) -> Option<RequestError> {
        let limit_ms = self.limit_ms()?;
        let waited_ms = self.waited_ms(now);
        (waited_ms >= limit_ms).then_some(RequestError::DeadlineExceeded { waited_ms, limit_ms })
    }

    /// Tells who waits that its time is over, where that is so and it cannot have had its first token. `worker_is_silent`: what
    /// it said last may not be what is. True: the worker is to give it up.
    pub(super) fn expire(&mut self, now: Instant, worker_is_silent: bool) -> bool {
        let waits = match &self.asked {
            Asked::Text { .. } => !self.told_output && (worker_is_silent || !self.told_started),
            Asked::Pooled { .. } => true,
        };
        match self.overdue(now) {
            Some(error) if waits && !self.is_abandoned() => {
                self.tell_end(error.into());
                true
            }
            _ => false,
        }
    }

    fn waited_ms(&self, now: Instant) -> u64 {
        millis(now.saturating_duration_since(self.submitted))
    }

    /// A worker's error as the client is told it: a worker counts the time from when it got the request, of a limit that
    /// is what was left then.
    fn restated(&self, error: RequestError, now: Instant) -> RequestError {
        match error {
            RequestError::DeadlineExceeded { .. } => self.overdue(now).unwrap_or(error),
            error => error,
        }
    }

    /// The last event of a request that will not be answered.
    pub(super) fn fail(mut self: Box<Self>, error: GenerationError) {
        self.tell_end(error);
    }

    /// Tells its client that this is the end, and goes on without one and without a place, for however long it may have to wait.
    pub(super) fn leave_client(&mut self, error: GenerationError) {
        self.tell_end(error);
        self.place.vacate();
        self.is_unheard = true;
        match &mut self.asked {
            Asked::Text { request, .. } => request.params.queue_timeout_ms = None,
            Asked::Pooled { request, .. } => request.timeout_ms = None,
        }
    }

    fn tell_end(&mut self, error: GenerationError) {
        // An error means that the client has gone.
        match &mut self.asked {
            Asked::Text { events, .. } => drop(events.take().map(|events| events.send(Err(error)))),
            Asked::Pooled { reply, .. } => drop(reply.take().map(|reply| reply.send(Err(error)))),
        }
    }

    /// Takes what a worker says of a pooled request, and answers when all of it is there.
    pub(super) fn pass_pooled(&mut self, event: PooledEvent, now: Instant) {
        let event = match event {
            PooledEvent::Failed(error) => PooledEvent::Failed(self.restated(error, now)),
            event => event,
        };
        self.outputs += u64::from(matches!(event, PooledEvent::Vector { .. }));
        self.place.begin();
        let Asked::Pooled { vectors, reply, .. } = &mut self.asked else { return };
        let answer = match event {
            PooledEvent::Vector { index, vector } => {
                if let Some(place) = vectors.get_mut(index as usize) {
                    *place = vector;
                }
                return;
            }
            PooledEvent::Finished { prompt_tokens } => {
                Ok(PooledOutput { vectors: std::mem::take(vectors), prompt_tokens })
            }
            PooledEvent::Failed(error) => Err(error.into()),
            // Which only who has left asks for.
            PooledEvent::Cancelled => return,
        };
        // An error means that the client has gone.
        drop(reply.take().map(|reply| reply.send(answer)));
    }

    /// Whether tokens are computed for it, or vectors.
    pub(super) fn is_computed(&self) -> bool {
        match &self.asked {
            Asked::Text { request, .. } => request.is_computed(),
            Asked::Pooled { .. } => true,
        }
    }

    /// Whether its sequence is not to go on now.
    pub(super) fn is_paused(&self) -> bool {
        matches!(&self.asked, Asked::Text { events: Some(events), .. } if events.is_paused())
    }

    /// Ends it where its client has taken too little of it for `limit`. True: the worker is to give it up.
    pub(super) fn ends_unread(&mut self, now: Instant, limit: Duration) -> bool {
        let Asked::Text { events: listening, .. } = &mut self.asked else { return false };
        listening.take_if(|events| events.ends_unread(now, limit)).is_some()
    }

    /// Passes an event on.
    pub(super) fn pass(&mut self, event: GenerationEvent, now: Instant) -> Passed {
        let event = match event {
            GenerationEvent::Failed(error) => {
                // It was rendered and tokenised, which of a long prompt is much work: were that nobody's, who is refused again
                // and again would always come before those who are answered.
                let is_of_request =
                    matches!(error, RequestError::InvalidRequest { .. } | RequestError::ContextLengthExceeded { .. });
                if is_of_request {
                    self.place.begin();
                }
                GenerationEvent::Failed(self.restated(error, now))
            }
            // A worker knows nothing of the time before: waiting for one with room, and with one that died.
            GenerationEvent::Finished { reason, stop, usage, mut timings } => {
                // What is computed of one that is told its prompt is not counted in tokens: it stays at what it asked for.
                if self.is_computed() {
                    let read = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
                    self.place.uses(u64::from(read) + u64::from(usage.completion_tokens));
                }
                timings.queue_ms += self.given.saturating_duration_since(self.submitted).as_secs_f64() * 1e3;
                GenerationEvent::Finished { reason, stop, usage, timings }
            }
            event => event,
        };
        self.outputs += event.output_tokens().map_or(0, u64::from);
        if let GenerationEvent::Started { .. } | GenerationEvent::Prompt(_) = &event {
            self.place.begin();
        }
        let Asked::Text { events: listening, .. } = &mut self.asked else { return Passed::Goes };
        let Some(events) = listening else { return Passed::Goes };
        let terminal = event.is_terminal();
        match &event {
            // It was run again; the client knows.
            GenerationEvent::Started { .. } if self.told_started => return Passed::Goes,
            GenerationEvent::Started { .. } => self.told_started = true,
            event
                if !self.told_output
                    && (event.output_tokens().is_some() || matches!(event, GenerationEvent::Echo { .. })) =>
            {
                self.told_output = true;
            }
            _ => {}
        }
        let sent = events.send(match event {
            GenerationEvent::Failed(error) => Err(GenerationError::Request(error)),
            event => Ok(event),
        });
        match sent {
            Sent::Waits => Passed::Goes,
            Sent::Pauses => Passed::Pauses,
            Sent::Ended | Sent::Gone => {
                *listening = None;
                if terminal { Passed::Goes } else { Passed::Stops }
            }
        }
    }
}

#[cfg(test)]
impl Request {
    /// It waits for so many ms at most.
    pub(super) fn waits_for(&mut self, ms: u64) {
        match &mut self.asked {
            Asked::Text { request, .. } => request.params.queue_timeout_ms = Some(ms),
            Asked::Pooled { request, .. } => request.timeout_ms = Some(ms),
        }
    }

    /// It was submitted at that time.
    pub(super) fn came_at(&mut self, submitted: Instant) {
        self.submitted = submitted;
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::limits::OUTPUT_BUDGET_BYTES;
    use crate::output::Output;
    use crate::peer::Peer;
    use crate::version::Scheduling;
    use crate::version::admission::{Admission, Ask};
    use crate::version::channel::channel;

    /// The start tag of a client's next request, in tokens, once its request for 1000 tokens has ended with this error while
    /// another client has one inside.
    fn charged_for(error: RequestError) -> u64 {
        let admission = Arc::new(Admission::new(&Scheduling::default(), 1));
        let enter = |host: u8, tokens: u64| {
            let ask = Ask { client: Peer::of([10, 0, 0, host].into()), ..Ask::default() };
            admission.enter_all(ask, &[tokens]).ok().unwrap().remove(0)
        };
        let _beside = enter(2, 1);
        let asked =
            GenerateRequest { prompt: Arc::new(Prompt::Text("Once".to_owned())), params: GenerationParams::default() };
        let (events, _client) = channel(&Output::new(OUTPUT_BUDGET_BYTES), 1);
        let mut request = Request::new(0, asked, Demand::default(), events, enter(1, 1000));
        assert_eq!(request.pass(GenerationEvent::Failed(error), Instant::now()), Passed::Goes);
        drop(request);
        enter(1, 1).turn().start_tag
    }

    #[test]
    fn who_is_refused_for_what_it_asks_has_had_its_turn_and_who_could_not_be_served_has_not() {
        let invalid = RequestError::invalid("prompt", "invalid_value", "no");
        for error in [invalid, RequestError::ContextLengthExceeded { prompt_tokens: 9, limit: 8 }] {
            assert_eq!(charged_for(error.clone()), 1000, "{error}");
        }
        for error in
            [RequestError::DeadlineExceeded { waited_ms: 1, limit_ms: 1 }, RequestError::Internal("no".to_owned())]
        {
            assert_eq!(charged_for(error.clone()), 0, "{error}");
        }
    }

    #[test]
    fn the_need_is_the_prompt_and_the_answer_within_a_sequence() {
        let cells = |prompt: Prompt, max_tokens| {
            let params = GenerationParams { max_tokens, ..GenerationParams::default() };
            GenerateRequest { prompt: Arc::new(prompt), params }.cells(1000)
        };
        let text = || Prompt::Text("x".repeat(100 * BYTES_PER_TOKEN_ESTIMATE));
        assert_eq!(cells(text(), Some(20)), 120);
        assert_eq!(cells(text(), None), 1000, "an answer may go on to the end of the context");
        assert_eq!(cells(text(), Some(5000)), 1000);
        assert_eq!(cells(Prompt::Tokens(vec![1; 5000]), Some(1)), 5001, "which no sequence has, and that is certain");
    }
}
