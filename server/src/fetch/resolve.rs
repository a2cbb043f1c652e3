//! What an address means: which files, and which digest each has where the store knows it.
//!
//! Hugging Face and registries know digests, and say what pins an address that may mean another file tomorrow. Of all others only what
//! their server calls the file now is known ([`FileState`]). A first part of a model that is split means all of its parts.

use reqwest::Url;
use reqwest::header::{ACCEPT, HeaderMap};

use super::asked::Place;
use super::digest::Digest;
use super::error::FetchError;
use super::hub::{HubFile, Revision};
use super::limits::{MAX_HUB_ANSWER_BYTES, MAX_MANIFEST_BYTES};
use super::oci::{MANIFESTS, RegistryFile};
use super::partial::Validator;
use super::refs::FileState;
use super::source::{Location, Source};
use super::{Fetcher, http, split};

/// What an address means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its files: one, or all parts of a model that is split, in their order.
    pub files: Vec<NamedFile>,
    /// The address that means the same for ever, where the store has such.
    pub pinned: Option<String>,
}

/// A file that an address means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// Where it is.
    pub source: Source,
    /// Its digest, where the store knows it.
    pub digest: Option<Digest>,
}

impl Source {
    /// Whether the address always means the same files.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        match &self.location {
            Location::Hub(file) => file.is_pinned(),
            Location::Registry(file) => file.is_pinned() || file.layer.is_some(),
            Location::Http(_) | Location::S3(_) | Location::File(_) | Location::Volume(_) => false,
        }
    }
}

impl Fetcher {
    /// Asks the store what an address means. One try.
    ///
    /// # Errors
    /// The store does not answer, refuses, or has no such file.
    pub async fn resolve(&self, source: &Source) -> Result<Named, FetchError> {
        match &source.location {
            Location::Hub(file) => self.resolve_at_hub(source, file).await,
            Location::Registry(file) if file.layer.is_none() => self.resolve_at_registry(source, file).await,
            _ => parts_beside(source),
        }
    }

    async fn resolve_at_hub(&self, source: &Source, file: &HubFile) -> Result<Named, FetchError> {
        let answer = self.document(source, &file.revision_url(), "application/json", MAX_HUB_ANSWER_BYTES).await?;
        let refused = |what: String| FetchError::Permanent(format!("{source}: {what}"));
        let revision: Revision = serde_json::from_slice(&answer)
            .map_err(|_| refused(String::from("what its Hub answers names no files; correct its endpoint")))?;
        let paths = split::parts(file.path()).unwrap_or_else(|| vec![file.path().to_owned()]);
        let mut files = Vec::new();
        for path in &paths {
            let (file, digest) = file.pinned(&revision, path).map_err(refused)?;
            let address = file.address();
            files.push(NamedFile { source: source.at(Location::Hub(file), address), digest });
        }
        let pinned = files.first().map(|file| file.source.to_string());
        Ok(Named { files, pinned })
    }

    async fn resolve_at_registry(&self, source: &Source, file: &RegistryFile) -> Result<Named, FetchError> {
        let manifest = self.document(source, &file.manifest_url(), MANIFESTS, MAX_MANIFEST_BYTES).await?;
        let files = file.pinned(&manifest).map_err(|what| FetchError::Permanent(format!("{source}: {what}")))?;
        let pinned = files.first().map(|(file, _)| file.address());
        let named = |(file, digest): (RegistryFile, Digest)| {
            let address = file.address();
            NamedFile { source: source.at(Location::Registry(file), address), digest: Some(digest) }
        };
        Ok(Named { files: files.into_iter().map(named).collect(), pinned })
    }

    /// What the server calls a file now. One try.
    pub(super) async fn state(&self, source: &Source) -> Result<FileState, FetchError> {
        let validator = Validator::default();
        let (client, url) = (self.client(source)?, self.url(source).await?);
        let response = http::send(self.target(&client, source, &url), Some((0, Some(0))), &validator).await?;
        match http::judge((source.asked, source.address()), response.status(), response.headers(), 0, &validator) {
            http::Answer::Body { total, validator, .. } => Ok(FileState { validator, total }),
            http::Answer::Refused(error) => Err(error),
            http::Answer::Complete | http::Answer::StartOver(_) => Ok(FileState::default()),
        }
    }

    /// A short answer of a store, whole.
    async fn document(&self, source: &Source, url: &Url, accept: &str, limit: usize) -> Result<Vec<u8>, FetchError> {
        let client = self.client(source)?;
        let mut target = self.target(&client, source, url);
        let mut headers = HeaderMap::new();
        headers.extend(accept.parse().ok().map(|accept| (ACCEPT, accept)));
        target.headers = Some(&headers);
        let mut response = http::send(target, None, &Validator::default()).await?;
        if !response.status().is_success() {
            return Err(no_document(source, response.status(), response.headers()));
        }
        let mut body = Vec::new();
        let failed = |error: reqwest::Error| http::failure(source.asked.by, source.address(), &error);
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() > limit {
                let limit = gantry_gguf::human_bytes(limit as u64);
                let what = format!("{source}: what its store tells of it is longer than {limit}; give its sha256");
                return Err(FetchError::Permanent(what));
            }
        }
        Ok(body)
    }
}

fn no_document(source: &Source, status: reqwest::StatusCode, headers: &HeaderMap) -> FetchError {
    let missing = |what: &str| FetchError::Permanent(format!("{source} answers {status}: {what}"));
    match (source.asked.place, status.as_u16()) {
        (Place::HuggingFace, 404) => missing("there is no such repository or revision; correct its address"),
        (Place::Registry, 404) => missing("there is no such repository or tag; correct its address, or push the model"),
        _ => http::refusal(source.asked, source.address(), status, headers),
    }
}

/// The file itself, or the parts that lie beside it.
fn parts_beside(source: &Source) -> Result<Named, FetchError> {
    let file = |source: Source| NamedFile { source, digest: None };
    let name = match &source.location {
        Location::Http(url) => {
            let last = url.path_segments().and_then(|mut segments| segments.next_back());
            last.map(|last| percent_encoding::percent_decode_str(last).decode_utf8_lossy())
        }
        Location::S3(object) => Some(object.name().into()),
        _ => None,
    };
    let Some(names) = name.and_then(|name| split::parts(&name)) else {
        return Ok(Named { files: vec![file(source.clone())], pinned: None });
    };
    let files = names.iter().map(|name| match &source.location {
        Location::S3(object) => {
            let object = object.beside(name).map_err(|error| FetchError::Permanent(error.to_string()))?;
            let address = object.address();
            Ok(file(source.at(Location::S3(object), address)))
        }
        Location::Http(url) => {
            let mut url = url.clone();
            if let Ok(mut path) = url.path_segments_mut() {
                path.pop().push(name);
            }
            let address = gantry_crds::address::shown(url.as_str());
            Ok(file(source.at(Location::Http(url), address)))
        }
        _ => Ok(file(source.clone())),
    });
    Ok(Named { files: files.collect::<Result<_, FetchError>>()?, pinned: None })
}
