//! What a cluster needs of pods: where they run, what they are called, what is mounted into them and who they are.
//!
//! Fields have Kubernetes' names and, where they can say nothing that a serving pod may not have, Kubernetes' types, without
//! the descriptions of their fields (`kubectl explain pod.spec` has them) and with a limit on each list. The others are
//! written out here, so that what the Pod Security Standard `restricted` forbids cannot be said: no hostPath, no privilege, no
//! root. Absent: what of a pod is Gantry's, its image, ports, probes and resources.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, CSIVolumeSource, ConfigMapKeySelector, ConfigMapVolumeSource, DownwardAPIVolumeSource,
    EmptyDirVolumeSource, ObjectFieldSelector, PersistentVolumeClaimSpec, PersistentVolumeClaimVolumeSource,
    ProjectedVolumeSource, SecretKeySelector, SecretVolumeSource, Toleration, TopologySpreadConstraint,
};
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::inference_service::LocalName;

/// The most entries of any list or map, where none of the limits below is less.
pub const MAX_POD_ENTRIES: u32 = 64;
/// The longest text in one of Kubernetes' own types, in characters.
pub const MAX_POD_TEXT_CHARS: u32 = 2048;
/// The longest value of a variable, in characters.
pub const MAX_ENV_VALUE_CHARS: u32 = 4096;
/// The most volumes, and the most mounts of them.
pub const MAX_POD_VOLUMES: u32 = 32;
/// The most claims that models may be on.
pub const MAX_MODEL_VOLUMES: u32 = 16;
/// The most bytes of it all as JSON: the Deployment has it twice, once in an annotation, and all annotations of an object may have
/// 256 KiB together.
pub const MAX_POD_SPEC_BYTES: usize = 64 << 10;

/// Where the claims of `modelVolumes` are mounted, each in a folder of its name.
pub const MODEL_VOLUMES_DIR: &str = "/var/lib/gantry/models";
/// What begins the names of the server's own variables.
pub const OWN_VARIABLES: &str = "GANTRY_";
/// Variables that `spec.api.responseStore.s3` sets.
pub const STORE_VARIABLES: [&str; 6] =
    ["AWS_ENDPOINT", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];
/// Names of volumes that pods have, beside all that begin with [`OWN_VOLUMES`].
pub const OWN_VOLUME_NAMES: [&str; 4] = ["api-keys", "cache", "responses", "tmp"];
/// What begins the names of volumes that are kept for Gantry.
pub const OWN_VOLUMES: &str = "gantry-";
/// What begins the keys of labels and annotations that are kept for Gantry.
pub const OWN_KEYS: &str = "gantry.dev/";
/// Labels by which pods are selected and found, beside all that begin with [`OWN_KEYS`].
pub const OWN_LABELS: [&str; 4] =
    ["app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/name", "pod-template-hash"];
/// Folders with something that the server needs: nothing is mounted in, over or above them.
pub const OWN_FOLDERS: [&str; 13] = [
    "/bin",
    "/dev",
    "/etc/gantry",
    "/etc/ssl",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/tmp",
    "/usr",
    "/var/cache/gantry",
    "/var/lib/gantry",
    "/var/run/secrets",
];

/// The fields of [`PodSpec`] that a model is judged by: another node may have another GPU, another runtime may bring its driver, a
/// variable may change how llama.cpp computes, and a claim holds files, which not every user may read. A version that comes with a
/// change of these is meant for pods that have it, and a rejection ends when they change. Of the affinity it is the one
/// to nodes. The others only say who may be where, what a pod is called, and what else is mounted into it.
const FOR_A_MODEL: [&str; 6] =
    ["affinity", "env", "modelVolumes", "nodeSelector", "runtimeClassName", "securityContext"];

/// What a cluster needs of pods. A change replaces the pods one after the other; it makes no new version.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.volumeMounts) || self.volumeMounts.all(mount, has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))").message("spec.pod.volumeMounts: a name is that of one of spec.pod.volumes; add the volume, or correct the name")
)]
pub struct PodSpec {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "bounded::<BTreeMap<String, String>>")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints of nodes that pods may run on all the same, as in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "bounded::<Vec<Toleration>>")]
    pub tolerations: Vec<Toleration>,
    /// On which nodes, and beside which other pods, as in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<Affinity>")]
    pub affinity: Option<Affinity>,
    /// How pods are spread, as in a pod; one without labelSelector counts the pods of this service. If left out they go to
    /// different nodes where that is possible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "bounded::<Vec<TopologySpreadConstraint>>")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// PriorityClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new(OBJECT_NAME).message("spec.pod.priorityClassName: use the name of a PriorityClass: lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"))]
    pub priority_class_name: Option<String>,
    /// RuntimeClass of the pods, such as nvidia.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new(OBJECT_NAME).message("spec.pod.runtimeClassName: use the name of a RuntimeClass: lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"))]
    pub runtime_class_name: Option<String>,
    /// Secrets with the credentials for the registry of the server's image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_ENTRIES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_owned()]))]
    pub image_pull_secrets: Vec<LocalName>,
    /// Labels of the pods beside Gantry's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "bounded::<BTreeMap<String, String>>")]
    #[x_kube(
        validation = Rule::new(format!("self.all(key, !(key in [{}]) && !key.startsWith('{OWN_KEYS}'))", quoted(&OWN_LABELS))).message("spec.pod.labels: app.kubernetes.io/name, /instance and /managed-by, pod-template-hash and all of gantry.dev/ are set by others, who select pods by them: use another key"),
        validation = Rule::new("self.all(key, self[key].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$'))").message("spec.pod.labels: use values of at most 63 letters, digits and -_., beginning and ending with a letter or digit")
    )]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pods beside Gantry's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "bounded::<BTreeMap<String, String>>")]
    #[x_kube(validation = Rule::new(format!("self.all(key, !key.startsWith('{OWN_KEYS}'))")).message("spec.pod.annotations: gantry.dev/ is Gantry's: use another key; to restart pods, annotate the InferenceService with gantry.dev/restart"))]
    pub annotations: BTreeMap<String, String>,
    /// Variables of the server beside its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_ENTRIES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_owned()]))]
    pub env: Vec<PodVariable>,
    /// Volumes beside the server's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_VOLUMES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".to_owned()]))]
    pub volumes: Vec<PodVolume>,
    /// Where these are mounted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_VOLUMES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["mountPath".to_owned()]))]
    pub volume_mounts: Vec<PodVolumeMount>,
    /// PersistentVolumeClaims of the same namespace that models may be on (spec.model.source.pvc): pods have them mounted, to
    /// read, so that another model on one of them restarts nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_MODEL_VOLUMES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["claimName".to_owned()]))]
    pub model_volumes: Vec<ModelVolume>,
    /// ServiceAccount of the pods, instead of the one that Gantry makes. It gets the rights of the pods' agents and keeps those
    /// that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new(OBJECT_NAME).message("spec.pod.serviceAccountName: use the name of a ServiceAccount: lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"))]
    pub service_account_name: Option<String>,
    /// As whom the server runs, within the Pod Security Standard restricted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_context: Option<PodSecurity>,
}

/// What the API server says of the name of an object.
const OBJECT_NAME: &str = "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')";

/// A variable: exactly one of `value` and `valueFrom`, or neither for an empty one.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.value) || !has(self.valueFrom)").message("spec.pod.env: give at most one of value and valueFrom"))]
pub struct PodVariable {
    /// Its name.
    #[schemars(length(max = 128))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_][A-Za-z0-9_.-]*$')").message("spec.pod.env: use names of letters, digits and _.-, beginning with a letter or _"),
        validation = Rule::new(format!("!self.startsWith('{OWN_VARIABLES}')")).message("spec.pod.env: GANTRY_ begins the names of what the operator sets: use the field of the spec that it comes from")
    )]
    pub name: String,
    /// Its value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_ENV_VALUE_CHARS))]
    pub value: Option<String>,
    /// Where its value comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<PodVariableSource>,
}

/// Where a variable's value comes from: exactly one of these.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(given, given).size() == 1").message("spec.pod.env: valueFrom has exactly one of secretKeyRef, configMapKeyRef and fieldRef"))]
pub struct PodVariableSource {
    /// A key of a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<SecretKeySelector>")]
    pub secret_key_ref: Option<SecretKeySelector>,
    /// A key of a ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<ConfigMapKeySelector>")]
    pub config_map_key_ref: Option<ConfigMapKeySelector>,
    /// A field of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<ObjectFieldSelector>")]
    pub field_ref: Option<ObjectFieldSelector>,
}

/// A volume: exactly one of these, as in a pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.configMap), has(self.secret), has(self.emptyDir), has(self.projected), has(self.persistentVolumeClaim), has(self.csi), has(self.ephemeral), has(self.downwardAPI)].filter(given, given).size() == 1").message("spec.pod.volumes: a volume is exactly one of configMap, secret, emptyDir, projected, persistentVolumeClaim, csi, ephemeral and downwardAPI; the Pod Security Standard restricted allows no other"))]
pub struct PodVolume {
    /// Its name.
    #[schemars(length(max = 63))]
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("spec.pod.volumes: use names of at most 63 lower-case letters, digits and dashes, beginning and ending with a letter or digit"),
        validation = Rule::new(format!("!(self in [{}]) && !self.startsWith('{OWN_VOLUMES}')", quoted(&OWN_VOLUME_NAMES))).message("spec.pod.volumes: api-keys, cache, responses, tmp and all that begin with gantry- are the server's own: use another name")
    )]
    pub name: String,
    /// The keys of a ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<ConfigMapVolumeSource>")]
    pub config_map: Option<ConfigMapVolumeSource>,
    /// The keys of a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<SecretVolumeSource>")]
    pub secret: Option<SecretVolumeSource>,
    /// An empty folder. Unless its medium is Memory, its sizeLimit is added to the disk that the pod asks for; what is written
    /// to one without is taken from that of the models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<EmptyDirVolumeSource>")]
    pub empty_dir: Option<EmptyDirVolumeSource>,
    /// Several of these in one folder, and tokens of the ServiceAccount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<ProjectedVolumeSource>")]
    pub projected: Option<ProjectedVolumeSource>,
    /// A PersistentVolumeClaim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<PersistentVolumeClaimVolumeSource>")]
    pub persistent_volume_claim: Option<PersistentVolumeClaimVolumeSource>,
    /// A volume of a CSI driver that lives as long as the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<CSIVolumeSource>")]
    pub csi: Option<CSIVolumeSource>,
    /// A PersistentVolumeClaim that is made for each pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ephemeral: Option<EphemeralVolume>,
    /// Fields of the pod.
    #[serde(default, rename = "downwardAPI", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bounded::<DownwardAPIVolumeSource>")]
    pub downward_api: Option<DownwardAPIVolumeSource>,
}

/// A claim that is made for each pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EphemeralVolume {
    /// What it is made from.
    pub volume_claim_template: ClaimTemplate,
}

/// What a claim is made from.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimTemplate {
    /// What the claim is called beside its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ClaimMetadata>,
    /// The spec of the claim.
    #[schemars(schema_with = "bounded::<PersistentVolumeClaimSpec>")]
    pub spec: PersistentVolumeClaimSpec,
}

/// Labels and annotations of a claim.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClaimMetadata {
    /// Its labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "bounded::<BTreeMap<String, String>>")]
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "bounded::<BTreeMap<String, String>>")]
    pub annotations: BTreeMap<String, String>,
}

/// A place where a volume is mounted.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodVolumeMount {
    /// Name of the volume.
    #[schemars(length(max = 63))]
    pub name: String,
    /// Folder, or file with a subPath, in the container.
    #[schemars(length(max = 256))]
    #[x_kube(
        validation = Rule::new("self.matches('^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$')").message("spec.pod.volumeMounts.mountPath: use an absolute path of letters, digits and ._-, none of whose names begins with a dot, without a / at its end"),
        validation = Rule::new(format!("![{}].exists(own, (self + '/').startsWith(own + '/') || (own + '/').startsWith(self + '/'))", quoted(&OWN_FOLDERS))).message("spec.pod.volumeMounts.mountPath: it would hide what the server needs there; use another folder, such as /mnt/NAME")
    )]
    pub mount_path: String,
    /// Path in the volume that is mounted instead of its root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new("self.size() > 0 && !self.startsWith('/') && !('/' + self + '/').contains('/../')").message("spec.pod.volumeMounts.subPath: use a relative path without .."))]
    pub sub_path: Option<String>,
    /// Whether nothing may be written there.
    // Not serialised when false: pods are known by what is set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// A claim that models may be on.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelVolume {
    /// Name of the claim.
    #[schemars(length(max = 253))]
    #[x_kube(validation = Rule::new(OBJECT_NAME).message("spec.pod.modelVolumes.claimName: use the name of a PersistentVolumeClaim: lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"))]
    pub claim_name: String,
}

/// As whom the server runs.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSecurity {
    /// User, never root. 65532 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 2147483647").message("spec.pod.securityContext.runAsUser: use a number from 1 to 2147483647: the server does not run as root"))]
    pub run_as_user: Option<i64>,
    /// Group. 65532 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 2147483647").message("spec.pod.securityContext.runAsGroup: use a number from 0 to 2147483647"))]
    pub run_as_group: Option<i64>,
    /// Group of the pod's volumes. 65532 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 2147483647").message("spec.pod.securityContext.fsGroup: use a number from 0 to 2147483647"))]
    pub fs_group: Option<i64>,
    /// When the group of a volume's files is changed: at each start, or, with OnRootMismatch, where its root has another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_group_change_policy: Option<FsGroupChangePolicy>,
    /// Further groups, such as that of the files on a volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_POD_ENTRIES))]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = Rule::new("self.all(group, group >= 0 && group <= 2147483647)").message("spec.pod.securityContext.supplementalGroups: use numbers from 0 to 2147483647")
    )]
    pub supplemental_groups: Vec<i64>,
    /// Which system calls it may make. RuntimeDefault if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp_profile: Option<Seccomp>,
}

/// When the group of a volume's files is changed.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FsGroupChangePolicy {
    /// At each start.
    Always,
    /// Where its root has another.
    OnRootMismatch,
}

impl FsGroupChangePolicy {
    /// The name as it stands in YAML.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::OnRootMismatch => "OnRootMismatch",
        }
    }
}

/// Which system calls a process may make.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.localhostProfile) == (self.type == 'Localhost')").message("spec.pod.securityContext.seccompProfile: give localhostProfile with type Localhost, and with no other"))]
pub struct Seccomp {
    /// Whose profile.
    #[serde(rename = "type")]
    pub kind: SeccompKind,
    /// Path of the profile on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub localhost_profile: Option<String>,
}

/// Whose profile of system calls.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeccompKind {
    /// The container runtime's.
    RuntimeDefault,
    /// A file on the node.
    Localhost,
}

impl SeccompKind {
    /// The name as it stands in YAML.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RuntimeDefault => "RuntimeDefault",
            Self::Localhost => "Localhost",
        }
    }
}

impl PodSpec {
    /// What is set, as JSON with its keys in the order of their letters; `None` where nothing is. Pods are known by it: what is
    /// not set is not in it, so that a release that adds a field restarts no pod of a service that does not use it.
    #[must_use]
    pub fn canonical(&self) -> Option<String> {
        text(self.fields())
    }

    /// The same of what a model is judged by.
    #[must_use]
    pub fn for_a_model(&self) -> Option<String> {
        let mut fields = self.fields();
        fields.retain(|field, _| FOR_A_MODEL.contains(&field.as_str()));
        if let Some(affinity) = fields.get_mut("affinity").and_then(Value::as_object_mut) {
            affinity.retain(|to, _| to == "nodeAffinity");
        }
        text(fields)
    }

    fn fields(&self) -> Map<String, Value> {
        // These types serialise without failing: no maps with other keys than strings, no foreign code.
        let Ok(Value::Object(mut fields)) = serde_json::to_value(self) else { return Map::new() };
        fields.values_mut().for_each(Value::sort_all_objects);
        fields.sort_keys();
        fields
    }

    /// Whether pods have this claim for models.
    #[must_use]
    pub fn has_model_volume(&self, claim: &str) -> bool {
        self.model_volumes.iter().any(|volume| volume.claim_name == claim)
    }
}

/// An affinity to nothing is none.
fn text(mut fields: Map<String, Value>) -> Option<String> {
    fields.retain(|field, value| field != "affinity" || value.as_object().is_some_and(|object| !object.is_empty()));
    (!fields.is_empty()).then(|| Value::Object(fields).to_string())
}

/// Names as a list in CEL.
fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
}

/// Names of variables as a list in CEL, for a rule of the whole spec.
pub(crate) fn store_variables() -> String {
    quoted(&STORE_VARIABLES)
}

/// The schema of one of Kubernetes' own types without its descriptions, which would be most of the CRD, and with a limit on each
/// list, map and text.
fn bounded<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = T::json_schema(generator).to_value();
    bound(&mut schema);
    Schema::try_from(schema).unwrap_or_default()
}

fn bound(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    object.remove("description");
    let limit = match object.get("type").and_then(Value::as_str) {
        Some("array") => Some(("maxItems", MAX_POD_ENTRIES)),
        Some("string") => Some(("maxLength", MAX_POD_TEXT_CHARS)),
        Some("object") if object.contains_key("additionalProperties") => Some(("maxProperties", MAX_POD_ENTRIES)),
        _ => None,
    };
    if let Some((keyword, limit)) = limit {
        object.entry(keyword).or_insert_with(|| limit.into());
    }
    for (keyword, inner) in object {
        match keyword.as_str() {
            "properties" => inner.as_object_mut().into_iter().flat_map(|all| all.values_mut()).for_each(bound),
            "items" | "additionalProperties" => bound(inner),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn spec(value: Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn what_is_set_is_known_by_its_keys_and_not_by_their_order() {
        assert_eq!((PodSpec::default().canonical(), PodSpec::default().for_a_model()), (None, None));
        assert_eq!(spec(json!({"tolerations": [], "labels": {}, "affinity": {}})).canonical(), None);
        let one =
            spec(json!({"tolerations": [{"key": "gpu", "effect": "NoSchedule"}], "labels": {"b": "1", "a": "2"}}));
        let other =
            spec(json!({"labels": {"a": "2", "b": "1"}, "tolerations": [{"effect": "NoSchedule", "key": "gpu"}]}));
        let text = r#"{"labels":{"a":"2","b":"1"},"tolerations":[{"effect":"NoSchedule","key":"gpu"}]}"#;
        assert_eq!((one.canonical().as_deref(), other.canonical().as_deref()), (Some(text), Some(text)));
        assert_eq!(one.for_a_model(), None, "who may run where is no matter of a model's");
        let empty_dir = spec(json!({"volumes": [{"name": "v", "emptyDir": {}}]}));
        assert_eq!(empty_dir.canonical().unwrap(), r#"{"volumes":[{"emptyDir":{},"name":"v"}]}"#);
    }

    #[test]
    fn a_model_is_judged_by_what_it_runs_on() {
        let nodes = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}});
        let pods = json!({"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]});
        for (field, value, matters) in [
            ("nodeSelector", json!({"gpu": "h100"}), true),
            ("affinity", json!({"nodeAffinity": nodes, "podAffinity": pods}), true),
            ("affinity", json!({"podAffinity": pods}), false),
            ("runtimeClassName", json!("nvidia"), true),
            ("env", json!([{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]), true),
            ("modelVolumes", json!([{"claimName": "models"}]), true),
            ("securityContext", json!({"supplementalGroups": [7]}), true),
            ("tolerations", json!([{"operator": "Exists"}]), false),
            (
                "topologySpreadConstraints",
                json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]),
                false,
            ),
            ("priorityClassName", json!("high"), false),
            ("imagePullSecrets", json!([{"name": "registry"}]), false),
            ("labels", json!({"team": "a"}), false),
            ("annotations", json!({"note": "a"}), false),
            ("volumes", json!([{"name": "v", "emptyDir": {}}]), false),
            ("volumeMounts", json!([{"name": "v", "mountPath": "/mnt/v"}]), false),
            ("serviceAccountName", json!("mine"), false),
        ] {
            let spec = spec(json!({field: value}));
            assert!(spec.canonical().is_some(), "{field}");
            assert_eq!(spec.for_a_model().is_some(), matters, "{field}");
            assert!(!spec.for_a_model().unwrap_or_default().contains("podAffinity"), "{field}");
        }
    }

    #[test]
    fn the_example_of_the_documentation_says_what_it_seems_to() {
        let text = include_str!("../../docs/operations.md");
        let section = text.split("\n## Where pods run, and what else they have\n").nth(1).unwrap();
        let example = section.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let written: Value = serde_yaml::from_str(example).unwrap();
        let read = spec(written["pod"].clone());
        assert_eq!(serde_json::to_value(&read).unwrap(), written["pod"], "no field is unknown");
        assert!(read.canonical().unwrap().len() < MAX_POD_SPEC_BYTES);
    }

    /// Every field is there: one that is added must be decided on above.
    #[test]
    fn schemas_have_a_limit_on_every_list_and_text_and_no_word_of_kubernetes() {
        let crd = serde_json::to_value(<crate::InferenceService as kube::CustomResourceExt>::crd()).unwrap();
        let schema =
            &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["pod"];
        let fields: Vec<_> = schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields.len(), 15, "{fields:?}");
        fn check(path: &str, schema: &Value) {
            let limit = match schema["type"].as_str() {
                Some("array") => "maxItems",
                Some("string") if schema.get("enum").is_none() => "maxLength",
                Some("object") if schema.get("additionalProperties").is_some() => "maxProperties",
                _ => "type",
            };
            assert!(schema.get(limit).is_some() || schema["x-kubernetes-int-or-string"] == true, "{path}: {limit}");
            for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
                check(&format!("{path}.{name}"), inner);
            }
            for inner in ["items", "additionalProperties"].iter().filter_map(|inner| schema.get(*inner)) {
                check(&format!("{path}[]"), inner);
            }
        }
        check("spec.pod", schema);
        let text = schema.to_string();
        assert!(!text.contains("hostPath") && text.len() < 64 << 10, "{}", text.len());
        assert!(!text.contains("More info"), "descriptions of Kubernetes' own fields are left out");
    }
}
