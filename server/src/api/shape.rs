//! Errors in the shape of the protocol whose client asks: what is not `OpenAI`'s is written anew once it is known.

use axum::body::Body;
use axum::extract::{MatchedPath, Request};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;

use super::errors::Told;
use super::middleware::RequestIdentity;
use super::routes::{self, Protocol};
use super::{anthropic, generate};

/// Has an answer be one of the protocol that its address belongs to.
pub(super) async fn shape(request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>();
    let protocol = match matched {
        None if anthropic::is_below(request.uri().path()) => Protocol::Anthropic,
        matched => routes::protocol_of(matched),
    };
    let id = request.extensions().get::<RequestIdentity>().cloned();
    let mut response = next.run(request).await;
    let told = response.extensions().get::<Told>().cloned().map(|Told(error)| error);
    match protocol {
        Protocol::OpenAi => {}
        Protocol::Anthropic => anthropic::shape(&mut response, told.as_ref(), id.as_ref()),
        Protocol::Generate => generate::shape(&mut response, told.as_ref()),
        // Which does it around the counting, since all its answers are 200.
        Protocol::Grpc => {}
    }
    response
}

/// Gives an answer another body.
pub(super) fn set_body(response: &mut Response, body: String) {
    response.headers_mut().remove(header::CONTENT_LENGTH);
    *response.body_mut() = Body::from(body);
}
