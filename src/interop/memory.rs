//! Memory of other libraries as buffers, and buffers lent to other libraries.
//!
//! | memory | is | until |
//! |---|---|---|
//! | theirs, adopted | a [`DeviceBuffer`] like any other: ordered, poisoned, sliced, frozen | every use is complete; then its owner is dropped, on a thread of this crate |
//! | ours, lent | borrowed from the caller, ordered with their stream at both ends | the loan ends |

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, ErrorDetail, MemoryProblem, Result};
use crate::memory::Element;
use crate::memory::allocation::Allocation;
use crate::memory::buffer::DeviceBuffer;
use crate::runtime::{Engine, Point};
use crate::stream::Stream;
use crate::submit::{OpenUses, Uses};
use crate::thread::role;

impl Device {
    /// Adopts device memory of another library: `len` elements at `ptr`, complete now. Puts nothing on a stream.
    ///
    /// The buffer is like any other: its uses are ordered across streams, errors follow it, it can be sliced and
    /// frozen. It is in no figure of [`memory`](Self::memory) and under no limit. On a host device it is memory of
    /// the process.
    ///
    /// # Ownership
    /// `owner` keeps the memory. It is dropped on a thread of this crate, with the device's context current, when the
    /// buffer is gone and every use of it is complete, or the device is lost and runs nothing any more. It is leaked at the
    /// end of the process, and if another device still uses the memory when this one is lost.
    ///
    /// # Errors
    /// [`ErrorDetail::BadMemory`]: an address that the driver does not know as device memory, that is not aligned
    /// for `T`, or a range that leaves its allocation; [`ErrorDetail::WrongDevice`]: memory of another device;
    /// [`ErrorDetail::TooLarge`]; a device that is lost or closed. `owner` is dropped then.
    ///
    /// # Safety
    /// `ptr` is the address of `len` initialized elements of memory that this device can use and that live as long
    /// as `owner`, and what wrote them is complete. Until `owner` is dropped nobody else writes them, or uses them
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
    pub unsafe fn adopt_memory<T: Element>(
        &self,
        ptr: u64,
        len: usize,
        owner: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        role::check("adopting memory")?;
        Ok(Adoptable::now(self, ptr, len)?.adopt(Box::new(owner)))
    }
}

impl Stream {
    /// Adopts device memory of another library that is ready when everything on this stream so far is complete; see
    /// [`Device::adopt_memory`]. To wait for a stream of theirs, [adopt](Self::from_raw) that and call this on it.
    ///
    /// # Errors
    /// As [`Device::adopt_memory`].
    ///
    /// # Safety
    /// As [`Device::adopt_memory`], but that what wrote the memory may be on this stream.
    pub unsafe fn adopt_memory<T: Element>(
        &self,
        ptr: u64,
        len: usize,
        owner: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        Ok(Adoptable::behind(self, ptr, len)?.adopt(Box::new(owner)))
    }

    /// Lends device memory to another library that works on this stream, in any number of calls, until the loan
    /// ends. For one call, [`enqueue`](Self::enqueue) does with a closure.
    ///
    /// The stream waits, on the device, for what others did with the declared memory. When the loan ends, whoever
    /// uses the memory next waits for everything that is on the stream then. Kept and lent values stay until that
    /// is complete.
    ///
    /// The stream is one that the other library uses: [adopted](Self::from_raw), or [lent](Self::lend_raw).
    ///
    /// # Errors
    /// As of any operation: a range that is to be read and that nobody wrote, or whose producer failed; memory of
    /// another device; a device that is lost or closed.
    ///
    /// # Safety
    /// As [`enqueue`](Self::enqueue), of everything that the other library does on the stream while the loan lasts; the
    /// loan is ended or dropped, and not leaked.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let ours = device.stream()?;
    /// # let theirs = device.stream()?;
    /// use gpu_await::{Stream, Uses};
    /// # let raw = unsafe { theirs.as_raw() };
    /// // SAFETY: the other library keeps its stream, and does not capture it.
    /// let stream = unsafe { Stream::from_raw(&device, raw, ()) }?;
    /// let x = ours.full(4, 1.5f32).queued()?;
    /// let mut y = ours.zeros::<f32>(4).queued()?;
    /// // SAFETY: it reads `x`, updates `y`, on that stream, and stops before the loan ends.
    /// let loan = unsafe { stream.lend_memory(Uses::new("theirs").reads(&x).updates(&mut y)) }?;
    /// let (from, to) = loan.slices();
    /// their_library::accumulate(from.address(), to.address(), to.len());
    /// loan.end()?;
    /// ours.download(&y).await?;
    /// # mod their_library { pub fn accumulate(_: u64, _: u64, _: usize) {} }
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub unsafe fn lend_memory<'a, P>(&self, uses: Uses<'a, P>) -> Result<MemoryLoan<'a, P>> {
        let queue = self.queue();
        let uses = uses.open(self.engine(), |footprint| {
            queue.submit(footprint, 0, |_| Ok(()))?;
            Ok(())
        })?;
        Ok(MemoryLoan { uses, stream: self.clone(), is_over: false, borrowed: PhantomData })
    }
}

/// Device memory that another library uses; see [`Stream::lend_memory`].
///
/// # Examples
/// A library that works on threads of its own, and calls back when it is done or has failed, on a thread that may
/// submit: the loan and the buffer go there, and what awaits comes back.
/// ```
/// # use std::thread;
/// use futures::channel::oneshot;
/// use gpu_await::{Device, DeviceBuffer, Result, Stream, Uses};
///
/// async fn decode(stream: &Stream, mut frame: DeviceBuffer<u8>, picture: Vec<u8>) -> Result<DeviceBuffer<u8>> {
///     // SAFETY: the decoder overwrites the frame, on this stream, and calls back behind its last call.
///     let loan = unsafe { stream.lend_memory(Uses::new("decode").writes(&mut frame)) }?;
///     // SAFETY: nothing uses the frame until the loan is over.
///     let loan = unsafe { loan.detach() };
///     let (to, (done, ended)) = (loan.slices().0, oneshot::channel());
///     decoder::start(picture, to.address(), to.len(), move |failed: Option<decoder::Failed>| {
///         let ended = match failed {
///             None => loan.end(),
///             Some(failed) => Err(loan.fail(failed)),
///         };
///         // Nobody awaits it any more: the frame goes, behind all that.
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
/// # let ours = device.stream()?;
/// # let raw = unsafe { ours.as_raw() };
/// # let stream = unsafe { Stream::from_raw(&device, raw, ()) }?;
/// let frame = decode(&stream, stream.empty(3).await?, vec![1, 2, 3]).await?;
/// assert_eq!(stream.download(&frame).await?, [1, 2, 3]);
/// let failed = decode(&stream, frame, vec![1]).await.expect_err("it is too short");
/// assert!(failed.to_string().contains("no picture"));
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[must_use = "the loan ends when it is dropped"]
pub struct MemoryLoan<'a, P> {
    uses: OpenUses<P>,
    stream: Stream,
    is_over: bool,
    borrowed: PhantomData<&'a mut ()>,
}

impl<P: Copy> MemoryLoan<'_, P> {
    /// Returns the addresses of what is lent, in the order of the declarations.
    #[must_use]
    pub fn slices(&self) -> P {
        self.uses.pointers()
    }
}

impl<P> MemoryLoan<'_, P> {
    /// Ends the loan: whoever uses the memory next waits for what is on the stream now. Dropping it does the same.
    ///
    /// # Blocking
    /// While another thread is submitting to this stream.
    ///
    /// # Errors
    /// The loss of the device; a thread on which nothing is submitted (a host function, a twin, a waker, the closure of
    /// `enqueue`). What was declared as written counts as failed then, and in the latter case the memory is never
    /// freed and what was kept never dropped, as nobody knows when the other library's work is complete. A loan may
    /// end after the device was closed.
    pub fn end(mut self) -> Result<()> {
        self.close()
    }

    /// Ends the loan of a library that failed: what was declared as written fails its readers, with this cause. Returns
    /// that error ([`ErrorDetail::Foreign`], or an error of this crate as it is); the loss of the device, if that came
    /// before. Whoever overwrites all of the memory waits as behind [`end`](Self::end).
    ///
    /// # Blocking
    /// As [`end`](Self::end).
    pub fn fail(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        match self.close() {
            Ok(()) => self.uses.fail(cause.into()),
            Err(error) => error,
        }
    }

    /// Lets the loan outlive the borrows of what was declared: for a library that works on threads of its own. It keeps
    /// the memory; the buffers may be moved, or dropped.
    ///
    /// # Safety
    /// Until the loan is over nobody puts an operation on any stream that uses the declared memory, other than reads of
    /// what was declared as read; buffers, views and host addresses of it are used for nothing else either. What
    /// [`Stream::lend_memory`] asks for holds as long as the loan does.
    pub unsafe fn detach(mut self) -> MemoryLoan<'static, P>
    where
        P: Clone,
    {
        MemoryLoan {
            uses: self.uses.take(),
            stream: self.stream.clone(),
            is_over: std::mem::replace(&mut self.is_over, true),
            borrowed: PhantomData,
        }
    }

    fn close(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.is_over, true) {
            return Ok(());
        }
        let queue = self.stream.queue();
        self.uses.close(self.stream.engine(), |footprint| {
            queue.submit(footprint, 0, |_| Ok(()))?;
            Ok(())
        })
    }
}

impl<P> Drop for MemoryLoan<'_, P> {
    fn drop(&mut self) {
        // It poisoned what was to be written.
        self.close().ok();
    }
}

/// Memory of another library that may be adopted.
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

    /// Memory that is ready behind everything on a stream so far.
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
            // SAFETY: the caller vouches for the memory, and its owner is dropped behind the last use.
            unsafe { engine.backend.adopt(ptr, bytes) };
        }
        DeviceBuffer::new(Allocation::foreign(&engine, ptr, bytes, written, owner), len)
    }
}

/// Refuses what the driver knows to be wrong.
fn check(engine: &Engine, ptr: u64, bytes: u64, alignment: usize) -> Result<()> {
    let bad = |problem| ErrorDetail::BadMemory { ptr, bytes, problem }.into();
    let end = ptr.checked_add(bytes).filter(|_| ptr != 0);
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
