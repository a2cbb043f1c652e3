//! A server under test: started on a free port, awaited, stopped by its process id.

use std::{
    fs::File,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use crate::{
    client::{self, Ask},
    processes::{self, Cost},
};

/// Longest time until a server is ready: a model may have to come from a slow disk.
const READY_LIMIT: Duration = Duration::from_secs(300);
/// How often a server is asked whether it is ready.
const READY_POLL: Duration = Duration::from_millis(10);
/// How often is looked whether a killed one is gone.
const STOP_POLL: Duration = Duration::from_millis(50);
/// Longest time until what a killed server had started is gone too.
const STOP_LIMIT: Duration = Duration::from_secs(20);
/// Bytes of the end of a log that an error shows.
const LOG_SHOWN_BYTES: usize = 2000;

/// How a server is started and asked.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Setup {
    /// The program; not kept in results, which say what it is in other ways.
    #[serde(skip)]
    pub program: PathBuf,
    /// Its arguments, without the port.
    pub args: Vec<String>,
    /// Its environment, besides ours.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, String)>,
    /// Fields of every request, for what a server takes there and not as a flag.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub body: Map<String, Value>,
}

/// A server that runs. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pid: u32,
    /// Where it listens.
    pub address: SocketAddr,
    /// Milliseconds from its start to the first text of the first answer.
    pub ready_ms: f64,
    log: PathBuf,
}

impl Server {
    /// Starts it and waits until it has answered `first`, which also warms it up; its output goes to the file `log`.
    ///
    /// # Errors
    /// When it does not start or does not answer in time, with the end of its log.
    pub async fn start(setup: &Setup, first: &Ask, log: &Path) -> Result<Self> {
        let address = free_address()?;
        let out = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let begun = Instant::now();
        let child = Command::new(&setup.program)
            .args(&setup.args)
            .args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()])
            .envs(setup.env.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::from(out.try_clone()?))
            .stderr(Stdio::from(out))
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", setup.program.display()))?;
        let pid = child.id().context("the server ended at once")?;
        let mut server = Self { child, pid, address, ready_ms: 0.0, log: log.to_owned() };
        server.await_ready(first, begun).await?;
        Ok(server)
    }

    async fn await_ready(&mut self, first: &Ask, begun: Instant) -> Result<()> {
        loop {
            let outcome = client::stream(self.address, first, begun, None, &|_| {}).await;
            let Some(error) = outcome.error else {
                self.ready_ms = outcome.events_s.first().map_or(outcome.ended_s, |&first_s| first_s) * 1e3;
                return Ok(());
            };
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended with {status} before it was ready\n{}", self.log_tail());
            }
            if begun.elapsed() > READY_LIMIT {
                bail!("the server was not ready within {READY_LIMIT:?}: {error}\n{}", self.log_tail());
            }
            sleep(READY_POLL).await;
        }
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Asks it to end, and says how it did.
    ///
    /// # Errors
    /// When it does not end in time.
    pub async fn end(mut self, limit: Duration) -> Result<ExitStatus> {
        processes::signal(self.pid, "TERM")?;
        timeout(limit, self.child.wait())
            .await
            .with_context(|| format!("it does not end in {limit:?}"))?
            .map_err(Into::into)
    }

    /// What it has cost so far.
    #[must_use]
    pub fn cost(&self) -> Cost {
        processes::cost(self.pid)
    }

    /// Kills it and waits until it and all that it started are gone: the next one is to have the machine for itself.
    ///
    /// # Errors
    /// When a process stays.
    pub async fn stop(mut self) -> Result<()> {
        let mut processes = processes::tree(self.pid);
        self.child.kill().await.context("cannot kill the server")?;
        let begun = Instant::now();
        loop {
            processes.retain(|pid| processes::is_alive(*pid));
            if processes.is_empty() {
                return Ok(());
            }
            ensure!(begun.elapsed() <= STOP_LIMIT, "processes of the server stay after its end: {processes:?}");
            sleep(STOP_POLL).await;
        }
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_SHOWN_BYTES)..]).into_owned()
    }
}

/// A port that was free a moment ago: both servers are given one, so that both are started alike.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no port is free on the loopback")?;
    Ok(listener.local_addr()?)
}
