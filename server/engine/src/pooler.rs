//! The embedder's state: open requests, whose texts take turns in the window, and the batches that leave it.
//!
//! Flow: [`Pooler::add`] → [`Pooler::turn`], again and again: a request's next text enters the window, those of higher
//! priority first, which waiting raises as in [`crate::queue`] (within one level one text a client and turn, and of a client
//! one a request, so that two thousand texts of one do not hold up the one of another), a batch that is full or due is computed,
//! each text's vector is sent at once, and the last one ends its request. A batch is what the backend computes in one go, and
//! no more than it is known to compute in [`MAX_POOLED_BATCH_MS`]: who comes meanwhile is looked at after that. One that
//! fails is computed text by text, so that whoever is at fault fails alone. Absent: threads, channels, tokenising
//! ([`crate::embedder`]).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::backend::{PooledBackend, Token};
use crate::error::RequestError;
use crate::event::{Activity, ActivitySink, PooledEvent, PooledSink, PooledStats};
use crate::finite::{NOT_FINITE, NoNumbers, is_vector};
use crate::monitor::Pressure;
use crate::params::{MAX_POOLED_BATCH_MS, Priority};
use crate::queue::aged_level;
use crate::ring::Ring;
use crate::stats::RunningStep;
use crate::window::{Batch, BatchWindow};

/// Batches of one text that fail in a row before the backend is taken for broken.
const FAILURES_BROKEN: u32 = 8;
/// Tokens of nobody's that a load computes, at the most.
const TRIAL_TOKENS: usize = 8;

/// An embedder's counters: written by its threads, read by anyone without a lock.
#[derive(Debug, Default)]
pub(crate) struct PooledCounters {
    /// Shared with what else serves the model.
    pub(crate) pressure: Arc<Pressure>,
    pub(crate) in_flight: AtomicU32,
    pub(crate) shutting_down: AtomicBool,
    /// Why nothing can be computed any more.
    pub(crate) broken: OnceLock<String>,
    computing: AtomicBool,
    pub(crate) running: RunningStep,
    steps: AtomicU64,
    batches: AtomicU64,
    texts: AtomicU64,
    tokens: AtomicU64,
    padding: AtomicU64,
    compute_us: AtomicU64,
    finished: AtomicU64,
    cancelled: AtomicU64,
    failed: AtomicU64,
}

impl PooledCounters {
    /// Counters of what shares this watch over memory.
    pub(crate) fn under(pressure: Arc<Pressure>) -> Self {
        Self { pressure, ..Self::default() }
    }

    pub(crate) fn snapshot(&self) -> PooledStats {
        PooledStats {
            in_flight: self.in_flight.load(Relaxed),
            computing: u32::from(self.computing.load(Relaxed)),
            step_age_ms: self.running.age().map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            steps: self.steps.load(Relaxed),
            batches_total: self.batches.load(Relaxed),
            texts_total: self.texts.load(Relaxed),
            tokens_total: self.tokens.load(Relaxed),
            padding_tokens_total: self.padding.load(Relaxed),
            compute_ms_total: Duration::from_micros(self.compute_us.load(Relaxed)).as_secs_f64() * 1e3,
            requests_finished_total: self.finished.load(Relaxed),
            requests_cancelled_total: self.cancelled.load(Relaxed),
            requests_failed_total: self.failed.load(Relaxed),
        }
    }
}

/// A place among the requests in flight; given back when dropped.
#[derive(Debug)]
pub(crate) struct PooledPermit(Arc<PooledCounters>);

impl PooledPermit {
    /// Takes a place, unless `limit` requests are in flight.
    pub(crate) fn take(counters: &Arc<PooledCounters>, limit: u32) -> Option<Self> {
        let taken = counters.in_flight.fetch_update(Relaxed, Relaxed, |n| (n < limit).then_some(n + 1));
        taken.ok().map(|_| Self(counters.clone()))
    }
}

impl Drop for PooledPermit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Sends a request's events, and its last one exactly once: dropped without it, it sends `Failed`.
pub(crate) struct Reply {
    sink: PooledSink,
    activity: Option<ActivitySink>,
    counters: Arc<PooledCounters>,
    /// Given back before the last event is sent, so that who hears of the end can submit again.
    place: Option<PooledPermit>,
    cancelled: Arc<AtomicBool>,
}

impl Reply {
    pub(crate) fn new(sink: PooledSink, place: PooledPermit, cancelled: Arc<AtomicBool>) -> Self {
        Self { sink, activity: None, counters: place.0.clone(), place: Some(place), cancelled }
    }

    /// Has the request's activity told, too.
    pub(crate) fn observed(mut self, activity: Option<ActivitySink>) -> Self {
        self.activity = activity;
        self
    }

    pub(crate) fn is(&self, activity: Activity) {
        if let Some(tell) = &self.activity {
            tell(activity);
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Relaxed)
    }

    pub(crate) fn fail(mut self, error: RequestError) {
        self.end(PooledEvent::Failed(error));
    }

    pub(crate) fn cancel(mut self) {
        self.end(PooledEvent::Cancelled);
    }

    fn end(&mut self, event: PooledEvent) {
        if self.place.take().is_some() {
            let count = match &event {
                PooledEvent::Cancelled => &self.counters.cancelled,
                PooledEvent::Failed(_) => &self.counters.failed,
                _ => &self.counters.finished,
            };
            count.fetch_add(1, Relaxed);
            self.send(event);
        }
    }

    /// A sink that panics harms its own request only, which is then cancelled.
    fn send(&mut self, event: PooledEvent) {
        if std::panic::catch_unwind(AssertUnwindSafe(|| (self.sink)(event))).is_err() {
            tracing::error!("a pooled request's sink panicked; the request is cancelled");
            self.cancelled.store(true, Relaxed);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        let error = if self.counters.shutting_down.load(Relaxed) {
            RequestError::ShuttingDown
        } else {
            RequestError::Internal(String::from("the request was dropped before it ended"))
        };
        self.end(PooledEvent::Failed(error));
    }
}

/// A request whose texts are tokens.
pub(crate) struct PooledRequest {
    pub(crate) reply: Reply,
    /// At least one, none empty or longer than the backend takes.
    pub(crate) texts: VecDeque<Vec<Token>>,
    /// Whose it is.
    pub(crate) client: u64,
    pub(crate) priority: Priority,
    pub(crate) submitted_at: Instant,
    /// The most that it may take, from its submission to its last vector's computation.
    pub(crate) limit: Option<Duration>,
}

impl PooledRequest {
    fn overdue(&self, now: Instant) -> Option<RequestError> {
        let (limit, waited) = (self.limit?, now.saturating_duration_since(self.submitted_at));
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        (waited >= limit).then(|| RequestError::DeadlineExceeded { waited_ms: ms(waited), limit_ms: ms(limit) })
    }
}

/// A request that has not ended.
struct Open {
    request: PooledRequest,
    /// Since when it waits for a turn: its submission, or the last of its texts that was taken. One whose texts are computed
    /// all the while does not wait, or long ones would go before whoever comes.
    waiting_since: Instant,
    /// Texts whose vectors are missing.
    left: usize,
    next_index: u32,
    prompt_tokens: u32,
}

impl Open {
    fn level(&self, now: Instant) -> usize {
        aged_level(self.request.priority, now.saturating_duration_since(self.waiting_since))
    }
}

/// One text in the window.
#[derive(Debug)]
pub(crate) struct Text {
    ticket: u64,
    index: u32,
    tokens: Vec<Token>,
}

/// When to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// At once: there is more to do.
    Now,
    /// When the window is over.
    At(Instant),
    /// When a request comes.
    Idle,
}

/// How many tokens are computed in [`MAX_POOLED_BATCH_MS`], by how long those of the load took, and then batches.
#[derive(Debug, Default)]
struct BatchPace {
    /// `None`: nothing was guessed, and no batch has taken longer.
    most_tokens: Option<usize>,
}

impl BatchPace {
    /// A first number, by a few tokens. Rather too low, since what any batch takes beside its tokens counts as theirs,
    /// and what only a first one does; those of requests raise it.
    fn guess(&mut self, tokens: usize, took: Duration) {
        self.most_tokens = Some(Self::in_time(tokens, took).max(1));
    }

    /// A batch that took too long lowers the number at once; one of at least half as many tokens that did not raises it, to
    /// twice itself or to that batch's tokens at most. What one of fewer took says nothing: most of that does not grow
    /// with the tokens.
    fn observe(&mut self, tokens: usize, took: Duration) {
        let in_time = Self::in_time(tokens, took);
        match self.most_tokens {
            _ if took > Duration::from_millis(MAX_POOLED_BATCH_MS) => {
                let most = self.most_tokens.unwrap_or(usize::MAX);
                self.most_tokens = Some(in_time.clamp(1, most));
            }
            Some(most) if tokens >= most / 2 => {
                self.most_tokens = Some(in_time.clamp(most, most.saturating_mul(2).max(tokens)));
            }
            _ => {}
        }
    }

    /// How many tokens are computed in time where so many took so long.
    fn in_time(tokens: usize, took: Duration) -> usize {
        let limit = Duration::from_millis(MAX_POOLED_BATCH_MS);
        (tokens as f64 * limit.as_secs_f64() / took.as_secs_f64().max(f64::MIN_POSITIVE)) as usize
    }

    /// The most tokens of a batch of several texts, where the backend takes so many.
    fn most_tokens(&self, backend: usize) -> usize {
        self.most_tokens.map_or(backend, |most| most.min(backend)).max(1)
    }
}

/// See the module.
pub(crate) struct Pooler<B> {
    backend: B,
    window: BatchWindow<Text>,
    /// Texts of a batch while there is memory enough.
    max_batch: u32,
    open: HashMap<u64, Open>,
    /// Requests with texts that are not in the window yet, by level, in the order of their turns.
    rings: [Ring; Priority::COUNT],
    tickets: u64,
    counters: Arc<PooledCounters>,
    pace: BatchPace,
    /// Vectors are brought to unit length; scores are not.
    normalises: bool,
    failures: u32,
}

impl<B: PooledBackend> Pooler<B> {
    pub(crate) fn new(
        backend: B,
        counters: Arc<PooledCounters>,
        max_batch: usize,
        wait: Duration,
        normalises: bool,
    ) -> Self {
        let window = BatchWindow::new(max_batch, wait);
        Self {
            backend,
            window,
            max_batch: u32::try_from(max_batch).unwrap_or(u32::MAX),
            open: HashMap::new(),
            rings: Default::default(),
            tickets: 0,
            counters,
            pace: BatchPace::default(),
            normalises,
            failures: 0,
        }
    }

    /// Takes a request.
    pub(crate) fn add(&mut self, request: PooledRequest, now: Instant) {
        self.tickets += 1;
        let left = request.texts.len();
        let tokens: usize = request.texts.iter().map(Vec::len).sum();
        let prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let open = Open { waiting_since: request.submitted_at, request, left, next_index: 0, prompt_tokens };
        self.rings[open.level(now)].push_back(open.request.client, self.tickets);
        self.open.insert(self.tickets, open);
    }

    /// Computes at most one batch of the window.
    pub(crate) fn turn(&mut self, now: Instant) -> Next {
        self.drop_ended(now);
        self.raise(now);
        match self.next_batch(now) {
            Some(batch) => {
                self.run(batch);
                Next::Now
            }
            None => self.window.deadline().map_or(Next::Idle, Next::At),
        }
    }

    /// What is computed next: a window that is over, or one that the texts in turn fill.
    fn next_batch(&mut self, now: Instant) -> Option<Batch<Text>> {
        let limits = self.backend.limits();
        let most_tokens = self.pace.most_tokens(limits.batch_tokens);
        let most_texts = self.counters.pressure.level().batch_limit(self.max_batch) as usize;
        self.window.limit(most_texts.min(limits.texts));
        if let Some(batch) = self.window.poll(now) {
            return Some(batch);
        }
        // One that does not fit waits in its ring, where those of a higher priority go before it.
        while let Some(ticket) = self.next_ticket() {
            let fits = |length: usize| self.window.tokens() + length <= most_tokens;
            if !self.window.is_empty() && !self.length_of(ticket).is_some_and(fits) {
                return self.window.flush();
            }
            let Some(text) = self.take_text(now) else { continue };
            let length = u32::try_from(text.tokens.len()).unwrap_or(u32::MAX);
            let filled = self.window.push(text, length, now);
            if filled.is_some() {
                return filled;
            }
            if self.window.tokens() >= most_tokens {
                return self.window.flush();
            }
        }
        None
    }

    /// Whether one token can be computed now.
    pub(crate) fn probe(&mut self) -> Result<(), NoNumbers> {
        self.compute(&[&[0]]).map(drop)
    }

    /// Computes a few tokens: a model that cannot, or whose vector is not finite then, is not handed out. Not a full
    /// batch, which takes many times as long as the rest of a load: what batches take is learnt from those of requests,
    /// and until then what these tokens took bounds them.
    pub(crate) fn warm_up(&mut self) -> Result<(), NoNumbers> {
        let text = vec![0; TRIAL_TOKENS.min(self.backend.limits().text_tokens)];
        let started = Instant::now();
        self.compute_one(&text)?;
        self.pace.guess(text.len(), started.elapsed());
        Ok(())
    }

    /// Ends everyone.
    pub(crate) fn fail_all(&mut self, error: &RequestError) {
        self.rings.iter_mut().for_each(Ring::clear);
        drop(self.window.flush());
        for open in std::mem::take(&mut self.open).into_values() {
            open.request.reply.fail(error.clone());
        }
    }

    /// Whose turn it is.
    fn next_ticket(&mut self) -> Option<u64> {
        loop {
            let ring = self.rings.iter_mut().rfind(|ring| !ring.is_empty())?;
            let ticket = ring.front()?;
            // One that has ended is in the ring until its turn.
            if self.open.get(&ticket).is_some_and(|open| !open.request.texts.is_empty()) {
                return Some(ticket);
            }
            ring.pop_front();
        }
    }

    /// The tokens of a request's next text.
    fn length_of(&self, ticket: u64) -> Option<usize> {
        self.open.get(&ticket)?.request.texts.front().map(Vec::len)
    }

    /// The text whose turn it is.
    fn take_text(&mut self, now: Instant) -> Option<Text> {
        let ticket = self.next_ticket()?;
        let ring = self.rings.iter_mut().rfind(|ring| !ring.is_empty())?;
        ring.pop_front();
        let open = self.open.get_mut(&ticket)?;
        let tokens = open.request.texts.pop_front()?;
        let index = open.next_index;
        open.next_index += 1;
        open.waiting_since = now;
        if !open.request.texts.is_empty() {
            self.rings[open.level(now)].push_back(open.request.client, ticket);
        }
        Some(Text { ticket, index, tokens })
    }

    /// Those that have waited long enough take their turns with those of the next level.
    fn raise(&mut self, now: Instant) {
        for level in 0..Priority::COUNT - 1 {
            let open = &self.open;
            let rises = |ticket: u64| open.get(&ticket).is_none_or(|open| open.level(now) != level);
            for (client, ticket) in self.rings[level].extract(rises) {
                self.rings[level + 1].push_back(client, ticket);
            }
        }
    }

    /// Lets go of requests that nobody waits for any more, or not for so long.
    fn drop_ended(&mut self, now: Instant) {
        let ends = |open: &mut Open| open.request.reply.is_cancelled() || open.request.overdue(now).is_some();
        for (_, open) in self.open.extract_if(|_, open| ends(open)) {
            match open.request.overdue(now).filter(|_| !open.request.reply.is_cancelled()) {
                Some(error) => open.request.reply.fail(error),
                None => open.request.reply.cancel(),
            }
        }
        let open = &self.open;
        self.window.remove_if(|text| !open.contains_key(&text.ticket));
    }

    fn run(&mut self, batch: Batch<Text>) {
        self.counters.batches.fetch_add(1, Relaxed);
        self.counters.texts.fetch_add(batch.requests.len() as u64, Relaxed);
        self.counters.tokens.fetch_add(batch.original_tokens(), Relaxed);
        self.counters.padding.fetch_add(batch.padded_tokens() - batch.original_tokens(), Relaxed);
        let (texts, padding_ratio) = (batch.requests.len(), batch.padding_ratio());
        tracing::debug!(texts, padding_ratio, open_ms = batch.opened_at.elapsed().as_millis() as u64, "pooled batch");
        let texts: Vec<&[Token]> = batch.requests.iter().map(|request| &request.value.tokens[..]).collect();
        let tickets: BTreeSet<u64> = batch.requests.iter().map(|request| request.value.ticket).collect();
        let results: Vec<Result<Vec<f32>, String>> = if tickets.iter().any(|&ticket| self.is_wanted(ticket)) {
            self.tell(&tickets, Activity::Begun);
            let results = match self.compute(&texts) {
                Ok(vectors) => vectors.into_iter().map(Ok).collect(),
                Err(error) if texts.len() == 1 => vec![Err(error.to_string())],
                Err(_) => texts.iter().map(|text| self.compute_one(text).map_err(|e| e.to_string())).collect(),
            };
            self.tell(&tickets, Activity::Paused);
            results
        } else {
            // Whoever asked has left; their requests end as cancelled.
            Vec::new()
        };
        for (text, result) in batch.answer(results, || Err(String::from("the model gave no vector"))) {
            self.deliver(&text, result);
        }
    }

    fn tell(&self, tickets: &BTreeSet<u64>, activity: Activity) {
        for open in tickets.iter().filter_map(|ticket| self.open.get(ticket)) {
            open.request.reply.is(activity);
        }
    }

    fn is_wanted(&self, ticket: u64) -> bool {
        self.open.get(&ticket).is_some_and(|open| !open.request.reply.is_cancelled())
    }

    fn compute_one(&mut self, text: &[Token]) -> Result<Vec<f32>, NoNumbers> {
        let vector = self.compute(&[text])?.pop();
        vector.ok_or_else(|| NoNumbers::Failed(String::from("the model gave no vector")))
    }

    /// A vector of numbers for each text, or none for any. What a text computed that has none is not left for others to
    /// look at, and where a token of nobody's has a vector afterwards, it was the text's fault alone.
    fn compute(&mut self, texts: &[&[Token]]) -> Result<Vec<Vec<f32>>, NoNumbers> {
        let computed = self.embed(texts);
        let is_texts_fault = matches!(computed, Err(NoNumbers::NotFinite)) && {
            self.backend.scrub();
            texts.len() == 1 && self.embed(&[&[0]]).is_ok()
        };
        match &computed {
            Ok(_) => self.failures = 0,
            Err(error) if texts.len() == 1 && !is_texts_fault => {
                self.failures += 1;
                if self.failures >= FAILURES_BROKEN {
                    self.counters.broken.get_or_init(|| error.to_string());
                }
            }
            Err(_) => {}
        }
        computed
    }

    fn embed(&mut self, texts: &[&[Token]]) -> Result<Vec<Vec<f32>>, NoNumbers> {
        let started = Instant::now();
        self.counters.computing.store(true, Relaxed);
        self.counters.running.begin();
        let computed = std::panic::catch_unwind(AssertUnwindSafe(|| self.backend.embed(texts)));
        self.counters.computing.store(false, Relaxed);
        self.counters.running.end();
        self.counters.steps.fetch_add(1, Relaxed);
        let took = started.elapsed();
        self.pace.observe(texts.iter().map(|text| text.len()).sum(), took);
        self.counters.compute_us.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
        let computed = computed.unwrap_or_else(|_| Err(String::from("the backend panicked; see the log")));
        let vectors = computed.map_err(NoNumbers::Failed)?;
        if vectors.len() != texts.len() {
            return Err(NoNumbers::Failed(String::from("the model gave not as many vectors as texts")));
        }
        if vectors.iter().all(|vector| is_vector(vector)) { Ok(vectors) } else { Err(NoNumbers::NotFinite) }
    }

    fn deliver(&mut self, text: &Text, result: Result<Vec<f32>, String>) {
        let normalises = self.normalises;
        if !self.is_wanted(text.ticket) {
            // One that failed by another of its texts has ended already.
            if let Some(open) = self.open.remove(&text.ticket) {
                open.request.reply.cancel();
            }
            return;
        }
        let Some(open) = self.open.get_mut(&text.ticket) else { return };
        let sent = result.and_then(|vector| ready(vector, normalises)).map(|vector| {
            open.request.reply.send(PooledEvent::Vector { index: text.index, vector });
            open.left -= 1;
            open.left == 0
        });
        match sent {
            Ok(false) => {}
            Ok(true) => {
                if let Some(mut open) = self.open.remove(&text.ticket) {
                    open.request.reply.end(PooledEvent::Finished { prompt_tokens: open.prompt_tokens });
                }
            }
            Err(reason) => {
                tracing::error!(reason, "a text could not be computed");
                if let Some(open) = self.open.remove(&text.ticket) {
                    let message = format!("text {} could not be computed: {reason}", text.index);
                    open.request.reply.fail(RequestError::Internal(message));
                }
            }
        }
    }
}

/// A vector as it is sent: of unit length, or the first of a classifier's scores. JSON has no word for what is not finite.
fn ready(mut vector: Vec<f32>, normalises: bool) -> Result<Vec<f32>, String> {
    if normalises {
        let norm = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        if norm > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
        }
    } else {
        vector.truncate(1);
    }
    // The norm of numbers that are finite may not be.
    if !is_vector(&vector) {
        return Err(String::from(NOT_FINITE));
    }
    Ok(vector)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_as_many_tokens_as_are_computed_in_time() {
        let mut pace = BatchPace::default();
        let mut after = |tokens, took_ms| {
            pace.observe(tokens, Duration::from_millis(took_ms));
            pace.most_tokens(512)
        };
        let limit = MAX_POOLED_BATCH_MS;
        assert_eq!(after(512, limit), 512);
        assert_eq!(after(512, 4 * limit), 128);
        // What few tokens take is no measure of many.
        assert_eq!(after(1, limit), 128);
        assert_eq!(after(128, limit), 128);
        assert_eq!(after(128, limit / 10), 256);
        assert_eq!(after(250, 0), 512);
        assert_eq!(after(16, 100 * limit), 1);
        for most in [2, 4, 8] {
            assert_eq!(after(most / 2, 1), most, "it recovers");
        }
        assert_eq!(after(100, 1), 100, "as many were computed in time");
    }

    #[test]
    fn a_first_batch_has_as_many_tokens_as_a_few_make_expect() {
        let limit = MAX_POOLED_BATCH_MS;
        for (took_ms, most) in [(0, 512), (1, 512), (limit / 2, 16), (limit, 8), (4 * limit, 2), (99 * limit, 1)] {
            let mut pace = BatchPace::default();
            pace.guess(8, Duration::from_millis(took_ms));
            assert_eq!(pace.most_tokens(512), most, "{took_ms} ms");
        }
    }
}
