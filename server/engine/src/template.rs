//! A model's chat template, rendered where nothing else can be harmed, and looked at before anyone is served by it.
//!
//! A template is a program that came with a file. What it takes is bounded where it allocates ([`gantry_llama`]), which
//! says the line at fault; what it does besides, or a bug in what runs it, ends only with the process, so that it is run in
//! one of its own ([`EngineConfig::template_program`](crate::EngineConfig::template_program)). Absent: which messages are
//! rendered, and what becomes of the prompt.

mod child;
pub mod limits;
mod process;
mod wire;

use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gantry_llama::{ChatError, ChatPrompt, ChatTemplate, TemplateSource};
use serde::{Deserialize, Serialize};

use crate::error::LoadError;
use crate::params::{EngineConfig, MAX_PROMPT_BYTES};
pub use child::serve_template;
use limits::TEMPLATE_STACK_BYTES;
use process::Processes;

/// Renders a template.
pub(crate) enum Renderer {
    /// In this process, where no program is named.
    Here(Box<ChatTemplate>),
    /// In others.
    Apart(Processes),
}

/// What is known of a template that serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateReport {
    /// Kinds of chats that it renders, in words.
    pub renders: Vec<String>,
    /// Kinds that it refuses itself, by `raise_exception`.
    pub refuses: Vec<String>,
    /// How long the slowest took.
    pub slowest: Duration,
}

/// Kinds of chats that a template is tried with, by name; the last one is with tools.
const TRIALS: [(&str, &str); 4] = [
    ("a turn", r#"[{"role":"user","content":"Hello"}]"#),
    ("a system text", r#"[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello"}]"#),
    (
        "three turns",
        r#"[{"role":"user","content":"Hello"},{"role":"assistant","content":"Hi."},{"role":"user","content":"Bye"}]"#,
    ),
    ("tools", r#"[{"role":"user","content":"Hello"}]"#),
];
const TOOLS: &str = r#"[{"type":"function","function":{"name":"look","description":"Looks.","parameters":{"type":"object","properties":{"where":{"type":"string","description":"Where."}},"required":["where"]}}}]"#;

impl Renderer {
    /// Makes a template ready; see [`EngineConfig::template_program`](crate::EngineConfig::template_program).
    pub(crate) fn start(program: Option<&Path>, source: TemplateSource) -> Result<Self, ChatError> {
        match program {
            Some(program) => Processes::start(program, source).map(Self::Apart),
            None => ChatTemplate::parse(&source).map(|template| Self::Here(Box::new(template))),
        }
    }

    /// The prompt of a chat with the assistant's turn opened.
    pub(crate) fn render(&self, messages: &str, tools: Option<&str>) -> Result<ChatPrompt, ChatError> {
        let rendered = match self {
            Self::Here(template) => template.render_json(messages, tools),
            Self::Apart(processes) => processes.render(messages, tools),
        };
        ChatPrompt::from_json(&rendered?)
    }

    fn knows_tools(&self) -> bool {
        match self {
            Self::Here(template) => template.knows_tools(),
            Self::Apart(processes) => processes.knows_tools(),
        }
    }

    /// Tries it with chats of each kind. It must render a turn, and of the others whatever it does not refuse itself: many
    /// take no tools, and a system text that is refused llama.cpp puts before the first turn instead.
    pub(crate) fn try_out(&self) -> Result<TemplateReport, ChatError> {
        let mut report = TemplateReport { renders: Vec::new(), refuses: Vec::new(), slowest: Duration::ZERO };
        for (i, (kind, messages)) in TRIALS.iter().enumerate() {
            let tools = (i + 1 == TRIALS.len()).then_some(TOOLS);
            if tools.is_some() && !self.knows_tools() {
                continue;
            }
            let begun = Instant::now();
            match self.render(messages, tools) {
                Ok(chat) => judge(kind, &chat.prompt)?,
                Err(ChatError::TemplateRefused(_)) if i > 0 => {
                    report.refuses.push((*kind).to_owned());
                    continue;
                }
                Err(error) => return Err(error),
            }
            report.slowest = report.slowest.max(begun.elapsed());
            report.renders.push((*kind).to_owned());
        }
        Ok(report)
    }
}

/// A template that is tried while its model goes on loading.
pub(crate) struct Trial(JoinHandle<Result<(Renderer, TemplateReport), ChatError>>);

impl Trial {
    pub(crate) fn begin(config: &EngineConfig, source: TemplateSource) -> Result<Self, LoadError> {
        let program = config.template_program.clone();
        let thread = std::thread::Builder::new().name("gantry-template".to_owned()).stack_size(TEMPLATE_STACK_BYTES);
        let trial = thread.spawn(move || {
            let renderer = Renderer::start(program.as_deref(), source)?;
            let report = renderer.try_out()?;
            Ok((renderer, report))
        });
        trial.map(Self).map_err(|e| LoadError::Thread(e.to_string()))
    }

    /// Waits for it.
    pub(crate) fn end(self) -> Result<(Renderer, TemplateReport), LoadError> {
        let tried = self.0.join();
        tried.map_err(|_| LoadError::Thread(String::from("trying the template panicked")))?.map_err(LoadError::Template)
    }
}

/// Whether anything can be made of a prompt.
fn judge(kind: &str, prompt: &str) -> Result<(), ChatError> {
    if prompt.is_empty() {
        return Err(ChatError::Template(format!("it makes an empty prompt of {kind}")));
    }
    if prompt.len() > MAX_PROMPT_BYTES {
        let bytes = prompt.len();
        return Err(ChatError::Template(format!("it makes {bytes} bytes of {kind}, and {MAX_PROMPT_BYTES} may be")));
    }
    Ok(())
}

/// Whether chats can be rendered with a template, by the program that is called with `template`, and in this process where
/// there is none: what a load asks before it serves.
///
/// # Errors
/// What is wrong with it, with the line.
pub fn check_template(program: Option<&Path>, source: TemplateSource) -> Result<TemplateReport, ChatError> {
    Renderer::start(program, source)?.try_out()
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
