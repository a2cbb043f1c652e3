//! From tokens to events, off the engine's thread: bytes, whole characters, stop strings, the calls of the sinks.
//!
//! The engine's thread posts what each step gave as one message ([`Output::post`]); the text thread keeps the state of
//! each request's text, finds stop strings and ends a request that met one, which the engine's thread learns from the
//! request's [`Signals`]. Tokens that were computed meanwhile are not counted: nobody saw them. In tests the same work
//! runs inline.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender};

use crate::answer::{AnswerReader, Piece};
use crate::backend::{Token, Vocabulary};
use crate::error::RequestError;
use crate::event::{
    FinishReason, ItlHistogram, PromptChance, PromptToken, StopCause, Timings, TokenChance, TokenLogprob, TokenPiece,
    Usage,
};
use crate::lines::Lines;
use crate::params::GenerationParams;
use crate::request::Emitter;
use crate::sampler::{Logprobs, Score};
use crate::text::{StopFilter, Utf8Stream};

/// Probabilities of so many tokens are sent without a text, or a model that gives tokens without any would have an event grow
/// past what fits in a message.
const MOST_UNSENT_LOGPROBS: usize = 32;

/// The most bytes of a prompt's text that are told at a time.
const ECHO_BYTES: usize = 16 * 1024;

/// What the threads tell each other about one request.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    /// The caller wants no more.
    pub(crate) cancelled: AtomicBool,
    /// The caller wants no more for now.
    pub(crate) paused: AtomicBool,
    /// The request has had its last event: its slot may be freed.
    pub(crate) ended: AtomicBool,
}

/// One message to the text thread; requests are named by their tickets.
pub(crate) enum TextEvent {
    Started {
        ticket: u64,
        text: Box<RequestText>,
    },
    /// Tokens of the prompt, in their order, and how likely each is.
    Scored {
        ticket: u64,
        scores: Vec<(Token, Option<Score>)>,
    },
    Token {
        ticket: u64,
        token: Token,
        logprobs: Option<Logprobs>,
        at: Instant,
    },
    Finished {
        ticket: u64,
        reason: FinishReason,
    },
    Failed {
        ticket: u64,
        error: RequestError,
    },
    /// One that never had a slot. By this way it does not hear of its end before others of what came earlier.
    Refused {
        emitter: Box<Emitter>,
        error: RequestError,
    },
}

/// Where the engine's thread puts what it has to say.
pub(crate) enum Output {
    /// To the text thread.
    Thread(Sender<Vec<TextEvent>>),
    /// Done at once.
    #[cfg(test)]
    Inline(TextStage),
}

impl Output {
    pub(crate) fn post(&mut self, events: &mut Vec<TextEvent>) {
        if events.is_empty() {
            return;
        }
        let events = std::mem::take(events);
        match self {
            // The text thread outlives the engine's; were it gone, the dropped requests would tell their callers.
            Self::Thread(sender) => drop(sender.send(events)),
            #[cfg(test)]
            Self::Inline(stage) => events.into_iter().for_each(|event| stage.apply(event)),
        }
    }
}

/// The text of every request that holds a slot, or held one and waits for another.
#[derive(Default)]
pub(crate) struct TextStage {
    requests: HashMap<u64, RequestText>,
}

impl TextStage {
    /// Works until every sender is gone.
    pub(crate) fn run(mut self, events: &Receiver<Vec<TextEvent>>) {
        for event in events.iter().flatten() {
            self.apply(event);
        }
    }

    pub(crate) fn apply(&mut self, event: TextEvent) {
        match event {
            TextEvent::Started { ticket, mut text } => {
                text.emitter.started(text.prompt_tokens, text.reading.files_left_out);
                text.echo();
                self.requests.insert(ticket, *text);
            }
            TextEvent::Scored { ticket, scores } => {
                if let Some(text) = self.requests.get_mut(&ticket) {
                    text.tell_scores(scores);
                }
            }
            TextEvent::Token { ticket, token, logprobs, at } => self.token(ticket, token, logprobs, at),
            TextEvent::Finished { ticket, reason } => {
                if let Some(text) = self.requests.remove(&ticket) {
                    text.finish(reason);
                }
            }
            TextEvent::Failed { ticket, error } => {
                if let Some(mut text) = self.requests.remove(&ticket) {
                    text.fail(error);
                }
            }
            TextEvent::Refused { mut emitter, error } => emitter.failed(error),
        }
    }

    fn token(&mut self, ticket: u64, token: Token, logprobs: Option<Logprobs>, at: Instant) {
        // A request that met its stop string is no longer here.
        let Some(text) = self.requests.get_mut(&ticket) else { return };
        // A bug in the handling of text harms this request only.
        let pushed = std::panic::catch_unwind(AssertUnwindSafe(|| text.push(token, logprobs, at)));
        let Ok(ended) = pushed else {
            if let Some(mut text) = self.requests.remove(&ticket) {
                text.fail(RequestError::Internal(String::from("handling text panicked; see the server's log")));
            }
            return;
        };
        if let Some(reason) = ended
            && let Some(text) = self.requests.remove(&ticket)
        {
            text.finish(reason);
        }
    }
}

/// The text side of one request.
pub(crate) struct RequestText {
    emitter: Emitter,
    signals: Arc<Signals>,
    vocabulary: Arc<dyn Vocabulary>,
    utf8: Utf8Stream,
    stops: StopFilter,
    reading: Reading,
    prompt_tokens: u32,
    cached_tokens: u32,
    generated: u32,
    timings: Timings,
    admitted_at: Instant,
    last_token_at: Option<Instant>,
    itl: ItlHistogram,
    /// Since the last delta.
    unsent: u32,
    unsent_logprobs: Vec<TokenLogprob>,
    piece: Vec<u8>,
    text: String,
    stopped: bool,
    /// What of the request's own ended it, but for stop strings.
    stop: Option<StopCause>,
    /// Of those generated, those told as thought.
    reasoning_tokens: u32,
    /// The prompt's text begins with no space, whatever its first token does.
    drops_space: bool,
}

/// How an answer is told.
#[derive(Default)]
pub(crate) struct Reading {
    /// `None`: all of it is text.
    pub(crate) reader: Option<Box<AnswerReader>>,
    /// Special tokens whose names are read.
    pub(crate) markup: Vec<Token>,
    /// The first so many stop strings are the caller's own; others belong to the template.
    pub(crate) own_stops: usize,
    /// Tokens that end the answer beside the vocabulary's own.
    pub(crate) stop_tokens: Vec<Token>,
    /// The prompt's text, where that is told before the answer.
    pub(crate) echo: Option<String>,
    /// In the text of the first so many tokens no stop string is looked for.
    pub(crate) min_tokens: u32,
    /// What ends it at one of its lines.
    pub(crate) lines: Lines,
    /// Files beside a text with a gap for which there was no room.
    pub(crate) files_left_out: u32,
}

impl Reading {
    /// All of it as text, for parameters with the caller's own stop strings alone.
    pub(crate) fn of(params: &GenerationParams) -> Self {
        Self {
            own_stops: params.stop.len(),
            stop_tokens: params.stop_tokens.clone(),
            min_tokens: params.min_tokens,
            lines: Lines::of(params),
            ..Self::default()
        }
    }
}

/// What is known of a request when it gets its slot.
pub(crate) struct Admitted {
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) tokenize_ms: f64,
    pub(crate) queue_ms: f64,
    pub(crate) at: Instant,
}

impl RequestText {
    pub(crate) fn new(
        emitter: Emitter,
        signals: Arc<Signals>,
        vocabulary: Arc<dyn Vocabulary>,
        stops: Vec<String>,
        reading: Reading,
        admitted: &Admitted,
    ) -> Self {
        let timings = Timings { tokenize_ms: admitted.tokenize_ms, queue_ms: admitted.queue_ms, ..Timings::default() };
        Self {
            emitter,
            signals,
            vocabulary,
            utf8: Utf8Stream::default(),
            stops: StopFilter::new(stops),
            drops_space: reading.echo.as_ref().is_some_and(|text| !text.starts_with(' ')),
            reading,
            prompt_tokens: admitted.prompt_tokens,
            cached_tokens: admitted.cached_tokens,
            generated: 0,
            timings,
            admitted_at: admitted.at,
            last_token_at: None,
            itl: ItlHistogram::default(),
            unsent: 0,
            unsent_logprobs: Vec::new(),
            piece: Vec::new(),
            text: String::new(),
            stopped: false,
            stop: None,
            reasoning_tokens: 0,
        }
    }

    /// Takes a token, sends the text that it completes, and says why the request ends with it, if it does because of its text.
    fn push(&mut self, token: Token, logprobs: Option<Logprobs>, at: Instant) -> Option<FinishReason> {
        match self.last_token_at.replace(at) {
            None => self.timings.prefill_ms = ms(self.admitted_at, at),
            Some(last) => {
                let gap = ms(last, at);
                self.timings.decode_ms += gap;
                self.itl.record(gap);
            }
        }
        self.generated += 1;
        self.unsent += 1;
        let is_end = self.vocabulary.end_tokens().contains(&token);
        let is_stop = !is_end && self.reading.stop_tokens.contains(&token);
        if is_stop {
            self.stop = Some(StopCause::Token(token));
        }
        let ends = is_end || is_stop;
        // Who is told of a prompt and its answer as one text counts on a place for each token.
        if !ends || self.reading.echo.is_some() {
            let logprobs = logprobs.map(|logprobs| self.with_bytes(token, logprobs));
            self.unsent_logprobs.extend(logprobs);
        }
        if ends {
            return None;
        }
        self.piece.clear();
        if self.reading.markup.contains(&token) {
            self.vocabulary.shown_piece(token, &mut self.piece);
        } else {
            self.vocabulary.piece(token, &mut self.piece);
        }
        let mut whole = String::new();
        self.utf8.push(&self.piece, &mut whole);
        let line_end = self.reading.lines.end_within(&whole, self.timings.decode_ms);
        let mut ended = None;
        if self.generated > self.reading.min_tokens {
            if let Some(kept) = line_end {
                whole.truncate(kept);
                self.utf8 = Utf8Stream::default();
                (ended, self.stop) = (Some(FinishReason::Length), Some(StopCause::Line));
            }
            self.stopped = self.stops.push(&whole, &mut self.text);
            if self.stopped {
                ended = Some(FinishReason::Stop);
            }
        } else {
            self.text.push_str(&whole);
        }
        if !self.stopped {
            match self.reading.reader.take() {
                Some(mut reader) => {
                    self.read(|text, pieces| reader.push(text, pieces));
                    self.reading.reader = Some(reader);
                    // What is held to be read, or is not told at all, may be thousands of tokens.
                    if self.unsent_logprobs.len() >= MOST_UNSENT_LOGPROBS {
                        let logprobs = std::mem::take(&mut self.unsent_logprobs);
                        self.emitter.delta(String::new(), std::mem::take(&mut self.unsent), logprobs);
                    }
                }
                None => self.send(MOST_UNSENT_LOGPROBS),
            }
        }
        ended
    }

    /// Tells the prompt's text, where that is asked for.
    fn echo(&mut self) {
        let mut text = self.reading.echo.as_deref().unwrap_or_default();
        while !text.is_empty() {
            let (piece, rest) = text.split_at(text.floor_char_boundary(ECHO_BYTES));
            self.emitter.echo(piece.to_owned(), Vec::new());
            text = rest;
        }
    }

    fn tell_scores(&mut self, scores: Vec<(Token, Option<Score>)>) {
        let mut tokens = scores.into_iter().map(|(token, score)| self.scored(token, score)).collect::<Vec<_>>();
        // A vocabulary that puts a space before a text has it in the text's first token.
        if let Some(first) = tokens.iter_mut().find(|token| !token.token.bytes.is_empty())
            && std::mem::take(&mut self.drops_space)
            && first.token.bytes.starts_with(b" ")
        {
            first.token.bytes.remove(0);
        }
        while !tokens.is_empty() {
            let rest = tokens.split_off(tokens.len().min(MOST_UNSENT_LOGPROBS));
            self.emitter.echo(String::new(), std::mem::replace(&mut tokens, rest));
        }
    }

    fn scored(&self, token: Token, score: Option<Score>) -> PromptToken {
        let chance = score.map(|Score { logprobs, rank }| {
            let top = logprobs.top.into_iter().map(|(id, logprob)| self.chance(id, logprob)).collect();
            PromptChance { logprob: logprobs.chosen, rank, top }
        });
        PromptToken { token: TokenPiece { id: token, bytes: self.chance(token, 0.0).bytes }, chance }
    }

    fn chance(&self, id: Token, logprob: f32) -> TokenChance {
        let mut bytes = Vec::new();
        self.vocabulary.piece(id, &mut bytes);
        TokenChance { id, bytes, logprob }
    }

    fn with_bytes(&self, token: Token, logprobs: Logprobs) -> TokenLogprob {
        TokenLogprob {
            token: self.chance(token, logprobs.chosen),
            top: logprobs.top.into_iter().map(|(id, logprob)| self.chance(id, logprob)).collect(),
        }
    }

    /// Ends the request. Text that was held back for a stop string that did not come is sent first, but not to one that
    /// was cancelled: there the stop string might still have come.
    fn finish(mut self, reason: FinishReason) {
        if !self.stopped && reason != FinishReason::Cancelled {
            let mut rest = String::new();
            self.utf8.finish(&mut rest);
            if !self.stops.push(&rest, &mut self.text) {
                self.stops.finish(&mut self.text);
            }
        }
        // Tokens are told without a text only where no stop string took it away, or might have.
        let is_whole = !self.stopped && reason != FinishReason::Cancelled;
        match self.reading.reader.take() {
            Some(mut reader) => self.read(|text, pieces| {
                reader.push(text, pieces);
                if reason != FinishReason::Cancelled {
                    reader.finish(reason == FinishReason::Length, pieces);
                }
            }),
            None => self.send(if is_whole { 1 } else { usize::MAX }),
        }
        let stop = match self.stops.found() {
            Some((index, text)) => (index < self.reading.own_stops).then(|| StopCause::Text(text.to_owned())),
            None => self.stop.take(),
        };
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.generated,
            cached_tokens: self.cached_tokens,
            reasoning_tokens: self.reasoning_tokens,
        };
        self.signals.ended.store(true, Relaxed);
        self.timings.itl = self.itl;
        if reason == FinishReason::Length && self.generated == 0 {
            self.timings.prefill_ms = ms(self.admitted_at, Instant::now());
        }
        self.emitter.finished(reason, stop, usage, self.timings);
    }

    fn fail(&mut self, error: RequestError) {
        self.signals.ended.store(true, Relaxed);
        self.emitter.failed(error);
    }

    /// Has a reader take what there is, and sends what it knows by it.
    fn read(&mut self, read: impl FnOnce(&str, &mut Vec<Piece>)) {
        let mut pieces = Vec::new();
        read(&std::mem::take(&mut self.text), &mut pieces);
        for piece in pieces {
            let (logprobs, tokens) = (std::mem::take(&mut self.unsent_logprobs), std::mem::take(&mut self.unsent));
            if let Piece::Reasoning(_) = piece {
                self.reasoning_tokens += tokens;
            }
            self.emitter.piece(piece, tokens, logprobs);
        }
    }

    /// Sends what there is, if it has text or the probabilities of `most` tokens.
    fn send(&mut self, most: usize) {
        if !self.text.is_empty() || self.unsent_logprobs.len() >= most {
            let logprobs = std::mem::take(&mut self.unsent_logprobs);
            self.emitter.delta(std::mem::take(&mut self.text), std::mem::take(&mut self.unsent), logprobs);
        }
    }
}

fn ms(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;

    use super::*;
    use crate::backend::scripted::ScriptedVocabulary;
    use crate::event::GenerationEvent;
    use crate::request::Permit;
    use crate::stats::Stats;

    #[test]
    fn probabilities_of_tokens_without_text_are_sent_so_many_at_a_time() {
        let stats = Arc::new(Stats::new(1, 1, Arc::default()));
        let events: Arc<Mutex<Vec<GenerationEvent>>> = Arc::default();
        let sink = {
            let events = events.clone();
            Box::new(move |event| events.lock().unwrap().push(event))
        };
        let (signals, permit) = (Arc::new(Signals::default()), Permit::take(&stats, 1).unwrap());
        let emitter = Emitter::new(sink, stats, permit, signals.clone());
        let at = Instant::now();
        let admitted = Admitted { prompt_tokens: 1, cached_tokens: 0, tokenize_ms: 0.0, queue_ms: 0.0, at };
        // A stop string that begins with every token, and does not come.
        let tokens = 2 * MOST_UNSENT_LOGPROBS + 7;
        let stops = vec!["a".repeat(tokens + 1)];
        let mut text =
            RequestText::new(emitter, signals, Arc::new(ScriptedVocabulary), stops, Reading::default(), &admitted);
        for _ in 0..tokens {
            assert_eq!(text.push(8, Some(Logprobs { chosen: -0.5, top: Vec::new() }), at), None);
        }
        text.finish(FinishReason::Length);
        let sent: Vec<(String, u32, usize)> = std::mem::take(&mut *events.lock().unwrap())
            .into_iter()
            .filter_map(|event| match event {
                GenerationEvent::Text { text, tokens, logprobs } => Some((text, tokens, logprobs.len())),
                _ => None,
            })
            .collect();
        let most = (String::new(), MOST_UNSENT_LOGPROBS as u32, MOST_UNSENT_LOGPROBS);
        assert_eq!(sent, [most.clone(), most, ("a".repeat(tokens), 7, 7)]);
    }
}
