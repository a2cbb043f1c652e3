//! Who may ask: keys of a Secret, which nobody but the kubelet reads, and further names of the model.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceService, ModelVersion,
    inference_service::{ApiSpec, LocalName},
    status::RolloutStep,
};
use gantry_e2e::{
    harness::{
        fixtures::{ModelStore, SERVED_NAME, ServiceFixture, apply},
        namespace::{TestNamespace, with_temp_ns},
        say,
        service::TestService,
        wait::{Check, poll},
    },
    load::http_client_builder,
    models::DemoModel,
};
use k8s_openapi::api::{
    authorization::v1::SubjectAccessReview,
    core::v1::{Event, Secret},
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

const KEYS: &str = "chat-keys";
const ALIAS: &str = "gpt-4o";
/// Longest time from a Secret to pods that have it, or have what it became: the kubelet tries again, and looks again, after up
/// to two minutes.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(240);
/// Longest time in which a condition follows the pods, or pods another spec.
const TIMEOUT: Duration = Duration::from_secs(120);
const PERIOD: Duration = Duration::from_millis(250);

/// Puts these keys into the Secret, and no others.
async fn put_keys(namespace: &TestNamespace, keys: &Value) -> Result<()> {
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}, "stringData": keys});
    let secrets: Api<Secret> = namespace.api();
    // Server-side apply would leave the values of before, which the API server turned into `data`.
    if secrets.get_metadata_opt(KEYS).await?.is_some() {
        let none = Patch::Merge(json!({"data": null}));
        secrets.patch(KEYS, &PatchParams::default(), &none).await?;
    }
    apply(&secrets, KEYS, &secret).await.map(drop)
}

/// A client of the service that shows a key, or none.
struct Client {
    http: reqwest::Client,
    base: String,
}

impl Client {
    async fn of(service: &TestService<'_>) -> Result<Self> {
        // Each request is a connection of its own, as long as it may lead to a pod that is to go.
        let http = http_client_builder().pool_max_idle_per_host(0).build()?;
        Ok(Self { http, base: service.target().await?.base_url })
    }

    fn with_key(request: reqwest::RequestBuilder, key: Option<&str>) -> reqwest::RequestBuilder {
        match key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn models(&self, key: Option<&str>) -> Result<(u16, String)> {
        let answer = Self::with_key(self.http.get(format!("{}/models", self.base)), key).send().await?;
        Ok((answer.status().as_u16(), answer.text().await?))
    }

    async fn chat(&self, key: Option<&str>, model: &str) -> Result<(u16, String)> {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
        let request = self.http.post(format!("{}/chat/completions", self.base));
        let request = request.header("content-type", "application/json").body(body.to_string());
        let answer = Self::with_key(request, key).send().await?;
        Ok((answer.status().as_u16(), answer.text().await?))
    }

    /// Waits until this key is taken.
    async fn await_key(&self, key: &str) -> Result<()> {
        poll("the key is taken", KUBELET_TIMEOUT, PERIOD, async || {
            let (status, text) = self.models(Some(key)).await?;
            Ok(Check::when(status == 200, || format!("{status}: {text}")))
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn keys_come_from_a_secret_and_change_without_a_restart() -> Result<()> {
    with_temp_ns("access", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let api = ApiSpec {
            keys_secret_ref: Some(LocalName { name: KEYS.to_owned() }),
            model_aliases: vec![ALIAS.to_owned()],
            ..ApiSpec::default()
        };
        let fixture = ServiceFixture { replicas: 1, min_pass: None, api, ..ServiceFixture::default() };
        let service = TestService::create(namespace, fixture, &model).await?;

        // Without its Secret no pod is made, and the service says why.
        let told = service
            .await_status("PodsReady tells of the Secret", TIMEOUT, |_, status| {
                let condition = status.conditions.iter().find(|condition| condition.type_ == "PodsReady")?;
                (condition.reason == "SecretNotFound").then(|| condition.message.clone())
            })
            .await?;
        say(format_args!("PodsReady: {told}"));
        ensure!(told.contains(KEYS) && told.contains("spec.api.keysSecretRef"), "{told}");
        poll("an Event tells of it", TIMEOUT, PERIOD, async || {
            let events = namespace.api::<Event>().list(&ListParams::default()).await?;
            let reasons: Vec<_> = events.iter().filter_map(|event| event.reason.clone()).collect();
            Ok(Check::when(reasons.iter().any(|reason| reason == "SecretNotFound"), || format!("{reasons:?}")))
        })
        .await?;

        put_keys(namespace, &json!({"team-a": "old-key-of-a\n"})).await?;
        service.await_switched(&model, KUBELET_TIMEOUT).await?;
        let client = Client::of(&service).await?;
        client.await_key("old-key-of-a").await?;
        for (key, wanted) in [(None, 401), (Some("wrong"), 401), (Some(KEYS), 401), (Some("old-key-of-a"), 200)] {
            for name in [SERVED_NAME, ALIAS] {
                let (status, text) = client.chat(key, name).await?;
                ensure!(status == wanted, "{key:?} and the model {name} get {status}: {text}");
            }
        }
        let (status, text) = client.chat(Some("old-key-of-a"), "another").await?;
        ensure!(status == 404 && text.contains(ALIAS), "a model of another name gets {status}: {text}");

        // The kubelet mounts it; neither the agents nor anybody else got a right to read it.
        let account = format!("system:serviceaccount:{}:{}-gantry", namespace.name, service.fixture.name);
        let get = json!({"namespace": namespace.name, "verb": "get", "resource": "secrets", "name": KEYS});
        let review =
            serde_json::from_value(json!({"metadata": {}, "spec": {"user": account, "resourceAttributes": get}}))?;
        let reviews: Api<SubjectAccessReview> = Api::all(namespace.cluster.client.clone());
        let review = reviews.create(&PostParams::default(), &review).await?;
        let may = review.status.context("no answer to what an agent may do")?;
        ensure!(!may.allowed, "agents may read the keys: {may:?}");

        ensure_rotated(&service, &client).await?;
        ensure_replaced_by_a_change(&service, &client).await?;
        ensure_refused(&service).await
    })
    .await
}

/// Another key in the Secret is taken by the pods that there are, and the one before is not any more.
async fn ensure_rotated(service: &TestService<'_>, client: &Client) -> Result<()> {
    let pods = service.identities().await?;
    put_keys(service.namespace, &json!({"team-a": "new-key-of-a", "team-b": "key-of-b\nsecond-key-of-b"})).await?;
    let begun = std::time::Instant::now();
    client.await_key("new-key-of-a").await?;
    say(format_args!("the new key is taken after {:.0} s", begun.elapsed().as_secs_f64()));
    for (key, wanted) in [("new-key-of-a", 200), ("key-of-b", 200), ("second-key-of-b", 200), ("old-key-of-a", 401)] {
        let (status, text) = client.models(Some(key)).await?;
        ensure!(status == wanted, "{key} gets {status}: {text}");
    }
    service.ensure_same_pods(&pods).await
}

/// Another name replaces the pods and is no version of its own.
async fn ensure_replaced_by_a_change(service: &TestService<'_>, client: &Client) -> Result<()> {
    let versions: Api<ModelVersion> = service.namespace.api();
    let names = async || -> Result<Vec<String>> {
        Ok(versions.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect())
    };
    let attempts = async || -> Result<i64> {
        let status = service.api.get(service.fixture.name).await?.status.context("no status")?;
        ensure!(status.rollout.is_none_or(|rollout| rollout.step == RolloutStep::Bake), "a rollout goes on");
        Ok(status.attempts)
    };
    let (before, begun, pods) = (names().await?, attempts().await?, service.identities().await?);
    service.patch(json!({"spec": {"api": {"modelAliases": [ALIAS, "chat-large"]}}})).await?;
    poll("pods have the other name", TIMEOUT, PERIOD, async || {
        let (status, text) = client.models(Some("new-key-of-a")).await?;
        let replaced = service.identities().await?.keys().all(|pod| !pods.contains_key(pod));
        Ok(Check::when(replaced && text.contains("chat-large"), || format!("{status}: {text}")))
    })
    .await?;
    let after = names().await?;
    ensure!(after == before, "versions came or went: {before:?} became {after:?}");
    ensure!(attempts().await? == begun, "a rollout was begun");
    Ok(())
}

/// What cannot be carried out is refused when it is written, with what to write instead.
async fn ensure_refused(service: &TestService<'_>) -> Result<()> {
    let dry = PatchParams { dry_run: true, ..PatchParams::default() };
    let store = |store: Value| json!({"api": {"responseStore": store}});
    let bucket = |field: &str, value: &str| {
        let mut s3 = json!({"bucket": "responses"});
        s3[field] = json!(value);
        store(json!({"s3": s3}))
    };
    for (spec, told) in [
        (json!({"api": {"keysSecretRef": {"name": "My Keys"}}}), "spec.api.keysSecretRef.name"),
        (json!({"api": {"corsOrigins": ["https://a.example/"]}}), "spec.api.corsOrigins"),
        (json!({"api": {"corsOrigins": ["*", "https://a.example"]}}), "spec.api.corsOrigins"),
        (json!({"api": {"corsOrigins": ["HTTPS://a.example"]}}), "spec.api.corsOrigins"),
        (json!({"api": {"corsOrigins": ["https://a.example", "https://a.example"]}}), "Duplicate value"),
        (json!({"api": {"modelAliases": ["a,b"]}}), "spec.api.modelAliases"),
        (json!({"api": {"modelAliases": [""]}}), "spec.api.modelAliases"),
        (store(json!({})), "exactly one of s3 and pvc"),
        (store(json!({"pvc": {"claimName": "a"}, "s3": {"bucket": "responses"}})), "exactly one of s3 and pvc"),
        (store(json!({"pvc": {"claimName": "a"}, "ttl": "30s"})), "spec.api.responseStore.ttl"),
        (bucket("bucket", "R"), "spec.api.responseStore.s3.bucket"),
        (bucket("prefix", "a/../b"), "spec.api.responseStore.s3.prefix"),
        (bucket("endpoint", "https://me:hush@minio"), "spec.api.responseStore.s3.endpoint"),
        (bucket("region", "eu central"), "spec.api.responseStore.s3.region"),
        (json!({"runtime": {"chatTemplate": "chatml"}}), "spec.runtime.chatTemplate"),
        (json!({"runtime": {"chatTemplate": "{".repeat(32_769)}}), "chatTemplate"),
    ] {
        let change: Patch<Value> = Patch::Merge(json!({"spec": spec}));
        let changed: kube::Result<InferenceService> = service.api.patch(service.fixture.name, &dry, &change).await;
        let Err(kube::Error::Api(refusal)) = &changed else { anyhow::bail!("{spec} is taken: {changed:?}") };
        ensure!(refusal.message.contains(told), "{spec}: it does not say {told:?}: {}", refusal.message);
    }
    for spec in [
        json!({"api": {"corsOrigins": ["*"]}}),
        json!({"api": {"corsOrigins": ["http://localhost:3000", "http://[::1]:3000", "app://tool"]}}),
        store(
            json!({"s3": {"bucket": "responses", "prefix": "a/b", "endpoint": "http://minio.store:9000"}, "ttl": "1h"}),
        ),
        json!({"runtime": {"chatTemplate": "{{ messages[0].content }}"}}),
    ] {
        let change: Patch<Value> = Patch::Merge(json!({"spec": spec}));
        service.api.patch(service.fixture.name, &dry, &change).await.with_context(|| spec.to_string())?;
    }
    Ok(())
}
