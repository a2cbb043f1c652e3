//! Requests that are refused, fail, are never answered, or come from an old object.

use super::*;
use crate::{limits::JUDGED_LOOK_TIMEOUT, testing::Recorded};

#[tokio::test]
async fn a_rollback_goes_before_children_that_are_refused() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": old, "prepared": new}));
    scene.step().await.unwrap();
    scene.report(json!({"version": new, "health": "Failed"}));
    scene.api.edit(BUDGET, |budget| budget["spec"]["maxUnavailable"] = json!(2));
    scene.api.edit(DEPLOYMENT, |deployment| deployment["spec"]["replicas"] = json!(7));
    scene.api.fail(&format!("PATCH {BUDGET}"), 403, "Forbidden");
    scene.api.requests();
    assert!(scene.step().await.unwrap_err().is_refusal());
    let status = scene.service().status.unwrap();
    assert_eq!((status.active_version, status.rollout.unwrap().step), (Some(old), RolloutStep::Rollback));
    let writes: Vec<_> = scene.api.writes().into_iter().filter(|line| !line.contains("modelversions")).collect();
    let budget = format!("PATCH {BUDGET}");
    assert_eq!(writes, [STATUS, EVENTS, &budget, &format!("PATCH {DEPLOYMENT}")], "one child holds back no other");
    // The pass after it says what was refused.
    scene.api.fail(&budget, 403, "Forbidden");
    assert!(scene.step().await.unwrap_err().is_refusal());
    let (status, reason, message) = scene.condition("Stalled");
    assert_eq!((status.as_str(), reason.as_str()), ("True", "ApplyFailed"));
    assert_eq!(message, "applying PodDisruptionBudget chat: Forbidden");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Stalled").1, "AsRequested", "and it is over when it is over");
}

#[tokio::test]
async fn a_deadline_is_kept_while_children_cannot_be_written() {
    let mut scene = Scene::serving().await;
    scene.now = whole_seconds(Timestamp::now());
    scene.api.edit(SERVICE, |service| {
        service["spec"]["model"]["source"]["sha256"] = json!("2".repeat(64));
        service["spec"]["rollout"]["progressDeadline"] = json!("60s");
    });
    scene.step().await.unwrap();
    let service = Arc::new(scene.service());
    for _ in 0..9 {
        scene.context.back_off(&service);
    }
    scene.api.edit(BUDGET, |budget| budget["spec"]["maxUnavailable"] = json!(2));
    scene.api.fail(&format!("PATCH {BUDGET}"), 403, "Forbidden");
    assert!(scene.step().await.unwrap_err().is_refusal());
    assert!(scene.context.next_try(&service) <= Duration::from_secs(65), "the deadline is sooner than the next try");
    assert_eq!(scene.context.next_try(&service), RETRY_MAX, "and is not looked at twice");
}

#[tokio::test]
async fn a_crash_between_stamping_and_the_status_is_made_good() {
    let mut scene = Scene::new();
    scene.api.fail(STATUS, 500, "InternalError");
    assert!(!scene.step().await.unwrap_err().is_refusal());
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(
        scene.api.writes(),
        [
            // Which account its pods have is known by now.
            &format!("PATCH {DEPLOYMENT}"),
            STATUS,
            EVENTS,
            &format!("PATCH {VERSIONS}/{}/status", scene.service().status.unwrap().candidate_version.unwrap())
        ]
    );
}

#[tokio::test]
async fn failures_in_a_row_wait_longer_up_to_a_limit() {
    let scene = Scene::new();
    let service = scene.service();
    let waits: Vec<_> = (0..9).map(|_| scene.context.back_off(&service).as_secs()).collect();
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
    scene.context.succeeded(&service);
    assert_eq!(scene.context.back_off(&service).as_secs(), 1);
}

/// Of an object that cannot be read any more no newer one comes: what is known of it loses every race.
#[tokio::test]
async fn races_lost_in_a_row_wait_longer_up_to_a_limit() {
    let scene = Scene::new();
    let service = scene.service();
    let waits: Vec<_> = (0..11).map(|_| scene.context.after_conflict(&service).as_millis()).collect();
    assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 102_400, 120_000]);
    scene.context.succeeded(&service);
    assert_eq!(scene.context.after_conflict(&service), CONFLICT_RETRY);
    assert_eq!(scene.context.back_off(&service).as_secs(), 1, "it is no failure");
}

#[tokio::test]
async fn somebody_elses_object_is_not_taken_over() {
    let mut scene = Scene::new();
    scene.api.put(
        ENDPOINT,
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "test"}}),
    );
    let error = scene.step().await.unwrap_err();
    assert!(error.is_refusal());
    let requests = scene.api.requests();
    assert!(requests.iter().all(|request| request.line != format!("PATCH {ENDPOINT}")));
    let failed = |requests: &[Recorded]| {
        requests.iter().filter(|request| request.line == EVENTS && request.body["reason"] == "NameTaken").count()
    };
    assert_eq!(failed(&requests), 1);
    let (status, reason, message) = scene.condition("Stalled");
    assert_eq!((status.as_str(), reason.as_str()), ("True", "NameTaken"));
    assert!(message.starts_with("Service chat exists and does not belong"), "{message}");
    assert_eq!(scene.condition("Ready").1, "NameTaken", "what the user has to do goes first");
    scene.step().await.unwrap_err();
    assert_eq!(failed(&scene.api.requests()), 0, "it is told once");
}

/// Whatever the kind of the child: pods answer, and are not reached as the spec asks, or may not do what they should.
#[tokio::test]
async fn a_service_is_not_ready_while_the_name_of_a_child_is_somebody_elses() {
    for child in CHILDREN {
        let mut scene = Scene::serving().await;
        scene.api.edit(child, |object| object["metadata"]["ownerReferences"] = json!([]));
        assert!(scene.step().await.unwrap_err().is_refusal(), "{child}");
        let requests = scene.api.requests();
        assert!(requests.iter().all(|request| request.line != format!("PATCH {child}")), "{child} is taken over");
        let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
        assert_eq!((&event["reason"], &event["type"]), (&json!("NameTaken"), &json!("Warning")), "{child}");
        let (status, reason, message) = scene.condition("Ready");
        assert_eq!((status.as_str(), reason.as_str()), ("False", "NameTaken"), "{child}");
        assert!(message.contains("does not belong to this InferenceService: rename"), "{message}");
        assert_eq!((scene.condition("Available").0, scene.condition("UpToDate").0), ("True".into(), "True".into()));
        assert!(scene.condition("Reconciling").2.contains("what Stalled tells of"));
        assert!(scene.step().await.unwrap_err().is_refusal());
        assert_eq!(scene.api.writes().len(), 0, "it is told once");
        scene.api.remove(child);
        scene.step().await.unwrap();
        assert_eq!((scene.condition("Ready").0.as_str(), scene.condition("Stalled").0.as_str()), ("True", "False"));
    }
}

#[tokio::test]
async fn a_service_that_may_not_have_its_service_is_not_ready() {
    let mut scene = Scene::serving().await;
    scene.api.remove(ENDPOINT);
    scene.api.fail(&format!("PATCH {ENDPOINT}"), 403, "exceeded quota");
    assert!(scene.step().await.unwrap_err().is_refusal());
    let (status, reason, message) = scene.condition("Ready");
    assert_eq!((status.as_str(), reason.as_str()), ("False", "ApplyFailed"));
    assert_eq!(message, "applying Service chat: exceeded quota");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Ready").0, "True");
}

#[tokio::test]
async fn a_child_that_is_refused_while_the_service_answers_stands_in_the_column_too() {
    let mut scene = Scene::serving().await;
    scene.api.remove(POLICY);
    scene.api.fail(&format!("PATCH {POLICY}"), 422, "no policies today");
    assert!(scene.step().await.unwrap_err().is_refusal());
    let (status, reason, message) = scene.condition("Ready");
    assert_eq!((status.as_str(), reason.as_str()), ("True", "ApplyFailed"));
    assert_eq!(message, "2 of 2 pods answer; applying NetworkPolicy chat: no policies today");
    assert!(scene.condition("Reconciling").2.contains("what Stalled tells of"));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Ready").1, "AsRequested");
}

#[tokio::test]
async fn a_write_from_an_old_object_has_no_effect() {
    let mut scene = Scene::serving().await;
    let stale = scene.service();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let before = scene.service();
    let mut edited = stale;
    edited.spec.model.served_name = "other".to_owned();
    let error = step(&edited, scene.observed(), &scene.context, scene.now).await.unwrap_err();
    assert!(error.is_stale(), "{error}");
    assert_eq!(scene.service().status, before.status);
}

#[tokio::test]
async fn a_store_that_is_behind_the_own_last_write_is_not_decided_on() {
    let mut scene = Scene::new();
    let before = scene.service();
    assert!(!scene.context.is_behind(&before));
    scene.step().await.unwrap();
    assert!(scene.context.is_behind(&before));
    assert!(!scene.context.is_behind(&scene.service()));
}

#[tokio::test(start_paused = true)]
async fn a_cluster_restored_to_lower_resource_versions_is_decided_on_again() {
    let mut scene = Scene::new();
    let restored = scene.service();
    scene.step().await.unwrap();
    tokio::time::advance(STORE_LAG_MAX.checked_sub(Duration::from_millis(1)).unwrap()).await;
    assert!(scene.context.is_behind(&restored));
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(!scene.context.is_behind(&restored));
}

/// Model 2 answers and bakes, with model 1 to go back to, while model 3 is prepared.
async fn preparing_behind_a_bake() -> (Scene, String, String) {
    let mut scene = Scene::serving().await;
    let first = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let second = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": first, "prepared": second}));
    scene.step().await.unwrap();
    scene.report(json!({"version": second, "resident": first}));
    scene.step().await.unwrap();
    scene.ask_for("3");
    scene.step().await.unwrap();
    let rollout = scene.service().status.unwrap().rollout.unwrap();
    assert!(rollout.step == RolloutStep::Prepare && rollout.bake.is_some());
    (scene, first, second)
}

#[tokio::test(start_paused = true)]
async fn no_look_at_what_is_judged_by_holds_up_a_rollback_or_a_switch() {
    let look = format!("GET {SECRET}");
    type Trouble = fn(&Scene, &str);
    let troubles: [(&str, Trouble); 3] = [
        ("it fails", |scene, look| scene.api.fail(look, 500, "InternalError")),
        ("it is refused", |scene, look| scene.api.fail(look, 403, "Forbidden")),
        ("it is never answered", |scene, look| scene.api.hang(look)),
    ];
    for (what, trouble) in troubles {
        let (mut scene, first, second) = preparing_behind_a_bake().await;
        scene.report(json!({"version": second, "health": "Failed"}));
        trouble(&scene, &look);
        let started = Instant::now();
        scene.step().await.unwrap();
        assert!(started.elapsed() <= JUDGED_LOOK_TIMEOUT, "{what}");
        let status = scene.service().status.unwrap();
        assert_eq!(
            (status.active_version, status.rollout.unwrap().step),
            (Some(first), RolloutStep::Rollback),
            "{what}"
        );

        let (mut scene, _, second) = preparing_behind_a_bake().await;
        let third = scene.service().status.unwrap().candidate_version.unwrap();
        scene.report(json!({"version": second, "prepared": third}));
        trouble(&scene, &look);
        assert_eq!(scene.step().await.unwrap(), Action::requeue(JUDGED_POLL), "{what}");
        assert_eq!(scene.service().status.unwrap().active_version, Some(third), "{what}");
    }
}

#[tokio::test]
async fn a_rollout_waits_for_the_identity_of_its_pods_and_for_no_other_child() {
    let others = [POLICY, ENDPOINT, BUDGET, DEPLOYMENT];
    for (children, begins) in
        [(vec![ACCOUNT], false), (vec![ROLE], false), (vec![BINDING], false), (others.to_vec(), true)]
    {
        let mut scene = Scene::new();
        for child in &children {
            scene.api.fail(&format!("PATCH {child}"), 403, "Forbidden");
        }
        assert!(scene.step().await.unwrap_err().is_refusal());
        assert_eq!(scene.condition("Stalled").1, "ApplyFailed");
        assert_eq!(scene.service().status.unwrap().rollout.is_some(), begins, "{children:?}");
        assert_eq!(scene.api.list::<ModelVersion>(VERSIONS).len(), usize::from(begins), "{children:?}");
    }
    let mut scene = Scene::new();
    scene.api.fail(&format!("POST {VERSIONS}"), 403, "Forbidden");
    assert!(scene.step().await.unwrap_err().is_refusal());
    assert!(scene.service().status.unwrap().rollout.is_none(), "nor does it begin without its version");
    assert!(scene.condition("Stalled").2.starts_with("creating ModelVersion"), "{:?}", scene.condition("Stalled"));
}

#[tokio::test]
async fn what_cannot_be_written_holds_back_nothing_else_of_a_pass() {
    let mut scene = Scene::serving().await;
    let version = scene.service().status.unwrap().active_version.unwrap();
    scene.pods.remove(1);
    scene.api.edit(&format!("{VERSIONS}/{version}"), |version| version["status"]["phase"] = json!("Pending"));
    scene.api.fail(&format!("PATCH {VERSIONS}/{version}/status"), 500, "InternalError");
    assert!(!scene.step().await.unwrap_err().is_refusal());
    assert_eq!(scene.service().status.unwrap().replicas.len(), 1, "the entry of the pod that is gone");
}

#[tokio::test]
async fn a_finalizer_that_cannot_be_taken_off_holds_up_no_rollback() {
    let (mut scene, first, second) = preparing_behind_a_bake().await;
    scene.api.edit(SERVICE, |service| service["metadata"]["finalizers"] = json!([OLD_FINALIZER]));
    scene.report(json!({"version": second, "health": "Failed"}));
    scene.api.fail(&format!("PATCH {SERVICE}"), 403, "Forbidden");
    assert!(scene.step().await.unwrap_err().is_refusal());
    assert_eq!(scene.service().status.unwrap().active_version, Some(first));
}

#[tokio::test]
async fn in_a_namespace_that_is_being_deleted_nothing_is_made_anew_or_told() {
    let mut scene = Scene::serving().await;
    for child in CHILDREN {
        scene.api.remove(child);
        scene.api.fail(&format!("PATCH {child}"), 403, "NamespaceTerminating");
    }
    let error = scene.step().await.unwrap_err();
    assert!(error.is_of_ending_namespace(), "{error}");
    let requests: Vec<_> = scene.api.requests().into_iter().map(|request| request.line).collect();
    assert_eq!(requests, [format!("GET {SECRET}"), format!("GET {ACCOUNT}"), format!("PATCH {ACCOUNT}")]);
    let policy = error_policy(Arc::new(scene.service()), &Error::Act(error), Arc::new(scene.context));
    assert_eq!(policy, Action::requeue(RETRY_MAX));
}
