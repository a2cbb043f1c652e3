//! Prompts of some of the requests that a version has answered, for whoever compares another version by them.
//!
//! A request is drawn when it begins, and its prompt is handed over once it has been answered well. One prompt waits at a time; where it
//! has not been taken by then, the next one is dropped. A prompt is kept by reference from the request's beginning on; no text is copied.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use gantry_engine::Prompt;
use tokio::sync::mpsc;

/// Where a version's requests are drawn from.
#[derive(Default)]
pub struct Samples(ArcSwapOption<Draw>);

struct Draw {
    /// From 0 to 1.
    share: f64,
    prompts: mpsc::Sender<Arc<Prompt>>,
}

impl Samples {
    /// Has this share of the requests that begin from now on drawn, from 0 to 1, until the receiver is dropped or this is called again.
    pub fn take(&self, share: f64) -> mpsc::Receiver<Arc<Prompt>> {
        let (prompts, drawn) = mpsc::channel(1);
        self.0.store(Some(Arc::new(Draw { share, prompts })));
        drawn
    }

    /// Whether a request that begins is one of those.
    #[must_use]
    pub fn draw(&self, prompt: &Arc<Prompt>) -> Option<Drawn> {
        let draw = self.0.load();
        let draw = draw.as_ref().filter(|draw| !draw.prompts.is_closed())?;
        rand::random_bool(draw.share.clamp(0.0, 1.0))
            .then(|| Drawn { prompt: Arc::clone(prompt), prompts: draw.prompts.clone() })
    }
}

/// A request that was drawn.
pub struct Drawn {
    prompt: Arc<Prompt>,
    prompts: mpsc::Sender<Arc<Prompt>>,
}

impl Drawn {
    /// It has been answered.
    pub fn answered(self) {
        // Whoever compares is busy, or gone.
        drop(self.prompts.try_send(self.prompt));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn prompt(text: &str) -> Arc<Prompt> {
        Arc::new(Prompt::Text(text.to_owned()))
    }

    #[test]
    fn nothing_is_drawn_before_and_after_somebody_takes_it_and_one_prompt_waits() {
        let samples = Samples::default();
        assert!(samples.draw(&prompt("before")).is_none());
        let mut drawn = samples.take(1.0);
        for text in ["a", "b"] {
            samples.draw(&prompt(text)).unwrap().answered();
        }
        // One that begins and is never answered.
        assert!(samples.draw(&prompt("c")).is_some());
        assert_eq!(*drawn.try_recv().unwrap(), Prompt::Text("a".to_owned()));
        assert!(drawn.try_recv().is_err());
        let late = samples.draw(&prompt("d")).unwrap();
        drop(drawn);
        late.answered();
        assert!(samples.draw(&prompt("after")).is_none());
    }

    #[test]
    fn as_many_are_drawn_as_are_asked_for() {
        let samples = Samples::default();
        for (share, least, most) in [(0.0, 0, 0), (0.2, 1_600, 2_400), (1.0, 10_000, 10_000)] {
            let _drawn = samples.take(share);
            let count = (0..10_000).filter(|_| samples.draw(&prompt("p")).is_some()).count();
            assert!((least..=most).contains(&count), "{count} of 10,000 for {share}");
        }
    }
}
