//! Base64 (RFC 4648, padded) of 32-bit floats, as embeddings travel: four bytes each, little-endian.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(crate) fn encode_floats(floats: &[f32]) -> String {
    let bytes: Vec<u8> = floats.iter().flat_map(|float| float.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0_u32, |word, byte| (word << 8) | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let sextet = (word >> (18 - 6 * place)) & 0x3f;
            text.push(if place > chunk.len() { '=' } else { char::from(ALPHABET[sextet as usize]) });
        }
    }
    text
}

/// `None` where the text is not the encoding of floats.
pub(crate) fn decode_floats(text: &str) -> Option<Vec<f32>> {
    let digits = text.trim_end_matches('=').as_bytes();
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let (mut bytes, mut word, mut bits) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for digit in digits {
        let sextet = ALPHABET.iter().position(|letter| letter == digit)?;
        word = (word << 6) | u32::try_from(sextet).ok()?;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from((word >> bits) & 0xff).ok()?);
        }
    }
    let (floats, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_encodings() {
        // By `python3 -c 'import base64, struct; print(base64.b64encode(struct.pack("<2f", 1, -2.5)))'` and the like.
        for (floats, text) in [
            (&[][..], ""),
            (&[1.0][..], "AACAPw=="),
            (&[1.0, -2.5][..], "AACAPwAAIMA="),
            (&[1.0, -2.5, 0.1][..], "AACAPwAAIMDNzMw9"),
        ] {
            assert_eq!(encode_floats(floats), text);
            assert_eq!(decode_floats(text).as_deref(), Some(floats));
        }
        for text in ["A", "AAAA", "AACAPw=", "AACAP===", "!ACAPw==", "AACAPw==AACAPw=="] {
            assert_eq!(decode_floats(text), None, "{text}");
        }
    }
}
