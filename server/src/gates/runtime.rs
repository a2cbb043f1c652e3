//! What the spec of a version asks for, as a worker takes it.

use gantry_crds::inference_service::{EmbeddingsSpec, GpuSplitSpec, RuntimeSpec};
use gantry_crds::scalars::DurationString;
use gantry_engine::{ALL_LAYERS, GpuSplit, PooledConfig, Pooling, SplitMode};

use crate::version::{EngineTuning, RuntimeSettings, Scheduling};

/// The settings of a version as the front takes them, but for what is files: its draft model, and prompts on disk. `gpu`: whether
/// the pod asks for GPUs.
#[must_use]
pub fn runtime_settings(spec: &RuntimeSpec, scheduling: Scheduling, gpu: bool) -> RuntimeSettings {
    use gantry_crds::inference_service::{CacheType as Spec, KvLayout as Layout};
    use gantry_engine::{CacheType, KvLayout};
    // Less than a byte is no limit that anything fits into.
    let gpu_memory_bytes = spec.gpu_memory.as_ref().map(|memory| memory.bytes().unwrap_or(0));
    let cache = spec.prefix_cache.as_ref();
    RuntimeSettings {
        ctx_size: spec.context_size,
        parallel: spec.parallel,
        threads: spec.threads.value().filter(|&threads| threads > 0),
        cache_type: match spec.cache_type {
            Spec::F16 => CacheType::F16,
            Spec::Q8_0 => CacheType::Q8_0,
            Spec::Q4_0 => CacheType::Q4_0,
        },
        // A pod that was given GPUs is to use them: without one the model is refused, not run on the CPU.
        gpu_layers: spec.gpu_layers.value().or((gpu && gpu_memory_bytes.is_none()).then_some(ALL_LAYERS)),
        gpu_split: spec.gpu_split.as_ref().map(gpu_split).unwrap_or_default(),
        gpu_memory_bytes,
        workers: spec.workers,
        scheduling,
        engine: EngineTuning {
            kv_layout: match spec.kv_layout {
                None => KvLayout::Auto,
                Some(Layout::Split) => KvLayout::Split,
                Some(Layout::Unified) => KvLayout::Unified,
            },
            step_ms_target: spec.step_ms_target,
            chat_template: spec.chat_template.clone(),
            infill_suffix_first: spec.spm_infill.unwrap_or_default(),
            // Less than a byte is none.
            cache_ram_bytes: cache.and_then(|cache| cache.memory.as_ref()).map(|memory| memory.bytes().unwrap_or(0)),
            cache_ttl_ms: cache.and_then(|cache| cache.ttl.as_ref()).and_then(milliseconds),
            prompt_lookup: spec.speculative.as_ref().filter(|s| s.prompt_lookup).map_or(0, |s| s.max_tokens),
            ..EngineTuning::default()
        },
        pooled: spec.embeddings.as_ref().map(pooled),
        cuts_vectors: spec.embeddings.as_ref().and_then(|embeddings| embeddings.matryoshka).unwrap_or_default(),
    }
}

/// What is asked for beside text.
pub(super) fn pooled(spec: &EmbeddingsSpec) -> PooledConfig {
    use gantry_crds::inference_service::PoolingKind as Kind;
    let defaults = PooledConfig::default();
    let pooling = spec.pooling.map(|kind| match kind {
        Kind::Mean => Pooling::Mean,
        Kind::Cls => Pooling::Cls,
        Kind::Last => Pooling::Last,
        Kind::Rank => Pooling::Rank,
    });
    PooledConfig { pooling, batch_tokens: spec.batch_tokens.unwrap_or(defaults.batch_tokens), ..defaults }
}

/// A duration of the spec; the API server has checked it, and one that it would refuse today is left out.
fn milliseconds(duration: &DurationString) -> Option<u64> {
    let duration = duration.to_std().inspect_err(|error| tracing::warn!(%error, "a value of the spec is not usable"));
    duration.ok().map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1))
}

fn gpu_split(spec: &GpuSplitSpec) -> GpuSplit {
    use gantry_crds::inference_service::SplitMode as Spec;
    let mode = match spec.mode {
        Spec::None => SplitMode::None,
        Spec::Layer => SplitMode::Layer,
        Spec::Row => SplitMode::Row,
    };
    GpuSplit { devices: Vec::new(), mode, tensor_split: spec.tensor_split.clone(), main_gpu: spec.main_gpu }
}
