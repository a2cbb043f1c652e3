//! Whom a service answers, and by which names: the part of a spec that its pods start with, and that no version is made of.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::{inference_service::LocalName, scalars::DurationString};

/// The most origins whose pages may ask.
pub const MAX_CORS_ORIGINS: u32 = 64;
/// The longest of them, in characters: a scheme, a host name of 253 and a port.
pub const MAX_CORS_ORIGIN_CHARS: u32 = 300;
/// The most names of a model beside the one that it is served by.
pub const MAX_MODEL_ALIASES: u32 = 32;
/// The longest prefix of stored objects in a bucket, in characters: with what is put behind it a name may have 1,024.
pub const MAX_STORE_PREFIX_CHARS: u32 = 512;
/// The longest address of an object store, in characters: a scheme, a host name of 253 and a port.
pub const MAX_STORE_ENDPOINT_CHARS: u32 = 300;

/// Whom a service answers, and by which names. A change replaces the pods one after the other; it makes no new version.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiSpec {
    /// Secret of the same namespace with the keys of which clients must show one: each of its values has one a line. It is
    /// mounted into the pods, which take what it becomes without a restart; nobody gets a right to read it. Without it
    /// whoever reaches the service may ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("spec.api.keysSecretRef.name: use the name of a Secret: lower-case letters, digits, dashes and dots, starting and ending with a letter or digit"))]
    pub keys_secret_ref: Option<LocalName>,
    /// Origins whose pages may ask, as browsers send them: https://chat.example.com, or http://localhost:3000; or * alone for
    /// all. No page may if left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_CORS_ORIGINS), inner(length(min = 1, max = MAX_CORS_ORIGIN_CHARS)))]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = Rule::new("self.all(origin, origin == '*' ? self.size() == 1 : origin.matches('^[a-z][a-z0-9+.-]{0,30}://([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\\\\[[0-9a-f:.]+\\\\])(:[0-9]{1,5})?$'))").message("spec.api.corsOrigins: give a scheme and a host in lower case, with a port where it is not the scheme's and nothing behind it, such as https://chat.example.com; or * alone")
    )]
    pub cors_origins: Vec<String>,
    /// Names by which clients may ask for the model beside spec.model.servedName, which stands in answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_MODEL_ALIASES), inner(length(min = 1, max = 128)))]
    #[x_kube(
        merge_strategy = ListMerge::Set,
        validation = Rule::new("self.all(name, name.matches('^[A-Za-z0-9]([-A-Za-z0-9._/:]{0,126}[A-Za-z0-9])?$'))").message("spec.api.modelAliases: use names of 1 to 128 letters, digits and -._/:, starting and ending with a letter or digit")
    )]
    pub model_aliases: Vec<String>,
    /// Answer requests whichever model they name: for clients that name one of another provider's and cannot be told.
    #[serde(default)]
    pub any_model: bool,
    /// Where responses of the Responses API are kept, so that requests may refer to them, whichever pod they come to. None are
    /// kept if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_store: Option<ResponseStoreSpec>,
}

/// Where responses are kept: exactly one of `s3` and `pvc`.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.s3) != has(self.pvc)").message("spec.api.responseStore: give exactly one of s3 and pvc"))]
pub struct ResponseStoreSpec {
    /// A bucket of S3, or of what speaks its protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Store>,
    /// A PersistentVolumeClaim of the same namespace, which is mounted into every pod: of ReadWriteMany where there are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<ClaimStore>,
    /// How long responses are kept since they ended: 24h. 720h if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("duration(self) >= duration('60s')").message("spec.api.responseStore.ttl: use at least 60s"))]
    pub ttl: Option<DurationString>,
}

/// A bucket.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct S3Store {
    /// Its name.
    #[schemars(length(max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$')").message("spec.api.responseStore.s3.bucket: use the name of a bucket: 3 to 63 lower-case letters, digits, dashes and dots, starting and ending with a letter or digit"))]
    pub bucket: String,
    /// What stands before the names of all objects: gantry/chat. Nothing if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_STORE_PREFIX_CHARS))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$')").message("spec.api.responseStore.s3.prefix: use names of letters, digits and ._- with one / between two of them, none of which starts with a dot"))]
    pub prefix: Option<String>,
    /// Where it is, unless it is Amazon's: https://minio.example.com:9000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = MAX_STORE_ENDPOINT_CHARS))]
    #[x_kube(validation = Rule::new("self.matches('^https?://([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\\\\[[0-9a-f:.]+\\\\])(:[0-9]{1,5})?$')").message("spec.api.responseStore.s3.endpoint: give https:// or http:// and a host in lower case, with a port where it is not the scheme's and nothing behind it"))]
    pub endpoint: Option<String>,
    /// Its region. us-east-1 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')").message("spec.api.responseStore.s3.region: use the name of a region, such as eu-central-1"))]
    pub region: Option<String>,
    /// Secret of the same namespace with the credentials, as the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if there is
    /// one, AWS_SESSION_TOKEN. Pods have them as variables, so that others are taken when the pods are made anew. If left out,
    /// those that the machine gives its pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self.name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("spec.api.responseStore.s3.secretRef.name: use the name of a Secret: lower-case letters, digits, dashes and dots, starting and ending with a letter or digit"))]
    pub secret_ref: Option<LocalName>,
}

/// A PersistentVolumeClaim.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimStore {
    /// Name of the claim.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("spec.api.responseStore.pvc.claimName: use the name of a PersistentVolumeClaim: lower-case letters, digits, dashes and dots, starting and ending with a letter or digit"))]
    pub claim_name: String,
}
