//! What following a JSON schema may cost. `docs/configuration.md` lists it, and a test holds the two together.

use std::time::Duration;

/// The deepest nesting of a schema's JSON.
pub const MAX_SCHEMA_DEPTH: usize = 64;
/// The most values of a schema's JSON: objects, arrays, strings and the rest.
pub const MAX_SCHEMA_VALUES: usize = 16_384;
/// The most properties that one object of a schema names: each that may be left out is one more place to stand at.
pub const MAX_SCHEMA_PROPERTIES: usize = 500;
/// The same where the object says how many there are, which takes a rule for each of them and each other one.
pub const MAX_COUNTED_PROPERTIES: usize = 64;
/// The longest pattern of a schema, in bytes.
pub const MAX_SCHEMA_PATTERN_BYTES: usize = 4096;
/// The largest `multipleOf` without its decimal point, and the largest that those of one schema may make together: it is
/// followed by counting remainders.
pub const MAX_SCHEMA_MULTIPLE: u64 = 50_000;
/// The most symbols that a schema may become.
pub const MAX_SCHEMA_SYMBOLS: usize = 200_000;
/// What building the expressions for a schema's strings and numbers may cost, in expressions: 20 µs for each thousand.
pub const MAX_SCHEMA_EXPRESSIONS: u64 = 1_000_000;
/// The stack that a schema is compiled on, in bytes: definitions that refer to each other in a chain are followed by
/// recursion. Pages that are not used take no memory.
pub const SCHEMA_STACK_BYTES: usize = 64 * 1024 * 1024;
/// How long compiling a schema may take; it is given up then.
pub const MAX_SCHEMA_COMPILE: Duration = Duration::from_secs(2);
/// The most schemas that are compiled at once, those that were given up among them; past that a request is told to come
/// later.
pub const MAX_SCHEMAS_COMPILING: usize = 4;
/// What one token may cost in expressions made for it.
pub const MAX_STEP_EXPRESSIONS: u64 = 100_000;
/// What one token may cost in places in the schema that are looked at.
pub const MAX_STEP_ITEMS: usize = 50_000;
/// The most places in a schema that a text may stand at, at once: four for each of `MAX_SCHEMA_PROPERTIES` that may all be left out,
/// and what is around them.
pub const MAX_ROW_ITEMS: usize = 2200;
/// What one token may cost in time on a processor, whatever it is spent on, as the kernel counts it: by its ticks.
pub const MAX_STEP_TIME: Duration = Duration::from_millis(5);
/// States that the expressions of one answer may have been in; one takes about 1 KiB. Each character of a string whose
/// length is bounded is one.
pub const MAX_SCHEMA_STATES: usize = 32_768;
/// Tokens of white space that may stand between a thought and an answer that is bound: it begins after them.
pub const MAX_WHITE_SPACE_TOKENS: u32 = 8;
/// A token that has more bytes cannot be part of an answer that follows a schema.
pub const MAX_SCHEMA_TOKEN_BYTES: usize = 512;
