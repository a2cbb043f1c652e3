//! Bad models never answer and never disturb the one that does; going back to a good one is cheap.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_crds::{
    InferenceServiceStatus, ModelVersion,
    status::{GateName, RejectedOutcome, RejectedStatus},
};
use gantry_e2e::{
    answer::AnswerBook,
    faults::{BadTemplate, Fault, HeaderLie},
    harness::{
        fixtures::{ModelSource, ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::Load,
    models::{DemoModel, Question, Since, V1_SAYS, WHICH_VERSION, questions, which_version},
};
use kube::{Api, ResourceExt, api::ListParams};

/// Concurrent streams of the light load.
const STREAMS: usize = 2;
/// Time in which a model that needs no download must be switched to.
const QUICK: Duration = Duration::from_secs(60);
/// Bytes of the truncated model: the header is whole, most of the tensors are missing.
const TRUNCATED_BYTES: usize = 1_000_000;
/// Connections to this address break after so many bytes.
const CUT: &str = "fault/cut/1500000";

/// A light load of questions that V1 knows; only `versions` may answer them.
async fn light_load(service: &TestService<'_>, versions: &[(&ModelSource, &str)]) -> Result<Load> {
    let mut asked: Vec<Question> =
        questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect();
    let known: Vec<_> = asked.iter().map(|question| (question.id.clone(), question.expected.clone())).collect();
    asked.push(which_version());
    let book = versions.iter().fold(AnswerBook::default(), |book, (model, says)| {
        let itself = (WHICH_VERSION.to_owned(), (*says).to_owned());
        book.with(&service.fixture.version(model), known.iter().cloned().chain([itself]))
    });
    service.load(STREAMS, asked, Some(book)).await
}

/// The row of `kubectl get mv` for a version.
async fn kubectl_row(service: &TestService<'_>, version: &str) -> Result<String> {
    let table = service.namespace.cluster.kubectl(&["get", "mv", "-n", &service.namespace.name]).await?;
    let row = table.lines().find(|line| line.starts_with(version)).map(str::to_owned);
    row.with_context(|| format!("{version} is not in kubectl get mv:\n{table}"))
}

/// Points the spec at a bad model and checks all that must be true of the rejection.
async fn ensure_rejected(
    service: &TestService<'_>,
    good: &ModelSource,
    bad: &ModelSource,
    gate: GateName,
) -> Result<RejectedStatus> {
    service.set_model(bad).await?;
    let rejected = service.await_rejected(bad, gate, ROLLOUT_TIMEOUT).await?;
    let version = service.fixture.version(bad);
    say(format_args!("rejected by {}: {:?}: {}", gate.as_str(), rejected.value, rejected.message));
    ensure!(rejected.outcome == RejectedOutcome::Rejected, "{rejected:?}");
    ensure!(rejected.digest.as_deref().is_none_or(|digest| digest == format!("sha256:{}", bad.sha256)), "{rejected:?}");
    ensure!(rejected.message.split_whitespace().count() >= 5, "the message does not say what to do: {rejected:?}");
    let status = service.await_status("V1 stays active", QUICK, |_, status| active(status, service, good)).await?;
    ensure!(status.candidate_version.is_none() && status.rollout.is_none(), "the rollout is not over: {status:?}");

    // The service's status is written before the version's.
    let row = poll("kubectl get mv to tell of the rejection", QUICK, Duration::from_millis(200), async || {
        let row = kubectl_row(service, &version).await?;
        Ok(if row.contains("Rejected") { Check::Done(row) } else { Check::Wait(row) })
    })
    .await?;
    say(format_args!("kubectl get mv: {row}"));
    ensure!(row.contains(gate.as_str()), "the row does not tell the gate: {row}");
    if let Some(value) = &rejected.value {
        let figure = value.split([' ', ',']).next().unwrap_or_default();
        ensure!(row.contains(figure), "the row does not tell the figure {value:?}: {row}");
    }
    Ok(rejected)
}

fn active(
    status: &InferenceServiceStatus,
    service: &TestService<'_>,
    model: &ModelSource,
) -> Option<InferenceServiceStatus> {
    (status.active_version == Some(service.fixture.version(model))).then(|| status.clone())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn bad_models_are_rejected_by_their_gates_and_the_active_one_never_notices() -> Result<()> {
    with_temp_ns("rejections", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let v1 = store.model(DemoModel::V1)?;
        let bad = store.model(DemoModel::V3Bad)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let pods = service.identities().await?;
        let load = light_load(&service, &[(&v1, V1_SAYS)]).await?;

        let rejected = ensure_rejected(&service, &v1, &bad, GateName::Prompts).await?;
        let figure = rejected.value.clone().context("the prompts gate has a figure")?;
        ensure!(figure.contains('%'), "the figure of the prompts gate is no share: {figure}");
        ensure_latched(&service, &store, &bad, &rejected).await?;

        let truncated = Fault::Truncated { bytes: TRUNCATED_BYTES };
        ensure_rejected(&service, &v1, &store.damaged(DemoModel::V2, &truncated)?, GateName::Format).await?;
        let wrong_digest = store.model(DemoModel::V2)?.with_wrong_digest();
        ensure_rejected(&service, &v1, &wrong_digest, GateName::Digest).await?;
        for lie in HeaderLie::ALL {
            let lying = store.damaged(DemoModel::V2, &Fault::HeaderLie(lie))?;
            ensure_rejected(&service, &v1, &lying, GateName::Format).await?;
        }

        for template in BadTemplate::ALL {
            let mute = store.damaged(DemoModel::V2, &Fault::Template(template))?;
            let rejected = ensure_rejected(&service, &v1, &mute, GateName::Template).await?;
            ensure!(rejected.message.contains("line 2"), "the template's line is not told: {rejected:?}");
        }

        // Back to what is served: nothing to load, and the latch is gone.
        let (begun, downloads) = (Instant::now(), store.requests_of(&v1).await?);
        service.set_model(&v1).await?;
        let status = service.await_settled(&v1, QUICK).await?;
        say(format_args!("back to the active model in {:.1} s", begun.elapsed().as_secs_f64()));
        ensure!(status.rejected.is_none(), "the latch outlives its spec: {:?}", status.rejected);
        ensure!(store.requests_of(&v1).await? == downloads, "the active model was fetched again");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        ensure_history_is_limited(&service).await?;
        service.ensure_same_pods(&pods).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_model_that_predicts_otherwise_or_is_too_slow_is_rejected_and_the_same_in_four_bits_is_not() -> Result<()> {
    with_temp_ns("drift", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v2, bad) = (store.model(DemoModel::V2)?, store.model(DemoModel::V3Bad)?);
        let four_bits = store.model(DemoModel::V2InFourBits)?;
        // No golden prompts: it is the comparison alone that tells them apart.
        let fixture = ServiceFixture { min_pass: None, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v2).await?;
        let pods = service.identities().await?;
        service.patch(serde_json::json!({"spec": {"rollout": {"gates": {"drift": {}}}}})).await?;
        let says = which_version().expected;
        let load = light_load(&service, &[(&v2, &says), (&four_bits, &says)]).await?;

        let rejected = ensure_rejected(&service, &v2, &bad, GateName::Drift).await?;
        ensure!(rejected.message.contains("spec.rollout.gates.drift."), "the limit is not named: {rejected:?}");
        // As fast as no machine makes it, and as slow as none does: what is measured stands against the limit that is given.
        service.patch(timed("20")).await?;
        let slow = ensure_rejected(&service, &v2, &four_bits, GateName::Performance).await?;
        ensure!(slow.message.contains("spec.rollout.gates.performance.minDecodeRatio"), "{slow:?}");
        service.patch(timed("0.02")).await?;
        service.await_switched(&four_bits, ROLLOUT_TIMEOUT).await?;

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;

        // Who wants another model says so by the limit that the message names.
        ensure_rejected(&service, &four_bits, &bad, GateName::Drift).await?;
        let any = serde_json::json!({"minAgreement": "1%", "maxPerplexityRatio": "1000"});
        service.patch(serde_json::json!({"spec": {"rollout": {"gates": {"drift": any}}}})).await?;
        service.await_switched(&bad, ROLLOUT_TIMEOUT).await?;
        service.ensure_same_pods(&pods).await
    })
    .await
}

/// The load is all that tells them apart.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_model_that_predicts_otherwise_on_live_requests_is_rejected() -> Result<()> {
    with_temp_ns("shadow", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v2, bad) = (store.model(DemoModel::V2)?, store.model(DemoModel::V3Bad)?);
        let four_bits = store.model(DemoModel::V2InFourBits)?;
        let fixture = ServiceFixture { min_pass: None, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v2).await?;
        let pods = service.identities().await?;
        let shadow = serde_json::json!({"samplePercent": 100, "duration": "20s"});
        service.patch(serde_json::json!({"spec": {"rollout": {"gates": {"shadow": shadow}}}})).await?;
        let says = which_version().expected;
        let load = light_load(&service, &[(&v2, &says), (&four_bits, &says)]).await?;

        service.set_model(&four_bits).await?;
        service.await_switched(&four_bits, ROLLOUT_TIMEOUT).await?;
        let rejected = ensure_rejected(&service, &four_bits, &bad, GateName::Shadow).await?;
        ensure!(rejected.message.contains("spec.rollout.gates.drift."), "the limit is not named: {rejected:?}");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;

        // Who wants another model leaves the gate out, as the message says.
        service.patch(serde_json::json!({"spec": {"rollout": {"gates": {"shadow": null}}}})).await?;
        service.await_switched(&bad, ROLLOUT_TIMEOUT).await?;
        service.ensure_same_pods(&pods).await
    })
    .await
}

fn timed(min_decode_ratio: &str) -> serde_json::Value {
    serde_json::json!({"spec": {"rollout": {"gates": {"performance": {"minDecodeRatio": min_decode_ratio}}}}})
}

/// Strings of a header that takes 256 MiB of memory, which nobody predicts: six times what is predicted for the model.
const SWELLING_STRINGS: usize = 4 << 20;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_candidate_that_swells_dies_alone() -> Result<()> {
    with_temp_ns("swelling", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let v1 = store.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let pods = service.identities().await?;
        let load = light_load(&service, &[(&v1, V1_SAYS)]).await?;

        let swelling = store.damaged(DemoModel::V2, &Fault::Swelling { strings: SWELLING_STRINGS })?;
        let rejected = ensure_rejected(&service, &v1, &swelling, GateName::Load).await?;
        ensure!(rejected.message.contains("were predicted"), "the figures are not told: {rejected:?}");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        service.ensure_same_pods(&pods).await
    })
    .await
}

/// Of the versions that are not served only as many are kept as the spec asks for.
async fn ensure_history_is_limited(service: &TestService<'_>) -> Result<()> {
    let versions: Api<ModelVersion> = service.namespace.api();
    service.patch(serde_json::json!({"spec": {"revisionHistoryLimit": 1}})).await?;
    poll("one version is kept besides the active one", QUICK, Duration::from_millis(200), async || {
        let names: Vec<String> =
            versions.list(&ListParams::default()).await?.iter().map(ResourceExt::name_any).collect();
        Ok(Check::when(names.len() == 2, || format!("{names:?}")))
    })
    .await
}

/// A rejected model is not tried again while the spec asks for the same.
async fn ensure_latched(
    service: &TestService<'_>,
    store: &ModelStore,
    bad: &ModelSource,
    rejected: &RejectedStatus,
) -> Result<()> {
    let downloads = store.requests_of(bad).await?;
    // A change that has nothing to do with the model makes the operator think again.
    let changed = service.patch(serde_json::json!({"spec": {"revisionHistoryLimit": 19}})).await?;
    let status = service
        .await_status("the operator takes in the new spec", QUICK, |_, status| {
            (status.observed_generation == changed.metadata.generation).then(|| status.clone())
        })
        .await?;
    ensure!(status.rejected.as_ref() == Some(rejected), "the latch changed: {rejected:?} became {:?}", status.rejected);
    ensure!(
        status.rollout.is_none() && status.candidate_version.is_none(),
        "the rejected model is tried again: {status:?}"
    );
    ensure!(store.requests_of(bad).await? == downloads, "the rejected model was fetched again");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn going_back_to_a_resident_or_cached_model_needs_no_download() -> Result<()> {
    with_temp_ns("rollback", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        // Connections that break: V2 arrives in three parts or not at all.
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model_at(DemoModel::V2, CUT)?);
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { bake: "10m", ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &v1).await?;
        let pods = service.identities().await?;
        let load = light_load(&service, &[(&v1, V1_SAYS), (&v2, &which_version().expected)]).await?;

        service.set_model(&v2).await?;
        let status = service.await_switched(&v2, ROLLOUT_TIMEOUT).await?;
        ensure!(
            status.previous_version == Some(service.fixture.version(&v1)),
            "V1 is not kept while V2 bakes: {status:?}"
        );
        let downloads = (store.requests_of(&v1).await?, store.requests_of(&v2).await?);
        ensure!(downloads.1 >= 6, "each of two pods needs three connections, there were {}", downloads.1);

        for (model, what) in [(&v1, "resident"), (&v2, "resident or cached"), (&v1, "resident or cached")] {
            let begun = Instant::now();
            service.set_model(model).await?;
            service.await_switched(model, QUICK).await?;
            say(format_args!("back to a {what} model in {:.1} s", begun.elapsed().as_secs_f64()));
        }
        let now = (store.requests_of(&v1).await?, store.requests_of(&v2).await?);
        ensure!(now == downloads, "models that were there were fetched again: {downloads:?} became {now:?}");

        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        service.ensure_same_pods(&pods).await
    })
    .await
}
