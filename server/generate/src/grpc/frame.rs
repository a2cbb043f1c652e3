//! Messages in their frames: a byte that says whether it is compressed, its length, and itself.

use bytes::{Buf, BufMut, BytesMut};
use gantry_core::{ApiError, ErrorCode};
use prost::Message;

/// What stands before a message.
const PREFIX_BYTES: usize = 5;
/// What a field takes in memory beside its text, at the most: the entry of a list that has grown to twice its length, and the
/// allocation of its text.
const FIELD_BYTES: usize = 160;
/// The bits of a key that say what kind of field follows.
const WIRE_BITS: u32 = 3;

/// The one message that a body is.
pub(super) fn message<M: Message + Default>(body: &[u8]) -> Result<M, ApiError> {
    M::decode(inner(body)?).map_err(|error| wrong(format!("The message cannot be read: {error}.")))
}

fn inner(body: &[u8]) -> Result<&[u8], ApiError> {
    let Some((mut prefix, message)) = body.split_at_checked(PREFIX_BYTES) else {
        return Err(wrong("One message is expected, and none came.".to_owned()));
    };
    if prefix.get_u8() != 0 {
        return Err(wrong("The message is compressed, which is not taken here.".to_owned()));
    }
    let (declared, came) = (prefix.get_u32() as usize, message.len());
    if declared != came {
        return Err(wrong(format!("One message of {declared} bytes is expected, and {came} bytes came of it.")));
    }
    Ok(message)
}

fn wrong(message: String) -> ApiError {
    ApiError::invalid(None, ErrorCode::InvalidMessage, message)
}

/// Puts a message into its frame, at the end of a buffer.
pub(super) fn put(message: &impl Message, out: &mut BytesMut) {
    let bytes = message.encoded_len();
    out.reserve(PREFIX_BYTES + bytes);
    out.put_u8(0);
    // No answer comes near it.
    out.put_u32(u32::try_from(bytes).unwrap_or(u32::MAX));
    message.encode_raw(out);
}

/// What the message of a body takes in memory once it is read, its texts left out: told from its fields, and no less than it is. An
/// entry of a list may be two bytes, and takes a hundred.
#[must_use]
pub fn message_memory_bytes(body: &[u8]) -> usize {
    let mut rest = body.get(PREFIX_BYTES..).unwrap_or_default();
    let mut bytes = FIELD_BYTES;
    while let Some(key) = varint(&mut rest) {
        let length = match key & ((1 << WIRE_BITS) - 1) {
            0 => varint(&mut rest).map(|_| 0),
            1 => Some(8),
            2 => {
                bytes += FIELD_BYTES;
                varint(&mut rest).and_then(|length| usize::try_from(length).ok())
            }
            5 => Some(4),
            _ => None,
        };
        // What is none is refused by who reads it, and nothing after it is read.
        let Some(after) = length.and_then(|length| rest.get(length..)) else { break };
        rest = after;
    }
    bytes
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    if rest.is_empty() { None } else { prost::encoding::decode_varint(rest).ok() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::grpc::proto::{ChatMessage, ChatRequest, EmbeddingsRequest, GenerateRequest};

    fn framed(message: &impl Message) -> BytesMut {
        let mut out = BytesMut::new();
        put(message, &mut out);
        out
    }

    #[test]
    fn a_message_comes_out_of_its_frame_as_it_was_and_anything_else_is_told() {
        let asked = GenerateRequest { prompt: "Hi".to_owned(), seed: Some(7), ..GenerateRequest::default() };
        let body = framed(&asked);
        assert_eq!(message::<GenerateRequest>(&body).unwrap(), asked);
        let changed = |at: usize, byte: u8| {
            let mut body = body.to_vec();
            body[at] = byte;
            body
        };
        let two = [body.to_vec(), body.to_vec()].concat();
        for (body, says) in [
            (Vec::new(), "none came"),
            (body[..4].to_vec(), "none came"),
            (changed(0, 1), "compressed"),
            (changed(4, 99), "99 bytes is expected"),
            (two, "bytes came of it"),
            (changed(5, 0xff), "cannot be read"),
        ] {
            let error = message::<GenerateRequest>(&body).unwrap_err();
            assert_eq!((error.status, error.code.as_str()), (400, "invalid_message"));
            assert!(error.message.contains(says), "{error}");
        }
    }

    #[test]
    fn memory_is_told_from_the_fields_before_they_are_read() {
        let small = framed(&GenerateRequest { prompt: "x".repeat(1 << 20), ..GenerateRequest::default() });
        assert!(message_memory_bytes(&small) <= 2 * FIELD_BYTES);
        let (texts, messages) = (vec![String::new(); 1000], vec![ChatMessage::default(); 1000]);
        let texts = EmbeddingsRequest { input: texts, ..EmbeddingsRequest::default() };
        let chat = ChatRequest { messages, ..ChatRequest::default() };
        for (body, entry) in [(framed(&texts), size_of::<String>()), (framed(&chat), size_of::<ChatMessage>())] {
            assert!(body.len() < 2100);
            assert!(message_memory_bytes(&body) >= 1000 * 2 * entry);
        }
        for cut in [&[][..], &[0; 5], &[0, 0, 0, 0, 9, 0xff], &[0, 0, 0, 0, 9, 0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]] {
            assert!(message_memory_bytes(cut) <= 2 * FIELD_BYTES);
        }
    }
}
