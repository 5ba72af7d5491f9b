//! Calls of the operating system: detecting unreachable hosts, and waiting at process exit.
//!
//! Source: `tcp(7)`, `socket(7)`, `atexit(3)`.

use std::net::TcpStream;
use std::sync::Once;
use std::time::{Duration, Instant};

#[cfg(unix)]
use libc::c_int;

use crate::stats::stats;

/// When a limit that begins now ends: in a century at the latest, which no clock overflows.
pub(crate) fn end_of(limit: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 366 * 24 * 3600);
    Instant::now() + limit.min(CENTURY)
}

/// How long process exit waits for threads that free communicators.
const AT_EXIT: Duration = Duration::from_secs(2);

/// Makes the system close the connection within 15 seconds if the peer's host becomes unreachable; by default that takes hours.
#[cfg(unix)]
pub(crate) fn find_lost_hosts(stream: &TcpStream) {
    use std::os::fd::AsRawFd;

    let set = |level: c_int, option: c_int, value: c_int| {
        let bytes = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: the descriptor is the stream's, which is open; the value is an integer that lives, and as long as is said.
        unsafe {
            libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), bytes)
        };
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    // A silent peer is probed after 5 s, every 2 s, 5 times; data may stay unacknowledged for 15 s.
    #[cfg(target_os = "linux")]
    for (option, value) in [
        (libc::TCP_KEEPIDLE, 5),
        (libc::TCP_KEEPINTVL, 2),
        (libc::TCP_KEEPCNT, 5),
        (libc::TCP_USER_TIMEOUT, 15_000),
    ] {
        set(libc::IPPROTO_TCP, option, value);
    }
}

/// Elsewhere a communicator's limit has to do.
#[cfg(not(unix))]
pub(crate) fn find_lost_hosts(_stream: &TcpStream) {}

/// Makes process exit wait for threads that are in NCCL, because the driver shuts down under them otherwise. Handlers run in
/// reverse order of registration, so this is called when NCCL and the driver are loaded.
pub(crate) fn wait_at_exit() {
    extern "C" fn wait() {
        let end = Instant::now() + AT_EXIT;
        while stats().threads_in_nccl > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a plain function lives as long as the program.
        unsafe { libc::atexit(wait) };
    });
}
