//! What a pod's token may write, and where models may not come from.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_crds::{InferenceService, agent_field_manager, inference_service::LocalName, status::GateName};
use gantry_e2e::{
    harness::{
        fixtures::{ModelSource, ModelStore, ServiceFixture, apply as apply_object},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    models::DemoModel,
};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    authorization::v1::SubjectAccessReview,
    core::v1::{Pod, Secret, ServiceAccount},
};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};

/// A client with the token that the kubelet would give to `pod`, or, without one, with one that names no pod.
async fn agent_client(service: &TestService<'_>, pod: Option<&Pod>) -> Result<Client> {
    let accounts: Api<ServiceAccount> = service.namespace.api();
    let bound_object_ref = pod.map(|pod| BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
    });
    let request = TokenRequest {
        spec: TokenRequestSpec { audiences: Vec::new(), bound_object_ref, expiration_seconds: Some(600) },
        ..TokenRequest::default()
    };
    let account = format!("{}-gantry", service.fixture.name);
    let token = accounts.create_token_request(&account, &PostParams::default(), &request).await?;
    let token = token.status.context("the API server gives no token")?.token;
    let kubeconfig = std::env::var("KUBECONFIG")?;
    let mut config =
        Config::from_custom_kubeconfig(Kubeconfig::read_from(kubeconfig)?, &KubeConfigOptions::default()).await?;
    config.auth_info = serde_json::from_value(json!({"token": token}))?;
    Ok(Client::try_from(config)?)
}

/// An apply of a status by an agent.
async fn apply(client: &Client, service: &TestService<'_>, manager: &str, status: &Value) -> kube::Result<()> {
    let api: Api<InferenceService> = Api::namespaced(client.clone(), &service.namespace.name);
    let body = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": service.fixture.name}, "status": status});
    let parameters = PatchParams::apply(manager).force();
    api.patch_status(service.fixture.name, &parameters, &Patch::Apply(&body)).await.map(drop)
}

fn ensure_refused(what: &str, result: kube::Result<()>, says: &str) -> Result<()> {
    let Err(kube::Error::Api(refusal)) = &result else { anyhow::bail!("{what}: {result:?}") };
    say(format_args!("{what}: {}", refusal.message));
    ensure!(refusal.message.contains(says), "{what}: it does not say {says:?}: {}", refusal.message);
    Ok(())
}

/// The name of the service is its own, so that what RBAC refuses here is not taken for a right that agents lack.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn an_agent_may_change_its_own_entry_and_nothing_else() -> Result<()> {
    with_temp_ns("agent-rights", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let fixture = ServiceFixture { name: "guarded", min_pass: None, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &model).await?;
        let status = service.await_settled(&model, ROLLOUT_TIMEOUT).await?;
        let pods = service.pods().await?;
        let [pod, other] = pods.as_slice() else { anyhow::bail!("two pods are expected, there are {}", pods.len()) };
        let entry = |pod: &Pod| -> Result<Value> {
            let name = pod.name_any();
            let entry = status.replicas.iter().find(|entry| entry.pod == name).context("a pod has no entry")?;
            Ok(serde_json::to_value(entry)?)
        };
        let (mine, theirs) = (entry(pod)?, entry(other)?);
        let with = |entry: &Value, field: &str, value: Value| {
            let mut entry = entry.clone();
            entry[field] = value;
            entry
        };
        let client = agent_client(&service, Some(pod)).await?;
        let manager = agent_field_manager(&pod.name_any());

        let own = json!({"replicas": [with(&mine, "message", json!("by hand"))]});
        apply(&client, &service, &manager, &own).await.context("its own entry is not taken")?;
        for (what, manager, status, says) in [
            (
                "another's entry",
                &manager,
                json!({"replicas": [mine, with(&theirs, "health", json!("Failed"))]}),
                "not that of another pod",
            ),
            (
                "another's entry, as its manager",
                &agent_field_manager(&other.name_any()),
                json!({"replicas": [with(&theirs, "health", json!("Failed"))]}),
                "gantry-agent-POD",
            ),
            ("another's entry, taken away", &agent_field_manager(&other.name_any()), json!({}), "gantry-agent-POD"),
            ("the active version", &manager, json!({"replicas": [mine], "activeVersion": "evil"}), "no other field"),
            (
                "who owns the active version",
                &manager,
                json!({"replicas": [mine], "activeVersion": status.active_version}),
                "own its entry",
            ),
        ] {
            ensure_refused(what, apply(&client, &service, manager, &status).await, says)?;
        }
        let services: Api<InferenceService> = Api::namespaced(client, &namespace.name);
        let merge = PatchParams { field_manager: Some(manager.clone()), ..PatchParams::default() };
        let change = Patch::Merge(json!({"status": {"activeVersion": "evil"}}));
        let changed = services.patch_status("guarded", &merge, &change).await.map(drop);
        ensure_refused("the active version, by a merge", changed, "no other field")?;
        let change = Patch::Merge(json!({"spec": {"replicas": 1}}));
        ensure_refused("the spec", services.patch("guarded", &merge, &change).await.map(drop), "forbidden")?;
        let unbound = agent_client(&service, None).await?;
        ensure_refused("a token of no pod", apply(&unbound, &service, &manager, &own).await, "names none")?;

        let after = service.await_settled(&model, ROLLOUT_TIMEOUT).await?;
        ensure!(after.active_version == status.active_version, "it answers with another version: {after:?}");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_model_does_not_come_from_metadata_or_from_the_pod_itself() -> Result<()> {
    with_temp_ns("addresses", async |namespace| {
        let model = |host: &str| ModelSource {
            path: host.to_owned(),
            uri: format!("http://{host}/latest/meta-data/m.gguf"),
            sha256: "a".repeat(64),
        };
        let fixture = ServiceFixture { replicas: 1, min_pass: None, ..ServiceFixture::default() };
        let metadata = model("169.254.169.254");
        let service = TestService::create(namespace, fixture, &metadata).await?;
        let rejected = service.await_rejected(&metadata, GateName::Fetch, ROLLOUT_TIMEOUT).await?;
        ensure!(rejected.message.contains("a cloud's metadata"), "{rejected:?}");
        // Another digest, for another version.
        let own = ModelSource { sha256: "b".repeat(64), ..model("localhost:8080") };
        service.set_model(&own).await?;
        let rejected = service.await_rejected(&own, GateName::Fetch, ROLLOUT_TIMEOUT).await?;
        ensure!(rejected.message.contains("the pod itself"), "{rejected:?}");
        // That a private address is taken all other tests show: the store of models has one.
        Ok(())
    })
    .await
}

/// The Secret of the test below, which agents ask for before they may: the audit knows it by this name.
pub(crate) const UNLENT_SECRET: &str = "hub-of-guards";
/// Longest time from an annotation to what it allows: the operator looks every 15 s.
const NOTICED: Duration = Duration::from_secs(30);

/// Whether the agents of a service may read a Secret.
async fn agents_may_read(service: &TestService<'_>, secret: &str) -> Result<bool> {
    let namespace = service.namespace;
    let account = format!("system:serviceaccount:{}:{}-gantry", namespace.name, service.fixture.name);
    let get = json!({"namespace": namespace.name, "verb": "get", "resource": "secrets", "name": secret});
    let review = serde_json::from_value(json!({"metadata": {}, "spec": {"user": account, "resourceAttributes": get}}))?;
    let reviews: Api<SubjectAccessReview> = Api::all(namespace.cluster.client.clone());
    let review = reviews.create(&PostParams::default(), &review).await?;
    Ok(review.status.context("no answer to what an agent may do")?.allowed)
}

/// Who writes an InferenceService and may read no Secret could else have the pods read any.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn agents_may_read_a_secret_only_once_it_says_for_which_hosts_it_is() -> Result<()> {
    with_temp_ns("unlent", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let secrets: Api<Secret> = namespace.api();
        let secret = |annotations: Value| {
            json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"token": "hush"},
                "metadata": {"name": UNLENT_SECRET, "annotations": annotations}})
        };
        apply_object(&secrets, UNLENT_SECRET, &secret(json!({}))).await?;
        let fixture = ServiceFixture { replicas: 1, min_pass: None, ..ServiceFixture::default() };
        // Tokens go over https alone, which the store does not speak: how far it comes tells what was read.
        let mut object = fixture.build(&ModelSource { uri: model.uri.replace("http://", "https://"), ..model });
        object.spec.model.source.secret_ref = Some(LocalName { name: UNLENT_SECRET.to_owned() });
        let service = TestService { namespace, fixture, api: namespace.api() };
        service.api.create(&PostParams::default(), &object).await?;

        let says = async |reason: &str, what: &str| {
            let wanted = format!("Ready says {reason}");
            let message = service.await_status(&wanted, ROLLOUT_TIMEOUT, |_, status| {
                let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready")?;
                (ready.reason == reason).then(|| ready.message.clone())
            });
            let message = message.await?;
            say(format_args!("{reason}: {message}"));
            ensure!(message.contains(what), "{reason}: it does not say {what:?}: {message}");
            Ok(())
        };
        says("AccessDenied", &format!("kubectl annotate secret {UNLENT_SECRET} --overwrite gantry.dev/hosts=")).await?;
        ensure!(!agents_may_read(&service, UNLENT_SECRET).await?, "agents may read what nobody lent them");
        // As the message says.
        let host = "model-store.gantry-e2e-store.svc:8080";
        apply_object(&secrets, UNLENT_SECRET, &secret(json!({"gantry.dev/hosts": host}))).await?;
        poll("agents may read it", NOTICED, Duration::from_millis(500), async || {
            Ok(Check::when(agents_may_read(&service, UNLENT_SECRET).await?, || "they may not".to_owned()))
        })
        .await?;
        says("FetchBackOff", "does not speak TLS").await?;
        ensure!(!agents_may_read(&service, "another").await?, "agents may read other Secrets");
        // And no longer than it says so.
        apply_object(&secrets, UNLENT_SECRET, &secret(json!({}))).await?;
        poll("agents may read it no more", NOTICED, Duration::from_millis(500), async || {
            Ok(Check::when(!agents_may_read(&service, UNLENT_SECRET).await?, || "they may".to_owned()))
        })
        .await
    })
    .await
}
