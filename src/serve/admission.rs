//! Admission: which requests get a permit, on which slot, and which wait (pure).
//!
//! Each slot belongs to one of two classes and is shared by several permits; one limit bounds all permits.
//! Requests beyond it wait. A released permit goes to the oldest waiter, high priority first.
//!
//! | a waiter is | left by |
//! |---|---|
//! | waiting | a permit, the end of all slots, being closed, its drop |
//! | called: a permit is counted as taken for it | taking it; its drop, which passes it on |
//!
//! # Invariants
//! 1. At most `limit` permits are taken (`never_more_than_the_limit`).
//! 2. Somebody waits only while the limit is reached (`nobody_waits_beside_a_free_permit`).
//! 3. Within a class requests are admitted in FIFO order
//!    (`first_come_first_served_within_a_class`).
//! 4. After [`OVERTAKES`] of high priority in a row, one of normal priority is admitted, if one waits
//!    (`high_priority_does_not_starve_the_others`).
//! 5. A permit goes to a slot of its class that fewest share (`the_least_loaded_slot_is_taken`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::task::Waker;

/// Requests of high priority that overtake one of normal priority, in a row.
pub(crate) const OVERTAKES: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Normal,
    High,
}

/// What came of asking for admission.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Entered {
    /// A permit on that slot.
    In(usize),
    /// Nothing free: ask with the key.
    Waits(Key),
    /// Too many wait already, or it was not to wait.
    Full,
    /// No slot is left.
    Gone,
    Closed,
}

/// What became of a waiter.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Waited {
    Wait,
    In(usize),
    Gone,
    Closed,
}

/// Names a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(Class, u64);

/// How many may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    Never,
    UpToTheLimit,
    #[cfg(feature = "tower")]
    Always,
}

#[derive(Debug)]
struct PermitSlot {
    class: Class,
    taken: usize,
    usable: bool,
}

#[derive(Debug)]
pub(crate) struct Admission {
    limit: usize,
    max_waiting: usize,
    slots: Vec<PermitSlot>,
    taken: usize,
    /// Who waits, with what wakes them.
    waiting: BTreeMap<Key, Option<Waker>>,
    /// Who was granted a permit on a slot and has not come for it.
    called: BTreeMap<Key, usize>,
    /// Who came to wait, in all: the next key.
    came: u64,
    /// Those of high priority admitted since the last of normal priority, while one of these waited.
    overtaken: u32,
    closed: bool,
    granted: u64,
    refused: u64,
}

impl Admission {
    /// Slots of these classes.
    pub(crate) fn new(
        limit: usize,
        max_waiting: usize,
        slots: impl IntoIterator<Item = Class>,
    ) -> Self {
        let slot = |class| PermitSlot { class, taken: 0, usable: true };
        Admission {
            limit,
            max_waiting,
            slots: slots.into_iter().map(slot).collect(),
            taken: 0,
            waiting: BTreeMap::new(),
            called: BTreeMap::new(),
            came: 0,
            overtaken: 0,
            closed: false,
            granted: 0,
            refused: 0,
        }
    }

    /// Asks for admission.
    pub(crate) fn enter(&mut self, class: Class, patience: Patience) -> Entered {
        if self.closed {
            return Entered::Closed;
        }
        if self.is_gone() {
            return Entered::Gone;
        }
        // A free permit implies an empty queue, so this overtakes no waiter.
        if self.taken < self.limit
            && let Some(slot) = self.give(class)
        {
            return Entered::In(slot);
        }
        let may_wait = match patience {
            Patience::Never => false,
            Patience::UpToTheLimit => self.waiting.len() < self.max_waiting,
            #[cfg(feature = "tower")]
            Patience::Always => true,
        };
        if !may_wait {
            self.refused += 1;
            return Entered::Full;
        }
        let key = Key(class, self.came);
        self.came += 1;
        self.waiting.insert(key, None);
        Entered::Waits(key)
    }

    /// Looks what became of a waiter, and leaves `waker` for it. After any other answer than
    /// [`Waited::Wait`] the key is used up. What else is returned is to be dropped outside of the lock.
    pub(crate) fn poll(&mut self, key: Key, waker: Waker) -> (Waited, Option<Waker>) {
        if let Some(slot) = self.called.remove(&key) {
            return (Waited::In(slot), Some(waker));
        }
        let ended = match (self.closed, self.is_gone()) {
            (true, _) => Waited::Closed,
            (false, true) => Waited::Gone,
            (false, false) => {
                let stale = self.waiting.get_mut(&key).map(|known| known.replace(waker));
                return (Waited::Wait, stale.flatten());
            }
        };
        (ended, self.waiting.remove(&key).flatten())
    }

    /// Removes a waiter whose future is dropped. Returns the waker to wake (a permit already granted to it
    /// goes to the next waiter) and the one to drop, both for after the lock is released.
    pub(crate) fn leave(&mut self, key: Key) -> (Option<Waker>, Option<Waker>) {
        match self.called.remove(&key) {
            Some(slot) => (self.give_back(slot), None),
            None => (None, self.waiting.remove(&key).flatten()),
        }
    }

    /// Takes a permit back; returns the waker of the request that has it now.
    pub(crate) fn give_back(&mut self, slot: usize) -> Option<Waker> {
        self.slots[slot].taken -= 1;
        self.taken -= 1;
        self.admit()
    }

    /// Removes a slot permanently. Returns the wakers to wake: all of them if it was the last slot.
    pub(crate) fn lose(&mut self, slot: usize) -> Vec<Waker> {
        self.slots[slot].usable = false;
        if self.is_gone() { self.wake_all() } else { Vec::new() }
    }

    /// Closes admission. Returns the wakers to wake.
    pub(crate) fn close(&mut self) -> Vec<Waker> {
        self.closed = true;
        self.wake_all()
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    pub(crate) fn max_waiting(&self) -> usize {
        self.max_waiting
    }

    /// Permits taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Permits taken on a slot.
    pub(crate) fn taken_on(&self, slot: usize) -> usize {
        self.slots[slot].taken
    }

    /// How many wait for a permit.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Permits given so far.
    pub(crate) fn granted(&self) -> u64 {
        self.granted
    }

    /// Who was sent away because too many waited.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }

    /// Whether the slot was not taken away.
    pub(crate) fn is_usable(&self, slot: usize) -> bool {
        self.slots[slot].usable
    }

    fn is_gone(&self) -> bool {
        !self.slots.iter().any(|slot| slot.usable)
    }

    fn wake_all(&mut self) -> Vec<Waker> {
        self.waiting.values_mut().filter_map(Option::take).collect()
    }

    /// Admits the next one, if somebody waits.
    fn admit(&mut self) -> Option<Waker> {
        if self.closed || self.taken == self.limit {
            return None;
        }
        let first = |class, end| self.waiting.range(Key(class, 0)..end).next().map(|(key, _)| *key);
        let normal = first(Class::Normal, Key(Class::High, 0));
        let high = first(Class::High, Key(Class::High, u64::MAX));
        let key = match (high, normal) {
            (Some(_), Some(normal)) if self.overtaken == OVERTAKES => normal,
            (Some(high), Some(_)) => {
                self.overtaken += 1;
                high
            }
            (Some(only), None) | (None, Some(only)) => only,
            (None, None) => return None,
        };
        if key.0 == Class::Normal {
            self.overtaken = 0;
        }
        let slot = self.give(key.0)?;
        self.called.insert(key, slot);
        self.waiting.remove(&key).flatten()
    }

    /// Takes a permit on the slot of the class that fewest share, of these the first: a stream that
    /// was used lately has memory to reuse, and is known. Where there is none of the class, any other
    /// will do.
    fn give(&mut self, class: Class) -> Option<usize> {
        let slots = || self.slots.iter().enumerate().filter(|(_, slot)| slot.usable);
        let has_class = slots().any(|(_, slot)| slot.class == class);
        let (slot, _) = slots()
            .filter(|(_, slot)| slot.class == class || !has_class)
            .min_by_key(|(_, slot)| slot.taken)?;
        self.granted += 1;
        self.taken += 1;
        self.slots[slot].taken += 1;
        Some(slot)
    }
}
