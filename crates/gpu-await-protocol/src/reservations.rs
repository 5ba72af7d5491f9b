//! Budgets of an account's memory, and the requests that wait for one (pure).
//!
//! | a request | left by |
//! |---|---|
//! | waits, in FIFO order: only the first is looked at, however small those behind it are | a grant; its drop; its time-out, polled or not |
//!
//! | a budget | left by |
//! |---|---|
//! | open: what is left of it is reserved for its allocations | its close |
//! | closed: nothing is left of it | the drop of its last allocation and handle |
//!
//! A budget has a size, from which allocations draw; freed memory comes back to it while it is open. Its size only shrinks.
//!
//! # Invariants
//! 1. What is left of a budget is its size minus what is drawn, and nothing once it is closed (`budgets_say_what_a_model_says`).
//! 2. A request is granted only when no older one waits (`no_request_overtakes`).
//! 3. Whenever another request becomes the first, its waker is returned (`no_request_overtakes`).
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::task::Waker;

use slab::Slab;

/// The budgets and the queue of one account, which changes them under its lock.
#[derive(Debug, Default)]
pub struct Reservations {
    budgets: Slab<OpenBudget>,
    /// What is left of all of them.
    left: u64,
    /// What allocations of open ones have drawn.
    drawn: u64,
    /// The budgets that tasks hold, each after the address of its task's waker.
    held: BTreeSet<(usize, usize)>,
    /// By the order in which they came.
    queue: BTreeMap<u64, Request>,
    came: u64,
    /// The sum of all in the queue.
    waiting_bytes: u64,
}

#[derive(Debug)]
struct Request {
    bytes: u64,
    since: u64,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct OpenBudget {
    size: u64,
    drawn: u64,
    /// `None` once the task passed it on.
    holder: Option<Holder>,
}

/// The task that awaited a budget, and where it asked.
#[derive(Debug)]
pub struct Holder {
    /// The task's waker.
    pub waker: Waker,
    /// The line that asked for the budget.
    pub made_at: &'static Location<'static>,
}

/// What remains of a request, for the caller to handle when the lock is released.
#[derive(Debug)]
#[must_use]
pub struct LeftRequest {
    /// Its waker, to be dropped, or to be woken if it was late.
    pub stale: Option<Waker>,
    /// The waker of the request that is the first now, to be woken.
    pub next: Option<Waker>,
}

impl OpenBudget {
    fn left(&self) -> u64 {
        self.size.saturating_sub(self.drawn)
    }

    /// What it drew, unless it is closed.
    fn drawn_while_open(&self) -> u64 {
        if self.size > 0 { self.drawn } else { 0 }
    }
}

impl Reservations {
    /// What is left of all budgets.
    #[inline]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// What allocations of open budgets have drawn.
    #[inline]
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// What is left of one budget.
    pub fn left_of(&self, budget: usize) -> u64 {
        self.budgets[budget].left()
    }

    /// Its size; 0 once it is closed.
    pub fn size_of(&self, budget: usize) -> u64 {
        self.budgets[budget].size
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// How many requests are ahead of a request.
    pub fn ahead_of(&self, request: u64) -> u64 {
        self.queue.range(..request).count() as u64
    }

    /// How many bytes they wait for.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
    }

    /// When the first of them arrived.
    pub fn waiting_since(&self) -> Option<u64> {
        self.queue.first_key_value().map(|(_, first)| first.since)
    }

    /// A request joins the queue at `now`.
    pub fn enter(&mut self, bytes: u64, now: u64) -> u64 {
        self.came += 1;
        self.waiting_bytes += bytes;
        self.queue.insert(self.came, Request { bytes, since: now, waker: None });
        self.came
    }

    /// The bytes of the request, if it is the first.
    pub fn first(&self, request: u64) -> Option<u64> {
        let (first, Request { bytes, .. }) = self.queue.first_key_value()?;
        (*first == request).then_some(*bytes)
    }

    /// Whether it is in the queue.
    pub fn is_waiting(&self, request: u64) -> bool {
        self.queue.contains_key(&request)
    }

    /// Leaves a waker, to be woken when the request is the first or leaves by itself; returns the one before, or the new one if it has left.
    pub fn wait(&mut self, request: u64, waker: Waker) -> Option<Waker> {
        match self.queue.get_mut(&request) {
            Some(known) => known.waker.replace(waker),
            None => Some(waker),
        }
    }

    /// A request leaves the queue: granted, dropped or late.
    pub fn leave(&mut self, request: u64) -> LeftRequest {
        let was_first = self.first(request).is_some();
        let gone = self.queue.remove(&request);
        self.waiting_bytes -= gone.as_ref().map_or(0, |gone| gone.bytes);
        let stale = gone.and_then(|gone| gone.waker);
        let mut next = self.queue.first_entry().filter(|_| was_first);
        LeftRequest { stale, next: next.as_mut().and_then(|next| next.get_mut().waker.take()) }
    }

    /// The wakers of all requests: the device is lost or closed.
    pub fn take_wakers(&mut self) -> Vec<Waker> {
        self.queue.values_mut().filter_map(|request| request.waker.take()).collect()
    }

    /// A budget that the task of `waker` awaited and holds, if it is open: its size, and where it was made. A task that polls with another waker than
    /// its own is not recognised.
    pub fn held_by(&self, waker: &Waker) -> Option<(u64, &'static Location<'static>)> {
        let address = address(waker);
        let held = self.held.range((address, 0)..=(address, usize::MAX));
        held.map(|(_, budget)| &self.budgets[*budget]).filter(|budget| budget.size > 0).find_map(
            |budget| {
                let holder = budget.holder.as_ref()?;
                holder.waker.will_wake(waker).then_some((budget.size, holder.made_at))
            },
        )
    }

    /// A budget of memory that the account has.
    pub(crate) fn open(&mut self, size: u64, holder: Option<Holder>) -> usize {
        self.left += size;
        let held = holder.as_ref().map(|holder| address(&holder.waker));
        let budget = self.budgets.insert(OpenBudget { size, drawn: 0, holder });
        self.held.extend(held.map(|address| (address, budget)));
        budget
    }

    /// Draws for an allocation; false, and nothing happens, if that is more than what is left.
    #[must_use]
    pub(crate) fn draw(&mut self, budget: usize, bytes: u64) -> bool {
        let fits = bytes <= self.left_of(budget);
        if fits {
            self.change(budget, |budget| budget.drawn += bytes);
        }
        fits
    }

    /// Returns what a freed allocation drew.
    pub(crate) fn undraw(&mut self, budget: usize, bytes: u64) {
        self.change(budget, |budget| budget.drawn -= bytes);
    }

    /// Records that the task that awaited the budget passed it on; returns its waker, to be dropped.
    pub fn hand_over(&mut self, budget: usize) -> Option<Holder> {
        let holder = self.budgets[budget].holder.take();
        holder.inspect(|holder| {
            self.held.remove(&(address(&holder.waker), budget));
        })
    }

    pub(crate) fn shrink(&mut self, budget: usize, size: u64) {
        self.change(budget, |budget| budget.size = budget.size.min(size));
    }

    /// The last handle and the last allocation are gone.
    pub fn forget(&mut self, budget: usize) {
        self.shrink(budget, 0);
        let holder = self.budgets.remove(budget).holder;
        holder.iter().for_each(|holder| {
            self.held.remove(&(address(&holder.waker), budget));
        });
    }

    fn change(&mut self, budget: usize, change: impl FnOnce(&mut OpenBudget)) {
        let budget = &mut self.budgets[budget];
        self.left -= budget.left();
        self.drawn -= budget.drawn_while_open();
        change(budget);
        self.left += budget.left();
        self.drawn += budget.drawn_while_open();
    }
}

fn address(waker: &Waker) -> usize {
    waker.data().addr()
}
