//! What a sampler needs of the vocabulary, made before the request reaches the engine's thread: what binds the answer, the tokens
//! that break a repetition, and those that must not come.

use super::penalties::Breakers;
use crate::backend::{Token, Vocabulary};
use crate::binding::Binding;
use crate::error::RequestError;
use crate::grammars::{Constraint, Grammars};
use crate::params::GenerationParams;

/// Compiled from parameters and a vocabulary by [`compile`].
#[derive(Clone, Debug, Default)]
pub(crate) struct SamplerSetup {
    pub(crate) binding: Option<Binding>,
    pub(super) breakers: Breakers,
    /// Tokens that are never chosen, but for the end of a grammar's text.
    pub(super) banned: Vec<Token>,
    /// Tokens that end a generation.
    pub(super) end_tokens: Vec<Token>,
}

/// Compiles what the parameters name, but for grammars that are known. It can take milliseconds: not for the engine's
/// thread.
///
/// # Errors
/// A grammar that cannot be used, or a token that does not exist.
pub(crate) fn compile(
    vocabulary: &dyn Vocabulary,
    grammars: &Grammars,
    params: &GenerationParams,
) -> Result<SamplerSetup, RequestError> {
    let known = |token: Token| u32::try_from(token).is_ok_and(|token| token < vocabulary.size());
    if let Some((token, _)) = params.logit_bias.iter().find(|(token, _)| !known(*token)) {
        let message = format!("logit_bias: token {token} is not in the model's vocabulary of {}", vocabulary.size());
        return Err(RequestError::invalid("logit_bias", "invalid_token", message));
    }
    if let Some(token) = params.stop_tokens.iter().find(|token| !known(**token)) {
        let message =
            format!("stop_token_ids: token {token} is not in the model's vocabulary of {}", vocabulary.size());
        return Err(RequestError::invalid("stop_token_ids", "invalid_token", message));
    }
    let constraint = constraint(vocabulary, grammars, params)?;
    let binding = constraint.map(|constraint| Binding::whole(vocabulary.texts().clone(), constraint));
    let breakers = if params.dry.multiplier > 0.0 {
        Breakers::new(vocabulary.texts(), &params.dry.sequence_breakers)
    } else {
        Breakers::default()
    };
    let end_tokens = vocabulary.end_tokens().to_vec();
    let banned = if params.ignore_eos { end_tokens.clone() } else { Vec::new() };
    Ok(SamplerSetup { binding, breakers, banned, end_tokens })
}

/// Compiles the form that the answer must have, unless that is known.
///
/// # Errors
/// It cannot be used.
pub(crate) fn constraint(
    vocabulary: &dyn Vocabulary,
    grammars: &Grammars,
    params: &GenerationParams,
) -> Result<Option<Constraint>, RequestError> {
    let compile = |asked| grammars.get(vocabulary.texts(), asked, &params.constraint_param);
    params.constraint.as_ref().map(compile).transpose()
}
