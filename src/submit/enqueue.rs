//! Work of other libraries as operations: what it uses, and what its closure sees of the stream.
//!
//! The closure is the one piece of foreign code that runs under a submission lock, in the role
//! [`Enqueuing`](crate::thread::role::Role::Enqueuing): every call of this crate that submits or takes that lock is a
//! typed error there, and drops and wakers are deferred.
//!
//! | the closure | ticket | declared as written | error |
//! |---|---|---|---|
//! | returns `Ok` | published | written | – |
//! | returns `Err` | published: a part may be on the stream | failed | [`ErrorDetail::Foreign`], with theirs as its source; the loss of the device, if that is the reason |
//! | panics | published | failed | the panic goes on after the unlock; readers see [`ErrorDetail::EnqueuePanicked`] |
//! | is not called: a bad use, another device's memory, a closed device | none | failed | as of any operation |
//!
//! # Invariants
//! 1. What the closure captured, returned or threw is dropped after the unlock
//!    (`drops_inside_the_closure_only_enqueue`).
//! 2. Kept values are dropped by the reaper when the ticket is complete, also if the closure failed
//!    (`kept_until_complete`, `kept_after_an_error`).
#![forbid(unsafe_code)]

use std::error::Error as StdError;
use std::marker::PhantomData;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::captured::Recorder;
use super::footprint::Footprint;
use super::name::Name;
use super::raw::{Raw, Refusal};
use crate::backend::{ArgBlock, DeviceKind, DevicePtr, Function, Grid, LaunchShape};
use crate::error::{Error, ErrorDetail, Result};
use crate::memory::Element;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::raw_slice::RawSlice;
use crate::memory::view::{Readable, Span, Writable};
use crate::runtime::Engine;
use crate::runtime::stream_state::StreamState;
use crate::thread::contain;

/// Calls of another library that take longer are worth an event in front: a hundred times what that costs.
const LONG_NS: u64 = 50_000;

/// Of those that were quick the last time one of so many is timed: two looks at the clock cost a third of the rest.
const TIMED: u64 = 64;

/// What another library's work uses: memory, and values that must outlive it. For
/// [`Stream::enqueue`](crate::Stream::enqueue).
///
/// Each range adds one [`RawSlice`] to the tuple that the closure gets, in the order of the calls.
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
#[must_use = "pass it to `enqueue`"]
pub struct Uses<'a, P = ()> {
    pub(super) footprint: Footprint<'a>,
    memory: Memory,
    work: Work,
    pub(super) pointers: P,
}

/// What is said of the work itself.
#[derive(Clone, Copy)]
struct Work {
    commands: u32,
    can_be_captured: bool,
}

/// The ranges that an operation declared, tracked or not.
type Memory = SmallVec<[(DevicePtr, u64); 4]>;

impl Uses<'_> {
    /// Uses nothing yet. Errors call the operation `name`.
    pub fn new(name: &'static str) -> Self {
        let memory = SmallVec::new();
        let footprint = Footprint::new(name);
        let work = Work { commands: 1, can_be_captured: false };
        Uses { footprint, memory, work, pointers: () }
    }
}

impl<'a, P> Uses<'a, P> {
    /// Declares memory that the work reads.
    pub fn reads<T: Element, M: Readable<T>>(mut self, memory: &'a M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let span = memory.span();
        self.footprint.reads(&span);
        self.with_range(&span, memory.len())
    }

    /// Declares memory that the work overwrites, all of it: what was there is not read.
    pub fn writes<T: Element, M: Writable<T>>(mut self, memory: &'a mut M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let len = memory.len();
        let span = memory.span_mut();
        self.footprint.overwrites(&span);
        self.with_range(&span, len)
    }

    /// Declares memory that the work reads and writes, or writes in part.
    pub fn updates<T: Element, M: Writable<T>>(mut self, memory: &'a mut M) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let len = memory.len();
        let span = memory.span_mut();
        self.footprint.updates(&span);
        self.with_range(&span, len)
    }

    /// Lends pinned memory to the work, which reaches it under its device address. The memory itself stays
    /// until the work is complete, whatever becomes of the buffer; after the loss of the device it is never
    /// used again. Its contents are the caller's: they are touched by nobody else until then, and the buffer is
    /// neither lent to anything else, mapped nor exported, which would not be ordered behind this.
    pub fn lends<T: Element>(mut self, pinned: &PinnedBuffer<T>) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        self.footprint.lends(pinned.block());
        let slice = RawSlice::new(DevicePtr(pinned.device_ptr()), pinned.len());
        self.with_slice(slice)
    }

    /// Keeps `value` until the work is complete: a plan, a workspace, a handle.
    ///
    /// It is dropped on a thread of this crate with the device's context current, also if the call fails after it began,
    /// and after the loss of the device once nothing runs there any more. It may be a handle of the device itself. Host memory
    /// that the work touches is [lent](Self::lends) instead.
    pub fn keeps(mut self, value: impl Send + 'static) -> Self {
        self.footprint.keeps(Box::new(value));
        self
    }

    /// Says how many launches, copies and fills the work consists of, 1 unless said, so that a stream whose queue fills up holds nobody
    /// up. [`throttle`](crate::Stream::throttle) counts it as one operation all the same.
    pub fn commands(mut self, commands: u32) -> Self {
        self.work.commands = commands;
        self
    }

    /// Says that the work may be captured, and so be a part of a [`Graph`](crate::Graph), which has its
    /// [place](crate::DeviceBuilder::graph_limit) on a GPU in any case: the closure puts work on the stream that it is
    /// given and nothing else, and that work may run any number of times with the same addresses and values, also on another stream
    /// than the one that the closure saw, as long as what it [keeps](Self::keeps) is there.
    ///
    /// Without a graph it changes nothing. In one, the closure is called where the graph's closure is, on a stream that is
    /// being captured: it does not wait for that. What is kept is dropped with the graph; nothing can be [lent](Self::lends).
    pub fn can_be_captured(mut self) -> Self {
        self.work.can_be_captured = true;
        self
    }

    /// Whether [`can_be_captured`](Self::can_be_captured) was said.
    pub(crate) fn is_for_graphs(&self) -> bool {
        self.work.can_be_captured
    }

    fn with_range<T>(mut self, span: &Span<'_>, len: usize) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        self.memory.push((span.ptr(), span.range.end - span.range.start));
        self.with_slice(RawSlice::new(span.ptr(), len))
    }

    fn with_slice<T>(self, slice: RawSlice<T>) -> Uses<'a, P::With>
    where
        P: Append<RawSlice<T>>,
    {
        let Uses { footprint, memory, work, pointers } = self;
        Uses { footprint, memory, work, pointers: pointers.with(slice) }
    }

    /// Has `submit` put what `call` does on `stream`. A panic of `call` is the caller's to go on
    /// with, outside of the lock.
    pub(crate) fn put<R, E>(
        mut self,
        stream: &Arc<StreamState>,
        recorder: impl RecordedBy,
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
        let takes_long = stream.foreign_takes_long();
        if takes_long {
            // Whoever waits for earlier work does not wait for the library.
            self.footprint.may_block();
        }
        let is_timed = takes_long || stream.submitted().is_multiple_of(TIMED);
        let (name, engine) = (self.footprint.name(), stream.engine());
        let mut call = Some((call, self.pointers));
        let (mut returned, mut thrown) = (None, None);
        let mut calls = |raw: &Raw<'_>| {
            let mut failed = None;
            let memory = &self.memory;
            let recorder = recorder.recorder();
            let queue = RawQueue { raw, name, memory, recorder, not_send: PhantomData };
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
            let began = is_timed.then(|| engine.now());
            raw.foreign(run)?;
            if let Some(began) = began {
                stream.foreign_took_long(engine.now() - began > LONG_NS);
            }
            failed.map_or(Ok(()), |error| Err(Refusal::Foreign(error)))
        };
        let submitted = submit(&mut self.footprint, self.work.commands, &mut calls);
        match thrown {
            Some(payload) => Err(payload),
            None => Ok(submitted
                .map(|()| returned.unwrap_or_else(|| unreachable!("the backend ran the closure")))),
        }
    }
}

/// For libraries whose bindings are a part of this crate.
#[cfg(any(feature = "blas", feature = "fft"))]
impl<'a, P> Uses<'a, P> {
    /// What the closure will get.
    pub(crate) fn pointers(&self) -> P
    where
        P: Copy,
    {
        self.pointers
    }

    /// Declares memory that is read, if any, outside of the tuple.
    #[cfg(feature = "blas")]
    pub(crate) fn also_reads<T, M: Readable<T>>(
        mut self,
        memory: Option<&'a M>,
    ) -> (Self, Option<RawSlice<T>>) {
        let slice = memory.map(|memory| {
            let span = memory.span();
            self.footprint.reads(&span);
            self.memory.push((span.ptr(), span.range.end - span.range.start));
            RawSlice::new(span.ptr(), memory.len())
        });
        (self, slice)
    }

    /// Declares memory that is overwritten, if any, outside of the tuple.
    pub(crate) fn also_writes<T, M: Writable<T>>(
        mut self,
        memory: Option<&'a mut M>,
    ) -> (Self, Option<RawSlice<T>>) {
        let slice = memory.map(|memory| {
            let len = memory.len();
            let span = memory.span_mut();
            self.footprint.overwrites(&span);
            self.memory.push((span.ptr(), span.range.end - span.range.start));
            RawSlice::new(span.ptr(), len)
        });
        (self, slice)
    }

    /// Poisons what would have been written, and hands the error back.
    pub(crate) fn refuse(self, error: Error) -> Error {
        self.footprint.poison(error)
    }
}

/// What the error of another library's becomes; one of this crate's stays as it is.
pub(super) fn foreign(op: Arc<str>, error: Box<dyn StdError + Send + Sync>) -> Error {
    match error.downcast::<Error>() {
        Ok(ours) => *ours,
        Err(theirs) => ErrorDetail::Foreign { op, cause: theirs.into() }.into(),
    }
}

/// Nobody, or who records what is captured: known when it is compiled, as one instruction more is one too many.
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

/// The stream as the closure of [`enqueue`](crate::Stream::enqueue) sees it.
pub struct RawQueue<'q> {
    raw: &'q Raw<'q>,
    name: Name<'q>,
    memory: &'q Memory,
    /// If its work is captured.
    recorder: Option<&'q Recorder>,
    not_send: PhantomData<*const ()>,
}

impl RawQueue<'_> {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.raw.stream.engine()
    }

    fn ranges(&self) -> ArgBlock {
        let mut args = ArgBlock::default();
        self.memory.iter().for_each(|(ptr, bytes)| args.push_memory(ptr.0, *bytes));
        args
    }

    fn check_host(&self) -> Result<()> {
        if self.kind() != DeviceKind::Host {
            return Err(self.unsupported("a host function in place of device work"));
        }
        Ok(())
    }

    fn unsupported(&self, what: &'static str) -> Error {
        ErrorDetail::Unsupported { what, device: self.engine().label().to_owned() }.into()
    }

    /// Returns the driver's handle of the stream: a `CUstream`, as a number.
    #[must_use]
    pub fn stream(&self) -> u64 {
        self.raw.handle()
    }

    /// Returns the driver's handle of the device's context, which is current: a `CUcontext`, as a number; 0 on
    /// a host device.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.engine().backend.context()
    }

    /// Returns the kind of the device.
    #[must_use]
    pub fn kind(&self) -> DeviceKind {
        self.engine().backend.kind()
    }

    /// Returns the device's number among those of its kind.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.engine().backend.ordinal()
    }

    /// Puts a Rust function on the stream of a host device: what the other library would do on a GPU.
    ///
    /// The stream's worker runs it once, in stream order, after a check that every declared range is live. If it
    /// panics the device is lost, as by a fault of a kernel.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a host device, or in a [`Graph`](crate::Graph), which calls it again and again; the loss of the
    /// device.
    pub fn host(&self, twin: impl FnOnce() + Send + 'static) -> Result<()> {
        self.check_host()?;
        if self.recorder.is_some() {
            return Err(self.unsupported("a host function that runs once, in a graph"));
        }
        let args = self.ranges();
        let twin = Mutex::new(Some(twin));
        let once = move |_: &Grid, _: &ArgBlock| {
            let twin = twin.lock().take();
            if let Some(twin) = twin {
                twin();
            }
        };
        let (grid_dim, block_dim, cluster_dim) = ([1; 3], [1; 3], [1; 3]);
        let grid = Grid { grid_dim, block_dim, cluster_dim, shared_mem_bytes: 0 };
        let function = Function::Host(Arc::new(once), self.name.to_arc());
        let shape = LaunchShape { grid, cooperative: false };
        self.raw.launch(&function, &shape, &args).map_err(|code| self.engine().refused(code))
    }

    /// [`host`](Self::host) for work that [can be captured](Uses::can_be_captured): in a graph each launch calls the function, by one thread
    /// at a time.
    ///
    /// # Errors
    /// [`ErrorDetail::Unsupported`]: not a host device; the loss of the device.
    pub fn host_each(&self, twin: impl FnMut() + Send + 'static) -> Result<()> {
        self.check_host()?;
        match self.recorder {
            Some(recorder) => recorder.twins.borrow_mut().push(Box::new(twin)),
            None => self.host(twin)?,
        }
        Ok(())
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
