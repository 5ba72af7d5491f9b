//! [`Ticket`]: a call that has not ended, and [`Outcome`], how it ended.
#![forbid(unsafe_code)]

use futures::channel::oneshot;

use crate::calls::Terms;
use crate::error::{Error, Result};
use crate::payload::{Input, Payload, Placed};
use crate::room::Room;
use crate::route::goes_on;

/// How a call ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Answered {
        response: Vec<u8>,
        payload: Option<Payload>,
    },
    Failed(Error),
    /// As `Failed`, for a call that its group may send elsewhere.
    Returned(Box<Returned>),
}

/// A call that a worker is done with, and why.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) error: Error,
    pub(crate) request: Vec<u8>,
    pub(crate) payload: Option<Input>,
    /// How often it was sent, to this worker's processes and before.
    pub(crate) sent: u32,
    /// Its room, wherever that is.
    pub(crate) room: Option<Room>,
}

/// A call that has not ended.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) request: Vec<u8>,
    pub(crate) payload: Option<Placed>,
    pub(crate) reply: oneshot::Sender<Outcome>,
    /// How often it was sent, to this worker's processes and before.
    pub(crate) sent: u32,
    pub(crate) terms: Terms,
    /// Its room, unless that is here.
    pub(crate) room: Option<Room>,
}

impl Ticket {
    pub(crate) fn returned(self, error: Error) -> Box<Returned> {
        let Ticket { request, payload, sent, room, .. } = self;
        let payload = payload.map(|payload| match payload {
            Placed::Lease(lease) => Input::Lease(lease),
            Placed::Waits { bytes, .. } => Input::Bytes(bytes),
        });
        Box::new(Returned { error, request, payload, sent, room })
    }

    /// Whether its group sends it elsewhere.
    pub(crate) fn goes_on(&self, error: &Error) -> bool {
        self.terms.is_groups && goes_on(self.terms, error, self.sent).is_some()
    }

    /// Has its group send it elsewhere. Until then it keeps its memory.
    pub(crate) fn send_back(mut self, error: Error) {
        let (closed, _) = oneshot::channel();
        let reply = std::mem::replace(&mut self.reply, closed);
        drop(reply.send(Outcome::Returned(self.returned(error))));
    }
}

/// Waits for something other than a call.
pub(crate) type Waiter = oneshot::Sender<Result<()>>;

/// What a [`Waiter`] waits for. The end of the worker ends all of them, with its error.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    /// The worker serves.
    Serving,
    /// There may be more room for leases.
    Room,
    /// Nothing but its end.
    End,
}
