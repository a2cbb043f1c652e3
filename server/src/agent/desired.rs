//! What the InferenceService asks of this pod.

use std::collections::BTreeMap;

use gantry_crds::InferenceService;
use gantry_crds::inference_service::{
    DispatchStrategy as SpecDispatch, DriftGate, MemoryGate, PerformanceGate, PromptsGate, RollbackSignals,
    RuntimeSpec, SIGNALS_MIN_SAMPLES_DEFAULT, SIGNALS_WINDOW_DEFAULT, SchedulingSpec, ShadowGate, cache_bytes,
};
use gantry_crds::scalars::{DurationString, Percent};
use gantry_crds::status::{NamedVersion, RolloutStatus, RolloutStep, Side};
use gantry_rollout::Desired;
use kube::core::DynamicObject;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::limits::MAX_QUEUE;
use crate::rollout::{Assignment, Settings};
use crate::version::signals::SignalLimits;
use crate::version::{DispatchStrategy, Scheduling};

/// The share of the cache's volume that is left free: the kubelet evicts a pod whose volume is over its limit by a byte.
const CACHE_MARGIN_DIVISOR: u64 = 50;

/// An object that this release cannot read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this release cannot read the InferenceService ({0}); what is loaded goes on answering: update the server's image"
)]
pub struct InvalidObject(String);

/// What an agent needs to know of its service.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// What is asked of the pod.
    pub assignment: Assignment,
    /// Pods that have an entry in the status.
    pub entries: Vec<String>,
    /// Pods of the service.
    pub replicas: u32,
    /// Digests of the files that its versions are made of.
    pub digests: Vec<String>,
    /// Whether any of them may keep prompts on the disk, as far as is known.
    pub keeps_prefixes: bool,
}

/// What this pod was made with. An edited spec is read before the pods are made anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodHas {
    /// Its name.
    pub pod: String,
    /// Bytes that the cache's volume holds, if that is known.
    pub volume_bytes: Option<u64>,
    /// What the operator calls its resources, if that is known.
    pub resources: Option<String>,
    /// Which of the two sets of pods it is of.
    pub side: Side,
}

/// Reads what is asked. What a later release added is left out where it is no matter of this pod's: other pods' entries,
/// verdicts, conditions, fields that no agent reads. A version that cannot be read hides no other, and what is not known of one
/// that can is noted: it is no candidate here.
///
/// # Errors
/// The object does not have the shape that this release knows.
pub fn read(object: DynamicObject, has: &PodHas) -> Result<Asked, InvalidObject> {
    let invalid = |error: serde_json::Error| InvalidObject(error.to_string());
    let mut value = serde_json::to_value(object).map_err(invalid)?;
    // Who wrote which field is most of a large object, and of no use here.
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    let entries = names(&take(&mut value, &["status", "replicas"]), "pod");
    let (signals, unknown_signals) = signals(&take(&mut value, &["spec", "rollout", "rollback", "signals"]));
    for field in OTHERS {
        take(&mut value, field);
    }
    let runtime = take(&mut value, &["spec", "runtime"]);
    if let Some(spec) = value.get_mut("spec").and_then(Value::as_object_mut) {
        // Of how a version is loaded, the one in `versions` counts.
        spec.insert("runtime".to_owned(), json!({"prefixCache": runtime["prefixCache"]}));
    }
    forget_unknown_dispatch(&mut value);
    let versions = versions(&take(&mut value, &["status", "versions"]));
    let unknown_of_spec = [unknown_of_gates(&mut value), unknown_signals].concat();
    let service: InferenceService = serde_json::from_value(value).map_err(invalid)?;
    if let Some(RolloutStatus { step: RolloutStep::Unknown(step), .. }) =
        service.status.as_ref().and_then(|status| status.rollout.as_ref())
    {
        return Err(InvalidObject(format!("status.rollout.step: {step}")));
    }
    let counted = service.status.as_ref().map_or(0, |status| status.replica_count);
    let replicas = u32::try_from(service.spec.replicas.max(counted)).unwrap_or(1);
    let digests = service.status.as_ref().map(|status| status.digests.clone()).unwrap_or_default();
    let Versions { known, unreadable, unknown } = versions;
    let of_status =
        service.status.as_ref().map(|status| Desired::of(status, &has.pod, has.resources.as_deref(), has.side));
    let mut desired = Desired { versions: known, unreadable, unknown, ..of_status.unwrap_or_default() };
    if let Some(candidate) = desired.candidate.as_ref().filter(|_| !unknown_of_spec.is_empty()) {
        desired.unknown.entry(candidate.version.clone()).or_default().extend(unknown_of_spec);
    }
    let kept_prefix_bytes = kept_prefix_bytes(&desired.versions, &service);
    let keeps_prefixes = !desired.unreadable.is_empty() || kept_prefix_bytes > 0;
    let settings = Settings { signals, ..settings(&service, has.volume_bytes, kept_prefix_bytes) };
    Ok(Asked { assignment: Assignment { desired, settings }, entries, replicas, digests, keeps_prefixes })
}

/// Fields that no agent reads, and whose values are those of other programs.
const OTHERS: [&[&str]; 8] = [
    &["status", "rejected"],
    &["status", "conditions"],
    &["spec", "rollout", "strategy"],
    &["spec", "rollout", "canary"],
    &["spec", "rollout", "rollback"],
    &["spec", "pod"],
    &["spec", "cache", "mode"],
    &["spec", "api"],
];

/// The value at a path, which is left without it.
fn take(value: &mut Value, path: &[&str]) -> Value {
    let Some((last, parents)) = path.split_last() else { return Value::Null };
    let parent = parents.iter().try_fold(value, |value, key| value.get_mut(*key));
    parent.and_then(Value::as_object_mut).and_then(|object| object.remove(*last)).unwrap_or_default()
}

/// The texts under `key` in a list of objects.
fn names(list: &Value, key: &str) -> Vec<String> {
    let objects = list.as_array().map(Vec::as_slice).unwrap_or_default();
    objects.iter().filter_map(|object| Some(object.get(key)?.as_str()?.to_owned())).collect()
}

/// How requests are spread may be something new: then they are spread as by default.
fn forget_unknown_dispatch(value: &mut Value) {
    let dispatch = value.pointer("/spec/scheduling/dispatch");
    let unknown = dispatch.filter(|one| serde_json::from_value::<SpecDispatch>((*one).clone()).is_err());
    if let Some(unknown) = unknown.map(Value::to_string) {
        tracing::warn!(dispatch = unknown, "this release does not know this spec.scheduling.dispatch");
        take(value, &["spec", "scheduling", "dispatch"]);
    }
}

/// The versions of a status.
#[derive(Default)]
struct Versions {
    known: BTreeMap<String, NamedVersion>,
    /// Why others cannot be read.
    unreadable: BTreeMap<String, String>,
    /// Fields of those that can which this release does not know.
    unknown: BTreeMap<String, Vec<String>>,
}

fn versions(list: &Value) -> Versions {
    let mut versions = Versions::default();
    for version in list.as_array().map(Vec::as_slice).unwrap_or_default() {
        let name = version.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        match reading::<NamedVersion>(version) {
            Ok((version, unknown)) => {
                if !unknown.is_empty() {
                    versions.unknown.insert(name.clone(), unknown);
                }
                versions.known.insert(name, version);
            }
            Err(error) => drop(versions.unreadable.insert(name, error.to_string())),
        }
    }
    versions
}

/// A value, and the fields in it that this release does not know.
fn reading<T: DeserializeOwned>(value: &Value) -> serde_json::Result<(T, Vec<String>)> {
    let mut unknown = Vec::new();
    // A field that may be absent is a step of its own in the path.
    let read = serde_ignored::deserialize(value, |path| unknown.push(path.to_string().replace(".?", "")))?;
    Ok((read, unknown))
}

/// What this release does not know of the gates that its agents ask, which are left without what it cannot read: a gate that none
/// of them knows is the operator's to see.
fn unknown_of_gates(value: &mut Value) -> Vec<String> {
    const GATES: &str = "spec.rollout.gates";
    type Read = fn(&Value) -> serde_json::Result<Vec<String>>;
    fn of<Gate: DeserializeOwned>(gate: &Value) -> serde_json::Result<Vec<String>> {
        reading::<Gate>(gate).map(|(_, unknown)| unknown)
    }
    let mut all = Vec::new();
    // Compared with something else, it would pass for what it was not asked.
    let reference = value.pointer("/spec/rollout/gates/drift/reference");
    if reference.is_some_and(|reference| *reference != "Active") {
        take(value, &["spec", "rollout", "gates", "drift", "reference"]);
        all.push(format!("{GATES}.drift.reference"));
    }
    let gates: [(&str, Read); 5] = [
        ("memory", of::<MemoryGate>),
        ("prompts", of::<PromptsGate>),
        ("drift", of::<DriftGate>),
        ("performance", of::<PerformanceGate>),
        ("shadow", of::<ShadowGate>),
    ];
    for (name, read) in gates {
        match value.pointer(&format!("/spec/rollout/gates/{name}")).filter(|gate| !gate.is_null()).map(read) {
            Some(Ok(unknown)) => all.extend(unknown.into_iter().map(|path| format!("{GATES}.{name}.{path}"))),
            Some(Err(error)) => {
                take(value, &["spec", "rollout", "gates", name]);
                all.push(format!("{GATES}.{name} ({error})"));
            }
            None => {}
        }
    }
    all
}

/// The most bytes of prompts on disk: of versions that run, one may be allowed more than the next one.
fn kept_prefix_bytes(versions: &BTreeMap<String, NamedVersion>, service: &InferenceService) -> u64 {
    let runtimes = versions.values().map(|version| &version.runtime).chain([&service.spec.runtime]);
    runtimes.map(prefix_bytes).max().unwrap_or(0)
}

/// The most bytes of prompts that a version with these settings keeps on disk.
fn prefix_bytes(runtime: &RuntimeSpec) -> u64 {
    runtime.prefix_cache.as_ref().and_then(|cache| cache.disk.as_ref()?.bytes()).unwrap_or(0)
}

/// The API server has checked these values; one that it would refuse today falls back to the default.
///
/// `kept_prefix_bytes` of the cache's volume are not for models.
fn settings(service: &InferenceService, volume_bytes: Option<u64>, kept_prefix_bytes: u64) -> Settings {
    let spec = &service.spec;
    let fallback = Settings::default();
    let warn = |error: &dyn std::fmt::Display| tracing::warn!(%error, "a value of the spec is not usable");
    let gates = &spec.rollout.gates;
    let resources = &spec.resources;
    let gpus = resources.gpu.as_ref().map_or(0, |gpu| gpu.count);
    let asked = cache_bytes(spec.cache.size_limit.as_ref(), resources.memory.as_ref(), gpus);
    let volume = volume_bytes.map_or(asked, |volume| volume.min(asked));
    Settings {
        headroom_ratio: gates.memory.headroom.ratio().inspect_err(|e| warn(e)).unwrap_or(fallback.headroom_ratio),
        prompts: gates.prompts.clone(),
        drift: gates.drift.clone(),
        performance: gates.performance.clone(),
        shadow: gates.shadow.clone(),
        scheduling: scheduling(&spec.scheduling),
        drain_timeout: spec.rollout.drain_timeout.to_std().inspect_err(|e| warn(e)).unwrap_or(fallback.drain_timeout),
        cache_limit_bytes: Some((volume - volume / CACHE_MARGIN_DIVISOR).saturating_sub(kept_prefix_bytes)),
        gpu: spec.resources.gpu.is_some(),
        signals: None,
    }
}

/// What the figures of a version may be, and what this release does not know of it or cannot read, which is not looked at.
fn signals(value: &Value) -> (Option<SignalLimits>, Vec<String>) {
    const SIGNALS: &str = "spec.rollout.rollback.signals";
    if value.is_null() {
        return (None, Vec::new());
    }
    let warn = |error: &dyn std::fmt::Display| tracing::warn!(%error, "{SIGNALS} is not usable");
    let (spec, unknown): (RollbackSignals, _) = match reading(value).inspect_err(|error| warn(error)) {
        Ok(read) => read,
        Err(error) => return (None, vec![format!("{SIGNALS} ({error})")]),
    };
    let unknown = unknown.into_iter().map(|path| format!("{SIGNALS}.{path}")).collect();
    let share = |share: Option<Percent>| share.and_then(|share| share.ratio().inspect_err(|error| warn(error)).ok());
    let time = |time: Option<DurationString>| time.and_then(|time| time.to_std().inspect_err(|error| warn(error)).ok());
    let limits = SignalLimits {
        error_rate: share(spec.error_rate),
        ttft_p95: time(spec.ttft_p95),
        tpot_p95: time(spec.tpot_p95),
        degenerate_output_rate: share(spec.degenerate_output_rate),
        regression: spec.regression.and_then(|ratio| ratio.value().inspect_err(|error| warn(error)).ok()),
        window: time(spec.window).unwrap_or(SIGNALS_WINDOW_DEFAULT),
        min_samples: spec.min_samples.unwrap_or(SIGNALS_MIN_SAMPLES_DEFAULT) as usize,
    };
    (Some(limits), unknown)
}

fn scheduling(spec: &SchedulingSpec) -> Scheduling {
    let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX).min(MAX_QUEUE);
    let timeout = spec.queue_timeout.as_ref().and_then(|timeout| {
        timeout.to_std().inspect_err(|error| tracing::warn!(%error, "a value of the spec is not usable")).ok()
    });
    Scheduling {
        max_queue: count(spec.max_queue),
        high_watermark: spec.high_watermark.map(count),
        low_watermark: spec.low_watermark.map(count),
        queue_timeout_ms: timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1)),
        dispatch: match spec.dispatch {
            SpecDispatch::RoundRobin => DispatchStrategy::RoundRobin,
            SpecDispatch::LeastLoaded => DispatchStrategy::LeastLoaded,
            SpecDispatch::MemoryAware => DispatchStrategy::MemoryAware,
            SpecDispatch::PrefixAware => DispatchStrategy::PrefixAware,
        },
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use gantry_rollout::Candidate;

    use super::*;

    fn object(status: Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "gantry.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "ns", "managedFields": [{"manager": "m"}]},
            "spec": {
                "model": {"servedName": "chat", "source": {"uri": "http://h/m.gguf", "sha256": "a".repeat(64)}},
                "cache": {"sizeLimit": "1000Mi"},
                "scheduling": {
                    "maxQueue": 7, "highWatermark": 6, "lowWatermark": 2, "queueTimeout": "1m30s", "dispatch": "PrefixAware",
                },
                "rollout": {"drainTimeout": "30s", "gates": {"memory": {"headroom": "10%"}, "prompts": {"configMapRef": {"name": "golden"}}}},
            },
            "status": status,
        }))
        .unwrap()
    }

    fn rollout(step: &str) -> Value {
        json!({"version": "v2", "step": step, "attempt": 3, "plan": "p", "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:15:00Z"})
    }

    #[test]
    fn each_step_asks_for_its_versions() {
        let candidate = || Some(Candidate { version: "v2".into(), attempt: 3 });
        for (status, active, wanted, previous, names_v2) in [
            (json!({}), None, None, None, false),
            (json!({"candidateVersion": "v2", "rollout": rollout("Prepare")}), None, candidate(), None, true),
            (
                json!({"activeVersion": "v1", "candidateVersion": "v2", "rollout": rollout("Prepare")}),
                Some("v1"),
                candidate(),
                None,
                true,
            ),
            (
                json!({"activeVersion": "v2", "previousVersion": "v1", "rollout": rollout("Commit")}),
                Some("v2"),
                None,
                Some("v1"),
                true,
            ),
            (
                json!({"activeVersion": "v2", "previousVersion": "v1", "rollout": rollout("Bake")}),
                Some("v2"),
                None,
                Some("v1"),
                true,
            ),
            (json!({"activeVersion": "v1", "rollout": rollout("Rollback")}), Some("v1"), None, None, false),
            (json!({"activeVersion": "v1", "candidateVersion": "v2"}), Some("v1"), None, None, true),
        ] {
            let text = status.to_string();
            let desired = read(object(status), &PodHas::default()).unwrap().assignment.desired;
            assert_eq!(desired.active.as_deref(), active, "{text}");
            assert_eq!(desired.candidate, wanted, "{text}");
            assert_eq!(desired.attempt, text.contains("rollout").then_some(3), "{text}");
            assert_eq!(desired.previous.as_deref(), previous, "{text}");
            assert_eq!(desired.names("v2"), names_v2, "{text}");
        }
    }

    #[test]
    fn each_side_has_its_part_in_a_blue_green_rollout() {
        let status = |step: &str, active_side: &str, active: &str, previous: Option<&str>| {
            let mut rollout = rollout(step);
            rollout["strategy"] = json!("BlueGreen");
            json!({"activeVersion": active, "previousVersion": previous, "activeSide": active_side, "rollout": rollout})
        };
        let candidate = || Some(Candidate { version: "v2".into(), attempt: 3 });
        let prepares = || status("Prepare", "Blue", "v1", None);
        for (what, status, side, active, wanted, stands_by) in [
            ("the side that answers goes on", prepares(), Side::Blue, Some("v1"), None, false),
            ("the other one prepares", prepares(), Side::Green, None, candidate(), true),
            ("it answers", status("Bake", "Green", "v2", Some("v1")), Side::Green, Some("v2"), None, false),
            ("the way back stays", status("Bake", "Green", "v2", Some("v1")), Side::Blue, Some("v1"), None, true),
            ("it answers again", status("Rollback", "Blue", "v1", None), Side::Blue, Some("v1"), None, false),
            ("what is bad is left alone", status("Rollback", "Blue", "v1", None), Side::Green, None, None, true),
            (
                "a swap in place is no matter of what is left of the other side",
                json!({"activeVersion": "v1", "candidateVersion": "v2", "rollout": rollout("Prepare")}),
                Side::Green,
                None,
                None,
                true,
            ),
        ] {
            let desired = read(object(status), &PodHas { side, ..PodHas::default() }).unwrap().assignment.desired;
            assert_eq!(desired.active.as_deref(), active, "{what}");
            assert_eq!((desired.candidate, desired.stands_by), (wanted, stands_by), "{what}");
            assert_eq!(desired.previous, None, "{what}: nothing is kept beside what answers");
        }
    }

    #[test]
    fn signals_are_read_as_far_as_this_release_knows_them_and_only_what_is_new_is_watched() {
        let asked = |signals: Value| {
            let mut object = object(json!({}));
            object.data["spec"]["rollout"]["rollback"] = json!({"bake": "later", "signals": signals});
            read(object, &PodHas::default()).unwrap().assignment.settings.signals
        };
        let limits = asked(json!({"errorRate": "5%", "ttftP95": "2s", "regression": "1.5", "later": true})).unwrap();
        assert_eq!((limits.error_rate, limits.ttft_p95), (Some(0.05), Some(Duration::from_secs(2))));
        assert_eq!((limits.regression, limits.tpot_p95), (Some(1.5), None));
        assert_eq!((limits.window, limits.min_samples), (Duration::from_secs(60), 20));
        assert_eq!(asked(json!({"errorRate": 5})), None, "what cannot be read blinds no pod");
        assert_eq!(asked(Value::Null), None);
        for (step, watched) in [("Prepare", None), ("Commit", Some("v2")), ("Bake", Some("v2")), ("Rollback", None)] {
            let active = if matches!(step, "Commit" | "Bake") { "v2" } else { "v1" };
            let status = json!({"activeVersion": active, "rollout": rollout(step)});
            let desired = read(object(status), &PodHas::default()).unwrap().assignment.desired;
            assert_eq!(desired.watched.as_deref(), watched, "{step}");
        }
        let mut beside = rollout("Prepare");
        beside["bake"] = json!({"to": "v1", "attempt": 1, "plan": "p", "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:10:00Z"});
        let status = json!({"activeVersion": "v3", "candidateVersion": "v2", "rollout": beside});
        let desired = read(object(status), &PodHas::default()).unwrap().assignment.desired;
        assert_eq!(desired.watched.as_deref(), Some("v3"), "it bakes on while the next one is prepared");
    }

    #[test]
    fn a_pod_with_other_resources_than_the_spec_asks_for_prepares_nothing() {
        let mut asks = rollout("Prepare");
        asks["resources"] = json!("small");
        for (has, wanted, prepares) in [
            (Some("small"), &asks, true),
            (Some("large"), &asks, false),
            (None, &asks, true),
            (Some("large"), &rollout("Prepare"), true),
        ] {
            let has = PodHas { resources: has.map(str::to_owned), ..PodHas::default() };
            let status =
                json!({"rollout": wanted, "activeVersion": "v1", "candidateVersion": "v2", "previousVersion": "v0"});
            let desired = read(object(status), &has).unwrap().assignment.desired;
            assert_eq!(desired.candidate.is_some(), prepares, "{has:?} {wanted}");
            let others = (desired.active.as_deref(), desired.previous.as_deref(), desired.attempt);
            assert_eq!(others, (Some("v1"), Some("v0"), Some(3)), "it goes on with what it has");
        }
    }

    #[test]
    fn the_spec_says_how() {
        let settings = read(object(json!({})), &PodHas::default()).unwrap().assignment.settings;
        assert!((settings.headroom_ratio - 0.1).abs() < 1e-9);
        assert_eq!(settings.prompts.unwrap().config_map_ref.name, "golden");
        assert_eq!(settings.drain_timeout, Duration::from_secs(30));
        let scheduling = Scheduling {
            max_queue: 7,
            high_watermark: Some(6),
            low_watermark: Some(2),
            queue_timeout_ms: Some(90_000),
            dispatch: DispatchStrategy::PrefixAware,
        };
        assert_eq!(settings.scheduling, scheduling);
        assert_eq!(settings.cache_limit_bytes, Some(980 << 20));
        assert!(!settings.gpu);
    }

    #[test]
    fn a_cache_without_a_limit_of_its_own_has_that_of_the_pods_memory_and_never_more_than_its_volume() {
        let limit = |cache: Value, resources: Value, volume: Option<u64>| {
            let mut object = object(json!({}));
            (object.data["spec"]["cache"], object.data["spec"]["resources"]) = (cache, resources);
            let has = PodHas { volume_bytes: volume, ..PodHas::default() };
            read(object, &has).unwrap().assignment.settings.cache_limit_bytes.unwrap()
        };
        let usable = |bytes: u64| bytes - bytes / 50;
        let memory = || json!({"memory": "8Gi"});
        assert_eq!(limit(json!({}), memory(), None), usable(8 << 30));
        assert_eq!(limit(json!({}), json!({}), None), usable(20 << 30));
        assert_eq!(limit(json!({"sizeLimit": "30Gi"}), memory(), None), usable(30 << 30));
        // The limit was raised, and this pod is from before it.
        assert_eq!(limit(json!({"sizeLimit": "30Gi"}), memory(), Some(8 << 30)), usable(8 << 30));
        assert_eq!(limit(json!({"sizeLimit": "4Gi"}), memory(), Some(8 << 30)), usable(4 << 30));
    }

    #[test]
    fn models_have_what_prompts_on_disk_leave_of_the_cache() {
        let limit = |own: Value, running: Value| {
            let source = json!({"uri": "http://h/m.gguf", "sha256": "a".repeat(64)});
            let model = json!({"servedName": "chat", "source": source});
            let versions = json!([{"name": "v1", "model": model, "runtime": {"prefixCache": running}}]);
            let mut object = object(json!({"activeVersion": "v1", "versions": versions}));
            object.data["spec"]["runtime"] = json!({"prefixCache": own});
            read(object, &PodHas::default()).unwrap().assignment.settings.cache_limit_bytes.unwrap() >> 20
        };
        assert_eq!(limit(json!({}), json!({})), 980);
        assert_eq!(limit(json!({"disk": "100Mi"}), json!({})), 880);
        assert_eq!(limit(json!({"disk": "100Mi"}), json!({"disk": "200Mi"})), 780);
        assert_eq!(limit(json!({}), json!({"disk": "2Gi"})), 0);
    }

    #[test]
    fn a_queue_that_an_older_api_server_took_is_cut_to_what_a_pod_can_hold() {
        for (asked, held) in [(16_384, 16_384), (16_385, 16_384), (u32::MAX, 16_384)] {
            let spec = SchedulingSpec { max_queue: asked, ..SchedulingSpec::default() };
            assert_eq!(scheduling(&spec).max_queue, held);
        }
    }

    #[test]
    fn an_object_of_another_shape_is_told_apart() {
        let error = read(object(json!({"rollout": {"version": "v2", "step": "Dance"}})), &PodHas::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("goes on answering"), "{error}");
    }

    #[test]
    fn a_field_of_a_later_release_is_noted_and_blinds_nobody() {
        let version = |name: &str, more: Value| {
            let source = json!({"uri": "http://h/m.gguf", "sha256": "a".repeat(64), "secretRef": null});
            let mut version = json!({"name": name, "model": {"servedName": "chat", "source": source}, "runtime": {}});
            for (path, value) in more.as_object().unwrap() {
                let (parent, field) = path.rsplit_once('/').unwrap();
                version.pointer_mut(parent).unwrap()[field] = value.clone();
            }
            version
        };
        let later = json!({"/runtime/prefixCache": {"peer": "b"}, "/runtime/flashAttention": true, "/model/source/mirror": "http://m", "/adapters": ["a"]});
        let versions =
            json!([version("v1", json!({"/runtime/ropeScale": 2})), version("v2", later), version("v3", json!({}))]);
        let status = json!({"activeVersion": "v1", "candidateVersion": "v2", "rollout": rollout("Prepare"), "versions": versions});
        let desired = read(object(status.clone()), &PodHas::default()).unwrap().assignment.desired;
        assert_eq!(desired.versions.keys().collect::<Vec<_>>(), ["v1", "v2", "v3"], "all can be read");
        let unknown = |desired: &Desired, version: &str| desired.unknown.get(version).cloned().unwrap_or_default();
        assert_eq!(unknown(&desired, "v1"), ["runtime.ropeScale"]);
        let mut of_v2 = unknown(&desired, "v2");
        of_v2.sort_unstable();
        assert_eq!(of_v2, ["adapters", "model.source.mirror", "runtime.flashAttention", "runtime.prefixCache.peer"]);
        assert_eq!(unknown(&desired, "v3"), [""; 0]);
        // What is not known of a gate is not known of the candidate that it is to judge, and of no other.
        let mut asks = object(status);
        asks.data["spec"]["rollout"]["gates"]["prompts"]["temperature"] = json!("0.7");
        asks.data["spec"]["rollout"]["gates"]["memory"]["swap"] = json!("1Gi");
        asks.data["spec"]["rollout"]["gates"]["toxicity"] = json!({"max": "1%"});
        let desired = read(asks, &PodHas::default()).unwrap().assignment.desired;
        let of_v2 = unknown(&desired, "v2");
        for gate in ["spec.rollout.gates.memory.swap", "spec.rollout.gates.prompts.temperature"] {
            assert!(of_v2.iter().any(|field| field == gate), "{of_v2:?}");
        }
        assert_eq!((of_v2.len(), unknown(&desired, "v1").len()), (6, 1));
        // What it is to be compared with, too.
        for (reference, noted) in [("Active", false), ("Golden", true), ("Baseline", true)] {
            let mut asks = object(json!({"candidateVersion": "v2", "rollout": rollout("Prepare"),
                "versions": [version("v2", json!({}))]}));
            asks.data["spec"]["rollout"]["gates"]["drift"] = json!({"reference": reference, "maxKl": "0.1"});
            let assignment = read(asks, &PodHas::default()).unwrap().assignment;
            assert!(assignment.settings.drift.is_some());
            assert_eq!(!unknown(&assignment.desired, "v2").is_empty(), noted, "{reference}");
        }
        // One that is taken out by `null` is not asked for.
        let mut asks = object(
            json!({"candidateVersion": "v2", "rollout": rollout("Prepare"), "versions": [version("v2", json!({}))]}),
        );
        asks.data["spec"]["rollout"]["gates"] =
            json!({"prompts": null, "drift": null, "performance": null, "shadow": null});
        assert_eq!(unknown(&read(asks, &PodHas::default()).unwrap().assignment.desired, "v2"), [""; 0]);
        // A gate that cannot be read at all hides no other, and not the object.
        let mut asks = object(json!({"activeVersion": "v1", "candidateVersion": "v2", "rollout": rollout("Prepare"),
            "versions": [version("v1", json!({})), version("v2", json!({}))]}));
        asks.data["spec"]["rollout"]["gates"]["memory"] = json!({"headroom": {"percent": 10}});
        let Assignment { desired, settings } = read(asks, &PodHas::default()).unwrap().assignment;
        assert_eq!((desired.active.as_deref(), unknown(&desired, "v1").len()), (Some("v1"), 0));
        assert!(unknown(&desired, "v2").concat().starts_with("spec.rollout.gates.memory ("), "{:?}", desired.unknown);
        assert_eq!(settings.prompts.unwrap().config_map_ref.name, "golden");
        // Nor would it be watched by signals that are not known, or cannot be read.
        let status =
            json!({"candidateVersion": "v2", "rollout": rollout("Prepare"), "versions": [version("v2", json!({}))]});
        for (signals, noted) in [
            (json!({"errorRate": "5%"}), None),
            (json!({"errorRate": "5%", "refusalRate": "1%"}), Some("spec.rollout.rollback.signals.refusalRate")),
            (json!({"errorRate": 5}), Some("spec.rollout.rollback.signals (")),
        ] {
            let mut asks = object(status.clone());
            asks.data["spec"]["rollout"]["rollback"] = json!({"signals": signals});
            let of_v2 = unknown(&read(asks, &PodHas::default()).unwrap().assignment.desired, "v2");
            assert_eq!(of_v2.len(), usize::from(noted.is_some()), "{of_v2:?}");
            assert!(of_v2.iter().all(|field| field.starts_with(noted.unwrap_or_default())), "{of_v2:?}");
        }
    }

    #[test]
    fn what_a_later_release_says_elsewhere_does_not_make_a_pod_blind() {
        let version = |name: &str, cache: &str| {
            let source = json!({"uri": "http://h/m.gguf", "sha256": "a".repeat(64)});
            json!({"name": name, "model": {"servedName": "chat", "source": source}, "runtime": {"cacheType": cache}})
        };
        let mut later = object(json!({
            "activeVersion": "v1", "candidateVersion": "v2", "rollout": rollout("Prepare"), "newField": {"deep": [1]},
            "versions": [version("v1", "f16"), version("v2", "q2_0")],
            "rejected": {"gate": "Toxicity", "verdict": 7, "outcome": "Quarantined"},
            "conditions": [{"type": "Odd"}],
            "replicas": [
                {"pod": "chat-0", "health": "Dreaming", "reportedAt": "yesterday"},
                {"pod": "chat-1", "health": "Healthy", "reportedAt": "2026-01-01T00:00:00Z", "candidate": {
                    "version": "v2", "phase": "Simmering", "gates": [{"name": "Toxicity", "verdict": "Warn"}]}},
            ],
        }));
        later.data["spec"]["rollout"]["strategy"] = json!("Psychic");
        later.data["spec"]["rollout"]["canary"] = json!({"by": "mood"});
        later.data["spec"]["rollout"]["rollback"] = json!({"keepResident": "sometimes"});
        later.data["spec"]["rollout"]["gates"]["toxicity"] = json!({"max": "1%"});
        later.data["spec"]["rollout"]["gates"]["shadow"] = json!({"of": "later"});
        later.data["spec"]["pod"] = json!({"securityContext": {"seccompProfile": {"type": "Other"}}});
        later.data["spec"]["cache"]["mode"] = json!("Peer");
        later.data["spec"]["api"] = json!({"corsOrigins": {"from": "ConfigMap"}});
        later.data["spec"]["scheduling"]["dispatch"] = json!("Psychic");
        later.data["spec"]["runtime"] = json!({"cacheType": "q2_0"});
        let asked = read(later, &PodHas::default()).unwrap();
        assert_eq!(asked.entries, ["chat-0", "chat-1"]);
        let Assignment { desired, settings } = asked.assignment;
        assert_eq!((desired.active.as_deref(), desired.candidate.unwrap().version.as_str()), (Some("v1"), "v2"));
        assert_eq!(desired.versions.keys().collect::<Vec<_>>(), ["v1"]);
        assert!(desired.unreadable["v2"].contains("q2_0"), "{:?}", desired.unreadable);
        assert_eq!(settings.prompts.unwrap().config_map_ref.name, "golden");
    }
}
