//! The ways of being malformed: each a change of a good model and the code that it must be refused for.
//!
//! A change may take nothing for granted but the keys and tensors of a llama model with byte-pair encoding, whose first layer
//! is whole, so that it fits the demo models and a synthetic one alike.

use super::{F16, F32, Gguf, Key, Q4_K, Q8_K, array, string, strings, ty};

/// A name, a change, and the code of the first error.
pub type Shape = (&'static str, fn(&mut Gguf), &'static str);

const UP: &str = "blk.0.ffn_up.weight";
const NORM: &str = "output_norm.weight";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

fn float(file: &mut Gguf, name: &str, value: f32) {
    file.put(name, ty::F32, value.to_le_bytes().to_vec());
}

fn key(name: &[u8]) -> Key {
    Key { name: name.to_vec(), kind: ty::U8, bytes: vec![0] }
}

fn split(file: &mut Gguf, number: u16, count: u16) {
    file.put("split.no", ty::U16, number.to_le_bytes().to_vec());
    file.put("split.count", ty::U16, count.to_le_bytes().to_vec());
}

fn types_of(file: &mut Gguf, first: i32) {
    let tokens = file.vocabulary();
    let types = (0..tokens).flat_map(|token| if token == 0 { first } else { 1 }.to_le_bytes());
    file.put(TYPES, ty::ARRAY, array(ty::I32, tokens, &types.collect::<Vec<_>>()));
}

/// A byte-level vocabulary, whatever the file had, and another tokenizer.
fn over_byte_pairs(file: &mut Gguf, model: &str) {
    let tokens = file.vocabulary();
    file.put(TOKENS, ty::ARRAY, strings((0..tokens).map(|token| format!("Ġ{token}"))));
    file.text("tokenizer.ggml.model", model);
}

fn as_type(file: &mut Gguf, name: &str, (kind, block, bytes): (u32, u64, u64)) {
    let tensor = file.named(name);
    (tensor.kind, tensor.bytes) = (kind, tensor.shape.iter().product::<u64>() / block * bytes);
}

/// Renames the architecture with its keys, whose values stay.
fn of_architecture(file: &mut Gguf, name: &str) {
    for key in &mut file.keys {
        if key.name.starts_with(b"llama.") {
            key.name.splice(..5, name.bytes());
        }
    }
    file.text("general.architecture", name);
}

pub const SHAPES: &[Shape] = &[
    // The file as a whole.
    ("noise", |f| f.magic = *b"abcd", "bad-magic"),
    ("a web page", |f| f.magic = *b"<!DO", "bad-magic"),
    ("a git lfs pointer", |f| f.magic = *b"vers", "bad-magic"),
    ("an archive", |f| f.magic = *b"PK\x03\x04", "bad-magic"),
    ("an empty start", |f| f.magic = [0; 4], "bad-magic"),
    ("GGML", |f| f.magic = *b"lmgg", "old-format"),
    ("GGMF", |f| f.magic = *b"fmgg", "old-format"),
    ("GGJT", |f| f.magic = *b"tjgg", "old-format"),
    ("GGLA", |f| f.magic = *b"algg", "old-format"),
    ("the magic of the other endianness", |f| f.magic = *b"FUGG", "big-endian"),
    ("the version of the other endianness", |f| f.version = 3_u32.swap_bytes(), "big-endian"),
    ("version 0", |f| f.version = 0, "unsupported-version"),
    ("version 1", |f| f.version = 1, "unsupported-version"),
    ("version 4", |f| f.version = 4, "unsupported-version"),
    ("2^64 - 1 keys", |f| f.key_count = Some(u64::MAX), "too-many-keys"),
    ("2^64 - 1 tensors", |f| f.tensor_count = Some(u64::MAX), "too-many-tensors"),
    ("keys times bytes past 64 bits", |f| f.key_count = Some(u64::MAX / 14), "too-many-keys"),
    ("tensors times bytes past 64 bits", |f| f.tensor_count = Some(u64::MAX / 33 + 1), "too-many-tensors"),
    ("no tensors", |f| f.tensors.clear(), "no-tensors"),
    ("an adapter", |f| f.text("general.type", "adapter"), "not-a-model"),
    ("a projector", |f| f.text("general.type", "mmproj"), "not-a-model"),
    ("an importance matrix", |f| f.text("general.type", "imatrix"), "not-a-model"),
    // Splits.
    ("one of three parts", |f| split(f, 0, 3), "split-file"),
    ("part 4 of 3", |f| split(f, 3, 3), "split-number"),
    ("65,535 parts", |f| split(f, 0, 65_535), "too-many-splits"),
    ("parts without a number", |f| f.put("split.count", ty::U16, vec![3, 0]), "missing-key"),
    ("parts as u32", |f| f.number("split.count", 3), "wrong-key-type"),
    // Keys.
    ("an empty key", |f| f.keys.push(key(b"")), "empty-key"),
    ("a key of 65,536 bytes", |f| f.keys.push(key(&[b'k'; 65_536])), "key-too-long"),
    ("NUL in a key", |f| f.keys.push(key(b"general.na\0me")), "control-in-key"),
    ("an escape in a key", |f| f.keys.push(key(b"\x1b[31m")), "control-in-key"),
    ("a line end in a key", |f| f.keys.push(key(b"a\nb")), "control-in-key"),
    ("a key that is not UTF-8", |f| f.keys.push(key(b"\xff\xfe")), "key-not-utf8"),
    ("a key twice", |f| f.keys.push(f.keys[0].clone()), "duplicate-key"),
    ("an unknown type", |f| f.put("x", 13, vec![0]), "unknown-value-type"),
    ("type 2^32 - 1", |f| f.put("x", u32::MAX, vec![0]), "unknown-value-type"),
    ("a bool of 2", |f| f.put("x", ty::BOOL, vec![2]), "invalid-bool"),
    ("a string of 2^64 - 1 bytes", |f| f.put("x", ty::STRING, u64::MAX.to_le_bytes().into()), "string-too-long"),
    ("a string that is not UTF-8", |f| f.put("x", ty::STRING, string(b"\xc3\x28")), "string-not-utf8"),
    ("a long string that is not UTF-8", |f| f.put("x", ty::STRING, string(&[0xff; 9000])), "string-not-utf8"),
    ("an array of arrays", |f| f.put("x", ty::ARRAY, array(ty::ARRAY, 1, &array(ty::U8, 0, &[]))), "nested-array"),
    ("an array of no type", |f| f.put("x", ty::ARRAY, array(99, 1, &[0])), "unknown-element-type"),
    ("an array of 2^64 - 1 bytes", |f| f.put("x", ty::ARRAY, array(ty::U8, u64::MAX, &[])), "array-too-long"),
    ("an array whose bytes pass 64 bits", |f| f.put("x", ty::ARRAY, array(ty::U64, 1 << 61, &[])), "array-too-long"),
    (
        "a string of 2^64 - 1 bytes in an array",
        |f| f.put("x", ty::ARRAY, array(ty::STRING, 1, &u64::MAX.to_le_bytes())),
        "string-too-long",
    ),
    ("alignment 0", |f| f.number("general.alignment", 0), "invalid-alignment"),
    ("alignment 4", |f| f.number("general.alignment", 4), "invalid-alignment"),
    ("alignment 33", |f| f.number("general.alignment", 33), "invalid-alignment"),
    ("alignment 2^31", |f| f.number("general.alignment", 1 << 31), "invalid-alignment"),
    ("alignment as u64", |f| f.put("general.alignment", ty::U64, 32_u64.to_le_bytes().into()), "wrong-key-type"),
    // Hyperparameters.
    ("no architecture", |f| f.remove("general.architecture"), "missing-key"),
    ("an unknown architecture", |f| f.text("general.architecture", "llama9"), "unknown-architecture"),
    ("an architecture without code", |f| f.text("general.architecture", "gptj"), "unknown-architecture"),
    ("an architecture of one number", |f| f.number("general.architecture", 1), "wrong-key-type"),
    ("an image encoder", |f| f.text("general.architecture", "clip"), "not-a-language-model"),
    ("a diffusion model", |f| f.text("general.architecture", "llada"), "not-a-language-model"),
    ("no layer count", |f| f.remove("llama.block_count"), "missing-key"),
    ("no context length", |f| f.remove("llama.context_length"), "missing-key"),
    ("no embedding length", |f| f.remove("llama.embedding_length"), "missing-key"),
    ("no heads", |f| f.remove("llama.attention.head_count"), "missing-key"),
    ("no epsilon", |f| f.remove("llama.attention.layer_norm_rms_epsilon"), "missing-key"),
    ("no layers", |f| f.number("llama.block_count", 0), "key-out-of-range"),
    ("513 layers", |f| f.number("llama.block_count", 513), "key-out-of-range"),
    ("2^32 - 1 layers", |f| f.number("llama.block_count", u32::MAX), "key-out-of-range"),
    ("an unknown pooling", |f| f.number("llama.pooling_type", 99), "key-out-of-range"),
    ("a context of 2^31", |f| f.number("llama.context_length", 1 << 31), "key-out-of-range"),
    ("an embedding of 2^32 - 1", |f| f.number("llama.embedding_length", u32::MAX), "key-out-of-range"),
    ("1,025 experts", |f| f.number("llama.expert_count", 1025), "key-out-of-range"),
    ("layers as u64", |f| f.put("llama.block_count", ty::U64, 2_u64.to_le_bytes().into()), "wrong-key-type"),
    ("a context as text", |f| f.text("llama.context_length", "2048"), "wrong-key-type"),
    ("an original context as text", |f| f.text("llama.rope.scaling.original_context_length", "2048"), "wrong-key-type"),
    ("a window as text", |f| f.text("llama.attention.sliding_window", "512"), "wrong-key-type"),
    ("causal attention as a number", |f| f.number("llama.attention.causal", 1), "wrong-key-type"),
    (
        "labels of numbers",
        |f| f.put("llama.classifier.output_labels", ty::ARRAY, array(ty::U8, 1, &[1])),
        "wrong-key-type",
    ),
    ("a label alone", |f| f.text("llama.classifier.output_labels", "yes"), "wrong-key-type"),
    ("a name of one number", |f| f.number("general.name", 1), "wrong-key-type"),
    ("a name of several", |f| f.put("general.name", ty::ARRAY, strings(["a", "b"])), "wrong-key-type"),
    ("a type of one number", |f| f.number("general.type", 1), "wrong-key-type"),
    ("a file type as text", |f| f.text("general.file_type", "Q8_0"), "wrong-key-type"),
    ("no heads in any layer", |f| f.number("llama.attention.head_count", 0), "inconsistent-hyperparameters"),
    ("no KV heads", |f| f.number("llama.attention.head_count_kv", 0), "inconsistent-hyperparameters"),
    ("KV heads that divide nothing", |f| f.number("llama.attention.head_count_kv", 3), "inconsistent-hyperparameters"),
    (
        "heads of one layer of many",
        |f| f.put("llama.attention.head_count", ty::ARRAY, array(ty::U32, 1, &[4, 0, 0, 0])),
        "wrong-array-length",
    ),
    ("a rotation of half a head", |f| f.number("llama.rope.dimension_count", 8), "inconsistent-hyperparameters"),
    ("values shorter than keys", |f| f.number("llama.attention.value_length", 8), "inconsistent-hyperparameters"),
    ("experts of which none is used", |f| f.number("llama.expert_count", 8), "inconsistent-hyperparameters"),
    ("used experts where there are none", |f| f.number("llama.expert_used_count", 2), "inconsistent-hyperparameters"),
    ("groups of no experts", |f| f.number("llama.expert_group_count", 2), "inconsistent-hyperparameters"),
    ("an unknown rope scaling", |f| f.text("llama.rope.scaling.type", "magic"), "unknown-text"),
    ("a rope scaling of one number", |f| f.number("llama.rope.scaling.type", 1), "wrong-key-type"),
    ("a rope base that is no number", |f| float(f, "llama.rope.freq_base", f32::NAN), "wrong-fraction"),
    ("a negative rope base", |f| float(f, "llama.rope.freq_base", -1.0), "wrong-fraction"),
    ("a rope factor next to nothing", |f| float(f, "llama.rope.scaling.factor", 1e-38), "wrong-fraction"),
    ("an infinite rope factor", |f| float(f, "llama.rope.scaling.attn_factor", f32::INFINITY), "wrong-fraction"),
    ("a negative epsilon", |f| float(f, "llama.attention.layer_norm_rms_epsilon", -1e-5), "wrong-fraction"),
    ("a logit scale that is no number", |f| float(f, "llama.logit_scale", f32::NAN), "wrong-fraction"),
    ("a rope base as u32", |f| f.number("llama.rope.freq_base", 10_000), "wrong-key-type"),
    // What other architectures need.
    ("a Gemma 2 without its norms", |f| of_architecture(f, "gemma2"), "missing-tensor"),
    ("a Mamba without its states", |f| of_architecture(f, "mamba"), "missing-key"),
    ("a granite without its scale", |f| of_architecture(f, "granite"), "missing-key"),
    ("a Qwen 3 without its norms", |f| of_architecture(f, "qwen3"), "missing-tensor"),
    ("a DeepSeek 2 without its ranks", |f| of_architecture(f, "deepseek2"), "missing-key"),
    // The tokenizer.
    ("no vocabulary", |f| f.remove(TOKENS), "missing-key"),
    ("no tokenizer", |f| f.remove("tokenizer.ggml.model"), "missing-key"),
    ("no merges", |f| f.remove(MERGES), "missing-key"),
    ("an unknown tokenizer", |f| f.text("tokenizer.ggml.model", "gpt9"), "unknown-tokenizer"),
    ("the tokenizer of T5 over byte pairs", |f| over_byte_pairs(f, "t5"), "foreign-tokenizer"),
    ("the tokenizer of BERT over byte pairs", |f| over_byte_pairs(f, "bert"), "foreign-tokenizer"),
    ("the tokenizer of Gemma 4 over byte pairs", |f| over_byte_pairs(f, "gemma4"), "foreign-tokenizer"),
    ("the tokenizer of RWKV over byte pairs", |f| over_byte_pairs(f, "rwkv"), "foreign-tokenizer"),
    ("SentencePiece over byte pairs", |f| over_byte_pairs(f, "llama"), "foreign-tokenizer"),
    ("an unknown pre-tokenizer", |f| f.text("tokenizer.ggml.pre", "qwen99"), "unknown-pre-tokenizer"),
    ("a pre-tokenizer of one number", |f| f.number("tokenizer.ggml.pre", 1), "wrong-key-type"),
    ("a chat template of one number", |f| f.number("tokenizer.chat_template", 1), "wrong-key-type"),
    (
        "chat templates in a list",
        |f| f.put("tokenizer.chat_template", ty::ARRAY, strings(["{{ a }}", "{{ b }}"])),
        "wrong-key-type",
    ),
    ("a template of tools of one number", |f| f.number("tokenizer.chat_template.tool_use", 1), "wrong-key-type"),
    ("a template of ranking of one number", |f| f.number("tokenizer.chat_template.rerank", 1), "wrong-key-type"),
    ("tokens that clash up to a NUL", |f| f.put(TOKENS, ty::ARRAY, strings(["a", "b", "", "a\0c"])), "duplicate-token"),
    ("tokens that clash", |f| f.put(TOKENS, ty::ARRAY, strings(["a", "b", "", "a"])), "duplicate-token"),
    ("tokens of numbers", |f| f.put(TOKENS, ty::ARRAY, array(ty::U8, 1, &[1])), "wrong-key-type"),
    ("an empty vocabulary", |f| f.put(TOKENS, ty::ARRAY, strings([""; 0])), "wrong-array-length"),
    ("3,000,000 tokens", |f| f.put(TOKENS, ty::ARRAY, array(ty::STRING, 3_000_000, &[])), "array-too-long"),
    (
        "a token of 100,000 bytes",
        |f| f.put(TOKENS, ty::ARRAY, array(ty::STRING, 1, &100_000_u64.to_le_bytes())),
        "string-too-long",
    ),
    (
        "the type of one token alone",
        |f| f.put(TYPES, ty::ARRAY, array(ty::I32, 1, &[1, 0, 0, 0])),
        "wrong-array-length",
    ),
    ("types of another type", |f| f.put(TYPES, ty::ARRAY, array(ty::U8, 1, &[0])), "wrong-key-type"),
    ("a token of type 7", |f| types_of(f, 7), "unknown-token-type"),
    ("a token of type -1", |f| types_of(f, -1), "unknown-token-type"),
    ("a byte that is none", |f| types_of(f, 6), "no-byte-token"),
    (
        "the score of one token alone",
        |f| f.put("tokenizer.ggml.scores", ty::ARRAY, array(ty::F32, 1, &[0; 4])),
        "wrong-array-length",
    ),
    (
        "a score that is no number",
        |f| f.put("tokenizer.ggml.scores", ty::ARRAY, array(ty::F32, 1, &f32::NAN.to_le_bytes())),
        "wrong-score",
    ),
    ("a merge of one piece", |f| f.put(MERGES, ty::ARRAY, strings(["ab"])), "invalid-merge"),
    ("a merge that ends with its space", |f| f.put(MERGES, ty::ARRAY, strings(["ab "])), "invalid-merge"),
    ("merges of another model", |f| f.put(MERGES, ty::ARRAY, strings(["\u{1}x \u{1}y"])), "foreign-merges"),
    ("an end that is no token", |f| f.number("tokenizer.ggml.eos_token_id", 9_999_999), "token-out-of-range"),
    ("a beginning that is no token", |f| f.number("tokenizer.ggml.bos_token_id", u32::MAX), "token-out-of-range"),
    (
        "a separator that is no token",
        |f| f.number("tokenizer.ggml.seperator_token_id", 9_999_999),
        "token-out-of-range",
    ),
    ("a suppressed token alone", |f| f.number("tokenizer.ggml.suppress_tokens", 1), "wrong-key-type"),
    ("a switch as u8", |f| f.put("tokenizer.ggml.add_bos_token", ty::U8, vec![0]), "wrong-key-type"),
    ("a special token as i32", |f| f.put("tokenizer.ggml.eos_token_id", ty::I32, vec![0; 4]), "wrong-key-type"),
    // The tensor table.
    ("a name of 64 bytes", |f| f.named(UP).name = vec![b'n'; 64], "tensor-name-too-long"),
    ("an empty name", |f| f.named(UP).name.clear(), "empty-tensor-name"),
    ("a name that is not UTF-8", |f| f.named(UP).name = vec![0xff], "tensor-name-not-utf8"),
    ("NUL in a name", |f| f.named(UP).name = b"blk.0.ffn_up\0.weight".to_vec(), "control-in-tensor-name"),
    ("a tensor twice", |f| f.tensor(NORM, &[64], F32), "duplicate-tensor"),
    ("no dimensions", |f| f.named(UP).dimensions = Some(0), "wrong-dimension-count"),
    ("five dimensions", |f| f.named(UP).dimensions = Some(5), "wrong-dimension-count"),
    ("2^32 - 1 dimensions", |f| f.named(UP).dimensions = Some(u32::MAX), "wrong-dimension-count"),
    ("a dimension of zero", |f| f.named(UP).shape[1] = 0, "zero-dimension"),
    ("elements past 64 bits", |f| f.named(UP).shape = vec![1 << 32, 1 << 32], "tensor-too-large"),
    ("elements past 63 bits", |f| f.named(UP).shape = vec![1 << 63], "tensor-too-large"),
    (
        "bytes past 63 bits",
        |f| {
            f.named(UP).shape = vec![1 << 62];
            f.named(UP).kind = F32.0;
        },
        "tensor-too-large",
    ),
    ("an unknown element type", |f| f.named(UP).kind = 43, "unknown-tensor-type"),
    ("element type 2^32 - 1", |f| f.named(UP).kind = u32::MAX, "unknown-tensor-type"),
    ("Q4_2", |f| f.named(UP).kind = 4, "removed-tensor-type"),
    ("Q4_0_8_8", |f| f.named(UP).kind = 33, "removed-tensor-type"),
    (
        "a row of Q4_K that is no whole block",
        |f| {
            f.named(UP).shape = vec![64, 1];
            f.named(UP).kind = Q4_K.0;
        },
        "partial-block",
    ),
    ("a norm in F16", |f| as_type(f, NORM, F16), "unusable-tensor-type"),
    (
        "a matrix of an intermediate type",
        |f| {
            f.named(UP).shape = vec![256, 1];
            as_type(f, UP, Q8_K);
        },
        "unusable-tensor-type",
    ),
    ("an offset that is not aligned", |f| f.named(UP).offset = Some(7), "misaligned-tensor"),
    ("a tensor inside another", |f| f.named(UP).offset = Some(32), "tensor-overlap"),
    ("a tensor after a gap", |f| f.named(UP).offset = Some(1 << 40), "tensor-gap"),
    ("offset 2^64 - 32", |f| f.named(UP).offset = Some(u64::MAX - 31), "tensor-gap"),
    ("more rows than data", |f| f.named(UP).shape[1] += 64, "tensor-overlap"),
    ("fewer rows than data", |f| f.named(UP).shape[1] -= 32, "tensor-gap"),
    // Tensors against hyperparameters.
    ("no embedding", |f| f.tensors.retain(|t| t.name != b"token_embd.weight"), "missing-tensor"),
    ("no output norm", |f| f.tensors.retain(|t| t.name != NORM.as_bytes()), "missing-tensor"),
    ("no queries", |f| f.tensors.retain(|t| t.name != b"blk.1.attn_q.weight"), "missing-tensor"),
    ("no first layer", |f| f.tensors.retain(|t| !t.name.starts_with(b"blk.0.")), "missing-layer"),
    ("a layer more than there are", |f| f.number("llama.block_count", 9), "missing-layer"),
    ("a layer fewer than there are", |f| f.number("llama.block_count", 1), "layer-beyond-model"),
    (
        "layer 2^64",
        |f| f.named("blk.1.attn_q.weight").name = b"blk.18446744073709551616.attn_q.weight".to_vec(),
        "layer-beyond-model",
    ),
    ("layer -1", |f| f.named("blk.1.attn_q.weight").name = b"blk.-1.attn_q.weight".to_vec(), "layer-beyond-model"),
    ("sides that are swapped", |f| f.named(UP).shape.swap(0, 1), "wrong-shape"),
    ("another feed-forward length", |f| f.number("llama.feed_forward_length", 32), "wrong-shape"),
    ("rope factors of another head", |f| f.tensor("rope_freqs.weight", &[7], F32), "wrong-shape"),
    (
        "a vocabulary of another model",
        |f| {
            f.put(TOKENS, ty::ARRAY, strings(["a", "b", "ab", "c"]));
            f.put(MERGES, ty::ARRAY, strings(["a b"]));
            for name in ["bos", "eos", "padding", "unknown"] {
                f.remove(&format!("tokenizer.ggml.{name}_token_id"));
            }
            f.put("tokenizer.ggml.add_bos_token", ty::BOOL, vec![0]);
        },
        "wrong-shape",
    ),
];
