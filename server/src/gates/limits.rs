//! Every limit of the gates, by name.

use std::time::Duration;

/// Of the memory that a standalone server's workers take, the share that must be left besides.
pub const HEADROOM_RATIO: f64 = 0.05;
/// How long a file's weights are looked at before they are loaded: what was not reached by then is left out.
pub const WEIGHTS_LIMIT: Duration = Duration::from_secs(2);
/// How long the trial load of `gantry-server validate` may take.
pub const TRIAL_LOAD_LIMIT: Duration = Duration::from_secs(900);
/// How long a model that `gantry-server check` judges may stand still in a gate, without a percent, an answer or a verdict.
pub const CHECK_STANDSTILL_LIMIT: Duration = Duration::from_secs(900);
/// Golden prompts in one ConfigMap.
pub const MAX_PROMPTS: usize = 2000;
/// Bytes of one line of `prompts.jsonl`.
pub const MAX_PROMPT_LINE_BYTES: usize = 64 * 1024;
/// Tokens of an answer where the line does not say.
pub const DEFAULT_PROMPT_MAX_TOKENS: u32 = 256;
/// The highest `max_tokens` of a line.
pub const MAX_PROMPT_MAX_TOKENS: u32 = 4096;
/// Golden prompts that are asked at the same time, where the version decodes as many.
pub const PROMPTS_AT_ONCE: usize = 8;
/// How long one answer may take.
pub const PROMPT_LIMIT: Duration = Duration::from_secs(300);
/// Tokens of an answer that two versions are compared by.
pub const DRIFT_ANSWER_TOKENS: u32 = 64;
/// Tokens of answers to golden prompts that are enough to compare two versions by; where there are fewer, the questions of this
/// release are asked as well.
pub const DRIFT_ENOUGH_TOKENS: f64 = 1_000.0;
/// Golden prompts by which two versions are compared at most, the first ones.
pub const MAX_DRIFT_QUESTIONS: usize = 256;
/// Answers by which two versions are compared at least: of fewer the error of a mean is not known.
pub const MIN_DRIFT_ANSWERS: usize = 12;
/// Tokens that two versions are compared by at most.
pub const MAX_DRIFT_TOKENS: f64 = 10_000.0;
/// Questions by which it is compared how fast two versions are.
pub const PERFORMANCE_QUESTIONS: usize = 16;
/// Tokens of each answer to them.
pub const PERFORMANCE_ANSWER_TOKENS: u32 = 48;
/// Answers of both that are needed: of fewer the error of a mean is not known.
pub const MIN_PERFORMANCE_ANSWERS: usize = 6;
/// Live requests by which the shadow gate judges at least: of fewer the error of a mean is not known.
pub const MIN_SHADOW_ANSWERS: usize = 12;
/// How long both versions may take for one live request; it is left out then.
pub const SHADOW_REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// How long the shadow gate waits until no user waits for the active version before it leaves a live request out.
pub const SHADOW_QUEUE_LIMIT: Duration = Duration::from_secs(1);
/// The wait between two looks at who waits.
pub const SHADOW_QUEUE_LOOK: Duration = Duration::from_millis(5);
/// Parts of its time in which the shadow gate says how far it is: each is a write.
pub const SHADOW_STEPS: u32 = 20;
/// How long the active version may not answer a question, because users come first or it starts again, before a candidate that is
/// compared with it says that it waits for it.
pub const REFERENCE_PATIENCE: Duration = Duration::from_secs(60);
/// The wait before it is asked again.
pub const REFERENCE_RETRY: Duration = Duration::from_secs(1);
/// Characters of a prompt or an answer that a message quotes.
pub const MAX_QUOTED_CHARS: usize = 80;
/// The wait before an object that cannot be read is asked for again; it doubles.
pub const OBJECT_RETRY_MIN: Duration = Duration::from_secs(1);
/// The longest such wait.
pub const OBJECT_RETRY_MAX: Duration = Duration::from_secs(15);
/// Every sequence has cells for the whole trained context, where nobody says how many, if the model then takes no more than
/// this part of the memory: one part in so many. A version that is to replace it fits beside it, and so does the rest of
/// the machine.
pub const CONTEXT_MEMORY_DIVISOR: u64 = 4;
/// The most tokens of context that each request gets where nobody says how many, whatever the file says of the training.
pub const MAX_OPEN_CONTEXT_TOKENS: u32 = 131_072;
/// The smallest pool of cells that is chosen because no larger one fits.
pub const MIN_POOL_TOKENS: u32 = 512;
/// How long a pod that has to bring the active version back waits for a source or an object that is away before it says
/// so, and lets a candidate go first; then it tries again. So long a candidate waits for the active version before it says so, too.
pub const RESTORE_PATIENCE: Duration = Duration::from_secs(5);
