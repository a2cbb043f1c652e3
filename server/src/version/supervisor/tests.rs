//! A session driven by hand: no process, no socket, every order of events.
#![allow(clippy::unwrap_used)]

use futures::FutureExt;
use gantry_engine::{FinishReason, GenerationParams, ModelInfo, Prompt, Timings, Usage};
use proptest::prelude::*;

use super::*;
use crate::version::{Generation, RuntimeSettings, VersionSpec};

const PARALLEL: u32 = 2;
const QUEUE: usize = 3;

/// What may happen to a session; numbers pick among the requests there are, and past them.
#[derive(Clone, Debug)]
enum Op {
    Submit,
    /// The client leaves.
    Leave(usize),
    Started(u64),
    Delta(u64),
    Finished(u64),
    Failed(u64),
    Refused(u64),
    Probe,
    Probed(bool),
    Tick,
}

fn op() -> impl Strategy<Value = Op> {
    let id = 0_u64..12;
    prop_oneof![
        4 => Just(Op::Submit),
        2 => (0_usize..12).prop_map(Op::Leave),
        3 => id.clone().prop_map(Op::Started),
        4 => id.clone().prop_map(Op::Delta),
        2 => id.clone().prop_map(Op::Finished),
        1 => id.clone().prop_map(Op::Failed),
        1 => id.prop_map(Op::Refused),
        1 => Just(Op::Probe),
        1 => any::<bool>().prop_map(Op::Probed),
        1 => Just(Op::Tick),
    ]
}

fn shared() -> Arc<Shared> {
    Shared::new(VersionSpec {
        name: "v".to_owned(),
        digest: String::new(),
        model_path: "model.gguf".into(),
        served_name: "m".to_owned(),
        runtime: RuntimeSettings { parallel: PARALLEL, max_queue: QUEUE, ..RuntimeSettings::default() },
    })
}

fn supervisor(shared: &Arc<Shared>) -> (Supervisor, mpsc::UnboundedSender<Command>) {
    let (commands, inbox) = mpsc::unbounded_channel();
    let (first, _) = oneshot::channel();
    (Supervisor::new(Arc::clone(shared), inbox, watch::Sender::new(0.0), first), commands)
}

fn finished() -> GenerationEvent {
    GenerationEvent::Finished { reason: FinishReason::Stop, usage: Usage::default(), timings: Timings::default() }
}

/// The message that an operation stands for, if it is one of the worker's.
fn message(op: &Op) -> Option<FromWorker> {
    let event = |id: u64, event| Some(FromWorker::Events(vec![(id, event)]));
    match *op {
        Op::Started(id) => event(id, GenerationEvent::Started { prompt_tokens: 1 }),
        Op::Delta(id) => event(id, GenerationEvent::Delta { text: "x".to_owned(), tokens: 1, logprobs: Vec::new() }),
        Op::Finished(id) => event(id, finished()),
        Op::Failed(id) => event(id, GenerationEvent::Failed(RequestError::Internal("no".to_owned()))),
        Op::Refused(id) => Some(FromWorker::Refused { id, error: EngineRefusal::ShuttingDown }),
        Op::Probed(true) => Some(FromWorker::Probed(Ok(()))),
        Op::Probed(false) => Some(FromWorker::Probed(Err(ProbeError::Timeout { waited: PROBE_LIMIT }))),
        Op::Submit | Op::Leave(_) | Op::Probe | Op::Tick => None,
    }
}

/// Everything that a client gets to see.
fn seen(mut generation: Generation) -> Vec<Item> {
    let mut items = Vec::new();
    while let Some(Some(item)) = generation.next().now_or_never() {
        items.push(item);
    }
    items
}

proptest! {
    #[test]
    fn each_request_ends_once_and_gives_its_place_back(ops in proptest::collection::vec(op(), 0..120)) {
        let shared = shared();
        let (mut supervisor, commands) = supervisor(&shared);
        let (outbox, mut sent) = mpsc::unbounded_channel();
        let mut session = Session::new(&mut supervisor, outbox);
        let now = Instant::now();
        session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);

        let mut clients: Vec<Option<Generation>> = Vec::new();
        let mut probes = Vec::new();
        for op in ops {
            match &op {
                Op::Submit => if let Ok(place) = shared.admission.enter() {
                    let id = clients.len() as u64;
                    let (events, receiver) = mpsc::channel(8);
                    let request = GenerateRequest {
                        prompt: Prompt::Text(String::new()),
                        params: GenerationParams::default(),
                    };
                    clients.push(Some(Generation::new(id, receiver, commands.clone())));
                    let submit = Command::Submit { id, request, events, place };
                    session.apply(Event::Command(Some(submit)), now);
                },
                Op::Leave(index) => if let Some(client) = clients.get_mut(*index) {
                    *client = None;
                },
                Op::Probe => {
                    let (reply, answer) = oneshot::channel();
                    probes.push(answer);
                    session.apply(Event::Command(Some(Command::Probe(reply))), now);
                }
                Op::Tick => prop_assert!(session.apply(Event::Tick, now).is_none()),
                _ => {}
            }
            if let Some(message) = message(&op) {
                session.apply(Event::Frame(Some(Ok(message))), now);
            }
            while let Ok(command) = session.supervisor.inbox.try_recv() {
                session.apply(Event::Command(Some(command)), now);
            }
            prop_assert_eq!(session.requests.len(), shared.admission.in_flight());
            let started = session.requests.values().filter(|entry| entry.started).count();
            prop_assert_eq!(started, shared.running.load(Ordering::Relaxed) as usize);
        }

        // The worker dies, and a last probe answers those that wait.
        session.apply(Event::Frame(Some(Ok(FromWorker::Probed(Ok(()))))), now);
        for entry in std::mem::take(&mut session.requests).into_values() {
            entry.fail(GenerationError::WorkerDied("gone".to_owned()));
        }
        prop_assert_eq!(shared.admission.in_flight(), 0);
        for client in clients.into_iter().flatten() {
            let items = seen(client);
            let last = |item: &Item| !matches!(item, Ok(event) if !event.is_terminal());
            prop_assert_eq!(items.iter().filter(|item| last(item)).count(), 1, "{:?}", items);
            prop_assert!(last(items.last().unwrap()));
        }
        for mut probe in probes {
            prop_assert!(probe.try_recv().is_ok(), "a probe was not answered");
        }
        let cancelled = std::iter::from_fn(|| sent.try_recv().ok()).filter(|m| matches!(m, ToWorker::Cancel { .. }));
        prop_assert!(cancelled.count() <= 12);
    }
}

#[tokio::test]
async fn a_silent_worker_is_hung_and_a_busy_one_is_not() {
    let shared = shared();
    let (mut supervisor, _commands) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let start = Instant::now();
    let beat = |steps: u64, slots_active: u32| {
        let engine = gantry_engine::EngineStats { steps, slots_active, ..Default::default() };
        Event::Frame(Some(Ok(FromWorker::Heartbeat(Heartbeat { engine, rss_bytes: 1 }))))
    };
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), start);
    let mut now = start;
    // Busy, and each beat has more steps.
    for steps in 0..300 {
        now += Duration::from_secs(1);
        assert!(session.apply(beat(steps, 1), now).is_none());
        assert!(session.apply(Event::Tick, now).is_none());
    }
    // Busy, without a step.
    let mut hung = None;
    let stalled = now;
    while hung.is_none() && now - stalled < 2 * STEP_STALL_LIMIT {
        now += Duration::from_secs(1);
        session.apply(beat(299, 1), now);
        hung = session.apply(Event::Tick, now);
    }
    assert!(matches!(hung, Some(End::Hung(_))));
    assert!(now - stalled > STEP_STALL_LIMIT);
    // Idle, it need not step; silent, it is dead.
    session.apply(beat(299, 0), now);
    assert!(session.apply(Event::Tick, now).is_none());
    let silent = session.apply(Event::Tick, now + HEARTBEAT_LIMIT + Duration::from_secs(1));
    assert!(matches!(silent, Some(End::Hung(reason)) if reason.contains("silent")));
}

#[test]
fn a_client_that_does_not_read_is_cut_off_with_a_reason() {
    let shared = shared();
    let (mut supervisor, commands) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let (events, receiver) = mpsc::channel(4);
    let request = GenerateRequest { prompt: Prompt::Text(String::new()), params: GenerationParams::default() };
    let place = shared.admission.enter().ok().unwrap();
    session.apply(Event::Command(Some(Command::Submit { id: 7, request, events, place })), now);
    for _ in 0..10 {
        session.apply(Event::Frame(message(&Op::Delta(7)).map(Ok)), now);
    }
    let items = seen(Generation::new(7, receiver, commands));
    assert_eq!(items.len(), 4);
    assert_eq!(items.last(), Some(&Err(GenerationError::SlowClient)));
    let told: Vec<_> = std::iter::from_fn(|| sent.try_recv().ok()).collect();
    assert_eq!(told.iter().filter(|m| matches!(m, ToWorker::Cancel { id: 7 })).count(), 1);
    // The place is the worker's until it lets go.
    assert_eq!(shared.admission.in_flight(), 1);
    session.apply(Event::Frame(Some(Ok(FromWorker::Events(vec![(7, finished())])))), now);
    assert_eq!(shared.admission.in_flight(), 0);
}
