//! A grammar's rules as llama.cpp's parser gives them, checked so that the matcher cannot run away on them.

use std::ffi::CString;

use super::GrammarError;
use super::scan;
use super::texts::TokenTexts;
use crate::shim::{self, RawText};

/// One element of a rule: llama.cpp's `llama_gretype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    End,
    Alt,
    Rule,
    Char,
    CharNot,
    RangeUpper,
    CharAlt,
    Any,
    Token,
    TokenNot,
}

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

    fn from_words(kind: u32, value: u32) -> Option<Self> {
        let kind = match kind {
            0 => Kind::End,
            1 => Kind::Alt,
            2 => Kind::Rule,
            3 => Kind::Char,
            4 => Kind::CharNot,
            5 => Kind::RangeUpper,
            6 => Kind::CharAlt,
            7 => Kind::Any,
            8 => Kind::Token,
            9 => Kind::TokenNot,
            _ => return None,
        };
        Some(Self { kind, value })
    }
}

/// All rules, one after the other.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) elements: Vec<Element>,
    /// Where each rule starts.
    pub(super) starts: Vec<u32>,
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
        let rules = Self::from_bytes(&bytes).ok_or(GrammarError::Internal("its rules are unreadable"))?;
        rules.check_left_recursion(&names)?;
        Ok(rules)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        let root = words.next()?;
        let (mut elements, mut starts) = (Vec::with_capacity(bytes.len() / 8), Vec::new());
        let mut ended = true;
        while let Some(kind) = words.next() {
            if ended {
                starts.push(u32::try_from(elements.len()).ok()?);
            }
            let element = Element::from_words(kind, words.next()?)?;
            ended = element.kind == Kind::End;
            elements.push(element);
        }
        let n = u32::try_from(starts.len()).ok()?;
        let known = elements.iter().all(|e| e.kind != Kind::Rule || e.value < n);
        (ended && known && root < n).then_some(Self { elements, starts, root })
    }

    pub(super) fn element(&self, at: u32) -> Element {
        self.elements[at as usize]
    }

    /// The first elements of a rule's alternatives.
    pub(super) fn alternatives(&self, rule: u32) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.starts.get(rule as usize).copied();
        std::iter::from_fn(move || {
            let at = next?;
            let mut end = at;
            while !self.element(end).ends() {
                end += 1;
            }
            next = (self.element(end).kind == Kind::Alt).then_some(end + 1);
            Some(at)
        })
    }

    /// Which rules match the empty text.
    fn nullable(&self) -> Vec<bool> {
        let mut nullable = vec![false; self.starts.len()];
        // Alternatives of references only: how many of them are not yet known to be nullable, and whose they are.
        let mut waiting: Vec<(u32, usize)> = Vec::new();
        let mut waits_for: Vec<Vec<usize>> = vec![Vec::new(); self.starts.len()];
        let mut found: Vec<usize> = Vec::new();
        for rule in 0..self.starts.len() as u32 {
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
    fn check_left_recursion(&self, names: &str) -> Result<(), GrammarError> {
        let nullable = self.nullable();
        let n = self.starts.len();
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
                    let name = names.lines().nth(rule).unwrap_or_default();
                    // Groups and repetitions are named after the rule they stand in.
                    let name = name.split('_').next().unwrap_or_default().to_owned();
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
