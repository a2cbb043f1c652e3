//! Applies this pod's entry of `status.replicas`, under a field manager of its own: no other entry and no other field
//! can be touched by it.

use std::time::{Duration, Instant};

use gantry_crds::status::ReplicaStatus;
use gantry_crds::{GROUP, VERSION, agent_field_manager};
use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::DynamicObject;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout};

use super::AgentConfig;
use super::limits::{FIGURES_JITTER, LOOK_PERIOD, WRITE_LIMIT};
use super::report::{Cadence, Decision, entry};
use super::watch::{Observed, api};
use crate::gates::memory;
use crate::rollout::Snapshot;

/// The wait while there is no object to write to; its coming is an event.
const IDLE: Duration = Duration::from_secs(60);

pub(super) struct Writer {
    api: Api<DynamicObject>,
    service: String,
    pod: String,
    snapshots: watch::Receiver<Snapshot>,
    observed: watch::Receiver<Observed>,
    cadence: Cadence,
    /// Resource version of the last write: an older object does not know it.
    written_version: Option<u64>,
}

impl Writer {
    pub(super) fn new(
        client: Client,
        config: &AgentConfig,
        snapshots: watch::Receiver<Snapshot>,
        observed: watch::Receiver<Observed>,
    ) -> Self {
        Self {
            api: api(client, &config.namespace),
            service: config.service.clone(),
            pod: config.pod.clone(),
            snapshots,
            observed,
            cadence: Cadence::default(),
            written_version: None,
        }
    }

    /// Writes for as long as it is polled.
    pub(super) async fn run(mut self) {
        loop {
            let until = self.turn().await;
            tokio::select! {
                () = sleep_until(until.min(Instant::now() + LOOK_PERIOD).into()) => {}
                // An end of either is the end of the agent, which stops this task.
                changed = self.snapshots.changed() => if changed.is_err() { return },
                changed = self.observed.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Writes if it is time, and says when to look again.
    async fn turn(&mut self) -> Instant {
        let observed = self.observed.borrow_and_update().clone();
        let snapshot = self.snapshots.borrow_and_update().clone();
        if !observed.exists {
            return Instant::now() + IDLE;
        }
        if !observed.has_entry && self.written_version.is_some() && observed.resource_version >= self.written_version {
            tracing::warn!("this pod's entry was removed from the status and is written again");
            self.cadence.lost();
        }
        let now = entry(&self.pod, &snapshot, memory::read(), observed.problem.as_deref(), Timestamp::now());
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
            "status": {"replicas": [entry]},
        }));
        let result = timeout(WRITE_LIMIT, self.api.patch_status(&self.service, &parameters, &patch)).await;
        let error = match result {
            Ok(Ok(object)) => {
                self.written_version = object.metadata.resource_version.and_then(|version| version.parse().ok());
                self.cadence.written(entry, rand::random_range(0.0..=FIGURES_JITTER), Instant::now());
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {WRITE_LIMIT:?}"),
        };
        tracing::warn!(error, "cannot write this pod's status; it is tried again");
        self.cadence.failed(Instant::now());
    }
}
