//! [`Partition`]: a share of a device's multiprocessors, for those who must not wait.
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

/// A share of a device's multiprocessors. Work of its streams runs there and nowhere else, beside whatever the others hold.
///
/// Priorities order what waits; blocks that run, run to their end. A kernel of eight blocks beside blocks of 2 ms that fill an H200 takes
/// milliseconds, whatever its priority; in a partition, with the others in another one, it takes as long as on an idle GPU. A partition
/// protects only if everybody is in one: see [`DeviceBuilder::partition`](crate::DeviceBuilder::partition) and
/// [`Stats::streams_outside_partitions`](crate::Stats::streams_outside_partitions).
///
/// Memory, events, kernels and completion are those of the device: a stream in a partition differs from others in nothing else. What is
/// divided are the multiprocessors alone: not the L2 cache, the memory's bandwidth, the copy engines, nor the driver's hardware queues, and a
/// fault ends all of them.
///
/// **Hardware queues**: there are 8, unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise when the process begins, up to 32. With more streams
/// than queues, in all partitions together, a stream may share its queue with one of another partition and then waits for what that has in
/// flight, whatever its priority. So set it to 32, and use few streams; a `tracing` event at level `WARN` says when they have become too many.
///
/// Cheap to clone. Its multiprocessors are free again when no handle and no stream of it is left and their work is over; compiled graphs go
/// with their stream.
///
/// On a host device it is a share in name alone.
///
/// # Source
/// `cuDevSmResourceSplitByCount`, `cuGreenCtxCreate`.
#[derive(Clone)]
pub struct Partition {
    device: Device,
    share: Arc<Share>,
}

impl Device {
    /// Takes a share of at least so many multiprocessors, of one for 0. The device is divided into grains, 8 multiprocessors each on an H200, and a
    /// partition is whole grains: [`Partition::multiprocessors`] says how many it has. Partitions are disjoint.
    ///
    /// **Make them when the program starts.** The first one of a set of grains is made by the driver, on a thread of this crate: in a
    /// millisecond on an idle device, but where work is in flight, host functions included, the driver waits for it (beside a kernel of 300 ms
    /// 301 ms on an H200), and what is launched meanwhile runs behind it. A set that was made before is used again at once.
    ///
    /// A set takes 4 to 6 MiB of device memory ([`MemoryInfo::partitions_bytes`](crate::MemoryInfo::partitions_bytes)), which the driver keeps
    /// as long as the device is open. So ask for few different sizes: of one size there are as many sets as fit beside each other, while those
    /// who come and go with any sizes leave the free grains in ever new pieces.
    ///
    /// What was given up just now counts: where too little is free and streams or graphs without handles are ending, it waits up to 100 ms for those.
    ///
    /// # Cancel safety
    /// Dropped, it takes none.
    ///
    /// # Errors
    /// [`ErrorDetail::NoPartition`](crate::ErrorDetail::NoPartition): as many are not free
    /// ([`Overloaded`](crate::ErrorKind::Overloaded)), or never will be ([`Unsupported`](crate::ErrorKind::Unsupported));
    /// [`ErrorDetail::Requires`](crate::ErrorDetail::Requires): a driver before CUDA 12.5, or a GPU that it does not divide; what the driver
    /// says of MIG instances, vGPUs and MPS; [`ErrorDetail::NoThread`](crate::ErrorDetail::NoThread); a device that is lost or closed.
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
        // One at a time: however many are given up, there is one thread for them.
        let turn = engine.shares.partitions.turn().await;
        let taken = self.home.crew.run_alone(move || {
            let refused = |code| engine.refused(code);
            let share = engine
                .shares
                .partitions
                .take_soon(multiprocessors, || engine.pacing.attention.call());
            // Given up, it goes before the next one's turn.
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

    /// Makes a stream in it; see [`Device::stream`].
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

    /// Sets options before making a stream in it.
    pub fn stream_builder(&self) -> StreamBuilder<'_> {
        self.device.stream_builder().partition(self)
    }
}

impl<'d> StreamBuilder<'d> {
    /// Makes the stream in that partition of the device; without one it is in the
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
    /// Returns the partition that the stream is in, if it is.
    #[must_use]
    pub fn in_partition(&self) -> Option<Partition> {
        let share = self.state().driver.partition()?.clone();
        Some(Partition { device: self.device(), share })
    }

    /// Returns how many multiprocessors its work runs on: those of its [partition], or all of the device.
    ///
    /// [partition]: Self::in_partition
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.state().driver.multiprocessors(&*self.engine().backend)
    }
}

/// The same share.
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
