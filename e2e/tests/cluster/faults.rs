//! Processes die, the API server goes away: what is served goes on.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gantry_crds::status::{CandidatePhase, RolloutStep};
use gantry_e2e::{
    answer::FailureKind,
    harness::{
        Cluster, OPERATOR_SELECTOR, SYSTEM_NAMESPACE,
        fixtures::{ModelStore, SERVED_NAME, ServiceFixture, golden_prompts_config_map, is_ready},
        namespace::with_temp_ns,
        node::{Stopped, process},
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::{Length, Record, Target, ask, http_client},
    models::{DemoModel, Question, Since, questions},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Streams on each pod when a worker dies.
const STREAMS_PER_POD: usize = 4;
/// Tokens of such a stream: it lasts for seconds.
pub(crate) const LONG_ANSWER: Length = Length { max_tokens: 1_500, ignore_end: true };
/// Pieces of text that each stream must have had before the worker is killed.
pub(crate) const PIECES_BEFORE: usize = 3;
/// Time in which a worker must be back.
const RESPAWN_TIMEOUT: Duration = Duration::from_secs(30);
/// Time in which readiness must tell that the worker is gone.
const UNREADY_WITHIN: Duration = Duration::from_secs(2);
/// How often readiness is asked for: a respawn takes longer than a few of these.
const READINESS_PERIOD: Duration = Duration::from_millis(10);
/// How long the API server is away.
const OUTAGE: Duration = Duration::from_secs(30);
/// Concurrent streams of the light load.
const STREAMS: usize = 4;
/// A download that takes about eight seconds.
const SLOW: &str = "fault/slow/500000";

pub(crate) fn pod_target(pod: &Pod) -> Result<Target> {
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()).context("the pod has no address")?;
    Ok(Target { base_url: format!("http://{address}:8080/v1"), model: SERVED_NAME.to_owned() })
}

/// Questions that V1 and V2 answer alike.
fn common_questions() -> Result<Vec<Question>> {
    Ok(questions()?.into_iter().filter(|question| question.since == Since::V1).take(12).collect())
}

/// Long streams on one pod, which tell when all of them are well under way.
struct LongStreams {
    tasks: JoinSet<Record>,
    pieces: Vec<watch::Receiver<usize>>,
}

impl LongStreams {
    fn start(target: &Target) -> Result<Self> {
        let (client, mut tasks, mut pieces) = (http_client()?, JoinSet::new(), Vec::new());
        for number in 0..STREAMS_PER_POD {
            let (sender, receiver) = watch::channel(0);
            pieces.push(receiver);
            let (client, target) = (client.clone(), target.clone());
            let question = Question::plain(&format!("long-{number}"), "Count to fifty.", Since::V1, "");
            tasks.spawn(async move {
                let count = |_: &str| sender.send_modify(|pieces| *pieces += 1);
                ask(&client, &target, &question, LONG_ANSWER, count).await
            });
        }
        Ok(Self { tasks, pieces })
    }

    async fn await_under_way(&mut self) -> Result<()> {
        for pieces in &mut self.pieces {
            let under_way = pieces.wait_for(|pieces| *pieces >= PIECES_BEFORE);
            let under_way = tokio::time::timeout(RESPAWN_TIMEOUT, under_way).await.map(|seen| seen.is_ok());
            ensure!(under_way == Ok(true), "a long stream did not get under way");
        }
        Ok(())
    }

    async fn end(self) -> Vec<Record> {
        self.tasks.join_all().await
    }
}

/// What `/readyz` of a pod said, each change with its time.
struct Readiness {
    changes: watch::Receiver<Vec<(Instant, u16)>>,
    _stop: DropGuard,
}

impl Readiness {
    fn follow(target: &Target) -> Result<Self> {
        let (client, url) = (http_client()?, target.base_url.replace("/v1", "/readyz"));
        let (sender, changes) = watch::channel(Vec::new());
        let stop = CancellationToken::new();
        let (stopped, guard) = (stop.clone(), stop.drop_guard());
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(READINESS_PERIOD);
            while !stopped.is_cancelled() {
                tick.tick().await;
                let status = client.get(&url).send().await.map_or(0, |response| response.status().as_u16());
                let news = |changes: &mut Vec<(Instant, u16)>| {
                    let changed = changes.last().is_none_or(|(_, last)| *last != status);
                    changed.then(|| changes.push((Instant::now(), status))).is_some()
                };
                sender.send_if_modified(news);
            }
        });
        Ok(Self { changes, _stop: guard })
    }

    /// When it first was so after `since`, even if it is over by now.
    async fn await_status(&mut self, ready: bool, since: Instant, limit: Duration) -> Result<Instant> {
        let first = |changes: &Vec<(Instant, u16)>| {
            let wanted = changes.iter().find(|(at, status)| *at >= since && (*status == 200) == ready);
            wanted.map(|(at, _)| *at)
        };
        let seen = tokio::time::timeout(limit, self.changes.wait_for(|changes| first(changes).is_some())).await;
        let changed_at = seen.ok().and_then(|seen| first(&*seen.ok()?));
        changed_at
            .with_context(|| format!("/readyz was not ready={ready} within {limit:?}: {:?}", *self.changes.borrow()))
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_killed_worker_fails_its_own_streams_and_comes_back() -> Result<()> {
    with_temp_ns("worker-kill", async |namespace| {
        let model = ModelStore::on(&namespace.cluster).await?.model(DemoModel::V1)?;
        golden_prompts_config_map(namespace).await?;
        let fixture = ServiceFixture { parallel: 8, sequence_tokens: 2048, ..ServiceFixture::default() };
        let service = TestService::start(namespace, fixture, &model).await?;
        let identities = service.identities().await?;
        let pods = service.pods().await?;
        let [hit, other] = pods.as_slice() else { anyhow::bail!("two pods are expected, there are {}", pods.len()) };
        let (hit_target, other_target) = (pod_target(hit)?, pod_target(other)?);
        let worker = process(&namespace.cluster, hit, "gantry-server worker")?;
        report_memory(&namespace.cluster, hit)?;

        let begun = Instant::now();
        let mut readiness = Readiness::follow(&hit_target)?;
        readiness.await_status(true, begun, RESPAWN_TIMEOUT).await?;
        // Last those that must not have ended when the worker is killed.
        let mut other_streams = LongStreams::start(&other_target)?;
        other_streams.await_under_way().await?;
        let mut hit_streams = LongStreams::start(&hit_target)?;
        hit_streams.await_under_way().await?;
        let killed_at = Instant::now();
        worker.kill()?;

        for record in hit_streams.end().await {
            let failure =
                record.outcome.err().context("a stream of the killed worker ended as if nothing had happened")?;
            ensure!(failure.kind == FailureKind::ErrorEvent, "no error event at the end: {failure}");
            ensure!(failure.detail.contains("worker_died"), "the error does not tell its cause: {failure}");
        }
        let unready_at = readiness.await_status(false, killed_at, RESPAWN_TIMEOUT).await?;
        ensure!(unready_at - killed_at < UNREADY_WITHIN, "/readyz told a lie for {:?}", unready_at - killed_at);
        let ready_at = readiness.await_status(true, unready_at, RESPAWN_TIMEOUT).await?;
        say(format_args!(
            "FIGURE worker killed: not ready after {} ms, ready again after {} ms",
            (unready_at - killed_at).as_millis(),
            (ready_at - killed_at).as_millis()
        ));
        let again = process(&namespace.cluster, hit, "gantry-server worker")?;
        ensure!(again.pid != worker.pid, "the worker was not started again: {again:?}");
        for record in other_streams.end().await {
            record.outcome.map_err(|failure| anyhow::anyhow!("a stream of the other pod failed: {failure}"))?;
        }

        let load = service.load(STREAMS, common_questions()?, None).await?;
        load.await_completed(100, ROLLOUT_TIMEOUT).await?;
        load.finish().await?.ensure_no_failure()?;
        service.ensure_same_pods(&identities).await
    })
    .await
}

/// Prints what the processes of a pod take.
fn report_memory(cluster: &Cluster, pod: &Pod) -> Result<()> {
    for name in ["gantry-server pod", "gantry-server worker"] {
        let bytes = process(cluster, pod, name)?.resident_bytes().unwrap_or_default();
        say(format_args!("FIGURE resident memory of {name}: {:.1} MiB", bytes as f64 / f64::from(1 << 20)));
    }
    Ok(())
}

async fn operator_pod(cluster: &Cluster) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let pods = pods.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?;
    pods.into_iter().find(is_ready).context("no pod of the operator is ready")
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_killed_operator_does_not_spoil_the_rollout() -> Result<()> {
    with_temp_ns("operator-kill", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model_at(DemoModel::V2, SLOW)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let identities = service.identities().await?;
        let load = service.load(STREAMS, common_questions()?, None).await?;

        service.set_model(&v2).await?;
        let candidate = service.fixture.version(&v2);
        service
            .await_status("pods fetch the new model", ROLLOUT_TIMEOUT, |_, status| {
                let step = status.rollout.as_ref().map(|rollout| rollout.step);
                let fetching = status
                    .replicas
                    .iter()
                    .filter_map(|replica| replica.candidate.as_ref())
                    .any(|of_pod| of_pod.version == candidate && of_pod.phase == CandidatePhase::Fetching);
                (step == Some(RolloutStep::Prepare) && fetching).then_some(())
            })
            .await?;
        let operator = operator_pod(&namespace.cluster).await?;
        let running = process(&namespace.cluster, &operator, "gantry-operator")?;
        let bytes = running.resident_bytes().unwrap_or_default();
        say(format_args!("FIGURE resident memory of gantry-operator: {:.1} MiB", bytes as f64 / f64::from(1 << 20)));
        running.kill()?;

        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        let again = operator_pod(&namespace.cluster).await?;
        let restarts = |pod: &Pod| {
            let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            (pod.name_any(), statuses.map(|status| status.restart_count).sum::<i32>())
        };
        ensure!(restarts(&again) != restarts(&operator), "the operator was not started again: {:?}", restarts(&again));
        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        service.ensure_same_pods(&identities).await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn without_the_api_server_pods_go_on_and_a_spec_changed_after_it_is_rolled_out() -> Result<()> {
    with_temp_ns("api-outage", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let identities = service.identities().await?;
        let load = service.load(STREAMS, common_questions()?, None).await?;
        load.await_completed(50, ROLLOUT_TIMEOUT).await?;

        let api_server = Stopped::stop(&namespace.cluster, "kube-apiserver").await?;
        let before = load.progress().completed;
        // The length of the fault itself; nothing is awaited here.
        tokio::time::sleep(OUTAGE).await;
        let during = load.progress().completed - before;
        api_server.start().await?;
        say(format_args!("{during} requests were answered while the API server was away"));
        ensure!(during > 100, "only {during} requests were answered in {OUTAGE:?} without the API server");

        let changed_at = Instant::now();
        poll("the spec can be changed", RESPAWN_TIMEOUT, Duration::from_millis(100), async || {
            service.set_model(&v2).await.map(|_| Check::Done(()))
        })
        .await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        say(format_args!(
            "FIGURE change of the spec right after the outage to settled: {:.1} s",
            changed_at.elapsed().as_secs_f64()
        ));
        let report = load.finish().await?;
        say(report.summary());
        report.ensure_no_failure()?;
        service.ensure_same_pods(&identities).await
    })
    .await
}
