//! [`Members`]: the workers of a group, and which of them has a call.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use crate::calls::{Runs, Terms};
use crate::error::{Error, Result};
use crate::inside::{Handle, SentCall};
use crate::payload::Input;
use crate::room::Room;
use crate::route::{Readiness, goes_on, pick};
use crate::ticket::Returned;

/// The workers of a group.
#[derive(Debug)]
pub(crate) struct Members {
    handles: Vec<Arc<Handle>>,
    /// Which of several equal workers is next.
    turn: AtomicUsize,
    moved: AtomicU64,
}

impl Members {
    /// Whether guilty requests are refused.
    pub(crate) fn blames(&self) -> bool {
        self.handles.iter().any(|handle| handle.inside.spec.options.blame.is_some())
    }

    pub(crate) fn new(handles: Vec<Arc<Handle>>) -> Self {
        Members { handles, turn: AtomicUsize::new(0), moved: AtomicU64::new(0) }
    }

    /// How often a call went on to another worker.
    pub(crate) fn moved(&self) -> u64 {
        // ORDERING: Relaxed: a count that orders nothing.
        self.moved.load(Ordering::Relaxed)
    }

    pub(crate) fn handles(&self) -> &[Arc<Handle>] {
        &self.handles
    }

    /// The worker for a call: `own`, if it takes calls at all.
    pub(crate) fn pick(&self, own: Option<usize>) -> usize {
        // ORDERING: Relaxed: a count that orders nothing.
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        pick(self.handles.iter().map(|handle| handle.inside.seen()), turn, own)
    }

    /// Sends a call to the worker that is to have it, or else to the next one.
    pub(crate) fn send(
        &self,
        mut room: Option<Room>,
        mut own: Option<usize>,
        mut request: Vec<u8>,
        mut payload: Option<Input>,
        mut terms: Terms,
    ) -> Result<(Member, SentCall)> {
        // A worker that ended since it was picked is not picked again; if all have ended, the last one says why.
        let mut tries = self.handles.len();
        // To the worker where it has room, if that serves; otherwise the room goes along.
        let has_it = |handle: &Arc<Handle>| {
            room.as_ref().is_some_and(|room| room.is_at(&handle.inside.spec.lender))
        };
        let is_now = |at: &usize| self.handles[*at].inside.seen().ready == Readiness::Now;
        own = own.or(self.handles.iter().position(has_it).filter(is_now));
        loop {
            let at = self.pick(own);
            let handle = &self.handles[at];
            let returned = match handle.submit(request, payload, terms, room) {
                Ok(sent) => return Ok((Member { at, terms }, sent)),
                Err(returned) => *returned,
            };
            let Returned { error, sent, .. } = returned;
            match goes_on(terms, &error, sent).filter(|_| tries > 0) {
                Some(next) => terms = next,
                None => return Err(error),
            }
            (request, payload, room) = (returned.request, returned.payload, returned.room);
            tries -= 1;
        }
    }

    /// Sends a call that came back once more, if it may go on.
    pub(crate) fn send_again(
        &self,
        member: Member,
        returned: Returned,
    ) -> Result<(Member, SentCall)> {
        let Returned { error, request, payload, sent, room } = returned;
        let Some(terms) = goes_on(member.terms, &error, sent) else { return Err(error) };
        let terms = Terms { was_admitted: true, ..terms };
        if terms.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(Error::Deadline);
        }
        let own = (terms.runs != Runs::Anywhere).then_some(member.at);
        let sent = self.send(room, own, request, payload, terms);
        if sent.as_ref().is_ok_and(|(next, _)| next.at != member.at) {
            // ORDERING: Relaxed: a count that orders nothing.
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        sent.map_err(|refused| match (error, refused) {
            // The call was made, whatever keeps it from being made again.
            (
                Error::Lost(lost),
                Error::Overloaded { .. } | Error::GivenUp { .. } | Error::Closed,
            ) => Error::Lost(lost),
            (_, refused) => refused,
        })
    }
}

/// Which worker of a group has a call, and on which terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub(crate) at: usize,
    pub(crate) terms: Terms,
}
