//! Calls of the operating system: this host's addresses, detecting unreachable hosts, and waiting at process exit.
//!
//! Source: `getifaddrs(3)`, `tcp(7)`, `socket(7)`, `atexit(3)`.

use std::net::{Ipv4Addr, TcpStream};
use std::sync::Once;
use std::time::Duration;

#[cfg(unix)]
use libc::c_int;

use crate::stats;
use gpu_await::sibling::PerProcess;

/// How long process exit waits for threads that free communicators.
const AT_EXIT: Duration = Duration::from_secs(2);

/// Makes the system close the connection when the peer's host has acknowledged nothing for 15 seconds; by default that takes hours. A
/// stopped process is not detected: its kernel acknowledges.
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

/// Where other hosts may reach this one: the addresses of the interfaces that are up, except the loopback's.
#[cfg(unix)]
pub(crate) fn addresses() -> Vec<Ipv4Addr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the pointer is to a pointer that lives; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let (mut found, mut next) = (Vec::new(), first);
    // SAFETY: a pointer to an entry of the list, which is freed behind the last use of one, or none.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let has = |flag: c_int| entry.ifa_flags & flag as libc::c_uint != 0;
        // SAFETY: as above; an entry may have no address.
        let address = unsafe { entry.ifa_addr.as_ref() };
        let is_ipv4 =
            address.is_some_and(|address| c_int::from(address.sa_family) == libc::AF_INET);
        if is_ipv4 && has(libc::IFF_UP) && !has(libc::IFF_LOOPBACK) {
            let address: *mut libc::sockaddr_in = entry.ifa_addr.cast();
            // SAFETY: the family says that the address is of this type.
            let address = unsafe { address.read_unaligned() };
            found.push(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)));
        }
    }
    // SAFETY: the list is `getifaddrs`', and freed once.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// On other platforms only this host can find them.
#[cfg(not(unix))]
pub(crate) fn addresses() -> Vec<Ipv4Addr> {
    Vec::new()
}

/// On other platforms a communicator's limit has to suffice.
#[cfg(not(unix))]
pub(crate) fn find_lost_hosts(_stream: &TcpStream) {}

/// Makes process exit wait for threads in NCCL; no thread enters it from then on. Handlers run in reverse order of
/// registration, so this is called when NCCL and the driver are loaded.
pub(crate) fn wait_at_exit() {
    extern "C" fn wait() {
        stats::end_at_exit(AT_EXIT);
    }
    static ONCE: PerProcess<Once> = PerProcess::new(Once::new);
    ONCE.get().call_once(|| {
        // SAFETY: a plain function lives as long as the program.
        unsafe { libc::atexit(wait) };
    });
}
