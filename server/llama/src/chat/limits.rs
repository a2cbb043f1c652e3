//! What a chat template may take. It is a program that came with a file: nobody may be made to wait for it, or to share its
//! memory.

/// The most milliseconds that rendering a chat may compute. Published ones take 10 to 70 for each hundred messages.
pub const TEMPLATE_CPU_MS: u64 = 1000;
/// The most milliseconds of computing after which it is not tried any longer what a template shows of a call of a tool.
pub(super) const TRY_CALLS_CPU_MS: u64 = 100;
/// The most memory that rendering a chat may take, in bytes, beside what the messages are good for.
pub const TEMPLATE_MEMORY_BYTES: u64 = 64 * 1024 * 1024;
/// And for each byte of the messages: they are there as text, as JSON, as the template's values and in the prompt.
pub const TEMPLATE_MEMORY_PER_INPUT_BYTE: u64 = 32;
/// The longest template, in bytes. The longest published ones have about 20,000.
pub const MAX_TEMPLATE_BYTES: usize = 1024 * 1024;
/// The deepest nesting of a template's blocks, the branches of an `if` counted, and of brackets in one of its expressions.
pub const MAX_TEMPLATE_NESTING: u64 = 128;
/// The most words and signs in one expression or statement of a template.
pub const MAX_TEMPLATE_EXPRESSION_PARTS: u64 = 4096;
/// The most milliseconds that one look at an answer may compute.
pub(super) const PARSE_CPU_MS: u64 = 20;
/// The most memory that it may take, in bytes, beside what the answer is good for.
pub(super) const PARSE_MEMORY_BYTES: u64 = 64 * 1024 * 1024;
/// And for each byte of the answer.
pub(super) const PARSE_MEMORY_PER_BYTE: u64 = 256;
/// Bytes of a template's line that a message quotes.
pub(super) const MAX_QUOTED_BYTES: usize = 120;
/// The most of what a template says of an error that is told, in bytes.
pub(super) const MAX_SAID_BYTES: usize = 4096;
