//! The cache's own limits. What its user sets is in [`PrefixCacheConfig`](crate::params::PrefixCacheConfig).

use std::time::Duration;

/// Tokens of a block: what is kept, found and dropped as one in main memory and on disk. Of what two prompts share, up to
/// so many less one are read again.
pub const BLOCK_TOKENS: usize = 16;
/// What a block takes at most in main memory beside its KV rows and tokens, in bytes: the node, its share of the indices,
/// the allocator's headers, and the room that tables which double keep free.
pub const NODE_OVERHEAD_BYTES: u64 = 512;
/// The longest KV rows of one block, in bytes: a block of the largest models known takes a sixteenth of that.
pub const MAX_PAYLOAD_BYTES: usize = 128 << 20;
/// Bytes that leave main memory between two looks at how much of it there is, where that is short; in a step, where it is all
/// but gone. The system takes them back while who computes waits: 160 ms for each GiB on two cores of a virtual machine.
pub const EVICTED_BYTES_PER_LOOK: u64 = 256 << 20;
/// The most bytes that are read from disk for one prompt before it reaches the engine's thread: some 45 ms of computing
/// with SHA instructions, beside the disk's own time. What lies beyond is a miss this time.
pub const DISK_READ_BYTES_PER_PROMPT: u64 = 32 << 20;
/// The most milliseconds that one who prepares a prompt waits for another's reading of a file; past that the disk stands
/// still, and what is there is a miss.
pub const DISK_PATIENCE_MS: u64 = 2_000;
/// Bytes that blocks read from disk may hold in all while their prompts wait for a slot; they are counted nowhere else.
/// Nothing is read for a prompt that finds no room here.
pub const FETCHED_BYTES: u64 = 128 << 20;
/// Blocks that may wait to be written to disk.
pub const WRITE_QUEUE_BLOCKS: usize = 1_024;
/// Bytes that evicted blocks may hold while they wait to be written; they are counted nowhere else.
pub const WRITE_QUEUE_BYTES: u64 = 64 << 20;
/// Files of the disk tier over all models; one more and the oldest goes.
pub const MAX_DISK_ENTRIES: usize = 131_072;
/// The most milliseconds that a start looks for files; the writer's thread finds the rest.
pub const START_SCAN_MS: u64 = 1_000;
/// Seconds between two looks at the whole directory, where files too old are removed, too.
pub const MAINTENANCE_INTERVAL_S: u64 = 300;
/// A look at the directory follows when this share of the limit was written since the last: one part in so many. By as
/// much may each process that shares the directory overshoot its limit.
pub const RESCAN_SHARE: u64 = 16;
/// Files removed for their age in one go.
pub const MAX_EXPIRED: usize = 4_096;
/// A file that is being written and did not change for so long was left by a process that is gone.
pub const ABANDONED_AFTER: Duration = Duration::from_secs(120);
