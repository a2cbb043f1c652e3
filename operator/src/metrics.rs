//! Metrics of the operator, and of services as it sees them; what a service answers is told by its pods.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use gantry_crds::{
    InferenceService,
    conditions::ConditionType,
    status::{RolloutStatus, RolloutStep},
};
use jiff::Timestamp;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric, text::encode},
    metrics::{
        MetricType,
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};

use crate::decide::Transition;

/// Upper bounds in seconds: a settled reconcile takes microseconds, one with writes some round trips.
const DURATION_BUCKETS_SECONDS: [f64; 9] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0];

/// Upper bounds in seconds: a switch takes one or two, a preparation up to its deadline, a bake as long as it was told.
const STEP_BUCKETS_SECONDS: [f64; 7] = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0];

/// How a reconcile ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ReconcileOutcome {
    /// All is written that had to be.
    Done,
    /// A newer object was there: tried again with it.
    Stale,
    /// The API server refused a write.
    Refused,
    /// The API server could not be reached, or failed.
    Failed,
}

/// How a rollout went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum RolloutOutcome {
    /// It began.
    Started,
    /// It was given up for the user's sake.
    Cancelled,
    /// Its version stays.
    Settled,
    /// Its version was refused.
    Rejected,
    /// Its version was taken back.
    RolledBack,
    /// Another one took its place: before its version answered, or before that had baked.
    Superseded,
}

impl RolloutOutcome {
    const ALL: [Self; 6] =
        [Self::Started, Self::Cancelled, Self::Settled, Self::Rejected, Self::RolledBack, Self::Superseded];

    /// The outcome of the bake that went on beside a candidate, or was to, where it is over.
    fn of_bake(before: &RolloutStatus, after: Option<&RolloutStatus>) -> Option<Self> {
        let bakes = |rollout: &RolloutStatus| rollout.step == RolloutStep::Bake || rollout.bake.is_some();
        let after = after.filter(|after| bakes(before) && !bakes(after))?;
        match after.step {
            // Its time was over.
            RolloutStep::Prepare | RolloutStep::Canary => Some(Self::Settled),
            RolloutStep::Commit => Some(Self::Superseded),
            // That one is counted when it is done.
            RolloutStep::Rollback | RolloutStep::Bake | RolloutStep::Unknown(_) => None,
        }
    }

    /// The outcome that a transition counts as, if it is one.
    #[must_use]
    pub fn of(transition: &Transition) -> Option<Self> {
        match transition {
            Transition::Started { .. } => Some(Self::Started),
            Transition::Cancelled { .. } => Some(Self::Cancelled),
            Transition::Settled { .. } => Some(Self::Settled),
            Transition::Rejected { .. } => Some(Self::Rejected),
            Transition::RolledBack { .. } => Some(Self::RolledBack),
            Transition::Canary { .. }
            | Transition::Committed { .. }
            | Transition::Baking { .. }
            | Transition::RollingBack { .. } => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReconcileLabels {
    outcome: ReconcileOutcome,
}

/// A service: neither name changes while the series lasts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ServiceLabels {
    namespace: String,
    service: String,
}

impl ServiceLabels {
    fn of(service: &InferenceService) -> Self {
        Self { namespace: service.namespace().unwrap_or_default(), service: service.name_any() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RolloutLabels {
    #[prometheus(flatten)]
    service: ServiceLabels,
    outcome: RolloutOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    #[prometheus(flatten)]
    service: ServiceLabels,
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

type Steps = Family<StepLabels, Histogram, fn() -> Histogram>;

/// The operator's metrics, and their registry.
pub struct Metrics {
    registry: Mutex<Registry>,
    reconciles: Family<ReconcileLabels, Counter>,
    reconcile_seconds: Histogram,
    rollouts: Family<RolloutLabels, Counter>,
    step_seconds: Steps,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("gantry_operator");
        let reconciles = Family::<ReconcileLabels, Counter>::default();
        let reconcile_seconds = Histogram::new(DURATION_BUCKETS_SECONDS);
        let rollouts = Family::<RolloutLabels, Counter>::default();
        let step_seconds: Steps = Family::new_with_constructor(|| Histogram::new(STEP_BUCKETS_SECONDS));
        let leader = Gauge::default();
        let build = Family::<BuildLabels, Gauge>::default();
        build.get_or_create(&BuildLabels { version: env!("CARGO_PKG_VERSION") }).set(1);
        registry.register("build_info", "1 for the release of this operator", build);
        registry.register("reconciles", "Reconciles of a service, by how they ended", reconciles.clone());
        registry.register("reconcile_duration_seconds", "Time a reconcile took", reconcile_seconds.clone());
        registry.register("rollouts", "Rollouts of a service, by how they went on", rollouts.clone());
        registry.register(
            "rollout_step_seconds",
            "Time that rollouts of a service were in each step, of steps that are over",
            step_seconds.clone(),
        );
        registry.register("leader", "Whether this operator holds the lease and acts", leader.clone());
        Self { registry: Mutex::new(registry), reconciles, reconcile_seconds, rollouts, step_seconds, leader }
    }
}

impl Metrics {
    /// Tells from now on how the services in `store` are.
    pub fn watch(&self, store: Store<InferenceService>) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.register_collector(Box::new(Services(store)));
    }

    /// Counts a reconcile.
    pub fn reconciled(&self, outcome: ReconcileOutcome, took: Duration) {
        self.reconciles.get_or_create(&ReconcileLabels { outcome }).inc();
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    /// Counts a transition of `service`.
    pub fn transition(&self, service: &InferenceService, transition: &Transition) {
        let service = ServiceLabels::of(service);
        let replaced = matches!(transition, Transition::Started { instead_of: Some(_), .. });
        let replaced = replaced.then_some(RolloutOutcome::Superseded);
        for outcome in RolloutOutcome::of(transition).into_iter().chain(replaced) {
            self.rollouts.get_or_create(&RolloutLabels { service: service.clone(), outcome }).inc();
        }
    }

    /// Counts the time in the steps that `before` had and `after` has no more, at `now`. A bake goes on beside a candidate.
    pub fn steps(
        &self,
        service: &InferenceService,
        before: Option<&RolloutStatus>,
        after: Option<&RolloutStatus>,
        now: Timestamp,
    ) {
        let steps = |rollout: &RolloutStatus| -> Vec<(&'static str, Timestamp)> {
            let bake = rollout.bake.as_ref().map(|bake| (RolloutStep::Bake.as_str(), bake.started_at.0));
            [(rollout.step.as_str(), rollout.started_at.0)].into_iter().chain(bake).collect()
        };
        let Some(before) = before else { return };
        let left = after.map(steps).unwrap_or_default();
        let service = ServiceLabels::of(service);
        for (step, started_at) in steps(before).into_iter().filter(|step| !left.contains(step)) {
            let seconds = now.duration_since(started_at).as_secs_f64().max(0.0);
            let labels = StepLabels { service: service.clone(), step };
            self.step_seconds.get_or_create(&labels).observe(seconds);
        }
        if let Some(outcome) = RolloutOutcome::of_bake(before, after) {
            self.rollouts.get_or_create(&RolloutLabels { service, outcome }).inc();
        }
    }

    /// Drops the series of a service that is gone.
    pub fn forget(&self, service: &ObjectRef<InferenceService>) {
        let (namespace, service) = (service.namespace.clone().unwrap_or_default(), service.name.clone());
        let service = ServiceLabels { namespace, service };
        for outcome in RolloutOutcome::ALL {
            self.rollouts.remove(&RolloutLabels { service: service.clone(), outcome });
        }
        for step in RolloutStep::ALL {
            self.step_seconds.remove(&StepLabels { service: service.clone(), step: step.as_str() });
        }
    }

    /// Says whether this operator acts.
    pub fn leading(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// The metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// When a metric cannot be formatted.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// How each service is, as of its status.
struct Services(Store<InferenceService>);

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Services")
    }
}

/// A figure of a service: its name, what it is, and how to read it.
type Figure = (&'static str, &'static str, fn(&InferenceService) -> i64);

const FIGURES: [Figure; 8] = [
    ("service_ready", "1 while a service answers, with what its spec asks for", |service| {
        holds(service, ConditionType::Ready)
    }),
    ("service_available", "1 while a service answers", |service| holds(service, ConditionType::Available)),
    (
        "service_stalled",
        "1 while a service goes on only if its spec changes, or what its version was judged by",
        |service| holds(service, ConditionType::Stalled),
    ),
    (
        "service_waiting",
        "1 while pods cannot go on with a version before something beside the spec is put right",
        |service| {
            let rollout = service.status.as_ref().and_then(|status| status.rollout.as_ref());
            i64::from(rollout.is_some_and(|rollout| rollout.wait_reason.is_some()))
        },
    ),
    (
        "service_pods_ready",
        "1 while every pod that there should be answers, those that come for others included",
        |service| holds(service, ConditionType::PodsReady),
    ),
    ("service_rejected", "1 while the version that the spec asks for stays refused, or taken back", |service| {
        i64::from(service.status.as_ref().is_some_and(|status| status.rejected.is_some()))
    }),
    ("service_replicas", "Pods that a service asks for", |service| i64::from(service.spec.replicas)),
    ("service_ready_replicas", "Pods of a service that answer", |service| {
        service.status.as_ref().map_or(0, |status| i64::from(status.ready_replicas))
    }),
];

fn holds(service: &InferenceService, condition: ConditionType) -> i64 {
    let conditions = service.status.iter().flat_map(|status| &status.conditions);
    let mut of_type = conditions.filter(|one| one.type_ == condition.as_str());
    i64::from(of_type.any(|one| one.status == "True"))
}

impl Collector for Services {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let services = self.0.state();
        for (name, help, figure) in FIGURES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for service in &services {
                let gauge = ConstGauge::new(figure(service));
                gauge.encode(family.encode_family(&ServiceLabels::of(service))?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::runtime::{reflector, watcher::Event};
    use serde_json::json;

    use super::*;

    fn service(status: serde_json::Value) -> InferenceService {
        let model = json!({"servedName": "m", "source": {"uri": "http://models/m.gguf"}});
        serde_json::from_value(json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "ns"}, "spec": {"model": model, "replicas": 3}, "status": status}))
        .unwrap()
    }

    /// A bake of 30 s that ends well.
    fn settle(metrics: &Metrics, service: &InferenceService) {
        let rollout = json!({"version": "chat-1", "step": "Bake", "attempt": 1, "plan": "",
            "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:01:00Z"});
        let now = "2026-01-01T00:00:30Z".parse().unwrap();
        let settled = Transition::Settled { version: "chat-1".to_owned() };
        metrics.steps(service, Some(&serde_json::from_value(rollout).unwrap()), None, now);
        metrics.transition(service, &settled);
    }

    #[track_caller]
    fn assert_lines(metrics: &Metrics, lines: &[&str]) {
        let text = metrics.text().unwrap();
        for line in lines {
            assert!(text.lines().any(|one| one == *line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn what_happens_is_counted_by_service_until_it_is_gone() {
        let metrics = Metrics::default();
        metrics.reconciled(ReconcileOutcome::Done, Duration::from_millis(2));
        metrics.leading(true);
        let service = service(json!({}));
        settle(&metrics, &service);
        metrics.transition(&service, &Transition::Committed { version: "chat-1".to_owned() });
        let of_service = [
            "gantry_operator_rollouts_total{namespace=\"ns\",service=\"chat\",outcome=\"Settled\"} 1",
            "gantry_operator_rollout_step_seconds_sum{namespace=\"ns\",service=\"chat\",step=\"Bake\"} 30.0",
            "gantry_operator_rollout_step_seconds_count{namespace=\"ns\",service=\"chat\",step=\"Bake\"} 1",
        ];
        assert_lines(&metrics, &of_service);
        let build = format!("gantry_operator_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        assert_lines(
            &metrics,
            &[
                "gantry_operator_reconciles_total{outcome=\"Done\"} 1",
                "gantry_operator_reconcile_duration_seconds_count 1",
                "gantry_operator_leader 1",
                &build,
            ],
        );
        metrics.forget(&ObjectRef::from_obj(&service));
        let text = metrics.text().unwrap();
        assert!(!text.contains("chat"), "{text}");
    }

    #[test]
    fn a_bake_that_goes_on_beside_candidates_is_counted_once_and_has_an_outcome() {
        let rollout = |version: &str, step: &str, bake: serde_json::Value| -> RolloutStatus {
            let started = if step == "Bake" { "2026-01-01T00:00:00Z" } else { "2026-01-01T00:00:10Z" };
            serde_json::from_value(json!({"version": version, "step": step, "attempt": 1, "plan": "", "bake": bake,
                "startedAt": started, "deadline": "2026-01-01T00:01:00Z"}))
            .unwrap()
        };
        let aside = json!({"to": "chat-1", "attempt": 1, "plan": "", "startedAt": "2026-01-01T00:00:00Z",
            "deadline": "2026-01-01T00:01:00Z"});
        let (baking, beside) = (rollout("chat-2", "Bake", json!(null)), rollout("chat-3", "Prepare", aside));
        let (alone, commit) = (rollout("chat-3", "Prepare", json!(null)), rollout("chat-3", "Commit", json!(null)));
        let at = |seconds: i64| -> Timestamp {
            "2026-01-01T00:00:00Z".parse::<Timestamp>().unwrap() + jiff::SignedDuration::from_secs(seconds)
        };
        let count =
            |what: &str, figure: &str| format!("gantry_operator_{what}{{namespace=\"ns\",service=\"chat\",{figure}");
        let service = service(json!({}));
        for (ways, bake, outcome) in [
            // Refused: the bake is what is left, and settles.
            (vec![(&beside, 20), (&baking, 30)], "step=\"Bake\"} 30.0", None),
            (vec![(&beside, 20), (&commit, 25)], "step=\"Bake\"} 25.0", Some("outcome=\"Superseded\"} 1")),
            (vec![(&beside, 20), (&alone, 60)], "step=\"Bake\"} 60.0", Some("outcome=\"Settled\"} 1")),
        ] {
            let metrics = Metrics::default();
            let mut before = &baking;
            for (after, seconds) in ways {
                metrics.steps(&service, Some(before), Some(after), at(seconds));
                before = after;
            }
            if before.step == RolloutStep::Bake {
                metrics.steps(&service, Some(before), None, at(30));
            }
            assert_lines(
                &metrics,
                &[&count("rollout_step_seconds_sum", bake), &count("rollout_step_seconds_count", "step=\"Bake\"} 1")],
            );
            match outcome {
                Some(outcome) => assert_lines(&metrics, &[&count("rollouts_total", outcome)]),
                None => assert!(!metrics.text().unwrap().contains("outcome="), "that is the transition's to count"),
            }
        }
        let metrics = Metrics::default();
        metrics
            .transition(&service, &Transition::Started { version: "b".to_owned(), instead_of: Some("a".to_owned()) });
        let lines =
            ["outcome=\"Started\"} 1", "outcome=\"Superseded\"} 1"].map(|outcome| count("rollouts_total", outcome));
        assert_lines(&metrics, &[&lines[0], &lines[1]]);
    }

    #[test]
    fn every_metric_is_in_the_reference_and_no_other() {
        let metrics = Metrics::default();
        let (store, _writer) = reflector::store();
        metrics.watch(store);
        // What has no label's value yet is not told.
        metrics.reconciled(ReconcileOutcome::Done, Duration::ZERO);
        settle(&metrics, &service(json!({})));
        let text = metrics.text().unwrap();
        let mut told: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let reference = include_str!("../../docs/metrics.md");
        let rows = reference.lines().filter_map(|line| line.strip_prefix("| `gantry_operator_"));
        let mut described: Vec<_> = rows
            .map(|row| {
                let (name, rest) = row.split_once("` | ").unwrap();
                let kind = rest.split(' ').next().unwrap();
                let name = if kind == "counter" { name.strip_suffix("_total").unwrap() } else { name };
                format!("gantry_operator_{name} {kind}")
            })
            .collect();
        told.sort_unstable();
        described.sort_unstable();
        assert_eq!(told, described);
    }

    #[test]
    fn a_service_is_told_as_its_status_has_it() {
        let metrics = Metrics::default();
        let (store, mut writer) = reflector::store();
        metrics.watch(store);
        let condition = |type_: &str, status: &str| json!({"type": type_, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let rejected = json!({"version": "chat-2", "judged": "j", "gate": "Memory", "message": "", "outcome": "Rejected",
            "at": "2026-01-01T00:00:00Z"});
        let status = json!({"readyReplicas": 2, "rejected": rejected, "conditions": [
            condition("Ready", "False"), condition("Available", "True"), condition("Stalled", "True")]});
        writer.apply_watcher_event(&Event::Apply(service(status)));
        for (name, figure) in
            [("ready", 0), ("available", 1), ("stalled", 1), ("rejected", 1), ("replicas", 3), ("ready_replicas", 2)]
        {
            let line = format!("gantry_operator_service_{name}{{namespace=\"ns\",service=\"chat\"}} {figure}");
            assert_lines(&metrics, &[&line]);
        }
    }
}
