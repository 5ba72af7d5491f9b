//! What can go wrong, as plain data.
//!
//! More than 500 lines: one table, mostly the docs of its rows.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use crate::codec::Refused;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a worker or a call failed: cheap to clone, `Send + Sync`.
///
/// Its text may go to clients: it says what happened and what to do, and quotes nothing that a process wrote, which may contain paths and
/// secrets. That is in the fields, in [`source`](std::error::Error::source) and in [`log`](Self::log), and `Debug` shows it. `Service` and
/// `Panicked` carry the service's own words, `Encode` those of its types.
///
/// | variant | what the caller can do |
/// |---|---|
/// | `NotInitialised`, `NotRegistered`, `InsideWorker`, `Forked`, `Unsupported`, `Unfit`, `Excluded`, `Encode`, `TooLarge`, `TooDeep` | fix the program |
/// | `Overloaded` | retry later |
/// | `Refused` | send something else, or wait until then |
/// | `PayloadsHeld` | drop payloads of earlier answers, and retry |
/// | `Lost` | retry, if the request may run again and is not the one that killed the process ([`Guilt`]) |
/// | `Deadline` | give up, or wait longer |
/// | `Service`, `Panicked`, `Decode` | as the service says; the worker goes on |
/// | `GivenUp` | read the cause and the log; `Worker::revive` |
/// | `NotReplaced` | read the cause; the worker serves |
/// | `Closed` | – |
/// | `System` | the system refuses what is needed |
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `main` did not call [`init`](crate::init), or a test did not call what [`test_main!`](crate::test_main) defines. Nothing was started.
    #[error(
        "`gpu_await_worker::init` is not the first statement of `main`: a process started now would run the program again"
    )]
    NotInitialised,
    /// [`init`](crate::init) does not name this service. Nothing was started.
    #[error(
        "`init` does not name the service {service}: a process of this program could not serve it"
    )]
    NotRegistered {
        /// Its name.
        service: &'static str,
    },
    /// A worker, or a program that it started, may not start workers.
    #[error("this process is a worker's, or was started by one: it starts no workers")]
    InsideWorker,
    /// This process is a fork of the one that the handle, or `init`, belongs to, and has none of its threads: nothing was done.
    #[error("a fork of the process that its workers belong to: they are its parent's")]
    Forked,
    /// The platform, or its set-up, lacks what workers need.
    #[error("workers need {what}")]
    Unsupported {
        /// What is missing.
        what: &'static str,
    },
    /// An option of the builder is outside of its limits. Nothing was started.
    #[error("{what}: {found}, and the limit is {limit}")]
    Unfit {
        /// Which one.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The least or the most that is possible.
        limit: u64,
    },
    /// One option of the builder makes another one useless. Nothing was started.
    #[error("`{option}` with `{by}`: {why}")]
    Excluded {
        /// The option that would do nothing.
        option: &'static str,
        /// The option that makes it useless.
        by: &'static str,
        /// Why.
        why: &'static str,
    },
    /// There is no such GPU, or the parent's `CUDA_VISIBLE_DEVICES` hides it.
    #[error("no GPU {wanted}: there are {found:?}")]
    NoGpu {
        /// The GPU that was asked for.
        wanted: String,
        /// The GPUs that there are.
        found: Vec<String>,
    },
    /// The operating system refused a call.
    #[error("{call}: {error}")]
    System {
        /// The call.
        call: &'static str,
        /// The system's error.
        error: String,
    },
    /// The limit of what may be under way is reached: the call was not made.
    #[error("{found} {what} are under way, and the limit is {limit}")]
    Overloaded {
        /// Calls, including reservations that callers hold; bytes of leases; or bytes of payloads without room.
        what: &'static str,
        /// How many; bytes of payloads without room include those that were refused.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// Earlier calls like it killed processes: the call is not sent, or not again. See [`WorkerBuilder::blame`](crate::WorkerBuilder::blame).
    #[error("the {what} killed processes, and is refused for another {} s", left(*until))]
    Refused {
        /// The request, or the client.
        what: &'static str,
        /// Until when.
        until: Instant,
    },
    /// There was no room for the payload of a response: the program holds the payloads of other answers, and dropped none for longer than
    /// [`held_payload_limit`](crate::WorkerBuilder::held_payload_limit). The service ran, perhaps in part.
    #[error(
        "no room for a payload of {bytes} bytes: the program holds payloads of {held} bytes, and there are {limit}: drop some, or give the worker more (`payload_bytes`)"
    )]
    PayloadsHeld {
        /// The size of the payload.
        bytes: u64,
        /// How many bytes the program holds.
        held: u64,
        /// How many bytes there are for payloads of responses.
        limit: u64,
    },
    /// A message or payload that is too large for any process.
    #[error("{bytes} bytes of {what}, and the limit is {limit}")]
    TooLarge {
        /// A request, a response, a payload.
        what: &'static str,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A value that nests too deep to be encoded or decoded. Each option, newtype, list, map, struct and variant with contents is a level.
    #[error("the {what} nests deeper than {limit} levels")]
    TooDeep {
        /// A request, a response, a configuration.
        what: &'static str,
        /// How deep it may be: 128, or less on a thread whose stack has no room for more.
        limit: u32,
    },
    /// The value cannot be encoded.
    #[error("the {what} cannot be encoded: {error}")]
    Encode {
        /// A request, a response, a configuration.
        what: &'static str,
        /// Why.
        error: String,
    },
    /// The message that arrived cannot be decoded.
    #[error("the {what} cannot be decoded: {error}")]
    Decode {
        /// A request, a response.
        what: &'static str,
        /// Why.
        error: String,
    },
    /// The service returned this failure.
    #[error("{0}")]
    Service(String),
    /// The service panicked in this call, or in dropping something. Its process goes on.
    #[error("the service panicked: {0}")]
    Panicked(String),
    /// The process died while it had the call.
    #[error(transparent)]
    Lost(#[from] WorkerLost),
    /// The deadline of the call passed. If a process has the call it goes on with it.
    #[error("the call's deadline passed")]
    Deadline,
    /// Processes died early too often, or the first one did not serve: no more are started, unless
    /// [`Worker::revive`](crate::Worker::revive) or, in a [`Group`](crate::Group), a probe has the worker begin anew.
    #[error(
        "given up{}{}",
        deaths(*early_deaths, cause, causes),
        what_to_do(cause, log)
    )]
    GivenUp {
        /// How many of them there were; none if the system did not even start the first process.
        early_deaths: u32,
        /// Why the last one died.
        #[source]
        cause: Cause,
        /// Why the last ones died, up to 16, in order.
        causes: Arc<[Cause]>,
        /// The end of what the last process wrote, of [`log_bytes`](crate::WorkerBuilder::log_bytes) at most.
        log: Arc<str>,
    },
    /// No replacement could be started for the process that serves, which goes on. See [`Worker::replace`](crate::Worker::replace).
    #[error("the worker's process is not replaced, and serves on: {}", cause.brief())]
    NotReplaced {
        /// Why the last process that was tried died, or was not started.
        #[source]
        cause: Cause,
    },
    /// The worker was closed.
    #[error("the worker is closed")]
    Closed,
}

/// How likely it is that a call killed its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Guilt {
    /// It ran alone, and its process died by itself, or was killed because the call took longer than its limit. Nothing that another call left
    /// behind can be the cause: for 1 s before it was sent, and since, no other call was answered there; or it was to run alone, and so begins when
    /// the device is done with what others left and is answered when the device is done with what it leaves, waiting at most 1 s each.
    ///
    /// Not ruled out for a call that was to run alone: what another call left on the host, such as a task, and what takes longer than 1 s.
    Alone,
    /// It was one of several that ran. After a limit ([`within`](crate::Call::within), [`executor_limit`](crate::WorkerBuilder::executor_limit))
    /// these are all calls that had begun: one that is over its limit may only have waited, on a stream or for the executor, for another one
    /// that has more time. Or it ran alone, soon after or while another one was answered, which may have left the reason on the device. Or it ran
    /// alone, and its process was killed or stopped for no reason that is known to be the call's: by the operator
    /// (`SIGKILL`, `SIGTERM`, `SIGINT`, `SIGHUP`, `SIGSTOP`), by the kernel for lack of memory, or over its limit of memory.
    Suspect,
    /// Something else ended the process: the end of the worker, or a limit, while this call had not begun.
    Innocent,
}

/// A process died while it had a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the worker's process died ({}) in attempt {attempt} of the call ({guilt:?}): {}",
    cause.brief(),
    guilt.advice(*idempotent)
)]
#[non_exhaustive]
pub struct WorkerLost {
    /// Why it died.
    #[source]
    pub cause: Cause,
    /// Whether this call may be the reason.
    pub guilt: Guilt,
    /// How often the call was sent.
    pub attempt: u32,
    /// Whether it could be sent more than once: [`Call::idempotent`](crate::Call::idempotent).
    pub idempotent: bool,
    /// The last lines that the process wrote, up to 1 KiB.
    pub log: Arc<str>,
}

/// How many seconds until then, rounded up.
fn left(until: Instant) -> u64 {
    let left = until.saturating_duration_since(Instant::now());
    left.as_secs() + u64::from(left.subsec_nanos() > 0)
}

impl Guilt {
    /// What its caller can do.
    fn advice(self, idempotent: bool) -> &'static str {
        match (self, idempotent) {
            (Guilt::Alone, _) => "it is the reason, and would be again",
            (Guilt::Suspect, false) => {
                "it may be the reason: `Call::idempotent` has it sent again, alone"
            }
            (Guilt::Suspect, true) => "it may be the reason, and is not sent again",
            (Guilt::Innocent, false) => "it is not the reason: send it again, if it may run twice",
            (Guilt::Innocent, true) => "it is not the reason, and is not sent again: send it anew",
        }
    }
}

/// Why a process died.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Its device was lost: the driver's code, and the operations that were in flight with their lines, as far as they are known. In
    /// verify mode that is the operation that faulted.
    #[error("fault: {0}")]
    Fault(String),
    /// Its service did not start: [`Service::start`](crate::Service::start) failed with this.
    #[error("the service did not start: {0}")]
    StartFailed(String),
    /// Its service did not start: [`Service::start`](crate::Service::start) panicked with this.
    #[error("the service did not start: its `start` panicked: {0}")]
    StartPanicked(String),
    /// Its service did not start: the configuration, which was encoded, cannot be decoded.
    #[error("the service did not start: its configuration cannot be decoded: {0}")]
    NoConfiguration(String),
    /// Its service did not start: its device cannot be opened, or its timeline begun.
    #[error("the service did not start: its device cannot be opened: {0}")]
    NoDevice(String),
    /// Its service did not start: `main` calls [`init`](crate::init) inside of a runtime, where a process of a worker cannot run its own.
    #[error(
        "`gpu_await_worker::init` is called inside of an async runtime, such as under `#[tokio::main]`, where a worker's process cannot run: write a plain `fn main()` that calls `init` and then builds the runtime"
    )]
    InsideRuntime,
    /// Its service did not start for lack of device memory.
    #[error("the service did not start: {0}")]
    OutOfDeviceMemory(String),
    /// It ended by itself, with this code.
    #[error("it exited with {0}")]
    Exited(i32),
    /// A signal ended it: 6 is an abort, 11 a stray pointer, 9 a kill from outside.
    #[error("signal {0}")]
    Signal(i32),
    /// The kernel killed it for lack of memory, as its control group of version 2 says; in one of version 1 that is `Signal(9)`.
    #[error("killed by the kernel for lack of memory")]
    OutOfMemory,
    /// It took longer than the limit of a call.
    #[error("a call took longer than {0:?}")]
    CallLimit(Duration),
    /// A call that ran alone, as a suspect, was not done 1 s after its caller had gone and its deadline had passed: all others, or all suspects,
    /// waited for it.
    #[error("a call that ran alone and that nobody waited for did not end")]
    Abandoned,
    /// Nothing polled its executor for longer than the limit: a call of the driver, or code of the service, does not return.
    #[error("its executor was not polled for {0:?}")]
    Hung(Duration),
    /// None of its threads ran, though it was not stopped.
    #[error("no thread of it ran for 5 s")]
    Dead,
    /// A standby or replacement was stopped, or none of its threads ran, when it was to take the calls, or while it had one that ran alone: it
    /// was killed, and another process started.
    #[error("it was stopped when it was to take the calls, or had one")]
    Stopped,
    /// It used more memory than its limit.
    #[error("{resident} bytes resident, and the limit is {limit}")]
    MemoryLimit {
        /// Its resident bytes.
        resident: u64,
        /// The limit.
        limit: u64,
    },
    /// It did not say hello in time: perhaps its `main` does not call [`init`](crate::init) first.
    #[error("no hello within {0:?}: is `gpu_await_worker::init` the first statement of `main`?")]
    NoHello(Duration),
    /// Its service did not start in time.
    #[error("the service did not start within {0:?}")]
    NoStart(Duration),
    /// Its service did not start in time, because it waited for kept memory that another process, or itself, has not filled, or that another
    /// one may write: see [`Host::keep`](crate::Host::keep), [`Host::keep_mut`](crate::Host::keep_mut).
    #[error(
        "the service did not start within {limit:?}: it waited for kept memory {name:?}, which process {process} fills or may write"
    )]
    KeptNotFilled {
        /// The name of the memory.
        name: String,
        /// The number of the process that was told to fill it, or may write it.
        process: u32,
        /// How long the start may take.
        limit: Duration,
    },
    /// It did not end in time.
    #[error("it did not end in time")]
    NoEnd,
    /// It sent something that this version of the crate does not send, or not at that point: the service, or something that it started, writes to
    /// a socket or to memory that is not its own.
    #[error("it broke the protocol: {0}")]
    Protocol(&'static str),
    /// It is not the program that started it, or does not know the service.
    #[error("another program: {0}")]
    WrongProgram(String),
    /// It would be a client of MPS, where the fault of one client ends all.
    #[error("MPS is on: the fault of any client would end it, and its own would end the others")]
    UnderMps,
    /// The system did not start it: what it refused, to the front or to the process, and its error.
    #[error("the system did not start it: {0}")]
    NotStarted(String),
    /// It was asked to end, by [`Worker::close`](crate::Worker::close) or the drop of the last handle.
    #[error("it was asked to end")]
    Closed,
    /// The code that looks after workers panicked. The process was killed; other workers go on.
    #[error("the supervisor panicked, which is a bug of this crate: {0}")]
    Supervisor(String),
    /// Somebody else waited for the process: how it ended is not known.
    #[error("unknown: somebody else waited for it")]
    Unknown,
}

impl Cause {
    /// Leaves out what the process or the system said, for readers who may not see that.
    pub(crate) fn brief(&self) -> String {
        let brief = match self {
            Cause::Fault(_) => "its device faulted",
            Cause::StartFailed(_) => {
                "the service did not start: its `start` returned an error, which the cause has"
            }
            Cause::StartPanicked(_) => {
                "the service did not start: its `start` panicked, with what the cause has"
            }
            Cause::NoConfiguration(_) => {
                "the service did not start: its configuration cannot be decoded, for what the cause has"
            }
            Cause::NoDevice(_) => {
                "the service did not start: its device cannot be opened, for what the cause has"
            }
            Cause::OutOfDeviceMemory(_) => "the service did not start for lack of device memory",
            Cause::KeptNotFilled { .. } => {
                "the service did not start in time: it waited for kept memory"
            }
            Cause::WrongProgram(_) => {
                "it is another program, or knows no such service: the cause has which"
            }
            Cause::Supervisor(_) => "the supervisor panicked, which is a bug of this crate",
            _ => return self.to_string(),
        };
        brief.to_owned()
    }
}

/// The deaths after which a worker is given up.
fn deaths(early_deaths: u32, cause: &Cause, causes: &[Cause]) -> String {
    match early_deaths {
        0 => format!(": {}", cause.brief()),
        1 => format!(" after 1 early death, by: {}", cause.brief()),
        n => {
            let (cause, before) = (cause.brief(), before(causes));
            format!(" after {n} early deaths in a row, the last by: {cause}{before}")
        }
    }
}

/// What there is to read, and what can be done.
fn what_to_do(cause: &Cause, log: &str) -> String {
    let log = if log.is_empty() {
        ""
    } else {
        "; `Error::log` has the end of what the last process wrote"
    };
    // The state under its lock is lost.
    let revive = match cause {
        Cause::Supervisor(_) => "",
        _ => "; `Worker::revive` begins anew",
    };
    format!("{log}{revive}")
}

/// The causes before the last one.
fn before(causes: &[Cause]) -> String {
    let Some((_, before)) = causes.split_last().filter(|(_, before)| !before.is_empty()) else {
        return String::new();
    };
    let before: Vec<_> = before.iter().map(Cause::brief).collect();
    format!("; before it: {}", before.join("; "))
}

impl Error {
    /// The end of what the dead process wrote, if there is any: for the operator, not for clients.
    pub fn log(&self) -> Option<&str> {
        match self {
            Error::Lost(WorkerLost { log, .. }) | Error::GivenUp { log, .. } => Some(log),
            _ => None,
        }
    }
}

#[cfg(target_os = "linux")]
impl Cause {
    /// Whether the process was killed or reaped from outside, which says nothing about what was running.
    pub(crate) fn is_kill(&self) -> bool {
        matches!(self, Cause::Signal(1 | 2 | 9 | 15) | Cause::Dead | Cause::Unknown)
    }

    /// Whether the system refused a start, which is not a death.
    pub(crate) fn is_refused_start(&self) -> bool {
        matches!(self, Cause::NotStarted(_))
    }
}

#[cfg(target_os = "linux")]
impl Error {
    /// The full text, for the operator.
    pub(crate) fn report(&self) -> String {
        let source = std::error::Error::source(self).map(|it| format!(": {it}"));
        let log = self.log().filter(|log| !log.is_empty());
        let log = log.map(|log| format!("\n{}", log.trim_end()));
        format!("{self}{}{}", source.unwrap_or_default(), log.unwrap_or_default())
    }

    /// A value that is not encoded.
    pub(crate) fn encode(what: &'static str, refused: Refused) -> Self {
        match refused {
            Refused::TooDeep(limit) => Error::TooDeep { what, limit },
            Refused::Because(error) => Error::Encode { what, error },
        }
    }

    /// A value that is not decoded.
    pub(crate) fn decode(what: &'static str, refused: Refused) -> Self {
        match refused {
            Refused::TooDeep(limit) => Error::TooDeep { what, limit },
            Refused::Because(error) => Error::Decode { what, error },
        }
    }

    /// An error of the operating system.
    pub(crate) fn system(call: &'static str, error: std::io::Error) -> Self {
        Error::System { call, error: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_happened() {
        let given_up = |early_deaths, causes: &[Cause], log: &str| {
            let cause = causes.last().unwrap().clone();
            let causes = causes.into();
            Error::GivenUp { early_deaths, cause, causes, log: log.into() }
        };
        let refused = || Cause::NotStarted("its handle: too many files".to_owned());
        let exited = Cause::Exited;
        let begins_anew = "; `Worker::revive` begins anew";
        let has_log = "; `Error::log` has the end of what the last process wrote";
        for (error, expected, log) in [
            (
                given_up(0, &[refused()], ""),
                ": the system did not start it: its handle: too many files",
                "",
            ),
            (given_up(1, &[exited(3)], ""), " after 1 early death, by: it exited with 3", ""),
            (
                given_up(2, &[exited(3), exited(4)], "a line\nanother\n"),
                " after 2 early deaths in a row, the last by: it exited with 4; before it: it exited with 3",
                has_log,
            ),
        ] {
            assert_eq!(error.to_string(), format!("given up{expected}{log}{begins_anew}"));
        }
        // Such a worker cannot begin anew.
        let text = given_up(0, &[Cause::Supervisor("a bug".to_owned())], "").to_string();
        assert!(!text.contains("revive"), "{text}");
        let until = Instant::now() + Duration::from_millis(47_564);
        let text = Error::Refused { what: "request", until }.to_string();
        assert_eq!(text, "the request killed processes, and is refused for another 48 s");
        let lost = |cause| {
            let log = "KEY=secret /home/me\n".into();
            let (guilt, attempt, idempotent) = (Guilt::Suspect, 1, false);
            Error::Lost(WorkerLost { cause, guilt, attempt, idempotent, log })
        };
        assert_eq!(
            lost(Cause::Signal(9)).to_string(),
            "the worker's process died (signal 9) in attempt 1 of the call (Suspect): it may be the reason: `Call::idempotent` has it sent again, alone"
        );
        // What a process or the system said is for the operator.
        let said = || "/home/me".to_owned();
        for cause in [
            Cause::Fault(said()),
            Cause::StartFailed(said()),
            Cause::StartPanicked(said()),
            Cause::NoConfiguration(said()),
            Cause::NoDevice(said()),
            Cause::OutOfDeviceMemory(said()),
            Cause::KeptNotFilled { name: said(), process: 7, limit: Duration::ZERO },
            Cause::WrongProgram(said()),
            Cause::Supervisor(said()),
        ] {
            let not_replaced = Error::NotReplaced { cause: cause.clone() };
            let given_up = given_up(2, &[cause.clone(), cause.clone()], "KEY=secret\n");
            for error in [lost(cause.clone()), given_up, not_replaced] {
                let text = error.to_string();
                assert!(!text.contains("/home") && !text.contains("secret"), "{text}");
                assert!(error.report().contains("/home"), "{error:?}");
                let log = error.log();
                assert_eq!(log.is_some(), error.report().contains("secret"), "{error:?}");
            }
        }
    }
}
