//! Which status of gRPC's an error is.

use gantry_core::{ApiError, ErrorCode};

/// A status, as gRPC numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum CallStatus {
    /// What is asked is wrong, and will be again.
    InvalidArgument = 3,
    /// It took longer than it may.
    DeadlineExceeded = 4,
    /// The model is not here.
    NotFound = 5,
    /// As much is asked for as may be, or the message is too large.
    ResourceExhausted = 8,
    /// The model's process dies of the request.
    FailedPrecondition = 9,
    /// The client took too little of its answer.
    Aborted = 10,
    /// There is no such method, or the model does no such work.
    Unimplemented = 12,
    /// A fault of the server's.
    Internal = 13,
    /// It cannot be answered now.
    Unavailable = 14,
    /// No key is shown, or none that is good.
    Unauthenticated = 16,
}

/// The status of an error.
#[must_use]
pub fn status_of(error: &ApiError) -> CallStatus {
    match (&error.code, error.status) {
        (ErrorCode::UnknownUrl | ErrorCode::MethodNotAllowed, _) => CallStatus::Unimplemented,
        (ErrorCode::UnsupportedOperation, _) => CallStatus::Unimplemented,
        (ErrorCode::SlowClient, _) => CallStatus::Aborted,
        (ErrorCode::RequestEndsWorker, _) => CallStatus::FailedPrecondition,
        (_, 401) => CallStatus::Unauthenticated,
        (_, 404) => CallStatus::NotFound,
        (_, 408) => CallStatus::DeadlineExceeded,
        (_, 413 | 429) => CallStatus::ResourceExhausted,
        (_, 501) => CallStatus::Unimplemented,
        (_, 503) => CallStatus::Unavailable,
        (_, 400..=499) => CallStatus::InvalidArgument,
        _ => CallStatus::Internal,
    }
}

#[cfg(test)]
mod tests {
    use gantry_core::ErrorKind;

    use super::*;

    #[test]
    fn each_error_has_its_status() {
        let kind = ErrorKind::InvalidRequestError;
        for (status, code, wanted) in [
            (400, ErrorCode::InvalidValue, CallStatus::InvalidArgument),
            (415, ErrorCode::UnsupportedMediaType, CallStatus::InvalidArgument),
            (401, ErrorCode::InvalidApiKey, CallStatus::Unauthenticated),
            (404, ErrorCode::ModelNotFound, CallStatus::NotFound),
            (404, ErrorCode::UnknownUrl, CallStatus::Unimplemented),
            (405, ErrorCode::MethodNotAllowed, CallStatus::Unimplemented),
            (408, ErrorCode::RequestTimeout, CallStatus::DeadlineExceeded),
            (408, ErrorCode::SlowClient, CallStatus::Aborted),
            (413, ErrorCode::RequestTooLarge, CallStatus::ResourceExhausted),
            (422, ErrorCode::RequestEndsWorker, CallStatus::FailedPrecondition),
            (429, ErrorCode::QueueFull, CallStatus::ResourceExhausted),
            (501, ErrorCode::UnsupportedOperation, CallStatus::Unimplemented),
            (500, ErrorCode::InternalError, CallStatus::Internal),
            (503, ErrorCode::ModelNotReady, CallStatus::Unavailable),
            (503, ErrorCode::ServerEnding, CallStatus::Unavailable),
        ] {
            assert_eq!(status_of(&ApiError::new(status, kind, code.clone(), "")), wanted, "{status} {code:?}");
        }
    }
}
