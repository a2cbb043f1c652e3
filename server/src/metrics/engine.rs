//! What each worker's engine counts, as its heartbeat tells it.
//!
//! Counters begin anew with a worker's process, which Prometheus takes for what it is. Absent: sums over workers, which a
//! query makes.

use std::fmt;

use gantry_engine::DegradationLevel;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use crate::version::WorkerStats;

/// A value of one label, and how to read its figure.
type Figure = (&'static str, fn(&WorkerStats) -> f64);

/// Figures under one name.
struct Family {
    name: &'static str,
    help: &'static str,
    /// Tells the figures apart; empty where there is one.
    label: &'static str,
    figures: &'static [Figure],
}

const COUNTERS: &[Family] = &[
    Family {
        name: "engine_prompt_tokens",
        help: "Prompt tokens by where their state came from: computed, or held by a tier of the prefix cache",
        label: "source",
        figures: &[
            ("computed", |w| w.engine.prompt_tokens_total as f64),
            ("device", |w| w.engine.cached_device_tokens_total as f64),
            ("ram", |w| w.engine.cached_ram_tokens_total as f64),
            ("disk", |w| w.engine.cached_disk_tokens_total as f64),
        ],
    },
    Family {
        name: "engine_prefix_cache_lookups",
        help: "Slots given to requests, by which tier of the prefix cache had a part of their tokens; parts of two count twice",
        label: "result",
        figures: &[
            ("device", |w| w.engine.cache_device_hits_total as f64),
            ("ram", |w| w.engine.cache_ram_hits_total as f64),
            ("disk", |w| w.engine.cache_disk_hits_total as f64),
            ("miss", |w| w.engine.cache_misses_total as f64),
        ],
    },
    Family {
        name: "engine_generated_tokens",
        help: "Tokens generated",
        label: "",
        figures: &[("", |w| w.engine.generated_tokens_total as f64)],
    },
    Family {
        name: "engine_lookup_tokens",
        help: "Tokens guessed from repetitions, by what the check said",
        label: "verdict",
        figures: &[
            ("accepted", |w| w.engine.accepted_lookup_tokens_total as f64),
            ("rejected", |w| w.engine.lookup_tokens_total.saturating_sub(w.engine.accepted_lookup_tokens_total) as f64),
        ],
    },
    Family {
        name: "engine_draft_tokens",
        help: "Tokens guessed by the draft model, by what the check said",
        label: "verdict",
        figures: &[
            ("accepted", |w| w.engine.accepted_draft_tokens_total as f64),
            ("rejected", |w| w.engine.draft_tokens_total.saturating_sub(w.engine.accepted_draft_tokens_total) as f64),
        ],
    },
    Family {
        name: "engine_draft_seconds",
        help: "Time in the draft model",
        label: "",
        figures: &[("", |w| w.engine.draft_ms_total / 1e3)],
    },
    Family {
        name: "engine_bursts",
        help: "Times that prompts which came at once were read together, to begin together",
        label: "",
        figures: &[("", |w| w.engine.bursts_total as f64)],
    },
    Family {
        name: "engine_moves",
        help: "Times that a sequence was moved beside the others, to be computed with them",
        label: "",
        figures: &[("", |w| w.engine.moves_total as f64)],
    },
    Family {
        name: "engine_filler_rows",
        help: "Rows of nobody's, computed to make those of streams whole groups, which takes less",
        label: "",
        figures: &[("", |w| w.engine.filler_rows_total as f64)],
    },
    Family {
        name: "engine_staged_prompts",
        help: "Long prompts that were read beside the pool of cells and then put into it, which takes less",
        label: "",
        figures: &[("", |w| w.engine.staged_prompts_total as f64)],
    },
    Family {
        name: "engine_preemptions",
        help: "Sequences that gave their slot away, to go on later",
        label: "",
        figures: &[("", |w| w.engine.preemptions_total as f64)],
    },
    Family {
        name: "engine_pauses",
        help: "Times that a request was paused, since its client does not take what is there, and gave its slot to others",
        label: "",
        figures: &[("", |w| w.engine.pauses_total as f64)],
    },
    Family {
        name: "engine_evictions",
        help: "Prefixes that left the KV cache to make room",
        label: "",
        figures: &[("", |w| w.engine.evictions_total as f64)],
    },
    Family {
        name: "engine_copied_bytes",
        help: "State that steps copied: saved, brought back, or from one sequence to another",
        label: "",
        figures: &[("", |w| w.engine.copied_bytes_total as f64)],
    },
    Family {
        name: "engine_uncopied_tokens",
        help: "Tokens whose state was dropped or read again since a step had copied as much as one may",
        label: "",
        figures: &[("", |w| w.engine.uncopied_tokens_total as f64)],
    },
    Family {
        name: "engine_deferred_copies",
        help: "Times that those who waited came in with a later step since one had copied much already",
        label: "",
        figures: &[("", |w| w.engine.deferred_copies_total as f64)],
    },
    Family { name: "engine_steps", help: "Batches computed", label: "", figures: &[("", |w| w.engine.steps as f64)] },
    Family {
        name: "engine_step_seconds",
        help: "Time in steps: before llama.cpp is called, in it, and after it (sampling, handing tokens on)",
        label: "part",
        figures: &[
            ("before", |w| w.engine.before_decode_ms_total / 1e3),
            ("decode", |w| w.engine.decode_ms_total / 1e3),
            ("after", |w| w.engine.after_decode_ms_total / 1e3),
        ],
    },
    Family {
        name: "engine_batch_tokens",
        help: "Tokens in the batches of all steps, guesses included, those of nobody's not",
        label: "",
        figures: &[("", |w| w.engine.batch_tokens_total as f64)],
    },
    Family {
        name: "engine_padding_tokens",
        help: "What padding each sequence's tokens to the most of any in their step would add; none is computed",
        label: "",
        figures: &[("", |w| w.engine.padding_tokens_total as f64)],
    },
    Family {
        name: "engine_gather_seconds",
        help: "Time that an idle engine waited for more requests before it read the first",
        label: "",
        figures: &[("", |w| w.engine.gather_ms_total / 1e3)],
    },
    Family {
        name: "engine_batch_rows",
        help: "Rows of logits in the batches of all steps, those of nobody's not",
        label: "",
        figures: &[("", |w| w.engine.batch_rows_total as f64)],
    },
    Family {
        name: "engine_requests",
        help: "Requests that ended in the engine",
        label: "end",
        figures: &[
            ("finished", |w| w.engine.requests_finished_total.saturating_sub(w.engine.requests_cancelled_total) as f64),
            ("cancelled", |w| w.engine.requests_cancelled_total as f64),
            ("failed", |w| w.engine.requests_failed_total as f64),
        ],
    },
];

/// What each worker's embedder counts; zeros where there is none.
const POOLED_COUNTERS: &[Family] = &[
    Family {
        name: "pooled_batches",
        help: "Batches of texts that were embedded or scored",
        label: "",
        figures: &[("", |w| w.pooled.batches_total as f64)],
    },
    Family {
        name: "pooled_texts",
        help: "Texts in them",
        label: "",
        figures: &[("", |w| w.pooled.texts_total as f64)],
    },
    Family {
        name: "pooled_tokens",
        help: "Tokens of those texts, and what padding each to the longest of its batch would add; none is computed",
        label: "kind",
        figures: &[("text", |w| w.pooled.tokens_total as f64), ("padding", |w| w.pooled.padding_tokens_total as f64)],
    },
    Family {
        name: "pooled_compute_seconds",
        help: "Time that texts were computed",
        label: "",
        figures: &[("", |w| w.pooled.compute_ms_total / 1e3)],
    },
    Family {
        name: "pooled_requests",
        help: "Requests for vectors or scores that ended in the worker",
        label: "end",
        figures: &[
            ("finished", |w| w.pooled.requests_finished_total as f64),
            ("cancelled", |w| w.pooled.requests_cancelled_total as f64),
            ("failed", |w| w.pooled.requests_failed_total as f64),
        ],
    },
];

const GAUGES: &[Family] = &[
    Family {
        name: "engine_requests_waiting",
        help: "Requests that wait for a slot, by priority",
        label: "priority",
        figures: &[
            ("low", |w| f64::from(w.engine.waiting_low)),
            ("normal", |w| f64::from(w.engine.waiting_normal)),
            ("high", |w| f64::from(w.engine.waiting_high)),
        ],
    },
    Family {
        name: "engine_requests_paused",
        help: "Requests that are paused: in flight without a slot, until they are told to go on",
        label: "",
        figures: &[("", |w| f64::from(w.engine.paused))],
    },
    Family {
        name: "engine_prefix_cache_bytes",
        help: "What prefixes take that left the KV cache",
        label: "tier",
        figures: &[
            ("ram", |w| w.engine.prefix_cache_bytes as f64),
            ("disk", |w| w.engine.prefix_cache_disk_bytes as f64),
        ],
    },
    Family {
        name: "engine_preempted_bytes",
        help: "States of sequences that gave their slot away or are paused, in main memory",
        label: "",
        figures: &[("", |w| w.engine.preempted_bytes as f64)],
    },
    Family {
        name: "engine_measures",
        help: "1 while what steps cost is yet to be measured, for which an idle engine computes, 0 afterwards",
        label: "",
        figures: &[("", |w| f64::from(u8::from(w.engine.measures)))],
    },
    Family {
        name: "engine_reuses_prefixes",
        help: "1 where prompts are kept for others, 0 where the model's state cannot be cut or that is turned off",
        label: "",
        figures: &[("", |w| f64::from(u8::from(w.engine.reuses_prefixes)))],
    },
    Family {
        name: "engine_kv_unified",
        help: "1 where the KV cells are one pool, 0 where each sequence has its own",
        label: "",
        figures: &[("", |w| f64::from(u8::from(w.engine.kv_unified)))],
    },
    Family {
        name: "engine_flash_attention",
        help: "1 where attention is computed in one pass, 0 where as matrix products",
        label: "",
        figures: &[("", |w| f64::from(u8::from(w.engine.flash_attention)))],
    },
    Family {
        name: "engine_memory_used_bytes",
        help: "Memory that counts against the limit; 0 where it is not watched",
        label: "",
        figures: &[("", |w| w.engine.memory_used_bytes as f64)],
    },
    Family {
        name: "engine_memory_limit_bytes",
        help: "Memory that the worker may use",
        label: "",
        figures: &[("", |w| w.engine.memory_limit_bytes as f64)],
    },
    Family {
        name: "engine_degradation_level",
        help: "0 while all is served, up to 4 (nothing new is) as memory runs short",
        label: "",
        figures: &[("", |w| rank(w.engine.degradation))],
    },
];

/// A worker of a resident version: its labels, and its figures.
pub(super) type Labelled<'a> = (Vec<(&'a str, String)>, &'a WorkerStats);

pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, workers: &[Labelled<'_>]) -> fmt::Result {
    let kinds = [(COUNTERS, MetricType::Counter), (POOLED_COUNTERS, MetricType::Counter), (GAUGES, MetricType::Gauge)];
    for (family, kind) in kinds.iter().flat_map(|(families, kind)| families.iter().map(move |family| (family, *kind))) {
        let mut encoded = encoder.encode_descriptor(family.name, family.help, None, kind)?;
        for (labels, worker) in workers {
            for (value, figure) in family.figures {
                let own = (!family.label.is_empty()).then_some((family.label, (*value).to_owned()));
                let labels: Vec<_> = labels.iter().cloned().chain(own).collect();
                super::encode_figure(kind, figure(worker), encoded.encode_family(&labels)?)?;
            }
        }
    }
    Ok(())
}

/// The place of a level on its ladder, from 0.
pub(super) fn rank(level: DegradationLevel) -> f64 {
    f64::from(DegradationLevel::ALL.iter().position(|l| *l == level).unwrap_or_default() as u8)
}
