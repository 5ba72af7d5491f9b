//! Why memory cannot be reserved, or an allocation cannot draw from a reservation.
#![forbid(unsafe_code)]

use std::panic::Location;

/// Why a [reservation](crate::Device::reserve) was refused, or an allocation that draws from one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are described by each variant")]
pub enum ReservationProblem {
    /// No drop of buffers or reservations would make it fit. Its kind is `OutOfMemory`.
    #[error("the device can reserve {most_bytes} bytes at most: ask for less, or raise the limit")]
    TooMuch { most_bytes: u64 },
    /// It does not fit at once, or would overtake `waiting` others, and was not allowed to wait. Its kind is `Overloaded`.
    #[error(
        "{free_bytes} bytes can be reserved now, and {waiting} requests wait: try again later, or await `reserve` in a task that holds none"
    )]
    NotNow { free_bytes: u64, waiting: u64 },
    /// Its time limit passed with `ahead` requests ahead of it. Of the device's memory, `free_bytes` can be reserved, `allocated_bytes` are in
    /// buffers, and `budgeted_bytes` are the unused part of other reservations. Its kind is `TimedOut`.
    #[error(
        "not granted within {limit_ms} ms, with {ahead} requests ahead of it; {free_bytes} bytes can be reserved, buffers hold {allocated_bytes}, \
         {budgeted_bytes} are reserved: retry later"
    )]
    TooLate {
        limit_ms: u64,
        ahead: u64,
        free_bytes: u64,
        allocated_bytes: u64,
        budgeted_bytes: u64,
    },
    /// The task that awaits it holds another reservation, of `held_bytes`, made at `made_at`: several such tasks would wait for each other for ever.
    /// Its kind is `InvalidCall`.
    #[error(
        "the task that awaits it holds one of {held_bytes} bytes (made at {made_at}): reserve all at once, say `nested`, drop that one, \
         or say that another task has it (`hand_over`)"
    )]
    Held { held_bytes: u64, made_at: &'static Location<'static> },
    /// An allocation of `asked_bytes` exceeds what is left of its reservation, which was made at `made_at`, and has a size of 0 once it is
    /// dropped. Its kind is `OutOfMemory`.
    #[error("{}", spent(*.size_bytes, *.left_bytes, .made_at))]
    Spent { size_bytes: u64, left_bytes: u64, made_at: &'static Location<'static> },
}

fn spent(size_bytes: u64, left_bytes: u64, made_at: &Location<'_>) -> String {
    match size_bytes {
        0 => format!(
            "it is dropped, or shrunk to nothing (made at {made_at}): make buffers while it is there"
        ),
        _ => format!(
            "{left_bytes} of its {size_bytes} bytes are left (made at {made_at}): reserve more, or drop buffers that were made with it"
        ),
    }
}
