//! Whether a model fits into what the pod has left, and, where it does not, the memory with which it would.
//!
//! Absent: how much a model takes, and how much there is, which the module above knows.

use gantry_crds::status::GateName;
use gantry_gguf::fit::{Fit, verdict};

use super::PodMemory;
use crate::gates::report::{Refusal, quantity};

const MIB: u64 = 1 << 20;
/// What is in use differs by some MiB from one pod to the next, which is made with the limit that is told: that is the next
/// multiple of so many MiB, and one more.
const TOLD_STEP_MIB: u64 = 16;
/// No pod has more: past it nothing is looked for.
const LARGEST_POD_BYTES: u64 = 1 << 50;

/// Whose limit it is that is too low.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gates) enum LimitOf {
    /// A pod's, as its spec has it.
    Pod,
    /// This machine's, where a version is checked for no pod that has less.
    Machine,
}

/// As [`judge_of`], in a pod.
#[cfg(test)]
pub(in crate::gates) fn judge(
    required_bytes: u64,
    memory: PodMemory,
    front_bytes: impl Fn(u64) -> u64,
    headroom_ratio: f64,
) -> (Fit, Result<String, Refusal>) {
    judge_of(LimitOf::Pod, required_bytes, memory, front_bytes, headroom_ratio, |_| true)
}

/// Holds the need against what is left, of which the front may take `front_bytes` in a pod with such a limit. A limit is told that is
/// `enough` besides.
pub(in crate::gates) fn judge_of(
    limit_of: LimitOf,
    required_bytes: u64,
    memory: PodMemory,
    front_bytes: impl Fn(u64) -> u64,
    headroom_ratio: f64,
    enough: impl Fn(PodMemory) -> bool,
) -> (Fit, Result<String, Refusal>) {
    let raised = |limit_bytes: u64| {
        // What is in use stays so, whatever the limit is.
        let raised_bytes = limit_bytes.saturating_sub(memory.limit_bytes);
        PodMemory { limit_bytes, available_bytes: memory.available_bytes.saturating_add(raised_bytes) }
    };
    let fit_within = |limit_bytes: u64| {
        let left = raised(limit_bytes).beside_front(front_bytes(limit_bytes));
        verdict(required_bytes, left.available_bytes, headroom_ratio)
    };
    let fit = fit_within(memory.limit_bytes);
    let value = format!("{} of {}", quantity(required_bytes), quantity(fit.available));
    if fit.fits {
        return (fit, Ok(value));
    }
    let used_bytes = memory.limit_bytes.saturating_sub(memory.available_bytes);
    let (need, limit) = (quantity(required_bytes), quantity(memory.limit_bytes));
    let (used, front) = (quantity(used_bytes), quantity(front_bytes(memory.limit_bytes)));
    let percent = (headroom_ratio * 1e4).round() / 1e2;
    let is_enough = |limit_bytes| fit_within(limit_bytes).fits && enough(raised(limit_bytes));
    let raise = match least_limit(memory.limit_bytes, is_enough) {
        Some(enough_bytes) => {
            let short = quantity(enough_bytes - memory.limit_bytes);
            let told_mib = ((enough_bytes / MIB).div_ceil(TOLD_STEP_MIB) + 1) * TOLD_STEP_MIB;
            let where_it_is = match limit_of {
                LimitOf::Pod => "spec.resources.memory: ",
                LimitOf::Machine => "a machine with ",
            };
            format!("{short} are missing: {where_it_is}{told_mib}Mi would do; else ")
        }
        None => String::new(),
    };
    let (limited, lower) = match limit_of {
        LimitOf::Pod => {
            (format!("the pod's limit is {limit}, spec.resources.memory"), "the context size or the parallel sequences")
        }
        LimitOf::Machine => (
            format!("the memory of this machine is {limit}, and --memory-limit names no pod with less"),
            "--ctx-size or --parallel",
        ),
    };
    let message = format!(
        "the model needs {need} with {percent}% headroom, beside {used} in use and {front} that are kept for what connections, \
         requests, answers and chat templates may take; {limited}; {raise}lower {lower}, or choose a smaller quantisation"
    );
    (fit, Err(Refusal::new(GateName::Memory, message).with_value(value)))
}

/// The least limit of whole MiB above `limit_bytes` that is `enough`, if any is.
fn least_limit(limit_bytes: u64, enough: impl Fn(u64) -> bool) -> Option<u64> {
    let (mut too_little, mut most) = (limit_bytes / MIB, LARGEST_POD_BYTES / MIB);
    if !enough(most * MIB) {
        return None;
    }
    while too_little + 1 < most {
        let middle = too_little + (most - too_little) / 2;
        if enough(middle * MIB) { most = middle } else { too_little = middle }
    }
    Some(most * MIB)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_refusal_names_the_figures() {
        let memory = PodMemory { limit_bytes: 512 << 20, available_bytes: 140 << 20 };
        let (fit, result) = judge(200 << 20, memory, |_| 40 << 20, 0.05);
        let refusal = result.unwrap_err();
        assert!(!fit.fits);
        assert_eq!(refusal.value.as_deref(), Some("200Mi of 100Mi"));
        for part in ["512Mi", "5% headroom", "372Mi in use", "40.0Mi that are kept"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
        assert_eq!(judge(90 << 20, memory, |_| 40 << 20, 0.05).1.unwrap(), "90.0Mi of 100Mi");
    }

    /// What the front keeps grows with the limit, and may be more than all of it.
    #[test]
    fn what_is_missing_is_counted_from_the_limit_and_what_it_says_would_do() {
        let front_bytes = |limit_bytes: u64| (200 << 20) + limit_bytes / 8;
        for (limit_mib, used_mib) in [(100, 6), (150, 6), (150, 150), (260, 6), (2, 0)] {
            let memory = |limit_mib: u64| PodMemory {
                limit_bytes: limit_mib << 20,
                available_bytes: (limit_mib - used_mib) << 20,
            };
            let refusal = judge(45 << 20, memory(limit_mib), front_bytes, 0.1).1.unwrap_err();
            let would_do = refusal.message.split("spec.resources.memory: ").nth(1).unwrap();
            let would_do: u64 = would_do.split("Mi would do").next().unwrap().parse().unwrap();
            let fits = |limit_mib, used_mib| {
                let (limit_bytes, available_bytes) = (limit_mib << 20, (limit_mib - used_mib) << 20);
                judge(45 << 20, PodMemory { limit_bytes, available_bytes }, front_bytes, 0.1).0.fits
            };
            let least_mib = (limit_mib..=would_do).find(|&limit_mib| fits(limit_mib, used_mib)).unwrap();
            let missing = quantity((least_mib - limit_mib) << 20);
            assert!(refusal.message.contains(&format!("; {missing} are missing: ")), "{}", refusal.message);
            // The pod that is made with it may have more in use.
            assert!(fits(would_do, used_mib + 8) && would_do < least_mib + 2 * TOLD_STEP_MIB, "{}", refusal.message);
        }
    }

    #[test]
    fn a_machine_is_no_pod() {
        let memory = PodMemory { limit_bytes: 512 << 20, available_bytes: 140 << 20 };
        let told = judge_of(LimitOf::Machine, 200 << 20, memory, |_| 40 << 20, 0.05, |_| true).1.unwrap_err().message;
        for part in ["the memory of this machine is 512Mi", "--memory-limit", "a machine with 640Mi", "--ctx-size"] {
            assert!(told.contains(part), "{part:?} is not in {told}");
        }
        assert!(!told.contains("spec.") && !told.contains("the pod"), "{told}");
    }

    proptest! {
        /// Of two that are loaded one after the other, as a reference and a candidate are, the first's refusal counts both.
        #[test]
        fn what_is_told_to_be_enough_is(
            limit_mib in 1..2000_u64,
            used_mib in 0..100_u64,
            first_mib in 1..4000_u64,
            next_mib in 0..4000_u64,
            headroom_percent in 0..60_u64,
            divisor in 3..40_u64,
        ) {
            let headroom = headroom_percent as f64 / 100.0;
            let front_bytes = |limit_bytes: u64| (100 << 20) + limit_bytes / divisor / 2;
            let front_beside = |limit_bytes: u64| (120 << 20) + limit_bytes / divisor;
            let fits_next = |memory: PodMemory| {
                let available_bytes = memory.available_bytes.saturating_sub(first_mib << 20);
                judge(next_mib << 20, PodMemory { available_bytes, ..memory }, front_beside, headroom).0.fits
            };
            let with = |limit_mib: u64| {
                let available_bytes = limit_mib.saturating_sub(used_mib) << 20;
                let memory = PodMemory { limit_bytes: limit_mib << 20, available_bytes };
                let (fit, told) = judge_of(LimitOf::Pod, first_mib << 20, memory, front_bytes, headroom, fits_next);
                (fit.fits, fits_next(memory), told)
            };
            if let (false, _, Err(refusal)) = with(limit_mib.max(used_mib)) {
                let told = refusal.message.split("spec.resources.memory: ").nth(1).unwrap();
                let told: u64 = told.split("Mi would do").next().unwrap().parse().unwrap();
                let (fits, fits_next, _) = with(told);
                prop_assert!(fits && fits_next, "{}", refusal.message);
            }
        }
    }

    #[test]
    fn where_no_memory_would_do_none_is_named() {
        let memory = PodMemory { limit_bytes: 1 << 30, available_bytes: 1 << 30 };
        let refusal = judge(1 << 20, memory, |_| 0, 1.0).1.unwrap_err();
        assert!(!refusal.message.contains("would do") && refusal.message.ends_with("a smaller quantisation"));
    }
}
