//! From the spec as stored to values that cannot be wrong: every scalar is parsed, every problem is collected.
//!
//! The API server has checked most of this already. It is checked again because an object may have been stored before
//! a rule existed. What this release does not carry out is refused here, by field and with what to use instead, so that
//! no object is half obeyed. Later steps see only [`ValidService`] and cannot fail for these reasons.

mod api;
mod pod;

pub use api::{ApiSettings, ResponseStore, StorePlace};

use std::{fmt, time::Duration};

use gantry_crds::{
    InferenceService, InferenceServiceSpec,
    address::{credential, is_pinned},
    inference_service::{
        CANARY_STEPS_MAX, CacheMode, CanarySpec, GatesSpec, ModelSpec, PodSpec, PrefixCacheSpec, PromptsGate,
        RollbackSignals, RolloutSpec, RolloutStrategy, RuntimeSpec, SourceSpec, cache_bytes,
    },
    problem::of_object_name,
    revision::{is_same, judged_by, version_name},
    scalars::{Percent, PositiveQuantity},
    status::{GateName, NamedVersion},
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;

use crate::{
    build::hash,
    decide::{RolloutState, StampedVersion},
    limits::RETRY_TOKEN_CHARS_MAX,
};

pub use gantry_crds::{
    RESTART_ANNOTATION, RETRY_ANNOTATION,
    problem::{Problem, ProblemKind},
};

/// A spec that can be carried out.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidService {
    /// The version the spec asks for.
    pub wanted: WantedVersion,
    /// Time in which pods must have prepared it.
    pub progress_deadline: Duration,
    /// Time for which it is watched after the switch.
    pub bake: Duration,
    /// Whether the previous version stays loaded for that time.
    pub keep_resident: bool,
    /// Fields of the signals by which it is watched.
    pub signals: Vec<&'static str>,
    /// How pods are to replace the version that answers.
    pub strategy: RolloutStrategy,
    /// Whether pods are not to switch to what they have prepared.
    pub paused: bool,
    /// Version that is gone on with all the same, and whose bake is over.
    pub promote: Option<String>,
    /// Version that is not to be rolled out.
    pub abort: Option<String>,
    /// Pods.
    pub replicas: i32,
    /// What the pods are built from.
    pub pod: PodSettings,
    /// ConfigMap with the golden prompts.
    pub prompts_config_map: Option<String>,
    /// Gates that compare a candidate with the active version, in a pod that has both.
    pub compares: Vec<GateName>,
    /// Shares of the requests that go to a candidate before all do, rising.
    pub canary: Vec<CanaryStep>,
    /// Superseded versions that are kept.
    pub history_limit: usize,
}

/// A share of the requests that goes to a candidate for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CanaryStep {
    /// The share, as it is spelled.
    pub share: Percent,
    /// The same as a number: [`Percent::parts`].
    pub parts: u32,
    /// How long it is watched so.
    pub bake: Duration,
}

/// The version that a spec asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct WantedVersion {
    /// Name of its ModelVersion.
    pub name: String,
    /// All that it is judged by, as [`judged`](crate::decide::judged) writes it.
    pub judged: String,
    /// Objects beside the spec that it is judged by.
    pub objects: Vec<NamedObject>,
    /// Time in which pods must have prepared it.
    pub progress_deadline: Duration,
    /// How pods change over, which decides what has to fit beside what.
    pub strategy: RolloutStrategy,
    /// Value of [`RESTART_ANNOTATION`].
    pub restart: Option<String>,
    /// Hash of what the spec sets of pods.
    pub pod: Option<String>,
    /// The model.
    pub model: ModelSpec,
    /// The settings it is loaded with.
    pub runtime: RuntimeSpec,
}

impl ValidService {
    /// Whether pods wait with the switch to this version.
    #[must_use]
    pub fn holds(&self, version: &str) -> bool {
        self.paused && self.promote.as_deref() != Some(version)
    }

    /// Whether a candidate needs the active version in its own pod.
    #[must_use]
    pub fn needs_both(&self) -> bool {
        !self.compares.is_empty() || !self.canary.is_empty()
    }

    /// Whether this version is not to be rolled out.
    #[must_use]
    pub fn aborts(&self, version: &str) -> bool {
        self.abort.as_deref() == Some(version)
    }
}

impl WantedVersion {
    /// Takes the name of a version that is there and is the same one: that of a release which named it otherwise, so that an
    /// upgrade makes no new version of what it finds. Those that play a part go first.
    pub fn named_as(&mut self, state: &RolloutState, stamped: &[StampedVersion]) {
        let is_same =
            |version: &&NamedVersion| is_same((&version.model, &version.runtime), (&self.model, &self.runtime));
        let known = state.versions.iter().chain(stamped.iter().map(|stamped| &stamped.version)).filter(is_same);
        let attempt = state.rollout.as_ref().map(|rollout| &rollout.version);
        let rejected = state.rejected.as_ref().map(|rejected| &rejected.version);
        let parts = [state.active.as_ref(), attempt, rejected, Some(&self.name)];
        let rank = |name: &String| parts.iter().position(|part| *part == Some(name)).unwrap_or(parts.len());
        let first = known.map(|version| &version.name).min_by_key(|name| (rank(name), (*name).clone())).cloned();
        if let Some(name) = first {
            self.name = name;
        }
    }
}

/// An object of the service's namespace whose content a version is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectKind {
    /// Golden prompts.
    ConfigMap,
    /// Credentials of a source.
    Secret,
    /// A ConfigMap with the authorities that a source is trusted by: what rests on these rests on no prompts.
    Authorities,
}

impl ObjectKind {
    /// The kind as it stands in YAML.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap | Self::Authorities => "ConfigMap",
            Self::Secret => "Secret",
        }
    }

    /// What it is in a text that verdicts rest on.
    #[must_use]
    pub fn judged_as(self) -> &'static str {
        match self {
            Self::Authorities => "Authorities",
            other => other.as_str(),
        }
    }
}

/// One such object, which need not be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedObject {
    /// Its kind.
    pub kind: ObjectKind,
    /// Its name.
    pub name: String,
}

/// An object without which a pod's container cannot be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodObject {
    /// The object.
    pub object: NamedObject,
    /// The field that names it.
    pub field: &'static str,
}

/// What a serving pod is built from: a change of any of these restarts the pods.
#[derive(Debug, Clone, PartialEq)]
pub struct PodSettings {
    /// CPUs requested.
    pub cpu: Option<Quantity>,
    /// Memory, request and limit.
    pub memory: Option<Quantity>,
    /// Extended resource and number of GPUs.
    pub gpu: Option<(String, u32)>,
    /// Most bytes of the model cache, where the spec says so.
    pub cache_limit: Option<Quantity>,
    /// Most bytes of the model cache.
    pub cache_bytes: u64,
    /// Longest time that requests in flight get.
    pub drain_timeout: Duration,
    /// Value of [`RESTART_ANNOTATION`].
    pub restart: Option<String>,
    /// Whom it answers.
    pub api: ApiSettings,
    /// Where it runs, and what it is and has beside the server's own.
    pub spec: PodSpec,
}

impl PodSettings {
    /// The objects that pods are made with.
    #[must_use]
    pub fn objects(&self) -> Vec<PodObject> {
        self.api.secrets().into_iter().chain(pod::objects(&self.spec)).collect()
    }
}

/// All problems of a spec; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// Whether any value is wrong, which goes before what is merely not supported.
    #[must_use]
    pub fn any_invalid(&self) -> bool {
        self.0.iter().any(|problem| problem.kind == ProblemKind::Invalid)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

/// Parses and checks the spec of `service`.
///
/// # Errors
/// With every problem of the spec, in the order of its fields.
pub fn validate(service: &InferenceService) -> Result<ValidService, Problems> {
    let spec = &service.spec;
    let mut problems = Collector::default();
    problems.source(&MODEL_SOURCE, &spec.model.source, &spec.pod);
    if let Some(draft) = spec.runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref()) {
        problems.source(&DRAFT_SOURCE, draft, &spec.pod);
    }
    problems.unsupported_fields(spec);
    problems.unknown_fields(&spec.unknown);
    let replicas = spec.replicas;
    if !(0..=gantry_crds::MAX_REPLICAS).contains(&replicas) {
        problems.invalid("spec.replicas", format!("use a number from 0 to {}", gantry_crds::MAX_REPLICAS));
    }
    let api = problems.api(&spec.api);
    let pod = PodSettings {
        spec: problems.pod(&spec.pod, &api),
        api,
        cpu: problems.quantity("spec.resources.cpu", spec.resources.cpu.as_ref()),
        memory: problems.quantity("spec.resources.memory", spec.resources.memory.as_ref()),
        gpu: spec.resources.gpu.as_ref().map(|gpu| (gpu.resource_name.clone(), gpu.count)),
        cache_limit: problems.quantity("spec.cache.sizeLimit", spec.cache.size_limit.as_ref()),
        cache_bytes: cache_bytes(
            spec.cache.size_limit.as_ref(),
            spec.resources.memory.as_ref(),
            spec.resources.gpu.as_ref().map_or(0, |gpu| gpu.count),
        ),
        drain_timeout: problems.parsed("spec.rollout.drainTimeout", spec.rollout.drain_timeout.to_std()),
        restart: service.annotations().get(RESTART_ANNOTATION).cloned(),
    };
    if spec.runtime.gpu_memory.is_some() && spec.resources.gpu.is_none() {
        problems.invalid("spec.runtime.gpuMemory", "ask for GPUs (spec.resources.gpu), or leave it out");
    }
    problems.quantity("spec.runtime.gpuMemory", spec.runtime.gpu_memory.as_ref());
    if let Some(prefixes) = &spec.runtime.prefix_cache {
        problems.prefix_cache(prefixes, spec.cache.size_limit.as_ref());
    }
    problems.gates(&spec.rollout);
    if let Some(timeout) = &spec.scheduling.queue_timeout {
        problems.parsed("spec.scheduling.queueTimeout", timeout.to_std());
    }
    if let Some(signals) = &spec.rollout.rollback.signals {
        problems.signals(signals);
    }
    let canary = spec.rollout.canary.as_ref().map(|canary| problems.canary(canary, spec.rollout.strategy));
    let progress_deadline = problems.parsed("spec.rollout.progressDeadline", spec.rollout.progress_deadline.to_std());
    let valid = ValidService {
        wanted: WantedVersion {
            name: version_name(&service.name_any(), &spec.model, &spec.runtime),
            judged: judged(service),
            objects: named_objects(spec),
            progress_deadline,
            strategy: spec.rollout.strategy,
            restart: service.annotations().get(RESTART_ANNOTATION).map(|token| shortened(token)),
            pod: spec.pod.canonical().map(|set| hash(&set)),
            model: spec.model.clone(),
            runtime: spec.runtime.clone(),
        },
        progress_deadline,
        bake: problems.parsed("spec.rollout.rollback.bake", spec.rollout.rollback.bake.to_std()),
        keep_resident: spec.rollout.rollback.keep_resident,
        signals: spec.rollout.rollback.signals.as_ref().map(RollbackSignals::given).unwrap_or_default(),
        strategy: spec.rollout.strategy,
        paused: spec.rollout.paused,
        promote: spec.rollout.promote.clone(),
        abort: spec.rollout.abort.clone(),
        replicas,
        pod,
        prompts_config_map: spec.rollout.gates.prompts.as_ref().map(prompts_config_map),
        compares: comparing(&spec.rollout.gates),
        canary: canary.unwrap_or_default(),
        history_limit: usize::try_from(spec.revision_history_limit).unwrap_or(0),
    };
    if problems.0.is_empty() { Ok(valid) } else { Err(Problems(problems.0)) }
}

fn comparing(gates: &GatesSpec) -> Vec<GateName> {
    let drift = gates.drift.as_ref().map(|_| GateName::Drift);
    let performance = gates.performance.as_ref().map(|_| GateName::Performance);
    let shadow = gates.shadow.as_ref().map(|_| GateName::Shadow);
    [drift, performance, shadow].into_iter().flatten().collect()
}

fn prompts_config_map(gate: &PromptsGate) -> String {
    gate.config_map_ref.name.clone()
}

/// The objects whose contents the version is judged by, each once.
fn named_objects(spec: &InferenceServiceSpec) -> Vec<NamedObject> {
    let draft = spec.runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref());
    let sources = || [Some(&spec.model.source), draft].into_iter().flatten();
    let prompts = spec.rollout.gates.prompts.iter().map(|gate| (ObjectKind::ConfigMap, &gate.config_map_ref));
    let secrets = sources().filter_map(|source| Some((ObjectKind::Secret, source.secret_ref.as_ref()?)));
    let authorities =
        sources().filter_map(|source| Some((ObjectKind::Authorities, &source.ca.as_ref()?.config_map_ref)));
    let mut objects = Vec::new();
    for (kind, named) in prompts.chain(secrets).chain(authorities) {
        let object = NamedObject { kind, name: named.name.clone() };
        if !objects.contains(&object) {
            objects.push(object);
        }
    }
    objects
}

/// What of the spec a version is judged by, the user's wish to try again included.
fn judged(service: &InferenceService) -> String {
    let hash = judged_by(&service.spec);
    match service.annotations().get(RETRY_ANNOTATION) {
        Some(token) => format!("{hash}/{}", shortened(token)),
        None => hash,
    }
}

/// As much of an annotation's value as becomes part of a status field.
fn shortened(token: &str) -> String {
    token.chars().take(RETRY_TOKEN_CHARS_MAX).collect()
}

/// How addresses begin that models are fetched from.
const SCHEMES: [&str; 5] = ["https://", "http://", "hf://", "s3://", "oci://"];

/// The paths of a source's fields.
struct SourceFields {
    source: &'static str,
    uri: &'static str,
    pvc: &'static str,
    sha256: &'static str,
    secret: &'static str,
    ca: &'static str,
}

const MODEL_SOURCE: SourceFields = SourceFields {
    source: "spec.model.source",
    uri: "spec.model.source.uri",
    pvc: "spec.model.source.pvc",
    sha256: "spec.model.source.sha256",
    secret: "spec.model.source.secretRef.name",
    ca: "spec.model.source.ca.configMapRef.name",
};
const DRAFT_SOURCE: SourceFields = SourceFields {
    source: "spec.runtime.speculative.draft",
    uri: "spec.runtime.speculative.draft.uri",
    pvc: "spec.runtime.speculative.draft.pvc",
    sha256: "spec.runtime.speculative.draft.sha256",
    secret: "spec.runtime.speculative.draft.secretRef.name",
    ca: "spec.runtime.speculative.draft.ca.configMapRef.name",
};

/// Collects problems while parsing goes on, so that the user sees all of them at once.
#[derive(Default)]
struct Collector(Vec<Problem>);

impl Collector {
    fn invalid(&mut self, field: &'static str, advice: impl Into<String>) {
        self.0.push(Problem { kind: ProblemKind::Invalid, field, advice: advice.into() });
    }

    /// Fields of CRDs of a later release.
    fn unknown_fields(&mut self, unknown: &[String]) {
        if !unknown.is_empty() {
            let advice = format!(
                "{}: the CRDs are of a later release than the operator; update the operator, or leave these fields out",
                unknown.join(", ")
            );
            self.0.push(Problem { kind: ProblemKind::NotSupported, field: "spec", advice });
        }
    }

    fn not_supported(&mut self, present: bool, field: &'static str, advice: &'static str) {
        if present {
            self.0.push(Problem { kind: ProblemKind::NotSupported, field, advice: advice.to_owned() });
        }
    }

    /// The value, or its default together with a recorded problem: the default never leaves [`validate`].
    fn parsed<T: Default>(&mut self, field: &'static str, value: Result<T, gantry_crds::scalars::InvalidValue>) -> T {
        value.unwrap_or_else(|error| {
            self.invalid(field, error.to_string());
            T::default()
        })
    }

    fn quantity(&mut self, field: &'static str, value: Option<&PositiveQuantity>) -> Option<Quantity> {
        let value = value?;
        if let Err(error) = value.value() {
            self.invalid(field, error.to_string());
        }
        Some(Quantity(value.0.clone()))
    }

    fn prefix_cache(&mut self, spec: &PrefixCacheSpec, limit: Option<&PositiveQuantity>) {
        const DISK: &str = "spec.runtime.prefixCache.disk";
        self.quantity("spec.runtime.prefixCache.memory", spec.memory.as_ref());
        self.quantity(DISK, spec.disk.as_ref());
        if let Some(ttl) = &spec.ttl {
            self.parsed("spec.runtime.prefixCache.ttl", ttl.to_std());
        }
        if spec.disk.is_some() && limit.is_none() {
            self.invalid(DISK, "it is a part of spec.cache.sizeLimit: give that as well");
        }
        let bytes = |quantity: Option<&PositiveQuantity>| quantity.and_then(PositiveQuantity::bytes);
        if let (Some(disk), Some(limit)) = (bytes(spec.disk.as_ref()), bytes(limit))
            && disk >= limit
        {
            self.invalid(DISK, "it is a part of spec.cache.sizeLimit, whose rest is for models: give less");
        }
    }

    fn signals(&mut self, spec: &RollbackSignals) {
        const SIGNALS: &str = "spec.rollout.rollback.signals";
        let shares = [("errorRate", &spec.error_rate), ("degenerateOutputRate", &spec.degenerate_output_rate)];
        let times = [("ttftP95", &spec.ttft_p95), ("tpotP95", &spec.tpot_p95), ("window", &spec.window)];
        let wrong = shares.iter().filter_map(|(name, share)| Some((*name, share.as_ref()?.ratio().err()?)));
        let wrong = wrong.chain(times.iter().filter_map(|(name, time)| Some((*name, time.as_ref()?.to_std().err()?))));
        let ratio = spec.regression.as_ref().and_then(|ratio| Some(("regression", ratio.value().err()?)));
        for (name, error) in wrong.chain(ratio) {
            self.invalid(SIGNALS, format!("{name}: {error}"));
        }
        if spec.given().is_empty() {
            self.invalid(SIGNALS, "give at least one limit, or leave signals out");
        }
    }

    fn gates(&mut self, rollout: &RolloutSpec) {
        let gates = &rollout.gates;
        self.0.extend(gates.problems());
        if let Some(shadow) = &gates.shadow
            && let (Ok(duration), Ok(most)) = (shadow.duration.to_std(), rollout.progress_deadline.to_std())
            && duration > most
        {
            let advice = "use at most spec.rollout.progressDeadline, or a longer progressDeadline";
            self.invalid("spec.rollout.gates.shadow.duration", advice);
        }
        if gates.drift.is_some() {
            self.beside_the_active_one("spec.rollout.gates.drift", rollout.strategy);
        }
        if gates.performance.is_some() {
            self.beside_the_active_one("spec.rollout.gates.performance", rollout.strategy);
        }
        if gates.shadow.is_some() {
            self.beside_the_active_one("spec.rollout.gates.shadow", rollout.strategy);
        }
    }

    fn beside_the_active_one(&mut self, gate: &'static str, strategy: RolloutStrategy) {
        if matches!(strategy, RolloutStrategy::BlueGreen | RolloutStrategy::HoldRequests) {
            self.invalid(
                gate,
                "it is measured beside the active model, which BlueGreen and HoldRequests do not keep in the pod; use Auto or \
                 InPlaceSwap, or leave it out",
            );
        }
    }

    fn canary(&mut self, spec: &CanarySpec, strategy: RolloutStrategy) -> Vec<CanaryStep> {
        const CANARY: &str = "spec.rollout.canary";
        const STEPS: &str = "spec.rollout.canary.steps";
        if matches!(strategy, RolloutStrategy::BlueGreen | RolloutStrategy::HoldRequests) {
            self.invalid(
                CANARY,
                "a share of the requests goes to the new model while the active one answers the rest, and BlueGreen and \
                 HoldRequests do not keep both in a pod; use Auto or InPlaceSwap, or leave it out",
            );
        }
        if !(1..=CANARY_STEPS_MAX as usize).contains(&spec.steps.len()) {
            self.invalid(STEPS, format!("give from 1 to {CANARY_STEPS_MAX} of them, or leave canary out"));
        }
        let mut steps: Vec<CanaryStep> = Vec::new();
        for (index, step) in spec.steps.iter().enumerate() {
            let (parts, bake) = match (step.share.parts(), step.bake.to_std()) {
                (Ok(parts), Ok(bake)) => (parts, bake),
                (Err(error), _) => {
                    self.invalid(STEPS, format!("[{index}].share: {error}"));
                    continue;
                }
                (_, Err(error)) => {
                    self.invalid(STEPS, format!("[{index}].bake: {error}"));
                    continue;
                }
            };
            if parts == 0 || parts >= Percent::WHOLE {
                let advice = "use more than 0% and less than 100%; after the last step all requests go over";
                self.invalid(STEPS, format!("[{index}].share: {advice}"));
            }
            if steps.last().is_some_and(|before| before.parts >= parts) {
                self.invalid(STEPS, format!("[{index}].share: give a larger one than that of the step before"));
            }
            steps.push(CanaryStep { share: step.share.clone(), parts, bake });
        }
        steps
    }

    /// A name that no object has would break only when somebody asks for it.
    fn object_name(&mut self, field: &'static str, name: &str) {
        if let Some(advice) = of_object_name(name) {
            self.invalid(field, advice);
        }
    }

    fn source(&mut self, fields: &SourceFields, source: &SourceSpec, pod: &PodSpec) {
        if let Some(secret) = &source.secret_ref {
            self.object_name(fields.secret, &secret.name);
        }
        if let Some(ca) = &source.ca {
            self.object_name(fields.ca, &ca.config_map_ref.name);
        }
        if let Some(found) = source.uri.as_deref().and_then(credential) {
            self.invalid(fields.uri, found.to_string());
        }
        match (&source.uri, &source.pvc) {
            (Some(uri), None) if SCHEMES.iter().any(|scheme| uri.starts_with(scheme)) => {
                self.digest(fields, source);
            }
            (Some(uri), None) => {
                let scheme = uri.split("://").next().unwrap_or_default();
                let advice = format!(
                    "{scheme}:// cannot be fetched; put the file behind one of {} and give its sha256",
                    SCHEMES.join(", ")
                );
                self.0.push(Problem { kind: ProblemKind::NotSupported, field: fields.uri, advice });
            }
            (None, Some(pvc)) => {
                self.digest(fields, source);
                if !pod.has_model_volume(&pvc.claim_name) {
                    let advice = format!(
                        "name the claim {} in spec.pod.modelVolumes as well, so that pods have it mounted",
                        pvc.claim_name
                    );
                    self.invalid(fields.pvc, advice);
                }
            }
            _ => self.invalid(fields.source, "give exactly one of uri and pvc"),
        }
    }

    fn digest(&mut self, fields: &SourceFields, source: &SourceSpec) {
        match source.sha256.as_ref().map(|digest| digest.checked()) {
            Some(Ok(_)) => {}
            Some(Err(error)) => self.invalid(fields.sha256, error.to_string()),
            None if source.uri.as_deref().is_some_and(is_pinned) => {}
            None => self.invalid(
                fields.sha256,
                "give the file's SHA-256 (sha256sum FILE); it may be left out where hf:// has a commit as revision (40 digits), or \
                 oci:// the digest of a manifest (@sha256:...)",
            ),
        }
    }

    fn unsupported_fields(&mut self, spec: &InferenceServiceSpec) {
        self.not_supported(spec.cache.mode != CacheMode::None, "spec.cache.mode", "use None");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn service(patch: Value) -> InferenceService {
        let mut spec = json!({"model": {"servedName": "chat",
            "source": {"uri": "https://models/a.gguf", "sha256": "a".repeat(64)}}});
        merge(&mut spec, patch);
        InferenceService::new("chat", serde_json::from_value(spec).unwrap())
    }

    fn merge(into: &mut Value, patch: Value) {
        match (into, patch) {
            (Value::Object(into), Value::Object(patch)) => {
                for (key, value) in patch {
                    match value {
                        Value::Null => drop(into.remove(&key)),
                        value => merge(into.entry(key).or_insert(Value::Null), value),
                    }
                }
            }
            (into, patch) => *into = patch,
        }
    }

    #[test]
    fn the_defaults_can_be_carried_out() {
        let valid = validate(&service(json!({}))).unwrap();
        assert_eq!(valid.progress_deadline, Duration::from_secs(900));
        assert_eq!(valid.bake, Duration::from_secs(600));
        assert_eq!((valid.replicas, valid.history_limit, valid.keep_resident), (1, 5, true));
        assert!(valid.wanted.name.starts_with("chat-"));
    }

    #[test]
    fn shares_of_a_canary_rise_and_are_refused_where_pods_do_not_keep_both() {
        let rollout = |strategy: &str, steps: Value| {
            validate(&service(json!({"rollout": {"strategy": strategy, "canary": {"steps": steps}}})))
        };
        let step = |share: &str| json!({"share": share, "bake": "5m"});
        let valid = rollout("Auto", json!([step("0.5%"), step("25%")])).unwrap();
        let told: Vec<_> = valid.canary.iter().map(|step| (step.share.0.as_str(), step.parts, step.bake)).collect();
        let bake = Duration::from_secs(300);
        assert_eq!(told, [("0.5%", 500_000, bake), ("25%", 25_000_000, bake)]);
        assert!(valid.needs_both() && !validate(&service(json!({}))).unwrap().needs_both());
        for (strategy, steps, told) in [
            ("BlueGreen", json!([step("5%")]), "spec.rollout.canary: a share of the requests"),
            ("HoldRequests", json!([step("5%")]), "use Auto or InPlaceSwap"),
            ("Auto", json!([]), "give from 1 to 8"),
            ("Auto", json!(vec![step("5%"); 9]), "give from 1 to 8"),
            ("Auto", json!([step("5%"), step("5.0%")]), "[1].share: give a larger one"),
            ("Auto", json!([step("25%"), step("5%")]), "[1].share: give a larger one"),
            ("Auto", json!([step("0%")]), "[0].share: use more than 0%"),
            ("Auto", json!([step("100%")]), "less than 100%"),
            ("Auto", json!([step("five")]), "[0].share: \"five\" is not a percentage"),
            ("Auto", json!([{"share": "5%", "bake": "soon"}]), "[0].bake: \"soon\" is not a duration"),
        ] {
            let problems = rollout(strategy, steps.clone()).unwrap_err();
            assert!(problems.any_invalid() && problems.to_string().contains(told), "{strategy} {steps}: {problems}");
        }
    }

    #[test]
    fn what_is_not_supported_is_named_with_what_to_use_instead() {
        let source = |source: Value| json!({"model": {"source": source}});
        let draft = |draft: Value| json!({"runtime": {"speculative": {"draft": draft}}});
        let cases = [
            (
                json!({"rollout": {"gates": {"drift": {"reference": "Golden"}}}}),
                "spec.rollout.gates.drift.reference",
                "use Active",
            ),
            (source(json!({"uri": "gs://b/a.gguf"})), "spec.model.source.uri", "https://"),
            (source(json!({"uri": "azure://b/a.gguf"})), "spec.model.source.uri", "https://"),
            (json!({"cache": {"mode": "Node"}}), "spec.cache.mode", "None"),
            (draft(json!({"uri": "gs://r/d"})), "spec.runtime.speculative.draft.uri", "https://"),
        ];
        for (patch, field, instead) in cases {
            let problems = validate(&service(patch.clone())).unwrap_err();
            assert_eq!(problems.0.len(), 1, "{patch}: {problems}");
            assert_eq!((problems.0[0].kind, problems.0[0].field), (ProblemKind::NotSupported, field), "{patch}");
            assert!(problems.to_string().contains(instead), "{problems}");
        }
    }

    #[test]
    fn a_file_on_a_claim_needs_the_claim_in_the_pods_and_its_digest() {
        let pvc = |claim: &str| json!({"uri": null, "pvc": {"claimName": claim, "path": "a.gguf"}});
        let draft = json!({"draft": {"pvc": {"claimName": "drafts", "path": "d.gguf"}, "sha256": "d".repeat(64)}});
        let spec = |claims: Value| {
            let model = json!({"source": pvc("models")});
            json!({"model": model, "runtime": {"speculative": draft}, "pod": {"modelVolumes": claims}})
        };
        let both = json!([{"claimName": "models"}, {"claimName": "drafts"}]);
        assert!(validate(&service(spec(both))).is_ok());
        let problems = validate(&service(spec(json!([{"claimName": "other"}])))).unwrap_err();
        let fields: Vec<_> = problems.0.iter().map(|problem| problem.field).collect();
        assert_eq!(fields, ["spec.model.source.pvc", "spec.runtime.speculative.draft.pvc"]);
        assert!(problems.to_string().contains("name the claim models in spec.pod.modelVolumes"), "{problems}");
        let mut source = pvc("models");
        source["sha256"] = Value::Null;
        let pod = json!({"modelVolumes": [{"claimName": "models"}]});
        let problems = validate(&service(json!({"model": {"source": source}, "pod": pod}))).unwrap_err();
        assert_eq!(problems.0[0].field, "spec.model.source.sha256");
    }

    #[test]
    fn a_digest_may_be_left_out_where_the_address_pins_the_file() {
        let source = |uri: String| json!({"model": {"source": {"uri": uri, "sha256": null}}});
        for pinned in [format!("hf://o/r@{}/m.gguf", "0a".repeat(20)), format!("oci://h/m@sha256:{}", "0a".repeat(32))]
        {
            assert!(validate(&service(source(pinned.clone()))).is_ok(), "{pinned}");
        }
        let problems = validate(&service(source("hf://o/r@main/m.gguf".to_owned()))).unwrap_err();
        assert_eq!(problems.0[0].field, "spec.model.source.sha256");
        assert!(problems.to_string().contains("a commit as revision"), "{problems}");
    }

    #[test]
    fn every_wrong_value_is_reported_at_once() {
        let problems = validate(&service(json!({
            "replicas": -1,
            "model": {"source": {"sha256": "abc"}},
            "resources": {"memory": "much", "cpu": "0"},
            "cache": {"sizeLimit": "1Gi"},
            "runtime": {"gpuMemory": "20Gi", "prefixCache": {"memory": "all", "disk": "1024Mi", "ttl": "0s"}, "speculative": {"draft": {"uri": "https://h/d.gguf"}}},
            "scheduling": {"queueTimeout": "never"},
            "api": {"responseStore": {"ttl": "long"}},
            "rollout": {"progressDeadline": "soon", "gates": {"memory": {"headroom": "200%"}, "performance": {"minDecodeRatio": "fast"},
                "shadow": {"samplePercent": 0, "duration": "16m"}},
                "rollback": {"signals": {"errorRate": "much"}}},
        })))
        .unwrap_err();
        let fields: Vec<_> = problems.0.iter().map(|problem| problem.field).collect();
        assert!(problems.any_invalid());
        for field in [
            "spec.replicas",
            "spec.model.source.sha256",
            "spec.resources.memory",
            "spec.resources.cpu",
            "spec.runtime.gpuMemory",
            "spec.runtime.prefixCache.memory",
            "spec.runtime.prefixCache.disk",
            "spec.runtime.prefixCache.ttl",
            "spec.runtime.speculative.draft.sha256",
            "spec.rollout.progressDeadline",
            "spec.scheduling.queueTimeout",
            "spec.api.responseStore",
            "spec.api.responseStore.ttl",
            "spec.rollout.gates.memory.headroom",
            "spec.rollout.gates.performance.minDecodeRatio",
            "spec.rollout.gates.shadow.samplePercent",
            "spec.rollout.rollback.signals",
        ] {
            assert!(fields.contains(&field), "{field} in {problems}");
        }
    }

    #[test]
    fn live_requests_are_compared_within_the_deadline_beside_the_active_model() {
        let rollout = |deadline: &str, strategy: &str| {
            let gates = json!({"drift": {}, "shadow": {"samplePercent": 5, "duration": "16m"}});
            let rollout = json!({"progressDeadline": deadline, "strategy": strategy, "gates": gates});
            let problems = validate(&service(json!({ "rollout": rollout }))).err().map(|problems| problems.0);
            problems.into_iter().flatten().map(|problem| problem.field).collect::<Vec<_>>()
        };
        assert_eq!(rollout("16m", "Auto"), Vec::<&str>::new());
        assert_eq!(rollout("15m", "Auto"), ["spec.rollout.gates.shadow.duration"]);
        assert_eq!(rollout("16m", "BlueGreen"), ["spec.rollout.gates.drift", "spec.rollout.gates.shadow"]);
    }

    #[test]
    fn a_version_is_judged_by_the_objects_that_its_spec_names_each_once() {
        let draft =
            json!({"uri": "https://h/d.gguf", "sha256": "0".repeat(64), "ca": {"configMapRef": {"name": "golden"}}});
        let spec = service(json!({
            "model": {"source": {"secretRef": {"name": "hf"}, "ca": {"configMapRef": {"name": "authorities"}}}},
            "runtime": {"speculative": {"draft": draft}},
            "rollout": {"gates": {"prompts": {"configMapRef": {"name": "golden"}}}},
        }));
        let objects = validate(&spec).unwrap().wanted.objects;
        let named: Vec<_> = objects.iter().map(|one| (one.kind.judged_as(), one.name.as_str())).collect();
        let authorities = ["authorities", "golden"].map(|name| ("Authorities", name));
        assert_eq!(named, [&[("ConfigMap", "golden"), ("Secret", "hf")][..], &authorities].concat());
    }

    #[test]
    fn a_credential_in_an_address_is_refused_and_not_repeated() {
        for uri in [
            "https://me:hush@h/m.gguf",
            "https://h/m.gguf?X-Amz-Signature=hush",
            "https://h/m.gguf?key=hush",
            "https://h/m.gguf#hush",
        ] {
            let problems = validate(&service(json!({"model": {"source": {"uri": uri}}}))).unwrap_err();
            let text = problems.to_string();
            assert!(problems.any_invalid() && text.starts_with("spec.model.source.uri: "), "{text}");
            assert!(text.contains("secretRef") && !text.contains("hush"), "{text}");
        }
    }

    #[test]
    fn a_name_that_no_object_can_have_is_refused_before_anybody_asks_for_it() {
        let secret = |name: &str| json!({"model": {"source": {"secretRef": {"name": name}}}});
        let golden = |name: &str| json!({"rollout": {"gates": {"prompts": {"configMapRef": {"name": name}}}}});
        let draft =
            |name: &str| json!({"uri": "https://h/d.gguf", "sha256": "0".repeat(64), "secretRef": {"name": name}});
        let draft = |name: &str| json!({"runtime": {"speculative": {"draft": draft(name)}}});
        type Named<'a> = &'a dyn Fn(&str) -> Value;
        let ca = |name: &str| json!({"model": {"source": {"ca": {"configMapRef": {"name": name}}}}});
        let cases: [(&str, Named); 4] = [
            ("spec.model.source.ca.configMapRef.name", &ca),
            ("spec.model.source.secretRef.name", &secret),
            ("spec.rollout.gates.prompts.configMapRef.name", &golden),
            ("spec.runtime.speculative.draft.secretRef.name", &draft),
        ];
        for (field, patch) in cases {
            assert!(validate(&service(patch("hf.token-1"))).is_ok(), "{field}");
            for name in
                ["", "HF", "my secret", "a/b", "../x", "-a", "a..b", "a_b", "a+Secret:b=absent", &"a".repeat(254)]
            {
                let problems = validate(&service(patch(name))).unwrap_err();
                assert!(problems.any_invalid() && problems.0[0].field == field, "{name:?}: {problems}");
            }
        }
    }

    #[test]
    fn a_version_keeps_the_name_that_it_has() {
        let spelled = |memory: &str| json!({"runtime": {"prefixCache": {"memory": memory}}});
        let wanted = |memory: &str| validate(&service(spelled(memory))).unwrap().wanted;
        let other = validate(&service(json!({}))).unwrap().wanted;
        assert_eq!(wanted("1Gi").name, wanted("1024Mi").name);
        let named = |name: &str, of: &WantedVersion| NamedVersion {
            name: name.to_owned(),
            model: of.model.clone(),
            runtime: of.runtime.clone(),
        };
        let stamped = |name: &str, of: &WantedVersion| StampedVersion {
            version: named(name, of),
            revision: 1,
            is_refused: false,
        };
        // As two releases and two spellings named it.
        let stamped =
            [stamped("chat-b", &wanted("1Gi")), stamped("chat-c", &wanted("1024Mi")), stamped("chat-a", &other)];
        let name = |state: &RolloutState| {
            let mut wanted = wanted("1024Mi");
            wanted.named_as(state, &stamped);
            wanted.name
        };
        let nothing = RolloutState::default();
        assert_eq!(name(&nothing), "chat-b");
        assert_eq!(name(&RolloutState { active: Some("chat-c".to_owned()), ..nothing.clone() }), "chat-c");
        assert_eq!(name(&RolloutState { active: Some("chat-a".to_owned()), ..nothing.clone() }), "chat-b");
        // One that nobody stamped any more, and that the status still describes.
        let versions = vec![named("chat-z", &wanted("1Gi"))];
        assert_eq!(name(&RolloutState { active: Some("chat-z".to_owned()), versions, ..nothing.clone() }), "chat-z");
        let mut new = wanted("2Gi");
        let own = new.name.clone();
        new.named_as(&nothing, &stamped);
        assert_eq!(new.name, own);
    }

    #[test]
    fn prompts_on_disk_need_a_limit_of_the_cache_that_they_are_a_part_of() {
        let disk = |limit: Value| json!({"runtime": {"prefixCache": {"disk": "1Gi"}}, "cache": {"sizeLimit": limit}});
        let problems = validate(&service(disk(Value::Null))).unwrap_err().to_string();
        assert!(problems.contains("spec.runtime.prefixCache.disk: it is a part of spec.cache.sizeLimit"), "{problems}");
        assert!(validate(&service(disk(json!("2Gi")))).is_ok());
    }

    #[test]
    fn a_retry_is_another_judgement_of_the_same_version() {
        let first = validate(&service(json!({}))).unwrap();
        let mut again = service(json!({}));
        again.annotations_mut().insert(RETRY_ANNOTATION.to_owned(), "1".to_owned());
        let again = validate(&again).unwrap();
        assert_eq!(first.wanted.name, again.wanted.name);
        assert_ne!(first.wanted.judged, again.wanted.judged);
    }
}
