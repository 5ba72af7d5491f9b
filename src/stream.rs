//! [`Stream`]: an ordered queue of work on a device, and the verbs that put work on it.
#![forbid(unsafe_code)]

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use crate::completion::engine::Engine;
use crate::completion::lane::Lane;
use crate::error::{ErrorDetail, Result};
use crate::event::{Event, Mark};
use crate::hazard::Track;
use crate::home::Home;
use crate::memory::Element;
use crate::memory::buffer::{DeviceBuffer, Readable, Writable};
use crate::memory::pinned::PinnedBuffer;
use crate::op::{Op, Point, Value};
use crate::queue::{Queue, Settle, Source};

/// An ordered queue of work on a device: what is put on it runs in program order, streams run
/// beside each other.
///
/// Every verb puts its work on the stream *before it returns* and returns a future, [`Op`], that
/// only observes. Say `.queued()?` where device order is enough, `.await` where the host needs the
/// result. Work on memory that another stream uses is ordered behind that use, on the device.
///
/// Cheap to clone, `Send + Sync`; any number of threads may submit, one at a time. Dropped with
/// work pending, the work goes on.
///
/// # Examples
/// ```
/// # futures::executor::block_on(async {
/// let device = gpu_await::Device::host();
/// let stream = device.stream()?;
/// let x = stream.upload(vec![1.0f32, 2.0]).queued()?;   // on the stream; no wait
/// let host = stream.download(&x).await?;                // the one host wait
/// assert_eq!(host, [1.0, 2.0]);
/// # Ok::<(), gpu_await::Error>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Stream {
    lane: Arc<Lane>,
    home: Arc<Home>,
}

/// Something on a stream to wait for: a [`Stream`] (all submitted to it so far), an [`Event`], an
/// [`Op`]. Sealed.
pub trait Marks: sealed::Sealed {
    #[doc(hidden)]
    fn marks(&self) -> Result<MarkList>;
}

/// Points of streams.
#[doc(hidden)]
pub struct MarkList(Vec<Mark>);

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Stream {}
    impl Sealed for super::Event {}
    impl<T> Sealed for super::Op<T> {}
}

impl Stream {
    pub(crate) fn new(lane: Arc<Lane>, home: Arc<Home>) -> Self {
        Stream { lane, home }
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.lane.engine()
    }

    // ---- batches --------------------------------------------------------------------------

    /// Puts several operations on the stream as one future: one marker, one waker, and what the
    /// closure returns comes back whole.
    ///
    /// The closure runs at once; inside it the verbs of [`Queue`] return plain results. Host values
    /// come as [`Lent`](crate::Lent) and are handed back by the future. Ready proves that every
    /// operation of the batch is complete, and its host values *visible to the host*.
    ///
    /// # Errors
    /// The first error that the closure returns; what was put on the stream before goes on.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let (x, y) = stream
    ///     .batch(|q| {
    ///         let x = q.full(4, 7u32)?;
    ///         let y = q.download(&x)?;
    ///         Ok((x, y))
    ///     })
    ///     .await?;
    /// assert_eq!((x.len(), &y[..]), (4, &[7; 4][..]));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub fn batch<R: Settle>(&self, work: impl FnOnce(&Queue<'_>) -> Result<R>) -> Op<R::Output> {
        let queue = Queue::new(&self.lane, &self.home.pinned);
        let result = work(&queue);
        queue.finish(result)
    }

    // ---- copies and fills -----------------------------------------------------------------

    /// Copies host data into a new device buffer. Ready proves *complete on the device*.
    ///
    /// A [`PinnedBuffer`] goes to the device as it is; anything else is copied into pinned memory
    /// first.
    ///
    /// # Ownership
    /// The source moves in; a pinned buffer returns to its pool when the copy is complete.
    ///
    /// # Blocking
    /// The host copy of a `Vec` takes about 0.1 ms a mebibyte; the first of its size also maps and
    /// registers memory.
    ///
    /// # Errors
    /// Out of device or pinned memory; a device that is lost or closed.
    ///
    /// # Source
    /// `cuMemAllocAsync`, `cuMemcpyHtoDAsync`.
    pub fn upload<T: Element>(&self, source: impl Source<T>) -> Op<DeviceBuffer<T>> {
        self.batch(|queue| queue.upload(source))
    }

    /// Copies a slice into a new device buffer; see [`upload`](Self::upload). The slice is free
    /// again when the call returns.
    pub fn upload_from<T: Element>(&self, source: &[T]) -> Op<DeviceBuffer<T>> {
        self.batch(|queue| queue.upload_from(source))
    }

    /// Copies a pinned buffer into existing device memory. Ready proves *complete on the device* and
    /// hands the pinned buffer back.
    ///
    /// # Ownership
    /// The pinned buffer is lent to the device until the copy is complete; if the call fails or the
    /// future is dropped it returns to its pool.
    ///
    /// # Errors
    /// Lengths that differ; memory of another device; a device that is lost or closed.
    pub fn upload_into<T: Element>(
        &self,
        source: PinnedBuffer<T>,
        destination: &mut impl Writable<T>,
    ) -> Op<PinnedBuffer<T>> {
        self.batch(|queue| queue.upload_into(source, destination))
    }

    /// Copies device memory into a pooled pinned buffer. Ready proves *visible to the host*.
    ///
    /// # Errors
    /// Data that nothing has written, or whose producer failed (with its name); out of pinned
    /// memory; a device that is lost or closed.
    ///
    /// # Source
    /// `cuMemcpyDtoHAsync`.
    pub fn download<T: Element>(&self, source: &impl Readable<T>) -> Op<PinnedBuffer<T>> {
        self.batch(|queue| queue.download(source))
    }

    /// Copies device memory into a pinned buffer of yours. Ready proves *visible to the host* and
    /// hands it back.
    ///
    /// # Errors
    /// As [`download`](Self::download); lengths that differ.
    pub fn download_into<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: PinnedBuffer<T>,
    ) -> Op<PinnedBuffer<T>> {
        self.batch(|queue| queue.download_into(source, destination))
    }

    /// Copies device memory into a `Vec`. Ready proves *visible to the host*.
    ///
    /// # Blocking
    /// The poll that finds it complete copies from pinned memory: about 0.1 ms a mebibyte.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_vec<T: Element>(&self, source: &impl Readable<T>) -> Op<Vec<T>> {
        self.batch(|queue| queue.download_vec(source))
    }

    /// Copies between device buffers or ranges of them. Ready proves *complete on the device*.
    ///
    /// The source may be on another device of the same kind; the copy is ordered with both.
    ///
    /// # Errors
    /// Lengths that differ; a source that nothing has written or whose producer failed; a
    /// destination of another device; a device that is lost or closed.
    ///
    /// # Source
    /// `cuMemcpyDtoDAsync`, `cuMemcpyPeerAsync`.
    pub fn copy<T: Element>(
        &self,
        source: &impl Readable<T>,
        destination: &mut impl Writable<T>,
    ) -> Op<()> {
        self.batch(|queue| queue.copy(source, destination))
    }

    /// Allocates without writing. Reading it before something wrote it is an error. Ready proves
    /// *complete on the device*.
    ///
    /// # Errors
    /// Out of device memory, with what was asked, free and there in all; a device that is lost or
    /// closed.
    ///
    /// # Source
    /// `cuMemAllocAsync`.
    pub fn empty<T: Element>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.batch(|queue| queue.empty(len))
    }

    /// Allocates and fills with zero. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty).
    pub fn zeros<T: Element>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.batch(|queue| queue.zeros(len))
    }

    /// Allocates and fills with one. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty).
    pub fn ones<T: Element + From<u8>>(&self, len: usize) -> Op<DeviceBuffer<T>> {
        self.full(len, T::from(1))
    }

    /// Allocates and fills with `value`. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// As [`empty`](Self::empty); an element type of more than 16 bytes.
    pub fn full<T: Element>(&self, len: usize, value: T) -> Op<DeviceBuffer<T>> {
        self.batch(|queue| queue.full(len, value))
    }

    /// Overwrites a buffer or a range with `value`. Ready proves *complete on the device*.
    ///
    /// # Errors
    /// A buffer of another device; an element type of more than 16 bytes; a device that is lost or
    /// closed.
    ///
    /// # Source
    /// `cuMemsetD8Async`, `cuMemsetD16Async`, `cuMemsetD32Async`, `cuMemsetD2D32Async`.
    pub fn fill<T: Element>(&self, destination: &mut impl Writable<T>, value: T) -> Op<()> {
        self.batch(|queue| queue.fill(destination, value))
    }

    // ---- host functions -------------------------------------------------------------------

    /// Runs a closure on the host when the stream gets there. Ready hands its result over.
    ///
    /// All host functions of a process run one after the other on a thread of the driver's: keep
    /// them short. Submitting work or blocking on the device inside one is a typed error.
    ///
    /// # Panics
    /// The awaiting task goes on with the closure's panic.
    ///
    /// # Errors
    /// A device that is lost or closed. `queued()` works for `()`; another value needs the await.
    ///
    /// # Source
    /// `cuLaunchHostFunc`.
    pub fn host_fn<R: Send + 'static>(
        &self,
        function: impl FnOnce() -> R + Send + 'static,
    ) -> Op<R> {
        self.batch(|queue| queue.host_fn(function))
    }

    // ---- order ----------------------------------------------------------------------------

    /// Records the point behind everything submitted so far. The host does not wait.
    ///
    /// # Errors
    /// A device that is lost or closed.
    ///
    /// # Source
    /// `cuEventRecord`.
    pub fn record(&self) -> Result<Event> {
        self.engine().check_open()?;
        let (ticket, handle) = self.mark()?;
        Ok(Event::new(&self.lane, ticket, handle, false))
    }

    /// Records a point with a time stamp of the device's; see [`Event::elapsed_since`].
    ///
    /// # Errors
    /// A device that is lost or closed.
    pub fn record_timed(&self) -> Result<Event> {
        let queue = Queue::new(&self.lane, &self.home.pinned);
        let event = queue.record_timed()?;
        self.lane.release(event.ticket());
        Ok(event)
    }

    /// Makes everything submitted to this stream *from now on* wait, on the device, for a point of
    /// another stream: a stream (all submitted to it so far), an event or an operation. The host
    /// does not wait. Ready proves that this stream has passed the wait.
    ///
    /// Buffers need none of this: work on them is ordered by itself.
    ///
    /// # Errors
    /// A stream of another kind of device; a device that is lost or closed.
    ///
    /// # Source
    /// `cuStreamWaitEvent`.
    pub fn wait(&self, mark: &impl Marks) -> Op<()> {
        match mark.marks() {
            Err(error) => Op::failed(error),
            Ok(MarkList(marks)) => {
                let op = self.batch(|queue| queue.wait_for(marks));
                // Nothing to wait for: the point is the one behind what is here already.
                let nothing = op.points().first().is_some_and(|point| point.ticket == 0);
                if nothing {
                    Op::pending(&self.lane, self.lane.tail(), Value::Here(()))
                } else {
                    op
                }
            }
        }
    }

    /// Resolves when everything submitted so far is *complete on the device*.
    ///
    /// # Errors
    /// The loss of the device.
    pub fn done(&self) -> Op<()> {
        if let Some(lost) = self.engine().lost() {
            return Op::failed(lost.clone());
        }
        Op::pending(&self.lane, self.lane.tail(), Value::Here(()))
    }

    /// Measures what `work` puts on this stream, as a [`batch`](Self::batch): its value and the time
    /// on the device. Ready proves what the batch proves.
    ///
    /// # Errors
    /// Those of `work`; a device that is lost or closed.
    ///
    /// # Source
    /// `cuEventElapsedTime`: about half a microsecond of resolution.
    pub fn timed<R: Settle>(
        &self,
        work: impl FnOnce(&Queue<'_>) -> Result<R>,
    ) -> Op<(R::Output, Duration)> {
        let mut ends = None;
        let op = self.batch(|queue| {
            let start = queue.record_timed()?;
            let value = work(queue)?;
            ends = Some((start, queue.record_timed()?));
            Ok(value)
        });
        match ends {
            Some((start, end)) => op.map(move |value| Ok((value, end.elapsed_since(&start)?))),
            // The batch failed before its end, so `op` holds the error and nothing else.
            None => op.map(|_| Err(ErrorDetail::Event { reason: "never recorded" }.into())),
        }
    }

    /// Whether everything submitted so far is complete, by asking the device. Never blocks.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.done().is_complete()
    }

    /// Blocks the calling thread until everything submitted so far is complete.
    ///
    /// # Blocking
    /// Yes: not from async code; `stream.done().await` there.
    ///
    /// # Errors
    /// The loss of the device; a thread on which it would dead-lock.
    pub fn synchronize(&self) -> Result<()> {
        crate::thread_role::check("a blocking wait")?;
        self.done().synchronize()
    }

    // ---- load -----------------------------------------------------------------------------

    /// Operations submitted so far: the ticket of the last one.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.lane.submitted()
    }

    /// Operations known to be complete; it lags until somebody asks the device.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.lane.completed()
    }

    /// Operations in flight, by asking the device. Never blocks.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        let submitted = self.lane.submitted();
        self.lane.sweep();
        submitted - self.lane.completed().min(submitted)
    }

    /// Waits until at most `max` operations are in flight, so that a producer stays below the
    /// driver's limit: about a thousand launches, after which it blocks the calling thread.
    ///
    /// Progress is known in steps of at most 128 operations.
    ///
    /// # Errors
    /// The loss of the device.
    ///
    /// # Cancel safety
    /// Yes.
    pub async fn throttle(&self, max: u64) -> Result<()> {
        let submitted = self.lane.submitted();
        if submitted.saturating_sub(self.lane.completed()) > max {
            Op::pending(&self.lane, submitted - max, Value::Here(())).await?;
        }
        Ok(())
    }

    // ---- identity -------------------------------------------------------------------------

    /// The stream's id: unique in the process and never used again.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.lane.id()
    }

    /// The stream's priority: lower numbers go first, 0 where the device has none.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.lane.priority()
    }

    /// A pinned host buffer of `len` elements from the device's pool; its contents are unspecified.
    ///
    /// # Blocking
    /// The first of its size maps and registers memory: 0.2 to 6 ms a mebibyte.
    ///
    /// # Errors
    /// Out of pinned memory.
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.engine().check_open()?;
        PinnedBuffer::new(&self.home.pinned, len)
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn home(&self) -> &Home {
        &self.home
    }

    /// An event at the tail, with the ticket that it stands for.
    fn mark(&self) -> Result<(u64, Option<crate::completion::events::EventHandle>)> {
        let ticket = self.lane.submitted();
        Ok((ticket, self.lane.event_behind(ticket)?))
    }
}

impl Marks for Stream {
    fn marks(&self) -> Result<MarkList> {
        let (ticket, event) = self.mark()?;
        let point = Point { lane: self.lane.clone(), ticket };
        Ok(MarkList(vec![Mark { point, event }]))
    }
}

impl Marks for Event {
    fn marks(&self) -> Result<MarkList> {
        Ok(MarkList(vec![self.mark()]))
    }
}

impl<T> Marks for Op<T> {
    /// An operation that failed has nothing to wait for: the wait reports its error.
    fn marks(&self) -> Result<MarkList> {
        if let Some(error) = self.submission_error() {
            return Err(error.clone());
        }
        let marks = self.points().iter().cloned().map(|point| Mark { point, event: None });
        Ok(MarkList(marks.collect()))
    }
}

/// By id: handles are never compared.
impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.id() == other.id()
    }
}

impl Eq for Stream {}

impl Hash for Stream {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id().hash(state);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (submitted, completed) = (self.submitted(), self.completed());
        write!(f, "Stream({:?}, {submitted} submitted, {completed} completed)", self.lane)
    }
}
