//! What only a real context shows.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn each_computation_keeps_to_the_limit_of_its_beginning() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-v2.q8_0.gguf");
    let config = EngineConfig { threads: Some(3), parallel: 1, ctx_size: 256, ..EngineConfig::new(path) };
    let limit = Arc::<ThreadLimit>::default();
    let opened = open(&config, &limit, &mut |_| true).unwrap();
    let mut backend = generator(&config, &opened).unwrap().backend;
    let mut position = 0;
    let mut threads = || {
        backend.decode(&[BatchEntry { token: 1, position, sequence: 0, output: false }]).unwrap();
        position += 1;
        backend.context.threads()
    };
    assert_eq!(threads(), 3);
    for (most, have) in [(1, 1), (2, 2), (0, 1), (9, 3)] {
        limit.set(most);
        assert_eq!(threads(), have, "a limit of {most}");
    }
}
