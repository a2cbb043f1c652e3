//! A namespace for one test: made under Pod Security `restricted`, removed at the end, explained when the test fails.

use std::{panic::AssertUnwindSafe, sync::OnceLock, time::Duration};

use anyhow::{Context, Result, anyhow};
use futures::FutureExt;
use gantry_crds::InferenceService;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use rand::Rng;
use serde_json::json;

use super::{
    Cluster, OPERATOR_SELECTOR, SYSTEM_NAMESPACE, say,
    wait::{Check, await_object},
};

/// Every namespace of a test starts with this.
pub const PREFIX: &str = "gantry-e2e-";
/// Longest time that the services of a namespace may take to go away.
const DELETE_TIMEOUT: Duration = Duration::from_secs(120);
/// Set it to keep the namespace of a failed test.
const KEEP_VARIABLE: &str = "GANTRY_E2E_KEEP";
/// Lines of a log that are looked through.
const LOG_LINES: &str = "--tail=2000";
/// Most lines that are shown of one output.
const MAX_LINES_SHOWN: usize = 250;

static FIRST_TEST_AT: OnceLock<Timestamp> = OnceLock::new();

/// When the first test of this process began.
#[must_use]
pub fn first_test_at() -> Timestamp {
    *FIRST_TEST_AT.get_or_init(Timestamp::now)
}

/// The namespace of a test.
pub struct TestNamespace {
    /// The cluster it is in.
    pub cluster: Cluster,
    /// Its name.
    pub name: String,
}

impl TestNamespace {
    /// The objects of a kind in it.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.cluster.client.clone(), &self.name)
    }
}

/// Runs `test` in a new namespace. A failure, a panic included, prints the objects, events and logs that explain it.
///
/// # Errors
/// What the test returns.
pub async fn with_temp_ns(name: &str, test: impl AsyncFnOnce(&TestNamespace) -> Result<()>) -> Result<()> {
    let _ = first_test_at();
    let cluster = Cluster::from_env().await?;
    let name = format!("{PREFIX}{name}-{:04x}", rand::rng().random::<u16>());
    create(&cluster, &name).await?;
    let namespace = TestNamespace { cluster, name };
    say(format_args!("=== {}", namespace.name));
    let result = AssertUnwindSafe(test(&namespace)).catch_unwind().await.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        Err(anyhow!("the test panicked: {}", text.unwrap_or("with no message")))
    });
    match &result {
        Ok(()) => say(format_args!("=== {}: ok", namespace.name)),
        Err(error) => {
            say(format_args!("=== {}: FAILED: {error:#}", namespace.name));
            explain(&namespace).await;
        }
    }
    if result.is_err() && std::env::var_os(KEEP_VARIABLE).is_some() {
        say(format_args!("{} is kept, as {KEEP_VARIABLE} is set", namespace.name));
        return result;
    }
    let removed = remove(&namespace.cluster, &namespace.name).await;
    result.and(removed.with_context(|| format!("the namespace {} could not be removed", namespace.name)))
}

async fn create(cluster: &Cluster, name: &str) -> Result<()> {
    let namespace: Namespace = serde_json::from_value(json!({"metadata": {"name": name, "labels": {
        "pod-security.kubernetes.io/enforce": "restricted",
        "gantry.dev/e2e": "true",
    }}}))?;
    Api::all(cluster.client.clone()).create(&PostParams::default(), &namespace).await?;
    Ok(())
}

/// Deletes the services first, so that their pods go with them and not with the namespace. A namespace that the test
/// itself removed is no error.
async fn remove(cluster: &Cluster, name: &str) -> Result<()> {
    let services: Api<InferenceService> = Api::namespaced(cluster.client.clone(), name);
    for service in services.list(&ListParams::default()).await? {
        services.delete(&service.name_any(), &DeleteParams::default()).await?;
        await_object(&services, &service.name_any(), "the InferenceService is gone", DELETE_TIMEOUT, |service| {
            match service {
                None => Check::Done(()),
                Some(service) => Check::Wait(format!("finalizers {:?}", service.finalizers())),
            }
        })
        .await?;
    }
    match Api::<Namespace>::all(cluster.client.clone()).delete(name, &DeleteParams::background()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        deleted => Ok(deleted.map(drop)?),
    }
}

/// Prints what one needs to find out why a test failed.
async fn explain(namespace: &TestNamespace) {
    let (cluster, name) = (&namespace.cluster, namespace.name.as_str());
    let everything = |_: &str| true;
    for arguments in [
        &["get", "infs,mv,pods,deployments,services", "-n", name, "-o", "wide"][..],
        &["get", "infs,mv", "-n", name, "-o", "yaml", "--show-managed-fields=false"],
        &["describe", "pods", "-n", name],
        &["get", "events", "-n", name, "--sort-by=.metadata.creationTimestamp"],
    ] {
        show(cluster, arguments, everything).await;
    }
    // One operator serves every namespace: what it says of this one, and whatever troubles it.
    let concerns = |line: &str| line.contains(name) || line.contains("ERROR") || line.contains("WARN");
    let operator = ["logs", "-n", SYSTEM_NAMESPACE, "-l", OPERATOR_SELECTOR, LOG_LINES, "--timestamps"];
    show(cluster, &operator, concerns).await;
    // Under load nearly every line of a server is about a request that did well.
    let remarkable = |line: &str| !line.contains(r#""outcome":"ok""#);
    let pods: Api<Pod> = namespace.api();
    for pod in pods.list(&ListParams::default()).await.map(|pods| pods.items).unwrap_or_default() {
        let pod_name = pod.name_any();
        let logs = ["logs", "-n", name, &pod_name, "--all-containers", "--timestamps", LOG_LINES];
        show(cluster, &logs, remarkable).await;
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        if statuses.map(|status| status.restart_count).sum::<i32>() > 0 {
            let before = ["logs", "-n", name, &pod_name, "--all-containers", "--previous", LOG_LINES];
            show(cluster, &before, remarkable).await;
        }
    }
}

/// Prints the lines of kubectl's output that are `wanted`; of many, the last.
async fn show(cluster: &Cluster, arguments: &[&str], wanted: impl Fn(&str) -> bool) {
    let text = cluster.kubectl(arguments).await.unwrap_or_else(|error| format!("{error:#}"));
    let lines: Vec<&str> = text.lines().filter(|line| wanted(line)).collect();
    let last = &lines[lines.len().saturating_sub(MAX_LINES_SHOWN)..];
    say(format_args!("--- kubectl {}\n{}\n", arguments.join(" "), last.join("\n")));
}
