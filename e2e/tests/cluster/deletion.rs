//! Nothing that is deleted waits for the operator: after `helm uninstall` it is gone.

use std::{sync::OnceLock, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::OLD_FINALIZER;
use gantry_e2e::{
    harness::{
        Cluster, OPERATOR_SELECTOR, RELEASE, SYSTEM_NAMESPACE,
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::{TestNamespace, with_temp_ns},
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::{ask, http_client},
    models::{DemoModel, Question, Since},
};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    faults::{LONG_ANSWER, PIECES_BEFORE, pod_target},
    lifecycle::{DELETE_TIMEOUT, children},
};

/// From when to when the chart was not installed.
static UNINSTALLED: OnceLock<(Timestamp, Timestamp)> = OnceLock::new();

/// Whether a test had the chart uninstalled then.
pub fn is_uninstalled(at: Timestamp) -> bool {
    UNINSTALLED.get().is_some_and(|(from, to)| (*from..=*to).contains(&at))
}

/// `helm uninstall`, once the operator's pods are gone; the revision that was installed.
async fn uninstall(cluster: &Cluster) -> Result<String> {
    let status = cluster.helm(&["status", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--output", "json"]).await?;
    let revision = serde_json::from_str::<Value>(&status)?["version"].to_string();
    cluster.helm(&["uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, "--keep-history", "--wait"]).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let operators = ListParams::default().labels(OPERATOR_SELECTOR);
    poll("the operator is gone", ROLLOUT_TIMEOUT, Duration::from_millis(200), async || {
        let there = pods.list(&operators).await?.items.len();
        Ok(Check::when(there == 0, || format!("{there} pods")))
    })
    .await?;
    Ok(revision)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn after_helm_uninstall_a_service_and_a_namespace_go_and_streams_end_whole() -> Result<()> {
    with_temp_ns("orphaned", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let small = ServiceFixture { replicas: 1, ..ServiceFixture::default() };
        let long = ServiceFixture { parallel: 4, sequence_tokens: 2048, ..small.clone() };
        let first = TestService::start(namespace, long, &model).await?;
        let second = TestService::start(namespace, ServiceFixture { name: "other", ..small }, &model).await?;

        let cluster = &namespace.cluster;
        let from = Timestamp::now();
        let revision = uninstall(cluster).await?;
        let gone = everything_goes(namespace, &first, &second).await;
        let rollback = ["rollback", RELEASE, &revision, "--namespace", SYSTEM_NAMESPACE, "--wait"];
        let back = cluster.helm(&rollback).await.context("the chart could not be installed again");
        let _ = UNINSTALLED.set((from, Timestamp::now()));
        gone.and(back.map(drop))
    })
    .await
}

async fn everything_goes(namespace: &TestNamespace, first: &TestService<'_>, second: &TestService<'_>) -> Result<()> {
    let pod = first.pods().await?.into_iter().next().context("the service has no pod")?;
    let (target, client) = (pod_target(&pod)?, http_client()?);
    let (sender, mut pieces) = watch::channel(0);
    let stream = tokio::spawn(async move {
        let question = Question::plain("long", "Count to fifty.", Since::V1, "");
        ask(&client, &target, &question, LONG_ANSWER, |_: &str| sender.send_modify(|pieces| *pieces += 1)).await
    });
    tokio::time::timeout(ROLLOUT_TIMEOUT, pieces.wait_for(|pieces| *pieces >= PIECES_BEFORE)).await??;

    first.api.delete(first.fixture.name, &DeleteParams::default()).await?;
    let record = stream.await?;
    record.outcome.map_err(|failure| anyhow::anyhow!("the stream did not end whole: {failure}"))?;
    poll("the service and its children are gone", DELETE_TIMEOUT, Duration::from_secs(1), async || {
        let there = first.api.get_opt(first.fixture.name).await?.is_some();
        let left = children(namespace, first.fixture.name).await?;
        Ok(Check::when(!there && left.is_empty(), || format!("service: {there}, children: {left:?}")))
    })
    .await?;

    let others = children(namespace, second.fixture.name).await?;
    ensure!(!others.is_empty(), "the second service has no children, or this test does not see them");
    let namespaces: Api<Namespace> = Api::all(namespace.cluster.client.clone());
    namespaces.delete(&namespace.name, &DeleteParams::default()).await?;
    let begun = std::time::Instant::now();
    poll("the namespace is gone", DELETE_TIMEOUT, Duration::from_secs(1), async || {
        let there = namespaces.get_opt(&namespace.name).await?;
        let conditions = there.as_ref().and_then(|there| there.status.as_ref()?.conditions.clone());
        Ok(Check::when(there.is_none(), || format!("{conditions:?}")))
    })
    .await?;
    say(format_args!("a namespace with a service was gone after {:.1} s", begun.elapsed().as_secs_f64()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn the_finalizer_of_earlier_releases_is_taken_off() -> Result<()> {
    with_temp_ns("old-finalizer", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let fixture = ServiceFixture { replicas: 0, min_pass: None, ..ServiceFixture::default() };
        let service = TestService::create(namespace, fixture, &model).await?;
        service.patch(json!({"metadata": {"finalizers": [OLD_FINALIZER]}})).await?;
        poll("the operator takes it off", ROLLOUT_TIMEOUT, Duration::from_millis(200), async || {
            let object = service.api.get(service.fixture.name).await?;
            Ok(Check::when(object.finalizers().is_empty(), || format!("{:?}", object.finalizers())))
        })
        .await
    })
    .await
}
