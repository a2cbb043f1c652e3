//! `oci://REGISTRY/REPOSITORY[:TAG][@DIGEST]`: a layer of a manifest that is a GGUF file itself, as ORAS, Docker's models, Ollama's
//! and CNCF's model format have them.
//!
//! A blob is known by its own digest, which is that of the file; the manifest says which that is where nobody else does. A manifest
//! that is named by its digest is checked against it. Absent: models within archives.

use reqwest::Url;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::digest::Digest;
use super::source::SourceError;
use super::split;
use super::stores::{StoreSettings, endpoint, extend, has_odd_segments};

/// The registry that names of images mean by `docker.io`.
const DOCKER_HUB: (&str, &str) = ("docker.io", "registry-1.docker.io");
/// The tag of a repository that names none.
const LATEST: &str = "latest";
/// The forms of manifests that are read.
pub(super) const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.index.v1+json";
/// Annotations that name the file which a layer is.
const NAMES: [&str; 2] = ["org.opencontainers.image.title", "org.cncf.model.filepath"];
/// What Ollama calls the layer with the model.
const OLLAMA: &str = "application/vnd.ollama.image.model";
/// Names of files that a message tells at most.
const MAX_TOLD_FILES: usize = 8;

/// A file in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegistryFile {
    /// `https://REGISTRY/v2/REPOSITORY`.
    repository: Url,
    /// As in the address, without tag and digest.
    name: String,
    tag: Option<String>,
    manifest: Option<Digest>,
    /// Which layer it is.
    pub(super) layer: Option<Digest>,
}

/// What a registry tells of a tag.
#[derive(Debug, Deserialize)]
struct Manifest {
    #[serde(default)]
    layers: Vec<Layer>,
    #[serde(default)]
    manifests: Vec<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    #[serde(default)]
    media_type: String,
    digest: String,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

impl Layer {
    fn name(&self) -> Option<&str> {
        NAMES.iter().find_map(|name| self.annotations.get(*name)).map(String::as_str)
    }

    fn is_model(&self) -> bool {
        let is_gguf = |name: &str| name.to_ascii_lowercase().ends_with(".gguf");
        let has_gguf = self.media_type.split(['.', '+', '/', '-']).any(|part| part == "gguf");
        has_gguf || self.media_type == OLLAMA || self.name().is_some_and(is_gguf)
    }

    fn digest(&self) -> Option<Digest> {
        self.digest.strip_prefix("sha256:")?.parse().ok()
    }
}

impl RegistryFile {
    /// Reads an address. `layer`: which layer is meant, where that is known.
    pub(super) fn parse(
        address: &str,
        settings: StoreSettings<'_>,
        layer: Option<Digest>,
    ) -> Result<Self, SourceError> {
        let wrong = || SourceError::wrong(address, "use one like oci://registry/repository:tag");
        let no_digest = || SourceError::wrong(address, "what follows the @ is to be sha256: and 64 hexadecimal digits");
        let rest = address.strip_prefix("oci://").ok_or_else(wrong)?;
        let (registry, repository) = rest.split_once('/').ok_or_else(wrong)?;
        let (repository, manifest) = match repository.split_once('@') {
            Some((repository, digest)) => {
                // What is no digest must not be taken for none: that would be the newest.
                let digest = digest.strip_prefix("sha256:").and_then(|hex| hex.parse().ok());
                (repository, Some(digest.ok_or_else(no_digest)?))
            }
            None => (repository, None),
        };
        let (before, last) =
            repository.rsplit_once('/').map_or((None, repository), |(before, last)| (Some(before), last));
        let (last, tag) = last.split_once(':').map_or((last, None), |(last, tag)| (last, Some(tag.to_owned())));
        let path = before.map_or_else(|| last.to_owned(), |before| format!("{before}/{last}"));
        if registry.is_empty() || has_odd_segments(&path) {
            return Err(wrong());
        }
        let name = format!("{registry}/{path}");
        let registry = if registry == DOCKER_HUB.0 { DOCKER_HUB.1 } else { registry };
        let mut url = match settings.endpoint {
            Some(other) => endpoint(other)?,
            // A registry on this machine has no certificate, as docker takes it, too.
            None if is_on_this_machine(registry) => endpoint(&format!("http://{registry}")).map_err(|_| wrong())?,
            None => endpoint(&format!("https://{registry}")).map_err(|_| wrong())?,
        };
        extend(&mut url, std::iter::once("v2").chain(path.split('/')));
        Ok(Self { repository: url, name, tag, manifest, layer })
    }

    /// Where the layer is; `None` where it is not known which.
    pub(super) fn url(&self) -> Option<Url> {
        let mut url = self.repository.clone();
        extend(&mut url, ["blobs", &format!("sha256:{}", self.layer?)].into_iter());
        Some(url)
    }

    /// The registry.
    pub(super) fn endpoint(&self) -> &Url {
        &self.repository
    }

    /// Where the manifest is.
    pub(super) fn manifest_url(&self) -> Url {
        let reference = match self.manifest {
            Some(digest) => format!("sha256:{digest}"),
            None => self.tag.clone().unwrap_or_else(|| LATEST.to_owned()),
        };
        let mut url = self.repository.clone();
        extend(&mut url, ["manifests", &reference].into_iter());
        url
    }

    /// Whether its manifest is named by a digest, and so always the same.
    pub(super) fn is_pinned(&self) -> bool {
        self.manifest.is_some()
    }

    /// What is to be called after it: the repository's last part.
    pub(super) fn stem(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }

    /// Its address.
    pub(super) fn address(&self) -> String {
        let tag = self.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
        let manifest = self.manifest.map(|digest| format!("@sha256:{digest}")).unwrap_or_default();
        format!("oci://{}{tag}{manifest}", self.name)
    }

    /// The files of the manifest: one, or the parts of a model that is split, in their order.
    pub(super) fn pinned(&self, manifest: &[u8]) -> Result<Vec<(Self, Digest)>, String> {
        let found = Digest::from(<[u8; 32]>::from(Sha256::digest(manifest)));
        if let Some(asked) = self.manifest.filter(|asked| *asked != found) {
            return Err(format!("the registry has answered with the manifest {found:?}, and {asked:?} was asked for"));
        }
        let manifest: Manifest = serde_json::from_slice(manifest)
            .map_err(|_| String::from("what the registry has answered is no manifest; correct the tag"))?;
        if !manifest.manifests.is_empty() {
            return Err(String::from("it is an index of several manifests; name one of them by its digest: @sha256:…"));
        }
        let mut models: Vec<(Option<&str>, Digest)> = manifest
            .layers
            .iter()
            .filter(|layer| layer.is_model())
            .filter_map(|layer| Some((layer.name(), layer.digest()?)))
            .collect();
        let names: Vec<&str> = models.iter().filter_map(|(name, _)| *name).collect();
        match models.len() {
            0 => {
                return Err(String::from(
                    "none of its layers is a GGUF file; push one as a layer of its own: oras push REPOSITORY:TAG model.gguf",
                ));
            }
            1 => {}
            _ if split::is_whole(&names) && names.len() == models.len() => models.sort_unstable(),
            count => {
                let told: Vec<String> = models
                    .iter()
                    .take(MAX_TOLD_FILES)
                    .map(|(name, digest)| format!("{} ({digest})", name.unwrap_or("without a name")))
                    .collect();
                let told = told.join(", ");
                return Err(format!("it has {count} GGUF files; give the sha256 of one of them: {told}"));
            }
        }
        let pinned = Self { manifest: Some(found), ..self.clone() };
        Ok(models.into_iter().map(|(_, layer)| (Self { layer: Some(layer), ..pinned.clone() }, layer)).collect())
    }
}

fn is_on_this_machine(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    host == "localhost" || host.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn pinned(layers: serde_json::Value) -> Result<Vec<Digest>, String> {
        let file = RegistryFile::parse("oci://r/org/m:v1", StoreSettings::default(), None).unwrap();
        let manifest = json!({"schemaVersion": 2, "layers": layers}).to_string();
        let files = file.pinned(manifest.as_bytes())?;
        let digest = Digest::from(<[u8; 32]>::from(Sha256::digest(manifest.as_bytes())));
        assert!(files.iter().all(|(file, _)| file.address() == format!("oci://r/org/m:v1@sha256:{digest}")));
        Ok(files.into_iter().map(|(_, digest)| digest).collect())
    }

    fn layer(kind: &str, name: Option<&str>, digest: &str) -> serde_json::Value {
        let annotations = name.map(|name| json!({"org.opencontainers.image.title": name})).unwrap_or(json!({}));
        json!({"mediaType": kind, "digest": format!("sha256:{}", digest.repeat(32)), "size": 1, "annotations": annotations})
    }

    #[test]
    fn the_layer_that_is_the_model_is_found_however_it_was_pushed() {
        let license = || layer("application/vnd.docker.ai.license", None, "11");
        for model in [
            layer("application/vnd.docker.ai.gguf.v3", None, "ab"),
            layer("application/vnd.ollama.image.model", None, "ab"),
            layer("application/octet-stream", Some("m.GGUF"), "ab"),
            json!({"mediaType": "application/vnd.cncf.model.weight.v1.raw", "digest": format!("sha256:{}", "ab".repeat(32)),
                "annotations": {"org.cncf.model.filepath": "m.gguf"}}),
        ] {
            assert_eq!(pinned(json!([license(), model])).unwrap(), ["ab".repeat(32).parse().unwrap()], "{model}");
        }
        let parts = [("m-00002-of-00002.gguf", "22"), ("m-00001-of-00002.gguf", "11")];
        let parts = parts.map(|(name, digest)| layer("application/octet-stream", Some(name), digest));
        let digests = ["11", "22"].map(|digest| digest.repeat(32).parse().unwrap());
        assert_eq!(pinned(json!(parts)).unwrap(), digests, "in their order");
    }

    #[test]
    fn what_names_no_single_model_is_refused_with_what_to_do() {
        let gguf = |name, digest| layer("application/octet-stream", Some(name), digest);
        for (layers, says) in [
            (json!([]), "oras push"),
            (json!([layer("application/tar", None, "ab")]), "oras push"),
            (
                json!([gguf("a.gguf", "11"), gguf("b.gguf", "22")]),
                "it has 2 GGUF files; give the sha256 of one of them",
            ),
            (json!([gguf("m-00001-of-00002.gguf", "11"), gguf("n.gguf", "22")]), "it has 2 GGUF files"),
        ] {
            let told = pinned(layers).unwrap_err();
            assert!(told.contains(says), "{told}");
        }
        let file = RegistryFile::parse("oci://r/m:v1", StoreSettings::default(), None).unwrap();
        assert!(file.pinned(b"<html>").unwrap_err().contains("no manifest"));
        assert!(file.pinned(br#"{"manifests": [{}]}"#).unwrap_err().contains("index of several"));
        for wrong in ["sha256:abc".to_owned(), format!("sha512:{}", "ab".repeat(64)), String::new()] {
            let address = format!("oci://r/m@{wrong}");
            assert!(
                RegistryFile::parse(&address, StoreSettings::default(), None).is_err(),
                "{address} is no newest one"
            );
        }
        let another = format!("oci://r/m@sha256:{}", "ab".repeat(32));
        let file = RegistryFile::parse(&another, StoreSettings::default(), None).unwrap();
        assert!(file.pinned(br#"{"layers": []}"#).unwrap_err().contains("was asked for"));
        assert!(file.manifest_url().as_str().ends_with(&format!("/v2/m/manifests/sha256:{}", "ab".repeat(32))));
    }
}
