//! A file of settings: what it gives, what goes before it, and what is said of a wrong one.
#![allow(clippy::unwrap_used)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ArgAction;

use super::file::{HIDDEN, SettingsFile};
use super::line::{self, CONFIG, SERVE};
use super::*;

/// A file that is there.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

/// A folder with a file of settings in it.
fn written(text: impl AsRef<[u8]>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gantry.yaml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

fn read(words: &[&str]) -> Line {
    let words = ["gantry-server"].iter().chain(words).map(OsString::from);
    line::read_words(words, Vec::new()).unwrap()
}

/// What `serve` would have of a file of settings, and with further words.
fn serve(path: &Path, words: &[&str]) -> (Box<ServeArgs>, Vec<Setting>) {
    let line = read(&[&["serve", "--config", path.to_str().unwrap()], words].concat());
    match line.command {
        Command::Serve(args) => (args, line.settings),
        other => panic!("{other:?}"),
    }
}

/// What is said of a file of settings, line for line, without its path.
fn told(text: impl AsRef<[u8]>) -> Vec<String> {
    let (_folder, path) = written(text);
    let Err(problems) = check_file(&path) else { return Vec::new() };
    problems.0.iter().map(|problem| problem.replace(&format!("{}:", path.display()), "")).collect()
}

#[test]
fn every_flag_of_serve_can_be_given_in_a_file() {
    for argument in line::arguments(SERVE) {
        let Some(flag) = argument.get_long().filter(|flag| *flag != CONFIG) else { continue };
        let (key, words, text) = match argument.get_action() {
            ArgAction::SetTrue => (flag.to_owned(), vec![format!("--{flag}")], "true"),
            ArgAction::Append => (flag.to_owned(), vec![format!("--{flag}=a"), format!("--{flag}=-7")], "[a, -7]"),
            _ => (flag.replace('-', "_"), vec![format!("--{flag}=-7")], "-7"),
        };
        let (_folder, path) = written(format!("{key}: {text}\n"));
        let (mut from_file, settings) = serve(&path, &[]);
        from_file.config = None;
        let words: Vec<&str> = ["serve"].into_iter().chain(words.iter().map(String::as_str)).collect();
        let line = read(&words);
        let Command::Serve(from_words) = line.command else { panic!("{words:?}") };
        assert_eq!(format!("{from_file:?}"), format!("{from_words:?}"), "{flag}");
        let setting = |settings: &[Setting]| settings.iter().find(|setting| setting.flag == flag).unwrap().clone();
        let (setting, asked) = (setting(&settings), setting(&line.settings));
        assert_eq!(setting.values, asked.values, "{flag}");
        assert!(matches!(setting.origin, Origin::File(_)) && asked.origin == Origin::CommandLine, "{setting:?}");
    }
}

#[test]
fn the_command_line_goes_before_a_file_and_a_file_before_the_default() {
    let (_folder, path) = written(format!("# Ours.\nmodel: {MODEL}\nport: 9000\nalias: [chat, other]\n"));
    let origin = |settings: &[Setting], flag: &str| {
        let setting = settings.iter().find(|setting| setting.flag == flag).unwrap();
        (setting.values.join(","), setting.origin.clone())
    };
    let (args, settings) = serve(&path, &["--port", "9001", "--alias", "mine"]);
    assert_eq!(origin(&settings, "port"), ("9001".to_owned(), Origin::CommandLine));
    assert_eq!(origin(&settings, "alias"), ("mine".to_owned(), Origin::CommandLine));
    assert_eq!(origin(&settings, "parallel"), ("8".to_owned(), Origin::Default));
    let (model, from) = origin(&settings, "model");
    let Origin::File(place) = from else { panic!("{from:?}") };
    assert_eq!((&*model, place.to_string()), (MODEL, format!("{}:2:1", path.display())));
    assert_eq!(args.settings().unwrap().http.port, 9001);
    let (args, _) = serve(&path, &[]);
    assert_eq!(args.settings().unwrap().http.port, 9000);
    assert_eq!(args.alias, ["chat", "other"]);

    // By whichever of its two names, and as a file on the command line goes before one in the environment.
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/src/main.rs");
    for words in [&[other][..], &["-m", other]] {
        let (args, settings) = serve(&path, words);
        assert_eq!(args.settings().unwrap().version.model_path.to_str(), Some(other));
        assert_eq!(origin(&settings, "model"), (other.to_owned(), Origin::CommandLine));
    }
}

#[test]
fn texts_are_read_as_on_a_command_line_and_not_as_yaml_has_them() {
    let text =
        "alias: yes\nctx-size: 0x10\nspm-infill: on\nqueue_timeout: '30'\nchat-template: |\n  {{ x }}\n  {# y #}\n";
    let (_folder, path) = written(text);
    let (args, _) = serve(&path, &[]);
    assert_eq!((&*args.alias, &*args.ctx_size), (&["yes".to_owned()][..], "0x10"));
    assert!(args.spm_infill && args.queue_timeout == "30");
    assert_eq!(args.chat_template.as_deref(), Some("{{ x }}\n{# y #}\n"));
}

#[test]
fn all_that_is_wrong_with_a_file_is_told_at_once_with_its_place() {
    let text = "\
model: /nowhere/model.gguf
prot: 8080
port: x
parallel: [1, 2]
  # Further ones.
cache-ram: {mib: 5}
cache_disk: 100
cache-disk: 200
offline: maybe
workers: ~
threads: !!int 4
config: other.yaml
lora: a.gguf
alias: [a, [b], '']
? [ctx-size]
: 4
api-key: '***'
max-queue: &n -3
low-watermark: *n
cors-origins: []
";
    let told = told(text);
    let wanted = [
        "2:1: prot is no setting of this server: did you mean port?",
        "4:11: parallel has one value, and this is a list",
        "6:12: cache-ram has one value, and this is a mapping",
        "8:1: cache-disk stands twice, first in line 7: leave one of them out",
        "9:10: offline must be true or false, not \"maybe\"",
        "10:10: workers has no value: leave it out for the default, or write the text in quotes",
        "11:16: the tag !!int must be left out: a value's flag says what it is",
        "12:1: config must be left out: a file of settings names no other",
        "13:1: lora is no setting of this server: adapters are not supported: merge it into the model's file",
        "14:12: the list of alias may have nothing but values in it",
        "15:3: a key must be the name of a flag",
        "17:10: api-key must be written out: *** stands for what `config show` does not show",
        "19:16: aliases (*name) are not followed: write the value",
        "20:15: cors-origins has an empty list: leave it out",
        // What its values are wrong for.
        "3:1: port must be a whole number from 0 to 65535, not \"x\"",
        "14:1: alias must be 1 to 256 characters without control characters, not \"\"",
        "1:1: model must be a readable file, and \"/nowhere/model.gguf\" is not there",
        "7:1: cache-disk must be given together with --cache-disk-dir",
        "18:1: max-queue must be a whole number from 0 to",
    ];
    for part in wanted {
        assert_eq!(told.iter().filter(|problem| problem.starts_with(part)).count(), 1, "{part}: {told:#?}");
    }
    assert_eq!(told.len(), wanted.len(), "{told:#?}");
}

#[test]
fn a_name_that_is_none_has_advice_only_where_one_is_like_it() {
    for (key, advice) in [
        ("m", ": did you mean model?"),
        ("np", ": parallel says it"),
        ("c", ": did you mean ctx-size?"),
        ("a", ": did you mean alias?"),
        ("file", ": did you mean model?"),
        ("tempreture", ": did you mean temperature? Instead: "),
        ("\"\"", ""),
        ("x", ""),
        ("zz", ""),
        ("reference", ""),
    ] {
        let told = told(format!("{key}: 1"));
        let shown = key.trim_matches('"');
        let wanted = format!("1:1: {shown} is no setting of this server{advice}");
        assert!(told.len() == 1 && told[0].starts_with(&wanted), "{wanted}: {told:?}");
        assert!(!advice.is_empty() || told[0] == wanted, "{told:?}");
    }
}

#[test]
fn of_long_values_and_many_mistakes_the_beginning_is_told() {
    let long = told(format!("port: {}", "9".repeat(1_100_000)));
    assert!(long.len() == 1 && long[0].len() < 1000 && long[0].ends_with("9…\""), "{}", long[0].len());
    let many = Problems((0..700_000).map(|n| format!("--x {n} \u{1b}[31m")).collect()).to_string();
    assert!(many.len() < 10_000 && !many.contains('\u{1b}'), "{}", many.len());
    assert!(many.ends_with(&format!("  and {} more, which are not told\n", 700_000 - MAX_PROBLEMS)));
}

#[test]
fn what_is_no_file_of_settings_is_refused_at_once() {
    let keys: String = (0..200_000).map(|n| format!("k{n}: 1\n")).collect();
    let bomb = format!("a: &a [x, x]\n{}", (0..60).map(|n| format!("b{n}: [*a, *a, *a]\n")).collect::<String>());
    for (text, wanted) in [
        ("port 8080", "1:1: settings are expected, such as port: 8080"),
        ("- port: 8080", "1:1: settings are expected, such as port: 8080"),
        ("*x", "1:1: settings are expected"),
        ("port: 1\n---\nport: 2\n", "3:1: a second document begins here, and one is read"),
        ("port: 1\nhost: 'a\n", "this cannot be read as YAML: "),
        ("prot: 1\nport: 1\n bad: [\n", "1:1: prot is no setting"),
        ("port: 1\n bad: [\n", "2:5: this cannot be read as YAML: "),
        (&*"[".repeat(1 << 20), "this cannot be read as YAML: "),
        (&"{a: ".repeat(1 << 18), "this cannot be read as YAML: "),
        (&format!("port: {}", "{a: ".repeat(200)), "this cannot be read as YAML: "),
        (&"- ".repeat(1 << 20), "settings are expected"),
        (&"a".repeat(MAX_CONFIG_BYTES), "settings are expected"),
        (&keys, "what is wrong behind that is not told"),
        (&bomb, "a is no setting"),
        (&" ".repeat(10 << 20), "FILE must be a file of settings of at most 2097152 bytes, and"),
        ("port: 80\0", ""),
        ("\u{feff}prot: 1\n", "prot is no setting"),
    ] {
        let began = Instant::now();
        let told = told(text);
        let shown = text.get(..20).unwrap_or(text);
        assert!(told.iter().any(|problem| problem.contains(wanted)), "{shown:?}: {told:#?}");
        assert!(told.len() <= MAX_CONFIG_PROBLEMS + 1, "{shown:?}: {told:#?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{shown:?} took {:?}", began.elapsed());
    }
    assert!(told(b"GGUF\xff\xfe").iter().any(|problem| problem.contains("FILE must be a readable file of text")));
    for empty in ["", "# Nothing yet.\n", "---\n", "---\n...\n"] {
        assert!(told(empty).is_empty(), "{empty:?}: {:?}", told(empty));
    }
}

#[test]
fn what_is_no_regular_file_is_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    for (path, wanted) in [
        (&*pipe, "is a pipe, a device or a socket"),
        (folder.path(), "is a directory"),
        (Path::new("/dev/zero"), "is a pipe, a device or a socket"),
        (Path::new("/nowhere/gantry.yaml"), "is not there"),
    ] {
        let problems = check_file(path).unwrap_err().to_string();
        assert!(problems.contains(wanted) && problems.contains("  FILE must be a readable file"), "{problems}");
        let (args, settings) = serve(path, &[]);
        let problems = args.settings().unwrap_err().told_of(&settings);
        assert!(problems.0.len() == 1 && problems.0[0].starts_with("--config must be"), "{problems}");
    }
}

#[test]
fn what_is_shown_is_a_file_that_gives_the_same_settings() {
    let (_folder, path) =
        written("port: 9000\nalias: [chat, 'a: b']\nchat-template: \"{{ \\\"ü\\\" }}\\n\\e\\u2028\"\n");
    let (args, settings) = serve(&path, &["-np", "3", "--any-model", "-m", MODEL]);
    let text = show(&settings);
    for line in [
        "port: 9000  # ".to_owned() + path.to_str().unwrap() + ":1:1",
        "parallel: 3  # command line".to_owned(),
        "any-model: true  # command line".to_owned(),
        "threads: -1  # default".to_owned(),
        "# host:  # default: 127.0.0.1 for serve, 0.0.0.0 for pod".to_owned(),
        "# sha256:  # default: none".to_owned(),
    ] {
        assert!(text.lines().any(|told| told == line), "{line:?} is not a line of {text}");
    }
    let (_other, given_back) = written(&text);
    let (again, _) = serve(&given_back, &[]);
    assert_eq!(again.settings().unwrap(), args.settings().unwrap(), "{text}");
}

#[test]
fn what_is_secret_is_not_shown_and_has_to_be_written_in() {
    let signed = "https://host/m.gguf?X-Amz-Signature=hush";
    let (_folder, path) =
        written(format!("api-key: [hush, hush2]\nmodel: {signed}\nmodel-draft: https://me:hush@h/d\n"));
    let (_, settings) = serve(&path, &[]);
    let text = show(&settings);
    assert!(!text.contains("hush") && text.contains(HIDDEN), "{text}");
    let told = told(&text);
    for flag in ["api-key", "model", "model-draft"] {
        let wanted = format!("{flag} must be written out");
        assert!(told.iter().any(|problem| problem.contains(&wanted)), "{flag}: {told:?}");
    }
    // Nor in what is said of the file.
    let (_folder, path) = written("api-key: hush\nprot: 1\nport: x\n");
    let problems = check_file(&path).unwrap_err().to_string();
    assert!(!problems.contains("hush"), "{problems}");
}

proptest::proptest! {
    #[test]
    fn any_text_that_is_shown_is_read_as_it_was(text in "\\PC{0,12}|[\\x00-\\x7f\u{85}\u{feff}\u{2028}]{0,12}") {
        let chat = line::arguments(SERVE).into_iter().find(|argument| argument.get_long() == Some("chat-template"));
        let shown = show(&[Setting::new(&chat.unwrap(), "chat-template", vec![text.clone()], Origin::CommandLine)]);
        let read = SettingsFile::parse("shown", &shown);
        proptest::prop_assert!(read.problems.is_empty(), "{:?}: {shown}", read.problems);
        proptest::prop_assert_eq!(&read.of("chat-template").unwrap().values, &[text]);
    }
}
