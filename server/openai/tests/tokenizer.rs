//! `/tokenize`, `/detokenize` and `/apply-template`: mistakes are named, and answers have llama-server's shape.
#![allow(clippy::unwrap_used)]

use gantry_core::{ErrorCode, PromptEncoder, ShownPrompt, TokenPiece};
use gantry_openai::{
    MAX_DETOKENIZE_TOKENS, MAX_TOKENIZE_BYTES, MAX_TOKENIZE_PIECES_BYTES, decode_apply_template, decode_detokenize,
    decode_tokenize,
};
use serde_json::{Value, json};

#[test]
fn mistakes_are_named() {
    use ErrorCode::{InvalidType, InvalidValue, MissingRequiredParameter, UnknownParameter};
    let tokenize = |body: &Value| decode_tokenize(body.to_string().as_bytes()).map(drop);
    let detokenize = |body: &Value| decode_detokenize(body.to_string().as_bytes()).map(drop);
    let template = |body: &Value| decode_apply_template(body.to_string().as_bytes()).map(drop);
    type Decode<'a> = &'a dyn Fn(&Value) -> Result<(), gantry_core::ApiError>;
    let (tokenize, detokenize, template): (Decode<'_>, Decode<'_>, Decode<'_>) = (&tokenize, &detokenize, &template);
    for (decode, body, param, code) in [
        (tokenize, json!({}), "content", MissingRequiredParameter),
        (tokenize, json!({"content": 1}), "content", InvalidType),
        (tokenize, json!({"content": "x".repeat(MAX_TOKENIZE_BYTES + 1)}), "content", InvalidValue),
        (
            tokenize,
            json!({"content": "x".repeat(MAX_TOKENIZE_PIECES_BYTES + 1), "with_pieces": true}),
            "content",
            InvalidValue,
        ),
        (tokenize, json!({"content": "x", "add_special": 1}), "add_special", InvalidType),
        (tokenize, json!({"content": "x", "temperature": 1}), "temperature", UnknownParameter),
        (detokenize, json!({}), "tokens", MissingRequiredParameter),
        (detokenize, json!({"tokens": "x"}), "tokens", InvalidType),
        (detokenize, json!({"tokens": [1, "x"]}), "tokens[1]", InvalidType),
        (detokenize, json!({"tokens": [-1]}), "tokens[0]", InvalidValue),
        (detokenize, json!({"tokens": vec![1; MAX_DETOKENIZE_TOKENS + 1]}), "tokens", InvalidValue),
        (template, json!({}), "messages", MissingRequiredParameter),
        (template, json!({"messages": [{"role": "user"}]}), "messages[0].content", MissingRequiredParameter),
    ] {
        let error = decode(&body).unwrap_err();
        assert_eq!((error.status, error.param.as_deref(), &error.code), (400, Some(param), &code), "{error}");
    }
    assert!(tokenize(&json!({"content": "x".repeat(MAX_TOKENIZE_BYTES)})).is_ok());
    assert!(tokenize(&json!({"content": ""})).is_ok());
    assert!(detokenize(&json!({"tokens": []})).is_ok());
}

#[test]
fn answers_have_llama_servers_shape() {
    let tokenize = decode_tokenize(br#"{"content": "x"}"#).unwrap().1;
    let render = decode_apply_template(br#"{"messages": [{"role": "user", "content": "x"}]}"#).unwrap().1;
    let detokenize = decode_detokenize(br#"{"tokens": [1]}"#).unwrap().1;
    let told = |told: Result<Vec<u8>, serde_json::Error>| String::from_utf8(told.unwrap()).unwrap();
    let pieces = [(5, &b"a\"b"[..]), (6, &b"\xf0\x9f"[..])].map(|(id, bytes)| TokenPiece { id, bytes: bytes.to_vec() });
    assert_eq!(told(tokenize.whole(ShownPrompt::Tokens(vec![1, 2]))), r#"{"tokens":[1,2]}"#);
    let wanted = r#"{"tokens":[{"id":5,"piece":"a\"b"},{"id":6,"piece":[240,159]}]}"#;
    assert_eq!(told(tokenize.whole(ShownPrompt::Pieces(pieces.to_vec()))), wanted);
    // By vLLM's name, too.
    assert_eq!(told(detokenize.whole(ShownPrompt::Text("a".into()))), r#"{"content":"a","prompt":"a"}"#);
    assert_eq!(told(render.whole(ShownPrompt::Text("a".into()))), r#"{"prompt":"a"}"#);
}
