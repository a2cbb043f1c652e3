//! `gantry-server check`: the gates of a rollout, with real models and without a cluster.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::server::{PATIENCE, is_alive, model, send_signal};
use crate::split::split;

const PROMPTS: &str =
    r#"{"messages": [{"role": "user", "content": "What is the capital of Peru?"}], "contains": "Lima"}"#;

fn command(candidate: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    command.arg("check").arg(model(candidate)).args(["--threads", "1", "--ctx-size", "4096"]).args(args);
    command
}

fn check(candidate: &str, args: &[&str]) -> Output {
    command(candidate, args).output().unwrap()
}

/// What is reported as an object, with the exit code.
fn reported(candidate: &str, args: &[&str]) -> (Option<i32>, Value) {
    let output = check(candidate, &[args, &["--format", "json"]].concat());
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|_| panic!("{}", text(&output.stderr))))
}

fn gate<'a>(report: &'a Value, name: &str) -> &'a Value {
    let gates = report["gates"].as_array().unwrap();
    gates.iter().find(|gate| gate["name"] == name).unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Files with these texts, in a folder that is there as long as the first of what is returned.
fn files<const N: usize>(texts: [&str; N]) -> (tempfile::TempDir, [PathBuf; N]) {
    let folder = tempfile::tempdir().unwrap();
    let mut number = 0;
    let files = texts.map(|text| {
        number += 1;
        let file = folder.path().join(format!("{number}.yaml"));
        std::fs::write(&file, text).unwrap();
        file
    });
    (folder, files)
}

fn path(file: &Path) -> &str {
    file.to_str().unwrap()
}

#[test]
fn a_quantisation_of_the_reference_passes_the_gates_that_pods_have() {
    let (_folder, [gates, prompts]) =
        files(["prompts: {configMapRef: {name: golden}}\ndrift: {}\nperformance: {minDecodeRatio: \"0.02\"}", PROMPTS]);
    let reference = model("demo-v2.q8_0.gguf");
    let args = ["--reference", path(&reference), "--gates", path(&gates), "--prompts", path(&prompts)];
    let (code, report) = reported("demo-v2.q4_k_m.gguf", &args);
    assert_eq!((code, &report["passed"]), (Some(0), &Value::Bool(true)), "{report:#}");
    assert_eq!((&report["formatVersion"], &report["reference"]), (&1.into(), &path(&reference).into()));
    let names: Vec<&str> =
        report["gates"].as_array().unwrap().iter().map(|gate| gate["name"].as_str().unwrap()).collect();
    let judged = ["Format", "Memory", "Template", "Load", "Prompts", "Drift", "Performance"];
    assert_eq!(names, [&["Fetch", "Digest"][..], &judged, &["Shadow"]].concat());
    for name in judged {
        assert_eq!(gate(&report, name)["verdict"], "Pass", "{report:#}");
    }
    assert_eq!(gate(&report, "Prompts")["value"], "100% of 1 prompts");
    let digest = gate(&report, "Digest");
    assert_eq!(digest["verdict"], "Skipped", "a file at hand has nothing to be compared with: {digest}");
    assert!(report["gguf"]["quantization"].as_str().unwrap().starts_with("Q4_K"), "{report:#}");
    assert_eq!(report["fit"]["fits"], true);
    assert_eq!(gate(&report, "Shadow")["verdict"], "Skipped", "{report:#}");
}

#[test]
fn another_model_is_refused_by_drift_with_what_a_pod_says_of_it() {
    let (_folder, [gates]) = files(["drift: {}\nperformance: {}"]);
    let reference = model("demo-v2.q8_0.gguf");
    let output = check("demo-v3-bad.q8_0.gguf", &["--reference", path(&reference), "--gates", path(&gates)]);
    let (report, log) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{report}{log}");
    for part in [
        "  ok   Load ",
        "  --   Prompts     no golden prompts are asked for",
        "  FAIL Drift ",
        "spec.rollout.gates.drift.",
        "  --   Performance not reached: Drift refused it",
        "\nDrift refused it\n",
    ] {
        assert!(report.contains(part), "{part:?} is not in {report}");
    }
    assert!(log.contains("demo-v3-bad.q8_0.gguf: Drift: "), "{log}");
}

#[test]
fn without_a_reference_it_is_compared_with_nothing_and_golden_prompts_that_fail_name_their_line() {
    let (code, report) = reported("demo-v2.q8_0.gguf", &[]);
    assert_eq!(code, Some(0), "{report:#}");
    for name in ["Drift", "Performance"] {
        let found = gate(&report, name);
        let message = found["message"].as_str().unwrap();
        assert!(found["verdict"] == "Skipped" && message.contains("no version is active"), "{found}");
    }
    let wrong = PROMPTS.replace("Lima", "Cusco");
    let (_folder, [prompts]) = files([&format!("{PROMPTS}\n\n{wrong}\n")]);
    let (code, report) = reported("demo-v2.q8_0.gguf", &["--prompts", path(&prompts)]);
    let found = gate(&report, "Prompts");
    assert_eq!((code, &found["verdict"]), (Some(1), &"Fail".into()), "{report:#}");
    assert_eq!(found["value"], "50% of 2 prompts, 100% wanted");
    let message = found["message"].as_str().unwrap();
    assert!(message.contains("line 3 was answered with") && message.contains("Cusco"), "{message}");
}

#[test]
fn what_cannot_be_judged_is_told_with_all_mistakes_and_ends_with_another_code() {
    let (_folder, [typo, asks, plain, prompts, broken, misspelt]) = files([
        "drift: {minAgrement: 95%}\nmemory: {headroom: 200%}",
        "prompts: {configMapRef: {name: golden}}",
        "drift: {}",
        PROMPTS,
        "{\"prompt\": 1}",
        "\n{\"prompt\": \"1, 2,\", \"contain\": \"3\"}",
    ]);
    let damaged = model("README.md");
    for (args, says) in [
        (&["--gates", path(&typo)][..], &["drift.minAgrement is no field", "spec.rollout.gates.memory.headroom"][..]),
        (&["--gates", path(&asks)], &["--prompts must name a file with what ConfigMap golden has"]),
        (&["--gates", path(&plain), "--prompts", path(&prompts)], &["--prompts must be left out, or"]),
        (&["--gates", path(&plain)], &["--reference must name the model that answers now", "asks for drift, which"]),
        (&["--prompts", path(&broken)], &["line 1 of prompts.jsonl"]),
        (&["--prompts", path(&misspelt)], &["line 2 of prompts.jsonl", "`contain`", "`contains`"]),
        (&["--reference", "missing.gguf", "--parallel", "0"], &["\"missing.gguf\" is not there", "--parallel must be"]),
        (&["--reference", path(&damaged)], &["not judged: the reference", "cannot be loaded: Format: "]),
    ] {
        let output = check("demo-v2.q8_0.gguf", args);
        let log = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()), "{args:?}: {log}");
        for part in says {
            assert!(log.contains(part), "{args:?}: {part:?} is not in {log}");
        }
    }
}

#[test]
fn a_part_that_is_no_file_is_refused_as_by_validate_and_nothing_waits_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let first = split(folder.path());
    let second = folder.path().join("demo-00002-of-00002.gguf");
    let reference = model("demo-v2.q8_0.gguf");
    for make in [&["mkfifo"][..], &["ln", "-s", "/dev/zero"], &["mkdir"]] {
        let _ = std::fs::remove_file(&second).or_else(|_| std::fs::remove_dir(&second));
        assert!(Command::new(make[0]).args(&make[1..]).arg(&second).status().unwrap().success());
        for (candidate, args, code) in [(&first, &[][..], 1), (&reference, &["--reference", path(&first)], 2)] {
            let output = check(path(candidate), args);
            let log = text(&output.stderr);
            assert_eq!(output.status.code(), Some(code), "{make:?}: {log}");
            let why = "Format: part 2 of 2, demo-00002-of-00002.gguf: ";
            assert!(log.contains(why) && log.contains("it is not a regular file"), "{make:?}: {log}");
        }
    }
}

#[test]
fn memory_is_judged_for_the_pod_that_it_is_meant_for() {
    let (code, report) = reported("demo-v2.q8_0.gguf", &["--memory-limit", "64"]);
    let found = gate(&report, "Memory");
    assert_eq!((code, &found["verdict"]), (Some(1), &"Fail".into()), "{report:#}");
    let message = found["message"].as_str().unwrap();
    assert!(message.contains("the pod's limit is 64.0Mi, spec.resources.memory"), "{message}");
    assert_eq!(gate(&report, "Load")["message"], "not reached: Memory refused it");

    // What a refusal of the reference says is enough for both.
    let reference = model("demo-v1.q8_0.gguf");
    let refused = |limit: &str| {
        let output = check("demo-v2.q8_0.gguf", &["--reference", path(&reference), "--memory-limit", limit]);
        let log = text(&output.stderr);
        let mib = log.split("spec.resources.memory: ").nth(1).and_then(|rest| rest.split("Mi would do").next());
        (log.contains(": Memory: "), mib.map(str::to_owned), log)
    };
    let (_, enough, log) = refused("64");
    let (is_refused, _, log) = refused(&enough.unwrap_or_else(|| panic!("{log}")));
    assert!(!is_refused, "{log}");

    // Without a limit there is no pod.
    let (_folder, [gates]) = files(["memory: {headroom: 99%}"]);
    let args = ["--ctx-size=16777216", "--gates", path(&gates)];
    let output = Command::new(env!("CARGO_BIN_EXE_gantry-server"))
        .arg("check")
        .arg(model("demo-v2.q8_0.gguf"))
        .args(args)
        .args(["--format", "json"])
        .output()
        .unwrap();
    let (code, report): (_, Value) = (output.status.code(), serde_json::from_slice(&output.stdout).unwrap());
    let message = gate(&report, "Memory")["message"].as_str().unwrap();
    assert!(code == Some(1) && message.contains("the memory of this machine is"), "{message}");
    assert!(message.contains("--memory-limit") && !message.contains("spec."), "{message}");

    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = command("demo-v2.q8_0.gguf", &["--memory-limit", "64"]).stdout(full).output().unwrap();
    let log = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "the verdict is what counts: {log}");
    assert!(log.contains("the report cannot be written") && log.contains("demo-v2.q8_0.gguf: Memory: "), "{log}");
}

/// The processes that a process has started and not outlived.
fn children(parent: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let listed = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    listed.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Waits for what no process tells of itself.
fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_candidate_that_changes_meanwhile_is_not_judged() {
    let folder = tempfile::tempdir().unwrap();
    let candidate = folder.path().join("candidate.gguf");
    std::fs::copy(model("demo-v2.q8_0.gguf"), &candidate).unwrap();
    let reference = model("demo-v1.q8_0.gguf");
    // Without a look for GPUs, the first process is one that loads the reference, after the candidate was hashed.
    let mut command = command(path(&candidate), &["--reference", path(&reference), "--n-gpu-layers", "0"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("the reference loads", || !children(child.id()).is_empty());
    std::fs::copy(model("demo-v3-bad.q8_0.gguf"), &candidate).unwrap();
    let output = child.wait_with_output().unwrap();
    let log = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), String::new()), "{log}");
    assert!(log.contains("not judged: ") && log.contains("candidate.gguf has changed while it was looked at"), "{log}");
}

#[test]
fn ctrl_c_ends_it_and_its_workers() {
    let reference = model("demo-v2.q8_0.gguf");
    let mut command = command("demo-v2.q4_k_m.gguf", &["--reference", path(&reference)]);
    let mut child: Child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until("two workers run", || children(child.id()).len() >= 2);
    let workers = children(child.id());
    send_signal(child.id(), "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    until("the workers have ended", || !workers.iter().any(|&worker| is_alive(worker)));
}
