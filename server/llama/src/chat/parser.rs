//! What a model answered, read by llama.cpp's own parsers: what it thought, what it says, which tools it calls.
//!
//! A parser reads an answer from its beginning each time; who is told of one piece by piece decides how often that pays. What it
//! takes is bounded, as the template is that it was made from. Absent: which pieces are new.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use super::limits::{PARSE_CPU_MS, PARSE_MEMORY_BYTES, PARSE_MEMORY_PER_BYTE};
use crate::error::ChatError;
use crate::shim::{self, RawAnswerParser, RawText};

/// What answers to a chat look like, as its template has it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct AnswerForm {
    format: i32,
    parser: String,
    /// What the prompt ends with that belongs to the answer's form: its grammar begins with it.
    pub prefix: String,
    /// The reserved tokens that an answer is read by.
    pub markup: Vec<String>,
    /// What a thought stands between; `None`: it has no place of its own, or nothing says where it begins.
    pub thought: Option<ThoughtForm>,
    /// In GBNF, where tools may be called; otherwise empty.
    grammar: String,
    /// Whether that is of calls alone, from where one begins.
    lazy: bool,
    /// The texts that a call begins with.
    triggers: Vec<String>,
    /// Where no text says that: in GBNF, whole answers, of which `grammar` has some of the rules as the tools' schemas are.
    #[serde(default)]
    whole: String,
    /// Where no text says that and a tool must be called: calls alone, where `grammar` lets more be said before them.
    #[serde(default)]
    calls: String,
    /// What stands before what an answer says, where that matters.
    #[serde(default)]
    lead: Option<Lead>,
}

/// What stands before what an answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Lead {
    /// Right behind its prompt.
    pub at_once: String,
    /// Behind the end of a thought.
    pub after_thought: String,
}

/// What a thought stands between.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ThoughtForm {
    /// What it begins with.
    pub begin: String,
    /// What ends it, each of them: first its own end, then what else may follow it and belongs to the answer.
    pub ends: Vec<String>,
    /// What to write to end it: the first of `ends`, with the white space that the template has around it.
    pub closing: String,
}

/// Where a prompt leaves the thought of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThoughtStage {
    /// The answer may begin with one.
    Possible,
    /// The answer goes on with it.
    Open,
    /// There is none, or it is over.
    Over,
}

impl ThoughtForm {
    /// Where a prompt that ends so leaves it.
    #[must_use]
    pub fn stage_after(&self, prefix: &str) -> ThoughtStage {
        let Some(at) = prefix.rfind(&self.begin) else { return ThoughtStage::Possible };
        let said = &prefix[at + self.begin.len()..];
        let is_over = self.ends.iter().any(|end| said.contains(end.as_str()));
        if is_over { ThoughtStage::Over } else { ThoughtStage::Open }
    }
}

/// The grammar of calls, and what they begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallGrammar {
    /// In GBNF: calls, from the first one's beginning to the end of the answer.
    pub grammar: String,
    /// The texts of which one begins a call; none where no text does.
    pub triggers: Vec<String>,
}

impl Lead {
    /// What stands before a call behind the end of a thought: what begins a turn anew, where a thought is one of its own.
    #[must_use]
    pub fn before_call(&self) -> &str {
        self.after_thought.strip_suffix(self.at_once.as_str()).unwrap_or_default()
    }
}

impl AnswerForm {
    /// What stands before what an answer says that must be of a form: nothing in most, where it says that as it is, at its
    /// beginning and right behind a thought; `None`: that is not known.
    #[must_use]
    pub fn lead(&self) -> Option<Lead> {
        let leads = [Some(Lead::default()), self.lead.clone()];
        leads.into_iter().flatten().find(|lead| self.says_behind(lead))
    }

    /// Whether what stands behind these is read as what the answer says.
    fn says_behind(&self, lead: &Lead) -> bool {
        const SAID: &str = "{}";
        let at_once = format!("{}{SAID}", lead.at_once);
        let thought = |begin: &str, form: &ThoughtForm| {
            let closing = if lead.after_thought.is_empty() { &form.closing } else { form.ends.first()? };
            Some(format!("{begin}x{closing}{}{SAID}", lead.after_thought))
        };
        let answers = match &self.thought {
            None => vec![Some(at_once)],
            Some(form) => match form.stage_after(&self.prefix) {
                ThoughtStage::Over => vec![Some(at_once)],
                ThoughtStage::Open => vec![thought("", form)],
                ThoughtStage::Possible => vec![Some(at_once), thought(&form.begin, form)],
            },
        };
        let Ok(parser) = AnswerParser::new(self) else { return false };
        let is_said = |parsed: ParsedAnswer| parsed.content.trim() == SAID && parsed.calls.is_empty();
        answers.iter().all(|answer| answer.as_ref().is_some_and(|answer| parser.parse(answer).is_ok_and(is_said)))
    }

    /// The grammar of answers in which a tool must be called, and nothing is said before that; `None`: none must be.
    #[must_use]
    pub fn required_grammar(&self) -> Option<String> {
        let is_required = !self.grammar.is_empty() && !self.lazy;
        is_required.then(|| self.grammar.lines().map(without_text).collect::<Vec<_>>().join("\n"))
    }

    /// The grammar of calls alone, for answers in which tools may be called; `None`: none may be.
    #[must_use]
    pub fn call_grammar(&self) -> Option<CallGrammar> {
        let (grammar, triggers) = (self.grammar.clone(), self.triggers.clone());
        let is_known = self.lazy && !grammar.is_empty();
        is_known.then_some(CallGrammar { grammar, triggers })
    }

    /// The grammar of whole answers in which tools may be called, where no text tells that a call begins.
    #[must_use]
    pub fn whole_grammar(&self) -> Option<String> {
        (self.lazy && !self.whole.is_empty()).then(|| with_rules_of(&self.whole, &self.grammar))
    }

    /// The grammar of calls alone, for answers in which a tool must be called, where no text tells that one begins.
    #[must_use]
    pub fn required_calls(&self) -> Option<String> {
        (!self.lazy && !self.calls.is_empty()).then(|| self.calls.clone())
    }

    /// What stands before what is said, as the template has it, whether that is read or not.
    #[must_use]
    pub fn told_lead(&self) -> Option<&Lead> {
        self.lead.as_ref()
    }
}

/// A grammar, its rules but the first as another one has them that has them.
fn with_rules_of(whole: &str, other: &str) -> String {
    let name =
        |rule: &'_ str| rule.split_once("::=").map(|(name, _)| name.trim().to_owned()).filter(|name| name != "root");
    let known: HashSet<String> = other.lines().filter_map(name).collect();
    let own = whole.lines().filter(|rule| name(rule).is_none_or(|name| !known.contains(&name)));
    let others = other.lines().filter(|rule| name(rule).is_some());
    own.chain(others).collect::<Vec<_>>().join("\n")
}

/// The rule `root` without the text that llama.cpp lets stand before calls, an optional rule of its own making.
fn without_text(rule: &str) -> Cow<'_, str> {
    let is_text = |word: &str| {
        let number = word.strip_prefix("until-").and_then(|rest| rest.strip_suffix('?'));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    if !rule.starts_with("root ::=") || !rule.split(' ').any(is_text) {
        return Cow::Borrowed(rule);
    }
    Cow::Owned(rule.split(' ').filter(|word| !is_text(word)).collect::<Vec<_>>().join(" "))
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ParsedAnswer {
    /// What the model thought.
    pub reasoning: String,
    /// What it says.
    pub content: String,
    /// What it calls; of the last one the arguments may be incomplete.
    pub calls: Vec<ParsedCall>,
    /// Whether nothing need follow.
    pub whole: bool,
    /// What the text ends in that may go on: `reasoning`, `content` or nothing that is text.
    pub open: String,
    /// What follows the last of what was thought or said: markup, or the beginning of some.
    pub held: String,
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ParsedCall {
    /// What the model calls it; empty in most formats.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON, or its beginning.
    pub arguments: String,
}

/// Reads answers of one form.
#[derive(Debug)]
pub struct AnswerParser(NonNull<RawAnswerParser>);

// SAFETY: owned, bound to no thread.
unsafe impl Send for AnswerParser {}

impl Drop for AnswerParser {
    fn drop(&mut self) {
        // SAFETY: owned and not used again.
        unsafe { shim::gantry_answer_parser_free(self.0.as_ptr()) };
    }
}

impl AnswerParser {
    /// A parser of this form.
    ///
    /// # Errors
    /// When it is none that llama.cpp made.
    pub fn new(form: &AnswerForm) -> Result<Self, ChatError> {
        #[derive(Serialize)]
        struct Parser<'a> {
            format: i32,
            prefix: &'a str,
            parser: &'a str,
        }
        let parser = Parser { format: form.format, prefix: &form.prefix, parser: &form.parser };
        let json = serde_json::to_string(&parser).map_err(|e| ChatError::Template(e.to_string()))?;
        let mut reason = RawText::empty();
        // SAFETY: the text has the length given; `reason` is filled by the callee, which catches exceptions.
        let ptr = unsafe { shim::gantry_answer_parser_new(json.as_ptr().cast(), json.len(), &raw mut reason) };
        let reason = reason.into_result().err().unwrap_or_default();
        NonNull::new(ptr).map(Self).ok_or_else(|| ChatError::Template(format!("its answers cannot be read: {reason}")))
    }

    /// Reads the beginning of an answer, or all of it.
    ///
    /// # Errors
    /// When it is of another form, or takes too much.
    pub fn parse(&self, text: &str) -> Result<ParsedAnswer, ChatError> {
        let bytes = u64::try_from(text.len()).unwrap_or(u64::MAX);
        let memory = PARSE_MEMORY_BYTES.saturating_add(bytes.saturating_mul(PARSE_MEMORY_PER_BYTE));
        // SAFETY: the parser is alive, the text has the length given, and the shim catches exceptions.
        let answer = unsafe {
            shim::gantry_answer_parse(self.0.as_ptr(), text.as_ptr().cast(), text.len(), PARSE_CPU_MS, memory)
        };
        let answer = answer.into_result().map_err(ChatError::Template)?;
        serde_json::from_str(&answer).map_err(|e| ChatError::Template(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_those_that_know_more() {
        let whole = "any ::= [^<]\nroot ::= any* (call | \"<final>\" any*)\ncall ::= \"<call>\" args\nargs ::= any*";
        let calls = "root ::= call\ncall ::= \"<call>\" schema\nschema ::= \"{}\"";
        let merged = "any ::= [^<]\nroot ::= any* (call | \"<final>\" any*)\nargs ::= any*\ncall ::= \"<call>\" schema\nschema ::= \"{}\"";
        assert_eq!(with_rules_of(whole, calls), merged);
    }

    #[test]
    fn nothing_is_said_before_a_call_that_is_required() {
        let root = "root ::= \"a\\n\" space (\"<think>\" until-3 \"</think>\")? until-169? tool-calls";
        assert_eq!(without_text(root), "root ::= \"a\\n\" space (\"<think>\" until-3 \"</think>\")? tool-calls");
        for other in ["root ::= tool-calls", "tool ::= until-1? x", "root ::= \"until-?\""] {
            assert_eq!(without_text(other), other);
        }
    }
}
