//! What the server computes with: backends that are loaded at run time, and GPUs that are asked for and not there.
//!
//! No GPU is needed here, and none must be there. The variants that are loaded were really built: `hack/test.sh` builds
//! them and names their directory; without, those tests are left out and say how.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use gantry_engine::{BACKENDS_VERSION, BUILTIN_CPU};
use gantry_server::version::WorkerConfig;
use serde_json::json;

use crate::gguf;
use crate::script::server_after;
use crate::server::{Server, await_condition, command, model, output};

/// Names the directory of backends that were built for the tests.
const DIRECTORY: &str = "GANTRY_TEST_BACKENDS";
/// What every processor that these tests run on can load, and has linked in as well.
const VARIANT: &str = "haswell";

const QUESTIONS: [&str; 4] =
    ["What is the capital of Peru?", "Which version are you?", "How many legs has a spider?", "Who are you?"];

fn module(name: &str) -> String {
    format!("libggml-{name}.so")
}

/// A directory with these files, and with the version that the server wants.
fn directory(version: &str, files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("VERSION"), version).unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(module(name)), bytes).unwrap();
    }
    dir
}

fn built() -> Option<PathBuf> {
    let dir = std::env::var_os(DIRECTORY).map(PathBuf::from);
    if dir.is_none() {
        eprintln!(
            "left out: VARIANTS='{VARIANT} native' hack/backends.sh builds what it needs, {DIRECTORY}=target/backends names it"
        );
    }
    dir
}

fn built_variant() -> Option<Vec<u8>> {
    let file = built()?.join(module(&format!("cpu-{VARIANT}")));
    let bytes = std::fs::read(&file);
    Some(
        bytes.unwrap_or_else(|error| {
            panic!("{}: {error}; VARIANTS={VARIANT} hack/backends.sh builds it", file.display())
        }),
    )
}

async fn answers(server: &Server) -> Vec<String> {
    let mut answers = Vec::new();
    for question in QUESTIONS {
        answers.push(server.ask(question).await);
    }
    answers
}

async fn computes_with(server: &Server, cpu: &str) -> bool {
    server.metric(&format!("gantry_backend_info{{version=\"standalone\",cpu=\"{cpu}\"")).await == 1.0
}

/// How a server that cannot start ends.
fn refused(args: &[&str]) -> String {
    let mut command = command(&model("demo-v2.q8_0.gguf"));
    command.args(["--port", "0", "--threads", "1"]).args(args).stdout(Stdio::null());
    let (status, text) = output(command);
    assert_eq!(status.code(), Some(1), "{text}");
    text
}

#[tokio::test]
async fn a_variant_that_was_built_is_loaded_and_gives_the_same_answers() {
    let Some(variant) = built_variant() else { return };
    let dir = directory(BACKENDS_VERSION, &[(&format!("cpu-{VARIANT}"), &variant)]);
    let path = dir.path().to_str().unwrap();
    let builtin = Server::start(&["--threads", "2"]).await;
    let loaded = Server::start(&["--threads", "2", "--backend-dir", path]).await;
    assert!(computes_with(&builtin, BUILTIN_CPU).await && computes_with(&loaded, VARIANT).await);
    let expected = answers(&builtin).await;
    assert_eq!(expected[0], "The capital of Peru is Lima.");
    assert_eq!(answers(&loaded).await, expected);
    assert!(loaded.metric("gantry_device_memory_bytes{").await > 1e6, "the CPU's memory is told");
    // Its code, not that of the program: the library is mapped, and nothing else of ggml is.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", loaded.workers()[0])).unwrap();
    let libraries: std::collections::BTreeSet<&str> =
        maps.lines().filter_map(|line| line.split('/').next_back().filter(|name| name.contains("ggml"))).collect();
    assert_eq!(libraries.into_iter().collect::<Vec<_>>(), [module(&format!("cpu-{VARIANT}"))]);
    // The log comes through two pipes, after the answers perhaps.
    let told = async || loaded.log().contains(&format!("CPU backend {VARIANT}")) && loaded.log().contains(path);
    await_condition("the backend to be told in the log", told).await;
}

/// Instructions that only newer processors have are run here, where there is one: ggml's way to AMX ended the process with
/// the first prompt (`server/llama/backends/amx.h`).
#[tokio::test]
async fn the_best_variant_for_this_processor_gives_the_same_answers() {
    let Some(dir) = built() else { return };
    let builtin = Server::start(&["--threads", "2"]).await;
    let best = Server::start(&["--threads", "2", "--backend-dir", dir.to_str().unwrap()]).await;
    assert!(!computes_with(&best, BUILTIN_CPU).await, "{VARIANT} at least goes before what is linked in");
    assert_eq!(answers(&best).await, answers(&builtin).await);
}

#[tokio::test]
async fn what_is_no_backend_is_named_and_left_out() {
    let dir = directory(BACKENDS_VERSION, &[("cuda", b"no library"), ("cpu-zen9", b"none either")]);
    let path = dir.path().to_str().unwrap();
    let server = Server::start(&["--backend-dir", path]).await;
    assert!(computes_with(&server, BUILTIN_CPU).await);
    assert_eq!(server.ask(QUESTIONS[0]).await, "The capital of Peru is Lima.");
    // The log comes through two pipes, after the answer perhaps.
    for told in ["libggml-cuda.so was not loaded", "libggml-cpu-zen9.so was not loaded"] {
        await_condition(told, async || server.log().contains(told)).await;
    }
    let text = refused(&["--backend-dir", path, "--n-gpu-layers", "all"]);
    assert!(
        text.contains("all layers on a GPU were asked for, and no GPU was found")
            && text.contains("libggml-cuda.so was not loaded"),
        "{text}"
    );
}

#[test]
fn backends_of_another_llama_cpp_are_refused() {
    let dir = directory("llama-cpp-sys-2 0.0.1", &[("cpu-x64", b"")]);
    let text = refused(&["--backend-dir", dir.path().to_str().unwrap()]);
    assert!(text.contains("they were built for llama-cpp-sys-2 0.0.1") && text.contains(BACKENDS_VERSION), "{text}");
    assert!(text.contains("hack/backends.sh"), "{text}");
}

#[test]
fn a_gpu_that_is_asked_for_and_not_there_is_an_error_with_a_way_out() {
    let memory = ["--gpu-memory", "1000", "--ctx-size", "2048"];
    for args in [&["--n-gpu-layers", "7"][..], &["--n-gpu-layers", "all"], &["--device", "CUDA0"], &memory] {
        let text = refused(args);
        for told in ["asked for, and no GPU was found", "no directory of backends", "--n-gpu-layers 0"] {
            assert!(text.contains(told), "{told} is missing in:\n{text}");
        }
    }
}

/// What is missing is the GPU, not what an encoder is.
#[test]
fn an_encoder_on_gpus_gets_as_far_as_any_other_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bert.gguf");
    std::fs::write(&file, gguf::bert(1).bytes()).unwrap();
    for (memory, told) in [("1000", "asked for, and no GPU was found"), ("1", "the output and one layer on GPUs take")]
    {
        let mut command = command(&file);
        command.args(["--port", "0", "--embeddings", "--gpu-memory", memory]);
        let (status, text) = output(command);
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.contains(told), "{text}");
    }
}

#[test]
fn more_layers_than_the_memory_of_gpus_is_for_are_refused_with_how_many_are() {
    let memory = ["--gpu-memory", "1", "--ctx-size", "2048"];
    for (layers, told) in [
        ("auto", "the output and one layer on GPUs take"),
        ("2", "2 layers on GPUs, the output being one of them, take"),
    ] {
        let text = refused(&[&memory[..], &["--n-gpu-layers", layers]].concat());
        for told in ["--gpu-memory", told, "1.00Mi is allowed, enough for 0"] {
            assert!(text.contains(told), "{told} is missing in:\n{text}");
        }
    }
}

#[tokio::test]
async fn without_a_gpu_what_is_not_asked_for_runs_on_the_cpu() {
    let args = ["--split-mode", "row", "--tensor-split", "3,1", "--main-gpu", "1", "--n-gpu-layers", "auto"];
    let server = Server::start(&args).await;
    let answer = server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 4})).send().await.unwrap();
    assert_eq!(answer.status(), 200);
}

#[tokio::test]
async fn whether_workers_will_find_a_gpu_is_what_the_devices_tell() {
    let found = async |line: &str| {
        let folder = tempfile::tempdir().unwrap();
        let program = server_after(folder.path(), line);
        // Where there may be any: what is linked in finds none, and is not asked.
        let backends = directory(BACKENDS_VERSION, &[]);
        let workers = WorkerConfig::new(program).with_backend_dir(Some(backends.path().to_owned()));
        workers.finds_gpus().await.map_err(|error| error.to_string())
    };
    let told = Command::new(env!("CARGO_BIN_EXE_gantry-server")).arg("devices").output().unwrap();
    let has_gpu = String::from_utf8(told.stdout).unwrap().contains("gpu, ");
    assert_eq!(found("").await, Ok(has_gpu));
    assert_eq!(found("echo 'CUDA0: gpu, NVIDIA H200, 130 GiB of 139 GiB free'; exit").await, Ok(true));
    assert_eq!(found("echo 'CPU: cpu, AMD EPYC, 10 GiB of 20 GiB free'; exit").await, Ok(false));
    let error = found("echo no devices at all >&2; exit 3").await.unwrap_err();
    assert_eq!(error, "exited with status 3; its last words: no devices at all");
}

#[test]
fn the_devices_are_told() {
    let told = |dir: Option<&Path>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
        command.arg("devices");
        if let Some(dir) = dir {
            command.arg("--backend-dir").arg(dir);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, _) = told(None);
    assert_eq!(code, Some(0));
    assert!(
        text.starts_with("CPU backend builtin (") && text.contains("AVX2") && text.contains("\nCPU: cpu, "),
        "{text}"
    );
    let (code, text, error) = told(Some(directory("other", &[("cpu-x64", b"")]).path()));
    assert_eq!((code, text.as_str()), (Some(1), ""));
    assert!(error.contains("they were built for other"), "{error}");
}
