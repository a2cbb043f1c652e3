//! Grammars against llama.cpp's own matcher, and hostile ones.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use llama_cpp_sys_2 as sys;
use proptest::prelude::*;

use super::*;
use crate::model::{Model, ModelParams};

pub(super) fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf");
        Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap()
    })
}

pub(super) fn texts() -> &'static Arc<TokenTexts> {
    static TEXTS: OnceLock<Arc<TokenTexts>> = OnceLock::new();
    TEXTS.get_or_init(|| Arc::new(TokenTexts::of(model(), &[])))
}

/// A generator of numbers that needs no state but this.
pub(super) struct Draws(pub(super) u64);

impl Draws {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// llama.cpp's own grammar sampler.
struct Reference(*mut sys::llama_sampler);

impl Reference {
    fn new(text: &str) -> Option<Self> {
        let text = std::ffi::CString::new(text).unwrap();
        // SAFETY: the vocabulary is alive, the texts are NUL-terminated.
        let raw = unsafe { sys::llama_sampler_init_grammar(model().raw_vocab(), text.as_ptr(), c"root".as_ptr()) };
        (!raw.is_null()).then_some(Self(raw))
    }

    pub(super) fn allowed(&mut self) -> Vec<bool> {
        let mut data: Vec<sys::llama_token_data> =
            (0..texts().len() as i32).map(|id| sys::llama_token_data { id, logit: 0.0, p: 0.0 }).collect();
        let mut array =
            sys::llama_token_data_array { data: data.as_mut_ptr(), size: data.len(), selected: -1, sorted: false };
        // SAFETY: a valid sampler, whose grammar accepted only what it allows, and a valid array.
        unsafe { sys::llama_sampler_apply(self.0, &raw mut array) };
        data.iter().map(|d| d.logit == 0.0).collect()
    }

    fn accept(&mut self, token: Token) {
        // SAFETY: a valid sampler that allows this token.
        unsafe { sys::llama_sampler_accept(self.0, token) };
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        // SAFETY: owned.
        unsafe { sys::llama_sampler_free(self.0) };
    }
}

pub(super) fn allowed(grammar: &mut Grammar) -> Vec<bool> {
    let mut out = Vec::new();
    grammar.apply(&vec![0.0; texts().len()], &mut out).unwrap();
    out.iter().map(|&logit| logit == 0.0).collect()
}

/// Walks both matchers along the same random tokens.
fn compare(text: &str, seed: u64, tokens: usize) {
    let mut ours = match Grammar::gbnf(texts(), text) {
        Ok(grammar) => grammar,
        Err(GrammarError::LeftRecursion { .. } | GrammarError::Empty | GrammarError::TooLarge { .. }) => return,
        Err(e) => panic!("{e}\n{text}"),
    };
    // It refuses a repetition of what may be empty; here that does no harm.
    let Some(mut theirs) = Reference::new(text) else { return };
    let mut draws = Draws(seed);
    for at in 0..tokens {
        let (mine, his) = (allowed(&mut ours), theirs.allowed());
        let mut choices: Vec<Token> = Vec::new();
        for (token, (mine, his)) in (0..).zip(mine.iter().zip(&his)) {
            let piece = texts().text(token);
            // llama.cpp allows special tokens by the names they are shown with, and bytes that are no UTF-8.
            let comparable = texts().is_end(token)
                || (!piece.is_empty()
                    && piece != b"\0"
                    && ours.partial.is_whole()
                    && std::str::from_utf8(piece).is_ok());
            // A token that is no UTF-8 by itself, or a NUL, it does not even allow by name.
            let named = text.contains("<[") && (std::str::from_utf8(piece).is_err() || piece == b"\0");
            assert!(!mine || *his || piece.is_empty() || named, "step {at}: only we allow {token} {piece:?}\n{text}");
            assert!(!comparable || mine == his, "step {at}: {token} {piece:?}: {mine} here, {his} there\n{text}");
            assert_eq!(ours.allows(token).unwrap(), *mine, "step {at}: {token} {piece:?}\n{text}");
            if *mine && *his && !texts().is_end(token) {
                choices.push(token);
            }
        }
        if choices.is_empty() {
            return;
        }
        let token = choices[draws.below(choices.len())];
        ours = if draws.below(4) == 0 { ours.clone() } else { ours };
        ours.accept(token).unwrap();
        theirs.accept(token);
    }
}

#[test]
fn the_matcher_agrees_with_llama_cpp() {
    let json = include_str!("../../tests/data/json.gbnf");
    for text in [
        json,
        r#"root ::= "yes" | "no""#,
        "root ::= (a \"b\"?)* \".\"\na ::= \"x\"+ | [y-z]",
        "root ::= [^a-c]{2,5} \"\\n\"? # a comment\n",
        "root ::= s\ns ::= \"(\" s \")\" s | \"\"",
        "root ::= [é-ü€😀]+ | . <[7]> [a-z]* | !<[9]> \"b\"",
        "root ::= x{0,3} x{2} x{1,}\nx ::= \"a\" | \"b\" x",
    ] {
        assert!(Grammar::gbnf(texts(), text).is_ok() && Reference::new(text).is_some(), "{text}");
        for seed in 0..6 {
            compare(text, seed, 24);
        }
    }
}

#[test]
fn a_repetition_of_what_may_be_empty_is_one() {
    let mut grammar = Grammar::gbnf(texts(), "root ::= (a* \"\")* \".\"\na ::= \"a\" | ").unwrap();
    for text in ["a", "a", "."] {
        grammar.accept(model().tokenize(text, false, false).unwrap()[0]).unwrap();
    }
    assert!(grammar.is_complete());
}

fn item() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just(String::from("\"a\"")),
        Just(String::from("\"the \"")),
        Just(String::from("[a-f ]")),
        Just(String::from("[^e\\n]")),
        Just(String::from(".")),
        Just(String::from("\"\"")),
        Just(String::from("[à-ÿ]")),
        (0..4).prop_map(|n| format!("r{n}")),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} | {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} {b})")),
            (inner.clone(), "[*+?]").prop_map(|(a, q)| format!("({a}){q}")),
            (inner, 0..3_u32, 0..3_u32).prop_map(|(a, m, n)| format!("({a}){{{m},{}}}", m + n)),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn random_grammars_agree_with_llama_cpp(rules in proptest::collection::vec(item(), 4), seed in any::<u64>()) {
        let mut text = String::from("root ::= r0 r1\n");
        for (i, rule) in rules.iter().enumerate() {
            // A letter first: a rule that begins with itself is refused here and hangs llama.cpp.
            text += &format!("r{i} ::= \"{}\" {rule}\n", char::from(b'a' + i as u8));
        }
        compare(&text, seed, 6);
    }

    #[test]
    fn no_text_does_worse_than_an_error(text in "[a-c:= |()\\[\\]{}0-9,*+?\"\\\\<>!.^#\n-]{0,60}") {
        let _ = Grammar::gbnf(texts(), &text);
        let _ = Grammar::gbnf(texts(), &format!("root ::= {text}"));
    }
}

pub(super) fn quickly<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = f();
    assert!(start.elapsed() < Duration::from_secs(5), "{what} took {:?}", start.elapsed());
    out
}

#[test]
fn bad_grammars_are_errors_with_a_position() {
    for (text, line, column) in [
        ("", 1, 1),
        ("root ::= \"a", 1, 10),
        ("root ::= [a-", 1, 10),
        ("root ::= (\"a\"", 1, 14),
        ("root ::= \"a\")", 1, 13),
        ("root ::= \"é\" )", 1, 14),
        ("root = \"a\"", 1, 6),
        ("root ::= \"a\"\nx ::= y", 2, 7),
        ("x ::= \"a\"", 1, 10),
        ("root ::= *", 1, 10),
        ("root ::= \"a\"{2", 1, 15),
        ("root ::= \"a\"{3,2}", 1, 13),
        ("root ::= \"a\"{1000000}", 1, 13),
        ("root ::= \"a\"{0,1000000}", 1, 13),
        ("root ::= \"a\"{99999999999999999999999}", 1, 13),
        ("root ::= \"\\q\"", 1, 11),
        ("root ::= \"\\x4\"", 1, 11),
        ("root ::= \"a\"\n\n  ;", 3, 3),
        ("root ::= <nosuchtoken>", 1, 1),
        ("root ::= <[99999999999999999999]>", 1, 1),
        ("root ::= a\0", 1, 11),
        ("root ::= (\"a\"{1000}){0} | (\"b\"{40} \"c\"){60}{60}", 1, 1),
    ] {
        let error = Grammar::gbnf(texts(), text).unwrap_err();
        let GrammarError::Syntax { line: l, column: c, .. } = &error else { panic!("{text}: {error}") };
        assert_eq!((*l, *c), (line, column), "{text}: {error}");
    }
}

#[test]
fn grammars_that_would_hang_or_eat_memory_are_refused() {
    let chain = |body: &dyn Fn(usize) -> String, last: &str| {
        let rules: Vec<String> = (0..40).map(|i| format!("r{i} ::= {}", body(i + 1))).collect();
        format!("root ::= r0\n{}\nr40 ::= {last}", rules.join("\n"))
    };
    let cases = [
        ("left recursion", String::from("root ::= root \"a\" | \"b\"")),
        ("hidden left recursion", String::from("root ::= n root \"x\" | \"y\"\nn ::= e e\ne ::= \"a\" | ")),
        ("a chain into itself", chain(&|i| format!("r{i} | r{i}"), "r0 \"a\" | \"b\"")),
        ("exponential stacks", chain(&|i| format!("r{i} \"x\" | r{i} \"y\""), "\"a\"")),
        ("nothing", String::from("root ::= root")),
        ("nesting", format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000))),
        ("long repetition", format!("root ::= \"{}\"{{0,2000}}", "a".repeat(60_000))),
        ("repeated rules", (0..200).map(|i| format!("r{i} ::= \"a\"{{0,2000}}\n")).collect::<String>() + "root ::= r1"),
        ("bytes", "root ::= \"a\"\n".repeat(200_000)),
        ("names", format!("root ::= {}", "a".repeat(5_000))),
    ];
    for (what, text) in cases {
        let error = quickly(what, || Grammar::gbnf(texts(), &text)).unwrap_err();
        assert!(!matches!(error, GrammarError::Internal(_)), "{what}: {error}");
    }
    // An exponential chain of references alone is one text, and fine.
    quickly("a chain", || Grammar::gbnf(texts(), &chain(&|i| format!("r{i} | r{i}"), "\"a\""))).unwrap();
    // Twice as many readings with each character: it fails where there are too many, and stays usable.
    let mut grammar = Grammar::gbnf(texts(), "root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"\"").unwrap();
    let a = model().tokenize("a", false, false).unwrap()[0];
    let mut accepted = 0;
    let error = quickly("ambiguity", || {
        loop {
            match grammar.accept(a) {
                Ok(()) => accepted += 1,
                Err(e) => return e,
            }
        }
    });
    assert!(matches!(&error, GrammarError::TooComplex { rule, .. } if rule == "root"), "{error}");
    assert!(accepted >= 8 && grammar.is_complete() == (accepted == 0), "{accepted}");
}

#[test]
fn long_classes_and_many_named_tokens_take_no_longer() {
    let alternatives = |n: usize, f: &dyn Fn(usize) -> String| (1..=n).map(f).collect::<Vec<_>>().join("|");
    let class = |characters: String| {
        let root = alternatives(100, &|i| format!("c \"{i}\""));
        format!("root ::= {root}\nc ::= [^{characters}]")
    };
    // Characters that are not next to each other.
    let apart: String = (0..15_000).filter_map(|i| char::from_u32(0x4e00 + 2 * i)).collect();
    // As many tokens as large vocabularies have.
    let many = Arc::new(TokenTexts::new((0..150_000).map(|i| format!("{i} ").into_bytes()), &[]));
    for (what, text) in [
        ("a long class", class("!".repeat(30_000))),
        ("a class of many ranges", class(apart)),
        ("named tokens", format!("root ::= ({})+", alternatives(1000, &|i| format!("<[{i}]>")))),
        ("excluded tokens", format!("root ::= ({})+", alternatives(1000, &|i| format!("!<[{i}]>")))),
    ] {
        let grammar = quickly(what, || Grammar::gbnf(&many, &text)).unwrap();
        quickly(what, || {
            for _ in 0..32 {
                grammar.clone().apply(&vec![0.0; many.len()], &mut Vec::new()).unwrap();
            }
        });
    }
}

#[test]
fn what_is_remembered_of_a_text_is_bounded() {
    // Each character leads to a state of its own, and each state looks at all characters of the vocabulary.
    let characters = 0x4e00..0x4e00 + 20_000;
    let pieces = characters.filter_map(char::from_u32).map(|c| c.to_string().into_bytes());
    let texts = Arc::new(TokenTexts::new(pieces, &[]));
    let mut grammar = Grammar::gbnf(&texts, "root ::= .{0,100}").unwrap();
    let mut out = Vec::new();
    for token in 0..20 {
        grammar.apply(&vec![0.0; texts.len()], &mut out).unwrap();
        assert!(out.iter().all(|&logit| logit == 0.0), "{token}");
        grammar.accept(token).unwrap();
        let [_, _, others] = grammar.machine.remembered();
        assert!(others <= machine::REMEMBERED_OTHERS, "{others} after {token}");
    }
}

#[test]
fn a_vocabulary_that_leads_to_more_states_than_are_remembered_is_followed() {
    // Eight letters that the text has to give back from the last to the first: each prefix is a state.
    let letters = [b'a', b'b'];
    let words = (0..1_u32 << 8).map(|bits| (0..8).map(|at| letters[(bits >> at & 1) as usize]).collect());
    let pieces: Vec<Vec<u8>> = words.chain([b"A".to_vec(), b"abB".to_vec(), b"abA".to_vec()]).collect();
    let texts = Arc::new(TokenTexts::new(pieces.iter().cloned(), &[]));
    let rules: Vec<String> =
        letters.map(char::from).map(|c| format!("\"{c}\" root \"{}\"", c.to_ascii_uppercase())).to_vec();
    let mut grammar = Grammar::gbnf(&texts, &format!("root ::= ({})?", rules.join("|"))).unwrap();
    let mut out = Vec::new();
    for last in ["", "abababab", "aaaabbba", "bbbbbbbb"] {
        if let Some(token) = pieces.iter().position(|piece| piece == last.as_bytes()) {
            grammar.accept(token as Token).unwrap();
        }
        grammar.apply(&vec![0.0; texts.len()], &mut out).unwrap();
        for (piece, logit) in pieces.iter().zip(&out) {
            let allowed = match piece.as_slice() {
                b"A" => last.ends_with('a'),
                b"abA" => false,
                _ => true,
            };
            assert_eq!(*logit == 0.0, allowed, "{:?} after {last}", String::from_utf8_lossy(piece));
        }
    }
}

#[test]
fn a_class_is_its_ranges_in_whatever_order() {
    let token = |text: &str| model().tokenize(text, false, false).unwrap()[0];
    for (class, inside, outside) in [
        ("[x-za-cb-e!]", "abdexz!", "fw\"A"),
        ("[z-ax]", "x", "azb"),
        ("[^d-fa-ea]", "gx!", "abcdef"),
        ("[^z-a]", "az", ""),
    ] {
        let mut grammar = Grammar::gbnf(texts(), &format!("root ::= {class}")).unwrap();
        for (text, expected) in [(inside, true), (outside, false)] {
            for c in text.chars() {
                assert_eq!(grammar.allows(token(&c.to_string())).unwrap(), expected, "{c} of {class}");
            }
        }
    }
}

#[test]
fn tokens_are_waited_for_by_name_or_because_they_are_not_excluded() {
    for (text, waits_for) in [
        ("root ::= <[7]> | <[9]>", &(|t| t == 7 || t == 9) as &dyn Fn(Token) -> bool),
        ("root ::= !<[7]>", &|t| t != 7),
        ("root ::= !<[7]> | <[7]>", &|_| true),
        ("root ::= !<[7]> | !<[9]>", &|_| true),
        ("root ::= !<[7]> | <[9]>", &|t| t != 7),
    ] {
        let mut grammar = Grammar::gbnf(texts(), text).unwrap();
        for (token, allowed) in (0..).zip(allowed(&mut grammar)) {
            assert_eq!(allowed, waits_for(token) && !texts().is_end(token), "{token} of {text}");
            assert_eq!(grammar.allows(token).unwrap(), allowed, "{token} of {text}");
        }
    }
}

#[test]
fn end_tokens_are_allowed_exactly_when_the_text_is_complete() {
    let mut grammar = Grammar::gbnf(texts(), "root ::= \"a\" \"b\"?").unwrap();
    let end = texts().end_tokens().next().unwrap();
    let token = |text: &str| model().tokenize(text, false, false).unwrap()[0];
    assert!(!grammar.allows(end).unwrap());
    assert_eq!(grammar.accept(end), Err(GrammarError::NotAllowed(end)));
    grammar.accept(token("a")).unwrap();
    assert!(grammar.allows(end).unwrap() && grammar.is_complete());
    grammar.accept(token("b")).unwrap();
    assert!(grammar.allows(end).unwrap());
    assert_eq!(allowed(&mut grammar).iter().filter(|&&a| a).count(), texts().end_tokens().count());
    assert_eq!(grammar.accept(token("b")), Err(GrammarError::NotAllowed(token("b"))));
    // A token that was refused changes nothing.
    grammar.accept(end).unwrap();
    for token in [-1, i32::MAX, i32::MIN, texts().len() as i32] {
        assert!(!grammar.allows(token).unwrap());
        assert!(grammar.accept(token).is_err());
    }
}

/// Grammars whose tokens take as many steps as they may.
fn dearest() -> [String; 4] {
    let letters = || (b'a'..=b'z').map(char::from);
    let mirrored: Vec<String> = letters().map(|c| format!("\"{c}\" root \"{}\"", c.to_ascii_uppercase())).collect();
    [
        String::from("root ::= \"a\" root \"b\" | \"a\" root \"c\" | \"\""),
        format!("root ::= ({})?", mirrored.join("|")),
        format!("root ::= {}", (0..1500).map(|i| format!("s{i}")).collect::<Vec<_>>().join(" | "))
            + &(0..1500).map(|i| format!("\ns{i} ::= [a-z ] s{} | \"{i}\"", (i + 1) % 1500)).collect::<String>(),
        String::from("root ::= s*\ns ::= t | t t | t t t\nt ::= [a-z ]+ | [a-m ]* [n-z ]*"),
    ]
}

/// Follows a grammar with whatever it allows, until it fails or so many tokens are over; the most steps of a token.
fn follow(grammar: &mut Grammar, tokens: usize, seed: u64) -> (u64, Option<GrammarError>) {
    let (mut draws, mut most, mut out) = (Draws(seed), 0, Vec::new());
    for _ in 0..tokens {
        if let Err(error) = grammar.apply(&vec![0.0; texts().len()], &mut out) {
            return (MAX_STEPS, Some(error));
        }
        most = most.max(grammar.machine.steps());
        let choices: Vec<Token> = (0..)
            .zip(&out)
            .filter(|&(token, &logit)| logit == 0.0 && !texts().is_end(token))
            .map(|(token, _)| token)
            .collect();
        if choices.is_empty() {
            break;
        }
        if let Err(error) = grammar.accept(choices[draws.below(choices.len())]) {
            return (MAX_STEPS, Some(error));
        }
    }
    (most, None)
}

/// All that is done for one token shares its steps, and what takes more ends with the rule and the limit.
#[test]
fn a_token_takes_so_many_steps_and_no_more() {
    let mut failed = 0;
    for text in dearest() {
        let Ok(mut grammar) = Grammar::gbnf(texts(), &text) else { continue };
        if let (_, Some(error)) = follow(&mut grammar, 64, 1) {
            assert!(error.to_string().contains("rule '") && error.to_string().contains("more than"), "{error}");
            failed += 1;
        }
    }
    assert!(failed >= 2, "{failed}");
    // Asking again costs again, until the token is accepted.
    let mut grammar = Grammar::gbnf(texts(), "root ::= [a-z]{1,100}").unwrap();
    let a = model().tokenize("a", false, false).unwrap()[0];
    grammar.accept(a).unwrap();
    assert_eq!(grammar.machine.steps(), 0);
    assert!(grammar.allows(a).unwrap());
    let once = grammar.machine.steps();
    grammar.apply(&vec![0.0; texts().len()], &mut Vec::new()).unwrap();
    assert!(once > 0 && grammar.machine.steps() > once);
    assert_eq!(grammar.clone().machine.steps(), 0);
}

/// What the limit of steps is in time, and what ordinary grammars take of it: `GANTRY_GRAMMARS` is a folder of them,
/// `GANTRY_MODEL` a GGUF file whose vocabulary is used.
#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stdout)]
fn what_a_token_takes() {
    let texts = std::env::var_os("GANTRY_MODEL").map_or_else(
        || texts().clone(),
        |path| {
            Arc::new(TokenTexts::of(
                &Model::load(Path::new(&path), &ModelParams::default(), &mut |_| true).unwrap(),
                &[],
            ))
        },
    );
    let grammars = std::env::var("GANTRY_GRAMMARS").ok().map(|folder| {
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let files = files.filter(|path| path.extension().is_some_and(|ending| ending == "gbnf"));
        files.map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap())).collect::<Vec<_>>()
    });
    let dearest = dearest().into_iter().map(|text| (text.chars().take(60).collect(), text));
    for (name, text) in dearest.chain(grammars.into_iter().flatten()) {
        let grammar = match Grammar::gbnf(&texts, &text) {
            Ok(grammar) => grammar,
            Err(error) => {
                println!("{name}: {error}");
                continue;
            }
        };
        let (mut most, mut worst, mut failed) = (0, Duration::ZERO, None);
        for seed in 0..8 {
            let mut grammar = grammar.clone();
            let mut draws = Draws(seed);
            for _ in 0..48 {
                let mut out = Vec::new();
                let began = Instant::now();
                let applied = grammar.apply(&vec![0.0; texts.as_ref().len()], &mut out);
                let steps = grammar.machine.steps();
                let choices: Vec<Token> = (0..)
                    .zip(&out)
                    .filter(|&(token, &logit)| logit == 0.0 && !texts.as_ref().is_end(token))
                    .map(|(token, _)| token)
                    .collect();
                let accepted = applied.and_then(|()| match choices.is_empty() {
                    true => Ok(()),
                    false => grammar.accept(choices[draws.below(choices.len())]),
                });
                worst = worst.max(began.elapsed());
                most = most.max(steps);
                if let Err(error) = accepted {
                    failed = Some(error);
                    break;
                }
                if choices.is_empty() {
                    break;
                }
            }
        }
        println!("{name}: at most {most} steps, {worst:?} for a token; {failed:?}");
    }
}
