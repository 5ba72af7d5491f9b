//! A library's repeated calls with equal arguments, replaced by the kernels that they launch.
//!
//! cuBLASLt keeps the host busy for 6.8 µs with a product that takes 5 on the device. A call with the same addresses and values launches
//! the same kernels with the same arguments. So these kernels are captured, and later launched directly.
//!
//! | a call | is |
//! |---|---|
//! | that was not made recently | made, and noted |
//! | that was noted | captured, and *known* from then on |
//! | known as kernels, each after the previous one | launched as these kernels |
//! | known as anything else: with fills or copies, or cannot be captured | made |
//! | inside a graph | made, into the graph |
//!
//! # Invariants
//! 1. A call is captured when it is made for the second time, not earlier (`a_call_is_captured_when_it_comes_again`).
//! 2. At most [`KNOWN_MOST`] calls are known, however many are made (`few_calls_are_known`).

use std::any::Any;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use gpu_await::sibling::{KernelChain, Mutex, is_captured, partition_of};
use gpu_await::{RawQueue, Result};

/// Addresses and values: what distinguishes a plan's calls.
pub(crate) type CallKey = [u64; 7];

/// The same, and the partition of the call: the library chooses kernels for a number of multiprocessors.
type Place = (CallKey, u64);

/// How many calls are known at once; when another would exceed this, all are forgotten.
const KNOWN_MOST: usize = 256;

/// Slots for calls that were made once: each call's hash picks its slot, which the latest call keeps.
const NOTED: usize = 64;

/// The calls of a plan.
pub(crate) struct KnownCalls(Mutex<Table<Arc<KernelChain>>>);

struct Table<K> {
    noted: [u64; NOTED],
    /// `None`: the library is called.
    known: HashMap<Place, Option<K>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Found<K> {
    Nothing,
    Noted,
    Known(Option<K>),
}

impl KnownCalls {
    pub(crate) fn new() -> Self {
        KnownCalls(Mutex::new(Table::new()))
    }

    /// Puts a call on the queue's stream. `call` makes it, on the given stream; `keep` keeps its kernels loaded.
    pub(crate) fn put<O: Any + Send>(
        &self,
        queue: &RawQueue<'_>,
        key: CallKey,
        keep: impl FnOnce() -> O,
        call: impl Fn(u64) -> Result<()>,
    ) -> Result<()> {
        if is_captured(queue) {
            return call(queue.stream());
        }
        let key = (key, partition_of(queue).map_or(0, |(id, _)| id));
        let found = self.0.lock().find(&key);
        let kernels = match found {
            Found::Known(kernels) => kernels,
            Found::Nothing => None,
            Found::Noted => {
                let kernels = KernelChain::capture(queue, keep, &call).map(Arc::new);
                // Forgotten entries are dropped after the lock is released.
                let _forgotten = self.0.lock().enter(key, kernels.clone());
                kernels
            }
        };
        match kernels {
            // SAFETY: a call with the same addresses was captured, and its operation declared them as this one does; `keep` kept the
            // library.
            Some(kernels) => unsafe { kernels.launch(queue) },
            None => call(queue.stream()),
        }
    }
}

impl<K: Clone> Table<K> {
    fn new() -> Self {
        Table { noted: [0; NOTED], known: HashMap::new() }
    }

    /// The entry of a call; the call is noted if there is none.
    fn find(&mut self, key: &Place) -> Found<K> {
        if let Some(known) = self.known.get(key) {
            return Found::Known(known.clone());
        }
        let hash = self.known.hasher().hash_one(key);
        let noted = &mut self.noted[hash as usize % NOTED];
        if std::mem::replace(noted, hash) == hash { Found::Noted } else { Found::Nothing }
    }

    /// Enters a noted call. Returns the entries that are forgotten for it.
    fn enter(&mut self, key: Place, kernels: Option<K>) -> Vec<(Place, Option<K>)> {
        let is_full = self.known.len() == KNOWN_MOST;
        let forgotten = if is_full { self.known.drain().collect() } else { Vec::new() };
        self.known.insert(key, kernels);
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use super::{Found, KNOWN_MOST, Table};

    #[test]
    fn a_call_is_captured_when_it_comes_again() {
        let mut table = Table::<&str>::new();
        let (first, second) = (([1; 7], 0), ([1; 7], 1));
        assert_eq!(table.find(&first), Found::Nothing);
        assert_eq!(table.find(&first), Found::Noted);
        assert!(table.enter(first, Some("kernel")).is_empty());
        assert_eq!(table.find(&first), Found::Known(Some("kernel")));
        assert_eq!(table.find(&second), Found::Nothing);
        assert_eq!(table.find(&second), Found::Noted);
        table.enter(second, None);
        assert_eq!(table.find(&second), Found::Known(None));
    }

    #[test]
    fn few_calls_are_known() {
        let mut table = Table::<u64>::new();
        for call in 0..10 * KNOWN_MOST as u64 {
            let key = ([call; 7], 0);
            assert_eq!(table.find(&key), Found::Nothing);
            assert_eq!(table.find(&key), Found::Noted);
            table.enter(key, Some(call));
            assert!(table.known.len() <= KNOWN_MOST);
            assert_eq!(table.find(&key), Found::Known(Some(call)));
        }
    }
}
