//! [`Pressure`]: what an allocation does at the limit.
#![forbid(unsafe_code)]

/// What an allocation does that fits only once other streams got further: they have given up what it
/// needs, and still use it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pressure {
    /// Takes that memory over: its stream waits on the device until the others are through with it. The
    /// host waits for no work, but it may wait for other threads that have what it needs in hand, each in a
    /// call of its own: mostly microseconds, with dozens of threads at the limit milliseconds, and about a
    /// tenth of a second at most, with what the operating system adds.
    ///
    /// If the others wait for something that the host does later (a [`PinnedFlag`](crate::PinnedFlag)
    /// that a kernel watches, say), so does everything behind the allocation. A host that does that only
    /// after it heard from this stream waits for ever.
    ///
    /// If they do not get through with that, it is refused though it fits. The error advises
    /// [`TryAgain`](crate::MemoryAdvice::TryAgain) or [`Reclaim`](crate::MemoryAdvice::Reclaim).
    #[default]
    Wait,
    /// Is refused with [`ErrorDetail::OutOfMemory`](crate::ErrorDetail::OutOfMemory);
    /// [`Stream::reclaimed`](crate::Stream::reclaimed) tells when to try again.
    Fail,
}
