//! The embedder's front: admission, tokenising, probes and shutdown around one [`Pooler`].
//!
//! Flow: `submit` takes a place (or refuses) → two threads tokenise, a slice of a request at a time and in the order of
//! priorities, so that thousands of texts of one do not hold up the one of another → the embedder's thread gathers, computes and calls the
//! request's sink. That thread owns the context; the engine beside it has one of its own, over the same weights.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, unbounded};
use gantry_llama::{Pooling, SpecialTokens};

use crate::backend::llama::LoadedPooler;
use crate::backend::{PooledBackend, Token, Vocabulary};
use crate::engine::{ask, or_break};
use crate::error::{EngineError, LoadError, ParamError, ProbeError, RequestError, SubmitError};
use crate::event::{Activity, ActivitySink, PooledEvent, PooledInfo, PooledOutput, PooledSink, PooledStats};
use crate::finite::NoNumbers;
use crate::monitor::Pressure;
use crate::params::{
    EngineConfig, MAX_POOLED_INPUTS, MAX_PROMPT_BYTES, PooledConfig, PooledWork, Priority, TextInput, Turn,
};
use crate::pooler::{Next, PooledCounters, PooledPermit, PooledRequest, Pooler, Reply};
use crate::queue::{Queue, Waiting};

/// Threads that tokenise. Two, so that one enormous request does not hold up the others.
const PREPARE_THREADS: usize = 2;
/// Texts of one request that a thread tokenises before it looks who is next.
const SLICE_TEXTS: usize = 16;
/// Probes that may wait beside the requests.
const MAX_PROBES: usize = 64;

enum Command {
    Run(Box<PooledRequest>),
    Probe(Sender<Result<(), ProbeError>>),
}

/// An accepted request whose texts are still text, or some of them.
struct Job {
    /// The order of submission.
    ticket: u64,
    turn: Turn,
    left: Texts,
    done: VecDeque<Vec<Token>>,
    priority: Priority,
    reply: Reply,
    submitted_at: Instant,
    /// Since when no text of it was tokenised: as in [`crate::pooler`], what is worked on does not wait.
    waiting_since: Instant,
    limit: Option<Duration>,
}

/// Texts that are not tokens yet.
enum Texts {
    Embed {
        inputs: std::vec::IntoIter<TextInput>,
        /// One text has no place in a list.
        is_one: bool,
    },
    Rank {
        /// One for all documents, or one for each of them.
        queries: Vec<String>,
        documents: std::vec::IntoIter<String>,
    },
}

impl Texts {
    fn of(work: PooledWork) -> Self {
        match work {
            PooledWork::Embed(inputs) => Self::Embed { is_one: inputs.len() == 1, inputs: inputs.into_iter() },
            PooledWork::Rank { queries, documents } => Self::Rank { queries, documents: documents.into_iter() },
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Embed { inputs, .. } => inputs.len() == 0,
            Self::Rank { documents, .. } => documents.len() == 0,
        }
    }
}

/// Requests whose texts are to be tokenised, those that are begun included. Once it is dropped, nothing in it is tokenised any
/// more: who waits there hears that it was dropped.
struct Jobs {
    waiting: WaitingJobs,
    /// One message for each slice, whosever it is that is taken then.
    calls: Sender<()>,
    tickets: AtomicU64,
}

type WaitingJobs = Arc<Mutex<Queue<Box<Job>>>>;

impl Jobs {
    /// Never blocks. False: the threads have ended.
    fn push(&self, job: Box<Job>) -> bool {
        push(&self.waiting, job);
        self.calls.send(()).is_ok()
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // Not while it is locked: each tells its caller.
        let left = std::mem::take(&mut *lock(&self.waiting));
        drop(left);
    }
}

fn push(waiting: &WaitingJobs, job: Box<Job>) {
    let Job { ticket, turn, priority, waiting_since: since, .. } = *job;
    lock(waiting).push(Waiting { ticket, turn, priority, has_begun: false, since, deadline: None, value: job });
}

/// Who is next. In a function of its own, so that it is unlocked afterwards.
fn pop(waiting: &WaitingJobs) -> Option<Waiting<Box<Job>>> {
    lock(waiting).pop(Instant::now())
}

fn lock(waiting: &WaitingJobs) -> MutexGuard<'_, Queue<Box<Job>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Embeds or scores texts of many requests together. Dropping it ends every request.
pub struct Embedder {
    counters: Arc<PooledCounters>,
    info: PooledInfo,
    max_queue: usize,
    max_in_flight: u32,
    untouched_bytes: u64,
    /// Raised at shutdown: a long batch is not waited for.
    abort: Option<Arc<AtomicBool>>,
    /// Taken at shutdown, in this order.
    jobs: Option<Jobs>,
    commands: Option<Sender<Command>>,
    threads: Vec<JoinHandle<()>>,
}

/// A pooled request that was accepted. Dropping it does not cancel.
#[derive(Clone, Debug)]
pub struct PooledHandle {
    cancelled: Arc<AtomicBool>,
}

impl PooledHandle {
    /// Ends the request within one batch.
    pub fn cancel(&self) {
        self.cancelled.store(true, Relaxed);
    }
}

impl Embedder {
    /// Warms a loaded context up and starts the threads.
    pub(crate) fn over(
        loaded: LoadedPooler,
        config: &EngineConfig,
        pressure: Arc<Pressure>,
    ) -> Result<Self, LoadError> {
        let LoadedPooler { backend, vocabulary, pooled: info, abort, .. } = loaded;
        let mut embedder = Self::start(backend, Arc::new(vocabulary), info, config, pressure)?;
        embedder.abort = Some(abort);
        Ok(embedder)
    }

    /// As [`Embedder::over`], with any backend.
    pub(crate) fn start<B: PooledBackend + 'static>(
        backend: B,
        vocabulary: Arc<dyn Vocabulary>,
        info: PooledInfo,
        config: &EngineConfig,
        pressure: Arc<Pressure>,
    ) -> Result<Self, LoadError> {
        let PooledConfig { max_batch, wait_ms, .. } = config.pooled.unwrap_or_default();
        let counters = Arc::new(PooledCounters::under(pressure));
        let preparer = Preparer { vocabulary, pooling: info.pooling, text_tokens: backend.limits().text_tokens };
        let untouched_bytes = backend.untouched_bytes();
        let wait = Duration::from_millis(wait_ms.into());
        let normalises = info.pooling != Pooling::Rank;
        let mut pooler = Pooler::new(backend, counters.clone(), max_batch as usize, wait, normalises);
        pooler.warm_up().map_err(|error| match error {
            NoNumbers::NotFinite => LoadError::NotFinite { path: config.model_path.clone() },
            error => LoadError::WarmUp(error.to_string()),
        })?;
        // Every request in flight fits each of these channels, so that sending one never blocks.
        let max_in_flight = config.max_queue + config.parallel as usize;
        // Unbounded in form only: there is one message for each request in flight.
        let (calls, called) = unbounded();
        let jobs = Jobs { waiting: WaitingJobs::default(), calls, tickets: AtomicU64::new(0) };
        let waiting = jobs.waiting.clone();

        let (commands, command_receiver) = bounded(max_in_flight + MAX_PROBES);
        let mut embedder = Self {
            counters: counters.clone(),
            info,
            max_queue: config.max_queue,
            max_in_flight: u32::try_from(max_in_flight).unwrap_or(u32::MAX),
            untouched_bytes,
            abort: None,
            jobs: Some(jobs),
            commands: Some(commands.clone()),
            threads: Vec::new(),
        };
        let failed = |e: std::io::Error| LoadError::Thread(e.to_string());
        for i in 0..PREPARE_THREADS {
            let (preparer, waiting, called) = (preparer.clone(), waiting.clone(), called.clone());
            let (commands, counters) = (commands.clone(), counters.clone());
            let thread = std::thread::Builder::new().name(format!("gantry-texts-{i}"));
            let work = move || {
                or_break(&counters.broken, "that tokenises texts", || {
                    for () in called {
                        if let Some(request) = preparer.next(&waiting, &counters) {
                            // The embedder's thread outlives these; were it gone, the dropped request would tell its caller.
                            let _ = commands.send(Command::Run(Box::new(request)));
                        }
                    }
                });
            };
            embedder.threads.push(thread.spawn(work).map_err(failed)?);
        }
        let thread = std::thread::Builder::new().name(String::from("gantry-embedder"));
        let work = move || or_break(&counters.broken, "that embeds", || run(pooler, &counters, &command_receiver));
        embedder.threads.push(thread.spawn(work).map_err(failed)?);
        Ok(embedder)
    }

    /// Accepts a request, or says at once why not. Never blocks; `sink` is called on the embedder's threads and holds up
    /// the batches after it while it blocks. `timeout_ms`: the most milliseconds until all vectors are there, past which
    /// the request fails with [`RequestError::DeadlineExceeded`].
    ///
    /// # Errors
    /// The sink is then never called.
    pub fn submit(
        &self,
        work: PooledWork,
        priority: Priority,
        timeout_ms: Option<u64>,
        sink: PooledSink,
    ) -> Result<PooledHandle, SubmitError> {
        self.submit_observed(work, priority, Turn::default(), timeout_ms, None, sink)
    }

    /// As [`Embedder::submit`], for one of several clients; `activity` hears whenever the embedder is about to work on the request.
    ///
    /// # Errors
    /// As [`Embedder::submit`].
    pub fn submit_observed(
        &self,
        work: PooledWork,
        priority: Priority,
        turn: Turn,
        timeout_ms: Option<u64>,
        activity: Option<ActivitySink>,
        sink: PooledSink,
    ) -> Result<PooledHandle, SubmitError> {
        check(&work, self.info.pooling).map_err(SubmitError::InvalidParam)?;
        if let Some(reason) = self.counters.broken.get() {
            return Err(SubmitError::Broken(reason.clone()));
        }
        let Some(jobs) = &self.jobs else { return Err(SubmitError::ShuttingDown) };
        let level = self.counters.pressure.level();
        if !level.admits(priority) {
            return Err(SubmitError::MemoryPressure { level });
        }
        let place = PooledPermit::take(&self.counters, self.max_in_flight)
            .ok_or(SubmitError::QueueFull { limit: self.max_queue })?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let now = Instant::now();
        let job = Job {
            ticket: jobs.tickets.fetch_add(1, Relaxed),
            turn,
            left: Texts::of(work),
            done: VecDeque::new(),
            priority,
            reply: Reply::new(sink, place, cancelled.clone()).observed(activity),
            submitted_at: now,
            waiting_since: now,
            limit: timeout_ms.map(Duration::from_millis),
        };
        // The places bound what waits there, and its threads live as long as the embedder.
        if jobs.push(Box::new(job)) { Ok(PooledHandle { cancelled }) } else { Err(SubmitError::ShuttingDown) }
    }

    /// Computes and waits for the end: for programs that have a thread to wait.
    ///
    /// # Errors
    /// Why the request was not accepted, or could not be served.
    pub fn compute(&self, work: PooledWork) -> Result<PooledOutput, EngineError> {
        let count = work.len();
        let (sender, events) = bounded(count + 1);
        let sink = Box::new(move |event| {
            // There is room for a vector of each text and for the end.
            let _ = sender.send(event);
        });
        self.submit(work, Priority::default(), None, sink)?;
        let mut output = PooledOutput { vectors: vec![Vec::new(); count], prompt_tokens: 0 };
        for event in events {
            match event {
                PooledEvent::Vector { index, vector } => {
                    if let Some(place) = output.vectors.get_mut(index as usize) {
                        *place = vector;
                    }
                }
                PooledEvent::Finished { prompt_tokens } => return Ok(PooledOutput { prompt_tokens, ..output }),
                PooledEvent::Failed(error) => return Err(error.into()),
                PooledEvent::Cancelled => break,
            }
        }
        Err(RequestError::Internal(String::from("the request ended without its last event")).into())
    }

    /// Shows that a token can be computed now, and says how long it took to know. Blocks.
    ///
    /// # Errors
    /// When none was computed within `timeout`, or the context is broken.
    pub fn probe(&self, timeout: Duration) -> Result<Duration, ProbeError> {
        let started = Instant::now();
        let Some(commands) = &self.commands else { return Err(ProbeError::ShuttingDown) };
        self.unbroken()?;
        ask(commands, Command::Probe, timeout, || self.counters.running.progress())?;
        Ok(started.elapsed())
    }

    /// See [`PooledBackend::untouched_bytes`].
    pub(crate) fn untouched_bytes(&self) -> u64 {
        self.untouched_bytes
    }

    /// Whether it still computes, for all that is known.
    ///
    /// # Errors
    /// Why it does not.
    pub(crate) fn unbroken(&self) -> Result<(), ProbeError> {
        self.counters.broken.get().map_or(Ok(()), |reason| Err(ProbeError::Broken(reason.clone())))
    }

    /// The counters, without a lock.
    #[must_use]
    pub fn stats(&self) -> PooledStats {
        self.counters.snapshot()
    }

    /// What it gives.
    #[must_use]
    pub fn info(&self) -> PooledInfo {
        self.info
    }
}

impl Drop for Embedder {
    fn drop(&mut self) {
        self.counters.shutting_down.store(true, Relaxed);
        if let Some(abort) = &self.abort {
            abort.store(true, Relaxed);
        }
        // The tokenising threads end with their jobs, the embedder's with their senders and this one.
        self.jobs = None;
        self.commands = None;
        // A sink may hold the last handle of the embedder. Then this is a thread of its own, which can wait neither for
        // itself nor for those that wait for it: they end by themselves.
        let here = std::thread::current().id();
        if self.threads.iter().any(|thread| thread.thread().id() == here) {
            return;
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("an embedder's thread panicked");
            }
        }
    }
}

/// The embedder's thread: commands between batches, blocking only when there is nothing to do.
fn run<B: PooledBackend>(mut pooler: Pooler<B>, counters: &PooledCounters, commands: &Receiver<Command>) {
    let mut next = Next::Idle;
    loop {
        let received = match next {
            Next::Now => commands
                .try_recv()
                .map_err(|e| if e.is_empty() { RecvTimeoutError::Timeout } else { RecvTimeoutError::Disconnected }),
            Next::At(at) => commands.recv_deadline(at),
            Next::Idle => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
            Ok(first) => {
                for command in std::iter::once(first).chain(commands.try_iter()) {
                    match command {
                        Command::Run(request) => pooler.add(*request, Instant::now()),
                        // A probe that timed out does not listen any more.
                        Command::Probe(reply) => {
                            drop(reply.send(pooler.probe().map_err(|e| ProbeError::Broken(e.to_string()))));
                        }
                    }
                }
            }
        }
        if counters.shutting_down.load(Relaxed) {
            pooler.fail_all(&RequestError::ShuttingDown);
            next = Next::Idle;
        } else {
            next = pooler.turn(Instant::now());
        }
    }
    pooler.fail_all(&RequestError::ShuttingDown);
}

fn check(work: &PooledWork, pooling: Pooling) -> Result<(), ParamError> {
    let (param, ranks) = match work {
        PooledWork::Embed(_) => ("input", false),
        PooledWork::Rank { .. } => ("documents", true),
    };
    if ranks != (pooling == Pooling::Rank) {
        let message =
            if ranks { "this model embeds texts and ranks none" } else { "this model ranks texts and embeds none" };
        return Err(ParamError::new(param, message));
    }
    if let PooledWork::Rank { queries, documents } = work
        && queries.len() != 1
        && queries.len() != documents.len()
    {
        let (n, m) = (queries.len(), documents.len());
        return Err(ParamError::new("query", format!("must be one, or one for each of the {m} documents, not {n}")));
    }
    match work.len() {
        1..=MAX_POOLED_INPUTS => Ok(()),
        n => Err(ParamError::new(param, format!("must have 1 to {MAX_POOLED_INPUTS} elements, not {n}"))),
    }
}

/// What a slice leads to.
enum Slice {
    /// There are more texts.
    More(Box<Job>),
    /// All are tokens.
    Ready(PooledRequest),
    /// Its caller has heard its last.
    Ended,
}

/// What the tokenising threads know of the model.
#[derive(Clone)]
struct Preparer {
    vocabulary: Arc<dyn Vocabulary>,
    pooling: Pooling,
    /// The longest text.
    text_tokens: usize,
}

impl Preparer {
    /// Brings one request to its end, be it another one than the first: after each slice whoever is next goes on.
    fn next(&self, waiting: &WaitingJobs, counters: &PooledCounters) -> Option<PooledRequest> {
        // There is one: each call is for a request that is not at its end, and each thread holds but one.
        while let Some(next) = pop(waiting) {
            match self.slice(next.value) {
                Slice::More(_) if counters.shutting_down.load(Relaxed) => return None,
                Slice::More(job) => push(waiting, job),
                Slice::Ready(request) => return Some(request),
                Slice::Ended => return None,
            }
        }
        None
    }

    /// Tokenises some texts of a request.
    fn slice(&self, mut job: Box<Job>) -> Slice {
        if job.reply.is_cancelled() {
            job.reply.cancel();
            return Slice::Ended;
        }
        job.reply.is(Activity::Begun);
        let Job { left, done, .. } = &mut *job;
        let tokenized = std::panic::catch_unwind(AssertUnwindSafe(|| self.texts(left, done))).unwrap_or_else(|_| {
            Err(RequestError::Internal(String::from("tokenising the texts panicked; see the server's log")))
        });
        job.reply.is(Activity::Paused);
        job.waiting_since = Instant::now();
        match tokenized {
            Err(error) => {
                job.reply.fail(error);
                Slice::Ended
            }
            Ok(()) if !job.left.is_empty() => Slice::More(job),
            Ok(()) => {
                let Job { done: texts, turn, priority, reply, submitted_at, limit, .. } = *job;
                Slice::Ready(PooledRequest { reply, texts, client: turn.client, priority, submitted_at, limit })
            }
        }
    }

    fn texts(&self, left: &mut Texts, done: &mut VecDeque<Vec<Token>>) -> Result<(), RequestError> {
        match left {
            Texts::Embed { inputs, is_one } => {
                for input in inputs.take(SLICE_TEXTS) {
                    let name = if *is_one { String::from("input") } else { format!("input[{}]", done.len()) };
                    done.push_back(self.input(&name, input)?);
                }
            }
            Texts::Rank { queries, documents } => {
                if let ([query], true) = (queries.as_slice(), done.is_empty()) {
                    // Alone first: it is in the text of every document.
                    self.fits("query", self.tokenize("query", query)?)?;
                }
                for document in documents.take(SLICE_TEXTS) {
                    let param = format!("documents[{}]", done.len());
                    let of_its_own = queries.get(done.len()).filter(|_| queries.len() > 1);
                    let Some(query) = of_its_own.or(queries.first()) else { break };
                    self.checked(&param, query)?;
                    let pair = self.vocabulary.pair(query, self.checked(&param, &document)?);
                    done.push_back(self.fits(&param, pair.map_err(|error| error.of(&param))?)?);
                }
            }
        }
        Ok(())
    }

    fn input(&self, param: &str, input: TextInput) -> Result<Vec<Token>, RequestError> {
        let tokens = match input {
            TextInput::Text(text) => self.tokenize(param, &text)?,
            TextInput::Tokens(tokens) => {
                let size = self.vocabulary.size();
                let known = |token: Token| u32::try_from(token).is_ok_and(|t| t < size);
                if let Some(token) = tokens.iter().copied().find(|&token| !known(token)) {
                    let message = format!("`{param}`: token {token} is not in the model's vocabulary of {size}");
                    return Err(RequestError::invalid(param, "invalid_token", message));
                }
                tokens
            }
        };
        self.fits(param, tokens)
    }

    fn tokenize(&self, param: &str, text: &str) -> Result<Vec<Token>, RequestError> {
        self.vocabulary.tokenize(self.checked(param, text)?, SpecialTokens::None).map_err(|error| error.of(param))
    }

    fn fits(&self, param: &str, tokens: Vec<Token>) -> Result<Vec<Token>, RequestError> {
        let (n, limit) = (tokens.len(), self.text_tokens);
        if n == 0 {
            return Err(RequestError::invalid(
                param,
                "empty_prompt",
                format!("`{param}` has no tokens; send at least one"),
            ));
        }
        if n > limit {
            return Err(self.too_long(param, &format!("has {n} tokens")));
        }
        Ok(tokens)
    }

    /// A text that may be tokenised, which takes many times its memory: not one that cannot fit.
    fn checked<'a>(&self, param: &str, text: &'a str) -> Result<&'a str, RequestError> {
        check_length(param, text)?;
        if text.len() / self.vocabulary.longest_token().max(1) > self.text_tokens {
            return Err(self.too_long(param, &format!("has {} bytes, too many for its tokens", text.len())));
        }
        Ok(text)
    }

    fn too_long(&self, param: &str, has: &str) -> RequestError {
        let limit = self.text_tokens;
        let what = if self.pooling == Pooling::Rank { " with its query" } else { "" };
        let message = format!(
            "`{param}` {has}{what}, and {limit} tokens are the most that this model takes as served: split it, or serve \
             the model with a larger --ubatch-size if it was trained for more"
        );
        RequestError::invalid(param, "context_length_exceeded", message)
    }
}

fn check_length(param: &str, text: &str) -> Result<(), RequestError> {
    if text.len() > MAX_PROMPT_BYTES {
        let message =
            format!("`{param}` has {} bytes, more than the {MAX_PROMPT_BYTES} that a text may have", text.len());
        return Err(RequestError::invalid(param, "prompt_too_large", message));
    }
    Ok(())
}

#[cfg(test)]
#[path = "embedder_tests.rs"]
mod tests;
