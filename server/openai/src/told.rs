//! What the answers to chats and to texts tell beside their text, in the shape of both: usage, timings, log-probabilities and
//! why they ended.

use gantry_core::{FinishReason as Reason, ITL_BUCKETS_MS, PromptToken, TokenLogprob};

use crate::logprobs::{ChatLogprobs, PromptLogprob, PromptLogprobs, TextLogprobs, TextOffset, TokenChance};
use crate::request::Common;
use crate::response::{FinishReason, TimeHistogram, Timings, Usage};

/// What of it the client asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) include_usage: bool,
    /// How many of the likeliest tokens are told; `None`: no log-probabilities.
    pub(crate) logprobs: Option<u32>,
    /// The same of the prompt, where that is told apart from the answer.
    pub(crate) prompt_logprobs: Option<u32>,
    /// Whether the prompt is told before the answer, as one text.
    pub(crate) echo: bool,
    pub(crate) timings: bool,
    /// Whether it is told what the model thought.
    pub(crate) reasoning: bool,
}

impl Told {
    pub(crate) fn of(common: &Common) -> Self {
        let (include_usage, timings) = (common.streaming.include_usage, common.timings);
        Self {
            include_usage,
            logprobs: common.logprobs,
            prompt_logprobs: common.prompt_logprobs,
            echo: common.params.echo,
            timings,
            reasoning: common.reasoning,
        }
    }

    /// Where an answer's time went, for those who want to know.
    pub(crate) fn timings(self, timings: &gantry_core::Timings, usage: &gantry_core::Usage) -> Option<Timings> {
        self.timings.then(|| timings_of(timings, usage))
    }

    /// The usage in chunks before the last.
    pub(crate) fn no_usage_yet(self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }
}

fn chance(token: &gantry_core::TokenChance) -> TokenChance<'_> {
    TokenChance { bytes: &token.bytes, logprob: token.logprob }
}

pub(crate) fn chat_logprobs(tokens: &[TokenLogprob]) -> ChatLogprobs {
    let mut told = ChatLogprobs::default();
    for token in tokens {
        told.push(chance(&token.token), token.top.iter().map(chance));
    }
    told
}

/// What is told of a text: of a part of its prompt, and of the answer after it.
pub(crate) fn text_logprobs(
    prompt: &[PromptToken],
    tokens: &[TokenLogprob],
    top: u32,
    offset: &mut TextOffset,
) -> TextLogprobs {
    let mut told = TextLogprobs::new(top);
    let most = usize::try_from(top).unwrap_or(usize::MAX);
    for PromptToken { token, chance: own } in prompt {
        match own {
            Some(own) => {
                let token = TokenChance { bytes: &token.bytes, logprob: own.logprob };
                told.push(token, own.top.iter().take(most).map(chance), offset);
            }
            None => told.push_first(&token.bytes, offset),
        }
    }
    for token in tokens {
        told.push(chance(&token.token), token.top.iter().map(chance), offset);
    }
    told
}

/// What vLLM tells of a prompt; `None` of its first token.
pub(crate) fn prompt_logprobs(tokens: &[PromptToken], top: u32) -> Vec<Option<PromptLogprobs>> {
    let most = usize::try_from(top).unwrap_or(usize::MAX);
    let told = |PromptToken { token, chance: own }: &PromptToken| {
        let own = own.as_ref()?;
        let likeliest = (1..).zip(own.top.iter().take(most));
        let mut told: PromptLogprobs =
            likeliest.map(|(rank, top)| (top.id, PromptLogprob::of(chance(top), rank))).collect();
        let chance = TokenChance { bytes: &token.bytes, logprob: own.logprob };
        told.insert(token.id, PromptLogprob::of(chance, own.rank));
        Some(told)
    };
    tokens.iter().map(told).collect()
}

pub(crate) fn usage_of(usage: gantry_core::Usage) -> Usage {
    Usage::new(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
}

/// The same of a chat, in which something may be thought.
pub(crate) fn chat_usage_of(usage: gantry_core::Usage) -> Usage {
    usage_of(usage).with_reasoning(usage.reasoning_tokens)
}

pub(crate) fn timings_of(timings: &gantry_core::Timings, usage: &gantry_core::Usage) -> Timings {
    // To the microsecond: what is finer is noise, and long to write.
    let round = |number: f64| (number * 1e3).round() / 1e3;
    let rates = |ms: f64, tokens: u32| {
        let tokens = f64::from(tokens);
        if ms > 0.0 && tokens > 0.0 { (round(ms / tokens), round(tokens / ms * 1e3)) } else { (0.0, 0.0) }
    };
    let prompt_n = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
    let (prompt_per_token_ms, prompt_per_second) = rates(timings.prefill_ms, prompt_n);
    // The first token's time is the prompt's.
    let (predicted_per_token_ms, predicted_per_second) =
        rates(timings.decode_ms, usage.completion_tokens.saturating_sub(1));
    Timings {
        tokenize_ms: round(timings.tokenize_ms),
        queue_ms: round(timings.queue_ms),
        cache_n: usage.cached_tokens,
        prompt_n,
        prompt_ms: round(timings.prefill_ms),
        prompt_per_token_ms,
        prompt_per_second,
        predicted_n: usage.completion_tokens,
        predicted_ms: round(timings.decode_ms),
        predicted_per_token_ms,
        predicted_per_second,
        inter_token_ms: TimeHistogram { bounds_ms: ITL_BUCKETS_MS.to_vec(), counts: timings.itl.counts.to_vec() },
    }
}

/// What of an answer's calls decides what it is said to have ended with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Called {
    /// There are any.
    pub(crate) any: bool,
    /// What the client has an answer stop at came within one.
    pub(crate) is_cut: bool,
}

/// A cancelled generation has nobody left to be told so; what it has is complete as far as it goes.
pub(crate) fn reason_of(reason: Reason, called: Called) -> FinishReason {
    match reason {
        // Half a call is none that a client could carry out.
        Reason::Stop if called.any && !called.is_cut => FinishReason::ToolCalls,
        Reason::Stop | Reason::Cancelled => FinishReason::Stop,
        Reason::Length => FinishReason::Length,
    }
}
