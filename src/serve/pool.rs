//! [`StreamPool`]: streams for many requests, with a bound on what is in flight.
//!
//! | a permit is | left by |
//! |---|---|
//! | free | [`StreamPool::acquire`] |
//! | held: a [`PooledStream`] is alive, or a clone of its stream | the drop of the last of them |
//! | the device's: it has not finished the work on the stream | completion, or loss |
//!
//! The pool learns of the loss or close of a device when a request enters or is polled, when a permit is released, and, while requests
//! wait, from the device's engine, which holds a waker with a [`Weak`] reference to the pool.
//!
//! [`admission`](gpu_await_protocol::admission) decides which request is admitted next and which are refused; [`permit`](crate::stream::permit) returns
//! permits. A waiter is in [`acquire`]. The poller of the pool's first device calls the pool at the next [`Deadline`] of a waiter, also by a waker
//! with a [`Weak`] reference, and the pool refuses the waiters whose time is up: a heavy one does not hold up others until its task is polled.
//!
//! # Invariants
//! 1. A dropped request keeps its permit until the device has finished (`a_permit_is_released_when_the_device_has_finished`).
//! 2. Wakers are woken and dropped outside the lock (`a_waker_may_use_the_pool`).
//! 3. The loss or close of the last device ends every wait, even while all permits are held (`a_loss_ends_waits_for_held_permits`,
//!    `a_close_ends_waits_for_held_permits`), and the devices do not keep the pool (`a_pool_that_waited_keeps_no_device`).
//! 4. The release of the last permit ends the wait for the drained pool, whoever releases it
//!    (`a_granted_waiter_that_goes_lets_the_pool_drain`).
//! 5. A request is woken when its deadline passes, even if nothing polls it and no permit is released (`a_waiter_is_told_at_its_deadline`), and
//!    whatever happened to the device (`a_device_that_has_ended_tells_deadlines`).
//!
//! More than 500 lines, most of them public documentation: one state under one lock, and its handles.
#![forbid(unsafe_code)]

pub(crate) mod acquire;
pub(crate) mod builder;
mod ending;

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::{Duration, Instant};

use gpu_await_protocol::sync::Mutex;

use self::acquire::Acquire;
use self::builder::StreamPoolBuilder;
use crate::batch::queue::Queue;
use crate::device::partition::Partition;
use crate::error::admitter::{Admitter, AdmitterKind};
use crate::error::refused::Here;
use crate::error::unfinished::Unfinished;
use crate::error::{Error, ErrorDetail, Result};
use crate::kernel::{LaunchOn, sealed as launch_sealed};
use crate::op::Op;
use crate::runtime::Engine;
use crate::runtime::clock::{Clock, Deadline};
use crate::runtime::coop::Budget;
use crate::stream::permit::{Permit, Permits};
use crate::stream::{MarkList, Marks, Stream, sealed};
use crate::submit::wrong_device;
use crate::thread::contain::{self, Contained};
use crate::thread::role;
use gpu_await_protocol::admission::{Admission, Class, Granted, Outcomes, Patience, Wakers};

/// The default number of requests in flight per stream: one on the device, one being submitted, and
/// two whose tasks have not yet noticed that they are complete.
const IN_FLIGHT_A_STREAM: usize = 4;
/// The default number of requests that may wait for a permit.
const MAX_WAITING: usize = 1024;

/// Streams of one or several devices, lent to requests with a bound on what is in flight.
///
/// A timeout frees the caller, but the GPU finishes the work: only admission bounds that.
/// [`acquire`](Self::acquire) waits until fewer than [`max_in_flight`](StreamPoolBuilder::max_in_flight)
/// requests are in flight, then hands out the stream that the fewest requests share. A request is in flight
/// until its [`PooledStream`] is dropped *and* the device has finished everything submitted through
/// it, even if its futures were dropped long before.
///
/// Several requests share a stream, so that the device has work while tasks wake up. A GPU runs only a few streams
/// at once: four to eight per device are plenty.
///
/// # Overload
/// Without deadlines, requests are admitted in FIFO order; under overload that favours requests whose callers
/// are about to give up. [`acquire_by`](Self::acquire_by), or a [`patience`](StreamPoolBuilder::patience) for
/// all, sets a deadline for the answer. The pool then refuses at once a request that cannot be answered in
/// time, judging by how long permits were held lately; fails a waiting request when its time is up; and admits
/// the newest first while it is overloaded (for 100 ms every request has waited longer than permits are
/// held).
///
/// # Refusals
/// The error names the pool, if it has a [name](StreamPoolBuilder::name), and the share;
/// [`stats`](Self::stats) counts refusals by share and reason. Each is also a `tracing` event in the span of
/// the request: target `gpu_await::refusal`, level `DEBUG`, with the fields
///
/// | field | is |
/// |---|---|
/// | `by` | `stream pool`, or `batcher`, whose refusals are events of the same form |
/// | `name`, `share` | those of the pool or batcher, if it has them |
/// | `reason` | `full`, `late` ([`ErrorDetail::TooLate`]), `expired` ([`ErrorDetail::Expired`]), `closed` (or its last device lost) |
/// | `requests` | how many were refused: more than 1 only for a batch that got no stream |
/// | `waiting`, `waited_us`, `remaining_us`, `expected_us`, `takes_us` | those of the [`ErrorDetail`], where it has them |
/// | `error` | the text of the error |
///
/// # Classes, shares and weights
/// A handle says how its requests are admitted: [`with_high_priority`](Self::with_high_priority),
/// [`with_share`](Self::with_share), [`with_weight`](Self::with_weight), [`with_patience`](Self::with_patience). Each
/// returns another handle of the same pool, for a [`Batcher`](crate::Batcher) or a `tower` service as well.
///
/// Cheap to clone, `Send + Sync`; the clones share one pool.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// use std::time::{Duration, Instant};
/// use gpu_await::{Device, PoolShare, StreamPool};
///
/// let device = Device::host();
/// let pool = StreamPool::builder()
///     .streams(&device, 4)
///     .share(PoolShare::new("train").max_in_flight(2))     // however many it asks for
///     .build()?;
/// let stream = pool.acquire_by(Instant::now() + Duration::from_millis(250)).await?;
/// let x = stream.upload(vec![1.0f32, 2.0]).queued()?;
/// let host = stream.download(&x).await?;
/// drop(stream);                                            // the next may come in
/// assert_eq!(host, [1.0, 2.0]);
///
/// let train = pool.with_share("train")?;
/// train.acquire().await?.zeros::<f32>(8).await?;
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct StreamPool {
    shared: Arc<PoolCore>,
    asks: Asks,
}

/// How a handle's requests are admitted.
#[derive(Clone, Copy)]
struct Asks {
    class: Class,
    share: usize,
    weight: u32,
    patience: Option<Duration>,
}

/// A stream of a [`StreamPool`], and a permit in it.
///
/// It dereferences to [`Stream`], and a kernel's `launch` takes it directly: `kernel.launch(&stream, ..)`
/// ([`LaunchOn`](crate::LaunchOn)). A clone of the stream holds the permit as well. Work submitted any other
/// way (on a stream that it was [forked](Stream::fork) into, or through its raw handle) does not count.
///
/// # Cancel safety
/// If it is dropped with work pending, the work goes on, and the permit is released when the device has
/// finished it. Leaking it leaks the permit.
pub struct PooledStream {
    stream: Stream,
    waited: Duration,
}

/// Resolves when nothing is in flight; see [`StreamPool::drained`].
#[must_use = "a future does nothing unless it is awaited"]
pub struct Drained {
    shared: Arc<PoolCore>,
    budget: Budget,
}

/// [`Drained`] with a time limit; see [`StreamPool::drained_within`].
#[must_use = "a future does nothing unless it is awaited"]
pub struct DrainedWithin {
    drained: Drained,
    limit: Duration,
    deadline: Deadline,
}

/// A slot for streams, one after another.
struct PoolSlot {
    engine: Arc<Engine>,
    class: Class,
    stream: Mutex<Stream>,
}

/// What a [`StreamPool`] is doing; a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Permits in flight, by weight: of requests that hold a stream, or whose work the device has not finished.
    pub in_flight: usize,
    /// How many may be in flight.
    pub max_in_flight: usize,
    /// Requests that wait for a permit.
    pub waiting: usize,
    /// How many requests of each share may wait.
    pub max_waiting: usize,
    /// Requests admitted so far; this and the figures below are totals of all shares.
    pub granted: u64,
    /// As [`PoolShareStats::late`].
    pub late: u64,
    /// As [`PoolShareStats::refused`].
    pub refused: u64,
    /// As [`PoolShareStats::refused_early`].
    pub refused_early: u64,
    /// As [`PoolShareStats::expired`].
    pub expired: u64,
    /// As [`PoolShareStats::closed`].
    pub closed: u64,
    /// As [`PoolShareStats::given_up`].
    pub given_up: u64,
    /// The shares, first the one of requests that name none.
    pub shares: Vec<PoolShareStats>,
    /// The streams.
    pub streams: Vec<PooledStreamStats>,
}

/// What a share of a [`StreamPool`] is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolShareStats {
    /// Its name; empty for the share of requests that name none.
    pub name: String,
    /// Its permits in flight.
    pub in_flight: usize,
    /// Its waiting requests.
    pub waiting: usize,
    /// Its requests admitted so far.
    pub granted: u64,
    /// Those that held their permit beyond their deadline.
    pub late: u64,
    /// Its requests refused so far because too many waited, or because they could not be answered in time.
    pub refused: u64,
    /// Those refused because they could not be answered in time.
    pub refused_early: u64,
    /// Its requests with a deadline that waited until it was too late.
    pub expired: u64,
    /// Its requests refused because the pool was closed, or its last device was lost or closed.
    pub closed: u64,
    /// Its requests whose futures were dropped while they waited. Each request is one of these, or was granted, refused, expired or closed,
    /// or waits; one that was dropped before it learned its outcome counts under that outcome.
    pub given_up: u64,
    /// How long its permits were held lately; `None` before the first came back.
    pub held: Option<Duration>,
    /// Whether its newest requests go first.
    pub is_overloaded: bool,
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
    /// Whether it still takes work: one whose device is lost is never granted again.
    pub state: PooledStreamState,
    /// Requests in flight on it.
    pub in_flight: usize,
    /// Operations on it that are not known to be complete; after the loss of the device, the last value.
    pub backlog: u64,
}

/// Whether a stream of a [`StreamPool`] takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PooledStreamState {
    /// Its device takes work: idle, or with requests in flight.
    Open,
    /// Its device was closed. Work already on it continues.
    Closed,
    /// Its device was lost. `in_flight` counts the requests that still hold it.
    Lost,
    /// Work on it waits for another device that was lost, and will never run. It is not granted again.
    Stuck,
}

struct PoolCore {
    slots: Vec<PoolSlot>,
    /// Held while all slots of a device get other streams.
    moving: Mutex<()>,
    /// The first slot of each device.
    devices: Vec<usize>,
    /// Keys of the wakers registered with the engine of each of `devices`, from the first wait on.
    watches: OnceLock<Vec<Option<usize>>>,
    name: Option<Arc<str>>,
    /// By number; share 0 has no name.
    share_names: Vec<Arc<str>>,
    /// The first device's clock, which the admission uses.
    clock: Arc<Clock>,
    book: Mutex<PoolState>,
}

struct PoolState {
    admission: Admission,
    /// The tasks that wait until nothing is in flight.
    draining: Vec<Contained<Waker>>,
    /// Why the last slot was removed.
    gone: Option<Error>,
    /// At or before the next deadline.
    next_deadline: Option<Deadline>,
}

/// Wakes a pool when a deadline has passed.
struct DeadlinePassed(Weak<PoolCore>);

impl StreamPool {
    /// Sets options before making a pool.
    pub fn builder() -> StreamPoolBuilder {
        StreamPoolBuilder::default()
    }

    /// Waits for a permit and hands out the stream that the fewest requests share. Permits are granted in
    /// FIFO order, unless the handle has a [patience](Self::with_patience): then this is
    /// [`acquire_by`](Self::acquire_by) with a deadline that far away.
    ///
    /// A task that acquires a second permit while it holds one can deadlock: as many tasks as there are
    /// permits may each hold one and wait for another for ever. A request that needs more streams should take
    /// one permit and [fork](Stream::fork) its stream, or release its permit before it acquires again; one
    /// that must hold two should take the second from another pool, always in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded), at once: the pool is full and
    /// [`max_waiting`](StreamPoolBuilder::max_waiting) requests wait already.
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed): after [`close`](Self::close). The loss or
    /// the [close](crate::Device::close) of the device, when no other is left in the pool; it ends pending
    /// waits as well, even if no permit is ever released.
    /// From the first wait on, the pool's idle devices are queried for that once a second.
    ///
    /// # Cancel safety
    /// Yes: a timeout around it loses only its turn in the queue. Do not `mem::forget` an
    /// [`Acquire`]: it keeps its turn.
    pub fn acquire(&self) -> Acquire {
        self.enter(self.asks, self.patient_until(), Patience::UpToTheLimit)
    }

    /// [`acquire`](Self::acquire) for a request whose *answer* is useful until `deadline`, e.g. the time
    /// at which the caller gives up.
    ///
    /// The wait for the permit is bounded exactly, the work after it by an estimate: a permit goes to a
    /// request only if the time for which its share's permits were held lately, with as many in flight, fits
    /// into the time that is left.
    ///
    /// # Ordering
    /// FIFO within its class and share. While the share is overloaded, the newest of the requests with a
    /// deadline go first; requests without one keep their FIFO turn among them.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`ErrorDetail::TooLate`] (of kind `Overloaded`), at once or as soon as
    /// newer requests push it too far back: it cannot be answered in time. [`ErrorDetail::Expired`], at the
    /// deadline at the latest, and at once if that has passed: no permit became free in time. The poller of the pool's first device
    /// keeps the time, so this works on any executor, even if tasks are held up. On a stepped device (`testing::manual`) a
    /// deadline is as many steps away as when the request was made.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use std::time::{Duration, Instant};
    /// use gpu_await::{Device, ErrorKind, StreamPool};
    ///
    /// let device = Device::host();
    /// let pool = StreamPool::builder().streams(&device, 1).max_in_flight(1).build()?;
    /// let held = pool.acquire().await?;
    /// let waits = pool.acquire_by(Instant::now() + Duration::from_millis(5));
    /// assert_eq!(waits.await.unwrap_err().kind(), ErrorKind::TimedOut);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn acquire_by(&self, deadline: Instant) -> Acquire {
        let deadline = self.shared.clock.time_of(deadline);
        self.enter(self.asks, Some(deadline), Patience::UpToTheLimit)
    }

    /// Returns a handle whose requests go ahead of the waiting ones, and on a high-priority stream if the pool
    /// has any: the device prefers work on these.
    ///
    /// Every ninth request admitted from the queue is one of normal priority, so that none starves.
    #[must_use]
    pub fn with_high_priority(&self) -> StreamPool {
        self.with(Asks { class: Class::High, ..self.asks })
    }

    /// Returns a handle whose requests belong to the [share](StreamPoolBuilder::share) with that name.
    ///
    /// # Errors
    /// [`ErrorDetail::NoSuchShare`].
    pub fn with_share(&self, name: &str) -> Result<StreamPool> {
        let share = self.shared.share_names.iter().position(|known| **known == *name);
        match share {
            Some(share) => Ok(self.with(Asks { share, ..self.asks })),
            None => {
                let (by, name) = (self.shared.admitter(0), name.to_owned());
                Err(ErrorDetail::NoSuchShare { by, name }.into())
            }
        }
    }

    /// Returns a handle whose requests take `permits` permits each (of
    /// [`max_in_flight`](StreamPoolBuilder::max_in_flight)) on one stream, for requests that cost as much as
    /// that many others. The number is clamped to 1 and to its share's maximum.
    ///
    /// A heavy request at the head of the queue waits until all of its permits are free, and those behind it wait as
    /// well: lighter ones do not starve it.
    #[must_use]
    pub fn with_weight(&self, permits: u32) -> StreamPool {
        self.with(Asks { weight: permits, ..self.asks })
    }

    /// Returns a handle whose callers wait at most `patience` for an *answer*: its [`acquire`](Self::acquire) is
    /// [`acquire_by`](Self::acquire_by) with a deadline that far away. With zero, a request that
    /// would have to wait is refused at once ([`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded)).
    #[must_use]
    pub fn with_patience(&self, patience: Duration) -> StreamPool {
        self.with(Asks { patience: Some(patience), ..self.asks })
    }

    /// Takes a stream if a permit is free.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), with `Overloaded` whenever no permit is free. A lost or closed device
    /// is reported rather than `Overloaded`.
    pub fn try_acquire(&self) -> Result<PooledStream> {
        self.enter(self.asks, None, Patience::Never).answer()
    }

    /// Moves the pool's streams of a device to that partition, starting with the next permits. Requests in flight keep their streams, and
    /// waiting requests lose nothing; the old partition is free when the last request on it is complete. The streams keep their priorities.
    /// Both partitions are reserved meanwhile: to move to fewer multiprocessors when none are free, leave a grain unreserved.
    ///
    /// # Blocking
    /// As [`Device::stream`](crate::Device::stream), for each stream.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`]: the pool has no stream of the partition's device. As [`Partition::stream`]: then no stream
    /// has moved.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// let pool = device.streams(2)?;
    /// let partition = device.reserve_partition(1).await?;
    /// pool.move_to(&partition)?;
    /// assert_eq!(pool.acquire().await?.in_partition(), Some(partition));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn move_to(&self, partition: &Partition) -> Result<()> {
        role::check("making streams").here()?;
        let engine = partition.device().engine();
        let slots = self.shared.slots.iter().enumerate();
        let mine: Vec<_> =
            slots.filter(|(_, slot)| slot.engine.state.id == engine.state.id).collect();
        if mine.is_empty() {
            return Err(wrong_device("the partition", &self.shared.slots[0].engine, engine)).here();
        }
        // All of them first: on any failure, the pool is unchanged.
        let mut made = Vec::with_capacity(mine.len());
        for (at, slot) in &mine {
            let priority = slot.stream().priority();
            let stream = partition.stream_builder().priority(priority);
            made.push(stream.name(&format!("pool {at}")).build()?);
        }
        let moved: Vec<_> = {
            // Concurrent moves of the pool run one after another.
            let _turn = self.shared.moving.lock();
            mine.iter().zip(made).map(|((_, slot), stream)| slot.move_to(stream)).collect()
        };
        drop(moved);
        Ok(())
    }

    /// Admits no more requests, and fails those that wait. Requests in flight go on, including those that were
    /// granted but not polled since: [`drained`](Self::drained) waits for them.
    pub fn close(&self) {
        let wakers = self.shared.book.lock().admission.close();
        wakers.into_iter().for_each(contain::wake);
    }

    /// Resolves when no request is in flight: none holds a stream, and the devices have finished all of their
    /// work. Call it after [`close`](Self::close) to shut down. Work of a lost device counts as finished;
    /// requests that hold its streams are waited for all the same, even at the end of the process: if one
    /// may have been leaked, use [`drained_within`](Self::drained_within). In the child of a fork it resolves at once: what is in flight
    /// belongs to the parent.
    pub fn drained(&self) -> Drained {
        Drained { shared: self.shared.clone(), budget: Budget::default() }
    }

    /// [`drained`](Self::drained) for at most `limit` from the call, on any executor; [`Duration::MAX`] means no
    /// limit. The poller of the pool's first device keeps the time; on a stepped device (`testing::manual`), its
    /// steps do.
    ///
    /// # Cancel safety
    /// If it is dropped, the wait ends.
    ///
    /// # Errors
    /// [`ErrorDetail::TimedOut`] reports how many permits are not released and what is in flight on the pool's
    /// streams. [`ErrorDetail::Forked`]: this is the child of a fork, and the pool belongs to its parent.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use std::time::Duration;
    /// use gpu_await::{Device, ErrorDetail};
    ///
    /// let pool = Device::host().streams(2)?;
    /// let held = pool.acquire().await?;
    /// pool.close();
    /// let error = pool.drained_within(Duration::from_millis(5)).await.unwrap_err();
    /// assert!(matches!(error.detail(), ErrorDetail::TimedOut { left, .. } if left.permits == 1));
    /// drop(held);
    /// pool.drained_within(Duration::from_secs(5)).await?;
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn drained_within(&self, limit: Duration) -> DrainedWithin {
        let deadline = Deadline::after(&self.shared.clock, limit);
        DrainedWithin { drained: self.drained(), limit, deadline }
    }

    /// Returns what the pool is doing, as reported by the devices.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        // This detects the loss of a device on which nothing is in flight.
        for &slot in &self.shared.devices {
            let engine = &self.shared.slots[slot].engine;
            if engine.check_health().is_err() {
                engine.mourn();
            }
        }
        let look = |slot: &PoolSlot| {
            let stream = slot.stream();
            let is_stuck = stream.state().check_moves().is_err();
            (stream.backlog(), is_stuck, stream)
        };
        let looks: Vec<(u64, bool, Stream)> = self.shared.slots.iter().map(look).collect();
        let book = self.shared.book.lock();
        let admission = &book.admission;
        let stream = |(slot, (backlog, is_stuck, stream)): (usize, &(u64, bool, Stream))| {
            PooledStreamStats {
                id: stream.id(),
                device: stream.engine().label().to_owned(),
                priority: stream.priority(),
                high_priority: self.shared.slots[slot].class == Class::High,
                state: match (stream.engine().state.lost(), stream.engine().check_open()) {
                    (Some(_), _) => PooledStreamState::Lost,
                    (None, Err(_)) => PooledStreamState::Closed,
                    (None, Ok(())) if *is_stuck => PooledStreamState::Stuck,
                    (None, Ok(())) => PooledStreamState::Open,
                },
                in_flight: admission.taken_on(slot) as usize,
                backlog: *backlog,
            }
        };
        let now = self.shared.now();
        let share = |(share, name): (usize, &Arc<str>)| {
            let Outcomes { granted, late, refused, refused_early, expired, closed, given_up } =
                admission.outcomes_of(share);
            PoolShareStats {
                name: name.to_string(),
                in_flight: admission.taken_by(share) as usize,
                waiting: admission.waiting_of(share),
                granted,
                late,
                refused,
                refused_early,
                expired,
                closed,
                given_up,
                held: admission.took_ns(share).map(Duration::from_nanos),
                is_overloaded: admission.is_overloaded(now, share),
            }
        };
        let shares: Vec<_> = self.shared.share_names.iter().enumerate().map(share).collect();
        let sum = |of: fn(&PoolShareStats) -> u64| shares.iter().map(of).sum();
        PoolStats {
            in_flight: admission.taken() as usize,
            max_in_flight: admission.limit() as usize,
            waiting: admission.waiting(),
            max_waiting: admission.max_waiting(),
            granted: sum(|share| share.granted),
            late: sum(|share| share.late),
            refused: sum(|share| share.refused),
            refused_early: sum(|share| share.refused_early),
            expired: sum(|share| share.expired),
            closed: sum(|share| share.closed),
            given_up: sum(|share| share.given_up),
            shares,
            streams: looks.iter().enumerate().map(stream).collect(),
        }
    }

    /// [`acquire`](Self::acquire), however many wait, and without the patience: for a batch, whose requests have their own.
    pub(crate) fn acquire_for_batch(&self) -> Acquire {
        self.enter(self.asks, None, Patience::Always)
    }

    /// The clock of its deadlines.
    pub(crate) fn clock(&self) -> &Arc<Clock> {
        &self.shared.clock
    }

    fn enter(&self, asks: Asks, deadline: Option<u64>, patience: Patience) -> Acquire {
        // Zero is not a passed deadline: it means not to wait.
        let zero = patience == Patience::UpToTheLimit && asks.patience == Some(Duration::ZERO);
        let (deadline, patience) =
            if zero && deadline.is_none() { (None, Patience::Never) } else { (deadline, patience) };
        Acquire::new(&self.shared, asks, deadline, patience)
    }

    /// When the handle's patience, starting now, ends; `None` if it never ends, or is zero.
    fn patient_until(&self) -> Option<u64> {
        let patience = self.asks.patience.filter(|patience| !patience.is_zero())?;
        self.shared.clock.after(patience)
    }

    fn with(&self, asks: Asks) -> StreamPool {
        StreamPool { shared: self.shared.clone(), asks }
    }
}

impl PooledStream {
    /// Returns how long the request waited for its permit.
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

impl LaunchOn for PooledStream {
    type Launched = Op<()>;

    fn batch_of_one(&self, put: impl FnOnce(&Queue<'_>) -> Result<()>) -> Op<()> {
        self.one(put)
    }
}

impl launch_sealed::Sealed for PooledStream {}

impl sealed::Sealed for PooledStream {}

impl Marks for PooledStream {
    fn marks(&self) -> Result<MarkList> {
        self.stream.marks()
    }
}

impl Future for Drained {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Drained { shared, budget } = &mut *self;
        budget.poll(cx, |cx| shared.poll_drained(cx).map(drop))
    }
}

impl Future for DrainedWithin {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let DrainedWithin { drained: Drained { shared, budget }, limit, deadline } = &mut *self;
        budget.poll(cx, |cx| {
            if let Poll::Ready(drained) = shared.poll_drained(cx) {
                return Poll::Ready(drained);
            }
            ready!(Pin::new(deadline).poll(cx));
            // Draining may finish while the figures are read.
            let left = shared.not_drained(*limit);
            Poll::Ready(match shared.poll_drained(cx) {
                Poll::Ready(drained) => drained,
                Poll::Pending => Err(left),
            })
        })
    }
}

impl PoolCore {
    fn not_drained(&self, limit: Duration) -> Error {
        let mut left = Unfinished::default();
        let backlogs: Vec<u64> = self.slots.iter().map(|slot| slot.stream().backlog()).collect();
        let book = self.book.lock();
        for (slot, operations) in backlogs.into_iter().enumerate() {
            let permits = book.admission.taken_on(slot);
            left.permits += permits;
            left.operations += operations;
            left.streams += u64::from(permits + operations > 0);
        }
        drop(book);
        let what = format!("draining {}", self.admitter(0));
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        ErrorDetail::TimedOut { what, limit_ms, left }.into()
    }

    /// An error in the child of a fork: what is in flight belongs to its parent, and nothing in the child releases it.
    fn poll_drained(&self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if self.clock.is_inherited() {
            let device = self.admitter(0).to_string();
            return Poll::Ready(Err(ErrorDetail::Forked { device }.into()));
        }
        let waker = cx.waker().clone();
        let mut book = self.book.lock();
        if book.admission.taken() == 0 {
            drop(book);
            return Poll::Ready(Ok(()));
        }
        if !book.draining.iter().any(|known| known.will_wake(&waker)) {
            book.draining.push(Contained::new(waker));
        }
        Poll::Pending
    }

    /// The stream of a permit, holding the permit; `None`, with the permit returned, if it takes no more work.
    fn stream(self: &Arc<Self>, Granted { number, slot, weight }: Granted) -> Option<Stream> {
        let stream = self.slots[slot].stream();
        let is_open = stream.engine().check_open().is_ok();
        let stuck = stream.state().check_moves().err().filter(|_| is_open);
        if !is_open || stuck.is_some() {
            let wakers = stuck.map(|error| self.lose(slot, error));
            self.take_back(number, Admission::revoke);
            wakers.into_iter().flatten().for_each(contain::wake);
            return None;
        }
        let progress = stream.state().progress.clone();
        Some(stream.with_permit(Permit::new(progress, number, weight, self.clone())))
    }

    /// The admitter of a share's requests, for errors.
    fn admitter(&self, share: usize) -> Admitter {
        let share = self.share_names.get(share).filter(|name| !name.is_empty()).cloned();
        Admitter { kind: AdmitterKind::StreamPool, name: self.name.clone(), share }
    }

    fn now(&self) -> u64 {
        self.clock.now()
    }

    /// Has the clock call the pool at the next deadline, unless it already will earlier. Called under the lock, in the order of the decisions: no
    /// foreign code runs.
    fn keep_time(self: &Arc<Self>, book: &mut PoolState) {
        let Some(next) = book.admission.next_deadline() else { return };
        if book.next_deadline.as_ref().is_none_or(|known| next < known.due()) {
            let mut deadline = Deadline::at(&self.clock, next);
            // If nobody signals it, the device has ended, and with it each wait.
            deadline.wakes(Waker::from(Arc::new(DeadlinePassed(Arc::downgrade(self)))));
            book.next_deadline = Some(deadline);
        }
    }

    fn take_back(&self, permit: usize, take: fn(&mut Admission, u64, usize) -> Wakers) {
        let now = self.now();
        let wakers = {
            let mut book = self.book.lock();
            let mut wakers = self.look_after(&mut book);
            wakers.extend(take(&mut book.admission, now, permit));
            wakers.extend(book.drained());
            wakers
        };
        wakers.into_iter().for_each(contain::wake);
    }
}

impl Permits for PoolCore {
    fn give_back(&self, permit: usize) {
        self.take_back(permit, Admission::give_back);
    }
}

impl Wake for DeadlinePassed {
    fn wake(self: Arc<Self>) {
        let Some(shared) = self.0.upgrade() else { return };
        let wakers = {
            let mut book = shared.book.lock();
            book.next_deadline = None;
            let wakers = book.admission.expire(shared.now());
            shared.keep_time(&mut book);
            wakers
        };
        wakers.into_iter().for_each(contain::wake);
    }
}

impl PoolSlot {
    /// The stream of its next permits.
    fn stream(&self) -> Stream {
        self.stream.lock().clone()
    }

    /// Puts its next permits on another stream, and returns the old stream, which requests may hold.
    #[must_use]
    fn move_to(&self, stream: Stream) -> Stream {
        std::mem::replace(&mut self.stream.lock(), stream)
    }
}

impl PoolState {
    /// Returns the tasks to wake because nothing is in flight any more. Called whenever a permit may have been
    /// released.
    fn drained(&mut self) -> Vec<Waker> {
        let is_drained = self.admission.taken() == 0;
        let draining = if is_drained { std::mem::take(&mut self.draining) } else { Vec::new() };
        draining.into_iter().map(Contained::into_inner).collect()
    }
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

impl fmt::Debug for DrainedWithin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DrainedWithin({:?})", self.limit)
    }
}

impl fmt::Debug for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drained")
    }
}
