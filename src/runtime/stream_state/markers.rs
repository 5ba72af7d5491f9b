//! Markers of a stream: placing them, choosing their kind, finding the one for a ticket.
//!
//! | a marker is | placed by | read by |
//! |---|---|---|
//! | an event, recorded behind a ticket | [`StreamState::event_behind`] and others, through the submission lock | a query of the driver, by one thread at a time ([`Asking`]) |
//! | the stream's word, which the stream writes | the submission lock's holder, if nobody needs an event | a load |

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await_protocol::sync::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::StreamState;
use crate::backend::{Backend, DriverResult, Query};
use crate::error::{DriverCode, Result};
use crate::runtime::engine::Engine;
use crate::runtime::event_pool::{EventHandle, Marker};
use crate::runtime::words::Word;
use crate::thread::role;
use crate::thread::role::Role;
use gpu_await_protocol::cadence;
use gpu_await_protocol::sweep::SweepGate;
use gpu_await_protocol::timeline::Timeline;

/// Events that a stream keeps for its next markers.
const SPARE_EVENTS: usize = 64;

/// The markers on a stream.
pub(crate) struct Markers {
    events: Counted<PlacedEvents>,
    /// The stream's word, if it has one.
    pub(super) word: Option<Word>,
    followed: Followed,
    /// Lets one thread at a time [ask](Asking::ask).
    gate: SweepGate,
    /// The number of events at which a submitter looks, if nothing waits.
    tidy_from: AtomicU64,
}

/// Points behind which an event was recorded, and spare events.
#[derive(Default)]
struct PlacedEvents {
    queue: VecDeque<Marker>,
    spare: Vec<EventHandle>,
}

impl Length for PlacedEvents {
    fn length(&self) -> usize {
        self.queue.len()
    }
}

/// Whether operations that touch buffers are followed by events, so that a dependent of one waits for nothing behind it: another stream, or the host
/// that waits for memory ([`expect`](Markers::expect)).
///
/// | operations followed | until |
/// |---|---|
/// | none, as long as no buffer of the device is used by two streams; then the next [`UNUSED`] | something waits for the event of one: as many from there on |
/// | none, as nothing did so | something must wait for later work as well: from then on all; also where no buffer is shared |
/// | all | – |
///
/// Threads that race lose at most a change, which a later wait makes up for.
struct Followed(AtomicU64);

/// As many as a stream holds before it blocks its submitter.
const UNUSED: u64 = 1024;

impl Followed {
    const ALL: u64 = u64::MAX;

    fn new() -> Self {
        Followed(AtomicU64::new(UNUSED))
    }

    /// Whether the operation that is submitted is followed.
    #[inline]
    fn next(&self, buffers_are_shared: bool) -> bool {
        // ORDERING: Relaxed, here and below: it only decides how much later work is waited for.
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

    /// Records that a dependent of one ticket waits for an event behind another.
    fn waited(&self, depends_on: u64, waits_for: u64) {
        let left = if depends_on == waits_for { UNUSED } else { Followed::ALL };
        self.0.fetch_max(left, Ordering::Relaxed);
    }
}

impl Markers {
    pub(super) fn new(word: Option<Word>) -> Self {
        Markers {
            events: Counted::default(),
            word,
            followed: Followed::new(),
            gate: SweepGate::new(),
            tidy_from: AtomicU64::new(2 * cadence::MARK_EVERY),
        }
    }

    /// Whether the driver, or the word, could say more than the timeline does.
    #[inline]
    pub(super) fn may_say_more(&self, timeline: &Timeline) -> bool {
        // A thread that waits for a marker sees the new length, see `enter`.
        let says_more = |word: &Word| word.read() > timeline.completed();
        !self.events.is_empty() || self.word.as_ref().is_some_and(says_more)
    }

    /// The first ticket that a marker will say is complete; `None` if there is no marker.
    pub(super) fn next(&self, completed: u64) -> Option<u64> {
        let event = self.events.read().queue.front().map(|marker| marker.ticket);
        let written = self.word.as_ref().and_then(|word| word.will_tell(completed));
        event.into_iter().chain(written).min()
    }

    /// Creates events before they are needed, so that there are `least`: while other threads launch without a pause, the driver may delay that for
    /// 100 ms.
    pub(crate) fn stock_events(&self, engine: &Engine<StreamState>, least: usize) {
        while !self.has_events(least) {
            let Ok(event) = engine.pools.event() else { return };
            self.events.lock().spare.push(event);
        }
    }

    /// Whether there are this many events, behind the stream's work or spare.
    pub(crate) fn has_events(&self, least: usize) -> bool {
        let events = self.events.read();
        events.spare.len() + events.queue.len() >= least
    }

    /// Enters an event that was recorded behind a ticket.
    pub(super) fn enter(&self, marker: Marker) {
        // The submission lock's `publish_mark` releases the new length: a thread that reads its `marked` sees it.
        self.events.lock().queue.push_back(marker);
    }

    /// An event at or behind `ticket`, the closest there is.
    pub(super) fn behind(&self, ticket: u64) -> Option<Marker> {
        let events = self.events.read();
        let index = events.queue.partition_point(|marker| marker.ticket < ticket);
        events.queue.get(index).cloned()
    }

    /// The same, for another stream to wait for.
    fn behind_for_others(&self, ticket: u64) -> Option<Marker> {
        self.behind(ticket).inspect(|marker| self.followed.waited(ticket, marker.ticket))
    }

    /// Called when the host waits for `ticket`, already marked as well as it can be; `tail` was the last ticket when it began to.
    pub(super) fn expect(&self, ticket: u64, tail: u64) {
        let marked = self.behind(ticket).map_or(tail, |marker| marker.ticket);
        self.followed.waited(ticket, marked);
    }

    /// Whether the operation that is submitted, which touches buffers, is followed by an event.
    #[inline]
    pub(super) fn is_next_followed(&self, buffers_are_shared: bool) -> bool {
        self.followed.next(buffers_are_shared)
    }

    /// Whether there are so many events that a submitter looks.
    #[inline]
    pub(super) fn are_untidy(&self) -> bool {
        // ORDERING: Relaxed, here and below: numbers that protect nothing.
        self.events.len() >= self.tidy_from.load(Ordering::Relaxed)
    }

    /// Records a submitter's look: the next is due at twice as many events.
    pub(super) fn tidied(&self) {
        let from = 2 * self.events.len().max(cadence::MARK_EVERY);
        self.tidy_from.store(from, Ordering::Relaxed);
    }

    /// Calls `look`, which may ask, unless another thread does; that one then asks once more.
    #[inline]
    pub(super) fn look(&self, mut look: impl FnMut(Asking<'_>)) {
        self.gate.run(|| look(Asking(self)));
    }

    /// Takes the events of markers that are complete for later ones, or gives them back to the pool.
    fn drop_complete(&self, completed: u64) {
        // Dropped after the lock.
        let mut surplus: SmallVec<[EventHandle; 4]> = SmallVec::new();
        let mut placed = self.events.lock();
        while placed.queue.front().is_some_and(|marker| marker.ticket <= completed) {
            let Some(marker) = placed.queue.pop_front() else { break };
            if marker.event.is_sole() && placed.spare.len() < SPARE_EVENTS {
                placed.spare.push(marker.event);
            } else {
                surplus.push(marker.event);
            }
        }
        drop(placed);
    }

    /// Releases the events before the engine, whose end destroys the pool's.
    pub(super) fn clear(&mut self, completed: u64) {
        let events = self.events.get_mut();
        events.spare.clear();
        for marker in events.queue.drain(..) {
            if marker.ticket > completed {
                // It is still pending: never to be lent again.
                marker.event.spoil();
            }
        }
    }
}

/// The right to ask how far a stream is, which one thread has at a time.
#[derive(Clone, Copy)]
pub(super) struct Asking<'m>(&'m Markers);

impl Asking<'_> {
    /// Has `complete` raise the timeline's `completed` as far as the markers allow; returns the new value, if that changed anything.
    pub(super) fn ask(
        &self,
        timeline: &Timeline,
        backend: &dyn Backend,
        complete: impl FnOnce(u64) -> bool,
    ) -> DriverResult<Option<u64>> {
        let known = timeline.completed();
        let mut completed = self.0.word.as_ref().map_or(known, |word| word.read().max(known));
        // A thread that waits for a marker sees the new length, see `Markers::enter`.
        let found = match self.0.events.is_empty() {
            true => Ok(false),
            false => self.ask_events(&mut completed, backend),
        };
        let moved = completed > known && complete(completed);
        if found? {
            self.0.drop_complete(completed);
        }
        Ok(moved.then(|| timeline.completed()))
    }

    /// Raises `completed` as far as the events allow; whether any is complete.
    ///
    /// The newest is asked first: a pending answer costs an eighth of a complete one, which speaks for all in front of it.
    fn ask_events(&self, completed: &mut u64, backend: &dyn Backend) -> DriverResult<bool> {
        let Asking(markers) = *self;
        // Markers below `done` are complete, those from `pending` on were not.
        let (mut done, mut pending) = (0, usize::MAX);
        let mut back = 1;
        loop {
            let next = {
                let placed = markers.events.read();
                let end = pending.min(placed.queue.len());
                // Ever further back from the newest; between a complete and a pending one, halfway.
                let index =
                    if done > 0 { done + (end - done) / 2 } else { end.saturating_sub(back) };
                let marker = placed.queue.get(index).filter(|_| index < end);
                marker.map(|marker| (index, marker.ticket, marker.event.raw()))
            };
            let Some((index, ticket, event)) = next else { break };
            let answer = if ticket <= *completed {
                // The word said so, or the stream did.
                Query::Complete
            } else {
                // SAFETY: the marker keeps its event, and only this function, one thread at a time,
                // removes markers.
                unsafe { backend.event_query(event) }?
            };
            match answer {
                Query::Complete => {
                    *completed = ticket.max(*completed);
                    done = index + 1;
                    if pending == usize::MAX {
                        break;
                    }
                }
                Query::Pending => {
                    if index == 0 {
                        break;
                    }
                    pending = index;
                    back *= 2;
                }
            }
        }
        Ok(done > 0)
    }
}

impl StreamState {
    /// An event for a marker. Before one is created, which may take long beside a full queue, the events of
    /// complete work are taken back: a stream that is never awaited is not looked at otherwise.
    pub(super) fn event(&self) -> std::result::Result<EventHandle, DriverCode> {
        let spare = || self.markers.events.lock().spare.pop();
        if let Some(event) = spare().or_else(|| self.engine.pools.idle_event()) {
            return Ok(event);
        }
        self.ask_quietly();
        spare().map_or_else(|| self.engine.pools.event(), Ok)
    }

    /// The ticket with `depth` tickets behind it, if it is pending. Ensures that most of the tail is marked, so that the next call
    /// finds a marker at its ticket, and need not wait for later work.
    pub(crate) fn pending_at(&self, depth: u64) -> Option<u64> {
        let tail = self.progress.timeline.submitted();
        if !self.submission.is_marked(tail.saturating_sub(depth / 4)) {
            self.want(tail);
        }
        let in_flight = tail.saturating_sub(self.progress.timeline.completed());
        (in_flight > depth).then(|| tail - depth)
    }

    /// The last ticket, with a marker behind it, so that awaiting it does not include later work.
    pub(crate) fn tail(self: &Arc<Self>) -> u64 {
        let tail = self.here();
        self.want(tail);
        tail
    }

    /// The ticket of everything on the stream now. If others put work there, or did so during a loan that ended, that is a fresh one behind it;
    /// blocks while another submitter is in the driver.
    pub(crate) fn here(self: &Arc<Self>) -> u64 {
        self.put_listed(u64::MAX);
        // Where no driver call may be made, the known state must do.
        let silent = self.engine.state.lost().is_some() || role::current() != Role::Free;
        if silent || !(self.driver.sharing.is_shared() || self.driver.sharing.is_owed()) {
            return self.progress.timeline.submitted();
        }
        self.with(|turn| {
            // The turn covers work that an ended loan left.
            if turn.stream.driver.sharing.is_shared() {
                turn.publish_empty()
            } else {
                turn.stream.progress.timeline.submitted()
            }
        })
    }

    /// Asks for a marker at or behind `ticket`; never blocks. Where no driver call may be made, the
    /// next submitter or the poller's next look places it.
    pub(crate) fn want(&self, ticket: u64) {
        if !self.progress.timeline.is_complete(ticket) {
            self.want_pending(ticket, role::may_call_driver());
        }
    }

    /// The same of a ticket that was pending; `may_ask`: driver calls may be made here.
    #[inline]
    pub(super) fn want_pending(&self, ticket: u64, may_ask: bool) {
        self.put_listed(ticket);
        if may_ask {
            self.submission.want(self, ticket);
        } else {
            self.submission.leave(ticket);
        }
    }

    /// The closest event at or behind `ticket`; places one at the tail if there is none. `None` if the ticket is complete. Takes the submission lock:
    /// not while holding another stream's.
    pub(crate) fn event_behind(self: &Arc<Self>, ticket: u64) -> Result<Option<Marker>> {
        if self.progress.timeline.is_complete(ticket) {
            return Ok(None);
        }
        self.put_listed(ticket);
        if let Some(marker) = self.markers.behind_for_others(ticket) {
            return Ok(Some(marker));
        }
        self.with(|turn| turn.place_event()).map_err(|code| self.refused(code))?;
        Ok(self.markers.behind_for_others(ticket))
    }

    /// An event at or behind `ticket`, which may not be issued yet, without blocking; `None` if that cannot
    /// be had, or the ticket is complete.
    pub(crate) fn try_event_behind(self: &Arc<Self>, ticket: u64) -> Option<Marker> {
        self.markers.behind_for_others(ticket).or_else(|| {
            let placed = self.try_with(|turn| {
                if turn.stream.progress.timeline.submitted() < ticket {
                    let ticket = turn.next_ticket();
                    turn.publish_nothing(ticket);
                }
                turn.place_event()
            });
            if placed.is_none() {
                // The lock's holder, or the ticket's submitter, serves this.
                self.want(ticket);
            }
            self.markers.behind_for_others(ticket)
        })
    }

    /// Whether a word is the better marker. It is read without entering the driver, but takes longer to submit, threads that
    /// submit words delay one another, and streams that share a hardware queue wait for it: only for short work with few
    /// waiters.
    pub(super) fn prefers_words(&self) -> bool {
        let engine = &self.engine;
        engine.options.completion.always_words()
            || (!self.driver.sharing.is_shared()
                && self.pace.is_short()
                && engine.pacing.checkers.held(self.pace.looked_at()) <= 1)
    }
}

/// A collection that has a length.
pub(super) trait Length {
    fn length(&self) -> usize;
}

impl<T> Length for Vec<T> {
    fn length(&self) -> usize {
        self.len()
    }
}

impl<T> Length for VecDeque<T> {
    fn length(&self) -> usize {
        self.len()
    }
}

/// A list behind a lock, whose length can be read without it: most looks at a stream find nothing lent or marked there, and then take no
/// lock.
#[derive(Default)]
pub(super) struct Counted<L> {
    list: Mutex<L>,
    /// Stored under the lock.
    ///
    /// ORDERING: Relaxed throughout: a reader may see an old length. The callers that must not miss an entry
    /// synchronize elsewhere: the submission lock for markers, the call to the poller for the rest.
    length: AtomicU64,
}

impl<L: Length> Counted<L> {
    /// How long it was a moment ago.
    pub(super) fn len(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Locks it for a change.
    pub(super) fn lock(&self) -> Changing<'_, L> {
        Changing { list: self.list.lock(), length: &self.length }
    }

    /// Locks it for reading.
    pub(super) fn read(&self) -> impl Deref<Target = L> {
        self.list.lock()
    }

    pub(super) fn get_mut(&mut self) -> &mut L {
        self.list.get_mut()
    }
}

/// The lock, held.
pub(super) struct Changing<'l, L: Length> {
    list: MutexGuard<'l, L>,
    length: &'l AtomicU64,
}

impl<L: Length> Deref for Changing<'_, L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.list
    }
}

impl<L: Length> DerefMut for Changing<'_, L> {
    fn deref_mut(&mut self) -> &mut L {
        &mut self.list
    }
}

impl<L: Length> Drop for Changing<'_, L> {
    fn drop(&mut self) {
        self.length.store(self.list.length() as u64, Ordering::Relaxed);
    }
}
