//! What the gates read from the API server: the golden prompts and the credentials of a source.
//!
//! An object that is not there, or may not be read yet, may be applied in a moment: every failure is something to wait
//! for, told with what to do, and the rollout's deadline ends the wait.

use gantry_crds::status::WaitReason;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};

use crate::fetch::Token;

/// The ConfigMap's key with the golden prompts.
pub const PROMPTS_KEY: &str = "prompts.jsonl";
/// The Secret's key with the bearer token.
pub const TOKEN_KEY: &str = "token";

/// Reads objects of one namespace.
#[derive(Clone)]
pub struct Objects {
    client: Client,
    namespace: String,
}

/// Why an object is not there, in words for its user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NotThere {
    /// The same in a word.
    pub reason: WaitReason,
    /// What is missing, and what to do.
    pub message: String,
}

impl Objects {
    /// Reads with `client`.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.to_owned() }
    }

    /// The golden prompts, one JSON object a line.
    ///
    /// # Errors
    /// Says what is missing.
    pub async fn prompts(&self, config_map: &str) -> Result<String, NotThere> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = api.get(config_map).await.map_err(|error| not_there(Kind::ConfigMap, config_map, &error))?;
        let mut data = object.data.unwrap_or_default();
        data.remove(PROMPTS_KEY).ok_or_else(|| missing_key(Kind::ConfigMap, config_map, PROMPTS_KEY, data.keys()))
    }

    /// The bearer token.
    ///
    /// # Errors
    /// Says what is missing.
    pub async fn token(&self, secret: &str) -> Result<Token, NotThere> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = api.get(secret).await.map_err(|error| not_there(Kind::Secret, secret, &error))?;
        let mut data = object.data.unwrap_or_default();
        let bytes = data.remove(TOKEN_KEY).ok_or_else(|| missing_key(Kind::Secret, secret, TOKEN_KEY, data.keys()))?;
        let invalid = || NotThere {
            reason: WaitReason::SecretInvalid,
            message: format!("key {TOKEN_KEY} of Secret {secret} is no bearer token; store the token alone"),
        };
        let text = String::from_utf8(bytes.0).map_err(|_| invalid())?;
        if text.trim().is_empty() || !text.trim().bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid());
        }
        Ok(Token::new(&text))
    }
}

fn not_there(kind: Kind, name: &str, error: &kube::Error) -> NotThere {
    let (reason, message) = match error {
        kube::Error::Api(status) if status.code == 404 => {
            let reason = match kind {
                Kind::ConfigMap => WaitReason::ConfigMapNotFound,
                Kind::Secret => WaitReason::SecretNotFound,
            };
            (reason, format!("{} {name} is not there; apply it in the service's namespace", kind.as_str()))
        }
        kube::Error::Api(status) if status.code == 403 => {
            let what =
                format!("{} {name} may not be read, which the operator is to grant: {}", kind.as_str(), status.message);
            (WaitReason::AccessDenied, what)
        }
        error => (WaitReason::ApiUnavailable, format!("{} {name} cannot be read: {error}", kind.as_str())),
    };
    NotThere { reason, message }
}

fn missing_key<'a>(kind: Kind, name: &str, key: &str, there: impl Iterator<Item = &'a String>) -> NotThere {
    let there: Vec<&str> = there.map(String::as_str).take(5).collect();
    let there = if there.is_empty() { "no key".to_owned() } else { there.join(", ") };
    let reason = match kind {
        Kind::ConfigMap => WaitReason::ConfigMapInvalid,
        Kind::Secret => WaitReason::SecretInvalid,
    };
    NotThere { reason, message: format!("{} {name} has {there}, and not the key {key}; add it", kind.as_str()) }
}

#[derive(Clone, Copy)]
enum Kind {
    ConfigMap,
    Secret,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }
}
