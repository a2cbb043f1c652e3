//! Every limit of what a request may say that is this protocol's own. `docs/configuration.md` lists them, and a test holds the two
//! together.

/// The `max_tokens` of a request that says nothing of it.
pub const DEFAULT_GENERATE_TOKENS: u32 = 256;
/// The highest `max_tokens`; more than any model's context.
pub const MAX_GENERATE_TOKENS: u32 = 1 << 20;
/// The longest `model`, in bytes: an error repeats it.
pub const MAX_GENERATE_MODEL_BYTES: usize = 256;
/// The most messages in one chat.
pub const MAX_GENERATE_MESSAGES: usize = 4096;
