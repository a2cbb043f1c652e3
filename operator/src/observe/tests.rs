#![allow(clippy::unwrap_used)]
//! What is read from pods, what stores keep, and what they wake and wait for.

use std::time::Duration;

use gantry_crds::SERVICE_LABEL;
use serde_json::json;

use super::*;

#[tokio::test]
async fn an_object_that_cannot_be_read_hides_no_other() {
    let guarded = |name: &str, replicas: serde_json::Value| -> DeserializeGuard<Noting> {
        let model = json!({"servedName": "m", "source": {"uri": "http://models/m.gguf"}});
        let spec = json!({"model": model, "replicas": replicas});
        let object = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": name, "namespace": "ns"}, "spec": spec});
        serde_json::from_value(object).unwrap()
    };
    let (bad, good) = (guarded("bad", json!("many")), guarded("good", json!(1)));
    assert!(bad.0.is_err() && good.0.is_ok());
    let events = [Event::Init, Event::InitApply(bad.clone()), Event::InitApply(good), Event::InitDone]
        .into_iter()
        .chain([Event::Apply(bad)])
        .map(watcher::Result::Ok);
    let left: Vec<_> = readable(futures::stream::iter(events)).map(Result::unwrap).collect().await;
    let names = left.iter().filter_map(|event| match event {
        Event::InitApply(service) | Event::Apply(service) => Some(service.0.name_any()),
        _ => None,
    });
    assert_eq!((names.collect::<Vec<_>>(), left.len()), (vec!["good".to_owned()], 3));
}

#[tokio::test]
async fn an_object_that_cannot_be_read_any_more_is_gone_when_it_is_deleted() {
    let object = |kind: &str, spec: serde_json::Value| {
        let labels = json!({SERVICE_LABEL: "chat"});
        json!({"apiVersion": "gantry.dev/v1alpha1", "kind": kind, "spec": spec,
            "metadata": {"name": "chat", "namespace": "ns", "labels": labels}})
    };
    let model = json!({"servedName": "m", "source": {"uri": "http://models/m.gguf"}});
    let service = |replicas: serde_json::Value| -> DeserializeGuard<Noting> {
        serde_json::from_value(object("InferenceService", json!({"model": model, "replicas": replicas}))).unwrap()
    };
    let version = |revision: serde_json::Value| -> DeserializeGuard<ModelVersion> {
        let spec = json!({"service": "chat", "revision": revision, "model": model, "runtime": {}});
        serde_json::from_value(object("ModelVersion", spec)).unwrap()
    };
    let (services, writer) = reflector::store();
    let events = vec![
        Event::Apply(service(json!(1))),
        Event::Apply(service(json!("many"))),
        Event::Delete(service(json!("many"))),
    ];
    let events = readable(stream::iter(events.into_iter().map(watcher::Result::Ok)));
    let mut events = stored(events, |noting: Noting| trimmed_service(noting.0), writer, services.clone());
    assert_eq!(events.next().await.unwrap().name, "chat");
    assert_eq!(services.state().len(), 1);
    assert_eq!(events.next().await.unwrap().name, "chat", "whoever works on it learns that it is gone");
    assert_eq!(services.state().len(), 0);
    let (versions, writer) = reflector::store();
    let events = vec![Event::Apply(version(json!(1))), Event::Delete(version(json!("first")))];
    let events = readable(stream::iter(events.into_iter().map(watcher::Result::Ok)));
    let mut events = stored(events, |version: ModelVersion| Kept::of(&version), writer, services);
    assert_eq!(events.next().await.unwrap().name, "chat");
    assert_eq!(versions.state().len(), 1);
    assert_eq!(events.next().await.unwrap().name, "chat", "its service is told");
    assert_eq!(versions.state().len(), 0);
}

#[test]
fn of_what_clients_leave_on_a_service_only_what_is_read_is_kept() {
    let large = "x".repeat(200 << 10);
    let service: InferenceService = serde_json::from_value(json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7", "labels": {"team": "a"},
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": large, "notes": large,
                RESTART_ANNOTATION: "now", RETRY_ANNOTATION: large}},
        "spec": {"model": {"servedName": "m", "source": {"uri": "http://models/m.gguf"}}},
    }))
    .unwrap();
    let kept = trimmed_service(service).metadata;
    let wanted = json!({"name": "chat", "namespace": "ns", "uid": "u", "resourceVersion": "7", "labels": {},
        "annotations": {RESTART_ANNOTATION: "now", RETRY_ANNOTATION: "x".repeat(RETRY_TOKEN_CHARS_MAX)}, "managedFields": []});
    let mut kept = serde_json::to_value(kept).unwrap();
    for empty in ["labels", "managedFields"] {
        kept.as_object_mut().unwrap().entry(empty).or_insert(wanted[empty].clone());
    }
    assert_eq!(kept, wanted);
    let mut child = role("chat");
    child.annotations_mut().extend([("notes".to_owned(), large), ("gantry.dev/applied".to_owned(), "hash".to_owned())]);
    let child = super::kept(child, |_| {}).object().unwrap();
    assert_eq!(serde_json::to_value(child.annotations()).unwrap(), json!({"gantry.dev/applied": "hash"}));
}

fn role(service: &str) -> Role {
    let metadata = json!({"name": format!("{service}-gantry"), "namespace": "ns", "labels": {SERVICE_LABEL: service},
        "managedFields": [{"manager": "gantry"}]});
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]);
    serde_json::from_value(json!({"metadata": metadata, "rules": rules})).unwrap()
}

#[tokio::test]
async fn what_was_missed_while_a_watch_was_away_wakes_every_service() {
    let (services, mut writer) = reflector::store();
    let service = |name: &str| {
        let spec = json!({"model": {"servedName": "m", "source": {"uri": "http://models/m.gguf"}}});
        let mut service = InferenceService::new(name, serde_json::from_value(spec).unwrap());
        service.metadata.namespace = Some("ns".to_owned());
        service
    };
    for name in ["a", "b"] {
        writer.apply_watcher_event(&Event::Apply(service(name)));
    }
    let (roles, writer) = reflector::store();
    let events = [
        vec![Event::Init, Event::InitApply(role("a")), Event::InitApply(role("b")), Event::InitDone],
        vec![Event::Apply(role("b"))],
        // The watch broke, and a's was deleted meanwhile: no event says so.
        vec![Event::Init, Event::InitApply(role("b")), Event::InitDone],
    ];
    let events = stream::iter(events.into_iter().flatten().map(watcher::Result::Ok));
    let keep = |role: Role| Kept::of(&role);
    let woken: Vec<_> = stored(events, keep, writer, services).map(|woken| woken.name).collect().await;
    let [first, change, again] = [&woken[..2], &woken[2..3], &woken[3..]].map(|names| {
        let mut names = names.to_vec();
        names.sort_unstable();
        names
    });
    assert_eq!((first, change, again), (vec!["a".into(), "b".into()], vec!["b".into()], vec!["a".into(), "b".into()]));
    assert_eq!(get(&roles, "a-gantry", "ns"), None);
    assert_eq!(get(&roles, "b-gantry", "ns").unwrap(), role("b"));
    assert_eq!(of_service(&roles, "b", "ns"), [role("b")]);
    assert_eq!((of_service(&roles, "b", "other"), of_service(&roles, "a", "ns")), (vec![], vec![]));
}

fn pod(status: serde_json::Value) -> Pod {
    let mut pod = serde_json::from_value(json!({
        "metadata": {"name": "chat-1", "annotations": {"big": "one"}},
        "spec": {"serviceAccountName": "mine", "containers": [{"name": "server"}]},
        "status": status,
    }))
    .unwrap();
    trim_pod(&mut pod);
    pod
}

#[test]
fn only_running_pods_that_stay_are_counted() {
    let running = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    let view = PodView::of(&pod(running.clone()));
    assert!(view.counted && view.ready && !view.over);
    assert_eq!(view.account.as_deref(), Some("mine"));
    let mut ending = pod(running);
    ending.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    let view = PodView::of(&ending);
    assert!(!view.counted && !view.ready && !view.over);
    assert!(!PodView::of(&pod(json!({"phase": "Pending"}))).counted);
    let evicted = PodView::of(&pod(json!({"phase": "Failed"})));
    assert!(!evicted.counted && evicted.over);
}

fn waiting(reason: &str, last: Option<&str>) -> serde_json::Value {
    let last = last.map(|reason| json!({"terminated": {"reason": reason, "exitCode": 137}}));
    let message = format!("back-off: try {}", reason.len());
    json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z", "containerStatuses": [{"name": "server",
        "image": "r/server:1", "imageID": "", "ready": false, "restartCount": 3, "lastState": last.unwrap_or_default(),
        "state": {"waiting": {"reason": reason, "message": message}}}]})
}

/// The same with an init container that waits for `reason`, or runs once more, or has ended well where that is empty.
fn with_init(mut status: serde_json::Value, reason: &str, restarts: i32) -> serde_json::Value {
    let state = match reason {
        "" => json!({"terminated": {"reason": "Completed", "exitCode": 0}}),
        "runs" => json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}),
        reason => json!({"waiting": {"reason": reason}}),
    };
    status["initContainerStatuses"] = json!([{"name": "mesh", "image": "r/mesh:1", "imageID": "", "ready": reason.is_empty(),
        "restartCount": restarts, "started": true, "state": state,
        "lastState": if restarts > 0 { json!({"terminated": {"reason": "Error", "exitCode": 1}}) } else { json!({}) }}]);
    status
}

#[test]
fn what_helps_a_pod_to_a_node_is_what_no_node_has() {
    let told = |message: &str| {
        let status = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]});
        let told = PodView::of(&pod(status)).trouble.unwrap().message;
        told.split("; ").last().unwrap().to_owned()
    };
    let disk = "add such a node, or lower spec.cache.sizeLimit, which pods ask for as disk";
    assert_eq!(told("0/1 nodes are available: 1 Insufficient ephemeral-storage."), disk);
    assert_eq!(told("0/1 nodes are available: 1 Insufficient cpu."), "add such a node, or lower spec.resources");
    let both = told("0/2 nodes are available: 1 Insufficient ephemeral-storage, 2 Insufficient memory.");
    assert_eq!(both, format!("{disk}, or lower spec.resources"));
    for why in [
        "node(s) had untolerated taint {gpu: }",
        "node(s) didn't match Pod's node affinity/selector",
        "node(s) were unschedulable",
    ] {
        let told = told(&format!("0/1 nodes are available: 1 {why}."));
        assert!(told.contains("let these pods onto one") && !told.contains("spec."), "{told}");
    }
    assert_eq!(told("0/0 nodes are available"), "add such a node");
}

#[test]
fn a_pod_that_cannot_run_says_why() {
    use gantry_crds::conditions::Reason;
    let unschedulable = json!({"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no nvidia.com/gpu."}]});
    let evicted = json!({"phase": "Failed", "reason": "Evicted", "message":
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 72Mi. Container server was using 2Gi."});
    let rejected = |reason: &str, why: &str| json!({"phase": "Failed", "reason": reason, "message": format!("Pod was rejected: {why}")});
    for (status, reason, starts) in [
        (unschedulable, Reason::Unschedulable, "pod chat-1 finds no node: 0/1 nodes: no nvidia.com/gpu; add"),
        (waiting("ErrImagePull", None), Reason::ImagePullBackOff, "pod chat-1 cannot have its image r/server:1: "),
        (waiting("ImagePullBackOff", None), Reason::ImagePullBackOff, "pod chat-1 cannot have its image r/server:1: "),
        (waiting("CrashLoopBackOff", Some("Error")), Reason::CrashLoopBackOff, "pod chat-1 ends again and again"),
        (waiting("CrashLoopBackOff", Some("OOMKilled")), Reason::OOMKilled, "pod chat-1 took more than its memory"),
        (
            waiting("CreateContainerConfigError", None),
            Reason::CreateContainerError,
            "pod chat-1 waits with CreateContainerConfigError: `kubectl describe pod chat-1` says why",
        ),
        (evicted, Reason::Evicted, "pod chat-1 was evicted: The node was low on resource: memory"),
        (
            rejected("OutOfcpu", "Node didn't have enough resource: cpu, requested: 2000, used: 7000, capacity: 8000"),
            Reason::PodFailed,
            "a node would not run a pod, or ended it (OutOfcpu): Pod was rejected: Node didn't have enough resource: cpu; where",
        ),
        (
            rejected(
                "UnexpectedAdmissionError",
                "Allocate failed due to devices unavailable. Requested: 1, Available: 0",
            ),
            Reason::PodFailed,
            "a node would not run a pod, or ended it (UnexpectedAdmissionError): Pod was rejected: Allocate failed due to devices \
             unavailable; where",
        ),
        (
            json!({"phase": "Failed", "reason": "Terminated", "message": "Pod was terminated in response to imminent node shutdown."}),
            Reason::PodFailed,
            "a node would not run a pod, or ended it (Terminated): Pod was terminated in response to imminent node shutdown; where",
        ),
        (
            with_init(waiting("PodInitializing", None), "ErrImagePull", 0),
            Reason::ImagePullBackOff,
            "pod chat-1 cannot have its image r/mesh:1: ",
        ),
        (
            with_init(waiting("PodInitializing", None), "CrashLoopBackOff", 4),
            Reason::CrashLoopBackOff,
            "pod chat-1 ends again and again: see `kubectl logs chat-1 -c mesh --previous`",
        ),
        (
            with_init(waiting("PodInitializing", None), "runs", 8),
            Reason::CrashLoopBackOff,
            "pod chat-1 ends again and again: see `kubectl logs chat-1 -c mesh --previous`",
        ),
        (
            with_init(waiting("CrashLoopBackOff", Some("Error")), "", 0),
            Reason::CrashLoopBackOff,
            "pod chat-1 ends again and again: see `kubectl logs chat-1 -c server --previous`",
        ),
    ] {
        let trouble = PodView::of(&pod(status)).trouble.unwrap();
        assert_eq!(trouble.reason, reason, "{}", trouble.message);
        assert!(trouble.message.starts_with(starts), "{}", trouble.message);
    }
    assert_eq!(PodView::of(&pod(waiting("ContainerCreating", None))).trouble, None);
    assert_eq!(PodView::of(&pod(json!({"phase": "Succeeded", "reason": "Completed"}))).trouble, None);
}

#[test]
fn the_image_that_cannot_be_had_is_told_and_not_the_one_before() {
    let mut pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "chat-1"},
        "spec": {"containers": [{"name": "server", "image": "r/server:2"}]},
        "status": waiting("ErrImagePull", Some("Error")),
    }))
    .unwrap();
    trim_pod(&mut pod);
    let told = PodView::of(&pod).trouble.unwrap().message;
    assert!(told.starts_with("pod chat-1 cannot have its image r/server:2: "), "{told}");
}

/// A container that dies runs, has ended and waits in turn: the same is told all the time, until it is ready.
#[test]
fn a_container_that_dies_again_and_again_is_told_of_without_a_pause() {
    let ended = json!({"terminated": {"reason": "Error", "exitCode": 1}});
    let told = |ready: bool, restarts: i32, now: &serde_json::Value| {
        let status = json!({"phase": "Running", "containerStatuses": [{"name": "server", "image": "", "imageID": "",
            "ready": ready, "restartCount": restarts, "state": now, "lastState": ended}]});
        PodView::of(&pod(status)).trouble
    };
    let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    let waits = json!({"waiting": {"reason": "CrashLoopBackOff"}});
    let loops = told(false, 7, &waits).unwrap();
    assert_eq!(loops.reason, gantry_crds::conditions::Reason::CrashLoopBackOff);
    for now in [&running, &ended, &json!({"waiting": {"reason": "RunContainerError"}})] {
        assert_eq!(told(false, 8, now).as_ref(), Some(&loops), "{now}");
    }
    assert_eq!(told(true, 8, &running), None);
    assert_eq!(told(false, 1, &running), None, "it starts again, for the first time");
}

#[test]
fn what_is_over_is_no_trouble_any_more() {
    let state = |ready: bool, now: serde_json::Value| {
        json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [{
            "name": "server", "image": "", "imageID": "", "ready": ready, "restartCount": 1, "state": now,
            "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]})
    };
    let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
    assert!(PodView::of(&pod(state(false, running.clone()))).trouble.is_some(), "it starts again");
    assert_eq!(PodView::of(&pod(state(true, running))).trouble, None);
}

#[test]
fn an_evicted_pod_counts_while_one_is_missing_and_creation_may_take_a_while() {
    let at = |text: &str| text.parse::<Timestamp>().unwrap();
    let (soon, late) = (at("2026-01-01T00:01:59Z"), at("2026-01-01T00:02:00Z"));
    let evicted = PodView::of(&pod(json!({"phase": "Failed", "reason": "Evicted"})));
    let observed = Observed { pods: vec![evicted], ..Observed::default() };
    assert!(observed.trouble(Side::Blue, true, soon).is_some() && observed.trouble(Side::Blue, false, soon).is_none());
    let creating = PodView::of(&pod(waiting("ContainerCreating", None)));
    let observed = Observed { pods: vec![creating], ..Observed::default() };
    assert_eq!((observed.trouble(Side::Blue, true, soon), observed.next_trouble(soon)), (None, Some(late)));
    let trouble = observed.trouble(Side::Blue, true, late).unwrap();
    assert!(trouble.message.contains("its volumes, its network or its init containers"), "{}", trouble.message);
    assert_eq!(observed.next_trouble(late), None);
}

#[test]
fn a_pod_that_runs_for_long_and_says_nothing_is_told_of() {
    let at = |text: &str| text.parse::<Timestamp>().unwrap();
    let (soon, late) = (at("2026-01-01T00:01:59Z"), at("2026-01-01T00:02:00Z"));
    let running = |ready: bool| {
        let observed = PodView::of(&pod(
            json!({"phase": "Running", "containerStatuses": [{"name": "server", "image": "",
            "imageID": "", "ready": ready, "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]}),
        ));
        Observed { pods: vec![observed], ..Observed::default() }
    };
    let mut silent = running(false);
    assert_eq!((silent.trouble(Side::Blue, false, soon), silent.next_trouble(soon)), (None, Some(late)));
    let trouble = silent.trouble(Side::Blue, false, late).unwrap();
    assert_eq!(trouble.reason, gantry_crds::conditions::Reason::NoReport, "{}", trouble.message);
    assert_eq!(
        trouble.message,
        "pod chat-1 has run for more than 120 s, does not answer, and reports nothing: see `kubectl logs chat-1 -c server`, and whether \
         its network lets it reach the API server"
    );
    assert_eq!(silent.next_trouble(late), None);
    silent.are_heard_of(None);
    assert!(silent.trouble(Side::Blue, false, late).is_some());
    let status = json!({"replicas": [{"pod": "chat-1", "health": "Starting", "reportedAt": "2026-01-01T00:00:00Z"}]});
    silent.are_heard_of(Some(&serde_json::from_value(status).unwrap()));
    assert_eq!(silent.trouble(Side::Blue, false, late), None, "it is heard of");
    assert_eq!(running(true).trouble(Side::Blue, false, late), None, "it answers");
    let creating = Observed { pods: vec![PodView::of(&pod(waiting("PodInitializing", None)))], ..Observed::default() };
    assert_eq!(creating.next_trouble(soon), Some(late), "what its init containers take may be too long, too");
}

#[test]
fn a_trimmed_pod_holds_its_account_of_its_spec_and_no_annotations() {
    let pod = pod(json!({"phase": "Running", "hostIP": "10.0.0.1"}));
    let spec = serde_json::to_value(pod.spec.as_ref().unwrap()).unwrap();
    assert_eq!(spec, json!({"serviceAccountName": "mine", "containers": []}));
    assert!(pod.annotations().is_empty() && pod.status.unwrap().host_ip.is_none());
}

/// A store, and how it is filled: an empty list is a list.
fn listed<K>(is: bool) -> (Store<K>, Writer<K>)
where
    K: reflector::Lookup<DynamicType = ()> + Clone + 'static,
{
    let (store, mut writer) = reflector::store();
    if is {
        [Event::Init, Event::InitDone].iter().for_each(|event| writer.apply_watcher_event(event));
    }
    (store, writer)
}

/// Whether passes go on, within their patience and after it, when one kind has not been listed.
#[tokio::test(start_paused = true)]
async fn a_kind_of_child_that_cannot_be_listed_holds_up_no_service_for_long() {
    const KINDS: usize = 10;
    for (unlisted, goes_on) in (0..KINDS).map(|kind| (kind, kind >= 4)).chain([(KINDS, true)]) {
        let is = |kind: usize| kind != unlisted;
        let (services, _s) = listed(is(0));
        let (versions, _v) = listed(is(1));
        let (pods, _p) = listed(is(2));
        let (deployments, _d) = listed(is(3));
        let (endpoints, _e) = listed(is(4));
        let (service_accounts, _a) = listed(is(5));
        let (roles, _r) = listed(is(6));
        let (role_bindings, _b) = listed(is(7));
        let (budgets, _u) = listed(is(8));
        let (network_policies, _n) = listed(is(9));
        let stores = Stores {
            services,
            versions,
            pods,
            deployments,
            endpoints,
            service_accounts,
            roles,
            role_bindings,
            budgets,
            network_policies,
        };
        let started = Instant::now();
        let ready =
            tokio::time::timeout(Duration::from_secs(60), stores.ready(started + Duration::from_secs(30))).await;
        assert_eq!(ready.is_ok(), goes_on, "{unlisted}");
        let waited = if unlisted == KINDS {
            0
        } else if goes_on {
            30
        } else {
            60
        };
        assert_eq!(started.elapsed().as_secs(), waited, "{unlisted}");
        if goes_on {
            assert!(stores.ready(started).await.is_ok(), "no pass waits again");
        }
    }
}
