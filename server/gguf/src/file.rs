//! Opening what a path names, if that is a file: never a pipe or a device, and without waiting for anything.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file for reading, and tells its length.
///
/// # Errors
/// It cannot be opened, or is no regular file.
pub fn open(path: impl AsRef<Path>) -> io::Result<(File, u64)> {
    let path = path.as_ref();
    let no_file = || Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    // Asked before opening, which for a device may do something.
    if !std::fs::metadata(path)?.is_file() {
        return no_file();
    }
    // And after: it may have become a pipe, whose other end is then not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_file() { Ok((file, metadata.len())) } else { no_file() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_a_regular_file_is_opened_and_nothing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (file, pipe, socket) =
            (folder.path().join("file"), folder.path().join("pipe"), folder.path().join("socket"));
        std::fs::write(&file, b"abc").unwrap();
        assert_eq!(open(&file).unwrap().1, 3);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [folder.path(), &pipe, &socket, Path::new("/dev/zero")] {
            assert_eq!(open(path).unwrap_err().to_string(), "it is not a regular file", "{}", path.display());
        }
        assert_eq!(open(folder.path().join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
