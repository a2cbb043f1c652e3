//! The harness as a whole, in small: a real gantry-server on a demo model, run against itself.
//!
//! The peer is not there where tests run. A script in its place turns llama-server's flags into gantry-server's, so
//! that everything but the figures is real: processes, requests, trials, rounds, results, table and plots.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use gantry_bench::{
    bench::Bench,
    loads, machine, report,
    results::{Conditions, Results, SCHEMA, Trial},
    soak::{Soak, WORKERS, faults::Fault},
};

/// One at a time: each keeps all processors busy.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// gantry-server, which a build of the workspace puts beside the tests.
fn server() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().and_then(Path::parent).unwrap().join("gantry-server");
    assert!(program.exists(), "{} is missing: cargo build --release --bin gantry-server", program.display());
    program
}

fn script(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn stand_in(folder: &Path) {
    let server = server();
    let llama_server = format!(
        r#"#!/bin/sh
set -- "$@" END
while [ "$1" != END ]; do
  case $1 in
    -np) set -- "$@" --parallel "$2"; shift 2 ;;
    -kvu) shift ;;
    --samplers|--top-k) shift 2 ;;
    *) set -- "$@" "$1"; shift ;;
  esac
done
shift
exec {} serve "$@"
"#,
        server.display()
    );
    script(&folder.join("llama-server"), &llama_server);
    script(&folder.join("llama-batched-bench"), "#!/bin/sh\necho '{\"pl\": 1, \"speed_tg\": 250.5}'\n");
}

fn bench(folder: &Path) -> Bench {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    Bench {
        server: server(),
        backend_dir: None,
        peer: Some(folder.to_owned()),
        models: demo.clone(),
        demo,
        cache: folder.to_owned(),
        threads: 1,
        quick: true,
        repeats: None,
        try_again: false,
        skip_peer: Vec::new(),
        peer_version: "stand-in".to_owned(),
        own_version: "test".to_owned(),
    }
}

fn conditions() -> Conditions {
    Conditions {
        cpu: "a <processor>".to_owned(),
        cores: 1,
        memory_gib: 1,
        kernel: "6".to_owned(),
        threads: 1,
        quick: true,
        peer: "stand-in".to_owned(),
        cpu_backend: "linked in".to_owned(),
    }
}

#[tokio::test]
async fn every_protocol_is_asked_and_its_front_told_beside_the_others() {
    let _alone = ALONE.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let all = loads::all(true);
    let names: Vec<&str> = all.iter().map(|load| load.name).collect();
    let mut results = Results::new(conditions());
    for load in all.iter().filter(|load| load.name.starts_with("front-")) {
        let result = Bench { peer: None, ..bench(folder.path()) }.run(load).await.unwrap();
        let figures = &result.ours.runs[0];
        assert_eq!((figures["failed"], figures["requests"]), (0.0, 8.0), "{}: {:?}", load.name, result.ours.errors);
        assert!(figures["tokens"] >= 8.0 && figures["front_cpu_us_per_token"] >= 0.0, "{}: {figures:?}", load.name);
        results.add(result, &names);
    }
    assert_eq!(results.loads.len(), 6);
    report::write(&results, folder.path()).unwrap();
    let table = fs::read_to_string(folder.path().join("table.md")).unwrap();
    assert!(table.contains("| `front-messages`: chats as messages (/v1/messages) |"), "{table}");
}

#[tokio::test]
async fn loads_become_results_a_table_and_plots() {
    let _alone = ALONE.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    stand_in(folder);
    let all = loads::all(true);
    let names: Vec<&str> = all.iter().map(|load| load.name).collect();
    let mut results = Results::new(conditions());
    for name in ["ready", "decode-1", "front", "intruder", "leaving"] {
        let mut load = all.iter().find(|load| load.name == name).unwrap().clone();
        // One of the three ways to load tries the peer's configurations; it is the same for all.
        load.with_peer = name == "front";
        results.add(bench(folder).run(&load).await.unwrap(), &names);
    }
    let front = results.loads.iter().find(|load| load.name == "front").unwrap();
    assert_eq!(front.ours.runs[0]["failed"], 0.0, "{:?}", front.ours.errors);
    assert_eq!(front.ours.runs[0]["tokens"], 16.0 * 8.0);
    assert!(front.ours.runs[0]["cpu_s"] > 0.0 && front.ours.runs[0]["pss_mib"] > 1.0);
    assert!(front.trials.len() > 2 && front.trials.iter().all(|trial| trial.value.is_some()));
    assert_eq!(front.peer_default.as_ref().unwrap().runs.len(), 1);
    assert!(front.verdicts().iter().all(|verdict| verdict.ratio.is_some()));
    let ready = results.loads.iter().find(|load| load.name == "ready").unwrap();
    let figures = &ready.ours.runs[0];
    assert_eq!(figures["failed"], 0.0, "{:?}", ready.ours.errors);
    assert!(figures["ready_ms"] > 1.0 && figures["ready_ms"] < ready.took_s * 1e3, "{figures:?}");
    let decode = results.loads.iter().find(|load| load.name == "decode-1").unwrap();
    assert_eq!(decode.batched_bench, [250.5]);
    let intruder = results.loads.iter().find(|load| load.name == "intruder").unwrap();
    // So small a prompt may be read between two tokens of a victim: whether there is a slow-down to tell is chance.
    assert_eq!(intruder.ours.runs[0]["failed"], 0.0, "{:?}", intruder.ours.errors);
    assert!(intruder.ours.runs[0]["readyz_max_ms"] > 0.0, "{:?}", intruder.ours.runs[0]);
    let leaving = results.loads.iter().find(|load| load.name == "leaving").unwrap();
    assert_eq!(leaving.ours.runs[0]["stayers_lost"], 0.0, "{:?}", leaving.ours.errors);
    assert_eq!(leaving.ours.runs[0]["requests"], 96.0);

    report::write(&results, folder).unwrap();
    let read = Results::read(folder).unwrap().unwrap();
    assert_eq!((read.schema, read.loads.len()), (SCHEMA, 5));
    let table = fs::read_to_string(folder.join("table.md")).unwrap();
    assert!(
        table.contains("| demo-v2 q8_0, 64 streams, 512 chats (front-end cost) | requests/s | ≥ 1.10x best |"),
        "{table}"
    );
    for plot in ["ratios.svg", "itl-front.svg", "itl-intruder.svg"] {
        let svg = fs::read_to_string(folder.join(plot)).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{plot}");
        assert!(svg.contains("prefers-color-scheme:dark") && !svg.contains("NaN"), "{plot}");
    }
    // What is remembered is not tried again.
    let known = bench(folder).run(all.iter().find(|load| load.name == "front").unwrap()).await.unwrap();
    // Rounded: the last digit of a number may change on its way through a file.
    let told = |trials: &[Trial]| -> Vec<String> {
        trials.iter().map(|trial| format!("{} {:.6}", trial.name, trial.value.unwrap())).collect()
    };
    assert_eq!(told(&known.trials), told(&front.trials));
}

#[tokio::test]
async fn a_short_soak_finds_nothing_wrong() {
    if machine::cores() < WORKERS as usize {
        return;
    }
    let _alone = ALONE.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let folder_path = folder.path().to_owned();
    let soak = Soak { server: server(), demo, model: None, folder: folder_path, requests: 250, seed: 20 };
    let report = soak.run().await.unwrap();
    let file = folder.path().join("soak.json");
    report.write(&file).unwrap();
    assert!(report.failed().is_empty(), "{report}\n{}", fs::read_to_string(file).unwrap());
    assert_eq!((report.requests, report.checks.len()), (250, 16));
    assert!(report.faults[&Fault::Kill] > 0 && report.faults[&Fault::Pause] > 0, "{report}");
}
