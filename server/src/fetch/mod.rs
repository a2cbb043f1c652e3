//! Brings model files into a content-addressed cache.
//!
//! [`Fetcher::fetch`] answers with a whole file whose SHA-256 is the one asked for, and that alone: from the [`cache`]
//! when it is there, else over http(s) ([`download`]), which the addresses of stores mean, too ([`stores`]), going on where a broken connection stopped, or from a file of
//! this machine; one on a volume may be used where it is ([`volume`]). What may pass is tried again for as long as the caller waits; what will not is an error at once, with
//! what to do. Bytes come only into room that the cache has granted, only from addresses that may be connected to
//! ([`reach`]), and only while they are those of a GGUF file ([`magic`]). [`Fetcher::peek`] reads a file's first bytes, for a
//! verdict before the download. One fetch per digest runs at a time, from the source of whoever came last ([`flight`]). Absent: what is in the file ([`crate::gates`]), other sources than these.

mod cache;
mod connector;
mod digest;
mod download;
mod error;
mod flight;
mod http;
pub mod limits;
mod magic;
mod partial;
mod progress;
mod reach;
mod registry;
mod source;
mod stores;
mod volume;

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::{Client, Url};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use cache::{Cache, CachedModel};
pub(crate) use connector::Connector;
pub use digest::{Digest, InvalidDigest};
pub use error::FetchError;
pub use progress::FetchProgress;
pub use reach::Reach;
pub use registry::Login;
pub(crate) use source::names;
pub use source::{Credential, CredentialKind, S3Key, Source, SourceError, Token};
pub use stores::StoreSettings;
pub use volume::VerifiedFile;

use cache::Grant;
use download::{Download, blocking};
use flight::{Caller, Flight, Right};
use http::{Answer, Auth, Target};
use limits::{FILE_BUFFER_BYTES, MAX_CLIENTS_WITH_CA, RETRY_BACKOFF_MAX, RETRY_BACKOFF_MIN};
use magic::Magic;
use partial::{Partial, Validator};
use progress::Meter;
use source::{Location, Place};
use volume::VolumeFile;

/// Fetches model files into one cache.
pub struct Fetcher {
    client: Client,
    /// Those that believe certificates of further authorities, by the certificates of these.
    with_ca: Mutex<HashMap<Arc<str>, Client>>,
    reach: Reach,
    cache: Arc<Cache>,
    /// One per digest that was ever fetched: a handful of versions in a pod's life.
    flights: Mutex<HashMap<Digest, Flight>>,
    /// Files on volumes that were hashed: it is not done again while they are the same. One for each digest, as above.
    on_volumes: Mutex<HashMap<Digest, VerifiedFile>>,
}

/// One fetch from its first try to its last.
#[derive(Default)]
struct Tries {
    /// The right to work on the partial file, until that has it.
    right: Option<Right>,
    /// What came so far, between two tries.
    partial: Option<Partial>,
    /// What came last by an answer that did not say how long it is.
    found: Option<Digest>,
    backoff: Backoff,
}

impl Tries {
    fn has_right(&self) -> bool {
        self.right.is_some() || self.partial.is_some()
    }

    /// Lets another fetch go on with what came.
    fn give_way(&mut self) {
        (self.right, self.partial) = (None, None);
    }

    /// Tells why a try failed. Gives the time until the next one.
    fn failed(&mut self, error: &FetchError, digest: Digest, progress: &watch::Sender<FetchProgress>) -> Duration {
        let bytes = self.partial.as_ref().map_or(self.backoff.bytes, Partial::bytes);
        failed(&mut self.backoff, digest, error, bytes, progress)
    }
}

/// The first bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peek {
    /// The bytes.
    pub prefix: Vec<u8>,
    /// Bytes of the whole file.
    pub total: u64,
}

impl Fetcher {
    /// A fetcher that keeps its files in `cache`, and connects to what is within `reach`.
    ///
    /// # Errors
    /// The TLS client cannot be set up, for want of root certificates for instance.
    pub fn new(cache: Arc<Cache>, reach: Reach) -> Result<Self, FetchError> {
        // An error means that the process has installed its provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = http::client(reach, None)
            .map_err(|error| FetchError::Permanent(format!("the https client cannot be set up: {error:?}")))?;
        Ok(Self {
            client,
            with_ca: Mutex::default(),
            reach,
            cache,
            flights: Mutex::default(),
            on_volumes: Mutex::default(),
        })
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// The file with this digest, if it is in the cache; it is hashed once per process.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub async fn cached(&self, digest: Digest) -> Result<Option<CachedModel>, FetchError> {
        let cache = Arc::clone(&self.cache);
        let lease = cache.lease(digest);
        blocking(move || cache.get(digest, lease)).await?.map_err(|error| FetchError::disk("read", &error))
    }

    /// Reads the first `bytes` of a file. `None` when the server does not serve parts. One try.
    ///
    /// # Errors
    /// The source does not answer, or refuses.
    pub async fn peek(&self, source: &Source, bytes: u64) -> Result<Option<Peek>, FetchError> {
        let address = source.to_string();
        match &source.location {
            Location::File(path) => {
                let path = path.clone();
                let read = blocking(move || peek_file(&path, bytes)).await?;
                read.map(Some).map_err(|error| local(&address, &error))
            }
            Location::Volume(file) => {
                let file = file.clone();
                let read = move || peek_file(&file.resolve()?, bytes).map_err(|error| file.unreadable(&error));
                blocking(read).await?.map(Some)
            }
            Location::Http(_) | Location::S3(_) => {
                let range = Some((0, Some(bytes.saturating_sub(1))));
                let validator = Validator::default();
                let (client, url) = (self.client(source)?, self.url(source).await?);
                let response = http::send(self.target(&client, source, &url), range, &validator).await?;
                let place = (source.place, address.as_str());
                match http::judge(place, response.status(), response.headers(), 0, &validator) {
                    Answer::Body { total: Some(total), .. } if response.status() == 206 => {
                        Ok(Some(Peek { prefix: prefix(response, bytes, &address).await?, total }))
                    }
                    Answer::Body { .. } => Ok(None),
                    Answer::Complete | Answer::StartOver(_) => Ok(Some(Peek { prefix: Vec::new(), total: 0 })),
                    Answer::Refused(error) => Err(error),
                }
            }
        }
    }

    /// The client for a source.
    fn client(&self, source: &Source) -> Result<Client, FetchError> {
        let Some(ca) = &source.ca else { return Ok(self.client.clone()) };
        let mut clients = self.with_ca.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(ca) {
            return Ok(client.clone());
        }
        let client = http::client(self.reach, Some(ca)).map_err(|error| {
            FetchError::Permanent(format!(
                "{source}: the certificates of its ca cannot be used: {error:?}; correct them"
            ))
        })?;
        if clients.len() >= MAX_CLIENTS_WITH_CA {
            clients.clear();
        }
        clients.insert(Arc::clone(ca), client.clone());
        Ok(client)
    }

    /// Where a request is made to for a source that is not a file of this machine.
    async fn url(&self, source: &Source) -> Result<Url, FetchError> {
        match &source.location {
            Location::Http(url) => Ok(url.clone()),
            Location::S3(object) => {
                let key = match &source.credential {
                    Some(Credential::S3Key(key)) => Some(key),
                    _ => None,
                };
                object.url(key, self.reach).await
            }
            Location::File(_) | Location::Volume(_) => Err(FetchError::Permanent(format!("{source} has no address"))),
        }
    }

    fn target<'a>(&self, client: &'a Client, source: &'a Source, url: &'a Url) -> Target<'a> {
        let auth = match (&source.credential, source.place) {
            (Some(Credential::Token(token)), _) => Auth::Bearer(token),
            (Some(Credential::Login(login)), Place::Registry) => Auth::Registry(Some(login)),
            (None, Place::Registry) => Auth::Registry(None),
            // What signs is in the address by now.
            _ => Auth::None,
        };
        Target { client, reach: self.reach, url, auth, place: source.place, address: source.address() }
    }

    /// Brings the file into the cache. Tries again what may pass, until `cancel`.
    ///
    /// # Errors
    /// The source refuses, the file is another one, it does not fit into the cache, or `cancel`.
    pub async fn fetch(
        &self,
        source: &Source,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
        cancel: &CancellationToken,
    ) -> Result<CachedModel, FetchError> {
        let fetched = async {
            match &source.location {
                Location::Volume(file) if file.in_place => self.use_in_place(file, digest, progress, cancel).await,
                _ => self.fetch_single(source, digest, progress).await,
            }
        };
        cancel.run_until_cancelled(fetched).await.unwrap_or(Err(FetchError::Cancelled))
    }

    /// Hashes a file where it is, unless this process has done so and it is the same.
    async fn use_in_place(
        &self,
        file: &VolumeFile,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
        cancel: &CancellationToken,
    ) -> Result<CachedModel, FetchError> {
        let mut backoff = Backoff::default();
        loop {
            let known = self.on_volumes.lock().unwrap_or_else(PoisonError::into_inner).get(&digest).cloned();
            let (file, told, stop) = (file.clone(), progress.clone(), cancel.clone());
            let verified = move || {
                let path = file.resolve()?;
                match known.filter(|known| known.path() == path && known.is_unchanged()) {
                    Some(known) => Ok(known),
                    None => file.verify(&path, digest, &told, &stop),
                }
            };
            match blocking(verified).await? {
                Ok(verified) => {
                    let mut known = self.on_volumes.lock().unwrap_or_else(PoisonError::into_inner);
                    known.insert(digest, verified.clone());
                    return Ok(CachedModel::on_volume(verified, digest));
                }
                // What was hashed before counts for nothing: the file is read from its beginning again.
                Err(error @ FetchError::Temporary { .. }) => {
                    tokio::time::sleep(failed(&mut backoff, digest, &error, 0, progress)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn fetch_single(
        &self,
        source: &Source,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
    ) -> Result<CachedModel, FetchError> {
        let flight = {
            let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
            flights.entry(digest).or_default().clone()
        };
        let (caller, lease) = (flight.join(source), self.cache.lease(digest));
        let mut tries = Tries::default();
        loop {
            if !tries.has_right() {
                tries.right = Some(self.turn(source, digest, progress, &caller, &mut tries).await?);
            }
            let result = tokio::select! {
                result = self.try_once(source, digest, progress, &caller, &mut tries) => result,
                () = caller.outdone() => {
                    tracing::info!(%digest, %source, "fetch goes on from the source of a later one");
                    tries.give_way();
                    continue;
                }
            };
            match result {
                Ok(Some(model)) => return Ok(model),
                Ok(None) => {}
                Err(error @ FetchError::Temporary { .. }) => {
                    let next = tokio::time::Instant::now() + tries.failed(&error, digest, progress);
                    tokio::select! {
                        () = tokio::time::sleep_until(next) => {}
                        () = caller.wanted() => {
                            tries.give_way();
                            tokio::time::sleep_until(next).await;
                        }
                    }
                }
                Err(error) => {
                    drop(lease);
                    return Err(error);
                }
            }
        }
    }

    /// The right to work on the partial file: from one who came before with another source only when this one answers.
    async fn turn(
        &self,
        source: &Source,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
        caller: &Caller,
        tries: &mut Tries,
    ) -> Result<Right, FetchError> {
        loop {
            if let Some(right) = caller.try_lock() {
                return Ok(right);
            }
            if !caller.may_take_over() {
                return Ok(caller.lock().await);
            }
            let wait = match self.peek(source, 1).await {
                Ok(_) => return Ok(caller.lock().await),
                Err(error @ FetchError::Temporary { .. }) => tries.failed(&error, digest, progress),
                Err(error) => return Err(error),
            };
            if let Ok(right) = tokio::time::timeout(wait, caller.lock_quietly()).await {
                return Ok(right);
            }
        }
    }

    /// The file if it is there; else one connection, and the check of the file if it is whole after it.
    async fn try_once(
        &self,
        source: &Source,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
        caller: &Caller,
        tries: &mut Tries,
    ) -> Result<Option<CachedModel>, FetchError> {
        if let Some(model) = self.cached(digest).await? {
            return Ok(Some(model));
        }
        let partial = match (tries.partial.take(), tries.right.take()) {
            (Some(partial), _) => partial,
            (None, Some(right)) => self.open_partial(digest, right).await?,
            // The last holder died with its thread, and the right was freed with it.
            (None, None) => self.open_partial(digest, caller.lock().await).await?,
        };
        let address = source.to_string();
        let grant = Arc::new(self.cache.grant(digest));
        // It tells what a full disk lacks.
        let _room = Arc::clone(&grant);
        let (partial, result) = match &source.location {
            Location::File(path) => copy(grant, partial, path, &address, progress).await,
            Location::Volume(file) => {
                let file = file.clone();
                match blocking(move || file.resolve()).await.flatten() {
                    Ok(path) => copy(grant, partial, &path, &address, progress).await,
                    Err(error) => (Some(partial), Err(error)),
                }
            }
            Location::Http(_) | Location::S3(_) => match (self.client(source), self.url(source).await) {
                (Ok(client), Ok(url)) => {
                    let target = self.target(&client, source, &url);
                    Download { target, grant, progress }.connect(partial).await
                }
                (Err(error), _) | (_, Err(error)) => (Some(partial), Err(error)),
            },
        };
        match result {
            Ok(()) => match partial {
                Some(partial) => {
                    self.finish(partial, digest, &address, tries).await?;
                    self.cached(digest).await
                }
                None => Err(FetchError::temporary("the cache's own work failed")),
            },
            Err(error) => {
                let full = matches!(error, FetchError::DiskFull(_));
                // What will not come to an end is not kept for a next try, nor what is no model.
                let useless = matches!(error, FetchError::TooLarge(_) | FetchError::NotGguf(_));
                match partial {
                    Some(partial) if useless => {
                        let discarded = blocking(move || partial.discard()).await?;
                        discarded.map_err(|error| FetchError::disk("remove", &error))?;
                    }
                    partial => tries.partial = partial,
                }
                let cache = Arc::clone(&self.cache);
                if full && blocking(move || cache.evict_unused(digest)).await? {
                    return Err(FetchError::temporary("the disk was full, and unused models were evicted"));
                }
                Err(error)
            }
        }
    }

    async fn open_partial(&self, digest: Digest, right: Right) -> Result<Partial, FetchError> {
        let path = self.cache.partial_path(digest);
        let opened = blocking(move || Partial::open(path, right)).await?;
        opened.map_err(|error| FetchError::disk("open", &error))
    }

    /// Checks a file that is there to its last byte, and gives it its name.
    async fn finish(
        &self,
        partial: Partial,
        digest: Digest,
        address: &str,
        tries: &mut Tries,
    ) -> Result<(), FetchError> {
        let found = partial.digest();
        if found == digest {
            let path = self.cache.path(digest);
            blocking(move || partial.commit(&path)).await?.map_err(|error| FetchError::disk("rename", &error))?;
            self.cache.verified(digest);
            return Ok(());
        }
        // Of an answer that did not say its length nobody knows that it was cut; one that is the same again was not.
        let is_the_file = |tries: &mut Tries| partial.has_known_length() || tries.found.replace(found) == Some(found);
        let whole = partial.is_whole();
        if whole && is_the_file(tries) {
            let bytes = partial.bytes();
            let discarded = blocking(move || partial.discard()).await?;
            discarded.map_err(|error| FetchError::disk("remove", &error))?;
            return Err(FetchError::WrongDigest { expected: digest, found, bytes });
        }
        // Pieces of different answers may not belong together: only a file from one piece is blamed.
        let mut partial = partial;
        let (partial, restarted) = blocking(move || {
            let restarted = partial.restart();
            (partial, restarted)
        })
        .await?;
        tries.partial = Some(partial);
        restarted.map_err(|error| FetchError::disk("truncate", &error))?;
        if whole {
            return Err(FetchError::temporary(format!(
                "{address} sends a file without saying how long it is, and another than was asked for; it is fetched once more, \
                 in case it was cut"
            )));
        }
        Err(FetchError::temporary("the pieces of the file do not belong together; it is fetched again as a whole"))
    }
}

/// Tells why a try failed, after which `bytes` are there. Gives the time until the next one.
fn failed(
    backoff: &mut Backoff,
    digest: Digest,
    error: &FetchError,
    bytes: u64,
    progress: &watch::Sender<FetchProgress>,
) -> Duration {
    // A try that brought bytes is no standstill, and the next one may bring more.
    let stands_still = !backoff.has_come(bytes);
    let wait = backoff.after(error, bytes);
    tracing::warn!(%digest, %error, wait_ms = wait.as_millis() as u64, "fetch interrupted");
    let note = Some(error.to_string());
    progress.send_modify(|p| (p.note, p.stands_still, p.eta) = (note, stands_still, None));
    wait
}

/// Copies a file of this machine: what it holds may change, what the cache holds may not.
async fn copy(
    grant: Arc<Grant>,
    mut partial: Partial,
    from: &Path,
    address: &str,
    progress: &watch::Sender<FetchProgress>,
) -> download::Ended {
    let path = from.to_owned();
    let opened = blocking(move || {
        let opened = open_source(&path).and_then(|(file, total)| partial.restart().map(|()| (file, total)));
        let roomy = opened.map(|(file, total)| grant.grow(total, total).map(|_| (grant, file, total)));
        (partial, roomy)
    });
    let (partial, grant, file, total) = match opened.await {
        Ok((partial, Ok(Ok((grant, file, total))))) => (partial, grant, file, total),
        Ok((partial, Ok(Err(error)))) => return (Some(partial), Err(error)),
        Ok((partial, Err(error))) => return (Some(partial), Err(local(address, &error))),
        Err(error) => return (None, Err(error)),
    };
    let (chunks, writer) = download::write(partial);
    let (out, shown) = (progress.clone(), address.to_owned());
    let read = blocking(move || {
        let mut meter = Meter::new(&out, 0, Some(total), Instant::now());
        // A file that grows meanwhile has another digest as well.
        let mut file = file.take(total);
        let (mut bytes, mut magic) = (0, Magic::from(0));
        loop {
            let mut chunk = vec![0; FILE_BUFFER_BYTES];
            let n = file.read(&mut chunk).map_err(|error| local(&shown, &error))?;
            chunk.truncate(n);
            magic.check(&chunk).map_err(|_| FetchError::NotGguf(shown.clone()))?;
            if n == 0 || chunks.blocking_send(Bytes::from(chunk)).is_err() {
                return Ok(());
            }
            bytes += n as u64;
            meter.at(bytes, Instant::now());
        }
    });
    let result = read.await.and_then(|result| result);
    let written = writer.await;
    drop(grant);
    match written {
        Ok((partial, Ok(()))) => (Some(partial), result),
        Ok((partial, Err(error))) => (Some(partial), Err(FetchError::disk("write", &error))),
        Err(error) => (None, Err(FetchError::temporary(format!("the cache's own work failed: {error}")))),
    }
}

/// Waits between tries: longer each time, until bytes come again.
#[derive(Default)]
pub(crate) struct Backoff {
    failures: u32,
    bytes: u64,
}

impl Backoff {
    /// Whether the last try brought any of the `bytes` that are there.
    fn has_come(&self, bytes: u64) -> bool {
        bytes > self.bytes
    }

    /// The wait after `error`, when `bytes` are there.
    pub(crate) fn after(&mut self, error: &FetchError, bytes: u64) -> Duration {
        if bytes > self.bytes {
            self.failures = 0;
        }
        self.bytes = bytes;
        let wait = RETRY_BACKOFF_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        match error {
            FetchError::Temporary { retry_after: Some(after), .. } => wait.max(*after),
            _ => wait,
        }
    }
}

async fn prefix(mut response: reqwest::Response, bytes: u64, address: &str) -> Result<Vec<u8>, FetchError> {
    let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut prefix = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| http::failure(address, &error))? {
        prefix.extend_from_slice(&chunk);
        if prefix.len() >= limit {
            prefix.truncate(limit);
            break;
        }
    }
    Ok(prefix)
}

fn open_source(path: &Path) -> io::Result<(File, u64)> {
    // Asked before opening: opening a pipe would wait for its other end.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let file = File::open(path)?;
    let total = file.metadata()?.len();
    Ok((file, total))
}

fn peek_file(path: &Path, bytes: u64) -> io::Result<Peek> {
    let (file, total) = open_source(path)?;
    let mut prefix = Vec::new();
    file.take(bytes).read_to_end(&mut prefix)?;
    Ok(Peek { prefix, total })
}

fn local(address: &str, error: &io::Error) -> FetchError {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => {
            FetchError::Permanent(format!(
                "{address} cannot be read: {error}; mount the file there, or correct the path"
            ))
        }
        _ => FetchError::temporary(format!("{address} cannot be read: {error}")),
    }
}
