#![allow(clippy::unwrap_used)]
//! An API server for tests, in memory: it records every request and keeps objects as the real one does, as far as the
//! operator can tell: server-side apply of main resources and of statuses, resource versions, conflicts, 404.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use serde_json::{Value, json};

/// A request as it came in.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Method and path, e.g. `PATCH /api/v1/namespaces/test/services/chat`.
    pub line: String,
    /// Query.
    pub query: String,
    /// Body, or null.
    pub body: Value,
}

#[derive(Default)]
struct Inner {
    objects: BTreeMap<String, Value>,
    log: Vec<Recorded>,
    resource_version: u64,
    /// Answers that are given instead, once each: line, status, message.
    failures: Vec<(String, u16, &'static str)>,
    /// Requests that are never answered.
    hanging: Vec<String>,
}

/// The API server.
#[derive(Clone, Default)]
pub struct FakeApi(Arc<Mutex<Inner>>);

impl FakeApi {
    /// A client of this server.
    pub fn client(&self) -> Client {
        let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let api = self.clone();
        tokio::spawn(async move {
            while let Some((request, answer)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let bytes = body.collect().await.unwrap().to_bytes();
                let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
                let line = format!("{} {}", parts.method, parts.uri.path());
                let recorded = Recorded { line, query: parts.uri.query().unwrap_or_default().to_owned(), body };
                let answered = api.0.lock().unwrap().answer(&recorded);
                let Some((status, body)) = answered else {
                    // Whoever waits for it gives up, or waits for ever.
                    tokio::spawn(async move {
                        std::future::pending::<()>().await;
                        drop(answer);
                    });
                    continue;
                };
                let body = Body::from(serde_json::to_vec(&body).unwrap());
                answer.send_response(Response::builder().status(status).body(body).unwrap());
            }
        });
        Client::new(service, "default")
    }

    /// Puts an object in, as another client would.
    pub fn put(&self, path: &str, object: Value) {
        self.0.lock().unwrap().put(path, object);
    }

    /// Changes an object, as another client would.
    pub fn edit(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut inner = self.0.lock().unwrap();
        let mut object = inner.objects.get(path).unwrap().clone();
        change(&mut object);
        inner.put(path, object);
    }

    /// Takes an object away.
    pub fn remove(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path);
    }

    /// An object, if it is there.
    pub fn get<K: serde::de::DeserializeOwned>(&self, path: &str) -> Option<K> {
        self.0.lock().unwrap().objects.get(path).map(|object| serde_json::from_value(object.clone()).unwrap())
    }

    /// All objects below a path.
    pub fn list<K: serde::de::DeserializeOwned>(&self, prefix: &str) -> Vec<K> {
        let inner = self.0.lock().unwrap();
        let below = inner.objects.iter().filter(|(path, _)| path.starts_with(prefix));
        below.map(|(_, object)| serde_json::from_value(object.clone()).unwrap()).collect()
    }

    /// Answers the next request with this line by a failure.
    pub fn fail(&self, line: &str, status: u16, message: &'static str) {
        self.0.lock().unwrap().failures.push((line.to_owned(), status, message));
    }

    /// Answers no request with this line any more.
    pub fn hang(&self, line: &str) {
        self.0.lock().unwrap().hanging.push(line.to_owned());
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<Recorded> {
        std::mem::take(&mut self.0.lock().unwrap().log)
    }

    /// The lines of those of the requests since the last call that write.
    pub fn writes(&self) -> Vec<String> {
        self.requests().into_iter().map(|request| request.line).filter(|line| !line.starts_with("GET ")).collect()
    }
}

impl Inner {
    fn put(&mut self, path: &str, mut object: Value) {
        self.resource_version += 1;
        object["metadata"]["resourceVersion"] = json!(self.resource_version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.resource_version));
        }
        self.objects.insert(path.to_owned(), object);
    }

    fn answer(&mut self, request: &Recorded) -> Option<(u16, Value)> {
        self.log.push(request.clone());
        if let Some(index) = self.failures.iter().position(|(line, _, _)| *line == request.line) {
            let (_, status, message) = self.failures.remove(index);
            return Some(refusal(status, message));
        }
        if self.hanging.contains(&request.line) {
            return None;
        }
        let (method, path) = request.line.split_once(' ').unwrap();
        Some(match method {
            "GET" => self.read(path),
            "POST" => self.create(path, &request.body),
            "PUT" => self.replace(path, &request.body),
            "DELETE" => match self.objects.remove(path) {
                Some(object) => (200, object),
                None => refusal(404, "NotFound"),
            },
            "PATCH" => self.patch(path, request),
            other => panic!("{other} {path}"),
        })
    }

    fn read(&self, path: &str) -> (u16, Value) {
        if let Some(object) = self.objects.get(path) {
            return (200, object.clone());
        }
        let plural = path.rsplit('/').next().unwrap();
        if !matches!(plural, "modelversions" | "events") {
            return refusal(404, "NotFound");
        }
        let prefix = format!("{path}/");
        let items: Vec<_> =
            self.objects.iter().filter(|(key, _)| key.starts_with(&prefix)).map(|(_, value)| value).collect();
        (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
    }

    fn create(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap());
        if self.objects.contains_key(&path) {
            return refusal(409, "AlreadyExists");
        }
        self.put(&path, body.clone());
        (201, self.objects[&path].clone())
    }

    fn replace(&mut self, path: &str, body: &Value) -> (u16, Value) {
        let Some(old) = self.objects.get(path) else { return refusal(404, "NotFound") };
        if old["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
            return refusal(409, "Conflict");
        }
        self.put(path, body.clone());
        (200, self.objects[path].clone())
    }

    fn patch(&mut self, path: &str, request: &Recorded) -> (u16, Value) {
        let main = path.strip_suffix("/status").unwrap_or(path);
        let old = self.objects.get(main).cloned();
        let wanted_version = &request.body["metadata"]["resourceVersion"];
        if let Some(old) = &old
            && !wanted_version.is_null()
            && *wanted_version != old["metadata"]["resourceVersion"]
        {
            return refusal(409, "Conflict");
        }
        let new = match (main == path, old) {
            (true, old) => {
                let mut new = old.unwrap_or_else(|| json!({}));
                merge(&mut new, &request.body);
                new
            }
            (false, None) => return refusal(404, "NotFound"),
            (false, Some(mut old)) => {
                apply_status(&mut old, request);
                old
            }
        };
        self.put(main, new);
        (200, self.objects[main].clone())
    }
}

/// Server-side apply of a status: the operator owns all but `replicas`, an agent its own entry of that.
fn apply_status(object: &mut Value, request: &Recorded) {
    let manager = request.query.split('&').find_map(|pair| pair.strip_prefix("fieldManager=")).unwrap();
    let replicas = object["status"]["replicas"].take();
    if let Some(pod) = manager.strip_prefix("gantry-agent-") {
        let kept: Vec<_> = replicas.as_array().unwrap().iter().filter(|entry| entry["pod"] != pod).cloned().collect();
        object["status"]["replicas"] = json!(kept);
        return;
    }
    object["status"] = request.body["status"].clone();
    if replicas.is_array() {
        object["status"]["replicas"] = replicas;
    }
}

fn merge(into: &mut Value, patch: &Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (into, patch) => *into = patch.clone(),
    }
}

fn refusal(code: u16, reason: &str) -> (u16, Value) {
    let body = json!({"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": code,
        "reason": reason, "message": reason, "details": {"causes": [{"reason": reason, "message": reason, "field": ""}]}});
    (code, body)
}
