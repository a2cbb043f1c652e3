//! What the gates read from the API server: the golden prompts, and the credentials and authorities of a source.
//!
//! An object that is not there, or may not be read yet, may be applied in a moment: every failure is something to wait
//! for, told with what to do, and the rollout's deadline ends the wait.
//!
//! Whoever writes an InferenceService names a Secret and an address, and need not be somebody who may read the Secret. So its
//! token goes only to hosts that the Secret itself names ([`HOSTS_ANNOTATION`]), which is for its owner to write.

use std::collections::BTreeMap;

use gantry_crds::HOSTS_ANNOTATION;
use gantry_crds::status::WaitReason;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client, ResourceExt};

use crate::fetch::{Credential, CredentialKind, Login, S3Key, Token, docker_login, names};

/// The ConfigMap's key with the golden prompts.
pub const PROMPTS_KEY: &str = "prompts.jsonl";
/// The ConfigMap's key with the certificates of authorities.
pub const CA_KEY: &str = "ca.crt";
/// The Secret's key with the bearer token.
pub const TOKEN_KEY: &str = "token";
/// The Secret's keys with a key of S3's, named as the variables that everybody knows.
const AWS_KEY_ID_KEY: &str = "AWS_ACCESS_KEY_ID";
const AWS_SECRET_KEY: &str = "AWS_SECRET_ACCESS_KEY";
const AWS_SESSION_KEY: &str = "AWS_SESSION_TOKEN";
/// The Secret's keys with a login at a registry.
const USER_KEY: &str = "username";
const PASSWORD_KEY: &str = "password";
/// The type of Secrets with logins at registries that kubectl makes, and their key.
const DOCKER_SECRET_TYPE: &str = "kubernetes.io/dockerconfigjson";
const DOCKER_CONFIG_KEY: &str = ".dockerconfigjson";

/// The type of Secrets that are used. Others hold what was made for something else, a service account's token for instance.
const SECRET_TYPE: &str = "Opaque";
/// The port of https://.
const HTTPS_PORT: u16 = 443;

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

    /// The certificates of the authorities that a source is trusted by, as PEM.
    ///
    /// # Errors
    /// Says what is missing.
    pub async fn authorities(&self, config_map: &str) -> Result<String, NotThere> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = api.get(config_map).await.map_err(|error| not_there(Kind::ConfigMap, config_map, &error))?;
        let mut data = object.data.unwrap_or_default();
        let pem = data.remove(CA_KEY).ok_or_else(|| missing_key(Kind::ConfigMap, config_map, CA_KEY, data.keys()))?;
        if !pem.contains("-----BEGIN CERTIFICATE-----") {
            return Err(NotThere {
                reason: WaitReason::ConfigMapInvalid,
                message: format!(
                    "key {CA_KEY} of ConfigMap {config_map} has no certificate as PEM, which begins with -----BEGIN \
                     CERTIFICATE-----; store those of the source's authorities"
                ),
            });
        }
        Ok(pem)
    }

    /// What a source is to be told of who asks, for requests to this host and port.
    ///
    /// # Errors
    /// Says what is missing.
    pub async fn credential(
        &self,
        secret: &str,
        kind: CredentialKind,
        (host, port): (&str, u16),
    ) -> Result<Credential, NotThere> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let object = api.get(secret).await.map_err(|error| match error {
            kube::Error::Api(status) if status.code == 403 => not_lent(secret, &wanted_host(host, port)),
            error => not_there(Kind::Secret, secret, &error),
        })?;
        let hosts = may_be_sent(&object, secret, kind, (host, port))?.to_owned();
        let keys = Keys { secret, data: object.data.unwrap_or_default() };
        match kind {
            CredentialKind::Token => keys.needed(TOKEN_KEY).map(Credential::Token),
            CredentialKind::S3Key => Ok(Credential::S3Key(S3Key {
                id: keys.plain(AWS_KEY_ID_KEY)?,
                secret: keys.needed(AWS_SECRET_KEY)?,
                session: keys.optional(AWS_SESSION_KEY)?,
            })),
            CredentialKind::Login if object.type_.as_deref() == Some(DOCKER_SECRET_TYPE) => {
                keys.docker_login(host, port, hosts).map(Credential::Login)
            }
            CredentialKind::Login => {
                let (user, password) = (keys.plain(USER_KEY)?, keys.needed(PASSWORD_KEY)?);
                Ok(Credential::Login(Login { user, password, hosts: Some(hosts) }))
            }
        }
    }
}

/// The keys of a Secret that may be used.
struct Keys<'a> {
    secret: &'a str,
    data: BTreeMap<String, ByteString>,
}

impl Keys<'_> {
    fn optional(&self, key: &str) -> Result<Option<Token>, NotThere> {
        self.data.contains_key(key).then(|| self.plain(key)).transpose().map(|text| text.map(|text| Token::new(&text)))
    }

    fn needed(&self, key: &str) -> Result<Token, NotThere> {
        self.plain(key).map(|text| Token::new(&text))
    }

    /// The text of a key, which is one word.
    fn plain(&self, key: &str) -> Result<String, NotThere> {
        let secret = self.secret;
        let bytes = self.data.get(key).ok_or_else(|| missing_key(Kind::Secret, secret, key, self.data.keys()))?;
        let text = str::from_utf8(&bytes.0).unwrap_or_default().trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            let what = if key == TOKEN_KEY {
                "no bearer token; store the token alone"
            } else {
                "not one word; store it alone"
            };
            return Err(invalid_secret(format!("key {key} of Secret {secret} is {what}")));
        }
        Ok(text.to_owned())
    }

    /// The login for a registry, of those that `docker login` and `kubectl create secret docker-registry` write.
    fn docker_login(&self, host: &str, port: u16, hosts: String) -> Result<Login, NotThere> {
        let (secret, key) = (self.secret, DOCKER_CONFIG_KEY);
        let bytes = self.data.get(key).ok_or_else(|| missing_key(Kind::Secret, secret, key, self.data.keys()))?;
        let login = docker_login(&bytes.0, (host, port), Some(hosts))
            .map_err(|_| invalid_secret(format!("key {key} of Secret {secret} is no config.json of docker's")))?;
        let wanted = wanted_host(host, port);
        login.ok_or_else(|| invalid_secret(format!("key {key} of Secret {secret} has no login for {wanted}; add it")))
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
        error => {
            // The client's own text has every field of the answer.
            let told = match error {
                kube::Error::Api(status) => status.message.clone(),
                error => error.to_string(),
            };
            (WaitReason::ApiUnavailable, format!("{} {name} cannot be read: {told}", kind.as_str()))
        }
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

/// Whether the Secret's credential is for this host. Gives the list of hosts that it is for.
fn may_be_sent<'a>(
    object: &'a Secret,
    name: &str,
    kind: CredentialKind,
    (host, port): (&str, u16),
) -> Result<&'a str, NotThere> {
    let is_used =
        |type_: &&str| *type_ == SECRET_TYPE || (kind == CredentialKind::Login && *type_ == DOCKER_SECRET_TYPE);
    if let Some(type_) = object.type_.as_deref().filter(|type_| !is_used(type_)) {
        return Err(invalid_secret(format!(
            "Secret {name} is not used, whose type is {type_}; store the source's token in one of the type {SECRET_TYPE} \
             (kubectl create secret generic), and name that one"
        )));
    }
    let wanted = wanted_host(host, port);
    let hosts = object.annotations().get(HOSTS_ANNOTATION);
    if let Some(hosts) = hosts.filter(|hosts| names(hosts, host, port)) {
        return Ok(hosts);
    }
    let (lacks, all) = match hosts {
        Some(hosts) => ("its annotation gantry.dev/hosts does not name that host", format!("{hosts}, {wanted}")),
        None => ("it has no annotation gantry.dev/hosts", wanted.clone()),
    };
    Err(invalid_secret(format!(
        "the token of Secret {name} may not be sent to {wanted}: {lacks}; if it is meant to go there, kubectl annotate \
         secret {name} --overwrite {HOSTS_ANNOTATION}=\"{all}\""
    )))
}

/// As the annotation names it.
fn wanted_host(host: &str, port: u16) -> String {
    if port == HTTPS_PORT { host.to_owned() } else { format!("{host}:{port}") }
}

/// The operator lets agents read no Secret that has no list of hosts, and whether there is one only its metadata tells.
fn not_lent(name: &str, wanted: &str) -> NotThere {
    let message = format!(
        "Secret {name} may not be read: it is not there, or it does not say that its token may be sent to {wanted}; apply it in the \
         service's namespace, and if its token is meant to go there, kubectl annotate secret {name} --overwrite \
         {HOSTS_ANNOTATION}=\"{wanted}\""
    );
    NotThere { reason: WaitReason::AccessDenied, message }
}

fn invalid_secret(message: String) -> NotThere {
    NotThere { reason: WaitReason::SecretInvalid, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_hosts_names_what_it_says_and_nothing_else() {
        for (hosts, host, port) in [
            ("huggingface.co", "huggingface.co", 443),
            ("a.com, huggingface.co", "HuggingFace.co", 443),
            ("HuggingFace.co:443", "huggingface.co", 443),
            ("*.example.com", "files.eu.example.com", 443),
            ("files.ns.svc:8443", "files.ns.svc", 8443),
            ("*.example.com:8443", "a.example.com", 8443),
            ("[2001:db8::1]", "[2001:db8::1]", 443),
            ("[2001:db8::1]:8443", "[2001:db8::1]", 8443),
            ("a.com\nb.com", "b.com", 443),
        ] {
            assert!(names(hosts, host, port), "{hosts:?} {host}:{port}");
        }
        for (hosts, host, port) in [
            ("", "huggingface.co", 443),
            ("huggingface.co", "huggingface.co", 8443),
            ("huggingface.co", "cdn.huggingface.co", 443),
            ("huggingface.co", "huggingface.co.evil.com", 443),
            ("*.example.com", "example.com", 443),
            ("*.example.com", "evilexample.com", 443),
            ("*.example.com", ".example.com", 443),
            ("*.com", "evil.com", 443),
            ("*", "evil.com", 443),
            ("*.", "evil.com", 443),
            ("*:443", "evil.com", 443),
            ("files.ns.svc:8443", "files.ns.svc", 443),
            ("https://huggingface.co", "huggingface.co", 443),
            ("a.*.com", "a.b.com", 443),
        ] {
            assert!(!names(hosts, host, port), "{hosts:?} {host}:{port}");
        }
    }
}
