//! Limits of the processes that render chat templates; what one rendering may take is in `gantry-llama`.

use std::time::Duration;

/// The most that such a process may compute for one answer: its own limit of a second is looked at where the template takes
/// memory, this one always.
pub const TEMPLATE_PROCESS_CPU: Duration = Duration::from_millis(1500);
/// And for one that may compute less than a second: half as much again, and this.
pub const TEMPLATE_PROCESS_CPU_SLACK: Duration = Duration::from_millis(50);
/// The milliseconds that a chat may compute at once. One that takes longer begins again among those that are slow, which
/// wait for each other and for nobody else.
pub const QUICK_RENDER_CPU_MS: u64 = 50;
/// And for each KiB of its messages: of short ones, five, which take published templates up to 4 ms.
pub const QUICK_RENDER_CPU_MS_PER_KIB: u64 = 4;
/// Chats of a worker that are rendered at the same time.
pub const RENDER_THREADS: usize = 2;
/// And slow ones, beside those.
pub const SLOW_RENDER_THREADS: usize = 2;
/// By how much what else computes goes before them, as `nice` counts: a busy processor gives them a quarter.
pub const SLOW_RENDER_NICENESS: i32 = 5;
/// Processes that are kept for the next chats when nobody's is rendered; slow ones have a new one each.
pub const MAX_IDLE_TEMPLATE_PROCESSES: usize = 2;
/// The longest wait for an answer, whoever else computes on the machine.
pub const TEMPLATE_ANSWER_WAIT: Duration = Duration::from_secs(15);
/// The most memory that such a process may take, in bytes: what the longest messages are good for, and itself.
pub const TEMPLATE_PROCESS_BYTES: u64 = 640 * 1024 * 1024;
/// The stack on which templates are rendered, in bytes; a template that has used it up ends with an error.
pub const TEMPLATE_STACK_BYTES: usize = 64 * 1024 * 1024;
/// The stack of a thread that hands chats to these, in bytes: the schemas of tools are gone through there, as deep as they may be.
pub const RENDER_STACK_BYTES: usize = 2 * 1024 * 1024;
/// The largest message to such a process and from it, in bytes: messages of a request, and the prompt that they become.
pub const MAX_TEMPLATE_MESSAGE_BYTES: usize = 512 * 1024 * 1024;
