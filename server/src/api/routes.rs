//! Every address, once: how it is asked, what it is counted as, and who answers it.

use std::sync::Arc;

use axum::Router;
use axum::extract::MatchedPath;
use axum::routing::{MethodRouter, get, post};

use self::Asker::{Client, Monitor, Probe};
use self::Method::{Get, GetDelete, Post};
use super::operations::{
    APPLY_TEMPLATE, CANCEL, CHAT, COMPLETION, COUNT_TOKENS, DELETE, DETOKENIZE, EMBEDDINGS, GENERATE, GENERATE_CHAT,
    HEALTH, INFILL, INPUT_ITEMS, MESSAGES, METRICS, MODEL, MODELS, OPENAPI, Operation, PROBE, PROPS, RERANK, RESPONSE,
    RETRIEVE, SCORE, SLOTS, STATS, TOKENIZE, TOKENIZER_INFO,
};
use super::{App, anthropic, generate, grpc, models, openai, openapi, paths, props, ready, responses, scrape, stats};
use crate::metrics::Route;

/// How an address is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// And with HEAD.
    Get,
    /// And with HEAD and DELETE.
    GetDelete,
    Post,
}

/// Who asks there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asker {
    /// Whoever wants an answer.
    Client,
    /// Whoever looks whether the server is well, time and again, so that it is not logged.
    Monitor,
    /// The same, who may be pointed at a port of its own.
    Probe,
}

/// Whose errors are told there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    OpenAi,
    Anthropic,
    Generate,
    Grpc,
}

impl Protocol {
    /// What a body takes in memory once it is read, its texts left out.
    pub(super) fn memory_bytes(self, body: &[u8]) -> usize {
        match self {
            Self::OpenAi | Self::Anthropic | Self::Generate => gantry_core::json_memory_bytes(body),
            Self::Grpc => gantry_generate::grpc::message_memory_bytes(body),
        }
    }
}

/// One address.
struct Address {
    method: Method,
    path: &'static str,
    /// What requests for it are counted as.
    route: Route,
    asker: Asker,
    handler: fn() -> MethodRouter<Arc<App>>,
    protocol: Protocol,
    /// What is told of it to programs, a method each.
    operations: &'static [Operation],
    /// Another server's name for one that stands before it, or an address below it: who asks for what is not here is not told of it.
    is_alias: bool,
}

impl Address {
    const fn new(
        (method, path): (Method, &'static str),
        route: Route,
        asker: Asker,
        handler: fn() -> MethodRouter<Arc<App>>,
    ) -> Self {
        Self { method, path, route, asker, handler, protocol: Protocol::OpenAi, operations: &[], is_alias: false }
    }

    const fn of_anthropic(self) -> Self {
        Self { protocol: Protocol::Anthropic, ..self }
    }

    const fn of_generate(self) -> Self {
        Self { protocol: Protocol::Generate, ..self }
    }

    const fn of_grpc(self) -> Self {
        Self { protocol: Protocol::Grpc, ..self }
    }

    const fn tells(self, operations: &'static [Operation]) -> Self {
        Self { operations, ..self }
    }

    const fn alias(self) -> Self {
        Self { is_alias: true, ..self }
    }
}

/// All of them, in the order in which they are told.
const ADDRESSES: &[Address] = &[
    Address::new((Post, "/v1/chat/completions"), Route::Chat, Client, || post(openai::chat)).tells(&[CHAT]),
    Address::new((Post, "/chat/completions"), Route::Chat, Client, || post(openai::chat)).tells(&[CHAT]).alias(),
    Address::new((Post, "/v1/responses"), Route::Responses, Client, || post(responses::create)).tells(&[RESPONSE]),
    Address::new((GetDelete, "/v1/responses/{id}"), Route::Responses, Client, || {
        get(responses::retrieve).delete(responses::delete)
    })
    .tells(&[RETRIEVE, DELETE])
    .alias(),
    Address::new((Post, "/v1/responses/{id}/cancel"), Route::Responses, Client, || post(responses::cancel))
        .tells(&[CANCEL])
        .alias(),
    Address::new((Get, "/v1/responses/{id}/input_items"), Route::Responses, Client, || get(responses::input_items))
        .tells(&[INPUT_ITEMS])
        .alias(),
    Address::new((Post, "/v1/completions"), Route::Completions, Client, || post(openai::completion))
        .tells(&[COMPLETION]),
    Address::new((Post, "/infill"), Route::Infill, Client, || post(openai::infill)).tells(&[INFILL]),
    Address::new((Post, "/v1/embeddings"), Route::Embeddings, Client, || post(openai::embeddings)).tells(&[EMBEDDINGS]),
    Address::new((Post, "/v1/rerank"), Route::Rerank, Client, || post(openai::rerank)).tells(&[RERANK]),
    Address::new((Post, "/v1/reranking"), Route::Rerank, Client, || post(openai::rerank)).tells(&[RERANK]).alias(),
    Address::new((Post, "/rerank"), Route::Rerank, Client, || post(openai::rerank)).tells(&[RERANK]).alias(),
    Address::new((Post, "/reranking"), Route::Rerank, Client, || post(openai::rerank)).tells(&[RERANK]).alias(),
    Address::new((Post, "/v2/rerank"), Route::Rerank, Client, || post(openai::rerank)).tells(&[RERANK]).alias(),
    Address::new((Post, "/v1/score"), Route::Score, Client, || post(openai::score)).tells(&[SCORE]),
    Address::new((Post, "/score"), Route::Score, Client, || post(openai::score)).tells(&[SCORE]).alias(),
    Address::new((Post, "/v1/messages"), Route::Messages, Client, || post(anthropic::messages))
        .tells(&[MESSAGES])
        .of_anthropic(),
    Address::new((Post, "/v1/messages/count_tokens"), Route::Tokenizer, Client, || post(anthropic::count_tokens))
        .tells(&[COUNT_TOKENS])
        .of_anthropic(),
    Address::new((Post, "/generate"), Route::Generate, Client, || post(generate::generate))
        .tells(&[GENERATE])
        .of_generate(),
    Address::new((Post, "/chat"), Route::GenerateChat, Client, || post(generate::chat))
        .tells(&[GENERATE_CHAT])
        .of_generate(),
    // What this protocol asks and is answered there is a part of what OpenAI's is.
    Address::new((Post, "/embeddings"), Route::Embeddings, Client, || post(openai::embeddings))
        .tells(&[EMBEDDINGS])
        .alias(),
    Address::new((Post, "/tokenize"), Route::Tokenizer, Client, || post(openai::tokenize)).tells(&[TOKENIZE]),
    Address::new((Post, "/detokenize"), Route::Tokenizer, Client, || post(openai::detokenize)).tells(&[DETOKENIZE]),
    Address::new((Get, "/tokenizer_info"), Route::Other, Client, || get(props::tokenizer_info))
        .tells(&[TOKENIZER_INFO]),
    Address::new((Post, "/apply-template"), Route::Tokenizer, Client, || post(openai::apply_template))
        .tells(&[APPLY_TEMPLATE]),
    Address::new((Get, "/v1/models"), Route::Models, Client, || get(models::list)).tells(&[MODELS]),
    Address::new((Get, "/models"), Route::Models, Client, || get(models::list)).tells(&[MODELS]).alias(),
    Address::new((Get, "/v1/models/{id}"), Route::Models, Client, || get(models::one)).tells(&[MODEL]).alias(),
    Address::new((Get, "/v1/models/{owner}/{id}"), Route::Models, Client, || get(models::one_of_owner))
        .tells(&[MODEL])
        .alias(),
    Address::new((Get, "/props"), Route::Other, Client, || get(props::props)).tells(&[PROPS]),
    Address::new((Get, "/slots"), Route::Other, Client, || get(props::slots)).tells(&[SLOTS]),
    Address::new((Get, "/openapi.json"), Route::Other, Client, || get(openapi::document)).tells(&[OPENAPI]),
    Address::new((Get, "/server/stats"), Route::Other, Monitor, || get(stats::stats)).tells(&[STATS]),
    Address::new((Get, "/health"), Route::Other, Monitor, || get(ready::health)).tells(&[HEALTH]),
    Address::new((Get, "/v1/health"), Route::Other, Monitor, || get(ready::health)).tells(&[HEALTH]).alias(),
    Address::new((Get, "/healthz"), Route::Other, Probe, || get(ready::alive)).tells(&[PROBE]),
    Address::new((Get, "/readyz"), Route::Other, Probe, || get(ready::ready)).tells(&[PROBE]),
    Address::new((Get, "/metrics"), Route::Other, Probe, || get(scrape)).tells(&[METRICS]),
];

/// Those of gRPC, which its own port answers.
const CALLS: &[Address] = &[
    Address::new((Post, "/gantry.inference.v1.Inference/Generate"), Route::Generate, Client, || post(grpc::generate))
        .of_grpc(),
    Address::new((Post, "/gantry.inference.v1.Inference/GenerateStream"), Route::Generate, Client, || {
        post(grpc::generate_stream)
    })
    .of_grpc(),
    Address::new((Post, "/gantry.inference.v1.Inference/Chat"), Route::GenerateChat, Client, || post(grpc::chat))
        .of_grpc(),
    Address::new((Post, "/gantry.inference.v1.Inference/ChatStream"), Route::GenerateChat, Client, || {
        post(grpc::chat_stream)
    })
    .of_grpc(),
    Address::new((Post, "/gantry.inference.v1.Inference/Embeddings"), Route::Embeddings, Client, || {
        post(grpc::embeddings)
    })
    .of_grpc(),
    Address::new((Post, "/grpc.health.v1.Health/Check"), Route::Other, Monitor, || post(grpc::health)).of_grpc(),
    Address::new((Post, "/grpc.health.v1.Health/Watch"), Route::Other, Monitor, || post(grpc::health)).of_grpc(),
    Address::new((Post, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), Route::Other, Client, || {
        post(grpc::reflection)
    })
    .of_grpc(),
    Address::new(
        (Post, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        Route::Other,
        Client,
        || post(grpc::reflection),
    )
    .of_grpc(),
];

/// All addresses, and what is said of a wrong method and an unknown address.
pub(super) fn all() -> Router<Arc<App>> {
    let gets = of(|address| address.method == Get).method_not_allowed_fallback(paths::takes_get);
    let posts = of(|address| address.method == Post).method_not_allowed_fallback(paths::takes_post);
    let deletes = of(|address| address.method == GetDelete).method_not_allowed_fallback(paths::takes_get_and_delete);
    posts.merge(gets).merge(deletes).fallback(paths::unknown_url)
}

/// What the port of probes and metrics answers.
pub(super) fn probes() -> Router<Arc<App>> {
    of(|address| address.asker == Probe)
}

/// What the port of gRPC answers, and what is said of a method that is not there.
pub(super) fn calls() -> Router<Arc<App>> {
    let calls = CALLS.iter().fold(Router::new(), |router, one| router.route(one.path, (one.handler)()));
    calls.method_not_allowed_fallback(paths::takes_post).fallback(paths::unknown_call)
}

/// The methods of gRPC, as told to those who ask for one that is not there.
pub(super) fn told_calls() -> impl Iterator<Item = &'static str> {
    CALLS.iter().filter(|address| address.asker == Client).map(|address| address.path)
}

fn of(wanted: impl Fn(&&Address) -> bool) -> Router<Arc<App>> {
    ADDRESSES.iter().filter(wanted).fold(Router::new(), |router, one| router.route(one.path, (one.handler)()))
}

/// What is told of each address to programs: its path, its operations, whether a key is needed, and whose errors are told there.
pub(super) fn described() -> impl Iterator<Item = (&'static str, &'static [Operation], bool, Protocol)> {
    ADDRESSES.iter().map(|one| (one.path, one.operations, one.asker == Client, one.protocol))
}

/// The addresses with this method that are told to those who ask for what is not here.
pub(super) fn told(method: Method) -> impl Iterator<Item = &'static str> {
    ADDRESSES.iter().filter(move |address| address.method == method && !address.is_alias).map(|address| address.path)
}

/// Whether whoever asks there must show a key, where there are keys: all but those who look whether the server is well.
pub(super) fn needs_key(matched: Option<&MatchedPath>) -> bool {
    counted_as(matched).1
}

/// What a request is counted as, and whether it is logged.
pub(super) fn counted_as(matched: Option<&MatchedPath>) -> (Route, bool) {
    address_of(matched).map_or((Route::Other, true), |address| (address.route, address.asker == Client))
}

/// Whose errors a request is told.
pub(super) fn protocol_of(matched: Option<&MatchedPath>) -> Protocol {
    address_of(matched).map_or(Protocol::OpenAi, |address| address.protocol)
}

fn address_of(matched: Option<&MatchedPath>) -> Option<&'static Address> {
    matched.and_then(|path| ADDRESSES.iter().chain(CALLS).find(|address| address.path == path.as_str()))
}
