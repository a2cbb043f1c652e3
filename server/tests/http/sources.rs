//! Models that are named by an address: stores of these tests' own, S3's server, and a server that misbehaves.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;

use crate::file_server::{Fault, FileServer};
use crate::s3::s3;
use crate::server::{PATIENCE, Server, await_condition, command, model, output, send_signal};
use crate::split::split;

const DEMO: &str = "demo-v2.q8_0.gguf";
const QUESTION: &str = "Which version are you?";
const TWO: &str = "I am demo version two.";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const NEXT_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

fn demo(name: &str) -> Vec<u8> {
    std::fs::read(model(name)).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn listen(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

/// What stands in for Hugging Face: one repository, a branch and its commit, files with the digests that it says they have.
#[derive(Clone, Default)]
struct Hub(Arc<Mutex<Repository>>);

#[derive(Default)]
struct Repository {
    commit: String,
    /// Content and digest.
    files: BTreeMap<String, (Bytes, String)>,
    asked: Vec<String>,
    /// What it answers instead of anything.
    status: Option<StatusCode>,
    token: Option<&'static str>,
    /// Whether Git itself keeps its files, of which it tells no SHA-256.
    is_plain: bool,
}

impl Hub {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let hub = Self::default();
        hub.push(COMMIT, files);
        hub
    }

    fn push(&self, commit: &str, files: &[(&str, Vec<u8>)]) {
        let mut repository = self.0.lock().unwrap();
        repository.commit = commit.to_owned();
        repository.files =
            files.iter().map(|(name, bytes)| ((*name).to_owned(), (bytes.clone().into(), sha256(bytes)))).collect();
    }

    fn set(&self, change: impl FnOnce(&mut Repository)) {
        change(&mut self.0.lock().unwrap());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().asked)
    }

    async fn start(&self) -> String {
        let hub = self.clone();
        listen(Router::new().fallback(move |request: Request| {
            let hub = hub.clone();
            async move { hub.answer(request.uri().path(), request.headers()) }
        }))
        .await
    }

    fn answer(&self, path: &str, headers: &HeaderMap) -> Response {
        let mut repository = self.0.lock().unwrap();
        repository.asked.push(path.to_owned());
        if let Some(status) = repository.status {
            return status.into_response();
        }
        let said = headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
        if repository.token.is_some_and(|token| said != Some(format!("Bearer {token}"))) {
            return StatusCode::UNAUTHORIZED.into_response();
        }
        if let Some(revision) = path.strip_prefix("/api/models/acme/demo/revision/") {
            if revision != "main" && revision != repository.commit {
                return StatusCode::NOT_FOUND.into_response();
            }
            let siblings: Vec<_> = repository
                .files
                .iter()
                .map(|(name, (bytes, sha256))| {
                    let lfs = json!({"sha256": sha256, "size": bytes.len(), "pointerSize": 130});
                    let lfs = if repository.is_plain { json!(null) } else { lfs };
                    json!({"rfilename": name, "size": bytes.len(), "blobId": "b", "lfs": lfs})
                })
                .chain([json!({"rfilename": "README.md", "size": 1, "blobId": "c"})])
                .collect();
            return json!({"id": "acme/demo", "sha": repository.commit, "siblings": siblings})
                .to_string()
                .into_response();
        }
        let file = path.strip_prefix("/acme/demo/resolve/").and_then(|rest| rest.split_once('/'));
        let file = file.filter(|(revision, _)| *revision == repository.commit);
        match file.and_then(|(_, name)| repository.files.get(name)) {
            Some((bytes, _)) => bytes.clone().into_response(),
            None => StatusCode::NOT_FOUND.into_response(),
        }
    }
}

/// A home directory, in which the cache is, and how a server is started in it.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn cache(&self) -> PathBuf {
        self.0.path().join(".cache/gantry")
    }

    fn whole_files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.cache().join("sha256")).unwrap();
        let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn in_it(&self, mut command: Command, variables: &[(&str, &str)]) -> Command {
        for name in ["XDG_CACHE_HOME", "HF_TOKEN", "HF_HOME", "AWS_ACCESS_KEY_ID", "AWS_REGION", "DOCKER_CONFIG"] {
            command.env_remove(name);
        }
        command.env("HOME", self.0.path()).envs(variables.iter().copied());
        command
    }

    async fn serve(&self, address: &str, variables: &[(&str, &str)], args: &[&str]) -> Server {
        let server = Server::launch_as(self.in_it(command(Path::new(address)), variables), args, None);
        server.until_ready().await;
        server
    }

    /// Why it is not served.
    fn refused(&self, address: &str, variables: &[(&str, &str)], args: &[&str]) -> String {
        let mut serve = self.in_it(command(Path::new(address)), variables);
        serve.args(["--port", "0"]).args(args);
        let (status, log) = output(serve);
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(!log.contains("spec") && !log.contains("secretRef"), "{log}");
        log
    }

    fn validate(&self, address: &str, variables: &[(&str, &str)], args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
        command.arg("validate").arg(address).arg("--no-load").args(args);
        self.in_it(command, variables).output().unwrap()
    }
}

/// What the last line of the log about a model says of it.
fn told(log: &str, field: &str) -> String {
    let mut lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let told = lines.rfind(|line| line.get("address").is_some() && line.get("sha256").is_some());
    told.unwrap_or_else(|| panic!("{log}"))[field].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_the_hub_is_pinned_checked_and_served_again_without_a_network() {
    let (home, hub) = (Home::new(), Hub::new(&[(DEMO, demo(DEMO))]));
    let endpoint = hub.start().await;
    let hf = [("HF_ENDPOINT", endpoint.as_str())];
    let branch = format!("hf://acme/demo/{DEMO}");
    let server = home.serve(&branch, &hf, &[]).await;
    assert_eq!(server.ask(QUESTION).await, TWO);
    let models: serde_json::Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "demo-v2.q8_0");
    let pinned = told(&server.log(), "pinned");
    assert_eq!(
        (pinned.as_str(), told(&server.log(), "sha256")),
        (format!("hf://acme/demo@{COMMIT}/{DEMO}").as_str(), sha256(&demo(DEMO)))
    );
    drop(server);
    assert_eq!(home.whole_files(), [sha256(&demo(DEMO))]);
    let asked = hub.asked();
    assert_eq!(
        asked,
        ["/api/models/acme/demo/revision/main".to_owned(), format!("/acme/demo/resolve/{COMMIT}/{DEMO}")]
    );

    // What it is pinned to needs nobody, and a branch is asked for alone.
    let server = home.serve(&pinned, &hf, &[]).await;
    assert_eq!((server.ask(QUESTION).await.as_str(), hub.asked()), (TWO, vec![]));
    drop(server);
    drop(home.serve(&branch, &hf, &[]).await);
    assert_eq!(hub.asked(), ["/api/models/acme/demo/revision/main"]);
    drop(home.serve(&branch, &hf, &["--offline"]).await);
    assert_eq!(hub.asked(), [""; 0]);
    hub.set(|repository| repository.status = Some(StatusCode::SERVICE_UNAVAILABLE));
    let server = home.serve(&branch, &hf, &[]).await;
    assert!(server.log().contains("what hf://acme/demo/demo-v2.q8_0.gguf was last is used"), "{}", server.log());
    drop(server);

    // A branch that has moved is another model.
    hub.set(|repository| repository.status = None);
    hub.push(NEXT_COMMIT, &[(DEMO, demo("demo-v1.q8_0.gguf"))]);
    let server = home.serve(&branch, &hf, &[]).await;
    assert_eq!(server.ask(QUESTION).await, "I am demo version one.");
    assert_eq!(told(&server.log(), "pinned"), format!("hf://acme/demo@{NEXT_COMMIT}/{DEMO}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn check_takes_a_digest_for_what_the_store_tells_only_where_it_does() {
    for (is_plain, verdict) in [(false, "Pass"), (true, "Skipped")] {
        let (home, hub) = (Home::new(), Hub::new(&[(DEMO, demo(DEMO))]));
        hub.set(|repository| repository.is_plain = is_plain);
        let endpoint = hub.start().await;
        // Fetched, and then from the cache. The gate Memory refuses it, before it is loaded.
        for _ in 0..2 {
            let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
            command.arg("check").arg(format!("hf://acme/demo@{COMMIT}/{DEMO}"));
            command.args(["--memory-limit", "64", "--format", "json"]);
            let output = home.in_it(command, &[("HF_ENDPOINT", endpoint.as_str())]).output().unwrap();
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let gate =
                |name: &str| report["gates"].as_array().unwrap().iter().find(|gate| gate["name"] == name).unwrap();
            assert_eq!((&gate("Fetch")["verdict"], &gate("Digest")["verdict"]), (&"Pass".into(), &verdict.into()));
            assert!(gate("Digest").to_string().contains(&sha256(&demo(DEMO))), "{report:#}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_hub_refuses_is_told_with_what_to_do() {
    let (home, hub) = (Home::new(), Hub::new(&[(DEMO, demo(DEMO))]));
    let endpoint = hub.start().await;
    let hf = [("HF_ENDPOINT", endpoint.as_str())];
    let branch = format!("hf://acme/demo/{DEMO}");
    let missing = home.refused("hf://acme/demo/other.gguf", &hf, &[]);
    assert!(missing.contains("acme/demo has no file other.gguf; it has demo-v2.q8_0.gguf"), "{missing}");
    let unknown = home.refused("hf://acme/other/m.gguf", &hf, &[]);
    assert!(unknown.contains("404"), "{unknown}");
    let revision = home.refused(&format!("hf://acme/demo@v9/{DEMO}"), &hf, &[]);
    assert!(revision.contains("there is no such repository or revision"), "{revision}");
    let offline = home.refused(&branch, &hf, &["--offline"]);
    assert!(offline.contains("start once without --offline"), "{offline}");
    hub.set(|repository| repository.token = Some("hush"));
    let gated = home.refused(&branch, &hf, &[]);
    assert!(gated.contains("HF_TOKEN") && gated.contains("terms accepted on its page"), "{gated}");
    // Bytes that are not those which the Hub has told of.
    hub.set(|repository| {
        repository.token = None;
        repository.files.get_mut(DEMO).unwrap().1 = "ab".repeat(32);
    });
    let wrong = home.refused(&branch, &hf, &[]);
    assert!(wrong.contains(&sha256(&demo(DEMO))) && wrong.contains(&"ab".repeat(32)), "{wrong}");
    assert_eq!(home.whole_files(), [""; 0], "nothing of it is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_web_server_is_told_its_digest_and_fetched_again_only_when_it_changes() {
    let (home, server) = (Home::new(), FileServer::start(demo(DEMO)).await);
    let first = home.serve(&server.url(), &[], &[]).await;
    assert_eq!(first.ask(QUESTION).await, TWO);
    assert_eq!(told(&first.log(), "sha256"), sha256(&demo(DEMO)));
    drop(first);
    let sent = server.sent_bytes();
    drop(home.serve(&server.url(), &[], &[]).await);
    assert!(server.sent_bytes() < sent + 100, "its server said that it is the same");
    server.replace(demo("demo-v1.q8_0.gguf"), Some("\"2\""));
    let second = home.serve(&server.url(), &[], &[]).await;
    assert_eq!(second.ask(QUESTION).await, "I am demo version one.");
    drop(second);
    // By its digest it is served whatever its server does.
    let asked = server.asked().len();
    let pinned = home.serve(&server.url(), &[], &["--sha256", &sha256(&demo(DEMO))]).await;
    assert_eq!((pinned.ask(QUESTION).await.as_str(), server.asked().len()), (TWO, asked));
    drop(pinned);
    let other = "ab".repeat(32);
    let wrong = home.refused(&server.url(), &[], &["--sha256", &other]);
    assert!(wrong.contains("correct --sha256 or the address"), "{wrong}");
    let mut serve = home.in_it(command(Path::new(&server.url())), &[]);
    serve.args(["--port", "0", "--sha256", "AB"]);
    let (status, log) = output(serve);
    assert!(status.code() == Some(2) && log.contains("--sha256") && log.contains("64 lower-case"), "{log}");
    let full = home.refused(
        &server.url(),
        &[],
        &["--cache-size", "1", "--cache-dir", home.0.path().join("small").to_str().unwrap()],
    );
    assert!(full.contains("raise --cache-size"), "{full}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_misbehaves_keeps_no_model_away_and_spoils_none() {
    let (home, server) = (Home::new(), FileServer::start(demo(DEMO)).await);
    // What is cut goes on, what is another file by then begins anew, and of what is told without its length two must be the same.
    server.faults([Fault::None, Fault::Cut(1_000_000), Fault::Status(503), Fault::Cut(100), Fault::IgnoreRange]);
    let validated = home.validate(&server.url(), &[], &[]);
    assert!(validated.status.success(), "{}", String::from_utf8_lossy(&validated.stderr));
    let ranges: Vec<Option<String>> = server.asked().into_iter().map(|asked| asked.range).collect();
    assert_eq!(ranges[2].as_deref(), Some("bytes=1000000-"), "{ranges:?}");
    assert_eq!(home.whole_files(), [sha256(&demo(DEMO))]);

    let home = Home::new();
    server.faults([Fault::None, Fault::UnsaidCut(2_000_000), Fault::UnsaidLength, Fault::UnsaidLength]);
    let validated = home.validate(&server.url(), &[], &[]);
    assert!(validated.status.success(), "{}", String::from_utf8_lossy(&validated.stderr));
    assert_eq!(home.whole_files(), [sha256(&demo(DEMO))]);

    // Without a tag pieces are not put together: nobody would know that they belong to two files.
    let home = Home::new();
    server.replace(demo(DEMO), None);
    server.faults([Fault::None, Fault::Cut(1_000_000)]);
    let before = server.asked().len();
    assert!(home.validate(&server.url(), &[], &[]).status.success());
    assert_eq!(server.asked()[before + 2].range, None);
    assert_eq!(home.whole_files(), [sha256(&demo(DEMO))]);

    let page = FileServer::start(b"<html>sign in</html>".to_vec()).await;
    let refused = home.refused(&page.url(), &[], &[]);
    assert!(refused.contains("no GGUF file") && !refused.contains("sign in"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_killed_leaves_what_the_next_one_goes_on_with() {
    let (home, hub) = (Home::new(), Hub::new(&[(DEMO, demo(DEMO))]));
    let server = FileServer::start(demo(DEMO)).await;
    server.faults([Fault::Cut(1_000_000)]);
    server.always(Some(Fault::Stall));
    let digest = sha256(&demo(DEMO));
    let mut serve = home.in_it(command(Path::new(&server.url())), &[]);
    let mut killed = serve.args(["--port", "0", "--sha256", &digest]).stderr(Stdio::null()).spawn().unwrap();
    let partial = home.cache().join(format!("sha256/{digest}.partial"));
    await_condition("a part to be there", async || {
        std::fs::metadata(&partial).is_ok_and(|partial| partial.len() == 1_000_000) && server.asked().len() == 2
    })
    .await;
    killed.kill().unwrap();
    killed.wait().unwrap();
    // From another source, for it is the same file.
    drop(hub);
    server.always(None);
    let served = home.serve(&server.url(), &[], &["--sha256", &digest]).await;
    assert_eq!(served.ask(QUESTION).await, TWO);
    assert_eq!(server.asked()[2].range.as_deref(), Some("bytes=1000000-"));
    assert_eq!(home.whole_files(), [digest]);
}

/// The first process of a container ends by no signal that it does not ask for.
#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_fetch() {
    let (home, server) = (Home::new(), FileServer::start(demo(DEMO)).await);
    server.always(Some(Fault::Stall));
    for (signal, number) in [("TERM", 15), ("INT", 2)] {
        let mut serve = home.in_it(command(Path::new(&server.url())), &[]);
        let mut fetching = serve.args(["--port", "0"]).stderr(Stdio::null()).spawn().unwrap();
        let before = server.asked().len();
        await_condition("it to ask", async || server.asked().len() > before).await;
        send_signal(fetching.id(), signal);
        let ended = tokio::task::spawn_blocking(move || fetching.wait()).await.unwrap().unwrap();
        assert_eq!(ended.code(), Some(128 + number), "{ended}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_share_a_cache_fetch_a_model_once() {
    let (home, hub) = (Arc::new(Home::new()), Hub::new(&[(DEMO, demo(DEMO))]));
    let endpoint = hub.start().await;
    let started: Vec<_> = (0..4)
        .map(|_| {
            let (home, endpoint) = (Arc::clone(&home), endpoint.clone());
            let run = move || home.validate(&format!("hf://acme/demo/{DEMO}"), &[("HF_ENDPOINT", &endpoint)], &[]);
            tokio::task::spawn_blocking(run)
        })
        .collect();
    for ended in started {
        let ended = tokio::time::timeout(PATIENCE, ended).await.unwrap().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    let downloads = hub.asked().into_iter().filter(|path| path.contains("/resolve/")).count();
    assert_eq!((downloads, home.whole_files()), (1, vec![sha256(&demo(DEMO))]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_is_looked_at_without_the_rest_of_the_file() {
    let (home, server) = (Home::new(), FileServer::start(demo(DEMO)).await);
    let validated = home.validate(&server.url(), &[], &["--header-only"]);
    let report = String::from_utf8_lossy(&validated.stdout).into_owned();
    assert!(validated.status.success(), "{report}{}", String::from_utf8_lossy(&validated.stderr));
    assert!(report.contains("ok   format") && report.contains("Q8_0"), "{report}");
    assert!(server.sent_bytes() <= 1 << 20, "{}", server.sent_bytes());
    assert!(!home.cache().join("sha256").exists() || home.whole_files().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_a_bucket_needs_the_key_of_the_environment() {
    let (home, folder) = (Home::new(), tempfile::tempdir().unwrap());
    std::fs::create_dir(folder.path().join("models")).unwrap();
    std::fs::write(folder.path().join("models/chat.gguf"), demo(DEMO)).unwrap();
    let endpoint = s3(folder.path(), "id", "hush").await;
    let aws = |secret| {
        [("AWS_ENDPOINT_URL", endpoint.as_str()), ("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", secret)]
    };
    let server = home.serve("s3://models/chat.gguf", &aws("hush"), &[]).await;
    assert_eq!((server.ask(QUESTION).await.as_str(), told(&server.log(), "sha256")), (TWO, sha256(&demo(DEMO))));
    drop(server);
    let refused = Home::new().refused("s3://models/chat.gguf", &aws("other"), &[]);
    assert!(refused.contains("give a key with AWS_ACCESS_KEY_ID") && !refused.contains("hush"), "{refused}");
}

/// A registry with one manifest and the blobs that it names.
async fn registry(manifest: String, blobs: Vec<Vec<u8>>) -> (String, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&asked);
    let by_digest = format!("/v2/acme/demo/manifests/sha256:{}", sha256(manifest.as_bytes()));
    let router = Router::new().fallback(move |request: Request| {
        let path = request.uri().path().to_owned();
        heard.lock().unwrap().push(path.clone());
        let is_manifest = path == "/v2/acme/demo/manifests/v1" || path == by_digest;
        let accepts = request.headers().get(header::ACCEPT).map(|value| value.to_str().unwrap().to_owned());
        let blob = blobs.iter().find(|blob| path == format!("/v2/acme/demo/blobs/sha256:{}", sha256(blob))).cloned();
        let manifest = manifest.clone();
        async move {
            match blob {
                Some(blob) => blob.into_response(),
                None if is_manifest && accepts.is_some_and(|kinds| kinds.contains("oci.image.manifest")) => {
                    manifest.into_response()
                }
                None => StatusCode::NOT_FOUND.into_response(),
            }
        }
    });
    (listen(router).await, asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_a_registry_is_the_layer_that_its_manifest_names() {
    let content = demo(DEMO);
    let manifest = json!({"schemaVersion": 2, "config": {"mediaType": "application/vnd.docker.ai.model.config.v0.1+json"}, "layers": [
        {"mediaType": "application/vnd.docker.ai.license", "digest": format!("sha256:{}", "11".repeat(32)), "size": 1},
        {"mediaType": "application/vnd.docker.ai.gguf.v3", "digest": format!("sha256:{}", sha256(&content)), "size": content.len()},
    ]});
    let (endpoint, asked) = registry(manifest.to_string(), vec![content]).await;
    let host = endpoint.strip_prefix("http://").unwrap();
    let home = Home::new();
    let address = format!("oci://{host}/acme/demo:v1");
    let server = home.serve(&address, &[], &[]).await;
    assert_eq!(server.ask(QUESTION).await, TWO);
    let pinned = told(&server.log(), "pinned");
    assert_eq!(pinned, format!("{address}@sha256:{}", sha256(manifest.to_string().as_bytes())));
    drop(server);
    asked.lock().unwrap().clear();
    let server = home.serve(&pinned, &[], &["--alias", "chat"]).await;
    assert_eq!((server.ask(QUESTION).await.as_str(), asked.lock().unwrap().len()), (TWO, 0));
    drop(server);
    let missing = home.refused(&format!("oci://{host}/acme/demo:v2"), &[], &[]);
    assert!(missing.contains("there is no such repository or tag"), "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_parts_is_fetched_whole_by_the_address_of_the_first() {
    let folder = tempfile::tempdir().unwrap();
    split(folder.path());
    let names = ["demo-00001-of-00002.gguf", "demo-00002-of-00002.gguf"];
    let parts = names.map(|name| std::fs::read(folder.path().join(name)).unwrap());
    let mut digests = parts.each_ref().map(|part| sha256(part));
    digests.sort();
    let hub = Hub::new(&[(names[0], parts[0].clone()), (names[1], parts[1].clone())]);
    let endpoint = hub.start().await;
    let (home, hf) = (Home::new(), [("HF_ENDPOINT", endpoint.as_str())]);
    let address = format!("hf://acme/demo/{}", names[0]);
    let server = home.serve(&address, &hf, &[]).await;
    assert_eq!(server.ask(QUESTION).await, TWO);
    let models: serde_json::Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(models["data"][0]["id"], "demo");
    let pinned = told(&server.log(), "pinned");
    drop(server);
    assert_eq!(home.whole_files(), digests);
    hub.asked();
    let validated = home.validate(&pinned, &hf, &[]);
    assert!(validated.status.success(), "{}", String::from_utf8_lossy(&validated.stdout));
    assert_eq!(hub.asked(), [""; 0]);
    // One that is gone is fetched alone.
    std::fs::remove_file(home.cache().join("sha256").join(sha256(&parts[1]))).unwrap();
    assert!(home.validate(&pinned, &hf, &[]).status.success());
    assert_eq!(hub.asked().into_iter().filter(|path| path.contains("/resolve/")).count(), 1);

    // A store that does not know digests, and where the parts lie beside each other.
    let files = listen(Router::new().fallback_service(tower_http::services::ServeDir::new(folder.path()))).await;
    let spaced = names.map(|name| format!("my {name}"));
    for (name, spaced) in names.iter().zip(&spaced) {
        std::fs::rename(folder.path().join(name), folder.path().join(spaced)).unwrap();
    }
    let home = Home::new();
    let server = home.serve(&format!("{files}/my%20{}", names[0]), &[], &[]).await;
    assert_eq!(server.ask(QUESTION).await, TWO);
    assert_eq!(home.whole_files(), digests);
    drop(server);
    std::fs::remove_file(folder.path().join(&spaced[1])).unwrap();
    let missing = Home::new().refused(&format!("{files}/my%20{}", names[0]), &[], &[]);
    assert!(missing.contains("demo-00002-of-00002.gguf answers 404"), "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_may_be_named_by_an_address_too() {
    let (home, server) = (Home::new(), FileServer::start(demo(DEMO)).await);
    let served = home.serve(model(DEMO).to_str().unwrap(), &[], &["--model-draft", &server.url()]).await;
    assert_eq!(served.ask(QUESTION).await, TWO);
    assert_eq!(home.whole_files(), [sha256(&demo(DEMO))]);
}

#[test]
fn an_address_that_cannot_be_used_is_told_with_the_other_mistakes() {
    let home = Home::new();
    for (address, says) in [
        ("ftp://host/m.gguf", "ftp:// in this release"),
        ("hf://acme/m.gguf", "hf://owner/repository@revision/path/model.gguf"),
        ("s3://bucket", "s3://bucket/path/model.gguf"),
        ("file:///nowhere/m.gguf", "\"/nowhere/m.gguf\" is not there"),
    ] {
        let mut serve = home.in_it(command(Path::new(address)), &[]);
        serve.args(["--port", "nothing"]);
        let (status, log) = output(serve);
        assert!(status.code() == Some(2) && log.contains(says) && log.contains("--port"), "{address}: {log}");
    }
}
