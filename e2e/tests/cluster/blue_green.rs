//! A second set of pods takes over under load, is gone back from by hand and by live signals, and a bad model never gets a request.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceServiceStatus, SIDE_LABEL,
    status::{GateName, RejectedOutcome, RejectedStatus, RolloutStep, Side, StrategyName},
};
use gantry_e2e::{
    harness::{
        fixtures::{ModelSource, ModelStore, ServiceFixture, golden_prompts_config_map, is_ready},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::Load,
    models::{DemoModel, Question, Since, questions},
};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt;
use serde_json::json;

/// Concurrent streams.
const STREAMS: usize = 32;
/// Requests before and after each change.
const REQUESTS_EACH_SIDE: u64 = 300;
/// Longest time for those.
const LOAD_TIMEOUT: Duration = Duration::from_secs(180);
/// Time after which no connection that a client kept leads to the side that does not answer: one more answer is all that
/// each gets there, and a flip takes its way through kube-proxy.
const CONNECTIONS_MOVE: Duration = Duration::from_secs(10);
/// Time in which the pods of a side that nobody needs must be gone.
const GONE_WITHIN: Duration = Duration::from_secs(60);

/// A load of questions that both models answer alike.
async fn load(service: &TestService<'_>) -> Result<Load> {
    let asked: Vec<Question> =
        questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
    service.load(STREAMS, asked, None).await
}

async fn points_to(service: &TestService<'_>) -> Result<Side> {
    let endpoint = service.namespace.api::<Service>().get(service.fixture.name).await?;
    let label = endpoint.spec.and_then(|spec| spec.selector?.get(SIDE_LABEL).cloned()).context("it names no side")?;
    Ok(Side::of_label(Some(&label)))
}

/// Waits until as many pods of one side are there as there should be, and none of the other.
async fn await_only(service: &TestService<'_>, side: Side) -> Result<BTreeSet<String>> {
    poll(&format!("only {} pods are there", side.label()), GONE_WITHIN, Duration::from_millis(500), async || {
        let pods = service.pods().await?;
        let of_side = |pod: &&k8s_openapi::api::core::v1::Pod| {
            pod.labels().get(SIDE_LABEL).map(String::as_str) == Some(side.label()) && is_ready(pod)
        };
        let names: BTreeSet<_> = pods.iter().filter(of_side).map(ResourceExt::name_any).collect();
        let wanted = usize::try_from(service.fixture.replicas)?;
        Ok(match names.len() == wanted && pods.len() == wanted {
            true => Check::Done(names),
            false => Check::Wait(format!("{names:?} of {} pods", pods.len())),
        })
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_second_set_of_pods_takes_over_under_load_and_is_gone_back_from_by_hand() -> Result<()> {
    with_temp_ns("blue-green", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        let v3 = store.model(DemoModel::V3Bad)?;
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { bake: "5m", ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        service.patch(json!({"spec": {"rollout": {"strategy": "BlueGreen"}}})).await?;
        let blue = await_only(&service, Side::Blue).await?;

        let running = load(&service).await?;
        running.await_completed(REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        service.set_model(&v2).await?;
        let (v1_name, v2_name) = (service.fixture.version(&v1), service.fixture.version(&v2));
        let baking = service
            .await_status("the second set of pods bakes", ROLLOUT_TIMEOUT, |_, status| {
                let rollout = status.rollout.as_ref()?;
                (rollout.version == v2_name && rollout.step == RolloutStep::Bake).then(|| status.clone())
            })
            .await?;
        let flipped_at = running.elapsed();
        let rollout = baking.rollout.as_ref().context("no rollout")?;
        ensure!(rollout.strategy() == StrategyName::BlueGreen, "{rollout:?}");
        ensure!(baking.active_side == Some(Side::Green) && points_to(&service).await? == Side::Green, "{baking:?}");
        ensure!(
            baking.ready_replicas == 2 && baking.replica_count == 2,
            "the side that answers is counted: {baking:?}"
        );
        let names: BTreeSet<_> = service.pods().await?.iter().map(ResourceExt::name_any).collect();
        ensure!(names.len() == 4 && blue.is_subset(&names), "the first set is the way back: {blue:?} of {names:?}");
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;

        // By hand: what the spec asks for is resident on the other side.
        service.set_model(&v1).await?;
        let asked_at = running.elapsed();
        service
            .await_status("requests go back", ROLLOUT_TIMEOUT, |_, status| {
                let back = status.active_version.as_ref() == Some(&v1_name) && status.rollout.is_none();
                back.then_some(())
            })
            .await?;
        let back_at = running.elapsed();
        ensure!(points_to(&service).await? == Side::Blue, "the Service points to the other side");
        let before = running.progress().completed;
        running.await_completed(before + REQUESTS_EACH_SIDE, LOAD_TIMEOUT).await?;
        ensure!(await_only(&service, Side::Blue).await? == blue, "the first set was replaced");

        // A bad one is refused in pods that got no request.
        service.set_model(&v3).await?;
        service.await_rejected(&v3, GateName::Prompts, ROLLOUT_TIMEOUT).await?;
        ensure!(await_only(&service, Side::Blue).await? == blue, "the first set was replaced");
        let report = running.finish().await?;
        report.ensure_no_failure()?;
        say(format_args!("FIGURE {}", report.summary()));
        say(format_args!("FIGURE back by hand in {:.1} s", (back_at - asked_at).as_secs_f64()));
        let v3_name = service.fixture.version(&v3);
        for (record, answer) in report.answers() {
            let at = record.started_at;
            ensure!(answer.version != v3_name, "a refused model answered");
            let only_v2 = at > flipped_at + CONNECTIONS_MOVE && at < asked_at;
            let only_v1 = at < flipped_at.saturating_sub(CONNECTIONS_MOVE) || at > back_at + CONNECTIONS_MOVE;
            ensure!(
                !only_v2 || answer.version == v2_name,
                "{at:?}: answered by the side before, flipped {flipped_at:?}"
            );
            ensure!(!only_v1 || answer.version == v1_name, "{at:?}: answered by the side after, back at {back_at:?}");
        }
        ensure!(report.answers().any(|(_, answer)| answer.version == v2_name), "V2 never answered");
        Ok(())
    })
    .await
}

/// Waits until `model` was taken back, and gives why.
async fn await_taken_back(service: &TestService<'_>, model: &ModelSource) -> Result<RejectedStatus> {
    let version = service.fixture.version(model);
    service
        .await_status(&format!("{version} is taken back"), ROLLOUT_TIMEOUT, |_, status| {
            let rejected = status.rejected.clone().filter(|rejected| rejected.version == version)?;
            (rejected.outcome == RejectedOutcome::RolledBack && status.rollout.is_none()).then_some(rejected)
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_version_whose_figures_pass_a_limit_is_taken_back_by_itself_in_place_and_by_the_other_side() -> Result<()> {
    with_temp_ns("signals", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        // One pod has all requests: of two, one might have none, and would say nothing of its figures.
        let fixture = ServiceFixture { bake: "10m", replicas: 1, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        // No model is as fast as that: every version is bad by this limit, once it is watched.
        let signals = json!({"ttftP95": "1ms", "window": "2s", "minSamples": 20});
        service.patch(json!({"spec": {"rollout": {"rollback": {"signals": signals}}}})).await?;
        let running = load(&service).await?;
        for (strategy, side) in [("InPlaceSwap", Side::Blue), ("BlueGreen", Side::Blue)] {
            service
                .patch(json!({
                    "metadata": {"annotations": {"gantry.dev/retry": strategy}},
                    "spec": {"rollout": {"strategy": strategy}, "model": {"source": {"uri": v2.uri, "sha256": v2.sha256}}},
                }))
                .await?;
            let rejected = await_taken_back(&service, &v2).await?;
            ensure!(rejected.gate == GateName::Health, "{strategy}: {rejected:?}");
            ensure!(rejected.message.contains("spec.rollout.rollback.signals.ttftP95"), "{strategy}: {rejected:?}");
            ensure!(points_to(&service).await? == side, "{strategy}: the Service points to the other side");
            await_only(&service, side).await?;
            service.await_switched(&v1, ROLLOUT_TIMEOUT).await?;
            say(format_args!("{strategy}: {}", rejected.message));
            service.set_model(&v1).await?;
            let is_settled = |status: &InferenceServiceStatus| status.rejected.is_none() && status.rollout.is_none();
            service
                .await_status("nothing is held against it any more", ROLLOUT_TIMEOUT, |_, status| {
                    is_settled(status).then_some(())
                })
                .await?;
        }
        let report = running.finish().await?;
        report.ensure_no_failure()?;
        let v2_name = service.fixture.version(&v2);
        ensure!(report.answers().any(|(_, answer)| answer.version == v2_name), "V2 never answered");
        Ok(())
    })
    .await
}
