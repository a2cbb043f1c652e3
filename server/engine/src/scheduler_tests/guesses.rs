//! Guesses save steps and change nothing, whoever makes them.

use gantry_llama::Lead;
use serde_json::json;

use super::*;
use crate::backend::Closing;
use crate::binding::{AnswerBinding, CallBinding};
use crate::params::Constraint;

#[test]
fn guesses_save_steps_and_change_nothing() {
    let run = |lookup_tokens, logprobs, group_rows| {
        let mut setup = Setup { lookup_tokens, ..Setup::unified(2, 2, 4_000, 64) };
        setup.limits.group_rows = group_rows;
        let mut h = Harness::of(&setup);
        h.scheduler.backend().repeat_after(1);
        let params = GenerationParams { ignore_eos: true, logprobs, ..greedy(600) };
        let request = h.submit(vec![5; 20], params).unwrap();
        while h.scheduler.has_work() {
            // What this model takes says nothing: rows are cheap beside the weights.
            h.scheduler.cost_is(CPU);
            h.scheduler.step();
            h.scheduler.assert_books();
        }
        let GenerationEvent::Finished { usage, .. } = request.last() else { panic!() };
        assert_eq!(usage.completion_tokens, 600);
        h.assert_empty();
        (h.stats.snapshot(), request.text())
    };
    // Sampled on the engine's thread, and in the pool.
    for (logprobs, group_rows) in [(None, 1), (Some(2), 1), (None, 4)] {
        let (plain, expected) = run(None, logprobs, group_rows);
        let (guessed, text) = run(Some(8), logprobs, group_rows);
        assert_eq!(text, expected);
        assert_eq!((plain.steps, plain.lookup_tokens_total), (600, 0));
        // Each guess that was right saves a step, and once the text runs in a circle of at most 47 tokens all are.
        assert_eq!(guessed.steps + guessed.accepted_lookup_tokens_total, plain.steps);
        assert_eq!(guessed.accepted_lookup_tokens_total, guessed.lookup_tokens_total);
        assert!(guessed.steps < 48 + 2 * (600 - 48) / 9, "{guessed:?}");
        // Of eight guesses beside one row seven are made where rows come in fours.
        let most = if group_rows == 1 { 8 } else { 7 };
        assert!(guessed.accepted_lookup_tokens_total <= most * guessed.steps, "{guessed:?}");
    }
}

/// One answer of 400 tokens with guesses of a draft model, on machines that cost so much.
fn with_draft(draft_wrong_every: Option<usize>, draft_cost: StepCost) -> (EngineStats, String) {
    let mut setup = Setup { draft_wrong_every, ..Setup::unified(2, 2, 4_000, 64) };
    setup.limits.group_rows = 1;
    let mut h = Harness::of(&setup);
    let request = h.submit(vec![5; 20], GenerationParams { ignore_eos: true, ..greedy(400) }).unwrap();
    while h.scheduler.has_work() {
        h.scheduler.cost_is(CPU);
        if let Some(draft) = h.scheduler.draft() {
            draft.cost_is(draft_cost);
        }
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    request.check(4_000);
    h.assert_empty();
    (h.stats.snapshot(), request.text())
}

#[test]
fn guesses_of_a_draft_model_save_steps_and_change_nothing() {
    let (plain, expected) = with_draft(None, SMALL);
    assert_eq!((plain.steps, plain.draft_tokens_total), (400, 0));
    let (always_right, text) = with_draft(Some(0), SMALL);
    assert_eq!(text, expected);
    assert_eq!(always_right.steps + always_right.accepted_draft_tokens_total, plain.steps);
    // It may guess the end, which is not allowed here.
    assert!(always_right.accepted_draft_tokens_total * 10 > always_right.draft_tokens_total * 9, "{always_right:?}");
    assert!(always_right.steps < 80, "six guesses a step: {always_right:?}");
    let (often_right, text) = with_draft(Some(5), SMALL);
    assert_eq!(text, expected);
    assert_eq!(often_right.steps + often_right.accepted_draft_tokens_total, plain.steps);
    assert!((80..200).contains(&often_right.steps), "{often_right:?}");
    assert_eq!(often_right.lookup_tokens_total, 0);
}

#[test]
fn one_guess_is_not_worth_a_pass_over_the_weights() {
    // Beside the rows of others it is one in a split cache, and one more row in a pool.
    let guessed = |unified: bool, streams: Token| {
        let lookup_tokens = Some(1);
        let mut setup = Setup { lookup_tokens, reuse: true, ..Setup::split(2, 400, 64, 64) };
        if unified {
            setup = Setup { lookup_tokens, ..Setup::unified(2, 2, 800, 64) };
            setup.limits.positions = 400;
        }
        setup.limits.group_rows = 1;
        let mut h = Harness::of(&setup);
        h.scheduler.backend().repeat_after(1);
        let params = GenerationParams { ignore_eos: true, ..greedy(200) };
        let _requests: Vec<Submitted> =
            (5..).take(streams as usize).map(|i| h.submit(vec![i; 20], params.clone()).unwrap()).collect();
        // Until one is left alone.
        while h.stats.snapshot().requests_finished_total == 0 {
            h.scheduler.cost_is(CPU);
            h.scheduler.step();
        }
        h.stats.snapshot().lookup_tokens_total
    };
    assert!(guessed(true, 2) > 50 && guessed(true, 1) > 50 && guessed(false, 1) > 50);
    assert_eq!(guessed(false, 2), 0);
}

#[test]
fn a_draft_model_that_is_wrong_or_slow_turns_itself_off() {
    let (plain, expected) = with_draft(None, SMALL);
    let (wrong, text) = with_draft(Some(1), SMALL);
    assert_eq!(text, expected);
    assert!(wrong.draft_tokens_total < 40 && wrong.steps > plain.steps - 10, "{wrong:?}");
    let (slow, text) = with_draft(Some(0), CPU);
    assert_eq!(text, expected);
    assert_eq!((slow.steps, slow.draft_tokens_total), (plain.steps, 0));
}

#[test]
fn repetitions_come_first_and_the_draft_model_where_there_are_none() {
    let setup = Setup { lookup_tokens: Some(8), draft_wrong_every: Some(0), ..Setup::unified(2, 2, 4_000, 64) };
    let mut h = Harness::of(&setup);
    // A text that runs in a circle once an end of three tokens comes again, some hundreds of tokens later.
    h.scheduler.backend().repeat_after(3);
    if let Some(draft) = h.scheduler.draft() {
        draft.backend().repeat_after(3);
    }
    let request = h.submit(vec![5; 20], GenerationParams { ignore_eos: true, ..greedy(3_000) }).unwrap();
    while h.scheduler.has_work() {
        h.scheduler.cost_is(CPU);
        if let Some(draft) = h.scheduler.draft() {
            draft.cost_is(SMALL);
        }
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    let stats = h.stats.snapshot();
    let GenerationEvent::Finished { usage, .. } = request.last() else { panic!() };
    assert_eq!(usage.completion_tokens, 3_000);
    assert!(stats.draft_tokens_total > 0 && stats.lookup_tokens_total > 0, "{stats:?}");
    let right = stats.accepted_draft_tokens_total + stats.accepted_lookup_tokens_total;
    assert_eq!(stats.steps + right, 3_000);
    assert!(stats.steps < 1_000, "{stats:?}");
    h.assert_empty();
}

#[test]
fn a_draft_model_that_fails_is_given_up_and_nobody_notices() {
    let mut h = Harness::of(&Setup { draft_wrong_every: Some(0), ..Setup::unified(2, 2, 4_000, 64) });
    let params = GenerationParams { ignore_eos: true, ..greedy(60) };
    let requests = [3, 4].map(|token| h.submit(vec![token; 20], params.clone()).unwrap());
    for step in 0.. {
        h.scheduler.cost_is(CPU);
        let Some(draft) = h.scheduler.draft() else { break };
        draft.cost_is(SMALL);
        if step == 5 {
            draft.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
        }
        assert!(step < 10, "it was asked and failed");
        h.scheduler.step();
    }
    h.run();
    requests.iter().for_each(|request| request.check(4_000));
    h.assert_empty();
}

#[test]
fn those_that_guess_take_turns_where_not_all_can() {
    for lookup_tokens in [None, Some(DRAFT_TOKENS)] {
        let draft_wrong_every = lookup_tokens.is_none().then_some(0);
        let mut setup = Setup { lookup_tokens, draft_wrong_every, ..Setup::unified(3, 3, 4_000, 64) };
        setup.limits.outputs = 3 + DRAFT_TOKENS;
        let mut h = Harness::of(&setup);
        h.scheduler.backend().repeat_after(1);
        let params = GenerationParams { ignore_eos: true, ..greedy(300) };
        let requests = [(); 3].map(|()| h.submit(vec![5; 20], params.clone()).unwrap());
        let told = |request: &Submitted| request.events.lock().unwrap().len();
        while requests.iter().all(|request| told(request) < 250) {
            h.scheduler.cost_is(CPU);
            if let Some(draft) = h.scheduler.draft() {
                draft.cost_is(SMALL);
            }
            h.scheduler.step();
        }
        let least = requests.iter().map(told).min().unwrap();
        assert!(least > 200, "one has 250 tokens and another {least}, with lookup {lookup_tokens:?}");
        h.run();
        h.assert_empty();
    }
}

#[test]
fn guesses_of_a_batch_that_failed_are_made_anew() {
    // Rows for the guesses of one, as a draft model makes them.
    let mut setup = Setup { draft_wrong_every: Some(0), ..Setup::unified(2, 2, 4_000, 64) };
    setup.limits.outputs = 2 + DRAFT_TOKENS;
    let mut h = Harness::of(&setup);
    let params = GenerationParams { ignore_eos: true, ..greedy(200) };
    let requests = [3, 4].map(|token| h.submit(vec![token; 20], params.clone()).unwrap());
    for step in 0.. {
        if !h.scheduler.has_work() {
            break;
        }
        h.scheduler.cost_is(CPU);
        if let Some(draft) = h.scheduler.draft() {
            draft.cost_is(SMALL);
        }
        if step % 5 == 4 {
            h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
        }
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    requests.iter().for_each(|request| request.check(4_000));
    assert!(h.stats.snapshot().accepted_draft_tokens_total > 100, "{:?}", h.stats.snapshot());
    h.assert_empty();
}

/// A thought of at most 25 tokens, and calls from where one begins.
fn bound() -> Binding {
    let texts = ScriptedVocabulary.texts();
    let form = json!({
        "format": 0, "parser": "", "prefix": "fa", "markup": [], "grammar": "", "lazy": true, "triggers": [],
        "thought": {"begin": "fa", "ends": ["cab"], "closing": "cab"},
    });
    let gbnf = Constraint::Gbnf("root ::= [a-h] [a-h] (\"ce\" | \"fee\" | \"ah\")+".to_owned());
    let grammar = Grammars::default().get(texts, &gbnf, "tools").unwrap();
    let triggers = ["bd", "ca", "ge", "hf", "ab", "ed"].map(str::to_owned).to_vec();
    let asked = AnswerBinding {
        form: &serde_json::from_value(form).unwrap(),
        texts,
        thinking_budget: Some(25),
        closing: &Closing { text: "cab".to_owned(), tokens: vec![10, 8, 9] },
        lead: &Lead::default(),
        constraint: None,
        calls: CallBinding::Allowed { grammar, triggers, is_strict: true },
    };
    Binding::of_answer(asked).unwrap().unwrap()
}

#[test]
fn guesses_change_nothing_of_answers_that_are_bound_from_some_token_on() {
    let params = GenerationParams { ignore_eos: true, ..greedy(200) };
    let text_of = |tokens: &[Token]| {
        let mut bytes = Vec::new();
        tokens.iter().for_each(|&token| ScriptedVocabulary.piece(token, &mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (mut called, mut accepted) = (0, 0);
    for first in 3..23 {
        let prompt = vec![first; 20];
        let mut setup = sampler::compile(&ScriptedVocabulary, &Grammars::default(), &params).unwrap();
        setup.binding = Some(bound());
        let (mut sampler, mut answer) = (Sampler::new(&params, &prompt, setup), vec![first]);
        while answer.len() <= 200 {
            let token = sampler.sample(&logits_after(&answer[answer.len() - 1..])).unwrap().token;
            sampler.accept(token).unwrap();
            answer.push(token);
        }
        let expected = text_of(&answer[1..]);
        // Within a character it goes on to that one's end.
        let is_closed = (26..=29).any(|at| answer[at..at + 3] == [10, 8, 9]);
        assert!(is_closed || text_of(&answer[1..26]).contains("cab"), "{expected}");
        called += usize::from(!sampler.is_trivial());
        for lookup_tokens in [None, Some(8)] {
            let mut setup = Setup { lookup_tokens, ..Setup::unified(2, 2, 4_000, 64) };
            setup.limits.group_rows = 1;
            let mut h = Harness::of(&setup);
            h.binding = Some(bound());
            h.scheduler.backend().repeat_after(1);
            let request = h.submit(prompt.clone(), params.clone()).unwrap();
            while h.scheduler.has_work() {
                h.scheduler.cost_is(CPU);
                h.scheduler.step();
                h.scheduler.assert_books();
            }
            let GenerationEvent::Finished { usage, .. } = request.last() else { panic!("{:?}", request.last()) };
            assert_eq!((usage.completion_tokens, request.text()), (200, expected.clone()));
            accepted += h.stats.snapshot().accepted_lookup_tokens_total;
        }
    }
    assert!(called > 5 && accepted > 1000, "{called} answers call, and {accepted} guesses were right");
}
