//! A service as it changes, and waiting for it.

use std::{pin::pin, process::ExitCode, time::Duration};

use anyhow::Result;
use console::Term;
use futures::StreamExt as _;
use jiff::Timestamp;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::{
    args::Wait,
    cluster::{Cluster, first},
    panel::{Outcome, View},
};

/// How often spans of time are written anew.
const REDRAW_PERIOD: Duration = Duration::from_secs(1);
/// Exit status when the time is up.
const TIMED_OUT: u8 = 2;

/// Shows a service until it is interrupted: a panel in a terminal; elsewhere a line each time that something happened.
///
/// # Errors
/// When the service is not there, is deleted, or may not be read.
pub async fn show(cluster: &Cluster, name: &str) -> Result<()> {
    let terminal = Term::stdout();
    let mut views = pin!(cluster.views(name));
    let mut redraw = interval(REDRAW_PERIOD);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut view: Option<View> = None;
    let (mut lines, mut told) = (0, String::new());
    loop {
        tokio::select! {
            next = views.next() => match next {
                Some(next) => view = Some(next?),
                None => return Ok(()),
            },
            _ = redraw.tick(), if terminal.is_term() => {}
        }
        let Some(view) = &view else { continue };
        if terminal.is_term() {
            let panel = view.panel(Timestamp::now());
            let (height, width) = terminal.size();
            let fitting = fit(&panel, height.into(), width.into());
            terminal.clear_last_lines(lines)?;
            terminal.write_str(&fitting)?;
            lines = fitting.lines().count();
        } else {
            let summary = view.summary();
            if summary != told {
                println!("{summary}");
                told = summary;
            }
        }
    }
}

/// As much of a panel as a terminal shows at once, so that what is written over it is all there is of it.
fn fit(panel: &str, height: usize, width: usize) -> String {
    let shown = panel.lines().take(height.saturating_sub(1));
    shown.map(|line| format!("{}\n", console::truncate_str(line, width, "…"))).collect()
}

/// Waits until what the spec asks for is served or refused.
///
/// # Errors
/// As [`show`].
pub async fn wait(cluster: &Cluster, arguments: &Wait) -> Result<ExitCode> {
    let ended = first(cluster.views(&arguments.name), |view| match view.outcome() {
        Outcome::Pending => None,
        ended => Some((ended, view.clone())),
    });
    let Ok(ended) = timeout(arguments.timeout, ended).await else {
        let view = cluster.view(&arguments.name).await?;
        eprint!("{}", view.panel(Timestamp::now()));
        eprintln!("{} is not there yet, and the time is up (--timeout)", arguments.name);
        return Ok(ExitCode::from(TIMED_OUT));
    };
    Ok(match ended? {
        (Outcome::Refused(why), _) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
        (_, view) => {
            println!("{}", view.summary());
            ExitCode::SUCCESS
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panel_fits_its_terminal() {
        assert_eq!(fit("one\ntwo is long\nthree\n", 3, 6), "one\ntwo i…\n");
        assert_eq!(fit("one\n", 24, 80), "one\n");
    }
}
