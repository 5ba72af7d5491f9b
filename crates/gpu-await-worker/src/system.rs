//! Calls of the operating system: sockets, shared memory, processes. Every descriptor is close-on-exec from birth.
//!
//! Source: `unix(7)`, `memfd_create(2)`, `fcntl(2)` (seals), `pidfd_open(2)`, `waitid(2)`, `prctl(2)` (`PR_SET_PDEATHSIG`), `_exit(2)`.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The file that a program was started from: device, inode. The kernel keeps its contents from changing while it is executed; its times
/// and its mode may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Executable(pub(crate) u64, pub(crate) u64);

/// Whether a packet went out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Sent {
    Yes,
    /// The other side has not read enough.
    Full,
    /// The kernel has no memory for it now, whatever the other side reads.
    NoMemory,
    /// It is longer than the socket takes.
    TooLong,
    /// The other side is gone.
    Gone,
}

/// What was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Received {
    /// A packet of this many bytes; more than the buffer holds if it was cut off.
    Packet(usize),
    Nothing,
    /// The other side is gone, and everything that it sent was read.
    End,
}

/// Two connected ends, for packets that arrive whole and in order.
pub(crate) fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Whether it is an end of such a pair.
pub(crate) fn is_packet_socket(fd: BorrowedFd<'_>) -> bool {
    let unix = rustix::net::sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX);
    unix && rustix::net::sockopt::socket_type(fd) == Ok(SocketType::SEQPACKET)
}

/// Asks for room for 1 MiB in flight, and at least for a packet of this size.
pub(crate) fn widen(fd: BorrowedFd<'_>, bytes: usize) {
    // Refused beyond `net.core.wmem_max`: the packet is refused then, with its size.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(fd, bytes.max(1 << 20));
}

/// The longest packet that it takes: the kernel keeps 32 bytes of the buffer for itself (`unix_dgram_sendmsg`).
pub(crate) fn most_packet(fd: BorrowedFd<'_>) -> usize {
    rustix::net::sockopt::socket_send_buffer_size(fd).unwrap_or(0).saturating_sub(32)
}

/// Has each packet from now on name its sender, as the kernel knows it.
pub(crate) fn name_senders(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_passcred(fd, on)?)
}

/// Sends a packet in parts, with descriptors, without waiting.
pub(crate) fn send(fd: BorrowedFd<'_>, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> Sent {
    let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Sent::TooLong;
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        return match rustix::net::sendmsg(fd, &slices, &mut control, flags) {
            Ok(_) => Sent::Yes,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Sent::Full,
            Err(Errno::NOBUFS | Errno::NOMEM) => Sent::NoMemory,
            Err(Errno::MSGSIZE) => Sent::TooLong,
            Err(_) => Sent::Gone,
        };
    }
}

/// A socket that the runtime of the calling task watches, for one kind of readiness.
pub(crate) fn registered(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned: it is open, and the same, for as long as what owns it, which the `AsyncFd` takes and gives
    // to nobody.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// What comes with a packet.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    pub(crate) fds: Vec<OwnedFd>,
    /// Where senders are named.
    pub(crate) sender: Option<Pid>,
}

/// Takes one packet, and what comes with it. What the caller does not use is closed.
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> (Received, Beside) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = receive_with(fd, buffer, &mut control);
    let mut beside = Beside::default();
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmCredentials(credentials) => {
                beside.sender = Some(credentials.pid)
            }
            RecvAncillaryMessage::ScmRights(rights) => beside.fds.extend(rights),
            _ => {}
        }
    }
    (received, beside)
}

/// Waits for one packet with exactly `N` descriptors. Any others are closed.
pub(crate) fn receive_fds<const N: usize>(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<(usize, [OwnedFd; N])> {
    loop {
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], None)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = receive_with(fd, buffer, &mut control);
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let fds: Vec<OwnedFd> = rights.flatten().collect();
        return match (received, <[OwnedFd; N]>::try_from(fds)) {
            (Received::Nothing, _) => continue,
            (Received::Packet(bytes), Ok(fds)) if bytes <= buffer.len() => Ok((bytes, fds)),
            (Received::End, _) => Err(io::ErrorKind::UnexpectedEof.into()),
            // The kernel leaves out descriptors that the process has no number for.
            (Received::Packet(_), Err(few)) if few.len() < N => Err(Errno::MFILE.into()),
            _ => Err(io::ErrorKind::InvalidData.into()),
        };
    }
}

fn receive_with(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
) -> Received {
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
    loop {
        let mut slices = [IoSliceMut::new(&mut *buffer)];
        return match rustix::net::recvmsg(fd, &mut slices, control, flags) {
            Ok(message) if message.bytes == 0 => Received::End,
            Ok(message) => Received::Packet(message.bytes),
            Err(Errno::INTR | Errno::CONNRESET) => continue,
            Err(Errno::AGAIN) => Received::Nothing,
            Err(_) => Received::End,
        };
    }
}

/// Waits until one of them is ready, or until the limit.
pub(crate) fn poll(fds: &mut [PollFd<'_>], limit: Option<Timespec>) -> io::Result<()> {
    match rustix::event::poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A counter that wakes a poll.
pub(crate) fn event() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes the thread that polls the event.
pub(crate) fn signal_event(event: BorrowedFd<'_>) {
    // Full means signalled.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Clears its signals.
pub(crate) fn clear_event(event: BorrowedFd<'_>) {
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}

/// Memory of this size, which is final, as a descriptor that can be sent.
pub(crate) fn memory(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    // Otherwise a signal ends this program.
    if bytes > file_limit() {
        return Err(Errno::FBIG.into());
    }
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(fd)
}

/// The largest file, and shared memory, that this process may make: `RLIMIT_FSIZE`.
pub(crate) fn file_limit() -> u64 {
    rustix::process::getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Mappings made from here on cannot write it.
pub(crate) fn seal_writes(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, SealFlags::FUTURE_WRITE)?)
}

/// Its seals can no longer be changed.
pub(crate) fn seal(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, SealFlags::SEAL)?)
}

/// Checks that nobody can shrink it, and returns its size.
pub(crate) fn sealed_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let wanted = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !rustix::fs::fcntl_get_seals(fd)?.contains(wanted) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(rustix::fs::fstat(fd)?.st_size as u64)
}

/// A descriptor of the same memory that shares no state with this one.
pub(crate) fn opened_again(memory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    // Opening any other file may have side effects.
    let seals = rustix::fs::fcntl_get_seals(memory)?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(File::options().read(true).write(true).open(path)?.into())
}

/// Whether no other file description of this memory is open, or mapped, in any process: the kernel grants a lease for writing to the only one alone
/// (`fcntl(2)`, `F_SETLEASE`).
pub(crate) fn is_alone(memory: BorrowedFd<'_>) -> bool {
    use std::os::fd::AsRawFd;
    let fd = memory.as_raw_fd();
    // Of `asm-generic/fcntl.h`.
    const F_SETSIG: libc::c_int = 10;
    // An open while the lease lasts would have this process signalled: by a signal that does nothing, rather than one that ends it.
    // SAFETY: the descriptor is open, and the call takes a number.
    if unsafe { libc::fcntl(fd, F_SETSIG, libc::SIGURG) } < 0 {
        return false;
    }
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } < 0 {
        return false;
    }
    // SAFETY: as above.
    unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
    true
}

/// Whether no process has the other end any more. What was sent there is lost.
pub(crate) fn has_ended(socket: BorrowedFd<'_>) -> bool {
    let mut buffer = [0; 1];
    loop {
        match receive(socket, &mut buffer).0 {
            Received::Packet(_) => {}
            Received::Nothing => return false,
            Received::End => return true,
        }
    }
}

/// Identifies a file.
pub(crate) fn identity(file: BorrowedFd<'_>) -> io::Result<Executable> {
    let stat = rustix::fs::fstat(file)?;
    Ok(Executable(stat.st_dev, stat.st_ino))
}

/// The program of this process, whatever its path names by now.
pub(crate) fn own_program() -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    Ok(rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// A handle of a process that was just started, and has not been waited for.
pub(crate) fn handle_of(pid: Pid) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::NONBLOCK)?)
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
    /// Somebody else waited for it.
    Unknown,
}

/// Waits for a process without blocking. Kills what is left of its process group first, while the number is still taken.
pub(crate) fn reap(pidfd: BorrowedFd<'_>, pid: Pid) -> Option<Exit> {
    let look = |more| {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | more;
        rustix::process::waitid(WaitId::PidFd(pidfd), options)
    };
    match look(WaitIdOptions::NOWAIT) {
        Ok(None) | Err(Errno::INTR) => return None,
        Ok(Some(_)) => kill_group(pid),
        Err(_) => return Some(Exit::Unknown),
    }
    match look(WaitIdOptions::empty()) {
        Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (_, Some(signal)) => Exit::Signal(signal),
            _ => Exit::Unknown,
        }),
        Ok(None) | Err(Errno::INTR) => None,
        Err(_) => Some(Exit::Unknown),
    }
}

/// Kills a process and its group.
pub(crate) fn kill(pidfd: BorrowedFd<'_>, pid: Pid) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // The number is its own as long as nobody has waited for it.
    if rustix::process::waitid(WaitId::PidFd(pidfd), options).is_ok() {
        kill_group(pid);
    }
    // It may be gone already.
    let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
}

fn kill_group(pid: Pid) {
    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
}

/// A handle of the process that started this one, which has to be `parent`. Has the kernel wake this process when it ends, should it be
/// stopped then: the signal is `SIGCONT`, so that its threads run, and the one that watches the handle can end more than the process.
pub(crate) fn watch_parent(parent: u32) -> io::Result<OwnedFd> {
    rustix::process::set_parent_process_death_signal(Some(Signal::CONT))?;
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let pid = i32::try_from(parent).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    let handle = handle_of(pid)?;
    // The number was the parent's when the handle was opened, if it is now.
    if rustix::process::getppid() == Some(pid) { Ok(handle) } else { Err(gone()) }
}

/// Ends this process now, and all that it started, unless that left its group.
pub(crate) fn end_group() -> ! {
    // The number is this process's as long as it lives; processes that changed their group are left alone, with the group that they joined.
    kill_group(rustix::process::getpid());
    end_process(1)
}

/// Changes of a worker to its process: no core dumps of mappings that are gigabytes long; a better victim for the OOM killer than its
/// supervisor; the signals with which terminals and service managers end programs do nothing.
pub(crate) fn settle_in() {
    extern "C" fn nothing(_: libc::c_int) {}
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(Resource::Core, none);
    drop(std::fs::write("/proc/self/oom_score_adj", "500"));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler = nothing as extern "C" fn(libc::c_int);
        // SAFETY: the handler touches nothing. Programs that the service starts do not inherit a handler, as they would
        // inherit that a signal is ignored.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Gives the process the name of its program, for process lists: it was started by the number of a descriptor.
pub(crate) fn name_program() {
    let path = std::env::args_os().next().unwrap_or_default();
    if let Some(name) = std::path::Path::new(&path).file_name() {
        // The name of the first thread, which may not be this one.
        drop(std::fs::write("/proc/self/comm", name.as_bytes()));
    }
}

/// The clock that all processes of a machine share.
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// Ends the process now. No handler runs: a library's may wait for a kernel that never ends.
pub(crate) fn end_process(code: i32) -> ! {
    // SAFETY: nothing of this process is needed after it.
    unsafe { libc::_exit(code) }
}

/// Writes bytes that another process may be changing.
///
/// # Safety
/// `len` bytes from `start` are mapped.
pub(crate) unsafe fn write_from(
    fd: BorrowedFd<'_>,
    start: *const u8,
    len: usize,
) -> io::Result<usize> {
    use std::os::fd::AsRawFd;
    // SAFETY: the kernel reads mapped memory, as the caller says; it makes no reference to it.
    let written = unsafe { libc::write(fd.as_raw_fd(), start.cast(), len) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Reads what a pipe has, without waiting: false once it has ended.
pub(crate) fn drain(pipe: BorrowedFd<'_>, mut take: impl FnMut(&[u8])) -> bool {
    let mut buffer = [0u8; 16 << 10];
    // A process that writes without end gets another turn.
    for _ in 0..16 {
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) => return false,
            Ok(bytes) => take(&buffer[..bytes]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return true,
            Err(_) => return false,
        }
    }
    true
}

/// Makes reads of it return at once.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::ioctl_fionbio(fd, true)?)
}

/// Puts `/dev/null` in the place of standard input.
pub(crate) fn close_stdin() -> io::Result<()> {
    let null = File::open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdin(&null)?)
}

/// A copy of standard input that no other program inherits.
pub(crate) fn take_stdin() -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?)
}

/// How much memory a process has, in bytes.
pub(crate) fn resident_bytes(pid: Pid) -> Option<u64> {
    let text = read_proc(pid, "statm")?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Whether a process is stopped, or held by a debugger.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    let stat = read_proc(pid, "stat").unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.split_ascii_whitespace().next());
    matches!(state, Some("T" | "t"))
}

fn read_proc(pid: Pid, file: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{}/{file}", pid.as_raw_nonzero())).ok()
}

/// A file of the memory controller of this process's control group.
pub(crate) fn memory_group_file(name: &str) -> Option<String> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    std::fs::read_to_string(format!("/sys/fs/cgroup{path}/{name}")).ok()
}

/// How many processes of this one's control group the kernel has killed for lack of memory.
pub(crate) fn killed_for_memory() -> u64 {
    let events = memory_group_file("memory.events").unwrap_or_default();
    let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Reads all of a sealed descriptor.
pub(crate) fn read_all(fd: OwnedFd, bytes: u64) -> io::Result<Vec<u8>> {
    if sealed_bytes(fd.as_fd())? < bytes {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut all = Vec::new();
    File::from(fd).take(bytes).read_to_end(&mut all)?;
    Ok(all)
}
