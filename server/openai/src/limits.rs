//! Every limit of what a request may say, by name. `docs/configuration.md` lists them, and a test holds the two
//! together.
//!
//! Absent: what the model decides (its context, its vocabulary), what holds whatever the protocol, which is `gantry-core`'s,
//! and the size of a body, which is the front's.

pub use gantry_core::{
    MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKERS, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, MAX_PENALTY,
    MAX_REGEX_BYTES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS,
};

/// The longest `model`, in bytes: an error repeats it.
pub const MAX_MODEL_NAME_BYTES: usize = 256;
/// The most messages in one chat.
pub const MAX_MESSAGES: usize = 4096;
/// The most parts in one message's content.
pub const MAX_CONTENT_PARTS: usize = 1024;
/// The longest name or id in a message, in bytes.
pub const MAX_NAME_BYTES: usize = 256;
/// The most calls of tools in one message.
pub const MAX_TOOL_CALLS: usize = 128;
/// The highest `max_tokens`, and the longest look back of a penalty; more than any model's context.
pub const MAX_TOKENS_LIMIT: u32 = 1 << 20;
/// The highest `temperature`.
pub const MAX_TEMPERATURE: f32 = 2.0;
/// The highest `repeat_penalty`.
pub const MAX_REPEAT_PENALTY: f32 = 2.0;
/// The highest `dry_multiplier`.
pub const MAX_DRY_MULTIPLIER: f32 = 100.0;
/// The highest `dry_base`.
pub const MAX_DRY_BASE: f32 = 10.0;
/// The most answers to one prompt (`n`); each one takes a place of its own in the queue.
pub const MAX_CHOICES: u32 = 16;
/// The most answers to one request on `/v1/completions`: its prompts times `n`.
pub const MAX_PROMPT_CHOICES: u32 = 128;
/// The most tokens in the prompts of one request, where they come as numbers.
pub const MAX_PROMPT_TOKENS: usize = 1 << 20;
/// The longest `grammar`, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 64 * 1024;
/// The most texts of which an answer must be one.
pub const MAX_FORM_CHOICES: usize = 1000;
/// The longest JSON schema in a `response_format`, in bytes.
pub const MAX_SCHEMA_BYTES: usize = 64 * 1024;
/// The most texts in one request for embeddings.
pub const MAX_EMBEDDING_INPUTS: usize = 2048;
/// The most tokens in one request for embeddings, where they come as numbers.
pub const MAX_EMBEDDING_TOKENS: usize = 300_000;
/// The most documents in one request for a ranking.
pub const MAX_RERANK_DOCUMENTS: usize = 1000;
/// The most pairs in one request for scores, and the most texts on either side.
pub const MAX_SCORE_PAIRS: usize = 1000;
/// The most parts of other files beside a gap that is to be filled.
pub const MAX_INFILL_FILES: usize = 256;
/// The most fields of an answer of `/infill` that may be named.
pub const MAX_RESPONSE_FIELDS: usize = 64;
/// The longest of their names, in bytes.
pub const MAX_RESPONSE_FIELD_BYTES: usize = 256;
/// The longest text that `/tokenize` takes, in bytes: with a token for each byte its answer is one that may be given whole.
pub const MAX_TOKENIZE_BYTES: usize = 512 * 1024;
/// The same where `with_pieces` asks for what each token stands for.
pub const MAX_TOKENIZE_PIECES_BYTES: usize = 64 * 1024;
/// The most tokens that `/detokenize` takes.
pub const MAX_DETOKENIZE_TOKENS: usize = 128 * 1024;
