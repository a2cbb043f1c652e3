//! The pool that prepares prompts, with both of its threads held up.
#![allow(clippy::unwrap_used)]

use crossbeam_channel::unbounded;
use gantry_core::{Chat, Infill, InfillFile, Message, Role, TextInput, Turn};
use gantry_llama::{InfillTokens, SpecialTokens, TokenTexts};

use super::*;
use crate::backend::scripted::ScriptedVocabulary;
use crate::backend::{Reads, RenderedChat};
use crate::error::RequestError;
use crate::event::GenerationEvent;
use crate::params::Priority;
use crate::request::Permit;
use crate::stats::Stats;

const LIMIT: u32 = 16;
/// See [`Gated::render`].
const SLOW: &str = "slow";

/// What the request with this ticket was told.
type Told = (u64, GenerationEvent);

/// Says what it is given, and waits until it may go on.
struct Gated {
    given: Sender<String>,
    gate: Receiver<()>,
    infills: bool,
}

impl Vocabulary for Gated {
    fn tokenize(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.given.send(text.to_owned()).unwrap();
        // An open gate has nobody before it.
        let _ = self.gate.recv();
        ScriptedVocabulary.tokenize(text, specials)
    }

    fn size(&self) -> u32 {
        ScriptedVocabulary.size()
    }

    fn longest_token(&self) -> usize {
        ScriptedVocabulary.longest_token()
    }

    fn tokenize_bare(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        ScriptedVocabulary.tokenize_bare(text, specials)
    }

    fn infill_tokens(&self) -> Option<InfillTokens> {
        self.infills.then(|| ScriptedVocabulary.infill_tokens()).flatten()
    }

    fn pair(&self, query: &str, document: &str) -> Result<Vec<Token>, RequestError> {
        ScriptedVocabulary.pair(query, document)
    }

    /// Chats that are "slow" take longer than a quick pace, and wait like what is tokenised.
    fn render(&self, chat: &Chat, reads: Reads, pace: Pace) -> Result<Option<RenderedChat>, RequestError> {
        if chat.messages[0].said() == SLOW {
            if pace == Pace::Quick {
                return Ok(None);
            }
            self.given.send(SLOW.to_owned()).unwrap();
            let _ = self.gate.recv();
        }
        ScriptedVocabulary.render(chat, reads, pace)
    }

    fn piece(&self, token: Token, out: &mut Vec<u8>) {
        ScriptedVocabulary.piece(token, out);
    }

    fn shown_piece(&self, token: Token, out: &mut Vec<u8>) {
        ScriptedVocabulary.shown_piece(token, out);
    }

    fn texts(&self) -> &Arc<TokenTexts> {
        ScriptedVocabulary.texts()
    }

    fn texts_with(&self, markup: &[Token]) -> Arc<TokenTexts> {
        ScriptedVocabulary.texts_with(markup)
    }

    fn end_tokens(&self) -> &[Token] {
        ScriptedVocabulary.end_tokens()
    }
}

/// A pool whose threads are both at a prompt, until the gate lets them go on.
struct Busy {
    stats: Arc<Stats>,
    jobs: Option<Jobs>,
    threads: Vec<JoinHandle<()>>,
    given: Receiver<String>,
    gate: Option<Sender<()>>,
    ready: Receiver<u64>,
    events: (Sender<Told>, Receiver<Told>),
    tickets: u64,
}

impl Busy {
    /// With nothing to do.
    fn idle() -> Self {
        Self::of(true, false)
    }

    /// The same with a model that fills gaps, or fills none.
    fn of(infills: bool, suffix_first: bool) -> Self {
        let ((given_to, given), (gate, gated), (ready_to, ready)) = (unbounded(), unbounded(), unbounded());
        let preparer = Preparer {
            vocabulary: Arc::new(Gated { given: given_to, gate: gated, infills }),
            positions: 100,
            suffix_first,
            grammars: Grammars::default(),
            answer_grammars: Grammars::default(),
            fingerprint: None,
            disk: None,
            indexer: None,
        };
        let (jobs, threads) = preparer.spawn(move |request| ready_to.send(request.ticket).unwrap()).unwrap();
        let stats = Arc::new(Stats::new(1, 1, Arc::default()));
        let (jobs, gate) = (Some(jobs), Some(gate));
        Self { stats, jobs, threads, given, gate, ready, events: unbounded(), tickets: 0 }
    }

    /// With both threads that tokenise at a prompt.
    fn new() -> Self {
        let mut busy = Self::idle();
        for _ in 0..PREPARE_THREADS {
            busy.push("first", Priority::Low, None);
            assert_eq!(busy.given.recv().unwrap(), "first");
        }
        busy
    }

    fn push(&mut self, prompt: &str, priority: Priority, deadline: Option<Instant>) -> u64 {
        self.push_prompt(Prompt::Text(prompt.to_owned()), priority, deadline)
    }

    fn push_chat(&mut self, said: &str) -> u64 {
        self.push_prompt(Prompt::chat(vec![Message::text(Role::User, said)]), Priority::Normal, None)
    }

    fn push_of(&mut self, prompt: &str, turn: Turn) -> u64 {
        self.push_params(
            Prompt::Text(prompt.to_owned()),
            GenerationParams { turn, ..GenerationParams::greedy(4) },
            None,
        )
    }

    fn push_prompt(&mut self, prompt: Prompt, priority: Priority, deadline: Option<Instant>) -> u64 {
        self.push_params(prompt, GenerationParams { priority, ..GenerationParams::greedy(4) }, deadline)
    }

    fn push_params(&mut self, prompt: Prompt, params: GenerationParams, deadline: Option<Instant>) -> u64 {
        self.tickets += 1;
        let (ticket, events) = (self.tickets, self.events.0.clone());
        let sink = Box::new(move |event| events.send((ticket, event)).unwrap());
        let signals = Arc::new(Signals::default());
        let permit = Permit::take(&self.stats, LIMIT).unwrap();
        let job = Job {
            ticket,
            prompt: Arc::new(prompt),
            params,
            emitter: Emitter::new(sink, self.stats.clone(), permit, signals.clone()),
            signals,
            submitted_at: Instant::now(),
            deadline,
        };
        assert!(self.jobs.as_ref().unwrap().push(Box::new(job)));
        ticket
    }

    /// Lets everyone go on, waits until all are ready, and for the pool's end.
    fn end_all(&mut self) {
        self.gate = None;
        while self.ready.len() < usize::try_from(self.tickets).unwrap() {
            std::thread::yield_now();
        }
        self.end();
    }

    /// Lets everyone go on, and waits for the pool's end.
    fn end(&mut self) {
        (self.jobs, self.gate) = (None, None);
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

#[test]
fn prompts_are_prepared_in_the_order_of_their_priorities() {
    let mut busy = Busy::new();
    let prompts = [
        ("low", Priority::Low),
        ("normal", Priority::Normal),
        ("high", Priority::High),
        ("high again", Priority::High),
        ("normal again", Priority::Normal),
    ];
    for (prompt, priority) in prompts {
        busy.push(prompt, priority, None);
    }
    let mut order = Vec::new();
    for _ in prompts {
        busy.gate.as_ref().unwrap().send(()).unwrap();
        order.push(busy.given.recv().unwrap());
    }
    assert_eq!(order, ["high", "high again", "normal", "normal again", "low"]);
    busy.end();
    let mut ready: Vec<u64> = busy.ready.iter().collect();
    ready.sort_unstable();
    assert_eq!(ready, (1..=7).collect::<Vec<_>>(), "each is delivered, and once");
}

#[test]
fn the_prompts_of_several_clients_are_prepared_by_turns() {
    let mut busy = Busy::new();
    for (prompt, client, start_tag) in [("a0", 1, 0), ("a1", 1, 10), ("a2", 1, 20), ("b0", 2, 5), ("b1", 2, 10)] {
        busy.push_of(prompt, Turn { client, start_tag });
    }
    let mut order = Vec::new();
    for _ in 0..5 {
        busy.gate.as_ref().unwrap().send(()).unwrap();
        order.push(busy.given.recv().unwrap());
    }
    // Those that the threads are at are of low priority.
    assert_eq!(order, ["a0", "b0", "a1", "b1", "a2"]);
    busy.end();
}

#[test]
fn what_waits_when_the_pool_ends_is_not_prepared_and_told() {
    let mut busy = Busy::new();
    let ticket = busy.push("waits", Priority::Normal, None);
    busy.stats.shutting_down.store(true, std::sync::atomic::Ordering::Relaxed);
    busy.end();
    assert!(busy.given.try_recv().is_err(), "nothing more was tokenised");
    let told = |event| matches!(event, (of, GenerationEvent::Failed(RequestError::ShuttingDown)) if of == ticket);
    assert!(busy.events.1.try_iter().any(told));
}

#[test]
fn a_prompt_that_is_too_late_is_not_tokenised() {
    let mut busy = Busy::new();
    let ticket = busy.push("late", Priority::Normal, Some(Instant::now()));
    busy.push("in time", Priority::Normal, None);
    busy.gate.as_ref().unwrap().send(()).unwrap();
    assert_eq!(busy.given.recv().unwrap(), "in time");
    let late =
        |event| matches!(event, (of, GenerationEvent::Failed(RequestError::DeadlineExceeded { .. })) if of == ticket);
    assert!(busy.events.1.try_iter().any(late));
    busy.end();
}

#[test]
fn chats_that_take_long_hold_up_nobody_else() {
    let mut busy = Busy::idle();
    // More than are rendered at once: all of them wait, at the gate or for it.
    let slow: Vec<u64> = (0..3 * SLOW_RENDER_THREADS).map(|_| busy.push_chat(SLOW)).collect();
    for _ in 0..SLOW_RENDER_THREADS {
        assert_eq!(busy.given.recv().unwrap(), SLOW);
    }
    let quick: Vec<u64> = vec![busy.push_chat("quick"), busy.push("text", Priority::Normal, None)];
    let mut given: Vec<String> = quick.iter().map(|_| busy.given.recv().unwrap()).collect();
    given.sort_unstable();
    assert_eq!(given, ["<quick>", "text"]);
    busy.end_all();
    let mut ready: Vec<u64> = busy.ready.iter().collect();
    ready.sort_unstable();
    assert_eq!(ready, [slow, quick].concat(), "each is delivered, and once");
}

#[test]
fn chats_that_wait_to_be_rendered_when_the_pools_end_are_told() {
    let mut busy = Busy::idle();
    let slow: Vec<u64> = (0..3 * SLOW_RENDER_THREADS).map(|_| busy.push_chat(SLOW)).collect();
    for _ in 0..SLOW_RENDER_THREADS {
        assert_eq!(busy.given.recv().unwrap(), SLOW);
    }
    busy.stats.shutting_down.store(true, std::sync::atomic::Ordering::Relaxed);
    busy.end();
    assert!(busy.given.try_iter().all(|given| given != SLOW), "no other was begun");
    assert_eq!(busy.ready.iter().count(), SLOW_RENDER_THREADS, "those that were begun are delivered");
    let is_told = |(_, event): &Told| matches!(event, GenerationEvent::Failed(RequestError::ShuttingDown));
    assert_eq!(busy.events.1.try_iter().filter(is_told).count(), slow.len());
}

#[test]
fn what_a_prompt_is_is_told_and_nothing_is_delivered() {
    let mut busy = Busy::idle();
    busy.gate = None;
    let extent = |form| GenerationParams { extent: Extent::Prompt(form), ..GenerationParams::default() };
    let tokens = |with_pieces| extent(PromptForm::Tokens { adds_special: true, with_pieces });
    let text = "x".repeat(300);
    let ids = ScriptedVocabulary.tokenize(&text, SpecialTokens::None).unwrap();
    let piece = |id| {
        let mut bytes = Vec::new();
        ScriptedVocabulary.shown_piece(id, &mut bytes);
        bytes
    };
    let end = *ScriptedVocabulary.end_tokens().first().unwrap();
    let said: String = String::from_utf8([7, end, 8].map(piece).concat()).unwrap();
    assert!(said.contains("<end>"), "a special token has its name");
    for (prompt, params, wanted) in [
        // Longer than any sequence.
        (Prompt::Text(text), tokens(false), ShownPrompt::Tokens(ids)),
        (
            Prompt::Text("ab".into()),
            tokens(true),
            ShownPrompt::Pieces(
                ScriptedVocabulary
                    .tokenize("ab", SpecialTokens::None)
                    .unwrap()
                    .into_iter()
                    .map(|id| TokenPiece { id, bytes: piece(id) })
                    .collect(),
            ),
        ),
        (Prompt::Text(String::new()), tokens(false), ShownPrompt::Tokens(vec![])),
        (Prompt::Tokens(vec![7, end, 8]), extent(PromptForm::Text), ShownPrompt::Text(said)),
        (
            Prompt::chat(vec![Message::text(Role::User, "Hi")]),
            extent(PromptForm::Text),
            ShownPrompt::Text("<Hi>".into()),
        ),
        (Prompt::chat(vec![Message::text(Role::User, "Hi")]), extent(PromptForm::Count), ShownPrompt::Count(4)),
    ] {
        let ticket = busy.push_params(prompt, params, None);
        assert_eq!(busy.events.1.recv().unwrap(), (ticket, GenerationEvent::Prompt(wanted)));
        let (of, event) = busy.events.1.recv().unwrap();
        assert!(of == ticket && matches!(event, GenerationEvent::Finished { .. }), "{event:?}");
    }
    let ticket = busy.push_params(Prompt::Tokens(vec![1 << 30]), extent(PromptForm::Text), None);
    let (of, event) = busy.events.1.recv().unwrap();
    assert!(of == ticket && matches!(&event, GenerationEvent::Failed(error) if error.code() == "invalid_token"));
    // Nothing that no context takes is tokenised to be counted.
    let ticket = busy.push_params(Prompt::Text("x".repeat(300)), extent(PromptForm::Count), None);
    let (of, event) = busy.events.1.recv().unwrap();
    let too_long =
        matches!(&event, GenerationEvent::Failed(error) if matches!(error, RequestError::ContextLengthExceeded { .. }));
    assert!(of == ticket && too_long, "{event:?}");
    let long = ScriptedVocabulary.tokenize(&"x".repeat(MAX_SHOWN_TEXT_BYTES + 1), SpecialTokens::None).unwrap();
    let ticket = busy.push_params(Prompt::Tokens(long), extent(PromptForm::Text), None);
    let (of, event) = busy.events.1.recv().unwrap();
    assert!(of == ticket && matches!(&event, GenerationEvent::Failed(error) if error.code() == "prompt_too_large"));
    busy.end();
    assert_eq!(busy.ready.iter().count(), 0);
}

/// What a gap is to a model: its tokens, or the code and the field of its error.
fn infilled(busy: &mut Busy, infill: Infill) -> Result<Vec<Token>, (String, Option<String>)> {
    let form = PromptForm::Tokens { adds_special: true, with_pieces: false };
    let params = GenerationParams { extent: Extent::Prompt(form), ..GenerationParams::default() };
    let ticket = busy.push_params(Prompt::Infill(Box::new(infill)), params, None);
    let (of, event) = busy.events.1.recv().unwrap();
    assert_eq!(of, ticket);
    match event {
        GenerationEvent::Prompt(ShownPrompt::Tokens(tokens)) => {
            assert!(matches!(busy.events.1.recv().unwrap().1, GenerationEvent::Finished { .. }));
            Ok(tokens)
        }
        GenerationEvent::Failed(RequestError::InvalidRequest { param, code, .. }) => Err((code, param)),
        other => panic!("{other:?}"),
    }
}

fn gap(prefix: &str, suffix: &str, files: Option<&[(&str, &str)]>) -> Infill {
    let file = |(name, text): &(&str, &str)| InfillFile { name: (*name).to_owned(), text: (*text).to_owned() };
    Infill {
        prefix: TextInput::Text(prefix.to_owned()),
        begun: "b".to_owned(),
        suffix: suffix.to_owned(),
        suffix_param: "input_suffix".to_owned(),
        files: files.map(|files| files.iter().map(file).collect()),
    }
}

#[test]
fn a_gap_is_laid_out_as_the_model_reads_it() {
    let InfillTokens { prefix, suffix, middle, repository, file, .. } = ScriptedVocabulary.infill_tokens().unwrap();
    let text = |text: &str| ScriptedVocabulary.tokenize(text, SpecialTokens::None).unwrap();
    let named = |token: Option<Token>, name: &str| [vec![token.unwrap()], text(name)].concat();
    let (before, after) = ([vec![prefix], text("preb")].concat(), [vec![suffix], text("suf")].concat());
    for (suffix_first, around) in [(false, [&before, &after]), (true, [&after, &before])] {
        let mut busy = Busy::of(true, suffix_first);
        busy.gate = None;
        let around = around.map(Vec::clone).concat();
        let plain = [around.clone(), vec![middle]].concat();
        assert_eq!(infilled(&mut busy, gap("pre", "suf", None)), Ok(plain));
        let tokens = Infill { prefix: TextInput::Tokens(text("pre")), ..gap("", "suf", None) };
        assert_eq!(infilled(&mut busy, tokens), Ok([around.clone(), vec![middle]].concat()));
        // The last of the files that there is room for, each of them whole.
        let (head, tail) = (named(repository, "myproject\n"), named(file, "filename\n"));
        let of_file = |name: &str, said: &str| [named(file, &format!("{name}\n")), text(said)].concat();
        let long = "x".repeat(60);
        for (files, taken) in [
            (&[][..], vec![]),
            (&[("a", "one"), ("b", "two")], [of_file("a", "one"), of_file("b", "two")].concat()),
            (&[("a", "one"), ("b", &long), ("c", "two")], of_file("c", "two")),
        ] {
            let wanted = [head.clone(), taken, tail.clone(), around.clone(), vec![middle]].concat();
            assert_eq!(infilled(&mut busy, gap("pre", "suf", Some(files))), Ok(wanted), "{files:?}");
        }
        busy.end();
    }
}

#[test]
fn a_gap_that_cannot_be_filled_is_refused_by_its_field() {
    let mut busy = Busy::of(true, false);
    busy.gate = None;
    let (long, too_long) = ("x".repeat(60), "context_length_exceeded".to_owned());
    for (prefix, suffix, param) in
        [(&*"x".repeat(200), "", "prompt"), ("", &*"x".repeat(200), "input_suffix"), (&*long, &*long, "prompt")]
    {
        let refused = infilled(&mut busy, gap(prefix, suffix, None));
        assert_eq!(refused, Err((too_long.clone(), Some(param.to_owned()))));
    }
    let foreign = Infill { prefix: TextInput::Tokens(vec![1 << 30]), ..gap("", "", None) };
    assert_eq!(infilled(&mut busy, foreign), Err(("invalid_token".to_owned(), Some("prompt".to_owned()))));
    busy.end();
    let mut busy = Busy::of(false, false);
    busy.gate = None;
    let refused = infilled(&mut busy, gap("pre", "suf", None));
    assert_eq!(refused, Err(("unsupported_parameter".to_owned(), Some("input_suffix".to_owned()))));
    busy.end();
}
