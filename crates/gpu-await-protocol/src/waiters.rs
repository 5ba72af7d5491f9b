//! Who waits for which ticket of a stream (pure).
//!
//! A waiter has a slot for as long as its `Op` waits; each poll replaces a waker that would not wake the polling task. A heap orders the
//! slots by ticket, so that a sweep touches only waiters whose ticket is complete. An abandoned slot leaves a stale heap entry, which is
//! dropped when it reaches the top, or when stale entries outnumber the live ones.
//!
//! No foreign code is called here: wakers are returned to the caller, which wakes or drops them after unlocking.
#![forbid(unsafe_code)]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slab::Slab;

/// A waiter's slot; good for one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaiterKey {
    slot: u32,
    generation: u32,
}

/// Wakers by the tickets that they wait for.
#[derive(Debug)]
pub struct Waiters<W> {
    slots: Slab<Slot<W>>,
    due: BinaryHeap<Reverse<(u64, u32, u32)>>,
    generation: u32,
}

#[derive(Debug)]
struct Slot<W> {
    generation: u32,
    /// `None` while it is borrowed.
    waker: Option<W>,
}

impl<W> Waiters<W> {
    /// No waiters.
    #[inline]
    pub fn new() -> Self {
        Waiters { slots: Slab::new(), due: BinaryHeap::new(), generation: 0 }
    }

    /// How many wait.
    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// How many entries the heap has, stale ones included.
    #[inline]
    pub fn entries(&self) -> usize {
        self.due.len()
    }

    /// Adds a waiter for `ticket`.
    #[inline]
    pub fn insert(&mut self, ticket: u64, waker: W) -> WaiterKey {
        if self.due.len() > 2 * self.slots.len() + 64 {
            let slots = &self.slots;
            self.due.retain(|Reverse((_, slot, generation))| is_live(slots, *slot, *generation));
        }
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let index = self.slots.insert(Slot { generation, waker: Some(waker) });
        let slot = u32::try_from(index).unwrap_or(u32::MAX);
        self.due.push(Reverse((ticket, slot, generation)));
        WaiterKey { slot, generation }
    }

    /// The waker of a waiter that was not taken; `Some(None)` while it is borrowed.
    #[inline]
    pub fn waker(&mut self, key: WaiterKey) -> Option<Option<&W>> {
        self.slot(key).map(|slot| slot.waker.as_ref())
    }

    /// Stores a new waker of a waiter that was not taken, and returns the old one, for the caller to drop
    /// after it unlocked; otherwise returns `fresh`.
    #[inline]
    pub fn replace(&mut self, key: WaiterKey, fresh: W) -> Result<Option<W>, W> {
        match self.slot(key) {
            Some(slot) => Ok(slot.waker.replace(fresh)),
            None => Err(fresh),
        }
    }

    /// Borrows the waker of the waiter with the lowest ticket, which stays a waiter.
    #[must_use = "a waker that was borrowed must be returned"]
    #[inline]
    pub fn borrow_first(&mut self) -> Option<(WaiterKey, W)> {
        self.next_due()?;
        let Reverse((_, slot, generation)) = self.due.peek().copied()?;
        let key = WaiterKey { slot, generation };
        Some((key, self.slot(key)?.waker.take()?))
    }

    /// Puts a borrowed waker back; returns it if its waiter was taken meanwhile, and must be woken, or has
    /// another waker.
    #[inline]
    pub fn return_borrowed(&mut self, key: WaiterKey, waker: W) -> Result<(), W> {
        match self.slot(key) {
            Some(slot) if slot.waker.is_none() => {
                slot.waker = Some(waker);
                Ok(())
            }
            _ => Err(waker),
        }
    }

    #[inline]
    fn slot(&mut self, key: WaiterKey) -> Option<&mut Slot<W>> {
        self.slots.get_mut(key.slot as usize).filter(|slot| slot.generation == key.generation)
    }

    /// Forgets a waiter that was not taken; the caller drops the waker, which may be borrowed, after it
    /// unlocked.
    #[must_use = "dropping a waker is foreign code: do it after unlocking"]
    #[inline]
    pub fn remove(&mut self, key: WaiterKey) -> Option<Option<W>> {
        if !is_live(&self.slots, key.slot, key.generation) {
            return None;
        }
        let waker = self.slots.remove(key.slot as usize).waker;
        // A task that finds its own work complete is usually first: this keeps stale entries from piling up behind it.
        self.next_due();
        Some(waker)
    }

    /// Takes one waiter whose ticket is at most `completed`, with the ticket. Waiters whose waker is borrowed are
    /// taken as well: the borrower wakes them.
    #[must_use = "a waiter that was taken must be woken"]
    #[inline]
    pub fn pop_due(&mut self, completed: u64) -> Option<(u64, W)> {
        while let Some(Reverse((ticket, slot, generation))) = self.due.peek().copied() {
            if ticket > completed {
                return None;
            }
            self.due.pop();
            if is_live(&self.slots, slot, generation)
                && let Some(waker) = self.slots.remove(slot as usize).waker
            {
                return Some((ticket, waker));
            }
        }
        None
    }

    /// The lowest ticket that is waited for.
    #[inline]
    pub fn next_due(&mut self) -> Option<u64> {
        while let Some(Reverse((ticket, slot, generation))) = self.due.peek().copied() {
            if is_live(&self.slots, slot, generation) {
                return Some(ticket);
            }
            self.due.pop();
        }
        None
    }
}

#[inline]
fn is_live<W>(slots: &Slab<Slot<W>>, slot: u32, generation: u32) -> bool {
    slots.get(slot as usize).is_some_and(|s| s.generation == generation)
}
