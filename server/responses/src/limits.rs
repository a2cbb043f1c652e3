//! Every limit of what a request may say that is this protocol's own. `docs/configuration.md` lists them, and a test holds the two
//! together.

/// The longest `model`, in bytes: an error repeats it.
pub const MAX_RESPONSES_MODEL_BYTES: usize = 256;
/// The most items in `input`, those of the responses before included.
pub const MAX_RESPONSES_ITEMS: usize = 4096;
/// The largest input of a response that is kept, in bytes, and with it the longest chain: that of the responses before is part of it.
pub const MAX_STORED_INPUT_BYTES: usize = 8 * 1024 * 1024;
/// The most stored responses whose items one request refers to.
pub const MAX_RESPONSES_REFERRED: usize = 32;
/// Items on a page of `input_items`, unless it is asked for more or fewer.
pub const RESPONSES_PAGE: usize = 20;
/// The most items on a page of `input_items`.
pub const MAX_RESPONSES_PAGE: usize = 100;
/// The most parts in the content of one item.
pub const MAX_RESPONSES_PARTS: usize = 1024;
/// The highest `max_output_tokens`; more than any model's context.
pub const MAX_RESPONSES_TOKENS: u32 = 1 << 20;
/// The longest JSON schema of a `text.format`, in bytes.
pub const MAX_RESPONSES_SCHEMA_BYTES: usize = 64 * 1024;
/// The most bytes of `instructions` that an answer repeats, and of `tools`; of longer ones it says nothing.
pub const MAX_RESPONSES_REPEATED_BYTES: usize = 64 * 1024;
/// The most names in `metadata`, which the answer repeats.
pub const MAX_RESPONSES_METADATA: usize = 16;
/// The longest name and the longest value in `metadata` together, in bytes.
pub const MAX_RESPONSES_METADATA_BYTES: usize = 576;
