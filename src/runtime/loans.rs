//! [`Loans`]: the open loans of a device's memory to other libraries, and the tasks that wait for their end.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::task::{Poll, Waker};

use gpu_await_protocol::sync::Mutex;

use crate::thread::contain;

#[derive(Default)]
pub(crate) struct Loans {
    state: Mutex<LoanCount>,
}

#[derive(Default)]
struct LoanCount {
    open: u64,
    /// The waiting tasks, each under a number of its own.
    wakers: Vec<(u64, Waker)>,
    last: u64,
}

impl Loans {
    /// Counts a loan until the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> OpenLoan {
        self.state.lock().open += 1;
        OpenLoan(self.clone())
    }

    /// How many are open.
    pub(crate) fn open(&self) -> u64 {
        self.state.lock().open
    }

    /// Waits until none is open.
    pub(crate) async fn ended(&self) {
        let number = {
            let mut state = self.state.lock();
            state.last += 1;
            state.last
        };
        let waiter = LoanWaiter { loans: self, number };
        std::future::poll_fn(|cx| {
            // Cloning and dropping a waker is foreign code: both outside the lock.
            let fresh = cx.waker().clone();
            drop(waiter.forget());
            let mut state = self.state.lock();
            if state.open == 0 {
                return Poll::Ready(());
            }
            state.wakers.push((waiter.number, fresh));
            Poll::Pending
        })
        .await;
    }
}

/// A loan. The drop of the last one wakes the waiting tasks, on a thread that may run users' code.
pub(crate) struct OpenLoan(Arc<Loans>);

impl Drop for OpenLoan {
    fn drop(&mut self) {
        let woken = {
            let mut state = self.0.state.lock();
            state.open -= 1;
            if state.open == 0 { std::mem::take(&mut state.wakers) } else { Vec::new() }
        };
        woken.into_iter().for_each(|(_, waker)| contain::wake(waker));
    }
}

/// Takes its waker back when it is dropped.
struct LoanWaiter<'l> {
    loans: &'l Loans,
    number: u64,
}

impl LoanWaiter<'_> {
    fn forget(&self) -> Option<Waker> {
        let mut state = self.loans.state.lock();
        let place = state.wakers.iter().position(|(number, _)| *number == self.number)?;
        Some(state.wakers.swap_remove(place).1)
    }
}

impl Drop for LoanWaiter<'_> {
    fn drop(&mut self) {
        contain::let_go(self.forget());
    }
}
