//! The soak: many requests of all kinds to a real server while its clients leave, its workers die or stand still and its
//! files on disk go bad, with every answer checked and the memory watched.
//!
//! ```text
//! asks ─▶ exchange ─▶ check      as many at once as there are clients, and bursts of more than fit
//! faults ─▶ the workers, the disk cache     one at a time, each until the server has recovered
//! watch ─▶ RSS and open files of each process
//! audit: afterwards, whether all is given back, and whether the counts agree
//! ```
//!
//! What an answer must be is known from a server that was asked the same, one request at a time. Absent: retries, and
//! answers that are not looked at.

pub mod asks;
pub mod audit;
pub mod check;
pub mod exchange;
pub mod faults;
pub mod report;
pub mod watch;

use std::{
    fmt::Arguments,
    io::Write,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use self::{
    asks::{Alone, Asks, Request},
    check::{Tally, judge},
    exchange::{Exchange, Reply, exchange},
    faults::Faults,
    report::{Check, SoakReport},
    watch::Watch,
};
use crate::{
    client::Ask,
    prompts::MODEL_NAME,
    server::{Server, Setup},
};

/// Most requests of a soak.
pub const MAX_REQUESTS: u64 = 10_000_000;
/// Clients, each of which sends its next request when its last one has ended.
pub const CLIENTS: usize = 16;
/// Workers of the server.
pub const WORKERS: u32 = 2;
/// Sequences of all workers.
pub const SEQUENCES: u32 = 8;
/// KV cells of all workers: a fraction of what the requests that run at once would take.
const KV_CELLS: u32 = 4096;
/// Tokens that a sequence may have: all cells of its worker.
pub const SEQUENCE_TOKENS: u32 = KV_CELLS / WORKERS;
/// Requests that may wait.
const MAX_QUEUE: usize = 32;
/// Requests that come at once on top of the clients': more than are let in.
const BURST: u64 = 40;
/// Main memory for prompts: they do not all fit.
const CACHE_RAM_MIB: u32 = 8;
/// Disk for prompts: they do not all fit.
const CACHE_DISK_MIB: u32 = 16;
/// How long a client that was sent away waits: without it, a full queue would refuse all requests that are left.
const REFUSED_PAUSE: Duration = Duration::from_millis(500);
/// How often the progress is told.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time for one request: a worker that stands still is replaced within half of it.
const REQUEST_LIMIT: Duration = Duration::from_secs(180);

/// What a soak is.
#[derive(Debug, Clone)]
pub struct Soak {
    /// gantry-server.
    pub server: PathBuf,
    /// Folder of the demo models.
    pub demo: PathBuf,
    /// Another model than the demo one, for which there is no draft model.
    pub model: Option<PathBuf>,
    /// Where logs and the disk cache go.
    pub folder: PathBuf,
    /// Requests to send; at most [`MAX_REQUESTS`].
    pub requests: u64,
    /// What all that is random follows from, but for the order in which things happen.
    pub seed: u64,
}

/// What all clients share.
struct Run {
    address: SocketAddr,
    asks: Asks,
    alone: Vec<Alone>,
    next: AtomicU64,
    requests: u64,
    tally: Mutex<Tally>,
    faults: Arc<Faults>,
}

impl Soak {
    /// Runs it.
    ///
    /// # Errors
    /// When it cannot be run to its end; what went wrong in it is told by the report.
    pub async fn run(&self) -> Result<SoakReport> {
        ensure!((1..=MAX_REQUESTS).contains(&self.requests), "use 1 to {MAX_REQUESTS} requests");
        std::fs::create_dir_all(&self.folder).with_context(|| self.folder.display().to_string())?;
        let asks = Asks::new(&self.demo.join("eval.jsonl"), self.seed, self.requests)?;
        let begun = Instant::now();
        let alone = self.ask_alone(&asks).await.context("the answers that requests get alone")?;
        say(format_args!("{} answers alone: {:.0} s", alone.len(), begun.elapsed().as_secs_f64()));

        let disk = self.folder.join("prompts");
        // What an earlier soak left there would be found again.
        drop(std::fs::remove_dir_all(&disk));
        let server = Server::start(&self.setup(&disk)?, &hello(), &self.folder.join("server.log")).await?;
        let before = audit::settled(server.address, server.pid(), WORKERS).await?;
        let faults = Arc::new(Faults::new(server.address, server.pid(), disk, self.seed, self.requests));
        let watch = Watch::new(server.pid());
        let run = Arc::new(Run {
            address: server.address,
            asks,
            alone,
            next: AtomicU64::new(0),
            requests: self.requests,
            tally: Mutex::default(),
            faults: Arc::clone(&faults),
        });
        let begun = Instant::now();
        let (watch, recovery) = run.to_the_end(watch, begun).await?;
        let wall_s = begun.elapsed().as_secs_f64();
        let tally = run.tally();
        let mut checks = vec![recovery];
        checks.extend(audit::after(&run.asks, &server, &before, &tally, &faults).await);
        checks.push(audit::end(server).await);
        Ok(SoakReport::new(self, wall_s, tally, &faults, &watch, checks))
    }

    fn setup(&self, disk: &Path) -> Result<Setup> {
        let disk = disk.to_str().context("the folder's name is not UTF-8")?.to_owned();
        let mut flags: Vec<(&str, String)> = vec![
            ("--ctx-size", KV_CELLS.to_string()),
            ("--parallel", SEQUENCES.to_string()),
            ("--threads", WORKERS.to_string()),
            ("--workers", WORKERS.to_string()),
            ("--max-queue", MAX_QUEUE.to_string()),
            ("--dispatch", "prefix-aware".to_owned()),
            ("--kv-layout", "unified".to_owned()),
            ("--prompt-lookup", "4".to_owned()),
            ("--cache-ram", CACHE_RAM_MIB.to_string()),
            ("--cache-disk", CACHE_DISK_MIB.to_string()),
            ("--cache-disk-dir", disk),
            ("--cache-ttl", "60".to_owned()),
        ];
        if self.model.is_none() {
            flags.push(("--model-draft", self.demo.join("demo-draft.q8_0.gguf").display().to_string()));
            flags.push(("--spec-draft-n-max", "4".to_owned()));
        }
        Ok(self.setup_with(flags.iter().map(|(flag, value)| (*flag, value.as_str()))))
    }

    fn setup_with<'a>(&self, flags: impl Iterator<Item = (&'a str, &'a str)>) -> Setup {
        let model = self.model.clone().unwrap_or_else(|| self.demo.join("demo-v2.q8_0.gguf")).display().to_string();
        let mut args = ["serve", "--model", &model, "--alias", MODEL_NAME].map(str::to_owned).to_vec();
        args.extend(flags.flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]));
        // A line for each request is more than a log of many thousands should be.
        let env = vec![("RUST_LOG".to_owned(), "warn".to_owned())];
        Setup { program: self.server.clone(), args, env, ..Setup::default() }
    }

    /// What each reference is answered by a server that has nothing else to do.
    async fn ask_alone(&self, asks: &Asks) -> Result<Vec<Alone>> {
        let tokens = SEQUENCE_TOKENS.to_string();
        let flags = [("--ctx-size", tokens.as_str()), ("--parallel", "1"), ("--threads", "1"), ("--cache-ram", "0")];
        let log = self.folder.join("alone.log");
        let server = Server::start(&self.setup_with(flags.into_iter()), &hello(), &log).await?;
        let mut alone = Vec::new();
        for index in 0..asks.references() {
            let answer = async |request: &Request| exchange(server.address, request, REQUEST_LIMIT).await.reply;
            let told = async {
                let mut told = Alone::of(answer(&asks.reference(index)).await)?;
                if told.reason == "stop" {
                    told.learn_end(answer(&asks.gone_on(index, told.completion_tokens)).await)?;
                }
                anyhow::Ok(told)
            };
            alone.push(told.await.with_context(|| format!("reference {index}"))?);
        }
        server.stop().await?;
        Ok(alone)
    }
}

impl Run {
    /// Sends all requests while the faults come, and watches. Says whether the server recovered from each of them.
    async fn to_the_end(self: &Arc<Self>, mut watch: Watch, begun: Instant) -> Result<(Watch, Check)> {
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let run = Arc::clone(self);
            clients.spawn(async move { while run.one().await {} });
        }
        clients.spawn(Arc::clone(self).bursts());
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let mut faults = JoinSet::new();
        faults.spawn(Arc::clone(&self.faults).disturb_workers(Arc::clone(self), stopped.clone()));
        faults.spawn(Arc::clone(&self.faults).damage_files(stopped));
        let mut told = Instant::now();
        loop {
            tokio::select! {
                ended = clients.join_next() => match ended {
                    Some(client) => client.context("a client's task failed")?,
                    None => break,
                },
                () = sleep(watch::INTERVAL) => {}
            }
            watch.look(begun.elapsed());
            if told.elapsed() >= PROGRESS_INTERVAL {
                told = Instant::now();
                self.tell(&watch, begun.elapsed());
            }
        }
        stop.send_replace(true);
        let mut stuck = Ok(());
        while let Some(driver) = faults.join_next().await {
            stuck = stuck.and(driver.context("a fault's task failed")?);
        }
        self.tell(&watch, begun.elapsed());
        let detail = stuck.as_ref().err().map_or_else(|| self.faults.to_string(), |error| format!("{error:#}"));
        Ok((watch, Check::new("the server recovers from every fault", stuck.is_ok(), detail)))
    }

    /// The number of the next request, unless all are sent.
    fn take(&self) -> Option<u64> {
        let number = self.next.fetch_add(1, Relaxed);
        (number < self.requests).then_some(number)
    }

    /// Requests that were sent.
    fn sent(&self) -> u64 {
        self.next.load(Relaxed).min(self.requests)
    }

    /// Sends the next request and judges its answer; false when there is none.
    async fn one(&self) -> bool {
        let Some(number) = self.take() else { return false };
        let request = self.asks.request(number, &self.alone);
        let got = exchange(self.address, &request, REQUEST_LIMIT).await;
        self.note(&request, &got);
        if matches!(&got.reply, Reply::Error(error) if matches!(error.status, Some(429 | 503))) {
            sleep(REFUSED_PAUSE).await;
        }
        true
    }

    fn note(&self, request: &Request, got: &Exchange) {
        let disturbed = self.faults.overlap(got.sent, got.ended);
        let verdict = judge(request, &got.reply, &self.alone, disturbed);
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).note(request, got, verdict);
    }

    fn tally(&self) -> Tally {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From time to time, more requests than are let in.
    async fn bursts(self: Arc<Self>) {
        let every = (self.requests / 20).max(BURST * 2);
        let mut at = every / 2;
        while self.sent() < self.requests {
            if self.sent() < at {
                sleep(watch::INTERVAL / 10).await;
                continue;
            }
            at += every;
            let all = (0..BURST).map(|_| self.one());
            futures::future::join_all(all).await;
        }
    }

    fn tell(&self, watch: &Watch, elapsed: Duration) {
        let tally = self.tally();
        let seconds = elapsed.as_secs_f64();
        say(format_args!(
            "{seconds:5.0} s  {:6} of {} requests, {:.0}/s  {tally}  {}  {watch}",
            tally.ended(),
            self.requests,
            tally.ended() as f64 / seconds.max(0.001),
            self.faults,
        ));
    }
}

/// What a server is asked first.
fn hello() -> Ask {
    let fields = json!({
        "model": MODEL_NAME, "stream": true, "temperature": 0, "max_tokens": 8,
        "messages": [{"role": "user", "content": "Hello!"}],
    });
    let body = fields.as_object().cloned().unwrap_or_default();
    Ask { path: "/v1/chat/completions", body }
}

/// Tells on standard output, which may be closed: the report is what counts.
pub(crate) fn say(line: Arguments<'_>) {
    drop(writeln!(std::io::stdout(), "{line}"));
}
