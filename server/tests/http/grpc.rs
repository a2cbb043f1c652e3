//! The generate protocol as gRPC, asked by tonic's client, and by plain HTTP/2 where a client would hide what comes.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use gantry_generate::grpc::proto::chat_message::Role;
use gantry_generate::grpc::proto::stream_event::Event;
use gantry_generate::grpc::proto::{
    ChatMessage, ChatRequest, ChatResponse, Done, EmbeddingsRequest, EmbeddingsResponse, FinishReason, GenerateRequest,
    GenerateResponse, Priority, StreamEvent,
};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tonic::client::Grpc;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_prost::ProstCodec;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_types::StatusExt;

use crate::server::{PATIENCE, Server, UNENDING, await_condition, chat, send_signal};

const GRPC: [&str; 2] = ["--grpc-port", "0"];
const SERVICE: &str = "gantry.inference.v1.Inference";

async fn channel(server: &Server) -> Channel {
    to(server.grpc_address().await)
}

fn to(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy()
}

fn path(method: &str) -> axum::http::uri::PathAndQuery {
    format!("/{SERVICE}/{method}").parse().unwrap()
}

/// A message, with metadata or without.
trait Ask {
    type Asked: Message + Send + Sync + 'static;
    fn request(self) -> Request<Self::Asked>;
}

impl<A: Message + Send + Sync + 'static> Ask for Request<A> {
    type Asked = A;
    fn request(self) -> Request<A> {
        self
    }
}

macro_rules! ask {
    ($($message:ty),*) => {$(
        impl Ask for $message {
            type Asked = Self;
            fn request(self) -> Request<Self> {
                Request::new(self)
            }
        }
    )*};
}

ask!(GenerateRequest, ChatRequest, EmbeddingsRequest);

/// A call of a method that answers once.
async fn call<A: Ask, B>(channel: &Channel, method: &str, asked: A) -> Result<Response<B>, Status>
where
    B: Message + Default + Send + Sync + 'static,
{
    let mut client = Grpc::new(channel.clone()).max_encoding_message_size(usize::MAX);
    client.ready().await.unwrap();
    client.unary(asked.request(), path(method), ProstCodec::<A::Asked, B>::default()).await
}

/// A call of a method that answers by events.
async fn stream(channel: &Channel, method: &str, asked: impl Ask) -> Result<Streaming<StreamEvent>, Status> {
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    streamed(client, method, asked).await
}

async fn streamed<A: Ask>(mut client: Grpc<Channel>, method: &str, asked: A) -> Result<Streaming<StreamEvent>, Status> {
    let codec = ProstCodec::<A::Asked, StreamEvent>::default();
    client.server_streaming(asked.request(), path(method), codec).await.map(Response::into_inner)
}

/// The text of a stream to its end, and that.
async fn rest(mut events: Streaming<StreamEvent>) -> (String, Done) {
    let (mut text, mut told) = (String::new(), 0);
    loop {
        match events.message().await.unwrap().expect("a last event").event.unwrap() {
            Event::Token(token) => {
                assert_eq!(token.index, told);
                text.push_str(&token.token);
                told += 1;
            }
            Event::Done(done) => {
                assert!(events.message().await.unwrap().is_none(), "nothing comes after it");
                return (text, done);
            }
            Event::Error(error) => panic!("{error:?}"),
        }
    }
}

fn text(prompt: &str, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: prompt.to_owned(),
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ..GenerateRequest::default()
    }
}

/// What does not end by itself before a test does: after this the model says the same for ever.
fn unending() -> GenerateRequest {
    text("0", UNENDING)
}

fn said(role: Role, content: &str) -> ChatMessage {
    ChatMessage { role: role.into(), content: content.to_owned() }
}

/// The same with metadata.
fn with<A>(asked: A, metadata: &[(&'static str, &str)]) -> Request<A> {
    let mut request = Request::new(asked);
    for (name, value) in metadata {
        request.metadata_mut().insert(*name, value.parse().unwrap());
    }
    request
}

/// Asks without a client of gRPC's: the head of what comes, its status and its body.
async fn ask_raw(address: SocketAddr, method: &str, headers: &[(&str, &str)], body: Vec<u8>) -> reqwest::Response {
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let mut request = client.post(format!("http://{address}/{SERVICE}/{method}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(body).send().await.unwrap()
}

fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0][..], &u32::try_from(bytes.len()).unwrap().to_be_bytes(), &bytes].concat()
}

#[tokio::test]
async fn a_text_and_a_chat_are_the_same_whole_in_events_and_over_http() {
    let server = Server::start(&[&["--ctx-size", "1024", "--parallel", "2"], &GRPC[..]].concat()).await;
    let channel = channel(&server).await;

    let asked = GenerateRequest { logprobs: true, ..text("Which version", 8) };
    let answered: Response<GenerateResponse> = call(&channel, "Generate", asked.clone()).await.unwrap();
    assert_eq!(answered.metadata().get("x-gantry-version").unwrap(), "standalone");
    assert!(answered.metadata().contains_key("x-request-id"));
    let whole = answered.into_inner();
    assert!(uuid::Uuid::try_parse(&whole.id).is_ok(), "{whole:?}");
    assert_eq!((whole.object.as_str(), whole.model.as_str()), ("text_completion", "demo-v2.q8_0"));
    let events = stream(&channel, "GenerateStream", asked).await.unwrap();
    let (streamed, done) = rest(events).await;
    let over_http: Value = server
        .post("/generate", &json!({"prompt": "Which version", "max_tokens": 8, "temperature": 0}))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let text = &whole.choices[0].text;
    assert!(!text.is_empty());
    assert_eq!((&streamed, over_http["choices"][0]["text"].as_str().unwrap()), (text, text.as_str()));
    assert_eq!((done.usage, done.finish_reason), (whole.usage, whole.choices[0].finish_reason));
    assert_eq!(
        whole.usage.unwrap().completion_tokens,
        over_http["usage"]["completion_tokens"].as_u64().unwrap() as u32
    );

    let question = "Which version are you?";
    let asked = ChatRequest {
        messages: vec![said(Role::User, question)],
        max_tokens: Some(200),
        temperature: Some(0.0),
        priority: Priority::High.into(),
        ..ChatRequest::default()
    };
    let whole: ChatResponse = call(&channel, "Chat", asked.clone()).await.unwrap().into_inner();
    let message = whole.choices[0].message.clone().unwrap();
    assert_eq!(message.role(), Role::Assistant);
    let over_http: Value = server.post("/chat", &chat(question)).send().await.unwrap().json().await.unwrap();
    assert_eq!(over_http["choices"][0]["message"]["content"], message.content);
    assert_eq!(rest(stream(&channel, "ChatStream", asked.clone()).await.unwrap()).await.0, message.content);
    let asked = ChatRequest { stop_sequences: vec!["version".to_owned()], ..asked };
    let stopped: ChatResponse = call(&channel, "Chat", asked).await.unwrap().into_inner();
    assert_eq!(stopped.choices[0].finish_reason(), FinishReason::StopSequence);

    // They count as those over HTTP do.
    let counted = async |line: &str| server.metric(line).await;
    assert_eq!(
        counted("gantry_requests_total{route=\"generate\",version=\"standalone\",status=\"200\",outcome=\"ok\"}").await,
        3.0
    );
    assert_eq!(counted("gantry_requests_by_priority_total{version=\"standalone\",priority=\"high\"}").await, 3.0);
}

#[tokio::test]
async fn texts_are_embedded_as_over_http() {
    let server = Server::start(&[&["--embeddings", "--pooling", "mean"], &GRPC[..]].concat()).await;
    let channel = channel(&server).await;
    let input = vec!["Hello".to_owned(), "Good bye".to_owned()];
    let asked = EmbeddingsRequest { input: input.clone(), ..EmbeddingsRequest::default() };
    let answered: EmbeddingsResponse = call(&channel, "Embeddings", asked).await.unwrap().into_inner();
    let over_http: Value =
        server.post("/embeddings", &json!({"input": input})).send().await.unwrap().json().await.unwrap();
    assert_eq!(answered.data.len(), 2);
    for (i, data) in answered.data.iter().enumerate() {
        let wanted: Vec<f32> = serde_json::from_value(over_http["data"][i]["embedding"].clone()).unwrap();
        assert!(data.embedding.iter().zip(&wanted).all(|(one, other)| (one - other).abs() < 1e-4), "{i}");
        assert_eq!((data.index, data.embedding.len()), (i as u32, wanted.len()));
    }
    assert_eq!(u64::from(answered.usage.unwrap().prompt_tokens), over_http["usage"]["prompt_tokens"].as_u64().unwrap());
    for (wrong, field) in [(vec![], "input"), (vec!["a".to_owned(), String::new()], "input[1]")] {
        let asked = EmbeddingsRequest { input: wrong, ..EmbeddingsRequest::default() };
        let status = call::<_, EmbeddingsResponse>(&channel, "Embeddings", asked).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, field);
    }
}

#[tokio::test]
async fn what_goes_wrong_has_its_status() {
    let server =
        Server::start(&[&["--ctx-size", "512", "--parallel", "1", "--api-key", "a-secret"], &GRPC[..]].concat()).await;
    let (address, channel) = (server.grpc_address().await, channel(&server).await);
    let key = [("authorization", "Bearer a-secret")];
    let refused = async |asked: GenerateRequest, metadata: &[(&'static str, &str)]| {
        call::<_, GenerateResponse>(&channel, "Generate", with(asked, metadata)).await.map(drop).unwrap_err()
    };
    let good = || text("Hi", 2);
    assert!(call::<_, GenerateResponse>(&channel, "Generate", with(good(), &key)).await.is_ok());
    assert!(
        call::<_, GenerateResponse>(&channel, "Generate", with(good(), &[("x-api-key", "a-secret")])).await.is_ok()
    );

    for (metadata, says) in [(vec![], "is needed"), (vec![("authorization", "Bearer another")], "Incorrect API key")] {
        let status = refused(good(), &metadata).await;
        assert_eq!(status.code(), Code::Unauthenticated);
        assert!(status.message().contains(says), "{status}");
    }
    for (asked, code, reason) in [
        (GenerateRequest { top_p: Some(0.0), ..good() }, Code::InvalidArgument, "invalid_value"),
        (GenerateRequest { priority: 9, ..good() }, Code::InvalidArgument, "invalid_value"),
        (text("", 1), Code::InvalidArgument, "invalid_value"),
        (text(&"word ".repeat(2000), 1), Code::InvalidArgument, "context_length_exceeded"),
        (GenerateRequest { model: "another".to_owned(), ..good() }, Code::NotFound, "model_not_found"),
        (text(&"x".repeat(9 << 20), 1), Code::ResourceExhausted, "request_too_large"),
    ] {
        let status = refused(asked, &key).await;
        assert_eq!(status.code(), code, "{status}");
        assert_eq!(status.get_details_error_info().unwrap().reason, reason, "{status}");
    }
    let odd = refused(good(), &[key[0], ("x-gantry-priority", "urgent")]).await;
    assert_eq!(odd.code(), Code::InvalidArgument, "{odd}");
    let asked = ChatRequest { messages: vec![said(Role::Unspecified, "Hi")], ..ChatRequest::default() };
    let status = call::<_, ChatResponse>(&channel, "Chat", with(asked, &key)).await.unwrap_err();
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "messages[0].role");
    // A model of text embeds nothing, and there are no other methods.
    let asked = EmbeddingsRequest { input: vec!["a".to_owned()], ..EmbeddingsRequest::default() };
    let status = call::<_, EmbeddingsResponse>(&channel, "Embeddings", with(asked, &key)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
    let status = call::<_, GenerateResponse>(&channel, "Translate", with(good(), &key)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented, "{status}");
    assert!(status.message().contains("GenerateStream"), "{status}");
    // A stream that does not begin has its status alone.
    let status = stream(&channel, "GenerateStream", with(text("", 1), &key)).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");

    let media = ("content-type", "application/grpc");
    let status_of = |response: &reqwest::Response| response.headers()["grpc-status"].to_str().unwrap().to_owned();
    for (headers, body, status) in [
        (vec![media, key[0]], framed(&good())[..4].to_vec(), "3"),
        (vec![media, key[0]], [framed(&good()), framed(&good())].concat(), "3"),
        (vec![media, key[0], ("grpc-encoding", "gzip")], framed(&good()), "12"),
        (vec![media, key[0], ("grpc-timeout", "soon")], framed(&good()), "3"),
    ] {
        let response = ask_raw(address, "Generate", &headers, body).await;
        assert_eq!((response.status().as_u16(), status_of(&response).as_str()), (200, status), "{headers:?}");
    }
    let json = ask_raw(address, "Generate", &[("content-type", "application/json")], b"{}".to_vec()).await;
    assert_eq!(json.status(), 415);
    assert!(json.text().await.unwrap().contains("application/grpc"));
    let log = server.log();
    assert!(!log.contains("secret"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_ends_with_its_deadline_and_with_its_client_and_frees_what_it_had() {
    let server = Server::start_unending(1, &GRPC).await;
    let (address, channel) = (server.grpc_address().await, channel(&server).await);
    let running = async |count: f64| {
        await_condition("requests to run or not", async || server.metric("gantry_requests_running").await == count)
            .await;
    };
    let deadline = |time: &'static str| vec![("content-type", "application/grpc"), ("grpc-timeout", time)];

    let response = ask_raw(address, "Generate", &deadline("500m"), framed(&unending())).await;
    assert_eq!(response.headers()["grpc-status"], "4", "{:?}", response.headers());
    running(0.0).await;
    // One that has begun to be told is cut, and says so in its trailers.
    let mut events = stream(&channel, "GenerateStream", with(unending(), &[("grpc-timeout", "2S")])).await.unwrap();
    let status = loop {
        match events.message().await {
            Ok(event) => assert!(event.is_some(), "it does not end well"),
            Err(status) => break status,
        }
    };
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    running(0.0).await;

    let mut events = stream(&channel, "GenerateStream", unending()).await.unwrap();
    assert!(events.message().await.unwrap().is_some());
    running(1.0).await;
    // One that waits for it is given up at its own deadline.
    let response = ask_raw(address, "Generate", &deadline("400m"), framed(&text("Hi", 1))).await;
    assert_eq!(response.headers()["grpc-status"], "4", "{:?}", response.headers());
    assert_eq!(server.metric("gantry_requests_running").await, 1.0);
    // While its client looks, it goes on; then it is cancelled, and so is one that is answered whole.
    drop(events);
    running(0.0).await;
    let asking = tokio::spawn({
        let channel = channel.clone();
        async move { call::<_, GenerateResponse>(&channel, "Generate", unending()).await.map(drop) }
    });
    running(1.0).await;
    asking.abort();
    running(0.0).await;
    let left =
        "gantry_requests_total{route=\"generate\",version=\"standalone\",status=\"200\",outcome=\"disconnected\"}";
    assert!(server.metric(left).await >= 4.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_says_when_to_come_again() {
    let server = Server::start_unending(1, &[&["--max-queue", "2"], &GRPC[..]].concat()).await;
    let channel = channel(&server).await;
    let mut taken = tokio::task::JoinSet::new();
    let status = loop {
        taken.spawn({
            let channel = channel.clone();
            async move {
                let mut events = stream(&channel, "GenerateStream", unending()).await?;
                while events.message().await?.is_some() {}
                Ok::<_, Status>(())
            }
        });
        assert!(taken.len() < 20, "the queue is never full");
        if let Ok(Some(ended)) = tokio::time::timeout(Duration::from_millis(200), taken.join_next()).await {
            break ended.unwrap().unwrap_err();
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    let after = status.get_details_retry_info().unwrap().retry_delay.unwrap();
    assert!(after >= Duration::from_secs(1), "{after:?}");
    assert_eq!(status.metadata().get("retry-after").unwrap().to_str().unwrap(), after.as_secs().to_string());
    assert_eq!(status.get_details_error_info().unwrap().reason, "queue_full");
}

async fn health(channel: &Channel, service: &str) -> Result<ServingStatus, Status> {
    let asked = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel.clone()).check(asked).await.map(|told| told.into_inner().status())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_what_readyz_says_and_a_stream_is_told_to_its_end_while_the_server_ends() {
    let args = [&["--ctx-size", "8192", "--parallel", "2", "--api-key", "k"], &GRPC[..]].concat();
    let mut server = Server::start(&args).await;
    let channel = channel(&server).await;
    // Without a key, as probes ask.
    for service in ["", SERVICE] {
        assert_eq!(health(&channel, service).await.unwrap(), ServingStatus::Serving);
    }
    assert_eq!(health(&channel, "another").await.unwrap_err().code(), Code::NotFound);
    let watch = HealthCheckRequest { service: SERVICE.to_owned() };
    let mut changes = HealthClient::new(channel.clone()).watch(watch).await.unwrap().into_inner();
    let told = |change: Option<HealthCheckResponse>| change.map(|change| change.status());
    assert_eq!(told(changes.message().await.unwrap()), Some(ServingStatus::Serving));

    // A worker that stands still decodes no token.
    let worker = server.workers()[0];
    send_signal(worker, "STOP");
    assert_eq!(told(changes.message().await.unwrap()), Some(ServingStatus::NotServing));
    assert_eq!((health(&channel, "").await.unwrap(), server.ready().await.0), (ServingStatus::NotServing, 503));
    send_signal(worker, "CONT");
    assert_eq!(told(changes.message().await.unwrap()), Some(ServingStatus::Serving));

    let key = [("authorization", "Bearer k")];
    let mut events = stream(&channel, "GenerateStream", with(text("0", 1500), &key)).await.unwrap();
    assert!(events.message().await.unwrap().is_some());
    server.signal("TERM");
    assert_eq!(told(changes.message().await.unwrap()), Some(ServingStatus::NotServing));
    assert_eq!(told(changes.message().await.unwrap()), None, "who watches does not hold the end up");
    // Who asks while the port is open is answered, on another connection once this one is told to end.
    let later = to(server.grpc_address().await);
    assert!(call::<_, GenerateResponse>(&later, "Generate", with(text("Hi", 2), &key)).await.is_ok());
    let mut done = None;
    while let Some(event) = events.message().await.unwrap() {
        done = event.event;
    }
    assert!(matches!(done, Some(Event::Done(_))), "{done:?}");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_past_the_drain_timeout_ends_with_an_error_and_its_status() {
    let mut server = Server::start_unending(1, &[&["--drain-timeout", "1"], &GRPC[..]].concat()).await;
    let channel = channel(&server).await;
    let mut events = stream(&channel, "GenerateStream", unending()).await.unwrap();
    assert!(events.message().await.unwrap().is_some());
    server.signal("TERM");
    let mut last = None;
    let status = loop {
        match events.message().await {
            Ok(Some(event)) => last = event.event,
            Ok(None) => panic!("it ended well"),
            Err(status) => break status,
        }
    };
    let Some(Event::Error(error)) = last else { panic!("{last:?}") };
    assert_eq!((error.code.as_str(), status.code()), ("server_ending", Code::Unavailable), "{status}");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test]
async fn reflection_tells_the_services_and_their_messages() {
    let server = Server::start(&[&["--api-key", "k"], &GRPC[..]].concat()).await;
    let mut client = ServerReflectionClient::new(channel(&server).await);
    let ask = |asked| {
        let request = ServerReflectionRequest { message_request: Some(asked), ..ServerReflectionRequest::default() };
        let mut request = Request::new(tokio_stream::iter([request]));
        request.metadata_mut().insert("authorization", "Bearer k".parse().unwrap());
        request
    };
    let list = ask(MessageRequest::ListServices(String::new()));
    let told = client.server_reflection_info(list).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = told.message_response else { panic!("{told:?}") };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    for name in [SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let symbol = ask(MessageRequest::FileContainingSymbol(format!("{SERVICE}.ChatStream")));
    let told = client.server_reflection_info(symbol).await.unwrap().into_inner().message().await.unwrap().unwrap();
    let Some(MessageResponse::FileDescriptorResponse(files)) = told.message_response else { panic!("{told:?}") };
    assert!(files.file_descriptor_proto[0].windows(13).any(|bytes| bytes == b"finish_reason"));

    let mut nobody = ask(MessageRequest::ListServices(String::new()));
    *nobody.metadata_mut() = MetadataMap::new();
    assert_eq!(client.server_reflection_info(nobody).await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn without_the_flag_nothing_listens_and_http_is_not_spoken_on_the_port() {
    let without = Server::start(&["--ctx-size", "512", "--parallel", "1"]).await;
    assert!(!without.log().contains("listening for gRPC"));
    let response = without.post(&format!("/{SERVICE}/Generate"), &json!({})).send().await.unwrap();
    assert_eq!(response.status(), 404, "the port of HTTP has no such address");

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = Server::start(&[&["--ctx-size", "512", "--parallel", "1"], &GRPC[..]].concat()).await;
    let mut stream = TcpStream::connect(server.grpc_address().await).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut read = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut read)).await.expect("it is closed").ok();
    assert!(!Bytes::from(read).starts_with(b"HTTP/1.1 200"));
}
