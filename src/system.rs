//! What the crate asks of the operating system.
//!
//! Advice that may be refused, a size, and the handler for the end of the process. Miri, which runs the
//! host device to check its memory accesses, has none of these calls: there the advice does nothing, the
//! machine has [`MIRI_MEMORY`] bytes, and no handler runs.
//!
//! Source: `prctl(2)`, `PR_SET_TIMERSLACK`; `madvise(2)`, `MADV_HUGEPAGE`; `sysconf(3)`; `atexit(3)`.

/// How much memory the machine has under Miri.
const MIRI_MEMORY: u64 = 1 << 30;

/// Asks for the current thread's time-outs to be as exact as the kernel can: Linux may deliver them
/// 50 µs late, to save wake-ups. The poller's naps are shorter than that.
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

/// Asks for huge pages behind memory of the caller's: a page fault for each 4 KiB would cost more than
/// a copy.
pub(crate) fn advise_huge_pages(start: usize, bytes: usize) {
    #[cfg(all(target_os = "linux", not(miri)))]
    {
        // Whole pages of any system: 4 to 64 KiB.
        const PAGE: usize = 64 << 10;
        let (first, last) = (start.next_multiple_of(PAGE), (start + bytes) & !(PAGE - 1));
        if first < last {
            // SAFETY: the range lies within the caller's memory, and the advice changes how it is
            // backed, never what it holds. Refused, small pages do as well.
            unsafe { libc::madvise(first as *mut libc::c_void, last - first, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(all(target_os = "linux", not(miri))))]
    let _ = (start, bytes);
}

/// How much memory the machine has.
pub(crate) fn physical_memory() -> u64 {
    if cfg!(miri) {
        return MIRI_MEMORY;
    }
    // SAFETY: sysconf reads a number and touches no memory of ours.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    // SAFETY: as above.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0))
}

/// Whose files this process may read and write.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: it always succeeds and touches no memory of ours.
    unsafe { libc::geteuid() }
}

/// Has the C runtime call `handler` when `main` returned or somebody called `exit`.
pub(crate) fn at_exit(handler: extern "C" fn()) {
    if cfg!(miri) {
        return;
    }
    // SAFETY: a plain function lives as long as the program.
    unsafe { libc::atexit(handler) };
}
