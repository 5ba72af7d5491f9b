//! [`Loss`]: a future that resolves when the device is lost.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::error::Error;
use crate::runtime::Engine;
use crate::runtime::coop::Budget;

/// Resolves with the error when the device is lost; see [`Device::lost`](crate::Device::lost).
#[must_use = "a future does nothing unless it is awaited"]
pub struct Loss {
    engine: Arc<Engine>,
    /// Its key among the waiters.
    key: Option<usize>,
    budget: Budget,
}

impl Loss {
    pub(super) fn of(engine: &Arc<Engine>) -> Self {
        Loss { engine: engine.clone(), key: None, budget: Budget::default() }
    }
}

impl fmt::Debug for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loss({})", self.engine.label())
    }
}

impl Future for Loss {
    type Output = Error;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Error> {
        let Loss { engine, key, budget } = &mut *self;
        budget.poll(cx, |cx| match engine.ending.poll_lost(key, cx.waker()) {
            Some(error) => Poll::Ready(error),
            None => Poll::Pending,
        })
    }
}

impl Clone for Loss {
    fn clone(&self) -> Self {
        Loss::of(&self.engine)
    }
}

impl Drop for Loss {
    fn drop(&mut self) {
        self.engine.ending.forget_lost(self.key);
    }
}
