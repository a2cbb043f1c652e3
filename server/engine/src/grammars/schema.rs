//! JSON schemas and regular expressions, by the `llguidance` crate: an Earley parser over lexemes whose expressions are derived as they are
//! needed, and a trie of the vocabulary, so that the tokens that may come next are found in microseconds.
//!
//! [`SchemaCompiler`] is what a model's requests share: the trie, built when the first of them asks. [`Schema`] is the
//! state of one answer; it shares nothing that changes with any other, so what one answer costs, or breaks, harms none.
//! The tokens that may come are worked out once for each place in the answer, within limits (`limits`, `clock`): what goes
//! past them ends that answer.
//!
//! White space is as [`WHITE_SPACE`] says: what models write, and never without an end. Properties come in the order in
//! which the schema names them. Absent: references to other documents, `$anchor`, forced tokens (the model chooses among
//! what may come, also where that is one text only).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};

use gantry_llama::TokenTexts;
use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{CancellationHandle, JsonCompileOptions, ParserFactory, TokenParser};
use serde_json::Value;

use super::clock::StepClock;
use super::{limits, place};
use crate::backend::Token;

/// A space, or line breaks and an indentation: llama.cpp's rule for JSON.
const WHITE_SPACE: &str = r"(?: |\n{1,2}[ \t]{0,20})";

/// A schema that cannot be followed, or a token that it does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SchemaError {
    /// The text is not JSON.
    #[error("line {line}, column {column}: not JSON: {message}")]
    NotJson { line: usize, column: usize, message: String },
    /// It is larger than it may be.
    #[error("JSON schema: more {what} than {limit}")]
    TooLarge { what: &'static str, limit: usize },
    /// It says something that cannot be enforced.
    #[error("JSON schema at {path}: {message}")]
    Unsupported {
        /// A JSON pointer.
        path: String,
        message: String,
    },
    /// A regular expression that is none, or that cannot be followed.
    #[error("regular expression: {0}")]
    Regex(String),
    /// Following it takes more than one token may.
    #[error(
        "it is too complex to follow from here: {message}; simplify its patterns, lengths or alternatives, or name fewer properties that may be left out"
    )]
    TooComplex { message: String },
    /// A token was accepted that the schema does not allow.
    #[error("it does not allow token {0} here")]
    NotAllowed(Token),
    /// It is given up.
    #[error("compiling it takes more than {limit_ms} ms; simplify it")]
    TooSlow { limit_ms: u128 },
    /// As many are compiled as may be at once, some of which take too long.
    #[error("too many JSON schemas and regular expressions are being compiled; try again later")]
    Busy,
    /// No token of the vocabulary can come next.
    #[error("no token of the model's vocabulary goes on with an answer of this form")]
    DeadEnd,
    /// The crate failed in a way that it should not.
    #[error("it could not be followed: {0}")]
    Internal(String),
}

/// What a model's requests share.
pub(crate) struct SchemaCompiler {
    factory: Arc<ParserFactory>,
    vocabulary: Arc<SchemaVocabulary>,
    clock: Arc<StepClock>,
    /// Schemas that are compiled now.
    compiling: Arc<AtomicUsize>,
}

/// The tokens of a model, as answers need them.
struct SchemaVocabulary {
    texts: Arc<TokenTexts>,
    /// Tokens with the text of another one, and that one. The trie holds each text once.
    twins: Vec<(Token, Token)>,
}

impl SchemaCompiler {
    /// Builds the trie: tens of milliseconds for each 50,000 tokens.
    ///
    /// # Errors
    /// The vocabulary cannot be used.
    pub(crate) fn new(texts: &Arc<TokenTexts>) -> Result<Self, SchemaError> {
        let (mut words, mut twins) = (Vec::with_capacity(texts.len()), Vec::new());
        let mut known: HashMap<&[u8], Token> = HashMap::with_capacity(texts.len());
        for token in (0..).take(texts.len()) {
            let text = texts.text(token);
            // What ends an answer is allowed by its name; no JSON has a byte that begins the trie's names of tokens.
            let usable = !texts.is_end(token)
                && text.len() <= limits::MAX_SCHEMA_TOKEN_BYTES
                && !text.contains(&TokTrie::SPECIAL_TOKEN_MARKER);
            let first = if usable && !text.is_empty() { *known.entry(text).or_insert(token) } else { token };
            if first != token {
                twins.push((token, first));
            }
            words.push(if usable && first == token { text.to_vec() } else { Vec::new() });
        }
        let size = u32::try_from(words.len()).unwrap_or(u32::MAX);
        let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|error| SchemaError::Internal(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_items_in_row = limits::MAX_ROW_ITEMS;
        limits.initial_lexer_fuel = limits::MAX_SCHEMA_EXPRESSIONS;
        limits.step_lexer_fuel = limits::MAX_STEP_EXPRESSIONS;
        limits.step_max_items = limits::MAX_STEP_ITEMS;
        limits.max_lexer_states = limits::MAX_SCHEMA_STATES;
        limits.max_grammar_size = limits::MAX_SCHEMA_SYMBOLS;
        limits.verbose_errors = false;
        let clock =
            StepClock::new().map_err(|error| SchemaError::Internal(format!("cannot start a thread: {error}")))?;
        Ok(Self {
            factory: Arc::new(factory),
            vocabulary: Arc::new(SchemaVocabulary { texts: texts.clone(), twins }),
            clock: Arc::new(clock),
            compiling: Arc::default(),
        })
    }

    /// An answer of this schema, from its beginning. A strict one says what it cannot enforce; another leaves that to the
    /// model.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(crate) fn compile(&self, json: &str, strict: bool) -> Result<Schema, SchemaError> {
        let mut schema: Value = serde_json::from_str(json).map_err(|error| SchemaError::NotJson {
            line: error.line(),
            column: error.column(),
            message: error.to_string(),
        })?;
        place::check_size(&schema)?;
        place::keep_exact(&mut schema)?;
        if schema.is_object() {
            let options = JsonCompileOptions {
                whitespace_pattern: Some(WHITE_SPACE.to_owned()),
                coerce_one_of: !strict,
                lenient: !strict,
                json_allow_general_unicode_escapes: true,
                ..JsonCompileOptions::default()
            };
            options.apply_to(&mut schema);
        }
        let root = GrammarWithLexer { json_schema: Some(schema.clone()), ..GrammarWithLexer::default() };
        self.compile_root(root)?.map_err(|error| place::describe(&schema, &format!("{error:#}")))
    }

    /// An answer that this regular expression matches from its first character to its last, from its beginning.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn compile_regex(&self, regex: &str) -> Result<Schema, SchemaError> {
        // The whole answer is matched, anchors or not.
        let inner = regex.strip_prefix('^').unwrap_or(regex);
        let inner = match inner.strip_suffix('$') {
            // An escaped one is a character.
            Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
            _ => inner,
        };
        if inner.is_empty() {
            return Err(SchemaError::Regex(String::from("it matches no text but the empty one")));
        }
        let compiled = self.compile_root(GrammarWithLexer::from_regex(inner))?;
        compiled.map_err(|error| SchemaError::Regex(place::reason(&format!("{:#}", error.root_cause()))))
    }

    fn compile_root(&self, grammar: GrammarWithLexer) -> Result<anyhow::Result<Schema>, SchemaError> {
        let factory = self.factory.clone();
        let compiled = self.within_time(move || {
            let mut parser = factory.create_parser(TopLevelGrammar { grammars: vec![grammar], max_tokens: None })?;
            parser.start_without_prompt();
            // Where nothing may follow, it stops here.
            parser.check_stop()?;
            Ok::<_, anyhow::Error>(parser)
        })?;
        Ok(compiled.map(|parser| Schema::new(parser, self.vocabulary.clone(), self.clock.clone())))
    }

    /// Runs what recurses as deep as a schema says and may take as long as it likes, on a thread of its own.
    fn within_time<T: Send + 'static>(&self, run: impl FnOnce() -> T + Send + 'static) -> Result<T, SchemaError> {
        let compiling = Compiling::begin(&self.compiling).ok_or(SchemaError::Busy)?;
        let (sender, receiver) = mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name(String::from("gantry-schema"))
            .stack_size(limits::SCHEMA_STACK_BYTES)
            .spawn(move || {
                let result = run();
                drop(compiling);
                // Who waits no more has been told that it takes too long.
                let _ = sender.send(result);
            })
            .map_err(|error| SchemaError::Internal(format!("cannot start a thread: {error}")))?;
        receiver.recv_timeout(limits::MAX_SCHEMA_COMPILE).map_err(|error| match error {
            RecvTimeoutError::Timeout => SchemaError::TooSlow { limit_ms: limits::MAX_SCHEMA_COMPILE.as_millis() },
            RecvTimeoutError::Disconnected => {
                SchemaError::Internal(String::from("compiling it panicked; see the server's log"))
            }
        })
    }
}

/// One of the schemas that are compiled at once, whether or not someone waits for it still.
struct Compiling(Arc<AtomicUsize>);

impl Compiling {
    fn begin(all: &Arc<AtomicUsize>) -> Option<Self> {
        let one_more = |n: usize| (n < limits::MAX_SCHEMAS_COMPILING).then_some(n + 1);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Self(all.clone()))
    }
}

impl Drop for Compiling {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where an answer is in its schema.
pub(crate) struct Schema {
    parser: TokenParser,
    vocabulary: Arc<SchemaVocabulary>,
    clock: Arc<StepClock>,
    cancel: CancellationHandle,
    /// The tokens that may come here, but for those that end the answer; `None`: not asked yet.
    mask: Option<SimpleVob>,
}

impl Clone for Schema {
    /// Goes on by itself: the expressions that were derived so far are copied, not shared.
    fn clone(&self) -> Self {
        let copy = Self::new(self.parser.deep_clone(), self.vocabulary.clone(), self.clock.clone());
        Self { mask: self.mask.clone(), ..copy }
    }
}

impl std::fmt::Debug for Schema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Schema").field("tokens", &self.parser.num_tokens()).finish_non_exhaustive()
    }
}

impl Schema {
    fn new(mut parser: TokenParser, vocabulary: Arc<SchemaVocabulary>, clock: Arc<StepClock>) -> Self {
        let cancel = parser.enable_cancellation();
        Self { parser, vocabulary, clock, cancel, mask: None }
    }

    /// Whether the answer may end here.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn is_complete(&mut self) -> Result<bool, SchemaError> {
        let parser = &mut self.parser;
        let is_complete = self.clock.run(&self.cancel, || parser.is_accepting());
        // What was cut short is no answer.
        if self.cancel.is_cancelled() { Err(too_slow()) } else { Ok(is_complete) }
    }

    /// Whether a token may come next.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn allows(&mut self, token: Token) -> Result<bool, SchemaError> {
        if self.vocabulary.texts.is_end(token) {
            return self.is_complete();
        }
        let mask = self.mask()?;
        Ok(usize::try_from(token).is_ok_and(|at| at < mask.len() && mask.get(at)))
    }

    /// Goes on after a token. One that ends the answer changes nothing.
    ///
    /// # Errors
    /// When the token is not allowed, or it takes too long to say what follows it.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), SchemaError> {
        if !self.allows(token)? {
            return Err(SchemaError::NotAllowed(token));
        }
        if self.vocabulary.texts.is_end(token) {
            return Ok(());
        }
        let first = self.vocabulary.twins.iter().find(|(twin, _)| *twin == token).map_or(token, |(_, first)| *first);
        let first = u32::try_from(first).map_err(|_| SchemaError::NotAllowed(token))?;
        self.mask = None;
        let parser = &mut self.parser;
        let accepted = self.clock.run(&self.cancel, || {
            parser.consume_token(first)?;
            parser.check_stop()
        });
        accepted.map_err(|error| self.too_complex(&error))?;
        Ok(())
    }

    /// Writes to `out` the row with every token that may not come next at minus infinity.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), SchemaError> {
        out.clear();
        out.resize(row.len(), f32::NEG_INFINITY);
        let mut allow = |at: usize| {
            if let Some((to, &from)) = out.get_mut(at).zip(row.get(at)) {
                *to = from;
            }
        };
        self.mask()?.iter_set_entries(&mut allow);
        if self.is_complete()? {
            self.vocabulary.texts.end_tokens().filter_map(|token| usize::try_from(token).ok()).for_each(allow);
        }
        Ok(())
    }

    /// Ends its steps as the clock does.
    #[cfg(test)]
    pub(super) fn cut_short(&self) {
        self.cancel.cancel();
    }

    fn mask(&mut self) -> Result<&SimpleVob, SchemaError> {
        let mask = match self.mask.take() {
            Some(mask) => mask,
            None => self.compute_mask()?,
        };
        Ok(self.mask.insert(mask))
    }

    fn compute_mask(&mut self) -> Result<SimpleVob, SchemaError> {
        // Nothing but the end may follow.
        if self.parser.stop_reason() == StopReason::NoExtension {
            return Ok(SimpleVob::alloc(self.vocabulary.texts.len()));
        }
        let parser = &mut self.parser;
        let mask = self.clock.run(&self.cancel, || parser.compute_mask());
        let mut mask = mask.map_err(|error| self.too_complex(&error))?;
        for &(twin, first) in &self.vocabulary.twins {
            if let (Ok(twin), Ok(first)) = (u32::try_from(twin), u32::try_from(first))
                && mask.is_allowed(first)
            {
                mask.allow_token(twin);
            }
        }
        Ok(mask)
    }

    fn too_complex(&self, error: &anyhow::Error) -> SchemaError {
        let message = error.to_string();
        match self.parser.stop_reason() {
            StopReason::Cancelled => too_slow(),
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                SchemaError::TooComplex { message: message.lines().next().unwrap_or_default().to_owned() }
            }
            StopReason::NoExtensionBias => SchemaError::DeadEnd,
            _ => SchemaError::Internal(message),
        }
    }
}

fn too_slow() -> SchemaError {
    let limit_ms = limits::MAX_STEP_TIME.as_millis();
    SchemaError::TooComplex { message: format!("the next token takes more than {limit_ms} ms") }
}
