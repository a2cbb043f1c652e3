//! Server-sent events as the two servers write them, cut into their `data`.
//!
//! As little work as can be, because the client shares the machine with what it measures: no copies but of the event
//! that a read ended in, and no check of what nobody looks at. Fields other than `data` and comments are skipped.

use anyhow::{Result, ensure};

/// Longest event that is read, in bytes.
pub const MAX_EVENT_BYTES: usize = 1 << 20;

/// What has arrived of an event that is not whole yet.
#[derive(Debug, Default)]
pub struct Events {
    rest: Vec<u8>,
}

impl Events {
    /// Takes in the next bytes and gives the `data` of each event that is whole to `on_data`.
    ///
    /// # Errors
    /// When an event is too long, or `on_data` fails.
    pub fn push(&mut self, bytes: &[u8], mut on_data: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.rest.extend_from_slice(bytes);
        let mut begin = 0;
        while let Some(length) = self.rest[begin..].iter().position(|&byte| byte == b'\n') {
            let line = self.rest[begin..begin + length].trim_ascii_end();
            if let Some(data) = line.strip_prefix(b"data:") {
                on_data(data.trim_ascii_start())?;
            }
            begin += length + 1;
        }
        self.rest.drain(..begin);
        ensure!(self.rest.len() <= MAX_EVENT_BYTES, "an event is longer than {MAX_EVENT_BYTES} bytes");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn events_are_whole_wherever_reads_end() {
        let stream = b": ping\n\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:b\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let (mut events, mut seen) = (Events::default(), Vec::new());
            for piece in stream.chunks(size) {
                events
                    .push(piece, |data| {
                        seen.push(String::from_utf8(data.to_vec())?);
                        Ok(())
                    })
                    .unwrap();
            }
            assert_eq!(seen, ["{\"a\":1}", "b", "[DONE]"], "read {size} bytes at a time");
        }
    }

    #[test]
    fn an_endless_event_is_refused() {
        assert!(Events::default().push(&vec![b'a'; MAX_EVENT_BYTES + 1], |_| Ok(())).is_err());
    }
}
