//! The hyperparameters: read from the metadata with their types and ranges, and held against each other.
//!
//! Flow: [`read_hyperparameters`] takes what llama.cpp's `load_hparams` takes, in its types, and refuses what that
//! function asserts on (an assert there kills the process). Absent: the tensors; see [`crate::shapes`].

use crate::arch;
use crate::error::{Defect, GgufError, Result, malformed, printable};
use crate::finding::{Code, Finding, Log};
use crate::limits::{
    DEFAULT_ALIGNMENT, MAX_ALIGNMENT, MAX_CONTEXT_LENGTH, MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, MIN_ALIGNMENT,
};
use crate::needs::{self, Need};
use crate::scan::Scan;
use crate::tokenizer;
use crate::value::{Entry, Metadata, Value, ValueType};

/// What a model's size and memory follow from. Vectors have one element per layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hyperparameters {
    pub(crate) architecture: String,
    pub(crate) layers: u32,
    pub(crate) next_token_layers: u32,
    pub(crate) context_length: u32,
    pub(crate) embedding_length: u32,
    pub(crate) heads: Vec<u32>,
    pub(crate) kv_heads: Vec<u32>,
    pub(crate) feed_forward: Vec<u32>,
    pub(crate) key_length: u32,
    pub(crate) value_length: u32,
    /// Elements of a head that are rotated.
    pub(crate) rotated: u32,
    pub(crate) experts: u32,
    /// Experts that a token passes; 0 in layers that have none.
    pub(crate) experts_used: Vec<u32>,
    pub(crate) expert_feed_forward: u32,
    pub(crate) sliding_window: u32,
    pub(crate) vocabulary: u64,
    /// Elements of 4 bytes that each sequence holds per layer in place of, or beside, a KV cache.
    pub(crate) recurrent_elements: u64,
    /// Whether it says that it scores texts, for which it needs a head.
    pub(crate) ranks: bool,
}

/// A reader of keys below one architecture's name.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
    /// Where a missing key is reported: the end of the keys has no better place.
    missing_at: u64,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn missing<T>(&self, key: String) -> Result<T> {
        malformed(self.missing_at, Defect::MissingKey { key })
    }

    /// A `u32` within a range. llama.cpp takes no other integer type here.
    fn number(&self, key: &str, min: u32, max: u32) -> Result<Option<u32>> {
        let key = self.full(key);
        let Some(Entry { offset, value }) = self.metadata.entry(&key) else { return Ok(None) };
        let &Value::Integer { kind: ValueType::U32, value: found } = value else {
            return malformed(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected: "u32" });
        };
        in_range(&key, *offset, found, min, max).map(Some)
    }

    fn required(&self, key: &str, min: u32, max: u32) -> Result<u32> {
        match self.number(key, min, max)? {
            Some(value) => Ok(value),
            None => self.missing(self.full(key)),
        }
    }

    /// One number for all layers, or an array with one per layer.
    fn per_layer(&self, key: &str, layers: u32, max: u32) -> Result<Option<Vec<u32>>> {
        let key = self.full(key);
        let Some(Entry { offset, value }) = self.metadata.entry(&key) else { return Ok(None) };
        match value {
            Value::Integer { kind: ValueType::U32, value } => {
                let value = in_range(&key, *offset, *value, 0, max)?;
                Ok(Some(vec![value; layers as usize]))
            }
            Value::Array { length, .. } if *length != u64::from(layers) => {
                malformed(*offset, Defect::WrongArrayLength { key, found: *length, expected: layers.into() })
            }
            Value::Array { element: ValueType::U32 | ValueType::I32, kept: Some(elements), .. } => {
                let mut values = Vec::new();
                for &element in elements {
                    values.push(in_range(&key, *offset, element, 0, max)?);
                }
                Ok(Some(values))
            }
            other => {
                let expected = "u32 or an array of u32 or i32";
                malformed(*offset, Defect::WrongKeyType { key, found: other.type_name(), expected })
            }
        }
    }
}

fn in_range(key: &str, offset: u64, found: i64, min: u32, max: u32) -> Result<u32> {
    match u32::try_from(found) {
        Ok(value) if (min..=max).contains(&value) => Ok(value),
        _ => malformed(offset, Defect::KeyOutOfRange { key: printable(key), found, min: min.into(), max: max.into() }),
    }
}

/// `general.alignment`, or its default.
pub(crate) fn alignment(metadata: &Metadata) -> Result<u64> {
    let key = "general.alignment";
    let Some(Entry { offset, value }) = metadata.entry(key) else { return Ok(DEFAULT_ALIGNMENT) };
    let &Value::Integer { kind: ValueType::U32, value: found } = value else {
        return malformed(*offset, Defect::WrongKeyType { key: key.into(), found: value.type_name(), expected: "u32" });
    };
    // A u32 is never negative.
    let found = found.unsigned_abs();
    if !found.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&found) {
        return malformed(*offset, Defect::InvalidAlignment { found, min: MIN_ALIGNMENT, max: MAX_ALIGNMENT });
    }
    Ok(found)
}

/// Refuses what is a GGUF file but not a model: an adapter, a projector.
///
/// Runs before anything else is required, so that such a file is told what it is and not what it lacks.
pub(crate) fn check_kind(metadata: &Metadata) -> Result<()> {
    if let Some(Entry { offset, value: Value::Text { text: Some(kind), .. } }) = metadata.entry("general.type")
        && matches!(kind.as_str(), "adapter" | "mmproj" | "imatrix" | "vocab")
    {
        return malformed(*offset, Defect::NotAModel { kind: kind.clone() });
    }
    Ok(())
}

/// Reads and checks all hyperparameters; `keys_end` is the byte after the last key. `None`: one is missing or wrong.
///
/// What is wrong and what is odd is written into `log`.
pub(crate) fn read_hyperparameters(
    metadata: &Metadata,
    scan: &Scan,
    keys_end: u64,
    log: &mut Log,
) -> Option<Hyperparameters> {
    check_texts(metadata, log);
    let Some(architecture) = log.take(architecture(metadata, keys_end)) else {
        // The tokenizer is the same with every architecture.
        tokenizer::read_vocabulary(metadata, scan, keys_end, log);
        return None;
    };
    let keys = Keys { metadata, architecture, missing_at: keys_end };
    let layers = log.take(keys.required("block_count", 1, MAX_LAYERS));
    let next_token_layers = log.take(keys.number("nextn_predict_layers", 0, layers.unwrap_or(MAX_LAYERS)));
    let context_length = log.take(keys.required("context_length", 1, MAX_CONTEXT_LENGTH));
    let embedding_length = log.take(keys.required("embedding_length", 1, MAX_WIDTH));
    let of_layers = layers.and_then(|layers| {
        let heads = log.take(heads(&keys, layers));
        let feed_forward = log.take(keys.per_layer("feed_forward_length", layers, MAX_WIDTH));
        let lengths = match (embedding_length, &heads) {
            (Some(embedding), Some((heads, _))) => log.take(head_lengths(&keys, embedding, heads)),
            _ => None,
        };
        let experts = log.take(experts(&keys, layers));
        Some((layers, heads?, feed_forward?, lengths?, experts?))
    });
    let scaling = log.take(check_rope_scaling(&keys));
    check_needs(&keys, log);
    check_divisors(&keys, log);
    check_fractions(&keys, log);
    check_claims(&keys, log);
    check_pooling(&keys, log);
    let expert_feed_forward =
        layers.and_then(|layers| log.take(keys.per_layer("expert_feed_forward_length", layers, MAX_WIDTH)));
    let vocabulary = tokenizer::read_vocabulary(metadata, scan, keys_end, log);
    if let Some(tokens) = vocabulary {
        check_tokens(&keys, tokens, log);
        check_claimed_vocabulary(&keys, tokens, log);
    }
    let recurrent = embedding_length.and_then(|embedding| log.take(recurrent_elements(&keys, embedding)));
    let (layers, (heads, kv_heads), feed_forward, (key_length, value_length, rotated), (experts, experts_used)) =
        of_layers?;
    scaling?;
    Some(Hyperparameters {
        architecture: architecture.to_owned(),
        layers,
        next_token_layers: next_token_layers?.unwrap_or(0),
        context_length: context_length?,
        embedding_length: embedding_length?,
        heads,
        kv_heads,
        feed_forward: feed_forward.unwrap_or_else(|| vec![0; layers as usize]),
        key_length,
        value_length,
        rotated,
        experts,
        experts_used,
        expert_feed_forward: largest(expert_feed_forward?),
        sliding_window: sliding_window(metadata, architecture),
        vocabulary: vocabulary?,
        recurrent_elements: recurrent?,
        ranks: matches!(
            metadata.get(&keys.full("pooling_type")),
            Some(Value::Integer { value, .. }) if *value == i64::from(CLASSIFIER_POOLING)
        ),
    })
}

/// What is read of what the file tells of itself is text. llama.cpp loads no model with a name of another type, and with a type of
/// another one the file would be read as if it had none.
fn check_texts(metadata: &Metadata, log: &mut Log) {
    for key in ["general.name", "general.type"] {
        if let Some(Entry { offset, value }) = metadata.entry(key)
            && value.kind() != ValueType::String
        {
            let (found, expected) = (value.type_name(), "string");
            log.defect(*offset, Defect::WrongKeyType { key: key.into(), found, expected });
        }
    }
}

fn architecture(metadata: &Metadata, keys_end: u64) -> Result<&str> {
    let key = "general.architecture";
    let Some(Entry { offset, value }) = metadata.entry(key) else {
        return malformed(keys_end, Defect::MissingKey { key: key.into() });
    };
    let Value::Text { text, .. } = value else {
        return malformed(
            *offset,
            Defect::WrongKeyType { key: key.into(), found: value.type_name(), expected: "string" },
        );
    };
    let name = text.as_deref().unwrap_or_default();
    if !arch::is_known(name) {
        return malformed(*offset, Defect::UnknownArchitecture { found: printable(name) });
    }
    match arch::companion(name) {
        Some(what) => malformed(*offset, Defect::NotALanguageModel { found: name.to_owned(), what }),
        None => Ok(name),
    }
}

fn heads(keys: &Keys<'_>, layers: u32) -> Result<(Vec<u32>, Vec<u32>)> {
    let key = "attention.head_count";
    let recurrent = arch::is_recurrent(keys.architecture);
    let heads = match keys.per_layer(key, layers, MAX_HEADS)? {
        Some(heads) => heads,
        None if recurrent => vec![0; layers as usize],
        None => return keys.missing(keys.full(key)),
    };
    let kv_heads = keys.per_layer("attention.head_count_kv", layers, MAX_HEADS)?.unwrap_or_else(|| heads.clone());
    if !recurrent && heads.iter().all(|&count| count == 0) {
        return keys.inconsistent(key, "no layer has an attention head".into());
    }
    for (layer, (&heads, &kv_heads)) in heads.iter().zip(&kv_heads).enumerate() {
        // A layer without a KV head is recurrent or has been pruned; ggml repeats the others a whole number of times.
        if kv_heads > 0 && heads % kv_heads != 0 {
            let what = format!("layer {layer} has {heads} attention heads and {kv_heads} KV heads, not a divisor");
            return keys.inconsistent(key, what);
        }
        if kv_heads == 0 && heads > 0 && arch::is_plain_decoder(keys.architecture) {
            return keys.inconsistent(key, format!("layer {layer} has {heads} attention heads and no KV head"));
        }
    }
    Ok((heads, kv_heads))
}

impl Keys<'_> {
    fn inconsistent<T>(&self, key: &str, what: String) -> Result<T> {
        let offset = self.metadata.entry(&self.full(key)).map_or(self.missing_at, |entry| entry.offset);
        malformed(offset, Defect::Inconsistent { what })
    }
}

/// Elements of one head's key and value: stated, or the embedding shared out over the first layer's heads.
fn head_lengths(keys: &Keys<'_>, embedding: u32, heads: &[u32]) -> Result<(u32, u32, u32)> {
    let first = heads.first().copied().unwrap_or(0);
    // Without attention they mean nothing.
    let least = u32::from(first > 0);
    let key = keys.number("attention.key_length", least, MAX_WIDTH)?;
    let value = keys.number("attention.value_length", least, MAX_WIDTH)?;
    // llama.cpp derives both from layer 0 and takes no head there as no attention anywhere; a hybrid model whose
    // first layer is recurrent states the lengths.
    let derived = embedding.checked_div(first).unwrap_or(0);
    if key.is_none() && first > 0 && !embedding.is_multiple_of(first) {
        let what = format!("an embedding of {embedding} cannot be shared by {first} attention heads");
        return keys.inconsistent("embedding_length", what);
    }
    let (key, value) = (key.unwrap_or(derived), value.unwrap_or(derived));
    let plain = arch::is_plain_decoder(keys.architecture);
    if plain && key != value {
        let what = format!("keys of {key} and values of {value} elements, which this architecture wants equal");
        return keys.inconsistent("attention.key_length", what);
    }
    let rotated = keys.number("rope.dimension_count", 0, MAX_WIDTH)?;
    let turned = rotated.unwrap_or(key);
    if plain && (turned > key || !turned.is_multiple_of(2)) {
        // ggml asserts that pairs of a head's elements are rotated.
        let what = format!("{turned} rotated elements of a head that has {key}, which must be pairs of them");
        return keys.inconsistent("rope.dimension_count", what);
    }
    if let (Some(rotated), "llama") = (rotated, keys.architecture)
        && rotated != key
    {
        let what = format!("{rotated} rotated elements of a head that has {key}");
        return keys.inconsistent("rope.dimension_count", what);
    }
    Ok((key, value, turned))
}

/// Experts of a mixture, with the relations that llama.cpp asserts.
fn experts(keys: &Keys<'_>, layers: u32) -> Result<(u32, Vec<u32>)> {
    const USED: &str = "expert_used_count";
    let experts = keys.number("expert_count", 0, MAX_EXPERTS)?.unwrap_or(0);
    let used = keys.per_layer(USED, layers, MAX_EXPERTS)?.unwrap_or_else(|| vec![0; layers as usize]);
    // Layers may use different numbers of them; llama.cpp holds the largest against their count.
    let most = used.iter().copied().max().unwrap_or(0);
    if most > experts || (experts > 0 && most == 0) {
        return keys.inconsistent(USED, format!("{most} of {experts} experts are used"));
    }
    let first = used.first().copied().unwrap_or(0);
    let other = used.iter().position(|&used| used != 0 && used != first);
    if let Some(layer) = other.filter(|_| !arch::has_experts_by_layer(keys.architecture)) {
        let (architecture, used) = (keys.architecture, used[layer]);
        let what = format!(
            "a token passes {used} experts of layer {layer} and {first} of layer 0, and this release computes \"{architecture}\" \
             with as many in each layer"
        );
        return keys.inconsistent(USED, what);
    }
    let groups = keys.number("expert_group_count", 0, MAX_EXPERTS)?.unwrap_or(0);
    let groups_used = keys.number("expert_group_used_count", 0, MAX_EXPERTS)?.unwrap_or(0);
    let fits = match (experts, groups) {
        (0, groups) => groups == 0,
        (_, 0 | 1) => groups < experts,
        _ => groups < experts && experts % groups == 0 && groups_used > 0 && groups_used < groups,
    };
    if !fits {
        let what = format!("{experts} experts in {groups} groups, of which {groups_used} are used");
        return keys.inconsistent("expert_group_count", what);
    }
    Ok((experts, used))
}

/// The largest of the layers' numbers; 0 where there is none.
fn largest(of_layers: Option<Vec<u32>>) -> u32 {
    of_layers.and_then(|numbers| numbers.into_iter().max()).unwrap_or(0)
}

fn check_rope_scaling(keys: &Keys<'_>) -> Result<()> {
    const EXPECTED: &str = "none, linear, yarn, longrope";
    let key = keys.full("rope.scaling.type");
    match keys.metadata.entry(&key) {
        None => Ok(()),
        Some(Entry { value: Value::Text { text: Some(text), .. }, .. })
            if matches!(text.as_str(), "none" | "linear" | "yarn" | "longrope") =>
        {
            Ok(())
        }
        Some(Entry { offset, value: Value::Text { text, .. } }) => {
            let found = printable(text.as_deref().unwrap_or_default());
            malformed(*offset, Defect::UnknownText { key, found, expected: EXPECTED })
        }
        Some(Entry { offset, value }) => {
            malformed(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected: "string" })
        }
    }
}

/// What llama.cpp asks of this architecture beyond what it asks of all.
fn check_needs(keys: &Keys<'_>, log: &mut Log) {
    for need in needs::of(keys.architecture).into_iter().flatten() {
        if let Need::Key(key) = need
            && keys.metadata.entry(&keys.full(key)).is_none()
        {
            log.defect(keys.missing_at, Defect::MissingKey { key: keys.full(key) });
        }
    }
}

/// Whole numbers that llama.cpp divides by without a look, which ends the process where one is zero; and architectures.
const DIVISORS: [(&str, &[&str]); 7] = [
    ("ssm.group_count", GROUPED_STATES),
    ("ssm.time_step_rank", GROUPED_STATES),
    ("full_attention_interval", &["minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"]),
    ("interleave_moe_layer_step", &["ernie4_5-moe"]),
    ("experts_per_group", &["grovemoe"]),
    ("attention.output_group_count", &["deepseek4"]),
    ("wkv.head_size", &["arwkv7", "rwkv6", "rwkv6qwen2", "rwkv7"]),
];

/// Architectures whose states are shared out over heads and groups.
const GROUPED_STATES: &[&str] = &["granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe"];

fn check_divisors(keys: &Keys<'_>, log: &mut Log) {
    // A key of another type was told of, or is where it is read.
    let number = |key: &str| match keys.metadata.entry(&keys.full(key))? {
        Entry { offset, value: Value::Integer { kind: ValueType::U32, value } } => Some((*offset, *value)),
        _ => None,
    };
    for (key, architectures) in DIVISORS {
        // Where each layer says what it is, nobody asks for the interval.
        let is_moot =
            key == "full_attention_interval" && keys.metadata.entry(&keys.full("attention.recurrent_layers")).is_some();
        if let Some((offset, 0)) = number(key).filter(|_| architectures.contains(&keys.architecture) && !is_moot) {
            let key = keys.full(key);
            log.defect(offset, Defect::KeyOutOfRange { key, found: 0, min: 1, max: u32::MAX.into() });
        }
    }
    if !GROUPED_STATES.contains(&keys.architecture) {
        return;
    }
    let inner = number("ssm.inner_size").map_or(0, |(_, inner)| inner);
    for (key, what) in [("ssm.group_count", "groups"), ("ssm.time_step_rank", "heads")] {
        if let Some((offset, count)) = number(key).filter(|(_, count)| *count > 0 && inner % count != 0) {
            let what = format!("states of {inner} elements cannot be shared by {count} {what}");
            log.defect(offset, Defect::Inconsistent { what });
        }
    }
}

/// Numbers with a fraction that enter the computation: llama.cpp takes f32 only, and aborts in the first decode on an
/// epsilon that is negative or no number.
fn check_fractions(keys: &Keys<'_>, log: &mut Log) {
    let not_negative = [
        "attention.layer_norm_rms_epsilon",
        "attention.group_norm_epsilon",
        "attention.layer_norm_epsilon",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.factor",
    ];
    let finite = [
        "attention.clamp_kqv",
        "attention.scale",
        "attention.temperature_scale",
        "attn_logit_softcapping",
        "embedding_scale",
        "expert_weights_scale",
        "final_logit_softcapping",
        "logit_scale",
        "residual_scale",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
        "router_logit_softcapping",
    ];
    let names = not_negative.map(|name| (name, 0.0)).into_iter().chain(finite.map(|name| (name, f64::MIN)));
    for (key, least) in names.map(|(name, least)| (keys.full(name), least)) {
        match keys.metadata.entry(&key) {
            None => {}
            Some(Entry { value: Value::Float { kind: ValueType::F32, value }, .. })
                if value.is_finite() && *value >= least && !(is_divisor(&key) && scales_beyond_numbers(*value)) => {}
            Some(Entry { offset, value: Value::Float { kind: ValueType::F32, value } }) => {
                log.defect(*offset, Defect::WrongFraction { key, found: value.to_string() });
            }
            Some(Entry { offset, value }) => {
                log.defect(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected: "f32" });
            }
        }
    }
}

/// Whether positions are divided by the number of a key.
fn is_divisor(key: &str) -> bool {
    ["rope.scaling.factor", "rope.scale_linear"].iter().any(|name| key.ends_with(name))
}

/// A factor so small that positions divided by it are no numbers, or none that differ; 0 says that there is none.
fn scales_beyond_numbers(factor: f64) -> bool {
    const LEAST_ROPE_FACTOR: f64 = 1e-4;
    factor != 0.0 && factor < LEAST_ROPE_FACTOR
}

/// Values that enter no computation here, or do so unchecked, and that llama.cpp takes in one type only.
fn check_claims(keys: &Keys<'_>, log: &mut Log) {
    const NUMBERS: [&str; 8] = [
        "attention.key_length_swa",
        "attention.sliding_window",
        "attention.value_length_swa",
        "embedding_length_out",
        "ple.eos_token_id",
        "rope.dimension_count_swa",
        "rope.scaling.original_context_length",
        "vocab_size",
    ];
    const SWITCHES: [&str; 2] = ["attention.causal", "rope.scaling.finetuned"];
    let file_type = ("general.file_type".to_owned(), ValueType::U32, "u32");
    let numbers = NUMBERS.iter().map(|name| (keys.full(name), ValueType::U32, "u32"));
    let switches = SWITCHES.iter().map(|name| (keys.full(name), ValueType::Bool, "bool"));
    for (key, kind, expected) in std::iter::once(file_type).chain(numbers).chain(switches) {
        if let Some(Entry { offset, value }) = keys.metadata.entry(&key)
            && value.kind() != kind
        {
            log.defect(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected });
        }
    }
    // Of these, llama.cpp takes what is no array for nothing.
    let arrays = [
        (keys.full("classifier.output_labels"), ValueType::String, "an array of strings"),
        ("general.tensor_extra.name".to_owned(), ValueType::String, "an array of strings"),
        ("general.tensor_extra.prec_a4".to_owned(), ValueType::Bool, "an array of bool"),
    ];
    for (key, kind, expected) in arrays {
        if let Some(Entry { offset, value }) = keys.metadata.entry(&key)
            && !matches!(value, Value::Array { element, .. } if *element == kind)
        {
            log.defect(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected });
        }
    }
}

/// The token that an architecture takes to stand before a text's first one, where each is looked up together with those
/// before it.
fn check_tokens(keys: &Keys<'_>, tokens: u64, log: &mut Log) {
    let key = keys.full("ple.eos_token_id");
    if let Some(&Entry { offset, value: Value::Integer { kind: ValueType::U32, value: found } }) =
        keys.metadata.entry(&key)
        && u64::try_from(found).is_ok_and(|token| token >= tokens)
    {
        log.defect(offset, Defect::TokenBeyondVocabulary { key, found, tokens });
    }
}

/// llama.cpp's number of the last kind of pooling: none, mean, the first token's, the last one's, a classifier's.
const CLASSIFIER_POOLING: u32 = 4;

/// How the vectors of a text's tokens become one: llama.cpp takes any number, and aborts on one that it does not know when it
/// first makes a vector; of a classifier it takes others for the first token's, in silence.
fn check_pooling(keys: &Keys<'_>, log: &mut Log) {
    /// llama.cpp writes this where none is named, and reads it so.
    const UNSPECIFIED: u32 = u32::MAX;
    for key in ["pooling_type", "classifier.pooling_type"].map(|key| keys.full(key)) {
        match keys.metadata.entry(&key) {
            None => {}
            Some(Entry { value: Value::Integer { kind: ValueType::U32, value }, .. })
                if *value == i64::from(UNSPECIFIED) => {}
            Some(Entry { offset, value: Value::Integer { kind: ValueType::U32, value } }) => {
                _ = log.take(in_range(&key, *offset, *value, 0, CLASSIFIER_POOLING));
            }
            Some(Entry { offset, value }) => {
                log.defect(*offset, Defect::WrongKeyType { key, found: value.type_name(), expected: "u32" });
            }
        }
    }
}

/// The number of tokens by the file's own account, which llama.cpp leaves unread: the tokens are what counts.
fn check_claimed_vocabulary(keys: &Keys<'_>, tokens: u64, log: &mut Log) {
    let key = keys.full("vocab_size");
    let Some(Entry { offset, value: Value::Integer { kind: ValueType::U32, value } }) = keys.metadata.entry(&key)
    else {
        return;
    };
    if u64::try_from(*value) != Ok(tokens) {
        let message = format!("{key} says {value}, but the vocabulary has {tokens} tokens, which is what counts");
        let finding = Finding::new(Code::DeclaredVocabulary, "header", value.to_string(), tokens.to_string());
        log.warn(finding.about(key).at(*offset).saying(message));
    }
}

/// The window, for the summary alone; llama.cpp checks it per architecture.
fn sliding_window(metadata: &Metadata, architecture: &str) -> u32 {
    match metadata.get(&format!("{architecture}.attention.sliding_window")) {
        Some(Value::Integer { value, .. }) => u32::try_from(*value).unwrap_or(0),
        _ => 0,
    }
}

/// Elements of recurrent state per layer and sequence, as llama.cpp's `n_embd_r` and `n_embd_s` count them.
fn recurrent_elements(keys: &Keys<'_>, embedding: u32) -> Result<u64> {
    let number = |key: &str| Ok::<u64, GgufError>(keys.number(key, 0, MAX_WIDTH)?.unwrap_or(0).into());
    let embedding = u64::from(embedding);
    let wkv_head = number("wkv.head_size")?;
    if wkv_head > 0 {
        let shifts = number("token_shift_count")?.max(2);
        return Ok(embedding.saturating_mul(wkv_head.saturating_add(shifts)));
    }
    let (inner, state) = (number("ssm.inner_size")?, number("ssm.state_size")?);
    let (groups, window) = (number("ssm.group_count")?, number("ssm.conv_kernel")?);
    let convolved = inner.saturating_add(state.saturating_mul(groups).saturating_mul(2));
    let convolution = window.saturating_sub(1).saturating_mul(convolved);
    let shortened = number("shortconv.l_cache")?.saturating_sub(1).saturating_mul(embedding);
    Ok(inner.saturating_mul(state).saturating_add(convolution).saturating_add(shortened))
}
