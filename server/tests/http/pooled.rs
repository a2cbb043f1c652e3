//! Embeddings and rankings: beside generated text, and from models that generate none.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::gguf;
use crate::server::{Events, Server, UNENDING, await_condition, command, endless, model, output, send_signal};

const EMBEDDINGS: &str = "/v1/embeddings";
const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";
const TEXT: &str = "/v1/completions";

async fn post(server: &Server, path: &str, body: Value) -> (u16, Value) {
    let response = server.post(path, &body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn embed(server: &Server, input: Value) -> Value {
    let (status, answer) = post(server, EMBEDDINGS, json!({"input": input})).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

fn vectors(answer: &Value) -> Vec<Vec<f64>> {
    let numbers = |item: &Value| item["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    answer["data"].as_array().unwrap().iter().map(numbers).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A file that a test wrote, gone with its folder.
fn written(gguf: &gguf::Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("written.gguf");
    std::fs::write(&path, gguf.bytes()).unwrap();
    (folder, path)
}

#[tokio::test]
async fn texts_have_vectors_beside_generated_text() {
    let server = Server::start(&["--ctx-size", "8192", "--embeddings", "--pooling", "mean", "--alias", "demo"]).await;
    let texts = ["The capital of Peru is Lima.", "A cat sat on a mat.", "The capital of Norway is Oslo."];
    let mut stream = Events::open(server.post(TEXT, &endless(1000))).await;
    stream.next().await.unwrap();
    let together = embed(&server, json!(texts)).await;
    assert_eq!((&together["object"], &together["model"]), (&json!("list"), &json!("demo")));
    let all = vectors(&together);
    assert_eq!(all.len(), 3);
    let mut tokens = 0;
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(together["data"][i]["index"], i);
        assert_eq!(together["data"][i]["object"], "embedding");
        assert_eq!(all[i].len(), 256);
        assert!((dot(&all[i], &all[i]) - 1.0).abs() < 1e-4);
        let alone = embed(&server, json!(text)).await;
        assert!(dot(&all[i], &vectors(&alone)[0]) > 0.999, "{text}: alone and together");
        tokens += alone["usage"]["prompt_tokens"].as_u64().unwrap();
    }
    assert_eq!(together["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    assert!(dot(&all[0], &all[2]) > dot(&all[0], &all[1]), "two capitals are nearer than a capital and a cat");
    assert_eq!(stream.rest().await.last().map(String::as_str), Some("[DONE]"));

    // Token ids are taken as they are, and count as many.
    let ids = embed(&server, json!([[5, 6, 7], [8, 9]])).await;
    assert_eq!(ids["usage"]["prompt_tokens"], 5);
    let base64 = json!({"input": texts[0], "encoding_format": "base64", "dimensions": 256, "model": "demo"});
    let (_, encoded) = post(&server, EMBEDDINGS, base64).await;
    let encoded: gantry_openai::EmbeddingList = serde_json::from_value(encoded).unwrap();
    let floats: Vec<f64> = encoded.data[0].embedding.floats().unwrap().into_iter().map(f64::from).collect();
    assert!(dot(&floats, &all[0]) > 0.999);
    let counted = "gantry_requests_total{route=\"embeddings\",version=\"standalone\",status=\"200\",outcome=\"ok\"}";
    assert!((server.metric(counted).await - 6.0).abs() < 0.1);

    let first = server.post(EMBEDDINGS, &json!({"input": texts})).header("x-gantry-priority", "high");
    assert_eq!(first.send().await.unwrap().status(), 200);
    let high = "gantry_requests_by_priority_total{version=\"standalone\",priority=\"high\"}";
    assert!((server.metric(high).await - 1.0).abs() < 0.1);
}

#[tokio::test]
async fn what_is_wrong_with_one_text_is_told_with_its_place() {
    let server = Server::start(&["--embeddings", "--pooling", "last", "--ubatch-size", "64"]).await;
    let long = "word ".repeat(200);
    let good = json!(["fine", "as well"]);
    for (body, param, code, says) in [
        (json!({"input": ["fine", long]}), "input[1]", "context_length_exceeded", "--ubatch-size"),
        (json!({"input": long}), "input", "context_length_exceeded", "64"),
        (json!({"input": [[5], [5, 2_000_000]]}), "input[1]", "invalid_token", "2000000"),
        (json!({"input": good, "dimensions": 64}), "dimensions", "invalid_value", "256"),
        (json!({"input": good, "dimensions": 64}), "dimensions", "invalid_value", "--matryoshka"),
        (json!({"input": ["fine", ""]}), "input[1]", "invalid_value", "empty"),
    ] {
        // Beside one with nothing wrong, which is answered.
        let (wrong, right) = tokio::join!(post(&server, EMBEDDINGS, body), embed(&server, good.clone()));
        let (status, error) = wrong;
        let error = &error["error"];
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!(param), &json!(code)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
        assert_eq!(vectors(&right).len(), 2);
    }
}

#[tokio::test]
async fn texts_of_several_requests_are_computed_together() {
    let server =
        Server::start(&["--embeddings", "--pooling", "mean", "--embedding-wait-ms", "1000", "--embedding-batch", "64"])
            .await;
    let asked = (0..32).map(|i| embed(&server, json!(format!("text number {i}"))));
    let answers = futures::future::join_all(asked).await;
    let again = embed(&server, json!("text number 7")).await;
    assert!(dot(&vectors(&answers[7])[0], &vectors(&again)[0]) > 0.999, "each has its own");
    assert!(dot(&vectors(&answers[8])[0], &vectors(&again)[0]) < 0.999_9);
    let texts = async || server.metric("gantry_pooled_texts_total").await;
    await_condition("the texts to be counted", async || texts().await > 32.5).await;
    let batches = server.metric("gantry_pooled_batches_total").await;
    assert!(batches < 16.0, "33 texts took {batches} batches");
    assert!(server.metric("gantry_pooled_tokens_total").await > 33.0);
}

#[tokio::test]
async fn a_full_queue_a_limit_of_time_and_a_client_that_leaves() {
    let server = Server::start_unending(1, &["--max-queue", "1", "--embeddings", "--pooling", "mean"]).await;
    let many = json!({"input": vec!["a text of some words that takes a while"; 2048]});
    let leaving = server.post(EMBEDDINGS, &many).timeout(Duration::from_millis(300)).send().await;
    assert!(leaving.is_err() || leaving.unwrap().status() == 200);
    let busy =
        async || server.metric("gantry_requests_queued{").await + server.metric("gantry_requests_running{").await;
    await_condition("its place to be free", async || busy().await < 0.5).await;

    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(Events::open(server.post(TEXT, &endless(UNENDING))));
    }
    let both = tokio::spawn(futures::future::join_all(streams));
    await_condition("the queue to be full", async || busy().await > 1.5).await;
    let refused = server.post(EMBEDDINGS, &json!({"input": "x"})).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    both.abort();
    await_condition("the queue to be empty", async || busy().await < 0.5).await;

    let late = server.post(EMBEDDINGS, &many).header("x-gantry-queue-timeout-ms", "1").send().await.unwrap();
    assert_eq!(late.status(), 408);
    let late: Value = late.json().await.unwrap();
    assert_eq!(late["error"]["code"], "request_timeout");
    assert_eq!(vectors(&embed(&server, json!("and on")).await).len(), 1);
}

#[tokio::test]
async fn what_a_worker_died_with_is_computed_by_the_next() {
    let server = Server::start(&["--embeddings", "--pooling", "mean"]).await;
    let text = |i: usize| format!("word {i} {}", "and so on ".repeat(10));
    let alone = vectors(&embed(&server, json!(text(7))).await);
    let texts: Vec<String> = (0..2048).map(text).collect();
    let computing = async || server.metric("gantry_requests_running{").await > 0.5;
    let retried = async || server.metric("gantry_requests_retried_total{").await > 0.5;
    // The answer may come before the signal does; then again, and fewer times than make the version fail.
    for _ in 1..gantry_server::limits::CRASH_LIMIT {
        let ready = async || server.ready().await.0 == 200 && !server.workers().is_empty();
        await_condition("a worker that is ready", ready).await;
        let asked = tokio::spawn(server.post(EMBEDDINGS, &json!({"input": texts})).send());
        await_condition("it to be computed", async || asked.is_finished() || computing().await).await;
        send_signal(server.workers()[0], "KILL");
        let answer = asked.await.unwrap().unwrap();
        assert_eq!(answer.status(), 200);
        let all = vectors(&answer.json().await.unwrap());
        assert_eq!(all.len(), 2048);
        assert!(all.iter().all(|vector| vector.len() == 256), "none is left from a life to the next");
        assert!(dot(&all[7], &alone[0]) > 0.999);
        if retried().await {
            break;
        }
    }
    assert!(retried().await, "a worker died in the midst of it");
}

#[tokio::test]
async fn an_encoder_embeds_and_generates_nothing() {
    let (_folder, path) = written(&gguf::bert(1));
    // Asked for or not: it can do nothing else.
    let server = Server::launch(&path, &["--memory-limit", "1000"]);
    server.until_ready().await;
    // It watches its memory as one that generates does.
    await_condition("the watch over memory", async || {
        server.metric("gantry_engine_memory_limit_bytes").await == f64::from(1000 << 20)
            && server.metric("gantry_engine_memory_used_bytes").await > 0.0
    })
    .await;
    let answer = embed(&server, json!(["one", "two"])).await;
    assert_eq!(vectors(&answer)[1].len(), 32);
    let (status, error) = post(&server, EMBEDDINGS, json!({"input": "x".repeat(65)})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "it knows 64 positions");
    let (status, error) = post(&server, TEXT, json!({"prompt": "Once"})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("unsupported_operation")), "{error}");
    let (status, error) = post(&server, RERANK, json!({"query": "q", "documents": ["d"]})).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("--reranking"), "{error}");
}

#[tokio::test]
async fn an_encoder_is_served_by_several_workers() {
    let (_folder, path) = written(&gguf::bert(1));
    let server = Server::launch(&path, &["--embeddings", "--workers", "2", "--threads", "2", "--parallel", "2"]);
    server.until_ready().await;
    assert_eq!(server.workers().len(), 2);
    let texts: Vec<String> = (0..32).map(|n| format!("text {n}")).collect();
    let alone = embed(&server, json!(["text 7"])).await;
    let answer = embed(&server, json!(texts)).await;
    let found = vectors(&answer);
    assert_eq!(found.len(), 32);
    let apart = found[7].iter().zip(&vectors(&alone)[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-2, "whichever worker has it: {apart}");
}

#[tokio::test]
async fn a_reranker_orders_documents_by_their_worth() {
    let (_folder, path) = written(&gguf::bert(4));
    let server = Server::launch(&path, &["--reranking", "--alias", "ranker"]);
    server.until_ready().await;
    let documents = ["bear", "hi", "giant-panda"];
    let body = json!({"query": "panda", "documents": documents, "return_documents": true});
    let (status, answer) = post(&server, RERANK, body).await;
    assert_eq!(status, 200, "{answer}");
    let results = answer["results"].as_array().unwrap();
    assert_eq!((results.len(), &answer["model"]), (3, &json!("ranker")));
    let scores: Vec<f64> = results.iter().map(|result| result["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b) && scores[0] > scores[2], "{scores:?}");
    for result in results {
        let document = documents[usize::try_from(result["index"].as_u64().unwrap()).unwrap()];
        assert_eq!(result["document"]["text"], document);
        // The score is the pair's own, whoever is beside it.
        let body = json!({"query": "panda", "documents": [document]});
        let (_, alone) = post(&server, "/rerank", body).await;
        let score = alone["results"][0]["relevance_score"].as_f64().unwrap();
        assert!((score - result["relevance_score"].as_f64().unwrap()).abs() < 1e-2, "{document}");
    }
    // <s>, the query's 5 bytes, </s>, the document's, </s>.
    let tokens: usize = documents.iter().map(|document| 8 + document.len()).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    // As Cohere's clients ask and read it.
    let (_, cohere) =
        post(&server, "/v2/rerank", json!({"model": "ranker", "query": "panda", "documents": documents})).await;
    assert!(cohere["id"].as_str().unwrap().starts_with("rerank-"), "{cohere}");
    assert_eq!(cohere["results"][0]["index"], answer["results"][0]["index"]);
    let (_, best) = post(&server, "/v1/reranking", json!({"query": "panda", "documents": documents, "top_n": 1})).await;
    assert_eq!(best["results"][0]["index"], answer["results"][0]["index"]);
    assert_eq!((best["results"].as_array().unwrap().len(), best["results"][0].get("document")), (1, None));

    let long = "x".repeat(80);
    for (body, param) in [
        (json!({"query": "q", "documents": ["fine", long]}), "documents[1]"),
        (json!({"query": long, "documents": ["fine"]}), "query"),
    ] {
        let (status, error) = post(&server, RERANK, body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{error}");
    }
    let (status, error) = post(&server, EMBEDDINGS, json!({"input": "x"})).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("/v1/rerank"), "{error}");
}

#[tokio::test]
async fn pairs_of_texts_are_scored() {
    let (_folder, path) = written(&gguf::bert(4));
    let ranker = Server::launch(&path, &["--reranking"]);
    ranker.until_ready().await;
    let body = json!({"text_1": "panda", "text_2": ["bear", "hi"]});
    let (status, answer) = post(&ranker, SCORE, body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["object"], answer["data"].as_array().unwrap().len()), (&json!("list"), 2));
    let (_, ranked) = post(&ranker, RERANK, json!({"query": "panda", "documents": ["bear", "hi"]})).await;
    for result in ranked["results"].as_array().unwrap() {
        let score = &answer["data"][usize::try_from(result["index"].as_u64().unwrap()).unwrap()];
        assert_eq!((&score["object"], &score["index"]), (&json!("score"), &result["index"]));
        assert!((score["score"].as_f64().unwrap() - result["relevance_score"].as_f64().unwrap()).abs() < 1e-2);
    }
    assert_eq!(answer["usage"], ranked["usage"]);
    // As many of each are pairs.
    let pairs = json!({"queries": ["hi", "panda"], "documents": ["bear", "hi"]});
    let (_, of_pairs) = post(&ranker, "/score", pairs).await;
    let (one, other) = (&of_pairs["data"][1]["score"], &answer["data"][1]["score"]);
    assert!((one.as_f64().unwrap() - other.as_f64().unwrap()).abs() < 1e-2, "{of_pairs} {answer}");
    let long = "x".repeat(80);
    for (body, param, code) in [
        (json!({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}), "text_1", "invalid_value"),
        (json!({"text_1": "a"}), "text_2", "missing_required_parameter"),
        (json!({"text_1": "a", "queries": ["a"], "text_2": "b"}), "queries", "invalid_value"),
        (json!({"text_1": "a", "text_2": ["b", ""]}), "text_2[1]", "invalid_value"),
        (json!({"text_1": "a", "text_2": ["b", long]}), "text_2[1]", "context_length_exceeded"),
        (json!({"text_1": long, "text_2": "b"}), "text_1", "context_length_exceeded"),
    ] {
        let (status, error) = post(&ranker, SCORE, body).await;
        let error = &error["error"];
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!(param), &json!(code)), "{error}");
    }

    let embeds = Server::start(&["--embeddings", "--pooling", "mean", "--ubatch-size", "64"]).await;
    let (one, other) = ("The capital of Peru is Lima.", "The capital of Norway is Oslo.");
    let all = vectors(&embed(&embeds, json!([one, other, "A cat sat on a mat."])).await);
    let (status, answer) = post(&embeds, SCORE, json!({"text_1": one, "text_2": [other, "A cat sat on a mat."]})).await;
    assert_eq!(status, 200, "{answer}");
    for (place, vector) in all[1..].iter().enumerate() {
        let score = answer["data"][place]["score"].as_f64().unwrap();
        assert!((score - dot(&all[0], vector)).abs() < 1e-3, "{score}");
    }
    let (status, error) = post(&embeds, SCORE, json!({"text_1": "a", "text_2": ["b", "word ".repeat(100)]})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("text_2[1]")), "{error}");

    let (status, error) = post(&Server::start(&[]).await, SCORE, json!({"text_1": "a", "text_2": "b"})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("unsupported_operation")));
    assert!(error["error"]["message"].as_str().unwrap().contains("--reranking"), "{error}");
}

#[tokio::test]
async fn vectors_are_cut_where_the_operator_says_that_they_may_be() {
    let server = Server::start(&["--embeddings", "--pooling", "mean", "--matryoshka"]).await;
    let text = "The capital of Peru is Lima.";
    let whole = vectors(&embed(&server, json!(text)).await).remove(0);
    let norm = dot(&whole[..64], &whole[..64]).sqrt();
    for format in ["float", "base64"] {
        let body = json!({"input": text, "dimensions": 64, "encoding_format": format});
        let (status, cut) = post(&server, EMBEDDINGS, body).await;
        assert_eq!(status, 200, "{cut}");
        let cut: gantry_openai::EmbeddingList = serde_json::from_value(cut).unwrap();
        let cut = cut.data[0].embedding.floats().unwrap();
        assert_eq!(cut.len(), 64);
        for (one, other) in cut.iter().zip(&whole) {
            assert!((f64::from(*one) - other / norm).abs() < 1e-3, "{one} {other}");
        }
    }
    let (status, error) = post(&server, EMBEDDINGS, json!({"input": text, "dimensions": 257})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("dimensions")), "{error}");
}

#[tokio::test]
async fn a_model_that_cannot_do_what_is_asked_ends_the_start_with_the_way_out() {
    let (_folder, encoder) = written(&gguf::bert(1));
    let (_other, unnamed) = written(&gguf::bert(0));
    for (file, args, says) in [
        (model("demo-v2.q8_0.gguf"), &["--embeddings"][..], "--pooling"),
        (model("demo-v2.q8_0.gguf"), &["--reranking"][..], "no reranker"),
        (encoder, &["--reranking"][..], "no reranker"),
        (unnamed, &[][..], "--pooling"),
    ] {
        let mut command = command(&file);
        command.args(["--port", "0"]).args(args);
        let (status, log) = output(command);
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("cannot serve the model") && log.contains(says), "{args:?}: {log}");
    }
}
