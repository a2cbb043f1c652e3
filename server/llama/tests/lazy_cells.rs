//! When cells take memory. A process of its own: what others take beside it would count.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{context, params, run, tokens};
use gantry_llama::ContextParams;

/// Bytes of main memory that this process has taken.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn lazy_cells_take_memory_as_they_are_used_and_compute_the_same() {
    const CELLS: u32 = 1 << 20;
    let eager = ContextParams { n_ctx: CELLS, ..params() };
    let lazy = ContextParams { lazy_cells: true, ..eager.clone() };
    let text = tokens(1, 200);
    // The first one also has what a process takes once.
    let expected = run(&mut context(&params()), 0, &text);
    let grown = |params: &ContextParams| {
        let before = resident_bytes();
        let mut context = context(params);
        let made = resident_bytes().saturating_sub(before);
        assert_eq!(run(&mut context, 0, &text), expected);
        // What was computed is forgotten with what it was computed from.
        context.scrub();
        assert_eq!(run(&mut context, 2, &text), expected);
        (made, resident_bytes().saturating_sub(before), context.untouched_bytes() - context.compute_bytes())
    };
    let (lazy_made, lazy_used, untouched) = grown(&lazy);
    assert!(untouched > 100 << 20, "{untouched} bytes of cells");
    assert!(lazy_made < untouched / 4, "{lazy_made} of {untouched} bytes when it is made");
    assert!(lazy_used < untouched / 2, "{lazy_used} of {untouched} bytes with 400 cells of a million used");
    let (eager_made, _, untouched_eagerly) = grown(&eager);
    assert!(eager_made >= untouched / 8 * 7, "{eager_made} of {untouched} bytes");
    assert_eq!(untouched_eagerly, 0);
}
