//! Parts of an allocation that compiled lists will use again.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use super::Allocation;

/// The parts that lists of graphs will use again.
#[derive(Default)]
pub(super) struct KeptParts {
    pub(super) parts: Vec<Range<u64>>,
    /// How many shares of the memory the lists hold.
    pub(super) shares: usize,
}

/// A share of memory whose parts graph launches use repeatedly: while it exists, those parts are not available for untracked
/// uses.
pub(crate) struct KeptByGraph {
    memory: Arc<Allocation>,
    parts: Vec<Range<u64>>,
}

impl KeptByGraph {
    /// Keeps no part of the memory yet.
    pub(crate) fn new(memory: &Arc<Allocation>) -> Self {
        memory.kept_by_graphs.lock().shares += 1;
        KeptByGraph { memory: memory.clone(), parts: Vec::new() }
    }

    /// Keeps a part that the caller borrows, or that another share keeps.
    pub(crate) fn keep(&mut self, part: &Range<u64>) {
        self.memory.kept_by_graphs.lock().parts.push(part.clone());
        self.parts.push(part.clone());
    }

    pub(crate) fn memory(&self) -> &Arc<Allocation> {
        &self.memory
    }
}

impl Drop for KeptByGraph {
    fn drop(&mut self) {
        let mut kept = self.memory.kept_by_graphs.lock();
        kept.shares -= 1;
        for part in &self.parts {
            if let Some(at) = kept.parts.iter().position(|known| known == part) {
                kept.parts.swap_remove(at);
            }
        }
    }
}
