//! Objects that belong to a service and are not as the operator made them: gone, made anew, or somebody else's.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, ServiceFixture, apply, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    models::{DemoModel, Question, Since, questions},
};
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use kube::{Api, api::DeleteParams};
use serde_json::json;

/// Longest time until the operator sees that somebody else's object is gone, which no watch tells: it looks every two minutes.
const NOTICED: Duration = Duration::from_secs(150);

/// Its tokens are of no use any more, whoever has its name: the pods are replaced one after the other, and hear of the next model.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn pods_whose_account_was_deleted_are_replaced_and_lose_no_request() -> Result<()> {
    with_temp_ns("account", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let uids = async || -> Result<BTreeSet<Option<String>>> {
            Ok(service.pods().await?.into_iter().map(|pod| pod.metadata.uid).collect())
        };
        let before = uids().await?;
        let asked: Vec<Question> =
            questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
        let load = service.load(1, asked, None).await?;

        let accounts: Api<ServiceAccount> = namespace.api();
        let account = format!("{}-gantry", service.fixture.name);
        accounts.delete(&account, &DeleteParams::default()).await?;
        poll("other pods answer", ROLLOUT_TIMEOUT, Duration::from_secs(1), async || {
            let now = uids().await?;
            Ok(Check::when(now.is_disjoint(&before) && now.len() == before.len(), || format!("{now:?}")))
        })
        .await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        service.set_model(&v2).await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await.map(drop)
    })
    .await
}

/// Nothing of it is taken over, the service is not called ready while requests to its name go elsewhere, and it is once they do not.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_service_of_somebody_elses_is_told_and_left_alone() -> Result<()> {
    with_temp_ns("taken", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture::default();
        let services: Api<Service> = namespace.api();
        let name = fixture.name;
        let foreign = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
            "spec": {"selector": {"app": "other"}, "ports": [{"port": 80}]}});
        apply::<Service>(&services, name, &foreign).await?;
        let service = TestService::create(namespace, fixture, &v1).await?;
        let told = service
            .await_status("Ready says that the name is taken", ROLLOUT_TIMEOUT, |_, status| {
                let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready")?;
                (ready.reason == "NameTaken" && ready.status == "False").then(|| ready.message.clone())
            })
            .await?;
        say(format_args!("NameTaken: {told}"));
        ensure!(told.contains(name) && told.contains("Service"), "{told}");
        let events = namespace.cluster.kubectl(&["get", "events", "-n", &namespace.name]).await?;
        ensure!(events.contains("NameTaken"), "no Event tells of it: {events}");
        let selector = services.get(name).await?.spec.and_then(|spec| spec.selector).unwrap_or_default();
        ensure!(
            selector.get("app").is_some_and(|app| app == "other"),
            "somebody else's Service was changed: {selector:?}"
        );

        services.delete(name, &DeleteParams::default()).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT + NOTICED).await.map(drop)
    })
    .await
}
