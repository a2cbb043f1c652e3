//! Chats and texts: from bytes to a type that holds only what is valid.

use gantry_core::{
    ApiError, Chat, ErrorCode, GenerationParams, Infill, Priority, Prompt, TextInput, TextRequest, integer_of,
};
use serde_json::{Map, Value};

use crate::fields::{Fields, wrong_type, wrong_value};
use crate::format::{chat_logprobs, constraint, text_logprobs};
use crate::inputs::{Bounds, inputs};
use crate::limits::{MAX_CHOICES, MAX_MODEL_NAME_BYTES, MAX_PROMPT_CHOICES, MAX_PROMPT_TOKENS, MAX_TOP_LOGPROBS};
use crate::messages::take_messages;
use crate::parameters::Place;
use crate::sampling::{COMPLETION_MAX_TOKENS, sampling};
use crate::tools;

/// What a body says: one of the words, or vLLM's number, of which lower ones are served earlier and 0 is the default.
pub(crate) fn priority(fields: &Fields<'_>) -> Result<Priority, ApiError> {
    match fields.get("priority") {
        None => Ok(Priority::Normal),
        Some(Value::String(word)) => Priority::parse(word)
            .ok_or_else(|| wrong_value(fields.path("priority"), "must be one of high, normal and low")),
        Some(Value::Number(number)) => match integer_of(number) {
            Some(..0) => Ok(Priority::High),
            Some(0) => Ok(Priority::Normal),
            Some(_) => Ok(Priority::Low),
            None => Err(wrong_value(fields.path("priority"), "must be an integer of 64 bits where it is a number")),
        },
        Some(other) => Err(wrong_type(fields.path("priority"), "high, normal, low or an integer", other)),
    }
}

/// What a body calls the conversation, or its user: what is of another type names nothing.
fn conversation(fields: &Fields<'_>) -> Option<String> {
    let names = ["session_id", "prompt_cache_key", "safety_identifier", "user"];
    let named = names.into_iter().filter_map(|name| fields.get(name)?.as_str());
    named.map(str::to_owned).find(|name| !name.is_empty())
}

/// Whether and how to stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming {
    /// As server-sent events.
    pub enabled: bool,
    /// With a last chunk that has the usage.
    pub include_usage: bool,
}

/// What chats and texts have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// How to generate, for the first answer.
    pub params: GenerationParams,
    /// How many of the likeliest tokens to tell beside each of an answer; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
    /// The same of each token of the prompt, told apart from the answer.
    pub prompt_logprobs: Option<u32>,
    /// How many answers, 1 to [`MAX_CHOICES`].
    pub choices: u32,
    /// How many to choose them from, the likeliest by the mean of their tokens; `None`: as many.
    pub best_of: Option<u32>,
    /// How to answer.
    pub streaming: Streaming,
    /// Tell where each answer's time went.
    pub timings: bool,
    /// Tell what the model thought before.
    pub reasoning: bool,
    /// What the conversation is called, or its user.
    pub conversation: Option<String>,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            model: None,
            params: GenerationParams::default(),
            logprobs: None,
            prompt_logprobs: None,
            choices: 1,
            best_of: None,
            streaming: Streaming::default(),
            timings: false,
            reasoning: true,
            conversation: None,
        }
    }
}

type Logprobs = fn(&Fields<'_>, u32) -> Result<Option<u32>, ApiError>;

impl Common {
    pub(crate) fn read(fields: &Fields<'_>, logprobs: Logprobs) -> Result<Self, ApiError> {
        let model = model(fields)?;
        let mut params = sampling(fields)?;
        if let Some((constraint, param)) = constraint(fields)? {
            (params.constraint, params.constraint_param) = (Some(constraint), param);
        }
        let logprobs = logprobs(fields, MAX_TOP_LOGPROBS)?;
        params.logprobs = logprobs;
        let streaming = streaming(fields)?;
        let prompt_logprobs = prompt_logprobs(fields, streaming)?;
        params.prompt_logprobs = prompt_logprobs;
        let choices = choices(fields)?.unwrap_or(1);
        params.priority = priority(fields)?;
        Ok(Self {
            model,
            params,
            logprobs,
            prompt_logprobs,
            choices,
            best_of: None,
            streaming,
            timings: fields.boolean("timings")?.unwrap_or(false),
            reasoning: fields.boolean("include_reasoning")?.unwrap_or(true),
            conversation: conversation(fields),
        })
    }

    /// What is asked, by a client that calls the prompts `prompt_param`.
    pub(crate) fn into_request(self, prompts: Vec<Prompt>, prompt_param: &'static str) -> TextRequest {
        TextRequest {
            model: self.model,
            prompts,
            prompt_param,
            params: self.params,
            choices: self.choices,
            best_of: self.best_of.unwrap_or(self.choices),
            is_streamed: self.streaming.enabled,
            conversation: self.conversation,
        }
    }
}

/// A chat that can be handed to a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidChatRequest {
    /// At least one message, and what stands beside them.
    pub chat: Chat,
    /// What chats and texts have in common.
    pub common: Common,
}

/// What one request may have of prompts; the number of answers bounds them further.
const BOUNDS: Bounds = Bounds { elements: MAX_PROMPT_CHOICES as usize, tokens: MAX_PROMPT_TOKENS };

/// Texts to go on with.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidCompletionRequest {
    /// The texts, at least one; each has [`Common::choices`] answers, no more than [`MAX_PROMPT_CHOICES`] in all.
    pub prompts: Vec<Prompt>,
    /// What chats and texts have in common.
    pub common: Common,
}

impl ValidChatRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// Names the first parameter that is missing, of the wrong type, out of range or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut object = parse_object(body)?;
        tools::take_closed_prompt(&mut object);
        Fields::new(&object, "").refuse(Place::Chat)?;
        let messages = take_messages(&mut object)?;
        let fields = Fields::new(&object, "");
        let chat = tools::chat(messages, &fields)?;
        let common = Common::read(&fields, chat_logprobs)?;
        if common.params.max_tokens == Some(0) {
            let named = ["n_predict", "max_completion_tokens", "max_tokens"]
                .into_iter()
                .find(|name| fields.get(name).is_some());
            let path = fields.path(named.unwrap_or("max_tokens"));
            return Err(wrong_value(path, "must be -1, which is no bound, or 1 and more, not 0"));
        }
        Ok(Self { chat, common })
    }
}

impl ValidCompletionRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// Names the first parameter that is missing, of the wrong type, out of range or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_object(body)?;
        let fields = Fields::new(&object, "");
        fields.refuse(Place::Text)?;
        let suffix = fields.string("suffix")?;
        let prompts = match fields.get("prompt") {
            // What a suffix follows may be nothing.
            Some(Value::String(text)) if text.is_empty() && suffix.is_some() => vec![TextInput::Text(String::new())],
            _ => inputs(&fields, "prompt", BOUNDS)?,
        };
        let parse_special = fields.boolean("parse_special")?.unwrap_or(false);
        let mut common = Common::read(&fields, text_logprobs)?;
        common.best_of = best_of(&fields, &common)?;
        let params = &mut common.params;
        params.echo = fields.boolean("echo")?.unwrap_or(false);
        if suffix.is_some() && parse_special {
            let message = "may not be true with `suffix`: what stands around a gap is text, and has no special tokens";
            return Err(wrong_value("parse_special".to_owned(), message));
        }
        if suffix.is_some() && params.echo && params.logprobs.is_some() {
            let message = "is told with `echo` only of prompts without `suffix`, whose tokens are no part of the text that is \
                           told; leave one of the three out, or ask for `prompt_logprobs`";
            return Err(wrong_value("logprobs".to_owned(), message));
        }
        if params.echo {
            params.prompt_logprobs = params.prompt_logprobs.max(params.logprobs);
        }
        let of_each_prompt = common.best_of.unwrap_or(common.choices);
        if of_each_prompt > common.choices {
            // They are compared by these, told or not.
            params.logprobs.get_or_insert(0);
        }
        // Who names it and gets here without a number asked for no bound.
        if ["n_predict", "max_completion_tokens", "max_tokens"].iter().all(|name| fields.get(name).is_none()) {
            common.params.max_tokens.get_or_insert(COMPLETION_MAX_TOKENS);
        }
        let answers = prompts.len().saturating_mul(of_each_prompt as usize);
        if answers > MAX_PROMPT_CHOICES as usize {
            let (n, count) = (of_each_prompt, prompts.len());
            let message = format_args!(
                "asks for {answers} answers, {count} prompts with {n} each (`n`, or `best_of`), and {MAX_PROMPT_CHOICES} is the most of one \
                 request; send several"
            );
            return Err(wrong_value("prompt".to_owned(), message));
        }
        let prompt = |input| match input {
            prefix if suffix.is_some() => Prompt::Infill(Box::new(Infill {
                prefix,
                begun: String::new(),
                suffix: suffix.unwrap_or_default().to_owned(),
                suffix_param: "suffix".to_owned(),
                files: None,
            })),
            TextInput::Text(text) if parse_special => Prompt::Markup(text),
            TextInput::Text(text) => Prompt::Text(text),
            // A number names one token, and no text can become one: who sends it asks for that token.
            TextInput::Tokens(tokens) => Prompt::Tokens(tokens),
        };
        Ok(Self { prompts: prompts.into_iter().map(prompt).collect(), common })
    }
}

pub(crate) fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let invalid = |message: String| ApiError::invalid(None, ErrorCode::InvalidJson, message);
    let text = std::str::from_utf8(body)
        .map_err(|error| invalid(format!("The body is not UTF-8: byte {} is invalid.", error.valid_up_to())))?;
    if text.trim().is_empty() {
        return Err(invalid("The body is empty; a JSON object was expected.".to_owned()));
    }
    // serde_json limits the nesting to 128 levels, so hostile input cannot exhaust the stack.
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => {
            let got = crate::fields::kind_of(&other);
            Err(ApiError::invalid(None, ErrorCode::InvalidType, format!("The body must be a JSON object, not {got}.")))
        }
        Err(error) => Err(gantry_core::no_json(&error)),
    }
}

pub(crate) fn model(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.string("model")? {
        Some(model) if model.len() > MAX_MODEL_NAME_BYTES => {
            let n = model.len();
            Err(wrong_value(
                "model".to_owned(),
                format_args!("must have at most {MAX_MODEL_NAME_BYTES} bytes, not {n}"),
            ))
        }
        model => Ok(model.map(str::to_owned)),
    }
}

fn streaming(fields: &Fields<'_>) -> Result<Streaming, ApiError> {
    let enabled = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        Some(options) => {
            options.refuse(Place::StreamOptions)?;
            options.boolean("include_usage")?.unwrap_or(false)
        }
        None => false,
    };
    if include_usage && !enabled {
        return Err(wrong_value("stream_options".to_owned(), "may ask for usage only with `stream: true`"));
    }
    Ok(Streaming { enabled, include_usage })
}

/// How many of the likeliest tokens to tell beside each of the prompt.
fn prompt_logprobs(fields: &Fields<'_>, streaming: Streaming) -> Result<Option<u32>, ApiError> {
    let top = fields.integer("prompt_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    if top.is_some() && streaming.enabled {
        return Err(wrong_value(fields.path("prompt_logprobs"), "is told only of answers that are not streamed"));
    }
    Ok(top)
}

/// How many answers to choose from.
fn best_of(fields: &Fields<'_>, common: &Common) -> Result<Option<u32>, ApiError> {
    let (n, path) = (common.choices, || fields.path("best_of"));
    match fields.integer("best_of", 1..=MAX_CHOICES)? {
        Some(best_of) if best_of < n => {
            Err(wrong_value(path(), format_args!("must be at least `n`, which is {n}, not {best_of}")))
        }
        Some(best_of) if best_of > n && common.streaming.enabled => {
            Err(wrong_value(path(), "must be `n` where the answer is streamed: which are best is known at their end"))
        }
        best_of => Ok(best_of),
    }
}

/// How many answers, by either name.
fn choices(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let openai = fields.integer("n", 1..=MAX_CHOICES)?;
    let llama_server = fields.integer("n_cmpl", 1..=MAX_CHOICES)?;
    fields.one_of(("n", openai), ("n_cmpl", llama_server))
}
