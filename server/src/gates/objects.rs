//! What the gates read from the API server: the golden prompts and the credentials of a source.
//!
//! An object that is not there, or may not be read yet, may be applied in a moment: every failure is something to wait
//! for, told with what to do, and the rollout's deadline ends the wait.

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
#[error("{0}")]
pub struct NotThere(String);

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
        let object = api.get(config_map).await.map_err(|error| not_there("ConfigMap", config_map, &error))?;
        let mut data = object.data.unwrap_or_default();
        data.remove(PROMPTS_KEY).ok_or_else(|| missing_key("ConfigMap", config_map, PROMPTS_KEY, data.keys()))
    }

    /// The bearer token.
    ///
    /// # Errors
    /// Says what is missing.
    pub async fn token(&self, secret: &str) -> Result<Token, NotThere> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = api.get(secret).await.map_err(|error| not_there("Secret", secret, &error))?;
        let mut data = object.data.unwrap_or_default();
        let bytes = data.remove(TOKEN_KEY).ok_or_else(|| missing_key("Secret", secret, TOKEN_KEY, data.keys()))?;
        let text = String::from_utf8(bytes.0)
            .map_err(|_| NotThere(format!("key {TOKEN_KEY} of Secret {secret} is not text; store the token alone")))?;
        if text.trim().is_empty() || !text.trim().bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(NotThere(format!(
                "key {TOKEN_KEY} of Secret {secret} is no bearer token; store the token alone"
            )));
        }
        Ok(Token::new(&text))
    }
}

fn not_there(kind: &str, name: &str, error: &kube::Error) -> NotThere {
    NotThere(match error {
        kube::Error::Api(status) if status.code == 404 => {
            format!("waits for {kind} {name}, which is not there; apply it in the service's namespace")
        }
        kube::Error::Api(status) if status.code == 403 => {
            format!("waits for the right to read {kind} {name}, which the operator grants: {}", status.message)
        }
        error => format!("waits to read {kind} {name}: {error}"),
    })
}

fn missing_key<'a>(kind: &str, name: &str, key: &str, there: impl Iterator<Item = &'a String>) -> NotThere {
    let there: Vec<&str> = there.map(String::as_str).take(5).collect();
    let there = if there.is_empty() { "no key".to_owned() } else { there.join(", ") };
    NotThere(format!("waits for key {key} in {kind} {name}, which has {there}; add it"))
}
