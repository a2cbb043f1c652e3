//! Several workers of one model: as many as were asked for, each on its own, and nothing lost that could be run again.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_engine::{GenerationEvent, GenerationParams, KvLayout, Prompt};
use gantry_server::processors::Processors;
use gantry_server::version::{
    DispatchStrategy, GenerateRequest, Generation, GenerationError, LoadError, RuntimeSettings, Scheduling, Version,
    VersionSpec, WorkerConfig, WorkerHealth,
};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Value;
use tokio::sync::watch;

use crate::script::{server_after, while_there_is};
use crate::server::{
    Events, PATIENCE, Server, UNENDING, await_condition, chat, endless, is_alive, model, send_signal, text_of,
    unending_model,
};

const TEXT: &str = "/v1/completions";
const STRATEGIES: [DispatchStrategy; 4] = [
    DispatchStrategy::RoundRobin,
    DispatchStrategy::LeastLoaded,
    DispatchStrategy::MemoryAware,
    DispatchStrategy::PrefixAware,
];
/// Two workers of two sequences, each of 2,048 cells.
const TWO: &[&str] = &["--workers", "2", "--threads", "2", "--ctx-size", "8192", "--parallel", "4"];

fn spec(workers: u32, dispatch: DispatchStrategy) -> VersionSpec {
    VersionSpec {
        name: "v2".to_owned(),
        digest: String::new(),
        model_path: model("demo-v2.q8_0.gguf"),
        served_name: "chat".to_owned(),
        runtime: RuntimeSettings {
            ctx_size: 8192,
            parallel: 4,
            workers: Some(workers),
            scheduling: Scheduling { dispatch, ..Scheduling::default() },
            ..RuntimeSettings::default()
        },
    }
}

/// [`spec`] with a model whose texts go on for as long as there are cells, and many of them. The folder holds the model.
fn unending_spec(workers: u32, dispatch: DispatchStrategy) -> (tempfile::TempDir, VersionSpec) {
    let (folder, model_path) = unending_model();
    let mut spec = VersionSpec { model_path, ..spec(workers, dispatch) };
    spec.runtime.ctx_size = 4 * 16_384;
    (folder, spec)
}

async fn load(spec: VersionSpec) -> Result<Arc<Version>, LoadError> {
    let workers = WorkerConfig::new(env!("CARGO_BIN_EXE_gantry-server"));
    Version::load(spec, &workers, watch::Sender::new(0.0)).await
}

/// Whether this machine has a processor for each of two workers, which is what they need. Where it has not, it is said
/// which test is left out.
fn two_fit() -> bool {
    let fit = Processors::here().count() >= 2;
    if !fit {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        // Not `eprintln!`: what a test that passes says so is not shown.
        let _ = writeln!(std::io::stderr(), "left out: {test}: two workers need two processors, and there is one");
    }
    fit
}

/// More tokens than can be generated between an answer's first text and the signal that kills its worker, on however
/// busy a machine: nearly as many as a sequence of [`unending_spec`] holds, far more than seconds of work.
const ENDLESS: u32 = 16_000;

fn long(tokens: u32) -> GenerateRequest {
    let params = GenerationParams { ignore_eos: true, seed: Some(1), ..GenerationParams::greedy(tokens) };
    GenerateRequest { prompt: Prompt::Text("Once".to_owned()).into(), params }
}

/// Waits until nothing of any request is left: a client has its last event a moment before its place is free.
async fn until_idle(version: &Version) {
    let idle = async || {
        let stats = version.stats();
        stats.queued + stats.running == 0 && stats.workers.iter().all(|worker| worker.in_flight == 0)
    };
    await_condition("every place to be given back", idle).await;
}

async fn first_text(generation: &mut Generation) {
    while !matches!(generation.next().await.unwrap().unwrap(), GenerationEvent::Text { .. }) {}
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 10, ..ProptestConfig::default() })]

    /// **Feature: distributed-inference-server, Property 20: Worker Count Configuration**
    /// **Validates: Requirements 7.1, 7.2**
    ///
    /// N goes from 1 to the processors of this machine, to 4 where it has more: each worker has a thread at least, and
    /// all of them together never more than there are processors, a number that no setting raises. So more workers
    /// cannot be had here by design, and that they are refused is part of the property. How the totals are shared out
    /// among more of them, on machines that are made up, is in the tests of the settings:
    /// `shares_add_up_and_never_take_more_threads_than_processors`.
    #[test]
    fn as_many_workers_are_ready_as_were_asked_for(
        (workers, parallel) in prop_oneof![
            4 => (1..=Processors::here().count().min(4)).prop_flat_map(|workers| (Just(workers), workers..9)),
            1 => (1_u32..6, 1_u32..9),
            // Sequences enough for all of them, and too few processors.
            1 => (1_u32..5).prop_map(|more| {
                let workers = Processors::here().count() + more;
                (workers, workers.min(gantry_engine::MAX_PARALLEL))
            }),
        ],
        dispatch in select(&STRATEGIES[..]),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(workers_start(workers, parallel, dispatch))?;
    }
}

/// Starts a version, if as many workers can be had, and ends it again.
async fn workers_start(workers: u32, parallel: u32, dispatch: DispatchStrategy) -> Result<(), TestCaseError> {
    let mut spec = spec(workers, dispatch);
    (spec.runtime.parallel, spec.runtime.ctx_size) = (parallel, 256 * parallel);
    let processors = Processors::here().count();
    if workers > parallel.min(processors) {
        // Before anything is started: there is no such program.
        let program = WorkerConfig::new("/no/such/program");
        let error = match Version::load(spec, &program, watch::Sender::new(0.0)).await {
            Err(LoadError::Settings(error)) => error,
            other => return Err(TestCaseError::fail(format!("{workers} are not refused: {:?}", other.err()))),
        };
        prop_assert_eq!(error.param.as_str(), "workers");
        let limits = format!("{parallel} sequences (parallel) and {processors} threads");
        prop_assert!(error.message.contains(&limits), "{} instead of {}", error.message, limits);
        return Ok(());
    }
    let version = load(spec).await.unwrap();
    let stats = version.stats();
    prop_assert_eq!(stats.workers.len(), workers as usize);
    for worker in &stats.workers {
        prop_assert_eq!(&worker.health, &WorkerHealth::Ready);
    }
    // On a busy machine one may be late with a heartbeat, and gets requests again with the next.
    let all = async || version.stats().workers.iter().all(|worker| worker.dispatchable);
    await_condition("all of them to get requests", all).await;
    let pids: BTreeSet<u32> = stats.pids().into_iter().collect();
    prop_assert_eq!(pids.len(), workers as usize, "each is a process of its own");
    prop_assert!(pids.iter().all(|pid| is_alive(*pid)));
    // The totals are the version's, however many share them.
    prop_assert_eq!((stats.slots, version.model().unwrap().n_ctx_per_sequence), (parallel, 256));
    version.retire(Duration::ZERO).await;
    prop_assert!(pids.iter().all(|pid| !is_alive(*pid)));
    Ok(())
}

/// The same on a real server, as one example, that the engine's scheduler is tested for with any batch
/// (`one_that_fails_in_a_batch_fails_alone`): who has nothing to do with what fails does not notice it.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_takes_only_what_it_had_begun_to_answer() {
    if !two_fit() {
        return;
    }
    let (_folder, spec) = unending_spec(2, DispatchStrategy::RoundRobin);
    let version = load(spec).await.unwrap();
    let pids = version.stats().pids();
    let alone = version.submit(long(400)).await.unwrap().collect().await.unwrap();
    // In turn: the even ones are with one worker. Two of four have a sequence there, the other two wait for it. The one
    // alone was the first worker's, so the second one gets the even ones.
    let (dying, living) = (1, 0);
    let mut generations = Vec::new();
    for index in 0..8 {
        if index == 3 {
            // Both sequences of the one that dies are taken first: prompts that are prepared side by side come to them
            // in any order.
            for begun in [0, 2] {
                first_text(&mut generations[begun]).await;
            }
        }
        generations.push(version.submit(long(if matches!(index, 0 | 2) { ENDLESS } else { 400 })).await.unwrap());
    }
    send_signal(pids[dying], "KILL");
    let answers = futures::future::join_all(generations.into_iter().map(Generation::collect)).await;
    for (index, answer) in answers.into_iter().enumerate() {
        match (index, answer) {
            // It had sent text.
            (0 | 2, Err(GenerationError::WorkerDied(reason))) => assert!(reason.contains("SIGKILL"), "{reason}"),
            // The other worker's, and those that waited: the same text as ever.
            (1 | 3.., Ok(answer)) => assert_eq!(answer.output.text, alone.output.text),
            (index, other) => panic!("{index}: {other:?}"),
        }
    }
    let stats = version.stats();
    assert_eq!(stats.workers[living].restarts, 0);
    assert_eq!((stats.workers[dying].restarts, stats.retries), (1, 2));
    until_idle(&version).await;
    assert_eq!(*version.health().borrow(), WorkerHealth::Ready, "the version never stopped answering");
    await_condition("the worker to be back", async || version.stats().workers[dying].dispatchable).await;
    version.retire(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_one_worker_what_waited_is_run_by_the_next_one() {
    let (_folder, spec) = unending_spec(1, DispatchStrategy::LeastLoaded);
    let version = load(spec).await.unwrap();
    let pid = version.stats().pids()[0];
    let mut begun: Vec<_> = futures::future::join_all((0..4).map(|_| version.submit(long(ENDLESS)))).await;
    for generation in &mut begun {
        first_text(generation.as_mut().unwrap()).await;
    }
    let waiting: Vec<_> = futures::future::join_all((0..3).map(|_| version.submit(long(20)))).await;
    send_signal(pid, "KILL");
    for generation in begun {
        let ended = generation.unwrap().collect().await;
        assert!(matches!(ended, Err(GenerationError::WorkerDied(_))), "{ended:?}");
    }
    for generation in waiting {
        assert_eq!(generation.unwrap().collect().await.unwrap().usage.completion_tokens, 20);
    }
    until_idle(&version).await;
    let stats = version.stats();
    assert_eq!((stats.retries, stats.restarts), (3, 1));
    assert_ne!(stats.pids()[0], pid);
    version.retire(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_only_worker_is_away_it_is_said_why_and_who_comes_waits() {
    let directory = tempfile::tempdir().unwrap();
    // Nobody comes after the one that dies while this is there.
    let gate = directory.path().join("gate");
    let program = server_after(directory.path(), &while_there_is(&gate));
    let spec = spec(1, DispatchStrategy::LeastLoaded);
    let version = Version::load(spec, &WorkerConfig::new(program), watch::Sender::new(0.0)).await.unwrap();
    let pid = version.stats().pids()[0];
    std::fs::write(&gate, "").unwrap();
    send_signal(pid, "KILL");
    let mut health = version.health();
    let restarting = health.wait_for(|health| matches!(health, WorkerHealth::Restarting { .. }));
    let noticed = tokio::time::timeout(PATIENCE, restarting).await.expect("the death to be noticed").unwrap().clone();
    assert!(matches!(noticed, WorkerHealth::Restarting { reason, .. } if reason.contains("SIGKILL")));
    // As the last load took but a moment, the next is expected soon.
    let waiting = version.submit(long(1)).await.unwrap();
    std::fs::remove_file(&gate).unwrap();
    let ready = health.wait_for(|health| *health == WorkerHealth::Ready);
    tokio::time::timeout(PATIENCE, ready).await.expect("another worker").unwrap();
    assert_ne!(version.stats().pids()[0], pid);
    assert_eq!(waiting.collect().await.unwrap().usage.completion_tokens, 1);
    version.retire(PATIENCE).await;
}

/// As when a candidate is validated beside the version that answers.
#[tokio::test(flavor = "multi_thread")]
async fn two_versions_that_compute_at_once_share_the_threads() {
    if !two_fit() {
        return;
    }
    let processors = Processors::here().count();
    let (_folder, mut spec) = unending_spec(1, DispatchStrategy::LeastLoaded);
    spec.runtime.threads = Some(processors);
    let workers = WorkerConfig::new(env!("CARGO_BIN_EXE_gantry-server"));
    let load = async |name: &str| {
        let spec = VersionSpec { name: name.to_owned(), ..spec.clone() };
        Version::load(spec, &workers, watch::Sender::new(0.0)).await.unwrap()
    };
    let (old, new) = (load("old").await, load("new").await);
    let threads = || [&old, &new].map(|version| version.stats().workers[0].threads);
    let mut answer = old.submit(long(ENDLESS)).await.unwrap();
    first_text(&mut answer).await;
    await_condition("all threads for the one that computes", async || threads()[0] == processors).await;
    let mut other = new.submit(long(ENDLESS)).await.unwrap();
    first_text(&mut other).await;
    let shared = async || threads().iter().sum::<u32>() == processors;
    await_condition("the threads to be shared", shared).await;
    assert!(threads().iter().all(|&threads| threads == processors / 2 || threads == processors.div_ceil(2)));
    // Both go on with what they have.
    first_text(&mut answer).await;
    first_text(&mut other).await;
    drop(other);
    await_condition("all threads for the one that is left", async || threads()[0] == processors).await;
    first_text(&mut answer).await;
    drop(answer);
    for version in [old, new] {
        until_idle(&version).await;
        version.retire(PATIENCE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_fails_leaves_no_worker_behind() {
    if !two_fit() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bad.gguf");
    std::fs::write(&file, b"GGUF\x03\0\0\0 and then nothing of use").unwrap();
    let bad = VersionSpec { model_path: file, ..spec(2, DispatchStrategy::LeastLoaded) };
    let started = directory.path().join("started");
    let program = server_after(directory.path(), &format!("echo $$ >> '{}'", started.display()));
    let error = Version::load(bad, &WorkerConfig::new(program), watch::Sender::new(0.0)).await.err().unwrap();
    assert!(matches!(&error, LoadError::Model(_) | LoadError::WorkerDied(_)), "{error}");
    let started = std::fs::read_to_string(started).unwrap();
    assert!(!started.is_empty() && started.lines().all(|pid| !is_alive(pid.parse().unwrap())), "{started}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_strategy_answers_and_the_last_requests_leave_nothing() {
    for dispatch in STRATEGIES {
        let version = load(spec(Processors::here().count().min(2), dispatch)).await.unwrap();
        // More than memory-aware dispatch lets to the workers at once: the others wait in front of them.
        let answers =
            futures::future::join_all((0..12).map(|_| async { version.submit(long(900)).await.unwrap() })).await;
        let answers = futures::future::join_all(answers.into_iter().map(Generation::collect)).await;
        for answer in &answers {
            assert_eq!(answer.as_ref().unwrap().usage.completion_tokens, 900, "{dispatch}");
        }
        until_idle(&version).await;
        assert_eq!(version.stats().retries, 0, "{dispatch}");
        version.retire(PATIENCE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_one_sequence_may_have_is_counted_once() {
    if !two_fit() {
        return;
    }
    let mut spec = spec(2, DispatchStrategy::MemoryAware);
    // 2,048 cells for each worker's two sequences, either of which may have them all.
    (spec.runtime.ctx_size, spec.runtime.engine.kv_layout) = (4096, KvLayout::Unified);
    let version = load(spec).await.unwrap();
    assert_eq!(version.model().unwrap().n_ctx_per_sequence, 2048);
    let generations =
        futures::future::join_all((0..8).map(|_| async { version.submit(long(900)).await.unwrap() })).await;
    let with_workers = || version.stats().workers.iter().map(|worker| worker.in_flight).collect::<Vec<_>>();
    assert_eq!(with_workers(), [2, 2], "two times 900 tokens fit, and the other requests wait in front");
    for answer in futures::future::join_all(generations.into_iter().map(Generation::collect)).await {
        assert_eq!(answer.unwrap().usage.completion_tokens, 900);
    }
    until_idle(&version).await;
    version.retire(PATIENCE).await;
}

#[tokio::test]
async fn a_server_with_a_dead_worker_goes_on_answering() {
    if !two_fit() {
        return;
    }
    let server = Server::start(TWO).await;
    let workers = server.workers();
    assert_eq!(workers.len(), 2);
    // A worker that hangs gets nothing once it is late, and is not killed for that yet.
    send_signal(workers[0], "STOP");
    let dispatchable = "gantry_worker_dispatchable";
    await_condition("the silence to be noticed", async || server.metric(dispatchable).await < 1.5).await;
    assert_eq!(server.ready().await.0, 200);
    for _ in 0..4 {
        assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
    }
    send_signal(workers[0], "CONT");
    await_condition("it to get requests again", async || server.metric(dispatchable).await > 1.5).await;

    send_signal(workers[0], "KILL");
    for _ in 0..4 {
        let answer = server.post("/v1/chat/completions", &chat("What is the capital of Peru?")).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(text_of(&answer), "The capital of Peru is Lima.");
    }
    assert_eq!(server.ready().await.0, 200);
    await_condition("another worker", async || server.metric(dispatchable).await > 1.5).await;
    let now = server.workers();
    assert!(now.len() == 2 && !now.contains(&workers[0]), "{now:?}");
    assert!((server.metric("gantry_worker_restarts").await - 1.0).abs() < 0.1);
}

#[tokio::test]
async fn a_worker_keeps_to_the_processors_that_it_is_told() {
    let allowed = |pid: &str| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.unwrap().trim().to_owned()
    };
    let all = allowed("self");
    let last = all.rsplit([',', '-']).next().unwrap();
    // What a front starts: the other end of its socket is the worker's standard input.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    command.args(["worker", "--processors", last]).stdin(std::process::Stdio::from(OwnedFd::from(theirs)));
    let mut worker = command.kill_on_drop(true).spawn().unwrap();
    let pid = worker.id().unwrap().to_string();
    await_condition("it to keep to one", async || allowed(&pid) == last).await;
    drop(ours);
    assert!(tokio::time::timeout(PATIENCE, worker.wait()).await.unwrap().unwrap().success());
}

#[tokio::test]
async fn above_the_high_watermark_it_refuses_until_the_low_one() {
    let server = Server::start_unending(1, &["--high-watermark", "3", "--low-watermark", "1"]).await;
    let mut running = Events::open(server.post(TEXT, &endless(UNENDING))).await;
    running.next().await.unwrap();
    let running = running.read_on();
    let queued = "gantry_requests_queued";
    let mut waiting = Vec::new();
    for depth in 1..=4 {
        waiting.push(tokio::spawn(server.post(TEXT, &endless(8)).send()));
        await_condition("it to wait", async || server.metric(queued).await > f64::from(depth) - 0.5).await;
    }
    for left in [4.0, 3.0, 2.0] {
        assert_eq!(server.post(TEXT, &endless(8)).send().await.unwrap().status(), 429);
        assert!(server.metric("gantry_accepting").await < 0.5);
        waiting.pop().unwrap().abort();
        await_condition("it to leave", async || server.metric(queued).await < left - 0.5).await;
    }
    assert!(server.metric("gantry_accepting").await > 0.5);
    running.abort();
    assert_eq!(server.post(TEXT, &endless(8)).send().await.unwrap().status(), 200);
    assert_eq!(waiting.pop().unwrap().await.unwrap().unwrap().status(), 200);
}
