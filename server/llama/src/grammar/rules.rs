//! A grammar's rules as llama.cpp's parser gives them, checked so that the matcher cannot run away on them.

use std::ffi::CString;

use super::GrammarError;
use super::scan;
use super::texts::TokenTexts;
use crate::shim::{self, RawText};

/// What an element of a rule is: llama.cpp's `llama_gretype`, but for classes, which are one element here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    End,
    Alt,
    Rule,
    Char,
    /// The value is the class's number, as for the next.
    Class,
    NotClass,
    Any,
    Token,
    TokenNot,
}

/// In llama.cpp's numbers: what a class begins with, what goes on with it, and what makes a range of the one before.
const CHAR: u32 = 3;
const CHAR_NOT: u32 = 4;
const RANGE_UPPER: u32 = 5;
const CHAR_ALT: u32 = 6;

#[derive(Clone, Copy, Debug)]
pub(super) struct Element {
    pub(super) kind: Kind,
    pub(super) value: u32,
}

impl Element {
    /// Whether an alternative ends here.
    pub(super) fn ends(self) -> bool {
        matches!(self.kind, Kind::End | Kind::Alt)
    }
}

/// All rules, one after the other.
#[derive(Debug)]
pub(super) struct Rules {
    elements: Vec<Element>,
    /// Where each alternative starts.
    alternatives: Vec<u32>,
    /// For each rule its first alternative, and at last how many there are.
    firsts: Vec<u32>,
    /// For each class its characters: ranges in order and apart from each other, so that one is found quickly.
    classes: Vec<Vec<(u32, u32)>>,
    /// Where characters begin that the rules may tell apart from those before, in order.
    runs: Vec<u32>,
    names: Vec<String>,
    pub(super) root: u32,
}

impl Rules {
    /// Parses GBNF. `texts` names the tokens that the text may name.
    pub(super) fn parse(texts: &TokenTexts, text: &str) -> Result<Self, GrammarError> {
        let first = scan::scan(text)?;
        let c_text = CString::new(&text[first..]).map_err(|_| GrammarError::Syntax {
            line: 1,
            column: 1,
            message: String::from("a NUL byte"),
        })?;
        let mut names = RawText::empty();
        let mut rule_at = 0_usize;
        // SAFETY: the vocabulary is alive or null, the text is NUL-terminated, and the callee catches exceptions. Its
        // recursion and its memory are bounded by the scan above.
        let words =
            unsafe { shim::gantry_grammar_parse(texts.raw_vocab(), c_text.as_ptr(), &raw mut names, &raw mut rule_at) };
        let names = names.into_result().unwrap_or_default();
        let bytes = words.into_bytes().map_err(|reason| {
            let (line, column) = scan::position(text.as_bytes(), first + rule_at);
            // The parser's messages end with the rest of the text.
            let message = reason.split(" at ").next().unwrap_or_default().chars().take(200).collect();
            GrammarError::Syntax { line, column, message }
        })?;
        let mut rules = Self::from_bytes(&bytes).ok_or(GrammarError::Internal("its rules are unreadable"))?;
        // Groups and repetitions are named after the rule they stand in.
        rules.names = names.lines().map(|name| name.split('_').next().unwrap_or_default().to_owned()).collect();
        rules.check_left_recursion()?;
        Ok(rules)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        let root = words.next()?;
        let mut words = std::iter::from_fn(|| words.next().zip(words.next())).peekable();
        let mut rules = Self {
            elements: Vec::new(),
            alternatives: Vec::new(),
            firsts: Vec::new(),
            classes: Vec::new(),
            runs: Vec::new(),
            names: Vec::new(),
            root,
        };
        let mut before = Kind::End;
        while let Some((kind, value)) = words.next() {
            if before == Kind::End {
                rules.firsts.push(u32::try_from(rules.alternatives.len()).ok()?);
            }
            if matches!(before, Kind::End | Kind::Alt) {
                rules.alternatives.push(u32::try_from(rules.elements.len()).ok()?);
            }
            let element = match kind {
                0 => Element { kind: Kind::End, value },
                1 => Element { kind: Kind::Alt, value },
                2 => Element { kind: Kind::Rule, value },
                CHAR | CHAR_NOT => {
                    let upper = |words: &mut std::iter::Peekable<_>, lower| {
                        words.next_if(|&(kind, _): &(u32, u32)| kind == RANGE_UPPER).map_or(lower, |(_, upper)| upper)
                    };
                    let mut ranges = vec![(value, upper(&mut words, value))];
                    while let Some((_, value)) = words.next_if(|&(kind, _)| kind == CHAR_ALT) {
                        ranges.push((value, upper(&mut words, value)));
                    }
                    rules.class(kind == CHAR, ranges)?
                }
                7 => Element { kind: Kind::Any, value },
                8 => Element { kind: Kind::Token, value },
                9 => Element { kind: Kind::TokenNot, value },
                _ => return None,
            };
            before = element.kind;
            rules.elements.push(element);
        }
        let n = u32::try_from(rules.firsts.len()).ok()?;
        rules.firsts.push(u32::try_from(rules.alternatives.len()).ok()?);
        let known = rules.elements.iter().all(|e| e.kind != Kind::Rule || e.value < n);
        let single = rules.elements.iter().filter(|e| e.kind == Kind::Char).map(|e| (e.value, e.value));
        let ranges = single.chain(rules.classes.iter().flatten().copied());
        rules.runs = ranges.flat_map(|(low, high)| [low, high.saturating_add(1)]).collect();
        rules.runs.sort_unstable();
        rules.runs.dedup();
        (before == Kind::End && known && root < n).then_some(rules)
    }

    /// The element for a class, or one character.
    fn class(&mut self, positive: bool, mut ranges: Vec<(u32, u32)>) -> Option<Element> {
        if let (true, &[(low, high)]) = (positive, ranges.as_slice())
            && low == high
        {
            return Some(Element { kind: Kind::Char, value: low });
        }
        // A range that runs backwards has no characters.
        ranges.retain(|(low, high)| low <= high);
        ranges.sort_unstable();
        let mut apart: Vec<(u32, u32)> = Vec::new();
        for (low, high) in ranges {
            match apart.last_mut() {
                Some((_, last)) if low <= last.saturating_add(1) => *last = high.max(*last),
                _ => apart.push((low, high)),
            }
        }
        let value = u32::try_from(self.classes.len()).ok()?;
        self.classes.push(apart);
        Some(Element { kind: if positive { Kind::Class } else { Kind::NotClass }, value })
    }

    /// How many rules there are.
    fn len(&self) -> usize {
        self.firsts.len() - 1
    }

    /// The run of characters that this one is in: the rules do not tell those of one run apart.
    pub(super) fn run_of(&self, character: u32) -> u32 {
        self.runs.partition_point(|&begins| begins <= character) as u32
    }

    /// The rule that a place stands in, as the grammar names it.
    pub(super) fn name_at(&self, place: u32) -> &str {
        let before = |&first: &u32| self.alternatives.get(first as usize).is_some_and(|&at| at <= place);
        let rule = self.firsts.partition_point(before).saturating_sub(1);
        self.names.get(rule).map_or("root", String::as_str)
    }

    pub(super) fn element(&self, at: u32) -> Element {
        self.elements[at as usize]
    }

    /// The first elements of a rule's alternatives.
    pub(super) fn alternatives(&self, rule: u32) -> impl Iterator<Item = u32> + '_ {
        let (first, end) = (self.firsts[rule as usize], self.firsts[rule as usize + 1]);
        self.alternatives[first as usize..end as usize].iter().copied()
    }

    /// Whether the terminal at a place stands for a character from `low` to `high`. A negated class does not if it
    /// excludes any of them, as in llama.cpp; terminals that are tokens never do.
    pub(super) fn matches(&self, at: u32, low: u32, high: u32) -> bool {
        let element = self.element(at);
        let in_class = || {
            let ranges = &self.classes[element.value as usize];
            let next = ranges.partition_point(|&(_, last)| last < low);
            ranges.get(next).is_some_and(|&(first, _)| first <= high)
        };
        match element.kind {
            Kind::Char => low <= element.value && element.value <= high,
            Kind::Class => in_class(),
            Kind::NotClass => !in_class(),
            Kind::Any => true,
            Kind::End | Kind::Alt | Kind::Rule | Kind::Token | Kind::TokenNot => false,
        }
    }

    /// Which rules match the empty text.
    fn nullable(&self) -> Vec<bool> {
        let mut nullable = vec![false; self.len()];
        // Alternatives of references only: how many of them are not yet known to be nullable, and whose they are.
        let mut waiting: Vec<(u32, usize)> = Vec::new();
        let mut waits_for: Vec<Vec<usize>> = vec![Vec::new(); self.len()];
        let mut found: Vec<usize> = Vec::new();
        for rule in 0..self.len() as u32 {
            for at in self.alternatives(rule) {
                let sequence = || self.elements[at as usize..].iter().take_while(|e| !e.ends());
                if !sequence().all(|e| e.kind == Kind::Rule) {
                    continue;
                }
                for element in sequence() {
                    waits_for[element.value as usize].push(waiting.len());
                }
                let (n, rule) = (sequence().count(), rule as usize);
                if n == 0 && !std::mem::replace(&mut nullable[rule], true) {
                    found.push(rule);
                }
                waiting.push((n as u32, rule));
            }
        }
        while let Some(rule) = found.pop() {
            for &alternative in &waits_for[rule] {
                let (left, of) = &mut waiting[alternative];
                *left -= 1;
                if *left == 0 && !std::mem::replace(&mut nullable[*of], true) {
                    found.push(*of);
                }
            }
        }
        nullable
    }

    /// Refuses a rule that can begin with itself and go on after: matching it would never end. llama.cpp checks that
    /// too, but takes exponential time for it and overlooks rules that are empty through others. A rule that begins
    /// with itself and ends there, as in `(a*)*`, does no harm.
    fn check_left_recursion(&self) -> Result<(), GrammarError> {
        let nullable = self.nullable();
        let n = self.len();
        // For each rule those it may begin with, and whether more follows them.
        let begins_with: Vec<Vec<(u32, bool)>> = (0..n)
            .map(|rule| {
                let mut edges = Vec::new();
                for first in self.alternatives(rule as u32) {
                    for at in first.. {
                        let element = self.element(at);
                        if element.kind != Kind::Rule {
                            break;
                        }
                        edges.push((element.value, !self.element(at + 1).ends()));
                        if !nullable[element.value as usize] {
                            break;
                        }
                    }
                }
                edges
            })
            .collect();
        let component = components(&begins_with);
        for (rule, edges) in begins_with.iter().enumerate() {
            for &(to, more) in edges {
                if more && component[rule] == component[to as usize] {
                    let name = self.names.get(rule).cloned().unwrap_or_default();
                    return Err(GrammarError::LeftRecursion { rule: name });
                }
            }
        }
        Ok(())
    }
}

/// The strongly connected component of each node: Tarjan's algorithm, on a stack of its own.
fn components(edges: &[Vec<(u32, bool)>]) -> Vec<usize> {
    const NEW: usize = usize::MAX;
    let n = edges.len();
    let (mut index, mut low, mut component) = (vec![NEW; n], vec![0; n], vec![NEW; n]);
    let (mut next_index, mut next_component) = (0, 0);
    let mut open: Vec<usize> = Vec::new();
    for start in 0..n {
        if index[start] != NEW {
            continue;
        }
        let mut path: Vec<(usize, usize)> = vec![(start, 0)];
        while let Some((node, edge)) = path.last_mut() {
            let node = *node;
            if *edge == 0 {
                index[node] = next_index;
                low[node] = next_index;
                next_index += 1;
                open.push(node);
            }
            if let Some(&(to, _)) = edges[node].get(*edge) {
                let to = to as usize;
                *edge += 1;
                if index[to] == NEW {
                    path.push((to, 0));
                } else if component[to] == NEW {
                    low[node] = low[node].min(index[to]);
                }
                continue;
            }
            if low[node] == index[node] {
                while let Some(member) = open.pop() {
                    component[member] = next_component;
                    if member == node {
                        break;
                    }
                }
                next_component += 1;
            }
            path.pop();
            if let Some(&(parent, _)) = path.last() {
                low[parent] = low[parent].min(low[node]);
            }
        }
    }
    component
}
