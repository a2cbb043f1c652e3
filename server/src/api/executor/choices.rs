//! The answers to one request, as they come: one generation for each, all of the same version.
//!
//! Dropping them cancels every one that has not ended. Absent: any order between them; whoever has news is heard, and
//! none is heard twice while another one has news.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures::{Stream, StreamExt};
use gantry_core::{Answer, AnswerOutput, GenerationEvent, ShownPrompt, Usage};

use crate::output::{Collected, TooMuch, collected_of, told_of};
use crate::version::{Generation, GenerationError};

/// What a generation says.
pub(super) type Item = Result<GenerationEvent, GenerationError>;

/// See the module.
pub(super) struct Choices<G = Generation> {
    /// `None` once ended.
    running: Vec<Option<G>>,
    /// Who is asked first.
    next: usize,
    /// Where of all answers to a prompt the first alone tells it.
    shared: Option<SharedPrompts>,
}

/// What the first answer to each prompt tells of it, for the others. These are not heard before that.
struct SharedPrompts {
    /// How many answers there are to each.
    of_each_prompt: usize,
    /// Of each prompt, whether all of it was told.
    is_told: Vec<bool>,
    /// What the others are told yet.
    left: VecDeque<(usize, GenerationEvent)>,
}

impl SharedPrompts {
    fn is_due(&self, index: usize) -> bool {
        index.is_multiple_of(self.of_each_prompt)
            || self.is_told.get(index / self.of_each_prompt).is_none_or(|is_told| *is_told)
    }

    fn heard(&mut self, index: usize, item: &Item) {
        if !index.is_multiple_of(self.of_each_prompt) {
            return;
        }
        match item {
            Ok(GenerationEvent::Started { .. }) => {}
            Ok(echo @ GenerationEvent::Echo { .. }) => {
                self.left.extend((1..self.of_each_prompt).map(|other| (index + other, echo.clone())));
            }
            _ => {
                if let Some(is_told) = self.is_told.get_mut(index / self.of_each_prompt) {
                    *is_told = true;
                }
            }
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Gathered {
    pub(super) answer: Answer,
    /// When it was whole.
    pub(super) at: Instant,
}

/// Why there are no whole answers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Uncollected {
    /// One of them failed.
    Failed(GenerationError),
    /// They come to more than may be held for one request.
    TooMuch(TooMuch),
}

impl From<GenerationError> for Uncollected {
    fn from(error: GenerationError) -> Self {
        Self::Failed(error)
    }
}

impl<G: Stream<Item = Item> + Unpin> Choices<G> {
    pub(super) fn new(generations: Vec<G>) -> Self {
        Self { running: generations.into_iter().map(Some).collect(), next: 0, shared: None }
    }

    /// So many answers to each prompt, of which the first alone was asked to tell it.
    pub(super) fn sharing_prompts(generations: Vec<G>, of_each_prompt: usize) -> Self {
        let of_each_prompt = of_each_prompt.max(1);
        let is_told = vec![false; generations.len().div_ceil(of_each_prompt)];
        let shared = Some(SharedPrompts { of_each_prompt, is_told, left: VecDeque::new() });
        Self { shared, ..Self::new(generations) }
    }

    /// How many there are, those that have ended included.
    pub(super) fn total(&self) -> usize {
        self.running.len()
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// The first one that fails, or they come to more than may be collected; the others are cancelled.
    pub(super) async fn collect_all(mut self, collected: &mut Collected) -> Result<Vec<Gathered>, Uncollected> {
        let mut outputs = vec![AnswerOutput::default(); self.total()];
        let mut whole: Vec<Option<Gathered>> = vec![None; self.total()];
        while let Some((index, item)) = self.next().await {
            let (Some(output), Some(slot)) = (outputs.get_mut(index), whole.get_mut(index)) else { continue };
            match item? {
                GenerationEvent::Finished { reason, stop, usage, timings } => {
                    let output = std::mem::take(output);
                    let answer = Answer { output, reason, stop, usage, timings };
                    *slot = Some(Gathered { answer, at: Instant::now() });
                }
                GenerationEvent::Failed(error) => return Err(Uncollected::Failed(error.into())),
                // Its worker died, and another one begins anew. What was collected stays counted: it is twice what is held.
                started @ GenerationEvent::Started { .. } => {
                    *output = AnswerOutput::default();
                    output.push(started);
                }
                event => {
                    collected.grow(collected_of(&event)).map_err(Uncollected::TooMuch)?;
                    output.push(event);
                }
            }
        }
        whole.into_iter().collect::<Option<_>>().ok_or_else(|| ended_early().into())
    }
}

impl<G: Stream<Item = Item> + Unpin> Choices<G> {
    /// Waits for what a prompt is, of which nothing else was asked.
    ///
    /// # Errors
    /// As [`Self::collect_all`].
    pub(super) async fn prompt(mut self, collected: &mut Collected) -> Result<ShownPrompt, Uncollected> {
        let mut told = None;
        while let Some((_, item)) = self.next().await {
            match item? {
                GenerationEvent::Prompt(shown) => {
                    collected.grow(told_of(&shown)).map_err(Uncollected::TooMuch)?;
                    told = Some(shown);
                }
                GenerationEvent::Failed(error) => return Err(Uncollected::Failed(error.into())),
                _ => {}
            }
        }
        told.ok_or_else(|| ended_early().into())
    }
}

impl<G: Stream<Item = Item> + Unpin> Stream for Choices<G> {
    type Item = (usize, Item);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let count = self.running.len();
        if let Some((index, event)) = self.shared.as_mut().and_then(|shared| shared.left.pop_front()) {
            return Poll::Ready(Some((index, Ok(event))));
        }
        let mut open = false;
        for turn in 0..count {
            let index = (self.next + turn) % count;
            if self.shared.as_ref().is_some_and(|shared| !shared.is_due(index)) {
                continue;
            }
            let Some(generation) = self.running[index].as_mut() else { continue };
            open = true;
            let Poll::Ready(item) = generation.poll_next_unpin(context) else { continue };
            let item = item.unwrap_or_else(|| Err(ended_early()));
            if !matches!(&item, Ok(event) if !event.is_terminal()) {
                self.running[index] = None;
            }
            if let Some(shared) = &mut self.shared {
                shared.heard(index, &item);
            }
            self.next = index + 1;
            return Poll::Ready(Some((index, item)));
        }
        if open { Poll::Pending } else { Poll::Ready(None) }
    }
}

impl Choices {
    /// The client is told by which version it is answered. False: that has given the request back already.
    pub(super) fn stay(&self, returns: bool) -> bool {
        match self.running.as_slice() {
            [Some(only)] if returns => only.stays(),
            _ => true,
        }
    }
}

fn ended_early() -> GenerationError {
    GenerationError::WorkerDied("its supervisor ended".to_owned())
}

/// The tokens of all answers, of which so many belong to each prompt: those of a prompt once, of which cached are those that
/// were so for all of its answers.
pub(super) fn sum_of(usages: &[Usage], of_each_prompt: usize) -> Usage {
    let of_prompt = |usages: &[Usage]| {
        usages.iter().copied().reduce(|sum, usage| Usage {
            prompt_tokens: sum.prompt_tokens.max(usage.prompt_tokens),
            completion_tokens: sum.completion_tokens.saturating_add(usage.completion_tokens),
            cached_tokens: sum.cached_tokens.min(usage.cached_tokens),
            reasoning_tokens: sum.reasoning_tokens.saturating_add(usage.reasoning_tokens),
        })
    };
    usages.chunks(of_each_prompt.max(1)).filter_map(of_prompt).fold(Usage::default(), |sum, usage| Usage {
        prompt_tokens: sum.prompt_tokens.saturating_add(usage.prompt_tokens),
        completion_tokens: sum.completion_tokens.saturating_add(usage.completion_tokens),
        cached_tokens: sum.cached_tokens.saturating_add(usage.cached_tokens),
        reasoning_tokens: sum.reasoning_tokens.saturating_add(usage.reasoning_tokens),
    })
}

/// Tells all answers to each prompt, of which there are so many, how likely its tokens are, which only the first was asked.
pub(super) fn share_prompt_tokens(answers: &mut [Answer], of_each_prompt: usize) {
    for of_prompt in answers.chunks_mut(of_each_prompt.max(1)) {
        let Some((first, others)) = of_prompt.split_first_mut() else { continue };
        for other in others {
            other.output.prompt_tokens = Arc::clone(&first.output.prompt_tokens);
        }
    }
}

/// The best answers to each prompt, of which there are so many: those whose tokens are likeliest in the mean, the best first.
pub(super) fn best_of_each(mut answers: Vec<Answer>, of_each_prompt: usize, told: usize) -> Vec<Answer> {
    if told >= of_each_prompt {
        return answers;
    }
    for of_prompt in answers.chunks_mut(of_each_prompt) {
        of_prompt.sort_by(|one, other| mean_logprob(other).total_cmp(&mean_logprob(one)));
    }
    let mut places = (0..of_each_prompt).cycle();
    answers.retain(|_| places.next().is_some_and(|place| place < told));
    answers
}

/// How likely an answer's tokens are, in the mean; one without any is certain.
fn mean_logprob(answer: &Answer) -> f64 {
    let logprobs = &answer.output.logprobs;
    let sum: f64 = logprobs.iter().map(|token| f64::from(token.token.logprob)).sum();
    sum / logprobs.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::limits::OUTPUT_BUDGET_BYTES;
    use crate::output::Output;
    use futures::stream::BoxStream;
    use gantry_core::{FinishReason, RequestError, Timings, TokenChance, TokenLogprob};
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    #[test]
    fn of_each_prompt_the_likeliest_answers_are_told() {
        let answer = |text: &str, logprobs: &[f32]| {
            let chance = |&logprob: &f32| TokenChance { id: 1, bytes: Vec::new(), logprob };
            let logprobs = logprobs.iter().map(|own| TokenLogprob { token: chance(own), top: Vec::new() }).collect();
            let output = AnswerOutput { text: text.to_owned(), logprobs, ..AnswerOutput::default() };
            let (usage, timings) = (Usage::default(), Timings::default());
            Answer { output, reason: FinishReason::Stop, stop: None, usage, timings }
        };
        let answers = || {
            let one = [answer("a", &[-3.0]), answer("b", &[-1.0, -2.0, -1.5]), answer("c", &[-0.5, -4.0])];
            let other = [answer("x", &[-1.0]), answer("y", &[-2.0]), answer("z", &[-0.1, f32::NEG_INFINITY])];
            one.into_iter().chain(other).collect::<Vec<_>>()
        };
        let told = |told| -> String { best_of_each(answers(), 3, told).into_iter().map(|a| a.output.text).collect() };
        assert_eq!([told(1), told(2), told(3)], ["bx", "bcxy", "abcxyz"]);
    }

    fn delta(text: &str) -> Item {
        Ok(GenerationEvent::Text { text: text.to_owned(), tokens: 1, logprobs: Vec::new() })
    }

    fn finished(completion_tokens: u32, cached_tokens: u32) -> Item {
        let usage = Usage { prompt_tokens: 7, completion_tokens, cached_tokens, reasoning_tokens: 1 };
        Ok(GenerationEvent::Finished { reason: FinishReason::Stop, stop: None, usage, timings: Timings::default() })
    }

    fn scripted(items: Vec<Item>) -> BoxStream<'static, Item> {
        futures::stream::iter(items).boxed()
    }

    #[tokio::test]
    async fn all_are_heard_in_turn() {
        let one = scripted(vec![delta("a"), delta("b"), delta("c"), finished(3, 0)]);
        let other = scripted(vec![delta("x"), finished(1, 5)]);
        let order: Vec<usize> = Choices::new(vec![one, other]).map(|(index, _)| index).collect().await;
        assert_eq!(order, [0, 1, 0, 1, 0, 0]);
    }

    #[tokio::test]
    async fn what_the_first_answer_tells_of_its_prompt_all_of_them_are_told_before_their_own() {
        let started = || Ok(GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 });
        let echo = |text: &str| Ok(GenerationEvent::Echo { text: text.to_owned(), tokens: Vec::new() });
        let follower = |text: &str| scripted(vec![started(), delta(text), finished(1, 0)]);
        let answers = vec![
            scripted(vec![started(), echo("p"), echo("q"), delta("a"), finished(1, 0)]),
            follower("b"),
            scripted(vec![started(), finished(0, 0)]),
            follower("y"),
        ];
        let mut told = vec![String::new(); 4];
        let mut events = Choices::sharing_prompts(answers, 2);
        while let Some((index, item)) = events.next().await {
            match item.unwrap() {
                GenerationEvent::Echo { text, .. } | GenerationEvent::Text { text, .. } => told[index] += &text,
                GenerationEvent::Finished { .. } => told[index] += ".",
                _ => {}
            }
        }
        assert_eq!(told, ["pqa.", "pqb.", ".", "y."]);
    }

    #[tokio::test]
    async fn answers_are_gathered_each_for_itself() {
        let one = scripted(vec![delta("a"), delta("b"), finished(3, 0)]);
        let other = scripted(vec![delta("x"), finished(1, 5)]);
        let whole = Choices::new(vec![one, other])
            .collect_all(&mut Collected::new(&Output::new(OUTPUT_BUDGET_BYTES)))
            .await
            .unwrap();
        assert_eq!((whole[0].answer.output.text.as_str(), whole[1].answer.output.text.as_str()), ("ab", "x"));
        let usages: Vec<Usage> = whole.iter().map(|choice| choice.answer.usage).collect();
        let usage = sum_of(&usages, usages.len());
        assert_eq!(usage, Usage { prompt_tokens: 7, completion_tokens: 4, cached_tokens: 0, reasoning_tokens: 2 });
    }

    #[test]
    fn the_tokens_of_several_prompts_add_up_and_those_of_one_count_once() {
        let each = Usage { completion_tokens: 1, ..Usage::default() };
        let usage = |prompt_tokens, cached_tokens| Usage { prompt_tokens, cached_tokens, ..each };
        let two_each = [usage(5, 5), usage(5, 2), usage(7, 0), usage(7, 6)];
        let all = Usage { completion_tokens: 4, ..Usage::default() };
        let sum = |prompt_tokens, cached_tokens| Usage { prompt_tokens, cached_tokens, ..all };
        assert_eq!(sum_of(&two_each, 2), sum(12, 2));
        assert_eq!(sum_of(&two_each, 1), sum(24, 13));
        assert_eq!(sum_of(&[], 1), Usage::default());
    }

    #[tokio::test]
    async fn one_that_fails_fails_all_and_the_others_are_dropped() {
        let (sender, receiver) = mpsc::channel(1);
        let failing = scripted(vec![Err(RequestError::ShuttingDown.into())]);
        let choices = Choices::new(vec![ReceiverStream::new(receiver).boxed(), failing]);
        let failed = choices.collect_all(&mut Collected::new(&Output::new(OUTPUT_BUDGET_BYTES))).await.unwrap_err();
        assert_eq!(failed, Uncollected::Failed(RequestError::ShuttingDown.into()));
        assert!(sender.is_closed(), "nobody waits for the other one any more");
    }

    #[tokio::test]
    async fn more_than_may_be_collected_fails_and_nothing_of_it_is_held() {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let endless = futures::stream::repeat_with(|| delta(&"x".repeat(1 << 20))).boxed();
        let mut collected = Collected::new(&output);
        let failed =
            Choices::new(vec![scripted(vec![delta("a"), finished(1, 0)]), endless]).collect_all(&mut collected).await;
        assert_eq!(failed, Err(Uncollected::TooMuch(TooMuch::Own)));
        drop(collected);
        assert_eq!(output.held_bytes(), 0);
    }

    #[tokio::test]
    async fn an_end_without_a_last_event_is_a_failure() {
        let choices = Choices::new(vec![scripted(vec![delta("a"), finished(1, 0)]), scripted(vec![delta("x")])]);
        let ended = choices.collect_all(&mut Collected::new(&Output::new(OUTPUT_BUDGET_BYTES))).await;
        assert!(matches!(ended, Err(Uncollected::Failed(GenerationError::WorkerDied(_)))));
    }
}
