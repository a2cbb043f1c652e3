//! The waiting room with a desk and no workers: what reaches which inbox, and what fails when.
#![allow(clippy::unwrap_used)]

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use futures::FutureExt;
use gantry_engine::{
    AGEING_STEP, FinishReason, GenerationEvent, GenerationParams, Priority, Prompt, RequestError, Timings, Usage,
};
use proptest::prelude::*;

use super::*;
use crate::limits::OUTPUT_BUDGET_BYTES;
use crate::output::Output;
use crate::peer::Peer;
use crate::protocol::ToWorker;
use crate::version::admission::{Admission, Ask, QueuePlace};
use crate::version::channel::channel;
use crate::version::desk::send_to_room;
use crate::version::dispatch::{Demand, DispatchStrategy};
use crate::version::supervisor::Command;
use crate::version::suspects::Digest;
use crate::version::{GenerateRequest, Generation, Scheduling};

const CELLS: u64 = 100;

struct Stage {
    lanes: Arc<Lanes>,
    inboxes: Vec<mpsc::UnboundedReceiver<Command>>,
    room: Room,
    admission: Arc<Admission>,
    health: watch::Sender<WorkerHealth>,
    ended: CancellationToken,
}

fn stage(strategy: DispatchStrategy, workers: usize) -> Stage {
    let (supervisors, inboxes): (Vec<_>, Vec<_>) = (0..workers).map(|_| mpsc::unbounded_channel()).unzip();
    let (room, waiting) = mpsc::unbounded_channel();
    let desk = Desk::new(strategy, workers);
    for worker in 0..workers {
        desk.set_cells(worker, CELLS);
    }
    let lanes = Arc::new(Lanes { desk, supervisors, room });
    let health = watch::Sender::new(WorkerHealth::Ready);
    let ended = CancellationToken::new();
    let room = Room::new(&lanes, waiting, health.subscribe(), ended.clone());
    let admission = Arc::new(Admission::new(&Scheduling::default(), 1));
    Stage { lanes, inboxes, room, admission, health, ended }
}

impl Stage {
    fn request(&self, id: RequestId, cells: u64, queue_timeout_ms: Option<u64>) -> (Box<Request>, Generation) {
        self.request_with(id, cells, GenerationParams { queue_timeout_ms, ..GenerationParams::default() })
    }

    fn request_with(&self, id: RequestId, cells: u64, params: GenerationParams) -> (Box<Request>, Generation) {
        self.request_at(id, cells, params, self.admission.enter().ok().unwrap())
    }

    fn request_at(
        &self,
        id: RequestId,
        cells: u64,
        params: GenerationParams,
        place: QueuePlace,
    ) -> (Box<Request>, Generation) {
        let (events, receiver) = channel(&Output::new(OUTPUT_BUDGET_BYTES), 1);
        let asked = GenerateRequest { prompt: Arc::new(Prompt::Text(String::new())), params };
        let demand = Demand { cells, ..Demand::default() };
        let request = Request::new(id, asked, demand, events, place);
        let client = Generation::new(id, receiver, Arc::clone(&self.lanes), &request);
        (request, client)
    }

    fn wait(&self, request: Box<Request>) {
        send_to_room(&self.lanes.desk, &self.lanes.room, request);
    }

    fn settle(&mut self, now: Instant) {
        while let Ok(request) = self.room.inbox.try_recv() {
            self.room.admit(request, now);
        }
        self.room.settle(now);
    }

    /// What came to a worker.
    fn came(&mut self, worker: usize) -> Vec<Request> {
        let commands = std::iter::from_fn(|| self.inboxes[worker].try_recv().ok());
        commands
            .filter_map(|command| if let Command::Submit(request) = command { Some(*request) } else { None })
            .collect()
    }
}

fn ids(requests: &[Request]) -> Vec<RequestId> {
    requests.iter().map(|request| request.id).collect()
}

#[test]
fn they_wait_for_a_healthy_worker_and_go_in_the_order_of_submission() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 2);
    let now = Instant::now();
    let (requests, _clients): (Vec<_>, Vec<_>) = (0..4).map(|id| stage.request(id, 0, None)).unzip();
    // They come in another order: those of a worker that died are younger than one that was submitted before.
    for request in requests.into_iter().rev() {
        stage.wait(request);
    }
    stage.settle(now);
    assert!(stage.came(0).is_empty() && stage.came(1).is_empty());
    stage.lanes.desk.set_healthy(1, true);
    assert!(stage.lanes.desk.freed.notified().now_or_never().is_some(), "the room is woken");
    stage.settle(now);
    let came = stage.came(1);
    assert_eq!(ids(&came), [0, 1, 2, 3]);
    assert_eq!(stage.lanes.desk.figures(1), (true, 4));
    drop(came);
    assert_eq!(stage.lanes.desk.figures(1), (true, 0));
    assert_eq!(stage.admission.in_flight(), 0);
}

#[test]
fn a_higher_priority_goes_first_but_for_those_that_waited_long() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let (requests, _clients): (Vec<_>, Vec<_>) = [Priority::Low, Priority::Normal, Priority::High, Priority::Normal]
        .into_iter()
        .zip(0..)
        .map(|(priority, id)| stage.request_with(id, 0, GenerationParams { priority, ..GenerationParams::default() }))
        .unzip();
    let (low, high) = (requests[0].age_order().0, requests[2].age_order().0);
    for request in requests {
        stage.wait(request);
    }
    stage.lanes.desk.set_healthy(0, true);
    stage.settle(Instant::now());
    assert_eq!(ids(&stage.came(0)), [2, 1, 3, 0]);
    // One of high priority that comes so much later waits for the one of low priority.
    assert!(low > high && low < high + 2 * AGEING_STEP);
}

#[test]
fn a_line_goes_by_its_oldest_and_within_it_by_turns() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let now = Instant::now();
    let place = |host: u8, priority| {
        let client = Peer::of(std::net::IpAddr::from([10, 0, 0, host]));
        stage.admission.enter_all(Ask { client, priority, has_place: false }, &[1000]).ok().unwrap().remove(0)
    };
    let (low, normal) = (Priority::Low, Priority::Normal);
    // What client 1 has asked for before has its second one behind that of client 2, which came much later.
    let _first = place(1, low);
    let came = [(1, 1, low, 3), (2, 2, low, 0), (3, 3, normal, 1)];
    let (requests, _clients): (Vec<_>, Vec<_>) = came
        .into_iter()
        .map(|(id, host, priority, steps_ago)| {
            let params = GenerationParams { priority, ..GenerationParams::default() };
            let (mut request, client) = stage.request_at(id, 0, params, place(host, priority));
            request.came_at(now - AGEING_STEP * steps_ago);
            (request, client)
        })
        .unzip();
    for request in requests {
        stage.wait(request);
    }
    stage.lanes.desk.set_healthy(0, true);
    stage.settle(now);
    assert_eq!(ids(&stage.came(0)), [2, 1, 3]);
}

#[test]
fn what_it_waited_for_a_worker_is_of_its_time_in_the_queue() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let (request, client) = stage.request(0, 0, None);
    stage.wait(request);
    stage.lanes.desk.set_healthy(0, true);
    stage.settle(Instant::now());
    let mut request = stage.came(0).pop().unwrap();
    let given = Instant::now() + Duration::from_secs(5);
    assert!(matches!(request.message(given), ToWorker::Submit { .. }));
    let timings = Timings { queue_ms: 250.0, ..Timings::default() };
    let finished =
        GenerationEvent::Finished { reason: FinishReason::Stop, stop: None, usage: Usage::default(), timings };
    request.pass(finished, given + Duration::from_secs(60));
    let told = client.collect().now_or_never().unwrap().unwrap().timings.queue_ms;
    assert!((5_250.0..6_250.0).contains(&told), "{told}");
}

/// One who comes to the room: its priority, the ms after which it was submitted, and the cells that it takes.
fn newcomer() -> impl Strategy<Value = (Priority, u64, u64)> {
    let priority = prop::sample::select(vec![Priority::Low, Priority::Normal, Priority::High]);
    // Within an ageing step, after which a lower priority may go first; and often at the same time.
    let step = u64::try_from(AGEING_STEP.as_millis()).unwrap();
    (priority, prop_oneof![0..step, 0_u64..4], 1..=CELLS)
}

proptest! {
    /// **Feature: distributed-inference-server, Property 6: Priority Queue Ordering**
    /// **Validates: Requirements 3.4, 3.5**
    ///
    /// In front of the workers: one has cells for a few at a time, others come while the rest waits, in any order, and
    /// whoever went is in its place in a plain sorted list. For requests that waited less than an ageing step.
    #[test]
    fn a_higher_priority_goes_first_and_within_one_who_is_older(
        rounds in proptest::collection::vec((proptest::collection::vec(newcomer(), 0..8), 0_usize..4), 1..16),
    ) {
        let mut stage = stage(DispatchStrategy::MemoryAware, 1);
        stage.lanes.desk.set_healthy(0, true);
        let start = Instant::now();
        let mut clients = Vec::new();
        let mut running: Vec<Request> = Vec::new();
        let mut went: Vec<RequestId> = Vec::new();
        let mut waiting: Vec<(Reverse<Priority>, u64, RequestId, u64)> = Vec::new();
        // In the end nobody comes any more, all that run end, and each time one can go at least.
        let all: usize = rounds.iter().map(|(newcomers, _)| newcomers.len()).sum();
        let last = std::iter::repeat_n((Vec::new(), usize::MAX), all);
        for (newcomers, ends) in rounds.into_iter().chain(last) {
            for (priority, at, cells) in newcomers {
                let id = clients.len() as RequestId;
                let params = GenerationParams { priority, ..GenerationParams::default() };
                let (mut request, client) = stage.request_with(id, cells, params);
                request.came_at(start + Duration::from_millis(at));
                stage.wait(request);
                clients.push(client);
                waiting.push((Reverse(priority), at, id, cells));
            }
            drop(running.drain(..ends.min(running.len())));
            let mut free = CELLS - running.iter().map(|request| request.demand.cells).sum::<u64>();
            waiting.sort_unstable();
            let mut expected = Vec::new();
            while waiting.first().is_some_and(|first| first.3 <= free) {
                let (_, _, id, cells) = waiting.remove(0);
                free -= cells;
                expected.push(id);
            }
            stage.settle(start);
            let came = stage.came(0);
            prop_assert_eq!(ids(&came), expected);
            went.extend(ids(&came));
            running.extend(came);
        }
        went.sort_unstable();
        prop_assert_eq!(went, (0..all as RequestId).collect::<Vec<_>>(), "each of them, and once");
        prop_assert!(stage.room.waiting.is_empty());
    }
}

#[test]
fn what_does_not_fit_now_waits_and_is_not_overtaken() {
    let mut stage = stage(DispatchStrategy::MemoryAware, 1);
    let now = Instant::now();
    stage.lanes.desk.set_healthy(0, true);
    let (first, _first) = stage.request(0, 60, None);
    let (large, _large) = stage.request(1, 70, None);
    let (small, _small) = stage.request(2, 10, None);
    stage.lanes.submit(first);
    let running = stage.came(0);
    assert_eq!(ids(&running), [0]);
    stage.lanes.submit(large);
    stage.lanes.submit(small);
    stage.settle(now);
    assert!(stage.came(0).is_empty(), "the small one fits, and the large one was there before it");
    drop(running);
    stage.settle(now);
    assert_eq!(ids(&stage.came(0)), [1, 2]);
}

#[test]
fn what_never_fits_is_refused_at_once() {
    let mut stage = stage(DispatchStrategy::MemoryAware, 1);
    stage.lanes.desk.set_healthy(0, true);
    let (request, client) = stage.request(0, CELLS + 1, None);
    stage.lanes.submit(request);
    assert!(stage.came(0).is_empty());
    let error = client.collect().now_or_never().unwrap().unwrap_err();
    assert_eq!(error, RequestError::ContextLengthExceeded { prompt_tokens: 100, limit: 100 }.into());
    assert_eq!(stage.admission.in_flight(), 0);
}

#[test]
fn waiting_ends_with_the_request_s_own_limit_with_ours_or_with_its_client() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let (hasty, hasty_client) = stage.request(0, 0, Some(1000));
    let (patient, patient_client) = stage.request(1, 0, None);
    let (left, left_client) = stage.request(2, 0, None);
    for request in [hasty, patient, left] {
        stage.wait(request);
    }
    let start = Instant::now();
    stage.settle(start);
    assert_eq!(stage.admission.in_flight(), 3);
    drop(left_client);
    stage.settle(start);
    assert_eq!(stage.admission.in_flight(), 2);
    stage.settle(start + Duration::from_secs(2));
    let error = hasty_client.collect().now_or_never().unwrap().unwrap_err();
    assert!(
        matches!(error, GenerationError::Request(RequestError::DeadlineExceeded { limit_ms: 1000, .. })),
        "{error}"
    );
    assert_eq!(stage.admission.in_flight(), 1);
    // However long the next worker takes to load: that one will come.
    stage.health.send_replace(WorkerHealth::Restarting { attempt: 1, reason: String::new() });
    stage.settle(start + WORKER_WAIT_LIMIT - SUPERVISOR_TICK);
    assert_eq!(stage.admission.in_flight(), 1);
    stage.settle(start + WORKER_WAIT_LIMIT + SUPERVISOR_TICK);
    let error = patient_client.collect().now_or_never().unwrap().unwrap_err();
    assert!(matches!(error, GenerationError::WorkerDied(_)), "{error}");
    assert_eq!(stage.admission.in_flight(), 0);
}

#[test]
fn once_the_version_has_failed_only_those_wait_that_say_for_how_long() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let (timed, timed_client) = stage.request(0, 0, Some(90_000));
    let (open, open_client) = stage.request(1, 0, None);
    stage.wait(timed);
    stage.wait(open);
    let start = Instant::now();
    stage.health.send_replace(WorkerHealth::Failed { reason: "out of memory".to_owned() });
    stage.settle(start);
    let error = open_client.collect().now_or_never().unwrap().unwrap_err();
    assert_eq!(error, GenerationError::WorkerDied("it keeps failing: out of memory".to_owned()));
    stage.settle(start + Duration::from_secs(80));
    assert_eq!(stage.admission.in_flight(), 1, "it waits for the next try");
    stage.lanes.desk.set_healthy(0, true);
    stage.settle(start + Duration::from_secs(81));
    assert_eq!(ids(&stage.came(0)), [0]);
    drop(timed_client);
}

impl Stage {
    /// A request that a worker may have died of.
    fn suspect(&self, id: RequestId) -> (Box<Request>, Generation) {
        let (mut request, client) = self.request(id, 0, None);
        (request.digest, request.suspect) = (self.digest(id), true);
        (request, client)
    }

    fn digest(&self, id: RequestId) -> Digest {
        let prompt = Arc::new(Prompt::Text(id.to_string()));
        self.lanes.desk.digests.of_text(&GenerateRequest { prompt, params: GenerationParams::default() })
    }

    /// A worker died while it worked on this one.
    fn suspected(&self, id: RequestId, now: Instant) {
        let digest = self.digest(id);
        self.lanes.desk.suspects().died(0, [(digest, 0)].into_iter(), BTreeSet::from([digest]), now);
    }
}

#[test]
fn suspects_are_run_one_by_one_and_others_beside_none_of_them() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let now = Instant::now();
    let (first, _first) = stage.suspect(1);
    let (second, _second) = stage.suspect(2);
    let (innocent, _innocent) = stage.request(0, 0, None);
    stage.suspected(1, now);
    stage.suspected(2, now);
    for request in [innocent, first, second] {
        stage.wait(request);
    }
    stage.lanes.desk.set_healthy(0, true);
    for id in [1, 2] {
        stage.settle(now);
        let came = stage.came(0);
        assert_eq!(ids(&came), [id]);
        stage.settle(now);
        assert!(stage.came(0).is_empty(), "it is by itself");
        stage.lanes.desk.suspects().acquit(came[0].digest);
        drop(came);
    }
    stage.settle(now);
    assert_eq!(ids(&stage.came(0)), [0]);
}

#[test]
fn suspects_that_nobody_waits_for_come_last_and_only_while_their_death_is_unexplained() {
    for convicted in [true, false] {
        let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
        let now = Instant::now();
        let reached = |id: RequestId| (stage.digest(id), [9, 2, 5, 0][id as usize]);
        let tried = (0..4).map(|id| stage.digest(id)).collect();
        stage.lanes.desk.suspects().died(0, (0..4).map(reached), tried, now);
        // Somebody waits for the last of them, of which nothing had come.
        let (requests, mut clients): (Vec<_>, Vec<_>) = (0..4).map(|id| stage.suspect(id)).unzip();
        for mut request in requests {
            if request.id != 3 {
                request.leave_client(GenerationError::WorkerDied("gone".to_owned()));
            }
            stage.wait(request);
        }
        stage.lanes.desk.set_healthy(0, true);
        let mut order = Vec::new();
        loop {
            stage.settle(now);
            let Some(request) = stage.came(0).pop() else { break };
            order.push(request.id);
            let mut memory = stage.lanes.desk.suspects();
            if convicted && request.id == 1 {
                memory.convict(request.digest, now);
            } else {
                memory.acquit(request.digest);
            }
        }
        // Those whose death is explained need not be run.
        assert_eq!(order, if convicted { vec![3, 1] } else { vec![3, 1, 2, 0] });
        assert_eq!(stage.admission.in_flight(), 0);
        assert_eq!(stage.lanes.desk.suspects().unexplained(0).len(), usize::from(!convicted));
        let told = clients.remove(0).collect().now_or_never();
        assert_eq!(told, Some(Err(GenerationError::WorkerDied("gone".to_owned()))));
    }
}

/// Nobody is kept waiting for them, and no worker from others, unless many deaths are unexplained.
#[test]
fn suspects_that_nobody_waits_for_give_way_until_many_deaths_are_unexplained() {
    for deaths in [1, TRIED_FIRST_DEATHS as RequestId + 1] {
        let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
        let now = Instant::now();
        for id in 1..=deaths {
            stage.suspected(id, now);
        }
        let (mut unheard, _gone) = stage.suspect(1);
        unheard.leave_client(GenerationError::WorkerDied("gone".to_owned()));
        assert_eq!(stage.admission.in_flight(), 0, "it has no place any more");
        let (asked, _client) = stage.request(100, 0, None);
        stage.wait(unheard);
        stage.wait(asked);
        stage.lanes.desk.set_healthy(0, true);
        stage.settle(now);
        let first = stage.came(0);
        assert_eq!(ids(&first), if deaths == 1 { [100] } else { [1] });
        stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
        let (beside, _client) = stage.request(101, 0, None);
        stage.lanes.submit(beside);
        stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
        assert_eq!(ids(&stage.came(0)), if deaths == 1 { vec![101] } else { vec![] });
    }
}

#[test]
fn who_is_late_while_it_is_suspected_is_told_so_and_is_tried_all_the_same() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let now = Instant::now();
    stage.suspected(1, now);
    let (mut late, client) = stage.request(1, 0, Some(1000));
    (late.digest, late.suspect) = (stage.digest(1), true);
    stage.wait(late);
    let after = now + Duration::from_secs(2);
    stage.settle(after);
    let told = client.collect().now_or_never();
    assert!(matches!(told, Some(Err(GenerationError::Request(RequestError::DeadlineExceeded { .. })))), "{told:?}");
    stage.lanes.desk.set_healthy(0, true);
    stage.settle(after);
    assert_eq!(ids(&stage.came(0)), [1]);
}

#[test]
fn those_past_the_limit_and_those_that_wait_too_long_are_not_tried_and_explain_nothing() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let now = Instant::now();
    let all = 0..=MAX_UNHEARD_SUSPECTS as RequestId;
    let digests: Vec<_> = all.clone().map(|id| stage.digest(id)).collect();
    let begun = digests.iter().map(|digest| (*digest, 0));
    stage.lanes.desk.suspects().died(0, begun, digests.iter().copied().collect(), now);
    for id in all {
        let (mut unheard, _gone) = stage.suspect(id);
        unheard.leave_client(GenerationError::WorkerDied("gone".to_owned()));
        stage.wait(unheard);
    }
    stage.settle(now);
    assert_eq!(stage.room.suspects.len(), MAX_UNHEARD_SUSPECTS);
    stage.settle(now + TRIAL_WAIT_LIMIT);
    assert!(stage.room.suspects.is_empty());
    assert_eq!(stage.lanes.desk.suspects().open_deaths(), 0);
    assert_eq!(stage.lanes.desk.suspects().unexplained(0).len(), 1);
}

fn came_anywhere(stage: &mut Stage) -> Vec<Request> {
    let mut came = stage.came(0);
    came.extend(stage.came(1));
    came
}

#[test]
fn who_asks_what_is_suspected_waits_for_the_verdict_and_shares_it() {
    for convicted in [false, true] {
        let mut stage = stage(DispatchStrategy::LeastLoaded, 2);
        let now = Instant::now();
        stage.suspected(1, now);
        stage.lanes.desk.set_healthy(0, true);
        stage.lanes.desk.set_healthy(1, true);
        let asks_the_same = |stage: &Stage, id| {
            let (mut request, client) = stage.request(id, 0, None);
            request.digest = stage.digest(1);
            (request, client)
        };
        let (one, one_client) = asks_the_same(&stage, 1);
        let (other, other_client) = asks_the_same(&stage, 2);
        stage.lanes.submit(one);
        stage.lanes.submit(other);
        stage.settle(now);
        let tried = came_anywhere(&mut stage);
        assert_eq!(ids(&tried), [1], "one of them is tried, and the other one waits, whoever is free");
        let digest = stage.digest(1);
        if convicted {
            stage.lanes.desk.suspects().convict(digest, now);
        } else {
            stage.lanes.desk.suspects().acquit(digest);
        }
        stage.settle(now);
        let came = came_anywhere(&mut stage);
        assert_eq!(ids(&came), if convicted { vec![] } else { vec![2] });
        let told = other_client.collect().now_or_never();
        assert_eq!(told, convicted.then_some(Err(GenerationError::EndsWorker)));
        drop((one_client, tried));
    }
}

#[test]
fn a_suspect_waits_for_a_busy_worker_and_then_keeps_others_from_it() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let now = Instant::now();
    stage.lanes.desk.set_healthy(0, true);
    let (running, _running) = stage.request(0, 0, None);
    stage.lanes.submit(running);
    let running = stage.came(0);
    stage.suspected(1, now);
    let (suspect, _suspect) = stage.suspect(1);
    stage.wait(suspect);
    stage.settle(now);
    let (early, _early) = stage.request(2, 0, None);
    stage.wait(early);
    stage.settle(now + TRIAL_PATIENCE / 2);
    assert_eq!(ids(&stage.came(0)), [2], "for a while it waits beside others");
    stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
    let (late, _late) = stage.request(3, 0, None);
    stage.wait(late);
    stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
    assert!(stage.came(0).is_empty());
    drop(running);
    stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
    let tried = stage.came(0);
    assert_eq!(ids(&tried), [1], "its turn comes when what runs has ended");
    drop(tried);
    stage.lanes.desk.suspects().acquit(stage.digest(1));
    stage.settle(now + TRIAL_PATIENCE + SUPERVISOR_TICK);
    assert_eq!(ids(&stage.came(0)), [3]);
}

#[test]
fn suspects_do_not_keep_others_waiting_for_ever() {
    let mut stage = stage(DispatchStrategy::LeastLoaded, 1);
    let start = Instant::now();
    let mut clients = Vec::new();
    for id in 1..100 {
        stage.suspected(id, start);
        let (request, client) = stage.suspect(id);
        stage.wait(request);
        clients.push(client);
    }
    let (innocent, _innocent) = stage.request(0, 0, None);
    stage.wait(innocent);
    stage.lanes.desk.set_healthy(0, true);
    let mut now = start;
    let came = loop {
        stage.settle(now);
        let came = stage.came(0);
        if ids(&came) == [0] {
            break came;
        }
        assert_eq!(came.len(), 1);
        stage.lanes.desk.suspects().acquit(came[0].digest);
        now += Duration::from_secs(1);
        assert!(now - start <= TRIALS_LIMIT + SUPERVISOR_TICK, "the other one's turn has come");
    };
    drop(came);
    stage.settle(now);
    assert!(stage.came(0).len() == 1, "and then theirs again");
    stage.lanes.desk.set_healthy(0, false);
    let last = stage.suspect(100);
    stage.suspected(100, now);
    stage.wait(last.0);
    stage.settle(now);
    stage.settle(start + TRIAL_WAIT_LIMIT + 20 * SUPERVISOR_TICK + TRIALS_LIMIT);
    let told = last.1.collect().now_or_never().unwrap().unwrap_err();
    assert!(matches!(told, GenerationError::WorkerDied(_)), "{told}");
}

#[test]
fn a_worker_s_limit_is_told_as_the_client_gave_it() {
    let stage = stage(DispatchStrategy::LeastLoaded, 1);
    let (mut request, client) = stage.request(0, 0, Some(50));
    let sent = request.message(Instant::now() + Duration::from_millis(3));
    let ToWorker::Submit { params, .. } = sent else { panic!("{sent:?}") };
    assert!(matches!(params.queue_timeout_ms, Some(1..=47)), "{:?}", params.queue_timeout_ms);
    let of_the_worker = RequestError::DeadlineExceeded { waited_ms: 47, limit_ms: 47 };
    request.pass(GenerationEvent::Failed(of_the_worker), Instant::now() + Duration::from_millis(51));
    let error = client.collect().now_or_never().unwrap().unwrap_err();
    assert!(
        matches!(error, GenerationError::Request(RequestError::DeadlineExceeded { limit_ms: 50, waited_ms: 50.. })),
        "{error}"
    );
}

#[tokio::test]
async fn the_room_ends_with_the_version_and_nothing_is_left_in_it() {
    let Stage { lanes, inboxes: _inboxes, room, admission, health, ended } = stage(DispatchStrategy::LeastLoaded, 1);
    let running = tokio::spawn(room.run());
    let (events, receiver) = channel(&Output::new(OUTPUT_BUDGET_BYTES), 1);
    let asked = GenerateRequest { prompt: Arc::new(Prompt::Text(String::new())), params: GenerationParams::default() };
    let request = Request::new(0, asked, Demand::default(), events, admission.enter().ok().unwrap());
    let client = Generation::new(0, receiver, Arc::clone(&lanes), &request);
    lanes.submit(request);
    health.send_replace(WorkerHealth::Stopped);
    ended.cancelled().await;
    assert_eq!(client.collect().await, Err(GenerationError::Retired));
    assert_eq!(admission.in_flight(), 0);
    running.await.unwrap();
}
