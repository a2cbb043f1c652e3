//! How to generate: every parameter of the choice of tokens, read within its range.
//!
//! Names are `OpenAI`'s where it has them, then llama-server's; `repetition_penalty` is vLLM's word for
//! `repeat_penalty`. Two conventions of llama-server's are undone here: a look back of -1 is the whole context, and one
//! of 0 turns its penalty off.

use gantry_core::{ApiError, DryParams, GenerationParams, integer_of};
use serde_json::Value;

use crate::fields::{Fields, wrong_type, wrong_value};
use crate::inputs::token_ids;
use crate::limits::{
    MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BASE, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKERS, MAX_DRY_MULTIPLIER, MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES, MAX_PENALTY, MAX_REPEAT_PENALTY, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKENS,
    MAX_TEMPERATURE, MAX_TOKENS_LIMIT,
};

/// The default of `max_tokens` on `/v1/completions`, which is `OpenAI`'s: a bare text has no natural end.
pub(crate) const COMPLETION_MAX_TOKENS: u32 = 16;

/// What the body says of the choice of tokens; the rest is as where nothing is said.
pub(crate) fn sampling(fields: &Fields<'_>) -> Result<GenerationParams, ApiError> {
    let default = GenerationParams::default();
    let penalty = |name| fields.within(name, -MAX_PENALTY, MAX_PENALTY);
    Ok(GenerationParams {
        max_tokens: max_tokens(fields)?,
        temperature: fields.within("temperature", 0.0, MAX_TEMPERATURE)?.unwrap_or(default.temperature),
        top_p: fields.above_zero("top_p", 1.0)?.unwrap_or(default.top_p),
        top_k: fields.integer("top_k", -1..=i32::MAX)?.unwrap_or(default.top_k),
        min_p: fields.within("min_p", 0.0, 1.0)?.unwrap_or(default.min_p),
        typical_p: fields.above_zero("typical_p", 1.0)?.unwrap_or(default.typical_p),
        xtc_probability: fields.within("xtc_probability", 0.0, 1.0)?.unwrap_or(default.xtc_probability),
        xtc_threshold: fields.within("xtc_threshold", 0.0, 1.0)?.unwrap_or(default.xtc_threshold),
        repeat_penalty: repeat_penalty(fields)?.unwrap_or(default.repeat_penalty),
        repeat_last_n: look_back(fields, "repeat_last_n")?.unwrap_or(default.repeat_last_n),
        frequency_penalty: penalty("frequency_penalty")?.unwrap_or(default.frequency_penalty),
        presence_penalty: penalty("presence_penalty")?.unwrap_or(default.presence_penalty),
        dry: dry(fields)?,
        logit_bias: logit_bias(fields)?,
        seed: seed(fields)?,
        stop: stop(fields)?,
        stop_tokens: stop_tokens(fields)?,
        min_tokens: min_tokens(fields)?,
        min_indent: fields.integer("n_indent", 0..=MAX_TOKENS_LIMIT)?.unwrap_or(default.min_indent),
        decode_timeout_ms: decode_timeout_ms(fields)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(default.ignore_eos),
        ..default
    })
}

/// What llama-server's `samplers` may name, in the order in which they work here. The last one is taken since editors name it
/// with each request, and adds nothing: the end of what fills a gap is left to the model.
pub(crate) const SAMPLERS: [&str; 9] =
    ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "infill"];

/// Leaves out those that `samplers`, where it is there, does not name: their own parameters then ask for nothing.
pub(crate) fn choose_samplers(fields: &Fields<'_>, params: &mut GenerationParams) -> Result<(), ApiError> {
    let longest = SAMPLERS.iter().map(|name| name.len()).max().unwrap_or(0);
    let Some(named) = fields.strings("samplers", 0..=SAMPLERS.len(), 0..=longest)? else { return Ok(()) };
    let places: Vec<Option<usize>> = named.iter().map(|name| SAMPLERS.iter().position(|known| known == name)).collect();
    if let Some(i) = places.iter().position(Option::is_none) {
        let path = format!("{}[{i}]", fields.path("samplers"));
        return Err(wrong_value(path, format_args!("must be one of {}", SAMPLERS.join(", "))));
    }
    if !places.is_sorted_by(|before, after| before < after) {
        let order = SAMPLERS.join(", ");
        return Err(wrong_value(fields.path("samplers"), format_args!("must name each once, in this order: {order}")));
    }
    let off = GenerationParams::default();
    let leave_out: [fn(&mut GenerationParams, &GenerationParams); 8] = [
        |params, off| {
            (params.repeat_penalty, params.frequency_penalty, params.presence_penalty) =
                (off.repeat_penalty, off.frequency_penalty, off.presence_penalty);
        },
        |params, off| params.dry = off.dry.clone(),
        |params, off| params.top_k = off.top_k,
        |params, off| params.typical_p = off.typical_p,
        |params, off| params.top_p = off.top_p,
        |params, off| params.min_p = off.min_p,
        |params, off| params.xtc_probability = off.xtc_probability,
        |params, _| params.temperature = 1.0,
    ];
    for (place, leave_out) in leave_out.iter().enumerate() {
        if !places.contains(&Some(place)) {
            leave_out(params, &off);
        }
    }
    Ok(())
}

fn dry(fields: &Fields<'_>) -> Result<DryParams, ApiError> {
    let default = DryParams::default();
    let multiplier = fields.within("dry_multiplier", 0.0, MAX_DRY_MULTIPLIER)?.unwrap_or(default.multiplier);
    let look_back = look_back(fields, "dry_penalty_last_n")?;
    Ok(DryParams {
        multiplier: if look_back == Some(0) { 0.0 } else { multiplier },
        base: fields.within("dry_base", 1.0, MAX_DRY_BASE)?.unwrap_or(default.base),
        allowed_length: fields
            .integer("dry_allowed_length", 0..=MAX_DRY_ALLOWED_LENGTH)?
            .unwrap_or(default.allowed_length),
        penalty_last_n: look_back.filter(|&n| n < MAX_TOKENS_LIMIT).unwrap_or(default.penalty_last_n),
        sequence_breakers: breakers(fields)?.unwrap_or(default.sequence_breakers),
    })
}

/// llama-server's name goes before the others, as there, and `OpenAI`'s newer one before its older.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let mut bound = None;
    for name in ["n_predict", "max_completion_tokens", "max_tokens"] {
        bound = bound.or(fields.integer(name, -1..=i64::from(MAX_TOKENS_LIMIT))?);
    }
    // What does not fit is the -1.
    Ok(bound.and_then(|tokens| u32::try_from(tokens).ok()))
}

fn repeat_penalty(fields: &Fields<'_>) -> Result<Option<f32>, ApiError> {
    let llama_cpp = fields.above_zero("repeat_penalty", MAX_REPEAT_PENALTY)?;
    let vllm = fields.above_zero("repetition_penalty", MAX_REPEAT_PENALTY)?;
    fields.one_of(("repeat_penalty", llama_cpp), ("repetition_penalty", vllm))
}

/// A number of tokens; -1 is all of them.
fn look_back(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, ApiError> {
    let tokens = fields.integer(name, -1..=i64::from(MAX_TOKENS_LIMIT))?;
    // What does not fit is the -1.
    Ok(tokens.map(|n| u32::try_from(n).unwrap_or(MAX_TOKENS_LIMIT)))
}

fn seed(fields: &Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    match (value.as_u64(), value.as_number().and_then(integer_of)) {
        (Some(seed), _) => Ok(Some(seed)),
        (None, Some(seed)) => Ok(Some(seed.cast_unsigned())),
        (None, None) => Err(wrong_type(fields.path("seed"), "an integer of 64 bits", value)),
    }
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    match fields.get("stop") {
        Some(Value::String(text)) if text.len() > MAX_STOP_BYTES => {
            let n = text.len();
            Err(wrong_value(fields.path("stop"), format_args!("must have at most {MAX_STOP_BYTES} bytes, not {n}")))
        }
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(other) if !other.is_array() => {
            Err(wrong_type(fields.path("stop"), "a string or an array of strings", other))
        }
        _ => {
            let mut stop = fields.strings("stop", 0..=MAX_STOP_STRINGS, 0..=MAX_STOP_BYTES)?.unwrap_or_default();
            // Nothing ends with the text that is everywhere.
            stop.retain(|text| !text.is_empty());
            Ok(stop)
        }
    }
}

fn stop_tokens(fields: &Fields<'_>) -> Result<Vec<i32>, ApiError> {
    let path = || fields.path("stop_token_ids");
    let Some(value) = fields.get("stop_token_ids") else { return Ok(Vec::new()) };
    let items = value.as_array().ok_or_else(|| wrong_type(path(), "an array of token ids", value))?;
    if items.len() > MAX_STOP_TOKENS {
        let n = items.len();
        return Err(wrong_value(path(), format_args!("must have at most {MAX_STOP_TOKENS} token ids, not {n}")));
    }
    token_ids(&path(), items)
}

fn min_tokens(fields: &Fields<'_>) -> Result<u32, ApiError> {
    let least = fields.integer("min_tokens", 0..=MAX_TOKENS_LIMIT)?.unwrap_or(0);
    match max_tokens(fields)? {
        Some(most) if least > most => {
            Err(wrong_value(fields.path("min_tokens"), format_args!("must be at most `max_tokens`, which is {most}")))
        }
        _ => Ok(least),
    }
}

/// 0 and less is no bound, as llama-server has it.
fn decode_timeout_ms(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let ms = fields.integer("t_max_predict_ms", i64::MIN..=i64::from(u32::MAX))?;
    Ok(ms.and_then(|ms| u32::try_from(ms).ok()).filter(|ms| *ms > 0))
}

fn breakers(fields: &Fields<'_>) -> Result<Option<Vec<String>>, ApiError> {
    fields.strings("dry_sequence_breakers", 0..=MAX_DRY_BREAKERS, 1..=MAX_DRY_BREAKER_BYTES)
}

/// `OpenAI`'s object of token ids, or llama-server's array of pairs.
fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(i32, f32)>, ApiError> {
    let path = || fields.path("logit_bias");
    let count = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(object)) => object.len(),
        Some(Value::Array(items)) => items.len(),
        Some(other) => return Err(wrong_type(path(), "an object of token ids and numbers", other)),
    };
    if count > MAX_LOGIT_BIASES {
        return Err(wrong_value(path(), format_args!("must have at most {MAX_LOGIT_BIASES} entries, not {count}")));
    }
    match fields.get("logit_bias") {
        Some(Value::Object(object)) => object.iter().map(|(token, bias)| bias_by_name(path(), token, bias)).collect(),
        Some(Value::Array(items)) => {
            items.iter().enumerate().map(|(i, item)| bias_pair(format!("{}[{i}]", path()), item)).collect()
        }
        _ => Ok(Vec::new()),
    }
}

fn bias_by_name(path: String, token: &str, bias: &Value) -> Result<(i32, f32), ApiError> {
    match token.parse::<i32>() {
        Ok(id) if id >= 0 => Ok((id, bias_value(format!("{path}.{id}"), bias)?)),
        _ => Err(wrong_value(path, "must have token ids as its keys: integers of 0 and more, in quotes")),
    }
}

fn bias_pair(path: String, item: &Value) -> Result<(i32, f32), ApiError> {
    let Some([token, bias]) = item.as_array().map(Vec::as_slice) else {
        return Err(wrong_type(path, "a pair of a token id and a number or false", item));
    };
    let id = token.as_number().and_then(integer_of).and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0);
    let id = id.ok_or_else(|| wrong_value(format!("{path}[0]"), "must be a token id: an integer of 0 and more"))?;
    match bias {
        Value::Bool(false) => Ok((id, f32::NEG_INFINITY)),
        other => Ok((id, bias_value(format!("{path}[1]"), other)?)),
    }
}

fn bias_value(path: String, value: &Value) -> Result<f32, ApiError> {
    let Some(bias) = value.as_f64() else { return Err(wrong_type(path, "a number", value)) };
    if bias.abs() <= f64::from(MAX_LOGIT_BIAS) {
        Ok(bias as f32)
    } else {
        Err(wrong_value(path, format_args!("must be a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, not {bias}")))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn chosen(samplers: &Value) -> Result<GenerationParams, ApiError> {
        let body = json!({
            "samplers": samplers, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8,
            "xtc_probability": 0.5, "repeat_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3,
            "dry_multiplier": 0.8,
        });
        let Value::Object(object) = body else { unreachable!() };
        let fields = Fields::new(&object, "");
        let mut params = sampling(&fields)?;
        choose_samplers(&fields, &mut params)?;
        Ok(params)
    }

    #[test]
    fn what_is_not_named_chooses_nothing() {
        let all = chosen(&Value::Null).unwrap();
        assert_eq!(chosen(&json!(SAMPLERS)).unwrap(), all);
        let none = GenerationParams { temperature: 1.0, ..GenerationParams::default() };
        assert_eq!(chosen(&json!([])).unwrap(), none);
        // As editors send it.
        let of_editors = GenerationParams { top_k: 40, top_p: 0.9, ..none.clone() };
        assert_eq!(chosen(&json!(["top_k", "top_p", "infill"])).unwrap(), of_editors);
        for name in &SAMPLERS[..8] {
            assert_ne!(chosen(&json!([name])).unwrap(), none, "{name}");
        }
        for (wrong, param) in [
            (json!(["mirostat"]), "samplers[0]"),
            (json!(["top_p", "top_k"]), "samplers"),
            (json!("top_k"), "samplers"),
        ] {
            assert_eq!(chosen(&wrong).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
