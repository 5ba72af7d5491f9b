//! The waiters of one stream, and how the poller learns of them (pure).
//!
//! Every pending future has an entry here, whatever else it does to be quicker. The entry alone is enough for it to resolve: the thread
//! that finds its ticket complete, or the device lost, takes the entry out and wakes it; until then the poller looks at the stream again
//! and again.
//!
//! | who | steps, in this order | in |
//! |---|---|---|
//! | a future | stores its waker; fence; rereads `completed` and `lost`; asks for a look | [`WaitQueue::register`] |
//! | a thread that raises `completed` or sets `lost` | does so; fence; takes out and wakes the due waiters | [`WaitQueue::settle`], [`LossFlag::tell`] |
//! | the poller, at a stream | takes the requested look; looks; sets the next | [`WaitQueue::begin_look`], [`WaitQueue::look_by`] |
//! | the poller, done with a stream | gives it up; takes it again if a future waits | [`WaitQueue::give_up`] |
//!
//! An entry that was taken out no longer belongs to its future, which registers again when it is polled. A future that is only woken ahead
//! of time keeps its entry. No foreign code runs under the lock: wakers are cloned before it is taken, and woken or dropped after it is
//! released.
//!
//! # Invariants
//! 1. A completion, or a loss, that races with a registration is seen by one of the two (`a_completion_beside_a_registration_wakes_it`,
//!    `a_loss_is_seen_by_who_registers_beside_it`).
//! 2. The poller does not sleep beyond a look that a registrant asked for (`a_registration_is_never_slept_over`), nor give up a stream
//!    while a future registers (`a_stream_given_up_beside_a_registration_comes_back`).
//! 3. A future that is woken ahead of time is woken again when it is due (`who_is_woken_ahead_of_time_is_woken_again`).
//! 4. Each poll replaces a waker that would not wake its task (`each_poll_replaces_the_waker`).
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::waiters::{WaiterKey, Waiters};
use crate::sync::{AtomicBool, AtomicU64, Ordering, Plain, fence};

/// No look is asked for.
pub const NEVER: u64 = u64::MAX;

/// The type stored for a future: `std::task::Waker`, or loom's stand-in for it.
pub trait Wakes: Clone {
    /// Whether both wake the same task.
    fn will_wake(&self, other: &Self) -> bool;
}

impl Wakes for Waker {
    #[inline]
    fn will_wake(&self, other: &Waker) -> bool {
        Waker::will_wake(self, other)
    }
}

/// The waiters of a stream, and when the poller looks at it next.
#[derive(Debug)]
pub struct WaitQueue<W> {
    waiters: Plain<Waiters<W>>,
    /// How many wait: lets a sweep skip the lock.
    ///
    /// ORDERING: Relaxed throughout: stored before the fence in `register`, loaded behind the one in
    /// `settle`, or behind the swap in `give_up`.
    len: AtomicU64,
    /// When the poller looks next on account of a waiter. Doorbells share it.
    next_look: Arc<AtomicU64>,
    /// The poller has the stream.
    watched: AtomicBool,
}

/// The outcome of a registration.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Registered<R> {
    /// Registering was unnecessary: the ticket is complete, or never will be.
    Settled(R),
    /// It is registered, and the poller may have to be told.
    Waiting(Notify),
}

/// The state of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// There was no entry.
    None,
    /// It was taken out, and its task woken.
    Taken,
    /// It exists and wakes another task, or is being woken ahead of time.
    Stale,
    /// It exists and wakes the task: there is nothing to do, since the thread that takes it out wakes it.
    Current,
}

/// How to notify the poller.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the poller must be told"]
pub enum Notify {
    /// The poller does not have the stream: hand it over.
    HandOver,
    /// The poller has the stream, and must not sleep beyond that time.
    Before(u64),
}

impl<W: Wakes> WaitQueue<W> {
    /// No waiters.
    #[inline]
    pub fn new() -> Self {
        WaitQueue {
            waiters: Plain::new(Waiters::new()),
            len: AtomicU64::new(0),
            next_look: Arc::new(AtomicU64::new(NEVER)),
            watched: AtomicBool::new(false),
        }
    }

    /// The state of a future's entry.
    #[inline]
    pub fn entry(&self, key: Option<WaiterKey>, waker: &W) -> Entry {
        let Some(key) = key else { return Entry::None };
        match self.waiters.lock().waker(key) {
            None => Entry::Taken,
            Some(Some(known)) if known.will_wake(waker) => Entry::Current,
            Some(_) => Entry::Stale,
        }
    }

    /// Enters a future that waits for `ticket` and wants the poller to look at `due`, at the latest.
    /// `outcome` is called after that: `None` while the ticket is pending. Otherwise the caller takes the
    /// future out again.
    #[inline]
    pub fn register<R>(
        &self,
        key: &mut Option<WaiterKey>,
        ticket: u64,
        waker: &W,
        due: u64,
        outcome: impl FnOnce() -> Option<R>,
    ) -> Registered<R> {
        let stale = self.enter(key, ticket, waker.clone());
        drop(stale);
        // The store of the waker before the reads, against `settle` and `LossFlag::tell`: without it both
        // sides may miss each other's store.
        fence(Ordering::SeqCst);
        match outcome() {
            Some(outcome) => Registered::Settled(outcome),
            None => Registered::Waiting(self.look_by(due)),
        }
    }

    /// Removes a future's entry; false if it had been taken out.
    #[inline]
    pub fn leave(&self, key: &mut Option<WaiterKey>, let_go: impl FnOnce(Option<W>)) -> bool {
        let Some(key) = key.take() else { return true };
        let removed = {
            let mut waiters = self.waiters.lock();
            let removed = waiters.remove(key);
            self.count(&waiters);
            removed
        };
        let was_there = removed.is_some();
        let_go(removed.flatten());
        was_there
    }

    /// Wakes through `wake` every waiter for a ticket up to `upto()`, with the ticket. Called after `completed` was
    /// raised, or the device was lost: then all are due.
    #[inline]
    pub fn settle(&self, upto: impl Fn() -> u64, mut wake: impl FnMut(u64, W)) {
        // The store read by `upto` comes before the load of `len`, against `register`.
        fence(Ordering::SeqCst);
        while self.is_waited_for() {
            let mut due: SmallVec<[(u64, W); 16]> = SmallVec::new();
            // Not under the lock: it may look at other streams, and drop the last handle of one. A thread
            // that raises `completed` after this settles for itself.
            let upto = upto();
            {
                let mut waiters = self.waiters.lock();
                while due.len() < due.inline_size()
                    && let Some(waiter) = waiters.pop_due(upto)
                {
                    due.push(waiter);
                }
                self.count(&waiters);
            }
            if due.is_empty() {
                return;
            }
            due.into_iter().for_each(|(ticket, waker)| wake(ticket, waker));
        }
    }

    /// Wakes the first waiter early, to check for itself; false if there is none. The waiter stays
    /// registered: it need not check.
    #[inline]
    pub fn wake_first(&self, wake_by_ref: impl Fn(&W)) -> bool {
        let first = self.waiters.lock().borrow_first();
        let Some((key, waker)) = first else { return false };
        wake_by_ref(&waker);
        let returned = self.waiters.lock().return_borrowed(key, waker);
        if let Err(waker) = returned {
            // Taken by a sweep, which could not wake it; or entered again, and this does no harm.
            wake_by_ref(&waker);
        }
        true
    }

    /// The lowest ticket that is waited for.
    #[inline]
    pub fn first(&self) -> Option<u64> {
        self.waiters.lock().next_due()
    }

    /// Whether anything waits.
    #[inline]
    pub fn is_waited_for(&self) -> bool {
        self.len.load(Ordering::Relaxed) > 0
    }

    /// Asks the poller for a look at `due`, at the latest.
    #[inline]
    pub fn look_by(&self, due: u64) -> Notify {
        // ORDERING: Release pairs with `begin_look`: earlier stores are seen by that look.
        self.next_look.fetch_min(due, Ordering::Release);
        if self.hand_over() { Notify::HandOver } else { Notify::Before(due) }
    }

    /// Whether the poller does not have the stream: then the caller hands it over.
    #[must_use = "the stream must be handed over"]
    #[inline]
    pub fn hand_over(&self) -> bool {
        // ORDERING: Release pairs with `give_up`: earlier stores are seen there.
        !self.watched.swap(true, Ordering::Release)
    }

    /// When the poller looks next; [`NEVER`]: not on account of a waiter.
    #[inline]
    pub fn next_look(&self) -> u64 {
        // ORDERING: Relaxed: `begin_look` reads it again.
        self.next_look.load(Ordering::Relaxed)
    }

    /// The time of the next look, which a doorbell shortens.
    #[inline]
    pub fn next_look_cell(&self) -> &Arc<AtomicU64> {
        &self.next_look
    }

    /// The poller begins a look. It covers earlier requests; later requests stay.
    #[inline]
    pub fn begin_look(&self) {
        // ORDERING: Acquire: a read as well, so that stores before `look_by` are seen.
        self.next_look.swap(NEVER, Ordering::Acquire);
    }

    /// The poller sets its next look, unless an earlier one is requested.
    #[inline]
    pub fn look_again(&self, at: u64) {
        // ORDERING: Relaxed: only the poller reads what it stored.
        self.next_look.fetch_min(at, Ordering::Relaxed);
    }

    /// Whether the poller has the stream.
    #[inline]
    pub fn is_watched(&self) -> bool {
        // ORDERING: Relaxed: a hint.
        self.watched.load(Ordering::Relaxed)
    }

    /// The poller gives the stream up, unless it has work after all: then it returns false.
    #[inline]
    pub fn give_up(&self, has_work: impl FnOnce() -> bool) -> bool {
        // ORDERING: Acquire: a read as well, so that the work of a thread that found the stream here is seen.
        // A later thread hands the stream over.
        self.watched.swap(false, Ordering::Acquire);
        !(self.is_waited_for() || has_work()) || !self.hand_over()
    }

    /// The stream goes away: the remaining waiters look again, and get an error.
    #[inline]
    pub fn close(&self) -> Vec<W> {
        let mut waiters = self.waiters.lock();
        std::iter::from_fn(|| waiters.pop_due(u64::MAX)).map(|(_, waker)| waker).collect()
    }

    #[inline]
    fn enter(&self, key: &mut Option<WaiterKey>, ticket: u64, fresh: W) -> Option<W> {
        let mut waiters = self.waiters.lock();
        let fresh = match key {
            Some(key) => match waiters.replace(*key, fresh) {
                Ok(stale) => return stale,
                Err(fresh) => fresh,
            },
            None => fresh,
        };
        *key = Some(waiters.insert(ticket, fresh));
        self.count(&waiters);
        None
    }

    #[inline]
    fn count(&self, waiters: &Waiters<W>) {
        self.len.store(waiters.len() as u64, Ordering::Relaxed);
    }
}

/// Whether a device is lost, and whether the waiters were notified.
#[derive(Debug)]
pub struct LossFlag {
    set: AtomicBool,
    told: AtomicBool,
}

impl LossFlag {
    /// Not lost.
    #[inline]
    pub fn new() -> Self {
        LossFlag { set: AtomicBool::new(false), told: AtomicBool::new(false) }
    }

    /// Declares the loss. The next look [notifies](Self::tell) the waiters.
    #[inline]
    pub fn set(&self) {
        // ORDERING: Release pairs with `is_set`: the cause stored before is seen.
        self.set.store(true, Ordering::Release);
    }

    /// Whether it is lost.
    #[inline]
    pub fn is_set(&self) -> bool {
        // ORDERING: Acquire, see `set`.
        self.set.load(Ordering::Acquire)
    }

    /// Whether the caller is the one that notifies all waiters, by settling every queue of the device: once,
    /// after it was set.
    #[inline]
    pub fn tell(&self) -> bool {
        // ORDERING: Relaxed: one of all callers gets it, each of whom has seen that it is set.
        self.is_set() && !self.told.swap(true, Ordering::Relaxed)
    }
}
