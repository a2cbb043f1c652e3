//! Continuous-batching inference over one GGUF model, usable as a library.

mod error;
mod event;
mod params;

pub use error::{EngineError, LoadError, ParamError, ProbeError, RequestError, SubmitError};
pub use event::{EngineStats, EventSink, FinishReason, GenerationEvent, ModelInfo, Timings, Usage};
pub use params::{
    CacheType, DEFAULT_MAX_QUEUE, DEFAULT_PARALLEL, DEFAULT_PREFILL_TOKENS_PER_STEP, EngineConfig, GenerationParams,
    MAX_PARALLEL, MAX_PROMPT_BYTES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TEMPERATURE, Prompt,
};
