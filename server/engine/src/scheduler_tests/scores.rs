//! Log-probabilities of prompts: each token's, once, whatever is kept of the prompt and whoever else is served.

use super::*;

fn scored(max_tokens: u32) -> GenerationParams {
    GenerationParams { prompt_logprobs: Some(3), ..greedy(max_tokens) }
}

#[test]
fn a_prompt_is_scored_though_all_of_it_is_kept() {
    for setup in [Setup { reuse: true, ..Setup::split(2, 200, 8, 64) }, Setup::unified(2, 2, 400, 8)] {
        let mut h = Harness::of(&setup);
        let prompt: Vec<Token> = (1..=40).collect();
        for params in [greedy(4), scored(4), scored(0), greedy(4)] {
            let request = h.submit(prompt.clone(), params.clone()).unwrap();
            h.run();
            request.check(200);
            let GenerationEvent::Finished { usage, .. } = request.last() else { panic!() };
            assert!(params.prompt_logprobs.is_none() || usage.cached_tokens == 0);
        }
        assert!(h.stats.snapshot().cached_device_tokens_total > 0, "what was scored is kept for others");
        h.assert_empty();
    }
}

#[test]
fn a_prompt_that_is_only_read_gives_nothing_and_is_kept() {
    let mut h = Harness::of(&Setup { reuse: true, ..Setup::split(2, 200, 8, 64) });
    let prompt: Vec<Token> = (1..=40).collect();
    let read = h.submit(prompt.clone(), greedy(0)).unwrap();
    let one = h.submit(vec![5], greedy(0)).unwrap();
    h.run();
    read.check(200);
    one.check(200);
    let goes_on = h.submit(prompt, greedy(4)).unwrap();
    h.run();
    goes_on.check(200);
    let GenerationEvent::Finished { usage, .. } = goes_on.last() else { panic!() };
    assert_eq!(usage.cached_tokens, 39);
    h.assert_empty();
}

#[test]
fn streams_go_on_beside_a_prompt_that_is_scored() {
    let mut h = Harness::of(&Setup::split(3, 400, 64, 64));
    h.scheduler.cost_is(CPU);
    let stream = h.submit(vec![7; 4], GenerationParams { ignore_eos: true, ..greedy(200) }).unwrap();
    h.scheduler.step();
    let scored = h.submit((0..150).map(|at| 1 + at % 40).collect(), scored(1)).unwrap();
    let mut steps = 0;
    while !scored.events.lock().unwrap().last().is_some_and(GenerationEvent::is_terminal) {
        h.scheduler.cost_is(CPU);
        let before = h.stats.snapshot().generated_tokens_total;
        h.scheduler.step();
        assert!(h.stats.snapshot().generated_tokens_total > before, "each step gives the stream its token");
        steps += 1;
    }
    assert!(steps >= 150 / h.scheduler.backend().limits().scored_rows, "so many rows a step: {steps}");
    h.run();
    stream.check(400);
    scored.check(400);
    h.assert_empty();
}
