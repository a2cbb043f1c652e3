//! Values by what they mean and not by how they are spelled: `1024Mi` is `1Gi`, and `90m` is `1h30m`.
//!
//! Versions are named, and verdicts latched, by this form, so that another spelling is no edit, nor a default that is written
//! out. Usual spellings are their own canonical form; what is no value at all stays as it is. The structs are taken apart in
//! full, so that a new field cannot be forgotten here.

use crate::{
    inference_service::{
        CacheSpec, DriftGate, GatesSpec, MemoryGate, PerformanceGate, PromptsGate, ResourcesSpec, SchedulingSpec,
        ShadowGate,
    },
    quantity,
    runtime::{EmbeddingsSpec, GpuSplitSpec, PrefixCacheSpec, RuntimeSpec},
    scalars::{AutoOr, DurationString, Percent, PositiveQuantity, Ratio},
};

/// Milliseconds of the units of durations, the largest first.
const DURATION_UNITS: [(&str, u128); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

impl PositiveQuantity {
    /// The same quantity in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        Self(quantity::canonical(&self.0))
    }
}

impl DurationString {
    /// The same duration in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let whole = |duration: &std::time::Duration| duration.subsec_nanos().is_multiple_of(1_000_000);
        let Some(duration) = self.to_std().ok().filter(whole) else { return self.clone() };
        let mut left = duration.as_millis();
        let mut text = String::new();
        for (unit, millis) in DURATION_UNITS {
            if left >= millis {
                text.push_str(&format!("{}{unit}", left / millis));
                left %= millis;
            }
        }
        Self(text)
    }
}

impl Percent {
    /// The same share in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let number = || self.0.strip_suffix('%')?.parse::<f64>().ok();
        self.ratio().ok().and_then(|_| number()).map_or_else(|| self.clone(), |number| Self(format!("{number}%")))
    }
}

impl Ratio {
    /// The same number in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        self.value().map_or_else(|_| self.clone(), |value| Self(value.to_string()))
    }
}

impl RuntimeSpec {
    /// The same settings in their canonical spelling: parts that ask for nothing are left out.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let Self {
            context_size,
            parallel,
            cache_type,
            kv_layout,
            gpu_layers,
            gpu_split,
            gpu_memory,
            threads,
            workers,
            step_ms_target,
            prefix_cache,
            chat_template,
            spm_infill,
            embeddings,
            speculative,
        } = self.clone();
        let prefixes = |PrefixCacheSpec { memory, disk, ttl }: PrefixCacheSpec| PrefixCacheSpec {
            memory: memory.map(|memory| memory.canonical()),
            disk: disk.map(|disk| disk.canonical()),
            ttl: ttl.map(|ttl| ttl.canonical()),
        };
        Self {
            context_size,
            parallel,
            cache_type,
            kv_layout,
            gpu_layers,
            gpu_split: gpu_split.filter(|split| *split != GpuSplitSpec::default()),
            gpu_memory: gpu_memory.map(|memory| memory.canonical()),
            threads: if threads == AutoOr::Value(0) { AutoOr::Auto } else { threads },
            workers,
            step_ms_target,
            prefix_cache: prefix_cache.map(prefixes).filter(|cache| *cache != PrefixCacheSpec::default()),
            chat_template,
            spm_infill: spm_infill.filter(|is_asked| *is_asked),
            embeddings: embeddings.map(|embeddings| EmbeddingsSpec {
                matryoshka: embeddings.matryoshka.filter(|is_so| *is_so),
                ..embeddings
            }),
            speculative: speculative.filter(|way| way.draft.is_some() || way.prompt_lookup),
        }
    }
}

impl GatesSpec {
    /// The same gates in their canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let Self { memory: MemoryGate { headroom }, prompts, drift, performance, shadow } = self.clone();
        let golden = |PromptsGate { config_map_ref, min_pass }: PromptsGate| PromptsGate {
            config_map_ref,
            min_pass: min_pass.canonical(),
        };
        let compared = |DriftGate { reference, min_agreement, max_kl, max_perplexity_ratio }: DriftGate| DriftGate {
            reference,
            min_agreement: min_agreement.map(|share| share.canonical()),
            max_kl: max_kl.map(|divergence| divergence.canonical()),
            max_perplexity_ratio: max_perplexity_ratio.map(|ratio| ratio.canonical()),
        };
        let timed = |PerformanceGate { min_decode_ratio }: PerformanceGate| PerformanceGate {
            min_decode_ratio: min_decode_ratio.map(|ratio| ratio.canonical()),
        };
        let copied = |ShadowGate { sample_percent, duration }: ShadowGate| ShadowGate {
            sample_percent,
            duration: duration.canonical(),
        };
        Self {
            memory: MemoryGate { headroom: headroom.canonical() },
            prompts: prompts.map(golden),
            drift: drift.map(compared),
            performance: performance.map(timed),
            shadow: shadow.map(copied),
        }
    }
}

impl ResourcesSpec {
    /// The same resources in their canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let Self { gpu, cpu, memory } = self.clone();
        Self { gpu, cpu: cpu.map(|cpu| cpu.canonical()), memory: memory.map(|memory| memory.canonical()) }
    }
}

impl CacheSpec {
    /// The same cache in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let Self { mode, size_limit } = self.clone();
        Self { mode, size_limit: size_limit.map(|limit| limit.canonical()) }
    }
}

impl SchedulingSpec {
    /// The same scheduling in its canonical spelling.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let Self { max_queue, high_watermark, low_watermark, queue_timeout, dispatch } = self.clone();
        let queue_timeout = queue_timeout.map(|timeout| timeout.canonical());
        Self { max_queue, high_watermark, low_watermark, queue_timeout, dispatch }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn usual_spellings_are_their_own_and_unusual_ones_become_them() {
        for (text, wanted) in [
            ("1Gi", "1Gi"),
            ("24Gi", "24Gi"),
            ("1024Mi", "1Gi"),
            ("1073741824", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("500m", "500m"),
            ("0.5", "500m"),
            ("2.3", "2300m"),
            ("4", "4"),
            ("4000m", "4"),
            ("100M", "100M"),
            ("1e3", "1k"),
            ("much", "much"),
        ] {
            assert_eq!(PositiveQuantity::from(text).canonical().0, wanted, "{text}");
        }
        for (text, wanted) in
            [("30s", "30s"), ("15m", "15m"), ("1h30m", "1h30m"), ("90m", "1h30m"), ("0.5s", "500ms"), ("soon", "soon")]
        {
            assert_eq!(DurationString::from(text).canonical().0, wanted, "{text}");
        }
        for (text, wanted) in [("5%", "5%"), ("99.50%", "99.5%"), ("100.0%", "100%"), ("200%", "200%")] {
            assert_eq!(Percent::from(text).canonical().0, wanted, "{text}");
        }
        for (text, wanted) in [("1.1", "1.1"), ("1.10", "1.1"), ("2.0", "2"), ("less", "less")] {
            assert_eq!(Ratio::from(text).canonical().0, wanted, "{text}");
        }
    }

    #[test]
    fn what_asks_for_nothing_is_not_there() {
        let runtime: RuntimeSpec = serde_json::from_value(serde_json::json!({
            "gpuSplit": {}, "prefixCache": {}, "threads": 0, "spmInfill": false,
            "speculative": {"promptLookup": false},
        }))
        .unwrap();
        assert_eq!(runtime.canonical(), RuntimeSpec::default());
        let asks: RuntimeSpec = serde_json::from_value(serde_json::json!({
            "gpuSplit": {"mode": "Row"}, "prefixCache": {"ttl": "60m"}, "threads": 1, "speculative": {"promptLookup": true},
        }))
        .unwrap();
        let asked = asks.canonical();
        assert!(asked.gpu_split.is_some() && asked.speculative.is_some() && asked.threads == AutoOr::Value(1));
        assert_eq!(asked.prefix_cache.unwrap().ttl.unwrap().0, "1h");
    }

    #[test]
    fn a_canonical_quantity_is_the_same_and_final() {
        for number in [1_u64, 2, 3, 10, 500, 999, 1000, 1024, 1536, 4096, 123_456, 1_048_576, 999_999] {
            for unit in ["", "n", "u", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"] {
                let text = format!("{number}{unit}");
                let canonical = quantity::canonical(&text);
                assert!(quantity::same(&text, &canonical), "{text} {canonical}");
                assert_eq!(quantity::canonical(&canonical), canonical, "{text}");
            }
        }
    }
}
