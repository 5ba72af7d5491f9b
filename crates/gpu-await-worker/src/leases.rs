//! Which parts of a slab of shared memory are in use, and by whom (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `Held` | this side alone has it, and may write it | `send` → `Both`; `give_back` → free |
//! | `Both` | this process of the other side reads it, and this side may need its contents again | `returned` → `Held`; `give_back` → `Sent` |
//! | `Sent` | this process of the other side alone uses it, whether or not somebody waits for the call | `returned` → free |
//!
//! When the process is gone, `Both` is `Held` again and `Sent` is free. The word of another process changes nothing.
//!
//! # Invariants
//! 1. No two leases overlap, and each lies in the slab (`leases_never_overlap`).
//! 2. With nothing in use, all of the slab is one free part (`leases_never_overlap`).
//! 3. A message about a lease that was not sent, or under an earlier number, changes nothing (`stale_leases_change_nothing`).
//! 4. Nothing is free that either side has: a call that is sent again finds its own bytes (`a_retried_call_keeps_its_bytes`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Leases start at multiples of this, which suits GPU copies best.
const ALIGN: u64 = 256;

/// The number of a lease: the process whose slab it is in, a slot, and how often that was used before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct LeaseId {
    incarnation: u32,
    slot: u32,
    generation: u64,
}

/// A part of a slab, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Part {
    /// Whether it lies within a slab of that size, as the other side says.
    pub(crate) fn is_within(self, slab_bytes: u64) -> bool {
        self.offset.checked_add(self.len).is_some_and(|end| end <= slab_bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Free,
    Held,
    Both(u32),
    Sent(u32),
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    holder: Holder,
    part: Part,
}

/// What a message of the other side changed about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Returned {
    /// The other side did not have it.
    Stale,
    /// This side still has it.
    Kept,
    /// It is free.
    Free,
}

/// The leases of one slab.
#[derive(Debug)]
pub(crate) struct Leases {
    incarnation: u32,
    /// Free parts: where they begin, and how long they are. No two touch.
    free: BTreeMap<u64, u64>,
    slots: Vec<Slot>,
    unused: Vec<u32>,
    largest: u64,
}

impl Leases {
    /// Of a slab's bytes from `first` to `end`.
    pub(crate) fn new(incarnation: u32, first: u64, end: u64) -> Self {
        let first = first.next_multiple_of(ALIGN);
        let len = end.saturating_sub(first) / ALIGN * ALIGN;
        let free = BTreeMap::from_iter((len > 0).then_some((first, len)));
        Leases { incarnation, free, slots: Vec::new(), unused: Vec::new(), largest: len }
    }

    /// What an empty slab has room for.
    pub(crate) fn largest(&self) -> u64 {
        self.largest
    }

    /// How many bytes this side has, and how many the other side alone.
    pub(crate) fn used(&self) -> (u64, u64) {
        let bytes = |wanted: fn(Holder) -> bool| {
            let slots = self.slots.iter().filter(|slot| wanted(slot.holder));
            slots.map(|slot| slot.part.len.max(1).next_multiple_of(ALIGN)).sum()
        };
        let here = bytes(|holder| matches!(holder, Holder::Held | Holder::Both(_)));
        (here, bytes(|holder| matches!(holder, Holder::Sent(_))))
    }

    /// Takes a part of `len` bytes, from the smallest free part that is large enough.
    pub(crate) fn take(&mut self, len: u64) -> Option<(LeaseId, Part)> {
        let whole = len.max(1).checked_next_multiple_of(ALIGN)?;
        let fits = self.free.iter().filter(|(_, free)| **free >= whole);
        let (offset, free) = fits.min_by_key(|(_, free)| **free).map(|(at, len)| (*at, *len))?;
        self.free.remove(&offset);
        if free > whole {
            self.free.insert(offset + whole, free - whole);
        }
        let slot = self.unused.pop().unwrap_or_else(|| {
            let part = Part { offset, len };
            self.slots.push(Slot { generation: 0, holder: Holder::Free, part });
            self.slots.len() as u32 - 1
        });
        let entry = &mut self.slots[slot as usize];
        (entry.holder, entry.part) = (Holder::Held, Part { offset, len });
        Some((
            LeaseId { incarnation: self.incarnation, slot, generation: entry.generation },
            entry.part,
        ))
    }

    /// Lets this process of the other side have it as well; false if this side does not have it alone.
    pub(crate) fn send(&mut self, id: LeaseId, to: u32) -> bool {
        match self.slot(id) {
            Some(slot) if slot.holder == Holder::Held => {
                slot.holder = Holder::Both(to);
                true
            }
            _ => false,
        }
    }

    /// This side is done with it; whether it is free now.
    pub(crate) fn give_back(&mut self, id: LeaseId) -> bool {
        match self.slot(id) {
            Some(slot) if slot.holder == Holder::Held => {
                self.free(id.slot);
                true
            }
            Some(slot) => {
                if let Holder::Both(by) = slot.holder {
                    slot.holder = Holder::Sent(by);
                }
                false
            }
            None => false,
        }
    }

    /// The other side is done with it.
    pub(crate) fn returned(&mut self, id: LeaseId, by: u32) -> Returned {
        match self.slot(id) {
            Some(slot) if slot.holder == Holder::Sent(by) => {
                self.free(id.slot);
                Returned::Free
            }
            Some(slot) if slot.holder == Holder::Both(by) => {
                slot.holder = Holder::Held;
                Returned::Kept
            }
            _ => Returned::Stale,
        }
    }

    /// This process of the other side is done with all that it had; whether something is free now.
    pub(crate) fn process_gone(&mut self, process: u32) -> bool {
        let mut freed = false;
        for slot in 0..self.slots.len() {
            match self.slots[slot].holder {
                Holder::Both(by) if by == process => self.slots[slot].holder = Holder::Held,
                Holder::Sent(by) if by == process => {
                    self.free(slot as u32);
                    freed = true;
                }
                _ => {}
            }
        }
        freed
    }

    fn slot(&mut self, id: LeaseId) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        let is_it = id.incarnation == self.incarnation && id.generation == slot.generation;
        (is_it && slot.holder != Holder::Free).then_some(slot)
    }

    fn free(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        slot.holder = Holder::Free;
        slot.generation += 1;
        let Part { mut offset, len } = slot.part;
        let mut len = len.max(1).next_multiple_of(ALIGN);
        self.unused.push(at);
        if let Some(behind) = self.free.remove(&(offset + len)) {
            len += behind;
        }
        let before = self.free.range(..offset).next_back().map(|(at, len)| (*at, *len));
        if let Some((at, before)) = before.filter(|(at, len)| at + len == offset) {
            (offset, len) = (at, before + len);
        }
        self.free.insert(offset, len);
    }
}
