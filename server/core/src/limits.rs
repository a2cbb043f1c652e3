//! Every limit of what a request may ask of a model, whatever protocol it comes by. `docs/configuration.md` lists them, and a
//! test holds the two together.
//!
//! Absent: what a protocol allows less of, which is its own, and what only a model knows (its context, its vocabulary).

/// The most stop strings one request may name.
pub const MAX_STOP_STRINGS: usize = 16;
/// The longest stop string, in bytes. Up to this much generated text may be held back while a match is possible.
pub const MAX_STOP_BYTES: usize = 256;
/// The most tokens that one request may name to end its answer.
pub const MAX_STOP_TOKENS: usize = 64;
/// The highest temperature accepted.
pub const MAX_TEMPERATURE: f32 = 5.0;
/// The most tokens whose log-probabilities are reported beside the chosen one's, as in `OpenAI`'s API.
pub const MAX_TOP_LOGPROBS: u32 = 20;
/// The most log-probabilities that may be told of one prompt, as answers have room for them: each of its tokens counts as two, and
/// each of the likeliest in its place as one.
pub const MAX_PROMPT_LOGPROBS: usize = 65_536;
/// The most tokens with a bias.
pub const MAX_LOGIT_BIASES: usize = 1024;
/// The largest bias either way, as in `OpenAI`'s API; minus infinity bans a token.
pub const MAX_LOGIT_BIAS: f32 = 100.0;
/// The most tokens that the penalties look back at.
pub const MAX_PENALTY_LAST_N: u32 = 1 << 20;
/// The highest repetition penalty.
pub const MAX_REPEAT_PENALTY: f32 = 100.0;
/// The largest frequency and presence penalty either way, as in `OpenAI`'s API.
pub const MAX_PENALTY: f32 = 2.0;
/// The highest multiplier and base of the DRY penalty.
pub const MAX_DRY_FACTOR: f32 = 100.0;
/// The longest repetition that the DRY penalty may leave free.
pub const MAX_DRY_ALLOWED_LENGTH: u32 = 1024;
/// The most strings that end a repetition for the DRY penalty.
pub const MAX_DRY_BREAKERS: usize = 32;
/// The longest of them, in bytes: where llama.cpp cuts them.
pub const MAX_DRY_BREAKER_BYTES: usize = 40;
/// The longest grammar or JSON schema, in bytes; what else bounds them stands below.
pub const MAX_GRAMMAR_BYTES: usize = 128 * 1024;
/// The longest regular expression, in bytes.
pub const MAX_REGEX_BYTES: usize = 4096;
/// The most prompt text one request may carry, in bytes; a longer one is refused before it is tokenised.
pub const MAX_PROMPT_BYTES: usize = 8 * 1024 * 1024;
/// The longest text that a request may be told of its prompt, in bytes: a rendered chat, or what tokens stand for. However it is
/// escaped, its answer is one that may be given whole.
pub const MAX_SHOWN_TEXT_BYTES: usize = 1024 * 1024;
/// The most texts in one pooled request.
pub const MAX_POOLED_INPUTS: usize = 2048;
/// The longest time that a request may say it is ready to wait for its first token: an hour.
pub const MAX_QUEUE_TIMEOUT_MS: u64 = 3_600_000;
/// The most tools that a chat may bring.
pub const MAX_TOOLS: usize = 128;
/// The most text that they may have together, in bytes: names, descriptions and schemas.
pub const MAX_TOOLS_BYTES: usize = 256 * 1024;
/// The longest name of a tool, in bytes.
pub const MAX_TOOL_NAME_BYTES: usize = 64;
/// The most further variables that a chat may give its template.
pub const MAX_TEMPLATE_VARIABLES: usize = 64;
/// The most text that they may have together, in bytes, as JSON.
pub const MAX_TEMPLATE_VARIABLES_BYTES: usize = 64 * 1024;
