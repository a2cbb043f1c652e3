//! Every limit of the operator that is not a field of the spec, with its reason.

use std::time::Duration;

/// Time in which pods must have switched after Commit or back after Rollback. Switching is a pointer swap in each
/// pod; the time is for agents whose connection to the API server broke, which is more than `AGENT_BLIND_MAX`.
pub const SWITCH_TIMEOUT: Duration = Duration::from_secs(180);
const _: () = assert!(SWITCH_TIMEOUT.as_secs() > gantry_crds::AGENT_BLIND_MAX.as_secs());

/// Longest time that pods may prepare a version, in progress deadlines of the spec: each progress of a pod starts the
/// deadline anew, and a source that sends a byte now and then must not do so for ever.
pub const PROGRESS_DEADLINES_MAX: u32 = 4;

/// Parts of the progress deadline of which at most one write of the status is spent on noting progress.
pub const PROGRESS_NOTES: u32 = 20;

/// Time after which Auto gives up a second set of pods that no node has room for.
pub const NO_ROOM_PATIENCE: Duration = Duration::from_secs(60);

/// Time for which no pod of a side that requests have just gone over to may be ready before they go back.
pub const NO_READY_POD_PATIENCE: Duration = Duration::from_secs(30);

/// How long a version is watched where the spec, which says it, became unusable during the switch: the spec's default.
pub const BAKE_WITHOUT_SPEC: Duration = Duration::from_secs(600);

/// Time added to the drain timeout for a pod to end: it goes on accepting for up to 10 s, and after the drain its agent may
/// take 10 s and its worker 5 s to end.
pub const TERMINATION_MARGIN: Duration = Duration::from_secs(30);

/// Services that are reconciled at the same time; one service is never reconciled twice at once.
pub const RECONCILE_CONCURRENCY: u16 = 8;

/// Longest time between two looks at a service when nothing wakes it. A look at a settled one is no request.
pub const RESYNC_PERIOD: Duration = Duration::from_secs(600);

/// First wait after a reconcile that failed; it doubles with each failure in a row.
pub const RETRY_MIN: Duration = Duration::from_secs(1);

/// Longest wait after a reconcile that failed.
pub const RETRY_MAX: Duration = Duration::from_secs(120);

/// Wait after a write that lost a race: the watch event that carries the newer object is on its way. It doubles with each race
/// lost in a row, up to `RETRY_MAX`.
pub const CONFLICT_RETRY: Duration = Duration::from_millis(200);

/// Time for which an object older than the operator's own last write is left to its watch event. After that it is decided
/// on: the API server refuses a status that was decided from an object that is not the newest.
pub const STORE_LAG_MAX: Duration = Duration::from_secs(30);

/// How often is looked whether the ConfigMap or the Secrets that a version was judged by, or is being judged by, are others
/// by now, and whether a Secret is there by now that a pod cannot be made without: no watch tells of them.
pub const JUDGED_POLL: Duration = Duration::from_secs(15);

/// Longest such look, at all objects together: a pass goes on without, with what was seen last.
pub const JUDGED_LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// How often an attempt begins again because the ConfigMap or the Secrets that it is judged by changed while pods prepared.
/// After that it goes on: what changes faster than a model loads would begin attempts for ever.
pub const JUDGED_RESTARTS_MAX: i32 = 3;

/// Time after the operator's start for which passes wait until every kind of child has been listed. A kind that cannot be
/// listed keeps no service from being rolled back: what is not known of children is then asked for one by one.
pub const CHILDREN_LIST_PATIENCE: Duration = Duration::from_secs(30);

/// Longest answer of the API server to any request but a watch.
pub const API_TIMEOUT: Duration = Duration::from_secs(15);

/// A list or a watch on which nothing came for so long is given up: the API server ends a silent watch after 290 s.
pub const WATCH_READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Objects in one page of a list. A page is in memory as it came and as what it says at once, for each of ten watches.
pub const WATCH_PAGE_OBJECTS: u32 = 50;

/// Longest message in a condition, a status line or an event: Events allow 1 KiB.
pub const MESSAGE_BYTES_MAX: usize = 1000;

/// Texts of Events that are remembered: the same one again is counted with the Event that is there, another is one of its own.
pub const EVENT_TEXTS: usize = 64;

/// Pods that a message names before it goes on with their number.
pub const MESSAGE_PODS_MAX: usize = 3;

/// By how much the clocks of two API servers may differ: of two objects that were made within it nobody knows which is the older one.
pub const CLOCK_SKEW: Duration = Duration::from_secs(60);

/// Time that a pod's containers may take to be made, its image and volumes included, before that is called a trouble.
pub const CREATING_TIMEOUT: Duration = Duration::from_secs(120);

/// Time that the server of a pod may run, be not ready and report nothing, before that is called a trouble.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(120);

/// Time that a pod's containers may take to be made before Events are looked at for a volume that keeps it.
pub const VOLUMES_LOOK_AFTER: Duration = Duration::from_secs(10);
const _: () = assert!(VOLUMES_LOOK_AFTER.as_secs() < CREATING_TIMEOUT.as_secs());

/// Age from which on an Event about a volume says nothing any more: the kubelet tries again after at most 122 s, and says so.
pub const VOLUME_EVENT_AGE_MAX: Duration = Duration::from_secs(180);

/// Events about one pod of which the one about its volume is searched.
pub const POD_EVENTS_MAX: u32 = 50;

/// Bytes of what is told of a volume.
pub const VOLUME_MESSAGE_BYTES_MAX: usize = 300;

/// Characters of a gate's figure in the table of versions, which is to fit a terminal.
pub const FIGURE_CHARS_MAX: usize = 20;

/// Size of the scratch volume at `/tmp` in a serving pod: sockets and small files only.
pub const TMP_SIZE: &str = "64Mi";

/// Disk of a serving pod beside its cache: what is at `/tmp`, and logs that the container runtime keeps of it.
pub const DISK_BESIDE_CACHE_BYTES: u64 = 256 << 20;

/// Old ReplicaSets that are kept.
pub const REPLICA_SETS_KEPT: i32 = 3;

/// Characters of the annotations that ask for another try or another set of pods: they become part of a status field.
pub const RETRY_TOKEN_CHARS_MAX: usize = 64;

/// Fields of a later release that are noted of a service, and that a message names.
pub const UNKNOWN_FIELDS_TOLD: usize = 5;

/// Change of the measured memory, in percent, below which `status.memory` is not written again.
pub const MEMORY_CHANGE_PERCENT: i64 = 5;

/// Time that running reconciles get to end after SIGTERM.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);

/// Restarts of a container after which it ends again and again, be it running just now or not, until it is ready.
pub const CRASH_LOOP_RESTARTS: i32 = 2;

/// Shortens `text` to [`MESSAGE_BYTES_MAX`] at a character boundary.
#[must_use]
pub fn message(text: &str) -> String {
    shortened(text, MESSAGE_BYTES_MAX)
}

/// Shortens `text` to so many bytes, three at least, at a character boundary.
#[must_use]
pub fn shortened(text: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    let end = (0..=bytes_max.saturating_sub(3)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}...", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let long = "ä".repeat(MESSAGE_BYTES_MAX);
        let cut = message(&long);
        assert!(cut.len() <= MESSAGE_BYTES_MAX && cut.ends_with("ä..."));
        assert_eq!(message("short"), "short");
    }
}
