//! When a worker that died is started again, and when that is given up (pure).
//!
//! | state | meaning |
//! |---|---|
//! | no quick death | the last process served for [`Restart::settled`] at least: the next one starts at once |
//! | `n` quick deaths | in a row: the next one starts after [`Restart::first_delay`], doubled each time, up to [`Restart::most_delay`] |
//! | given up | more than [`Restart::early_deaths`] of them came while no call ran, the last one of them just now; a worker whose standby took over serves on |
//!
//! # Invariants
//! 1. Between two starts beyond the first two in a row of quick deaths lies a delay that never shrinks (`delays_grow_and_end`).
//! 2. A process that served long enough makes up for all quick deaths (`delays_grow_and_end`).
//! 3. Deaths while calls ran, which callers asked for or caused, never end a worker (`delays_grow_and_end`).
#![forbid(unsafe_code)]

use std::time::Duration;

/// How a worker is started again when its process died.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use gpu_await_worker::Restart;
/// let patient = Restart { early_deaths: 20, ..Restart::default() };
/// assert_eq!(patient.settled, Duration::from_secs(1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restart {
    /// A process that served this long before it died did not die quickly. 1 s.
    pub settled: Duration,
    /// The delay after the second quick death in a row; the first costs none. 100 ms. It doubles with each further one.
    pub first_delay: Duration,
    /// The longest delay. 10 s. Where requests may kill one process after another, set it to what callers can wait.
    pub most_delay: Duration,
    /// The worker is given up after more early deaths in a row than this. 10. A quick death is early if no call ran: in the start, or idle. Other
    /// quick deaths, which calls asked for or caused, lead to delays but never to giving up. Nor is a worker given up while its standby serves.
    pub early_deaths: u32,
}

impl Default for Restart {
    fn default() -> Self {
        Restart {
            settled: Duration::from_secs(1),
            first_delay: Duration::from_millis(100),
            most_delay: Duration::from_secs(10),
            early_deaths: 10,
        }
    }
}

/// What follows a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Next {
    /// Start another process after this time.
    StartAfter(Duration),
    /// Start none.
    GiveUp,
}

/// What a death says about the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// It dies by itself.
    Early,
    /// Calls ran: one of them may be the reason.
    InCalls,
    /// The system refused this process what a start needs.
    Refused,
    /// Nothing: the operator asked for it, or a dying process beside the start still holds the memory.
    None,
}

/// How many processes died quickly, in a row, and how many of these while no call ran.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deaths {
    quick: u32,
    early: u32,
}

impl Deaths {
    /// A process died: having served for that long, or without having served.
    pub(crate) fn count(&mut self, policy: &Restart, served: Option<Duration>, sign: Sign) -> Next {
        if served.is_some_and(|served| served >= policy.settled) {
            *self = Deaths::default();
        } else if sign != Sign::None {
            self.quick = self.quick.saturating_add(1);
            self.early = self.early.saturating_add(u32::from(sign == Sign::Early));
        }
        if sign == Sign::Early && self.early > policy.early_deaths {
            return Next::GiveUp;
        }
        // A single death of a process that served is what this crate is for: the restart has no delay.
        let doublings = match (self.quick, served) {
            (0 | 1, Some(_)) => return Next::StartAfter(Duration::ZERO),
            (n, _) => n.saturating_sub(if served.is_some() { 2 } else { 1 }),
        };
        let delay =
            policy.first_delay.saturating_mul(1u32.checked_shl(doublings).unwrap_or(u32::MAX));
        Next::StartAfter(delay.min(policy.most_delay))
    }

    /// How many there were in a row, while no call ran.
    pub(crate) fn early(self) -> u32 {
        self.early
    }
}
