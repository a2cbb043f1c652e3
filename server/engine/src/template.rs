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
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gantry_llama::template_limits::TEMPLATE_CPU_MS;
use gantry_llama::{
    ChatError, ChatPrompt, ChatTemplate, Model, SAMPLE_CHATS, SAMPLE_WORD, SampleChat, ShownCalls, SpecialTokens,
    TemplateLimit, TemplateSource, says_sample_word,
};
use serde::{Deserialize, Serialize};

use crate::backend::{Pace, Token};
use crate::error::LoadError;
use crate::params::{EngineConfig, MAX_PROMPT_BYTES};
pub use child::serve_template;
use limits::{
    QUICK_RENDER_BYTES, QUICK_RENDER_CPU_MS, QUICK_RENDER_CPU_MS_PER_KIB, TEMPLATE_PROCESS_MAX_BYTES,
    TEMPLATE_PROCESS_MIN_BYTES, TEMPLATE_STACK_BYTES,
};
use process::Processes;

/// Renders a template.
pub(crate) enum Renderer {
    /// In this process, where no program is named.
    Here(Box<ChatTemplate>),
    /// In others.
    Apart(Processes),
}

/// What rendering a chat may take of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Allowance {
    cpu_ms: u64,
    /// Behind all else that computes.
    aside: bool,
}

impl Allowance {
    /// Of what is rendered before anyone is served.
    const TRIED: Self = Self { cpu_ms: TEMPLATE_CPU_MS, aside: false };

    fn of(pace: Pace, message_bytes: usize) -> Self {
        match pace {
            Pace::Full => Self { cpu_ms: TEMPLATE_CPU_MS, aside: true },
            Pace::Quick => {
                let per_length = QUICK_RENDER_CPU_MS_PER_KIB.saturating_mul((message_bytes / 1024) as u64);
                Self { cpu_ms: QUICK_RENDER_CPU_MS.saturating_add(per_length).min(TEMPLATE_CPU_MS), aside: false }
            }
        }
    }
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
    /// Tokens of the prompt that it makes of one word; 0 where no model was at hand.
    pub shortest_tokens: u32,
}

impl TemplateReport {
    /// Whether it shows tools to the model.
    #[must_use]
    pub fn takes_tools(&self) -> bool {
        let mut with_tools = SAMPLE_CHATS.iter().filter(|sample| !sample.tools.is_empty());
        with_tools.all(|sample| self.renders.iter().any(|kind| kind == sample.kind))
    }
}

impl Renderer {
    /// Makes a template ready; see [`EngineConfig::template_program`](crate::EngineConfig::template_program) and
    /// [`EngineConfig::template_bytes`](crate::EngineConfig::template_bytes).
    pub(crate) fn start(
        program: Option<&Path>,
        source: TemplateSource,
        slow_bytes: Option<u64>,
    ) -> Result<Self, ChatError> {
        let slow_bytes = slow_bytes.unwrap_or(u64::MAX).clamp(TEMPLATE_PROCESS_MIN_BYTES, TEMPLATE_PROCESS_MAX_BYTES);
        match program {
            Some(program) => Processes::start(program, source, slow_bytes).map(Self::Apart),
            None => ChatTemplate::parse(&source).map(|template| Self::Here(Box::new(template))),
        }
    }

    /// The prompt of a chat of this model with the assistant's turn opened: what messages say is text of it, wherever it is
    /// rendered. `None`: it takes longer than this pace, or more memory.
    pub(crate) fn prompt(&self, model: &Model, chat: &str, pace: Pace) -> Result<Option<ChatPrompt>, ChatError> {
        let is_quick = pace == Pace::Quick;
        if is_quick && chat.len() > QUICK_RENDER_BYTES {
            return Ok(None);
        }
        let allowance = Allowance::of(pace, chat.len());
        match model.chat_prompt(chat, |chat| self.render(chat, allowance)) {
            Err(ChatError::TemplateLimit { limit: TemplateLimit::Time | TemplateLimit::Memory, .. }) if is_quick => {
                Ok(None)
            }
            prompt => prompt.map(Some),
        }
    }

    fn render(&self, chat: &str, allowance: Allowance) -> Result<ChatPrompt, ChatError> {
        let rendered = match self {
            Self::Here(template) => template.render_json(chat, allowance.cpu_ms, u64::MAX),
            Self::Apart(processes) => processes.render(chat, allowance),
        };
        ChatPrompt::from_json(&rendered?)
    }

    /// Whether it looks at tools.
    pub(crate) fn knows_tools(&self) -> bool {
        match self {
            Self::Here(template) => template.knows_tools(),
            Self::Apart(processes) => processes.knows().tools,
        }
    }

    /// What it shows of earlier calls of tools, while some are offered or while none is.
    pub(crate) fn shown_calls(&self, are_offered: bool) -> ShownCalls {
        match self {
            Self::Here(template) => template.shown_calls(are_offered),
            Self::Apart(processes) => processes.knows().shown_calls[usize::from(are_offered)],
        }
    }

    /// Whether what the model thinks has a place of its own in its answers.
    pub(crate) fn thinks(&self) -> bool {
        match self {
            Self::Here(template) => template.thinks(),
            Self::Apart(processes) => processes.knows().thinking,
        }
    }

    /// Tries it with chats of each kind, as those of requests where a model is at hand. It must render a turn, and of the
    /// others whatever it does not refuse itself: many take no tools, and a system text that is refused llama.cpp puts
    /// before the first turn instead.
    ///
    /// Returns the tokens of the turn besides, none without a model.
    fn try_out(&self, model: Option<&Model>) -> Result<(TemplateReport, Vec<Token>), ChatError> {
        let (renders, refuses, mut turn) = (Vec::new(), Vec::new(), Vec::new());
        let mut report = TemplateReport { renders, refuses, slowest: Duration::ZERO, shortest_tokens: 0 };
        for (i, sample) in SAMPLE_CHATS.iter().enumerate() {
            if !sample.tools.is_empty() && !self.knows_tools() {
                continue;
            }
            let begun = Instant::now();
            match self.sample(model, sample) {
                Ok(tokens) if i == 0 => turn = tokens,
                Ok(_) => {}
                Err(ChatError::TemplateRefused(_)) if i > 0 => {
                    report.refuses.push(sample.kind.to_owned());
                    continue;
                }
                Err(error) => return Err(error),
            }
            report.slowest = report.slowest.max(begun.elapsed());
            report.renders.push(sample.kind.to_owned());
        }
        if let Some(model) = model {
            model.check_text_stays_text(|chat| self.render(chat, Allowance::TRIED))?;
        }
        report.shortest_tokens = u32::try_from(turn.len()).unwrap_or(u32::MAX);
        Ok((report, turn))
    }

    /// The tokens of a sample's prompt, none where there is no model to make them.
    fn sample(
        &self,
        model: Option<&Model>,
        SampleChat { kind, messages, tools }: &SampleChat,
    ) -> Result<Vec<Token>, ChatError> {
        let asked = match *tools {
            "" => (*messages).to_owned(),
            tools => format!("{{\"messages\":{messages},\"tools\":{tools}}}"),
        };
        let chat = match model {
            Some(model) => model.chat_prompt(&asked, |chat| self.render(chat, Allowance::TRIED)),
            None => self.render(&asked, Allowance::TRIED),
        }?;
        judge(kind, &chat.prompt)?;
        let Some(model) = model else { return Ok(Vec::new()) };
        let tokens = model.tokenize_with(&chat.prompt, true, SpecialTokens::Unless(&chat.text_at));
        tokens.map_err(|error| ChatError::Template(format!("it makes no tokens of {kind}: {error}")))
    }
}

/// A template that serves, what is known of it, and the tokens of a chat of one word.
type Tried = (Renderer, (TemplateReport, Vec<Token>));

/// A template that is tried while its model goes on loading.
pub(crate) struct Tryout(JoinHandle<Result<Tried, ChatError>>);

impl Tryout {
    pub(crate) fn begin(config: &EngineConfig, model: Arc<Model>, source: TemplateSource) -> Result<Self, LoadError> {
        let (program, slow_bytes) = (config.template_program.clone(), config.template_bytes);
        let thread = std::thread::Builder::new().name("gantry-template".to_owned()).stack_size(TEMPLATE_STACK_BYTES);
        let tried = thread.spawn(move || {
            let renderer = Renderer::start(program.as_deref(), source, slow_bytes)?;
            let tried = renderer.try_out(Some(&model))?;
            Ok((renderer, tried))
        });
        tried.map(Self).map_err(|e| LoadError::Thread(e.to_string()))
    }

    /// Waits for it, and has the tokens of a chat of one word, too.
    pub(crate) fn end(self) -> Result<Tried, LoadError> {
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
    if !says_sample_word(prompt) {
        let what = format!("of {kind} it makes a prompt without what the user says last there, {SAMPLE_WORD:?}");
        return Err(ChatError::Template(what));
    }
    Ok(())
}

/// Whether chats can be rendered with a template, by the program that is called with `template`, and in this process where
/// there is none: what a load asks before it serves.
///
/// # Errors
/// What is wrong with it, with the line.
pub fn check_template(program: Option<&Path>, source: TemplateSource) -> Result<TemplateReport, ChatError> {
    Ok(Renderer::start(program, source, None)?.try_out(None)?.0)
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
