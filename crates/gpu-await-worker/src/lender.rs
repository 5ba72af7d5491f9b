//! [`Lender`]: what rooms and memory go back to.
#![forbid(unsafe_code)]

use std::fmt;

use crate::leases::LeaseId;

/// A worker, as seen by what it lends. Each method takes the worker's lock, and does nothing in a fork.
pub(crate) trait Lender: fmt::Debug + Send + Sync {
    /// Takes memory for a request back.
    fn give_back(&self, id: LeaseId);
    /// Tells the process with that number that it may use the memory of an answer again.
    fn release(&self, incarnation: u32, id: LeaseId);
    /// Takes the room of a call back.
    fn give_back_room(&self);
}
