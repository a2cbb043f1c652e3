//! How a registry is told who asks: it answers a request without a token by naming who hands out one, for one repository and a few
//! minutes (the distribution specification's token authentication), or wants name and password with each request.
//!
//! Who hands tokens out is what the registry says. So a login goes there only if the Secret that it is of names that host, and only
//! over https://; and it is connected to only where that is allowed.

use std::fmt;

use http_auth::parser::ChallengeParser;
use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, Url};
use serde::Deserialize;

use super::error::FetchError;
use super::http::{Target, failure, refusal};
use super::limits::MAX_TOKEN_ANSWER_BYTES;
use super::source::{Token, names};

/// Name and password at a registry, which no log and no message shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The name.
    pub user: String,
    /// The password.
    pub password: Token,
    /// The hosts that it may be sent to, as the Secret's annotation lists them; `None` for wherever the registry wants it, as
    /// whoever logs in for themselves has it.
    pub hosts: Option<String>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(..)")
    }
}

/// What a request to a registry says of who asks.
pub(super) enum Authorization {
    Bearer(Token),
    Basic(Login),
}

impl Authorization {
    pub(super) fn given_to(&self, request: RequestBuilder) -> RequestBuilder {
        match self {
            Self::Bearer(token) => request.bearer_auth(token.reveal()),
            Self::Basic(login) => request.basic_auth(&login.user, Some(login.password.reveal())),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: Url },
}

/// What the one says who hands tokens out: the token by either name, or by both, as Docker Hub does.
#[derive(Deserialize)]
struct TokenAnswer {
    token: Option<String>,
    access_token: Option<String>,
}

/// What to say to a registry that has answered 401 with these headers. `None`: it does not say what it wants.
pub(super) async fn authorization(
    target: Target<'_>,
    login: Option<&Login>,
    headers: &HeaderMap,
) -> Result<Option<Authorization>, FetchError> {
    match challenge(headers) {
        None => Ok(None),
        Some(Challenge::Basic) => {
            let login =
                login.map(|login| may_be_sent(target.address, login, target.url).map(|()| login)).transpose()?;
            Ok(login.cloned().map(Authorization::Basic))
        }
        Some(Challenge::Bearer { realm }) => {
            let login = login.map(|login| may_be_sent(target.address, login, &realm).map(|()| login)).transpose()?;
            token(target, login, realm).await.map(|token| Some(Authorization::Bearer(token)))
        }
    }
}

fn challenge(headers: &HeaderMap) -> Option<Challenge> {
    let values = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|value| value.to_str().ok());
    let all = values.flat_map(ChallengeParser::new).filter_map(Result::ok);
    let mut basic = None;
    for challenge in all {
        let parameter = |name: &str| {
            let found = challenge.params.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_unescaped())
        };
        if challenge.scheme.eq_ignore_ascii_case("bearer") {
            let mut realm = Url::parse(&parameter("realm")?).ok()?;
            for name in ["service", "scope"] {
                if let Some(value) = parameter(name) {
                    realm.query_pairs_mut().append_pair(name, &value);
                }
            }
            return Some(Challenge::Bearer { realm });
        }
        basic = challenge.scheme.eq_ignore_ascii_case("basic").then_some(Challenge::Basic).or(basic);
    }
    basic
}

/// Whether a login may be sent to the registry itself, or to who hands its tokens out.
fn may_be_sent(address: &str, login: &Login, to: &Url) -> Result<(), FetchError> {
    let host = to.host_str().unwrap_or_default();
    let port = to.port_or_known_default().unwrap_or_default();
    if to.scheme() == "https" && login.hosts.as_ref().is_none_or(|hosts| names(hosts, host, port)) {
        return Ok(());
    }
    let way_out = match to.scheme() {
        "https" => "name that host in the annotation gantry.dev/hosts of the Secret, beside the registry's",
        _ => "a login is sent over https:// only",
    };
    let or = if login.hosts.is_some() { ", or leave secretRef out" } else { "" };
    let scheme = to.scheme();
    Err(FetchError::Permanent(format!(
        "{address}: its registry wants the login at {scheme}://{host}:{port}; {way_out}{or}"
    )))
}

async fn token(target: Target<'_>, login: Option<&Login>, realm: Url) -> Result<Token, FetchError> {
    let address = target.address;
    if let Err(unreachable) = target.reach.check(&realm) {
        return Err(FetchError::Permanent(format!(
            "{address}: where its registry has tokens handed out: {unreachable}"
        )));
    }
    let request = target.client.get(realm);
    let request = match login {
        Some(login) => request.basic_auth(&login.user, Some(login.password.reveal())),
        None => request,
    };
    let mut response = request.send().await.map_err(|error| failure(target.asked.by, address, &error))?;
    if !response.status().is_success() {
        return Err(refusal(target.asked, address, response.status(), response.headers()));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| failure(target.asked.by, address, &error))? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_TOKEN_ANSWER_BYTES {
            break;
        }
    }
    let answer = serde_json::from_slice::<TokenAnswer>(&body);
    let token = answer.ok().and_then(|answer| answer.token.or(answer.access_token)).filter(|token| !token.is_empty());
    token.map(|token| Token::new(&token)).ok_or_else(|| {
        FetchError::temporary(format!("{address}: where its registry has tokens handed out, none is in the answer"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn challenged(values: &[&str]) -> Option<Challenge> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(WWW_AUTHENTICATE, value.parse().unwrap());
        }
        challenge(&headers)
    }

    #[test]
    fn what_a_registry_wants_is_read_from_its_answer() {
        let hub = r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:ai/smollm2:pull""#;
        let Some(Challenge::Bearer { realm }) = challenged(&[hub]) else { panic!() };
        let asks = "https://auth.docker.io/token?service=registry.docker.io&scope=repository%3Aai%2Fsmollm2%3Apull";
        assert_eq!(realm.as_str(), asks);
        assert_eq!(challenged(&[r#"Basic realm="Registry""#]), Some(Challenge::Basic));
        let Some(Challenge::Bearer { .. }) = challenged(&[r#"Basic realm="r""#, r#"bearer realm="https://t/""#]) else {
            panic!("a token is less than a password")
        };
        for nothing in [&[][..], &["Negotiate"], &["Bearer service=\"s\""], &["Bearer realm=\"nonsense\""], &[",,\"="]]
        {
            assert_eq!(challenged(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_login_goes_only_where_its_secret_says() {
        let login = Login {
            user: "me".to_owned(),
            password: Token::new("hush"),
            hosts: Some("registry.example.com, auth.example.com".to_owned()),
        };
        let may = |realm: &str| may_be_sent("oci://registry.example.com/m", &login, &Url::parse(realm).unwrap());
        assert_eq!(may("https://auth.example.com/token"), Ok(()));
        for (realm, says) in [
            ("https://evil.example.org/token", "name that host in the annotation gantry.dev/hosts"),
            ("https://auth.example.com:8443/token", "auth.example.com:8443; name that host"),
            ("http://auth.example.com/token", "over https:// only"),
        ] {
            let told = may(realm).unwrap_err().to_string();
            assert!(told.contains(says) && !told.contains("hush"), "{realm}: {told}");
        }
        assert!(!format!("{login:?}").contains("hush"));
    }
}
