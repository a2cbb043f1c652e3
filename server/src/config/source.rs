//! Models that are named by an address: where they are kept, and what the environment says of their stores, in the variables of
//! these stores' own clients. Absent: how they are brought ([`crate::pull`]).

use std::path::{Path, PathBuf};

use super::args::CacheArgs;
use super::check::Check;
use super::{MAX_CACHE_SIZE_MIB, MIN_CACHE_SIZE_MIB};
use crate::fetch::{AskedBy, Credential, Digest, Login, S3Key, Source, StoreSettings, Token, docker_login};

/// What marks an address.
const SCHEME_END: &str = "://";
/// Files that hold Hugging Face's token and docker's logins, below the home directory.
const HF_HOME: &str = ".cache/huggingface";
const DOCKER_HOME: &str = ".docker";

/// Where models are kept that come from stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCache {
    /// The directory.
    pub dir: PathBuf,
    /// Bytes that they may take together.
    pub limit_bytes: u64,
    /// Whether no store is asked.
    pub offline: bool,
}

/// A model that is to be brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteModel {
    /// Where it is.
    pub source: Source,
    /// What it must be, where that was said.
    pub sha256: Option<Digest>,
}

/// The models that are to be brought before anything can be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteModels {
    /// Where they are kept.
    pub cache: ModelCache,
    /// The model.
    pub model: Option<RemoteModel>,
    /// The smaller model that guesses.
    pub draft: Option<RemoteModel>,
}

/// Reads variables.
#[derive(Clone, Copy)]
pub(super) struct Environment<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'static> {
    /// Of this process.
    pub(super) const OWN: Self = Self(&|name| std::env::var(name).ok());
    /// Without any variable.
    pub(super) const EMPTY: Self = Self(&|_| None);
}

impl Environment<'_> {
    /// The first of these that is set to anything.
    fn first(self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| (self.0)(name).filter(|value| !value.trim().is_empty()))
    }

    /// The first of these directories that is named, or the one below the home directory.
    fn dir(self, variable: &str, below_home: &str) -> Option<PathBuf> {
        let named = self.first(&[variable]).map(PathBuf::from);
        named.or_else(|| Some(Path::new(&self.first(&["HOME"])?).join(below_home)))
    }
}

/// Whether what names a model is an address and no path.
pub(super) fn is_address(named: &Path) -> bool {
    named.to_str().is_some_and(|text| text.contains(SCHEME_END))
}

/// What is called after a model that is named so.
pub(super) fn name_of(named: &Path, remote: Option<&RemoteModel>) -> Option<String> {
    match remote {
        Some(remote) => Some(remote.source.model_name()),
        None => named.file_stem().map(|stem| stem.to_string_lossy().into_owned()),
    }
}

impl CacheArgs {
    /// Where models are kept, whose directory is named or can be found, unless the environment is not looked at.
    pub(super) fn cache(&self, check: &mut Check, environment: Option<Environment<'_>>) -> ModelCache {
        let dir = self.cache_dir.clone().or_else(|| {
            let caches = environment?.dir("XDG_CACHE_HOME", ".cache")?;
            Some(caches.join("gantry"))
        });
        if dir.is_none() && environment.is_some() {
            check.problem(String::from("--cache-dir must be given where neither XDG_CACHE_HOME nor HOME is set"));
        }
        let mib = check.number("cache-size", &self.cache_size, MIN_CACHE_SIZE_MIB, MAX_CACHE_SIZE_MIB);
        ModelCache { dir: dir.unwrap_or_default(), limit_bytes: u64::from(mib) << 20, offline: self.offline }
    }

    /// The model's digest, where it was said.
    pub(super) fn digest(&self, check: &mut Check) -> Option<Digest> {
        let text = self.sha256.as_deref().map(str::trim).filter(|text| !text.is_empty())?;
        text.parse().map_err(|error| check.problem(format!("--sha256 must be right: {error}"))).ok()
    }
}

/// The model at an address. A file's is the file.
pub(super) fn remote(
    check: &mut Check,
    environment: Environment<'_>,
    flag: &str,
    named: &Path,
    sha256: Option<Digest>,
) -> Option<RemoteModel> {
    let address = named.to_str()?;
    let settings = |endpoint: Option<String>, region: Option<String>| {
        let settings = StoreSettings { endpoint: endpoint.as_deref(), region: region.as_deref() };
        Source::unpinned(address, settings)
    };
    let source = match address.split_once(SCHEME_END).map_or("", |(scheme, _)| scheme) {
        "hf" => settings(environment.first(&["HF_ENDPOINT"]), None),
        "s3" => settings(
            environment.first(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]),
            environment.first(&["AWS_REGION", "AWS_DEFAULT_REGION"]),
        ),
        _ => settings(None, None),
    };
    match source {
        Ok(source) => {
            let credential = credential(environment, &source);
            let source = credential.into_iter().fold(source, Source::with_credential).asked_by(AskedBy::CommandLine);
            Some(RemoteModel { source, sha256 })
        }
        Err(error) => {
            check.problem(format!("--{flag} must be a file or an address: {error}"));
            None
        }
    }
}

/// What the environment has for a store.
fn credential(environment: Environment<'_>, source: &Source) -> Option<Credential> {
    use crate::fetch::CredentialKind::{Login, S3Key, Token};
    match source.credential_kind() {
        // Of hf:// alone: nobody says to which other host it would belong.
        Token if source.is_of_hub() => {
            source.credential_host().ok()?;
            hub_token(environment).map(Credential::Token)
        }
        Token => None,
        S3Key => aws_key(environment).map(Credential::S3Key),
        Login => {
            let (host, port) = source.credential_host().ok()?;
            registry_login(environment, &host, port).map(Credential::Login)
        }
    }
}

fn hub_token(environment: Environment<'_>) -> Option<Token> {
    let named = environment.first(&["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]);
    let kept = || {
        let path = environment.first(&["HF_TOKEN_PATH"]).map(PathBuf::from);
        let path = path.or_else(|| Some(environment.dir("HF_HOME", HF_HOME)?.join("token")))?;
        std::fs::read_to_string(path).ok().filter(|token| !token.trim().is_empty())
    };
    named.or_else(kept).map(|token| Token::new(&token))
}

fn aws_key(environment: Environment<'_>) -> Option<S3Key> {
    let id = environment.first(&["AWS_ACCESS_KEY_ID"])?;
    let secret = Token::new(&environment.first(&["AWS_SECRET_ACCESS_KEY"])?);
    let session = environment.first(&["AWS_SESSION_TOKEN"]).map(|token| Token::new(&token));
    Some(S3Key { id, secret, session })
}

fn registry_login(environment: Environment<'_>, host: &str, port: u16) -> Option<Login> {
    let files = [
        environment.first(&["REGISTRY_AUTH_FILE"]).map(PathBuf::from),
        environment.dir("DOCKER_CONFIG", DOCKER_HOME).map(|dir| dir.join("config.json")),
    ];
    let login = |path: PathBuf| docker_login(&std::fs::read(path).ok()?, (host, port), None).ok()?;
    files.into_iter().flatten().find_map(login)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn found(variables: &[(&str, &str)], address: &str) -> Option<Credential> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let mut check = Check::default();
        let model = remote(&mut check, Environment(&variable), "model", Path::new(address), None);
        assert!(check.found_none());
        credential(Environment(&variable), &model.unwrap().source)
    }

    #[test]
    fn credentials_are_where_the_clients_of_the_stores_have_them() {
        let token = |text: &str| Some(Credential::Token(Token::new(text)));
        let home = tempfile::tempdir().unwrap();
        let below = |path: &str, text: &str| {
            let path = home.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let home = ("HOME", home.path().to_str().unwrap());
        assert_eq!(found(&[home], "hf://o/r/m.gguf"), None);
        below(".cache/huggingface/token", "kept\n");
        assert_eq!(found(&[home], "hf://o/r/m.gguf"), token("kept"));
        assert_eq!(found(&[home, ("HF_TOKEN", "named")], "hf://o/r/m.gguf"), token("named"));
        assert_eq!(found(&[home], "https://huggingface.co/m.gguf"), None, "it is for the Hub");
        let plain = [home, ("HF_ENDPOINT", "http://mirror")];
        assert_eq!(found(&plain, "hf://o/r/m.gguf"), None, "it is not sent where everybody can read it");

        let key = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "hush")];
        let Some(Credential::S3Key(found_key)) = found(&key, "s3://b/m.gguf") else { panic!() };
        assert_eq!((found_key.id.as_str(), found_key.secret), ("id", Token::new("hush")));
        assert_eq!(found(&key[..1], "s3://b/m.gguf"), None);

        // As `docker login` writes it: base64 of "me:hush".
        below(".docker/config.json", r#"{"auths": {"ghcr.io": {"auth": "bWU6aHVzaA=="}}}"#);
        let Some(Credential::Login(login)) = found(&[home], "oci://ghcr.io/acme/m:v1") else { panic!() };
        assert_eq!((login.user.as_str(), login.password, login.hosts), ("me", Token::new("hush"), None));
        assert_eq!(found(&[home], "oci://quay.io/acme/m:v1"), None);
        below(".docker/config.json", r#"{"credsStore": "desktop"}"#);
        assert_eq!(found(&[home], "oci://ghcr.io/acme/m:v1"), None);
    }

    #[test]
    fn endpoints_and_regions_are_those_of_the_environment() {
        let host = |variables: &[(&str, &str)], address: &str| {
            let variable =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            let model = remote(&mut Check::default(), Environment(&variable), "model", Path::new(address), None);
            model.unwrap().source.credential_host().unwrap().0
        };
        assert_eq!(host(&[("AWS_REGION", "eu-west-1")], "s3://b/m.gguf"), "s3.eu-west-1.amazonaws.com");
        let both = [("AWS_ENDPOINT_URL", "http://one"), ("AWS_ENDPOINT_URL_S3", "http://two")];
        assert_eq!(host(&both, "s3://b/m.gguf"), "two");
        assert_eq!(host(&[("HF_ENDPOINT", "https://mirror")], "hf://o/r/m.gguf"), "mirror");
    }
}
