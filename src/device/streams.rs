//! The streams of a device: made, default, current, legacy, a thread's.
#![forbid(unsafe_code)]

use super::Device;
use crate::backend::StreamOptions;
use crate::error::Result;
use crate::runtime::stream_state::StreamState;
use crate::stream::Stream;
use crate::stream::scope;
use crate::submit::wrong_device;
use crate::thread::role;

/// Options for making a [`Stream`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct StreamBuilder<'d> {
    device: &'d Device,
    options: StreamOptions,
    name: Option<Box<str>>,
}

impl Device {
    /// Makes a stream.
    ///
    /// # Blocking
    /// While any stream's [queue is full](Stream#blocking) and a thread blocks in the driver because of
    /// that, the driver makes no streams: the call waits until the queue moves. Make streams beforehand,
    /// or keep queues short with [`throttle`](Stream::throttle).
    ///
    /// And where more streams of a process are alive at once than ever before, the driver now and then makes room for
    /// more, which waits until every kernel that runs has ended: on an H200 with the 40th stream, and then with about
    /// each 85th. Streams that are kept, as in a [`StreamPool`](crate::StreamPool), do not get there.
    ///
    /// # Errors
    /// A device that is lost or closed; a thread on which it would dead-lock (in a host function or a host
    /// twin, in a waker).
    pub fn stream(&self) -> Result<Stream> {
        self.stream_builder().build()
    }

    /// Makes a stream, options first.
    pub fn stream_builder(&self) -> StreamBuilder<'_> {
        StreamBuilder { device: self, options: StreamOptions::default(), name: None }
    }

    /// The stream that every device has from the start, and where what is called on the device goes
    /// outside of scopes. It is an ordinary one, not CUDA's legacy default stream.
    #[must_use]
    pub fn default_stream(&self) -> &Stream {
        &self.default
    }

    /// Sets the default stream, for this handle and its clones: a handle of the same device whose
    /// verbs go to `stream` outside of scopes. Other handles stay as they are.
    ///
    /// # Errors
    /// [`ErrorDetail::WrongDevice`](crate::ErrorDetail::WrongDevice): a stream of another device.
    ///
    /// # Examples
    /// ```
    /// # let device = gpu_await::Device::host();
    /// let stream = device.stream()?;
    /// let on_stream = device.with_default_stream(&stream)?;
    /// on_stream.zeros::<f32>(4).queued()?;
    /// assert_eq!((stream.submitted(), device.default_stream().submitted()), (1, 0));
    /// # Ok::<(), gpu_await::Error>(())
    /// ```
    pub fn with_default_stream(&self, stream: &Stream) -> Result<Device> {
        if stream.engine().id != self.engine().id {
            return Err(wrong_device("the stream", self.engine(), stream.engine()));
        }
        Ok(Device { home: self.home.clone(), default: stream.clone() })
    }

    /// The stream to which verbs called on the device go: that of the innermost
    /// [scope](Stream::scope) on a stream of this device, else the
    /// [default stream](Self::default_stream).
    ///
    /// A call with an explicit stream is quicker by about 25 ns (`benches/current_stream.rs`).
    #[must_use]
    pub fn current_stream(&self) -> Stream {
        scope::innermost(Some(self.engine().id)).unwrap_or_else(|| self.default.clone())
    }

    /// [`Stream::reclaimed`] on the [current stream](Self::current_stream): resolves when an allocation
    /// of so many bytes may be tried again.
    ///
    /// # Cancel safety
    /// Yes.
    ///
    /// # Errors
    /// As [`Stream::reclaimed`].
    pub async fn reclaimed(&self, bytes: u64) -> Result<()> {
        self.current_stream().reclaimed(bytes).await
    }

    /// The stream of the calling thread, made at its first call and dropped when the thread ends.
    ///
    /// It is an ordinary stream that any thread may use. CUDA's own per-thread default stream is not
    /// offered: its handle means another stream on every thread, and tasks change threads.
    ///
    /// # Blocking
    /// The first call of a thread, as [`stream`](Self::stream).
    ///
    /// # Errors
    /// A device that is lost or closed; a thread on which it would dead-lock.
    pub fn thread_stream(&self) -> Result<Stream> {
        role::check("making a stream")?;
        self.engine().check_open()?;
        Ok(Stream::new(self.home.of_this_thread()?, self.home.clone()))
    }

    /// The lowest and the highest stream priority; the highest is the smaller number.
    #[must_use]
    pub fn priority_range(&self) -> (i32, i32) {
        self.engine().backend.limits().priorities
    }

    /// CUDA's *legacy default stream* (the NULL stream): its work waits for that of every stream that
    /// is not [non-blocking](StreamBuilder::non_blocking), also of other libraries, and theirs for
    /// its. One of the whole context, shared with everybody.
    ///
    /// # Ordering
    /// Others put work on it. [`done`](Stream::done), [`record`](Stream::record) and
    /// [`wait`](Stream::wait) cover that, and nothing else does.
    ///
    /// # Errors
    /// A device that is lost or closed. While anybody captures a stream that is not non-blocking into
    /// a graph, the driver refuses what is put on this one, and that capture is void.
    ///
    /// # Source
    /// `CU_STREAM_LEGACY`.
    pub fn legacy_stream(&self) -> Result<Stream> {
        Ok(Stream::new(self.home.legacy()?, self.home.clone()))
    }
}

impl StreamBuilder<'_> {
    /// Sets the priority: lower numbers go first; out of range is clamped, as the driver does. What
    /// came of it is [`Stream::priority`], as the driver tells it.
    ///
    /// It is a hint: when a block of a kernel ends, blocks of the stream with the highest priority
    /// that wait are started first. Blocks that run are not stopped for it (a kernel whose blocks
    /// fill the GPU until they are through holds up every other), and copies do not know it. It is
    /// among the streams of one process. Events order streams, priorities do not.
    ///
    /// The documentation of CUDA says in one place that a kernel of higher priority may pre-empt one
    /// that runs. Nothing here relies on that, nor on how a driver mode or an architecture differs.
    pub fn priority(mut self, priority: i32) -> Self {
        let (lowest, highest) = self.device.priority_range();
        self.options.priority = priority.clamp(highest.min(lowest), lowest.max(highest));
        self
    }

    /// Whether it stays out of the order of the
    /// [legacy default stream](Device::legacy_stream); true unless said otherwise.
    ///
    /// # Source
    /// `CU_STREAM_NON_BLOCKING`.
    pub fn non_blocking(mut self, non_blocking: bool) -> Self {
        self.options.blocking = !non_blocking;
        self
    }

    /// Gives it a name, for traces and messages.
    pub fn name(mut self, name: &str) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Makes the stream.
    ///
    /// # Blocking
    /// As [`Device::stream`].
    ///
    /// # Errors
    /// A device that is lost or closed; a thread on which it would dead-lock.
    ///
    /// # Source
    /// `cuStreamCreateWithPriority`.
    pub fn build(self) -> Result<Stream> {
        let stream = StreamState::open(self.device.engine(), self.options, self.name)?;
        Ok(Stream::new(stream, self.device.home.clone()))
    }
}

impl Stream {
    /// The device that it belongs to.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::at(self.home().clone())
    }
}
