//! The first bytes of what comes, which say at once that it is no model file.

/// The bytes with which every GGUF file begins.
const GGUF: [u8; 4] = *b"GGUF";

/// It begins with other bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Otherwise;

/// Looks at the first bytes of a file, however they are cut.
pub(super) struct Magic {
    seen: usize,
}

impl Magic {
    /// For a file of which so many bytes were looked at before.
    pub(super) fn from(bytes: u64) -> Self {
        Self { seen: usize::try_from(bytes).unwrap_or(GGUF.len()).min(GGUF.len()) }
    }

    /// Looks at the next bytes.
    pub(super) fn check(&mut self, chunk: &[u8]) -> Result<(), Otherwise> {
        let awaited = &GGUF[self.seen..];
        let came = chunk.len().min(awaited.len());
        self.seen += came;
        if chunk[..came] == awaited[..came] { Ok(()) } else { Err(Otherwise) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_decide_however_they_come() {
        let judge = |from: u64, chunks: &[&str]| {
            let mut magic = Magic::from(from);
            chunks.iter().try_for_each(|chunk| magic.check(chunk.as_bytes()))
        };
        for (from, chunks) in
            [(0, &["GGUF..."][..]), (0, &["G", "", "GU", "F", "x"]), (2, &["UF", "x"]), (9, &["x"]), (0, &["GG"])]
        {
            assert_eq!(judge(from, chunks), Ok(()), "{from} {chunks:?}");
        }
        for (from, chunks) in [(0, &["{\"a\":1}"][..]), (0, &["GG", "ML"]), (0, &["x"]), (3, &["x"])] {
            assert_eq!(judge(from, chunks), Err(Otherwise), "{from} {chunks:?}");
        }
    }
}
