//! Why memory cannot be reserved, or an allocation cannot draw from what is.
#![forbid(unsafe_code)]

/// What is wrong with a [reservation](crate::Device::reserve), or with an allocation that draws from one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum ReservationProblem {
    /// No drop of buffers or reservations would make it fit. Its kind is `OutOfMemory`.
    #[error("the device can reserve {most_bytes} bytes at most: ask for less, or raise the limit")]
    TooMuch { most_bytes: u64 },
    /// It does not fit at once, or would overtake `waiting` others, and was not to wait. Its kind is `Overloaded`.
    #[error(
        "{free_bytes} bytes can be reserved now, and {waiting} requests wait: try again later, or await `reserve`"
    )]
    NotNow { free_bytes: u64, waiting: u64 },
    /// It waited for as long as it may; `ahead` requests were in front of it. Its kind is `TimedOut`.
    #[error("not granted within {limit_ms} ms, with {ahead} requests ahead of it: retry later")]
    TooLate { limit_ms: u64, ahead: u64 },
    /// The task that awaits it holds another reservation, of `held_bytes`: with several such tasks, each would wait for the others for ever.
    /// Its kind is `InvalidCall`.
    #[error(
        "the task that awaits it holds one of {held_bytes} bytes: reserve all at once, say `nested`, drop that one, \
         or say that another task has it (`hand_over`)"
    )]
    Held { held_bytes: u64 },
    /// An allocation of `asked_bytes` is more than what is left of its reservation, which has a size of 0 once it is dropped. Its kind is
    /// `OutOfMemory`.
    #[error(
        "{left_bytes} of its {size_bytes} bytes are left: reserve more, or drop buffers that were made with it"
    )]
    Spent { size_bytes: u64, left_bytes: u64 },
}
