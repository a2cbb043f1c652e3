//! The tree of blocks in memory: which are there, how much they take, which one goes next. No clock, no I/O.
//!
//! A node's children are not listed: a block is found by its name, and a parent only counts them. Only a leaf that
//! nobody holds may go, so the nodes in `leaves` are exactly those, and the first of them is the one touched longest
//! ago. A path is touched as a whole, hence no parent is older than its child, and dropping leaves in that order is
//! dropping nodes in that order. What comes in was used before that: its last access is no later than its touch, and
//! says when it has become too old.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use super::key::BlockHash;
use super::limits::{BLOCK_TOKENS, NODE_OVERHEAD_BYTES};

/// Index of a node; used again after the node is gone.
pub(super) type NodeId = u32;

/// The parent of first blocks.
const ROOT: NodeId = NodeId::MAX;

/// The KV rows of one block, shared and never changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Payload(Arc<Vec<u8>>);

impl Payload {
    /// Keeps no more memory than the bytes themselves.
    pub(crate) fn new(mut bytes: Vec<u8>) -> Self {
        bytes.shrink_to_fit();
        Self(Arc::new(bytes))
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that a block with a payload of this length is counted as.
pub(crate) fn node_bytes(payload_len: usize) -> u64 {
    payload_len as u64 + (BLOCK_TOKENS * size_of::<i32>()) as u64 + NODE_OVERHEAD_BYTES
}

/// A block as it leaves the tree, or as it is written.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) hash: BlockHash,
    pub(super) parent: BlockHash,
    pub(super) tokens: Arc<[i32]>,
    pub(super) payload: Payload,
    /// Blocks before it.
    pub(super) depth: u32,
    pub(super) accessed: Instant,
}

struct Node {
    block: Block,
    parent: NodeId,
    children: u32,
    /// Holders of this node or of one below it.
    pins: u32,
    /// When it was last touched, in calls.
    tick: u64,
    /// Whether it is in `leaves`.
    listed: bool,
}

pub(super) struct Tree {
    root: BlockHash,
    /// `None`: free, and in `free`.
    nodes: Vec<Option<Node>>,
    free: Vec<NodeId>,
    by_hash: HashMap<BlockHash, NodeId>,
    leaves: BTreeSet<(u64, NodeId)>,
    bytes: u64,
    pinned_bytes: u64,
    tick: u64,
    now: Option<Instant>,
}

impl Tree {
    pub(super) fn new(root: BlockHash) -> Self {
        Self {
            root,
            nodes: Vec::new(),
            free: Vec::new(),
            by_hash: HashMap::new(),
            leaves: BTreeSet::new(),
            bytes: 0,
            pinned_bytes: 0,
            tick: 0,
            now: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of nodes that are held, or above one that is.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Starts a call: what is touched from here on is younger than all before, whatever the caller's clock says.
    pub(super) fn begin(&mut self, now: Instant) -> Instant {
        self.tick += 1;
        let now = self.now.map_or(now, |last| last.max(now));
        self.now = Some(now);
        now
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id as usize)?.as_ref()
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id as usize)?.as_mut()
    }

    /// The nodes of the longest prefix of `tokens` that is there, at most `max_blocks` of them. Each is compared with
    /// its tokens and its parent: two blocks of one name are told apart.
    pub(super) fn walk(&self, chain: &[BlockHash], tokens: &[i32], max_blocks: usize) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut parent = ROOT;
        for (hash, tokens) in chain.iter().zip(tokens.chunks_exact(BLOCK_TOKENS)).take(max_blocks) {
            let Some(&id) = self.by_hash.get(hash) else { break };
            if !self.node(id).is_some_and(|node| node.parent == parent && *node.block.tokens == *tokens) {
                break;
            }
            path.push(id);
            parent = id;
        }
        path
    }

    pub(super) fn payload(&self, id: NodeId) -> Payload {
        self.node(id).map(|node| node.block.payload.clone()).unwrap_or_default()
    }

    pub(super) fn contains(&self, hash: &BlockHash) -> bool {
        self.by_hash.contains_key(hash)
    }

    /// Makes these nodes, a path from its first block, the last that go, and notes an access to them.
    pub(super) fn touch(&mut self, path: &[NodeId], accessed: Instant) {
        let tick = self.tick;
        for &id in path {
            let Some(node) = self.node_mut(id) else { continue };
            let old = (node.tick, id);
            node.tick = tick;
            node.block.accessed = node.block.accessed.max(accessed);
            if node.listed {
                self.leaves.remove(&old);
                self.leaves.insert((tick, id));
            }
        }
    }

    /// Keeps a node and all above it until [`Tree::unpin`].
    pub(super) fn pin(&mut self, id: NodeId) {
        self.add_pins(id, 1);
    }

    pub(super) fn unpin(&mut self, id: NodeId) {
        self.add_pins(id, -1);
    }

    fn add_pins(&mut self, deepest: NodeId, change: i32) {
        let mut id = deepest;
        while let Some(node) = self.node_mut(id) {
            let before = node.pins;
            node.pins = node.pins.saturating_add_signed(change);
            let (after, parent, bytes) = (node.pins, node.parent, node_bytes(node.block.payload.len()));
            if before == 0 && after > 0 {
                self.pinned_bytes += bytes;
            } else if before > 0 && after == 0 {
                self.pinned_bytes -= bytes;
            }
            self.relist(id);
            id = parent;
        }
    }

    /// Adds a block below `parent` (`None`: a first block) and moves a pin of the parent down to it, so that the caller
    /// holds one pin of the whole path. `None` when a block of that name is there or there are no more ids.
    pub(super) fn add_pinned(
        &mut self,
        parent: Option<NodeId>,
        hash: BlockHash,
        tokens: &[i32],
        payload: Payload,
        accessed: Instant,
    ) -> Option<NodeId> {
        if self.contains(&hash) {
            return None;
        }
        let above = match parent {
            None => None,
            Some(id) => Some((id, self.node(id)?.block.hash, self.node(id)?.block.depth + 1)),
        };
        let (parent, parent_hash, depth) = above.unwrap_or((ROOT, self.root, 0));
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let id = NodeId::try_from(self.nodes.len()).ok().filter(|id| *id != ROOT)?;
                self.nodes.push(None);
                id
            }
        };
        let bytes = node_bytes(payload.len());
        let block = Block { hash, parent: parent_hash, tokens: tokens.into(), payload, depth, accessed };
        self.nodes[id as usize] = Some(Node { block, parent, children: 0, pins: 1, tick: self.tick, listed: false });
        self.by_hash.insert(hash, id);
        self.bytes += bytes;
        self.pinned_bytes += bytes;
        if let Some(node) = self.node_mut(parent) {
            node.children += 1;
            self.relist(parent);
        }
        Some(id)
    }

    /// Lists a node as one that may go, or takes it off, as its children and pins have it.
    fn relist(&mut self, id: NodeId) {
        let Some(node) = self.node_mut(id) else { return };
        let free = node.children == 0 && node.pins == 0;
        if free == node.listed {
            return;
        }
        node.listed = free;
        let key = (node.tick, id);
        if free {
            self.leaves.insert(key);
        } else {
            self.leaves.remove(&key);
        }
    }

    /// When the node that would go next was last accessed.
    pub(super) fn oldest_access(&self) -> Option<Instant> {
        let &(_, id) = self.leaves.first()?;
        self.node(id).map(|node| node.block.accessed)
    }

    /// Takes out the node touched longest ago among those that may go.
    pub(super) fn pop_oldest(&mut self) -> Option<Block> {
        let &(_, id) = self.leaves.first()?;
        self.take_out(id)
    }

    /// Takes out those nodes that may go and were last accessed too long ago, each before its parent.
    pub(super) fn pop_expired(&mut self, is_expired: impl Fn(Instant) -> bool) -> Vec<Block> {
        let may_go = |node: &Node| node.listed && is_expired(node.block.accessed);
        let leaves = self.leaves.iter().map(|&(_, id)| id);
        let mut expired: Vec<NodeId> = leaves.filter(|&id| self.node(id).is_some_and(may_go)).collect();
        let mut popped = Vec::new();
        while let Some(id) = expired.pop() {
            let parent = self.node(id).map_or(ROOT, |node| node.parent);
            popped.extend(self.take_out(id));
            // A leaf now, if that was its last child.
            expired.extend(self.node(parent).is_some_and(may_go).then_some(parent));
        }
        popped
    }

    /// Takes out a node that may go.
    fn take_out(&mut self, id: NodeId) -> Option<Block> {
        let node = self.nodes.get_mut(id as usize)?.take()?;
        self.leaves.remove(&(node.tick, id));
        self.free.push(id);
        self.by_hash.remove(&node.block.hash);
        self.bytes -= node_bytes(node.block.payload.len());
        if let Some(parent) = self.node_mut(node.parent) {
            parent.children -= 1;
            self.relist(node.parent);
        }
        Some(node.block)
    }

    /// All blocks, the last accessed first, each after its parent.
    pub(super) fn blocks_by_age(&self) -> Vec<Block> {
        let mut nodes: Vec<&Node> = self.nodes.iter().flatten().collect();
        nodes.sort_by_key(|node| (std::cmp::Reverse((node.block.accessed, node.tick)), node.block.depth));
        nodes.into_iter().map(|node| node.block.clone()).collect()
    }

    #[cfg(test)]
    pub(super) fn accessed(&self, hash: &BlockHash) -> Option<Instant> {
        self.by_hash.get(hash).and_then(|&id| self.node(id)).map(|node| node.block.accessed)
    }

    /// Counts everything anew and compares.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let ids = || (0..self.nodes.len()).map(|i| NodeId::try_from(i).unwrap_or(ROOT));
        let live: Vec<(NodeId, &Node)> = ids().filter_map(|id| Some((id, self.node(id)?))).collect();
        let sum = |nodes: &[(NodeId, &Node)]| nodes.iter().map(|(_, n)| node_bytes(n.block.payload.len())).sum::<u64>();
        assert_eq!(live.len(), self.by_hash.len());
        assert_eq!(live.len() + self.free.len(), self.nodes.len());
        assert_eq!(sum(&live), self.bytes);
        let pinned: Vec<_> = live.iter().copied().filter(|(_, n)| n.pins > 0).collect();
        assert_eq!(sum(&pinned), self.pinned_bytes);
        let mut listed = 0;
        for (id, node) in &live {
            assert_eq!(self.by_hash.get(&node.block.hash), Some(id));
            let children: Vec<_> = live.iter().filter(|(_, n)| n.parent == *id).collect();
            assert_eq!(children.len(), node.children as usize);
            assert!(children.iter().map(|(_, n)| n.pins).sum::<u32>() <= node.pins);
            assert!(children.iter().all(|(_, n)| n.tick <= node.tick && n.block.accessed <= node.block.accessed));
            assert!(children.iter().all(|(_, n)| n.block.parent == node.block.hash));
            assert!(node.parent == ROOT || self.node(node.parent).is_some(), "an orphan");
            assert_eq!(node.listed, node.children == 0 && node.pins == 0);
            assert_eq!(self.leaves.contains(&(node.tick, *id)), node.listed);
            listed += usize::from(node.listed);
        }
        assert_eq!(listed, self.leaves.len());
    }
}
