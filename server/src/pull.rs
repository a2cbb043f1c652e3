//! Models that the command line names by an address: `serve`, `validate` and `check` have them brought before they look at anything.
//!
//! Flow: the cache is opened, each model is brought into it ([`Fetcher::bring`]) while its progress is told, and what it was is told
//! so that it can be pinned. A fetch of which nothing comes for [`FETCH_PATIENCE`] is given up: somebody waits at the terminal, and
//! in a container the kubelet starts it anew. Absent: where credentials are ([`crate::config`]), and the files' own checks.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::config::{ModelCache, RemoteModel, RemoteModels};
use crate::console;
use crate::fetch::{AskedBy, Asking, Brought, Cache, CachedModel, FetchError, FetchProgress, Fetcher, Watched};
use crate::limits::FETCH_PATIENCE;

/// The models of a command line, in the cache.
#[derive(Debug, Default)]
pub struct Pulled {
    /// The model's file, or the first of its files.
    pub model: Option<PathBuf>,
    /// The file of the smaller model that guesses.
    pub draft: Option<PathBuf>,
    /// All files, which stay in the cache for as long as these live.
    pub files: Vec<CachedModel>,
}

/// Brings all that is named by an address.
///
/// # Errors
/// The cache cannot be used, or a model cannot be brought: says why, and what to do.
pub async fn pull(models: &RemoteModels) -> anyhow::Result<Pulled> {
    let mut pulled = Pulled::default();
    if models.model.is_none() && models.draft.is_none() {
        return Ok(pulled);
    }
    let fetcher = fetcher(&models.cache)?;
    let mut bring = async |model: &Option<RemoteModel>| {
        let Some(model) = model else { return anyhow::Ok(None) };
        let brought = pull_one(&fetcher, &models.cache, model).await?;
        pulled.files.extend(brought.files);
        Ok(Some(brought.path))
    };
    let (model, draft) = (bring(&models.model).await?, bring(&models.draft).await?);
    (pulled.model, pulled.draft) = (model, draft);
    Ok(pulled)
}

/// Brings one model.
///
/// # Errors
/// As [`pull`].
pub async fn bring(cache: &ModelCache, model: &RemoteModel) -> anyhow::Result<Brought> {
    pull_one(&fetcher(cache)?, cache, model).await
}

/// Writes the headers of a model into `folder` instead of bringing all of it, and gives the first one's path; `None` where its
/// server does not serve parts of files.
///
/// # Errors
/// As [`pull`].
pub async fn headers(cache: &ModelCache, model: &RemoteModel, folder: &Path) -> anyhow::Result<Option<PathBuf>> {
    if cache.offline {
        return Ok(None);
    }
    let fetcher = fetcher(cache)?;
    let read = async { fetcher.headers(&fetcher.resolve(&model.source).await?, folder).await };
    read.await.map_err(|error| anyhow::anyhow!("{}", told(&error)))
}

fn fetcher(settings: &ModelCache) -> anyhow::Result<Fetcher> {
    let dir = &settings.dir;
    let cache = Cache::open_for(AskedBy::CommandLine, dir).with_context(|| {
        format!("--cache-dir {} cannot be used; name a directory that can be written", dir.display())
    })?;
    cache.set_limit_bytes(Some(settings.limit_bytes));
    Ok(Fetcher::for_command_line(cache)?)
}

async fn pull_one(fetcher: &Fetcher, cache: &ModelCache, model: &RemoteModel) -> anyhow::Result<Brought> {
    let source = &model.source;
    let (progress, seen) = watch::channel(FetchProgress::default());
    let cancel = CancellationToken::new();
    let asking = if cache.offline { Asking::Never } else { Asking::AsNeeded };
    let watched = Watched { progress: &progress, cancel: &cancel };
    let shown = tokio::spawn(console::show_fetching(source.model_name(), seen.clone()));
    let brought = tokio::select! {
        brought = fetcher.bring(source, model.sha256, asking, &watched) => brought.map_err(|error| told(&error)),
        waited_for = standstill(seen) => Err(waited_for),
    };
    shown.abort();
    console::shown();
    let brought = brought.map_err(|what| anyhow::anyhow!("{what}"))?;
    tell(source.to_string().as_str(), &brought);
    Ok(brought)
}

/// Ends when nothing has come for a while, with why.
async fn standstill(mut seen: watch::Receiver<FetchProgress>) -> String {
    let (mut bytes, mut since) = (0, Instant::now());
    loop {
        let progress = seen.borrow_and_update().clone();
        // Without a note the file is on its way, or one that is there is looked at.
        if progress.bytes != bytes || progress.note.is_none() {
            (bytes, since) = (progress.bytes, Instant::now());
        }
        let patience = since + FETCH_PATIENCE;
        match timeout_at(patience, seen.changed()).await {
            Err(_) if Instant::now() >= patience && seen.borrow().note.is_some() => {
                let why = seen.borrow().note.clone().unwrap_or_default();
                return format!("nothing has come for {} s: {why}", FETCH_PATIENCE.as_secs());
            }
            // The fetch has ended, and its own result says how.
            Ok(Err(_)) => std::future::pending().await,
            _ => {}
        }
    }
}

/// What is wrong, in words for whoever gave the command line.
fn told(error: &FetchError) -> String {
    match error {
        FetchError::DiskFull(what) => {
            format!("the cache's disk is full ({what}); make room, or keep models on another with --cache-dir")
        }
        FetchError::WrongDigest { expected, found, .. } => format!(
            "the file has the SHA-256 {found}, and {expected} was asked for; correct --sha256 or the address, or try again if the \
             store has just got another file"
        ),
        error => error.to_string(),
    }
}

/// Tells what was brought.
fn tell(address: &str, brought: &Brought) {
    if let Some(why) = &brought.unasked {
        tracing::warn!("{why}; what {address} was last is used, from the cache");
    }
    let sha256: Vec<String> = brought.files.iter().map(|file| file.digest().to_string()).collect();
    let bytes = brought.files.iter().map(CachedModel::bytes).sum::<u64>();
    let (size, sha256) = (gantry_gguf::human_bytes(bytes), sha256.join(","));
    let how = if brought.fetched { "fetched" } else { "cached" };
    // Of the same kind as what `serve` says of itself, so that people see it.
    tracing::info!(
        target: console::TOLD,
        address,
        sha256,
        pinned = brought.pinned.as_deref().unwrap_or_default(),
        "{how}: {size} in {}",
        brought.path.display()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_fetch_is_given_up_when_nothing_has_come_for_a_while_and_not_before() {
        let (progress, seen) = watch::channel(FetchProgress::default());
        let ended = tokio::spawn(standstill(seen));
        let begun = Instant::now();
        // Hashing what is there tells nothing for as long as it takes.
        tokio::time::sleep(FETCH_PATIENCE * 3).await;
        progress.send_modify(|progress| progress.note = Some(String::from("nobody listens")));
        tokio::time::sleep(FETCH_PATIENCE / 2).await;
        progress.send_modify(|progress| progress.bytes = 1);
        let last = Instant::now();
        for _ in 0..10 {
            tokio::time::sleep(FETCH_PATIENCE / 4).await;
            progress.send_modify(|progress| progress.stands_still = true);
        }
        assert!(begun.elapsed() > FETCH_PATIENCE * 3 && last.elapsed() > FETCH_PATIENCE);
        let why = ended.await.unwrap_or_default();
        assert_eq!(why, "nothing has come for 60 s: nobody listens");
        progress.send_modify(|progress| progress.bytes = 2);
    }
}
