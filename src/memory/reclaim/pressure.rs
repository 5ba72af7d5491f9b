//! [`Pressure`]: the behavior of an allocation at the limit.
#![forbid(unsafe_code)]

/// What an allocation does if it fits only once other streams have progressed, because they still use freed
/// memory that it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pressure {
    /// Takes that memory over: its stream waits, on the device, until the others have finished with it. The
    /// host does not wait for device work, but it may wait for other threads that are freeing or allocating
    /// at that moment: usually microseconds, milliseconds with dozens of threads at the limit, about a tenth
    /// of a second at most, plus delays of the operating system.
    ///
    /// If the others wait for something that the host does later (say, a [`PinnedFlag`](crate::PinnedFlag)
    /// that a kernel watches), everything behind the allocation waits for it too. If the host does it only
    /// after work on this stream completes, that is a deadlock.
    ///
    /// A request that is refused halfway leaves its queued work, which holds what it allocated. Several requests that each hold one buffer while they
    /// allocate the next, and retry at once, starve one another: every try queues more, and none may finish. Have each
    /// [reserve](crate::Device::reserve) all that it needs before it begins; or await the refused request's work
    /// ([`Stream::done`](crate::Stream::done)) before it tries again.
    ///
    /// If the other threads take longer, the allocation is refused although it fits. The error advises
    /// [`TryAgain`](crate::MemoryAdvice::TryAgain) or [`Reclaim`](crate::MemoryAdvice::Reclaim).
    #[default]
    Wait,
    /// Fails with [`ErrorDetail::OutOfMemory`](crate::ErrorDetail::OutOfMemory);
    /// [`Stream::reclaimed`](crate::Stream::reclaimed) resolves when it is time to try again.
    ///
    /// A request that needs several buffers should [reserve](crate::Device::reserve) them, or allocate all of them before it queues work; or run few
    /// requests at once (a [`StreamPool`](crate::StreamPool), a semaphore). The queued work of a request that is refused halfway holds memory that
    /// only its own stream can reuse soon: requests on several streams that restart at once can block one another forever. The limit does not count
    /// the pinned memory of uploads that are queued meanwhile.
    Fail,
}
