//! A share of a pod's requests is answered by a candidate: the same conversations all along, none of them by two models, and by the
//! version before as soon as the candidate does worse or dies.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::hold::{Front, until};
use crate::pod::{ONE, Pod, TWO, served, version};

/// Conversations that are asked.
const CONVERSATIONS: usize = 60;

impl Pod {
    /// The candidate gets this share, from now on.
    fn share(&self, percent: &str) {
        self.api.update(|object| {
            let rollout = &mut object["status"]["rollout"];
            rollout["step"] = json!("Canary");
            rollout["canary"] = json!({"share": percent, "step": 1, "steps": 2, "since": "2026-01-01T00:00:00Z"});
        });
    }

    /// v1 answers, and v2 has passed beside it.
    async fn with_candidate() -> (Self, Front) {
        let mut pod = Self::fresh();
        let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
        let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
        pod.roll_out(&version("v1", &one, &sha_one)).await;
        pod.prepare(&version("v2", &two, &sha_two));
        pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
        let front = Front::of(&pod).await;
        (pod, front)
    }

    async fn shares(&self, percent: &str) -> Value {
        self.share(percent);
        self.api.entry("the share is in force", |entry| entry["canary"]["share"] == percent).await
    }
}

impl Front {
    /// Asks for the version, with what names the conversation; gives the version that answered, which is the one that the text is of.
    async fn asks(&self, body: &Value, session: Option<&str>) -> String {
        let mut asked = json!({"model": "chat", "temperature": 0, "max_tokens": 32});
        body.as_object().unwrap().iter().for_each(|(name, value)| asked[name] = value.clone());
        let request = self.client.post(format!("{}/v1/chat/completions", self.base)).json(&asked);
        let request = session.iter().fold(request, |request, session| request.header("x-gantry-session", *session));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200, "{:?}", response.text().await);
        let named = response.headers()["x-gantry-version"].to_str().unwrap().to_owned();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(answer["system_fingerprint"], named.as_str());
        let said = answer["choices"][0]["message"]["content"].as_str().unwrap();
        if body["messages"].as_array().unwrap().last().unwrap()["content"] == "Which version are you?" {
            assert_eq!(said, if named == "v1" { ONE } else { TWO });
        }
        named
    }

    async fn of_session(&self, session: &str) -> String {
        let messages = json!([{"role": "user", "content": "Which version are you?"}]);
        self.asks(&json!({"messages": messages}), Some(session)).await
    }

    /// Which version answers each conversation.
    async fn all(&self) -> BTreeMap<usize, String> {
        let mut all = BTreeMap::new();
        for number in 0..CONVERSATIONS {
            all.insert(number, self.of_session(&format!("session-{number}")).await);
        }
        all
    }
}

fn with_v2(all: &BTreeMap<usize, String>) -> Vec<usize> {
    all.iter().filter(|(_, version)| *version == "v2").map(|(number, _)| *number).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_of_the_conversations_is_answered_by_the_candidate_all_along() {
    let (pod, front) = Pod::with_candidate().await;
    assert!(with_v2(&front.all().await).is_empty(), "it is prepared, and nobody's");
    let entry = pod.shares("25%").await;
    assert_eq!(
        (&entry["version"], &entry["prepared"], &entry["canary"]["version"]),
        (&json!("v1"), &json!("v2"), &json!("v2"))
    );
    let quarter = with_v2(&front.all().await);
    // Within four standard deviations of 15.
    assert!((2..=28).contains(&quarter.len()), "{} of {CONVERSATIONS}", quarter.len());
    assert_eq!(with_v2(&front.all().await), quarter, "the same ones again");
    let metrics = front.client.get(format!("{}/metrics", front.base)).send().await.unwrap().text().await.unwrap();
    for line in
        ["version_share{version=\"v1\",model=\"chat\"} 0.75", "version_share{version=\"v2\",model=\"chat\"} 0.25"]
    {
        assert!(metrics.contains(line), "{metrics}");
    }
    // Without a header it is the user, and without one how the conversation began: each later turn is answered by the same version.
    let mut versions = std::collections::BTreeSet::new();
    for number in 0..24 {
        let first = json!({"role": "user", "content": format!("Question {number}")});
        let began = front.asks(&json!({"messages": [first]}), None).await;
        let turns = json!([first, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Which version are you?"}]);
        assert_eq!(
            front.asks(&json!({"messages": turns, "stream": false}), None).await,
            began,
            "conversation {number}"
        );
        let user = format!("user-{number}");
        let of_user = front.asks(&json!({"messages": [first], "user": user}), None).await;
        assert_eq!(front.asks(&json!({"messages": turns, "user": user}), None).await, of_user, "{user}");
        versions.extend([began, of_user]);
    }
    assert_eq!(versions.len(), 2, "{versions:?}");
    // Who was within the share is within a larger one.
    pod.shares("60%").await;
    let more = with_v2(&front.all().await);
    assert!(more.len() > quarter.len() && quarter.iter().all(|number| more.contains(number)), "{quarter:?} {more:?}");
    // All go over, and the way back stays.
    let pids = pod.router.routing().canary.unwrap().0.stats().pids();
    pod.activate("v2", Some("v1"));
    let entry = pod.api.entry("v2 answers", |entry| entry["version"] == "v2").await;
    assert_eq!((entry.get("canary"), &entry["resident"]), (None, &json!("v1")));
    assert_eq!(with_v2(&front.all().await).len(), CONVERSATIONS);
    assert_eq!(pod.router.active().unwrap().stats().pids(), pids, "nothing was loaded again");
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_passes_a_limit_gets_no_request_more_though_nobody_is_there_to_say_so() {
    let (pod, front) = Pod::with_candidate().await;
    pod.shares("50%").await;
    let ours = with_v2(&front.all().await);
    // No answer comes so soon.
    let signals = json!({"ttftP95": "0.001ms", "window": "1s", "minSamples": 5});
    pod.api.update(|object| object["spec"]["rollout"]["rollback"] = json!({"signals": signals}));
    // It has heard of them, and of no request since.
    pod.api.entry("it is watched", |entry| entry["canary"]["tooFewRequests"] == true).await;
    pod.api.set_away(true);
    // Its figures are those of its requests, which have to come.
    until("the pod takes the share back by itself", async || {
        for number in ours.iter().take(8) {
            front.of_session(&format!("session-{number}")).await;
        }
        pod.router.routing().canary.is_none()
    })
    .await;
    assert!(with_v2(&front.all().await).is_empty());
    pod.api.set_away(false);
    let entry = pod.api.entry("it says so", |entry| entry["canary"]["breach"].is_object()).await;
    assert_eq!((&entry["canary"]["breach"]["signal"], entry["canary"].get("share")), (&json!("ttftP95"), None));
    assert_eq!((&entry["version"], &entry["health"], entry.get("breach")), (&json!("v1"), &json!("Healthy"), None));
    // Limits that are raised hold at once.
    let signals = json!({"ttftP95": "10m", "window": "1s", "minSamples": 5});
    pod.api.update(|object| object["spec"]["rollout"]["rollback"] = json!({"signals": signals}));
    pod.api.entry("it has its share again", |entry| entry["canary"]["share"] == "50%").await;
    assert_eq!(with_v2(&front.all().await), ours);
    // The operator has all pods take it back: it is unloaded.
    pod.api.update(|object| {
        let status = &mut object["status"];
        (status["candidateVersion"], status["rollout"]["canary"]) = (Value::Null, Value::Null);
        status["rollout"]["step"] = json!("Rollback");
    });
    pod.api.entry("it is taken back", |entry| entry.get("canary").is_none() && entry.get("prepared").is_none()).await;
    assert!(with_v2(&front.all().await).is_empty());
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_dies_fails_nobody() {
    let (pod, front) = Pod::with_candidate().await;
    pod.shares("50%").await;
    let ours = with_v2(&front.all().await);
    let asked = format!("session-{}", ours[0]);
    let candidate = pod.router.routing().canary.unwrap().0;
    let mut before = Vec::new();
    // It is started again a few times, and then called failed.
    while pod.api.now()["candidate"]["phase"] != "Failed" {
        let pids = candidate.stats().pids();
        if let Some(worker) = pids.first().filter(|worker| candidate.is_up() && !before.contains(*worker)) {
            before.push(*worker);
            assert!(std::process::Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap().success());
            until("it is noticed", async || !candidate.is_up()).await;
            assert_eq!(front.of_session(&asked).await, "v1", "while it is away the active version answers");
        }
        assert!(["v1", "v2"].contains(&&*front.of_session(&asked).await));
    }
    let entry = pod.api.entry("refused", |entry| entry["candidate"]["phase"] == "Failed").await;
    assert_eq!(
        (entry.get("canary"), entry.get("prepared"), &entry["version"]),
        (None, None, &json!("v1")),
        "{entry:#}"
    );
    assert!(before.len() > 1, "{before:?}");
    assert!(with_v2(&front.all().await).is_empty());
    pod.end().await;
}
