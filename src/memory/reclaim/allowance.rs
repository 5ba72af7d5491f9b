//! A budget of device memory, shared by the streams and allocations that draw from it.
//!
//! # Invariants
//! 1. A budget is in the account as long as a handle or an allocation refers to it: no other gets its number (`bytes_of_a_dropped_reservation`).
#![forbid(unsafe_code)]

use std::panic::Location;
use std::sync::Arc;

use crate::error::reservation::ReservationProblem;
use crate::error::{Error, ErrorDetail};
use crate::runtime::Engine;
use crate::thread::contain;

/// A budget, by its number in the account.
pub(crate) struct Allowance {
    engine: Arc<Engine>,
    number: usize,
    made_at: &'static Location<'static>,
}

impl Allowance {
    pub(crate) fn new(
        engine: &Arc<Engine>,
        number: usize,
        made_at: &'static Location<'static>,
    ) -> Arc<Self> {
        Arc::new(Allowance { engine: engine.clone(), number, made_at })
    }

    /// The line that requested it.
    pub(crate) fn made_at(&self) -> &'static Location<'static> {
        self.made_at
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Its size, and how much of that is left.
    pub(crate) fn size_and_left(&self) -> (u64, u64) {
        let account = self.engine.memory.account.lock();
        (account.reservations.size_of(self.number), account.reservations.left_of(self.number))
    }

    /// The error for an allocation of more than is left.
    pub(crate) fn spent(&self, asked_bytes: u64) -> Error {
        let (size_bytes, left_bytes) = self.size_and_left();
        let made_at = self.made_at;
        let problem = ReservationProblem::Spent { size_bytes, left_bytes, made_at };
        refused(&self.engine, asked_bytes, problem)
    }

    /// Makes it smaller and releases the rest to others.
    pub(crate) fn shrink(&self, bytes: u64) {
        self.engine.memory.account.lock().shrink(self.number, bytes);
        self.engine.memory.moved();
    }

    /// Hands it over to another task.
    pub(crate) fn hand_over(&self) {
        let holder = self.engine.memory.account.lock().reservations.hand_over(self.number);
        contain::let_go(holder);
    }
}

impl Drop for Allowance {
    fn drop(&mut self) {
        self.hand_over();
        self.engine.memory.account.lock().reservations.forget(self.number);
    }
}

pub(crate) fn refused(engine: &Engine, asked_bytes: u64, problem: ReservationProblem) -> Error {
    ErrorDetail::Reservation { device: engine.label().to_owned(), asked_bytes, problem }.into()
}
