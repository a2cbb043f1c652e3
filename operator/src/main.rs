//! `gantry-operator run`: one process per replica; the one that holds the Lease acts.
//!
//! Ends with 0 after SIGTERM, once running reconciles have ended and the lease is released; with 1 at once when the lease
//! is lost. What it may do in the cluster, and why, is listed at the head of the library.

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use gantry_operator::{
    build::NewPods,
    controller::{self, Settings},
    http::{self, Role},
    lease::Elector,
    limits::{API_TIMEOUT, SHUTDOWN_TIMEOUT, WATCH_READ_TIMEOUT},
    metrics::Metrics,
};
use kube::{Client, Config};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Reconcile InferenceServices until SIGTERM
    Run(Run),
}

#[derive(clap::Args)]
struct Run {
    /// Image of new serving pods
    #[arg(long, env = "SERVER_IMAGE")]
    server_image: String,
    /// Whether new serving pods may fetch models from private addresses, as those of the cluster are
    #[arg(long, env = "PRIVATE_SOURCES", default_value_t = true, action = clap::ArgAction::Set)]
    private_sources: bool,
    /// Namespace of the operator, which holds its Lease
    #[arg(long, env = "POD_NAMESPACE")]
    pod_namespace: String,
    /// Name of the operator's pod, which identifies it as the Lease's holder
    #[arg(long, env = "POD_NAME")]
    pod_name: String,
    /// Name of the Lease
    #[arg(long, env = "LEASE_NAME", default_value = "gantry-operator")]
    lease_name: String,
    /// Address of /healthz, /readyz and /metrics
    #[arg(long, env = "METRICS_ADDR", default_value = "0.0.0.0:8080")]
    metrics_addr: SocketAddr,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Cli { command: Command::Run(arguments) } = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // The client logs each failed request, which is logged again, with what it was for, by who made it.
    let filter = match "kube_client::client::builder=off".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let log = tracing_subscriber::fmt().json().with_current_span(false).with_span_list(false);
    log.with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Run) -> anyhow::Result<()> {
    rustls::crypto::ring::default_provider().install_default().ok();
    let stop = stop_on_signal()?;
    let (watch_client, client) = clients().await?;
    let metrics = Arc::new(Metrics::default());
    let (role, role_seen) = watch::channel(Role::Starting);
    let listener = TcpListener::bind(arguments.metrics_addr)
        .await
        .with_context(|| format!("listening on {} (METRICS_ADDR)", arguments.metrics_addr))?;
    let server = axum::serve(listener, http::router(role_seen, Arc::clone(&metrics)))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    tokio::spawn(async move {
        if let Err(error) = server.await {
            error!(%error, "the port for health and metrics failed");
        }
    });

    let namespace = &arguments.pod_namespace;
    let mut elector = Elector::new(client.clone(), namespace, arguments.lease_name, arguments.pod_name.clone());
    let stand_by = || {
        role.send_replace(Role::Standby);
    };
    let mut held = tokio::select! {
        held = elector.acquire(stand_by) => held,
        () = stop.cancelled() => return Ok(()),
    };
    role.send_replace(Role::Filling);
    metrics.leading(true);
    let settings = Settings {
        watch_client,
        client,
        new_pods: NewPods { image: arguments.server_image, private_sources: arguments.private_sources },
        instance: arguments.pod_name,
        metrics: Arc::clone(&metrics),
    };
    let work = async {
        let mut work = std::pin::pin!(controller::run(settings, &role, stop.clone()));
        tokio::select! {
            () = &mut work => {}
            () = stop.cancelled() => {
                if timeout(SHUTDOWN_TIMEOUT, work).await.is_err() {
                    info!("reconciles were still running after {}s", SHUTDOWN_TIMEOUT.as_secs());
                }
            }
        }
    };
    tokio::select! {
        () = work => {}
        lost = elector.hold(&mut held) => {
            // Not one more write: another operator may act from now on.
            error!(error = %lost, "ends at once");
            std::process::exit(1);
        }
    }
    metrics.leading(false);
    elector.release(held).await;
    anyhow::ensure!(stop.is_cancelled(), "the watches ended by themselves");
    info!("stopped");
    Ok(())
}

/// A token that is cancelled by SIGTERM or SIGINT.
fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        info!("stopping");
        stopped.cancel();
    });
    Ok(stop)
}

/// A client for watches, whose answers come as things happen, and one for requests that must be answered soon.
async fn clients() -> anyhow::Result<(Client, Client)> {
    let mut watching = Config::infer().await.context("finding the API server: run in a cluster, or set KUBECONFIG")?;
    let mut asking = watching.clone();
    asking.read_timeout = Some(API_TIMEOUT);
    asking.connect_timeout = Some(API_TIMEOUT);
    // The watcher gives up a silent watch by itself, but not the list before it.
    watching.read_timeout = Some(WATCH_READ_TIMEOUT);
    watching.connect_timeout = Some(API_TIMEOUT);
    Ok((
        Client::try_from(watching).context("building the client")?,
        Client::try_from(asking).context("building the client")?,
    ))
}
