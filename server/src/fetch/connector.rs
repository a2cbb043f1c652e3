//! How a pod connects to a bucket of responses, and asks for its own credentials. Whoever writes the service names the endpoint, so that it leads nowhere where models may not be
//! fetched from, either. The metadata of the machine among that: who may use the machine's own credentials is not for an
//! InferenceService to say, and without a Secret those of the pod's ServiceAccount are left.

use std::env;
use std::sync::Arc;

use futures::future::BoxFuture;
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use reqwest::{Client, Url, redirect};

use super::reach::{Reach, Resolver, Unreachable};

/// Where ECS and EKS give a container its own credentials: link-local, all of them.
const CREDENTIAL_HOSTS: [&str; 3] = ["169.254.170.2", "169.254.170.23", "[fd00:ec2::23]"];

/// Makes clients that connect to what may be reached.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    reach: Reach,
    /// Where the cloud says that it gives the pod's credentials.
    credentials: Option<Url>,
}

/// A request to where none may go.
#[derive(Debug, thiserror::Error)]
#[error("{host} is not asked: {why}; give the bucket another endpoint, or a secretRef where it has none")]
struct NotAsked {
    host: String,
    why: Unreachable,
}

impl Connector {
    /// One that connects to what may be reached, and to where the environment says that the container's credentials are.
    pub(crate) fn from_env(reach: Reach) -> Self {
        let relative = env::var("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").ok();
        let relative = relative.map(|path| format!("http://{}{path}", CREDENTIAL_HOSTS[0]));
        let named = relative.or_else(|| env::var("AWS_CONTAINER_CREDENTIALS_FULL_URI").ok());
        let named = named.and_then(|url| Url::parse(&url).ok());
        Self { reach, credentials: named.filter(|url| url.host_str().is_some_and(|h| CREDENTIAL_HOSTS.contains(&h))) }
    }

    fn check(&self, url: &Url) -> Result<(), NotAsked> {
        if self.credentials.as_ref() == Some(url) {
            return Ok(());
        }
        let host = || url.host_str().unwrap_or_default().to_owned();
        self.reach.check(url).map_err(|why| NotAsked { host: host(), why })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(|value| value == "true");
        let client = Client::builder()
            // Through a proxy, whatever the proxy reaches would be reached.
            .no_proxy()
            .https_only(!allows_http)
            .dns_resolver(Arc::new(Resolver(self.reach)))
            // A request is signed for the host that it names.
            .redirect(redirect::Policy::none())
            .user_agent(concat!("gantry/", env!("CARGO_PKG_VERSION")))
            .build();
        let client = client.map_err(|error| object_store::Error::Generic { store: "S3", source: error.into() })?;
        Ok(HttpClient::new(Checked { connector: self.clone(), client }))
    }
}

/// A client that looks at each address before it asks it.
#[derive(Debug)]
struct Checked {
    connector: Connector,
    client: Client,
}

impl HttpService for Checked {
    fn call<'a, 'f>(&'a self, request: HttpRequest) -> BoxFuture<'f, Result<HttpResponse, HttpError>>
    where
        'a: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let url = Url::parse(&request.uri().to_string());
            let url = url.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
            self.connector.check(&url).map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
            self.client.call(request).await
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::error::Error;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn connector(loopback: bool, credentials: Option<&str>) -> Connector {
        let credentials = credentials.map(|url| url.parse().unwrap());
        Connector { reach: Reach { private: false, loopback }, credentials }
    }

    #[test]
    fn neither_metadata_nor_private_addresses_are_asked_but_for_the_pods_own_credentials() {
        let own = "http://169.254.170.23/v1/credentials";
        for (url, asked) in [
            (own, true),
            ("http://169.254.170.23/v1/credentials?x", false),
            ("http://169.254.169.254/latest/api/token", false),
            ("http://10.0.0.1:9000/bucket/x", false),
            ("http://127.0.0.1:9000/bucket/x", false),
            ("https://[fd00:ec2::254]/x", false),
            ("https://1.1.1.1/bucket/x", true),
            ("https://bucket.s3.eu-central-1.amazonaws.com/x", true),
        ] {
            let checked = connector(false, Some(own)).check(&url.parse().unwrap());
            assert_eq!(checked.is_ok(), asked, "{url}: {checked:?}");
        }
        assert!(
            connector(false, None).check(&own.parse().unwrap()).is_err(),
            "unless the cloud says that they are there"
        );
        let error = connector(false, None).check(&"http://169.254.169.254/".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("a cloud's metadata") && error.contains("secretRef"), "{error}");
    }

    #[tokio::test]
    async fn a_name_or_a_redirect_leads_to_no_place_that_may_not_be_reached() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = tokio::spawn(async move {
            let mut asked = 0;
            // Answers twice: were the redirect followed, the second would be for it.
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut head = [0; 4096];
                let _ = stream.read(&mut head).await.unwrap();
                asked += 1;
                let end = head.starts_with(b"GET /end");
                let answer = "HTTP/1.1 307 Temporary Redirect\r\nlocation: /there\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(answer.as_bytes()).await.unwrap();
                if end {
                    return asked;
                }
            }
        });
        let ask = async |loopback: bool, allow_http: bool, host: &str, path: &str| {
            let options = ClientOptions::new().with_allow_http(allow_http);
            let client = connector(loopback, None).connect(&options).unwrap();
            let request =
                axum::http::Request::get(format!("http://{host}:{port}/{path}")).body(String::new().into()).unwrap();
            client.execute(request).await.map(|response| response.status().as_u16())
        };
        for host in ["localhost", "127.0.0.1"] {
            let error = ask(false, true, host, "x").await.unwrap_err();
            let mut all = error.to_string();
            let mut source = error.source();
            while let Some(error) = source {
                all.push_str(&error.to_string());
                source = error.source();
            }
            assert!(all.contains("it leads to the pod itself"), "{host}: {all}");
        }
        assert!(ask(true, false, "127.0.0.1", "x").await.is_err(), "without TLS only where it was asked for");
        assert_eq!(ask(true, true, "127.0.0.1", "x").await.unwrap(), 307);
        assert_eq!(ask(true, true, "127.0.0.1", "end").await.unwrap(), 307);
        assert_eq!(serving.await.unwrap(), 2, "those two, and no more");
    }
}
