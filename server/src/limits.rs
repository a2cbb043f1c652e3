//! Every limit of the front and its workers that is not a setting, by name. `docs/configuration.md` lists them, and a
//! test holds the two together.
//!
//! Absent: what a user sets ([`crate::config`]), what belongs to the engine (`gantry_engine`), to the wire types
//! (`gantry_openai`) or to fetching models ([`crate::fetch`]).

use std::time::Duration;

/// The largest request body; a larger one is refused before it is read.
pub const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;
/// The most memory that a request body may take as values of JSON, its texts left out: a body of many small ones takes a hundred
/// times its length. So much may be read at once of all bodies together. 340,000 token ids are as much.
pub const MAX_BODY_JSON_BYTES: usize = 24 * 1024 * 1024;
/// A body whose values take no more than this is read without waiting for room among those.
pub const SMALL_BODY_JSON_BYTES: usize = 64 * 1024;
/// The largest frame on a worker's socket: a body, escaped and framed, fits.
pub const MAX_FRAME_BYTES: usize = 32 * 1024 * 1024;
/// The most events a worker puts into one frame.
pub const MAX_EVENTS_PER_FRAME: usize = 1024;
/// Bytes of events past which a worker begins another frame: one event may have as much as an answer that comes whole, and many of
/// those in one frame would pass [`MAX_FRAME_BYTES`].
pub const EVENT_FRAME_BYTES: usize = 4 * 1024 * 1024;
/// Events that may wait in a worker for the front to read them; past that the front is taken for dead and the worker
/// ends.
pub const MAX_WORKER_EVENT_BACKLOG: usize = 256 * 1024;
/// Memory that answers may hold together until their clients have taken it, beside [`OUTPUT_RESERVE_BYTES`]. Less where there
/// is less memory ([`FRONT_MEMORY_DIVISOR`]).
pub const OUTPUT_BUDGET_BYTES: usize = 32 * 1024 * 1024;
/// The least that it is.
pub const OUTPUT_BUDGET_MIN_BYTES: usize = 16 * 1024 * 1024;
/// Memory beside that budget from which each streamed answer has its [`OUTPUT_FLOOR_BYTES`]. Past that, too, an answer pauses as
/// long as anything of it is undelivered.
pub const OUTPUT_RESERVE_BYTES: usize = 16 * 1024 * 1024;
/// Of what the process may take (its cgroup's limit, or the machine's memory), the front takes one part in
/// so many for request bodies, as much for connections, as much for undelivered output, and as much for vectors where it
/// serves them: none more than its own limit, nor less than its least.
pub const FRONT_MEMORY_DIVISOR: u64 = 32;
/// And a process that renders a slow chat one part in so many, between `TEMPLATE_PROCESS_MIN_BYTES` and
/// `TEMPLATE_PROCESS_MAX_BYTES`.
pub const TEMPLATE_MEMORY_DIVISOR: u64 = 128;
/// What else the front takes: its code and tables, and requests that are being read.
pub const FRONT_BASE_BYTES: u64 = 48 * 1024 * 1024;
/// Times that an answer which is not streamed may be in memory while it is written: collected, as what is written, and as text.
pub const WHOLE_ANSWER_COPIES: u64 = 4;
/// The most that one streamed answer (each of `n` is one) may hold of that memory, and no more than what is left free of it.
/// Past that it pauses and its sequence is another's, until the client has taken half.
pub const OUTPUT_PER_ANSWER_BYTES: usize = 256 * 1024;
/// What each streamed answer may hold while [`OUTPUT_RESERVE_BYTES`] are not used up, so that one that is read goes on however
/// many are not.
pub const OUTPUT_FLOOR_BYTES: usize = 16 * 1024;
/// What may come of an answer that was told to pause, since it was on its way from the worker; past that the answer ends.
pub const OUTPUT_OVERRUN_BYTES: usize = 2 * 1024 * 1024;
/// The time in which a client must take [`SLOW_CLIENT_MIN_BYTES_PER_SECOND`] on average of an answer that is paused for it, or
/// that has ended, or all that waited of it, time and again; else what waits is thrown away and the answer ends with an error.
pub const SLOW_CLIENT_LIMIT: Duration = Duration::from_secs(60);
/// The same while no more requests may wait, so that others are refused, or all connections are taken, or
/// [`OUTPUT_RESERVE_BYTES`] are used up, or the server is about to end.
pub const SLOW_CLIENT_CROWDED_LIMIT: Duration = Duration::from_secs(10);
/// The same for those that begin to take too little when the server has been about to end for [`SLOW_CLIENT_CROWDED_LIMIT`]; before,
/// what is left of that. So whoever waited behind clients that took nothing does not add their time to the end again.
pub const SLOW_CLIENT_END_LIMIT: Duration = Duration::from_secs(2);
/// The least rate at which what waits must be taken, of all answers to one request together.
pub const SLOW_CLIENT_MIN_BYTES_PER_SECOND: usize = 1024;
/// The time between two records of the log that tell of an answer that was ended because its client reads too slowly.
pub const SLOW_CLIENT_LOG_PERIOD: Duration = Duration::from_secs(10);
/// The most that all answers to one request that are not streamed may hold of that memory while they are collected, and no
/// more than what is left free of it; past that the request fails and says what to ask for instead.
pub const WHOLE_ANSWER_BYTES: usize = 8 * 1024 * 1024;
/// What they may hold in any case, which is enough for texts.
pub const WHOLE_ANSWER_FLOOR_BYTES: usize = 64 * 1024;
/// Answers that hold more than this are written as JSON on threads of their own, where they stop no other request.
pub const INLINE_ANSWER_BYTES: usize = 64 * 1024;
/// Such answers that are written at a time.
pub const WRITES_AT_ONCE: usize = 2;

/// The highest `--max-queue`.
pub const MAX_QUEUE: usize = 16_384;
/// The highest `--workers`.
pub const MAX_WORKERS: u32 = 32;
/// Workers that one request is given to which refuse it for want of memory.
pub const MEMORY_REFUSALS: u32 = 3;
/// For how long it is remembered what a worker died of, or may have, by a digest.
pub const SUSPECT_MEMORY: Duration = Duration::from_secs(3600);
/// Digests of requests that are suspected, and as many of those that are convicted: past that the oldest is forgotten.
pub const MAX_SUSPECT_DIGESTS: usize = 1024;
/// Deaths that are remembered until their suspects have been tried; past that the oldest counts as a crash.
pub const MAX_OPEN_DEATHS: usize = 64;
/// Deaths to be explained past which those suspects are tried first for whom nobody waits.
pub const TRIED_FIRST_DEATHS: usize = 2;
/// Suspects that are kept to be tried though nobody waits for them; those past that are not tried.
pub const MAX_UNHEARD_SUSPECTS: usize = 256;
/// Requests that workers died of one after the other, without an answer to anybody, before a worker has to answer a request
/// of the server's own first.
pub const CONTROL_AFTER_CONVICTIONS: u32 = 3;
/// How long a suspect is run with no other request in its worker; past that others come to it.
pub const SUSPECT_ALONE_LIMIT: Duration = Duration::from_secs(10);
/// How long suspects are tried one after the other while others wait.
pub const TRIALS_LIMIT: Duration = Duration::from_secs(10);
/// How long a suspect waits for a worker without requests before one gets no others for it.
pub const TRIAL_PATIENCE: Duration = Duration::from_secs(5);
/// How long it waits for that while a worker is missing, which will come without requests.
pub const TRIAL_AWAY_PATIENCE: Duration = Duration::from_secs(30);
/// How long a suspect waits to be tried before it fails.
pub const TRIAL_WAIT_LIMIT: Duration = Duration::from_secs(120);
/// How long a request that does not say how long it may wait does so while workers die and are restarted.
pub const WORKER_WAIT_LIMIT: Duration = Duration::from_secs(1800);
/// Requests that may be inside a version past its `maxQueue`, of clients that have no more than their equal part of the places, or
/// none, while others fill them.
pub const SHARED_PLACES: usize = 64;
/// Clients without a request inside a version that are remembered, since they have had more than their part.
pub const MAX_AHEAD_CLIENTS: usize = 256;
/// Tokens that an answer is taken to have where clients share the service and it may have more; what it had is known later.
pub const FAIR_ANSWER_TOKENS: u32 = 512;
/// Bytes of a prompt's text for each KV cell that it is expected to need.
pub const BYTES_PER_TOKEN_ESTIMATE: usize = 4;
/// Bytes that a chat template writes around a message, as far as is known before it is rendered.
pub const MESSAGE_MARKUP_BYTES_ESTIMATE: usize = 24;
/// Bytes of a prompt's beginning in which it is compared with others.
pub const PREFIX_BLOCK_BYTES: usize = 256;
/// Blocks of one prompt that are compared; the rest of it does not matter to the choice of a worker.
pub const PREFIX_BLOCKS_PER_REQUEST: usize = 64;
/// Beginnings of prompts that a version remembers.
pub const PREFIX_INDEX_BLOCKS: usize = 65_536;
/// Requests that a worker may have more than the one with the fewest, and still get those whose prefix it has read.
pub const PREFIX_LOAD_MARGIN: u32 = 4;
/// How often a version's supervisors look at their deadlines.
pub const SUPERVISOR_TICK: Duration = Duration::from_millis(200);

/// How long a worker that has no requests any more keeps its share of the threads: clients come back.
pub const COMPUTES_FOR: Duration = Duration::from_secs(1);

/// How often a worker says that it lives, with its figures.
pub const HEARTBEAT_PERIOD: Duration = Duration::from_secs(1);
/// A worker silent for so long gets no request until it is heard of again.
pub const HEARTBEAT_LATE: Duration = Duration::from_secs(3);
/// A worker silent for so long is killed and replaced.
pub const HEARTBEAT_LIMIT: Duration = Duration::from_secs(15);
/// A worker with requests in its slots that finishes no step for so long is killed and replaced.
pub const STEP_STALL_LIMIT: Duration = Duration::from_secs(120);
/// A worker whose loading makes no progress for so long is killed.
pub const LOAD_STALL_LIMIT: Duration = Duration::from_secs(600);
/// How long a worker may take to end after its socket is closed, before it is killed.
pub const WORKER_EXIT_LIMIT: Duration = Duration::from_secs(5);
/// Lines of a worker's log that are kept to explain its death.
pub const WORKER_LOG_TAIL_LINES: usize = 20;
/// Bytes of one line of a worker's log that are kept.
pub const WORKER_LOG_LINE_BYTES: usize = 4096;
/// Bytes of one line of a worker's log that are passed on in one piece.
pub const WORKER_LOG_PIECE_BYTES: usize = 64 * 1024;
/// Log that may wait for standard error to be read, and as much again while it is written; past that, lines are lost and
/// counted.
pub const LOG_BACKLOG_BYTES: usize = 1024 * 1024;
/// The longest text that is written to standard error at once, half of what may wait; of a longer one the beginning is.
pub const MAX_LOG_TEXT_BYTES: usize = 512 * 1024;
/// How long the end of a process waits for its log to be written.
pub const LOG_FLUSH_LIMIT: Duration = Duration::from_secs(1);
/// The wait before standard error is tried again, where it would block and was made not to.
pub const LOG_RETRY: Duration = Duration::from_millis(10);

/// How often the memory of a worker is looked at whose version does not answer yet.
pub const TRIAL_PERIOD: Duration = Duration::from_millis(5);
/// The least that such a worker may take beside what it is predicted to, in bytes, where the pod has twice that to spare.
pub const TRIAL_HEADROOM_MIN_BYTES: u64 = 64 * 1024 * 1024;
/// And what it may take besides where it uses GPUs, in bytes: what their driver keeps of main memory for each process.
pub const TRIAL_GPU_BYTES: u64 = 1024 * 1024 * 1024;

/// The wait before the first respawn of a worker; it doubles with each crash in the window.
pub const RESPAWN_BACKOFF_MIN: Duration = Duration::from_millis(200);
/// The longest wait before a respawn.
pub const RESPAWN_BACKOFF_MAX: Duration = Duration::from_secs(30);
/// Crashes within [`CRASH_WINDOW`] that make a version `Failed`.
pub const CRASH_LIMIT: usize = 5;
/// See [`CRASH_LIMIT`].
pub const CRASH_WINDOW: Duration = Duration::from_secs(600);
/// How often a failed version is tried again, in case what killed it (memory pressure, say) has passed.
pub const FAILED_RETRY_PERIOD: Duration = Duration::from_secs(60);

/// How long a readiness probe may take.
pub const PROBE_LIMIT: Duration = Duration::from_secs(5);
/// For how long a successful probe stands for the next.
pub const PROBE_CACHE: Duration = Duration::from_secs(1);
/// The shortest `Retry-After`.
pub const RETRY_AFTER_MIN_SECONDS: u64 = 1;
/// The longest `Retry-After`.
pub const RETRY_AFTER_MAX_SECONDS: u64 = 60;
/// Finished requests from which the service rate is computed.
pub const SERVICE_RATE_SAMPLES: usize = 64;
/// Only requests that finished this recently count for the service rate.
pub const SERVICE_RATE_WINDOW: Duration = Duration::from_secs(60);
/// Submissions of one request: a version may be retired between the choice and the submission.
pub const SUBMIT_ATTEMPTS: usize = 4;

/// How long a request waits at the most for a model to be loaded, where nothing says how long it may.
pub const HELD_LIMIT: Duration = Duration::from_secs(1800);
/// How long a request that has waited so may leave its turn untaken, since its client does not read what it is told, before others pass.
pub const TURN_PATIENCE: Duration = Duration::from_secs(1);
/// How often a stream that waits so is told how it stands.
pub const HELD_NEWS_PERIOD: Duration = Duration::from_secs(2);

/// Connections open at once, where there are descriptors for as many; one more, and one on which nothing has been asked
/// closes: the one silent longest, else the one idle longest, else the one whose body has been coming longest. Where
/// something has been asked on all, it waits.
pub const MAX_CONNECTIONS: usize = 4096;
/// Of all connections that there may be at once, one part in so many is for others than any one address, of IPv6 any one
/// network of 64 bits. Clients behind one proxy are one address.
pub const OTHERS_CONNECTIONS_DIVISOR: usize = 4;
/// The least that it is lowered to where there is little memory ([`FRONT_MEMORY_DIVISOR`]).
pub const MIN_CONNECTIONS: usize = 256;
/// What a connection takes at the most: 80 KiB of the front's own memory for what it has read ahead and what it is to send, and
/// twice [`SEND_BUFFER_BYTES`] of the kernel's, which counts as the container's.
pub const CONNECTION_BYTES: usize = 144 * 1024;
/// The same for the port of probes and metrics.
pub const MAX_PROBE_CONNECTIONS: usize = 64;
/// Of the memory that connections may take one part in so many is for calls of gRPC, where that is served: as many of them at once
/// as fit in there.
pub const CALLS_DIVISOR: usize = 4;
/// What a call takes at the most beside its body and its answer: its head, and what has come of the one and is to go of the other.
pub const CALL_BYTES: usize = 48 * 1024;
/// Calls at once on one connection of gRPC; a client waits with one more, as HTTP/2 says.
pub const MAX_CONNECTION_CALLS: u32 = 128;
/// The longest head of a call.
pub const MAX_CALL_HEAD_BYTES: u32 = 16 * 1024;
/// What a client may send of a call's body before it is taken, and of all on a connection.
pub const CALL_WINDOW_BYTES: u32 = 64 * 1024;
/// The piece in which an answer is handed to a connection of gRPC: the next one once its client has room for it.
pub const CALL_PIECE_BYTES: usize = 16 * 1024;
/// How often a connection of gRPC is asked whether anybody is there.
pub const CALL_PING_PERIOD: Duration = Duration::from_secs(60);
/// How long it may take to say so.
pub const CALL_PING_LIMIT: Duration = Duration::from_secs(20);
/// How often a client of gRPC that watches the server's health has it looked at: readiness is worked out from what workers did last,
/// and nothing tells when that grows old.
pub const HEALTH_WATCH_PERIOD: Duration = Duration::from_secs(1);
/// How long one call of gRPC's reflection may go on.
pub const REFLECTION_LIMIT: Duration = Duration::from_secs(10);
/// The largest question about health, and of reflection.
pub const MAX_QUESTION_BYTES: usize = 4096;
/// Answers that the latencies of `/server/stats` are of: the last ones.
pub const STATS_ANSWERS: usize = 1024;
/// File descriptors that connections leave for workers, model files and what else is opened.
pub const DESCRIPTOR_RESERVE: usize = 512;
/// How long a connection may be silent, at the least, before it makes room for another, unless many are silent.
pub const SHED_MIN_AGE: Duration = Duration::from_millis(100);
/// Silent connections from which on they are a crowd, which takes its own places and none of those that were answered; where that is
/// more, so many as the connections by [`SILENT_CROWD_DIVISOR`].
pub const SILENT_CROWD_MIN: usize = 16;
/// What part of all connections may be silent before that is a crowd.
pub const SILENT_CROWD_DIVISOR: usize = 8;
/// How long a client may take nothing of an answer that is whole, at the least, before its connection makes room for another.
pub const UNREAD_MIN_AGE: Duration = Duration::from_secs(1);
/// [`SLOW_CLIENT_LIMIT`] at the port of probes and metrics while all its connections are taken: what it answers is short.
pub const SLOW_PROBE_LIMIT: Duration = Duration::from_secs(2);
/// The longest head of a request, and what is read ahead of its body.
pub const MAX_HEAD_BYTES: usize = 32 * 1024;
/// The kernel's backlog of connections that are not accepted yet.
pub const LISTEN_BACKLOG: u32 = 1024;
/// The wait after a failed accept.
pub const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long a client may take to send a request's head, and a connection be idle. Common clients drop idle connections
/// after 90 s; the server waits longer, so that it does not close one on which a request is already coming.
pub const HEADER_READ_LIMIT: Duration = Duration::from_secs(120);
/// How long a client may take none of what is sent to it, or be gone without a word, before its connection is closed.
pub const CLIENT_STALL_LIMIT: Duration = Duration::from_secs(120);
/// The kernel's buffer of what is on its way to a client, which takes twice as much. What is in it counts as taken: the smaller
/// it is, the more closely that follows what a client reads.
pub const SEND_BUFFER_BYTES: usize = 32 * 1024;
/// How long a client may take to send a request's body.
pub const BODY_READ_LIMIT: Duration = Duration::from_secs(60);
/// The time in which a body must bring [`BODY_MIN_BYTES_PER_SECOND`] on average, or come to its end, time and again: a
/// pause of less than this is nobody's fault.
pub const BODY_RATE_WINDOW: Duration = Duration::from_secs(10);
/// The least rate at which a body must come.
pub const BODY_MIN_BYTES_PER_SECOND: usize = 4096;
/// The least memory that is taken for a body, if it is not shorter; it doubles as more comes.
pub const BODY_CHUNK_BYTES: usize = 16 * 1024;
/// Memory that all request bodies together may take, from their first byte to the end of their requests; and as much that
/// answers with vectors may. Less where there is less memory ([`FRONT_MEMORY_DIVISOR`]).
pub const BODY_BUDGET_BYTES: usize = 512 * 1024 * 1024;
/// The least that either is.
pub const BODY_BUDGET_MIN_BYTES: usize = 48 * 1024 * 1024;
/// Of that memory one client (an IPv4 address, an IPv6 network of 64 bits) may have so many times what is left free: 3
/// gives one client alone three quarters, and always leaves something to others. One body it may have in any case.
pub const BODY_CLIENT_FACTOR: usize = 3;
/// How long a body, or an answer with vectors, may wait for its share of that memory before it is refused with 503.
pub const BODY_BUDGET_WAIT: Duration = Duration::from_secs(5);
/// Bytes of that memory that are counted for each number of an answer to `/v1/embeddings`: the number, and its text.
pub const EMBEDDING_ANSWER_BYTES_PER_NUMBER: usize = 16;
/// How long a refused body is read and thrown away, so that its sender gets to read the refusal.
pub const BODY_DISCARD_LIMIT: Duration = Duration::from_secs(5);
/// The buffer in which a stream's events are written: memory is had for so many bytes at a time, and so many may gather
/// before they are sent.
pub const STREAM_BUFFER_BYTES: usize = 4096;
/// The time between two comments that keep a silent stream open.
pub const SSE_KEEP_ALIVE: Duration = Duration::from_secs(10);
/// After SIGTERM the server already says that it is not ready, and goes on accepting until nobody has connected for so long: those
/// who route requests here learn of it at their own pace, and no client may be sent to a closed port.
pub const UNREADY_BEFORE_CLOSE: Duration = Duration::from_secs(2);
/// How long it goes on accepting at most: somebody may know nothing of readiness, and connect for ever.
pub const UNREADY_BEFORE_CLOSE_MAX: Duration = Duration::from_secs(10);
/// Once the port is closed, how long a connection on which nothing is asked stays open since it came, or was answered
/// last: a request may be on its way. A part of a head is no request.
pub const DRAIN_QUIET_LIMIT: Duration = Duration::from_secs(1);
/// The longest `x-request-id` taken over from a client.
pub const MAX_REQUEST_ID_BYTES: usize = 128;
/// How long those whose requests are cut off at the end have to take the event that says so.
pub const LAST_EVENTS_LIMIT: Duration = Duration::from_secs(1);
/// How long the agent may take to end, once requests have.
pub const AGENT_STOP_LIMIT: Duration = Duration::from_secs(10);
/// The most API keys that a flag names, and a file.
pub const MAX_API_KEYS: usize = 1024;
/// The longest of them, in bytes.
pub const MAX_API_KEY_BYTES: usize = 512;
/// The largest file of API keys, or all files of a directory of them together, in bytes: as much as a Secret may hold.
pub const MAX_API_KEY_FILE_BYTES: u64 = 1024 * 1024;
/// The most files in a directory of API keys.
pub const MAX_API_KEY_FILES: usize = 1024;
/// How often a directory of API keys is read again at once, where a mounted Secret changed while it was read.
pub const API_KEYS_REREADS: usize = 2;
/// How often the file or the directory of API keys is read again.
pub const API_KEYS_RELOAD_PERIOD: Duration = Duration::from_secs(5);

/// How long nothing may come of a model that is named by an address before its fetch is given up.
pub const FETCH_PATIENCE: Duration = Duration::from_secs(60);
/// How often it is logged how far a fetch is, where nobody sits at a terminal.
pub const FETCH_TOLD_PERIOD: Duration = Duration::from_secs(10);

/// The largest object of a stored response, in bytes: what it answers, or what its client was told.
pub const MAX_STORED_OBJECT_BYTES: usize = 16 * 1024 * 1024;
/// How long the store of responses may take to read, write or delete an object.
pub const STORE_LIMIT: Duration = Duration::from_secs(10);
/// Times that S3 is asked again within it.
pub const STORE_RETRIES: usize = 2;
/// How often a server looks for stored responses that have expired, where they are kept for longer.
pub const RESPONSE_SWEEP_PERIOD: Duration = Duration::from_secs(3600);
/// Objects that it looks at each time; it goes on from there the next time.
pub const RESPONSE_SWEEP_OBJECTS: usize = 100_000;
/// Responses that a server answers in the background at once, those that wait included; one more is refused with 429.
pub const MAX_BACKGROUND_RESPONSES: usize = 64;
/// How long a response in the background is taken to be answered since its server said so last; then it has failed.
pub const BACKGROUND_LEASE: Duration = Duration::from_secs(30);
/// How often a server says so.
pub const BACKGROUND_LEASE_RENEWAL: Duration = Duration::from_secs(10);
/// How often it looks whether somebody wants the response to end.
pub const BACKGROUND_WATCH_PERIOD: Duration = Duration::from_secs(1);
/// How long who wants that waits for it to end.
pub const CANCEL_LIMIT: Duration = Duration::from_secs(10);
/// How often they look.
pub const CANCEL_LOOK_PERIOD: Duration = Duration::from_millis(200);
