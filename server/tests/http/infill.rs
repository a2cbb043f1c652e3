//! Gaps within texts, filled by a model whose file names tokens for that, and refused by one whose file names none.

use serde_json::{Value, json};

use crate::numbers_file::with_numbers;
use crate::server::{Events, Server, model};

const TEXT: &str = "/v1/completions";
const INFILL: &str = "/infill";
/// Tokens of the demo models that nothing here is written with.
const PREFIX: i64 = 2043;
const SUFFIX: i64 = 2044;
const MIDDLE: i64 = 2045;
const REPOSITORY: i64 = 2046;
const FILE: i64 = 2047;

/// A server of the second demo model, whose file names such tokens.
async fn filling(args: &[&str]) -> (tempfile::NamedTempFile, Server) {
    let names =
        ["fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    let ids = [PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE].map(|id| u32::try_from(id).unwrap());
    let numbers: Vec<(&str, u32)> = names.iter().map(String::as_str).zip(ids).collect();
    let file = tempfile::NamedTempFile::with_suffix(".gguf").unwrap();
    let original = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    std::fs::write(file.path(), with_numbers(&original, &numbers)).unwrap();
    let server = Server::launch(file.path(), args);
    server.until_ready().await;
    (file, server)
}

async fn post(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let response = server.post(path, body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn told(server: &Server, path: &str, body: &Value) -> Value {
    let (status, answer) = post(server, path, body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

/// A text's tokens, none of them a special one.
async fn tokens(server: &Server, text: &str) -> Vec<i64> {
    let answer = told(server, "/tokenize", &json!({"content": text, "parse_special": false})).await;
    answer["tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
}

/// What a model reads of a gap: a mark, and a text, again and again.
async fn marked(server: &Server, parts: &[(i64, &str)]) -> Vec<i64> {
    let mut all = Vec::new();
    for (mark, text) in parts {
        all.push(*mark);
        all.extend(tokens(server, text).await);
    }
    all
}

/// The prompt's tokens but the first, as they were computed.
fn read(answer: &Value) -> Vec<i64> {
    let of_prompt = answer["choices"][0]["prompt_logprobs"].as_array().unwrap();
    of_prompt[1..].iter().map(|told| told.as_object().unwrap().keys().next().unwrap().parse().unwrap()).collect()
}

#[tokio::test]
async fn a_text_with_a_suffix_is_read_around_its_gap() {
    let (_file, server) = filling(&["--ctx-size", "4096", "--parallel", "4"]).await;
    let (before, after) = ("The capital of <|im_end|>Peru", " is a city.<|im_start|>");
    let body = json!({"prompt": before, "suffix": after, "max_tokens": 8, "temperature": 0, "prompt_logprobs": 0});
    let answer = told(&server, TEXT, &body).await;
    let wanted = marked(&server, &[(PREFIX, before), (SUFFIX, after), (MIDDLE, "")]).await;
    assert!(!wanted.contains(&1) && !wanted.contains(&2), "no text is a special token: {wanted:?}");
    assert_eq!(read(&answer), wanted[1..]);
    assert_eq!(answer["usage"]["prompt_tokens"], wanted.len());
    let text = answer["choices"][0]["text"].as_str().unwrap();
    // As who writes those tokens is answered.
    let written = json!({"prompt": wanted, "max_tokens": 8, "temperature": 0});
    assert_eq!(told(&server, TEXT, &written).await["choices"][0]["text"], text);

    let with = |more: Value| {
        let mut body = json!({"prompt": before, "suffix": after, "max_tokens": 8, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let echoed = told(&server, TEXT, &with(json!({"echo": true, "n": 2, "logprobs": null}))).await;
    for choice in echoed["choices"].as_array().unwrap() {
        assert_eq!(choice["text"].as_str().unwrap(), format!("{before}{text}"));
    }
    let likely = told(&server, TEXT, &with(json!({"logprobs": 1}))).await;
    assert!(!likely["choices"][0]["logprobs"]["tokens"].as_array().unwrap().is_empty());
    let events = Events::open(server.post(TEXT, &with(json!({"stream": true})))).await.rest().await;
    let chunks = events[..events.len() - 1].iter().map(|event| serde_json::from_str::<Value>(event).unwrap());
    let streamed: String = chunks.map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!((streamed.as_str(), events.last().unwrap().as_str()), (text, "[DONE]"));
    // Several prompts, and prompts of tokens, have the same suffix.
    let several =
        told(&server, TEXT, &with(json!({"prompt": [before, tokens(&server, before).await], "max_tokens": 1}))).await;
    assert_eq!(several["choices"][0]["text"], several["choices"][1]["text"]);
    assert_eq!(
        told(&server, TEXT, &with(json!({"prompt": "", "max_tokens": 1}))).await["choices"].as_array().unwrap().len(),
        1
    );

    let long = "word ".repeat(2000);
    for (more, param, code) in [
        (json!({"suffix": long}), "suffix", "context_length_exceeded"),
        (json!({"prompt": long}), "prompt", "context_length_exceeded"),
        (json!({"parse_special": true}), "parse_special", "invalid_value"),
        (json!({"echo": true, "logprobs": 1}), "logprobs", "invalid_value"),
        (json!({"prompt": [[5, 1_000_000]]}), "prompt[1]", "invalid_token"),
    ] {
        let (status, answer) = post(&server, TEXT, &with(more)).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!(param), &json!(code)), "{answer}");
    }
}

#[tokio::test]
async fn editors_have_their_gaps_filled() {
    let (_file, server) = filling(&["--ctx-size", "4096", "--parallel", "4"]).await;
    let body = json!({
        "input_prefix": "fn main() {\n", "input_suffix": "\n}\n", "prompt": "    let x", "n_predict": 12,
        "input_extra": [{"text": "mod a;\n", "filename": "a.rs", "time": [1, 2]}, {"text": "mod b;\n"}],
        // As an editor's plugin sends it.
        "top_k": 1, "top_p": 0.99, "stream": false, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true,
        "t_max_prompt_ms": 500, "n_indent": 0,
    });
    let with = |more: Value| {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = told(&server, INFILL, &body).await;
    let before = [tokens(&server, "fn main() {\n").await, tokens(&server, "    let x").await].concat();
    let head = [(REPOSITORY, "myproject\n"), (FILE, "a.rs\n")];
    let parts = [
        marked(&server, &head).await,
        tokens(&server, "mod a;\n").await,
        marked(&server, &[(FILE, "tmp\n")]).await,
        tokens(&server, "mod b;\n").await,
        marked(&server, &[(FILE, "filename\n"), (PREFIX, "")]).await,
        before,
        marked(&server, &[(SUFFIX, "\n}\n"), (MIDDLE, "")]).await,
    ];
    let prompt = parts.concat();
    let written = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0});
    let same = told(&server, TEXT, &written).await;
    assert_eq!(answer["content"], same["choices"][0]["text"]);
    assert_eq!(answer["tokens_evaluated"], prompt.len());
    assert_eq!(answer["tokens_predicted"], same["usage"]["completion_tokens"]);
    let is_limit = same["choices"][0]["finish_reason"] == "length";
    assert_eq!(answer["stop_type"], if is_limit { "limit" } else { "eos" });
    assert_eq!(
        (&answer["stop"], &answer["truncated"], &answer["stopping_word"]),
        (&json!(true), &json!(false), &json!(""))
    );
    assert!(answer["timings"]["predicted_ms"].is_number() && answer["timings"]["prompt_n"].is_number(), "{answer}");

    // Only what an editor reads of it.
    let chosen =
        told(&server, INFILL, &with(json!({"response_fields": ["content", "timings/prompt_n", "none", ""]}))).await;
    let keys: Vec<&str> = chosen.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!((keys, &chosen["content"]), (vec!["content", "timings/prompt_n"], &answer["content"]));
    // What is sent so that files are read before they are needed.
    let warm = json!({
        "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [], "t_max_predict_ms": 1,
        "input_extra": [{"text": "mod a;\n", "filename": "a.rs"}], "response_fields": [""],
    });
    assert_eq!(told(&server, INFILL, &warm).await, json!({}));

    let events = Events::open(server.post(INFILL, &with(json!({"stream": true})))).await.rest().await;
    let pieces: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (last, pieces) = pieces.split_last().unwrap();
    let content: String = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    assert_eq!((content.as_str(), &last["stop"]), (answer["content"].as_str().unwrap(), &json!(true)));
    assert!(pieces.iter().all(|piece| piece["stop"] == false && piece["tokens_evaluated"] == prompt.len()));
    for name in ["tokens_evaluated", "tokens_predicted", "stop_type", "truncated"] {
        assert_eq!(last[name], answer[name], "{name}");
    }

    // Files that there is no room for are left out, the farthest first, and what stands around a gap is not.
    let far = json!({"text": "word ".repeat(3000), "filename": "far.rs"});
    let near = json!({"text": "mod b;\n", "filename": "b.rs"});
    let cut = told(&server, INFILL, &with(json!({"input_extra": [far, near]}))).await;
    let alone = told(&server, INFILL, &with(json!({"input_extra": [near]}))).await;
    assert_eq!((&cut["tokens_evaluated"], &cut["content"]), (&alone["tokens_evaluated"], &alone["content"]));
    assert_eq!(
        (&cut["input_extra_left_out"], &alone["input_extra_left_out"]),
        (&json!(1), &json!(0)),
        "and are told of"
    );
    let cut = with(json!({"input_extra": [far, near], "stream": true}));
    let events = Events::open(server.post(INFILL, &cut)).await.rest().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["input_extra_left_out"], 1);
    for (more, param, code) in [
        (json!({"input_suffix": "word ".repeat(3000)}), "input_suffix", "context_length_exceeded"),
        (json!({"input_prefix": "word ".repeat(3000)}), "input_prefix", "context_length_exceeded"),
        (json!({"input_prefix": null}), "input_prefix", "missing_required_parameter"),
        (json!({"input_extra": [{"filename": "a"}]}), "input_extra[0].text", "missing_required_parameter"),
        (json!({"n": 2}), "n", "unsupported_parameter"),
    ] {
        let (status, error) = post(&server, INFILL, &with(more)).await;
        let error = &error["error"];
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!(param), &json!(code)), "{error}");
    }
    let listed = server.get("/v1/models").await.json::<Value>().await.unwrap();
    assert!(listed["data"][0]["features"].as_array().unwrap().contains(&json!("infill")), "{listed}");
    let counted = "gantry_requests_total{route=\"infill\",version=\"standalone\",status=\"200\",outcome=\"ok\"}";
    assert!(server.metric(counted).await > 4.5);
}

#[tokio::test]
async fn a_model_may_read_the_suffix_first() {
    let (_file, server) = filling(&["--spm-infill", "--ctx-size", "2048", "--parallel", "1"]).await;
    let body = json!({"prompt": "one", "suffix": "two", "max_tokens": 1, "prompt_logprobs": 0});
    let wanted = marked(&server, &[(SUFFIX, "two"), (PREFIX, "one"), (MIDDLE, "")]).await;
    assert_eq!(read(&told(&server, TEXT, &body).await), wanted[1..]);
}

#[tokio::test]
async fn a_model_without_marks_fills_no_gap() {
    let server = Server::start(&[]).await;
    let (status, error) = post(&server, TEXT, &json!({"prompt": "one", "suffix": "two"})).await;
    let error = &error["error"];
    assert_eq!((status, &error["param"], &error["code"]), (400, &json!("suffix"), &json!("unsupported_parameter")));
    let (status, error) = post(&server, INFILL, &json!({"input_prefix": "one", "input_suffix": "two"})).await;
    assert_eq!((status, &error["error"]["type"]), (400, &json!("not_supported_error")), "{error}");
    assert!(error["error"]["message"].as_str().unwrap().contains("fim_pre"), "{error}");
    // What is empty says nothing.
    assert_eq!(post(&server, TEXT, &json!({"prompt": "one", "suffix": "", "max_tokens": 1})).await.0, 200);
    let listed = server.get("/v1/models").await.json::<Value>().await.unwrap();
    assert!(!listed["data"][0]["features"].as_array().unwrap().contains(&json!("infill")), "{listed}");
}
