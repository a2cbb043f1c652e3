//! Saved state: the KV rows of a sequence's tokens as chunks of bytes, which any context of the same fingerprint takes.
//!
//! llama.cpp gives and takes the state of a whole sequence as one blob. Where [`crate::layout`] understands it, it is cut
//! by tokens: [`Context::save`] copies those that are asked for (`shim/state.cpp`) and gives a chunk for each block, so that
//! sequences with a common prefix share the chunks of it, and [`Context::restore`] puts chunks together. Otherwise
//! [`Context::save_whole`] keeps the blob. Whether it is
//! understood is found out on the first use with a real state: it must be parsed, and be composed again byte for byte.
//!
//! A chunk carries its fingerprint, its positions and a checksum; all of it is checked before llama.cpp sees a byte.
//! Which weights computed the rows is not in it: key chunks by the model's digest.

use std::ops::Range;

use llama_cpp_sys_2 as sys;

use super::Context;
use crate::batch::Batch;
use crate::chunk::{self, Head, Kind};
use crate::error::{ChunkFault, StateError};
use crate::layout::{self, Layout, Place};
use crate::{logs, shim};

/// Tokens decoded to see a state where no sequence holds any.
const PROBE_TOKENS: u32 = 2;
/// The scratch buffer that is kept between calls, in bytes; a larger one is given back.
const MAX_KEPT_SCRATCH_BYTES: usize = 16 << 20;

/// What is known of the state of a context.
#[derive(Debug)]
pub(super) struct Knowledge {
    /// `None`: it cannot be sliced.
    layout: Option<Layout>,
    fingerprint: String,
    rows_hash: u64,
    whole_hash: u64,
}

impl Context {
    /// Whether a sequence's state can be cut by tokens. The first call of this, or of another function on state, decodes
    /// two tokens if no sequence holds any; logits of an earlier batch are gone then.
    pub fn sliceable(&mut self) -> bool {
        self.knowledge().layout.is_some()
    }

    /// Changes with whatever makes chunks incompatible: llama.cpp's version, types of the cache, flash attention, layers
    /// and their rows, and for a model that rotates keys otherwise in a long context, whether a sequence's share of the
    /// cells is one. Beyond that, the number of sequences, of cells and their split do not matter to chunks of
    /// [`Context::save`], but do to [`Context::save_whole`]. As [`Context::sliceable`], it may decode.
    pub fn state_fingerprint(&mut self) -> String {
        self.knowledge().fingerprint.clone()
    }

    /// Bytes of one token's state; 0 where a state cannot be sliced.
    pub fn token_bytes(&mut self) -> usize {
        self.knowledge().layout.as_ref().map_or(0, Layout::row_bytes)
    }

    /// The state of a sequence's tokens at these positions, in chunks of `block` tokens; the last one holds what is left, if
    /// any is. Nothing of other tokens is copied.
    ///
    /// # Errors
    /// When there is no such range, or the state cannot be sliced.
    pub fn save(&mut self, sequence: u32, positions: Range<u32>, block: u32) -> Result<Vec<Vec<u8>>, StateError> {
        let place = self.place(sequence)?;
        let held = self.next_position(sequence);
        let Range { start: from, end: to } = positions;
        if block == 0 || from > to || to > held {
            return Err(StateError::Range { from, to, block, held });
        }
        let fingerprint = self.knowledge().rows_hash;
        if !self.sliceable() {
            return Err(StateError::NotSliceable);
        }
        if from == to {
            return Ok(Vec::new());
        }
        self.with_scratch(|context, state| {
            context.fetch_range(place, from..to, state)?;
            let parsed = layout::parse(state, place)
                .filter(|parsed| Some(&parsed.layout) == context.knowledge().layout.as_ref())
                .filter(|parsed| parsed.cells() == (to - from) as usize)
                .ok_or(StateError::NotSliceable)?;
            let order = parsed.order(from).ok_or(StateError::NotSliceable)?;
            let heads = (from..to).step_by(block as usize).map(|position| {
                let tokens = block.min(to - position);
                Head { fingerprint, position, tokens }
            });
            let heads: Vec<Head> = heads.collect();
            let empty = |head: &Head| chunk::begin(head.tokens as usize * parsed.layout.row_bytes());
            let mut chunks: Vec<Vec<u8>> = heads.iter().map(empty).collect();
            let places = |head: &Head| {
                let first = (head.position - from) as usize;
                first..first + head.tokens as usize
            };
            let mut wanted: Vec<_> = heads.iter().map(places).zip(&mut chunks).collect();
            parsed.cut_all(state, &order, &mut wanted);
            for (bytes, head) in chunks.iter_mut().zip(heads) {
                chunk::seal(bytes, Kind::Rows, head);
            }
            Ok(chunks)
        })
    }

    /// Makes an empty sequence hold consecutive chunks from position 0 on, each given with the number of its tokens, and
    /// answers how many tokens it holds then.
    ///
    /// # Errors
    /// When a chunk is damaged, foreign or out of place, the sequence is not empty, or there is no room. The sequence is
    /// empty then.
    pub fn restore(&mut self, sequence: u32, chunks: &[(u32, &[u8])]) -> Result<u32, StateError> {
        let place = self.vacant(sequence)?;
        self.put_chunks(place, 0, chunks)
    }

    /// As [`Context::restore`], behind what a sequence of a unified cache holds already, whose cells it goes on sharing with
    /// others. `spare` is an empty sequence, and is so afterwards.
    ///
    /// # Errors
    /// As [`Context::restore`]; the sequence holds what it did then.
    pub fn restore_behind(&mut self, sequence: u32, chunks: &[(u32, &[u8])], spare: u32) -> Result<u32, StateError> {
        let (id, held) = (self.checked(sequence)?, self.next_position(sequence));
        if held == 0 {
            return self.restore(sequence, chunks);
        }
        if !self.kv_unified {
            return Err(StateError::NotSliceable);
        }
        let place = self.vacant(spare)?;
        let holds = self.put_chunks(place, held, chunks)?;
        // SAFETY: both ids are in range and differ, since one is empty and the other is not; the cache is unified. They
        // have no position in common.
        unsafe { sys::llama_memory_seq_cp(self.memory, place.sequence, id, -1, -1) };
        self.remove(spare, 0)?;
        Ok(holds)
    }

    /// Makes a sequence that is empty hold consecutive chunks from position `first` on; answers the position behind them.
    fn put_chunks(&mut self, place: Place, first: u32, chunks: &[(u32, &[u8])]) -> Result<u32, StateError> {
        let fingerprint = self.knowledge().rows_hash;
        let Some(layout) = self.knowledge().layout.clone() else { return Err(StateError::NotSliceable) };
        let mut opened = Vec::with_capacity(chunks.len());
        let mut position = first;
        for (index, &(tokens, bytes)) in chunks.iter().enumerate() {
            let refuse = |fault| StateError::Chunk { index, fault };
            let (head, rows) = chunk::open(bytes, Kind::Rows, fingerprint).map_err(refuse)?;
            if tokens == 0 || (head.tokens, head.position) != (tokens, position) {
                return Err(refuse(ChunkFault::Tokens));
            }
            if Some(rows.len()) != layout.row_bytes().checked_mul(tokens as usize) {
                return Err(refuse(ChunkFault::Length));
            }
            position = self.room(u64::from(position) + u64::from(tokens))?;
            opened.push((tokens, rows));
        }
        if position > first {
            self.with_scratch(|context, state| {
                layout.compose(place, first, &opened, state);
                context.put(place.sequence, position, state)
            })?;
        }
        Ok(position)
    }

    /// The state of a whole sequence, which only a context made the same way takes; works for every model.
    ///
    /// # Errors
    /// When the sequence does not exist, or llama.cpp cannot say its state.
    pub fn save_whole(&mut self, sequence: u32) -> Result<Vec<u8>, StateError> {
        let id = self.checked(sequence)?;
        let tokens = self.next_position(sequence);
        let fingerprint = self.knowledge().whole_hash;
        let mut bytes = chunk::begin(0);
        self.fetch(id, bytes.len(), &mut bytes)?;
        chunk::seal(&mut bytes, Kind::Whole, Head { fingerprint, position: 0, tokens });
        Ok(bytes)
    }

    /// Makes an empty sequence hold what [`Context::save_whole`] gave, and answers how many tokens that is.
    ///
    /// # Errors
    /// As [`Context::restore`].
    pub fn restore_whole(&mut self, sequence: u32, state: &[u8]) -> Result<u32, StateError> {
        let place = self.vacant(sequence)?;
        let fingerprint = self.knowledge().whole_hash;
        let (head, blob) =
            chunk::open(state, Kind::Whole, fingerprint).map_err(|fault| StateError::Chunk { index: 0, fault })?;
        self.room(u64::from(head.tokens))?;
        if head.tokens > 0 {
            self.put(place.sequence, head.tokens, blob)?;
        }
        Ok(head.tokens)
    }

    /// Makes an empty sequence hold the first `len` tokens of another one, through their state.
    pub(super) fn copy_state(&mut self, from: u32, to: u32, held: u32, len: u32) -> Result<(), StateError> {
        let (source, id) = (self.place(from)?, self.checked(to)?);
        if len < held && self.sliceable() {
            return self.with_scratch(|context, state| {
                context.fetch_range(source, 0..len, state)?;
                context.put(id, len, state)
            });
        }
        self.with_scratch(|context, state| {
            context.fetch(source.sequence, 0, state)?;
            context.put(id, held, state)
        })?;
        if len < held && !self.remove(to, len)? {
            self.remove(to, 0)?;
            return Err(StateError::NotSliceable);
        }
        Ok(())
    }

    /// Lends a buffer for a state, whose pages are there already if the last one was not large.
    fn with_scratch<T>(&mut self, work: impl FnOnce(&mut Self, &mut Vec<u8>) -> T) -> T {
        let mut state = std::mem::take(&mut self.scratch);
        let done = work(self, &mut state);
        if state.capacity() <= MAX_KEPT_SCRATCH_BYTES {
            self.scratch = state;
        }
        done
    }

    fn streams(&self) -> u32 {
        if self.kv_unified { 1 } else { self.limits.sequences }
    }

    fn place(&self, sequence: u32) -> Result<Place, StateError> {
        let id = self.checked(sequence)?;
        let stream = if self.kv_unified { 0 } else { sequence };
        Ok(Place { streams: self.streams(), stream, sequence: id })
    }

    /// The place of a sequence that must be empty.
    fn vacant(&self, sequence: u32) -> Result<Place, StateError> {
        let place = self.place(sequence)?;
        match self.next_position(sequence) {
            0 => Ok(place),
            held => Err(StateError::Occupied { sequence, held }),
        }
    }

    fn room(&self, tokens: u64) -> Result<u32, StateError> {
        let limit = self.limits.positions;
        u32::try_from(tokens).ok().filter(|&tokens| tokens <= limit).ok_or(StateError::TooLong { tokens, limit })
    }

    /// llama.cpp's state of a sequence, behind `keep` bytes that `out` already has.
    fn fetch(&self, id: i32, keep: usize, out: &mut Vec<u8>) -> Result<(), StateError> {
        out.truncate(keep);
        logs::clear_recent_errors();
        // SAFETY: the context is alive and the id in range; this counts bytes.
        let bytes = unsafe { sys::llama_state_seq_get_size_ext(self.ptr.as_ptr(), id, 0) };
        out.reserve_exact(bytes);
        let spare = out.spare_capacity_mut();
        // SAFETY: as above; `spare` has room for `bytes` of them, and llama.cpp throws nothing out of this call.
        let written =
            unsafe { sys::llama_state_seq_get_data_ext(self.ptr.as_ptr(), spare.as_mut_ptr().cast(), bytes, id, 0) };
        if bytes == 0 || written != bytes {
            return Err(StateError::Refused(logs::take_recent_errors()));
        }
        // SAFETY: that many bytes behind the first `keep` are written.
        unsafe { out.set_len(keep + bytes) };
        Ok(())
    }

    /// llama.cpp's state of some of a sequence's tokens, as if it had no others; the state can be sliced.
    fn fetch_range(&mut self, place: Place, positions: Range<u32>, out: &mut Vec<u8>) -> Result<(), StateError> {
        out.clear();
        let tokens = positions.end - positions.start;
        let bytes = self.knowledge().layout.as_ref().map_or(0, |layout| layout.state_bytes(place, tokens));
        out.reserve_exact(bytes);
        logs::clear_recent_errors();
        let [from, to] = [positions.start, positions.end].map(|at| i32::try_from(at).unwrap_or(i32::MAX));
        // SAFETY: the context is alive and the sequence in range; there is room for `bytes` of them, and the shim catches
        // exceptions.
        let written = unsafe {
            let room = out.spare_capacity_mut().as_mut_ptr().cast();
            shim::gantry_state_range(self.ptr.as_ptr(), place.sequence, from, to, room, bytes)
        };
        if written == 0 {
            return Err(StateError::Refused(logs::take_recent_errors()));
        }
        // SAFETY: that many bytes are written.
        unsafe { out.set_len(written) };
        Ok(())
    }

    /// Gives a sequence a state that was checked; whatever fails leaves it empty.
    fn put(&mut self, id: i32, tokens: u32, state: &[u8]) -> Result<(), StateError> {
        let sequence = u32::try_from(id).unwrap_or(u32::MAX);
        logs::clear_recent_errors();
        // SAFETY: the context is alive, the id in range, and the bytes are a state that a context of this layout wrote.
        let read = unsafe { sys::llama_state_seq_set_data_ext(self.ptr.as_ptr(), state.as_ptr(), state.len(), id, 0) };
        if read == state.len() && self.next_position(sequence) == tokens {
            return Ok(());
        }
        let reason = logs::take_recent_errors();
        self.remove(sequence, 0)?;
        Err(StateError::Refused(reason))
    }

    fn knowledge(&mut self) -> &Knowledge {
        if self.knowledge.is_none() {
            let layout = self.find_layout();
            self.knowledge = Some(self.describe(layout));
        }
        // Set above; the default says that nothing can be sliced.
        self.knowledge.get_or_insert_with(|| Knowledge {
            layout: None,
            fingerprint: String::new(),
            rows_hash: 0,
            whole_hash: 0,
        })
    }

    fn describe(&self, layout: Option<Layout>) -> Knowledge {
        let rows = layout.as_ref().map_or_else(|| String::from("opaque"), Layout::describe);
        // SAFETY: the context is alive; this reads a field.
        let n_ctx_seq = unsafe { sys::llama_n_ctx_seq(self.ptr.as_ptr()) };
        let fingerprint = format!(
            "llama-cpp-sys-2 {}; {:?}; flash attention {}; {rows}{}",
            env!("GANTRY_LLAMA_CPP_VERSION"),
            self.kv_type,
            if self.flash_attention { "on" } else { "off" },
            rope(self.model.original_context(), n_ctx_seq)
        );
        let whole = format!("{fingerprint}; streams {}", self.streams());
        Knowledge {
            layout,
            rows_hash: chunk::checksum(fingerprint.as_bytes()),
            whole_hash: chunk::checksum(whole.as_bytes()),
            fingerprint,
        }
    }

    /// Looks at a real state: that of a sequence that holds tokens, or of two tokens decoded for it.
    fn find_layout(&mut self) -> Option<Layout> {
        // SAFETY: a valid model; this reads a field. A sliding window drops cells, so that states have gaps.
        if self.memory.is_null() || unsafe { sys::llama_model_n_swa(self.model.raw()) } > 0 {
            return None;
        }
        let busy = (0..self.limits.sequences).find(|&sequence| self.next_position(sequence) > 0);
        let sequence = busy.unwrap_or(0);
        if busy.is_none() {
            self.decode_probe()?;
        }
        let place = self.place(sequence).ok()?;
        let mut state = Vec::new();
        let layout = self.fetch(place.sequence, 0, &mut state).ok().and_then(|()| {
            let parsed = layout::parse(&state, place)?;
            let order = parsed.order(0)?;
            let mut rows = Vec::new();
            parsed.cut(&state, &order, 0..parsed.cells(), &mut rows);
            let mut again = Vec::with_capacity(state.len());
            parsed.layout.compose(place, 0, &[(u32::try_from(parsed.cells()).ok()?, &rows)], &mut again);
            // Cells may stand in another order than their positions; composed, they are in order.
            let in_order = order.iter().zip(0..).all(|(&cell, position)| cell == position);
            (again.len() == state.len() && (!in_order || again == state)).then_some(parsed.layout)
        });
        if busy.is_none() {
            self.remove(sequence, 0).ok()?;
        }
        layout
    }

    fn decode_probe(&mut self) -> Option<()> {
        let mut batch = Batch::new();
        let tokens = PROBE_TOKENS.min(self.n_batch());
        (0..tokens).for_each(|position| batch.add(0, position, 0, position + 1 == tokens));
        let decoded = self.decode(&mut batch);
        self.outputs.clear();
        decoded.ok()
    }
}

/// Names the factors by which keys were rotated before they were kept, where llama.cpp chooses them by the size of the
/// context.
fn rope(original_context: Option<u32>, n_ctx_seq: u32) -> &'static str {
    match original_context {
        None => "",
        Some(original) if n_ctx_seq > original => "; rope long",
        Some(_) => "; rope short",
    }
}
