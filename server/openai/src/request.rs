//! Chats and texts: from bytes to a type that holds only what is valid.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use crate::error::{ApiError, ErrorCode, ErrorKind};
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::format::{Format, chat_logprobs, text_logprobs};
use crate::limits::{MAX_CHOICES, MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_MODEL_NAME_BYTES, MAX_TOP_LOGPROBS};
use crate::sampling::Sampling;
use crate::unsupported;

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

/// Who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Before everyone else.
    High,
    /// The default.
    Normal,
    /// After everyone else.
    Low,
}

impl Priority {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The word on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// Reads the word; `param` is where it stood.
    ///
    /// # Errors
    /// It is none of the three.
    pub fn parse(param: &'static str, word: &str) -> Result<Self, ApiError> {
        Self::ALL
            .into_iter()
            .find(|priority| priority.as_str() == word)
            .ok_or_else(|| wrong_value(param.to_owned(), "must be one of high, normal and low"))
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

/// What chats and texts have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// How to generate.
    pub sampling: Sampling,
    /// What the answer must look like.
    pub format: Format,
    /// Tell the log-probability of each token, and of so many of the likeliest beside it, up to [`MAX_TOP_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// How many answers, 1 to [`MAX_CHOICES`].
    pub choices: u32,
    /// `None`: the body does not say.
    pub priority: Option<Priority>,
    /// How to answer.
    pub streaming: Streaming,
    /// Tell where each answer's time went.
    pub timings: bool,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            model: None,
            sampling: Sampling::default(),
            format: Format::default(),
            logprobs: None,
            choices: 1,
            priority: None,
            streaming: Streaming::default(),
            timings: false,
        }
    }
}

type Logprobs = fn(&Fields<'_>, u32) -> Result<Option<u32>, ApiError>;

impl Common {
    fn read(fields: &Fields<'_>, logprobs: Logprobs) -> Result<Self, ApiError> {
        Ok(Self {
            model: model(fields)?,
            sampling: Sampling::read(fields)?,
            format: Format::read(fields)?,
            logprobs: logprobs(fields, MAX_TOP_LOGPROBS)?,
            choices: fields.integer("n", 1..=MAX_CHOICES)?.unwrap_or(1),
            priority: fields.string("priority")?.map(|word| Priority::parse("priority", word)).transpose()?,
            streaming: streaming(fields)?,
            timings: fields.boolean("timings")?.unwrap_or(false),
        })
    }

    fn write(&self) -> Map<String, Value> {
        let mut object = Map::new();
        self.sampling.write(&mut object);
        self.format.write(&mut object);
        let stream_options = self.streaming.enabled.then(|| json!({"include_usage": self.streaming.include_usage}));
        for (name, value) in [
            ("model", json!(self.model)),
            ("n", json!(self.choices)),
            ("priority", json!(self.priority.map(Priority::as_str))),
            ("stream", json!(self.streaming.enabled)),
            ("stream_options", json!(stream_options)),
            ("timings", json!(self.timings)),
        ] {
            object.insert(name.to_owned(), value);
        }
        object
    }

    /// Refuses the request unless it asks for one of the names `served`, or for none.
    ///
    /// # Errors
    /// 404 `model_not_found`.
    pub fn check_model(&self, served: &[&str]) -> Result<(), ApiError> {
        check_model(self.model.as_deref(), served)
    }
}

/// A chat that can be handed to a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidChatRequest {
    /// At least one.
    pub messages: Vec<Message>,
    /// What chats and texts have in common.
    pub common: Common,
}

/// A text to go on with.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidCompletionRequest {
    /// The text.
    pub prompt: String,
    /// What chats and texts have in common.
    pub common: Common,
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
        let messages = messages(&fields)?;
        let common = Common::read(&fields, chat_logprobs)?;
        unsupported::refuse(&object)?;
        Ok(Self { messages, common })
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
        let mut object = self.common.write();
        object.insert("messages".to_owned(), self.messages_value());
        object.insert("logprobs".to_owned(), json!(self.common.logprobs.is_some()));
        object.insert("top_logprobs".to_owned(), json!(self.common.logprobs));
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
        let prompt = prompt(&fields)?;
        let mut common = Common::read(&fields, text_logprobs)?;
        common.sampling.max_tokens.get_or_insert(COMPLETION_MAX_TOKENS);
        unsupported::refuse(&object)?;
        Ok(Self { prompt, common })
    }

    /// The same request on the wire.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut object = self.common.write();
        object.insert("prompt".to_owned(), json!(self.prompt));
        object.insert("logprobs".to_owned(), json!(self.common.logprobs));
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
        Err(error) => Err(invalid(format!("The body is not valid JSON: {error}."))),
    }
}

pub(crate) fn model(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.string("model")? {
        Some("") => {
            Err(wrong_value("model".to_owned(), "must not be empty; leave it out for the model that is served"))
        }
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
