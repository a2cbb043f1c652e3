//! One model file with all that serves it: an [`Engine`] that generates, an [`Embedder`] that embeds or scores, or both
//! over the same weights, each with a context and a thread of its own.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::llama;
use crate::cores::ThreadLimit;
use crate::embedder::Embedder;
use crate::engine::{Engine, validate};
use crate::error::{LoadError, ProbeError};
use crate::event::{EngineStats, ModelInfo};
use crate::monitor::{MemoryWatch, Monitor, Pressure};
use crate::params::EngineConfig;

/// See the module.
pub struct ModelHost {
    info: ModelInfo,
    /// `None` where the model is an encoder.
    pub engine: Option<Engine>,
    /// `None` where [`EngineConfig::pooled`] does not ask for it.
    pub embedder: Option<Embedder>,
    pressure: Arc<Pressure>,
    /// Over memory, where no engine does.
    _watch: Option<MemoryWatch>,
}

impl ModelHost {
    /// Loads a model for what the configuration asks of it, and computes a few tokens with each. Blocks meanwhile;
    /// `progress` hears fractions from 0 to 1 of the file and aborts by answering false. What is computed on a CPU keeps to
    /// `limit`, as it is then.
    ///
    /// # Errors
    /// See [`LoadError`]; nothing is left behind.
    pub fn load(
        config: &EngineConfig,
        limit: &Arc<ThreadLimit>,
        mut progress: impl FnMut(f32) -> bool + Send + 'static,
    ) -> Result<Self, LoadError> {
        validate(config).map_err(LoadError::Config)?;
        let opened = llama::open(config, limit, &mut progress)?;
        let pressure = Arc::<Pressure>::default();
        // First, so that its memory counts as loaded to the engine, which watches what is taken after that, and is told
        // what full batches will take.
        let pooler = config.pooled.as_ref().map(|pooled| llama::pooler(config, pooled, &opened)).transpose()?;
        let (pooled_info, embedder) = match pooler {
            Some(loaded) => (Some(loaded.info.clone()), Some(Embedder::over(loaded, config, pressure.clone())?)),
            None => (None, None),
        };
        let beside_bytes = embedder.as_ref().map_or(0, Embedder::untouched_bytes);
        let engine = match llama::generator(config, &opened) {
            Ok(loaded) => Some(Engine::over(loaded, config, pressure.clone(), beside_bytes)?),
            Err(LoadError::GeneratesNothing) if embedder.is_some() => None,
            Err(error) => return Err(error),
        };
        let watch = match &engine {
            Some(_) => None,
            None => {
                let mut monitor = Monitor::new(config.memory_limit_bytes);
                monitor.loaded(beside_bytes);
                let watch = MemoryWatch::start(monitor, pressure.clone());
                Some(watch.map_err(|e| LoadError::Thread(e.to_string()))?)
            }
        };
        let info = engine.as_ref().map(|engine| engine.model_info().clone()).or(pooled_info).unwrap_or_default();
        let pooled = embedder.as_ref().map(Embedder::info);
        Ok(Self { info: ModelInfo { pooled, ..info }, engine, embedder, pressure, _watch: watch })
    }

    /// Shows that a token can be computed now: see [`Engine::probe`], and where there is no engine [`Embedder::probe`].
    /// Where there are both, the embedder only must not be known to be broken.
    ///
    /// # Errors
    /// Why none can.
    pub fn probe(&self, timeout: Duration) -> Result<Duration, ProbeError> {
        match (&self.engine, &self.embedder) {
            (Some(engine), embedder) => {
                embedder.as_ref().map_or(Ok(()), Embedder::unbroken)?;
                engine.probe(timeout)
            }
            (None, Some(embedder)) => embedder.probe(timeout),
            (None, None) => Err(ProbeError::ShuttingDown),
        }
    }

    /// Why it must be replaced, if that is so.
    #[must_use]
    pub fn broken(&self) -> Option<String> {
        let engine = self.engine.as_ref().and_then(Engine::broken).map(String::from);
        engine.or_else(|| match self.embedder.as_ref()?.unbroken() {
            Err(ProbeError::Broken(reason)) => Some(reason),
            _ => None,
        })
    }

    /// The engine's counters; without one, only what they tell of memory.
    #[must_use]
    pub fn stats(&self) -> EngineStats {
        self.engine.as_ref().map_or_else(|| self.pressure.stats(), Engine::stats)
    }

    /// What is known of the model.
    #[must_use]
    pub fn model_info(&self) -> &ModelInfo {
        &self.info
    }
}
