//! What the operator costs: nothing where nothing changes, and little where there is much.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use gantry_crds::{InferenceService, ModelVersion};
use gantry_e2e::{
    harness::{
        Cluster, OPERATOR_SELECTOR, SYSTEM_NAMESPACE,
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::{TestNamespace, with_temp_ns},
        node::process,
        say,
        service::TestService,
        wait::{Check, poll},
    },
    models::{DemoModel, questions},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PostParams},
};

/// Services without pods that one operator looks after.
const SERVICES: usize = 2_000;
/// Of them, requests to create one that are under way at once.
const CREATED_AT_ONCE: usize = 16;
/// Longest time until all of them have been taken in.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(600);
/// Longest time from the end of an operator until the next one has looked at all of them. On two cores that have the control
/// plane and everything else on them it takes 6 s.
const RESTART_TIMEOUT: Duration = Duration::from_secs(20);
/// Most memory that an operator with all of them ever had, its first list included; the chart gives it 128 MiB.
const OPERATOR_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// How long nothing may be written about a service under load. What a pod tells of memory comes every 12 s at most, so
/// this is time for several.
const QUIET: Duration = Duration::from_secs(300);
/// Streams of that load.
const STREAMS: usize = 16;

/// The newest write of each object of the service.
async fn writes(namespace: &TestNamespace) -> Result<BTreeMap<String, String>> {
    let all = ListParams::default();
    let services = namespace.api::<InferenceService>().list_metadata(&all).await?.items.into_iter();
    let versions = namespace.api::<ModelVersion>().list_metadata(&all).await?.items.into_iter();
    let version = |name: String, version: Option<String>| (name, version.unwrap_or_default());
    let services = services.map(|one| version(format!("infs/{}", one.name_any()), one.resource_version()));
    let versions = versions.map(|one| version(format!("mv/{}", one.name_any()), one.resource_version()));
    Ok(services.chain(versions).collect())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_settled_service_is_not_written_while_it_serves() -> Result<()> {
    with_temp_ns("quiet", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &model).await?;
        let load = service.load(STREAMS, questions()?, None).await?;
        // What the first requests take of memory is told once.
        load.await_completed(200, QUIET).await?;
        let settled = writes(namespace).await?;
        let (mut last, mut since) = (settled, Instant::now());
        let quiet =
            poll("nothing to be written for five minutes under load", 2 * QUIET, Duration::from_secs(1), async || {
                let now = writes(namespace).await?;
                if now != last {
                    say(format_args!("written after {:.0} s: {now:?}", since.elapsed().as_secs_f64()));
                    (last, since) = (now, Instant::now());
                }
                Ok(Check::when(since.elapsed() >= QUIET, || format!("quiet for {:?}", since.elapsed())))
            });
        quiet.await?;
        let report = load.finish().await?;
        report.ensure_no_failure()?;
        say(format_args!("FIGURE writes in {} s under load: 0, in {} answers", QUIET.as_secs(), report.records.len()));
        Ok(())
    })
    .await
}

async fn operator(cluster: &Cluster) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let pods = pods.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?;
    let living = pods.items.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_none());
    living.context("the operator has no pod")
}

/// A figure of the operator's metrics.
async fn figure(cluster: &Cluster, series: &str) -> Result<f64> {
    let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/services/gantry-operator-metrics:metrics/proxy/metrics");
    let text = cluster.client.request_text(axum::http::Request::get(path).body(Vec::new())?).await?;
    let line =
        text.lines().find_map(|line| line.strip_prefix(series)).with_context(|| format!("{series} is not told"))?;
    Ok(line.trim().parse()?)
}

async fn await_taken_in(namespace: &TestNamespace) -> Result<()> {
    let services = namespace.api::<InferenceService>();
    poll("every service to be taken in", SETTLE_TIMEOUT, Duration::from_secs(5), async || {
        let all = services.list(&ListParams::default()).await?;
        let taken_in =
            all.iter().filter(|one| one.status.as_ref().is_some_and(|status| status.observed_generation.is_some()));
        let taken_in = taken_in.count();
        Ok(Check::when(taken_in == SERVICES, || format!("{taken_in} of {SERVICES}")))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn two_thousand_services_are_looked_after_well_within_the_charts_memory() -> Result<()> {
    with_temp_ns("many", async |namespace| {
        let cluster = &namespace.cluster;
        cluster.ensure_own()?;
        let model = ModelStore::on(cluster).await?.model(DemoModel::V1)?;
        let services = namespace.api::<InferenceService>();
        let started = Instant::now();
        let create = async |number: usize| {
            let mut service = ServiceFixture { replicas: 0, ..ServiceFixture::default() }.build(&model);
            service.metadata.name = Some(format!("s{number}"));
            services.create(&PostParams::default(), &service).await.map(drop)
        };
        stream::iter(0..SERVICES).map(create).buffer_unordered(CREATED_AT_ONCE).try_collect::<Vec<()>>().await?;
        await_taken_in(namespace).await?;
        let settled_after = started.elapsed();
        let before = writes(namespace).await?;

        // A new operator: its first list is the most that it holds at once.
        let old = operator(cluster).await?;
        let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
        pods.delete(&old.name_any(), &kube::api::DeleteParams::default()).await?;
        let started = Instant::now();
        let looked_at =
            poll("a new operator to look at all", RESTART_TIMEOUT, Duration::from_millis(500), async || {
                let pod = operator(cluster).await?;
                ensure!(pod.uid() != old.uid(), "the old operator is still there");
                ensure!(figure(cluster, "gantry_operator_leader").await? > 0.5, "nobody leads");
                let done = figure(cluster, "gantry_operator_reconciles_total{outcome=\"Done\"}").await?;
                Ok(match done >= SERVICES as f64 {
                    true => Check::Done((pod, started.elapsed())),
                    false => Check::Wait(format!("{done} of {SERVICES}")),
                })
            });
        let (pod, restarted_after) = looked_at.await?;
        let operator_process = process(cluster, &pod, "gantry-operator")?;
        let resident = operator_process.resident_bytes().context("no resident memory")?;
        let peak = operator_process.peak_resident_bytes().context("no resident memory")?;
        say(format_args!(
            "FIGURE {SERVICES} services: taken in after {:.0} s; after a restart looked at in {:.1} s, with {:.1} MiB, {:.1} at the most",
            settled_after.as_secs_f64(),
            restarted_after.as_secs_f64(),
            resident as f64 / 1048576.0,
            peak as f64 / 1048576.0
        ));
        ensure!(before == writes(namespace).await?, "a new operator wrote to services that are settled");
        ensure!(peak <= OPERATOR_BYTES_MAX, "the operator took {peak} bytes");
        let restarts = operator(cluster).await?.status.and_then(|status| status.container_statuses);
        let restarts: i32 = restarts.iter().flatten().map(|container| container.restart_count).sum();
        ensure!(restarts == 0, "the operator's container was started {restarts} times more");
        Ok(())
    })
    .await
}
