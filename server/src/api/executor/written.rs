//! Answers that come whole: written off the runtime where they are large, a few at a time, and counted until their clients
//! have them. Absent: what is written, which is a protocol's.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;

use crate::api::errors::Failure;
use crate::limits::{INLINE_ANSWER_BYTES, WRITES_AT_ONCE};
use crate::output::TooMuch;

/// Who may write large answers now.
pub(in crate::api) struct Writers(Arc<Semaphore>);

impl Writers {
    pub(in crate::api) fn new() -> Self {
        Self(Arc::new(Semaphore::new(WRITES_AT_ONCE)))
    }

    /// Writes an answer of about `bytes`. `share` is what it holds until its client has it, and is told what it takes written.
    ///
    /// # Errors
    /// It cannot be written, or takes more than it may.
    pub(super) async fn write<S: Send + Sync + 'static>(
        &self,
        bytes: usize,
        share: S,
        settle: impl FnOnce(&mut S, usize) -> Result<(), TooMuch> + Send + 'static,
        write: impl FnOnce() -> Result<Vec<u8>, serde_json::Error> + Send + 'static,
    ) -> Result<Bytes, Failure> {
        let work = move || {
            let (body, mut share) = (write().map_err(|error| Failure::internal(&error))?, share);
            settle(&mut share, body.len()).map_err(Failure::too_much_to_collect)?;
            Ok::<_, Failure>(Bytes::from_owner(Held { body, _share: share }))
        };
        if bytes <= INLINE_ANSWER_BYTES {
            return work();
        }
        let permit = Arc::clone(&self.0).acquire_owned().await.map_err(|error| Failure::internal(&error))?;
        // Many numbers are milliseconds in which no other request would be heard.
        let written = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        written.await.unwrap_or_else(|error| Err(Failure::internal(&error)))
    }
}

/// An answer and its share of memory, which it keeps until the client has it.
struct Held<S> {
    body: Vec<u8>,
    _share: S,
}

impl<S> AsRef<[u8]> for Held<S> {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}
