//! Every name that a request may have, and what becomes of it here: obeyed, refused by name, or accepted because it changes
//! nothing.
//!
//! To ignore a parameter that asks for something would be to answer another question than the one that was asked. So
//! what is not obeyed is refused by name, unless its value asks for what happens anyway: clients send defaults. The lists
//! of `OpenAI`, llama-server and vLLM, and of what clients of others send, are beside the tests, which send each name of
//! them. A name that is not here is refused as well, as `OpenAI` does: it is spelt wrong, stands in the wrong place, or
//! asks for what nobody here knows.

use std::borrow::Cow;

use gantry_core::{ApiError, ErrorCode};
use serde_json::{Map, Value};

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
pub(crate) fn refuse(place: Place, object: &Map<String, Value>, prefix: &str) -> Result<(), ApiError> {
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
    // `maxTokens` is `max_tokens`.
    let plain = |name: &str| name.replace(['_', '-'], "").to_lowercase();
    let likeness = |parameter: &Parameter| (strsim::jaro_winkler(&plain(name), &plain(parameter.name)), parameter.name);
    let (likeness, nearest) =
        PARAMETERS.iter().filter(obeyed).map(likeness).max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    (likeness >= LEAST_LIKENESS).then_some(nearest)
}

/// A place where a name is obeyed.
fn elsewhere(name: &str) -> Option<Place> {
    let obeyed = |parameter: &&Parameter| parameter.treatment == Obeyed && parameter.name == name;
    PARAMETERS.iter().find(obeyed).and_then(|parameter| parameter.places.first().copied())
}

/// How alike two names must be, from 0 to 1, for one to be taken for the other.
const LEAST_LIKENESS: f64 = 0.87;
/// The most characters of an unknown name that an error repeats.
const MAX_SHOWN_NAME_CHARS: usize = 64;

use Neutral::{Absent, Empty, False, MinusOne, NoThought, NotPositive, One, OnlyText, True, Two, Words, Zero};
use Place::{
    Chat, Detokenize, Document, Embeddings, Function, Infill, InfillFile, JsonSchema, Message, Part, Reasoning, Rerank,
    ResponseFormat, Score, StreamOptions, StructuredOutputs, Template, Text, Thinking, Tokenize, Tool, ToolCall,
    ToolChoice, ToolFunction,
};
use Treatment::{NoEffect, Obeyed, Refused};

const GENERATION: &[Place] = &[Chat, Text];
/// What llama-server names for whatever it generates.
const NATIVE: &[Place] = &[Chat, Text, Infill];
const POOLING: &[Place] = &[Embeddings, Rerank];
const ANY: &[Place] = &[Chat, Text, Embeddings, Rerank];

const fn at(places: &'static [Place], name: &'static str, treatment: Treatment) -> Parameter {
    Parameter { name, places, treatment }
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
    at(ANY, "model", Obeyed),
    at(&[Tokenize, Detokenize, Template, Infill, Score], "model", Obeyed),
    at(&[Infill, Score], "priority", Obeyed),
    at(&[Chat, Template], "messages", Obeyed),
    at(&[Text, Tokenize, Infill], "prompt", Obeyed),
    at(&[Infill], "input_prefix", Obeyed),
    at(&[Infill], "input_suffix", Obeyed),
    at(&[Infill], "input_extra", Obeyed),
    at(&[InfillFile], "text", Obeyed),
    at(&[InfillFile], "filename", Obeyed),
    at(&[InfillFile], "time", NoEffect("says when an editor saw it; they stand in the order in which they are sent")),
    at(&[Text, Tokenize], "parse_special", Obeyed),
    at(&[Tokenize], "add_special", Obeyed),
    at(&[Tokenize], "add_special_tokens", Obeyed),
    at(&[Tokenize], "return_token_strs", Refused(False, "ask for `with_pieces`")),
    at(&[Tokenize], "with_pieces", Obeyed),
    at(&[Detokenize], "tokens", Obeyed),
    at(&[Text], "suffix", Obeyed),
    at(&[Text], "prompt_embeds", Refused(Empty, "")),
    at(&[Text], "echo", Obeyed),
    at(&[Chat, Infill], "echo", Refused(False, "")),
    at(&[Chat], "add_special_tokens", Refused(False, "")),
    at(&[Text, Embeddings], "add_special_tokens", Refused(True, "")),
    at(ANY, "truncate_prompt_tokens", Refused(Empty, "shorten the text before it is sent")),
    at(ANY, "truncation_side", NoEffect("belongs to `truncate_prompt_tokens`, which is refused")),
    at(POOLING, "padding", Refused(Words(&["do_not_pad"]), "")),
    at(&[Chat], "documents", Refused(Empty, "put them into a message")),
    at(&[Chat, Embeddings], "chat_template", Refused(Empty, "")),
    at(&[Chat, Template], "chat_template_kwargs", Obeyed),
    at(&[Embeddings], "chat_template_kwargs", Refused(Empty, "")),
    at(
        &[Chat, Template],
        "add_generation_prompt",
        Refused(True, "continue the last message by `continue_final_message: true`"),
    ),
    at(&[Embeddings], "add_generation_prompt", Refused(False, "")),
    at(&[Chat, Template], "continue_final_message", Obeyed),
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
    at(GENERATION, "n", Obeyed),
    at(GENERATION, "n_cmpl", Obeyed),
    at(&[Infill], "n", Refused(One, "")),
    at(&[Infill], "n_cmpl", Refused(One, "")),
    at(&[Text], "best_of", Obeyed),
    at(&[Chat], "best_of", Refused(One, "ask for several answers with `n`")),
    at(NATIVE, "max_tokens", Obeyed),
    at(NATIVE, "max_completion_tokens", Obeyed),
    at(NATIVE, "n_predict", Obeyed),
    at(GENERATION, "min_tokens", Obeyed),
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
    at(NATIVE, "t_max_predict_ms", Obeyed),
    at(NATIVE, "stop", Obeyed),
    at(GENERATION, "stop_token_ids", Obeyed),
    at(GENERATION, "include_stop_str_in_output", Refused(False, "")),
    at(NATIVE, "ignore_eos", Obeyed),
    at(GENERATION, "repetition_detection", Refused(Empty, "")),
    at(NATIVE, "n_indent", Obeyed),
    at(NATIVE, "n_keep", NoEffect(NO_SHIFT)),
    at(NATIVE, "n_discard", NoEffect(NO_SHIFT)),
    // The choice of tokens.
    at(NATIVE, "temperature", Obeyed),
    at(NATIVE, "top_p", Obeyed),
    at(NATIVE, "top_k", Obeyed),
    at(NATIVE, "min_p", Obeyed),
    at(NATIVE, "typical_p", Obeyed),
    at(NATIVE, "xtc_probability", Obeyed),
    at(NATIVE, "xtc_threshold", Obeyed),
    at(NATIVE, "repeat_penalty", Obeyed),
    at(GENERATION, "repetition_penalty", Obeyed),
    at(NATIVE, "repeat_last_n", Obeyed),
    at(NATIVE, "frequency_penalty", Obeyed),
    at(NATIVE, "presence_penalty", Obeyed),
    at(NATIVE, "dry_multiplier", Obeyed),
    at(NATIVE, "dry_base", Obeyed),
    at(NATIVE, "dry_allowed_length", Obeyed),
    at(NATIVE, "dry_penalty_last_n", Obeyed),
    at(NATIVE, "dry_sequence_breakers", Obeyed),
    at(NATIVE, "logit_bias", Obeyed),
    at(NATIVE, "seed", Obeyed),
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
    at(&[Infill], "samplers", NoEffect("each works where its own parameter asks for it, in an order of its own")),
    at(NATIVE, "backend_sampling", NoEffect("says where tokens are chosen, not which")),
    at(GENERATION, "use_beam_search", Refused(False, "")),
    at(GENERATION, "length_penalty", NoEffect("belongs to `use_beam_search`, which is refused")),
    at(GENERATION, "bad_words", Refused(Empty, "ban their tokens with `logit_bias`")),
    at(GENERATION, "allowed_token_ids", Refused(Empty, "bind the answer with a `grammar`")),
    at(GENERATION, "watermarking", Refused(False, "")),
    at(NATIVE, "lora", Refused(Empty, "")),
    at(GENERATION, "lora_request", Refused(Empty, "")),
    // The form of the answer.
    at(NATIVE, "response_format", Obeyed),
    at(NATIVE, "json_schema", Obeyed),
    at(NATIVE, "grammar", Obeyed),
    at(GENERATION, "format", Refused(Empty, "ask with `response_format`, such as {\"type\": \"json_object\"}")),
    at(NATIVE, "grammar_lazy", Refused(False, "")),
    at(NATIVE, "grammar_triggers", Refused(Empty, "")),
    at(NATIVE, "preserved_tokens", Refused(Empty, "")),
    at(GENERATION, "structured_outputs", Obeyed),
    at(GENERATION, "structural_tag", Refused(Empty, "use `grammar`")),
    at(GENERATION, "guided_json", Obeyed),
    at(GENERATION, "guided_regex", Obeyed),
    at(GENERATION, "guided_choice", Obeyed),
    at(GENERATION, "guided_grammar", Obeyed),
    at(GENERATION, "guided_decoding_backend", NoEffect("says what follows a form, not which form")),
    at(GENERATION, "guided_whitespace_pattern", Refused(Empty, "")),
    at(&[StructuredOutputs], "json", Obeyed),
    at(&[StructuredOutputs], "regex", Obeyed),
    at(&[StructuredOutputs], "choice", Obeyed),
    at(&[StructuredOutputs], "grammar", Obeyed),
    at(&[StructuredOutputs], "json_object", Obeyed),
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
    at(&[ResponseFormat], "type", Obeyed),
    at(&[ResponseFormat], "json_schema", Obeyed),
    at(&[ResponseFormat], "schema", Obeyed),
    at(&[JsonSchema], "schema", Obeyed),
    at(&[JsonSchema], "strict", Obeyed),
    at(&[JsonSchema], "name", NoEffect("names the form")),
    at(&[JsonSchema], "description", NoEffect("says what the form is for; a model reads messages alone")),
    at(&[Chat], "verbosity", Refused(Words(&["medium"]), "ask for a short or long answer in a message")),
    at(&[Chat], "modalities", Refused(OnlyText, "")),
    at(&[Chat], "audio", Refused(Empty, "")),
    at(&[Chat], "prediction", Refused(Empty, "")),
    at(&[Chat], "web_search_options", Refused(Absent, "")),
    at(&[Chat], "moderation", Refused(Empty, "")),
    // Tools.
    at(&[Chat, Template], "tools", Obeyed),
    at(&[Chat, Template], "tool_choice", Obeyed),
    at(&[Chat, Template], "parallel_tool_calls", Obeyed),
    at(&[Chat], "functions", Refused(Empty, "send `tools`")),
    at(&[Chat], "function_call", Refused(Words(&["none", "auto"]), "say it by `tool_choice`")),
    at(NATIVE, "parse_tool_calls", Refused(True, "")),
    at(&[Tool], "type", Refused(Words(&["function"]), "")),
    at(&[Tool], "function", Obeyed),
    at(&[Tool], "cache_control", NoEffect(CACHE_HINT)),
    at(&[ToolFunction], "name", Obeyed),
    at(&[ToolFunction], "description", Obeyed),
    at(&[ToolFunction], "parameters", Obeyed),
    at(&[ToolFunction], "strict", Obeyed),
    at(&[ToolChoice], "type", Obeyed),
    at(&[ToolChoice], "name", Obeyed),
    at(&[ToolChoice], "function", Obeyed),
    at(&[ToolChoice], "allowed_tools", Obeyed),
    at(&[ToolChoice], "mode", Obeyed),
    at(&[ToolChoice], "tools", Obeyed),
    // Reasoning.
    at(&[Chat, Template], "reasoning_effort", Obeyed),
    at(&[Chat, Template], "reasoning", Obeyed),
    at(&[Chat, Template], "think", Obeyed),
    at(&[Chat, Template], "enable_thinking", Obeyed),
    at(&[Chat, Template], "thinking", Obeyed),
    at(&[Text], "enable_thinking", Refused(NoThought, "")),
    at(&[Text], "thinking", Refused(NoThought, "")),
    at(&[Reasoning], "effort", Obeyed),
    at(&[Reasoning], "summary", Refused(Words(&["auto"]), "")),
    at(&[Reasoning], "generate_summary", Refused(Words(&["auto"]), "")),
    at(&[Reasoning], "max_tokens", Obeyed),
    at(&[Reasoning], "exclude", Refused(False, "say `include_reasoning: false`")),
    at(&[Reasoning], "enabled", Refused(True, "say `reasoning_effort: none`")),
    at(&[Thinking], "type", Obeyed),
    at(&[Thinking], "budget_tokens", Obeyed),
    at(&[Thinking], "display", NoEffect("what is thought is told as it is")),
    at(&[Chat], "thinking_budget_tokens", Obeyed),
    at(&[Text], "thinking_budget_tokens", Refused(MinusOne, "")),
    at(&[Chat], "thinking_budget", Obeyed),
    at(GENERATION, "thinking_forced_open", Refused(False, "")),
    at(GENERATION, "reasoning_in_content", Refused(False, "")),
    at(&[Chat], "reasoning_format", Refused(Words(&["auto", "deepseek"]), "")),
    at(&[Text, Infill], "reasoning_format", Refused(Words(&["none"]), "")),
    at(NATIVE, "reasoning_control", Refused(False, "")),
    at(&[Chat], "include_reasoning", Obeyed),
    at(&[Chat], "thinking_token_budget", Obeyed),
    at(&[Text], "thinking_token_budget", Refused(MinusOne, "")),
    at(&[Chat], "reasoning_budget_tokens", Obeyed),
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
    at(NATIVE, "stream", Obeyed),
    at(GENERATION, "stream_options", Obeyed),
    at(&[Infill], "stream_options", Refused(Empty, "")),
    at(&[StreamOptions], "include_usage", Obeyed),
    at(&[StreamOptions], "include_obfuscation", Refused(False, "")),
    at(&[StreamOptions], "continuous_usage_stats", Refused(False, "")),
    at(GENERATION, "stream_interval", Refused(One, "")),
    at(NATIVE, "sse_ping_interval", Refused(Empty, "")),
    at(GENERATION, "logprobs", Obeyed),
    at(&[Infill], "logprobs", Refused(False, "")),
    at(&[Chat], "top_logprobs", Obeyed),
    at(&[Text], "top_logprobs", Refused(Zero, "on texts `logprobs` is the number")),
    at(NATIVE, "n_probs", Refused(Zero, "ask with `logprobs`")),
    at(NATIVE, "post_sampling_probs", Refused(False, "")),
    at(GENERATION, "prompt_logprobs", Obeyed),
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
    at(&[Infill], "response_fields", Obeyed),
    at(GENERATION, "timings", Obeyed),
    at(NATIVE, "timings_per_token", Refused(False, "ask for `timings`")),
    at(NATIVE, "verbose", Refused(False, "")),
    // Who asks, how urgently, and where it is computed.
    at(ANY, "priority", Obeyed),
    at(&[Chat], "service_tier", Refused(Words(&["auto", "default"]), "say `priority`")),
    at(ANY, "user", NoEffect("names the end user")),
    at(&[Chat], "safety_identifier", NoEffect("names the end user")),
    at(GENERATION, "session_id", NoEffect("names the conversation")),
    at(ANY, "request_id", Refused(Empty, "send the header `x-request-id`")),
    at(&[Chat], "metadata", NoEffect("is kept with stored answers, and none are stored")),
    at(&[Chat], "store", Refused(False, "keep the answer where it is read: nothing is stored here")),
    at(&[Chat], "prompt_cache_key", NoEffect(CACHE_HINT)),
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
    at(&[Embeddings], "input", Obeyed),
    at(&[Embeddings], "content", Refused(Empty, "name it `input`")),
    at(&[Embeddings], "messages", Refused(Empty, "send their text as `input`")),
    at(&[Embeddings], "dimensions", Obeyed),
    at(&[Embeddings], "encoding_format", Obeyed),
    at(&[Embeddings], "embd_normalize", Refused(Two, "")),
    at(&[Embeddings], "embed_dtype", Refused(Words(&["float32"]), "")),
    at(&[Embeddings], "endianness", Refused(Words(&["native", "little"]), "")),
    at(&[Embeddings], "use_activation", Refused(True, "")),
    at(&[Rerank], "use_activation", Refused(False, "")),
    at(&[Rerank], "query", Obeyed),
    at(&[Rerank], "documents", Obeyed),
    at(&[Rerank], "texts", Refused(Empty, "name them `documents`")),
    at(&[Rerank], "top_n", Obeyed),
    at(&[Rerank], "return_documents", Obeyed),
    at(&[Rerank], "max_tokens_per_doc", Refused(Absent, "shorten the documents before they are sent")),
    at(&[Rerank], "max_chunks_per_doc", Refused(Absent, "cut the documents before they are sent")),
    at(&[Rerank], "rank_fields", Refused(Empty, "send what is to be ranked as a document's `text`")),
    at(&[Score], "text_1", Obeyed),
    at(&[Score], "text_2", Obeyed),
    at(&[Score], "queries", Obeyed),
    at(&[Score], "documents", Obeyed),
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
    at(&[Message], "role", Obeyed),
    at(&[Message, Tokenize], "content", Obeyed),
    at(&[Message], "name", Obeyed),
    at(&[Message], "tool_calls", Obeyed),
    at(&[Message], "tool_call_id", Obeyed),
    at(&[Message], "reasoning_content", Obeyed),
    at(&[Message], "reasoning", Obeyed),
    at(&[Message], "function_call", Refused(Empty, "send `tool_calls`")),
    at(&[Message], "refusal", Obeyed),
    at(&[Message], "audio", Refused(Empty, "")),
    at(&[Message], "annotations", Refused(Empty, "")),
    at(&[Message], "parsed", NoEffect("is the `content`, as a client read it")),
    at(&[Message], "prefix", Refused(False, "")),
    at(&[Message], "partial", Refused(False, "")),
    at(&[Message], "tools", Refused(Empty, "")),
    at(&[Message], "task", Refused(Empty, "")),
    at(&[Part], "type", Obeyed),
    at(&[Part], "text", Obeyed),
    at(&[Part], "refusal", Obeyed),
    at(&[Part], "prompt_cache_breakpoint", NoEffect(CACHE_HINT)),
    at(&[Message, Part], "cache_control", NoEffect(CACHE_HINT)),
    at(&[ToolCall], "id", Obeyed),
    at(&[ToolCall], "type", Refused(Words(&["function"]), "")),
    at(&[ToolCall], "function", Obeyed),
    at(&[ToolCall], "index", NoEffect("counts the calls of a stream")),
    at(&[Function], "name", Obeyed),
    at(&[Function], "arguments", Obeyed),
    at(&[Function], "parsed_arguments", NoEffect("are the `arguments`, as a client read them")),
    at(&[Document], "text", Obeyed),
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
}
