//! What is asked and answered at an address, as told to programs: each operation once, whatever number of addresses it has.
//!
//! What a body may have and what an answer has is the protocols' to say, which read and write them; here stands only which goes
//! where. Absent: paths, keys and errors, which [`super::routes`] and [`super::openapi`] know.

use gantry_openai::parameters::Place;
use gantry_openai::{ChatCompletion, EmbeddingList, Model, ModelList, RerankResponse, ScoreResponse, TextCompletion};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::props;
use super::stats::MetricsSnapshot;

/// Writes a schema, with those that it refers to in the generator.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// What a request has beside its path.
#[derive(Clone, Copy)]
pub(super) enum Asks {
    Nothing,
    /// A body, with the parameters of a place.
    Place(Place),
    /// Another body.
    Body(SchemaOf),
    /// Parameters in its address.
    Query(fn() -> Vec<(&'static str, Value)>),
}

/// What comes where it does well.
#[derive(Clone, Copy)]
pub(super) enum Answers {
    Json(SchemaOf),
    /// The same, or where it is asked for events as they come.
    JsonOrEvents(SchemaOf),
    /// Text of this type.
    Text(&'static str),
}

/// One method at one address, or several.
#[derive(Clone, Copy)]
pub(super) struct Operation {
    pub(super) method: &'static str,
    pub(super) summary: &'static str,
    pub(super) asks: Asks,
    pub(super) answers: Answers,
    /// The statuses of errors beside those that everything has.
    pub(super) errors: &'static [u16],
    /// What those have, where it is not an error of the protocol's.
    pub(super) own_error: Option<SchemaOf>,
}

/// What a request for work may come to: refused for what it says, for now, or since it cannot be done.
const OF_WORK: &[u16] = &[400, 404, 408, 413, 415, 422, 429, 503];
/// The same of a question for what is there.
const OF_QUESTION: &[u16] = &[503];
const OF_STORED: &[u16] = &[400, 404, 503];

const fn work(summary: &'static str, asks: Asks, answers: Answers) -> Operation {
    Operation { method: "post", summary, asks, answers, errors: OF_WORK, own_error: None }
}

const fn question(summary: &'static str, answer: SchemaOf) -> Operation {
    let (asks, answers) = (Asks::Nothing, Answers::Json(answer));
    Operation { method: "get", summary, asks, answers, errors: OF_QUESTION, own_error: None }
}

const fn of_stored(method: &'static str, summary: &'static str, asks: Asks, answer: SchemaOf) -> Operation {
    Operation { method, summary, asks, answers: Answers::Json(answer), errors: OF_STORED, own_error: None }
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// An object whose names are another server's, for its clients.
fn object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object"})
}

pub(super) const CHAT: Operation =
    work("Answers a chat", Asks::Place(Place::Chat), Answers::JsonOrEvents(of::<ChatCompletion>));
pub(super) const COMPLETION: Operation =
    work("Goes on with texts", Asks::Place(Place::Text), Answers::JsonOrEvents(of::<TextCompletion>));
pub(super) const INFILL: Operation =
    work("Fills a gap within a text", Asks::Place(Place::Infill), Answers::JsonOrEvents(gantry_openai::infill_schema));
pub(super) const EMBEDDINGS: Operation =
    work("Gives the vectors of texts", Asks::Place(Place::Embeddings), Answers::Json(of::<EmbeddingList>));
pub(super) const RERANK: Operation =
    work("Ranks documents by a query", Asks::Place(Place::Rerank), Answers::Json(of::<RerankResponse>));
pub(super) const SCORE: Operation =
    work("Tells how near texts are to each other", Asks::Place(Place::Score), Answers::Json(of::<ScoreResponse>));
pub(super) const TOKENIZE: Operation =
    work("Tells the tokens of a text", Asks::Place(Place::Tokenize), Answers::Json(gantry_openai::tokenize_schema));
pub(super) const DETOKENIZE: Operation =
    work("Tells the text of tokens", Asks::Place(Place::Detokenize), Answers::Json(gantry_openai::detokenize_schema));
pub(super) const APPLY_TEMPLATE: Operation = work(
    "Tells the prompt that a chat is to the model",
    Asks::Place(Place::Template),
    Answers::Json(gantry_openai::apply_template_schema),
);
pub(super) const RESPONSE: Operation = work(
    "Answers items",
    Asks::Body(gantry_responses::request_schema),
    Answers::JsonOrEvents(gantry_responses::response_schema),
);
pub(super) const RETRIEVE: Operation = of_stored(
    "get",
    "Tells a stored response",
    Asks::Query(gantry_responses::retrieval_parameters),
    gantry_responses::response_schema,
);
pub(super) const DELETE: Operation =
    of_stored("delete", "Deletes a stored response", Asks::Nothing, gantry_responses::deleted_schema);
pub(super) const CANCEL: Operation =
    of_stored("post", "Ends a response in the background", Asks::Nothing, gantry_responses::response_schema);
pub(super) const INPUT_ITEMS: Operation = of_stored(
    "get",
    "Tells the items that a stored response answers",
    Asks::Query(gantry_responses::page_parameters),
    gantry_responses::page_schema,
);
pub(super) const MESSAGES: Operation = work(
    "Answers messages",
    Asks::Body(gantry_anthropic::messages_schema),
    Answers::JsonOrEvents(gantry_anthropic::message_schema),
);
pub(super) const COUNT_TOKENS: Operation = work(
    "Counts the tokens of messages",
    Asks::Body(gantry_anthropic::count_tokens_schema),
    Answers::Json(gantry_anthropic::count_schema),
);
pub(super) const GENERATE: Operation = work(
    "Goes on with a text, by typed events",
    Asks::Body(gantry_generate::generate_request_schema),
    Answers::JsonOrEvents(gantry_generate::generate_schema),
);
pub(super) const GENERATE_CHAT: Operation = work(
    "Answers a chat, by typed events",
    Asks::Body(gantry_generate::chat_request_schema),
    Answers::JsonOrEvents(gantry_generate::chat_schema),
);
pub(super) const MODELS: Operation = question("Lists the names of what is served", of::<ModelList>);
pub(super) const MODEL: Operation =
    Operation { errors: &[404, 503], ..question("Tells what is served by a name", of::<Model>) };
pub(super) const PROPS: Operation = question("Tells what llama-server's clients ask first", object);
pub(super) const SLOTS: Operation = Operation {
    asks: Asks::Query(props::slots_parameters),
    ..question("Tells which sequences are in use", props::slots_schema)
};
pub(super) const STATS: Operation =
    Operation { errors: &[], ..question("Tells how the server does, at a glance", of::<MetricsSnapshot>) };
pub(super) const TOKENIZER_INFO: Operation = question("Tells what vLLM's clients ask first", object);
pub(super) const OPENAPI: Operation = Operation { errors: &[], ..question("Tells this document", object) };
pub(super) const HEALTH: Operation =
    Operation { own_error: Some(object), ..question("Tells whether a model is loaded", object) };
pub(super) const PROBE: Operation =
    Operation { own_error: Some(object), ..question("Tells whether the server is well", object) };
pub(super) const METRICS: Operation = Operation {
    answers: Answers::Text(crate::metrics::METRICS_CONTENT_TYPE),
    errors: &[],
    ..question("Tells what was counted, in the text form of OpenMetrics", object)
};
