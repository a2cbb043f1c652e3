//! An InferenceService under test: what is done to it, and what is awaited of it.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceService, InferenceServiceStatus, SERVICE_LABEL,
    status::{GateName, RejectedStatus},
};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use reqwest::header;
use serde_json::{Value, json};

use super::{
    fixtures::{ModelSource, SERVED_NAME, ServiceFixture, cluster_ip, is_ready},
    namespace::TestNamespace,
    say,
    wait::{Check, await_object, poll},
};
use crate::{
    answer::{AnswerBook, clear_text},
    load::{Load, LoadConfig, Target, http_client, http_client_builder},
    models::Question,
};

/// Longest time from an object to its first answer, pods and all.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time of a rollout that nothing disturbs.
pub const ROLLOUT_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a service that starts is looked at.
const REACHABLE_PERIOD: Duration = Duration::from_millis(100);
/// Most tokens of an answer under load: the longest of the evaluation has fewer.
const MAX_TOKENS: u32 = 48;

/// An InferenceService on the cluster.
pub struct TestService<'a> {
    /// Where it is.
    pub namespace: &'a TestNamespace,
    /// How it was made.
    pub fixture: ServiceFixture,
    /// The objects of its kind in the namespace.
    pub api: Api<InferenceService>,
}

/// What must not change while models do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodIdentity {
    uid: String,
    restarts: i32,
}

impl<'a> TestService<'a> {
    /// Creates a service that serves `model`, without waiting for it.
    ///
    /// # Errors
    /// When the API server refuses it.
    pub async fn create(namespace: &'a TestNamespace, fixture: ServiceFixture, model: &ModelSource) -> Result<Self> {
        let api: Api<InferenceService> = namespace.api();
        api.create(&PostParams::default(), &fixture.build(model)).await?;
        Ok(Self { namespace, fixture, api })
    }

    /// Creates a service and waits until all its pods answer with `model`.
    ///
    /// # Errors
    /// When they do not within two minutes.
    pub async fn start(namespace: &'a TestNamespace, fixture: ServiceFixture, model: &ModelSource) -> Result<Self> {
        let service = Self::create(namespace, fixture, model).await?;
        let begun = std::time::Instant::now();
        service.await_switched(model, START_TIMEOUT).await?;
        service.await_reachable().await?;
        say(format_args!("{} answers after {:.1} s", service.fixture.name, begun.elapsed().as_secs_f64()));
        Ok(service)
    }

    /// Waits until every pod is ready and the Service leads to them: that takes its way through the endpoints and
    /// kube-proxy, which no client of a running service sees.
    async fn await_reachable(&self) -> Result<()> {
        // Each look is a connection of its own: before kube-proxy knows the address, one leads out of the machine, and
        // whoever answers there would go on to be asked.
        let client = http_client_builder().pool_max_idle_per_host(0).build()?;
        poll("the Service leads to every pod", START_TIMEOUT, REACHABLE_PERIOD, async || {
            let pods = self.pods().await?;
            let ready = pods.iter().filter(|pod| is_ready(pod)).count();
            let wanted = usize::try_from(self.fixture.replicas)?;
            let response = client.get(format!("{}/models", self.target().await?.base_url)).send().await?;
            let (status, models) = (response.status(), response.text().await?);
            let seen = || format!("{ready} of {wanted} pods are ready, /v1/models says {status}: {models}");
            Ok(Check::when(ready == wanted && status == 200 && models.contains(SERVED_NAME), seen))
        })
        .await
    }

    /// Points the spec at `model`, as a user does with `kubectl patch`.
    ///
    /// # Errors
    /// When the API server refuses it.
    pub async fn set_model(&self, model: &ModelSource) -> Result<InferenceService> {
        say(format_args!("the spec asks for {} ({})", model.path, self.fixture.version(model)));
        self.patch(json!({"spec": {"model": {"source": {"uri": model.uri, "sha256": model.sha256}}}})).await
    }

    /// Merges `patch` into the object.
    ///
    /// # Errors
    /// When the API server refuses it.
    pub async fn patch(&self, patch: Value) -> Result<InferenceService> {
        Ok(self.api.patch(self.fixture.name, &PatchParams::default(), &Patch::Merge(patch)).await?)
    }

    /// Waits until `check` is done with the status.
    ///
    /// # Errors
    /// When it is not within `limit`; with the status that was seen last.
    pub async fn await_status<T>(
        &self,
        what: &str,
        limit: Duration,
        mut check: impl FnMut(&InferenceService, &InferenceServiceStatus) -> Option<T>,
    ) -> Result<T> {
        await_object(&self.api, self.fixture.name, what, limit, |service| match service {
            None => Check::Wait("the InferenceService does not exist".to_owned()),
            Some(service) => {
                let none = InferenceServiceStatus::default();
                let status = service.status.as_ref().unwrap_or(&none);
                check(service, status).map_or_else(|| Check::Wait(brief(service, status)), Check::Done)
            }
        })
        .await
    }

    /// Waits until the rollout of `model` is over and every pod answers with it.
    ///
    /// # Errors
    /// When that is not so within `limit`.
    pub async fn await_settled(&self, model: &ModelSource, limit: Duration) -> Result<InferenceServiceStatus> {
        let version = self.fixture.version(model);
        self.await_status(&format!("{version} is active and settled"), limit, |service, status| {
            let settled = status.observed_generation == service.metadata.generation
                && status.active_version.as_ref() == Some(&version)
                && status.rollout.is_none()
                && status.candidate_version.is_none()
                && self.all_serve(status, &version)
                && is_true(status, "Ready");
            settled.then(|| status.clone())
        })
        .await
    }

    /// Waits until every pod answers with `model`, baking or not.
    ///
    /// # Errors
    /// When that is not so within `limit`.
    pub async fn await_switched(&self, model: &ModelSource, limit: Duration) -> Result<InferenceServiceStatus> {
        let version = self.fixture.version(model);
        self.await_status(&format!("every pod answers with {version}"), limit, |_, status| {
            let switched = status.active_version.as_ref() == Some(&version) && self.all_serve(status, &version);
            (switched && is_true(status, "Available")).then(|| status.clone())
        })
        .await
    }

    /// Waits until `model` is rejected by `gate`.
    ///
    /// # Errors
    /// When it is not within `limit`, or another gate refuses it.
    pub async fn await_rejected(&self, model: &ModelSource, gate: GateName, limit: Duration) -> Result<RejectedStatus> {
        let version = self.fixture.version(model);
        let rejected = self
            .await_status(&format!("{version} is rejected"), limit, |_, status| {
                status.rejected.clone().filter(|rejected| rejected.version == version && status.rollout.is_none())
            })
            .await?;
        ensure!(rejected.gate == gate, "{version} is rejected by another gate than {}: {rejected:?}", gate.as_str());
        Ok(rejected)
    }

    fn all_serve(&self, status: &InferenceServiceStatus, version: &str) -> bool {
        status.replicas.len() == usize::try_from(self.fixture.replicas).unwrap_or_default()
            && status.replicas.iter().all(|replica| replica.version.as_deref() == Some(version))
    }

    /// Its pods that are not being deleted.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let selector = format!("{SERVICE_LABEL}={}", self.fixture.name);
        let pods = self.namespace.api::<Pod>().list(&ListParams::default().labels(&selector)).await?;
        Ok(pods.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect())
    }

    /// The identity of its pods: equal before and after a change of model.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub async fn identities(&self) -> Result<BTreeMap<String, PodIdentity>> {
        let identity = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let restarts = statuses.map(|status| status.restart_count).sum();
            (pod.name_any(), PodIdentity { uid: pod.uid().unwrap_or_default(), restarts })
        };
        Ok(self.pods().await?.iter().map(identity).collect())
    }

    /// Succeeds when no pod was replaced or restarted since `before` was taken.
    ///
    /// # Errors
    /// When one was.
    pub async fn ensure_same_pods(&self, before: &BTreeMap<String, PodIdentity>) -> Result<()> {
        let now = self.identities().await?;
        ensure!(*before == now, "pods were replaced or restarted: {before:?} became {now:?}");
        Ok(())
    }

    /// Its address for the tests: the Service, through kube-proxy.
    ///
    /// # Errors
    /// When the Service does not exist.
    pub async fn target(&self) -> Result<Target> {
        let service = self.namespace.api::<Service>().get(self.fixture.name).await?;
        let address = cluster_ip(&service).context("the Service has no ClusterIP")?;
        let port = service.spec.as_ref().and_then(|spec| spec.ports.as_ref()?.first().map(|port| port.port));
        let port = port.context("the Service has no port")?;
        Ok(Target { base_url: format!("http://{address}:{port}/v1"), model: SERVED_NAME.to_owned() })
    }

    /// What it answers to each of these questions alone and greedily, those left out that rounding could turn.
    ///
    /// # Errors
    /// When one is not answered.
    pub async fn clear_answers(&self, questions: &[Question]) -> Result<BTreeMap<String, String>> {
        let (client, target) = (http_client()?, self.target().await?);
        let mut answers = BTreeMap::new();
        for question in questions {
            let body = json!({
                "model": target.model, "messages": question.messages, "temperature": 0, "max_tokens": MAX_TOKENS,
                "logprobs": true, "top_logprobs": 2,
            });
            let url = format!("{}/chat/completions", target.base_url);
            let request = client.post(url).header(header::CONTENT_TYPE, "application/json").body(body.to_string());
            let body = request.send().await?.text().await?;
            let text = clear_text(&body).with_context(|| format!("question {}", question.id))?;
            answers.extend(text.map(|text| (question.id.clone(), text)));
        }
        Ok(answers)
    }

    /// Starts a load on it, once its address leads to every pod: before, each connection would be refused, or lead out of
    /// the machine and stay there.
    ///
    /// # Errors
    /// When not every pod is ready, or the Service does not lead to them, within two minutes.
    pub async fn load(
        &self,
        concurrency: usize,
        questions: Vec<Question>,
        expected: Option<AnswerBook>,
    ) -> Result<Load> {
        self.await_reachable().await?;
        let requests = crate::load::MAX_REQUESTS;
        let target = self.target().await?;
        Load::start(LoadConfig { target, concurrency, requests, questions, max_tokens: MAX_TOKENS, expected })
    }
}

/// Whether a condition is True.
#[must_use]
pub fn is_true(status: &InferenceServiceStatus, condition: &str) -> bool {
    status.conditions.iter().any(|candidate| candidate.type_ == condition && candidate.status == "True")
}

/// A status in a few words, for errors.
fn brief(service: &InferenceService, status: &InferenceServiceStatus) -> String {
    let replicas: Vec<_> = status
        .replicas
        .iter()
        .map(|replica| {
            let candidate =
                replica.candidate.as_ref().map(|candidate| (&candidate.version, candidate.phase, &candidate.message));
            json!({"pod": replica.pod, "version": replica.version, "prepared": replica.prepared,
                   "health": replica.health, "message": replica.message, "candidate": candidate})
        })
        .collect();
    let conditions = status
        .conditions
        .iter()
        .map(|condition| format!("{}={} ({})", condition.type_, condition.status, condition.message));
    json!({
        "generation": service.metadata.generation, "observed": status.observed_generation,
        "active": status.active_version, "candidate": status.candidate_version, "previous": status.previous_version,
        "rollout": status.rollout, "rejected": status.rejected, "replicas": replicas,
        "conditions": conditions.collect::<Vec<_>>(),
    })
    .to_string()
}
