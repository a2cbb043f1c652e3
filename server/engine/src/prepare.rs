//! From a prompt to tokens, off the engine's thread: small pools render chats, tokenise, name the prompt's blocks, read what
//! is on disk of its KV rows, and look how often it repeats itself.
//!
//! Flow: a chat is rendered in the first pool, or, where that takes longer than chats do, once more from its beginning in the
//! one for slow ones ([`Pace`]); what is rendered, and every other prompt, is tokenised in the last. So nobody waits for the
//! chat of another that runs away, but for others that are slow, and a template never has a thread that tokenises.
//!
//! The pools' queues are bounded by the permits that submission takes; what they hold counts as queued, and is taken in the
//! order in which slots are, so that nobody's long prompts are tokenised before those of a higher priority. A prompt that
//! cannot be served ends here. Tickets keep the order of submission, whichever prompt is ready first.

mod infill;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use gantry_core::{Chat, Extent, PromptForm, ShownPrompt, TextInput, TokenPiece};
use gantry_core::{MAX_PROMPT_LOGPROBS, MAX_SHOWN_TEXT_BYTES};
use gantry_llama::{CallGrammar, SpecialTokens};

use crate::answer::AnswerReader;
use crate::backend::{CallRules, Pace, Reads, RenderedAnswer, RenderedChat, Token, Vocabulary};
use crate::binding::{AnswerBinding, Binding, CallBinding, NoChoice};
use crate::cache::{BlockHash, DiskReader, Fetched, Fingerprint, chain};
use crate::error::RequestError;
use crate::event::Activity;
use crate::grammars::{Constraint, Grammars};
use crate::lookup::Indexer;
use crate::output::{Reading, Signals};
use crate::params::{self, GenerationParams, MAX_PROMPT_BYTES, Prompt};
use crate::queue::{Queue, Waiting};
use crate::request::{Emitter, Request, reusable, too_late};
use crate::sampler::{self, Sampler};
use crate::template::limits::{RENDER_STACK_BYTES, RENDER_THREADS, SLOW_RENDER_THREADS};

/// Threads that tokenise. Two, so that one enormous prompt does not hold up the others.
const PREPARE_THREADS: usize = 2;

/// An accepted request whose prompt is still text.
pub(crate) struct Job {
    pub(crate) ticket: u64,
    /// Several answers to it share it.
    pub(crate) prompt: Arc<Prompt>,
    pub(crate) params: GenerationParams,
    pub(crate) emitter: Emitter,
    pub(crate) signals: Arc<Signals>,
    pub(crate) submitted_at: Instant,
    pub(crate) deadline: Option<Instant>,
}

/// The pools' queues. Once this is dropped, nothing in them is prepared any more: who waits there hears that it was dropped.
pub(crate) struct Jobs {
    chats: Stage,
    slow_chats: Stage,
    prompts: Stage,
}

/// A queue, from the side of who puts jobs into it.
#[derive(Clone)]
struct Stage {
    waiting: Arc<Mutex<Queue<Waits>>>,
    /// One message for each job, whichever it is that is taken then.
    calls: Sender<()>,
}

/// A job in a queue.
struct Waits {
    job: Box<Job>,
    /// Its prompt, where that was a chat and is rendered.
    chat: Option<RenderedChat>,
}

impl Jobs {
    /// Never blocks. False: the pools have ended.
    pub(crate) fn push(&self, job: Box<Job>) -> bool {
        let stage = if matches!(*job.prompt, Prompt::Chat(_)) { &self.chats } else { &self.prompts };
        stage.push(Waits { job, chat: None })
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        for stage in [&self.chats, &self.slow_chats, &self.prompts] {
            // Not while it is locked: each tells its caller.
            let left = std::mem::take(&mut *stage.lock());
            drop(left);
        }
    }
}

impl Stage {
    /// A queue, and where each of its jobs is called.
    fn new() -> (Self, Receiver<()>) {
        let (calls, called) = crossbeam_channel::unbounded();
        (Self { waiting: Arc::default(), calls }, called)
    }

    fn push(&self, waits: Waits) -> bool {
        let Job { ticket, submitted_at, deadline, ref params, .. } = *waits.job;
        let (priority, turn) = (params.priority, params.turn);
        self.lock().push(Waiting {
            ticket,
            turn,
            priority,
            has_begun: false,
            since: submitted_at,
            deadline,
            value: waits,
        });
        self.calls.send(()).is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, Queue<Waits>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Threads that take from this queue until nobody can put anything into it.
    fn threads(
        &self,
        name: &str,
        count: usize,
        called: &Receiver<()>,
        work: impl Fn(Waits) + Send + Clone + 'static,
    ) -> std::io::Result<Vec<JoinHandle<()>>> {
        let thread = |i| {
            // Without the sender, whose end is the threads'.
            let (waiting, called, work) = (self.waiting.clone(), called.clone(), work.clone());
            let thread = std::thread::Builder::new().name(format!("gantry-{name}-{i}")).stack_size(RENDER_STACK_BYTES);
            thread.spawn(move || {
                for () in called {
                    let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop(Instant::now());
                    if let Some(next) = next {
                        work(next.value);
                    }
                }
            })
        };
        (0..count).map(thread).collect()
    }
}

/// What the pools know of the model.
#[derive(Clone)]
pub(crate) struct Preparer {
    pub(crate) vocabulary: Arc<dyn Vocabulary>,
    /// Tokens that a sequence holds, prompt and answer.
    pub(crate) positions: u32,
    /// Whether what stands after a gap comes before what stands before it.
    pub(crate) suffix_first: bool,
    /// Those that were compiled.
    pub(crate) grammars: Grammars,
    /// Those of answers, which are of the template's making and over other texts.
    pub(crate) answer_grammars: Grammars,
    /// What names the blocks of prompts, where these are kept.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Where prompts are kept on disk, too.
    pub(crate) disk: Option<DiskReader>,
    /// Where answers are guessed ahead from repetitions.
    pub(crate) indexer: Option<Indexer>,
}

impl Preparer {
    /// Starts the pools, whose threads end when their queues are dropped. `deliver` gets each request that is ready.
    pub(crate) fn spawn(
        &self,
        deliver: impl Fn(Request) + Send + Clone + 'static,
    ) -> std::io::Result<(Jobs, Vec<JoinHandle<()>>)> {
        let ((chats, chat_called), (slow_chats, slow_called), (prompts, prompt_called)) =
            (Stage::new(), Stage::new(), Stage::new());
        let this = self.clone();
        let prepare = move |Waits { job, chat }: Waits| {
            if let Some(request) = this.prepare(*job, chat) {
                deliver(request);
            }
        };
        let mut threads = prompts.threads("prepare", PREPARE_THREADS, &prompt_called, prepare)?;
        let (this, rendered, slow) = (self.clone(), prompts.clone(), slow_chats.clone());
        threads.extend(chats.threads("render", RENDER_THREADS, &chat_called, move |waits| {
            this.render(waits, Pace::Quick, &rendered, &slow);
        })?);
        let (this, rendered) = (self.clone(), prompts.clone());
        threads.extend(slow_chats.threads("slow", SLOW_RENDER_THREADS, &slow_called, move |waits| {
            this.render(waits, Pace::Full, &rendered, &rendered);
        })?);
        Ok((Jobs { chats, slow_chats, prompts }, threads))
    }

    /// Renders a chat, which then waits to be tokenised, or, where it takes longer than this pace, among the slow ones.
    fn render(&self, Waits { mut job, .. }: Waits, pace: Pace, rendered: &Stage, slow: &Stage) {
        if is_over(&mut job) {
            return;
        }
        let Prompt::Chat(chat) = &*job.prompt else {
            rendered.push(Waits { job, chat: None });
            return;
        };
        job.emitter.is(Activity::Begun);
        let chat = std::panic::catch_unwind(AssertUnwindSafe(|| {
            check_bytes("messages", job.prompt.texts().map(str::len).sum())?;
            let reads = match (job.params.extent, &job.params.constraint) {
                (Extent::Prompt(_), _) => Reads::Nothing,
                (Extent::Answer, None) => Reads::All,
                (Extent::Answer, Some(_)) => Reads::Bound,
            };
            let chat = self.vocabulary.render(chat, reads, pace)?;
            // Before it waits: what a template makes of messages may be much longer than they are.
            chat.iter().try_for_each(|chat| check_bytes("messages", chat.prompt.len()))?;
            if job.params.extent == Extent::Answer {
                chat.iter().try_for_each(|chat| self.check_length(&chat.prompt))?;
            }
            Ok(chat)
        }));
        job.emitter.is(Activity::Paused);
        // Where the pools have ended meanwhile, the queue's end tells its caller.
        match chat.unwrap_or_else(|_| Err(panicked())) {
            Ok(Some(chat)) => {
                // Never needed again, and it may be large.
                job.prompt = Arc::new(Prompt::chat(Chat::default()));
                rendered.push(Waits { job, chat: Some(chat) });
            }
            Ok(None) => _ = slow.push(Waits { job, chat: None }),
            Err(error) => job.emitter.failed(error),
        }
    }

    fn prepare(&self, mut job: Job, chat: Option<RenderedChat>) -> Option<Request> {
        if is_over(&mut job) {
            return None;
        }
        if let Extent::Prompt(form) = job.params.extent {
            self.show(job, chat, form);
            return None;
        }
        let Job { ticket, prompt, mut params, mut emitter, signals, submitted_at, deadline } = job;
        emitter.is(Activity::Begun);
        let prepared = std::panic::catch_unwind(AssertUnwindSafe(|| {
            // Before those of the template are added.
            let mut reading = Reading::of(&params);
            reading.echo = self.echo(&prompt, &params)?;
            let (tokens, answer) = self.tokens(Arc::unwrap_or_clone(prompt), chat, &mut params, &mut reading)?;
            let mut setup = sampler::compile(&*self.vocabulary, &self.grammars, &params)?;
            if let Some(answer) = answer {
                setup.binding = self.binding_of(&answer, &params)?;
                let reader = AnswerReader::new(&answer.form, answer.drops_calls);
                let mut reader = reader.map_err(|error| RequestError::Internal(error.to_string()))?;
                if setup.binding.as_ref().is_some_and(Binding::may_be_apart) {
                    reader.trim_text();
                }
                (reading.reader, reading.markup) = (Some(Box::new(reader)), answer.markup);
            }
            let sampler = Box::new(Sampler::new(&params, &tokens, setup));
            let tokenized_at = Instant::now();
            let (blocks, fetched) = self.find(reusable(&tokens, &params));
            let repeats = self.indexer.as_ref().and_then(|indexer| indexer.index(&tokens));
            Ok((tokens, sampler, reading, tokenized_at, blocks, fetched, repeats))
        }));
        let prepared = prepared.unwrap_or_else(|_| Err(panicked()));
        emitter.is(Activity::Paused);
        match prepared {
            Ok((prompt, sampler, reading, tokenized_at, blocks, fetched, repeats)) => Some(Request {
                ticket,
                prompt,
                params,
                emitter,
                signals,
                sampler,
                reading,
                blocks,
                fetched,
                repeats,
                submitted_at,
                tokenized_at,
                deadline,
            }),
            Err(error) => {
                emitter.failed(error);
                None
            }
        }
    }

    /// Answers a request that asks what its prompt is.
    fn show(&self, job: Job, chat: Option<RenderedChat>, form: PromptForm) {
        let Job { prompt, mut emitter, .. } = job;
        let prompt = Arc::unwrap_or_clone(prompt);
        emitter.is(Activity::Begun);
        let shown = std::panic::catch_unwind(AssertUnwindSafe(|| match form {
            PromptForm::Text => self.shown_text(prompt, chat).map(ShownPrompt::Text),
            PromptForm::Count => self.counted(prompt, chat).map(ShownPrompt::Count),
            PromptForm::Tokens { adds_special, with_pieces } => {
                let tokens = self.shown_tokens(prompt, chat, adds_special)?;
                Ok(if with_pieces { ShownPrompt::Pieces(self.pieces(&tokens)) } else { ShownPrompt::Tokens(tokens) })
            }
        }));
        emitter.is(Activity::Paused);
        match shown.unwrap_or_else(|_| Err(panicked())) {
            Ok(shown) => emitter.shown(without_spare_room(shown)),
            Err(error) => emitter.failed(error),
        }
    }

    /// The text that is told before the answer.
    fn echo(&self, prompt: &Prompt, params: &GenerationParams) -> Result<Option<String>, RequestError> {
        Ok(match prompt {
            _ if !params.echo => None,
            Prompt::Text(text) | Prompt::Markup(text) => Some(text.clone()),
            Prompt::Tokens(tokens) => Some(self.text_of(tokens)?),
            Prompt::Infill(infill) => match &infill.prefix {
                TextInput::Text(text) => Some(format!("{text}{}", infill.begun)),
                TextInput::Tokens(tokens) => Some(self.text_of(tokens)? + &infill.begun),
            },
            Prompt::Chat(_) => {
                return Err(RequestError::invalid("echo", "invalid_value", "a chat has no text to tell"));
            }
        })
    }

    fn text_of(&self, tokens: &[Token]) -> Result<String, RequestError> {
        self.check_known(tokens)?;
        self.check_tokens(tokens.len())?;
        let mut bytes = Vec::new();
        tokens.iter().for_each(|&token| self.vocabulary.piece(token, &mut bytes));
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn shown_text(&self, prompt: Prompt, chat: Option<RenderedChat>) -> Result<String, RequestError> {
        match prompt {
            Prompt::Text(text) | Prompt::Markup(text) => Ok(text),
            Prompt::Chat(_) => {
                let prompt = rendered(chat)?.prompt;
                check_shown_bytes("messages", prompt.len())?;
                Ok(prompt)
            }
            Prompt::Tokens(tokens) => {
                self.check_known(&tokens)?;
                let mut bytes = Vec::new();
                for token in tokens {
                    self.vocabulary.shown_piece(token, &mut bytes);
                    check_shown_bytes("prompt", bytes.len())?;
                }
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Prompt::Infill(infill) => {
                let (tokens, _) = self.infill(*infill, &GenerationParams::default())?;
                self.shown_text(Prompt::Tokens(tokens), None)
            }
        }
    }

    /// As many as there are, whether a sequence could hold them or not; who asks bounds the text.
    fn shown_tokens(
        &self,
        prompt: Prompt,
        chat: Option<RenderedChat>,
        adds_special: bool,
    ) -> Result<Vec<Token>, RequestError> {
        let tokenize = |text: &str, specials: SpecialTokens<'_>| {
            check_bytes("prompt", text.len())?;
            match adds_special {
                true => self.vocabulary.tokenize(text, specials),
                false => self.vocabulary.tokenize_bare(text, specials),
            }
        };
        match prompt {
            Prompt::Text(text) => tokenize(&text, SpecialTokens::None),
            Prompt::Markup(text) => tokenize(&text, SpecialTokens::All),
            Prompt::Chat(_) => {
                let chat = rendered(chat)?;
                tokenize(&chat.prompt, SpecialTokens::Unless(&chat.text_at))
            }
            Prompt::Tokens(tokens) => self.check_known(&tokens).map(|()| tokens),
            Prompt::Infill(infill) => Ok(self.infill(*infill, &GenerationParams::default())?.0),
        }
    }

    fn pieces(&self, tokens: &[Token]) -> Vec<TokenPiece> {
        let piece = |&id: &Token| {
            let mut bytes = Vec::new();
            self.vocabulary.shown_piece(id, &mut bytes);
            TokenPiece { id, bytes }
        };
        tokens.iter().map(piece).collect()
    }

    fn check_known(&self, tokens: &[Token]) -> Result<(), RequestError> {
        let size = self.vocabulary.size();
        let known = |token: Token| u32::try_from(token).is_ok_and(|t| t < size);
        match tokens.iter().copied().find(|&token| !known(token)) {
            Some(token) => {
                let message = format!("token {token} is not in the model's vocabulary of {size}");
                Err(RequestError::invalid("prompt", "invalid_token", message))
            }
            None => Ok(()),
        }
    }

    /// What a prompt's blocks are called, and those that are on disk.
    fn find(&self, tokens: &[Token]) -> (Vec<BlockHash>, Option<Fetched>) {
        let Some(fingerprint) = self.fingerprint else { return (Vec::new(), None) };
        let blocks = chain(fingerprint, tokens);
        let fetched = self.disk.as_ref().and_then(|disk| disk.fetch(&blocks, tokens));
        (blocks, fetched)
    }

    /// What binds an answer to a chat.
    fn binding_of(&self, answer: &RenderedAnswer, params: &GenerationParams) -> Result<Option<Binding>, RequestError> {
        let constraint = sampler::constraint(&*self.vocabulary, &self.grammars, params)?;
        if constraint.is_none() && answer.calls == CallRules::Free && answer.thinking_budget.is_none() {
            return Ok(None);
        }
        let texts = self.vocabulary.texts_with(&answer.markup);
        let compile =
            |gbnf: &str| self.answer_grammars.get(&texts, &params::Constraint::Gbnf(gbnf.to_owned()), "tools");
        let calls = match &answer.calls {
            CallRules::Free => CallBinding::Free,
            CallRules::Required(grammar) => CallBinding::Required(begun(compile(grammar)?, &answer.form.prefix)?),
            CallRules::Calls(grammar) => CallBinding::Calls(compile(grammar)?),
            CallRules::Allowed { grammar: CallGrammar { grammar, triggers }, is_strict } => {
                free_unless(constraint.is_some() || *is_strict, compile(grammar), |grammar| CallBinding::Allowed {
                    grammar,
                    triggers: triggers.clone(),
                    is_strict: *is_strict,
                })?
            }
            CallRules::Whole { grammar, is_strict } => {
                let grammar = compile(grammar).and_then(|grammar| begun(grammar, &answer.form.prefix));
                free_unless(constraint.is_some() || *is_strict, grammar, |grammar| CallBinding::Whole {
                    grammar,
                    is_strict: *is_strict,
                })?
            }
        };
        let asked = AnswerBinding {
            form: &answer.form,
            texts: &texts,
            thinking_budget: answer.thinking_budget,
            closing: &answer.closing,
            lead: &answer.lead,
            constraint,
            calls,
        };
        Binding::of_answer(asked).map_err(|NoChoice| {
            let param = &params.constraint_param;
            let message = format!(
                "{param}: what this model's chat template has calls of tools begin with is not understood, so that an answer \
                 cannot be either one or of this form; leave `tools` out, or say `tool_choice: none`"
            );
            RequestError::invalid(param, "tools_not_supported", message)
        })
    }

    /// How many tokens a prompt has, whether a sequence could hold them or not, but not of one whose length says that it
    /// cannot.
    fn counted(&self, prompt: Prompt, chat: Option<RenderedChat>) -> Result<usize, RequestError> {
        let tokens = match prompt {
            Prompt::Text(text) => self.tokenize("prompt", &text, SpecialTokens::None)?,
            Prompt::Markup(text) => self.tokenize("prompt", &text, SpecialTokens::All)?,
            Prompt::Chat(_) => {
                let chat = rendered(chat)?;
                self.tokenize("messages", &chat.prompt, SpecialTokens::Unless(&chat.text_at))?
            }
            Prompt::Tokens(tokens) => tokens,
            Prompt::Infill(infill) => self.infill(*infill, &GenerationParams::default())?.0,
        };
        Ok(tokens.len())
    }

    /// The prompt's tokens, and what its answers look like; a template's stop strings are added to the caller's.
    fn tokens(
        &self,
        prompt: Prompt,
        chat: Option<RenderedChat>,
        params: &mut GenerationParams,
        reading: &mut Reading,
    ) -> Result<(Vec<Token>, Option<Box<RenderedAnswer>>), RequestError> {
        let mut answer = None;
        let (param, tokens) = match prompt {
            Prompt::Text(text) => ("prompt", self.tokenize("prompt", &text, SpecialTokens::None)?),
            Prompt::Markup(text) => ("prompt", self.tokenize("prompt", &text, SpecialTokens::All)?),
            Prompt::Chat(_) => {
                let chat = rendered(chat)?;
                params.stop.extend(chat.stops);
                answer = chat.answer;
                ("messages", self.tokenize("messages", &chat.prompt, SpecialTokens::Unless(&chat.text_at))?)
            }
            Prompt::Tokens(tokens) => {
                self.check_known(&tokens)?;
                ("prompt", tokens)
            }
            Prompt::Infill(infill) => {
                let (tokens, left_out) = self.infill(*infill, params)?;
                reading.files_left_out = left_out;
                ("prompt", tokens)
            }
        };
        if tokens.is_empty() {
            return Err(RequestError::invalid(param, "empty_prompt", "the prompt has no tokens; send at least one"));
        }
        self.check_tokens(tokens.len())?;
        check_logprobs(param, tokens.len(), params)?;
        Ok((tokens, answer))
    }

    fn tokenize(&self, param: &str, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        check_bytes(param, text.len())?;
        self.check_length(text)?;
        self.vocabulary.tokenize(text, specials).map_err(|error| error.of(param))
    }

    /// Tokenising takes many times the memory of the text, so one that cannot fit is not tokenised.
    fn check_length(&self, text: &str) -> Result<(), RequestError> {
        self.check_tokens(text.len() / self.vocabulary.longest_token().max(1))
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), RequestError> {
        let prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        if prompt_tokens >= self.positions {
            return Err(RequestError::ContextLengthExceeded { prompt_tokens, limit: self.positions });
        }
        Ok(())
    }
}

/// Whether nobody waits for a job any more; who did has been told.
fn is_over(job: &mut Job) -> bool {
    let Job { emitter, submitted_at, deadline, .. } = job;
    if emitter.is_cancelled() {
        emitter.cancelled(0, *submitted_at);
        return true;
    }
    let now = Instant::now();
    let is_late = deadline.is_some_and(|deadline| deadline <= now);
    if is_late {
        emitter.failed(too_late(*submitted_at, *deadline, now));
    }
    is_late
}

/// What is told is held, and counted, with the memory that it has: none of it empty.
fn without_spare_room(mut shown: ShownPrompt) -> ShownPrompt {
    match &mut shown {
        ShownPrompt::Text(text) => text.shrink_to_fit(),
        ShownPrompt::Tokens(tokens) => tokens.shrink_to_fit(),
        ShownPrompt::Pieces(pieces) => pieces.shrink_to_fit(),
        ShownPrompt::Count(_) => {}
    }
    shown
}

/// How calls are bound by a grammar; not at all by one that cannot be followed: the model keeps to the tools as it likes, unless
/// more was asked for.
fn free_unless(
    is_asked: bool,
    grammar: Result<Constraint, RequestError>,
    bind: impl FnOnce(Constraint) -> CallBinding,
) -> Result<CallBinding, RequestError> {
    match grammar {
        Err(error) if !is_asked => {
            tracing::debug!(%error, "calls of tools are not bound");
            Ok(CallBinding::Free)
        }
        grammar => grammar.map(bind),
    }
}

/// The grammar of an answer, after what its prompt ends with.
fn begun(mut grammar: Constraint, prefix: &str) -> Result<Constraint, RequestError> {
    let invalid = |what: String| RequestError::invalid("tools", "invalid_grammar", what);
    match grammar.accept_text(prefix.as_bytes()) {
        Ok(true) => Ok(grammar),
        Ok(false) => {
            Err(invalid("tools: the grammar of calls does not begin with what the prompt ends with".to_owned()))
        }
        Err(error) => Err(invalid(error.to_string())),
    }
}

fn rendered(chat: Option<RenderedChat>) -> Result<RenderedChat, RequestError> {
    chat.ok_or_else(|| RequestError::Internal(String::from("a chat was not rendered")))
}

fn panicked() -> RequestError {
    RequestError::Internal(String::from("preparing the prompt panicked; see the server's log"))
}

fn check_bytes(param: &str, bytes: usize) -> Result<(), RequestError> {
    if bytes > MAX_PROMPT_BYTES {
        let message = format!("{bytes} bytes, more than the {MAX_PROMPT_BYTES} that a prompt may have");
        return Err(RequestError::invalid(param, "prompt_too_large", message));
    }
    Ok(())
}

/// Whether there is room for what is to be told of a prompt.
fn check_logprobs(param: &str, tokens: usize, params: &GenerationParams) -> Result<(), RequestError> {
    let Some(top) = params.prompt_logprobs else { return Ok(()) };
    let each = 2 + usize::try_from(top).unwrap_or(usize::MAX);
    let most = MAX_PROMPT_LOGPROBS / each;
    if tokens > most {
        let message = format!(
            "has {tokens} tokens, and log-probabilities with {top} of the likeliest tokens are told of prompts of at most \
             {most}; shorten it, or ask for fewer of the likeliest"
        );
        return Err(RequestError::invalid(param, "prompt_too_large", message));
    }
    Ok(())
}

fn check_shown_bytes(param: &str, bytes: usize) -> Result<(), RequestError> {
    if bytes > MAX_SHOWN_TEXT_BYTES {
        let message = format!(
            "the text has more than {MAX_SHOWN_TEXT_BYTES} bytes, the most that is told at once; ask for less of it"
        );
        return Err(RequestError::invalid(param, "prompt_too_large", message));
    }
    Ok(())
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
