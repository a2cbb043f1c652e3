//! `/tokenize`, `/detokenize` and `/apply-template`, as llama-server's users know them.

use serde_json::{Value, json};

use crate::server::Server;

async fn post(server: &Server, path: &str, body: Value) -> (u16, Value) {
    let response = server.post(path, &body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn texts_become_tokens_and_tokens_texts_and_chats_prompts() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "2"]).await;
    let ask = async |path: &str, body: Value| {
        let (status, answer) = post(&server, path, body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let text = "Which version are you? h\u{e9}llo \u{1f600}";
    let tokens = ask("/tokenize", json!({"content": text})).await["tokens"].clone();
    assert!(tokens.as_array().unwrap().len() > 3, "{tokens}");
    assert_eq!(ask("/detokenize", json!({"tokens": tokens})).await, json!({"content": text, "prompt": text}));
    let of_vllm = json!({"prompt": text, "add_special_tokens": false});
    assert_eq!(ask("/tokenize", of_vllm).await["tokens"], tokens);
    let info: Value = server.get("/tokenizer_info").await.json().await.unwrap();
    assert_eq!(info["eos_token"], "<|im_end|>", "{info}");

    // Pieces are the same tokens, and their bytes are the text.
    let pieces = ask("/tokenize", json!({"content": text, "with_pieces": true})).await["tokens"].clone();
    let ids: Vec<&Value> = pieces.as_array().unwrap().iter().map(|piece| &piece["id"]).collect();
    assert_eq!(json!(ids), tokens);
    let bytes: Vec<u8> = pieces
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|piece| match &piece["piece"] {
            Value::String(text) => text.clone().into_bytes(),
            bytes => serde_json::from_value(bytes.clone()).unwrap(),
        })
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), text);

    // What a chat is rendered as is what the usage of the same chat counts.
    let messages = json!([{"role": "user", "content": "Which version are you?"}]);
    let prompt = ask("/apply-template", json!({"messages": messages})).await["prompt"].clone();
    assert!(prompt.as_str().unwrap().contains("Which version are you?"), "{prompt}");
    let count = async |parse_special: bool| {
        let asked = json!({"content": prompt, "parse_special": parse_special, "add_special": true});
        ask("/tokenize", asked).await["tokens"].as_array().unwrap().len()
    };
    let (as_markup, as_text) = (count(true).await, count(false).await);
    let answer = ask("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})).await;
    assert_eq!(answer["usage"]["prompt_tokens"], as_markup);
    assert!(as_text > as_markup, "its special tokens are text where that is asked for");
    assert_eq!(ask("/tokenize", json!({"content": ""})).await, json!({"tokens": []}));

    // More than any request could be computed with.
    let long = ask("/tokenize", json!({"content": "word ".repeat(20_000)})).await;
    assert!(long["tokens"].as_array().unwrap().len() > 2048);

    for (path, body, status, param, code) in [
        ("/tokenize", json!({}), 400, "content", "missing_required_parameter"),
        ("/tokenize", json!({"content": "x", "model": "other"}), 404, "model", "model_not_found"),
        ("/detokenize", json!({"tokens": [1, i32::MAX]}), 400, "tokens[1]", "invalid_token"),
        ("/apply-template", json!({"messages": []}), 400, "messages", "invalid_value"),
    ] {
        let (got, answer) = post(&server, path, body).await;
        let error = &answer["error"];
        assert_eq!((got, &error["param"], &error["code"]), (status, &json!(param), &json!(code)), "{path}: {answer}");
    }
    let counted = "gantry_requests_total{route=\"tokenizer\",version=\"standalone\",status=\"200\",outcome=\"ok\"}";
    assert!(server.metric(counted).await >= 7.0);
}
