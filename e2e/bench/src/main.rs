//! The `gantry-bench` program: runs loads, and writes the table and the plots; runs the soak.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use gantry_bench::{
    bench::Bench,
    loads, machine, peer, report,
    results::{Conditions, Results},
    soak::Soak,
    table,
};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    time::Instant,
};

#[derive(Parser)]
#[command(version, about = "Measures gantry-server against llama.cpp's own server under the same loads")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run loads and write what came of them
    Run(Box<RunArgs>),
    /// Write the table and the plots anew from a folder's results.json
    Report {
        /// The folder
        folder: PathBuf,
    },
    /// Show the loads
    List,
    /// Ask one server for everything while it is disturbed, and check every answer; exits with 1 when a check fails
    Soak(SoakArgs),
}

#[derive(clap::Args)]
struct SoakArgs {
    /// Requests to send
    #[arg(long, default_value_t = 20_000)]
    requests: u64,
    /// What all that is random follows from [default: another one each time, which is told]
    #[arg(long)]
    seed: Option<u64>,
    /// Our server
    #[arg(long, default_value = "target/release/gantry-server")]
    server: PathBuf,
    /// Folder of the demo models
    #[arg(long, default_value = "e2e/models")]
    demo: PathBuf,
    /// Another model than the demo one, which then drafts nothing
    #[arg(long)]
    model: Option<PathBuf>,
    /// Where logs and the report go
    #[arg(long, default_value = ".cache/soak")]
    folder: PathBuf,
}

#[derive(clap::Args)]
struct RunArgs {
    /// Load to run; may be given several times [default: all]
    #[arg(long = "load", value_name = "NAME")]
    loads: Vec<String>,
    /// Small sizes and the demo model, to try the harness
    #[arg(long)]
    quick: bool,
    /// Our server alone, without the peer; nothing is written
    #[arg(long)]
    only_ours: bool,
    /// Try the peer's configurations even where the best one is known
    #[arg(long)]
    try_again: bool,
    /// Do not try the peer's configurations whose names have this in them (say, passive), but for its default; may be
    /// given several times
    #[arg(long = "skip-peer", value_name = "WORD")]
    skip_peer: Vec<String>,
    /// Runs of each configuration [default: the load's own]
    #[arg(long)]
    repeats: Option<usize>,
    /// Threads of each server [default: all processors]
    #[arg(long)]
    threads: Option<usize>,
    /// Our server
    #[arg(long, default_value = "target/release/gantry-server")]
    server: PathBuf,
    /// Folder of ggml's backends for our server, of which it takes the best for this processor
    #[arg(long)]
    backend_dir: Option<PathBuf>,
    /// Folder of the peer's programs
    #[arg(long, default_value = ".cache/bench/peer/build/bin")]
    peer: PathBuf,
    /// How the peer was built, for the results
    #[arg(long, default_value = "")]
    peer_build: String,
    /// Folder of the models made for this
    #[arg(long, default_value = ".cache/bench/models")]
    models: PathBuf,
    /// Folder of the demo models
    #[arg(long, default_value = "e2e/models")]
    demo: PathBuf,
    /// Where logs go
    #[arg(long, default_value = ".cache/bench")]
    cache: PathBuf,
    /// Where results go [default: docs/benchmarks/DATE-MACHINE, or for a quick run the cache]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Most runs of a configuration.
const MAX_REPEATS: usize = 100;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let done = match Cli::parse().command {
        // Dropped, it takes the server that runs with it.
        Task::Run(args) => tokio::select! { done = run(*args) => done, stopped = stop_signal() => stopped },
        Task::Report { folder } => rewrite(&folder),
        Task::List => list(),
        Task::Soak(args) => tokio::select! { done = soak(args) => done, stopped = stop_signal() => stopped },
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error is the only place left, and it may be closed.
            drop(writeln!(std::io::stderr(), "gantry-bench: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Ends with an error when SIGINT or SIGTERM comes.
async fn stop_signal() -> Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    bail!("stopped by a signal; of a benchmark, loads that had ended are kept")
}

async fn run(args: RunArgs) -> Result<()> {
    let begun = Instant::now();
    let all = loads::all(args.quick);
    let names: Vec<&str> = all.iter().map(|load| load.name).collect();
    if let Some(unknown) = args.loads.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("there is no load {unknown}; there are {}", names.join(", "));
    }
    for word in &args.skip_peer {
        let known =
            all.iter().flat_map(peer::candidates).any(|candidate| candidate.is_skipped(std::slice::from_ref(word)));
        ensure!(known, "no configuration of the peer but its default has {word} in its name");
    }
    ensure!(args.repeats.is_none_or(|repeats| (1..=MAX_REPEATS).contains(&repeats)), "use 1 to {MAX_REPEATS} repeats");
    let own_version = own_version(&args.server).await?;
    let cpu_backend = cpu_backend(&args.server, args.backend_dir.as_deref()).await?;
    let peer_version = if args.only_ours { String::new() } else { peer::version(&args.peer).await? };
    let bench = Bench {
        server: args.server,
        backend_dir: args.backend_dir,
        peer: (!args.only_ours).then_some(args.peer),
        models: args.models,
        demo: args.demo,
        cache: args.cache.clone(),
        threads: args.threads.unwrap_or_else(machine::cores),
        quick: args.quick,
        repeats: args.repeats,
        try_again: args.try_again,
        skip_peer: args.skip_peer,
        peer_version: peer_version.clone(),
        own_version,
    };
    let conditions = Conditions {
        cpu: machine::cpu(),
        cores: machine::cores(),
        memory_gib: machine::memory_gib(),
        kernel: machine::kernel(),
        threads: bench.threads,
        quick: args.quick,
        peer: [peer_version, args.peer_build].join(", ").trim_matches([',', ' ']).to_owned(),
        cpu_backend,
    };
    let folder = args.out.unwrap_or_else(|| match args.quick {
        true => args.cache.join("quick"),
        false => Path::new("docs/benchmarks").join(format!("{}-{}", jiff::Zoned::now().date(), machine::class())),
    });
    let earlier = if args.only_ours { None } else { Results::beside(&folder, &conditions)? };
    let mut results = earlier.unwrap_or_else(|| Results::new(conditions));
    for load in all.iter().filter(|load| args.loads.is_empty() || args.loads.iter().any(|name| name == load.name)) {
        let result = bench.run(load).await.with_context(|| format!("the load {} could not be run", load.name))?;
        if !args.only_ours {
            results.add(result, &names);
            // After each load: what has been measured is kept even if a later one cannot be run.
            report::write(&results, &folder)?;
        }
    }
    let mut out = std::io::stdout();
    if !args.only_ours {
        writeln!(
            out,
            "\n{}",
            table::render(&results).lines().take_while(|line| !line.starts_with("##")).collect::<Vec<_>>().join("\n")
        )?;
        writeln!(out, "{}", folder.join(table::FILE).display())?;
    }
    writeln!(out, "all took {:.0} s", begun.elapsed().as_secs_f64())?;
    Ok(())
}

/// Our version, and the commit that is checked out with a mark when something is changed.
async fn own_version(server: &Path) -> Result<String> {
    let output = Command::new(server).arg("--version").output().await;
    let output =
        output.with_context(|| format!("cannot run {}: cargo build --release -p gantry-server", server.display()))?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let git = async |args: &[&str]| {
        let output = Command::new("git").args(args).output().await;
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    };
    let mut commit = git(&["rev-parse", "--short=10", "HEAD"]).await;
    // The results of the loads before are written here.
    if !git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)docs/benchmarks"]).await.is_empty()
    {
        commit += "-dirty";
    }
    Ok(format!("{version} {commit}").trim().to_owned())
}

/// What our server computes with: the first line of what it says of its devices.
async fn cpu_backend(server: &Path, backend_dir: Option<&Path>) -> Result<String> {
    let mut command = Command::new(server);
    command.arg("devices").args(backend_dir.iter().flat_map(|dir| [Path::new("--backend-dir"), dir]));
    let output = command.output().await.with_context(|| format!("cannot run {}", server.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().trim_start_matches("CPU backend ").to_owned())
}

fn rewrite(folder: &Path) -> Result<()> {
    let results = Results::read(folder)?.with_context(|| format!("there are no results in {}", folder.display()))?;
    report::write(&results, folder)
}

async fn soak(args: SoakArgs) -> Result<()> {
    let SoakArgs { requests, seed, server, demo, model, folder } = args;
    let seed = seed.unwrap_or_else(rand::random);
    let report = Soak { server, demo, model, folder: folder.clone(), requests, seed }.run().await?;
    let file = folder.join("soak.json");
    report.write(&file)?;
    let mut out = std::io::stdout();
    writeln!(out, "{report}\n{}", file.display())?;
    let failed: Vec<&str> = report.failed().iter().map(|check| check.name.as_str()).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    Ok(())
}

fn list() -> Result<()> {
    let mut out = std::io::stdout();
    for load in loads::all(false) {
        writeln!(out, "{:<14} {}", load.name, load.title)?;
    }
    Ok(())
}
