//! Every name that a request may have, and what becomes of it here: obeyed, refused by name, or accepted because it changes
//! nothing.
//!
//! To ignore a parameter that asks for something would be to answer another question than the one that was asked. So
//! what is not obeyed is refused by name, unless its value asks for what happens anyway: clients send defaults. The lists
//! of `OpenAI`, llama-server and vLLM, and of what clients of others send, are beside the tests, which send each name of
//! them. A name that is not here is refused as well, as `OpenAI` does: it is spelt wrong, stands in the wrong place, or
//! asks for what nobody here knows.

use std::borrow::Cow;

use gantry_core::{ApiError, ErrorCode, MAX_PROMPT_BYTES, MAX_TEMPLATE_VARIABLES, MAX_TOOLS, MAX_TOOLS_BYTES};
use serde_json::{Map as JsonMap, Value};

use crate::limits::*;
use crate::sampling::SAMPLERS;
use crate::shape::Shape;
use crate::tools::EFFORTS;

/// Where a parameter may stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Text,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/rerank`.
    Rerank,
    /// `/v1/score`.
    Score,
    /// `/infill`.
    Infill,
    /// One of the `input_extra` there.
    InfillFile,
    /// `/tokenize`.
    Tokenize,
    /// `/detokenize`.
    Detokenize,
    /// `/apply-template`.
    Template,
    /// One of the `messages` of a chat.
    Message,
    /// A part of a message's `content`.
    Part,
    /// One of the `tool_calls` of a message.
    ToolCall,
    /// The `function` of a call.
    Function,
    /// One of the `tools` of a chat.
    Tool,
    /// Its `function`.
    ToolFunction,
    /// `tool_choice`, where it is an object.
    ToolChoice,
    /// `reasoning`.
    Reasoning,
    /// `thinking`, where it is an object.
    Thinking,
    /// `response_format`.
    ResponseFormat,
    /// Its `json_schema`.
    JsonSchema,
    /// `structured_outputs`.
    StructuredOutputs,
    /// One of the `documents` of a ranking, where it is an object.
    Document,
    /// `stream_options`.
    StreamOptions,
}

/// What becomes of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// The code that reads the request follows it.
    Obeyed,
    /// Refused unless the value asks for what happens anyway, which this says; then what to do instead, or nothing.
    Refused(Neutral, &'static str),
    /// Taken whatever it says, since no answer would differ; the reason.
    NoEffect(&'static str),
    /// Taken whatever it says: in a canary one version answers all that name the same, and nothing else depends on it; what it names.
    Names(&'static str),
}

/// The value that asks for what happens anyway; `null` always does, and what is empty wherever this is not [`Neutral::Absent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neutral {
    /// None but to be absent.
    Absent,
    /// 0.
    Zero,
    /// 0 or a negative number.
    NotPositive,
    /// -1.
    MinusOne,
    /// 1.
    One,
    /// 2, the Euclidean norm.
    Two,
    /// False.
    False,
    /// True.
    True,
    /// An empty string, array or object.
    Empty,
    /// One of these words.
    Words(&'static [&'static str]),
    /// An array of nothing but `"text"`.
    OnlyText,
    /// False, `"none"`, or an object that says no more than that: nothing is to be thought.
    NoThought,
}

/// One parameter.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Where it may stand.
    pub places: &'static [Place],
    /// What becomes of it there.
    pub treatment: Treatment,
    /// What it may be, where it is obeyed.
    pub shape: Option<Shape>,
    /// Whether there is no request without it.
    pub is_required: bool,
}

impl Parameter {
    const fn takes(self, shape: Shape) -> Self {
        Self { shape: Some(shape), ..self }
    }

    const fn required(self) -> Self {
        Self { is_required: true, ..self }
    }
}

impl Place {
    /// The place in words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Chat => "chats",
            Self::Text => "texts",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rankings",
            Self::Score => "scores",
            Self::Infill => "gaps to fill",
            Self::InfillFile => "`input_extra`",
            Self::Tokenize => "texts to tokenise",
            Self::Detokenize => "tokens to turn into text",
            Self::Template => "chats to render",
            Self::Message => "messages",
            Self::Part => "parts of a message",
            Self::ToolCall => "calls of tools",
            Self::Function => "the `function` of a call",
            Self::Tool => "tools",
            Self::ToolFunction => "the `function` of a tool",
            Self::ToolChoice => "`tool_choice`",
            Self::Reasoning => "`reasoning`",
            Self::Thinking => "`thinking`",
            Self::ResponseFormat => "`response_format`",
            Self::JsonSchema => "the `json_schema` of a `response_format`",
            Self::StructuredOutputs => "`structured_outputs`",
            Self::Document => "documents",
            Self::StreamOptions => "`stream_options`",
        }
    }

    /// What its schema is called.
    #[must_use]
    pub fn schema_name(self) -> &'static str {
        match self {
            Self::Chat => "ChatRequest",
            Self::Text => "CompletionRequest",
            Self::Embeddings => "EmbeddingsRequest",
            Self::Rerank => "RerankRequest",
            Self::Score => "ScoreRequest",
            Self::Infill => "InfillRequest",
            Self::InfillFile => "InfillFileParam",
            Self::Tokenize => "TokenizeRequest",
            Self::Detokenize => "DetokenizeRequest",
            Self::Template => "ApplyTemplateRequest",
            Self::Message => "ChatMessageParam",
            Self::Part => "ChatContentPart",
            Self::ToolCall => "ChatToolCallParam",
            Self::Function => "ChatFunctionCallParam",
            Self::Tool => "ChatTool",
            Self::ToolFunction => "ChatToolFunction",
            Self::ToolChoice => "ChatToolChoice",
            Self::Reasoning => "ReasoningParam",
            Self::Thinking => "ThinkingParam",
            Self::ResponseFormat => "ResponseFormat",
            Self::JsonSchema => "ResponseFormatJsonSchema",
            Self::StructuredOutputs => "StructuredOutputs",
            Self::Document => "RerankDocumentParam",
            Self::StreamOptions => "StreamOptions",
        }
    }

    /// The address whose bodies it is, where it is a body.
    fn address(self) -> Option<&'static str> {
        match self {
            Self::Chat => Some("/v1/chat/completions"),
            Self::Text => Some("/v1/completions"),
            Self::Embeddings => Some("/v1/embeddings"),
            Self::Rerank => Some("/v1/rerank"),
            Self::Score => Some("/v1/score"),
            Self::Infill => Some("/infill"),
            Self::Tokenize => Some("/tokenize"),
            Self::Detokenize => Some("/detokenize"),
            Self::Template => Some("/apply-template"),
            _ => None,
        }
    }
}

/// Names that mean something when they are empty.
const MEANT_WHEN_EMPTY: &[&str] = &[
    "messages",
    "prompt",
    "input",
    "input_prefix",
    "input_suffix",
    "query",
    "documents",
    "text_1",
    "text_2",
    "queries",
    "dry_sequence_breakers",
    "samplers",
];

/// Whether a parameter of a request is as good as left out with such a value.
pub(crate) fn says_nothing(name: &str, value: &Value) -> bool {
    is_empty(value) && !MEANT_WHEN_EMPTY.contains(&name)
}

/// Whether a value is `null` or an empty string, array or object.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether a value of any of the parameters about thinking says that nothing is to be thought.
fn says_no_thought(value: &Value) -> bool {
    match value {
        Value::Bool(thinks) => !thinks,
        Value::String(word) => ["none", "off", "disabled"].contains(&word.as_str()),
        Value::Object(_) => more_than_no_thought(value).is_none(),
        _ => false,
    }
}

/// The first name in an object about thinking that says more than that nothing is to be thought.
fn more_than_no_thought(value: &Value) -> Option<&str> {
    let says_no_more = |name: &str, value: &Value| {
        let is_known = ["type", "enable_thinking", "thinking", "effort", "reasoning_effort"].contains(&name);
        is_empty(value) || (is_known && !value.is_object() && says_no_thought(value))
    };
    value.as_object()?.iter().find(|(name, value)| !says_no_more(name, value)).map(|(name, _)| name.as_str())
}

impl Neutral {
    fn accepts(self, value: &Value) -> bool {
        let number = value.as_f64();
        match self {
            Self::Absent => false,
            _ if is_empty(value) => true,
            Self::Zero => number == Some(0.0),
            Self::NotPositive => number.is_some_and(|n| n <= 0.0),
            Self::MinusOne => number == Some(-1.0),
            Self::One => number == Some(1.0),
            Self::Two => number == Some(2.0),
            Self::False => value.as_bool() == Some(false),
            Self::True => value.as_bool() == Some(true),
            Self::Empty => false,
            Self::NoThought => says_no_thought(value),
            Self::Words(words) => value.as_str().is_some_and(|word| words.contains(&word)),
            Self::OnlyText => {
                value.as_array().is_some_and(|items| items.iter().all(|item| item.as_str() == Some("text")))
            }
        }
    }

    /// The value in words; empty where there is none.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::Absent => String::new(),
            Self::Zero => "0".to_owned(),
            Self::NotPositive => "0 or less".to_owned(),
            Self::MinusOne => "-1".to_owned(),
            Self::One => "1".to_owned(),
            Self::Two => "2".to_owned(),
            Self::False => "false".to_owned(),
            Self::True => "true".to_owned(),
            Self::Empty => "empty".to_owned(),
            Self::Words(words) => {
                let words: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
                words.join(" or ")
            }
            Self::OnlyText => "[\"text\"]".to_owned(),
            Self::NoThought => "false or \"none\"".to_owned(),
        }
    }
}

/// Refuses the first parameter in a place that asks for what is not done, or that nobody knows there; `prefix` is put
/// before its name.
pub(crate) fn refuse(place: Place, object: &JsonMap<String, Value>, prefix: &str) -> Result<(), ApiError> {
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        match find(place, name) {
            Some(Treatment::Refused(neutral, instead)) if !neutral.accepts(value) => {
                return Err(refused(format!("{prefix}{name}"), value, neutral, instead));
            }
            None => return Err(unknown(place, name, prefix)),
            Some(_) => {}
        }
    }
    Ok(())
}

/// What becomes of a name in a place; `None` where it is not known.
#[must_use]
pub fn find(place: Place, name: &str) -> Option<Treatment> {
    let here = |parameter: &&Parameter| parameter.name == name && parameter.places.contains(&place);
    PARAMETERS.iter().find(here).map(|parameter| parameter.treatment)
}

fn refused(param: String, value: &Value, neutral: Neutral, instead: &str) -> ApiError {
    let or = match neutral.words() {
        words if words.is_empty() => String::new(),
        words => format!(", or let it be {words}"),
    };
    let within = match (neutral, more_than_no_thought(value)) {
        (NoThought, Some(name)) => format!(" because of its `{}`", shown(name)),
        _ => String::new(),
    };
    let instead = if instead.is_empty() { String::new() } else { format!(" Instead: {instead}.") };
    let message = format!("`{param}` is not supported by this server{within}; leave it out{or}.{instead}");
    ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::UnsupportedParameter, message)
}

/// A name that is not known in its place: which one was meant, or where it belongs.
fn unknown(place: Place, name: &str, prefix: &str) -> ApiError {
    let shown = shown(name);
    let param = format!("{prefix}{shown}");
    let hint = match (elsewhere(name), nearest(place, &shown)) {
        (Some(other), _) => match other.address() {
            Some(address) => format!("it belongs to {}, POST {address}; leave it out here", other.words()),
            // As the Responses API has it.
            None if (place, other) == (Tool, ToolFunction) => format!("write it within `{prefix}function`"),
            None => format!("it belongs to {}; leave it out", other.words()),
        },
        (None, Some(meant)) => format!("did you mean `{prefix}{meant}`? Otherwise leave it out"),
        (None, None) => String::from("leave it out"),
    };
    let message = format!("`{param}` is not known in {}: {hint}.", place.words());
    ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::UnknownParameter, message)
}

/// What an error repeats of a name, which is the client's and of any length.
fn shown(name: &str) -> String {
    name.chars().take(MAX_SHOWN_NAME_CHARS).collect()
}

/// The name that is obeyed in a place and most like another.
fn nearest(place: Place, name: &str) -> Option<&'static str> {
    let obeyed = |parameter: &&Parameter| parameter.treatment == Obeyed && parameter.places.contains(&place);
    gantry_core::nearest(name, PARAMETERS.iter().filter(obeyed).map(|parameter| parameter.name))
}

/// A place where a name is obeyed.
fn elsewhere(name: &str) -> Option<Place> {
    let obeyed = |parameter: &&Parameter| parameter.treatment == Obeyed && parameter.name == name;
    PARAMETERS.iter().find(obeyed).and_then(|parameter| parameter.places.first().copied())
}

/// The most characters of an unknown name that an error repeats.
const MAX_SHOWN_NAME_CHARS: usize = 64;

use Neutral::{Absent, Empty, False, MinusOne, NoThought, NotPositive, One, OnlyText, True, Two, Words, Zero};
use Place::{
    Chat, Detokenize, Document, Embeddings, Function, Infill, InfillFile, JsonSchema, Message, Part, Reasoning, Rerank,
    ResponseFormat, Score, StreamOptions, StructuredOutputs, Template, Text, Thinking, Tokenize, Tool, ToolCall,
    ToolChoice, ToolFunction,
};
use Treatment::{Names, NoEffect, Obeyed, Refused};

use Shape::{
    AboveZero, AnyOf, Biases, Boolean, Documents, Inputs, Integer, Map, Name, NamedTool, NamedTools, Number, Object,
    Objects, Only, OrderedWords, Schema, Texts, Tokens, Words as OneOf,
};

const GENERATION: &[Place] = &[Chat, Text];
/// What llama-server names for whatever it generates.
const NATIVE: &[Place] = &[Chat, Text, Infill];
const POOLING: &[Place] = &[Embeddings, Rerank];
const ANY: &[Place] = &[Chat, Text, Embeddings, Rerank];

const PROMPTS: Shape = Inputs { elements: MAX_PROMPT_CHOICES as usize, tokens: MAX_PROMPT_TOKENS };
const CHOICES: Shape = Integer(1, MAX_CHOICES as i64);
const LIKELIEST: Shape = Integer(0, MAX_TOP_LOGPROBS as i64);
/// -1 is as many as there are.
const TOKENS_OR_ALL: Shape = Integer(-1, MAX_TOKENS_LIMIT as i64);
const PRIORITY: Shape = AnyOf(&[OneOf(&["high", "normal", "low"]), Integer(i64::MIN, i64::MAX)]);
/// One side of the pairs whose scores are asked for.
const SCORED: Shape = AnyOf(&[filled(MAX_PROMPT_BYTES), Texts(1, MAX_SCORE_PAIRS, MAX_PROMPT_BYTES)]);

/// A text of at most so many bytes.
const fn text(most_bytes: usize) -> Shape {
    Shape::Text { is_empty_taken: true, most_bytes }
}

/// The same, not empty.
const fn filled(most_bytes: usize) -> Shape {
    Shape::Text { is_empty_taken: false, most_bytes }
}

const fn at(places: &'static [Place], name: &'static str, treatment: Treatment) -> Parameter {
    Parameter { name, places, treatment, shape: None, is_required: false }
}

const NO_MEDIA: &str = "sets how images and sound are read, and those are refused where they stand";
const WITH_MIROSTAT: &str = "belongs to `mirostat`, which is refused";
const WITH_BUDGET: &str = "belongs to `reasoning_budget_tokens`, which is refused in texts";
const OF_TEMPLATE: &str = "a thought begins and ends as the model's chat template has it";
const CACHE_HINT: &str = "prefixes are found again without hints, and answers do not depend on it";
const GUESSES: &str = "guessed tokens change how fast an answer comes, never which";
const NO_SHIFT: &str = "tokens are never dropped from a context: an answer ends where it is full";
const RENDER_ONLY: &str =
    "belongs to a server that only renders prompts; `/apply-template` and `/tokenize` do that here";

/// All of them.
pub const PARAMETERS: &[Parameter] = &[
    // What is generated from.
    at(ANY, "model", Obeyed).takes(text(MAX_MODEL_NAME_BYTES)),
    at(&[Tokenize, Detokenize, Template, Infill, Score], "model", Obeyed).takes(text(MAX_MODEL_NAME_BYTES)),
    at(&[Infill, Score], "priority", Obeyed).takes(PRIORITY),
    at(&[Chat, Template], "messages", Obeyed).takes(Objects(Message, 1, MAX_MESSAGES)).required(),
    // After what a `suffix` follows there may be nothing.
    at(&[Text], "prompt", Obeyed).takes(AnyOf(&[text(MAX_PROMPT_BYTES), PROMPTS])).required(),
    at(&[Tokenize], "prompt", Obeyed).takes(text(MAX_TOKENIZE_BYTES)),
    at(&[Infill], "prompt", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Infill], "input_prefix", Obeyed).takes(text(MAX_PROMPT_BYTES)).required(),
    at(&[Infill], "input_suffix", Obeyed).takes(text(MAX_PROMPT_BYTES)).required(),
    at(&[Infill], "input_extra", Obeyed).takes(Objects(InfillFile, 0, MAX_INFILL_FILES)),
    at(&[InfillFile], "text", Obeyed).takes(text(MAX_PROMPT_BYTES)).required(),
    at(&[InfillFile], "filename", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[InfillFile], "time", NoEffect("says when an editor saw it; they stand in the order in which they are sent")),
    at(&[Text, Tokenize], "parse_special", Obeyed).takes(Boolean),
    at(&[Tokenize], "add_special", Obeyed).takes(Boolean),
    at(&[Tokenize], "add_special_tokens", Obeyed).takes(Boolean),
    at(&[Tokenize], "return_token_strs", Refused(False, "ask for `with_pieces`")),
    at(&[Tokenize], "with_pieces", Obeyed).takes(Boolean),
    at(&[Detokenize], "tokens", Obeyed).takes(Tokens(MAX_DETOKENIZE_TOKENS)).required(),
    at(&[Text], "suffix", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Text], "prompt_embeds", Refused(Empty, "")),
    at(&[Text], "echo", Obeyed).takes(Boolean),
    at(&[Chat, Infill], "echo", Refused(False, "")),
    at(&[Chat], "add_special_tokens", Refused(False, "")),
    at(&[Text, Embeddings], "add_special_tokens", Refused(True, "")),
    at(ANY, "truncate_prompt_tokens", Refused(Empty, "shorten the text before it is sent")),
    at(ANY, "truncation_side", NoEffect("belongs to `truncate_prompt_tokens`, which is refused")),
    at(POOLING, "padding", Refused(Words(&["do_not_pad"]), "")),
    at(&[Chat], "documents", Refused(Empty, "put them into a message")),
    at(&[Chat, Embeddings], "chat_template", Refused(Empty, "")),
    at(&[Chat, Template], "chat_template_kwargs", Obeyed).takes(Map(MAX_TEMPLATE_VARIABLES)),
    at(&[Embeddings], "chat_template_kwargs", Refused(Empty, "")),
    at(
        &[Chat, Template],
        "add_generation_prompt",
        Refused(True, "continue the last message by `continue_final_message: true`"),
    ),
    at(&[Embeddings], "add_generation_prompt", Refused(False, "")),
    at(&[Chat, Template], "continue_final_message", Obeyed).takes(Boolean),
    at(&[Embeddings], "continue_final_message", Refused(False, "")),
    at(NATIVE, "generation_prompt", Refused(Empty, "")),
    at(GENERATION, "image_data", Refused(Empty, "")),
    at(GENERATION, "multimodal_data", Refused(Empty, "")),
    at(
        GENERATION,
        "options",
        Refused(Empty, "name each of them beside `model`; `num_ctx` is --ctx-size, when the server starts"),
    ),
    at(GENERATION, "keep_alive", NoEffect("a model stays loaded as long as it is served")),
    at(GENERATION, "system_prompt", Refused(Empty, "send it as a message with the role system")),
    at(&[Chat, Embeddings], "media_io_kwargs", NoEffect(NO_MEDIA)),
    at(&[Chat, Embeddings, Rerank], "mm_processor_kwargs", NoEffect(NO_MEDIA)),
    // How many answers, and how long.
    at(GENERATION, "n", Obeyed).takes(CHOICES),
    at(GENERATION, "n_cmpl", Obeyed).takes(CHOICES),
    at(&[Infill], "n", Refused(One, "")),
    at(&[Infill], "n_cmpl", Refused(One, "")),
    at(&[Text], "best_of", Obeyed).takes(CHOICES),
    at(&[Chat], "best_of", Refused(One, "ask for several answers with `n`")),
    at(NATIVE, "max_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(NATIVE, "max_completion_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(NATIVE, "n_predict", Obeyed).takes(TOKENS_OR_ALL),
    at(GENERATION, "min_tokens", Obeyed).takes(Integer(0, MAX_TOKENS_LIMIT as i64)),
    at(
        GENERATION,
        "t_max_prompt_ms",
        Refused(NotPositive, "bound the wait with the header `x-gantry-queue-timeout-ms`"),
    ),
    at(
        &[Infill],
        "t_max_prompt_ms",
        NoEffect("llama-server does not follow it either; the header `x-gantry-queue-timeout-ms` bounds the wait"),
    ),
    at(NATIVE, "t_max_predict_ms", Obeyed).takes(Integer(i64::MIN, u32::MAX as i64)),
    at(NATIVE, "stop", Obeyed).takes(AnyOf(&[text(MAX_STOP_BYTES), Texts(0, MAX_STOP_STRINGS, MAX_STOP_BYTES)])),
    at(GENERATION, "stop_token_ids", Obeyed).takes(Tokens(MAX_STOP_TOKENS)),
    at(GENERATION, "include_stop_str_in_output", Refused(False, "")),
    at(NATIVE, "ignore_eos", Obeyed).takes(Boolean),
    at(GENERATION, "repetition_detection", Refused(Empty, "")),
    at(NATIVE, "n_indent", Obeyed).takes(Integer(0, MAX_TOKENS_LIMIT as i64)),
    at(NATIVE, "n_keep", NoEffect(NO_SHIFT)),
    at(NATIVE, "n_discard", NoEffect(NO_SHIFT)),
    // The choice of tokens.
    at(NATIVE, "temperature", Obeyed).takes(Number(0.0, MAX_TEMPERATURE)),
    at(NATIVE, "top_p", Obeyed).takes(AboveZero(1.0)),
    at(NATIVE, "top_k", Obeyed).takes(Integer(-1, i32::MAX as i64)),
    at(NATIVE, "min_p", Obeyed).takes(Number(0.0, 1.0)),
    at(NATIVE, "typical_p", Obeyed).takes(AboveZero(1.0)),
    at(NATIVE, "xtc_probability", Obeyed).takes(Number(0.0, 1.0)),
    at(NATIVE, "xtc_threshold", Obeyed).takes(Number(0.0, 1.0)),
    at(NATIVE, "repeat_penalty", Obeyed).takes(AboveZero(MAX_REPEAT_PENALTY)),
    at(GENERATION, "repetition_penalty", Obeyed).takes(AboveZero(MAX_REPEAT_PENALTY)),
    at(NATIVE, "repeat_last_n", Obeyed).takes(TOKENS_OR_ALL),
    at(NATIVE, "frequency_penalty", Obeyed).takes(Number(-MAX_PENALTY, MAX_PENALTY)),
    at(NATIVE, "presence_penalty", Obeyed).takes(Number(-MAX_PENALTY, MAX_PENALTY)),
    at(NATIVE, "dry_multiplier", Obeyed).takes(Number(0.0, MAX_DRY_MULTIPLIER)),
    at(NATIVE, "dry_base", Obeyed).takes(Number(1.0, MAX_DRY_BASE)),
    at(NATIVE, "dry_allowed_length", Obeyed).takes(Integer(0, MAX_DRY_ALLOWED_LENGTH as i64)),
    at(NATIVE, "dry_penalty_last_n", Obeyed).takes(TOKENS_OR_ALL),
    at(NATIVE, "dry_sequence_breakers", Obeyed).takes(Texts(0, MAX_DRY_BREAKERS, MAX_DRY_BREAKER_BYTES)),
    at(NATIVE, "logit_bias", Obeyed).takes(Biases(MAX_LOGIT_BIASES, MAX_LOGIT_BIAS)),
    at(NATIVE, "seed", Obeyed).takes(Integer(i64::MIN, i64::MAX)),
    at(GENERATION, "tfs_z", Refused(One, "")),
    at(GENERATION, "penalize_nl", Refused(False, "")),
    at(NATIVE, "top_n_sigma", Refused(NotPositive, "")),
    at(NATIVE, "dynatemp_range", Refused(Zero, "")),
    at(NATIVE, "dynatemp_exponent", NoEffect("belongs to `dynatemp_range`, which is refused")),
    at(NATIVE, "mirostat", Refused(Zero, "")),
    at(NATIVE, "mirostat_tau", NoEffect(WITH_MIROSTAT)),
    at(NATIVE, "mirostat_eta", NoEffect(WITH_MIROSTAT)),
    at(NATIVE, "adaptive_target", Refused(MinusOne, "")),
    at(NATIVE, "adaptive_decay", NoEffect("belongs to `adaptive_target`, which is refused")),
    at(NATIVE, "min_keep", Refused(Zero, "")),
    at(GENERATION, "samplers", Refused(Absent, "")),
    at(&[Infill], "samplers", Obeyed).takes(OrderedWords(&SAMPLERS)),
    at(NATIVE, "backend_sampling", NoEffect("says where tokens are chosen, not which")),
    at(GENERATION, "use_beam_search", Refused(False, "")),
    at(GENERATION, "length_penalty", NoEffect("belongs to `use_beam_search`, which is refused")),
    at(GENERATION, "bad_words", Refused(Empty, "ban their tokens with `logit_bias`")),
    at(GENERATION, "allowed_token_ids", Refused(Empty, "bind the answer with a `grammar`")),
    at(GENERATION, "watermarking", Refused(False, "")),
    at(NATIVE, "lora", Refused(Empty, "")),
    at(GENERATION, "lora_request", Refused(Empty, "")),
    // The form of the answer.
    at(NATIVE, "response_format", Obeyed).takes(Object(ResponseFormat)),
    at(NATIVE, "json_schema", Obeyed).takes(Schema),
    at(NATIVE, "grammar", Obeyed).takes(text(MAX_GRAMMAR_BYTES)),
    at(GENERATION, "format", Refused(Empty, "ask with `response_format`, such as {\"type\": \"json_object\"}")),
    at(NATIVE, "grammar_lazy", Refused(False, "")),
    at(NATIVE, "grammar_triggers", Refused(Empty, "")),
    at(NATIVE, "preserved_tokens", Refused(Empty, "")),
    at(GENERATION, "structured_outputs", Obeyed).takes(Object(StructuredOutputs)),
    at(GENERATION, "structural_tag", Refused(Empty, "use `grammar`")),
    at(GENERATION, "guided_json", Obeyed).takes(AnyOf(&[Schema, text(MAX_SCHEMA_BYTES)])),
    at(GENERATION, "guided_regex", Obeyed).takes(text(MAX_REGEX_BYTES)),
    at(GENERATION, "guided_choice", Obeyed).takes(Texts(1, MAX_FORM_CHOICES, MAX_GRAMMAR_BYTES)),
    at(GENERATION, "guided_grammar", Obeyed).takes(text(MAX_GRAMMAR_BYTES)),
    at(GENERATION, "guided_decoding_backend", NoEffect("says what follows a form, not which form")),
    at(GENERATION, "guided_whitespace_pattern", Refused(Empty, "")),
    at(&[StructuredOutputs], "json", Obeyed).takes(AnyOf(&[Schema, text(MAX_SCHEMA_BYTES)])),
    at(&[StructuredOutputs], "regex", Obeyed).takes(text(MAX_REGEX_BYTES)),
    at(&[StructuredOutputs], "choice", Obeyed).takes(Texts(1, MAX_FORM_CHOICES, MAX_GRAMMAR_BYTES)),
    at(&[StructuredOutputs], "grammar", Obeyed).takes(text(MAX_GRAMMAR_BYTES)),
    at(&[StructuredOutputs], "json_object", Obeyed).takes(Boolean),
    at(&[StructuredOutputs], "structural_tag", Refused(Empty, "say what it says by `grammar`")),
    at(&[StructuredOutputs], "disable_any_whitespace", Refused(False, "")),
    at(&[StructuredOutputs], "disable_additional_properties", Refused(False, "say it in the schema")),
    at(&[StructuredOutputs], "whitespace_pattern", Refused(Empty, "")),
    at(GENERATION, "skip_special_tokens", Refused(True, "")),
    at(
        GENERATION,
        "spaces_between_special_tokens",
        NoEffect("belongs to `skip_special_tokens: false`, which is refused"),
    ),
    at(&[ResponseFormat], "type", Obeyed).takes(OneOf(&["text", "json_object", "json_schema"])).required(),
    at(&[ResponseFormat], "json_schema", Obeyed).takes(Object(JsonSchema)),
    at(&[ResponseFormat], "schema", Obeyed).takes(Schema),
    at(&[JsonSchema], "schema", Obeyed).takes(Schema).required(),
    at(&[JsonSchema], "strict", Obeyed).takes(Boolean),
    at(&[JsonSchema], "name", NoEffect("names the form")),
    at(&[JsonSchema], "description", NoEffect("says what the form is for; a model reads messages alone")),
    at(&[Chat], "verbosity", Refused(Words(&["medium"]), "ask for a short or long answer in a message")),
    at(&[Chat], "modalities", Refused(OnlyText, "")),
    at(&[Chat], "audio", Refused(Empty, "")),
    at(&[Chat], "prediction", Refused(Empty, "")),
    at(&[Chat], "web_search_options", Refused(Absent, "")),
    at(&[Chat], "moderation", Refused(Empty, "")),
    // Tools.
    at(&[Chat, Template], "tools", Obeyed).takes(Objects(Tool, 0, MAX_TOOLS)),
    at(&[Chat, Template], "tool_choice", Obeyed)
        .takes(AnyOf(&[OneOf(&["none", "auto", "required", "any"]), Object(ToolChoice)])),
    at(&[Chat, Template], "parallel_tool_calls", Obeyed).takes(Boolean),
    at(&[Chat], "functions", Refused(Empty, "send `tools`")),
    at(&[Chat], "function_call", Refused(Words(&["none", "auto"]), "say it by `tool_choice`")),
    at(NATIVE, "parse_tool_calls", Refused(True, "")),
    at(&[Tool], "type", Refused(Words(&["function"]), "")),
    at(&[Tool], "function", Obeyed).takes(Object(ToolFunction)).required(),
    at(&[Tool], "cache_control", NoEffect(CACHE_HINT)),
    at(&[ToolFunction], "name", Obeyed).takes(Name).required(),
    at(&[ToolFunction], "description", Obeyed).takes(text(MAX_TOOLS_BYTES)),
    at(&[ToolFunction], "parameters", Obeyed).takes(Schema),
    at(&[ToolFunction], "strict", Obeyed).takes(Boolean),
    at(&[ToolChoice], "type", Obeyed).takes(OneOf(&["function", "allowed_tools"])).required(),
    at(&[ToolChoice], "name", Obeyed).takes(Name),
    at(&[ToolChoice], "function", Obeyed).takes(NamedTool),
    at(&[ToolChoice], "allowed_tools", Obeyed).takes(Map(usize::MAX)),
    at(&[ToolChoice], "mode", Obeyed).takes(OneOf(&["auto", "required", "any"])),
    at(&[ToolChoice], "tools", Obeyed).takes(NamedTools(MAX_TOOLS)),
    // Reasoning.
    at(&[Chat, Template], "reasoning_effort", Obeyed).takes(OneOf(&EFFORTS)),
    at(&[Chat, Template], "reasoning", Obeyed).takes(Object(Reasoning)),
    at(&[Chat, Template], "think", Obeyed).takes(AnyOf(&[Boolean, OneOf(&EFFORTS), Object(Thinking)])),
    at(&[Chat, Template], "enable_thinking", Obeyed).takes(Boolean),
    at(&[Chat, Template], "thinking", Obeyed).takes(AnyOf(&[Boolean, OneOf(&EFFORTS), Object(Thinking)])),
    at(&[Text], "enable_thinking", Refused(NoThought, "")),
    at(&[Text], "thinking", Refused(NoThought, "")),
    at(&[Reasoning], "effort", Obeyed).takes(OneOf(&EFFORTS)),
    at(&[Reasoning], "summary", Refused(Words(&["auto"]), "")),
    at(&[Reasoning], "generate_summary", Refused(Words(&["auto"]), "")),
    at(&[Reasoning], "max_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(&[Reasoning], "exclude", Refused(False, "say `include_reasoning: false`")),
    at(&[Reasoning], "enabled", Refused(True, "say `reasoning_effort: none`")),
    at(&[Thinking], "type", Obeyed).takes(OneOf(&["enabled", "adaptive", "disabled"])).required(),
    at(&[Thinking], "budget_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(&[Thinking], "display", Refused(Words(&["summarized"]), "say `include_reasoning: false`")),
    at(&[Chat], "thinking_budget_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(&[Text], "thinking_budget_tokens", Refused(MinusOne, "")),
    at(&[Chat], "thinking_budget", Obeyed).takes(TOKENS_OR_ALL),
    at(GENERATION, "thinking_forced_open", Refused(False, "")),
    at(GENERATION, "reasoning_in_content", Refused(False, "")),
    at(&[Chat], "reasoning_format", Refused(Words(&["auto", "deepseek"]), "")),
    at(&[Text, Infill], "reasoning_format", Refused(Words(&["none"]), "")),
    at(NATIVE, "reasoning_control", Refused(False, "")),
    at(&[Chat], "include_reasoning", Obeyed).takes(Boolean),
    at(&[Chat], "thinking_token_budget", Obeyed).takes(TOKENS_OR_ALL),
    at(&[Text], "thinking_token_budget", Refused(MinusOne, "")),
    at(&[Chat], "reasoning_budget_tokens", Obeyed).takes(TOKENS_OR_ALL),
    at(&[Text, Infill], "reasoning_budget_tokens", Refused(MinusOne, "")),
    at(&[Chat], "reasoning_budget_start_tag", Refused(Empty, OF_TEMPLATE)),
    at(&[Chat], "reasoning_budget_end_tag", Refused(Empty, OF_TEMPLATE)),
    at(&[Chat], "reasoning_budget_end_tags", Refused(Empty, OF_TEMPLATE)),
    at(&[Chat], "reasoning_budget_message", Refused(Empty, OF_TEMPLATE)),
    at(&[Text, Infill], "reasoning_budget_start_tag", NoEffect(WITH_BUDGET)),
    at(&[Text, Infill], "reasoning_budget_end_tag", NoEffect(WITH_BUDGET)),
    at(&[Text, Infill], "reasoning_budget_end_tags", NoEffect(WITH_BUDGET)),
    at(&[Text, Infill], "reasoning_budget_message", NoEffect(WITH_BUDGET)),
    at(NATIVE, "chat_format", Refused(Empty, "")),
    at(NATIVE, "chat_parser", Refused(Empty, "")),
    // What is told beside the answer.
    at(NATIVE, "stream", Obeyed).takes(Boolean),
    at(GENERATION, "stream_options", Obeyed).takes(Object(StreamOptions)),
    at(&[Infill], "stream_options", Refused(Empty, "")),
    at(&[StreamOptions], "include_usage", Obeyed).takes(Boolean),
    at(&[StreamOptions], "include_obfuscation", Refused(False, "")),
    at(&[StreamOptions], "continuous_usage_stats", Refused(False, "")),
    at(GENERATION, "stream_interval", Refused(One, "")),
    at(NATIVE, "sse_ping_interval", Refused(Empty, "")),
    at(&[Chat], "logprobs", Obeyed).takes(Boolean),
    at(&[Text], "logprobs", Obeyed).takes(AnyOf(&[LIKELIEST, Only(false)])),
    at(&[Infill], "logprobs", Refused(False, "")),
    at(&[Chat], "top_logprobs", Obeyed).takes(LIKELIEST),
    at(&[Text], "top_logprobs", Refused(Zero, "on texts `logprobs` is the number")),
    at(NATIVE, "n_probs", Refused(Zero, "ask with `logprobs`")),
    at(NATIVE, "post_sampling_probs", Refused(False, "")),
    at(GENERATION, "prompt_logprobs", Obeyed).takes(LIKELIEST),
    at(GENERATION, "logprob_token_ids", Refused(Empty, "")),
    at(NATIVE, "return_tokens", Refused(False, "")),
    at(GENERATION, "return_token_ids", Refused(False, "")),
    at(GENERATION, "return_tokens_as_token_ids", Refused(False, "")),
    at(&[Chat], "return_prompt_text", Refused(False, "")),
    at(NATIVE, "return_progress", Refused(False, "")),
    at(GENERATION, "return_token_offsets", NoEffect(RENDER_ONLY)),
    at(GENERATION, "return_mm_kwargs", NoEffect(RENDER_ONLY)),
    at(GENERATION, "routed_experts_prompt_start", NoEffect("belongs to data on experts, which are not told")),
    at(GENERATION, "response_fields", Refused(Empty, "")),
    at(&[Infill], "response_fields", Obeyed).takes(Texts(0, MAX_RESPONSE_FIELDS, MAX_RESPONSE_FIELD_BYTES)),
    at(GENERATION, "timings", Obeyed).takes(Boolean),
    at(NATIVE, "timings_per_token", Refused(False, "ask for `timings`")),
    at(NATIVE, "verbose", Refused(False, "")),
    // Who asks, how urgently, and where it is computed.
    at(ANY, "priority", Obeyed).takes(PRIORITY),
    at(&[Chat], "service_tier", Refused(Words(&["auto", "default"]), "say `priority`")),
    at(GENERATION, "user", Names("the end user")),
    at(POOLING, "user", NoEffect("names the end user")),
    at(&[Chat], "safety_identifier", Names("the end user")),
    at(GENERATION, "session_id", Names("the conversation")),
    at(ANY, "request_id", Refused(Empty, "send the header `x-request-id`")),
    at(&[Chat], "metadata", NoEffect("is kept with stored answers, and none are stored")),
    at(&[Chat], "store", Refused(False, "keep the answer where it is read: nothing is stored here")),
    at(&[Chat], "prompt_cache_key", Names("the conversation, for caches, which need no such hint")),
    at(&[Chat], "prompt_cache_options", NoEffect(CACHE_HINT)),
    at(&[Chat], "prompt_cache_retention", NoEffect(CACHE_HINT)),
    at(NATIVE, "cache_prompt", Refused(True, "")),
    at(NATIVE, "n_cache_reuse", NoEffect(CACHE_HINT)),
    at(GENERATION, "cache_salt", Refused(Empty, "")),
    at(POOLING, "cache_salt", NoEffect("nothing of these texts is kept")),
    at(NATIVE, "id_slot", Refused(MinusOne, "")),
    at(GENERATION, "kv_transfer_params", Refused(Empty, "")),
    at(GENERATION, "ec_transfer_params", Refused(Empty, "")),
    at(GENERATION, "vllm_xargs", Refused(Empty, "")),
    at(NATIVE, "speculative.n_max", NoEffect(GUESSES)),
    at(NATIVE, "speculative.n_min", NoEffect(GUESSES)),
    at(NATIVE, "speculative.p_min", NoEffect(GUESSES)),
    at(NATIVE, "speculative.type", NoEffect(GUESSES)),
    at(NATIVE, "speculative.ngram_size_n", NoEffect(GUESSES)),
    at(NATIVE, "speculative.ngram_size_m", NoEffect(GUESSES)),
    at(NATIVE, "speculative.ngram_m_hits", NoEffect(GUESSES)),
    // Embeddings and rankings.
    at(&[Embeddings], "input", Obeyed)
        .takes(Inputs { elements: MAX_EMBEDDING_INPUTS, tokens: MAX_EMBEDDING_TOKENS })
        .required(),
    at(&[Embeddings], "content", Refused(Empty, "name it `input`")),
    at(&[Embeddings], "messages", Refused(Empty, "send their text as `input`")),
    at(&[Embeddings], "dimensions", Obeyed).takes(Integer(1, u32::MAX as i64)),
    at(&[Embeddings], "encoding_format", Obeyed).takes(OneOf(&["float", "base64"])),
    at(&[Embeddings], "embd_normalize", Refused(Two, "")),
    at(&[Embeddings], "embed_dtype", Refused(Words(&["float32"]), "")),
    at(&[Embeddings], "endianness", Refused(Words(&["native", "little"]), "")),
    at(&[Embeddings], "use_activation", Refused(True, "")),
    at(&[Rerank], "use_activation", Refused(False, "")),
    at(&[Rerank], "query", Obeyed).takes(filled(MAX_PROMPT_BYTES)).required(),
    at(&[Rerank], "documents", Obeyed).takes(Documents(MAX_RERANK_DOCUMENTS)).required(),
    at(&[Rerank], "texts", Refused(Empty, "name them `documents`")),
    at(&[Rerank], "top_n", Obeyed).takes(Integer(1, u32::MAX as i64)),
    at(&[Rerank], "return_documents", Obeyed).takes(Boolean),
    at(&[Rerank], "max_tokens_per_doc", Refused(Absent, "shorten the documents before they are sent")),
    at(&[Rerank], "max_chunks_per_doc", Refused(Absent, "cut the documents before they are sent")),
    at(&[Rerank], "rank_fields", Refused(Empty, "send what is to be ranked as a document's `text`")),
    at(&[Score], "text_1", Obeyed).takes(SCORED),
    at(&[Score], "text_2", Obeyed).takes(SCORED),
    at(&[Score], "queries", Obeyed).takes(SCORED),
    at(&[Score], "documents", Obeyed).takes(SCORED),
    at(&[Score], "truncate_prompt_tokens", Refused(Empty, "shorten the text before it is sent")),
    at(&[Score], "truncation_side", NoEffect("belongs to `truncate_prompt_tokens`, which is refused")),
    at(&[Score], "use_activation", Refused(False, "")),
    at(&[Score], "cache_salt", NoEffect("nothing of these texts is kept")),
    at(&[Score], "user", NoEffect("names the end user")),
    at(&[Score], "request_id", Refused(Empty, "send the header `x-request-id`")),
    at(&[Score], "mm_processor_kwargs", NoEffect(NO_MEDIA)),
    at(&[Score], "padding", Refused(Words(&["do_not_pad"]), "")),
    at(&[Score], "data_1", Refused(Empty, "name it `text_1`")),
    at(&[Score], "data_2", Refused(Empty, "name it `text_2`")),
    at(&[Score], "items", Refused(Empty, "name them `documents`")),
    at(&[Rerank], "return_text", Refused(False, "ask for `return_documents`")),
    // Messages and their parts.
    at(&[Message], "role", Obeyed).takes(OneOf(&["system", "developer", "user", "assistant", "tool"])).required(),
    at(&[Message], "content", Obeyed).takes(AnyOf(&[text(MAX_PROMPT_BYTES), Objects(Part, 0, MAX_CONTENT_PARTS)])),
    at(&[Tokenize], "content", Obeyed).takes(text(MAX_TOKENIZE_BYTES)),
    at(&[Message], "name", Obeyed).takes(text(MAX_NAME_BYTES)),
    at(&[Message], "tool_calls", Obeyed).takes(Objects(ToolCall, 0, MAX_TOOL_CALLS)),
    at(&[Message], "tool_call_id", Obeyed).takes(text(MAX_NAME_BYTES)),
    at(&[Message], "reasoning_content", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Message], "reasoning", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Message], "function_call", Refused(Empty, "send `tool_calls`")),
    at(&[Message], "refusal", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Message], "audio", Refused(Empty, "")),
    at(&[Message], "annotations", Refused(Empty, "")),
    at(&[Message], "parsed", NoEffect("is the `content`, as a client read it")),
    at(&[Message], "prefix", Refused(False, "")),
    at(&[Message], "partial", Refused(False, "")),
    at(&[Message], "tools", Refused(Empty, "")),
    at(&[Message], "task", Refused(Empty, "")),
    at(&[Part], "type", Obeyed).takes(OneOf(&["text", "refusal"])).required(),
    at(&[Part], "text", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Part], "refusal", Obeyed).takes(text(MAX_PROMPT_BYTES)),
    at(&[Part], "prompt_cache_breakpoint", NoEffect(CACHE_HINT)),
    at(&[Message, Part], "cache_control", NoEffect(CACHE_HINT)),
    at(&[ToolCall], "id", Obeyed).takes(filled(MAX_NAME_BYTES)).required(),
    at(&[ToolCall], "type", Refused(Words(&["function"]), "")),
    at(&[ToolCall], "function", Obeyed).takes(Object(Function)).required(),
    at(&[ToolCall], "index", NoEffect("counts the calls of a stream")),
    at(&[Function], "name", Obeyed).takes(filled(MAX_NAME_BYTES)).required(),
    at(&[Function], "arguments", Obeyed).takes(AnyOf(&[text(MAX_PROMPT_BYTES), Map(usize::MAX)])).required(),
    at(&[Function], "parsed_arguments", NoEffect("are the `arguments`, as a client read them")),
    at(&[Document], "text", Obeyed).takes(filled(MAX_PROMPT_BYTES)).required(),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_treatment_in_each_place() {
        for (i, one) in PARAMETERS.iter().enumerate() {
            for other in PARAMETERS.iter().skip(i + 1).filter(|other| other.name == one.name) {
                let shared = one.places.iter().find(|place| other.places.contains(place));
                assert_eq!(shared, None, "{} stands twice", one.name);
            }
        }
    }

    #[test]
    fn what_is_obeyed_says_what_it_may_be_and_nothing_else_does() {
        for parameter in PARAMETERS {
            assert_eq!(parameter.shape.is_some(), parameter.treatment == Obeyed, "{}", parameter.name);
        }
    }
}
