//! Requests: from bytes to a type that holds only what is valid.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::error::{ApiError, ErrorCode, ErrorKind};
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::unsupported;

/// The most messages in one chat.
pub const MAX_MESSAGES: usize = 4096;
/// The most parts in one message's content.
pub const MAX_CONTENT_PARTS: usize = 1024;
/// The most stop strings.
pub const MAX_STOP_STRINGS: usize = 16;
/// The longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 256;
/// The highest `max_tokens`; more than any model's context.
pub const MAX_TOKENS_LIMIT: u32 = 1 << 20;
/// The highest temperature.
const MAX_TEMPERATURE: f64 = 2.0;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions; `developer` is the newer word for it, and templates know only this one.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// What a tool returned.
    Tool,
}

impl Role {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" => Some(Self::Tool),
            _ => None,
        }
    }

    /// The word on the wire and in templates.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; text parts are joined by line breaks, as llama-server does.
    pub content: String,
}

/// How to generate; ranges checked, defaults `OpenAI`'s.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 1 to [`MAX_TOKENS_LIMIT`]; `None`: until the model ends or its context is full.
    pub max_tokens: Option<u32>,
    /// 0 to 2.
    pub temperature: f32,
    /// Above 0, up to 1.
    pub top_p: f32,
    /// 0 or less is off.
    pub top_k: i32,
    /// 0 to 1.
    pub min_p: f32,
    /// Repeats a draw. Negative numbers are taken by their bits.
    pub seed: Option<u64>,
    /// At most [`MAX_STOP_STRINGS`], none empty.
    pub stop: Vec<String>,
    /// Generate past the model's end.
    pub ignore_eos: bool,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// Whether and how to stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming {
    /// As server-sent events.
    pub enabled: bool,
    /// With a last chunk that has the usage.
    pub include_usage: bool,
}

/// A chat that can be handed to a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidChatRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// At least one.
    pub messages: Vec<Message>,
    /// How to generate.
    pub sampling: Sampling,
    /// How to answer.
    pub streaming: Streaming,
}

/// A text to go on with.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidCompletionRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// The text.
    pub prompt: String,
    /// How to generate.
    pub sampling: Sampling,
    /// How to answer.
    pub streaming: Streaming,
}

/// The default of `max_tokens` on `/v1/completions`, which is `OpenAI`'s: a bare text has no natural end.
const COMPLETION_MAX_TOKENS: u32 = 16;

impl ValidChatRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// Names the first parameter that is missing, of the wrong type, out of range or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_object(body)?;
        let fields = Fields::new(&object, "");
        let model = model(&fields)?;
        let messages = messages(&fields)?;
        let sampling = sampling(&fields)?;
        let streaming = streaming(&fields)?;
        unsupported::refuse(&object)?;
        Ok(Self { model, messages, sampling, streaming })
    }

    /// The `messages` array for a chat template, as JSON.
    #[must_use]
    pub fn messages_json(&self) -> String {
        self.messages_value().to_string()
    }

    fn messages_value(&self) -> Value {
        self.messages.iter().map(|m| json!({"role": m.role.as_str(), "content": m.content})).collect()
    }

    /// The same request on the wire.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut object = common_json(self.model.as_deref(), &self.sampling, self.streaming);
        object.insert("messages".to_owned(), self.messages_value());
        Value::Object(object)
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
        let model = model(&fields)?;
        let prompt = prompt(&fields)?;
        let mut sampling = sampling(&fields)?;
        sampling.max_tokens.get_or_insert(COMPLETION_MAX_TOKENS);
        let streaming = streaming(&fields)?;
        unsupported::refuse(&object)?;
        Ok(Self { model, prompt, sampling, streaming })
    }

    /// The same request on the wire.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut object = common_json(self.model.as_deref(), &self.sampling, self.streaming);
        object.insert("prompt".to_owned(), json!(self.prompt));
        Value::Object(object)
    }
}

/// Refuses a model that is not among those `served`.
pub(crate) fn check_model(asked: Option<&str>, served: &[&str]) -> Result<(), ApiError> {
    match asked {
        Some(model) if !served.contains(&model) => Err(ApiError {
            status: 404,
            kind: ErrorKind::NotFoundError,
            param: Some(Cow::Borrowed("model")),
            code: ErrorCode::ModelNotFound,
            message: format!("The model {model:?} is not served here; there is {}.", served.join(", ")),
        }),
        _ => Ok(()),
    }
}

impl ValidChatRequest {
    /// Refuses the request unless it asks for one of the names `served`, or for none.
    ///
    /// # Errors
    /// 404 `model_not_found`.
    pub fn check_model(&self, served: &[&str]) -> Result<(), ApiError> {
        check_model(self.model.as_deref(), served)
    }
}

impl ValidCompletionRequest {
    /// Refuses the request unless it asks for one of the names `served`, or for none.
    ///
    /// # Errors
    /// 404 `model_not_found`.
    pub fn check_model(&self, served: &[&str]) -> Result<(), ApiError> {
        check_model(self.model.as_deref(), served)
    }
}

fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
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
        Err(error) => Err(invalid(format!("The body is not valid JSON: {error}."))),
    }
}

fn model(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.string("model")? {
        Some("") => {
            Err(wrong_value("model".to_owned(), "must not be empty; leave it out for the model that is served"))
        }
        model => Ok(model.map(str::to_owned)),
    }
}

fn prompt(fields: &Fields<'_>) -> Result<String, ApiError> {
    let param = || "prompt".to_owned();
    let value = fields.get("prompt").ok_or_else(|| missing(param(), "a string is expected"))?;
    let text = match value {
        Value::String(text) => text,
        Value::Array(items) => match items.as_slice() {
            [Value::String(text)] => text,
            [other] => return Err(wrong_type("prompt[0]".to_owned(), "a string", other)),
            _ => {
                let n = items.len();
                return Err(wrong_value(
                    param(),
                    format_args!("must be a string or an array of one string, not of {n}"),
                ));
            }
        },
        other => return Err(wrong_type(param(), "a string or an array of one string", other)),
    };
    if text.is_empty() { Err(wrong_value(param(), "must not be empty")) } else { Ok(text.clone()) }
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let param = || "messages".to_owned();
    let value = fields.get("messages").ok_or_else(|| missing(param(), "an array of messages is expected"))?;
    let items = value.as_array().ok_or_else(|| wrong_type(param(), "an array of messages", value))?;
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let n = items.len();
        return Err(wrong_value(param(), format_args!("must have 1 to {MAX_MESSAGES} messages, not {n}")));
    }
    items.iter().enumerate().map(|(i, item)| message(i, item)).collect()
}

fn message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(object) = value else { return Err(wrong_type(path, "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    let word = fields
        .string("role")?
        .ok_or_else(|| missing(fields.path("role"), "system, developer, user, assistant or tool is expected"))?;
    let role = Role::parse(word).ok_or_else(|| {
        wrong_value(fields.path("role"), "must be one of system, developer, user, assistant and tool")
    })?;
    for name in ["tool_calls", "function_call", "audio", "refusal"] {
        let asks = fields.get(name).is_some_and(|value| !value.as_array().is_some_and(Vec::is_empty));
        if asks {
            let param = fields.path(name);
            let message = format!("`{param}` is not supported by this server yet; leave it out.");
            return Err(ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::UnsupportedParameter, message));
        }
    }
    Ok(Message { role, content: content(&fields)? })
}

fn content(fields: &Fields<'_>) -> Result<String, ApiError> {
    let expected = "a string or an array of text parts";
    let path = fields.path("content");
    let value = fields.get("content").ok_or_else(|| missing(path.clone(), &format!("{expected} is expected")))?;
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) if parts.is_empty() || parts.len() > MAX_CONTENT_PARTS => {
            let n = parts.len();
            Err(wrong_value(path, format_args!("must have 1 to {MAX_CONTENT_PARTS} parts, not {n}")))
        }
        Value::Array(parts) => {
            let texts: Result<Vec<&str>, ApiError> =
                parts.iter().enumerate().map(|(i, part)| text_part(&format!("{path}[{i}]"), part)).collect();
            Ok(texts?.join("\n"))
        }
        other => Err(wrong_type(path, expected, other)),
    }
}

fn text_part<'a>(path: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    let Value::Object(object) = value else { return Err(wrong_type(path.to_owned(), "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    match fields.string("type")? {
        Some("text") => fields.string("text")?.ok_or_else(|| missing(fields.path("text"), "a string is expected")),
        Some(_) => Err(ApiError::invalid(
            Some(Cow::Owned(fields.path("type"))),
            ErrorCode::UnsupportedContent,
            format!("`{}` must be \"text\": this server takes no images, audio or files yet.", fields.path("type")),
        )),
        None => Err(missing(fields.path("type"), "\"text\" is expected")),
    }
}

fn sampling(fields: &Fields<'_>) -> Result<Sampling, ApiError> {
    let default = Sampling::default();
    let tokens = 1..=i64::from(MAX_TOKENS_LIMIT);
    let newer = fields.integer("max_completion_tokens", tokens.clone())?;
    let older = fields.integer("max_tokens", tokens)?;
    let unit = |number: f64| (0.0..=1.0).contains(&number);
    let top_k = fields.integer("top_k", -1..=i64::from(i32::MAX))?;
    Ok(Sampling {
        // In range by the checks above.
        max_tokens: newer.or(older).and_then(|n| u32::try_from(n).ok()),
        temperature: fields
            .number("temperature", "a number from 0 to 2", |t| (0.0..=MAX_TEMPERATURE).contains(&t))?
            .unwrap_or(default.temperature),
        top_p: fields
            .number("top_p", "a number above 0 and at most 1", |p| unit(p) && p as f32 > 0.0)?
            .unwrap_or(default.top_p),
        top_k: top_k.and_then(|k| i32::try_from(k).ok()).unwrap_or(default.top_k),
        min_p: fields.number("min_p", "a number from 0 to 1", unit)?.unwrap_or(default.min_p),
        seed: seed(fields)?,
        stop: stop(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(default.ignore_eos),
    })
}

fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    match (value.as_u64(), value.as_i64()) {
        (Some(seed), _) => Ok(Some(seed)),
        (None, Some(seed)) => Ok(Some(seed.cast_unsigned())),
        (None, None) => Err(wrong_type("seed".to_owned(), "an integer of 64 bits", value)),
    }
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let path = || fields.path("stop");
    let strings: Vec<String> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) if items.len() > MAX_STOP_STRINGS => {
            let n = items.len();
            return Err(wrong_value(path(), format_args!("must have at most {MAX_STOP_STRINGS} strings, not {n}")));
        }
        Some(Value::Array(items)) => {
            let string = |(i, item): (usize, &Value)| match item {
                Value::String(text) => Ok(text.clone()),
                other => Err(wrong_type(format!("stop[{i}]"), "a string", other)),
            };
            items.iter().enumerate().map(string).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type(path(), "a string or an array of strings", other)),
    };
    match strings.iter().find(|text| text.is_empty() || text.len() > MAX_STOP_BYTES) {
        Some(text) => {
            let n = text.len();
            Err(wrong_value(path(), format_args!("must hold strings of 1 to {MAX_STOP_BYTES} bytes, not of {n}")))
        }
        None => Ok(strings),
    }
}

fn streaming(fields: &Fields<'_>) -> Result<Streaming, ApiError> {
    let enabled = fields.boolean("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        Some(_) if !enabled => {
            return Err(wrong_value("stream_options".to_owned(), "may be given only with `stream: true`"));
        }
        Some(options) => options.boolean("include_usage")?.unwrap_or(false),
        None => false,
    };
    Ok(Streaming { enabled, include_usage })
}

fn common_json(model: Option<&str>, sampling: &Sampling, streaming: Streaming) -> Map<String, Value> {
    let value = json!({
        "model": model,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": sampling.stop,
        "ignore_eos": sampling.ignore_eos,
        "stream": streaming.enabled,
        "stream_options": streaming.enabled.then(|| json!({"include_usage": streaming.include_usage})),
    });
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}
