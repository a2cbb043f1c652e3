#![allow(clippy::unwrap_used)]
//! Panels of services in each state, as people see them.

use serde_json::{Value, json};

use super::*;

/// A service called chat with a status, and versions by revision and phase.
pub(crate) fn view(json: &Value) -> View {
    console::set_colors_enabled(false);
    let source = |revision: i64| json!({"uri": "https://models.example/m.gguf", "sha256": format!("{revision:064}")});
    let service = json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "demo", "generation": 3, "resourceVersion": "7"},
        "spec": {"model": {"servedName": "demo", "source": source(1)}},
        "status": json["status"],
    });
    let version = |version: &Value| {
        let revision = version["revision"].as_i64().unwrap();
        let mut status = version.clone();
        status.as_object_mut().unwrap().remove("revision");
        serde_json::from_value(json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "ModelVersion",
            "metadata": {"name": format!("chat-{revision}"), "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"service": "chat", "revision": revision, "runtime": {},
                "model": {"servedName": "demo", "source": source(revision)}},
            "status": status,
        }))
        .unwrap()
    };
    let versions = json["versions"].as_array().into_iter().flatten().map(version).collect();
    View { service: serde_json::from_value(service).unwrap(), versions }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn conditions(of: &[(&str, &str, &str, &str)]) -> Value {
    let one = |(type_, status, reason, message): &(&str, &str, &str, &str)| json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
    of.iter().map(one).collect()
}

#[test]
fn a_canary_tells_its_share_and_when_the_next_one_is_due() {
    let panel = |until: Value| {
        let view = view(&json!({"status": {
            "activeVersion": "chat-1", "candidateVersion": "chat-2",
            "rollout": {
                "version": "chat-2", "step": "Canary", "attempt": 2, "plan": "InPlaceSwap: candidate 39Mi <= 100Mi left",
                "startedAt": "2026-01-01T00:10:00Z", "deadline": "2026-01-01T00:40:00Z",
                "message": "25% of the requests go to it (step 2 of 2)",
                "canary": {"share": "25%", "step": 2, "steps": 2, "since": "2026-01-01T00:15:00Z", "until": until},
            },
        }}));
        let line = list(std::slice::from_ref(&view.service));
        (steps(view.service.status.as_ref().unwrap().rollout.as_ref().unwrap(), at("2026-01-01T00:20:00Z")), line)
    };
    let (told, line) = panel(json!("2026-01-01T00:25:00Z"));
    assert!(told.starts_with("  Prepare → Canary 25% "), "{told}");
    assert!(told.contains("since      5m0s; the next step in 5m0s") && line.contains("Canary 25%"), "{told}{line}");
    assert!(told.contains("  share      25% of the requests go to it (step 2 of 2)\n"), "{told}");
    assert!(panel(Value::Null).0.contains("stays so until somebody lets it go on"));
}

#[test]
fn a_turn_is_told_in_the_words_of_its_strategy_and_a_deadline_that_is_over_is_none() {
    let told = |strategy: &str, step: &str, at_time: &str| {
        let view = view(&json!({"status": {
            "activeVersion": "chat-1", "candidateVersion": "chat-2",
            "rollout": {
                "version": "chat-2", "step": step, "attempt": 2, "plan": "asked for", "strategy": strategy,
                "startedAt": "2026-01-01T00:10:00Z", "deadline": "2026-01-01T00:25:00Z", "turn": {"pod": "chat-a"},
            },
        }}));
        let rollout = view.service.status.unwrap().rollout.unwrap();
        steps(&rollout, at(at_time)) + &next_step(&rollout)
    };
    let held = told("HoldRequests", "Prepare", "2026-01-01T00:12:00Z");
    assert!(held.contains("turn       chat-a: its requests wait") && held.contains("one after the other"), "{held}");
    assert!(held.contains("given up in 13m0s"), "{held}");
    // As it is while a rollout is paused.
    assert!(!told("HoldRequests", "Prepare", "2026-01-01T00:30:00Z").contains("given up"));
    let kept = "stays loaded until the bake is over";
    assert!(!told("HoldRequests", "Bake", "2026-01-01T00:12:00Z").contains(kept));
    assert!(told("InPlaceSwap", "Bake", "2026-01-01T00:12:00Z").contains(kept));
}

fn preparing() -> View {
    view(&json!({
        "status": {
            "observedGeneration": 3, "activeVersion": "chat-1", "candidateVersion": "chat-2",
            "endpoint": "http://chat.demo.svc:8080/v1", "replicaSummary": "2/2",
            "conditions": conditions(&[("Ready", "False", "RollingOut", "1 of 2 pods prepared"), ("Available", "True", "PodsReady", "2 pods answer")]),
            "rollout": {
                "version": "chat-2", "step": "Prepare", "attempt": 2, "plan": "InPlaceSwap: active 38Mi + candidate 39Mi <= 512Mi",
                "startedAt": "2026-01-01T00:10:00Z", "deadline": "2026-01-01T00:25:00Z",
                "waitReason": "FetchBackOff", "message": "b: the source does not\nanswer",
            },
            "replicas": [
                {"pod": "chat-a", "version": "chat-1", "health": "Healthy", "reportedAt": "2026-01-01T00:12:00Z",
                    "memory": {"measuredBytes": 39_845_888, "limitBytes": 536_870_912}, "candidate": {"version": "chat-2", "phase": "Prepared"}},
                {"pod": "chat-b", "version": "chat-1", "health": "Healthy", "reportedAt": "2026-01-01T00:12:00Z",
                    "candidate": {"version": "chat-2", "phase": "Fetching", "progress": {"bytes": 50, "total": 100, "etaSeconds": 70, "summary": "50%"}}},
            ],
        },
        "versions": [
            {"revision": 1, "phase": "Active"},
            {"revision": 2, "phase": "Fetching", "gates": [
                {"name": "Fetch", "verdict": "Pass"}, {"name": "Memory", "verdict": "Fail", "value": "39Mi"}, {"name": "Prompts", "verdict": "Skipped"}]},
        ],
    }))
}

#[test]
fn a_rollout_shows_its_step_its_deadline_and_each_pod() {
    let panel = preparing().panel(at("2026-01-01T00:12:10Z"));
    assert_eq!(
        panel,
        "chat  Answers  2/2 pods  http://chat.demo.svc:8080/v1\n\
         \x20 active     chat-1  rev 1  demo  Active\n\
         \x20 candidate  chat-2  rev 2  demo  Fetching\n\
         \x20 ready      RollingOut: 1 of 2 pods prepared\n\
         \n\
         \x20 Prepare ━━━───────────────── → Commit → Bake\n\
         \x20 strategy   InPlaceSwap: active 38Mi + candidate 39Mi <= 512Mi\n\
         \x20 since      2m10s; given up in 12m50s, unless pods make progress\n\
         \x20 waits for  FetchBackOff: b: the source does not answer\n\
         \x20 gates      ✓ Fetch  ✗ Memory 39Mi  - Prompts\n\
         \n\
         POD     ANSWERS WITH  HEALTH   MEMORY      CANDIDATE\n\
         chat-a  chat-1        Healthy  38Mi/512Mi  Prepared\n\
         chat-b  chat-1        Healthy              Fetching ━━━━━━━━━━────────── 50%, 1m10s left\n"
    );
}

#[test]
fn a_refusal_says_by_which_gate_and_what_to_do() {
    let view = view(&json!({
        "status": {
            "observedGeneration": 3, "activeVersion": "chat-1", "replicaSummary": "1/1",
            "conditions": conditions(&[("Ready", "False", "GateFailed", "refused"), ("Available", "True", "PodsReady", ""),
                ("Stalled", "True", "GateFailed", "Prompts: 3% of 20 prompts")]),
            "rejected": {"version": "chat-2", "judged": "x", "gate": "Prompts", "value": "3% of 20 prompts", "message": "correct the model",
                "outcome": "Rejected", "at": "2026-01-01T00:00:00Z"},
        },
        "versions": [{"revision": 1, "phase": "Active"}, {"revision": 2, "phase": "Rejected"}],
    }));
    let explained = view.explanation(at("2026-01-01T00:12:10Z"));
    assert!(
        explained.contains("✗ chat-2 was refused by the gate Prompts (3% of 20 prompts)\n  correct the model\n"),
        "{explained}"
    );
    assert!(explained.contains("kubectl gantry rollout retry"), "{explained}");
    assert_eq!(view.outcome(), Outcome::Refused("GateFailed: Prompts: 3% of 20 prompts".to_owned()));
}

#[test]
fn an_outcome_is_of_the_spec_as_it_is_now() {
    let with = |generation: i64, ready: &str| {
        let conditions = conditions(&[("Ready", ready, "AsRequested", "")]);
        view(&json!({"status": {"observedGeneration": generation, "conditions": conditions}}))
    };
    assert_eq!(with(3, "True").outcome(), Outcome::Ready);
    assert_eq!(with(2, "True").outcome(), Outcome::Pending, "the operator has not seen the edit");
    assert_eq!(with(3, "False").outcome(), Outcome::Pending);
    assert_eq!(view(&json!({})).outcome(), Outcome::Pending);
}

#[test]
fn a_summary_moves_with_what_happens_and_not_with_time() {
    assert_eq!(preparing().summary(), "chat: Prepare chat-2: RollingOut: 1 of 2 pods prepared");
    assert_eq!(view(&json!({})).summary(), "chat: no version answers");
}

#[test]
fn the_history_and_the_list_are_tables() {
    let view = preparing();
    let history = view.history(at("2026-01-01T01:00:00Z"));
    assert!(history.starts_with("REV  VERSION  MODEL  SIZE  PHASE     GATES  REASON  AGE\n"), "{history}");
    assert!(history.contains("\n2    chat-2   demo         Fetching                 1h0m\n"), "{history}");
    let list = list(&[view.service]);
    assert!(
        list.contains("\ndemo       chat  Answers  2/2   chat-1  chat-2     Prepare          RollingOut\n"),
        "{list}"
    );
}

#[test]
fn what_a_later_release_writes_is_shown_as_it_stands() {
    let view = view(&json!({
        "status": {"rollout": {"version": "chat-2", "step": "Rehearse", "attempt": 1, "plan": "Rehearse: once",
            "startedAt": "2026-01-01T00:10:00Z", "deadline": "2026-01-01T00:25:00Z"}},
    }));
    let explained = view.explanation(at("2026-01-01T00:12:10Z"));
    assert!(explained.contains("Prepare → Commit → Bake") && explained.contains("a later release"), "{explained}");
}
