//! Every limit of fetching, by name.

use std::time::Duration;

/// The largest model file.
pub const MAX_MODEL_BYTES: u64 = 4 << 40;
/// How long a connection may take to be made, TLS included.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long a server may be silent in the middle of an answer.
pub const READ_LIMIT: Duration = Duration::from_secs(30);
/// Redirects that are followed for one request.
pub const MAX_REDIRECTS: usize = 5;
/// The longest answer that is read of who hands out a registry's tokens.
pub const MAX_TOKEN_ANSWER_BYTES: usize = 64 * 1024;
/// The longest answer that is read of a Hub's to what a revision is.
pub const MAX_HUB_ANSWER_BYTES: usize = 16 << 20;
/// The longest manifest that is read of a registry's.
pub const MAX_MANIFEST_BYTES: usize = 4 << 20;
/// Addresses of which it is kept what they meant.
pub const MAX_KNOWN_ADDRESSES: usize = 1024;
/// How often it is looked whether another process is done with a file that it fetches into the same cache.
pub const OTHER_PROCESS_PERIOD: Duration = Duration::from_millis(500);
/// Connections over which a large file comes at once.
pub const FETCH_CONNECTIONS: usize = 4;
/// What each of them brings at a time; as many of these as there are connections are in memory.
pub const FETCH_SEGMENT_BYTES: u64 = 4 << 20;
/// What goes to the disk at a time of a segment.
pub const FETCH_CHUNK_BYTES: usize = 64 << 10;
/// With less than this to come, one connection brings all of it.
pub const SEGMENTED_MIN_BYTES: u64 = 64 << 20;
/// How long nothing comes of an answer, or none to a request, before that is told. It goes on until [`READ_LIMIT`].
pub const SILENCE_TOLD_AFTER: Duration = Duration::from_secs(10);
/// What a try has to bring beyond all that was there before, for the next one to come soon, and for what was told of a standstill to
/// be over: a source that sends a byte with each connection, or the same half of a file again and again, gets nobody anywhere.
pub const PROGRESS_MIN_BYTES: u64 = 64 << 10;
/// Causes that a fetch which stands still remembers to have told.
pub const MAX_TOLD_CAUSES: usize = 8;
/// The wait before the first new try; it doubles with each one that brought less than [`PROGRESS_MIN_BYTES`].
pub const RETRY_BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest wait before a new try, a server's `Retry-After` included.
pub const RETRY_BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Chunks that may wait between the network and the disk.
pub const WRITE_QUEUE_CHUNKS: usize = 64;
/// Bytes that are read at a time when a file is hashed or copied.
pub const FILE_BUFFER_BYTES: usize = 1024 * 1024;
/// Bytes of a file that are asked for first, to read its header.
pub const PEEK_FIRST_BYTES: u64 = 1024 * 1024;
/// A header longer than this is judged only after the download.
pub const PEEK_MAX_BYTES: u64 = 16 * 1024 * 1024;
/// The most that headers of a model's parts take on the disk while they are read ahead, together. They are no part of the cache's limit,
/// but of the 256 MiB that a pod has beside it; a model with more is judged only after the download.
pub const MAX_HEADERS_BYTES: u64 = 64 * 1024 * 1024;
/// The shortest time between two reports on a download.
pub const PROGRESS_PERIOD: Duration = Duration::from_millis(250);
/// Clients that are kept for sources with authorities of their own; with more all are made anew.
pub const MAX_CLIENTS_WITH_CA: usize = 16;
/// How much of the cache a download without a length takes at a time.
pub const UNSAID_LENGTH_STEP_BYTES: u64 = 64 << 20;
