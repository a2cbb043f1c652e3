//! Why pods are not there is told while the others answer, and is over when it is.

use std::time::Duration;

use anyhow::{Context, Result};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    models::DemoModel,
};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

const QUOTA: &str = "two-pods";

/// Waits until the condition PodsReady has this reason and a message with `named` in it, and the column REASON and an Event
/// have it too, where it is a trouble.
async fn await_told(service: &TestService<'_>, reason: &str, named: &str) -> Result<()> {
    let told = service
        .await_status(&format!("PodsReady says {reason}"), ROLLOUT_TIMEOUT, |_, status| {
            let condition = status.conditions.iter().find(|condition| condition.type_ == "PodsReady")?;
            (condition.reason == reason && condition.message.contains(named)).then(|| condition.message.clone())
        })
        .await?;
    say(format_args!("PodsReady: {reason}: {told}"));
    let namespace = service.namespace;
    poll("kubectl tells of it", ROLLOUT_TIMEOUT, Duration::from_millis(500), async || {
        let mut missing = Vec::new();
        let kinds = if reason == "AsRequested" { &["infs"][..] } else { &["infs", "events"] };
        for kind in kinds {
            let table = namespace.cluster.kubectl(&["get", kind, "-n", &namespace.name]).await?;
            if !table.contains(reason) {
                missing.push(table);
            }
        }
        Ok(Check::when(missing.is_empty(), || missing.join("\n")))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_quota_and_an_image_that_keep_a_pod_away_are_told_and_over_when_they_are() -> Result<()> {
    with_temp_ns("troubles", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let v1 = store.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;

        let quotas: Api<ResourceQuota> = namespace.api();
        let quota = json!({"metadata": {"name": QUOTA}, "spec": {"hard": {"pods": "2"}}});
        quotas.create(&PostParams::default(), &serde_json::from_value(quota)?).await?;
        service.patch(json!({"spec": {"replicas": 3}})).await?;
        await_told(&service, "FailedCreate", QUOTA).await?;
        quotas.delete(QUOTA, &DeleteParams::default()).await?;
        await_told(&service, "AsRequested", "").await?;

        let pods: Api<Pod> = namespace.api();
        let pod = service.pods().await?.first().context("no pod is there")?.name_any();
        let image = json!({"spec": {"containers": [{"name": "server", "image": "gantry.dev/none:0"}]}});
        pods.patch(&pod, &PatchParams::default(), &Patch::Strategic(image)).await?;
        await_told(&service, "ImagePullBackOff", "gantry.dev/none:0").await?;
        pods.delete(&pod, &DeleteParams::default()).await?;
        await_told(&service, "AsRequested", "").await?;

        Ok(())
    })
    .await
}
