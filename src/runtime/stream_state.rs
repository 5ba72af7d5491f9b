//! One stream, as the completion engine sees it.
//!
//! [`StreamState`] has these parts, each with its own state and methods, and the operations that span several:
//!
//! | part | what it is | in |
//! |---|---|---|
//! | `driver` | the driver's stream, and who owns it | [`driver_stream`] |
//! | `submission`, `announced` | the submission lock, and what its holder announces | [`submitter`] |
//! | `markers` | how the device reports its progress | [`markers`] |
//! | `waiters`, `pace` | the futures that wait, and when to look for them | [`poll`], [`look`] |
//! | `lent` | host memory and values that the device may touch | [`memory`] |
//! | `memory` | device memory that was freed on it | [`memory`] |
//! | `foreign` | what it waits for on other devices | [`foreign`] |
//!
//! | who | does | through | in |
//! |---|---|---|---|
//! | a submitter | takes the lock, issues a ticket, makes driver calls | [`StreamState::with`] | [`submitter`] |
//! | a future | looks, yields, registers | [`StreamState::poll_ticket`] | [`poll`] |
//! | any thread | queries the driver, raises `completed`, wakes | [`StreamState::sweep`] | [`look`] |
//! | the poller | looks when the work may be complete | [`StreamState::visit`] | [`look`] |
//! | a drop | caches the memory for the stream, frees it in stream order, or defers it | [`StreamState::free_in_order`] | [`memory`] |
//! | an allocation | reuses memory that the stream freed | [`FreedMemory::reuse`], [`StreamState::take_freed`] | [`memory`] |
//!
//! | a stream is | until |
//! |---|---|
//! | open: it has a handle | the last handle is dropped; its resources are released then |
//! | deserted, its work pending | the work is complete; the owner of the device's streams keeps it |
//! | gone: its driver stream is destroyed, its owner dropped | |
//!
//! A deserted stream gets no handle again: the rest of its work is looked at and waited for through
//! [`Progress`](crate::runtime::progress::Progress).
//!
//! Locks, in the order in which they may be held together: submission lock, then one of those of `markers`, `lent` and `memory`; then the
//! device's account. The lock of `waiters` is never held with another.

mod driver_stream;
mod foreign;
mod look;
mod markers;
mod memory;
mod opening;
mod poll;
mod submitter;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::Waker;

use self::driver_stream::DriverStream;
pub(crate) use self::driver_stream::Owner;
use self::foreign::ForeignWaits;
use self::look::Pace;
use self::markers::Markers;
pub(crate) use self::memory::{Callback, Payload};
use self::memory::{FreedMemory, LentQueue};
pub(crate) use self::poll::WaitState;
use self::submitter::{Announced, Submitter};
pub(crate) use self::submitter::{Listed, Turn};
use super::engine::{DeviceStream, Engine};
use super::progress::{PointStream, Progress};
use super::weak_list::WeakList;
use crate::error::{DriverCode, Error, Result};
use crate::memory::reclaim::retired::{Block, Remnant};
use crate::thread::{contain, locks, role};
use gpu_await_protocol::overlap::Overlap;
use gpu_await_protocol::submission::SubmissionLock;
use gpu_await_protocol::sync::Mutex;
use gpu_await_protocol::wait_queue::WaitQueue;

pub(crate) struct StreamState {
    /// The part that users keep, which may outlive the stream.
    pub(crate) progress: Arc<Progress<StreamState>>,
    pub(crate) engine: Arc<Engine<StreamState>>,
    pub(crate) driver: DriverStream,
    submission: SubmissionLock<Submitter>,
    pub(crate) markers: Markers,
    pub(crate) waiters: WaitQueue<Waker>,
    lent: LentQueue,
    pub(crate) memory: FreedMemory,
    /// The last handle is gone: nothing more is put on it.
    deserted: AtomicBool,
    pace: Pace,
    pub(crate) announced: Announced,
    pub(crate) foreign: ForeignWaits,
    pub(crate) overlap: Overlap,
}

/// A point on a stream of this device or another.
type Point = gpu_await_protocol::timeline::Point<Arc<Progress<StreamState>>>;

impl StreamState {
    /// Ticket `ticket` of this stream.
    #[inline]
    pub(crate) fn point(&self, ticket: u64) -> Point {
        Point { stream: self.progress.clone(), ticket }
    }

    // ---- submitting -----------------------------------------------------------------------

    /// Runs `f` as the stream's only submitter. Blocks while another one is in the driver.
    #[inline(always)]
    pub(crate) fn with<R>(self: &Arc<Self>, f: impl FnOnce(&mut Turn<'_, '_>) -> R) -> R {
        let result = self.submission.with(self, |locked| {
            let mut turn = Turn { stream: self, locked };
            turn.cover_loans();
            turn.free_deferred();
            f(&mut turn)
        });
        if self.owes() {
            self.see_to_dues();
        }
        if self.markers.are_untidy() {
            self.tidy();
        }
        result
    }

    /// [`with`](Self::with) for a closure that at most adds to a list: it submits nothing, so nothing new is owed.
    #[inline(always)]
    pub(crate) fn with_list<R>(self: &Arc<Self>, f: impl FnOnce(&mut Turn<'_, '_>) -> R) -> R {
        self.submission.with(self, |locked| f(&mut Turn { stream: self, locked }))
    }

    /// Whether memory waits to be taken back or freed, or work that nothing else waits for to end.
    #[inline]
    fn owes(&self) -> bool {
        !self.lent.is_empty()
            || self.memory.has_deferred()
            || (self.is_deserted() && self.progress.timeline.in_flight() > 0)
    }

    /// After a submission: leaves the owed work to the poller. Memory lent during a loss, unseen by `mourn`,
    /// has no other collector: either `mourn` sees it under the lock of `lent`, or the loss is seen here.
    fn see_to_dues(self: &Arc<Self>) {
        if self.engine.state.lost().is_some() {
            self.mourn();
        } else if !self.is_stuck() {
            self.activate();
        }
    }

    /// Takes a ticket behind all work on the device, other libraries' included, and returns it; `None` if the
    /// driver cannot do that. Only on a stream that has no other tickets: each of its markers then covers
    /// everything that the one before covered.
    pub(crate) fn mark_everything(self: &Arc<Self>) -> Result<Option<u64>> {
        const NOT_SUPPORTED: i32 = 801;
        let engine = &self.engine;
        let event = engine.pools.event().map_err(|code| engine.refused(code))?;
        // Their last handles are not dropped under the lock.
        let streams = engine.registry.streams();
        let marked = self.with(|turn| {
            let ticket = turn.next_ticket();
            // SAFETY: the event is pooled, so nothing is pending on it, and the handle keeps it.
            let recorded = unsafe { engine.backend.event_record_all(event.raw()) };
            recorded.inspect_err(|code| {
                if code.code != NOT_SUPPORTED {
                    event.spoil();
                }
            })?;
            self.progress.timeline.publish(ticket);
            turn.enter_event(ticket, event);
            let others = streams.iter().map(|stream| stream.progress());
            let others = others.filter(|other| other.waits_for_others());
            let on = |other: &Arc<Progress<StreamState>>| Point {
                ticket: other.timeline.submitted(),
                stream: other.clone(),
            };
            self.foreign.add(ticket, others.map(on));
            Ok(ticket)
        });
        match marked {
            Ok(ticket) => Ok(Some(ticket)),
            Err(DriverCode { code: NOT_SUPPORTED, .. }) => Ok(None),
            Err(code) => Err(engine.refused(code)),
        }
    }

    /// Like [`with`](Self::with), unless another thread is submitting.
    fn try_with<R>(self: &Arc<Self>, f: impl FnOnce(&mut Turn<'_, '_>) -> R) -> Option<R> {
        self.submission.try_with(self, |locked| f(&mut Turn { stream: self, locked }))
    }
}

impl PartialEq for StreamState {
    fn eq(&self, other: &Self) -> bool {
        self.progress.id == other.progress.id
    }
}

impl fmt::Debug for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.driver.name() {
            Some(name) => {
                write!(f, "stream {} \"{name}\" of {}", self.progress.id, self.engine.label())
            }
            None => write!(f, "stream {} of {}", self.progress.id, self.engine.label()),
        }
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        locks::assert_none("a stream's state");
        self.end();
        self.driver.leave_partition();
        // Last: `close` waits for a registered stream that has no owner to free what it has.
        self.engine.registry.remove(self.progress.id);
    }
}

impl StreamState {
    /// Releases everything that it has; called by its drop.
    fn end(&mut self) {
        let engine = self.engine.clone();
        if let Some(word) = self.markers.word.take() {
            engine.pools.words.take_back(word, || {
                let may_ask = role::may_call_driver() && !crate::thread::exit::begun();
                may_ask && self.driver.is_through(&*engine.backend) == Ok(true)
            });
        }
        if let Some(owner) = self.driver.take_owner() {
            engine.background.drop_later(owner);
        }
        let stuck = self.is_stuck();
        if stuck && self.driver.is_owned() {
            engine.registry.give_up_stream();
        }
        // Waiters are left only if nothing will ever complete them: they look again, and get an error.
        for waker in self.waiters.close() {
            engine.state.ready_tasks.enter();
            contain::wake(waker);
        }
        self.markers.clear(self.progress.timeline.completed());
        // Memory lent while the device was being lost, which may still be running; and what nothing steps any more.
        self.lent.give_up(&engine);
        if engine.state.lost().is_some() {
            let left = self.take_left().into_iter().map(Remnant::from);
            return left.for_each(|what| engine.free_now(what));
        }
        if crate::thread::exit::begun() {
            return;
        }
        // So that an allocation finds it.
        for block in self.take_left() {
            engine.retire_block(&self.progress, block);
        }
        if !self.driver.is_owned() {
            return;
        }
        let raw = self.driver.raw;
        let keeper = engine.clone();
        engine.background.act(move || {
            // SAFETY: `open` made the driver stream, and nothing else refers to it.
            if unsafe { keeper.backend.stream_destroy(raw) }.is_err() {
                keeper.state.count_unreturned();
            }
        });
    }
}

impl PointStream for StreamState {
    fn end_elsewhere(self) {
        self.engine.clone().background.drop_stream(self);
    }

    fn is_settled(&self, ticket: u64) -> bool {
        self.outcome(ticket).is_some()
    }

    fn ask_after(self: &Arc<Self>, ticket: u64) {
        self.want(ticket);
        self.ask_here_or_there();
    }

    fn expect(&self, ticket: u64) {
        let tail = self.progress.timeline.submitted();
        self.want(ticket);
        if !self.progress.timeline.is_complete(ticket) {
            self.markers.expect(ticket, tail);
        }
    }

    fn dependency_lost(&self, ticket: u64) -> Option<Error> {
        self.foreign.dependency_lost(ticket)
    }
}

impl DeviceStream for StreamState {
    fn progress(&self) -> &Arc<Progress<StreamState>> {
        &self.progress
    }

    fn sweep(&self) -> bool {
        StreamState::sweep(self)
    }

    fn mourn(&self) {
        StreamState::mourn(self);
    }

    fn collect_freed(self: &Arc<Self>, mark: bool) {
        StreamState::collect_freed(self);
        if let Some(last) = self.memory.frees_in_order().last().filter(|_| mark) {
            self.want(last.ticket);
        }
        self.see_to_frees();
    }

    fn take_all_kept(&self) -> Vec<Block> {
        self.memory.take_kept(&self.engine.memory.account, u64::MAX, |_| true)
    }

    fn may_sit_in_driver(self: &Arc<Self>) -> bool {
        self.announced.may_block_behind(self.progress.timeline.submitted())
            && self.is_submitted_to()
    }
}

/// An object made for one stream and useless without it, whose owner may hold it for longer: compiled graphs, and the memory
/// they keep.
pub(crate) trait OfStream: Send + Sync {
    /// The stream has no handle any more: releases the object's resources.
    fn stream_is_gone(&self);
}

/// The right to put work on a stream.
pub(crate) struct StreamHandle {
    pub(crate) state: Arc<StreamState>,
    belongings: Mutex<WeakList<dyn OfStream>>,
}

impl StreamHandle {
    fn new(state: Arc<StreamState>) -> Arc<Self> {
        Arc::new(StreamHandle { state, belongings: Mutex::default() })
    }

    /// Registers an object to be released when the stream is gone.
    pub(crate) fn has(&self, belonging: Weak<dyn OfStream>) {
        self.belongings.lock().push(belonging);
    }
}

impl fmt::Debug for StreamHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

impl StreamState {
    /// The last handle is dropped. The owner of the device's streams keeps the stream while its work is
    /// pending, and releases it when it is complete.
    fn desert(self: &Arc<Self>) {
        // ORDERING: SeqCst: pairs with `deactivate`, which stores that it lets go and then reads this; and, with the fence, with a thread
        // that frees memory here through a reference of its own, see `give_back`.
        self.deserted.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.driver.ends();
        // If the poller does not have the stream, this is the last reference.
        if self.has_dues() || self.waiters.is_watched() || self.awaits_its_word() {
            self.activate();
        }
    }

    /// Whether a write of its word may be pending: the poller then keeps the stream until the word's line can be returned. A lost device
    /// keeps its lines.
    fn awaits_its_word(&self) -> bool {
        self.markers.word.as_ref().is_some_and(|word| word.is_late(|| true))
            && self.engine.state.lost().is_none()
            && !self.is_stuck()
    }

    /// Whether it has no handle.
    #[inline]
    pub(crate) fn is_deserted(&self) -> bool {
        // ORDERING: Relaxed: a hint; `deactivate` looks behind a fence, against `desert`.
        self.deserted.load(Ordering::Relaxed)
    }

    /// Whether it has no handle and will make no progress any more.
    pub(crate) fn is_given_up(&self) -> bool {
        self.is_deserted() && self.is_found_stuck()
    }
}

impl Drop for StreamHandle {
    fn drop(&mut self) {
        locks::assert_none("a stream");
        // First: this retires objects behind the stream's work, which is examined next.
        self.belongings.get_mut().alive().iter().for_each(|belonging| belonging.stream_is_gone());
        self.state.desert();
    }
}
