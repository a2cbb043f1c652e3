//! Saved, restored and copied state on a real model: the same logits as without it, and no crash on any bytes.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{context, gguf, load, load_written, model, params, run, tokens};
use gantry_llama::{Batch, ChunkFault, Context, ContextParams, DecodeError, KvType, StateError};
use proptest::prelude::*;

const BLOCK: u32 = 16;

/// From a position to the end.
fn save(context: &mut Context, sequence: u32, from: u32, block: u32) -> Result<Vec<Vec<u8>>, StateError> {
    let held = context.sequence_len(sequence);
    context.save(sequence, from..held, block)
}

fn pieces(chunks: &[Vec<u8>], len: u32) -> Vec<(u32, &[u8])> {
    let block = |i: usize| BLOCK.min(len - u32::try_from(i).unwrap() * BLOCK);
    chunks.iter().enumerate().map(|(i, chunk)| (block(i), chunk.as_slice())).collect()
}

#[test]
fn restored_chunks_give_bitwise_the_same_logits_in_any_layout() {
    let prompt = tokens(1, 70);
    let kinds = [(KvType::F16, true), (KvType::F16, false), (KvType::Q8_0, true), (KvType::Q4_0, true)];
    for (kv_type, flash_attention) in kinds {
        let split = ContextParams { kv_type, flash_attention, ..params() };
        let unified = ContextParams { kv_unified: true, n_ctx: 768, sequences: 3, ..split.clone() };
        for (from, to) in [(&split, &split), (&split, &unified), (&unified, &split), (&unified, &unified)] {
            let mut source = context(from);
            // Other sequences stand in between, so that cells are not in one piece where they are shared.
            run(&mut source, 0, &tokens(2, 5));
            run(&mut source, 1, &prompt[..40]);
            run(&mut source, 2, &tokens(3, 5));
            run(&mut source, 1, &prompt[40..]);
            let chunks = save(&mut source, 1, 0, BLOCK).unwrap();
            assert_eq!(chunks.len(), 5);
            let next = run(&mut source, 1, &[77]);
            let mut target = context(to);
            assert_eq!(target.state_fingerprint(), source.state_fingerprint());
            run(&mut target, 0, &tokens(4, 20));
            assert_eq!(target.restore(2, &pieces(&chunks, 70)), Ok(70));
            assert_eq!((target.sequence_len(2), target.sequence_len(0), target.sequence_len(1)), (70, 20, 0));
            assert_eq!(run(&mut target, 2, &[77]), next, "{kv_type:?} {flash_attention}");
            // What was restored is saved as the same bytes.
            target.remove(2, 70).unwrap();
            assert_eq!(save(&mut target, 2, 0, BLOCK).unwrap(), chunks);
            assert_eq!(save(&mut target, 2, 32, BLOCK).unwrap(), chunks[2..]);
            // Of a part no more is copied than that, wherever its cells lie.
            assert_eq!(source.save(1, 16..48, BLOCK).unwrap(), chunks[1..3]);
            assert_eq!(source.save(1, 0..32, BLOCK).unwrap(), chunks[..2]);
            // A beginning goes to another sequence as it does by way of those.
            target.copy(2, 1, Some(32)).unwrap();
            assert_eq!(save(&mut target, 1, 0, BLOCK).unwrap(), chunks[..2]);
        }
    }
}

#[test]
fn chunks_of_a_short_context_are_foreign_to_a_long_one_whose_keys_are_rotated_otherwise() {
    // One sequence of so many tokens, and two of half as many.
    for (original, short, long) in [(Some(256), 256, [512, 768]), (None, 1_024, [1_280, 1_536])] {
        let model = load_written(&gguf::long_rope(original));
        let context = |n_ctx, sequences| {
            Context::new(&model, &ContextParams { n_ctx, n_batch: 64, sequences, ..ContextParams::default() }).unwrap()
        };
        let prompt: Vec<_> = (10..50).collect();
        let [mut short, mut shares] = [context(short, 1), context(2 * short, 2)];
        let [mut long, mut longer] = long.map(|n_ctx| context(n_ctx, 1));
        let logits = run(&mut short, 0, &prompt);
        assert_eq!(shares.state_fingerprint(), short.state_fingerprint());
        assert_eq!(longer.state_fingerprint(), long.state_fingerprint());
        assert_ne!(long.state_fingerprint(), short.state_fingerprint());
        assert_ne!(run(&mut long, 0, &prompt), logits);
        let chunks = save(&mut short, 0, 0, BLOCK).unwrap();
        assert_eq!(shares.restore(1, &pieces(&chunks, 40)), Ok(40));
        let foreign = StateError::Chunk { index: 0, fault: ChunkFault::Fingerprint };
        assert_eq!(longer.restore(0, &pieces(&chunks, 40)), Err(foreign));
    }
    // Where there is one kind of rotation, it is not named.
    assert!(!context(&params()).state_fingerprint().contains("rope"));
}

#[test]
fn a_prefix_is_copied_whatever_the_attention() {
    for (flash_attention, kv_unified) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut context = context(&ContextParams { flash_attention, kv_unified, ..params() });
        let (prefix, one, two) = (tokens(1, 30), tokens(5, 20), tokens(6, 20));
        run(&mut context, 0, &prefix);
        run(&mut context, 0, &one);
        context.copy(0, 1, Some(30)).unwrap();
        let copied = run(&mut context, 1, &two);
        run(&mut context, 2, &prefix);
        assert_eq!(copied, run(&mut context, 2, &two), "flash {flash_attention}, unified {kv_unified}");
    }
}

#[test]
fn chunks_of_a_common_prefix_are_equal_and_can_be_put_together() {
    let mut context = context(&params());
    let (prefix, one, two) = (tokens(1, 2 * BLOCK), tokens(5, 20), tokens(6, 20));
    run(&mut context, 0, &prefix);
    run(&mut context, 0, &one);
    run(&mut context, 1, &prefix);
    run(&mut context, 1, &two);
    let (a, b) = (save(&mut context, 0, 0, BLOCK).unwrap(), save(&mut context, 1, 0, BLOCK).unwrap());
    assert_eq!(a[..2], b[..2]);
    assert_ne!(a[2], b[2]);
    let mixed: Vec<_> = a[..2].iter().chain(&b[2..]).cloned().collect();
    assert_eq!(context.restore(2, &pieces(&mixed, 52)), Ok(52));
    assert_eq!(run(&mut context, 2, &[9]), run(&mut context, 1, &[9]));
    // A prefix alone, and nothing at all.
    assert_eq!(context.restore(3, &pieces(&a[..2], 32)), Ok(32));
    context.remove(3, 0).unwrap();
    assert_eq!(context.restore(3, &[]), Ok(0));
    assert_eq!(save(&mut context, 3, 0, BLOCK), Ok(Vec::new()));
}

#[test]
fn a_part_that_is_shared_with_other_sequences_is_saved_and_restored() {
    let mut context = context(&ContextParams { kv_unified: true, ..params() });
    run(&mut context, 0, &tokens(1, 40));
    context.copy(0, 1, Some(24)).unwrap();
    run(&mut context, 1, &tokens(7, 10));
    // Cells freed in the middle are taken again, so that cells and positions are out of order.
    context.remove(0, 8).unwrap();
    run(&mut context, 2, &tokens(8, 30));
    run(&mut context, 0, &tokens(9, 40));
    for sequence in [0, 1, 2] {
        let chunks = save(&mut context, sequence, 0, BLOCK).unwrap();
        let len = context.sequence_len(sequence);
        assert_eq!(context.restore(3, &pieces(&chunks, len)), Ok(len));
        assert_eq!(save(&mut context, 3, 0, BLOCK).unwrap(), chunks);
        let (a, b) = (run(&mut context, 3, &[50]), run(&mut context, sequence, &[50]));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.05), "sequence {sequence}");
        context.remove(3, 0).unwrap();
    }
}

#[test]
fn what_one_context_read_goes_on_in_another_behind_what_is_shared_there() {
    let mut pool = context(&ContextParams { kv_unified: true, ..params() });
    let mut beside = context(&ContextParams { sequences: 1, ..params() });
    assert_eq!(pool.state_fingerprint(), beside.state_fingerprint());
    run(&mut pool, 0, &tokens(1, 40));
    pool.copy(0, 1, Some(24)).unwrap();
    let shared = save(&mut pool, 1, 0, 24).unwrap();
    assert_eq!(beside.restore(0, &[(24, &shared[0])]), Ok(24));
    run(&mut beside, 0, &tokens(7, 31));
    let rest = save(&mut beside, 0, 24, 31).unwrap();
    assert_eq!(pool.restore_behind(1, &[(31, &rest[0])], 3), Ok(55));
    assert_eq!((pool.sequence_len(0), pool.sequence_len(1), pool.sequence_len(3)), (40, 55, 0));
    assert_eq!(run(&mut pool, 1, &[50]), run(&mut beside, 0, &[50]));
    // As many cells are enough: what is shared takes none.
    pool.remove(1, 24).unwrap();
    let most = pool.n_ctx() - 40 - 31;
    run(&mut pool, 2, &tokens(2, most));
    assert_eq!(pool.restore_behind(1, &[(31, &rest[0])], 3), Ok(55));
    pool.remove(2, 0).unwrap();
    // The other one is as it was.
    pool.remove(1, 0).unwrap();
    let mut alone = context(&params());
    run(&mut alone, 0, &tokens(1, 40));
    let (a, b) = (run(&mut pool, 0, &[9]), run(&mut alone, 0, &[9]));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.05));
}

#[test]
fn what_does_not_go_behind_a_sequence_leaves_it_as_it_was() {
    let mut pool = context(&ContextParams { kv_unified: true, ..params() });
    run(&mut pool, 0, &tokens(1, 40));
    let chunks = save(&mut pool, 0, 0, 24).unwrap();
    pool.copy(0, 1, Some(24)).unwrap();
    // One that belongs elsewhere, one that is damaged, and a way by somebody else.
    let fault = |fault| Err(StateError::Chunk { index: 0, fault });
    assert_eq!(pool.restore_behind(1, &[(24, &chunks[0])], 3), fault(ChunkFault::Tokens));
    assert_eq!(pool.restore_behind(1, &[(16, &chunks[1][..40])], 3), fault(ChunkFault::Damaged));
    assert_eq!(pool.restore_behind(1, &[(16, &chunks[1])], 0), Err(StateError::Occupied { sequence: 0, held: 40 }));
    let most = pool.n_ctx() - 40;
    run(&mut pool, 2, &tokens(2, most));
    assert!(matches!(pool.restore_behind(1, &[(16, &chunks[1])], 3), Err(StateError::Refused(_))));
    assert_eq!((0..4).map(|s| pool.sequence_len(s)).collect::<Vec<_>>(), [40, 24, most, 0]);
    pool.remove(2, 0).unwrap();
    assert_eq!(pool.restore_behind(1, &[(16, &chunks[1])], 3), Ok(40));
    let (a, b) = (run(&mut pool, 1, &[50]), run(&mut pool, 0, &[50]));
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 0.05));
    let mut split = context(&params());
    run(&mut split, 1, &tokens(1, 24));
    assert_eq!(split.restore_behind(1, &[(16, &chunks[1])], 3), Err(StateError::NotSliceable));
}

#[test]
fn contexts_that_share_threads_compute_in_turn_what_each_does_alone() {
    let threads = ContextParams { threads: 2, ..params() };
    let (mut first, mut second) = (context(&threads), context(&threads));
    second.share_threads(&first);
    let mut alone = context(&threads);
    let want: Vec<_> = (0..6).map(|i| run(&mut alone, 0, &tokens(i, 8))).collect();
    // At once, from two threads.
    std::thread::scope(|scope| {
        for context in [&mut first, &mut second] {
            let want = &want;
            scope.spawn(move || {
                (0..6).zip(want).for_each(|(i, want)| assert_eq!(&run(context, 0, &tokens(i, 8)), want))
            });
        }
    });
    // The threads outlive who made them.
    drop(first);
    assert_eq!(run(&mut second, 1, &tokens(0, 8)), want[0]);
}

#[test]
fn damaged_foreign_and_misplaced_chunks_are_refused_and_the_sequence_stays_empty() {
    let mut context = context(&params());
    assert!(context.sliceable());
    run(&mut context, 0, &tokens(1, 40));
    let chunks = save(&mut context, 0, 0, BLOCK).unwrap();
    let whole = context.save_whole(0).unwrap();
    let refused = |context: &mut Context, pieces: &[(u32, &[u8])]| match context.restore(1, pieces).unwrap_err() {
        StateError::Chunk { index, fault } => (index, fault),
        error => panic!("{error}"),
    };
    let (a, b, c) = (&chunks[0][..], &chunks[1][..], &chunks[2][..]);
    assert_eq!(refused(&mut context, &[(16, a), (16, a)]), (1, ChunkFault::Tokens));
    assert_eq!(refused(&mut context, &[(16, b)]), (0, ChunkFault::Tokens));
    assert_eq!(refused(&mut context, &[(16, a), (16, b), (16, c)]), (2, ChunkFault::Tokens));
    assert_eq!(refused(&mut context, &[(16, a), (8, &b[..b.len() - 1])]), (1, ChunkFault::Damaged));
    assert_eq!(refused(&mut context, &[(16, &[])]), (0, ChunkFault::Truncated));
    assert_eq!(refused(&mut context, &[(40, &whole)]), (0, ChunkFault::Foreign));
    let mut other = Context::new(&load("demo-v2.q8_0.gguf"), &params()).unwrap();
    assert_eq!(refused(&mut other, &[(16, a)]), (0, ChunkFault::Fingerprint));
    assert_ne!(other.state_fingerprint(), context.state_fingerprint());
    let mut quantised = common::context(&ContextParams { kv_type: KvType::Q8_0, ..params() });
    assert_eq!(refused(&mut quantised, &[(16, a)]), (0, ChunkFault::Fingerprint));
    let mut products = common::context(&ContextParams { flash_attention: false, ..params() });
    assert_eq!(refused(&mut products, &[(16, a)]), (0, ChunkFault::Fingerprint));
    for context in [&context, &other, &quantised, &products] {
        assert_eq!(context.sequence_len(1), 0);
    }
    assert_eq!(context.restore(0, &[(16, a)]), Err(StateError::Occupied { sequence: 0, held: 40 }));
    assert!(matches!(context.restore(4, &[(16, a)]), Err(StateError::Sequence(_))));
    for (from, block) in [(0, 0), (48, 16)] {
        assert_eq!(save(&mut context, 0, from, block), Err(StateError::Range { from, to: 40, block, held: 40 }));
    }
    assert_eq!(context.save(0, 0..41, 16), Err(StateError::Range { from: 0, to: 41, block: 16, held: 40 }));
    assert_eq!(context.restore(1, &[(16, a), (16, b), (8, c)]), Ok(40));
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut large = context(&ContextParams { n_ctx: 2048, ..params() });
    run(&mut large, 0, &tokens(1, 300));
    let chunks = save(&mut large, 0, 0, BLOCK).unwrap();
    let mut small = context(&params());
    assert_eq!(small.restore(0, &pieces(&chunks, 300)), Err(StateError::TooLong { tokens: 272, limit: 256 }));
    // Room in the sequence, but no free cells.
    let mut unified = context(&ContextParams { n_ctx: 512, kv_unified: true, ..params() });
    run(&mut unified, 1, &tokens(2, 300));
    assert!(matches!(unified.restore(0, &pieces(&chunks, 300)), Err(StateError::Refused(_))));
    assert_eq!((unified.sequence_len(0), unified.sequence_len(1)), (0, 300));
    unified.remove(1, 0).unwrap();
    assert_eq!(unified.restore(0, &pieces(&chunks, 300)), Ok(300));
    assert_eq!(run(&mut unified, 0, &[5]), run(&mut large, 0, &[5]));
}

#[test]
fn a_whole_state_comes_back_in_a_context_made_the_same_way() {
    for kv_unified in [false, true] {
        let params = ContextParams { kv_unified, ..params() };
        let mut source = context(&params);
        run(&mut source, 1, &tokens(1, 50));
        let state = source.save_whole(1).unwrap();
        let next = run(&mut source, 1, &[8]);
        let mut target = context(&params);
        assert_eq!(target.restore_whole(3, &state), Ok(50));
        assert_eq!(run(&mut target, 3, &[8]), next);
        let mut other = context(&ContextParams { kv_unified: !kv_unified, ..params.clone() });
        let fault = ChunkFault::Fingerprint;
        assert_eq!(other.restore_whole(0, &state), Err(StateError::Chunk { index: 0, fault }));
        assert!(target.restore_whole(0, &state[..state.len() - 1]).is_err());
        assert!(matches!(target.restore_whole(3, &state), Err(StateError::Occupied { .. })));
        let empty = source.save_whole(0).unwrap();
        assert_eq!(target.restore_whole(0, &empty), Ok(0));
    }
}

#[test]
fn copies_of_all_and_of_a_part_give_the_originals_logits() {
    let prompt = tokens(1, 60);
    for kv_unified in [false, true] {
        let mut context = context(&ContextParams { kv_unified, ..params() });
        run(&mut context, 0, &prompt);
        // What the target held is gone, and a copy is there at once: the source may change before the next step.
        run(&mut context, 1, &tokens(2, 20));
        context.copy(0, 1, None).unwrap();
        context.copy(0, 2, Some(30)).unwrap();
        context.copy(2, 3, None).unwrap();
        assert_eq!((1..4).map(|s| context.sequence_len(s)).collect::<Vec<_>>(), [60, 30, 30]);
        let want = run(&mut context, 0, &[9]);
        context.remove(0, 30).unwrap();
        let want_part = run(&mut context, 0, &[9]);
        context.remove(0, 0).unwrap();
        run(&mut context, 0, &tokens(3, 60));
        assert_eq!(run(&mut context, 1, &[9]), want);
        assert_eq!(run(&mut context, 2, &[9]), want_part);
        assert_eq!(run(&mut context, 3, &[9]), want_part);
        assert!(matches!(context.copy(0, 1, Some(61)), Err(StateError::Sequence(_))));
        assert_eq!(context.sequence_len(1), 61);
    }
}

#[test]
fn several_rows_of_one_sequence_are_given_where_there_is_room() {
    let prompt = tokens(1, 6);
    let mut one = context(&params());
    let want: Vec<_> = prompt.iter().map(|&token| run(&mut one, 0, &[token])).collect();
    let mut context = context(&ContextParams { outputs: Some(6), ..params() });
    assert_eq!(context.outputs(), 6);
    let mut batch = Batch::new();
    (0..).zip(&prompt).for_each(|(position, &token)| batch.add(token, position, 1, true));
    context.decode(&mut batch).unwrap();
    for (i, want) in want.iter().enumerate() {
        let row = context.logits(i).unwrap();
        assert!(row.iter().zip(want).all(|(a, b)| (a - b).abs() < 0.2), "row {i}");
    }
    batch.clear();
    (6..13).for_each(|position| batch.add(5, position, 1, true));
    assert!(matches!(context.decode(&mut batch), Err(DecodeError::Batch(_))));
    for outputs in [3, 65] {
        assert!(Context::new(model(), &ContextParams { outputs: Some(outputs), ..params() }).is_err());
    }
}

#[test]
fn a_recurrent_state_is_not_sliced_but_saved_and_copied_as_a_whole() {
    let model = common::load_written(&common::gguf::mamba());
    for kv_unified in [false, true] {
        let mut context = Context::new(&model, &ContextParams { kv_unified, ..params() }).unwrap();
        assert!(!context.sliceable());
        let prompt: Vec<_> = (60..80).collect();
        run(&mut context, 0, &prompt);
        // Cut where no state was kept: refused, and nothing is lost.
        assert_eq!(context.remove(0, 10), Ok(false));
        assert_eq!(context.sequence_len(0), 20);
        assert_eq!(save(&mut context, 0, 0, BLOCK), Err(StateError::NotSliceable));
        assert_eq!(context.restore(1, &[(1, &[0; 64])]), Err(StateError::NotSliceable));
        let state = context.save_whole(0).unwrap();
        assert_eq!(context.restore_whole(1, &state), Ok(20));
        context.copy(0, 2, None).unwrap();
        let want = run(&mut context, 0, &[99]);
        assert_eq!(run(&mut context, 1, &[99]), want);
        assert_eq!(run(&mut context, 2, &[99]), want);
        assert_eq!(context.copy(0, 3, Some(5)), Err(StateError::NotSliceable));
        assert_eq!(context.sequence_len(3), 0);
    }
}

#[test]
fn a_window_that_was_dropped_is_not_cut_into() {
    // Freed cells are taken again in another order, in which the kernels add up.
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.01);
    let model = common::load_written(&common::gguf::sliding_window());
    for kv_unified in [false, true] {
        let mut context = Context::new(&model, &ContextParams { kv_unified, ..params() }).unwrap();
        assert!(!context.sliceable());
        let prompt: Vec<_> = (0..100).map(|i| 3 + i * 7 % 256).collect();
        run(&mut context, 0, &prompt);
        // A saved state holds the window only, so that what comes back can be cut no further than that.
        let state = context.save_whole(0).unwrap();
        assert_eq!(context.restore_whole(1, &state), Ok(100));
        // Its last token can be computed again, the one before that not.
        assert_eq!((context.remove(1, 98), context.remove(1, 99)), (Ok(false), Ok(true)));
        let again = run(&mut context, 1, &prompt[99..]);
        context.remove(0, 99).unwrap();
        assert_eq!(run(&mut context, 0, &prompt[99..]), again);
        assert!(close(&run(&mut context, 1, &[50]), &run(&mut context, 0, &[50])));
        assert_eq!(context.remove(1, 60), Ok(false));
        assert_eq!(context.sequence_len(1), 101);
        assert_eq!(context.copy(1, 2, Some(60)), Err(StateError::NotSliceable));
        assert_eq!(context.sequence_len(2), 0);
        context.copy(0, 2, None).unwrap();
        assert!(close(&run(&mut context, 2, &[52]), &run(&mut context, 0, &[52])));
    }
}

struct Saved {
    context: Context,
    chunks: Vec<Vec<u8>>,
    whole: Vec<u8>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever stands in the bytes, the answer is an error or the same state, and the process lives.
    #[test]
    fn no_bytes_end_the_process(at in 0_usize..20_000, byte in any::<u8>(), cut in 0_usize..20_000) {
        thread_local! {
            static SAVED: std::cell::RefCell<Option<Saved>> =
                const { std::cell::RefCell::new(None) };
        }
        SAVED.with_borrow_mut(|saved| {
            let Saved { context, chunks, whole } = saved.get_or_insert_with(|| {
                let mut context = context(&params());
                run(&mut context, 0, &tokens(1, 40));
                let (chunks, whole) = (save(&mut context, 0, 0, BLOCK).unwrap(), context.save_whole(0).unwrap());
                Saved { context, chunks, whole }
            });
            let mut damaged = chunks[1].clone();
            let at = at % damaged.len();
            damaged[at] = byte;
            let equal = damaged == chunks[1];
            assert_eq!(context.restore(1, &[(16, &chunks[0]), (16, &damaged)]).is_ok(), equal);
            context.remove(1, 0).unwrap();
            let cut = cut % whole.len();
            assert!(context.restore_whole(1, &whole[..cut]).is_err());
            assert_eq!(context.sequence_len(1), 0);
        });
    }
}
