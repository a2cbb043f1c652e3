//! A change of model under load loses nothing.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_e2e::{
    answer::AnswerBook,
    harness::{
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    load::Report,
    models::{DemoModel, Question, Since, V1_SAYS, WHICH_VERSION, questions, which_version},
};

/// Concurrent streams.
const STREAMS: usize = 32;
/// Requests before the spec changes, and after the commit; with those in between more than 2,000.
const REQUESTS_EACH_SIDE: u64 = 1_000;
/// Requests of the same load with no swap.
const BASELINE_REQUESTS: u64 = 1_000;
/// Longest time for those.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);

/// Questions that the two models answer differently: those of the evaluation that only V2 knows, and their names.
fn telling_questions() -> Result<Vec<Question>> {
    let mut telling: Vec<Question> = questions()?.into_iter().filter(|question| question.since == Since::V2).collect();
    telling.push(which_version());
    Ok(telling)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_swap_under_load_loses_no_request_and_mixes_no_response() -> Result<()> {
    with_temp_ns("swap", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let (v1_name, v2_name) = (service.fixture.version(&v1), service.fixture.version(&v2));
        let pods = service.identities().await?;
        ensure!(pods.len() == 2, "two pods are expected: {pods:?}");

        // What V1 answers otherwise than V2 does, and in whatever company: V1 guesses, and some guesses are near ties.
        let mut asked = telling_questions()?;
        let mut v1_says = service.clear_answers(&asked).await?;
        v1_says.retain(|id, text| asked.iter().any(|question| question.id == *id && question.expected != *text));
        asked.retain(|question| v1_says.contains_key(&question.id));
        ensure!(v1_says.get(WHICH_VERSION).is_some_and(|text| text == V1_SAYS), "V1 does not know itself: {v1_says:?}");
        ensure!(asked.len() >= 10, "only {} questions tell the models apart: {v1_says:?}", asked.len());

        // The same load with no swap: how long its streams pause.
        let book = AnswerBook::default().with(&v1_name, v1_says.clone());
        let no_swap = service.load(STREAMS, asked.clone(), Some(book)).await?;
        no_swap.await_completed(BASELINE_REQUESTS, LOAD_TIMEOUT).await?;
        let no_swap = no_swap.finish().await?;
        no_swap.ensure_no_failure()?;

        // The load across the change.
        let v2_says = asked.iter().map(|question| (question.id.clone(), question.expected.clone()));
        let book = AnswerBook::default().with(&v1_name, v1_says).with(&v2_name, v2_says);
        let load = service.load(STREAMS, asked, Some(book)).await?;
        load.await_completed(REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        let changed_at = load.elapsed();
        service.set_model(&v2).await?;
        service.await_switched(&v2, ROLLOUT_TIMEOUT).await?;
        let (switched_at, before) = (load.elapsed(), load.progress().completed);
        say(format_args!("every pod answers with V2 {:.1} s after the change of the spec", (switched_at - changed_at).as_secs_f64()));
        load.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        let swap = load.finish().await?;

        say(format_args!("no swap: {}", no_swap.summary()));
        say(format_args!("swap:    {}", swap.summary()));
        swap.ensure_no_failure()?;
        let (requests, swap_gap, gap) = (swap.records.len(), swap.summary().longest_gap, no_swap.summary().longest_gap);
        say(format_args!(
            "FIGURE longest gap in any stream: {:.0} ms in {requests} requests across the swap, {:.0} ms in {} with no swap",
            swap_gap.max_ms, gap.max_ms, no_swap.records.len()
        ));
        ensure!(requests >= 2_000, "only {requests} requests");
        ensure_clean_change(&swap, &v1_name, &v2_name, switched_at)?;
        service.ensure_same_pods(&pods).await
    })
    .await
}

/// V1 answers up to the change, V2 after it, and streams of V1 went on while V2 answered others.
fn ensure_clean_change(swap: &Report, v1: &str, v2: &str, switched_at: Duration) -> Result<()> {
    let late = swap.answers().find(|(record, answer)| record.started_at > switched_at && answer.version != v2);
    ensure!(late.is_none(), "a request after the commit was answered by V1: {late:?}");
    let first_v2 = swap.answers().find(|(_, answer)| answer.version == v2).context("V2 never answered")?.0;
    let across =
        swap.answers().filter(|(record, answer)| answer.version == v1 && record.ended_at > first_v2.started_at);
    let across = across.count();
    say(format_args!("{across} streams of V1 ended after the first request of V2 had begun"));
    ensure!(across > 0, "no stream of V1 was under way at the change: the load was too light to tell");
    Ok(())
}
