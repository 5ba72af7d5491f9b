//! Operations of one device as futures of asyncio.
//!
//! One thread a device waits for all of them. What is complete when it wakes is delivered together: one
//! `call_soon_threadsafe` an event loop, however many futures that resolves.
#![forbid(unsafe_code)]

use std::future::poll_fn;
use std::sync::Mutex;
use std::task::Poll;
use std::thread::JoinHandle;

use futures::channel::mpsc::{UnboundedReceiver, UnboundedSender, unbounded};
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use gpu_await::Result;
use pyo3::prelude::*;

use crate::exception;

/// A future of asyncio, and what it resolves to.
pub(crate) struct Waiter {
    pub(crate) event_loop: Py<PyAny>,
    pub(crate) future: Py<PyAny>,
    pub(crate) value: Py<PyAny>,
}

type Awaited = BoxFuture<'static, (Waiter, Result<()>)>;

/// The way to the thread, which ends when this is closed and everything is delivered.
pub(crate) struct Completions {
    sender: UnboundedSender<Awaited>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Completions {
    pub(crate) fn start() -> std::io::Result<Completions> {
        let (sender, receiver) = unbounded();
        let thread = std::thread::Builder::new().name("gpu-await-py".into());
        let thread = thread.spawn(move || futures::executor::block_on(deliver_all(receiver)))?;
        Ok(Completions { sender, thread: Mutex::new(Some(thread)) })
    }

    /// Takes no more; the thread ends when everything is delivered.
    pub(crate) fn close(&self) -> Option<JoinHandle<()>> {
        self.sender.close_channel();
        self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    pub(crate) fn add(
        &self,
        waiter: Waiter,
        op: impl Future<Output = Result<()>> + Send + 'static,
    ) {
        let awaited = async move { (waiter, op.await) };
        // Refused at the end of the interpreter alone, where nobody waits any more.
        self.sender.unbounded_send(Box::pin(awaited)).ok();
    }
}

async fn deliver_all(mut receiver: UnboundedReceiver<Awaited>) {
    let (mut pending, mut is_open) = (FuturesUnordered::new(), true);
    loop {
        let complete = poll_fn(|cx| {
            while is_open {
                match receiver.poll_next_unpin(cx) {
                    Poll::Ready(Some(awaited)) => pending.push(awaited),
                    Poll::Ready(None) => is_open = false,
                    Poll::Pending => break,
                }
            }
            let mut complete = Vec::new();
            while let Poll::Ready(Some(one)) = pending.poll_next_unpin(cx) {
                complete.push(one);
            }
            let is_over = !is_open && pending.is_empty();
            if complete.is_empty() && !is_over { Poll::Pending } else { Poll::Ready(complete) }
        });
        let complete = complete.await;
        if complete.is_empty() {
            return;
        }
        // The device did not finish in time: the interpreter has ended, and no task waits for these futures.
        if Python::try_attach(|py| deliver(py, complete)).is_none() {
            return;
        }
    }
}

/// What one event loop resolves together.
#[pyclass]
struct Batch {
    event_loop: Py<PyAny>,
    complete: Vec<(Waiter, Result<()>)>,
}

#[pymethods]
impl Batch {
    /// Runs on the event loop's thread.
    fn __call__(&mut self, py: Python<'_>) -> PyResult<()> {
        for (Waiter { future, value, .. }, result) in self.complete.drain(..) {
            // Cancelled meanwhile: the GPU went on, and nobody wants the value.
            if future.call_method0(py, "done")?.is_truthy(py)? {
                continue;
            }
            match result {
                Ok(()) => future.call_method1(py, "set_result", (value,))?,
                Err(error) => {
                    let error = exception(error).into_value(py);
                    future.call_method1(py, "set_exception", (error,))?
                }
            };
        }
        Ok(())
    }
}

fn deliver(py: Python<'_>, complete: Vec<(Waiter, Result<()>)>) {
    let mut batches: Vec<Batch> = Vec::new();
    for one in complete {
        let event_loop = &one.0.event_loop;
        match batches.iter_mut().find(|batch| batch.event_loop.is(event_loop)) {
            Some(batch) => batch.complete.push(one),
            None => {
                let event_loop = event_loop.clone_ref(py);
                batches.push(Batch { event_loop, complete: vec![one] });
            }
        }
    }
    for batch in batches {
        let event_loop = batch.event_loop.clone_ref(py);
        // A loop that is closed has nobody who waits.
        event_loop.call_method1(py, "call_soon_threadsafe", (batch,)).ok();
    }
}
