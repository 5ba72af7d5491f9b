//! A submitter's turn: what it may do while it holds the submission lock.
//!
//! It may open a list: operations that have a ticket and are not submitted to the driver yet.
//!
//! | the stream's list | left by |
//! |---|---|
//! | none | its first operation, which opens it with the stream's next ticket |
//! | open | the end of its owner's closure, which takes it |
//! | open | any thread that takes the next ticket or waits for this one, and so puts the list on the stream as it is |
//! | put on the stream by another thread | its owner, which fetches it |
//!
//! More operations of the owner join the open list, under the same ticket.
//!
//! # Invariants
//! 1. The ticket of an open list is the next one: no other ticket is issued before the list is on the stream
//!    ([`Turn::next_ticket`]).
//! 2. A thread that waits for the ticket puts the list on the stream first, wherever its owner is (`what_waits_in_the_middle_gets_it`).
//! 3. The values that a list keeps are dropped by its owner, outside of the lock.
//!
//! More than 500 lines: the methods of a turn.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::InOrder;
use super::{Payload, Point, StreamState};
use crate::error::DriverCode;
use crate::memory::reclaim::retired::Block;
use crate::runtime::event_pool::{EventHandle, Marker};
use crate::runtime::progress::Progress;
use crate::thread::role;
use gpu_await_protocol::cadence;
use gpu_await_protocol::submission::{Locked, Markable};
use gpu_await_protocol::timeline::Timeline;

/// How many streams a stream remembers having waited for: others come and go while it lives.
const REMEMBERED: usize = 64;

/// Commands from one entry of [`Submitter::sent_at`] to the next.
const STEP: u64 = 64;

/// Entries that a stream remembers.
const STEPS: usize = 32;

/// The state that the submission lock protects.
pub(crate) struct Submitter {
    /// Commands so far, without event records and waits: those take no room in the stream's queue.
    sent: u64,
    /// `sent` when the last marker was placed.
    sent_at_mark: u64,
    /// `sent` at some tickets, a [`STEP`] apart: bounds the number of commands that the stream may hold.
    sent_at: VecDeque<(u64, u64)>,
    /// `sent` at which the next entry is made.
    next_step: u64,
    /// `sent` at a ticket that is complete.
    done: u64,
    /// `sent` when the driver was last asked how far the stream is, because it may be crowded.
    asked_at: u64,
    /// Whether an operation since the last event touched buffers.
    pub(crate) touched: bool,
    /// The last few other streams that this one waits for, and up to which ticket.
    waited: VecDeque<(u64, u64)>,
    lists: Lists,
}

impl Markable for Submitter {
    type Context = StreamState;

    fn timeline(stream: &StreamState) -> &Timeline {
        &stream.progress.timeline
    }

    fn mark_tail(&mut self, stream: &StreamState, tail: u64) -> bool {
        let word = stream.markers.word.as_ref();
        let word = word.filter(|word| word.is_usable() && stream.prefers_words());
        let placed = match word {
            // SAFETY: the driver stream is this one's, the word is its own until the stream is gone
            // and the last value was seen.
            Some(word) => word.tell(tail, |address| unsafe {
                stream.engine.backend.write_word(stream.driver.raw, address, tail)
            }),
            None => self.record_event(stream, tail),
        };
        if let Err(code) = placed {
            stream.refused(code);
            return false;
        }
        self.sent_at_mark = self.sent;
        true
    }
}

impl Submitter {
    pub(super) fn new() -> Self {
        Submitter {
            sent: 0,
            sent_at_mark: 0,
            sent_at: VecDeque::with_capacity(STEPS),
            next_step: STEP,
            done: 0,
            asked_at: 0,
            touched: false,
            waited: VecDeque::new(),
            lists: Lists::default(),
        }
    }

    /// Whether `commands` more might find the stream's queue full and block the thread. Counts everything not
    /// known to be complete.
    #[inline]
    pub(super) fn is_crowded(&mut self, stream: &StreamState, commands: u32) -> bool {
        self.sent - self.done + u64::from(commands) > cadence::CROWDED
            && self.is_still_crowded(stream, commands)
    }

    #[cold]
    fn is_still_crowded(&mut self, stream: &StreamState, commands: u32) -> bool {
        // A stream that is never awaited is not looked at otherwise.
        if self.sent - self.asked_at >= STEP {
            self.asked_at = self.sent;
            stream.ask_quietly();
        }
        let completed = stream.progress.timeline.completed();
        while self.sent_at.front().is_some_and(|(ticket, _)| *ticket <= completed) {
            self.pass_step();
        }
        let crowded = self.sent - self.done + u64::from(commands) > cadence::CROWDED;
        if crowded && let Err(code) = stream.engine.pools.stock_events() {
            // While a full queue blocks this thread the driver creates no events for others.
            stream.engine.refused(code);
        }
        crowded
    }

    /// Counts the commands of a ticket.
    #[inline]
    fn count(&mut self, ticket: u64, commands: u32) {
        self.sent += u64::from(commands);
        if self.sent >= self.next_step {
            self.step(ticket);
        }
    }

    #[cold]
    fn step(&mut self, ticket: u64) {
        self.next_step = self.sent + STEP;
        if self.sent_at.len() == STEPS {
            // It is complete, or the queue would not have had room for the others.
            self.pass_step();
        }
        self.sent_at.push_back((ticket, self.sent));
    }

    fn pass_step(&mut self) {
        if let Some((_, sent)) = self.sent_at.pop_front() {
            self.done = sent;
        }
    }

    /// Records an event behind ticket `tail` and enters it as a marker.
    fn record_event(
        &mut self,
        stream: &StreamState,
        tail: u64,
    ) -> std::result::Result<(), DriverCode> {
        let event = stream.event()?;
        // SAFETY: the driver stream is this one's; the event is pooled, so nothing is pending on it.
        let recorded =
            unsafe { stream.engine.backend.event_record(event.raw(), stream.driver.raw) };
        if let Err(code) = recorded {
            // It may have been recorded all the same: never to be lent again.
            event.spoil();
            return Err(code);
        }
        self.enter(stream, tail, event);
        Ok(())
    }

    fn enter(&mut self, stream: &StreamState, ticket: u64, event: EventHandle) {
        self.touched = false;
        stream.markers.enter(Marker { ticket, event });
    }
}

/// What a submitter announces to threads without its lock.
#[derive(Default)]
pub(crate) struct Announced {
    /// The ticket of the open list; 0 if there is none.
    list: AtomicU64,
    /// The last ticket whose driver calls were expected to block the thread.
    blocks_at: AtomicU64,
}

impl Announced {
    /// Announces a list that is open under this ticket; 0: none is open.
    pub(super) fn list(&self, ticket: u64) {
        self.list.store(ticket, Ordering::SeqCst);
    }

    /// Whether a list is open, or was a moment ago.
    #[inline]
    pub(crate) fn has_list(&self) -> bool {
        self.list.load(Ordering::SeqCst) != 0
    }

    /// Whether a list is open under this ticket, or an earlier one.
    pub(super) fn has_list_within(&self, ticket: u64) -> bool {
        let list = self.list.load(Ordering::SeqCst);
        list != 0 && list <= ticket
    }

    fn block_at(&self, ticket: u64) {
        // ORDERING: Relaxed, here and below: a hint, see `may_sit_in_driver`.
        self.blocks_at.store(ticket, Ordering::Relaxed);
    }

    /// Whether the driver calls of a ticket behind this one may block their thread.
    pub(super) fn may_block_behind(&self, ticket: u64) -> bool {
        self.blocks_at.load(Ordering::Relaxed) > ticket
    }
}

/// Identifies a list's owner by an address.
pub(crate) type ListOwner = usize;

/// Operations in their order, under one ticket.
pub(crate) trait Listed: Any + Send {
    /// Makes their driver calls; returns how many. The list remembers refusals.
    fn put(&mut self, turn: &mut Turn<'_, '_>) -> u32;
}

/// The lists of a stream, under its submission lock.
#[derive(Default)]
struct Lists {
    open: Option<(ListOwner, Box<dyn Listed>)>,
    /// Put on the stream by others than their owners.
    put: Vec<(ListOwner, Box<dyn Listed>)>,
}

/// A stream's submission lock, held: the submitter's interface.
pub(crate) struct Turn<'t, 'l> {
    pub(crate) stream: &'t Arc<StreamState>,
    pub(super) locked: &'t mut Locked<'l, Submitter>,
}

impl Turn<'_, '_> {
    /// The ticket of the operation about to be submitted, behind any open list. If an `Op` still observes the tail, its
    /// marker goes in front of this one.
    #[inline]
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.put_list();
        let tail = self.stream.progress.timeline.submitted();
        if self.stream.progress.timeline.held() == Some(tail) {
            self.mark_tail();
        }
        tail + 1
    }

    /// Publishes `ticket` after its driver calls; `touched` says that it used buffers.
    #[inline(always)]
    pub(crate) fn publish(&mut self, ticket: u64, commands: u32, touched: bool) {
        self.stream.progress.timeline.publish(ticket);
        self.locked.state.count(ticket, commands);
        self.locked.state.touched |= touched;
        if self.stream.driver.sharing.is_shared()
            || (touched
                && self.stream.markers.is_next_followed(self.stream.engine.registry.is_exact()))
        {
            if let Err(code) = self.place_event_behind(ticket) {
                self.stream.refused(code);
            }
        } else if self.locked.state.sent - self.locked.state.sent_at_mark >= cadence::MARK_EVERY {
            self.mark_tail();
        }
    }

    /// Publishes a ticket without commands, behind everything that is on the stream.
    pub(super) fn publish_empty(&mut self) -> u64 {
        let ticket = self.next_ticket();
        self.publish_nothing(ticket);
        ticket
    }

    /// Publishes `ticket`, which put nothing on the stream for a launch to follow.
    pub(crate) fn publish_nothing(&mut self, ticket: u64) {
        self.stream.overlap.pass_on(ticket);
        self.publish(ticket, 0, false);
    }

    /// Publishes the ticket that is owed for others' work, if they no longer use the stream.
    #[inline]
    pub(super) fn cover_loans(&mut self) {
        if self.stream.driver.sharing.is_owed() {
            self.cover_loans_now();
        }
    }

    #[cold]
    fn cover_loans_now(&mut self) {
        if self.stream.driver.sharing.take_owed() {
            let ticket = self.publish_empty();
            // It is behind others' work.
            self.stream.overlap.demand_full(ticket);
            self.stream.driver.sharing.settle();
            // No `Op` holds the ticket yet.
            self.stream.progress.timeline.release(ticket);
        }
    }

    /// Before driver calls that may block the thread: publishes an event behind everything submitted so far, so that others can wait
    /// for that without this lock.
    #[cold]
    pub(crate) fn expect_to_block(&mut self) {
        self.stream.announced.block_at(self.stream.progress.timeline.submitted() + 1);
        if let Err(code) = self.place_event() {
            self.stream.refused(code);
        }
    }

    /// Whether this many more commands may find the queue full.
    #[inline]
    pub(crate) fn is_crowded(&mut self, commands: u32) -> bool {
        self.locked.state.is_crowded(self.stream, commands)
    }

    /// Before an operation that may be held up by something other than this stream's own work: puts an event
    /// behind the last use of buffers, so that work that depends on it does not wait for the hold-up.
    pub(crate) fn fence_off(&mut self) {
        if self.locked.state.touched {
            // If refused, dependent work waits for longer.
            self.place_event().ok();
        }
    }

    /// Places a marker at the tail unless one is there: an event, which costs least to submit, where
    /// there is a choice.
    pub(crate) fn mark_tail(&mut self) {
        if self.locked.is_marked(self.stream.progress.timeline.submitted()) {
            return;
        }
        let engine = &self.stream.engine;
        if engine.options.completion.always_words() {
            self.locked.mark_tail(self.stream);
        } else if let Err(code) = self.place_event() {
            engine.refused(code);
        }
    }

    /// Places an event at the tail that other streams can wait for.
    pub(crate) fn place_event(&mut self) -> std::result::Result<(), DriverCode> {
        let tail = self.stream.progress.timeline.submitted();
        if self.stream.markers.behind(tail).is_some()
            || self.stream.progress.timeline.is_complete(tail)
        {
            return Ok(());
        }
        self.place_event_behind(tail)
    }

    /// The same behind the tail, which has none and is pending.
    fn place_event_behind(&mut self, tail: u64) -> std::result::Result<(), DriverCode> {
        self.locked.state.record_event(self.stream, tail)?;
        self.locked.state.sent_at_mark = self.locked.state.sent;
        self.locked.publish_mark(tail);
        Ok(())
    }

    /// Enters an event that the caller recorded behind `ticket`, which it published.
    pub(crate) fn enter_event(&mut self, ticket: u64, event: EventHandle) {
        self.locked.state.enter(self.stream, ticket, event);
        self.locked.state.sent_at_mark = self.locked.state.sent;
        self.locked.publish_mark(ticket);
    }

    /// Up to which ticket of another stream this one already waits.
    pub(crate) fn waited_for(&self, other: u64) -> u64 {
        let waited = &self.locked.state.waited;
        waited.iter().find(|(stream, _)| *stream == other).map_or(0, |(_, ticket)| *ticket)
    }

    /// Makes this stream wait, on the device, for a marker of `other`.
    pub(crate) fn wait_for(
        &mut self,
        other: &Arc<Progress<StreamState>>,
        Marker { ticket, event }: &Marker,
    ) -> std::result::Result<(), DriverCode> {
        let backend = &self.stream.engine.backend;
        // The next launch is behind two things.
        self.stream.overlap.demand_full(self.stream.progress.timeline.submitted() + 1);
        // SAFETY: the driver stream is this one's and the handle keeps the event.
        unsafe { backend.stream_wait_event(self.stream.driver.raw, event.raw()) }?;
        if other.device().id != self.stream.engine.state.id || other.waits_for_others() {
            let on = Point { stream: other.clone(), ticket: *ticket };
            self.stream.foreign.add(self.stream.progress.timeline.submitted() + 1, [on]);
        }
        let waited = &mut self.locked.state.waited;
        match waited.iter_mut().find(|(stream, _)| *stream == other.id) {
            Some((_, known)) => *known = (*ticket).max(*known),
            None => {
                // Forgetting one costs another wait, if it is needed again.
                if waited.len() == REMEMBERED {
                    waited.pop_front();
                }
                waited.push_back((other.id, *ticket));
            }
        }
        Ok(())
    }

    /// Lends host memory to the device until `ticket` is complete.
    pub(crate) fn lend(&mut self, ticket: u64, bytes: u64, payload: Payload) {
        self.stream.lent.lend(&self.stream.engine, ticket, bytes, payload);
    }

    /// Frees memory behind everything submitted so far.
    pub(super) fn free(&mut self, block: Block) {
        let Block { ptr, bytes, .. } = block;
        let engine = &self.stream.engine;
        if engine.state.lost().is_some() {
            engine.memory.release(bytes);
            return;
        }
        // SAFETY: the owner gave the memory up; every use of it is on this stream, in front of
        // here, or complete.
        // STREAM: the free runs behind them.
        if let Err(code) = unsafe { engine.backend.free(self.stream.driver.raw, ptr) } {
            engine.leaked(bytes, code);
            return;
        }
        let tail = self.stream.progress.timeline.submitted();
        let (mut ticket, behind) = (tail, tail + 1);
        // On a shared stream the free may be behind others' work, which no earlier ticket covers. With a
        // limit others may have to wait for the free, and for nothing behind it.
        if self.stream.driver.sharing.is_shared() || engine.options.memory_limit.is_some() {
            self.put_list();
            let behind = self.stream.progress.timeline.submitted() + 1;
            self.publish_nothing(behind);
            if let Err(code) = self.place_event() {
                engine.refused(code);
            }
            ticket = behind;
        }
        self.stream.enter_freed(InOrder { bytes, ticket, behind });
    }

    #[inline]
    pub(super) fn free_deferred(&mut self) {
        // A thread that adds one calls the poller, which comes here as well.
        if self.stream.memory.has_deferred() {
            self.free_all_deferred();
        }
    }

    fn free_all_deferred(&mut self) {
        // An allocation, which holds this lock and waits for no stream, finds them in one place or the other.
        let _pressing = self.stream.engine.memory.pressing.lock();
        for block in self.stream.memory.take_all_deferred() {
            self.free(block);
        }
    }

    // ---- lists ------------------------------------------------------------------------------

    /// Opens a list for the owner, which has none, and returns its ticket. Another owner's list is put on the stream.
    pub(crate) fn open_list(
        &mut self,
        owner: ListOwner,
        fresh: impl FnOnce() -> Box<dyn Listed>,
    ) -> u64 {
        let ticket = self.next_ticket();
        self.locked.state.lists.open = Some((owner, fresh()));
        self.stream.announced.list(ticket);
        ticket
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

    /// Publishes the ticket of a list that put this many commands on the stream.
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
        let ticket = self.stream.progress.timeline.submitted() + 1;
        let commands = list.put(self);
        self.publish_list(ticket, commands);
        self.locked.state.lists.put.push((owner, list));
    }
}

impl StreamState {
    /// Puts the open list on the stream, if it has this ticket or an earlier one.
    #[inline]
    pub(super) fn put_listed(&self, ticket: u64) {
        if ticket > self.progress.timeline.submitted() {
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
