//! Applies this pod's entry of `status.replicas`, under a field manager of its own: no other entry and no other field
//! can be touched by it.

use std::time::{Duration, Instant};

use gantry_crds::status::report::as_written;
use gantry_crds::status::{Degradation, ReplicaMemory, ReplicaStatus};
use gantry_crds::{GROUP, VERSION, agent_field_manager};
use gantry_engine::DegradationLevel;
use gantry_rollout::report::{Cadence, Decision, Figures, ToldDegradation, entry};
use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use super::AgentConfig;
use super::limits::{FIGURES_JITTER, LOOK_PERIOD, WRITE_LIMIT};
use super::watch::{Observed, api};
use crate::gates::Loaded;
use crate::gates::memory::{self, PodMemory};
use crate::rollout::Published;

/// The wait while there is no object to write to; its coming is an event.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct Writer {
    api: Api<DynamicObject>,
    service: String,
    pod: String,
    published: watch::Receiver<Published>,
    observed: watch::Receiver<Observed>,
    cadence: Cadence,
    degradation: ToldDegradation,
}

impl Writer {
    pub(super) fn new(
        client: Client,
        config: &AgentConfig,
        published: watch::Receiver<Published>,
        observed: watch::Receiver<Observed>,
    ) -> Self {
        Self {
            api: api(client, &config.namespace),
            service: config.service.clone(),
            pod: config.pod.clone(),
            published,
            observed,
            cadence: Cadence::default(),
            degradation: ToldDegradation::default(),
        }
    }

    /// Writes for as long as it is polled.
    pub(super) async fn run(mut self) {
        loop {
            let until = self.turn().await;
            tokio::select! {
                () = sleep_until(until.min(Instant::now() + LOOK_PERIOD).into()) => {}
                // An end of either is the end of the agent, which stops this task.
                changed = self.published.changed() => if changed.is_err() { return },
                changed = self.observed.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Writes if it is time, and says when to look again.
    async fn turn(&mut self) -> Instant {
        let observed = self.observed.borrow_and_update().clone();
        let Published { snapshot, serving } = self.published.borrow_and_update().clone();
        if !observed.exists {
            return Instant::now() + IDLE;
        }
        if self.cadence.is_lost(observed.has_entry, observed.resource_version) {
            tracing::warn!("this pod's entry was removed from the status and is written again");
        }
        let mut figures = serving.map(|serving| figures(&serving, memory::read())).unwrap_or_default();
        figures.degradation = self.degradation.of(figures.degradation, Instant::now());
        let now = entry(&self.pod, &snapshot, figures, observed.problem.as_deref(), Timestamp::now());
        match self.cadence.decide(&now, observed.replicas, Instant::now()) {
            Decision::LookAgain(at) => at,
            Decision::Write => {
                self.write(now).await;
                Instant::now()
            }
        }
    }

    async fn write(&mut self, entry: ReplicaStatus) {
        let parameters = PatchParams::apply(&agent_field_manager(&self.pod)).force();
        let patch = Patch::Apply(json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": "InferenceService",
            "metadata": {"name": self.service},
            "status": {"replicas": [as_written(&entry)]},
        }));
        let result = timeout(WRITE_LIMIT, self.api.patch_status(&self.service, &parameters, &patch)).await;
        let error = match result {
            Ok(Ok(object)) => {
                let written = object.metadata.resource_version.and_then(|version| version.parse().ok());
                self.cadence.written(entry, written, rand::random_range(0.0..=FIGURES_JITTER), Instant::now());
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {WRITE_LIMIT:?}"),
        };
        tracing::warn!(error, "cannot write this pod's status; it is tried again");
        self.cadence.failed(Instant::now());
    }
}

/// What is measured of the version that answers.
fn figures(serving: &Loaded, memory: Option<PodMemory>) -> Figures {
    let stats = serving.version.stats();
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    Figures {
        memory: Some(ReplicaMemory {
            predicted_bytes: Some(signed(serving.predicted_bytes)),
            measured_bytes: Some(signed(stats.worker_rss_bytes)),
            limit_bytes: memory.map(|memory| signed(memory.limit_bytes)),
        }),
        degradation: Some(degradation(stats.degradation)),
    }
}

fn degradation(level: DegradationLevel) -> Degradation {
    match level {
        DegradationLevel::Normal => Degradation::Normal,
        DegradationLevel::ReducedBatch => Degradation::ReducedBatch,
        DegradationLevel::EvictCache => Degradation::EvictCache,
        DegradationLevel::HighPriorityOnly => Degradation::HighPriorityOnly,
        DegradationLevel::Emergency => Degradation::Emergency,
    }
}
