//! What a pod gets of `spec.api`: arguments, since a server that does not know one ends where it would overlook a variable
//! and answer everybody; the Secret of the keys as files, which the kubelet brings up to date; the credentials of a store as
//! variables; and a volume. Nobody is given a right to read either Secret.

use k8s_openapi::api::core::v1::{
    EnvVar, EnvVarSource, PersistentVolumeClaimVolumeSource, SecretKeySelector, SecretVolumeSource, Volume, VolumeMount,
};

use crate::validate::{ApiSettings, ResponseStore, StorePlace};

/// Where the server finds its keys, a file for each value of the Secret.
const KEYS_DIR: &str = "/etc/gantry/api-keys";
const KEYS_VOLUME: &str = "api-keys";
/// Its group, which is the server's, may read them.
const KEYS_MODE: i32 = 0o440;
/// Where it keeps responses.
const RESPONSES_DIR: &str = "/var/lib/gantry/responses";
const RESPONSES_VOLUME: &str = "responses";
/// Keys of the Secret with a store's credentials, and the variables of the same names; whether they must be there.
const CREDENTIALS: [(&str, bool); 3] =
    [("AWS_ACCESS_KEY_ID", true), ("AWS_SECRET_ACCESS_KEY", true), ("AWS_SESSION_TOKEN", false)];

/// Arguments of the server.
pub(super) fn arguments(api: &ApiSettings) -> Vec<String> {
    let list = |flag: &str, values: &[String]| (!values.is_empty()).then(|| format!("--{flag}={}", values.join(",")));
    let keys = api.keys_secret.as_ref().map(|_| format!("--api-key-file={KEYS_DIR}"));
    let origins = list("cors-origins", &api.cors_origins);
    let aliases = list("alias", &api.model_aliases);
    let any = api.any_model.then(|| "--any-model".to_owned());
    let store = api.responses.as_ref().map(|store| match &store.place {
        StorePlace::S3 { url, .. } => format!("--response-store={url}"),
        StorePlace::Claim(_) => format!("--response-store=file://{RESPONSES_DIR}"),
    });
    let ttl = api.responses.as_ref().and_then(|store| store.time_to_live);
    let ttl = ttl.map(|ttl| format!("--response-ttl={}", ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)));
    [keys, origins, aliases, any, store, ttl].into_iter().flatten().collect()
}

/// Variables of the server.
pub(super) fn environment(api: &ApiSettings) -> Vec<EnvVar> {
    let Some(ResponseStore { place: StorePlace::S3 { endpoint, region, secret, .. }, .. }) = &api.responses else {
        return Vec::new();
    };
    let plain =
        |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() };
    let without_tls = endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let plain = [
        endpoint.as_deref().map(|endpoint| plain("AWS_ENDPOINT", endpoint)),
        without_tls.then(|| plain("AWS_ALLOW_HTTP", "true")),
        region.as_deref().map(|region| plain("AWS_REGION", region)),
    ];
    let credential = |secret: &String, (key, needed): (&str, bool)| EnvVar {
        name: key.to_owned(),
        value_from: Some(EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: secret.clone(),
                key: key.to_owned(),
                optional: Some(!needed),
            }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    };
    let credentials = secret.iter().flat_map(|secret| CREDENTIALS.map(|key| credential(secret, key)));
    plain.into_iter().flatten().chain(credentials).collect()
}

fn claim(api: &ApiSettings) -> Option<&String> {
    match &api.responses {
        Some(ResponseStore { place: StorePlace::Claim(claim), .. }) => Some(claim),
        _ => None,
    }
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
    let responses = claim(api).map(|claim| Volume {
        name: RESPONSES_VOLUME.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource { claim_name: claim.clone(), read_only: None }),
        ..Volume::default()
    });
    keys.into_iter().chain(responses).collect()
}

/// Where they are mounted.
pub(super) fn mounts(api: &ApiSettings) -> Vec<VolumeMount> {
    let mount = |name: &str, path: &str, read_only: Option<bool>| VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only,
        ..VolumeMount::default()
    };
    let keys = api.keys_secret.as_ref().map(|_| mount(KEYS_VOLUME, KEYS_DIR, Some(true)));
    let responses = claim(api).map(|_| mount(RESPONSES_VOLUME, RESPONSES_DIR, None));
    keys.into_iter().chain(responses).collect()
}
