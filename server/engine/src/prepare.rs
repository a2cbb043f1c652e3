//! From a prompt to tokens, off the engine's thread: a small pool renders chats, tokenises, names the prompt's blocks,
//! reads what is on disk of its KV rows, and looks how often it repeats itself.
//!
//! The pool's queue is bounded by the permits that submission takes; what it holds counts as queued, and is taken in the
//! order in which slots are, so that nobody's long prompts are tokenised before those of a higher priority. A prompt that
//! cannot be served ends here. Tickets keep the order of submission, whichever prompt is ready first.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};
use gantry_llama::SpecialTokens;

use crate::backend::{Token, Vocabulary};
use crate::cache::{BlockHash, DiskReader, Fetched, Fingerprint, chain};
use crate::error::RequestError;
use crate::event::Activity;
use crate::grammars::Grammars;
use crate::lookup::Indexer;
use crate::output::Signals;
use crate::params::{GenerationParams, MAX_PROMPT_BYTES, Prompt};
use crate::queue::{Queue, Waiting};
use crate::request::{Emitter, Request, too_late};
use crate::sampler::{self, Sampler};

/// Threads that render and tokenise. Two, so that one enormous prompt does not hold up the others.
const PREPARE_THREADS: usize = 2;

/// An accepted request whose prompt is still text.
pub(crate) struct Job {
    pub(crate) ticket: u64,
    pub(crate) prompt: Prompt,
    pub(crate) params: GenerationParams,
    pub(crate) emitter: Emitter,
    pub(crate) signals: Arc<Signals>,
    pub(crate) submitted_at: Instant,
    pub(crate) deadline: Option<Instant>,
}

/// The pool's queue. Once it is dropped, nothing in it is prepared any more: who waits there hears that it was dropped.
pub(crate) struct Jobs {
    waiting: WaitingJobs,
    /// One message for each job, whichever it is that is taken then.
    calls: Sender<()>,
}

type WaitingJobs = Arc<Mutex<Queue<Box<Job>>>>;

impl Jobs {
    /// Never blocks. False: the pool has ended.
    pub(crate) fn push(&self, job: Box<Job>) -> bool {
        let Job { ticket, submitted_at, deadline, .. } = *job;
        let priority = job.params.priority;
        lock(&self.waiting).push(Waiting { ticket, priority, since: submitted_at, deadline, value: job });
        self.calls.send(()).is_ok()
    }
}

impl Drop for Jobs {
    fn drop(&mut self) {
        // Not while it is locked: each tells its caller.
        let left = std::mem::take(&mut *lock(&self.waiting));
        drop(left);
    }
}

fn lock(waiting: &WaitingJobs) -> MutexGuard<'_, Queue<Box<Job>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the pool knows of the model.
#[derive(Clone)]
pub(crate) struct Preparer {
    pub(crate) vocabulary: Arc<dyn Vocabulary>,
    /// Tokens that a sequence holds, prompt and answer.
    pub(crate) positions: u32,
    /// Those that were compiled.
    pub(crate) grammars: Grammars,
    /// What names the blocks of prompts, where these are kept.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Where prompts are kept on disk, too.
    pub(crate) disk: Option<DiskReader>,
    /// Where answers are guessed ahead from repetitions.
    pub(crate) indexer: Option<Indexer>,
}

impl Preparer {
    /// Starts the pool, whose threads end when its queue is dropped. `deliver` gets each request that is ready.
    pub(crate) fn spawn(
        &self,
        deliver: impl Fn(Request) + Send + Clone + 'static,
    ) -> std::io::Result<(Jobs, Vec<JoinHandle<()>>)> {
        let (calls, called) = crossbeam_channel::unbounded();
        let jobs = Jobs { waiting: WaitingJobs::default(), calls };
        let threads = (0..PREPARE_THREADS).map(|i| {
            let (this, waiting, called, deliver) =
                (self.clone(), jobs.waiting.clone(), called.clone(), deliver.clone());
            std::thread::Builder::new()
                .name(format!("gantry-prepare-{i}"))
                .spawn(move || this.run(&waiting, &called, &deliver))
        });
        let threads = threads.collect::<std::io::Result<_>>()?;
        Ok((jobs, threads))
    }

    fn run(&self, waiting: &WaitingJobs, called: &Receiver<()>, deliver: &impl Fn(Request)) {
        for () in called {
            let next = lock(waiting).pop(Instant::now());
            if let Some(request) = next.and_then(|next| self.prepare(*next.value)) {
                deliver(request);
            }
        }
    }

    fn prepare(&self, job: Job) -> Option<Request> {
        let Job { ticket, prompt, mut params, mut emitter, signals, submitted_at, deadline } = job;
        if emitter.is_cancelled() {
            emitter.cancelled(0, submitted_at);
            return None;
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| deadline <= now) {
            emitter.failed(too_late(submitted_at, deadline, now));
            return None;
        }
        emitter.is(Activity::Begun);
        let prepared = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let tokens = self.tokens(prompt, &mut params)?;
            let setup = sampler::compile(&*self.vocabulary, &self.grammars, &params)?;
            let sampler = Box::new(Sampler::new(&params, &tokens, setup));
            let tokenized_at = Instant::now();
            let (blocks, fetched) = self.find(&tokens);
            let repeats = self.indexer.as_ref().and_then(|indexer| indexer.index(&tokens));
            Ok((tokens, sampler, tokenized_at, blocks, fetched, repeats))
        }));
        let prepared = prepared.unwrap_or_else(|_| {
            Err(RequestError::Internal(String::from("preparing the prompt panicked; see the server's log")))
        });
        emitter.is(Activity::Paused);
        match prepared {
            Ok((prompt, sampler, tokenized_at, blocks, fetched, repeats)) => Some(Request {
                ticket,
                prompt,
                params,
                emitter,
                signals,
                sampler,
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

    /// What a prompt's blocks are called, and those that are on disk.
    fn find(&self, tokens: &[Token]) -> (Vec<BlockHash>, Option<Fetched>) {
        let Some(fingerprint) = self.fingerprint else { return (Vec::new(), None) };
        let blocks = chain(fingerprint, tokens);
        let fetched = self.disk.as_ref().and_then(|disk| disk.fetch(&blocks, tokens));
        (blocks, fetched)
    }

    /// The prompt's tokens; a template's stop strings are added to the caller's.
    fn tokens(&self, prompt: Prompt, params: &mut GenerationParams) -> Result<Vec<Token>, RequestError> {
        let (param, tokens) = match prompt {
            Prompt::Text(text) => ("prompt", self.tokenize("prompt", &text, SpecialTokens::None)?),
            Prompt::Markup(text) => ("prompt", self.tokenize("prompt", &text, SpecialTokens::All)?),
            Prompt::Chat { messages_json } => {
                check_length("messages", &messages_json)?;
                let chat = self.vocabulary.render(&messages_json)?;
                params.stop.extend(chat.stops);
                ("messages", self.tokenize("messages", &chat.prompt, SpecialTokens::Unless(&chat.text_at))?)
            }
            Prompt::Tokens(tokens) => {
                let size = self.vocabulary.size();
                let known = |token: Token| u32::try_from(token).is_ok_and(|t| t < size);
                if let Some(token) = tokens.iter().copied().find(|&token| !known(token)) {
                    let message = format!("token {token} is not in the model's vocabulary of {size}");
                    return Err(RequestError::invalid("prompt", "invalid_token", message));
                }
                ("prompt", tokens)
            }
        };
        if tokens.is_empty() {
            return Err(RequestError::invalid(param, "empty_prompt", "the prompt has no tokens; send at least one"));
        }
        self.check_tokens(tokens.len())?;
        Ok(tokens)
    }

    fn tokenize(&self, param: &str, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        check_length(param, text)?;
        // Tokenising takes many times the memory of the text, so one that cannot fit is not tokenised.
        self.check_tokens(text.len() / self.vocabulary.longest_token().max(1))?;
        self.vocabulary.tokenize(text, specials).map_err(|error| error.of(param))
    }

    fn check_tokens(&self, tokens: usize) -> Result<(), RequestError> {
        let prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        if prompt_tokens >= self.positions {
            return Err(RequestError::ContextLengthExceeded { prompt_tokens, limit: self.positions });
        }
        Ok(())
    }
}

fn check_length(param: &str, text: &str) -> Result<(), RequestError> {
    if text.len() > MAX_PROMPT_BYTES {
        let message = format!("{} bytes, more than the {MAX_PROMPT_BYTES} that a prompt may have", text.len());
        return Err(RequestError::invalid(param, "prompt_too_large", message));
    }
    Ok(())
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
