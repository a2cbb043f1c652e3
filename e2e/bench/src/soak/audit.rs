//! Afterwards: whether everything is given back, whether all cells can still be had, whether the caches of prompts are
//! within their limits, and whether the counts agree.

use std::{net::SocketAddr, ops::RangeInclusive, time::Duration};

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, sleep};

use super::{
    CACHE_DISK_MIB, CACHE_RAM_MIB, SEQUENCE_TOKENS, SEQUENCES, WORKERS,
    asks::Asks,
    check::{Explanation, Tally},
    exchange::{Reply, exchange},
    faults::Faults,
    report::Check,
    watch::{Figures, figures, mib},
};
use crate::{processes, server::Server};

/// Longest time until all is given back: a client that left is noticed with the next token.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// How often it is looked at.
const POLL: Duration = Duration::from_millis(50);
/// Longest time for an answer of a whole sequence.
const WHOLE_LIMIT: Duration = Duration::from_secs(300);
/// Longest time for the server to end.
const END_LIMIT: Duration = Duration::from_secs(60);
/// By how much each worker may overshoot the limit on disk: it writes a sixteenth of it before it looks at what the others
/// wrote, and one that was killed leaves the file that it was writing.
const DISK_OVERSHOOT_MIB: u32 = CACHE_DISK_MIB / 8;
/// Processes of one worker that render chat templates: one for each of its threads that prepare prompts, as they are needed.
const MAX_TEMPLATE_PROCESSES: usize = 2;
/// The only connection that is left is the one that asks.
const OWN_CONNECTIONS: u64 = 1;

/// A server that has nothing to do.
#[derive(Debug)]
pub struct Settled {
    figures: Figures,
    open_files: usize,
}

/// Waits until a server has nothing to do.
pub(super) async fn settled(address: SocketAddr, front: u32, workers: u32) -> Result<Settled> {
    let begun = Instant::now();
    loop {
        let figures = figures(address).await?;
        let busy = figures.running + figures.queued + figures.workers_have;
        if busy == 0 && figures.connections == OWN_CONNECTIONS && figures.dispatchable == u64::from(workers) {
            let open_files = processes::open_files(front).context("the server has ended")?;
            return Ok(Settled { figures, open_files });
        }
        ensure!(begun.elapsed() < SETTLE_LIMIT, "{figures:?} after {SETTLE_LIMIT:?}");
        sleep(POLL).await;
    }
}

/// What must hold once all requests have ended.
pub(super) async fn after(
    asks: &Asks,
    server: &Server,
    before: &Settled,
    tally: &Tally,
    faults: &Faults,
) -> Vec<Check> {
    let name = "sequences, places and connections are given back";
    let after = match settled(server.address, server.pid(), WORKERS).await {
        Ok(after) => after,
        Err(error) => return vec![Check::new(name, false, format!("{error:#}"))],
    };
    let mut checks = vec![Check::new(name, true, format!("{:?}", after.figures))];
    checks.push(open_files(server, before).await);
    checks.push(left_over(server).await);
    checks.extend(deaths(&after.figures, tally, faults));
    checks.push(counts(&before.figures, &after.figures, tally));
    checks.push(cells(asks, server).await);
    checks.extend(caches(server, faults).await);
    checks
}

/// The front has as many files and sockets open as before.
async fn open_files(server: &Server, before: &Settled) -> Check {
    let now = async || processes::open_files(server.pid()).unwrap_or(usize::MAX);
    let begun = Instant::now();
    let mut open = now().await;
    while open > before.open_files && begun.elapsed() < SETTLE_LIMIT {
        sleep(POLL).await;
        open = now().await;
    }
    let detail = format!("{open} open files of the front, {} before", before.open_files);
    Check::new("open files are as many as before", open <= before.open_files, detail)
}

/// There are the front, its workers and what renders chat templates for these, and nobody else, ended or not.
async fn left_over(server: &Server) -> Check {
    let look = || {
        let (tree, workers) = (processes::tree(server.pid()), processes::children(server.pid()).len());
        let ended: Vec<u32> = tree.iter().copied().filter(|pid| !processes::is_alive(*pid)).collect();
        let most = 1 + WORKERS as usize * (1 + MAX_TEMPLATE_PROCESSES);
        (workers == WORKERS as usize && tree.len() <= most && ended.is_empty(), tree.len(), ended)
    };
    let begun = Instant::now();
    let mut now = look();
    while !now.0 && begun.elapsed() < SETTLE_LIMIT {
        sleep(POLL).await;
        now = look();
    }
    let (right, count, ended) = now;
    Check::new("no process is left over", right, format!("{count} processes, ended: {ended:?}"))
}

/// Nobody died who was not killed. A death takes what it had answered some of; of what had begun and of which nothing was
/// answered yet, no more than its sequences, which are run again by themselves.
fn deaths(after: &Figures, tally: &Tally, faults: &Faults) -> [Check; 2] {
    let lost = |why| tally.explained.get(&why).copied().unwrap_or_default();
    let (wanted, lost, untold) =
        (faults.deaths(), lost(Explanation::WorkerDied), lost(Explanation::WorkerDiedBeforeText));
    let most = wanted * u64::from(SEQUENCES / WORKERS);
    [
        Check::new(
            "no worker died by itself",
            after.restarts == wanted,
            format!("{} deaths, {wanted} on purpose", after.restarts),
        ),
        Check::new(
            "a death takes what had begun",
            untold <= most,
            format!("{wanted} deaths took {lost} answers of which some had come, and {untold} (at most {most}) others"),
        ),
    ]
}

/// The server counted what its clients were told; of those who left or did not ask it counted as much as their requests
/// allow, at most.
fn counts(before: &Figures, after: &Figures, tally: &Tally) -> Check {
    let Tally { answered, least, most, .. } = tally;
    let rows = [
        ("answers", after.answered - before.answered, *answered..=answered + tally.sum(|counts| counts.left)),
        ("prompt tokens", after.prompt_tokens - before.prompt_tokens, least.prompt..=most.prompt),
        ("cached tokens", after.cached_tokens - before.cached_tokens, least.cached..=most.cached),
        ("generated tokens", after.completion_tokens - before.completion_tokens, least.completion..=most.completion),
    ];
    let agree = rows.iter().all(|(_, server, clients)| clients.contains(server));
    let told = |(what, server, clients): &(&str, u64, RangeInclusive<u64>)| {
        format!("{what} {server} ({} to {})", clients.start(), clients.end())
    };
    let detail: Vec<String> = rows.iter().map(told).collect();
    let detail = format!("the server's and what its clients' may be: {}", detail.join(", "));
    Check::new("the server's counts are its clients'", agree, detail)
}

/// The prompts that are kept take no more memory and disk than they may. Asked when requests for all cells have just put
/// what lay in them into memory: where nothing is there, the figure is not what it is taken for.
async fn caches(server: &Server, faults: &Faults) -> [Check; 2] {
    let names = ["prompts in memory are within their limit", "prompts on disk are within their limit"];
    let now = match figures(server.address).await {
        Ok(now) => now,
        Err(error) => return names.map(|name| Check::new(name, false, format!("{error:#}"))),
    };
    let bytes = |mib: u32| u64::from(mib) << 20;
    let (ram, files, counted) = (now.cache_ram_bytes, faults.disk_bytes(), now.cache_disk_bytes);
    let most_ram = bytes(CACHE_RAM_MIB);
    let most_disk = bytes(CACHE_DISK_MIB + WORKERS * DISK_OVERSHOOT_MIB);
    let [in_memory, on_disk] = names;
    [
        Check::new(in_memory, (1..=most_ram).contains(&ram), format!("{} MiB of {} at most", mib(ram), mib(most_ram))),
        Check::new(
            on_disk,
            files <= most_disk && counted <= most_disk * u64::from(WORKERS),
            format!(
                "{} MiB of {} at most; the {WORKERS} workers together count {}",
                mib(files),
                mib(most_disk),
                mib(counted)
            ),
        ),
    ]
}

/// Each worker gives one request all of its cells.
async fn cells(asks: &Asks, server: &Server) -> Check {
    let requests: Vec<_> = (0..WORKERS).map(|number| asks.whole_sequence(number)).collect();
    let all = requests.iter().map(|request| exchange(server.address, request, WHOLE_LIMIT));
    let got = futures::future::join_all(all).await;
    let tokens = |reply: &Reply| match reply {
        Reply::Answer(answer) => answer.usage.map(|usage| usage.total),
        _ => None,
    };
    let right = got.iter().all(|got| tokens(&got.reply).is_some_and(|total| total >= u64::from(SEQUENCE_TOKENS)));
    let detail: Vec<String> = got
        .iter()
        .map(|got| match tokens(&got.reply) {
            Some(total) => format!("{total} tokens"),
            None => format!("{:?}", got.reply),
        })
        .collect();
    Check::new("all KV cells can be had", right, format!("{} of {SEQUENCE_TOKENS} each", detail.join(", ")))
}

/// It ends when it is told to, and so does all that it started.
pub(super) async fn end(server: Server) -> Check {
    let name = "it ends when it is told to";
    let tree = processes::tree(server.pid());
    let status = match server.end(END_LIMIT).await {
        Ok(status) => status,
        Err(error) => return Check::new(name, false, format!("{error:#}")),
    };
    let left: Vec<_> = tree.into_iter().filter(|pid| processes::is_alive(*pid)).collect();
    Check::new(name, status.success() && left.is_empty(), format!("{status}, left over: {left:?}"))
}
