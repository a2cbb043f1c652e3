//! Limits of the processes that render chat templates; what one rendering may take is in `gantry-llama`.

use std::time::Duration;

/// The most that such a process may compute for one answer: its own limit of a second is looked at where the template takes
/// memory, this one always.
pub const TEMPLATE_PROCESS_CPU: Duration = Duration::from_millis(1500);
/// The longest wait for an answer, whoever else computes on the machine.
pub const TEMPLATE_ANSWER_WAIT: Duration = Duration::from_secs(15);
/// The most memory that such a process may take, in bytes: what the longest messages are good for, and itself.
pub const TEMPLATE_PROCESS_BYTES: u64 = 640 * 1024 * 1024;
/// The stack on which templates are rendered, in bytes; a template that has used it up ends with an error.
pub const TEMPLATE_STACK_BYTES: usize = 64 * 1024 * 1024;
/// The largest message to such a process and from it, in bytes: messages of a request, and the prompt that they become.
pub const MAX_TEMPLATE_MESSAGE_BYTES: usize = 512 * 1024 * 1024;
