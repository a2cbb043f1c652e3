//! Who may ask: the keys that clients show, as flags and a file name them.
//!
//! Keys are kept and compared as SHA-256 digests, all of them for each request and in the same time whichever it is, and no key
//! is written anywhere. The file is read again every [`API_KEYS_RELOAD_PERIOD`], so that a mounted Secret may change; one that
//! cannot be read, or names none, leaves the keys as they are. Absent: what a key may do, and how much: all are alike.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tokio::time::{MissedTickBehavior, interval};

use crate::limits::{API_KEYS_RELOAD_PERIOD, MAX_API_KEY_BYTES, MAX_API_KEY_FILE_BYTES, MAX_API_KEYS};

/// What is kept of a key.
type KeyDigest = [u8; 32];

/// Who asks, by the key that was shown; where nobody needs one, all are the same.
#[derive(Clone, Copy, Default)]
pub struct Caller(Option<KeyDigest>);

impl Caller {
    /// What is written beside what is kept for them. The salt has two of the same caller's differ, so that nothing is learnt of a key
    /// from many.
    #[must_use]
    pub fn owner_of(&self, salt: &str) -> Option<String> {
        let digest = |key: KeyDigest| hex::encode(Sha256::new().chain_update(salt).chain_update(key).finalize());
        self.0.map(digest)
    }
}

/// Where keys are named.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KeySources {
    given: Vec<KeyDigest>,
    file: Option<PathBuf>,
    /// What the file had at first.
    of_file: Vec<KeyDigest>,
}

/// Not even the digests: what is short can be found from them.
impl fmt::Debug for KeySources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySources").field("given", &self.given.len()).field("file", &self.file).finish()
    }
}

impl KeySources {
    /// Takes keys of a flag and of a file. A flag or a file that is given and names none is a mistake: an empty variable must not open
    /// the server to everybody.
    ///
    /// # Errors
    /// Names every mistake, and none of the keys.
    pub fn new(given: &[String], file: Option<&Path>) -> Result<Self, Vec<String>> {
        let mut problems = Vec::new();
        let (mut digests, mut of_file) = (Vec::new(), Vec::new());
        for key in given.iter().map(|key| key.trim()).filter(|key| !key.is_empty()) {
            match digest(key) {
                Ok(digest) => digests.push(digest),
                Err(problem) => problems.push(format!("--api-key {problem}")),
            }
        }
        if digests.is_empty() && problems.is_empty() && !given.is_empty() {
            problems.push(
                "--api-key names no key; leave it and GANTRY_API_KEY out where whoever reaches the server may ask"
                    .to_owned(),
            );
        }
        if digests.len() > MAX_API_KEYS {
            problems.push(format!("--api-key may name at most {MAX_API_KEYS} keys, not {}", digests.len()));
        }
        match file.map(read) {
            Some(Ok(read)) => of_file = read,
            Some(Err(problem)) => problems.push(format!("--api-key-file {problem}")),
            None => {}
        }
        let sources = Self { given: digests, file: file.map(Path::to_owned), of_file };
        if problems.is_empty() { Ok(sources) } else { Err(problems) }
    }
}

/// The keys that are good now.
#[derive(Debug)]
pub struct ApiKeys {
    sources: KeySources,
    /// `None`: whoever reaches the server may ask.
    good: Option<ArcSwap<Vec<KeyDigest>>>,
}

impl ApiKeys {
    /// The keys of these sources; without any, nobody needs one.
    #[must_use]
    pub fn new(sources: KeySources) -> Arc<Self> {
        let needs_keys = !sources.given.is_empty() || sources.file.is_some();
        let first = || ArcSwap::from_pointee([sources.given.as_slice(), &sources.of_file].concat());
        Arc::new(Self { good: needs_keys.then(first), sources })
    }

    /// Who shows this key, or none; `None`: they may not ask.
    #[must_use]
    pub fn caller(&self, shown: Option<&[u8]>) -> Option<Caller> {
        let Some(good) = &self.good else { return Some(Caller(None)) };
        let shown: KeyDigest = Sha256::digest(shown?).into();
        let is_one = good.load().iter().fold(Choice::from(0), |is_one, key| is_one | key.ct_eq(&shown));
        bool::from(is_one).then_some(Caller(Some(shown)))
    }

    /// Reads the file again, for ever, where there is one.
    pub async fn watch(self: Arc<Self>) {
        if self.sources.file.is_none() {
            return;
        }
        let mut period = interval(API_KEYS_RELOAD_PERIOD);
        period.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_problem = None;
        loop {
            period.tick().await;
            let problem = self.reload();
            if problem != last_problem
                && let Some(problem) = &problem
            {
                tracing::warn!("--api-key-file {problem}; the keys of before stay good");
            }
            last_problem = problem;
        }
    }

    /// Takes the keys that the file has now, or says why not.
    fn reload(&self) -> Option<String> {
        let (Some(good), Some(file)) = (&self.good, &self.sources.file) else { return None };
        match read(file) {
            Ok(read) => {
                let all = [self.sources.given.as_slice(), &read].concat();
                if **good.load() != all {
                    tracing::info!(keys = all.len(), "API keys were read");
                    good.store(Arc::new(all));
                }
                None
            }
            Err(problem) => Some(problem),
        }
    }
}

/// The keys of a file, one a line.
fn read(file: &Path) -> Result<Vec<KeyDigest>, String> {
    let at = file.display();
    let metadata = std::fs::metadata(file).map_err(|error| format!("cannot be read: {at}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("is no regular file, which can be read again: {at}"));
    }
    let length = metadata.len();
    if length > MAX_API_KEY_FILE_BYTES {
        return Err(format!("has {length} bytes, and {MAX_API_KEY_FILE_BYTES} are the most: {at}"));
    }
    let text = std::fs::read_to_string(file).map_err(|error| format!("cannot be read: {at}: {error}"))?;
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty());
    let keys = lines.map(|(number, line)| digest(line).map_err(|problem| format!("{problem}: line {number} of {at}")));
    let keys: Vec<KeyDigest> = keys.collect::<Result<_, _>>()?;
    match keys.len() {
        0 => Err(format!("names no key, one a line: {at}")),
        1..=MAX_API_KEYS => Ok(keys),
        more => Err(format!("names {more} keys, and {MAX_API_KEYS} are the most: {at}")),
    }
}

fn digest(key: &str) -> Result<KeyDigest, String> {
    if key.len() > MAX_API_KEY_BYTES {
        return Err(format!("has a key of {} bytes, and {MAX_API_KEY_BYTES} are the most", key.len()));
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("has a key with blanks or characters that no header can have".to_owned());
    }
    Ok(Sha256::digest(key.as_bytes()).into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn written(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn keys(given: &[&str], file: Option<&Path>) -> Result<Arc<ApiKeys>, Vec<String>> {
        let given: Vec<String> = given.iter().map(|key| (*key).to_owned()).collect();
        KeySources::new(&given, file).map(ApiKeys::new)
    }

    #[test]
    fn each_key_is_good_and_nothing_else_is() {
        let file = written("\nfirst\n  second  \n");
        let both = keys(&["flag", ""], Some(file.path())).unwrap();
        for good in ["flag", "first", "second"] {
            assert!(both.caller(Some(good.as_bytes())).is_some(), "{good}");
        }
        for bad in ["", "firs", "first\n", "FIRST", "flag,first"] {
            assert!(both.caller(Some(bad.as_bytes())).is_none(), "{bad:?}");
        }
        assert!(both.caller(None).is_none());
        let none = keys(&[], None).unwrap();
        assert!(
            none.caller(None).is_some() && none.caller(Some(b"x")).is_some(),
            "without keys whoever reaches it may ask"
        );
        assert!(!format!("{both:?}").contains("first"));
    }

    #[test]
    fn a_file_is_read_again_and_a_bad_one_changes_nothing() {
        let file = written("old");
        let keys = keys(&["flag"], Some(file.path())).unwrap();
        std::fs::write(file.path(), "new\nother").unwrap();
        assert_eq!(keys.reload(), None);
        let admits = |key: &str| keys.caller(Some(key.as_bytes())).is_some();
        assert!(admits("new") && admits("other") && admits("flag") && !admits("old"));
        for bad in ["", "\n \n", "sesame opens", &"x".repeat(MAX_API_KEY_BYTES + 1), &"k\n".repeat(MAX_API_KEYS + 1)] {
            std::fs::write(file.path(), bad).unwrap();
            let problem = keys.reload().unwrap();
            assert!(!problem.contains("sesame") && problem.contains(&*file.path().to_string_lossy()), "{problem}");
            assert!(admits("new") && admits("other"), "{problem}");
        }
        std::fs::remove_file(file.path()).unwrap();
        assert!(keys.reload().unwrap().contains("cannot be read") && admits("new"));
    }

    #[test]
    fn mistakes_are_told_without_the_key() {
        let missing = Path::new("/nonexistent/keys");
        let problems = keys(&["sesame opens", &"x".repeat(MAX_API_KEY_BYTES + 1)], Some(missing)).unwrap_err();
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems.iter().all(|problem| !problem.contains("sesame") && !problem.contains("xxx")), "{problems:?}");
    }

    #[test]
    fn a_flag_a_variable_or_a_file_that_names_none_opens_nothing() {
        for given in [&[""][..], &["", " "]] {
            assert!(keys(given, None).unwrap_err()[0].contains("names no key"), "{given:?}");
        }
        for file in [Path::new(""), Path::new("/dev/null")] {
            assert!(keys(&["flag"], Some(file)).unwrap_err()[0].starts_with("--api-key-file "), "{}", file.display());
        }
    }
}
