//! The one owner of one of a version's workers: starts it, talks to it, notices when it dies or hangs, and starts
//! another.
//!
//! A [`Session`] is one worker's life. Between sessions the [`restart`](super::restart) policy says how long to wait.
//! Every request that the supervisor takes over gets exactly one last event from it, or goes to the waiting room whole. It
//! tells the dispatcher whether the worker may get requests: while it is ready, was heard of lately and passed its last
//! probe. Absent: which worker gets a request.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use self::session::Session;
use super::desk::send_to_room;
use super::generation::GenerationError;
use super::process::{Process, WorkerConfig};
use super::request::{Flow, Request};
use super::restart::{Crashes, Verdict};
use super::shared::{Shared, Worker};
use super::suspects::Fate;
use super::threads::Seat;
use super::trial::Watch;
use super::{LoadError, WorkerHealth};
use crate::limits::SUPERVISOR_TICK;
use crate::processors::Processors;
use crate::protocol::{self, FromWorker, Heartbeat, ProtocolError, RequestId, ToWorker};

mod session;

/// What is asked of a supervisor.
pub(super) enum Command {
    /// Serve a request that has been admitted.
    Submit(Box<Request>),
    /// Nobody waits for this request any more.
    Cancel { id: RequestId },
    /// Its client has taken enough of what waited for it.
    Resume { id: RequestId },
    /// Can a token be decoded now?
    Probe(ProbeReply),
    /// Finish what is there and stop.
    Retire { drain_timeout: Duration, done: oneshot::Sender<()> },
}

type ProbeReply = oneshot::Sender<Result<(), String>>;

/// How a worker's life ended.
enum End {
    /// As wanted: the version is retired, or nobody holds it any more.
    Stopped,
    /// The worker could not load the model; it said why.
    LoadFailed(LoadError),
    /// The worker closed its socket, or spoke nonsense.
    Gone(Option<ProtocolError>),
    /// The worker does not do its work.
    Hung(String),
}

type Requests = HashMap<RequestId, Box<Request>>;

/// A worker's life that has ended.
struct Life {
    /// `Err` is a death that was not asked for.
    ended: Result<(), LoadError>,
    /// Those that the worker still had, each with what becomes of it.
    requests: Vec<(Box<Request>, Fate)>,
    /// One of them may be why it died.
    has_suspects: bool,
}

impl Life {
    fn without_requests(ended: Result<(), LoadError>) -> Self {
        Self { ended, requests: Vec::new(), has_suspects: false }
    }
}

/// Where a supervisor hears, and whom it tells.
pub(super) struct Post {
    /// Which of the version's workers it has.
    pub(super) worker: usize,
    pub(super) inbox: mpsc::UnboundedReceiver<Command>,
    /// Takes requests that are to be given to another worker.
    pub(super) room: mpsc::UnboundedSender<Box<Request>>,
    /// Learns how the first load went.
    pub(super) first: oneshot::Sender<Result<(), LoadError>>,
    /// Says how many threads the worker has.
    pub(super) seat: Seat,
}

/// Runs a worker to its version's end; one whose first load fails ends at once.
pub(super) async fn run(shared: Arc<Shared>, workers: WorkerConfig, post: Post) {
    let mut supervisor = Supervisor::new(shared, post);
    loop {
        let Life { ended, requests, has_suspects } = supervisor.worker_life(&workers).await;
        let Err(error) = ended else {
            let gives_back = supervisor.shared.desk.gives_back();
            requests.into_iter().for_each(|(request, _)| request.end(gives_back));
            break;
        };
        if let Some(first) = supervisor.first.take() {
            // Nobody waits for a load that was given up.
            let _ = first.send(Err(error));
            break;
        }
        let reason = error.reason();
        let wait = supervisor.after_death(&reason, has_suspects);
        for (request, fate) in requests {
            supervisor.pass_on(request, fate, &reason);
        }
        if supervisor.pause(wait, &reason).await.is_stop() {
            break;
        }
    }
    supervisor.finish();
}

struct Supervisor {
    shared: Arc<Shared>,
    worker: usize,
    inbox: mpsc::UnboundedReceiver<Command>,
    room: mpsc::UnboundedSender<Box<Request>>,
    first: Option<oneshot::Sender<Result<(), LoadError>>>,
    seat: Seat,
    retiring: Option<Retiring>,
    crashes: Crashes,
}

struct Retiring {
    deadline: Instant,
    done: Vec<oneshot::Sender<()>>,
}

impl Supervisor {
    fn new(shared: Arc<Shared>, post: Post) -> Self {
        let Post { worker, inbox, room, first, seat } = post;
        let (first, crashes) = (Some(first), Crashes::default());
        Self { shared, worker, inbox, room, first, seat, retiring: None, crashes }
    }

    /// This worker's figures.
    fn figures(&self) -> &Worker {
        &self.shared.workers[self.worker]
    }

    /// One worker from start to end.
    async fn worker_life(&mut self, workers: &WorkerConfig) -> Life {
        self.figures().load().begin(Instant::now());
        let group = self.figures().share.group.and_then(|group| Processors::here().groups().get(group));
        let (process, socket, journal) = match Process::spawn(workers, group.map_or(&[], Vec::as_slice)) {
            Ok(started) => started,
            Err(error) => return Life::without_requests(Err(LoadError::Spawn(error.to_string()))),
        };
        let pid = process.pid().unwrap_or(0);
        self.figures().pid.store(pid, Ordering::Relaxed);
        tracing::info!(version = %self.shared.spec.name, worker = self.worker, pid, "worker started");
        let trial = workers.trial();
        let watch = trial.clone().map(|trial| Watch::start(trial, self.worker, pid)).transpose();
        let watch = watch.unwrap_or_else(|error| {
            tracing::error!(%error, "a worker's memory is not watched");
            None
        });
        let (end, requests) = self.talk(socket).await;
        // Before the process is waited for: its number may be another's after that.
        let taken_bytes = watch.and_then(Watch::end);
        // At once: what became of the process takes a while to find out, and who asks what it died of must not get to another.
        self.shared.desk.lose(self.worker);
        let begun = journal.begun().unwrap_or_else(|error| {
            tracing::error!(%error, "what a worker was working on cannot be read");
            BTreeSet::new()
        });
        let (requests, has_suspects) = self.judge_requests(requests, &begun, Instant::now());
        self.seat.vacate();
        let figures = self.figures();
        figures.threads.store(self.shared.own_threads(self.worker), Ordering::Relaxed);
        figures.pid.store(0, Ordering::Relaxed);
        figures.running.store(0, Ordering::Relaxed);
        figures.heartbeat.send_replace(Heartbeat::default());
        if let (Some(trial), Some(taken_bytes)) = (trial, taken_bytes) {
            process.kill().await;
            let ended = Err(LoadError::Memory(trial.reason(self.worker, taken_bytes)));
            return Life { ended, requests, has_suspects };
        }
        let result = match end {
            End::Stopped => {
                process.end().await;
                Ok(())
            }
            End::LoadFailed(error) => {
                process.end().await;
                Err(error)
            }
            End::Gone(error) => {
                let mut reason = process.end().await;
                if let Some(error) = error {
                    reason = format!("{error}; {reason}");
                }
                Err(LoadError::WorkerDied(reason))
            }
            End::Hung(reason) => {
                process.kill().await;
                Err(LoadError::WorkerDied(reason))
            }
        };
        Life { ended: result, requests, has_suspects }
    }

    /// What becomes of the requests that a worker had when its life ended while it worked on those that had `begun`, and whether
    /// one of them may be why.
    fn judge_requests(
        &self,
        requests: Requests,
        begun: &BTreeSet<RequestId>,
        now: Instant,
    ) -> (Vec<(Box<Request>, Fate)>, bool) {
        let (mut judged, mut suspected) = (Vec::new(), Vec::new());
        let (mut tried, mut convicted) = (BTreeSet::new(), BTreeSet::new());
        for mut request in requests.into_values() {
            let is_begun = begun.contains(&request.id);
            let fate = request.at_death(is_begun, begun.len() == 1).fate();
            match fate {
                Fate::Convicted => drop(convicted.insert(request.digest)),
                Fate::Tried | Fate::TriedUnheard => {
                    request.suspect = true;
                    tried.insert(request.digest);
                    suspected.push((request.digest, request.outputs()));
                }
                Fate::Ends if is_begun => suspected.push((request.digest, request.outputs())),
                Fate::Ends | Fate::Waits => {}
            }
            judged.push((request, fate));
        }
        let has_suspects = !tried.is_empty() || !convicted.is_empty();
        let mut memory = self.shared.desk.suspects();
        memory.died(self.worker, suspected.into_iter(), tried, now);
        convicted.into_iter().for_each(|digest| memory.convict(digest, now));
        (judged, has_suspects)
    }

    /// Talks to a worker until its life ends, and returns the requests that it still had.
    async fn talk(&mut self, socket: UnixStream) -> (End, Requests) {
        let (read, write) = socket.into_split();
        let frames = protocol::receiver::<FromWorker>(read);
        // Unbounded by type, bounded by admission, as the inbox is.
        let (outbox, mut outgoing) = mpsc::unbounded_channel::<ToWorker>();
        let writer = tokio::spawn(async move {
            let mut sender = protocol::Sender::new(write);
            while let Some(message) = outgoing.recv().await {
                if let Err(error) = sender.send(&message).await {
                    // The reader sees the same end of the socket and acts on it.
                    tracing::debug!(%error, "a worker's socket takes no more");
                    break;
                }
            }
        });
        let mut session = Session::new(self, outbox);
        let end = session.run(frames).await;
        let requests = session.requests;
        // Both halves must go for the worker to see that the front is done with it.
        writer.abort();
        (end, requests)
    }

    /// Notes a death and says how long to wait for the next life. `has_suspects`: a request may be why.
    fn after_death(&mut self, reason: &str, has_suspects: bool) -> Duration {
        self.figures().restarts.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        let unexplained = self.shared.desk.suspects().unexplained(self.worker);
        for at in unexplained {
            self.crashes.add(at, now);
        }
        let verdict = if has_suspects { self.crashes.spare(now) } else { self.crashes.record(now) };
        let (health, wait) = match verdict {
            Verdict::Respawn { attempt, after } => {
                (WorkerHealth::Restarting { attempt, reason: reason.to_owned() }, after)
            }
            Verdict::Failed { retry_after } => (WorkerHealth::Failed { reason: reason.to_owned() }, retry_after),
        };
        self.figures().load().begin(now + wait);
        tracing::error!(
            version = %self.shared.spec.name, worker = self.worker, reason, state = health.label(),
            wait_ms = wait.as_millis() as u64, has_suspects, "worker died"
        );
        self.shared.move_to(self.worker, health);
        wait
    }

    /// Has a request that this worker will not answer wait for one that will, or ends it.
    fn pass_on(&self, mut request: Box<Request>, fate: Fate, reason: &str) {
        if request.stop_trial() && fate == Fate::Waits {
            self.shared.desk.suspects().end_trial(request.digest);
        }
        match fate {
            Fate::Convicted => {
                tracing::error!(
                    version = %self.shared.spec.name, worker = self.worker, reason,
                    "a worker died of a request, which is refused from now on"
                );
                return request.fail(GenerationError::EndsWorker);
            }
            Fate::Ends => return request.fail(GenerationError::WorkerDied(reason.to_owned())),
            Fate::TriedUnheard => request.leave_client(GenerationError::WorkerDied(reason.to_owned())),
            // Whether it was the cause is to be known, be it that nobody waits for its answer any more.
            Fate::Waits if request.is_abandoned() && !self.shared.desk.suspects().is_open(request.digest) => return,
            Fate::Waits | Fate::Tried => {}
        }
        if !request.is_unheard {
            self.shared.retries.fetch_add(1, Ordering::Relaxed);
        }
        send_to_room(&self.shared.desk, &self.room, request);
    }

    /// Waits while there is no worker, and answers for it. `Stop`: there is nobody left to start one for.
    async fn pause(&mut self, wait: Duration, reason: &str) -> Flow {
        let until = tokio::time::Instant::now() + wait;
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        while !self.drained(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(until) => return Flow::Go,
                // The last request may end with another worker, and the time to drain run out.
                _ = tick.tick(), if self.retiring.is_some() => {}
                command = self.inbox.recv() => match command {
                    None => return Flow::Stop,
                    Some(Command::Retire { drain_timeout, done }) => self.retire(drain_timeout, done),
                    // It was picked just before the worker died.
                    Some(Command::Submit(request)) => self.pass_on(request, Fate::Waits, reason),
                    // The caller of a probe may have stopped waiting.
                    Some(Command::Probe(reply)) => drop(reply.send(Err(format!("the model worker died: {reason}")))),
                    Some(Command::Cancel { .. } | Command::Resume { .. }) => {}
                },
            }
        }
        Flow::Stop
    }

    fn retire(&mut self, drain_timeout: Duration, done: oneshot::Sender<()>) {
        let deadline = Instant::now() + drain_timeout;
        let retiring = self.retiring.get_or_insert_with(|| Retiring { deadline, done: Vec::new() });
        retiring.deadline = retiring.deadline.min(deadline);
        retiring.done.push(done);
    }

    /// Whether nothing is left to wait for.
    fn drained(&self, now: Instant) -> bool {
        // Places, not table entries: an admitted request may still be on its way to the inbox.
        self.retiring.as_ref().is_some_and(|r| now >= r.deadline || self.shared.admission.in_flight() == 0)
    }

    fn finish(mut self) {
        self.shared.desk.lose(self.worker);
        self.inbox.close();
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Retire { done, .. } => self.retire(Duration::ZERO, done),
                Command::Submit(request) => request.end(self.shared.desk.gives_back()),
                Command::Probe(reply) => drop(reply.send(Err(GenerationError::Retired.to_string()))),
                Command::Cancel { .. } | Command::Resume { .. } => {}
            }
        }
        self.shared.move_to(self.worker, WorkerHealth::Stopped);
        tracing::info!(version = %self.shared.spec.name, worker = self.worker, "worker stopped");
        for done in self.retiring.map(|retiring| retiring.done).unwrap_or_default() {
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod threads_tests;
