//! Every limit of what is tokenised, by name. `docs/configuration.md` lists them, and a test holds the two together.

/// The longest run of characters that a pre-tokeniser matches by recursion, as those of gpt-oss, Mistral and `DeepSeek`
/// do: letters, digits, signs or spaces with the run that follows; for `BLOOM`'s kind and EXAONE's a line. A text with a
/// longer one is refused. Pre-tokenisers that do not recurse (Llama 3's, Qwen's, Gemma's) have no such limit.
pub const MAX_RUN_CHARS: usize = 128 * 1024;
/// Bytes of stack for each character of such a run. libstdc++'s regular expressions take 320 on x86-64.
pub const RUN_STACK_BYTES_PER_CHAR: usize = 512;
/// The longest such run that is tokenised on the stack of the thread that asks; for a longer one there is a thread with a
/// stack of the length that it needs, whose memory is given back with it.
pub const SHORT_RUN_CHARS: usize = 1024;
/// What runs of digits and of spaces may cost in a text whose pre-tokeniser takes quadratic time for them (SuperBPE's and
/// DeepSeek-LLM's, and Jais 2's with its many lengths of spaces): the sum of their squared lengths, each step of some 60 ns. A single run may have 4,096 characters.
pub const MAX_RUN_WORK: u64 = 16 * 1024 * 1024;
/// The most values of JSON in the arguments of a chat's calls and in what its tools returned, together: each takes some hundred
/// bytes where it is gone through, and may be two in the text.
pub const MAX_WRITTEN_JSON_VALUES: usize = 64 * 1024;
/// The deepest nesting of JSON in the arguments of a call and in what a tool returned, which templates may go through level
/// by level.
pub const MAX_JSON_NESTING: usize = 128;
