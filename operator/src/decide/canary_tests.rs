#![allow(clippy::unwrap_used)]
//! A share of the requests: model 1 answers, and model 2 gets 5%, then 25%, then all.

use gantry_crds::status::{
    AgentStatus, BreachStatus, CandidatePhase, GateResult, GateVerdict, ReplicaCanary, ReplicaHealth, WaitReason,
};
use serde_json::{Value, json};

use super::{
    tests::{SWITCH_SECONDS, Scene, name, refused, spec, spec_with, time},
    *,
};

const FIRST: i64 = 300;
const SECOND: i64 = 600;
/// Seconds after a step in which pods may bring the candidate back.
const PATIENCE: i64 = 900;

fn canary() -> Value {
    json!({"canary": {"steps": [{"share": "5%", "bake": "5m"}, {"share": "25%", "bake": "10m"}]}})
}

fn asks(model: u8) -> ValidService {
    spec_with(model, canary())
}

fn with(model: u8, more: &Value) -> ValidService {
    let mut rollout = canary();
    more.as_object().unwrap().iter().for_each(|(field, value)| rollout[field] = value.clone());
    spec_with(model, rollout)
}

/// Both pods have prepared model 2, and are about to give it a share.
fn prepared_by(pods: &[&'static str]) -> Scene {
    let mut scene = Scene::served_by(pods);
    scene.spec = Some(asks(2));
    scene.step();
    scene.all(|report| {
        (report.prepared, report.agent) = (Some(name(2)), Some(AgentStatus::of_this_release()));
    });
    scene
}

/// Model 2 has its first share.
fn sharing() -> Scene {
    sharing_by(&["a", "b"])
}

fn sharing_by(pods: &[&'static str]) -> Scene {
    let mut scene = prepared_by(pods);
    assert!(matches!(scene.step(), Some(Transition::Canary { step: 1, steps: 2, .. })));
    scene.all(|report| report.canary = Some(given("5%")));
    scene
}

fn given(share: &str) -> ReplicaCanary {
    ReplicaCanary { version: name(2), share: Some(share.into()), breach: None, too_few_requests: false }
}

fn breached() -> ReplicaCanary {
    let (signal, value, limit) = ("errorRate".to_owned(), "30%".to_owned(), "5%".to_owned());
    let breach = Some(BreachStatus { signal, value, limit, samples: 40 });
    ReplicaCanary { share: None, breach, ..given("5%") }
}

fn told(scene: &Scene) -> (String, i32, Option<Timestamp>) {
    let canary = scene.state.rollout.as_ref().unwrap().canary.clone().unwrap();
    (canary.share.0, canary.step, canary.until.map(|until| until.0))
}

fn message(scene: &Scene) -> String {
    scene.state.rollout.as_ref().unwrap().message.clone().unwrap()
}

#[test]
fn shares_rise_step_by_step_and_then_all_go_over() {
    let mut scene = prepared_by(&["a", "b"]);
    let plan = scene.state.rollout.as_ref().unwrap().plan.clone();
    assert!(plan.ends_with("; first 5%, then 25% of the requests go to it"), "{plan}");
    let first = Transition::Canary { version: name(2), share: "5%".into(), step: 1, steps: 2 };
    assert_eq!(scene.step(), Some(first));
    let began = scene.now;
    assert_eq!(told(&scene), ("5%".to_owned(), 1, Some(time(began + FIRST))));
    assert_eq!((scene.state.active.clone(), scene.state.candidate.clone()), (Some(name(1)), Some(name(2))));
    assert_eq!(scene.plan().wake_at, Some(time(began + FIRST)));
    let before = scene.state.clone();
    assert_eq!(scene.step(), None, "nothing before its time");
    assert_eq!(scene.state, before, "and no write");
    scene.now = began + FIRST - 1;
    let second = Transition::Canary { version: name(2), share: "25%".into(), step: 2, steps: 2 };
    assert_eq!(scene.step(), Some(second));
    assert_eq!(told(&scene), ("25%".to_owned(), 2, Some(time(began + FIRST + SECOND))));
    scene.now += SECOND - 1;
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
    assert_eq!((scene.state.active.clone(), scene.state.previous.clone()), (Some(name(2)), Some(name(1))));
    assert_eq!(scene.state.rollout.as_ref().unwrap().canary, None);
    scene.all(|report| (report.version, report.prepared, report.canary) = (Some(name(2)), None, None));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
}

#[test]
fn a_first_version_has_nobody_to_share_with() {
    let mut scene = Scene::new(2);
    scene.spec = Some(asks(2));
    scene.step();
    // Nor need its agents know of shares.
    let old = || AgentStatus { canary: false, ..AgentStatus::of_this_release() };
    scene.all(|report| (report.prepared, report.agent) = (Some(name(2)), Some(old())));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
}

/// Who asks for all requests at once asks for no share.
#[test]
fn what_is_promoted_needs_no_agent_that_knows_of_shares() {
    let mut scene = prepared_by(&["a"]);
    let old = || AgentStatus { canary: false, ..AgentStatus::of_this_release() };
    scene.all(|report| report.agent = Some(old()));
    assert_eq!(scene.step(), None);
    scene.spec = Some(with(2, &json!({})));
    scene.spec.as_mut().unwrap().promote = Some(name(2));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
}

/// Golden prompts that change, or a Secret that is renewed: a share that is in force does not fall.
#[test]
fn other_objects_to_be_judged_by_leave_a_share_as_it_is() {
    let mut scene = sharing();
    let judged = |state: u8| format!("hash+ConfigMap:golden={state}");
    scene.state.rollout.as_mut().unwrap().judged = Some(judged(1));
    let mut asked = asks(2);
    asked.wanted.judged = judged(2);
    scene.spec = Some(asked);
    let attempt = scene.state.rollout.as_ref().unwrap().attempt;
    scene.step();
    let rollout = scene.state.rollout.as_ref().unwrap();
    assert_eq!((rollout.step, rollout.attempt), (RolloutStep::Canary, attempt));
    assert_eq!(rollout.judged, Some(judged(1)), "it is judged by what it began with");
}

#[test]
fn an_agent_that_knows_of_no_shares_is_asked_for_none() {
    let mut scene = prepared_by(&["a", "b"]);
    let old = || AgentStatus { canary: false, ..AgentStatus::of_this_release() };
    scene.pod("b", |report| report.agent = Some(old()));
    assert_eq!(scene.step(), None);
    assert!(message(&scene).contains("the agent of b does not know the share of requests"), "{}", message(&scene));
    // What it has prepared is noted before its time begins.
    scene.now += 900;
    scene.step();
    scene.now += 900;
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Deadline, .. })));
}

/// It is taken back from all, and held against it.
fn is_taken_back(mut scene: Scene, gate: GateName) {
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
    assert_eq!((scene.state.active.clone(), scene.state.candidate.clone()), (Some(name(1)), None));
    let rejected = scene.state.rejected.clone().unwrap();
    assert_eq!((rejected.version, rejected.gate, rejected.outcome), (name(2), gate, RejectedOutcome::RolledBack));
    scene.all(|report| report.canary = Some(given("5%")));
    scene.all(|report| report.prepared = None);
    scene.pod("a", |report| report.canary = None);
    if scene.counted.len() > 1 {
        assert_eq!(scene.step(), None, "one pod still gives it a share");
    }
    scene.all(|report| report.canary = None);
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
    assert_eq!(scene.step(), None, "it is latched");
    scene.settled();
}

#[test]
fn a_figure_that_passes_its_limit_takes_it_back_where_it_is_the_versions() {
    let mut alone = sharing_by(&["a"]);
    alone.replicas = 1;
    alone.all(|report| report.canary = Some(breached()));
    is_taken_back(alone, GateName::Health);
    let mut both = sharing();
    both.all(|report| report.canary = Some(breached()));
    is_taken_back(both, GateName::Health);
    // One of two is that pod's own, which goes on without; the other one was asked enough to tell.
    let mut one = sharing();
    one.pod("a", |report| report.canary = Some(breached()));
    assert_eq!(one.step(), None);
    assert!(message(&one).contains("goes on without a: 30% in 40 requests"), "{}", message(&one));
    // Where that one was asked too little it outvotes nobody.
    one.pod("b", |report| report.canary = Some(ReplicaCanary { too_few_requests: true, ..given("5%") }));
    is_taken_back(one, GateName::Health);
    // What was said in another attempt is no word of this one.
    let mut old = sharing();
    old.all(|report| report.canary = Some(breached()));
    old.reports.iter_mut().for_each(|report| report.attempt = Some(1));
    assert!(!matches!(old.step(), Some(Transition::RollingBack { .. })));
}

#[test]
fn a_candidate_whose_workers_die_is_taken_back() {
    let mut scene = sharing();
    let dead = || CandidateStatus { gates: Vec::new(), message: Some("it died".to_owned()), ..refused(&name(2)) };
    let dies = |report: &mut ReplicaStatus| {
        (report.prepared, report.canary, report.candidate) = (None, None, Some(dead()));
    };
    scene.pod("a", dies);
    assert_eq!(scene.step(), None, "one pod may be its own trouble");
    let mut late = sharing();
    late.pod("a", dies);
    scene.pod("b", dies);
    is_taken_back(scene, GateName::Load);
    // In a fleet of two nobody can tell who is right: it does not go on, and ends with the patience after the step.
    late.now += FIRST;
    assert_eq!(late.step(), None);
    late.now += PATIENCE;
    is_taken_back(late, GateName::Load);
}

#[test]
fn too_few_requests_are_told_and_hold_nobody_up() {
    let mut scene = sharing();
    scene.all(|report| report.canary = Some(ReplicaCanary { too_few_requests: true, ..given("5%") }));
    assert_eq!(scene.step(), None);
    assert!(message(&scene).ends_with("too few requests to judge it by in a, b"), "{}", message(&scene));
    scene.now += FIRST;
    assert!(matches!(scene.step(), Some(Transition::Canary { step: 2, .. })));
}

#[test]
fn by_hand_it_stays_goes_on_goes_over_or_goes_back() {
    // Paused, it stays at its share for as long as that takes, and is watched all the same.
    let mut paused = sharing();
    paused.spec = Some(with(2, &json!({"paused": true})));
    assert_eq!(paused.step(), None);
    assert_eq!(told(&paused), ("5%".to_owned(), 1, None));
    assert!(message(&paused).contains("stays so while spec.rollout.paused"), "{}", message(&paused));
    assert!(paused.plan().wake_at.is_none_or(|at| at > time(paused.now + FIRST)));
    paused.now += 100_000;
    let before = paused.state.clone();
    assert_eq!((paused.step(), &paused.state), (None, &before));
    let mut bad = sharing();
    bad.spec.clone_from(&paused.spec);
    bad.step();
    bad.all(|report| report.canary = Some(breached()));
    assert!(matches!(bad.step(), Some(Transition::RollingBack { .. })));
    // Its time begins anew when it goes on.
    paused.spec = Some(asks(2));
    assert_eq!(paused.step(), None);
    assert_eq!(told(&paused), ("5%".to_owned(), 1, Some(time(paused.now + FIRST))));
    // Promoted, paused or not, all go over, and there is no bake.
    for is_paused in [false, true] {
        let mut promoted = sharing();
        promoted.spec = Some(with(2, &json!({"paused": is_paused, "promote": name(2)})));
        assert_eq!(promoted.step(), Some(Transition::Committed { version: name(2) }));
        promoted.all(|report| (report.version, report.prepared, report.canary) = (Some(name(2)), None, None));
        promoted.step();
        assert_eq!(promoted.step(), Some(Transition::Settled { version: name(2) }));
    }
    let mut at_once = prepared_by(&["a", "b"]);
    at_once.spec = Some(with(2, &json!({"promote": name(2)})));
    assert_eq!(at_once.step(), Some(Transition::Committed { version: name(2) }), "it needs no canary first");
    // Aborted, or asked for no more, it is given up, and nothing is held against it.
    for spec in [Some(with(2, &json!({"abort": name(2)}))), Some(asks(1)), None] {
        let mut scene = sharing();
        scene.spec = spec;
        assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
        assert_eq!((scene.step_now(), scene.state.rejected.clone()), (None, None));
        assert_eq!((scene.state.active.clone(), scene.state.candidate.clone()), (Some(name(1)), None));
    }
}

#[test]
fn an_edit_begins_with_the_other_one_and_edits_of_the_steps_hold() {
    let mut scene = sharing();
    scene.spec = Some(asks(3));
    assert_eq!(scene.step(), Some(Transition::Started { version: name(3), instead_of: Some(name(2)) }));
    assert_eq!(
        (scene.step_now(), scene.state.rollout.as_ref().unwrap().canary.clone()),
        (Some(RolloutStep::Prepare), None)
    );
    // A step that is made shorter is so at once, and the share that is in force never falls.
    let steps = |steps: Value| Some(spec_with(2, json!({"canary": {"steps": steps}})));
    let mut shorter = sharing();
    shorter.now += 60;
    shorter.spec = steps(json!([{"share": "5.0%", "bake": "30s"}, {"share": "10%", "bake": "1m"}]));
    assert!(matches!(shorter.step(), Some(Transition::Canary { share, step: 2, .. }) if share.0 == "10%"));
    shorter.spec = steps(json!([{"share": "1%", "bake": "30s"}, {"share": "3%", "bake": "1m"}]));
    assert_eq!(shorter.step(), None);
    assert_eq!((told(&shorter).0, told(&shorter).1), ("10%".to_owned(), 2), "none of them is larger");
    shorter.now += 60;
    assert!(matches!(shorter.step(), Some(Transition::Committed { .. })));
    // Without any, the step goes to its end and then all go over.
    let mut none = sharing();
    none.spec = Some(spec(2));
    assert_eq!(none.step(), None);
    none.now += FIRST;
    assert!(matches!(none.step(), Some(Transition::Committed { .. })));
    // Another way is another attempt.
    let mut other = sharing();
    other.spec = Some(spec_with(2, json!({"strategy": "HoldRequests"})));
    assert!(matches!(other.step(), Some(Transition::Started { .. })));
}

/// The source of the version before is away, and all pods were lost: those that came for them have the candidate alone.
#[test]
fn where_no_pod_can_have_the_version_before_nobody_waits_for_shares() {
    let lost = |version: Option<&str>, health: ReplicaHealth| {
        [prepared_by(&["a", "b"]), sharing()].map(|mut scene| {
            scene.all(|report| (report.version, report.health) = (version.map(str::to_owned), health));
            scene
        })
    };
    let step = |scene: &mut Scene| {
        scene.step();
        scene.state.rollout.as_ref().unwrap().step
    };
    for mut scene in lost(None, ReplicaHealth::Failed) {
        assert_eq!(step(&mut scene), RolloutStep::Commit, "nobody is left whose requests could be shared");
    }
    let one = name(1);
    for (version, health) in [
        (None, ReplicaHealth::Starting),
        (Some(one.as_str()), ReplicaHealth::Failed),
        (Some(one.as_str()), ReplicaHealth::Starting),
    ] {
        for mut scene in lost(version, health) {
            assert_eq!(step(&mut scene), RolloutStep::Canary, "it comes, or comes back: {version:?} {health:?}");
        }
    }
    let [_, mut midway] = lost(None, ReplicaHealth::Failed);
    let mut held = asks(2);
    held.paused = true;
    midway.spec = Some(held);
    assert_eq!(step(&mut midway), RolloutStep::Canary, "the user says that nobody is to switch");
}

#[test]
fn what_a_pod_waits_for_midway_is_told_and_what_helps_lifts_the_verdict() {
    let mut scene = sharing();
    let asked = |deadline: u64, prompts: &str| {
        let mut spec = asks(2);
        spec.progress_deadline = std::time::Duration::from_secs(deadline);
        spec.wanted.progress_deadline = spec.progress_deadline;
        spec.wanted.judged = format!("hash+ConfigMap:golden={prompts}/");
        spec
    };
    let first = asked(900, "absent");
    scene.spec = Some(first.clone());
    scene.state.rollout.as_mut().unwrap().judged = Some(first.wanted.judged.clone());
    scene.pod("b", |report| {
        report.prepared = None;
        report.candidate = Some(CandidateStatus {
            phase: CandidatePhase::Testing,
            wait_reason: Some(WaitReason::ConfigMapNotFound),
            gates: Vec::new(),
            ..refused(&name(2))
        });
    });
    assert_eq!(scene.step(), None);
    assert_eq!(scene.state.rollout.as_ref().unwrap().wait_reason, Some(WaitReason::ConfigMapNotFound));
    scene.now += FIRST + PATIENCE;
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    let rejected = scene.state.rejected.clone().unwrap();
    assert_eq!((rejected.gate, rejected.outcome), (GateName::Deadline, RejectedOutcome::RolledBack));
    assert!(judged::stands(&rejected, &first.wanted));
    for helps in [asked(1800, "absent"), asked(900, "5e0c")] {
        assert!(!judged::stands(&rejected, &helps.wanted), "{}", rejected.judged);
    }
}

#[test]
fn a_pod_that_comes_midway_is_waited_for_and_one_that_is_lost_ends_nothing() {
    let mut scene = sharing();
    scene.counted = vec!["a", "c"];
    scene.pod("c", |report| {
        (report.version, report.agent) = (Some(name(1)), Some(AgentStatus::of_this_release()));
    });
    scene.now += FIRST;
    assert_eq!(scene.step(), None, "it has not prepared it");
    assert!(message(&scene).contains("waits for pods: c has not begun"), "{}", message(&scene));
    scene.pod("c", |report| report.prepared = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Canary { step: 2, .. })));
    // The only pod is lost, for longer than any patience.
    let mut alone = sharing_by(&["a"]);
    alone.replicas = 1;
    alone.counted.clear();
    assert_eq!(alone.step(), None);
    assert_eq!(told(&alone), ("5%".to_owned(), 1, None), "without a pod no time runs");
    alone.now += 100_000;
    alone.counted = vec!["d"];
    alone.pod("d", |report| report.version = Some(name(1)));
    assert_eq!(alone.step(), None);
    assert_eq!(told(&alone).2, Some(time(alone.now + FIRST)));
    // It never prepares it: that ends.
    alone.now += FIRST + PATIENCE;
    assert!(matches!(alone.step(), Some(Transition::RollingBack { .. })));
    // Without pods that there should be, nothing is shared.
    let mut none = sharing();
    none.replicas = 0;
    assert!(matches!(none.step(), Some(Transition::Cancelled { .. })));
}

#[test]
fn the_bake_of_the_active_version_goes_on_beside_it_and_after_it() {
    let mut scene = Scene::baking();
    scene.all(|report| report.resident = Some(name(1)));
    scene.spec = Some(asks(3));
    scene.step();
    scene.all(|report| (report.prepared, report.agent) = (Some(name(3)), Some(AgentStatus::of_this_release())));
    assert!(matches!(scene.step(), Some(Transition::Canary { .. })));
    let bake = scene.state.rollout.clone().unwrap().bake.unwrap();
    assert_eq!((bake.to, scene.state.previous.clone()), (name(1), Some(name(1))));
    let mut failing = scene.clone();
    // The candidate fails: the bake is what is left.
    scene.all(|report| report.canary = Some(ReplicaCanary { version: name(3), ..breached() }));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(2)));
    assert_eq!(scene.state.previous, Some(name(1)), "the way back stays loaded");
    scene.all(|report| report.canary = None);
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(3) }));
    let resumed = scene.state.rollout.clone().unwrap();
    assert_eq!((resumed.step, resumed.version, resumed.deadline), (RolloutStep::Bake, name(2), bake.deadline));
    assert_eq!(scene.state.previous, Some(name(1)));
    // What bakes fails: both are given up.
    failing.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(failing.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
    assert_eq!(failing.state.candidate, None);
}

#[test]
fn who_does_not_take_it_back_in_time_is_not_waited_for_for_ever() {
    let mut scene = sharing();
    scene.all(|report| report.canary = Some(breached()));
    scene.step();
    scene.all(|report| report.canary = Some(given("5%")));
    assert_eq!(scene.step(), None);
    scene.now += SWITCH_SECONDS;
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
}

#[test]
fn auto_finds_no_strategy_that_keeps_one_model_in_a_pod() {
    let lacks_room = CandidateStatus {
        phase: CandidatePhase::Failed,
        gates: vec![GateResult {
            name: GateName::Memory,
            verdict: GateVerdict::Fail,
            value: None,
            message: Some("2Gi needed, 1Gi there".to_owned()),
        }],
        ..refused(&name(2))
    };
    for (rollout, finds) in
        [(json!({"strategy": "Auto"}), true), (json!({"strategy": "Auto", "canary": canary()["canary"]}), false)]
    {
        let mut scene = Scene::serving();
        scene.spec = Some(spec_with(2, rollout));
        scene.step();
        scene.all(|report| report.candidate = Some(lacks_room.clone()));
        match scene.step() {
            Some(Transition::Started { .. }) => assert!(finds),
            Some(Transition::Rejected { message, .. }) => {
                assert!(!finds && message.contains("spec.rollout.canary needs both models in a pod"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
}
