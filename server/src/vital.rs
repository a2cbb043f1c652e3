//! Tasks without which the process is of no use: one that panics ends the process, with its reason as the last thing in the log.
//!
//! A panic ends a task and nothing else. A version whose supervisor is gone would take requests and answer none, for ever,
//! while `/healthz` is content; whoever started the process starts it anew instead. Absent: tasks whose end is noticed by
//! whoever waits for them.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use futures::FutureExt;
use tokio::task::JoinHandle;

use crate::telemetry;

/// The exit code after a panic: `EX_SOFTWARE`, an internal fault.
pub const EXIT_PANIC: i32 = 70;

/// Runs a task whose panic ends the process. `name`: what it is to whoever reads the log.
pub(crate) fn spawn<T: Send + 'static>(
    name: &'static str,
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(async move { AssertUnwindSafe(task).catch_unwind().await.unwrap_or_else(|panic| end(name, &*panic)) })
}

fn end(name: &str, panic: &(dyn Any + Send)) -> ! {
    let reason = reason(panic);
    tracing::error!(panic = reason, "{name} panicked, without which nothing is served: the process ends");
    // The log may be filtered, and this must be seen.
    telemetry::write_lines(format!("gantry-server: {name} panicked: {reason}\n").as_bytes());
    telemetry::flush();
    std::process::exit(EXIT_PANIC);
}

/// What a panic says.
pub(crate) fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("of an unknown kind")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    const INSIDE: &str = "GANTRY_TEST_VITAL_INSIDE";

    /// Runs itself once more, as the process that ends.
    #[test]
    fn a_panic_ends_the_process_with_its_reason() {
        if std::env::var_os(INSIDE).is_some() {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                assert_eq!(spawn("a task that ends well", async { 7 }).await.unwrap(), 7);
                drop(spawn("the task of this test", async { panic!("for a reason") }));
                std::future::pending::<()>().await;
            });
        }
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        again.args(["vital::tests::a_panic_ends_the_process_with_its_reason", "--exact", "--nocapture"]);
        let ended = again.env(INSIDE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(EXIT_PANIC), "{said}");
        assert!(said.contains("the task of this test panicked: for a reason"), "{said}");
    }
}
