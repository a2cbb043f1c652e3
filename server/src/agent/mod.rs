//! The pod's agent: follows one InferenceService and reports on it.
//!
//! Four tasks: [`watch`] turns the object's events into [`Assignment`](crate::rollout::Assignment) values
//! ([`desired`], pure); the [`Manager`](crate::rollout::Manager) carries them out; [`writer`] applies this pod's entry of
//! `status.replicas`, when and with what [`gantry_rollout::report`] says; and [`tidy`] removes files that no revision names. With the
//! API server away all but the second wait, and the model goes on answering. Absent: any right beyond this one object, its status, and the objects its gates
//! name; and any decision about the fleet, which is the operator's.

mod desired;
pub mod limits;
mod watch;
mod writer;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use kube::{Client, Config};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::fetch::{Cache, Digest, FetchError, Fetcher, Reach, Source};
use crate::gates::objects::Objects;
use crate::gates::{Gates, Loader};
use crate::rollout::Manager;
use crate::routing::Router;
use crate::version::WorkerConfig;
use limits::{CONNECT_LIMIT, READ_LIMIT, TIDY_PERIOD};

pub use desired::{Asked, InvalidObject, PodHas, read as read_desired};

/// Whose agent this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// The InferenceService.
    pub service: String,
    /// Its namespace.
    pub namespace: String,
    /// This pod's name.
    pub pod: String,
    /// Where models are kept.
    pub cache_dir: PathBuf,
    /// Where claims with models are mounted, each in a folder of its name.
    pub model_volumes: PathBuf,
    /// What the pod was made with.
    pub has: PodHas,
    /// Where models may be fetched from.
    pub reach: Reach,
}

/// The agent cannot work at all.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// This is no pod, or it has no token.
    #[error("cannot set up a client for the API server: {0}; this command runs in a pod with a service account")]
    Config(#[from] kube::config::InClusterError),
    /// The client cannot be made.
    #[error("cannot set up a client for the API server: {0}")]
    Client(#[from] kube::Error),
    /// The cache cannot be opened.
    #[error("cannot open the model cache {folder}: {error}; mount a writable volume there")]
    Cache {
        /// The folder.
        folder: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The client for models cannot be made.
    #[error(transparent)]
    Fetcher(#[from] FetchError),
}

/// Follows the service until `stop`, with the pod's own service account.
///
/// # Errors
/// The agent cannot work at all; everything that may pass is waited for instead.
pub async fn run(
    config: AgentConfig,
    router: Arc<Router>,
    workers: WorkerConfig,
    stop: CancellationToken,
) -> Result<(), AgentError> {
    // An error means that the process has installed its provider already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut cluster = Config::incluster()?;
    cluster.connect_timeout = Some(CONNECT_LIMIT);
    cluster.read_timeout = Some(READ_LIMIT);
    let client = Client::try_from(cluster)?;
    run_with(client, config, router, workers, stop).await
}

/// As [`run`], with a client of the caller's.
///
/// # Errors
/// As [`run`].
pub async fn run_with(
    client: Client,
    config: AgentConfig,
    router: Arc<Router>,
    workers: WorkerConfig,
    stop: CancellationToken,
) -> Result<(), AgentError> {
    let cache = Cache::open(&config.cache_dir)
        .map_err(|error| AgentError::Cache { folder: config.cache_dir.clone(), error })?;
    // The cache is this pod's alone.
    if let Err(error) = cache.remove_scratch() {
        tracing::warn!(%error, "cannot remove what the process before this one left in the cache");
    }
    let fetcher = Fetcher::new(Arc::clone(&cache), config.reach)?;
    let objects = Objects::new(client.clone(), &config.namespace);
    let volumes = config.model_volumes.clone();
    let gates = Arc::new(Gates { fetcher, loader: Loader::new(workers), objects, volumes });

    let (seen, observed) = tokio::sync::watch::channel(watch::Observed::default());
    let (asked, desired) = tokio::sync::watch::channel(None);
    let (named, digests) = tokio::sync::watch::channel(Kept::default());
    let (manager, published) = Manager::new(router, gates, desired);
    let writer = writer::Writer::new(client.clone(), &config, published, observed);

    // Whichever task ends first, the others end with it: an agent that reports but does not act would mislead.
    let stop = stop.child_token();
    let mut tasks = JoinSet::new();
    tasks.spawn(until(stop.clone(), watch::follow(client, config.clone(), seen, asked, named)));
    tasks.spawn(manager.run(stop.clone()));
    tasks.spawn(until(stop.clone(), writer.run()));
    tasks.spawn(until(stop.clone(), tidy(cache, digests)));
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            tracing::error!(%error, "a task of the agent failed; the process should be restarted");
        }
        stop.cancel();
    }
    Ok(())
}

/// What of the cache is kept.
#[derive(Clone, Debug, Default, PartialEq)]
struct Kept {
    /// The models that revisions of the service name. While none is named nothing is removed: an operator of before says nothing
    /// of it.
    digests: BTreeSet<Digest>,
    /// Addresses that versions name without a digest: what they mean is kept.
    addresses: Vec<Source>,
    /// Whether any version may keep prompts on the disk. Who keeps none leaves none: nobody would count their bytes.
    prefixes: bool,
}

/// Removes from the cache what is not kept any more.
async fn tidy(cache: Arc<Cache>, mut named: tokio::sync::watch::Receiver<Kept>) {
    loop {
        tokio::select! {
            changed = named.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(TIDY_PERIOD) => {}
        }
        let (cache, kept) = (Arc::clone(&cache), named.borrow_and_update().clone());
        let work = move || {
            let meant = kept.addresses.iter().flat_map(|address| cache.meant(address));
            cache.keep(&kept.digests.iter().copied().chain(meant).collect());
            if !kept.prefixes {
                cache.remove_prefixes();
            }
        };
        let names_none = named.borrow().digests.is_empty() && named.borrow().addresses.is_empty();
        if !names_none && let Err(error) = tokio::task::spawn_blocking(work).await {
            tracing::error!(%error, "the cache could not be tidied");
        }
    }
}

async fn until(stop: CancellationToken, work: impl Future<Output = ()>) {
    let _ = stop.run_until_cancelled(work).await;
}
