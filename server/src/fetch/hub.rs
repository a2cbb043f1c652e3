//! `hf://OWNER/REPOSITORY[@REVISION]/PATH`: a file of a repository of Hugging Face's, or of a mirror of it.
//!
//! The Hub tells of a revision which commit it is, and of each file that Git LFS keeps its SHA-256, in one answer: that is what
//! pins an address that names a branch, and what finds the parts of a model that is split. Absent: small files that Git itself keeps,
//! of which the Hub does not know the SHA-256; models are none.

use reqwest::Url;
use serde::Deserialize;

use super::digest::Digest;
use super::source::SourceError;
use super::stores::{StoreSettings, endpoint, extend, has_odd_segments};

/// Where files are asked for that `hf://` names.
const HUGGING_FACE: &str = "https://huggingface.co";
/// The revision of a repository that names none.
const MAIN: &str = "main";
/// The digits of a commit.
const COMMIT_DIGITS: usize = 40;
/// Names of files that a message tells at most.
const MAX_TOLD_FILES: usize = 8;

/// A file of a repository, or several of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubFile {
    endpoint: Url,
    owner: String,
    repository: String,
    revision: String,
    path: String,
}

/// What the Hub tells of a revision.
#[derive(Debug, Deserialize)]
pub(super) struct Revision {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

impl HubFile {
    pub(super) fn parse(address: &str, settings: StoreSettings<'_>) -> Result<Self, SourceError> {
        let wrong = || SourceError::wrong(address, "use one like hf://owner/repository@revision/path/model.gguf");
        let rest = address.strip_prefix("hf://").ok_or_else(wrong)?;
        let mut parts = rest.splitn(3, '/');
        let (Some(owner), Some(repository), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(wrong());
        };
        let (repository, revision) = repository.split_once('@').unwrap_or((repository, MAIN));
        if [owner, repository, revision].iter().any(|part| part.is_empty()) || has_odd_segments(path) {
            return Err(wrong());
        }
        let endpoint = endpoint(settings.endpoint.unwrap_or(HUGGING_FACE))?;
        let [owner, repository, revision, path] = [owner, repository, revision, path].map(str::to_owned);
        Ok(Self { endpoint, owner, repository, revision, path })
    }

    /// Where the file is.
    pub(super) fn url(&self) -> Url {
        let mut url = self.endpoint.clone();
        let file = [&*self.owner, &self.repository, "resolve", &self.revision].into_iter().chain(self.path.split('/'));
        extend(&mut url, file);
        url
    }

    /// Where the Hub tells of the revision.
    pub(super) fn revision_url(&self) -> Url {
        let mut url = self.endpoint.clone();
        extend(&mut url, ["api", "models", &self.owner, &self.repository, "revision", &self.revision].into_iter());
        url.set_query(Some("blobs=true"));
        url
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether the revision is a commit, whose files are always the same.
    pub(super) fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }

    /// Its address.
    pub(super) fn address(&self) -> String {
        let Self { owner, repository, revision, path, .. } = self;
        format!("hf://{owner}/{repository}@{revision}/{path}")
    }

    /// The file of the commit that the revision is, and its digest where the Hub knows it.
    pub(super) fn pinned(&self, revision: &Revision, path: &str) -> Result<(Self, Option<Digest>), String> {
        let Self { owner, repository, .. } = self;
        if !is_commit(&revision.sha) {
            return Err(format!("the Hub names no commit of {owner}/{repository}@{}; try again", self.revision));
        }
        let Some(file) = revision.siblings.iter().find(|file| file.rfilename == path) else {
            return Err(format!("{owner}/{repository} has no file {path}{}", revision.models()));
        };
        let digest = file.lfs.as_ref().and_then(|lfs| lfs.sha256.as_ref()?.parse().ok());
        Ok((Self { revision: revision.sha.clone(), path: path.to_owned(), ..self.clone() }, digest))
    }
}

impl Revision {
    /// Which models there are instead.
    fn models(&self) -> String {
        let is_model = |name: &&str| name.to_ascii_lowercase().ends_with(".gguf");
        let mut names: Vec<&str> = self.siblings.iter().map(|file| file.rfilename.as_str()).filter(is_model).collect();
        let more = names.len().saturating_sub(MAX_TOLD_FILES);
        names.truncate(MAX_TOLD_FILES);
        match (names.is_empty(), more) {
            (true, _) => String::from(", and no GGUF file at all; look for a repository that has some"),
            (false, 0) => format!("; it has {}", names.join(", ")),
            (false, more) => format!("; it has {} and {more} more", names.join(", ")),
        }
    }
}

fn is_commit(revision: &str) -> bool {
    revision.len() == COMMIT_DIGITS && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn revision() -> Revision {
        let sha256 = "ab".repeat(32);
        let text = format!(
            r#"{{"id": "o/r", "sha": "{COMMIT}", "siblings": [{{"rfilename": "README.md", "size": 3, "blobId": "b"}},
                {{"rfilename": "d/m.gguf", "size": 9, "blobId": "c", "lfs": {{"sha256": "{sha256}", "size": 9, "pointerSize": 1}}}}]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_branch_is_pinned_to_its_commit_and_a_file_to_its_digest() {
        let file = HubFile::parse("hf://o/r/d/m.gguf", StoreSettings::default()).unwrap();
        assert_eq!(file.revision_url().as_str(), "https://huggingface.co/api/models/o/r/revision/main?blobs=true");
        assert!(!file.is_pinned());
        let (pinned, digest) = file.pinned(&revision(), "d/m.gguf").unwrap();
        assert!(pinned.is_pinned() && digest == Some("ab".repeat(32).parse().unwrap()));
        assert_eq!(pinned.address(), format!("hf://o/r@{COMMIT}/d/m.gguf"));
        assert_eq!(pinned.url().as_str(), format!("https://huggingface.co/o/r/resolve/{COMMIT}/d/m.gguf"));
        assert_eq!(file.pinned(&revision(), "README.md").unwrap().1, None, "of what Git keeps");
    }

    #[test]
    fn a_file_that_is_not_there_is_told_with_those_that_are() {
        let file = HubFile::parse("hf://o/r@v1/x.gguf", StoreSettings::default()).unwrap();
        let told = file.pinned(&revision(), "x.gguf").unwrap_err();
        assert_eq!(told, "o/r has no file x.gguf; it has d/m.gguf");
        let empty = Revision { sha: COMMIT.to_owned(), siblings: Vec::new() };
        assert!(file.pinned(&empty, "x.gguf").unwrap_err().contains("no GGUF file at all"));
        let odd = Revision { sha: "main".to_owned(), siblings: Vec::new() };
        assert!(file.pinned(&odd, "x.gguf").unwrap_err().contains("names no commit"));
    }
}
