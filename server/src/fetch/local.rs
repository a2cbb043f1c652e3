//! Files of this machine: what they hold may change, what the cache holds may not, so they are copied.

use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::watch;

use super::Peek;
use super::cache::Grant;
use super::download::{self, blocking};
use super::error::FetchError;
use super::limits::FILE_BUFFER_BYTES;
use super::magic::Magic;
use super::partial::Partial;
use super::progress::{FetchProgress, Meter};

/// Copies a file into the cache.
pub(super) async fn copy(
    grant: Arc<Grant>,
    mut partial: Partial,
    from: &Path,
    address: &str,
    progress: &watch::Sender<FetchProgress>,
) -> download::Ended {
    let path = from.to_owned();
    let opened = blocking(move || {
        let opened = gantry_gguf::open(&path).and_then(|(file, total)| partial.restart().map(|()| (file, total)));
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

pub(super) fn peek_file(path: &Path, bytes: u64) -> io::Result<Peek> {
    let (file, total) = gantry_gguf::open(path)?;
    let mut prefix = Vec::new();
    file.take(bytes).read_to_end(&mut prefix)?;
    Ok(Peek { prefix, total })
}

pub(super) fn local(address: &str, error: &io::Error) -> FetchError {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput => {
            FetchError::Permanent(format!(
                "{address} cannot be read: {error}; mount the file there, or correct the path"
            ))
        }
        _ => FetchError::temporary(format!("{address} cannot be read: {error}")),
    }
}
