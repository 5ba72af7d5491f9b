//! The states of a worker, from its first process to its end, and of the standby beside it (pure).
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | `Waiting(until)` | there is no process; one is started then | `tick` → `Starting` |
//! | `Starting(since)` | the process has not said that it serves; it has said hello, or not | `serves` → `Serving`; a limit → `Killing` |
//! | `Serving(since)` | calls are sent | `close` → `Draining`; `killed`; `gone` |
//! | `Draining` | no call is sent; the process ends when it has answered its remaining calls, or is killed | `tick` → `Killing`, `gone` |
//! | `Killing(since)` | `SIGKILL` was sent, or will be; its process takes no call | `gone`; after the grace `tick` sets the process aside as *stuck* |
//! | `Ended` | closed, or given up: there will be no process | `revive`, of one that was given up → `Waiting` |
//!
//! A pause of the supervisor, or of the machine, counts towards none of them (`a_pause_counts_in_no_limit`).
//!
//! A process that is set aside is watched until it is reaped, and counts: with more of them than allowed, no other is started.
//!
//! With a standby there are two such states, one for each [`Role`]. That of the standby differs:
//!
//! | state of the standby | meaning | left by |
//! |---|---|---|
//! | `Ended` | there is none: the worker has not served yet, or ends, or standbys died too often, or none is wanted | `serves` of the main process, or `replace` → `Waiting` |
//! | `Waiting(until)` | as above; nothing starts while the main process does not serve | as above |
//! | `Starting(since)` | as above | also: `take_over` → the main one's `Starting` |
//! | `Serving(since)` | it is ready; it takes suspects, one at a time, and no other call | also: `take_over`, `promote` → the main one's `Serving` |
//! | `Draining` | also: it is the process that was replaced by `promote` | `gone` → `Waiting`, or `Ended` if none is wanted |
//! | `Killing(since)` | likewise; or it is the process that was replaced | `gone` → `Waiting`, after the delay that the death of that process costs, or `Ended` |
//!
//! A replacement is a standby that is promoted without a death: `replace` wants one, whether or not the worker has standbys, and `promote`
//! swaps it with the main process, which drains. A death of the main process meanwhile does as well: whatever serves next is another
//! process. A replacement that dies counts as a standby; after too many early deaths in a row, or as many starts that the system refuses, none
//! is wanted any more.
//!
//! A standby that is stopped or silent when it is to take the main process's place is killed instead, by the caller: the next main process
//! is started as if there had been none.
//!
//! One early death too many gives the worker up, unless its standby had taken over and serves: that one goes on, without a standby
//! (`what_serves_is_not_given_up`).
//!
//! A standby's death costs the worker only that standby: such deaths are counted separately, and too many early ones in a row end the standby
//! until another main process serves. A process that was replaced counts as what it was, a main one.
//!
//! # Invariants
//! 1. At most one process takes calls; apart from stuck ones a worker has at most one, or two with a standby (`a_worker_has_one_process`).
//! 2. Whatever the order of events, a process is started again or the worker has `Ended`: no state waits forever for a death that
//!    `SIGKILL` does not bring (`a_worker_has_one_process`).
//! 3. The deaths of standbys, and of replacements, never end, delay or interrupt the service (`a_worker_has_one_process`).
//! 4. A replacement interrupts nothing: the main process serves until the moment when the other one does (`a_worker_has_one_process`).
//! 5. A wanted replacement comes, or is given up: its waiters always wait for something that time or a death moves on
//!    (`a_worker_has_one_process`).
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use crate::restart::{Deaths, Next, Restart, Sign};

/// How long each state may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) hello: Duration,
    pub(crate) start: Duration,
    pub(crate) kill_grace: Duration,
    pub(crate) most_stuck: usize,
}

/// What a process is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It takes the calls.
    Main,
    /// It takes over when the main one falls; or it is the one that was replaced.
    Standby,
}

impl Role {
    pub(crate) const ALL: [Role; 2] = [Role::Main, Role::Standby];
}

/// The state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Waiting(Instant),
    Starting { since: Instant, said_hello: bool },
    Serving(Instant),
    Draining { until: Instant, served: Instant },
    Killing { since: Instant, served: Option<Instant> },
    Ended,
}

impl Phase {
    /// Whether there is a process, or one is being started.
    fn has_process(self) -> bool {
        !matches!(self, Phase::Waiting(_) | Phase::Ended)
    }
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Step {
    Nothing,
    /// Start a process.
    Start,
    /// Kill it: it did not say hello in time.
    NoHello,
    /// Kill it: its service did not start in time.
    NoStart,
    /// Kill it: it did not end in time.
    NoEnd,
    /// It cannot be killed: set it aside.
    SetAside,
    /// The worker is given up.
    GiveUp,
    /// No standby is started any more, until another main process serves.
    NoStandby,
    /// The system refused a replacement too often: it is given up.
    NotReplaced,
    /// The worker has ended, as it was asked to.
    End,
}

/// Why a process is no longer the main one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Predecessor {
    /// It fell.
    Fell,
    /// It was replaced, and is answering its remaining calls.
    Drains,
}

/// The life of one worker.
#[derive(Debug)]
pub(crate) struct Life {
    phases: [Phase; 2],
    deaths: Deaths,
    /// Deaths of standbys.
    standby_deaths: Deaths,
    /// How many starts of standbys the system refused, in a row, since a replacement was wanted.
    refusals: u32,
    /// A standby is wanted.
    has_standby: bool,
    /// Since when another process is to take the main one's place.
    wanted: Option<Instant>,
    /// The process in the standby's place, if that was the main one before.
    predecessor: Option<Predecessor>,
    stuck: usize,
    /// No other process is to be started.
    closing: bool,
}

impl Life {
    pub(crate) fn new(now: Instant, has_standby: bool) -> Self {
        let phases = [Phase::Waiting(now), Phase::Ended];
        let (deaths, standby_deaths) = (Deaths::default(), Deaths::default());
        let (wanted, predecessor, closing) = (None, None, false);
        let (refusals, stuck) = (0, 0);
        Life {
            phases,
            deaths,
            standby_deaths,
            refusals,
            has_standby,
            wanted,
            predecessor,
            stuck,
            closing,
        }
    }

    /// The life of a worker that has ended, with this many stuck processes.
    pub(crate) fn over(now: Instant, stuck: usize) -> Self {
        Life { phases: [Phase::Ended; 2], stuck, ..Life::new(now, false) }
    }

    pub(crate) fn phase(&self, role: Role) -> Phase {
        self.phases[role as usize]
    }

    pub(crate) fn early_deaths(&self) -> u32 {
        self.deaths.early()
    }

    pub(crate) fn stuck(&self) -> usize {
        self.stuck
    }

    /// Whether calls are sent to the main process.
    pub(crate) fn is_serving(&self) -> bool {
        matches!(self.phase(Role::Main), Phase::Serving(_))
    }

    /// Whether a standby is ready.
    pub(crate) fn is_standby_ready(&self) -> bool {
        matches!(self.phase(Role::Standby), Phase::Serving(_))
    }

    /// Whether a standby is ready, or will be unless it dies.
    pub(crate) fn expects_standby(&self) -> bool {
        // A draining process may take its time.
        let none = matches!(self.phase(Role::Standby), Phase::Ended | Phase::Draining { .. });
        self.has_standby && !self.closing && !none
    }

    /// Whether there is to be a standby and will be none, until another main process serves.
    pub(crate) fn lacks_standby(&self) -> bool {
        self.has_standby && self.is_serving() && self.phase(Role::Standby) == Phase::Ended
    }

    /// Whether the process in the standby's place was the main one before.
    pub(crate) fn is_replaced(&self, role: Role) -> bool {
        role == Role::Standby && self.predecessor.is_some()
    }

    /// Whether it is in the standby's place because it was replaced, and not because it fell.
    pub(crate) fn is_drained(&self, role: Role) -> bool {
        role == Role::Standby && self.predecessor == Some(Predecessor::Drains)
    }

    /// Whether another process is to take the main one's place.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Since when a replacement has been wanted, if a process is ready to be promoted.
    pub(crate) fn held_since(&self) -> Option<Instant> {
        self.wanted.filter(|_| self.can_promote())
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.phase(Role::Main) == Phase::Ended && !self.phase(Role::Standby).has_process()
    }

    /// When `tick` has something to do.
    pub(crate) fn next_due(&self, limits: &Limits) -> Option<Instant> {
        Role::ALL.into_iter().filter_map(|role| self.due(role, limits)).min()
    }

    fn due(&self, role: Role, limits: &Limits) -> Option<Instant> {
        match self.phase(role) {
            Phase::Waiting(_) if role == Role::Standby && !self.is_serving() => None,
            Phase::Waiting(until) | Phase::Draining { until, .. } => Some(until),
            Phase::Starting { since, said_hello } => {
                Some(since + if said_hello { limits.start } else { limits.hello })
            }
            Phase::Killing { since, .. } => Some(since + limits.kill_grace),
            Phase::Serving(_) | Phase::Ended => None,
        }
    }

    /// Nobody looked for this long, which does not count against the processes.
    pub(crate) fn held_up(&mut self, time: Duration) {
        self.wanted = self.wanted.map(|since| since + time);
        for phase in &mut self.phases {
            match phase {
                Phase::Starting { since, .. } | Phase::Killing { since, .. } => *since += time,
                Phase::Draining { until, .. } => *until += time,
                Phase::Waiting(_) | Phase::Serving(_) | Phase::Ended => {}
            }
        }
    }

    /// Time passes. Only a start or a stuck process changes the state here: the caller kills, and then says so.
    pub(crate) fn tick(&mut self, role: Role, now: Instant, limits: &Limits) -> Step {
        if self.due(role, limits).is_none_or(|due| now < due) {
            return Step::Nothing;
        }
        match self.phase(role) {
            Phase::Waiting(_) => {
                self.phases[role as usize] = Phase::Starting { since: now, said_hello: false };
                Step::Start
            }
            Phase::Starting { said_hello, .. } => {
                if said_hello {
                    Step::NoStart
                } else {
                    Step::NoHello
                }
            }
            Phase::Draining { .. } => Step::NoEnd,
            Phase::Killing { .. } => {
                self.stuck += 1;
                Step::SetAside
            }
            Phase::Serving(_) | Phase::Ended => Step::Nothing,
        }
    }

    /// The process said hello.
    pub(crate) fn said_hello(&mut self, role: Role) {
        if let Phase::Starting { said_hello, .. } = &mut self.phases[role as usize] {
            *said_hello = true;
        }
    }

    /// The service started; false if the process was not starting.
    pub(crate) fn serves(&mut self, role: Role, now: Instant) -> bool {
        let starts = matches!(self.phase(role), Phase::Starting { said_hello: true, .. });
        if starts {
            self.phases[role as usize] = Phase::Serving(now);
        }
        let standby_ended = self.phase(Role::Standby) == Phase::Ended;
        if starts && role == Role::Main && self.has_standby && standby_ended {
            self.phases[Role::Standby as usize] = Phase::Waiting(now);
            self.standby_deaths = Deaths::default();
        }
        starts
    }

    /// Whether `take_over` would do something.
    pub(crate) fn can_take_over(&self) -> bool {
        let [main, standby] = self.phases;
        let falls = matches!(main, Phase::Serving(_) | Phase::Killing { .. });
        let is_there = matches!(standby, Phase::Serving(_) | Phase::Starting { .. });
        falls && is_there && !self.closing
    }

    /// The main process falls, or is gone. Returns whether a standby swaps places with it.
    pub(crate) fn take_over(&mut self, now: Instant) -> bool {
        let [main, standby] = self.phases;
        let fallen = match main {
            Phase::Serving(since) => Phase::Killing { since: now, served: Some(since) },
            Phase::Killing { .. } => main,
            _ => return false,
        };
        let next = match standby {
            Phase::Serving(_) => Phase::Serving(now),
            Phase::Starting { .. } => standby,
            _ => return false,
        };
        if self.closing {
            return false;
        }
        (self.phases, self.predecessor) = ([next, fallen], Some(Predecessor::Fell));
        // This is the other process that was wanted.
        self.wanted = None;
        true
    }

    /// Another process is to take the main one's place, once it is ready; false if no process serves that could be replaced.
    pub(crate) fn replace(&mut self, now: Instant) -> bool {
        if !self.is_serving() || self.closing {
            return false;
        }
        if self.wanted.is_none() {
            (self.wanted, self.refusals) = (Some(now), 0);
        }
        if self.phase(Role::Standby) == Phase::Ended {
            self.phases[Role::Standby as usize] = Phase::Waiting(now);
            self.standby_deaths = Deaths::default();
        }
        true
    }

    /// Whether `promote` would do something.
    pub(crate) fn can_promote(&self) -> bool {
        self.is_wanted() && self.is_serving() && self.is_standby_ready()
    }

    /// If a replacement is wanted, the standby, which has no call, swaps places with the main process, which is to end by `until`.
    pub(crate) fn promote(&mut self, now: Instant, until: Instant) -> bool {
        let [Phase::Serving(served), Phase::Serving(_)] = self.phases else { return false };
        if !self.is_wanted() {
            return false;
        }
        self.phases = [Phase::Serving(now), Phase::Draining { until, served }];
        (self.predecessor, self.wanted) = (Some(Predecessor::Drains), None);
        true
    }

    /// No other process is started. A serving process is to end by `until`; returns which of the others must be killed.
    pub(crate) fn close(&mut self, until: Instant) -> [bool; 2] {
        (self.closing, self.wanted) = (true, None);
        self.phases.each_mut().map(|phase| match phase {
            Phase::Serving(served) => {
                *phase = Phase::Draining { until, served: *served };
                false
            }
            Phase::Draining { until: earlier, .. } => {
                *earlier = until.min(*earlier);
                false
            }
            Phase::Waiting(_) => {
                *phase = Phase::Ended;
                false
            }
            Phase::Starting { .. } => true,
            Phase::Killing { .. } | Phase::Ended => false,
        })
    }

    /// The process was sent `SIGKILL`.
    pub(crate) fn killed(&mut self, role: Role, now: Instant) {
        let phase = &mut self.phases[role as usize];
        *phase = match *phase {
            Phase::Starting { .. } => Phase::Killing { since: now, served: None },
            Phase::Serving(since) => Phase::Killing { since: now, served: Some(since) },
            Phase::Draining { served, .. } => Phase::Killing { since: now, served: Some(served) },
            other => other,
        };
    }

    /// The process is gone, could not be started, or was set aside; that of the main one after `take_over`.
    pub(crate) fn gone(
        &mut self,
        role: Role,
        now: Instant,
        sign: Sign,
        policy: &Restart,
        limits: &Limits,
    ) -> Step {
        let served = match self.phase(role) {
            Phase::Starting { .. } => None,
            Phase::Serving(since) => Some(since),
            Phase::Draining { served, .. } => Some(served),
            Phase::Killing { served, .. } => served,
            Phase::Waiting(_) | Phase::Ended => return Step::Nothing,
        };
        let before = if role == Role::Standby { self.predecessor.take() } else { None };
        let is_main = role == Role::Main || before.is_some();
        // A process that was replaced says nothing about the service by ending.
        let goes = before == Some(Predecessor::Drains) && sign == Sign::Early;
        let sign = if goes { Sign::None } else { sign };
        if self.closing {
            self.phases[role as usize] = Phase::Ended;
            return if self.has_ended() { Step::End } else { Step::Nothing };
        }
        let served = served.map(|since| now.saturating_duration_since(since));
        let deaths = if is_main { &mut self.deaths } else { &mut self.standby_deaths };
        let next = deaths.count(policy, served, sign);
        let is_full = self.stuck > limits.most_stuck;
        if role == Role::Main {
            // The next one is another process.
            self.wanted = None;
            let standby = &mut self.phases[Role::Standby as usize];
            if !self.has_standby && matches!(standby, Phase::Waiting(_)) {
                *standby = Phase::Ended;
            }
        }
        // A refusal says nothing about the service, and ends no standby; but those that wait for a replacement get an error.
        let is_refused = !is_main && sign == Sign::Refused;
        self.refusals = if is_refused { self.refusals.saturating_add(1) } else { 0 };
        let not_replaced = self.is_wanted() && self.refusals > policy.early_deaths;
        if not_replaced {
            self.wanted = None;
        }
        let (phase, step) = match next {
            Next::StartAfter(_)
                if role == Role::Standby && !self.has_standby && !self.is_wanted() =>
            {
                (Phase::Ended, Step::Nothing)
            }
            Next::StartAfter(delay) if !is_full => (Phase::Waiting(now + delay), Step::Nothing),
            // What serves goes on.
            Next::StartAfter(_) if role == Role::Standby => (Phase::Ended, Step::NoStandby),
            _ if role == Role::Main || is_main && !self.is_serving() => {
                (Phase::Ended, Step::GiveUp)
            }
            _ => (Phase::Ended, Step::NoStandby),
        };
        self.phases[role as usize] = phase;
        if step == Step::NoStandby {
            self.wanted = None;
        }
        if not_replaced && step == Step::Nothing { Step::NotReplaced } else { step }
    }

    /// No more processes are started; there is none, or none that counts.
    pub(crate) fn end(&mut self) {
        (self.phases, self.predecessor) = ([Phase::Ended; 2], None);
        self.wanted = None;
    }

    /// Begins anew, as if no process had died. Those that were set aside still count.
    pub(crate) fn revive(&mut self, now: Instant) {
        let anew = Life::new(now, self.has_standby);
        *self = Life { stuck: self.stuck, ..anew };
    }

    /// A process that was set aside is gone after all.
    pub(crate) fn unstuck(&mut self) {
        self.stuck -= 1;
    }
}
