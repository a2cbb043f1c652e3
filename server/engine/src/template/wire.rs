//! What is said to a process that renders a template, and by it: length, then postcard, over a socket.

use std::io::{self, Read, Write};

use gantry_llama::{ChatError, ShownCalls, TemplateSource};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::limits::MAX_TEMPLATE_MESSAGE_BYTES;

/// What a template knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Knows {
    pub(super) tools: bool,
    pub(super) thinking: bool,
    /// While no tools are offered, and while some are.
    pub(super) shown_calls: [ShownCalls; 2],
}

/// To the process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Make this template ready; the first message, and sent once. `aside`: whatever else computes goes before what is
    /// rendered. `most_bytes`: what the process may take from now on.
    Parse { source: TemplateSource, aside: bool, most_bytes: u64 },
    /// Render, within so much computing.
    Render { chat: String, cpu_ms: u64 },
}

/// From it, one for each message.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// What the template knows of.
    Parsed(Result<Knows, ChatError>),
    /// As `ChatTemplate::render_json` has it.
    Rendered(Result<String, ChatError>),
}

pub(super) fn send<T: Serialize>(to: &mut impl Write, message: &T) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_TEMPLATE_MESSAGE_BYTES);
    let length = length.ok_or_else(|| io::Error::other("the message is too large"))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&bytes)?;
    to.flush()
}

/// The next message; `None`: the other side has gone.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u64::from(u32::from_le_bytes(length));
    if length > MAX_TEMPLATE_MESSAGE_BYTES as u64 {
        return Err(io::Error::other("the message is too large"));
    }
    // Memory follows what comes, not what is announced.
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Ok(None);
    }
    postcard::from_bytes(&bytes).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_message_arrives_whole_or_not_at_all() {
        let ask = Ask::Render { chat: "[]".to_owned(), cpu_ms: 1 };
        let mut wire = Vec::new();
        send(&mut wire, &ask).unwrap();
        assert!(matches!(receive(&mut &wire[..]).unwrap(), Some(Ask::Render { chat, .. }) if chat == "[]"));
        for cut in 0..wire.len() {
            assert!(receive::<Ask>(&mut &wire[..cut]).unwrap().is_none());
        }
        assert!(receive::<Ask>(&mut &u32::MAX.to_le_bytes()[..]).is_err());
    }
}
