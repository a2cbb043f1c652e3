//! When a worker takes a share of the threads, seen by another one that computes all the while.
#![allow(clippy::unwrap_used)]

use futures::FutureExt;
use gantry_engine::{Device, DeviceKind, EngineStats, ModelInfo};

use super::session::Event;
use super::tests::{finished, request, shared, supervisor_at};
use super::*;
use crate::limits::COMPUTES_FOR;
use crate::version::threads::Threads;

#[test]
fn a_worker_has_a_share_of_the_threads_once_its_model_is_read_and_while_it_has_requests() {
    let threads = Threads::new(2);
    let mut other = threads.join(2);
    let mut now = Instant::now();
    other.note(true, now);
    let shared = shared();
    let (mut supervisor, lanes, _waiting) = supervisor_at(&shared, threads.join(2));
    let (outbox, _sent) = mpsc::unbounded_channel();
    let mut session = Session::new(&mut supervisor, outbox);
    let mut told = |session: &mut Session, message, now| {
        session.apply(message, now);
        session.note_work(now);
        other.changed().now_or_never()
    };
    let frame = |message| Event::Frame(Some(Ok(message)));
    assert_eq!(told(&mut session, frame(FromWorker::Loading(0.99)), now), None);
    assert_eq!(told(&mut session, frame(FromWorker::Loading(1.0)), now), Some(1), "it computes a first batch");
    assert_eq!(told(&mut session, frame(FromWorker::Ready(Box::default())), now), None);
    now += COMPUTES_FOR;
    assert_eq!(told(&mut session, Event::Tick, now), Some(2));
    let beats = |measures| {
        let engine = EngineStats { measures, ..EngineStats::default() };
        frame(FromWorker::Heartbeat(Box::new(Heartbeat { engine, ..Heartbeat::default() })))
    };
    assert_eq!(told(&mut session, beats(true), now), Some(1), "it measures what its steps cost");
    assert_eq!(told(&mut session, beats(false), now), None);
    now += COMPUTES_FOR;
    assert_eq!(told(&mut session, Event::Tick, now), Some(2));
    let (asked, _generation) = request(&shared, &lanes, 7).unwrap();
    assert_eq!(told(&mut session, Event::Command(Some(Command::Submit(asked))), now), Some(1));
    now += 3 * COMPUTES_FOR;
    assert_eq!(told(&mut session, Event::Tick, now), None, "however long it takes");
    assert_eq!(told(&mut session, frame(FromWorker::Events(vec![(7, finished())])), now), None);
    now += COMPUTES_FOR;
    assert_eq!(told(&mut session, Event::Tick, now), Some(2));
}

#[test]
fn what_a_gpu_computes_takes_no_threads() {
    let threads = Threads::new(2);
    let mut other = threads.join(2);
    let now = Instant::now();
    other.note(true, now);
    let mut model = ModelInfo::default();
    model.backends.devices = vec![Device { kind: DeviceKind::Gpu, ..Device::default() }];
    for (gpu_layers, share) in [(None, None), (Some(0), Some(1))] {
        let mut shared = shared();
        Arc::get_mut(&mut shared).unwrap().spec.runtime.gpu_layers = gpu_layers;
        let (mut supervisor, lanes, _waiting) = supervisor_at(&shared, threads.join(2));
        let (outbox, _sent) = mpsc::unbounded_channel();
        let mut session = Session::new(&mut supervisor, outbox);
        session.apply(Event::Frame(Some(Ok(FromWorker::Ready(Box::new(model.clone()))))), now);
        let (asked, _generation) = request(&shared, &lanes, 7).unwrap();
        session.apply(Event::Command(Some(Command::Submit(asked))), now);
        session.note_work(now);
        assert_eq!(other.changed().now_or_never(), share, "{gpu_layers:?}");
    }
}
