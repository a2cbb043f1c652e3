//! The process that renders a template: it does nothing else, so that it may be ended at any time.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use gantry_llama::{ChatError, ChatTemplate, end_after_cpu, exit_on_limits};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::limits::{TEMPLATE_PROCESS_BYTES, TEMPLATE_PROCESS_CPU, TEMPLATE_STACK_BYTES};
use super::wire::{Answer, Ask, receive, send};

/// Renders for the process at the other end of the socket that is this process's standard input, until that is closed.
/// What `gantry-server template` is.
///
/// # Errors
/// Standard input is no such socket, or no thread can be started.
pub fn serve_template() -> io::Result<()> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // What it dies of is told by how it ends; and without these, its other limits are still there.
    for (resource, most) in [(Resource::Data, TEMPLATE_PROCESS_BYTES), (Resource::Core, 0)] {
        let Rlimit { maximum, .. } = getrlimit(resource);
        let current = Some(maximum.map_or(most, |maximum| maximum.min(most)));
        let _ = setrlimit(resource, Rlimit { current, maximum });
    }
    exit_on_limits();
    let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(TEMPLATE_STACK_BYTES);
    let ended = thread.spawn(move || answer_all(socket))?.join();
    ended.unwrap_or_else(|_| Err(io::Error::other("rendering panicked")))
}

fn answer_all(mut socket: UnixStream) -> io::Result<()> {
    let mut template = None;
    while let Some(ask) = receive(&mut socket)? {
        end_after_cpu(Some(TEMPLATE_PROCESS_CPU));
        let answer = answer(ask, &mut template);
        end_after_cpu(None);
        send(&mut socket, &answer)?;
    }
    Ok(())
}

fn answer(ask: Ask, template: &mut Option<ChatTemplate>) -> Answer {
    match (ask, &template) {
        (Ask::Parse(source), _) => Answer::Parsed(ChatTemplate::parse(&source).map(|parsed| {
            let knows_tools = parsed.knows_tools();
            *template = Some(parsed);
            knows_tools
        })),
        (Ask::Render { messages, tools }, Some(template)) => {
            Answer::Rendered(template.render_json(&messages, tools.as_deref()))
        }
        (Ask::Render { .. }, None) => {
            Answer::Rendered(Err(ChatError::Template(String::from("there is no template to render with"))))
        }
    }
}
