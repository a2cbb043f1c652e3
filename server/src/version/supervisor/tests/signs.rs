//! Signs of life: which workers get requests, are probed and are ended, by what is heard of them and when.

use super::*;

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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), start);
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
fn a_worker_that_is_late_or_fails_a_probe_gets_nothing_until_it_does_better() {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, mut sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let dispatchable = || shared.desk.figures(0).0;
    let mut now = Instant::now();
    assert!(!dispatchable(), "it loads");
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
async fn what_was_not_heard_while_the_front_stood_still_itself_does_not_count() {
    let shared = shared();
    let (mut supervisor, _lanes, _waiting) = supervisor(&shared);
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let start = Instant::now();
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), start);
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
    session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::default())))), now);
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
