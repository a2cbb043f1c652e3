//! Names of the parts of a model that is split: `name-00001-of-00003.gguf` and those beside it, as llama.cpp looks for them.

use gantry_gguf::limits::MAX_SPLITS;

/// The names of all parts of the model whose first part has this name. `None`: it is no first part.
pub(super) fn parts(first: &str) -> Option<Vec<String>> {
    let (stem, count) = first.strip_suffix(".gguf")?.rsplit_once("-00001-of-")?;
    let is_number = count.len() == 5 && count.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = count.parse().ok().filter(|number| is_number && (2..=MAX_SPLITS).contains(number))?;
    Some((1..=number).map(|part| format!("{stem}{}", suffix(part, number))).collect())
}

/// How the name of a part ends, which is counted from 1.
pub(super) fn suffix(part: u64, count: u64) -> String {
    format!("-{part:05}-of-{count:05}.gguf")
}

/// The name of a model without that it is split, and without what says of which kind its file is.
pub(super) fn stem(name: &str) -> &str {
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    match stem.rsplit_once("-00001-of-") {
        Some((before, _)) if parts(name).is_some() => before,
        _ => stem,
    }
}

/// Whether these are all parts of one model, in whichever order.
pub(super) fn is_whole(names: &[&str]) -> bool {
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    sorted.first().and_then(|first| parts(first)).is_some_and(|parts| parts == sorted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_part_names_all() {
        let named = ["d/m-00001-of-00002.gguf", "d/m-00002-of-00002.gguf"].map(str::to_owned);
        assert_eq!(parts("d/m-00001-of-00002.gguf"), Some(named.to_vec()));
        for other in
            ["m.gguf", "m-00002-of-00002.gguf", "m-00001-of-00001.gguf", "m-00001-of-2.gguf", "m-00001-of-99999.gguf"]
        {
            assert_eq!(parts(other), None, "{other}");
        }
        assert_eq!((stem("m.Q4-00001-of-00002.gguf"), stem("m.Q4.gguf"), stem("m")), ("m.Q4", "m.Q4", "m"));
        assert!(is_whole(&["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"]));
        assert!(!is_whole(&["m-00001-of-00002.gguf"]) && !is_whole(&["m.gguf", "n.gguf"]) && !is_whole(&[]));
    }
}
