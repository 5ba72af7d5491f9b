//! Exact sleeps.
//!
//! Linux may deliver a thread's time-outs 50 µs late, to save wake-ups. The poller's naps are
//! shorter than that.
//!
//! Source: `prctl(2)`, `PR_SET_TIMERSLACK`.

/// Asks for the current thread's time-outs to be as exact as the kernel can.
pub(crate) fn minimize() {
    #[cfg(target_os = "linux")]
    {
        const LEAST_NS: libc::c_ulong = 1;
        // SAFETY: this option takes one integer and touches only the calling thread's slack.
        let refused = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, LEAST_NS) };
        if refused != 0 {
            crate::contain::log(|| {
                tracing::debug!("sleeps stay inexact: PR_SET_TIMERSLACK was refused");
            });
        }
    }
}
