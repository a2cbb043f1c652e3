//! Requests for pooled work (embeddings, scoring) gathered into batches: these run to their end in one go, so, unlike
//! generation, they gain by waiting a moment for company.
//!
//! Flow: [`BatchWindow::push`] gives a full batch at once; otherwise [`BatchWindow::poll`] gives what came within
//! `batch_timeout` of the first, at [`BatchWindow::deadline`]. A batch holds exactly the requests of its window, in
//! their order, and [`Batch::answer`] gives each exactly one result.
//!
//! llama.cpp computes sequences of different lengths in one batch without padding. Lengths are kept all the same: they
//! say what a backend that pads would waste ([`Batch::padding_ratio`]). Absent: clocks and threads, and a limit on a
//! batch's tokens ([`crate::pooler`] closes the window before one that does not fit).

use std::time::{Duration, Instant};

/// A request in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchedRequest<T> {
    /// Its tokens.
    pub(crate) original_length: u32,
    /// What it would be with padding: the length of the longest in its batch.
    pub(crate) padded_length: u32,
    pub(crate) value: T,
}

/// Requests to run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch<T> {
    pub(crate) requests: Vec<BatchedRequest<T>>,
    /// When the first of them came.
    pub(crate) opened_at: Instant,
}

impl<T> Batch<T> {
    fn new(waiting: Vec<(T, u32)>, opened_at: Instant) -> Self {
        let padded_length = waiting.iter().map(|&(_, length)| length).max().unwrap_or(0);
        let requests = waiting
            .into_iter()
            .map(|(value, original_length)| BatchedRequest { original_length, padded_length, value })
            .collect();
        Self { requests, opened_at }
    }

    /// Tokens of all requests.
    pub(crate) fn original_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.original_length)).sum()
    }

    /// Tokens of all requests with padding.
    pub(crate) fn padded_tokens(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.padded_length)).sum()
    }

    /// The part of a padded batch that is padding, from 0 to below 1.
    pub(crate) fn padding_ratio(&self) -> f64 {
        match self.padded_tokens() {
            0 => 0.0,
            padded => (padded - self.original_tokens()) as f64 / padded as f64,
        }
    }

    /// Each request with its result. One that the worker gave none for gets `missing`; results beyond the requests are
    /// dropped.
    pub(crate) fn answer<R>(self, results: Vec<R>, missing: impl FnMut() -> R) -> Vec<(T, R)> {
        let results = results.into_iter().chain(std::iter::repeat_with(missing));
        self.requests.into_iter().map(|request| request.value).zip(results).collect()
    }
}

/// The batch that is being gathered.
#[derive(Debug)]
pub(crate) struct BatchWindow<T> {
    max_batch_size: usize,
    batch_timeout: Duration,
    waiting: Vec<(T, u32)>,
    /// When the first of those waiting came.
    opened_at: Option<Instant>,
}

impl<T> BatchWindow<T> {
    /// Batches of up to `max_batch_size` requests, at least one.
    pub(crate) fn new(max_batch_size: usize, batch_timeout: Duration) -> Self {
        Self { max_batch_size: max_batch_size.max(1), batch_timeout, waiting: Vec::new(), opened_at: None }
    }

    /// From the next request on a batch is full with `max_batch_size`, at least one; those that wait already go together.
    pub(crate) fn limit(&mut self, max_batch_size: usize) {
        self.max_batch_size = max_batch_size.max(1);
    }

    /// Takes a request of so many tokens; gives the batch that it fills. [`poll`](Self::poll) first, or a window that
    /// is over stays open for it.
    pub(crate) fn push(&mut self, value: T, length: u32, now: Instant) -> Option<Batch<T>> {
        self.opened_at.get_or_insert(now);
        self.waiting.push((value, length));
        if self.waiting.len() >= self.max_batch_size { self.flush() } else { None }
    }

    /// The batch whose window is over.
    pub(crate) fn poll(&mut self, now: Instant) -> Option<Batch<T>> {
        if self.deadline()? <= now { self.flush() } else { None }
    }

    /// When the window is over; `None`: none is open.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        // A time-out that no clock reaches: only a full batch leaves.
        self.opened_at?.checked_add(self.batch_timeout)
    }

    /// What waits, before its time, as at shutdown.
    pub(crate) fn flush(&mut self) -> Option<Batch<T>> {
        let opened_at = self.opened_at.take()?;
        Some(Batch::new(std::mem::take(&mut self.waiting), opened_at))
    }

    /// Takes out what is no longer wanted; gives it.
    pub(crate) fn remove_if(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<T> {
        let removed = self.waiting.extract_if(.., |(value, _)| gone(value)).map(|(value, _)| value).collect();
        if self.waiting.is_empty() {
            self.opened_at = None;
        }
        removed
    }

    /// Tokens of those that wait.
    pub(crate) fn tokens(&self) -> usize {
        self.waiting.iter().map(|&(_, length)| length as usize).sum()
    }

    /// Whether none waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Requests that wait.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const WINDOW: Duration = Duration::from_millis(10);

    fn ids(batch: &Batch<usize>) -> Vec<usize> {
        batch.requests.iter().map(|request| request.value).collect()
    }

    #[test]
    fn a_window_opens_with_its_first_request_and_closes_when_full_or_over() {
        let start = Instant::now();
        let mut window = BatchWindow::new(3, WINDOW);
        assert_eq!((window.deadline(), window.poll(start)), (None, None));
        assert_eq!(window.push(0, 4, start), None);
        assert_eq!(window.deadline(), Some(start + WINDOW));
        assert_eq!(window.push(1, 2, start + WINDOW / 2), None);
        assert_eq!(window.poll(start + WINDOW - Duration::from_nanos(1)), None);
        let batch = window.poll(start + WINDOW).unwrap();
        assert_eq!((ids(&batch), batch.opened_at), (vec![0, 1], start));
        assert_eq!((batch.original_tokens(), batch.padded_tokens(), batch.padding_ratio()), (6, 8, 0.25));
        let filled = (2..5).find_map(|id| window.push(id, 1, start + WINDOW)).unwrap();
        assert_eq!((ids(&filled), window.len(), window.deadline()), (vec![2, 3, 4], 0, None));
    }

    #[test]
    fn what_is_cancelled_leaves_and_an_empty_window_is_closed() {
        let now = Instant::now();
        let mut window = BatchWindow::new(8, WINDOW);
        window.push(0, 1, now);
        window.push(1, 1, now);
        assert_eq!(window.remove_if(|&id| id == 0), [0]);
        assert_eq!((window.len(), window.deadline()), (1, Some(now + WINDOW)));
        assert_eq!(window.remove_if(|_| true), [1]);
        assert_eq!((window.deadline(), window.flush()), (None, None));
    }

    #[test]
    fn a_batch_of_nothing_pads_nothing() {
        let mut window = BatchWindow::new(0, Duration::MAX);
        let batch = window.push(7, 0, Instant::now()).unwrap();
        assert_eq!((batch.padding_ratio(), batch.requests.len()), (0.0, 1));
    }

    proptest! {
        /// **Feature: distributed-inference-server, Property 4: Batch Formation Within Window**
        /// **Validates: Requirements 2.1, 2.2**
        #[test]
        fn those_that_come_within_the_window_are_one_batch(
            max in 1_usize..40, arrivals in proptest::collection::vec(0_u64..10_000, 1..40),
        ) {
            let start = Instant::now();
            let mut window = BatchWindow::new(max, WINDOW);
            let mut offsets: Vec<u64> = arrivals.into_iter().take(max).collect();
            offsets.sort_unstable();
            let first = start + Duration::from_micros(offsets[0]);
            let mut batches = Vec::new();
            for (id, micros) in offsets.iter().enumerate() {
                let now = start + Duration::from_micros(*micros);
                batches.extend(window.poll(now));
                batches.extend(window.push(id, 1, now));
            }
            batches.extend(window.poll(first + WINDOW));
            prop_assert_eq!(batches.len(), 1);
            prop_assert_eq!(ids(&batches[0]), (0..offsets.len()).collect::<Vec<_>>());
            prop_assert_eq!(window.len(), 0);
        }

        /// Any arrivals: every request is in exactly one batch, in order, none too large, none late.
        #[test]
        fn no_request_is_lost_or_late(
            max in 1_usize..10, waits in proptest::collection::vec(0_u64..15_000, 0..100),
        ) {
            let mut now = Instant::now();
            let mut window = BatchWindow::new(max, WINDOW);
            let mut seen = Vec::new();
            for (id, wait) in waits.iter().enumerate() {
                now += Duration::from_micros(*wait);
                // The owner wakes at the deadline.
                let due = window.deadline().filter(|&at| at <= now).and_then(|at| window.poll(at));
                for batch in due.into_iter().chain(window.push(id, 1, now)) {
                    prop_assert!(!batch.requests.is_empty() && batch.requests.len() <= max);
                    seen.extend(ids(&batch));
                }
                prop_assert!(window.len() < max && window.deadline().is_none_or(|at| at > now));
            }
            seen.extend(window.flush().iter().flat_map(ids));
            prop_assert_eq!(seen, (0..waits.len()).collect::<Vec<_>>());
        }

        /// **Feature: distributed-inference-server, Property 5: Batch Padding Correctness**
        /// **Validates: Requirements 2.3**
        #[test]
        fn all_are_padded_to_the_longest_and_keep_their_own_length(
            lengths in proptest::collection::vec(0_u32..100_000, 1..60),
        ) {
            let now = Instant::now();
            let mut window = BatchWindow::new(lengths.len(), WINDOW);
            let batch = lengths.iter().enumerate().find_map(|(id, &length)| window.push(id, length, now)).unwrap();
            let longest = *lengths.iter().max().unwrap();
            for (request, &length) in batch.requests.iter().zip(&lengths) {
                prop_assert_eq!((request.original_length, request.padded_length), (length, longest));
            }
            let padding: u64 = lengths.iter().map(|&length| u64::from(longest - length)).sum();
            prop_assert_eq!(batch.padded_tokens() - batch.original_tokens(), padding);
            prop_assert!((0.0..1.0).contains(&batch.padding_ratio()));
        }

        /// **Feature: distributed-inference-server, Property 21: Batch Inference Completion**
        /// **Validates: Requirements 7.3**
        #[test]
        fn each_request_has_exactly_one_result(requests in 1_usize..50, results in 0_usize..60) {
            let now = Instant::now();
            let mut window = BatchWindow::new(requests, WINDOW);
            let batch = (0..requests).find_map(|id| window.push(id, 1, now)).unwrap();
            let answers = batch.answer((0..results).map(Ok).collect(), || Err("the worker gave no result"));
            prop_assert_eq!(answers.len(), requests);
            for (id, (request, result)) in answers.into_iter().enumerate() {
                prop_assert_eq!(request, id);
                prop_assert_eq!(result, if id < results { Ok(id) } else { Err("the worker gave no result") });
            }
        }
    }
}
