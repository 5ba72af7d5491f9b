//! [`Stream`]: an ordered queue of work on a device. Its operations are in [`verbs`].
#![forbid(unsafe_code)]

// In the order in which rustdoc shows their methods.
pub(crate) mod verbs;

pub(crate) mod staged;

pub(crate) mod permit;
pub(crate) mod reclaimed;
pub(crate) mod scope;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::sync::Arc;

use self::permit::Permit;
use crate::batch::queue::Queue;
use crate::device::home::Home;
use crate::error::refused::Here;
use crate::error::{Error, ErrorDetail, Result};
use crate::event::{Event, Mark};
use crate::memory::Element;
use crate::memory::pinned::PinnedBuffer;
use crate::memory::reclaim::allowance::Allowance;
use crate::op::{HostValue, Op};
use crate::runtime::coop;
use crate::runtime::progress::PointStream;
use crate::runtime::stream_state::{StreamHandle, StreamState};
use crate::runtime::{Engine, MarkedPoint};
use crate::submit::of_dependency;
use crate::thread::role;
use crate::thread::worker::Unwanted;

/// An ordered queue of work on a device: work on one stream runs in program order, and streams run side by
/// side.
///
/// Every verb puts its work on the stream *before it returns* and returns a future, [`Op`], that only
/// observes. Use `.queued()?` where device order is enough, `.await` where the host needs the result. Work on
/// memory that another stream uses is ordered behind that use, on the device.
///
/// Give each logical unit of work its own stream, and launch critical work as early as its dependencies
/// allow. Streams run concurrently where the device has room: a kernel that fills the device leaves none, and
/// small kernels may end before the next is launched.
///
/// Cheap to clone, `Send + Sync`; threads may share it, and their submissions are serialized. If it is
/// dropped with work pending, the work still finishes.
///
/// # Blocking
/// The driver queues about a thousand launches per stream. The next call for that stream then blocks in the
/// driver until one of them completes, and while a thread is blocked there, the driver also blocks every call
/// *for other streams* that must create something:
///
/// | call | what is created | instead |
/// |---|---|---|
/// | [`Device::stream`](crate::Device::stream), [`Device::streams`](crate::Device::streams), [`fork`](Self::fork), the first [`Device::thread_stream`](crate::Device::thread_stream) of a thread | a stream | make streams when the program starts |
/// | [`host_fn`](Self::host_fn) | a callback | await, and run the function in the task |
/// | [`record_timed`](Self::record_timed), [`timed`](Self::timed) | an event, if all spare timed events are in use | [`record_timed_async`](Self::record_timed_async) |
/// | a [`record`](Self::record), a [`wait`](Self::wait) or a launch that needs an event | an event, if all spare events are in use | drop events that are complete |
/// | [`pinned`](Self::pinned), [`upload`](Self::upload), [`download`](Self::download), [`download_vec`](Self::download_vec) above 1 MiB, the first of a size | pinned memory | [`Device::pinned_async`](crate::Device::pinned_async) beforehand, then lend the buffer; the staged copies |
/// | [`Module::load`](crate::Module::load), [`Module::load_blocking`](crate::Module::load_blocking), `load` of a declared kernel | loaded code | load before serving |
///
/// Everything else proceeds: launches, copies and fills on other streams, awaits,
/// [`Device::done`](crate::Device::done). Better still, keep queues from filling up: a producer that awaits
/// [`throttle`](Self::throttle) stays below the limit.
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
    handle: Arc<StreamHandle>,
    home: Arc<Home>,
    /// Set if a scope's stream could not be ordered behind the current one: the error with which it refuses
    /// work.
    refused: Option<Error>,
    /// For a pool's stream: the permit that this handle and its clones hold.
    permit: Option<Arc<Permit>>,
    /// For a reservation's stream: the budget that allocations of this handle and its clones draw from.
    allowance: Option<Arc<Allowance>>,
}

/// Something on a stream to wait for: a [`Stream`] (everything submitted to it so far), an [`Event`], an
/// [`Op`], a stream of a pool. Sealed.
#[diagnostic::on_unimplemented(
    message = "a stream cannot wait for `{Self}`",
    label = "not a point on a stream",
    note = "wait for `&Stream`, `&Event` or `&Op`; futures of other kinds are awaited on the host"
)]
pub trait Marks: sealed::Sealed {
    #[doc(hidden)]
    fn marks(&self) -> Result<MarkList>;
}

/// Points of streams.
#[doc(hidden)]
pub struct MarkList(Vec<Mark>);

pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Stream {}
    impl Sealed for super::Event {}
    impl<T> Sealed for super::Op<T> {}
}

impl Stream {
    pub(crate) fn new(handle: Arc<StreamHandle>, home: Arc<Home>) -> Self {
        Stream { handle, home, refused: None, permit: None, allowance: None }
    }

    /// A handle of the same stream that refuses work with `error`.
    pub(crate) fn refusing(mut self, error: Error) -> Self {
        self.refused = Some(error);
        self
    }

    /// A handle of the same stream that holds a permit of a pool.
    pub(crate) fn with_permit(&self, permit: Permit) -> Self {
        Stream { refused: None, permit: Some(Arc::new(permit)), ..self.clone() }
    }

    /// A handle of the same stream whose allocations draw from `allowance`.
    pub(crate) fn drawing_from(&self, allowance: Arc<Allowance>) -> Self {
        Stream { allowance: Some(allowance), ..self.clone() }
    }

    fn budget(&self) -> Option<usize> {
        self.allowance.as_ref().map(|allowance| allowance.number())
    }

    /// The default stream of its device.
    pub(crate) fn default_stream(&self) -> Stream {
        Stream::new(self.home.default.clone(), self.home.clone())
    }

    pub(crate) fn state(&self) -> &Arc<StreamState> {
        &self.handle.state
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.handle.state.engine
    }

    // ---- completion -----------------------------------------------------------------------

    /// Resolves when everything submitted so far is *complete on the device*.
    ///
    /// # Errors
    /// The loss of the device.
    #[track_caller]
    pub fn done(&self) -> Op<()> {
        if let Some(lost) = self.engine().state.lost() {
            return Op::failed(lost.clone().called_at(Location::caller()));
        }
        Op::pending(&self.handle.state, self.handle.state.tail(), HostValue::here(()))
    }

    /// Queries whether everything submitted so far is complete. Inside a host function it answers from known
    /// state, and the poller queries; a stream that is shared with other libraries then counts as busy.
    ///
    /// # Blocking
    /// Only if the stream is shared with other libraries and its queue is full.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.handle.state.is_idle_shared().unwrap_or_else(|| {
            let tail = self.handle.state.progress.timeline.submitted();
            self.handle.state.ask_after_all();
            self.handle.state.is_settled(tail)
        })
    }

    /// Blocks the calling thread until everything submitted so far is complete.
    ///
    /// # Blocking
    /// Yes: in async code use `stream.done().await` instead.
    ///
    /// # Errors
    /// The loss of the device; a thread that would deadlock.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        role::check("a blocking wait").here()?;
        self.done().synchronize()
    }

    // ---- fork and join --------------------------------------------------------------------

    /// Creates `n` streams in this one's [partition](Self::in_partition), with the same priority and relation to the [legacy
    /// default stream](crate::Device::legacy_stream), each ordered behind everything submitted here so far. The host does not
    /// wait.
    ///
    /// # Blocking
    /// As [`Device::stream`](crate::Device::stream): fork when the program starts, and reuse the branches.
    ///
    /// # Errors
    /// A lost or closed device; [`ErrorDetail::Unsupported`]: an adopted stream of another library's green context.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// # let stream = device.stream()?;
    /// let branches = stream.fork(2)?;
    /// let parts = [branches[0].host_fn(|| 1), branches[1].host_fn(|| 2)];
    /// stream.join(&branches).queued()?;           // what comes next waits for both, on the device
    /// stream.done().await?;
    /// assert!(parts.iter().all(|part| part.is_complete()));
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    #[track_caller]
    pub fn fork(&self, n: usize) -> Result<Vec<Stream>> {
        role::check("submitting work").here()?;
        if self.handle.state.driver.is_confined_by_others() {
            let what = "a fork of a stream that another library confined";
            let device = self.engine().label().to_owned();
            return Err(ErrorDetail::Unsupported { what, device }.into()).here();
        }
        let partition = self.handle.state.driver.partition();
        let branch = |_| {
            let (engine, options) = (self.engine(), self.handle.state.driver.options());
            let stream = StreamState::open_in(engine, partition.cloned(), options, None)?;
            let branch = Stream::new(stream, self.home.clone());
            Ok(Stream { allowance: self.allowance.clone(), ..branch })
        };
        let branches = (0..n).map(branch).collect::<Result<Vec<Stream>>>().here()?;
        for branch in &branches {
            branch.wait(self).queued()?;
        }
        Ok(branches)
    }

    /// Makes everything submitted to this stream from now on wait, on the device, for all of
    /// `marks`, as one operation; see [`wait`](Self::wait). Ready proves that this stream has passed
    /// the wait.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[track_caller]
    pub fn join<'m, M: Marks + 'm>(&self, marks: impl IntoIterator<Item = &'m M>) -> Op<()> {
        if let Err(error) = role::check("submitting work") {
            return Op::failed(error.called_at(Location::caller()));
        }
        let mut all = Vec::new();
        for mark in marks {
            match mark.marks() {
                Ok(MarkList(marks)) => all.extend(marks),
                Err(error) => {
                    let error = of_dependency(self.engine(), error);
                    return Op::failed(error.called_at(Location::caller()));
                }
            }
        }
        self.wait_for(Ok(MarkList(all)))
    }

    /// [`record_timed`](Self::record_timed) for streams whose queue may be full: waits off the executor until
    /// the driver accepts the record. Work that other tasks submit meanwhile may end up in front of it.
    ///
    /// # Cancel safety
    /// If it is dropped, the event is still recorded, and discarded.
    ///
    /// # Errors
    /// As [`record_timed`](Self::record_timed).
    pub async fn record_timed_async(&self) -> Result<Event> {
        coop::proceed().await;
        role::check("submitting work")?;
        let stream = self.clone();
        let record = move || stream.record_timed().map_err(|error| error.without_line());
        self.home().crew.offload(self.line(), Unwanted::IsDone, record).await?
    }

    // ---- load -----------------------------------------------------------------------------

    /// Returns how many operations were submitted so far: the ticket of the last one. The launch of a
    /// [`Graph`](crate::Graph) counts as one, and so does each list of a [replayed batch](Self::replay),
    /// however it is launched; in any other batch each operation counts.
    #[must_use]
    pub fn submitted(&self) -> u64 {
        self.handle.state.progress.timeline.submitted()
    }

    /// Returns how many operations are known to be complete; the number lags until the device is queried.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.handle.state.progress.timeline.completed()
    }

    /// Queries how many operations are in flight, counted as by [`submitted`](Self::submitted). Never blocks.
    /// Inside a host function it answers from known state, and the poller queries. After the loss of the
    /// device it keeps its last value.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        let submitted = self.handle.state.progress.timeline.submitted();
        self.handle.state.ask_after_all();
        submitted - self.handle.state.progress.timeline.completed().min(submitted)
    }

    /// Waits until at most `max` operations are in flight, so that a producer stays below the driver's limit
    /// of about a thousand launches, beyond which the driver blocks the calling thread.
    ///
    /// A launch of a [`Graph`](crate::Graph), or a list of a [replayed batch](Self::replay), is one
    /// operation. Launched as a graph it also counts once towards the driver's thousand; launched one by one
    /// ([`Report::plain`](crate::Report::plain)), each of its launches counts: where that is common, `max`
    /// times the launches of a list should stay below a thousand.
    ///
    /// Progress is known in steps, which end wherever the program awaits, records or waits, and at each call
    /// of this method: called before each piece of work, it waits no longer than necessary. Operations queued
    /// without a pause form a single step of up to 128.
    ///
    /// # Errors
    /// The loss of the device.
    ///
    /// # Cancel safety
    /// Yes.
    pub async fn throttle(&self, max: u64) -> Result<()> {
        let stream = &self.handle.state;
        if let Some(ticket) = stream.pending_at(max) {
            return Op::pending(stream, ticket, HostValue::here(())).await;
        }
        coop::proceed().await;
        stream.engine.state.lost().map_or(Ok(()), |lost| Err(lost.clone()))
    }

    // ---- identity -------------------------------------------------------------------------

    /// Returns the stream's id, which is unique in the process and never reused.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.handle.state.progress.id
    }

    /// Returns the stream's priority: lower numbers go first; 0 where the device has none.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.handle.state.driver.options().priority
    }

    /// Queries whether the stream ignores the [legacy default stream](crate::Device::legacy_stream).
    ///
    /// # Errors
    /// The loss of the device.
    ///
    /// # Source
    /// `cuStreamGetFlags`.
    pub fn is_non_blocking(&self) -> Result<bool> {
        role::check("asking how a stream was made")?;
        let blocking = self.handle.state.driver.is_blocking(&*self.engine().backend);
        blocking.map(|blocking| !blocking).map_err(|code| self.handle.state.refused(code))
    }

    /// Returns the stream's name, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.handle.state.driver.name()
    }

    /// Takes a pinned host buffer of `len` zeros from the device's pool.
    ///
    /// # Blocking
    /// Zeroing takes about 0.1 ms per MiB; a buffer that comes back from a copy can be reused without
    /// zeroing. Up to 1 MiB, the buffer is cut from a slab of 2 MiB. The device registers the first slab in
    /// the background when it is opened, and the next one when no contiguous MiB is left: a call registers
    /// memory itself only if more was taken in the meantime. Above 1 MiB, the call registers the first buffer
    /// of each size: that takes 0.2 to 6 ms per MiB, and waits while another stream's [queue is
    /// full](Self#blocking).
    ///
    /// # Errors
    /// As [`Device::pinned`](crate::Device::pinned).
    #[track_caller]
    pub fn pinned<T: Element>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        let open = self.engine().check_open();
        open.and_then(|()| PinnedBuffer::zeroed(&self.home.pinned, len)).here()
    }

    pub(crate) fn home(&self) -> &Arc<Home> {
        &self.home
    }

    /// The handle that keeps the stream open.
    pub(crate) fn handle(&self) -> &Arc<StreamHandle> {
        &self.handle
    }

    /// A queue for a batch.
    #[track_caller]
    pub(crate) fn queue(&self) -> Queue<'_> {
        self.queue_for(false)
    }

    /// A queue for a single verb, at its caller's line.
    #[track_caller]
    #[inline]
    pub(crate) fn queue_of_one(&self) -> Queue<'_> {
        self.queue_for(true)
    }

    #[track_caller]
    #[inline]
    fn queue_for(&self, one_verb: bool) -> Queue<'_> {
        let (refused, permit) = (self.refused.as_ref(), self.permit.as_deref());
        Queue::new(&self.handle, &self.home, refused, permit, one_verb)
            .drawing_from(self.allowance.as_ref())
    }

    /// The point behind everything submitted so far, with an event.
    pub(crate) fn mark(&self) -> Result<MarkedPoint> {
        // Checked first: submitting takes the stream's lock, whose holder may be blocked in a full queue that
        // waits for the caller.
        role::check("submitting work")?;
        self.engine().check_open()?;
        if let Some(error) = &self.refused {
            return Err(error.without_line());
        }
        let ticket = self.handle.state.here();
        let point = self.handle.state.point(ticket);
        Ok(MarkedPoint { point, marker: self.handle.state.event_behind(ticket)? })
    }

    /// The same, with a timestamp.
    #[track_caller]
    pub(crate) fn mark_timed(&self) -> Result<MarkedPoint> {
        let at = self.queue_of_one().mark_in_queue("record_timed", true)?;
        self.handle.state.progress.timeline.release(at.point.ticket);
        Ok(at)
    }

    /// Orders later work behind `marks`.
    #[track_caller]
    pub(crate) fn wait_for(&self, marks: Result<MarkList>) -> Op<()> {
        let marks = match role::check("submitting work").and(marks) {
            Ok(MarkList(marks)) => marks,
            Err(error) => {
                let error = of_dependency(self.engine(), error);
                return Op::failed(error.called_at(Location::caller()));
            }
        };
        let queue = self.queue_of_one();
        let result = queue.wait_for(marks);
        let op = queue.finish(result);
        // Nothing to wait for: the point is already behind everything on the stream.
        if op.points().first().is_some_and(|point| point.ticket == 0) {
            return Op::pending(&self.handle.state, self.handle.state.tail(), HostValue::here(()));
        }
        op
    }
}

impl Marks for Stream {
    fn marks(&self) -> Result<MarkList> {
        Ok(MarkList(vec![Mark::Point(self.mark()?)]))
    }
}

impl Marks for Event {
    fn marks(&self) -> Result<MarkList> {
        Ok(MarkList(self.mark().into_iter().collect()))
    }
}

impl<T> Marks for Op<T> {
    /// An operation that failed has nothing to wait for: the wait reports its error.
    fn marks(&self) -> Result<MarkList> {
        if let Some(error) = self.submission_error() {
            return Err(error.clone());
        }
        let marks = self.points().iter().cloned().map(|point| Mark::Point(point.into()));
        Ok(MarkList(marks.collect()))
    }
}

/// Compares ids, not handles.
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
        write!(f, "Stream({:?}, {submitted} submitted, {completed} completed)", self.state())
    }
}
