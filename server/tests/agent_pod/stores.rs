//! Fetching from stores: a server of S3's and a registry in this process, and what stands in for Hugging Face's.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use gantry_server::fetch::{
    Cache, CachedModel, Credential, Digest, FetchError, FetchProgress, Fetcher, Login, S3Key, Source, StoreSettings,
    Token,
};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fetch::{HERE, digest};
use crate::files::{Fault, FileServer};
use crate::s3::s3;

fn content() -> Vec<u8> {
    let rest = (0..300_000_u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]);
    b"GGUF".iter().copied().chain(rest).collect()
}

async fn fetch(source: &Source, digest: Digest) -> Result<Vec<u8>, FetchError> {
    let folder = tempfile::tempdir().unwrap();
    let fetcher = Fetcher::new(Cache::open(folder.path()).unwrap(), HERE).unwrap();
    let (progress, _) = watch::channel(FetchProgress::default());
    let model: CachedModel = fetcher.fetch(source, digest, &progress, &CancellationToken::new()).await?;
    Ok(std::fs::read(model.path()).unwrap())
}

fn at(address: &str, endpoint: &str, digest: Digest) -> Source {
    let settings = StoreSettings { endpoint: Some(endpoint), region: Some("eu-central-1") };
    Source::of_store(address, settings, Some(digest)).unwrap()
}

#[tokio::test]
async fn an_object_of_a_bucket_is_fetched_with_a_key_that_allows_it() {
    let (folder, content) = (tempfile::tempdir().unwrap(), content());
    let path = folder.path().join("models/some folder/m+1.gguf");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, &content).unwrap();
    let endpoint = s3(folder.path(), "id", "hush").await;
    let source = at("s3://models/some folder/m+1.gguf", &endpoint, digest(&content));
    let key = |secret: &str| S3Key { id: "id".to_owned(), secret: Token::new(secret), session: None };
    let signed = source.clone().with_credential(Credential::S3Key(key("hush")));
    assert!(fetch(&signed, digest(&content)).await.unwrap() == content);
    for refused in [source.clone(), source.with_credential(Credential::S3Key(key("another")))] {
        let error = fetch(&refused, digest(&content)).await.unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, FetchError::Permanent(_)) && told.contains("AWS_ACCESS_KEY_ID"), "{told}");
        assert!(told.starts_with("s3://models/some folder/m+1.gguf answers 403") && !told.contains("X-Amz"), "{told}");
    }
    let missing =
        at("s3://models/other.gguf", &endpoint, digest(&content)).with_credential(Credential::S3Key(key("hush")));
    let told = fetch(&missing, digest(&content)).await.unwrap_err().to_string();
    assert!(told.contains("404") && told.contains("there is no such file"), "{told}");
}

#[tokio::test]
async fn an_object_that_everybody_may_read_needs_no_key_and_is_continued() {
    let content = content();
    let server = FileServer::start(content.clone()).await;
    server.faults([Fault::Cut(100_000), Fault::Status(503)]);
    let endpoint = server.url().replace("/model.gguf", "");
    let source = at("s3://models/a b/m.gguf", &endpoint, digest(&content));
    assert!(fetch(&source, digest(&content)).await.unwrap() == content);
    let asked = server.asked();
    assert!(asked.iter().all(|asked| asked.path == "/models/a%20b/m.gguf"), "{asked:?}");
    assert_eq!(asked.last().unwrap().range.as_deref(), Some("bytes=100000-"));

    server.faults([Fault::Status(301)]);
    let told = fetch(&source, digest(&content)).await.unwrap_err().to_string();
    assert!(told.contains("the bucket is in another region; correct region"), "{told}");
}

/// Sends whoever asks for a file of a repository to where it is, as Hugging Face does, if they have the token.
#[tokio::test]
async fn a_file_of_a_repository_is_fetched_where_hugging_face_sends_one() {
    let content = content();
    let files = FileServer::start(content.clone()).await;
    let (to, seen) = (files.url(), Arc::new(Mutex::new(Vec::new())));
    let heard = Arc::clone(&seen);
    let hub = Router::new().fallback(move |request: Request| {
        let (to, heard) = (to.clone(), Arc::clone(&heard));
        async move {
            let path = request.uri().path().to_owned();
            let is_gated = path.contains("/gated/");
            heard.lock().unwrap().push(path);
            if is_gated {
                return StatusCode::UNAUTHORIZED.into_response();
            }
            (StatusCode::FOUND, [(header::LOCATION, to)]).into_response()
        }
    });
    let endpoint = serve(hub).await;
    let source = at("hf://owner/repository@0a1b2c/folder/m Q4.gguf", &endpoint, digest(&content));
    assert!(fetch(&source, digest(&content)).await.unwrap() == content);
    let main = at("hf://owner/repository/m.gguf", &endpoint, digest(&content));
    assert!(fetch(&main, digest(&content)).await.unwrap() == content);
    let told = fetch(&at("hf://owner/gated/m.gguf", &endpoint, digest(&content)), digest(&content)).await.unwrap_err();
    assert!(told.to_string().contains("of a gated model, first accept the terms"), "{told}");
    let asked = seen.lock().unwrap().clone();
    assert_eq!(
        asked,
        [
            "/owner/repository/resolve/0a1b2c/folder/m%20Q4.gguf",
            "/owner/repository/resolve/main/m.gguf",
            "/owner/gated/resolve/main/m.gguf"
        ]
    );
}

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// What a registry of these tests knows: a blob, and how it wants to be asked.
#[derive(Clone)]
struct Registry {
    content: Arc<Vec<u8>>,
    challenge: String,
    authorization: &'static str,
}

async fn blob(State(registry): State<Registry>, headers: HeaderMap) -> Response {
    let said = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if said != Some(registry.authorization) {
        return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, registry.challenge)]).into_response();
    }
    Body::from(registry.content.as_ref().clone()).into_response()
}

/// A registry that has the content under its digest, and who hands out its tokens.
async fn registry(content: &[u8], challenge: &str, authorization: &'static str) -> String {
    let tokens = Router::new().route(
        "/token",
        get(|request: Request| async move {
            match request.uri().query() {
                Some("service=here&scope=repository%3Aorg%2Fm%3Apull") => {
                    // Both, as Docker Hub has it.
                    r#"{"token":"for-a-moment","access_token":"for-a-moment","expires_in":300}"#.into_response()
                }
                _ => StatusCode::FORBIDDEN.into_response(),
            }
        }),
    );
    let challenge = challenge.replace("TOKENS", &serve(tokens).await);
    let path = format!("/v2/org/m/blobs/sha256:{}", digest(content));
    let registry = Registry { content: Arc::new(content.to_vec()), challenge, authorization };
    serve(Router::new().route(&path, get(blob)).with_state(registry)).await
}

#[tokio::test]
async fn the_blob_of_a_registry_is_fetched_with_the_token_that_it_has_handed_out() {
    let content = content();
    let challenge = r#"Bearer realm="TOKENS/token",service="here",scope="repository:org/m:pull""#;
    let endpoint = registry(&content, challenge, "Bearer for-a-moment").await;
    for address in ["oci://registry/org/m:v1", "oci://registry:5000/org/m", "oci://r/org/m:v1@sha256:0a"] {
        assert!(
            fetch(&at(address, &endpoint, digest(&content)), digest(&content)).await.unwrap() == content,
            "{address}"
        );
    }
    let other = digest(b"another");
    let told = fetch(&at("oci://registry/org/m:v1", &endpoint, other), other).await.unwrap_err().to_string();
    assert!(told.contains("the repository has no blob with this sha256"), "{told}");

    // A login goes nowhere where its Secret does not send it, and never over http://.
    let login = Login { user: "me".to_owned(), password: Token::new("hush"), hosts: Some("registry".to_owned()) };
    let source = at("oci://registry/org/m:v1", &endpoint, digest(&content)).with_credential(Credential::Login(login));
    let told = fetch(&source, digest(&content)).await.unwrap_err().to_string();
    assert!(told.contains("a login is sent over https:// only") && !told.contains("hush"), "{told}");
}

#[tokio::test]
async fn a_registry_that_refuses_is_told_with_what_to_do() {
    let content = content();
    for challenge in [r#"Basic realm="here""#, r#"Bearer realm="TOKENS/token",service="another""#, "Negotiate"] {
        let endpoint = registry(&content, challenge, "Bearer nobody-has-it").await;
        let error =
            fetch(&at("oci://registry/org/m:v1", &endpoint, digest(&content)), digest(&content)).await.unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, FetchError::Permanent(_)) && told.contains("give a login with secretRef"), "{told}");
        assert!(told.starts_with("oci://registry/org/m:v1 answers 40"), "{told}");
    }
    // Nor does it get a login over http:// by asking for that itself.
    let endpoint = registry(&content, r#"Basic realm="here""#, "Bearer nobody-has-it").await;
    let login = Login { user: "me".to_owned(), password: Token::new("hush"), hosts: Some("127.0.0.1".to_owned()) };
    let source = at("oci://registry/org/m:v1", &endpoint, digest(&content)).with_credential(Credential::Login(login));
    let told = fetch(&source, digest(&content)).await.unwrap_err().to_string();
    assert!(told.contains("a login is sent over https:// only") && !told.contains("hush"), "{told}");

    let metadata = r#"Bearer realm="http://169.254.169.254/latest/api/token""#;
    let endpoint = registry(&content, metadata, "Bearer nobody-has-it").await;
    let told = fetch(&at("oci://registry/org/m:v1", &endpoint, digest(&content)), digest(&content)).await.unwrap_err();
    assert!(told.to_string().contains("a link-local address or a cloud's metadata"), "{told}");
}
