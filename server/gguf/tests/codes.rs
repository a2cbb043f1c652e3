//! The table of codes in the documents is what the code says.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::Path;

use gantry_gguf::Code;

const MARK: &str =
    "This part is written by a test from the code: `UPDATE_REFERENCE=1 cargo test -p gantry-gguf --test codes`.\n";

#[test]
fn every_code_is_in_the_reference() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/validate.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let (before, told) = text.split_once(MARK).expect("the page marks where the code's part begins");
    let mut wanted = "\n| code | severity | meaning | what to do |\n| --- | --- | --- | --- |\n".to_owned();
    for code in Code::ALL {
        writeln!(wanted, "| `{code}` | {} | {} | {} |", code.severity(), code.what(), code.advice()).unwrap();
    }
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&page, format!("{before}{MARK}{wanted}")).unwrap();
    } else if told != wanted {
        let differing = wanted.lines().find(|line| !told.contains(line)).unwrap_or("something that is gone");
        panic!("docs/validate.md is behind the code ({differing}): run this test with UPDATE_REFERENCE=1");
    }
}
