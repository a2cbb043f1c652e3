//! The one owner of one of a version's workers: starts it, talks to it, notices when it dies or hangs, and starts
//! another.
//!
//! A [`Session`] is one worker's life: an event is taken from the socket, the inbox or the clock and applied
//! synchronously; what it leads to is queued, never awaited. Between sessions the [`restart`](super::restart) policy
//! says how long to wait. Every request that the supervisor takes over gets exactly one last event from it, or goes to
//! the waiting room whole. It tells the dispatcher whether the worker may get requests: while it is ready, was heard of
//! lately and passed its last probe. Absent: which worker gets a request.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use gantry_engine::{GenerationEvent, PooledEvent, ProbeError, RequestError, SubmitError as EngineRefusal};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use super::desk::send_to_room;
use super::generation::GenerationError;
use super::process::{Process, WorkerConfig};
use super::request::{Flow, Request};
use super::restart::{Crashes, Verdict};
use super::shared::{Shared, Worker};
use super::threads::Seat;
use super::trial::Watch;
use super::{LoadError, WorkerHealth};
use crate::limits::{
    HEARTBEAT_LATE, HEARTBEAT_LIMIT, LOAD_STALL_LIMIT, PROBE_CACHE, PROBE_LIMIT, STEP_STALL_LIMIT, SUPERVISOR_TICK,
};
use crate::processors::Processors;
use crate::protocol::{self, FromWorker, Heartbeat, LoadFault, ProtocolError, RequestId, ToWorker};

/// What is asked of a supervisor.
pub(super) enum Command {
    /// Serve a request that has been admitted.
    Submit(Box<Request>),
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
    LoadFailed(LoadError),
    /// The worker closed its socket, or spoke nonsense.
    Gone(Option<ProtocolError>),
    /// The worker does not do its work.
    Hung(String),
}

type Requests = HashMap<RequestId, Box<Request>>;

/// Where a supervisor hears, and whom it tells.
pub(super) struct Post {
    /// Which of the version's workers it has.
    pub(super) worker: usize,
    pub(super) inbox: mpsc::UnboundedReceiver<Command>,
    /// Takes requests that are to be given to another worker.
    pub(super) room: mpsc::UnboundedSender<Box<Request>>,
    /// Learns how the first load went.
    pub(super) first: oneshot::Sender<Result<(), LoadError>>,
    /// Says how many threads the worker has.
    pub(super) seat: Seat,
}

/// Runs a worker to its version's end; one whose first load fails ends at once.
pub(super) async fn run(shared: Arc<Shared>, workers: WorkerConfig, post: Post) {
    let mut supervisor = Supervisor::new(shared, post);
    loop {
        let (ended, requests) = supervisor.worker_life(&workers).await;
        let Err(error) = ended else {
            requests.into_values().for_each(|request| request.fail(GenerationError::Retired));
            break;
        };
        if let Some(first) = supervisor.first.take() {
            // Nobody waits for a load that was given up.
            let _ = first.send(Err(error));
            break;
        }
        let reason = error.reason();
        let wait = supervisor.after_death(&reason);
        for request in requests.into_values() {
            supervisor.pass_on(request, &reason);
        }
        if supervisor.pause(wait, &reason).await.is_stop() {
            break;
        }
    }
    supervisor.finish();
}

struct Supervisor {
    shared: Arc<Shared>,
    worker: usize,
    inbox: mpsc::UnboundedReceiver<Command>,
    room: mpsc::UnboundedSender<Box<Request>>,
    first: Option<oneshot::Sender<Result<(), LoadError>>>,
    seat: Seat,
    retiring: Option<Retiring>,
    crashes: Crashes,
}

struct Retiring {
    deadline: Instant,
    done: Vec<oneshot::Sender<()>>,
}

impl Supervisor {
    fn new(shared: Arc<Shared>, post: Post) -> Self {
        let Post { worker, inbox, room, first, seat } = post;
        let (first, crashes) = (Some(first), Crashes::default());
        Self { shared, worker, inbox, room, first, seat, retiring: None, crashes }
    }

    /// This worker's figures.
    fn figures(&self) -> &Worker {
        &self.shared.workers[self.worker]
    }

    /// One worker from start to end, and the requests that it still had. `Err` is a death that was not asked for.
    async fn worker_life(&mut self, workers: &WorkerConfig) -> (Result<(), LoadError>, Requests) {
        let group = self.figures().share.group.and_then(|group| Processors::here().groups().get(group));
        let (process, socket) = match Process::spawn(workers, group.map_or(&[], Vec::as_slice)) {
            Ok(started) => started,
            Err(error) => return (Err(LoadError::Spawn(error.to_string())), Requests::new()),
        };
        let pid = process.pid().unwrap_or(0);
        self.figures().pid.store(pid, Ordering::Relaxed);
        tracing::info!(version = %self.shared.spec.name, worker = self.worker, pid, "worker started");
        let trial = workers.trial();
        let watch = trial.clone().map(|trial| Watch::start(trial, self.worker, pid)).transpose();
        let watch = watch.unwrap_or_else(|error| {
            tracing::error!(%error, "a worker's memory is not watched");
            None
        });
        let (end, requests) = self.talk(socket).await;
        // Before the process is waited for: its number may be another's after that.
        let taken_bytes = watch.and_then(Watch::end);
        // At once: what became of the process takes a while to find out.
        self.shared.desk.lose(self.worker);
        self.seat.vacate();
        let figures = self.figures();
        figures.threads.store(self.shared.own_threads(self.worker), Ordering::Relaxed);
        figures.pid.store(0, Ordering::Relaxed);
        figures.running.store(0, Ordering::Relaxed);
        figures.heartbeat.send_replace(Heartbeat::default());
        if let (Some(trial), Some(taken_bytes)) = (trial, taken_bytes) {
            process.kill().await;
            return (Err(LoadError::Memory(trial.reason(self.worker, taken_bytes))), requests);
        }
        let result = match end {
            End::Stopped => {
                process.end().await;
                Ok(())
            }
            End::LoadFailed(error) => {
                process.end().await;
                Err(error)
            }
            End::Gone(error) => {
                let mut reason = process.end().await;
                if let Some(error) = error {
                    reason = format!("{error}; {reason}");
                }
                Err(LoadError::WorkerDied(reason))
            }
            End::Hung(reason) => {
                process.kill().await;
                Err(LoadError::WorkerDied(reason))
            }
        };
        (result, requests)
    }

    /// Talks to a worker until its life ends, and returns the requests that it still had.
    async fn talk(&mut self, socket: UnixStream) -> (End, Requests) {
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
        self.figures().restarts.fetch_add(1, Ordering::Relaxed);
        let (health, wait) = match self.crashes.record(Instant::now()) {
            Verdict::Respawn { attempt, after } => {
                (WorkerHealth::Restarting { attempt, reason: reason.to_owned() }, after)
            }
            Verdict::Failed { retry_after } => (WorkerHealth::Failed { reason: reason.to_owned() }, retry_after),
        };
        tracing::error!(
            version = %self.shared.spec.name, worker = self.worker, reason, state = health.label(),
            wait_ms = wait.as_millis() as u64, "worker died"
        );
        self.shared.move_to(self.worker, health);
        wait
    }

    /// Has a request that this worker will not answer wait for one that will, or ends it.
    fn pass_on(&self, request: Box<Request>, reason: &str) {
        if request.is_abandoned() {
            return;
        }
        if !request.may_run_again() {
            request.fail(GenerationError::WorkerDied(reason.to_owned()));
            return;
        }
        self.shared.retries.fetch_add(1, Ordering::Relaxed);
        send_to_room(&self.shared.desk, &self.room, request);
    }

    /// Waits while there is no worker, and answers for it. `Stop`: there is nobody left to start one for.
    async fn pause(&mut self, wait: Duration, reason: &str) -> Flow {
        let until = tokio::time::Instant::now() + wait;
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        while !self.drained(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(until) => return Flow::Go,
                // The last request may end with another worker, and the time to drain run out.
                _ = tick.tick(), if self.retiring.is_some() => {}
                command = self.inbox.recv() => match command {
                    None => return Flow::Stop,
                    Some(Command::Retire { drain_timeout, done }) => self.retire(drain_timeout, done),
                    // It was picked just before the worker died.
                    Some(Command::Submit(request)) => self.pass_on(request, reason),
                    // The caller of a probe may have stopped waiting.
                    Some(Command::Probe(reply)) => drop(reply.send(Err(format!("the model worker died: {reason}")))),
                    Some(Command::Cancel { .. }) => {}
                },
            }
        }
        Flow::Stop
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
        self.shared.desk.lose(self.worker);
        self.inbox.close();
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Retire { done, .. } => self.retire(Duration::ZERO, done),
                Command::Submit(request) => request.fail(GenerationError::Retired),
                Command::Probe(reply) => drop(reply.send(Err(GenerationError::Retired.to_string()))),
                Command::Cancel { .. } => {}
            }
        }
        self.shared.move_to(self.worker, WorkerHealth::Stopped);
        tracing::info!(version = %self.shared.spec.name, worker = self.worker, "worker stopped");
        for done in self.retiring.map(|retiring| retiring.done).unwrap_or_default() {
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
        }
    }
}

enum Event {
    Frame(Option<Result<FromWorker, ProtocolError>>),
    Command(Option<Command>),
    /// The worker has other threads than before.
    Threads(u32),
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
    requests: Requests,
    phase: Phase,
    heard: Instant,
    /// Silent for [`HEARTBEAT_LATE`].
    late: bool,
    /// It failed its last probe.
    doubted: bool,
    /// What it computes, it computes on a CPU.
    on_cpu: bool,
    /// It computes without requests, to know what its steps cost.
    measures: bool,
    /// The engine's count of steps, and when it last moved or had no need to.
    steps: (u64, Instant),
    /// The same of the embedder.
    pooled_steps: (u64, Instant),
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
            late: false,
            doubted: false,
            on_cpu: true,
            measures: false,
            steps: (0, now),
            pooled_steps: (0, now),
            probes: Vec::new(),
            probe_sent: None,
            probe_passed: None,
        }
    }

    async fn run(&mut self, mut frames: impl Stream<Item = Result<FromWorker, ProtocolError>> + Unpin) -> End {
        let shared = &self.supervisor.shared;
        let config = shared.spec.engine_config(&self.supervisor.figures().share, shared.workers.len());
        self.tell(ToWorker::Load(config));
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ticked = Instant::now();
        loop {
            let event = tokio::select! {
                frame = frames.next() => Event::Frame(frame),
                command = self.supervisor.inbox.recv() => Event::Command(command),
                threads = self.supervisor.seat.changed() => Event::Threads(threads),
                _ = tick.tick() => Event::Tick,
            };
            let now = Instant::now();
            if matches!(event, Event::Tick) && now.duration_since(std::mem::replace(&mut ticked, now)) > HEARTBEAT_LATE
            {
                self.forgive(now);
            }
            if let Some(end) = self.apply(event, now) {
                return end;
            }
            self.note_work(now);
            if self.supervisor.drained(now) {
                return End::Stopped;
            }
        }
    }

    /// Counts silence anew: this process stood still itself, and what the worker said meanwhile may not have been read.
    fn forgive(&mut self, now: Instant) {
        (self.heard, self.steps.1, self.pooled_steps.1) = (now, now, now);
        if let Phase::Loading { moved, .. } = &mut self.phase {
            *moved = now;
        }
    }

    fn apply(&mut self, event: Event, now: Instant) -> Option<End> {
        match event {
            Event::Frame(None) => Some(End::Gone(None)),
            Event::Frame(Some(Err(error))) => Some(End::Gone(Some(error))),
            Event::Frame(Some(Ok(message))) => {
                self.heard = now;
                if std::mem::take(&mut self.late) {
                    self.judge();
                }
                self.on_message(message, now)
            }
            Event::Command(None) => Some(End::Stopped),
            Event::Command(Some(command)) => {
                self.on_command(command, now);
                None
            }
            Event::Threads(threads) => {
                self.supervisor.figures().threads.store(threads, Ordering::Relaxed);
                self.tell(ToWorker::Threads(threads));
                None
            }
            Event::Tick => self.on_tick(now),
        }
    }

    /// Takes a share of the threads while the worker has something to compute, and leaves it to others while it has not.
    fn note_work(&mut self, now: Instant) {
        let computes = match self.phase {
            Phase::Loading { share, .. } => share >= 1.0,
            Phase::Ready => self.on_cpu && (self.measures || !self.requests.is_empty()),
        };
        self.supervisor.seat.note(computes, now);
    }

    fn on_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Submit(request) => self.on_submit(request, now),
            Command::Cancel { id } => {
                if let Some(request) = self.requests.get_mut(&id) {
                    request.abandon();
                    self.tell(ToWorker::Cancel { id });
                }
            }
            Command::Probe(reply) => self.on_probe(reply, now),
            Command::Retire { drain_timeout, done } => self.supervisor.retire(drain_timeout, done),
        }
    }

    fn on_submit(&mut self, mut request: Box<Request>, now: Instant) {
        if request.is_abandoned() {
            // Whoever left while it was on its way may have told the worker that it was with before.
            return;
        }
        if !matches!(self.phase, Phase::Ready) {
            // It was picked just before the last worker died.
            return self.supervisor.pass_on(request, "it is being restarted");
        }
        let message = request.message(now);
        self.tell(message);
        self.requests.insert(request.id, request);
    }

    /// Tells the dispatcher whether the worker may get requests.
    fn judge(&self) {
        let healthy = matches!(self.phase, Phase::Ready) && !self.late && !self.doubted;
        let Supervisor { shared, worker, .. } = &*self.supervisor;
        tracing::info!(version = %shared.spec.name, worker, healthy, "the worker's dispatch changes");
        shared.desk.set_healthy(*worker, healthy);
    }

    /// Notes whether the worker may be relied on, by its last probe.
    fn doubt(&mut self, doubted: bool) {
        if std::mem::replace(&mut self.doubted, doubted) != doubted {
            self.judge();
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
                self.supervisor.shared.set_loaded(self.supervisor.worker, share);
            }
            FromWorker::LoadFailed { message, fault } => return Some(End::LoadFailed(load_error(message, fault))),
            FromWorker::Ready(model) => self.on_ready(model),
            FromWorker::Events(events) => {
                let mut broken = None;
                for (id, event) in events {
                    match event {
                        GenerationEvent::Failed(RequestError::Broken(reason)) => broken = Some(reason),
                        event => self.on_event(id, event, now),
                    }
                }
                // With all that the worker has, those requests are for another one.
                return broken.as_deref().map(cannot_decode);
            }
            FromWorker::Pooled { id, event } => self.on_pooled(id, event, now),
            FromWorker::Refused { id, error } => return self.on_refused(id, error),
            FromWorker::Probed(result) => return self.on_probed(result, now),
            FromWorker::Heartbeat(beat) => {
                if beat.engine.slots_active == 0 || beat.engine.steps != self.steps.0 {
                    self.steps = (beat.engine.steps, now);
                }
                if beat.pooled.computing == 0 || beat.pooled.steps != self.pooled_steps.0 {
                    self.pooled_steps = (beat.pooled.steps, now);
                }
                self.measures = beat.engine.measures;
                self.supervisor.shared.desk.set_level(self.supervisor.worker, beat.engine.degradation);
                self.supervisor.figures().heartbeat.send_replace(*beat);
            }
        }
        None
    }

    fn on_ready(&mut self, model: gantry_engine::ModelInfo) {
        let (shared, worker) = (&self.supervisor.shared, self.supervisor.worker);
        let devices: Vec<&str> = model.backends.devices.iter().map(|device| device.name.as_str()).collect();
        tracing::info!(
            version = %shared.spec.name, worker, model = %super::label(&model), cpu = %model.backends.cpu,
            devices = %devices.join(","), "worker ready"
        );
        self.phase = Phase::Ready;
        self.on_cpu = model.backends.gpus().next().is_none() || shared.spec.runtime.gpu_layers == Some(0);
        shared.set_loaded(worker, 1.0);
        shared.desk.set_cells(worker, model.kv_cells);
        shared.model.send_replace(Some(model));
        shared.move_to(worker, WorkerHealth::Ready);
        self.judge();
        if let Some(first) = self.supervisor.first.take() {
            // A load that was given up closes the inbox, which ends this session.
            let _ = first.send(Ok(()));
        }
    }

    fn on_event(&mut self, id: RequestId, event: GenerationEvent, now: Instant) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if matches!(event, GenerationEvent::Started { .. }) && !request.started {
            request.started = true;
            self.supervisor.figures().running.fetch_add(1, Ordering::Relaxed);
        }
        let terminal = event.is_terminal();
        if request.pass(event, now).is_stop() {
            self.tell(ToWorker::Cancel { id });
        }
        if terminal {
            self.serve(id, now);
        }
    }

    fn on_pooled(&mut self, id: RequestId, event: PooledEvent, now: Instant) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if !request.started {
            request.started = true;
            self.supervisor.figures().running.fetch_add(1, Ordering::Relaxed);
        }
        let terminal = event.is_terminal();
        request.pass_pooled(event, now);
        if terminal {
            self.serve(id, now);
        }
    }

    /// Lets go of a request that the worker is done with.
    fn serve(&mut self, id: RequestId, now: Instant) {
        self.remove(id);
        self.supervisor.shared.admission.served(now);
    }

    fn remove(&mut self, id: RequestId) -> Option<Box<Request>> {
        let request = self.requests.remove(&id)?;
        if request.started {
            self.supervisor.figures().running.fetch_sub(1, Ordering::Relaxed);
        }
        Some(request)
    }

    fn on_refused(&mut self, id: RequestId, error: EngineRefusal) -> Option<End> {
        if let EngineRefusal::Broken(reason) = error {
            // With all that the worker has, this request is for another one.
            return Some(cannot_decode(&reason));
        }
        let request = self.remove(id)?;
        match error {
            EngineRefusal::ShuttingDown => request.fail(RequestError::ShuttingDown.into()),
            EngineRefusal::InvalidParam(error) => request.fail(
                RequestError::InvalidRequest {
                    code: "invalid_value".to_owned(),
                    message: error.to_string(),
                    param: Some(error.param),
                }
                .into(),
            ),
            pressure @ EngineRefusal::MemoryPressure { level } => {
                let desk = &self.supervisor.shared.desk;
                desk.set_level(self.supervisor.worker, level);
                if desk.admits(request.demand.priority) && request.may_run_again() {
                    self.supervisor.pass_on(request, "it is short of memory");
                } else {
                    request.fail(RequestError::Overloaded(pressure.to_string()).into());
                }
            }
            // Admission is stricter than the engine's own limit, so this is our own fault.
            fault @ (EngineRefusal::QueueFull { .. } | EngineRefusal::Broken(_)) => {
                request.fail(RequestError::Internal(fault.to_string()).into());
            }
        }
        None
    }

    fn on_probed(&mut self, result: Result<(), ProbeError>, now: Instant) -> Option<End> {
        self.probe_sent = None;
        self.probe_passed = result.is_ok().then_some(now);
        self.doubt(result.is_err());
        let answer = result.as_ref().copied().map_err(ToString::to_string);
        self.answer_probes(&answer);
        match result {
            Err(ProbeError::Broken(reason)) => Some(cannot_decode(&reason)),
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
            self.doubt(true);
            self.answer_probes(&Err(format!("the worker did not answer a probe within {PROBE_LIMIT:?}")));
        }
        if self.doubted && self.probe_sent.is_none() {
            // Nobody may ask any more, and it is to get requests again when it can.
            self.probe_sent = Some(now);
            self.tell(ToWorker::Probe);
        }
        if !self.late && now.duration_since(self.heard) > HEARTBEAT_LATE {
            self.late = true;
            self.judge();
        }
        // The worker says so itself between two steps, and has the time of a tick for it.
        let (late, due) = (self.late, now.checked_sub(SUPERVISOR_TICK).unwrap_or(now));
        let expired = self.requests.values_mut().filter_map(|request| request.expire(due, late).then_some(request.id));
        for id in expired.collect::<Vec<_>>() {
            self.tell(ToWorker::Cancel { id });
        }
        let hung = |since: Instant, limit: Duration, what: &str| {
            (now.duration_since(since) > limit).then(|| End::Hung(format!("{what} for {limit:?}, so it was killed")))
        };
        hung(self.heard, HEARTBEAT_LIMIT, "it was silent").or_else(|| match self.phase {
            Phase::Loading { moved, .. } => hung(moved, LOAD_STALL_LIMIT, "its loading made no progress"),
            // A batch of texts may take as long as the fullest one did while it was loaded.
            Phase::Ready => hung(self.steps.1, STEP_STALL_LIMIT, "it had requests and finished no step")
                .or_else(|| hung(self.pooled_steps.1, LOAD_STALL_LIMIT, "it computed the same texts")),
        })
    }

    fn tell(&self, message: ToWorker) {
        // The writer ends only with the socket, and the reader sees that too.
        let _ = self.outbox.send(message);
    }
}

fn load_error(message: String, fault: LoadFault) -> LoadError {
    match fault {
        LoadFault::Model => LoadError::Model(message),
        LoadFault::Template => LoadError::Template(message),
        LoadFault::Numbers => LoadError::Numbers(message),
        LoadFault::Backend => LoadError::Backend(message),
    }
}

fn cannot_decode(reason: &str) -> End {
    End::Hung(format!("it cannot decode any more: {reason}"))
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod threads_tests;
