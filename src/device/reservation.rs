//! [`Reservation`]: memory guaranteed to a request before it starts.
//!
//! | a request | left by |
//! |---|---|
//! | new | its first poll: it enters the queue, or fails |
//! | waiting; only the first checks when memory is freed | a grant; an error; its drop; its time limit, at which the poller removes it. The next one becomes the first |
//! | done | – |
//!
//! # Invariants
//! 1. No request overtakes another, and a dropped one holds up nobody (`first_come_first_reserved`).
//! 2. Freed memory wakes the first request, whoever held it, even if nothing else happens on the device
//!    (`each_way_back_is_heard`).
//! 3. The poller enforces time limits: a request leaves the queue even if nobody polls it (`a_late_one_leaves_by_itself`).
//! 4. The loss and the close of the device end every wait (`waiters_hear_of_the_end`).
#![forbid(unsafe_code)]

mod events;

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::Device;
use crate::error::reservation::ReservationProblem;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::Reach;
use crate::memory::reclaim::allowance::{Allowance, refused};
use crate::memory::reclaim::pressure::Pressure;
use crate::memory::reclaim::prospect::Reclaimer;
use crate::runtime::clock::Deadline;
use crate::runtime::{Engine, coop};
use crate::stream::Stream;
use crate::thread::{contain, role};
use gpu_await_protocol::reservations::Holder;

/// Device memory set aside for the allocations of one request: a part of the limit, without addresses yet.
///
/// Made by [`Device::reserve`]. Allocations on a [stream of it](Self::stream) draw from it, whatever the verb, and the memory returns
/// to it when they are freed. So its size bounds what the request holds at once, and requests whose reservations fit the device never take memory
/// from one another. It can shrink, but never grows.
///
/// # Ownership
/// When it is dropped, its unused bytes are free at once. The bytes of its buffers are free when each buffer is freed: dropped, and complete on
/// the device. Its streams can then allocate no more buffers.
///
/// # Errors
/// An allocation larger than what is left fails with [`ReservationProblem::Spent`], and takes nothing from others.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::builder().memory_limit_bytes(10_000).host();
/// let stream = device.stream()?;
/// let reservation = device.reserve(8_192).await?;
/// let mine = reservation.stream(&stream)?;
/// let x = mine.zeros::<u8>(4_096).queued()?;
/// let y = mine.upload(vec![1u32; 1_024]).queued()?;
/// assert_eq!(reservation.left_bytes(), 0);
/// assert!(mine.zeros::<u8>(1).queued().is_err());
/// drop(x); // its bytes are the reservation's again
/// let z = mine.zeros::<u8>(4_000).queued()?;
/// # drop((y, z));
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
pub struct Reservation {
    allowance: Arc<Allowance>,
}

/// Resolves to a [`Reservation`]; see [`Device::reserve`].
///
/// # Panics
/// If it is polled again after it was ready.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Reserve {
    engine: Arc<Engine>,
    bytes: u64,
    limit: Option<Duration>,
    state: ReserveState,
    budget: coop::Budget,
    made_at: &'static Location<'static>,
}

/// How often the first request checks for memory held by other processes or graphs: no event reports when they release it.
const ASK_AGAIN: Duration = Duration::from_millis(100);

enum ReserveState {
    New,
    Waiting {
        request: u64,
        since: u64,
        /// Whether it was pending after an earlier poll.
        waited: bool,
        /// For the first request: notifies it of freed memory.
        memory: Option<Reclaimer>,
        /// For the first request, while other processes or graphs may hold the memory it lacks: the next check.
        again: Option<Deadline>,
        /// For a request with a time limit.
        expiry: Option<(Deadline, Arc<Expiry>)>,
    },
    Done,
}

/// Removes a request from the queue when woken, at its deadline.
struct Expiry {
    engine: Weak<Engine>,
    request: u64,
    /// How many requests were ahead of it then.
    ahead: OnceLock<u64>,
}

impl Wake for Expiry {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(engine) = self.engine.upgrade() else { return };
        let left = {
            let reservations = &mut engine.memory.account.lock().reservations;
            if reservations.is_waiting(self.request) {
                self.ahead.get_or_init(|| reservations.ahead_of(self.request));
            }
            reservations.leave(self.request)
        };
        left.stale.into_iter().chain(left.next).for_each(contain::wake);
    }
}

impl Device {
    /// Waits until `bytes` of device memory can be set aside for one request. Ready proves that allocations of that many bytes, at once or one after
    /// another, fit the limit, whatever others do meanwhile; under [`Pressure::Fail`], once freed memory is known to be free.
    ///
    /// Requests are granted in the order of their first polls: a small one does not overtake a large one. Allocations without a reservation
    /// use whatever is not reserved; they do not queue, so if they hold most of the device, a request waits for them.
    ///
    /// # Shapes and units
    /// Count whole blocks: each allocation draws its size rounded up to a multiple of 512 bytes, however large. Its block has that size; streams
    /// cache it for their next allocations if it is a multiple of an eighth of the next power of two, and no larger than 1 MiB.
    ///
    /// Operations that need scratch memory draw that as well, also those of gpu-await-algorithms, whose `Algorithms` trait says which and how much.
    ///
    /// Give the device a [limit](crate::DeviceBuilder::memory_limit_bytes), below what it has: without one, the memory that is free at the grant
    /// counts, and other processes and allocations without a reservation can still take it; and if free memory is fragmented, the driver needs more
    /// of it than is allocated.
    ///
    /// Under [`Pressure::Wait`] freed memory counts at once: an allocation takes it over, and its stream waits on the device. What
    /// can still delay that is described there; and memory that a stream of another device uses cannot be taken over.
    ///
    /// Under [`Pressure::Fail`] freed memory counts once this crate has seen the device finish with it, which can be a moment later. Until then, an
    /// allocation on a stream other than the one that freed it can fail; also one from a reservation, where an allocation without one took over
    /// memory that the reservation had freed, and freed it a moment ago. Trying again succeeds once [`Stream::done`] has resolved on those streams.
    ///
    /// # One at a time
    /// A task that holds a reservation and awaits another can wait for a task that does the same. So that is an error,
    /// [`ReservationProblem::Held`], whether or not it would have to wait: request everything at once, or use
    /// [`nested`](Reservation::nested), which never waits. The holder is the task that awaited the reservation, until it is dropped,
    /// [handed over](Reservation::hand_over), or shrunk to nothing.
    ///
    /// Tasks are identified by their wakers. So the futures of a `join!` or a `select!` are one task, and so is all that a thread blocks on with one
    /// executor. Combinators that give each future its own waker, such as `FuturesUnordered` and a large `join_all`, are not detected: reservations
    /// awaited there, and dropped only when all of them were granted, wait for one another for ever if they do not all fit at once.
    ///
    /// # Cancel safety
    /// If the future is dropped, it leaves the queue. Kept but not polled, it holds up others: a request at the head, until it is polled or its
    /// [limit](Reserve::within) passes, and a reservation granted inside another future (as in a `join!`), until that returns it.
    ///
    /// # Errors
    /// Each is also a `tracing` event with target `gpu_await::reservation`, and so is a grant after a wait.
    ///
    /// [`ErrorDetail::Reservation`](crate::ErrorDetail::Reservation): more than the device can ever have, a task that holds one, a
    /// [limit](Reserve::within) that passed; a device that is lost or closed, before or during the wait; a call on a thread that must not call the
    /// driver.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::builder().memory_limit_bytes(100_000).host();
    /// # let stream = device.stream()?;
    /// use std::time::Duration;
    /// let reservation = device.reserve(60_000).within(Duration::from_secs(1)).await?;
    /// let x = reservation.stream(&stream)?.zeros::<f32>(10_000).await?;
    /// reservation.shrink(40_960); // others may have the rest
    /// # drop(x);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuMemGetInfo`, `cuMemPoolGetAttribute`; no call that allocates.
    #[track_caller]
    pub fn reserve(&self, bytes: u64) -> Reserve {
        let (engine, budget) = (self.engine().clone(), coop::Budget::default());
        let (state, made_at) = (ReserveState::New, Location::caller());
        Reserve { engine, bytes, limit: None, state, budget, made_at }
    }

    /// [`reserve`](Self::reserve) without waiting: also refused while others wait.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve); [`ReservationProblem::NotNow`].
    #[track_caller]
    pub fn try_reserve(&self, bytes: u64) -> Result<Reservation> {
        at_once(self.engine(), bytes, false, Location::caller())
    }
}

impl Reserve {
    /// Fails with [`ReservationProblem::TooLate`] unless granted within `limit` of its first poll. It then leaves the queue, polled or not.
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    fn look(&mut self, cx: &mut Context<'_>) -> Result<Option<Reservation>> {
        role::check_driver("reserving memory")?;
        let engine = &self.engine;
        engine.check_open()?;
        if let ReserveState::New = self.state {
            let (total, since) = (Reach::of(engine)?.total(), engine.pacing.now());
            let request = {
                let mut account = engine.memory.account.lock();
                if let Some((held_bytes, made_at)) = account.reservations.held_by(cx.waker()) {
                    let problem = ReservationProblem::Held { held_bytes, made_at };
                    return Err(refused(engine, self.bytes, problem));
                }
                let most_bytes = account.reservable(total);
                if self.bytes > most_bytes {
                    let problem = ReservationProblem::TooMuch { most_bytes };
                    return Err(refused(engine, self.bytes, problem));
                }
                account.reservations.enter(self.bytes, since)
            };
            // From here on the poller queries even an idle device for its loss.
            engine.pacing.attention.call();
            let clock = &engine.pacing.clock;
            let due = self.limit.and_then(|limit| clock.after(limit));
            let expiry = due.map(|due| {
                let (engine, ahead) = (Arc::downgrade(engine), OnceLock::new());
                let expiry = Arc::new(Expiry { engine, request, ahead });
                let mut deadline = Deadline::at(clock, due);
                if !deadline.wakes(Waker::from(expiry.clone())) {
                    // Nobody keeps the time for it.
                    expiry.wake_by_ref();
                }
                (deadline, expiry)
            });
            let (waited, memory, again) = (false, None, None);
            self.state = ReserveState::Waiting { request, since, waited, memory, again, expiry };
        }
        let ReserveState::Waiting { request, since, waited, memory, again, expiry } =
            &mut self.state
        else {
            panic!("`Reserve` polled after it was ready");
        };
        // Cloned before the lock, dropped after it: a waker is foreign code.
        let waker = cx.waker().clone();
        let (is_waiting, is_first, stale) = {
            let reservations = &mut engine.memory.account.lock().reservations;
            let is_waiting = reservations.is_waiting(*request);
            (is_waiting, reservations.first(*request).is_some(), reservations.wait(*request, waker))
        };
        contain::let_go(stale);
        if is_first {
            let memory = memory.get_or_insert_with(|| Reclaimer::new(engine));
            let version = memory.version();
            let holder = Holder { waker: cx.waker().clone(), made_at: self.made_at };
            if let Some(number) = grant(engine, self.bytes, Some(holder))? {
                if *waited {
                    events::granted_late(engine, self.bytes, *since, self.made_at);
                }
                let allowance = Allowance::new(engine, number, self.made_at);
                return Ok(Some(Reservation { allowance }));
            }
            if memory.poll(version, cx.waker()) {
                contain::wake_by_ref(cx.waker());
            }
            let others_have_it = || {
                engine.memory.account.lock().unreserved(u64::MAX) >= self.bytes
                    || engine.memory.graphs.are_there()
            };
            if others_have_it() {
                let next = again.insert(Deadline::after(&engine.pacing.clock, ASK_AGAIN));
                if Pin::new(next).poll(cx).is_ready() {
                    contain::wake_by_ref(cx.waker());
                }
            }
        }
        if let Some((deadline, expiry)) = expiry
            && (!is_waiting || engine.pacing.now() >= deadline.due())
        {
            expiry.wake_by_ref();
            let ahead = expiry.ahead.get().copied().unwrap_or_default();
            let limit_ms = self.limit.map_or(0, |limit| limit.as_millis() as u64);
            let reach = Reach::of(engine)?.bytes_beside(engine);
            let account = engine.memory.account.lock();
            let (free_bytes, figures) = (account.unreserved(reach), account.figures());
            let problem = ReservationProblem::TooLate {
                limit_ms,
                ahead,
                free_bytes,
                allocated_bytes: figures.of_buffers(),
                budgeted_bytes: figures.budgeted,
            };
            drop(account);
            return Err(refused(engine, self.bytes, problem));
        }
        *waited = true;
        Ok(None)
    }

    /// Leaves the queue.
    fn leave(&mut self) {
        let state = std::mem::replace(&mut self.state, ReserveState::Done);
        if let ReserveState::Waiting { request, .. } = &state {
            let left = self.engine.memory.account.lock().reservations.leave(*request);
            contain::let_go(left.stale);
            left.next.into_iter().for_each(contain::wake);
        }
    }
}

/// A budget, if memory for it is free.
fn grant(engine: &Arc<Engine>, bytes: u64, holder: Option<Holder>) -> Result<Option<usize>> {
    if engine.options.on_pressure == Pressure::Fail {
        // Cached memory counts only once it is free.
        engine.empty_caches();
        engine.collect_freed();
    }
    let take = |holder| -> Result<_> {
        let reach = Reach::of(engine)?.bytes_beside(engine);
        Ok(engine.memory.account.lock().reserve(bytes, reach, holder))
    };
    let granted = match take(holder)? {
        // Graphs are compiled again when needed.
        Err(holder) if engine.memory.graphs.give_up() => take(holder)?,
        granted => granted,
    };
    Ok(granted.map_err(contain::let_go).ok())
}

/// A reservation that does not wait.
fn at_once(
    engine: &Arc<Engine>,
    bytes: u64,
    overtakes: bool,
    made_at: &'static Location<'static>,
) -> Result<Reservation> {
    let made = made_at_once(engine, bytes, overtakes);
    let made = made.map_err(|error| told(engine, bytes, error.called_at(made_at)));
    made.map(|number| Reservation { allowance: Allowance::new(engine, number, made_at) })
}

/// Emits the event of a reservation's error.
fn told(engine: &Engine, bytes: u64, error: Error) -> Error {
    if let ErrorDetail::Reservation { problem, .. } = error.detail() {
        let is_late = matches!(problem, ReservationProblem::TooLate { .. });
        events::refused(engine, bytes, is_late, &error);
    }
    error
}

fn made_at_once(engine: &Arc<Engine>, bytes: u64, overtakes: bool) -> Result<usize> {
    role::check_driver("reserving memory")?;
    engine.check_open()?;
    let waiting = engine.memory.account.lock().reservations.waiting() as u64;
    if (overtakes || waiting == 0)
        && let Some(number) = grant(engine, bytes, None)?
    {
        return Ok(number);
    }
    let reach = Reach::of(engine)?;
    let within_reach = reach.bytes_beside(engine);
    let (free_bytes, most_bytes) = {
        let account = engine.memory.account.lock();
        (account.unreserved(within_reach), account.reservable(reach.total()))
    };
    let problem = match bytes > most_bytes {
        true => ReservationProblem::TooMuch { most_bytes },
        false => ReservationProblem::NotNow { free_bytes, waiting },
    };
    Err(refused(engine, bytes, problem))
}

impl Future for Reserve {
    type Output = Result<Reservation>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut budget = self.budget;
        let polled = budget.poll(cx, |cx| match self.look(cx).transpose() {
            Some(ended) => {
                self.leave();
                let ended = ended.map_err(|error| error.called_at(self.made_at));
                Poll::Ready(ended.map_err(|error| told(&self.engine, self.bytes, error)))
            }
            None => Poll::Pending,
        });
        self.budget = budget;
        polled
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Reservation {
    pub(crate) fn allowance(&self) -> &Arc<Allowance> {
        &self.allowance
    }

    /// Returns the reservation's size, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.allowance.size_and_left().0
    }

    /// Returns how much of it is not in use by buffers, in bytes.
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        self.allowance.size_and_left().1
    }

    /// Returns a handle of the same stream whose allocations draw from the reservation: those of uploads, fills, algorithms, graphs and anything else
    /// that allocates through it. In the handle's [scope](Stream::scope), the device's verbs draw from it as well, and so do the branches of its
    /// [fork](Stream::fork). Nothing else differs.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`]: a stream of another device.
    pub fn stream(&self, stream: &Stream) -> Result<Stream> {
        let (ours, theirs) = (self.allowance.engine(), stream.engine());
        if ours.state.id != theirs.state.id {
            let (expected, found) = (ours.label().to_owned(), theirs.label().to_owned());
            return Err(ErrorDetail::WrongDevice { what: "the stream", expected, found }.into());
        }
        Ok(stream.drawing_from(self.allowance.clone()))
    }

    /// Shrinks the reservation at once: others can use everything beyond `bytes`. If its buffers hold more, the rest follows as they are freed. A
    /// larger number changes nothing.
    pub fn shrink(&self, bytes: u64) {
        self.allowance.shrink(bytes);
    }

    /// Makes a second reservation for the task that holds this one, from memory that is free. It never waits, and so cannot wait for a task that
    /// waits for this one; it is granted even while others wait.
    ///
    /// # Errors
    /// As [`Device::try_reserve`].
    #[track_caller]
    pub fn nested(&self, bytes: u64) -> Result<Reservation> {
        at_once(self.allowance.engine(), bytes, true, Location::caller())
    }

    /// Declares that another task holds the reservation: the one that awaited it may await another. For a dispatcher that reserves and then spawns,
    /// and for requests that one task runs concurrently.
    #[must_use]
    pub fn hand_over(self) -> Self {
        self.allowance.hand_over();
        self
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.allowance.hand_over();
        self.allowance.shrink(0);
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, left) = self.allowance.size_and_left();
        let made_at = self.allowance.made_at();
        write!(f, "Reservation({left} of {size} bytes left, made at {made_at})")
    }
}

impl fmt::Debug for Reserve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reserve({} bytes, at {})", self.bytes, self.made_at)
    }
}
