//! What of http(s) stands behind the addresses of stores: `s3://` here, `hf://` in [`super::hub`], `oci://` in [`super::oci`].
//!
//! A file of Hugging Face's and a blob of a registry have an address of https:// each. An object of a bucket has one for each
//! request, which a signature of limited time is part of. So all of them are downloaded, continued and checked as any other file
//! ([`super::download`]), and connected to only where that is allowed ([`super::reach`]).

use std::time::Duration;

use gantry_crds::inference_service::SourceSpec;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::signer::Signer;
use reqwest::{Method, Url};

use super::connector::Connector;
use super::error::FetchError;
use super::reach::Reach;
use super::source::{S3Key, SourceError};

/// The region of a bucket whose spec names none, as the tools of AWS have it.
const DEFAULT_REGION: &str = "us-east-1";
/// How long a signature holds: a request that began within this time is answered to its end.
const SIGNATURE_LIFETIME: Duration = Duration::from_secs(900);
/// Variables by which AWS tells a pod what it may be: a role of its ServiceAccount, or a Pod Identity. A key in the environment is
/// no such thing: it may be for another store.
const AWS_IDENTITY_VARIABLES: [(&str, AmazonS3ConfigKey); 6] = [
    ("AWS_WEB_IDENTITY_TOKEN_FILE", AmazonS3ConfigKey::WebIdentityTokenFile),
    ("AWS_ROLE_ARN", AmazonS3ConfigKey::RoleArn),
    ("AWS_ROLE_SESSION_NAME", AmazonS3ConfigKey::RoleSessionName),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", AmazonS3ConfigKey::ContainerCredentialsRelativeUri),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", AmazonS3ConfigKey::ContainerCredentialsFullUri),
    ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", AmazonS3ConfigKey::ContainerAuthorizationTokenFile),
];

/// What a spec says of a store beside the address.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreSettings<'a> {
    /// Asked instead of the store that everybody knows.
    pub endpoint: Option<&'a str>,
    /// Where a bucket is.
    pub region: Option<&'a str>,
}

impl<'a> StoreSettings<'a> {
    /// As a spec has them.
    #[must_use]
    pub fn of(spec: &'a SourceSpec) -> Self {
        Self { endpoint: spec.endpoint.as_deref(), region: spec.region.as_deref() }
    }
}

/// An object of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct S3Object {
    endpoint: Url,
    region: String,
    bucket: String,
    key: Path,
}

impl S3Object {
    /// Reads `s3://BUCKET/KEY`.
    pub(super) fn parse(address: &str, settings: StoreSettings<'_>) -> Result<Self, SourceError> {
        let wrong = || SourceError::wrong(address, "use one like s3://bucket/path/model.gguf");
        let (bucket, key) = address.strip_prefix("s3://").and_then(|rest| rest.split_once('/')).ok_or_else(wrong)?;
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_name) || has_odd_segments(key) {
            return Err(wrong());
        }
        let region = settings.region.unwrap_or(DEFAULT_REGION);
        let endpoint = match settings.endpoint {
            Some(other) => endpoint(other)?,
            None => endpoint(&format!("https://s3.{region}.amazonaws.com"))?,
        };
        let key = Path::parse(key).map_err(|_| wrong())?;
        Ok(Self { endpoint, region: region.to_owned(), bucket: bucket.to_owned(), key })
    }

    /// The object beside it whose key has this as its last part.
    pub(super) fn beside(&self, name: &str) -> Result<Self, SourceError> {
        let wrong = || SourceError::wrong(name, "use one like s3://bucket/path/model.gguf");
        let key = self.key.as_ref();
        let folder = key.rsplit_once('/').map(|(folder, _)| format!("{folder}/")).unwrap_or_default();
        Ok(Self { key: Path::parse(format!("{folder}{name}")).map_err(|_| wrong())?, ..self.clone() })
    }

    /// Its address.
    pub(super) fn address(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.key)
    }

    /// The last part of its key.
    pub(super) fn name(&self) -> &str {
        self.key.filename().unwrap_or_default()
    }

    /// Who is asked for it.
    pub(super) fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// An address of it that a request may be made to for [`SIGNATURE_LIFETIME`]: signed with the key, else with what the platform
    /// gives the pod, else not at all, as for a bucket that everybody may read.
    pub(super) async fn url(&self, key: Option<&S3Key>, reach: Reach) -> Result<Url, FetchError> {
        let given = |(name, key)| Some((key, std::env::var(name).ok()?));
        let identity: Vec<(AmazonS3ConfigKey, String)> = AWS_IDENTITY_VARIABLES.into_iter().filter_map(given).collect();
        let builder = match key {
            Some(key) => key.given_to(AmazonS3Builder::new()),
            None if !identity.is_empty() => identity
                .into_iter()
                .fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value)),
            None => return Ok(self.unsigned()),
        };
        let endpoint = self.endpoint.as_str().trim_end_matches('/');
        let store = builder
            .with_endpoint(endpoint)
            .with_allow_http(true)
            .with_virtual_hosted_style_request(false)
            .with_region(&self.region)
            .with_bucket_name(&self.bucket)
            // Nothing but a role's credentials is asked for by it.
            .with_http_connector(Connector::from_env(reach))
            .build();
        // What these errors tell is of the platform's credentials, and no secret.
        let failed = |error: object_store::Error| {
            FetchError::temporary(format!("s3://{}/{}: it cannot be signed for: {error}", self.bucket, self.key))
        };
        store.map_err(failed)?.signed_url(Method::GET, &self.key, SIGNATURE_LIFETIME).await.map_err(failed)
    }

    fn unsigned(&self) -> Url {
        let mut url = self.endpoint.clone();
        extend(&mut url, std::iter::once(self.bucket.as_str()).chain(self.key.as_ref().split('/')));
        url
    }
}

/// Reads the address of a store.
pub(super) fn endpoint(address: &str) -> Result<Url, SourceError> {
    let wrong = || SourceError::wrong(address, "give as endpoint an address like https://host:port");
    let url = Url::parse(address).map_err(|_| wrong())?;
    let plain =
        url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !plain {
        return Err(wrong());
    }
    Ok(url)
}

pub(super) fn extend<'a>(url: &mut Url, segments: impl Iterator<Item = &'a str>) {
    // An address of http(s), as endpoints are, has a path that can be extended.
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(segments);
    }
}

/// Whether a path has a part that means another place, or none.
pub(super) fn has_odd_segments(path: &str) -> bool {
    path.split('/').any(|segment| matches!(segment, "" | "." | ".."))
}
