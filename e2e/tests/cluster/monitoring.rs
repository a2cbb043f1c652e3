//! The chart's alerts and dashboards, in a real Prometheus that reads the operator and the pods.
//!
//! Absent: alerts that wait for minutes, which promtool tests (`charts/gantry/tests`).

use std::{collections::BTreeSet, process::Stdio, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use gantry_crds::status::GateName;
use gantry_e2e::{
    harness::{
        OPERATOR_SELECTOR, SYSTEM_NAMESPACE, checkout,
        fixtures::{ModelStore, ServiceFixture, golden_prompts_config_map},
        namespace::with_temp_ns,
        say,
        service::{ROLLOUT_TIMEOUT, TestService},
        wait::{Check, poll},
    },
    load::http_client,
    models::{DemoModel, questions},
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use reqwest::{Client, Url};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    net::TcpListener,
    process::{Child, Command},
};

/// Where the chart keeps them.
const MONITORING: &str = "charts/gantry/files/monitoring";
/// Time in which Prometheus must answer, and an alert that waits for nothing must fire.
const SOON: Duration = Duration::from_secs(30);
/// The time between two looks.
const PERIOD: Duration = Duration::from_millis(250);
/// A Prometheus on loopback; it ends with this.
struct Prometheus {
    base_url: String,
    client: Client,
    _process: Child,
    _directory: TempDir,
}

impl Prometheus {
    /// Reads the operator and the pods of `service` once a second, with the labels that a ServiceMonitor gives them, and judges by
    /// the chart's alerts.
    async fn start(service: &TestService<'_>) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let operators: Api<Pod> = Api::namespaced(service.namespace.cluster.client.clone(), SYSTEM_NAMESPACE);
        let operators = operators.list(&ListParams::default().labels(OPERATOR_SELECTOR)).await?.items;
        let serving = service.pods().await?;
        let targets = operators.iter().map(|pod| target(pod, 8080)).chain(serving.iter().map(|pod| target(pod, 8081)));
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [checkout().join(MONITORING).join("alerts.yaml")],
            "scrape_configs": [{"job_name": "gantry", "honor_labels": true, "static_configs": targets.collect::<Result<Vec<_>>>()?}],
        });
        // JSON is YAML.
        tokio::fs::write(directory.path().join("prometheus.yml"), config.to_string()).await?;
        let port = TcpListener::bind(("127.0.0.1", 0)).await?.local_addr()?.port();
        let log = std::fs::File::create(directory.path().join("log"))?;
        let process = Command::new("prometheus")
            .arg("--config.file=prometheus.yml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .context("prometheus cannot be started: apt-get install prometheus")?;
        let base_url = format!("http://127.0.0.1:{port}");
        let prometheus = Self { base_url, client: http_client()?, _process: process, _directory: directory };
        poll("Prometheus has read the operator and every pod", SOON, PERIOD, async || {
            let up = prometheus.query("up").await?;
            let values: Vec<_> = up.iter().map(|series| series["value"][1].as_str().unwrap_or_default()).collect();
            Ok(Check::when(!values.is_empty() && values.iter().all(|value| *value == "1"), || format!("{up:?}")))
        })
        .await?;
        Ok(prometheus)
    }

    async fn get(&self, path: &str, query: &[(&str, &str)]) -> Result<Value> {
        let address = Url::parse_with_params(&format!("{}/api/v1/{path}", self.base_url), query)?;
        let answer: Value = self.client.get(address).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{query:?}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The series of an expression, as of now.
    async fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let data = self.get("query", &[("query", expression)]).await?;
        data["result"].as_array().cloned().with_context(|| format!("{expression}: no series: {data}"))
    }

    /// The alerts of a name that fire for a service of this namespace.
    async fn firing(&self, name: &str, namespace: &str) -> Result<Vec<Value>> {
        let data = self.get("alerts", &[]).await?;
        let mut alerts = data["alerts"].as_array().cloned().context("no list of alerts")?;
        alerts.retain(|alert| {
            let labels = &alert["labels"];
            labels["alertname"] == name && labels["namespace"] == namespace && alert["state"] == "firing"
        });
        Ok(alerts)
    }
}

fn target(pod: &Pod, port: u16) -> Result<Value> {
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()).context("a pod has no address")?;
    Ok(json!({
        "targets": [format!("{address}:{port}")],
        "labels": {"namespace": pod.namespace(), "pod": pod.name_any()},
    }))
}

/// The expressions of a dashboard's panels and annotations, with its variables filled in as for one service.
fn expressions(dashboard: &Value, namespace: &str, service: &str) -> Vec<String> {
    let filled = |expression: &str| {
        expression.replace("$__rate_interval", "1m").replace("$namespace", namespace).replace("$service", service)
    };
    match dashboard {
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, value)| match value {
                Value::String(expression) if name == "expr" => vec![filled(expression)],
                _ => expressions(value, namespace, service),
            })
            .collect(),
        Value::Array(values) => values.iter().flat_map(|value| expressions(value, namespace, service)).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a cluster: make test"]
async fn a_rejection_fires_its_alert_and_every_query_of_the_dashboards_has_an_answer() -> Result<()> {
    with_temp_ns("monitoring", async |namespace| {
        let store = ModelStore::on(&namespace.cluster).await?;
        let (v1, v2, bad) = (store.model(DemoModel::V1)?, store.model(DemoModel::V2)?, store.model(DemoModel::V3Bad)?);
        golden_prompts_config_map(namespace).await?;
        let service = TestService::start(namespace, ServiceFixture::default(), &v1).await?;
        let prometheus = Prometheus::start(&service).await?;
        let load = service.load(1, questions()?, None).await?;
        let rejected = async || prometheus.firing("GantryVersionRejected", &namespace.name).await;
        ensure!(rejected().await?.is_empty(), "an alert fires for nothing");

        service.set_model(&bad).await?;
        service.await_rejected(&bad, GateName::Prompts, ROLLOUT_TIMEOUT).await?;
        let alert = poll("the alert fires", SOON, PERIOD, async || {
            let firing = rejected().await?;
            Ok(firing.first().cloned().map_or_else(|| Check::Wait("none".to_owned()), Check::Done))
        })
        .await?;
        say(format_args!("fires: {}", alert["annotations"]));
        ensure!(alert["labels"]["service"] == service.fixture.name, "it is of no service: {alert}");
        let advice = alert["annotations"]["description"].as_str().unwrap_or_default();
        let Some((_, command)) = advice.split_once("kubectl ") else {
            bail!("it does not say what to look at: {advice}")
        };
        let shown = namespace.cluster.kubectl(&command.split_whitespace().collect::<Vec<_>>()).await?;
        ensure!(
            shown.contains("Rejected") && shown.contains("prompts"),
            "what it says to look at does not tell why:\n{shown}"
        );

        service.set_model(&v2).await?;
        service.await_settled(&v2, ROLLOUT_TIMEOUT).await?;
        poll("the alert ends", SOON, PERIOD, async || {
            let firing = rejected().await?;
            Ok(Check::when(firing.is_empty(), || format!("{firing:?}")))
        })
        .await?;
        ensure_dashboards_are_answered(&prometheus, &service).await?;
        let report = load.finish().await?;
        report.ensure_no_failure()
    })
    .await
}

async fn ensure_dashboards_are_answered(prometheus: &Prometheus, service: &TestService<'_>) -> Result<()> {
    let mut asked = 0;
    let mut empty = BTreeSet::new();
    for entry in std::fs::read_dir(checkout().join(MONITORING).join("dashboards"))? {
        let dashboard: Value = serde_json::from_slice(&std::fs::read(entry?.path())?)?;
        for expression in expressions(&dashboard, &service.namespace.name, service.fixture.name) {
            asked += 1;
            if prometheus.query(&expression).await?.is_empty() {
                empty.insert(expression);
            }
        }
    }
    say(format_args!("{asked} queries of the dashboards, {} without an answer", empty.len()));
    ensure!(asked > 0 && empty.is_empty(), "{asked} queries; nothing answers {empty:?}");
    Ok(())
}
