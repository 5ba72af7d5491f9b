//! [`StreamPool`]: streams for many requests, with a bound on what is in flight.
//!
//! | a permit is | left by |
//! |---|---|
//! | free | [`StreamPool::acquire`] |
//! | held: a [`PooledStream`] is alive, or a clone of its stream | the drop of the last of them |
//! | the device's: it has not finished what was put on the stream | completion, or loss |
//!
//! The pool learns of the end of a device, by its loss or its close, when a request enters or is
//! polled, when a permit is released, and while requests wait from the device's engine, which holds
//! a waker with a [`Weak`] reference to the pool.
//!
//! Who is admitted next is decided in [`admission`](super::admission), how a permit comes back in
//! [`lease`](crate::stream::lease).
//!
//! # Invariants
//! 1. A request that is given up keeps its permit until the device has finished
//!    (`a_permit_is_released_when_the_device_has_finished`).
//! 2. Wakers are woken and dropped outside of the lock
//!    (`a_waker_may_use_the_pool`).
//! 3. The loss or the close of the last device ends every wait, also while all permits are held
//!    (`a_loss_ends_waits_for_held_permits`, `a_close_ends_waits_for_held_permits`), and the devices
//!    do not keep the pool (`a_pool_that_waited_keeps_no_device`).
#![forbid(unsafe_code)]

pub(crate) mod builder;
mod ending;

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use parking_lot::Mutex;

use self::builder::StreamPoolBuilder;
use super::admission::{Admission, Class, Entered, Key, Patience, Waited};
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::coop::Budget;
use crate::stream::lease::{Lease, Permits};
use crate::stream::{MarkList, Marks, Stream, sealed};
use crate::thread::contain;

/// Requests in flight for each stream, unless said otherwise: one on the device, one that is being
/// submitted, and two whose tasks have yet to learn that they are complete.
const IN_FLIGHT_A_STREAM: usize = 4;
/// Requests that may wait for a permit, by default.
const MAX_WAITING: usize = 1024;

/// Streams of one or several devices, lent to requests with a bound on what is in flight.
///
/// A time-out gives a caller its answer back, but the GPU goes on with what it was given: only
/// admission bounds that. [`acquire`](Self::acquire) waits until fewer than
/// [`max_in_flight`](StreamPoolBuilder::max_in_flight) requests are in flight, then hands out the
/// stream that the fewest share. A request is in flight until its [`PooledStream`] is dropped *and* the
/// device is through with everything that was put on the stream through it, also if its futures
/// were dropped long before.
///
/// Streams are shared by several requests at once, so that the device has work while tasks wake up. A GPU
/// runs few streams at once: four to eight for each device are plenty.
///
/// Cheap to clone, `Send + Sync`; the clones are one pool.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::host();
/// let pool = device.streams(4)?;
/// let stream = pool.acquire().await?;                  // waits while the pool is full
/// let x = stream.upload(vec![1.0f32, 2.0]).queued()?;
/// let host = stream.download(&x).await?;
/// drop(stream);                                        // the next may come in
/// assert_eq!(host, [1.0, 2.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct StreamPool {
    shared: Arc<PoolCore>,
}

/// A stream of a [`StreamPool`], and a permit in it.
///
/// It dereferences to [`Stream`], and goes to a kernel's `launch` as it is: `kernel.launch(&stream, ..)`
/// ([`LaunchOn`](crate::LaunchOn)). A clone of that stream holds the permit as well. What is put on the
/// stream by other means (a stream that it was [forked](Stream::fork) into, its raw handle) does
/// not count.
///
/// # Cancel safety
/// Dropped with work pending, the work goes on, and the permit is released when the device has
/// finished it. A leaked one leaks its permit.
pub struct PooledStream {
    stream: Stream,
    waited: Duration,
}

/// Resolves with a stream when there is a permit for the request.
///
/// # Cancel safety
/// Dropped, it leaves the queue; a permit that it was granted goes to the next. Polled first when it
/// is first awaited: that is when it takes its turn in the queue.
///
/// Forgotten (`mem::forget`) while it waits, it keeps its turn, and the permit that it is then granted never
/// comes back: [`drained`](StreamPool::drained) does not resolve, and once no other permit is left, those
/// behind it wait until the pool closes.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Acquire {
    shared: Arc<PoolCore>,
    class: Class,
    patience: Patience,
    state: AcquireState,
    budget: Budget,
}

/// Resolves when nothing is in flight; see [`StreamPool::drained`].
#[must_use = "a future does nothing unless it is awaited"]
pub struct Drained {
    shared: Arc<PoolCore>,
    budget: Budget,
}

/// What a [`StreamPool`] is doing; a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Requests in flight: they hold a stream, or the device is not through with them.
    pub in_flight: usize,
    /// How many may be.
    pub max_in_flight: usize,
    /// Requests that wait for a permit.
    pub waiting: usize,
    /// How many may.
    pub max_waiting: usize,
    /// Requests admitted so far.
    pub granted: u64,
    /// Requests refused so far because the pool was full.
    pub refused: u64,
    /// The streams.
    pub streams: Vec<PooledStreamStats>,
}

/// What a stream of a [`StreamPool`] is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PooledStreamStats {
    /// Its id, unique in the process.
    pub id: u64,
    /// Its device.
    pub device: String,
    /// Its priority; lower numbers go first.
    pub priority: i32,
    /// Whether it is for requests of high priority.
    pub high_priority: bool,
    /// Requests in flight on it.
    pub in_flight: usize,
    /// Operations on it that the device is not known to be through with; after the loss of the device
    /// the last value.
    pub backlog: u64,
}

struct PoolCore {
    slots: Vec<(Stream, Class)>,
    /// The first slot of each device.
    devices: Vec<usize>,
    /// Keys of the wakers with the engine of each of `devices`, from the first wait on.
    watches: OnceLock<Vec<Option<usize>>>,
    book: Mutex<PoolState>,
}

struct PoolState {
    admission: Admission,
    /// Who waits until nothing is in flight.
    draining: Vec<Waker>,
    /// Why the last slot went.
    gone: Option<Error>,
}

enum AcquireState {
    New,
    Waiting { key: Key, since: Instant },
    Done,
}

impl StreamPool {
    /// Makes a pool, options first.
    pub fn builder() -> StreamPoolBuilder {
        StreamPoolBuilder::default()
    }

    /// Waits for a permit and hands out the stream that the fewest requests share. First come, first
    /// served.
    ///
    /// A task that acquires a second permit while it holds one can dead-lock: as many tasks as there are
    /// permits may each hold one and wait for another, for ever. A request that needs more streams takes
    /// one permit and [forks](Stream::fork) its stream, or gives its permit back before it acquires
    /// again; one that must hold two takes the second from another pool, always in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded), at once: the pool is full and
    /// [`max_waiting`](StreamPoolBuilder::max_waiting) requests wait already.
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed): after [`close`](Self::close). The loss or
    /// the [close](crate::Device::close) of the device, when no other is left in the pool; it ends pending
    /// waits as well, even if no permit is ever released.
    /// From the first wait on, idle devices of the pool are asked once a second for that.
    ///
    /// # Cancel safety
    /// Yes: put a time-out around it. Who gives up loses the place in the queue and nothing else. Do not
    /// forget an [`Acquire`] (`mem::forget`): it keeps its turn.
    pub fn acquire(&self) -> Acquire {
        self.enter(Class::Normal, Patience::UpToTheLimit)
    }

    /// Like [`acquire`](Self::acquire), ahead of those who wait there, and on a stream for
    /// requests of high priority if the pool has any: the device prefers what is on these.
    ///
    /// Of those who wait, every ninth to be admitted is one of normal priority, so nobody starves.
    pub fn acquire_high_priority(&self) -> Acquire {
        self.enter(Class::High, Patience::UpToTheLimit)
    }

    /// A stream, if there is a permit right now.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); `Overloaded` also while nobody waits. A device that is gone
    /// is reported rather than `Overloaded`.
    pub fn try_acquire(&self) -> Result<PooledStream> {
        let acquired = self.enter(Class::Normal, Patience::Never).now_or_never();
        acquired.unwrap_or_else(|| unreachable!("who never waits is answered at once"))
    }

    /// Admits no more requests, and ends the waits with an error. What is in flight goes on:
    /// [`drained`](Self::drained) waits for it.
    pub fn close(&self) {
        let wakers = self.shared.book.lock().admission.close();
        wakers.into_iter().for_each(contain::wake);
    }

    /// Resolves when no request is in flight: none holds a stream, and the devices are through with
    /// everything. For a shutdown, behind [`close`](Self::close). A lost device is through with
    /// everything; requests that hold its streams are waited for all the same.
    pub fn drained(&self) -> Drained {
        Drained { shared: self.shared.clone(), budget: Budget::default() }
    }

    /// What the pool is doing, by asking the devices.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let backlogs: Vec<u64> =
            self.shared.slots.iter().map(|(stream, _)| stream.backlog()).collect();
        let book = self.shared.book.lock();
        let admission = &book.admission;
        let stream = |(slot, (stream, class)): (usize, &(Stream, Class))| PooledStreamStats {
            id: stream.id(),
            device: stream.engine().label().to_owned(),
            priority: stream.priority(),
            high_priority: *class == Class::High,
            in_flight: admission.taken_on(slot),
            backlog: backlogs[slot],
        };
        PoolStats {
            in_flight: admission.taken(),
            max_in_flight: admission.limit(),
            waiting: admission.waiting(),
            max_waiting: admission.max_waiting(),
            granted: admission.granted(),
            refused: admission.refused(),
            streams: self.shared.slots.iter().enumerate().map(stream).collect(),
        }
    }

    pub(crate) fn enter(&self, class: Class, patience: Patience) -> Acquire {
        let (shared, budget) = (self.shared.clone(), Budget::default());
        Acquire { shared, class, patience, state: AcquireState::New, budget }
    }
}

impl PooledStream {
    /// How long the request waited for its permit.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Deref for PooledStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl sealed::Sealed for PooledStream {}

impl Marks for PooledStream {
    fn marks(&self) -> Result<MarkList> {
        self.stream.marks()
    }
}

impl Future for Acquire {
    type Output = Result<PooledStream>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut budget = self.budget;
        let polled = budget.poll(cx, |cx| self.poll_permit(cx));
        self.budget = budget;
        polled
    }
}

impl Acquire {
    fn poll_permit(&mut self, cx: &mut Context<'_>) -> Poll<Result<PooledStream>> {
        loop {
            let ended = match self.state {
                AcquireState::New => {
                    let mut book = self.shared.book.lock();
                    let wakers = self.shared.look_after(&mut book);
                    let ended = match book.admission.enter(self.class, self.patience) {
                        Entered::In(slot) => Some(Ok((slot, Duration::ZERO))),
                        Entered::Waits(key) => {
                            self.state = AcquireState::Waiting { key, since: Instant::now() };
                            None
                        }
                        Entered::Full => Some(Err(full(&book.admission))),
                        Entered::Gone => Some(Err(book.gone())),
                        Entered::Closed => Some(Err(closed())),
                    };
                    drop(book);
                    wakers.into_iter().for_each(contain::wake);
                    match ended {
                        Some(ended) => ended,
                        None => {
                            self.shared.watch();
                            continue;
                        }
                    }
                }
                AcquireState::Waiting { key, since } => {
                    // Cloned in front of the lock, dropped behind it: a waker is foreign code.
                    let waker = cx.waker().clone();
                    let mut book = self.shared.book.lock();
                    // Behind the registration: a device that ended in front of it wakes nobody.
                    let wakers = self.shared.look_after(&mut book);
                    let (turn, stale) = book.admission.poll(key, waker);
                    let ended = match turn {
                        Waited::Wait => None,
                        Waited::In(slot) => Some(Ok((slot, since.elapsed()))),
                        Waited::Gone => Some(Err(book.gone())),
                        Waited::Closed => Some(Err(closed())),
                    };
                    drop(book);
                    drop(stale);
                    wakers.into_iter().for_each(contain::wake);
                    match ended {
                        None => return Poll::Pending,
                        Some(ended) => ended,
                    }
                }
                AcquireState::Done => panic!("`Acquire` polled after it was ready"),
            };
            self.state = AcquireState::Done;
            match ended {
                Err(error) => return Poll::Ready(Err(error)),
                Ok((slot, waited)) => match self.shared.stream(slot) {
                    Some(stream) => return Poll::Ready(Ok(PooledStream { stream, waited })),
                    // Its device is gone: another slot will do.
                    None => self.state = AcquireState::New,
                },
            }
        }
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let AcquireState::Waiting { key, .. } = self.state {
            let (next, stale) = self.shared.book.lock().admission.leave(key);
            drop(stale);
            next.into_iter().for_each(contain::wake);
        }
    }
}

impl Future for Drained {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Drained { shared, budget } = &mut *self;
        budget.poll(cx, |cx| shared.poll_drained(cx))
    }
}

impl PoolCore {
    fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<()> {
        let waker = cx.waker().clone();
        let mut book = self.book.lock();
        if book.admission.taken() == 0 {
            drop(book);
            return Poll::Ready(());
        }
        if !book.draining.iter().any(|known| known.will_wake(&waker)) {
            book.draining.push(waker);
        }
        Poll::Pending
    }

    /// The stream of a slot on which a permit was granted, holding that; `None`, and the permit goes back, if its
    /// device takes no work any more.
    fn stream(self: &Arc<Self>, slot: usize) -> Option<Stream> {
        let stream = &self.slots[slot].0;
        if stream.engine().check_open().is_err() {
            self.give_back(slot);
            return None;
        }
        Some(stream.leased(Lease::new(stream.state().progress().clone(), slot, self.clone())))
    }
}

impl Permits for PoolCore {
    fn give_back(&self, slot: usize) {
        let (mut wakers, drained) = {
            let mut book = self.book.lock();
            let mut wakers = self.look_after(&mut book);
            wakers.extend(book.admission.give_back(slot));
            let is_drained = book.admission.taken() == 0;
            (wakers, if is_drained { std::mem::take(&mut book.draining) } else { Vec::new() })
        };
        wakers.extend(drained);
        wakers.into_iter().for_each(contain::wake);
    }
}

impl PoolState {
    /// Why there is no slot.
    fn gone(&self) -> Error {
        self.gone.clone().unwrap_or_else(closed)
    }
}

fn closed() -> Error {
    ErrorDetail::Closed { device: "the stream pool".to_owned() }.into()
}

fn full(admission: &Admission) -> Error {
    ErrorDetail::Overloaded {
        what: "the stream pool",
        in_flight: admission.taken() as u64,
        limit: admission.limit() as u64,
        waiting: admission.waiting() as u64,
        max_waiting: admission.max_waiting() as u64,
    }
    .into()
}

impl fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let book = self.shared.book.lock();
        let (taken, limit) = (book.admission.taken(), book.admission.limit());
        let (streams, waiting) = (self.shared.slots.len(), book.admission.waiting());
        write!(f, "StreamPool({streams} streams, {taken} of {limit} in flight, {waiting} waiting)")
    }
}

impl fmt::Debug for PooledStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pooled{:?}", self.stream)
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            AcquireState::New => "Acquire(new)",
            AcquireState::Waiting { .. } => "Acquire(waiting)",
            AcquireState::Done => "Acquire(done)",
        })
    }
}

impl fmt::Debug for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drained")
    }
}
