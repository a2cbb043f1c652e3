//! Models with other templates than their own.

/// A model's file with another chat template, which is no longer than its own: the rest of that is a comment.
pub fn with_template(mut file: Vec<u8>, template: &str) -> Vec<u8> {
    let key = b"tokenizer.chat_template";
    let at = file.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    let length = usize::try_from(u64::from_le_bytes(file[at..at + 8].try_into().unwrap())).unwrap();
    let padding = " ".repeat(length.checked_sub(template.len() + 4).expect("a shorter template"));
    file[at + 8..at + 8 + length].copy_from_slice(format!("{template}{{#{padding}#}}").as_bytes());
    file
}
