//! The engine on a real model under everything at once: random arrivals, cancels, priorities, a cache too small for
//! them, prefixes shared and evicted, sequences preempted and resumed. Each answer is what the request gets alone, from
//! an engine that reads every prompt as a whole; and afterwards every slot and every cell is of use again.
#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gantry_engine::{
    Engine, EngineConfig, EngineStats, FinishReason, GenerationEvent, GenerationParams, KvLayout,
    MATRIX_ATTENTION_MIN_CELLS, Message, PrefixCacheConfig, Priority, Prompt, RequestHandle, Role, STAGE_DIVISOR,
    STAGE_MIN_CELLS, TokenChance, TokenLogprob, Usage,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Longer than the whole test; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(300);
const REQUESTS: usize = 320;
/// So many of them at least are not drawn, not cancelled in time, and so compared as a whole.
const LEAST_GREEDY: usize = 200;
/// Sentences before the questions.
const PREAMBLE: usize = 20;
/// How long what ended requests left is kept; long enough for others to find it.
const LEFTOVERS_LIVE_MS: u64 = 2_000;
/// The kernels compute a row a little differently in another batch, so that two tokens that are almost equally likely
/// may change places: in so many answers that the model ends by itself, of which it is sure,
const MAX_DIVERGED: usize = REQUESTS / 100;
/// in so many of those with long prompts, which the model was not trained for (without the second cache 1 to 4 of 200
/// did),
const MAX_LONG_DIVERGED: usize = REQUESTS / 25;
/// and in so many that must go on past that end, where it is not.
const MAX_ENDLESS_DIVERGED: usize = REQUESTS / 10;
/// and in so many that are drawn, with a seed, where a draw that falls beside a token's share gives its neighbour: none
/// differed but those with long prompts, of which up to 9 of 200 did.
const MAX_DRAWN_DIVERGED: usize = REQUESTS / 50;
const MAX_LONG_DRAWN_DIVERGED: usize = REQUESTS / 10;
/// And those that are not drawn nowhere but at a token that the model preferred by less than this, in nats, to the next.
const SURE_MARGIN: f32 = 0.5;
/// Likeliest tokens that are told of each: one that is may not be allowed.
const LIKELIEST: u32 = 4;
/// Tokens for which an answer is asked past its end, so that its last ones are told: the one that ends it and those
/// without text are told only with text after them.
const PAST_THE_END: u32 = 8;
/// The requests that fill the cache have prompts of one part in so many of their cells: they are still generating when
/// the last of them begins, and none is long enough to be read beside the pool.
const FILLING_PROMPT_DIVISOR: u32 = 8;
/// What their prompts are made of: this token and those after it, which are text.
const FILLING_TOKEN: i32 = 1000;
/// So that what is drawn is often not the likeliest token.
const DRAWN_TEMPERATURE: f32 = 1.0;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

/// Questions of the demo models, some after a common beginning that is so many sentences long, some of them asked to go on to
/// the end, and some drawn, each with its seed.
fn requests(rng: &mut StdRng, preamble: usize) -> Vec<(String, GenerationParams)> {
    let text = std::fs::read_to_string(model("eval.jsonl")).unwrap();
    let questions: Vec<Vec<serde_json::Value>> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["messages"].as_array().unwrap().clone())
        .collect();
    let preambles: Vec<String> =
        (0..4).map(|i| format!("You are assistant number {i}. {}", "Answer shortly. ".repeat(preamble))).collect();
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let mut draws = StdRng::seed_from_u64(21);
    (0..REQUESTS)
        .map(|_| {
            let mut messages = questions[rng.random_range(0..questions.len())].clone();
            if rng.random_bool(0.6) {
                let preamble = &preambles[rng.random_range(0..preambles.len())];
                messages.insert(0, serde_json::json!({"role": "system", "content": preamble}));
            }
            let seed = draws.random_bool(0.25).then(|| draws.random());
            let past_its_end = rng.random_bool(0.3);
            let params = GenerationParams {
                ignore_eos: seed.is_none() && past_its_end,
                priority: priorities[rng.random_range(0..3)],
                temperature: if seed.is_some() { DRAWN_TEMPERATURE } else { 0.0 },
                seed,
                ..GenerationParams::greedy(rng.random_range(10..80))
            };
            (serde_json::Value::from(messages).to_string(), params)
        })
        .collect()
}

/// Text as it was sent, with the number of its tokens. The same tokens are always sent in the same parts.
#[derive(PartialEq)]
struct Part {
    text: String,
    tokens: usize,
}

/// An answer, as far as it went.
struct Answer {
    text: String,
    parts: Vec<Part>,
    /// Those of the parts, where they were asked for.
    tokens: Vec<TokenLogprob>,
    reason: FinishReason,
    usage: Usage,
}

impl Answer {
    fn of(events: impl Iterator<Item = GenerationEvent>) -> Self {
        let (mut text, mut parts, mut tokens, mut prompt) = (String::new(), Vec::new(), Vec::new(), None);
        for event in events {
            match event {
                GenerationEvent::Started { prompt_tokens, .. } => prompt = Some(prompt_tokens),
                GenerationEvent::Text { text: more, tokens: count, logprobs } => {
                    text.push_str(&more);
                    parts.push(Part { text: more, tokens: count as usize });
                    tokens.extend(logprobs);
                }
                GenerationEvent::Finished { reason, usage, .. } => {
                    assert!(prompt.is_none_or(|tokens| tokens == usage.prompt_tokens), "{prompt:?}: {usage:?}");
                    let told: usize = parts.iter().map(|part| part.tokens).sum();
                    assert!(told <= usage.completion_tokens as usize, "{told} tokens were sent: {usage:?}");
                    return Self { text, parts, tokens, reason, usage };
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("an answer without an end")
    }

    fn alone(engine: &Engine, prompt: Prompt, params: &GenerationParams) -> Self {
        let (sender, events) = mpsc::channel();
        let params = GenerationParams { logprobs: Some(LIKELIEST), ..params.clone() };
        engine.submit(prompt, params, Box::new(move |event| drop(sender.send(event)))).unwrap();
        Self::of(events.into_iter())
    }

    /// Whether another one is this one, or was cancelled before it was another one.
    fn is(&self, other: &Self) -> bool {
        if other.reason == FinishReason::Cancelled {
            return self.text.starts_with(&other.text);
        }
        let whole = |answer: &Self| (answer.reason, answer.usage.completion_tokens);
        self.text == other.text && whole(self) == whole(other)
    }

    /// The first token that another one has otherwise, as far as the tokens of both were told.
    fn parted_at(&self, other: &Self) -> Option<usize> {
        self.tokens.iter().zip(&other.tokens).position(|(token, other)| token.token.id != other.token.id)
    }

    /// The tokens one of which is the first that another one has otherwise, by the text alone.
    fn parted_within(&self, other: &Self) -> Range<usize> {
        let alike = self.parts.iter().zip(&other.parts).take_while(|(part, other)| part == other).count();
        let from: usize = self.parts[..alike].iter().map(|part| part.tokens).sum();
        // Behind the last part are the token that ended the answer and those without text before it.
        from..self.parts.get(alike).map_or(self.usage.completion_tokens as usize, |part| from + part.tokens)
    }
}

/// By how much the model preferred the token that it chose to the one that is there in another answer; where that is
/// not known, to the likeliest that it may be.
fn margin(chosen: &TokenChance, top: &[TokenChance], other: Option<i32>) -> f32 {
    let other = match other {
        // One that is not told is less likely than all that are.
        Some(other) => top.iter().find(|next| next.id == other).or(top.last()),
        // What is likelier than the token that was chosen was not allowed.
        None => top.iter().find(|next| next.id != chosen.id && next.logprob <= chosen.logprob),
    };
    other.map_or(f32::INFINITY, |other| chosen.logprob - other.logprob)
}

/// A request's answer, and the one that it gets alone, from an engine that can be asked again.
struct Compared<'a> {
    alone: &'a Engine,
    json: &'a str,
    params: &'a GenerationParams,
    want: &'a Answer,
    got: &'a Answer,
}

impl Compared<'_> {
    /// By how much the model alone preferred the token from which on the answer is another one; `None`: it is none.
    fn margin_where_parted(&self) -> Option<f32> {
        let Self { want, got, .. } = *self;
        if let Some(at) = want.parted_at(got) {
            let TokenLogprob { token, top } = &want.tokens[at];
            return Some(margin(token, top, Some(got.tokens[at].token.id)));
        }
        (!want.is(got)).then(|| self.margin_by_text())
    }

    /// The same where the tokens are not told, or one of the answers ends there: the least of those that it may be.
    fn margin_by_text(&self) -> f32 {
        let max_tokens = Some(self.want.usage.completion_tokens + PAST_THE_END);
        let params = GenerationParams { ignore_eos: true, max_tokens, ..self.params.clone() };
        let went_on = Answer::alone(self.alone, chat(self.json), &params);
        let margins = self.want.parted_within(self.got).map(|at| {
            let Some(TokenLogprob { token, top }) = went_on.tokens.get(at) else { return f32::INFINITY };
            // Where it ended, the end was the likeliest, which is not allowed here.
            let chosen = if self.params.ignore_eos { token } else { top.first().unwrap_or(token) };
            margin(chosen, top, None)
        });
        margins.fold(f32::INFINITY, f32::min)
    }
}

/// Messages that are text alone.
fn chat(json: &str) -> Prompt {
    let messages: Vec<serde_json::Value> = serde_json::from_str(json).unwrap();
    let role = |message: &serde_json::Value| match message["role"].as_str().unwrap() {
        "system" => Role::System,
        "user" => Role::User,
        _ => Role::Assistant,
    };
    let message = |message| Message::text(role(message), message["content"].as_str().unwrap());
    Prompt::chat(messages.iter().map(message).collect::<Vec<_>>())
}

struct Running {
    index: usize,
    handle: RequestHandle,
    events: mpsc::Receiver<GenerationEvent>,
    cancelled: bool,
    /// Events that were received while others were still submitted.
    seen: Vec<GenerationEvent>,
}

/// Ten sequences over cells for about three of the long ones.
#[test]
fn answers_under_load_in_one_pool_are_the_answers_alone() {
    let pool = EngineConfig { parallel: 10, ctx_size: 1024, kv_layout: KvLayout::Unified, ..config() };
    let stats = load(&pool, PREAMBLE);
    assert!(stats.kv_unified && stats.flash_attention && stats.evictions_total > 0, "{stats:?}");
    assert_eq!((stats.stage_positions, stats.staged_prompts_total), (0, 0));
}

/// As many over cells for about six of those that are long enough to be read beside the pool.
#[test]
fn answers_whose_prompts_are_read_beside_the_pool_are_the_answers_alone() {
    let ctx_size = STAGE_MIN_CELLS * STAGE_DIVISOR;
    let pool = EngineConfig { parallel: 10, ctx_size, kv_layout: KvLayout::Unified, ..config() };
    let stats = load(&pool, 4 * PREAMBLE);
    assert!(stats.stage_positions == STAGE_MIN_CELLS && stats.staged_prompts_total > 4, "{stats:?}");
}

/// Three sequences with cells of their own, so that those of low priority give way, and attention without the kernel that
/// a pool has.
#[test]
fn answers_under_load_in_a_split_cache_are_the_answers_alone() {
    let split = EngineConfig { parallel: 3, ctx_size: 3 * MATRIX_ATTENTION_MIN_CELLS, ..config() };
    let stats = load(&split, PREAMBLE);
    assert!(!stats.kv_unified && !stats.flash_attention && stats.cached_ram_tokens_total > 0, "{stats:?}");
}

fn config() -> EngineConfig {
    let prefix_cache = PrefixCacheConfig { ttl_ms: Some(LEFTOVERS_LIVE_MS), ..PrefixCacheConfig::default() };
    let model = model("demo-v2.q8_0.gguf");
    EngineConfig { max_queue: REQUESTS, prefill_tokens_per_step: 64, prefix_cache, ..EngineConfig::new(model) }
}

fn load(config: &EngineConfig, preamble: usize) -> EngineStats {
    let is_long = preamble > PREAMBLE;
    let most_diverged = if is_long { MAX_LONG_DIVERGED } else { MAX_DIVERGED };
    let most_drawn_diverged = if is_long { MAX_LONG_DRAWN_DIVERGED } else { MAX_DRAWN_DIVERGED };
    let mut rng = StdRng::seed_from_u64(20);
    let requests = requests(&mut rng, preamble);
    // What reuses nothing does not share a mistake in that.
    let prefix_cache = PrefixCacheConfig { enabled: false, ram_bytes: 0, ..PrefixCacheConfig::default() };
    let alone = EngineConfig { parallel: 1, ctx_size: 1024, prefix_cache, ..config.clone() };
    let alone = Engine::load(alone, |_| true).unwrap();
    let expected: Vec<_> = requests.iter().map(|(json, params)| Answer::alone(&alone, chat(json), params)).collect();
    assert!(expected.iter().all(|answer| answer.usage.cached_tokens == 0));

    let engine = Engine::load(config.clone(), |_| true).unwrap();
    let mut running = Vec::new();
    for (index, (json, params)) in requests.iter().enumerate() {
        let (sender, events) = mpsc::channel();
        let sink = Box::new(move |event| drop(sender.send(event)));
        // Of every second one the tokens are told, too; the others are sampled as most are.
        let logprobs = (index % 2 == 1).then_some(0);
        let handle = engine.submit(chat(json), GenerationParams { logprobs, ..params.clone() }, sink).unwrap();
        running.push(Running { index, handle, events, cancelled: false, seen: Vec::new() });
        if rng.random_bool(0.1) {
            let victim = rng.random_range(0..running.len());
            running[victim].handle.cancel();
            running[victim].cancelled = true;
        }
        // Arrivals come in bursts: between them a request is waited for.
        if rng.random_bool(0.15) {
            let next = rng.random_range(0..running.len());
            let first = running[next].events.recv_timeout(PATIENCE).ok();
            running[next].seen.extend(first);
        }
    }
    let (mut diverged, mut endless_diverged, mut drawn_diverged) = (0, 0, 0);
    let (mut complete, mut greedy, mut parted) = (0, 0, 0);
    for Running { index, events, cancelled, seen, .. } in running {
        let got = Answer::of(seen.into_iter().chain(events));
        let (want, (json, params)) = (&expected[index], &requests[index]);
        if got.reason == FinishReason::Cancelled {
            assert!(cancelled, "{index}");
        } else {
            complete += 1;
            greedy += usize::from(params.seed.is_none());
            assert_eq!(got.usage.prompt_tokens, want.usage.prompt_tokens, "{index}");
        }
        if got.reason == FinishReason::Length {
            assert_eq!(Some(got.usage.completion_tokens), params.max_tokens, "{index}");
        }
        let compared = Compared { alone: &alone, json, params, want, got: &got };
        if params.seed.is_none()
            && let Some(margin) = compared.margin_where_parted()
        {
            assert!(margin < SURE_MARGIN, "{index}: parted at a token that was preferred by {margin} nats");
            parted += 1;
        }
        let count = match (params.seed, params.ignore_eos) {
            (Some(_), _) => &mut drawn_diverged,
            (None, true) => &mut endless_diverged,
            (None, false) => &mut diverged,
        };
        *count += usize::from(!want.is(&got));
    }
    let stats = engine.stats();
    println!(
        "{complete} complete, {greedy} of them greedy; differ: {diverged}, past their end {endless_diverged}, drawn \
         {drawn_diverged}, {parted} seen; {stats:?}"
    );
    assert!(greedy >= LEAST_GREEDY, "only {greedy} greedy answers were compared as a whole");
    assert!(diverged <= most_diverged, "{diverged} of {REQUESTS} answers differ from those alone");
    assert!(endless_diverged <= MAX_ENDLESS_DIVERGED, "{endless_diverged} of {REQUESTS} endless answers do");
    assert!(drawn_diverged <= most_drawn_diverged, "{drawn_diverged} of {REQUESTS} answers that are drawn do");
    assert!(stats.preemptions_total > 0 && stats.cached_device_tokens_total > 0, "{stats:?}");
    assert_eq!((stats.slots_active, stats.queued, stats.requests_failed_total), (0, 0, 0));
    assert_eq!(stats.requests_finished_total, REQUESTS as u64);
    assert!(stats.kv_used_cells <= stats.kv_total_cells);
    wait_until_nothing_is_held(&engine);
    fill(&engine);
    wait_until_nothing_is_held(&engine);
    stats
}

/// What ended requests left goes when nobody comes back to it, and nothing else is held.
fn wait_until_nothing_is_held(engine: &Engine) {
    let started = Instant::now();
    while engine.stats().kv_used_cells > 0 || engine.stats().prefix_cache_bytes > 0 {
        assert!(started.elapsed() < PATIENCE, "{:?}", engine.stats());
        std::thread::sleep(Duration::from_millis(LEFTOVERS_LIVE_MS / 10));
    }
}

/// The books are the engine's own. That they are right shows in requests that together need every slot and all the
/// cells, but for those that cannot be shared out: with more of them held for nobody, someone would have to give way.
fn fill(engine: &Engine) {
    let before = engine.stats();
    let slots = before.slots_total;
    let share = u32::try_from(before.kv_total_cells).unwrap() / slots;
    let prompt_tokens = share / FILLING_PROMPT_DIVISOR;
    // The last token of an answer needs no cell.
    let completion_tokens = share - prompt_tokens + 1;
    let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(completion_tokens) };
    let (sender, events) = mpsc::channel();
    // Each has a token of its own, so that none finds a beginning to share.
    for token in (FILLING_TOKEN..).take(slots as usize) {
        let sender = sender.clone();
        let prompt = Prompt::Tokens(vec![token; prompt_tokens as usize]);
        engine.submit(prompt, params.clone(), Box::new(move |event| drop(sender.send(event)))).unwrap();
    }
    drop(sender);
    let (mut started, mut ended) = (0, 0);
    while ended < slots {
        match events.recv_timeout(PATIENCE).unwrap() {
            GenerationEvent::Started { .. } => started += 1,
            GenerationEvent::Text { .. } => {}
            GenerationEvent::Finished { reason, usage, .. } => {
                assert_eq!(started, slots, "one ended before all had a slot");
                assert_eq!(reason, FinishReason::Length);
                assert_eq!(usage, Usage { prompt_tokens, completion_tokens, ..Usage::default() });
                ended += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    let after = engine.stats();
    assert_eq!((after.slots_active, after.queued, after.requests_failed_total), (0, 0, 0));
    let made_room = |stats: &EngineStats| (stats.preemptions_total, stats.evictions_total);
    assert_eq!(made_room(&after), made_room(&before), "{after:?}");
}
