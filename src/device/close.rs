//! Closing a device, within a time limit and without a thread.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::loss::Loss;
use super::{Device, at};
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::clock::Deadline;
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, coop};
use crate::thread::relax::Relax;
use crate::thread::role;

/// How often a close checks for what has no wake-up: submitters, memory about to be free.
const LOOK_EVERY: Duration = Duration::from_micros(200);

impl Device {
    /// Refuses new work on every handle and waits until nothing uses the device, for at most `limit`;
    /// [`Duration::MAX`] means no limit. It waits, in this order, until
    /// - all submitted work is complete,
    /// - every [loan of memory](crate::Stream::lend_memory) has ended, and the work that other libraries had put on
    ///   their streams by then is complete,
    /// - values that work [keeps](crate::Uses::keeps) and owners of freed memory are dropped, and all memory
    ///   freed by any thread is back. A close also waits until streams without handles are released, until the crate's threads have finished what
    ///   dropped futures had begun (parts of staged copies, pinned and shared memory, partitions), and until cleanup that lacked a thread
    ///   has run; if only that is left at the limit, it succeeds all the same.
    ///
    /// Streams free their caches as soon as they have finished, and cache nothing that is dropped later. Finally, the
    /// pool's unused memory is returned. Live buffers keep their memory, which can no longer be read, and are freed when
    /// they are dropped. A close does not wait for [loans of streams](crate::Stream::lend_raw) to end.
    ///
    /// It blocks no thread: the device's poller keeps the time. On a stepped device (`testing::manual`) the
    /// limit counts the time of its steps.
    ///
    /// # Cancel safety
    /// If the future is dropped, the wait ends; the device stays closed.
    ///
    /// # Errors
    /// [`ErrorDetail::TimedOut`] lists what is left: that work or loan goes on, with its memory, and a later
    /// call can wait again. [`ErrorDetail::DependencyLost`]: the device is closed, but a stream waits for
    /// another device that was lost, so not all submitted work is complete. The loss of the device; a call
    /// inside a host function.
    pub async fn close(&self, limit: Duration) -> Result<()> {
        coop::proceed().await;
        role::check_driver("closing a device")?;
        let engine = self.engine();
        // In the child of a fork, a thread of the parent may hold any of the locks below.
        let is_forked = |lost: &&Error| matches!(lost.detail(), ErrorDetail::Forked { .. });
        if let Some(forked) = engine.state.lost().filter(is_forked) {
            return Err(forked.clone());
        }
        engine.close();
        let mut limit = Limit::after(self, limit);
        // No new loan can begin, and one that ends during this wait puts a ticket behind the work that is
        // being waited for.
        let lends = engine.memory.loans.open() > 0;
        self.work_done(&mut limit).await?;
        if lends {
            let ended = limit.before(pin!(engine.memory.loans.ended())).await;
            ended.ok_or_else(|| limit.passed())?;
            // Other libraries' work that was on their streams by then.
            self.work_done(&mut limit).await?;
        }
        let freed = self.all_freed(&mut limit).await;
        // If this fails, only the pool's unused memory is affected.
        self.trim(0).await.ok();
        freed
    }

    /// Waits until all submitted work is complete.
    async fn work_done(&self, limit: &mut Limit) -> Result<()> {
        let engine = self.engine();
        // Includes work that is still being submitted.
        let mut busy = engine.registry.streams_unlocked();
        let mut relax = Relax::default();
        loop {
            // Later submissions see that the device is closed.
            busy.retain(|stream| stream.is_submitted_to());
            if busy.is_empty() {
                break;
            }
            match engine.options.stepped {
                // Its clock may stand still.
                true => relax.pause(),
                false => limit.looks_again().await?,
            }
        }
        let mut done = at(self.home.ours());
        let closed = match limit.before(&mut done).await {
            Some(closed) => closed,
            // Asks the device once more.
            None => done.try_take().unwrap_or_else(|| Err(limit.passed())),
        };
        // Work known to be complete was complete before the loss; the device is lost all the same.
        engine.state.lost().map_or(closed, |lost| Err(lost.clone()))
    }

    /// Waits until freed memory is back and kept values are dropped. A value that the reaper drops may free more, so this
    /// repeats until nothing more comes.
    async fn all_freed(&self, limit: &mut Limit) -> Result<()> {
        let engine = self.engine();
        loop {
            // Read before the count: whatever has ended by now has retired everything.
            let is_ending = self.has_more_ending();
            let before = engine.background.retirements();
            let mut is_back = true;
            engine
                .registry
                .streams_unlocked()
                .iter()
                .for_each(|stream| is_back &= stream.take_all_back());
            engine.look_everywhere();
            engine.sweep_retired(true);
            let owes = engine.memory.owes_frees();
            if engine.options.stepped {
                // Drops take real time.
                engine.background.reaped().await;
            } else {
                limit
                    .before(pin!(engine.background.reaped()))
                    .await
                    .ok_or_else(|| limit.passed())?;
            }
            let owes = owes || engine.memory.owes_frees();
            // Read last: anything in transit during the checks above is counted here.
            let is_quiet = engine.background.retirements() == before;
            let is_over = is_quiet && is_back && (engine.options.stepped || !owes);
            let result = || engine.state.lost().map_or(Ok(()), |lost| Err(lost.clone()));
            if is_over && (engine.options.stepped || !(is_ending || self.has_more_ending())) {
                return result();
            }
            if !engine.options.stepped
                && let Err(passed) = limit.looks_again().await
            {
                // Only cleanup on other threads is left: all work is complete.
                return if is_over { result() } else { Err(passed) };
            }
        }
    }

    /// Whether threads are still cleaning up after dropped futures, a stream without a handle still exists, or cleanup still needs a thread.
    /// The poller releases such a stream just after its work is seen complete. One whose work will never be complete does not count.
    fn has_more_ending(&self) -> bool {
        let Engine { registry, background, .. } = &**self.engine();
        let is_left = |stream: &Arc<StreamState>| stream.is_deserted() && !stream.is_given_up();
        self.home.crew.is_busy()
            || registry.is_one_ending()
            || registry.streams_unlocked().iter().any(is_left)
            || background.left_without_a_thread() > 0
    }
}

/// When a close gives up: at its limit, or when the device is lost.
struct Limit {
    device: Device,
    ms: u64,
    deadline: Deadline,
    loss: Loss,
}

impl Limit {
    fn after(device: &Device, limit: Duration) -> Self {
        let ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let deadline = Deadline::after(&device.engine().pacing.clock, limit);
        Limit { device: device.clone(), ms, deadline, loss: Loss::of(device.engine()) }
    }

    /// The result of a future, unless the limit passes first.
    async fn before<F: Future + Unpin>(&mut self, mut future: F) -> Option<F::Output> {
        std::future::poll_fn(|cx| match Pin::new(&mut future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => {
                let passed = Pin::new(&mut self.deadline).poll(cx);
                let lost = Pin::new(&mut self.loss).poll(cx).map(drop);
                if passed.is_ready() || lost.is_ready() { Poll::Ready(None) } else { Poll::Pending }
            }
        })
        .await
    }

    /// Waits until it is time to check again: not at all in the child of a fork, where the device is lost.
    async fn looks_again(&mut self) -> Result<()> {
        let engine = self.device.engine().clone();
        let mut rest = Deadline::after(&engine.pacing.clock, LOOK_EVERY);
        let rested = self.before(&mut rest).await.filter(|()| engine.state.lost().is_none());
        rested.ok_or_else(|| self.passed())
    }

    /// The error of a wait that was ended early.
    fn passed(&self) -> Error {
        if let Some(lost) = self.device.engine().state.lost() {
            return lost.clone();
        }
        let what = format!("closing {}", self.device.engine().label());
        ErrorDetail::TimedOut { what, limit_ms: self.ms, left: self.device.unfinished() }.into()
    }
}
