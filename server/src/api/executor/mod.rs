//! Carries requests out, whatever protocol they come by: the one owner of admission, budgets, observation, submission and
//! cancellation.
//!
//! A body is read within limits ([`super::body`]), decoded by its protocol, and submitted to the version that is active then
//! ([`submit`]); what comes of it the protocol's encoder writes, whole ([`written`]) or piece by piece ([`stream`]), and a
//! [`RequestRecord`] counts and logs it when it ends. A response that is dropped drops its [`Choices`], which cancels them; one that
//! is answered in the [`background`] has no client that could drop it.
//!
//! The version is chosen once, and everything after (the model's name, the header, the fingerprint, each token) comes from that
//! one. Only where a version refuses because it was retired between the choice and the submission is another one chosen; it has
//! seen nothing of the request. Absent: what any protocol looks like, and which texts are computed together, which is the
//! engine's.

mod background;
mod choices;
mod record;
mod scheduling;
mod stream;
mod submit;
mod written;

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use gantry_core::{
    Answer, AnswerHead, ApiError, ErrorCode, ErrorKind, PooledEncoder, PooledRequest, PooledSize, PromptEncoder,
    RequestError, TextEncoder, TextRequest, Usage, json_memory_bytes,
};
use gantry_engine::Pooling;
use gantry_responses::{ResolvedRequest, ResponseId, StoredResponses, decode_responses};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use uuid::Uuid;

use super::App;
use super::body;
use super::budget::{Share, Short};
use super::errors::{Failure, unanswered};
use super::middleware::CountedLater;
use super::stored::{Asker, Keep};
use crate::limits::{BODY_BUDGET_WAIT, EMBEDDING_ANSWER_BYTES_PER_NUMBER, MAX_BODY_JSON_BYTES, SMALL_BODY_JSON_BYTES};
use crate::metrics::Route;
use crate::output::Collected;
use crate::response_store::unix_seconds;
use crate::version::{GenerationError, PoolRequest, Version};
pub(super) use background::Background;
use choices::{Choices, Uncollected, best_of_each, share_prompt_tokens, sum_of};
use record::{Origin, RequestRecord};
pub(super) use written::Writers;

/// The header that names the version that answered.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-gantry-version");

/// A request for text that a version has taken.
struct Submitted {
    choices: Choices,
    /// How many of them belong to each prompt.
    of_each_prompt: usize,
    /// How many of those are told, the best: all where the answer is streamed.
    told: usize,
    head: AnswerHead,
    record: RequestRecord,
    /// What the client calls its prompt.
    prompt_param: &'static str,
}

/// Answers a request for text that `decode` reads.
pub(super) async fn text<E: TextEncoder>(
    app: &Arc<App>,
    route: Route,
    request: Request,
    decode: impl FnOnce(&[u8]) -> Result<(TextRequest, E), ApiError>,
) -> Result<Response, Failure> {
    let (origin, (asked, encoder), share, _) = read(app, request, decode).await?;
    answer(app, route, origin, share, asked, encoder, None).await
}

/// Answers a request for a response, which may refer to others that are kept, and may be kept itself.
pub(super) async fn response(app: &Arc<App>, request: Request) -> Result<Response, Failure> {
    let asker = Asker::of(app, &request);
    let can_store = asker.is_some();
    let (origin, asked, mut share, decoding) = read(app, request, |body| decode_responses(body, can_store)).await?;
    let place = asked.is_background().then(|| app.background.place()).transpose()?;
    let stored = match &asker {
        Some(asker) => asker.all(asked.refers_to(), &mut share).await?,
        None => StoredResponses::new(),
    };
    let id = ResponseId::new(Uuid::new_v4().as_u128());
    let ResolvedRequest { request: mut asked, encoder, input } = asked.resolve(id, stored)?;
    // Until here its items were values.
    drop(decoding);
    match (place, asker.zip(input).map(|(asker, input)| asker.keep(id, input))) {
        (Some(place), Some(mut keep)) => {
            // What comes of it is written as it comes, so that it cannot begin again.
            asked.is_streamed = true;
            let (version, submitted) = submit(app, Route::Responses, origin, share, asked, Some(&mut keep)).await?;
            let response = app.background.respond(submitted, encoder, keep, place).await;
            Ok(of_version(response, &version))
        }
        (_, keep) => answer(app, Route::Responses, origin, share, asked, encoder, keep).await,
    }
}

/// Answers a request while its client waits.
async fn answer<E: TextEncoder>(
    app: &Arc<App>,
    route: Route,
    origin: Origin,
    share: Share,
    asked: TextRequest,
    encoder: E,
    mut keep: Option<Keep>,
) -> Result<Response, Failure> {
    let is_streamed = asked.is_streamed;
    let (version, submitted) = submit(app, route, origin, share, asked, keep.as_mut()).await?;
    let response = if is_streamed {
        stream::respond(submitted, encoder, &version, keep).await
    } else {
        whole(app, submitted, encoder, &version, keep).await
    };
    Ok(of_version(response, &version))
}

/// Has a version take a request; what it answers is kept meanwhile, where it is to be.
async fn submit(
    app: &Arc<App>,
    route: Route,
    origin: Origin,
    share: Share,
    mut asked: TextRequest,
    keep: Option<&mut Keep>,
) -> Result<(Arc<Version>, Submitted), Failure> {
    origin.scheduling.apply(&mut asked.params);
    let (prompt_param, priority) = (asked.prompt_param, asked.params.priority);
    let (of_each_prompt, told) = (asked.best_of as usize, asked.choices as usize);
    let (version, choices) = submit::text(app, origin.peer, asked).await?;
    let id = keep.as_ref().map(|keep| keep.id());
    if let Some(keep) = keep {
        keep.input().await?;
    }
    let record = RequestRecord::new(app, route, &version, origin, priority, choices.total(), share);
    let head = head_of(&version, id);
    Ok((version, Submitted { choices, of_each_prompt, told, head, record, prompt_param }))
}

/// Answers a request for what a prompt is to the model, which `decode` reads.
pub(super) async fn prompt<E: PromptEncoder>(
    app: &Arc<App>,
    route: Route,
    request: Request,
    decode: impl FnOnce(&[u8]) -> Result<(TextRequest, E), ApiError>,
) -> Result<Response, Failure> {
    let (origin, (mut asked, encoder), share, _) = read(app, request, decode).await?;
    origin.scheduling.apply(&mut asked.params);
    let (prompt_param, priority) = (asked.prompt_param, asked.params.priority);
    let (version, choices) = submit::text(app, origin.peer, asked).await?;
    let record = RequestRecord::new(app, route, &version, origin, priority, choices.total(), share);
    let mut collected = Collected::new(&app.output);
    let result = match choices.prompt(&mut collected).await {
        Ok(shown) => {
            let bytes = collected.bytes();
            let write = move || encoder.whole(shown);
            let written = app.writers.write(bytes, collected, Collected::become_written, write).await;
            written.map(|body| (body, Usage::default()))
        }
        Err(uncollected) => Err(uncollected.told(prompt_param, &version)),
    };
    Ok(of_version(record.settle(result), &version))
}

/// Answers a request for vectors or scores that `decode` reads; they come whole.
pub(super) async fn pooled<E: PooledEncoder>(
    app: &Arc<App>,
    route: Route,
    request: Request,
    decode: impl FnOnce(&[u8]) -> Result<(PooledRequest, E), ApiError>,
) -> Result<Response, Failure> {
    let (origin, (asked, encoder), share, _) = read(app, request, decode).await?;
    let PooledRequest { model, work, prompt_param, priority } = asked;
    let version = app.version_for(model.as_deref())?;
    let pooled = version.model().and_then(|model| model.pooled);
    let (width, ranks) = pooled.map_or((0, true), |pooled| (pooled.width, pooled.pooling == Pooling::Rank));
    let work = work.work(ranks);
    // Where nothing is embedded at all, that is said first, at submission.
    if width > 0 {
        encoder.check(width, version.spec().runtime.cuts_vectors)?;
    }
    let (bytes, answer_share) = match encoder.size(width) {
        // What is told again came in a body, and is counted there.
        PooledSize::Bytes(bytes) => (bytes, None),
        PooledSize::Numbers(numbers) => {
            let bytes = numbers.saturating_mul(EMBEDDING_ANSWER_BYTES_PER_NUMBER);
            check_size(app, bytes, work.len(), prompt_param)?;
            (bytes, Some(app.answers.take(origin.peer, bytes, BODY_BUDGET_WAIT).await?))
        }
    };
    let (priority, timeout_ms) = (origin.scheduling.priority_over(priority), origin.scheduling.queue_timeout_ms);
    let asked = PoolRequest { work, priority, timeout_ms };
    let (version, pooled) = submit::pooled(app, origin.peer, model.as_deref(), asked).await?;
    let record = RequestRecord::new(app, route, &version, origin, priority, 0, share);
    let result = match pooled.output().await {
        Ok(output) => {
            let usage = Usage { prompt_tokens: output.prompt_tokens, ..Usage::default() };
            let head = head_of(&version, None);
            let write = move || encoder.whole(head, output);
            app.writers.write(bytes, answer_share, |_, _| Ok(()), write).await.map(|body| (body, usage))
        }
        Err(error) => {
            let ends = app.is_draining() && error == GenerationError::Retired;
            let error = if ends { GenerationError::ServerEnds } else { renamed(error, &encoder) };
            Err(unanswered(error, prompt_param, version.retry_after()))
        }
    };
    Ok(of_version(record.settle(result), &version))
}

/// An error of a text, by what the client calls it.
fn renamed(error: GenerationError, encoder: &impl PooledEncoder) -> GenerationError {
    match error {
        GenerationError::Request(RequestError::InvalidRequest { param: Some(param), code, message }) => {
            let told = encoder.told_param(&param).unwrap_or_else(|| param.clone());
            let message = message.replace(&format!("`{param}`"), &format!("`{told}`"));
            RequestError::InvalidRequest { param: Some(told), code, message }.into()
        }
        other => other,
    }
}

/// Reads a request's head and body, and has the body decoded. The last part is to be kept for as long as what was decoded
/// holds values of JSON.
async fn read<D>(
    app: &App,
    request: Request,
    decode: impl FnOnce(&[u8]) -> Result<D, ApiError>,
) -> Result<(Origin, D, Share, Option<OwnedSemaphorePermit>), Failure> {
    let origin = Origin::read(&request)?;
    let (body, share) = body::read(&app.bodies, request).await?;
    let decoding = room_to_decode(app, &body).await?;
    let decoded = decode(&body)?;
    Ok((origin, decoded, share, decoding))
}

/// The right to make values of a body, which may take far more memory than its text.
async fn room_to_decode(app: &App, body: &[u8]) -> Result<Option<OwnedSemaphorePermit>, Failure> {
    let bytes = json_memory_bytes(body);
    if bytes > MAX_BODY_JSON_BYTES {
        let message = format!(
            "The values of the body's JSON take about {} MiB of memory, and {} MiB is the limit; split the request, or send \
             prompts as text where they are token ids.",
            bytes >> 20,
            MAX_BODY_JSON_BYTES >> 20
        );
        return Err(ApiError::new(413, ErrorKind::InvalidRequestError, ErrorCode::RequestTooLarge, message).into());
    }
    // Of these no more are made at a time than there are threads, and none waits behind a large one.
    if bytes <= SMALL_BODY_JSON_BYTES {
        return Ok(None);
    }
    let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX);
    match timeout(BODY_BUDGET_WAIT, Arc::clone(&app.decoding).acquire_many_owned(kib)).await {
        // Nobody closes it.
        Ok(permit) => Ok(permit.ok()),
        Err(_) => Err(Failure::no_room_for_body(Short::Everyone)),
    }
}

/// Vectors of so many texts, which are made here, have a limit of their own.
fn check_size(app: &App, bytes: usize, count: usize, param: &'static str) -> Result<(), ApiError> {
    let most = app.limits.vectors_bytes / 2;
    if bytes <= most {
        return Ok(());
    }
    let inputs = most.saturating_mul(count) / bytes;
    let message = format!(
        "The vectors of {count} inputs are more than may be given at once: send no more than {inputs} in a request."
    );
    Err(ApiError::invalid(Some(param.into()), ErrorCode::AnswerTooLarge, message))
}

async fn whole(
    app: &App,
    submitted: Submitted,
    encoder: impl TextEncoder,
    version: &Version,
    keep: Option<Keep>,
) -> Response {
    let Submitted { choices, of_each_prompt, told, head, mut record, prompt_param } = submitted;
    let mut collected = Collected::new(&app.output);
    let gathered = match choices.collect_all(&mut collected).await {
        Ok(gathered) => gathered,
        Err(uncollected) => return record.settle(Err(uncollected.told(prompt_param, version))),
    };
    record.first_tokens_of(&gathered);
    let mut answers: Vec<Answer> = gathered.into_iter().map(|gathered| gathered.answer).collect();
    answers.iter().for_each(|answer| record.timed(&answer.timings));
    let usages: Vec<_> = answers.iter().map(|answer| answer.usage).collect();
    let usage = sum_of(&usages, of_each_prompt);
    share_prompt_tokens(&mut answers, of_each_prompt);
    let answers = best_of_each(answers, of_each_prompt, told);
    let bytes = collected.bytes();
    let write = move || encoder.whole(head, answers, usage);
    let written = app.writers.write(bytes, collected, Collected::become_written, write).await;
    if let (Some(mut keep), Ok(body)) = (keep, &written) {
        keep.try_response(body).await;
    }
    record.settle(written.map(|body| (body, usage)))
}

impl Uncollected {
    /// As a client is told it that calls its prompt so.
    fn told(self, prompt_param: &'static str, version: &Version) -> Failure {
        match self {
            Self::Failed(error) => unanswered(error, prompt_param, version.retry_after()),
            Self::TooMuch(what) => Failure::too_much_to_collect(what),
        }
    }
}

/// An answer of a version, which is counted when it ends.
fn of_version(mut response: Response, version: &Version) -> Response {
    response.extensions_mut().insert(CountedLater);
    if let Ok(name) = HeaderValue::from_str(&version.spec().name) {
        response.headers_mut().insert(VERSION_HEADER, name);
    }
    response
}

/// `id`: of the response that the answer is kept as.
fn head_of(version: &Version, id: Option<ResponseId>) -> AnswerHead {
    AnswerHead {
        id: id.unwrap_or_else(|| ResponseId::new(Uuid::new_v4().as_u128())).digits(),
        created: unix_seconds(),
        model: version.spec().served_name.clone(),
        version: version.spec().name.clone(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::response::IntoResponse as _;

    use super::*;
    use crate::api::AppSettings;
    use crate::front::FrontLimits;
    use crate::output::Output;
    use crate::routing::Router;

    /// What holds the room may be a request that waits for a store.
    #[tokio::test(start_paused = true)]
    async fn a_small_body_is_decoded_though_large_ones_hold_all_the_room_and_a_large_one_is_told_to_come_again() {
        let limits = FrontLimits::default();
        let app = App::new(Router::new(), Output::new(limits.output_bytes), limits, AppSettings::default(), None, None);
        let large = format!("[{}]", vec!["{}"; 2000].join(","));
        let first = room_to_decode(&app, large.as_bytes()).await.unwrap();
        assert!(first.is_some());
        let rest = u32::try_from(app.decoding.available_permits()).unwrap();
        let rest = Arc::clone(&app.decoding).acquire_many_owned(rest).await.unwrap();
        assert!(room_to_decode(&app, br#"{"messages": []}"#).await.unwrap().is_none());
        let refused = room_to_decode(&app, large.as_bytes()).await.map(drop).unwrap_err().into_response();
        assert_eq!(refused.status(), 503);
        assert!(refused.headers().contains_key("retry-after"));
        drop(rest);
        assert!(room_to_decode(&app, large.as_bytes()).await.unwrap().is_some());
    }
}
