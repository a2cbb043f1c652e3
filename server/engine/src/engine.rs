//! The engine's front: threads, admission, probes and shutdown around one scheduler.
//!
//! Flow: `submit` takes a permit (or refuses) → the pool renders and tokenises → the engine's thread batches, samples
//! and calls the request's sink. One thread owns the model's context; nothing else touches it.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded, unbounded};
use gantry_core::{AnswerOutput, ShownPrompt, ToolCall};
use gantry_llama::SpecialTokens;

use crate::backend::llama::{self, Loaded};
use crate::backend::{Backend, Token, Vocabulary};
use crate::budget::StepBudget;
use crate::cache::{CacheError, Fingerprint, PrefixCache};
use crate::draft::Draft;
use crate::error::{EngineError, LoadError, ParamError, ProbeError, RequestError, SubmitError};
use crate::event::{ActivitySink, EngineStats, EventSink, FinishReason, GenerationEvent, ModelInfo, Timings, Usage};
use crate::finite::{NoNumbers, WarmUpError};
use crate::grammars::Grammars;
use crate::handle::{Command, Commands, RequestHandle};
use crate::interrupt::Interrupt;
use crate::lookup::Indexer;
use crate::monitor::{MemoryWatch, Monitor, Pressure};
use crate::output::{Output, Signals, TextStage};
use crate::params::{
    EngineConfig, GenerationParams, MAX_PARALLEL, MAX_POOLED_BATCH, MAX_POOLED_TOKENS, MAX_POOLED_WAIT_MS,
    MAX_PREFILL_TOKENS_PER_STEP, MAX_QUEUE, MAX_SPECULATION_TOKENS, MAX_STEP_MS_TARGET, MAX_THREADS, Prompt,
};
use crate::prepare::{Job, Jobs, Preparer};
use crate::queue::Watermarks;
use crate::request::{Emitter, Permit};
use crate::sample_pool::SamplePool;
use crate::scheduler::{GATHERING_MS, PROBE_FRESH, Scheduler, SchedulerParts, StepOutcome};
use crate::stats::Stats;

/// Probes and other commands that may wait beside the requests.
const MAX_CONTROL_COMMANDS: usize = 64;

/// How often who waits for the answer of a probe looks whether a step is being computed.
const PROBE_LOOK_PERIOD: Duration = Duration::from_millis(20);
/// How long the end of an engine waits for its prefixes to be written to disk.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);
/// The most threads that sample.
const MAX_SAMPLE_THREADS: usize = 8;
/// What a load decodes the beginning of where there are no chats: a text like many.
const WARM_UP_TEXT: &str = "Once upon a time, there was a little boat.";

/// One loaded model that generates for many requests at once. Dropping it ends every request.
pub struct Engine {
    stats: Arc<Stats>,
    info: ModelInfo,
    max_queue: usize,
    parallel: u32,
    watermarks: Watermarks,
    queue_timeout_ms: Option<u64>,
    /// At shutdown a long batch is not waited for, and what is computed for nobody is not at any time.
    interrupt: Arc<Interrupt>,
    max_in_flight: u32,
    tickets: AtomicU64,
    /// Taken at shutdown, in this order.
    jobs: Option<Jobs>,
    commands: Option<Arc<Commands>>,
    pool: Vec<JoinHandle<()>>,
    thread: Option<JoinHandle<()>>,
    text: Option<JoinHandle<()>>,
    /// Ends with the engine.
    memory: Option<MemoryWatch>,
}

/// A whole generation, as [`Engine::generate`] returns it.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOutput {
    /// The text.
    pub text: String,
    /// What the model thought before.
    pub reasoning: String,
    /// The tools that it calls, in their order.
    pub tool_calls: Vec<ToolCall>,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it used.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

impl Engine {
    /// Loads a model, decodes one token with it, and starts the engine's threads. Blocks meanwhile;
    /// `progress` hears fractions from 0 to 1 of the file and aborts by answering false.
    ///
    /// # Errors
    /// See [`LoadError`]; nothing is left behind.
    pub fn load(
        config: EngineConfig,
        mut progress: impl FnMut(f32) -> bool + Send + 'static,
    ) -> Result<Self, LoadError> {
        validate(&config).map_err(LoadError::Config)?;
        let opened = llama::open(&config, &Arc::default(), &mut progress)?;
        Self::over(llama::generator(&config, &opened)?, &config, Arc::default(), 0)
    }

    /// As [`Engine::load`], with a context that is there; the configuration is valid. It watches over memory, for what
    /// shares `pressure`, too, and will take `beside_bytes` of main memory beside what it has, at most.
    pub(crate) fn over(
        loaded: Loaded,
        config: &EngineConfig,
        pressure: Arc<Pressure>,
        beside_bytes: u64,
    ) -> Result<Self, LoadError> {
        let Loaded { backend, draft, vocabulary, info, fingerprint, chat } = loaded;
        Self::start(backend, draft, Arc::new(vocabulary), info, fingerprint, chat, config, pressure, beside_bytes)
    }

    /// Warms a backend up, with what a chat begins with where there are chats, and starts the threads.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn start<B: Backend + 'static>(
        backend: B,
        draft: Option<Draft<B>>,
        vocabulary: Arc<dyn Vocabulary>,
        info: ModelInfo,
        fingerprint: Option<Fingerprint>,
        chat: Vec<Token>,
        config: &EngineConfig,
        pressure: Arc<Pressure>,
        beside_bytes: u64,
    ) -> Result<Self, LoadError> {
        let (limits, interrupt) = (backend.limits(), Arc::new(Interrupt::new(backend.interrupt())));
        let draft_bytes = draft.as_ref().map_or(0, Draft::untouched_bytes);
        let untouched_bytes = backend.untouched_bytes() + draft_bytes + beside_bytes;
        let stats = Arc::new(Stats::new(config.parallel, limits.total_cells, pressure.clone()));
        stats.reuses_prefixes.store(limits.reusable && config.prefix_cache.enabled, Relaxed);
        if !limits.reusable && (config.prefix_cache.enabled || config.speculation.prompt_lookup) {
            tracing::warn!(
                model = %config.model_path.display(),
                "this model's state cannot be cut by tokens (a sliding window, or a recurrent state): each prompt is read \
                 whole, nothing is kept in main memory or on disk, and nothing is guessed"
            );
        }
        stats.kv_unified.store(limits.unified, Relaxed);
        stats.flash_attention.store(limits.flash_attention, Relaxed);
        stats.stage_positions.store(limits.stage.unwrap_or(0), Relaxed);
        let failed = |e: std::io::Error| LoadError::Thread(e.to_string());
        let mut monitor = Monitor::new(config.memory_limit_bytes);
        let prefix_cache = monitor.sized(&config.prefix_cache, untouched_bytes);
        if prefix_cache.ram_bytes == 0 && config.prefix_cache.ram_bytes > 0 {
            tracing::warn!(
                "no memory is free for prefixes: none is kept but in the KV cache, and none on disk; more memory keeps them"
            );
        }
        let max_saved_bytes = prefix_cache.ram_bytes;
        let cache = match fingerprint.filter(|_| prefix_cache.enabled && prefix_cache.ram_bytes > 0) {
            Some(name) => {
                let cache = PrefixCache::new(&prefix_cache, name);
                Some((cache.map_err(|e| LoadError::PrefixCache(e.to_string()))?, name))
            }
            None => None,
        };
        let (disk, names) = cache.as_ref().map(|(cache, name)| (cache.reader(), *name)).unzip();
        // Unbounded in form only: a request posts at most a message for each token of its context.
        let (posts, posted) = unbounded();
        let mut scheduler = Scheduler::new(SchedulerParts {
            backend,
            vocabulary: vocabulary.clone(),
            stats: stats.clone(),
            output: Output::Thread(posts),
            pool: SamplePool::new(sample_threads(config.threads)).map_err(failed)?,
            parallel: config.parallel,
            budget: StepBudget::new(config.step_ms_target, config.prefill_tokens_per_step),
            reuse_prefixes: prefix_cache.enabled,
            cache,
            ttl: prefix_cache.ttl_ms.map(Duration::from_millis),
            lookup_tokens: config.speculation.prompt_lookup.then_some(config.speculation.max_tokens),
            draft,
            max_saved_bytes,
        });
        // Where a vocabulary has no tokeniser, prompts come as tokens.
        let plain = || vocabulary.tokenize_bare(WARM_UP_TEXT, SpecialTokens::None).unwrap_or_default();
        let text = if chat.is_empty() { plain() } else { chat };
        scheduler.warm_up(&text).map_err(|error| not_warm(error, config))?;
        monitor.loaded(untouched_bytes);
        // Every request in flight fits the channel, so that sending one never blocks.
        let max_in_flight = config.max_queue + config.parallel as usize;
        let (commands, command_receiver) = bounded(max_in_flight + MAX_CONTROL_COMMANDS);
        let mut engine = Self {
            stats: stats.clone(),
            info,
            max_queue: config.max_queue,
            parallel: config.parallel,
            watermarks: Watermarks::new(config.max_queue, config.high_watermark, config.low_watermark),
            queue_timeout_ms: config.queue_timeout_ms,
            interrupt: interrupt.clone(),
            max_in_flight: u32::try_from(max_in_flight).unwrap_or(u32::MAX),
            tickets: AtomicU64::new(0),
            jobs: None,
            commands: Some(Arc::new(Commands::new(commands.clone()))),
            pool: Vec::new(),
            thread: None,
            text: None,
            memory: None,
        };
        let preparer = Preparer {
            vocabulary,
            positions: limits.positions,
            suffix_first: config.infill_suffix_first,
            grammars: Grammars::default(),
            answer_grammars: Grammars::default(),
            fingerprint: names,
            disk: disk.flatten(),
            indexer: (config.speculation.prompt_lookup && limits.reusable).then(Indexer::default),
        };
        let deliver = move |request| {
            // The engine's thread outlives the pool; were it gone, the dropped request would tell its caller.
            let _ = commands.send(Command::Run(Box::new(request)));
        };
        let (jobs, pool) = preparer.spawn(deliver).map_err(failed)?;
        (engine.jobs, engine.pool) = (Some(jobs), pool);
        let thread = std::thread::Builder::new().name(String::from("gantry-engine"));
        let of_engine = stats.clone();
        let work =
            move || or_break(&of_engine.broken, "that computes", || run(scheduler, &command_receiver, &interrupt));
        engine.thread = Some(thread.spawn(work).map_err(failed)?);
        let text = std::thread::Builder::new().name(String::from("gantry-text"));
        engine.memory = Some(MemoryWatch::start(monitor, pressure).map_err(failed)?);
        let work = move || or_break(&stats.broken, "of texts", || TextStage::default().run(&posted));
        engine.text = Some(text.spawn(work).map_err(failed)?);
        Ok(engine)
    }

    /// Accepts a request, or says at once why not. Never blocks; `sink` is called on the engine's threads. A prompt that several
    /// share is copied for each of them only while it is tokenised.
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`] when as many requests wait as may; the sink is then never called.
    pub fn submit(
        &self,
        prompt: impl Into<Arc<Prompt>>,
        params: GenerationParams,
        sink: EventSink,
    ) -> Result<RequestHandle, SubmitError> {
        self.submit_observed(prompt, params, None, sink)
    }

    /// As [`Engine::submit`]; `activity` hears whenever the engine is about to work on the request.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit_observed(
        &self,
        prompt: impl Into<Arc<Prompt>>,
        params: GenerationParams,
        activity: Option<ActivitySink>,
        sink: EventSink,
    ) -> Result<RequestHandle, SubmitError> {
        params.validate().map_err(SubmitError::InvalidParam)?;
        if let Some(reason) = self.stats.broken.get() {
            return Err(SubmitError::Broken(reason.clone()));
        }
        let (Some(jobs), Some(commands)) = (&self.jobs, &self.commands) else { return Err(SubmitError::ShuttingDown) };
        let level = self.stats.level();
        if !level.admits(params.priority) {
            return Err(SubmitError::MemoryPressure { level });
        }
        let full = || SubmitError::QueueFull { limit: self.max_queue };
        let waiting = (self.stats.in_flight.load(Relaxed) as usize).saturating_sub(self.parallel as usize);
        if !self.watermarks.observe(waiting) {
            return Err(full());
        }
        let permit = Permit::take(&self.stats, self.max_in_flight).ok_or_else(full)?;
        // Before it is tokenised: the thread is to be free by then.
        self.interrupt.give_way();
        let signals = Arc::new(Signals::default());
        let submitted_at = Instant::now();
        let timeout_ms = params.queue_timeout_ms.or(self.queue_timeout_ms);
        let job = Box::new(Job {
            ticket: self.tickets.fetch_add(1, Relaxed),
            prompt: prompt.into(),
            params,
            emitter: Emitter::new(sink, self.stats.clone(), permit, signals.clone()).observed(activity),
            signals: signals.clone(),
            submitted_at,
            deadline: timeout_ms.and_then(|ms| submitted_at.checked_add(Duration::from_millis(ms))),
        });
        // The permits bound what waits there, and the pool's threads live as long as the engine.
        let handle = RequestHandle::new(signals, Arc::downgrade(commands));
        if jobs.push(job) { Ok(handle) } else { Err(SubmitError::ShuttingDown) }
    }

    /// Generates and waits for the end: for programs that need no stream.
    ///
    /// # Errors
    /// Why the request was not accepted, or could not be served.
    pub fn generate(
        &self,
        prompt: impl Into<Arc<Prompt>>,
        params: GenerationParams,
    ) -> Result<GenerationOutput, EngineError> {
        // Unbounded in form only: a request emits at most one event for each token of its context.
        let (sender, events) = crossbeam_channel::unbounded();
        let sink = Box::new(move |event| {
            // The receiver lives until the last event.
            let _ = sender.send(event);
        });
        self.submit(prompt, params, sink)?;
        let mut output = AnswerOutput::default();
        for event in events {
            match event {
                GenerationEvent::Prompt(ShownPrompt::Text(shown)) => output.text = shown,
                GenerationEvent::Finished { reason, usage, timings, .. } => {
                    let AnswerOutput { text, reasoning, tool_calls, .. } = output;
                    return Ok(GenerationOutput { text, reasoning, tool_calls, reason, usage, timings });
                }
                GenerationEvent::Failed(error) => return Err(error.into()),
                event => output.push(event),
            }
        }
        Err(RequestError::Internal(String::from("the request ended without its last event")).into())
    }

    /// Shows that a token can be decoded now, and says how long it took to know. A step that ended within the last
    /// second counts, and one that is being computed as long as it is within its own limit; an idle engine decodes one token
    /// for it. Blocks.
    ///
    /// # Errors
    /// When no token was decoded within `timeout` and no step is within its limit, or the engine is broken.
    pub fn probe(&self, timeout: Duration) -> Result<Duration, ProbeError> {
        let started = Instant::now();
        let Some(commands) = &self.commands else { return Err(ProbeError::ShuttingDown) };
        if let Some(reason) = self.stats.broken.get() {
            return Err(ProbeError::Broken(reason.clone()));
        }
        if self.stats.last_step_age().is_some_and(|age| age < PROBE_FRESH) {
            return Ok(started.elapsed());
        }
        self.interrupt.give_way();
        ask(&commands.sender, Command::Probe, timeout, || self.stats.running.progress())?;
        Ok(started.elapsed())
    }

    /// Why no token can be decoded any more, if that is so.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.stats.broken.get().map(String::as_str)
    }

    /// The counters, without a lock.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.stats.snapshot()
    }

    /// As of a step of which less is expected.
    #[cfg(test)]
    pub(crate) fn limit_step(&self, limit_ms: u64) {
        self.stats.running.limit_is(limit_ms);
    }

    /// As the watch over memory does.
    #[cfg(test)]
    pub(crate) fn degrade(&self, level: crate::ladder::DegradationLevel) {
        self.stats.pressure.set_level(level);
    }

    /// What is known of the model.
    #[must_use]
    pub fn model_info(&self) -> &ModelInfo {
        &self.info
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stats.shutting_down.store(true, Relaxed);
        self.interrupt.end_everything();
        if let Some(commands) = &self.commands {
            // When the channel is full, the thread sees the flag after the command it is at.
            let _ = commands.sender.try_send(Command::Shutdown);
        }
        // The pool ends with its jobs, the engine's thread with the pool's senders and this one.
        self.jobs = None;
        self.commands = None;
        let threads: Vec<JoinHandle<()>> =
            self.pool.drain(..).chain(self.thread.take()).chain(self.text.take()).collect();
        // A sink may hold the last handle of the engine. Then this is a thread of its own, which can wait neither for
        // itself nor for those that wait for it: they end by themselves.
        let here = std::thread::current().id();
        if threads.iter().any(|thread| thread.thread().id() == here) {
            return;
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("an engine thread panicked");
            }
        }
    }
}

/// Threads that sample: as many as compute, since between two steps none does.
fn sample_threads(threads: Option<u32>) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let all = threads.and_then(|threads| usize::try_from(threads).ok()).map_or(processors, |n| n.min(processors));
    all.min(MAX_SAMPLE_THREADS)
}

/// What a thread does. A panic breaks what it works for, which is then replaced, instead of going unnoticed.
pub(crate) fn or_break(broken: &OnceLock<String>, thread: &str, work: impl FnOnce()) {
    if std::panic::catch_unwind(AssertUnwindSafe(work)).is_err() {
        broken.get_or_init(|| format!("the thread {thread} panicked; see the log"));
    }
}

/// The engine's thread: commands between steps, blocking only when there is nothing to do.
fn run<B: Backend>(mut scheduler: Scheduler<B>, commands: &Receiver<Command>, interrupt: &Interrupt) {
    let mut probes: Vec<Sender<Result<(), ProbeError>>> = Vec::new();
    let mut next = receive(&mut scheduler, commands, interrupt);
    while let Some(first) = next {
        let was_idle = !scheduler.has_work();
        let mut command = Some(first);
        let mut gathers_until = None;
        while let Some(current) = command {
            match current {
                Command::Run(request) => scheduler.enqueue(request),
                // It was asked during a step, whose end shows it: the next one may take as long again.
                Command::Probe(reply) if scheduler.has_just_decoded() => tell(&reply, Ok(())),
                Command::Probe(reply) => probes.push(reply),
                // Whoever calls from here on is heard after the step that looks.
                Command::Wake(call) => drop(call),
                Command::Shutdown => {}
            }
            command = commands.try_recv().ok();
            if command.is_none() && was_idle {
                let now = Instant::now();
                let until = *gathers_until.get_or_insert(now + Duration::from_millis(GATHERING_MS));
                // Nobody came in time; that all senders are gone is seen by whoever waits for them next.
                command = commands.recv_deadline(until.min(now + scheduler.patience(now))).ok();
                scheduler.gathered_for(now.elapsed());
            }
        }
        next = steps(&mut scheduler, commands, interrupt, &mut probes);
    }
    scheduler.fail_all(&RequestError::ShuttingDown);
    let now = Instant::now();
    scheduler.flush(now, now + FLUSH_LIMIT);
}

/// Steps until a command comes; blocks for one when idle. `None`: every sender is gone.
fn steps<B: Backend>(
    scheduler: &mut Scheduler<B>,
    commands: &Receiver<Command>,
    interrupt: &Interrupt,
    probes: &mut Vec<Sender<Result<(), ProbeError>>>,
) -> Option<Command> {
    loop {
        if scheduler.shutting_down() {
            // Whatever still comes from the pool is dropped, and says so to its caller.
            scheduler.fail_all(&RequestError::ShuttingDown);
            probes.clear();
            return commands.recv().ok();
        }
        let outcome = guarded(scheduler, "a step", Scheduler::step).unwrap_or(StepOutcome::Failed);
        answer_probes(scheduler, outcome, probes);
        if scheduler.has_work() {
            match commands.try_recv() {
                Ok(command) => return Some(command),
                Err(_) => continue,
            }
        }
        return receive(scheduler, commands, interrupt);
    }
}

/// What the engine's thread does, so that a panic breaks the engine and tells so instead of ending the thread.
fn guarded<B: Backend, T>(
    scheduler: &mut Scheduler<B>,
    what: &str,
    work: impl FnOnce(&mut Scheduler<B>) -> T,
) -> Option<T> {
    let done = std::panic::catch_unwind(AssertUnwindSafe(|| work(scheduler))).ok();
    if done.is_none() {
        scheduler.break_down(format!("{what} panicked; see the log"));
    }
    done
}

/// Waits for a command, measures meanwhile what steps cost, and sees to what is due.
fn receive<B: Backend>(
    scheduler: &mut Scheduler<B>,
    commands: &Receiver<Command>,
    interrupt: &Interrupt,
) -> Option<Command> {
    loop {
        let measures = scheduler.may_measure();
        let patience = if measures { Duration::ZERO } else { scheduler.may_sleep_for(Instant::now()) };
        match commands.recv_timeout(patience) {
            Ok(command) => return Some(command),
            Err(RecvTimeoutError::Timeout) if measures => {
                guarded(scheduler, "measuring", |scheduler| scheduler.measure(interrupt));
            }
            Err(RecvTimeoutError::Timeout) => {
                guarded(scheduler, "maintenance", |scheduler| scheduler.maintain(Instant::now()));
                // One of them may be over by now: its text was, or its time is.
                if scheduler.has_paused() {
                    return Some(Command::Wake(None));
                }
            }
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

fn answer_probes<B: Backend>(
    scheduler: &mut Scheduler<B>,
    outcome: StepOutcome,
    probes: &mut Vec<Sender<Result<(), ProbeError>>>,
) {
    if probes.is_empty() {
        return;
    }
    let verdict = match outcome {
        StepOutcome::Decoded => Ok(()),
        StepOutcome::Failed if scheduler.has_work() => return,
        StepOutcome::Failed | StepOutcome::Idle => guarded(scheduler, "a probe", Scheduler::probe)
            .unwrap_or_else(|| Err(ProbeError::Broken(String::from("a probe panicked; see the log")))),
    };
    probes.drain(..).for_each(|reply| tell(&reply, verdict.clone()));
}

fn tell(probe: &Sender<Result<(), ProbeError>>, verdict: Result<(), ProbeError>) {
    // One that timed out does not listen any more.
    let _ = probe.send(verdict);
}

/// Puts a question to a thread and waits for its answer; a step that it is computing answers it, too, as long as it is within
/// its limit: `progress` is whether that is so, where there is one.
pub(crate) fn ask<C>(
    commands: &Sender<C>,
    question: impl FnOnce(Sender<Result<(), ProbeError>>) -> C,
    timeout: Duration,
    progress: impl Fn() -> Option<bool>,
) -> Result<(), ProbeError> {
    let started = Instant::now();
    let late = || ProbeError::Timeout { waited: started.elapsed() };
    let (reply, answer) = bounded(1);
    let mut question = Some(question(reply));
    loop {
        match progress() {
            Some(true) => return Ok(()),
            Some(false) => return Err(late()),
            None => {}
        }
        let patience = PROBE_LOOK_PERIOD.min(timeout.saturating_sub(started.elapsed()));
        if let Some(asked) = question.take() {
            match commands.send_timeout(asked, patience) {
                Ok(()) => {}
                Err(SendTimeoutError::Timeout(asked)) => question = Some(asked),
                Err(SendTimeoutError::Disconnected(_)) => return Err(ProbeError::ShuttingDown),
            }
        } else {
            match answer.recv_timeout(patience) {
                Ok(verdict) => return verdict,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(ProbeError::ShuttingDown),
            }
        }
        if started.elapsed() >= timeout {
            return Err(late());
        }
    }
}

/// Why a load is refused whose first tokens could not be decoded, or are no numbers.
fn not_warm(error: WarmUpError, config: &EngineConfig) -> LoadError {
    let draft = || config.speculation.draft_model.clone().unwrap_or_default();
    match error {
        WarmUpError::Model(NoNumbers::NotFinite) => LoadError::NotFinite { path: config.model_path.clone() },
        WarmUpError::Model(error @ NoNumbers::Even) => {
            let reason = format!("{error}: a norm, a scale or a matrix of the file is zero or not what it was");
            LoadError::Useless { path: config.model_path.clone(), reason }
        }
        WarmUpError::Model(error) => LoadError::WarmUp(error.to_string()),
        WarmUpError::Draft(NoNumbers::NotFinite) => LoadError::NotFinite { path: draft() },
        WarmUpError::Draft(error) => LoadError::WarmUp(format!("the draft model: {error}")),
    }
}

pub(crate) fn validate(config: &EngineConfig) -> Result<(), ParamError> {
    let in_range = |param: &str, value: u64, low: u64, high: u64| {
        if (low..=high).contains(&value) {
            Ok(())
        } else {
            Err(ParamError::new(param, format!("must be {low} to {high}, not {value}")))
        }
    };
    in_range("parallel", config.parallel.into(), 1, MAX_PARALLEL.into())?;
    in_range("max_queue", config.max_queue as u64, 0, MAX_QUEUE as u64)?;
    let prefill = config.prefill_tokens_per_step.into();
    in_range("prefill_tokens_per_step", prefill, 1, MAX_PREFILL_TOKENS_PER_STEP.into())?;
    in_range("threads", config.threads.unwrap_or(1).into(), 1, MAX_THREADS.into())?;
    in_range("ctx_size", config.ctx_size.into(), 0, i32::MAX as u64)?;
    in_range("step_ms_target", config.step_ms_target.unwrap_or(1).into(), 1, MAX_STEP_MS_TARGET.into())?;
    in_range("speculation.max_tokens", config.speculation.max_tokens.into(), 1, MAX_SPECULATION_TOKENS.into())?;
    in_range("speculation.draft_tokens", config.speculation.draft_tokens.into(), 1, MAX_SPECULATION_TOKENS.into())?;
    let cache = &config.prefix_cache;
    if cache.enabled && cache.disk.is_some() && cache.ram_bytes == 0 {
        return Err(ParamError::new("prefix_cache.ram_bytes", CacheError::DiskWithoutRam.to_string()));
    }
    let Some(pooled) = &config.pooled else { return Ok(()) };
    in_range("pooled_batch", pooled.max_batch.into(), 1, MAX_POOLED_BATCH.into())?;
    in_range("pooled_wait_ms", pooled.wait_ms.into(), 0, MAX_POOLED_WAIT_MS.into())?;
    in_range("pooled_tokens", pooled.batch_tokens.into(), 1, MAX_POOLED_TOKENS.into())
}
