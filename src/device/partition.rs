//! [`Partition`]: a share of a device's multiprocessors, for latency-critical work.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::Device;
use super::streams::StreamBuilder;
use crate::error::Result;
use crate::runtime::coop;
use crate::runtime::partitions::Share;
use crate::stream::Stream;
use crate::thread::role;

/// A share of a device's multiprocessors. Work on its streams runs there and nowhere else, whatever the other partitions run.
///
/// Priorities order waiting blocks; running blocks run to their end. Beside blocks of 2 ms that fill an H200, a kernel of eight blocks takes
/// milliseconds, whatever its priority; in a partition, with the others in another one, it takes as long as on an idle GPU. A partition
/// protects only if all work is in one: see [`DeviceBuilder::partition`](crate::DeviceBuilder::partition) and
/// [`Stats::streams_outside_partitions`](crate::Stats::streams_outside_partitions).
///
/// Memory, events, kernels and completion belong to the device: a stream in a partition differs from others in nothing else. Only the
/// multiprocessors are divided: not the L2 cache, the memory bandwidth, the copy engines, nor the driver's hardware queues, and a
/// fault ends all partitions.
///
/// **Hardware queues**: there are 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` sets when the process starts, up to 32. With more streams
/// than queues, in all partitions together, a stream may share its queue with a stream of another partition, and then waits for that stream's work in
/// flight, whatever its priority. So set it to 32 and use few streams; a `tracing` event at level `WARN` reports when there are too many.
///
/// Cheap to clone. Its multiprocessors are free again when no handle and no stream of it is left and their work is complete; compiled graphs are
/// destroyed with their stream.
///
/// On a host device it is a share in name only.
///
/// # Source
/// `cuDevSmResourceSplitByCount`, `cuGreenCtxCreate`.
#[derive(Clone)]
pub struct Partition {
    device: Device,
    share: Arc<Share>,
}

impl Device {
    /// Takes a share of at least `multiprocessors` multiprocessors; 0 means 1. The device is divided into grains, 8 multiprocessors each on an H200,
    /// and a partition is whole grains: [`Partition::multiprocessors`] returns how many multiprocessors it has. Partitions are disjoint.
    ///
    /// **Make them when the program starts.** The first time, the driver creates the partition for a set of grains, on a thread of this crate: in a
    /// millisecond on an idle device, but if work is in flight, host functions included, the driver waits for it (301 ms beside a kernel of 300 ms
    /// on an H200), and anything launched meanwhile runs after it. A set that was created before is reused at once.
    ///
    /// A set takes 4 to 6 MiB of device memory ([`MemoryInfo::partitions_bytes`](crate::MemoryInfo::partitions_bytes)), which the driver keeps as
    /// long as the device is open. So request few different sizes: for one size there are as many sets as fit beside each other, while partitions of
    /// all sizes that come and go fragment the free grains into ever new sets.
    ///
    /// If too little is free while streams or graphs without handles are ending, it waits up to 100 ms for their multiprocessors.
    ///
    /// # Cancel safety
    /// If the future is dropped, no partition is taken.
    ///
    /// # Errors
    /// [`ErrorDetail::NoPartition`](crate::ErrorDetail::NoPartition): not as many are free
    /// ([`Overloaded`](crate::ErrorKind::Overloaded)), or there never will be ([`Unsupported`](crate::ErrorKind::Unsupported));
    /// [`ErrorDetail::Requires`](crate::ErrorDetail::Requires): a driver before CUDA 12.5, or a GPU that it does not divide; the driver's
    /// errors on MIG instances, vGPUs and MPS; [`ErrorDetail::NoThread`](crate::ErrorDetail::NoThread); a device that is lost or closed.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// # let device = gpu_await::Device::host();
    /// let interactive = device.reserve_partition(1).await?;
    /// let stream = interactive.stream()?;
    /// stream.zeros::<f32>(8).await?;
    /// assert_eq!(stream.multiprocessors(), interactive.multiprocessors());
    /// # Ok::<(), gpu_await::Error>(()) }).unwrap();
    /// ```
    pub async fn reserve_partition(&self, multiprocessors: u32) -> Result<Partition> {
        coop::proceed().await;
        role::check_driver("making a partition")?;
        let multiprocessors = multiprocessors.max(1);
        let engine = self.engine().clone();
        engine.check_open()?;
        // One at a time: however many calls are dropped, they occupy one thread.
        let turn = engine.shares.partitions.turn().await;
        let taken = self.home.crew.run_alone(move || {
            let refused = |code| engine.refused(code);
            let share = engine
                .shares
                .partitions
                .take_soon(multiprocessors, || engine.pacing.attention.call());
            // If the future was dropped, the share is released before the next caller's turn.
            (share.map_err(|why| why.explain(engine.label(), multiprocessors, refused)), turn)
        });
        let (share, _turn) = taken.await?;
        Ok(Partition { device: self.clone(), share: share? })
    }
}

impl Partition {
    /// Returns its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns how many multiprocessors it has.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.share.multiprocessors()
    }

    /// Makes a stream in this partition; see [`Device::stream`].
    ///
    /// # Blocking
    /// As [`Device::stream`].
    ///
    /// # Errors
    /// As [`Device::stream`].
    #[track_caller]
    pub fn stream(&self) -> Result<Stream> {
        self.stream_builder().build()
    }

    /// Sets options before making a stream in this partition.
    pub fn stream_builder(&self) -> StreamBuilder<'_> {
        self.device.stream_builder().partition(self)
    }
}

impl<'d> StreamBuilder<'d> {
    /// Makes the stream in that partition of the device; otherwise it is in the
    /// [device's own](crate::DeviceBuilder::partition), if that has one. Such a stream is always
    /// [non-blocking](Self::non_blocking).
    ///
    /// # Source
    /// `cuGreenCtxStreamCreate`.
    pub fn partition(mut self, partition: &'d Partition) -> Self {
        self.partition = Some((&partition.device, &partition.share));
        self
    }
}

impl Stream {
    /// Returns the partition that the stream is in, if any.
    #[must_use]
    pub fn in_partition(&self) -> Option<Partition> {
        let share = self.state().driver.partition()?.clone();
        Some(Partition { device: self.device(), share })
    }

    /// Returns how many multiprocessors its work can use: those of its [partition], or all of the device.
    ///
    /// [partition]: Self::in_partition
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.state().driver.multiprocessors(&*self.engine().backend)
    }
}

/// Handles of the same share are equal.
impl PartialEq for Partition {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.share, &other.share)
    }
}

impl Eq for Partition {}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Partition({} of {})", self.multiprocessors(), self.device)
    }
}
