//! A response belongs to the service, and not to the pod that made it.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, SERVED_NAME, ServiceFixture, apply, golden_prompts_config_map},
        namespace::{TestNamespace, with_temp_ns},
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::http_client,
    models::DemoModel,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::{Api, ResourceExt, api::DeleteParams};
use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::faults::pod_target;

/// The claim that all pods of the service may write.
const CLAIM: &str = "responses";
const QUESTION: &str = "What is the capital of Norway?";
const ANSWER: &str = "The capital of Norway is Oslo.";

/// A volume of one folder of the node for [`CLAIM`], as a file server's would be.
async fn shared_volume(namespace: &TestNamespace, folder: &str) -> Result<Api<PersistentVolume>> {
    let volumes: Api<PersistentVolume> = Api::all(namespace.cluster.client.clone());
    let size = json!({"storage": "1Gi"});
    let claimed_by = json!({"namespace": namespace.name, "name": CLAIM});
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace.name},
        "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": folder}, "claimRef": claimed_by}});
    apply(&volumes, &namespace.name, &volume).await?;
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": namespace.name,
            "resources": {"requests": size}}});
    apply::<PersistentVolumeClaim>(&namespace.api(), CLAIM, &claim).await?;
    Ok(volumes)
}

/// The pods of the service, once all have the claim and answer.
async fn pods_with_the_claim(service: &TestService<'_>) -> Result<[Pod; 2]> {
    let has_it = |pod: &Pod| {
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let mut claims = volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref());
        let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let mut ready = conditions.filter(|condition| condition.type_ == "Ready" && condition.status == "True");
        claims.any(|claim| claim.claim_name == CLAIM) && ready.next().is_some()
    };
    poll("two pods to answer that have the claim", ROLLOUT_TIMEOUT, Duration::from_millis(500), async || {
        let pods = service.pods().await?;
        let names: Vec<_> = pods.iter().map(ResourceExt::name_any).collect();
        match <[Pod; 2]>::try_from(pods) {
            Ok(pods) if pods.iter().all(has_it) => Ok(Check::Done(pods)),
            _ => Ok(Check::Wait(format!("{names:?}"))),
        }
    })
    .await
}

/// What a pod answers to a request.
async fn ask(pod: &Pod, method: reqwest::Method, path: &str, body: Option<&Value>) -> Result<(StatusCode, Value)> {
    let request = http_client()?.request(method, format!("{}{path}", pod_target(pod)?.base_url));
    let request = body.into_iter().fold(request, reqwest::RequestBuilder::json);
    let response = request.send().await?;
    Ok((response.status(), response.json().await?))
}

fn said(response: &Value) -> &Value {
    &response["output"][0]["content"][0]["text"]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_response_that_one_pod_made_the_others_find() -> Result<()> {
    with_temp_ns("responses", async |namespace| {
        namespace.cluster.ensure_own()?;
        let folder = tempfile::tempdir()?;
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777))?;
        let path = folder.path().to_str().context("the folder's name is no text")?;
        let volumes = shared_volume(namespace, path).await?;
        let found = ensure_found(namespace).await;
        volumes.delete(&namespace.name, &DeleteParams::default()).await?;
        found
    })
    .await
}

async fn ensure_found(namespace: &TestNamespace) -> Result<()> {
    use reqwest::Method;

    let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
    golden_prompts_config_map(namespace).await?;
    let service = TestService::start(namespace, ServiceFixture::default(), &model).await?;
    service.patch(json!({"spec": {"api": {"responseStore": {"pvc": {"claimName": CLAIM}}}}})).await?;
    let [one, other] = pods_with_the_claim(&service).await?;

    let body = json!({"model": SERVED_NAME, "input": QUESTION, "temperature": 0});
    let (status, made) = ask(&one, Method::POST, "/responses", Some(&body)).await?;
    ensure!(status == StatusCode::OK && said(&made) == ANSWER, "{status}: {made}");
    let id = made["id"].as_str().context("a response has an id")?;
    let address = format!("/responses/{id}");
    let (status, found) = ask(&other, Method::GET, &address, None).await?;
    ensure!(status == StatusCode::OK && found == made, "the other pod has {status}: {found}, and made was {made}");

    // A turn goes on from it in the other pod, also when the one that made it is gone.
    let pods: Api<Pod> = namespace.api();
    pods.delete(&one.name_any(), &DeleteParams::default()).await?;
    let body = json!({"model": SERVED_NAME, "input": QUESTION, "temperature": 0, "previous_response_id": id});
    let (status, next) = ask(&other, Method::POST, "/responses", Some(&body)).await?;
    ensure!(status == StatusCode::OK && next["previous_response_id"] == id, "{status}: {next}");
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap_or_default();
    ensure!(tokens(&next) > tokens(&made) + 10, "what was said before is not in the prompt: {next}");

    let successors = pods_with_the_claim(&service).await?;
    let successor = successors.iter().find(|pod| pod.name_any() != other.name_any()).context("nobody came for it")?;
    let (status, found) = ask(successor, Method::GET, &address, None).await?;
    ensure!(status == StatusCode::OK && found == made, "its successor has {status}: {found}");
    let (status, _) = ask(&other, Method::DELETE, &address, None).await?;
    ensure!(status == StatusCode::OK, "{status}");
    let (status, gone) = ask(successor, Method::GET, &address, None).await?;
    ensure!(status == StatusCode::NOT_FOUND, "one that was deleted is answered with {status}: {gone}");
    say("made in one pod, found in two others, gone on from, and deleted for all");
    Ok(())
}
