//! Where a model file comes from, checked once: an address that can be used, and a credential that may be sent to it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gantry_crds::address::shown;
use object_store::aws::AmazonS3Builder;
use reqwest::Url;
use sha2::{Digest as _, Sha256};

use super::asked::{Asked, AskedBy, Place};
use super::digest::Digest;
use super::hub::HubFile;
use super::oci::RegistryFile;
use super::registry::Login;
use super::split;
use super::stores::{S3Object, StoreSettings};
use super::volume::VolumeFile;

/// The port of https://.
const HTTPS_PORT: u16 = 443;

/// A place that can be fetched from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub(super) location: Location,
    pub(super) asked: Asked,
    /// As it is shown: without what may be secret in it.
    address: String,
    pub(super) credential: Option<Credential>,
    /// Certificates of further authorities, as PEM.
    pub(super) ca: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Location {
    Http(Url),
    Hub(HubFile),
    Registry(RegistryFile),
    S3(S3Object),
    File(PathBuf),
    Volume(VolumeFile),
}

/// What a source is told of who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// Sent as it is.
    Token(Token),
    /// Requests are signed with it.
    S3Key(S3Key),
    /// Tokens are handed out for it.
    Login(Login),
}

/// Which of these a source takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialKind {
    /// [`Credential::Token`].
    Token,
    /// [`Credential::S3Key`].
    S3Key,
    /// [`Credential::Login`].
    Login,
}

/// A key of S3's, whose secret part no log and no message shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Key {
    /// Names the key.
    pub id: String,
    /// Signs.
    pub secret: Token,
    /// Where the key is one for a time.
    pub session: Option<Token>,
}

impl S3Key {
    pub(super) fn given_to(&self, builder: AmazonS3Builder) -> AmazonS3Builder {
        let builder = builder.with_access_key_id(&self.id).with_secret_access_key(self.secret.reveal());
        self.session.iter().fold(builder, |builder, session| builder.with_token(session.reveal()))
    }
}

/// A bearer token, which no log and no message shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a token over; white space at its ends is a slip of the editor.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// An address that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// It is not an address, or not one of its kind.
    #[error("{address:?} is not an address ({reason}); use one like https://host/path/model.gguf")]
    NotAnAddress {
        /// As it was given.
        address: String,
        /// What the parser says.
        reason: String,
    },
    /// It names nothing where its scheme leads.
    #[error("{address:?} names no file; {way_out}")]
    NamesNothing {
        /// As it was given.
        address: String,
        /// What to write.
        way_out: &'static str,
    },
    /// This release does not fetch from there.
    #[error(
        "models cannot be fetched from {0}:// in this release; use https://, http://, hf://, s3://, oci:// or file://"
    )]
    UnsupportedScheme(String),
    /// A secret would be readable on the way.
    #[error("a token is sent over https:// only; use an address of https://, or leave secretRef out")]
    TokenOverHttp,
    /// A file's address without a path on this machine.
    #[error("{0:?} names no file of this pod; use file:///path/model.gguf")]
    NotALocalFile(String),
    /// The digest of a blob is its name.
    #[error("{0:?} needs the sha256 of the file; give it")]
    NeedsDigest(String),
}

impl SourceError {
    pub(super) fn wrong(address: &str, way_out: &'static str) -> Self {
        Self::NamesNothing { address: shown(address), way_out }
    }
}

impl Source {
    /// Checks an address of https://, http:// or file://.
    ///
    /// # Errors
    /// It is no address, its scheme is not supported, or a token would travel in the clear.
    pub fn parse(address: &str, token: Option<Token>) -> Result<Self, SourceError> {
        let source = Self::of_store(address, StoreSettings::default(), None)?;
        match token {
            Some(token) => {
                source.credential_host()?;
                Ok(source.with_credential(Credential::Token(token)))
            }
            None => Ok(source),
        }
    }

    /// Checks an address of any kind. `digest` is that of the file, by which registries know it.
    ///
    /// # Errors
    /// It is no address, or its scheme is not supported.
    pub fn of_store(address: &str, settings: StoreSettings<'_>, digest: Option<Digest>) -> Result<Self, SourceError> {
        match Self::unpinned(address, settings)? {
            Self { location: Location::Registry(_), .. } if digest.is_none() => {
                Err(SourceError::NeedsDigest(shown(address)))
            }
            source => Ok(digest.map_or(source.clone(), |digest| source.of_digest(digest))),
        }
    }

    /// Checks an address of any kind, of whose file nothing is known: [`Fetcher::resolve`](super::Fetcher::resolve) tells what it
    /// means.
    ///
    /// # Errors
    /// It is no address, or its scheme is not supported.
    pub fn unpinned(address: &str, settings: StoreSettings<'_>) -> Result<Self, SourceError> {
        let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
        let (location, place) = match scheme {
            "hf" => (Location::Hub(HubFile::parse(address, settings)?), Place::HuggingFace),
            "s3" => (Location::S3(S3Object::parse(address, settings)?), Place::Bucket),
            "oci" => (Location::Registry(RegistryFile::parse(address, settings, None)?), Place::Registry),
            _ => {
                let url = Url::parse(address).map_err(|error| SourceError::NotAnAddress {
                    address: shown(address),
                    reason: error.to_string(),
                })?;
                match url.scheme() {
                    "http" | "https" => (Location::Http(url), Place::Web),
                    "file" => {
                        let path = url.to_file_path().map_err(|()| SourceError::NotALocalFile(shown(address)))?;
                        return Ok(Self::file(path));
                    }
                    other => return Err(SourceError::UnsupportedScheme(other.to_owned())),
                }
            }
        };
        let address = match (&location, place) {
            (Location::Http(url), Place::Web) => shown(url.as_str()),
            _ => shown(address),
        };
        let asked = Asked { place, by: AskedBy::default() };
        Ok(Self { location, asked, address, credential: None, ca: None })
    }

    fn here(location: Location, address: String) -> Self {
        let asked = Asked { place: Place::Here, by: AskedBy::default() };
        Self { location, asked, address, credential: None, ca: None }
    }

    /// As it is shown.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// What the source takes to know who asks.
    #[must_use]
    pub fn credential_kind(&self) -> CredentialKind {
        match self.asked.place {
            Place::Bucket => CredentialKind::S3Key,
            Place::Registry => CredentialKind::Login,
            Place::Here | Place::Web | Place::HuggingFace => CredentialKind::Token,
        }
    }

    /// The host and the port that a credential for this source is meant for.
    ///
    /// # Errors
    /// It would be readable on the way. What signs with a key does not send it.
    pub fn credential_host(&self) -> Result<(String, u16), SourceError> {
        let url = match &self.location {
            Location::S3(object) => object.endpoint().clone(),
            Location::Http(url) => url.clone(),
            Location::Hub(file) => file.url(),
            Location::Registry(file) => file.endpoint().clone(),
            Location::File(_) | Location::Volume(_) => return Err(SourceError::TokenOverHttp),
        };
        if url.scheme() != "https" && !matches!(self.location, Location::S3(_)) {
            return Err(SourceError::TokenOverHttp);
        }
        let host = url.host_str().unwrap_or_default().trim_end_matches('.').to_owned();
        Ok((host, url.port_or_known_default().unwrap_or_default()))
    }

    /// The source, where it is known which file it is: registries know one by its digest.
    #[must_use]
    pub fn of_digest(mut self, digest: Digest) -> Self {
        if let Location::Registry(file) = &mut self.location {
            file.layer = Some(digest);
        }
        self
    }

    /// The same for another file, to which the same credentials and certificates apply.
    pub(super) fn at(&self, location: Location, address: String) -> Self {
        Self { location, address, ..self.clone() }
    }

    /// What a model from there is called: the name of its file without `.gguf` and the number of its part.
    #[must_use]
    pub fn model_name(&self) -> String {
        let name = match &self.location {
            Location::Http(url) => {
                let last = url.path_segments().and_then(|mut segments| segments.next_back()).unwrap_or_default();
                percent_encoding::percent_decode_str(last).decode_utf8_lossy().into_owned()
            }
            Location::Hub(file) => file.path().rsplit('/').next().unwrap_or_default().to_owned(),
            Location::Registry(file) => file.stem().to_owned(),
            Location::S3(object) => object.name().to_owned(),
            Location::File(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Location::Volume(file) => file.path.rsplit('/').next().unwrap_or_default().to_owned(),
        };
        let stem = split::stem(&name);
        if stem.is_empty() { String::from("model") } else { stem.to_owned() }
    }

    /// Whether Hugging Face, or a mirror of it, is asked.
    #[must_use]
    pub fn is_of_hub(&self) -> bool {
        self.asked.place == Place::HuggingFace
    }

    /// The file of this machine that it is, if it is one.
    #[must_use]
    pub fn local_path(&self) -> Option<&Path> {
        match &self.location {
            Location::File(path) => Some(path),
            _ => None,
        }
    }

    /// What it is known by where nobody knows its file's digest: a digest of all that it is, a query included.
    pub(super) fn key(&self) -> Digest {
        let all = match &self.location {
            Location::Http(url) => url.to_string(),
            Location::Hub(file) => file.url().to_string(),
            Location::Registry(file) => file.manifest_url().to_string(),
            Location::S3(object) => format!("{} {}", object.endpoint(), object.address()),
            Location::File(_) | Location::Volume(_) => self.address.clone(),
        };
        Digest::from(<[u8; 32]>::from(Sha256::digest(all)))
    }

    /// The source, as it is told to whoever named it.
    #[must_use]
    pub fn asked_by(self, by: AskedBy) -> Self {
        Self { asked: Asked { by, ..self.asked }, ..self }
    }

    /// The source, whose host's certificate may be signed by these authorities as well: their certificates as PEM.
    #[must_use]
    pub fn with_ca(self, ca: &str) -> Self {
        Self { ca: Some(ca.into()), ..self }
    }

    /// The source with what its host is told of who asks.
    #[must_use]
    pub fn with_credential(self, credential: Credential) -> Self {
        Self { credential: Some(credential), ..self }
    }

    /// A file at `path` on a claim that is mounted in `folder`, under its name. Where it may be read `in_place` it is not copied
    /// into the cache.
    #[must_use]
    pub fn volume(folder: &Path, claim: &str, path: &str, in_place: bool) -> Self {
        let file = VolumeFile { folder: folder.to_owned(), claim: claim.to_owned(), path: path.to_owned(), in_place };
        let address = file.to_string();
        Self::here(Location::Volume(file), address)
    }

    /// A file of this machine.
    #[must_use]
    pub fn file(path: impl AsRef<Path>) -> Self {
        let address = shown(&path.as_ref().display().to_string());
        Self::here(Location::File(path.as_ref().to_owned()), address)
    }
}

/// The address without what may be secret in it: user, password, query, fragment.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// Whether a list of hosts has this one: `huggingface.co`, `*.example.com` (any host below it, and not itself) or
/// `files.ns.svc:8443`; without a port, https's own.
pub(crate) fn names(hosts: &str, host: &str, port: u16) -> bool {
    let host = host.to_ascii_lowercase();
    hosts.split([',', ' ', '\n']).map(str::trim).filter(|entry| !entry.is_empty()).any(|entry| {
        let with_port = entry.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (pattern, its_port) = with_port.unwrap_or((entry, HTTPS_PORT));
        let pattern = pattern.to_ascii_lowercase();
        let same_host = match pattern.strip_prefix("*.") {
            // Below a top-level domain anybody may have a host.
            Some(domain) if domain.contains('.') => {
                host.strip_suffix(domain).is_some_and(|below| below.len() > 1 && below.ends_with('.'))
            }
            Some(_) => false,
            None => pattern == host,
        };
        same_host && its_port == port
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_taken_or_refused_with_what_to_do() {
        for good in ["http://files.ns.svc:8080/m.gguf", "https://h/m.gguf?sig=1", "file:///models/m.gguf"] {
            assert!(Source::parse(good, None).is_ok(), "{good}");
        }
        for (bad, says) in [
            ("m.gguf", "https://host/path"),
            ("gs://bucket/m.gguf", "gs:// in this release"),
            ("s3://bucket", "s3://bucket/path/model.gguf"),
            ("s3://a b/m.gguf", "s3://bucket/path/model.gguf"),
            ("s3://bucket/a/../m.gguf", "s3://bucket/path/model.gguf"),
            ("hf://a/m.gguf", "hf://owner/repository@revision/path/model.gguf"),
            ("hf://a/b@/m.gguf", "hf://owner/repository@revision/path/model.gguf"),
            ("hf://a/b@c/../../x/m.gguf", "hf://owner/repository@revision/path/model.gguf"),
            ("oci://registry/m:v1", "needs the sha256"),
            ("file://host/m.gguf", "file:///path"),
        ] {
            let error = Source::parse(bad, None).unwrap_err().to_string();
            assert!(error.contains(says), "{bad}: {error}");
        }
        let token = Some(Token::new("t"));
        assert_eq!(Source::parse("http://h/m", token.clone()).unwrap_err(), SourceError::TokenOverHttp);
        assert!(Source::parse("https://h/m", token).is_ok());
    }

    #[test]
    fn addresses_of_stores_are_those_of_files() {
        let digest: Digest = "ab".repeat(32).parse().unwrap();
        let blob = format!("blobs/sha256:{digest}");
        for (address, endpoint, wanted) in [
            ("hf://o/r@0a1b/d/m Q4.gguf", None, "https://huggingface.co/o/r/resolve/0a1b/d/m%20Q4.gguf".to_owned()),
            ("hf://o/r/m.gguf", Some("https://mirror/hub/"), "https://mirror/hub/o/r/resolve/main/m.gguf".to_owned()),
            ("oci://ghcr.io/acme/models/chat:v3", None, format!("https://ghcr.io/v2/acme/models/chat/{blob}")),
            (
                &format!("oci://docker.io/ai/m@sha256:{digest}"),
                None,
                format!("https://registry-1.docker.io/v2/ai/m/{blob}"),
            ),
            ("oci://localhost:5000/m", Some("http://r.ns.svc:5000"), format!("http://r.ns.svc:5000/v2/m/{blob}")),
        ] {
            let settings = StoreSettings { endpoint, region: None };
            let source = Source::of_store(address, settings, Some(digest)).unwrap();
            let url = match &source.location {
                Location::Hub(file) => file.url(),
                Location::Registry(file) => file.url().unwrap(),
                other => panic!("{other:?}"),
            };
            assert_eq!(url, Url::parse(&wanted).unwrap(), "{address}");
            assert_eq!(source.to_string(), address);
        }
        let host = |address: &str, endpoint| {
            let settings = StoreSettings { endpoint, region: Some("eu-central-1") };
            Source::of_store(address, settings, Some(digest)).unwrap().credential_host()
        };
        assert_eq!(host("s3://b/m.gguf", None), Ok(("s3.eu-central-1.amazonaws.com".to_owned(), 443)));
        assert_eq!(host("s3://b/m.gguf", Some("http://minio:9000")), Ok(("minio".to_owned(), 9000)), "nothing is sent");
        assert_eq!(host("oci://r/m", Some("http://registry:5000")), Err(SourceError::TokenOverHttp));
        for endpoint in ["registry:5000", "ftp://r", "https://me:hush@r", "https://r?x=1", "https://"] {
            let settings = StoreSettings { endpoint: Some(endpoint), region: None };
            let told = Source::of_store("oci://r/m", settings, Some(digest)).unwrap_err().to_string();
            assert!(told.contains("an address like https://host:port") && !told.contains("me:hush"), "{told}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let source = Source::parse("https://user:pass@h:1/m.gguf?sig=hush#x", Some(Token::new(" hush\n"))).unwrap();
        assert_eq!(source.to_string(), "https://h:1/m.gguf");
        let Some(Credential::Token(token)) = &source.credential else { panic!("{source:?}") };
        assert_eq!(token.reveal(), "hush");
        assert!(!format!("{:?}", source.credential).contains("hush"));
        for bad in
            ["https://user:hush@", "https://h:hush/m?hush", "file://user:hush@host/m.gguf?hush", "user:hush@h/m?hush"]
        {
            let error = Source::parse(bad, None).unwrap_err().to_string();
            assert!(!error.contains("user:hush") && !error.contains("?hush"), "{bad}: {error}");
        }
    }
}
