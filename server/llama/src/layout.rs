//! How the pinned llama.cpp writes the KV state of one sequence, so that the rows of some of its tokens can be cut out
//! of it and put together again. Bytes in, bytes out: no call to llama.cpp here.
//!
//! `llama_kv_cache::state_write` gives: magic, sequence, number of streams; for each stream a count of cells and, where
//! there are any, their positions (with the one sequence asked for), whether V is transposed, the layers, the rotations
//! and then for each layer the type, the size of a row and the rows of K; then the same of V (models with latent
//! attention have no V). Without flash attention V is transposed: for each layer the type, the size of an element and how
//! many a row has, then the first element of every cell, the second of every cell and so on. Whatever is not exactly so
//! (recurrent state, two caches one after the other, cells with more than a position) is refused by [`parse`], and such a
//! state is saved only as a whole.

use std::fmt::Write as _;
use std::ops::Range;

/// llama.cpp's `io_magic`.
const STATE_MAGIC: u32 = 0xaf14_3cd8;
/// Layers that a state may name; more is not a state.
const MAX_LAYERS: u32 = 4096;
/// Bytes of a cell's entry: position, number of sequences, the sequence.
const CELL_BYTES: usize = 12;
/// Bytes before the rows of one layer: type, size of a row (or of an element, and elements of a row).
const BLOCK_HEAD_BYTES: usize = 12;
/// Bytes that an element of a row may have where it stands alone: f32 at most.
const MAX_ELEMENT_BYTES: u32 = 4;

/// The rows that each token has: K of every layer, then V of every layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    layers: u32,
    n_rot_k: u32,
    n_rot_v: u32,
    v_transposed: bool,
    /// In the order of the state.
    rows: Vec<Row>,
    row_bytes: usize,
}

/// What one layer has of a token, K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    kind: i32,
    bytes: usize,
    /// Bytes that stand together: all of the row, or one element where the rows are transposed.
    part: usize,
}

impl Row {
    /// Where each part begins, as a share of the row.
    fn parts(self) -> impl Iterator<Item = usize> {
        (0..self.bytes).step_by(self.part.max(1))
    }
}

/// Where a sequence's state stands in a context: the number of streams, and which one is the sequence's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) streams: u32,
    pub(crate) stream: u32,
    pub(crate) sequence: i32,
}

/// A state that was understood.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) layout: Layout,
    /// Position of each cell, in the order of the rows.
    positions: Vec<i32>,
    /// Where the rows of each block begin.
    blocks: Vec<usize>,
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.bytes.get(self.at..)?.first_chunk::<N>()?;
        self.at += N;
        Some(*bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn i32(&mut self) -> Option<i32> {
        self.take().map(i32::from_ne_bytes)
    }

    fn skip(&mut self, bytes: usize) -> Option<()> {
        self.at = self.at.checked_add(bytes).filter(|&at| at <= self.bytes.len())?;
        Some(())
    }

    /// A layer's row, and where its rows begin.
    fn block(&mut self, cells: usize, transposed: bool) -> Option<(Row, usize)> {
        let kind = self.i32()?;
        let row = if transposed {
            let (part, parts) = (self.u32().filter(|&bytes| bytes <= MAX_ELEMENT_BYTES)?, self.u32()?);
            Row { kind, bytes: (part as usize).checked_mul(parts as usize)?, part: part as usize }
        } else {
            let bytes = usize::try_from(self.take().map(u64::from_ne_bytes)?).ok()?;
            Row { kind, bytes, part: bytes }
        };
        let begin = self.at;
        self.skip(row.bytes.checked_mul(cells)?)?;
        (row.bytes > 0).then_some((row, begin))
    }
}

/// Reads a state; `None` where it is not one that can be sliced.
pub(crate) fn parse(state: &[u8], place: Place) -> Option<Parsed> {
    let mut reader = Reader { bytes: state, at: 0 };
    let head = (reader.u32()?, reader.i32()?, reader.u32()?);
    if head != (STATE_MAGIC, place.sequence, place.streams) {
        return None;
    }
    for _ in 0..place.stream {
        (reader.u32()? == 0).then_some(())?;
    }
    let cells = reader.u32()? as usize;
    if cells == 0 || cells > state.len() / CELL_BYTES {
        return None;
    }
    let mut positions = Vec::with_capacity(cells);
    for _ in 0..cells {
        positions.push(reader.i32()?);
        (reader.u32()? == 1 && reader.i32()? == place.sequence).then_some(())?;
    }
    let (v_transposed, layers) = (reader.u32()?, reader.u32()?);
    let (n_rot_k, n_rot_v) = (reader.u32()?, reader.u32()?);
    if v_transposed > 1 || layers == 0 || layers > MAX_LAYERS {
        return None;
    }
    let v_transposed = v_transposed == 1;
    // After the rows, only the empty streams are left.
    let tail = 4 * (place.streams - place.stream - 1) as usize;
    let end = state.len().checked_sub(tail)?;
    let (mut rows, mut blocks) = (Vec::new(), Vec::new());
    for half in 0..2 {
        if half == 1 && reader.at == end {
            break;
        }
        for _ in 0..layers {
            let (row, begin) = reader.block(cells, half == 1 && v_transposed)?;
            rows.push(row);
            blocks.push(begin);
        }
    }
    if reader.at != end || state[end..].iter().any(|&byte| byte != 0) {
        return None;
    }
    let row_bytes = rows.iter().try_fold(0_usize, |sum, row| sum.checked_add(row.bytes))?;
    let layout = Layout { layers, n_rot_k, n_rot_v, v_transposed, rows, row_bytes };
    Some(Parsed { layout, positions, blocks })
}

impl Parsed {
    /// Cells there are.
    pub(crate) fn cells(&self) -> usize {
        self.positions.len()
    }

    /// Which cell holds each position, where the positions are `first`, the next one and so on without a gap.
    pub(crate) fn order(&self, first: u32) -> Option<Vec<u32>> {
        let mut order = vec![u32::MAX; self.positions.len()];
        for (cell, &position) in (0_u32..).zip(&self.positions) {
            let place = u32::try_from(position).ok()?.checked_sub(first)?;
            let slot = order.get_mut(place as usize)?;
            (*slot == u32::MAX).then_some(())?;
            *slot = cell;
        }
        Some(order)
    }

    /// Appends the rows of some positions, counted from the first that there is, block by block.
    pub(crate) fn cut(&self, state: &[u8], order: &[u32], positions: Range<usize>, out: &mut Vec<u8>) {
        self.cut_all(state, order, &mut [(positions, out)]);
    }

    /// As [`Parsed::cut`] for several at once: those of a layer after each other, since it fits in a processor's cache, and
    /// a state does not.
    pub(crate) fn cut_all(&self, state: &[u8], order: &[u32], wanted: &mut [(Range<usize>, &mut Vec<u8>)]) {
        let runs: Vec<_> = wanted.iter().map(|(positions, _)| runs(&order[positions.clone()])).collect();
        for (&begin, row) in self.blocks.iter().zip(&self.layout.rows) {
            for ((_, out), runs) in wanted.iter_mut().zip(&runs) {
                for part in row.parts() {
                    // `parse` found room for every row.
                    let begin = begin + part * self.cells();
                    for run in runs {
                        out.extend_from_slice(&state[begin + run.start * row.part..begin + run.end * row.part]);
                    }
                }
            }
        }
    }
}

/// Consecutive numbers, put together.
fn runs(numbers: &[u32]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in numbers.iter().map(|&number| number as usize) {
        match runs.last_mut() {
            Some(run) if run.end == number => run.end += 1,
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

impl Layout {
    /// Bytes of all rows of one token.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of the state of so many tokens, at most.
    pub(crate) fn state_bytes(&self, place: Place, tokens: u32) -> usize {
        (tokens as usize) * (self.row_bytes + CELL_BYTES)
            + self.rows.len() * BLOCK_HEAD_BYTES
            + 4 * (place.streams as usize + 8)
    }

    /// The layout in words, equal for equal layouts.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!("layers {} rot {}/{} rows", self.layers, self.n_rot_k, self.n_rot_v);
        let mut rows = self.rows.as_slice();
        while let Some(&row) = rows.first() {
            let count = rows.iter().take_while(|&&other| other == row).count();
            let Row { kind, bytes, part } = row;
            // Writing to a String cannot fail.
            let _ = write!(text, " {kind}:{bytes}x{count}");
            if part != bytes {
                let _ = write!(text, " by {part}");
            }
            rows = &rows[count..];
        }
        text
    }

    /// The state whose positions from `first` on hold the rows of these chunks (their number of tokens, their rows as
    /// [`Parsed::cut`] gives them), as llama.cpp would have written it. The caller has checked the lengths.
    pub(crate) fn compose(&self, place: Place, first: u32, chunks: &[(u32, &[u8])], out: &mut Vec<u8>) {
        let cells: u32 = chunks.iter().map(|chunk| chunk.0).sum();
        out.clear();
        out.reserve_exact(self.state_bytes(place, cells));
        let mut word = |word: [u8; 4]| out.extend_from_slice(&word);
        word(STATE_MAGIC.to_ne_bytes());
        word(place.sequence.to_ne_bytes());
        word(place.streams.to_ne_bytes());
        for _ in 0..place.stream {
            word([0; 4]);
        }
        word(cells.to_ne_bytes());
        for position in first..first + cells {
            word(position.to_ne_bytes());
            word(1_u32.to_ne_bytes());
            word(place.sequence.to_ne_bytes());
        }
        for number in [u32::from(self.v_transposed), self.layers, self.n_rot_k, self.n_rot_v] {
            word(number.to_ne_bytes());
        }
        let mut before = 0;
        for (row, index) in self.rows.iter().zip(0..) {
            out.extend_from_slice(&row.kind.to_ne_bytes());
            if !self.v_transposed || index < self.layers {
                out.extend_from_slice(&(row.bytes as u64).to_ne_bytes());
            } else {
                // In range: they were read from words.
                for number in [row.part, row.bytes / row.part] {
                    out.extend_from_slice(&u32::try_from(number).unwrap_or(u32::MAX).to_ne_bytes());
                }
            }
            // Chunk by chunk within a layer: a chunk's rows stand together, and a layer fits in a processor's cache.
            let begin = out.len();
            out.resize(begin + row.bytes * cells as usize, 0);
            let mut composed = 0;
            for &(tokens, rows) in chunks {
                let tokens = tokens as usize;
                for part in row.parts() {
                    let from = (before + part) * tokens;
                    let to = begin + part * cells as usize + composed * row.part;
                    out[to..to + row.part * tokens].copy_from_slice(&rows[from..from + row.part * tokens]);
                }
                composed += tokens;
            }
            before += row.bytes;
        }
        for _ in place.stream + 1..place.streams {
            out.extend_from_slice(&[0; 4]);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const PLACE: Place = Place { streams: 3, stream: 1, sequence: 1 };

    fn layout(v_transposed: bool) -> Layout {
        let row = |kind, bytes, part| Row { kind, bytes, part };
        let v = if v_transposed { [row(1, 2, 2), row(1, 6, 2)] } else { [row(8, 2, 2), row(8, 6, 6)] };
        let rows = [row(1, 4, 4), row(1, 4, 4)].into_iter().chain(v).collect();
        Layout { layers: 2, n_rot_k: 0, n_rot_v: 64, v_transposed, rows, row_bytes: 16 }
    }

    fn state(tokens: u32, v_transposed: bool) -> (Vec<u8>, Vec<u8>) {
        let rows: Vec<u8> = (0..tokens * 16).map(|i| (i * 7 % 251) as u8).collect();
        let mut state = Vec::new();
        layout(v_transposed).compose(PLACE, 0, &[(tokens, &rows)], &mut state);
        (state, rows)
    }

    #[test]
    fn what_is_composed_is_parsed_and_cut_into_the_same_rows() {
        for v_transposed in [false, true] {
            let (layout, (state, rows)) = (layout(v_transposed), state(5, v_transposed));
            let parsed = parse(&state, PLACE).unwrap();
            assert_eq!((&parsed.layout, parsed.cells()), (&layout, 5));
            let order = parsed.order(0).unwrap();
            let mut again = Vec::new();
            parsed.cut(&state, &order, 0..5, &mut again);
            assert_eq!(again, rows);
            let (mut head, mut rest, mut whole) = (Vec::new(), Vec::new(), Vec::new());
            parsed.cut(&state, &order, 0..2, &mut head);
            parsed.cut(&state, &order, 2..5, &mut rest);
            layout.compose(PLACE, 0, &[(2, &head), (3, &rest)], &mut whole);
            assert_eq!(whole, state);
        }
        assert_eq!(layout(false).describe(), "layers 2 rot 0/64 rows 1:4x2 8:2x1 8:6x1");
        assert_eq!(layout(true).describe(), "layers 2 rot 0/64 rows 1:4x2 1:2x1 1:6x1 by 2");
    }

    #[test]
    fn a_transposed_row_is_the_same_element_of_every_cell_after_another() {
        // One layer, three elements of two bytes, two cells.
        let layout = Layout {
            layers: 1,
            n_rot_k: 0,
            n_rot_v: 0,
            v_transposed: true,
            rows: vec![Row { kind: 1, bytes: 2, part: 2 }, Row { kind: 1, bytes: 6, part: 2 }],
            row_bytes: 8,
        };
        let (one, two) = (b"k1a1b1c1", b"k2a2b2c2");
        let place = Place { streams: 1, stream: 0, sequence: 0 };
        let mut state = Vec::new();
        layout.compose(place, 0, &[(1, one), (1, two)], &mut state);
        assert!(state.ends_with(b"a1a2b1b2c1c2"));
        let parsed = parse(&state, place).unwrap();
        let mut second = Vec::new();
        parsed.cut(&state, &parsed.order(0).unwrap(), 1..2, &mut second);
        assert_eq!(second, two);
    }

    #[test]
    fn cells_out_of_order_are_put_in_order_and_gaps_are_refused() {
        let (state, _) = state(3, false);
        let mut parsed = parse(&state, PLACE).unwrap();
        parsed.positions = vec![2, 0, 1];
        assert_eq!(parsed.order(0), Some(vec![1, 2, 0]));
        assert_eq!(runs(&[1, 2, 0]), [1..3, 0..1]);
        for bad in [vec![1, 2, 3], vec![0, 0, 1], vec![-1, 0, 1]] {
            parsed.positions = bad;
            assert_eq!(parsed.order(0), None);
        }
    }

    #[test]
    fn no_state_cut_short_or_changed_is_misread() {
        for v_transposed in [false, true] {
            assert_is_not_misread(&state(3, v_transposed).0);
        }
    }

    fn assert_is_not_misread(state: &[u8]) {
        for end in 0..state.len() {
            assert!(parse(&state[..end], PLACE).is_none(), "cut at {end}");
        }
        let mut longer = state.to_vec();
        longer.push(0);
        assert!(parse(&longer, PLACE).is_none());
        for place in [
            Place { stream: 0, ..PLACE },
            Place { stream: 2, ..PLACE },
            Place { streams: 4, ..PLACE },
            Place { sequence: 2, ..PLACE },
        ] {
            assert!(parse(state, place).is_none(), "{place:?}");
        }
        // Any byte may change: what is still read stays within the bytes.
        for at in 0..state.len() {
            for flip in [1, 0x80, 0xff] {
                let mut changed = state.to_vec();
                changed[at] ^= flip;
                if let Some(parsed) = parse(&changed, PLACE)
                    && let Some(order) = parsed.order(0)
                {
                    parsed.cut(&changed, &order, 0..parsed.cells(), &mut Vec::new());
                }
            }
        }
    }
}
