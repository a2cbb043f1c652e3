//! A model without weights: the logits after a history are a hash of it, so an answer depends on every token before it,
//! and a mixed-up sequence, a lost token or a cell that was not returned changes it. [`reference`] is the oracle.
#![allow(clippy::unwrap_used)]

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use gantry_core::{Chat, Message};
use gantry_llama::{InfillTokens, SpecialTokens, TokenTexts};

use super::{
    BLOCK_TOKENS, Backend, BackendError, BackendLimits, BatchEntry, Chunk, Pace, Reads, RenderedChat, Token, Vocabulary,
};
use crate::error::RequestError;
use crate::event::{FinishReason, ModelInfo};
use crate::grammars::Grammars;
use crate::params::GenerationParams;
use crate::plan::split_parts;
use crate::sampler::{Sampler, compile};

/// Tokens there are. 0 ends a generation.
pub(crate) const VOCAB: u32 = 48;
const END: Token = 0;
/// The first of five tokens for gaps, which text has, too.
pub(crate) const PREFIX: Token = 41;
/// Bytes of a token's state.
pub(crate) const TOKEN_BYTES: u64 = 4;

/// What the next decodes do instead of working.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    NoKvCells,
    Fail,
    /// After the batch was computed.
    FailLate,
    /// Every row is NaN.
    Lost,
    Panic,
    /// Takes until it is interrupted.
    Hang,
}

/// A test's hold on a backend that an engine owns.
#[derive(Clone, Default)]
pub(crate) struct Control {
    /// Consumed one by one; when empty, decodes work.
    pub(crate) faults: Arc<Mutex<VecDeque<Fault>>>,
    /// A prompt that begins with this token cannot be decoded.
    pub(crate) poison: Arc<Mutex<Option<Token>>>,
    /// No token at this position can be decoded.
    pub(crate) last_position: Arc<Mutex<Option<u32>>>,
    /// What is computed of a sequence with this token is NaN, and so is whatever is computed beside it or, until the backend is
    /// scrubbed, after it.
    pub(crate) spoils: Arc<Mutex<Option<Token>>>,
    /// Steps that looked what there is to do, be it nothing.
    pub(crate) looks: Arc<AtomicU64>,
    /// While a test holds it, decodes wait.
    pub(crate) gate: Arc<Mutex<()>>,
    /// Ends [`Fault::Hang`].
    interrupt: Arc<AtomicBool>,
}

pub(crate) struct ScriptedBackend {
    limits: BackendLimits,
    /// Each token with its cell: a copy in a unified cache has the same.
    held: Vec<Vec<(Token, Arc<()>)>>,
    rows: Vec<Option<Vec<f32>>>,
    pub(crate) control: Control,
    pub(crate) decodes: u64,
    pub(crate) decoded_tokens: u64,
    /// Tokens whose state was asked for.
    pub(crate) fetched_tokens: u64,
    /// Tokens whose state was copied: from here, to here, or both where a sequence was copied that has cells of its own.
    pub(crate) copied_tokens: u64,
    /// What llama.cpp would compute together of the last batch.
    pub(crate) parts: Vec<u32>,
    /// Logits follow from the last so many tokens alone, so that answers run in circles; 0: from all of them.
    memory: usize,
    /// After so many tokens, and each time so many more, the logits are others; 0: never.
    wrong_every: usize,
    copies_fail: bool,
    staged: Option<u32>,
    landing_fails: u32,
    staging_fails: bool,
    /// Cells hold what is no number.
    spoilt: bool,
}

impl ScriptedBackend {
    /// Each sequence with its own cells.
    pub(crate) fn new(sequences: u32, positions: u32, batch_tokens: u32) -> Self {
        let total_cells = u64::from(sequences) * u64::from(positions);
        Self::with_limits(BackendLimits {
            sequences,
            positions,
            batch_tokens,
            outputs: batch_tokens,
            scored_rows: batch_tokens,
            total_cells,
            unified: false,
            stage: None,
            flash_attention: true,
            group_rows: 1,
            reusable: true,
            token_bytes: TOKEN_BYTES,
        })
    }

    pub(crate) fn with_limits(limits: BackendLimits) -> Self {
        Self {
            limits,
            held: vec![Vec::new(); limits.sequences as usize],
            rows: Vec::new(),
            control: Control::default(),
            decodes: 0,
            decoded_tokens: 0,
            fetched_tokens: 0,
            copied_tokens: 0,
            parts: Vec::new(),
            memory: 0,
            wrong_every: 0,
            copies_fail: false,
            staged: None,
            landing_fails: 0,
            staging_fails: false,
            spoilt: false,
        }
    }

    pub(crate) fn info(&self) -> ModelInfo {
        ModelInfo {
            description: String::from("scripted"),
            n_ctx_per_sequence: self.limits.positions,
            parallel: self.limits.sequences,
            vocab_size: VOCAB,
            ..ModelInfo::default()
        }
    }

    /// Has the model look at the last `tokens` tokens alone.
    pub(crate) fn repeat_after(&mut self, tokens: usize) {
        self.memory = tokens;
    }

    /// Has the model say something else after each so many tokens; 0: never.
    pub(crate) fn wrong_every(&mut self, tokens: usize) {
        self.wrong_every = tokens;
    }

    /// Has what is read beside the pool not get into it so often.
    pub(crate) fn fail_landing(&mut self, times: u32) {
        self.landing_fails = times;
    }

    /// Has nothing be read beside the pool.
    pub(crate) fn fail_staging(&mut self) {
        self.staging_fails = true;
    }

    pub(crate) fn fail_copies(&mut self) {
        self.copies_fail = true;
    }

    /// Holds these without a word, as after a batch that failed.
    fn leave(&mut self, batch: &[BatchEntry]) {
        batch.iter().for_each(|e| self.held[e.sequence as usize].push((e.token, Arc::new(()))));
    }

    /// Cells that hold a token, each counted once.
    pub(crate) fn cells(&self) -> u64 {
        let cells: HashSet<*const ()> = self.held.iter().flatten().map(|(_, cell)| Arc::as_ptr(cell)).collect();
        cells.len() as u64
    }

    pub(crate) fn tokens(&self, sequence: u32) -> Vec<Token> {
        self.held[sequence as usize].iter().map(|(token, _)| *token).collect()
    }
}

/// The logits after a history.
pub(crate) fn logits_after(history: &[Token]) -> Vec<f32> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for &token in history {
        hash = (hash ^ u64::from(token.unsigned_abs())).wrapping_mul(0x0100_0000_01b3);
    }
    (0..u64::from(VOCAB))
        .map(|token| {
            let mut x = hash ^ token.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((x >> 40) % 1000) as f32 / 125.0
        })
        .collect()
}

impl Backend for ScriptedBackend {
    fn limits(&self) -> BackendLimits {
        self.limits
    }

    fn interrupt(&self) -> Option<Arc<AtomicBool>> {
        Some(self.control.interrupt.clone())
    }

    fn untouched_bytes(&self) -> u64 {
        0
    }

    fn decode(&mut self, batch: &[BatchEntry]) -> Result<(), BackendError> {
        drop(self.control.gate.lock().unwrap());
        assert!(!batch.is_empty() && batch.len() <= self.limits.batch_tokens as usize, "batch of {}", batch.len());
        let descents = batch.windows(2).filter(|pair| pair[0].sequence > pair[1].sequence).count();
        assert!(descents <= 2, "a batch stands in the order of its sequences, but for its ends");
        let fault = self.control.faults.lock().unwrap().pop_front();
        let mut lost = false;
        match fault.unwrap_or(Fault::None) {
            Fault::None if self.limits.unified && self.cells() + batch.len() as u64 > self.limits.total_cells => {
                return Err(BackendError::NoKvCells);
            }
            Fault::None => {}
            Fault::Lost => lost = true,
            Fault::NoKvCells => return Err(BackendError::NoKvCells),
            Fault::Fail => return Err(BackendError::Failed(String::from("scripted"))),
            Fault::FailLate => {
                self.leave(batch);
                return Err(BackendError::Failed(String::from("scripted")));
            }
            Fault::Panic => panic!("scripted"),
            Fault::Hang => {
                while !self.control.interrupt.load(Relaxed) {
                    std::thread::yield_now();
                }
                // Half of it was computed.
                self.leave(&batch[..batch.len() / 2]);
                return Err(BackendError::Failed(String::from("interrupted")));
            }
        }
        let poison = *self.control.poison.lock().unwrap();
        if batch.iter().any(|entry| entry.position == 0 && Some(entry.token) == poison) {
            // Half of it was computed.
            self.leave(&batch[..batch.len() / 2]);
            return Err(BackendError::Failed(String::from("poison")));
        }
        let last_position = *self.control.last_position.lock().unwrap();
        if batch.iter().any(|entry| Some(entry.position) == last_position) {
            return Err(BackendError::Failed(String::from("position")));
        }
        let runs = batch.chunk_by(|a, b| a.sequence == b.sequence);
        let runs = runs.map(|run| (run[0].sequence as usize, u32::try_from(run.len()).unwrap()));
        self.parts = split_parts(&runs.collect::<Vec<_>>());
        if let Some(staged) = self.staged {
            let most = self.limits.stage.unwrap();
            assert!(batch.iter().all(|e| e.sequence != staged || e.position < most), "a prompt of more than {most}");
            self.parts = vec![u32::try_from(batch.iter().filter(|e| e.sequence != staged).count()).unwrap()];
            self.parts.push(u32::try_from(batch.len()).unwrap() - self.parts[0]);
        }
        self.decodes += 1;
        self.decoded_tokens += batch.len() as u64;
        let rows = batch.iter().filter(|entry| entry.output).count();
        assert!(rows <= (self.limits.outputs + self.limits.scored_rows) as usize, "{rows} rows");
        self.rows.clear();
        for entry in batch {
            assert!(u32::try_from(entry.token).unwrap() < VOCAB);
            let held = &mut self.held[entry.sequence as usize];
            // A load looks at the last position, with nothing before it.
            let is_last_alone = held.is_empty() && entry.position + 1 == self.limits.positions;
            assert!(entry.position as usize == held.len() || is_last_alone, "positions follow each other");
            assert!(entry.position < self.limits.positions, "a sequence holds {} tokens", self.limits.positions);
            held.push((entry.token, Arc::new(())));
            let history: Vec<Token> = held.iter().map(|(token, _)| *token).collect();
            let from = if self.memory == 0 { 0 } else { history.len().saturating_sub(self.memory) };
            let is_wrong = self.wrong_every > 0 && history.len().is_multiple_of(self.wrong_every);
            let from = if is_wrong { history.len() } else { from };
            self.rows.push(entry.output.then(|| logits_after(&history[from..])));
        }
        let spoils = *self.control.spoils.lock().unwrap();
        self.spoilt |= batch.iter().any(|entry| Some(entry.token) == spoils);
        if lost || self.spoilt {
            self.rows.iter_mut().flatten().for_each(|row| row.fill(f32::NAN));
        }
        match batch.iter().any(|entry| entry.output && Some(entry.sequence) == self.staged) {
            true => self.land(),
            false => Ok(()),
        }
    }

    fn logits(&mut self, index: usize) -> Option<&[f32]> {
        self.rows.get(index)?.as_deref()
    }

    fn scrub(&mut self) {
        self.staged = None;
        self.spoilt = false;
        self.held.iter_mut().for_each(Vec::clear);
    }

    fn clear_sequence(&mut self, sequence: u32) {
        self.staged = self.staged.filter(|&staged| staged != sequence);
        self.held[sequence as usize].clear();
    }

    fn truncate(&mut self, sequence: u32, len: u32) -> Result<(), BackendError> {
        assert!(self.limits.reusable);
        self.held[sequence as usize].truncate(len as usize);
        Ok(())
    }

    fn copy(&mut self, from: u32, to: u32, len: u32) -> Result<(), BackendError> {
        assert!(self.limits.reusable && from != to && self.held[to as usize].is_empty());
        if self.staged == Some(from) {
            self.land()?;
        }
        if self.copies_fail {
            return Err(BackendError::Failed(String::from("scripted")));
        }
        self.copied_tokens += if self.limits.unified { 0 } else { 2 * u64::from(len) };
        let copied = &self.held[from as usize][..len as usize];
        self.held[to as usize] = if self.limits.unified {
            copied.to_vec()
        } else {
            copied.iter().map(|&(token, _)| (token, Arc::new(()))).collect()
        };
        Ok(())
    }

    fn save(&mut self, sequence: u32, positions: Range<u32>) -> Result<Vec<Vec<u8>>, BackendError> {
        assert!(self.limits.reusable && positions.start.is_multiple_of(BLOCK_TOKENS));
        if self.staged == Some(sequence) {
            self.land()?;
        }
        let held = self.tokens(sequence);
        let tokens = &held[positions.start as usize..positions.end as usize];
        self.fetched_tokens += tokens.len() as u64;
        self.copied_tokens += tokens.len() as u64;
        let bytes = |block: &[Token]| block.iter().flat_map(|token| token.to_le_bytes()).collect();
        Ok(tokens.chunks(BLOCK_TOKENS as usize).map(bytes).collect())
    }

    fn restore(&mut self, sequence: u32, chunks: &[Chunk<'_>]) -> Result<(), BackendError> {
        assert!(self.limits.reusable && self.held[sequence as usize].is_empty());
        for chunk in chunks {
            self.copied_tokens += u64::from(chunk.tokens);
            assert_eq!(chunk.bytes.len(), chunk.tokens as usize * 4);
            let tokens = chunk.bytes.chunks(4).map(|b| Token::from_le_bytes(b.try_into().unwrap()));
            self.held[sequence as usize].extend(tokens.map(|token| (token, Arc::new(()))));
        }
        if self.limits.unified && self.cells() > self.limits.total_cells {
            self.held[sequence as usize].clear();
            return Err(BackendError::NoKvCells);
        }
        Ok(())
    }

    fn staged(&self) -> Option<u32> {
        self.control.looks.fetch_add(1, Relaxed);
        self.staged
    }

    fn stage(&mut self, sequence: u32) -> Result<(), BackendError> {
        assert!(self.staged.is_none() && self.limits.stage.is_some());
        if self.staging_fails {
            return Err(BackendError::Failed(String::from("scripted")));
        }
        self.staged = Some(sequence);
        Ok(())
    }

    fn land(&mut self) -> Result<(), BackendError> {
        if self.landing_fails > 0 {
            self.landing_fails -= 1;
            return Err(BackendError::Failed(String::from("scripted")));
        }
        self.staged = None;
        Ok(())
    }
}

/// Tokens are letters, but for the end and two that are half a character each.
pub(crate) struct ScriptedVocabulary;

impl Vocabulary for ScriptedVocabulary {
    fn size(&self) -> u32 {
        VOCAB
    }

    fn longest_token(&self) -> usize {
        1
    }

    fn tokenize(&self, text: &str, _: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        Ok(text.bytes().map(|b| 1 + Token::from(b) % 47).collect())
    }

    fn tokenize_bare(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.tokenize(text, specials)
    }

    fn infill_tokens(&self) -> Option<InfillTokens> {
        let (prefix, suffix, middle) = (PREFIX, PREFIX + 1, PREFIX + 2);
        Some(InfillTokens { begin: None, prefix, suffix, middle, repository: Some(PREFIX + 3), file: Some(PREFIX + 4) })
    }

    fn pair(&self, query: &str, document: &str) -> Result<Vec<Token>, RequestError> {
        let tokens = |text| self.tokenize(text, SpecialTokens::None);
        Ok([tokens(query)?, vec![END], tokens(document)?].concat())
    }

    fn render(&self, chat: &Chat, _: Reads, _: Pace) -> Result<Option<RenderedChat>, RequestError> {
        let said: String = chat.messages.iter().map(Message::said).collect();
        if said == "panic" {
            panic!("scripted");
        }
        let (prompt, text_at, stops) = (format!("<{said}>"), Vec::new(), vec![String::from("dd")]);
        Ok(Some(RenderedChat { prompt, text_at, stops, answer: None }))
    }

    fn piece(&self, token: Token, out: &mut Vec<u8>) {
        match token {
            END => {}
            1 => out.push(0xc3),
            2 => out.push(0xa9),
            _ => out.push(b'a' + u8::try_from(token % 8).unwrap()),
        }
    }

    fn shown_piece(&self, token: Token, out: &mut Vec<u8>) {
        match token {
            END => out.extend_from_slice(b"<end>"),
            token => self.piece(token, out),
        }
    }

    fn texts(&self) -> &Arc<TokenTexts> {
        static TEXTS: OnceLock<Arc<TokenTexts>> = OnceLock::new();
        TEXTS.get_or_init(|| {
            let pieces = (0..).take(VOCAB as usize).map(|token| {
                let mut piece = Vec::new();
                ScriptedVocabulary.piece(token, &mut piece);
                piece
            });
            Arc::new(TokenTexts::new(pieces, &[END]))
        })
    }

    fn texts_with(&self, _: &[Token]) -> Arc<TokenTexts> {
        self.texts().clone()
    }

    fn end_tokens(&self) -> &[Token] {
        &[END]
    }
}

/// What a request must end with, computed with none of the engine's scheduling or text handling.
pub(crate) fn reference(prompt: &[Token], params: &GenerationParams, positions: u32) -> (String, FinishReason, u32) {
    let mut sampler = Sampler::new(params, prompt, compile(&ScriptedVocabulary, &Grammars::default(), params).unwrap());
    let (mut history, mut bytes) = (prompt.to_vec(), Vec::new());
    let (mut generated, mut stops_from) = (0, 0);
    if params.max_tokens == Some(0) {
        return (String::new(), FinishReason::Length, 0);
    }
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    loop {
        let token = sampler.sample(&logits_after(&history)).unwrap().token;
        sampler.accept(token).unwrap();
        generated += 1;
        if token == END || params.stop_tokens.contains(&token) {
            return (lossy(&bytes), FinishReason::Stop, generated);
        }
        ScriptedVocabulary.piece(token, &mut bytes);
        // The only incomplete character there can be is a first half.
        let whole = if bytes.last() == Some(&0xc3) { &bytes[..bytes.len() - 1] } else { &bytes[..] };
        let text = lossy(whole);
        if generated <= params.min_tokens {
            stops_from = text.len();
        }
        if let Some(at) = params.stop.iter().filter_map(|s| text[stops_from..].find(s.as_str())).min() {
            return (text[..stops_from + at].to_owned(), FinishReason::Stop, generated);
        }
        if params.max_tokens == Some(generated) || history.len() == positions as usize {
            return (lossy(&bytes), FinishReason::Length, generated);
        }
        history.push(token);
    }
}
