//! One request's answer as it comes, a stream of events, or a pooled one's, which comes whole; both cancel their request
//! when they are dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use gantry_core::AnswerOutput;
use gantry_engine::{FinishReason, GenerationEvent, PooledOutput, RequestError, Timings, Usage};
use tokio::sync::oneshot;

use super::channel::{EventReceiver, Slowness};
use super::desk::Lanes;
use super::request::Request;
use super::supervisor::Command;
use crate::protocol::RequestId;

/// A generation ended without an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    /// The worker could not serve it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The worker died with the request in its hands, and it could not be given to another one.
    #[error("the model worker died: {0}")]
    WorkerDied(String),
    /// A worker died of it, twice.
    #[error(
        "the model's process died while it worked on this request, and again when it ran it with no other beside it: what it \
         asks is refused for the next {} min; change the request, and report what it is if you can",
        crate::limits::SUSPECT_MEMORY.as_secs() / 60
    )]
    EndsWorker,
    /// The version was retired and its time to drain ran out.
    #[error("the answer was cut off before its end: its model was taken out of service")]
    Retired,
    /// The version makes room for another one, and nothing of an answer was sent: whoever has the request may submit it to that.
    #[error("the model was taken out of service before it had begun with the answer")]
    GaveWay,
    /// The server ends, and did not wait for the request any longer.
    #[error("the answer was cut off before its end: the server was told to end, and waits no longer")]
    ServerEnds,
    /// The client takes less than waits for it.
    #[error(
        "the client reads too slowly: {0}; read the stream as it comes, or ask for less of it: fewer `top_logprobs`, a smaller \
         `n` or `max_tokens`"
    )]
    SlowClient(Slowness),
}

/// What a request's supervisor sends.
pub(super) type Item = Result<GenerationEvent, GenerationError>;

/// The events of one request: `Started`, any number of `Text`, then `Finished` or an error, and nothing after.
/// `Failed` never comes as an event; it is an error here. When its worker dies before the first `Text`, the request is
/// run again, and nothing of that is seen here; one that is [whole](Version::submit_all) is run again whenever it dies, which
/// another `Started` tells. Dropping it cancels the request.
pub struct Generation {
    events: EventReceiver,
    claim: Claim,
    /// Whether it may end with [`GenerationError::GaveWay`].
    returns: Arc<AtomicBool>,
}

/// What cancels a request when it is dropped before the request has ended.
struct Claim {
    id: RequestId,
    lanes: Arc<Lanes>,
    /// The worker that has the request.
    worker: Arc<AtomicUsize>,
    ended: bool,
}

impl Claim {
    /// Tells the supervisor that has the request.
    fn tell(&self, command: impl FnOnce(RequestId) -> Command) {
        if let Some(supervisor) = self.lanes.supervisors.get(self.worker.load(Ordering::SeqCst)) {
            // Where nobody listens, the request has ended with its supervisor.
            let _ = supervisor.send(command(self.id));
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.ended {
            self.tell(|id| Command::Cancel { id });
        }
    }
}

/// A pooled request's answer to come. Dropping it cancels the request.
pub struct Pooled {
    reply: oneshot::Receiver<Result<PooledOutput, GenerationError>>,
    claim: Claim,
}

impl Pooled {
    pub(super) fn new(
        id: RequestId,
        reply: oneshot::Receiver<Result<PooledOutput, GenerationError>>,
        lanes: Arc<Lanes>,
        worker: Arc<AtomicUsize>,
    ) -> Self {
        Self { reply, claim: Claim { id, lanes, worker, ended: false } }
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// The request ended without one.
    pub async fn output(mut self) -> Result<PooledOutput, GenerationError> {
        let answer = (&mut self.reply).await;
        self.claim.ended = true;
        answer.unwrap_or_else(|_| Err(GenerationError::WorkerDied("its supervisor ended".to_owned())))
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        // First, so that a worker which gets the request only now, after the look at who has it, sees it.
        self.reply.close();
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// What it says and does.
    pub output: AnswerOutput,
    /// Why it ended.
    pub reason: FinishReason,
    /// Its tokens.
    pub usage: Usage,
    /// Where its time went.
    pub timings: Timings,
}

impl Generation {
    pub(super) fn new(id: RequestId, events: EventReceiver, lanes: Arc<Lanes>, request: &Request) -> Self {
        let claim = Claim { id, lanes, worker: request.worker(), ended: false };
        Self { events, claim, returns: request.returns() }
    }

    /// From now on its client knows by whom it is answered: it is not given back any more. False: it could not be, or has been.
    pub fn stays(&self) -> bool {
        self.returns.swap(false, Ordering::SeqCst)
    }

    /// Waits for the whole answer.
    ///
    /// # Errors
    /// The generation ended without one.
    pub async fn collect(mut self) -> Result<Completion, GenerationError> {
        let mut output = AnswerOutput::default();
        while let Some(event) = self.next().await {
            match event? {
                GenerationEvent::Finished { reason, usage, timings, .. } => {
                    return Ok(Completion { output, reason, usage, timings });
                }
                GenerationEvent::Failed(error) => return Err(error.into()),
                event => output.push(event),
            }
        }
        Err(GenerationError::WorkerDied("its supervisor ended".to_owned()))
    }
}

impl Stream for Generation {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
        if self.claim.ended {
            return Poll::Ready(None);
        }
        let Poll::Ready((item, resumes)) = self.events.poll_recv(context) else { return Poll::Pending };
        self.claim.ended = !matches!(&item, Some(Ok(event)) if !event.is_terminal());
        if resumes && !self.claim.ended {
            self.claim.tell(|id| Command::Resume { id });
        }
        Poll::Ready(item)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // First, so that a worker which gets the request only now, after the look at who has it, sees it.
        self.events.close();
    }
}
