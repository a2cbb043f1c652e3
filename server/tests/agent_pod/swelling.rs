//! A candidate that takes more memory than its header lets expect.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::fetch::digest;
use crate::files::FileServer;
use crate::pod::{ONE, Pod, demo, gate, served, version};

/// Empty strings in the header: 64 MiB of the file, and half a gigabyte of memory while llama.cpp reads it.
const STRINGS: usize = 8 << 20;

/// A copy of a demo model with an array before all other values that takes eight times as much memory as room in the file.
/// It has a multiple of the alignment's bytes, so that tensors stay where they are to be.
fn swelling(name: &str) -> Vec<u8> {
    let mut file = demo(name);
    let values = u64::from_le_bytes(file[16..24].try_into().unwrap());
    file[16..24].copy_from_slice(&(values + 1).to_le_bytes());
    let mut entry = Vec::with_capacity(32 + 8 * STRINGS);
    entry.extend(8_u64.to_le_bytes());
    entry.extend(b"swelling");
    entry.extend(9_u32.to_le_bytes());
    entry.extend(8_u32.to_le_bytes());
    entry.extend((STRINGS as u64).to_le_bytes());
    entry.resize(32 + 8 * STRINGS, 0);
    file.splice(24..24, entry);
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_swells_dies_alone_and_the_active_one_never_notices() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let workers = pod.router.active().unwrap().stats().pids();
    let content = swelling("demo-v2.q8_0.gguf");
    let sha = digest(&content).to_string();
    let server = FileServer::start(content).await;

    pod.prepare(&version("swelling", &server, &sha));
    let (over, answers) = (AtomicBool::new(false), AtomicUsize::new(0));
    let asking = async {
        while !over.load(Ordering::Relaxed) {
            assert_eq!(pod.answer().await, ONE);
            answers.fetch_add(1, Ordering::Relaxed);
        }
    };
    let judged = async {
        let refused = |entry: &serde_json::Value| {
            entry["candidate"]["version"] == "swelling" && entry["candidate"]["phase"] == "Failed"
        };
        let entry = pod.api.entry("swelling", refused).await;
        over.store(true, Ordering::Relaxed);
        entry
    };
    let ((), entry) = tokio::join!(asking, judged);
    let gate = gate(&entry, "Load");
    assert_eq!((&gate["verdict"], &gate["value"]), (&"Fail".into(), &"more memory than predicted".into()), "{entry:#}");
    let message = gate["message"].as_str().unwrap();
    assert!(message.contains("were predicted for it") && message.contains("spec.resources.memory"), "{message}");
    assert!(answers.load(Ordering::Relaxed) > 0, "somebody was served meanwhile");
    assert_eq!((&entry["version"], &entry["health"]), (&"v1".into(), &"Healthy".into()));
    assert_eq!(pod.router.active().unwrap().stats().pids(), workers, "the worker that answers was not touched");
    pod.end().await;
}
