//! HTTP to a pod, through the API server: nobody has to expose a service to look at it or to talk to it.

use anyhow::{Context as _, Result, anyhow};
use http::{Request, Response, header::HOST};
use http_body_util::BodyExt as _;
use hyper::{
    body::{Body, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};

/// Port on which pods answer requests.
pub const SERVING_PORT: u16 = 8080;
/// Port on which pods tell their metrics.
pub const METRICS_PORT: u16 = 8081;
/// Most bytes of an answer that is read whole.
const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Sends `request` to `port` of the pod, and has the head of its answer.
///
/// # Errors
/// When the API server makes no connection to the pod, or the pod does not answer.
pub async fn send<B>(pods: &Api<Pod>, pod: &str, port: u16, mut request: Request<B>) -> Result<Response<Incoming>>
where
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let refused = || format!("no connection to the pod {pod}: it takes the right to create pods/portforward");
    let mut forwarder = pods.portforward(pod, &[port]).await.with_context(refused)?;
    let stream = forwarder.take_stream(port).ok_or_else(|| anyhow!("no stream to port {port} of {pod}"))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer; the forwarder must live as long.
    tokio::spawn(async move {
        let _ = connection.await;
        drop(forwarder);
    });
    request.headers_mut().insert(HOST, http::HeaderValue::from_static("localhost"));
    sender.send_request(request).await.with_context(|| format!("{pod} does not answer"))
}

/// An answer's body, whole.
///
/// # Errors
/// When it breaks off, or is longer than 8 MiB.
pub async fn whole(answer: Response<Incoming>) -> Result<String> {
    let body = http_body_util::Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
    let bytes = body.collect().await.map_err(|error| anyhow!("the answer broke off: {error}"))?.to_bytes();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The first of the pods, or why there is none.
///
/// # Errors
/// When there is none.
pub fn any(pods: &[Pod], service: &str) -> Result<String> {
    let pod =
        pods.first().ok_or_else(|| anyhow!("no pod of {service} answers: kubectl gantry status {service} says why"))?;
    Ok(pod.name_any())
}
