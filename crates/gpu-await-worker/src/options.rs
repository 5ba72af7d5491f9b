//! What the builder of a worker sets.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::time::Duration;

use crate::restart::Restart;

/// The longest time that is a limit: a century, which added to any moment is one.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A limit that can be added to any moment.
pub(crate) fn capped(limit: Duration) -> Duration {
    limit.min(CENTURY)
}

/// The options of a worker, with their defaults.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) most_calls: usize,
    pub(crate) most_message_bytes: u32,
    pub(crate) request_slab_bytes: u64,
    pub(crate) response_slab_bytes: u64,
    /// The UUID of a GPU; `None` for the host device.
    pub(crate) gpu: Option<String>,
    pub(crate) device_memory_bytes: Option<u64>,
    pub(crate) verify: bool,
    pub(crate) allow_mps: bool,
    pub(crate) threads: u32,
    pub(crate) hot: Duration,
    pub(crate) hello: Duration,
    pub(crate) start: Duration,
    pub(crate) kill_grace: Duration,
    pub(crate) most_stuck: usize,
    pub(crate) executor: Option<Duration>,
    pub(crate) resident_bytes: Option<u64>,
    pub(crate) restart: Restart,
    pub(crate) log_bytes: usize,
    pub(crate) environment: Vec<(OsString, OsString)>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            most_calls: 4096,
            most_message_bytes: 64 << 10,
            request_slab_bytes: 64 << 20,
            response_slab_bytes: 64 << 20,
            gpu: None,
            device_memory_bytes: None,
            verify: false,
            allow_mps: false,
            threads: 1,
            hot: Duration::ZERO,
            hello: Duration::from_secs(10),
            start: Duration::from_secs(120),
            kill_grace: Duration::from_secs(5),
            most_stuck: 1,
            executor: None,
            resident_bytes: None,
            restart: Restart::default(),
            log_bytes: 64 << 10,
            environment: Vec::new(),
        }
    }
}
