//! [`Pressure`]: what an allocation at the limit does.
#![forbid(unsafe_code)]

/// What an allocation does if it fits only once other streams have progressed: the memory it needs is freed,
/// and they still use it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pressure {
    /// Takes that memory over: its stream waits, on the device, until the others have finished with it. The
    /// host waits for no device work, but it may wait for other threads that are just then freeing or
    /// allocating: usually microseconds, milliseconds with dozens of threads at the limit, about a tenth of a
    /// second at most, plus delays of the operating system.
    ///
    /// If the others wait for something that the host does later (say, a [`PinnedFlag`](crate::PinnedFlag)
    /// that a kernel watches), everything behind the allocation waits for it too. A host that does it only
    /// after hearing from this stream waits for ever.
    ///
    /// If the other threads take longer, the allocation is refused although it fits. The error advises
    /// [`TryAgain`](crate::MemoryAdvice::TryAgain) or [`Reclaim`](crate::MemoryAdvice::Reclaim).
    #[default]
    Wait,
    /// Fails with [`ErrorDetail::OutOfMemory`](crate::ErrorDetail::OutOfMemory);
    /// [`Stream::reclaimed`](crate::Stream::reclaimed) resolves when to try again.
    ///
    /// A request that needs several buffers [reserves](crate::Device::reserve) what it needs, or takes all of them before it queues work, or few requests run at once (a
    /// [`StreamPool`](crate::StreamPool), a semaphore). One that is refused in the middle leaves what it queued, and its stream alone
    /// can reuse that memory soon: requests of several streams that begin again at once can hold one another up for ever. The limit
    /// does not count the pinned memory of uploads that are queued meanwhile.
    Fail,
}
