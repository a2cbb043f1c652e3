//! File descriptors: as many as may be had, and some of them kept for what is no connection.

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::limits::{DESCRIPTOR_RESERVE, MAX_CONNECTIONS, MAX_PROBE_CONNECTIONS};

/// Raises the limit of this process, and of the workers that it starts, to the highest that it may have, and says so when
/// that is too low for [`MAX_CONNECTIONS`].
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        let most = limit.maximum.map_or_else(|| "any number".to_owned(), |most| most.to_string());
        tracing::warn!(%error, "cannot raise the limit of open files to {most}");
    }
    let (have, connections) = (limit_now(), connections());
    if connections < MAX_CONNECTIONS {
        let need = MAX_CONNECTIONS + MAX_PROBE_CONNECTIONS + DESCRIPTOR_RESERVE;
        tracing::warn!(
            "the hard limit of open files is {have}, so that {connections} connections are the most; raise it to {need} \
             (ulimit -Hn, LimitNOFILE=, or the container runtime's default) for {MAX_CONNECTIONS}"
        );
    }
}

/// Has a write past the limit of a file's length (`ulimit -f`) fail, as one to a full disk does: by itself it ends the process. In a
/// runtime, whose handler stays for as long as the process does.
///
/// # Errors
/// The system takes no handler.
pub fn survive_file_limits() -> std::io::Result<()> {
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop)
}

/// How many connections there may be at once beside what else is open.
#[must_use]
pub fn connections() -> usize {
    connections_within(limit_now())
}

fn limit_now() -> u64 {
    // None is infinity.
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The reserve is for workers that must be started anew, files and probes; of very few descriptors it is three quarters.
fn connections_within(descriptors: u64) -> usize {
    let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
    let beside = MAX_PROBE_CONNECTIONS + DESCRIPTOR_RESERVE;
    descriptors.saturating_sub(beside).max(descriptors / 4).clamp(1, MAX_CONNECTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_for_what_else_is_open() {
        assert_eq!(connections_within(u64::MAX), MAX_CONNECTIONS);
        assert_eq!(connections_within(1 << 20), MAX_CONNECTIONS);
        let beside = (DESCRIPTOR_RESERVE + MAX_PROBE_CONNECTIONS) as u64;
        assert_eq!(connections_within(MAX_CONNECTIONS as u64 + beside - 1), MAX_CONNECTIONS - 1);
        assert_eq!(connections_within(1024), 1024 - beside as usize);
        assert_eq!(connections_within(256), 64);
        assert_eq!(connections_within(0), 1);
    }
}
