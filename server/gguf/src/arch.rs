//! The architectures that the pinned llama.cpp knows, and what is special about some of them.
//!
//! The list follows llama.cpp's `src/llama-arch.cpp`; `tests/llama_source.rs` compares the two, so that moving the pin
//! moves the list.

use crate::needs;

/// Every architecture name, sorted.
pub(crate) const KNOWN: &[&str] = &[
    "afmoe",
    "apertus",
    "arcee",
    "arctic",
    "arwkv7",
    "baichuan",
    "bailingmoe",
    "bailingmoe2",
    "bailingmoe3",
    "bert",
    "bitnet",
    "bloom",
    "chameleon",
    "chatglm",
    "clef",
    "clip",
    "codeshell",
    "cogvlm",
    "cohere2",
    "cohere2moe",
    "command-r",
    "dbrx",
    "deci",
    "deepseek",
    "deepseek2",
    "deepseek2-ocr",
    "deepseek32",
    "deepseek4",
    "dflash",
    "dots1",
    "dots3note",
    "dream",
    "eagle3",
    "ernie4_5",
    "ernie4_5-moe",
    "eurobert",
    "exaone",
    "exaone-moe",
    "exaone4",
    "falcon",
    "falcon-h1",
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4-assistant",
    "glm-dsa",
    "glm4",
    "glm4moe",
    "glm5-next",
    "gpt-oss",
    "gpt2",
    "gptj",
    "gptneox",
    "granite",
    "granite_swa",
    "granitehybrid",
    "granitemoe",
    "graniteswitch",
    "grok",
    "grovemoe",
    "hrm_text",
    "hunyuan-dense",
    "hunyuan-moe",
    "hunyuan_vl",
    "hy_v3",
    "hy_v4",
    "internlm2",
    "jais",
    "jais2",
    "jamba",
    "jina-bert-v2",
    "jina-bert-v3",
    "kimi-k3",
    "kimi-linear",
    "laguna",
    "lfm2",
    "lfm2moe",
    "llada",
    "llada-moe",
    "llama",
    "llama-embed",
    "llama4",
    "maincoder",
    "mamba",
    "mamba2",
    "maple",
    "mellum",
    "mimo2",
    "minicpm",
    "minicpm3",
    "minimax-01",
    "minimax-m2",
    "minimax-m3",
    "mistral3",
    "mistral4",
    "modern-bert",
    "mpt",
    "muse-glimmer",
    "nanbeige",
    "nemotron",
    "nemotron_h",
    "nemotron_h_moe",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "olmo",
    "olmo2",
    "olmoe",
    "openelm",
    "orion",
    "paddleocr",
    "pangu-embedded",
    "phi2",
    "phi3",
    "phimoe",
    "plamo",
    "plamo2",
    "plamo3",
    "plm",
    "pockettts",
    "qwen",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3tts",
    "qwen3vl",
    "qwen3vlmoe",
    "qwen4exp",
    "refact",
    "rnd1",
    "rwkv6",
    "rwkv6qwen2",
    "rwkv7",
    "seed_oss",
    "smallthinker",
    "smollm3",
    "spark2_5",
    "stablelm",
    "starcoder",
    "starcoder2",
    "step35",
    "t5",
    "t5encoder",
    "talkie",
    "wavtokenizer-dec",
    "xverse",
];

/// Whether llama.cpp can load this architecture at all.
pub(crate) fn is_known(name: &str) -> bool {
    KNOWN.binary_search(&name).is_ok() && needs::of(name).is_some()
}

/// What a file of this architecture is instead of a language model that answers alone.
pub(crate) fn companion(name: &str) -> Option<&'static str> {
    Some(match name {
        "clip" => "the image or audio encoder beside a model",
        "eagle3" | "dflash" | "gemma4-assistant" => "a draft head for another model",
        "wavtokenizer-dec" | "pockettts" | "qwen3tts" => "a speech model",
        "t5" | "t5encoder" => "one with an encoder of its own, which this server cannot run",
        "dream" | "llada" | "llada-moe" | "rnd1" => "a diffusion model, which this server cannot run",
        _ => return None,
    })
}

/// Whether it only gives vectors of texts: it keeps nothing between batches, and generates none.
pub(crate) fn is_encoder(name: &str) -> bool {
    matches!(
        name,
        "bert"
            | "clef"
            | "eurobert"
            | "gemma-embedding"
            | "jina-bert-v2"
            | "jina-bert-v3"
            | "modern-bert"
            | "neo-bert"
            | "nomic-bert"
            | "nomic-bert-moe"
    )
}

/// Whether it has no attention at all, so that it need not have attention heads.
pub(crate) fn is_recurrent(name: &str) -> bool {
    matches!(name, "mamba" | "mamba2" | "rwkv6" | "rwkv6qwen2" | "rwkv7" | "arwkv7")
}

/// Whether a layer may rightly have no `blk.N` tensors: Deci prunes whole layers.
pub(crate) fn may_lack_layers(name: &str) -> bool {
    name == "deci"
}

/// Whether each layer may use another number of experts: of the others llama.cpp computes all layers with the first one's.
pub(crate) fn has_experts_by_layer(name: &str) -> bool {
    matches!(name, "nemotron_h" | "nemotron_h_moe")
}

/// Whether its tensors are those of [`crate::shapes`]: the plain decoder that most published models are.
pub(crate) fn is_plain_decoder(name: &str) -> bool {
    matches!(
        name,
        "llama" | "mistral3" | "qwen2" | "qwen3" | "qwen3moe" | "gemma" | "gemma2" | "gemma3" | "smollm3" | "granite"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_sorted_and_holds_every_special_case() {
        assert!(KNOWN.is_sorted());
        for name in ["mamba", "t5", "deci", "clip", "bert", "nemotron_h_moe", "qwen3moe", "llama", "gemma3", "smollm3"]
        {
            assert!(is_known(name), "{name}");
        }
        assert!(!is_known("llama9000"));
        // It has a name in llama.cpp, and no code.
        assert!(!is_known("gptj"));
    }
}
