//! The streams of a device: new ones; the default, current and legacy ones; a thread's.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use super::Device;
use crate::backend::StreamOptions;
use crate::error::Result;
use crate::error::refused::Here;
use crate::runtime::partitions::Share;
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
    /// The partition and its device; `None`: this device's own partition, if any.
    pub(super) partition: Option<(&'d Device, &'d Arc<Share>)>,
    name: Option<Box<str>>,
}

impl Device {
    /// Makes a stream.
    ///
    /// # Blocking
    /// While a thread is blocked in the driver because some stream's [queue is full](Stream#blocking), the
    /// driver creates no streams: the call waits until that queue has room. Create streams when the program
    /// starts, or keep queues short with [`throttle`](Stream::throttle).
    ///
    /// When a process has more streams alive than ever before, the driver occasionally makes room for more,
    /// and that waits for every running kernel: on an H200 with the 40th stream, and then with about every
    /// 85th. A fixed set of streams, as in a [`StreamPool`](crate::StreamPool), avoids it.
    ///
    /// # Errors
    /// The device is lost or closed; the calling thread would deadlock (inside a host function, a host twin
    /// or a waker).
    #[track_caller]
    pub fn stream(&self) -> Result<Stream> {
        self.stream_builder().build()
    }

    /// Sets options before making a stream.
    pub fn stream_builder(&self) -> StreamBuilder<'_> {
        StreamBuilder {
            device: self,
            options: StreamOptions::default(),
            partition: None,
            name: None,
        }
    }

    /// Returns the stream that every device has from the start; verbs called on the device outside of scopes
    /// go there. It is an ordinary stream, not CUDA's legacy default stream.
    #[must_use]
    pub fn default_stream(&self) -> &Stream {
        &self.default
    }

    /// Returns a handle of the same device whose verbs go to `stream` outside of scopes. Other handles are
    /// unchanged.
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
        if stream.engine().state.id != self.engine().state.id {
            return Err(wrong_device("the stream", self.engine(), stream.engine()));
        }
        Ok(Device { home: self.home.clone(), default: stream.clone() })
    }

    /// Returns the stream that verbs called on the device go to: that of the innermost [scope](Stream::scope)
    /// on a stream of this device, else the [default stream](Self::default_stream).
    ///
    /// Naming the stream saves about 25 ns per call (`benches/current_stream.rs`).
    #[must_use]
    pub fn current_stream(&self) -> Stream {
        scope::innermost(Some(self.engine().state.id)).unwrap_or_else(|| self.default.clone())
    }

    /// [`Stream::reclaimed`] on the [current stream](Self::current_stream): resolves when an allocation
    /// of that many bytes can be tried again.
    ///
    /// # Cancel safety
    /// Yes.
    ///
    /// # Errors
    /// As [`Stream::reclaimed`].
    #[track_caller]
    pub fn reclaimed(&self, bytes: u64) -> impl Future<Output = Result<()>> + Send + use<> {
        let (stream, at) = (self.current_stream(), Location::caller());
        async move { stream.until_reclaimed(bytes).await.map_err(|error| error.called_at(at)) }
    }

    /// Returns the calling thread's own stream, created by the first call and dropped when the thread ends.
    ///
    /// It is an ordinary stream that any thread may use. CUDA's own per-thread default stream is not
    /// offered: its handle means another stream on every thread, and tasks change threads.
    ///
    /// # Blocking
    /// On the first call of a thread, as [`stream`](Self::stream).
    ///
    /// # Errors
    /// A device that is lost or closed; a thread on which it would deadlock.
    #[track_caller]
    pub fn thread_stream(&self) -> Result<Stream> {
        role::check("making a stream").and_then(|()| self.engine().check_open()).here()?;
        Ok(Stream::new(self.home.of_this_thread().here()?, self.home.clone()))
    }

    /// Returns the lowest and the highest stream priority; the highest is the smaller number.
    #[must_use]
    pub fn priority_range(&self) -> (i32, i32) {
        self.engine().limits.priorities
    }

    /// Returns CUDA's *legacy default stream* (the NULL stream). Its work waits for that of every stream that
    /// is not [non-blocking](StreamBuilder::non_blocking), and vice versa, including streams of other
    /// libraries. There is one for the whole context.
    ///
    /// # Ordering
    /// Other libraries put work on it. [`done`](Stream::done), [`record`](Stream::record) and
    /// [`wait`](Stream::wait) cover that work; nothing else does.
    ///
    /// # Errors
    /// The device is lost or closed. While a stream that is not non-blocking is being captured into a graph
    /// anywhere in the process, the driver refuses work on this one and invalidates that capture.
    ///
    /// # Source
    /// `CU_STREAM_LEGACY`.
    pub fn legacy_stream(&self) -> Result<Stream> {
        Ok(Stream::new(self.home.legacy()?, self.home.clone()))
    }
}

impl StreamBuilder<'_> {
    /// Sets the priority: lower numbers go first; values out of range are clamped, as the driver does.
    /// [`Stream::priority`] returns the resulting priority.
    ///
    /// It is a hint: when a block of a kernel ends, waiting blocks of the stream with the highest priority
    /// start first. Running blocks are not preempted (a kernel whose long-running blocks fill the GPU delays
    /// every other kernel), copies ignore it, and it applies among the streams of one process. Events order
    /// streams, priorities do not.
    ///
    /// CUDA's documentation says in one place that a kernel of higher priority may preempt a running one.
    /// Nothing here relies on that, nor on differences between driver modes or architectures.
    pub fn priority(mut self, priority: i32) -> Self {
        let (lowest, highest) = self.device.priority_range();
        self.options.priority = priority.clamp(highest.min(lowest), lowest.max(highest));
        self
    }

    /// Whether the stream ignores the [legacy default stream](Device::legacy_stream); true by default.
    ///
    /// # Source
    /// `CU_STREAM_NON_BLOCKING`.
    pub fn non_blocking(mut self, non_blocking: bool) -> Self {
        self.options.blocking = !non_blocking;
        self
    }

    /// Names the stream in traces and messages.
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
    /// A device that is lost or closed; a thread on which it would deadlock;
    /// [`ErrorDetail::WrongDevice`](crate::ErrorDetail::WrongDevice): a partition of another device;
    /// [`ErrorDetail::Unsupported`](crate::ErrorDetail::Unsupported): in a partition, but ordered with the legacy default
    /// stream.
    ///
    /// # Source
    /// `cuStreamCreateWithPriority`, `cuGreenCtxStreamCreate`.
    #[track_caller]
    pub fn build(self) -> Result<Stream> {
        let StreamBuilder { device, options, partition, name } = self;
        let engine = device.engine();
        if let Some((other, _)) =
            partition.filter(|(other, _)| other.engine().state.id != engine.state.id)
        {
            return Err(wrong_device("the partition", engine, other.engine())).here();
        }
        let share = partition.map(|(_, share)| share).or(engine.shares.partition.as_ref()).cloned();
        let stream = StreamState::open_in(engine, share, options, name).here()?;
        Ok(Stream::new(stream, device.home.clone()))
    }
}

impl Stream {
    /// Returns the stream's device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::at(self.home().clone())
    }
}
