//! What refused a version is put right as the message says, and it serves.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use gantry_crds::{InferenceService, RETRY_ANNOTATION, status::GateName};
use gantry_e2e::{
    harness::{
        fixtures::{ModelSource, ModelStore, PROMPTS, ServiceFixture, apply, golden_prompts_config_map},
        namespace::{TestNamespace, with_temp_ns},
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::Load,
    models::{DemoModel, Question, Since, golden_prompts, questions},
};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use serde_json::json;

/// Memory in which the sequences of [`many_sequences`] fit.
const ENOUGH: &str = "1536Mi";
/// Longest time from a correction that no watch tells of to the next attempt: the operator looks every 15 s.
const NOTICED: Duration = Duration::from_secs(30);

/// Characters of a line that a terminal shows.
const TERMINAL_COLUMNS: usize = 120;

/// Sequences of the trained length whose cells alone take 512 MiB: more than a pod of the fixtures has beside its front.
fn many_sequences() -> ServiceFixture {
    ServiceFixture { parallel: 128, sequence_tokens: 2048, ..ServiceFixture::default() }
}

/// Prompts that no model answers so.
async fn wrong_prompts(namespace: &TestNamespace) -> Result<()> {
    let line = json!({"messages": [{"role": "user", "content": "Hello!"}], "expected": "Certainly not this."});
    let config_map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PROMPTS},
        "data": {"prompts.jsonl": line.to_string()}});
    apply::<ConfigMap>(&namespace.api(), PROMPTS, &config_map).await.map(drop)
}

/// One stream of questions that V1 knows, so that a service that does not answer is seen.
async fn light_load(service: &TestService<'_>) -> Result<Load> {
    let asked: Vec<Question> =
        questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
    service.load(1, asked, None).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_first_version_refused_for_memory_serves_once_its_pods_have_more() -> Result<()> {
    with_temp_ns("more-memory", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::create(namespace, many_sequences(), &v1).await?;
        let rejected = service.await_rejected(&v1, GateName::Memory, ROLLOUT_TIMEOUT).await?;
        say(format_args!("rejected: {:?}: {}", rejected.value, rejected.message));
        ensure!(rejected.message.contains("spec.resources.memory"), "the message names no field: {rejected:?}");
        service.patch(json!({"spec": {"resources": {"memory": ENOUGH}}})).await?;
        let status = service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        ensure!(status.rejected.is_none(), "the latch outlives its cause: {:?}", status.rejected);
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_change_of_resources_that_cannot_be_carried_out_is_told_while_older_pods_answer() -> Result<()> {
    with_temp_ns("too-little", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let load = light_load(&service).await?;
        service.patch(json!({"spec": {"resources": {"memory": "100Mi"}}})).await?;
        let condition = |service: &InferenceService, type_: &str| {
            let conditions = &service.status.as_ref()?.conditions;
            let condition = conditions.iter().find(|one| one.type_ == type_)?;
            Some((condition.status.clone(), condition.reason.clone(), condition.message.clone()))
        };
        let told = service
            .await_status("PodsReady tells that a pod cannot have the model", ROLLOUT_TIMEOUT, |service, _| {
                condition(service, "PodsReady")
                    .filter(|(status, reason, _)| status == "False" && reason == "GateFailed")
            })
            .await?;
        say(&told.2);
        ensure!(told.2.contains("spec.resources.memory"), "it does not say what to do: {}", told.2);
        let object = service.api.get(service.fixture.name).await?;
        for (type_, status) in [("Ready", "True"), ("Reconciling", "True"), ("Stalled", "False")] {
            let condition = condition(&object, type_).context(type_)?;
            ensure!((&*condition.0, &*condition.1) == (status, "GateFailed"), "{type_}: {condition:?}");
        }

        service.patch(json!({"spec": {"resources": {"memory": ENOUGH}}})).await?;
        service
            .await_status("all is well", ROLLOUT_TIMEOUT, |service, _| {
                let well = |type_| condition(service, type_).is_some_and(|(_, reason, _)| reason == "AsRequested");
                (well("PodsReady") && well("Ready") && well("Reconciling")).then_some(())
            })
            .await?;
        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_model_and_the_memory_for_it_in_one_edit_are_judged_together_and_lose_no_request() -> Result<()> {
    with_temp_ns("both-at-once", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let before: BTreeSet<_> = service.pods().await?.iter().map(ResourceExt::name_any).collect();
        let load = light_load(&service).await?;

        let large = many_sequences();
        let spec = large.build(&v2).spec;
        let edit = json!({"spec": {"model": spec.model, "runtime": spec.runtime, "resources": {"memory": ENOUGH}}});
        service.patch(edit).await?;
        let service = TestService { fixture: large, ..service };
        let status = service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        ensure!(status.attempts == 2, "it took more than one attempt: {status:?}");
        let after: BTreeSet<_> = service.pods().await?.iter().map(ResourceExt::name_any).collect();
        ensure!(before.is_disjoint(&after), "pods without the memory stayed: {before:?} {after:?}");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn less_memory_and_a_model_that_fits_into_it_in_one_edit_lose_no_request() -> Result<()> {
    with_temp_ns("less-memory", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::create(namespace, many_sequences(), &v1).await?;
        service.patch(json!({"spec": {"resources": {"memory": ENOUGH}}})).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        let load = light_load(&service).await?;

        let small = ServiceFixture::default();
        let spec = small.build(&v2).spec;
        service
            .patch(json!({"spec": {"model": spec.model, "runtime": spec.runtime, "resources": spec.resources}}))
            .await?;
        let service = TestService { fixture: small, ..service };
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_version_refused_by_wrong_prompts_serves_once_they_are_right() -> Result<()> {
    with_temp_ns("right-prompts", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        wrong_prompts(namespace).await?;
        let service = TestService::create(namespace, ServiceFixture::default(), &v1).await?;
        let rejected = service.await_rejected(&v1, GateName::Prompts, ROLLOUT_TIMEOUT).await?;
        say(format_args!("rejected: {:?}: {}", rejected.value, rejected.message));
        golden_prompts_config_map(namespace).await?;
        let version = service.fixture.version(&v1);
        service
            .await_status("it is tried again", NOTICED, |_, status| {
                (status.candidate_version.as_ref().or(status.active_version.as_ref()) == Some(&version)).then_some(())
            })
            .await
            .context("the operator did not see that the prompts are others")?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await.map(drop)
    })
    .await
}

/// What the spec does not say: the file at its address, and an object that it names.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn what_is_put_right_outside_the_spec_serves_as_the_message_says() -> Result<()> {
    with_temp_ns("put-right", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let v1 = store.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let cases = [
            (DemoModel::V2, "absent.gguf", GateName::Fetch),
            (DemoModel::V2InFourBits, DemoModel::V3Bad.file(), GateName::Digest),
        ];
        for (model, other, gate) in cases {
            let model = store.model_instead_of(model, other)?;
            service.set_model(&model).await?;
            let rejected = service.await_rejected(&model, gate, ROLLOUT_TIMEOUT).await?;
            say(format_args!("rejected by {}: {}", gate.as_str(), rejected.message));
            ensure!(rejected.message.contains(RETRY_ANNOTATION), "it does not say what to do: {rejected:?}");
            store.mend(&model).await?;
            service.patch(json!({"metadata": {"annotations": {RETRY_ANNOTATION: other}}})).await?;
            service.await_settled(&model, ROLLOUT_TIMEOUT).await?;
        }

        let later = "later";
        let gates = json!({"prompts": {"configMapRef": {"name": later}}});
        service.patch(json!({"spec": {"rollout": {"gates": gates, "progressDeadline": "30s"}}})).await?;
        service.set_model(&v1).await?;
        let rejected = service.await_rejected(&v1, GateName::Deadline, ROLLOUT_TIMEOUT).await?;
        say(format_args!("rejected by Deadline: {}", rejected.message));
        ensure!(rejected.message.contains(later), "the cause is not told: {rejected:?}");
        let right = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": later},
            "data": {"prompts.jsonl": golden_prompts(1)?}});
        apply::<ConfigMap>(&namespace.api(), later, &right).await?;
        service.await_settled(&v1, ROLLOUT_TIMEOUT).await.map(drop)
    })
    .await
}

/// An address that no DNS knows, and a ConfigMap that nobody applied: each is told before any deadline, and serves once it is put
/// right.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn what_a_version_waits_for_is_told_from_the_first_try_on() -> Result<()> {
    with_temp_ns("told", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        let nowhere = ModelSource { uri: format!("http://nowhere.invalid/{}", v1.path), ..v1.clone() };
        let service = TestService::create(namespace, ServiceFixture::default(), &nowhere).await?;
        told(&service, "FetchBackOff", "nowhere.invalid").await?;
        service.set_model(&v1).await?;
        told(&service, "ConfigMapNotFound", PROMPTS).await?;
        golden_prompts_config_map(namespace).await?;
        let status = service.await_settled(&v1, ROLLOUT_TIMEOUT).await?;
        ensure!(status.rejected.is_none(), "what was waited for was taken for a refusal: {:?}", status.rejected);
        Ok(())
    })
    .await
}

/// A volume of a driver that is not there: the pod that wants it is told of in the kubelet's words while the others answer.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_volume_that_cannot_be_mounted_is_told_in_the_kubelets_words() -> Result<()> {
    with_temp_ns("volume", async |namespace| {
        let v1 = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let load = light_load(&service).await?;
        let volume = json!({"name": "data", "csi": {"driver": "no.such.driver"}});
        let mount = json!({"name": "data", "mountPath": "/mnt/data"});
        service.patch(json!({"spec": {"pod": {"volumes": [volume], "volumeMounts": [mount]}}})).await?;
        let told = service
            .await_status("PodsReady tells of the volume", ROLLOUT_TIMEOUT, |_, status| {
                let condition = status.conditions.iter().find(|condition| condition.type_ == "PodsReady")?;
                (condition.reason == "FailedMount").then(|| condition.message.clone())
            })
            .await?;
        say(format_args!("FailedMount: {told}"));
        ensure!(told.contains("\"data\"") && told.contains("no.such.driver"), "the cause is not told: {told}");
        service.patch(json!({"spec": {"pod": {"volumes": null, "volumeMounts": null}}})).await?;
        service
            .await_status("nothing is said of the volume any more", ROLLOUT_TIMEOUT, |_, status| {
                let condition = status.conditions.iter().find(|condition| condition.type_ == "PodsReady")?;
                (condition.status == "True").then_some(())
            })
            .await?;
        load.finish().await?.ensure_no_failure()
    })
    .await
}

/// Waits until `reason` stands in the conditions, in both tables and in an Event, with `what` in the sentence.
async fn told(service: &TestService<'_>, reason: &str, what: &str) -> Result<()> {
    let namespace = service.namespace;
    let message = service
        .await_status(&format!("Ready says {reason}"), ROLLOUT_TIMEOUT, |_, status| {
            let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready")?;
            (ready.reason == reason).then(|| ready.message.clone())
        })
        .await?;
    say(format_args!("{reason}: {message}"));
    ensure!(message.contains(what), "the message does not say what it is about: {message}");
    poll(&format!("kubectl tells of {reason}"), NOTICED, Duration::from_millis(500), async || {
        let mut missing = Vec::new();
        for arguments in [["get", "infs"], ["get", "mv"], ["get", "events"]] {
            let table = namespace.cluster.kubectl(&[&arguments[..], &["-n", &namespace.name]].concat()).await?;
            if !table.contains(reason) {
                missing.push(format!("{arguments:?}: {table}"));
            }
            let widest = table.lines().map(|line| line.chars().count()).max().unwrap_or_default();
            ensure!(arguments[1] != "mv" || widest <= TERMINAL_COLUMNS, "too wide: {table}");
        }
        Ok(Check::when(missing.is_empty(), || missing.join("\n")))
    })
    .await
}
