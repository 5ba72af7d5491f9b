//! Blocking work, off the executor: tokio's blocking pool inside a tokio runtime, a thread elsewhere.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{DriverCode, Result};

/// Runs `work` where it may block. Dropped, the future leaves it running.
pub(crate) async fn offload<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R> {
    let (sender, receiver) = futures::channel::oneshot::channel();
    let task = move || {
        // Nobody waits any more if sending fails: then the result is dropped here.
        drop(sender.send(catch_unwind(AssertUnwindSafe(work))));
    };
    spawn(task)?;
    match receiver.await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(panic)) => resume_unwind(panic),
        // The runtime was shut down before it ran the task.
        Err(futures::channel::oneshot::Canceled) => Err(no_thread()),
    }
}

fn spawn(task: impl FnOnce() + Send + 'static) -> Result<()> {
    #[cfg(feature = "tokio")]
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(task);
        return Ok(());
    }
    let spawned = std::thread::Builder::new().name("gpu-await-offload".to_owned()).spawn(task);
    spawned.map(drop).map_err(|_| no_thread())
}

fn no_thread() -> crate::Error {
    DriverCode { call: "thread spawn", code: 304 }.into()
}
