//! What each architecture needs, taken from the sources of the llama.cpp that the server links, and held against
//! `src/needs.txt`. With `UPDATE_REFERENCE=1` it is written: that is all that another release of llama.cpp takes.
//!
//! Taken is what llama.cpp asks for whatever else the file says: a statement that gets a key or makes a tensor without a
//! flag, in the function itself or in its loop over all layers, that no condition, return or continue stands before. What
//! depends on anything is left out, and so are flags that are not a plain 0, names that are chosen, and the types of keys:
//! those would be guesses, and a worker tries the file anyway.
#![allow(clippy::unwrap_used)]

mod llama;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// What an architecture needs; in the order of the sources, each once.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Needs {
    keys: Vec<String>,
    /// Names, with others that do instead after a `|`, and dimensions.
    tensors: Vec<String>,
    layer_tensors: Vec<String>,
}

fn push(list: &mut Vec<String>, line: String) {
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    if !list.iter().any(|other| name(other) == name(&line)) {
        list.push(line);
    }
}

/// Code without comments, and with each run of white space as one space.
fn plain(code: &str) -> String {
    let mut out = String::new();
    let mut rest = code;
    while let Some(at) = rest.find(['/', '"']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = if rest.starts_with("//") {
            out.push(' ');
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            out.push(' ');
            rest.find("*/").map_or(rest.len(), |at| at + 2)
        } else if let Some(text) = rest.strip_prefix('"') {
            let end = 2 + text.find('"').unwrap();
            out.push_str(&rest[..end]);
            end
        } else {
            out.push('/');
            1
        };
        rest = &rest[end..];
    }
    out.push_str(rest);
    out.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The statements of a function's body with the heads of the blocks around them, the outermost first.
fn statements(body: &str) -> Vec<(Vec<String>, String)> {
    let (mut found, mut blocks, mut text) = (Vec::new(), Vec::new(), String::new());
    let mut round = 0_i32;
    let mut quoted = false;
    for c in body.chars() {
        quoted ^= c == '"';
        match c {
            _ if quoted => text.push(c),
            '(' | ')' => {
                round += if c == '(' { 1 } else { -1 };
                text.push(c);
            }
            // Within parentheses it is a list of values, or the body of a function that is handed over.
            '{' if round == 0 => blocks.push(std::mem::take(&mut text).trim().to_owned()),
            '}' if round == 0 => {
                blocks.pop();
                text.clear();
            }
            ';' if round == 0 => found.push((blocks.clone(), std::mem::take(&mut text).trim().to_owned())),
            _ => text.push(c),
        }
    }
    found
}

/// The sources, and what is looked up in them.
struct Sources {
    models: Vec<String>,
    keys: BTreeMap<String, String>,
    tensors: BTreeMap<String, String>,
    bases: BTreeMap<String, String>,
}

const LOOPS: [&str; 2] = ["for (int i = 0; i < n_layer; ++i)", "for (int i = 0; i < n_layer_all; ++i)"];
const CONDITIONS: [&str; 9] = ["if", "else", "for", "while", "switch", "case", "default", "do", "return"];

impl Sources {
    fn body(&self, class: &str, function: &str) -> Option<String> {
        let head = format!("void {class}::{function}(");
        let source = self.models.iter().find(|source| source.contains(&head))?;
        let (_, rest) = source.split_once(&head)?;
        let (_, rest) = rest.split_once('{')?;
        let mut depth = 1;
        let end = rest.find(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        })?;
        Some(rest[..end].to_owned())
    }

    /// What a function of a class asks for whatever the file says, that of its base where it has none of its own.
    fn collect(&self, class: &str, function: &str, needs: &mut Needs) {
        let Some(body) = self.body(class, function) else {
            if let Some(base) = self.bases.get(class) {
                self.collect(base, function, needs);
            }
            return;
        };
        // Widths that the function names anew are not what the hyperparameters say.
        let statements = statements(&body);
        let renamed: BTreeSet<&str> = statements
            .iter()
            .filter_map(|(_, text)| text.split_once(" = "))
            .filter_map(|(name, _)| name.rsplit([' ', '.']).next())
            .collect();
        let (mut returned, mut continued) = (false, false);
        for (blocks, text) in &statements {
            let in_lambda = blocks.iter().any(|head| head.contains("](") || head.contains("[&]"));
            let in_switch = blocks.iter().any(|head| head.starts_with("switch "));
            let word = |word: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|other| other == word);
            let layer = match blocks.as_slice() {
                [] => Some(false),
                [head] if LOOPS.contains(&head.as_str()) => Some(true),
                _ => None,
            };
            if layer == Some(false) {
                continued = false;
            }
            let first = text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            let is_condition = CONDITIONS.contains(&first) || text.contains('?');
            if let Some(layer) = layer.filter(|_| !is_condition && !returned && !continued) {
                self.take(text, layer, &renamed, needs);
                if let Some((base, called)) = text.split_once("::")
                    && called == format!("{function}(ml)")
                {
                    self.collect(base, function, needs);
                }
            }
            returned |= word("return") && !in_lambda;
            continued |= (word("continue") || (word("break") && !in_switch)) && !in_lambda;
        }
    }

    fn take(&self, text: &str, layer: bool, renamed: &BTreeSet<&str>, needs: &mut Needs) {
        let call = |name: &str| text.strip_prefix(name)?.strip_suffix(')');
        for name in ["ml.get_key(", "ml.get_key_or_arr("] {
            let Some(arguments) = call(name).filter(|_| !layer) else { continue };
            let arguments: Vec<&str> = arguments.split(", ").collect();
            let is_needed = match (name, arguments.as_slice()) {
                ("ml.get_key(", [_, _]) => true,
                // A third argument is the number of layers, or whether it is needed.
                ("ml.get_key_or_arr(", [_, _, count]) => *count != "false",
                (_, [.., last]) => *last == "true",
                _ => false,
            };
            if let Some(key) = self.keys.get(arguments[0]).filter(|_| is_needed) {
                push(&mut needs.keys, key.clone());
            }
        }
        // Where a layer has the matrices of several in one, it needs none of them alone.
        for (name, parts, joined) in [
            ("create_tensor_qkv(layer, i, ", &["ATTN_Q", "ATTN_K", "ATTN_V"][..], "ATTN_QKV"),
            ("create_tensor_gate_up_exps(layer, i, ", &["FFN_GATE_EXPS", "FFN_UP_EXPS"], "FFN_GATE_UP_EXPS"),
        ] {
            let of_layer = |part: &str| self.tensors[&format!("LLM_TENSOR_{part}")].replacen("blk.%d.", "", 1);
            if layer && call(name).is_some_and(|arguments| arguments.ends_with(", 0")) {
                for part in parts {
                    push(&mut needs.layer_tensors, format!("{}.weight|{}.weight", of_layer(part), of_layer(joined)));
                }
            }
        }
        self.take_tensor(text, layer, renamed, needs);
    }

    fn take_tensor(&self, text: &str, layer: bool, renamed: &BTreeSet<&str>, needs: &mut Needs) -> Option<()> {
        let (_, made) = text.split_once(" = create_tensor(tn(")?;
        let (name, rest) = made.split_once("), {")?;
        let shape = rest.strip_suffix("}, 0)")?;
        let (tensor, suffix) = name.strip_suffix(", i").filter(|_| layer).unwrap_or(name).split_once(", ")?;
        let suffix = suffix.strip_prefix('"')?.strip_suffix('"')?;
        let named = self.tensors.get(tensor)?;
        let dimensions: String = shape
            .split(',')
            .map(|dimension| match dimension.trim() {
                known if renamed.contains(known) => " _",
                "n_embd" => " n_embd",
                "n_vocab" => " n_vocab",
                "n_expert" => " n_expert",
                _ => " _",
            })
            .collect();
        match named.strip_prefix("blk.%d.") {
            Some(part) if layer && name.ends_with(", i") && !part.contains('%') => {
                push(&mut needs.layer_tensors, format!("{part}.{suffix}{dimensions}"));
            }
            None if !layer && !named.contains('%') => push(&mut needs.tensors, format!("{named}.{suffix}{dimensions}")),
            _ => {}
        }
        Some(())
    }
}

/// `{ NAME, "text" }` of a table in the sources.
fn table(text: &str, prefix: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("{ ")).filter(|line| line.starts_with(prefix));
    lines.filter_map(|line| Some((line.split_once(',')?.0.to_owned(), line.split('"').nth(1)?.to_owned()))).collect()
}

fn needs() -> BTreeMap<String, Needs> {
    let folder = llama::source().join("src");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let names = read(&folder.join("llama-arch.cpp"));
    let files = std::fs::read_dir(folder.join("models")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "cpp"));
    let header = plain(&read(&folder.join("models/models.h")));
    let bases = header.split("struct ").filter_map(|rest| rest.split_once(" : public "));
    let sources = Sources {
        models: files.map(|path| plain(&read(&path))).collect(),
        keys: table(&names, "LLM_KV_")
            .into_iter()
            .filter_map(|(id, key)| Some((id, key.strip_prefix("%s.")?.to_owned())))
            .collect(),
        tensors: table(&names, "LLM_TENSOR_").into_iter().collect(),
        bases: bases.map(|(class, base)| (class.to_owned(), base.split(' ').next().unwrap().to_owned())).collect(),
    };
    let mapping = plain(&read(&folder.join("llama-model.cpp")));
    let architectures = table(&names, "LLM_ARCH_");
    let cases = mapping.split("case ").filter_map(|case| case.split_once(": return new "));
    let classes = cases.map(|(id, class)| (architectures[id].clone(), class.split('(').next().unwrap().to_owned()));
    classes
        .map(|(architecture, class)| {
            let mut needs = Needs::default();
            sources.collect(&class, "load_arch_hparams", &mut needs);
            sources.collect(&class, "load_arch_tensors", &mut needs);
            (architecture, needs)
        })
        .collect()
}

#[test]
fn the_table_is_what_the_sources_say() {
    let needs = needs();
    // As the loader has it for every architecture, it is looked at for all of them elsewhere.
    let mut text = "# What llama.cpp cannot load an architecture without. Written by a test from its sources:\n\
                    # UPDATE_REFERENCE=1 cargo test -p gantry-gguf --test architectures\n"
        .to_owned();
    for (architecture, Needs { keys, tensors, layer_tensors }) in &needs {
        writeln!(text, "\n{architecture}").unwrap();
        let lines = [("key", keys), ("tensor", tensors), ("layer", layer_tensors)];
        for (kind, line) in lines.into_iter().flat_map(|(kind, list)| list.iter().map(move |line| (kind, line))) {
            writeln!(text, "{kind} {line}").unwrap();
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/needs.txt");
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let told = std::fs::read_to_string(&path).unwrap();
    let differing = text.lines().zip(told.lines()).find(|(wanted, told)| wanted != told);
    assert!(told == text, "src/needs.txt is behind the sources ({differing:?}): run this test with UPDATE_REFERENCE=1");
}

#[test]
fn what_is_known_of_some_architectures_is_found() {
    let needs = needs();
    let llama = &needs["llama"];
    assert_eq!(llama.keys, ["attention.layer_norm_rms_epsilon"]);
    assert_eq!(llama.tensors, ["token_embd.weight n_embd n_vocab", "output_norm.weight n_embd"]);
    let layer = [
        "attn_norm.weight n_embd",
        "attn_q.weight|attn_qkv.weight",
        "attn_k.weight|attn_qkv.weight",
        "attn_v.weight|attn_qkv.weight",
        "attn_output.weight _ n_embd",
        "ffn_norm.weight n_embd",
    ];
    // The feed-forward depends on whether there are experts.
    assert_eq!(llama.layer_tensors, layer);
    let next = &needs["qwen3next"];
    for key in ["ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"] {
        assert!(next.keys.iter().any(|needed| needed == key), "{key}");
    }
    // Given as a base's: the functions are those of llama.
    assert_eq!(&needs["llama-embed"], llama);
    assert!(needs.values().filter(|needs| needs.keys.is_empty()).count() < 15);
}

#[test]
fn what_depends_on_anything_is_left_out() {
    let code = "LOCALS; if (x) { ml.get_key(A, a); } if (y) return; ml.get_key(B, b); // ml.get_key(C, c);\n \
                auto f = [&](int i) { return g(i); }; for (int i = 0; i < n_layer; ++i) { p; if (z) { continue; } q; } r;";
    let told: Vec<(usize, String)> =
        statements(&plain(code)).into_iter().map(|(blocks, text)| (blocks.len(), text)).collect();
    let expected = [
        (0, "LOCALS"),
        (1, "ml.get_key(A, a)"),
        (0, "if (y) return"),
        (0, "ml.get_key(B, b)"),
        (1, "return g(i)"),
        (0, ""),
        (1, "p"),
        (2, "continue"),
        (1, "q"),
        (0, "r"),
    ];
    assert_eq!(told, expected.map(|(depth, text)| (depth, text.to_owned())));
}
