//! What OpenAI's protocol takes at its own limits is within those of any protocol: else a request would pass the front and be
//! refused by a worker, with words for another limit.

use gantry_core::{MAX_DRY_BREAKER_BYTES, MAX_PENALTY};
use gantry_openai::{MAX_DRY_BASE, MAX_DRY_MULTIPLIER, MAX_REPEAT_PENALTY, MAX_TEMPERATURE};

use super::*;

#[test]
fn what_is_taken_at_its_limits_is_valid_in_the_core() {
    let bias: serde_json::Map<String, Value> =
        (0..MAX_LOGIT_BIASES).map(|token| (token.to_string(), json!(-100))).collect();
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": MAX_TOKENS_LIMIT, "temperature": MAX_TEMPERATURE,
        "xtc_probability": 1.0, "xtc_threshold": 1.0, "repeat_penalty": MAX_REPEAT_PENALTY, "repeat_last_n": MAX_TOKENS_LIMIT,
        "frequency_penalty": -MAX_PENALTY, "presence_penalty": MAX_PENALTY, "dry_multiplier": MAX_DRY_MULTIPLIER,
        "dry_base": MAX_DRY_BASE, "dry_allowed_length": MAX_DRY_ALLOWED_LENGTH, "dry_penalty_last_n": MAX_TOKENS_LIMIT - 1,
        "dry_sequence_breakers": vec!["x".repeat(MAX_DRY_BREAKER_BYTES); MAX_DRY_BREAKERS], "logit_bias": bias,
        "stop": vec!["x".repeat(MAX_STOP_BYTES); MAX_STOP_STRINGS], "grammar": "x".repeat(MAX_GRAMMAR_BYTES),
        "logprobs": true, "top_logprobs": MAX_TOP_LOGPROBS,
    });
    let params = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap().common.params;
    assert_eq!(params.validate(), Ok(()));
    assert_eq!((params.temperature, params.repeat_penalty), (MAX_TEMPERATURE, MAX_REPEAT_PENALTY));
    assert_eq!(params.logit_bias.len(), MAX_LOGIT_BIASES);

    let schema = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x".repeat(MAX_SCHEMA_BYTES - 12)}}});
    let params = chat_with("response_format", schema).unwrap().common.params;
    assert_eq!(params.validate(), Ok(()));
}
