//! How much of what clients send is taken, followed and stopped, and what it costs: a corpus of schemas with instances,
//! which is not part of the repository.
//!
//! `GANTRY_SCHEMAS` is a folder with `maskbench-sample.jsonl` (a line for each schema: `id`, `schema`, `tests` with `data`
//! and `valid`) and `draft2020-12.json` (files of groups with `schema` and `tests`), `GANTRY_MODEL` a GGUF file whose
//! vocabulary is used.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use gantry_llama::{Model, ModelParams};
use serde_json::Value;

use super::*;

struct Case {
    id: String,
    schema: Value,
    tests: Vec<Value>,
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var("GANTRY_SCHEMAS").expect("GANTRY_SCHEMAS names the folder of schemas"))
}

fn maskbench(folder: &Path) -> Vec<Case> {
    let lines = std::fs::read_to_string(folder.join("maskbench-sample.jsonl")).unwrap();
    let case = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let id = value["id"].as_str().unwrap_or_default().to_owned();
        Case { id, schema: value["schema"].clone(), tests: value["tests"].as_array().cloned().unwrap_or_default() }
    };
    lines.lines().map(case).collect()
}

fn draft(folder: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(folder.join("draft2020-12.json")).unwrap();
    let files: BTreeMap<String, Vec<Value>> = serde_json::from_str(&text).unwrap();
    let case = |file: &str, group: &Value| Case {
        id: format!("{file}: {}", group["description"]),
        schema: group["schema"].clone(),
        tests: group["tests"].as_array().cloned().unwrap_or_default(),
    };
    files.iter().flat_map(|(file, groups)| groups.iter().map(move |group| case(file, group))).collect()
}

/// As models write it.
fn write(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                *out += if i == 0 { "[" } else { ", " };
                write(item, out);
            }
            *out += if items.is_empty() { "[]" } else { "]" };
        }
        Value::Object(entries) => {
            for (i, (key, value)) in entries.iter().enumerate() {
                *out += if i == 0 { "{" } else { ", " };
                *out += &format!("{}: ", Value::from(key.as_str()));
                write(value, out);
            }
            *out += if entries.is_empty() { "{}" } else { "}" };
        }
        other => *out += &other.to_string(),
    }
}

#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn measure<T>(&mut self, run: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = run();
        self.0.push(began.elapsed().as_secs_f64() * 1e6);
        result
    }

    fn report(&mut self, what: &str) {
        self.0.sort_by(f64::total_cmp);
        let at = |share: f64| self.0.get(((self.0.len().max(1) - 1) as f64 * share) as usize).copied().unwrap_or(0.0);
        println!(
            "{what}: {} times, us: p50 {:.1}, p99 {:.1}, p99.9 {:.1}, worst {:.1}",
            self.0.len(),
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        );
    }
}

#[derive(Default)]
struct Tally {
    masks: Times,
    accepts: Times,
    failures: usize,
}

impl Tally {
    /// Whether a text is followed to its end.
    fn follows(&mut self, constraint: &mut Constraint, texts: &TokenTexts, text: &str) -> bool {
        let (row, mut out) = (vec![0.0_f32; texts.len()], Vec::new());
        for token in texts.tokenize(text) {
            let applied = self.masks.measure(|| constraint.apply(&row, &mut out));
            if let Err(error) = applied {
                println!("  failed: {error}");
                self.failures += 1;
                return false;
            }
            if out[usize::try_from(token).unwrap()] != 0.0 {
                return false;
            }
            if self.accepts.measure(|| constraint.accept(token)).is_err() {
                self.failures += 1;
                return false;
            }
        }
        constraint.is_complete()
    }
}

/// The least that is done, a little below what was measured with the tokens of demo-v2, in percent.
struct Floors {
    /// Schemas taken.
    taken: f64,
    /// Valid instances passed.
    passed: f64,
    /// Invalid ones stopped.
    stopped: f64,
}

/// The most answers of a corpus that may take too much to follow.
const MAX_FAILURES: usize = 2;

fn corpus(name: &str, cases: &[Case], texts: &Arc<TokenTexts>, strict: bool, floors: &Floors) {
    let grammars = Grammars::default();
    let began = Instant::now();
    grammars.get(texts, &grammar(&Value::Bool(true), strict), "json").ok();
    println!("{name}, strict {strict}: the first schema took {:?}", began.elapsed());
    let (mut tally, mut compiling) = (Tally::default(), Times::default());
    let (mut taken, mut valid, mut passed, mut invalid, mut stopped) = (0, 0, 0, 0, 0);
    for case in cases {
        let compiled = compiling.measure(|| grammars.get(texts, &grammar(&case.schema, strict), "json"));
        let constraint = match compiled {
            Ok(constraint) => constraint,
            Err(error) => {
                println!("  refused {}: {error}", case.id);
                continue;
            }
        };
        taken += 1;
        for test in &case.tests {
            let mut text = String::new();
            write(&test["data"], &mut text);
            let followed = tally.follows(&mut constraint.clone(), texts, &text);
            if test["valid"] == true {
                valid += 1;
                passed += usize::from(followed);
            } else {
                invalid += 1;
                stopped += usize::from(!followed);
            }
        }
    }
    println!(
        "{name}, strict {strict}: {taken} of {} schemas taken ({:.1} %)",
        cases.len(),
        100.0 * taken as f64 / cases.len() as f64
    );
    println!(
        "  valid instances passed {passed} of {valid}, invalid ones stopped {stopped} of {invalid}, failures {}",
        tally.failures
    );
    let percent = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
    for (what, part, whole, floor) in [
        ("schemas taken", taken, cases.len(), floors.taken),
        ("valid instances passed", passed, valid, floors.passed),
        ("invalid ones stopped", stopped, invalid, floors.stopped),
    ] {
        assert!(percent(part, whole) >= floor, "{name}, strict {strict}: {what} {part} of {whole}, below {floor} %");
    }
    assert!(tally.failures <= MAX_FAILURES, "{name}, strict {strict}: {} failures", tally.failures);
    compiling.report("  compile");
    tally.masks.report("  mask");
    tally.accepts.report("  accept");
}

fn grammar(schema: &Value, strict: bool) -> params::Constraint {
    params::Constraint::JsonSchema { schema: schema.to_string(), strict }
}

#[test]
#[ignore = "needs GANTRY_SCHEMAS and GANTRY_MODEL"]
fn what_clients_send_is_taken_and_followed() {
    let model = PathBuf::from(std::env::var("GANTRY_MODEL").expect("GANTRY_MODEL names a GGUF file"));
    let model = Model::load(&model, &ModelParams::default(), &mut |_| true).unwrap();
    let texts = Arc::new(TokenTexts::of(&model, &[]));
    let floors = |taken, passed, stopped| Floors { taken, passed, stopped };
    for (strict, of_maskbench, of_draft) in [
        (false, floors(95.0, 97.5, 99.0), floors(81.0, 96.0, 56.0)),
        (true, floors(77.0, 99.0, 99.5), floors(39.5, 93.5, 91.0)),
    ] {
        corpus("maskbench", &maskbench(&folder()), &texts, strict, &of_maskbench);
        corpus("draft 2020-12", &draft(&folder()), &texts, strict, &of_draft);
    }
}
