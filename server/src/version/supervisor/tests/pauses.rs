//! Answers whose clients do not read: when their sequences pause, go on and end, and what others have of it.

use super::*;

/// A session whose worker is ready.
struct Stage<'a, 's> {
    session: &'a mut Session<'s>,
    shared: &'a Arc<Shared>,
    lanes: &'a Arc<Lanes>,
    /// What the worker is told.
    sent: &'a mut mpsc::UnboundedReceiver<ToWorker>,
}

/// Has a test go over a session whose worker is ready.
fn with_a_ready_worker(model: ModelInfo, test: impl FnOnce(Stage<'_, '_>)) {
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::new(model))))), Instant::now());
    test(Stage { session: &mut session, shared: &shared, lanes: &lanes, sent: &mut sent });
}

/// Those that the worker was told since.
fn told(sent: &mut mpsc::UnboundedReceiver<ToWorker>) -> Vec<ToWorker> {
    std::iter::from_fn(|| sent.try_recv().ok()).filter(|message| !matches!(message, ToWorker::Submit { .. })).collect()
}

#[test]
fn a_client_that_does_not_read_has_its_answer_paused_and_then_ended_with_a_reason() {
    with_a_ready_worker(ModelInfo::default(), |Stage { session, shared, lanes, sent }| {
        let mut now = Instant::now();
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let (request, mut client) = request_in(&output, shared, lanes, 7).unwrap();
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        let apply = |session: &mut Session<'_>, op: Op, now| {
            // It is heard of all the while.
            session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
            let event = message(&op).map_or(Event::Tick, |message| Event::Frame(Some(Ok(message))));
            assert!(session.apply(event, now).is_none());
        };
        let running = || shared.workers[0].running.load(Ordering::Relaxed);
        apply(session, Op::Started(7), now);
        assert_eq!((told(sent), running()), (vec![], 1));
        // What comes after it was told to pause was on its way.
        for _ in 0..2 {
            apply(session, Op::Flood(7), now);
        }
        assert_eq!((told(sent), running()), (vec![ToWorker::Pause { id: 7 }], 0));
        // A client that reads a part of it, however late, has it wait; and goes on once it has read enough.
        apply(session, Op::Tick, now);
        now += SLOW_CLIENT_LIMIT;
        for _ in ["that it began", "text"] {
            assert!(client.next().now_or_never().flatten().unwrap().is_ok());
            hear(session, now);
        }
        for _ in 0..2 {
            apply(session, Op::Tick, now);
            now += SLOW_CLIENT_LIMIT - SUPERVISOR_TICK;
            assert_eq!((told(sent), running()), (vec![], 0));
        }
        assert!(client.next().now_or_never().flatten().unwrap().is_ok());
        hear(session, now);
        assert_eq!((told(sent), running()), (vec![ToWorker::Resume { id: 7 }], 1));
        // One that reads nothing does not for ever.
        apply(session, Op::Flood(7), now);
        assert_eq!(told(sent), [ToWorker::Pause { id: 7 }]);
        for (after, told_then) in [
            (Duration::ZERO, vec![]),
            (SLOW_CLIENT_LIMIT - SUPERVISOR_TICK, vec![]),
            (SUPERVISOR_TICK, vec![ToWorker::Cancel { id: 7 }]),
            (SLOW_CLIENT_LIMIT, vec![]),
        ] {
            now += after;
            apply(session, Op::Tick, now);
            assert_eq!(told(sent), told_then);
        }
        assert!(output.held_bytes() < 4096, "what waited is thrown away at once");
        assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Stalled(SLOW_CLIENT_LIMIT)))]);
        assert_eq!((output.ended(), output.held_bytes()), (1, 0));
        // The place is the worker's until it lets go.
        assert_eq!(shared.admission.in_flight(), 1);
        apply(session, Op::Finished(7), now);
        assert_eq!(shared.admission.in_flight(), 0);
    });
}

#[test]
fn a_paused_answer_leaves_its_cells_to_others_until_it_goes_on() {
    with_a_ready_worker(
        ModelInfo { kv_cells: 100, ..ModelInfo::default() },
        |Stage { session, shared, lanes, sent }| {
            let now = Instant::now();
            shared.desk.set_strategy(DispatchStrategy::MemoryAware);
            let demand = Demand { cells: 60, ..Demand::default() };
            let output = Output::new(OUTPUT_BUDGET_BYTES);
            let (mut request, mut client) = request_in(&output, shared, lanes, 7).unwrap();
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
            assert_eq!(told(sent), [ToWorker::Pause { id: 7 }]);
            assert!(shared.desk.freed.notified().now_or_never().is_some(), "the room is woken");
            let other = shared.desk.lease(&demand).ok().unwrap();
            assert_eq!(shared.desk.figures(0), (true, 2), "both are its own still");
            // Its client reads. What it needs is counted again, though another one has it.
            while told(sent).is_empty() {
                assert!(client.next().now_or_never().flatten().unwrap().is_ok());
                hear(session, now);
            }
            let small = Demand { cells: 1, ..Demand::default() };
            assert_eq!(shared.desk.lease(&small).err(), Some(Refusal::NotNow));
            drop(other);
            assert_eq!((refusal(), shared.desk.lease(&small).is_ok()), (Some(Refusal::NotNow), true));
            // It is paused once more, and ends so.
            session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
            assert_eq!((told(sent), refusal()), (vec![ToWorker::Pause { id: 7 }], None));
            session.apply(Event::Frame(message(&Op::Finished(7)).map(Ok)), now);
            assert_eq!((shared.desk.figures(0), refusal()), ((true, 0), None));
            let whole = Demand { cells: 100, ..Demand::default() };
            let all = shared.desk.lease(&whole).ok().unwrap();
            assert_eq!(shared.desk.lease(&small).err(), Some(Refusal::NotNow), "no cell was given back twice");
            drop(all);
        },
    );
}

#[test]
fn a_client_that_does_not_read_makes_room_sooner_where_others_are_refused() {
    with_a_ready_worker(ModelInfo::default(), |Stage { session, shared, lanes, sent }| {
        let mut now = Instant::now();
        let (request, client) = request(shared, lanes, 7).unwrap();
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
        let places: Vec<_> = std::iter::from_fn(|| shared.admission.enter().ok()).collect();
        let mut wait = |time| {
            now += time;
            session.apply(Event::Frame(Some(Ok(FromWorker::Heartbeat(Box::default())))), now);
            assert!(session.apply(Event::Tick, now).is_none());
            told(sent)
        };
        assert_eq!(wait(Duration::ZERO), [ToWorker::Pause { id: 7 }]);
        assert_eq!(wait(SLOW_CLIENT_CROWDED_LIMIT - SUPERVISOR_TICK), []);
        assert_eq!(wait(SUPERVISOR_TICK), [ToWorker::Cancel { id: 7 }]);
        assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Stalled(SLOW_CLIENT_CROWDED_LIMIT)))]);
        drop(places);
    });
}

#[test]
fn a_worker_that_does_not_pause_an_answer_has_it_ended() {
    with_a_ready_worker(ModelInfo::default(), |Stage { session, shared, lanes, sent }| {
        let now = Instant::now();
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let (request, client) = request_in(&output, shared, lanes, 7).unwrap();
        session.apply(Event::Command(Some(Command::Submit(request))), now);
        for _ in 0..9 {
            session.apply(Event::Frame(message(&Op::Flood(7)).map(Ok)), now);
            assert!(output.held_bytes() < OUTPUT_PER_ANSWER_BYTES + OUTPUT_OVERRUN_BYTES);
        }
        assert_eq!(told(sent), [ToWorker::Pause { id: 7 }, ToWorker::Cancel { id: 7 }]);
        assert_eq!(seen(client), [Err(GenerationError::SlowClient(Slowness::Overrun))]);
        assert_eq!(output.held_bytes(), 0);
    });
}
