//! What tests put on the cluster: a model store that all share, golden prompts, a client pod, and InferenceServices.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use gantry_crds::{
    InferenceService, InferenceServiceSpec,
    inference_service::{
        ApiSpec, GatesSpec, ModelSpec, PromptsGate, ResourcesSpec, RollbackSpec, RolloutSpec, RuntimeSpec, SourceSpec,
        SpeculativeSpec,
    },
    revision::version_name,
    scalars::{AutoOr, DurationString, Percent, PositiveQuantity, Sha256},
};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Service};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::{
    Cluster, e2e_image,
    namespace::TestNamespace,
    say,
    wait::{Check, await_object, poll},
};
use crate::{
    faults::Fault,
    load::{http_client, http_client_builder},
    models::{DemoModel, golden_prompts, sha256_hex},
};

/// Namespace of the model store, which outlives the tests.
const STORE_NAMESPACE: &str = "gantry-e2e-store";
const STORE: &str = "model-store";
const STORE_PORT: u16 = 8080;
/// Longest time in which a pod of the fixtures must be ready.
const POD_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the store is asked whether it can be reached.
const STORE_PERIOD: Duration = Duration::from_millis(100);
/// Name of the ConfigMap with golden prompts.
pub const PROMPTS: &str = "golden-prompts";
/// Golden prompts in it.
pub const PROMPT_COUNT: usize = 20;
/// Name under which the services of tests serve their model.
pub const SERVED_NAME: &str = "chat";
/// Field manager of the tests.
pub const FIELD_MANAGER: &str = "gantry-e2e";

/// Applies any object of a known kind.
///
/// # Errors
/// When the API server refuses it.
pub async fn apply<K>(api: &Api<K>, name: &str, object: &Value) -> Result<K>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let params = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(name, &params, &Patch::Apply(object)).await.with_context(|| format!("{name} could not be applied"))
}

/// A pod as namespaces that enforce the standard "restricted" admit it: the e2e image with these arguments, ready once `/healthz`
/// of its port answers.
#[must_use]
pub fn restricted_pod(name: &str, arguments: &[&str]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": name}},
        "spec": {
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "e2e", "image": e2e_image(), "imagePullPolicy": "IfNotPresent", "args": arguments,
                "ports": [{"name": "http", "containerPort": STORE_PORT}],
                "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1},
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "512Mi"}},
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}}
            }]
        }
    })
}

/// Waits until `pod` is ready.
///
/// # Errors
/// When it is not within a minute.
pub async fn await_pod_ready(pods: &Api<Pod>, pod: &str) -> Result<Pod> {
    await_object(pods, pod, &format!("the pod {pod} is ready"), POD_TIMEOUT, |pod| match pod {
        Some(pod) if is_ready(pod) => Check::Done(pod.clone()),
        Some(pod) => {
            Check::Wait(format!("{:?}", pod.status.as_ref().map(|status| (&status.phase, &status.container_statuses))))
        }
        None => Check::Wait("it does not exist".to_owned()),
    })
    .await
}

/// Whether a pod is ready and stays.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    pod.metadata.deletion_timestamp.is_none()
        && conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The store of demo models, right ones and damaged ones.
#[derive(Debug, Clone)]
pub struct ModelStore {
    address: String,
}

impl ModelStore {
    /// The store on `cluster`; the first call makes sure that it is there and of the current image.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn on(cluster: &Cluster) -> Result<Self> {
        // One process runs many tests; a runtime of its own for each does not matter to what is kept here.
        static STORE_ADDRESS: OnceCell<String> = OnceCell::const_new();
        let address = STORE_ADDRESS.get_or_try_init(|| ensure_store(cluster)).await?;
        Ok(Self { address: address.clone() })
    }

    /// Address of `path` for pods.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{STORE}.{STORE_NAMESPACE}.svc:{STORE_PORT}/{path}")
    }

    /// A right model.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn model(&self, model: DemoModel) -> Result<ModelSource> {
        Ok(ModelSource {
            path: model.file().to_owned(),
            uri: self.url(model.file()),
            sha256: sha256_hex(&model.bytes()?),
        })
    }

    /// A right model whose address is another one of the store, such as one of the slow ones.
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn model_at(&self, model: DemoModel, prefix: &str) -> Result<ModelSource> {
        let path = format!("{prefix}/{}", model.file());
        Ok(ModelSource { uri: self.url(&path), path, ..self.model(model)? })
    }

    /// A damaged model, with the digest of the damaged file.
    ///
    /// # Errors
    /// When its file cannot be read or damaged.
    pub fn damaged(&self, model: DemoModel, fault: &Fault) -> Result<ModelSource> {
        let path = fault.store_path(model.file());
        Ok(ModelSource { uri: self.url(&path), path, sha256: sha256_hex(&fault.apply(model.bytes()?)?) })
    }

    /// A right model at whose address `other` is, or nothing if there is no such file, until it is [mended](Self::mend).
    ///
    /// # Errors
    /// When its file cannot be read.
    pub fn model_instead_of(&self, model: DemoModel, other: &str) -> Result<ModelSource> {
        self.model_at(model, &format!("fault/until-mended/{other}"))
    }

    /// Puts the right file at the address of [`model_instead_of`](Self::model_instead_of).
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn mend(&self, model: &ModelSource) -> Result<()> {
        let address = format!("{}/{}", self.address, model.path);
        http_client()?.post(address).send().await?.error_for_status()?;
        Ok(())
    }

    /// How often the address of `model` was asked for.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn requests_of(&self, model: &ModelSource) -> Result<u64> {
        let counts = counted_requests(&http_client()?, &self.address).await?;
        Ok(counts.get(&format!("/{}", model.path)).copied().unwrap_or_default())
    }
}

/// How often each address of the store was asked for, as it counts them.
async fn counted_requests(client: &reqwest::Client, address: &str) -> Result<BTreeMap<String, u64>> {
    let response = client.get(format!("{address}/requests")).send().await?.error_for_status()?;
    Ok(serde_json::from_slice(&response.bytes().await?)?)
}

async fn ensure_store(cluster: &Cluster) -> Result<String> {
    let client = cluster.client.clone();
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": STORE_NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    apply::<Namespace>(&Api::all(client.clone()), STORE_NAMESPACE, &namespace).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), STORE_NAMESPACE);
    // The name follows the image, so that a pod of an older image is never taken for the store.
    let name = format!("{STORE}-{}", &sha256_hex(e2e_image().as_bytes())[..8]);
    for other in pods.list(&Default::default()).await?.iter().filter(|pod| pod.name_any() != name) {
        pods.delete(&other.name_any(), &DeleteParams::default()).await?;
    }
    let mut pod = restricted_pod(&name, &["serve-files"]);
    pod["metadata"]["labels"] = json!({"app.kubernetes.io/name": STORE});
    apply(&pods, &name, &pod).await?;
    let services: Api<Service> = Api::namespaced(client, STORE_NAMESPACE);
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": STORE}, "spec": {
        "selector": {"app.kubernetes.io/name": STORE},
        "ports": [{"name": "http", "port": STORE_PORT, "targetPort": "http"}]}});
    let service = apply(&services, STORE, &service).await?;
    await_pod_ready(&pods, &name).await?;
    let address = cluster_ip(&service).context("the model store has no ClusterIP")?;
    let address = format!("http://{address}:{STORE_PORT}");
    // Before kube-proxy knows the address, a connection leads out of the machine, and a pod takes for the store's answer
    // what somebody says there. Each look is a connection of its own, and only the store counts requests.
    let client = http_client_builder().pool_max_idle_per_host(0).build()?;
    poll("the model store answers by its Service", POD_TIMEOUT, STORE_PERIOD, async || {
        counted_requests(&client, &address).await.map(|_| Check::Done(()))
    })
    .await?;
    say(format_args!("the model store answers at {address}"));
    Ok(address)
}

/// Address of a Service, which kube-proxy makes reachable from the node too.
#[must_use]
pub fn cluster_ip(service: &Service) -> Option<&str> {
    service.spec.as_ref()?.cluster_ip.as_deref().filter(|address| *address != "None")
}

/// A pod of the e2e image that only waits for commands.
///
/// # Errors
/// When it does not become ready.
pub async fn client_pod(namespace: &TestNamespace) -> Result<Api<Pod>> {
    let pods: Api<Pod> = namespace.api();
    apply(&pods, CLIENT_POD, &restricted_pod(CLIENT_POD, &["serve-files"])).await?;
    await_pod_ready(&pods, CLIENT_POD).await?;
    Ok(pods)
}

/// Name of the pod of [`client_pod`].
pub const CLIENT_POD: &str = "client";

/// Puts golden prompts that V1 and V2 answer, and V3-bad does not, into the ConfigMap [`PROMPTS`].
///
/// # Errors
/// When the API server refuses it.
pub async fn golden_prompts_config_map(namespace: &TestNamespace) -> Result<()> {
    let config_map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PROMPTS},
        "data": {"prompts.jsonl": golden_prompts(PROMPT_COUNT)?}});
    apply::<ConfigMap>(&namespace.api(), PROMPTS, &config_map).await?;
    Ok(())
}

/// A file that a service can be pointed at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSource {
    /// Path in the store.
    pub path: String,
    /// Address for pods.
    pub uri: String,
    /// Digest that is asked for.
    pub sha256: String,
}

impl ModelSource {
    /// The same address with a digest that is not the file's.
    #[must_use]
    pub fn with_wrong_digest(self) -> Self {
        Self { sha256: sha256_hex(b"another file"), ..self }
    }

    /// As in `spec.model`.
    #[must_use]
    pub fn spec(&self) -> ModelSpec {
        ModelSpec { served_name: SERVED_NAME.to_owned(), source: self.source() }
    }

    /// As in `spec.model.source`.
    #[must_use]
    pub fn source(&self) -> SourceSpec {
        SourceSpec { uri: Some(self.uri.clone()), sha256: Some(Sha256(self.sha256.clone())), ..SourceSpec::default() }
    }
}

/// An InferenceService for tests: small, quick to bake, on the CPU.
#[derive(Debug, Clone)]
pub struct ServiceFixture {
    /// Its name.
    pub name: &'static str,
    /// Pods.
    pub replicas: i32,
    /// Golden prompts that must be answered, in percent; `None` asks for no prompts gate.
    pub min_pass: Option<&'static str>,
    /// `spec.rollout.rollback.bake`.
    pub bake: &'static str,
    /// `spec.rollout.progressDeadline`.
    pub progress_deadline: &'static str,
    /// Sequences of a pod.
    pub parallel: u32,
    /// Tokens of each sequence.
    pub sequence_tokens: u32,
    /// What guesses for its models.
    pub draft: Option<ModelSource>,
    /// Whom it answers.
    pub api: ApiSpec,
}

impl Default for ServiceFixture {
    fn default() -> Self {
        Self {
            name: "chat",
            replicas: 2,
            min_pass: Some("95%"),
            bake: "2s",
            progress_deadline: "3m",
            parallel: 16,
            sequence_tokens: 512,
            draft: None,
            api: ApiSpec::default(),
        }
    }
}

impl ServiceFixture {
    /// The settings that its models are loaded with.
    #[must_use]
    pub fn runtime(&self) -> RuntimeSpec {
        RuntimeSpec {
            context_size: self.parallel * self.sequence_tokens,
            parallel: self.parallel,
            threads: AutoOr::Value(1),
            speculative: self.draft.as_ref().map(|draft| SpeculativeSpec {
                draft: Some(draft.source()),
                prompt_lookup: false,
                max_tokens: 4,
            }),
            ..RuntimeSpec::default()
        }
    }

    /// Name of the ModelVersion that the operator stamps for `model`.
    #[must_use]
    pub fn version(&self, model: &ModelSource) -> String {
        version_name(self.name, &model.spec(), &self.runtime())
    }

    /// The object.
    #[must_use]
    pub fn build(&self, model: &ModelSource) -> InferenceService {
        let prompts = self.min_pass.map(|min_pass| PromptsGate {
            config_map_ref: gantry_crds::inference_service::LocalName { name: PROMPTS.to_owned() },
            min_pass: Percent::from(min_pass),
        });
        let spec = InferenceServiceSpec {
            replicas: self.replicas,
            model: model.spec(),
            runtime: self.runtime(),
            resources: ResourcesSpec {
                gpu: None,
                cpu: Some(PositiveQuantity::from("100m")),
                memory: Some(PositiveQuantity::from("768Mi")),
            },
            cache: Default::default(),
            scheduling: Default::default(),
            api: self.api.clone(),
            pod: Default::default(),
            rollout: RolloutSpec {
                drain_timeout: DurationString::from("30s"),
                progress_deadline: DurationString::from(self.progress_deadline),
                gates: GatesSpec { prompts, ..GatesSpec::default() },
                rollback: RollbackSpec { bake: DurationString::from(self.bake), ..RollbackSpec::default() },
                ..RolloutSpec::default()
            },
            revision_history_limit: 20,
            unknown: Vec::new(),
        };
        InferenceService::new(self.name, spec)
    }
}
