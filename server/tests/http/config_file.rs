//! A file of settings: what is served by it, what goes before it, and the commands that look at it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::server::{Server, model};

/// A folder with a file of settings in it.
fn written(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gantry.yaml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

/// The program without the settings of whoever runs the test.
fn program(words: &[&str], file: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    let is_setting = |name: &str| name.starts_with("GANTRY_") || name.starts_with("LLAMA_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_setting(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    command.args(words).arg(file).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// How a command ends, what it writes to standard output, and what to standard error.
fn told(mut command: Command) -> (Option<i32>, String, String) {
    let ended = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

#[tokio::test]
async fn a_model_is_served_by_a_file_of_settings() {
    let file = model("demo-v2.q8_0.gguf");
    let (_folder, path) = written(&format!(
        "model: {}\nalias: [geographer, demo]\nctx_size: 1024\nparallel: 4\nport: 1\n",
        file.display()
    ));
    let mut command = program(&["serve", "--config"], &path);
    command.env("GANTRY_PARALLEL", "2").stdout(Stdio::piped()).stderr(Stdio::piped());
    let server = Server::launch_as(command, &[], None);
    server.until_ready().await;
    let models: Value = server.get("/v1/models").await.json().await.unwrap();
    let names: Vec<&str> = models["data"].as_array().unwrap().iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(names, ["geographer", "demo"], "{models}");
    let props: Value = server.get("/props").await.json().await.unwrap();
    assert_eq!(props["total_slots"], 2, "{props}");
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[test]
fn each_setting_is_shown_with_where_it_comes_from_and_the_nearest_source_goes_before() {
    let (folder, path) = written("port: 9000\nparallel: 3\nctx-size: 512\noffline: true\napi-key: hush\n");
    let mut command = program(&["config", "show", "--port", "9001", "--config"], &path);
    command.env("GANTRY_HTTP_PORT", "9002").env("GANTRY_PARALLEL", "2").env("GANTRY_OFFLINE", "false");
    command.env("LLAMA_ARG_UBATCH", "64");
    let (code, shown, said) = told(command);
    assert_eq!((code, &*said), (Some(0), ""), "{shown}");
    for line in [
        "port: 9001  # command line".to_owned(),
        "parallel: 2  # variable GANTRY_PARALLEL".to_owned(),
        "offline: false  # variable GANTRY_OFFLINE".to_owned(),
        "ubatch-size: 64  # variable LLAMA_ARG_UBATCH".to_owned(),
        format!("ctx-size: 512  # {}:3:1", path.display()),
        format!("api-key: \"***\"  # {}:5:1", path.display()),
        "threads: -1  # default".to_owned(),
    ] {
        assert!(shown.lines().any(|told| told == line), "{line:?} is not a line of {shown}");
    }
    assert!(!shown.contains("hush"), "{shown}");

    // It is a file of settings, but for the key.
    let given_back = folder.path().join("shown.yaml");
    std::fs::write(&given_back, shown.replace("\"***\"", "hush")).unwrap();
    let (code, again, said) = told(program(&["config", "show", "--config"], &given_back));
    assert_eq!((code, &*said), (Some(0), ""), "{again}");
    let settings = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| line.split_once("  # ")).map(|(setting, _)| setting.to_owned()).collect()
    };
    assert_eq!(settings(&again), settings(&shown));

    let help = told(program(&["config", "show", "--help", "--config"], &path)).1;
    assert!(help.contains("Usage: gantry-server config show") && help.contains("where each"), "{help}");
}

#[test]
fn a_file_of_settings_is_checked_by_itself() {
    let (_folder, path) = written("parallel: 0\nprot: 8080\nthreads: many\n");
    let mut command = program(&["config", "check"], &path);
    command.env("GANTRY_PARALLEL", "2").env("GANTRY_WORKERS", "x");
    let (code, shown, said) = told(command);
    assert_eq!((code, &*shown), (Some(1), ""), "{said}");
    let at = path.display();
    for part in [
        format!("{at}:1:1: parallel must be a whole number from 1 to"),
        format!("{at}:2:1: prot is no setting of this server: did you mean port?"),
        format!("{at}:3:1: threads must be -1 or a whole number from 1 to"),
    ] {
        assert_eq!(said.matches(&part).count(), 1, "{part}: {said}");
    }
    assert!(said.lines().count() == 4 && !said.contains("GANTRY_"), "{said}");

    // `serve` says the same, with what is wrong elsewhere.
    let mut command = program(&["serve", "--port", "x", "--config"], &path);
    command.env("GANTRY_WORKERS", "x");
    let (code, shown, said) = told(command);
    assert_eq!((code, &*shown), (Some(2), ""), "{said}");
    for part in [
        "  --port must be".to_owned(),
        "GANTRY_WORKERS, which stands for --workers, must be".to_owned(),
        format!("{at}:1:1: parallel must be"),
        format!("{at}:2:1: prot is no setting"),
        format!("{at}:3:1: threads must be"),
    ] {
        assert_eq!(said.matches(&part).count(), 1, "{part}: {said}");
    }
    // A variable goes before what is wrong in the file.
    let mut command = program(&["config", "show", "--config"], &path);
    let (code, shown, said) = told({
        command.env("GANTRY_PARALLEL", "2");
        command
    });
    assert!(code == Some(2) && shown.contains("parallel: 2  # variable") && !said.contains(":1:1:"), "{said}");

    let (_folder, path) = written("parallel: 4\n# model: left to the command line\n");
    let (code, shown, said) = told(program(&["config", "check"], &path));
    assert_eq!((code, shown, &*said), (Some(0), format!("{}: settings: 1, mistakes: none\n", path.display()), ""));

    // Nor do the variables of stores count, or where a cache would be.
    let (_folder, path) = written("model: hf://acme/demo/m.gguf\n");
    let mut command = program(&["config", "check"], &path);
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME").env("HF_ENDPOINT", "no address");
    let (code, shown, said) = told(command);
    assert_eq!((code, shown, &*said), (Some(0), format!("{}: settings: 1, mistakes: none\n", path.display()), ""));
}
