//! A list behind a lock, whose length can be read without it.
//!
//! Most looks at a stream find nothing lent or marked there, and then take no lock.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await_protocol::sync::{Mutex, MutexGuard};

/// A collection that has a length.
pub(crate) trait Length {
    fn length(&self) -> usize;
}

impl<T> Length for Vec<T> {
    fn length(&self) -> usize {
        self.len()
    }
}

impl<T> Length for VecDeque<T> {
    fn length(&self) -> usize {
        self.len()
    }
}

#[derive(Default)]
pub(crate) struct Counted<L> {
    list: Mutex<L>,
    /// Stored under the lock.
    ///
    /// ORDERING: Relaxed throughout: a reader may see an old length. The callers that must not miss an entry
    /// synchronize elsewhere: the submission lock for markers, the call to the poller for the rest.
    length: AtomicU64,
}

impl<L: Length> Counted<L> {
    /// How long it was a moment ago.
    pub(crate) fn len(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Locks it for a change.
    pub(crate) fn lock(&self) -> Changing<'_, L> {
        Changing { list: self.list.lock(), length: &self.length }
    }

    /// Locks it for reading.
    pub(crate) fn read(&self) -> impl Deref<Target = L> {
        self.list.lock()
    }

    pub(crate) fn get_mut(&mut self) -> &mut L {
        self.list.get_mut()
    }
}

/// The lock, held.
pub(crate) struct Changing<'l, L: Length> {
    list: MutexGuard<'l, L>,
    length: &'l AtomicU64,
}

impl<L: Length> Deref for Changing<'_, L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.list
    }
}

impl<L: Length> DerefMut for Changing<'_, L> {
    fn deref_mut(&mut self) -> &mut L {
        &mut self.list
    }
}

impl<L: Length> Drop for Changing<'_, L> {
    fn drop(&mut self) {
        self.length.store(self.list.length() as u64, Ordering::Relaxed);
    }
}
