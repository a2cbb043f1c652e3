//! Whether a reply is right: what the request wants, or an error that its circumstances explain. Pure.
//!
//! The kernels compute a row a little differently in another batch, so that two tokens that are almost equally likely may
//! change places: a text that differs from the one alone is counted by how sure the model was of the token from which on
//! it differs, and [`Tally::checks`] bounds how many may.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;
use serde_json::Value;

use super::{
    asks::{Alone, Kind, Request, Wanted},
    exchange::{Answer, Choice, Exchange, Reply, Tokens, WireError},
    report::Check,
};

/// A token of whose log-probability all others fall short by so many nats is sure. Another batch moves logits by some
/// tenths; no text may part from the one alone at a sure token.
const SURE_MARGIN: f64 = 0.5;
/// Of a thousand texts, so many may part at a token that another one came near, or where that was not told (104 did in a soak
/// of 20,000 requests with AVX2);
const MAX_DIVERGED_PERMILLE: u64 = 150;
/// where it was not told, which may hide a sure token, so many (none did);
const MAX_UNKNOWN_PERMILLE: u64 = 20;
/// and of few texts as many in any case.
const MIN_DIVERGED: u64 = 3;
/// Mistakes and differences that are kept in full.
const MAX_KEPT: usize = 20;
/// The longest Retry-After that the server may tell.
const MAX_RETRY_AFTER_S: u64 = 60;
/// Of two log-probabilities, the difference that is none.
const LOGPROB_TOLERANCE: f64 = 1e-3;

/// What a reply was.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// What was wanted.
    Right,
    /// Whole and well formed, with another text than the one alone.
    Diverged {
        /// The text.
        text: String,
        /// The one alone.
        alone: String,
        /// By how many nats the model preferred, alone, the token from which on they differ, where that was told.
        margin: Option<f64>,
    },
    /// An error for which there is a reason.
    Explained(Explanation),
    /// The client left.
    Left,
    /// Anything else.
    Wrong(String),
}

/// Why a request failed, where it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Explanation {
    /// The queue was full.
    QueueFull,
    /// Its worker died, and some of its answer had come.
    WorkerDied,
    /// Its worker died, and nothing of its answer had come: it was run again by itself, and could not be then.
    WorkerDiedBeforeText,
    /// No worker was there.
    NotReady,
    /// It waited for longer than it said.
    Expired,
}

/// Judges one reply. `disturbed`: whether a worker was disturbed while the request was on its way.
#[must_use]
pub fn judge(request: &Request, reply: &Reply, alone: &[Alone], disturbed: bool) -> Verdict {
    match reply {
        Reply::Left => Verdict::Left,
        Reply::Broken(why) => Verdict::Wrong(why.clone()),
        Reply::Error(error) => judge_error(request, error, disturbed),
        Reply::Answer(answer) => judge_form(request, answer)
            .and_then(|()| judge_answer(request, answer, alone))
            .unwrap_or_else(Verdict::Wrong),
    }
}

fn judge_error(request: &Request, error: &WireError, disturbed: bool) -> Verdict {
    let WireError { status, code, retry_after_s, after_text, .. } = error;
    if let Wanted::Error { status: wanted, code: wanted_code } = &request.wanted
        && *status == Some(*wanted)
        && wanted_code.is_none_or(|wanted| wanted == code)
    {
        return Verdict::Right;
    }
    if matches!(status, Some(429 | 503)) && !retry_after_s.is_some_and(|s| (1..=MAX_RETRY_AFTER_S).contains(&s)) {
        return Verdict::Wrong(format!("{status:?} {code} with Retry-After {retry_after_s:?}: {}", error.message));
    }
    match (status, code.as_str()) {
        (Some(429), "queue_full") => Verdict::Explained(Explanation::QueueFull),
        (Some(503) | None, "worker_died") if disturbed && *after_text => Verdict::Explained(Explanation::WorkerDied),
        (Some(503) | None, "worker_died") if disturbed => Verdict::Explained(Explanation::WorkerDiedBeforeText),
        (Some(503), "model_not_ready") if disturbed => Verdict::Explained(Explanation::NotReady),
        (Some(408) | None, "request_timeout") if request.deadline => Verdict::Explained(Explanation::Expired),
        _ => Verdict::Wrong(format!("{status:?} {code}: {}", error.message)),
    }
}

/// What every answer must be like.
fn judge_form(request: &Request, answer: &Answer) -> Result<(), String> {
    if answer.usage.is_some() != request.usage {
        return Err(format!("usage {:?}, wanted: {}", answer.usage, request.usage));
    }
    if let Some(Tokens { prompt, cached, completion, total }) = answer.usage
        && (total != prompt + completion || cached >= prompt || completion < answer.choices.len() as u64)
    {
        return Err(format!("{:?} do not add up", answer.usage));
    }
    for choice in &answer.choices {
        if !matches!(choice.reason.as_deref(), Some("stop" | "length")) {
            return Err(format!("it ended for {:?}", choice.reason));
        }
        if let Some(top) = request.logprobs {
            judge_logprobs(choice, top)?;
        }
    }
    Ok(())
}

fn judge_logprobs(choice: &Choice, top: usize) -> Result<(), String> {
    let bytes: Vec<u8> = choice.logprobs.iter().flat_map(|token| token.bytes.clone()).collect();
    // A character that the end cut is told as bytes, and not in the text.
    if !String::from_utf8_lossy(&bytes)
        .trim_end_matches('\u{fffd}')
        .starts_with(choice.text.trim_end_matches('\u{fffd}'))
    {
        return Err(format!("log-probabilities of {:?} for {:?}", String::from_utf8_lossy(&bytes), choice.text));
    }
    for token in &choice.logprobs {
        let likeliest = token.top_logprobs.first().map_or(token.logprob, |likeliest| likeliest.logprob);
        if token.logprob > 0.0 || token.top_logprobs.len() != top || likeliest < token.logprob - LOGPROB_TOLERANCE {
            return Err(format!("a log-probability: {token:?}"));
        }
    }
    Ok(())
}

fn judge_answer(request: &Request, answer: &Answer, alone: &[Alone]) -> Result<Verdict, String> {
    match &request.wanted {
        Wanted::Error { status, code } => Err(format!("an answer in place of {status} {code:?}")),
        Wanted::Alone { reference, stop } => judge_reference(answer, &alone[*reference], stop.as_deref()),
        Wanted::Tokens { tokens, exact } => {
            let most = u64::from(*tokens) * answer.choices.len() as u64;
            let counted = answer.usage.is_none_or(|usage| usage.completion <= most);
            let filled = answer.usage.is_none_or(|usage| usage.completion == most)
                && answer.choices.iter().all(|choice| choice.reason.as_deref() == Some("length"));
            match counted && (filled || !exact) {
                true => Ok(Verdict::Right),
                false => Err(format!("{:?} of {tokens} tokens each, exactly: {exact}", answer.usage)),
            }
        }
        Wanted::Counted => each(answer, |choice| {
            let (word, number) = choice.text.split_once(' ')?;
            let digits = number.len() == 2 && number.bytes().all(|byte| byte.is_ascii_digit());
            (["yes", "no", "maybe"].contains(&word) && digits).then_some(())
        }),
        Wanted::Object => each(answer, |choice| {
            let object: Value = serde_json::from_str(&choice.text).ok()?;
            let object = object.as_object()?;
            let answered = matches!(object.get("answer")?.as_str()?, "yes" | "no");
            (answered && object.get("sure")?.is_boolean() && object.len() == 2).then_some(())
        }),
    }
}

/// Whether each choice that came to its end has the form.
fn each(answer: &Answer, has_form: impl Fn(&Choice) -> Option<()>) -> Result<Verdict, String> {
    let ended = |choice: &&Choice| choice.reason.as_deref() == Some("stop");
    match answer.choices.iter().filter(ended).find(|choice| has_form(choice).is_none()) {
        Some(choice) => Err(format!("the form does not allow {:?}", choice.text)),
        None => Ok(Verdict::Right),
    }
}

fn judge_reference(answer: &Answer, alone: &Alone, stop: Option<&str>) -> Result<Verdict, String> {
    let cut = stop.and_then(|stop| alone.text.find(stop));
    let wanted = &alone.text[..cut.unwrap_or(alone.text.len())];
    let reason = if cut.is_some() { "stop" } else { alone.reason.as_str() };
    if let Some(usage) = answer.usage
        && usage.prompt != alone.prompt_tokens
    {
        return Err(format!("{} tokens of a prompt that has {}", usage.prompt, alone.prompt_tokens));
    }
    let other = answer.choices.iter().find(|c| c.text != wanted || c.reason.as_deref() != Some(reason));
    if let Some(other) = other {
        let margin = margin_where_parted(other, alone, stop);
        return Ok(Verdict::Diverged { text: other.text.clone(), alone: wanted.to_owned(), margin });
    }
    // The same text may be of other tokens, where two of them were almost equally likely.
    let all = alone.completion_tokens * answer.choices.len() as u64;
    match answer.usage {
        Some(usage) if alone.is_sure(SURE_MARGIN) && cut.is_none() && usage.completion != all => {
            Err(format!("{} tokens of answers that have {all}", usage.completion))
        }
        Some(usage) if alone.is_sure(SURE_MARGIN) && usage.completion > all => {
            Err(format!("{} tokens of at most {all}", usage.completion))
        }
        _ => Ok(Verdict::Right),
    }
}

/// By how many nats the model preferred, alone, the token from which on a choice differs. One that a stop string cut went on
/// with that string, which the model may have begun as alone it does; or the model ended it there: which, nobody tells.
fn margin_where_parted(choice: &Choice, alone: &Alone, stop: Option<&str>) -> Option<f64> {
    let ended = alone.margin_where_parted(&choice.text);
    match stop {
        Some(stop) if choice.reason.as_deref() == Some("stop") && alone.text.starts_with(&choice.text) => {
            let cut = alone.margin_where_parted(&format!("{}{stop}", choice.text));
            ended.zip(cut).map(|(ended, cut)| ended.min(cut))
        }
        _ => ended,
    }
}

/// What became of the requests of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// All.
    pub sent: u64,
    /// Right.
    pub right: u64,
    /// Another text than alone.
    pub diverged: u64,
    /// Failed for a reason.
    pub explained: u64,
    /// The client left.
    pub left: u64,
    /// Wrong.
    pub wrong: u64,
}

/// A text that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The request.
    pub request: Option<u64>,
    /// What it was for.
    pub kind: Kind,
    /// By how many nats the model preferred, alone, the token from which on they differ, where that was told.
    pub margin: Option<f64>,
    /// What came.
    pub text: String,
    /// What comes alone.
    pub alone: String,
    /// What it took, where that was told.
    pub usage: Option<Tokens>,
}

/// What became of all requests.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Tally {
    /// By kind.
    pub kinds: BTreeMap<Kind, Counts>,
    /// Failures with a reason, by it.
    pub explained: BTreeMap<Explanation, u64>,
    /// The first that were wrong.
    pub wrong: Vec<String>,
    /// Those that differ from the surest token on, surest first.
    pub differences: Vec<Difference>,
    /// Texts that are known.
    pub texts: u64,
    /// How many of them differ from a sure token on.
    pub surely_diverged: u64,
    /// How many differ otherwise.
    pub diverged: u64,
    /// How many of those where it was not told how sure the model was.
    pub unknown: u64,
    /// Whole answers.
    pub answered: u64,
    /// Tokens that the server must have counted: of whole answers, what they told, or the least that they took.
    pub least: TokenSums,
    /// The most tokens that it may have counted: of an answer that did not tell them or that nobody waited for, all that
    /// its request allows.
    pub most: TokenSums,
}

/// Tokens of several answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TokenSums {
    /// Read.
    pub prompt: u64,
    /// Of those, there already.
    pub cached: u64,
    /// Generated.
    pub completion: u64,
}

impl TokenSums {
    fn add(&mut self, prompt: u64, cached: u64, completion: u64) {
        self.prompt += prompt;
        self.cached += cached;
        self.completion += completion;
    }
}

impl Tally {
    /// Requests that have ended.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.kinds.values().map(|counts| counts.sent).sum()
    }

    /// The sum of one count over all kinds.
    #[must_use]
    pub fn sum(&self, count: impl Fn(&Counts) -> u64) -> u64 {
        self.kinds.values().map(count).sum()
    }

    /// Counts one request.
    pub fn note(&mut self, request: &Request, got: &Exchange, verdict: Verdict) {
        self.note_tokens(request, &got.reply);
        let is_text = matches!(verdict, Verdict::Right | Verdict::Diverged { .. });
        self.texts += u64::from(is_text && matches!(request.wanted, Wanted::Alone { .. }));
        let counts = self.kinds.entry(request.kind).or_default();
        counts.sent += 1;
        match verdict {
            Verdict::Right => counts.right += 1,
            Verdict::Left => counts.left += 1,
            Verdict::Explained(why) => {
                counts.explained += 1;
                *self.explained.entry(why).or_default() += 1;
            }
            Verdict::Diverged { text, alone, margin } => {
                counts.diverged += 1;
                let sure = margin.is_some_and(|margin| margin >= SURE_MARGIN);
                *if sure { &mut self.surely_diverged } else { &mut self.diverged } += 1;
                self.unknown += u64::from(margin.is_none());
                let usage = if let Reply::Answer(answer) = &got.reply { answer.usage } else { None };
                let difference = Difference { request: request.number, kind: request.kind, margin, text, alone, usage };
                let place = self.differences.partition_point(|other| other.margin >= margin);
                self.differences.insert(place, difference);
                self.differences.truncate(MAX_KEPT);
            }
            Verdict::Wrong(why) => {
                counts.wrong += 1;
                if self.wrong.len() < MAX_KEPT {
                    self.wrong.push(format!("request {:?} ({:?}): {why}", request.number, request.kind));
                }
            }
        }
    }

    /// Counts what the server may have counted for one request.
    fn note_tokens(&mut self, request: &Request, reply: &Reply) {
        let most_prompt = *request.prompt_tokens.end();
        match reply {
            Reply::Answer(answer) => {
                self.answered += 1;
                if let Some(Tokens { prompt, cached, completion, .. }) = answer.usage {
                    self.least.add(prompt, cached, completion);
                    self.most.add(prompt, cached, completion);
                } else {
                    self.least.add(*request.prompt_tokens.start(), 0, answer.choices.len() as u64);
                    self.most.add(most_prompt, most_prompt, request.most_completion_tokens);
                }
            }
            // The server may have given all of it before it saw that nobody was there.
            Reply::Left => self.most.add(most_prompt, most_prompt, request.most_completion_tokens),
            Reply::Error(_) | Reply::Broken(_) => {}
        }
    }

    /// What must hold of all of them. `any_share`: how many texts part from those alone is this model's own, as of one that
    /// is unsure of most of its tokens, and is told only.
    #[must_use]
    pub fn checks(&self, any_share: bool) -> Vec<Check> {
        let most_diverged = if any_share { 1000 } else { MAX_DIVERGED_PERMILLE };
        let wrong = self.sum(|counts| counts.wrong);
        let first = self.wrong.first().map(|first| format!("; the first: {first}")).unwrap_or_default();
        let few = |name: &str, count: u64, permille: u64| {
            let most = (self.texts * permille / 1000).max(MIN_DIVERGED);
            let percent = count as f64 * 100.0 / self.texts.max(1) as f64;
            let detail = format!("{count} of {} do, {percent:.1}%, at most {most} may", self.texts);
            Check::new(name, count <= most, detail)
        };
        let surest = self.differences.first().and_then(|first| first.margin);
        let surest = surest.map(|margin| format!("; the surest token where one parted: by {margin:.2} nats"));
        vec![
            Check::new("every reply is right or explained", wrong == 0, format!("{wrong} are not{first}")),
            Check::new(
                "texts part from those alone at no token of which the model is sure",
                self.surely_diverged == 0,
                format!("{} of {} do{}", self.surely_diverged, self.texts, surest.unwrap_or_default()),
            ),
            few("few texts part from those alone", self.diverged, most_diverged),
            few("few texts part where nobody tells how sure the model was", self.unknown, MAX_UNKNOWN_PERMILLE),
        ]
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [right, diverged, explained, left, wrong] = [
            self.sum(|c| c.right),
            self.sum(|c| c.diverged),
            self.sum(|c| c.explained),
            self.sum(|c| c.left),
            self.sum(|c| c.wrong),
        ];
        write!(f, "right {right} differ {diverged} explained {explained} left {left} wrong {wrong}")
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::{super::asks::Sureness, *};

    fn request(wanted: Wanted) -> Request {
        Request {
            number: Some(7),
            kind: Kind::Reference,
            path: "/v1/completions",
            headers: Vec::new(),
            body: Vec::new(),
            streamed: false,
            usage: true,
            choices: 1,
            prompt_tokens: 9..=9,
            most_completion_tokens: 16,
            logprobs: None,
            wanted,
            deadline: false,
            leave: None,
        }
    }

    fn alone() -> Vec<Alone> {
        let text = "The capital of Peru is Lima.".to_owned();
        let told = |begin, end, margin| Sureness { begin, end, others: vec![(b"?".to_vec(), margin)] };
        let told = vec![told(0, 20, 0.6), told(20, 27, 2.5)];
        vec![Alone { text, reason: "stop".to_owned(), prompt_tokens: 9, completion_tokens: 8, told, end_margin: None }]
    }

    fn answer(text: &str, reason: &str, prompt: u64, completion: u64) -> Reply {
        let choice = Choice { text: text.to_owned(), reason: Some(reason.to_owned()), logprobs: Vec::new() };
        let usage = Some(Tokens { prompt, cached: 0, completion, total: prompt + completion });
        Reply::Answer(Answer { choices: vec![choice], usage })
    }

    fn error(status: Option<u16>, code: &str, retry_after_s: Option<u64>) -> Reply {
        Reply::Error(WireError {
            status,
            code: code.to_owned(),
            message: "m".to_owned(),
            retry_after_s,
            after_text: status.is_none(),
        })
    }

    fn same_as_alone(stop: Option<&str>) -> Request {
        request(Wanted::Alone { reference: 0, stop: stop.map(str::to_owned) })
    }

    #[test]
    fn an_answer_is_held_to_the_one_alone() {
        let whole = "The capital of Peru is Lima.";
        let judged = |request: &Request, reply: &Reply| judge(request, reply, &alone(), false);
        assert_eq!(judged(&same_as_alone(None), &answer(whole, "stop", 9, 8)), Verdict::Right);
        assert_eq!(judged(&same_as_alone(Some(" Peru")), &answer("The capital of", "stop", 9, 4)), Verdict::Right);
        let diverged = judged(&same_as_alone(None), &answer("The capital of Peru is Rome.", "stop", 9, 8));
        assert!(matches!(diverged, Verdict::Diverged { margin: Some(2.5), .. }), "{diverged:?}");
        let at_its_end = judged(&same_as_alone(None), &answer("The capital of Peru is Lima. It", "stop", 9, 8));
        assert!(matches!(at_its_end, Verdict::Diverged { margin: None, .. }), "{at_its_end:?}");
        for (request, reply) in [
            // Tokens of the prompt, of the answer, and their sum.
            (same_as_alone(None), answer(whole, "stop", 10, 8)),
            (same_as_alone(None), answer(whole, "stop", 9, 7)),
            (same_as_alone(Some(" Peru")), answer("The capital of", "stop", 9, 9)),
            (same_as_alone(None), answer(whole, "cancelled", 9, 8)),
            (request(Wanted::Tokens { tokens: 8, exact: true }), answer("x", "length", 9, 7)),
            (request(Wanted::Tokens { tokens: 8, exact: false }), answer("x", "length", 9, 9)),
            (request(Wanted::Counted), answer("yes 4", "stop", 9, 8)),
            (request(Wanted::Object), answer(r#"{"answer":"perhaps","sure":true}"#, "stop", 9, 8)),
            (request(Wanted::Error { status: 400, code: None }), answer(whole, "stop", 9, 8)),
            (same_as_alone(None), Reply::Broken("the stream broke off".to_owned())),
        ] {
            let verdict = judged(&request, &reply);
            assert!(matches!(verdict, Verdict::Wrong(_)), "{reply:?} for {:?}: {verdict:?}", request.wanted);
        }
        for (wanted, text) in [
            (Wanted::Counted, "maybe 42"),
            (Wanted::Object, r#"{"answer":"no","sure":false}"#),
            (Wanted::Tokens { tokens: 8, exact: false }, "x"),
        ] {
            assert_eq!(judged(&request(wanted), &answer(text, "stop", 9, 8)), Verdict::Right, "{text}");
        }
    }

    #[test]
    fn a_text_that_a_stop_string_cut_is_judged_where_the_string_parts() {
        let told = |begin, end, margin| Sureness { begin, end, others: vec![(b"?".to_vec(), margin)] };
        let mut alone = alone();
        alone[0].told = vec![told(0, 20, 2.5), told(20, 27, 0.2)];
        let margin = |text: &str, reason: &str| {
            let verdict = judge(&same_as_alone(Some("u is R")), &answer(text, reason, 9, 6), &alone, false);
            match verdict {
                Verdict::Diverged { margin, .. } => margin,
                other => panic!("{other:?}"),
            }
        };
        // It went on as alone for four characters more.
        assert_eq!(margin("The capital of Per", "stop"), Some(0.2));
        // No stop string cut it, or it had parted before.
        assert_eq!(margin("The capital of Per", "length"), Some(2.5));
        assert_eq!(margin("The capital of Chi", "stop"), Some(2.5));
    }

    #[test]
    fn an_error_needs_its_reason() {
        let plain = same_as_alone(None);
        let hasty = Request { deadline: true, ..same_as_alone(None) };
        let wrong = request(Wanted::Error { status: 400, code: Some("invalid_json") });
        let (died, full) = (Explanation::WorkerDied, Explanation::QueueFull);
        let before_text = Explanation::WorkerDiedBeforeText;
        for (request, reply, disturbed, explained) in [
            (&plain, error(Some(429), "queue_full", Some(3)), false, Some(full)),
            (&plain, error(Some(429), "queue_full", None), false, None),
            (&plain, error(Some(429), "queue_full", Some(61)), false, None),
            (&plain, error(Some(503), "worker_died", Some(1)), true, Some(before_text)),
            (&plain, error(None, "worker_died", None), true, Some(died)),
            (&plain, error(None, "worker_died", None), false, None),
            (&plain, error(Some(503), "worker_died", None), true, None),
            (&plain, error(Some(503), "model_not_ready", Some(1)), true, Some(Explanation::NotReady)),
            (&plain, error(Some(408), "request_timeout", None), false, None),
            (&hasty, error(Some(408), "request_timeout", None), false, Some(Explanation::Expired)),
            (&plain, error(Some(500), "internal_error", None), true, None),
            (&wrong, error(Some(400), "invalid_type", None), false, None),
        ] {
            let verdict = judge(request, &reply, &alone(), disturbed);
            match explained {
                Some(why) => assert_eq!(verdict, Verdict::Explained(why), "{reply:?}"),
                None => assert!(matches!(verdict, Verdict::Wrong(_)), "{reply:?}: {verdict:?}"),
            }
        }
        assert_eq!(judge(&wrong, &error(Some(400), "invalid_json", None), &alone(), false), Verdict::Right);
        assert_eq!(judge(&plain, &Reply::Left, &alone(), false), Verdict::Left);
    }

    #[test]
    fn too_many_differences_are_a_failure() {
        let passed = |texts, surely_diverged, diverged, unknown, wrong: u64| {
            let counts = Counts { sent: wrong, wrong, ..Counts::default() };
            let kinds = [(Kind::Reference, counts)].into();
            let tally = Tally { kinds, texts, surely_diverged, diverged, unknown, ..Tally::default() };
            tally.checks(false).iter().map(|check| check.passed).collect::<Vec<_>>()
        };
        assert_eq!(passed(5000, 0, 750, 100, 0), [true, true, true, true]);
        assert_eq!(passed(5000, 1, 751, 101, 1), [false, false, false, false]);
        assert_eq!(passed(10, 0, 3, 3, 0), [true, true, true, true]);
    }

    #[test]
    fn tokens_that_nobody_told_are_bounded_by_their_request() {
        let now = Instant::now();
        let mut tally = Tally::default();
        let untold = Reply::Answer(Answer { choices: vec![Choice::default()], usage: None });
        let replies = [answer("x", "stop", 9, 5), untold, Reply::Left, error(Some(429), "queue_full", Some(3))];
        for reply in replies {
            let got = Exchange { sent: now, ended: now, reply };
            tally.note(&same_as_alone(None), &got, Verdict::Right);
        }
        assert_eq!(tally.answered, 2);
        assert_eq!(tally.least, TokenSums { prompt: 9 + 9, cached: 0, completion: 5 + 1 });
        assert_eq!(tally.most, TokenSums { prompt: 9 + 9 + 9, cached: 9 + 9, completion: 5 + 16 + 16 });
    }
}
