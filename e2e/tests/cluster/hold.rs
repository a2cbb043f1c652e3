//! Pods without room for two models change them under load, one after the other, and the only one while its requests wait: nothing
//! fails, there, back, and with a model that cannot be loaded.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_crds::status::{GateName, RolloutStep, StrategyName};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    load::Load,
    models::{DemoModel, Question, Since, questions},
};
use serde_json::json;

/// Concurrent streams.
const STREAMS: usize = 32;
/// Requests before and after each change.
const REQUESTS_EACH_SIDE: u64 = 200;
/// Longest time for those.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);
/// No request may take longer: the running ones end, one model is unloaded and another loaded.
const LONGEST_ANSWER: Duration = Duration::from_secs(60);

/// A load of questions that both models answer alike.
async fn load(service: &TestService<'_>) -> Result<Load> {
    let asked: Vec<Question> =
        questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
    service.load(STREAMS, asked, None).await
}

/// There, back by hand, and with a model that golden prompts refuse, in so many pods.
async fn changes_under_load(replicas: i32, namespace_name: &str) -> Result<()> {
    with_temp_ns(namespace_name, async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        let v3 = store.model(DemoModel::V3Bad)?;
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { bake: "5m", replicas, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        service.patch(json!({"spec": {"rollout": {"strategy": "HoldRequests"}}})).await?;
        let pods = service.identities().await?;
        let running = load(&service).await?;
        running.await_completed(REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        service.set_model(&v2).await?;
        let (v1_name, v2_name) = (service.fixture.version(&v1), service.fixture.version(&v2));
        let asked_at = running.elapsed();
        let baking = service
            .await_status("it bakes", ROLLOUT_TIMEOUT, |_, status| {
                let rollout = status.rollout.as_ref()?;
                (rollout.version == v2_name && rollout.step == RolloutStep::Bake).then(|| status.clone())
            })
            .await?;
        let baked_at = running.elapsed();
        let rollout = baking.rollout.as_ref().context("no rollout")?;
        ensure!(rollout.strategy() == StrategyName::HoldRequests, "{rollout:?}");
        let resident = baking.replicas.iter().any(|report| report.resident.is_some());
        ensure!(!resident, "no pod has two models: {:?}", baking.replicas);
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        // By hand; it is loaded again.
        service.patch(json!({"spec": {"rollout": {"abort": v2_name}}})).await?;
        service.await_switched(&v1, ROLLOUT_TIMEOUT).await?;
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        // What golden prompts refuse is loaded in one pod, which goes back by itself.
        service.patch(json!({"spec": {"rollout": {"abort": null}}})).await?;
        service.set_model(&v3).await?;
        service.await_rejected(&v3, GateName::Prompts, ROLLOUT_TIMEOUT).await?;
        service.await_switched(&v1, ROLLOUT_TIMEOUT).await?;
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        let report = running.finish().await?;
        report.ensure_no_failure()?;
        say(format_args!("FIGURE {} pods: {}", replicas, report.summary()));
        say(format_args!("FIGURE {} pods went over in {:.1} s", replicas, (baked_at - asked_at).as_secs_f64()));
        service.ensure_same_pods(&pods).await?;
        let v3_name = service.fixture.version(&v3);
        ensure!(report.answers().all(|(_, answer)| answer.version != v3_name), "a refused model answered");
        ensure!(report.answers().any(|(_, answer)| answer.version == v2_name), "V2 never answered");
        ensure!(report.answers().any(|(_, answer)| answer.version == v1_name), "V1 never answered");
        let longest = report.answers().map(|(record, _)| record.ended_at - record.started_at).max().unwrap_or_default();
        ensure!(longest <= LONGEST_ANSWER, "a request took {longest:?}");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn the_only_pod_changes_its_model_while_requests_wait() -> Result<()> {
    changes_under_load(1, "hold-one").await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn one_pod_after_the_other_changes_its_model() -> Result<()> {
    changes_under_load(2, "hold-two").await
}
