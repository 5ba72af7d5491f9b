//! Budgets and their queue, against a model that knows every block and who has it.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Wake, Waker};

use proptest::prelude::*;

use crate::under_test::cases::{config, size};
use gpu_await_protocol::account::Account;
use gpu_await_protocol::reservations::Holder;

const LIMIT: u64 = 60;

#[derive(Clone, Debug)]
enum Step {
    /// A request joins the queue.
    Ask(u64),
    /// The n-th waiting request looks.
    Look(usize),
    /// The n-th waiting request is dropped.
    GiveUp(usize),
    /// A block, from the n-th budget or from none, with all that is pending taken over.
    Claim(u64, Option<usize>),
    /// A cached block, likewise.
    Reuse(usize, Option<usize>),
    Keep(usize),
    Retire(usize),
    Release,
    Leak(usize),
    Shrink(usize, u64),
    Close(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let budget = || prop::option::of(0..4_usize);
    prop_oneof![
        3 => (0..70_u64).prop_map(Step::Ask),
        4 => (0..4_usize).prop_map(Step::Look),
        1 => (0..4_usize).prop_map(Step::GiveUp),
        6 => (1..30_u64, budget()).prop_map(|(bytes, of)| Step::Claim(bytes, of)),
        2 => (0..5_usize, budget()).prop_map(|(nth, of)| Step::Reuse(nth, of)),
        2 => (0..5_usize).prop_map(Step::Keep),
        2 => (0..5_usize).prop_map(Step::Retire),
        2 => Just(Step::Release),
        1 => (0..5_usize).prop_map(Step::Leak),
        1 => (0..4_usize, 0..40_u64).prop_map(|(nth, to)| Step::Shrink(nth, to)),
        1 => (0..4_usize).prop_map(Step::Close),
    ]
}

#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Asked {
    request: u64,
    bytes: u64,
    woken: Arc<Woken>,
    has_waker: bool,
}

/// A budget: its number, its size. Closed ones have a size of 0.
#[derive(Clone, Copy)]
struct Known {
    number: usize,
    size: u64,
}

struct Model {
    account: Account,
    strict: bool,
    queue: Vec<Asked>,
    budgets: Vec<Known>,
    /// Blocks of buffers: size, and the budget by its place above.
    allocated: Vec<(u64, Option<usize>)>,
    kept: Vec<u64>,
    pending: u64,
    leaked: u64,
}

impl Model {
    fn new(strict: bool) -> Self {
        Model {
            account: Account::new(LIMIT, strict),
            strict,
            queue: Vec::new(),
            budgets: Vec::new(),
            allocated: Vec::new(),
            kept: Vec::new(),
            pending: 0,
            leaked: 0,
        }
    }

    fn left_of(&self, nth: usize) -> u64 {
        let drawn = self.allocated.iter().filter(|block| block.1 == Some(nth));
        self.budgets[nth].size.saturating_sub(drawn.map(|block| block.0).sum())
    }

    fn left(&self) -> u64 {
        (0..self.budgets.len()).map(|nth| self.left_of(nth)).sum()
    }

    fn taken(&self) -> u64 {
        self.allocated.iter().map(|block| block.0).sum::<u64>() + self.leaked
    }

    fn held(&self) -> u64 {
        self.taken() + self.pending + self.kept.iter().sum::<u64>()
    }

    /// Whether a block fits that takes over all that is pending.
    fn fits(&self, bytes: u64, of: Option<usize>) -> bool {
        let is_there = match of {
            Some(nth) => bytes <= self.left_of(nth),
            None => {
                let beside = if self.strict { self.left() } else { 0 };
                let fresh = LIMIT.saturating_sub(self.held() + beside);
                bytes <= LIMIT.saturating_sub(self.taken() + self.left())
                    && bytes <= self.pending + fresh
            }
        };
        let after = self.held() + bytes - bytes.min(self.pending);
        is_there && bytes <= LIMIT - self.taken() && after <= LIMIT
    }

    fn number(&self, of: Option<usize>) -> Option<usize> {
        of.map(|nth| self.budgets[nth].number)
    }

    fn budget(&self, of: Option<usize>) -> Option<usize> {
        of.filter(|_| !self.budgets.is_empty()).map(|nth| nth % self.budgets.len())
    }

    /// The first is granted if it fits, and the others are not looked at.
    fn look(&mut self, nth: usize) {
        if self.queue.is_empty() {
            return;
        }
        let nth = nth % self.queue.len();
        let Asked { request, bytes, .. } = self.queue[nth];
        assert_eq!(self.account.reservations.ahead_of(request), nth as u64);
        let first = self.account.reservations.first(request);
        assert_eq!(first, (nth == 0).then_some(bytes));
        if nth > 0 {
            let waker = Waker::from(self.queue[nth].woken.clone());
            drop(self.account.reservations.wait(request, waker));
            self.queue[nth].has_waker = true;
            return;
        }
        let pending = if self.strict { self.held() - self.taken() } else { 0 };
        // What a budget gave back is pending, and its own again: both together can be more than there is.
        let fits = bytes == 0 || bytes + self.taken() + self.left() + pending <= LIMIT;
        let granted = self.account.reserve(bytes, u64::MAX, None).ok();
        assert_eq!(granted.is_some(), fits);
        if let Some(number) = granted {
            self.budgets.push(Known { number, size: bytes });
            self.leave(0);
        }
    }

    /// The next one is woken if it is the first now and left a waker.
    fn leave(&mut self, nth: usize) {
        let left = self.account.reservations.leave(self.queue.remove(nth).request);
        let next = self.queue.first_mut().filter(|next| nth == 0 && next.has_waker);
        assert_eq!(left.next.is_some(), next.is_some());
        if let (Some(next), Some(waker)) = (next, left.next) {
            let before = next.woken.0.load(Ordering::Relaxed);
            waker.wake();
            assert_eq!(next.woken.0.load(Ordering::Relaxed), before + 1);
            next.has_waker = false;
        }
    }

    fn go(&mut self, step: &Step) {
        match *step {
            Step::Ask(bytes) => {
                let request = self.account.reservations.enter(bytes, 0);
                let woken = Arc::default();
                self.queue.push(Asked { request, bytes, woken, has_waker: false });
            }
            Step::Look(nth) => self.look(nth),
            Step::GiveUp(nth) if !self.queue.is_empty() => self.leave(nth % self.queue.len()),
            Step::Claim(bytes, of) => {
                let of = self.budget(of);
                let (number, taken) = (self.number(of), self.pending);
                let fits = self.fits(bytes, of);
                assert_eq!(self.account.claim(bytes, taken, number), fits, "{bytes} {of:?}");
                if fits {
                    self.pending -= taken.min(bytes);
                    self.allocated.push((bytes, of));
                }
            }
            Step::Reuse(nth, of) if !self.kept.is_empty() => {
                let (nth, of) = (nth % self.kept.len(), self.budget(of));
                let bytes = self.kept[nth];
                let fits = match of {
                    Some(of) => bytes <= self.left_of(of),
                    None => self.left() == 0 || bytes + self.taken() + self.left() <= LIMIT,
                };
                assert_eq!(self.account.reuse(bytes, self.number(of)), fits);
                if fits {
                    self.kept.remove(nth);
                    self.allocated.push((bytes, of));
                }
            }
            Step::Keep(nth) | Step::Retire(nth) | Step::Leak(nth) if !self.allocated.is_empty() => {
                let nth = nth % self.allocated.len();
                let (bytes, of) = self.allocated.remove(nth);
                let number = self.number(of);
                match step {
                    Step::Keep(_) => {
                        self.account.keep(bytes, number);
                        self.kept.push(bytes);
                    }
                    Step::Retire(_) => {
                        self.account.retire(bytes, number);
                        self.pending += bytes;
                    }
                    // What leaks is lost to its budget, which is as good as smaller.
                    _ => {
                        self.account.retire(bytes, None);
                        self.account.leak(bytes);
                        self.leaked += bytes;
                        if let Some(of) = of {
                            self.account.shrink(self.budgets[of].number, 0);
                            self.budgets[of].size = 0;
                        }
                    }
                }
            }
            Step::Release => {
                self.account.release(self.pending);
                self.pending = 0;
            }
            Step::Shrink(nth, to) if !self.budgets.is_empty() => {
                let nth = nth % self.budgets.len();
                let known = &mut self.budgets[nth];
                self.account.shrink(known.number, to);
                known.size = known.size.min(to);
            }
            Step::Close(nth) if !self.budgets.is_empty() => {
                let nth = nth % self.budgets.len();
                self.account.shrink(self.budgets[nth].number, 0);
                self.budgets[nth].size = 0;
                if self.allocated.iter().all(|block| block.1 != Some(nth)) {
                    self.account.reservations.forget(self.budgets[nth].number);
                    // The others keep their places.
                    let fresh = self.account.reserve(0, u64::MAX, None);
                    self.budgets[nth].number = fresh.expect("nothing fits");
                }
            }
            _ => {}
        }
    }
}

fn each_step(steps: &[Step], strict: bool, mut check: impl FnMut(&Model)) {
    let mut model = Model::new(strict);
    for step in steps {
        model.go(step);
        check(&model);
    }
}

proptest! {
    #![proptest_config(config(128))]

    #[test]
    fn budgets_say_what_a_model_says(
        steps in prop::collection::vec(step(), 1..size(80)),
        strict in any::<bool>(),
    ) {
        each_step(&steps, strict, |model| {
            assert_eq!(model.account.figures().budgeted, model.left());
            let is_open = |(_, of): &&(u64, Option<usize>)| {
                of.is_some_and(|of| model.budgets[of].size > 0)
            };
            let drawn: u64 = model.allocated.iter().filter(is_open).map(|(bytes, _)| bytes).sum();
            assert_eq!(model.account.figures().drawn, drawn);
            for (nth, known) in model.budgets.iter().enumerate() {
                assert_eq!(model.account.reservations.left_of(known.number), model.left_of(nth));
                assert_eq!(model.account.reservations.size_of(known.number), known.size);
            }
            assert_eq!(model.account.reservations.waiting(), model.queue.len());
        });
    }

    /// Whatever others did: each budget can be drawn to its end, once what is kept was taken over as well.
    #[test]
    fn budgets_are_kept(
        steps in prop::collection::vec(step(), 1..size(80)),
        strict in any::<bool>(),
    ) {
        let mut end = Model::new(strict);
        for step in &steps {
            end.go(step);
            prop_assert!(end.taken() + end.left() <= LIMIT);
            prop_assert!(end.held() <= LIMIT);
        }
        for bytes in std::mem::take(&mut end.kept) {
            end.account.uncache(bytes);
            end.pending += bytes;
        }
        for nth in 0..end.budgets.len() {
            let (left, number) = (end.left_of(nth), end.budgets[nth].number);
            prop_assert!(end.account.claim(left, end.pending, Some(number)));
            end.pending -= end.pending.min(left);
            end.allocated.push((left, Some(nth)));
        }
    }

    #[test]
    fn no_request_overtakes(steps in prop::collection::vec(step(), 1..size(120))) {
        // `look` and `leave` compare.
        each_step(&steps, false, |_| ());
    }
}

/// The task that awaited one is known, until it passes it on.
#[test]
fn a_holder_is_known() {
    let [mine, other] = [(); 2].map(|()| Waker::from(Arc::<Woken>::default()));
    let mut account = Account::new(LIMIT, false);
    let made_at = Location::caller();
    let holder = Holder { waker: mine.clone(), made_at };
    let number = account.reserve(10, u64::MAX, Some(holder)).expect("nothing is in use");
    assert_eq!(account.reservations.held_by(&mine), Some((10, made_at)));
    assert_eq!(account.reservations.held_by(&other), None);
    assert!(
        account.reservations.hand_over(number).is_some_and(|holder| holder.waker.will_wake(&mine))
    );
    assert_eq!(account.reservations.held_by(&mine), None);
}

/// What the device can give bounds what is reserved where the limit is higher.
#[test]
fn what_is_out_of_reach_is_not_reserved() {
    let mut account = Account::new(u64::MAX, false);
    assert!(account.claim(30, 0, None));
    assert_eq!((account.unreserved(100), account.reservable(100)), (70, 100));
    let number = account.reserve(50, 100, None).expect("there is room");
    assert_eq!(account.unreserved(100), 20);
    assert!(account.reserve(21, 100, None).is_err());
    assert!(account.claim(50, 0, Some(number)));
    assert_eq!(account.unreserved(100), 20);
}
