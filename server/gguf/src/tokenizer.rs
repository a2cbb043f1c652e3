//! The tokenizer's part of the metadata: known to llama.cpp, complete, and in the types that it takes.
//!
//! The lists follow llama.cpp's `src/llama-vocab.cpp`; `tests/llama_source.rs` compares them. Absent: the tokens
//! themselves; [`crate::value`] has ruled duplicates out while it passed over them.

use crate::error::{Defect, Result, malformed, printable};
use crate::value::{Entry, Metadata, TOKENS_KEY, Value, ValueType};

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
pub(crate) fn read_vocabulary(metadata: &Metadata, keys_end: u64) -> Result<u64> {
    let missing = |key: &str| -> Result<u64> { malformed(keys_end, Defect::MissingKey { key: key.into() }) };
    let Some(Entry { offset, value }) = metadata.entry(TOKENS_KEY) else { return missing(TOKENS_KEY) };
    let &Value::Array { element: ValueType::String, length: tokens, .. } = value else {
        return malformed(*offset, wrong_type(TOKENS_KEY, value, "an array of strings"));
    };
    if tokens == 0 {
        return malformed(*offset, Defect::WrongArrayLength { key: TOKENS_KEY.into(), found: 0, expected: 1 });
    }
    check_model(metadata, keys_end)?;
    check_types(metadata)?;
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
fn check_model(metadata: &Metadata, keys_end: u64) -> Result<()> {
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
        Some(Entry { value: Value::Array { element: ValueType::String, .. }, .. }) => Ok(()),
        Some(Entry { offset, value }) => malformed(*offset, wrong_type(key, value, "an array of strings")),
        None if model == "gemma4" || (pairs && pre != Some("kimi-k2")) => {
            malformed(keys_end, Defect::MissingKey { key: key.into() })
        }
        None => Ok(()),
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
    const TOKENS: [&str; 8] = ["bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"];
    let switches = SWITCHES.iter().map(|name| (format!("tokenizer.ggml.{name}"), ValueType::Bool, "bool"));
    let tokens = TOKENS.iter().map(|name| (format!("tokenizer.ggml.{name}_token_id"), ValueType::U32, "u32"));
    for (key, kind, expected) in switches.chain(tokens) {
        if let Some(Entry { offset, value }) = metadata.entry(&key)
            && value.kind() != kind
        {
            return malformed(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected });
        }
    }
    Ok(())
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
