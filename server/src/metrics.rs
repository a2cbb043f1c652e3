//! What `/metrics` tells: counters and histograms of requests, kept as they happen, and figures of the resident
//! versions, read when they are asked for.
//!
//! Labels are enums or names of versions. A version that is gone keeps its request counters, as Prometheus wants it,
//! and loses its gauges.

mod engine;
mod recent;
mod store;

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use gantry_core::{Priority, Timings, Usage};
use gantry_engine::{Device, ModelInfo};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric, LabelValueEncoder, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::output::Output;
use crate::routing::Router;
use crate::serve::Phase;
use crate::telemetry;
use crate::version::{Version, VersionStats, WorkerStats};
use recent::Recent;
pub use recent::RecentFigures;
pub use store::{StoreMetrics, StoreOperation, StoreOutcome};

/// The content type of `/metrics`.
pub const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// `/v1/embeddings` and `/embeddings`.
    Embeddings,
    /// `/v1/rerank`.
    Rerank,
    /// `/v1/score`.
    Score,
    /// `/infill`.
    Infill,
    /// `/generate`.
    Generate,
    /// `/chat`.
    GenerateChat,
    /// `/tokenize`, `/detokenize`, `/apply-template` and `/v1/messages/count_tokens`.
    Tokenizer,
    /// `/v1/models` and below.
    Models,
    /// Anything else.
    Other,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Answered.
    Ok,
    /// Refused, and it was the request's fault (4xx).
    Refused,
    /// Refused, and it was not (5xx).
    Failed,
    /// The stream began well and ended with an error.
    Broken,
    /// The client left first.
    Disconnected,
}

impl Outcome {
    /// The outcome that goes with an HTTP status.
    #[must_use]
    pub fn of_status(status: u16) -> Self {
        match status {
            ..400 => Self::Ok,
            400..500 => Self::Refused,
            _ => Self::Failed,
        }
    }

    /// The label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Broken => "broken",
            Self::Disconnected => "disconnected",
        }
    }
}

impl Route {
    /// The label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Infill => "infill",
            Self::Generate => "generate",
            Self::GenerateChat => "chat",
            Self::Tokenizer => "tokenizer",
            Self::Models => "models",
            Self::Other => "other",
        }
    }
}

impl EncodeLabelValue for Route {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.as_str())
    }
}

impl EncodeLabelValue for Outcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.as_str())
    }
}

/// A version, and the name under which clients ask for its model: neither changes while the series lasts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct VersionLabels {
    /// Name of the version; empty for what came to none.
    pub version: String,
    /// Name of its model in the API.
    pub model: String,
}

impl VersionLabels {
    /// The labels of `version`.
    #[must_use]
    pub fn of(version: &Version) -> Self {
        let spec = version.spec();
        Self { version: spec.name.clone(), model: spec.served_name.clone() }
    }
}

/// Labels of [`Metrics::requests`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: Route,
    #[prometheus(flatten)]
    version: VersionLabels,
    status: u16,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    #[prometheus(flatten)]
    version: VersionLabels,
    stage: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PriorityLabels {
    #[prometheus(flatten)]
    version: VersionLabels,
    priority: &'static str,
}

/// Everything that is counted.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    first_token: Family<VersionLabels, Histogram, fn() -> Histogram>,
    between_tokens: Family<VersionLabels, Histogram, fn() -> Histogram>,
    whole: Family<VersionLabels, Histogram, fn() -> Histogram>,
    stages: Family<StageLabels, Histogram, fn() -> Histogram>,
    prioritised: Family<PriorityLabels, Counter>,
    prompt_tokens: Family<VersionLabels, Counter>,
    cached_tokens: Family<VersionLabels, Counter>,
    completion_tokens: Family<VersionLabels, Counter>,
    connections: Gauge,
    shed: Family<PhaseLabel, Counter>,
    refused: Counter,
    recent: Arc<Recent>,
}

/// From 0.5 ms to about 65 s.
fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 18))
}

/// From 5 ms to about 11 min.
fn whole_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 18))
}

impl Metrics {
    /// Metrics of a front that serves what `router` holds, and of which `output` waits for clients. Each series has a
    /// label of the InferenceService `service` where there is one. `store`: of the store of responses, if there is one.
    #[must_use]
    pub fn new(
        router: Arc<Router>,
        output: Arc<Output>,
        service: Option<String>,
        store: Option<&StoreMetrics>,
    ) -> Arc<Self> {
        let labels = service.map(|service| (Cow::Borrowed("service"), Cow::Owned(service)));
        let mut registry = Registry::with_prefix_and_labels("gantry", labels.into_iter());
        let requests = Family::<RequestLabels, Counter>::default();
        let latency = || Family::new_with_constructor(latency_histogram as fn() -> Histogram);
        let (first_token, between_tokens) = (latency(), latency());
        let whole = Family::new_with_constructor(whole_histogram as fn() -> Histogram);
        let stages = Family::new_with_constructor(latency_histogram as fn() -> Histogram);
        let prioritised = Family::<PriorityLabels, Counter>::default();
        let prompt_tokens = Family::<VersionLabels, Counter>::default();
        let cached_tokens = Family::<VersionLabels, Counter>::default();
        let completion_tokens = Family::<VersionLabels, Counter>::default();
        let connections = Gauge::<i64>::default();
        registry.register("requests", "Requests that ended", requests.clone());
        registry.register(
            "time_to_first_token_seconds",
            "From a request's arrival to the first text of its answer",
            first_token.clone(),
        );
        registry.register(
            "inter_token_latency_seconds",
            "Time between two pieces of an answer's text",
            between_tokens.clone(),
        );
        registry.register(
            "request_duration_seconds",
            "From a request's arrival to the end of its answer, for those that were answered",
            whole.clone(),
        );
        registry.register(
            "answer_stage_seconds",
            "Time of an answer in each of its stages: tokenize, queue, prefill and decode",
            stages.clone(),
        );
        registry.register("prompt_tokens", "Tokens of prompts of finished requests", prompt_tokens.clone());
        registry.register(
            "cached_tokens",
            "Tokens of prompts of finished requests that needed no computation",
            cached_tokens.clone(),
        );
        registry.register(
            "requests_by_priority",
            "Requests that were taken and ended, by their priority",
            prioritised.clone(),
        );
        registry.register("completion_tokens", "Tokens generated for finished requests", completion_tokens.clone());
        registry.register("connections", "Open connections", connections.clone());
        let shed = Family::<PhaseLabel, Counter>::default();
        for phase in [Phase::Waiting, Phase::Idle, Phase::Unread, Phase::Receiving] {
            drop(shed.get_or_create(&PhaseLabel { phase: phase.as_str() }));
        }
        registry.register(
            "connections_shed",
            "Connections closed to make room: waiting, of which no whole head had come, idle, receiving a body, or with an answer that is unread",
            shed.clone(),
        );
        let refused = Counter::default();
        registry.register(
            "connections_refused",
            "Connections closed at once, since their address had as many as one may have and had asked for something on all",
            refused.clone(),
        );
        if let Some(store) = store {
            store.register(&mut registry);
        }
        registry.register_collector(Box::new(RouterCollector { router, output }));
        Arc::new(Self {
            registry,
            requests,
            first_token,
            between_tokens,
            whole,
            stages,
            prioritised,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            connections,
            shed,
            refused,
            recent: Arc::default(),
        })
    }

    /// The text for Prometheus.
    ///
    /// # Errors
    /// Only if memory for the text cannot be had.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }

    /// Counts a request that ended.
    pub fn request_ended(&self, route: Route, version: &VersionLabels, status: u16, outcome: Outcome) {
        let labels = RequestLabels { route, version: version.clone(), status, outcome };
        self.requests.get_or_create(&labels).inc();
        if route != Route::Other {
            self.recent.ended();
        }
    }

    /// What there was lately.
    #[must_use]
    pub fn recent(&self) -> RecentFigures {
        self.recent.figures()
    }

    /// Counts a request that ended, by its priority.
    pub fn prioritised(&self, version: &VersionLabels, priority: Priority) {
        let labels = PriorityLabels { version: version.clone(), priority: priority.as_str() };
        self.prioritised.get_or_create(&labels).inc();
    }

    /// Where a version's latencies are noted; to be kept for as long as there are some, since finding it costs more
    /// than a note.
    #[must_use]
    pub fn latencies(&self, version: &VersionLabels) -> Latencies {
        Latencies {
            first_token: self.first_token.get_or_create_owned(version),
            between_tokens: self.between_tokens.get_or_create_owned(version),
            recent: Arc::clone(&self.recent),
        }
    }

    /// Notes an answer that was given whole.
    pub fn answered(&self, version: &VersionLabels, took: Duration, usage: &Usage) {
        self.whole.get_or_create(version).observe(took.as_secs_f64());
        self.recent.whole(took);
        self.prompt_tokens.get_or_create(version).inc_by(u64::from(usage.prompt_tokens));
        self.cached_tokens.get_or_create(version).inc_by(u64::from(usage.cached_tokens));
        self.completion_tokens.get_or_create(version).inc_by(u64::from(usage.completion_tokens));
    }

    /// Notes where the time of an answer went.
    pub fn timed(&self, version: &VersionLabels, timings: &Timings) {
        let Timings { tokenize_ms, queue_ms, prefill_ms, decode_ms, .. } = *timings;
        let stages = [("tokenize", tokenize_ms), ("queue", queue_ms), ("prefill", prefill_ms), ("decode", decode_ms)];
        for (stage, ms) in stages {
            let labels = StageLabels { version: version.clone(), stage };
            self.stages.get_or_create(&labels).observe(ms / 1e3);
        }
    }

    /// Counts a connection that was closed to make room.
    pub fn connection_shed(&self, phase: Phase) {
        self.shed.get_or_create(&PhaseLabel { phase: phase.as_str() }).inc();
    }

    /// Counts a connection that was closed at once: its address had as many as one may have.
    pub fn connection_refused(&self) {
        self.refused.inc();
    }

    /// Counts a connection as open until the guard is dropped.
    #[must_use]
    pub fn connection(self: &Arc<Self>) -> ConnectionGuard {
        self.connections.inc();
        ConnectionGuard(Arc::clone(self))
    }
}

/// See [`Metrics::latencies`].
pub struct Latencies {
    first_token: Histogram,
    between_tokens: Histogram,
    recent: Arc<Recent>,
}

impl Latencies {
    /// Notes how long the first text took.
    pub fn first_token(&self, took: Duration) {
        self.first_token.observe(took.as_secs_f64());
        self.recent.first_token(took);
    }

    /// Notes the time between two pieces of text.
    pub fn between_tokens(&self, gap: Duration) {
        self.between_tokens.observe(gap.as_secs_f64());
    }
}

/// See [`Metrics::connection`].
pub struct ConnectionGuard(Arc<Metrics>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.connections.dec();
    }
}

struct RouterCollector {
    router: Arc<Router>,
    output: Arc<Output>,
}

impl fmt::Debug for RouterCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RouterCollector")
    }
}

impl Collector for RouterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let swaps = ConstCounter::new(self.router.swaps());
        let help = "Times that another version became active, the first one included";
        swaps.encode(encoder.encode_descriptor("version_swaps", help, None, swaps.metric_type())?)?;
        let waiting = ConstGauge::new(self.router.held().waiting() as f64);
        let help = "Requests that wait for a model to be loaded, while none answers";
        waiting.encode(encoder.encode_descriptor("requests_held", help, None, waiting.metric_type())?)?;
        let lost = ConstCounter::new(telemetry::lost_lines());
        let help = "Lines of the log that were lost since nobody read it";
        lost.encode(encoder.encode_descriptor("log_lines_lost", help, None, lost.metric_type())?)?;
        let held = ConstGauge::new(self.output.held_bytes() as f64);
        let help = "Memory that answers hold until their clients have taken it";
        held.encode(encoder.encode_descriptor("undelivered_bytes", help, None, held.metric_type())?)?;
        let ended = ConstCounter::new(self.output.ended());
        let help = "Answers that ended, since their clients took too little of what waited for them";
        ended.encode(encoder.encode_descriptor("answers_ended_unread", help, None, ended.metric_type())?)?;
        let build = [("version", env!("CARGO_PKG_VERSION"))];
        let mut family =
            encoder.encode_descriptor("build_info", "1 for the release of this server", None, MetricType::Gauge)?;
        ConstGauge::new(1_i64).encode(family.encode_family(&build)?)?;
        Resident::of(&self.router).encode(&mut encoder)
    }
}

/// The versions that are loaded, as of one moment.
struct Resident(Vec<ResidentVersion>);

struct ResidentVersion {
    labels: VersionLabels,
    /// Whether it is the active one; else it is a candidate, or kept as the way back.
    is_active: bool,
    /// The share of the new requests that goes to it.
    share: f64,
    stats: VersionStats,
    model: Option<ModelInfo>,
}

impl ResidentVersion {
    fn labels(&self) -> [(&str, &str); 2] {
        [("version", &self.labels.version), ("model", &self.labels.model)]
    }
}

impl Resident {
    fn of(router: &Router) -> Self {
        let routing = router.routing();
        let read = |(version, is_active, share): (Option<Arc<Version>>, bool, f64)| {
            let version = version?;
            Some(ResidentVersion {
                labels: VersionLabels::of(&version),
                is_active,
                share,
                stats: version.stats(),
                model: version.model(),
            })
        };
        let (candidate, share) = routing.canary.map_or((None, 0.0), |(version, share)| (Some(version), share.ratio()));
        let all = [(routing.active, true, 1.0 - share), (candidate, false, share), (routing.previous, false, 0.0)];
        Self(all.into_iter().filter_map(read).collect())
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "1 for the active version, 0 for a candidate that answers a share of the requests, and for the version before it, \
                    which is kept loaded for a while";
        let mut family = encoder.encode_descriptor("version_active", help, None, MetricType::Gauge)?;
        for version in &self.0 {
            ConstGauge::new(i64::from(version.is_active)).encode(family.encode_family(&version.labels())?)?;
        }
        let help = "Share of the new requests that goes to the version";
        let mut family = encoder.encode_descriptor("version_share", help, None, MetricType::Gauge)?;
        for version in &self.0 {
            ConstGauge::new(version.share).encode(family.encode_family(&version.labels())?)?;
        }
        for (name, help, kind, figure) in FIGURES {
            let mut family = encoder.encode_descriptor(name, help, None, *kind)?;
            for version in &self.0 {
                encode_figure(*kind, figure(&version.stats), family.encode_family(&version.labels())?)?;
            }
        }
        self.encode_workers(encoder)?;
        self.encode_devices(encoder)
    }

    fn workers(&self) -> impl Iterator<Item = (Vec<(&str, String)>, &WorkerStats)> {
        self.0.iter().flat_map(|version| {
            version.stats.workers.iter().enumerate().map(move |(index, worker)| {
                let own = version.labels().map(|(name, value)| (name, value.to_owned()));
                (own.into_iter().chain([("worker", index.to_string())]).collect(), worker)
            })
        })
    }

    fn encode_workers(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let workers: Vec<_> = self.workers().collect();
        for (name, help, kind, figure) in WORKER_FIGURES {
            let mut family = encoder.encode_descriptor(name, help, None, *kind)?;
            for (labels, worker) in &workers {
                encode_figure(*kind, figure(worker), family.encode_family(&labels.as_slice())?)?;
            }
        }
        engine::encode(encoder, &workers)?;
        let mut family =
            encoder.encode_descriptor("worker_state", "1 for the worker's state", None, MetricType::Gauge)?;
        for (labels, worker) in &workers {
            let labels = [labels.as_slice(), &[("state", worker.health.label().to_owned())]].concat();
            ConstGauge::new(1_i64).encode(family.encode_family(&labels.as_slice())?)?;
        }
        Ok(())
    }

    fn encode_devices(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let models = || self.0.iter().filter_map(|version| Some((version.labels(), version.model.as_ref()?)));
        let help = "1 for the CPU backend that computes: builtin, or the variant that was loaded";
        let mut family = encoder.encode_descriptor("backend_info", help, None, MetricType::Gauge)?;
        for (labels, model) in models() {
            let features = model.backends.cpu_features.join(" ");
            let own = [("cpu", model.backends.cpu.as_str()), ("features", features.as_str())];
            ConstGauge::new(1_i64).encode(family.encode_family(&[labels, own].concat())?)?;
        }
        for (name, help, figure) in DEVICE_FIGURES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (labels, model) in models() {
                for device in &model.backends.devices {
                    let own = [
                        ("device", device.name.as_str()),
                        ("kind", device.kind.as_str()),
                        ("description", device.description.as_str()),
                    ];
                    let labels = [labels.as_slice(), own.as_slice()].concat();
                    ConstGauge::new(figure(device)).encode(family.encode_family(&labels.as_slice())?)?;
                }
            }
        }
        Ok(())
    }
}

fn encode_figure(kind: MetricType, figure: f64, encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
    match kind {
        MetricType::Counter => ConstCounter::new(figure).encode(encoder),
        _ => ConstGauge::new(figure).encode(encoder),
    }
}

/// A figure of a resident version: its name, what it is, and how to read it.
type Figure = (&'static str, &'static str, MetricType, fn(&VersionStats) -> f64);

const GAUGE: MetricType = MetricType::Gauge;
const COUNTER: MetricType = MetricType::Counter;

const FIGURES: &[Figure] = &[
    ("requests_queued", "Requests that wait for a sequence", GAUGE, |s| f64::from(s.queued)),
    (
        "requests_running",
        "Requests that have begun and are not paused: they hold a sequence, or wait for one to go on",
        GAUGE,
        |s| f64::from(s.running),
    ),
    ("slots", "Sequences that can generate at once", GAUGE, |s| f64::from(s.slots)),
    ("queue_limit", "Requests that may wait", GAUGE, |s| s.max_queue as f64),
    ("tokens_per_second", "Tokens generated a second, over the last seconds", GAUGE, |s| s.tokens_per_second),
    ("kv_cells_used", "KV cells in use", GAUGE, |s| s.kv_used_cells as f64),
    ("kv_cells", "KV cells there are", GAUGE, |s| s.kv_total_cells as f64),
    ("resident_bytes", "Memory of the workers in RAM, mapped pages counted once", GAUGE, |s| s.worker_rss_bytes as f64),
    ("requests_retried", "Requests given to another worker because theirs died", COUNTER, |s| s.retries as f64),
    ("degradation_level", "0 while all is served, up to 4 (nothing new is) as memory runs short", GAUGE, |s| {
        engine::rank(s.degradation)
    }),
    ("accepting", "1 while the next request would be let into the queue", GAUGE, |s| f64::from(u8::from(s.accepting))),
];

/// A figure of a device that a version's workers compute with.
type DeviceFigure = (&'static str, &'static str, fn(&Device) -> f64);

const DEVICE_FIGURES: &[DeviceFigure] = &[
    ("device_memory_bytes", "Memory of a device", |d| d.memory_bytes as f64),
    (
        "device_free_bytes_at_start",
        "What of it was free when a worker began; of main memory, what could be had without swapping",
        |d| d.free_bytes as f64,
    ),
];

/// A figure of one worker.
type WorkerFigure = (&'static str, &'static str, MetricType, fn(&WorkerStats) -> f64);

const WORKER_FIGURES: &[WorkerFigure] = &[
    ("worker_dispatchable", "1 while the worker gets requests", GAUGE, |w| f64::from(u8::from(w.dispatchable))),
    ("worker_requests", "Requests that the worker has", GAUGE, |w| f64::from(w.in_flight)),
    ("worker_requests_running", "Requests that it has begun and that are not paused", GAUGE, |w| f64::from(w.running)),
    ("worker_tokens_per_second", "Tokens it generated a second, over the last seconds", GAUGE, |w| {
        w.engine.tokens_per_second
    }),
    ("worker_prefill_budget", "Prompt tokens that its last step might take", GAUGE, |w| {
        f64::from(w.engine.prefill_budget_tokens)
    }),
    ("worker_step_target_seconds", "How long its last step might take", GAUGE, |w| w.engine.step_target_ms / 1e3),
    ("worker_kv_cells_used", "KV cells in use", GAUGE, |w| w.engine.kv_used_cells as f64),
    ("worker_kv_cells", "KV cells it has", GAUGE, |w| w.engine.kv_total_cells as f64),
    ("worker_resident_bytes", "Its memory in RAM, with the pages that it shares", GAUGE, |w| w.rss_bytes as f64),
    ("worker_restarts", "How often it died", COUNTER, |w| f64::from(w.restarts)),
    (
        "worker_threads",
        "Threads that it may compute with: fewer than it was loaded for while others compute beside it",
        GAUGE,
        |w| f64::from(w.threads),
    ),
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::limits::OUTPUT_BUDGET_BYTES;

    #[test]
    fn what_was_counted_is_told() {
        let metrics = Metrics::new(Router::new(), Output::new(OUTPUT_BUDGET_BYTES), Some("chat".to_owned()), None);
        let v1 = VersionLabels { version: "v1".to_owned(), model: "m".to_owned() };
        metrics.request_ended(Route::Chat, &v1, 200, Outcome::Ok);
        metrics.request_ended(Route::Chat, &v1, 200, Outcome::Ok);
        metrics.latencies(&v1).first_token(Duration::from_millis(3));
        let usage = Usage { prompt_tokens: 5, completion_tokens: 7, cached_tokens: 4, reasoning_tokens: 0 };
        metrics.answered(&v1, Duration::from_secs(1), &usage);
        metrics.prioritised(&v1, Priority::High);
        metrics.timed(&v1, &Timings { queue_ms: 250.0, ..Timings::default() });
        let connection = metrics.connection();
        let text = metrics.encode().unwrap();
        for line in [
            "gantry_requests_total{service=\"chat\",route=\"chat_completions\",version=\"v1\",model=\"m\",status=\"200\",outcome=\"ok\"} 2",
            "gantry_time_to_first_token_seconds_count{service=\"chat\",version=\"v1\",model=\"m\"} 1",
            "gantry_completion_tokens_total{service=\"chat\",version=\"v1\",model=\"m\"} 7",
            "gantry_cached_tokens_total{service=\"chat\",version=\"v1\",model=\"m\"} 4",
            "gantry_answer_stage_seconds_sum{service=\"chat\",version=\"v1\",model=\"m\",stage=\"queue\"} 0.25",
            "gantry_requests_by_priority_total{service=\"chat\",version=\"v1\",model=\"m\",priority=\"high\"} 1",
            "gantry_connections{service=\"chat\"} 1",
            "gantry_version_swaps_total{service=\"chat\"} 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is missing in:\n{text}");
        }
        drop(connection);
        assert!(metrics.encode().unwrap().contains("gantry_connections{service=\"chat\"} 0"));
    }
}
