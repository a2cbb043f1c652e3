//! Logs: one JSON object a line on standard error, filtered by `RUST_LOG` (default `info`). No prompt and no answer
//! is ever logged.

use tracing_subscriber::EnvFilter;

/// Starts logging; the first thing a process does.
///
/// # Errors
/// `RUST_LOG` is not a valid filter, or logging was started before.
pub fn init() -> anyhow::Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) => EnvFilter::try_new(&directives)
            .map_err(|error| anyhow::anyhow!("RUST_LOG={directives:?} is not a valid filter: {error}"))?,
        Err(_) => EnvFilter::new("info"),
    };
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .try_init()
        .map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
}
