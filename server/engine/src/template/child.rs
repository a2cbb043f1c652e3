//! The process that renders a template: it does nothing else, so that it may be ended at any time.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use gantry_llama::{ChatError, ChatTemplate, end_after_cpu, exit_on_limits};
use rustix::process::{Resource, Rlimit, getrlimit, nice, setrlimit};

use super::limits::{
    SLOW_RENDER_NICENESS, TEMPLATE_PROCESS_CPU, TEMPLATE_PROCESS_CPU_SLACK, TEMPLATE_STACK_BYTES, template_bytes,
};
use super::wire::{Answer, Ask, Knows, receive, send};

/// Renders for the process at the other end of the socket that is this process's standard input, until that is closed.
/// What `gantry-server template` is.
///
/// # Errors
/// Standard input is no such socket, or no thread can be started.
pub fn serve_template() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    limit(Resource::Core, 0);
    exit_on_limits();
    let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(TEMPLATE_STACK_BYTES);
    let ended = thread.spawn(move || answer_all(socket))?.join();
    ended.unwrap_or_else(|_| Err(io::Error::other("rendering panicked")))
}

/// Bounds a resource of this process. What it dies of is told by how it ends; and without this, its other limits are still there.
fn limit(resource: Resource, most: u64) {
    let Rlimit { maximum, .. } = getrlimit(resource);
    let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
    let _ = setrlimit(resource, Rlimit { current, maximum });
}

fn answer_all(mut socket: UnixStream) -> io::Result<()> {
    let (mut template, mut most_bytes) = (None, 0);
    while let Some(ask) = receive(&mut socket)? {
        end_after_cpu(Some(most_cpu(&ask)));
        let answer = answer(ask, &mut template, &mut most_bytes);
        end_after_cpu(None);
        send(&mut socket, &answer)?;
    }
    Ok(())
}

/// What the process may compute for an answer.
fn most_cpu(ask: &Ask) -> Duration {
    match ask {
        Ask::Parse { .. } => TEMPLATE_PROCESS_CPU,
        Ask::Render { cpu_ms, .. } => {
            let most = Duration::from_millis(*cpu_ms);
            (most + most / 2).max(most + TEMPLATE_PROCESS_CPU_SLACK).min(TEMPLATE_PROCESS_CPU)
        }
    }
}

fn answer(ask: Ask, template: &mut Option<ChatTemplate>, process_bytes: &mut u64) -> Answer {
    match (ask, &template) {
        (Ask::Parse { source, aside, most_bytes }, _) => {
            *process_bytes = most_bytes;
            limit(Resource::Data, most_bytes);
            if aside {
                // Of this thread, which renders. Where it is not allowed, it competes like any other.
                let _ = nice(SLOW_RENDER_NICENESS);
            }
            Answer::Parsed(ChatTemplate::parse_within(&source, template_bytes(most_bytes, source.text.len())).map(
                |parsed| {
                    let (tools, thinking) = (parsed.knows_tools(), parsed.thinks());
                    let shown_calls = [false, true].map(|are_offered| parsed.shown_calls(are_offered));
                    let knows = Knows { tools, thinking, shown_calls };
                    *template = Some(parsed);
                    knows
                },
            ))
        }
        (Ask::Render { chat, cpu_ms }, Some(template)) => {
            let most_bytes = template_bytes(*process_bytes, chat.len());
            Answer::Rendered(template.render_json(&chat, cpu_ms, most_bytes))
        }
        (Ask::Render { .. }, None) => {
            Answer::Rendered(Err(ChatError::Template(String::from("there is no template to render with"))))
        }
    }
}
