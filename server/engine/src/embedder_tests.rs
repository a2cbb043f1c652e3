//! The tokenising of texts, without its threads.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::backend::scripted::ScriptedVocabulary;
use crate::params::MAX_POOLED_INPUTS;
use crate::queue::AGEING_BOUND;

type Events = Receiver<PooledEvent>;

fn preparer() -> Preparer {
    Preparer { vocabulary: Arc::new(ScriptedVocabulary), pooling: Pooling::Mean, text_tokens: 8 }
}

fn job(
    counters: &Arc<PooledCounters>,
    ticket: u64,
    priority: Priority,
    work: PooledWork,
    activity: Option<ActivitySink>,
) -> (Box<Job>, Events) {
    let (sender, events) = unbounded();
    let sink = Box::new(move |event| drop(sender.send(event)));
    let reply = Reply::new(sink, PooledPermit::take(counters, u32::MAX).unwrap(), Arc::default()).observed(activity);
    let (left, done) = (Texts::of(work), VecDeque::new());
    let now = Instant::now();
    let job = Job {
        ticket,
        turn: Turn::default(),
        left,
        done,
        priority,
        reply,
        submitted_at: now,
        waiting_since: now,
        limit: None,
    };
    (Box::new(job), events)
}

fn texts(count: usize) -> PooledWork {
    PooledWork::Embed((0..count).map(|i| TextInput::Text("x".repeat(1 + i % 8))).collect())
}

#[test]
fn bulk_input_that_is_being_tokenised_lets_a_higher_priority_go_first() {
    for waited in [Duration::ZERO, AGEING_BOUND] {
        bulk_input_lets_a_higher_priority_go_first(waited);
    }
}

/// `waited`: for how long it waited for its first turn.
fn bulk_input_lets_a_higher_priority_go_first(waited: Duration) {
    let (counters, waiting) = (Arc::new(PooledCounters::default()), WaitingJobs::default());
    let (urgent, _urgent) = job(&counters, 1, Priority::High, texts(1), None);
    // It comes while the first slice is tokenised.
    let (urgent, queue) = (Mutex::new(Some(urgent)), waiting.clone());
    let slices = Arc::new(AtomicU64::new(0));
    let counted = slices.clone();
    let activity: ActivitySink = Arc::new(move |activity| {
        if activity == Activity::Begun {
            counted.fetch_add(1, Relaxed);
        } else if let Some(urgent) = urgent.lock().unwrap().take() {
            push(&queue, urgent);
        }
    });
    let (mut bulk, _bulk) = job(&counters, 0, Priority::Low, texts(MAX_POOLED_INPUTS), Some(activity));
    bulk.submitted_at = bulk.submitted_at.checked_sub(waited).unwrap();
    bulk.waiting_since = bulk.submitted_at;
    push(&waiting, bulk);
    let first = preparer().next(&waiting, &counters).unwrap();
    assert_eq!((first.priority, first.texts.len()), (Priority::High, 1));
    assert_eq!(slices.load(Relaxed), 1);
    let second = preparer().next(&waiting, &counters).unwrap();
    let lengths: Vec<usize> = second.texts.iter().map(Vec::len).collect();
    assert_eq!(lengths, (0..MAX_POOLED_INPUTS).map(|i| 1 + i % 8).collect::<Vec<_>>(), "all of them, in their order");
    assert_eq!(slices.load(Relaxed) as usize, MAX_POOLED_INPUTS / SLICE_TEXTS);
    assert!(pop(&waiting).is_none());
}

#[test]
fn a_text_at_fault_is_named_by_its_place_in_the_whole_request() {
    let (counters, waiting) = (Arc::new(PooledCounters::default()), WaitingJobs::default());
    let mut inputs: Vec<TextInput> = (0..40).map(|_| TextInput::Text("a".to_owned())).collect();
    inputs[37] = TextInput::Text(String::new());
    let documents = (0..40).map(|i| if i == 37 { "much too long".to_owned() } else { "b".to_owned() }).collect();
    let rank = PooledWork::Rank { queries: vec!["a".to_owned()], documents };
    for (work, name) in [(PooledWork::Embed(inputs), "input[37]"), (rank, "documents[37]")] {
        let (job, events) = job(&counters, 0, Priority::Normal, work, None);
        push(&waiting, job);
        assert!(preparer().next(&waiting, &counters).is_none());
        let PooledEvent::Failed(RequestError::InvalidRequest { param, .. }) = events.recv().unwrap() else {
            panic!("it fails")
        };
        assert_eq!(param.as_deref(), Some(name));
    }
}

#[test]
fn nothing_is_tokenised_for_who_has_left_or_once_it_ends() {
    let counters = Arc::new(PooledCounters::default());
    let waiting = WaitingJobs::default();
    let (mut left, events) = job(&counters, 0, Priority::Normal, texts(100), None);
    let (sender, events_of_left) = unbounded();
    let sink = Box::new(move |event| drop(sender.send(event)));
    left.reply = Reply::new(sink, PooledPermit::take(&counters, u32::MAX).unwrap(), Arc::new(AtomicBool::new(true)));
    drop(events);
    let events = events_of_left;
    push(&waiting, left);
    assert!(preparer().next(&waiting, &counters).is_none());
    assert_eq!(events.recv(), Ok(PooledEvent::Cancelled));
    let (late, events) = job(&counters, 0, Priority::Normal, texts(100), None);
    push(&waiting, late);
    counters.shutting_down.store(true, Relaxed);
    assert!(preparer().next(&waiting, &counters).is_none());
    assert_eq!(events.recv(), Ok(PooledEvent::Failed(RequestError::ShuttingDown)));
}
