//! Brings model files into a content-addressed cache.
//!
//! [`Fetcher::fetch`] answers with a whole file whose SHA-256 is the one asked for, and that alone: from the [`cache`]
//! when it is there, else over http(s) ([`download`]), which the addresses of stores mean, too ([`stores`]), going on where a broken connection stopped, or from a file of
//! this machine; one on a volume may be used where it is ([`volume`]). What may pass is tried again for as long as the caller waits; what will not is an error at once, with
//! what to do. Bytes come only into room that the cache has granted, only from addresses that may be connected to
//! ([`reach`]), and only while they are those of a GGUF file ([`magic`]). [`Fetcher::peek`] reads a file's first bytes, for a
//! verdict before the download. One fetch per digest runs at a time, from the source of whoever came last ([`flight`]).
//! [`Fetcher::bring`] answers with all that an address means ([`resolve`]): stores tell which files those are and their digests, and what
//! they told is kept ([`refs`]). Absent: what is in the file ([`crate::gates`]), other sources than these.

mod asked;
mod bring;
mod cache;
mod connector;
mod digest;
mod docker;
mod download;
mod error;
mod flight;
mod http;
mod hub;
pub mod limits;
mod local;
mod lock;
mod magic;
mod oci;
mod partial;
mod parts;
mod progress;
mod reach;
mod refs;
mod registry;
mod resolve;
mod segments;
mod source;
mod split;
mod stores;
mod tries;
mod volume;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use reqwest::{Client, Url};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use asked::AskedBy;
pub use bring::{Asking, Brought, Watched};
pub use cache::{Cache, CachedModel};
pub(crate) use connector::Connector;
pub use digest::{Digest, InvalidDigest};
pub(crate) use docker::docker_login;
pub use error::FetchError;
pub use progress::FetchProgress;
pub use reach::Reach;
pub use registry::Login;
pub use resolve::{Named, NamedFile};
pub(crate) use source::names;
pub use source::{Credential, CredentialKind, S3Key, Source, SourceError, Token};
pub use stores::StoreSettings;
pub(crate) use tries::Backoff;
pub use volume::FileStamp;

use asked::Place;
use download::{Download, blocking};
use flight::{Caller, Flight, Right};
use http::{Answer, Auth, Target};
use limits::{FETCH_CONNECTIONS, MAX_CLIENTS_WITH_CA, OTHER_PROCESS_PERIOD};
use local::{copy, local, peek_file};
use partial::{Partial, Validator};
use source::Location;
use tries::{Tries, failed};
use volume::VolumeFile;

/// Fetches model files into one cache.
pub struct Fetcher {
    clients: Clients,
    /// Those that believe certificates of further authorities, by the certificates of these.
    with_ca: Mutex<HashMap<Arc<str>, Clients>>,
    reach: Reach,
    by: AskedBy,
    cache: Arc<Cache>,
    /// One per digest that was ever fetched: a handful of versions in a pod's life.
    flights: Mutex<HashMap<Digest, Flight>>,
    /// Files on volumes that were hashed: it is not done again while they are the same. One for each digest, as above.
    on_volumes: Mutex<HashMap<Digest, FileStamp>>,
}

/// Who makes requests.
#[derive(Clone)]
struct Clients {
    /// Each over a connection of its own.
    single: Client,
    /// Those of one download, over connections that are kept.
    several: Client,
}

impl Clients {
    fn new(reach: Reach, by: AskedBy, ca: Option<&str>) -> Result<Self, reqwest::Error> {
        let single = http::client(reach, by, ca, 0)?;
        Ok(Self { single, several: http::client(reach, by, ca, FETCH_CONNECTIONS)? })
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
    /// A pod's fetcher, which keeps its files in `cache`, and connects to what is within `reach`.
    ///
    /// # Errors
    /// The TLS client cannot be set up, for want of root certificates for instance.
    pub fn new(cache: Arc<Cache>, reach: Reach) -> Result<Self, FetchError> {
        Self::with(cache, reach, AskedBy::Spec)
    }

    /// A fetcher for whoever starts it and names the addresses: it connects to this machine, too, and through the proxies that the
    /// environment names.
    ///
    /// # Errors
    /// As [`Fetcher::new`].
    pub fn for_command_line(cache: Arc<Cache>) -> Result<Self, FetchError> {
        Self::with(cache, Reach { private: true, loopback: true }, AskedBy::CommandLine)
    }

    fn with(cache: Arc<Cache>, reach: Reach, by: AskedBy) -> Result<Self, FetchError> {
        // An error means that the process has installed its provider already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let clients = Clients::new(reach, by, None)
            .map_err(|error| FetchError::Permanent(format!("the https client cannot be set up: {error:?}")))?;
        let (with_ca, flights, on_volumes) = Default::default();
        Ok(Self { clients, with_ca, reach, by, cache, flights, on_volumes })
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
            Location::Http(_) | Location::Hub(_) | Location::Registry(_) | Location::S3(_) => {
                let range = Some((0, Some(bytes.saturating_sub(1))));
                let validator = Validator::default();
                let (client, url) = (self.client(source)?, self.url(source).await?);
                let response = http::send(self.target(&client, source, &url), range, &validator).await?;
                let asked = (source.asked, address.as_str());
                match http::judge(asked, response.status(), response.headers(), 0, &validator) {
                    Answer::Body { total: Some(total), .. } if response.status() == 206 => {
                        let failed = |error| http::failure(source.asked.by, &address, &error);
                        Ok(Some(Peek { prefix: prefix(response, bytes).await.map_err(failed)?, total }))
                    }
                    Answer::Body { .. } => Ok(None),
                    Answer::Complete | Answer::StartOver(_) => Ok(Some(Peek { prefix: Vec::new(), total: 0 })),
                    Answer::Refused(error) => Err(error),
                }
            }
        }
    }

    /// The clients for a source.
    fn client(&self, source: &Source) -> Result<Clients, FetchError> {
        let Some(ca) = &source.ca else { return Ok(self.clients.clone()) };
        let mut clients = self.with_ca.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(ca) {
            return Ok(client.clone());
        }
        let client = Clients::new(self.reach, self.by, Some(ca)).map_err(|error| {
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
            Location::Hub(file) => Ok(file.url()),
            Location::Registry(file) => file
                .url()
                .ok_or_else(|| FetchError::Permanent(format!("{source} needs the sha256 of the file; give it"))),
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

    fn target<'a>(&self, clients: &'a Clients, source: &'a Source, url: &'a Url) -> Target<'a> {
        let auth = match (&source.credential, source.asked.place) {
            (Some(Credential::Token(token)), _) => Auth::Bearer(token),
            (Some(Credential::Login(login)), Place::Registry) => Auth::Registry(Some(login)),
            (None, Place::Registry) => Auth::Registry(None),
            // What signs is in the address by now.
            _ => Auth::None,
        };
        let Clients { single: client, several } = clients;
        Target {
            client,
            several,
            reach: self.reach,
            url,
            auth,
            asked: source.asked,
            headers: None,
            address: source.address(),
        }
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
                _ => self.fetch_single(source, digest, progress, Tries::default()).await,
            }
        };
        cancel.run_until_cancelled(fetched).await.unwrap_or(Err(FetchError::Cancelled))
    }

    /// As [`Fetcher::fetch`], where nobody knows the digest of the file: it is computed as the bytes come. Only a file that its server
    /// calls by a strong entity tag is continued.
    ///
    /// # Errors
    /// As [`Fetcher::fetch`].
    pub async fn fetch_unknown(
        &self,
        source: &Source,
        progress: &watch::Sender<FetchProgress>,
        cancel: &CancellationToken,
    ) -> Result<CachedModel, FetchError> {
        let fetched = self.fetch_single(source, source.key(), progress, Tries::for_any());
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
        mut tries: Tries,
    ) -> Result<CachedModel, FetchError> {
        let flight = {
            let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
            flights.entry(digest).or_default().clone()
        };
        let (caller, lease) = (flight.join(source), self.cache.lease(digest));
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
        if !tries.any
            && let Some(model) = self.cached(digest).await?
        {
            return Ok(Some(model));
        }
        let partial = match (tries.partial.take(), tries.right.take()) {
            (Some(partial), _) => Some(partial),
            (None, Some(right)) => self.open_partial(digest, right, progress).await?,
            // The last holder died with its thread, and the right was freed with it.
            (None, None) => self.open_partial(digest, caller.lock().await, progress).await?,
        };
        // Another process has brought it meanwhile.
        let Some(partial) = partial else { return Ok(None) };
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
            Location::Http(_) | Location::Hub(_) | Location::Registry(_) | Location::S3(_) => {
                match (self.client(source), self.url(source).await) {
                    (Ok(client), Ok(url)) => {
                        let target = self.target(&client, source, &url);
                        let one_connection = &tries.one_connection;
                        Download { target, grant, progress, any: tries.any, one_connection }.connect(partial).await
                    }
                    (Err(error), _) | (_, Err(error)) => (Some(partial), Err(error)),
                }
            }
        };
        match result {
            Ok(()) => match partial {
                Some(partial) => {
                    // Until the file has a lease of its own.
                    let _lease = self.cache.lease(partial.digest());
                    let found = self.finish(partial, digest, &address, tries).await?;
                    self.cached(found).await
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

    /// Opens what came so far, once no other process works on it. `None`: one has, and the file is there.
    async fn open_partial(
        &self,
        digest: Digest,
        mut right: Right,
        progress: &watch::Sender<FetchProgress>,
    ) -> Result<Option<Partial>, FetchError> {
        loop {
            let path = self.cache.partial_path(digest);
            let opened = blocking(move || Partial::open(path, right)).await?;
            right = match opened.map_err(|error| FetchError::disk("open", &error))? {
                Ok(partial) => return Ok(Some(partial)),
                Err(right) => right,
            };
            let (came, whole) = (self.cache.partial_path(digest), self.cache.path(digest));
            let bytes = blocking(move || std::fs::metadata(came).map_or(0, |metadata| metadata.len())).await?;
            let note = Some(String::from("another process fetches the same file into this cache"));
            progress.send_modify(|p| (p.bytes, p.note, p.eta) = (bytes, note, None));
            // A lock of another process's can be waited for by a thread alone, which nothing would end.
            tokio::time::sleep(OTHER_PROCESS_PERIOD).await;
            if blocking(move || whole.exists()).await? {
                progress.send_modify(|p| p.note = None);
                return Ok(None);
            }
        }
    }

    /// Checks a file that is there to its last byte, and gives it its name.
    async fn finish(
        &self,
        partial: Partial,
        digest: Digest,
        address: &str,
        tries: &mut Tries,
    ) -> Result<Digest, FetchError> {
        let found = partial.digest();
        // Of an answer that did not say its length nobody knows that it was cut; one that is the same again was not.
        let is_the_file = |tries: &mut Tries| partial.has_known_length() || tries.found.replace(found) == Some(found);
        if found == digest || (tries.any && is_the_file(tries)) {
            let path = self.cache.path(found);
            // A file that is there under the name which this one turns out to have may be in use: it is looked at instead.
            let commit = move || match found != digest && path.exists() {
                true => partial.discard().map(|()| false),
                false => partial.commit(&path).map(|()| true),
            };
            if blocking(commit).await?.map_err(|error| FetchError::disk("rename", &error))? {
                self.cache.verified(found);
            }
            return Ok(found);
        }
        let whole = partial.is_whole();
        if !tries.any && whole && is_the_file(tries) {
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
                "{address} sends a file without saying how long it is{}; it is fetched once more, in case it was cut",
                if tries.any { "" } else { ", and another than was asked for" }
            )));
        }
        Err(FetchError::temporary("the pieces of the file do not belong together; it is fetched again as a whole"))
    }
}

async fn prefix(mut response: reqwest::Response, bytes: u64) -> Result<Vec<u8>, reqwest::Error> {
    let limit = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut prefix = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        prefix.extend_from_slice(&chunk);
        if prefix.len() >= limit {
            prefix.truncate(limit);
            break;
        }
    }
    Ok(prefix)
}
