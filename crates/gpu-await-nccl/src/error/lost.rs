//! [`CollectiveLost`]: why a communicator was lost, and by which rank; and how ranks tell one another.
//!
//! | the rank where it began reports | the other ranks report |
//! |---|---|
//! | [`Aborted`](LostCause::Aborted) | [`PeerAborted`](LostCause::PeerAborted) |
//! | [`TimedOut`](LostCause::TimedOut) | [`PeerTimedOut`](LostCause::PeerTimedOut) |
//! | [`DeviceLost`](LostCause::DeviceLost), [`Nccl`](LostCause::Nccl) | [`PeerFailed`](LostCause::PeerFailed) |
//! | any other cause | the same |
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

/// The error of every pending and later operation of a lost communicator.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the communicator of rank {rank} is lost: {cause}")]
pub struct CollectiveLost {
    /// The rank in this process; the first one if there are several.
    pub rank: usize,
    /// Why.
    pub cause: LostCause,
}

impl CollectiveLost {
    /// Returns the rank that caused the loss: the one that is gone, aborted, timed out or failed. It is the same on every rank that
    /// learns of it from the same source: losses that several ranks find at once may be named differently.
    #[must_use]
    pub fn origin(&self) -> usize {
        self.cause.clone().ranks_mut().first().copied().unwrap_or(self.rank)
    }
}

/// Why a communicator was lost. Ranks tell one another, so that all of them report the same origin: in one process, and across processes
/// in a [`Group`](crate::Group).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LostCause {
    /// [`Communicator::abort`](crate::Communicator::abort) was called here.
    Aborted,
    /// An operation was pending longer than the communicator's limit.
    TimedOut {
        /// The limit.
        limit: Duration,
    },
    /// The process of a rank ended, or its host cannot be reached.
    PeerGone {
        /// The rank.
        rank: usize,
    },
    /// A rank dropped its communicator.
    PeerLeft {
        /// The rank.
        rank: usize,
    },
    /// Another rank aborted the communicator.
    PeerAborted {
        /// The rank.
        rank: usize,
    },
    /// An operation was pending longer than the limit on another rank.
    PeerTimedOut {
        /// The rank.
        rank: usize,
        /// Its limit.
        limit: Duration,
    },
    /// Another rank lost its device, or got an error from NCCL.
    PeerFailed {
        /// The rank.
        rank: usize,
        /// What it reports.
        reason: String,
    },
    /// The work that was to write an input of a rank's call failed. If that is known in time, the call is not made.
    ///
    /// An input may also fail after the call, if its work fails late, such as a collective of another communicator that exceeds its
    /// limit. Then the operation fails, with the outputs of that rank and of the ranks of its process that get data from it, and the
    /// communicator is lost as soon as that is known. In other processes, and in graphs, other ranks may have succeeded by then, with
    /// results computed from that input: await such work before its output goes to others.
    InputFailed {
        /// The rank.
        rank: usize,
        /// The error of the call.
        reason: String,
    },
    /// A rank has called [`Group::recover`](crate::Group::recover) or [`survivors`](crate::Group::survivors) while this one was connecting
    /// to it: that rank no longer connects this communicator, and waits for the same call here.
    PeerRecovers {
        /// The rank.
        rank: usize,
    },
    /// Two ranks called different operations, or with different roots, sizes or types.
    Mismatch {
        /// The ranks.
        ranks: [usize; 2],
        /// What each of them called.
        calls: [String; 2],
    },
    /// The process of a rank sent bytes that are not a message.
    BadMessage {
        /// The rank.
        rank: usize,
        /// What is wrong with them.
        reason: String,
    },
    /// A device of this process was lost, or a call was refused because it is closed.
    DeviceLost {
        /// Its rank.
        rank: usize,
        /// The device's error.
        error: gpu_await::Error,
    },
    /// NCCL reports an error.
    Nccl {
        /// The number that NCCL returned.
        code: i32,
        /// What NCCL says of it.
        text: String,
    },
}

impl fmt::Display for LostCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LostCause::Aborted => f.write_str("it was aborted"),
            LostCause::TimedOut { limit } => {
                write!(f, "an operation was pending longer than its limit, {limit:?}")
            }
            LostCause::PeerGone { rank } => write!(f, "the process of rank {rank} is gone"),
            LostCause::PeerLeft { rank } => write!(f, "rank {rank} has left"),
            LostCause::PeerAborted { rank } => write!(f, "rank {rank} aborted it"),
            LostCause::PeerTimedOut { rank, limit } => {
                write!(
                    f,
                    "an operation of rank {rank} was pending longer than its limit, {limit:?}"
                )
            }
            LostCause::PeerFailed { rank, reason } => write!(f, "rank {rank} failed: {reason}"),
            LostCause::InputFailed { rank, reason } => {
                write!(f, "an input of rank {rank} failed: {reason}")
            }
            LostCause::PeerRecovers { rank } => {
                write!(f, "rank {rank} has called `Group::recover` or `survivors`")
            }
            LostCause::Mismatch { ranks: [first, second], calls: [one, other] } => {
                write!(f, "rank {first} called {one}, rank {second} called {other}")
            }
            LostCause::BadMessage { rank, reason } => {
                write!(f, "the process of rank {rank} sent bytes that are no message: {reason}")
            }
            // The device's error says what happened to it.
            LostCause::DeviceLost { rank, error } => write!(f, "rank {rank} failed: {error}"),
            LostCause::Nccl { code, text } => write!(f, "NCCL reports {text} ({code})"),
        }
    }
}

/// Longer texts are cut when they are sent.
const MOST_TEXT: usize = 1 << 12;

impl LostCause {
    /// What other ranks report when `by` reports this.
    pub(crate) fn told(&self, by: usize) -> LostCause {
        match self {
            LostCause::Aborted => LostCause::PeerAborted { rank: by },
            LostCause::TimedOut { limit } => LostCause::PeerTimedOut { rank: by, limit: *limit },
            LostCause::DeviceLost { rank, error } => {
                LostCause::PeerFailed { rank: *rank, reason: error.to_string() }
            }
            LostCause::Nccl { .. } => LostCause::PeerFailed { rank: by, reason: self.to_string() },
            other => other.clone(),
        }
    }

    /// The ranks that it names, the origin first.
    pub(crate) fn ranks_mut(&mut self) -> &mut [usize] {
        match self {
            LostCause::PeerGone { rank }
            | LostCause::PeerLeft { rank }
            | LostCause::PeerRecovers { rank }
            | LostCause::PeerAborted { rank }
            | LostCause::PeerTimedOut { rank, .. }
            | LostCause::PeerFailed { rank, .. }
            | LostCause::InputFailed { rank, .. }
            | LostCause::BadMessage { rank, .. }
            | LostCause::DeviceLost { rank, .. } => std::slice::from_mut(rank),
            LostCause::Mismatch { ranks, .. } => ranks,
            LostCause::Aborted | LostCause::TimedOut { .. } | LostCause::Nccl { .. } => &mut [],
        }
    }

    /// The rank whose process is gone, if that is the cause.
    pub(crate) fn gone(&self) -> Option<usize> {
        match self {
            LostCause::PeerGone { rank } | LostCause::BadMessage { rank, .. } => Some(*rank),
            _ => None,
        }
    }

    /// What is [told](Self::told), as bytes: a tag, a rank, and the rest.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let limit_ns = |limit: &Duration| u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let (tag, rank, rest) = match self {
            LostCause::PeerGone { rank } => (0, rank, Vec::new()),
            LostCause::PeerLeft { rank } => (1, rank, Vec::new()),
            LostCause::PeerAborted { rank } => (2, rank, Vec::new()),
            LostCause::PeerTimedOut { rank, limit } => {
                (3, rank, limit_ns(limit).to_le_bytes().to_vec())
            }
            LostCause::PeerFailed { rank, reason } => (4, rank, text(reason)),
            LostCause::InputFailed { rank, reason } => (5, rank, text(reason)),
            LostCause::BadMessage { rank, reason } => (6, rank, text(reason)),
            LostCause::Mismatch { ranks: [first, second], calls: [one, other] } => {
                let second = (*second as u32).to_le_bytes();
                (7, first, [&second[..], &text(one), &text(other)].concat())
            }
            LostCause::PeerRecovers { rank } => (8, rank, Vec::new()),
            // These are sent as another cause.
            LostCause::Aborted
            | LostCause::TimedOut { .. }
            | LostCause::DeviceLost { .. }
            | LostCause::Nccl { .. } => return Vec::new(),
        };
        let mut bytes = vec![tag];
        bytes.extend((*rank as u32).to_le_bytes());
        bytes.extend(rest);
        bytes
    }

    /// From the bytes of a peer; the ranks are below `world`.
    pub(crate) fn from_bytes(mut bytes: &[u8], world: usize) -> Option<LostCause> {
        let bytes = &mut bytes;
        let [tag] = *take(bytes)?;
        let rank = take_rank(bytes, world)?;
        Some(match tag {
            0 => LostCause::PeerGone { rank },
            1 => LostCause::PeerLeft { rank },
            2 => LostCause::PeerAborted { rank },
            3 => {
                let limit = Duration::from_nanos(u64::from_le_bytes(*take(bytes)?));
                LostCause::PeerTimedOut { rank, limit }
            }
            4 => LostCause::PeerFailed { rank, reason: take_text(bytes)? },
            5 => LostCause::InputFailed { rank, reason: take_text(bytes)? },
            6 => LostCause::BadMessage { rank, reason: take_text(bytes)? },
            7 => {
                let ranks = [rank, take_rank(bytes, world)?];
                LostCause::Mismatch { ranks, calls: [take_text(bytes)?, take_text(bytes)?] }
            }
            8 => LostCause::PeerRecovers { rank },
            _ => return None,
        })
    }
}

fn text(text: &str) -> Vec<u8> {
    let cut = &text.as_bytes()[..text.len().min(MOST_TEXT)];
    [&(cut.len() as u16).to_le_bytes()[..], cut].concat()
}

fn take<'b, const N: usize>(bytes: &mut &'b [u8]) -> Option<&'b [u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(first)
}

fn take_rank(bytes: &mut &[u8], world: usize) -> Option<usize> {
    let rank = u32::from_le_bytes(*take(bytes)?) as usize;
    (rank < world).then_some(rank)
}

fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let len = usize::from(u16::from_le_bytes(*take(bytes)?));
    let (text, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_survive_the_wire() {
        let (rank, reason) = (3, "no memory".to_owned());
        let limit = Duration::from_millis(1500);
        let calls = ["barrier".to_owned(), "send".repeat(2000)];
        let causes = [
            LostCause::PeerGone { rank },
            LostCause::PeerLeft { rank },
            LostCause::PeerRecovers { rank },
            LostCause::Aborted,
            LostCause::TimedOut { limit },
            LostCause::Nccl { code: 5, text: "an error".to_owned() },
            LostCause::InputFailed { rank, reason: reason.clone() },
            LostCause::BadMessage { rank, reason },
            LostCause::Mismatch { ranks: [3, 1], calls },
        ];
        for cause in causes {
            let told = cause.told(2);
            let bytes = told.to_bytes();
            let read = LostCause::from_bytes(&bytes, 4).expect("as it was told");
            let (read, told) = (read.to_string(), told.to_string());
            assert!(told.starts_with(&read), "{read}");
            assert!(LostCause::from_bytes(&bytes, 2).is_none(), "a rank that does not exist");
            for len in 0..bytes.len() {
                assert!(LostCause::from_bytes(&bytes[..len], 4).is_none());
            }
        }
    }
}
