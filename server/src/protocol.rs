//! What the front and a worker say to each other: typed messages in length-delimited postcard frames over a Unix
//! socket whose other end is the worker's standard input.
//!
//! The front opens with [`ToWorker::Load`]; the worker answers with progress, then [`FromWorker::Ready`] or
//! [`FromWorker::LoadFailed`]. From then on the front submits, pauses, resumes and cancels, the worker sends events and a
//! heartbeat. A closed socket means that the other side is gone; there is no goodbye. Both ends are one binary, so there
//! is no version negotiation.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{SinkExt, Stream, StreamExt};
use gantry_core::{GenerationEvent, GenerationParams, PooledEvent, PooledWork, Priority, Prompt, SubmitError, Turn};
use gantry_engine::{EngineConfig, EngineStats, LoadError, ModelInfo, PooledStats, ProbeError};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use crate::fetch::FileStamp;
use crate::limits::MAX_FRAME_BYTES;

/// Names one request on one version; never used twice.
pub type RequestId = u64;

/// From the front.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// Load this; the first message, and sent once.
    Load {
        /// The model, and how to run it.
        config: EngineConfig,
        /// Files that must be as they were when they were checked, once it is loaded.
        stamps: Vec<FileStamp>,
    },
    /// Generate.
    Submit {
        /// Chosen by the front.
        id: RequestId,
        /// From what; the front keeps it until there is text, and sends it for each of several answers.
        #[serde(with = "shared")]
        prompt: Arc<Prompt>,
        /// How; already validated.
        params: GenerationParams,
    },
    /// Embed or score.
    Pool {
        /// Chosen by the front.
        id: RequestId,
        /// What.
        work: PooledWork,
        /// Who goes first.
        priority: Priority,
        /// Whose it is, and its turn among those of the same priority.
        turn: Turn,
        /// The most milliseconds until all of it is there.
        timeout_ms: Option<u64>,
    },
    /// Stop working on it; the request still ends with its own last event.
    Cancel {
        /// Which.
        id: RequestId,
    },
    /// Give its slot to others from the next step on; it stays in the worker's hands, and what was computed by then still
    /// comes. It may have ended meanwhile, or be paused already: then nothing happens. What is pooled cannot be paused.
    Pause {
        /// Which.
        id: RequestId,
    },
    /// Go on with one that is paused, with the tokens that it would have had; it waits for a slot before what was submitted
    /// after it, unless it has been paused many times.
    Resume {
        /// Which.
        id: RequestId,
    },
    /// Say whether a token can be decoded now.
    Probe,
    /// Compute with no more threads than these from the next computation on; at any time.
    Threads(u32),
}

/// From a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromWorker {
    /// The share of the model that is read, 0 to 1.
    Loading(f32),
    /// The model cannot be loaded; the worker ends after this.
    LoadFailed {
        /// What went wrong and what to do.
        message: String,
        /// What it is about.
        fault: LoadFault,
    },
    /// The model is loaded and has decoded.
    Ready(Box<ModelInfo>),
    /// What requests emitted, in each request's order.
    Events(Vec<(RequestId, GenerationEvent)>),
    /// What a pooled request emitted, in its order.
    Pooled {
        /// Which.
        id: RequestId,
        /// What.
        event: PooledEvent,
    },
    /// The request was not accepted; nothing else follows for it.
    Refused {
        /// Which.
        id: RequestId,
        /// Why.
        error: SubmitError,
    },
    /// The answer to [`ToWorker::Probe`].
    Probed(Result<(), ProbeError>),
    /// Sent once per [`HEARTBEAT_PERIOD`](crate::limits::HEARTBEAT_PERIOD), loading or not.
    Heartbeat(Box<Heartbeat>),
}

/// What a load that failed is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadFault {
    /// The model's file, or how it is to be run.
    Model,
    /// Its chat template, or the one that was given in its place.
    Template,
    /// What it computes, which are no numbers.
    Numbers,
    /// It loads, and could answer nobody.
    Useless,
    /// It is not the model's fault: there is no backend to run it as asked.
    Backend,
}

impl From<&LoadError> for LoadFault {
    fn from(error: &LoadError) -> Self {
        match error {
            LoadError::Backend(_) => Self::Backend,
            LoadError::Template(_) | LoadError::GivenTemplate(_) => Self::Template,
            LoadError::NotFinite { .. } => Self::Numbers,
            LoadError::Useless { .. } => Self::Useless,
            _ => Self::Model,
        }
    }
}

/// What is shared is sent as what it is.
mod shared {
    use super::{Arc, Deserialize, Deserializer, Prompt, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(prompt: &Prompt, serializer: S) -> Result<S::Ok, S::Error> {
        prompt.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Prompt>, D::Error> {
        Prompt::deserialize(deserializer).map(Arc::new)
    }
}

/// A worker's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The engine's counters; zeros while it loads, and but for memory where it only embeds.
    pub engine: EngineStats,
    /// The embedder's; zeros where there is none.
    pub pooled: PooledStats,
    /// Memory of the process that is in RAM.
    pub rss_bytes: u64,
    /// The part of it that is pages of files, which processes that map the same file share.
    pub rss_file_bytes: u64,
}

/// The talk cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// The socket failed, or a frame was over its limit.
    #[error("the worker's socket failed: {0}")]
    Io(#[from] std::io::Error),
    /// A message could not be read or written.
    #[error("a message of the worker's protocol is malformed: {0}")]
    Codec(#[from] postcard::Error),
}

fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().max_frame_length(MAX_FRAME_BYTES).new_codec()
}

/// Reads messages of one type.
pub fn receiver<T: DeserializeOwned>(half: OwnedReadHalf) -> impl Stream<Item = Result<T, ProtocolError>> + Unpin {
    FramedRead::new(half, codec()).map(|frame| decode(&frame?))
}

/// Writes messages.
pub struct Sender(FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>);

impl Sender {
    /// Writes to this socket.
    #[must_use]
    pub fn new(half: OwnedWriteHalf) -> Self {
        Self(FramedWrite::new(half, codec()))
    }

    /// Writes one message and waits until the socket has taken it.
    ///
    /// # Errors
    /// The other side is gone, or the message is over [`MAX_FRAME_BYTES`].
    pub async fn send<T: Serialize>(&mut self, message: &T) -> Result<(), ProtocolError> {
        Ok(self.0.send(encode(message)?).await?)
    }
}

fn decode<T: DeserializeOwned>(frame: &BytesMut) -> Result<T, ProtocolError> {
    Ok(postcard::from_bytes(frame)?)
}

fn encode<T: Serialize>(message: &T) -> Result<Bytes, ProtocolError> {
    Ok(postcard::to_stdvec(message)?.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use gantry_core::TextInput;
    use proptest::prelude::*;
    use tokio::net::UnixStream;

    fn message() -> impl Strategy<Value = ToWorker> {
        let submit = (any::<u64>(), ".{0,200}", any::<Option<u32>>(), any::<Option<u64>>()).prop_map(
            |(id, text, max_tokens, seed)| ToWorker::Submit {
                id,
                prompt: Arc::new(Prompt::Text(text)),
                params: GenerationParams { max_tokens, seed, ..GenerationParams::default() },
            },
        );
        let inputs = proptest::collection::vec(
            prop_oneof![
                ".{0,40}".prop_map(TextInput::Text),
                proptest::collection::vec(any::<i32>(), 0..9).prop_map(TextInput::Tokens)
            ],
            0..5,
        );
        let work = prop_oneof![
            inputs.prop_map(PooledWork::Embed),
            (proptest::collection::vec(".{0,40}", 1..3), proptest::collection::vec(".{0,40}", 0..5))
                .prop_map(|(queries, documents)| PooledWork::Rank { queries, documents }),
        ];
        let priority = prop_oneof![Just(Priority::Low), Just(Priority::Normal), Just(Priority::High)];
        let pool = (any::<u64>(), work, priority, any::<Option<u64>>()).prop_map(|(id, work, priority, timeout_ms)| {
            let turn = Turn { client: id, start_tag: id / 2 };
            ToWorker::Pool { id, work, priority, turn, timeout_ms }
        });
        let of_one = (any::<u64>(), 0..3).prop_map(|(id, what)| match what {
            0 => ToWorker::Cancel { id },
            1 => ToWorker::Pause { id },
            _ => ToWorker::Resume { id },
        });
        prop_oneof![submit, pool, of_one, Just(ToWorker::Probe), any::<u32>().prop_map(ToWorker::Threads)]
    }

    proptest! {
        #[test]
        fn messages_survive_the_socket(messages in proptest::collection::vec(message(), 1..8)) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let (near, far) = UnixStream::pair().unwrap();
                let (_keep, write) = near.into_split();
                let (read, _keep) = far.into_split();
                let (mut tx, mut rx) = (Sender::new(write), receiver::<ToWorker>(read));
                for message in &messages {
                    tx.send(message).await.unwrap();
                    prop_assert_eq!(&rx.next().await.unwrap().unwrap(), message);
                }
                drop(tx);
                prop_assert!(rx.next().await.is_none());
                Ok(())
            })?;
        }

        #[test]
        fn garbage_is_an_error_not_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<ToWorker>(&BytesMut::from(&bytes[..]));
            let _ = decode::<FromWorker>(&BytesMut::from(&bytes[..]));
        }
    }

    #[tokio::test]
    async fn an_oversized_frame_is_refused_by_its_header() {
        let (near, far) = UnixStream::pair().unwrap();
        let (read, _keep) = far.into_split();
        let header = u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_be_bytes();
        near.try_write(&header).unwrap();
        assert!(receiver::<ToWorker>(read).next().await.unwrap().is_err());
    }
}
