//! The pages of a model's file that are in the process although nobody reads them any more.
//!
//! llama.cpp maps a file and reads it whole. Weights that it puts in another order for the processor, or sends to a GPU, are
//! copies: the file's own pages stay in the process beside them, and the model takes its memory twice, as far as anyone
//! can tell who looks at the process. Here they are let go of after a load. Those that are computed with come back at the next
//! access, from the system's cache of the file, or from the disk where the cache was needed for something else.

use std::ffi::c_void;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use crate::shim;

/// Where the system tells what is mapped.
const MAPS: &str = "/proc/self/maps";

/// Written by who relies on it that no file is unmapped.
static UNMAPPING: RwLock<()> = RwLock::new(());

/// To be held by who may unmap a model's file: a load does with parts that it has no use for, and where it fails with all,
/// and so does the end of a model.
pub(crate) fn may_unmap() -> RwLockReadGuard<'static, ()> {
    UNMAPPING.read().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the pages of a file that is mapped to be read, and shared, out of the process, once no model is being loaded. How
/// many bytes were mapped.
pub(crate) fn let_go(file: &Path) -> usize {
    let _nobody_unmaps = UNMAPPING.write().unwrap_or_else(PoisonError::into_inner);
    let (Ok(file), Ok(maps)) = (file.canonicalize(), std::fs::read_to_string(MAPS)) else { return 0 };
    let without = |(from, to): (usize, usize)| {
        let address = std::ptr::without_provenance_mut::<c_void>(from);
        // SAFETY: this is a model's file, mapped to be read and shared with it, and stays so meanwhile: who unmaps one does so
        // through a [`Model`](crate::Model), which waits for this. Nothing was written there that could be lost; who reads
        // it finds the file's bytes again.
        if unsafe { shim::gantry_let_go_of_file(address, to - from) } { to - from } else { 0 }
    };
    maps.lines().filter_map(|line| mapped(line, &file)).map(without).sum()
}

/// The addresses of a line of [`MAPS`] that is of this file, mapped so.
fn mapped(line: &str, file: &Path) -> Option<(usize, usize)> {
    // Addresses, permissions, offset, device, inode, and a path that may have spaces in it.
    let mut fields = line.splitn(6, ' ');
    let (from, to) = fields.next()?.split_once('-')?;
    if fields.next()? != "r--s" || Path::new(fields.nth(3)?.trim_start()) != file {
        return None;
    }
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_mapped_of_the_file_to_be_read_and_shared_is_meant() {
        let file = Path::new("/models/a b.gguf");
        let line = "7fdb389aa000-7fdb57e5b000 r--s 005aa000 fe:00 5376242                    /models/a b.gguf";
        assert_eq!(mapped(line, file), Some((0x7fdb_389a_a000, 0x7fdb_57e5_b000)));
        for other in [
            "7fdb389aa000-7fdb57e5b000 r--p 005aa000 fe:00 5376242                    /models/a b.gguf",
            "7fdb389aa000-7fdb57e5b000 rw-s 005aa000 fe:00 5376242                    /models/a b.gguf",
            "7fdb389aa000-7fdb57e5b000 r--s 005aa000 fe:00 5376242                    /models/a b.gguf (deleted)",
            "7fdb389aa000-7fdb57e5b000 r--s 005aa000 fe:00 5376242                    /models/b.gguf",
            "7fdb389aa000-7fdb57e5b000 rw-p 00000000 00:00 0 ",
            "7fdb389aa000-7fdb57e5b000 rw-p 00000000 00:00 0",
            "",
        ] {
            assert_eq!(mapped(other, file), None, "{other}");
        }
    }
}
