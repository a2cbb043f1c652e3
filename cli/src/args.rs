//! What `kubectl gantry` understands.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};
use gantry_crds::scalars::DurationString;

/// `kubectl gantry`.
#[derive(Parser, Debug)]
#[command(name = "kubectl-gantry", bin_name = "kubectl gantry", version, about)]
pub struct Cli {
    /// Where.
    #[command(flatten)]
    pub target: Target,
    /// What.
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster, and what of it: named as kubectl names them.
#[derive(Args, Debug)]
pub struct Target {
    /// Namespace of the service [default: the context's]
    #[arg(long, short, global = true)]
    pub namespace: Option<String>,
    /// Context of the kubeconfig [default: the current one]
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// The kubeconfig [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
}

/// What is to be done.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Show services, or one with its rollout and its pods
    Status(Status),
    /// Explain, await or steer the rollout of a service
    #[command(subcommand)]
    Rollout(Rollout),
    /// Replace the pods of a service one after the other, with the image that the operator has now
    Restart(Named),
    /// Talk to the model of a service, through a connection to one of its pods
    Chat(Chat),
    /// Show what the pods of services do now: requests, tokens a second, memory
    Top(Top),
}

/// A service.
#[derive(Args, Debug)]
pub struct Named {
    /// The InferenceService
    pub name: String,
}

/// Options of `status`.
#[derive(Args, Debug)]
pub struct Status {
    /// The InferenceService [default: a line for each]
    pub name: Option<String>,
    /// Go on showing it as it changes
    #[arg(long, short, requires = "name")]
    pub watch: bool,
    /// Services of all namespaces
    #[arg(long, short = 'A', conflicts_with_all = ["name", "namespace"])]
    pub all_namespaces: bool,
}

/// What can be done with a rollout.
#[derive(Subcommand, Debug)]
pub enum Rollout {
    /// Say where a rollout is, why, what it waits for and until when, and what comes next
    Explain(Named),
    /// List the versions of a service
    History(Named),
    /// Wait until the service answers with what its spec asks for: ends with 1 where that was refused or taken back, with 2
    /// when the time is up
    Wait(Wait),
    /// Have pods prepare new versions and not switch to them
    Pause(Named),
    /// Have pods switch to what they have prepared, and to new versions, again
    Resume(Named),
    /// Go on with the version that waits or bakes: pods switch to it although rollouts are paused, and its bake is over
    Promote(Named),
    /// Give the version up that is rolled out: what answered before answers again, and it is not begun with until the spec
    /// asks for another one
    Abort(Named),
    /// Try the version that was refused or taken back once more
    Retry(Named),
    /// Ask for the model and the settings of an earlier version, as an edit of the spec would
    Rollback(Rollback),
}

/// Options of `rollout wait`.
#[derive(Args, Debug)]
pub struct Wait {
    /// The InferenceService
    pub name: String,
    /// How long at most, e.g. 90s, 20m or 1h30m
    #[arg(long, default_value = "30m", value_parser = duration)]
    pub timeout: Duration,
}

/// Options of `rollout rollback`.
#[derive(Args, Debug)]
pub struct Rollback {
    /// The InferenceService
    pub name: String,
    /// Revision to go back to [default: the newest before the active one that was not refused or taken back]
    #[arg(long)]
    pub to_revision: Option<i64>,
}

/// Options of `chat`.
#[derive(Args, Debug)]
pub struct Chat {
    /// The InferenceService
    pub name: String,
    /// One message: its answer is printed, and nothing more is asked [default: read from the terminal]
    pub message: Option<String>,
    /// What the model is told before
    #[arg(long)]
    pub system: Option<String>,
    /// The key, where the service asks for one
    #[arg(long, env = "GANTRY_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

/// Options of `top`.
#[derive(Args, Debug)]
pub struct Top {
    /// The InferenceService [default: all of the namespace]
    pub name: Option<String>,
    /// Pods of all namespaces
    #[arg(long, short = 'A', conflicts_with_all = ["name", "namespace"])]
    pub all_namespaces: bool,
}

/// As durations are written in a spec.
fn duration(text: &str) -> Result<Duration, String> {
    DurationString(text.to_owned()).to_std().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn flags_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_duration_is_written_as_in_a_spec() {
        assert_eq!(duration("1h30m").unwrap(), Duration::from_secs(5400));
        assert!(duration("soon").is_err());
    }
}
