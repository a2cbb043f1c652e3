//! Writes tiny GGUF files of architectures that no demo model has, with weights that are noise.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const ALIGNMENT: usize = 32;

#[derive(Default)]
pub struct Gguf {
    values: Vec<u8>,
    values_len: u64,
    infos: Vec<u8>,
    infos_len: u64,
    data: Vec<u8>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    /// A vocabulary of the 256 bytes and three special tokens.
    pub fn new(architecture: &str) -> Self {
        let mut gguf = Self::default();
        gguf.string("general.architecture", architecture);
        gguf.string("tokenizer.ggml.model", "llama");
        let mut words = vec![String::from("<unk>"), String::from("<s>"), String::from("</s>")];
        words.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
        gguf.texts("tokenizer.ggml.tokens", &words);
        gguf.array("tokenizer.ggml.scores", F32, words.iter().map(|_| 0_f32.to_le_bytes()));
        let kind = |i: usize| [2_i32, 3, 3].get(i).copied().unwrap_or(6).to_le_bytes();
        gguf.array("tokenizer.ggml.token_type", I32, (0..words.len()).map(kind));
        gguf
    }

    /// A vocabulary of merges: the 256 bytes as GPT-2 writes them, three special tokens, and a merge that no test asks for.
    pub fn merges(architecture: &str, tokenizer: &str, pre_tokenizer: &str) -> Self {
        Self::merges_and(architecture, tokenizer, pre_tokenizer, &["<|bos|>", "<|eos|>", "<|turn|>"])
    }

    /// The same with these special tokens, of which those in brackets alone are user-defined.
    pub fn merges_and(architecture: &str, tokenizer: &str, pre_tokenizer: &str, specials: &[&str]) -> Self {
        let mut gguf = Self::default();
        gguf.string("general.architecture", architecture);
        gguf.string("tokenizer.ggml.model", tokenizer);
        gguf.string("tokenizer.ggml.pre", pre_tokenizer);
        let printed = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let shifted = (0..256).filter(|byte| !printed(byte)).zip(256..).map(|(_, character)| character);
        let bytes = (0..256).filter(printed).chain(shifted);
        let mut words: Vec<String> = bytes.map(|character| char::from_u32(character).unwrap().to_string()).collect();
        words.extend(specials.iter().map(|&special| String::from(special)));
        gguf.texts("tokenizer.ggml.tokens", &words);
        let is_tag =
            |word: &str| word.starts_with('<') && word[1..].starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
        let kind = |i: usize| match i {
            0..256 => 1_i32.to_le_bytes(),
            _ if is_tag(&words[i]) => 4_i32.to_le_bytes(),
            _ => 3_i32.to_le_bytes(),
        };
        gguf.array("tokenizer.ggml.token_type", I32, (0..words.len()).map(kind));
        gguf.texts("tokenizer.ggml.merges", &[String::from("q x")]);
        gguf.number("tokenizer.ggml.bos_token_id", 256);
        gguf.number("tokenizer.ggml.eos_token_id", 257);
        gguf
    }

    fn texts(&mut self, key: &str, words: &[String]) {
        self.key(key, ARRAY);
        self.values.extend(STRING.to_le_bytes());
        self.values.extend((words.len() as u64).to_le_bytes());
        words.iter().for_each(|word| text(&mut self.values, word));
    }

    fn key(&mut self, key: &str, kind: u32) {
        text(&mut self.values, key);
        self.values.extend(kind.to_le_bytes());
        self.values_len += 1;
    }

    fn array(&mut self, key: &str, kind: u32, items: impl ExactSizeIterator<Item = [u8; 4]>) {
        self.key(key, ARRAY);
        self.values.extend(kind.to_le_bytes());
        self.values.extend((items.len() as u64).to_le_bytes());
        self.values.extend(items.flatten());
    }

    pub fn string(&mut self, key: &str, value: &str) {
        self.key(key, STRING);
        text(&mut self.values, value);
    }

    pub fn number(&mut self, key: &str, value: u32) {
        self.key(key, U32);
        self.values.extend(value.to_le_bytes());
    }

    pub fn flag(&mut self, key: &str, value: bool) {
        self.key(key, BOOL);
        self.values.push(u8::from(value));
    }

    pub fn float(&mut self, key: &str, value: f32) {
        self.key(key, F32);
        self.values.extend(value.to_le_bytes());
    }

    /// A tensor of F32 noise between `low` and `high`; the first dimension is that of a row.
    pub fn tensor(&mut self, name: &str, shape: &[u64], low: f32, high: f32) {
        text(&mut self.infos, name);
        self.infos.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
        shape.iter().for_each(|dimension| self.infos.extend(dimension.to_le_bytes()));
        self.infos.extend(0_u32.to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.infos_len += 1;
        let mut noise = self.infos_len.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..shape.iter().product::<u64>() {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            let unit = (noise >> 40) as f32 / (1_u32 << 24) as f32;
            self.data.extend((low + (high - low) * unit).to_le_bytes());
        }
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend(self.infos_len.to_le_bytes());
        bytes.extend(self.values_len.to_le_bytes());
        bytes.extend(&self.values);
        bytes.extend(&self.infos);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes.extend(&self.data);
        bytes
    }
}

/// A recurrent model: its state is not a cache of rows.
pub fn mamba() -> Gguf {
    let (n_embd, inner, state, conv, rank) = (32, 64, 16, 4, 2);
    let mut gguf = Gguf::new("mamba");
    for (key, value) in [
        ("context_length", 512),
        ("embedding_length", 32),
        ("block_count", 1),
        ("feed_forward_length", 0),
        ("attention.head_count", 0),
        ("ssm.conv_kernel", 4),
        ("ssm.inner_size", 64),
        ("ssm.state_size", 16),
        ("ssm.time_step_rank", 2),
    ] {
        gguf.number(&format!("mamba.{key}"), value);
    }
    gguf.float("mamba.attention.layer_norm_rms_epsilon", 1e-5);
    gguf.tensor("token_embd.weight", &[n_embd, 259], -1.0, 1.0);
    gguf.tensor("output_norm.weight", &[n_embd], 0.9, 1.1);
    gguf.tensor("blk.0.attn_norm.weight", &[n_embd], 0.9, 1.1);
    gguf.tensor("blk.0.ssm_in.weight", &[n_embd, 2 * inner], -0.3, 0.3);
    gguf.tensor("blk.0.ssm_conv1d.weight", &[conv, inner], -0.5, 0.5);
    gguf.tensor("blk.0.ssm_conv1d.bias", &[inner], -0.1, 0.1);
    gguf.tensor("blk.0.ssm_x.weight", &[inner, rank + 2 * state], -0.3, 0.3);
    gguf.tensor("blk.0.ssm_dt.weight", &[rank, inner], -0.5, 0.5);
    gguf.tensor("blk.0.ssm_dt.bias", &[inner], -1.0, 0.0);
    gguf.tensor("blk.0.ssm_a", &[state, inner], -2.0, -0.1);
    gguf.tensor("blk.0.ssm_d", &[inner], 0.5, 1.5);
    gguf.tensor("blk.0.ssm_out.weight", &[inner, n_embd], -0.3, 0.3);
    gguf
}

/// An encoder: it keeps nothing between batches and knows 64 positions. With rank pooling it has a classifier.
pub fn bert(pooling_type: u32) -> Gguf {
    let (n_embd, ffn) = (32, 64);
    let mut gguf = Gguf::new("bert");
    for (key, value) in [
        ("context_length", 64),
        ("embedding_length", 32),
        ("block_count", 1),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("pooling_type", pooling_type),
    ] {
        gguf.number(&format!("bert.{key}"), value);
    }
    gguf.number("tokenizer.ggml.token_type_count", 2);
    gguf.float("bert.attention.layer_norm_epsilon", 1e-5);
    gguf.flag("bert.attention.causal", false);
    for (name, shape) in [
        ("token_embd.weight", vec![n_embd, 259]),
        ("token_types.weight", vec![n_embd, 2]),
        ("position_embd.weight", vec![n_embd, 64]),
        ("blk.0.attn_q.weight", vec![n_embd, n_embd]),
        ("blk.0.attn_k.weight", vec![n_embd, n_embd]),
        ("blk.0.attn_v.weight", vec![n_embd, n_embd]),
        ("blk.0.attn_output.weight", vec![n_embd, n_embd]),
        ("blk.0.ffn_up.weight", vec![n_embd, ffn]),
        ("blk.0.ffn_down.weight", vec![ffn, n_embd]),
    ] {
        gguf.tensor(name, &shape, -0.5, 0.5);
    }
    for name in ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"] {
        gguf.tensor(&format!("{name}.weight"), &[n_embd], 0.9, 1.1);
        gguf.tensor(&format!("{name}.bias"), &[n_embd], -0.1, 0.1);
    }
    if pooling_type == 4 {
        gguf.number("tokenizer.ggml.bos_token_id", 1);
        gguf.number("tokenizer.ggml.eos_token_id", 2);
        gguf.flag("tokenizer.ggml.add_bos_token", true);
        gguf.flag("tokenizer.ggml.add_eos_token", true);
        gguf.flag("tokenizer.ggml.add_space_prefix", false);
        gguf.tensor("cls.output.weight", &[n_embd, 1], -0.5, 0.5);
    }
    gguf
}

/// An encoder whose feed-forward layer llama.cpp asserts to be another.
pub fn aborts() -> Gguf {
    let mut gguf = Gguf::new("jina-bert-v2");
    for (key, value) in [
        ("context_length", 64),
        ("embedding_length", 32),
        ("block_count", 1),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("pooling_type", 1),
    ] {
        gguf.number(&format!("jina-bert-v2.{key}"), value);
    }
    gguf.number("tokenizer.ggml.token_type_count", 2);
    gguf.float("jina-bert-v2.attention.layer_norm_epsilon", 1e-5);
    gguf.flag("jina-bert-v2.attention.causal", false);
    for (name, shape) in [
        ("token_embd.weight", vec![32, 259]),
        ("token_types.weight", vec![32, 2]),
        ("blk.0.attn_q.weight", vec![32, 32]),
        ("blk.0.attn_k.weight", vec![32, 32]),
        ("blk.0.attn_v.weight", vec![32, 32]),
        ("blk.0.attn_output.weight", vec![32, 32]),
        ("blk.0.attn_output.bias", vec![32]),
        ("blk.0.ffn_up.weight", vec![32, 50]),
        ("blk.0.ffn_down.weight", vec![64, 32]),
        ("blk.0.ffn_down.bias", vec![32]),
    ] {
        gguf.tensor(name, &shape, -0.5, 0.5);
    }
    for name in ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"] {
        gguf.tensor(&format!("{name}.weight"), &[32], 0.9, 1.1);
        gguf.tensor(&format!("{name}.bias"), &[32], -0.1, 0.1);
    }
    gguf
}

/// A model whose even layers see a window of 32 tokens.
pub fn sliding_window() -> Gguf {
    sliding_window_of(Gguf::new("gemma2"))
}

/// A model with a vocabulary of merges.
pub fn with_pre_tokenizer(name: &str) -> Gguf {
    sliding_window_of(Gguf::merges("gemma2", if name == "whitespace" { name } else { "gpt2" }, name))
}

/// A model with these special tokens.
pub fn with_specials(specials: &[&str]) -> Gguf {
    sliding_window_with(Gguf::merges_and("gemma2", "gpt2", "llama-bpe", specials), 256 + specials.len() as u64)
}

/// The same with the vocabulary that was begun with, of 259 tokens.
pub fn sliding_window_of(gguf: Gguf) -> Gguf {
    sliding_window_with(gguf, 259)
}

fn sliding_window_with(mut gguf: Gguf, tokens: u64) -> Gguf {
    let (n_embd, ffn) = (32, 64);
    for (key, value) in [
        ("context_length", 512),
        ("embedding_length", 32),
        ("block_count", 2),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.sliding_window", 32),
    ] {
        gguf.number(&format!("gemma2.{key}"), value);
    }
    gguf.float("gemma2.attention.layer_norm_rms_epsilon", 1e-5);
    gguf.tensor("token_embd.weight", &[n_embd, tokens], -1.0, 1.0);
    gguf.tensor("output_norm.weight", &[n_embd], 0.9, 1.1);
    for layer in 0..2 {
        for name in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            gguf.tensor(&format!("blk.{layer}.{name}.weight"), &[n_embd], 0.9, 1.1);
        }
        for (name, shape) in [
            ("attn_q", [n_embd, n_embd]),
            ("attn_k", [n_embd, n_embd / 2]),
            ("attn_v", [n_embd, n_embd / 2]),
            ("attn_output", [n_embd, n_embd]),
            ("ffn_gate", [n_embd, ffn]),
            ("ffn_up", [n_embd, ffn]),
            ("ffn_down", [ffn, n_embd]),
        ] {
            gguf.tensor(&format!("blk.{layer}.{name}.weight"), &shape, -0.5, 0.5);
        }
    }
    gguf
}

/// A mixture of experts that are told layer by layer, in a file with a key as long as there may be one.
pub fn mixture() -> Gguf {
    let (n_embd, ffn, experts) = (32, 64, 4);
    let mut gguf = Gguf::new("llama");
    for (key, value) in [
        ("context_length", 512),
        ("embedding_length", 32),
        ("block_count", 2),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("expert_count", 4),
    ] {
        gguf.number(&format!("llama.{key}"), value);
    }
    gguf.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    for (key, value) in [("expert_used_count", 2_u32), ("expert_feed_forward_length", 64)] {
        gguf.array(&format!("llama.{key}"), U32, [value; 2].map(u32::to_le_bytes).into_iter());
    }
    gguf.number(&"k".repeat(65_535), 1);
    gguf.tensor("token_embd.weight", &[n_embd, 259], -1.0, 1.0);
    gguf.tensor("output_norm.weight", &[n_embd], 0.9, 1.1);
    for layer in 0..2 {
        for name in ["attn_norm", "ffn_norm"] {
            gguf.tensor(&format!("blk.{layer}.{name}.weight"), &[n_embd], 0.9, 1.1);
        }
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            gguf.tensor(&format!("blk.{layer}.{name}.weight"), &[n_embd, n_embd], -0.5, 0.5);
        }
        gguf.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[n_embd, experts], -0.5, 0.5);
        for (name, shape) in [("gate", [n_embd, ffn]), ("up", [n_embd, ffn]), ("down", [ffn, n_embd])] {
            let shape = [shape[0], shape[1], experts];
            gguf.tensor(&format!("blk.{layer}.ffn_{name}_exps.weight"), &shape, -0.5, 0.5);
        }
    }
    gguf
}

/// A model that was trained for 1,024 tokens, and rotates keys by other factors where a context is longer than an
/// original one; without that, longer than the trained one.
pub fn long_rope(original_context: Option<u32>) -> Gguf {
    let (n_embd, ffn, rope) = (32, 64, 16);
    let mut gguf = Gguf::new("phi3");
    for (key, value) in [
        ("context_length", 1_024),
        ("embedding_length", 32),
        ("block_count", 1),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16),
    ] {
        gguf.number(&format!("phi3.{key}"), value);
    }
    gguf.float("phi3.attention.layer_norm_rms_epsilon", 1e-5);
    gguf.string("phi3.rope.scaling.type", "longrope");
    if let Some(tokens) = original_context {
        gguf.number("phi3.rope.scaling.original_context_length", tokens);
    }
    gguf.tensor("token_embd.weight", &[n_embd, 259], -1.0, 1.0);
    gguf.tensor("output_norm.weight", &[n_embd], 0.9, 1.1);
    gguf.tensor("rope_factors_short.weight", &[rope / 2], 1.0, 1.1);
    gguf.tensor("rope_factors_long.weight", &[rope / 2], 2.0, 4.0);
    for name in ["attn_norm", "ffn_norm"] {
        gguf.tensor(&format!("blk.0.{name}.weight"), &[n_embd], 0.9, 1.1);
    }
    for (name, shape) in [
        ("attn_qkv", [n_embd, 3 * n_embd]),
        ("attn_output", [n_embd, n_embd]),
        ("ffn_up", [n_embd, 2 * ffn]),
        ("ffn_down", [ffn, n_embd]),
    ] {
        gguf.tensor(&format!("blk.0.{name}.weight"), &shape, -0.5, 0.5);
    }
    gguf
}
