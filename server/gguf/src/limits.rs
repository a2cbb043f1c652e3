//! Every limit of the reader, in one place. A file past one of them is refused by name, never read in part.
//!
//! The figures leave at least four times the room that the largest published models need; what they protect is
//! the memory and the time of a process that reads a header which somebody else wrote.

/// Bytes from the start of the file to the end of the tensor table.
///
/// Tokenizers of 260,000 tokens with their merges and an embedded `tokenizer.json` come to about 35 MiB.
pub const MAX_HEADER_BYTES: u64 = 256 * 1024 * 1024;
/// Metadata keys in one file. Real models have 20 to 80.
pub const MAX_KEYS: u64 = 16_384;
/// Tensors in one file. The largest published models have about 2,500.
pub const MAX_TENSORS: u64 = 65_536;
/// Files that one model may consist of. The largest published models have about 200.
pub const MAX_SPLITS: u64 = 1_024;
/// Bytes of one metadata key: the most that the format allows. No known key passes 100.
pub const MAX_KEY_BYTES: u64 = 65_535;
/// Bytes of all metadata keys together. Those of real models come to 4 KiB.
pub const MAX_ALL_KEY_BYTES: u64 = 16 * 1024 * 1024;
/// Bytes of one string value: chat templates, licences, an embedded `tokenizer.json`.
pub const MAX_STRING_BYTES: u64 = 64 * 1024 * 1024;
/// String values up to this size are kept for the summary; of longer ones only the length is.
pub const MAX_KEPT_STRING_BYTES: u64 = 4_096;
/// Elements of one metadata array. Merges of the largest tokenizers are about 500,000.
pub const MAX_ARRAY_ELEMENTS: u64 = 16 * 1024 * 1024;
/// Tokens of the vocabulary. The largest known vocabularies have about a million.
pub const MAX_VOCABULARY: u64 = 2 * 1024 * 1024;
/// Bytes of one token's text.
pub const MAX_TOKEN_BYTES: u64 = 65_536;
/// Bytes of the text of one control token, which is looked for in all that is said. Those of real models have less than 40.
pub const MAX_CONTROL_TOKEN_BYTES: u64 = 256;
/// Bytes of the texts of all control tokens together. Those of real models come to 100 KiB.
pub const MAX_ALL_CONTROL_TOKEN_BYTES: u64 = 512 * 1024;
/// Merges of a tokenizer. The largest known have about 500,000.
pub const MAX_MERGES: u64 = 4 * 1024 * 1024;
/// Bytes of one merge, which names two tokens.
pub const MAX_MERGE_BYTES: u64 = 131_072;
/// A tensor's name must be shorter than this (ggml's `GGML_MAX_NAME`, which counts the closing zero).
pub const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Dimensions of one tensor (ggml's `GGML_MAX_DIMS`).
pub const MAX_DIMENSIONS: u32 = 4;
/// Alignment used when the file does not state one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Smallest alignment that the format allows.
pub const MIN_ALIGNMENT: u64 = 8;
/// Largest alignment accepted; more would only hide bytes between tensors.
pub const MAX_ALIGNMENT: u64 = 1024 * 1024;
/// Layers (llama.cpp's `LLAMA_MAX_LAYERS`; it aborts the process above that).
pub const MAX_LAYERS: u32 = 512;
/// Experts (llama.cpp's `LLAMA_MAX_EXPERTS`; it aborts the process above that).
pub const MAX_EXPERTS: u32 = 1_024;
/// Attention heads of one layer.
pub const MAX_HEADS: u32 = 65_536;
/// Width of an embedding, an attention head or a feed-forward layer.
pub const MAX_WIDTH: u32 = 16 * 1024 * 1024;
/// Context length: positions are signed 32-bit numbers in llama.cpp.
pub const MAX_CONTEXT_LENGTH: u32 = i32::MAX as u32;
/// Places of each tensor that are looked at for numbers that are not finite: all of it, where it has fewer.
pub const SAMPLE_PIECES: u64 = 16;
/// Bytes that are read at each of them; of a type with longer blocks, one block.
pub const SAMPLE_PIECE_BYTES: u64 = 8 * 1024;
/// Bytes of weights that are read at a time where all of them are.
pub(crate) const WEIGHTS_PIECE_BYTES: u64 = 1024 * 1024;
/// Bytes of a block that is looked for a second time where all weights are read: downloads write pieces of many of them.
pub(crate) const REPEAT_BLOCK_BYTES: usize = 64 * 1024;
/// Blocks that are remembered while all weights are read: those of 64 GiB.
pub(crate) const MAX_REMEMBERED_BLOCKS: usize = 1 << 20;
/// Findings of one file that are kept; the rest are counted. A report of more is read by nobody.
pub const MAX_FINDINGS: usize = 256;
/// Bytes of the reader's own buffer.
pub(crate) const READ_BUFFER_BYTES: usize = 64 * 1024;
/// Characters of a name from the file that an error message repeats.
pub(crate) const MAX_NAME_IN_MESSAGE: usize = 80;
