//! An API server in memory with one InferenceService: list, watch, server-side apply of its status, ConfigMaps. It can be
//! away, and it writes down every request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, Response};
use serde_json::{Value, json};
use tokio::sync::watch;

/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(90);
const CORE: &str = "/api/v1/namespaces/ns/";
const OBJECTS: &str = "/apis/gantry.dev/v1alpha1/namespaces/ns/inferenceservices";

/// One request.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub query: BTreeMap<String, String>,
    pub content_type: String,
    pub body: Value,
}

struct State {
    object: watch::Sender<Value>,
    away: watch::Sender<bool>,
    config_maps: Mutex<BTreeMap<String, Value>>,
    secrets: Mutex<BTreeMap<String, Value>>,
    /// Objects that the Role does not allow yet.
    forbidden: Mutex<bool>,
    seen: Mutex<Vec<Seen>>,
}

/// The server.
#[derive(Clone)]
pub struct ApiServer(Arc<State>);

impl ApiServer {
    pub fn new(object: Value) -> Self {
        Self(Arc::new(State {
            object: watch::channel(object).0,
            away: watch::channel(false).0,
            config_maps: Mutex::default(),
            secrets: Mutex::default(),
            forbidden: Mutex::default(),
            seen: Mutex::default(),
        }))
    }

    pub fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let server = server.clone();
            async move { server.answer(request).await }
        });
        kube::Client::new(service, "ns")
    }

    /// Changes the object as the operator or a user would.
    pub fn update(&self, change: impl FnOnce(&mut Value)) {
        self.0.object.send_modify(|object| {
            change(object);
            let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
            object["metadata"]["resourceVersion"] = json!((version + 1).to_string());
        });
    }

    pub fn put_config_map(&self, name: &str, data: Value) {
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "ns"}, "data": data});
        self.0.config_maps.lock().unwrap().insert(name.to_owned(), object);
    }

    /// Stores a Secret; `data` holds base64.
    pub fn put_secret(&self, name: &str, mut object: Value) {
        (object["apiVersion"], object["kind"]) = (json!("v1"), json!("Secret"));
        self.0.secrets.lock().unwrap().insert(name.to_owned(), object);
    }

    /// As before the operator has granted the right to read ConfigMaps and Secrets.
    pub fn set_forbidden(&self, forbidden: bool) {
        *self.0.forbidden.lock().unwrap() = forbidden;
    }

    pub fn set_away(&self, away: bool) {
        self.0.away.send_replace(away);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.0.seen.lock().unwrap().clone()
    }

    pub fn object(&self) -> Value {
        self.0.object.borrow().clone()
    }

    /// The pod's entry.
    pub fn now(&self) -> Value {
        entry(&self.object())
    }

    /// Waits until the pod's entry is as wanted.
    pub async fn entry(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut object = self.0.object.subscribe();
        let found = object.wait_for(|object| wanted(&entry(object)));
        match tokio::time::timeout(PATIENCE, found).await {
            Ok(object) => {
                let found = entry(&object.unwrap());
                assert_gates_named_once(&found);
                found
            }
            Err(_) => panic!("{what} did not come; the entry is {:#}", entry(&self.object())),
        }
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Result<Response<Body>, std::io::Error> {
        if *self.0.away.borrow() {
            return Err(std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "the API server is away"));
        }
        let (head, body) = request.into_parts();
        let body = to_bytes(Body::new(body), 1 << 20).await.unwrap();
        let content_type = head.headers.get("content-type").map(|value| value.to_str().unwrap().to_owned());
        let query = head.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        let seen = Seen {
            method: head.method,
            path: head.uri.path().to_owned(),
            query: query.map(|(key, value)| (key.to_owned(), value.replace("%3D", "="))).collect(),
            content_type: content_type.unwrap_or_default(),
            body: serde_json::from_slice(&body).unwrap_or(Value::Null),
        };
        self.0.seen.lock().unwrap().push(seen.clone());
        Ok(self.respond(&seen))
    }

    fn respond(&self, seen: &Seen) -> Response<Body> {
        let config_map = seen.path.strip_prefix("/api/v1/namespaces/ns/configmaps/");
        match (&seen.method, seen.path.as_str()) {
            (&Method::GET, OBJECTS) if seen.query.contains_key("watch") => self.watch(seen),
            (&Method::GET, OBJECTS) => {
                let object = self.object();
                let version = object["metadata"]["resourceVersion"].clone();
                ok(&json!({
                    "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceServiceList",
                    "metadata": {"resourceVersion": version}, "items": [object],
                }))
            }
            (&Method::PATCH, path) if path == format!("{OBJECTS}/chat/status") => {
                let entry = seen.body["status"]["replicas"][0].clone();
                self.update(|object| apply(object, entry));
                ok(&self.object())
            }
            (&Method::GET, path) if path.starts_with(CORE) && !*self.0.forbidden.lock().unwrap() => {
                let objects = if config_map.is_some() { &self.0.config_maps } else { &self.0.secrets };
                match objects.lock().unwrap().get(path.rsplit('/').next().unwrap_or_default()) {
                    Some(object) => ok(object),
                    None => status(404, "NotFound"),
                }
            }
            _ => status(403, "Forbidden"),
        }
    }

    fn watch(&self, seen: &Seen) -> Response<Body> {
        let mut last = seen.query["resourceVersion"].clone();
        let (mut object, mut away) = (self.0.object.subscribe(), self.0.away.subscribe());
        let events = async_stream::stream! {
            loop {
                let now = object.borrow_and_update().clone();
                let version = now["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
                if version != last {
                    last = version;
                    yield Ok(format!("{}\n", json!({"type": "MODIFIED", "object": now})));
                }
                tokio::select! {
                    changed = object.changed() => if changed.is_err() { return },
                    _ = away.changed() => {}
                }
                let gone = *away.borrow();
                if gone {
                    yield Err(std::io::Error::new(std::io::ErrorKind::ConnectionReset, "the API server went away"));
                    return;
                }
            }
        };
        Response::new(Body::from_stream(events))
    }
}

/// Server-side apply, as far as one list keyed by `pod` needs it.
fn apply(object: &mut Value, entry: Value) {
    let replicas = object["status"]["replicas"].as_array().cloned().unwrap_or_default();
    let others = replicas.into_iter().filter(|other| other["pod"] != entry["pod"]);
    object["status"]["replicas"] = others.chain([entry.clone()]).collect();
}

/// Whoever shows a gate's message names the gate before it.
fn assert_gates_named_once(entry: &Value) {
    for gate in entry["candidate"]["gates"].as_array().into_iter().flatten() {
        let (name, message) = (gate["name"].as_str().unwrap(), gate["message"].as_str().unwrap_or_default());
        let again = [format!("{name} gate"), format!("gate {name}")].iter().any(|again| message.contains(again));
        assert!(!again && !message.starts_with(name), "{message:?} repeats its gate {name}");
    }
}

fn entry(object: &Value) -> Value {
    let replicas = object["status"]["replicas"].as_array().cloned().unwrap_or_default();
    replicas.into_iter().find(|entry| entry["pod"] == "chat-0").unwrap_or(Value::Null)
}

fn ok(value: &Value) -> Response<Body> {
    Response::new(Body::from(value.to_string()))
}

fn status(code: u16, reason: &str) -> Response<Body> {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": reason, "reason": reason, "code": code,
    });
    Response::builder().status(code).body(Body::from(body.to_string())).unwrap()
}
