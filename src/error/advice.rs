//! The text and advice of an out-of-memory error.
#![forbid(unsafe_code)]

/// How to make room for an allocation that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryAdvice {
    /// Await [`Stream::reclaimed`](crate::Stream::reclaimed), which waits for pending memory and for reservations to end.
    Reclaim,
    /// [Reserve](crate::Device::reserve) this much, which waits its turn, then [grow with it](crate::Reservation::grow), which waits for memory.
    Reserve,
    /// Drop buffers, if there are any, ask for less, or raise the limit: `reclaimed` would refuse at once.
    DropBuffers,
    /// End [loans](crate::Stream::lend_memory) of memory, which hold lent memory even after its buffers are dropped; otherwise as
    /// [`DropBuffers`](Self::DropBuffers).
    EndLoans,
    /// Try again: memory has become free in the meantime.
    TryAgain,
}

impl MemoryAdvice {
    pub(super) fn text(self, limit_bytes: Option<u64>, allocated_bytes: u64) -> String {
        let text = match self {
            MemoryAdvice::Reclaim => "await `reclaimed` and try again",
            MemoryAdvice::Reserve => "reserve so much, and grow with that (`Reservation::grow`)",
            MemoryAdvice::TryAgain => "try again: memory has become free in the meantime",
            MemoryAdvice::DropBuffers | MemoryAdvice::EndLoans => {
                let all = [
                    (self == MemoryAdvice::EndLoans, "end loans of memory"),
                    (allocated_bytes > 0, "drop buffers"),
                    (true, "ask for less"),
                    (limit_bytes.is_some(), "raise the limit"),
                ];
                let of_use: Vec<_> =
                    all.into_iter().filter_map(|(helps, what)| helps.then_some(what)).collect();
                let (last, others) = of_use.split_last().expect("one always helps");
                let or = if others.is_empty() { "" } else { ", or " };
                return others.join(", ") + or + last;
            }
        };
        text.to_owned()
    }
}

pub(super) fn within(limit_bytes: Option<u64>, total_bytes: u64) -> String {
    match limit_bytes {
        Some(limit) => format!("within the limit of {limit}"),
        None => format!("of {total_bytes}"),
    }
}

pub(super) fn refused_suffix(driver_refused: bool) -> &'static str {
    if driver_refused { "; the driver refused although there is room" } else { "" }
}

pub(super) fn leaked_suffix(leaked_bytes: u64) -> String {
    if leaked_bytes > 0 { format!(", {leaked_bytes} leaked") } else { String::new() }
}

pub(super) fn shared_suffix(shared_bytes: u64, budgeted_bytes: u64) -> String {
    let part = |bytes: u64, what| {
        if bytes > 0 { format!(", {bytes} {what}") } else { String::new() }
    };
    part(shared_bytes, "shared") + &part(budgeted_bytes, "reserved for others")
}

/// The operation's name, as the start of a message.
pub(super) fn operation(op: Option<&str>) -> String {
    op.map_or_else(String::new, |op| format!("{op}: "))
}
