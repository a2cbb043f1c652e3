//! Every limit of what a request may say that is this protocol's own. `docs/configuration.md` lists them, and a test holds the two
//! together.

/// The longest `model`, in bytes: an error repeats it.
pub const MAX_MESSAGES_MODEL_BYTES: usize = 256;
/// The most messages in one request.
pub const MAX_MESSAGES_TURNS: usize = 4096;
/// The most blocks in one message, in the system prompt, and in what a tool returned.
pub const MAX_MESSAGES_BLOCKS: usize = 1024;
/// The highest `max_tokens`; more than any model's context.
pub const MAX_MESSAGES_TOKENS: u32 = 1 << 20;
