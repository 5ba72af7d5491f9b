//! Who is let in, to which seat, and who waits (pure).
//!
//! There are seats of two classes, each shared by several, and a limit over all. Who comes when the
//! limit is reached waits; a place that comes back goes to whoever waits longest, the urgent in front
//! of the others.
//!
//! | a waiter is | left by |
//! |---|---|
//! | waiting | a place, the end of all seats, being closed, its drop |
//! | called: a place is counted as taken for it | taking it; its drop, which passes it on |
//!
//! # Invariants
//! 1. At most `limit` places are taken (`never_more_than_the_limit`).
//! 2. Somebody waits only while the limit is reached (`nobody_waits_beside_a_free_place`).
//! 3. Within a class the first to come is the first to be let in
//!    (`first_come_first_served_within_a_class`).
//! 4. After [`OVERTAKES`] urgent ones in a row, one that is not goes in, if one waits
//!    (`the_urgent_do_not_starve_the_others`).
//! 5. A place goes to a seat of its class that fewest share (`the_least_loaded_seat_is_taken`).
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::task::Waker;

/// Urgent ones that go in front of one that is not, in a row.
pub(crate) const OVERTAKES: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Normal,
    Urgent,
}

/// What came of asking to be let in.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Entered {
    /// A place on that seat.
    In(usize),
    /// Nothing free: ask with the key.
    Waits(Key),
    /// Too many wait already, or it was not to wait.
    Full,
    /// No seat is left.
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
struct Seat {
    class: Class,
    taken: usize,
    usable: bool,
}

#[derive(Debug)]
pub(crate) struct Admission {
    limit: usize,
    max_waiting: usize,
    seats: Vec<Seat>,
    taken: usize,
    /// Who waits, with what wakes them.
    waiting: BTreeMap<Key, Option<Waker>>,
    /// Who was granted a place on a seat and has not come for it.
    called: BTreeMap<Key, usize>,
    /// Who came to wait, in all: the next key.
    came: u64,
    /// Urgent ones let in since the last one that is not, while one waited.
    overtaken: u32,
    closed: bool,
    granted: u64,
    refused: u64,
}

impl Admission {
    /// Seats of these classes.
    pub(crate) fn new(
        limit: usize,
        max_waiting: usize,
        seats: impl IntoIterator<Item = Class>,
    ) -> Self {
        let seat = |class| Seat { class, taken: 0, usable: true };
        Admission {
            limit,
            max_waiting,
            seats: seats.into_iter().map(seat).collect(),
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

    /// Asks to be let in.
    pub(crate) fn enter(&mut self, class: Class, patience: Patience) -> Entered {
        if self.closed {
            return Entered::Closed;
        }
        if self.is_gone() {
            return Entered::Gone;
        }
        // If there is a place nobody waits, so nobody is overtaken.
        if self.taken < self.limit
            && let Some(seat) = self.give(class)
        {
            return Entered::In(seat);
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
        if let Some(seat) = self.called.remove(&key) {
            return (Waited::In(seat), Some(waker));
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

    /// Forgets a waiter, which is dropped. A place that it was granted goes to the next, who is to be
    /// woken; the second waker is to be dropped. Both outside of the lock.
    pub(crate) fn leave(&mut self, key: Key) -> (Option<Waker>, Option<Waker>) {
        match self.called.remove(&key) {
            Some(seat) => (self.give_back(seat), None),
            None => (None, self.waiting.remove(&key).flatten()),
        }
    }

    /// Takes a place back; who got it is to be woken.
    pub(crate) fn give_back(&mut self, seat: usize) -> Option<Waker> {
        self.seats[seat].taken -= 1;
        self.taken -= 1;
        self.admit()
    }

    /// Takes a seat away for good. Returns whom to wake: everybody if it was the last.
    pub(crate) fn lose(&mut self, seat: usize) -> Vec<Waker> {
        self.seats[seat].usable = false;
        if self.is_gone() { self.wake_all() } else { Vec::new() }
    }

    /// Lets nobody in any more. Returns whom to wake.
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

    /// Places taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Places taken on a seat.
    pub(crate) fn taken_on(&self, seat: usize) -> usize {
        self.seats[seat].taken
    }

    /// How many wait for a place.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Places given so far.
    pub(crate) fn granted(&self) -> u64 {
        self.granted
    }

    /// Who was sent away because too many waited.
    pub(crate) fn refused(&self) -> u64 {
        self.refused
    }

    /// Whether the seat was not taken away.
    pub(crate) fn is_usable(&self, seat: usize) -> bool {
        self.seats[seat].usable
    }

    fn is_gone(&self) -> bool {
        !self.seats.iter().any(|seat| seat.usable)
    }

    fn wake_all(&mut self) -> Vec<Waker> {
        self.waiting.values_mut().filter_map(Option::take).collect()
    }

    /// Lets the next one in, if somebody waits.
    fn admit(&mut self) -> Option<Waker> {
        if self.closed || self.taken == self.limit {
            return None;
        }
        let first = |class, end| self.waiting.range(Key(class, 0)..end).next().map(|(key, _)| *key);
        let normal = first(Class::Normal, Key(Class::Urgent, 0));
        let urgent = first(Class::Urgent, Key(Class::Urgent, u64::MAX));
        let key = match (urgent, normal) {
            (Some(_), Some(normal)) if self.overtaken == OVERTAKES => normal,
            (Some(urgent), Some(_)) => {
                self.overtaken += 1;
                urgent
            }
            (Some(only), None) | (None, Some(only)) => only,
            (None, None) => return None,
        };
        if key.0 == Class::Normal {
            self.overtaken = 0;
        }
        let seat = self.give(key.0)?;
        self.called.insert(key, seat);
        self.waiting.remove(&key).flatten()
    }

    /// Takes a place on the seat of the class that fewest share, of these the first: a stream that
    /// was used lately has memory to reuse, and is known. Where there is none of the class, any other
    /// will do.
    fn give(&mut self, class: Class) -> Option<usize> {
        let seats = || self.seats.iter().enumerate().filter(|(_, seat)| seat.usable);
        let has_class = seats().any(|(_, seat)| seat.class == class);
        let (seat, _) = seats()
            .filter(|(_, seat)| seat.class == class || !has_class)
            .min_by_key(|(_, seat)| seat.taken)?;
        self.granted += 1;
        self.taken += 1;
        self.seats[seat].taken += 1;
        Some(seat)
    }
}
