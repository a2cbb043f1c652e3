//! Responses that are kept, each for the client that it was made for: written once they are known, read, cancelled and deleted.
//!
//! What a client was told is kept behind a line that says whose it is and when it expires. One process writes a response, the one that
//! answers it; whoever else wants it to end leaves a mark ([`cancel`]), which that process looks for. While it answers in the background it
//! renews a lease; a response that is not done and whose lease is over has failed, whoever reads it, and its process writes
//! nothing else of it ([`Lease`]).

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use bytes::Bytes;
use gantry_responses::{Progress, ResponseId, StoredResponse, StoredResponses, abandoned};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::App;
use super::budget::{Peer, Share};
use super::errors::Failure;
use crate::keys::Caller;
use crate::limits::{BACKGROUND_LEASE, BODY_BUDGET_WAIT, CANCEL_LIMIT, CANCEL_LOOK_PERIOD};
use crate::response_store::{Part, ResponseStore, StoreError, unix_seconds};

/// The line before a response.
#[derive(Serialize, Deserialize)]
struct Head {
    owner: Option<String>,
    expires_at: u64,
}

/// Who asks for responses, and where they are.
pub(super) struct Asker<'a> {
    app: &'a App,
    store: &'a Arc<ResponseStore>,
    caller: Caller,
    peer: Peer,
}

/// A response as its client is told it now.
pub(super) struct View {
    pub(super) progress: Progress,
    pub(super) response: Bytes,
    /// Held as long as that is.
    share: Share,
}

impl View {
    /// What more is read for it.
    pub(super) fn share(&mut self) -> &mut Share {
        &mut self.share
    }

    /// What is sent, which is counted until it is.
    pub(super) fn body(self) -> Bytes {
        struct Held {
            response: Bytes,
            _share: Share,
        }
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                &self.response
            }
        }
        Bytes::from_owner(Held { response: self.response, _share: self.share })
    }
}

impl<'a> Asker<'a> {
    /// `None`: nothing is kept here.
    pub(super) fn of(app: &'a App, request: &Request) -> Option<Self> {
        let caller = request.extensions().get::<Caller>().copied().unwrap_or_default();
        let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
        app.responses.as_ref().map(|store| Self { app, store, caller, peer })
    }

    /// A response, if it is there for who asks.
    pub(super) async fn view(&self, id: ResponseId) -> Result<Option<View>, Failure> {
        let mut share = self.app.bodies.take(self.peer, 0, BODY_BUDGET_WAIT).await?;
        let Some(mut response) = self.response(id, &mut share).await? else { return Ok(None) };
        let is_open = |response: &Bytes| progress(id, response).map(|progress| !progress.status.is_final());
        if is_open(&response)? && !self.is_leased(id, &mut share).await? {
            // It may have ended meanwhile, and its lease with it.
            let Some(now) = self.response(id, &mut share).await? else { return Ok(None) };
            response = now;
            if is_open(&response)? {
                response = abandoned(&response).map_err(|error| broken(id, &error))?.into();
            }
        }
        Ok(Some(View { progress: progress(id, &response)?, response, share }))
    }

    /// What its client was told, if that is who asks.
    async fn response(&self, id: ResponseId, share: &mut Share) -> Result<Option<Bytes>, Failure> {
        let Some(object) = self.read(id, Part::Response, share).await? else { return Ok(None) };
        let end = object.iter().position(|&byte| byte == b'\n').unwrap_or(object.len());
        let head: Head = serde_json::from_slice(&object[..end]).map_err(|error| broken(id, &error))?;
        let is_theirs = head.owner == self.caller.owner_of(&id.digits()) && head.expires_at > unix_seconds();
        Ok(is_theirs.then(|| object.slice((end + 1).min(object.len())..)))
    }

    /// The items that a response answers, if they are there.
    pub(super) async fn input(&self, id: ResponseId, share: &mut Share) -> Result<Option<Vec<Value>>, Failure> {
        let Some(input) = self.read(id, Part::Input, share).await? else { return Ok(None) };
        serde_json::from_slice(&input).map(Some).map_err(|error| broken(id, &error))
    }

    /// Those of these responses that are there for who asks. `share`: of the request, which has them from now on.
    pub(super) async fn all(
        &self,
        ids: impl IntoIterator<Item = &ResponseId>,
        share: &mut Share,
    ) -> Result<StoredResponses, Failure> {
        let mut all = StoredResponses::new();
        for &id in ids {
            let Some(view) = self.view(id).await? else { continue };
            share.grow(view.response.len(), BODY_BUDGET_WAIT).await?;
            let Some(input) = self.input(id, share).await? else { continue };
            let response = serde_json::from_slice(&view.response).map_err(|error| broken(id, &error))?;
            all.insert(id, StoredResponse { input, response });
        }
        Ok(all)
    }

    /// Has a response that is not done end, and waits for that; how it ended, or how far it is where that takes too long.
    pub(super) async fn cancel(&self, id: ResponseId, mut view: View) -> Result<Option<View>, Failure> {
        if view.progress.status.is_final() {
            return Ok(Some(view));
        }
        self.store.put(id, Part::Cancel, Bytes::new()).await.map_err(unavailable)?;
        let deadline = Instant::now() + CANCEL_LIMIT;
        while !view.progress.status.is_final() && Instant::now() < deadline {
            sleep(CANCEL_LOOK_PERIOD).await;
            match self.view(id).await? {
                Some(now) => view = now,
                None => return Ok(None),
            }
        }
        Ok(Some(view))
    }

    /// Deletes all that is kept of a response.
    pub(super) async fn delete(&self, id: ResponseId) -> Result<(), Failure> {
        self.store.delete(id, &Part::ALL).await.map_err(unavailable)
    }

    /// What keeps a new response for who asks.
    pub(super) fn keep(&self, id: ResponseId, input: Vec<u8>) -> Keep {
        let owner = self.caller.owner_of(&id.digits());
        Keep { store: Arc::clone(self.store), id, owner, input: input.into(), is_kept: false }
    }

    async fn is_leased(&self, id: ResponseId, share: &mut Share) -> Result<bool, Failure> {
        let until = self.read(id, Part::Lease, share).await?;
        let until = until.and_then(|until| std::str::from_utf8(&until).ok()?.parse::<u64>().ok());
        Ok(until.is_some_and(|until| until > unix_seconds()))
    }

    async fn read(&self, id: ResponseId, part: Part, share: &mut Share) -> Result<Option<Bytes>, Failure> {
        let Some(found) = self.store.find(id, part).await.map_err(unavailable)? else { return Ok(None) };
        share.grow(found.bytes(), BODY_BUDGET_WAIT).await?;
        found.read().await.map(Some).map_err(unavailable)
    }
}

fn progress(id: ResponseId, response: &[u8]) -> Result<Progress, Failure> {
    Progress::read(response).map_err(|error| broken(id, &error))
}

/// What is kept is not what was written.
fn broken(id: ResponseId, error: &serde_json::Error) -> Failure {
    Failure::internal(&format!("the stored response {id} cannot be read: {error}"))
}

/// The store cannot be used now.
fn unavailable(error: StoreError) -> Failure {
    tracing::warn!(%error, "a stored response cannot be read or written");
    Failure::store_unavailable()
}

/// Keeps one response. Dropped before it is kept, it leaves nothing of it behind.
pub(super) struct Keep {
    store: Arc<ResponseStore>,
    id: ResponseId,
    owner: Option<String>,
    input: Bytes,
    is_kept: bool,
}

impl Keep {
    pub(super) fn id(&self) -> ResponseId {
        self.id
    }

    /// Keeps what it answers.
    pub(super) async fn input(&mut self) -> Result<(), Failure> {
        let input = std::mem::take(&mut self.input);
        self.store.put(self.id, Part::Input, input).await.map_err(unavailable)
    }

    /// Keeps what its client is told.
    pub(super) async fn response(&mut self, response: &[u8]) -> Result<(), Failure> {
        let expires_at = unix_seconds().saturating_add(self.store.time_to_live().as_secs());
        let head = Head { owner: self.owner.clone(), expires_at };
        let mut object = serde_json::to_vec(&head).map_err(|error| Failure::internal(&error))?;
        object.push(b'\n');
        object.extend_from_slice(response);
        self.store.put(self.id, Part::Response, object.into()).await.map_err(unavailable)?;
        self.is_kept = true;
        Ok(())
    }

    /// The same, for one that its client is told in any case.
    pub(super) async fn try_response(&mut self, response: &[u8]) {
        if self.response(response).await.is_err() {
            tracing::warn!(response = %self.id, "a response is not stored, though its client asked for it");
        }
    }

    /// Says that it is being answered.
    pub(super) async fn lease(&self) -> Result<Lease, Failure> {
        let since = unix_seconds();
        let until = since + BACKGROUND_LEASE.as_secs();
        self.store.put(self.id, Part::Lease, until.to_string().into()).await.map_err(unavailable)?;
        Ok(Lease { since, until })
    }

    /// Whether somebody wants it to end.
    pub(super) async fn is_unwanted(&self) -> Result<bool, Failure> {
        self.store.find(self.id, Part::Cancel).await.map(|mark| mark.is_some()).map_err(unavailable)
    }

    /// It is done: nobody looks for its lease and its mark any more.
    pub(super) async fn ended(&self) {
        if let Err(error) = self.store.delete(self.id, &[Part::Lease, Part::Cancel]).await {
            tracing::warn!(%error, "the lease of a stored response cannot be deleted; it is once it has expired");
        }
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let (store, id) = (Arc::clone(&self.store), self.id);
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = store.delete(id, &Part::ALL).await {
                    tracing::warn!(%error, "the input of a response that was not answered stays until it has expired");
                }
            });
        }
    }
}

/// Until when a response is taken to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    since: u64,
    until: u64,
}

impl Lease {
    /// How long ago it was renewed.
    pub(super) fn age(self) -> Duration {
        Duration::from_secs(unix_seconds().saturating_sub(self.since))
    }

    /// Whether nobody says for so long that the response has failed.
    pub(super) fn lasts(self, time: Duration) -> bool {
        unix_seconds() + time.as_secs() < self.until
    }
}
