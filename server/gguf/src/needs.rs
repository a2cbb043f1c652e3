//! What the pinned llama.cpp cannot load each architecture without: `needs.txt`, which `tests/architectures.rs` makes from
//! its sources and compares.
//!
//! Absent: what it needs only under a condition, the types of keys, and dimensions that follow from more than one number; of
//! those [`crate::model`] and [`crate::shapes`] know the plain decoders', and of the others a worker is asked.

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// See the module.
const TABLE: &str = include_str!("needs.txt");

/// A width that tensors have, by its name in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// `n_embd`, the embedding's.
    Embedding,
    /// `n_vocab`, tokens of the vocabulary.
    Vocabulary,
    /// `n_expert`, experts of a layer.
    Experts,
    /// One that other numbers make.
    Other,
}

/// One thing that is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Need {
    /// A key, below the architecture's name.
    Key(&'static str),
    /// A tensor.
    Tensor(NeededTensor),
    /// A tensor of every layer, below its `blk.N.`.
    LayerTensor(NeededTensor),
}

/// A tensor that is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NeededTensor {
    /// Its name,
    pub(crate) name: &'static str,
    /// and that of one which does instead.
    pub(crate) instead: Option<&'static str>,
    /// Its dimensions; empty where the sources do not say.
    pub(crate) shape: Vec<Width>,
}

/// By architecture.
static NEEDS: LazyLock<BTreeMap<&str, Vec<Need>>> = LazyLock::new(|| {
    let blocks = TABLE.split("\n\n").skip(1);
    blocks
        .map(|block| {
            let mut lines = block.lines();
            (lines.next().unwrap_or_default(), lines.filter_map(need).collect())
        })
        .collect()
});

/// What an architecture needs; `None`: llama.cpp has a name for it at best.
pub(crate) fn of(architecture: &str) -> Option<&'static [Need]> {
    NEEDS.get(architecture).map(Vec::as_slice)
}

fn need(line: &'static str) -> Option<Need> {
    let (kind, rest) = line.split_once(' ')?;
    let mut words = rest.split(' ');
    let names = words.next()?;
    let (name, instead) = names.split_once('|').map_or((names, None), |(name, instead)| (name, Some(instead)));
    let shape = words.map(|width| match width {
        "n_embd" => Width::Embedding,
        "n_vocab" => Width::Vocabulary,
        "n_expert" => Width::Experts,
        _ => Width::Other,
    });
    let tensor = NeededTensor { name, instead, shape: shape.collect() };
    match kind {
        "key" => Some(Need::Key(name)),
        "tensor" => Some(Need::Tensor(tensor)),
        "layer" => Some(Need::LayerTensor(tensor)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::arch;

    #[test]
    fn every_line_of_the_table_is_read() {
        let mut lines = 0;
        for name in arch::KNOWN.iter().filter(|name| arch::is_known(name)) {
            lines += of(name).unwrap().len();
        }
        let told = TABLE.lines().filter(|line| line.contains(' ') && !line.starts_with('#')).count();
        assert!(lines == told && told > 1_000, "{lines} of {told}");
        assert!(of("llama9000").is_none() && of("").is_none() && of("key").is_none());
    }

    #[test]
    fn a_tensor_has_its_shape_and_what_does_instead() {
        let needs = of("qwen3moe").unwrap();
        assert_eq!(needs[0], Need::Key("attention.layer_norm_rms_epsilon"));
        let tensor = |name, instead, shape: &[Width]| NeededTensor { name, instead, shape: shape.to_vec() };
        let embedding = tensor("token_embd.weight", None, &[Width::Embedding, Width::Vocabulary]);
        assert!(needs.contains(&Need::Tensor(embedding)));
        let fused = tensor("attn_k.weight", Some("attn_qkv.weight"), &[]);
        assert!(needs.contains(&Need::LayerTensor(fused)));
        let experts = tensor("ffn_up_exps.weight", None, &[Width::Embedding, Width::Other, Width::Experts]);
        assert!(needs.contains(&Need::LayerTensor(experts)));
    }
}
