#![allow(clippy::unwrap_used)]
//! Status of a version over its life; that of a service is tested with whole reconciles in `controller`.

use gantry_crds::{
    ModelVersion, ModelVersionStatus,
    status::{ReplicaStatus, VersionPhase, VersionRole},
};
use serde_json::{Value, json};

use super::*;
use crate::decide::CountedPod;

const NAME: &str = "chat-new";

fn version(status: Option<ModelVersionStatus>) -> ModelVersion {
    let mut version: ModelVersion = serde_json::from_value(json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "ModelVersion", "metadata": {"name": NAME},
        "spec": {"service": "chat", "revision": 2, "runtime": {},
            "model": {"servedName": "chat", "source": {"uri": "https://m/2.gguf", "sha256": "2".repeat(64)}}},
    }))
    .unwrap();
    version.status = status;
    version
}

fn state(status: Value) -> RolloutState {
    RolloutState::from(&serde_json::from_value::<InferenceServiceStatus>(status).unwrap())
}

fn preparing() -> RolloutState {
    state(json!({"activeVersion": "chat-old", "candidateVersion": NAME, "rollout": {"version": NAME, "step": "Prepare",
        "attempt": 1, "plan": "", "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:15:00Z", "message": "0 of 2 pods prepared"}}))
}

fn reports(candidates: &[Value]) -> Vec<ReplicaStatus> {
    let entry = |(index, candidate): (usize, &Value)| {
        serde_json::from_value(json!({"pod": format!("pod-{index}"), "health": "Healthy", "version": "chat-old",
            "attempt": 1, "reportedAt": "2026-01-01T00:00:05Z", "candidate": candidate}))
        .unwrap()
    };
    candidates.iter().enumerate().map(entry).collect()
}

fn status(
    old: Option<ModelVersionStatus>,
    before: &RolloutState,
    after: &RolloutState,
    reports: &[ReplicaStatus],
) -> ModelVersionStatus {
    let pods: Vec<_> = reports
        .iter()
        .map(|report| CountedPod { name: &report.pod, ready: true, report: Some(report), outdated: false })
        .collect();
    version_status(&VersionInputs {
        version: &version(old),
        before,
        state: after,
        pods: &pods,
        any_runs: true,
        missing: None,
        now: "2026-01-01T00:00:06Z".parse().unwrap(),
    })
}

fn condition(status: &ModelVersionStatus, type_: &str) -> String {
    status.conditions.iter().find(|condition| condition.type_ == type_).unwrap().status.clone()
}

#[test]
fn a_figure_is_told_of_each_phase_that_has_one() {
    let at = |phase: &str, bytes: i64, permille: Value, summary: &str| {
        json!({"version": NAME, "phase": phase,
            "progress": {"bytes": bytes, "donePermille": permille, "summary": summary}})
    };
    let failed = || at("Failed", 3, Value::Null, "3%");
    let loading = |permille: i64| at("Loading", 100, json!(permille), &format!("{permille} loaded"));
    // What is in the cache was not downloaded here.
    let testing = || at("Testing", 0, json!(100), "2 of 20 prompts");
    for (candidates, told) in [
        (vec![failed(), loading(500), loading(200), testing()], "200 loaded"),
        (vec![failed(), testing()], "2 of 20 prompts"),
        (vec![loading(500), at("Fetching", 100, Value::Null, "99%")], "99%"),
    ] {
        let status = status(None, &preparing(), &preparing(), &reports(&candidates));
        assert_eq!(status.progress.unwrap().summary.as_deref(), Some(told), "{candidates:?}");
    }
}

#[test]
fn the_pod_that_is_furthest_behind_speaks_for_the_candidate() {
    let fetching = |bytes: i64| json!({"version": NAME, "phase": "Fetching", "progress": {"bytes": bytes, "total": 100, "summary": format!("{bytes}%")}});
    let testing = json!({"version": NAME, "phase": "Testing",
        "gates": [{"name": "Fetch", "verdict": "Pass"}, {"name": "Memory", "verdict": "Pass"}],
        "gguf": {"architecture": "llama", "quantization": "Q8_0", "parameters": "1B", "bytes": 5, "size": "5"},
        "fit": {"required": "1Gi", "available": "3Gi", "fits": true}});
    let status = status(None, &preparing(), &preparing(), &reports(&[fetching(60), fetching(40), testing]));
    assert_eq!((status.phase, status.role), (Some(VersionPhase::Fetching), Some(VersionRole::Candidate)));
    assert_eq!(condition(&status, "Fetched"), "Unknown", "two pods still fetch it");
    assert_eq!(status.progress.unwrap().summary.as_deref(), Some("40%"));
    assert_eq!(status.gguf.as_ref().unwrap().quantization, "Q8_0");
    assert_eq!(status.fit.unwrap().available, "3Gi");
    assert_eq!(status.digest, Some(format!("sha256:{}", "2".repeat(64))));
}

#[test]
fn what_was_said_about_an_earlier_attempt_does_not_speak_for_the_candidate() {
    let failed = json!({"version": NAME, "phase": "Failed", "gates": [{"name": "Fetch", "verdict": "Fail"}],
        "fit": {"required": "3Gi", "available": "1Gi", "fits": false}});
    let mut reports = reports(&[failed]);
    let prepared = |reports: &mut Vec<ReplicaStatus>, attempt| {
        (reports[0].prepared, reports[0].attempt) = (Some(NAME.to_owned()), attempt);
    };
    for earlier in [Some(0), None] {
        prepared(&mut reports, earlier);
        let status = status(None, &preparing(), &preparing(), &reports);
        assert_eq!((status.phase, status.gates.len(), status.fit.as_ref()), (Some(VersionPhase::Pending), 0, None));
        assert_eq!(condition(&status, "Fetched"), "Unknown");
    }
    prepared(&mut reports, Some(1));
    let status = status(None, &preparing(), &preparing(), &reports);
    assert_eq!((status.phase, status.gates.len()), (Some(VersionPhase::Prepared), 1));
}

#[test]
fn the_pod_where_it_does_not_fit_speaks_for_the_memory() {
    let fit = |available: &str, fits: bool| json!({"version": NAME, "phase": "Testing", "fit": {"required": "2Gi", "available": available, "fits": fits}});
    let status =
        status(None, &preparing(), &preparing(), &reports(&[fit("2Gi", true), fit("3Gi", false), fit("4Gi", false)]));
    assert_eq!(status.fit.map(|fit| fit.available).as_deref(), Some("3Gi"));
}

#[test]
fn one_pods_failed_gate_stands_for_all() {
    let gates = |verdict: &str| {
        json!({"version": NAME, "phase": "Testing", "gates": [
            {"name": "Memory", "verdict": "Pass"}, {"name": "Prompts", "verdict": verdict, "value": "3% of 20"}]})
    };
    let status = status(None, &preparing(), &preparing(), &reports(&[gates("Pass"), gates("Fail")]));
    assert_eq!(status.gate_summary.as_deref(), Some("3% of 20"));
    assert_eq!(condition(&status, "Fits"), "True");
    assert_eq!(condition(&status, "Validated"), "Unknown");
}

#[test]
fn a_life_from_pending_to_superseded_keeps_what_was_learnt() {
    let pending = status(None, &preparing(), &preparing(), &[]);
    assert_eq!((pending.phase, pending.progress.as_ref()), (Some(VersionPhase::Pending), None));
    let gates = json!([{"name": "Fetch", "verdict": "Pass"}, {"name": "Digest", "verdict": "Pass"},
        {"name": "Format", "verdict": "Pass"}, {"name": "Memory", "verdict": "Pass"}, {"name": "Prompts", "verdict": "Skipped"}]);
    let mut reports = reports(&[json!({"version": NAME, "phase": "Prepared", "gates": gates})]);
    reports[0].prepared = Some(NAME.to_owned());
    let prepared = status(Some(pending), &preparing(), &preparing(), &reports);
    assert_eq!((prepared.phase, prepared.gate_summary.as_deref()), (Some(VersionPhase::Prepared), Some("4/4")));
    for type_ in ["Fetched", "Verified", "Fits", "Validated"] {
        assert_eq!(condition(&prepared, type_), "True", "{type_}");
    }
    assert_eq!(condition(&prepared, "Serving"), "False");
    let settled = state(json!({"activeVersion": NAME}));
    let active = status(Some(prepared), &settled, &settled, &[]);
    assert_eq!((active.phase, active.gate_summary.as_deref()), (Some(VersionPhase::Active), Some("4/4")));
    assert_eq!(condition(&active, "Serving"), "True");
    let replaced = state(json!({"activeVersion": "chat-third"}));
    let superseded = status(Some(active), &replaced, &replaced, &[]);
    assert_eq!(
        (superseded.phase, superseded.reason.as_deref(), superseded.message.as_deref()),
        (Some(VersionPhase::Superseded), Some("Superseded"), Some("replaced by chat-third"))
    );
    assert_eq!(condition(&superseded, "Validated"), "True");
    let later = state(json!({"activeVersion": "chat-fourth"}));
    assert_eq!(status(Some(superseded.clone()), &later, &later, &[]), superseded, "history is not written again");
}

#[test]
fn a_candidate_that_is_given_up_never_answered() {
    let pending = status(None, &preparing(), &preparing(), &[]);
    let cancelled = state(json!({"activeVersion": "chat-old"}));
    let given_up = status(Some(pending), &preparing(), &cancelled, &[]);
    assert_eq!(given_up.phase, Some(VersionPhase::Superseded));
    assert_eq!(given_up.message.as_deref(), Some("replaced by chat-old before it answered"));
}

#[test]
fn a_gate_without_a_figure_is_named_and_a_long_one_is_cut() {
    for (value, summary) in [
        (json!(null), "Digest failed"),
        (json!("found 3f9a12cd45ab67ef89..."), "found 3f9a12cd45ab67"),
        (json!("1 of 2 pods prepared, none got on"), "1 of 2 pods prepared"),
    ] {
        let gates =
            json!([{"name": "Fetch", "verdict": "Pass"}, {"name": "Digest", "verdict": "Fail", "value": value}]);
        let failed = json!({"version": NAME, "phase": "Failed", "gates": gates});
        let status = status(None, &preparing(), &preparing(), &reports(&[failed]));
        assert_eq!(status.gate_summary.as_deref(), Some(summary));
    }
}

#[test]
fn what_bakes_promises_no_version_to_be_loaded() {
    let baking = state(json!({"activeVersion": NAME, "previousVersion": "chat-old", "rollout": {"version": NAME,
        "step": "Bake", "attempt": 1, "plan": "", "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:10:00Z"}}));
    let status = status(None, &baking, &baking, &[]);
    let told = "answers; watched until 2026-01-01T00:10:00Z, and gone back from to chat-old if it fails";
    assert_eq!(status.message.as_deref(), Some(told));
}

#[test]
fn a_version_that_answers_a_share_says_which() {
    let canary =
        json!({"share": "5%", "step": 1, "steps": 2, "since": "2026-01-01T00:00:00Z", "until": "2026-01-01T00:05:00Z"});
    let sharing = state(json!({"activeVersion": "chat-old", "candidateVersion": NAME, "rollout": {
        "version": NAME, "step": "Canary", "attempt": 1, "plan": "p", "startedAt": "2026-01-01T00:00:00Z",
        "deadline": "2026-01-01T00:20:00Z", "message": "5% of the requests go to it (step 1 of 2)", "canary": canary}}));
    let status = status(None, &sharing, &sharing, &[]);
    assert_eq!((status.phase, status.role), (Some(VersionPhase::Canary), Some(VersionRole::Candidate)));
    assert_eq!(status.message.as_deref(), Some("5% of the requests go to it (step 1 of 2)"));
    assert_eq!(condition(&status, "Validated"), "True");
}

#[test]
fn a_rejected_version_says_so_for_good() {
    let rejected = state(
        json!({"activeVersion": "chat-old", "rejected": {"version": NAME, "judged": "x", "gate": "Deadline",
        "value": "1 of 2 pods prepared in 900s", "message": "why", "outcome": "Rejected", "at": "2026-01-01T00:15:00Z"}}),
    );
    let first = status(None, &preparing(), &rejected, &[]);
    assert_eq!((first.phase, first.role), (Some(VersionPhase::Rejected), Some(VersionRole::History)));
    assert_eq!(first.gate_summary.as_deref(), Some("1 of 2 pods prepared"));
    assert_eq!((first.reason.as_deref(), first.message.as_deref()), (Some("DeadlineExceeded"), Some("why")));
    assert_eq!(condition(&first, "Validated"), "False");
    let moved_on = state(json!({"activeVersion": "chat-old"}));
    let later = status(Some(first), &moved_on, &moved_on, &[]);
    assert_eq!((later.phase, later.message.as_deref()), (Some(VersionPhase::Rejected), Some("why")));
    assert_eq!(later.reason.as_deref(), Some("DeadlineExceeded"));
    let again = status(Some(later), &preparing(), &preparing(), &[]);
    assert_eq!((again.phase, again.gates.len()), (Some(VersionPhase::Pending), 0), "another try begins anew");
}

#[test]
fn what_a_store_told_of_a_pinned_file_is_its_digest() {
    let told = format!("sha256:{}", "3".repeat(64));
    let digest = |sha256: Option<String>, gates: Value, old: Option<ModelVersionStatus>| {
        let mut version = version(old);
        version.spec.model.source.sha256 = sha256.map(gantry_crds::scalars::Sha256);
        let reports = reports(&[json!({"version": NAME, "attempt": 1, "phase": "Validating", "gates": gates})]);
        let pods: Vec<_> = reports
            .iter()
            .map(|report| CountedPod { name: &report.pod, ready: true, report: Some(report), outdated: false })
            .collect();
        let now = "2026-01-01T00:00:06Z".parse().unwrap();
        let (before, state) = (&preparing(), &preparing());
        version_status(&VersionInputs {
            version: &version,
            before,
            state,
            pods: &pods,
            any_runs: true,
            missing: None,
            now,
        })
        .digest
    };
    let passed = json!([{"name": "Digest", "verdict": "Pass", "value": told}]);
    assert_eq!(digest(None, passed.clone(), None), Some(told.clone()));
    assert_eq!(digest(None, json!([]), None), None, "nobody was told yet");
    let old = ModelVersionStatus { digest: Some(told.clone()), ..ModelVersionStatus::default() };
    assert_eq!(digest(None, json!([]), Some(old)), Some(told), "it does not change");
    let spec = "2".repeat(64);
    assert_eq!(
        digest(Some(spec.clone()), passed, None),
        Some(format!("sha256:{spec}")),
        "what the spec says goes before"
    );
    let failed = json!([{"name": "Digest", "verdict": "Fail", "value": "found abcdef..."}]);
    assert_eq!(digest(None, failed, None), None);
}
