//! [`Patience`]: how long ranks wait for one another; they also stop when the future that they wait for is dropped.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::channel::oneshot;

use crate::error::{Error, Result};
use crate::stats;

/// How often a waiter checks whether it is still wanted.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// How long ranks wait for one another.
#[derive(Clone, Debug)]
pub(crate) struct Patience {
    pub(crate) end: Instant,
    pub(crate) limit: Duration,
    /// Nobody waits for the result any more.
    given_up: Arc<AtomicBool>,
}

impl Patience {
    pub(crate) fn of(limit: Duration) -> Patience {
        let now = Instant::now();
        // A limit that the clock cannot express counts as none.
        let far = || now + Duration::from_secs(u64::from(u32::MAX));
        let end = now.checked_add(limit).unwrap_or_else(far);
        Patience { end, limit, given_up: Arc::default() }
    }

    /// The same limit, counted from now.
    pub(crate) fn again(&self) -> Patience {
        Patience { given_up: self.given_up.clone(), ..Patience::of(self.limit) }
    }

    /// Ends after `rest` at the latest.
    pub(crate) fn at_most(&self, rest: Duration) -> Patience {
        Patience { end: self.end.min(Instant::now() + rest), ..self.clone() }
    }

    /// Ends this much later.
    pub(crate) fn longer(&self, more: Duration) -> Patience {
        Patience { end: self.end + more, ..self.clone() }
    }

    /// Whether somebody waits for the result.
    pub(crate) fn is_wanted(&self) -> bool {
        // ORDERING: Relaxed: only its value counts.
        !self.given_up.load(Ordering::Relaxed)
    }

    pub(crate) fn is_over(&self) -> bool {
        !self.is_wanted() || Instant::now() >= self.end
    }

    pub(crate) fn rest(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// When to look again.
    pub(crate) fn next_look(&self) -> Instant {
        self.end.min(Instant::now() + LOOK)
    }

    /// The error of a call that has waited for these ranks of a world in vain.
    pub(crate) fn missing(&self, missing: Vec<usize>, world: usize) -> Error {
        Error::MissingRanks { missing, world, limit: self.limit, refused: Vec::new() }
    }

    /// Has a thread of the crate wait, and resolves with its result. If the future is dropped, the thread gives up.
    pub(crate) async fn on_thread<T: Send + 'static>(
        self,
        what: &'static str,
        wait: impl FnOnce(&Patience) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let waits = GiveUp(Some(self.given_up.clone()));
        let (send, receive) = oneshot::channel();
        drop(stats::spawn(what, move || {
            // If nobody waits any more, the result is dropped, and ended.
            drop(send.send(wait(&self)));
        })?);
        let ended = || Err(Error::Thread { what, reason: "it ended".to_owned() });
        let done = receive.await.unwrap_or_else(|_| ended())?;
        waits.keep();
        Ok(done)
    }
}

/// Belongs to a future that waits, and is dropped with it.
struct GiveUp(Option<Arc<AtomicBool>>);

impl GiveUp {
    /// The future has what it waited for.
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for GiveUp {
    fn drop(&mut self) {
        if let Some(given_up) = &self.0 {
            // ORDERING: Relaxed: only its value counts.
            given_up.store(true, Ordering::Relaxed);
        }
    }
}
