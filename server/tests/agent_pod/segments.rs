//! Large files over several connections, from a server that gives each connection so much and no more.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use gantry_server::fetch::limits::{FETCH_CONNECTIONS, SEGMENTED_MIN_BYTES};
use gantry_server::fetch::{Cache, Digest, FetchError, FetchProgress, Fetcher, Source};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fetch::{HERE, digest};

/// Bytes that a connection gets at a time.
const CHUNK_BYTES: usize = 64 << 10;

/// How the server behaves.
#[derive(Clone, Default)]
struct Manners {
    etag: Option<&'static str>,
    /// What passes before each chunk, and before the answer.
    pace: Duration,
    latency: Duration,
    /// Connections that it takes at once.
    most: Option<usize>,
    /// From so many requests on there is another file.
    changes_at: Option<(usize, Bytes, &'static str)>,
}

#[derive(Default)]
struct Seen {
    now: AtomicUsize,
    most: AtomicUsize,
    ranges: Mutex<Vec<Option<String>>>,
}

/// One that is being answered.
struct Answered(Arc<Seen>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

fn large(seed: u32) -> Bytes {
    let bytes = usize::try_from(SEGMENTED_MIN_BYTES).unwrap() + 5_000_001;
    let rest = (0..bytes as u32).map(|i| (i ^ seed).wrapping_mul(2_654_435_761).to_be_bytes()[0]);
    b"GGUF".iter().copied().chain(rest).collect::<Vec<u8>>().into()
}

fn answer(manners: &Manners, content: &Bytes, seen: &Arc<Seen>, headers: &HeaderMap) -> Response {
    let text = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let range = text(header::RANGE);
    let count = {
        let mut ranges = seen.ranges.lock().unwrap();
        ranges.push(range.clone());
        ranges.len()
    };
    let guard = Answered(Arc::clone(seen));
    let now = seen.now.fetch_add(1, Ordering::SeqCst) + 1;
    seen.most.fetch_max(now, Ordering::SeqCst);
    if manners.most.is_some_and(|most| now > most) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let (content, etag) = match &manners.changes_at {
        Some((at, content, etag)) if count >= *at => (content.clone(), Some(*etag)),
        _ => (content.clone(), manners.etag),
    };
    let same = text(header::IF_RANGE).is_none_or(|tag| Some(tag.as_str()) == etag);
    let all = content.len();
    let range = range.filter(|_| same && etag.is_some()).map(|range| {
        let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        (first.parse::<usize>().unwrap(), last.parse().unwrap_or(all - 1).min(all - 1))
    });
    let (first, last) = range.unwrap_or((0, all - 1));
    let pieces = content.slice(first..=last);
    let (pace, latency) = (manners.pace, manners.latency);
    let body = stream::unfold((pieces, guard, true), move |(mut left, guard, is_first)| async move {
        if left.is_empty() {
            return None;
        }
        let wait = if is_first { latency + pace } else { pace };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let chunk = left.split_to(CHUNK_BYTES.min(left.len()));
        Some((Ok::<_, std::convert::Infallible>(chunk), (left, guard, false)))
    });
    let mut response = Body::from_stream(body).into_response();
    let told = response.headers_mut();
    told.insert(header::CONTENT_LENGTH, (last + 1 - first).into());
    if let Some(etag) = etag {
        told.insert(header::ETAG, etag.parse().unwrap());
        told.insert(header::ACCEPT_RANGES, "bytes".parse().unwrap());
    }
    if range.is_some() {
        told.insert(header::CONTENT_RANGE, format!("bytes {first}-{last}/{all}").parse().unwrap());
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    response
}

async fn serve(content: Bytes, manners: Manners) -> (String, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let heard = Arc::clone(&seen);
    let router = Router::new().fallback(move |request: Request| {
        let response = answer(&manners, &content, &heard, request.headers());
        async move { response }
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/m.gguf", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (url, seen)
}

/// Whether a fetch ends with this content.
async fn brings(url: &str, content: &Bytes) -> Result<bool, FetchError> {
    let folder = tempfile::tempdir().unwrap();
    let fetcher = Fetcher::new(Cache::open(folder.path()).unwrap(), HERE).unwrap();
    let source = Source::parse(url, None).unwrap();
    let (progress, seen) = watch::channel(FetchProgress::default());
    let wanted: Digest = digest(content);
    let model = fetcher.fetch(&source, wanted, &progress, &CancellationToken::new()).await?;
    assert_eq!((seen.borrow().bytes, seen.borrow().total), (content.len() as u64, Some(content.len() as u64)));
    Ok(std::fs::read(model.path()).unwrap() == *content)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_file_comes_over_several_connections_and_a_small_one_over_one() {
    let content = large(0);
    let manners = Manners { etag: Some("\"1\""), ..Manners::default() };
    let (url, seen) = serve(content.clone(), manners.clone()).await;
    assert!(brings(&url, &content).await.unwrap());
    let most = seen.most.load(Ordering::SeqCst);
    assert!((2..=FETCH_CONNECTIONS).contains(&most), "{most} at once");
    assert_eq!(seen.ranges.lock().unwrap()[0], None, "the first answer is used as well");

    let small = content.slice(..1_000_000);
    let (url, seen) = serve(small.clone(), manners).await;
    assert!(brings(&url, &small).await.unwrap());
    assert_eq!(seen.ranges.lock().unwrap().len(), 1);
    // Nor does one of which nobody could say that its pieces belong together.
    let (url, seen) = serve(content.clone(), Manners::default()).await;
    assert!(brings(&url, &content).await.unwrap());
    assert_eq!(seen.ranges.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_takes_no_several_connections_is_asked_over_one() {
    let content = large(0);
    // Slow enough that the first answer is not over when the others are asked for.
    let pace = Duration::from_millis(1);
    let manners = Manners { etag: Some("\"1\""), most: Some(1), pace, ..Manners::default() };
    let (url, seen) = serve(content.clone(), manners).await;
    assert!(brings(&url, &content).await.unwrap());
    let ranges = seen.ranges.lock().unwrap();
    let last = ranges.last().unwrap().as_ref().unwrap();
    assert!(last.ends_with('-') && last != "bytes=0-", "it goes on where it was, to the end: {ranges:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_between_its_segments_is_never_a_mixture() {
    let (one, other) = (large(0), large(7));
    let manners = Manners { etag: Some("\"1\""), changes_at: Some((4, other.clone(), "\"2\"")), ..Manners::default() };
    let (url, _) = serve(one.clone(), manners.clone()).await;
    assert!(brings(&url, &other).await.unwrap(), "the new one is fetched from its beginning");
    let (url, _) = serve(one.clone(), manners).await;
    let error = brings(&url, &one).await.unwrap_err();
    assert_eq!(
        error,
        FetchError::WrongDigest { expected: digest(&one), found: digest(&other), bytes: other.len() as u64 }
    );
}

/// A server that gives each connection 16 MiB a second after 50 ms, as object stores and CDNs bound one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a figure for docs/performance.md: takes ten seconds"]
async fn how_much_several_connections_gain() {
    let content = large(0);
    let manners = |etag| Manners {
        etag,
        pace: Duration::from_millis(4),
        latency: Duration::from_millis(50),
        ..Manners::default()
    };
    for etag in [None, Some("\"1\"")] {
        let (url, _) = serve(content.clone(), manners(etag)).await;
        let started = Instant::now();
        assert!(brings(&url, &content).await.unwrap());
        let (seconds, mib) = (started.elapsed().as_secs_f64(), content.len() as f64 / f64::from(1 << 20));
        println!("{}: {mib:.0} MiB in {seconds:.1} s, {:.0} MiB/s", etag.map_or("one", |_| "several"), mib / seconds);
    }
}
