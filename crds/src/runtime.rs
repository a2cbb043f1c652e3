//! How the engine runs a model: the part of a spec that, when it changes, makes another version.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    inference_service::SourceSpec,
    scalars::{AutoOr, DurationString, PositiveQuantity},
};

/// The longest chat template that a spec may give, in characters: the longest published ones have about 20,000. It is in the
/// object as often as versions are, and each watcher of the object receives it whole.
pub const MAX_CHAT_TEMPLATE_CHARS: u32 = 32_768;
/// The least context in tokens.
pub const MIN_CONTEXT_SIZE: u32 = 128;
/// The most context in tokens.
pub const MAX_CONTEXT_SIZE: u32 = 1 << 24;
/// The most sequences.
pub const MAX_PARALLEL: u32 = 255;

/// How the engine runs a model.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.contextSize >= self.parallel * 16").message("spec.runtime.contextSize: it is shared by the parallel sequences, so give at least 16 tokens for each (contextSize >= 16 * parallel)"),
    validation = Rule::new("type(self.threads) != int || self.threads <= 512").message("spec.runtime.threads: use auto or a whole number up to 512"),
    validation = Rule::new("!has(self.workers) || (self.workers <= self.parallel && (type(self.threads) != int || self.threads == 0 || self.workers <= self.threads))").message("spec.runtime.workers: each worker needs a sequence and a thread of its own, so give at most as many as parallel and as threads"),
    validation = Rule::new("!has(self.kvLayout) || self.kvLayout != 'Unified' || !has(self.workers) || self.parallel % self.workers == 0").message("spec.runtime.kvLayout: in one pool of cells for each worker how long a request may be would depend on who gets it, so make parallel a multiple of workers")
)]
pub struct RuntimeSpec {
    /// Tokens of context in all, shared equally by the parallel sequences.
    #[serde(default = "default_context_size")]
    #[x_kube(validation = Rule::new(format!("self >= {MIN_CONTEXT_SIZE} && self <= {MAX_CONTEXT_SIZE}")).message(format!("spec.runtime.contextSize: use a number of tokens from {MIN_CONTEXT_SIZE} to {MAX_CONTEXT_SIZE}").as_str()))]
    pub context_size: u32,
    /// Sequences that are decoded at the same time.
    #[serde(default = "default_parallel")]
    #[x_kube(validation = Rule::new(format!("self >= 1 && self <= {MAX_PARALLEL}")).message(format!("spec.runtime.parallel: use a number from 1 to {MAX_PARALLEL}").as_str()))]
    pub parallel: u32,
    /// Type of the keys and values in the KV cache.
    #[serde(default)]
    pub cache_type: CacheType,
    /// How the sequences share the KV cache. Left out, as it suits contextSize, parallel, cacheType and what the pod
    /// computes on.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_layout: Option<KvLayout>,
    /// Layers that run on GPUs: auto takes all where spec.resources.gpu asks for some, 0 is CPU only. A pod that finds no
    /// GPU refuses the model.
    #[serde(default)]
    pub gpu_layers: AutoOr,
    /// How they are spread over several GPUs; layer by layer, by their free memory, if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_split: Option<GpuSplitSpec>,
    /// Most memory of GPUs, all together, that a model takes in each pod: 20Gi. With gpuLayers: auto as many layers go there
    /// as fit, and otherwise the memory gate refuses what does not. Needs spec.resources.gpu. All that the GPUs have if left
    /// out.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_memory: Option<PositiveQuantity>,
    /// Threads of the engine on the CPU: auto follows from the CPUs of the pod.
    #[serde(default)]
    pub threads: AutoOr,
    /// Processes that serve the model side by side in each pod, at most one for each processor; contextSize, parallel and
    /// threads are those of all together. More take more memory and are slower for a lone request, and the death of one
    /// does not stop the model. If left out, one, or, on CPUs of several sockets, one for each of them that the threads
    /// need, where the pod's memory is twice what these take.
    // Not serialised when absent: versions are named after what is, and one that was made before this field stays itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 32").message("spec.runtime.workers: use a number from 1 to 32"))]
    pub workers: Option<u32>,
    /// How long a step may take while requests generate, in milliseconds: the less, the more evenly their tokens come, and
    /// the longer a new request waits for its first. If left out, 2.1 times as long as their tokens alone take, and at most
    /// 250.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 60000").message("spec.runtime.stepMsTarget: use a number of milliseconds from 1 to 60000"))]
    pub step_ms_target: Option<u32>,
    /// Prompts that are kept after their requests: what a request begins with and an earlier one began with is not read
    /// again.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_cache: Option<PrefixCacheSpec>,
    /// A chat template in the place of the one in the model's file: the text of a Jinja template, as tokenizer.chat_template
    /// has it. It goes through the gate Template as the file's does.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = MAX_CHAT_TEMPLATE_CHARS))]
    #[x_kube(validation = Rule::new("self.contains('{')").message("spec.runtime.chatTemplate: give the text of a Jinja template; no template is known by a name"))]
    pub chat_template: Option<String>,
    /// Whether, where a gap within a text is filled (`suffix`, `/infill`), the model reads what follows the gap before what
    /// precedes it, as some were taught. What precedes it comes first if left out.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spm_infill: Option<bool>,
    /// Vectors and scores of texts (/v1/embeddings, /v1/rerank, /v1/score), beside text where the model generates any. An encoder
    /// needs it: it gives nothing else.
    // Not serialised when absent, as workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<EmbeddingsSpec>,
    /// Speculative decoding: tokens are guessed and checked by the model. Which way of guessing pays is measured as it goes,
    /// and one that does not is not used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speculative: Option<SpeculativeSpec>,
}

fn default_context_size() -> u32 {
    8192
}

fn default_parallel() -> u32 {
    8
}

impl Default for RuntimeSpec {
    fn default() -> Self {
        Self {
            context_size: default_context_size(),
            parallel: default_parallel(),
            cache_type: CacheType::default(),
            kv_layout: None,
            gpu_layers: AutoOr::Auto,
            gpu_split: None,
            gpu_memory: None,
            threads: AutoOr::Auto,
            workers: None,
            step_ms_target: None,
            prefix_cache: None,
            chat_template: None,
            spm_infill: None,
            embeddings: None,
            speculative: None,
        }
    }
}

/// How a model is spread over the GPUs of a pod.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSplitSpec {
    /// What is split.
    #[serde(default)]
    pub mode: SplitMode,
    /// How much each GPU gets, in proportion: [3, 1]. By their free memory if left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.all(part, part <= 1000000)").message("spec.runtime.gpuSplit.tensorSplit: use whole numbers from 0 to 1000000"))]
    pub tensor_split: Vec<u32>,
    /// The GPU that has the whole model with mode None, counted from 0.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 15").message("spec.runtime.gpuSplit.mainGpu: use a number from 0 to 15"))]
    pub main_gpu: u32,
}

/// What is split among the GPUs of a pod.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum SplitMode {
    /// Nothing: one GPU has the whole model.
    None,
    /// Layers, each with its part of the KV cache.
    #[default]
    Layer,
    /// The rows of matrices.
    Row,
}

/// Type of the KV cache's entries.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum CacheType {
    /// 16-bit floating point.
    #[default]
    #[serde(rename = "f16")]
    F16,
    /// 8-bit blocks: half the memory.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 4-bit blocks: a quarter of the memory.
    #[serde(rename = "q4_0")]
    Q4_0,
}

/// How texts are embedded or scored.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EmbeddingsSpec {
    /// How the vectors of a text's tokens become one; as the model's file says if left out. Rank is for rerankers, which score
    /// texts and give no vectors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooling: Option<PoolingKind>,
    /// Tokens of texts that are computed together, and so the longest text; 2048 if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 16 && self <= 16384").message("spec.runtime.embeddings.batchTokens: use a number of tokens from 16 to 16384"))]
    pub batch_tokens: Option<u32>,
    /// The beginnings of the model's vectors are vectors, too, as it was taught: requests may ask for fewer `dimensions`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matryoshka: Option<bool>,
}

/// How the vectors of a text's tokens become one.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PoolingKind {
    /// Their mean.
    Mean,
    /// That of the first.
    Cls,
    /// That of the last.
    Last,
    /// A reranker's score.
    Rank,
}

/// How the sequences share the cells of the KV cache.
#[derive(JsonSchema, Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvLayout {
    /// Each has its own.
    Split,
    /// All have one pool, of which one may use as much as is free: what many prompts begin with is held once. Requests
    /// whose cells are needed by others give way, and go on later.
    Unified,
}

/// Where prompts are kept that left the KV cache, and for how long.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrefixCacheSpec {
    /// Most main memory of each pod, of all workers together: 4Gi. 1Gi if left out, and never more than an eighth of the
    /// pod's memory. As much again may be taken by sequences that gave their slot away and wait to go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<PositiveQuantity>,
    /// Most disk of each pod, for those that left main memory, so that they outlive the pod's processes: 20Gi. It is a part
    /// of spec.cache.sizeLimit. None are kept there if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<PositiveQuantity>,
    /// One that no request began with for so long is dropped, from the KV cache, too: 1h. Never for its age if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl: Option<DurationString>,
}

/// Speculative decoding: tokens are guessed cheaply and checked by the model, so the output does not change.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpeculativeSpec {
    /// A smaller model with the same tokenizer that guesses. Each pod fetches it before the model, and each worker has its
    /// weights and a KV cache for it in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<SourceSpec>,
    /// Guess from n-grams of the prompt and the answer.
    #[serde(default)]
    pub prompt_lookup: bool,
    /// Most tokens guessed at a time.
    #[serde(default = "default_max_tokens_drafted")]
    #[x_kube(validation = Rule::new("self >= 1 && self <= 64").message("spec.runtime.speculative.maxTokens: use a number from 1 to 64"))]
    pub max_tokens: u32,
}

fn default_max_tokens_drafted() -> u32 {
    8
}
