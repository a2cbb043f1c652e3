//! A node is drained, pods are evicted, midway in a rollout: it goes on, and no request is lost.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use gantry_crds::{
    InferenceServiceStatus,
    status::{CandidatePhase, RolloutStep},
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
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::EvictParams};

/// A download that takes about eight seconds: time to evict a pod in the middle of it.
const SLOW: &str = "fault/slow/500000";
/// The node of the tests' cluster.
const NODE: &str = "gantry-1";
/// Streams of the load.
const STREAMS: usize = 2;

/// Questions that both models answer alike, so that a service that does not answer is seen.
async fn light_load(service: &TestService<'_>) -> Result<Load> {
    let asked: Vec<Question> =
        questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
    service.load(STREAMS, asked, None).await
}

fn condition(status: &InferenceServiceStatus, type_: &str) -> Option<(String, String)> {
    let condition = status.conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((condition.reason.clone(), condition.message.clone()))
}

/// Waits until nothing is wrong with the pods any more, and no request of the load has failed.
async fn ends_well(service: &TestService<'_>, load: Load) -> Result<()> {
    service
        .await_status("nothing is wrong any more", ROLLOUT_TIMEOUT, |_, status| {
            (condition(status, "PodsReady")?.0 == "AsRequested").then_some(())
        })
        .await?;
    let report = load.finish().await?;
    say(report.summary());
    report.ensure_no_failure()
}

/// Waits until both pods fetch `model`, for which the spec asks by now.
async fn await_fetching(service: &TestService<'_>, model: &ModelSource) -> Result<()> {
    let version = service.fixture.version(model);
    service
        .await_status("both pods fetch the new model", ROLLOUT_TIMEOUT, |_, status| {
            let candidates = status.replicas.iter().filter_map(|replica| replica.candidate.as_ref());
            let fetching = candidates.filter(|of_pod| of_pod.version == version);
            let fetching = fetching.filter(|of_pod| of_pod.phase == CandidatePhase::Fetching);
            let step = status.rollout.as_ref().map(|rollout| rollout.step);
            (step == Some(RolloutStep::Prepare) && fetching.count() == 2).then_some(())
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_pod_that_is_evicted_midway_in_a_rollout_is_replaced_and_the_rollout_goes_on() -> Result<()> {
    with_temp_ns("evicted", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model_at(DemoModel::V2, SLOW)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let load = light_load(&service).await?;
        service.set_model(&v2).await?;
        await_fetching(&service, &v2).await?;

        let names: Vec<_> = service.pods().await?.iter().map(ResourceExt::name_any).collect();
        let [first, second] = names.as_slice() else { bail!("two pods are expected: {names:?}") };
        let pods: Api<Pod> = namespace.api();
        pods.evict(first, &EvictParams::default()).await.context("the first eviction is refused")?;
        // The budget keeps the other pod while the successor is not ready, as on a drained node. A successor may be by now.
        match pods.evict(second, &EvictParams::default()).await {
            Err(kube::Error::Api(refusal)) if refusal.code == 429 => {
                say(format_args!("the second eviction: {}", refusal.message));
            }
            Ok(_) => {
                let there = service.pods().await?;
                let answers = there.iter().any(|pod| !names.contains(&pod.name_any()) && is_ready(pod));
                ensure!(answers, "both pods may be evicted at once");
            }
            Err(error) => bail!("the second eviction: {error}"),
        }

        let status = service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        ensure!(status.attempts == 2, "the eviction began another attempt: {status:?}");
        ends_well(&service, load).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_drain_that_leaves_no_node_for_a_pod_is_told_and_the_rollout_ends_with_the_others() -> Result<()> {
    with_temp_ns("drained", async |namespace| {
        let cluster = &namespace.cluster;
        cluster.ensure_own()?;
        let store = ModelStore::on(cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model_at(DemoModel::V2, SLOW)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let load = light_load(&service).await?;
        service.set_model(&v2).await?;
        await_fetching(&service, &v2).await?;
        let drained = rolled_out_while_drained(&service, &v2).await;
        let back = cluster.kubectl(&["uncordon", NODE]).await.context("the node could not be put back");
        drained.and(back)?;
        let status = service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        ensure!(status.attempts == 2, "the drain began another attempt: {status:?}");
        ends_well(&service, load).await
    })
    .await
}

/// Drains the only node, which the budget lets take one pod, whose successor finds no node.
async fn rolled_out_while_drained(service: &TestService<'_>, v2: &ModelSource) -> Result<()> {
    let selector = format!("--pod-selector=gantry.dev/service={}", service.fixture.name);
    let drain = ["drain", NODE, &selector, "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=5s"];
    let drained = service.namespace.cluster.kubectl(&drain).await;
    let refused = drained.err().context("the budget let both pods go")?.to_string();
    ensure!(refused.contains("timeout"), "{refused}");
    let told = service
        .await_status("PodsReady says that a pod finds no node", ROLLOUT_TIMEOUT, |_, status| {
            condition(status, "PodsReady").filter(|(reason, _)| reason == "Unschedulable")
        })
        .await?;
    say(format_args!("PodsReady: {}", told.1));
    let namespace = service.namespace;
    poll("kubectl tells of it", ROLLOUT_TIMEOUT, Duration::from_millis(500), async || {
        let mut missing = Vec::new();
        for kind in ["infs", "events"] {
            let table = namespace.cluster.kubectl(&["get", kind, "-n", &namespace.name]).await?;
            if !table.contains("Unschedulable") {
                missing.push(table);
            }
        }
        Ok(Check::when(missing.is_empty(), || missing.join("\n")))
    })
    .await?;
    let version = service.fixture.version(v2);
    service
        .await_status("the pod that is left answers with the new model", ROLLOUT_TIMEOUT, |_, status| {
            let answer = status.replicas.iter().filter(|one| one.version.as_ref() == Some(&version)).count();
            (status.active_version.as_ref() == Some(&version) && answer == 1).then_some(())
        })
        .await
}
