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
//!    ([`Turn::next_ticket`]).
//! 2. Anybody that waits for the ticket puts the list on the stream first, wherever its owner is (`what_waits_in_the_middle_gets_it`).
//! 3. The values that a list keeps are dropped by its owner, outside of the lock.
#![forbid(unsafe_code)]

use std::any::Any;

use super::{StreamState, Turn};
use crate::thread::role;

/// Whose list it is: an address of the owner's.
pub(crate) type ListOwner = usize;

/// Operations in their order, under one ticket.
pub(crate) trait Listed: Any + Send {
    /// Makes their driver calls; returns how many. It remembers refusals.
    fn put(&mut self, turn: &mut Turn<'_, '_>) -> u32;
}

/// The lists of a stream, under its submission lock.
#[derive(Default)]
pub(super) struct Lists {
    open: Option<(ListOwner, Box<dyn Listed>)>,
    /// Put on the stream by others than their owners.
    put: Vec<(ListOwner, Box<dyn Listed>)>,
}

impl Turn<'_, '_> {
    /// Ensures that the owner's list is the open one, and returns its ticket.
    pub(crate) fn open_list(
        &mut self,
        owner: ListOwner,
        fresh: impl FnOnce() -> Box<dyn Listed>,
    ) -> u64 {
        if !self.has_list_of(owner) {
            // Puts another's on the stream.
            let ticket = self.next_ticket();
            self.locked.state.lists.open = Some((owner, fresh()));
            self.stream.announced.list(ticket);
        }
        self.stream.submitted() + 1
    }

    /// Whether a list is open.
    #[inline]
    pub(crate) fn has_open_list(&self) -> bool {
        self.locked.state.lists.open.is_some()
    }

    /// Whether the owner's list is the open one.
    pub(crate) fn has_list_of(&self, owner: ListOwner) -> bool {
        let open = &self.locked.state.lists.open;
        open.as_ref().is_some_and(|(known, _)| *known == owner)
    }

    /// The open list.
    pub(crate) fn list(&mut self) -> Option<&mut dyn Listed> {
        self.locked.state.lists.open.as_mut().map(|(_, list)| &mut **list)
    }

    /// Takes the owner's open list, which has the next ticket: the caller publishes that.
    pub(crate) fn take_list(&mut self, owner: ListOwner) -> Option<Box<dyn Listed>> {
        let (_, list) = self.locked.state.lists.open.take_if(|(known, _)| *known == owner)?;
        self.stream.announced.list(0);
        Some(list)
    }

    /// Takes one of the owner's lists that another thread put on the stream.
    pub(crate) fn fetch_list(&mut self, owner: ListOwner) -> Option<Box<dyn Listed>> {
        let put = &mut self.locked.state.lists.put;
        let at = put.iter().position(|(known, _)| *known == owner)?;
        Some(put.remove(at).1)
    }

    /// Puts the open list on the stream, if there is one.
    #[inline]
    pub(crate) fn put_list(&mut self) {
        if self.locked.state.lists.open.is_some() {
            self.put_open_list();
        }
    }

    /// Publishes the ticket of a list, of which so many commands are on the stream.
    pub(crate) fn publish_list(&mut self, ticket: u64, commands: u32) {
        if commands == 0 {
            self.stream.overlap.pass_on(ticket);
        }
        self.publish(ticket, commands, true);
    }

    #[cold]
    fn put_open_list(&mut self) {
        let Some((owner, mut list)) = self.locked.state.lists.open.take() else { return };
        self.stream.announced.list(0);
        let ticket = self.stream.submitted() + 1;
        let commands = list.put(self);
        self.publish_list(ticket, commands);
        self.locked.state.lists.put.push((owner, list));
    }
}

impl StreamState {
    /// Puts the open list on the stream, if it has this ticket or one in front of it.
    #[inline]
    pub(super) fn put_listed(&self, ticket: u64) {
        if ticket > self.submitted() {
            self.put_listed_now(ticket);
        }
    }

    #[cold]
    fn put_listed_now(&self, ticket: u64) {
        if self.announced.has_list_within(ticket) && role::may_call_driver() {
            // Absent if the stream is being dropped.
            if let Some(stream) = self.progress.stream() {
                stream.with(|turn| turn.put_list());
            }
        }
    }
}
