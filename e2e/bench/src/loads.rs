//! The loads, with their sizes and their aims. `quick` makes each of them small enough to try the harness with.

use serde::{Deserialize, Serialize};

use crate::{
    drive::Drive,
    prompts::{Form, Prompts},
};

/// A model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// Qwen2.5-0.5B's shape in Q4_0.
    Shape,
    /// The same in Q8_0.
    ShapeQ8,
    /// The same in Q4_0, repeating itself.
    Repeating,
    /// The trained demo model in Q8_0.
    Demo,
    /// SmolLM2-135M-Instruct in Q4_1, a real model.
    SmolLm2,
    /// Gemma 3 270M in Q4_K_M, a real model whose vocabulary has 262,144 tokens and whose layers look at a window.
    Gemma3,
}

impl Model {
    /// Its file's name.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Shape => "qwen-shape.q4_0.gguf",
            Self::ShapeQ8 => "qwen-shape.q8_0.gguf",
            Self::Repeating => "qwen-shape-repeating.q4_0.gguf",
            Self::Demo => "demo-v2.q8_0.gguf",
            Self::SmolLm2 => "SmolLM2-135M-Instruct.Q4_1.gguf",
            Self::Gemma3 => "gemma-3-270m-q4_k_m.gguf",
        }
    }
}

/// Which way a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// What a figure is compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Against {
    /// The peer as it comes.
    PeerDefault,
    /// The peer's better configuration.
    PeerBest,
    /// llama-batched-bench: the same kernels with no server around them.
    BatchedBench,
    /// Nothing: the figure itself is bounded.
    Itself,
}

/// What is to be reached.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Aim<Name = &'static str> {
    /// The figure.
    pub figure: Name,
    /// What it is divided by.
    pub against: Against,
    /// Whether the quotient is to be at least or at most `bound`.
    pub better: Better,
    /// See `better`.
    pub bound: f64,
}

/// A load.
#[derive(Debug, Clone)]
pub struct Load {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is, in a few words.
    pub title: &'static str,
    /// The model that is loaded.
    pub model: Model,
    /// KV cells in total, for both servers.
    pub ctx_size: u32,
    /// Sequences at once: ours, and those of the peer's configurations that set them.
    pub parallel: u32,
    /// How requests are sent.
    pub drive: Drive,
    /// The figure by which the peer's best configuration is chosen.
    pub chosen_by: (&'static str, Better),
    /// What is to be reached.
    pub aims: Vec<Aim>,
    /// Runs of each configuration.
    pub repeats: usize,
    /// Whether the peer's server runs; a decode rate is compared with llama-batched-bench alone.
    pub with_peer: bool,
    /// Whether memory is looked at all the time, and not only at the end.
    pub watches_memory: bool,
}

/// Sequences of a configuration that has more than its cells have room for if nothing is shared.
pub const MANY_SLOTS: u32 = 24;
/// Runs of each configuration in a quick run.
const QUICK_REPEATS: usize = 1;

/// Flags of ours for one load, beside those that every load has.
#[must_use]
pub fn own_flags(load: &str) -> &'static [&'static str] {
    match load {
        "lookup" => &["--prompt-lookup", "31"],
        // Many wait for minutes there: larger parts of prompts serve more of them, for tokens that come less evenly.
        "prefixes" => &["--kv-layout", "unified", "--step-ms-target", "700"],
        _ => &[],
    }
}

/// Cells and sequences of ours for a load, where it does better with others of the same memory than the load has.
#[must_use]
pub fn own_size(load: &Load) -> (u32, u32) {
    match load.name {
        // A quarter of a pool's cells come on top, for the prompt that is read beside it.
        "prefixes" => (load.ctx_size / 5 * 4, MANY_SLOTS),
        _ => (load.ctx_size, load.parallel),
    }
}

/// All loads.
#[must_use]
pub fn all(quick: bool) -> Vec<Load> {
    let mut loads = vec![
        ready(
            "ready",
            "from the start of the process to its first text, then 1 prompt of 64 words",
            Model::Shape,
            quick,
        ),
        ready("ready-smollm2", "the same with SmolLM2-135M-Instruct", Model::SmolLm2, quick),
        chats_smollm2(quick),
        texts_gemma3(quick),
        single(quick),
        single_q8(quick),
        lookup(quick),
        shared_prefix(quick),
        streams(quick),
        intruder(quick),
        front(quick),
        form("front-chat", "chats of 64 streams, as the next ones ask them too", Form::Chat, quick),
        form("front-tools", "chats with four tools", Form::Tools, quick),
        form("front-schema", "chats answered with an object of a schema", Form::Schema, quick),
        form("front-completions", "texts (/v1/completions)", Form::Completion, quick),
        form("front-responses", "chats as responses (/v1/responses)", Form::Responses, quick),
        form("front-messages", "chats as messages (/v1/messages)", Form::Messages, quick),
        decode("decode-1", "decode rate at batch 1", 1, quick),
        decode_odd(quick),
        decode("decode-8", "decode rate at batch 8", 8, quick),
        decode_q8(quick),
        decode("decode-32", "decode rate at batch 32", 32, quick),
        prefixes(quick),
        leaving(quick),
        memory(quick),
    ];
    if quick {
        for load in &mut loads {
            load.repeats = QUICK_REPEATS;
        }
    }
    loads
}

fn at_least(figure: &'static str, against: Against, bound: f64) -> Aim {
    Aim { figure, against, better: Better::Higher, bound }
}

fn at_most(figure: &'static str, against: Against, bound: f64) -> Aim {
    Aim { figure, against, better: Better::Lower, bound }
}

/// `full`, or in a quick run `small`.
fn size<T>(quick: bool, full: T, small: T) -> T {
    if quick { small } else { full }
}

/// How long it takes from the start of a process to the first text of an answer, and what the first prompt of some length takes,
/// when costs have hardly been measured.
fn ready(name: &'static str, title: &'static str, model: Model, quick: bool) -> Load {
    Load {
        name,
        title,
        model,
        ctx_size: 8192,
        parallel: 8,
        drive: Drive::Closed {
            streams: 1,
            requests: 1,
            prompts: Prompts::Words { shared: 0, own: size(quick, 64, 8) },
            max_tokens: 16,
        },
        chosen_by: ("ready_ms", Better::Lower),
        aims: vec![at_most("ready_ms", Against::PeerBest, 1.2), at_most("ttft_p50_ms", Against::PeerBest, 1.2)],
        repeats: 5,
        with_peer: true,
        watches_memory: false,
    }
}

/// Chats with a real model, through its own template and vocabulary.
fn chats_smollm2(quick: bool) -> Load {
    Load {
        name: "chats-smollm2",
        title: "8 streams of short chats with SmolLM2-135M-Instruct",
        model: Model::SmolLm2,
        ctx_size: 8192,
        parallel: 8,
        drive: Drive::Closed {
            streams: 8,
            requests: size(quick, 64, 8),
            prompts: Prompts::Chat,
            max_tokens: size(quick, 64, 16),
        },
        chosen_by: ("tokens_per_s", Better::Higher),
        aims: vec![at_least("tokens_per_s", Against::PeerBest, 1.0), at_most("ttft_p50_ms", Against::PeerBest, 1.0)],
        repeats: 3,
        with_peer: true,
        watches_memory: false,
    }
}

/// Texts that a real model without chats goes on with.
fn texts_gemma3(quick: bool) -> Load {
    Load {
        name: "texts-gemma3",
        title: "8 streams, 64 words in, 64 out, with Gemma 3 270M",
        model: Model::Gemma3,
        drive: Drive::Closed {
            streams: 8,
            requests: size(quick, 64, 8),
            prompts: Prompts::Words { shared: 0, own: size(quick, 64, 8) },
            max_tokens: size(quick, 64, 16),
        },
        ..chats_smollm2(quick)
    }
}

fn single(quick: bool) -> Load {
    Load {
        name: "single",
        title: "1 stream, 64 words in, 128 out",
        model: Model::Shape,
        ctx_size: 4096,
        parallel: 1,
        drive: Drive::Closed {
            streams: 1,
            requests: size(quick, 8, 2),
            prompts: Prompts::Words { shared: 0, own: size(quick, 64, 8) },
            max_tokens: size(quick, 128, 16),
        },
        chosen_by: ("tokens_per_s", Better::Higher),
        aims: vec![at_least("tokens_per_s", Against::PeerBest, 1.0), at_most("ttft_p50_ms", Against::PeerBest, 1.0)],
        repeats: 3,
        with_peer: true,
        watches_memory: false,
    }
}

fn single_q8(quick: bool) -> Load {
    Load {
        name: "single-q8_0",
        title: "1 stream, 64 words in, 128 out, weights in Q8_0",
        model: Model::ShapeQ8,
        ..single(quick)
    }
}

fn lookup(quick: bool) -> Load {
    Load {
        name: "lookup",
        title: "1 stream, repetitive text, prompt lookup",
        model: Model::Repeating,
        drive: Drive::Closed {
            streams: 1,
            requests: size(quick, 8, 2),
            // The demo model, which a quick run has, repeats nothing.
            prompts: size(quick, Prompts::Phrase { times: 3 }, Prompts::Words { shared: 0, own: 8 }),
            max_tokens: size(quick, 128, 16),
        },
        aims: vec![
            at_least("tokens_per_s", Against::PeerDefault, 1.5),
            at_least("tokens_per_s", Against::PeerBest, 1.5),
        ],
        ..single(quick)
    }
}

fn shared_prefix(quick: bool) -> Load {
    Load {
        name: "shared-prefix",
        title: "8 streams, 256 words shared + 32 own, 48 out",
        model: Model::Shape,
        ctx_size: 4096,
        parallel: 8,
        drive: Drive::Closed {
            streams: 8,
            requests: size(quick, 16, 8),
            prompts: Prompts::Words { shared: size(quick, 256, 32), own: size(quick, 32, 4) },
            max_tokens: size(quick, 48, 8),
        },
        chosen_by: ("wall_s", Better::Lower),
        aims: vec![
            at_most("wall_s", Against::PeerDefault, 0.65),
            at_most("wall_s", Against::PeerBest, 0.85),
            at_most("ttft_p50_ms", Against::PeerBest, 0.4),
        ],
        repeats: 3,
        with_peer: true,
        watches_memory: false,
    }
}

fn streams(quick: bool) -> Load {
    Load {
        name: "streams-32",
        title: "32 streams, 64 own words, 64 out",
        model: Model::Shape,
        ctx_size: 8192,
        parallel: 32,
        drive: Drive::Closed {
            streams: 32,
            requests: 32,
            prompts: Prompts::Words { shared: 0, own: size(quick, 64, 8) },
            max_tokens: size(quick, 64, 8),
        },
        chosen_by: ("tokens_per_s", Better::Higher),
        aims: vec![
            at_least("tokens_per_s", Against::PeerDefault, 1.5),
            at_least("tokens_per_s", Against::PeerBest, 1.1),
            at_most("itl_p99_ms", Against::PeerBest, 0.7),
        ],
        repeats: 3,
        with_peer: true,
        watches_memory: false,
    }
}

fn intruder(quick: bool) -> Load {
    Load {
        name: "intruder",
        title: "4 victims streaming, one intruder with a 3,000-word prompt",
        model: Model::Shape,
        ctx_size: 20_480,
        parallel: 5,
        drive: Drive::Intruder {
            victims: 4,
            victim_words: size(quick, 64, 8),
            victim_tokens: size(quick, 400, 64),
            idle_events: size(quick, 64, 16),
            intruder_words: size(quick, 3000, 300),
            intruder_tokens: 8,
        },
        // What the peer's flags are to be good at here is leaving the victims alone.
        chosen_by: ("victims_itl_p99_ms", Better::Lower),
        aims: vec![
            at_most("victims_slowdown", Against::Itself, 3.0),
            at_most("victims_gap_max_s", Against::Itself, 0.5),
            at_most("intruder_ttft_ms", Against::PeerDefault, 1.25),
            at_most("intruder_ttft_ms", Against::PeerBest, 1.25),
            at_most("readyz_max_ms", Against::Itself, 50.0),
        ],
        repeats: 3,
        with_peer: true,
        watches_memory: false,
    }
}

fn front(quick: bool) -> Load {
    Load {
        name: "front",
        title: "demo-v2 q8_0, 64 streams, 512 chats (front-end cost)",
        model: Model::Demo,
        ctx_size: 16_384,
        parallel: 64,
        drive: Drive::Closed {
            streams: size(quick, 64, 8),
            requests: size(quick, 512, 16),
            prompts: Prompts::Chat,
            max_tokens: size(quick, 32, 8),
        },
        chosen_by: ("requests_per_s", Better::Higher),
        aims: vec![
            at_least("requests_per_s", Against::PeerBest, 1.1),
            at_most("cpu_ms_per_token", Against::PeerBest, 1.0 / 1.1),
        ],
        repeats: 5,
        with_peer: true,
        watches_memory: false,
    }
}

/// What the front takes for a token in each protocol, and with what a chat may have besides: the same questions, answered as far as
/// the model answers them.
fn form(name: &'static str, title: &'static str, form: Form, quick: bool) -> Load {
    Load {
        name,
        title,
        // Tools are long for so small a model.
        ctx_size: 65_536,
        drive: Drive::Closed {
            streams: size(quick, 64, 4),
            requests: size(quick, 512, 8),
            prompts: Prompts::Form(form),
            max_tokens: size(quick, 32, 8),
        },
        aims: vec![at_most("failed", Against::Itself, 0.0)],
        with_peer: false,
        ..front(quick)
    }
}

/// Words of a prompt and tokens of an answer where the decode rate is measured, here and in llama-batched-bench: prompts so
/// short that they have all been read long before the first answer ends.
pub const DECODE_SIZE: (usize, u32) = (16, 128);

fn decode(name: &'static str, title: &'static str, batch: u32, quick: bool) -> Load {
    let (words, tokens) = size(quick, DECODE_SIZE, (8, 16));
    Load {
        name,
        title,
        model: Model::Shape,
        ctx_size: 256 * batch.max(2),
        parallel: batch,
        drive: Drive::Closed {
            streams: batch as usize,
            requests: batch as usize,
            prompts: Prompts::Words { shared: 0, own: words },
            max_tokens: tokens,
        },
        chosen_by: ("decode_tokens_per_s", Better::Higher),
        aims: vec![at_least("decode_tokens_per_s", Against::BatchedBench, 0.92)],
        repeats: 3,
        with_peer: false,
        watches_memory: false,
    }
}

/// As many streams as leave three rows over of a group of four, with a slot to spare.
fn decode_odd(quick: bool) -> Load {
    Load { ctx_size: 256 * 8, parallel: 8, ..decode("decode-7", "decode rate of 7 streams with 8 slots", 7, quick) }
}

fn decode_q8(quick: bool) -> Load {
    Load { model: Model::ShapeQ8, ..decode("decode-8-q8_0", "decode rate at batch 8, weights in Q8_0", 8, quick) }
}

fn prefixes(quick: bool) -> Load {
    Load {
        name: "prefixes",
        title: "200 clients that share 20 prefixes of 1,000 tokens, KV for 6 of them",
        model: Model::Shape,
        ctx_size: 7680,
        parallel: 6,
        drive: Drive::Closed {
            streams: size(quick, 200, 20),
            requests: size(quick, 200, 20),
            prompts: Prompts::Prefixes { count: size(quick, 20, 4), words: size(quick, 1000, 60), own: 16 },
            max_tokens: size(quick, 32, 8),
        },
        chosen_by: ("requests_per_s", Better::Higher),
        aims: vec![
            at_least("requests_per_s", Against::PeerBest, 1.5),
            at_most("ttft_p50_ms", Against::PeerBest, 0.5),
            at_most("failed", Against::Itself, 0.0),
        ],
        repeats: 2,
        with_peer: true,
        watches_memory: false,
    }
}

fn leaving(quick: bool) -> Load {
    Load {
        name: "leaving",
        title: "half of 64 clients disconnect in mid-stream",
        model: Model::Shape,
        ctx_size: 16_384,
        parallel: 64,
        drive: Drive::Leaving {
            clients: 64,
            words: size(quick, 32, 4),
            max_tokens: size(quick, 64, 24),
            leave_after: size(quick, 16, 4),
            newcomer_words: 2,
            newcomer_tokens: 8,
        },
        chosen_by: ("newcomer_ttft_p50_ms", Better::Lower),
        aims: vec![
            at_most("stayers_lost", Against::Itself, 0.0),
            at_most("failed", Against::Itself, 0.0),
            // The step in flight when the client leaves, and the one that reads the newcomer; and half of one, for the
            // newcomers' own words make that one longer.
            at_most("newcomer_ttft_steps", Against::Itself, 2.5),
        ],
        repeats: 2,
        with_peer: true,
        watches_memory: false,
    }
}

fn memory(quick: bool) -> Load {
    Load {
        name: "memory",
        title: "RAM of the serving processes at 8 x 2,048 tokens",
        model: Model::Shape,
        ctx_size: 16_384,
        parallel: 8,
        drive: Drive::Closed {
            streams: 8,
            requests: 8,
            prompts: Prompts::Words { shared: 0, own: size(quick, 2000, 40) },
            max_tokens: size(quick, 32, 8),
        },
        chosen_by: ("pss_mib", Better::Lower),
        aims: vec![at_most("pss_mib", Against::PeerBest, 1.05)],
        repeats: 1,
        with_peer: true,
        watches_memory: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_load_has_an_aim() {
        for quick in [false, true] {
            let loads = all(quick);
            let names: std::collections::BTreeSet<_> = loads.iter().map(|load| load.name).collect();
            assert_eq!(names.len(), loads.len());
            assert!(loads.iter().all(|load| !load.aims.is_empty() && load.repeats > 0));
            // Only a load that runs the peer can be compared with it.
            assert!(loads.iter().all(|load| {
                load.with_peer
                    || load.aims.iter().all(|aim| matches!(aim.against, Against::BatchedBench | Against::Itself))
            }));
        }
    }

    #[test]
    fn what_is_asked_fits_a_sequence() {
        for load in all(false) {
            let (words, tokens) = match load.drive {
                Drive::Closed { prompts: Prompts::Words { shared, own }, max_tokens, .. } => (shared + own, max_tokens),
                Drive::Closed { prompts: Prompts::Prefixes { words, own, .. }, max_tokens, .. } => {
                    (words + own, max_tokens)
                }
                Drive::Closed { max_tokens, .. } => (0, max_tokens),
                Drive::Intruder { intruder_words, intruder_tokens, .. } => (intruder_words, intruder_tokens),
                Drive::Leaving { words, max_tokens, .. } => (words, max_tokens),
            };
            assert!(words as u64 + u64::from(tokens) <= u64::from(load.ctx_size / load.parallel), "{}", load.name);
        }
    }
}
