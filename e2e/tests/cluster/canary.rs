//! A model goes over by shares of the requests, in pods that answer with both: nothing fails on the way there, nobody's conversation
//! goes to and fro, and one that does worse is taken back by itself.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceServiceStatus,
    status::{GateName, RejectedOutcome, RolloutStep},
};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    load::{Load, Report},
    models::{DemoModel, Question, Since, questions},
};
use serde_json::{Value, json};

/// Concurrent streams.
const STREAMS: usize = 32;
/// Requests before and after each change.
const REQUESTS_EACH_SIDE: u64 = 300;
/// Longest time for those.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);
/// Longest time between the first pod that hears of a share and the last one.
const PODS_HEAR: Duration = Duration::from_secs(5);

/// A load of questions that both models answer alike: each is a conversation of its own.
async fn load(service: &TestService<'_>) -> Result<Load> {
    let asked: Vec<Question> = questions()?.into_iter().filter(|question| question.since == Since::V1).collect();
    ensure!(asked.len() >= 40, "{} conversations are too few to share", asked.len());
    service.load(STREAMS, asked, None).await
}

/// Has the next models get shares of the requests first.
async fn with_canary(service: &TestService<'_>, steps: &[(&str, &str)], signals: Value) -> Result<()> {
    let steps: Vec<_> = steps.iter().map(|(share, bake)| json!({"share": share, "bake": bake})).collect();
    let rollout = json!({"strategy": "InPlaceSwap", "canary": {"steps": steps}, "rollback": {"signals": signals}});
    service.patch(json!({"spec": {"rollout": rollout}})).await?;
    Ok(())
}

/// The share that is in force in all pods, once it is that.
async fn await_share(service: &TestService<'_>, share: &str, pods: usize) -> Result<InferenceServiceStatus> {
    service
        .await_status(&format!("{share} in each pod"), ROLLOUT_TIMEOUT, |_, status| {
            let rollout = status.rollout.as_ref().filter(|rollout| rollout.step == RolloutStep::Canary)?;
            let is_it = rollout.canary.as_ref().is_some_and(|canary| canary.share.0 == share);
            let given = status.replicas.iter().filter_map(|report| report.canary.as_ref()?.share.as_ref());
            (is_it && given.filter(|given| given.0 == share).count() == pods).then(|| status.clone())
        })
        .await
}

/// Once a conversation is the candidate's it stays so, but for the moment in which pods hear of it one after the other.
fn ensure_nobody_goes_to_and_fro(report: &Report, candidate: &str) -> Result<()> {
    let mut first: BTreeMap<&str, Duration> = BTreeMap::new();
    let mut answers: Vec<_> = report.answers().collect();
    answers.sort_by_key(|(record, _)| record.started_at);
    for (record, answer) in answers {
        let question = record.question.as_str();
        if answer.version == candidate {
            first.entry(question).or_insert(record.started_at);
        } else if let Some(since) = first.get(question) {
            let late = record.started_at.saturating_sub(*since);
            ensure!(late <= PODS_HEAR, "{question} went back to {} after {late:?}", answer.version);
        }
    }
    ensure!(!first.is_empty(), "{candidate} never answered");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn shares_of_the_requests_go_over_and_then_all_and_nothing_fails() -> Result<()> {
    with_temp_ns("canary", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service =
            TestService::start(namespace, ServiceFixture { bake: "10s", ..ServiceFixture::default() }, &v1).await?;
        let (v1_name, v2_name) = (service.fixture.version(&v1), service.fixture.version(&v2));
        let pods = service.identities().await?;
        with_canary(&service, &[("10%", "30s"), ("50%", "30s")], Value::Null).await?;
        let running = load(&service).await?;
        running.await_completed(REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        service.set_model(&v2).await?;
        let status = await_share(&service, "10%", pods.len()).await?;
        ensure!(status.active_version.as_ref() == Some(&v1_name), "V1 is the active one: {status:?}");
        let began = running.elapsed();
        await_share(&service, "50%", pods.len()).await?;
        let half = running.elapsed();
        service.await_switched(&v2, ROLLOUT_TIMEOUT).await?;
        let switched = running.elapsed();
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        let report = running.finish().await?;
        report.ensure_no_failure()?;
        say(format_args!("canary: {}", report.summary()));
        ensure_nobody_goes_to_and_fro(&report, &v2_name)?;
        let shared = |from: Duration, to: Duration| {
            let of = report.answers().filter(|(record, _)| record.started_at > from && record.started_at < to);
            let of_v2: Vec<bool> = of.map(|(_, answer)| answer.version == v2_name).collect();
            of_v2.iter().filter(|is_v2| **is_v2).count() as f64 / of_v2.len().max(1) as f64
        };
        let (tenth, half) = (shared(began, half), shared(half, switched));
        say(format_args!("FIGURE shares of the requests: {:.1}% at 10%, {:.1}% at 50%", tenth * 100.0, half * 100.0));
        ensure!(tenth < half && half < 1.0, "{tenth} {half}");
        let late = report.answers().find(|(record, answer)| record.started_at > switched && answer.version != v2_name);
        ensure!(late.is_none(), "a request after the switch was answered by V1: {late:?}");
        service.ensure_same_pods(&pods).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_canary_that_passes_a_limit_is_taken_back_from_its_share() -> Result<()> {
    with_temp_ns("canary-back", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        // One pod has all requests: of two, one might have none, and would say nothing of its figures.
        let fixture = ServiceFixture { bake: "10m", replicas: 1, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        let (v1_name, v2_name) = (service.fixture.version(&v1), service.fixture.version(&v2));
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        // No model is as fast as that.
        let signals = json!({"ttftP95": "1ms", "window": "2s", "minSamples": 20});
        with_canary(&service, &[("50%", "10m")], signals).await?;
        let running = load(&service).await?;
        running.await_completed(REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        service.set_model(&v2).await?;
        let rejected = service
            .await_status("it is taken back", ROLLOUT_TIMEOUT, |_, status| {
                let rejected = status.rejected.clone().filter(|rejected| rejected.version == v2_name)?;
                status.rollout.is_none().then_some(rejected)
            })
            .await?;
        let back_at = running.elapsed();
        ensure!((rejected.gate, rejected.outcome) == (GateName::Health, RejectedOutcome::RolledBack), "{rejected:?}");
        ensure!(rejected.message.contains("spec.rollout.rollback.signals.ttftP95"), "{rejected:?}");
        say(format_args!("taken back: {}", rejected.message));
        let status = service.await_switched(&v1, ROLLOUT_TIMEOUT).await?;
        ensure!(status.active_version.as_ref() == Some(&v1_name), "V1 was the active one all along: {status:?}");
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        // By hand: it stays at its share while it is paused, goes back when it is aborted, and nothing is held against it.
        with_canary(&service, &[("50%", "10m")], Value::Null).await?;
        service.patch(json!({"metadata": {"annotations": {"gantry.dev/retry": "once more"}}})).await?;
        await_share(&service, "50%", 1).await?;
        service.patch(json!({"spec": {"rollout": {"paused": true}}})).await?;
        service
            .await_status("no time runs", ROLLOUT_TIMEOUT, |_, status| {
                let canary = status.rollout.as_ref()?.canary.as_ref()?;
                canary.until.is_none().then_some(())
            })
            .await?;
        service.patch(json!({"spec": {"rollout": {"paused": false, "abort": v2_name}}})).await?;
        service
            .await_status("it is given up", ROLLOUT_TIMEOUT, |_, status| {
                let back = status.rollout.is_none() && status.candidate_version.is_none() && status.rejected.is_none();
                (back && status.replicas.iter().all(|report| report.canary.is_none())).then_some(())
            })
            .await?;
        let given_up_at = running.elapsed();
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        let report = running.finish().await?;
        report.ensure_no_failure()?;
        say(format_args!("canary taken back: {}", report.summary()));
        let late =
            report.answers().find(|(record, answer)| record.started_at > given_up_at && answer.version == v2_name);
        ensure!(late.is_none(), "V2 answered after it was given up: {late:?}");
        report
            .answers()
            .find(|(record, answer)| record.started_at < back_at && answer.version == v2_name)
            .context("V2 never answered")?;
        Ok(())
    })
    .await
}
