//! `kubectl gantry`. Ends with 0, with 1 and an error, and `rollout wait` with 2 when the time is up.

// A program for a terminal.
#![allow(clippy::print_stderr)]

use std::{io::Write as _, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use console::style;
use jiff::Timestamp;
use kubectl_gantry::{
    args::{Cli, Command, Rollout},
    change,
    chat::chat,
    cluster::Cluster,
    live, panel,
    top::top,
};

#[tokio::main]
async fn main() -> ExitCode {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let arguments = Cli::parse();
    match run(arguments).await {
        Ok(code) => code,
        Err(error) => {
            // Standard error is the only place left, and it may be closed.
            let _ = writeln!(std::io::stderr(), "{} {error:#}", style("error:").red().for_stderr());
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Cli) -> Result<ExitCode> {
    let cluster = Cluster::connect(&arguments.target).await?;
    let cluster = &cluster;
    let text = match &arguments.command {
        Command::Status(status) => match &status.name {
            Some(name) if status.watch => {
                live::show(cluster, name).await?;
                String::new()
            }
            Some(name) => cluster.view(name).await?.panel(Timestamp::now()),
            None => panel::list(&cluster.list(status.all_namespaces).await?),
        },
        Command::Rollout(rollout) => match rollout {
            Rollout::Explain(named) => cluster.view(&named.name).await?.explanation(Timestamp::now()),
            Rollout::History(named) => cluster.view(&named.name).await?.history(Timestamp::now()),
            Rollout::Wait(wait) => return live::wait(cluster, wait).await,
            Rollout::Pause(named) => change::pause(cluster, &named.name, true).await? + "\n",
            Rollout::Resume(named) => change::pause(cluster, &named.name, false).await? + "\n",
            Rollout::Promote(named) => change::promote(cluster, &named.name).await? + "\n",
            Rollout::Abort(named) => change::abort(cluster, &named.name).await? + "\n",
            Rollout::Retry(named) => change::retry(cluster, &named.name).await? + "\n",
            Rollout::Rollback(rollback) => {
                change::rollback(cluster, &rollback.name, rollback.to_revision).await? + "\n"
            }
        },
        Command::Restart(named) => change::restart(cluster, &named.name).await? + "\n",
        Command::Chat(arguments) => {
            chat(cluster, arguments, &mut std::io::stdout()).await?;
            String::new()
        }
        Command::Top(arguments) => top(cluster, arguments).await?,
    };
    // Whoever reads it may have had enough: `| head` is no error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}
