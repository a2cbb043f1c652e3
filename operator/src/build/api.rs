//! What a pod gets of `spec.api`: arguments, since a server that does not know one ends where it would overlook a variable
//! and answer everybody; and the Secret of the keys as files, which the kubelet brings up to date. Nobody is given a right to
//! read it.

use k8s_openapi::api::core::v1::{SecretVolumeSource, Volume, VolumeMount};

use crate::validate::ApiSettings;

/// Where the server finds its keys, a file for each value of the Secret.
const KEYS_DIR: &str = "/etc/gantry/api-keys";
const KEYS_VOLUME: &str = "api-keys";
/// Its group, which is the server's, may read them.
const KEYS_MODE: i32 = 0o440;

/// Arguments of the server.
pub(super) fn arguments(api: &ApiSettings) -> Vec<String> {
    let list = |flag: &str, values: &[String]| (!values.is_empty()).then(|| format!("--{flag}={}", values.join(",")));
    let keys = api.keys_secret.as_ref().map(|_| format!("--api-key-file={KEYS_DIR}"));
    let origins = list("cors-origins", &api.cors_origins);
    let aliases = list("alias", &api.model_aliases);
    let any = api.any_model.then(|| "--any-model".to_owned());
    [keys, origins, aliases, any].into_iter().flatten().collect()
}

/// Volumes of the pod. Without the Secret it does not start.
pub(super) fn volumes(api: &ApiSettings) -> Vec<Volume> {
    let keys = api.keys_secret.as_ref().map(|secret| Volume {
        name: KEYS_VOLUME.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.clone()),
            optional: Some(false),
            default_mode: Some(KEYS_MODE),
            items: None,
        }),
        ..Volume::default()
    });
    keys.into_iter().collect()
}

/// Where they are mounted.
pub(super) fn mounts(api: &ApiSettings) -> Vec<VolumeMount> {
    let keys = api.keys_secret.as_ref().map(|_| VolumeMount {
        name: KEYS_VOLUME.to_owned(),
        mount_path: KEYS_DIR.to_owned(),
        read_only: Some(true),
        ..VolumeMount::default()
    });
    keys.into_iter().collect()
}
