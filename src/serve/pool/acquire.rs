//! A request that waits for a permit.
#![forbid(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::{Asks, PoolCore, PoolState, PooledStream};
use crate::error::admitter::Admitter;
use crate::error::{Error, ErrorDetail, Result};
use crate::runtime::coop::Budget;
use crate::serve::refusal;
use crate::thread::contain;
use gpu_await_protocol::admission::{
    Ask, Entered, Granted, Left, NoPermit, Patience, Waited, Waiting,
};

/// Resolves to a stream when there is a permit for the request.
///
/// # Cancel safety
/// If it is dropped, it leaves the queue, and a permit that it was granted goes to the next waiter. It enters the
/// queue at its first poll.
///
/// If it is leaked (`mem::forget`) while it waits, it keeps its turn, and the permit that it is then granted
/// never comes back: [`drained`](super::StreamPool::drained) does not resolve, and once no other permit is
/// left, the requests behind it wait until the pool closes.
///
/// # Panics
/// If it is polled again after it was ready.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Acquire {
    shared: Arc<PoolCore>,
    asks: Asks,
    deadline: Option<u64>,
    patience: Patience,
    state: AcquireState,
    budget: Budget,
}

enum AcquireState {
    New,
    Waiting { waiting: Waiting, since: u64 },
    Done,
}

impl Acquire {
    pub(super) fn new(
        shared: &Arc<PoolCore>,
        asks: Asks,
        deadline: Option<u64>,
        patience: Patience,
    ) -> Self {
        let (state, budget) = (AcquireState::New, Budget::default());
        Acquire { shared: shared.clone(), asks, deadline, patience, state, budget }
    }

    fn poll_permit(&mut self, cx: &mut Context<'_>) -> Poll<Result<PooledStream>> {
        loop {
            let (ended, waited) = match &self.state {
                AcquireState::New => match self.enter(cx) {
                    Some(ended) => (ended, Duration::ZERO),
                    None => return Poll::Pending,
                },
                AcquireState::Waiting { waiting, since } => match self.look(waiting, cx) {
                    Some(ended) => {
                        let waited_ns = self.shared.now().saturating_sub(*since);
                        (ended, Duration::from_nanos(waited_ns))
                    }
                    None => return Poll::Pending,
                },
                AcquireState::Done => panic!("`Acquire` polled after it was ready"),
            };
            self.state = AcquireState::Done;
            match ended {
                Err(error) => {
                    refusal::tell(&self.admitter(), 1, &error);
                    return Poll::Ready(Err(error));
                }
                Ok(granted) => match self.shared.stream(granted) {
                    Some(stream) => return Poll::Ready(Ok(PooledStream { stream, waited })),
                    // Its device is gone: try another slot.
                    None => self.state = AcquireState::New,
                },
            }
        }
    }

    /// Requests a permit; `None`: the request now waits.
    fn enter(&mut self, cx: &Context<'_>) -> Option<Result<Granted>> {
        let Asks { class, share, weight, .. } = self.asks;
        let (deadline, patience) = (self.deadline, self.patience);
        let ask = Ask { class, share, weight, deadline, patience };
        // Cloned before the lock, dropped after it: a waker is foreign code.
        let mut waker = Some(cx.waker().clone());
        let now = self.shared.now();
        let mut book = self.shared.book.lock();
        let mut wakers = self.shared.look_after(&mut book);
        let (entered, told) = book.admission.enter(now, ask);
        wakers.extend(told);
        let ended = match entered {
            Entered::In(granted) => Some(Ok(granted)),
            Entered::Refused(refusal) => Some(Err(self.error(&book, refusal))),
            Entered::Waits(waiting) => {
                self.shared.keep_time(&mut book);
                book.admission.leave_waker(&waiting, &mut waker);
                self.state = AcquireState::Waiting { waiting, since: now };
                None
            }
        };
        drop(book);
        wakers.into_iter().for_each(contain::wake);
        contain::let_go(waker);
        match &self.state {
            // From here on the devices wake the pool: one may have ended before that.
            AcquireState::Waiting { waiting, .. } if self.shared.watch() => self.look(waiting, cx),
            _ => ended,
        }
    }

    /// Looks up the outcome of the wait; `None`: still waiting.
    fn look(&self, waiting: &Waiting, cx: &Context<'_>) -> Option<Result<Granted>> {
        if let Some(Ok(granted)) = waiting.outcome() {
            return Some(Ok(granted));
        }
        // Cloned before the lock, dropped after it: a waker is foreign code.
        let waker = cx.waker().clone();
        let mut book = self.shared.book.lock();
        // After the registration: a device that ended before it does not wake the pool.
        let wakers = self.shared.look_after(&mut book);
        let (waited, stale) = book.admission.poll(waiting, waker);
        let ended = match waited {
            Waited::Wait => None,
            Waited::In(granted) => Some(Ok(granted)),
            Waited::Refused(refusal) => Some(Err(self.error(&book, refusal))),
        };
        drop(book);
        wakers.into_iter().for_each(contain::wake);
        contain::let_go(stale);
        ended
    }
}

impl Future for Acquire {
    type Output = Result<PooledStream>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut budget = self.budget;
        let polled = budget.poll(cx, |cx| self.poll_permit(cx));
        self.budget = budget;
        polled
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let AcquireState::Waiting { waiting, .. } = &self.state {
            let now = self.shared.now();
            let mut book = self.shared.book.lock();
            let Left { mut wakers, stale, refusal } = book.admission.leave(now, waiting);
            wakers.extend(book.drained());
            let untold = refusal.map(|refusal| self.error(&book, refusal));
            drop(book);
            wakers.into_iter().for_each(contain::wake);
            contain::let_go(stale);
            if let Some(error) = untold {
                refusal::tell(&self.admitter(), 1, &error);
            }
        }
    }
}

impl Acquire {
    /// The result of a request that never waits, whatever is left of the task's budget.
    pub(super) fn answer(mut self) -> Result<PooledStream> {
        match self.poll_permit(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => answer,
            Poll::Pending => unreachable!("who never waits is answered at once"),
        }
    }

    fn admitter(&self) -> Admitter {
        self.shared.admitter(self.asks.share)
    }

    fn error(&self, book: &PoolState, refusal: NoPermit) -> Error {
        let (by, admission) = (self.admitter(), &book.admission);
        let waiting = admission.waiting() as u64;
        let closed = |by: Admitter| ErrorDetail::Closed { device: by.to_string() };
        match refusal {
            NoPermit::Full => ErrorDetail::Overloaded {
                by,
                in_flight: admission.taken(),
                limit: admission.limit(),
                waiting,
                max_waiting: admission.max_waiting() as u64,
            },
            NoPermit::Late { remaining_ns, expected_ns, takes_ns } => ErrorDetail::TooLate {
                by,
                remaining_us: remaining_ns / 1000,
                expected_us: expected_ns / 1000,
                takes_us: takes_ns / 1000,
                waiting,
            },
            NoPermit::Expired { waited_ns, remaining_ns, takes_ns } => ErrorDetail::Expired {
                by,
                waited_us: waited_ns / 1000,
                remaining_us: remaining_ns / 1000,
                takes_us: takes_ns / 1000,
                waiting,
            },
            NoPermit::Gone => match &book.gone {
                Some(error) => return error.clone(),
                None => closed(by),
            },
            NoPermit::Closed => closed(by),
        }
        .into()
    }
}

impl fmt::Debug for Acquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            AcquireState::New => "Acquire(new)",
            AcquireState::Waiting { .. } => "Acquire(waiting)",
            AcquireState::Done => "Acquire(done)",
        })
    }
}
