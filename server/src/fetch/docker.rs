//! `config.json` of docker's, as far as it is about logins at registries: what `docker login`, `oras login` and `kubectl create secret
//! docker-registry` write. Absent: credential helpers, which are programs to be run.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::registry::Login;
use super::source::Token;

/// Under this name stands the login for Docker Hub, which answers at another host.
const DOCKER_HUB_LOGIN: &str = "index.docker.io";
const DOCKER_HUB_HOST: &str = "registry-1.docker.io";
/// The port of https://.
const HTTPS_PORT: u16 = 443;

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
}

#[derive(Deserialize)]
struct DockerAuth {
    username: Option<String>,
    password: Option<String>,
    /// Both as for a header: `base64(username:password)`.
    auth: Option<String>,
}

impl DockerAuth {
    fn login(&self) -> Option<(String, String)> {
        if let (Some(user), Some(password)) = (&self.username, &self.password) {
            return Some((user.clone(), password.clone()));
        }
        let both = String::from_utf8(BASE64_STANDARD.decode(self.auth.as_ref()?).ok()?).ok()?;
        let (user, password) = both.split_once(':')?;
        (!password.is_empty()).then(|| (user.to_owned(), password.to_owned()))
    }
}

/// The login for a registry, which may be sent to `hosts`; `None` where there is none.
///
/// # Errors
/// It is no such file.
pub(crate) fn docker_login(
    config: &[u8],
    (host, port): (&str, u16),
    hosts: Option<String>,
) -> Result<Option<Login>, serde_json::Error> {
    let config: DockerConfig = serde_json::from_slice(config)?;
    let wanted = if port == HTTPS_PORT { host.to_owned() } else { format!("{host}:{port}") };
    let of_host = |(registry, _): &(&String, &DockerAuth)| {
        let registry = registry.trim_start_matches("https://").split('/').next().unwrap_or_default();
        registry == wanted || (registry == DOCKER_HUB_LOGIN && host == DOCKER_HUB_HOST)
    };
    let login = config.auths.iter().find(of_host).and_then(|(_, auth)| auth.login());
    Ok(login.map(|(user, password)| Login { user, password: Token::new(&password), hosts }))
}
