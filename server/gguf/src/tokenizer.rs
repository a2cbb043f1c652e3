//! The tokenizer's part of the metadata: known to llama.cpp, complete, and in the types that it takes.
//!
//! The lists follow llama.cpp's `src/llama-vocab.cpp`; `tests/llama_source.rs` compares them. Absent: the tokens
//! themselves; [`crate::scan`] has seen what is to be known of them while it passed over them.

use crate::error::{Defect, Result, malformed, printable};
use crate::finding::{Code, Finding, Log};
use crate::limits::{MAX_ALL_CONTROL_TOKEN_BYTES, MAX_CONTROL_TOKEN_BYTES};
use crate::scan::{CHARS_KEY, MERGES_KEY, SCORES_KEY, SUPPRESS_KEY, Scan, TOKENS_KEY, TYPES_KEY};
use crate::value::{Entry, Metadata, Value, ValueType};

/// Kinds of tokenizers.
pub(crate) const MODELS: &[&str] =
    &["bert", "gemma4", "gpt2", "hybriddna", "llama", "plamo2", "rwkv", "t5", "whitespace"];

/// Ways of cutting text before byte-pair encoding, sorted.
pub(crate) const PRE_TOKENIZERS: &[&str] = &[
    "a.x-4.0",
    "afmoe",
    "bailingmoe",
    "bailingmoe2",
    "bloom",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "cohere2moe",
    "command-r",
    "dbrx",
    "deepseek-coder",
    "deepseek-llm",
    "deepseek-r1-qwen",
    "deepseek-v3",
    "default",
    "exaone",
    "exaone-moe",
    "exaone4",
    "f2llmv2",
    "falcon",
    "falcon-h1",
    "falcon3",
    "gemma4",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "gpt-4o",
    "gpt3-finnish",
    "granite-docling",
    "granite-embed-multi-311m",
    "granite-embed-multi-97m",
    "grok-2",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "jais",
    "jais-2",
    "jina-de",
    "jina-es",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "jina-v5-nano",
    "joyai-llm",
    "kanana2",
    "kimi-k2",
    "kormo",
    "laguna",
    "lfm2",
    "llada-moe",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "llama4",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "minicpm5",
    "minimax-m2",
    "mmbert",
    "modern-bert",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "poro-chat",
    "qwen2",
    "qwen35",
    "refact",
    "roberta-bpe",
    "sarvam-moe",
    "seed-coder",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "spark2_5",
    "stablelm2",
    "starcoder",
    "superbpe",
    "talkie",
    "tekken",
    "tiny_aya",
    "trillion",
    "ufakzeka",
    "viking",
    "whitespace",
    "youtu",
];

/// Pre-tokenizers that leave text in characters, where all others write it in bytes. A character that has no token becomes
/// the tokens of its bytes there, such as `<0x0A>`.
const OF_CHARACTERS: &[&str] = &["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe", "whitespace"];

/// Key of the kind of tokenizer.
pub(crate) const MODEL_KEY: &str = "tokenizer.ggml.model";
/// Key of how text is cut before byte-pair encoding.
pub(crate) const PRE_KEY: &str = "tokenizer.ggml.pre";
/// Keys of the chat templates that are read: of any chat, of what is to be ranked, and of a chat with tools.
const TEMPLATE_KEYS: [&str; 3] =
    ["tokenizer.chat_template", "tokenizer.chat_template.rerank", "tokenizer.chat_template.tool_use"];

/// Length of the vocabulary, after checking that the arrays beside it are as long and of the types llama.cpp takes.
///
/// What is wrong and what is odd is written into `log`. `None`: there is no vocabulary.
pub(crate) fn read_vocabulary(metadata: &Metadata, scan: &Scan, keys_end: u64, log: &mut Log) -> Option<u64> {
    check_templates(metadata, log);
    let tokens = log.take(vocabulary(metadata, keys_end))?;
    let model = log.take(check_model(metadata, keys_end));
    check_types(metadata, log);
    check_special_tokens(metadata, tokens, log);
    check_suppressed(metadata, scan, tokens, log);
    if let Some(model) = model {
        check_kind(metadata, scan, model, log);
        check_bounds(metadata, model, tokens, log);
        let check = Contents { metadata, scan, model };
        check.tokens(log);
        check.merges(log);
        check.bytes(log);
        check.character_map(log);
    }
    let beside: [(&str, &[ValueType], &str); 2] = [
        (SCORES_KEY, &[ValueType::F32, ValueType::I32], "an array of f32 or i32"),
        (TYPES_KEY, &[ValueType::I32], "an array of i32"),
    ];
    for (key, types, expected) in beside {
        match metadata.entry(key) {
            None => {}
            Some(Entry { value: Value::Array { element, length, .. }, .. })
                if types.contains(element) && *length >= tokens => {}
            Some(Entry { offset, value: Value::Array { element, length, .. } }) if types.contains(element) => {
                log.defect(*offset, Defect::WrongArrayLength { key: key.into(), found: *length, expected: tokens });
            }
            Some(Entry { offset, value }) => log.defect(*offset, wrong_type(key, value, expected)),
        }
    }
    Some(tokens)
}

/// Chat templates are texts. llama.cpp takes a number for the text of its digits, and an array for no template.
fn check_templates(metadata: &Metadata, log: &mut Log) {
    for key in TEMPLATE_KEYS {
        if let Some(Entry { offset, value }) = metadata.entry(key)
            && value.kind() != ValueType::String
        {
            log.defect(*offset, wrong_type(key, value, "string"));
        }
    }
}

fn vocabulary(metadata: &Metadata, keys_end: u64) -> Result<u64> {
    let Some(Entry { offset, value }) = metadata.entry(TOKENS_KEY) else {
        return malformed(keys_end, Defect::MissingKey { key: TOKENS_KEY.into() });
    };
    let &Value::Array { element: ValueType::String, length: tokens, .. } = value else {
        return malformed(*offset, wrong_type(TOKENS_KEY, value, "an array of strings"));
    };
    if tokens == 0 {
        return malformed(*offset, Defect::WrongArrayLength { key: TOKENS_KEY.into(), found: 0, expected: 1 });
    }
    Ok(tokens)
}

/// The kind of tokenizer and, for byte-pair encoding, how text is cut and the merges.
fn check_model(metadata: &Metadata, keys_end: u64) -> Result<&str> {
    let key = MODEL_KEY;
    let Some(Entry { offset, value }) = metadata.entry(key) else {
        return malformed(keys_end, Defect::MissingKey { key: key.into() });
    };
    let Value::Text { text, .. } = value else {
        return malformed(*offset, wrong_type(key, value, "string"));
    };
    let model = text.as_deref().unwrap_or_default();
    if !MODELS.contains(&model) {
        return malformed(*offset, Defect::UnknownTokenizer { key: key.into(), found: printable(model) });
    }
    let pairs = matches!(model, "gpt2" | "hybriddna" | "whitespace");
    let pre = check_pre_tokenizer(metadata, pairs)?;
    let key = "tokenizer.ggml.merges";
    match metadata.entry(key) {
        Some(Entry { value: Value::Array { element: ValueType::String, .. }, .. }) => Ok(model),
        Some(Entry { offset, value }) => malformed(*offset, wrong_type(key, value, "an array of strings")),
        None if model == "gemma4" || (pairs && pre != Some("kimi-k2")) => {
            malformed(keys_end, Defect::MissingKey { key: key.into() })
        }
        None => Ok(model),
    }
}

/// An empty or absent one means llama.cpp's default.
fn check_pre_tokenizer(metadata: &Metadata, used: bool) -> Result<Option<&str>> {
    let key = PRE_KEY;
    match metadata.entry(key) {
        None => Ok(None),
        Some(Entry { offset, value: Value::Text { text, .. } }) => {
            let name = text.as_deref().unwrap_or_default();
            if used && !name.is_empty() && PRE_TOKENIZERS.binary_search(&name).is_err() {
                return malformed(*offset, Defect::UnknownTokenizer { key: key.into(), found: printable(name) });
            }
            Ok(Some(name))
        }
        Some(Entry { offset, value }) => malformed(*offset, wrong_type(key, value, "string")),
    }
}

/// Switches and special tokens of the tokenizer, in the only types that llama.cpp takes.
fn check_types(metadata: &Metadata, log: &mut Log) {
    const SWITCHES: [&str; 7] = [
        "add_bos_token",
        "add_eos_token",
        "add_sep_token",
        "add_space_prefix",
        "normalizer.lowercase",
        "normalizer.strip_accents",
        "remove_extra_whitespaces",
    ];
    let switches = SWITCHES.iter().map(|name| (format!("tokenizer.ggml.{name}"), ValueType::Bool, "bool"));
    let names = NEEDED_TOKENS.iter().chain(&OTHER_TOKENS);
    let tokens = names.map(|name| (token_key(name), ValueType::U32, "u32"));
    let count = ("tokenizer.ggml.token_type_count".to_owned(), ValueType::U32, "u32");
    for (key, kind, expected) in switches.chain(tokens).chain([count]) {
        if let Some(Entry { offset, value }) = metadata.entry(&key)
            && value.kind() != kind
        {
            log.defect(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected });
        }
    }
}

/// Special tokens that text begins, ends or is cut with. llama.cpp's names.
const NEEDED_TOKENS: [&str; 6] = ["bos", "eos", "eot", "eom", "unknown", "seperator"];
/// Those that no text needs here.
const OTHER_TOKENS: [&str; 11] =
    ["padding", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"];
/// Those that llama.cpp does not look at, in whatever type: its key of the separator is spelled otherwise than GGUF's own.
const UNREAD_TOKENS: [&str; 2] = ["cls", "separator"];

fn token_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

/// The number of a special token, where the file names one.
fn token_of<'m>(metadata: &'m Metadata, name: &str) -> Option<(&'m u64, i64)> {
    match metadata.entry(&token_key(name)) {
        Some(Entry { offset, value: Value::Integer { value, .. } }) => Some((offset, *value)),
        _ => None,
    }
}

/// Special tokens are tokens. llama.cpp takes others in silence for its defaults, which are those of other models.
fn check_special_tokens(metadata: &Metadata, tokens: u64, log: &mut Log) {
    let is_beyond = |found: i64| u64::try_from(found).is_ok_and(|found| found >= tokens);
    for name in NEEDED_TOKENS {
        if let Some((&offset, found)) = token_of(metadata, name).filter(|(_, found)| is_beyond(*found)) {
            log.defect(offset, Defect::TokenBeyondVocabulary { key: token_key(name), found, tokens });
        }
    }
    for name in OTHER_TOKENS.into_iter().chain(UNREAD_TOKENS) {
        if let Some((&offset, found)) = token_of(metadata, name).filter(|(_, found)| is_beyond(*found)) {
            log.warn(unused_token(token_key(name), offset, found, tokens));
        }
    }
}

/// A number of no token, which llama.cpp leaves out.
fn unused_token(key: String, offset: u64, found: i64, tokens: u64) -> Finding {
    let message = format!("{key} is {found}, but there are only {tokens} tokens; it is left out");
    let expected = format!("a token below {tokens}");
    let finding = Finding::new(Code::UnusedTokenOutOfRange, "tokenizer", found.to_string(), expected);
    finding.about(key).at(offset).saying(message)
}

/// Tokens that are never to be said: llama.cpp takes an array of one type only, and leaves out what is no token.
fn check_suppressed(metadata: &Metadata, scan: &Scan, tokens: u64, log: &mut Log) {
    match metadata.entry(SUPPRESS_KEY) {
        None => {}
        Some(Entry { offset, value: Value::Array { element: ValueType::I32, .. } }) => {
            let bounds = scan.suppressed.into_iter().flat_map(|(least, greatest)| [least, greatest]);
            let mut beyond = bounds.filter(|&token| !u64::try_from(token).is_ok_and(|token| token < tokens));
            if let Some(found) = beyond.next() {
                let message = format!(
                    "{SUPPRESS_KEY} names token {found}, but the tokens are 0 to {}; it is left out",
                    tokens - 1
                );
                log.warn(unused_token(SUPPRESS_KEY.into(), *offset, found.into(), tokens).saying(message));
            }
        }
        Some(Entry { offset, value }) => log.defect(*offset, wrong_type(SUPPRESS_KEY, value, "an array of i32")),
    }
}

/// A tokenizer cuts text into the tokens of its own kind of vocabulary. llama.cpp does not look whether it has one: over
/// tokens of byte-level byte-pair encoding the others find none for a space, and hardly one for a word.
fn check_kind(metadata: &Metadata, scan: &Scan, model: &str, log: &mut Log) {
    const OF_BYTE_PAIRS: [&str; 3] = ["gpt2", "hybriddna", "whitespace"];
    if OF_BYTE_PAIRS.contains(&model) || !scan.is_byte_level() {
        return;
    }
    let offset = metadata.entry(MODEL_KEY).map_or(0, |entry| entry.offset);
    let (marked, tokens) = (scan.byte_level_spaces, scan.tokens.len());
    log.defect(offset, Defect::ForeignTokenizer { found: model.to_owned(), marked, tokens });
}

/// Where something is to be put around each text, there is a token for it, llama.cpp's default included.
fn check_bounds(metadata: &Metadata, model: &str, tokens: u64, log: &mut Log) {
    const BEGINS: &str = "tokenizer.ggml.add_bos_token";
    const ENDS: &str = "tokenizer.ggml.add_eos_token";
    const SEPARATES: &str = "tokenizer.ggml.add_sep_token";
    // What is put around a text where the file does not say, and the default tokens: beginning, end, separator. With
    // byte-pair encoding the former depends on more than the model.
    let (puts, defaults) = match model {
        "llama" => ([true, false, false], [Some(1), Some(2), None]),
        "bert" => ([true, false, true], [Some(101), None, Some(102)]),
        "gpt2" | "hybriddna" | "whitespace" => ([false; 3], [Some(11), Some(11), None]),
        "t5" => ([false, true, false], [None, Some(1), None]),
        "plamo2" => ([false; 3], [Some(1), Some(2), None]),
        _ => ([false; 3], [None; 3]),
    };
    let names = [(BEGINS, "bos", "a beginning"), (ENDS, "eos", "an end"), (SEPARATES, "seperator", "a separator")];
    for (((key, name, what), puts), default) in names.into_iter().zip(puts).zip(defaults) {
        // The tokenizer of BERT puts a beginning and a separator around each text, whatever the file says, and never an
        // end; no other looks at the separator.
        let is_bert = model == "bert";
        if (name == "seperator" && !is_bert) || (name == "eos" && is_bert) {
            continue;
        }
        let (offset, puts) = match metadata.entry(key) {
            Some(Entry { offset, value: Value::Bool(puts) }) => (*offset, *puts || is_bert),
            _ => (metadata.entry(TOKENS_KEY).map_or(0, |entry| entry.offset), puts),
        };
        let is_there = token_of(metadata, name).is_some() || default.is_some_and(|token| token < tokens);
        if puts && !is_there {
            log.defect(offset, Defect::MissingToken { key, what });
        }
    }
}

/// What was seen of the tokenizer's arrays, as its kind judges it.
struct Contents<'a> {
    metadata: &'a Metadata,
    scan: &'a Scan,
    model: &'a str,
}

impl Contents<'_> {
    fn at(&self, key: &str) -> u64 {
        self.metadata.entry(key).map_or(0, |entry| entry.offset)
    }

    fn tokens(&self, log: &mut Log) {
        if let Some((token, found)) = self.scan.wrong_type {
            log.defect(self.at(TYPES_KEY), Defect::UnknownTokenType { token, found });
        }
        if let Some((token, length)) = self.scan.control_tokens().find(|(_, length)| *length > MAX_CONTROL_TOKEN_BYTES)
        {
            let key = format!("{TOKENS_KEY}[{token}], a control token");
            log.defect(self.at(TOKENS_KEY), Defect::StringTooLong { key, length, limit: MAX_CONTROL_TOKEN_BYTES });
        }
        let length = self.scan.control_tokens().map(|(_, length)| length).sum();
        if length > MAX_ALL_CONTROL_TOKEN_BYTES {
            let key = format!("{TOKENS_KEY}, all control tokens");
            log.defect(self.at(TOKENS_KEY), Defect::StringTooLong { key, length, limit: MAX_ALL_CONTROL_TOKEN_BYTES });
        }
        if let Some(token) = self.scan.wrong_score {
            log.defect(self.at(SCORES_KEY), Defect::WrongScore { token });
        }
        let no_byte = match self.model {
            "llama" | "t5" | "gemma4" | "gpt2" => self.scan.byte_without_text(),
            // It knows no bytes.
            "bert" => self.scan.first_byte(),
            _ => None,
        };
        if let Some(token) = no_byte {
            log.defect(self.at(TYPES_KEY), Defect::NoByteToken { token });
        }
    }

    /// What a merge makes must be a token, or what text is merged to is lost.
    fn merges(&self, log: &mut Log) {
        if !matches!(self.model, "gpt2" | "gemma4") {
            return;
        }
        if let Some(merge) = self.scan.wrong_merge {
            log.defect(self.at(MERGES_KEY), Defect::InvalidMerge { merge });
        }
        let (unknown, merges) = self.scan.unknown_merges();
        if unknown > merges / 2 {
            log.defect(self.at(MERGES_KEY), Defect::ForeignMerges { unknown, merges });
        } else if unknown > 0 {
            let message = format!("{unknown} of {merges} merges make no token of the vocabulary");
            let finding = Finding::new(Code::MergeWithoutToken, "tokenizer", message, "merges that make tokens");
            log.warn(finding.about(MERGES_KEY).at(self.at(MERGES_KEY)));
        }
    }

    /// Text that is written in bytes loses those that no token stands for: llama.cpp leaves them out in silence.
    fn bytes(&self, log: &mut Log) {
        const TEXT: &str = "96 characters that are printable ASCII or the line end";
        const OTHERS: &str = "147 bytes of all other characters";
        const ADVICE: &str = "; convert the model again with its whole vocabulary";
        let pre = self.metadata.text(PRE_KEY).unwrap_or_default();
        if self.model != "gpt2" || OF_CHARACTERS.contains(&pre) {
            return;
        }
        let missing = self.scan.bytes_without_token().into_iter();
        let (text, others): (Vec<u8>, Vec<u8>) = missing.partition(|&byte| matches!(byte, b'\n' | b' '..=b'~'));
        // Where letters are missing, it says nothing more that others are as well.
        let (code, count, of, first, advice) = if !text.is_empty() {
            let first = first_of(&text, |byte| format!("{:?}", char::from(byte)));
            (Code::CharacterWithoutToken, text.len(), TEXT, first, ADVICE)
        } else if !others.is_empty() {
            let first = first_of(&others, |byte| format!("0x{byte:02X}"));
            (Code::ByteWithoutToken, others.len(), OTHERS, first, "")
        } else {
            return;
        };
        let message = format!(
            "there is no token for {count} of the {of} ({first}), and llama.cpp leaves out of a text, in silence, each \
             that is not part of a longer token{advice}"
        );
        let finding = Finding::new(code, "tokenizer", format!("no token for {first}"), "a token for each of them");
        log.warn(finding.about(TOKENS_KEY).at(self.at(TOKENS_KEY)).saying(message));
    }

    fn character_map(&self, log: &mut Log) {
        if self.model != "t5" {
            return;
        }
        if let Some(Entry { offset, value }) = self.metadata.entry(CHARS_KEY)
            && !matches!(value, Value::Array { element: ValueType::U8 | ValueType::I8, .. })
        {
            log.defect(*offset, wrong_type(CHARS_KEY, value, "an array of u8 or i8"));
        }
        match self.scan.chars {
            Some((found, expected)) if expected + 4 >= found => {
                log.defect(self.at(CHARS_KEY), Defect::InvalidCharacterMap { found, expected });
            }
            _ => {}
        }
    }
}

/// The names of the first of some bytes, and how many more there are.
fn first_of(bytes: &[u8], name: impl Fn(u8) -> String) -> String {
    const NAMED: usize = 8;
    let mut names: Vec<String> = bytes.iter().take(NAMED).map(|&byte| name(byte)).collect();
    if bytes.len() > NAMED {
        names.push(format!("and {} more", bytes.len() - NAMED));
    }
    names.join(", ")
}

fn wrong_type(key: &str, value: &Value, expected: &'static str) -> Defect {
    Defect::WrongKeyType { key: key.into(), found: value.type_name(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_sorted() {
        assert!(MODELS.is_sorted() && PRE_TOKENIZERS.is_sorted());
        assert!(OF_CHARACTERS.iter().all(|name| PRE_TOKENIZERS.contains(name)));
    }
}
