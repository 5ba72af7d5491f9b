//! Which worker of a group has a call, and whether a call that came back goes to another one (pure).
//!
//! | a worker | takes a call | is picked |
//! |---|---|---|
//! | serves | now | first: the one with the fewest calls in flight, equals in turn |
//! | starts, is being started again or probed, or its process is stopped or blocked | later | where none serves that has room |
//! | waits for [kept memory](crate::Host::keep_mut) of another worker | when that one has ended | where all others have ended |
//! | is given up, closing or closed | never | where there is no other: its error says why |
//!
//! | a call that came back | goes on |
//! |---|---|
//! | was never sent to that worker's process | to whichever is picked |
//! | was lost beside others: a suspect | alone: in its own worker's next process, which has nothing else to do yet; if that worker is given up, in whichever is picked |
//! | was lost by a kill from outside | once beside others, in its own worker's next process; then as a suspect |
//! | was lost by the fault of another | to whichever is picked |
//! | killed its process alone; or was sent as often as it may be | nowhere |
//!
//! So one request takes down one GPU at a time, and calls lost with a GPU that does not come back are answered by another.
//!
//! # Invariants
//! 1. A call is sent at most as often as it may be, over all workers, and one that ran alone when its process died is never sent again
//!    (`attempts_count_over_all`).
//! 2. While a worker takes calls, none goes to one that does not (`the_least_loaded_is_picked`).
#![forbid(unsafe_code)]

use std::cmp::Reverse;

use crate::calls::{Runs, Terms};
use crate::error::{Error, Guilt};

/// Whether a worker takes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Now,
    /// They wait until it serves.
    Later,
    /// They wait until another worker ends, which may have no reason to.
    Blocked,
    Never,
}

/// What the group sees of a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) ready: Readiness,
    /// Calls in flight, including abandoned ones.
    pub(crate) load: usize,
    /// There is no room for more.
    pub(crate) is_full: bool,
}

impl Seen {
    /// The best goes first.
    fn rank(&self) -> u8 {
        match (self.ready, self.is_full) {
            (Readiness::Now, false) => 0,
            (Readiness::Later, false) => 1,
            (Readiness::Now, true) => 2,
            (Readiness::Later, true) => 3,
            (Readiness::Blocked, _) => 4,
            (Readiness::Never, _) => 5,
        }
    }
}

/// The worker for a call: `own`, if it takes calls at all, else by load, starting at number `turn`. 0 if there are none.
pub(crate) fn pick(
    seen: impl ExactSizeIterator<Item = Seen>,
    turn: usize,
    own: Option<usize>,
) -> usize {
    let workers = seen.len().max(1);
    let key = |(at, seen): &(usize, Seen)| {
        let takes = matches!(seen.ready, Readiness::Now | Readiness::Later);
        let is_own = takes && own == Some(*at);
        (Reverse(is_own), seen.rank(), seen.load, (at + workers - turn % workers) % workers)
    };
    seen.enumerate().min_by_key(key).map_or(0, |(at, _)| at)
}

/// How a call that came back with this error goes on, after this many attempts in all; `None` if it ends.
pub(crate) fn goes_on(terms: Terms, error: &Error, sent: u32) -> Option<Terms> {
    let was_sent = sent > terms.sent_before;
    let runs = match error {
        Error::Lost(lost) if lost.guilt == Guilt::Alone => return None,
        Error::Lost(lost) if lost.guilt == Guilt::Innocent => Runs::Anywhere,
        Error::Lost(lost) if lost.cause.is_kill() && terms.runs_beside(sent) => Runs::Home,
        Error::Lost(_) => Runs::Alone,
        // Its process was killed with the worker, and may have begun the call.
        Error::GivenUp { .. } | Error::Closed if was_sent => Runs::Alone,
        Error::GivenUp { .. } | Error::Closed => terms.runs,
        _ => return None,
    };
    let may_go_on = !was_sent || sent < terms.attempts;
    may_go_on.then_some(Terms { sent_before: sent, runs, ..terms })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Cause, WorkerLost};

    const NOW: Seen = Seen { ready: Readiness::Now, load: 0, is_full: false };
    const LATER: Seen = Seen { ready: Readiness::Later, ..NOW };
    const BLOCKED: Seen = Seen { ready: Readiness::Blocked, ..NOW };
    const NEVER: Seen = Seen { ready: Readiness::Never, ..NOW };

    fn loaded(seen: Seen, load: usize) -> Seen {
        Seen { load, is_full: load >= 10, ..seen }
    }

    #[test]
    fn the_least_loaded_is_picked() {
        let pick = |seen: &[Seen], turn, own| pick(seen.iter().copied(), turn, own);
        assert_eq!(pick(&[loaded(NOW, 3), loaded(NOW, 2), loaded(NOW, 3)], 0, None), 1);
        // Equals in turn, whatever number that has.
        let turns: Vec<_> = (0..6).map(|turn| pick(&[NOW; 3], turn, None)).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
        // One that serves, however busy; but rather one with room.
        assert_eq!(pick(&[LATER, loaded(NOW, 9), NEVER], 0, None), 1);
        assert_eq!(pick(&[loaded(LATER, 3), loaded(NOW, 10), NEVER], 0, None), 0);
        assert_eq!(pick(&[NEVER, NEVER, loaded(LATER, 10)], 0, None), 2);
        assert_eq!(pick(&[NEVER, NEVER], 3, None), 1);
        // One that may never serve, where there is no other: not even its own.
        assert_eq!(pick(&[BLOCKED, loaded(LATER, 10), NEVER], 0, Some(0)), 1);
        assert_eq!(pick(&[NEVER, BLOCKED], 0, None), 1);
        // Its own, unless that never takes calls again.
        assert_eq!(pick(&[NOW, loaded(LATER, 7)], 0, Some(1)), 1);
        assert_eq!(pick(&[NOW, NEVER], 1, Some(1)), 0);
        assert_eq!(pick(&[], 5, None), 0);
    }

    #[test]
    fn attempts_count_over_all() {
        let lost = |guilt, attempt| {
            let cause = Cause::Signal(11);
            Error::Lost(WorkerLost { cause, guilt, attempt, idempotent: true, log: "".into() })
        };
        let given_up = Error::GivenUp {
            early_deaths: 3,
            cause: Cause::Unknown,
            causes: [].into(),
            log: "".into(),
        };
        let once = Terms { attempts: 1, ..Terms::default() };
        let often = Terms { attempts: 3, ..once };
        for guilt in [Guilt::Alone, Guilt::Suspect, Guilt::Innocent] {
            assert!(goes_on(once, &lost(guilt, 1), 1).is_none());
            assert!(goes_on(often, &lost(guilt, 3), 3).is_none());
        }
        assert!(goes_on(often, &lost(Guilt::Alone, 1), 1).is_none());
        let second = goes_on(often, &lost(Guilt::Suspect, 1), 1).unwrap();
        assert!((second.sent_before, second.runs) == (1, Runs::Alone));
        let third = goes_on(second, &lost(Guilt::Innocent, 2), 2).unwrap();
        assert!((third.sent_before, third.runs) == (2, Runs::Anywhere));
        // A kill from outside loses all calls: once they run beside one another, where they were.
        let killed = |attempt| {
            let (cause, guilt, log) = (Cause::Signal(9), Guilt::Suspect, "".into());
            Error::Lost(WorkerLost { cause, guilt, attempt, idempotent: true, log })
        };
        assert_eq!(goes_on(often, &killed(1), 1).unwrap().runs, Runs::Home);
        assert_eq!(goes_on(often, &killed(2), 2).unwrap().runs, Runs::Alone);
        assert_eq!(
            goes_on(Terms { attempts: 2, ..often }, &killed(1), 1).unwrap().runs,
            Runs::Alone
        );
        // A call that no process has had goes on, whether or not it may run again, and stays a suspect.
        for error in [&given_up, &Error::Closed] {
            assert!(goes_on(once, error, 0).is_some());
            assert!(goes_on(once, error, 1).is_none());
            assert_eq!(goes_on(second, error, 1).unwrap().runs, Runs::Alone);
            assert_eq!(goes_on(third, error, 2).unwrap().runs, Runs::Anywhere);
            assert!(goes_on(third, error, 3).is_none());
        }
        for error in [Error::Deadline, Error::Forked, Error::Service("no".into())] {
            assert!(goes_on(often, &error, 1).is_none());
        }
    }
}
