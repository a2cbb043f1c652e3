//! What pods do now, from two looks at their metrics.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::{StreamExt as _, stream};
use gantry_crds::{SERVICE_LABEL, quantity::human_bytes};
use http::Request;
use http_body_util::Empty;
use hyper::body::Bytes;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use tokio::time::sleep;

use crate::{
    args::Top,
    cluster::Cluster,
    pod::{METRICS_PORT, send, whole},
    text::columns,
};

/// Time between the two looks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Pods that are asked at once.
const ASKED_AT_ONCE: usize = 16;

/// A table of pods.
///
/// # Errors
/// When no pod answers, or none can be listed.
pub async fn top(cluster: &Cluster, arguments: &Top) -> Result<String> {
    let pods = cluster.ready_pods(arguments.name.as_deref(), arguments.all_namespaces).await?;
    if pods.is_empty() {
        bail!("no pod answers: kubectl gantry status says why");
    }
    let rows = stream::iter(&pods).map(|pod| row(cluster, pod)).buffered(ASKED_AT_ONCE).collect::<Vec<_>>().await;
    Ok(columns(["NAMESPACE", "SERVICE", "POD", "RUNNING", "WAITING", "READ/S", "WRITTEN/S", "MEMORY"], &rows))
}

async fn row(cluster: &Cluster, pod: &Pod) -> [String; 8] {
    let namespace = pod.namespace().unwrap_or_default();
    let service = pod.labels().get(SERVICE_LABEL).cloned().unwrap_or_default();
    let name = pod.name_any();
    let figures = figures(cluster, &namespace, &name).await;
    let [running, waiting, read, written, memory] = figures
        .unwrap_or_else(|error| [format!("{error:#}"), String::new(), String::new(), String::new(), String::new()]);
    [namespace, service, name, running, waiting, read, written, memory]
}

async fn figures(cluster: &Cluster, namespace: &str, pod: &str) -> Result<[String; 5]> {
    let began = Instant::now();
    let before = metrics(cluster, namespace, pod).await?;
    // A rate is of a time that passes.
    sleep(INTERVAL).await;
    let after = metrics(cluster, namespace, pod).await?;
    Ok(between(&before, &after, began.elapsed()))
}

async fn metrics(cluster: &Cluster, namespace: &str, pod: &str) -> Result<String> {
    let request = Request::get("/metrics").body(Empty::<Bytes>::new())?;
    let answer = send(&cluster.pods(namespace), pod, METRICS_PORT, request).await?;
    if !answer.status().is_success() {
        bail!("its metrics: {}", answer.status());
    }
    whole(answer).await
}

fn between(before: &str, after: &str, elapsed: Duration) -> [String; 5] {
    let rate = |name: &str| (sum(after, name) - sum(before, name)).max(0.0) / elapsed.as_secs_f64();
    [
        format!("{:.0}", sum(after, "gantry_requests_running")),
        format!("{:.0}", sum(after, "gantry_requests_queued")),
        format!("{:.1}", rate("gantry_engine_prompt_tokens_total")),
        format!("{:.1}", rate("gantry_engine_generated_tokens_total")),
        human_bytes(sum(after, "gantry_worker_resident_bytes") as i64),
    ]
}

/// The sum of a metric over its labels.
fn sum(metrics: &str, name: &str) -> f64 {
    let of_name = metrics.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        (rest.starts_with('{') || rest.starts_with(' ')).then_some(rest)
    });
    of_name.filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# HELP gantry_requests_running Requests\ngantry_requests_running{version=\"a b\"} 3\n\
        gantry_requests_queued{version=\"a\"} 0\ngantry_engine_generated_tokens_total{worker=\"0\"} 100\n\
        gantry_engine_generated_tokens_total{worker=\"1\"} 50\ngantry_engine_prompt_tokens_total{source=\"computed\"} 10\n";

    #[test]
    fn rates_are_sums_over_labels() {
        let after = BEFORE.replace(" 100\n", " 120\n").replace(" 50\n", " 60\n")
            + "gantry_worker_resident_bytes{worker=\"0\"} 1048576\n";
        assert_eq!(between(BEFORE, &after, Duration::from_secs(2)), ["3", "0", "0.0", "15.0", "1Mi"]);
    }

    #[test]
    fn a_worker_that_began_anew_has_no_negative_rate() {
        let after = BEFORE.replace(" 100\n", " 1\n");
        assert_eq!(between(BEFORE, &after, Duration::from_secs(1))[3], "0.0");
    }
}
