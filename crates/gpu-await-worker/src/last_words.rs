//! How a worker's process ends: what it says to its supervisor, if that is there, and what goes with it.
#![forbid(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::codec;
use crate::frame::{Ending, ToSupervisor, Tried};
use crate::system::{self, Sent};

/// How long it tries to say why it ends.
const PARTING: Duration = Duration::from_secs(1);

/// A handle of the process that started this one.
static FRONT: OnceLock<OwnedFd> = OnceLock::new();

/// Keeps that handle.
pub(crate) fn front(front: OwnedFd) -> &'static OwnedFd {
    FRONT.get_or_init(|| front)
}

/// The socket is closed: ends the process and what it started once the front is gone, or has not killed it in time.
pub(crate) fn end_with_front() -> ! {
    if let Some(front) = FRONT.get() {
        let limit = Timespec { tv_sec: PARTING.as_secs() as i64, tv_nsec: 0 };
        drop(system::poll(&mut [PollFd::new(front, PollFlags::IN)], Some(limit)));
    }
    system::end_group()
}

/// The system refused what the process needs: how it ends.
pub(crate) fn refusal(tried: Tried, error: &std::io::Error) -> Ending {
    Ending::NotStarted { tried, errno: error.raw_os_error().unwrap_or(0) }
}

/// Says what the system refused, and ends the process.
pub(crate) fn refused(socket: BorrowedFd<'_>, tried: Tried, error: &std::io::Error) -> ! {
    // For the log, which also has errors without an errno. Perhaps nobody reads it.
    let said = format!("a worker's process does not start: {}: {error}\n", tried.text());
    drop(std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()));
    end(socket, refusal(tried, error), "")
}

/// Says why, and ends the process.
pub(crate) fn end(socket: BorrowedFd<'_>, ending: Ending, why: &str) -> ! {
    // A long text must not keep the ending from being sent.
    let said = say(socket, &ToSupervisor::Ending(ending), codec::cut(why, 16 << 10));
    if said == Sent::Gone {
        end_with_front();
    }
    system::end_process(i32::from(ending != Ending::Done))
}

/// Sends a message, and waits a moment for room for it.
pub(crate) fn say(socket: BorrowedFd<'_>, message: &ToSupervisor<'_>, body: &[u8]) -> Sent {
    let Ok(header) = codec::encode(message) else { return Sent::TooLong };
    let limit = Timespec { tv_sec: PARTING.as_secs() as i64, tv_nsec: 0 };
    for _ in 0..10 {
        match system::send(socket, &[&header, body], &[]) {
            Sent::Full => {}
            Sent::NoMemory => std::thread::sleep(PARTING / 10),
            sent @ (Sent::Yes | Sent::TooLong | Sent::Gone) => return sent,
        }
        drop(system::poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(limit)));
    }
    Sent::Full
}
