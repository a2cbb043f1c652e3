//! Where responses are kept: in a directory, which servers may share, or in a bucket of S3's.
//!
//! A response is a few objects beside each other, each written whole or not at all: what it answers, what its client was told, and
//! while it is answered in the background a lease and, if it is to end, a mark. They lie in one folder for each first byte of their
//! names. What has not been written for the time to live is deleted by sweeps, a bounded number of objects at a time; whether a
//! response has expired is not left to them. Absent: whose a response is, and what is in it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::StreamExt;
use gantry_responses::ResponseId;
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetResult, ObjectStore, ObjectStoreExt, RetryConfig};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::config::shown;
use crate::fetch::{Connector, Reach};
use crate::limits::{
    MAX_STORED_OBJECT_BYTES, RESPONSE_SWEEP_OBJECTS, RESPONSE_SWEEP_PERIOD, STORE_LIMIT, STORE_RETRIES,
};
use crate::metrics::{StoreMetrics, StoreOperation, StoreOutcome};

/// Where responses are kept, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseStoreSettings {
    /// Where.
    pub place: StorePlace,
    /// For how long, from when they are done.
    pub time_to_live: Duration,
}

/// Where objects are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StorePlace {
    /// A directory.
    Directory(PathBuf),
    /// A bucket of S3's, whose endpoint, region and credentials are in the environment.
    S3 {
        /// Its name.
        bucket: String,
        /// What stands before the names of all objects.
        prefix: Path,
    },
}

impl StorePlace {
    /// Reads `file:///an/absolute/path` or `s3://bucket/prefix`.
    ///
    /// # Errors
    /// What it must be.
    pub fn parse(url: &str) -> Result<Self, String> {
        let wrong = || format!("must be file:///DIRECTORY or s3://BUCKET/PREFIX, not {}", shown(url));
        if let Some(path) = url.strip_prefix("file://").filter(|path| path.starts_with('/')) {
            return Ok(Self::Directory(PathBuf::from(path)));
        }
        let place = url.strip_prefix("s3://").ok_or_else(wrong)?;
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_name) {
            return Err(wrong());
        }
        let prefix = Path::parse(prefix).map_err(|_| wrong())?;
        Ok(Self::S3 { bucket: bucket.to_owned(), prefix })
    }
}

impl fmt::Display for StorePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "file://{}", path.display()),
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
        }
    }
}

/// An object of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The items that it answers.
    Input,
    /// What its client was told.
    Response,
    /// Until when whoever answers it in the background is taken to live.
    Lease,
    /// That it is to end.
    Cancel,
}

impl Part {
    /// In the order in which they are deleted: without its response nothing of the rest is found.
    pub(crate) const ALL: [Self; 4] = [Self::Response, Self::Input, Self::Lease, Self::Cancel];

    fn as_str(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Response => "response",
            Self::Lease => "lease",
            Self::Cancel => "cancel",
        }
    }
}

/// Why an object could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It is larger than any may be.
    #[error("an object of {0} bytes is over {MAX_STORED_OBJECT_BYTES}, which is the limit")]
    TooLarge(u64),
    /// The store took too long.
    #[error("the store did not answer within {} s", STORE_LIMIT.as_secs())]
    Late,
    /// The store refused.
    #[error(transparent)]
    Refused(#[from] object_store::Error),
}

impl StoreError {
    fn outcome(&self) -> StoreOutcome {
        match self {
            Self::TooLarge(_) => StoreOutcome::TooLarge,
            Self::Late => StoreOutcome::Late,
            Self::Refused(object_store::Error::NotFound { .. }) => StoreOutcome::Missing,
            Self::Refused(_) => StoreOutcome::Refused,
        }
    }
}

/// See the module.
pub struct ResponseStore {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    time_to_live: Duration,
    metrics: StoreMetrics,
}

/// An object that is there.
pub(crate) struct Found {
    object: GetResult,
    metrics: StoreMetrics,
}

impl Found {
    /// Its length.
    pub(crate) fn bytes(&self) -> usize {
        usize::try_from(self.object.meta.size).unwrap_or(usize::MAX)
    }

    /// All of it.
    pub(crate) async fn read(self) -> Result<Bytes, StoreError> {
        let Self { object, metrics } = self;
        noted(&metrics, StoreOperation::Read, within(object.bytes())).await
    }
}

impl ResponseStore {
    /// Opens it; a directory that is not there is made, for its user alone. A bucket is asked at what may be reached, or at any
    /// address where nothing says what may.
    ///
    /// # Errors
    /// Why it cannot be used. A bucket is not asked: it may be out of reach for now.
    pub fn open(settings: &ResponseStoreSettings, reach: Option<Reach>) -> Result<Arc<Self>, String> {
        let (objects, prefix): (Arc<dyn ObjectStore>, Path) = match &settings.place {
            StorePlace::Directory(path) => {
                use std::os::unix::fs::DirBuilderExt;
                let failed = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
                let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
                made.map_err(|error| failed(&error))?;
                // Said now, and not to the first client.
                probe(path).map_err(|error| failed(&error))?;
                let directory = LocalFileSystem::new_with_prefix(path).map_err(|error| failed(&error))?;
                (Arc::new(directory), Path::default())
            }
            StorePlace::S3 { bucket, prefix } => {
                // An error means that the process has installed its provider already.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let retry =
                    RetryConfig { max_retries: STORE_RETRIES, retry_timeout: STORE_LIMIT, ..RetryConfig::default() };
                let builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
                let built = match reach {
                    Some(reach) => builder.with_http_connector(Connector::from_env(reach)).build(),
                    None => builder.build(),
                };
                (Arc::new(built.map_err(|error| error.to_string())?), prefix.clone())
            }
        };
        Ok(Arc::new(Self { objects, prefix, time_to_live: settings.time_to_live, metrics: StoreMetrics::default() }))
    }

    /// What is counted of it.
    pub(crate) fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    async fn noted<T>(
        &self,
        operation: StoreOperation,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        noted(&self.metrics, operation, work).await
    }

    /// How long responses are kept.
    pub(crate) fn time_to_live(&self) -> Duration {
        self.time_to_live
    }

    fn path(&self, id: ResponseId, part: Part) -> Path {
        let digits = id.digits();
        let (folder, _) = digits.split_at(2);
        self.prefix.clone().join(folder).join(format!("{digits}.{}", part.as_str()))
    }

    /// Writes an object, in the place of one that may be there.
    pub(crate) async fn put(&self, id: ResponseId, part: Part, bytes: Bytes) -> Result<(), StoreError> {
        let write = async {
            if bytes.len() > MAX_STORED_OBJECT_BYTES {
                return Err(StoreError::TooLarge(bytes.len() as u64));
            }
            within(self.objects.put(&self.path(id, part), bytes.into())).await.map(drop)
        };
        self.noted(StoreOperation::Write, write).await
    }

    /// Looks for an object.
    pub(crate) async fn find(&self, id: ResponseId, part: Part) -> Result<Option<Found>, StoreError> {
        let find = async {
            let object = within(self.objects.get(&self.path(id, part))).await?;
            match object.meta.size {
                size if size > MAX_STORED_OBJECT_BYTES as u64 => Err(StoreError::TooLarge(size)),
                _ => Ok(object),
            }
        };
        match self.noted(StoreOperation::Find, find).await {
            Ok(object) => Ok(Some(Found { object, metrics: self.metrics.clone() })),
            Err(StoreError::Refused(object_store::Error::NotFound { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes objects; those that are not there are no error.
    pub(crate) async fn delete(&self, id: ResponseId, parts: &[Part]) -> Result<(), StoreError> {
        for &part in parts {
            let path = self.path(id, part);
            match self.noted(StoreOperation::Delete, within(self.objects.delete(&path))).await {
                Ok(()) | Err(StoreError::Refused(object_store::Error::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Deletes what has expired, for ever.
    pub async fn watch(self: Arc<Self>) {
        let mut period = interval(RESPONSE_SWEEP_PERIOD.min(self.time_to_live));
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Where several servers begin at once they do not all do the same work.
        let mut folder = rand::random();
        loop {
            period.tick().await;
            match self.noted(StoreOperation::Sweep, self.sweep(folder, RESPONSE_SWEEP_OBJECTS)).await {
                Ok(next) => folder = next,
                Err(error) => tracing::warn!(%error, "stored responses that have expired cannot be deleted now"),
            }
        }
    }

    /// Looks at `most` objects, from a folder on, and deletes what has expired; where to go on.
    async fn sweep(&self, first: u8, most: usize) -> Result<u8, StoreError> {
        let oldest = unix_seconds().saturating_sub(self.time_to_live.as_secs());
        let mut left = most;
        for step in 0..=u8::MAX {
            let folder = first.wrapping_add(step);
            let mut objects = self.objects.list(Some(&self.prefix.clone().join(format!("{folder:02x}")))).take(left);
            while let Some(object) = within(async { objects.next().await.transpose() }).await? {
                left -= 1;
                let written = u64::try_from(object.last_modified.timestamp()).unwrap_or_default();
                if let Some((id, part)) = named(&object.location).filter(|_| written < oldest) {
                    self.delete(id, &[part]).await?;
                }
            }
            if left == 0 {
                return Ok(folder.wrapping_add(1));
            }
        }
        Ok(first)
    }
}

/// The object of a name that is one of ours.
fn named(path: &Path) -> Option<(ResponseId, Part)> {
    let (digits, kind) = path.filename()?.split_once('.')?;
    let part = Part::ALL.into_iter().find(|part| part.as_str() == kind)?;
    ResponseId::parse(&format!("resp_{digits}")).map(|id| (id, part))
}

/// Looks whether a file can be written there.
fn probe(directory: &std::path::Path) -> std::io::Result<()> {
    let probe = directory.join(format!(".probe-{}", std::process::id()));
    std::fs::write(&probe, "")?;
    std::fs::remove_file(&probe)
}

/// Notes how an operation ends.
async fn noted<T>(
    metrics: &StoreMetrics,
    operation: StoreOperation,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let begun = Instant::now();
    let result = work.await;
    let outcome = result.as_ref().map_or_else(StoreError::outcome, |_| StoreOutcome::Ok);
    metrics.ended(operation, outcome, begun.elapsed());
    result
}

async fn within<T>(work: impl Future<Output = Result<T, object_store::Error>>) -> Result<T, StoreError> {
    Ok(timeout(STORE_LIMIT, work).await.map_err(|_| StoreError::Late)??)
}

/// The time; a clock before 1970 says 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|since| since.as_secs()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::metrics::Metrics;
    use crate::output::Output;
    use crate::routing::Router;

    #[tokio::test]
    async fn each_operation_is_counted_by_how_it_ended() {
        let folder = tempfile::tempdir().unwrap();
        let place = StorePlace::Directory(folder.path().to_owned());
        let settings = ResponseStoreSettings { place, time_to_live: Duration::from_secs(60) };
        let store = ResponseStore::open(&settings, None).unwrap();
        let id = ResponseId::parse("resp_0123456789abcdef0123456789abcdef").unwrap();
        assert!(store.find(id, Part::Response).await.unwrap().is_none());
        store.put(id, Part::Response, Bytes::from_static(b"{}")).await.unwrap();
        let found = store.find(id, Part::Response).await.unwrap().unwrap();
        assert_eq!(found.read().await.unwrap(), "{}");
        let long = Bytes::from(vec![0; MAX_STORED_OBJECT_BYTES + 1]);
        assert!(store.put(id, Part::Input, long).await.is_err());
        store.delete(id, &[Part::Response, Part::Lease]).await.unwrap();
        store.sweep(0, 10).await.unwrap();
        let metrics = Metrics::new(Router::new(), Output::new(1), None, Some(store.metrics()));
        let text = metrics.encode().unwrap();
        for line in [
            r#"gantry_response_store_operations_total{operation="find",outcome="missing"} 1"#,
            r#"gantry_response_store_operations_total{operation="find",outcome="ok"} 1"#,
            r#"gantry_response_store_operations_total{operation="read",outcome="ok"} 1"#,
            r#"gantry_response_store_operations_total{operation="write",outcome="ok"} 1"#,
            r#"gantry_response_store_operations_total{operation="write",outcome="too_large"} 1"#,
            r#"gantry_response_store_operations_total{operation="delete",outcome="ok"} 1"#,
            r#"gantry_response_store_operations_total{operation="delete",outcome="missing"} 1"#,
            r#"gantry_response_store_operation_seconds_count{operation="write"} 2"#,
        ] {
            assert!(text.lines().any(|told| told == line), "{line} is missing in:\n{text}");
        }
        // What is in the way of its folders is no folder.
        std::fs::write(folder.path().join("ff"), "").unwrap();
        let id = ResponseId::parse("resp_ff23456789abcdef0123456789abcdef").unwrap();
        assert!(store.put(id, Part::Response, Bytes::new()).await.is_err());
        let text = metrics.encode().unwrap();
        assert!(text.contains(r#"operation="write",outcome="refused"} 1"#), "{text}");
    }
}
