//! [`Op`]: an operation on a stream, as a future.
//!
//! | state | means | poll |
//! |---|---|---|
//! | pending | on the device; complete when each of its points is | waits |
//! | failed | could not be submitted | ready with the error |
//! | done | the value was taken | panics |
//!
//! # Invariants
//! 1. A value is handed out only when every point is complete (`an_op_in_front_of_a_gate_resolves`), including the points of host memory
//!    in the value, on any stream (`every_shape_waits`).
//! 2. An `Op` owns nothing that the device uses: host memory is lent to the stream, device memory is freed in order. So dropping or leaking
//!    one is always sound (`drop_before_completion_keeps_buffers`).
//!
//! More than 500 lines: one type and its methods; half of the lines are docs.

mod asleep;
pub(crate) mod freeze;
pub(crate) mod host_fn;
mod host_slab;
pub(crate) mod join;
pub(crate) mod map;
pub(crate) mod mapped;
mod points;
pub(crate) mod value;

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::future::FusedFuture;
use futures::ready;
use sync_wrapper::SyncWrapper;

use self::asleep::Asleep;
use self::points::AwaitedPoint;
pub(crate) use self::points::Points;
use self::value::DeviceSide;
pub(crate) use self::value::{HostValue, Values};
use crate::error::refused::{Here, Refused};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::buffer::DeviceBuffer;
use crate::memory::frozen::Frozen;
use crate::memory::pinned::PinnedBuffer;
use crate::runtime::Point;
use crate::runtime::coop::Budget;
use crate::runtime::stream_state::{StreamState, WaitState};
use crate::thread::role;

/// An operation that is already on its stream; resolves when it is complete on the device.
///
/// The docs of the verb that made it say what ready proves: *complete on the device* or *visible to the
/// host*. Awaiting operation *n* of a stream waits for *n* and never for later work.
///
/// # Ordering
/// The call that returned the `Op` has put the work on the device; the future only observes. An `async` block
/// around that call is lazy as always: it makes the call when it is first polled. In a `select!` loop, create
/// the `Op` outside the loop and poll `&mut op` inside.
///
/// # Fairness
/// With the feature `tokio`, a ready operation spends one unit of the
/// [budget](https://docs.rs/tokio/latest/tokio/task/coop/index.html) that tokio gives each poll of a task. A
/// task without budget yields once, so a loop over complete operations starves no other task. Other
/// executors, and `tokio::task::unconstrained`, have no budget. [`try_take`](Op::try_take) and
/// [`synchronize`](Op::synchronize) spend none.
///
/// # Cancel safety
/// Dropping an `Op` abandons it: that never blocks, never cancels the work, and never frees what the device
/// still uses. Polling can stop and resume at any point.
///
/// # Wakers
/// While it queries the device itself, it wakes its own task from inside `poll`, and the device's poller may
/// wake it before completion: spurious wake-ups are normal. Wakers are called without any lock of this crate.
/// A waker that panics unwinds out of the call that woke it, if that is its own task's poll or drop. A waker
/// that blocks delays the device's other futures; one that blocks *on one of them* (`block_on` inside a
/// waker) blocks the thread that would resolve it.
///
/// # Errors
/// The operation could not be submitted ([`submitted`](Op::submitted) and [`queued`](Op::queued) report that
/// at once); the device was lost; the process is ending.
///
/// # Panics
/// Polling it again after it was ready. Awaiting a host function that panicked resumes the closure's panic.
#[must_use = "await it, or say `.queued()?` where device order is enough; dropping it drops its error"]
pub struct Op<T> {
    state: OpState<T>,
}

enum OpState<T> {
    Pending(Pending<T>),
    /// With the host memory that was passed to the call, if any.
    Failed(Error, Option<Returned>, Budget),
    Done,
}

/// Host memory returned by a refused call, as [`Op::accepted`] expects it.
type Returned = Box<dyn Any + Send + Sync>;

struct Pending<T> {
    interest: Interest,
    value: SyncWrapper<HostValue<T>>,
}

/// The points that an operation waits for. Its drop stops waiting and releases its interest in markers.
struct Interest {
    points: Points,
    wait: WaitState,
}

/// The position of an operation on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// The stream's id, unique in the process and never reused.
    pub stream: u64,
    /// The operation's number on that stream; the first is 1.
    pub number: u64,
}

impl Op<()> {
    /// Resolves when `point` is complete.
    pub(crate) fn until(point: Point) -> Self {
        Op::at(Points::One(point), HostValue::here(()))
    }
}

impl<T> Op<T> {
    pub(crate) fn pending(stream: &StreamState, ticket: u64, value: HostValue<T>) -> Self {
        Op::at(Points::One(stream.point(ticket)), value)
    }

    pub(crate) fn failed(error: Error) -> Self {
        Op { state: OpState::Failed(error, None, Budget::default()) }
    }

    /// A refused call that returns its argument.
    pub(crate) fn refused<B: Send + Sync + 'static>(refused: Refused<B>) -> Self {
        let Refused { error, value } = refused;
        let returned = value.map(|value| Box::new(value) as Returned);
        Op { state: OpState::Failed(error, returned, Budget::default()) }
    }

    pub(crate) fn at(points: Points, value: HostValue<T>) -> Self {
        let (interest, value) =
            (Interest { points, wait: WaitState::default() }, SyncWrapper::new(value));
        Op { state: OpState::Pending(Pending { interest, value }) }
    }

    /// An operation that is complete when every point is.
    pub(crate) fn at_points(points: Vec<Point>, value: HostValue<T>) -> Self {
        let mut all = Points::NONE;
        points.into_iter().for_each(|point| all.add(point));
        Op::at(all, value)
    }

    /// The same for the last uses of memory, whose tickets may have no holder yet.
    pub(crate) fn behind_uses(points: Vec<Point>, value: HostValue<T>) -> Self {
        points.iter().for_each(|used| used.stream.expect(used.ticket));
        Op::at_points(points, value)
    }

    /// Skips the wait where device order is enough: work behind it on the device sees its effect. Costs
    /// nothing. In a [batch](crate::Stream::batch) verbs return plain results, and `?` alone is enough.
    ///
    /// It is not available for values that the host would read:
    /// ```compile_fail
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream().unwrap();
    /// # let x = stream.zeros::<f32>(4).queued().unwrap();
    /// let y = stream.download(&x).queued();
    /// ```
    ///
    /// # Errors
    /// The operation could not be submitted; its value is computed on the host ([`map_value`](Op::map_value))
    /// and must be awaited.
    ///
    /// # Panics
    /// If it gave its value before.
    pub fn queued(self) -> Result<T>
    where
        T: DeviceSide,
    {
        match self.state {
            OpState::Pending(Pending { interest, value }) => {
                drop(interest);
                let known = value.into_inner().known();
                let known = known.or_else(T::without_host);
                known.ok_or_else(|| ErrorDetail::HostValue { op: "queued()" }.into())
            }
            OpState::Failed(error, ..) => Err(error),
            OpState::Done => panic!("`Op` used after it completed"),
        }
    }

    /// Reports a submission error now, and otherwise returns the future.
    ///
    /// To get back host memory that was passed to the call, use [`accepted`](Op::accepted).
    ///
    /// # Errors
    /// The reason why it could not be submitted.
    pub fn submitted(self) -> Result<Op<T>> {
        match self.state {
            OpState::Failed(error, ..) => Err(error),
            state => Ok(Op { state }),
        }
    }

    /// [`submitted`](Self::submitted) that returns the call's argument with the error.
    fn returning<B: 'static>(self) -> Result<Op<T>, Refused<B>> {
        match self.state {
            OpState::Failed(error, returned, _) => {
                let value = returned.and_then(|returned| returned.downcast().ok());
                Err(Refused { error, value: value.map(|value| *value) })
            }
            state => Ok(Op { state }),
        }
    }

    /// Drops the operation's value: pinned memory returns to its pool when the operation is complete. Costs
    /// nothing.
    ///
    /// With this an upload whose pinned buffer is not needed again can be [`queued`](Self::queued).
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let mut x = stream.zeros::<f32>(1000).queued()?;
    /// let mut part = stream.pinned(10)?;
    /// part.fill(1.0);
    /// stream.upload_into(part, &mut x.slice_mut(..10)?).without_value().queued()?;
    /// assert_eq!(stream.download(&x).await?[8..12], [1.0, 1.0, 0.0, 0.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Panics
    /// If it gave its value before.
    pub fn without_value(self) -> Op<()> {
        match self.state {
            OpState::Pending(Pending { interest, value }) => {
                // Dropping it here is fine: the stream holds a share of everything that the device uses.
                let on = value.into_inner().dependencies();
                let value = SyncWrapper::new(HostValue::Here((), on));
                Op { state: OpState::Pending(Pending { interest, value }) }
            }
            OpState::Failed(error, ..) => Op::failed(error),
            OpState::Done => panic!("`Op` used after it completed"),
        }
    }

    /// Drops the future, including any submission error; the work goes on.
    pub fn abandon(self) {}

    /// Queries whether the operation is complete (or failed). Never blocks. For an operation that was never polled,
    /// the first call places a marker for later calls to find.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.state {
            OpState::Pending(Pending { interest, .. }) => {
                interest.points.as_slice().iter().all(Point::ask)
            }
            OpState::Failed(..) | OpState::Done => true,
        }
    }

    /// Queries the device like [`is_complete`](Op::is_complete), and takes the result if the operation is complete. Never blocks; `None`
    /// leaves the future unchanged.
    pub fn try_take(&mut self) -> Option<Result<T>> {
        if matches!(self.state, OpState::Done) || !self.is_complete() {
            return None;
        }
        match self.poll_now(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }

    /// Blocks the calling thread until it is complete.
    ///
    /// # Blocking
    /// Yes: in async code use `.await` instead.
    ///
    /// # Errors
    /// As the future; and at once on threads where it would deadlock: inside a host function or a twin, and
    /// in a waker that the poller calls. (In a waker that a task calls while it polls, it blocks that task.)
    ///
    /// # Panics
    /// If its value was already taken; and with the panic of a host function.
    #[track_caller]
    pub fn synchronize(self) -> Result<T> {
        if matches!(self.state, OpState::Pending(_)) {
            role::check("a blocking wait").here()?;
        }
        self.block()
    }

    /// Lets the waiter sleep at once instead of querying the device itself.
    pub(crate) fn never_check(&mut self) {
        if let OpState::Pending(pending) = &mut self.state {
            pending.interest.wait.never_check();
        }
    }

    fn block(mut self) -> Result<T> {
        let asleep = Arc::new(Asleep::default());
        let waker = Waker::from(asleep.clone());
        let mut cx = Context::from_waker(&waker);
        let mut checks = 0_u32;
        if let OpState::Pending(pending) = &mut self.state {
            pending.interest.wait.block();
        }
        loop {
            if let Poll::Ready(result) = self.poll_now(&mut cx) {
                return result;
            }
            // A future that queries the device itself is not woken.
            if self.is_checking() {
                checks += 1;
                if checks.is_multiple_of(64)
                    && let Some(stream) =
                        self.points().last().and_then(|point| point.stream.stream())
                {
                    stream.yield_thread();
                }
            } else {
                asleep.until_woken();
            }
        }
    }

    /// Returns the last ticket that it waits for, if it was submitted.
    #[must_use]
    pub fn ticket(&self) -> Option<Ticket> {
        let points = self.points();
        points.last().map(|point| Ticket { stream: point.stream.id, number: point.ticket })
    }

    /// Joins two operations into one future with one waker.
    ///
    /// # Errors
    /// The first failure of either; the other is then abandoned.
    ///
    /// # Panics
    /// If one of them gave its value before.
    pub fn and<U: Send + 'static>(self, other: Op<U>) -> Op<(T, U)>
    where
        T: Send + 'static,
    {
        let (a, b) = match (self.into_parts(), other.into_parts()) {
            (Ok(a), Ok(b)) => (a, b),
            (Err(error), _) | (_, Err(error)) => return Op::failed(error),
        };
        let mut points = a.0;
        points.merge(b.0);
        Op::at(points, a.1.and(b.1))
    }

    /// The points that it waits for; empty if it failed or is done.
    pub(crate) fn points(&self) -> &[Point] {
        match &self.state {
            OpState::Pending(pending) => pending.interest.points.as_slice(),
            OpState::Failed(..) | OpState::Done => &[],
        }
    }

    /// The error of an operation that could not be submitted.
    pub(crate) fn submission_error(&self) -> Option<&Error> {
        match &self.state {
            OpState::Failed(error, ..) => Some(error),
            _ => None,
        }
    }

    fn into_parts(self) -> Result<(Points, HostValue<T>)> {
        match self.state {
            OpState::Pending(Pending { interest, value }) => {
                Ok((interest.into_points(), value.into_inner()))
            }
            OpState::Failed(error, ..) => Err(error),
            OpState::Done => panic!("`Op` used after it completed"),
        }
    }

    /// Polls without a task budget, for a blocked thread or a single check.
    fn poll_now(&mut self, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let outcome = match &mut self.state {
            OpState::Pending(Pending { interest: Interest { points, wait }, .. }) => {
                ready!(points.poll(wait, cx))
            }
            OpState::Failed(..) => Ok(()),
            OpState::Done => panic!("`Op` polled after it completed"),
        };
        Poll::Ready(self.finish(outcome))
    }

    /// Takes the value or the error, once every point is complete or one never will be.
    fn finish(&mut self, outcome: Result<()>) -> Result<T> {
        match (outcome, std::mem::replace(&mut self.state, OpState::Done)) {
            (Err(error), _) | (_, OpState::Failed(error, ..)) => Err(error),
            (Ok(()), OpState::Pending(pending)) => pending.value.into_inner().take(),
            (Ok(()), OpState::Done) => unreachable!("its state was matched"),
        }
    }

    fn is_checking(&self) -> bool {
        matches!(&self.state, OpState::Pending(pending) if pending.interest.wait.comes_again())
    }
}

/// Defines `accepted` for each value type of operations that take pinned memory.
macro_rules! accepted {
    ($($value:ident)+) => {$(
        impl<T: Element> Op<$value<T>> {
            /// Reports a refusal now and hands back the host memory that was passed to the call; otherwise
            /// returns the future. It is [`submitted`](Op::submitted) for copies that take a pinned buffer.
            /// (An [`upload`](crate::Stream::upload) hands back its data in pinned memory, in whatever form
            /// it was passed.)
            ///
            /// # Errors
            /// [`Refused`]: the error, and the memory that was passed to the call.
            ///
            /// # Examples
            /// ```
            /// # futures::executor::block_on(async {
            /// use gpu_await::Refused;
            /// # let device = gpu_await::Device::host();
            /// # let stream = device.stream()?;
            /// # let mut x = stream.zeros::<f32>(99).queued()?;
            /// let mut frame = stream.pinned::<f32>(100)?;
            /// frame.fill(1.0);
            /// let frame = match stream.upload_into(frame, &mut x).accepted() {
            ///     Ok(op) => op.await?,
            ///     Err(Refused { error, value }) => {
            ///         println!("not uploaded: {error}"); // 100 elements into 99
            ///         value.expect("nothing reached the device")
            ///     }
            /// };
            /// assert_eq!(frame[99], 1.0);
            /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
            /// ```
            pub fn accepted(self) -> Result<Self, Refused<PinnedBuffer<T>>> {
                self.returning()
            }
        }
    )+};
}
accepted! { PinnedBuffer DeviceBuffer }

impl<T: Element> Op<Frozen<T>> {
    /// Reports a refused [`freeze`](DeviceBuffer::freeze) now, with the buffer, and otherwise returns the future.
    ///
    /// # Errors
    /// [`Refused`]: the error, and the buffer.
    pub fn accepted(self) -> Result<Self, Refused<DeviceBuffer<T>>> {
        self.returning()
    }
}

impl<T> Future for Op<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        let outcome = match &mut self.state {
            OpState::Pending(Pending { interest: Interest { points, wait }, .. }) => {
                let mut budget = wait.budget;
                let polled = budget.poll(cx, |cx| points.poll(wait, cx));
                wait.budget = budget;
                ready!(polled)
            }
            OpState::Failed(.., budget) => ready!(budget.poll(cx, |_| Poll::Ready(Ok(())))),
            OpState::Done => panic!("`Op` polled after it completed"),
        };
        Poll::Ready(self.finish(outcome))
    }
}

impl<T> FusedFuture for Op<T> {
    fn is_terminated(&self) -> bool {
        matches!(self.state, OpState::Done)
    }
}

/// Nothing in an `Op` is ever pinned: its value moves out when it is ready.
impl<T> Unpin for Op<T> {}

impl<T> fmt::Debug for Op<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            OpState::Pending(pending) => write!(f, "Op({})", pending.interest.points),
            OpState::Failed(error, ..) => write!(f, "Op(failed: {error})"),
            OpState::Done => f.write_str("Op(done)"),
        }
    }
}

impl Interest {
    /// The points, for another operation that will request their markers.
    fn into_points(mut self) -> Points {
        self.stop_waiting();
        std::mem::replace(&mut self.points, Points::NONE)
    }

    #[inline]
    fn stop_waiting(&mut self) {
        if self.wait.is_waiting()
            && let Some(point) = self.points.as_slice().last()
        {
            point.forget(&mut self.wait);
        }
    }
}

impl Drop for Interest {
    #[inline]
    fn drop(&mut self) {
        self.stop_waiting();
        for point in self.points.as_slice() {
            point.stream.timeline.release(point.ticket);
        }
    }
}
