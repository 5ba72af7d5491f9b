//! How a polled task yields to others: between two looks of its own, and after a number of operations that were complete at once.
//!
//! # Invariants
//! 1. A future that is put off for lack of budget wakes its own waker (`a_task_that_never_waits_lets_others_run`). It is put off at most
//!    once in a row, so an executor inside a task, whose budget is never refilled, makes progress (`an_executor_inside_of_a_task_gets_on`).
#![forbid(unsafe_code)]

use std::task::{Context, Poll};

use crate::thread::contain;

/// Has the current task polled again once others had their turn. That may be late, or never: the caller must be woken
/// by other means as well.
///
/// In a tokio runtime the task goes behind the ready ones, timers and sockets included. A worker that finds nothing
/// else in between searches the others' queues, and wakes a sleeping worker in its place when it resumes the task:
/// while a task yields repeatedly, a second worker wakes some 110,000 times a second for nothing (0.4 core of the host
/// of an H200, tokio 1.54). The task is not marked as notified there, so a wake-up in the meantime lets any idle worker
/// take it. This holds if the waker is the runtime's own; calling another waker could delay the runtime's worker.
/// Elsewhere the task wakes itself.
pub(crate) fn yield_now(cx: &mut Context<'_>) {
    #[cfg(feature = "tokio")]
    if tokio_waker::is(cx.waker()) {
        // Its first poll hands the waker to the runtime; it holds nothing else.
        let turn = std::pin::pin!(tokio::task::yield_now());
        let _ = std::future::Future::poll(turn, cx);
        return;
    }
    contain::wake_by_ref(cx.waker());
}

/// A leaf future's share of the budget that tokio gives a task for each poll: a number of operations may
/// succeed, then the task yields. Outside of tokio there is no budget.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Budget {
    /// Whether the future was put off, and the budget has not been refilled since.
    #[cfg(feature = "tokio")]
    put_off: bool,
}

impl Budget {
    /// Polls the future if there is budget left, and spends one if it is ready.
    pub(crate) fn poll<R>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<R>,
    ) -> Poll<R> {
        #[cfg(feature = "tokio")]
        {
            let has_budget = tokio::task::coop::has_budget_remaining();
            if !has_budget && !self.put_off {
                self.put_off = true;
                // Not through tokio: its list of deferred tasks belongs to one worker, is delayed by whatever
                // runs there and is lost when a `block_on` returns.
                contain::wake_by_ref(cx.waker());
                return Poll::Pending;
            }
            self.put_off = !has_budget;
            let polled = poll(cx);
            if polled.is_ready()
                && has_budget
                && let Poll::Ready(spent) = tokio::task::coop::poll_proceed(cx)
            {
                spent.made_progress();
            }
            polled
        }
        #[cfg(not(feature = "tokio"))]
        poll(cx)
    }
}

/// The number of the tokio task that this thread runs, as its `Id` prints it.
pub(crate) fn task() -> Option<u64> {
    // The id exposes its number only as text.
    #[cfg(feature = "tokio")]
    return tokio::task::try_id().and_then(|id| id.to_string().parse().ok());
    #[cfg(not(feature = "tokio"))]
    None
}

/// Spends one unit of the budget: the first line of each public `async fn`, since it may return without awaiting a future that does
/// (`a_task_that_never_waits_lets_others_run`).
pub(crate) async fn proceed() {
    let mut budget = Budget::default();
    std::future::poll_fn(|cx| budget.poll(cx, |_| Poll::Ready(()))).await;
}

/// Learns how to recognise the executor's wakers. Must not run inside an executor.
pub(crate) fn prepare() {
    #[cfg(feature = "tokio")]
    tokio_waker::learn();
}

/// How the waker of a tokio task is recognised: by the address of its functions.
#[cfg(feature = "tokio")]
mod tokio_waker {
    use std::sync::OnceLock;
    use std::task::{Poll, Waker};

    static TABLE: OnceLock<usize> = OnceLock::new();

    pub(super) fn is(waker: &Waker) -> bool {
        TABLE.get().is_some_and(|table| *table == address(waker))
    }

    /// Learns the address from the waker of a tokio task.
    pub(super) fn learn() {
        TABLE.get_or_init(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let look = std::future::poll_fn(|cx| Poll::Ready(address(cx.waker())));
            // No runtime can be built: no waker has this address.
            runtime.map_or(0, |runtime| {
                runtime.block_on(async { tokio::spawn(look).await.unwrap_or(0) })
            })
        });
    }

    fn address(waker: &Waker) -> usize {
        std::ptr::from_ref(waker.vtable()).addr()
    }
}
