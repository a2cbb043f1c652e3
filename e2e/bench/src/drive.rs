//! How requests are sent: three ways to load a server. [`crate::figures`] makes figures of what came back.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use hyper::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{
    client::{self, Ask, Outcome},
    figures::Run,
    prompts::{Material, Prompts},
};

/// Most requests of one run.
pub const MAX_REQUESTS: usize = 100_000;
/// How often a server is asked whether it is ready.
const PROBE_PERIOD: Duration = Duration::from_millis(10);

/// A way to load a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Drive {
    /// Each stream sends its next request when its last one has ended.
    Closed {
        /// Streams at once.
        streams: usize,
        /// Requests in all.
        requests: usize,
        /// What they ask.
        prompts: Prompts,
        /// Tokens of each answer.
        max_tokens: u32,
    },
    /// Streams that go on, and one request with a long prompt among them.
    Intruder {
        /// Streams that go on; one that has ended begins again.
        victims: usize,
        /// Words of their prompts.
        victim_words: usize,
        /// Tokens of their answers.
        victim_tokens: u32,
        /// Events that each of them gets before the intruder comes: how they run when nobody disturbs them.
        idle_events: usize,
        /// Words of the intruder's prompt.
        intruder_words: usize,
        /// Tokens of its answer.
        intruder_tokens: u32,
    },
    /// Clients of which every second one disconnects in mid-stream; another one comes the moment it does.
    Leaving {
        /// Clients at once.
        clients: usize,
        /// Words of their prompts.
        words: usize,
        /// Tokens of their answers.
        max_tokens: u32,
        /// Events after which every second client leaves.
        leave_after: usize,
        /// Words of the prompts of those who come then.
        newcomer_words: usize,
        /// Tokens of their answers.
        newcomer_tokens: u32,
    },
}

/// Who is asked, and with what.
#[derive(Debug)]
pub struct Course {
    /// The server.
    pub server: SocketAddr,
    /// The words there are.
    pub material: Material,
    /// Fields of every request besides ours.
    pub body: Map<String, Value>,
    /// Makes the words of one run differ from another's.
    pub seed: u64,
}

impl Course {
    fn ask(&self, prompts: Prompts, number: usize, max_tokens: u32) -> Result<Ask> {
        let mut ask = self.material.ask(prompts, self.seed, number as u64, max_tokens)?;
        ask.body.extend(self.body.clone());
        Ok(ask)
    }

    /// Loads the server.
    ///
    /// # Errors
    /// When the load cannot be made. A request that fails is a figure.
    pub async fn run(self, drive: Drive) -> Result<Run> {
        let course = Arc::new(self);
        match drive {
            Drive::Closed { streams, requests, prompts, max_tokens } => {
                course.closed(streams, requests, prompts, max_tokens).await
            }
            Drive::Intruder { .. } => course.intruder(drive).await,
            Drive::Leaving { .. } => course.leaving(drive).await,
        }
    }

    async fn closed(self: Arc<Self>, streams: usize, requests: usize, prompts: Prompts, tokens: u32) -> Result<Run> {
        ensure!((1..=MAX_REQUESTS).contains(&requests), "use 1 to {MAX_REQUESTS} requests");
        let asks = (0..requests).map(|number| self.ask(prompts, number, tokens)).collect::<Result<Vec<_>>>()?;
        let queue = Arc::new(std::sync::Mutex::new(asks.into_iter()));
        let clock = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..streams {
            let (queue, server) = (Arc::clone(&queue), self.server);
            tasks.spawn(async move {
                let mut outcomes = Vec::new();
                loop {
                    let next = queue.lock().ok().and_then(|mut asks| asks.next());
                    let Some(ask) = next else { return outcomes };
                    outcomes.push(client::stream(server, &ask, clock, None, &|_| {}).await);
                }
            });
        }
        let mut outcomes = Vec::new();
        while let Some(stream) = tasks.join_next().await {
            outcomes.extend(stream.context("a stream's task failed")?);
        }
        // Some protocols cannot say that an answer goes on to its limit.
        let expected = if matches!(prompts, Prompts::Form(_)) { 0 } else { tokens };
        Ok(Run::of_closed(&outcomes, expected))
    }

    async fn intruder(self: Arc<Self>, drive: Drive) -> Result<Run> {
        let Drive::Intruder { victims, victim_words, victim_tokens, idle_events, intruder_words, intruder_tokens } =
            drive
        else {
            anyhow::bail!("not this way to load")
        };
        let clock = Instant::now();
        let (stop, stopped) = watch::channel(false);
        let (events, mut seen) = watch::channel(vec![0; victims]);
        let events = Arc::new(events);
        let mut tasks = JoinSet::new();
        for victim in 0..victims {
            let (course, stopped, events) = (Arc::clone(&self), stopped.clone(), Arc::clone(&events));
            tasks.spawn(async move {
                let mut outcomes: Vec<Outcome> = Vec::new();
                while !*stopped.borrow() && outcomes.last().is_none_or(|last| last.error.is_none()) {
                    let number = victim + outcomes.len() * victims;
                    let ask = course.ask(Prompts::Words { shared: 0, own: victim_words }, number, victim_tokens)?;
                    let count = |_| events.send_modify(|events| events[victim] += 1);
                    outcomes.push(client::stream(course.server, &ask, clock, Some(stopped.clone()), &count).await);
                }
                // Whoever has failed is not waited for.
                events.send_modify(|events| events[victim] = usize::MAX);
                anyhow::Ok(outcomes)
            });
        }
        seen.wait_for(|events| events.iter().all(|&count| count >= idle_events)).await?;
        let ask = self.ask(Prompts::Words { shared: 0, own: intruder_words }, usize::MAX, intruder_tokens)?;
        let probes = tokio::spawn(probe(self.server, stopped.clone()));
        let intruder = client::stream(self.server, &ask, clock, None, &|_| {}).await;
        stop.send_replace(true);
        let readyz_max = probes.await.context("the task that probes failed")??;
        let mut outcomes = Vec::new();
        while let Some(victim) = tasks.join_next().await {
            outcomes.extend(victim.context("a victim's task failed")??);
        }
        Ok(Run::of_intruder(outcomes, intruder, victims, intruder_tokens, readyz_max))
    }

    async fn leaving(self: Arc<Self>, drive: Drive) -> Result<Run> {
        let Drive::Leaving { clients, words, max_tokens, leave_after, newcomer_words, newcomer_tokens } = drive else {
            anyhow::bail!("not this way to load")
        };
        let clock = Instant::now();
        let tasks = (0..clients).map(|number| {
            let course = Arc::clone(&self);
            tokio::spawn(async move {
                let ask = course.ask(Prompts::Words { shared: 0, own: words }, number, max_tokens)?;
                if number % 2 == 0 {
                    return anyhow::Ok((client::stream(course.server, &ask, clock, None, &|_| {}).await, None));
                }
                let (leave, left) = watch::channel(false);
                let count = |events| {
                    if events >= leave_after {
                        leave.send_replace(true);
                    }
                };
                let leaver = client::stream(course.server, &ask, clock, Some(left), &count).await;
                let ask =
                    course.ask(Prompts::Words { shared: 0, own: newcomer_words }, clients + number, newcomer_tokens)?;
                Ok((leaver, Some(client::stream(course.server, &ask, clock, None, &|_| {}).await)))
            })
        });
        let (mut stayers, mut leavers, mut newcomers) = (Vec::new(), Vec::new(), Vec::new());
        for task in join_all(tasks).await {
            match task.context("a client's task failed")?? {
                (leaver, Some(newcomer)) => {
                    leavers.push(leaver);
                    newcomers.push(newcomer);
                }
                (stayer, None) => stayers.push(stayer),
            }
        }
        Ok(Run::of_leaving(&stayers, &leavers, &newcomers, max_tokens, newcomer_tokens))
    }
}

/// Asks whether the server is ready again and again, each time on a connection of its own as probes do, until it is told to stop: the
/// longest that an answer took. `None`: the server has no `/readyz`.
///
/// # Errors
/// It cannot be asked, or says that it is not ready.
async fn probe(server: SocketAddr, mut stopped: watch::Receiver<bool>) -> Result<Option<Duration>> {
    let mut longest = Duration::ZERO;
    loop {
        let began = Instant::now();
        let (response, _connection) = client::send(server, client::bare("/readyz")?).await?;
        match response.status() {
            StatusCode::OK => longest = longest.max(began.elapsed()),
            StatusCode::NOT_FOUND => return Ok(None),
            status => anyhow::bail!("/readyz: {status} while a prompt was read"),
        }
        // The sender has gone where the load has ended early.
        if timeout(PROBE_PERIOD, stopped.wait_for(|&stop| stop)).await.is_ok() {
            return Ok(Some(longest));
        }
    }
}
