//! [`After`]: work deferred until a worker's lock is released, because it runs foreign code: wakers, payload drops, subscribers.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures::channel::oneshot;

use crate::codec;
use crate::error::Result;
use crate::payload::Payload;
use crate::process::Process;
use crate::room::{Given, Room};
use crate::supervisor;
use crate::ticket::{Outcome, Ticket, Waiter};

/// Receives a timeline: `None` if no process serves.
pub(crate) type Reader = oneshot::Sender<Result<Option<Timeline>>>;

/// A complete timeline: several readers each copy it, outside the lock.
pub(crate) type Timeline = Arc<Vec<u8>>;

/// Work to do once the lock is released.
#[derive(Default)]
#[must_use]
pub(crate) struct After {
    pub(crate) ended: Vec<(Ticket, Outcome)>,
    pub(crate) waiters: Vec<(Waiter, Result<()>)>,
    pub(crate) given: Vec<Given>,
    pub(crate) rooms: Vec<Room>,
    pub(crate) readers: Vec<(Reader, Result<Option<Timeline>>)>,
    pub(crate) payloads: Vec<Payload>,
    pub(crate) dropped: Vec<Ticket>,
    /// Processes that were reaped.
    pub(crate) gone: Vec<Process>,
    pub(crate) events: Vec<Box<dyn FnOnce() + Send>>,
    /// The supervisor has to wake: there is work it does not know of.
    pub(crate) wake: bool,
}

impl After {
    /// Ends a call.
    pub(crate) fn end(&mut self, ticket: Ticket, outcome: Outcome) {
        self.ended.push((ticket, outcome));
    }

    /// Queues an event for `tracing` subscribers.
    pub(crate) fn log(&mut self, event: impl FnOnce() + Send + 'static) {
        self.events.push(Box::new(event));
    }

    pub(crate) fn run(self) {
        // Any of these may panic, and none may keep the others from running.
        for (ticket, outcome) in self.ended {
            let outcome = match outcome {
                Outcome::Failed(error) if ticket.goes_on(&error) => {
                    contain(|| ticket.send_back(error));
                    continue;
                }
                outcome => outcome,
            };
            let Ticket { request, payload, reply, room, .. } = ticket;
            // The payload first: a caller that has the answer may count on its memory and its room being free.
            contain(|| drop((request, payload, room)));
            contain(|| drop(reply.send(outcome)));
        }
        for (waiter, result) in self.waiters {
            contain(|| drop(waiter.send(result)));
        }
        for (reader, timeline) in self.readers {
            contain(|| drop(reader.send(timeline)));
        }
        self.given.into_iter().for_each(|given| contain(|| given.wake()));
        self.rooms.into_iter().for_each(|room| contain(|| drop(room)));
        self.payloads.into_iter().for_each(|payload| contain(|| drop(payload)));
        self.dropped.into_iter().for_each(|ticket| contain(|| drop(ticket)));
        supervisor::free(self.gone);
        self.events.into_iter().for_each(contain);
        if self.wake {
            supervisor::wake();
        }
    }
}

/// Runs foreign code and contains its panics.
fn contain(code: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(code)) {
        drop(codec::panic_text(panic));
    }
}
