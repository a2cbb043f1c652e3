//! What is measured of steps while there is nothing else to do, and that it is in nobody's way.

use super::*;
use crate::interrupt::Interrupt;

/// Measures so many batches at most.
fn measure(h: &mut Harness, batches: u32) -> u32 {
    let interrupt = Interrupt::default();
    let mut done = 0;
    while done < batches && h.scheduler.may_measure() {
        h.scheduler.measure(&interrupt);
        h.scheduler.assert_books();
        done += 1;
    }
    done
}

/// Decodes, and tokens in them, of all that is measured.
fn decodes(setup: &Setup) -> (u64, u64) {
    let mut h = Harness::of(setup);
    h.scheduler.measures_anew();
    assert!(h.stats.snapshot().measures);
    assert!(measure(&mut h, 1_000) < 1_000);
    assert!(!h.stats.snapshot().measures);
    assert_eq!(h.scheduler.backend().cells(), 0);
    h.assert_empty();
    (h.scheduler.backend().decodes, h.scheduler.backend().decoded_tokens)
}

/// Without groups of rows.
fn setup(positions: u32) -> Setup {
    let mut setup = Setup::split(4, positions, 64, 64);
    setup.limits.group_rows = 1;
    setup
}

#[test]
fn a_load_decodes_a_token_a_text_and_one_at_the_last_position() {
    let mut h = Harness::of(&Setup { draft_wrong_every: Some(0), ..Setup::split(4, 1_000, 64, 64) });
    assert_eq!(h.scheduler.warm_up(&[5; 40]), Ok(()));
    assert_eq!((h.scheduler.backend().decodes, h.scheduler.backend().decoded_tokens), (3, 1 + 32 + 1));
    assert_eq!(h.scheduler.draft().unwrap().backend().decoded_tokens, 1);
    assert!(h.scheduler.may_measure());
    h.assert_empty();

    let mut h = Harness::of(&Setup::split(4, 1_000, 64, 64));
    *h.scheduler.backend().control.last_position.lock().unwrap() = Some(999);
    assert!(h.scheduler.warm_up(&[5]).is_err());
    h.assert_empty();
}

#[test]
fn it_reads_deep_where_there_is_room_and_leaves_nothing() {
    // One row, sixteen and a few tokens near, three times each; a prompt is read 64 tokens at a time, and behind as many as have
    // no more than 512 come a few more, three times.
    for (positions, batches) in [(100, 1), (1_000, 8)] {
        assert_eq!(decodes(&setup(positions)), (9 + batches + 3, 3 * (1 + 16 + 16) + batches * 64 + 3 * 16));
    }
    let mut whole = setup(1_000);
    whole.limits.reusable = false;
    assert_eq!(decodes(&whole).0, 9 + 1, "a state that cannot be cut has nobody behind it");
}

#[test]
fn it_measures_no_more_rows_than_there_can_be() {
    let rows = |parallel: u32, sequences: u32, outputs: u32, group_rows: u32, reusable: bool| {
        let mut setup = Setup::split(sequences, 64, 64, 4);
        setup.parallel = parallel;
        setup.limits = BackendLimits { outputs, group_rows, reusable, ..setup.limits };
        let all = decodes(&setup);
        setup.limits.group_rows = 1;
        let but_groups = decodes(&setup);
        (all.0 - but_groups.0, all.1 - but_groups.1)
    };
    // Three rounds of 2 to 8 rows, and of 2 to 4.
    assert_eq!(rows(8, 8, 64, 4, true), (3 * 7, 3 * 35));
    for (parallel, sequences, outputs) in [(4, 8, 64), (3, 5, 64), (8, 8, 4), (4, 4, 64)] {
        let (decodes, tokens) = rows(parallel, sequences, outputs, 4, true);
        let most = 8.min(sequences).min(outputs).min(parallel.next_multiple_of(4));
        assert_eq!((decodes, tokens), ((3 * (most - 1)).into(), (3 * (most * (most + 1) / 2 - 1)).into()));
    }
    for (parallel, sequences, outputs, group_rows, reusable) in
        [(1, 8, 64, 4, true), (3, 3, 64, 4, true), (8, 8, 3, 4, true), (8, 8, 64, 1, true), (8, 8, 64, 4, false)]
    {
        assert_eq!(rows(parallel, sequences, outputs, group_rows, reusable), (0, 0));
    }
}

#[test]
fn who_comes_meanwhile_is_served_and_what_was_left_over_stays() {
    for unified in [false, true] {
        let mut setup = if unified { Setup::unified(4, 4, 1_200, 64) } else { setup(1_000) };
        setup.reuse = true;
        let mut h = Harness::of(&setup);
        h.scheduler.measures_anew();
        let (mut asked, mut batches) = (Vec::new(), 0);
        loop {
            let measured = measure(&mut h, 3);
            batches += measured;
            if measured == 0 {
                break;
            }
            let prompt = vec![1 + i32::try_from(asked.len() % 40).unwrap(); 40];
            asked.push(h.submit(prompt, GenerationParams::greedy(4)).unwrap());
            assert!(!h.scheduler.may_measure());
            h.run();
        }
        assert!(asked.len() > 5 && batches < 100, "{batches} batches around {} requests", asked.len());
        asked.iter().for_each(|request| request.check(setup.limits.positions));
        let kept = h.stats.snapshot().cached_device_tokens_total;
        let last = vec![1 + i32::try_from((asked.len() - 1) % 40).unwrap(); 40];
        let again = h.submit(last, GenerationParams::greedy(4)).unwrap();
        h.run();
        again.check(setup.limits.positions);
        assert!(h.stats.snapshot().cached_device_tokens_total >= kept + 39);
        h.assert_empty();
    }
}

#[test]
fn one_that_fails_ends_it_and_no_request() {
    let mut h = Harness::of(&setup(1_000));
    h.scheduler.measures_anew();
    measure(&mut h, 11);
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::FailLate);
    measure(&mut h, 1);
    assert!(!h.scheduler.may_measure() && !h.stats.snapshot().measures);
    let request = h.submit(vec![7; 20], GenerationParams::greedy(5)).unwrap();
    h.run();
    request.check(1_000);
    h.assert_empty();
}
