//! What `serve` says to a person at a terminal: a bar while the model loads, what is served when it is ready, and the log in
//! words. In a pod or a pipe none of this is there, and the log is JSON.
//!
//! The log's records are made as JSON either way, by the workers too; here each becomes a line for people on its way to
//! standard error. Absent: what is logged ([`crate::telemetry`]).

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::sync::OnceLock;

use gantry_crds::status::CandidateStatus;
use gantry_engine::ModelInfo;
use gantry_rollout::Lines;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::fetch::FetchProgress;
use crate::limits::FETCH_TOLD_PERIOD;
use crate::version::{VersionSpec, label};

/// There where standard error is a terminal and this process serves it.
static CONSOLE: OnceLock<Console> = OnceLock::new();

/// What tells of itself in people's lines without being asked for: how the server ends.
pub(crate) const TOLD: &str = "gantry_server::serve";
/// What a record says of a request that has ended, which people are told in short.
pub(crate) const ENDED: &str = "request ended";
/// Fields of a record that are not shown as such.
const HIDDEN: [&str; 4] = ["timestamp", "level", "target", "message"];

/// A person's terminal.
struct Console {
    bar: ProgressBar,
    style: Style,
}

/// How lines are written.
#[derive(Clone, Copy)]
struct Style {
    colour: bool,
    /// Whether every record is shown: somebody said what is to be logged.
    all: bool,
}

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

/// Whether what is written there may have colours: it is a terminal, and nobody wants it plain.
pub(crate) fn has_colour(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !is_set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Speaks to people from now on, if standard error is a terminal.
pub fn start() {
    if std::io::stderr().is_terminal() {
        let style = Style { colour: has_colour(&std::io::stderr()), all: is_set("RUST_LOG") };
        CONSOLE.get_or_init(|| Console { bar: ProgressBar::hidden(), style });
    }
}

/// A bar for so many bytes, on standard error where that is a terminal.
pub(crate) fn bytes_bar(what: &'static str, bytes: u64) -> ProgressBar {
    // Elsewhere it draws nothing.
    let bar = ProgressBar::new(bytes).with_message(what);
    let colour = if has_colour(&std::io::stderr()) { ".cyan" } else { "" };
    match ProgressStyle::with_template(&format!(
        "{{msg}} {{bar:32{colour}}} {{bytes}} of {{total_bytes}}, {{eta}} left"
    )) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Shows how far a fetch is, for ever: with a bar at a terminal (see [`shown`]), elsewhere with a line now and then.
pub async fn show_fetching(name: String, mut progress: watch::Receiver<FetchProgress>) {
    let Some(Console { bar, style }) = CONSOLE.get() else { return log_fetching(&name, progress).await };
    let template = if style.colour { "{prefix} {bar:32.cyan} {msg}" } else { "{prefix} {bar:32} {msg}" };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.reset();
    let mut is_drawn = false;
    loop {
        let (now, what) = {
            let progress = progress.borrow_and_update();
            (progress.clone(), fetching(&progress))
        };
        // What is in the cache already is looked at without a bar.
        if now.bytes > 0 || now.note.is_some() {
            let part = if now.parts > 1 { format!(" ({} of {})", now.part, now.parts) } else { String::new() };
            bar.set_prefix(format!("fetching {name}{part}"));
            bar.set_length(now.total.unwrap_or(now.bytes).max(1));
            bar.set_position(now.bytes);
            bar.set_message(what);
            if !std::mem::replace(&mut is_drawn, true) {
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
            }
        }
        if progress.changed().await.is_err() {
            return;
        }
    }
}

async fn log_fetching(name: &str, mut progress: watch::Receiver<FetchProgress>) {
    loop {
        tokio::time::sleep(FETCH_TOLD_PERIOD).await;
        // One line for all that has changed meanwhile.
        if progress.changed().await.is_err() {
            return;
        }
        let (part, parts, what) = {
            let progress = progress.borrow_and_update();
            (progress.part, progress.parts, fetching(&progress))
        };
        tracing::info!(part, parts, "fetching {name}: {what}");
    }
}

/// How much of a file there is, how fast it comes, and how long the rest takes; or why nothing comes.
fn fetching(progress: &FetchProgress) -> String {
    let human = gantry_gguf::human_bytes;
    let mut text = human(progress.bytes);
    if let Some(total) = progress.total {
        let _ = write!(text, " of {}", human(total));
    }
    if let Some(note) = &progress.note {
        let _ = write!(text, ": {note}");
        return text;
    }
    if let Some(rate) = progress.bytes_per_second {
        let _ = write!(text, ", {}/s", human(rate));
    }
    if let Some(eta) = progress.eta {
        let _ = write!(text, ", {} left", indicatif::HumanDuration(eta));
    }
    text
}

/// Shows a bar while the model is read, of which `progress` tells the share, for ever: see [`loaded`].
pub async fn show_loading(name: String, mut progress: watch::Receiver<f32>) {
    let Some(Console { bar, style }) = CONSOLE.get() else { return };
    let template = if style.colour { "{msg} {bar:32.cyan} {percent}%" } else { "{msg} {bar:32} {percent}%" };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.reset();
    bar.set_length(100);
    bar.set_message(format!("loading {name}"));
    bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
    loop {
        bar.set_position((*progress.borrow_and_update() * 100.0).clamp(0.0, 100.0) as u64);
        if progress.changed().await.is_err() {
            return;
        }
    }
}

/// Shows how far models are with their gates, for ever: see [`shown`].
pub async fn show_gates(mut board: watch::Receiver<Lines>) {
    let Some(Console { bar, .. }) = CONSOLE.get() else { return };
    let mut is_ours = false;
    loop {
        let lines: Vec<String> = board.borrow_and_update().values().map(in_gates).collect();
        // With nothing on the board the bar may be that of a fetch, which takes it away when it ends.
        if !lines.is_empty() {
            if !is_ours || bar.is_finished() {
                if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
                    bar.set_style(style);
                }
                bar.reset();
                bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
                is_ours = true;
            }
            bar.set_message(lines.join("; "));
            bar.tick();
        }
        if board.changed().await.is_err() {
            return;
        }
    }
}

/// Which model it is, what it does, and how far it is with that.
pub(crate) fn in_gates(line: &CandidateStatus) -> String {
    let mut text = format!("{}: {}", line.version, line.phase.as_str().to_ascii_lowercase());
    if let Some(summary) = line.progress.as_ref().and_then(|progress| progress.summary.as_ref()) {
        let _ = write!(text, ", {summary}");
    }
    text
}

/// Takes the bar away: what it showed has ended.
pub fn shown() {
    if let Some(console) = CONSOLE.get() {
        console.bar.finish_and_clear();
    }
}

/// Says what is served, where, and how to end it.
pub fn ready(url: &str, spec: &VersionSpec, model: &ModelInfo) {
    if let Some(Console { style, .. }) = CONSOLE.get() {
        crate::telemetry::write_text(style.ready(url, spec, model).as_bytes());
    }
}

/// Records of the log as lines for people; `None` where nobody is there and they stay as they are.
#[must_use]
pub fn for_people(records: &[u8]) -> Option<Vec<u8>> {
    let Console { bar, style } = CONSOLE.get()?;
    let lines = records.split_inclusive(|&byte| byte == b'\n');
    let text: String = lines.filter_map(|line| style.line(&String::from_utf8_lossy(line))).collect();
    if text.is_empty() || bar.is_finished() || bar.is_hidden() {
        return Some(text.into_bytes());
    }
    // Above the bar.
    bar.println(text.trim_end());
    Some(Vec::new())
}

/// How much context each request gets, and how many run at once.
#[must_use]
pub fn context_of(spec: &VersionSpec, model: &ModelInfo) -> String {
    if model.pooled_only {
        return String::from("none: it generates nothing, and embeds or ranks texts");
    }
    let (each, at_once) = (u64::from(model.n_ctx_per_sequence), u64::from(spec.runtime.parallel));
    let (workers, cells) = (u64::from(spec.runtime.worker_count()), model.kv_cells);
    let shared = if workers == 1 && cells < each.saturating_mul(at_once) {
        format!(", who share {cells}")
    } else {
        String::new()
    };
    let more = match u64::from(model.n_ctx_train) {
        trained if trained > each => {
            let all = trained.saturating_mul(at_once);
            // One alone has all the cells that there are.
            let alone = if at_once > 1 && cells >= trained { "-np 1 or " } else { "" };
            format!(
                "; trained for {trained}: for all of it leave -c out, or say {alone}-c {all}, as far as memory allows"
            )
        }
        _ => String::new(),
    };
    format!("{each} tokens for each request, {at_once} at once{shared}{more}")
}

/// What there is to say where more context was asked for than requests can use: they get no more than the model was trained
/// for, and the rest of the cells lies idle.
#[must_use]
pub fn idle_context(spec: &VersionSpec, model: &ModelInfo) -> Option<String> {
    let (asked, each) = (u64::from(spec.runtime.ctx_size), u64::from(model.n_ctx_per_sequence));
    let useful = each.saturating_mul(spec.runtime.parallel.into());
    (asked > useful && !model.pooled_only).then(|| {
        let (trained, parallel) = (model.n_ctx_train, spec.runtime.parallel);
        format!(
            "--ctx-size {asked} is more than requests can use: the model was trained for {trained} tokens, so that each of \
             {parallel} at once (--parallel) gets {each}; --ctx-size {useful} is enough"
        )
    })
}

/// What is to be said of chats where there are none.
#[must_use]
pub fn no_chats(model: &ModelInfo) -> Option<&'static str> {
    (!model.has_chat_template && !model.pooled_only)
        .then_some("none: the model's file has no chat template; /v1/completions goes on with texts")
}

/// What computes the model.
#[must_use]
pub fn computed_by(model: &ModelInfo) -> String {
    let backends = &model.backends;
    let gpus: Vec<String> = backends.gpus().map(|gpu| format!("{} ({})", gpu.name, gpu.description)).collect();
    let cpu = match &*backends.cpu {
        "builtin" => "the CPU backend that is built in; --backend-dir may have a faster one".to_owned(),
        variant => format!("the CPU backend {variant}"),
    };
    if gpus.is_empty() { cpu } else { format!("{}, and {cpu}", gpus.join(", ")) }
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn ready(self, url: &str, spec: &VersionSpec, model: &ModelInfo) -> String {
        let rows = [
            ("url", Some(self.paint("36", url))),
            ("model", Some(format!("{} ({})", spec.served_name, label(model)))),
            ("context", Some(context_of(spec, model))),
            ("computes", Some(computed_by(model))),
            ("chats", no_chats(model).map(str::to_owned)),
            ("end", Some("Ctrl-C lets requests in flight end; a second one cuts them off".to_owned())),
        ];
        let mut text = format!("{}\n", self.paint("1;32", "ready"));
        for (name, what) in rows.into_iter().filter_map(|(name, what)| Some((name, what?))) {
            // A string takes whatever is written into it.
            let _ = writeln!(text, "  {name:<8} {what}");
        }
        text
    }

    /// A record as a line; `None` where it is not worth one.
    fn line(self, record: &str) -> Option<String> {
        let Ok(Value::Object(fields)) = serde_json::from_str::<Value>(record) else {
            // What llama.cpp, the C++ runtime or a panic printed.
            return Some(record.to_owned());
        };
        let text = |name: &str| fields.get(name).and_then(Value::as_str).unwrap_or_default();
        let told = self.all || text("target") == TOLD;
        if text("message") == ENDED && !self.all {
            return Some(format!("{}\n", self.paint("2", &ended(&fields))));
        }
        let head = match text("level") {
            "ERROR" => self.paint("1;31", "error: "),
            "WARN" => self.paint("1;33", "warning: "),
            "INFO" if told => String::new(),
            _ if self.all => self.paint("2", &format!("{}: ", text("level").to_ascii_lowercase())),
            _ => return None,
        };
        Some(format!("{head}{}{}\n", text("message"), self.paint("2", &others(&fields))))
    }
}

/// A request that has ended, in short: where it was sent, the status of its answer, and why where that is no success.
fn ended(fields: &Map<String, Value>) -> String {
    let words = ["route", "status", "code", "outcome"].into_iter().filter_map(|name| match fields.get(name)? {
        Value::String(text) if text.is_empty() || (name == "outcome" && text == "ok") => None,
        Value::String(text) => Some(text.clone()),
        Value::Null => None,
        other => Some(other.to_string()),
    });
    let took = fields.get("duration_ms").and_then(Value::as_f64).map(|ms| format!("in {ms:.0} ms"));
    words.chain(took).collect::<Vec<_>>().join(" ")
}

/// The fields of a record that have no place of their own.
fn others(fields: &Map<String, Value>) -> String {
    let shown = fields.iter().filter(|(name, _)| !HIDDEN.contains(&name.as_str()));
    let shown: Vec<String> = shown
        .map(|(name, value)| match value {
            Value::String(text) => format!("{name} {text}"),
            other => format!("{name} {other}"),
        })
        .collect();
    if shown.is_empty() { String::new() } else { format!(" ({})", shown.join(", ")) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;
    use crate::version::RuntimeSettings;

    #[test]
    fn a_fetch_is_told_with_what_is_there_how_fast_it_comes_and_how_long_it_takes() {
        let mut progress = FetchProgress { bytes: 1 << 20, total: Some(4 << 20), ..FetchProgress::default() };
        assert_eq!(fetching(&progress), "1.00 MiB of 4.00 MiB");
        (progress.bytes_per_second, progress.eta) = (Some(1 << 19), Some(Duration::from_secs(6)));
        assert_eq!(fetching(&progress), "1.00 MiB of 4.00 MiB, 512 KiB/s, 6 seconds left");
        progress.note = Some("nobody listens".to_owned());
        assert_eq!(fetching(&progress), "1.00 MiB of 4.00 MiB: nobody listens");
    }

    const PLAIN: Style = Style { colour: false, all: false };

    #[test]
    fn records_become_lines_for_people() {
        let warning =
            r#"{"timestamp":"t","level":"WARN","message":"a worker died","target":"x","worker":0,"why":"memory"}"#;
        assert_eq!(PLAIN.line(warning).unwrap(), "warning: a worker died (worker 0, why memory)\n");
        let colour = Style { colour: true, ..PLAIN };
        assert_eq!(
            colour.line(r#"{"level":"ERROR","message":"no","target":"x"}"#).unwrap(),
            "\x1b[1;31merror: \x1b[0mno\x1b[2m\x1b[0m\n"
        );
        let info = r#"{"level":"INFO","message":"worker ready","target":"gantry_server::version"}"#;
        assert_eq!(PLAIN.line(info), None);
        assert_eq!(Style { all: true, ..PLAIN }.line(info).unwrap(), "worker ready\n");
        for (fields, line) in [
            (
                r#""route":"completions","status":400,"code":"invalid_value","outcome":"rejected""#,
                "completions 400 invalid_value rejected\n",
            ),
            (
                r#""route":"chat_completions","status":200,"code":"","outcome":"ok","duration_ms":12.3"#,
                "chat_completions 200 in 12 ms\n",
            ),
        ] {
            let record = format!(r#"{{"level":"INFO","message":"request ended","target":"x",{fields}}}"#);
            assert_eq!(PLAIN.line(&record).unwrap(), line);
        }
        let end =
            r#"{"level":"INFO","message":"shutting down: draining","target":"gantry_server::serve","connections":2}"#;
        assert_eq!(PLAIN.line(end).unwrap(), "shutting down: draining (connections 2)\n");
        assert_eq!(PLAIN.line("ggml.c:1: GGML_ASSERT(x) failed\n").unwrap(), "ggml.c:1: GGML_ASSERT(x) failed\n");
    }

    #[test]
    fn a_person_is_told_where_and_what_is_served() {
        let spec = VersionSpec {
            name: "standalone".to_owned(),
            digest: String::new(),
            model_path: "m.gguf".into(),
            served_name: "m".to_owned(),
            runtime: RuntimeSettings { parallel: 4, ..RuntimeSettings::default() },
        };
        let model = ModelInfo {
            description: "llama 256M Q8_0".to_owned(),
            parameters: 134_515_008,
            n_ctx_per_sequence: 8192,
            kv_cells: 32_768,
            n_ctx_train: 8192,
            has_chat_template: true,
            ..ModelInfo::default()
        };
        let text = PLAIN.ready("http://127.0.0.1:8080", &spec, &model);
        for part in
            ["http://127.0.0.1:8080", "m (llama 135M Q8_0)", "8192 tokens for each request, 4 at once\n", "Ctrl-C"]
        {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("chats"), "{text}");
        let by = |cpu: &str| {
            let backends = gantry_engine::Backends { cpu: cpu.to_owned(), ..Default::default() };
            computed_by(&ModelInfo { backends, ..model.clone() })
        };
        assert!(by("builtin").contains("built in; --backend-dir") && by("zen4").ends_with("backend zen4"));
        let without = ModelInfo { has_chat_template: false, ..model.clone() };
        assert!(PLAIN.ready("", &spec, &without).contains("chats    none: the model's file has no chat template"));
        let encoder = ModelInfo { has_chat_template: false, pooled_only: true, ..model.clone() };
        assert!(!PLAIN.ready("", &spec, &encoder).contains("chats"));
        // What is asked for and cannot be used is told with what is enough.
        let asked = |ctx_size| {
            let runtime = RuntimeSettings { ctx_size, ..spec.runtime.clone() };
            idle_context(&VersionSpec { runtime, ..spec.clone() }, &model)
        };
        assert_eq!((asked(0), asked(4 * 8192)), (None, None));
        let told = asked(100_000).unwrap();
        for part in ["--ctx-size 100000", "trained for 8192", "4 at once (--parallel) gets 8192", "--ctx-size 32768"] {
            assert!(told.contains(part), "{told}");
        }
        let pool = ModelInfo { kv_cells: 8192, ..model.clone() };
        assert_eq!(context_of(&spec, &pool), "8192 tokens for each request, 4 at once, who share 8192");
        let more = ModelInfo { n_ctx_train: 1 << 20, ..model };
        let told = "8192 tokens for each request, 4 at once; trained for 1048576: for all of it leave -c out, or say -c 4194304, as far as \
                    memory allows";
        assert_eq!(context_of(&spec, &more), told);
        let enough = ModelInfo { kv_cells: 1 << 20, ..more.clone() };
        assert!(context_of(&spec, &enough).contains("or say -np 1 or -c 4194304"), "{}", context_of(&spec, &enough));
        let one = VersionSpec { runtime: RuntimeSettings { parallel: 1, ..spec.runtime.clone() }, ..spec };
        assert!(context_of(&one, &more).contains("leave -c out, or say -c 1048576"), "{}", context_of(&one, &more));
    }
}
