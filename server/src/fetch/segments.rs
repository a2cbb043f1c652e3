//! A large file over several connections at once: each brings a segment, and the segments are taken in their order.
//!
//! Many servers give a connection less than the network has room for. The segments come into memory, a few at a time, and go to the
//! disk one after the other, so that what is there is always a beginning of the file, hashed as it comes, and is continued as after one
//! connection. It takes a server that answers ranges and calls the file by one strong entity tag; with whatever else one answers, the
//! rest comes over one connection. Absent: tries, which are the caller's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream;
use reqwest::header::{ACCEPT_ENCODING, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode, Url};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::asked::Asked;
use super::error::FetchError;
use super::http::{self, Answer, Auth, Target};
use super::limits::{FETCH_CHUNK_BYTES, FETCH_CONNECTIONS, FETCH_SEGMENT_BYTES, SEGMENTED_MIN_BYTES};
use super::partial::Validator;
use super::source::Token;

/// What each request for a segment needs.
struct Origin {
    client: Client,
    /// Where the first answer came from in the end: it need not be redirected each time.
    url: Url,
    token: Option<Token>,
    asked: Asked,
    address: String,
    validator: Validator,
    /// Bytes that have come over any of the connections.
    arrived: Arc<AtomicU64>,
}

/// Why a segment did not come.
struct Failed {
    error: FetchError,
    /// Whether the server has answered otherwise than over one connection: it is not good for several.
    refused: bool,
}

impl From<FetchError> for Failed {
    fn from(error: FetchError) -> Self {
        Self { error, refused: false }
    }
}

/// The segments after the first one, in their order.
pub(super) struct Segments {
    coming: mpsc::Receiver<Result<Bytes, Failed>>,
    arrived: Arc<AtomicU64>,
    _fetching: AbortOnDropHandle<()>,
}

/// What an answer brings, however many connections that takes.
pub(super) struct Body<'a> {
    /// The first answer, of which so many bytes are taken.
    first: Option<(Response, u64)>,
    segments: Option<Segments>,
    /// What is left of the segment that came last.
    segment: Bytes,
    target: Target<'a>,
    refused: &'a AtomicBool,
}

impl<'a> Body<'a> {
    /// Over one connection.
    pub(super) fn of_one(target: Target<'a>, response: Response, refused: &'a AtomicBool) -> Self {
        Self { first: Some((response, u64::MAX)), segments: None, segment: Bytes::new(), target, refused }
    }

    /// Over several, the first of which has answered from `start` on. `refused` is set where the server is not good for them.
    pub(super) fn of_several(
        target: Target<'a>,
        response: Response,
        (start, total, validator): (u64, u64, &Validator),
        refused: &'a AtomicBool,
    ) -> Self {
        let segments = Segments::of(target, &response, validator, start + FETCH_SEGMENT_BYTES, total);
        let first = Some((response, FETCH_SEGMENT_BYTES));
        Self { first, segments: Some(segments), segment: Bytes::new(), target, refused }
    }

    /// Counts what comes into memory before it is given out.
    pub(super) fn arrived(&self) -> Arc<AtomicU64> {
        self.segments.as_ref().map(|segments| Arc::clone(&segments.arrived)).unwrap_or_default()
    }

    /// The next bytes; `None` at the end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, FetchError> {
        if let Some((response, left)) = &mut self.first {
            let failed = |error| http::failure(self.target.asked.by, self.target.address, &error);
            let Some(mut chunk) = response.chunk().await.map_err(failed)? else { return Ok(None) };
            chunk.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
            *left -= chunk.len() as u64;
            if *left == 0 {
                self.first = None;
            }
            return Ok(Some(chunk));
        }
        let Some(segments) = &mut self.segments else { return Ok(None) };
        if self.segment.is_empty() {
            self.segment = match segments.coming.recv().await {
                None => return Ok(None),
                Some(Ok(segment)) => segment,
                Some(Err(Failed { error, refused })) => {
                    self.refused.fetch_or(refused, Ordering::Relaxed);
                    return Err(error);
                }
            };
        }
        // As much at a time as one connection brings: so many wait to be written, however slow the disk is.
        Ok(Some(self.segment.split_to(self.segment.len().min(FETCH_CHUNK_BYTES))))
    }
}

/// Whether the rest of a file is worth several connections, and its server is good for them.
pub(super) fn is_worthwhile(target: Target<'_>, response: &Response, answer: &Answer) -> bool {
    // What else the first request was let in by, a segment's does not have.
    let has_other_credentials = matches!(target.auth, Auth::Registry(_)) || target.url.password().is_some();
    if has_other_credentials && http::is_same_origin(response.url(), target.url) {
        return false;
    }
    let Answer::Body { start, total: Some(total), validator } = answer else { return false };
    let accepts = response.headers().get(reqwest::header::ACCEPT_RANGES).is_some_and(|accepts| accepts == "bytes");
    let serves_ranges = response.status() == StatusCode::PARTIAL_CONTENT || accepts;
    serves_ranges && validator.etag.is_some() && total.saturating_sub(*start) >= SEGMENTED_MIN_BYTES
}

impl Segments {
    /// Begins to fetch what is from `start` on.
    fn of(target: Target<'_>, response: &Response, validator: &Validator, start: u64, total: u64) -> Self {
        let url = response.url().clone();
        let token = match target.auth {
            Auth::Bearer(token) if http::is_same_origin(&url, target.url) => Some(token.clone()),
            _ => None,
        };
        let arrived = Arc::new(AtomicU64::new(0));
        let origin = Arc::new(Origin {
            client: target.several.clone(),
            url,
            token,
            asked: target.asked,
            address: target.address.to_owned(),
            validator: validator.clone(),
            arrived: Arc::clone(&arrived),
        });
        let (sender, coming) = mpsc::channel(1);
        let fetching = tokio::spawn(async move {
            let firsts = stream::iter(segments(start, total));
            let fetched = firsts.map(|(first, last)| origin.segment(first, last));
            // One connection is that of the first answer.
            let mut fetched = std::pin::pin!(fetched.buffered(FETCH_CONNECTIONS - 1));
            while let Some(segment) = fetched.next().await {
                let failed = segment.is_err();
                if sender.send(segment).await.is_err() || failed {
                    return;
                }
            }
        });
        Self { coming, arrived, _fetching: AbortOnDropHandle::new(fetching) }
    }
}

/// First and last byte of each segment from `start` on.
fn segments(start: u64, total: u64) -> impl Iterator<Item = (u64, u64)> {
    let firsts = std::iter::successors(Some(start), |first| first.checked_add(FETCH_SEGMENT_BYTES));
    let firsts = firsts.take_while(move |first| *first < total);
    firsts.map(move |first| (first, first.saturating_add(FETCH_SEGMENT_BYTES).min(total) - 1))
}

impl Origin {
    async fn segment(self: &Arc<Self>, first: u64, last: u64) -> Result<Bytes, Failed> {
        let request = self.client.get(self.url.clone()).header(ACCEPT_ENCODING, "identity");
        let request = request.header(RANGE, format!("bytes={first}-{last}"));
        let request = self.validator.if_range().into_iter().fold(request, |request, tag| request.header(IF_RANGE, tag));
        let request = self.token.iter().fold(request, |request, token| request.bearer_auth(token.reveal()));
        let failed = |error| http::failure(self.asked.by, &self.address, &error);
        let mut response = request.send().await.map_err(failed)?;
        match http::judge((self.asked, &self.address), response.status(), response.headers(), first, &self.validator) {
            Answer::Body { start, ref validator, .. } if start == first && validator.etag == self.validator.etag => {}
            // Whatever it is, it may be otherwise over one connection: an address that has expired, too many at once.
            Answer::Refused(error) if error.is_temporary() => return Err(Failed { error, refused: true }),
            Answer::Refused(error) => {
                return Err(Failed { error: FetchError::temporary(error.to_string()), refused: true });
            }
            _ => {
                let error = FetchError::temporary(format!("the file at {} has changed", self.address));
                return Err(Failed { error, refused: true });
            }
        }
        let wanted = usize::try_from(last - first + 1).unwrap_or(usize::MAX);
        let mut segment = BytesMut::with_capacity(wanted);
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            segment.extend_from_slice(&chunk);
            self.arrived.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            if segment.len() > wanted {
                break;
            }
        }
        if segment.len() != wanted {
            let (came, address) = (segment.len(), &self.address);
            let reason = format!("{address} answers {wanted} bytes from {first} on with {came}");
            return Err(FetchError::temporary(reason).into());
        }
        Ok(segment.freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_all_bytes_once_and_in_order() {
        let size = FETCH_SEGMENT_BYTES;
        for (start, total) in [(0, 1), (0, size), (5, size + 5), (7, 3 * size), (size, size), (9, 9)] {
            let mut next = start;
            for (first, last) in segments(start, total) {
                assert!(first == next && last >= first && last - first < size, "{start} {total}");
                next = last + 1;
            }
            assert_eq!(next, total.max(start));
        }
    }
}
