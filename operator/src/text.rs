//! Parts of messages that people read in conditions and Events.

use crate::limits::MESSAGE_PODS_MAX;

/// The first few of `items`, and how many more there are.
pub(crate) fn some_of(items: &[impl AsRef<str>], separator: &str) -> String {
    let shown = items.iter().take(MESSAGE_PODS_MAX).map(AsRef::as_ref).collect::<Vec<_>>().join(separator);
    match items.len().saturating_sub(MESSAGE_PODS_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// What the scheduler says of nodes, without how many there are of which kind: `0/3 nodes are available: 1 node(s) were
/// unschedulable, 2 Insufficient memory.` Numbers move whenever a node comes or goes, and each move would be a write. What it says
/// after that sentence is of no use to whoever adds a node: `no new claims to deallocate, preemption: 0/3 nodes ...`.
pub(crate) fn of_scheduler(message: &str) -> String {
    let (of_pod, _) = message.split_once(" preemption: ").unwrap_or((message, ""));
    let of_pod = of_pod.trim_end_matches(['.', ' ']);
    let Some((_, reasons)) = of_pod.split_once(" nodes are available: ") else { return of_pod.to_owned() };
    let (reasons, _) = reasons.split_once(". ").unwrap_or((reasons, ""));
    let without_count = |reason: &str| {
        let rest = reason.trim_start_matches(|c: char| c.is_ascii_digit());
        rest.strip_prefix(' ').unwrap_or(reason).to_owned()
    };
    let mut reasons: Vec<_> = reasons.split(", ").map(without_count).collect();
    reasons.sort_unstable();
    reasons.dedup();
    reasons.join(", ")
}

/// What the API server says to a pod that it refuses, without the pod, which has another name with every try, and without
/// what others use of a quota: `pods "chat-5d9-x7k" is forbidden: exceeded quota: q, requested: cpu=1, used: cpu=3, limited: cpu=3`.
pub(crate) fn of_refusal(message: &str) -> String {
    let named = [" is forbidden: ", " is invalid: "];
    let why = named.iter().find_map(|words| Some(message.split_once(words)?.1)).unwrap_or(message);
    match why.split_once(", used: ") {
        Some((asked, used)) => match used.split_once(", limited: ") {
            Some((_, limited)) => format!("{asked}, limited: {limited}"),
            None => asked.to_owned(),
        },
        None => why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_cut_and_says_so() {
        assert_eq!(some_of(&["a", "b", "c"], ", "), "a, b, c");
        assert_eq!(some_of(&["a", "b", "c", "d", "e"], "; "), "a; b; c and 2 more");
    }

    #[test]
    fn what_the_scheduler_says_is_the_same_however_many_nodes_there_are() {
        let says = "1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 2 Insufficient nvidia.com/gpu. preemption: 0/3 \
                    nodes are available: 3 Preemption is not helpful for scheduling.";
        let others =
            "12 Insufficient nvidia.com/gpu, 30 node(s) had untolerated taint {node.kubernetes.io/unreachable: }.";
        let wanted = "Insufficient nvidia.com/gpu, node(s) had untolerated taint {node.kubernetes.io/unreachable: }";
        assert_eq!(of_scheduler(&format!("0/3 nodes are available: {says}")), wanted);
        assert_eq!(of_scheduler(&format!("0/42 nodes are available: {others}")), wanted);
        let claims = "0/1 nodes are available: 1 node(s) had untolerated taint(s). no new claims to deallocate, preemption: 0/1 nodes \
                      are available: 1 Preemption is not helpful for scheduling.";
        assert_eq!(of_scheduler(claims), "node(s) had untolerated taint(s)", "as Kubernetes 1.34 says it");
        assert_eq!(of_scheduler("no nodes available to schedule pods"), "no nodes available to schedule pods");
        assert_eq!(of_scheduler("0/1 nodes are available: 3rd reason."), "3rd reason");
    }

    #[test]
    fn a_refusal_is_the_same_with_every_try() {
        let quota = |pod: &str, used: u8| {
            of_refusal(&format!(
                "pods \"{pod}\" is forbidden: exceeded quota: q, requested: cpu=1, used: cpu={used}, limited: cpu=3"
            ))
        };
        assert_eq!(quota("chat-5d9-x7k", 3), "exceeded quota: q, requested: cpu=1, limited: cpu=3");
        assert_eq!(quota("chat-5d9-x7k", 3), quota("chat-5d9-bbq", 2));
        assert_eq!(of_refusal("Pod \"chat-1\" is invalid: spec: no"), "spec: no");
        assert_eq!(of_refusal("admission webhook denied the request"), "admission webhook denied the request");
    }
}
