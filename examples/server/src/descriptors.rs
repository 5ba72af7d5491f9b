//! How many sockets clients may have, so that file descriptors are left for everything else.
//!
//! Where they run out, no listener accepts: neither that of the service nor that of health, which has connections of its own
//! for exactly that moment.
#![forbid(unsafe_code)]

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For health's connections ([`HEALTH`]), the listeners, the runtime, the driver (some dozens a GPU), and files.
const RESERVED: u64 = 256;
/// Connections of health, where it has a listener of its own.
pub(crate) const HEALTH: usize = 64;

/// Raises the soft limit of descriptors to the hard one, and returns how many of them clients may have; at least one.
pub(crate) fn for_clients() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let descriptors = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    // `None`: there is no limit.
    descriptors.map_or(usize::MAX, |descriptors| {
        usize::try_from(descriptors.saturating_sub(RESERVED)).unwrap_or(usize::MAX).max(1)
    })
}
