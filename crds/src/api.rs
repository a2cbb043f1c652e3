//! Whom a service answers, and by which names: the part of a spec that its pods start with, and that no version is made of.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::inference_service::LocalName;

/// The most origins whose pages may ask.
pub const MAX_CORS_ORIGINS: u32 = 64;
/// The longest of them, in characters: a scheme, a host name of 253 and a port.
pub const MAX_CORS_ORIGIN_CHARS: u32 = 300;
/// The most names of a model beside the one that it is served by.
pub const MAX_MODEL_ALIASES: u32 = 32;

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
}
