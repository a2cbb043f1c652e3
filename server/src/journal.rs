//! What a worker was working on when it died: a small file in memory that the worker writes and its front keeps.
//!
//! A worker notes the number of a request before it begins to prepare or to compute it, and takes it out again afterwards,
//! each with one write of eight bytes that has reached the kernel when it returns: whatever ends the process ends it with
//! the file as it should be. It costs two writes for each preparation and each slot, none for a token. The front reads it once, when
//! the worker has died. The file has no name and no directory; it is the worker's standard output, which has no other use.
//! Absent: what the requests say.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::MemfdFlags;

use crate::protocol::RequestId;

/// The file's name, for those who look at open files.
const NAME: &str = "gantry-journal";
/// Bytes of one place: a request's number and one, little-endian; 0: free.
const PLACE_BYTES: usize = size_of::<u64>();

/// The front's end.
pub(crate) struct Journal(File);

impl Journal {
    /// An empty one.
    ///
    /// # Errors
    /// There is no memory for it, or no file descriptor.
    pub(crate) fn create() -> io::Result<Self> {
        Ok(Self(File::from(rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC)?)))
    }

    /// For a worker's standard output.
    ///
    /// # Errors
    /// There is no file descriptor left.
    pub(crate) fn for_worker(&self) -> io::Result<OwnedFd> {
        Ok(self.0.try_clone()?.into())
    }

    /// Which requests are noted: those that the worker was working on, once it has died.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn begun(&self) -> io::Result<BTreeSet<RequestId>> {
        let bytes = usize::try_from(self.0.metadata()?.len()).map_err(io::Error::other)?;
        let mut places = vec![0; bytes];
        self.0.read_exact_at(&mut places, 0)?;
        let numbers = places.as_chunks::<PLACE_BYTES>().0.iter().map(|place| u64::from_le_bytes(*place));
        Ok(numbers.filter_map(|number| number.checked_sub(1)).collect())
    }
}

/// What is noted of one request. The threads that work on it and the one that tells of its end may be different ones: after its
/// end nothing is noted any more, or it would stand there for ever.
pub(crate) struct Entry {
    notes: Arc<Notes>,
    id: RequestId,
    is_over: Mutex<bool>,
}

impl Entry {
    pub(crate) fn new(notes: &Arc<Notes>, id: RequestId) -> Arc<Self> {
        Arc::new(Self { notes: Arc::clone(notes), id, is_over: Mutex::new(false) })
    }

    /// Work on it begins.
    pub(crate) fn begin(&self) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_over {
            self.notes.begin(self.id);
        }
    }

    /// It waits.
    pub(crate) fn pause(&self) {
        self.notes.end(self.id);
    }

    /// It has ended.
    pub(crate) fn end(&self) {
        let mut is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        *is_over = true;
        self.notes.end(self.id);
    }
}

/// The worker's end. It notes nothing where standard output is no journal, as when somebody starts a worker by hand.
pub(crate) struct Notes {
    file: Option<File>,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    of: HashMap<RequestId, u64>,
    free: Vec<u64>,
    /// How many there are.
    count: u64,
}

impl Notes {
    /// Takes standard output, and leaves nothing there to write to: a line of somebody's would go into the journal.
    pub(crate) fn take_stdout() -> io::Result<Self> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?;
        let target = std::fs::read_link("/proc/self/fd/1").unwrap_or_default();
        if !target.starts_with(Path::new("/")) || !target.to_string_lossy().contains(NAME) {
            return Ok(Self::to(None));
        }
        rustix::stdio::dup2_stdout(File::options().write(true).open("/dev/null")?)?;
        Ok(Self::to(Some(File::from(stdout))))
    }

    fn to(file: Option<File>) -> Self {
        Self { file, places: Mutex::default() }
    }

    /// Work on a request begins.
    fn begin(&self, id: RequestId) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if places.of.contains_key(&id) {
            return;
        }
        let place = places.free.pop().unwrap_or(places.count);
        places.count = places.count.max(place + 1);
        places.of.insert(id, place);
        self.write(place, id.wrapping_add(1));
    }

    /// It has ended well, for now or for good.
    fn end(&self, id: RequestId) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.of.remove(&id) {
            places.free.push(place);
            self.write(place, 0);
        }
    }

    /// Under the lock, so that the last note of a place is the last one written.
    fn write(&self, place: u64, number: u64) {
        let Some(file) = &self.file else { return };
        if let Err(error) = file.write_all_at(&number.to_le_bytes(), place * PLACE_BYTES as u64) {
            tracing::error!(%error, "cannot note what is worked on: should this worker die, nobody will know why");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_noted_is_what_has_begun_and_not_ended(
            ops in proptest::collection::vec((any::<bool>(), 0_u64..12), 0..200),
        ) {
            let journal = Journal::create().unwrap();
            let notes = Notes::to(Some(journal.for_worker().unwrap().into()));
            let mut begun = BTreeSet::new();
            for (begins, id) in ops {
                if begins {
                    notes.begin(id);
                    begun.insert(id);
                } else {
                    notes.end(id);
                    begun.remove(&id);
                }
                prop_assert_eq!(&journal.begun().unwrap(), &begun);
            }
            let bytes = journal.0.metadata().unwrap().len();
            prop_assert!(bytes <= 12 * PLACE_BYTES as u64, "places are used again: {} bytes", bytes);
        }
    }

    #[test]
    fn nothing_is_noted_of_a_request_after_its_end() {
        let journal = Journal::create().unwrap();
        let notes = Arc::new(Notes::to(Some(journal.for_worker().unwrap().into())));
        let entry = Entry::new(&notes, 7);
        entry.begin();
        assert_eq!(journal.begun().unwrap(), BTreeSet::from([7]));
        entry.pause();
        assert_eq!(journal.begun().unwrap(), BTreeSet::new());
        entry.begin();
        entry.end();
        // As the engine's thread does that resumes it while the other one ends it.
        entry.begin();
        assert_eq!(journal.begun().unwrap(), BTreeSet::new());
    }

    #[test]
    fn where_there_is_no_journal_nothing_is_written() {
        let notes = Notes::to(None);
        notes.begin(1);
        notes.end(1);
    }
}
