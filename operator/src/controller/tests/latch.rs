//! What refused a version is put right, and what keeps pods from judging it is told.

use super::*;

/// A service that asks for golden prompts and whose first version they have refused.
async fn refused_by_prompts() -> (Scene, String) {
    refused_by("Prompts").await
}

async fn refused_by(gate: &str) -> (Scene, String) {
    let mut scene = Scene::new();
    scene.api.edit(SERVICE, |service| {
        service["spec"]["rollout"] = json!({"gates": {"prompts": {"configMapRef": {"name": "golden"}}}});
    });
    scene.api.put(
        PROMPTS,
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "golden", "namespace": "test"}}),
    );
    scene.step().await.unwrap();
    let version = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"candidate": {"version": version, "phase": "Failed",
        "gates": [{"name": gate, "verdict": "Fail", "message": "line 1 was answered otherwise; correct the prompts"}]}}));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Stalled").1, "GateFailed");
    (scene, version)
}

#[tokio::test]
async fn a_refused_version_is_tried_again_when_its_prompts_or_credentials_are_others() {
    for (object, gate) in [(PROMPTS, "Prompts"), (SECRET, "Fetch")] {
        let (mut scene, version) = refused_by(gate).await;
        scene.step().await.unwrap();
        scene.api.requests();
        let action = scene.step().await.unwrap();
        assert_eq!(action, Action::requeue(JUDGED_POLL), "nobody tells of a change");
        let looks: Vec<_> = scene.api.requests().into_iter().map(|request| request.line).collect();
        assert_eq!(looks, [format!("GET {PROMPTS}"), format!("GET {SECRET}")]);
        scene.api.edit(object, |object| object["data"] = json!({"corrected": "yes"}));
        scene.step().await.unwrap();
        let status = scene.service().status.unwrap();
        assert_eq!((status.candidate_version.as_ref(), &status.rejected), (Some(&version), &None), "{object}");
        scene.report(json!({"prepared": version}));
        scene.step().await.unwrap();
        assert_eq!(scene.service().status.unwrap().active_version, Some(version));
        // What is served is judged by nothing.
        scene.api.requests();
        scene.step().await.unwrap();
        assert!(
            scene
                .api
                .requests()
                .iter()
                .all(|request| ![PROMPTS, SECRET].iter().any(|path| request.line.ends_with(path)))
        );
    }
}

#[tokio::test]
async fn while_pods_answer_they_are_replaced_one_by_one_and_all_at_once_while_none_does() {
    let most = |scene: &Scene| {
        let deployment: Value = scene.api.get(DEPLOYMENT).unwrap();
        let update = &deployment["spec"]["strategy"]["rollingUpdate"];
        (update["maxSurge"].clone(), update["maxUnavailable"].clone())
    };
    let nobody_is_ready = |scene: &mut Scene| scene.pods.iter_mut().for_each(|pod| pod.ready = false);
    let mut scene = Scene::new();
    nobody_is_ready(&mut scene);
    scene.step().await.unwrap();
    assert_eq!(most(&scene), (json!(0), json!("100%")));
    let scene = Scene::serving().await;
    assert_eq!(most(&scene), (json!(1), json!(0)));
    let (mut scene, version) = refused_by_prompts().await;
    nobody_is_ready(&mut scene);
    scene.step().await.unwrap();
    assert_eq!(most(&scene), (json!(0), json!("100%")), "a version that was refused answers nobody");
    // The user gives more memory: what the old pods say about the new attempt says nothing.
    scene.outdated = true;
    scene.api.edit(SERVICE, |service| service["spec"]["resources"]["memory"] = json!("2Gi"));
    scene.step().await.unwrap();
    scene.report(
        json!({"candidate": {"version": version, "phase": "Failed", "gates": [{"name": "Memory", "verdict": "Fail"}]}}),
    );
    scene.step().await.unwrap();
    let status = scene.service().status.unwrap();
    assert_eq!((status.candidate_version.as_ref(), &status.rejected), (Some(&version), &None));
    let (_, _, message) = scene.condition("UpToDate");
    assert!(message.contains("2 older pods are replaced first"), "{message}");
    assert_eq!(scene.version(&version).status.unwrap().gates, [], "nor do they stand in the version's status");
    scene.outdated = false;
    scene.report(json!({"prepared": version}));
    scene.step().await.unwrap();
    assert_eq!(scene.service().status.unwrap().active_version, Some(version));
}

#[tokio::test]
async fn a_rollout_names_the_pods_that_prepare_it() {
    let mut scene = Scene::new();
    for memory in ["1Gi", "2Gi"] {
        scene.api.edit(SERVICE, |service| service["spec"]["resources"]["memory"] = json!(memory));
        scene.step().await.unwrap();
        let rollout = scene.service().status.unwrap().rollout.unwrap();
        let deployment: Value = scene.api.get(DEPLOYMENT).unwrap();
        let template = &deployment["spec"]["template"];
        assert_eq!(template["metadata"]["labels"]["gantry.dev/pod-resources"], json!(rollout.resources));
        let environment = template["spec"]["containers"][0]["env"].as_array().unwrap();
        let told = environment.iter().find(|variable| variable["name"] == "GANTRY_POD_RESOURCES").unwrap();
        assert_eq!(told["value"], json!(rollout.resources), "and pods know what they are called");
    }
}

/// Why pods wait stands wherever somebody looks for it, from the first failed try on, and goes when it is over.
#[tokio::test]
async fn what_pods_wait_for_is_told_everywhere_and_once() {
    let mut scene = Scene::new();
    scene.step().await.unwrap();
    let version = scene.service().status.unwrap().candidate_version.unwrap();
    let why = "https://models/1.gguf cannot be read: dns error: no such host";
    let stuck =
        json!({"candidate": {"version": version, "phase": "Fetching", "waitReason": "FetchBackOff", "message": why}});
    scene.report(stuck.clone());
    scene.api.requests();
    scene.step().await.unwrap();
    let events = |scene: &Scene| -> Vec<_> {
        let requests = scene.api.requests().into_iter().filter(|request| request.line.contains("/events"));
        requests.map(|request| (request.body["reason"].clone(), request.body["note"].clone())).collect()
    };
    let message = format!("0 of 2 pods prepared; chat-a, chat-b: {why}");
    assert_eq!(events(&scene), [(json!("FetchBackOff"), json!(format!("{version}: {message}")))]);
    for type_ in ["UpToDate", "Ready"] {
        let (status, reason, text) = scene.condition(type_);
        assert_eq!(
            (status.as_str(), reason.as_str(), text.ends_with(&message)),
            ("False", "FetchBackOff", true),
            "{text}"
        );
    }
    let status = scene.version(&version).status.unwrap();
    assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("FetchBackOff"), Some(&*message)));
    let validated = status.conditions.iter().find(|condition| condition.type_ == "Validated").unwrap();
    assert_eq!((validated.reason.as_str(), &validated.message), ("FetchBackOff", &message));
    // The pods go on trying: nothing new is written of that.
    scene.report(stuck.clone());
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [""; 0]);
    // It is over.
    scene.report(json!({"candidate": {"version": version, "phase": "Validating"}}));
    scene.step().await.unwrap();
    assert_eq!((scene.condition("UpToDate").1, events(&scene)), ("RollingOut".to_owned(), vec![]));
    assert_eq!(scene.version(&version).status.unwrap().reason.as_deref(), Some("RollingOut"));
    // And again, until the time is up.
    scene.report(stuck);
    scene.step().await.unwrap();
    assert_eq!(events(&scene).len(), 1);
    scene.now = scene.now.checked_add(jiff::SignedDuration::from_secs(900)).unwrap();
    scene.step().await.unwrap();
    let rejected = scene.service().status.unwrap().rejected.unwrap();
    assert!(rejected.message.contains(why), "{}", rejected.message);
}

#[tokio::test]
async fn prompts_that_change_while_pods_prepare_are_asked_of_all_of_them_and_late_ones_restart_nothing() {
    let mut scene = Scene::new();
    scene.api.edit(SERVICE, |service| {
        service["spec"]["rollout"] = json!({"gates": {"prompts": {"configMapRef": {"name": "golden"}}}});
    });
    let attempt = |scene: &Scene| scene.service().status.unwrap().rollout.unwrap().attempt;
    scene.step().await.unwrap();
    // Pods wait for the ConfigMap, so none has read anything else yet.
    scene.api.put(PROMPTS, json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "golden"}}));
    scene.step().await.unwrap();
    assert_eq!(attempt(&scene), 1);
    let (mut scene, _) = refused_by("Fetch").await;
    scene.api.edit(SECRET, |secret| secret["data"] = json!({"token": "bmV3"}));
    scene.step().await.unwrap();
    assert_eq!(attempt(&scene), 2);
    let version = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"prepared": version}));
    scene.api.edit(PROMPTS, |prompts| prompts["data"] = json!({"prompts.jsonl": "others"}));
    scene.step().await.unwrap();
    assert_eq!((attempt(&scene), scene.service().status.unwrap().active_version), (3, None));
}

#[tokio::test]
async fn what_no_pod_judges_is_not_looked_at() {
    let mut scene = Scene::new();
    scene.api.edit(SERVICE, |service| service["spec"]["replicas"] = json!(0));
    scene.pods.clear();
    for _ in 0..2 {
        scene.step().await.unwrap();
    }
    scene.api.requests();
    assert_ne!(scene.step().await.unwrap(), Action::requeue(JUDGED_POLL));
    assert_eq!(scene.api.requests().len(), 0);
    // A rejection, though, is looked after, or nobody would see that its cause is gone.
    let (mut scene, _) = refused_by_prompts().await;
    scene.api.edit(SERVICE, |service| service["spec"]["replicas"] = json!(0));
    assert_eq!(scene.step().await.unwrap(), Action::requeue(JUDGED_POLL));
    assert_eq!(scene.condition("Stalled").1, "GateFailed");
}

fn granted(scene: &Scene) -> Vec<String> {
    scene.api.get(ROLE).as_ref().map(build::granted_secrets).unwrap_or_default().into_iter().collect()
}

#[tokio::test]
async fn agents_may_read_a_secret_from_when_it_says_for_which_hosts_it_is_until_it_does_not() {
    let mut scene = Scene::new();
    let annotate = |scene: &Scene, annotations: Value| {
        scene.api.edit(SECRET, |secret| secret["metadata"]["annotations"] = annotations);
    };
    annotate(&scene, json!({}));
    assert_eq!(scene.step().await.unwrap(), Action::requeue(JUDGED_POLL));
    assert_eq!(granted(&scene), [""; 0]);
    scene.api.remove(SECRET);
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), [""; 0], "it may come without");
    scene
        .api
        .put(SECRET, json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf", "namespace": "test"}}));
    annotate(&scene, json!({"gantry.dev/hosts": "models"}));
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), ["hf"]);
    // What cannot be looked at is as it was.
    scene.api.fail(&format!("GET {SECRET}"), 500, "InternalError");
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), ["hf"]);
    annotate(&scene, json!({}));
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_says_so_no_more_is_taken_back_from_what_answers_with_the_next_resync() {
    let mut scene = Scene::serving().await;
    scene.step().await.unwrap();
    scene.api.edit(SECRET, |secret| secret["metadata"]["annotations"] = json!({}));
    scene.api.requests();
    tokio::time::advance(RESYNC_PERIOD - std::time::Duration::from_secs(1)).await;
    scene.step().await.unwrap();
    assert_eq!((granted(&scene), scene.api.requests().len()), (vec!["hf".to_owned()], 0), "nobody asks meanwhile");
    tokio::time::advance(std::time::Duration::from_secs(1)).await;
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), [""; 0]);
}

#[tokio::test]
async fn a_right_that_was_lost_is_given_again_while_nothing_is_judged() {
    let mut scene = Scene::serving().await;
    assert_eq!(granted(&scene), ["hf"]);
    scene.api.remove(ROLE);
    scene.step().await.unwrap();
    assert_eq!(granted(&scene), ["hf"]);
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0, "and is not asked about any more");
}
