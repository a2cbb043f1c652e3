//! What a pod gets of `spec.pod`, beside what is the server's own, which goes before it.

use std::collections::BTreeMap;

use gantry_crds::pod::{MODEL_VOLUMES_DIR, PodSecurity, PodSpec, PodVariable, PodVolume, Seccomp, SeccompKind};
use k8s_openapi::{
    api::core::v1::{
        EnvVar, EnvVarSource, EphemeralVolumeSource, LocalObjectReference, PersistentVolumeClaimTemplate,
        PersistentVolumeClaimVolumeSource, PodSecurityContext, SeccompProfile, TopologySpreadConstraint, Volume,
        VolumeMount,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::selector;

/// User and group of the server, where the spec names no other: nothing in the image belongs to anybody else.
const SERVER_USER: i64 = 65532;

/// Some of what is not empty.
pub(super) fn some<T: IntoIterator + Clone>(items: &T) -> Option<T> {
    items.clone().into_iter().next().is_some().then(|| items.clone())
}

/// Labels of a pod: those that it is selected by go before the user's.
pub(super) fn labels(pod: &PodSpec, own: BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut labels = pod.labels.clone();
    labels.extend(own);
    labels
}

/// Annotations of a pod.
pub(super) fn annotations(pod: &PodSpec, own: Option<(String, String)>) -> Option<BTreeMap<String, String>> {
    let mut annotations = pod.annotations.clone();
    annotations.extend(own);
    (!annotations.is_empty()).then_some(annotations)
}

/// As whom the server runs.
pub(super) fn security_context(pod: &PodSpec) -> PodSecurityContext {
    let security = pod.security_context.clone().unwrap_or_default();
    PodSecurityContext {
        run_as_non_root: Some(true),
        run_as_user: Some(security.run_as_user.unwrap_or(SERVER_USER)),
        run_as_group: Some(security.run_as_group.unwrap_or(SERVER_USER)),
        fs_group: Some(security.fs_group.unwrap_or(SERVER_USER)),
        fs_group_change_policy: security.fs_group_change_policy.map(|policy| policy.as_str().to_owned()),
        supplemental_groups: some(&security.supplemental_groups),
        seccomp_profile: Some(seccomp_profile(pod)),
        ..PodSecurityContext::default()
    }
}

/// Which system calls it may make: of the pod and of its container.
pub(super) fn seccomp_profile(pod: &PodSpec) -> SeccompProfile {
    let asked = pod.security_context.as_ref().and_then(|PodSecurity { seccomp_profile, .. }| seccomp_profile.clone());
    let Seccomp { kind, localhost_profile } =
        asked.unwrap_or(Seccomp { kind: SeccompKind::RuntimeDefault, localhost_profile: None });
    SeccompProfile { type_: kind.as_str().to_owned(), localhost_profile }
}

/// How pods are spread: to different nodes where that is possible, unless the spec says otherwise. A constraint that says nothing
/// of whom it counts would count nobody.
pub(super) fn spread(pod: &PodSpec, selected: BTreeMap<String, String>) -> Vec<TopologySpreadConstraint> {
    let selected = selector(selected);
    let of_this_service = |constraint: &TopologySpreadConstraint| TopologySpreadConstraint {
        label_selector: constraint.label_selector.clone().or_else(|| Some(selected.clone())),
        ..constraint.clone()
    };
    if pod.topology_spread_constraints.is_empty() {
        return vec![TopologySpreadConstraint {
            max_skew: 1,
            topology_key: "kubernetes.io/hostname".to_owned(),
            when_unsatisfiable: "ScheduleAnyway".to_owned(),
            label_selector: Some(selected),
            ..TopologySpreadConstraint::default()
        }];
    }
    pod.topology_spread_constraints.iter().map(of_this_service).collect()
}

/// Credentials for the registry of the image.
pub(super) fn image_pull_secrets(pod: &PodSpec) -> Option<Vec<LocalObjectReference>> {
    let secrets = pod.image_pull_secrets.iter().map(|secret| LocalObjectReference { name: secret.name.clone() });
    some(&secrets.collect::<Vec<_>>())
}

/// Variables of the server.
pub(super) fn environment(pod: &PodSpec) -> impl Iterator<Item = EnvVar> + '_ {
    pod.env.iter().map(|PodVariable { name, value, value_from }| EnvVar {
        name: name.clone(),
        value: value.clone(),
        value_from: value_from.as_ref().map(|source| EnvVarSource {
            secret_key_ref: source.secret_key_ref.clone(),
            config_map_key_ref: source.config_map_key_ref.clone(),
            field_ref: source.field_ref.clone(),
            ..EnvVarSource::default()
        }),
    })
}

/// Volumes of the pod. Claims for models are mounted to be read alone, by the volume as well as in the container: so they can be on
/// many nodes at once, and nobody gives all their files another group at each start.
pub(super) fn volumes(pod: &PodSpec) -> impl Iterator<Item = Volume> + '_ {
    let models = pod.model_volumes.iter().enumerate().map(|(i, volume)| Volume {
        name: model_volume(i),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: volume.claim_name.clone(),
            read_only: Some(true),
        }),
        ..Volume::default()
    });
    pod.volumes.iter().map(volume).chain(models)
}

fn model_volume(i: usize) -> String {
    format!("gantry-models-{i}")
}

fn volume(volume: &PodVolume) -> Volume {
    let PodVolume {
        name,
        config_map,
        secret,
        empty_dir,
        projected,
        persistent_volume_claim,
        csi,
        ephemeral,
        downward_api,
    } = volume.clone();
    let ephemeral = ephemeral.map(|ephemeral| EphemeralVolumeSource {
        volume_claim_template: Some(PersistentVolumeClaimTemplate {
            metadata: ephemeral.volume_claim_template.metadata.map(|metadata| ObjectMeta {
                labels: some(&metadata.labels),
                annotations: some(&metadata.annotations),
                ..ObjectMeta::default()
            }),
            spec: ephemeral.volume_claim_template.spec,
        }),
    });
    Volume {
        name,
        config_map,
        secret,
        empty_dir,
        projected,
        persistent_volume_claim,
        csi,
        ephemeral,
        downward_api,
        ..Volume::default()
    }
}

/// Where they are mounted.
pub(super) fn mounts(pod: &PodSpec) -> impl Iterator<Item = VolumeMount> + '_ {
    let models = pod.model_volumes.iter().enumerate().map(|(i, volume)| VolumeMount {
        name: model_volume(i),
        mount_path: format!("{MODEL_VOLUMES_DIR}/{}", volume.claim_name),
        read_only: Some(true),
        ..VolumeMount::default()
    });
    let users = pod.volume_mounts.iter().map(|mount| VolumeMount {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        sub_path: mount.sub_path.clone(),
        read_only: mount.read_only.then_some(true),
        ..VolumeMount::default()
    });
    users.chain(models)
}

/// Bytes of the node's disk that folders of the user's may take.
pub(super) fn disk_bytes(pod: &PodSpec) -> u64 {
    let folders = pod.volumes.iter().filter_map(|volume| volume.empty_dir.as_ref());
    let on_disk = folders.filter(|folder| folder.medium.as_deref() != Some("Memory"));
    let limits = on_disk.filter_map(|folder| gantry_crds::quantity::parse(&folder.size_limit.as_ref()?.0));
    // The cast saturates, and what is less than nothing is nothing.
    limits.map(|bytes| bytes as u64).fold(0, u64::saturating_add)
}
