//! What the parts of a step cost, measured while there is nothing else to do.
//!
//! A load ends with one decoded token, from which follows a first guess that is rather too dear; steps correct it from the
//! first one on. Steps of a load are much alike and hardly tell the costs apart, so batches of nobody's do, when the engine
//! is idle: one batch a turn ([`Scheduler::measure`]), the most telling ones first, none that is thought to take longer
//! than the longest step. A request or a probe that comes ends the one that is computed ([`crate::interrupt`]), and it is
//! computed anew later. Nothing that requests left is dropped for it: what has no room is left out.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Scheduler;
use super::fill::WorthFilling;
use crate::backend::Backend;
use crate::budget::{CellSteps, Demand, MOST_READING_MS, StepWork, kilocells};
use crate::finite::NoNumbers;
use crate::interrupt::Interrupt;
use crate::ladder::DegradationLevel;
use crate::params::MAX_DRAFT_CATCH_UP_TOKENS;

/// Rows with logits of one of the batches: as many as tell a row's cost from a step's.
const MANY_ROWS: u32 = 16;
/// Tokens that others are read behind: llama.cpp looks at 256 cells at least, so that fewer tell nothing.
const DEPTH: u32 = 512;
/// Tokens of the batch that is decoded behind those and in their place, which tells what it costs to look at them.
const BEHIND: u32 = 16;
/// How often a batch is decoded: of what it took the least counts, since who shares the machine makes it longer, and never
/// shorter.
const TIMES: usize = 3;
/// Groups that are measured: with more rows it is as in the second.
pub(super) const MEASURED_GROUPS: u32 = 2;
/// How often what was read to stand behind may be lost to requests that came; then the cost of cells is left to steps.
const MAX_READINGS: u32 = 3;
/// Single tokens of the small model: until one that was held up is no longer believed.
const DRAFT_TOKENS: usize = 6;

/// A batch, or what follows from some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    /// So many rows with logits.
    Rows(u32),
    /// A few tokens of a prompt, at its beginning.
    Near,
    /// Tells the budget of these.
    LearnSteps,
    /// So many tokens of a prompt, behind those that were read before.
    Read(u32),
    /// A few behind all of them.
    Deep,
    /// Tells the budget of these, too.
    LearnCells,
    /// Finds out which numbers of rows are worth filling.
    LearnGroups,
    /// So many tokens of the small model's.
    Draft(u32),
}

impl Task {
    /// The words for it in logs.
    fn as_str(self) -> &'static str {
        match self {
            Self::Rows(_) => "rows",
            Self::Near => "a prompt's beginning",
            Self::LearnSteps => "steps",
            Self::Read(_) => "a prompt",
            Self::Deep => "a prompt's end",
            Self::LearnCells => "cells",
            Self::LearnGroups => "groups of rows",
            Self::Draft(_) => "the draft model",
        }
    }
}

/// What is yet to be measured, and what was.
#[derive(Default)]
pub(super) struct Measuring {
    left: VecDeque<Task>,
    /// The least that each took.
    took: BTreeMap<Task, Duration>,
    /// What a batch that was read at the beginning of a prompt was, and took.
    read: Option<(StepWork, Duration)>,
    /// Holds what was read.
    sequence: Option<u32>,
    /// What it is to hold.
    depth: u32,
    readings: u32,
    spent: Duration,
}

impl Measuring {
    pub(super) fn is_done(&self) -> bool {
        self.left.is_empty()
    }
}

impl<B: Backend> Scheduler<B> {
    /// Has everything be measured.
    pub(super) fn plan_measuring(&mut self) {
        let mut left = VecDeque::new();
        let times = |task: Task| std::iter::repeat_n(task, TIMES);
        left.extend(times(Task::Rows(1)).chain(times(Task::Rows(self.many_rows()))).chain(times(Task::Near)));
        left.push_back(Task::LearnSteps);
        // Round by round: what slows the machine down for a moment then slows down all of them.
        let most = self.most_rows_to_group();
        left.extend((0..TIMES).flat_map(|_| 2..=most).map(Task::Rows));
        left.push_back(Task::LearnGroups);
        if self.draft.is_some() {
            left.push_back(Task::Draft(MAX_DRAFT_CATCH_UP_TOKENS));
            left.extend([Task::Draft(1); DRAFT_TOKENS]);
        }
        self.measuring = Measuring { left, ..Measuring::default() };
        self.stats.measures.store(true, Relaxed);
    }

    /// Whether there is something to measure, and time for it.
    pub(crate) fn may_measure(&self) -> bool {
        let is_idle = !self.has_work() && self.stats.in_flight.load(Relaxed) == 0;
        let is_well = self.stats.broken.get().is_none() && self.stats.level() == DegradationLevel::Normal;
        !self.measuring.is_done() && is_idle && is_well && !self.shutting_down()
    }

    /// Computes one batch, unless somebody comes.
    pub(crate) fn measure(&mut self, interrupt: &Interrupt) {
        let Some(task) = self.measuring.left.pop_front() else { return };
        match task {
            Task::LearnSteps => self.learn_steps(),
            Task::LearnCells => self.learn_cells(),
            Task::LearnGroups => self.learn_groups(),
            Task::Rows(_) | Task::Near | Task::Read(_) | Task::Deep | Task::Draft(_) => self.try_task(task, interrupt),
        }
        if self.measuring.is_done() {
            self.stats.measures.store(false, Relaxed);
            let spent_ms = self.measuring.spent.as_secs_f64() * 1e3;
            tracing::debug!(spent_ms, "what the parts of a step cost has been measured");
        }
    }

    fn try_task(&mut self, task: Task, interrupt: &Interrupt) {
        let starts = interrupt.begin_idle_work();
        // Who was accepted before that has interrupted nothing.
        if !starts || self.stats.in_flight.load(Relaxed) > 0 {
            interrupt.end_idle_work();
            self.measuring.left.push_front(task);
            return;
        }
        let started = Instant::now();
        let done = self.compute(task);
        let took = started.elapsed();
        let interrupted = interrupt.end_idle_work();
        self.measuring.spent += took;
        match done {
            Ok(true) => {
                let least = self.measuring.took.entry(task).or_insert(Duration::MAX);
                *least = took.min(*least);
            }
            Ok(false) => {}
            Err(_) if interrupted => {
                self.measuring.left.push_front(task);
                self.drop_what_was_read();
            }
            Err(error) => {
                tracing::warn!(
                    %error,
                    task = task.as_str(),
                    "what steps cost cannot be measured, and is learnt from steps alone"
                );
                self.drop_what_was_read();
                self.measuring.left.clear();
            }
        }
    }

    /// False: there is no room for it, or it would take too long.
    fn compute(&mut self, task: Task) -> Result<bool, NoNumbers> {
        let (tokens, work) = match task {
            Task::Rows(rows) => (rows, StepWork { decode_rows: rows, ..StepWork::default() }),
            Task::Read(tokens) => (tokens, reads(tokens)),
            Task::Near | Task::Deep => (self.tokens_behind(), reads(self.tokens_behind())),
            // It has a cache of its own.
            Task::Draft(_) | Task::LearnSteps | Task::LearnCells | Task::LearnGroups => (0, StepWork::default()),
        };
        let is_room = !self.limits.unified || self.kv.free_cells() >= u64::from(tokens);
        let is_short = tokens <= 1 || self.budget.cost().step_ms(work) <= MOST_READING_MS;
        let reads_on = matches!(task, Task::Read(_) | Task::Deep);
        if reads_on && self.measuring.sequence.is_none() {
            self.measuring.sequence = self.kv.empty();
        }
        let held = self.measuring.sequence.map_or(0, |sequence| self.kv.len(sequence));
        match task {
            Task::Draft(tokens) => {
                let Some(draft) = &mut self.draft else { return Ok(false) };
                let measured = draft.measure(tokens).map(|()| true);
                // It is no step's.
                draft.take_spent();
                return measured;
            }
            Task::Read(tokens) if is_room && held + tokens <= self.limits.positions => {
                let Some(sequence) = self.measuring.sequence else { return Ok(false) };
                let started = Instant::now();
                self.decode_behind(sequence, tokens, 1)?;
                if held == 0 {
                    self.measuring.read = Some((reads(tokens), started.elapsed()));
                }
            }
            Task::Deep if is_room && held >= self.measuring.depth => {
                let Some(sequence) = self.measuring.sequence else { return Ok(false) };
                self.kv.truncate(sequence, self.measuring.depth);
                self.decode_behind(sequence, tokens, 1)?;
            }
            Task::Near if is_room && is_short => {
                let Some(sequence) = self.kv.empty() else { return Ok(false) };
                let done = self.decode_behind(sequence, tokens, 1);
                self.kv.clear(sequence);
                done?;
            }
            Task::Rows(rows) if is_room && is_short && self.place_of_probe(rows).is_some() => {
                self.decode_probe(rows, rows)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A request is there: what was read is in its way.
    pub(super) fn drop_what_was_read(&mut self) {
        let Some(sequence) = self.measuring.sequence.take() else { return };
        self.kv.clear(sequence);
        let is_of_cells = |task: &Task| matches!(task, Task::Read(_) | Task::Deep | Task::LearnCells);
        self.measuring.left.retain(|task| !is_of_cells(task));
        self.plan_reading();
    }

    /// Has a prompt's beginning be read, in parts that take no longer than a step, and a few tokens behind it.
    fn plan_reading(&mut self) {
        let behind = self.tokens_behind();
        let room = self.limits.positions.saturating_sub(behind);
        let batch = self.limits.batch_tokens.min(room).min(self.budget.prefill_tokens(&Demand::default()));
        if batch == 0 {
            return;
        }
        let parts = DEPTH.min(room).div_euclid(batch).max(1);
        self.measuring.readings += 1;
        if self.measuring.readings > MAX_READINGS {
            return;
        }
        let looks = if self.limits.reusable { TIMES } else { 0 };
        self.measuring.depth = parts * batch;
        let reading = std::iter::repeat_n(Task::Read(batch), if looks > 0 { parts as usize } else { 1 });
        let all: Vec<Task> = reading.chain(std::iter::repeat_n(Task::Deep, looks)).chain([Task::LearnCells]).collect();
        all.into_iter().rev().for_each(|task| self.measuring.left.push_front(task));
    }

    fn learn_steps(&mut self) {
        let steps = self.measured_steps();
        if !steps.is_empty() {
            self.budget.calibrate(&steps, None);
        }
        self.plan_reading();
    }

    fn learn_cells(&mut self) {
        let (behind, depth, looks) = (self.tokens_behind(), self.measuring.depth, self.part_looks());
        let took = |task: Task| self.measuring.took.get(&task).copied();
        let cells = took(Task::Near).zip(took(Task::Deep)).map(|(near, deep)| CellSteps {
            near: (attended(0, behind), near),
            deep: (attended(depth, behind) + looks * kilocells(depth), deep),
        });
        let steps = self.measured_steps();
        if !steps.is_empty() {
            self.budget.calibrate(&steps, cells);
        }
        if let Some(sequence) = self.measuring.sequence.take() {
            self.kv.clear(sequence);
        }
    }

    /// The batches that tell the costs apart, but for that of cells.
    fn measured_steps(&self) -> Vec<(StepWork, Duration)> {
        let rows = |rows| StepWork { decode_rows: rows, kilocells: attended(0, rows), ..StepWork::default() };
        let many = self.many_rows();
        let steps =
            [(Task::Near, reads(self.tokens_behind())), (Task::Rows(many), rows(many)), (Task::Rows(1), rows(1))];
        let took = |(task, work)| Some((work, *self.measuring.took.get(&task)?));
        self.measuring.read.into_iter().chain(steps.into_iter().filter_map(took)).collect()
    }

    fn learn_groups(&mut self) {
        let most = self.most_rows_to_group();
        let took = |rows: u32| self.measuring.took.get(&Task::Rows(rows)).copied();
        let Some(took) = (2..=most).map(took).collect::<Option<Vec<Duration>>>().filter(|took| !took.is_empty()) else {
            return;
        };
        let took: Vec<Duration> = [Duration::MAX; 2].into_iter().chain(took).collect();
        self.worth_filling = WorthFilling::new(self.limits.group_rows, &took, self.group_ms());
        let gains_ms: Vec<String> = self.worth_filling.gains_ms.iter().map(|ms| format!("{ms:.2}")).collect();
        tracing::debug!(gains_ms = gains_ms.join(" "), "what is gained by filling so many rows to a whole group");
    }

    /// The most rows of which it is found out whether they are worth filling; below 2: of none.
    fn most_rows_to_group(&self) -> u32 {
        let (group, limits) = (self.limits.group_rows, self.limits);
        let rooms = [MEASURED_GROUPS * group, limits.sequences, limits.outputs, limits.batch_tokens, limits.positions];
        let most = rooms.into_iter().min().unwrap_or(0).min(self.parallel.next_multiple_of(group));
        if group < 2 || self.parallel < 2 || most < group || !limits.reusable { 0 } else { most }
    }

    fn many_rows(&self) -> u32 {
        MANY_ROWS.min(self.limits.outputs).min(self.limits.batch_tokens).min(self.limits.positions)
    }

    /// Tokens of the small batch.
    fn tokens_behind(&self) -> u32 {
        BEHIND.min(self.limits.positions / 2).min(self.limits.batch_tokens).max(1)
    }
}

fn reads(tokens: u32) -> StepWork {
    StepWork { decode_rows: 1, prefill_tokens: tokens.saturating_sub(1), ..StepWork::default() }
}

/// Cells that so many tokens look at behind `held` others, in thousands.
fn attended(held: u32, tokens: u32) -> f64 {
    (held..held + tokens).map(kilocells).sum()
}
