//! A stream's timeline: tickets issued, tickets complete; and points on it, each one of its tickets (pure).
//!
//! Operations take consecutive tickets under the stream's submission lock. `completed` only rises; operation *n* is complete ⇔ `completed ≥
//! n`. A lost device is a state *beside* the timeline, never a value of it.
//!
//! Every wait is for [points](Point): that of an operation, an allocation's next user, an event, another stream.
//!
//! | word | set by | read by |
//! |---|---|---|
//! | `submitted` | the holder of the submission lock | all threads |
//! | `completed`, and whether a ticket was given up | a thread that saw a marker complete, or that gives up | all threads |
//! | `given_up`, the first such ticket | a thread that gives up; under its lock, as is the mark of it in `completed` | a thread that saw a marker complete, by that mark |
//! | `held` | the submitter (its ticket), the ticket's `Op` (back to none) | the next submitter |
//!
//! # Invariants
//! 1. `completed` never falls and never exceeds a ticket whose marker was seen complete (`completed_only_rises`).
//! 2. `held` names the tail or nothing: an older ticket's `Op` cannot clear a newer one's (`an_older_op_cannot_release_the_tail`).
//! 3. A thread that sees a ticket complete also sees it submitted (`what_is_in_flight_is_never_negative`).
//! 4. A ticket that was reported as never completing never does (`a_ticket_is_complete_or_given_up`).
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::wait_queue::LossFlag;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Set in `completed`: that does not rise as far as to `given_up`.
const GIVEN_UP: u64 = 1 << 63;

/// The end of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It is complete.
    Complete,
    /// It is not known to be, and its device is lost.
    Lost,
}

/// Tickets of one stream.
#[derive(Debug)]
pub struct Timeline {
    submitted: AtomicU64,
    completed: AtomicU64,
    held: AtomicU64,
    given_up: Mutex<u64>,
}

impl Timeline {
    /// No ticket was issued.
    #[inline]
    pub fn new() -> Self {
        Timeline {
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            held: AtomicU64::new(0),
            given_up: Mutex::new(u64::MAX),
        }
    }

    /// The last ticket handed out.
    #[inline]
    pub fn submitted(&self) -> u64 {
        // ORDERING: Acquire pairs with `publish`: a thread that sees ticket n sees its bookkeeping.
        self.submitted.load(Ordering::Acquire)
    }

    /// The highest ticket known to be complete.
    #[inline]
    pub fn completed(&self) -> u64 {
        // ORDERING: Acquire pairs with `complete`: the device's writes before the marker was seen are visible
        // to a reader of this value.
        self.completed.load(Ordering::Acquire) & !GIVEN_UP
    }

    /// How many tickets are not known to be complete.
    #[inline]
    pub fn in_flight(&self) -> u64 {
        // In this order: a ticket is published before it is complete, so the second value read is not less.
        // In the other order, others may submit and complete in between.
        let completed = self.completed();
        self.submitted() - completed
    }

    /// Whether that ticket is complete.
    #[inline]
    pub fn is_complete(&self, ticket: u64) -> bool {
        self.completed() >= ticket
    }

    /// The end of that ticket; `None` while it is pending. Work that completed before the loss is complete.
    #[inline]
    pub fn ended(&self, ticket: u64, loss: &LossFlag) -> Option<Ended> {
        if self.is_complete(ticket) {
            return Some(Ended::Complete);
        }
        let end = || if self.is_complete(ticket) { Ended::Complete } else { Ended::Lost };
        loss.is_set().then(end)
    }

    /// Publishes `ticket` as the tail, with an `Op` that still observes it. Only under the
    /// submission lock.
    #[inline]
    pub fn publish(&self, ticket: u64) {
        // ORDERING: Relaxed, because `held` is only compared with the tail under the lock that
        // orders it, and cleared by the ticket's own `Op`, which is made after this.
        self.held.store(ticket, Ordering::Relaxed);
        // ORDERING: Release pairs with `submitted`.
        self.submitted.store(ticket, Ordering::Release);
    }

    /// Drops interest in `ticket`: it needs no marker of its own.
    #[inline]
    pub fn release(&self, ticket: u64) {
        // ORDERING: Relaxed on both sides: a submitter that misses this places one marker more.
        let _ = self.held.compare_exchange(ticket, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The tail, if an `Op` still observes it.
    #[inline]
    pub fn held(&self) -> Option<u64> {
        // ORDERING: Relaxed, see `release`.
        Some(self.held.load(Ordering::Relaxed)).filter(|ticket| *ticket != 0)
    }

    /// Raises `completed` to `ticket`, or to the last one in front of those that were [given up](Self::give_up); true if that changed
    /// anything.
    #[inline]
    pub fn complete(&self, ticket: u64) -> bool {
        // ORDERING: Relaxed: only where the loop begins.
        self.raise(self.completed.load(Ordering::Relaxed), ticket)
    }

    /// Numbers with the mark are larger than all without.
    #[inline]
    fn raise(&self, mut known: u64, ticket: u64) -> bool {
        // Not `fetch_max`, which compiles to this loop on x86: ThreadSanitizer does not instrument it, and
        // reports a race between the work that is complete and its reader.
        while known < ticket {
            // ORDERING: Release publishes what the marker proved; Acquire joins the earlier raiser's
            // release sequence, so that a reader of the larger value sees both. Relaxed where another
            // thread was quicker: only the loop's next attempt uses what it reads.
            let (set, fetch) = (Ordering::AcqRel, Ordering::Relaxed);
            match self.completed.compare_exchange(known, ticket, set, fetch) {
                Ok(_) => return true,
                Err(newer) => known = newer,
            }
        }
        known >= GIVEN_UP && ticket < GIVEN_UP && self.raise_in_front(known, ticket)
    }

    #[cold]
    fn raise_in_front(&self, known: u64, ticket: u64) -> bool {
        // A thread that gives up holds this lock until the ticket is stored.
        let given_up = self.given_up.lock();
        self.raise(known, ticket.min(*given_up - 1) | GIVEN_UP)
    }

    /// Declares that `ticket`, with all behind it, will never be complete, whatever a marker says from now on; false if it is.
    #[cold]
    pub fn give_up(&self, ticket: u64) -> bool {
        let mut given_up = self.given_up.lock();
        let marked = |known| (known & !GIVEN_UP < ticket).then_some(known | GIVEN_UP);
        // ORDERING: as in `complete`. Acquire where the ticket is complete: as in `completed`.
        let is_given_up =
            self.completed.fetch_update(Ordering::AcqRel, Ordering::Acquire, marked).is_ok();
        if is_given_up {
            *given_up = ticket.min(*given_up);
        }
        is_given_up
    }
}

/// A stream, as far as a point needs to know it: the stream itself, or its progress.
pub trait Track {
    /// Names the stream.
    fn id(&self) -> u64;
    /// Whether `ticket` is known to be complete: later work then waits for nothing.
    fn is_complete(&self, ticket: u64) -> bool;
}

impl<S: Track + ?Sized> Track for Arc<S> {
    fn id(&self) -> u64 {
        S::id(self)
    }

    fn is_complete(&self, ticket: u64) -> bool {
        S::is_complete(self, ticket)
    }
}

/// A point on a stream: complete when the stream has reached the end of the operation with that ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Point<S> {
    /// The stream.
    pub stream: S,
    /// The operation.
    pub ticket: u64,
}

impl<S: Track> Point<S> {
    /// Whether it is known to be complete.
    #[inline]
    pub fn is_complete(&self) -> bool {
        self.stream.is_complete(self.ticket)
    }
}
