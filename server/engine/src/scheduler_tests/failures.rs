//! What becomes of requests when a batch, the backend or who listens fails.

use super::*;

#[test]
fn a_batch_that_fails_once_harms_nobody() {
    for (unified, reusable) in [(false, true), (true, true), (false, false)] {
        let mut setup = if unified { Setup::unified(3, 2, 400, 16) } else { Setup::split(3, 64, 16, 4) };
        setup.limits.reusable = reusable;
        let mut h = Harness::of(&setup);
        for requests in [3, 1] {
            let hit: Vec<Submitted> = (3..3 + requests).map(|i| h.submit(vec![i; 4], greedy(20)).unwrap()).collect();
            h.scheduler.step();
            h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
            assert_eq!(h.scheduler.step(), StepOutcome::Failed);
            h.scheduler.assert_books();
            h.run();
            hit.iter().for_each(|request| request.check(setup.limits.positions));
            h.assert_empty();
        }
        assert_eq!(h.scheduler.probe(), Ok(()));
        h.assert_empty();
    }
}

/// Greedy answers in which this token is not generated.
fn without(token: Token) -> GenerationParams {
    GenerationParams { logit_bias: vec![(token, -1e3)], ..greedy(20) }
}

#[test]
fn a_request_that_gives_no_numbers_fails_alone_and_leaves_nothing_behind() {
    const SPOILS: Token = 47;
    for (unified, reusable) in [(false, true), (true, true), (false, false)] {
        let mut setup = if unified { Setup::unified(4, 2, 400, 16) } else { Setup::split(4, 128, 16, 12) };
        setup.limits.reusable = reusable;
        let mut h = Harness::of(&setup);
        *h.scheduler.backend().control.spoils.lock().unwrap() = Some(SPOILS);
        // More often than a backend may fail in a row.
        for _ in 0..5 {
            // Two of them, in prompts that take several steps, among others that are read and generate meanwhile.
            let prompt = |i: Token| [vec![3 + i; 20], vec![if i < 2 { SPOILS } else { 9 }], vec![5; 20]].concat();
            let requests: Vec<_> = (0..6).rev().map(|i| h.submit(prompt(i), without(SPOILS)).unwrap()).collect();
            h.run();
            for request in &requests[4..] {
                let RequestError::Internal(reason) = request.error() else { panic!("{:?}", request.error()) };
                assert!(reason.contains("not finite"), "{reason}");
            }
            requests[..4].iter().for_each(|request| request.check(setup.limits.positions));
            h.assert_empty();
            assert_eq!(h.scheduler.probe(), Ok(()), "the engine is not broken");
        }
    }
}

#[test]
fn rows_without_a_number_harm_nobody_once_and_break_a_backend_that_gives_no_others() {
    let mut h = Harness::new(3, 64, 16, 4);
    let requests: Vec<Submitted> = (3..6).map(|i| h.submit(vec![i; 4], greedy(20)).unwrap()).collect();
    h.scheduler.step();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Lost);
    assert_eq!(h.scheduler.step(), StepOutcome::Failed);
    h.run();
    requests.iter().for_each(|request| request.check(64));
    h.assert_empty();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Lost);
    assert!(matches!(h.scheduler.probe(), Err(ProbeError::Broken(reason)) if reason.contains("not finite")));
    let request = h.submit(vec![3; 4], greedy(20)).unwrap();
    // The request, the request by itself, and a token of nobody's.
    h.scheduler.backend().control.faults.lock().unwrap().extend([Fault::Lost; 3]);
    h.run();
    assert!(matches!(request.error(), RequestError::Broken(reason) if reason.contains("not finite")));
    h.assert_empty();
}

#[test]
fn a_backend_that_only_decodes_one_at_a_time_is_broken() {
    let mut h = Harness::new(2, 64, 16, 4);
    let ends = GenerationParams { ignore_eos: true, ..greedy(20) };
    let requests: Vec<Submitted> = (3..5).map(|i| h.submit(vec![i; 4], ends.clone()).unwrap()).collect();
    let round = [Fault::Fail, Fault::None, Fault::None];
    h.scheduler.backend().control.faults.lock().unwrap().extend([round; 3].concat());
    h.run();
    for request in &requests {
        assert!(matches!(request.error(), RequestError::Broken(_)));
    }
    h.assert_empty();
}

#[test]
fn those_that_cannot_be_decoded_fail_alone_however_many_they_are() {
    let mut h = Harness::new(6, 64, 40, 4);
    *h.scheduler.backend().control.poison.lock().unwrap() = Some(47);
    let prompt = |i: Token| if i < 4 { vec![47, i] } else { vec![i; 4] };
    let requests: Vec<Submitted> = (0..8).map(|i| h.submit(prompt(i), greedy(20)).unwrap()).collect();
    h.run();
    for request in &requests[..4] {
        assert!(matches!(request.error(), RequestError::Internal(_)));
    }
    requests[4..].iter().for_each(|request| request.check(64));
    h.assert_empty();
    assert_eq!(h.scheduler.probe(), Ok(()), "the engine is not broken");
    h.assert_empty();
}

#[test]
fn whom_a_dead_backend_leaves_behind_may_all_be_served_elsewhere() {
    for sequences in [1, 3] {
        let mut h = Harness::new(sequences, 64, 32, 8);
        let requests: Vec<_> = (0..5).map(|i| h.submit(vec![3 + i; 4], greedy(20)).unwrap()).collect();
        // A batch, the first of it by itself, and a token of nobody's.
        h.scheduler.backend().control.faults.lock().unwrap().extend([Fault::Fail; 3]);
        h.run();
        for request in &requests {
            assert!(matches!(request.error(), RequestError::Broken(_)));
        }
        assert!(h.scheduler.probe().is_err());
        let late = h.submit(vec![3; 4], greedy(5)).unwrap();
        assert!(matches!(late.error(), RequestError::Broken(_)));
        h.assert_empty();
    }
}

#[test]
fn who_fails_again_at_the_same_place_ends_wherever_that_is() {
    for (requests, reusable) in [(1, true), (1, false), (3, true), (3, false)] {
        // A step has room for less than has to be computed again where a state cannot be cut.
        let mut setup = Setup::split(3, 200, 16, 4);
        setup.limits.reusable = reusable;
        let mut h = Harness::of(&setup);
        *h.scheduler.backend().control.last_position.lock().unwrap() = Some(60);
        let endless = GenerationParams { ignore_eos: true, ..greedy(100) };
        let fails = h.submit(vec![3; 45], endless).unwrap();
        let others: Vec<Submitted> = (1..requests).map(|i| h.submit(vec![3 + i; 4], greedy(40)).unwrap()).collect();
        h.run();
        assert!(matches!(fails.error(), RequestError::Internal(_)));
        others.iter().for_each(|request| request.check(200));
        h.assert_empty();
        assert_eq!(h.scheduler.probe(), Ok(()), "the engine is not broken");
    }
}

#[test]
fn who_is_asked_about_when_the_backend_panics_is_not_lost() {
    let mut h = Harness::new(1, 64, 8, 8);
    let request = h.submit(vec![3; 4], greedy(20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().extend([Fault::Fail, Fault::Fail, Fault::Panic]);
    assert_eq!(h.scheduler.step(), StepOutcome::Failed);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| h.scheduler.step())).is_err());
    h.scheduler.break_down(String::from("it panicked"));
    assert!(matches!(request.error(), RequestError::Broken(_)));
}

#[test]
fn a_sink_that_panics_ends_its_own_request() {
    let mut h = Harness::new(2, 64, 8, 0);
    let permit = Permit::take(&h.stats, h.limit).unwrap();
    let sink = Box::new(|_| panic!("scripted"));
    let signals = Arc::new(Signals::default());
    let emitter = Emitter::new(sink, h.stats.clone(), permit, signals.clone());
    h.enqueue(0, vec![1; 4], greedy(50), emitter, signals);
    let other = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.run();
    other.check(64);
    h.assert_empty();
}

#[test]
fn a_step_that_has_just_ended_shows_that_a_token_can_be_decoded() {
    let mut h = Harness::new(1, 64, 16, 4);
    let request = h.submit(vec![3; 4], GenerationParams { ignore_eos: true, ..greedy(20) }).unwrap();
    assert!(!h.scheduler.has_just_decoded());
    h.scheduler.step();
    assert!(h.scheduler.has_just_decoded());
    h.scheduler.break_down(String::from("it is"));
    assert!(!h.scheduler.has_just_decoded());
    assert!(matches!(request.error(), RequestError::Broken(_)));
}

#[test]
fn each_token_but_the_end_has_its_probabilities() {
    let mut h = Harness::new(1, 400, 16, 4);
    let mut ends = [0, 0];
    for token in 3..23 {
        let params = GenerationParams { logprobs: Some(1), ..greedy(20) };
        let request = h.submit(vec![token; 4], params).unwrap();
        h.run();
        let told = |event: &GenerationEvent| match event {
            GenerationEvent::Text { logprobs, .. } => logprobs.len(),
            _ => 0,
        };
        let told: usize = request.events.lock().unwrap().iter().map(told).sum();
        let GenerationEvent::Finished { reason, usage, .. } = request.last() else { panic!("{:?}", request.last()) };
        let has_end = usize::from(reason == FinishReason::Stop);
        assert_eq!(told + has_end, usage.completion_tokens as usize, "{reason:?}");
        ends[has_end] += 1;
    }
    assert!(ends.iter().all(|&times| times > 0), "{ends:?}");
}
