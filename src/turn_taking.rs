//! How a polled task lets others go first.
#![forbid(unsafe_code)]

use std::task::Context;

/// Has the current task polled again once others had their turn.
///
/// In a tokio runtime the task goes behind those that are ready, timers and sockets included, and
/// no sleeping worker is woken to take it over; but where the runtime always finds other work it
/// would wait for long. So only if it is not `busy`, and if the waker is the runtime's own: another
/// one may panic, and is to do so in the caller's poll. Elsewhere the task wakes itself.
pub(crate) fn yield_now(cx: &mut Context<'_>, busy: bool) {
    #[cfg(feature = "tokio")]
    if !busy && tokio_waker::is(cx.waker()) {
        // Its first poll hands the waker to the runtime; it holds nothing else.
        let turn = std::pin::pin!(tokio::task::yield_now());
        let _ = std::future::Future::poll(turn, cx);
        return;
    }
    let _ = busy;
    cx.waker().wake_by_ref();
}

/// Learns what can be known of the executor beforehand. Not from inside one.
pub(crate) fn prepare() {
    #[cfg(feature = "tokio")]
    tokio_waker::learn();
}

/// How the waker of a tokio task is told from others: by the address of its functions.
#[cfg(feature = "tokio")]
mod tokio_waker {
    use std::sync::OnceLock;
    use std::task::{Poll, Waker};

    static TABLE: OnceLock<usize> = OnceLock::new();

    pub(super) fn is(waker: &Waker) -> bool {
        TABLE.get().is_some_and(|table| *table == address(waker))
    }

    /// Looks at the waker of a task of tokio's.
    pub(super) fn learn() {
        TABLE.get_or_init(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let look = std::future::poll_fn(|cx| Poll::Ready(address(cx.waker())));
            // No runtime to be had: no waker has this address.
            runtime.map_or(0, |runtime| {
                runtime.block_on(async { tokio::spawn(look).await.unwrap_or(0) })
            })
        });
    }

    fn address(waker: &Waker) -> usize {
        std::ptr::from_ref(waker.vtable()).addr()
    }
}
