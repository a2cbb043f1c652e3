//! Locks of files, by which processes that share a cache keep out of each other's way: what one uses no other removes, and a file
//! on its way is written by one.
//!
//! The kernel drops a lock with the process that has it, however that ends. A lock is of a file and not of its name: once it is held,
//! the name is looked at again. Where a file system has no locks, as some of a network's, files are used without. All calls block.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::partial::remove_if_there;

/// Opens a file which no process removes for as long as what is given lives. `None`: it is not there.
pub(super) fn in_use(path: &Path) -> io::Result<Option<File>> {
    loop {
        let Some(file) = if_there(File::open(path))? else { return Ok(None) };
        as_far_as_there_are_locks(file.lock_shared())?;
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Opens a file to write, or makes it, which no other process writes meanwhile. `None`: one does.
pub(super) fn alone(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => as_far_as_there_are_locks(Err(error))?,
            Ok(()) => {}
        }
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Removes a file, unless a process uses it. Whether it is gone.
pub(super) fn remove_unused(path: &Path) -> io::Result<bool> {
    let Some(file) = unless_in_use(path)? else { return Ok(!path.exists()) };
    // Another process may have put another file there, and use that.
    if !is_at(&file, path)? {
        return Ok(false);
    }
    remove_if_there(path).map(|()| true)
}

/// Whether a process uses a file, or writes it.
pub(super) fn is_in_use(path: &Path) -> io::Result<bool> {
    Ok(path.exists() && unless_in_use(path)?.is_none())
}

/// A file which no process uses for as long as what is given lives. `None`: one does, or it is not there.
fn unless_in_use(path: &Path) -> io::Result<Option<File>> {
    // To write: a lock that keeps all others out takes that, where a network's file system has locks.
    let Some(file) = if_there(OpenOptions::new().read(true).write(true).open(path))? else { return Ok(None) };
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => as_far_as_there_are_locks(Err(error))?,
        Ok(()) => {}
    }
    Ok(Some(file))
}

fn as_far_as_there_are_locks(locked: io::Result<()>) -> io::Result<()> {
    match locked {
        Err(error) if is_without_locks(&error) => Ok(()),
        locked => locked,
    }
}

fn is_without_locks(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(rustix::io::Errno::NOLCK.raw_os_error())
}

/// Whether the name still leads to the file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    let named = if_there(fs::metadata(path))?;
    Ok(named.is_some_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())))
}

fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_in_use_stays_and_what_is_written_is_written_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m");
        assert!(in_use(&path).unwrap().is_none() && remove_unused(&path).unwrap());
        let writes = alone(&path).unwrap().unwrap();
        assert!(alone(&path).unwrap().is_none() && !remove_unused(&path).unwrap());
        drop(writes);
        let uses = [in_use(&path).unwrap().unwrap(), in_use(&path).unwrap().unwrap()];
        assert!(!remove_unused(&path).unwrap() && path.exists() && is_in_use(&path).unwrap());
        drop(uses);
        assert!(!is_in_use(&path).unwrap());
        assert!(remove_unused(&path).unwrap() && !path.exists());
    }

    #[test]
    fn a_file_that_has_got_another_name_meanwhile_is_not_taken_for_the_one_under_the_old_name() {
        let folder = tempfile::tempdir().unwrap();
        let (partial, whole) = (folder.path().join("m.partial"), folder.path().join("m"));
        let writes = alone(&partial).unwrap().unwrap();
        fs::rename(&partial, &whole).unwrap();
        let another = alone(&partial).unwrap().unwrap();
        assert!(another.metadata().unwrap().ino() != writes.metadata().unwrap().ino());
    }
}
