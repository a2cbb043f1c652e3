//! Commands in pods.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::AttachParams};
use tokio::io::AsyncReadExt;

/// Longest time that a command may take.
const EXEC_TIMEOUT: Duration = Duration::from_secs(120);
/// Most bytes that are read of each output.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;

/// Runs `command` in `pod` and returns its standard output.
///
/// # Errors
/// When it cannot be run or fails; with both outputs.
pub async fn exec(pods: &Api<Pod>, pod: &str, command: &[&str]) -> Result<String> {
    let what = format!("{} in the pod {pod}", command.first().copied().unwrap_or_default());
    let run = tokio::time::timeout(EXEC_TIMEOUT, run(pods, pod, command)).await;
    run.with_context(|| format!("{what} took longer than {EXEC_TIMEOUT:?}"))?.with_context(|| what)
}

async fn run(pods: &Api<Pod>, pod: &str, command: &[&str]) -> Result<String> {
    let mut process = pods.exec(pod, command.iter().copied(), &AttachParams::default().stderr(true)).await?;
    let status = process.take_status().context("no status")?;
    let (out, err) = (process.stdout().context("no output")?, process.stderr().context("no output")?);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (mut out, mut err) = (out.take(MAX_OUTPUT_BYTES), err.take(MAX_OUTPUT_BYTES));
    let (read_out, read_err, status) =
        futures::join!(out.read_to_end(&mut stdout), err.read_to_end(&mut stderr), status);
    read_out.and(read_err)?;
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    match status {
        Some(status) if status.status.as_deref() == Some("Success") => Ok(stdout.into_owned()),
        status => bail!("it failed: {:?}\n{stdout}\n{stderr}", status.and_then(|status| status.message)),
    }
}
