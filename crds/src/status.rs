//! What Gantry reports: the status of both kinds, and the protocol between operator and agents that runs through it.
//!
//! The operator writes everything but the entries of `replicas`; each pod's agent applies its own entry, under its own
//! field manager. `versions` freezes what the named versions are, so that an agent needs to see no other object.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::{
    inference_service::{ModelSpec, RollbackSignals, RuntimeSpec},
    open::open_enum,
    scalars::Percent,
};

pub use version::{ModelVersionStatus, VersionPhase, VersionRole};

pub mod report;
mod version;

/// The most digests of model files that a status has.
pub const MAX_DIGESTS: u32 = 256;

/// What is known of a service.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceServiceStatus {
    /// Generation of the spec that the operator has taken in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// ModelVersion that answers requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_version: Option<String>,
    /// ModelVersion that is being validated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate_version: Option<String>,
    /// ModelVersion that was active before and stays loaded while the new one bakes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_version: Option<String>,
    /// Base address for OpenAI clients inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// Which of the two sets of pods answers requests. Absent: Blue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_side: Option<Side>,
    /// The rollout in progress; absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Attempts to roll out a version that were begun so far.
    #[serde(default)]
    pub attempts: i64,
    /// How a pod that does not answer with `activeVersion` goes over to it while nothing is being prepared: HoldRequests where the last
    /// change was made by that; absent where it is loaded beside what answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goes_over_by: Option<StrategyName>,
    /// Pods that are not to get requests, since they answer with a version that was refused or taken back, and others do not. They go on
    /// bringing `activeVersion`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 512))]
    pub quarantined: Vec<String>,
    /// The version that was refused or taken back; it is not tried again until the spec asks for something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejected: Option<RejectedStatus>,
    /// What the versions named here are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_string()]))]
    #[schemars(length(max = 4))]
    pub versions: Vec<NamedVersion>,
    /// SHA-256 of every model file that a revision names. Pods keep these while there is room, and remove all others. Nothing is
    /// removed while it is empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_DIGESTS))]
    pub digests: Vec<String>,
    /// What each pod reports about itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".to_string()]))]
    #[schemars(schema_with = "report::entries", length(max = 512))]
    pub replicas: Vec<ReplicaStatus>,
    /// Pods that exist (scale subresource).
    #[serde(default)]
    pub replica_count: i32,
    /// Pods that can answer.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Ready pods of those asked for, e.g. `2/2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica_summary: Option<String>,
    /// Label selector of the pods (scale subresource).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Measured memory of the largest pod and what is available to it, e.g. `38Mi/512Mi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Available, UpToDate, Ready, Reconciling, Stalled, PodsReady, Supported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,
}

impl InferenceServiceStatus {
    /// What this pod reports about itself.
    #[must_use]
    pub fn report_of(&self, pod: &str) -> Option<&ReplicaStatus> {
        self.replicas.iter().find(|report| report.pod == pod)
    }
}

/// What a version is: a frozen copy of its ModelVersion's spec.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamedVersion {
    /// Name of the ModelVersion.
    pub name: String,
    /// The model.
    pub model: ModelSpec,
    /// The settings it is loaded with.
    pub runtime: RuntimeSpec,
}

/// A rollout in progress: what the pods are asked to do now.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// ModelVersion that is rolled out.
    pub version: String,
    /// What pods do now.
    pub step: RolloutStep,
    /// Which attempt of the service this is: pods say it with what they report, so that no older word counts.
    #[serde(default)]
    pub attempt: i64,
    /// How pods replace the version before. Absent: InPlaceSwap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<StrategyName>,
    /// Chosen strategy with the reason, e.g. `InPlaceSwap: active 16.7Gi + candidate 17.3Gi <= 45.6Gi`.
    pub plan: String,
    /// When the step began.
    pub started_at: Time,
    /// When the step is given up (Prepare, Canary, Commit) or done (Bake). In Prepare it starts anew when pods make progress.
    pub deadline: Time,
    /// What the deadline of Prepare counts from; absent while no pod runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<RolloutProgress>,
    /// How far it is, or what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Why a pod cannot go on, in a word; absent while all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// What the version is judged by: a hash of the spec's model, runtime, gates, resources, cache and scheduling, and which
    /// state the ConfigMap and the Secrets that it names are in. When it changes while pods prepare, they prepare again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<String>,
    /// Label `gantry.dev/pod-resources` of the pods that prepare it: others are replaced, and prepare nothing. Absent: all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<String>,
    /// How often the attempt was begun again since those objects changed while pods prepared. Past a limit they are not waited
    /// for to be steady.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub restarts: i32,
    /// While a candidate is prepared: the bake of the active version, which goes on, and is what is left when the
    /// candidate is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bake: Option<BakeStatus>,
    /// With HoldRequests: the pod that unloads what it answers with and loads the candidate now; the others wait for their turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnStatus>,
    /// What the candidate takes against what a pod has with nothing else loaded, where Auto may have to know that later.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alone: Option<AloneStatus>,
    /// In Canary: which share of the requests the candidate answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryStatus>,
}

/// Which share of the requests a candidate answers, in each pod that has prepared it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryStatus {
    /// Share of the requests, e.g. `5%`.
    pub share: Percent,
    /// Which of `spec.rollout.canary.steps` this is, from 1 on.
    pub step: i32,
    /// How many there are.
    pub steps: i32,
    /// When this share began.
    pub since: Time,
    /// When the next one is due; absent while `spec.rollout.paused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Time>,
}

/// Whose turn it is to unload and load.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TurnStatus {
    /// Name of the pod.
    pub pod: String,
    /// Whether other pods answer meanwhile: then it is not ready while it holds requests, so that no new ones come to it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub yields: bool,
}

/// Memory predicted from the header against what a pod has with nothing else loaded.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AloneStatus {
    /// Predicted need, e.g. `17.3Gi`.
    pub required: String,
    /// What the pod has once what it answers with is unloaded, e.g. `28.9Gi`.
    pub available: String,
    /// Whether it fits.
    pub fits: bool,
}

impl RolloutStep {
    /// Whether the version that is rolled out is no more than a candidate: another one is active.
    #[must_use]
    pub fn has_candidate(self) -> bool {
        matches!(self, Self::Prepare | Self::Canary)
    }
}

impl RolloutStatus {
    /// How pods replace the version before.
    #[must_use]
    pub fn strategy(&self) -> StrategyName {
        self.strategy.unwrap_or(StrategyName::InPlaceSwap)
    }
}

/// The bake of the active version while the next one is prepared.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BakeStatus {
    /// ModelVersion to go back to.
    pub to: String,
    /// Attempt in which the active version was prepared.
    pub attempt: i64,
    /// Chosen strategy with the reason.
    pub plan: String,
    /// When it began.
    pub started_at: Time,
    /// When it is over.
    pub deadline: Time,
    /// What the active version was judged by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<String>,
    /// How pods go back. Absent: they have both loaded, or load it beside what they answer with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<StrategyName>,
}

/// How far the pods have come with a version that they prepare.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutProgress {
    /// The furthest that any pod was: phases, and MiB of its download or thousandths of what follows it. It never falls.
    pub figure: i64,
    /// When a pod got further than it had been, or a pod came for one with other resources.
    pub at: Time,
    /// Since when there have been pods that could make progress, moved by the time in which there were none.
    pub since: Time,
    /// How far each pod was when that was noted, or the one whose place it took.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["pod".to_string()]))]
    #[schemars(length(max = 512))]
    pub pods: Vec<PodProgress>,
    /// Pods that are still to come for ones with other resources than the spec asks for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub to_come: i32,
    /// Since when there has been no pod that could make progress; absent while there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_at: Option<Time>,
}

/// How far a pod was with a version that it prepares.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodProgress {
    /// Name of the pod.
    pub pod: String,
    /// Phases, and MiB of its download or thousandths of what follows it.
    pub figure: i64,
}

fn is_zero(number: &i32) -> bool {
    *number == 0
}

fn is_false(value: &bool) -> bool {
    !*value
}

open_enum!(
    /// What pods are asked to do.
    RolloutStep {
        /// Fetch, validate and load the version beside the active one.
        Prepare,
        /// Answer a share of the requests with the candidate: `canary` says which. `activeVersion` answers the others.
        Canary,
        /// Switch to it: `activeVersion` names it already. The previous one stays loaded.
        Commit,
        /// All have switched; the previous one stays loaded for the bake time.
        Bake,
        /// Switch back: `activeVersion` names the previous one again.
        Rollback,
    }
);

/// The latch: a version that was refused or taken back.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectedStatus {
    /// ModelVersion.
    pub version: String,
    /// Digest of its file, `sha256:<hex>`, when known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// What it was judged by, as in `rollout`: when that changes, it is tried again.
    pub judged: String,
    /// Gate that refused it.
    pub gate: GateName,
    /// The figure, e.g. `3% of 20 prompts, 100% wanted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why, and what to do.
    pub message: String,
    /// Whether it was refused before it answered, or taken back after.
    pub outcome: RejectedOutcome,
    /// When.
    pub at: Time,
}

open_enum!(
    /// How a version ended that is not served.
    RejectedOutcome {
        /// It never answered.
        Rejected,
        /// It was taken back after it had answered.
        RolledBack,
    }
);

open_enum!(
    /// A check of a model.
    GateName {
        /// The file could be fetched.
        Fetch,
        /// Its SHA-256 is the one asked for.
        Digest,
        /// Its header is well formed and tells the truth about the file.
        Format,
        /// It fits into memory beside the active one.
        Memory,
        /// Its chat template renders chats, within limits.
        Template,
        /// It loads, and a token can be decoded.
        Load,
        /// It answers the golden prompts.
        Prompts,
        /// It agrees with the reference.
        Drift,
        /// It is fast enough.
        Performance,
        /// It does well on a copy of live requests.
        Shadow,
        /// Pods were done in time.
        Deadline,
        /// It stayed healthy after the switch.
        Health,
    }
);

/// What a gate said.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GateResult {
    /// Which gate.
    pub name: GateName,
    /// Whether it lets the model through.
    pub verdict: GateVerdict,
    /// The figure it measured, e.g. `100% of 20 prompts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why it failed, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

open_enum!(
    /// Whether a gate lets a model through.
    GateVerdict {
        /// It does.
        Pass,
        /// It does not.
        Fail,
        /// It was not asked for.
        Skipped,
    }
);

/// What one pod reports about itself.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatus {
    /// Name of the pod.
    pub pod: String,
    /// Version that it answers with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Attempt of `rollout` that the pod knew when it wrote this; absent when it knew of none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<i64>,
    /// Candidate that is loaded and has passed every gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<String>,
    /// Previous version that is still loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<String>,
    /// How the pod is.
    pub health: ReplicaHealth,
    /// Where it is with the model that it answers with; absent from agents of releases that did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<ModelState>,
    /// Why it is not healthy, and what happens next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How far the pod is with a version it does not answer with yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidate: Option<CandidateStatus>,
    /// The live signal that the version which it answers with has passed the limit of, since it does so for this attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breach: Option<BreachStatus>,
    /// The version is watched for a window, and was asked too little since for its figures to say anything.
    #[serde(default, skip_serializing_if = "crate::inference_service::is_false")]
    pub too_few_requests: bool,
    /// In Canary: the candidate that a share of the requests goes to in this pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<ReplicaCanary>,
    /// Memory of the serving version's worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ReplicaMemory>,
    /// How far the serving version's service is cut down because memory is short: the worst level is told for five minutes beyond its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degradation: Option<Degradation>,
    /// What its agent can do; absent from agents of releases that did not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentStatus>,
    /// When this was written.
    pub reported_at: Time,
}

/// A candidate that a share of a pod's requests goes to.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaCanary {
    /// ModelVersion.
    pub version: String,
    /// Share of the requests that go to it now, e.g. `5%`; absent while it gets none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<Percent>,
    /// The live signal of which it passed the limit in this attempt: since then it gets no requests in this pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breach: Option<BreachStatus>,
    /// It was asked too little so far for its figures to say anything.
    #[serde(default, skip_serializing_if = "crate::inference_service::is_false")]
    pub too_few_requests: bool,
}

/// A figure of a version that passed its limit.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BreachStatus {
    /// Field of `spec.rollout.rollback.signals` with the limit.
    pub signal: String,
    /// The figure, e.g. `12%`.
    pub value: String,
    /// What it may be, e.g. `5%`.
    pub limit: String,
    /// Of how many requests.
    pub samples: i64,
}

/// What an agent can do.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Gates that it takes versions through.
    pub gates: Vec<GateName>,
    /// Strategies of which it knows its part.
    pub strategies: Vec<StrategyName>,
    /// Fields of `spec.rollout.rollback.signals` that it watches a version by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signals: Vec<String>,
    /// Whether it can give a share of the requests to a candidate (`spec.rollout.canary`).
    #[serde(default, skip_serializing_if = "is_false")]
    pub canary: bool,
}

impl AgentStatus {
    /// What this release's agents can do.
    #[must_use]
    pub fn of_this_release() -> Self {
        use GateName::{Digest, Drift, Fetch, Format, Load, Memory, Performance, Prompts, Shadow, Template};
        Self {
            gates: vec![Fetch, Digest, Format, Memory, Template, Load, Prompts, Drift, Performance, Shadow],
            strategies: vec![StrategyName::InPlaceSwap, StrategyName::BlueGreen, StrategyName::HoldRequests],
            signals: RollbackSignals::NAMES.map(str::to_owned).to_vec(),
            canary: true,
        }
    }

    /// What agents could that did not say what they can. Nothing is ever added to it.
    #[must_use]
    pub fn of_silent() -> Self {
        use GateName::{Digest, Fetch, Format, Load, Memory, Prompts, Template};
        Self {
            gates: vec![Fetch, Digest, Format, Memory, Template, Load, Prompts],
            strategies: vec![StrategyName::InPlaceSwap],
            signals: Vec::new(),
            canary: false,
        }
    }
}

open_enum!(
    /// A way to replace a version by another.
    StrategyName {
        /// Every pod loads the new version beside the old one, then all switch.
        InPlaceSwap,
        /// New pods load it, and the Service points to them when they are ready.
        BlueGreen,
        /// Requests are held while a pod unloads the old version and loads the new one.
        HoldRequests,
    }
);

open_enum!(
    /// One of the two sets of pods that a service may have. One answers; the other one is there for as long as a BlueGreen
    /// rollout takes.
    Side {
        /// The one that a service begins with.
        Blue,
        /// The other one.
        Green,
    }
);

#[allow(clippy::derivable_impls, reason = "no enum that may hold an unknown value has a derive of its own")]
impl Default for Side {
    fn default() -> Self {
        Self::Blue
    }
}

impl Side {
    /// The set of pods that is not this one.
    #[must_use]
    pub fn other(self) -> Self {
        if self == Self::Green { Self::Blue } else { Self::Green }
    }

    /// Value of the label [`SIDE_LABEL`](crate::SIDE_LABEL) of its pods.
    #[must_use]
    pub fn label(self) -> &'static str {
        if self == Self::Green { "green" } else { "blue" }
    }

    /// The set whose pods have this label. None have it that were made before there were two.
    #[must_use]
    pub fn of_label(label: Option<&str>) -> Self {
        if label == Some(Self::Green.label()) { Self::Green } else { Self::Blue }
    }
}

open_enum!(
    /// How far a service is cut down because memory is short; each level gives up what those before it do.
    Degradation {
        /// Everything is served.
        Normal,
        /// Half as many sequences at once.
        ReducedBatch,
        /// No prefix is kept that is not in use.
        EvictCache,
        /// Only requests of high priority are admitted.
        HighPriorityOnly,
        /// Nothing new is admitted.
        Emergency,
    }
);

open_enum!(
    /// How a pod is.
    ReplicaHealth {
        /// It has no model yet.
        Starting,
        /// A token can be decoded now.
        Healthy,
        /// Its worker is being started again.
        Restarting,
        /// Its worker died too often, or the version could not be prepared.
        Failed,
    }
);

open_enum!(
    /// Where a pod is with the model that it answers with.
    ModelState {
        /// No model is asked of it.
        Idle,
        /// Requests are answered.
        Ready,
        /// Requests wait: what was answered with ends its last ones and is unloaded.
        Switching,
        /// Requests wait, or are refused where none has answered yet: the model is being loaded.
        Loading,
        /// It cannot be loaded, or keeps dying. It is tried again.
        Error,
    }
);

/// How far a pod is with a version.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CandidateStatus {
    /// ModelVersion.
    pub version: String,
    /// How far.
    pub phase: CandidatePhase,
    /// Why it cannot go on, in a word; absent while it does. The sentence is `message`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<WaitReason>,
    /// Of the download, of loading, and of the golden prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// What each gate said so far, in the order they ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<GateResult>,
    /// What the file's header says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gguf: Option<GgufStatus>,
    /// Memory predicted from the header against what the pod has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitStatus>,
    /// What it waits for, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

open_enum!(
    /// Why a pod cannot go on with a version: it tries again by itself until the deadline.
    WaitReason {
        /// The file cannot be fetched: the source does not answer, or says that it will later.
        FetchBackOff,
        /// The ConfigMap with the golden prompts is not there.
        ConfigMapNotFound,
        /// It has not the key that is wanted.
        ConfigMapInvalid,
        /// The Secret with the credentials of a source is not there.
        SecretNotFound,
        /// It holds no usable credentials.
        SecretInvalid,
        /// The pod may not read what it needs.
        AccessDenied,
        /// The API server does not answer the pod.
        ApiUnavailable,
        /// There is no room for it until another version is unloaded.
        NoRoom,
        /// The active version, which it is to be compared with, is not loaded in the pod, or does not answer there.
        NoReference,
        /// It has fields that the pod's release does not know, or cannot read.
        AgentTooOld,
        /// A gate refused it in a pod while others go on: said of a rollout alone, and not tried again.
        GateFailed,
    }
);

open_enum!(
    /// How far a pod is with a version.
    CandidatePhase {
        /// A gate refused it.
        Failed,
        /// The file is on its way.
        Fetching,
        /// The file's digest and header are being checked.
        Validating,
        /// All that can be known of it before it is loaded is right: it waits for its turn, and for the room.
        Checked,
        /// The worker is loading it.
        Loading,
        /// It answers golden prompts.
        Testing,
        /// It can be switched to.
        Prepared,
    }
);

/// How far a download is, and what follows it.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Bytes that are there.
    pub bytes: i64,
    /// Bytes of the whole file, when the server says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<i64>,
    /// Time left at the present rate, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<i64>,
    /// How much is loaded, or how many of the golden prompts are answered, in thousandths; beyond 1000 the number of answers that are
    /// compared after that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done_permille: Option<i64>,
    /// For people, e.g. `42%`, `42% loaded` or `3 of 20 prompts`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
}

/// What a GGUF file's header says.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GgufStatus {
    /// Architecture, e.g. `llama`.
    pub architecture: String,
    /// Quantisation, e.g. `Q4_K_M`.
    pub quantization: String,
    /// Parameters, e.g. `8.0B`.
    pub parameters: String,
    /// Tokens of context it was trained with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_length: Option<i64>,
    /// Bytes of the file.
    pub bytes: i64,
    /// The same for people, e.g. `4.6Gi`.
    pub size: String,
}

/// Memory predicted from the header against what there is.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FitStatus {
    /// Predicted need, e.g. `17.3Gi`.
    pub required: String,
    /// What the pod has left, e.g. `28.9Gi`.
    pub available: String,
    /// Whether it fits.
    pub fits: bool,
    /// What the pod has once what it answers with is unloaded; absent where that is what it has left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available_alone: Option<String>,
    /// Whether it fits into that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fits_alone: Option<bool>,
}

/// Memory of a pod, in bytes.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaMemory {
    /// Predicted for the serving version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<i64>,
    /// Resident set of its worker when this was written; it is written again when the figure has moved much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<i64>,
    /// What the pod may use in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What agents could that said nothing is no matter of this release any more: a gate that is added to it would be taken
    /// for passed by pods that never heard of it.
    #[test]
    fn what_silent_agents_can_do_stays_as_it_was() {
        let silent = AgentStatus::of_silent();
        let gates: Vec<_> = silent.gates.iter().map(|gate| gate.as_str()).collect();
        assert_eq!(gates, ["Fetch", "Digest", "Format", "Memory", "Template", "Load", "Prompts"]);
        assert_eq!(silent.strategies, [StrategyName::InPlaceSwap]);
        let present = AgentStatus::of_this_release();
        assert!(silent.gates.iter().all(|gate| present.gates.contains(gate)), "{present:?}");
    }
}
