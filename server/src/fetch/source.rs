//! Where a model file comes from, checked once: an address that can be used, and a token that may be sent to it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gantry_crds::address::shown;
use reqwest::Url;

use super::volume::VolumeFile;

/// A place that can be fetched from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub(super) location: Location,
    pub(super) token: Option<Token>,
    /// Certificates of further authorities, as PEM.
    pub(super) ca: Option<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Location {
    Http(Url),
    File(PathBuf),
    Volume(VolumeFile),
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
    /// It is not an address.
    #[error("{address:?} is not an address ({reason}); use one like https://host/path/model.gguf")]
    NotAnAddress {
        /// As it was given.
        address: String,
        /// What the parser says.
        reason: String,
    },
    /// This release does not fetch from there.
    #[error("models cannot be fetched from {0}:// in this release; use https://, http:// or file://")]
    UnsupportedScheme(String),
    /// A token would be readable on the way.
    #[error("a token is sent over https:// only; use an address of https://, or leave secretRef out")]
    TokenOverHttp,
    /// A file's address without a path on this machine.
    #[error("{0:?} names no file of this pod; use file:///path/model.gguf")]
    NotALocalFile(String),
}

impl Source {
    /// Checks an address.
    ///
    /// # Errors
    /// It is no address, its scheme is not supported, or a token would travel in the clear.
    pub fn parse(address: &str, token: Option<Token>) -> Result<Self, SourceError> {
        let shown = || shown(address);
        let url = Url::parse(address)
            .map_err(|error| SourceError::NotAnAddress { address: shown(), reason: error.to_string() })?;
        let location = match url.scheme() {
            "http" if token.is_some() => return Err(SourceError::TokenOverHttp),
            "http" | "https" => Location::Http(url),
            "file" => Location::File(url.to_file_path().map_err(|()| SourceError::NotALocalFile(shown()))?),
            other => return Err(SourceError::UnsupportedScheme(other.to_owned())),
        };
        Ok(Self { location, token, ca: None })
    }

    /// The host and the port to which a token for this source would be sent.
    ///
    /// # Errors
    /// A token would be readable on the way.
    pub fn token_host(&self) -> Result<(String, u16), SourceError> {
        match &self.location {
            Location::Http(url) if url.scheme() == "https" => {
                let host = url.host_str().unwrap_or_default().trim_end_matches('.').to_owned();
                Ok((host, url.port_or_known_default().unwrap_or_default()))
            }
            _ => Err(SourceError::TokenOverHttp),
        }
    }

    /// The source, whose host's certificate may be signed by these authorities as well: their certificates as PEM.
    #[must_use]
    pub fn with_ca(self, ca: &str) -> Self {
        Self { ca: Some(ca.into()), ..self }
    }

    /// The source with a token that is sent to its host.
    #[must_use]
    pub fn with_token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// A file at `path` on a claim that is mounted in `folder`, under its name. Where it may be read `in_place` it is not copied
    /// into the cache.
    #[must_use]
    pub fn volume(folder: &Path, claim: &str, path: &str, in_place: bool) -> Self {
        let file = VolumeFile { folder: folder.to_owned(), claim: claim.to_owned(), path: path.to_owned(), in_place };
        Self { location: Location::Volume(file), token: None, ca: None }
    }

    /// A file of this machine.
    #[must_use]
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self { location: Location::File(path.as_ref().to_owned()), token: None, ca: None }
    }
}

/// The address without what may be secret in it: user, password, query, fragment.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Location::File(path) => f.write_str(&shown(&path.display().to_string())),
            Location::Volume(file) => file.fmt(f),
            Location::Http(url) => f.write_str(&shown(url.as_str())),
        }
    }
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
            ("s3://bucket/m.gguf", "s3:// in this release"),
            ("hf://a/b@c/m.gguf", "hf:// in this release"),
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
    fn secrets_are_not_shown() {
        let source = Source::parse("https://user:pass@h:1/m.gguf?sig=hush#x", Some(Token::new(" hush\n"))).unwrap();
        assert_eq!(source.to_string(), "https://h:1/m.gguf");
        assert_eq!(source.token.as_ref().unwrap().reveal(), "hush");
        assert!(!format!("{:?}", source.token).contains("hush"));
        for bad in
            ["https://user:hush@", "https://h:hush/m?hush", "file://user:hush@host/m.gguf?hush", "user:hush@h/m?hush"]
        {
            let error = Source::parse(bad, None).unwrap_err().to_string();
            assert!(!error.contains("user:hush") && !error.contains("?hush"), "{bad}: {error}");
        }
    }
}
