//! What comes of a request, piece by piece.
//!
//! One for text that was accepted emits `Started` at most once (again only where its worker died and nothing of it had been
//! sent: what came before is void), then any number of `Echo` where it asks about its prompt, then any number of `Text`,
//! `Reasoning` and `ToolCall`, then exactly one of `Finished` and `Failed`; one for a prompt alone emits `Prompt` instead of the
//! others before its end. Thoughts, text and calls come in the order in which the model wrote them. Calls of tools come one after
//! the other: each is begun once, has its arguments in any number of pieces, and is ended before anything else comes, unless it
//! stays half a call, where the answer ends within it or goes on as no call does.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::RequestError;
use crate::message::ToolCall;

/// One step of a generation as its caller sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum GenerationEvent {
    /// The request holds a slot and its prompt is being read.
    Started {
        /// Tokens of the prompt, those that the template added included.
        prompt_tokens: u32,
        /// Files beside a text with a gap for which there was no room.
        files_left_out: u32,
    },
    /// More of the prompt, where [`GenerationParams::echo`](crate::GenerationParams::echo) or
    /// [`GenerationParams::prompt_logprobs`](crate::GenerationParams::prompt_logprobs) ask for it.
    Echo {
        /// Its text: whole characters; empty where only log-probabilities are asked for.
        text: String,
        /// For each of its tokens, where log-probabilities are asked for.
        tokens: Vec<PromptToken>,
    },
    /// More text: whole characters, never part of a stop string.
    Text {
        /// The text; empty only where tokens without any have probabilities.
        text: String,
        /// Tokens generated since the last event.
        tokens: u32,
        /// For each of those tokens, where [`GenerationParams::logprobs`](crate::GenerationParams::logprobs) asks for it.
        logprobs: Vec<TokenLogprob>,
    },
    /// More of what the model thinks before it says anything: whole characters.
    Reasoning {
        /// The text, never empty.
        text: String,
        /// Tokens generated since the last event.
        tokens: u32,
    },
    /// More of a call of a tool.
    ToolCall {
        /// Which call of this answer, from 0.
        index: u32,
        /// What is new of it.
        delta: ToolCallDelta,
        /// Tokens generated since the last event.
        tokens: u32,
    },
    /// What the prompt is, where no more was asked for; the end follows.
    Prompt(ShownPrompt),
    /// The end of a request that went well.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// What of the caller's own ended it, if something did.
        stop: Option<StopCause>,
        /// What it used.
        usage: Usage,
        /// How long it took.
        timings: Timings,
    },
    /// The end of a request that could not be served.
    Failed(RequestError),
}

impl GenerationEvent {
    /// Whether this is the last event of its request.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Failed(_))
    }

    /// The tokens of more of an answer; `None` where it is something else.
    #[must_use]
    pub fn output_tokens(&self) -> Option<u32> {
        match self {
            Self::Text { tokens, .. } | Self::Reasoning { tokens, .. } | Self::ToolCall { tokens, .. } => Some(*tokens),
            Self::Started { .. } | Self::Echo { .. } | Self::Prompt(_) | Self::Finished { .. } | Self::Failed(_) => {
                None
            }
        }
    }
}

/// What events have come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerOutput {
    /// The prompt's text, where that is told.
    pub prompt: String,
    /// The prompt's tokens, where their log-probabilities are told; answers to one prompt share them.
    pub prompt_tokens: Arc<Vec<PromptToken>>,
    /// Files beside a text with a gap for which there was no room.
    pub files_left_out: u32,
    /// The text.
    pub text: String,
    /// What the model thought before.
    pub reasoning: String,
    /// The tools that it calls, in their order; where the answer was cut off, the last one's arguments may be no JSON.
    pub tool_calls: Vec<ToolCall>,
    /// Whether the last of them has begun, and has not ended.
    pub call_is_open: bool,
    /// In which order `reasoning`, `text` and `tool_calls` came ([`Self::parts`]).
    pub order: Vec<Stretch>,
    /// Of each token of the text, where they were asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// A stretch of an answer, without a break by one of another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// So many bytes of what the model thought.
    Reasoning(usize),
    /// So many bytes of the text.
    Text(usize),
    /// A call of a tool.
    Call,
}

/// A part of an answer, without a break by one of another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputPart<'a> {
    /// What the model thought.
    Reasoning(&'a str),
    /// What it said.
    Text(&'a str),
    /// A tool that it called.
    Call(&'a ToolCall),
}

impl AnswerOutput {
    /// What the model thought, said and called, in the order in which it did.
    pub fn parts(&self) -> impl Iterator<Item = OutputPart<'_>> {
        let (mut reasoning, mut text, mut calls) =
            (self.reasoning.as_str(), self.text.as_str(), self.tool_calls.iter());
        self.order.iter().filter_map(move |stretch| match *stretch {
            Stretch::Reasoning(bytes) => take(&mut reasoning, bytes).map(OutputPart::Reasoning),
            Stretch::Text(bytes) => take(&mut text, bytes).map(OutputPart::Text),
            Stretch::Call => calls.next().map(OutputPart::Call),
        })
    }

    /// Lets the last stretch go on with this one, if it is of its kind.
    fn extend_order(&mut self, more: Stretch) {
        match (self.order.last_mut(), more) {
            (_, Stretch::Reasoning(0) | Stretch::Text(0)) => {}
            (Some(Stretch::Reasoning(bytes)), Stretch::Reasoning(more))
            | (Some(Stretch::Text(bytes)), Stretch::Text(more)) => *bytes += more,
            _ => self.order.push(more),
        }
    }

    /// Adds what an event says of the output.
    pub fn push(&mut self, event: GenerationEvent) {
        match event {
            GenerationEvent::Text { text, logprobs, .. } => {
                self.extend_order(Stretch::Text(text.len()));
                self.text.push_str(&text);
                self.logprobs.extend(logprobs);
            }
            GenerationEvent::Echo { text, tokens } => {
                self.prompt.push_str(&text);
                Arc::make_mut(&mut self.prompt_tokens).extend(tokens);
            }
            GenerationEvent::Reasoning { text, .. } => {
                self.extend_order(Stretch::Reasoning(text.len()));
                self.reasoning.push_str(&text);
            }
            GenerationEvent::ToolCall { index, delta, .. } => match delta {
                ToolCallDelta::Begun { id, name } => {
                    self.extend_order(Stretch::Call);
                    self.tool_calls.push(ToolCall { id, name, arguments: String::new() });
                    self.call_is_open = true;
                }
                ToolCallDelta::Arguments(more) => {
                    if let Some(call) = self.tool_calls.get_mut(index as usize) {
                        call.arguments.push_str(&more);
                    }
                }
                ToolCallDelta::Ended => self.call_is_open = false,
            },
            GenerationEvent::Started { files_left_out, .. } => self.files_left_out = files_left_out,
            GenerationEvent::Prompt(_) | GenerationEvent::Finished { .. } | GenerationEvent::Failed(_) => {}
        }
    }
}

/// Takes so many bytes from the beginning of a text.
fn take<'a>(text: &mut &'a str, bytes: usize) -> Option<&'a str> {
    let (taken, rest) = text.split_at_checked(bytes)?;
    *text = rest;
    Some(taken)
}

/// What is new of a call of a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolCallDelta {
    /// It begins.
    Begun {
        /// What the answer to it is to repeat; no other call has it.
        id: String,
        /// The tool.
        name: String,
    },
    /// More of its arguments: a piece of JSON, whole characters, never empty.
    Arguments(String),
    /// Its arguments are whole.
    Ended,
}

/// What a prompt is to the model, as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShownPrompt {
    /// Its text.
    Text(String),
    /// Its tokens.
    Tokens(Vec<i32>),
    /// Its tokens with their bytes, which need not be whole characters.
    Pieces(Vec<TokenPiece>),
    /// How many tokens it has.
    Count(usize),
}

/// A token and what it stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenPiece {
    /// Its id.
    pub id: i32,
    /// Its bytes; of a special token its name.
    pub bytes: Vec<u8>,
}

/// A token of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptToken {
    /// Which, and what it stands for.
    pub token: TokenPiece,
    /// How likely it was after those before it; `None` of the first, before which there is none.
    pub chance: Option<PromptChance>,
}

/// How likely a token of a prompt was in its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptChance {
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens, the likeliest having 1.
    pub rank: u32,
    /// The likeliest tokens in its place, the likeliest first.
    pub top: Vec<TokenChance>,
}

/// A token's log-probability under the model's own distribution, before penalties and truncations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenChance,
    /// The likeliest tokens in its place, the likeliest first.
    pub top: Vec<TokenChance>,
}

/// A token and how likely it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenChance {
    /// Its id.
    pub id: i32,
    /// Its bytes, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model ended its answer, or a stop string appeared.
    Stop,
    /// `max_tokens` were generated, the sequence's context is full, or a line ended it.
    Length,
    /// The caller cancelled it.
    Cancelled,
}

/// What a caller asked for that ended an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopCause {
    /// One of its stop strings.
    Text(String),
    /// One of its stop tokens.
    Token(i32),
    /// A line, by its indentation or its time ([`GenerationParams::min_indent`](crate::GenerationParams::min_indent),
    /// [`GenerationParams::decode_timeout_ms`](crate::GenerationParams::decode_timeout_ms)).
    Line,
}

impl StopCause {
    /// The stop string, where it is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Token(_) | Self::Line => None,
        }
    }
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens sampled, the one that ended the generation included.
    pub completion_tokens: u32,
    /// Prompt tokens that needed no computation.
    pub cached_tokens: u32,
    /// Of those sampled, those of what the model thought, where that is told apart.
    pub reasoning_tokens: u32,
}

/// Where one request's time went, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// From submission to the prompt's tokens: waiting for the pool, templating, tokenising.
    pub tokenize_ms: f64,
    /// From the prompt's tokens to a slot; a server adds what came before its worker had the request.
    pub queue_ms: f64,
    /// From the slot to the first token.
    pub prefill_ms: f64,
    /// From the first token to the last.
    pub decode_ms: f64,
    /// The times between one token and the next.
    pub itl: ItlHistogram,
}

/// The upper bounds of [`ItlHistogram`]'s buckets, in milliseconds; the last bucket has none.
pub const ITL_BUCKETS_MS: [f64; 11] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0];

/// Inter-token latencies (ITL), counted by the bounds of [`ITL_BUCKETS_MS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItlHistogram {
    /// How many fell into each bucket, not cumulated.
    pub counts: [u32; ITL_BUCKETS_MS.len() + 1],
}

impl ItlHistogram {
    /// Counts one.
    pub fn record(&mut self, ms: f64) {
        let bucket = ITL_BUCKETS_MS.partition_point(|&bound| bound < ms);
        self.counts[bucket] = self.counts[bucket].saturating_add(1);
    }
}

/// One step of a pooled request: any number of `Vector`, in any order, then exactly one of the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PooledEvent {
    /// A text is done.
    Vector {
        /// Which, in the order of the request.
        index: u32,
        /// Its vector, of unit length; for a ranking its score alone.
        vector: Vec<f32>,
    },
    /// All are.
    Finished {
        /// Tokens of all texts.
        prompt_tokens: u32,
    },
    /// The caller cancelled it.
    Cancelled,
    /// It could not be served.
    Failed(RequestError),
}

impl PooledEvent {
    /// Whether this is the last event of its request.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        !matches!(self, Self::Vector { .. })
    }
}

/// What a whole pooled request gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PooledOutput {
    /// One for each text, in their order; for a ranking of one number each.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all texts.
    pub prompt_tokens: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_to_what_was_said_thought_and_called() {
        let call = |index, delta| GenerationEvent::ToolCall { index, delta, tokens: 1 };
        let begun = |id: &str| ToolCallDelta::Begun { id: id.to_owned(), name: "f".to_owned() };
        let arguments = |text: &str| ToolCallDelta::Arguments(text.to_owned());
        let text = |text: &str| GenerationEvent::Text { text: text.to_owned(), tokens: 1, logprobs: Vec::new() };
        let mut output = AnswerOutput::default();
        for event in [
            GenerationEvent::Started { prompt_tokens: 3, files_left_out: 0 },
            GenerationEvent::Reasoning { text: "h".to_owned(), tokens: 1 },
            GenerationEvent::Reasoning { text: "m".to_owned(), tokens: 1 },
            text("a"),
            text("b"),
            call(0, begun("1")),
            call(0, arguments("{")),
            call(0, arguments("}")),
            call(0, ToolCallDelta::Ended),
            text(""),
            text("c"),
            GenerationEvent::Reasoning { text: "so".to_owned(), tokens: 1 },
            call(1, begun("2")),
            call(1, arguments("{\"cut")),
        ] {
            output.push(event);
        }
        let call = |id: &str, arguments: &str| ToolCall {
            id: id.to_owned(),
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
        };
        let (one, two) = (call("1", "{}"), call("2", "{\"cut"));
        let wanted = AnswerOutput {
            text: "abc".to_owned(),
            reasoning: "hmso".to_owned(),
            tool_calls: vec![one.clone(), two.clone()],
            call_is_open: true,
            order: vec![
                Stretch::Reasoning(2),
                Stretch::Text(2),
                Stretch::Call,
                Stretch::Text(1),
                Stretch::Reasoning(2),
                Stretch::Call,
            ],
            ..AnswerOutput::default()
        };
        assert_eq!(output, wanted);
        let parts: Vec<OutputPart<'_>> = output.parts().collect();
        let wanted = [
            OutputPart::Reasoning("hm"),
            OutputPart::Text("ab"),
            OutputPart::Call(&one),
            OutputPart::Text("c"),
            OutputPart::Reasoning("so"),
            OutputPart::Call(&two),
        ];
        assert_eq!(parts, wanted);
    }
}
