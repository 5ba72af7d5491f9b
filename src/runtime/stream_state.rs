//! One stream, as the completion engine sees it.
//!
//! [`StreamState`] ties the pure parts to a driver stream: the timeline, the submission lock, the markers on it, its waiters, and the host
//! memory lent to it.
//!
//! | who | does | through | in |
//! |---|---|---|---|
//! | a submitter | takes the lock, issues a ticket, makes driver calls | [`StreamState::with`] | [`submitter`] |
//! | a future | looks, yields, registers | [`StreamState::poll_ticket`] | [`poll`] |
//! | anybody | queries the driver, raises `completed`, wakes | [`StreamState::sweep`] | [`look`] |
//! | the poller | looks when the work may be complete | [`StreamState::visit`] | [`visit`] |
//! | a drop | caches the memory for the stream, frees it in stream order, or defers it | [`StreamState::free_in_order`] | [`freed`] |
//! | an allocation | reuses memory that the stream freed | [`FreedMemory::reuse`], [`StreamState::take_freed`] | [`freed`] |
//!
//! Locks, in the order in which they may be held together: submission lock, then one of those of `markers`, `lent` and `memory`; then the device's account. The lock of `queue` is never held with another.

mod for_others;
mod foreign;
mod freed;
mod handle;
mod lent;
mod listed;
mod look;
mod markers;
mod opening;
mod pace;
mod poll;
mod submitter;
mod visit;

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;

use gpu_await_protocol::sync::Mutex;

use self::freed::FreedMemory;
pub(crate) use self::handle::{OfStream, StreamHandle};
use self::lent::LentQueue;
pub(crate) use self::lent::{Callback, Payload};
pub(crate) use self::listed::Listed;
use self::markers::Markers;
use self::pace::Pace;
pub(crate) use self::poll::WaitState;
pub(crate) use self::submitter::Turn;
use self::submitter::{Announced, Submitter};
use super::engine::Engine;
use super::partitions::Share;
use super::progress::Progress;
use super::words::Word;
use crate::backend::{RawStream, StreamOptions};
use crate::error::{DriverCode, Error, Result};
use crate::memory::reclaim::retired::Remnant;
use crate::thread::{contain, locks, role};
use gpu_await_protocol::sharing::Sharing;
use gpu_await_protocol::submission::SubmissionLock;
use gpu_await_protocol::timeline::Timeline;
use gpu_await_protocol::wait_queue::WaitQueue;

/// Events that a new stream has.
const EVENTS_IN_STOCK: usize = 8;

pub(crate) struct StreamState {
    progress: Arc<Progress<StreamState>>,
    engine: Arc<Engine<StreamState>>,
    raw: RawStream,
    /// The options of its driver stream.
    options: StreamOptions,
    /// The multiprocessors that it is confined to.
    partition: Option<Arc<Share>>,
    /// That the driver knows its context no more, of a stream that others made.
    detached: OnceLock<Error>,
    name: Option<Box<str>>,
    /// The driver stream is ours to destroy.
    owned: bool,
    /// The owner of an adopted stream, if there is one.
    owner: Option<Owner>,
    sharing: Sharing,
    /// Another library's last calls took long, or there were none.
    foreign_takes_long: AtomicBool,
    submission: SubmissionLock<Submitter>,
    markers: Markers,
    waiters: WaitQueue<Waker>,
    lent: LentQueue,
    memory: FreedMemory,
    /// The last handle is gone: nothing more is put on it.
    deserted: AtomicBool,
    pace: Pace,
    announced: Announced,
    /// Tickets that wait, with all behind them, for another device: for a stream of it, or for one of this
    /// device that does.
    foreign: Mutex<Vec<(u64, Point)>>,
}

/// A point on a stream of this device or another.
type Point = gpu_await_protocol::point::Point<Arc<Progress<StreamState>>>;

/// The owner of an adopted stream.
pub(crate) type Owner = Box<dyn Any + Send + Sync>;

/// Whose the driver stream is.
enum Origin {
    Ours(Option<Arc<Share>>),
    /// Adopted from another library, which puts work on it as well.
    Shared(Option<Owner>, Option<Arc<Share>>),
    /// The engine's.
    Engine,
}

impl StreamState {
    fn over(
        engine: &Arc<Engine<StreamState>>,
        raw: RawStream,
        options: StreamOptions,
        name: Option<Box<str>>,
        word: Option<Word>,
        origin: Origin,
    ) -> Arc<StreamHandle> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (owned, shared, owner, partition) = match origin {
            Origin::Ours(partition) => (true, false, None, partition),
            Origin::Shared(owner, partition) => (false, true, owner, partition),
            Origin::Engine => (false, false, None, engine.partition.clone()),
        };
        // ORDERING: Relaxed: only uniqueness matters.
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let progress = |stream: &Weak<StreamState>| Progress {
            id,
            timeline: Timeline::new(),
            device: engine.state.clone(),
            stream: stream.clone(),
            waits_for_others: AtomicBool::new(false),
            stuck: OnceLock::new(),
        };
        let stream = Arc::new_cyclic(|this| StreamState {
            progress: Arc::new(progress(this)),
            engine: engine.clone(),
            raw,
            options,
            partition,
            detached: OnceLock::new(),
            name,
            sharing: Sharing::new(shared),
            foreign_takes_long: AtomicBool::new(true),
            owned,
            owner,
            submission: SubmissionLock::new(Submitter::new()),
            markers: Markers::new(word),
            waiters: WaitQueue::new(),
            lent: LentQueue::default(),
            memory: FreedMemory::new(engine.options.block_cache_bytes),
            deserted: AtomicBool::new(false),
            pace: Pace::default(),
            announced: Announced::default(),
            foreign: Mutex::default(),
        });
        engine.add_stream(&stream);
        StreamHandle::new(stream)
    }

    pub(crate) fn id(&self) -> u64 {
        self.progress.id
    }

    pub(crate) fn engine(&self) -> &Arc<Engine<StreamState>> {
        &self.engine
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.raw
    }

    /// The options of its driver stream; see [`is_blocking`](Self::is_blocking) for the driver's answer.
    pub(crate) fn options(&self) -> StreamOptions {
        self.options
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Which others put work on the stream.
    #[inline]
    pub(crate) fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    #[inline]
    fn is_shared(&self) -> bool {
        self.sharing.is_shared()
    }

    /// Whether the calls of another library are expected to take long: as the last time, or for the first time.
    pub(crate) fn foreign_takes_long(&self) -> bool {
        // ORDERING: Relaxed, here and below: a guess.
        self.foreign_takes_long.load(Ordering::Relaxed)
    }

    /// Records whether another library's calls took long.
    pub(crate) fn foreign_took_long(&self, long: bool) {
        self.foreign_takes_long.store(long, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn submitted(&self) -> u64 {
        self.progress.timeline.submitted()
    }

    pub(crate) fn completed(&self) -> u64 {
        self.progress.timeline.completed()
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.progress.timeline.in_flight()
    }

    pub(crate) fn is_complete(&self, ticket: u64) -> bool {
        self.progress.timeline.is_complete(ticket)
    }

    /// The part that users keep, which may outlive the stream.
    pub(crate) fn progress(&self) -> &Arc<Progress<StreamState>> {
        &self.progress
    }

    /// Ticket `ticket` of this stream.
    #[inline]
    pub(crate) fn point(&self, ticket: u64) -> Point {
        Point { stream: self.progress.clone(), ticket }
    }

    /// Drops a future's interest in a marker of its own.
    pub(crate) fn release(&self, ticket: u64) {
        self.progress.release(ticket);
    }

    /// The futures that wait.
    pub(crate) fn waiters(&self) -> &WaitQueue<Waker> {
        &self.waiters
    }

    /// What a submitter announces to threads without its lock.
    #[inline]
    pub(crate) fn announced(&self) -> &Announced {
        &self.announced
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

    /// Takes a ticket behind all work on the device, other libraries' included, and returns it; `None` if the
    /// driver cannot do that. Only on a stream that has no other tickets: each of its markers then covers
    /// everything that the one before covered.
    pub(crate) fn mark_everything(self: &Arc<Self>) -> Result<Option<u64>> {
        const NOT_SUPPORTED: i32 = 801;
        let engine = &self.engine;
        let event = engine.event().map_err(|code| engine.refused(code))?;
        // Their last handles are not dropped under the lock.
        let streams = engine.streams();
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
                ticket: other.submitted(),
                stream: other.clone(),
            };
            self.waits_for(ticket, others.map(on));
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
        self.id() == other.id()
    }
}

impl std::fmt::Debug for StreamState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.name {
            Some(name) => write!(f, "stream {} \"{name}\" of {}", self.id(), self.engine.label()),
            None => write!(f, "stream {} of {}", self.id(), self.engine.label()),
        }
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        locks::assert_none("a stream's state");
        self.end();
        if self.is_deserted()
            && let Some(share) = self.partition.take()
        {
            share.stream_ended();
        }
        // Last: `close` waits for a stream that is registered and has no owner, which frees what it has.
        self.engine.remove_stream(self.id());
    }
}

impl StreamState {
    /// Lets go of everything that it has; for its drop.
    fn end(&mut self) {
        let engine = self.engine.clone();
        if let Some(word) = self.markers.take_word() {
            engine.words.take_back(word, || {
                let may_ask = role::may_call_driver() && !crate::thread::exit::begun();
                may_ask && self.is_through() == Ok(true)
            });
        }
        if let Some(owner) = self.owner.take() {
            engine.drop_later(owner);
        }
        let stuck = self.is_stuck();
        if stuck && self.owned {
            engine.give_up_stream();
        }
        // Waiters are left only if nothing will ever complete them: they look again, and get an error.
        for waker in self.waiters.close() {
            engine.state.ready_tasks.enter();
            contain::wake(waker);
        }
        self.markers.clear(self.progress.timeline.completed());
        let lost = engine.lost().is_some();
        if lost || stuck {
            // Lent while the device was being lost: the device may not have stopped.
            self.lent.quarantine(&engine);
        }
        if lost {
            let left = self.take_left().into_iter().map(Remnant::from);
            return left.for_each(|what| engine.free_now(what));
        }
        if crate::thread::exit::begun() {
            return;
        }
        // Any are left only when nothing steps the device any more.
        self.lent.give_up(&engine);
        // So that an allocation finds it.
        for block in self.take_left() {
            engine.retire_block(&self.progress, block);
        }
        let Some(raw) = self.owned.then_some(self.raw) else { return };
        let keeper = engine.clone();
        engine.act(move || {
            // SAFETY: `open` made the driver stream, and nothing else refers to it.
            if unsafe { keeper.backend.stream_destroy(raw) }.is_err() {
                keeper.count_unreturned();
            }
        });
    }
}
