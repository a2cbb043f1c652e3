//! A fleet judges, and nothing that a source or an edit does leaves it stuck.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceServiceStatus,
    status::{GateName, RolloutStep},
};
use gantry_e2e::{
    harness::{
        fixtures::{ModelSource, ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
    },
    load::Load,
    models::{DemoModel, Question, Since, questions},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::DeleteParams};
use serde_json::json;

/// A port of the store on which nobody listens.
const CLOSED: &str = "http://model-store.gantry-e2e-store.svc:9";
/// Time in which a source that was corrected must be in use: well below the progress deadline, and below the time for which
/// a connection to nobody is waited for.
const AT_ONCE: Duration = Duration::from_secs(60);
/// Time in which kube-proxy leads nobody to a pod any more that is not ready.
const LED_ELSEWHERE: Duration = Duration::from_secs(5);
/// Requests that are answered once it does.
const REQUESTS_AFTER: u64 = 400;

fn v1_questions() -> Result<Vec<Question>> {
    Ok(questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect())
}

/// One stream of questions that V1 knows, so that a service that does not answer is seen.
async fn light_load(service: &TestService<'_>) -> Result<Load> {
    service.load(1, v1_questions()?, None).await
}

fn says(status: &InferenceServiceStatus, condition: &str) -> String {
    let found = status.conditions.iter().find(|candidate| candidate.type_ == condition);
    found.map(|condition| condition.message.clone()).unwrap_or_default()
}

/// The same file at an address where nobody answers.
fn away(model: &ModelSource) -> ModelSource {
    ModelSource { uri: format!("{CLOSED}/{}", model.path), ..model.clone() }
}

/// Takes the source of the active model away.
async fn lose_the_source(service: &TestService<'_>, active: &ModelSource) -> Result<()> {
    let version = service.fixture.version(active);
    let gone = away(active);
    service.set_model(&gone).await?;
    service
        .await_status("pods are told of the other address", AT_ONCE, |_, status| {
            let named = status.versions.iter().find(|named| named.name == version)?;
            (named.model.source.uri.as_deref() == Some(gone.uri.as_str())).then_some(())
        })
        .await
}

/// Takes the source of the active model away, and then one pod: its successor cannot have the model.
async fn lose_a_pod_and_the_source(service: &TestService<'_>, active: &ModelSource) -> Result<()> {
    lose_the_source(service, active).await?;
    let pods: Api<Pod> = service.namespace.api();
    let lost = service.pods().await?.first().context("there is no pod")?.name_any();
    pods.delete(&lost, &DeleteParams::default()).await?;
    let message = service
        .await_status("Available says why one pod does not answer", ROLLOUT_TIMEOUT, |_, status| {
            let message = says(status, "Available");
            let told = message.starts_with("1 of 2 pods answer; pod ") && message.contains(CLOSED);
            (told && !message.contains(&lost)).then_some(message)
        })
        .await?;
    say(format_args!("Available: {message}"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_pod_that_cannot_have_the_active_model_holds_no_rollout_up() -> Result<()> {
    with_temp_ns("source-away", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let load = light_load(&service).await?;
        lose_a_pod_and_the_source(&service, &v1).await?;
        service.set_model(&v2).await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        let all_answer = async || {
            service
                .await_status("both pods answer", AT_ONCE, |_, status| {
                    (says(status, "Available") == "2 of 2 pods answer").then_some(())
                })
                .await
        };
        all_answer().await?;

        // Nor does one that is to compare a candidate with it: the other one does, and then there is nothing more to compare.
        lose_a_pod_and_the_source(&service, &v2).await?;
        let gates = json!({"performance": {"minDecodeRatio": "0.1"}});
        let model = json!({"source": {"uri": v1.uri, "sha256": v1.sha256}});
        service.patch(json!({"spec": {"model": model, "rollout": {"gates": gates}}})).await?;
        service.await_switched(&v1, ROLLOUT_TIMEOUT).await?;
        all_answer().await?;
        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_corrected_source_of_the_active_model_is_used_at_once() -> Result<()> {
    with_temp_ns("source-corrected", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        lose_a_pod_and_the_source(&service, &v1).await?;
        let before = service.identities().await?;
        service.set_model(&v1).await?;
        let status = service.await_settled(&v1, AT_ONCE).await?;
        ensure!(status.attempts == 1, "another address of the same file is no other version: {status:?}");
        service.ensure_same_pods(&before).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_bad_edit_during_a_bake_leaves_the_way_back_and_the_bake() -> Result<()> {
    with_temp_ns("bad-edit", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2, bad) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?, store.model(DemoModel::V3Bad)?);
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { bake: "10m", ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        let load = light_load(&service).await?;
        service.set_model(&v2).await?;
        service.await_switched(&v2, ROLLOUT_TIMEOUT).await?;
        let baking = service
            .await_status("V2 bakes", ROLLOUT_TIMEOUT, |_, status| {
                status.rollout.clone().filter(|rollout| rollout.step == RolloutStep::Bake)
            })
            .await?;

        service.set_model(&bad).await?;
        let (old, rejected) = (service.fixture.version(&v1), service.fixture.version(&bad));
        service
            .await_status("the bad one is refused, and the bake goes on", ROLLOUT_TIMEOUT, |_, status| {
                let refused = status.rejected.as_ref()?;
                let rollout = status.rollout.as_ref().filter(|rollout| rollout.step == RolloutStep::Bake)?;
                let same = rollout.deadline == baking.deadline && rollout.attempt == baking.attempt;
                let told = says(status, "Stalled").contains(&rejected);
                (refused.gate == GateName::Prompts && same && told).then_some(())
            })
            .await?;
        let resident = service
            .await_status("V1 stays loaded in every pod", AT_ONCE, |_, status| {
                let all = status.replicas.iter().all(|replica| replica.resident.as_ref() == Some(&old));
                (status.previous_version.as_ref() == Some(&old) && all).then_some(())
            })
            .await;
        resident.context("the way back is gone")?;
        let downloads = store.requests_of(&v1).await?;
        service.set_model(&v1).await?;
        service.await_switched(&v1, AT_ONCE).await?;
        ensure!(store.requests_of(&v1).await? == downloads, "the way back was fetched again");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_pod_that_cannot_go_back_from_a_bad_version_gets_no_requests() -> Result<()> {
    with_temp_ns("quarantine", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { bake: "10m", ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        lose_the_source(&service, &v1).await?;
        service.set_model(&v2).await?;
        service.await_switched(&v2, ROLLOUT_TIMEOUT).await?;

        // While V2 bakes a pod is lost, whose successor cannot have V1.
        let before: Vec<_> = service.pods().await?.iter().map(ResourceExt::name_any).collect();
        let lost = before.first().context("there is no pod")?;
        namespace.api::<Pod>().delete(lost, &DeleteParams::default()).await?;
        let new = service
            .await_status("its successor answers with V2", ROLLOUT_TIMEOUT, |_, status| {
                let entry = status.replicas.iter().find(|entry| !before.contains(&entry.pod))?;
                let answers = status.ready_replicas == 2 && entry.version.is_some() && !is_reported(status, lost);
                answers.then(|| entry.pod.clone())
            })
            .await?;
        let load = service.load(8, v1_questions()?, None).await?;
        // No model is as fast as that.
        let signals = json!({"ttftP95": "1ms", "window": "2s", "minSamples": 20});
        service.patch(json!({"spec": {"rollout": {"rollback": {"signals": signals}}}})).await?;
        let message = service
            .await_status("V2 is taken back, and who cannot have V1 gets no requests", ROLLOUT_TIMEOUT, |_, status| {
                let taken_back = status.rejected.as_ref()?.version == service.fixture.version(&v2);
                let message = says(status, "PodsReady");
                let told = message.contains(&format!("pod {new} has ")) && message.contains(CLOSED);
                let out = status.quarantined == [new.clone()] && status.ready_replicas == 1;
                (taken_back && told && out).then_some(message)
            })
            .await?;
        say(format_args!("PodsReady: {message}"));
        let mark = load.elapsed() + LED_ELSEWHERE;
        while load.elapsed() < mark {
            load.await_completed(load.progress().completed + 1, ROLLOUT_TIMEOUT).await?;
        }
        load.await_completed(load.progress().completed + REQUESTS_AFTER, ROLLOUT_TIMEOUT).await?;
        let report = load.finish().await?;
        report.ensure_no_failure()?;
        let old = service.fixture.version(&v1);
        let (after, bad): (Vec<_>, Vec<_>) = report
            .answers()
            .filter(|(record, _)| record.started_at > mark)
            .partition(|(_, answer)| answer.version == old);
        ensure!(!after.is_empty() && bad.is_empty(), "{} answers of V1, and {} of V2", after.len(), bad.len());

        service.set_model(&v1).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        service
            .await_status("both pods answer", AT_ONCE, |_, status| {
                (status.quarantined.is_empty() && status.ready_replicas == 2).then_some(())
            })
            .await
    })
    .await
}

fn is_reported(status: &InferenceServiceStatus, pod: &str) -> bool {
    status.replicas.iter().any(|entry| entry.pod == pod)
}
