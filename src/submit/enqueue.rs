//! Work of other libraries as operations: its declared uses, and how it is put on a stream.
//!
//! The closure is the one piece of foreign code that runs under a submission lock, in the role
//! [`Enqueuing`](crate::thread::role::Role::Enqueuing): every call of this crate that submits or takes that lock is a typed error there,
//! and drops and wakers are deferred.
//!
//! | the closure | ticket | declared outputs | error |
//! |---|---|---|---|
//! | returns `Ok` | published | written | – |
//! | returns `Err` | published: a part may be on the stream | failed | [`ErrorDetail::Foreign`], with the closure's error as its source; or the loss |
//! | returns `Ok`; its host function fails later | published, and complete | failed from then on | the same, when the future is ready |
//! | panics | published | failed | the panic resumes after the unlock; readers see [`ErrorDetail::EnqueuePanicked`] |
//! | is not called: invalid use, wrong or closed device | none | failed | as for any operation |
//!
//! On a host device the closure leaves a host function to run in place of device work; [`RunOutcome`](super::outcome::RunOutcome) reports
//! its failure. If the device was lost, that error replaces the closure's.
//!
//! # Invariants
//! 1. The closure's captures, its result and its panic payload are dropped after the unlock (`drops_inside_the_closure_only_enqueue`).
//! 2. Kept values are dropped by the reaper when the ticket is complete, even if the closure failed (`kept_until_complete`,
//!    `kept_after_an_error`).
#![forbid(unsafe_code)]

use std::error::Error as StdError;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use super::captured::Recorder;
use super::footprint::Footprint;
use super::outcome::{LateOutcomes, foreign};
use super::raw::{Raw, Refusal};
use super::raw_queue::{Ranges, RawQueue};
use crate::backend::DevicePtr;
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::raw_slice::RawSlice;
use crate::memory::view::{Readable, Span, Writable};
use crate::runtime::stream_state::StreamState;
use crate::thread::contain;

/// An event in front pays off for calls of another library that take longer than this, a hundred times the
/// event's cost.
const LONG_NS: u64 = 50_000;

/// If the last call was quick, only one in this many is timed: two clock readings cost a third of the rest.
const TIMED: u64 = 64;

/// The memory that another library's work uses, and the values that must outlive it. For
/// [`Stream::enqueue`](crate::Stream::enqueue) and [`Stream::lend_memory`](crate::Stream::lend_memory).
///
/// Each call of [`reads`](Self::reads), [`writes`](Self::writes), [`updates`](Self::updates) and [`lends`](Self::lends) adds
/// one [`RawSlice`] to the tuple that the library's code receives (the second argument of the closure, or
/// [`MemoryLoan::slices`](crate::MemoryLoan::slices)), in the order of the calls; there can be nine, and more in
/// [parts](Self::includes).
///
/// Memory that the caller orders itself is declared as an [untracked view](crate::View::untracked).
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// # let device = gpu_await::Device::host();
/// # let stream = device.stream()?;
/// use gpu_await::Uses;
/// let x = stream.upload(vec![1.0f32, 2.0]).queued()?;
/// let mut y = stream.empty::<f32>(2).queued()?;
/// let uses = Uses::new("double").reads(&x).writes(&mut y);
/// // SAFETY: both ranges are declared, and all of `y` is written.
/// let op = unsafe {
///     stream.enqueue(uses, |queue, (x, y)| {
///         // On a GPU: theirs::double(queue.stream(), x.address(), y.address(), x.len())
///         queue.host(move || {
///             let (x, y) = (x.as_slice(), y.as_mut_slice());
///             y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
///         })
///     })
/// };
/// op.queued()?;
/// assert_eq!(stream.download(&y).await?, [2.0, 4.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[must_use = "pass it to `enqueue` or `lend_memory`"]
pub struct Uses<'a, P = ()> {
    /// Boxed, because each call that adds memory moves the rest.
    pub(crate) declared: Box<DeclaredUses<'a>>,
    pub(super) pointers: P,
}

/// The declarations of [`Uses`].
pub(crate) struct DeclaredUses<'a> {
    pub(super) footprint: Footprint<'a>,
    memory: Ranges,
    work: Work,
    /// The line to report as the one that submitted it.
    pub(crate) at: Option<&'static Location<'static>>,
}

impl<P> fmt::Debug for Uses<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uses")
            .field("memory", &self.declared.memory.len())
            .field("work", &self.declared.work)
            .finish_non_exhaustive()
    }
}

/// The attributes of the work itself.
#[derive(Clone, Copy, Debug)]
struct Work {
    commands: u32,
    can_be_captured: bool,
}

impl Uses<'_> {
    /// Creates empty uses. Errors and traces call the operation `name`.
    pub fn new(name: &'static str) -> Self {
        let work = Work { commands: 1, can_be_captured: false };
        // Built in place, without a copy.
        let declared = Box::write(
            Box::new_uninit(),
            DeclaredUses {
                footprint: Footprint::new(name),
                memory: SmallVec::new(),
                work,
                at: None,
            },
        );
        Uses { declared, pointers: () }
    }
}

impl<'a, P> Uses<'a, P> {
    /// Declares memory that the work reads.
    pub fn reads<T: Element, M: Readable<T>>(mut self, memory: &'a M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let span = memory.span();
        self.declared.footprint.reads(&span);
        self.with_range(&span, memory.len())
    }

    /// Declares memory that the work overwrites entirely, without reading it.
    pub fn writes<T: Element, M: Writable<T>>(mut self, memory: &'a mut M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let len = memory.len();
        let span = memory.span_mut();
        self.declared.footprint.overwrites(&span);
        self.with_range(&span, len)
    }

    /// Declares memory that the work reads and writes, or writes in part.
    pub fn updates<T: Element, M: Writable<T>>(mut self, memory: &'a mut M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let len = memory.len();
        let span = memory.span_mut();
        self.declared.footprint.updates(&span);
        self.with_range(&span, len)
    }

    /// Lends pinned memory to the work, at its device address. The memory stays until the work is complete, even if
    /// the buffer is dropped; after the loss of the device it is never used again.
    ///
    /// Nothing orders other uses of it. Until the work is complete the caller must not read, write, lend, map or
    /// export the buffer. (The caller of `enqueue` vouches for that.)
    pub fn lends<T: Element>(mut self, pinned: &PinnedBuffer<T>) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        self.declared.footprint.lends(pinned.block());
        let slice = RawSlice::new(DevicePtr(pinned.device_ptr()), pinned.len());
        self.with_slice(slice)
    }

    /// Keeps `value` until the work is complete: a plan, a workspace, a library handle.
    ///
    /// A thread of this crate then drops it, with the device's context current, even if the call fails halfway; after the
    /// loss of the device, once nothing runs there any more. If the operation is refused before the call, the value is
    /// dropped at once on the calling thread. It may hold the device itself. To keep host memory that the work touches,
    /// [lend](Self::lends) it instead.
    pub fn keeps(mut self, value: impl Send + 'static) -> Self {
        self.declared.footprint.keeps(Box::new(value));
        self
    }

    /// Adds everything that a part of the work uses and keeps, and returns the part's slices. So the ranges need not be known at
    /// compile time, and their number is not limited. The name, the number of [commands](Self::commands) and whether it [can be
    /// captured](Self::can_be_captured) stay as they are.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::{DeviceBuffer, Result, Uses};
    /// let mut all: Vec<DeviceBuffer<f32>> = (0..20).map(|_| stream.empty(4).queued()).collect::<Result<_>>()?;
    /// let mut uses = Uses::new("ones");
    /// let parts: Vec<_> = all.iter_mut().map(|y| uses.includes(Uses::new("one").writes(y))).collect();
    /// // SAFETY: every range is declared, and all of it is written.
    /// let op = unsafe {
    ///     stream.enqueue(uses, |queue, ()| {
    ///         queue.host(move || parts.iter().for_each(|(y,)| y.as_mut_slice().fill(1.0)))
    ///     })
    /// };
    /// op.queued()?;
    /// assert_eq!(stream.download(&all[19]).await?, [1.0; 4]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn includes<'b: 'a, Q>(&mut self, part: Uses<'b, Q>) -> Q {
        self.declared.footprint.includes(part.declared.footprint);
        self.declared.memory.extend(part.declared.memory);
        self.declared.at = self.declared.at.or(part.declared.at);
        part.pointers
    }

    /// Sets the line that errors and traces report as the one that submitted the operation: for a crate that cannot pass on its
    /// caller's line with `#[track_caller]`. By default it is the line of the submission.
    pub fn submitted_at(mut self, at: &'static Location<'static>) -> Self {
        self.declared.at = Some(at);
        self
    }

    /// Sets how many launches, copies and fills the work consists of; 1 by default. From the count the crate knows when the
    /// stream's queue may be full, so that other threads are not delayed; [`throttle`](crate::Stream::throttle) still
    /// counts the work as one operation. For a [loan](crate::Stream::lend_memory) it is the number that the borrower puts
    /// on the stream, counted when the loan ends.
    pub fn commands(mut self, commands: u32) -> Self {
        self.declared.work.commands = commands;
        self
    }

    /// Allows the work to be captured into a [`Graph`](crate::Graph); on a GPU such a graph always has its
    /// [permit](crate::DeviceBuilder::graph_limit). The closure must then only put work on the stream that it is
    /// given, and that work may run any number of times with the same addresses and values, on any stream, as
    /// long as the values that it [keeps](Self::keeps) exist.
    ///
    /// Outside a graph this changes nothing. Inside a graph's closure, the closure of `enqueue` is called with a stream that is being
    /// captured, and must not wait for that stream. Kept values are dropped with the graph; nothing can be [lent](Self::lends).
    pub fn can_be_captured(mut self) -> Self {
        self.declared.work.can_be_captured = true;
        self
    }

    /// Whether [`can_be_captured`](Self::can_be_captured) was called.
    pub(crate) fn is_for_graphs(&self) -> bool {
        self.declared.work.can_be_captured
    }

    /// Separates the uses from their slices, so that the uses have one type whatever was declared.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::{MemoryLoan, Uses};
    /// let (x, mut y) = (stream.ones::<f32>(4).queued()?, stream.empty::<f64>(4).queued()?);
    /// let (one, (x,)) = Uses::new("one").reads(&x).into_parts();
    /// let (other, (y,)) = Uses::new("other").writes(&mut y).into_parts();
    /// // SAFETY: nothing is done with the memory before the loans end; `y` is not read.
    /// let lend = |uses| unsafe { stream.lend_memory(uses) };
    /// let loans: Vec<MemoryLoan<'_, ()>> = vec![lend(one)?, lend(other)?];
    /// # let _ = (x.address(), y.address());
    /// for loan in loans {
    ///     loan.end()?;
    /// }
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn into_parts(self) -> (Uses<'a>, P) {
        (Uses { declared: self.declared, pointers: () }, self.pointers)
    }

    fn with_range<T>(mut self, span: &Span<'_>, len: usize) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        self.declared.memory.push((span.ptr(), span.range.end - span.range.start));
        self.with_slice(RawSlice::new(span.ptr(), len))
    }

    fn with_slice<T>(self, slice: RawSlice<T>) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let Uses { declared, pointers } = self;
        Uses { declared, pointers: pointers.with(slice) }
    }

    /// Has `submit` put the work of `call` on `stream`. Outcomes that are known only when the work runs go to
    /// `outcomes`. The caller resumes a panic of `call` outside the lock.
    pub(crate) fn put<R, E>(
        mut self,
        stream: &Arc<StreamState>,
        recorder: impl RecordedBy,
        outcomes: Option<&LateOutcomes>,
        call: impl FnOnce(&RawQueue<'_>, P) -> std::result::Result<R, E>,
        submit: impl FnOnce(
            &mut Footprint<'a>,
            u32,
            &mut dyn FnMut(&Raw<'_>) -> std::result::Result<(), Refusal>,
        ) -> Result<()>,
    ) -> std::thread::Result<Result<R>>
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        let DeclaredUses { footprint, memory, work, .. } = &mut *self.declared;
        let takes_long = stream.driver.foreign_takes_long();
        if takes_long {
            // Waiters for earlier work must not wait for the library.
            footprint.may_block = true;
        }
        let is_timed = takes_long || stream.progress.timeline.submitted().is_multiple_of(TIMED);
        let (name, engine) = (footprint.name(), &stream.engine);
        let mut call = Some((call, self.pointers));
        let (mut returned, mut thrown) = (None, None);
        let mut calls = |raw: &Raw<'_>| {
            let mut failed = None;
            let memory = &*memory;
            let recorder = recorder.recorder();
            let queue = RawQueue { raw, name, memory, recorder, outcomes, not_send: PhantomData };
            if let Some(recorder) = recorder {
                *recorder.args.borrow_mut() = queue.ranges();
            }
            let run = || {
                let Some((call, pointers)) = call.take() else { return };
                let called = contain::hold(|| {
                    call(&queue, pointers).map_err(|error| foreign(name.to_arc(), error.into()))
                });
                match called {
                    Ok(Ok(value)) => returned = Some(value),
                    Ok(Err(error)) => failed = Some(error),
                    Err(payload) => {
                        let (op, message) = (name.to_arc(), contain::message(&*payload));
                        failed = Some(ErrorDetail::EnqueuePanicked { op, message }.into());
                        thrown = Some(payload);
                    }
                }
            };
            let began = is_timed.then(|| engine.pacing.now());
            raw.foreign(run)?;
            if let Some(began) = began {
                stream.driver.foreign_took_long(engine.pacing.now() - began > LONG_NS);
            }
            failed.map_or(Ok(()), |error| Err(Refusal::Foreign(error)))
        };
        let submitted = submit(footprint, work.commands, &mut calls);
        match thrown {
            Some(payload) => Err(payload),
            None => Ok(submitted
                .map(|()| returned.unwrap_or_else(|| unreachable!("the backend ran the closure")))),
        }
    }
}

impl DeclaredUses<'_> {
    pub(super) fn commands(&self) -> u32 {
        self.work.commands
    }
}

/// Poisons the memory declared as written, as a refusal of the operation does, and returns the error.
pub fn refuse<P>(uses: Uses<'_, P>, error: Error) -> Error {
    uses.declared.footprint.poison(error)
}

/// No recorder, or the recorder of a capture: known at compile time, because a single extra instruction is too
/// many.
pub(crate) trait RecordedBy: Copy {
    fn recorder(&self) -> Option<&Recorder>;
}

impl RecordedBy for () {
    fn recorder(&self) -> Option<&Recorder> {
        None
    }
}

impl RecordedBy for &Recorder {
    fn recorder(&self) -> Option<&Recorder> {
        Some(self)
    }
}

/// A tuple that can take one more element; for [`Uses`]. Sealed.
pub trait Append<T>: sealed::Sealed {
    /// The longer tuple.
    type With;
    #[doc(hidden)]
    fn with(self, last: T) -> Self::With;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for () {}
impl<Last> Append<Last> for () {
    type With = (Last,);
    fn with(self, last: Last) -> Self::With {
        (last,)
    }
}

macro_rules! append {
    ($(($($name:ident)*))+) => {$(
        impl<$($name),*> sealed::Sealed for ($($name,)*) {}
        impl<$($name,)* Last> Append<Last> for ($($name,)*) {
            type With = ($($name,)* Last,);
            #[expect(non_snake_case, reason = "a value for each type parameter")]
            fn with(self, last: Last) -> Self::With {
                let ($($name,)*) = self;
                ($($name,)* last,)
            }
        }
    )+};
}
append! { (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F) (A B C D E F G) (A B C D E F G H) }
