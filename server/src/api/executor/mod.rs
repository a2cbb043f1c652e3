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
//! seen nothing of the request; and where one that makes room for another gives a request back of which nothing was told, which waits
//! for the next one then, as do those that come meanwhile ([`Pending`]). Absent: what any protocol looks like, and which texts are computed together, which is the
//! engine's.

mod background;
mod choices;
mod conversation;
mod record;
mod scheduling;
mod stream;
mod submit;
mod written;

use std::sync::Arc;

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use gantry_core::{
    Answer, AnswerHead, ApiError, ErrorCode, ErrorKind, PooledEncoder, PooledRequest, PooledSize, Priority,
    PromptEncoder, RequestError, StreamEncoder, TextEncoder, TextRequest, Usage,
};
use gantry_engine::Pooling;
use gantry_responses::{ResolvedRequest, ResponseId, StoredResponses, decode_responses};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use uuid::Uuid;

use super::App;
use super::body;
use super::budget::{Share, Short};
use super::errors::{Failure, unanswered_by};
use super::middleware::CountedLater;
use super::routes;
use super::stored::{Asker, Keep};
use crate::limits::{BODY_BUDGET_WAIT, EMBEDDING_ANSWER_BYTES_PER_NUMBER, MAX_BODY_JSON_BYTES, SMALL_BODY_JSON_BYTES};
use crate::metrics::Route;
use crate::output::Collected;
use crate::response_store::unix_seconds;
use crate::version::{GenerationError, PoolRequest, Version};
pub(super) use background::Background;
use choices::{Choices, Uncollected, best_of_each, share_prompt_tokens, sum_of};
use record::{Origin, RequestRecord};
pub(super) use scheduling::QUEUE_TIMEOUT_HEADER;
use submit::{Asking, PoolTurn};
pub(super) use written::Writers;

/// The header that names the version that answered.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-gantry-version");

/// What it says in a stream that was opened before any version had the request.
const PENDING_VERSION: &str = "pending";

/// A request for text of which its client was told nothing yet.
struct Pending<E> {
    app: Arc<App>,
    route: Route,
    asking: Asking,
    encoder: E,
    keep: Option<Keep>,
    /// `None` while a version has it.
    known: Option<Known>,
    of_each_prompt: usize,
    told: usize,
    prompt_param: &'static str,
    priority: Priority,
    /// Whether how it stands in line is told in events of their own.
    tells_queue: bool,
}

/// What is known of it.
// Behind the box of its request.
#[allow(clippy::large_enum_variant)]
enum Known {
    /// No version has had it.
    New(Origin, Share),
    /// One had, and gave it back.
    Returned(RequestRecord),
}

/// What became of it.
// One at a time, and told at once.
#[allow(clippy::large_enum_variant)]
enum Tried<E> {
    Answered(Response),
    /// It is not answered, which its client was not told.
    Refused(Refused<E>),
    /// The version that had it gave it back.
    GaveWay(Box<Pending<E>>),
}

/// A request that is not answered, and how its client is told.
struct Refused<E> {
    failure: Failure,
    record: Option<RequestRecord>,
    encoder: E,
    head: Option<AnswerHead>,
}

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
            let (version, submitted) = submit(app, Route::Responses, origin, share, asked, &mut keep).await?;
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
    mut asked: TextRequest,
    encoder: E,
    keep: Option<Keep>,
) -> Result<Response, Failure> {
    origin.scheduling.apply(&mut asked.params);
    let mut pending = Box::new(Pending {
        app: Arc::clone(app),
        route,
        encoder,
        keep,
        of_each_prompt: asked.best_of as usize,
        told: asked.choices as usize,
        prompt_param: asked.prompt_param,
        priority: asked.params.priority,
        tells_queue: origin.scheduling.tells_queue,
        asking: Asking::new(&origin, asked, true),
        known: Some(Known::New(origin, share)),
    });
    loop {
        // Who is told how it stands has its stream opened for that.
        if pending.asking.is_streamed && app.router.held().is_held() {
            if let Err(refused) = app.check_first(pending.asking.model()) {
                return Ok(pending.refuse(refused.into()).told());
            }
            return Ok(stream::held(pending));
        }
        if let Err(failure) = pending.take_turn().await {
            return Ok(pending.refuse(failure).told());
        }
        match pending.attempt().await {
            Tried::Answered(response) => return Ok(response),
            Tried::Refused(refused) => return Ok(refused.told()),
            Tried::GaveWay(returned) => pending = returned,
        }
    }
}

impl<E: TextEncoder> Pending<E> {
    /// Stands in line, where requests have to, until it is its turn.
    async fn take_turn(&mut self) -> Result<(), Failure> {
        if self.asking.enter(&self.app)? {
            self.asking.turn(&self.app).await?;
        }
        Ok(())
    }

    /// Has the version that is active answer.
    async fn attempt(mut self: Box<Self>) -> Tried<E> {
        let (version, choices) = match self.asking.try_submit(&self.app).await {
            Ok(Some(taken)) => taken,
            Ok(None) => return Tried::GaveWay(self),
            Err(failure) => return Tried::Refused(self.refuse(failure)),
        };
        let id = self.keep.as_ref().map(Keep::id);
        if let (Some(keep), Some(Known::New(..))) = (&mut self.keep, &self.known)
            && let Err(failure) = keep.input().await
        {
            return Tried::Refused(self.refuse(failure));
        }
        let held = self.asking.held.unwrap_or_default();
        let mut record = match self.known.take() {
            Some(Known::New(origin, share)) => {
                RequestRecord::new(&self.app, self.route, &version, origin, self.priority, choices.total(), share)
            }
            Some(Known::Returned(record)) => record,
            None => return Tried::Refused(self.refuse(Failure::internal(&"nothing is known of the request"))),
        };
        record.moved_to(&version, held);
        record.begins(&version, self.asking.prompt());
        let head = head_of(&version, id);
        let Self { of_each_prompt, told, prompt_param, .. } = *self;
        let submitted = Submitted { choices, of_each_prompt, told, head, record, prompt_param };
        let tried = if self.asking.is_streamed {
            stream::respond(submitted, self, &version).await
        } else {
            whole(submitted, self, &version).await
        };
        match tried {
            Tried::Answered(response) => Tried::Answered(of_version(response, &version)),
            other => other,
        }
    }

    /// The version that had it gives it back.
    fn returned(mut self: Box<Self>, record: RequestRecord) -> Tried<E> {
        self.known = Some(Known::Returned(record));
        self.asking.gave_way();
        Tried::GaveWay(self)
    }

    fn refuse(self, failure: Failure) -> Refused<E> {
        let record = match self.known {
            Some(Known::Returned(record)) => Some(record),
            Some(Known::New(..)) | None => None,
        };
        Refused { failure, record, encoder: self.encoder, head: None }
    }
}

impl<E: TextEncoder> Refused<E> {
    /// As a whole answer.
    fn told(self) -> Response {
        match self.record {
            Some(record) => counted_later(record.settle(Err(self.failure))),
            None => self.failure.into_response(),
        }
    }

    /// In a stream that is open already; gives its record, if it has one, and what is written.
    fn told_in_stream(self) -> (ApiError, Option<RequestRecord>, BytesMut) {
        let Self { failure, mut record, encoder, head } = self;
        let mut buffer = BytesMut::new();
        // No version has it, so that none is named.
        let head = head.unwrap_or_else(|| AnswerHead {
            id: ResponseId::new(Uuid::new_v4().as_u128()).digits(),
            created: unix_seconds(),
            model: String::new(),
            version: String::new(),
        });
        match encoder.stream(head, 1) {
            Ok(mut encoder) => encoder.fail(&failure.error, &mut buffer),
            Err(error) => tracing::error!(%error, "an error cannot be written"),
        }
        if let Some(record) = &mut record {
            record.broken(&failure.error);
        }
        (failure.error, record, buffer)
    }
}

/// Has a version take a request that nobody waits for; what it answers is kept meanwhile.
async fn submit(
    app: &Arc<App>,
    route: Route,
    origin: Origin,
    share: Share,
    mut asked: TextRequest,
    keep: &mut Keep,
) -> Result<(Arc<Version>, Submitted), Failure> {
    origin.scheduling.apply(&mut asked.params);
    let (prompt_param, priority) = (asked.prompt_param, asked.params.priority);
    let (of_each_prompt, told) = (asked.best_of as usize, asked.choices as usize);
    let mut asking = Asking::new(&origin, asked, false);
    let (version, choices) = asking.submit(app).await?;
    let id = keep.id();
    keep.input().await?;
    let mut record = RequestRecord::new(app, route, &version, origin, priority, choices.total(), share);
    record.moved_to(&version, asking.held.unwrap_or_default());
    record.begins(&version, asking.prompt());
    let head = head_of(&version, Some(id));
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
    let (version, choices) = Asking::new(&origin, asked, false).submit(app).await?;
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
    let (priority, timeout_ms) = (origin.scheduling.priority_over(priority), origin.scheduling.queue_timeout_ms);
    let mut turn = PoolTurn::new(timeout_ms, prompt_param);
    turn.take(app, &origin, model.as_deref(), priority).await?;
    let version = submit::pooling(app, &origin, model.as_deref())?;
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
    let asked = PoolRequest { work, priority, timeout_ms };
    let (version, pooled) = submit::pooled(app, &origin, model.as_deref(), asked, turn).await?;
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
            Err(unanswered_by(&version, error, prompt_param))
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
    let protocol = routes::protocol_of(request.extensions().get());
    let (body, share) = body::read(&app.bodies, request).await?;
    let decoding = room_to_decode(app, protocol.memory_bytes(&body)).await?;
    let decoded = decode(&body)?;
    Ok((origin, decoded, share, decoding))
}

/// The right to make values of a body, which may take far more memory than its text.
async fn room_to_decode(app: &App, bytes: usize) -> Result<Option<OwnedSemaphorePermit>, Failure> {
    if bytes > MAX_BODY_JSON_BYTES {
        let message = format!(
            "The values of the body take about {} MiB of memory, and {} MiB is the limit; split the request, or send \
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

async fn whole<E: TextEncoder>(submitted: Submitted, pending: Box<Pending<E>>, version: &Version) -> Tried<E> {
    let Submitted { choices, of_each_prompt, told, head, mut record, prompt_param } = submitted;
    let app = Arc::clone(&pending.app);
    let mut collected = Collected::new(&app.output);
    let gathered = match choices.collect_all(&mut collected).await {
        Ok(gathered) => gathered,
        Err(Uncollected::Failed(GenerationError::GaveWay)) => return pending.returned(record),
        Err(uncollected) => return Tried::Answered(record.settle(Err(uncollected.told(prompt_param, version)))),
    };
    let Pending { encoder, keep, .. } = *pending;
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
    Tried::Answered(record.settle(written.map(|body| (body, usage))))
}

impl Uncollected {
    /// As a client is told it that calls its prompt so.
    fn told(self, prompt_param: &'static str, version: &Version) -> Failure {
        match self {
            Self::Failed(error) => unanswered_by(version, error, prompt_param),
            Self::TooMuch(what) => Failure::too_much_to_collect(what),
        }
    }
}

/// An answer of a version, which is counted when it ends.
fn of_version(response: Response, version: &Version) -> Response {
    let mut response = counted_later(response);
    if let Ok(name) = HeaderValue::from_str(&version.spec().name) {
        response.headers_mut().insert(VERSION_HEADER, name);
    }
    response
}

fn counted_later(mut response: Response) -> Response {
    response.extensions_mut().insert(CountedLater);
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
    use gantry_core::json_memory_bytes;

    use super::*;
    use crate::api::AppSettings;
    use crate::front::FrontLimits;
    use crate::output::Output;
    use crate::routing::Router;

    /// What holds the room may be a request that waits for a store.
    #[tokio::test(start_paused = true)]
    async fn a_small_body_is_decoded_though_large_ones_hold_all_the_room_and_a_large_one_is_told_to_come_again() {
        let limits = FrontLimits::default();
        let app = App::new(Router::new(), Output::new(limits.output_bytes), limits, AppSettings::default(), None);
        let large = format!("[{}]", vec!["{}"; 2000].join(","));
        let first = room_to_decode(&app, json_memory_bytes(large.as_bytes())).await.unwrap();
        assert!(first.is_some());
        let rest = u32::try_from(app.decoding.available_permits()).unwrap();
        let rest = Arc::clone(&app.decoding).acquire_many_owned(rest).await.unwrap();
        assert!(room_to_decode(&app, json_memory_bytes(br#"{"messages": []}"#)).await.unwrap().is_none());
        let refused =
            room_to_decode(&app, json_memory_bytes(large.as_bytes())).await.map(drop).unwrap_err().into_response();
        assert_eq!(refused.status(), 503);
        assert!(refused.headers().contains_key("retry-after"));
        drop(rest);
        assert!(room_to_decode(&app, json_memory_bytes(large.as_bytes())).await.unwrap().is_some());
    }
}
