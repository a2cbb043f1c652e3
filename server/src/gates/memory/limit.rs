//! Whether the workers can keep to the memory that they were allowed, told before anything is loaded: a limit that the model
//! alone passes would be none.
//!
//! Absent: the memory of the pod, which the gate above holds a model against.

use std::fmt::{self, Display};

use gantry_gguf::Summary;
use gantry_gguf::fit::MemoryEstimate;

use super::in_all_workers;
use crate::processors::Processors;
use crate::version::RuntimeSettings;

/// A limit of the workers' memory is too low for their model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitTooLow {
    /// What the workers take.
    pub required_bytes: u64,
    /// What they take whatever their context is: the weights.
    pub weights_bytes: u64,
    /// What they may.
    pub limit_bytes: u64,
}

impl Display for LimitTooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let (need, weights, limit) = (mib(self.required_bytes), mib(self.weights_bytes), mib(self.limit_bytes));
        let way = if weights < limit { "lower --ctx-size or --parallel" } else { "serve a smaller model" };
        write!(
            f,
            "--memory-limit {limit} is too low: so the model takes about {need} MiB, of which {weights} are its weights; allow \
             {need}, or {way}"
        )
    }
}

impl std::error::Error for LimitTooLow {}

/// Holds what the workers will take against the limit that was set for them.
///
/// # Errors
/// They take more.
pub fn check_limit(
    runtime: &RuntimeSettings,
    model: &Summary,
    draft: Option<&Summary>,
    gpu: bool,
) -> Result<(), LimitTooLow> {
    let Some(limit_bytes) = runtime.engine.memory_limit_bytes else { return Ok(()) };
    let of =
        |part: &dyn Fn(&MemoryEstimate) -> u64| in_all_workers(model, draft, runtime, gpu, Processors::here(), part);
    let required_bytes = of(&|estimate| estimate.host_bytes);
    if required_bytes <= limit_bytes {
        return Ok(());
    }
    Err(LimitTooLow { required_bytes, weights_bytes: of(&|estimate| estimate.weights_bytes), limit_bytes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn told(limit_mib: u64, ctx_size: u32) -> Option<String> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-v2.q8_0.gguf");
        let model = gantry_gguf::read_header(path).unwrap();
        let mut runtime = RuntimeSettings { ctx_size, workers: Some(1), ..RuntimeSettings::default() };
        runtime.engine.memory_limit_bytes = Some(limit_mib << 20);
        check_limit(&runtime, model.summary(), None, false).err().map(|error| error.to_string())
    }

    #[test]
    fn a_limit_that_the_model_passes_is_told_with_what_it_takes_and_what_helps() {
        assert_eq!(told(1 << 20, 16_384), None);
        let low = told(1, 2048).unwrap();
        assert!(low.starts_with("--memory-limit 1 is too low") && low.ends_with("or serve a smaller model"), "{low}");
        let context = told(64, 1 << 20).unwrap();
        assert!(context.ends_with("or lower --ctx-size or --parallel"), "{context}");
        let need = context.split("allow ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        assert_eq!((told(need, 1 << 20), told(need - 1, 1 << 20).is_some()), (None, true));
    }
}
