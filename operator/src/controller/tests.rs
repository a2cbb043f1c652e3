#![allow(clippy::unwrap_used)]
//! Whole reconciles against the API server of `testing`: which requests are made, in which order, with which bodies.

use gantry_crds::{
    ModelVersion,
    conditions::Reason,
    status::{RolloutStep, Side},
};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::ServiceAccount};
use kube::core::PartialObjectMeta;
use serde_json::{Value, json};

use super::*;
use crate::{
    observe::{PodView, Trouble},
    testing::FakeApi,
};

mod failures;
mod latch;
mod trouble;

const SERVICE: &str = "/apis/gantry.dev/v1alpha1/namespaces/test/inferenceservices/chat";
const STATUS: &str = "PATCH /apis/gantry.dev/v1alpha1/namespaces/test/inferenceservices/chat/status";
const VERSIONS: &str = "/apis/gantry.dev/v1alpha1/namespaces/test/modelversions";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/test/deployments/chat";
const GREEN: &str = "/apis/apps/v1/namespaces/test/deployments/chat-green";
const PREVIEW: &str = "/api/v1/namespaces/test/services/chat-preview";
const ACCOUNT: &str = "/api/v1/namespaces/test/serviceaccounts/chat-gantry";
const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/test/roles/chat-gantry";
const BINDING: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/test/rolebindings/chat-gantry";
const ENDPOINT: &str = "/api/v1/namespaces/test/services/chat";
const BUDGET: &str = "/apis/policy/v1/namespaces/test/poddisruptionbudgets/chat";
const POLICY: &str = "/apis/networking.k8s.io/v1/namespaces/test/networkpolicies/chat";
const PROMPTS: &str = "/api/v1/namespaces/test/configmaps/golden";
const SECRET: &str = "/api/v1/namespaces/test/secrets/hf";
const EVENTS: &str = "POST /apis/events.k8s.io/v1/namespaces/test/events";
const CHILDREN: [&str; 7] = [ACCOUNT, ROLE, BINDING, POLICY, ENDPOINT, BUDGET, DEPLOYMENT];

/// One service in a fake cluster, reconciled by hand.
struct Scene {
    api: FakeApi,
    context: Context,
    pods: Vec<PodView>,
    /// Whether the pods are of an older template than the Deployment's.
    outdated: bool,
    /// The versions as a store has them that is behind.
    behind: Option<Vec<ModelVersion>>,
    now: Timestamp,
}

impl Scene {
    fn new() -> Self {
        let api = FakeApi::default();
        api.put(SERVICE, json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"name": "chat", "namespace": "test", "uid": "the-uid", "generation": 1},
            "spec": {"replicas": 2, "resources": {"cpu": "0.5", "memory": "1Gi"}, "model": {"servedName": "chat", "source": {
                "uri": "https://models/1.gguf", "sha256": "1".repeat(64), "secretRef": {"name": "hf"}}}},
        }));
        api.put(
            SECRET,
            json!({"apiVersion": "v1", "kind": "Secret",
            "metadata": {"name": "hf", "namespace": "test", "annotations": {"gantry.dev/hosts": "models"}}}),
        );
        let context = context(&api, "server:1");
        Self {
            api,
            context,
            pods: vec![pod("chat-a"), pod("chat-b")],
            outdated: false,
            behind: None,
            now: Timestamp::from_second(1_800_000_000).unwrap(),
        }
    }

    /// A service that serves its first version with all that belongs to it; the requests so far are forgotten.
    async fn serving() -> Self {
        let mut scene = Self::new();
        scene.step().await.unwrap();
        let version = scene.service().status.unwrap().candidate_version.unwrap();
        scene.report(json!({"prepared": version}));
        scene.step().await.unwrap();
        scene.report(json!({"version": version}));
        for _ in 0..3 {
            scene.step().await.unwrap();
        }
        scene.api.requests();
        scene
    }

    fn service(&self) -> InferenceService {
        self.api.get(SERVICE).unwrap()
    }

    /// The user asks for the file with this digit in its digest.
    fn ask_for(&self, digit: &str) {
        self.api.edit(SERVICE, |service| service["spec"]["model"]["source"]["sha256"] = json!(digit.repeat(64)));
    }

    fn version(&self, name: &str) -> ModelVersion {
        self.api.get(&format!("{VERSIONS}/{name}")).unwrap()
    }

    fn observed(&self) -> Observed {
        let mut versions: Vec<ModelVersion> =
            self.behind.clone().unwrap_or_else(|| self.api.list(&format!("{VERSIONS}/")));
        versions.sort_by_key(|version| version.spec.revision);
        let deployment: Option<Deployment> = self.api.get(DEPLOYMENT);
        let mut pods = self.pods.clone();
        if let Some(deployment) = deployment.as_ref().filter(|_| !self.outdated) {
            let template = deployment.spec.as_ref().unwrap().template.metadata.clone().unwrap();
            pods.iter_mut()
                .for_each(|pod| pod.template = crate::build::TemplateId::of(template.labels.as_ref().unwrap()));
        }
        Observed {
            versions,
            pods,
            blue: deployment,
            green: self.api.get(GREEN),
            endpoint: self.api.get(ENDPOINT),
            preview: self.api.get(PREVIEW),
            service_account: self.api.get::<PartialObjectMeta<ServiceAccount>>(ACCOUNT),
            role: self.api.get(ROLE),
            role_binding: self.api.get(BINDING),
            budget: self.api.get(BUDGET),
            network_policy: self.api.get(POLICY),
        }
    }

    async fn step(&mut self) -> Result<Action, act::Error> {
        self.now = self.now.checked_add(jiff::SignedDuration::from_secs(1)).unwrap();
        step(&self.service(), self.observed(), &self.context, self.now).await
    }

    /// Lets both pods report.
    fn report(&self, entry: Value) {
        let at = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(self.now);
        self.api.edit(SERVICE, |service| {
            let attempt = service["status"]["rollout"]["attempt"].clone();
            let entries = ["chat-a", "chat-b"].map(|pod| {
                let mut entry = entry.clone();
                entry["pod"] = json!(pod);
                if entry["health"].is_null() {
                    entry["health"] = json!("Healthy");
                }
                entry["reportedAt"] = json!(at);
                entry["attempt"] = attempt.clone();
                entry
            });
            service["status"]["replicas"] = json!(entries);
        });
    }

    fn condition(&self, type_: &str) -> (String, String, String) {
        let conditions = self.service().status.unwrap().conditions;
        let condition = conditions.into_iter().find(|condition| condition.type_ == type_).unwrap();
        (condition.status, condition.reason, condition.message)
    }
}

fn context(api: &FakeApi, server_image: &str) -> Context {
    let client = api.client();
    let (stores, _) = Stores::watch(&client);
    let new_pods = NewPods { image: server_image.to_owned(), private_sources: true };
    Context::new(client, stores, new_pods, "operator-0".to_owned(), Arc::default())
}

fn pod(name: &str) -> PodView {
    PodView { name: name.to_owned(), counted: true, ready: true, ..being_made() }
}

/// A pod that does not run yet.
fn being_made() -> PodView {
    PodView { side_label: Some(Side::Blue), ..PodView::default() }
}

#[tokio::test]
async fn a_finalizer_of_before_is_taken_off_and_none_is_set() {
    for being_deleted in [false, true] {
        let mut scene = Scene::new();
        scene.api.edit(SERVICE, |service| {
            service["metadata"]["finalizers"] = json!(["other/one", OLD_FINALIZER]);
            if being_deleted {
                service["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
            }
        });
        let version = scene.service().resource_version().unwrap();
        scene.step().await.unwrap();
        let requests = scene.api.requests();
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0].line, format!("PATCH {SERVICE}"));
        assert_eq!(requests[0].body, json!({"metadata": {"resourceVersion": version, "finalizers": ["other/one"]}}));
        scene.step().await.unwrap();
        assert_eq!(scene.service().finalizers(), ["other/one"]);
        assert_eq!(scene.api.writes().is_empty(), being_deleted);
    }
}

#[tokio::test]
async fn the_first_reconcile_makes_identity_then_pods_then_version_then_status() {
    let mut scene = Scene::new();
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let version = scene.service().status.unwrap().candidate_version.unwrap();
    let mut expected: Vec<_> =
        CHILDREN.iter().flat_map(|path| [format!("GET {path}"), format!("PATCH {path}")]).collect();
    expected.insert(0, format!("GET {SECRET}"));
    expected.extend([format!("GET {VERSIONS}"), format!("POST {VERSIONS}"), STATUS.to_owned(), EVENTS.to_owned()]);
    assert_eq!(requests.iter().map(|request| request.line.clone()).collect::<Vec<_>>(), expected);
    for request in requests.iter().filter(|request| request.line.starts_with("PATCH ")) {
        assert_eq!(request.query, "&force=true&fieldManager=gantry-operator", "{}", request.line);
    }
    for request in requests.iter().filter(|request| request.line.starts_with("PATCH ") && request.line != STATUS) {
        assert_eq!(request.body["metadata"]["ownerReferences"][0]["uid"], "the-uid", "{}", request.line);
    }
    let status = &requests.iter().find(|request| request.line == STATUS).unwrap().body;
    assert_eq!(status["metadata"], json!({"name": "chat", "resourceVersion": "1"}));
    assert_eq!(status["status"]["rollout"]["step"], "Prepare");
    assert_eq!(status["status"]["versions"][0]["name"], json!(version));
    assert_eq!(status["status"].get("replicas"), None, "the entries of pods are theirs");
    assert_eq!(scene.version(&version).spec.revision, 1);
}

#[tokio::test]
async fn a_settled_service_causes_no_request() {
    let mut scene = Scene::serving().await;
    for _ in 0..3 {
        let action = scene.step().await.unwrap();
        assert_eq!(
            action,
            Action::requeue(limits::RESYNC_PERIOD),
            "looked at again, should a watch have missed something"
        );
    }
    assert_eq!(scene.api.requests().len(), 0);
    assert_eq!(scene.condition("Ready").0, "True");
    assert_eq!(scene.condition("Reconciling").0, "False");
    assert_eq!(scene.condition("Stalled").0, "False");
}

#[tokio::test]
async fn figures_of_pods_cause_no_request() {
    let mut scene = Scene::serving().await;
    let version = scene.service().status.unwrap().active_version.unwrap();
    let memory = |bytes: i64| json!({"version": version, "memory": {"measuredBytes": bytes, "limitBytes": 1 << 30}});
    scene.report(memory(100 << 20));
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [STATUS]);
    assert_eq!(scene.service().status.unwrap().memory.as_deref(), Some("100Mi/1Gi"));
    for megabytes in [101, 99, 103] {
        scene.report(memory(megabytes << 20));
        scene.step().await.unwrap();
        assert_eq!(scene.api.writes().len(), 0, "{megabytes}");
    }
    scene.report(memory(120 << 20));
    scene.step().await.unwrap();
    assert_eq!(scene.service().status.unwrap().memory.as_deref(), Some("120Mi/1Gi"));
}

#[tokio::test]
async fn a_pod_that_no_node_takes_is_told_once_though_others_answer_and_is_cleared() {
    let mut scene = Scene::serving().await;
    let message = "pod chat-c finds no node: no GPU".to_owned();
    let unschedulable = Trouble { reason: Reason::Unschedulable, message };
    scene.pods.push(PodView { name: "chat-c".to_owned(), trouble: Some(unschedulable), ..being_made() });
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!((&event["reason"], &event["type"]), (&json!("Unschedulable"), &json!("Warning")));
    let told = "2 of 2 pods answer; pod chat-c finds no node: no GPU".to_owned();
    assert_eq!(scene.condition("PodsReady"), ("False".to_owned(), "Unschedulable".to_owned(), told.clone()));
    let column = ("True".to_owned(), "Unschedulable".to_owned(), told);
    assert_eq!(scene.condition("Ready"), column);
    assert_eq!(scene.condition("Reconciling").1, "Unschedulable");
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0, "told once");

    scene.pods.pop();
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [STATUS, EVENTS]);
    let over = ("True".to_owned(), "AsRequested".to_owned(), "2 of 2 pods answer".to_owned());
    assert_eq!(scene.condition("PodsReady"), over);
    assert_eq!((scene.condition("Ready").2, scene.condition("Reconciling").0), (over.2, "False".to_owned()));
}

#[tokio::test]
async fn a_commit_is_one_write_that_names_active_previous_and_step() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": old, "prepared": new}));
    scene.api.requests();
    let version = scene.service().resource_version();
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let writes: Vec<_> = requests.iter().filter(|request| request.line == STATUS).collect();
    assert_eq!(writes.len(), 1);
    let body = &writes[0].body;
    assert_eq!(body["metadata"]["resourceVersion"], json!(version));
    assert_eq!(body["status"]["activeVersion"], json!(new));
    assert_eq!(body["status"]["previousVersion"], json!(old));
    assert_eq!(body["status"]["rollout"]["step"], "Commit");
    assert_eq!(body["status"].get("candidateVersion"), None);
    assert!(!requests.iter().any(|request| request.line.contains("deployments")), "no pod is touched");
    assert_eq!(scene.version(&new).status.unwrap().phase, Some(gantry_crds::status::VersionPhase::Promoting));
}

#[tokio::test]
async fn a_rejection_is_told_in_both_objects_and_in_an_event() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": old, "candidate": {"version": new, "phase": "Failed", "gates": [
        {"name": "Fetch", "verdict": "Pass"},
        {"name": "Digest", "verdict": "Fail", "value": "got 3333", "message": "the file is another one"}]}}));
    scene.api.requests();
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!((&event["reason"], &event["type"]), (&json!("VersionRejected"), &json!("Warning")));
    assert_eq!(event["related"]["name"], json!(new));
    let version = scene.version(&new).status.unwrap();
    assert_eq!(version.phase, Some(gantry_crds::status::VersionPhase::Rejected));
    assert_eq!(version.gate_summary.as_deref(), Some("got 3333"));
    let stalled = scene.condition("Stalled");
    assert_eq!((stalled.0.as_str(), stalled.1.as_str()), ("True", "GateFailed"));
    assert_eq!(scene.condition("Available").0, "True");
    assert_eq!(scene.condition("Ready").0, "False");
    scene.report(json!({"version": old}));
    scene.step().await.unwrap();
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0, "latched and settled");
}

#[tokio::test]
async fn an_operator_of_another_version_restarts_no_pod() {
    let mut scene = Scene::serving().await;
    scene.context = context(&scene.api, "server:2");
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0);
    // The user asks for it: now the new image comes.
    scene.api.edit(SERVICE, |service| service["metadata"]["annotations"] = json!({"gantry.dev/restart": "now"}));
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [format!("PATCH {DEPLOYMENT}")]);
    let deployment: Deployment = scene.api.get(DEPLOYMENT).unwrap();
    let pod = deployment.spec.unwrap().template;
    assert_eq!(pod.spec.unwrap().containers[0].image.as_deref(), Some("server:2"));
    assert_eq!(pod.metadata.unwrap().annotations.unwrap()["gantry.dev/restart"], "now");
}

#[tokio::test]
async fn drift_is_undone() {
    let mut scene = Scene::serving().await;
    scene.api.edit(ROLE, |role| role["rules"][0]["verbs"] = json!(["*"]));
    scene.api.remove(ENDPOINT);
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [format!("PATCH {ROLE}"), format!("PATCH {ENDPOINT}")]);
}

#[tokio::test]
async fn why_a_pod_does_not_answer_stands_in_available() {
    let mut scene = Scene::serving().await;
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.pods[1].ready = false;
    let says = |scene: &Scene, message: Value| {
        scene.report(json!({"version": active}));
        scene.api.edit(SERVICE, |service| {
            service["status"]["replicas"][1] = json!({"pod": "chat-b", "health": "Starting", "reportedAt": "2026-01-01T00:00:00Z",
                "candidate": {"version": active, "phase": "Fetching", "message": message}});
        });
    };
    says(&scene, json!("https://models/1.gguf cannot be reached"));
    scene.step().await.unwrap();
    let (status, reason, message) = scene.condition("Available");
    assert_eq!((status.as_str(), reason.as_str()), ("True", "PodsReady"));
    assert_eq!(message, "1 of 2 pods answer; pod chat-b: https://models/1.gguf cannot be reached");
    assert_eq!(scene.condition("Ready").2, message, "kubectl get shows this one");
    assert_eq!(scene.condition("Reconciling").2, "pod chat-b: https://models/1.gguf cannot be reached");
    scene.api.requests();
    says(&scene, json!("https://models/1.gguf cannot be reached"));
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes().len(), 0, "each try says the same");
    scene.pods[1].ready = true;
    scene.report(json!({"version": active}));
    scene.step().await.unwrap();
    assert_eq!(scene.condition("Available").2, "2 of 2 pods answer", "and it goes when it is over");
}

#[tokio::test]
async fn what_a_later_release_writes_is_read_and_handed_on() {
    let mut scene = Scene::serving().await;
    let old = scene.service().status.unwrap().active_version.unwrap();
    scene.ask_for("2");
    scene.step().await.unwrap();
    let new = scene.service().status.unwrap().candidate_version.unwrap();
    scene.report(json!({"version": old, "health": "Dreaming", "degradation": "Sulking", "mood": {"since": 1},
        "agent": {"gates": ["Toxicity"], "strategies": ["Canary"], "wishes": []},
        "candidate": {"version": new, "phase": "Simmering", "gates": [{"name": "Toxicity", "verdict": "Warn", "value": "3%"}]}}));
    scene.step().await.unwrap();
    let status = scene.version(&new).status.unwrap();
    assert_eq!(
        serde_json::to_value(&status.gates).unwrap(),
        json!([{"name": "Toxicity", "verdict": "Warn", "value": "3%"}])
    );
    scene.report(json!({"version": old, "candidate": {"version": new, "phase": "Failed",
        "gates": [{"name": "Toxicity", "verdict": "Fail", "message": "rude"}]}}));
    scene.step().await.unwrap();
    assert_eq!(scene.service().status.unwrap().rejected.unwrap().gate.as_str(), "Toxicity");
    // A step that this operator does not know, since it took the place of a later one: the version that answers goes on.
    scene.api.edit(SERVICE, |service| {
        service["status"]["rollout"] = json!({"version": new, "step": "Shadow", "attempt": 2, "plan": "",
            "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:00:00Z"});
    });
    scene.step().await.unwrap();
    let status = scene.service().status.unwrap();
    assert_eq!((status.active_version, status.rollout), (Some(old), None));
}

#[tokio::test]
async fn a_pod_that_answers_with_another_version_is_named() {
    let mut scene = Scene::serving().await;
    let active = scene.service().status.unwrap().active_version.unwrap();
    scene.report(json!({"version": active}));
    scene.api.edit(SERVICE, |service| service["status"]["replicas"][1]["version"] = json!("chat-old"));
    scene.step().await.unwrap();
    let message = format!("{active} answers; pod chat-b with chat-old, which cannot have it: see PodsReady");
    let up_to_date = ("True".to_owned(), "AsRequested".to_owned(), message);
    assert_eq!(scene.condition("UpToDate"), up_to_date);
    assert_eq!(scene.condition("PodsReady").1, "AsRequested", "it may be on its way");

    let why = "the host of its uri has no address";
    let waits_for = |scene: &Scene, reason: &str| {
        scene.api.edit(SERVICE, |service| {
            service["status"]["replicas"][1]["candidate"] =
                json!({"version": active, "phase": "Fetching", "waitReason": reason, "message": why});
        });
    };
    waits_for(&scene, "NoRoom");
    scene.step().await.unwrap();
    assert_eq!(scene.condition("PodsReady").1, "AsRequested", "the version that it has ends its last requests");
    waits_for(&scene, "FetchBackOff");
    scene.api.requests();
    scene.step().await.unwrap();
    assert_eq!(scene.condition("UpToDate"), up_to_date);
    let told = format!("2 of 2 pods answer; pod chat-b answers with chat-old: {why}");
    for (type_, status) in [("PodsReady", "False"), ("Ready", "True"), ("Reconciling", "True")] {
        let (is, reason, message) = scene.condition(type_);
        assert_eq!((is.as_str(), reason.as_str()), (status, "FetchBackOff"), "{type_}: {message}");
        assert!(told.ends_with(&message), "{type_}: {message}");
    }
    let requests = scene.api.requests();
    let event = &requests.iter().find(|request| request.line == EVENTS).unwrap().body;
    assert_eq!((&event["reason"], &event["note"]), (&json!("FetchBackOff"), &json!(told)));
}

#[tokio::test]
async fn what_is_not_supported_changes_nothing_but_the_status() {
    let mut scene = Scene::serving().await;
    scene.api.edit(SERVICE, |service| {
        service["spec"]["rollout"]["gates"]["drift"] = json!({"reference": "Golden"});
        service["spec"]["replicas"] = json!(5);
    });
    scene.step().await.unwrap();
    assert_eq!(scene.api.writes(), [STATUS, EVENTS]);
    let (status, reason, message) = scene.condition("Supported");
    assert_eq!((status.as_str(), reason.as_str()), ("False", "NotSupported"));
    assert_eq!(message, "spec.rollout.gates.drift.reference is not supported yet: use Active");
    // One condition says so; the others say where.
    let others = ["UpToDate", "Ready", "Stalled"].map(|type_| scene.condition(type_));
    for (_, reason, message) in others {
        assert_eq!(reason, "NotSupported");
        assert_eq!(message, "the spec as it stands changes nothing: the condition Supported says why");
    }
    assert_eq!(scene.condition("Available").0, "True");
    scene.step().await.unwrap();
    assert_eq!(scene.api.requests().len(), 0);
}

#[tokio::test]
async fn the_entry_of_a_pod_that_is_gone_is_removed_in_its_name() {
    let mut scene = Scene::serving().await;
    scene.pods.remove(1);
    scene.step().await.unwrap();
    let requests = scene.api.requests();
    let asked = requests.iter().position(|request| request.line == "GET /api/v1/namespaces/test/pods/chat-b").unwrap();
    let removal = &requests[asked + 1];
    assert_eq!(
        (removal.line.as_str(), removal.query.as_str()),
        (STATUS, "&force=true&fieldManager=gantry-agent-chat-b")
    );
    assert_eq!(
        removal.body,
        json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "chat"}})
    );
    let left: Vec<_> = scene.service().status.unwrap().replicas.into_iter().map(|entry| entry.pod).collect();
    assert_eq!(left, ["chat-a"]);
}

#[tokio::test]
async fn the_entry_of_a_pod_that_the_store_does_not_know_yet_stays() {
    let mut scene = Scene::serving().await;
    scene.pods.remove(1);
    scene.api.put(
        "/api/v1/namespaces/test/pods/chat-b",
        json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "chat-b", "namespace": "test"}, "status": {"phase": "Running"}}),
    );
    scene.step().await.unwrap();
    assert_eq!(scene.service().status.unwrap().replicas.len(), 2);
}

#[tokio::test]
async fn pods_are_told_which_files_a_revision_names() {
    let mut scene = Scene::serving().await;
    let digests = |scene: &Scene| scene.service().status.unwrap().digests;
    assert_eq!(digests(&scene), ["1".repeat(64)]);
    scene.api.edit(SERVICE, |service| {
        service["metadata"]["generation"] = json!(2);
        service["spec"]["model"]["source"]["sha256"] = json!("2".repeat(64));
        let draft = json!({"uri": "https://models/d.gguf", "sha256": "d".repeat(64)});
        service["spec"]["runtime"] = json!({"speculative": {"draft": draft}});
    });
    scene.step().await.unwrap();
    assert_eq!(digests(&scene), ["1", "2", "d"].map(|digit| digit.repeat(64)), "with the write that names the version");
    // What is taken out of the history is not named any more.
    for version in scene.api.list::<ModelVersion>(&format!("{VERSIONS}/")) {
        if version.spec.revision == 2 {
            scene.api.remove(&format!("{VERSIONS}/{}", version.name_any()));
        }
    }
    scene.api.edit(SERVICE, |service| service["spec"]["model"]["source"]["sha256"] = json!("1".repeat(64)));
    scene.api.edit(SERVICE, |service| drop(service["spec"].as_object_mut().unwrap().remove("runtime")));
    scene.step().await.unwrap();
    assert_eq!(digests(&scene), ["1".repeat(64)]);
}

#[tokio::test]
async fn a_service_that_is_being_deleted_is_left_to_garbage_collection() {
    let mut scene = Scene::serving().await;
    // In the foreground: it stays until its dependents are gone, of which some are by now.
    scene.api.edit(SERVICE, |service| {
        service["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
        service["metadata"]["finalizers"] = json!(["foregroundDeletion"]);
    });
    for path in [ENDPOINT, DEPLOYMENT] {
        scene.api.remove(path);
    }
    for _ in 0..2 {
        assert_eq!(scene.step().await.unwrap(), Action::await_change());
        assert_eq!(scene.api.requests().len(), 0);
    }
}

#[tokio::test]
async fn nothing_is_remembered_of_a_service_that_is_gone() {
    let scene = Scene::serving().await;
    scene.context.back_off(&scene.service());
    let gone = ObjectRef::from_obj(&scene.service()).erase();
    scene.context.ended::<(), Infallible>(&Err(ControllerError::ObjectNotFound(Box::new(gone))));
    // As `reconcile` does before and after each step.
    assert!(!scene.context.is_behind(&scene.service()));
    scene.context.succeeded(&scene.service());
    assert!(scene.context.memory.lock().unwrap().is_empty());
}
