//! Whether the workers can keep to the memory that they were allowed, told before anything is loaded: a limit that the model
//! alone passes would be none.
//!
//! Absent: the memory of the pod, which the gate above holds a model against.

use std::fmt::{self, Display};

use gantry_engine::KvLayout;
use gantry_gguf::Summary;

use super::in_all_workers;
use crate::gates::limits::MIN_POOL_TOKENS;
use crate::processors::Processors;
use crate::version::RuntimeSettings;

/// A limit of the workers' memory is too low for their model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitTooLow {
    /// What the workers take.
    pub required_bytes: u64,
    /// What one would take that generates for one request of [`MIN_POOL_TOKENS`].
    pub least_bytes: u64,
    /// What they may.
    pub limit_bytes: u64,
    /// Whether several workers were asked for, which one request does not need.
    pub several_workers: bool,
}

impl Display for LimitTooLow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let (need, least, limit) = (mib(self.required_bytes), mib(self.least_bytes), mib(self.limit_bytes));
        write!(f, "--memory-limit {limit} is too low: the model takes about {need} MiB with these settings, and ")?;
        if self.least_bytes <= self.limit_bytes {
            let workers = if self.several_workers { " --workers 1" } else { "" };
            write!(
                f,
                "{least} MiB for one request at a time of {MIN_POOL_TOKENS} tokens; allow {need}, or give it less to do: \
                 -c {MIN_POOL_TOKENS} -np 1{workers}"
            )
        } else {
            write!(
                f,
                "{least} MiB even for one request at a time of {MIN_POOL_TOKENS} tokens; allow {least} with \
                 -c {MIN_POOL_TOKENS} -np 1, or serve a smaller model"
            )
        }
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
    let takes = |runtime: &RuntimeSettings| {
        in_all_workers(model, draft, runtime, gpu, Processors::here(), |estimate| estimate.host_bytes)
    };
    let required_bytes = takes(runtime);
    if required_bytes <= limit_bytes {
        return Ok(());
    }
    let mut least = RuntimeSettings { ctx_size: MIN_POOL_TOKENS, parallel: 1, workers: Some(1), ..runtime.clone() };
    least.engine.kv_layout = KvLayout::Auto;
    let several_workers = runtime.workers.is_some_and(|workers| workers > 1);
    Err(LimitTooLow { required_bytes, least_bytes: takes(&least).min(required_bytes), limit_bytes, several_workers })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn told(limit_mib: u64, ctx_size: u32) -> Option<String> {
        told_of(limit_mib, ctx_size, RuntimeSettings::default().parallel)
    }

    fn told_of(limit_mib: u64, ctx_size: u32, parallel: u32) -> Option<String> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-v2.q8_0.gguf");
        let model = gantry_gguf::read_header(path).unwrap();
        let mut runtime = RuntimeSettings { ctx_size, parallel, workers: Some(1), ..RuntimeSettings::default() };
        runtime.engine.memory_limit_bytes = Some(limit_mib << 20);
        check_limit(&runtime, model.summary(), None, false).err().map(|error| error.to_string())
    }

    #[test]
    fn a_limit_that_the_model_passes_is_told_with_what_it_takes_and_what_helps() {
        assert_eq!(told(1 << 20, 16_384), None);
        let low = told(1, 2048).unwrap();
        assert!(low.starts_with("--memory-limit 1 is too low") && low.ends_with("or serve a smaller model"), "{low}");
        let context = told(64, 1 << 20).unwrap();
        assert!(context.ends_with("or give it less to do: -c 512 -np 1"), "{context}");
        assert_eq!(told_of(64, 512, 1), None, "what it says works");
        let need = context.split("allow ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        assert_eq!((told(need, 1 << 20), told(need - 1, 1 << 20).is_some()), (None, true));
    }
}
