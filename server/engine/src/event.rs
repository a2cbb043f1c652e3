//! What comes out: the events of a request, which are `gantry-core`'s to say, and what an engine says of itself.

use std::sync::Arc;

pub use gantry_core::{
    FinishReason, GenerationEvent, ITL_BUCKETS_MS, ItlHistogram, PooledEvent, PooledOutput, PromptChance, PromptToken,
    StopCause, Timings, TokenChance, TokenLogprob, TokenPiece, Usage,
};
use gantry_llama::{Backends, Pooling};
use serde::{Deserialize, Serialize};

use crate::ladder::DegradationLevel;
use crate::template::TemplateReport;

/// Receives a request's events on one of the engine's threads; it must not block. One that panics cancels its request.
pub type EventSink = Box<dyn FnMut(GenerationEvent) + Send>;

/// Whether an engine is at work on a request just now. What ends a process ends it during the work on one of its requests;
/// those that merely wait have nothing to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It is prepared or computed from now on.
    Begun,
    /// It waits: for a slot, be it that it gave its own away or is paused, or for its next batch.
    Paused,
}

/// Hears of a request's [`Activity`], each time before the work begins and after it has ended well, on the thread that does
/// it. After the request's last event, which another thread may send meanwhile, nothing of it counts any more.
pub type ActivitySink = Arc<dyn Fn(Activity) + Send + Sync>;

/// Receives a pooled request's events on the embedder's thread, which waits for it.
pub type PooledSink = Box<dyn FnMut(PooledEvent) + Send>;

/// What a model gives for texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledInfo {
    /// How.
    pub pooling: Pooling,
    /// Numbers in a vector.
    pub width: u32,
    /// The longest text, in tokens.
    pub text_tokens: u32,
}

/// A snapshot of an embedder's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PooledStats {
    /// Requests that are not answered yet.
    pub in_flight: u32,
    /// 1 while llama.cpp computes.
    pub computing: u32,
    /// For how many milliseconds it has, now.
    pub step_age_ms: Option<u64>,
    /// How often it has since the start: a batch that is too long for it is computed in several.
    pub steps: u64,
    /// Batches that left the window since the start.
    pub batches_total: u64,
    /// Texts in them.
    pub texts_total: u64,
    /// Their tokens.
    pub tokens_total: u64,
    /// What a backend that pads each text to the longest of its batch would have computed beside them; llama.cpp does not.
    pub padding_tokens_total: u64,
    /// Time in llama.cpp.
    pub compute_ms_total: f64,
    /// Requests that were answered.
    pub requests_finished_total: u64,
    /// Requests that were cancelled.
    pub requests_cancelled_total: u64,
    /// Requests that failed.
    pub requests_failed_total: u64,
}

/// What is known of the loaded model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// llama.cpp's one line: architecture, size class, quantisation.
    pub description: String,
    /// Tokens the model was trained for.
    pub n_ctx_train: u32,
    /// Tokens that one sequence (prompt and answer) can hold in this engine.
    pub n_ctx_per_sequence: u32,
    /// Sequences that run at once.
    pub parallel: u32,
    /// KV cells of all of them, which need not be what each can hold times their number.
    pub kv_cells: u64,
    /// Tokens in the vocabulary.
    pub vocab_size: u32,
    /// The text of the token that begins a text; empty where there is none.
    pub bos: String,
    /// The text of the token that ends one.
    pub eos: String,
    /// Weights in the model.
    pub parameters: u64,
    /// Bytes of its tensors.
    pub size_bytes: u64,
    /// Whether the file brings a chat template; without one, chats are refused.
    pub has_chat_template: bool,
    /// Whether that template knows of thinking before an answer: the model may think unless it is told not to.
    pub thinks: bool,
    /// Whether it fills gaps within texts: its vocabulary has tokens for that.
    pub infills: bool,
    /// What it rendered when it was tried.
    pub template: Option<Box<TemplateReport>>,
    /// What computes it.
    pub backends: Backends,
    /// What it gives for texts, where it was loaded to.
    pub pooled: Option<PooledInfo>,
    /// It is an encoder, which gives that and generates nothing.
    pub pooled_only: bool,
}

/// A snapshot of an engine's counters. Fields are read one by one, so they may be a step apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStats {
    /// Sequences that are reading a prompt or generating.
    pub slots_active: u32,
    /// Sequences there are.
    pub slots_total: u32,
    /// Requests that wait for a slot, those being tokenised included.
    pub queued: u32,
    /// Requests whose decoding is paused, without a slot.
    pub paused: u32,
    /// KV cells in use.
    pub kv_used_cells: u64,
    /// KV cells there are.
    pub kv_total_cells: u64,
    /// Prompt tokens decoded since the start.
    pub prompt_tokens_total: u64,
    /// Prompt tokens that the KV cache held already, since the start.
    pub cached_device_tokens_total: u64,
    /// Prompt tokens that came back from main memory.
    pub cached_ram_tokens_total: u64,
    /// Prompt tokens that came back from disk.
    pub cached_disk_tokens_total: u64,
    /// Times that a request got a slot, or got one back without its state, and the KV cache held a beginning of its tokens.
    pub cache_device_hits_total: u64,
    /// Times that it got tokens back from main memory.
    pub cache_ram_hits_total: u64,
    /// Times that it got tokens back from disk; its first ones may have come from main memory.
    pub cache_disk_hits_total: u64,
    /// Times that nothing was kept of its tokens, although prefixes are.
    pub cache_misses_total: u64,
    /// Tokens guessed ahead from repetitions and checked.
    pub lookup_tokens_total: u64,
    /// Those of them that were right.
    pub accepted_lookup_tokens_total: u64,
    /// Tokens guessed ahead by the draft model and checked.
    pub draft_tokens_total: u64,
    /// Those of them that were right.
    pub accepted_draft_tokens_total: u64,
    /// Time in the draft model; a part of that before llama.cpp is called for the model itself.
    pub draft_ms_total: f64,
    /// Requests of low priority that wait for a slot.
    pub waiting_low: u32,
    /// Requests of normal priority that wait for a slot.
    pub waiting_normal: u32,
    /// Requests of high priority that wait for a slot.
    pub waiting_high: u32,
    /// Main memory that prefixes take which left the KV cache.
    pub prefix_cache_bytes: u64,
    /// Disk that prefixes take.
    pub prefix_cache_disk_bytes: u64,
    /// How far the service is cut down because memory is short.
    pub degradation: DegradationLevel,
    /// States of sequences that gave their slot away or are paused, as they were a second ago or less.
    pub preempted_bytes: u64,
    /// Whether it has yet to measure what the parts of a step cost, and computes for that while it is idle.
    pub measures: bool,
    /// Whether what was computed of a sequence can be cut, so that it serves others: where not, as with a sliding window or
    /// a recurrent state, there is no prefix cache and nothing is guessed.
    pub reuses_prefixes: bool,
    /// Whether the KV cells are one pool, or each sequence has its own.
    pub kv_unified: bool,
    /// Whether attention is computed in one pass, without a matrix of scores; otherwise as matrix products.
    pub flash_attention: bool,
    /// Tokens that a prompt may have which is read beside the pool; 0: all are read where they stay.
    pub stage_positions: u32,
    /// Prompts that were read beside the pool.
    pub staged_prompts_total: u64,
    /// Memory that counts against the limit below; 0 where it is not watched.
    pub memory_used_bytes: u64,
    /// Memory that may be used.
    pub memory_limit_bytes: u64,
    /// Prefixes that left the KV cache to make room.
    pub evictions_total: u64,
    /// Bytes of states that steps copied: saved, brought back, or from one sequence to another.
    pub copied_bytes_total: u64,
    /// Tokens whose state was not copied since the step had copied as much as one may: dropped, or read again.
    pub uncopied_tokens_total: u64,
    /// Times that those who waited were let in by a later step for that.
    pub deferred_copies_total: u64,
    /// Times that a sequence was moved beside the others, to be computed with them.
    pub moves_total: u64,
    /// Rows of nobody's, computed to make those of streams whole groups, which takes less.
    pub filler_rows_total: u64,
    /// Times that prompts which came at once were read together, to begin together.
    pub bursts_total: u64,
    /// Sequences that gave their slot away, to go on later.
    pub preemptions_total: u64,
    /// Times that a request was paused.
    pub pauses_total: u64,
    /// Tokens generated since the start.
    pub generated_tokens_total: u64,
    /// Tokens generated a second, over the last seconds; falls to 0 when idle.
    pub tokens_per_second: f64,
    /// Steps since the start.
    pub steps: u64,
    /// How many milliseconds ago the step began that is not done yet, if there is one.
    pub step_age_ms: Option<u64>,
    /// How many milliseconds such a step may take before it counts as one that hangs.
    pub step_limit_ms: u64,
    /// The last step's duration.
    pub last_step_ms: f64,
    /// Tokens of prompts that the last step might take: with sequences that generate, what fits into the time below.
    pub prefill_budget_tokens: u32,
    /// How long the last step might take; without sequences that generate, nobody waits for it to be short.
    pub step_target_ms: f64,
    /// Tokens in the batches of all steps, guesses included, those of nobody's not: by `steps`, how full batches are.
    pub batch_tokens_total: u64,
    /// What padding each sequence's tokens to the most of any in their step would add; none is computed.
    pub padding_tokens_total: u64,
    /// Rows of logits in the batches of all steps, those of nobody's not.
    pub batch_rows_total: u64,
    /// Time that an idle engine waited for more requests before it read the first.
    pub gather_ms_total: f64,
    /// Time in steps before llama.cpp was called: admitting, planning, making room.
    pub before_decode_ms_total: f64,
    /// Time in llama.cpp.
    pub decode_ms_total: f64,
    /// Time after it: sampling, handing tokens on.
    pub after_decode_ms_total: f64,
    /// Requests that ended with [`GenerationEvent::Finished`], the cancelled ones included.
    pub requests_finished_total: u64,
    /// Requests that were cancelled.
    pub requests_cancelled_total: u64,
    /// Requests that ended with [`GenerationEvent::Failed`].
    pub requests_failed_total: u64,
}
