//! One worker's life as its supervisor sees it.
//!
//! An event is taken from the socket, the inbox or the clock and applied synchronously; what it leads to is queued, never
//! awaited. Absent: the process, and what becomes of the requests that are left when the life ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::{Stream, StreamExt};
use gantry_engine::{
    FinishReason, GenerationEvent, GenerationParams, MOST_STEP_LIMIT_MS, PooledEvent, PooledWork, Priority, ProbeError,
    Prompt, RequestError, SubmitError as EngineRefusal, TextInput, Turn,
};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use super::{Command, End, ProbeReply, Requests, Supervisor};
use crate::limits::{
    HEARTBEAT_LATE, HEARTBEAT_LIMIT, LOAD_STALL_LIMIT, PROBE_CACHE, PROBE_LIMIT, SLOW_CLIENT_CROWDED_LIMIT,
    SLOW_CLIENT_LIMIT, STEP_STALL_LIMIT, SUPERVISOR_TICK,
};
use crate::protocol::{FromWorker, LoadFault, ProtocolError, RequestId, ToWorker};
use crate::version::desk::Lease;
use crate::version::request::{Passed, Request};
use crate::version::suspects::Fate;
use crate::version::{LoadError, WorkerHealth, label};

/// Of the server's own request: see [`Suspects::needs_control`](crate::version::suspects::Suspects::needs_control). Others count from 1, and
/// never so far.
pub(super) const CONTROL_ID: RequestId = RequestId::MAX - 1;
/// What it says, and how many tokens are to come of it.
const CONTROL_TEXT: &str = "Hello";
const CONTROL_TOKENS: u32 = 4;

pub(super) enum Event {
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
pub(super) struct Session<'a> {
    pub(super) supervisor: &'a mut Supervisor,
    outbox: mpsc::UnboundedSender<ToWorker>,
    pub(super) requests: Requests,
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
    /// What is wrong with it, where it failed its last probe.
    fault: Option<String>,
    /// How many ms it had been computing something when it was last heard of, if it had, and how many it may.
    step: Option<(u64, u64)>,
    probe_sent: Option<Instant>,
    probe_passed: Option<Instant>,
    /// The server's own request is not answered yet, and nobody else's is run before it.
    controlled: bool,
}

impl<'a> Session<'a> {
    pub(super) fn new(supervisor: &'a mut Supervisor, outbox: mpsc::UnboundedSender<ToWorker>) -> Self {
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
            fault: None,
            step: None,
            probe_sent: None,
            probe_passed: None,
            controlled: false,
        }
    }

    pub(super) async fn run(
        &mut self,
        mut frames: impl Stream<Item = Result<FromWorker, ProtocolError>> + Unpin,
    ) -> End {
        let shared = &self.supervisor.shared;
        let config = shared.spec.engine_config(&self.supervisor.figures().share, shared.workers.len());
        let stamps = shared.spec.runtime.engine.stamps.clone();
        self.tell(ToWorker::Load { config, stamps });
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
    pub(super) fn forgive(&mut self, now: Instant) {
        (self.heard, self.steps.1, self.pooled_steps.1) = (now, now, now);
        if let Phase::Loading { moved, .. } = &mut self.phase {
            *moved = now;
        }
    }

    pub(super) fn apply(&mut self, event: Event, now: Instant) -> Option<End> {
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
    pub(super) fn note_work(&mut self, now: Instant) {
        let computes = match self.phase {
            Phase::Loading { share, .. } => share >= 1.0,
            Phase::Ready => self.on_cpu && (self.controlled || self.measures || !self.requests.is_empty()),
        };
        self.supervisor.seat.note(computes, now);
    }

    fn on_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Submit(request) => self.on_submit(request, now),
            Command::Cancel { id } => {
                // Whoever was told that it has ended has no more say in it.
                if let Some(request) = self.requests.get_mut(&id).filter(|request| !request.is_unheard) {
                    request.abandon();
                    self.tell(ToWorker::Cancel { id });
                }
            }
            Command::Resume { id } => self.on_resume(id),
            Command::Probe(reply) => self.on_probe(reply, now),
            Command::Retire { drain_timeout, done } => {
                self.supervisor.retire(drain_timeout, done);
                if self.supervisor.shared.desk.gives_back() {
                    self.give_back();
                }
            }
        }
    }

    /// The version makes room for another one, which those that may be given back are for: with what has begun, it goes on.
    fn give_back(&mut self) {
        for (id, request) in std::mem::take(&mut self.requests) {
            match request.give_back(false) {
                Some(request) => drop(self.requests.insert(id, request)),
                None => self.tell(ToWorker::Cancel { id }),
            }
        }
    }

    fn on_submit(&mut self, mut request: Box<Request>, now: Instant) {
        if request.is_abandoned() && !request.is_on_trial() {
            // Whoever left while it was on its way may have told the worker that it was with before.
            return;
        }
        if !matches!(self.phase, Phase::Ready) {
            // It was picked just before the last worker died.
            return self.supervisor.pass_on(request, Fate::Waits, "it is being restarted");
        }
        if self.supervisor.shared.desk.gives_back() {
            let Some(left) = request.give_back(false) else { return };
            request = left;
        }
        let message = request.message(now);
        self.tell(message);
        self.requests.insert(request.id, request);
    }

    /// Tells the dispatcher whether the worker may get requests.
    fn judge(&self) {
        let healthy = matches!(self.phase, Phase::Ready) && !self.late && !self.doubted && !self.controlled;
        let Supervisor { shared, worker, .. } = &*self.supervisor;
        tracing::info!(version = %shared.spec.name, worker, healthy, "the worker's dispatch changes");
        shared.desk.set_healthy(*worker, healthy);
    }

    /// Notes whether the worker may be relied on, by its last probe: what is wrong, if something is.
    fn doubt(&mut self, fault: Option<String>) {
        let doubted = fault.is_some();
        self.fault = fault;
        if std::mem::replace(&mut self.doubted, doubted) != doubted {
            self.judge();
        }
    }

    /// Answers by what is known, at once: whoever asks must not wait for a step to end. Only an idle worker is asked, for the
    /// next who wants to know.
    fn on_probe(&mut self, reply: ProbeReply, now: Instant) {
        let verdict = self.readiness();
        let is_proven = self.probe_passed.is_some_and(|at| now.duration_since(at) < PROBE_CACHE);
        if matches!(self.phase, Phase::Ready) && self.is_idle() && !is_proven {
            self.probe(now);
        }
        // The caller may have stopped waiting.
        let _ = reply.send(verdict);
    }

    /// Whether a token can be decoded, as far as is known: a step that has begun and is within its own limit is progress.
    fn readiness(&self) -> Result<(), String> {
        match (&self.phase, &self.fault, self.step) {
            (Phase::Loading { .. }, ..) => Err("the model is being loaded".to_owned()),
            _ if self.late => Err(format!("the worker has not been heard of for {HEARTBEAT_LATE:?}")),
            (Phase::Ready, _, Some((age_ms, limit_ms))) if age_ms > limit_ms => {
                Err(format!("a step has taken {age_ms} ms, and {limit_ms} ms are the most that it should"))
            }
            (Phase::Ready, Some(fault), _) => Err(fault.clone()),
            (Phase::Ready, None, _) if self.controlled => {
                Err("its worker is being tried after several have died".to_owned())
            }
            (Phase::Ready, None, _) => Ok(()),
        }
    }

    /// Whether it has nothing to compute, as far as is known.
    fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.step.is_none()
    }

    /// Has the worker show that it can decode, one probe at a time.
    fn probe(&mut self, now: Instant) {
        if self.probe_sent.is_none() {
            self.probe_sent = Some(now);
            self.tell(ToWorker::Probe);
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
            FromWorker::Ready(model) => self.on_ready(*model),
            FromWorker::Events(events) => {
                let mut broken = None;
                for (id, event) in events {
                    match event {
                        GenerationEvent::Failed(RequestError::Broken(reason)) => broken = Some(reason),
                        event if id == CONTROL_ID => broken = broken.or(self.on_control(event)),
                        event => self.on_event(id, event, now),
                    }
                }
                // With all that the worker has, those requests are for another one.
                return broken.as_deref().map(cannot_decode);
            }
            FromWorker::Pooled { id: CONTROL_ID, event } => match event {
                PooledEvent::Vector { .. } => {}
                PooledEvent::Finished { .. } => self.passed_control(),
                PooledEvent::Cancelled | PooledEvent::Failed(_) => return Some(failed_control(&event)),
            },
            FromWorker::Pooled { id, event } => self.on_pooled(id, event, now),
            FromWorker::Refused { id: CONTROL_ID, error } => return Some(failed_control(&error)),
            FromWorker::Refused { id, error } => return self.on_refused(id, error),
            FromWorker::Probed(result) => return self.on_probed(result, now),
            FromWorker::Heartbeat(beat) => {
                if beat.engine.slots_active == 0 || beat.engine.steps != self.steps.0 {
                    self.steps = (beat.engine.steps, now);
                }
                if beat.pooled.computing == 0 || beat.pooled.steps != self.pooled_steps.0 {
                    self.pooled_steps = (beat.pooled.steps, now);
                }
                let of_texts = beat.pooled.step_age_ms.map(|age_ms| (age_ms, MOST_STEP_LIMIT_MS));
                self.step = beat.engine.step_age_ms.map(|age_ms| (age_ms, beat.engine.step_limit_ms)).or(of_texts);
                self.measures = beat.engine.measures;
                self.supervisor.shared.desk.set_level(self.supervisor.worker, beat.engine.degradation);
                let figures = self.supervisor.figures();
                figures.heartbeat.send_replace(*beat);
                figures.heard_unix_ms.store(unix_ms(), Ordering::Relaxed);
            }
        }
        None
    }

    fn on_ready(&mut self, model: gantry_engine::ModelInfo) {
        let (shared, worker) = (&self.supervisor.shared, self.supervisor.worker);
        let devices: Vec<&str> = model.backends.devices.iter().map(|device| device.name.as_str()).collect();
        tracing::info!(
            version = %shared.spec.name, worker, model = %label(&model), cpu = %model.backends.cpu,
            devices = %devices.join(","), "worker ready"
        );
        self.phase = Phase::Ready;
        self.on_cpu = model.backends.gpus().next().is_none() || shared.spec.runtime.gpu_layers == Some(0);
        shared.set_loaded(worker, 1.0);
        shared.workers[worker].load().finish(Instant::now());
        shared.desk.set_cells(worker, model.kv_cells);
        let pooled_only = model.pooled_only;
        shared.model.send_replace(Some(model));
        shared.move_to(worker, WorkerHealth::Ready);
        self.controlled = shared.desk.suspects().needs_control();
        if self.controlled {
            self.tell(control(pooled_only));
        }
        self.judge();
        if let Some(first) = self.supervisor.first.take() {
            // A load that was given up closes the inbox, which ends this session.
            let _ = first.send(Ok(()));
        }
    }

    fn on_event(&mut self, id: RequestId, event: GenerationEvent, now: Instant) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if matches!(event, GenerationEvent::Started { .. }) && !request.is_running {
            request.is_running = true;
            self.supervisor.figures().running.fetch_add(1, Ordering::Relaxed);
        }
        let terminal = event.is_terminal();
        let tells = !matches!(
            event,
            GenerationEvent::Finished { reason: FinishReason::Cancelled, .. }
                | GenerationEvent::Failed(RequestError::DeadlineExceeded { .. })
        );
        let passed = request.pass(event, now);
        let has_passed = request.passes_trial();
        // Whoever waited for a suspect may have left, and now it is known whether it was one.
        if passed == Passed::Stops || has_passed && request.is_abandoned() {
            self.tell(ToWorker::Cancel { id });
        } else if passed == Passed::Pauses {
            if std::mem::take(&mut request.is_running) {
                self.supervisor.figures().running.fetch_sub(1, Ordering::Relaxed);
            }
            request.lease.iter_mut().for_each(Lease::pause);
            self.tell(ToWorker::Pause { id });
        }
        if has_passed {
            self.clear(id);
        }
        if terminal {
            self.serve(id, tells, now);
        }
    }

    /// Has a paused sequence go on, unless it was told to pause once more since.
    fn on_resume(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id).filter(|request| !request.is_paused()) else { return };
        if !std::mem::replace(&mut request.is_running, true) {
            self.supervisor.figures().running.fetch_add(1, Ordering::Relaxed);
        }
        request.lease.iter_mut().for_each(Lease::resume);
        self.tell(ToWorker::Resume { id });
    }

    /// A request is nobody's suspect any more.
    fn clear(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let mut memory = self.supervisor.shared.desk.suspects();
        memory.answered();
        memory.acquit(request.digest);
        drop(memory);
        if let Some(lease) = &mut request.lease {
            lease.open();
        }
        self.supervisor.shared.desk.wake();
    }

    fn on_pooled(&mut self, id: RequestId, event: PooledEvent, now: Instant) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if !request.is_running {
            request.is_running = true;
            self.supervisor.figures().running.fetch_add(1, Ordering::Relaxed);
        }
        let terminal = event.is_terminal();
        let tells =
            !matches!(event, PooledEvent::Cancelled | PooledEvent::Failed(RequestError::DeadlineExceeded { .. }));
        request.pass_pooled(event, now);
        if request.passes_trial() {
            self.clear(id);
        }
        if terminal {
            self.serve(id, tells, now);
        }
    }

    /// Lets go of a request that the worker is done with. `tells`: its end shows that it does no harm.
    fn serve(&mut self, id: RequestId, tells: bool, now: Instant) {
        let mut is_computed = true;
        if let Some(mut request) = self.remove(id) {
            is_computed = request.is_computed();
            let mut memory = self.supervisor.shared.desk.suspects();
            match (request.stop_trial(), tells) {
                (true, true) => memory.acquit(request.digest),
                (true, false) => memory.end_trial(request.digest),
                (false, _) => {}
            }
            if tells {
                memory.answered();
            }
        }
        // Those that took next to nothing say nothing of how long others wait.
        if is_computed {
            self.supervisor.shared.admission.served(now);
        }
    }

    fn remove(&mut self, id: RequestId) -> Option<Box<Request>> {
        let request = self.requests.remove(&id)?;
        if request.is_running {
            self.supervisor.figures().running.fetch_sub(1, Ordering::Relaxed);
        }
        Some(request)
    }

    fn on_refused(&mut self, id: RequestId, error: EngineRefusal) -> Option<End> {
        if let EngineRefusal::Broken(reason) = error {
            // With all that the worker has, this request is for another one.
            return Some(cannot_decode(&reason));
        }
        let mut request = self.remove(id)?;
        if request.stop_trial() {
            self.supervisor.shared.desk.suspects().end_trial(request.digest);
        }
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
                if desk.admits(request.demand.priority) && request.is_refused() {
                    self.supervisor.pass_on(request, Fate::Waits, "it is short of memory");
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
        self.doubt(result.as_ref().err().map(ToString::to_string));
        match result {
            Err(ProbeError::Broken(reason)) => Some(cannot_decode(&reason)),
            _ => None,
        }
    }

    /// Looks at the deadlines.
    fn on_tick(&mut self, now: Instant) -> Option<End> {
        if self.outbox.is_closed() {
            return Some(End::Hung("its socket takes no more messages, so it was killed".to_owned()));
        }
        if self.probe_sent.is_some_and(|sent| now.duration_since(sent) > PROBE_LIMIT + SUPERVISOR_TICK) {
            self.probe_sent = None;
            self.doubt(Some(format!("the worker did not answer a probe within {PROBE_LIMIT:?}")));
        }
        if self.doubted && self.probe_sent.is_none() {
            // Nobody may ask any more, and it is to get requests again when it can.
            self.probe(now);
        }
        if !self.late && now.duration_since(self.heard) > HEARTBEAT_LATE {
            self.late = true;
            self.judge();
        }
        // The worker says so itself between two steps, and has the time of a tick for it.
        let (late, due) = (self.late, now.checked_sub(SUPERVISOR_TICK).unwrap_or(now));
        let crowded = !self.supervisor.shared.admission.is_accepting();
        let patience = if crowded { SLOW_CLIENT_CROWDED_LIMIT } else { SLOW_CLIENT_LIMIT };
        let given_up = |request: &mut Request| request.expire(due, late) || request.ends_unread(now, patience);
        let expired = self.requests.values_mut().filter_map(|request| given_up(request).then_some(request.id));
        for id in expired.collect::<Vec<_>>() {
            self.tell(ToWorker::Cancel { id });
        }
        for request in self.requests.values_mut().filter(|request| request.is_on_trial()) {
            if request.outlasts_trial(now)
                && let Some(lease) = &mut request.lease
            {
                lease.open();
            }
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

    /// The server's own request says something; `Some`: it fails.
    fn on_control(&mut self, event: GenerationEvent) -> Option<String> {
        match event {
            GenerationEvent::Finished { .. } => self.passed_control(),
            GenerationEvent::Failed(error) => return Some(error.to_string()),
            _ => {}
        }
        None
    }

    fn passed_control(&mut self) {
        self.controlled = false;
        self.supervisor.shared.desk.suspects().answered();
        self.judge();
    }

    fn tell(&self, message: ToWorker) {
        // The writer ends only with the socket, and the reader sees that too.
        let _ = self.outbox.send(message);
    }
}

/// What a worker answers to show that the model itself kills none.
fn control(pooled_only: bool) -> ToWorker {
    if pooled_only {
        let work = PooledWork::Embed(vec![TextInput::Text(CONTROL_TEXT.to_owned())]);
        return ToWorker::Pool {
            id: CONTROL_ID,
            work,
            priority: Priority::High,
            turn: Turn::default(),
            timeout_ms: None,
        };
    }
    let max_tokens = Some(CONTROL_TOKENS);
    let params = GenerationParams { max_tokens, priority: Priority::High, ..GenerationParams::default() };
    ToWorker::Submit { id: CONTROL_ID, prompt: Arc::new(Prompt::Text(CONTROL_TEXT.to_owned())), params }
}

fn failed_control(why: &impl std::fmt::Debug) -> End {
    End::Hung(format!("it does not answer a request of the server's own: {why:?}"))
}

fn load_error(message: String, fault: LoadFault) -> LoadError {
    match fault {
        LoadFault::Model => LoadError::Model(message),
        LoadFault::Template => LoadError::Template(message),
        LoadFault::Numbers => LoadError::Numbers(message),
        LoadFault::Useless => LoadError::Useless(message),
        LoadFault::Backend => LoadError::Backend(message),
    }
}

fn cannot_decode(reason: &str) -> End {
    End::Hung(format!("it cannot decode any more: {reason}"))
}

/// The time, for people; a clock before 1970 says 1970.
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
