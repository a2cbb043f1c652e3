//! `docs/configuration.md` names every flag, every variable and every limit, with the default that the code has, and
//! `docs/metrics.md` every metric.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use gantry_server::config::Cli;

use crate::server::Server;

const REFERENCE: &str = "../docs/configuration.md";
const MARK: &str = "<!-- limits -->\n";
const METRICS: &str = "../docs/metrics.md";
const METRICS_MARK: &str = "<!-- metrics -->\n";

/// Files of limits, by what they limit.
const SOURCES: &[(&str, &str)] = &[
    ("Flags", "src/config.rs"),
    ("Front and workers", "src/limits.rs"),
    ("Requests", "openai/src/limits.rs"),
    ("Requests of the Responses API", "responses/src/limits.rs"),
    ("Requests of Anthropic's API", "anthropic/src/limits.rs"),
    ("Requests of the generate protocol", "generate/src/limits.rs"),
    ("Requests of any protocol", "core/src/limits.rs"),
    ("Engine", "engine/src/params.rs"),
    ("Layout of the KV cache", "engine/src/kv_plan.rs"),
    ("Tokenising", "llama/src/limits.rs"),
    ("Chat templates", "llama/src/chat/limits.rs"),
    ("Processes that render chat templates", "engine/src/template/limits.rs"),
    ("Grammars", "llama/src/grammar/scan.rs"),
    ("Following a grammar", "llama/src/grammar/machine.rs"),
    ("Following a JSON schema", "engine/src/grammars/limits.rs"),
    ("Prefix cache", "engine/src/cache/limits.rs"),
    ("Agent", "src/agent/limits.rs"),
    ("What an agent decides", "rollout/src/limits.rs"),
    ("Fetching models", "src/fetch/limits.rs"),
    ("Gates", "src/gates/limits.rs"),
    ("GGUF headers", "gguf/src/limits.rs"),
    ("Operator", "../operator/src/limits.rs"),
    ("Leader election", "../operator/src/lease.rs"),
];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn read(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn every_flag_is_in_the_reference() {
    let reference = read(REFERENCE);
    let missing: Vec<String> = Cli::command()
        .get_subcommands()
        .filter(|command| !["validate", "check"].contains(&command.get_name()) && !command.is_hide_set())
        .flat_map(|command| command.get_arguments().cloned().collect::<Vec<_>>())
        .filter_map(|argument| {
            let flag = format!("`--{}`", argument.get_long()?);
            let variable = argument.get_env().map(|name| format!("`{}`", name.to_string_lossy()));
            let row = reference.lines().find(|line| line.starts_with(&format!("| {flag}")));
            let default = argument.get_default_values().first().map(|value| format!("`{}`", value.to_string_lossy()));
            let told = row.is_some_and(|row| {
                variable.as_ref().is_none_or(|v| row.contains(v)) && default.as_ref().is_none_or(|d| row.contains(d))
            });
            (!told && flag != "`--help`" && flag != "`--version`").then_some(format!("{flag} {variable:?} {default:?}"))
        })
        .collect();
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:#?}");
}

#[test]
fn every_flag_of_check_is_told_where_the_gates_are_explained() {
    let reference = read("../docs/validate.md");
    let (_, told) = reference.split_once("## The gates, without a cluster").expect("the section");
    let command = Cli::command();
    let check = command.find_subcommand("check").unwrap();
    let flags = check.get_arguments().filter_map(|argument| argument.get_long());
    let missing: Vec<&str> = flags.filter(|flag| !told.contains(&format!("`--{flag}`"))).collect();
    assert!(missing.is_empty(), "docs/validate.md lacks {missing:?}");
}

/// The words for programs that the sources put into errors: those of the front, and those of the engine.
fn error_codes() -> Vec<String> {
    let quoted = |text: &str| text.split('"').nth(1).map(str::to_owned);
    let front = read("core/src/api_error.rs");
    let (_, told) = front.split_once("pub fn as_str(&self) -> &str {").expect("the words of the front");
    let (told, _) = told.split_once("Self::Other").expect("the last word");
    let mut codes: Vec<String> = told.lines().filter_map(quoted).collect();
    for file in sources(&path("engine/src")).into_iter().filter(|file| !file.to_string_lossy().contains("test")) {
        let code = std::fs::read_to_string(&file).unwrap();
        // The second argument, where it is a word.
        let calls = code.split("RequestError::invalid(").skip(1);
        let seconds = calls.filter_map(|call| call.split_once(',').map(|(_, rest)| rest.trim_start()));
        codes.extend(seconds.filter(|rest| rest.starts_with('"')).filter_map(quoted));
    }
    codes
}

#[test]
fn every_error_is_in_the_reference() {
    let reference = read(REFERENCE);
    let (_, table) = reference.split_once("| status | `code` | when |").expect("the table of errors");
    let table: Vec<&str> = table.lines().skip(2).take_while(|line| line.starts_with('|')).collect();
    let codes = error_codes();
    // Words of both are among them, so that nothing is looked for in vain.
    for known in ["unknown_parameter", "no_chat_template", "invalid_grammar", "worker_died"] {
        assert!(codes.iter().any(|code| code == known), "{known} is not in {codes:?}");
    }
    let cells = |line: &str| line.split('|').nth(2).unwrap_or_default().to_owned();
    let told: Vec<String> = table.iter().map(|line| cells(line)).collect();
    let missing: Vec<&String> =
        codes.iter().filter(|code| !told.iter().any(|cell| cell.contains(&format!("`{code}`")))).collect();
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
    let known = |word: &str| codes.iter().any(|code| code == word);
    let stale: Vec<&str> =
        told.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(|word| !known(word)).collect();
    assert!(stale.is_empty(), "docs/configuration.md tells of {stale:?}");
}

#[test]
fn every_limit_is_in_the_reference() {
    check(REFERENCE, MARK, &render());
}

#[tokio::test]
async fn every_metric_is_in_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}", folder.path().display());
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1", "--response-store", &store]).await;
    server.ask("Hello!").await;
    let kept = server.post("/v1/responses", &serde_json::json!({"input": "Hello!", "max_output_tokens": 4}));
    assert_eq!(kept.send().await.unwrap().status(), 200);
    let metrics = server.get("/metrics").await.text().await.unwrap();
    check(METRICS, METRICS_MARK, &render_metrics(&metrics));
}

/// Sources whose records people read.
const LOGGED: &[&str] = &["src", "engine/src", "llama/src", "gguf/src", "core/src", "openai/src", "../operator/src"];

#[test]
fn no_record_of_the_log_is_written_as_rust_writes_its_values() {
    let mut found = Vec::new();
    for root in LOGGED {
        for file in sources(&path(root)) {
            let code = std::fs::read_to_string(&file).unwrap();
            let mut in_record = false;
            for (number, line) in code.lines().enumerate() {
                in_record |=
                    ["trace!(", "debug!(", "info!(", "warn!(", "error!("].iter().any(|call| line.contains(call));
                let by_debug = ["(?", ", ?", "= ?", ":?}"].iter().any(|sigil| line.contains(sigil));
                if in_record && (by_debug || line.trim_start().starts_with('?')) {
                    found.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
                }
                in_record &= !line.contains(';') && !line.trim_end().ends_with("),");
            }
        }
    }
    assert!(found.is_empty(), "give these words, or Display (%): {found:#?}");
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let rust = files.into_iter().filter(|file| file.extension().is_some_and(|extension| extension == "rs"));
    folders.iter().flat_map(|folder| sources(folder)).chain(rust).collect()
}

/// Holds what follows a mark in a page to what the code says, or writes it there.
fn check(page: &str, mark: &str, wanted: &str) {
    let text = read(page);
    let (before, told) = text.split_once(mark).expect("the page marks where the code's part begins");
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(path(page), format!("{before}{mark}{wanted}")).unwrap();
    } else if told != wanted {
        let differing = wanted.lines().find(|line| !told.contains(line)).unwrap_or("something that is gone");
        panic!("{page} is behind the code ({differing}): run this test with UPDATE_REFERENCE=1");
    }
}

/// The table of metrics, from what a server says of them.
fn render_metrics(text: &str) -> String {
    let mut table = "\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n".to_owned();
    for help in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (name, meaning) = help.split_once(' ').unwrap();
        let kind = text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap();
        let (shown, sample) = match kind {
            "counter" => (format!("{name}_total"), format!("{name}_total")),
            "histogram" => (name.to_owned(), format!("{name}_count")),
            _ => (name.to_owned(), name.to_owned()),
        };
        let labels = text.lines().find_map(|line| line.strip_prefix(&format!("{sample}{{"))).unwrap_or_default();
        // No value of a server with one model has a comma in it.
        let names = labels.split(',').filter_map(|label| Some(format!("`{}`", label.split_once('=')?.0)));
        let names = names.collect::<Vec<_>>().join(", ");
        writeln!(table, "| `{shown}` | {kind} | {names} | {meaning} |").unwrap();
    }
    table
}

/// The tables of limits, from the constants and their comments.
fn render() -> String {
    let mut text = String::new();
    for (title, source) in SOURCES {
        writeln!(text, "\n### {title}\n\n| limit | value | meaning |\n| --- | --- | --- |").unwrap();
        let mut comment: Vec<&str> = Vec::new();
        let code = read(source);
        let mut lines = code.lines();
        while let Some(line) = lines.next() {
            if let Some(said) = line.strip_prefix("///") {
                comment.push(said.trim());
                continue;
            }
            let said = std::mem::take(&mut comment);
            let is_limit = ["pub const ", "const MAX_", "const MIN_"].iter().any(|start| line.starts_with(start));
            let Some((_, declared)) = line.split_once("const ").filter(|_| is_limit) else { continue };
            let mut whole = declared.to_owned();
            while !whole.contains(';') {
                whole.push_str(lines.next().expect("a constant ends").trim());
            }
            let (name, rest) = whole.split_once(':').unwrap();
            let (_, value) = rest.split_once('=').unwrap();
            let value = value.split(';').next().unwrap().trim();
            // A name is no limit.
            if value.starts_with('"') {
                continue;
            }
            writeln!(text, "| `{name}` | {} | {} |", shown(value), plain(said.join(" ").trim())).unwrap();
        }
    }
    text
}

/// A constant's value for people: durations and powers of two as such, the rest as it stands.
fn shown(value: &str) -> String {
    let inside = |call: &str| value.strip_prefix(call)?.strip_suffix(')');
    if let Some(seconds) = inside("Duration::from_secs(") {
        return format!("{seconds} s");
    }
    if let Some(milliseconds) = inside("Duration::from_millis(") {
        return format!("{milliseconds} ms");
    }
    let factors: Option<Vec<u64>> = value.split(" * ").map(|factor| factor.replace('_', "").parse().ok()).collect();
    let shifted = || {
        let (number, bits) = value.split_once(" << ")?;
        Some(number.parse::<u64>().ok()? << bits.parse::<u32>().ok()?)
    };
    match factors.filter(|factors| factors.len() > 1).map(|factors| factors.iter().product()).or_else(shifted) {
        Some(number) => binary(number),
        None => value.replace('_', ","),
    }
}

/// A number in powers of 1024.
fn binary(number: u64) -> String {
    let mut scaled = number;
    for unit in ["", " Ki", " Mi", " Gi"] {
        if !scaled.is_multiple_of(1024) {
            return format!("{scaled}{unit}");
        }
        scaled /= 1024;
    }
    format!("{scaled} Ti")
}

/// A comment without links.
fn plain(comment: &str) -> String {
    let mut text = String::new();
    let mut rest = comment;
    while let Some((before, link)) = rest.split_once('[') {
        let (name, after) = link.split_once(']').unwrap_or((link, ""));
        text.push_str(before);
        text.push_str(name);
        rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, rest)) => rest,
            None => after,
        };
    }
    text + rest
}
