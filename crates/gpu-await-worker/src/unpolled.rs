//! [`Unpolled`]: how many tasks were woken, and have not been polled to the end since.
//!
//! After a fault the process ends once there is none: each task that the fault woke has then said what it knows, however busy the machine is.
//!
//! | state of a task | counts | left by |
//! |---|---|---|
//! | due: new, or woken | yes | its poll |
//! | being polled | yes | the end of the poll → asleep, or due if it was woken meanwhile |
//! | asleep | no | its waker |
//! | gone: ended, or dropped | no | – |
//!
//! # Invariants
//! 1. A task that was woken counts from before its waker returns (`who_was_woken_counts_until_its_poll_ends`).
//! 2. Wakers that outlive their task change nothing (`who_was_woken_counts_until_its_poll_ends`).
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;
use tokio::sync::Notify;

const ASLEEP: u8 = 0;
const DUE: u8 = 1;
const GONE: u8 = 2;

/// Counts tasks.
#[derive(Debug, Default)]
pub(crate) struct Unpolled {
    count: AtomicUsize,
    none: Notify,
}

impl Unpolled {
    /// Wraps a future so that it counts.
    pub(crate) fn follow<F: Future>(self: &Arc<Self>, task: F) -> Followed<F> {
        self.more();
        let state = State { all: self.clone(), is: AtomicU8::new(DUE), waker: AtomicWaker::new() };
        Followed { task: Box::pin(task), state: Arc::new(state) }
    }

    /// Resolves when there is none. For one caller at a time.
    pub(crate) async fn none(&self) {
        while self.count.load(Ordering::SeqCst) > 0 {
            self.none.notified().await;
        }
    }

    fn more(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn less(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.none.notify_one();
        }
    }
}

/// A future that counts.
pub(crate) struct Followed<F> {
    task: Pin<Box<F>>,
    state: Arc<State>,
}

struct State {
    all: Arc<Unpolled>,
    is: AtomicU8,
    waker: AtomicWaker,
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Counted first: no poll may see it due and end before it counts.
        self.all.more();
        let woken = self.is.compare_exchange(ASLEEP, DUE, Ordering::SeqCst, Ordering::SeqCst);
        if woken.is_err() {
            self.all.less();
        }
        self.waker.wake();
    }
}

/// Counts until the poll has ended, or has panicked.
struct Polls<'s>(&'s Unpolled);

impl Drop for Polls<'_> {
    fn drop(&mut self) {
        self.0.less();
    }
}

impl<F: Future> Future for Followed<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Followed { task, state } = &mut *self;
        state.waker.register(cx.waker());
        if state.is.swap(ASLEEP, Ordering::SeqCst) != DUE {
            state.all.more();
        }
        let _polls = Polls(&state.all);
        task.as_mut().poll(&mut Context::from_waker(&Waker::from(state.clone())))
    }
}

impl<F> Drop for Followed<F> {
    fn drop(&mut self) {
        if self.state.is.swap(GONE, Ordering::SeqCst) == DUE {
            self.state.all.less();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::channel::oneshot;

    use super::*;

    #[test]
    fn who_was_woken_counts_until_its_poll_ends() {
        let unpolled = Arc::new(Unpolled::default());
        let is_none = || unpolled.none().now_or_never().is_some();
        assert!(is_none());
        let (sender, receiver) = oneshot::channel::<()>();
        let watched = unpolled.clone();
        let mut task = Box::pin(unpolled.follow(async move {
            assert!(watched.none().now_or_never().is_none(), "it is being polled");
            assert!(receiver.await.is_err());
            assert!(watched.none().now_or_never().is_none(), "it is being polled again");
            std::future::poll_fn(|cx| {
                cx.waker().wake_by_ref();
                Poll::<()>::Pending
            })
            .await
        }));
        assert!(!is_none(), "it was never polled");
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            assert!(task.as_mut().poll(&mut cx).is_pending());
            assert!(is_none(), "it waits");
        }
        drop(sender);
        assert!(!is_none(), "it was woken");
        // It wakes itself.
        assert!(task.as_mut().poll(&mut cx).is_pending());
        assert!(!is_none());
        drop(task);
        assert!(is_none(), "it is gone");
        // A waker that outlives it.
        let mut waker = None;
        let mut task = Box::pin(unpolled.follow(std::future::poll_fn(|cx| {
            waker = Some(cx.waker().clone());
            Poll::Ready(())
        })));
        assert!(task.as_mut().poll(&mut cx).is_ready());
        drop(task);
        waker.unwrap().wake();
        assert!(is_none());
    }
}
