//! What the headers of a request say of who goes first, whatever the protocol.

use std::borrow::Cow;

use axum::http::{HeaderMap, HeaderName};
use gantry_core::{ApiError, ErrorCode, GenerationParams, MAX_QUEUE_TIMEOUT_MS, Priority};

/// The header that says who goes first; it goes before the body's `priority`, since a gateway can set it.
const PRIORITY_HEADER: &str = "x-gantry-priority";
/// The header that says how long a request is worth waiting for, in milliseconds to its first token.
pub(in crate::api) const QUEUE_TIMEOUT_HEADER: &str = "x-gantry-queue-timeout-ms";
/// The header by which a stream asks for events, and not comments, while it waits for a model to be changed.
const EVENTS_HEADER: &str = "x-gantry-events";
/// Its one value.
const QUEUE_EVENTS: &str = "queue";
/// What the headers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Scheduling {
    pub(super) priority: Option<Priority>,
    pub(super) queue_timeout_ms: Option<u64>,
    /// Whether a stream is told in events of their own how it stands while it waits for a model to be changed.
    pub(super) tells_queue: bool,
}

impl Scheduling {
    pub(super) fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let word = |name: &'static str| match headers.get(HeaderName::from_static(name)) {
            Some(value) => value.to_str().map(Some).map_err(|_| wrong_header(name, "must be plain ASCII")),
            None => Ok(None),
        };
        let priority = word(PRIORITY_HEADER)?.map(priority).transpose()?;
        let queue_timeout_ms = word(QUEUE_TIMEOUT_HEADER)?.map(milliseconds).transpose()?;
        let tells_queue = word(EVENTS_HEADER)?.map(queue_events).transpose()?.unwrap_or_default();
        Ok(Self { priority, queue_timeout_ms, tells_queue })
    }

    /// Has a request follow it.
    pub(super) fn apply(self, params: &mut GenerationParams) {
        params.priority = self.priority_over(params.priority);
        params.queue_timeout_ms = self.queue_timeout_ms;
    }

    /// Who goes first: the header, then the body.
    pub(super) fn priority_over(self, body: Priority) -> Priority {
        self.priority.unwrap_or(body)
    }
}

fn priority(word: &str) -> Result<Priority, ApiError> {
    Priority::parse(word).ok_or_else(|| wrong_header(PRIORITY_HEADER, "must be one of high, normal and low"))
}

fn queue_events(word: &str) -> Result<bool, ApiError> {
    if word == QUEUE_EVENTS { Ok(true) } else { Err(wrong_header(EVENTS_HEADER, "must be queue")) }
}

fn milliseconds(word: &str) -> Result<u64, ApiError> {
    word.parse().ok().filter(|ms| (1..=MAX_QUEUE_TIMEOUT_MS).contains(ms)).ok_or_else(|| {
        wrong_header(QUEUE_TIMEOUT_HEADER, &format!("must be an integer from 1 to {MAX_QUEUE_TIMEOUT_MS}"))
    })
}

fn wrong_header(name: &'static str, message: &str) -> ApiError {
    ApiError::invalid(Some(Cow::Borrowed(name)), ErrorCode::InvalidValue, format!("`{name}` {message}."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use axum::http::HeaderValue;

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
        let header = Scheduling { priority: Some(Priority::High), queue_timeout_ms: Some(9), tells_queue: false };
        assert_eq!(header.priority_over(Priority::Low), Priority::High);
        assert_eq!(Scheduling::default().priority_over(Priority::Low), Priority::Low);
    }
}
