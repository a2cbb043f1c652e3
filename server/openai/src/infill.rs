//! `/infill`, as llama-server has it for editors: a gap within a text, with parts of other files, and what fills it. Absent: how a
//! model reads that, which its vocabulary says.

use bytes::{BufMut, BytesMut};
use gantry_core::{
    Answer, AnswerHead, ApiError, EncodeError, FinishReason, GenerationEvent, Infill, InfillFile, Prompt, StopCause,
    StreamEncoder, TextEncoder, TextInput, TextRequest, Usage,
};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::ErrorResponse;
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_INFILL_FILES, MAX_RESPONSE_FIELD_BYTES, MAX_RESPONSE_FIELDS};
use crate::parameters::Place;
use crate::request::{Common, parse_object};
use crate::response::Timings;
use crate::sampling::choose_samplers;
use crate::sse::write_sse_event;
use crate::told::timings_of;

/// What llama-server calls a file without a name.
const UNNAMED: &str = "tmp";

/// Reads and checks a body.
///
/// # Errors
/// Names the first parameter that is missing, of the wrong type, out of range or not supported.
pub fn decode_infill(body: &[u8]) -> Result<(TextRequest, InfillEncoder), ApiError> {
    let object = parse_object(body)?;
    let fields = Fields::new(&object, "");
    fields.refuse(Place::Infill)?;
    let infill = Infill {
        prefix: TextInput::Text(text(&fields, "input_prefix")?),
        begun: fields.string("prompt")?.unwrap_or_default().to_owned(),
        suffix: text(&fields, "input_suffix")?,
        suffix_param: "input_suffix".to_owned(),
        files: Some(files(&fields)?),
    };
    let response_fields = fields.strings("response_fields", 0..=MAX_RESPONSE_FIELDS, 0..=MAX_RESPONSE_FIELD_BYTES)?;
    let mut common = Common::read(&fields, |_, _| Ok(None))?;
    choose_samplers(&fields, &mut common.params)?;
    let encoder = InfillEncoder { response_fields, max_tokens: common.params.max_tokens };
    Ok((common.into_request(vec![Prompt::Infill(Box::new(infill))], "input_prefix"), encoder))
}

/// A text that may be empty, but not be missing.
fn text(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    let text =
        fields.string(name)?.ok_or_else(|| missing(fields.path(name), "a string is expected, if an empty one"))?;
    Ok(text.to_owned())
}

fn files(fields: &Fields<'_>) -> Result<Vec<InfillFile>, ApiError> {
    let path = || fields.path("input_extra");
    let Some(value) = fields.get("input_extra") else { return Ok(Vec::new()) };
    let items = value.as_array().ok_or_else(|| wrong_type(path(), "an array of objects", value))?;
    if items.len() > MAX_INFILL_FILES {
        let n = items.len();
        return Err(wrong_value(path(), format_args!("must have at most {MAX_INFILL_FILES} elements, not {n}")));
    }
    let file = |(i, item): (usize, &Value)| {
        let path = format!("{}[{i}]", path());
        let Value::Object(object) = item else { return Err(wrong_type(path, "an object with a `text`", item)) };
        let fields = Fields::new(object, format!("{path}."));
        fields.refuse(Place::InfillFile)?;
        let name = fields.string("filename")?.unwrap_or(UNNAMED).to_owned();
        Ok(InfillFile { name, text: text(&fields, "text")? })
    };
    items.iter().enumerate().map(file).collect()
}

/// Writes what fills a gap.
#[derive(Clone, Debug)]
pub struct InfillEncoder {
    /// The fields that are told, by their paths; `None`: all.
    response_fields: Option<Vec<String>>,
    max_tokens: Option<u32>,
}

/// The end of an answer, or a whole one.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "InfillAnswer")]
struct Told<'a> {
    index: u32,
    content: &'a str,
    /// Ids are not told.
    tokens: [i32; 0],
    stop: bool,
    model: &'a str,
    tokens_predicted: u32,
    tokens_evaluated: u32,
    has_new_line: bool,
    truncated: bool,
    #[schemars(extend("enum" = ["limit", "word", "eos", "none"]))]
    stop_type: &'static str,
    stopping_word: &'a str,
    tokens_cached: u32,
    /// Elements of `input_extra`, the first ones, for which there was no room.
    input_extra_left_out: u32,
    timings: Timings,
}

/// The answer to `/infill`, or what of it is asked for by `response_fields`.
pub fn infill_schema(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = Told::json_schema(generator);
    schema.remove("required");
    schema
}

impl InfillEncoder {
    /// Keeps the fields that are asked for, each by its path, as llama-server does.
    fn chosen(&self, told: &Told<'_>) -> Result<Value, EncodeError> {
        let told = serde_json::to_value(told)?;
        let Some(paths) = &self.response_fields else { return Ok(told) };
        let found = |path: &String| {
            let value = path.split('/').try_fold(&told, |value, name| value.get(name))?;
            Some((path.clone(), value.clone()))
        };
        Ok(Value::Object(paths.iter().filter_map(found).collect::<Map<_, _>>()))
    }

    fn is_truncated(&self, reason: FinishReason, stop: Option<&StopCause>, usage: &Usage) -> bool {
        let is_bounded = self.max_tokens.is_some_and(|most| usage.completion_tokens >= most);
        reason == FinishReason::Length && stop.is_none() && !is_bounded
    }
}

fn stop_type(reason: FinishReason, stop: Option<&StopCause>) -> &'static str {
    match (reason, stop) {
        (FinishReason::Length, _) => "limit",
        (FinishReason::Stop, Some(StopCause::Text(_))) => "word",
        (FinishReason::Stop, _) => "eos",
        (FinishReason::Cancelled, _) => "none",
    }
}

impl TextEncoder for InfillEncoder {
    type Stream = InfillStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, _: Usage) -> Result<Vec<u8>, EncodeError> {
        let Some(answer) = answers.into_iter().next() else { return serde_json::to_vec(&json!({})) };
        let Answer { output, reason, stop, usage, timings } = answer;
        serde_json::to_vec(&self.chosen(&Told {
            index: 0,
            content: &output.text,
            tokens: [],
            stop: true,
            model: &head.model,
            tokens_predicted: usage.completion_tokens,
            tokens_evaluated: usage.prompt_tokens,
            has_new_line: output.text.contains('\n'),
            truncated: self.is_truncated(reason, stop.as_ref(), &usage),
            stop_type: stop_type(reason, stop.as_ref()),
            stopping_word: stop.as_ref().and_then(StopCause::text).unwrap_or_default(),
            tokens_cached: usage.cached_tokens,
            input_extra_left_out: output.files_left_out,
            timings: timings_of(&timings, &usage),
        })?)
    }

    fn stream(self, head: AnswerHead, _: usize) -> Result<InfillStream, EncodeError> {
        Ok(InfillStream { encoder: self, head, prompt_tokens: 0, files_left_out: 0, predicted: 0, has_new_line: false })
    }
}

/// Writes it in pieces.
#[derive(Debug)]
pub struct InfillStream {
    encoder: InfillEncoder,
    head: AnswerHead,
    prompt_tokens: u32,
    files_left_out: u32,
    predicted: u32,
    has_new_line: bool,
}

#[derive(Serialize)]
struct Piece<'a> {
    index: u32,
    content: &'a str,
    tokens: [i32; 0],
    stop: bool,
    tokens_predicted: u32,
    tokens_evaluated: u32,
}

impl StreamEncoder for InfillStream {
    fn open(&mut self, _: &mut BytesMut) -> Result<(), EncodeError> {
        Ok(())
    }

    fn event(&mut self, _: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Started { prompt_tokens, files_left_out } => {
                (self.prompt_tokens, self.files_left_out) = (*prompt_tokens, *files_left_out);
                Ok(())
            }
            GenerationEvent::Text { text, tokens, .. } => {
                self.predicted += tokens;
                self.has_new_line |= text.contains('\n');
                write_sse_event(
                    out.writer(),
                    &Piece {
                        index: 0,
                        content: text,
                        tokens: [],
                        stop: false,
                        tokens_predicted: self.predicted,
                        tokens_evaluated: self.prompt_tokens,
                    },
                )
            }
            GenerationEvent::Finished { reason, stop, usage, timings } => {
                let last = self.encoder.chosen(&Told {
                    index: 0,
                    content: "",
                    tokens: [],
                    stop: true,
                    model: &self.head.model,
                    tokens_predicted: usage.completion_tokens,
                    tokens_evaluated: usage.prompt_tokens,
                    has_new_line: self.has_new_line,
                    truncated: self.encoder.is_truncated(*reason, stop.as_ref(), usage),
                    stop_type: stop_type(*reason, stop.as_ref()),
                    stopping_word: stop.as_ref().and_then(StopCause::text).unwrap_or_default(),
                    tokens_cached: usage.cached_tokens,
                    input_extra_left_out: self.files_left_out,
                    timings: timings_of(timings, usage),
                })?;
                write_sse_event(out.writer(), &last)
            }
            _ => Ok(()),
        }
    }

    /// The last piece says that it is.
    fn close(&mut self, _: Usage, _: &mut BytesMut) -> Result<(), EncodeError> {
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An error object of strings can always be written.
        let _ = write_sse_event(out.writer(), &ErrorResponse::from(error));
    }
}
