//! Follows a text through a grammar: the same pushdown automaton as llama.cpp's, with an end to its work.
//!
//! A *stack* is a list of places in the rules, the innermost last, whose innermost is a terminal (or none is left: the
//! text is complete). A *state* is the set of stacks that a text can lead to. Both are interned, so equal ones have
//! equal numbers, and what a state becomes after a character is worked out once for all characters that the grammar does
//! not tell apart. An ambiguous grammar can have more stacks than memory: past [`MAX_STACKS`], or [`MAX_STEPS`] for one
//! token, an operation fails instead, and names the rule in which it was.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::GrammarError;
use super::rules::{Kind, Rules};
use crate::model::Token;

/// The most stacks of one state.
pub const MAX_STACKS: usize = 4096;
/// The most steps for one token: whether it may come, which others may, and what follows it. A step of the dearest grammars
/// took 130 to 180 ns, so that these are at most 5 ms; ordinary grammars take up to 1,500. The walk over the vocabulary, the
/// same for every grammar, is beside them.
pub const MAX_STEPS: u64 = 25_000;
/// States, stacks and transitions that are remembered; past that all but the current states are forgotten between two
/// tokens.
const REMEMBERED_STATES: usize = if cfg!(test) { 256 } else { 2048 };
const REMEMBERED_STACKS: usize = 1 << 17;
pub(super) const REMEMBERED_OTHERS: usize = 1 << 17;

const UNKNOWN: u32 = u32::MAX;
/// The state without stacks: no text leads to it.
pub(super) const DEAD: u32 = 0;
/// The stack without places.
const COMPLETE: u32 = 0;

/// A cheap hash for small integers that no one else chooses.
#[derive(Clone, Copy, Default)]
pub(super) struct IntHasher(u64);

impl Hasher for IntHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(23) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type IntMap<K, V> = HashMap<K, V, BuildHasherDefault<IntHasher>>;

/// The bytes of a character that a token began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Partial {
    value: u32,
    remaining: u8,
    /// The lowest character that so many bytes may encode.
    lowest: u32,
}

/// What a byte makes of a text.
pub(super) enum Decoded {
    Character(u32),
    Partial(Partial),
    Invalid,
}

impl Partial {
    pub(super) fn is_whole(self) -> bool {
        self.remaining == 0
    }

    pub(super) fn push(self, byte: u8) -> Decoded {
        if self.remaining > 0 {
            if byte & 0xc0 != 0x80 {
                return Decoded::Invalid;
            }
            let (value, remaining) = (self.value << 6 | u32::from(byte & 0x3f), self.remaining - 1);
            if remaining > 0 {
                let partial = Self { value, remaining, lowest: self.lowest };
                let (low, high) = partial.range();
                // Too long an encoding, past the last character, or a surrogate: no byte makes it whole.
                let whole = low <= high && !(0xd800..=0xdfff).contains(&low);
                return if whole { Decoded::Partial(partial) } else { Decoded::Invalid };
            }
            return if value >= self.lowest && char::from_u32(value).is_some() {
                Decoded::Character(value)
            } else {
                Decoded::Invalid
            };
        }
        let partial =
            |bits: u8, remaining, lowest| Decoded::Partial(Self { value: u32::from(byte & bits), remaining, lowest });
        match byte {
            // As in llama.cpp, no text holds a NUL.
            1..=0x7f => Decoded::Character(u32::from(byte)),
            0xc2..=0xdf => partial(0x1f, 1, 0x80),
            0xe0..=0xef => partial(0x0f, 2, 0x800),
            0xf0..=0xf4 => partial(0x07, 3, 0x1_0000),
            _ => Decoded::Invalid,
        }
    }

    /// The characters that it can become.
    fn range(self) -> (u32, u32) {
        let bits = u32::from(self.remaining) * 6;
        let low = self.value << bits;
        (low.max(self.lowest), (low | ((1 << bits) - 1)).min(0x10_ffff))
    }
}

#[derive(Debug)]
pub(super) struct Machine {
    rules: Arc<Rules>,
    /// Stacks: the innermost place, and the stack around it. The first stands for the one without places.
    stacks: Vec<(u32, u32)>,
    stack_numbers: IntMap<(u32, u32), u32>,
    states: Vec<Arc<[u32]>>,
    state_numbers: HashMap<Arc<[u32]>, u32>,
    /// For each state and ASCII character the next state.
    ascii: Vec<[u32; 128]>,
    /// The same for each run of characters that the grammar does not tell apart.
    others: IntMap<(u32, u32), u32>,
    steps_left: u64,
    /// Where the last step was.
    place: u32,
}

impl Machine {
    /// A machine, and the state that it starts in.
    pub(super) fn new(rules: Arc<Rules>) -> Result<(Self, u32), GrammarError> {
        let mut machine = Self::empty(rules);
        machine.begin();
        let (mut stacks, mut seen) = (Vec::new(), HashSet::default());
        for at in machine.rules.clone().alternatives(machine.rules.root) {
            let stack = machine.push_unless_end(at, COMPLETE);
            machine.expand(stack, &mut seen, &mut stacks)?;
        }
        let state = machine.state(stacks)?;
        Ok((machine, state))
    }

    fn empty(rules: Arc<Rules>) -> Self {
        let mut machine = Self {
            rules,
            stacks: vec![(UNKNOWN, UNKNOWN)],
            stack_numbers: IntMap::default(),
            states: Vec::new(),
            state_numbers: HashMap::new(),
            ascii: Vec::new(),
            others: IntMap::default(),
            steps_left: 0,
            place: 0,
        };
        machine.intern_state(Vec::new());
        machine
    }

    /// Starts a token with its full allowance of steps.
    pub(super) fn begin(&mut self) {
        self.steps_left = MAX_STEPS;
    }

    /// A machine that knows only this state, and the state's number in it.
    pub(super) fn forked(&self, state: u32) -> (Self, u32) {
        let (fork, states) = self.forked_all(&[state]);
        (fork, states[0])
    }

    /// The same for several states.
    fn forked_all(&self, states: &[u32]) -> (Self, Vec<u32>) {
        let mut fork = Self::empty(self.rules.clone());
        // Stacks share what is around them, so each is copied once.
        let mut numbers: IntMap<u32, u32> = IntMap::default();
        numbers.insert(COMPLETE, COMPLETE);
        let mut places = Vec::new();
        let mut copy = |state: &u32| {
            let mut stacks = Vec::new();
            for &stack in self.states[*state as usize].iter() {
                let mut at = stack;
                let mut copied = loop {
                    if let Some(&copied) = numbers.get(&at) {
                        break copied;
                    }
                    let (place, around) = self.stacks[at as usize];
                    places.push((at, place));
                    at = around;
                };
                while let Some((at, place)) = places.pop() {
                    copied = fork.push(place, copied);
                    numbers.insert(at, copied);
                }
                stacks.push(copied);
            }
            stacks.sort_unstable();
            fork.intern_state(stacks)
        };
        let states = states.iter().map(&mut copy).collect();
        fork.steps_left = self.steps_left;
        fork.place = self.place;
        (fork, states)
    }

    /// Forgets what is not needed from these states on, where that is much, and renumbers them. Answers the steps that
    /// it took.
    pub(super) fn tidy<'a>(&mut self, states: impl Iterator<Item = &'a mut u32>) -> u64 {
        if self.states.len() <= REMEMBERED_STATES
            && self.stacks.len() <= REMEMBERED_STACKS
            && self.others.len() <= REMEMBERED_OTHERS
        {
            return 0;
        }
        let states: Vec<&mut u32> = states.collect();
        let (fork, numbers) = self.forked_all(&states.iter().map(|state| **state).collect::<Vec<_>>());
        *self = fork;
        for (state, number) in states.into_iter().zip(numbers) {
            *state = number;
        }
        self.stacks.len() as u64
    }

    /// What is remembered: states, stacks, and transitions.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> [usize; 3] {
        [self.states.len(), self.stacks.len(), self.others.len()]
    }

    pub(super) fn spend(&mut self, steps: u64) -> Result<(), GrammarError> {
        let left = self.steps_left.checked_sub(steps);
        self.steps_left = left.ok_or_else(|| self.too_complex("steps for one token", MAX_STEPS))?;
        Ok(())
    }

    /// Steps of this token so far.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        MAX_STEPS - self.steps_left
    }

    fn step(&mut self, place: u32) -> Result<(), GrammarError> {
        self.place = place;
        self.spend(1)
    }

    fn too_complex(&self, what: &'static str, limit: u64) -> GrammarError {
        GrammarError::TooComplex { rule: self.rules.name_at(self.place).to_owned(), what, limit }
    }

    fn push(&mut self, place: u32, around: u32) -> u32 {
        let next = self.stacks.len() as u32;
        let number = *self.stack_numbers.entry((place, around)).or_insert(next);
        if number == next {
            self.stacks.push((place, around));
        }
        number
    }

    fn push_unless_end(&mut self, place: u32, around: u32) -> u32 {
        if self.rules.element(place).ends() { around } else { self.push(place, around) }
    }

    /// Adds to `out` the stacks with a terminal innermost that this one stands for.
    fn expand(
        &mut self,
        stack: u32,
        seen: &mut HashSet<u32, BuildHasherDefault<IntHasher>>,
        out: &mut Vec<u32>,
    ) -> Result<(), GrammarError> {
        let rules = self.rules.clone();
        let mut todo = vec![stack];
        while let Some(stack) = todo.pop() {
            let (place, around) = self.stacks[stack as usize];
            self.step(if stack == COMPLETE { self.place } else { place })?;
            if !seen.insert(stack) {
                continue;
            }
            if stack == COMPLETE || rules.element(place).kind != Kind::Rule {
                if out.len() >= MAX_STACKS {
                    return Err(self.too_complex("ways to read a text", MAX_STACKS as u64));
                }
                out.push(stack);
                continue;
            }
            let after = self.push_unless_end(place + 1, around);
            for at in rules.alternatives(rules.element(place).value) {
                self.step(place)?;
                todo.push(self.push_unless_end(at, after));
            }
        }
        Ok(())
    }

    fn state(&mut self, mut stacks: Vec<u32>) -> Result<u32, GrammarError> {
        stacks.sort_unstable();
        stacks.dedup();
        // Each state may hold as many stacks as there may be: count them.
        self.spend(stacks.len() as u64)?;
        Ok(self.intern_state(stacks))
    }

    fn intern_state(&mut self, stacks: Vec<u32>) -> u32 {
        let stacks: Arc<[u32]> = stacks.into();
        let next = self.states.len() as u32;
        let number = *self.state_numbers.entry(stacks.clone()).or_insert(next);
        if number == next {
            self.states.push(stacks);
            self.ascii.push([UNKNOWN; 128]);
        }
        number
    }

    /// The state after one more character.
    pub(super) fn next(&mut self, state: u32, character: u32) -> Result<u32, GrammarError> {
        let known = self.ascii[state as usize].get(character as usize).copied().unwrap_or(UNKNOWN);
        if known != UNKNOWN {
            return Ok(known);
        }
        let alike = (state, self.rules.run_of(character));
        let next = match self.others.get(&alike) {
            Some(&next) => next,
            None => self.look(state, character)?,
        };
        self.others.insert(alike, next);
        if let Some(slot) = self.ascii[state as usize].get_mut(character as usize) {
            *slot = next;
        }
        Ok(next)
    }

    /// The same, worked out.
    fn look(&mut self, state: u32, character: u32) -> Result<u32, GrammarError> {
        let (mut stacks, mut seen) = (Vec::new(), HashSet::default());
        for &stack in self.states[state as usize].clone().iter() {
            let (place, around) = self.stacks[stack as usize];
            if stack == COMPLETE {
                continue;
            }
            self.step(place)?;
            if self.rules.matches(place, character, character) {
                let stack = self.push_unless_end(place + 1, around);
                self.expand(stack, &mut seen, &mut stacks)?;
            }
        }
        self.state(stacks)
    }

    /// The state after a token that the grammar names as such.
    pub(super) fn next_token(&mut self, state: u32, token: Token) -> Result<u32, GrammarError> {
        let (mut stacks, mut seen) = (Vec::new(), HashSet::default());
        for &stack in self.states[state as usize].clone().iter() {
            if stack != COMPLETE {
                let (place, around) = self.stacks[stack as usize];
                self.step(place)?;
                if self.names(place, token) {
                    let stack = self.push_unless_end(place + 1, around);
                    self.expand(stack, &mut seen, &mut stacks)?;
                }
            }
        }
        self.state(stacks)
    }

    /// Both states in one.
    pub(super) fn union(&mut self, a: u32, b: u32) -> Result<u32, GrammarError> {
        if a == DEAD || b == DEAD || a == b {
            return Ok(a.max(b));
        }
        let stacks: Vec<u32> = self.states[a as usize].iter().chain(self.states[b as usize].iter()).copied().collect();
        if stacks.len() > MAX_STACKS {
            return Err(self.too_complex("ways to read a text", MAX_STACKS as u64));
        }
        self.state(stacks)
    }

    fn names(&self, place: u32, token: Token) -> bool {
        let element = self.rules.element(place);
        match element.kind {
            Kind::Token => u32::try_from(token) == Ok(element.value),
            Kind::TokenNot => u32::try_from(token) != Ok(element.value),
            _ => false,
        }
    }

    /// The tokens, of so many, that the state waits for by name. It takes one look at each stack.
    pub(super) fn named_tokens(&self, state: u32, tokens: usize) -> Vec<Token> {
        let (mut named, mut excluded) = (HashSet::new(), HashSet::new());
        for &stack in self.states[state as usize].iter().filter(|&&stack| stack != COMPLETE) {
            let element = self.rules.element(self.stacks[stack as usize].0);
            match element.kind {
                Kind::Token => named.insert(element.value),
                Kind::TokenNot => excluded.insert(element.value),
                _ => false,
            };
        }
        if named.is_empty() && excluded.is_empty() {
            return Vec::new();
        }
        // Of two that exclude one token each, one allows what the other does not.
        let waits_for = |token: u32| match excluded.len() {
            0 => named.contains(&token),
            1 => named.contains(&token) || !excluded.contains(&token),
            _ => true,
        };
        (0..).take(tokens).filter(|&token| u32::try_from(token).is_ok_and(waits_for)).collect()
    }

    /// Whether the state waits for this token by name.
    pub(super) fn waits_for(&self, state: u32, token: Token) -> bool {
        self.states[state as usize]
            .iter()
            .any(|&stack| stack != COMPLETE && self.names(self.stacks[stack as usize].0, token))
    }

    /// Whether the text may end here.
    pub(super) fn is_complete(&self, state: u32) -> bool {
        // Sorted, so this stack is the first.
        self.states[state as usize].first() == Some(&COMPLETE)
    }

    /// Whether some character that begins with these bytes can follow. As in llama.cpp, not in place of a negated class
    /// that excludes one of them.
    pub(super) fn can_follow(&mut self, state: u32, partial: Partial) -> Result<bool, GrammarError> {
        let (low, high) = partial.range();
        for &stack in self.states[state as usize].clone().iter() {
            if stack == COMPLETE {
                continue;
            }
            let place = self.stacks[stack as usize].0;
            self.step(place)?;
            if self.rules.matches(place, low, high) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
