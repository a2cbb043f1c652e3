//! What is known of the files of the disk tier, of all models: sizes and last accesses, and which goes next. Pure.
//!
//! It is a picture: another process may add and remove files. What it names may be gone (a miss), and what it does not
//! name is found by the next scan.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use super::key::{BlockHash, Fingerprint};

/// Names one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct EntryKey {
    pub(super) fingerprint: Fingerprint,
    pub(super) block: BlockHash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntryInfo {
    pub(super) bytes: u64,
    pub(super) accessed: SystemTime,
}

#[derive(Default)]
pub(super) struct Index {
    entries: HashMap<EntryKey, EntryInfo>,
    by_access: BTreeSet<(SystemTime, EntryKey)>,
    bytes: u64,
    /// What happened since a scan began, while one is under way: the scan may have seen the files before that.
    since_scan: Option<Vec<Change>>,
}

enum Change {
    Removed(EntryKey),
    Touched(EntryKey, SystemTime),
}

impl Index {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn get(&self, key: &EntryKey) -> Option<EntryInfo> {
        self.entries.get(key).copied()
    }

    pub(super) fn insert(&mut self, key: EntryKey, info: EntryInfo) {
        self.remove(&key);
        self.entries.insert(key, info);
        self.by_access.insert((info.accessed, key));
        self.bytes += info.bytes;
    }

    pub(super) fn remove(&mut self, key: &EntryKey) -> Option<EntryInfo> {
        let info = self.entries.remove(key)?;
        self.by_access.remove(&(info.accessed, *key));
        self.bytes -= info.bytes;
        self.note(Change::Removed(*key));
        Some(info)
    }

    /// Notes an access; an older one than the last changes nothing.
    pub(super) fn touch(&mut self, key: &EntryKey, accessed: SystemTime) {
        let Some(info) = self.entries.get_mut(key) else { return };
        if accessed > info.accessed {
            self.by_access.remove(&(info.accessed, *key));
            self.by_access.insert((accessed, *key));
            info.accessed = accessed;
            self.note(Change::Touched(*key, accessed));
        }
    }

    fn note(&mut self, change: Change) {
        if let Some(changes) = &mut self.since_scan {
            changes.push(change);
        }
    }

    /// The entry whose last access is the longest ago.
    pub(super) fn oldest(&self) -> Option<(EntryKey, EntryInfo)> {
        let &(_, key) = self.by_access.first()?;
        Some((key, self.get(&key)?))
    }

    /// Entries of one model last accessed before `limit`, the oldest first, at most `max` of them.
    pub(super) fn older_than(&self, fingerprint: Fingerprint, limit: SystemTime, max: usize) -> Vec<EntryKey> {
        let older = self.by_access.iter().take_while(|(accessed, _)| *accessed < limit);
        older.map(|(_, key)| *key).filter(|key| key.fingerprint == fingerprint).take(max).collect()
    }

    /// From here to [`Index::end_scan`], removals and accesses are noted. Who scans is who inserts, so nothing is
    /// inserted meanwhile.
    pub(super) fn begin_scan(&mut self) {
        self.since_scan = Some(Vec::new());
    }

    /// Takes over what a scan found, but for what happened since it began, and returns the former picture: dropping it
    /// takes a while, which the caller's lock need not. `None`: the scan failed.
    pub(super) fn end_scan(&mut self, found: Option<Index>) -> Option<Index> {
        let changes = self.since_scan.take().unwrap_or_default();
        let before = std::mem::replace(self, found?);
        for change in changes {
            match change {
                Change::Removed(key) => drop(self.remove(&key)),
                Change::Touched(key, accessed) => self.touch(&key, accessed),
            }
        }
        Some(before)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn key(i: u8) -> EntryKey {
        EntryKey { fingerprint: Fingerprint([i % 2; 32]), block: BlockHash([i; 32]) }
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    proptest! {
        #[test]
        fn sizes_and_order_are_those_of_a_plain_map(
            actions in prop::collection::vec((0_u8..4, 0_u8..12, 0_u64..50, 1_u64..100), 1..80),
        ) {
            let mut index = Index::default();
            let mut model: HashMap<EntryKey, EntryInfo> = HashMap::new();
            // What a scan found, as it is to be when the scan ends.
            let mut found: Option<HashMap<EntryKey, EntryInfo>> = None;
            let mut scanned = None;
            for (action, i, seconds, bytes) in actions {
                let (key, info) = (key(i), EntryInfo { bytes, accessed: at(seconds) });
                match action {
                    0 if found.is_none() => {
                        index.insert(key, info);
                        model.insert(key, info);
                    }
                    0 => {}
                    1 => {
                        let removed = model.remove(&key);
                        prop_assert_eq!(index.remove(&key), removed);
                        if removed.is_some() {
                            found.as_mut().map(|found| found.remove(&key));
                        }
                    }
                    2 => {
                        index.touch(&key, info.accessed);
                        if let Some(entry) = model.get_mut(&key) && entry.accessed < info.accessed {
                            entry.accessed = info.accessed;
                            if let Some(entry) = found.as_mut().and_then(|found| found.get_mut(&key)) {
                                entry.accessed = entry.accessed.max(info.accessed);
                            }
                        }
                    }
                    _ if found.is_none() => {
                        index.begin_scan();
                        // Another process removed one file, and wrote or used another.
                        let mut files = model.clone();
                        files.remove(&key);
                        let other = EntryKey { block: BlockHash([i / 2; 32]), ..key };
                        files.insert(other, info);
                        found = Some(files);
                        scanned = found.clone();
                    }
                    _ => {
                        let mut files = Index::default();
                        for (key, info) in scanned.take().into_iter().flatten() {
                            files.insert(key, info);
                        }
                        prop_assert_eq!(index.end_scan(Some(files)).map(|before| before.len()), Some(model.len()));
                        model = found.take().unwrap_or_default();
                    }
                }
                prop_assert_eq!(index.len(), model.len());
                prop_assert_eq!(index.bytes(), model.values().map(|m| m.bytes).sum::<u64>());
                let oldest = model.iter().map(|(key, m)| (m.accessed, *key)).min();
                prop_assert_eq!(index.oldest().map(|(key, m)| (m.accessed, key)), oldest);
                let fingerprint = key.fingerprint;
                let mut older: Vec<_> = model.iter().map(|(key, m)| (m.accessed, *key)).collect();
                older.retain(|(accessed, key)| *accessed < at(25) && key.fingerprint == fingerprint);
                older.sort_unstable();
                let older: Vec<_> = older.into_iter().map(|(_, key)| key).collect();
                prop_assert_eq!(index.older_than(fingerprint, at(25), 100), older);
            }
        }
    }
}
