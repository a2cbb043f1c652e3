//! All that an address means, brought into the cache: its files, from the store only where they are not there, or may be others by now.
//!
//! Where the address always means the same ([`Source::is_pinned`]) and its files are there, nothing is asked. Else the store is
//! asked what it means today; while it cannot be asked, what it meant last is used. A file whose digest no store knows is fetched
//! anew when its server calls it otherwise than when it came.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cache::CachedModel;
use super::digest::Digest;
use super::download::blocking;
use super::error::FetchError;
use super::limits::{MAX_HEADERS_BYTES, PEEK_FIRST_BYTES, PEEK_MAX_BYTES};
use super::progress::FetchProgress;
use super::refs::{FileState, Ref, RefFile};
use super::resolve::{Named, NamedFile};
use super::source::Source;
use super::tries::{Backoff, failed};
use super::{Fetcher, split};

/// What an address means, in the cache.
#[derive(Debug)]
pub struct Brought {
    /// The file, or the first one of those that the model is split into, under a name by which the others are found.
    pub path: PathBuf,
    /// Its files, which stay in the cache for as long as these live.
    pub files: Vec<CachedModel>,
    /// The address that means the same for ever, where there is one.
    pub pinned: Option<String>,
    /// Whether each file has the digest that was asked for, or that its store tells; else the digests are what was computed.
    pub is_verified: bool,
    /// Whether anything was fetched.
    pub fetched: bool,
    /// Why the store could not be asked, where what it meant last is used.
    pub unasked: Option<String>,
}

/// How much the store may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// As much as it takes.
    AsNeeded,
    /// Not at all.
    Never,
}

/// Where it is told how far a fetch is, and what ends it.
pub struct Watched<'a> {
    /// How far the file is that is on its way.
    pub progress: &'a watch::Sender<FetchProgress>,
    /// Ends it.
    pub cancel: &'a CancellationToken,
}

impl Brought {
    /// The files as one, for as long as which all of them stay in the cache.
    #[must_use]
    pub fn into_model(self) -> Option<CachedModel> {
        CachedModel::of_parts(self.path, self.files)
    }
}

impl Fetcher {
    /// Brings what an address means into the cache. Tries again what may pass, until it is cancelled.
    ///
    /// # Errors
    /// The store refuses, a file is another one than it says, they do not fit into the cache, it is cancelled, or the store may not be
    /// asked and they are not there.
    pub async fn bring(
        &self,
        source: &Source,
        expected: Option<Digest>,
        asking: Asking,
        watched: &Watched<'_>,
    ) -> Result<Brought, FetchError> {
        if let Some(digest) = expected {
            return self.bring_digest(source, digest, asking, watched).await;
        }
        let (key, cache) = (source.key(), self.cache().clone());
        let known = blocking(move || cache.known(key)).await?;
        if (source.is_pinned() || asking == Asking::Never)
            && let Some(brought) = self.all_cached(known.as_ref()).await?
        {
            return Ok(brought);
        }
        if asking == Asking::Never {
            return Err(FetchError::Permanent(format!("{source} is not in the cache; start once without --offline")));
        }
        let asked = self.ask(source, known.as_ref(), watched);
        let (named, states) =
            match watched.cancel.run_until_cancelled(asked).await.unwrap_or(Err(FetchError::Cancelled)) {
                Ok(Ok(named)) => named,
                Ok(Err(last)) => return Ok(last),
                Err(error) => return Err(error),
            };
        self.bring_files(source, (&named, &states), known.as_ref(), watched).await
    }

    async fn bring_files(
        &self,
        source: &Source,
        (named, states): (&Named, &[FileState]),
        known: Option<&Ref>,
        watched: &Watched<'_>,
    ) -> Result<Brought, FetchError> {
        let (mut files, mut noted, mut fetched) = (Vec::new(), Vec::new(), false);
        let count = named.files.len();
        for (number, (file, state)) in named.files.iter().zip(states).enumerate() {
            watched
                .progress
                .send_modify(|progress| (progress.part, progress.parts, progress.furthest) = (number + 1, count, 0));
            let last = known.and_then(|known| known.files.get(number));
            let (model, came) = self.bring_file(file, state, last, watched).await?;
            fetched |= came;
            let state = file.digest.is_none().then(|| state.clone());
            noted.push(RefFile { sha256: model.digest().to_string(), state });
            files.push(model);
        }
        let (key, pinned) = (source.key(), named.pinned.clone());
        let meant = Ref { address: source.to_string(), pinned: pinned.clone(), files: noted };
        // What it is pinned to means the same, and needs no network from now on.
        let pinned_key = named.files.first().filter(|_| meant.pinned.is_some()).map(|file| file.source.key());
        let keys: BTreeSet<Digest> = pinned_key.into_iter().chain([key]).collect();
        let (cache, path) = (self.cache().clone(), self.path_of(&files).await?);
        let noted = blocking(move || keys.into_iter().try_for_each(|key| cache.note(key, &meant))).await?;
        noted.map_err(|error| FetchError::disk("write", &error))?;
        let is_verified = named.files.iter().all(|file| file.digest.is_some());
        Ok(Brought { path, files, pinned, is_verified, fetched, unasked: None })
    }

    /// What an address meant when it was fetched last, if all of it is in the cache.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub async fn known(&self, source: &Source) -> Result<Option<Brought>, FetchError> {
        let (key, cache) = (source.key(), self.cache().clone());
        let known = blocking(move || cache.known(key)).await?;
        self.all_cached(known.as_ref()).await
    }

    /// Brings the files that the store says an address means, whose digests it has told.
    ///
    /// # Errors
    /// As [`Fetcher::bring`].
    pub async fn bring_named(
        &self,
        source: &Source,
        named: &Named,
        watched: &Watched<'_>,
    ) -> Result<Brought, FetchError> {
        let states = vec![FileState::default(); named.files.len()];
        self.bring_files(source, (named, &states), None, watched).await
    }

    async fn bring_digest(
        &self,
        source: &Source,
        digest: Digest,
        asking: Asking,
        watched: &Watched<'_>,
    ) -> Result<Brought, FetchError> {
        let cached = self.cached(digest).await?;
        let fetched = cached.is_none();
        let model = match cached {
            Some(model) => model,
            None if asking == Asking::Never => {
                return Err(FetchError::Permanent(format!(
                    "{source} is not in the cache; start once without --offline"
                )));
            }
            None => self.fetch(&source.clone().of_digest(digest), digest, watched.progress, watched.cancel).await?,
        };
        let path = model.path().to_owned();
        Ok(Brought { path, files: vec![model], pinned: None, is_verified: true, fetched, unasked: None })
    }

    /// Asks the store what the address means, and its server what files are now of which the store knows nothing. While it does not
    /// answer: what the address meant last, if that is there.
    async fn ask(
        &self,
        source: &Source,
        known: Option<&Ref>,
        watched: &Watched<'_>,
    ) -> Result<Result<(Named, Vec<FileState>), Brought>, FetchError> {
        let mut backoff = Backoff::default();
        loop {
            let error = match self.ask_once(source).await {
                Ok(named) => return Ok(Ok(named)),
                Err(error) if !error.is_temporary() => return Err(error),
                Err(error) => error,
            };
            if let Some(brought) = self.all_cached(known).await? {
                return Ok(Err(Brought { unasked: Some(error.to_string()), ..brought }));
            }
            tokio::time::sleep(failed(&mut backoff, source.key(), &error, 0, watched.progress)).await;
        }
    }

    async fn ask_once(&self, source: &Source) -> Result<(Named, Vec<FileState>), FetchError> {
        let named = self.resolve(source).await?;
        let mut states = Vec::new();
        for file in &named.files {
            states.push(if file.digest.is_none() { self.state(&file.source).await? } else { FileState::default() });
        }
        Ok((named, states))
    }

    /// A file, from the cache if it is there, and whether it was fetched.
    async fn bring_file(
        &self,
        file: &NamedFile,
        state: &FileState,
        last: Option<&RefFile>,
        watched: &Watched<'_>,
    ) -> Result<(CachedModel, bool), FetchError> {
        let is_same = |last: &&RefFile| state.tells() && last.state.as_ref() == Some(state);
        let digest = file.digest.or_else(|| last.filter(is_same)?.sha256.parse().ok());
        if let Some(digest) = digest
            && let Some(model) = self.cached(digest).await?
        {
            return Ok((model, false));
        }
        let (progress, cancel) = (watched.progress, watched.cancel);
        let model = match file.digest {
            Some(digest) => self.fetch(&file.source, digest, progress, cancel).await?,
            None => self.fetch_unknown(&file.source, progress, cancel).await?,
        };
        Ok((model, true))
    }

    /// What an address meant, if all of it is in the cache.
    async fn all_cached(&self, known: Option<&Ref>) -> Result<Option<Brought>, FetchError> {
        let Some((known, digests)) = known.and_then(|known| Some((known, known.digests()?))) else { return Ok(None) };
        let mut files = Vec::new();
        for digest in digests {
            let Some(model) = self.cached(digest).await? else { return Ok(None) };
            files.push(model);
        }
        if files.is_empty() {
            return Ok(None);
        }
        let path = self.path_of(&files).await?;
        let (pinned, is_verified) = (known.pinned.clone(), known.are_digests_told());
        Ok(Some(Brought { path, files, pinned, is_verified, fetched: false, unasked: None }))
    }

    /// Where a model is read that has these files.
    async fn path_of(&self, files: &[CachedModel]) -> Result<PathBuf, FetchError> {
        if let [one] = files {
            return Ok(one.path().to_owned());
        }
        let (cache, digests) = (self.cache().clone(), files.iter().map(CachedModel::digest).collect::<Vec<_>>());
        let named = blocking(move || cache.name_parts(&digests)).await?;
        named.map_err(|error| FetchError::disk("link", &error))
    }

    /// Writes into `folder` what was named as far as headers go: files of the right length, of which the headers are
    /// there and the rest is empty and takes no room. Gives the first one's path; `None` where the server does not serve parts, or a
    /// header, or all of them ([`MAX_HEADERS_BYTES`]), are longer than is read ahead. One try.
    ///
    /// # Errors
    /// The store does not answer, refuses, or has no such file; the folder cannot be written.
    pub async fn headers(&self, named: &Named, folder: &Path) -> Result<Option<PathBuf>, FetchError> {
        let count = named.files.len() as u64;
        let (mut first, mut left_bytes) = (None, MAX_HEADERS_BYTES);
        for (number, file) in (1..).zip(&named.files) {
            let Some((prefix, total)) = self.header(&file.source).await? else { return Ok(None) };
            let Some(left) = left_bytes.checked_sub(prefix.len() as u64) else { return Ok(None) };
            left_bytes = left;
            let name =
                if count == 1 { String::from("model.gguf") } else { format!("model{}", split::suffix(number, count)) };
            let path = folder.join(name);
            let to = path.clone();
            let write = move || {
                std::fs::write(&to, prefix)
                    .and_then(|()| std::fs::OpenOptions::new().write(true).open(&to)?.set_len(total))
            };
            blocking(write).await?.map_err(|error| FetchError::disk("write", &error))?;
            first.get_or_insert(path);
        }
        Ok(first)
    }

    /// The header of a file, or as much as shows what is wrong with it, and the length of the file.
    async fn header(&self, source: &Source) -> Result<Option<(Vec<u8>, u64)>, FetchError> {
        let mut bytes = PEEK_FIRST_BYTES;
        loop {
            let Some(peek) = self.peek(source, bytes).await? else { return Ok(None) };
            match gantry_gguf::read_header_prefix(&peek.prefix, peek.total) {
                Err(gantry_gguf::GgufError::NeedMoreBytes { at_least }) if bytes < PEEK_MAX_BYTES => {
                    bytes = at_least.max(bytes.saturating_mul(2)).min(PEEK_MAX_BYTES);
                }
                Err(gantry_gguf::GgufError::NeedMoreBytes { .. }) => return Ok(None),
                Ok(header) => {
                    let mut prefix = peek.prefix;
                    prefix.truncate(usize::try_from(header.summary().header_bytes).unwrap_or(usize::MAX));
                    return Ok(Some((prefix, peek.total)));
                }
                // What is wrong with it is for who asked.
                Err(_) => return Ok(Some((peek.prefix, peek.total))),
            }
        }
    }
}
