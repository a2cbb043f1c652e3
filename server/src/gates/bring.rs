//! Fetch, Digest and Format: brings the files of a version, and judges their headers before the download where it can.

use std::time::Instant;

use gantry_crds::address::is_pinned;
use gantry_crds::inference_service::SourceSpec;
use gantry_crds::status::{GateName, WaitReason};
use gantry_gguf::GgufError;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::refusals::{fetch_refusal, format_refusal};
use super::report::{Refusal, Report, quantity};
use super::{
    DRAFT_SOURCE, DraftModel, Gates, Job, MODEL_SOURCE, Stop, awaited, check_memory, check_use, computes_on_cpus,
    format_value, read_header,
};
use crate::fetch::limits::{PEEK_FIRST_BYTES, PEEK_MAX_BYTES};
use crate::fetch::{
    Backoff, Brought, CachedModel, Digest, FetchError, FetchProgress, Named, Source, StoreSettings, Watched,
};

impl Gates {
    /// Fetch, Digest and Format of the draft model, where the version has one.
    pub(super) async fn bring_draft(
        &self,
        job: &Job,
        report: &Report,
        cancel: &CancellationToken,
    ) -> Result<Option<DraftModel>, Stop> {
        let Some(speculative) = &job.version.runtime.speculative else { return Ok(None) };
        let Some(source) = &speculative.draft else { return Ok(None) };
        let (file, fetched) = self.file(job, DRAFT_SOURCE, source, None, report, cancel).await?;
        let summary = read_header(file.path()).await?.summary().clone();
        Ok(Some(DraftModel { file, summary, max_tokens: speculative.max_tokens, fetched }))
    }

    /// Fetch and Digest of the model.
    pub(super) async fn bring(
        &self,
        job: &Job,
        draft: Option<&DraftModel>,
        report: &Report,
        cancel: &CancellationToken,
    ) -> Result<CachedModel, Stop> {
        let source = &job.version.model.source;
        let (model, mut fetched) = self.file(job, MODEL_SOURCE, source, Some(draft), report, cancel).await?;
        if let Some(draft) = draft {
            fetched = format!("{fetched}; draft model {}", draft.fetched);
        }
        report.pass(GateName::Fetch, fetched);
        report.pass(GateName::Digest, format!("{:?}", model.digest()));
        Ok(model)
    }

    /// The file that `field` of a spec names, whole and of the right digest, in the cache or on its volume, and how it came
    /// there. With `ahead`, its header is judged before it is downloaded, beside that draft model.
    async fn file(
        &self,
        job: &Job,
        field: &str,
        spec: &SourceSpec,
        ahead: Option<Option<&DraftModel>>,
        report: &Report,
        cancel: &CancellationToken,
    ) -> Result<(CachedModel, String), Stop> {
        let refuse = |message: String| Refusal::new(GateName::Fetch, message);
        let Some(digest) = digest_of(field, spec).map_err(refuse)? else {
            return self.pinned(job, field, spec, ahead, report, cancel).await;
        };
        let started = Instant::now();
        if let Some(file) = retried(report, || self.fetcher.cached(digest)).await.map_err(|e| fetch_refusal(&e))? {
            let fetched = format!("{}, cached", quantity(file.bytes()));
            return Ok((file, fetched));
        }
        let source = self.source(job, field, spec, report).await.map_err(refuse)?.of_digest(digest);
        if let Some(draft) = ahead {
            self.look_ahead(job, draft, &source, report).await?;
        }
        let file =
            downloaded(report, async |progress| self.fetcher.fetch(&source, digest, &progress, cancel).await).await?;
        let fetched = format!("{} in {:.1} s", quantity(file.bytes()), started.elapsed().as_secs_f64());
        Ok((file, fetched))
    }

    /// As [`Gates::file`], of an address that always means the same: its store tells which files they are, and their digests.
    async fn pinned(
        &self,
        job: &Job,
        field: &str,
        spec: &SourceSpec,
        ahead: Option<Option<&DraftModel>>,
        report: &Report,
        cancel: &CancellationToken,
    ) -> Result<(CachedModel, String), Stop> {
        let refuse = |message: String| Stop::from(Refusal::new(GateName::Fetch, message));
        let refused = |error: FetchError| Stop::from(fetch_refusal(&error));
        let started = Instant::now();
        let uri = spec.uri.as_deref().unwrap_or_default();
        let address = Source::unpinned(uri, StoreSettings::of(spec));
        let address = address.map_err(|error| refuse(format!("{field}.uri: {error}")))?;
        let known = retried(report, || self.fetcher.known(&address)).await.map_err(refused)?;
        if let Some(model) = known.and_then(Brought::into_model) {
            let fetched = format!("{}, cached", quantity(model.bytes()));
            return Ok((model, fetched));
        }
        let source = self.source(job, field, spec, report).await.map_err(refuse)?;
        let named = retried(report, || self.fetcher.resolve(&source)).await.map_err(refused)?;
        if named.files.iter().any(|file| file.digest.is_none()) {
            return Err(refuse(format!(
                "{field}: the store of {source} does not tell the SHA-256 of this file, as of small ones that Git itself keeps; give \
                 it as sha256"
            )));
        }
        if let Some(draft) = ahead {
            match &named.files[..] {
                [one] => self.look_ahead(job, draft, &one.source, report).await?,
                _ => self.look_ahead_at_parts(job, draft, &named, report).await?,
            }
        }
        let bring = async |progress| {
            let watched = Watched { progress: &progress, cancel };
            self.fetcher.bring_named(&source, &named, &watched).await
        };
        let brought = downloaded(report, bring).await?;
        let model = brought.into_model().ok_or_else(|| refuse(format!("{field}: {source} names no file")))?;
        let fetched = format!("{} in {:.1} s", quantity(model.bytes()), started.elapsed().as_secs_f64());
        Ok((model, fetched))
    }

    /// The place to fetch from, with its credentials.
    async fn source(&self, job: &Job, field: &str, spec: &SourceSpec, report: &Report) -> Result<Source, String> {
        let uri = match (&spec.uri, &spec.pvc) {
            (Some(uri), None) => uri,
            (None, Some(pvc)) => {
                return Ok(Source::volume(&self.volumes, &pvc.claim_name, &pvc.path, computes_on_cpus(job)));
            }
            _ => return Err(format!("{field}: give exactly one of uri and pvc")),
        };
        let wrong = |error| format!("{field}.uri: {error}");
        let mut source = Source::unpinned(uri, StoreSettings::of(spec)).map_err(wrong)?;
        if let Some(ca) = &spec.ca {
            source = source.with_ca(&awaited(report, || self.objects.authorities(&ca.config_map_ref.name)).await);
        }
        let Some(secret) = &spec.secret_ref else { return Ok(source) };
        let (host, port) = source.credential_host().map_err(wrong)?;
        let kind = source.credential_kind();
        let credential = awaited(report, || self.objects.credential(&secret.name, kind, (&host, port))).await;
        Ok(source.with_credential(credential))
    }

    /// Judges the header before the download, where the source serves parts of files.
    async fn look_ahead(
        &self,
        job: &Job,
        draft: Option<&DraftModel>,
        source: &Source,
        report: &Report,
    ) -> Result<(), Stop> {
        let mut bytes = PEEK_FIRST_BYTES;
        loop {
            let peek = retried(report, || self.fetcher.peek(source, bytes)).await.map_err(|e| fetch_refusal(&e))?;
            let Some(peek) = peek else { return Ok(()) };
            // A prefix of at most 16 MiB: parsing it is a matter of milliseconds.
            match gantry_gguf::read_header_prefix(&peek.prefix, peek.total) {
                Ok(header) => {
                    report.gguf(header.summary());
                    check_use(&job.version.runtime, &header)?;
                    return check_memory(job, draft, header.summary(), report).map(drop).map_err(|refusal| {
                        report.pass(GateName::Format, format_value(&header));
                        refusal.into()
                    });
                }
                Err(GgufError::NeedMoreBytes { at_least }) if bytes < PEEK_MAX_BYTES => {
                    bytes = at_least.max(bytes.saturating_mul(2)).min(PEEK_MAX_BYTES);
                }
                // Judged after the download, from the whole file.
                Err(GgufError::NeedMoreBytes { .. } | GgufError::Io { .. }) => return Ok(()),
                Err(error) => return Err(format_refusal(&error).into()),
            }
        }
    }

    /// The same of a model that is split: the headers of all parts are read before any of them is downloaded.
    async fn look_ahead_at_parts(
        &self,
        job: &Job,
        draft: Option<&DraftModel>,
        named: &Named,
        report: &Report,
    ) -> Result<(), Stop> {
        let unusable = |error: std::io::Error| {
            let message = format!("the headers of the model's parts cannot be kept in a temporary directory: {error}");
            Refusal::new(GateName::Fetch, message)
        };
        let folder = self.fetcher.cache().scratch().map_err(unusable)?;
        let read = retried(report, || self.fetcher.headers(named, folder.path())).await;
        let Some(first) = read.map_err(|error| fetch_refusal(&error))? else { return Ok(()) };
        let read = tokio::task::spawn_blocking(move || gantry_gguf::read_header(&first)).await;
        let read =
            read.map_err(|error| Refusal::new(GateName::Format, format!("the file's reader failed: {error}")))?;
        let header = match read {
            Ok(header) => header,
            Err(GgufError::Io { .. }) => return Ok(()),
            Err(error) => return Err(format_refusal(&error).into()),
        };
        report.gguf(header.summary());
        check_use(&job.version.runtime, &header)?;
        check_memory(job, draft, header.summary(), report)?;
        Ok(())
    }
}

/// The digest of a file; `None`: the address always means the same, and its store tells the digest.
fn digest_of(field: &str, source: &SourceSpec) -> Result<Option<Digest>, String> {
    match &source.sha256 {
        Some(sha256) => sha256.0.parse().map(Some).map_err(|error| format!("{field}.sha256: {error}")),
        None if source.uri.as_deref().is_some_and(is_pinned) => Ok(None),
        None => Err(format!("{field}.sha256 is missing; give what sha256sum prints for the file")),
    }
}

/// What a fetch brings, of whose progress is reported.
async fn downloaded<T>(
    report: &Report,
    fetch: impl AsyncFnOnce(watch::Sender<FetchProgress>) -> Result<T, FetchError>,
) -> Result<T, Stop> {
    let (progress, mut seen) = watch::channel(FetchProgress::default());
    let fetch = fetch(progress);
    tokio::pin!(fetch);
    let fetched = loop {
        tokio::select! {
            fetched = &mut fetch => break fetched,
            Ok(()) = seen.changed() => report.progress(&seen.borrow_and_update()),
        }
    };
    match fetched {
        Ok(brought) => Ok(brought),
        Err(FetchError::Cancelled) => Err(Stop::Cancelled),
        Err(error @ FetchError::WrongDigest { bytes, .. }) => {
            report.pass(GateName::Fetch, quantity(bytes));
            Err(fetch_refusal(&error).into())
        }
        Err(error) => Err(fetch_refusal(&error).into()),
    }
}

/// Tries until it works or fails for good.
async fn retried<T, F>(report: &Report, mut attempt: impl FnMut() -> F) -> Result<T, FetchError>
where
    F: Future<Output = Result<T, FetchError>>,
{
    let mut backoff = Backoff::default();
    let mut waited = false;
    loop {
        match attempt().await {
            Err(error @ FetchError::Temporary { .. }) => {
                report.waits_for(WaitReason::FetchBackOff, &error.to_string());
                waited = true;
                tokio::time::sleep(backoff.after(&error, 0)).await;
            }
            result => {
                if waited {
                    report.goes_on();
                }
                return result;
            }
        }
    }
}
