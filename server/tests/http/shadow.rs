//! The gate Shadow with real versions: what becomes of a live request that cannot be compared, or that the candidate does not take.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gantry_core::{Message, Role};
use gantry_engine::Prompt;
use gantry_rollout::line;
use gantry_server::gates::drift::DriftLimits;
use gantry_server::gates::shadow::{self, Found};
use gantry_server::gates::{Board, Refusal, Report};
use gantry_server::version::{RuntimeSettings, Version, VersionSpec, WorkerConfig};
use tokio::sync::watch;

use crate::server::{PATIENCE, model, send_signal};
use crate::template_file::with_template;

/// A template that refuses one word, which users say.
const PARTICULAR: &str = "{% for m in messages %}{% if 'nougat' in m.content %}{{ raise_exception('no ' ~ m.content) }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";

async fn load(file: &Path) -> Arc<Version> {
    let runtime = RuntimeSettings { ctx_size: 8192, parallel: 1, threads: Some(1), ..RuntimeSettings::default() };
    let spec = VersionSpec {
        name: "v".to_owned(),
        digest: String::new(),
        model_path: file.to_owned(),
        served_name: "chat".to_owned(),
        runtime,
    };
    let workers = WorkerConfig::new(env!("CARGO_BIN_EXE_gantry-server"));
    Version::load(spec, &workers, watch::Sender::new(0.0)).await.unwrap()
}

async fn reference() -> Arc<Version> {
    load(&model("demo-v2.q8_0.gguf")).await
}

/// A copy of the reference's file in which something is otherwise.
fn changed(change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), change(std::fs::read(model("demo-v2.q8_0.gguf")).unwrap())).unwrap();
    file
}

fn asked(text: &str) -> Prompt {
    Prompt::chat(vec![Message::text(Role::User, text)])
}

/// What is found of one request that users have just been answered.
async fn watched(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    prompt: Prompt,
    duration: Duration,
) -> Result<Found, Refusal> {
    let answered = async {
        let samples = reference.samples();
        samples.draw(&Arc::new(prompt)).expect("all are drawn").answered();
        // There is no other.
        drop(samples.take(0.0));
    };
    let board = Arc::new(Board::new([("v".to_owned(), line::blank("v", None))].into()));
    let report = Report::of(board, "v");
    tokio::join!(shadow::watch(reference, candidate, (1.0, duration), |_| (), &report), answered).0
}

async fn retire(versions: [Arc<Version>; 2]) {
    for version in versions {
        version.retire(PATIENCE).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_is_too_long_to_compare_is_left_out_and_refuses_nobody() {
    // Trained for more, so that it takes such a prompt.
    let long = changed(|mut file| {
        let key = b"llama.context_length";
        let at = file.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
        file[at..at + 4].copy_from_slice(&8192_u32.to_le_bytes());
        file
    });
    let (reference, candidate) = (load(long.path()).await, load(long.path()).await);
    let found = watched(&reference, &candidate, Prompt::Tokens(vec![100; 3000]), PATIENCE).await.unwrap();
    let why = found.left_out.as_deref().unwrap_or_default();
    assert!(why.contains("3000 tokens, and by at most 2914 can be compared"), "{found:?}");
    assert_eq!((found.drawn, found.answers.len(), &found.not_taken), (1, 0, &None));
    assert_eq!(shadow::judge(&found, &DriftLimits::default(), false).unwrap(), None, "nothing is said of it");
    retire([reference, candidate]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_whose_template_refuses_what_the_active_version_takes_is_refused_without_the_users_words() {
    let particular = changed(|file| with_template(file, PARTICULAR));
    let (reference, candidate) = (reference().await, load(particular.path()).await);
    let fine = watched(&reference, &candidate, asked("What is the capital of Peru?"), PATIENCE).await.unwrap();
    assert_eq!((fine.answers.len(), &fine.not_taken, &fine.left_out), (1, &None, &None));
    let found = watched(&reference, &candidate, asked("What is nougat?"), PATIENCE).await.unwrap();
    let refused = shadow::judge(&found, &DriftLimits::default(), false).unwrap_err();
    assert_eq!(refused.value.as_deref(), Some("1 of 1 requests not taken"));
    let told = &refused.message;
    assert!(told.contains("its chat template refuses it") && told.contains("compare the templates"), "{told}");
    assert!(told.contains("spec.rollout.gates.shadow") && !told.contains("nougat"), "{told}");
    retire([reference, candidate]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_not_compared_in_its_time_is_left_out() {
    let (reference, candidate) = (reference().await, load(&model("demo-v2.q4_k_m.gguf")).await);
    let pid = candidate.stats().pids()[0];
    send_signal(pid, "STOP");
    let found = watched(&reference, &candidate, asked("Hello!"), Duration::from_secs(2)).await;
    send_signal(pid, "CONT");
    let found = found.unwrap();
    assert_eq!(found.left_out.as_deref(), Some("not both had read it in time"), "{found:?}");
    assert_eq!((found.drawn, &found.not_taken), (1, &None));
    assert_eq!(shadow::judge(&found, &DriftLimits::default(), false).unwrap(), None, "nothing is said of it");
    retire([reference, candidate]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_another_vocabulary_no_word_of_an_answer_is_told() {
    // The same id is another word, which the answer has.
    let renamed = changed(|mut file| {
        let (word, other) = ("\u{120}capital".as_bytes(), "\u{120}capitol".as_bytes());
        let entry = [&(word.len() as u64).to_le_bytes()[..], word].concat();
        let at = file.windows(entry.len()).position(|window| window == entry).expect("a token of its own") + 8;
        file[at..at + other.len()].copy_from_slice(other);
        file
    });
    let (reference, candidate) = (reference().await, load(renamed.path()).await);
    let refused = watched(&reference, &candidate, asked("What is the capital of Peru?"), PATIENCE).await.unwrap_err();
    assert_eq!(refused.value.as_deref(), Some("another vocabulary"));
    let told = &refused.message;
    assert!(
        told.contains("it has another vocabulary") && told.contains("leave spec.rollout.gates.shadow out"),
        "{told}"
    );
    assert!(["capit", "Peru", "Lima"].iter().all(|word| !told.contains(word)), "{told}");
    retire([reference, candidate]).await;
}
