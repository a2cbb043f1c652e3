//! The tensors held against the hyperparameters: what llama.cpp will ask for is there, in that shape and a usable type.
//!
//! For every architecture: the embedding fits the vocabulary, layers are numbered within `block_count` and none is
//! missing, types can be computed with, and what the architecture needs in any case ([`crate::needs`]) is there. For the plain
//! decoders ([`arch::is_plain_decoder`]), which most published models are: every matrix of every layer. Absent: what the other
//! architectures need under a condition; llama.cpp checks that at load, in the worker process.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::arch;
use crate::error::{Defect, printable};
use crate::finding::Log;
use crate::ggml::GgmlType;
use crate::limits::MAX_LAYERS;
use crate::model::Hyperparameters;
use crate::needs::{self, Need, NeededTensor, Width};
use crate::tensor::{Tensor, Tensors};

/// How much of the tensor set was held against the hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ShapeCoverage {
    /// Every matrix of every layer.
    Full,
    /// The embedding, the output and the numbering of the layers.
    Outline,
}

/// An expected shape; `None` stands for a dimension that the hyperparameters do not fix.
type Expected<'a> = &'a [Option<u64>];

/// Checks the tensor set. `table_end` is the byte after the tensor table, where missing tensors are reported; without a
/// `model`, whose hyperparameters are wrong, only what each tensor says of itself is looked at.
pub(crate) fn check_tensors(
    tensors: &Tensors,
    model: Option<&Hyperparameters>,
    table_end: u64,
    log: &mut Log,
) -> ShapeCoverage {
    check_types(tensors, log);
    let Some(model) = model else { return ShapeCoverage::Outline };
    let mut check = Check { tensors, model, table_end, log, told: HashSet::new(), empty_layers: Vec::new() };
    check.layer_numbers();
    check.routers();
    let (embedding, vocabulary) = (Some(u64::from(model.embedding_length)), Some(model.vocabulary));
    check.required("token_embd.weight", &[embedding, vocabulary]);
    check.shape("output.weight", &[embedding, vocabulary]);
    let is_plain = arch::is_plain_decoder(&model.architecture);
    if is_plain {
        check.plain_decoder();
    }
    check.needs();
    // Without either llama.cpp takes a number of the text's vector for its score.
    if model.ranks && tensors.get("cls.weight").is_none() {
        check.required("cls.output.weight", &[embedding, None]);
    }
    if is_plain { ShapeCoverage::Full } else { ShapeCoverage::Outline }
}

/// Types that no kernel takes: llama.cpp aborts on them in the first decode, after a load that looked well.
fn check_types(tensors: &Tensors, log: &mut Log) {
    for tensor in tensors.list() {
        let name = tensor.name.as_str();
        let added = name.ends_with("_norm.weight") || (name.ends_with(".bias") && tensor.shape.len() == 1);
        let expected = if added && tensor.kind != GgmlType::F32 {
            "F32"
        } else if is_matrix(name) && !tensor.kind.is_weight() {
            "a floating-point or weight quantisation type"
        } else {
            continue;
        };
        let defect = Defect::UnusableTensorType { tensor: printable(name), found: tensor.kind.name(), expected };
        log.defect(tensor.entry_offset, defect);
    }
}

struct Check<'a> {
    tensors: &'a Tensors,
    model: &'a Hyperparameters,
    table_end: u64,
    log: &'a mut Log,
    /// Tensors of which something was told.
    told: HashSet<String>,
    /// Layers that have no tensor at all, of which that was told.
    empty_layers: Vec<u32>,
}

impl Check<'_> {
    fn required(&mut self, name: &str, expected: Expected<'_>) {
        if self.tensors.get(name).is_none() {
            self.missing(name);
        }
        self.shape(name, expected);
    }

    /// Nothing is missing for sure where a tensor could not be read, which was told of.
    fn missing(&mut self, name: &str) {
        if self.tensors.are_all_read() && self.told.insert(name.to_owned()) {
            self.log.defect(self.table_end, Defect::MissingTensor { tensor: name.to_owned() });
        }
    }

    /// Whatever of this name is there has this shape; dimensions of one at the end do not count.
    fn shape(&mut self, name: &str, expected: Expected<'_>) {
        let Some(tensor) = self.tensors.get(name) else { return };
        let count = expected.len().max(tensor.shape.len());
        let fits = (0..count).all(|index| {
            let found = tensor.shape.get(index).copied().unwrap_or(1);
            expected.get(index).copied().unwrap_or(Some(1)).is_none_or(|expected| expected == found)
        });
        if !fits && self.told.insert(name.to_owned()) {
            let (tensor_name, found) = (printable(name), tensor.shape.clone());
            let defect = Defect::WrongShape { tensor: tensor_name, found, expected: describe(expected) };
            self.log.defect(tensor.entry_offset, defect);
        }
    }

    fn plain_decoder(&mut self) {
        let model = self.model;
        self.required("output_norm.weight", &[Some(u64::from(model.embedding_length))]);
        for factors in ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"] {
            // One for each pair of elements that is rotated.
            self.shape(factors, &[Some(u64::from(model.rotated / 2))]);
        }
        for layer in 0..self.needed_layers() {
            self.layer(layer);
        }
    }

    /// Layers that predict further tokens may have been left out of the file.
    fn needed_layers(&self) -> u32 {
        self.model.layers.saturating_sub(self.model.next_token_layers)
    }

    /// What llama.cpp asks for whatever else the file says.
    fn needs(&mut self) {
        for need in needs::of(&self.model.architecture).into_iter().flatten() {
            match need {
                Need::Key(_) => {}
                Need::Tensor(tensor) => self.need("", tensor),
                Need::LayerTensor(tensor) => {
                    for layer in 0..self.needed_layers() {
                        // One without any was told of as such.
                        if !self.empty_layers.contains(&layer) {
                            self.need(&format!("blk.{layer}."), tensor);
                        }
                    }
                }
            }
        }
    }

    fn need(&mut self, layer: &str, tensor: &NeededTensor) {
        let name = format!("{layer}{}", tensor.name);
        if tensor.instead.is_some_and(|instead| self.tensors.get(&format!("{layer}{instead}")).is_some()) {
            return;
        }
        if tensor.shape.is_empty() {
            if self.tensors.get(&name).is_none() {
                self.missing(&name);
            }
            return;
        }
        let width = |width: &Width| match width {
            Width::Embedding => Some(u64::from(self.model.embedding_length)),
            Width::Vocabulary => Some(self.model.vocabulary),
            Width::Experts => Some(u64::from(self.model.experts)),
            Width::Other => None,
        };
        self.required(&name, &tensor.shape.iter().map(width).collect::<Vec<_>>());
    }

    /// Every `blk.N` lies within the layer count, and every layer has some.
    fn layer_numbers(&mut self) {
        let layers = self.model.layers;
        let mut seen = [false; MAX_LAYERS as usize];
        let mut beyond: Option<(&Tensor, usize)> = None;
        for tensor in self.tensors.list() {
            let Some(layer) = layer_of(tensor) else { continue };
            match usize::try_from(layer).ok().filter(|_| layer < u64::from(layers)).and_then(|at| seen.get_mut(at)) {
                Some(seen) => *seen = true,
                None => beyond = Some(beyond.map_or((tensor, 0), |(first, others)| (first, others + 1))),
            }
        }
        if let Some((tensor, others)) = beyond {
            let defect = Defect::LayerBeyondModel { tensor: printable(&tensor.name), others, layers };
            self.log.defect(tensor.entry_offset, defect);
        }
        if arch::may_lack_layers(&self.model.architecture) || !self.tensors.are_all_read() {
            return;
        }
        let empty = (0..self.needed_layers()).zip(seen).filter(|(_, seen)| !seen);
        self.empty_layers = empty.map(|(layer, _)| layer).collect();
        // A count that is too large is one finding, not one for each layer.
        for run in self.empty_layers.chunk_by(|layer, next| layer + 1 == *next) {
            if let (&[first, ..], &[.., last]) = (run, run) {
                self.log.defect(self.table_end, Defect::MissingLayers { first, last, layers });
            }
        }
    }

    /// A layer that chooses among experts has a number of them to choose.
    fn routers(&mut self) {
        if self.model.experts == 0 {
            return;
        }
        for (layer, _) in self.model.experts_used.iter().enumerate().filter(|&(_, &used)| used == 0) {
            let router = format!("blk.{layer}.ffn_gate_inp.weight");
            if let Some(tensor) = self.tensors.get(&router) {
                let what =
                    format!("a token passes no expert of layer {layer}, which has tensor \"{router}\" to choose them");
                self.log.defect(tensor.entry_offset, Defect::Inconsistent { what });
            }
        }
    }

    fn layer(&mut self, layer: u32) {
        let model = self.model;
        let at = |values: &[u32]| u64::from(values.get(layer as usize).copied().unwrap_or(0));
        let (heads, kv_heads) = (at(&model.heads), at(&model.kv_heads));
        // Limits of heads (2^16) and widths (2^24) keep the products far below overflow.
        let embedding = Some(u64::from(model.embedding_length));
        let queries = Some(heads * u64::from(model.key_length));
        let keys = Some(kv_heads * u64::from(model.key_length));
        let values = Some(kv_heads * u64::from(model.value_length));
        let hidden = Some(at(&model.feed_forward));
        let experts = Some(u64::from(model.experts));
        if self.empty_layers.contains(&layer) {
            return;
        }
        let name = |part: &str| format!("blk.{layer}.{part}.weight");

        self.required(&name("attn_norm"), &[embedding]);
        if self.tensors.get(&name("attn_qkv")).is_some() {
            let fused = Some(heads * u64::from(model.key_length) + 2 * kv_heads * u64::from(model.key_length));
            self.shape(&name("attn_qkv"), &[embedding, fused]);
        } else {
            self.required(&name("attn_q"), &[embedding, queries]);
            self.required(&name("attn_k"), &[embedding, keys]);
            self.required(&name("attn_v"), &[embedding, values]);
        }
        self.required(&name("attn_output"), &[queries, embedding]);
        self.required(&name("ffn_norm"), &[embedding]);
        if model.experts == 0 {
            self.required(&name("ffn_gate"), &[embedding, hidden]);
            self.required(&name("ffn_up"), &[embedding, hidden]);
            self.required(&name("ffn_down"), &[hidden, embedding]);
        } else {
            self.required(&name("ffn_gate_inp"), &[embedding, experts]);
            self.shape(&name("ffn_gate_exps"), &[embedding, None, experts]);
            self.required(&name("ffn_up_exps"), &[embedding, None, experts]);
            self.required(&name("ffn_down_exps"), &[None, embedding, experts]);
        }
    }
}

/// Whether llama.cpp looks rows up in it or multiplies by it.
pub(crate) fn is_matrix(name: &str) -> bool {
    const PARTS: [&str; 11] = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_down_exps",
    ];
    let Some(stem) = name.strip_suffix(".weight") else { return false };
    match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, part)) => PARTS.contains(&part),
        None => matches!(stem, "token_embd" | "output"),
    }
}

/// The layer that a tensor's name puts it in. A number beyond 64 bits is beyond any model.
fn layer_of(tensor: &Tensor) -> Option<u64> {
    let (number, _) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
    Some(number.parse().unwrap_or(u64::MAX))
}

fn describe(expected: Expected<'_>) -> String {
    let mut text = String::from("[");
    for (index, dimension) in expected.iter().enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = match dimension {
            Some(dimension) => write!(text, "{separator}{dimension}"),
            None => write!(text, "{separator}any"),
        };
    }
    text.push(']');
    text
}
