//! A session driven by hand: no process, no socket, every order of events.
#![allow(clippy::unwrap_used)]

use futures::{FutureExt, StreamExt};
use gantry_engine::{
    DegradationLevel, EmbedInput, FinishReason, GenerationEvent, GenerationParams, ModelInfo, PooledEvent, PooledWork,
    Priority, ProbeError, Prompt, RequestError, SubmitError as EngineRefusal, Timings, Usage,
};
use proptest::prelude::*;
use tokio::sync::watch;

use super::session::{CONTROL_ID, Event};
use super::*;
use crate::limits::{
    CRASH_LIMIT, HEARTBEAT_LATE, HEARTBEAT_LIMIT, OUTPUT_BUDGET_BYTES, OUTPUT_OVERRUN_BYTES, OUTPUT_PER_ANSWER_BYTES,
    PROBE_CACHE, PROBE_LIMIT, SLOW_CLIENT_CROWDED_LIMIT, SLOW_CLIENT_LIMIT, STEP_STALL_LIMIT,
};
use crate::output::Output;
use crate::processors::Processors;
use crate::version::Slowness;
use crate::version::channel::channel;
use crate::version::desk::Lanes;
use crate::version::dispatch::{Demand, DispatchStrategy, Refusal};
use crate::version::generation::Item;
use crate::version::suspects::{Digest, DigestKeys, Standing};
use crate::version::threads::Threads;
use crate::version::{GenerateRequest, Generation, PoolRequest, Pooled, RuntimeSettings, Scheduling, VersionSpec};

const PARALLEL: u32 = 2;
const QUEUE: usize = 3;
/// Past what may wait at once, and past what may still come after a few more.
const FLOOD_BYTES: usize = OUTPUT_PER_ANSWER_BYTES + OUTPUT_OVERRUN_BYTES / 4;

/// What may happen to a session; numbers pick among the requests there are, and past them.
#[derive(Clone, Debug)]
enum Op {
    Submit,
    /// The client leaves.
    Leave(usize),
    Started(u64),
    Delta(u64),
    /// Much more text than may wait.
    Flood(u64),
    /// The client takes an event.
    Read(usize),
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
        3 => id.clone().prop_map(Op::Flood),
        4 => (0_usize..12).prop_map(Op::Read),
        2 => id.clone().prop_map(Op::Finished),
        1 => id.clone().prop_map(Op::Failed),
        1 => id.prop_map(Op::Refused),
        1 => Just(Op::Probe),
        1 => any::<bool>().prop_map(Op::Probed),
        1 => Just(Op::Tick),
    ]
}

pub(super) fn shared() -> Arc<Shared> {
    shared_of(None)
}

/// A version with so many workers.
fn shared_of(workers: Option<u32>) -> Arc<Shared> {
    let scheduling = Scheduling { max_queue: QUEUE, ..Scheduling::default() };
    let spec = VersionSpec {
        name: "v".to_owned(),
        digest: String::new(),
        model_path: "model.gguf".into(),
        served_name: "m".to_owned(),
        runtime: RuntimeSettings { parallel: PARALLEL, workers, scheduling, ..RuntimeSettings::default() },
    };
    let shares = spec.runtime.shares(&Processors::alike(workers.unwrap_or(1)), 0).unwrap();
    Shared::new(spec, shares, watch::Sender::new(0.0))
}

/// The supervisor of a version's only worker, the ways to it, and what goes to the waiting room.
fn supervisor(shared: &Arc<Shared>) -> (Supervisor, Arc<Lanes>, mpsc::UnboundedReceiver<Box<Request>>) {
    supervisor_at(shared, Threads::new(2).join(2))
}

pub(super) fn supervisor_at(
    shared: &Arc<Shared>,
    seat: Seat,
) -> (Supervisor, Arc<Lanes>, mpsc::UnboundedReceiver<Box<Request>>) {
    let (commands, inbox) = mpsc::unbounded_channel();
    let (room, waiting) = mpsc::unbounded_channel();
    let (first, _) = oneshot::channel();
    let post = Post { worker: 0, inbox, room: room.clone(), first, seat };
    let lanes = Lanes { desk: Arc::clone(&shared.desk), supervisors: vec![commands], room };
    (Supervisor::new(Arc::clone(shared), post), Arc::new(lanes), waiting)
}

/// A request as it comes to the worker, and its client's end.
pub(super) fn request(shared: &Shared, lanes: &Arc<Lanes>, id: RequestId) -> Option<(Box<Request>, Generation)> {
    request_in(&Output::new(OUTPUT_BUDGET_BYTES), shared, lanes, id)
}

/// The same of one whose client's memory is this one's.
fn request_in(
    output: &Arc<Output>,
    shared: &Shared,
    lanes: &Arc<Lanes>,
    id: RequestId,
) -> Option<(Box<Request>, Generation)> {
    let place = shared.admission.enter().ok()?;
    let (events, receiver) = channel(output, 1);
    let asked = GenerateRequest { prompt: Arc::new(Prompt::Text("p".to_owned())), params: GenerationParams::default() };
    let mut request = Request::new(id, asked, Demand::default(), events, place);
    request.assign(shared.desk.lease(&request.demand).ok()?);
    let generation = Generation::new(id, receiver, Arc::clone(lanes), request.worker());
    Some((request, generation))
}

pub(super) fn finished() -> GenerationEvent {
    GenerationEvent::Finished { reason: FinishReason::Stop, usage: Usage::default(), timings: Timings::default() }
}

/// Text of so many bytes.
fn delta(bytes: usize) -> GenerationEvent {
    GenerationEvent::Delta { text: "x".repeat(bytes), tokens: 1, logprobs: Vec::new() }
}

/// The message that an operation stands for, if it is one of the worker's.
fn message(op: &Op) -> Option<FromWorker> {
    let event = |id: u64, event| Some(FromWorker::Events(vec![(id, event)]));
    match *op {
        Op::Started(id) => event(id, GenerationEvent::Started { prompt_tokens: 1 }),
        Op::Delta(id) => event(id, delta(1)),
        Op::Flood(id) => event(id, delta(FLOOD_BYTES)),
        Op::Finished(id) => event(id, finished()),
        Op::Failed(id) => event(id, GenerationEvent::Failed(RequestError::Internal("no".to_owned()))),
        Op::Refused(id) => Some(FromWorker::Refused { id, error: EngineRefusal::ShuttingDown }),
        Op::Probed(true) => Some(FromWorker::Probed(Ok(()))),
        Op::Probed(false) => Some(FromWorker::Probed(Err(ProbeError::Timeout { waited: PROBE_LIMIT }))),
        Op::Submit | Op::Leave(_) | Op::Read(_) | Op::Probe | Op::Tick => None,
    }
}

/// Everything that a client gets to see.
fn seen(mut generation: Generation) -> Vec<Item> {
    std::iter::from_fn(|| generation.next().now_or_never().flatten()).collect()
}

/// Has the session hear what was asked of its supervisor.
fn hear(session: &mut Session<'_>, now: Instant) {
    while let Ok(command) = session.supervisor.inbox.try_recv() {
        session.apply(Event::Command(Some(command)), now);
    }
}

proptest! {
    #[test]
    fn each_request_ends_once_and_gives_its_place_back(ops in proptest::collection::vec(op(), 0..120)) {
        let shared = shared();
        let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
        let (outbox, mut sent) = mpsc::unbounded_channel();
        let mut session = Session::new(&mut supervisor, outbox);
        let now = Instant::now();
        session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);

        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let mut clients: Vec<Option<(Generation, Vec<Item>)>> = Vec::new();
        let (mut probes, mut told) = (Vec::new(), Vec::new());
        for op in ops {
            match &op {
                // A worker that failed a probe gets nothing.
                Op::Submit => if let Some((request, client)) = request_in(&output, &shared, &lanes, clients.len() as u64) {
                    clients.push(Some((client, Vec::new())));
                    session.apply(Event::Command(Some(Command::Submit(request))), now);
                },
                Op::Leave(index) => if let Some(client) = clients.get_mut(*index) {
                    *client = None;
                },
                Op::Read(index) => if let Some(Some((client, items))) = clients.get_mut(*index) {
                    items.extend(client.next().now_or_never().flatten());
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
            hear(&mut session, now);
            told.extend(std::iter::from_fn(|| sent.try_recv().ok()));
            prop_assert_eq!(session.requests.len(), shared.admission.in_flight());
            prop_assert_eq!(session.requests.len(), shared.desk.figures(0).1 as usize);
            let running = session.requests.values().filter(|request| request.is_running).count();
            prop_assert_eq!(running, shared.workers[0].running.load(Ordering::Relaxed) as usize);
            for request in session.requests.values() {
                let of_request = told.iter().rev().find(|message| matches!(message,
                    ToWorker::Pause { id } | ToWorker::Resume { id } if *id == request.id));
                let is_told_to_pause = matches!(of_request, Some(ToWorker::Pause { .. }));
                prop_assert!(request.is_abandoned() || request.is_paused() == is_told_to_pause);
            }
        }

        // The worker dies.
        let begun: Vec<RequestId> = session.requests.keys().copied().filter(|id| id % 2 == 0).collect();
        die(&mut session, &begun, now);
        // Those that had sent nothing keep their places and wait for another worker; this version has none.
        let mut again = 0;
        while let Ok(request) = waiting.try_recv() {
            again += 1;
            shared.desk.leave_room();
            prop_assert_eq!(shared.admission.in_flight() > 0, true);
            request.fail(GenerationError::WorkerDied("gone".to_owned()));
        }
        prop_assert_eq!(again, shared.retries.load(Ordering::Relaxed));
        prop_assert_eq!(shared.admission.in_flight(), 0);
        prop_assert_eq!(shared.desk.figures(0).1, 0);
        for (client, mut items) in clients.into_iter().flatten() {
            items.extend(seen(client));
            let last = |item: &Item| !matches!(item, Ok(event) if !event.is_terminal());
            prop_assert_eq!(items.iter().filter(|item| last(item)).count(), 1, "{:?}", items);
            prop_assert!(last(items.last().unwrap()));
            let starts = items.iter().filter(|item| matches!(item, Ok(GenerationEvent::Started { .. })));
            prop_assert!(starts.count() <= 1);
        }
        for mut probe in probes {
            prop_assert!(probe.try_recv().is_ok(), "a probe was not answered");
        }
        let cancelled = told.iter().filter(|message| matches!(message, ToWorker::Cancel { .. })).count();
        prop_assert!(cancelled <= 24);
        prop_assert_eq!(output.held_bytes(), 0);
    }
}

#[tokio::test]
async fn a_silent_worker_is_hung_and_a_busy_one_is_not() {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let start = Instant::now();
    let beat = |steps: u64, slots_active: u32| {
        let engine = gantry_engine::EngineStats { steps, slots_active, ..Default::default() };
        Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::new(Heartbeat { engine, ..Heartbeat::default() })))))
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

/// Those that the worker was told since.
fn told(sent: &mut mpsc::UnboundedReceiver<ToWorker>) -> Vec<ToWorker> {
    std::iter::from_fn(|| sent.try_recv().ok()).filter(|message| !matches!(message, ToWorker::Submit { .. })).collect()
}

#[test]
fn a_client_that_does_not_read_has_its_answer_paused_and_then_ended_with_a_reason() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let mut now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let (request, mut client) = request_in(&output, &shared, &lanes, 7).unwrap();
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    let apply = |session: &mut Session<'_>, op: Op, now| {
        // It is heard of all the while.
        session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
        let event = message(&op).map_or(Event::Tick, |message| Event::Frame(Some(Ok(message))));
        assert!(session.apply(event, now).is_none());
    };
    let running = || shared.workers[0].running.load(Ordering::Relaxed);
    apply(&mut session, Op::Started(7), now);
    assert_eq!((told(&mut sent), running()), (vec![], 1));
    // What comes after it was told to pause was on its way.
    for _ in 0..2 {
        apply(&mut session, Op::Flood(7), now);
    }
    assert_eq!((told(&mut sent), running()), (vec![ToWorker::Pause { id: 7 }], 0));
    // A client that reads a part of it, however late, has it wait; and goes on once it has read enough.
    apply(&mut session, Op::Tick, now);
    now += SLOW_CLIENT_LIMIT;
    for _ in ["that it began", "text"] {
        assert!(client.next().now_or_never().flatten().unwrap().is_ok());
        hear(&mut session, now);
    }
    for _ in 0..2 {
        apply(&mut session, Op::Tick, now);
        now += SLOW_CLIENT_LIMIT - SUPERVISOR_TICK;
        assert_eq!((told(&mut sent), running()), (vec![], 0));
    }
    assert!(client.next().now_or_never().flatten().unwrap().is_ok());
    hear(&mut session, now);
    assert_eq!((told(&mut sent), running()), (vec![ToWorker::Resume { id: 7 }], 1));
    // One that reads nothing does not for ever.
    apply(&mut session, Op::Flood(7), now);
    assert_eq!(told(&mut sent), [ToWorker::Pause { id: 7 }]);
    for (after, told_then) in [
        (Duration::ZERO, vec![]),
        (SLOW_CLIENT_LIMIT - SUPERVISOR_TICK, vec![]),
        (SUPERVISOR_TICK, vec![ToWorker::Cancel { id: 7 }]),
        (SLOW_CLIENT_LIMIT, vec![]),
    ] {
        now += after;
        apply(&mut session, Op::Tick, now);
        assert_eq!(told(&mut sent), told_then);
    }
    assert!(output.held_bytes() < 4096, "what waited is thrown away at once");
    assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Stalled(SLOW_CLIENT_LIMIT)))]);
    assert_eq!((output.ended(), output.held_bytes()), (1, 0));
    // The place is the worker's until it lets go.
    assert_eq!(shared.admission.in_flight(), 1);
    apply(&mut session, Op::Finished(7), now);
    assert_eq!(shared.admission.in_flight(), 0);
}

#[test]
fn a_paused_answer_leaves_its_cells_to_others_until_it_goes_on() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    shared.desk.set_strategy(DispatchStrategy::MemoryAware);
    let model = ModelInfo { kv_cells: 100, ..ModelInfo::default() };
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(model)))), now);
    let demand = Demand { cells: 60, ..Demand::default() };
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let (mut request, mut client) = request_in(&output, &shared, &lanes, 7).unwrap();
    request.lease = None;
    request.assign(shared.desk.lease(&demand).ok().unwrap());
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    session.apply(Event::Frame(message(&Op::Started(7)).map(Ok)), now);
    let refusal = || shared.desk.lease(&demand).err();
    assert_eq!(refusal(), Some(Refusal::NotNow));
    // Somebody waits for those cells.
    shared.desk.enter_room();
    assert!(shared.desk.freed.notified().now_or_never().is_none());
    session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
    assert_eq!(told(&mut sent), [ToWorker::Pause { id: 7 }]);
    assert!(shared.desk.freed.notified().now_or_never().is_some(), "the room is woken");
    let other = shared.desk.lease(&demand).ok().unwrap();
    assert_eq!(shared.desk.figures(0), (true, 2), "both are its own still");
    // Its client reads. What it needs is counted again, though another one has it.
    while told(&mut sent).is_empty() {
        assert!(client.next().now_or_never().flatten().unwrap().is_ok());
        hear(&mut session, now);
    }
    let small = Demand { cells: 1, ..Demand::default() };
    assert_eq!(shared.desk.lease(&small).err(), Some(Refusal::NotNow));
    drop(other);
    assert_eq!((refusal(), shared.desk.lease(&small).is_ok()), (Some(Refusal::NotNow), true));
    // It is paused once more, and ends so.
    session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
    assert_eq!((told(&mut sent), refusal()), (vec![ToWorker::Pause { id: 7 }], None));
    session.apply(Event::Frame(message(&Op::Finished(7)).map(Ok)), now);
    assert_eq!((shared.desk.figures(0), refusal()), ((true, 0), None));
    let whole = Demand { cells: 100, ..Demand::default() };
    let all = shared.desk.lease(&whole).ok().unwrap();
    assert_eq!(shared.desk.lease(&small).err(), Some(Refusal::NotNow), "no cell was given back twice");
    drop(all);
}

#[test]
fn a_client_that_does_not_read_makes_room_sooner_where_others_are_refused() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let mut now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let (request, client) = request(&shared, &lanes, 7).unwrap();
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
    let places: Vec<_> = std::iter::from_fn(|| shared.admission.enter().ok()).collect();
    let mut wait = |time| {
        now += time;
        session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
        assert!(session.apply(Event::Tick, now).is_none());
        told(&mut sent)
    };
    assert_eq!(wait(Duration::ZERO), [ToWorker::Pause { id: 7 }]);
    assert_eq!(wait(SLOW_CLIENT_CROWDED_LIMIT - SUPERVISOR_TICK), []);
    assert_eq!(wait(SUPERVISOR_TICK), [ToWorker::Cancel { id: 7 }]);
    assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Stalled(SLOW_CLIENT_CROWDED_LIMIT)))]);
    drop(places);
}

#[test]
fn a_worker_that_does_not_pause_an_answer_has_it_ended() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let (request, client) = request_in(&output, &shared, &lanes, 7).unwrap();
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    for _ in 0..9 {
        session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
        assert!(output.held_bytes() < OUTPUT_PER_ANSWER_BYTES + OUTPUT_OVERRUN_BYTES);
    }
    assert_eq!(told(&mut sent), [ToWorker::Pause { id: 7 }, ToWorker::Cancel { id: 7 }]);
    assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Overrun))]);
    assert_eq!(output.held_bytes(), 0);
}

#[test]
fn a_worker_that_is_late_or_fails_a_probe_gets_nothing_until_it_does_better() {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let dispatchable = || shared.desk.figures(0).0;
    let mut now = Instant::now();
    assert!(!dispatchable(), "it loads");
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    assert!(dispatchable());

    now += HEARTBEAT_LATE + SUPERVISOR_TICK;
    assert!(session.apply(Event::Tick, now).is_none(), "late is not dead");
    assert!(!dispatchable());
    session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
    assert!(dispatchable());

    session.apply(Event::Frame(message(&Op::Probed(false)).map(Ok)), now);
    assert!(!dispatchable());
    while sent.try_recv().is_ok() {}
    // Nobody asks, and it is probed all the same, one probe at a time.
    for _ in 0..3 {
        session.apply(Event::Tick, now);
    }
    assert_eq!(sent.try_recv().ok(), Some(ToWorker::Probe));
    assert!(sent.try_recv().is_err());
    session.apply(Event::Frame(message(&Op::Probed(true)).map(Ok)), now);
    assert!(dispatchable());
}

/// The worker dies while it works on those that have begun; what it had goes where it belongs.
fn die(session: &mut Session<'_>, begun: &[RequestId], now: Instant) -> Duration {
    let requests = std::mem::take(&mut session.requests);
    let begun = begun.iter().copied().collect();
    let (judged, has_suspects) = session.supervisor.judge_requests(requests, &begun, now);
    let wait = session.supervisor.after_death("gone", has_suspects);
    for (request, fate) in judged {
        session.supervisor.pass_on(request, fate, "gone");
    }
    session.supervisor.shared.move_to(0, WorkerHealth::Ready);
    wait
}

fn those_in(waiting: &mut mpsc::UnboundedReceiver<Box<Request>>) -> Vec<Request> {
    let mut again: Vec<Request> = std::iter::from_fn(|| waiting.try_recv().ok()).map(|request| *request).collect();
    again.sort_by_key(|request| request.id);
    again
}

#[test]
fn who_waited_in_a_worker_that_dies_loses_nothing_however_often_that_happens() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let mut clients = Vec::new();
    for id in 1..5 {
        let (mut request, client) = request(&shared, &lanes, id).unwrap();
        request.digest = digest(id);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        clients.push(Some(client));
    }
    session.apply(Event::Frame(message(&Op::Delta(2)).map(Ok)), now);
    clients[2] = None;
    let deaths = 20;
    for death in 0..deaths {
        // Only the second had begun, and its client has text.
        die(&mut session, if death == 0 { &[2] } else { &[] }, now);
        let again = those_in(&mut waiting);
        let ids: Vec<_> = again.iter().map(|request| request.id).collect();
        assert_eq!(ids, [1, 4], "after death {death}");
        assert_eq!(shared.admission.in_flight(), 2, "each keeps its place");
        assert_eq!(shared.desk.figures(0).1, 0, "and no worker has it");
        for mut request in again {
            shared.desk.leave_room();
            shared.desk.set_healthy(0, true);
            assert!(!request.suspect);
            request.assign(shared.desk.lease(&request.demand).unwrap());
            session.apply(Event::Command(Some(Command::Submit(Box::new(request)))), now);
        }
    }
    session.apply(Event::Frame(message(&Op::Finished(1)).map(Ok)), now);
    session.apply(Event::Frame(message(&Op::Finished(4)).map(Ok)), now);
    let last: Vec<_> = clients.into_iter().flatten().map(|client| seen(client).pop().unwrap()).collect();
    assert_eq!(last, [Ok(finished()), Err(GenerationError::WorkerDied("gone".to_owned())), Ok(finished())]);
    assert_eq!(shared.admission.in_flight(), 0);
    let submitted = std::iter::from_fn(|| sent.try_recv().ok()).filter(|m| matches!(m, ToWorker::Submit { .. }));
    assert_eq!(submitted.count(), 4 + 2 * deaths);
}

fn digest(id: RequestId) -> Digest {
    let prompt = Arc::new(Prompt::Text(id.to_string()));
    static KEYS: std::sync::LazyLock<DigestKeys> = std::sync::LazyLock::new(DigestKeys::default);
    KEYS.of_text(&GenerateRequest { prompt, params: GenerationParams::default() })
}

#[test]
fn a_suspect_is_run_once_more_by_itself_and_then_refused() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let mut clients = Vec::new();
    for id in 1..4 {
        let (mut request, client) = request(&shared, &lanes, id).unwrap();
        request.digest = digest(id);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        clients.push(client);
    }
    // The first and the second were being prepared, the third waited.
    assert_eq!(
        die(&mut session, &[1, 2], now),
        Duration::ZERO,
        "a death by a request is followed by the next life at once"
    );
    let mut again = those_in(&mut waiting);
    assert_eq!(again.iter().map(|request| request.suspect).collect::<Vec<_>>(), [true, true, false]);
    let standing = |id| shared.desk.suspects().standing(digest(id), now);
    assert_eq!(standing(1), Standing::Suspected { reached: 0, on_trial: false });
    assert_eq!(standing(3), Standing::Clear);
    let run_alone = |session: &mut Session<'_>, mut request: Request| {
        shared.desk.leave_room();
        shared.desk.set_healthy(0, true);
        request.assign(shared.desk.lease_alone(&request.demand).unwrap());
        request.begin_trial(0, now);
        shared.desk.suspects().begin_trial(request.digest);
        session.apply(Event::Command(Some(Command::Submit(Box::new(request)))), now);
        assert!(shared.desk.lease(&Demand::default()).is_err(), "nobody else gets there");
    };
    run_alone(&mut session, again.remove(0));
    session.apply(Event::Frame(message(&Op::Delta(1)).map(Ok)), now);
    assert_eq!(standing(1), Standing::Clear);
    assert!(shared.desk.lease(&Demand::default()).is_ok(), "it is as any other from its first text on");
    session.apply(Event::Frame(message(&Op::Finished(1)).map(Ok)), now);

    run_alone(&mut session, again.remove(0));
    assert_eq!(die(&mut session, &[2], now), Duration::ZERO);
    assert_eq!(standing(2), Standing::Convicted);
    assert!(waiting.try_recv().is_err());
    let last: Vec<_> = clients.into_iter().map(|client| seen(client).pop()).collect();
    assert_eq!(last, [Some(Ok(finished())), Some(Err(GenerationError::EndsWorker)), None]);
    assert_eq!(*shared.health.borrow(), WorkerHealth::Ready);
}

#[test]
fn deaths_by_requests_open_no_breaker_unless_nobody_is_answered_any_more() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    let ready = || Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default()))));
    session.apply(ready(), now);
    for id in 1..=3 * CRASH_LIMIT as u64 {
        let (mut request, _client) = request(&shared, &lanes, id).unwrap();
        request.digest = digest(id);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        assert_eq!(die(&mut session, &[id], now), Duration::ZERO);
        let mut request = waiting.try_recv().unwrap();
        shared.desk.leave_room();
        shared.desk.set_healthy(0, true);
        request.assign(shared.desk.lease_alone(&request.demand).unwrap());
        request.begin_trial(0, now);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        assert_eq!(die(&mut session, &[id], now), Duration::ZERO);
        shared.desk.set_healthy(0, true);
    }
    while sent.try_recv().is_ok() {}
    // Is it the model? Before anybody else's, a request of the server's own is run.
    session.apply(ready(), now);
    let control = sent.try_recv().ok();
    assert!(matches!(control, Some(ToWorker::Submit { id: CONTROL_ID, .. })), "{control:?}");
    assert!(!shared.desk.figures(0).0, "nobody else gets there");
    session.apply(Event::Frame(Some(Ok(FromWorker::Events(vec![(CONTROL_ID, finished())])))), now);
    assert!(shared.desk.figures(0).0);
    assert!(!shared.desk.suspects().needs_control());
    // Had the worker died of it, that would have been a crash.
    for _ in 1..CRASH_LIMIT {
        assert!(die(&mut session, &[CONTROL_ID], now) > Duration::ZERO);
    }
    assert_eq!(die(&mut session, &[CONTROL_ID], now), crate::limits::FAILED_RETRY_PERIOD);
}

#[test]
fn deaths_that_no_request_caused_count_in_the_end() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    // Somebody kills it whenever it works on something.
    for id in 1..=CRASH_LIMIT as u64 {
        let (mut request, client) = request(&shared, &lanes, id).unwrap();
        request.digest = digest(id);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        assert_eq!(die(&mut session, &[id], now), Duration::ZERO, "it may have been the request");
        let mut request = waiting.try_recv().unwrap();
        shared.desk.leave_room();
        shared.desk.set_healthy(0, true);
        request.assign(shared.desk.lease_alone(&request.demand).unwrap());
        request.begin_trial(0, now);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        session.apply(Event::Frame(message(&Op::Finished(id)).map(Ok)), now);
        assert_eq!(seen(client).pop(), Some(Ok(finished())));
    }
    assert_eq!(die(&mut session, &[], now), crate::limits::FAILED_RETRY_PERIOD, "it was none of them");
}

#[test]
fn what_a_broken_engine_gave_up_is_for_another_worker() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let mut clients = Vec::new();
    for id in 0..2 {
        let (request, client) = request(&shared, &lanes, id).unwrap();
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        clients.push(client);
    }
    let broken = |id| (id, GenerationEvent::Failed(RequestError::Broken("no".to_owned())));
    let done = (0, finished());
    let end = session.apply(Event::Frame(Some(Ok(FromWorker::Events(vec![broken(1), done])))), now);
    assert!(matches!(end, Some(End::Hung(reason)) if reason.ends_with("no")));
    // One had its end before; the other has heard nothing, and runs again.
    assert_eq!(session.requests.keys().collect::<Vec<_>>(), [&1]);
    die(&mut session, &[1], now);
    assert_eq!(waiting.try_recv().unwrap().id, 1);
    let last: Vec<Option<Item>> = clients.into_iter().map(|client| seen(client).pop()).collect();
    assert_eq!(last, [Some(Ok(finished())), None]);
}

#[test]
fn what_a_worker_without_memory_refuses_is_for_another_if_one_has_some() {
    let shared = shared_of(Some(2));
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    shared.desk.set_healthy(1, true);
    let level = DegradationLevel::Emergency;
    let mut refused = |id| {
        let (request, client) = request(&shared, &lanes, id).unwrap();
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        let error = EngineRefusal::MemoryPressure { level };
        session.apply(Event::Frame(Some(Ok(FromWorker::Refused { id, error }))), now);
        client
    };
    let client = refused(0);
    assert_eq!(waiting.try_recv().unwrap().id, 0);
    assert_eq!(shared.desk.lease(&Demand::default()).ok().unwrap().worker(), 1, "who refuses gets nothing else");
    drop(client);
    shared.desk.set_level(1, level);
    let client = refused(1);
    assert!(waiting.try_recv().is_err());
    let told = seen(client).pop().unwrap().unwrap_err();
    assert!(matches!(told, GenerationError::Request(RequestError::Overloaded(_))), "{told}");
}

#[test]
fn time_goes_by_for_those_who_wait_whatever_their_worker_says() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let mut clients = Vec::new();
    for id in 0..3 {
        let (mut request, client) = request(&shared, &lanes, id).unwrap();
        request.waits_for(50);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        clients.push(client);
    }
    let says = |event| Event::Frame(Some(Ok(FromWorker::Events(vec![event]))));
    let started = || GenerationEvent::Started { prompt_tokens: 1 };
    session.apply(says((1, started())), now);
    session.apply(says((2, started())), now);
    let delta = GenerationEvent::Delta { text: "x".to_owned(), tokens: 1, logprobs: Vec::new() };
    session.apply(says((2, delta)), now);
    let cancelled = |sent: &mut mpsc::UnboundedReceiver<ToWorker>| -> Vec<RequestId> {
        let told = std::iter::from_fn(|| sent.try_recv().ok());
        told.filter_map(|told| if let ToWorker::Cancel { id } = told { Some(id) } else { None }).collect()
    };
    // The worker has a moment to say so itself.
    session.apply(Event::Tick, now + Duration::from_millis(60));
    assert!(cancelled(&mut sent).is_empty());
    session.apply(Event::Tick, now + Duration::from_millis(60) + SUPERVISOR_TICK);
    assert_eq!(cancelled(&mut sent), [0], "the second one may have a token that is not text yet");
    session.apply(Event::Tick, now + HEARTBEAT_LATE + SUPERVISOR_TICK);
    assert_eq!(cancelled(&mut sent), [1], "of a silent worker nothing is to be expected");
    assert_eq!(shared.admission.in_flight(), 3, "the worker still has them");
    for (client, is_late) in clients.into_iter().zip([true, true, false]) {
        let last = seen(client).pop().unwrap();
        let is_told = matches!(
            last,
            Err(GenerationError::Request(RequestError::DeadlineExceeded { limit_ms: 50, waited_ms: 50.. }))
        );
        assert_eq!(is_told, is_late, "{last:?}");
    }
}

#[test]
fn vectors_come_in_their_order_and_none_is_left_from_a_life_to_the_next() {
    let shared = shared();
    let (mut supervisor, lanes, mut waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let asked = |id: RequestId| {
        let texts = ["a", "b"].map(|text| EmbedInput::Text(text.to_owned()));
        let (reply, receiver) = oneshot::channel();
        let work = PooledWork::Embed(texts.to_vec());
        let asked = PoolRequest { work, priority: Priority::default(), timeout_ms: None };
        let mut request = Request::pooled(id, asked, reply, shared.admission.enter().ok().unwrap());
        request.assign(shared.desk.lease(&request.demand).unwrap());
        let client = Pooled::new(id, receiver, Arc::clone(&lanes), request.worker());
        (request, client)
    };
    let emitted = |event| Event::Frame(Some(Ok(FromWorker::Pooled { id: 7, event })));
    let vector = |index, number: f32| emitted(PooledEvent::Vector { index, vector: vec![number] });

    let (request, client) = asked(7);
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    session.apply(vector(0, 9.0), now);
    assert_eq!(shared.workers[0].running.load(Ordering::Relaxed), 1);
    // The worker dies; a client of vectors has had nothing yet.
    die(&mut session, &[7], now);
    let mut again = waiting.try_recv().unwrap();
    shared.desk.leave_room();
    shared.desk.set_healthy(0, true);
    again.assign(shared.desk.lease(&again.demand).unwrap());
    session.apply(Event::Command(Some(Command::Submit(again))), now);
    session.apply(vector(1, 2.0), now);
    session.apply(vector(5, 3.0), now);
    session.apply(emitted(PooledEvent::Finished { prompt_tokens: 2 }), now);
    let output = client.output().now_or_never().unwrap().unwrap();
    assert_eq!((output.vectors, output.prompt_tokens), (vec![vec![], vec![2.0]], 2));

    let (request, client) = asked(7);
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    drop(client);
    let left = session.supervisor.inbox.try_recv().ok();
    session.apply(Event::Command(left), now);
    session.apply(emitted(PooledEvent::Cancelled), now);
    assert_eq!((shared.admission.in_flight(), session.requests.len()), (0, 0));
    let told: Vec<_> = std::iter::from_fn(|| sent.try_recv().ok()).collect();
    assert_eq!(told.iter().filter(|m| matches!(m, ToWorker::Pool { .. })).count(), 3);
    assert_eq!(told.last(), Some(&ToWorker::Cancel { id: 7 }));
}

/// What a worker lets be heard, what is asked of it, and what time does.
#[derive(Clone, Copy, Debug)]
enum Sign {
    Beat,
    /// Somebody asks whether it can decode.
    Ask,
    Probed(bool),
    /// So many ms.
    Wait(u64),
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap()
}

/// Of one that beats, or of one that answers probes for minutes and says nothing else.
fn signs() -> impl Strategy<Value = Vec<Sign>> {
    let (late, tick) = (ms(HEARTBEAT_LATE), ms(SUPERVISOR_TICK));
    let beating = prop_oneof![
        3 => Just(Sign::Beat),
        2 => Just(Sign::Ask),
        2 => any::<bool>().prop_map(Sign::Probed),
        2 => (1..late * 2).prop_map(Sign::Wait),
        // The limits are whole ticks: these meet them to the moment.
        2 => (1..=late * 2 / tick).prop_map(move |ticks| Sign::Wait(ticks * tick)),
    ];
    let beatless = prop_oneof![
        1 => Just(Sign::Ask),
        4 => any::<bool>().prop_map(Sign::Probed),
        4 => (1..late).prop_map(Sign::Wait),
    ];
    prop_oneof![4 => proptest::collection::vec(beating, 0..80), 1 => proptest::collection::vec(beatless, 250..350)]
}

/// A wait is one look at the clock after the other.
fn in_ticks(sign: Sign) -> Vec<Sign> {
    let Sign::Wait(whole) = sign else { return vec![sign] };
    let tick = ms(SUPERVISOR_TICK);
    (0..whole.div_ceil(tick)).map(|looks| Sign::Wait(tick.min(whole - looks * tick))).collect()
}

/// What is to become of a worker, by the signs and their times alone: nothing here is taken from the session.
struct Expected {
    heard: Instant,
    beat: Instant,
    /// Its last probe failed, or was not answered in time.
    doubted: bool,
    /// When it passed its last probe, if it did.
    passed: Option<Instant>,
    /// When the probe was sent that it has not answered.
    probed: Option<Instant>,
    /// Probes that it was sent.
    probes: usize,
}

impl Expected {
    /// Those who asked are told this, and its life ends for this reason, each if at all.
    fn take(&mut self, sign: Sign, now: Instant) -> (Option<bool>, Option<&'static str>) {
        let mut told = None;
        match sign {
            Sign::Beat => (self.heard, self.beat) = (now, now),
            Sign::Ask => {
                // By what is known, at once.
                told = Some(self.is_healthy(now));
                if self.passed.is_none_or(|at| now - at >= PROBE_CACHE) {
                    self.probe(now);
                }
            }
            Sign::Probed(passed) => {
                (self.heard, self.doubted, self.passed, self.probed) = (now, !passed, passed.then_some(now), None);
            }
            Sign::Wait(_) => {
                if self.probed.is_some_and(|at| now - at > PROBE_LIMIT + SUPERVISOR_TICK) {
                    (self.doubted, self.probed) = (true, None);
                }
                if self.doubted {
                    // Whoever asks or not: it is to get requests again when it can.
                    self.probe(now);
                }
                if now - self.heard > HEARTBEAT_LIMIT {
                    return (told, Some("silent"));
                }
                if now - self.beat > STEP_STALL_LIMIT {
                    return (told, Some("no step"));
                }
            }
        }
        (told, None)
    }

    /// One at a time.
    fn probe(&mut self, now: Instant) {
        if self.probed.is_none() {
            self.probed = Some(now);
            self.probes += 1;
        }
    }

    fn is_healthy(&self, now: Instant) -> bool {
        now - self.heard <= HEARTBEAT_LATE && !self.doubted
    }
}

/// Has a session live through the signs, and then through a silence that it must not survive.
fn live_through(signs: Vec<Sign>) -> Result<(), TestCaseError> {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let mut now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    // It began a moment before, which is not to count.
    session.forgive(now);
    let mut expected = Expected { heard: now, beat: now, doubted: false, passed: None, probed: None, probes: 0 };
    let mut asked: Vec<oneshot::Receiver<Result<(), String>>> = Vec::new();
    let mut probes = 0;
    let silence = Sign::Wait(ms(HEARTBEAT_LIMIT + 2 * SUPERVISOR_TICK));
    for sign in signs.into_iter().chain([silence]).flat_map(in_ticks) {
        let end = match sign {
            Sign::Beat => session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now),
            Sign::Probed(passed) => session.apply(Event::Frame(message(&Op::Probed(passed)).map(Ok)), now),
            Sign::Ask => {
                let (reply, answer) = oneshot::channel();
                asked.push(answer);
                session.apply(Event::Command(Some(Command::Probe(reply))), now)
            }
            Sign::Wait(ms) => {
                now += Duration::from_millis(ms);
                session.apply(Event::Tick, now)
            }
        };
        let (told, ending) = expected.take(sign, now);
        if let Some(told) = told {
            let answer = asked.pop().and_then(|mut answer| answer.try_recv().ok());
            prop_assert_eq!(answer.map(|answer| answer.is_ok()), Some(told), "{:?}", sign);
        }
        probes += std::iter::from_fn(|| sent.try_recv().ok()).filter(|message| *message == ToWorker::Probe).count();
        prop_assert_eq!(probes, expected.probes, "{:?}", sign);
        let ended = end.map(|end| if let End::Hung(reason) = end { reason } else { "not by us".to_owned() });
        match (ended, ending) {
            (None, None) => {}
            (Some(ended), Some(ending)) if ended.contains(ending) => return Ok(()),
            other => return Err(TestCaseError::fail(format!("the end, and the expected one: {other:?}"))),
        }
        let healthy = expected.is_healthy(now);
        prop_assert_eq!(shared.desk.figures(0).0, healthy, "{:?}", sign);
        prop_assert_eq!(shared.desk.lease(&Demand::default()).is_ok(), healthy);
    }
    Err(TestCaseError::fail("it was silent for longer than it may be, and lives"))
}

proptest! {
    /// **Feature: distributed-inference-server, Property 18: Unhealthy Worker Removal**
    /// **Validates: Requirements 6.4**
    ///
    /// **Feature: distributed-inference-server, Property 19: Worker Recovery Reinstatement**
    /// **Validates: Requirements 6.5**
    ///
    /// The dispatcher's part is in its own tests; this is who tells it. A worker gets requests exactly while it was
    /// heard of within [`HEARTBEAT_LATE`] and neither failed its last probe nor left one without an answer for longer
    /// than [`PROBE_LIMIT`] and a tick. It ends when it was silent for longer than [`HEARTBEAT_LIMIT`], or showed no
    /// step for longer than [`STEP_STALL_LIMIT`], and at no other time.
    #[test]
    fn a_worker_gets_requests_while_it_is_heard_of_and_passes_its_probes(signs in signs()) {
        live_through(signs)?;
    }
}

#[tokio::test]
async fn a_version_that_retires_between_two_lives_waits_for_who_waits_and_for_nobody_else() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let retire = |drain_timeout| {
        let (done, _) = oneshot::channel();
        lanes.supervisors[0].send(Command::Retire { drain_timeout, done }).unwrap();
    };
    let place = shared.admission.enter().ok().unwrap();
    retire(Duration::from_secs(600));
    let flow = supervisor.pause(SUPERVISOR_TICK, "it died").await;
    assert!(!flow.is_stop(), "a request waits for the next worker");
    drop(place);
    let started = Instant::now();
    let flow = supervisor.pause(Duration::from_secs(600), "it died").await;
    assert!(flow.is_stop() && started.elapsed() < Duration::from_secs(60), "nobody waits for the next worker");
}

#[tokio::test]
async fn what_was_not_heard_while_the_front_stood_still_itself_does_not_count() {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let start = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), start);
    let woken = start + 10 * HEARTBEAT_LIMIT;
    session.forgive(woken);
    assert!(session.apply(Event::Tick, woken).is_none());
    assert!(session.apply(Event::Tick, woken + HEARTBEAT_LIMIT + SUPERVISOR_TICK).is_some());
}

/// As the kubelet asks, while a step takes longer than any probe may, and when it hangs.
#[test]
fn a_worker_that_computes_is_ready_as_long_as_its_step_is_within_its_limit() {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let mut now = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(ModelInfo::default())))), now);
    let (request, _client) = request(&shared, &lanes, 1).unwrap();
    session.apply(Event::Command(Some(Command::Submit(request))), now);
    let limit_ms = 30_000;
    let ask = |session: &mut Session<'_>, now| {
        let (reply, mut answer) = oneshot::channel();
        session.apply(Event::Command(Some(Command::Probe(reply))), now);
        answer.try_recv().expect("an answer at once")
    };
    for age_ms in (0..=limit_ms + 1_000).step_by(1_000) {
        now += Duration::from_secs(1);
        let engine = gantry_engine::EngineStats {
            step_age_ms: Some(age_ms),
            step_limit_ms: limit_ms,
            slots_active: 1,
            ..Default::default()
        };
        let beat = Heartbeat { engine, ..Heartbeat::default() };
        session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::new(beat))))), now);
        assert!(session.apply(Event::Tick, now).is_none());
        assert_eq!(ask(&mut session, now).is_ok(), age_ms <= limit_ms, "after {age_ms} ms");
        assert!(shared.desk.figures(0).0, "it gets requests, which wait for the step");
    }
    while let Ok(message) = sent.try_recv() {
        assert_ne!(message, ToWorker::Probe, "only an idle worker is probed");
    }
    now += HEARTBEAT_LATE + SUPERVISOR_TICK;
    session.apply(Event::Tick, now);
    assert!(ask(&mut session, now).unwrap_err().contains("not been heard of"));
    session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
    assert_eq!(ask(&mut session, now), Ok(()), "the step has ended");
}
