//! Closing a device, within a limit and without a thread.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::{Device, at};
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::Engine;
use crate::runtime::coop;
use crate::runtime::deadlines::NEVER;
use crate::thread::role;
use crate::thread::worker::offload;

impl Device {
    /// Refuses new work, on every handle, and waits until what was submitted is complete, for at
    /// most `limit`; [`Duration::MAX`] is no limit. What streams keep is freed as soon as they have finished,
    /// and of what is dropped later nothing is kept. In the end it gives back what the device's pool holds
    /// unused, and waits until what its work [kept](crate::Uses::keeps), and the owners of memory that was given up,
    /// are dropped.
    ///
    /// It holds no thread: the device's poller keeps the time. On a device that is stepped
    /// (`testing::manual`) the limit is in the time of its steps.
    ///
    /// # Cancel safety
    /// Dropped, it waits no longer; the device stays closed.
    ///
    /// # Errors
    /// [`ErrorDetail::TimedOut`]: work is still on the device and goes on (its memory is kept);
    /// the loss of the device; [`ErrorDetail::DependencyLost`]: it is closed, but a stream waits for
    /// another device that was lost, so not all that was submitted is complete; inside a host function.
    pub async fn close(&self, limit: Duration) -> Result<()> {
        coop::proceed().await;
        role::check_driver("closing a device")?;
        let engine = self.engine();
        engine.close();
        let mut deadline = Deadline::after(engine, limit);
        let late = || -> Error {
            let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
            ErrorDetail::TimedOut { what: "closing the device", limit_ms }.into()
        };
        // What is being submitted is waited for as well, once it is known.
        let mut busy = engine.streams();
        busy.retain(|stream| stream.is_submitted_to());
        if !busy.is_empty() {
            let passed = offload(move || busy.iter().for_each(|stream| stream.with(|_| ())));
            before(&mut deadline, pin!(passed)).await.ok_or_else(late)??;
        }
        let mut done = at(self.home.ours());
        let closed = match before(&mut deadline, &mut done).await {
            Some(closed) => closed,
            // By asking the device, once more.
            None => done.try_take().unwrap_or_else(|| Err(late())),
        };
        if let Some(lost) = engine.lost() {
            // What is known to be complete was so before; the device is gone all the same.
            return Err(lost.clone());
        }
        closed?;
        engine.streams().iter().for_each(|stream| stream.take_all_back());
        engine.sweep_retired(false);
        // Of a refusal only what the pool holds depends.
        self.trim(0).await.ok();
        if engine.options.stepped {
            // Drops take the time of the system's clock.
            engine.reaped().await;
            return Ok(());
        }
        before(&mut deadline, pin!(engine.reaped())).await.ok_or_else(late)
    }
}

/// What a future resolves to, unless the deadline comes first.
async fn before<F: Future + Unpin>(deadline: &mut Deadline, mut future: F) -> Option<F::Output> {
    std::future::poll_fn(|cx| match Pin::new(&mut future).poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Pin::new(&mut *deadline).poll(cx).map(|()| None),
    })
    .await
}

/// Resolves at a moment of a device's clock.
struct Deadline {
    engine: Arc<Engine>,
    due: u64,
    key: Option<usize>,
}

impl Deadline {
    /// `limit` from now; [`Duration::MAX`] is no deadline at all.
    fn after(engine: &Arc<Engine>, limit: Duration) -> Self {
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(NEVER);
        Deadline { engine: engine.clone(), due: engine.now().saturating_add(limit_ns), key: None }
    }
}

impl Future for Deadline {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.engine.now() >= this.due {
            return Poll::Ready(());
        }
        if this.due != NEVER {
            let stale = this.engine.deadlines.set(&mut this.key, this.due, cx.waker().clone());
            drop(stale);
            this.engine.attention.call_before(this.due);
        }
        Poll::Pending
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let waker = self.engine.deadlines.remove(key);
            drop(waker);
        }
    }
}
