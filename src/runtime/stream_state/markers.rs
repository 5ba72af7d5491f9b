//! Markers of a stream: placing them, choosing their kind, finding the one for a ticket.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{StreamState, UNKNOWN};
use crate::error::{DriverCode, Result};
use crate::runtime::counted::Length;
use crate::runtime::event_pool::EventHandle;
use crate::runtime::marker::Marker;
use crate::thread::role;
use crate::thread::role::Role;

/// Points behind which an event was recorded, and events to be used again.
#[derive(Default)]
pub(super) struct Markers {
    pub(super) queue: VecDeque<Marker>,
    pub(super) spare: Vec<EventHandle>,
}

impl Length for Markers {
    fn length(&self) -> usize {
        self.queue.len()
    }
}

/// Whether operations that touch buffers are followed by events, so that who depends on one waits for nothing behind it: another stream, or
/// the host that waits for memory ([`expect`](StreamState::expect)).
///
/// | operations followed | until |
/// |---|---|
/// | none, as long as no buffer of the device is used by two streams; then the next [`UNUSED`] | somebody waits for the event of one: so many from there on |
/// | none, as nobody did so | somebody must wait for later work as well: from then on all; also where no buffer is shared |
/// | all | – |
///
/// Threads that race lose at most a change, which a later wait makes up for.
pub(super) struct Followed(AtomicU64);

/// As many as a stream holds before it blocks who submits.
const UNUSED: u64 = 1024;

impl Followed {
    const ALL: u64 = u64::MAX;

    pub(super) fn new() -> Self {
        Followed(AtomicU64::new(UNUSED))
    }

    /// Whether the operation that is submitted is followed.
    #[inline]
    fn next(&self, buffers_are_shared: bool) -> bool {
        // ORDERING: Relaxed, here and below: it only decides for how much later work somebody waits.
        let left = self.0.load(Ordering::Relaxed);
        if left == Followed::ALL {
            return true;
        }
        if left == 0 || !buffers_are_shared {
            return false;
        }
        self.0.store(left - 1, Ordering::Relaxed);
        true
    }

    /// Somebody depends on one ticket, and waits for an event behind another.
    fn waited(&self, depends_on: u64, waits_for: u64) {
        let left = if depends_on == waits_for { UNUSED } else { Followed::ALL };
        self.0.fetch_max(left, Ordering::Relaxed);
    }
}

impl StreamState {
    /// Creates events before they are needed, so that the stream has `least`: beside threads that launch
    /// without a pause the driver may delay that for 100 ms.
    pub(crate) fn stock_events(&self, least: usize) {
        while !self.has_events(least) {
            let Ok(event) = self.engine.event() else { return };
            self.markers.lock().spare.push(event);
        }
    }

    /// An event for a marker. Before one is created, which may take long beside a full queue, the events of
    /// complete work are taken back: a stream that is never awaited is not looked at otherwise.
    pub(super) fn event(&self) -> std::result::Result<EventHandle, DriverCode> {
        let spare = || self.markers.lock().spare.pop();
        if let Some(event) = spare().or_else(|| self.engine.idle_event()) {
            return Ok(event);
        }
        self.ask_quietly();
        spare().map_or_else(|| self.engine.event(), Ok)
    }

    /// Whether the stream has this many events, behind its work or spare.
    pub(crate) fn has_events(&self, least: usize) -> bool {
        let markers = self.markers.read();
        markers.spare.len() + markers.queue.len() >= least
    }

    /// Ensures that at most this many tickets at the tail have no marker at or behind them.
    pub(crate) fn mark_within(&self, tickets: u64) {
        let tail = self.submitted();
        if !self.submission.is_marked(tail.saturating_sub(tickets)) {
            self.want(tail);
        }
    }

    /// The last ticket, with a marker behind it, so that awaiting it does not include later work.
    pub(crate) fn tail(self: &Arc<Self>) -> u64 {
        let tail = self.here();
        self.want(tail);
        tail
    }

    /// The ticket of everything on the stream now. If others put work there, or did so on a loan that ended,
    /// that is a fresh one behind theirs; it blocks while another submitter is in the driver.
    pub(crate) fn here(self: &Arc<Self>) -> u64 {
        self.put_listed(u64::MAX);
        // Where no driver call may be made, the known state must do.
        let silent = self.engine.lost().is_some() || role::current() != Role::Free;
        if silent || !(self.is_shared() || self.sharing.is_owed()) {
            return self.submitted();
        }
        self.with(|turn| {
            // Work that an ended loan left is covered by the turn.
            if turn.stream.is_shared() { turn.publish_empty() } else { turn.stream.submitted() }
        })
    }

    /// Asks for a marker at or behind `ticket`; never blocks. Where no driver call may be made, the
    /// next submitter or the poller's next look places it.
    pub(crate) fn want(&self, ticket: u64) {
        if self.is_complete(ticket) {
            return;
        }
        self.put_listed(ticket);
        if role::may_call_driver() {
            self.submission.want(self, ticket);
        } else {
            self.submission.leave(ticket);
        }
    }

    /// An event at or behind `ticket`, as close behind as there is; places one at the tail if there is
    /// none. `None` if the ticket is complete. Takes the submission lock: not while holding another stream's.
    pub(crate) fn event_behind(self: &Arc<Self>, ticket: u64) -> Result<Option<Marker>> {
        if self.is_complete(ticket) {
            return Ok(None);
        }
        self.put_listed(ticket);
        if let Some(marker) = self.marker_for_others(ticket) {
            return Ok(Some(marker));
        }
        self.with(|turn| turn.place_event()).map_err(|code| self.refused(code))?;
        Ok(self.marker_for_others(ticket))
    }

    /// An event at or behind `ticket`, which may not be issued yet, without blocking; `None` if that cannot
    /// be had, or the ticket is complete.
    pub(crate) fn try_event_behind(self: &Arc<Self>, ticket: u64) -> Option<Marker> {
        self.marker_for_others(ticket).or_else(|| {
            let placed = self.try_with(|turn| {
                if turn.stream.submitted() < ticket {
                    let ticket = turn.next_ticket();
                    turn.publish(ticket, 0, false);
                }
                turn.place_event()
            });
            if placed.is_none() {
                // The lock's holder, or the ticket's submitter, serves this.
                self.want(ticket);
            }
            self.marker_for_others(ticket)
        })
    }

    /// Whether the operation that is submitted, which touches buffers, is followed by an event.
    pub(super) fn is_next_followed(&self) -> bool {
        self.followed.next(self.engine.is_exact())
    }

    /// The host will wait for `ticket`, which nobody held when later work was submitted.
    pub(crate) fn expect(&self, ticket: u64) {
        let tail = self.submitted();
        self.want(ticket);
        if !self.is_complete(ticket) {
            let marked = self.marker_behind(ticket).map_or(tail, |marker| marker.ticket);
            self.followed.waited(ticket, marked);
        }
    }

    /// An event at or behind `ticket`, if there is one, for another stream to wait for.
    pub(super) fn marker_for_others(&self, ticket: u64) -> Option<Marker> {
        self.marker_behind(ticket).inspect(|marker| self.followed.waited(ticket, marker.ticket))
    }

    /// Whether a word is the better marker. It is read without entering the driver, but takes longer to submit, threads that
    /// submit words delay one another, and streams that share a hardware queue wait for it: only for short work with few
    /// waiters. And never after a refused one, whose write may come late: it could not be told from the next.
    pub(super) fn prefers_words(&self) -> bool {
        let engine = &self.engine;
        // ORDERING: Relaxed, here and below: changed under the submission lock, which the caller has; a guess.
        self.told.load(Ordering::Relaxed) != UNKNOWN
            && (engine.options.completion.always_words()
                || (!self.is_shared()
                    && self.pace.is_short.load(Ordering::Relaxed)
                    && engine.checkers.held(self.looked_at()) <= 1))
    }

    pub(super) fn marker_behind(&self, ticket: u64) -> Option<Marker> {
        let markers = self.markers.read();
        let index = markers.queue.partition_point(|marker| marker.ticket < ticket);
        markers.queue.get(index).cloned()
    }
}
