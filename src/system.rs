//! Calls to the operating system.
//!
//! They are hints that may be refused, a memory size, and a handler of the end of the process. Under Miri, which runs the host device to
//! check its memory accesses, the hints do nothing, the machine has [`MIRI_MEMORY`] bytes, and no handler runs.
//!
//! | call | Linux | other Unix | Windows |
//! |---|---|---|---|
//! | exact sleeps, huge pages | yes | – | – |
//! | whether a thread was preempted; short slices | yes | – | – |
//! | the file of a library | yes | yes | – |
//! | memory of the machine | `sysconf` | `sysconf` | `GlobalMemoryStatusEx` |
//! | files that this user alone can write | owner and mode | owner and mode | not checked: there is no disk cache |
//!
//! Source: `prctl(2)`, `PR_SET_TIMERSLACK`; `getrusage(2)`, `RUSAGE_THREAD`; `sched_setattr(2)`; `madvise(2)`, `MADV_HUGEPAGE`; `sysconf(3)`; `dladdr(3)`; `atexit(3)`.

pub(crate) mod library;
#[cfg(target_os = "linux")]
pub(crate) mod memfd;

use std::fs::{DirBuilder, Metadata, OpenOptions};
#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};

/// How much memory the machine has under Miri.
const MIRI_MEMORY: u64 = 1 << 30;

/// Makes the current thread's time-outs as exact as the kernel can: Linux may deliver them 50 µs late, to
/// save wake-ups. The poller's naps are shorter than that.
pub(crate) fn minimize_timer_slack() {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        const LEAST_NS: libc::c_ulong = 1;
        // SAFETY: this option takes one integer and touches only the calling thread's slack.
        let refused = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, LEAST_NS) };
        if refused != 0 {
            crate::thread::contain::log(|| {
                tracing::debug!("sleeps stay inexact: PR_SET_TIMERSLACK was refused");
            });
        }
    }
}

/// Gives the current thread shorter slices of its core, which it then gets sooner: for a thread that works for microseconds at a time while others
/// wait for it. Linux accepts this from 6.12 on, without privileges.
pub(crate) fn ask_for_short_slices() {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        /// The least that Linux accepts.
        const SLICE_NS: u64 = 100_000;
        let size = size_of::<libc::sched_attr>() as u32;
        // SAFETY: all zeros is a valid `sched_attr`.
        let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
        // SAFETY: it reads the calling thread's attributes; the structure is writable and as long as stated.
        let got =
            unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
        if got == 0 && attributes.sched_policy == libc::SCHED_OTHER as u32 {
            (attributes.size, attributes.sched_runtime) = (size, SLICE_NS);
            // SAFETY: likewise, and the structure is only read. If it is refused, the slices stay as they are.
            unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
        }
    }
}

/// The CPU time of the current thread, the system's work for it included, in nanoseconds; 0 where that is not known.
pub(crate) fn thread_time_ns() -> u64 {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is writable; the clock is the calling thread's.
        let refused = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        if refused == 0 {
            return time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        }
    }
    0
}

/// Whether the current thread was preempted since its last such question.
pub(crate) fn was_preempted() -> bool {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        thread_local! {
            static TIMES: std::cell::Cell<libc::c_long> = const { std::cell::Cell::new(0) };
        }
        // SAFETY: all zeros is a valid `rusage`.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: `usage` is live and of the type that the call fills.
        let refused = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        refused == 0 && TIMES.replace(usage.ru_nivcsw) != usage.ru_nivcsw
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    false
}

/// Asks for huge pages for the caller's memory: a page fault for each 4 KiB would cost more than a copy.
pub(crate) fn advise_huge_pages(start: usize, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        // Whole pages of any system: 4 to 64 KiB.
        const PAGE: usize = 64 << 10;
        let (first, last) = (start.next_multiple_of(PAGE), (start + bytes) & !(PAGE - 1));
        if first < last {
            // SAFETY: the range lies within the caller's memory, and the advice changes how it is backed,
            // never its contents. If it is refused, small pages are used.
            unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, bytes);
}

/// The file that a function of a loaded library is in.
#[cfg(feature = "cuda")]
pub(crate) fn file_of(function: *const std::ffi::c_void) -> Option<std::path::PathBuf> {
    #[cfg(all(unix, not(miri)))]
    {
        use std::os::unix::ffi::OsStrExt;

        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
        // SAFETY: the address is only compared, and the structure is writable.
        if unsafe { libc::dladdr(function, info.as_mut_ptr()) } == 0 {
            return None;
        }
        // SAFETY: the call succeeded, and so wrote it.
        let name = unsafe { info.assume_init() }.dli_fname;
        if name.is_null() {
            return None;
        }
        // SAFETY: a string of the loader's, which stays as long as the library.
        let name = unsafe { std::ffi::CStr::from_ptr(name) };
        let file = std::path::PathBuf::from(std::ffi::OsStr::from_bytes(name.to_bytes()));
        // The file that it links to: the loader may name any of several links.
        Some(file.canonicalize().unwrap_or(file))
    }
    #[cfg(not(all(unix, not(miri))))]
    {
        let _ = function;
        None
    }
}

/// How much memory the machine has.
pub(crate) fn physical_memory() -> u64 {
    if cfg!(miri) { MIRI_MEMORY } else { memory_of_the_machine() }
}

#[cfg(unix)]
fn memory_of_the_machine() -> u64 {
    // SAFETY: sysconf reads a number and touches no memory of ours.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    // SAFETY: as above.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0))
}

#[cfg(windows)]
fn memory_of_the_machine() -> u64 {
    /// `MEMORYSTATUSEX`.
    #[repr(C)]
    #[derive(Default)]
    struct Status {
        length: u32,
        load: u32,
        total_physical: u64,
        others: [u64; 6],
    }

    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn GlobalMemoryStatusEx(status: *mut Status) -> i32;
    }

    let mut status = Status { length: size_of::<Status>() as u32, ..Status::default() };
    // SAFETY: the structure is the one that its length says, and writable.
    let found = unsafe { GlobalMemoryStatusEx(&mut status) };
    if found == 0 { 0 } else { status.total_physical }
}

/// Whether files can be kept from other users: whether the system tells their owner and mode.
pub(crate) const HAS_PRIVATE_FILES: bool = cfg!(unix);

/// Makes folders that only this user can access, and their parents.
pub(crate) fn private_folder() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    builder.mode(0o700);
    builder
}

/// Makes files that only this user can access.
pub(crate) fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    options.mode(0o600);
    options
}

/// Reads files, follows no link and waits for no pipe.
pub(crate) fn plain_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options
}

/// Whether only this user owns it and can write it.
#[cfg(unix)]
pub(crate) fn is_ours_alone(found: &Metadata) -> bool {
    found.uid() == effective_user() && found.mode() & 0o022 == 0
}

/// Not supported here: see [`HAS_PRIVATE_FILES`].
#[cfg(not(unix))]
pub(crate) fn is_ours_alone(_: &Metadata) -> bool {
    false
}

/// Whose files this process may read and write.
#[cfg(unix)]
pub(crate) fn effective_user() -> u32 {
    // SAFETY: it always succeeds and touches no memory of ours.
    unsafe { libc::geteuid() }
}

/// Registers `handler` with the C runtime, to be called when `main` returns or `exit` is called.
pub(crate) fn at_exit(handler: extern "C" fn()) {
    if cfg!(miri) {
        return;
    }
    // SAFETY: a plain function lives as long as the program.
    unsafe { libc::atexit(handler) };
}
