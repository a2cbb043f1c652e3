//! The client, and what an answer means: [`judge`] decides from status and headers alone.
//!
//! Messages tell the status of an answer and nothing of what it holds: a spec may name any address that the pods reach, and
//! who writes it is not thereby somebody who may read what is there.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LAST_MODIFIED, RANGE,
    RETRY_AFTER,
};
use reqwest::{Certificate, Client, RequestBuilder, Response, StatusCode, Url, redirect};

use super::asked::{Asked, AskedBy, Place};
use super::error::FetchError;
use super::limits::{CONNECT_LIMIT, MAX_REDIRECTS, READ_LIMIT, RETRY_BACKOFF_MAX};
use super::partial::Validator;
use super::reach::{Reach, Resolver, Unreachable};
use super::registry::{Authorization, Login, authorization};
use super::source::Token;

/// Makes a client, which downloads share. It believes certificates of the authorities that everybody knows, and of those in `ca`,
/// as PEM. A connection that is kept leads every try to the one of several servers behind an address that lacks the file, or to one
/// that is another by now: `kept_connections` is 0 but for the pieces of one download.
pub(super) fn client(
    reach: Reach,
    by: AskedBy,
    ca: Option<&str>,
    kept_connections: usize,
) -> Result<Client, reqwest::Error> {
    let authorities = ca.map(|ca| Certificate::from_pem_bundle(ca.as_bytes())).transpose()?.unwrap_or_default();
    let builder = match by {
        // Through a proxy, whatever the proxy reaches would be reached.
        AskedBy::Spec => Client::builder().no_proxy(),
        AskedBy::CommandLine => Client::builder(),
    };
    // HTTP/2 would have all pieces of a download share one connection.
    let builder = if kept_connections > 0 { builder.http1_only() } else { builder };
    builder
        .tls_certs_merge(authorities)
        .dns_resolver(Arc::new(Resolver(reach)))
        .user_agent(concat!("gantry/", env!("CARGO_PKG_VERSION")))
        .pool_max_idle_per_host(kept_connections)
        .connect_timeout(CONNECT_LIMIT)
        .read_timeout(READ_LIMIT)
        .referer(false)
        .redirect(redirect::Policy::custom(move |attempt| follow(reach, attempt)))
        .build()
}

/// Follows a few redirects, none from https to http, and none to an address that may not be reached.
fn follow(reach: Reach, attempt: redirect::Attempt<'_>) -> redirect::Action {
    let downgrade = attempt.url().scheme() != "https" && attempt.previous().iter().any(|url| url.scheme() == "https");
    if downgrade || !matches!(attempt.url().scheme(), "http" | "https") {
        let scheme = attempt.url().scheme().to_owned();
        return attempt
            .error(RedirectRefused(format!("it redirects to an address of {scheme}://, and not of https://")));
    }
    if let Err(unreachable) = reach.check(attempt.url()) {
        return attempt.error(unreachable);
    }
    if attempt.previous().len() > MAX_REDIRECTS {
        return attempt.error(RedirectRefused(format!("it redirects more than {MAX_REDIRECTS} times")));
    }
    attempt.follow()
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RedirectRefused(String);

/// Where a request goes to.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) client: &'a Client,
    /// For several requests at once to one server.
    pub(super) several: &'a Client,
    pub(super) reach: Reach,
    pub(super) url: &'a Url,
    pub(super) auth: Auth<'a>,
    pub(super) asked: Asked,
    /// Sent beside what a file is asked for with.
    pub(super) headers: Option<&'a HeaderMap>,
    /// As it is shown.
    pub(super) address: &'a str,
}

/// What a request says of who asks.
#[derive(Clone, Copy)]
pub(super) enum Auth<'a> {
    /// Nothing, or what is in the address.
    None,
    /// The token.
    Bearer(&'a Token),
    /// What the registry wants, once it has said so.
    Registry(Option<&'a Login>),
}

/// Asks for the bytes of a file from `first` on, and only to `last` if that is given.
pub(super) async fn send(
    target: Target<'_>,
    range: Option<(u64, Option<u64>)>,
    validator: &Validator,
) -> Result<Response, FetchError> {
    if let Err(unreachable) = target.reach.check(target.url) {
        return Err(FetchError::Permanent(format!("{}: {unreachable}", target.address)));
    }
    let asked = async |authorization: Option<&Authorization>| {
        let request = request(target, range, validator);
        let request = match authorization {
            Some(authorization) => authorization.given_to(request),
            None => request,
        };
        request.send().await.map_err(|error| failure(target.asked.by, target.address, &error))
    };
    let response = asked(None).await?;
    // Where a redirect has led to, nobody is told a registry's login.
    let is_the_registry = is_same_origin(response.url(), target.url);
    if let Auth::Registry(login) = target.auth
        && response.status() == StatusCode::UNAUTHORIZED
        && is_the_registry
        && let Some(authorization) = authorization(target, login, response.headers()).await?
    {
        return asked(Some(&authorization)).await;
    }
    Ok(response)
}

/// Whether two addresses are of one host, port and scheme.
pub(super) fn is_same_origin(one: &Url, other: &Url) -> bool {
    let origin = |url: &Url| (url.scheme().to_owned(), url.host_str().map(str::to_owned), url.port_or_known_default());
    origin(one) == origin(other)
}

fn request(target: Target<'_>, range: Option<(u64, Option<u64>)>, validator: &Validator) -> RequestBuilder {
    // A compressed answer could be neither continued nor hashed.
    let mut request = target.client.get(target.url.clone()).header(ACCEPT_ENCODING, "identity");
    if let Some(headers) = target.headers {
        request = request.headers(headers.clone());
    }
    if let Auth::Bearer(token) = target.auth {
        // reqwest drops the header when a redirect leaves the host, the port or the scheme.
        request = request.bearer_auth(token.reveal());
    }
    if let Some((first, last)) = range {
        let last = last.map(|last| last.to_string()).unwrap_or_default();
        request = request.header(RANGE, format!("bytes={first}-{last}"));
        if let Some(value) = validator.if_range() {
            request = request.header(IF_RANGE, value);
        }
    }
    request
}

/// What an answer means for a download that has some bytes already.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The body holds the file from `start` on; the file has `total` bytes.
    Body { start: u64, total: Option<u64>, validator: Validator },
    /// There is nothing after the bytes that are there.
    Complete,
    /// The bytes that are there are of no use.
    StartOver(String),
    /// No body.
    Refused(FetchError),
}

/// Decides what an answer to a request from byte `offset` on means. `known` is what the server called the file when the
/// bytes before came.
pub(super) fn judge(
    (asked, address): (Asked, &str),
    status: StatusCode,
    headers: &HeaderMap,
    offset: u64,
    known: &Validator,
) -> Answer {
    if status.is_success() && headers.get(CONTENT_ENCODING).is_some_and(|value| value != "identity") {
        return Answer::Refused(FetchError::Permanent(format!(
            "{address} is sent compressed though that was not asked for; serve the file as it is"
        )));
    }
    match status {
        StatusCode::OK => {
            Answer::Body { start: 0, total: number(headers, CONTENT_LENGTH), validator: validator(headers) }
        }
        StatusCode::PARTIAL_CONTENT => judge_range(address, headers, offset, known),
        StatusCode::RANGE_NOT_SATISFIABLE => match content_range(headers) {
            Some(ContentRange { total: Some(total), .. }) if total == offset => Answer::Complete,
            _ if offset > 0 => Answer::StartOver(format!("{address} is shorter than the bytes that came before")),
            _ => Answer::Refused(FetchError::Permanent(format!("{address} is empty; upload the file again"))),
        },
        _ => Answer::Refused(refusal(asked, address, status, headers)),
    }
}

fn judge_range(address: &str, headers: &HeaderMap, offset: u64, known: &Validator) -> Answer {
    let Some(ContentRange { first: Some(start), total }) = content_range(headers) else {
        return Answer::Refused(FetchError::temporary(format!(
            "{address} answers with a part, and does not say which"
        )));
    };
    let now = validator(headers);
    if offset > 0 && known.etag.is_some() && now.etag.is_some() && known.etag != now.etag {
        return Answer::StartOver(format!("the file at {address} has changed"));
    }
    if start != offset {
        return Answer::StartOver(format!("{address} answers from byte {start}, and {offset} was asked for"));
    }
    Answer::Body { start, total, validator: now }
}

/// Why there is no body, and what to do.
pub(super) fn refusal(asked: Asked, address: &str, status: StatusCode, headers: &HeaderMap) -> FetchError {
    let permanent = |what: &str| FetchError::Permanent(format!("{address} answers {status}: {what}"));
    let its_address = asked.by.its_address();
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => permanent(asked.credentials()),
        StatusCode::NOT_FOUND | StatusCode::GONE => match asked.place {
            Place::Registry => permanent(
                "the repository has no blob with this sha256; give that of the layer that is the GGUF file, as oras \
                 manifest fetch shows it, or push the file",
            ),
            _ => permanent(&format!("there is no such file; correct {its_address}, or upload the file")),
        },
        status if status.is_redirection() && asked.place == Place::Bucket => {
            let region = headers.get("x-amz-bucket-region").and_then(|region| region.to_str().ok());
            permanent(&format!(
                "the bucket is in another region{}; correct {}",
                region.map(|region| format!(" ({})", region.chars().take(64).collect::<String>())).unwrap_or_default(),
                asked.by.region()
            ))
        }
        StatusCode::BAD_REQUEST if asked.place == Place::Bucket => {
            permanent(&format!("correct {} or {}", asked.by.region(), asked.by.endpoint()))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
            later(address, status, headers)
        }
        status if status.is_server_error() => later(address, status, headers),
        status if status.is_redirection() => permanent("the redirect leads nowhere; give the file's own address"),
        _ => permanent(&format!("correct {its_address}")),
    }
}

fn later(address: &str, status: StatusCode, headers: &HeaderMap) -> FetchError {
    let retry_after = number(headers, RETRY_AFTER).map(|seconds| Duration::from_secs(seconds).min(RETRY_BACKOFF_MAX));
    FetchError::Temporary { reason: format!("{address} answers {status}"), retry_after }
}

/// Why a request had no answer, or its body no end.
pub(super) fn failure(by: AskedBy, address: &str, error: &reqwest::Error) -> FetchError {
    let mut reasons = vec![error.to_string()];
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(unreachable) = error.downcast_ref::<Unreachable>() {
            return FetchError::Permanent(format!("{address}: {unreachable}"));
        }
        reasons.push(error.to_string());
        cause = error.source();
    }
    // reqwest's own text repeats the address, whose query may hold a signature: only what is below it is told.
    let below = if reasons.len() > 1 { reasons[1..].join(": ") } else { "the connection failed".to_owned() };
    if error.is_redirect() {
        return FetchError::Permanent(format!("{address} cannot be followed: {below}; give the file's own address"));
    }
    let says = reasons.last().filter(|_| reasons.len() > 1).map(|said| format!(" ({said})")).unwrap_or_default();
    if let Some(trouble) = Trouble::of(error) {
        return FetchError::temporary(format!("{address}: {}{says}; {}", trouble.what(), trouble.way_out(by)));
    }
    if error.is_timeout() {
        let way_out = format!("start what is to answer there, or let {} reach it", by.fetching());
        return FetchError::temporary(format!("{address} is silent{says}; {way_out}"));
    }
    FetchError::temporary(format!("{address} cannot be read: {below}"))
}

/// Why there was no connection, where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// The name of the host has no address.
    NoSuchHost,
    /// Nobody listens.
    Refused,
    /// No way leads there.
    NoWay,
    /// Who answers does not speak TLS.
    NoTls,
    /// Its certificate is not believed.
    Certificate,
}

impl Trouble {
    fn of(error: &reqwest::Error) -> Option<Self> {
        let first: &(dyn std::error::Error + 'static) = error;
        let chain = std::iter::successors(Some(first), |error| error.source());
        let known = |error: &(dyn std::error::Error + 'static)| {
            // The client's own error for a name has no type that others may see.
            if error.to_string().starts_with("dns error") {
                return Some(Self::NoSuchHost);
            }
            let mut io = error.downcast_ref::<std::io::Error>()?;
            // Each layer puts what the one below said into an error of its own, which is no source of it.
            while let Some(inner) = io.get_ref().and_then(|inner| inner.downcast_ref()) {
                io = inner;
            }
            let tls = io.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            match (tls, io.kind()) {
                (Some(rustls::Error::InvalidMessage(_)), _) => Some(Self::NoTls),
                (Some(rustls::Error::InvalidCertificate(_)), _) => Some(Self::Certificate),
                (None, std::io::ErrorKind::ConnectionRefused) => Some(Self::Refused),
                (None, std::io::ErrorKind::HostUnreachable | std::io::ErrorKind::NetworkUnreachable) => {
                    Some(Self::NoWay)
                }
                _ => None,
            }
        };
        let mut troubles = chain.filter_map(known);
        troubles.next()
    }

    fn what(self) -> &'static str {
        match self {
            Self::NoSuchHost => "its host has no address",
            Self::Refused => "nothing listens there",
            Self::NoWay => "no way leads there",
            Self::NoTls => "what answers there does not speak TLS",
            Self::Certificate => "its certificate is not believed",
        }
    }

    fn way_out(self, by: AskedBy) -> String {
        let its_address = by.its_address();
        match (self, by) {
            (Self::NoSuchHost, AskedBy::Spec) => {
                format!("correct the host of {its_address}, or make the name known to the cluster's DNS")
            }
            (Self::NoSuchHost, AskedBy::CommandLine) => {
                format!("correct the host of {its_address}, or look whether this machine is on the network")
            }
            (Self::Refused, _) => format!("correct host and port of {its_address}, or start the file server"),
            (Self::NoWay, _) => format!("correct the host of {its_address}, or let {} reach it", by.fetching()),
            (Self::NoTls, _) => format!("in {its_address}, give http:// for https://, or the port that speaks TLS"),
            (Self::Certificate, AskedBy::Spec) => format!(
                "use a host whose certificate is of a known authority and bears its name, name a ConfigMap with the \
                 certificates of its authority as ca beside {its_address}, or use http:// (its sha256 is checked)"
            ),
            (Self::Certificate, AskedBy::CommandLine) => String::from(
                "use a host whose certificate is of a known authority and bears its name, or name a file with the \
                 certificates of its authority by SSL_CERT_FILE",
            ),
        }
    }
}

struct ContentRange {
    first: Option<u64>,
    total: Option<u64>,
}

/// `bytes 5-9/10`, `bytes 5-9/*` or `bytes */10`.
fn content_range(headers: &HeaderMap) -> Option<ContentRange> {
    let value = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    if range == "*" {
        return Some(ContentRange { first: None, total });
    }
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let sane = first <= last && total.is_none_or(|total| last < total);
    sane.then_some(ContentRange { first: Some(first), total })
}

fn validator(headers: &HeaderMap) -> Validator {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    Validator { etag: text(ETAG).filter(|tag| !tag.starts_with("W/")), last_modified: text(LAST_MODIFIED) }
}

fn number(headers: &HeaderMap, name: reqwest::header::HeaderName) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const WEB: Asked = Asked { place: Place::Web, by: AskedBy::Spec };

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (reqwest::header::HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    fn judged(status: u16, list: &[(&'static str, &str)], offset: u64, etag: Option<&str>) -> Answer {
        let known = Validator { etag: etag.map(str::to_owned), last_modified: None };
        judge((WEB, "http://h/m"), StatusCode::from_u16(status).unwrap(), &headers(list), offset, &known)
    }

    #[test]
    fn bodies_start_where_they_say() {
        let body = |start, total| Answer::Body { start, total, validator: Validator::default() };
        assert_eq!(judged(200, &[("content-length", "10")], 0, None), body(0, Some(10)));
        assert_eq!(judged(200, &[], 5, None), body(0, None), "a server without ranges starts over");
        assert_eq!(judged(206, &[("content-range", "bytes 5-9/10")], 5, None), body(5, Some(10)));
        assert_eq!(judged(206, &[("content-range", "bytes 5-9/*")], 5, None), body(5, None));
        assert_eq!(judged(416, &[("content-range", "bytes */5")], 5, None), Answer::Complete);
    }

    #[test]
    fn what_does_not_continue_starts_over() {
        for (status, list, etag) in [
            (206, vec![("content-range", "bytes 0-9/10")], None),
            (206, vec![("content-range", "bytes 5-9/10"), ("etag", "\"b\"")], Some("\"a\"")),
            (416, vec![("content-range", "bytes */3")], None),
            (416, vec![], None),
        ] {
            assert!(matches!(judged(status, &list, 5, etag), Answer::StartOver(_)), "{status} {list:?}");
        }
    }

    #[test]
    fn nonsense_ranges_are_not_believed() {
        for range in ["bytes 9-5/10", "bytes 5-10/10", "items 5-9/10", "bytes 5-9", "bytes a-b/10", "bytes */10"] {
            let answer = judged(206, &[("content-range", range)], 5, None);
            assert!(matches!(answer, Answer::Refused(FetchError::Temporary { .. })), "{range}: {answer:?}");
        }
    }

    #[test]
    fn refusals_tell_what_to_do() {
        for (status, temporary, says) in [
            (401, false, "secretRef"),
            (403, false, "secretRef"),
            (404, false, "no such file"),
            (410, false, "no such file"),
            (400, false, "its uri in the spec"),
            (304, false, "redirect"),
            (408, true, "408"),
            (429, true, "429"),
            (500, true, "500"),
            (503, true, "503"),
        ] {
            let Answer::Refused(error) = judged(status, &[], 0, None) else { panic!("{status}") };
            assert_eq!(error.is_temporary(), temporary, "{status}");
            assert!(error.to_string().contains(says), "{status}: {error}");
        }
        let Answer::Refused(error) = judged(503, &[("retry-after", "7")], 0, None) else { panic!() };
        assert!(matches!(error, FetchError::Temporary { retry_after: Some(after), .. } if after.as_secs() == 7));
        let Answer::Refused(error) = judged(503, &[("retry-after", "86400")], 0, None) else { panic!() };
        assert!(matches!(error, FetchError::Temporary { retry_after: Some(after), .. } if after == RETRY_BACKOFF_MAX));
        assert!(matches!(
            judged(200, &[("content-encoding", "gzip")], 0, None),
            Answer::Refused(FetchError::Permanent(_))
        ));
    }

    #[test]
    fn weak_tags_do_not_identify_bytes() {
        let Answer::Body { validator, .. } = judged(200, &[("etag", "W/\"a\""), ("last-modified", "then")], 0, None)
        else {
            panic!()
        };
        assert_eq!(validator.if_range(), Some("then"));
    }

    /// Answers each connection with `answer` and returns the heads of the requests.
    async fn scripted(answer: String) -> (std::net::SocketAddr, tokio::sync::mpsc::UnboundedReceiver<String>) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (heads, seen) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                // A TLS hello has no such end, and begins with a byte that no method does.
                while !head.ends_with(b"\r\n\r\n") && !head.starts_with(&[0x16]) {
                    head.push(stream.read_u8().await.unwrap());
                }
                let _ = heads.send(String::from_utf8_lossy(&head).to_lowercase());
                stream.write_all(answer.as_bytes()).await.unwrap();
                stream.shutdown().await.unwrap();
            }
        });
        (address, seen)
    }

    const HERE: Reach = Reach { private: true, loopback: true };

    async fn asked(reach: Reach, url: &str, token: Option<&Token>) -> Result<Response, FetchError> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (client, url) = (client(reach, AskedBy::Spec, None, 0).unwrap(), Url::parse(url).unwrap());
        let auth = token.map_or(Auth::None, Auth::Bearer);
        let target = Target {
            client: &client,
            several: &client,
            reach,
            url: &url,
            auth,
            asked: WEB,
            headers: None,
            address: "the address",
        };
        send(target, None, &Validator::default()).await
    }

    #[tokio::test]
    async fn no_connection_is_made_to_what_may_not_be_reached() {
        let (here, mut seen) =
            scripted("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned()).await;
        let port = here.port();
        for host in ["127.0.0.1", "localhost", "0x7f.1", "[::ffff:127.0.0.1]", "0.0.0.0"] {
            let error = asked(Reach::default(), &format!("http://{host}:{port}/m"), None).await.unwrap_err();
            let says = "the address: it leads to the pod itself, from which models are not fetched";
            assert!(matches!(&error, FetchError::Permanent(text) if text == says), "{host}: {error}");
        }
        assert!(seen.try_recv().is_err(), "it was connected to");
        assert_eq!(asked(HERE, &format!("http://localhost:{port}/m"), None).await.unwrap().status(), 200);
        assert!(seen.recv().await.is_some());
    }

    #[tokio::test]
    async fn why_there_is_no_connection_is_said_plainly_with_what_to_do() {
        let (plain, _seen) = scripted("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".to_owned()).await;
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for (url, what, way_out) in [
            ("http://no-such-host.invalid/m".to_owned(), "its host has no address (", "correct the host of its uri"),
            (format!("http://{nobody}/m"), "nothing listens there (", "correct host and port of its uri"),
            (format!("https://{plain}/m"), "what answers there does not speak TLS (", "give http:// for https://"),
        ] {
            let error = asked(HERE, &url, None).await.unwrap_err();
            let told = error.to_string();
            assert!(error.is_temporary() && told.starts_with(&format!("the address: {what}")), "{url}: {told}");
            assert!(told.contains(way_out) && !told.contains("client error"), "{url}: {told}");
        }
    }

    #[tokio::test]
    async fn a_redirect_leads_to_no_place_that_may_not_be_reached() {
        let redirect = "HTTP/1.1 302 Found\r\ncontent-length: 0\r\nconnection: close\r\n";
        for (to, says) in [
            ("http://169.254.169.254/latest/meta-data", "a link-local address or a cloud's metadata"),
            ("http://[fd00:ec2::254]/hush", "a link-local address or a cloud's metadata"),
            ("http://10.0.0.1/hush", "a private address"),
        ] {
            let (here, _seen) = scripted(format!("{redirect}location: {to}\r\n\r\n")).await;
            let reach = Reach { private: false, loopback: true };
            let error = asked(reach, &format!("http://{here}/m"), None).await.unwrap_err();
            let told = error.to_string();
            assert!(!error.is_temporary() && told.contains(says) && !told.contains("hush"), "{to}: {told}");
        }
    }

    #[tokio::test]
    async fn a_token_goes_to_the_first_host_alone() {
        let empty = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let (elsewhere, mut second) = scripted(empty.to_owned()).await;
        let redirect = "HTTP/1.1 302 Found\r\ncontent-length: 0\r\nconnection: close\r\n";
        let (here, mut first) = scripted(format!("{redirect}location: http://{elsewhere}/m\r\n\r\n")).await;
        let sent = asked(HERE, &format!("http://{here}/m"), Some(&Token::new("hush"))).await.unwrap();
        assert_eq!(sent.status(), 200);
        assert!(first.recv().await.unwrap().contains("authorization: bearer hush"));
        let head = second.recv().await.unwrap();
        assert!(!head.contains("hush") && !head.contains("referer"), "{head}");
    }
}
