//! `/tokenize`, `/detokenize` and `/apply-template`, as llama-server has them, and the former two as vLLM has them, too: what a text, token ids or a chat are to the model,
//! without computing anything with it.

use gantry_core::{
    ApiError, EncodeError, Extent, GenerationParams, Prompt, PromptEncoder, PromptForm, ShownPrompt, TextRequest,
    TokenPiece,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::inputs::token_ids;
use crate::limits::{MAX_DETOKENIZE_TOKENS, MAX_TOKENIZE_BYTES, MAX_TOKENIZE_PIECES_BYTES};
use crate::messages::take_messages;
use crate::parameters::Place;
use crate::request::{model, parse_object};
use crate::tools;

/// Reads and checks a body of `/tokenize`.
///
/// # Errors
/// Names the first parameter that is missing, of the wrong type, too long or not known.
pub fn decode_tokenize(body: &[u8]) -> Result<(TextRequest, TokenizerEncoder), ApiError> {
    let mut object = parse_object(body)?;
    let fields = Fields::new(&object, "");
    fields.refuse(Place::Tokenize)?;
    let model = model(&fields)?;
    let flag = |name, default| fields.boolean(name).map(|given| given.unwrap_or(default));
    // A text by vLLM's name is treated as there.
    let name = if object.get("content").is_none_or(Value::is_null) && fields.get("prompt").is_some() {
        "prompt"
    } else {
        "content"
    };
    if name == "content" && fields.get("prompt").is_some() {
        return Err(wrong_value("prompt".to_owned(), "is another name of `content`: leave one of them out"));
    }
    let (llama_server, vllm) = (fields.boolean("add_special")?, fields.boolean("add_special_tokens")?);
    let adds_special = fields.one_of(("add_special", llama_server), ("add_special_tokens", vllm))?;
    let (adds_special, parse_special) = (adds_special.unwrap_or(name == "prompt"), flag("parse_special", true)?);
    let with_pieces = flag("with_pieces", false)?;
    let most = if with_pieces { MAX_TOKENIZE_PIECES_BYTES } else { MAX_TOKENIZE_BYTES };
    let param = || name.to_owned();
    let text = match object.get_mut(name).map(Value::take) {
        Some(Value::String(text)) if text.len() <= most => text,
        Some(Value::String(text)) => {
            let n = text.len();
            return Err(wrong_value(param(), format_args!("must have at most {most} bytes here, not {n}")));
        }
        None | Some(Value::Null) => return Err(missing(param(), "a string is expected")),
        Some(other) => return Err(wrong_type(param(), "a string", &other)),
    };
    let prompt = if parse_special { Prompt::Markup(text) } else { Prompt::Text(text) };
    let form = PromptForm::Tokens { adds_special, with_pieces };
    Ok((request(model, prompt, name, form), TokenizerEncoder { text_fields: &["content"] }))
}

/// Reads and checks a body of `/detokenize`.
///
/// # Errors
/// Names the first parameter that is missing, of the wrong type, too long or not known.
pub fn decode_detokenize(body: &[u8]) -> Result<(TextRequest, TokenizerEncoder), ApiError> {
    let object = parse_object(body)?;
    let fields = Fields::new(&object, "");
    fields.refuse(Place::Detokenize)?;
    let param = || "tokens".to_owned();
    let tokens = match object.get("tokens") {
        None | Some(Value::Null) => return Err(missing(param(), "an array of token ids is expected")),
        Some(Value::Array(ids)) if ids.len() > MAX_DETOKENIZE_TOKENS => {
            let n = ids.len();
            return Err(wrong_value(param(), format_args!("must have at most {MAX_DETOKENIZE_TOKENS} ids, not {n}")));
        }
        Some(Value::Array(ids)) => token_ids("tokens", ids)?,
        Some(other) => return Err(wrong_type(param(), "an array of token ids", other)),
    };
    // llama-server's name, and vLLM's.
    let encoder = TokenizerEncoder { text_fields: &["content", "prompt"] };
    Ok((request(model(&fields)?, Prompt::Tokens(tokens), "tokens", PromptForm::Text), encoder))
}

/// Reads and checks a body of `/apply-template`.
///
/// # Errors
/// As [`decode_chat`](crate::decode_chat).
pub fn decode_apply_template(body: &[u8]) -> Result<(TextRequest, TokenizerEncoder), ApiError> {
    let mut object = parse_object(body)?;
    tools::take_closed_prompt(&mut object);
    Fields::new(&object, "").refuse(Place::Template)?;
    let messages = take_messages(&mut object)?;
    let fields = Fields::new(&object, "");
    let prompt = Prompt::chat(tools::chat(messages, &fields)?);
    let model = model(&fields)?;
    Ok((request(model, prompt, "messages", PromptForm::Text), TokenizerEncoder { text_fields: &["prompt"] }))
}

fn request(model: Option<String>, prompt: Prompt, prompt_param: &'static str, form: PromptForm) -> TextRequest {
    TextRequest {
        model,
        prompts: vec![prompt],
        prompt_param,
        params: GenerationParams { extent: Extent::Prompt(form), ..GenerationParams::default() },
        choices: 1,
        best_of: 1,
        is_streamed: false,
        conversation: None,
    }
}

/// Writes what a prompt is to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenizerEncoder {
    /// What a text is called.
    text_fields: &'static [&'static str],
}

impl PromptEncoder for TokenizerEncoder {
    fn whole(self, prompt: ShownPrompt) -> Result<Vec<u8>, EncodeError> {
        match prompt {
            ShownPrompt::Text(text) => {
                let told = self.text_fields.iter().map(|field| ((*field).to_owned(), json!(text)));
                serde_json::to_vec(&told.collect::<Map<_, _>>())
            }
            ShownPrompt::Tokens(tokens) => serde_json::to_vec(&Tokens { tokens }),
            ShownPrompt::Pieces(pieces) => {
                serde_json::to_vec(&Tokens { tokens: pieces.iter().map(Piece::of).collect::<Vec<_>>() })
            }
            ShownPrompt::Count(count) => serde_json::to_vec(&json!({"count": count})),
        }
    }
}

/// The answer to `/tokenize`.
pub fn tokenize_schema(generator: &mut SchemaGenerator) -> Schema {
    let (ids, pieces) = (Tokens::<i32>::json_schema(generator), Tokens::<Piece<'_>>::json_schema(generator));
    json_schema!({"anyOf": [ids, pieces]})
}

/// The answer to `/detokenize`: the text, by llama-server's name and vLLM's.
pub fn detokenize_schema(_: &mut SchemaGenerator) -> Schema {
    texts(&["content", "prompt"])
}

/// The answer to `/apply-template`.
pub fn apply_template_schema(_: &mut SchemaGenerator) -> Schema {
    texts(&["prompt"])
}

fn texts(names: &[&str]) -> Schema {
    let properties: Map<_, _> = names.iter().map(|name| ((*name).to_owned(), json!({"type": "string"}))).collect();
    json_schema!({"type": "object", "properties": properties, "required": names})
}

#[derive(Serialize, JsonSchema)]
#[schemars(inline)]
struct Tokens<T> {
    tokens: Vec<T>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "TokenPiece")]
struct Piece<'a> {
    id: i32,
    piece: Shown<'a>,
}

/// What a token stands for: text, or bytes that are no characters.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum Shown<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl<'a> Piece<'a> {
    fn of(piece: &'a TokenPiece) -> Self {
        let shown = std::str::from_utf8(&piece.bytes).map_or(Shown::Bytes(&piece.bytes), Shown::Text);
        Self { id: piece.id, piece: shown }
    }
}
