//! Model files that are wrong on purpose, made from right ones.
//!
//! Deterministic: the store makes the bytes and a test computes their digest from the same function, so that the digest
//! gate passes and the one behind it has to find the fault. The walk over the header is as short as it can be and shares
//! nothing with the server's reader, which is what is being tested.

use anyhow::{Context, Result, bail, ensure};

/// Alignment of tensor data in the demo models.
const ALIGNMENT_BYTES: u64 = 32;
/// Most entries that are walked over; the demo models have fewer than a hundred of each.
const MAX_ENTRIES: u64 = 4096;

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Only the first bytes are there.
    Truncated {
        /// How many.
        bytes: usize,
    },
    /// The header lies about a tensor.
    HeaderLie(HeaderLie),
    /// The chat template is another one.
    Template(BadTemplate),
    /// The header has an array of empty strings, which takes eight times as much memory as room in the file.
    Swelling {
        /// How many strings; a multiple of four.
        strings: usize,
    },
}

/// A chat template that no model may answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadTemplate {
    /// It calls what is no function.
    Speechless,
    /// It does not end.
    Endless,
}

impl BadTemplate {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Speechless, Self::Endless];

    /// Its name in addresses of the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Speechless => "speechless",
            Self::Endless => "endless",
        }
    }

    /// The template with that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|template| template.as_str() == name)
    }

    fn text(self) -> &'static str {
        match self {
            Self::Speechless => "{% for m in messages %}\n{{ m.content.nope() }}{% endfor %}",
            Self::Endless => "{% for i in range(9999) %}\n{% for j in range(9999) %}{{ j }}{% endfor %}{% endfor %}",
        }
    }
}

/// A lie about a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderLie {
    /// The last tensor is said to be 4096 times as large as it is.
    Dimensions,
    /// The last tensor is said to lie behind the end of the file.
    Offset,
    /// The second tensor is said to lie where the first one does.
    Overlap,
}

impl HeaderLie {
    /// All lies.
    pub const ALL: [Self; 3] = [Self::Dimensions, Self::Offset, Self::Overlap];

    /// Its name in addresses of the store.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dimensions => "dimensions",
            Self::Offset => "offset",
            Self::Overlap => "overlap",
        }
    }

    /// The lie with that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|lie| lie.as_str() == name)
    }
}

impl Fault {
    /// Where the store serves `file` with this fault, without a leading slash.
    #[must_use]
    pub fn store_path(&self, file: &str) -> String {
        match self {
            Self::Truncated { bytes } => format!("fault/truncate/{bytes}/{file}"),
            Self::HeaderLie(lie) => format!("fault/header-lie/{}/{file}", lie.as_str()),
            Self::Template(template) => format!("fault/template/{}/{file}", template.as_str()),
            Self::Swelling { strings } => format!("fault/swelling/{strings}/{file}"),
        }
    }

    /// Damages `file`.
    ///
    /// # Errors
    /// When the file is too short, or not the GGUF file of a model with at least two tensors.
    pub fn apply(&self, mut file: Vec<u8>) -> Result<Vec<u8>> {
        match self {
            Self::Truncated { bytes } => {
                ensure!(*bytes < file.len(), "{bytes} bytes are no truncation of {}", file.len());
                file.truncate(*bytes);
            }
            Self::HeaderLie(lie) => {
                let tensors = tensors(&file)?;
                let (first, second, last) = match tensors.as_slice() {
                    [first, second, .., last] => (first, second, last),
                    _ => bail!("a header with at least three tensors is needed, this one has {}", tensors.len()),
                };
                let (at, value) = match lie {
                    HeaderLie::Dimensions => (last.last_dimension_at, last.last_dimension * 4096),
                    HeaderLie::Offset => (last.offset_at, (file.len() as u64).next_multiple_of(ALIGNMENT_BYTES)),
                    HeaderLie::Overlap => (second.offset_at, first.offset),
                };
                file[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            Self::Template(template) => replace_template(&mut file, template.text())?,
            Self::Swelling { strings } => swell(&mut file, *strings)?,
        }
        Ok(file)
    }
}

/// What is left of the template that was there becomes a comment.
fn replace_template(file: &mut [u8], template: &str) -> Result<()> {
    const KEY: &[u8] = b"tokenizer.chat_template";
    let key = file.windows(KEY.len()).position(|window| window == KEY).context("there is no chat template")?;
    // The key is followed by the type of its value.
    let mut walk = Walk { file, at: key + KEY.len() + 4 };
    let length = usize::try_from(walk.u64()?)?;
    let at = walk.at;
    let padding =
        length.checked_sub(template.len() + 4).context("the chat template is shorter than what replaces it")?;
    let text = format!("{template}{{#{}#}}", " ".repeat(padding));
    file.get_mut(at..at + length).context("the header ends too early")?.copy_from_slice(text.as_bytes());
    Ok(())
}

/// Puts the array before all other values. It has a multiple of the alignment's bytes, so that tensors stay where they are
/// to be.
fn swell(file: &mut Vec<u8>, strings: usize) -> Result<()> {
    const KEY: &[u8] = b"swelling";
    const VALUES: std::ops::Range<usize> = 16..24;
    ensure!(strings.is_multiple_of(4), "{strings} is no multiple of four");
    let values = Walk { file, at: VALUES.start }.u64()?;
    let mut entry = Vec::with_capacity(32 + 8 * strings);
    entry.extend((KEY.len() as u64).to_le_bytes());
    entry.extend(KEY);
    entry.extend(9_u32.to_le_bytes());
    entry.extend(8_u32.to_le_bytes());
    entry.extend((strings as u64).to_le_bytes());
    entry.resize(32 + 8 * strings, 0);
    file[VALUES].copy_from_slice(&(values + 1).to_le_bytes());
    file.splice(VALUES.end..VALUES.end, entry);
    Ok(())
}

/// Where the header speaks of a tensor.
struct TensorEntry {
    last_dimension: u64,
    last_dimension_at: usize,
    offset: u64,
    offset_at: usize,
}

fn tensors(file: &[u8]) -> Result<Vec<TensorEntry>> {
    let mut walk = Walk { file, at: 0 };
    ensure!(walk.bytes(4)? == b"GGUF", "not a GGUF file");
    ensure!(walk.u32()? == 3, "not version 3 of GGUF");
    let (tensor_count, value_count) = (walk.count()?, walk.count()?);
    for _ in 0..value_count {
        walk.string()?;
        let kind = walk.u32()?;
        walk.value(kind)?;
    }
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        walk.string()?;
        let dimensions = walk.u32()?;
        ensure!((1..=4).contains(&dimensions), "a tensor with {dimensions} dimensions");
        let mut last_dimension = 0;
        for _ in 0..dimensions {
            last_dimension = walk.u64()?;
        }
        let last_dimension_at = walk.at - 8;
        walk.u32()?; // its type
        let offset_at = walk.at;
        tensors.push(TensorEntry { last_dimension, last_dimension_at, offset: walk.u64()?, offset_at });
    }
    Ok(tensors)
}

struct Walk<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    fn bytes(&mut self, length: u64) -> Result<&'a [u8]> {
        let end = usize::try_from(length).ok().and_then(|length| self.at.checked_add(length));
        let bytes = end.and_then(|end| self.file.get(self.at..end)).context("the header ends too early")?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(4)?.try_into()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into()?))
    }

    fn count(&mut self) -> Result<u64> {
        let count = self.u64()?;
        ensure!(count <= MAX_ENTRIES, "{count} entries are more than a demo model has");
        Ok(count)
    }

    fn string(&mut self) -> Result<()> {
        let length = self.u64()?;
        self.bytes(length).map(drop)
    }

    fn value(&mut self, kind: u32) -> Result<()> {
        match kind {
            8 => self.string(),
            9 => {
                let (item, count) = (self.u32()?, self.u64()?);
                match fixed_bytes(item) {
                    Some(bytes) => self.bytes(count.saturating_mul(bytes)).map(drop),
                    None => (0..count).try_for_each(|_| self.value(item)),
                }
            }
            _ => self.bytes(fixed_bytes(kind).with_context(|| format!("unknown value type {kind}"))?).map(drop),
        }
    }
}

/// Size of GGUF's number types.
fn fixed_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::models::DemoModel;

    #[test]
    fn a_lie_changes_one_number_of_the_header_and_nothing_else() {
        let file = DemoModel::V1.bytes().unwrap();
        for lie in HeaderLie::ALL {
            let damaged = Fault::HeaderLie(lie).apply(file.clone()).unwrap();
            assert_eq!(damaged.len(), file.len());
            let changed: Vec<usize> = (0..file.len()).filter(|&at| file[at] != damaged[at]).collect();
            let span = changed.last().unwrap() - changed.first().unwrap();
            assert!(span < 8 && *changed.last().unwrap() < 200_000, "{lie:?}: {changed:?}");
        }
    }

    #[test]
    fn another_template_and_more_values_leave_the_tensors_where_they_are() {
        let file = DemoModel::V2.bytes().unwrap();
        let offsets = |file: &[u8]| tensors(file).unwrap().iter().map(|tensor| tensor.offset).collect::<Vec<_>>();
        for template in BadTemplate::ALL {
            let damaged = Fault::Template(template).apply(file.clone()).unwrap();
            assert_eq!((damaged.len(), offsets(&damaged)), (file.len(), offsets(&file)), "{template:?}");
            let text = template.text().as_bytes();
            assert!(damaged.windows(text.len()).any(|window| window == text), "{template:?}");
        }
        let damaged = Fault::Swelling { strings: 1 << 10 }.apply(file.clone()).unwrap();
        assert_eq!((damaged.len(), offsets(&damaged)), (file.len() + 32 + (8 << 10), offsets(&file)));
        assert_eq!(damaged[damaged.len() - 4096..], file[file.len() - 4096..]);
    }

    #[test]
    fn truncation_cuts() {
        let fault = Fault::Truncated { bytes: 3 };
        assert_eq!(fault.apply(vec![1, 2, 3, 4]).unwrap(), [1, 2, 3]);
        assert!(fault.apply(vec![1, 2, 3]).is_err());
    }

    #[test]
    fn what_is_no_model_is_refused() {
        for bytes in [&b"GGUF"[..], b"", b"GGML\x03\0\0\0"] {
            assert!(Fault::HeaderLie(HeaderLie::Offset).apply(bytes.to_vec()).is_err());
        }
    }
}
