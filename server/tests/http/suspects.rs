//! Requests that a worker dies of, and those who had nothing to do with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::server::{Events, Server, await_condition, text_of};

const TEXT: &str = "/v1/completions";
/// Has workers end with prompts that have the word in them.
const ABORT_ON: (&str, &str) = ("GANTRY_TEST_WORKER_ABORTS_ON", "poison");
/// Clients that stream while another one has workers die.
const BYSTANDERS: usize = 8;
const REFUSED: u16 = 422;

/// A prompt that a worker dies of: while it prepares it, when it gets its slot, or after its first text.
fn killer(moment: &str, number: usize) -> Value {
    json!({"prompt": format!("{number} poison@{moment}"), "max_tokens": 20, "ignore_eos": true, "temperature": 0})
}

async fn status_and_code(server: &Server, body: &Value) -> (u16, String) {
    let answer = server.post(TEXT, body).send().await.unwrap();
    let status = answer.status().as_u16();
    let told: Value = answer.json().await.unwrap();
    (status, told["error"]["code"].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn what_a_worker_dies_of_is_run_once_more_by_itself_and_then_refused() {
    let server = Server::start_in(&[ABORT_ON], &["--parallel", "2"]).await;
    let deaths = async || server.metric("gantry_worker_restarts").await.round() as u32;
    let refused = || (REFUSED, "request_ends_worker".to_owned());
    let mut expected = 0;
    for moment in ["preparation", "slot"] {
        assert_eq!(status_and_code(&server, &killer(moment, 0)).await, refused());
        expected += 2;
        for _ in 0..5 {
            let started = Instant::now();
            assert_eq!(status_and_code(&server, &killer(moment, 0)).await, refused(), "it is remembered");
            assert!(started.elapsed() < Duration::from_secs(1), "at once");
        }
        await_condition("the deaths to be counted", async || deaths().await == expected).await;
    }
    // Nothing of it has been sent, however far it came.
    assert_eq!(status_and_code(&server, &killer("text", 0)).await, refused());
    // Its client has text of it, and hears no more; it is tried for nobody, and who sends the same again is refused.
    let mut late = killer("text", 1);
    late["stream"] = json!(true);
    let told = Events::open(server.post(TEXT, &late)).await.rest().await;
    assert!(told.last().unwrap().contains("worker_died"), "{told:?}");
    await_condition("it to be tried", async || deaths().await == expected + 4).await;
    await_condition("another worker", async || server.ready().await.0 == 200).await;
    late["stream"] = json!(false);
    assert_eq!(status_and_code(&server, &late).await, refused());
    assert_eq!(status_and_code(&server, &late).await, refused());
    await_condition("the deaths to be counted", async || deaths().await == expected + 4).await;
    // More deaths than make a version fail.
    assert!(expected + 4 > gantry_server::limits::CRASH_LIMIT as u32);
    server.until_ready().await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
    assert!(!server.log().contains("0 poison"), "what it said is nowhere to be read");
}

#[tokio::test]
async fn texts_that_an_embedder_dies_of_are_refused_too() {
    let server = Server::start_in(&[ABORT_ON], &["--embeddings", "--pooling", "mean", "--parallel", "2"]).await;
    let embed = async |input: Value| {
        let answer = server.post("/v1/embeddings", &json!({"input": input})).send().await.unwrap();
        answer.status().as_u16()
    };
    for moment in ["preparation", "slot"] {
        let texts = json!(["one", format!("poison@{moment}"), "three"]);
        assert_eq!([embed(texts.clone()).await, embed(texts).await], [REFUSED, REFUSED]);
        assert_eq!(embed(json!(["one", "three"])).await, 200);
    }
    assert!((server.metric("gantry_worker_restarts").await - 4.0).abs() < 0.5);
}

/// Time in which what a worker died of has been tried by itself, whoever was tried before it.
const CONVICTED_WITHIN: Duration = Duration::from_secs(20);

/// The most that an answer may take to a bystander who is beside deaths all the time.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// What became of the bystanders' requests.
#[derive(Default)]
struct Tally {
    answered: AtomicUsize,
    /// Those that had begun to stream when their worker died.
    broken: AtomicUsize,
    /// Those that had sent nothing, and were refused or failed: the reasons.
    failed: std::sync::Mutex<Vec<String>>,
    longest_ms: AtomicUsize,
}

async fn stand_by(server: &Server, number: usize, over: &AtomicBool, tally: &Tally) {
    for turn in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let body = json!({
            "prompt": format!("Once upon a time {number} {turn}"), "max_tokens": 24, "ignore_eos": true, "stream": true, "seed": 1
        });
        let started = Instant::now();
        let answer = server.post(TEXT, &body).send().await.unwrap();
        if answer.status() != 200 {
            let refused = format!("{} {}", answer.status(), answer.text().await.unwrap());
            tally.failed.lock().unwrap().push(refused);
            continue;
        }
        let events = Events::of(answer).rest().await;
        let texts = events.iter().filter(|event| event.contains("\"text\"")).count();
        match events.last().map(String::as_str) {
            Some("[DONE]") => drop(tally.answered.fetch_add(1, Ordering::Relaxed)),
            Some(last) if texts == 0 => tally.failed.lock().unwrap().push(last.to_owned()),
            _ => drop(tally.broken.fetch_add(1, Ordering::Relaxed)),
        }
        let took = usize::try_from(started.elapsed().as_millis()).unwrap();
        tally.longest_ms.fetch_max(took, Ordering::Relaxed);
    }
}

/// Eight clients stream while one sends what workers die of, ten times a second; `number_of` says what it sends the how-manieth
/// time. No request of theirs that had sent nothing fails, and a dead worker is followed by the next at once.
async fn outlive(period: Duration, moment: &'static str, number_of: impl Fn(usize) -> usize) {
    // Of one that has had text a worker has died for good: streamed, it is not answered from the beginning.
    let streams = moment == "text";
    let server = Arc::new(Server::start_in(&[ABORT_ON], &["--parallel", "8", "--ctx-size", "4096"]).await);
    let (over, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
    let bystanders: Vec<_> = (0..BYSTANDERS)
        .map(|number| {
            let (server, over, tally) = (server.clone(), over.clone(), tally.clone());
            tokio::spawn(async move { stand_by(&server, number, &over, &tally).await })
        })
        .collect();
    let started = Instant::now();
    let mut killers = Vec::new();
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    // Who was beside the first death may wait for a moment by itself before the killer does (`TRIAL_PATIENCE`).
    let is_tried = async || server.metric("gantry_worker_restarts").await > 1.0;
    while started.elapsed() < period || (started.elapsed() < CONVICTED_WITHIN && !is_tried().await) {
        ticks.tick().await;
        let mut body = killer(moment, number_of(killers.len()));
        body["stream"] = json!(streams);
        let request = server.post(TEXT, &body).send();
        killers.push(tokio::spawn(async move { request.await.unwrap().status().as_u16() }));
    }
    over.store(true, Ordering::Relaxed);
    for bystander in bystanders {
        bystander.await.unwrap();
    }
    let sent = killers.len();
    killers.into_iter().for_each(|killer| killer.abort());
    let deaths = server.metric("gantry_worker_restarts").await;
    let (answered, broken) = (tally.answered.load(Ordering::Relaxed), tally.broken.load(Ordering::Relaxed));
    let failed = tally.failed.lock().unwrap().clone();
    let longest_ms = tally.longest_ms.load(Ordering::Relaxed);
    eprintln!(
        "{moment}: {sent} killers in {period:?}, {deaths} deaths; bystanders: {answered} answered, {broken} cut in their text, \
         {} failed before any; the longest took {longest_ms} ms",
        failed.len()
    );
    // With killers that all differ, each of them twice, texts are cut; but nobody fails who had sent nothing.
    assert!(deaths > 1.0 && answered + broken > 0);
    assert!(server.log().contains("a worker died of a request"), "none of them is known for what it is");
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(longest_ms < LONGEST_WAIT.as_millis() as usize, "a bystander waited for {longest_ms} ms");
    // The next worker is not waited for: what it takes is the load.
    let log = server.log();
    for death in log.lines().filter(|line| line.contains("\"worker died\"")) {
        assert!(death.contains("\"wait_ms\":0") || !death.contains("\"has_suspects\":true"), "{death}");
        assert!(!death.contains("\"state\":\"failed\""), "{death}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bystanders_outlive_one_who_sends_the_same_killer_again_and_again() {
    outlive(Duration::from_secs(4), "preparation", |_| 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bystanders_outlive_one_whose_killers_all_differ() {
    outlive(Duration::from_secs(4), "preparation", |number| number).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bystanders_outlive_one_who_streams_and_whose_killers_all_differ() {
    outlive(Duration::from_secs(6), "text", |number| number).await;
}

/// What is the same each time, then what differs, for a minute each.
async fn outlive_minutes(moment: &'static str) {
    let minute = Duration::from_secs(60);
    outlive(minute, moment, |_| 0).await;
    outlive(minute, moment, |number| number).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes"]
async fn bystanders_outlive_minutes_of_killers_that_are_being_prepared() {
    outlive_minutes("preparation").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes"]
async fn bystanders_outlive_minutes_of_killers_that_get_a_slot() {
    outlive_minutes("slot").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes two minutes"]
async fn bystanders_outlive_minutes_of_killers_that_stream() {
    outlive_minutes("text").await;
}

#[tokio::test]
async fn what_comes_while_the_only_worker_is_away_waits_for_the_next() {
    let server = Server::start_in(&[ABORT_ON], &[]).await;
    let killer = server.post(TEXT, &killer("slot", 1)).send();
    let died = tokio::spawn(killer);
    await_condition("a death", async || server.metric("gantry_worker_restarts").await > 0.5).await;
    for _ in 0..4 {
        let answer = server.post("/v1/chat/completions", &crate::server::chat("What is the capital of Peru?")).send();
        let answer = answer.await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(text_of(&answer.json().await.unwrap()), "The capital of Peru is Lima.");
    }
    assert_eq!(died.await.unwrap().unwrap().status(), REFUSED);
}
