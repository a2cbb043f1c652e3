//! The engine with its threads, on the scripted backend.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use gantry_core::{Message, Role};
use gantry_llama::SpecialTokens;

use crate::backend::Vocabulary;
use crate::backend::scripted::{Control, Fault, ScriptedBackend, ScriptedVocabulary, reference};
use crate::engine::Engine;
use crate::error::{LoadError, ProbeError, RequestError, SubmitError};
use crate::event::{Activity, ActivitySink, EventSink, FinishReason, GenerationEvent};
use crate::handle::RequestHandle;
use crate::ladder::DegradationLevel;
use crate::params::{
    DiskCacheConfig, EngineConfig, GenerationParams, PrefixCacheConfig, Priority, Prompt, SpeculationConfig,
};
use crate::scheduler::PROBE_FRESH;

const POSITIONS: u32 = 200;
/// Longer than any step here; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

fn engine(parallel: u32, max_queue: usize) -> (Engine, Control) {
    let config = EngineConfig { parallel, max_queue, prefill_tokens_per_step: 16, ..EngineConfig::new("scripted") };
    let backend = ScriptedBackend::new(parallel, POSITIONS, parallel + 16);
    let (control, info) = (backend.control.clone(), backend.info());
    let vocabulary = Arc::new(ScriptedVocabulary);
    let engine = Engine::start(backend, None, vocabulary, info, None, Vec::new(), &config, Arc::default(), 0).unwrap();
    // So that what a test does to decodes is done to those of requests.
    until(|| !engine.stats().measures);
    (engine, control)
}

fn until(is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

fn channel() -> (EventSink, Receiver<GenerationEvent>) {
    let (sender, events) = unbounded();
    (Box::new(move |event| drop(sender.send(event))), events)
}

fn terminal(events: &Receiver<GenerationEvent>) -> GenerationEvent {
    loop {
        let event = events.recv_timeout(PATIENCE).unwrap();
        if event.is_terminal() {
            return event;
        }
    }
}

fn text(text: &str) -> Prompt {
    Prompt::Text(text.to_owned())
}

#[test]
fn many_threads_get_their_own_answers() {
    let (engine, _) = engine(4, 64);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let engine = &engine;
            scope.spawn(move || {
                for i in 0..20_u32 {
                    let prompt = format!("prompt {thread} {i}");
                    let params = GenerationParams { seed: Some(i.into()), max_tokens: Some(40), ..Default::default() };
                    let want = reference(
                        &ScriptedVocabulary.tokenize(&prompt, SpecialTokens::None).unwrap(),
                        &params,
                        POSITIONS,
                    );
                    let got = engine.generate(Prompt::Text(prompt), params).unwrap();
                    assert_eq!((got.text, got.reason, got.usage.completion_tokens), want);
                }
            });
        }
    });
    let stats = engine.stats();
    assert_eq!((stats.requests_finished_total, stats.queued, stats.slots_active), (160, 0, 0));
    assert!(stats.tokens_per_second > 0.0 && stats.steps > 0);
}

#[test]
fn a_full_queue_refuses_and_admits_again() {
    let (engine, control) = engine(2, 3);
    let gate = control.gate.lock().unwrap();
    let (mut handles, mut all) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let (sink, events) = channel();
        handles.push(engine.submit(text("abc"), GenerationParams::greedy(4), sink).unwrap());
        all.push(events);
    }
    let (sink, events) = channel();
    let refused = engine.submit(text("abc"), GenerationParams::greedy(4), sink);
    assert_eq!(refused.unwrap_err(), SubmitError::QueueFull { limit: 3 });
    assert!(events.recv().is_err(), "a refused request's sink is dropped without an event");
    drop(gate);
    for events in &all {
        assert!(matches!(terminal(events), GenerationEvent::Finished { .. }));
    }
    // Who hears of the end finds room.
    let (sink, _events) = channel();
    assert!(engine.submit(text("abc"), GenerationParams::greedy(4), sink).is_ok());
}

#[test]
fn where_memory_is_short_only_the_urgent_are_taken_and_then_nobody() {
    let (engine, control) = engine(2, 8);
    let submit = |priority| {
        let (sink, events) = channel();
        engine.submit(text("abc"), GenerationParams { priority, ..GenerationParams::greedy(4) }, sink).map(|_| events)
    };
    let gate = control.gate.lock().unwrap();
    let mut taken = vec![submit(Priority::Low).unwrap()];
    let level = DegradationLevel::HighPriorityOnly;
    engine.degrade(level);
    for priority in [Priority::Low, Priority::Normal] {
        assert_eq!(submit(priority).unwrap_err(), SubmitError::MemoryPressure { level });
    }
    taken.push(submit(Priority::High).unwrap());
    let level = DegradationLevel::Emergency;
    engine.degrade(level);
    assert_eq!(engine.stats().degradation, level);
    assert_eq!(submit(Priority::High).unwrap_err(), SubmitError::MemoryPressure { level });
    // Those that were taken before are served.
    drop(gate);
    for events in &taken {
        assert!(matches!(terminal(events), GenerationEvent::Finished { .. }));
    }
    engine.degrade(DegradationLevel::Normal);
    assert!(matches!(terminal(&submit(Priority::Low).unwrap()), GenerationEvent::Finished { .. }));
}

#[test]
fn prompts_that_cannot_be_served_say_why() {
    let (engine, _) = engine(1, 4);
    let fails = |prompt| match engine.generate(prompt, GenerationParams::greedy(4)).unwrap_err() {
        crate::EngineError::Request(error) => error,
        error => panic!("{error}"),
    };
    let long = "x".repeat(200);
    assert_eq!(fails(Prompt::Text(long)), RequestError::ContextLengthExceeded { prompt_tokens: 200, limit: 200 });
    assert_eq!(fails(text("")).code(), "empty_prompt");
    assert_eq!(fails(Prompt::Tokens(vec![])).code(), "empty_prompt");
    assert_eq!(fails(Prompt::Tokens(vec![1, 48])).code(), "invalid_token");
    assert_eq!(fails(Prompt::Tokens(vec![-1])).code(), "invalid_token");
    assert_eq!(fails(Prompt::Text("x".repeat(crate::MAX_PROMPT_BYTES + 1))).code(), "prompt_too_large");
    assert_eq!(fails(Prompt::chat(vec![Message::text(Role::User, "panic")])).code(), "internal_error");
    // None of them took the engine with it.
    assert!(engine.generate(text("abc"), GenerationParams::greedy(4)).is_ok());
    let (sink, _events) = channel();
    let params = GenerationParams { temperature: -1.0, ..Default::default() };
    assert!(
        matches!(engine.submit(text("a"), params, sink), Err(SubmitError::InvalidParam(e)) if e.param == "temperature")
    );
}

#[test]
fn a_template_adds_its_stop_strings() {
    let (engine, _) = engine(1, 4);
    for i in 0..20 {
        let said = format!("chat {i}");
        let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(150) };
        let prompt = ScriptedVocabulary.tokenize(&format!("<{said}>"), SpecialTokens::All).unwrap();
        let with_stop = GenerationParams { stop: vec!["dd".into()], ..params.clone() };
        let got = engine.generate(Prompt::chat(vec![Message::text(Role::User, said)]), params).unwrap();
        assert_eq!(got.text, reference(&prompt, &with_stop, POSITIONS).0);
    }
}

/// Waits until a step has been computed for so long.
fn await_age(engine: &Engine, least: Duration) {
    let started = Instant::now();
    while engine.stats().step_age_ms.is_none_or(|age| u128::from(age) < least.as_millis()) {
        assert!(started.elapsed() < PATIENCE + least, "no step is computed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Who asks whether a token can be decoded, ten times a second, hears it at once while a step takes 20 s.
#[test]
fn a_step_of_twenty_seconds_is_progress() {
    let (engine, control) = engine(1, 4);
    let (sink, events) = channel();
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let asked = Instant::now();
                engine.probe(Duration::from_secs(5)).unwrap();
                longest = longest.max(asked.elapsed());
                std::thread::sleep(Duration::from_millis(100));
            }
            assert!(longest < Duration::from_millis(50), "{longest:?}");
        });
        let gate = control.gate.lock().unwrap();
        engine.submit(text("abc"), GenerationParams::greedy(40), sink).unwrap();
        await_age(&engine, Duration::from_secs(20));
        drop(gate);
        assert!(matches!(terminal(&events), GenerationEvent::Finished { .. }));
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_probe_tells_decoding_from_hanging_and_from_broken() {
    let (engine, control) = engine(1, 4);
    // Idle since the warm-up, which is no step: one token is decoded for the probe.
    let (steps, started) = (engine.stats().steps, Instant::now());
    engine.probe(PATIENCE).unwrap();
    assert_eq!(engine.stats().steps, steps + 1);
    // A step within the last second counts, however short the limit.
    let fresh = engine.probe(Duration::ZERO);
    assert!(fresh.is_ok() || started.elapsed() >= Duration::from_secs(1), "{fresh:?}");
    assert!(fresh.is_err() || engine.stats().steps == steps + 1);
    // A step that takes long is progress as long as it is within its limit, however old the last one is, and else hangs.
    let gate = control.gate.lock().unwrap();
    let (sink, events) = channel();
    engine.submit(text("abc"), GenerationParams::greedy(4), sink).unwrap();
    let computed_for = |least: Duration| await_age(&engine, least);
    computed_for(PROBE_FRESH + Duration::from_millis(100));
    let asked = Instant::now();
    engine.probe(PATIENCE).unwrap();
    assert!(asked.elapsed() < Duration::from_millis(50), "nobody waits for the step's end");
    engine.limit_step(1);
    assert!(matches!(engine.probe(PATIENCE), Err(ProbeError::Timeout { .. })));
    assert!(asked.elapsed() < Duration::from_millis(100), "nor for that of one that hangs");
    drop(gate);
    assert!(matches!(terminal(&events), GenerationEvent::Finished { .. }));
    engine.probe(PATIENCE).unwrap();
    // A panic inside a step breaks the engine, and every way in says so.
    control.faults.lock().unwrap().push_back(Fault::Panic);
    let (sink, events) = channel();
    engine.submit(text("abc"), GenerationParams::greedy(4), sink).unwrap();
    assert!(matches!(terminal(&events), GenerationEvent::Failed(RequestError::Broken(_))));
    let started = Instant::now();
    while !matches!(engine.probe(PATIENCE), Err(ProbeError::Broken(_))) {
        assert!(started.elapsed() < PATIENCE);
    }
    let (sink, _events) = channel();
    assert!(matches!(engine.submit(text("a"), GenerationParams::greedy(1), sink), Err(SubmitError::Broken(_))));
}

#[test]
fn what_is_computed_for_nobody_ends_when_somebody_comes() {
    // An engine of which the first batch that is measured takes until it is interrupted.
    let hanging = || {
        let backend = ScriptedBackend::new(2, POSITIONS, 18);
        let (control, info) = (backend.control.clone(), backend.info());
        // After the three batches that end the load.
        control.faults.lock().unwrap().extend([Fault::None, Fault::None, Fault::None, Fault::Hang]);
        let config = EngineConfig { parallel: 2, prefill_tokens_per_step: 16, ..EngineConfig::new("scripted") };
        let vocabulary = Arc::new(ScriptedVocabulary);
        let engine =
            Engine::start(backend, None, vocabulary, info, None, Vec::new(), &config, Arc::default(), 0).unwrap();
        until(|| control.faults.lock().unwrap().is_empty());
        assert!(engine.stats().measures);
        engine
    };
    let engine = hanging();
    assert_eq!(engine.probe(PATIENCE).err(), None);
    until(|| !engine.stats().measures);
    let engine = hanging();
    let prompt = ScriptedVocabulary.tokenize("abc", SpecialTokens::None).unwrap();
    let got = engine.generate(text("abc"), GenerationParams::greedy(4)).unwrap();
    assert_eq!(got.text, reference(&prompt, &GenerationParams::greedy(4), POSITIONS).0);
    until(|| !engine.stats().measures);
    // Nor does it hold up the end.
    drop(hanging());
}

#[test]
fn dropping_the_engine_ends_every_request() {
    let (engine, control) = engine(1, 8);
    let gate = control.gate.lock().unwrap();
    let mut all = Vec::new();
    for _ in 0..6 {
        let (sink, events) = channel();
        engine.submit(text("abcdef"), GenerationParams { ignore_eos: true, ..Default::default() }, sink).unwrap();
        all.push(events);
    }
    let dropping = std::thread::spawn(move || drop(engine));
    drop(gate);
    dropping.join().unwrap();
    for events in &all {
        let event = terminal(events);
        let shut_down = matches!(event, GenerationEvent::Failed(RequestError::ShuttingDown));
        // Those that were quicker than the drop ran into their context.
        let done = matches!(event, GenerationEvent::Finished { reason: FinishReason::Length, .. });
        assert!(shut_down || done, "{event:?}");
        assert!(events.recv().is_err(), "nothing follows the last event");
    }
}

/// On the thread of the text, and on one that prepares prompts, which the engine's waits for.
#[test]
fn a_sink_may_drop_the_engine() {
    for prompt in [text("abc"), Prompt::Tokens(vec![-1])] {
        let (engine, _) = engine(4, 64);
        let last = Arc::new(Mutex::new(None));
        let mut kept = last.lock().unwrap();
        let mut all = Vec::new();
        for i in 0..16 {
            let (last, (sender, events)) = (last.clone(), unbounded());
            let sink = Box::new(move |event: GenerationEvent| {
                let engine: Option<Engine> = if i == 0 { last.lock().unwrap().take() } else { None };
                drop(engine);
                drop(sender.send(event));
            });
            let prompt = if i == 0 { prompt.clone() } else { text("abc") };
            engine.submit(prompt, GenerationParams::greedy(100), sink).unwrap();
            all.push(events);
        }
        *kept = Some(engine);
        drop(kept);
        all.iter().for_each(|events| drop(terminal(events)));
        assert!(last.lock().unwrap().is_none());
    }
}

#[test]
fn what_is_worked_on_is_told_before_the_work_and_after_it() {
    let (engine, control) = engine(1, 4);
    let observed = |prompt: &str| {
        let (sender, activity) = unbounded();
        let tell: ActivitySink = Arc::new(move |activity| sender.send(activity).unwrap());
        let (sink, events) = channel();
        engine.submit_observed(text(prompt), GenerationParams::greedy(4), Some(tell), sink).unwrap();
        (activity, events)
    };
    let next = |activity: &Receiver<Activity>| activity.recv_timeout(PATIENCE).unwrap();
    let gate = control.gate.lock().unwrap();
    let (first, first_events) = observed("abc");
    assert_eq!([next(&first), next(&first), next(&first)], [Activity::Begun, Activity::Paused, Activity::Begun]);
    // It has the only slot, and no step ends: another one is prepared, and waits.
    let (second, second_events) = observed("def");
    assert_eq!([next(&second), next(&second)], [Activity::Begun, Activity::Paused]);
    assert!(second.is_empty() && first.is_empty());
    drop(gate);
    assert_eq!(next(&second), Activity::Begun, "it has the slot");
    for events in [first_events, second_events] {
        assert!(matches!(terminal(&events), GenerationEvent::Finished { .. }));
    }
}

#[test]
fn one_that_is_paused_is_not_worked_on_until_it_has_a_slot_again() {
    let (engine, control) = engine(1, 4);
    let (sender, activity) = unbounded();
    let tell: ActivitySink = Arc::new(move |activity| sender.send(activity).unwrap());
    let (sink, events) = channel();
    let gate = control.gate.lock().unwrap();
    let endless = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(40) };
    let handle = engine.submit_observed(text("abc"), endless, Some(tell), sink).unwrap();
    let next = || activity.recv_timeout(PATIENCE).unwrap();
    assert_eq!([next(), next(), next()], [Activity::Begun, Activity::Paused, Activity::Begun]);
    handle.pause();
    drop(gate);
    assert_eq!(next(), Activity::Paused);
    assert!(activity.is_empty(), "it has no slot");
    handle.resume();
    assert_eq!(next(), Activity::Begun);
    assert!(matches!(terminal(&events), GenerationEvent::Finished { .. }));
}

#[test]
fn a_cancelled_request_ends_soon_and_frees_its_slot() {
    let (engine, _) = engine(1, 4);
    let (sink, events) = channel();
    let endless = GenerationParams { ignore_eos: true, ..Default::default() };
    let handle = engine.submit(text("abc"), endless, sink).unwrap();
    handle.cancel();
    let event = terminal(&events);
    assert!(matches!(event, GenerationEvent::Finished { .. }), "{event:?}");
    assert_eq!(engine.stats().slots_active, 0);
    assert!(engine.generate(text("abc"), GenerationParams::greedy(4)).is_ok());
}

/// A request of many tokens that is paused before its first, as it is in each of a few states.
fn paused(engine: &Engine, control: &Control) -> (RequestHandle, Receiver<GenerationEvent>) {
    let gate = control.gate.lock().unwrap();
    let (sink, events) = channel();
    let handle =
        engine.submit(text("abc"), GenerationParams { ignore_eos: true, ..GenerationParams::greedy(100) }, sink);
    let handle = handle.unwrap();
    handle.pause();
    drop(gate);
    until(|| engine.stats().paused == 1);
    (handle, events)
}

#[test]
fn an_engine_whose_only_request_is_paused_sleeps_and_is_woken() {
    let (engine, control) = engine(1, 4);
    let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(100) };
    let prompt = ScriptedVocabulary.tokenize("abc", SpecialTokens::None).unwrap();
    let whole = reference(&prompt, &params, POSITIONS).0;
    let (handle, events) = paused(&engine, &control);
    let (looks, slept) = (control.looks.load(Relaxed), Duration::from_millis(500));
    // It would be looked for work all the time.
    std::thread::sleep(slept);
    let looks = control.looks.load(Relaxed) - looks;
    assert!(looks <= 2, "{looks} steps in {slept:?}: the thread does not sleep");
    let got = engine.generate(text("other"), GenerationParams::greedy(4)).unwrap();
    assert!(got.usage.completion_tokens > 0, "the slot is for others");
    assert_eq!((engine.stats().paused, engine.stats().queued), (1, 0));
    // Both do nothing the second time.
    handle.pause();
    handle.resume();
    handle.resume();
    let mut answer = String::new();
    let end = loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            GenerationEvent::Text { text, .. } => answer.push_str(&text),
            event if event.is_terminal() => break event,
            _ => {}
        }
    };
    assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Length, .. }), "{end:?}");
    assert_eq!(answer, whole);
    // Nor once it is over.
    handle.pause();
    handle.cancel();
    assert_eq!((engine.stats().paused, engine.stats().pauses_total), (0, 1));
}

/// Whoever is not woken looks once a second by itself: twenty rounds would take as many of them.
#[test]
fn who_sleeps_beside_a_paused_request_hears_at_once_that_it_goes_on_or_ends() {
    let (engine, control) = engine(1, 4);
    let started = Instant::now();
    for round in 0..20 {
        let (handle, events) = paused(&engine, &control);
        if round % 2 == 0 {
            handle.resume();
        } else {
            handle.cancel();
        }
        let event = terminal(&events);
        assert!(matches!(event, GenerationEvent::Finished { .. }), "{event:?}");
    }
    let took = started.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
}

/// Each of those that call at the same time is heard, whoever it was whose call is on its way.
#[test]
fn many_that_pause_and_resume_at_once_are_all_heard() {
    let (engine, _) = engine(2, 16);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let engine = &engine;
            scope.spawn(move || {
                for i in 0..20 {
                    let (sink, events) = channel();
                    let prompt = format!("prompt {thread} {i}");
                    let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(60) };
                    let want = reference(
                        &ScriptedVocabulary.tokenize(&prompt, SpecialTokens::None).unwrap(),
                        &params,
                        POSITIONS,
                    );
                    let handle = engine.submit(Prompt::Text(prompt), params, sink).unwrap();
                    let mut got = String::new();
                    loop {
                        handle.pause();
                        handle.resume();
                        match events.recv_timeout(PATIENCE).unwrap() {
                            GenerationEvent::Text { text, .. } => got.push_str(&text),
                            event if event.is_terminal() => break,
                            _ => {}
                        }
                    }
                    assert_eq!(got, want.0);
                }
            });
        }
    });
    let stats = engine.stats();
    assert_eq!((stats.requests_finished_total, stats.paused, stats.slots_active), (80, 0, 0));
}

#[test]
fn dropping_the_engine_ends_what_is_paused() {
    let (engine, control) = engine(1, 4);
    let (handle, events) = paused(&engine, &control);
    drop(engine);
    assert!(matches!(terminal(&events), GenerationEvent::Failed(RequestError::ShuttingDown)));
    // There is nobody to wake.
    handle.resume();
}

#[test]
fn an_engine_that_cannot_decode_is_not_handed_out() {
    let config = EngineConfig::new("scripted");
    let backend = ScriptedBackend::new(2, POSITIONS, 18);
    backend.control.faults.lock().unwrap().push_back(Fault::Fail);
    let info = backend.info();
    let started =
        Engine::start(backend, None, Arc::new(ScriptedVocabulary), info, None, Vec::new(), &config, Arc::default(), 0);
    assert_eq!(started.err(), Some(LoadError::WarmUp("scripted".into())));
    let backend = ScriptedBackend::new(2, POSITIONS, 18);
    backend.control.faults.lock().unwrap().push_back(Fault::Lost);
    let info = backend.info();
    let started =
        Engine::start(backend, None, Arc::new(ScriptedVocabulary), info, None, Vec::new(), &config, Arc::default(), 0);
    assert_eq!(started.err(), Some(LoadError::NotFinite { path: "scripted".into() }));
    let absent = Engine::load(EngineConfig::new("/nonexistent/model.gguf"), |_| true);
    assert!(matches!(absent.err(), Some(LoadError::Model { reason, .. }) if reason.contains("No such file")));
    let guessing = |max_tokens| SpeculationConfig { prompt_lookup: true, max_tokens, ..SpeculationConfig::default() };
    let drafting = SpeculationConfig { draft_tokens: 65, ..SpeculationConfig::default() };
    let disk = Some(DiskCacheConfig { dir: "/nonexistent".into(), max_bytes: 1 << 30 });
    let no_ram = PrefixCacheConfig { ram_bytes: 0, disk, ..PrefixCacheConfig::default() };
    for (param, config) in [
        ("parallel", EngineConfig { parallel: 0, ..EngineConfig::new("x") }),
        ("parallel", EngineConfig { parallel: 257, ..EngineConfig::new("x") }),
        ("max_queue", EngineConfig { max_queue: usize::MAX, ..EngineConfig::new("x") }),
        ("prefill_tokens_per_step", EngineConfig { prefill_tokens_per_step: 0, ..EngineConfig::new("x") }),
        ("threads", EngineConfig { threads: Some(0), ..EngineConfig::new("x") }),
        ("ctx_size", EngineConfig { ctx_size: u32::MAX, ..EngineConfig::new("x") }),
        ("step_ms_target", EngineConfig { step_ms_target: Some(0), ..EngineConfig::new("x") }),
        ("speculation.max_tokens", EngineConfig { speculation: guessing(0), ..EngineConfig::new("x") }),
        ("speculation.max_tokens", EngineConfig { speculation: guessing(u32::MAX), ..EngineConfig::new("x") }),
        ("speculation.draft_tokens", EngineConfig { speculation: drafting, ..EngineConfig::new("x") }),
        ("prefix_cache.ram_bytes", EngineConfig { prefix_cache: no_ram, ..EngineConfig::new("x") }),
    ] {
        let refused = Engine::load(config, |_| true).err();
        assert!(matches!(&refused, Some(LoadError::Config(e)) if e.param == param), "{param}: {refused:?}");
    }
}
