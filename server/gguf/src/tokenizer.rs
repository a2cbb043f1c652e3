//! The tokenizer's part of the metadata: known to llama.cpp, complete, and in the types that it takes.
//!
//! The lists follow llama.cpp's `src/llama-vocab.cpp`; `tests/llama_source.rs` compares them. Absent: the tokens
//! themselves; [`crate::scan`] has seen what is to be known of them while it passed over them.

use crate::error::{Defect, Result, malformed, printable};
use crate::scan::{CHARS_KEY, MERGES_KEY, SCORES_KEY, Scan, TOKENS_KEY, TYPES_KEY};
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

/// Length of the vocabulary, after checking that the arrays beside it are as long and of the types llama.cpp takes.
///
/// What is odd and does no harm goes into `notes`.
pub(crate) fn read_vocabulary(metadata: &Metadata, scan: &Scan, keys_end: u64, notes: &mut Vec<String>) -> Result<u64> {
    let missing = |key: &str| -> Result<u64> { malformed(keys_end, Defect::MissingKey { key: key.into() }) };
    let Some(Entry { offset, value }) = metadata.entry(TOKENS_KEY) else { return missing(TOKENS_KEY) };
    let &Value::Array { element: ValueType::String, length: tokens, .. } = value else {
        return malformed(*offset, wrong_type(TOKENS_KEY, value, "an array of strings"));
    };
    if tokens == 0 {
        return malformed(*offset, Defect::WrongArrayLength { key: TOKENS_KEY.into(), found: 0, expected: 1 });
    }
    let model = check_model(metadata, keys_end)?;
    check_types(metadata)?;
    check_special_tokens(metadata, tokens, notes)?;
    check_bounds(metadata, model, tokens)?;
    let check = Contents { metadata, scan, model };
    check.tokens()?;
    check.merges(notes)?;
    check.character_map()?;
    let beside: [(&str, &[ValueType], &str); 2] = [
        ("tokenizer.ggml.scores", &[ValueType::F32, ValueType::I32], "an array of f32 or i32"),
        ("tokenizer.ggml.token_type", &[ValueType::I32], "an array of i32"),
    ];
    for (key, types, expected) in beside {
        match metadata.entry(key) {
            None => {}
            Some(Entry { value: Value::Array { element, length, .. }, .. })
                if types.contains(element) && *length >= tokens => {}
            Some(Entry { offset, value: Value::Array { element, length, .. } }) if types.contains(element) => {
                let defect = Defect::WrongArrayLength { key: key.into(), found: *length, expected: tokens };
                return malformed(*offset, defect);
            }
            Some(Entry { offset, value }) => return malformed(*offset, wrong_type(key, value, expected)),
        }
    }
    Ok(tokens)
}

/// The kind of tokenizer and, for byte-pair encoding, how text is cut and the merges.
fn check_model(metadata: &Metadata, keys_end: u64) -> Result<&str> {
    let key = "tokenizer.ggml.model";
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
    let key = "tokenizer.ggml.pre";
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
fn check_types(metadata: &Metadata) -> Result<()> {
    const SWITCHES: [&str; 5] =
        ["add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"];
    let switches = SWITCHES.iter().map(|name| (format!("tokenizer.ggml.{name}"), ValueType::Bool, "bool"));
    let names = NEEDED_TOKENS.iter().chain(&OTHER_TOKENS);
    let tokens = names.map(|name| (token_key(name), ValueType::U32, "u32"));
    for (key, kind, expected) in switches.chain(tokens) {
        if let Some(Entry { offset, value }) = metadata.entry(&key)
            && value.kind() != kind
        {
            return malformed(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected });
        }
    }
    Ok(())
}

/// Special tokens that text begins, ends or is cut with. llama.cpp's names.
const NEEDED_TOKENS: [&str; 6] = ["bos", "eos", "eot", "eom", "unknown", "seperator"];
/// Those that no text needs here.
const OTHER_TOKENS: [&str; 11] =
    ["padding", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"];

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
fn check_special_tokens(metadata: &Metadata, tokens: u64, notes: &mut Vec<String>) -> Result<()> {
    let is_beyond = |found: i64| u64::try_from(found).is_ok_and(|found| found >= tokens);
    for name in NEEDED_TOKENS {
        if let Some((&offset, found)) = token_of(metadata, name).filter(|(_, found)| is_beyond(*found)) {
            return malformed(offset, Defect::TokenBeyondVocabulary { key: token_key(name), found, tokens });
        }
    }
    for name in OTHER_TOKENS {
        if let Some((_, found)) = token_of(metadata, name).filter(|(_, found)| is_beyond(*found)) {
            notes.push(format!("{} is {found}, but there are only {tokens} tokens; it is left out", token_key(name)));
        }
    }
    Ok(())
}

/// Where something is to be put around each text, there is a token for it, llama.cpp's default included.
fn check_bounds(metadata: &Metadata, model: &str, tokens: u64) -> Result<()> {
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
            return malformed(offset, Defect::MissingToken { key, what });
        }
    }
    Ok(())
}

/// What was seen of the tokenizer's arrays, as its kind judges it.
struct Contents<'a> {
    metadata: &'a Metadata,
    scan: &'a Scan,
    model: &'a str,
}

impl Contents<'_> {
    fn refuse(&self, key: &str, defect: Defect) -> Result<()> {
        malformed(self.metadata.entry(key).map_or(0, |entry| entry.offset), defect)
    }

    fn tokens(&self) -> Result<()> {
        if let Some((token, found)) = self.scan.wrong_type {
            return self.refuse(TYPES_KEY, Defect::UnknownTokenType { token, found });
        }
        if let Some(token) = self.scan.wrong_score {
            return self.refuse(SCORES_KEY, Defect::WrongScore { token });
        }
        let no_byte = match self.model {
            "llama" | "t5" | "gemma4" | "gpt2" => self.scan.byte_without_text(),
            // It knows no bytes.
            "bert" => self.scan.first_byte(),
            _ => None,
        };
        no_byte.map_or(Ok(()), |token| self.refuse(TYPES_KEY, Defect::NoByteToken { token }))
    }

    /// What a merge makes must be a token, or what text is merged to is lost.
    fn merges(&self, notes: &mut Vec<String>) -> Result<()> {
        if !matches!(self.model, "gpt2" | "gemma4") {
            return Ok(());
        }
        if let Some(merge) = self.scan.wrong_merge {
            return self.refuse(MERGES_KEY, Defect::InvalidMerge { merge });
        }
        let (unknown, merges) = self.scan.unknown_merges();
        if unknown > merges / 2 {
            return self.refuse(MERGES_KEY, Defect::ForeignMerges { unknown, merges });
        }
        if unknown > 0 {
            notes.push(format!("{unknown} of {merges} merges make no token of the vocabulary"));
        }
        Ok(())
    }

    fn character_map(&self) -> Result<()> {
        match self.scan.chars {
            Some((found, expected)) if self.model == "t5" && expected + 4 >= found => {
                self.refuse(CHARS_KEY, Defect::InvalidCharacterMap { found, expected })
            }
            _ => Ok(()),
        }
    }
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
    }
}
