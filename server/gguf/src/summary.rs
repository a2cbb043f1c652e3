//! What a valid header says about its model, small enough for a status or a log line.

use serde::{Deserialize, Serialize};

use crate::Part;
use crate::arch;
use crate::ggml::GgmlType;
use crate::model::Hyperparameters;
use crate::quant;
use crate::shapes::ShapeCoverage;
use crate::tensor::{Layout, Tensor, Tensors};
use crate::value::{Metadata, Value};

/// A model in figures. Bytes and elements are exact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`.
    pub name: Option<String>,
    /// `general.version`.
    pub version: Option<String>,
    /// What the quantisation is called, as in file names: "Q4_K_M".
    pub quantization: String,
    /// Elements of all tensors.
    pub parameters: u64,
    /// Tokens of context the model was trained for.
    pub context_length: u32,
    /// Layers, those that predict further tokens included.
    pub layers: u32,
    /// Attention heads of the layer that has most.
    pub heads: u32,
    /// KV heads of the layer that has most.
    pub kv_heads: u32,
    /// KV heads of all layers together: what the KV cache is proportional to, which an encoder has none of.
    pub kv_heads_total: u64,
    /// Elements of one head's key.
    pub head_dim_k: u32,
    /// Elements of one head's value.
    pub head_dim_v: u32,
    /// Width of the embedding.
    pub embedding_length: u32,
    /// Width of the widest feed-forward layer that one token passes, with all experts it uses.
    pub feed_forward_length: u64,
    /// Experts per layer; 0 without a mixture.
    pub experts: u32,
    /// Experts that one token passes.
    pub experts_used: u32,
    /// Tokens of the sliding attention window; 0 without one.
    pub sliding_window: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: u64,
    /// Bytes of recurrent state that each sequence holds, over all layers.
    pub recurrent_bytes_per_sequence: u64,
    /// Whether it is an encoder, which gives vectors of texts and generates none.
    #[serde(default)]
    pub encoder: bool,
    /// Whether the file has its own chat template.
    pub chat_template: bool,
    /// Files of which the model consists.
    #[serde(default)]
    pub parts: u64,
    /// Bytes of the file, or of all of them.
    pub file_bytes: u64,
    /// Bytes of the header, up to the tensor data, or of the headers of all files.
    pub header_bytes: u64,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of the tensors that belong to a layer.
    pub layer_bytes: u64,
    /// Bytes of the token embedding.
    pub embedding_bytes: u64,
    /// Its element type; `None` without an embedding.
    pub embedding_type: Option<GgmlType>,
    /// Whether the output matrix is the embedding: a GPU then gets a copy of it, and a CPU that repacks its type another.
    pub tied_output: bool,
    /// Tensors in the file.
    pub tensors: u64,
    /// Element types with the bytes in each, the largest first.
    pub types: Vec<(GgmlType, u64)>,
    /// How much of the tensor set was held against the hyperparameters.
    pub shape_coverage: ShapeCoverage,
}

/// Everything is checked by now, so that this only adds up.
pub(crate) fn summarise(
    metadata: &Metadata,
    tensors: &Tensors,
    model: &Hyperparameters,
    layout: Layout,
    parts: &[Part],
    shape_coverage: ShapeCoverage,
) -> Summary {
    let list = tensors.list();
    let sum = |of: &dyn Fn(&Tensor) -> u64| list.iter().map(of).fold(0, u64::saturating_add);
    let text = |key: &str| metadata.text(key).filter(|text| !text.is_empty()).map(str::to_owned);
    let most = |values: &[u32]| values.iter().copied().max().unwrap_or(0);
    let widest = u64::from(most(&model.feed_forward));
    let expert_width = if model.expert_feed_forward > 0 { model.expert_feed_forward.into() } else { widest };
    let experts_used = most(&model.experts_used);
    let through_experts = u64::from(experts_used) * expert_width;
    let recurrent_layers = match model.kv_heads.iter().filter(|&&heads| heads == 0).count() as u64 {
        // A model that states one number for all layers may still be hybrid.
        0 => u64::from(model.layers),
        some => some,
    };
    // It keeps nothing between batches, of whatever its layers are.
    let encoder = arch::is_encoder(&model.architecture);
    let recurrent_bytes = model.recurrent_elements.saturating_mul(4).saturating_mul(recurrent_layers);
    Summary {
        architecture: model.architecture.clone(),
        name: text("general.name"),
        version: text("general.version"),
        quantization: quant::label(metadata, list).to_owned(),
        parameters: sum(&Tensor::elements),
        context_length: model.context_length,
        layers: model.layers,
        heads: most(&model.heads),
        kv_heads: most(&model.kv_heads),
        kv_heads_total: if encoder { 0 } else { model.kv_heads.iter().map(|&heads| u64::from(heads)).sum() },
        head_dim_k: model.key_length,
        head_dim_v: model.value_length,
        embedding_length: model.embedding_length,
        feed_forward_length: through_experts.max(widest),
        experts: model.experts,
        experts_used,
        sliding_window: model.sliding_window,
        vocabulary: model.vocabulary,
        recurrent_bytes_per_sequence: if encoder { 0 } else { recurrent_bytes },
        encoder,
        chat_template: matches!(metadata.get("tokenizer.chat_template"), Some(Value::Text { bytes, .. }) if *bytes > 0),
        file_bytes: parts.iter().fold(0, |sum, part| sum.saturating_add(part.file_bytes)),
        header_bytes: parts.iter().fold(0, |sum, part| sum.saturating_add(part.data_offset)),
        parts: parts.len() as u64,
        tensor_bytes: layout.tensor_bytes,
        layer_bytes: sum(&|tensor| if tensor.name.starts_with("blk.") { tensor.bytes } else { 0 }),
        embedding_bytes: tensors.get("token_embd.weight").map_or(0, |tensor| tensor.bytes),
        embedding_type: tensors.get("token_embd.weight").map(|tensor| tensor.kind),
        tied_output: !encoder && tensors.get("output.weight").is_none(),
        tensors: list.len() as u64,
        types: quant::type_shares(list),
        shape_coverage,
    }
}
