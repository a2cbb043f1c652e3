//! Every limit of what an agent decides, by name.

use std::time::Duration;

/// Rounds of planning after one event; each does what the one before made possible.
pub const PLAN_ROUNDS_MAX: usize = 8;
/// The wait before a version that could not be brought back, or had no room, is tried again; it doubles.
pub const RETRY_MIN: Duration = Duration::from_secs(2);
/// The longest such wait.
pub const RETRY_MAX: Duration = Duration::from_secs(60);
/// The wait before a version that was refused when all others had been unloaded for it has them unloaded once more.
pub const RETRY_IN_VAIN: Duration = Duration::from_secs(600);
/// How long a pod brings the active version back before a candidate is prepared beside that, however well it gets on: a source
/// that sends a byte now and then must not keep the cure away.
pub const RESTORE_ALONE: Duration = Duration::from_secs(30);
/// Characters of a message in a status.
pub const MAX_MESSAGE_CHARS: usize = 800;
// With the words around it, a message is one that the API server takes of a pod.
const _: () = assert!(MAX_MESSAGE_CHARS + 256 <= gantry_crds::status::report::MAX_REPORT_MESSAGE_CHARS as usize);
/// The shortest time between two writes of a pod's entry: changes that come closer are written together.
pub const STATE_PERIOD: Duration = Duration::from_millis(250);
/// The shortest time between a write and one for figures alone.
pub const FIGURES_PERIOD_MIN: Duration = Duration::from_secs(10);
/// How long a degradation is told of beyond its end.
pub const DEGRADATION_TOLD: Duration = Duration::from_secs(300);
/// What each pod of a service adds to that time: every write wakes the watchers of all of them.
pub const FIGURES_PERIOD_PER_REPLICA: Duration = Duration::from_secs(1);
/// The wait before a write of the entry that failed is tried again; it doubles.
pub const WRITE_BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest such wait.
pub const WRITE_BACKOFF_MAX: Duration = Duration::from_secs(10);
/// Change of a worker's memory below which it is not reported again, in bytes.
pub const MEMORY_CHANGE_MIN_BYTES: u64 = 64 * 1024 * 1024;
/// The same in percent of what was reported last: both have to be passed.
pub const MEMORY_CHANGE_PERCENT: u128 = 10;
