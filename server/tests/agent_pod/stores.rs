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
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fetch::{HERE, digest};
use crate::files::{Fault, FileServer};
use crate::pod::{ONE, Pod, demo, gate};
use crate::s3::s3;
use crate::split::split;

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

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file of a repository: its name, what is in it, and the digest of which the Hub tells.
type HubFile = (&'static str, Vec<u8>, Option<String>);

/// A repository of Hugging Face's with these files, of which it serves parts, and what was asked of it.
async fn hub(files: Vec<HubFile>) -> (String, Arc<Mutex<Vec<String>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&seen);
    let told = files.iter().map(|(name, content, sha256)| {
        let lfs = sha256.as_ref().map(|sha256| json!({"sha256": sha256, "size": content.len(), "pointerSize": 130}));
        json!({"rfilename": name, "size": content.len(), "lfs": lfs})
    });
    let revision = json!({"sha": COMMIT, "siblings": told.collect::<Vec<_>>()});
    let router = Router::new().fallback(move |request: Request| {
        let path = request.uri().path().to_owned();
        let name = path.strip_prefix(&format!("/owner/repository/resolve/{COMMIT}/")).unwrap_or_default();
        let last = request.headers().get(header::RANGE).and_then(|range| range.to_str().ok()?.strip_prefix("bytes=0-"));
        let last = last.and_then(|last| last.parse::<usize>().ok());
        let content = files.iter().find(|(known, ..)| *known == name).map(|(_, content, _)| content);
        let answer = match (content, last) {
            (Some(content), Some(last)) => {
                let (last, all) = (last.min(content.len() - 1), content.len());
                let range = [(header::CONTENT_RANGE, format!("bytes 0-{last}/{all}"))];
                (StatusCode::PARTIAL_CONTENT, range, content[..=last].to_vec()).into_response()
            }
            (Some(content), None) => content.clone().into_response(),
            _ if path == format!("/api/models/owner/repository/revision/{COMMIT}") => {
                revision.to_string().into_response()
            }
            _ => StatusCode::NOT_FOUND.into_response(),
        };
        let what = if last.is_some() { "head of" } else { "all of" };
        heard.lock().unwrap().push(format!("{what} {path}"));
        async move { answer }
    });
    (serve(router).await, seen)
}

fn of_commit(endpoint: &str, file: &str) -> Value {
    let source = json!({"uri": format!("hf://owner/repository@{COMMIT}/{file}"), "endpoint": endpoint});
    json!({
        "name": "v1",
        "model": {"servedName": "chat", "source": source},
        "runtime": {"contextSize": 1024, "parallel": 2, "cacheType": "f16", "gpuLayers": "auto", "threads": 1},
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_commit_is_the_one_of_which_the_hub_tells_the_digest() {
    let mut pod = Pod::fresh();
    let content = demo("demo-v1.q8_0.gguf");
    let sha256 = digest(&content).to_string();
    let (endpoint, seen) = hub(vec![("m.gguf", content, Some(sha256.clone()))]).await;
    let version = of_commit(&endpoint, "m.gguf");
    pod.prepare(&version);
    let entry = pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
    assert_eq!(gate(&entry, "Digest")["value"], format!("sha256:{sha256}"), "{entry:#}");
    pod.roll_out(&version).await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
    let revisions = seen.lock().unwrap().iter().filter(|path| path.contains("/api/")).count();
    assert_eq!(revisions, 1, "it is asked once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_commit_that_is_another_or_has_no_digest_is_refused() {
    let content = demo("demo-v1.q8_0.gguf");
    for (sha256, gate_name, says) in
        [(Some("ab".repeat(32)), "Digest", "was asked for"), (None, "Fetch", "does not tell the SHA-256 of this file")]
    {
        let mut pod = Pod::fresh();
        let (endpoint, _) = hub(vec![("m.gguf", content.clone(), sha256)]).await;
        pod.prepare(&of_commit(&endpoint, "m.gguf"));
        let refused =
            |entry: &Value| entry["candidate"]["phase"] == "Failed" || gate(entry, gate_name)["verdict"] == "Fail";
        let entry = pod.api.entry("refused", refused).await;
        assert!(entry.to_string().contains(says), "{entry:#}");
        pod.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_parts_is_fetched_whole_and_judged_before_that() {
    let folder = tempfile::tempdir().unwrap();
    split(folder.path());
    let names = ["demo-00001-of-00002.gguf", "demo-00002-of-00002.gguf"];
    let part = |name: &'static str| {
        let content = std::fs::read(folder.path().join(name)).unwrap();
        let sha256 = digest(&content).to_string();
        (name, content, Some(sha256))
    };
    let parts = names.map(part);
    let first = parts[0].2.clone().unwrap();
    let (endpoint, seen) = hub(parts.to_vec()).await;
    let downloads = || seen.lock().unwrap().iter().filter(|asked| asked.starts_with("all of /owner")).count();

    let mut pod = Pod::fresh();
    let mut large = of_commit(&endpoint, names[0]);
    (large["name"], large["runtime"]["contextSize"], large["runtime"]["parallel"]) =
        (json!("large"), json!(16_777_216), json!(1));
    // However much memory the machine has.
    let headroom = |pod: &Pod, ratio: &str| {
        pod.api.update(|object| object["spec"]["rollout"]["gates"]["memory"]["headroom"] = json!(ratio));
    };
    headroom(&pod, "99%");
    pod.prepare(&large);
    let entry = pod.api.entry("refused", |entry| gate(entry, "Memory")["verdict"] == "Fail").await;
    assert_eq!(downloads(), 0, "{entry:#}");

    headroom(&pod, "0%");
    let version = of_commit(&endpoint, names[0]);
    pod.roll_out(&version).await;
    assert_eq!((pod.answer().await.as_str(), downloads()), ("I am demo version two.", 2));
    let entry = pod.api.entry("reported", |entry| entry["version"] == "v1").await;
    assert_eq!(entry["health"], "Healthy");
    // Whoever comes for this pod finds all of it in the cache.
    let (api, folder) = pod.end().await;
    let before = seen.lock().unwrap().len();
    let mut pod = Pod::start(api, folder);
    pod.api.entry("it answers again", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    pod.prepare(&version);
    let entry = pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
    let told = gate(&entry, "Digest")["value"].as_str().map(str::to_owned);
    assert!(told.is_none_or(|told| told == format!("sha256:{first}")), "{entry:#}");
    assert_eq!(seen.lock().unwrap().len(), before);
    pod.end().await;
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
    let by_manifest = format!("oci://r/org/m:v1@sha256:{}", "0a".repeat(32));
    for address in ["oci://registry/org/m:v1", "oci://registry:5000/org/m", &by_manifest] {
        assert!(
            fetch(&at(address, &endpoint, digest(&content)), digest(&content)).await.unwrap() == content,
            "{address}"
        );
    }
    let settings = StoreSettings { endpoint: Some(&endpoint), region: None };
    let mistyped = Source::of_store("oci://r/org/m:v1@sha256:0a", settings, Some(digest(&content))).unwrap_err();
    assert!(mistyped.to_string().contains("sha256: and 64 hexadecimal digits"), "{mistyped}");
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
