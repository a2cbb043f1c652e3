//! Where the gates write how far a version is, for whoever tells the operator.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_crds::scalars::DurationString;
use gantry_crds::status::{
    CandidatePhase, CandidateStatus, FitStatus, GateName, GateResult, GateVerdict, GgufStatus, WaitReason,
};
use gantry_gguf::{Summary, fit::Fit, human_count};
use gantry_rollout::Lines;
pub use gantry_rollout::Refusal;
use gantry_rollout::line::{self, clip};
use tokio::sync::watch;

use crate::fetch::FetchProgress;

/// The lines of all versions on their way.
pub type Board = watch::Sender<Lines>;

/// One version's line on the board.
#[derive(Clone, Debug)]
pub struct Report {
    board: Arc<Board>,
    version: String,
}

impl Report {
    /// The line of `version`, which stands on the board.
    #[must_use]
    pub fn of(board: Arc<Board>, version: &str) -> Self {
        Self { board, version: version.to_owned() }
    }

    fn change(&self, change: impl FnOnce(&mut CandidateStatus)) {
        self.board.send_if_modified(|board| {
            let Some(status) = board.get_mut(&self.version) else { return false };
            let before = status.clone();
            change(status);
            *status != before
        });
    }

    /// The version is doing something else now.
    pub fn phase(&self, phase: CandidatePhase) {
        self.change(|status| line::phase(status, phase));
    }

    /// How much of it is in memory, from 0 to 1: told in whole percents.
    pub fn loaded(&self, share: f32) {
        let percent = (share.clamp(0.0, 1.0) * 100.0) as i64;
        self.done(percent * 10, format!("{percent}% loaded"));
    }

    /// How many of the golden prompts are answered, well or badly.
    pub fn answered(&self, prompts: usize, of: usize) {
        self.done((prompts * 1000 / of.max(1)) as i64, format!("{prompts} of {of} prompts"));
    }

    /// How many answers of the active version it has read. It follows the golden prompts, and is further than all of them.
    pub fn compared(&self, answers: usize, of: usize) {
        self.done(1000 + answers as i64, format!("{answers} of {of} comparisons"));
    }

    /// By how many questions of how many its speed is compared with the active version's.
    pub fn timed(&self, answers: usize, of: usize) {
        self.done(2000 + answers as i64, format!("{answers} of {of} timings"));
    }

    /// How many of the [parts](super::limits::SHADOW_STEPS) of its time have passed, for which it is compared with the active version on live
    /// requests.
    pub fn shadowed(&self, step: u32, of: &DurationString) {
        self.done(3000 + i64::from(step), format!("{}% of {of}", step * 100 / super::limits::SHADOW_STEPS));
    }

    fn done(&self, permille: i64, summary: String) {
        self.change(|status| {
            let progress = status.progress.get_or_insert_default();
            (progress.done_permille, progress.summary, progress.eta_seconds) = (Some(permille), Some(summary), None);
        });
    }

    /// Why it cannot go on, and what to do. The same text for every try that fails alike: each change of it is a write.
    pub fn waits_for(&self, reason: WaitReason, message: &str) {
        self.change(|status| line::waits_for(status, reason, message));
    }

    /// It goes on.
    pub fn goes_on(&self) {
        self.change(|status| (status.wait_reason, status.message) = (None, None));
    }

    /// Ends when the version has waited for so long without a byte or a step, with what it waits for.
    pub async fn waits_longer_than(&self, limit: Duration) -> String {
        let mut board = self.board.subscribe();
        let mut since = None;
        loop {
            let waits = |status: &CandidateStatus| status.wait_reason.and(status.message.clone());
            let line = board.borrow_and_update().get(&self.version).and_then(waits);
            let Some(waits_for) = line else {
                since = None;
                if board.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                continue;
            };
            let until = *since.get_or_insert_with(Instant::now) + limit;
            if Instant::now() >= until {
                return waits_for;
            }
            tokio::select! {
                _ = board.changed() => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }

    /// A gate was passed.
    pub fn pass(&self, name: GateName, value: impl Into<String>) {
        let value = Some(value.into());
        self.gate(GateResult { name, verdict: GateVerdict::Pass, value, message: None });
    }

    /// A gate was not asked for.
    pub fn skip(&self, name: GateName, message: &str) {
        self.gate(GateResult { name, verdict: GateVerdict::Skipped, value: None, message: Some(message.to_owned()) });
    }

    fn gate(&self, result: GateResult) {
        self.change(|status| line::gate(status, result));
    }

    /// How far the download is.
    pub fn progress(&self, progress: &FetchProgress) {
        let total = progress.total.map(signed);
        let percent = progress.total.filter(|&total| total > 0).map(|total| {
            let percent = u128::from(progress.bytes) * 100 / u128::from(total);
            format!("{percent}%")
        });
        // A source that breaks every connection, and yet sends the file by and by, would be told and untold all the time.
        let note = progress.note.as_deref().filter(|_| progress.stands_still);
        self.change(|status| {
            status.message = note.map(clip);
            status.wait_reason = note.map(|_| WaitReason::FetchBackOff);
            status.progress = Some(gantry_crds::status::Progress {
                bytes: signed(progress.bytes),
                total,
                eta_seconds: progress.eta.map(|eta| signed(eta.as_secs())),
                done_permille: None,
                summary: percent,
            });
        });
    }

    /// What the header says.
    pub fn gguf(&self, summary: &Summary) {
        let gguf = GgufStatus {
            architecture: summary.architecture.clone(),
            quantization: summary.quantization.clone(),
            parameters: human_count(summary.parameters),
            context_length: Some(i64::from(summary.context_length)),
            bytes: signed(summary.file_bytes),
            size: quantity(summary.file_bytes),
        };
        self.change(|status| status.gguf = Some(gguf));
    }

    /// What the memory arithmetic says, beside what is loaded and without that.
    pub fn fit(&self, fit: &Fit, alone: Option<&Fit>) {
        let fit = FitStatus {
            required: quantity(fit.required),
            available: quantity(fit.available),
            fits: fit.fits,
            available_alone: alone.map(|alone| quantity(alone.available)),
            fits_alone: alone.map(|alone| alone.fits),
        };
        self.change(|status| status.fit = Some(fit));
    }
}

/// Bytes as Kubernetes writes them, with three digits: `3.79Mi`.
#[must_use]
pub fn quantity(bytes: u64) -> String {
    let text = gantry_gguf::human_bytes(bytes);
    match text.split_once(' ') {
        Some((number, unit)) => format!("{number}{}", unit.trim_end_matches('B')),
        None => text,
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_has_its_own_figure() {
        let lines = Lines::from([("v1".to_owned(), line::blank("v1", None))]);
        let board = Arc::new(watch::channel(lines).0);
        let report = Report::of(Arc::clone(&board), "v1");
        let figure = || {
            let progress = board.borrow()["v1"].progress.clone().unwrap_or_default();
            (progress.bytes, progress.done_permille, progress.summary)
        };
        let fetched = FetchProgress { bytes: 10, total: Some(20), ..FetchProgress::default() };
        report.progress(&fetched);
        assert_eq!(figure(), (10, None, Some("50%".to_owned())));
        report.phase(CandidatePhase::Loading);
        report.loaded(0.427);
        assert_eq!(figure(), (10, Some(420), Some("42% loaded".to_owned())));
        let mut seen = board.subscribe();
        report.loaded(0.429);
        assert!(!seen.has_changed().unwrap_or(true), "less than a percent is no news");
        report.loaded(f32::NAN);
        report.phase(CandidatePhase::Testing);
        assert_eq!(figure(), (10, None, None));
        report.answered(3, 20);
        assert_eq!(figure(), (10, Some(150), Some("3 of 20 prompts".to_owned())));
        seen.mark_unchanged();
        report.answered(0, 0);
    }

    #[test]
    fn bytes_are_written_as_kubernetes_does() {
        for (bytes, text) in [(0, "0"), (512, "512"), (3_973_664, "3.79Mi"), (512 << 20, "512Mi"), (17 << 30, "17.0Gi")]
        {
            assert_eq!(quantity(bytes), text);
        }
    }
}
