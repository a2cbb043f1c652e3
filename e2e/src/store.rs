//! A model store over HTTP, with faults: what `gantry-e2e serve-files` runs.
//!
//! | address | serves |
//! | --- | --- |
//! | `/FILE` | the file, with Range |
//! | `/fault/truncate/BYTES/FILE` | its first bytes, as if that were all |
//! | `/fault/header-lie/KIND/FILE` | the file with a lie in its header: `dimensions`, `offset` or `overlap` |
//! | `/fault/template/KIND/FILE` | the file with a chat template that is `speechless` or `endless` |
//! | `/fault/swelling/STRINGS/FILE` | the file with so many empty strings in its header |
//! | `/fault/slow/BYTES_PER_S/FILE` | the file, slowly |
//! | `/fault/cut/BYTES/FILE` | the file, but each connection breaks after so many bytes |
//! | `/fault/until-mended/OTHER/FILE` | another file, or none if there is none of that name, and the file from the first POST to this address on |
//! | `/requests` | how often each address was asked for, as JSON |
//! | `/healthz` | 200 |
//!
//! Faults know Range too, so that a client which resumes gets to the end. Absent: anything that changes a file.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    ops::Range,
    path::{Path as FsPath, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::services::ServeDir;

use crate::{
    faults::{BadTemplate, Fault, HeaderLie},
    models::sha256_hex,
};

/// Largest file that faults are made from; they hold it in memory.
const MAX_FAULT_FILE_BYTES: u64 = 64 << 20;
/// Most strings that a header is made to swell with: 128 MiB of them.
const MAX_SWELLING_STRINGS: usize = 16 << 20;
/// Most addresses that are mended, and that are counted; further ones are counted together.
const MAX_COUNTED_ADDRESSES: usize = 1024;
/// Address under which the further ones are counted.
const OTHER_ADDRESSES: &str = "(other)";
/// Pieces that a slow answer sends in a second.
const SLOW_PIECES_PER_S: u64 = 20;

#[derive(Clone)]
struct Store {
    dir: Arc<PathBuf>,
    requests: Arc<Mutex<BTreeMap<String, u64>>>,
    mended: Arc<Mutex<BTreeSet<String>>>,
}

/// Serves the files of `dir` on `address` until `stop`.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve(dir: PathBuf, address: SocketAddr, stop: CancellationToken) -> anyhow::Result<()> {
    anyhow::ensure!(dir.is_dir(), "{} is not a folder; give the one with the model files as --dir", dir.display());
    let listener =
        TcpListener::bind(address).await.map_err(|error| anyhow::anyhow!("cannot listen on {address}: {error}"))?;
    tracing::info!(dir = %dir.display(), %address, "serving files");
    axum::serve(listener, router(dir)).with_graceful_shutdown(stop.cancelled_owned()).await?;
    Ok(())
}

/// The store as a service, for [`serve`] and tests.
pub fn router(dir: PathBuf) -> Router {
    let files = ServeDir::new(&dir);
    let store = Store { dir: Arc::new(dir), requests: Arc::default(), mended: Arc::default() };
    Router::new()
        .route("/fault/truncate/{bytes}/{file}", get(truncate))
        .route("/fault/header-lie/{kind}/{file}", get(header_lie))
        .route("/fault/template/{kind}/{file}", get(template))
        .route("/fault/swelling/{strings}/{file}", get(swelling))
        .route("/fault/slow/{bytes_per_s}/{file}", get(slow))
        .route("/fault/cut/{bytes}/{file}", get(cut))
        .route("/fault/until-mended/{other}/{file}", get(until_mended).post(mend))
        .fallback_service(files)
        .layer(middleware::from_fn_with_state(store.clone(), count))
        .route("/requests", get(requests))
        .route("/healthz", get(|| async { "ok" }))
        .with_state(store)
}

async fn count(State(store): State<Store>, request: Request, next: Next) -> Response {
    {
        let mut requests = store.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let path = request.uri().path();
        let path =
            if requests.len() < MAX_COUNTED_ADDRESSES || requests.contains_key(path) { path } else { OTHER_ADDRESSES };
        *requests.entry(path.to_owned()).or_default() += 1;
    }
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let response = next.run(request).await;
    tracing::info!(%method, %uri, status = response.status().as_u16(), "request");
    response
}

async fn requests(State(store): State<Store>) -> Json<BTreeMap<String, u64>> {
    Json(store.requests.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

async fn truncate(
    State(store): State<Store>,
    Path((bytes, file)): Path<(usize, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    serve_fault(&store, &file, &Fault::Truncated { bytes }, &headers).await
}

async fn header_lie(
    State(store): State<Store>,
    Path((kind, file)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let lie = HeaderLie::parse(&kind)
        .ok_or_else(|| Refusal::bad(format!("no lie is called {kind}; use dimensions, offset or overlap")))?;
    serve_fault(&store, &file, &Fault::HeaderLie(lie), &headers).await
}

async fn template(
    State(store): State<Store>,
    Path((kind, file)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let template = BadTemplate::parse(&kind)
        .ok_or_else(|| Refusal::bad(format!("no template is called {kind}; use speechless or endless")))?;
    serve_fault(&store, &file, &Fault::Template(template), &headers).await
}

async fn swelling(
    State(store): State<Store>,
    Path((strings, file)): Path<(usize, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    if strings > MAX_SWELLING_STRINGS {
        return Err(Refusal::bad(format!("{strings} strings, and at most {MAX_SWELLING_STRINGS} are made")));
    }
    serve_fault(&store, &file, &Fault::Swelling { strings }, &headers).await
}

async fn serve_fault(store: &Store, file: &str, fault: &Fault, headers: &HeaderMap) -> Result<Response, Refusal> {
    let damaged = fault.apply(store.read(file).await?).map_err(|error| Refusal::bad(format!("{error:#}")))?;
    Ok(Ranged::new(damaged, headers).respond(stream::iter))
}

async fn slow(
    State(store): State<Store>,
    Path((bytes_per_s, file)): Path<(u64, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let piece_bytes = usize::try_from((bytes_per_s / SLOW_PIECES_PER_S).max(1)).unwrap_or(usize::MAX);
    let ranged = Ranged::new(store.read(&file).await?, &headers);
    Ok(ranged.respond(|parts| {
        let pieces: Vec<_> = parts.into_iter().flatten().flat_map(|bytes| split(bytes, piece_bytes)).collect();
        let pace = tokio::time::interval(Duration::from_millis(1000 / SLOW_PIECES_PER_S));
        stream::unfold((pieces.into_iter(), pace), |(mut pieces, mut pace)| async move {
            let piece = pieces.next()?;
            pace.tick().await;
            Some((Ok(piece), (pieces, pace)))
        })
    }))
}

fn split(bytes: Bytes, piece_bytes: usize) -> impl Iterator<Item = Bytes> {
    (0..bytes.len())
        .step_by(piece_bytes)
        .map(move |from| bytes.slice(from..(from.saturating_add(piece_bytes)).min(bytes.len())))
}

async fn cut(
    State(store): State<Store>,
    Path((bytes, file)): Path<(usize, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let ranged = Ranged::new(store.read(&file).await?, &headers);
    Ok(ranged.respond(|parts| {
        let broken = std::io::Error::other("cut on purpose");
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        let whole = parts.iter().all(|part| part.len() <= bytes);
        let first = parts.into_iter().map(move |part| Ok(part.slice(..bytes.min(part.len()))));
        let end = (!whole).then_some(Err(broken));
        // A pause lets the bytes leave before the connection is dropped under them.
        stream::iter(first.chain(end)).then(|item| async {
            if item.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            item
        })
    }))
}

async fn until_mended(
    State(store): State<Store>,
    Path((other, file)): Path<(String, String)>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let is_mended = store.mended.lock().unwrap_or_else(PoisonError::into_inner).contains(uri.path());
    let bytes = store.read(if is_mended { &file } else { &other }).await?;
    Ok(Ranged::new(bytes, &headers).respond(stream::iter))
}

async fn mend(State(store): State<Store>, uri: Uri) -> Result<StatusCode, Refusal> {
    let mut mended = store.mended.lock().unwrap_or_else(PoisonError::into_inner);
    if mended.len() >= MAX_COUNTED_ADDRESSES {
        return Err(Refusal::bad(format!("{MAX_COUNTED_ADDRESSES} addresses are mended, and no more can be")));
    }
    mended.insert(uri.path().to_owned());
    Ok(StatusCode::NO_CONTENT)
}

impl Store {
    async fn read(&self, file: &str) -> Result<Vec<u8>, Refusal> {
        let plain = !file.starts_with('.') && file.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if !plain {
            return Err(Refusal::bad(format!("{file} is not the name of a file here")));
        }
        let path = self.dir.join(file);
        read_bounded(&path).await
    }
}

async fn read_bounded(path: &FsPath) -> Result<Vec<u8>, Refusal> {
    let missing = |error: std::io::Error| Refusal {
        status: StatusCode::NOT_FOUND,
        message: format!("{}: {error}", path.display()),
    };
    let bytes = tokio::fs::metadata(path).await.map_err(missing)?.len();
    if bytes > MAX_FAULT_FILE_BYTES {
        return Err(Refusal::bad(format!(
            "{} has {bytes} bytes; faults are made of files up to {MAX_FAULT_FILE_BYTES}",
            path.display()
        )));
    }
    tokio::fs::read(path).await.map_err(missing)
}

struct Refusal {
    status: StatusCode,
    message: String,
}

impl Refusal {
    fn bad(message: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, self.message + "\n").into_response()
    }
}

/// Bytes, and which of them were asked for.
struct Ranged {
    all: Bytes,
    etag: String,
    /// `None`: the range cannot be satisfied.
    part: Option<Range<usize>>,
}

impl Ranged {
    fn new(all: Vec<u8>, headers: &HeaderMap) -> Self {
        let etag = format!("\"{}\"", sha256_hex(&all));
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let current = text(header::IF_RANGE).is_none_or(|wanted| wanted == etag);
        let range = text(header::RANGE).filter(|_| current);
        let part = range.map_or(Some(0..all.len()), |range| parse_range(range, all.len()));
        Self { all: all.into(), etag, part }
    }

    /// Answers with the part, its bytes made into a stream by `body`.
    fn respond<S>(self, body: impl FnOnce(Vec<Result<Bytes, std::io::Error>>) -> S) -> Response
    where
        S: Stream<Item = Result<Bytes, std::io::Error>> + Send + 'static,
    {
        let total = self.all.len();
        let response = Response::builder().header(header::ACCEPT_RANGES, "bytes").header(header::ETAG, self.etag);
        let response = match self.part {
            None => response
                .status(StatusCode::RANGE_NOT_SATISFIABLE)
                .header(header::CONTENT_RANGE, format!("bytes */{total}"))
                .body(Body::empty()),
            Some(part) => {
                let partial = part.len() < total;
                let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
                let mut response = response.status(status).header(header::CONTENT_LENGTH, part.len());
                if partial {
                    let (first, last) = (part.start, part.end.saturating_sub(1));
                    response = response.header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{total}"));
                }
                response.body(Body::from_stream(body(vec![Ok(self.all.slice(part))])))
            }
        };
        response.unwrap_or_else(|error| Refusal::bad(error.to_string()).into_response())
    }
}

/// `bytes=FIRST-` or `bytes=FIRST-LAST`, which is what downloads use.
fn parse_range(range: &str, total: usize) -> Option<Range<usize>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let first: usize = first.parse().ok()?;
    let end = if last.is_empty() { total } else { last.parse::<usize>().ok()?.checked_add(1)?.min(total) };
    (first < end).then_some(first..end)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tower::ServiceExt;

    use super::*;

    fn store() -> (tempfile::TempDir, Router) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.gguf"), b"0123456789").unwrap();
        let router = router(dir.path().to_owned());
        (dir, router)
    }

    async fn fetch(
        router: &Router,
        path: &str,
        range: Option<&str>,
    ) -> (u16, Option<String>, Result<Bytes, axum::Error>) {
        let mut request = Request::builder().uri(path);
        if let Some(range) = range {
            request = request.header(header::RANGE, range);
        }
        let response = router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        let content_range =
            response.headers().get(header::CONTENT_RANGE).map(|value| value.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        (status, content_range, axum::body::to_bytes(response.into_body(), 1 << 20).await)
    }

    #[tokio::test]
    async fn files_and_faults_know_ranges() {
        let (_dir, router) = store();
        for (path, range, status, content_range, body) in [
            ("/m.gguf", None, 200, None, "0123456789"),
            ("/m.gguf", Some("bytes=4-"), 206, Some("bytes 4-9/10"), "456789"),
            ("/fault/truncate/5/m.gguf", None, 200, None, "01234"),
            ("/fault/truncate/5/m.gguf", Some("bytes=2-3"), 206, Some("bytes 2-3/5"), "23"),
            ("/fault/truncate/5/m.gguf", Some("bytes=5-"), 416, Some("bytes */5"), ""),
            ("/fault/slow/1000000/m.gguf", Some("bytes=8-"), 206, Some("bytes 8-9/10"), "89"),
            ("/fault/cut/4/m.gguf", Some("bytes=6-"), 206, Some("bytes 6-9/10"), "6789"),
        ] {
            let (seen_status, seen_range, seen_body) = fetch(&router, path, range).await;
            assert_eq!((seen_status, seen_range.as_deref()), (status, content_range), "{path} {range:?}");
            assert_eq!(seen_body.unwrap(), body.as_bytes(), "{path} {range:?}");
        }
    }

    #[tokio::test]
    async fn a_cut_download_breaks() {
        let (_dir, router) = store();
        let (status, _, body) = fetch(&router, "/fault/cut/4/m.gguf", None).await;
        assert_eq!(status, 200);
        assert!(body.is_err(), "the connection breaks");
    }

    #[tokio::test]
    async fn only_names_of_files_are_read() {
        let (_dir, router) = store();
        for (path, status) in [
            ("/fault/truncate/5/..%2Fm.gguf", 400),
            ("/fault/truncate/5/.m", 400),
            ("/fault/truncate/5/none.gguf", 404),
            ("/fault/header-lie/other/m.gguf", 400),
            ("/fault/header-lie/offset/m.gguf", 400),
            ("/none.gguf", 404),
        ] {
            assert_eq!(fetch(&router, path, None).await.0, status, "{path}");
        }
    }

    #[tokio::test]
    async fn the_right_file_is_there_once_its_address_is_mended() {
        let (dir, router) = store();
        std::fs::write(dir.path().join("other.gguf"), b"abc").unwrap();
        for (path, before) in
            [("/fault/until-mended/none.gguf/m.gguf", 404), ("/fault/until-mended/other.gguf/m.gguf", 200)]
        {
            let (status, _, body) = fetch(&router, path, None).await;
            assert_eq!((status, body.unwrap() == "abc"), (before, before == 200));
            let mend = Request::post(path).body(Body::empty()).unwrap();
            assert_eq!(router.clone().oneshot(mend).await.unwrap().status(), StatusCode::NO_CONTENT);
            let (status, _, body) = fetch(&router, path, None).await;
            assert_eq!((status, body.unwrap().as_ref()), (200, b"0123456789".as_slice()));
        }
    }

    #[tokio::test]
    async fn requests_are_counted_by_address() {
        let (_dir, router) = store();
        for path in ["/m.gguf", "/m.gguf", "/fault/truncate/5/m.gguf", "/healthz"] {
            drop(fetch(&router, path, None).await);
        }
        let counts: BTreeMap<String, u64> =
            serde_json::from_slice(&fetch(&router, "/requests", None).await.2.unwrap()).unwrap();
        assert_eq!(counts, BTreeMap::from([("/m.gguf".to_owned(), 2), ("/fault/truncate/5/m.gguf".to_owned(), 1)]));
    }
}
