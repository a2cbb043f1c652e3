//! What is told of a version that is tried again and again: how the last try ended, until another one gets further.
//!
//! Every change of what a pod tells is a write of the status that wakes all agents of the service, and a pod that lacks a
//! version tries to have it for as long as it lives: tries that end alike must tell the same.

use gantry_crds::status::{CandidateStatus, GateName, GateResult, GateVerdict, WaitReason};

use crate::line::Refusal;

/// How the last try ended, if there has been one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told(Option<CandidateStatus>);

impl Told {
    /// A try that others will follow has ended with this `line`.
    pub fn ended(&mut self, line: Option<&CandidateStatus>) {
        if let Some(line) = line
            && self.0.as_ref().is_none_or(|before| !ended_alike(before, line) || is_further(line, before))
        {
            self.0 = Some(line.clone());
        }
    }

    /// How the last try ended.
    #[must_use]
    pub fn last(&self) -> Option<&CandidateStatus> {
        self.0.as_ref()
    }

    /// What to tell while the try with this `line` goes on.
    #[must_use]
    pub fn of<'a>(&'a self, line: Option<&'a CandidateStatus>) -> Option<&'a CandidateStatus> {
        self.0.as_ref().filter(|ended| !line.is_some_and(|line| is_further(line, ended))).or(line)
    }
}

fn ended_alike(one: &CandidateStatus, other: &CandidateStatus) -> bool {
    let failed = |line: &CandidateStatus| line.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail).cloned();
    let words = |line: &CandidateStatus| line.message.clone().unwrap_or_default();
    let alike = match (failed(one), failed(other)) {
        (Some(one), Some(other)) => refused_alike(&refusal(one), &refusal(other)),
        (None, None) if one.wait_reason == Some(WaitReason::NoRoom) => steady(&words(one)) == steady(&words(other)),
        (None, None) => without_detail(&words(one)) == without_detail(&words(other)),
        _ => false,
    };
    alike && (one.phase, one.wait_reason) == (other.phase, other.wait_reason)
}

fn refusal(gate: GateResult) -> Refusal {
    Refusal { gate: gate.name, value: gate.value, message: gate.message.unwrap_or_default() }
}

/// Whether two tries were refused for the same. What moves with each: figures of memory, and the last words of a worker.
pub(crate) fn refused_alike(one: &Refusal, other: &Refusal) -> bool {
    one.gate == other.gate
        && match one.gate {
            GateName::Memory => steady(&one.message) == steady(&other.message),
            GateName::Load => one.value == other.value,
            _ => without_detail(&one.message) == without_detail(&other.message),
        }
}

/// Whether a try has come further than the one that ended so.
fn is_further(line: &CandidateStatus, ended: &CandidateStatus) -> bool {
    let passed = |line: &CandidateStatus| line.gates.iter().filter(|gate| gate.verdict != GateVerdict::Fail).count();
    let bytes = |line: &CandidateStatus| line.progress.as_ref().map_or(0, |progress| progress.bytes);
    passed(line) > passed(ended) || bytes(line) > bytes(ended)
}

/// The text without its figures and their units.
fn steady(text: &str) -> String {
    const UNITS: [&str; 9] = ["Ki", "Mi", "Gi", "Ti", "k", "M", "G", "T", "m"];
    let is_figure = |c: char| c.is_ascii_digit() || c == '.';
    let mut parts = text.split(is_figure);
    let first = parts.next().unwrap_or_default();
    let without_unit = |part: &str| -> String {
        let rest = UNITS.iter().find_map(|unit| part.strip_prefix(unit));
        let is_unit = |rest: &&str| !rest.starts_with(|c: char| c.is_alphanumeric());
        rest.filter(is_unit).unwrap_or(part).to_owned()
    };
    let rest: Vec<_> = parts.filter(|part| !part.is_empty()).map(without_unit).collect();
    [first.to_owned()].into_iter().chain(rest).collect::<Vec<_>>().join("0")
}

/// The text without what stands in brackets: what the system or another server said beside the cause, which may be another thing
/// each time.
fn without_detail(text: &str) -> String {
    let mut depth = 0_usize;
    let outside = |c: &char| {
        depth = if *c == '(' { depth + 1 } else { depth };
        let is_outside = depth == 0;
        depth = if *c == ')' { depth.saturating_sub(1) } else { depth };
        is_outside
    };
    text.chars().filter(outside).collect()
}

#[cfg(test)]
mod tests {
    use gantry_crds::status::{CandidatePhase, Progress};

    use super::*;
    use crate::line::blank;

    fn line(phase: CandidatePhase, passed: &[GateName], failed: Option<GateName>, message: &str) -> CandidateStatus {
        let message = message.to_owned();
        let gate = |verdict| {
            let message = Some(message.clone()).filter(|_| verdict == GateVerdict::Fail);
            move |name: &GateName| GateResult { name: *name, verdict, value: None, message: message.clone() }
        };
        let gates =
            passed.iter().map(gate(GateVerdict::Pass)).chain(failed.iter().map(gate(GateVerdict::Fail))).collect();
        CandidateStatus { phase, gates, ..blank("v1", Some(message)) }
    }

    #[test]
    fn a_try_that_gets_no_further_than_the_last_one_tells_nothing_new() {
        use CandidatePhase::{Failed, Fetching, Loading, Validating};
        use GateName::{Digest, Fetch, Load, Memory};
        let refused = |figure: &str| {
            line(Failed, &[Fetch, Digest], Some(Memory), &format!("Memory: 17.3Gi needed, {figure}Gi there"))
        };
        let mut told = Told::default();
        let first = line(Fetching, &[], None, "");
        assert_eq!(told.of(Some(&first)), Some(&first), "nothing ended yet");
        assert_eq!(told.of(None), None);
        told.ended(Some(&refused("12.1")));
        for try_again in [
            line(Fetching, &[], None, ""),
            line(Validating, &[Fetch], None, ""),
            line(Validating, &[Fetch, Digest], None, ""),
            refused("9"),
        ] {
            told.ended(Some(&try_again).filter(|line| line.phase == Failed));
            assert_eq!(told.of(Some(&try_again)), Some(&refused("12.1")));
        }
        assert_eq!(told.of(None), Some(&refused("12.1")));
        let further = line(Loading, &[Fetch, Digest, Memory], None, "");
        assert_eq!(told.of(Some(&further)), Some(&further));
        let otherwise = line(Failed, &[Fetch, Digest, Memory], Some(Load), "Load: it died");
        told.ended(Some(&otherwise));
        assert_eq!(told.of(Some(&refused("9"))), Some(&otherwise));
    }

    #[test]
    fn bytes_that_come_are_told_and_a_wait_for_room_once() {
        let fetched = |bytes: i64| CandidateStatus {
            progress: Some(Progress { bytes, ..Progress::default() }),
            ..line(CandidatePhase::Fetching, &[], None, "")
        };
        let mut told = Told::default();
        let ended = CandidateStatus { phase: CandidatePhase::Failed, ..fetched(100) };
        told.ended(Some(&ended));
        assert_eq!(told.of(Some(&fetched(100))), Some(&ended));
        assert_eq!(told.of(Some(&fetched(101))), Some(&fetched(101)));
        // One that ended alike and further is what the next is measured by.
        let further = CandidateStatus { phase: CandidatePhase::Failed, ..fetched(150) };
        told.ended(Some(&further));
        told.ended(Some(&ended));
        assert_eq!(told.of(Some(&fetched(150))), Some(&further));
        let waits = |gib: u8| {
            let message = format!("waits until another version is unloaded: {gib}Gi are there");
            let line = line(CandidatePhase::Validating, &[GateName::Fetch], None, &message);
            CandidateStatus { wait_reason: Some(WaitReason::NoRoom), ..line }
        };
        told.ended(Some(&waits(3)));
        told.ended(Some(&waits(4)));
        assert_eq!(told.of(Some(&line(CandidatePhase::Fetching, &[], None, ""))), Some(&waits(3)));
    }

    #[test]
    fn what_moves_with_each_try_is_no_news_and_another_cause_is() {
        let refusal = |gate, value: &str, message: &str| Refusal {
            gate,
            value: Some(value.to_owned()),
            message: message.to_owned(),
        };
        use GateName::{Fetch, Load, Memory};
        for (one, other, alike) in [
            (refusal(Memory, "1Gi of 2Gi", "1Gi of 2Gi"), refusal(Memory, "1Gi of 1.5Gi", "1Gi of 1.5Gi"), true),
            (
                refusal(Memory, "1Gi of 2Gi", "1Gi of 2Gi"),
                refusal(Memory, "1Gi of 2Gi", "no memory can be read"),
                false,
            ),
            (refusal(Memory, "", "1Gi needed, 512Mi there"), refusal(Memory, "", "1.1Gi needed, 1Gi there"), true),
            (refusal(Memory, "", "1Gi of memory"), refusal(Memory, "", "1Gi of GPUs"), false),
            (
                refusal(Fetch, "", "h is silent (timed out); start"),
                refusal(Fetch, "", "h is silent (reset (104)); start"),
                true,
            ),
            (
                refusal(Fetch, "", "h is silent (timed out); start"),
                refusal(Fetch, "", "h refuses (timed out); start"),
                false,
            ),
            (refusal(Load, "worker died", "reset by peer"), refusal(Load, "worker died", "exited with status 1"), true),
            (refusal(Load, "worker died", "no"), refusal(Load, "no worker", "no"), false),
            (refusal(Fetch, "404", "refused with 404"), refusal(Fetch, "403", "refused with 403"), false),
            (refusal(Fetch, "no", "no"), refusal(Load, "no", "no"), false),
        ] {
            assert_eq!(refused_alike(&one, &other), alike, "{one:?} {other:?}");
        }
    }
}
