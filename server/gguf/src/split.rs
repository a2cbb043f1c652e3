//! A model in several files: `name-00001-of-00003.gguf` and those beside it.
//!
//! Flow: the first part's keys say how many there are and how many tensors they hold together ([`of`]); [`others`] finds
//! the rest by the first one's name, as llama.cpp does. Each part is a GGUF file of its own, with a tensor table and data
//! that begin at its own offsets; the first has the model's keys, and may hold no tensor. Absent: parts that lie elsewhere.

use std::path::{Path, PathBuf};

use crate::error::{Defect, Result, malformed};
use crate::limits::MAX_SPLITS;
use crate::value::{Entry, Metadata, Value, ValueType};

const NUMBER_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";

/// What a part says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Split {
    /// Which it is, from 0.
    pub(crate) number: u64,
    /// How many there are.
    pub(crate) count: u64,
    /// Byte of the file where that stands.
    pub(crate) offset: u64,
}

/// The end of the name of a part, counted from 0.
fn suffix(number: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

/// What the keys of a file say of its being a part; `None`: it is whole.
pub(crate) fn of(metadata: &Metadata) -> Result<Option<Split>> {
    let number = |key: &str, kind: ValueType, expected: &'static str| match metadata.entry(key) {
        None => Ok(None),
        Some(Entry { offset, value: Value::Integer { kind: found, value } }) if *found == kind => {
            Ok(Some((*offset, u64::try_from(*value).unwrap_or(u64::MAX))))
        }
        Some(Entry { offset, value }) => {
            malformed(*offset, Defect::WrongKeyType { key: key.to_owned(), found: value.type_name(), expected })
        }
    };
    let Some((offset, count)) = number(COUNT_KEY, ValueType::U16, "u16")?.filter(|(_, count)| *count > 1) else {
        return Ok(None);
    };
    let Some((at, number)) = number(NUMBER_KEY, ValueType::U16, "u16")? else {
        return malformed(offset, Defect::MissingKey { key: NUMBER_KEY.to_owned() });
    };
    if number >= count {
        return malformed(at, Defect::SplitNumber { number: number + 1, count });
    }
    if count > MAX_SPLITS {
        return malformed(offset, Defect::TooManySplits { count, limit: MAX_SPLITS });
    }
    Ok(Some(Split { number, count, offset }))
}

/// Tensors of all parts together, as the first part says.
pub(crate) fn tensors(metadata: &Metadata, keys_end: u64) -> Result<u64> {
    match metadata.entry(TENSORS_KEY) {
        None => malformed(keys_end, Defect::MissingKey { key: TENSORS_KEY.to_owned() }),
        Some(Entry { value: Value::Integer { kind: ValueType::I32, value }, .. }) => {
            Ok(u64::try_from(*value).unwrap_or(0))
        }
        Some(Entry { offset, value }) => {
            let (key, found, expected) = (TENSORS_KEY.to_owned(), value.type_name(), "i32");
            malformed(*offset, Defect::WrongKeyType { key, found, expected })
        }
    }
}

/// The paths of all parts after the first, given that one's.
pub(crate) fn others(first: &Path, split: &Split) -> Result<Vec<PathBuf>> {
    let &Split { number, count, offset } = split;
    if number != 0 {
        let expected = suffix(0, count);
        return malformed(offset, Defect::NotTheFirstSplit { number: number + 1, count, expected });
    }
    let expected = suffix(0, count);
    let name = first.file_name().and_then(|name| name.to_str());
    let Some(stem) = name.and_then(|name| name.strip_suffix(&expected)) else {
        return malformed(offset, Defect::SplitName { count, expected });
    };
    Ok((1..count).map(|number| first.with_file_name(format!("{stem}{}", suffix(number, count)))).collect())
}

/// The files of which a model consists whose first is at this path, by its name: itself, and where it is the first of
/// several those that are there of the rest.
#[must_use]
pub fn part_paths(path: &Path) -> Vec<PathBuf> {
    let counted = || {
        let (_, count) = path.file_name()?.to_str()?.strip_suffix(".gguf")?.rsplit_once("-00001-of-")?;
        count.parse::<u64>().ok().filter(|count| (2..=MAX_SPLITS).contains(count))
    };
    let others = counted().and_then(|count| others(path, &Split { number: 0, count, offset: 0 }).ok());
    let others = others.unwrap_or_default().into_iter().filter(|path| path.exists());
    std::iter::once(path.to_path_buf()).chain(others).collect()
}

/// Refuses a part that belongs to another model than the first, or stands in another's place.
pub(crate) fn check_part(first: &Metadata, part: &Metadata, number: u64, count: u64, keys_end: u64) -> Result<()> {
    match of(part)? {
        Some(split) if split.number == number && split.count == count => {}
        Some(split) => {
            let found = format!("{} of {}", split.number + 1, split.count);
            return malformed(split.offset, Defect::WrongSplit { found, number: number + 1, count });
        }
        None => {
            return malformed(keys_end, Defect::WrongSplit { found: "no part".to_owned(), number: number + 1, count });
        }
    }
    match part.difference(first, NUMBER_KEY) {
        Some((offset, key)) => malformed(offset, Defect::ForeignSplit { key }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_model_are_found_by_the_name_of_the_first() {
        let paths = |path: &str, count| others(Path::new(path), &Split { number: 0, count, offset: 0 });
        let named = |names: [&str; 2]| names.map(PathBuf::from).to_vec();
        let found = paths("/a/m.x-00001-of-00003.gguf", 3);
        assert!(found.is_ok_and(|found| found == named(["/a/m.x-00002-of-00003.gguf", "/a/m.x-00003-of-00003.gguf"])));
        for (path, count) in [("/a/m-00001-of-00003.gguf", 2), ("/a/m.gguf", 3), ("/a/m-1-of-3.gguf", 3), ("/", 3)] {
            let refused = paths(path, count).err();
            let defect = refused.as_ref().and_then(|error| error.defect());
            assert!(matches!(defect, Some(Defect::SplitName { .. })), "{path}: {refused:?}");
        }
        for path in ["/nowhere/m-00001-of-00003.gguf", "/nowhere/m-00001-of-99999.gguf", "m-00001-of-x.gguf", "m.gguf"]
        {
            assert_eq!(part_paths(Path::new(path)), [PathBuf::from(path)], "others are not there");
        }
    }
}
