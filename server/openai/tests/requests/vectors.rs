//! Embeddings and rankings.

use gantry_core::{ErrorCode, PooledEncoder, TextInput};
use gantry_openai::{
    EncodingFormat, MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_TOKENS, MAX_RERANK_DOCUMENTS, ValidEmbeddingsRequest,
    ValidRerankRequest, decode_embeddings,
};
use serde_json::{Value, json};

use crate::is_told;

#[test]
fn inputs_of_embeddings_are_taken_in_all_four_shapes() {
    let parse = |input: Value| {
        ValidEmbeddingsRequest::parse(json!({"input": input}).to_string().as_bytes()).map(|request| request.inputs)
    };
    let text = |t: &str| TextInput::Text(t.to_owned());
    assert_eq!(parse(json!("a")).unwrap(), [text("a")]);
    assert_eq!(parse(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
    assert_eq!(parse(json!([1, 2])).unwrap(), [TextInput::Tokens(vec![1, 2])]);
    assert_eq!(parse(json!([[1], "a"])).unwrap(), [TextInput::Tokens(vec![1]), text("a")]);
    let many = vec!["a"; MAX_EMBEDDING_INPUTS];
    assert_eq!(parse(json!(many)).unwrap().len(), MAX_EMBEDDING_INPUTS);
    for (input, param, code) in [
        (json!(null), "input", ErrorCode::MissingRequiredParameter),
        (json!(5), "input", ErrorCode::InvalidType),
        (json!(""), "input", ErrorCode::InvalidValue),
        (json!([]), "input", ErrorCode::InvalidValue),
        (json!([""]), "input[0]", ErrorCode::InvalidValue),
        (json!(["a", 1]), "input[1]", ErrorCode::InvalidType),
        (json!([1, "a"]), "input[1]", ErrorCode::InvalidType),
        (json!([1, -1]), "input[1]", ErrorCode::InvalidValue),
        (json!([1.5]), "input[0]", ErrorCode::InvalidValue),
        (json!([[]]), "input[0]", ErrorCode::InvalidValue),
        (json!([[1], [null]]), "input[1][0]", ErrorCode::InvalidType),
        (json!([[i64::from(i32::MAX) + 1]]), "input[0][0]", ErrorCode::InvalidValue),
        (json!(vec!["a"; MAX_EMBEDDING_INPUTS + 1]), "input", ErrorCode::InvalidValue),
        (json!([vec![1; MAX_EMBEDDING_TOKENS], vec![1]]), "input[1]", ErrorCode::InvalidValue),
    ] {
        let error = parse(input.clone()).unwrap_err();
        assert_eq!((error.param.as_deref(), &error.code), (Some(param), &code));
        is_told(&error);
    }
}

#[test]
fn an_embedding_has_the_models_width_and_a_known_encoding() {
    let parse = |name: &str, value: Value| {
        let mut body = json!({"input": "a"});
        body[name] = value;
        ValidEmbeddingsRequest::parse(body.to_string().as_bytes())
    };
    assert_eq!(parse("encoding_format", json!("float")).unwrap().encoding, EncodingFormat::Float);
    assert_eq!(parse("encoding_format", json!("base64")).unwrap().encoding, EncodingFormat::Base64);
    assert_eq!(parse("encoding_format", json!("hex")).unwrap_err().param.as_deref(), Some("encoding_format"));
    assert_eq!(parse("dimensions", json!(0)).unwrap_err().param.as_deref(), Some("dimensions"));
    let encoder = |body: Value| decode_embeddings(body.to_string().as_bytes()).unwrap().1;
    assert!(encoder(json!({"input": "a"})).check(384, false).is_ok());
    let asked = encoder(json!({"input": "a", "dimensions": 384}));
    assert!(asked.check(384, false).is_ok());
    assert!(asked.check(768, true).is_ok(), "whose beginning it is");
    for (width, may_cut) in [(768, false), (256, true)] {
        let error = asked.check(width, may_cut).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("dimensions"), ErrorCode::InvalidValue));
        assert_eq!(error.message.contains("--matryoshka"), !may_cut, "{}", error.message);
    }
}

#[test]
fn mistakes_in_a_ranking_are_named() {
    use ErrorCode::{InvalidType, InvalidValue, MissingRequiredParameter, UnknownParameter};
    for (name, value, param, code) in [
        ("query", json!(null), "query", MissingRequiredParameter),
        ("query", json!(""), "query", InvalidValue),
        ("query", json!(["a"]), "query", InvalidType),
        ("documents", json!(null), "documents", MissingRequiredParameter),
        ("documents", json!("a"), "documents", InvalidType),
        ("documents", json!([]), "documents", InvalidValue),
        ("documents", json!(["a", ""]), "documents[1]", InvalidValue),
        ("documents", json!([{}]), "documents[0].text", MissingRequiredParameter),
        ("documents", json!([{"text": "a", "title": "b"}]), "documents[0].title", UnknownParameter),
        ("documents", json!([1]), "documents[0]", InvalidType),
        ("documents", json!(vec!["a"; MAX_RERANK_DOCUMENTS + 1]), "documents", InvalidValue),
        ("top_n", json!(0), "top_n", InvalidValue),
        ("top_n", json!("1"), "top_n", InvalidType),
        ("return_documents", json!(1), "return_documents", InvalidType),
        ("model", json!(1), "model", InvalidType),
    ] {
        let mut body = json!({"query": "q", "documents": ["a"]});
        body[name] = value;
        let error = ValidRerankRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!((error.param.as_deref(), &error.code), (Some(param), &code), "{body}");
        is_told(&error);
    }
}

#[test]
fn a_ranking_has_the_best_first() {
    let body = json!({"query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": true});
    let request = ValidRerankRequest::parse(body.to_string().as_bytes()).unwrap();
    let answer = serde_json::to_value(request.answer("m".to_owned(), &[0.25, f32::NAN, 0.5], 9)).unwrap();
    assert_eq!(
        answer,
        json!({
            "id": "", "object": "list", "model": "m", "usage": {"prompt_tokens": 9, "total_tokens": 9},
            "results": [
                {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
                {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
            ],
        })
    );
}
