//! Client libraries that others made, unmodified: what stands in `e2e/clients` asks a server by each of them.
//!
//! `hack/clients.sh` installs them and `hack/test.sh` names their folder; without, these tests are left out and say how.

use std::path::{Path, PathBuf};

use tokio::process::Command;

use crate::server::Server;

/// Names the folder of what is installed.
const FOLDER: &str = "GANTRY_TEST_CLIENTS";
const KEY: &str = "a-key-of-the-tests";

/// Where they are; `None` where none were given.
fn installed(language: &str) -> Option<PathBuf> {
    let folder = std::env::var(FOLDER).unwrap_or_default();
    let path = Path::new(&folder).join(language);
    if folder.is_empty() || !path.exists() {
        eprintln!("left out: {FOLDER} names no folder with clients for {language}; hack/clients.sh installs them");
        return None;
    }
    Some(path)
}

fn tests(language: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/clients").join(language)
}

/// Runs tests against a server of text, one that keeps responses and one of vectors.
async fn run(mut tests: Command) {
    let server = Server::start(&["--api-key", KEY, "--grpc-port", "0"]).await;
    let embeds = Server::start(&["--api-key", KEY, "--embeddings", "--pooling", "mean"]).await;
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let stores = Server::start(&["--api-key", KEY, "--response-store", &url]).await;
    tests
        .env("GANTRY_URL", &server.base)
        .env("GANTRY_GRPC", server.grpc_address().await.to_string())
        .env("GANTRY_STORING_URL", &stores.base)
        .env("GANTRY_EMBEDDINGS_URL", &embeds.base);
    tests.env("GANTRY_KEY", KEY).env("GANTRY_MODEL", "demo-v2.q8_0");
    let ran = tests.kill_on_drop(true).output().await.unwrap();
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{tests:?}: {}\n{out}\n{error}", ran.status);
}

async fn python(module: &str) {
    python_in("python", module).await;
}

async fn python_in(folder: &str, module: &str) {
    let Some(installed) = installed(folder) else { return };
    let mut command = Command::new(installed.join("bin/python"));
    command.args(["-B", "-W", "ignore", "-m", "unittest", module]).current_dir(tests(folder));
    run(command).await;
}

#[tokio::test]
async fn openai_for_python() {
    python("test_openai").await;
}

#[tokio::test]
async fn anthropic_for_python() {
    python("test_anthropic").await;
}

#[tokio::test]
async fn openai_agents() {
    python("test_agents").await;
}

#[tokio::test]
async fn langchain() {
    python("test_langchain").await;
}

#[tokio::test]
async fn llama_index_litellm_and_instructor() {
    python("test_frameworks").await;
}

#[tokio::test]
async fn grpc_for_python() {
    python("test_grpc").await;
}

#[tokio::test]
async fn lm_evaluation_harness() {
    python_in("lm_eval", "test_lm_eval").await;
}

/// schemathesis makes requests of the document that is served, right and wrong ones; no process ends of them. `GANTRY_FUZZ_EXAMPLES` says
/// how many of each operation.
#[tokio::test]
async fn whatever_is_made_of_the_openapi_document_is_answered_as_it_says() {
    let Some(installed) = installed("fuzz") else { return };
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let sizes = ["--ctx-size", "4096", "--parallel", "8", "--max-queue", "64"];
    let server = Server::start(&[&sizes[..], &["--api-key", KEY, "--response-store", &url]].concat()).await;
    let workers = server.workers();
    let mut tests = Command::new(installed.join("bin/python"));
    tests.args(["-B", "-W", "ignore", "-m", "unittest", "test_openapi"]).current_dir(self::tests("fuzz"));
    tests.env("GANTRY_STORING_URL", &server.base).env("GANTRY_KEY", KEY);
    let ran = tests.kill_on_drop(true).output().await.unwrap();
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    eprintln!("{error}");
    assert!(ran.status.success(), "{}\n{out}\n{error}", ran.status);
    assert_eq!(server.workers(), workers, "a worker ended; the server's log:\n{}", server.log());
    assert!(!server.log().contains("panicked"), "{}", server.log());
}

/// `OpenAI`'s and Vercel's, which look for what they need beside themselves.
#[tokio::test]
async fn clients_for_node() {
    let Some(installed) = installed("node") else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("clients/node");
    std::fs::create_dir_all(&root).unwrap();
    for file in std::fs::read_dir(tests("node")).unwrap().map(|file| file.unwrap().path()) {
        if file.is_file() {
            std::fs::copy(&file, root.join(file.file_name().unwrap())).unwrap();
        }
    }
    std::os::unix::fs::symlink(installed.join("node_modules"), root.join("node_modules")).unwrap();
    std::os::unix::fs::symlink(tests("../models"), folder.path().join("models")).unwrap();
    let mut command = Command::new("node");
    command.arg("--test").current_dir(root);
    run(command).await;
}
