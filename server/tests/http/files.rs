//! Model files, good and bad, as `serve` and `validate` take them: the same files, with the same words.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gantry_gguf::Header;
use serde_json::json;

use crate::gguf;
use crate::server::{Server, command, model, output};
use crate::split::split;

fn validate(file: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    command.arg("validate").arg(file).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn demo() -> (Vec<u8>, Header) {
    let path = model("demo-v2.q8_0.gguf");
    (std::fs::read(&path).unwrap(), gantry_gguf::read_header(&path).unwrap())
}

/// Puts other bytes behind the first place where these are.
fn behind(file: &mut [u8], key: &str, skip: usize, bytes: &[u8]) {
    let at = file.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + skip;
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn a_good_file_is_reported_with_every_part_that_was_looked_at() {
    let good = validate(&model("demo-v2.q4_k_m.gguf"), &[]);
    let (report, log) = (text(&good.stdout), text(&good.stderr));
    assert_eq!((good.status.code(), log.as_str()), (Some(0), ""), "{report}");
    for part in [
        "Q4_K",
        "ok   format",
        "ok   tokenizer",
        "ok   shapes",
        "ok   weights",
        "ok   trial load  a worker",
        "with 2048 tokens of context",
    ] {
        assert!(report.contains(part), "{part} is not in {report}");
    }
    let header = validate(&model("demo-v2.q4_k_m.gguf"), &["--header-only"]);
    let report = text(&header.stdout);
    assert_eq!(header.status.code(), Some(0));
    assert!(report.contains("--   weights     --header-only") && report.contains("--   trial load  --header-only"));
    let unloaded = text(&validate(&model("demo-v2.q4_k_m.gguf"), &["--no-load"]).stdout);
    assert!(unloaded.contains("ok   weights") && unloaded.contains("--   trial load  --no-load"), "{unloaded}");
}

#[tokio::test]
async fn experts_told_layer_by_layer_and_a_key_as_long_as_may_be_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mixture.gguf");
    std::fs::write(&file, gguf::mixture().bytes()).unwrap();
    let report = validate(&file, &[]);
    assert_eq!(report.status.code(), Some(0), "{}", text(&report.stdout));
    let server = Server::launch(&file, &["--parallel", "1"]);
    server.until_ready().await;
    let body = json!({"prompt": "Once", "max_tokens": 4, "ignore_eos": true, "temperature": 0});
    let answer = server.post("/v1/completions", &body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let answer: serde_json::Value = answer.json().await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
}

#[test]
fn serve_and_validate_refuse_the_same_files_with_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, header) = demo();
    let norm = header.tensors().get("output_norm.weight").unwrap();
    let norm = usize::try_from(header.summary().header_bytes + norm.offset).unwrap();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut file = whole.clone();
        change(&mut file);
        file
    };
    let cases = [
        ("cut", changed(&|file| file.truncate(2_000_000)), "header", "cut short"),
        ("text", b"not a model".to_vec(), "header", "not a GGUF file"),
        ("blocks-513", changed(&|f| behind(f, "llama.block_count", 4, &513_u32.to_le_bytes())), "header", "512"),
        ("rope", changed(&|f| behind(f, "llama.rope.freq_base", 4, &f32::NAN.to_le_bytes())), "header", "freq_base"),
        (
            "token",
            changed(&|f| behind(f, "tokenizer.ggml.eos_token_id", 4, &9999_u32.to_le_bytes())),
            "tokenizer",
            "only 2048 tokens",
        ),
        ("norm", changed(&|f| f[norm..norm + 4].copy_from_slice(&f32::NAN.to_le_bytes())), "weights", "output_norm"),
        ("zeros", changed(&|f| f[header.summary().header_bytes as usize..].fill(0)), "weights", "is zero"),
    ];
    for (name, bytes, part, words) in cases {
        let file = folder.path().join(format!("{name}.gguf"));
        std::fs::write(&file, bytes).unwrap();
        same_words(&file, part, words);
    }
    // A pipe into which nobody writes, as the second part.
    let first = split(folder.path());
    let second = folder.path().join("demo-00002-of-00002.gguf");
    std::fs::remove_file(&second).unwrap();
    same_words(&first, "file", "part 2 of 2");
    assert!(Command::new("mkfifo").arg(&second).status().unwrap().success());
    same_words(&first, "file", "not a regular file");
}

/// A demo model with three things wrong and one odd, and its codes.
fn damaged(folder: &Path) -> (PathBuf, [&'static str; 4]) {
    let (mut file, _) = demo();
    behind(&mut file, "llama.block_count", 4, &513_u32.to_le_bytes());
    behind(&mut file, "llama.rope.freq_base", 4, &f32::NAN.to_le_bytes());
    behind(&mut file, "tokenizer.ggml.eos_token_id", 4, &9999_u32.to_le_bytes());
    behind(&mut file, "tokenizer.ggml.padding_token_id", 4, &9999_u32.to_le_bytes());
    let path = folder.join("bad model.gguf");
    std::fs::write(&path, file).unwrap();
    (path, ["key-out-of-range", "wrong-fraction", "token-out-of-range", "unused-token-out-of-range"])
}

#[test]
fn all_that_is_wrong_is_told_to_people_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (file, codes) = damaged(folder.path());
    let validated = validate(&file, &[]);
    let (report, log) = (text(&validated.stdout), text(&validated.stderr));
    assert_eq!(validated.status.code(), Some(1));
    let mut rest = report.as_str();
    for code in codes {
        rest =
            rest.split_once(&format!("\n                   [{code}] found ")).unwrap_or_else(|| panic!("{report}")).1;
    }
    assert_eq!((report.matches("  FAIL ").count(), report.matches("  note ").count()), (3, 1), "{report}");
    assert!(!report.contains('\x1b'), "no colours in a pipe");
    // Scripts are told the first.
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("block_count"), "{log}");
}

#[test]
fn programs_get_the_findings_as_an_object() {
    let folder = tempfile::tempdir().unwrap();
    let (file, codes) = damaged(folder.path());
    let validated = validate(&file, &["--format", "json"]);
    assert_eq!(validated.status.code(), Some(1));
    let object: serde_json::Value = serde_json::from_slice(&validated.stdout).unwrap();
    assert_eq!((&object["formatVersion"], &object["accepted"]), (&json!(1), &json!(false)));
    let findings = object["findings"].as_array().unwrap();
    let found: Vec<&str> = findings.iter().map(|finding| finding["code"].as_str().unwrap()).collect();
    assert_eq!(found, codes);
    let (bytes, first) = (std::fs::read(&file).unwrap(), &findings[0]);
    let key = b"llama.block_count";
    let place = bytes.windows(key.len()).position(|window| window == key).unwrap() - 8;
    assert_eq!(first["offset"], json!(place));
    assert_eq!((&first["severity"], &first["found"]), (&json!("error"), &json!("513")));
    assert_eq!((&first["subject"], &first["expected"]), (&json!("llama.block_count"), &json!("1 to 512")));
    assert_eq!(findings[3]["severity"], "warning");

    let good = validate(&model("demo-v2.q4_k_m.gguf"), &["--output-format", "json", "--no-load"]);
    let object: serde_json::Value = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!((good.status.code(), &object["accepted"], &object["findings"]), (Some(0), &json!(true), &json!([])));
    assert_eq!((&object["summary"]["quantization"], &object["summary"]["layers"]), (&json!("Q4_K_M"), &json!(4)));
    assert!(object["memory"]["totalBytes"].as_u64().unwrap() > 1 << 20, "{object}");
    let checks = object["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["part"] == "trial load" && check["verdict"] == "leftOut"), "{object}");
}

#[test]
fn code_scanning_gets_the_findings_as_sarif() {
    let folder = tempfile::tempdir().unwrap();
    let (file, codes) = damaged(folder.path());
    let validated = validate(&file, &["--format", "sarif"]);
    assert_eq!(validated.status.code(), Some(1));
    let log: serde_json::Value = serde_json::from_slice(&validated.stdout).unwrap();
    assert_eq!(log["version"], "2.1.0");
    let run = &log["runs"][0];
    let rules = run["tool"]["driver"]["rules"].as_array().unwrap();
    let results = run["results"].as_array().unwrap();
    assert_eq!(results.len(), codes.len());
    let mut fingerprints = Vec::new();
    for (result, code) in results.iter().zip(codes) {
        // Each result is of the rule that its index says, which is described.
        assert_eq!(result["ruleId"], code);
        let rule = &rules[usize::try_from(result["ruleIndex"].as_u64().unwrap()).unwrap()];
        assert_eq!((&rule["id"], &rule["defaultConfiguration"]["level"]), (&json!(code), &result["level"]));
        for part in ["shortDescription", "fullDescription", "help"] {
            assert!(rule[part]["text"].as_str().is_some_and(|text| !text.is_empty()), "{rule}");
        }
        assert!(!result["message"]["text"].as_str().unwrap().is_empty());
        let place = &result["locations"][0]["physicalLocation"];
        let address = place["artifactLocation"]["uri"].as_str().unwrap();
        assert!(address.starts_with("file:///") && address.ends_with("/bad%20model.gguf"), "{address}");
        assert!(place["region"]["byteOffset"].as_u64().is_some() && place["region"]["startLine"] == 1);
        fingerprints.push(result["partialFingerprints"]["primaryLocationLineHash"].as_str().unwrap());
    }
    fingerprints.sort_unstable();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), codes.len());
    let good = validate(&model("demo-v2.q4_k_m.gguf"), &["--format", "sarif", "--header-only"]);
    let log: serde_json::Value = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!((good.status.code(), &log["runs"][0]["results"]), (Some(0), &json!([])));
}

#[test]
fn all_weights_are_read_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = model("demo-v2.f16.gguf");
    let (mut file, header) = (std::fs::read(&path).unwrap(), gantry_gguf::read_header(&path).unwrap());
    let tensors = ["blk.1.ffn_up.weight", "blk.2.ffn_down.weight"];
    for name in tensors {
        // Between the pieces of a sample.
        let at = usize::try_from(header.summary().header_bytes + header.tensors().get(name).unwrap().offset).unwrap();
        file[at + 40_000..at + 40_002].copy_from_slice(&[0, 0x7e]);
    }
    let damaged = folder.path().join("damaged.gguf");
    std::fs::write(&damaged, file).unwrap();
    assert_eq!(validate(&damaged, &["--no-load"]).status.code(), Some(0));
    let all = validate(&damaged, &["--no-load", "--all-weights"]);
    let report = text(&all.stdout);
    assert_eq!(all.status.code(), Some(1), "{report}");
    assert_eq!(report.matches("[not-finite]").count(), 2, "{report}");
    assert!(tensors.iter().all(|name| report.contains(name)), "{report}");
    let good = text(&validate(&path, &["--no-load", "--all-weights"]).stdout);
    assert!(good.contains("ok   weights     all 7."), "{good}");
    let both = validate(&path, &["--header-only", "--all-weights"]);
    assert_eq!(both.status.code(), Some(2), "{}", text(&both.stderr));
}

/// Both refuse it, and what one says is what the other does.
fn same_words(file: &Path, part: &str, words: &str) {
    let validated = validate(file, &[]);
    let (report, log) = (text(&validated.stdout), text(&validated.stderr));
    assert_eq!(validated.status.code(), Some(1), "{report}");
    let why = log.trim_end().split_once(&format!("gantry-server: {}: {part}: ", file.display())).map(|(_, why)| why);
    let why = why.unwrap_or_else(|| panic!("{part} is not in {log}"));
    assert!(why.contains(words), "{why}");
    assert!(report.contains(&format!("  FAIL {part:<11} {why}")), "{report}");
    let mut serve = command(file);
    serve.args(["--port", "0"]);
    let (status, log) = output(serve);
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("cannot serve the model") && log.contains(why), "{why} is not in {log}");
    assert!(!log.contains("gantry_server::worker"), "no worker saw it: {log}");
}

#[tokio::test]
async fn a_model_in_two_files_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let first = split(folder.path());
    let report = text(&validate(&first, &["--no-load"]).stdout);
    assert!(report.contains("2 parts of one model"), "{report}");
    let server = Server::launch(&first, &["--ctx-size", "512", "--parallel", "1"]);
    server.until_ready().await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[test]
fn what_ends_llama_cpp_ends_a_trial_alone_and_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, gguf::aborts().bytes()).unwrap();
    let validated = validate(&file, &[]);
    let report = text(&validated.stdout);
    assert_eq!(validated.status.code(), Some(1), "{report}");
    let trial = report.lines().find(|line| line.contains("trial load")).unwrap();
    assert!(trial.contains("FAIL") && trial.contains("SIGABRT"), "{report}");

    // An architecture that asks for keys and tensors which are not there is not loaded at all.
    let mut bloom = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    while let Some(at) = bloom.windows(6).position(|window| window == b"llama.") {
        bloom[at..at + 5].copy_from_slice(b"bloom");
    }
    behind(&mut bloom, "general.architecture", 12, b"bloom");
    std::fs::write(&file, bloom).unwrap();
    let report = text(&validate(&file, &[]).stdout);
    assert!(report.contains("bloom.attention.layer_norm_epsilon") && report.contains("[missing-tensor]"), "{report}");
    assert!(
        !report.contains("SIGABRT") && report.contains("weights and trial load need a header that is right"),
        "{report}"
    );
}

#[test]
fn a_file_that_is_right_at_the_first_positions_only_is_refused_by_both() {
    const WHY: &str = "what it computes is not finite";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let (mut bytes, header) = demo();
    // Angles grow with the position and past what a float holds between the 512th and the last.
    let turned = f64::from(header.summary().head_dim_k);
    let angle = f64::from(f32::MAX) / 1_000.0;
    let base = angle.powf(-turned / (turned - 2.0)) as f32;
    behind(&mut bytes, "llama.rope.freq_base", 4, &base.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let validated = validate(&file, &[]);
    let report = text(&validated.stdout);
    assert_eq!(validated.status.code(), Some(1), "{report}");
    assert!(report.contains("FAIL trial load") && report.contains(WHY), "{report}");
    let mut serve = command(&file);
    serve.args(["--port", "0"]);
    let (status, log) = output(serve);
    assert!(status.code() == Some(1) && log.contains(WHY), "{log}");
    // With less context nobody comes to those positions.
    let short = validate(&file, &["--ctx-size", "2048"]);
    let report = text(&short.stdout);
    assert_eq!(short.status.code(), Some(0), "{report}");
    assert!(report.contains("with 256 tokens of context for a request: all finite"), "{report}");
}

#[test]
fn an_encoder_is_checked_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bert.gguf");
    std::fs::write(&file, gguf::bert(1).bytes()).unwrap();
    let validated = validate(&file, &[]);
    let report = text(&validated.stdout);
    assert_eq!(validated.status.code(), Some(0), "{report}");
    assert!(report.contains("it is an encoder") && report.contains("ok   trial load"), "{report}");
    assert!(!report.contains("--pooling"), "{report}");
    // `serve` says the same of one that does not name how texts become vectors (pooled.rs).
    std::fs::write(&file, gguf::bert(0).bytes()).unwrap();
    let validated = validate(&file, &[]);
    let report = text(&validated.stdout);
    assert_eq!(validated.status.code(), Some(1), "{report}");
    assert!(report.contains("FAIL pooling") && report.contains("names no pooling"), "{report}");
    assert_eq!(validate(&file, &["--pooling", "mean"]).status.code(), Some(0));
    let (wrong, reranks) = (validate(&file, &["--pooling", "rank"]), folder.path().join("headless.gguf"));
    assert!(text(&wrong.stdout).contains("is no reranker"), "{}", text(&wrong.stdout));
    let mut headless = gguf::bert(4).bytes();
    let name = b"cls.output.weight";
    let at = headless.windows(name.len()).position(|window| window == name).unwrap();
    headless[at..at + 3].copy_from_slice(b"own");
    std::fs::write(&reranks, headless).unwrap();
    let refused = validate(&reranks, &[]);
    assert!(text(&refused.stdout).contains("\"cls.output.weight\" is missing"), "{}", text(&refused.stdout));
}
