//! Which pages may ask: the browsers of their readers look for these headers, and nobody else does.
//!
//! A preflight is answered here, before a key is looked for, which it never has. Pages of other origins get answers without
//! these headers, which their browsers keep from them. Absent: cookies, which nothing here reads.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use crate::config::shown;

/// How long a browser may go by what a preflight told it.
const PREFLIGHT_MAX_AGE: Duration = Duration::from_secs(600);
/// What scripts may read of an answer, beside what they always may.
const EXPOSED: [HeaderName; 4] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("request-id"),
    HeaderName::from_static("x-gantry-version"),
    header::RETRY_AFTER,
];

/// The origins whose pages may ask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// Those of no pages.
    #[default]
    None,
    /// All.
    Any,
    /// These.
    These(Vec<HeaderValue>),
}

impl Origins {
    /// Reads a list: origins such as `https://chat.example.com` or `http://localhost:3000`, or `*` alone.
    ///
    /// # Errors
    /// The first that is none.
    pub fn parse(list: &[String]) -> Result<Self, String> {
        let list: Vec<&str> = list.iter().map(|origin| origin.trim()).filter(|origin| !origin.is_empty()).collect();
        match list.as_slice() {
            [] => Ok(Self::None),
            ["*"] => Ok(Self::Any),
            origins => origins.iter().map(|origin| parse(origin)).collect::<Result<_, _>>().map(Self::These),
        }
    }

    /// Has these headers added to all answers.
    pub(crate) fn around(&self, routes: axum::Router) -> axum::Router {
        let allowed = match self {
            Self::None => return routes,
            Self::Any => AllowOrigin::from(Any),
            Self::These(origins) => AllowOrigin::list(origins.clone()),
        };
        let cors = CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(EXPOSED)
            .max_age(PREFLIGHT_MAX_AGE);
        routes.layer(cors)
    }
}

fn parse(origin: &str) -> Result<HeaderValue, String> {
    let wrong = || {
        format!(
            "{} is no origin: a scheme and a host, with a port where it is not the scheme's, and nothing behind it",
            shown(origin)
        )
    };
    let uri: Uri = origin.parse().map_err(|_| wrong())?;
    let is_origin = uri.scheme().is_some() && uri.authority().is_some_and(|host| !host.as_str().contains('@'));
    // Browsers send it without a slash at its end.
    if !is_origin || uri.path_and_query().is_some_and(|rest| rest.as_str() != "/") || origin.ends_with('/') {
        return Err(wrong());
    }
    HeaderValue::from_str(&origin.to_ascii_lowercase()).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        let parse = |list: &[&str]| Origins::parse(&list.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(parse(&[]), Ok(Origins::None));
        assert_eq!(parse(&["", " "]), Ok(Origins::None));
        assert_eq!(parse(&["*"]), Ok(Origins::Any));
        let these = ["https://chat.example.com", "http://localhost:3000", "app://tool"];
        assert_eq!(parse(&these), Ok(Origins::These(these.map(HeaderValue::from_static).to_vec())));
        assert_eq!(parse(&["HTTPS://Chat.example"]), parse(&["https://chat.example"]));
        for wrong in ["chat.example.com", "https://a/", "https://a/b", "https://a?b", "*.example.com", "http://a b"] {
            let told = parse(&[wrong, "*"]).unwrap_err();
            assert!(told.contains(wrong), "{told}");
        }
        let told = parse(&["https://me:hush@a"]).unwrap_err();
        assert!(told.contains("\"https://***@a\"") && !told.contains("hush"), "{told}");
        assert!(parse(&["https://a", "*"]).is_err(), "all of them is said alone");
    }
}
