//! A list of operations that have a ticket and are not submitted to the driver yet.
//!
//! | the stream's list | left by |
//! |---|---|
//! | none | its first operation, which opens it with the stream's next ticket |
//! | open | the end of its owner's closure, which takes it |
//! | open | anybody that takes the next ticket or waits for this one, and so puts the list on the stream as it is |
//! | put on the stream by another thread | its owner, which fetches it |
//!
//! More operations of the owner join the open list, under the same ticket.
//!
//! # Invariants
//! 1. The ticket of an open list is the next one: no other ticket is issued before the list is on the stream
//!    ([`Turn::next_ticket`](super::Turn::next_ticket)).
//! 2. Anybody that waits for the ticket puts the list on the stream first, wherever its owner is (`what_waits_in_the_middle_gets_it`).
//! 3. The values that a list keeps are dropped by its owner, outside of the lock.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use super::StreamState;
use crate::thread::role;

/// Whose list it is: an address of the owner's.
pub(crate) type ListOwner = usize;

pub(super) struct Lists<L: ?Sized> {
    pub(super) open: Option<(ListOwner, Box<L>)>,
    /// Put on the stream by others than their owners.
    pub(super) put: Vec<(ListOwner, Box<L>)>,
}

impl<L: ?Sized> Lists<L> {
    pub(super) const fn new() -> Self {
        Lists { open: None, put: Vec::new() }
    }

    pub(super) fn is_open_for(&self, owner: ListOwner) -> bool {
        self.open.as_ref().is_some_and(|(known, _)| *known == owner)
    }

    /// Takes the first of the owner's lists that another thread put on the stream.
    pub(super) fn fetch(&mut self, owner: ListOwner) -> Option<Box<L>> {
        let at = self.put.iter().position(|(known, _)| *known == owner)?;
        Some(self.put.remove(at).1)
    }
}

impl StreamState {
    /// Whether a list is open, or was a moment ago.
    #[inline]
    pub(crate) fn has_list(&self) -> bool {
        self.listed.load(Ordering::SeqCst) != 0
    }

    /// Puts the open list on the stream, if it has this ticket or one in front of it.
    #[inline]
    pub(super) fn put_listed(&self, ticket: u64) {
        if ticket > self.submitted() {
            self.put_listed_now(ticket);
        }
    }

    #[cold]
    fn put_listed_now(&self, ticket: u64) {
        let listed = self.listed.load(Ordering::SeqCst);
        if listed != 0 && listed <= ticket && role::may_call_driver() {
            // Absent if the stream is being dropped.
            if let Some(stream) = self.progress.stream() {
                stream.with(|turn| turn.put_list());
            }
        }
    }
}
