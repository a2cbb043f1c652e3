//! Faults in the node's processes: `kill -9` of one process of a pod, and components of the cluster that stop.
//!
//! The images have no tools to do it from inside, and a failing machine does not ask. It works where the node is the
//! machine of the tests, as in the project's own cluster.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::{Cluster, checkout, say, state_dir};

/// A process of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its id on the node.
    pub pid: u32,
    /// Its command line, separated by spaces.
    pub command: String,
}

impl Process {
    /// Ends it as the kernel does when memory runs out: it cannot clean up.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn kill(&self) -> Result<()> {
        say(format_args!("kill -9 {} ({})", self.pid, self.command));
        let killed = Command::new("kill").args(["-9", &self.pid.to_string()]).status()?;
        ensure!(killed.success(), "{self:?} could not be killed");
        Ok(())
    }

    /// Resident memory in bytes.
    #[must_use]
    pub fn resident_bytes(&self) -> Option<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The most resident memory that it ever had, in bytes.
    #[must_use]
    pub fn peak_resident_bytes(&self) -> Option<u64> {
        self.status_bytes("VmHWM:")
    }

    fn status_bytes(&self, name: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
    }
}

/// The processes of `pod` whose command line contains `part`, the pause container aside.
///
/// # Errors
/// When the cluster's node is not this machine.
pub fn processes(cluster: &Cluster, pod: &Pod, part: &str) -> Result<Vec<Process>> {
    cluster.ensure_own()?;
    let uid = pod.uid().context("the pod has no UID")?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc cannot be read")? {
        let path = entry?.path();
        // A process that ends while it is looked at is none.
        if let Some(process) = process_of(&path, &uid)
            && process.command.contains(part)
        {
            found.push(process);
        }
    }
    found.sort_by_key(|process| process.pid);
    Ok(found)
}

fn process_of(path: &Path, pod_uid: &str) -> Option<Process> {
    let pid = path.file_name()?.to_str()?.parse().ok()?;
    // `pod<uid>`; systemd's names have underscores in place of dashes.
    let cgroups = fs::read_to_string(path.join("cgroup")).ok()?.replace('_', "-");
    if !cgroups.contains(pod_uid) {
        return None;
    }
    let command = fs::read(path.join("cmdline")).ok()?;
    let command = String::from_utf8_lossy(&command).trim_end_matches('\0').replace('\0', " ");
    Some(Process { pid, command })
}

/// The one process of `pod` whose command line contains `part`.
///
/// # Errors
/// When there is none, or more than one.
pub fn process(cluster: &Cluster, pod: &Pod, part: &str) -> Result<Process> {
    let mut found = processes(cluster, pod, part)?;
    ensure!(
        found.len() == 1,
        "one process with {part:?} is expected in the pod {}, there are: {found:?}",
        pod.name_any()
    );
    found.pop().context("it was there a moment ago")
}

/// A component of the cluster that is stopped, and started again at the latest when this is dropped.
pub struct Stopped {
    component: &'static str,
    cluster: Cluster,
    started: bool,
}

impl Stopped {
    /// Stops `component`.
    ///
    /// # Errors
    /// When the cluster is not the project's own, or the component does not stop.
    pub async fn stop(cluster: &Cluster, component: &'static str) -> Result<Self> {
        cluster.control(&["stop", component]).await?;
        say(format_args!("{component} is stopped"));
        Ok(Self { component, cluster: cluster.clone(), started: false })
    }

    /// Starts it again and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn start(mut self) -> Result<()> {
        self.cluster.control(&["start", self.component]).await?;
        self.started = true;
        say(format_args!("{} is back", self.component));
        Ok(())
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        if !self.started {
            let started = Command::new(checkout().join("e2e/cluster/cluster")).args(["start", self.component]).status();
            say(format_args!("{} is started again after a failure: {started:?}", self.component));
        }
    }
}

/// Gives an image of the node a second name: an upgrade to it changes the name and nothing else.
///
/// # Errors
/// When the cluster's node is not this machine, or has no such image.
pub fn tag_image(cluster: &Cluster, image: &str, new: &str) -> Result<()> {
    cluster.ensure_own()?;
    let socket = state_dir().join("node-1/containerd.sock");
    let tagged = Command::new("ctr")
        .arg("--address")
        .arg(socket)
        .args(["--namespace", "k8s.io", "images", "tag", "--force", image, new])
        .output()
        .context("ctr does not start")?;
    ensure!(tagged.status.success(), "{image} could not be tagged {new}: {}", String::from_utf8_lossy(&tagged.stderr));
    Ok(())
}
