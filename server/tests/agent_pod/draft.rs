//! A version with a draft model: its file comes first, is judged as the model's is, and guesses.

use serde_json::{Value, json};

use crate::fetch::digest;
use crate::files::{Fault, FileServer};
use crate::pod::{Pod, TWO, altered, demo, gate, served, version};

/// The version with this draft model.
fn with_draft(mut version: Value, draft: &FileServer, sha256: &str) -> Value {
    version["runtime"]["speculative"] = json!({"draft": {"uri": draft.url(), "sha256": sha256}, "maxTokens": 4});
    version
}

fn required_mib(entry: &Value) -> f64 {
    let required = entry["candidate"]["fit"]["required"].as_str().unwrap();
    required.strip_suffix("Mi").unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_is_brought_counted_and_loaded() {
    let mut pod = Pod::fresh();
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    let (draft, sha_draft) = served("demo-draft.q8_0.gguf").await;
    let prepared =
        |name: &'static str| move |entry: &Value| entry["prepared"] == name && entry["candidate"]["version"] == name;

    pod.prepare(&version("alone", &two, &sha_two));
    let alone = pod.api.entry("alone", prepared("alone")).await;
    let drafted = with_draft(version("drafted", &two, &sha_two), &draft, &sha_draft);
    pod.prepare(&drafted);
    let entry = pod.api.entry("drafted", prepared("drafted")).await;

    let fetched = gate(&entry, "Fetch")["value"].as_str().unwrap();
    assert!(fetched.contains("cached; draft model 643Ki in "), "{fetched}");
    assert_eq!(gate(&entry, "Digest")["value"], format!("sha256:{sha_two}"));
    assert_eq!(entry["candidate"]["gguf"]["bytes"], demo("demo-v2.q8_0.gguf").len(), "the model's header is told");
    let more = required_mib(&entry) - required_mib(&alone);
    assert!((1.0..40.0).contains(&more), "{more} MiB for the draft model");

    pod.roll_out(&drafted).await;
    let version = pod.router.active().unwrap();
    let settings = version.spec().runtime.engine.draft.clone().unwrap();
    assert_eq!(settings.max_tokens, 4);
    assert_eq!(std::fs::read(&settings.model_path).unwrap(), demo("demo-draft.q8_0.gguf"));
    assert_eq!(pod.answer().await, TWO);
    assert_eq!(draft.asked().iter().filter(|asked| asked.range.is_none()).count(), 1, "it is fetched once");
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_that_cannot_be_one_is_refused_by_its_gate() {
    let mut pod = Pod::fresh();
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    let (draft, cut_short) = (demo("demo-draft.q8_0.gguf"), demo("demo-draft.q8_0.gguf")[..600_000].to_vec());
    let stranger = altered("demo-draft.q8_0.gguf", b"sistant", b"SISTANT");
    let sha = |content: &[u8]| digest(content).to_string();
    for (name, content, sha_draft, gate_name, message) in [
        ("wrong-digest", &draft, "ab".repeat(32), "Digest", "the draft model: the file has the SHA-256"),
        ("cut-short", &cut_short, sha(&cut_short), "Format", "the draft model: "),
        ("stranger", &stranger, sha(&stranger), "Load", "cannot be the draft model of"),
    ] {
        let server = FileServer::start(content.clone()).await;
        pod.prepare(&with_draft(version(name, &two, &sha_two), &server, &sha_draft));
        let refused = |entry: &Value| entry["candidate"]["version"] == name && entry["candidate"]["phase"] == "Failed";
        let entry = pod.api.entry(name, refused).await;
        let gate = gate(&entry, gate_name);
        assert_eq!(gate["verdict"], "Fail", "{name}: {entry:#}");
        assert!(gate["message"].as_str().unwrap().contains(message), "{name}: {gate:#}");
    }
    // The model itself is not fetched for a draft model that is not there.
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let missing = FileServer::start(draft).await;
    missing.always(Some(Fault::Status(404)));
    pod.prepare(&with_draft(version("missing", &one, &sha_one), &missing, &"cd".repeat(32)));
    let entry = pod.api.entry("missing", |entry| gate(entry, "Fetch")["verdict"] == "Fail").await;
    assert!(gate(&entry, "Fetch")["message"].as_str().unwrap().starts_with("the draft model: "), "{entry:#}");
    assert_eq!(one.asked().len(), 0);
    pod.end().await;
}
