//! Pods that are not there, or cannot have what answers, while others answer: what is told of it, and what is not.

use super::*;

fn fails(scene: &Scene, pod: &str, message: &str) {
    scene.api.edit(SERVICE, |service| {
        service["status"]["replicas"].as_array_mut().unwrap().push(json!({"pod": pod, "health": "Failed",
            "message": message, "reportedAt": "2026-01-01T00:00:00Z"}));
    });
}

fn unschedulable(pod: &str, message: &str) -> PodView {
    let trouble = Some(Trouble { reason: Reason::Unschedulable, message: message.to_owned() });
    PodView { name: pod.to_owned(), trouble, ..being_made() }
}

#[tokio::test]
async fn a_pod_that_comes_for_an_older_one_and_cannot_have_the_model_is_told() {
    let mut scene = Scene::serving().await;
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.pods.push(PodView { ready: false, ..pod("chat-c") });
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").0, "True", "it is on its way");

    let why = "Memory: the model needs 283Mi; raise spec.resources.memory; it is tried again";
    fails(&scene, "chat-c", why);
    scene.api.requests();
    scene.step().await.unwrap();
    let told = format!("2 of 2 pods answer; pod chat-c: {why}");
    assert_eq!(scene.condition("PodsReady"), ("False".to_owned(), "GateFailed".to_owned(), told.clone()));
    assert_eq!(scene.condition("Ready"), ("True".to_owned(), "GateFailed".to_owned(), told.clone()));
    let reconciling = scene.condition("Reconciling");
    assert_eq!((reconciling.0.as_str(), reconciling.1.as_str()), ("True", "GateFailed"));
    let stalled = "goes on by itself once what PodsReady tells of is put right".to_owned();
    assert_eq!(scene.condition("Stalled"), ("False".to_owned(), "GateFailed".to_owned(), stalled));
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!(
        (&event["reason"], &event["type"], &event["note"]),
        (&json!("GateFailed"), &json!("Warning"), &json!(told))
    );
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0, "told once");

    // One that only takes long says so, too, and that is no trouble: its source is slow.
    let slow = "v1 is still being brought from https://h/m.gguf; a candidate is prepared beside it";
    scene.api.edit(SERVICE, |service| {
        service["status"]["replicas"][2]["health"] = json!("Starting");
        service["status"]["replicas"][2]["message"] = json!(slow);
    });
    scene.step().await.unwrap();
    let told = format!("2 of 2 pods answer; pod chat-c: {slow}");
    let as_requested = ("True".to_owned(), "AsRequested".to_owned(), told);
    assert_eq!((scene.condition("PodsReady"), scene.condition("Ready")), (as_requested.clone(), as_requested));
    scene.api.edit(SERVICE, |service| service["status"]["replicas"][2]["health"] = json!("Failed"));

    // A worker that fails for good in a pod that had the version, beside others.
    scene.api.edit(SERVICE, |service| service["status"]["replicas"][2]["version"] = json!(active));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "WorkerFailed");
    scene.pods[2].ready = true;
    scene.api.edit(SERVICE, |service| service["status"]["replicas"][2]["health"] = json!("Healthy"));
    scene.step().await.unwrap();
    assert_eq!(
        (scene.condition("Ready").1, scene.condition("Stalled").1),
        ("AsRequested".into(), "AsRequested".into())
    );
}

const KEYS: &str = "/api/v1/namespaces/test/secrets/keys";

/// A pod whose container the kubelet has not made yet.
fn waiting_for_its_container() -> PodView {
    PodView { name: "chat-c".to_owned(), creation_limit: Some(Timestamp::MAX), ..being_made() }
}

#[tokio::test]
async fn a_secret_that_a_pod_cannot_be_made_without_is_told_at_once_and_only_looked_for_then() {
    let mut scene = Scene::serving().await;
    scene.api.edit(SERVICE, |service| service["spec"]["api"] = json!({"keysSecretRef": {"name": "keys"}}));
    scene.step().await.unwrap();
    let look = format!("GET {KEYS}");
    let looked = |scene: &Scene| scene.api.requests().iter().filter(|request| request.line == look).count();
    assert_eq!(looked(&scene), 0, "every pod is there");

    scene.pods.push(waiting_for_its_container());
    let action = scene.step().await.unwrap();
    assert_eq!(action, Action::requeue(limits::JUDGED_POLL), "no watch tells when it comes");
    let why = "pod chat-c waits for Secret keys (spec.api.keysSecretRef), which is not there: create it";
    let told = format!("2 of 2 pods answer; {why}");
    assert_eq!(scene.condition("PodsReady"), ("False".to_owned(), "SecretNotFound".to_owned(), told.clone()));
    assert_eq!(scene.condition("Ready").0, "True", "the others answer");
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!(
        (&event["reason"], &event["type"], &event["note"]),
        (&json!("SecretNotFound"), &json!("Warning"), &json!(told))
    );
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0, "told once");

    // It is there, and the kubelet will see it: what it takes for that is no trouble.
    scene
        .api
        .put(KEYS, json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": "test"}}));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "AsRequested");
    // Whether it is there cannot be seen: nothing is said of it.
    scene.api.remove(KEYS);
    scene.api.fail(&look, 403, "Forbidden");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "AsRequested");
    scene.pods.pop();
    scene.step().await.unwrap();
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(looked(&scene), 0, "nobody waits for it");
}

#[tokio::test]
async fn a_volume_that_cannot_be_mounted_is_told_with_the_words_of_the_kubelet() {
    let mut scene = Scene::serving().await;
    let look = "GET /api/v1/namespaces/test/events";
    let looks = |scene: &Scene| {
        let requests = scene.api.requests();
        requests.into_iter().filter(|request| request.line == look).map(|request| request.query).collect::<Vec<_>>()
    };
    scene.pods.push(waiting_for_its_container());
    let action = scene.step().await.unwrap();
    assert_eq!(action, Action::requeue(limits::JUDGED_POLL), "no watch tells of it");
    assert_eq!(looks(&scene).len(), 0, "pods take a while");

    let soon = limits::CREATING_TIMEOUT - limits::VOLUMES_LOOK_AFTER;
    scene.pods.last_mut().unwrap().creation_limit = Some(scene.now + soon);
    let says = "MountVolume.SetUp failed for volume \"models\" : no route to host";
    let event = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "one"}, "involvedObject": {},
        "reason": "FailedMount", "message": says, "lastTimestamp": scene.now.to_string()});
    scene.api.put("/api/v1/namespaces/test/events/one", event);
    scene.step().await.unwrap();
    let looked = looks(&scene);
    assert!(looked.len() == 1 && looked[0].contains("involvedObject.name%3Dchat-c"), "{looked:?}");
    let why = format!(
        "2 of 2 pods answer; pod chat-c waits for a volume: {says}; put that right, and the pod goes on by itself"
    );
    assert_eq!(scene.condition("PodsReady"), ("False".to_owned(), "FailedMount".to_owned(), why));
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0, "told once");

    scene.api.fail(look, 403, "Forbidden");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "AsRequested", "what cannot be seen is not told");
    assert_eq!(looks(&scene).len(), 1);
    scene.pods.pop();
    scene.step().await.unwrap();
    assert_eq!(looks(&scene).len(), 0);
}

#[tokio::test]
async fn credentials_that_a_container_cannot_be_made_without_are_told_by_the_field_that_names_them() {
    let mut scene = Scene::serving().await;
    scene.api.edit(SERVICE, |service| {
        service["spec"]["api"] = json!({"keysSecretRef": {"name": "keys"},
            "responseStore": {"s3": {"bucket": "responses", "secretRef": {"name": "store"}}}});
    });
    scene
        .api
        .put(KEYS, json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", "namespace": "test"}}));
    scene.step().await.unwrap();
    let message = "pod chat-c waits with CreateContainerConfigError: `kubectl describe pod chat-c` says why";
    let trouble = Trouble { reason: Reason::CreateContainerError, message: message.to_owned() };
    scene.pods.push(PodView { name: "chat-c".to_owned(), trouble: Some(trouble), ..being_made() });
    scene.step().await.unwrap();
    let (_, reason, told) = scene.condition("PodsReady");
    assert_eq!(reason, "SecretNotFound");
    assert!(
        told.contains("waits for Secret store (spec.api.responseStore.s3.secretRef), which is not there"),
        "{told}"
    );
}

/// Tokens of an account that was deleted are of no use, whoever has its name by now.
#[tokio::test]
async fn pods_whose_account_is_made_anew_are_replaced_and_it_is_told_why() {
    let mut scene = Scene::serving().await;
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0, "nothing is left to be noted");
    let template = |scene: &Scene| scene.api.get::<Deployment>(DEPLOYMENT).unwrap().spec.unwrap().template;
    let before = template(&scene);
    let at = |seconds: i64| scene.now.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap();
    let (made, anew) = (at(0), at(2 * limits::CLOCK_SKEW.as_secs() as i64));
    for pod in &mut scene.pods {
        (pod.account, pod.made) = (Some("chat-gantry".to_owned()), Some(made));
    }
    scene.api.remove(ACCOUNT);
    scene.step().await.unwrap();
    assert!(scene.api.writes().contains(&format!("PATCH {ACCOUNT}")));
    assert_eq!(template(&scene), before, "the new one is not known yet");
    scene.api.edit(ACCOUNT, |account| account["metadata"]["creationTimestamp"] = json!(anew.to_string()));
    scene.step().await.unwrap();
    let account: PartialObjectMeta<ServiceAccount> = scene.api.get(ACCOUNT).unwrap();
    let annotations = template(&scene).metadata.unwrap().annotations.unwrap();
    assert_eq!(annotations.get("gantry.dev/pod-account"), account.metadata.uid.as_ref());
    let (status, reason, message) = scene.condition("PodsReady");
    assert_eq!((status.as_str(), reason.as_str()), ("False", "AccountReplaced"));
    assert!(message.contains("pod chat-a is not heard of any more: its ServiceAccount chat-gantry"), "{message}");
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!((&event["reason"], &event["type"]), (&json!("AccountReplaced"), &json!("Warning")));
    scene.pods.iter_mut().for_each(|pod| pod.made = Some(anew));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "AsRequested");
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0, "they are replaced once");
}

/// That another version ends its last requests first is how rollouts go.
#[tokio::test]
async fn a_wait_for_room_is_told_in_the_column_and_by_no_event() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    for (reason, events) in [("NoRoom", 0), ("FetchBackOff", 1)] {
        scene.api.requests();
        let message = format!("waits until {old} is unloaded");
        let candidate = json!({"version": new, "phase": "Validating", "waitReason": reason, "message": message});
        scene.report(json!({"version": old, "candidate": candidate}));
        scene.step().await.unwrap();
        assert_eq!(scene.condition("Ready").1, reason);
        assert_eq!(scene.api.writes().iter().filter(|line| *line == EVENTS).count(), events, "{reason}");
    }
}

#[tokio::test]
async fn why_pods_of_the_other_side_are_not_there_stands_in_the_column() {
    let mut scene = Scene::serving().await;
    scene.api.edit(SERVICE, |service| service["spec"]["rollout"] = json!({"strategy": "BlueGreen"}));
    scene.ask_for("2");
    scene.step().await.unwrap();
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Ready").1, "RollingOut", "they are on their way");
    let why = "pod chat-green-a finds no node: no GPU";
    scene.pods.push(PodView { side_label: Some(Side::Green), ..unschedulable("chat-green-a", why) });
    scene.api.requests();
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!((&event["reason"], &event["type"]), (&json!("Unschedulable"), &json!("Warning")));
    assert!(event["note"].as_str().unwrap().contains(why), "{event}");
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().iter().filter(|line| *line == EVENTS).count(), 0, "told once");
    for type_ in ["UpToDate", "Ready"] {
        let (status, reason, message) = scene.condition(type_);
        assert_eq!((status.as_str(), reason.as_str()), ("False", "Unschedulable"), "{type_}: {message}");
        assert!(message.contains(why), "{type_}: {message}");
    }
    assert_eq!(scene.condition("Available").0, "True");
    let candidate = scene.service().status.unwrap().candidate_version.unwrap();
    assert_eq!(scene.version(&candidate).status.unwrap().reason.as_deref(), Some("Unschedulable"));
}

#[tokio::test]
async fn what_is_to_be_corrected_of_a_version_that_the_spec_names_no_more_is_told_with_the_way_to_it() {
    let mut scene = Scene::serving().await;
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.pods.push(PodView { ready: false, ..pod("chat-c") });
    fails(&scene, "chat-c", "Fetch: there is no such file; correct its uri in the spec");
    scene.step().await.unwrap();
    let way = format!("that is of {active}: set spec.model back to it");
    assert!(!scene.condition("PodsReady").2.contains(&way), "the spec names it");
    scene.ask_for("2");
    scene.step().await.unwrap();
    let told = scene.condition("PodsReady").2;
    assert!(told.contains(&way), "{told}");
}

/// Also beside a pod that is not there at all, and while a rollout goes back.
#[tokio::test]
async fn who_answers_with_another_version_and_cannot_have_the_active_one_is_told() {
    let mut scene = Scene::serving().await;
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.api.edit(SERVICE, |service| {
        let restores = json!({"version": active, "phase": "Fetching", "waitReason": "FetchBackOff",
            "message": "its source is away"});
        service["status"]["replicas"][1] = json!({"pod": "chat-b", "health": "Healthy", "version": "chat-bad",
            "candidate": restores, "reportedAt": "2026-01-01T00:00:00Z"});
    });
    scene.step().await.unwrap();
    let told = "pod chat-b answers with chat-bad: its source is away";
    let pods_ready = scene.condition("PodsReady");
    assert!(pods_ready.1 == "FetchBackOff" && pods_ready.2.contains(told), "{pods_ready:?}");
    scene.pods.push(unschedulable("chat-c", "pod chat-c finds no node: no GPU"));
    scene.step().await.unwrap();
    let (_, reason, both) = scene.condition("PodsReady");
    assert!(reason == "Unschedulable" && both.contains("pod chat-c finds no node") && both.contains(told), "{both}");
    scene.pods.pop();
    scene.api.edit(SERVICE, |service| {
        service["status"]["previousVersion"] = json!("chat-bad");
        service["status"]["rollout"] = json!({"version": active, "step": "Rollback", "attempt": 9, "plan": "",
            "startedAt": "2026-01-01T00:00:00Z", "deadline": "2099-01-01T00:00:00Z"});
    });
    scene.step().await.unwrap();
    let rolling_back = scene.condition("PodsReady");
    assert!(rolling_back.1 == "FetchBackOff" && rolling_back.2.contains(told), "{rolling_back:?}");
}

/// A pod that finds its node is still on its way for a while.
#[tokio::test]
async fn that_a_trouble_is_over_is_told_once_all_pods_answer() {
    let mut scene = Scene::serving().await;
    scene.pods[1] = unschedulable("chat-b", "pod chat-b finds no node");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Ready").1, "Unschedulable");
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.pods[1] = PodView { ready: false, ..pod("chat-b") };
    scene.api.edit(SERVICE, |service| {
        let fetches = json!({"version": active, "phase": "Fetching"});
        service["status"]["replicas"][1] = json!({"pod": "chat-b", "health": "Starting", "candidate": fetches,
            "reportedAt": "2026-01-01T00:00:00Z"});
    });
    scene.api.requests();
    scene.step().await.unwrap();
    let told = format!("1 of 2 pods answer; pod chat-b: {active} is Fetching");
    let waits = |status: &str| (status.to_owned(), "WaitingForPods".to_owned(), told.clone());
    assert_eq!((scene.condition("Ready"), scene.condition("PodsReady")), (waits("True"), waits("False")));
    let events = |scene: &Scene| {
        let events = scene.api.requests().into_iter().filter(|request| request.line == EVENTS);
        events.map(|event| (event.body["reason"].clone(), event.body["note"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(events(&scene), [], "it is on its way");
    scene.pods[1] = pod("chat-b");
    scene.api.edit(SERVICE, |service| {
        service["status"]["replicas"][1] = json!({"pod": "chat-b", "health": "Healthy", "version": active,
            "reportedAt": "2026-01-01T00:00:00Z"});
    });
    scene.step().await.unwrap();
    assert_eq!(events(&scene), [(json!("PodsReady"), json!("2 of 2 pods answer"))]);
}

#[tokio::test]
async fn who_may_ask_is_a_change_of_the_pods_and_of_no_version() {
    let mut scene = Scene::serving().await;
    let before = scene.service().status.unwrap();
    scene.api.edit(SERVICE, |service| {
        service["spec"]["api"] = json!({"keysSecretRef": {"name": "keys"}, "modelAliases": ["gpt-4o"]});
    });
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [format!("PATCH {DEPLOYMENT}")]);
    let after = scene.service().status.unwrap();
    assert_eq!((after.active_version, after.rollout), (before.active_version, None));
    let deployment: Deployment = scene.api.get(DEPLOYMENT).unwrap();
    let pod = deployment.spec.unwrap().template.spec.unwrap();
    assert!(pod.containers[0].args.as_ref().unwrap().contains(&"--alias=gpt-4o".to_owned()));
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0);
}

#[tokio::test]
async fn an_event_with_another_text_is_one_of_its_own() {
    let mut scene = Scene::serving().await;
    let mut lines = Vec::new();
    for message in
        ["pod chat-c finds no node: no GPU", "pod chat-d finds no node: no CPU", "pod chat-c finds no node: no GPU"]
    {
        scene.pods.push(unschedulable("chat-c", message));
        scene.step().await.unwrap();
        let requests = scene.api.requests();
        let event = requests.iter().find(|request| request.line.contains("/events")).unwrap();
        let note = event.body["note"].as_str().unwrap().to_owned();
        assert!(note.ends_with(message), "{note}");
        lines.push(event.line.split(' ').next().unwrap().to_owned());
        scene.pods.pop();
        scene.step().await.unwrap();
        scene.api.requests();
    }
    assert_eq!(lines, ["POST", "POST", "PATCH"], "the same again is counted");
}

#[tokio::test]
async fn a_rollout_tells_why_the_pods_do_not_come_that_it_waits_for() {
    let mut scene = Scene::serving().await;
    scene.outdated = true;
    scene.ask_for("2");
    let why = "pod chat-c finds no node: 0/1 nodes are available: 1 Insufficient cpu; add such a node";
    scene.pods.push(unschedulable("chat-c", why));
    scene.step().await.unwrap();
    scene.step().await.unwrap();
    let ready = scene.condition("Ready");
    assert_eq!((ready.0.as_str(), ready.1.as_str()), ("False", "Unschedulable"));
    assert!(ready.2.contains("2 older pods are replaced first"), "{}", ready.2);
    assert_eq!(ready.2.matches(why).count(), 1, "{}", ready.2);
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    assert!(scene.version(&new).status.unwrap().message.unwrap().contains(why));

    // A rollout of which nobody waits for it, as of a third pod, says it beside.
    let mut scene = Scene::serving().await;
    scene.ask_for("2");
    scene.step().await.unwrap();
    scene.pods.push(unschedulable("chat-c", why));
    scene.step().await.unwrap();
    let ready = scene.condition("Ready");
    assert_eq!(ready.1, "Unschedulable");
    assert!(ready.2.starts_with("Prepare of") && ready.2.ends_with(why), "{}", ready.2);
}

#[tokio::test]
async fn what_pods_wait_for_is_no_stall_and_is_not_denied() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": old, "candidate": {"version": new, "phase": "Testing",
        "waitReason": "ConfigMapNotFound", "message": "ConfigMap golden is not there: create it"}}));
    scene.step().await.unwrap();
    let told = "goes on by itself once what UpToDate tells of is put right".to_owned();
    assert_eq!(scene.condition("Stalled"), ("False".to_owned(), "ConfigMapNotFound".to_owned(), told));
    assert!(scene.condition("UpToDate").2.contains("ConfigMap golden is not there: create it"));
}

#[tokio::test]
async fn the_gates_of_a_version_are_kept_though_the_store_is_behind() {
    let mut scene = Scene::new();
    scene.step().await.unwrap();
    let version = scene.service().status.unwrap().candidate_version.unwrap();
    let gates =
        |names: &[&str]| -> Vec<Value> { names.iter().map(|name| json!({"name": name, "verdict": "Pass"})).collect() };
    let six = ["Fetch", "Digest", "Format", "Memory", "Template", "Load"];
    let report = |gates: Vec<Value>| json!({"candidate": {"version": version, "phase": "Testing", "gates": gates}});
    scene.report(report(gates(&six[..4])));
    scene.step().await.unwrap();
    // The pods have loaded it before the store has seen the write of these four.
    scene.behind = Some(scene.api.list(&format!("{VERSIONS}/")));
    let mut all = report(gates(&six));
    all["prepared"] = json!(version);
    scene.report(all);
    scene.step().await.unwrap();
    scene.report(json!({"version": version}));
    for _ in 0..3 {
        scene.step().await.unwrap();
    }
    assert_eq!(scene.version(&version).status.unwrap().gate_summary.as_deref(), Some("6/6"));
    // And what is wrong once the store has caught up is put right.
    scene.behind = None;
    scene.api.edit(&format!("{VERSIONS}/{version}"), |version| version["status"]["phase"] = json!("Pending"));
    scene.step().await.unwrap();
    let status = scene.version(&version).status.unwrap();
    assert_eq!((status.phase.unwrap().as_str(), status.gate_summary.as_deref()), ("Active", Some("6/6")));
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0);
}

#[tokio::test]
async fn another_address_of_the_same_file_is_told() {
    let mut scene = Scene::serving().await;
    let version = scene.service().status.unwrap().active_version.unwrap();
    let source = |scene: &Scene, uri: &str| {
        scene.api.edit(SERVICE, |service| service["spec"]["model"]["source"]["uri"] = json!(uri));
    };
    source(&scene, "https://mirror/1.gguf?part=1");
    scene.step().await.unwrap();
    let told = "; a pod that has not its file has it from https://mirror/1.gguf from now on";
    assert_eq!(scene.condition("UpToDate").2, format!("{version} answers{told}"));
    assert_eq!(scene.version(&version).status.unwrap().message, Some(format!("answers{told}")));
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0, "told once");
    source(&scene, "https://models/1.gguf");
    scene.step().await.unwrap();
    assert_eq!(scene.version(&version).status.unwrap().message.as_deref(), Some("answers"));
}

#[tokio::test]
async fn without_a_pod_nothing_answers() {
    let mut scene = Scene::serving().await;
    let version = scene.service().status.unwrap().active_version.unwrap();
    scene.api.edit(SERVICE, |service| service["spec"]["replicas"] = json!(0));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").2, "no pod is asked for", "while two end");
    scene.pods.clear();
    scene.step().await.unwrap();
    let status = scene.version(&version).status.unwrap();
    assert_eq!(status.message.as_deref(), Some("no pod runs that could answer with it"));
    let serving = status.conditions.iter().find(|condition| condition.type_ == "Serving").unwrap();
    assert_eq!((serving.status.as_str(), serving.reason.as_str()), ("False", "NoPodReady"));
}
