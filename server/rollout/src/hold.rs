//! What to do next where one version has to go before another one is loaded: [`plan`](crate::plan::plan) for HoldRequests.
//!
//! ```text
//!  v1 answers            requests wait                              v2 answers
//!  v2 is checked ──────▶ v1 ends its last ones, is unloaded ──────▶
//!                        v2 is loaded, asked ──┐
//!                                     refused: v1 is loaded ──────▶ v1 answers
//! ```
//!
//! Rules: nothing that answers is unloaded before all that can be known of the other version without loading it is right, and a
//! candidate only in the pod whose turn it is; never is more than one loaded; what was loaded answers as soon as it has passed, and if
//! it is refused, the version that the status names answers again, or else the one that did before; what was refused so is not
//! unloaded for a second time. Going back is the same thing with the versions exchanged. Called again after its actions were
//! carried out, it asks for nothing.

use crate::desired::Desired;
use crate::phase::Phase;
use crate::plan::{Action, Current, Known, Purpose, Route};

/// Says what to do next.
pub(crate) fn plan(desired: &Desired, current: &Current) -> Vec<Action> {
    let asked = Asked { desired, current };
    let goal = asked.goal();
    let route = asked.route(goal);
    let mut actions = Vec::new();
    if route != current.route {
        actions.push(Action::Route(route.clone()));
    }
    let dropped = asked.drops(goal, &route);
    let unloads = dropped.iter().any(|action| matches!(action, Action::Retire { .. } | Action::Cancel { .. }));
    actions.extend(dropped);
    let busy =
        |known: &Known| matches!(known.phase, Phase::Preparing | Phase::Checking | Phase::Cancelling | Phase::Retiring);
    if !unloads && !current.versions.values().any(busy) {
        actions.extend(asked.prepares(goal, &route));
    }
    actions
}

/// What is asked, and what is there.
#[derive(Clone, Copy)]
struct Asked<'a> {
    desired: &'a Desired,
    current: &'a Current,
}

impl<'a> Asked<'a> {
    fn known(self, version: &str) -> Option<&'a Known> {
        self.current.versions.get(version)
    }

    fn is_ready(self, version: &str) -> bool {
        self.known(version).is_some_and(|known| matches!(known.phase, Phase::Ready | Phase::Checking))
    }

    /// The candidate, where this release knows all of it.
    fn candidate(self) -> Option<&'a str> {
        let version = self.desired.candidate.as_ref()?.version.as_str();
        let is_known = self.desired.versions.contains_key(version) && !self.desired.unknown.contains_key(version);
        (is_known && self.desired.active.as_deref() != Some(version)).then_some(version)
    }

    /// Whether the last thing that was done with the version was done for the attempt that is asked for.
    fn is_judged(self, version: &str) -> bool {
        let attempt = self.desired.candidate.as_ref().map(|candidate| candidate.attempt);
        self.known(version).is_some_and(|known| known.attempt == attempt)
    }

    /// Whether the candidate passed every gate for this attempt.
    fn is_proved(self, version: &str) -> bool {
        self.is_judged(version) && self.known(version).is_some_and(|known| known.phase == Phase::Ready)
    }

    /// Whether it is not to be had for now.
    fn is_refused(self, version: &str) -> bool {
        self.known(version).is_some_and(|known| known.phase == Phase::Refused && !known.retry_due && !known.outdated)
    }

    /// Whether it could not be loaded although nothing else was: what can be had instead comes first for a while.
    fn is_in_vain(self, version: &str) -> bool {
        self.known(version).is_some_and(|known| known.phase == Phase::Refused && known.in_vain && !known.outdated)
    }

    /// Whether a pod that comes up waits for the active version: not while it cannot be had, nor for another try at it while the
    /// candidate is on its way instead.
    fn is_awaited(self, active: &str) -> bool {
        let instead = self.candidate().and_then(|candidate| self.known(candidate));
        let comes_instead = instead.is_some_and(|known| matches!(known.phase, Phase::Preparing | Phase::Ready));
        let was_refused = self.known(active).is_some_and(|known| known.phase == Phase::Refused);
        !(self.is_refused(active) || (was_refused && comes_instead))
    }

    /// Whether it may be checked in a pod that answers with nothing, since what is to answer there cannot be had.
    fn is_the_cure(self, version: &str, goal: Option<&str>) -> bool {
        let goal_is_away = goal.and_then(|goal| self.known(goal)).is_some_and(|known| known.phase == Phase::Refused);
        goal_is_away && !self.current.route.is_held() && self.candidate() == Some(version)
    }

    /// What answered before requests began to wait, while they do.
    fn answered_before(self) -> Option<&'a str> {
        let route = &self.current.route;
        let before = route.held_from.as_deref().filter(|_| route.is_held());
        before.filter(|name| self.desired.versions.contains_key(*name))
    }

    /// What is to answer.
    fn goal(self) -> Option<&'a str> {
        let answers = self.current.route.active.as_deref();
        let active = self.desired.active.as_deref().filter(|name| {
            // What is answered now is right, and that version would be answered otherwise than it was judged.
            let is_known = !self.desired.unknown.contains_key(*name) || answers.is_none();
            self.desired.versions.contains_key(*name) && is_known
        });
        // A pod that comes up has what the status says first, unless it cannot be had.
        let begins = answers.is_none() && !self.current.route.is_held();
        let waits_for_active = begins && active.is_some_and(|active| self.is_awaited(active));
        let candidate = self.candidate().filter(|candidate| {
            let refused = self.is_judged(candidate)
                && self.known(candidate).is_some_and(|known| known.phase == Phase::Refused && !known.outdated);
            let in_turn = self.desired.has_turn && !refused && !waits_for_active;
            // It goes on answering while the turn is another pod's, and while it is asked once more.
            in_turn || self.is_proved(candidate) || (answers == Some(*candidate) && self.is_ready(candidate))
        });
        let goal = candidate.or(active);
        if answers.is_some() {
            return goal;
        }
        // Nobody is left without an answer for a version that is not to be had.
        let instead = self
            .answered_before()
            .filter(|before| self.known(before).is_none_or(|known| known.phase != Phase::Refused));
        match goal {
            Some(goal) if self.is_refused(goal) || self.is_in_vain(goal) => instead.or(Some(goal)),
            Some(goal) => Some(goal),
            None => instead,
        }
    }

    fn route(self, goal: Option<&str>) -> Route {
        let Current { route: now, .. } = self.current;
        // What another strategy has loaded beside it. Beside nothing it would keep the room from what is to answer.
        let keeps = |active: &Option<String>| {
            let stays = active.is_some() && now.active == *active;
            let previous = now.previous.clone().filter(|previous| self.is_ready(previous) && stays);
            previous.filter(|previous| self.desired.previous.as_ref() == Some(previous))
        };
        if let Some(goal) = goal.filter(|goal| self.is_ready(goal) && self.may_answer(goal)) {
            let active = Some(goal.to_owned());
            return Route { previous: keeps(&active), active, canary: None, held_from: None };
        }
        match &now.active {
            Some(answers)
                if goal.is_some_and(|goal| goal != answers && (self.is_due(goal) || self.is_left(answers, goal))) =>
            {
                Route { active: None, canary: None, previous: None, held_from: Some(answers.clone()) }
            }
            active => {
                let (previous, held_from) = (keeps(active), now.held_from.clone());
                Route { active: active.clone(), canary: None, previous, held_from }
            }
        }
    }

    /// Whether a version that is loaded may answer: a candidate must have passed every gate, unless it does so already.
    fn may_answer(self, version: &str) -> bool {
        self.candidate() != Some(version)
            || self.is_proved(version)
            || self.current.route.active.as_deref() == Some(version)
    }

    /// Whether what answers goes for this version now.
    fn is_due(self, goal: &str) -> bool {
        let is_candidate = self.candidate() == Some(goal);
        let is_checked = self.known(goal).is_some_and(|known| {
            known.phase == Phase::Checked && !known.outdated && (!is_candidate || self.is_judged(goal))
        });
        let is_busy =
            |known: &Known| !matches!(known.phase, Phase::Ready | Phase::Checked | Phase::Refused | Phase::Waiting);
        is_checked && !self.current.versions.values().any(is_busy)
    }

    /// Whether what answers is given up, and answers nobody by now: then nothing is lost by not knowing more of what is to come.
    fn is_left(self, answers: &str, goal: &str) -> bool {
        let is_down = self.known(answers).is_none_or(|known| !known.worker_up);
        is_down && self.desired.active.as_deref() == Some(goal) && !self.is_refused(goal) && !self.is_in_vain(goal)
    }

    /// What nobody asks for any more, and what makes room.
    fn drops(self, goal: Option<&str>, route: &Route) -> Vec<Action> {
        let mut actions = Vec::new();
        for (name, known) in &self.current.versions {
            let version = name.clone();
            let is_goal = goal == Some(name.as_str());
            let answers = route.active.as_ref() == Some(name);
            let is_candidate = self.candidate() == Some(name.as_str());
            let stale = is_candidate && !self.is_judged(name);
            let unasked = !is_goal && !self.desired.names(name);
            match known.phase {
                Phase::Preparing
                    if unasked
                        || stale
                        || known.waits_to_be_judged(name, self.desired)
                        || known.outdated
                        || (route.active.is_none() && !is_goal && !self.is_the_cure(name, goal)) =>
                {
                    actions.push(Action::Cancel { version });
                }
                Phase::Checking if !is_goal || stale || known.waits_to_be_judged(name, self.desired) => {
                    actions.push(Action::Cancel { version });
                }
                // Never is more than one loaded, but for what another strategy left as the way back.
                Phase::Ready if !answers && !is_goal && route.previous.as_ref() != Some(name) => {
                    actions.push(Action::Retire { version });
                }
                Phase::Ready if is_goal && !answers && !self.may_answer(name) => {
                    actions.push(Action::Retire { version });
                }
                // Who forgot that it was refused would load it again, and so would the version for which it is tried, for ever.
                Phase::Refused if self.answered_before() == Some(name) => {}
                Phase::Checked | Phase::Waiting | Phase::Refused if unasked => actions.push(Action::Forget { version }),
                _ => {}
            }
        }
        actions
    }

    /// Begins with what is to answer, or checks it beside what does.
    fn prepares(self, goal: Option<&str>, route: &Route) -> Option<Action> {
        let attempt = self.desired.candidate.as_ref().map(|candidate| candidate.attempt);
        let action = |version: &str, loads: bool| {
            let purpose = match attempt.filter(|_| self.candidate() == Some(version)) {
                Some(attempt) => Purpose::Candidate { attempt },
                None => Purpose::Restore,
            };
            Action::Prepare { version: version.to_owned(), purpose, loads }
        };
        let Some(answers) = route.active.as_deref() else {
            let is_empty = !self.current.versions.values().any(|known| known.phase == Phase::Ready);
            let aim = goal;
            let goal = aim.filter(|goal| is_empty && !self.is_refused(goal)).map(|goal| action(goal, true));
            // Where the active version is not to be had, the candidate may be what helps.
            let candidate = self.candidate().filter(|one| self.is_the_cure(one, aim) && self.is_to_be_checked(one));
            return goal.or_else(|| candidate.map(|candidate| action(candidate, false)));
        };
        // What answers is asked once more, for another attempt.
        if self.candidate() == Some(answers) {
            return (self.desired.has_turn && !self.is_judged(answers)).then(|| action(answers, true));
        }
        // What is to answer is checked first, and then the candidate, whosever turn it is.
        let next = [goal, self.candidate()].into_iter().flatten();
        let next = next.filter(|next| *next != answers).find(|next| self.is_to_be_checked(next))?;
        Some(action(next, false))
    }

    fn is_to_be_checked(self, version: &str) -> bool {
        let is_candidate = self.candidate() == Some(version);
        match self.known(version) {
            None => true,
            Some(known) if is_candidate && !self.is_judged(version) => known.phase != Phase::Ready,
            Some(known) => match known.phase {
                Phase::Checked => known.outdated,
                Phase::Waiting => known.outdated || known.retry_due,
                Phase::Refused => !known.in_vain && (known.outdated || (known.retry_due && !is_candidate)),
                _ => false,
            },
        }
    }
}

#[cfg(test)]
#[path = "hold_tests.rs"]
mod tests;
