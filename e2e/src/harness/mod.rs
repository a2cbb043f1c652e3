//! What tests on a cluster need: the cluster itself, namespaces that clean up and explain failures, conditions to wait
//! for, fixtures, and faults in real processes.
//!
//! Everything goes through the API server but two things: `kubectl` where its output is what a user sees, and processes
//! of the node, which are killed as a failing machine would (see [`node`]).

pub mod exec;
pub mod fixtures;
pub mod namespace;
pub mod node;
pub mod service;
pub mod wait;

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use gantry_crds::InferenceService;
use jiff::Timestamp;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::process::Command;

/// Namespace of the operator.
pub const SYSTEM_NAMESPACE: &str = "gantry-system";
/// Release of the chart.
pub const RELEASE: &str = "gantry";
/// Label that the operator's pods have.
pub const OPERATOR_SELECTOR: &str = "app.kubernetes.io/name=gantry-operator";
/// Image of the store, the load generator and the clients, unless `GANTRY_E2E_IMAGE` names another.
const E2E_IMAGE: &str = "gantry.dev/e2e:dev";
/// Longest time that a command such as kubectl or helm may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);
/// Longest time that one request to the API server may take, watches aside.
const API_TIMEOUT: Duration = Duration::from_secs(30);

/// Tells what a test does, at once and past the capture of the test runner: a test on a cluster takes its time.
pub fn say(text: impl std::fmt::Display) {
    let now = Timestamp::now().strftime("%H:%M:%S");
    // Nobody is left to be told when standard error is closed.
    drop(writeln!(std::io::stderr(), "[{now}] {text}"));
}

/// The cluster that tests run on.
#[derive(Clone)]
pub struct Cluster {
    /// A client with every right.
    pub client: Client,
    kubeconfig: PathBuf,
}

impl Cluster {
    /// The cluster that `KUBECONFIG` names.
    ///
    /// # Errors
    /// When there is none, or Gantry is not on it; the error says what to do.
    pub async fn from_env() -> Result<Self> {
        crate::install_crypto_provider();
        let how = "start one with `make up`, then run the tests with `make test`, or by hand after eval \"$(e2e/cluster/cluster env)\"";
        let kubeconfig = std::env::var_os("KUBECONFIG").map(PathBuf::from);
        let kubeconfig =
            kubeconfig.with_context(|| format!("KUBECONFIG is not set: tests must be told their cluster; {how}"))?;
        let file = Kubeconfig::read_from(&kubeconfig)
            .with_context(|| format!("KUBECONFIG={}; {how}", kubeconfig.display()))?;
        let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
        config.connect_timeout = Some(API_TIMEOUT);
        let client = Client::try_from(config)?;
        let services: Api<InferenceService> = Api::all(client.clone());
        let listed = tokio::time::timeout(API_TIMEOUT, services.list(&kube::api::ListParams::default().limit(1))).await;
        listed
            .context("the API server does not answer")
            .and_then(|listed| Ok(listed?))
            .with_context(|| format!("Gantry is not on the cluster of {}; {how}", kubeconfig.display()))?;
        Ok(Self { client, kubeconfig })
    }

    /// Runs kubectl and returns its standard output.
    ///
    /// # Errors
    /// When it fails; with its standard error.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.run("kubectl", arguments).await
    }

    /// Runs helm and returns its standard output.
    ///
    /// # Errors
    /// When it fails; with its standard error.
    pub async fn helm(&self, arguments: &[&str]) -> Result<String> {
        self.run("helm", arguments).await
    }

    async fn run(&self, tool: &str, arguments: &[&str]) -> Result<String> {
        let own = checkout().join("e2e/cluster/bin").join(tool);
        let program = if own.exists() { own } else { PathBuf::from(tool) };
        let mut command = Command::new(program);
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        output(command, &format!("{tool} {}", arguments.join(" "))).await
    }

    /// Runs the script of the project's own cluster: `stop kube-apiserver` and the like.
    ///
    /// # Errors
    /// When the tests run on another cluster, or the script fails.
    pub async fn control(&self, arguments: &[&str]) -> Result<String> {
        self.ensure_own()?;
        let mut command = Command::new(checkout().join("e2e/cluster/cluster"));
        command.args(arguments);
        output(command, &format!("e2e/cluster/cluster {}", arguments.join(" "))).await
    }

    /// Succeeds when the cluster is the project's own, whose node is this machine.
    ///
    /// # Errors
    /// When it is not.
    pub fn ensure_own(&self) -> Result<()> {
        let own = state_dir().join("admin.conf");
        let same = std::fs::canonicalize(&self.kubeconfig).ok() == std::fs::canonicalize(&own).ok();
        ensure!(
            same && own.exists(),
            "this test kills processes of the node, and KUBECONFIG={} is not the cluster of {}: run it on the cluster of `make up`",
            self.kubeconfig.display(),
            own.display()
        );
        Ok(())
    }
}

/// State of the project's own cluster: logs, sockets, kubeconfig.
#[must_use]
pub fn state_dir() -> PathBuf {
    std::env::var_os("CLUSTER_STATE").map_or_else(|| PathBuf::from("/var/lib/gantry-cluster"), PathBuf::from)
}

/// Image of the store, the load generator and the clients.
#[must_use]
pub fn e2e_image() -> String {
    std::env::var("GANTRY_E2E_IMAGE").unwrap_or_else(|_| E2E_IMAGE.to_owned())
}

/// Root of the checkout that the tests were built from.
#[must_use]
pub fn checkout() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

async fn output(mut command: Command, what: &str) -> Result<String> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn();
    let child = child.with_context(|| format!("{what} does not start"))?;
    let finished = tokio::time::timeout(COMMAND_TIMEOUT, child.wait_with_output()).await;
    let output = finished.with_context(|| format!("{what} took longer than {COMMAND_TIMEOUT:?}"))??;
    if !output.status.success() {
        bail!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
