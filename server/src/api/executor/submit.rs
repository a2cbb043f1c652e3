//! Hands a request to the version that is active, and to the next one where that was retired in between.

use std::borrow::Cow;
use std::sync::Arc;

use gantry_core::{ApiError, ErrorCode, Prompt, TextInput, TextRequest};

use super::choices::Choices;
use crate::api::App;
use crate::api::errors::{Failure, of_submission};
use crate::limits::SUBMIT_ATTEMPTS;
use crate::peer::Peer;
use crate::version::{GenerateRequest, Generation, PoolRequest, Pooled, SubmitError, Version};

/// What keeps the seeds of one request's answers apart: Knuth's odd number nearest to 2^64 over the golden ratio, so that
/// they differ in their lower halves, too.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Submits a request for text.
pub(super) async fn text(app: &App, client: Peer, asked: TextRequest) -> Result<(Arc<Version>, Choices), Failure> {
    let TextRequest { model, prompts, prompt_param, params, best_of: choices, is_streamed, .. } = asked;
    let request = |prompt| GenerateRequest { prompt: Arc::new(prompt), params: params.clone() };
    let requests: Vec<GenerateRequest> = prompts.into_iter().map(request).collect();
    let answers = requests.len().saturating_mul(choices as usize);
    for _ in 0..SUBMIT_ATTEMPTS {
        let version = app.version_for(model.as_deref())?;
        if let Some(model) = version.model()
            && let Some((place, token)) = unknown_token(&requests, model.vocab_size, prompt_param)
        {
            let message = format!("`{place}`: token {token} is not in the model's vocabulary of {}.", model.vocab_size);
            let code = ErrorCode::Other("invalid_token".to_owned());
            return Err(ApiError::invalid(Some(Cow::Owned(place)), code, message).into());
        }
        let most = version.capacity();
        if answers > most {
            // Later it would be no better, so this is no 429.
            let param = if requests.len() > 1 { prompt_param } else { "n" };
            let message =
                format!("`{param}` must ask for at most {most} answers: no more requests run and wait here at a time.");
            return Err(ApiError::invalid(Some(Cow::Borrowed(param)), ErrorCode::InvalidValue, message).into());
        }
        match text_to(&version, client, &requests, choices, !is_streamed).await {
            Ok(generations) if is_streamed && params.prompt_logprobs.is_some() => {
                return Ok((version, Choices::sharing_prompts(generations, choices as usize)));
            }
            Ok(generations) => return Ok((version, Choices::new(generations))),
            Err(SubmitError::Retired) => {}
            Err(other) => return Err(of_submission(other)),
        }
        tokio::task::yield_now().await;
    }
    Err(of_submission(SubmitError::Retired))
}

/// The first token that a vocabulary of this size has not, and its place in what was asked.
fn unknown_token(requests: &[GenerateRequest], vocab_size: u32, prompt_param: &str) -> Option<(String, i32)> {
    let is_unknown = |token: i32| u32::try_from(token).map_or(true, |token| token >= vocab_size);
    requests.iter().enumerate().find_map(|(number, request)| {
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

/// Submits one request for each answer to each prompt, all or none.
async fn text_to(
    version: &Version,
    client: Peer,
    requests: &[GenerateRequest],
    choices: u32,
    is_whole: bool,
) -> Result<Vec<Generation>, SubmitError> {
    let of_prompt = |request| (0..choices).map(move |choice| of_choice(request, choice, is_whole));
    version.submit_all(client, requests.iter().flat_map(of_prompt).collect(), is_whole).await
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

/// Submits a request for vectors or scores.
pub(super) async fn pooled(
    app: &App,
    client: Peer,
    model: Option<&str>,
    asked: PoolRequest,
) -> Result<(Arc<Version>, Pooled), Failure> {
    for _ in 0..SUBMIT_ATTEMPTS {
        let version = app.version_for(model)?;
        match version.pool(client, asked.clone()).await {
            Ok(pooled) => return Ok((version, pooled)),
            Err(SubmitError::Retired) => {}
            Err(other) => return Err(of_submission(other)),
        }
        tokio::task::yield_now().await;
    }
    Err(of_submission(SubmitError::Retired))
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
