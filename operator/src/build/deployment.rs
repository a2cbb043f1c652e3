//! The pods. Their template holds no model, and it is kept as it was first built while its inputs stay the same.
//!
//! An operator of another version would build another template (another server image, another probe) and so restart
//! every pod of every service on its own upgrade. Therefore the template is stored in an annotation of the Deployment
//! together with the hash of its inputs from the spec; a template with the same inputs is applied again as it is. The
//! new one comes with the next change of those inputs, the annotation `gantry.dev/restart` among them.

use std::collections::BTreeMap;

use gantry_crds::{InferenceService, SIDE_LABEL, status::Side};
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment},
        core::v1::{
            Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource, HTTPGetAction,
            ObjectFieldSelector, PodSpec, PodTemplateSpec, Probe, ResourceRequirements, SecurityContext, Volume,
            VolumeMount,
        },
    },
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use kube::ResourceExt;
use serde_json::Value;

use super::{
    Inputs, METRICS_PORT, METRICS_PORT_NAME, NewPods, PORT_NAME, SERVER_CONTAINER, SERVER_PORT, account, api,
    deployment_name, hash, identity_name, labels, metadata, pod, pod_labels, selector, side_labels,
};
use crate::{
    limits::{DISK_BESIDE_CACHE_BYTES, REPLICA_SETS_KEPT, TERMINATION_MARGIN, TMP_SIZE},
    validate::{PodSettings, RESTART_ANNOTATION},
};

/// Annotation with the pod template as JSON.
const TEMPLATE_ANNOTATION: &str = "gantry.dev/pod-template";
/// Annotation with the hash of the template's inputs from the spec.
const INPUTS_ANNOTATION: &str = "gantry.dev/pod-template-inputs";
/// Annotation of the Deployment with the UID of the account that its pods were made with; of the pods, once that is another one.
const ACCOUNT_ANNOTATION: &str = "gantry.dev/pod-account";
/// Label of pods that tells templates apart.
const TEMPLATE_LABEL: &str = "gantry.dev/pod-template";
/// Label of pods that tells what they have for a model apart: a version is judged by pods that have what the spec asks for.
const RESOURCES_LABEL: &str = "gantry.dev/pod-resources";
const CACHE_DIR: &str = "/var/cache/gantry";

/// A pod template as it was applied before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTemplate {
    json: String,
    inputs: String,
    /// UID of the account that pods were made with, once it was known.
    account: Option<String>,
}

impl StoredTemplate {
    /// Reads it from a Deployment's annotations.
    #[must_use]
    pub fn of(annotations: &BTreeMap<String, String>) -> Option<Self> {
        Some(Self {
            json: annotations.get(TEMPLATE_ANNOTATION)?.clone(),
            inputs: annotations.get(INPUTS_ANNOTATION)?.clone(),
            account: annotations.get(ACCOUNT_ANNOTATION).cloned(),
        })
    }

    /// The same for the account that there is now. Tokens of one that was deleted are of no use, whoever has its name by now: its pods
    /// hear nothing any more, and are replaced for a word in their template.
    fn with_account(self, name: &str, uid: Option<&str>) -> Self {
        let Some(uid) = uid else { return self };
        let is_another = self.account.as_deref().is_some_and(|noted| noted != uid);
        let json = is_another.then(|| self.marked(name, uid)).flatten();
        Self { json: json.unwrap_or(self.json), account: Some(uid.to_owned()), ..self }
    }

    /// The template with the account's UID, where its pods have that account. What is not known of it stays.
    fn marked(&self, name: &str, uid: &str) -> Option<String> {
        let mut template: Value = serde_json::from_str(&self.json).ok()?;
        if template.pointer("/spec/serviceAccountName").and_then(Value::as_str) != Some(name) {
            return None;
        }
        template["metadata"]["annotations"][ACCOUNT_ANNOTATION] = uid.into();
        Some(template.to_string())
    }

    fn template(&self) -> Option<PodTemplateSpec> {
        serde_json::from_str(&self.json).ok()
    }
}

/// Which template a pod is of. Those that were made before templates had these labels have none, all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TemplateId {
    template: Option<String>,
    resources: Option<String>,
}

impl TemplateId {
    /// Reads it from the labels of a pod or of a template.
    #[must_use]
    pub fn of(labels: &BTreeMap<String, String>) -> Self {
        Self { template: labels.get(TEMPLATE_LABEL).cloned(), resources: labels.get(RESOURCES_LABEL).cloned() }
    }

    /// Whether pods of both have the same for a model: one that was restarted, or is given more time to end, judges no
    /// otherwise than before. Of a pod without that label nothing is known but its template.
    #[must_use]
    pub fn has_resources_of(&self, other: &Self) -> bool {
        match (&self.resources, &other.resources) {
            (Some(of_this), Some(of_other)) => of_this == of_other,
            _ => self.template == other.template,
        }
    }

    /// The template that pods of a side with these settings are to be of.
    #[must_use]
    pub fn newest(pod: &PodSettings, side: Side, stored: Option<&StoredTemplate>) -> Self {
        let inputs = inputs_hash(pod, side);
        let kept = stored.filter(|stored| stored.inputs == inputs).map(Self::of_stored);
        let template = kept.map_or(Some(inputs), |kept| kept.template);
        Self { template, resources: Some(pod.resources_hash()) }
    }

    /// The template as it was applied before.
    #[must_use]
    pub fn of_stored(stored: &StoredTemplate) -> Self {
        let labels = stored.template().and_then(|template| template.metadata?.labels);
        Self::of(&labels.unwrap_or_default())
    }
}

/// The Deployment of a side.
pub fn deployment(inputs: &Inputs, side: Side) -> Deployment {
    let name = inputs.owner.name_any();
    let (template, stored) = template(inputs, side);
    let mut metadata = metadata(inputs.owner, deployment_name(&name, side));
    let (sides, is_active) = (inputs.sides, side == inputs.sides.active);
    let is_way_back = !is_active && sides.other_replicas > 0 && sides.state(side).is_kept;
    // One that was made before there were two goes on selecting all: its ReplicaSets tell theirs by the template.
    let selected =
        if sides.state(side).selects_side == Some(false) { pod_labels(&name) } else { side_labels(&name, side) };
    let account = stored.account.map(|uid| (ACCOUNT_ANNOTATION, uid));
    let annotations =
        [(TEMPLATE_ANNOTATION, stored.json), (INPUTS_ANNOTATION, stored.inputs)].into_iter().chain(account);
    metadata.annotations = Some(annotations.map(|(key, value)| (key.to_owned(), value)).collect());
    Deployment {
        metadata,
        spec: Some(DeploymentSpec {
            replicas: Some(if is_active { inputs.spec.replicas } else { sides.other_replicas }),
            // A change of its pods that had begun would take those away that the rollout may go back to.
            paused: is_way_back.then_some(true),
            revision_history_limit: Some(REPLICA_SETS_KEPT),
            selector: selector(selected),
            // Of one that is paused as many pods may stay as its change may have, so that this is what it was while it answered.
            strategy: Some(strategy(&inputs.spec.pod, is_way_back || (is_active && inputs.answers))),
            template,
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

/// With a GPU there is none to spare for an extra pod, so the old one goes first. Pods of which none answers all go at once:
/// a model may need what only the new ones have, and none of them would ever be ready for the others to follow.
fn strategy(pod: &PodSettings, answers: bool) -> DeploymentStrategy {
    let (surge, unavailable) = match (answers, pod.gpu.is_some()) {
        (false, _) => (0, IntOrString::String("100%".to_owned())),
        (true, true) => (0, IntOrString::Int(1)),
        (true, false) => (1, IntOrString::Int(0)),
    };
    DeploymentStrategy {
        type_: Some("RollingUpdate".to_owned()),
        rolling_update: Some(RollingUpdateDeployment {
            max_surge: Some(IntOrString::Int(surge)),
            max_unavailable: Some(unavailable),
        }),
    }
}

/// The stored template while its inputs are the same or the side is kept as it is, else a new one.
fn template(inputs: &Inputs, side: Side) -> (PodTemplateSpec, StoredTemplate) {
    let wanted_inputs = inputs_hash(&inputs.spec.pod, side);
    let of_side = inputs.sides.state(side);
    let unchanged = of_side.stored.as_ref().filter(|stored| {
        // One that was made before there were sides would have pods that no Service finds.
        stored.inputs == wanted_inputs || (of_side.is_kept && stored.json.contains(SIDE_LABEL))
    });
    let unchanged =
        unchanged.map(|stored| stored.clone().with_account(&identity_name(inputs.owner), inputs.account_uid));
    if let Some(stored) = unchanged
        && let Some(template) = stored.template()
    {
        return (template, stored);
    }
    let template = new_template(inputs, side, &wanted_inputs);
    let json = serde_json::to_string(&template).unwrap_or_default();
    (template, StoredTemplate { json, inputs: wanted_inputs, account: inputs.account_uid.map(str::to_owned) })
}

/// Hash of what the spec says about pods. The server image and the operator's version are left out on purpose.
fn inputs_hash(pod: &PodSettings, side: Side) -> String {
    let mut fields = fields_for_a_model(pod);
    fields.insert("side", side.label().to_owned());
    fields.insert("drainTimeoutNanos", pod.drain_timeout.as_nanos().to_string());
    fields.extend(pod.restart.clone().map(|restart| ("restart", restart)));
    fields.extend(pod.api.fields());
    fields.extend(pod.spec.canonical().map(|set| ("pod", set)));
    hash(&fields)
}

/// What a pod has for a model. Only what the spec sets is in it, by name, so that a release that adds a field restarts no
/// pod of a service that does not use it; quantities are in it by their value.
fn fields_for_a_model(pod: &PodSettings) -> BTreeMap<&'static str, String> {
    let value = |quantity: &Quantity| match gantry_crds::quantity::parse(&quantity.0) {
        // Kubernetes knows nothing finer of these.
        Some(value) => format!("{value:.3}"),
        None => quantity.0.clone(),
    };
    let fields = [
        ("cpu", pod.cpu.as_ref().map(value)),
        ("memory", pod.memory.as_ref().map(value)),
        ("gpu", pod.gpu.as_ref().map(|(resource, count)| format!("{count} {resource}"))),
        ("cacheLimit", pod.cache_limit.as_ref().map(value)),
        ("podForAModel", pod.spec.for_a_model()),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

impl PodSettings {
    /// Hash of what a pod has for a model.
    #[must_use]
    pub fn resources_hash(&self) -> String {
        hash(&fields_for_a_model(self))
    }
}

fn new_template(inputs: &Inputs, side: Side, id: &str) -> PodTemplateSpec {
    let name = inputs.owner.name_any();
    let pod = &inputs.spec.pod;
    let asked = &pod.spec;
    let restart = pod.restart.clone().map(|value| (RESTART_ANNOTATION.to_owned(), value));
    let mut labels = labels(&name);
    labels.insert(TEMPLATE_LABEL.to_owned(), id.to_owned());
    labels.insert(SIDE_LABEL.to_owned(), side.label().to_owned());
    labels.insert(RESOURCES_LABEL.to_owned(), pod.resources_hash());
    let grace = drain_seconds(pod) + TERMINATION_MARGIN.as_secs();
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(pod::labels(asked, labels)),
            annotations: pod::annotations(asked, restart),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            service_account_name: Some(account(inputs).into_owned()),
            automount_service_account_token: Some(true),
            enable_service_links: Some(false),
            termination_grace_period_seconds: Some(i64::try_from(grace).unwrap_or(i64::MAX)),
            security_context: Some(pod::security_context(asked)),
            node_selector: pod::some(&asked.node_selector),
            tolerations: pod::some(&asked.tolerations),
            affinity: asked.affinity.clone(),
            topology_spread_constraints: Some(pod::spread(asked, side_labels(&name, side))),
            priority_class_name: asked.priority_class_name.clone(),
            runtime_class_name: asked.runtime_class_name.clone(),
            image_pull_secrets: pod::image_pull_secrets(asked),
            containers: vec![container(inputs.owner, pod, side, inputs.new_pods)],
            volumes: Some(volumes(pod)),
            ..PodSpec::default()
        }),
    }
}

fn empty_dir(name: &str, size_limit: Option<Quantity>) -> Volume {
    Volume {
        name: name.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource { medium: None, size_limit }),
        ..Volume::default()
    }
}

fn volumes(pod: &PodSettings) -> Vec<Volume> {
    let mut volumes =
        vec![empty_dir("cache", Some(cache_limit(pod))), empty_dir("tmp", Some(Quantity(TMP_SIZE.to_owned())))];
    volumes.extend(api::volumes(&pod.api));
    volumes.extend(pod::volumes(&pod.spec));
    volumes
}

/// Whoever wrote the limit reads it as it was written.
fn cache_limit(pod: &PodSettings) -> Quantity {
    pod.cache_limit.clone().unwrap_or_else(|| Quantity(pod.cache_bytes.to_string()))
}

fn environment(owner: &InferenceService, pod: &PodSettings, side: Side, new_pods: &NewPods) -> Vec<EnvVar> {
    let plain = |name: &str, value: String| EnvVar { name: name.to_owned(), value: Some(value), ..EnvVar::default() };
    let mut environment = vec![
        plain("GANTRY_SERVICE", owner.name_any()),
        from_field("GANTRY_NAMESPACE", "metadata.namespace"),
        from_field("GANTRY_POD", "metadata.name"),
        plain("GANTRY_DRAIN_TIMEOUT", drain_seconds(pod).to_string()),
        plain("GANTRY_HTTP_METRICS_PORT", METRICS_PORT.to_string()),
        // The volume's size is the template's, and the spec may say another one by the time that it is read.
        plain("GANTRY_CACHE_BYTES", pod.cache_bytes.to_string()),
        plain("GANTRY_POD_RESOURCES", pod.resources_hash()),
        plain("GANTRY_SIDE", side.label().to_owned()),
    ];
    if !new_pods.private_sources {
        environment.push(plain("GANTRY_PRIVATE_SOURCES", "false".to_owned()));
    }
    environment.extend(api::environment(&pod.api));
    environment.extend(pod::environment(&pod.spec));
    environment
}

fn container(owner: &InferenceService, pod: &PodSettings, side: Side, new_pods: &NewPods) -> Container {
    let mount = |name: &str, path: &str| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        ..VolumeMount::default()
    };
    let (mut args, mut mounts) = (vec!["pod".to_owned()], vec![mount("cache", CACHE_DIR), mount("tmp", "/tmp")]);
    args.extend(api::arguments(&pod.api));
    mounts.extend(api::mounts(&pod.api));
    mounts.extend(pod::mounts(&pod.spec));
    Container {
        name: SERVER_CONTAINER.to_owned(),
        image: Some(new_pods.image.clone()),
        image_pull_policy: Some("IfNotPresent".to_owned()),
        args: Some(args),
        env: Some(environment(owner, pod, side, new_pods)),
        ports: Some(vec![port(PORT_NAME, SERVER_PORT), port(METRICS_PORT_NAME, METRICS_PORT)]),
        // The process must be up within a minute; a model that loads shows in readiness alone, however long it takes.
        startup_probe: Some(probe("/healthz", 1, 2, 60)),
        liveness_probe: Some(probe("/healthz", 10, 5, 3)),
        readiness_probe: Some(probe("/readyz", 2, 5, 2)),
        resources: Some(resources(pod)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            run_as_non_root: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            seccomp_profile: Some(pod::seccomp_profile(&pod.spec)),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

fn port(name: &str, number: i32) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: number,
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// The drain timeout as the server takes it: in whole seconds, and none of it lost.
fn drain_seconds(pod: &PodSettings) -> u64 {
    pod.drain_timeout.as_secs() + u64::from(pod.drain_timeout.subsec_nanos() > 0)
}

fn from_field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: path.to_owned(), api_version: Some("v1".to_owned()) }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    }
}

/// At the port where no crowd of clients keeps the server from answering.
fn probe(path: &str, period_seconds: i32, timeout_seconds: i32, failure_threshold: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(METRICS_PORT_NAME.to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_seconds),
        timeout_seconds: Some(timeout_seconds),
        failure_threshold: Some(failure_threshold),
        ..Probe::default()
    }
}

/// Memory is request and limit, so that the memory gate has a firm figure; CPUs are a request only, because a limit
/// would stall decoding in the middle of a token. Disk is request and limit: models that a node has no room for would fill
/// it, and the kubelet would evict one pod after the other.
fn resources(pod: &PodSettings) -> ResourceRequirements {
    let mut requests = BTreeMap::new();
    let mut limits = BTreeMap::new();
    if let Some(cpu) = &pod.cpu {
        requests.insert("cpu".to_owned(), cpu.clone());
    }
    if let Some(memory) = &pod.memory {
        requests.insert("memory".to_owned(), memory.clone());
        limits.insert("memory".to_owned(), memory.clone());
    }
    let beside = DISK_BESIDE_CACHE_BYTES.saturating_add(pod::disk_bytes(&pod.spec));
    let disk = (pod.cache_bytes.saturating_add(beside)).div_ceil(1 << 20);
    for side in [&mut requests, &mut limits] {
        side.insert("ephemeral-storage".to_owned(), Quantity(format!("{disk}Mi")));
    }
    if let Some((resource, count)) = &pod.gpu {
        limits.insert(resource.clone(), Quantity(count.to_string()));
    }
    let some = |map: BTreeMap<String, Quantity>| (!map.is_empty()).then_some(map);
    ResourceRequirements { requests: some(requests), limits: some(limits), claims: None }
}
