//! What is asked of the operating system: to find hosts that are gone, and to wait at the end of the process.
//!
//! Source: `tcp(7)`, `socket(7)`, `atexit(3)`.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Once;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::stats::stats;

/// Seconds of silence behind which a peer is asked whether it is there, between two such questions, and how many.
const IDLE: c_int = 5;
const BETWEEN: c_int = 2;
const QUESTIONS: c_int = 5;
/// How long what was written may stay without an answer.
const UNANSWERED_MS: c_int = 15_000;

/// How long the end of the process waits for threads that free communicators.
const AT_EXIT: Duration = Duration::from_secs(2);

/// Has the connection end within 15 seconds if the peer's host is gone, which tells of nothing by itself. Without these options
/// it takes the system hours.
pub(crate) fn find_lost_hosts(stream: &TcpStream) {
    let set = |level: c_int, option: c_int, value: c_int| {
        let bytes = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: the descriptor is the stream's, which is open; the value is an integer that lives, and as long as is said.
        unsafe {
            libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), bytes)
        };
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    #[cfg(target_os = "linux")]
    for (option, value) in [
        (libc::TCP_KEEPIDLE, IDLE),
        (libc::TCP_KEEPINTVL, BETWEEN),
        (libc::TCP_KEEPCNT, QUESTIONS),
        (libc::TCP_USER_TIMEOUT, UNANSWERED_MS),
    ] {
        set(libc::IPPROTO_TCP, option, value);
    }
}

/// Has the end of the process wait for threads that are in NCCL: what it frees is taken from under them otherwise. Handlers run in
/// reverse order, so this one is registered when NCCL and the driver are loaded.
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
