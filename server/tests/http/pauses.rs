//! A worker by itself, over the protocol that its front speaks: requests that are paused and go on.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use gantry_engine::{EngineConfig, FinishReason, GenerationEvent, GenerationParams, Prompt, Usage};
use gantry_server::protocol::{self, FromWorker, Heartbeat, ProtocolError, RequestId, Sender, ToWorker};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::time::timeout;

use crate::server::{PATIENCE, unending_model};

/// Tokens of an answer.
const TOKENS: u32 = 400;
/// Of one that is paused after a few: minutes of work, so that it has not ended when the worker hears of that.
const LONG_TOKENS: u32 = 16_000;

/// Started as a front does it, and killed when dropped.
struct Worker {
    child: std::process::Child,
    tell: Sender,
    told: Box<dyn Stream<Item = Result<FromWorker, ProtocolError>> + Unpin>,
    _model: tempfile::TempDir,
}

/// What a request had said when it ended.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    text: String,
    deltas: usize,
    end: Option<(FinishReason, Usage)>,
}

impl Answer {
    fn take(&mut self, event: GenerationEvent) {
        assert!(self.end.is_none(), "nothing follows the end: {event:?}");
        match event {
            GenerationEvent::Text { text, .. } => {
                self.text.push_str(&text);
                self.deltas += 1;
            }
            GenerationEvent::Finished { reason, usage, .. } => self.end = Some((reason, usage)),
            GenerationEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

impl Worker {
    /// One sequence of the model whose texts do not end.
    async fn start() -> Self {
        let (folder, file) = unending_model();
        let (near, far) = StdUnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
        command.arg("worker").stdin(Stdio::from(OwnedFd::from(far))).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        drop(command);
        let (read, write) = UnixStream::from_std(near).unwrap().into_split();
        let told = Box::new(protocol::receiver::<FromWorker>(read as OwnedReadHalf));
        let mut worker = Self { child, tell: Sender::new(write), told, _model: folder };
        let config =
            EngineConfig { ctx_size: LONG_TOKENS + 1_024, parallel: 1, threads: Some(1), ..EngineConfig::new(file) };
        worker.tell.send(&ToWorker::Load { config, stamps: Vec::new() }).await.unwrap();
        while !matches!(worker.next().await, FromWorker::Ready(_)) {}
        worker
    }

    async fn next(&mut self) -> FromWorker {
        timeout(PATIENCE, self.told.next()).await.unwrap().unwrap().unwrap()
    }

    async fn submit(&mut self, id: RequestId, tokens: u32) {
        let prompt = Arc::new(Prompt::Text(String::from("Once upon a time")));
        let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(tokens) };
        self.tell.send(&ToWorker::Submit { id, prompt, params }).await.unwrap();
    }

    /// What a request says until it has ended, or has sent so many parts; nothing may come of another one.
    async fn hear(&mut self, id: RequestId, answer: &mut Answer, most: usize) {
        while answer.end.is_none() && answer.deltas < most {
            match self.next().await {
                FromWorker::Events(events) => {
                    for (of, event) in events {
                        assert_eq!(of, id, "{event:?}");
                        answer.take(event);
                    }
                }
                FromWorker::Heartbeat(_) => {}
                message => panic!("{message:?}"),
            }
        }
    }

    /// Waits for figures of which this is so; what a request says meanwhile, it said before.
    async fn until(&mut self, id: RequestId, answer: &mut Answer, is_so: impl Fn(&Heartbeat) -> bool) {
        loop {
            match self.next().await {
                FromWorker::Heartbeat(beat) if is_so(&beat) => return,
                FromWorker::Heartbeat(_) => {}
                FromWorker::Events(events) => {
                    for (of, event) in events {
                        assert_eq!(of, id, "{event:?}");
                        answer.take(event);
                    }
                }
                message => panic!("{message:?}"),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_worker_pauses_a_request_and_goes_on_with_it_where_it_was() {
    let mut worker = Worker::start().await;
    let mut whole = Answer::default();
    worker.submit(1, TOKENS).await;
    worker.hear(1, &mut whole, usize::MAX).await;
    let (reason, usage) = whole.end.unwrap();
    assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, TOKENS));
    // Who has ended, or never was, is none to pause.
    for id in [1, 99] {
        worker.tell.send(&ToWorker::Pause { id }).await.unwrap();
        worker.tell.send(&ToWorker::Resume { id }).await.unwrap();
    }
    let mut paused = Answer::default();
    worker.submit(2, LONG_TOKENS).await;
    worker.hear(2, &mut paused, 20).await;
    for _ in 0..2 {
        worker.tell.send(&ToWorker::Pause { id: 2 }).await.unwrap();
    }
    worker.until(2, &mut paused, |beat| beat.engine.paused == 1).await;
    assert!(paused.end.is_none(), "it has most of its work before it");
    // The only slot is another one's, and nothing comes of the first meanwhile.
    let mut other = Answer::default();
    worker.submit(3, 40).await;
    worker.hear(3, &mut other, usize::MAX).await;
    assert_eq!(other.end.as_ref().unwrap().1.completion_tokens, 40);
    assert!(whole.text.starts_with(&other.text));
    let idle = |beat: &Heartbeat| beat.engine.slots_active == 0 && beat.engine.paused == 1 && beat.engine.queued == 0;
    worker.until(0, &mut Answer::default(), idle).await;
    for _ in 0..2 {
        worker.tell.send(&ToWorker::Resume { id: 2 }).await.unwrap();
    }
    // It says what it would have said without, and then it has shown that.
    while paused.text.len() < whole.text.len() {
        let one_more = paused.deltas + 1;
        worker.hear(2, &mut paused, one_more).await;
    }
    assert!(paused.text.starts_with(&whole.text), "{}\n{}", paused.text, whole.text);
    worker.tell.send(&ToWorker::Cancel { id: 2 }).await.unwrap();
    worker.hear(2, &mut paused, usize::MAX).await;
    let (reason, usage) = paused.end.unwrap();
    assert_eq!(reason, FinishReason::Cancelled);
    assert!((TOKENS..LONG_TOKENS).contains(&usage.completion_tokens), "{usage:?}");
    let counted = |beat: &Heartbeat| beat.engine.paused == 0 && beat.engine.pauses_total == 1;
    worker.until(0, &mut Answer::default(), counted).await;
}

#[tokio::test]
async fn a_paused_request_ends_when_it_is_cancelled_and_with_its_front() {
    let mut worker = Worker::start().await;
    let mut paused = Answer::default();
    // One in its slot, and one that was paused before it had any.
    worker.submit(1, LONG_TOKENS).await;
    worker.hear(1, &mut paused, 5).await;
    worker.tell.send(&ToWorker::Pause { id: 1 }).await.unwrap();
    worker.until(1, &mut paused, |beat| beat.engine.paused == 1).await;
    worker.submit(2, TOKENS).await;
    worker.tell.send(&ToWorker::Pause { id: 2 }).await.unwrap();
    let mut second = Answer::default();
    worker.until(2, &mut second, |beat| beat.engine.paused == 2).await;
    worker.tell.send(&ToWorker::Cancel { id: 1 }).await.unwrap();
    worker.hear(1, &mut paused, usize::MAX).await;
    assert_eq!(paused.end.unwrap().0, FinishReason::Cancelled);
    let Worker { child, .. } = &mut worker;
    assert!(child.try_wait().unwrap().is_none());
    // The second one is paused still, and holds up nothing.
    worker.tell = Sender::new(UnixStream::pair().unwrap().0.into_split().1);
    worker.told = Box::new(futures::stream::pending());
    let ended = async {
        while worker.child.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, ended).await.unwrap();
}
