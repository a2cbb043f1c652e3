//! Who may ask: the keys that clients show, as flags and a file name them.
//!
//! Keys are kept and compared as SHA-256 digests, all of them for each request and in the same time whichever it is, and no key
//! is written anywhere. The file, or the directory that a Secret is mounted as, is read again every
//! [`API_KEYS_RELOAD_PERIOD`]; one that cannot be read, or names none, leaves the keys as they are. Absent: what a key may do,
//! and how much: all are alike.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use crate::limits::{
    API_KEYS_RELOAD_PERIOD, API_KEYS_REREADS, MAX_API_KEY_BYTES, MAX_API_KEY_FILE_BYTES, MAX_API_KEY_FILES,
    MAX_API_KEYS,
};

/// How the names begin of what the kubelet keeps for itself where it mounts a Secret.
const KUBELETS_OWN: &str = "..";
/// The link of these that leads to the files as they are now.
const KUBELETS_DATA: &str = "..data";

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
    /// A file of them, or a directory of such files.
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
            // A volume may be away for long, which is nothing to those who are answered.
            let keys = Arc::clone(&self);
            let read = spawn_blocking(move || keys.reload()).await;
            let problem = read.unwrap_or_else(|error| Some(format!("could not be read: {error}")));
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

/// The keys of a file, or of the files of a directory, one a line.
fn read(path: &Path) -> Result<Vec<KeyDigest>, String> {
    let at = path.display();
    let keys = if path.is_dir() { of_directory(path)? } else { of_text(&text_of(path, path)?, path)? };
    match keys.len() {
        0 => Err(format!("names no key, one a line: {at}")),
        1..=MAX_API_KEYS => Ok(keys),
        more => Err(format!("names {more} keys, and {MAX_API_KEYS} are the most: {at}")),
    }
}

/// The keys of all files of a directory. One that a Secret is mounted as changes as a whole: `..data` is made to lead to
/// another directory at once, and the one before is removed, of which a part may have been there still.
fn of_directory(directory: &Path) -> Result<Vec<KeyDigest>, String> {
    let as_it_is = || fs::canonicalize(directory.join(KUBELETS_DATA)).unwrap_or_else(|_| directory.to_owned());
    for _ in 0..=API_KEYS_REREADS {
        let whole = as_it_is();
        let keys = of_files(&whole, directory);
        if as_it_is() == whole {
            return keys;
        }
    }
    Err(format!("changes while it is read: {}", directory.display()))
}

/// The keys of the files in `whole`, which errors call after `directory`.
fn of_files(whole: &Path, directory: &Path) -> Result<Vec<KeyDigest>, String> {
    let at = directory.display();
    let cannot = |error: std::io::Error| format!("cannot be read: {at}: {error}");
    let names = fs::read_dir(whole).map_err(cannot)?.map(|entry| entry.map(|entry| entry.file_name()));
    let is_theirs = |name: &OsString| !name.to_string_lossy().starts_with(KUBELETS_OWN);
    let names = names.filter(|name| name.as_ref().map_or(true, is_theirs)).take(MAX_API_KEY_FILES + 1);
    let mut names: Vec<OsString> = names.collect::<Result<_, _>>().map_err(cannot)?;
    if names.len() > MAX_API_KEY_FILES {
        return Err(format!("has more than {MAX_API_KEY_FILES} files, which are the most: {at}"));
    }
    names.sort();
    let (mut keys, mut bytes) = (Vec::new(), 0);
    for name in names {
        let shown = directory.join(&name);
        let text = text_of(&whole.join(&name), &shown)?;
        bytes += text.len() as u64;
        if bytes > MAX_API_KEY_FILE_BYTES {
            return Err(format!(
                "has files of more than {MAX_API_KEY_FILE_BYTES} bytes together, which are the most: {at}"
            ));
        }
        keys.extend(of_text(&text, &shown)?);
    }
    Ok(keys)
}

/// What is in a file, which errors call `shown`.
fn text_of(file: &Path, shown: &Path) -> Result<String, String> {
    let at = shown.display();
    let metadata = fs::metadata(file).map_err(|error| format!("cannot be read: {at}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("is no regular file, which can be read again: {at}"));
    }
    let length = metadata.len();
    if length > MAX_API_KEY_FILE_BYTES {
        return Err(format!("has {length} bytes, and {MAX_API_KEY_FILE_BYTES} are the most: {at}"));
    }
    let mut text = String::new();
    let opened = gantry_gguf::open(file);
    // It may grow while it is read.
    let read = opened.and_then(|(file, _)| file.take(MAX_API_KEY_FILE_BYTES + 1).read_to_string(&mut text));
    match read {
        Ok(bytes) if bytes as u64 <= MAX_API_KEY_FILE_BYTES => Ok(text),
        Ok(_) => Err(format!("has more than {MAX_API_KEY_FILE_BYTES} bytes, which are the most: {at}")),
        Err(error) => Err(format!("cannot be read: {at}: {error}")),
    }
}

/// The keys of a text, one a line.
fn of_text(text: &str, shown: &Path) -> Result<Vec<KeyDigest>, String> {
    let lines = (1..).zip(text.lines().map(str::trim)).filter(|(_, line)| !line.is_empty());
    let told = |number: usize, problem: String| format!("{problem}: line {number} of {}", shown.display());
    lines.map(|(number, line)| digest(line).map_err(|problem| told(number, problem))).collect()
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

    /// Puts files where the kubelet puts those of a Secret: into a directory of their own, to which `..data` leads from one
    /// moment to the next. What was there before is removed.
    fn mount(at: &Path, generation: u32, files: &[(&str, &str)]) {
        let own = at.join(format!("..2026_{generation}"));
        fs::create_dir(&own).unwrap();
        for (name, text) in files {
            fs::write(own.join(name), text).unwrap();
            let link = at.join(name);
            if link.symlink_metadata().is_err() {
                std::os::unix::fs::symlink(Path::new(KUBELETS_DATA).join(name), link).unwrap();
            }
        }
        let (data, next) = (at.join(KUBELETS_DATA), at.join("..data_tmp"));
        let before = fs::canonicalize(&data);
        std::os::unix::fs::symlink(own.file_name().unwrap(), &next).unwrap();
        fs::rename(&next, &data).unwrap();
        if let Ok(before) = before {
            fs::remove_dir_all(before).unwrap();
        }
    }

    #[test]
    fn a_mounted_secret_is_taken_as_it_is_now_and_never_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        mount(folder.path(), 0, &[("one", "old-1"), ("two", "old-2\nold-3")]);
        let keys = keys(&[], Some(folder.path())).unwrap();
        let admits = |key: &str| keys.caller(Some(key.as_bytes())).is_some();
        assert!(admits("old-1") && admits("old-2") && admits("old-3") && !admits("..data"));
        std::thread::scope(|scope| {
            let swaps = scope.spawn(|| {
                for generation in 1..=200 {
                    let age = if generation % 2 == 0 { "new" } else { "old" };
                    let (one, two) = (format!("{age}-1"), format!("{age}-2\n{age}-3"));
                    mount(folder.path(), generation, &[("one", &one), ("two", &two)]);
                }
            });
            while !swaps.is_finished() {
                // Where it changes with each look, what was read before stays.
                drop(keys.reload());
                let sets = ["old", "new"].map(|age| (1..=3).filter(|n| admits(&format!("{age}-{n}"))).count());
                assert!(matches!(sets, [3, 0] | [0, 3]), "{sets:?}");
            }
        });
        assert_eq!(keys.reload(), None);
        assert!(admits("new-1") && admits("new-3") && !admits("old-1"));
    }

    #[test]
    fn a_directory_that_has_something_else_changes_nothing_and_is_told_by_name() {
        let folder = tempfile::tempdir().unwrap();
        assert!(keys(&[], Some(folder.path())).unwrap_err()[0].contains("names no key"));
        mount(folder.path(), 0, &[("one", "sesame")]);
        let keys = keys(&[], Some(folder.path())).unwrap();
        let half = "k\n".repeat(MAX_API_KEYS / 2 + 1);
        for (files, told) in [
            (&[("one", "sesame\nsesame opens")][..], "line 2 of"),
            (&[("one", ""), ("two", "\n")], "names no key"),
            (&[("one", half.as_str()), ("two", half.as_str())], "1024 are the most"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            mount(folder.path(), 0, files);
            let problem = read(folder.path()).unwrap_err();
            assert!(problem.contains(told) && !problem.contains("sesame"), "{problem}");
            assert!(
                problem.contains(&*folder.path().to_string_lossy()) && !problem.contains(KUBELETS_OWN),
                "{problem}"
            );
        }
        fs::create_dir(folder.path().join("..2026_0/within")).unwrap();
        assert!(keys.reload().unwrap().contains("is no regular file"));
        assert!(keys.caller(Some(b"sesame")).is_some());
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
