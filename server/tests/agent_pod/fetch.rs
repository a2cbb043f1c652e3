//! Fetching against a real server that misbehaves in every way that a real one can.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gantry_server::fetch::limits::MAX_HEADERS_BYTES;
use gantry_server::fetch::{
    Cache, CachedModel, Digest, FetchError, FetchProgress, Fetcher, Named, NamedFile, Reach, Source,
};
use proptest::prelude::*;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::files::{Fault, FileServer};

pub fn digest(content: &[u8]) -> Digest {
    Digest::from(<[u8; 32]>::from(Sha256::digest(content)))
}

/// The servers of these tests are on this machine.
pub const HERE: Reach = Reach { private: true, loopback: true };

/// What begins as a model does.
fn content(bytes: usize, seed: u8) -> Vec<u8> {
    let rest = (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed));
    b"GGUF".iter().copied().chain(rest.skip(4)).take(bytes).collect()
}

fn fetcher(folder: &Path) -> Fetcher {
    Fetcher::new(Cache::open(folder).unwrap(), HERE).unwrap()
}

async fn fetch(fetcher: &Fetcher, url: &str, digest: Digest) -> Result<CachedModel, FetchError> {
    let (progress, _) = watch::channel(FetchProgress::default());
    let source = Source::parse(url, None).unwrap();
    fetcher.fetch(&source, digest, &progress, &CancellationToken::new()).await
}

/// Fetches `content` through `faults` and checks that it arrives; answers with the ranges that were asked for.
async fn survives(content: &[u8], server: &FileServer, faults: impl IntoIterator<Item = Fault>) -> Vec<Option<String>> {
    let folder = tempfile::tempdir().unwrap();
    server.faults(faults);
    let model = fetch(&fetcher(folder.path()), &server.url(), digest(content)).await.unwrap();
    assert!(std::fs::read(model.path()).unwrap() == content, "the bytes are others");
    let names: Vec<_> =
        std::fs::read_dir(model.path().parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1, "something is left over: {names:?}");
    server.asked().into_iter().map(|asked| asked.range).collect()
}

#[tokio::test]
async fn a_file_is_fetched_once_and_then_cached() {
    let content = content(3 << 20, 0);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    let (progress, seen) = watch::channel(FetchProgress::default());
    let source = Source::parse(&server.url(), None).unwrap();
    let model = fetcher.fetch(&source, digest(&content), &progress, &CancellationToken::new()).await.unwrap();
    assert_eq!(model.bytes(), content.len() as u64);
    let last = seen.borrow().clone();
    assert_eq!((last.bytes, last.total), (content.len() as u64, Some(content.len() as u64)));
    fetch(&fetcher, &server.url(), digest(&content)).await.unwrap();
    assert_eq!(server.asked().len(), 1);
}

#[tokio::test]
async fn headers_that_are_read_ahead_take_no_more_room_than_they_may() {
    let named = |server: &FileServer, count: usize| Named {
        files: vec![NamedFile { source: Source::parse(&server.url(), None).unwrap(), digest: None }; count],
        pinned: None,
    };
    let taken = |folder: &Path| -> u64 {
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap());
        files.map(|file| file.blocks() * 512).sum()
    };
    let cache = tempfile::tempdir().unwrap();
    let fetcher = fetcher(cache.path());
    // Of a whole one nothing is kept but its header, however much came with it.
    let demo = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/demo-v2.f16.gguf")).unwrap();
    let header_bytes = gantry_gguf::read_header_prefix(&demo, demo.len() as u64).unwrap().summary().header_bytes;
    let (server, folder) = (FileServer::start(demo.clone()).await, tempfile::tempdir().unwrap());
    let first = fetcher.headers(&named(&server, 1), folder.path()).await.unwrap().unwrap();
    assert_eq!(std::fs::metadata(&first).unwrap().len(), demo.len() as u64);
    assert!(gantry_gguf::read_header(&first).is_ok());
    assert!(taken(folder.path()) <= header_bytes.next_multiple_of(4096), "{} of {header_bytes}", taken(folder.path()));
    // Parts that are no models are kept as far as they were read, for who says so, and all of them within the limit.
    let (server, folder) = (FileServer::start(content(1 << 20, 9)).await, tempfile::tempdir().unwrap());
    let fit = usize::try_from(MAX_HEADERS_BYTES >> 20).unwrap();
    for (count, is_read) in [(fit, true), (fit + 1, false)] {
        let read = fetcher.headers(&named(&server, count), folder.path()).await.unwrap();
        assert_eq!(read.is_some(), is_read, "{count}");
        assert!(taken(folder.path()) <= 2 * MAX_HEADERS_BYTES + (1 << 20), "{}", taken(folder.path()));
    }
}

#[tokio::test]
async fn a_broken_connection_is_continued() {
    let content = content(1 << 20, 1);
    let server = FileServer::start(content.clone()).await;
    let ranges = survives(&content, &server, [Fault::Cut(300_000), Fault::Cut(0), Fault::Cut(200_000)]).await;
    assert_eq!(ranges[0], None);
    assert_eq!(ranges[1..].iter().flatten().count(), 3, "{ranges:?}");
    assert_eq!(server.sent_bytes(), content.len(), "no byte is sent twice");
    assert_eq!(server.asked()[1].if_range.as_deref(), Some("\"1\""));
}

#[tokio::test]
async fn a_server_without_ranges_starts_over() {
    let content = content(500_000, 2);
    let server = FileServer::start(content.clone()).await;
    survives(&content, &server, [Fault::Cut(100_000), Fault::IgnoreRange]).await;
}

#[tokio::test]
async fn server_errors_pass() {
    let content = content(1000, 3);
    let server = FileServer::start(content.clone()).await;
    let ranges = survives(&content, &server, [Fault::Status(500), Fault::Status(503)]).await;
    assert_eq!(ranges.len(), 3);
}

#[tokio::test]
async fn a_file_that_is_replaced_midway_is_fetched_as_the_new_one() {
    for (honest, etag) in [(true, Some("\"2\"")), (false, Some("\"2\"")), (false, None)] {
        let (old, new) = (content(400_000, 4), content(400_000, 5));
        let server = FileServer::start(old).await;
        if etag.is_none() {
            server.replace(content(400_000, 4), None);
        }
        let folder = tempfile::tempdir().unwrap();
        let fetcher = Arc::new(fetcher(folder.path()));
        // The first piece is of the old file; whatever comes next is of the new one.
        server.faults([Fault::Cut(150_000)]);
        let (progress, mut seen) = watch::channel(FetchProgress::default());
        let (source, wanted) = (Source::parse(&server.url(), None).unwrap(), digest(&new));
        let running = {
            let fetcher = Arc::clone(&fetcher);
            tokio::spawn(async move { fetcher.fetch(&source, wanted, &progress, &CancellationToken::new()).await })
        };
        seen.wait_for(|progress| progress.note.is_some()).await.unwrap();
        server.replace(new.clone(), etag);
        if !honest {
            server.faults([Fault::IgnoreIfRange]);
        }
        let model = running.await.unwrap().unwrap();
        assert!(std::fs::read(model.path()).unwrap() == new, "{honest} {etag:?}");
    }
}

#[tokio::test]
async fn a_part_that_starts_elsewhere_is_not_taken() {
    let content = content(300_000, 6);
    let server = FileServer::start(content.clone()).await;
    survives(&content, &server, [Fault::Cut(100_000), Fault::Shift(10)]).await;
}

#[tokio::test]
async fn another_file_is_told_with_both_digests() {
    let served = content(10_000, 7);
    let server = FileServer::start(served.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let wanted = digest(b"another");
    let error = fetch(&fetcher(folder.path()), &server.url(), wanted).await.unwrap_err();
    assert_eq!(error, FetchError::WrongDigest { expected: wanted, found: digest(&served), bytes: 10_000 });
    assert_eq!(server.asked().len(), 1);
    assert_eq!(std::fs::read_dir(folder.path().join("sha256")).unwrap().count(), 0, "it is not kept");
}

#[tokio::test]
async fn a_file_that_was_cut_without_a_word_is_fetched_again() {
    let content = content(300_000, 21);
    let server = FileServer::start(content.clone()).await;
    survives(&content, &server, [Fault::UnsaidCut(100_000), Fault::UnsaidCut(200_000), Fault::UnsaidLength]).await;
    // One that is the same again is another file.
    let server = FileServer::start(content.clone()).await;
    server.always(Some(Fault::UnsaidLength));
    let folder = tempfile::tempdir().unwrap();
    let wanted = digest(b"another");
    let error = fetch(&fetcher(folder.path()), &server.url(), wanted).await.unwrap_err();
    assert_eq!(error, FetchError::WrongDigest { expected: wanted, found: digest(&content), bytes: 300_000 });
    assert_eq!(server.asked().len(), 2);
    assert_eq!(std::fs::read_dir(folder.path().join("sha256")).unwrap().count(), 0, "it is not kept");
}

#[tokio::test]
async fn what_will_not_pass_fails_at_once() {
    for (status, says) in
        [(401, "secretRef"), (403, "secretRef"), (404, "no such file"), (410, "no such file"), (400, "uri")]
    {
        let server = FileServer::start(content(10, 0)).await;
        server.always(Some(Fault::Status(status)));
        let folder = tempfile::tempdir().unwrap();
        let error = fetch(&fetcher(folder.path()), &server.url(), digest(b"x")).await.unwrap_err();
        assert!(matches!(&error, FetchError::Permanent(text) if text.contains(says)), "{status}: {error}");
        assert_eq!(server.asked().len(), 1);
    }
}

#[tokio::test]
async fn redirects_are_followed_but_not_for_ever() {
    let content = content(1000, 8);
    let server = FileServer::start(content.clone()).await;
    survives(&content, &server, [Fault::Redirect("/elsewhere".into())]).await;
    assert_eq!(server.asked()[1].path, "/elsewhere");
    for to in ["/again".to_owned(), "ftp://127.0.0.1/m".to_owned()] {
        let server = FileServer::start(content.clone()).await;
        server.always(Some(Fault::Redirect(to)));
        let folder = tempfile::tempdir().unwrap();
        let error = fetch(&fetcher(folder.path()), &server.url(), digest(&content)).await.unwrap_err();
        assert!(matches!(&error, FetchError::Permanent(text) if text.contains("redirect")), "{error}");
    }
}

#[tokio::test]
async fn what_an_earlier_process_left_is_continued() {
    let content = content(800_000, 9);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let wanted = digest(&content);
    // As an earlier process would have left it: cut off in the middle.
    let partial = folder.path().join(format!("sha256/{wanted}.partial"));
    std::fs::create_dir_all(partial.parent().unwrap()).unwrap();
    std::fs::write(&partial, &content[..500_000]).unwrap();
    std::fs::write(partial.with_extension("validator"), r#"{"etag": "\"1\"", "last_modified": null}"#).unwrap();
    fetch(&fetcher(folder.path()), &server.url(), wanted).await.unwrap();
    assert_eq!(server.asked()[0].range.as_deref(), Some("bytes=500000-"));
    assert_eq!(server.sent_bytes(), 300_000);

    // The same, but the disk has spoilt it: the pieces do not make the file, and it is fetched as a whole.
    let folder = tempfile::tempdir().unwrap();
    let partial = folder.path().join(format!("sha256/{wanted}.partial"));
    std::fs::create_dir_all(partial.parent().unwrap()).unwrap();
    std::fs::write(&partial, vec![0; 500_000]).unwrap();
    fetch(&fetcher(folder.path()), &server.url(), wanted).await.unwrap();

    // A partial file that is whole already: nothing is left to send.
    let folder = tempfile::tempdir().unwrap();
    let partial = folder.path().join(format!("sha256/{wanted}.partial"));
    std::fs::create_dir_all(partial.parent().unwrap()).unwrap();
    std::fs::write(&partial, &content).unwrap();
    let before = server.sent_bytes();
    fetch(&fetcher(folder.path()), &server.url(), wanted).await.unwrap();
    assert_eq!(server.sent_bytes(), before);
}

#[tokio::test]
async fn two_who_want_the_same_file_fetch_it_once() {
    let content = content(1 << 20, 10);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let (fetcher, url, wanted) = (fetcher(folder.path()), server.url(), digest(&content));
    let (a, b) = tokio::join!(fetch(&fetcher, &url, wanted), fetch(&fetcher, &url, wanted));
    assert_eq!(a.unwrap().path(), b.unwrap().path());
    assert_eq!(server.asked().len(), 1);
}

/// Until so many requests came to a server.
async fn asked(server: &FileServer, times: usize) {
    while server.asked().len() < times {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn another_source_of_the_same_file_takes_over_from_one_that_sends_a_byte_now_and_then() {
    let content = content(1 << 20, 14);
    let (slow, quick) = (FileServer::start(content.clone()).await, FileServer::start(content.clone()).await);
    let folder = tempfile::tempdir().unwrap();
    let (fetcher, wanted) = (fetcher(folder.path()), digest(&content));
    // Most of it came, and the rest will not.
    slow.faults([Fault::Cut(1_000_000)]);
    slow.always(Some(Fault::Trickle));
    let later = async {
        asked(&slow, 2).await;
        fetch(&fetcher, &quick.url(), wanted).await
    };
    let url = slow.url();
    let (first, later) = tokio::join!(fetch(&fetcher, &url, wanted), later);
    assert_eq!(first.unwrap().path(), later.unwrap().path());
    assert!(quick.sent_bytes() < 100_000, "what came from the first one was thrown away");
    assert_eq!(slow.asked().len(), 2, "the first one goes on all the same: {:?}", slow.asked());
}

#[tokio::test]
async fn another_source_that_does_not_answer_takes_nothing_over() {
    let content = content(100, 15);
    let (slow, down) = (FileServer::start(content.clone()).await, FileServer::start(content.clone()).await);
    let folder = tempfile::tempdir().unwrap();
    let (fetcher, wanted) = (fetcher(folder.path()), digest(&content));
    slow.faults([Fault::Trickle]);
    down.always(Some(Fault::Status(503)));
    let later = async {
        asked(&slow, 1).await;
        fetch(&fetcher, &down.url(), wanted).await
    };
    let url = slow.url();
    let (first, later) = tokio::join!(fetch(&fetcher, &url, wanted), later);
    assert_eq!(first.unwrap().path(), later.unwrap().path());
    assert_eq!(slow.asked().len(), 1, "the first one was interrupted: {:?}", slow.asked());
    assert!(down.asked().len() > 1, "the other one was not tried again");
}

#[tokio::test]
async fn one_who_took_over_and_waits_for_its_next_try_lets_the_first_go_on() {
    let content = content(100, 16);
    let (slow, broken) = (FileServer::start(content.clone()).await, FileServer::start(content.clone()).await);
    let folder = tempfile::tempdir().unwrap();
    let (fetcher, wanted) = (fetcher(folder.path()), digest(&content));
    slow.faults([Fault::Trickle]);
    // It answers the question whether it is there, and brings nothing.
    broken.faults([Fault::None]);
    broken.always(Some(Fault::Status(503)));
    let later = async {
        asked(&slow, 1).await;
        fetch(&fetcher, &broken.url(), wanted).await
    };
    let url = slow.url();
    let (first, later) = tokio::join!(fetch(&fetcher, &url, wanted), later);
    assert_eq!(first.unwrap().path(), later.unwrap().path());
    assert_eq!(slow.asked().len(), 2, "{:?}", slow.asked());
}

#[tokio::test]
async fn a_cancelled_fetch_keeps_what_came_for_the_next() {
    let content = content(600_000, 11);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let (fetcher, wanted) = (fetcher(folder.path()), digest(&content));
    let source = Source::parse(&server.url(), None).unwrap();
    server.faults([Fault::Cut(200_000), Fault::Stall]);
    let cancel = CancellationToken::new();
    let (progress, mut seen) = watch::channel(FetchProgress::default());
    let stalled = async {
        seen.wait_for(|progress| progress.note.is_some()).await.unwrap();
        while server.asked().len() < 2 {
            tokio::task::yield_now().await;
        }
        cancel.cancel();
    };
    let (ended, ()) = tokio::join!(fetcher.fetch(&source, wanted, &progress, &cancel), stalled);
    assert_eq!(ended.unwrap_err(), FetchError::Cancelled);
    fetch(&fetcher, &server.url(), wanted).await.unwrap();
    assert_eq!(server.sent_bytes(), content.len(), "the first piece is used");
}

#[tokio::test]
async fn a_model_larger_than_the_cache_is_refused_before_it_comes() {
    let content = content(500_000, 12);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    fetcher.cache().set_limit_bytes(Some(100_000));
    let error = fetch(&fetcher, &server.url(), digest(&content)).await.unwrap_err();
    assert!(matches!(&error, FetchError::TooLarge(text) if text.contains("sizeLimit")), "{error}");
    assert_eq!(std::fs::read_dir(folder.path().join("sha256")).unwrap().count(), 0, "something of it is kept");
}

#[tokio::test]
async fn an_answer_without_end_is_stopped_at_the_limit_of_the_cache() {
    const LIMIT: u64 = 6 << 20;
    let server = FileServer::start(content(1000, 17)).await;
    server.always(Some(Fault::Endless));
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    fetcher.cache().set_limit_bytes(Some(LIMIT));
    let error = fetch(&fetcher, &server.url(), digest(b"x")).await.unwrap_err();
    let FetchError::TooLarge(text) = error else { panic!("{error}") };
    for part in ["without saying how long it is", "of whose 6.00 MiB", "spec.cache.sizeLimit"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(server.asked().len(), 1, "it is not tried again");
    assert_eq!(std::fs::read_dir(folder.path().join("sha256")).unwrap().count(), 0, "what came of it is kept");
}

#[tokio::test]
async fn an_answer_without_a_length_takes_the_room_of_what_was_not_used_for_the_longest_time() {
    let (oldest, older, new) = (content(1 << 20, 18), content(1 << 20, 19), content(3 << 20, 20));
    let server = FileServer::start(oldest.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    for content in [&oldest, &older] {
        server.replace(content.clone(), None);
        fetch(&fetcher, &server.url(), digest(content)).await.unwrap();
    }
    let is_there = |content: &[u8]| folder.path().join(format!("sha256/{}", digest(content))).exists();
    server.replace(new.clone(), None);
    server.always(Some(Fault::UnsaidLength));
    // Nobody knows how long it will be, so a step of room is asked for; all that there is, is taken.
    fetcher.cache().set_limit_bytes(Some(4 << 20));
    let in_use = fetcher.cached(digest(&older)).await.unwrap().unwrap();
    let model = fetch(&fetcher, &server.url(), digest(&new)).await.unwrap();
    assert_eq!(model.bytes(), new.len() as u64);
    assert_eq!([is_there(&oldest), is_there(&older)], [false, true]);
    drop(in_use);
}

#[tokio::test]
async fn what_is_no_model_is_left_at_its_first_bytes_and_nothing_of_it_is_told() {
    let secret = b"{\"password\": \"hush\"}".repeat(100_000);
    let server = FileServer::start(secret.clone()).await;
    server.faults([Fault::None, Fault::UnsaidLength]);
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    let file = folder.path().join("secret");
    std::fs::write(&file, &secret).unwrap();
    let found = digest(&secret).to_string();
    for url in [server.url(), server.url(), format!("file://{}", file.display())] {
        let error = fetch(&fetcher, &url, digest(b"x")).await.unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, FetchError::NotGguf(_)), "{told}");
        assert!(!told.contains("hush") && !told.contains("{") && !told.contains(&found), "{told}");
        assert_eq!(std::fs::read_dir(folder.path().join("sha256")).unwrap().count(), 0, "it is kept");
    }
    assert_eq!(server.asked().len(), 2);
}

#[tokio::test]
async fn files_of_this_machine_are_copied_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let content = content(3_000_000, 13);
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, &content).unwrap();
    let fetcher = fetcher(folder.path());
    let url = format!("file://{}", path.display());
    let model = fetch(&fetcher, &url, digest(&content)).await.unwrap();
    assert!(std::fs::read(model.path()).unwrap() == content);
    assert!(matches!(fetch(&fetcher, &url, digest(b"x")).await.unwrap_err(), FetchError::WrongDigest { .. }));
    for bad in [format!("{url}.not"), format!("file://{}", folder.path().display())] {
        let error = fetch(&fetcher, &bad, digest(b"x")).await.unwrap_err();
        assert!(matches!(&error, FetchError::Permanent(text) if text.contains("mount")), "{error}");
    }
    let peek = fetcher.peek(&Source::file(&path), 100).await.unwrap().unwrap();
    assert_eq!((peek.prefix.as_slice(), peek.total), (&content[..100], 3_000_000));
}

#[tokio::test]
async fn the_first_bytes_are_read_where_parts_are_served() {
    let content = content(5000, 14);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    let source = Source::parse(&server.url(), None).unwrap();
    let peek = fetcher.peek(&source, 100).await.unwrap().unwrap();
    assert_eq!((peek.prefix.as_slice(), peek.total), (&content[..100], 5000));
    let peek = fetcher.peek(&source, 1 << 20).await.unwrap().unwrap();
    assert_eq!(peek.prefix, content);
    server.faults([Fault::IgnoreRange, Fault::Status(404), Fault::Status(500)]);
    assert_eq!(fetcher.peek(&source, 100).await.unwrap(), None);
    assert!(!fetcher.peek(&source, 100).await.unwrap_err().is_temporary());
    assert!(fetcher.peek(&source, 100).await.unwrap_err().is_temporary());
    server.replace(Vec::new(), None);
    assert_eq!(fetcher.peek(&source, 100).await.unwrap().unwrap().total, 0);
}

/// Behind one address are several servers, or another one by now: a connection that is kept would lead every try to the one that
/// lacks the file.
#[tokio::test]
async fn each_try_is_a_connection_of_its_own() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let source = Source::parse(&format!("http://{}/m", listener.local_addr().unwrap()), None).unwrap();
    tokio::spawn(async move {
        let mut answer = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        while let Ok((mut stream, _)) = listener.accept().await {
            let part = "HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/4\r\ncontent-length: 4\r\n\r\nGGUF";
            let answer = std::mem::replace(&mut answer, part);
            // It answers so for as long as the connection is kept.
            tokio::spawn(async move {
                let mut head = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    head.push(byte);
                    if head.ends_with(b"\r\n\r\n") {
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    }
                }
            });
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    assert!(matches!(fetcher.peek(&source, 4).await, Err(FetchError::Permanent(_))));
    assert_eq!(fetcher.peek(&source, 4).await.unwrap().unwrap().prefix, b"GGUF");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_waited_for() {
    let content = content(1000, 15);
    let server = FileServer::start(content.clone()).await;
    let folder = tempfile::tempdir().unwrap();
    let fetcher = fetcher(folder.path());
    // A port that nobody listens on, and that no other test gets.
    let reserved = tokio::net::TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let free = reserved.local_addr().unwrap();
    let source = Source::parse(&format!("http://{free}/m"), None).unwrap();
    let (progress, mut seen) = watch::channel(FetchProgress::default());
    let cancel = CancellationToken::new();
    let noted = async {
        let progress = seen.wait_for(|progress| progress.note.is_some()).await.unwrap().clone();
        cancel.cancel();
        progress.note.unwrap()
    };
    let (ended, note) = tokio::join!(fetcher.fetch(&source, digest(&content), &progress, &cancel), noted);
    assert_eq!(ended.unwrap_err(), FetchError::Cancelled);
    assert!(note.contains(&free.to_string()) && !note.contains("try"), "a text for every try: {note}");
    drop((server, reserved));
}

fn fault(bytes: usize) -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => (0..bytes).prop_map(Fault::Cut),
        1 => Just(Fault::IgnoreRange),
        1 => (1..1000_usize).prop_map(Fault::Shift),
        1 => Just(Fault::Status(503)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    /// Whatever the server does on the way, the file that is stored is the one that was asked for.
    #[test]
    fn any_sequence_of_faults_ends_with_the_right_bytes(bytes in 1..200_000_usize, faults in proptest::collection::vec(fault(200_000), 0..3)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let content = content(bytes, 16);
            let server = FileServer::start(content.clone()).await;
            let done = tokio::time::timeout(Duration::from_secs(60), survives(&content, &server, faults)).await;
            assert!(done.is_ok(), "it did not end");
        });
    }
}
