//! From what a request says to what the engine is told, and back for errors: the engine's names of parameters are not
//! always those that the client used.

use std::borrow::Cow;

use axum::http::{HeaderMap, HeaderName};
use gantry_engine::{DryParams, GenerationParams, Grammar, Turn};
use gantry_openai::{ApiError, Common, ErrorCode, Format, MAX_QUEUE_TIMEOUT_MS, Priority, Sampling};

/// The header that says who goes first; it goes before the body's `priority`, since a gateway can set it.
const PRIORITY_HEADER: &str = "x-gantry-priority";
/// The header that says how long a request is worth waiting for, in milliseconds to its first token.
const QUEUE_TIMEOUT_HEADER: &str = "x-gantry-queue-timeout-ms";
/// What keeps the seeds of one request's answers apart: Knuth's odd number nearest to 2^64 over the golden ratio, so that
/// they differ in their lower halves, too.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What the headers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scheduling {
    pub(super) priority: Option<Priority>,
    pub(super) queue_timeout_ms: Option<u64>,
}

impl Scheduling {
    pub(super) fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let word = |name: &'static str| match headers.get(HeaderName::from_static(name)) {
            Some(value) => value.to_str().map(Some).map_err(|_| wrong_header(name, "must be plain ASCII")),
            None => Ok(None),
        };
        let priority = word(PRIORITY_HEADER)?.map(|word| Priority::parse(PRIORITY_HEADER, word)).transpose()?;
        let queue_timeout_ms = word(QUEUE_TIMEOUT_HEADER)?.map(milliseconds).transpose()?;
        Ok(Self { priority, queue_timeout_ms })
    }
}

fn milliseconds(word: &str) -> Result<u64, ApiError> {
    word.parse().ok().filter(|ms| (1..=MAX_QUEUE_TIMEOUT_MS).contains(ms)).ok_or_else(|| {
        wrong_header(QUEUE_TIMEOUT_HEADER, &format!("must be an integer from 1 to {MAX_QUEUE_TIMEOUT_MS}"))
    })
}

fn wrong_header(name: &'static str, message: &str) -> ApiError {
    ApiError::invalid(Some(Cow::Borrowed(name)), ErrorCode::InvalidValue, format!("`{name}` {message}."))
}

/// The engine's parameters for the first answer; see [`seed_of`] for the others.
pub(super) fn params(common: &Common, scheduling: Scheduling) -> GenerationParams {
    let Sampling {
        max_tokens,
        temperature,
        top_p,
        top_k,
        min_p,
        typical_p,
        xtc_probability,
        xtc_threshold,
        repeat_penalty,
        repeat_last_n,
        frequency_penalty,
        presence_penalty,
        dry,
        logit_bias,
        seed,
        stop,
        ignore_eos,
    } = common.sampling.clone();
    let grammar = match &common.format {
        Format::Text => None,
        Format::JsonObject => Some(Grammar::JsonSchema { schema: r#"{"type":"object"}"#.to_owned(), strict: true }),
        Format::JsonSchema { schema, strict } => Some(Grammar::JsonSchema { schema: schema.clone(), strict: *strict }),
        Format::Grammar(grammar) => Some(Grammar::Gbnf(grammar.clone())),
    };
    GenerationParams {
        max_tokens,
        temperature,
        top_p,
        top_k,
        min_p,
        typical_p,
        xtc_probability,
        xtc_threshold,
        repeat_penalty,
        repeat_last_n,
        frequency_penalty,
        presence_penalty,
        dry: DryParams {
            multiplier: dry.multiplier,
            base: dry.base,
            allowed_length: dry.allowed_length,
            penalty_last_n: dry.penalty_last_n,
            sequence_breakers: dry.sequence_breakers,
        },
        logit_bias,
        grammar,
        logprobs: common.logprobs,
        seed,
        stop,
        ignore_eos,
        priority: engine_priority(priority_of(common, scheduling)),
        // Which is known where it is let in.
        turn: Turn::default(),
        queue_timeout_ms: scheduling.queue_timeout_ms,
    }
}

/// Who goes first: the header, then the body.
pub(super) fn priority_of(common: &Common, scheduling: Scheduling) -> Priority {
    scheduling.priority.or(common.priority).unwrap_or(Priority::Normal)
}

pub(super) fn engine_priority(priority: Priority) -> gantry_engine::Priority {
    match priority {
        Priority::High => gantry_engine::Priority::High,
        Priority::Normal => gantry_engine::Priority::Normal,
        Priority::Low => gantry_engine::Priority::Low,
    }
}

/// The seed of one of the answers: they differ, and all repeat with the request's. The first has the request's own, so it
/// is the answer that would have come alone.
pub(super) fn seed_of(request: Option<u64>, choice: u32) -> Option<u64> {
    request.map(|seed| seed.wrapping_add(SEED_STEP.wrapping_mul(u64::from(choice))))
}

/// What the client calls the parts of its request that the engine can find fault with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// The prompt.
    pub(super) prompt: &'static str,
    /// The form of the answer.
    pub(super) format: &'static str,
}

impl Names {
    /// The client's name of one of the engine's parameters.
    pub(super) fn of(self, engine: String) -> String {
        match engine.as_str() {
            "grammar" | "json_schema" => self.format.to_owned(),
            _ => engine,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use axum::http::HeaderValue;
    use gantry_openai as limits;

    fn read(name: &'static str, value: &'static str) -> Result<Scheduling, ApiError> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        Scheduling::read(&headers)
    }

    #[test]
    fn headers_say_who_goes_first_and_how_long_it_waits() {
        assert_eq!(Scheduling::read(&HeaderMap::new()).unwrap(), Scheduling::default());
        assert_eq!(read("x-gantry-priority", "high").unwrap().priority, Some(Priority::High));
        assert_eq!(read("x-gantry-queue-timeout-ms", "1500").unwrap().queue_timeout_ms, Some(1500));
        for (name, value) in [
            ("x-gantry-priority", "urgent"),
            ("x-gantry-priority", ""),
            ("x-gantry-queue-timeout-ms", "0"),
            ("x-gantry-queue-timeout-ms", "3600001"),
            ("x-gantry-queue-timeout-ms", "-1"),
            ("x-gantry-queue-timeout-ms", "1.5"),
        ] {
            let error = read(name, value).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), ErrorCode::InvalidValue), "{value}");
        }
        let mut bytes = HeaderMap::new();
        bytes.insert("x-gantry-priority", HeaderValue::from_bytes(b"\xff").unwrap());
        assert!(Scheduling::read(&bytes).is_err());
    }

    #[test]
    fn a_header_goes_before_the_body() {
        let body = Common { priority: Some(Priority::Low), ..Common::default() };
        let header = Scheduling { priority: Some(Priority::High), queue_timeout_ms: Some(9) };
        assert_eq!(params(&body, Scheduling::default()).priority, gantry_engine::Priority::Low);
        assert_eq!(params(&body, header).priority, gantry_engine::Priority::High);
        assert_eq!(params(&body, header).queue_timeout_ms, Some(9));
        assert_eq!(params(&Common::default(), Scheduling::default()).priority, gantry_engine::Priority::Normal);
    }

    #[test]
    fn a_plain_request_asks_the_engine_for_its_defaults() {
        assert_eq!(params(&Common::default(), Scheduling::default()), GenerationParams::default());
    }

    #[test]
    fn what_the_wire_takes_at_its_limits_the_engine_takes() {
        let breaker = "x".repeat(limits::MAX_DRY_BREAKER_BYTES);
        let dry = gantry_openai::Dry {
            multiplier: limits::MAX_DRY_MULTIPLIER,
            base: limits::MAX_DRY_BASE,
            allowed_length: limits::MAX_DRY_ALLOWED_LENGTH,
            penalty_last_n: limits::MAX_TOKENS_LIMIT - 1,
            sequence_breakers: vec![breaker; limits::MAX_DRY_BREAKERS],
        };
        let sampling = Sampling {
            max_tokens: Some(limits::MAX_TOKENS_LIMIT),
            temperature: limits::MAX_TEMPERATURE,
            xtc_probability: 1.0,
            xtc_threshold: 1.0,
            repeat_penalty: limits::MAX_REPEAT_PENALTY,
            repeat_last_n: limits::MAX_TOKENS_LIMIT,
            frequency_penalty: -limits::MAX_PENALTY,
            presence_penalty: limits::MAX_PENALTY,
            dry,
            logit_bias: vec![(0, f32::NEG_INFINITY); limits::MAX_LOGIT_BIASES],
            stop: vec!["x".repeat(limits::MAX_STOP_BYTES); limits::MAX_STOP_STRINGS],
            ..Sampling::default()
        };
        let format = Format::Grammar("x".repeat(limits::MAX_GRAMMAR_BYTES));
        let logprobs = Some(limits::MAX_TOP_LOGPROBS);
        let scheduling = Scheduling { priority: None, queue_timeout_ms: Some(MAX_QUEUE_TIMEOUT_MS) };
        let most = params(&Common { sampling, format, logprobs, ..Common::default() }, scheduling);
        assert_eq!(most.validate(), Ok(()));
    }

    #[test]
    fn each_form_has_its_grammar() {
        let grammar = |format: Format| params(&Common { format, ..Common::default() }, Scheduling::default()).grammar;
        assert_eq!(grammar(Format::Text), None);
        let any = Grammar::JsonSchema { schema: "{\"type\":\"object\"}".into(), strict: true };
        assert_eq!(grammar(Format::JsonObject), Some(any));
        for strict in [false, true] {
            let asked = Format::JsonSchema { schema: "{}".into(), strict };
            assert_eq!(grammar(asked), Some(Grammar::JsonSchema { schema: "{}".into(), strict }));
        }
        assert_eq!(grammar(Format::Grammar("root ::= \"a\"".into())), Some(Grammar::Gbnf("root ::= \"a\"".into())));
    }

    #[test]
    fn answers_have_seeds_of_their_own() {
        assert_eq!(seed_of(None, 3), None);
        assert_eq!(seed_of(Some(7), 0), Some(7));
        let seeds: std::collections::BTreeSet<_> = (0..16).filter_map(|i| seed_of(Some(u64::MAX), i)).collect();
        let lower: std::collections::BTreeSet<_> = seeds.iter().map(|seed| seed & 0xffff_ffff).collect();
        assert_eq!((seeds.len(), lower.len()), (16, 16));
    }
}
