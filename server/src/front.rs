//! How much memory the front itself may take, beside its workers: a part of what the process has, shared among what clients
//! can have it hold; and the processes that render chats. The memory gate keeps it free ([`crate::gates::memory`]).
//!
//! Absent: what each limit does, which is with who enforces it: bodies and vectors in [`crate::api`], undelivered output in
//! [`crate::output`], connections in [`crate::serve`].

use gantry_engine::template_limits::{TEMPLATE_PROCESS_MAX_BYTES, TEMPLATE_PROCESS_MIN_BYTES, processes_bytes};

use crate::limits::{
    BODY_BUDGET_BYTES, BODY_BUDGET_MIN_BYTES, CALL_BYTES, CALL_PIECE_BYTES, CALL_WINDOW_BYTES, CALLS_DIVISOR,
    CONNECTION_BYTES, FRONT_BASE_BYTES, FRONT_MEMORY_DIVISOR, MAX_BODY_BYTES, MAX_CALL_HEAD_BYTES, MAX_CONNECTIONS,
    MIN_CONNECTIONS, OUTPUT_BUDGET_BYTES, OUTPUT_BUDGET_MIN_BYTES, OUTPUT_OVERRUN_BYTES, OUTPUT_RESERVE_BYTES,
    SEND_BUFFER_BYTES, TEMPLATE_MEMORY_DIVISOR, WHOLE_ANSWER_BYTES, WHOLE_ANSWER_COPIES, WRITES_AT_ONCE,
};

// One body fits into what any one client may have.
const _: () = assert!(MAX_BODY_BYTES * 4 < BODY_BUDGET_MIN_BYTES && BODY_BUDGET_MIN_BYTES <= BODY_BUDGET_BYTES);
// The kernel's part of a connection, and what the front reads ahead for it and has to send.
const _: () = assert!(CONNECTION_BYTES == 2 * SEND_BUFFER_BYTES + (80 << 10));

// What a client has sent of all calls on a connection is the connection's; of each call there are a head and two pieces.
const _: () = assert!(CALL_WINDOW_BYTES as usize + CALL_PIECE_BYTES <= 80 << 10);
const _: () = assert!(CALL_BYTES >= MAX_CALL_HEAD_BYTES as usize + 2 * CALL_PIECE_BYTES);

/// The front's limits of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontLimits {
    /// What request bodies may take together.
    pub bodies_bytes: usize,
    /// What answers with vectors may.
    pub vectors_bytes: usize,
    /// What answers may hold until their clients have taken it.
    pub output_bytes: usize,
    /// Connections open at once.
    pub connections: usize,
    /// What a process of a worker's may take that renders a slow chat.
    pub template_bytes: u64,
}

/// See [`FrontLimits::connections_and_calls`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionsAndCalls {
    /// Connections, of HTTP/1.1 and of gRPC.
    pub connections: usize,
    /// Calls on those of gRPC.
    pub calls: usize,
}

impl FrontLimits {
    /// The limits in a process that may take so much; `None`: nobody knows.
    #[must_use]
    pub fn within(memory_bytes: Option<u64>) -> Self {
        let part_bytes = memory_bytes.map(|bytes| usize::try_from(bytes / FRONT_MEMORY_DIVISOR).unwrap_or(usize::MAX));
        let part_bytes = part_bytes.unwrap_or(usize::MAX);
        Self {
            bodies_bytes: part_bytes.clamp(BODY_BUDGET_MIN_BYTES, BODY_BUDGET_BYTES),
            vectors_bytes: part_bytes.clamp(BODY_BUDGET_MIN_BYTES, BODY_BUDGET_BYTES),
            output_bytes: part_bytes.clamp(OUTPUT_BUDGET_MIN_BYTES, OUTPUT_BUDGET_BYTES),
            connections: (part_bytes / CONNECTION_BYTES).clamp(MIN_CONNECTIONS, MAX_CONNECTIONS),
            template_bytes: memory_bytes
                .map_or(u64::MAX, |bytes| bytes / TEMPLATE_MEMORY_DIVISOR)
                .clamp(TEMPLATE_PROCESS_MIN_BYTES, TEMPLATE_PROCESS_MAX_BYTES),
        }
    }

    /// How many connections, and calls of gRPC on them, there may be, where it is served or not: what calls take is the connections'.
    #[must_use]
    pub fn connections_and_calls(&self, has_calls: bool) -> ConnectionsAndCalls {
        let of_calls = if has_calls { self.connections / CALLS_DIVISOR } else { 0 };
        let calls = of_calls * CONNECTION_BYTES / CALL_BYTES;
        ConnectionsAndCalls { connections: self.connections - of_calls, calls }
    }

    /// The most that the front takes with these limits, where so many sequences generate. `vectors`: whether it serves them.
    #[must_use]
    pub fn most_bytes(&self, sequences: usize, vectors: bool) -> u64 {
        let bytes = |count: usize, each: usize| (count as u64).saturating_mul(each as u64);
        let parts = [
            FRONT_BASE_BYTES,
            bytes(1, self.bodies_bytes),
            bytes(usize::from(vectors), self.vectors_bytes),
            bytes(1, self.output_bytes),
            bytes(1, OUTPUT_RESERVE_BYTES),
            bytes(sequences, OUTPUT_OVERRUN_BYTES),
            bytes(WRITES_AT_ONCE, WHOLE_ANSWER_BYTES).saturating_mul(WHOLE_ANSWER_COPIES),
            bytes(self.connections, CONNECTION_BYTES),
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// The most that the processes take that render chats for so many workers.
    #[must_use]
    pub fn templates_bytes(&self, workers: u32) -> u64 {
        processes_bytes(self.template_bytes).saturating_mul(workers.into())
    }
}

impl Default for FrontLimits {
    /// Where there is memory enough.
    fn default() -> Self {
        Self::within(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_parts_of_the_demos_pods_are_known() {
        let of = |mib: u64| {
            let limits = FrontLimits::within(Some(mib * MIB));
            (limits, limits.most_bytes(8, false) / MIB)
        };
        let (small, most_mib) = of(768);
        assert_eq!((small.bodies_bytes, small.output_bytes, small.connections), (48 << 20, 24 << 20, 256));
        assert_eq!(most_mib, 48 + 48 + 24 + 16 + 16 + 64 + 36);
        assert_eq!(of(64 << 10).0, FrontLimits::default());
        assert_eq!(FrontLimits::default().most_bytes(0, true) / MIB, 48 + 2 * 512 + 32 + 16 + 64 + 576);
        assert_eq!(small.templates_bytes(1) / MIB, 4 * 20);
        assert_eq!(FrontLimits::within(Some(16 << 30)).templates_bytes(2) / MIB, 2 * (2 * 20 + 2 * 128));
        assert_eq!(FrontLimits::default().templates_bytes(1) / MIB, 2 * 20 + 2 * 352);
    }

    #[test]
    fn calls_take_what_connections_leave() {
        let limits = FrontLimits::within(Some(768 * MIB));
        let parts = |has_calls| {
            let ConnectionsAndCalls { connections, calls } = limits.connections_and_calls(has_calls);
            (connections, calls)
        };
        assert_eq!((parts(false), parts(true)), ((256, 0), (192, 192)));
        const { assert!(192 * CONNECTION_BYTES + 192 * CALL_BYTES <= 256 * CONNECTION_BYTES) }
    }

    #[test]
    fn a_chat_that_is_rendered_at_once_has_memory_for_what_a_template_makes_of_it() {
        use gantry_engine::template_limits::{QUICK_RENDER_BYTES, template_bytes};
        assert!(template_bytes(TEMPLATE_PROCESS_MIN_BYTES, QUICK_RENDER_BYTES) > 5 * MIB);
        // And the longest that a body may be, of long texts, where there is memory.
        assert!(template_bytes(TEMPLATE_PROCESS_MAX_BYTES, MAX_BODY_BYTES) > 24 * MAX_BODY_BYTES as u64);
        assert_eq!(template_bytes(TEMPLATE_PROCESS_MIN_BYTES, MAX_BODY_BYTES), 0);
    }

    proptest! {
        #[test]
        fn more_memory_never_means_lower_limits(less in 0..1_u64 << 40, more in 0..1_u64 << 40) {
            let (less, more) = (less.min(more), less.max(more));
            let (small, large) = (FrontLimits::within(Some(less)), FrontLimits::within(Some(more)));
            prop_assert!(small.bodies_bytes <= large.bodies_bytes && small.output_bytes <= large.output_bytes);
            prop_assert!(small.connections <= large.connections);
            let most = |limits: FrontLimits| limits.most_bytes(8, false);
            prop_assert!(most(small) <= most(large));
            // Of a pod of a GiB and more it is no more than a third, and of a large one an eighth.
            prop_assert!(more < 1 << 30 || most(large) <= more / 3);
            prop_assert!(more < 16 << 30 || most(large) <= more / 8);
            prop_assert!(small.template_bytes <= large.template_bytes);
            prop_assert!(more < 1 << 30 || large.templates_bytes(1) <= more / 9);
        }
    }
}
