//! The options that a worker's builder sets, and their limits (pure).
//!
//! # Invariants
//! 1. Options that no process can be started with, or that would hold up other workers, are refused before anything starts
//!    (`options_that_cannot_work_are_refused`).
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;

use gpu_await_protocol::lock::Mutex;

use crate::blame::{Blame, Blamed};
use crate::error::{Error, Result};
use crate::heart;
use crate::replace::Replace;
use crate::restart::Restart;
use crate::slab::status_bytes;

/// Slabs are whole pages.
const PAGE: u64 = 4096;
pub(crate) const CALLS: RangeInclusive<u64> = 1..=1 << 20;
/// The supervisor's buffers are as long; and a longer packet would need more than 4 MiB of contiguous kernel memory, which is never there
/// (`ENOBUFS`).
const MESSAGE_BYTES: RangeInclusive<u64> = 64..=4 << 20;
const SLAB_BYTES: RangeInclusive<u64> = PAGE..=1 << 40;
const THREADS: RangeInclusive<u64> = 1..=1024;
const LOG_BYTES: RangeInclusive<u64> = 0..=64 << 20;
/// A few hundred bytes each, and names that a program may make longer: a timeline has at most 64 MiB.
const TIMELINE: RangeInclusive<u64> = 0..=1 << 16;
const LEAST_RESIDENT: u64 = 1 << 20;
const MOST_HOT: Duration = Duration::from_secs(1);
/// The longest variable of a program's environment, with its name, `=` and the zero at its end: `MAX_ARG_STRLEN` of `execve(2)`.
const VARIABLE_BYTES: u64 = 128 << 10;
/// All variables together: a quarter of the smallest usual stack has room for twice as much.
const ENVIRONMENT_BYTES: u64 = 1 << 20;

/// The longest limit: a century, which can be added to any moment.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A limit that can be added to any moment.
pub(crate) fn capped(limit: Duration) -> Duration {
    limit.min(CENTURY)
}

/// The options of a worker, with their defaults.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) most_calls: usize,
    /// Calls of all workers of its group: those that another worker admitted may come to this one.
    pub(crate) most_group_calls: usize,
    pub(crate) most_message_bytes: u32,
    pub(crate) most_waiting_bytes: u64,
    pub(crate) request_slab_bytes: u64,
    pub(crate) response_slab_bytes: u64,
    /// The UUID of a GPU; `None` for the host device.
    pub(crate) gpu: Option<String>,
    pub(crate) device_memory_bytes: Option<u64>,
    pub(crate) verify: bool,
    pub(crate) hold_answers: bool,
    pub(crate) allow_mps: bool,
    pub(crate) threads: u32,
    pub(crate) hot: Duration,
    pub(crate) held: Duration,
    pub(crate) hello: Duration,
    pub(crate) start: Duration,
    pub(crate) kill_grace: Duration,
    pub(crate) most_stuck: usize,
    pub(crate) executor: Option<Duration>,
    pub(crate) resident_bytes: Option<u64>,
    pub(crate) restart: Restart,
    pub(crate) standby: bool,
    pub(crate) replace: Replace,
    pub(crate) blame: Option<Blame>,
    pub(crate) log_bytes: usize,
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// What is known about keys, shared by all workers of a group.
    pub(crate) blamed: Arc<Mutex<Blamed>>,
    /// Once given up, it is probed: it begins anew after a while.
    pub(crate) probes: bool,
    /// How many operations of the device each process logs.
    pub(crate) timeline: u32,
}

impl Options {
    /// How many calls it may have at once, including those that count elsewhere.
    pub(crate) fn most_slots(&self) -> usize {
        self.most_calls.max(self.most_group_calls)
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            most_calls: 4096,
            most_group_calls: 0,
            most_message_bytes: 64 << 10,
            most_waiting_bytes: 256 << 20,
            request_slab_bytes: 64 << 20,
            response_slab_bytes: 64 << 20,
            gpu: None,
            device_memory_bytes: None,
            verify: false,
            hold_answers: false,
            allow_mps: false,
            threads: 1,
            hot: Duration::ZERO,
            held: Duration::from_secs(10),
            hello: Duration::from_secs(10),
            start: Duration::from_secs(120),
            kill_grace: Duration::from_secs(5),
            most_stuck: 1,
            executor: None,
            resident_bytes: None,
            restart: Restart::default(),
            standby: false,
            replace: Replace::default(),
            blame: None,
            log_bytes: 64 << 10,
            environment: Vec::new(),
            blamed: Arc::default(),
            probes: false,
            timeline: 0,
        }
    }
}

impl Options {
    /// Refuses impossible options, and rounds slabs up to whole pages.
    pub(crate) fn checked(mut self, file_limit: u64) -> Result<Options> {
        within("calls under way (`most_calls`)", self.most_calls as u64, CALLS)?;
        let what = "bytes of a message (`most_message_bytes`; large data goes as a payload)";
        within(what, self.most_message_bytes.into(), MESSAGE_BYTES)?;
        for (what, bytes) in [
            ("bytes for request payloads (`payload_bytes`)", &mut self.request_slab_bytes),
            ("bytes for response payloads (`payload_bytes`)", &mut self.response_slab_bytes),
        ] {
            within(what, *bytes, SLAB_BYTES)?;
            *bytes = bytes.next_multiple_of(PAGE);
        }
        let status = status_bytes(self.most_slots());
        let most = self.request_slab_bytes.max(self.response_slab_bytes + status);
        within("bytes of shared memory (`payload_bytes`, RLIMIT_FSIZE)", most, 0..=file_limit)?;
        within("threads (`threads`)", self.threads.into(), THREADS)?;
        within("bytes of output to keep (`log_bytes`)", self.log_bytes as u64, LOG_BYTES)?;
        if let Some(bytes) = self.resident_bytes {
            within("resident bytes (`resident_bytes`)", bytes, LEAST_RESIDENT..=u64::MAX)?;
            let all = self.request_slab_bytes + self.response_slab_bytes;
            let what =
                "bytes for payloads, which count as resident (`payload_bytes`, `resident_bytes`)";
            within(what, all, 0..=bytes)?;
        }
        if let Some(limit) = self.executor {
            let what = "milliseconds without a poll (`executor_limit`)";
            within(what, millis(limit), millis(heart::EVERY)..=u64::MAX)?;
        }
        if let Some(blame) = &self.blame {
            let what = "guilty calls until a client is refused (`Blame::client_guilty`)";
            within(what, blame.client_guilty.into(), 1..=u64::MAX)?;
        }
        within("milliseconds of a start (`start_limit`)", millis(self.start), 1..=u64::MAX)?;
        within("milliseconds of looking (`hot`)", millis(self.hot), 0..=millis(MOST_HOT))?;
        within("operations of a timeline (`timeline`)", self.timeline.into(), TIMELINE)?;
        check_environment(&self.environment)?;
        for (what, limit) in [
            ("calls until a process is replaced (`Replace::calls`)", self.replace.calls),
            (
                "bytes until a process is replaced (`Replace::payload_bytes`)",
                self.replace.payload_bytes,
            ),
            (
                "milliseconds until a process is replaced (`Replace::time`)",
                self.replace.time.map(millis),
            ),
        ] {
            limit.map_or(Ok(()), |limit| within(what, limit, 1..=u64::MAX))?;
        }
        for (option, is_set) in [("standby", self.standby), ("replace", self.replace.is_set())] {
            if is_set {
                self.check_alone(option)?;
            }
        }
        Ok(self)
    }
}

impl Options {
    /// Refuses an option that needs two processes beside each other where a fault of one ends both.
    pub(crate) fn check_alone(&self, option: &'static str) -> Result<()> {
        let why = "under MPS the fault of one process ends the other one as well";
        match self.allow_mps {
            true => Err(Error::Excluded { option, by: "allow_mps", why }),
            false => Ok(()),
        }
    }
}

/// Refuses a value below or above its limits.
fn within(what: &'static str, found: u64, limits: RangeInclusive<u64>) -> Result<()> {
    let limit = found.clamp(*limits.start(), *limits.end());
    if found == limit { Ok(()) } else { Err(Error::Unfit { what, found, limit }) }
}

fn millis(time: Duration) -> u64 {
    // Rounded up, so that a time just over the limit is over it.
    time.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(u64::MAX)
}

/// Refuses variables that `execve(2)` would.
fn check_environment(variables: &[(OsString, OsString)]) -> Result<()> {
    let mut all = 0;
    for (name, value) in variables {
        let what = "bytes of the name of a variable (`env`)";
        within(what, name.len() as u64, 1..=u64::MAX)?;
        let count = |text: &OsStr, unfit: &[u8]| {
            text.as_bytes().iter().filter(|byte| unfit.contains(byte)).count() as u64
        };
        let what = "a NUL, or `=` in a name, among the bytes of a variable (`env`)";
        within(what, count(name, b"\0=") + count(value, b"\0"), 0..=0)?;
        let bytes = name.len() as u64 + value.len() as u64 + 2;
        within("bytes of a variable with its name (`env`)", bytes, 0..=VARIABLE_BYTES)?;
        all += bytes;
    }
    within("bytes of all variables that are set (`env`)", all, 0..=ENVIRONMENT_BYTES)
}
