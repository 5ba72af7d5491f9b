//! [`LateWork`]: work that wrote an allocation, can fail when it runs, and has not ended. Its submitter knows whose work it is and what it
//! wrote.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::weak_list::WeakList;

/// The work that has not ended.
#[derive(Default)]
pub(crate) struct LateWork {
    all: Mutex<WeakList<dyn Any + Send + Sync>>,
    /// The list has entries; changed under its lock.
    is_used: AtomicBool,
}

impl LateWork {
    pub(crate) fn enter(&self, work: Weak<dyn Any + Send + Sync>) {
        let mut all = self.all.lock();
        all.push(work);
        // ORDERING: Relaxed: readers of the work's outputs got them from its submitter.
        self.is_used.store(true, Ordering::Relaxed);
    }

    /// Whether there may be some.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// The work that has not ended; forgets the rest.
    pub(crate) fn alive<T: Any + Send + Sync>(&self, is_open: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let all = self.all.lock().alive();
        let all = all.into_iter().filter_map(|work| work.downcast().ok());
        let (open, over): (Vec<Arc<T>>, Vec<Arc<T>>) = all.partition(|work| is_open(work));
        if !over.is_empty() {
            let is_over = |work: &Weak<dyn Any + Send + Sync>| {
                over.iter().any(|over| std::ptr::addr_eq(Arc::as_ptr(over), work.as_ptr()))
            };
            let mut all = self.all.lock();
            all.retain(|work| !is_over(work));
            // ORDERING: Relaxed: as above.
            self.is_used.store(!all.is_empty(), Ordering::Relaxed);
        }
        open
    }
}
