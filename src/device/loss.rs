//! [`Loss`]: the end of a device, awaited.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::completion::engine::Engine;
use crate::error::Error;

/// Resolves with the error when the device is lost; see [`Device::lost`](crate::Device::lost).
#[must_use = "a future does nothing unless it is awaited"]
pub struct Loss {
    engine: Arc<Engine>,
    /// Its place among those who wait.
    key: Option<usize>,
}

impl Loss {
    pub(super) fn of(engine: &Arc<Engine>) -> Self {
        Loss { engine: engine.clone(), key: None }
    }
}

impl Future for Loss {
    type Output = Error;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Error> {
        let this = &mut *self;
        match this.engine.poll_lost(&mut this.key, cx.waker()) {
            Some(error) => Poll::Ready(error),
            None => Poll::Pending,
        }
    }
}

impl Clone for Loss {
    fn clone(&self) -> Self {
        Loss { engine: self.engine.clone(), key: None }
    }
}

impl Drop for Loss {
    fn drop(&mut self) {
        self.engine.forget_lost(self.key);
    }
}
