//! The `gantry-e2e` program: a model store, a load generator, and a client that asks one question.

use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use gantry_e2e::{
    load::{self, Length, Load, LoadConfig, MAX_REQUESTS, Report, Target},
    models::{self, Question, Since},
    store,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// How often the progress of a load is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Largest file of questions or answers.
const MAX_INPUT_BYTES: u64 = 16 << 20;

#[derive(Parser)]
#[command(version, about = "Model store, load generator and client for Gantry's demo and tests")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve model files over HTTP, with faults under /fault (see the documentation of the module `store`)
    ServeFiles {
        /// Folder with the files
        #[arg(long, default_value = "/models")]
        dir: PathBuf,
        /// Port to listen on
        #[arg(long, default_value_t = 8080)]
        port: u16,
    },
    /// Ask many questions at once and check every answer; exits with 1 when a request failed
    Load {
        #[command(flatten)]
        target: TargetArgs,
        /// Concurrent streams
        #[arg(long, default_value_t = 32)]
        concurrency: usize,
        /// Requests in all [default: 1000, or no limit with --duration]
        #[arg(long)]
        requests: Option<u64>,
        /// Time, e.g. 30s or 5m
        #[arg(long)]
        duration: Option<jiff::SignedDuration>,
        /// File with a question a line, as in e2e/models/eval.jsonl [default: that file]
        #[arg(long)]
        questions: Option<PathBuf>,
        /// File with what each version must answer to each question: {"VERSION": {"QUESTION ID": "TEXT"}}
        #[arg(long)]
        answers: Option<PathBuf>,
        /// Most tokens of an answer
        #[arg(long, default_value_t = 64)]
        max_tokens: u32,
        /// Print the figures as JSON on standard output
        #[arg(long)]
        json: bool,
    },
    /// Ask one question and print the answer as it streams
    Ask {
        #[command(flatten)]
        target: TargetArgs,
        /// Most tokens of the answer
        #[arg(long, default_value_t = 256)]
        max_tokens: u32,
        /// The question
        question: String,
    },
}

#[derive(clap::Args)]
struct TargetArgs {
    /// Base address of the API, e.g. http://chat.demo.svc/v1
    #[arg(long)]
    url: String,
    /// Name of the model
    #[arg(long, default_value = "chat")]
    model: String,
}

impl From<TargetArgs> for Target {
    fn from(TargetArgs { url, model }: TargetArgs) -> Self {
        Self { base_url: url, model }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal()).init();
    match run(Cli::parse().command).await {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::ServeFiles { dir, port } => {
            store::serve(dir, SocketAddr::from(([0, 0, 0, 0], port)), stop_on_signal()?).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Load { target, concurrency, requests, duration, questions, answers, max_tokens, json } => {
            let requests = requests.unwrap_or(if duration.is_some() { MAX_REQUESTS } else { 1000 });
            let questions = read_questions(questions)?;
            let expected = answers.map(|path| anyhow::Ok(serde_json::from_str(&read_bounded(&path)?)?)).transpose()?;
            let config = LoadConfig { target: target.into(), concurrency, requests, questions, max_tokens, expected };
            let duration = duration.map(Duration::try_from).transpose().context("--duration must be positive")?;
            show_report(&run_load(config, duration).await?, json)
        }
        Command::Ask { target, max_tokens, question } => ask(&target.into(), &question, max_tokens).await,
    }
}

/// Cancelled by SIGTERM and SIGINT: the first process of a container gets no default action for them.
fn stop_on_signal() -> Result<CancellationToken> {
    let stop = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let token = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
        token.cancel();
    });
    Ok(stop)
}

fn read_bounded(path: &Path) -> Result<String> {
    let bytes = std::fs::metadata(path).with_context(|| path.display().to_string())?.len();
    anyhow::ensure!(bytes <= MAX_INPUT_BYTES, "{} has {bytes} bytes, more than {MAX_INPUT_BYTES}", path.display());
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn read_questions(path: Option<PathBuf>) -> Result<Vec<Question>> {
    let Some(path) = path else { return models::questions() };
    read_bounded(&path)?
        .lines()
        .enumerate()
        .map(|(number, line)| {
            serde_json::from_str(line).with_context(|| format!("{}, line {}", path.display(), number + 1))
        })
        .collect()
}

async fn run_load(config: LoadConfig, duration: Option<Duration>) -> Result<Report> {
    let load = Load::start(config)?;
    let (mut progress, stop) = (load.watch(), stop_on_signal()?);
    let mut tick = tokio::time::interval(PROGRESS_INTERVAL);
    let end = async {
        match duration {
            Some(duration) => tokio::time::sleep(duration).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(end);
    loop {
        tokio::select! {
            _ = tick.tick() => {
                let now = load.progress();
                tracing::info!(seconds = load.elapsed().as_secs(), completed = now.completed, failed = now.failed, "progress");
            }
            // The streams hold the sender: it is gone when all of them have ended.
            () = async { while progress.changed().await.is_ok() {} } => return load.join().await,
            () = &mut end => return load.finish().await,
            () = stop.cancelled() => return load.finish().await,
        }
    }
}

fn show_report(report: &Report, json: bool) -> Result<ExitCode> {
    let summary = report.summary();
    let mut out = std::io::stdout();
    match json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&summary)?)?,
        false => write!(out, "{summary}")?,
    }
    Ok(if summary.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn ask(target: &Target, question: &str, max_tokens: u32) -> Result<ExitCode> {
    let question = Question::plain("ask", question, Since::V1, "");
    let mut out = std::io::stdout();
    let record = load::ask(&load::http_client()?, target, &question, Length::up_to(max_tokens), |text| {
        // Whoever closed the pipe has read enough.
        drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    })
    .await;
    let answer = record.outcome.with_context(|| format!("{} did not answer", target.base_url))?;
    let first_ms = record.first_text.unwrap_or_default().as_millis();
    let all_ms = record.ended_at.as_millis();
    writeln!(
        out,
        "\n  [answered by version {}, first text after {first_ms} ms, all after {all_ms} ms]",
        answer.version
    )?;
    Ok(ExitCode::SUCCESS)
}
