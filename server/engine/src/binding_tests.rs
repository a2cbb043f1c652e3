#![allow(clippy::unwrap_used)]
//! What may come is what a plain look at the whole text allows, wherever tokens cut it.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::grammars::Grammars;
use crate::params;

/// Texts of tokens, by their numbers; 0 ends an answer.
const PIECES: [&str; 26] = [
    "",
    "a",
    "b",
    "{",
    "}",
    " ",
    "\n",
    "<",
    "<call>",
    "<ca",
    "ll>",
    "ll>x",
    "ll>{",
    "{a}",
    "<think>",
    "<th",
    "ink>",
    "ink>\n",
    "ink>{",
    "</think>",
    "</th",
    "é",
    "\"",
    "x",
    "</think>\n\n",
    "ink>a<call>",
];
const END: Token = 0;
const CALLS: &str = "root ::= (\"<call>{\" [ab]* \"}\")+";
const FORM: &str = "root ::= \"{\" [ab]+ \"}\"";
/// What is left of a thought in an answer that must call.
const REQUIRED: &str = "root ::= \"<start>\" (\"<think>\" [^/]* \"</think>\" \"\\n\"*)? (\"<call>{\" [ab]* \"}\")+";

fn texts() -> Arc<TokenTexts> {
    Arc::new(TokenTexts::new(PIECES.iter().map(|piece| piece.as_bytes().to_vec()), &[END]))
}

fn token(piece: &str) -> Token {
    Token::try_from(PIECES.iter().position(|other| *other == piece).unwrap()).unwrap()
}

fn compiled(asked: &params::Constraint) -> Constraint {
    Grammars::default().get(&texts(), asked, "tools").unwrap()
}

fn gbnf(text: &str) -> Constraint {
    compiled(&params::Constraint::Gbnf(text.to_owned()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Nothing,
    Calls,
    Form,
    Either,
    Required,
}

/// An answer to a prompt that ends so.
fn binding(asked: Asked, prefix: &str, budget: Option<u32>) -> Option<Binding> {
    let form = json!({
        "format": 0, "parser": "", "prefix": prefix, "markup": [], "grammar": "", "lazy": false, "triggers": [],
        "thought": {"begin": "<think>", "ends": ["</think>"], "closing": "</think>\n\n"},
    });
    let allowed =
        || CallBinding::Allowed { grammar: gbnf(CALLS), triggers: vec!["<call>".to_owned()], is_strict: true };
    let calls = match asked {
        Asked::Nothing | Asked::Form => CallBinding::Free,
        Asked::Calls | Asked::Either => allowed(),
        Asked::Required => {
            let mut grammar = gbnf(REQUIRED);
            assert_eq!(grammar.accept_text(prefix.as_bytes()), Ok(true));
            CallBinding::Required(grammar)
        }
    };
    let constraint = matches!(asked, Asked::Form | Asked::Either).then(|| gbnf(FORM));
    Binding::of_answer(AnswerBinding {
        form: &serde_json::from_value(form).unwrap(),
        texts: &texts(),
        thinking_budget: budget,
        closing: &Closing { text: "</think>\n\n".to_owned(), tokens: vec![token("</think>\n\n")] },
        lead: &Lead::default(),
        constraint,
        calls,
    })
    .unwrap()
}

/// Whether a text may begin like this, by what it is as a whole: written without the machine, and for no other grammars.
fn may_begin(asked: Asked, prefix: &str, text: &str) -> bool {
    let free = matches!(asked, Asked::Nothing | Asked::Calls);
    let may_think = !prefix.contains("</think>");
    let begun = if free { text.trim_ascii_start() } else { text };
    let thought = match prefix.ends_with("<think>") {
        true => Some(text),
        false => begun.strip_prefix("<think>").filter(|_| may_think),
    };
    let said = match thought.map(|thought| thought.split_once("</think>")) {
        Some(None) => return true,
        Some(Some((_, after))) => after,
        None if !free && may_think && "<think>".starts_with(text) => return true,
        None => text,
    };
    let is_letters = |text: &str| text.bytes().all(|byte| byte == b'a' || byte == b'b');
    let calls = |mut text: &str| {
        loop {
            if "<call>{".starts_with(text) {
                return true;
            }
            let Some(rest) = text.strip_prefix("<call>{") else { return false };
            let Some((letters, after)) = rest.split_once('}') else { return is_letters(rest) };
            if !is_letters(letters) {
                return false;
            }
            text = after;
        }
    };
    let form = |text: &str| {
        let Some(rest) = text.strip_prefix('{') else { return text.is_empty() };
        match rest.split_once('}') {
            None => is_letters(rest),
            Some((letters, after)) => is_letters(letters) && !letters.is_empty() && after.is_empty(),
        }
    };
    let after_white = if thought.is_some() { said.trim_ascii_start() } else { said };
    match asked {
        Asked::Nothing => true,
        Asked::Calls => said.find("<call>").is_none_or(|at| calls(&said[at..])),
        Asked::Form => form(after_white),
        Asked::Either => form(after_white) || calls(after_white),
        Asked::Required => calls(said.trim_start_matches('\n')) || (thought.is_none() && calls(said)),
    }
}

fn asked() -> impl Strategy<Value = Asked> {
    prop::sample::select(vec![Asked::Nothing, Asked::Calls, Asked::Form, Asked::Either, Asked::Required])
}

/// The tokens that a row leaves.
fn left(binding: &mut Binding) -> Vec<Token> {
    let (row, mut out) = ([1.0; PIECES.len()], Vec::new());
    binding.apply(&row, &mut out).unwrap();
    (0..).zip(out).filter(|(_, logit)| logit.is_finite()).map(|(token, _)| token).collect()
}

/// Found by the property below.
#[test]
fn a_token_that_begins_a_thought_and_holds_what_a_call_begins_with_begins_no_call() {
    let mut binding = binding(Asked::Calls, "<start>", Some(1000)).unwrap();
    for piece in ["<th", "ink>a<call>", "</think>\n\n"] {
        assert_eq!(binding.allows(token(piece)), Ok(true), "{piece}");
        binding.accept(token(piece)).unwrap();
    }
    assert_eq!(binding.allows(token("a")), Ok(true));
    binding.accept(token("<call>")).unwrap();
    assert_eq!((binding.allows(token("x")), binding.allows(token("{"))), (Ok(false), Ok(true)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn what_may_come_is_what_the_text_says(
        asked in asked(),
        prefix in prop::sample::select(vec!["<start>", "<start><think>", "<start><think></think>"]),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 1..24),
    ) {
        let Some(mut binding) = binding(asked, prefix, Some(1000)) else { return Ok(()) };
        let mut text = String::new();
        let mut white = 0;
        for choice in choices {
            let allowed: Vec<Token> = (0..26).filter(|&token| binding.allows(token).unwrap()).collect();
            prop_assert_eq!(&left(&mut binding), &allowed, "after {:?}", text);
            for token in 1..26 {
                let piece = PIECES[token as usize];
                let may = may_begin(asked, prefix, &format!("{text}{piece}"));
                let is_allowed = allowed.contains(&token);
                // A token that ends a thought and begins a form in one is not among those that a form is followed by.
                prop_assert!(!is_allowed || may, "{:?} after {:?}", piece, text);
                let spans = piece.contains('>') && piece.len() > piece.find('>').unwrap() + 1;
                let is_white = piece.trim_ascii().is_empty();
                prop_assert!(is_allowed || !may || spans || is_white || piece == "<", "{:?} should come after {:?}", piece, text);
                let accepted = binding.clone().accept(token);
                prop_assert!(!is_allowed || accepted.is_ok(), "{:?} after {:?}: {:?}", piece, text, accepted);
            }
            if binding.is_free() {
                let is_whole = !matches!(asked, Asked::Nothing | Asked::Calls);
                prop_assert_eq!(allowed.contains(&END), !is_whole);
            }
            let going: Vec<Token> = allowed.into_iter().filter(|token| *token != END).collect();
            let Some(&next) = (!going.is_empty()).then(|| choice.get(&going)) else { break };
            let piece = PIECES[next as usize];
            white += usize::from(piece.trim_ascii().is_empty());
            // Past so much white space none may follow, which the plain look does not know.
            if white > 6 {
                break;
            }
            binding.accept(next).unwrap();
            text.push_str(piece);
        }
    }

    #[test]
    fn a_thought_has_as_many_tokens_as_it_may_and_is_ended(
        asked in asked(),
        budget in 0_u32..6,
        opens in any::<bool>(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let prefix = if opens { "<start><think>" } else { "<start>" };
        let mut binding = binding(asked, prefix, Some(budget)).unwrap();
        if !opens {
            binding.accept(token("<think>")).unwrap();
        }
        for (thought, choice) in (0..).zip(choices) {
            if let Some(forced) = binding.forced() {
                prop_assert_eq!((forced, thought), (token("</think>\n\n"), budget));
                binding.accept(forced).unwrap();
                prop_assert_eq!(binding.forced(), None);
                prop_assert!(!binding.is_thinking());
                // The answer goes on as it must.
                prop_assert_eq!(left(&mut binding).contains(&token("x")), matches!(asked, Asked::Nothing | Asked::Calls));
                return Ok(());
            }
            let allowed = left(&mut binding);
            let thinking: Vec<Token> = allowed.into_iter().filter(|&token| {
                let ends = binding.thought.as_ref().unwrap().ended_by(PIECES[token as usize].as_bytes());
                token != END && ends.is_none()
            }).collect();
            binding.accept(*choice.get(&thinking)).unwrap();
        }
        prop_assert!(false, "nothing ended it");
    }
}

#[test]
#[ignore = "a measurement"]
#[allow(clippy::print_stdout)]
fn what_a_token_costs_where_nothing_is_bound() {
    const TOKENS: u32 = 200_000;
    for (what, asked, prefix) in
        [("a call is awaited", Asked::Calls, "<start></think>"), ("it thinks", Asked::Form, "<start><think>")]
    {
        let mut binding = binding(asked, prefix, Some(u32::MAX)).unwrap();
        let begun = std::time::Instant::now();
        for i in 0..TOKENS {
            let token = [token("x"), token("a"), token(" "), token("<")][i as usize % 4];
            assert!(binding.allows(token).unwrap() && binding.is_free());
            binding.accept(token).unwrap();
        }
        let nanos = begun.elapsed().as_nanos() / u128::from(TOKENS);
        println!("{what}: {nanos} ns a token");
    }
}

fn after(asked: Asked, prefix: &str, pieces: &[&str]) -> Binding {
    let mut binding = binding(asked, prefix, None).unwrap();
    for piece in pieces {
        assert!(binding.allows(token(piece)).unwrap(), "{piece:?} of {pieces:?}");
        binding.accept(token(piece)).unwrap();
    }
    binding
}

#[test]
fn a_token_that_begins_a_call_and_goes_on_with_it_goes_on_as_it_must() {
    let mut begun = after(Asked::Calls, "<start>", &["x", "<ca"]);
    assert!(begun.is_free());
    let may_come = left(&mut begun);
    for (piece, may) in [("ll>", true), ("ll>{", true), ("ll>x", false), ("x", true)] {
        assert_eq!(may_come.contains(&token(piece)), may, "{piece}");
    }
    begun.accept(token("ll>{")).unwrap();
    assert!(!begun.is_free() && !begun.is_complete());
    assert_eq!(left(&mut begun), ["a", "b", "}"].map(token));
    begun.accept(token("}")).unwrap();
    assert!(begun.is_complete() && begun.allows(END).unwrap());
}

#[test]
fn a_call_in_a_thought_is_none() {
    let mut thinking = after(Asked::Calls, "<start><think>", &["<call>", "x", "<call>"]);
    assert!(thinking.is_free());
    thinking.accept(token("</think>")).unwrap();
    assert!(thinking.is_free() && thinking.allows(token("x")).unwrap());
    thinking.accept(token("<call>")).unwrap();
    assert_eq!(left(&mut thinking), ["{", "{a}"].map(token));
    // One that the token brings which ends the thought.
    let mut at_once = after(Asked::Calls, "<start><think>", &["x", "</th", "ink>a<call>"]);
    assert_eq!(left(&mut at_once), ["{", "{a}"].map(token));
}

#[test]
fn what_must_not_be_bound_is_given_up_where_that_fails() {
    let calls = |is_strict| CallBinding::Allowed {
        grammar: gbnf("root ::= \"<call>y\""),
        triggers: vec!["<call>".to_owned()],
        is_strict,
    };
    let bound = |is_strict| {
        let form = json!({"format": 0, "parser": "", "prefix": "", "markup": [], "grammar": "", "lazy": true, "triggers": [], "thought": null});
        let asked = AnswerBinding {
            form: &serde_json::from_value(form).unwrap(),
            texts: &texts(),
            thinking_budget: None,
            closing: &Closing::default(),
            lead: &Lead::default(),
            constraint: None,
            calls: calls(is_strict),
        };
        let mut binding = Binding::of_answer(asked).unwrap().unwrap();
        binding.accept(token("<call>")).unwrap();
        binding
    };
    // No token of this vocabulary is a y.
    for is_strict in [false, true] {
        let mut binding = bound(is_strict);
        assert_eq!(left(&mut binding), [0; 0]);
        assert_eq!(binding.give_up(), !is_strict);
        assert_eq!(left(&mut binding).len(), if is_strict { 0 } else { PIECES.len() });
    }
    let mut wrong = bound(false);
    wrong.accept(token("x")).unwrap();
    assert!(wrong.is_free() && wrong.allows(token("x")).unwrap());
    assert!(bound(true).accept(token("x")).is_err());
}

#[test]
fn white_space_before_an_answer_is_its_own_where_its_form_may_begin_with_some() {
    let form = json!({
        "format": 0, "parser": "", "prefix": "<think>", "markup": [], "grammar": "", "lazy": false, "triggers": [],
        "thought": {"begin": "<think>", "ends": ["</think>"], "closing": "</think>"},
    });
    for (grammar, may_be_apart) in [(FORM, true), ("root ::= \" \"? \"a\"", false)] {
        let asked = AnswerBinding {
            form: &serde_json::from_value(form.clone()).unwrap(),
            texts: &texts(),
            thinking_budget: None,
            closing: &Closing::default(),
            lead: &Lead::default(),
            constraint: Some(gbnf(grammar)),
            calls: CallBinding::Free,
        };
        let mut binding = Binding::of_answer(asked).unwrap().unwrap();
        assert_eq!(binding.may_be_apart(), may_be_apart, "{grammar}");
        binding.accept(token("</think>")).unwrap();
        assert_eq!(binding.allows(token("\n")), Ok(may_be_apart), "{grammar}");
    }
}

#[test]
fn a_schema_is_followed_from_where_the_thought_ends() {
    let schema = params::Constraint::JsonSchema {
        schema: r#"{"type":"object","additionalProperties":false}"#.to_owned(),
        strict: true,
    };
    let form = json!({
        "format": 0, "parser": "", "prefix": "<think>", "markup": [], "grammar": "", "lazy": false, "triggers": [],
        "thought": {"begin": "<think>", "ends": ["</think>"], "closing": "</think>"},
    });
    let asked = AnswerBinding {
        form: &serde_json::from_value(form).unwrap(),
        texts: &texts(),
        thinking_budget: None,
        closing: &Closing::default(),
        lead: &Lead::default(),
        constraint: Some(compiled(&schema)),
        calls: CallBinding::Free,
    };
    let mut binding = Binding::of_answer(asked).unwrap().unwrap();
    for piece in ["x", "{", "</th"] {
        binding.accept(token(piece)).unwrap();
    }
    // What follows the thought in one token cannot be followed.
    assert!(!binding.allows(token("ink>{")).unwrap() && !left(&mut binding).contains(&token("ink>{")));
    binding.accept(token("ink>\n")).unwrap();
    let white = [" ", "\n"].map(token);
    assert!(left(&mut binding).contains(&token("{")) && white.iter().all(|token| left(&mut binding).contains(token)));
    // The line break that came with the thought's end is one of them.
    for _ in 1..crate::grammars::limits::MAX_WHITE_SPACE_TOKENS {
        assert!(binding.allows(token("\n")).unwrap());
        binding.accept(token("\n")).unwrap();
    }
    assert_eq!(left(&mut binding), [token("{")]);
    binding.accept(token("{")).unwrap();
    binding.accept(token("}")).unwrap();
    assert!(binding.is_complete());
}

#[test]
fn a_form_and_a_call_stand_behind_what_the_template_writes_before_them() {
    let form = json!({
        "format": 0, "parser": "", "prefix": "", "markup": [], "grammar": "", "lazy": true, "triggers": [],
        "thought": {"begin": "<think>", "ends": ["</think>"], "closing": "</think>"},
    });
    let bound = || {
        let asked = AnswerBinding {
            form: &serde_json::from_value(form.clone()).unwrap(),
            texts: &texts(),
            thinking_budget: None,
            closing: &Closing::default(),
            lead: &Lead { at_once: "ab".to_owned(), after_thought: "xab".to_owned() },
            constraint: Some(gbnf(FORM)),
            calls: CallBinding::Allowed { grammar: gbnf(CALLS), triggers: Vec::new(), is_strict: false },
        };
        Binding::of_answer(asked).unwrap().unwrap()
    };
    let check = |binding: &mut Binding, may: &[&str], may_not: &[&str]| {
        may.iter().for_each(|piece| assert_eq!(binding.allows(token(piece)), Ok(true), "{piece}"));
        may_not.iter().for_each(|piece| assert_eq!(binding.allows(token(piece)), Ok(false), "{piece}"));
        let left = left(binding);
        may.iter().for_each(|piece| assert!(left.contains(&token(piece)), "{piece}"));
        may_not.iter().for_each(|piece| assert!(!left.contains(&token(piece)), "{piece}"));
    };
    let mut at_once = bound();
    check(&mut at_once, &["a", "<call>", "<think>"], &["b", "x", "{"]);
    ["a", "b"].iter().for_each(|piece| at_once.accept(token(piece)).unwrap());
    assert!(!at_once.is_complete());
    check(&mut at_once, &["{"], &["<call>", "<think>", "a"]);
    let mut thought = bound();
    ["<think>", "{", "</think>"].iter().for_each(|piece| thought.accept(token(piece)).unwrap());
    check(&mut thought, &["x"], &["a", "<call>", "{", "\n"]);
    thought.accept(token("x")).unwrap();
    check(&mut thought, &["a", "<call>"], &["x", "{"]);
}

#[test]
fn a_whole_answer_that_cannot_be_followed_goes_on_free_unless_that_was_forbidden() {
    let form = json!({"format": 0, "parser": "", "prefix": "", "markup": [], "grammar": "", "lazy": true, "triggers": [], "thought": null});
    for is_strict in [false, true] {
        let asked = AnswerBinding {
            form: &serde_json::from_value(form.clone()).unwrap(),
            texts: &texts(),
            thinking_budget: None,
            closing: &Closing::default(),
            lead: &Lead::default(),
            constraint: None,
            // No token of this vocabulary is a y.
            calls: CallBinding::Whole { grammar: gbnf("root ::= \"a\" \"y\""), is_strict },
        };
        let mut binding = Binding::of_answer(asked).unwrap().unwrap();
        assert_eq!(left(&mut binding), [token("a")]);
        binding.accept(token("a")).unwrap();
        assert_eq!(binding.give_up(), !is_strict);
        assert_eq!(left(&mut binding).len(), if is_strict { 0 } else { PIECES.len() });
        assert_eq!(binding.accept(token("x")).is_err(), is_strict);
    }
}
