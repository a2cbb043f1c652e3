//! Workers that do something before they become workers.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program in `folder` that runs a line of shell and then becomes the server, in the same process.
pub(crate) fn server_after(folder: &Path, line: &str) -> PathBuf {
    let path = folder.join("worker.sh");
    let text = format!("#!/bin/sh\n{line}\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_gantry-server"));
    // Another process writes it: what is forked here meanwhile would hold a file that is open for writing, and such a
    // file cannot be run.
    let mut write = Command::new("sh");
    write.args(["-c", "printf %s \"$1\" > \"$2\"", "sh", &text]).arg(&path);
    assert!(write.status().unwrap().success());
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The line that waits for as long as there is a file of this name.
pub(crate) fn while_there_is(gate: &Path) -> String {
    format!("while [ -e '{}' ]; do sleep 0.05; done", gate.display())
}
