//! The worker process: one engine, driven by the front through the socket on standard input.
//!
//! The engine loads on a thread of its own while this one reports progress. Then messages are applied as they come,
//! none of which blocks, and everything that requests emit goes out in batches: one frame holds what has gathered
//! while the last one was written, a step's tokens at least. The process ends when its socket closes. SIGTERM it leaves
//! to the front: sent to all processes of a service, it would cut the streams that the front lets end.
//! Absent: admission, versions, HTTP; the front has them.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use anyhow::{Context as _, anyhow};
use futures::{Stream, StreamExt};
use gantry_engine::{
    Activity, ActivitySink, EngineConfig, GenerationEvent, LoadError, ModelHost, ParamError, PooledEvent, PooledHandle,
    ProbeError, Prompt, RequestHandle, SubmitError, ThreadLimit,
};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

use crate::fetch::FileStamp;
use crate::front::FrontLimits;
use crate::gates::memory;
use crate::journal::{Entry, Notes};
use crate::limits::{
    EVENT_FRAME_BYTES, HEARTBEAT_PERIOD, MAX_EVENTS_PER_FRAME, MAX_WORKER_EVENT_BACKLOG, PROBE_LIMIT, WORKER_EXIT_LIMIT,
};
use crate::output::allocated_by;
use crate::protocol::{self, FromWorker, Heartbeat, LoadFault, ProtocolError, RequestId, ToWorker};

mod faults;

use faults::{Faults, Moment};

/// Messages, other than events, that may wait for the socket.
const CONTROL_BACKLOG: usize = 1024;
/// What a process starts to be what it is itself.
const THIS_PROGRAM: &str = "/proc/self/exe";
/// Vectors that may wait for the socket; the embedder waits for a place.
const POOLED_BACKLOG: usize = 64;

/// Runs until the front is gone. `backend_dir`: where ggml's backends are, if anywhere.
///
/// # Errors
/// Standard input is not the front's socket, or the front breaks the protocol.
pub async fn run(backend_dir: Option<PathBuf>) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("cannot duplicate standard input")?;
    let socket = StdUnixStream::from(socket);
    socket.set_nonblocking(true)?;
    let socket = UnixStream::from_std(socket)
        .context("standard input is no socket: `gantry-server worker` is started by the server itself")?;
    let (read, write) = socket.into_split();
    let mut incoming = protocol::receiver::<ToWorker>(read);
    let (events, event_queue) = mpsc::channel(MAX_WORKER_EVENT_BACKLOG);
    let (control, control_queue) = mpsc::channel(CONTROL_BACKLOG);
    let (pooled, pooled_queue) = mpsc::channel(POOLED_BACKLOG);
    let faults = Arc::new(Faults::from_env());
    tokio::spawn(write_all(write, event_queue, pooled_queue, control_queue, Arc::clone(&faults)));

    let notes = Arc::new(Notes::take_stdout().context("cannot take standard output")?);

    let Some(first) = incoming.next().await else { return Ok(()) };
    let ToWorker::Load { config, stamps } = first? else {
        return Err(anyhow!("the front did not begin with a model to load"));
    };
    let limit = Arc::<ThreadLimit>::default();
    let load = load(backend_dir, config, stamps, Arc::clone(&limit), Outbox { control, events, pooled });
    tokio::pin!(load);
    let worker = loop {
        tokio::select! {
            worker = &mut load => break worker?,
            // Little comes before the model is ready, and the end.
            message = incoming.next() => match message {
                None => return Ok(()),
                Some(message) => match message? {
                    ToWorker::Threads(threads) => limit.set(threads),
                    // Not the message itself: it may be somebody's prompt.
                    _ => return Err(anyhow!("the front spoke before the model was ready")),
                },
            },
        }
    };
    let Some((host, outbox)) = worker else { return Ok(()) };
    Worker { host: Arc::new(host), limit, outbox, notes, faults, handles: HashMap::new(), prompt: Weak::new() }
        .serve(incoming)
        .await
}

/// Loads the engine; `None` when it cannot be loaded and the front has been told.
async fn load(
    backend_dir: Option<PathBuf>,
    mut config: EngineConfig,
    stamps: Vec<FileStamp>,
    limit: Arc<ThreadLimit>,
    outbox: Outbox,
) -> anyhow::Result<Option<(ModelHost, Outbox)>> {
    // Also where the file that this program was started from is another one by now.
    config.template_program = Some(PathBuf::from(THIS_PROGRAM));
    config.template_bytes = Some(FrontLimits::within(memory::read().map(|memory| memory.limit_bytes)).template_bytes);
    let (done, mut loaded) = oneshot::channel();
    let control = outbox.control.clone();
    let progress = control.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = StopOnDrop(Arc::clone(&stop));
    let threads = Arc::clone(&limit);
    let mut last_percent = 0;
    std::thread::Builder::new().name("load".to_owned()).spawn(move || {
        let load = || {
            load_backends(backend_dir.as_deref())?;
            ModelHost::load(&config, &threads, move |share| {
                let percent = (share * 100.0) as u8;
                if percent > last_percent {
                    last_percent = percent;
                    // A full queue drops a figure that the next one replaces.
                    let _ = progress.try_send(FromWorker::Loading(share));
                }
                !stop.load(Ordering::Relaxed)
            })
        };
        let of_model = |told| (told, LoadFault::Model);
        let found: Result<Vec<_>, _> = stamps.iter().map(FileStamp::again).collect();
        let host = found.map_err(of_model).and_then(|found| {
            let host = load().map_err(|error| (error.to_string(), LoadFault::from(&error)))?;
            // What was read of a file that is the same afterwards is what was checked.
            match found.iter().find(|file| !file.is_unchanged()) {
                Some(file) => Err(of_model(file.has_changed())),
                None => Ok(host),
            }
        });
        // Nobody listens when the front has gone, and the process ends.
        let _ = done.send(host);
    })?;
    let mut beat = tokio::time::interval(HEARTBEAT_PERIOD);
    let host = loop {
        tokio::select! {
            host = &mut loaded => break host.context("the loading thread panicked")?,
            _ = beat.tick() => {
                control.send(FromWorker::Heartbeat(Box::new(heartbeat(None)))).await?;
            }
        }
    };
    drop(stopped);
    match host {
        Ok(host) => {
            control.send(FromWorker::Ready(Box::new(host.model_info().clone()))).await?;
            Ok(Some((host, outbox)))
        }
        Err((message, fault)) => {
            // The front tells of it, once.
            tracing::info!(error = message, "cannot load the model");
            control.send(FromWorker::LoadFailed { message, fault }).await?;
            // The front closes the socket once it has read this; ending before would lose it.
            control.closed().await;
            Ok(None)
        }
    }
}

/// The directory's backends, before anything else of llama.cpp runs.
fn load_backends(dir: Option<&Path>) -> Result<(), LoadError> {
    match dir {
        Some(dir) => gantry_engine::load_backends(dir).map(drop).map_err(|error| LoadError::Backend(error.to_string())),
        None => Ok(()),
    }
}

/// Ends the process, whose events nobody takes any more.
fn leave<T>(error: &TrySendError<T>) -> ! {
    match error {
        TrySendError::Full(_) => tracing::error!("the front does not read its events: the worker ends"),
        // The front has hung up, as it does when it is told to end at once: there is nobody to be told.
        TrySendError::Closed(_) => tracing::debug!("the front has hung up: the worker ends"),
    }
    crate::telemetry::flush();
    std::process::exit(1);
}

struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The ways to the socket.
struct Outbox {
    control: mpsc::Sender<FromWorker>,
    events: mpsc::Sender<(RequestId, GenerationEvent)>,
    pooled: mpsc::Sender<(RequestId, PooledEvent)>,
}

/// A request in the engine's hands, or in the embedder's.
enum Handle {
    Generation(RequestHandle),
    Pooled(PooledHandle),
}

impl Handle {
    fn cancel(&self) {
        match self {
            Self::Generation(handle) => handle.cancel(),
            Self::Pooled(handle) => handle.cancel(),
        }
    }
}

struct Worker {
    host: Arc<ModelHost>,
    limit: Arc<ThreadLimit>,
    outbox: Outbox,
    notes: Arc<Notes>,
    faults: Arc<Faults>,
    handles: HashMap<RequestId, Handle>,
    /// The prompt that came last, while a request waits with it.
    prompt: Weak<Prompt>,
}

/// Has the answers that one client asks for at once share their prompt, which comes with each of them: sixteen copies of 8 MiB
/// may wait here else, of which the front has counted one.
fn shared(last: &mut Weak<Prompt>, prompt: Arc<Prompt>) -> Arc<Prompt> {
    let prompt = last.upgrade().filter(|last| *last == prompt).unwrap_or(prompt);
    *last = Arc::downgrade(&prompt);
    prompt
}

impl Worker {
    async fn serve(
        mut self,
        mut incoming: impl Stream<Item = Result<ToWorker, ProtocolError>> + Unpin,
    ) -> anyhow::Result<()> {
        let (ended, mut endings) = mpsc::unbounded_channel();
        let mut terminate = signal(SignalKind::terminate())?;
        let mut beat = tokio::time::interval(HEARTBEAT_PERIOD);
        loop {
            tokio::select! {
                message = incoming.next() => match message {
                    None => break,
                    Some(message) => self.apply(message?, &ended).await?,
                },
                Some(id) = endings.recv() => drop(self.handles.remove(&id)),
                _ = beat.tick() => {
                    self.outbox.control.send(FromWorker::Heartbeat(Box::new(heartbeat(Some(&self.host))))).await?;
                    // Whoever asks or not: what is broken is replaced.
                    if let Some(reason) = self.host.broken() {
                        self.outbox.control.send(FromWorker::Probed(Err(ProbeError::Broken(reason)))).await?;
                    }
                }
                _ = terminate.recv() => tracing::warn!("SIGTERM is for the front, which ends its workers"),
            }
        }
        self.stop().await;
        Ok(())
    }

    async fn apply(&mut self, message: ToWorker, ended: &mpsc::UnboundedSender<RequestId>) -> anyhow::Result<()> {
        match message {
            ToWorker::Load { .. } => return Err(anyhow!("a worker loads one model")),
            ToWorker::Submit { id, prompt, params } => {
                let (events, ended, entry) = (self.outbox.events.clone(), ended.clone(), Entry::new(&self.notes, id));
                let prompt = shared(&mut self.prompt, prompt);
                let fault = self.faults.of_prompt(&prompt);
                let activity = activity(&entry, fault);
                let (faults, mut has_text) = (Arc::clone(&self.faults), false);
                let sink = Box::new(move |event: GenerationEvent| {
                    if has_text {
                        faults.after_text(id, fault);
                    }
                    has_text = event.output_tokens().is_some();
                    if event.is_terminal() {
                        entry.end();
                        // The loop that keeps the handles has ended: so will the process.
                        let _ = ended.send(id);
                    }
                    if let Err(error) = events.try_send((id, event)) {
                        leave(&error);
                    }
                });
                let submitted = match &self.host.engine {
                    Some(engine) => {
                        engine.submit_observed(prompt, params, Some(activity), sink).map(Handle::Generation)
                    }
                    None => Err(not_loaded_for("prompt")),
                };
                self.keep(id, submitted).await?;
            }
            ToWorker::Pool { id, work, priority, turn, timeout_ms } => {
                let (pooled, ended, entry) = (self.outbox.pooled.clone(), ended.clone(), Entry::new(&self.notes, id));
                let activity = activity(&entry, self.faults.of_texts(&work));
                let sink = Box::new(move |event: PooledEvent| {
                    if event.is_terminal() {
                        entry.end();
                        // The loop that keeps the handles has ended: so will the process.
                        let _ = ended.send(id);
                    }
                    // On a thread of the embedder's, which waits for the socket. Without one the process ends.
                    let _ = pooled.blocking_send((id, event));
                });
                let submitted = match &self.host.embedder {
                    Some(embedder) => {
                        let activity = Some(activity);
                        embedder.submit_observed(work, priority, turn, timeout_ms, activity, sink).map(Handle::Pooled)
                    }
                    None => Err(not_loaded_for("input")),
                };
                self.keep(id, submitted).await?;
            }
            ToWorker::Cancel { id } => {
                if let Some(handle) = self.handles.get(&id) {
                    handle.cancel();
                }
            }
            ToWorker::Pause { id } => self.generation(id).into_iter().for_each(RequestHandle::pause),
            ToWorker::Resume { id } => self.generation(id).into_iter().for_each(RequestHandle::resume),
            ToWorker::Threads(threads) => self.limit.set(threads),
            ToWorker::Probe => {
                let (host, control) = (Arc::clone(&self.host), self.outbox.control.clone());
                tokio::spawn(async move {
                    let probed = tokio::task::spawn_blocking(move || host.probe(PROBE_LIMIT)).await;
                    let result = match probed {
                        Ok(result) => result.map(drop),
                        Err(error) => Err(ProbeError::Broken(error.to_string())),
                    };
                    // The process ends when the socket does.
                    let _ = control.send(FromWorker::Probed(result)).await;
                });
            }
        }
        Ok(())
    }

    /// A request in the engine's hands that has not ended.
    fn generation(&self, id: RequestId) -> Option<&RequestHandle> {
        match self.handles.get(&id)? {
            Handle::Generation(handle) => Some(handle),
            Handle::Pooled(_) => None,
        }
    }

    /// Keeps a request's handle, or tells the front why there is none.
    async fn keep(&mut self, id: RequestId, submitted: Result<Handle, SubmitError>) -> anyhow::Result<()> {
        match submitted {
            Ok(handle) => drop(self.handles.insert(id, handle)),
            Err(error) => self.outbox.control.send(FromWorker::Refused { id, error }).await?,
        }
        Ok(())
    }

    /// Ends the engine in order, and the process in any case: a step that never returns must not keep it alive.
    async fn stop(self) {
        let spawned = std::thread::Builder::new().name("exit".to_owned()).spawn(|| {
            std::thread::sleep(WORKER_EXIT_LIMIT / 2);
            std::process::exit(0);
        });
        if spawned.is_err() {
            std::process::exit(0);
        }
        // Elsewhere, while the writer goes on: the embedder may be waiting for it. A panic there is in the log.
        let _ = tokio::task::spawn_blocking(move || drop(self.host)).await;
    }
}

/// Notes whether a request is worked on.
fn activity(entry: &Arc<Entry>, fault: Option<Moment>) -> ActivitySink {
    let entry = Arc::clone(entry);
    let prepared = AtomicBool::new(false);
    Arc::new(move |activity| match activity {
        Activity::Begun => {
            entry.begin();
            let is_prepared = prepared.swap(true, Ordering::Relaxed);
            faults::at(fault, if is_prepared { Moment::Slot } else { Moment::Preparation });
        }
        Activity::Paused => entry.pause(),
    })
}

/// The front knows what a worker has been loaded for, so this is never seen.
fn not_loaded_for(param: &str) -> SubmitError {
    SubmitError::InvalidParam(ParamError {
        param: param.to_owned(),
        message: "is not what this worker does".to_owned(),
    })
}

/// Writes what requests emit, in batches, and everything else as it comes.
async fn write_all(
    half: OwnedWriteHalf,
    mut events: mpsc::Receiver<(RequestId, GenerationEvent)>,
    mut pooled: mpsc::Receiver<(RequestId, PooledEvent)>,
    mut control: mpsc::Receiver<FromWorker>,
    faults: Arc<Faults>,
) {
    let mut sender = protocol::Sender::new(half);
    let mut batch = Vec::new();
    loop {
        // Events first: a heartbeat must not overtake what it counts.
        let message = tokio::select! {
            biased;
            () = std::future::ready(()), if !batch.is_empty() => FromWorker::Events(first_frame(&mut batch)),
            n = events.recv_many(&mut batch, MAX_EVENTS_PER_FRAME), if !events.is_closed() || !events.is_empty() => {
                if n == 0 {
                    continue;
                }
                FromWorker::Events(first_frame(&mut batch))
            }
            Some((id, event)) = pooled.recv() => FromWorker::Pooled { id, event },
            message = control.recv() => match message {
                Some(message) => message,
                None => break,
            },
        };
        if let Err(error) = sender.send(&message).await {
            match error {
                ProtocolError::Io(error) if error.kind() != io::ErrorKind::InvalidInput => {
                    tracing::debug!(%error, "the front has gone");
                }
                error => tracing::error!(%error, "the front cannot be told"),
            }
            break;
        }
        faults.note_sent(&message);
    }
}

/// Takes what goes into the next frame: at least one event, and as many as stay below [`EVENT_FRAME_BYTES`].
fn first_frame(batch: &mut Vec<(RequestId, GenerationEvent)>) -> Vec<(RequestId, GenerationEvent)> {
    let mut bytes = 0;
    let mut fits = |(_, event): &(RequestId, GenerationEvent)| {
        bytes += allocated_by(event);
        bytes <= EVENT_FRAME_BYTES
    };
    let n = batch.iter().map_while(|event| fits(event).then_some(())).count().max(1);
    let rest = batch.split_off(n.min(batch.len()));
    std::mem::replace(batch, rest)
}

/// The figures of now; the memory is 0 where it cannot be read.
fn heartbeat(host: Option<&ModelHost>) -> Heartbeat {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(rest.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    Heartbeat {
        engine: host.map(ModelHost::stats).unwrap_or_default(),
        pooled: host.and_then(|host| Some(host.embedder.as_ref()?.stats())).unwrap_or_default(),
        rss_bytes: bytes("VmRSS:").unwrap_or(0),
        rss_file_bytes: bytes("RssFile:").unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use gantry_core::MAX_SHOWN_TEXT_BYTES;
    use gantry_core::ShownPrompt;

    #[test]
    fn answers_to_one_prompt_share_it_while_they_wait() {
        let prompt = |text: &str| Arc::new(Prompt::Text(text.to_owned()));
        let mut last = Weak::new();
        let first = shared(&mut last, prompt("a"));
        let second = shared(&mut last, prompt("a"));
        assert!(Arc::ptr_eq(&first, &second));
        let other = shared(&mut last, prompt("b"));
        assert_eq!(*other, Prompt::Text("b".to_owned()));
        drop(other);
        assert_eq!(last.strong_count(), 0, "nothing is kept that nobody waits with");
        assert!(!Arc::ptr_eq(&first, &shared(&mut last, prompt("a"))));
    }

    /// As many and as large as gather while a frame is written, which no frame would hold together.
    #[tokio::test]
    async fn events_that_no_frame_would_hold_together_come_in_several_and_in_their_order() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (events, queue) = mpsc::channel(100);
        let ((_pooled, pooled), (control, controls)) = (mpsc::channel(1), mpsc::channel(1));
        for id in 0..40 {
            let shown = ShownPrompt::Text("x".repeat(MAX_SHOWN_TEXT_BYTES));
            events.try_send((id, GenerationEvent::Prompt(shown))).unwrap();
            events.try_send((id, GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 })).unwrap();
        }
        drop((events, control));
        tokio::spawn(write_all(ours.into_split().1, queue, pooled, controls, Arc::new(Faults::from_env())));
        let mut told = Vec::new();
        let mut receiver = protocol::receiver::<FromWorker>(theirs.into_split().0);
        while told.len() < 80 {
            let Some(Ok(FromWorker::Events(events))) = receiver.next().await else { panic!("after {}", told.len()) };
            told.extend(events.into_iter().map(|(id, _)| id));
        }
        assert_eq!(told, (0..40).flat_map(|id| [id, id]).collect::<Vec<_>>());
    }
}
