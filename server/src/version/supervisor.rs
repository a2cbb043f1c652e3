//! The one owner of a version's worker: starts it, talks to it, notices when it dies or hangs, and starts another.
//!
//! A [`Session`] is one worker's life: an event is taken from the socket, the inbox or the clock and applied
//! synchronously; what it leads to is queued, never awaited. Between sessions the [`restart`](super::restart) policy
//! says how long to wait. Every request that the supervisor takes over gets exactly one last event from it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use gantry_engine::{GenerationEvent, ProbeError, RequestError, SubmitError as EngineRefusal};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;

use super::admission::{Place, ServiceRate};
use super::generation::{GenerationError, Item};
use super::process::{Process, WorkerConfig};
use super::restart::{Crashes, Verdict};
use super::{GenerateRequest, LoadError, Shared, WorkerHealth};
use crate::limits::{HEARTBEAT_LIMIT, LOAD_STALL_LIMIT, PROBE_CACHE, PROBE_LIMIT, STEP_STALL_LIMIT, SUPERVISOR_TICK};
use crate::protocol::{self, FromWorker, Heartbeat, ProtocolError, RequestId, ToWorker};

/// What is asked of a supervisor.
pub(super) enum Command {
    /// Serve a request that has been admitted.
    Submit { id: RequestId, request: GenerateRequest, events: mpsc::Sender<Item>, place: Place },
    /// Nobody waits for this request any more.
    Cancel { id: RequestId },
    /// Can a token be decoded now?
    Probe(ProbeReply),
    /// Finish what is there and stop.
    Retire { drain_timeout: Duration, done: oneshot::Sender<()> },
}

type ProbeReply = oneshot::Sender<Result<(), String>>;

/// How a worker's life ended.
enum End {
    /// As wanted: the version is retired, or nobody holds it any more.
    Stopped,
    /// The worker could not load the model; it said why.
    LoadFailed(String),
    /// The worker closed its socket, or spoke nonsense.
    Gone(Option<ProtocolError>),
    /// The worker does not do its work.
    Hung(String),
}

/// Runs a version to its end. `first` learns how the first load went; a version whose first load fails ends at once.
pub(super) async fn run(
    shared: Arc<Shared>,
    workers: WorkerConfig,
    inbox: mpsc::UnboundedReceiver<Command>,
    progress: watch::Sender<f32>,
    first: oneshot::Sender<Result<(), LoadError>>,
) {
    let mut supervisor = Supervisor::new(shared, inbox, progress, first);
    while let Err(error) = supervisor.worker_life(&workers).await {
        if let Some(first) = supervisor.first.take() {
            // Nobody waits for a load that was given up.
            let _ = first.send(Err(error));
            break;
        }
        let wait = supervisor.after_death(&error.to_string());
        if supervisor.pause(wait, &error.to_string()).await.is_stop() {
            break;
        }
    }
    supervisor.finish();
}

struct Supervisor {
    shared: Arc<Shared>,
    inbox: mpsc::UnboundedReceiver<Command>,
    progress: watch::Sender<f32>,
    first: Option<oneshot::Sender<Result<(), LoadError>>>,
    retiring: Option<Retiring>,
    rate: ServiceRate,
    crashes: Crashes,
}

struct Retiring {
    deadline: Instant,
    done: Vec<oneshot::Sender<()>>,
}

/// Whether to go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Go,
    Stop,
}

impl Flow {
    fn is_stop(self) -> bool {
        self == Self::Stop
    }
}

impl Supervisor {
    fn new(
        shared: Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<Command>,
        progress: watch::Sender<f32>,
        first: oneshot::Sender<Result<(), LoadError>>,
    ) -> Self {
        Self {
            shared,
            inbox,
            progress,
            first: Some(first),
            retiring: None,
            rate: ServiceRate::default(),
            crashes: Crashes::default(),
        }
    }

    /// One worker from start to end. `Err` is a death that was not asked for.
    async fn worker_life(&mut self, workers: &WorkerConfig) -> Result<(), LoadError> {
        let (process, socket) = Process::spawn(workers).map_err(|error| LoadError::Spawn(error.to_string()))?;
        let pid = process.pid().unwrap_or(0);
        self.shared.worker_pid.store(pid, Ordering::Relaxed);
        tracing::info!(version = %self.shared.spec.name, pid, "worker started");
        let (end, requests) = self.talk(socket).await;
        self.shared.worker_pid.store(0, Ordering::Relaxed);
        self.shared.heartbeat.send_replace(Heartbeat::default());
        let (result, failure) = match end {
            End::Stopped => {
                process.end().await;
                (Ok(()), GenerationError::Retired)
            }
            End::LoadFailed(message) => {
                process.end().await;
                (Err(LoadError::Model(message.clone())), GenerationError::WorkerDied(message))
            }
            End::Gone(error) => {
                let mut reason = process.end().await;
                if let Some(error) = error {
                    reason = format!("{error}; {reason}");
                }
                (Err(LoadError::WorkerDied(reason.clone())), GenerationError::WorkerDied(reason))
            }
            End::Hung(reason) => {
                process.kill().await;
                (Err(LoadError::WorkerDied(reason.clone())), GenerationError::WorkerDied(reason))
            }
        };
        for entry in requests.into_values() {
            entry.fail(failure.clone());
        }
        self.shared.running.store(0, Ordering::Relaxed);
        result
    }

    /// Talks to a worker until its life ends, and returns the requests that it still had.
    async fn talk(&mut self, socket: UnixStream) -> (End, HashMap<RequestId, Entry>) {
        let (read, write) = socket.into_split();
        let frames = protocol::receiver::<FromWorker>(read);
        // Unbounded by type, bounded by admission, as the inbox is.
        let (outbox, mut outgoing) = mpsc::unbounded_channel::<ToWorker>();
        let writer = tokio::spawn(async move {
            let mut sender = protocol::Sender::new(write);
            while let Some(message) = outgoing.recv().await {
                if let Err(error) = sender.send(&message).await {
                    // The reader sees the same end of the socket and acts on it.
                    tracing::debug!(%error, "a worker's socket takes no more");
                    break;
                }
            }
        });
        let mut session = Session::new(self, outbox);
        let end = session.run(frames).await;
        let requests = session.requests;
        // Both halves must go for the worker to see that the front is done with it.
        writer.abort();
        (end, requests)
    }

    /// Notes a death and says how long to wait for the next life.
    fn after_death(&mut self, reason: &str) -> Duration {
        self.shared.restarts.fetch_add(1, Ordering::Relaxed);
        let (health, wait) = match self.crashes.record(Instant::now()) {
            Verdict::Respawn { attempt, after } => {
                (WorkerHealth::Restarting { attempt, reason: reason.to_owned() }, after)
            }
            Verdict::Failed { retry_after } => (WorkerHealth::Failed { reason: reason.to_owned() }, retry_after),
        };
        tracing::error!(
            version = %self.shared.spec.name, reason, state = health.label(), wait_ms = wait.as_millis() as u64,
            "worker died"
        );
        self.shared.move_to(health);
        wait
    }

    /// Waits while there is no worker, and answers for it.
    async fn pause(&mut self, wait: Duration, reason: &str) -> Flow {
        let until = tokio::time::Instant::now() + wait;
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(until) => return Flow::Go,
                command = self.inbox.recv() => match command {
                    None => return Flow::Stop,
                    Some(Command::Retire { done, .. }) => {
                        self.retire(Duration::ZERO, done);
                        return Flow::Stop;
                    }
                    Some(other) => refuse(other, &GenerationError::WorkerDied(reason.to_owned())),
                },
            }
        }
    }

    fn retire(&mut self, drain_timeout: Duration, done: oneshot::Sender<()>) {
        let deadline = Instant::now() + drain_timeout;
        let retiring = self.retiring.get_or_insert_with(|| Retiring { deadline, done: Vec::new() });
        retiring.deadline = retiring.deadline.min(deadline);
        retiring.done.push(done);
    }

    /// Whether nothing is left to wait for.
    fn drained(&self, now: Instant) -> bool {
        // Places, not table entries: an admitted request may still be on its way to the inbox.
        self.retiring.as_ref().is_some_and(|r| now >= r.deadline || self.shared.admission.in_flight() == 0)
    }

    fn finish(mut self) {
        self.shared.admission.close();
        self.shared.move_to(WorkerHealth::Stopped);
        self.inbox.close();
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Retire { done, .. } => self.retire(Duration::ZERO, done),
                other => refuse(other, &GenerationError::Retired),
            }
        }
        tracing::info!(version = %self.shared.spec.name, "version stopped");
        for done in self.retiring.map(|retiring| retiring.done).unwrap_or_default() {
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
        }
    }
}

/// Answers a command that needs a worker while there is none.
fn refuse(command: Command, error: &GenerationError) {
    match command {
        Command::Submit { events, place, .. } => Entry::new(events, place).fail(error.clone()),
        // The caller of a probe may have stopped waiting.
        Command::Probe(reply) => drop(reply.send(Err(error.to_string()))),
        Command::Cancel { .. } | Command::Retire { .. } => {}
    }
}

/// A request in a worker's hands.
struct Entry {
    /// `None` once nobody listens.
    events: Option<mpsc::Sender<Item>>,
    started: bool,
    /// Held until the worker has let go of the request.
    _place: Place,
}

impl Entry {
    fn new(events: mpsc::Sender<Item>, place: Place) -> Self {
        Self { events: Some(events), started: false, _place: place }
    }

    /// The last event of a request that will not be answered.
    fn fail(self, error: GenerationError) {
        if let Some(events) = self.events {
            // The last place is kept free for this; an error means that the client has gone.
            let _ = events.try_send(Err(error));
        }
    }

    /// Passes an event on. `Stop` means that the request should be cancelled.
    fn pass(&mut self, event: GenerationEvent) -> Flow {
        let Some(events) = &self.events else { return Flow::Go };
        let terminal = event.is_terminal();
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

enum Event {
    Frame(Option<Result<FromWorker, ProtocolError>>),
    Command(Option<Command>),
    Tick,
}

enum Phase {
    Loading { share: f32, moved: Instant },
    Ready,
}

/// One worker's life.
struct Session<'a> {
    supervisor: &'a mut Supervisor,
    outbox: mpsc::UnboundedSender<ToWorker>,
    requests: HashMap<RequestId, Entry>,
    phase: Phase,
    heard: Instant,
    /// The engine's count of steps, and when it last moved or had no need to.
    steps: (u64, Instant),
    probes: Vec<ProbeReply>,
    probe_sent: Option<Instant>,
    probe_passed: Option<Instant>,
}

impl<'a> Session<'a> {
    fn new(supervisor: &'a mut Supervisor, outbox: mpsc::UnboundedSender<ToWorker>) -> Self {
        let now = Instant::now();
        Self {
            supervisor,
            outbox,
            requests: HashMap::new(),
            phase: Phase::Loading { share: 0.0, moved: now },
            heard: now,
            steps: (0, now),
            probes: Vec::new(),
            probe_sent: None,
            probe_passed: None,
        }
    }

    async fn run(&mut self, mut frames: impl Stream<Item = Result<FromWorker, ProtocolError>> + Unpin) -> End {
        self.tell(ToWorker::Load(self.supervisor.shared.spec.engine_config()));
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                frame = frames.next() => Event::Frame(frame),
                command = self.supervisor.inbox.recv() => Event::Command(command),
                _ = tick.tick() => Event::Tick,
            };
            let now = Instant::now();
            if let Some(end) = self.apply(event, now) {
                return end;
            }
            if self.supervisor.drained(now) {
                return End::Stopped;
            }
        }
    }

    fn apply(&mut self, event: Event, now: Instant) -> Option<End> {
        match event {
            Event::Frame(None) => Some(End::Gone(None)),
            Event::Frame(Some(Err(error))) => Some(End::Gone(Some(error))),
            Event::Frame(Some(Ok(message))) => {
                self.heard = now;
                self.on_message(message, now)
            }
            Event::Command(None) => Some(End::Stopped),
            Event::Command(Some(command)) => {
                self.on_command(command, now);
                None
            }
            Event::Tick => self.on_tick(now),
        }
    }

    fn on_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Submit { id, request, events, place } => {
                let mut entry = Entry::new(events, place);
                if matches!(self.phase, Phase::Ready) {
                    self.tell(ToWorker::Submit { id, prompt: request.prompt, params: request.params });
                    self.requests.insert(id, entry);
                } else if let Some(events) = entry.events.take() {
                    // Admitted just before the last worker died.
                    let _ = events.try_send(Err(GenerationError::WorkerDied("it is being restarted".to_owned())));
                }
            }
            Command::Cancel { id } => {
                if let Some(entry) = self.requests.get_mut(&id) {
                    entry.events = None;
                    self.tell(ToWorker::Cancel { id });
                }
            }
            Command::Probe(reply) => self.on_probe(reply, now),
            Command::Retire { drain_timeout, done } => self.supervisor.retire(drain_timeout, done),
        }
    }

    fn on_probe(&mut self, reply: ProbeReply, now: Instant) {
        if !matches!(self.phase, Phase::Ready) {
            drop(reply.send(Err("the model is being loaded".to_owned())));
        } else if self.probe_passed.is_some_and(|at| now.duration_since(at) < PROBE_CACHE) {
            drop(reply.send(Ok(())));
        } else {
            self.probes.push(reply);
            if self.probe_sent.is_none() {
                self.probe_sent = Some(now);
                self.tell(ToWorker::Probe);
            }
        }
    }

    fn on_message(&mut self, message: FromWorker, now: Instant) -> Option<End> {
        match message {
            FromWorker::Loading(share) => {
                if matches!(self.phase, Phase::Loading { share: before, .. } if before != share) {
                    self.phase = Phase::Loading { share, moved: now };
                }
                self.supervisor.progress.send_replace(share);
            }
            FromWorker::LoadFailed { message } => return Some(End::LoadFailed(message)),
            FromWorker::Ready(model) => self.on_ready(model),
            FromWorker::Events(events) => {
                for (id, event) in events {
                    self.on_event(id, event, now);
                }
            }
            FromWorker::Refused { id, error } => return self.on_refused(id, error, now),
            FromWorker::Probed(result) => return self.on_probed(result, now),
            FromWorker::Heartbeat(beat) => {
                if beat.engine.slots_active == 0 || beat.engine.steps != self.steps.0 {
                    self.steps = (beat.engine.steps, now);
                }
                self.supervisor.shared.heartbeat.send_replace(beat);
            }
        }
        None
    }

    fn on_ready(&mut self, model: gantry_engine::ModelInfo) {
        let shared = &self.supervisor.shared;
        tracing::info!(version = %shared.spec.name, model = %model.description, "worker ready");
        self.phase = Phase::Ready;
        self.supervisor.progress.send_replace(1.0);
        shared.model.send_replace(Some(model));
        shared.move_to(WorkerHealth::Ready);
        if let Some(first) = self.supervisor.first.take() {
            // A load that was given up closes the inbox, which ends this session.
            let _ = first.send(Ok(()));
        }
    }

    fn on_event(&mut self, id: RequestId, event: GenerationEvent, now: Instant) {
        let Some(entry) = self.requests.get_mut(&id) else { return };
        if matches!(event, GenerationEvent::Started { .. }) && !entry.started {
            entry.started = true;
            self.supervisor.shared.running.fetch_add(1, Ordering::Relaxed);
        }
        let terminal = event.is_terminal();
        if entry.pass(event).is_stop() {
            self.tell(ToWorker::Cancel { id });
        }
        if terminal {
            self.remove(id, now);
        }
    }

    fn remove(&mut self, id: RequestId, now: Instant) -> Option<Entry> {
        let entry = self.requests.remove(&id)?;
        if entry.started {
            self.supervisor.shared.running.fetch_sub(1, Ordering::Relaxed);
        }
        let rate = self.supervisor.rate.record(now);
        self.supervisor.shared.admission.set_rate(rate);
        Some(entry)
    }

    fn on_refused(&mut self, id: RequestId, error: EngineRefusal, now: Instant) -> Option<End> {
        let entry = self.remove(id, now)?;
        match error {
            EngineRefusal::Broken(reason) => {
                let reason = format!("it cannot decode any more: {reason}");
                entry.fail(GenerationError::WorkerDied(reason.clone()));
                return Some(End::Hung(reason));
            }
            EngineRefusal::ShuttingDown => entry.fail(RequestError::ShuttingDown.into()),
            EngineRefusal::InvalidParam(error) => entry.fail(
                RequestError::InvalidRequest {
                    code: "invalid_value".to_owned(),
                    message: error.to_string(),
                    param: Some(error.param),
                }
                .into(),
            ),
            pressure @ EngineRefusal::MemoryPressure { .. } => {
                entry.fail(RequestError::Overloaded(pressure.to_string()).into());
            }
            // Admission is stricter than the engine's own limit, so this is our own fault.
            full @ EngineRefusal::QueueFull { .. } => entry.fail(RequestError::Internal(full.to_string()).into()),
        }
        None
    }

    fn on_probed(&mut self, result: Result<(), ProbeError>, now: Instant) -> Option<End> {
        self.probe_sent = None;
        self.probe_passed = result.is_ok().then_some(now);
        let answer = result.as_ref().copied().map_err(ToString::to_string);
        self.answer_probes(&answer);
        match result {
            Err(ProbeError::Broken(reason)) => Some(End::Hung(format!("it cannot decode any more: {reason}"))),
            _ => None,
        }
    }

    fn answer_probes(&mut self, answer: &Result<(), String>) {
        for reply in self.probes.drain(..) {
            // The caller may have stopped waiting.
            let _ = reply.send(answer.clone());
        }
    }

    /// Looks at the deadlines.
    fn on_tick(&mut self, now: Instant) -> Option<End> {
        if self.outbox.is_closed() {
            return Some(End::Hung("its socket takes no more messages, so it was killed".to_owned()));
        }
        if self.probe_sent.is_some_and(|sent| now.duration_since(sent) > PROBE_LIMIT + SUPERVISOR_TICK) {
            self.probe_sent = None;
            self.answer_probes(&Err(format!("the worker did not answer a probe within {PROBE_LIMIT:?}")));
        }
        let hung = |since: Instant, limit: Duration, what: &str| {
            (now.duration_since(since) > limit).then(|| End::Hung(format!("{what} for {limit:?}, so it was killed")))
        };
        hung(self.heard, HEARTBEAT_LIMIT, "it was silent").or_else(|| match self.phase {
            Phase::Loading { moved, .. } => hung(moved, LOAD_STALL_LIMIT, "its loading made no progress"),
            Phase::Ready => hung(self.steps.1, STEP_STALL_LIMIT, "it had requests and finished no step"),
        })
    }

    fn tell(&self, message: ToWorker) {
        // The writer ends only with the socket, and the reader sees that too.
        let _ = self.outbox.send(message);
    }
}

#[cfg(test)]
mod tests;
