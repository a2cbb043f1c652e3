//! A session driven by hand: no process, no socket, every order of events.
#![allow(clippy::unwrap_used)]

mod pauses;
mod signs;

use futures::{FutureExt, StreamExt};
use gantry_engine::{
    DegradationLevel, FinishReason, GenerationEvent, GenerationParams, ModelInfo, PooledEvent, PooledWork, Priority,
    ProbeError, Prompt, RequestError, SubmitError as EngineRefusal, TextInput, Timings, Usage,
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
    let generation = Generation::new(id, receiver, Arc::clone(lanes), &request);
    Some((request, generation))
}

pub(super) fn finished() -> GenerationEvent {
    GenerationEvent::Finished {
        reason: FinishReason::Stop,
        stop: None,
        usage: Usage::default(),
        timings: Timings::default(),
    }
}

/// Text of so many bytes.
fn delta(bytes: usize) -> GenerationEvent {
    GenerationEvent::Text { text: "x".repeat(bytes), tokens: 1, logprobs: Vec::new() }
}

/// The message that an operation stands for, if it is one of the worker's.
fn message(op: &Op) -> Option<FromWorker> {
    let event = |id: u64, event| Some(FromWorker::Events(vec![(id, event)]));
    match *op {
        Op::Started(id) => event(id, GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 }),
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
        session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);

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
            again += u64::from(!request.is_unheard);
            shared.desk.leave_room();
            prop_assert!(request.is_unheard || shared.admission.in_flight() > 0);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
        let mut again = those_in(&mut waiting);
        for tried in again.extract_if(.., |request| request.id == 2) {
            assert!(death == 0 && tried.suspect && tried.is_unheard, "for nobody");
            shared.desk.leave_room();
        }
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
    assert!(matches!(standing(1), Standing::Suspected { on_trial: true, .. }), "as much may have come before");
    session.apply(Event::Frame(message(&Op::Delta(1)).map(Ok)), now);
    assert_eq!(standing(1), Standing::Clear);
    assert!(shared.desk.lease(&Demand::default()).is_ok(), "it is as any other from then on");
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
    let ready = || Event::Frame(Some(Ok(FromWorker::Ready(Box::default()))));
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
    let mut clients = Vec::new();
    for id in 0..3 {
        let (mut request, client) = request(&shared, &lanes, id).unwrap();
        request.waits_for(50);
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        clients.push(client);
    }
    let says = |event| Event::Frame(Some(Ok(FromWorker::Events(vec![event]))));
    let started = || GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 };
    session.apply(says((1, started())), now);
    session.apply(says((2, started())), now);
    let delta = GenerationEvent::Text { text: "x".to_owned(), tokens: 1, logprobs: Vec::new() };
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
    let asked = |id: RequestId| {
        let texts = ["a", "b"].map(|text| TextInput::Text(text.to_owned()));
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
