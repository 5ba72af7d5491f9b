//! Memory of other libraries as buffers, and buffers lent to other libraries.
//!
//! | memory | is | until |
//! |---|---|---|
//! | theirs, adopted | a [`DeviceBuffer`] like any other | every use is complete; then a thread of this crate drops its owner |
//! | ours, lent | borrowed from the caller, ordered with the borrower's stream at both ends | the loan ends |
//!
//! The borrower's threads and other streams may use lent memory once the loan is [ready](MemoryLoan::ready).
//!
//! More than 500 lines: half of them docs.

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::panic::{Location, resume_unwind};
use std::sync::Arc;

use crate::backend::DevicePtr;
use crate::batch::queue::Queue;
use crate::device::Device;
use crate::error::refused::Here;
use crate::error::{Error, ErrorDetail, MemoryProblem, Result};
use crate::memory::Element;
use crate::memory::allocation::Allocation;
use crate::memory::buffer::DeviceBuffer;
use crate::op::{HostValue, Op};
use crate::runtime::loans::OpenLoan;
use crate::runtime::{Engine, Point};
use crate::stream::Stream;
use crate::submit::{Dependencies, OpenUses, Uses, WorkOutcome};
use crate::thread::{contain, role};

impl Device {
    /// Adopts device memory of another library: `len` elements at `ptr`, complete now. Puts nothing on a stream.
    ///
    /// The buffer is like any other: its uses are ordered across streams, errors follow it, and it can be sliced and
    /// frozen. [`memory`](Self::memory) does not count it, and no limit applies to it. For a host device it is ordinary
    /// memory of the process.
    ///
    /// # Ownership
    /// `owner` keeps the memory. A thread of this crate drops it, with the device's context current, when the
    /// buffer is dropped and every use of it is complete, or when the device is lost and runs nothing any more. It is leaked
    /// at the end of the process, or if another device still uses the memory when this one is lost.
    ///
    /// # Errors
    /// [`ErrorDetail::BadMemory`]: an address that is null, not device memory according to the driver, or not
    /// aligned for `T`; a range that exceeds its allocation; [`ErrorDetail::WrongDevice`]: memory of another device;
    /// [`ErrorDetail::TooLarge`]; a device that is lost or closed. `owner` is then dropped.
    ///
    /// # Safety
    /// `ptr` is the address of `len` initialized elements of memory that this device can use and that live as long
    /// as `owner`, and the work that wrote them is complete. Until `owner` is dropped nobody else writes them, or uses them
    /// while operations here write them, unless the caller orders that.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// let device = gpu_await::Device::host();
    /// let theirs = vec![1.0f32, 2.0, 3.0].into_boxed_slice();
    /// let (ptr, len) = (theirs.as_ptr() as u64, theirs.len());
    /// // SAFETY: the box keeps the memory, and nobody else has it.
    /// let x = unsafe { device.adopt_memory::<f32>(ptr, len, theirs) }?;
    /// assert_eq!(device.download(&x).await?, [1.0, 2.0, 3.0]);
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Source
    /// `cuPointerGetAttribute`.
    #[track_caller]
    pub unsafe fn adopt_memory<T: Element>(
        &self,
        ptr: u64,
        len: usize,
        owner: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        role::check("adopting memory").here()?;
        Ok(Adoptable::now(self, ptr, len).here()?.adopt(Box::new(owner)))
    }
}

impl Stream {
    /// Adopts device memory of another library that is ready when everything on this stream so far is complete; see
    /// [`Device::adopt_memory`]. To wait for a stream of that library, [adopt](Self::from_raw) the stream and call this on it.
    ///
    /// # Errors
    /// As [`Device::adopt_memory`].
    ///
    /// # Safety
    /// As [`Device::adopt_memory`], but the work that wrote the memory may be on this stream.
    #[track_caller]
    pub unsafe fn adopt_memory<T: Element>(
        &self,
        ptr: u64,
        len: usize,
        owner: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        Ok(Adoptable::behind(self, ptr, len).here()?.adopt(Box::new(owner)))
    }

    /// Lends device memory to another library until the loan ends: for work on this stream in any number of calls, on
    /// the library's own threads, or on other streams of its own. For a single call that takes a stream,
    /// [`enqueue`](Self::enqueue) is simpler.
    ///
    /// # Ordering
    /// | the library's work | begins | is complete |
    /// |---|---|---|
    /// | is on this stream | at once: the stream waits, on the device, for earlier uses of the memory | at any time: later uses of the memory wait for everything on the stream when the loan ends |
    /// | runs on a host thread, or on another stream | when [`ready`](MemoryLoan::ready) has resolved: **nothing else makes it wait** | before the loan ends |
    ///
    /// The stream is one that the library uses, [adopted](Self::from_raw) or [lent](Self::lend_raw); for a library
    /// without streams, any stream.
    ///
    /// # Ownership
    /// [Kept](Uses::keeps) and [lent](Uses::lends) values stay until the loan has ended and everything on the stream
    /// by then is complete. [`Device::close`] waits for that as well.
    ///
    /// # Errors
    /// As for any operation: an input that was never written or whose producer failed; memory of another
    /// device; a device that is lost or closed.
    ///
    /// # Safety
    /// - The library touches the memory only as declared, while the loan lasts, and begins and finishes as the table
    ///   above says.
    /// - The requirements of [`enqueue`](Self::enqueue) hold for everything that the library puts on the stream.
    /// - The loan is ended or dropped, not leaked: a loan that borrows its memory does not keep it.
    ///
    /// # Examples
    /// A library with a stream of its own:
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let ours = device.stream()?;
    /// # let theirs = device.stream()?;
    /// use gpu_await::{Stream, Uses};
    /// # let raw = unsafe { theirs.as_raw() };
    /// # let library = their_library::Handle;
    /// // SAFETY: the library keeps its stream, and does not capture it.
    /// let stream = unsafe { Stream::from_raw(&device, raw, ()) }?;
    /// let x = ours.full(4, 1.5f32).queued()?;
    /// let mut y = ours.zeros::<f32>(4).queued()?;
    /// // SAFETY: it reads `x` and updates `y`, on that stream alone, and puts nothing there once the loan has ended.
    /// let loan = unsafe { stream.lend_memory(Uses::new("theirs").reads(&x).updates(&mut y)) }?;
    /// let (from, to) = loan.slices();
    /// library.accumulate(from.address(), to.address(), to.len()); // returns when it is on the stream
    /// loan.end()?;
    /// ours.download(&y).await?;
    /// # mod their_library {
    /// #     pub struct Handle;
    /// #     impl Handle { pub fn accumulate(&self, _: u64, _: u64, _: usize) {} }
    /// # }
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    /// A library that works on threads of its own: see [`MemoryLoan`].
    #[track_caller]
    pub unsafe fn lend_memory<'a, P>(&self, uses: Uses<'a, P>) -> Result<MemoryLoan<'a, P>> {
        let (queue, engine) = (self.queue(), self.engine());
        if let Some(at) = uses.declared.at {
            queue.at.set(at);
        }
        // Counted before it is submitted: a concurrent close finds one or the other.
        let open = engine.memory.loans.begin();
        let mut begins = 0;
        let opened = uses.open(engine, |footprint| {
            begins = queue.submit(footprint, 0, &mut |_| Ok(()))?;
            Ok(())
        });
        match opened {
            Ok((uses, inputs, slices)) => Ok(MemoryLoan {
                uses,
                slices,
                stream: self.clone(),
                at: queue.at.get(),
                begins,
                inputs,
                also_reads: RefCell::default(),
                is_awaited: Cell::new(false),
                open: Some(open),
                outcome: OnceCell::new(),
            }),
            Err(error) => {
                engine.background.let_go(open);
                Err(error.called_at(queue.at.get()))
            }
        }
    }
}

/// Device memory on loan to another library; see [`Stream::lend_memory`].
///
/// # Examples
/// A library that works on threads of its own, and calls back when it has finished or failed, on a thread that may
/// submit. It uses no stream, so it starts when the loan is [ready](Self::ready). The loan and the buffer move into its
/// callback, which returns the result that the caller awaits.
/// ```
/// use futures::channel::oneshot;
/// use gpu_await::{Device, DeviceBuffer, Result, Stream, Uses};
///
/// async fn decode(stream: &Stream, mut frame: DeviceBuffer<u8>, picture: Vec<u8>) -> Result<DeviceBuffer<u8>> {
///     // SAFETY: the decoder overwrites the frame, starts when the loan is ready, and has finished when it calls back.
///     let loan = unsafe { stream.lend_memory(Uses::new("decode").writes(&mut frame)) }?;
///     // SAFETY: nothing else uses the frame until the loan is over.
///     let loan = unsafe { loan.detach() };
///     loan.ready().await?; // earlier uses of the frame are complete
///     let ((to,), (done, ended)) = (loan.slices(), oneshot::channel());
///     decoder::start(picture, to.address(), to.len(), move |failed: Option<decoder::Failed>| {
///         let ended = match failed {
///             None => loan.end(),
///             Some(failed) => Err(loan.fail(failed)),
///         };
///         // If nobody awaits it any more, the frame is dropped here.
///         let _ = done.send(ended.map(|()| frame));
///     });
///     ended.await.expect("the decoder calls back")
/// }
/// # mod decoder {
/// #     #[derive(Debug, thiserror::Error)] #[error("no picture")] pub struct Failed;
/// #     pub fn start(from: Vec<u8>, to: u64, len: usize, done: impl FnOnce(Option<Failed>) + Send + 'static) {
/// #         std::thread::spawn(move || {
/// #             if from.len() != len { return done(Some(Failed)); }
/// #             unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, len) };
/// #             done(None);
/// #         });
/// #     }
/// # }
/// # futures::executor::block_on(async {
/// # let device = Device::host();
/// # let (stream, other) = (device.stream()?, device.stream()?);
/// # let mut frame = stream.empty(3).queued()?;
/// # other.host_fn(|| std::thread::sleep(std::time::Duration::from_millis(20))).abandon();
/// # other.fill(&mut frame, 9).queued()?;
/// let frame = decode(&stream, frame, vec![1, 2, 3]).await?;
/// assert_eq!(stream.download(&frame).await?, [1, 2, 3]);
/// let failed = decode(&stream, frame, vec![1]).await.expect_err("it is too short");
/// assert!(failed.to_string().contains("no picture"));
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[must_use = "the loan ends when it is dropped"]
pub struct MemoryLoan<'a, P> {
    uses: OpenUses<'a>,
    slices: P,
    stream: Stream,
    /// Where it was submitted.
    at: &'static Location<'static>,
    /// The ticket at which the stream has waited for all other users.
    begins: u64,
    /// The outcomes that its inputs depend on, including those of other loans' inputs that it also reads.
    inputs: Option<Box<Dependencies>>,
    also_reads: RefCell<Option<Box<Dependencies>>>,
    /// Somebody may be waiting for that point.
    is_awaited: Cell<bool>,
    /// `None` once it has ended.
    open: Option<OpenLoan>,
    /// The outcome, if it was requested.
    outcome: OnceCell<WorkOutcome>,
}

impl<P> fmt::Debug for MemoryLoan<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = self.open.is_some();
        f.debug_struct("MemoryLoan")
            .field("stream", &self.stream)
            .field("open", &open)
            .finish_non_exhaustive()
    }
}

impl<P: Copy> MemoryLoan<'_, P> {
    /// Returns the addresses of the lent memory, in the order of the declarations.
    ///
    /// Work on the loan's stream may use the memory at once; anything else only when the loan is [ready](Self::ready).
    #[must_use]
    pub fn slices(&self) -> P {
        self.slices
    }
}

impl<P> MemoryLoan<'_, P> {
    /// Returns the driver's handle of the loan's stream, a `CUstream` as a number, for work that the library puts there before the loan ends.
    /// It must not be used afterwards, nor captured or destroyed.
    ///
    /// The stream does not become shared, as it does after [`as_raw`](Stream::as_raw): the end of the loan covers all work that the
    /// library put there.
    #[must_use]
    pub fn raw_stream(&self) -> u64 {
        self.stream.state().driver.raw.0
    }

    /// Resolves when a host thread, or a stream that the crate does not know, may use the memory. Puts nothing on a
    /// stream. Ready proves *complete on the device*: every earlier use of the memory that the declared uses must
    /// follow.
    ///
    /// A library that works only on the stream of the loan need not wait for this.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect; the loan goes on.
    ///
    /// # Errors
    /// The loss of the device; [`ErrorDetail::Upstream`]: memory declared as read or updated had failed by then, if that is known only
    /// when its producer has run. Otherwise it cannot fail any more.
    pub fn ready(&self) -> Op<()> {
        self.is_awaited.set(true);
        let begun = HostValue::Here((), self.inputs.clone());
        Op::pending(self.stream.state(), self.begins, begun)
    }

    /// Declares that the library's work also gets data that `other` declares as read, by an undeclared path such as a link between
    /// two devices: this work completes after the work of `other` has begun. If the inputs of `other` fail late, memory that this loan
    /// declares as written fails too.
    ///
    /// Call it before either loan ends. Data that `other` was declared to get from a third loan is not included.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let (first, second) = (gpu_await::Device::host(), gpu_await::Device::host());
    /// # let streams = (first.stream()?, second.stream()?);
    /// use gpu_await::{ErrorDetail, Uses};
    /// let mut x = streams.0.empty::<f32>(4).queued()?;
    /// let mut y = streams.1.empty::<f32>(4).queued()?;
    /// // SAFETY: the library overwrites `x`, on the stream of the loan.
    /// let decode = unsafe { streams.0.lend_memory(Uses::new("decode").writes(&mut x)) }?;
    /// let decoded = decode.outcome();
    /// decode.end()?;
    /// // SAFETY: the library reads `x`, on the stream of the loan.
    /// let send = unsafe { streams.0.lend_memory(Uses::new("send").reads(&x)) }?;
    /// // SAFETY: the library overwrites `y`, on the stream of the loan.
    /// let receive = unsafe { streams.1.lend_memory(Uses::new("receive").writes(&mut y)) }?;
    /// // The library has been told to copy `x` to `y`.
    /// receive.reads_inputs_of(&send);
    /// decoded.fail("no picture");
    /// receive.complete().abandon();
    /// let error = streams.1.download(&y).await.unwrap_err();
    /// assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn reads_inputs_of<Q>(&self, other: &MemoryLoan<'_, Q>) {
        let Some(inputs) = &other.inputs else { return };
        let mut all = self.also_reads.borrow_mut();
        all.get_or_insert_default().extend((**inputs).clone());
    }

    /// Ends the loan: later uses of the memory wait for everything on the stream so far. The library's work elsewhere must have
    /// finished. Dropping the loan does the same.
    ///
    /// # Blocking
    /// While another thread is submitting to this stream, which takes long if the stream's queue is full. So does dropping the
    /// loan: lend on a stream of its own, or [`throttle`](Stream::throttle) the submitters.
    ///
    /// # Errors
    /// The loss of the device, if it is known: the driver is not queried for it, and later uses of the memory report a loss that
    /// shows afterwards. A thread that must not submit (a host function, a twin, a waker, the closure of `enqueue`). In both cases
    /// memory declared as written counts as failed. In the second the memory is also never freed, so that it counts as
    /// [leaked](crate::Stats::leaked_bytes) when its buffer is dropped, and kept values are never dropped, because nobody knows when
    /// the library's work on the stream is complete.
    ///
    /// [`ErrorDetail::Upstream`]: memory declared as read failed after the loan began, where that is known only when its producer has run
    /// ([`RawQueue::try_host`](crate::RawQueue::try_host)). Memory declared as written counts as failed.
    ///
    /// A closed device is no error: a loan may end after [`Device::close`] has timed out.
    pub fn end(mut self) -> Result<()> {
        self.close_now()?.map_or(Ok(()), Err)
    }

    /// Ends the loan, as [`end`](Self::end) does, with a future. Ready proves *complete on the device*: everything on the stream
    /// when the loan ended.
    ///
    /// # Blocking
    /// As [`end`](Self::end).
    ///
    /// # Cancel safety
    /// If the future is dropped, the work goes on.
    ///
    /// # Errors
    /// As [`end`](Self::end); the failure that was reported to the [outcome](Self::outcome) by then.
    pub fn complete(mut self) -> Op<()> {
        let finish = |queue: &Queue<'_>, closed: Result<Option<Error>>| {
            queue.finish(closed.and_then(|failed| failed.map_or(Ok(()), Err)))
        };
        self.close(finish)
    }

    /// Returns the outcome of the library's work, through which the library can report a failure, from any thread and after the loan has
    /// ended. [`complete`](Self::complete) and readers of memory declared as written return it.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// use gpu_await::{ErrorDetail, Uses};
    /// let mut y = stream.empty::<f32>(4).queued()?;
    /// // SAFETY: the library overwrites `y`, on the stream of the loan.
    /// let loan = unsafe { stream.lend_memory(Uses::new("receive").writes(&mut y)) }?;
    /// let outcome = loan.outcome();
    /// // On a GPU: theirs::receive(loan.raw_stream(), loan.slices().0.address(), 4)
    /// // Later, on the library's own thread, before the work ends on the device:
    /// outcome.fail("the sender is gone");
    /// let op = loan.complete();
    /// assert_eq!(op.await.unwrap_err().detail().to_string(), "receive: the sender is gone");
    /// let error = stream.download(&y).await.unwrap_err();
    /// assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn outcome(&self) -> WorkOutcome {
        self.outcome.get_or_init(|| WorkOutcome::of_loan(self.uses.name())).clone()
    }

    /// Ends the loan of a library that failed: memory declared as written counts as failed, with this cause, and
    /// its readers get [`ErrorDetail::Upstream`]. Returns the error ([`ErrorDetail::Foreign`] with the cause as its source,
    /// or an error of this crate as it is), or the loss of the device if that came first. An operation that
    /// overwrites all of the memory clears the failure, in the order that [`end`](Self::end) describes.
    ///
    /// # Blocking
    /// As [`end`](Self::end).
    ///
    /// On a thread that must not submit, the error is that one, and the cause is lost.
    ///
    /// # Panics
    /// If converting `cause` to an error does; memory declared as written counts as failed all the same.
    pub fn fail(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        let cause = contain::hold(|| cause.into());
        let closed = self.close_now();
        match (cause, closed) {
            (Ok(cause), Ok(_)) => self.uses.fail(cause),
            (Ok(_), Err(error)) => error,
            (Err(panic), _) => {
                self.uses.fail(contain::message(&*panic).into());
                resume_unwind(panic)
            }
        }
    }

    /// Lets the loan outlive the borrows of the declared memory, for a library that works on threads of its own: the loan can
    /// move to another thread, and it keeps the memory while the buffers are moved or dropped.
    ///
    /// It waits for nothing: before such a thread uses the memory, await [`ready`](Self::ready).
    ///
    /// # Safety
    /// Until the loan has ended nobody submits an operation that uses the declared memory, on any stream, except
    /// reads of memory declared as read; nor is the memory used through a buffer, a view or an address in any other
    /// way. The requirements of [`Stream::lend_memory`] hold until then.
    pub unsafe fn detach(mut self) -> MemoryLoan<'static, P>
    where
        P: Clone,
    {
        MemoryLoan {
            uses: self.uses.share(),
            slices: self.slices.clone(),
            stream: self.stream.clone(),
            at: self.at,
            begins: self.begins,
            inputs: self.inputs.take(),
            also_reads: self.also_reads.take().into(),
            is_awaited: self.is_awaited.clone(),
            open: self.open.take(),
            outcome: self.outcome.clone(),
        }
    }

    fn close_now(&mut self) -> Result<Option<Error>> {
        self.close(|_, closed| closed)
    }

    /// Ends the loan, if it has not ended, on a queue of its stream; `then` gets that queue and the failure of the loan's inputs.
    fn close<R>(&mut self, then: impl FnOnce(&Queue<'_>, Result<Option<Error>>) -> R) -> R {
        let MemoryLoan {
            uses,
            stream,
            at,
            begins,
            inputs,
            also_reads,
            is_awaited,
            open,
            outcome,
            ..
        } = self;
        let queue = &stream.queue();
        queue.at.set(at);
        let Some(open) = open.take() else { return then(queue, Ok(None)) };
        if !is_awaited.get() {
            // It needs no marker before the end.
            stream.state().progress.timeline.release(*begins);
        }
        let (outcome, name, commands) = (outcome.get(), uses.name(), uses.commands());
        let ended = uses.close(stream.engine(), |footprint| {
            queue.submit(footprint, commands, &mut |_| {
                if let Some(own) = outcome {
                    inputs.iter().for_each(|inputs| own.inherits(inputs));
                    queue.outcomes.push(own.dependency());
                }
                let also_reads = also_reads.take();
                also_reads.iter().for_each(|inputs| queue.outcomes.push_reader_of(name, inputs));
                Ok(())
            })?;
            Ok(())
        });
        let ended = ended.map_err(|error| error.called_at(at));
        if let (Some(outcome), Err(_), Some(_lost)) =
            (outcome, &ended, stream.engine().state.lost())
        {
            outcome.has_no_end();
        }
        // A closing device is woken here, or where user code may run.
        stream.engine().background.let_go(open);
        then(queue, ended)
    }
}

impl<P> Drop for MemoryLoan<'_, P> {
    fn drop(&mut self) {
        // A failure has poisoned the loan's outputs.
        self.close_now().ok();
    }
}

/// Memory of another library that can be adopted.
pub(super) struct Adoptable<T> {
    engine: Arc<Engine>,
    ptr: DevicePtr,
    bytes: u64,
    len: usize,
    written: Option<Point>,
    element: PhantomData<T>,
}

impl<T: Element> Adoptable<T> {
    /// Memory that is complete.
    fn now(device: &Device, ptr: u64, len: usize) -> Result<Self> {
        Adoptable::check(device.engine(), ptr, len)
    }

    /// Memory that is ready after everything on a stream so far.
    pub(super) fn behind(stream: &Stream, ptr: u64, len: usize) -> Result<Self> {
        let checked = Adoptable::check(stream.engine(), ptr, len)?;
        Ok(Adoptable { written: Some(stream.mark()?.point), ..checked })
    }

    fn check(engine: &Arc<Engine>, ptr: u64, len: usize) -> Result<Self> {
        engine.check_open()?;
        let (element_bytes, alignment) = (size_of::<T>(), align_of::<T>());
        let bytes = len.checked_mul(element_bytes).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or(ErrorDetail::TooLarge { len, element_bytes })? as u64;
        let ptr = match bytes {
            0 => DevicePtr::NULL,
            _ => check(engine, ptr, bytes, alignment).map(|()| DevicePtr(ptr))?,
        };
        let (engine, written) = (engine.clone(), None);
        Ok(Adoptable { engine, ptr, bytes, len, written, element: PhantomData })
    }

    /// The memory as a buffer, which keeps the owner. The unsafe callers vouch for the memory.
    pub(super) fn adopt(self, owner: Box<dyn Any + Send>) -> DeviceBuffer<T> {
        let Adoptable { engine, ptr, bytes, len, written, .. } = self;
        if bytes > 0 {
            // SAFETY: the caller vouches for the memory, and its owner is dropped after the last use.
            unsafe { engine.backend.adopt(ptr, bytes) };
        }
        DeviceBuffer::new(Allocation::foreign(&engine, ptr, bytes, written, owner), len)
    }
}

/// Adopts host memory registered with the driver, under its host address: for sibling crates. As
/// [`Device::adopt_memory`], but the driver is not queried.
///
/// # Errors
/// [`ErrorDetail::TooLarge`]; a device that is lost or closed. `owner` is dropped then.
///
/// # Safety
/// As [`Device::adopt_memory`]; on a GPU the memory is registered and mapped, and device addresses equal host addresses.
pub unsafe fn adopt_registered<T: Element>(
    device: &Device,
    ptr: u64,
    len: usize,
    owner: impl Send + 'static,
) -> Result<DeviceBuffer<T>> {
    role::check("adopting memory")?;
    let engine = device.engine().clone();
    engine.check_open()?;
    let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
    let element_bytes = size_of::<T>();
    let bytes = bytes.ok_or(ErrorDetail::TooLarge { len, element_bytes })?;
    let (ptr, written, element) = (DevicePtr(ptr), None, PhantomData);
    let memory = Adoptable { engine, ptr, bytes, len, written, element };
    Ok(memory.adopt(Box::new(owner)))
}

/// Rejects an address that the driver knows to be wrong.
fn check(engine: &Engine, ptr: u64, bytes: u64, alignment: usize) -> Result<()> {
    let bad = |problem| ErrorDetail::BadMemory { ptr, bytes, problem }.into();
    if ptr == 0 {
        return Err(bad(MemoryProblem::Null));
    }
    let end = ptr.checked_add(bytes);
    let Some(end) = end else { return Err(bad(MemoryProblem::NotDeviceMemory)) };
    if !ptr.is_multiple_of(alignment as u64) {
        return Err(bad(MemoryProblem::Misaligned { alignment }));
    }
    let known = engine.backend.memory_at(DevicePtr(ptr)).map_err(|code| engine.refused(code))?;
    let Some(ordinal) = known.ordinal else { return Err(bad(MemoryProblem::NotDeviceMemory)) };
    if ordinal != engine.backend.ordinal() {
        let (what, expected) = ("the adopted memory", engine.label().to_owned());
        return Err(
            ErrorDetail::WrongDevice { what, expected, found: format!("cuda:{ordinal}") }.into()
        );
    }
    match known.allocation {
        Some(there) if ptr < there.start || there.end < end => {
            let (start, bytes) = (there.start, there.end - there.start);
            Err(bad(MemoryProblem::OutOfBounds { start, bytes }))
        }
        _ => Ok(()),
    }
}
