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
/// Processes that are kept for the next chats when nobody's is rendered, as many as may render at once; slow ones have a new one
/// each.
pub const MAX_IDLE_TEMPLATE_PROCESSES: usize = 2;
/// The longest wait for an answer, whoever else computes on the machine.
pub const TEMPLATE_ANSWER_WAIT: Duration = Duration::from_secs(15);
/// The most memory that a process may take that renders chats at once, in bytes. One with a few turns takes 2 MiB, with 300 turns
/// of 200 bytes 4, with 64 tools 7.
pub const TEMPLATE_PROCESS_MIN_BYTES: u64 = 20 * 1024 * 1024;
/// The longest chat that one of those renders, in bytes of JSON. A longer one is among the slow ones from the beginning.
pub const QUICK_RENDER_BYTES: usize = 256 * 1024;
/// The most memory that a process may take that renders a slow chat, in bytes: what 8 MiB of many short messages are good for.
/// Less where there is less memory, but no less than for those at once. A long text takes 16 bytes for each of its own, one of
/// short messages up to 100.
pub const TEMPLATE_PROCESS_MAX_BYTES: u64 = 352 * 1024 * 1024;
/// What of it is for the process itself, beside its stack, in bytes.
pub const TEMPLATE_PROCESS_BASE_BYTES: u64 = 4 * 1024 * 1024;
/// And for each byte of a chat, which is there as a message, as text, as JSON and in the answer.
pub const TEMPLATE_PROCESS_BYTES_PER_BYTE: u64 = 4;
/// The stack on which templates are rendered, in bytes; a template that has used it up ends with an error.
pub const TEMPLATE_STACK_BYTES: usize = 8 * 1024 * 1024;
/// The stack of a thread that hands chats to these, in bytes: the schemas of tools are gone through there, as deep as they may be.
pub const RENDER_STACK_BYTES: usize = 2 * 1024 * 1024;
/// The largest message to such a process and from it, in bytes: messages of a request, and the prompt that they become.
pub const MAX_TEMPLATE_MESSAGE_BYTES: usize = 512 * 1024 * 1024;

/// What a template may take of a process that may take so much, for a chat of so many bytes: what the process, its stack and the
/// chat leave, and of that three quarters, since small blocks take a third more than was asked for.
#[must_use]
pub fn template_bytes(process_bytes: u64, chat_bytes: usize) -> u64 {
    let own_bytes = TEMPLATE_PROCESS_BASE_BYTES
        .saturating_add(TEMPLATE_STACK_BYTES as u64)
        .saturating_add((chat_bytes as u64).saturating_mul(TEMPLATE_PROCESS_BYTES_PER_BYTE));
    process_bytes.saturating_sub(own_bytes) / 4 * 3
}

/// The most that the processes of one worker take together, where one that renders a slow chat may take so much.
#[must_use]
pub fn processes_bytes(slow_bytes: u64) -> u64 {
    (RENDER_THREADS as u64)
        .saturating_mul(TEMPLATE_PROCESS_MIN_BYTES)
        .saturating_add((SLOW_RENDER_THREADS as u64).saturating_mul(slow_bytes))
}
