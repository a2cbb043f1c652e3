//! Hands a request to the version that is active, or to a candidate that answers a share of the requests, and to the next one where that
//! was retired in between. What a candidate cannot take the active version does. While none is, since one
//! is unloaded and another loaded, a request stands in [line](crate::hold) for that.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_core::{ApiError, ErrorCode, Priority, Prompt, TextInput, TextRequest};

use super::choices::Choices;
use super::conversation::Talk;
use super::record::Origin;
use crate::api::App;
use crate::api::errors::{Failure, of_submission, unanswered};
use crate::hold::{LineClosed, News, Ticket};
use crate::limits::{HELD_LIMIT, RETRY_AFTER_MIN_SECONDS, SUBMIT_ATTEMPTS};
use crate::peer::Peer;
use crate::version::{GenerateRequest, Generation, GenerationError, PoolRequest, Pooled, SubmitError, Terms, Version};

/// What keeps the seeds of one request's answers apart: Knuth's odd number nearest to 2^64 over the golden ratio, so that
/// they differ in their lower halves, too.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A request for text on its way to a version.
pub(super) struct Asking {
    client: Peer,
    talk: Talk,
    model: Option<String>,
    requests: Vec<GenerateRequest>,
    prompt_param: &'static str,
    /// Answers to each prompt.
    choices: u32,
    pub(super) is_streamed: bool,
    /// Whether it is submitted anew where a version that makes room for another one gives it back.
    pub(super) returns: bool,
    came: Instant,
    /// A version had taken it.
    was_taken: bool,
    ticket: Option<Ticket>,
    /// How long it had been since it came when a version took it, where it stood in line before that.
    pub(super) held: Option<Duration>,
}

/// Why no version has a request.
enum NotTaken {
    /// None answers, and requests wait for the next one.
    Held,
    Failed(Failure),
}

impl From<ApiError> for NotTaken {
    fn from(error: ApiError) -> Self {
        Self::Failed(error.into())
    }
}

impl Asking {
    /// `returns`: see [`Asking::returns`].
    pub(super) fn new(origin: &Origin, asked: TextRequest, returns: bool) -> Self {
        let TextRequest { model, prompts, prompt_param, params, best_of: choices, is_streamed, conversation, .. } =
            asked;
        let request = |prompt| GenerateRequest { prompt: Arc::new(prompt), params: params.clone() };
        let requests: Vec<GenerateRequest> = prompts.into_iter().map(request).collect();
        let returns = returns && (!is_streamed || (requests.len() == 1 && choices == 1));
        let came = Instant::now();
        Self {
            client: origin.peer,
            talk: Talk::new(origin.session, conversation),
            model,
            requests,
            prompt_param,
            choices,
            is_streamed,
            returns,
            came,
            was_taken: false,
            ticket: None,
            held: None,
        }
    }

    /// Submits it, once a version answers.
    pub(super) async fn submit(&mut self, app: &App) -> Result<(Arc<Version>, Choices), Failure> {
        loop {
            if self.enter(app)? {
                self.turn(app).await?;
            }
            if let Some(taken) = self.try_submit(app).await? {
                return Ok(taken);
            }
        }
    }

    /// Stands in line, where requests have to. Says whether it does.
    pub(super) fn enter(&mut self, app: &App) -> Result<bool, Failure> {
        if self.ticket.is_none() && app.router.held().is_held() {
            let priority = self.requests.first().map_or(Priority::Normal, |request| request.params.priority);
            app.check_first(self.model())?;
            let (answers, most) = (self.answers(), app.router.held().places());
            if answers > most && !self.was_taken {
                return Err(self.too_many_answers(most).into());
            }
            self.ticket = Some(ticket(app, self.client, priority, self.came, answers, self.was_taken)?);
        }
        Ok(self.ticket.is_some())
    }

    /// Waits until it is first in line and a version answers, for as long as it may.
    pub(super) async fn turn(&self, app: &App) -> Result<(), Failure> {
        match &self.ticket {
            Some(ticket) => turn(app, ticket, self.came, self.limit(app), self.prompt_param).await,
            None => Ok(()),
        }
    }

    fn limit(&self, app: &App) -> Option<Duration> {
        let own = self.requests.first().and_then(|request| request.params.queue_timeout_ms).map(Duration::from_millis);
        own.or_else(|| app.router.held().timeout())
    }

    /// Its prompt, the first one where there are several.
    pub(super) fn prompt(&self) -> Option<&Arc<Prompt>> {
        self.requests.first().map(|request| &request.prompt)
    }

    /// The model that is asked for, if any is.
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// How it stands in line, if it does.
    pub(super) fn news(&self) -> Option<News> {
        self.ticket.as_ref().map(Ticket::news)
    }

    /// How many answers are asked for.
    fn answers(&self) -> usize {
        self.requests.len().saturating_mul(self.choices as usize)
    }

    /// Later it would be no better, so this is no 429.
    fn too_many_answers(&self, most: usize) -> ApiError {
        let param = if self.requests.len() > 1 { self.prompt_param } else { "n" };
        let message =
            format!("`{param}` must ask for at most {most} answers: no more requests run and wait here at a time.");
        ApiError::invalid(Some(Cow::Borrowed(param)), ErrorCode::InvalidValue, message)
    }

    fn was_held(&self) -> bool {
        self.ticket.is_some() || self.was_taken
    }

    /// The version that had it gives it back.
    pub(super) fn gave_way(&mut self) {
        self.was_taken = true;
    }

    /// Submits it to the version that is active, and leaves the line; `None`: none is, and requests wait for the next one.
    pub(super) async fn try_submit(&mut self, app: &App) -> Result<Option<(Arc<Version>, Choices)>, Failure> {
        match self.submit_now(app).await {
            Ok(taken) => {
                self.held = self.was_held().then(|| self.came.elapsed());
                self.ticket = None;
                Ok(Some(taken))
            }
            Err(NotTaken::Held) => Ok(None),
            Err(NotTaken::Failed(failure)) => Err(failure),
        }
    }

    async fn submit_now(&self, app: &App) -> Result<(Arc<Version>, Choices), NotTaken> {
        let Self { requests, prompt_param, choices, .. } = self;
        let answers = self.answers();
        // Of the time that it may wait, what is left.
        let left_ms = self.limit(app).filter(|_| self.was_held()).map(|limit| {
            let left = limit.saturating_sub(self.came.elapsed());
            u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)
        });
        let conversation = || self.talk.conversation(requests.first().map(|request| &*request.prompt));
        let mut tries_candidate = true;
        for _ in 0..SUBMIT_ATTEMPTS {
            let model = self.model.as_deref();
            let chosen = if tries_candidate { app.version_for(model, conversation) } else { app.active_for(model) };
            let version = match chosen {
                Ok(version) => version,
                Err(_) if app.router.held().is_switching() => return Err(NotTaken::Held),
                Err(failure) => return Err(NotTaken::Failed(failure)),
            };
            if let Some(model) = version.model()
                && let Some((place, token)) = unknown_token(requests, model.vocab_size, prompt_param)
            {
                let message =
                    format!("`{place}`: token {token} is not in the model's vocabulary of {}.", model.vocab_size);
                let code = ErrorCode::Other("invalid_token".to_owned());
                return Err(ApiError::invalid(Some(Cow::Owned(place)), code, message).into());
            }
            let most = version.capacity();
            if answers > most {
                return Err(self.too_many_answers(most).into());
            }
            match self.submit_to(&version, left_ms).await {
                Ok(generations) => {
                    let shares = self.is_streamed
                        && requests.first().is_some_and(|request| request.params.prompt_logprobs.is_some());
                    let choices = if shares {
                        Choices::sharing_prompts(generations, *choices as usize)
                    } else {
                        Choices::new(generations)
                    };
                    return Ok((version, choices));
                }
                Err(SubmitError::Retired) => {}
                Err(SubmitError::QueueFull { .. } | SubmitError::Unavailable { .. })
                    if tries_candidate && !app.is_active(&version) =>
                {
                    tries_candidate = false;
                }
                Err(other) => return Err(NotTaken::Failed(of_submission(other))),
            }
            tokio::task::yield_now().await;
        }
        if app.router.held().is_switching() {
            return Err(NotTaken::Held);
        }
        Err(NotTaken::Failed(of_submission(SubmitError::Retired)))
    }

    /// Submits one request for each answer to each prompt, all or none.
    async fn submit_to(&self, version: &Version, left_ms: Option<u64>) -> Result<Vec<Generation>, SubmitError> {
        let is_whole = !self.is_streamed;
        let of_prompt = |request| (0..self.choices).map(move |choice| of_choice(request, choice, is_whole));
        let mut requests: Vec<GenerateRequest> = self.requests.iter().flat_map(of_prompt).collect();
        for request in &mut requests {
            request.params.queue_timeout_ms = left_ms.or(request.params.queue_timeout_ms);
        }
        let has_place = self.ticket.as_ref().map_or(self.was_taken, |ticket| ticket.has_place);
        version.submit_all(self.client, requests, Terms { is_whole, returns: self.returns, has_place }).await
    }
}

/// The first token that a vocabulary of this size has not, and its place in what was asked.
fn unknown_token(requests: &[GenerateRequest], vocab_size: u32, prompt_param: &str) -> Option<(String, i32)> {
    let is_unknown = |token: i32| u32::try_from(token).map_or(true, |token| token >= vocab_size);
    requests.iter().enumerate().find_map(|(number, request)| {
        let biased = request.params.logit_bias.iter().map(|&(token, _)| ("logit_bias", token));
        let stops = request.params.stop_tokens.iter().map(|&token| ("stop_token_ids", token));
        if let Some((field, token)) = biased.chain(stops).find(|&(_, token)| is_unknown(token)) {
            return Some((field.to_owned(), token));
        }
        let tokens = match &*request.prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Infill(infill) => match &infill.prefix {
                TextInput::Tokens(tokens) => tokens,
                TextInput::Text(_) => return None,
            },
            _ => return None,
        };
        let at = tokens.iter().position(|&token| is_unknown(token))?;
        let of = if requests.len() > 1 { format!("[{number}]") } else { String::new() };
        Some((format!("{prompt_param}{of}[{at}]"), tokens[at]))
    })
}

/// The request for one of the answers to a prompt; `is_whole`: all of them are there before the first is told, and otherwise
/// what that tells of the prompt is told of the others.
fn of_choice(request: &GenerateRequest, choice: u32, is_whole: bool) -> GenerateRequest {
    let mut request = request.clone();
    request.params.seed = seed_of(request.params.seed, choice);
    // A prompt is as likely for each of its answers, so that the first one's will do for all.
    if choice > 0 && request.params.prompt_logprobs.take().is_some() && !is_whole {
        request.params.echo = false;
    }
    request
}

/// A place in the line of those who wait for a version. `has_place`: see [`Hold::enter`](crate::hold::Hold::enter).
fn ticket(
    app: &App,
    client: Peer,
    priority: Priority,
    came: Instant,
    answers: usize,
    has_place: bool,
) -> Result<Ticket, Failure> {
    let hold = app.router.held();
    if app.router.is_stalled() && !has_place {
        return Err(Failure::no_model_loads(hold.retry_after()));
    }
    let entered = hold.enter(client, priority, came, answers, has_place);
    entered.map_err(|full| Failure::line_full(full, hold.retry_after()))
}

/// Waits until whoever came at this time is first in line and a version answers; `limit`: its own.
async fn turn(
    app: &App,
    ticket: &Ticket,
    came: Instant,
    limit: Option<Duration>,
    prompt_param: &'static str,
) -> Result<(), Failure> {
    let limit = limit.unwrap_or(HELD_LIMIT);
    let soon = Duration::from_secs(RETRY_AFTER_MIN_SECONDS);
    tokio::select! {
        biased;
        due = ticket.turn() => due.map_err(|closed| match closed {
            LineClosed::ServerEnds => unanswered(GenerationError::ServerEnds, prompt_param, soon),
            LineClosed::NoModel => Failure::not_ready("it could not be loaded, and the server ends", soon),
        }),
        () = tokio::time::sleep_until((came + limit).into()) => {
            Err(Failure::held_too_long(came.elapsed(), limit, app.router.held().retry_after()))
        }
    }
}

/// How long a request for vectors or scores has waited for a version, and may.
pub(super) struct PoolTurn {
    came: Instant,
    own_ms: Option<u64>,
    /// Of the milliseconds that it may wait, those that are left where it has waited.
    left_ms: Option<u64>,
    has_place: bool,
    prompt_param: &'static str,
}

impl PoolTurn {
    /// Of a request that comes now, and says itself how many milliseconds it may wait, or does not.
    pub(super) fn new(own_ms: Option<u64>, prompt_param: &'static str) -> Self {
        Self { came: Instant::now(), own_ms, left_ms: own_ms, has_place: false, prompt_param }
    }

    /// Stands in line until a version answers, where requests have to.
    pub(super) async fn take(
        &mut self,
        app: &App,
        origin: &Origin,
        model: Option<&str>,
        priority: Priority,
    ) -> Result<(), Failure> {
        let hold = app.router.held();
        if hold.is_held() {
            app.check_first(model)?;
            let limit = self.own_ms.map(Duration::from_millis).or_else(|| hold.timeout());
            let ticket = ticket(app, origin.peer, priority, self.came, 1, self.has_place)?;
            turn(app, &ticket, self.came, limit, self.prompt_param).await?;
            let left = limit.map(|limit| limit.saturating_sub(self.came.elapsed()).as_millis().max(1));
            self.left_ms = left.map(|left| u64::try_from(left).unwrap_or(u64::MAX));
            self.has_place = ticket.has_place;
        }
        Ok(())
    }
}

/// Submits a request for vectors or scores, again where the version that was to have it is unloaded meanwhile.
pub(super) async fn pooled(
    app: &App,
    origin: &Origin,
    model: Option<&str>,
    mut asked: PoolRequest,
    mut turn: PoolTurn,
) -> Result<(Arc<Version>, Pooled), Failure> {
    let mut attempts = 0;
    while attempts < SUBMIT_ATTEMPTS {
        asked.timeout_ms = turn.left_ms;
        match pooling(app, origin, model) {
            Ok(version) => match version.pool(origin.peer, asked.clone(), turn.has_place).await {
                Ok(pooled) => return Ok((version, pooled)),
                Err(SubmitError::Retired) => attempts += 1,
                Err(other) => return Err(of_submission(other)),
            },
            Err(_) if app.router.held().is_switching() => {}
            Err(failure) => return Err(failure),
        }
        turn.take(app, origin, model, asked.priority).await?;
        tokio::task::yield_now().await;
    }
    Err(of_submission(SubmitError::Retired))
}

/// The version that gives vectors and scores. Those of two models must not be mixed, so that a candidate gives them to whoever names a
/// session, and to nobody else.
pub(super) fn pooling(app: &App, origin: &Origin, model: Option<&str>) -> Result<Arc<Version>, Failure> {
    match &origin.session {
        Some(session) => app.version_for(model, || session),
        None => app.active_for(model),
    }
}

/// The seed of one of the answers: they differ, and all repeat with the request's. The first has the request's own, so it
/// is the answer that would have come alone.
fn seed_of(request: Option<u64>, choice: u32) -> Option<u64> {
    request.map(|seed| seed.wrapping_add(SEED_STEP.wrapping_mul(u64::from(choice))))
}

#[cfg(test)]
mod tests {
    use gantry_core::GenerationParams;

    use super::*;

    #[test]
    fn a_prompt_is_scored_for_its_first_answer_alone() {
        let params = GenerationParams { prompt_logprobs: Some(3), echo: true, ..GenerationParams::default() };
        let request = GenerateRequest { prompt: Arc::new(Prompt::Text(String::new())), params };
        let asked = |is_whole| {
            [0, 1, 2].map(|choice| {
                let params = of_choice(&request, choice, is_whole).params;
                (params.prompt_logprobs, params.echo)
            })
        };
        assert_eq!(asked(true), [(Some(3), true), (None, true), (None, true)]);
        assert_eq!(asked(false), [(Some(3), true), (None, false), (None, false)]);
        let unscored = GenerateRequest {
            params: GenerationParams { prompt_logprobs: None, ..request.params.clone() },
            ..request.clone()
        };
        assert!(of_choice(&unscored, 1, false).params.echo);
    }

    #[test]
    fn answers_have_seeds_of_their_own() {
        assert_eq!(seed_of(None, 3), None);
        assert_eq!(seed_of(Some(7), 0), Some(7));
        let seeds: std::collections::BTreeSet<_> = (0..16).filter_map(|i| seed_of(Some(u64::MAX), i)).collect();
        let lower: std::collections::BTreeSet<_> = seeds.iter().map(|seed| seed & 0xffff_ffff).collect();
        assert_eq!((seeds.len(), lower.len()), (16, 16));
    }
}
