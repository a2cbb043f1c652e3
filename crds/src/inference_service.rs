//! What a user writes: the spec of an InferenceService.
//!
//! The whole shape of Gantry's API stands here, fields of strategies, gates and sources that this release does not
//! carry out included: those are refused when an object is written, with what to use instead. An object of before is
//! answered with the condition `Supported=False`, reason `NotSupported`, and an Event, and nothing is changed: no object is
//! silently half obeyed.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    pod::store_variables,
    scalars::{DurationString, Percent, PositiveQuantity, Ratio, Sha256},
    status::InferenceServiceStatus,
};

pub use crate::api::ApiSpec;
pub use crate::pod::PodSpec;
pub use crate::runtime::{
    CacheType, EmbeddingsSpec, GpuSplitSpec, KvLayout, PoolingKind, PrefixCacheSpec, RuntimeSpec, SpeculativeSpec,
    SplitMode,
};

/// A model that is served by a number of pods, and how it may change.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "gantry.dev",
    version = "v1alpha1",
    kind = "InferenceService",
    plural = "inferenceservices",
    shortname = "infs",
    category = "gantry",
    namespaced,
    derive = "PartialEq",
    doc = "InferenceService serves one model behind an OpenAI-compatible endpoint. A change of its model becomes a validated, reversible rollout inside the running pods.",
    status = "InferenceServiceStatus",
    validation = Rule::new("self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("metadata.name: use at most 40 lower-case letters, digits and dashes, starting with a letter: Services and pods are named after it"),
    validation = Rule::new("!has(self.spec.runtime) || !has(self.spec.runtime.gpuMemory) || (has(self.spec.resources) && has(self.spec.resources.gpu))").message("spec.runtime.gpuMemory: it is a limit for a pod with GPUs, so ask for some (spec.resources.gpu), or leave it out"),
    validation = Rule::new("!has(self.spec.runtime) || !has(self.spec.runtime.prefixCache) || !has(self.spec.runtime.prefixCache.disk) || (has(self.spec.cache) && has(self.spec.cache.sizeLimit))").message("spec.runtime.prefixCache.disk: it is a part of spec.cache.sizeLimit, so give that as well"),
    validation = Rule::new("!has(self.spec.runtime) || !has(self.spec.runtime.prefixCache) || !has(self.spec.runtime.prefixCache.disk) || !has(self.spec.cache) || !has(self.spec.cache.sizeLimit) || !isQuantity(self.spec.runtime.prefixCache.disk) || !isQuantity(self.spec.cache.sizeLimit) || quantity(self.spec.runtime.prefixCache.disk).isLessThan(quantity(self.spec.cache.sizeLimit))").message("spec.runtime.prefixCache.disk: it is a part of spec.cache.sizeLimit, whose rest is for models, so give less"),
    validation = Rule::new(format!("!has(self.spec.pod) || !has(self.spec.pod.env) || !has(self.spec.api) || !has(self.spec.api.responseStore) || !has(self.spec.api.responseStore.s3) || self.spec.pod.env.all(variable, !(variable.name in [{}]))", store_variables())).message("spec.pod.env: AWS_ENDPOINT, AWS_ALLOW_HTTP, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN come from spec.api.responseStore.s3: leave them out, and use its endpoint, region and secretRef"),
    validation = Rule::new("!has(self.spec.model.source.pvc) || (has(self.spec.pod) && has(self.spec.pod.modelVolumes) && self.spec.pod.modelVolumes.exists(volume, volume.claimName == self.spec.model.source.pvc.claimName))").message("spec.model.source.pvc.claimName: name the claim in spec.pod.modelVolumes as well, so that pods have it mounted"),
    validation = Rule::new("!has(self.spec.runtime) || !has(self.spec.runtime.speculative) || !has(self.spec.runtime.speculative.draft) || !has(self.spec.runtime.speculative.draft.pvc) || (has(self.spec.pod) && has(self.spec.pod.modelVolumes) && self.spec.pod.modelVolumes.exists(volume, volume.claimName == self.spec.runtime.speculative.draft.pvc.claimName))").message("spec.runtime.speculative.draft.pvc.claimName: name the claim in spec.pod.modelVolumes as well, so that pods have it mounted"),
    scale(spec_replicas_path = ".spec.replicas", status_replicas_path = ".status.replicaCount", label_selector_path = ".status.selector"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status", description = "It answers, with what the spec asks for"),
    printcolumn(name = "Available", type_ = "string", json_path = ".status.conditions[?(@.type==\"Available\")].status", description = "It answers"),
    printcolumn(name = "Active", type_ = "string", json_path = ".status.activeVersion", description = "ModelVersion that answers requests"),
    printcolumn(name = "Candidate", type_ = "string", json_path = ".status.candidateVersion", description = "ModelVersion that is being validated"),
    printcolumn(name = "Step", type_ = "string", json_path = ".status.rollout.step", description = "Step of the rollout"),
    printcolumn(name = "Share", type_ = "string", priority = 1, json_path = ".status.rollout.canary.share", description = "Share of the requests that go to the candidate"),
    printcolumn(name = "Memory", type_ = "string", json_path = ".status.memory", description = "Measured memory of the largest pod, and what is available to it"),
    printcolumn(name = "Replicas", type_ = "string", json_path = ".status.replicaSummary", description = "Ready pods of the pods asked for"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", description = "Why, in a word"),
    printcolumn(name = "Message", type_ = "string", priority = 1, json_path = ".status.conditions[?(@.type==\"Ready\")].message", description = "The same in a sentence, with what to do"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceSpec {
    /// Number of pods. Leave it out of what you apply when an autoscaler owns it: it starts with 1, and goes back to 1 when
    /// you take a number out that the autoscaler has not changed. Scale this object, not its Deployment.
    #[serde(default = "default_replicas")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 256").message("spec.replicas: use a number from 0 to 256"))]
    pub replicas: i32,
    /// The model to serve.
    pub model: ModelSpec,
    /// How the engine runs it. A change needs a reload and is therefore rolled out like a new model.
    #[serde(default)]
    pub runtime: RuntimeSpec,
    /// What each pod gets of its node. A change restarts the pods.
    #[serde(default)]
    pub resources: ResourcesSpec,
    /// Where downloaded models are kept.
    #[serde(default)]
    pub cache: CacheSpec,
    /// How requests wait and are spread. A change holds at once, for requests that come after it.
    #[serde(default)]
    pub scheduling: SchedulingSpec,
    /// Whom it answers, and by which names. A change replaces the pods one after the other.
    #[serde(default)]
    pub api: ApiSpec,
    /// Where pods run, and what they are and have beside the server's own. A change replaces the pods one after the other.
    #[serde(default)]
    pub pod: PodSpec,
    /// How a change of model is validated, switched and taken back.
    #[serde(default)]
    pub rollout: RolloutSpec,
    /// How many superseded ModelVersions are kept, to be looked at and rolled back to.
    #[serde(default = "default_revision_history_limit")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 50").message("spec.revisionHistoryLimit: use a number from 0 to 50"))]
    pub revision_history_limit: i32,
    /// What an object asks of its version and gates that this release does not know, as paths below `spec`, where whoever reads
    /// the object looks for it.
    #[serde(skip_deserializing, skip_serializing_if = "Vec::is_empty")]
    #[schemars(skip)]
    pub unknown: Vec<String>,
}

/// As a Deployment has it: the scale subresource reads an absent number as 0, which switches a HorizontalPodAutoscaler off.
fn default_replicas() -> i32 {
    1
}

fn default_revision_history_limit() -> i32 {
    5
}

/// Which model, and under which name clients ask for it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// Name of the model in the OpenAI API (`model` of a request, `id` in /v1/models).
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9]([-A-Za-z0-9._/:]{0,126}[A-Za-z0-9])?$')").message("spec.model.servedName: use 1 to 128 letters, digits and -._/:, starting and ending with a letter or digit"))]
    #[schemars(length(max = 128))]
    pub served_name: String,
    /// Where its GGUF file comes from.
    pub source: SourceSpec,
}

/// Where a GGUF file comes from: exactly one of `uri` and `pvc`.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.uri) != has(self.pvc)").message("give exactly one of uri and pvc"),
    validation = Rule::new("!has(self.uri) || self.uri.matches('^(https?|hf|s3|oci)://')").message("source: this release fetches from https://, http://, hf://, s3:// and oci://; put the file behind one of them, or on a volume (pvc), and give its sha256"),
    validation = Rule::new("has(self.sha256) || (has(self.uri) && (self.uri.matches('^hf://[^/@?#]+/[^/@?#]+@[0-9a-f]{40}/') || self.uri.matches('^oci://.*@sha256:[0-9a-f]{64}$')))").message("sha256: give the file's SHA-256 (sha256sum FILE), so that nothing else can be served in its place; an address that changes is no name of a file. It may be left out where hf:// has a commit as revision (40 digits), or oci:// the digest of a manifest (@sha256:...)"),
    validation = Rule::new("!has(self.ca) || (has(self.uri) && !self.uri.startsWith('http://') && (!has(self.endpoint) || self.endpoint.startsWith('https://')))").message("ca: it is for what is asked over https://; leave it out"),
    validation = Rule::new("!has(self.uri) || !self.uri.startsWith('hf://') || self.uri.matches('^hf://[^/@?#]+/[^/@?#]+(@[^/@?#]+)?/[^?#]+$')").message("uri: use hf://owner/repository@revision/path/model.gguf; the revision, a commit best, may be left out"),
    validation = Rule::new("!has(self.uri) || !self.uri.startsWith('s3://') || self.uri.matches('^s3://[-A-Za-z0-9._]+/[^?#]+$')").message("uri: use s3://bucket/path/model.gguf"),
    validation = Rule::new("!has(self.uri) || !self.uri.startsWith('oci://') || self.uri.matches('^oci://[-A-Za-z0-9.]+(:[0-9]+)?/[a-z0-9][-a-z0-9._/]*(:[A-Za-z0-9_][-A-Za-z0-9_.]*)?(@sha256:[0-9a-f]{64})?$')").message("uri: use oci://registry/repository:tag; the tag may be left out, the file is known by its sha256"),
    validation = Rule::new("!has(self.endpoint) || (has(self.uri) && self.uri.matches('^(hf|s3|oci)://'))").message("endpoint: it is for hf://, s3:// and oci://; leave it out"),
    validation = Rule::new("!has(self.region) || (has(self.uri) && self.uri.startsWith('s3://'))").message("region: it is for s3://; leave it out")
)]
pub struct SourceSpec {
    /// Address of the file: https:// or http://, `hf://owner/repository@revision/path`, `s3://bucket/path` or
    /// `oci://registry/repository:tag`, in which the sha256 is that of the layer that is the file; without one the address ends in the
    /// digest of the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    #[x_kube(
        validation = Rule::new("self.matches('^(https?|hf|s3|gs|azure|oci|file)://[^[:space:]]+$')").message("uri: use an address that starts with https://, http://, hf://, s3:// or oci://, without spaces"),
        validation = Rule::new("!self.matches('^[a-z0-9]+://[/\\\\\\\\]*[^/\\\\\\\\?#]*@')").message("uri: leave user and password out, which everybody sees who may read the object; store a token in a Secret, and name it with secretRef"),
        validation = Rule::new("!self.matches('(?i)^[^?#]*[?]([^#]*[?&;])?([^#=&;?]*(signature|credential|credentials|token|secret|password|passwd|pwd|passphrase|bearer|authorization|apikey|accesskey|accesskeyid|secretkey|privatekey|signingkey|subscriptionkey)|([^#=&;?]*[-_.])?(sig|sas|key|jwt|auth)|pass|pw|code)=')").message("uri: leave signatures and tokens out, which everybody sees who may read the object; store a token in a Secret, and name it with secretRef"),
        validation = Rule::new("!self.matches('^[^?#]*[?]([^#]*[?&;])?[^#=&;?]*%[^#=&;?]*=')").message("uri: write the names of parameters as they are, and not percent-encoded: signatures and tokens are looked for among them"),
        validation = Rule::new("!self.contains('#')").message("uri: leave out what begins with #, which no server is sent and everybody sees who may read the object; store a token in a Secret, and name it with secretRef")
    )]
    pub uri: Option<String>,
    /// A file on a PersistentVolumeClaim of the same namespace, which spec.pod.modelVolumes names as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
    /// SHA-256 of the file. A file with another digest is never loaded. It may be left out where the address always means the same
    /// file, and its store tells the digest: hf:// with a commit as revision, oci:// with the digest of a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Sha256>,
    /// Secret of the same namespace with what the source is told of who asks: a token (key `token`), for s3:// a key
    /// (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, where it has one, `AWS_SESSION_TOKEN`), for oci:// a login (`username` and
    /// `password`, or a Secret of the type kubernetes.io/dockerconfigjson). It is used for the hosts that the Secret's annotation
    /// gantry.dev/hosts names, and sent over https:// alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<LocalName>,
    /// Further authorities by which the certificate of an https:// host may be signed, as one of a company's own is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaSource>,
    /// Asked instead of what hf://, s3:// or oci:// means by itself: a mirror of Hugging Face, a store that speaks S3, another name
    /// of a registry. `https://host:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^https?://[^/@?#[:space:]]+(/[^@?#[:space:]]*)?$')").message("endpoint: use an address like https://host:port, without user, password and query"))]
    pub endpoint: Option<String>,
    /// Where the bucket of s3:// is; us-east-1 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("region: use a name like eu-central-1"))]
    pub region: Option<String>,
}

/// Certificates of authorities.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CaSource {
    /// ConfigMap of the same namespace with their certificates as PEM (key `ca.crt`).
    // No Secret: certificates are public, and one of the type kubernetes.io/tls has a private key beside them, which no agent
    // should have a right to read.
    pub config_map_ref: LocalName,
}

/// A file on a PersistentVolumeClaim.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PvcSource {
    /// Name of the claim.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')").message("pvc.claimName: use lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit, as kubectl get pvc shows it"))]
    pub claim_name: String,
    /// Path of the file on the volume, relative to its root.
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new("self.size() > 0 && !self.startsWith('/') && !('/' + self + '/').contains('/../')").message("pvc.path: use a relative path without .."))]
    pub path: String,
}

/// Name of an object in the same namespace.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LocalName {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')").message("name: use lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit, as kubectl get shows the object's name"))]
    pub name: String,
}

/// What names of objects are made of.
pub const OBJECT_NAME_RULE: &str =
    "lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit";

/// Whether an object may have this name: a DNS subdomain, as the rules of the CRD have it.
#[must_use]
pub fn is_object_name(name: &str) -> bool {
    let ends = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let label = |label: &str| {
        let bytes = label.as_bytes();
        ends(bytes.first()) && ends(bytes.last()) && bytes.iter().all(|byte| *byte == b'-' || ends(Some(byte)))
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// What each pod gets of its node.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourcesSpec {
    /// GPUs of each pod; leave it out to serve on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSpec>,
    /// CPUs requested by each pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<PositiveQuantity>,
    /// Memory of each pod, request and limit, 64Mi or more. The memory gate measures a new model against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("!isQuantity(self) || quantity(self).compareTo(quantity('64Mi')) >= 0").message("spec.resources.memory: give 64Mi or more, with a unit (1024 alone is 1024 bytes; 24Gi is usual): no pod serves with less"))]
    pub memory: Option<PositiveQuantity>,
}

/// GPUs of a pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// Extended resource under which the device plugin offers them.
    #[serde(default = "default_gpu_resource")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9.-]+/[A-Za-z0-9._-]+$')").message("spec.resources.gpu.resourceName: use the name of an extended resource, such as nvidia.com/gpu"))]
    pub resource_name: String,
    /// Number of GPUs.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 16").message("spec.resources.gpu.count: use a number from 1 to 16, or leave gpu out to serve on CPUs"))]
    pub count: u32,
}

fn default_gpu_resource() -> String {
    "nvidia.com/gpu".to_owned()
}

/// Where downloaded models are kept.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheSpec {
    /// Who shares the files.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == 'None'").message("spec.cache.mode: this release carries out None"))]
    pub mode: CacheMode,
    /// Most bytes that the cache of a pod may take, of its node's disk; the least recently used models go first. If left out,
    /// as much as spec.resources.memory and 40Gi for each GPU, or 20Gi without these: the models that are loaded fit into
    /// that. A change restarts the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<PositiveQuantity>,
}

/// Bytes of a pod's cache for each of its GPUs, where spec.cache.sizeLimit does not say.
pub const CACHE_BYTES_PER_GPU: u64 = 40 << 30;
/// Bytes of a pod's cache where neither spec.cache.sizeLimit nor spec.resources says anything of it.
pub const CACHE_BYTES_DEFAULT: u64 = 20 << 30;

/// Bytes that the cache of a pod may take. What is not said follows from what a pod can have loaded: models that fit into
/// its memory, the version that answers and the one beside it, fit into a cache of the same size. It does not follow from the
/// models themselves: pods are not restarted for another model.
#[must_use]
pub fn cache_bytes(limit: Option<&PositiveQuantity>, memory: Option<&PositiveQuantity>, gpus: u32) -> u64 {
    let of_gpus = CACHE_BYTES_PER_GPU * u64::from(gpus);
    let loaded = memory.and_then(PositiveQuantity::bytes).unwrap_or(0).saturating_add(of_gpus);
    let default = if loaded == 0 { CACHE_BYTES_DEFAULT } else { loaded };
    limit.and_then(PositiveQuantity::bytes).unwrap_or(default)
}

/// Who shares downloaded models.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum CacheMode {
    /// Each pod has its own, which lasts as long as the pod.
    #[default]
    None,
    /// The pods of a node share one. Not supported yet.
    Node,
    /// A PersistentVolumeClaim. Not supported yet.
    #[serde(rename = "PVC")]
    Pvc,
    /// The model is an image volume. Not supported yet.
    ImageVolume,
}

/// How requests wait and are spread.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.highWatermark) || self.highWatermark <= self.maxQueue").message("spec.scheduling.highWatermark: it may not be above maxQueue"),
    validation = Rule::new("!has(self.lowWatermark) || self.lowWatermark < (has(self.highWatermark) ? self.highWatermark : self.maxQueue)").message("spec.scheduling.lowWatermark: it must be below highWatermark, or below maxQueue where there is none")
)]
pub struct SchedulingSpec {
    /// Requests that may wait in a pod; the next is refused with 429 and a Retry-After.
    #[serde(default = "default_max_queue")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 16384").message("spec.scheduling.maxQueue: use a number from 1 to 16384"))]
    pub max_queue: u32,
    /// With more requests waiting than this, further ones are refused until no more than lowWatermark wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_watermark: Option<u32>,
    /// See highWatermark; three quarters of it if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_watermark: Option<u32>,
    /// Longest wait of a request for its first token before it fails with 408.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_timeout: Option<DurationString>,
    /// How requests are spread over the workers of a pod, where it has several of one model.
    #[serde(default)]
    pub dispatch: DispatchStrategy,
}

fn default_max_queue() -> u32 {
    512
}

impl Default for SchedulingSpec {
    fn default() -> Self {
        Self {
            max_queue: default_max_queue(),
            high_watermark: None,
            low_watermark: None,
            queue_timeout: None,
            dispatch: DispatchStrategy::default(),
        }
    }
}

/// How requests are spread over workers.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DispatchStrategy {
    /// In turn.
    RoundRobin,
    /// To the one with the fewest requests.
    #[default]
    LeastLoaded,
    /// To the one with the most KV cache that no request needs; requests that fit nowhere wait.
    MemoryAware,
    /// To the one that read the longest prefix of the prompt last, unless it is much busier than the others.
    PrefixAware,
}

/// How a change of model is validated, switched and taken back.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("duration(self.drainTimeout) <= duration('24h')").message("spec.rollout.drainTimeout: use at most 24h"),
    validation = Rule::new("self.strategy in ['Auto', 'InPlaceSwap'] || !has(self.gates.performance)").message("spec.rollout.gates.performance: it is measured beside the active model, which BlueGreen and HoldRequests do not keep in the pod; use Auto or InPlaceSwap, or leave it out"),
    validation = Rule::new("self.strategy in ['Auto', 'InPlaceSwap'] || !has(self.gates.shadow)").message("spec.rollout.gates.shadow: it is measured beside the active model, which BlueGreen and HoldRequests do not keep in the pod; use Auto or InPlaceSwap, or leave it out"),
    validation = Rule::new("!has(self.gates.shadow) || duration(self.gates.shadow.duration) <= duration(self.progressDeadline)").message("spec.rollout.gates.shadow.duration: use at most spec.rollout.progressDeadline, or a longer progressDeadline"),
    validation = Rule::new("self.strategy in ['Auto', 'InPlaceSwap'] || !has(self.gates.drift)").message("spec.rollout.gates.drift: it is measured beside the active model, which BlueGreen and HoldRequests do not keep in the pod; use Auto or InPlaceSwap, or leave it out"),
    validation = Rule::new("self.strategy in ['Auto', 'InPlaceSwap'] || !has(self.canary)").message("spec.rollout.canary: a share of the requests goes to the new model while the active one answers the rest, and BlueGreen and HoldRequests do not keep both in a pod; use Auto or InPlaceSwap, or leave it out")
)]
pub struct RolloutSpec {
    /// How the switch is made.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self in ['Auto', 'InPlaceSwap', 'BlueGreen', 'HoldRequests']").message("spec.rollout.strategy: this release carries out InPlaceSwap, BlueGreen, HoldRequests, and Auto, which chooses one of them"))]
    pub strategy: RolloutStrategy,
    /// Longest time that requests in flight get to end before their model is unloaded.
    #[serde(default = "default_drain_timeout")]
    pub drain_timeout: DurationString,
    /// Time in which pods must have prepared the new model, or get on with it; then it is rejected.
    #[serde(default = "default_progress_deadline")]
    pub progress_deadline: DurationString,
    /// What a model must pass before one request reaches it. Format, digest and memory are always checked.
    #[serde(default)]
    pub gates: GatesSpec,
    /// A share of the requests goes to a new model first, and is watched. With InPlaceSwap, in each pod that has prepared it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanarySpec>,
    /// What happens after the switch.
    #[serde(default)]
    pub rollback: RollbackSpec,
    /// Pods prepare a new version and do not switch to it before this is false again, or `promote` names it. A version that bakes is
    /// watched, and taken back, all the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// ModelVersion to go on with: pods that have prepared it switch although `paused` is true, and its bake is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub promote: Option<String>,
    /// ModelVersion that is not to be rolled out although the spec asks for it: it is not begun with, given up while pods
    /// prepare it, and gone back from while it bakes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub abort: Option<String>,
}

pub(crate) fn is_false(value: &bool) -> bool {
    !*value
}

fn default_drain_timeout() -> DurationString {
    "120s".into()
}

fn default_progress_deadline() -> DurationString {
    "15m".into()
}

impl Default for RolloutSpec {
    fn default() -> Self {
        Self {
            strategy: RolloutStrategy::default(),
            drain_timeout: default_drain_timeout(),
            progress_deadline: default_progress_deadline(),
            gates: GatesSpec::default(),
            canary: None,
            rollback: RollbackSpec::default(),
            paused: false,
            promote: None,
            abort: None,
        }
    }
}

/// How the switch to a new model is made.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum RolloutStrategy {
    /// InPlaceSwap where the new model fits beside the old one, else BlueGreen where nodes have room for a second set of pods, else
    /// HoldRequests where it fits alone. Which one, and why, stands in `status.rollout.plan`.
    #[default]
    Auto,
    /// Every pod loads the new model beside the old one; when all have, all switch.
    InPlaceSwap,
    /// As many pods again load the new model; when all answer, the Service points to them. The old ones stay for the bake.
    BlueGreen,
    /// One pod after the other unloads the old model and loads the new one; requests that come to it wait meanwhile.
    HoldRequests,
}

/// What a model must pass before one request reaches it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatesSpec {
    /// It must fit into memory beside the active one.
    #[serde(default)]
    pub memory: MemoryGate,
    /// It must answer golden prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<PromptsGate>,
    /// It must agree with the active version, token by token, on what that answers to the golden prompts and, where these are few, to
    /// questions of many kinds. A first version has none to agree with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftGate>,
    /// It must generate about as fast as the active version. A first version has none to be compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub performance: Option<PerformanceGate>,
    /// It must agree with the active version on a copy of live requests, by the limits of the drift gate, and take all of them. A
    /// first version has none to be compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowGate>,
}

/// The memory gate: predicted from the file's header, before the weights are loaded.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryGate {
    /// Share of the pod's memory that must stay free.
    #[serde(default = "default_headroom")]
    pub headroom: Percent,
}

fn default_headroom() -> Percent {
    "5%".into()
}

impl Default for MemoryGate {
    fn default() -> Self {
        Self { headroom: default_headroom() }
    }
}

/// The golden-prompts gate.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PromptsGate {
    /// ConfigMap of the same namespace whose key `prompts.jsonl` holds one JSON object a line: `messages` (as in
    /// /v1/chat/completions) or `prompt`, and `expected` (the whole answer, spaces at the ends aside) or `contains`.
    pub config_map_ref: LocalName,
    /// Share of the prompts that must be answered as expected, greedily.
    #[serde(default = "default_min_pass")]
    pub min_pass: Percent,
}

/// The share of golden prompts that must be answered as expected where none is given.
#[must_use]
pub fn default_min_pass() -> Percent {
    "100%".into()
}

/// The drift gate: agreement with a reference, token by token. It is measured in pods that hold both models, so not with the strategy
/// BlueGreen. A limit counts as passed where that is beyond chance (p < 0.01). Where none is given, minAgreement is 90% and
/// maxPerplexityRatio 1.1.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DriftGate {
    /// What the model is compared with.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == 'Active'").message("spec.rollout.gates.drift.reference: this release compares with the Active version"))]
    pub reference: DriftReference,
    /// Smallest share of positions with the same most likely token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_agreement: Option<Percent>,
    /// Largest mean Kullback-Leibler divergence, in nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_kl: Option<Ratio>,
    /// Largest ratio of perplexities, new over reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_perplexity_ratio: Option<Ratio>,
}

/// What a model is compared with.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DriftReference {
    /// The model that is active.
    #[default]
    Active,
    /// Outputs recorded earlier.
    Golden,
    /// A sibling of the model in full precision.
    FullPrecision,
}

/// The performance gate: how fast the new model generates, measured beside the active one, so not with the strategies BlueGreen and
/// HoldRequests. The limit counts as passed where that is beyond chance (p < 0.01).
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PerformanceGate {
    /// Smallest ratio of decode rates, in tokens a second, new over active. 0.8 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_decode_ratio: Option<Ratio>,
}

/// The shadow gate: after the active model has answered a live request, both models are asked it once more, and nobody sees what they say.
/// It is measured in pods that hold both models, so not with the strategies BlueGreen and HoldRequests, after all other requests.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShadowGate {
    /// Share of the requests that are copied, in percent. While one is compared, others are left out.
    #[x_kube(validation = Rule::new("self >= 1 && self <= 100").message("spec.rollout.gates.shadow.samplePercent: use a number from 1 to 100"))]
    pub sample_percent: u32,
    /// How long, spec.rollout.progressDeadline at most. Where no request comes in that time, nothing is judged.
    pub duration: DurationString,
}

/// The most steps of a canary.
pub const CANARY_STEPS_MAX: u32 = 8;

/// A share of the requests goes to a new model before all do.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanarySpec {
    /// Shares, each larger than the one before. After the last one all requests go over, and rollback.bake begins.
    #[schemars(length(min = 1, max = CANARY_STEPS_MAX))]
    #[x_kube(validation = Rule::new("[0, 1, 2, 3, 4, 5, 6].all(i, i + 1 >= self.size() || !self[i].share.matches('^[0-9.]+%$') || !self[i + 1].share.matches('^[0-9.]+%$') || double(self[i].share.replace('%', '')) < double(self[i + 1].share.replace('%', '')))").message("spec.rollout.canary.steps: give each step a larger share than the one before"))]
    pub steps: Vec<CanaryStep>,
}

/// A share of the requests, and for how long.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryStep {
    /// Share of the conversations whose requests go to the new model, such as 5%: above 0% and below 100%.
    #[x_kube(validation = Rule::new("!self.matches('^[0-9.]+%$') || (double(self.replace('%', '')) > 0.0 && double(self.replace('%', '')) < 100.0)").message("spec.rollout.canary.steps.share: use more than 0% and less than 100%; after the last step all requests go over, and spec.rollout.rollback.bake says how long that is watched"))]
    pub share: Percent,
    /// How long it is watched at this share.
    pub bake: DurationString,
}

/// What happens after the switch.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RollbackSpec {
    /// How long the new model is watched before the rollout counts as done.
    #[serde(default = "default_bake")]
    pub bake: DurationString,
    /// Keep the previous model loaded for that time, so that going back takes no load.
    #[serde(default = "default_true")]
    pub keep_resident: bool,
    /// Live signals that take the new model back while it bakes. A worker that keeps dying does so without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signals: Option<RollbackSignals>,
}

fn default_bake() -> DurationString {
    "10m".into()
}

fn default_true() -> bool {
    true
}

impl Default for RollbackSpec {
    fn default() -> Self {
        Self { bake: default_bake(), keep_resident: true, signals: None }
    }
}

/// Live signals that take a new model back: figures of the requests that a pod has answered lately. Where they pass a limit in
/// as many pods as it takes to refuse a model, it is taken back.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.errorRate) || has(self.ttftP95) || has(self.tpotP95) || has(self.degenerateOutputRate) || has(self.regression)").message("spec.rollout.rollback.signals: give at least one of errorRate, ttftP95, tpotP95, degenerateOutputRate and regression, or leave signals out"))]
pub struct RollbackSignals {
    /// The largest share of requests that may fail by no fault of their own (5xx, and streams that break).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_rate: Option<Percent>,
    /// The longest that the 95th percentile of the time to the first token may be, waiting included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_p95: Option<DurationString>,
    /// The longest that the 95th percentile of the time per output token may be: the mean of an answer's tokens after its first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_p95: Option<DurationString>,
    /// The largest share of answers that may end in a repetition (the same again and again for 256 bytes).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degenerate_output_rate: Option<Percent>,
    /// How many times as long as with the version before both percentiles may be, such as "1.5". It is compared in pods that
    /// answered with both (InPlaceSwap): after the switch with what was before it, in a canary with what the active version does
    /// at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regression: Option<Ratio>,
    /// Requests that ended within this time are looked at; 1m if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<DurationString>,
    /// Nothing is said of fewer requests than these in a pod; 20 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 4096").message("spec.rollout.rollback.signals.minSamples: use a number from 1 to 4096"))]
    pub min_samples: Option<u32>,
}

impl RollbackSignals {
    /// The fields that limit a figure.
    pub const NAMES: [&str; 5] = ["errorRate", "ttftP95", "tpotP95", "degenerateOutputRate", "regression"];

    /// Those of them that are given.
    #[must_use]
    pub fn given(&self) -> Vec<&'static str> {
        let Self { error_rate, ttft_p95, tpot_p95, degenerate_output_rate, regression, window: _, min_samples: _ } =
            self;
        let given = [
            error_rate.is_some(),
            ttft_p95.is_some(),
            tpot_p95.is_some(),
            degenerate_output_rate.is_some(),
            regression.is_some(),
        ];
        Self::NAMES.into_iter().zip(given).filter(|(_, given)| *given).map(|(name, _)| name).collect()
    }
}

/// Time within which requests are looked at where `window` does not say.
pub const SIGNALS_WINDOW_DEFAULT: std::time::Duration = std::time::Duration::from_secs(60);
/// Requests that it takes where `minSamples` does not say.
pub const SIGNALS_MIN_SAMPLES_DEFAULT: u32 = 20;
