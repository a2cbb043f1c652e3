//! What holds of the reader whatever bytes it is given: shared by the fuzz target and by a bounded test on stable Rust.

use gantry_gguf::limits::MAX_FINDINGS;
use gantry_gguf::{Severity, inspect_prefix, read_header_prefix};

/// Reads the bytes as a whole file, as the start of a longer one, and as one that was cut; panics where something does not
/// hold.
pub fn check(bytes: &[u8]) {
    let length = bytes.len() as u64;
    for file_bytes in [length, length.saturating_mul(1 << 20), u64::MAX, length / 2] {
        let inspection = inspect_prefix(bytes, file_bytes);
        let findings = &inspection.findings;
        assert!(findings.list.len() <= MAX_FINDINGS);
        assert!(findings.left_out == 0 || findings.list.len() == MAX_FINDINGS);
        for finding in &findings.list {
            assert_eq!(finding.severity, finding.code.severity());
            for text in [&finding.message, &finding.found, &finding.expected] {
                assert!(!text.is_empty() && text.len() < 4096 && !text.contains(char::is_control), "{text:?}");
            }
            assert!(finding.subject.as_ref().is_none_or(|subject| !subject.contains(char::is_control)));
            assert!(!finding.advice.is_empty());
        }
        // Both ways of reading say the same, and a header is there where nothing is wrong.
        match (inspection.header, read_header_prefix(bytes, file_bytes)) {
            (Ok(one), Ok(other)) => {
                assert!(findings.list.iter().all(|finding| finding.severity == Severity::Warning));
                assert_eq!(one.summary(), other.summary());
            }
            (Err(one), Err(other)) => {
                let first = findings.first_error().expect("an error is a finding");
                assert_eq!(one.to_string(), other.to_string());
                assert_eq!(first.message, one.to_string());
            }
            (one, other) => panic!("{one:?} and {other:?}"),
        }
    }
}
