//! [`WeakList`]: weak references to values owned elsewhere; dead ones are removed.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

pub(crate) struct WeakList<T: ?Sized> {
    all: Vec<Weak<T>>,
    /// The length at which dead entries are removed.
    tidied_at: usize,
}

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        WeakList { all: Vec::new(), tidied_at: 0 }
    }
}

impl<T: ?Sized> WeakList<T> {
    pub(crate) fn push(&mut self, item: Weak<T>) {
        if self.all.len() >= self.tidied_at {
            self.all.retain(|known| known.strong_count() > 0);
            self.tidied_at = 2 * self.all.len() + 8;
        }
        self.all.push(item);
    }

    /// Whether any value lives.
    pub(crate) fn has_any(&self) -> bool {
        self.all.iter().any(|known| known.strong_count() > 0)
    }

    /// The live values. The caller may become the last holder of one and drop it: not under a lock.
    pub(crate) fn alive(&self) -> Vec<Arc<T>> {
        self.all.iter().filter_map(Weak::upgrade).collect()
    }
}
