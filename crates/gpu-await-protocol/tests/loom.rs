//! The protocol rules of completion, each checked by loom under every interleaving.
//!
//! The crate is compiled from its very sources, with loom's types in the place of
//! `crate::sync`. Every fence, second look and order that a rule rests on is in them: `tests/mutations`
//! takes them out one by one, and each time a test here fails. [`StreamState`] and [`Poller`] call them as
//! `stream_state.rs` and `poller.rs` do, without driver and cadence. A time is a number; it passes where the
//! poller sleeps.
//!
//! A test ends by asking whether somebody was forgotten, or runs until loom finds that everybody
//! sleeps. Values that only keep the record of a run are plain atomics, which loom does not see.
#![forbid(unsafe_code)]

/// The crate, from its very sources.
#[expect(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "what loom has nothing to say about, and its own atomics"
)]
#[path = "../src/lib.rs"]
mod protocol;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Record, Ordering::Relaxed as Seen};
use std::task::Poll;

use loom::thread;
use protocol::deadlines::Deadlines;
use protocol::event_pool::{EventHandle, EventPool};
use protocol::linked_outcome::LinkedOutcome;
use protocol::park::{Inbox, ParkState, Rounds};
use protocol::sharing::Sharing;
use protocol::submission::{Markable, SubmissionLock};
use protocol::sweep::SweepGate;
use protocol::timeline::Timeline;
use protocol::turn::Turn;
use protocol::wait_queue::{Entry, LossFlag, Notify, Registered, WaitQueue, Wakes};
use protocol::waiters::WaiterKey;
use sync::{AtomicBool, AtomicU64, Ordering, Plain};

/// Loom's types under the names and with the calls of `src/sync.rs`.
mod sync {
    use std::ops::{Deref, DerefMut};

    use loom::sync::atomic;
    pub(crate) use loom::sync::atomic::{Ordering, fence};

    /// Loom's own lock does not take an unlock for something that a `try_lock` depends on, so that
    /// some failures to get it are never explored. This one is a word, which everybody changes.
    #[derive(Debug)]
    pub(crate) struct Mutex<T> {
        held: atomic::AtomicBool,
        value: std::sync::Mutex<T>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex { held: atomic::AtomicBool::new(false), value: std::sync::Mutex::new(value) }
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            loop {
                if let Some(guard) = self.try_lock() {
                    return guard;
                }
                loom::thread::yield_now();
            }
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            let (get, fail) = (Ordering::Acquire, Ordering::Relaxed);
            self.held.compare_exchange(false, true, get, fail).ok()?;
            Some(MutexGuard { value: Some(self.value.try_lock().unwrap()), held: &self.held })
        }
    }

    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T> {
        /// `None` only inside `drop`.
        value: Option<std::sync::MutexGuard<'a, T>>,
        held: &'a atomic::AtomicBool,
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.value.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.value.as_mut().unwrap()
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.value = None;
            self.held.store(false, Ordering::Release);
        }
    }

    /// A lock that nobody tries.
    #[derive(Debug, Default)]
    pub(crate) struct Plain<T>(loom::sync::Mutex<T>);

    impl<T> Plain<T> {
        pub(crate) fn new(value: T) -> Self {
            Plain(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    /// Loom takes a SeqCst access for an acquire or release access, and so finds failures that
    /// cannot happen. Here it is a read-modify-write instead, which reads the newest value: all
    /// accesses of that kind to all words are then in one order, and nothing else is ordered by
    /// them, so a fence that is needed stays needed.
    ///
    /// Loom also puts a store that runs beside a read-modify-write in between its two halves; a
    /// relaxed store is therefore one, too.
    macro_rules! atomic {
        ($name:ident, $value:ty, $same:expr) => {
            #[derive(Debug)]
            pub(crate) struct $name(atomic::$name);

            #[allow(dead_code, reason = "one set of calls for all three")]
            impl $name {
                pub(crate) fn new(value: $value) -> Self {
                    $name(atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    match order {
                        Ordering::SeqCst => ($same)(&self.0),
                        order => self.0.load(order),
                    }
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    match order {
                        Ordering::SeqCst => _ = self.0.swap(value, Ordering::Release),
                        Ordering::Relaxed => _ = self.0.swap(value, Ordering::Relaxed),
                        order => self.0.store(value, order),
                    }
                }

                pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                    self.0.swap(value, order)
                }

                pub(crate) fn compare_exchange(
                    &self,
                    old: $value,
                    new: $value,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$value, $value> {
                    self.0.compare_exchange(old, new, success, failure)
                }
            }
        };
    }

    atomic!(AtomicBool, bool, |a: &atomic::AtomicBool| a.fetch_or(false, Ordering::Acquire));
    atomic!(AtomicU8, u8, |a: &atomic::AtomicU8| a.fetch_or(0, Ordering::Acquire));
    atomic!(AtomicU64, u64, |a: &atomic::AtomicU64| a.fetch_or(0, Ordering::Acquire));

    impl AtomicU64 {
        pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_max(value, order)
        }

        pub(crate) fn fetch_min(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_min(value, order)
        }

        pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_add(value, order)
        }

        pub(crate) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_sub(value, order)
        }

        pub(crate) fn fetch_update(
            &self,
            success: Ordering,
            failure: Ordering,
            next: impl FnMut(u64) -> Option<u64>,
        ) -> Result<u64, u64> {
            self.0.fetch_update(success, failure, next)
        }

        pub(crate) fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_or(value, order)
        }

        pub(crate) fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_and(value, order)
        }
    }
}

/// Explores every interleaving with at most `preemptions` forced switches.
fn explore(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

/// A thread that sleeps until it is called, as `std::thread::park` does. (Loom's own wakes threads
/// that wait for a lock.)
#[derive(Default)]
struct Sleeper {
    called: loom::sync::Mutex<bool>,
    changed: loom::sync::Condvar,
}

impl Sleeper {
    fn park(&self) {
        let mut called = self.called.lock().unwrap();
        while !*called {
            called = self.changed.wait(called).unwrap();
        }
        *called = false;
    }

    fn unpark(&self) {
        *self.called.lock().unwrap() = true;
        self.changed.notify_one();
    }
}

/// A waker that counts.
#[derive(Clone, Debug, Default)]
struct Bell(Arc<Record>);

impl Bell {
    fn wake(self) {
        self.0.fetch_add(1, Seen);
    }

    fn rang(&self) -> bool {
        self.0.load(Seen) > 0
    }
}

impl Wakes for Bell {
    fn will_wake(&self, other: &Bell) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Lost;

/// A nap of the poller's, between two looks at a stream that is waited for.
const NAP: u64 = 10;

/// What a future remembers between polls: `WaitState`.
#[derive(Default)]
struct Wait {
    key: Option<WaiterKey>,
    /// Polls that check.
    checks: u32,
    /// When the poller must look for it.
    due: u64,
}

impl Wait {
    fn due(due: u64) -> Self {
        Wait { due, ..Wait::default() }
    }
}

/// `StreamState` with as much of its `Engine` and `Attention` as the rules speak of.
struct StreamState {
    timeline: Timeline,
    /// How far the device is: what a query would say.
    device: AtomicU64,
    gate: SweepGate,
    queue: WaitQueue<Bell>,
    loss: LossFlag,
    /// Why it is lost: 1, once it is.
    cause: AtomicU64,
    mourners: Plain<Vec<Bell>>,
    park: ParkState,
    sleeper: Sleeper,
    inbox: Inbox<()>,
}

impl StreamState {
    fn new(device: u64) -> Arc<Self> {
        Arc::new(StreamState {
            timeline: Timeline::new(),
            device: AtomicU64::new(device),
            gate: SweepGate::new(),
            queue: WaitQueue::new(),
            loss: LossFlag::new(),
            cause: AtomicU64::new(0),
            mourners: Plain::new(Vec::new()),
            park: ParkState::new(),
            sleeper: Sleeper::default(),
            inbox: Inbox::new(),
        })
    }

    /// A future that comes new to the stream may look as well, which is left out here: nobody counts
    /// on that.
    fn poll_ticket(&self, ticket: u64, wait: &mut Wait, bell: &Bell) -> Poll<Result<(), Lost>> {
        if let Some(outcome) = self.outcome(ticket) {
            self.queue.leave(&mut wait.key, drop);
            return Poll::Ready(outcome);
        }
        let checking = wait.checks > 0;
        if !checking && self.queue.entry(wait.key, bell) == Entry::Current {
            return Poll::Pending;
        }
        if checking {
            wait.checks -= 1;
            if self.look() {
                let outcome = self.outcome(ticket);
                if outcome.is_some() {
                    self.queue.leave(&mut wait.key, drop);
                }
                self.settle();
                if let Some(outcome) = outcome {
                    return Poll::Ready(outcome);
                }
            }
        }
        if self.queue.entry(wait.key, bell) != Entry::Current {
            let outcome = || self.outcome(ticket);
            match self.queue.register(&mut wait.key, ticket, bell, wait.due, outcome) {
                Registered::Waiting(call) => self.call(call),
                Registered::Settled(outcome) => {
                    self.queue.leave(&mut wait.key, drop);
                    return Poll::Ready(outcome);
                }
            }
        } else if !checking {
            self.call(self.queue.look_by(wait.due));
        }
        Poll::Pending
    }

    fn outcome(&self, ticket: u64) -> Option<Result<(), Lost>> {
        if self.timeline.is_complete(ticket) {
            return Some(Ok(()));
        }
        if !self.loss.is_set() {
            return None;
        }
        assert_eq!(self.cause.load(Ordering::Relaxed), 1, "lost, and nobody said why");
        Some(if self.timeline.is_complete(ticket) { Ok(()) } else { Err(Lost) })
    }

    fn sweep(&self) -> bool {
        let moved = self.look();
        self.settle();
        moved
    }

    fn look(&self) -> bool {
        let mut moved = false;
        if !self.loss.is_set() {
            self.gate.run(|| {
                moved |= self.timeline.complete(self.device.load(Ordering::Acquire));
            });
        }
        self.mourn();
        moved
    }

    fn settle(&self) {
        let upto = || if self.loss.is_set() { u64::MAX } else { self.timeline.completed() };
        self.queue.settle(upto, |_, bell| bell.wake());
    }

    /// Only declares: the caller may hold locks.
    fn lose(&self) {
        self.cause.store(1, Ordering::Relaxed);
        self.loss.set();
        self.call_before(0);
    }

    fn mourn(&self) {
        if self.loss.tell() {
            let mourners = std::mem::take(&mut *self.mourners.lock());
            mourners.into_iter().for_each(Bell::wake);
            self.settle();
        }
    }

    /// `Engine::poll_lost`.
    fn poll_lost(&self, bell: &Bell) -> bool {
        if !self.loss.is_set() {
            self.mourners.lock().push(bell.clone());
        }
        self.loss.is_set()
    }

    fn call(&self, call: Notify) {
        match call {
            Notify::HandOver => {
                self.inbox.put(()).unwrap();
                self.call_before(0);
            }
            Notify::Before(due) => self.call_before(due),
        }
    }

    fn call_before(&self, due: u64) {
        if self.park.notify_before(due) {
            self.sleeper.unpark();
        }
    }

    fn visit(&self, now: u64) -> bool {
        self.queue.begin_look();
        let moved = self.look();
        self.settle();
        if self.queue.first().is_some() {
            self.queue.look_again(now + NAP);
        }
        moved
    }

    /// The poller's thread, until `done`. A sleep that ends until `patience` passes at once; one
    /// that is longer never ends by itself.
    fn run_poller(&self, patience: u64, done: impl Fn() -> bool) {
        let mut poller = Poller { stream: self, streams: Vec::new(), now: 0 };
        while !done() {
            let Some(until) = self.park.look(&mut poller) else { continue };
            if self.park.commit(until) && !done() {
                if until <= patience {
                    thread::yield_now();
                    poller.now = until;
                } else {
                    self.sleeper.park();
                }
            }
            self.park.resume();
        }
    }
}

/// `Poller`, with one stream.
struct Poller<'l> {
    stream: &'l StreamState,
    /// Whether it has the stream.
    streams: Vec<()>,
    now: u64,
}

impl Rounds for Poller<'_> {
    fn round(&mut self) -> bool {
        self.stream.mourn();
        let came = self.stream.inbox.take(&mut self.streams);
        assert!(self.streams.len() <= 1, "handed over twice");
        let due = !self.streams.is_empty() && self.stream.queue.next_look() <= self.now;
        let moved = due && self.stream.visit(self.now);
        moved || came
    }

    /// Gives a stream without work up at once, and sleeps as long as it may.
    fn sleep_until(&mut self) -> u64 {
        self.streams
            .retain(|()| self.stream.queue.is_waited_for() || !self.stream.queue.give_up(|| false));
        let until = if self.streams.is_empty() { u64::MAX } else { self.stream.queue.next_look() };
        until.max(self.now)
    }
}

// ---- timeline -----------------------------------------------------------------------------

#[test]
fn what_is_in_flight_is_never_negative() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        let booked = Arc::new(AtomicU64::new(0));
        let submitter = {
            let (timeline, booked) = (timeline.clone(), booked.clone());
            thread::spawn(move || {
                for ticket in 1..=2 {
                    booked.store(ticket, Ordering::Relaxed);
                    timeline.publish(ticket);
                    timeline.complete(ticket);
                }
            })
        };
        let seen = timeline.submitted();
        assert!(booked.load(Ordering::Relaxed) >= seen, "submitted, and not entered");
        assert!(timeline.in_flight() <= 2);
        submitter.join().unwrap();
        assert_eq!(timeline.in_flight(), 0);
    });
}

#[test]
fn completed_only_rises() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        // What the device wrote before each ticket's marker.
        let proof = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let raisers = [1, 2].map(|ticket: u64| {
            let (timeline, proof) = (timeline.clone(), proof.clone());
            thread::spawn(move || {
                proof[ticket as usize - 1].store(1, Ordering::Relaxed);
                timeline.complete(ticket)
            })
        });
        let first = timeline.completed();
        let second = timeline.completed();
        assert!(first <= second && second <= 2, "{first} then {second}");
        let proven = [0, 1].map(|i: usize| proof[i].load(Ordering::Relaxed) == 1);
        if second > 0 {
            assert!(proven[second as usize - 1], "{second} was seen without what it proves");
        }
        let [low, high] = raisers.map(|raiser| raiser.join().unwrap());
        assert_eq!(timeline.completed(), 2);
        assert!(high, "nobody else raised it so far");
        if low && second == 2 {
            assert!(proven[0], "2 came after 1 and was seen without what 1 proves");
        }
    });
}

#[test]
fn a_ticket_is_complete_or_given_up() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        let device = {
            let timeline = timeline.clone();
            thread::spawn(move || [1, 3].map(|ticket| timeline.complete(ticket)))
        };
        let given_up = timeline.give_up(2);
        assert_eq!(timeline.is_complete(2), !given_up, "it is the one or the other");
        let raised = device.join().unwrap();
        assert_eq!(timeline.is_complete(2), !given_up, "and stays that");
        assert!(raised[0]);
        // What is in front of it is complete all the same.
        assert_eq!(timeline.completed(), if given_up { 1 } else { 3 });
        assert!(!given_up || timeline.give_up(3) && !timeline.complete(4));
    });
}

#[test]
fn what_is_in_front_of_what_was_given_up_completes() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        let device = {
            let timeline = timeline.clone();
            thread::spawn(move || [1, 2, 4].map(|ticket| timeline.complete(ticket)))
        };
        let given_up = [4, 3].map(|ticket| timeline.give_up(ticket));
        let raised = device.join().unwrap();
        assert!(raised[0] && raised[1]);
        let in_front = match given_up {
            [true, true] => 2,
            [true, false] => 3,
            _ => 4,
        };
        assert_eq!(timeline.completed(), in_front, "{given_up:?}");
    });
}

#[test]
fn what_is_complete_is_visible() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        let written = Arc::new([0; 2].map(AtomicU64::new));
        let sweeps = [1_u64, 2].map(|ticket| {
            let (timeline, written) = (timeline.clone(), written.clone());
            thread::spawn(move || {
                written[ticket as usize - 1].store(1, Ordering::Relaxed);
                timeline.complete(ticket)
            })
        });
        let completed = timeline.completed();
        let written = written.each_ref().map(|word| word.load(Ordering::Relaxed));
        if completed > 0 {
            assert_eq!(written[completed as usize - 1], 1, "complete, and not visible");
        }
        sweeps.into_iter().for_each(|sweep| drop(sweep.join()));
    });
}

#[test]
fn an_older_op_cannot_release_the_tail() {
    explore(3, || {
        let timeline = Arc::new(Timeline::new());
        let book = Arc::new(AtomicU64::new(0));
        timeline.publish(1);
        let older = {
            let timeline = timeline.clone();
            thread::spawn(move || timeline.release(1))
        };
        let observer = {
            let (timeline, book) = (timeline.clone(), book.clone());
            thread::spawn(move || {
                if timeline.submitted() == 2 {
                    assert_eq!(book.load(Ordering::Relaxed), 2, "a ticket without its bookkeeping");
                }
            })
        };
        book.store(2, Ordering::Relaxed);
        timeline.publish(2);
        assert_eq!(timeline.held(), Some(2));
        older.join().unwrap();
        observer.join().unwrap();
        assert_eq!(timeline.held(), Some(2), "the tail's own `Op` still observes it");
        timeline.release(2);
        assert_eq!(timeline.held(), None);
    });
}

// ---- submission ---------------------------------------------------------------------------

/// The far side of a submission lock.
struct Queue {
    timeline: Timeline,
    /// The last driver call that placed a marker, as the device would know it.
    recorded: AtomicU64,
}

/// What the lock protects: how many marker calls the driver will refuse.
#[derive(Default)]
struct Submitter {
    refusals: u32,
}

impl Markable for Submitter {
    type Context = Queue;

    fn timeline(queue: &Queue) -> &Timeline {
        &queue.timeline
    }

    fn mark_tail(&mut self, queue: &Queue, tail: u64) -> bool {
        if self.refusals > 0 {
            self.refusals -= 1;
            return false;
        }
        queue.recorded.store(tail, Ordering::Relaxed);
        true
    }
}

struct Line {
    queue: Queue,
    submission: SubmissionLock<Submitter>,
}

impl Line {
    /// A stream with ticket 1 submitted and no marker.
    fn new(refusals: u32) -> Arc<Self> {
        let queue = Queue { timeline: Timeline::new(), recorded: AtomicU64::new(0) };
        queue.timeline.publish(1);
        let submission = SubmissionLock::new(Submitter { refusals });
        Arc::new(Line { queue, submission })
    }

    fn want(&self, ticket: u64) {
        self.submission.want(&self.queue, ticket);
    }
}

#[test]
fn a_wanted_marker_is_served_by_whoever_unlocks() {
    for tries in [false, true] {
        explore(3, move || {
            let line = Line::new(0);
            let submitter = {
                let line = line.clone();
                thread::spawn(move || {
                    if tries {
                        line.submission.try_with(&line.queue, |_| line.queue.timeline.publish(2));
                    } else {
                        line.submission.with(&line.queue, |_| line.queue.timeline.publish(2));
                    }
                })
            };
            line.want(1);
            submitter.join().unwrap();
            assert!(line.submission.is_marked(1), "nobody placed the marker");
        });
    }
}

/// A host function leaves its wish; it is served by who unlocks, or by the poller, which is told.
#[test]
fn a_wish_that_is_left_is_served() {
    explore(3, || {
        let line = Line::new(0);
        let host_function = {
            let line = line.clone();
            thread::spawn(move || line.submission.leave(1))
        };
        let submitter = {
            let line = line.clone();
            thread::spawn(move || {
                line.submission.with(&line.queue, |_| line.queue.timeline.publish(2));
            })
        };
        host_function.join().unwrap();
        line.submission.serve(&line.queue);
        submitter.join().unwrap();
        assert!(line.submission.is_marked(1), "nobody placed the marker");
    });
}

/// A host function asks the poller for a look: that one serves its wish.
#[test]
fn a_look_that_is_asked_for_serves_wishes() {
    explore(3, || {
        let line = Line::new(0);
        line.queue.timeline.publish(1);
        let waits = Arc::new(WaitQueue::<Bell>::new());
        let host_function = {
            let (line, waits) = (line.clone(), waits.clone());
            thread::spawn(move || {
                line.submission.leave(1);
                let _ = waits.look_by(0);
            })
        };
        if waits.next_look() == 0 {
            waits.begin_look();
            line.submission.serve(&line.queue);
            assert!(line.submission.is_marked(1), "asked for before the look");
        }
        host_function.join().unwrap();
    });
}

#[test]
fn a_wish_for_an_older_ticket_does_not_undo_a_newer_one() {
    explore(3, || {
        let line = Line::new(0);
        let older = {
            let line = line.clone();
            thread::spawn(move || line.want(1))
        };
        let newer = {
            let line = line.clone();
            thread::spawn(move || {
                let newer = line.queue.timeline.submitted();
                line.want(newer);
                newer
            })
        };
        line.submission.with(&line.queue, |locked| {
            locked.mark_tail(&line.queue);
            line.queue.timeline.publish(2);
        });
        older.join().unwrap();
        let newer = newer.join().unwrap();
        assert!(line.submission.is_marked(newer), "nobody placed the marker of {newer}");
    });
}

#[test]
fn a_marker_is_published_after_its_call() {
    for refusals in [0, 1] {
        explore(3, move || {
            let line = Line::new(refusals);
            // Loom looks at both orders of two accesses if the later one is the observer's: hence
            // the marker is the main thread's.
            let observer = {
                let line = line.clone();
                thread::spawn(move || {
                    for ticket in [2, 1] {
                        if line.submission.is_marked(ticket) {
                            let recorded = line.queue.recorded.load(Ordering::Relaxed);
                            assert!(recorded >= ticket, "published {ticket}, recorded {recorded}");
                        }
                    }
                })
            };
            let other = {
                let line = line.clone();
                thread::spawn(move || line.want(1))
            };
            line.want(1);
            line.submission.with(&line.queue, |_| line.queue.timeline.publish(2));
            line.want(2);
            observer.join().unwrap();
            other.join().unwrap();
            // A refusal uses up the wishes that it met; who asks again is served.
            line.want(2);
            assert!(line.submission.is_marked(2) && !line.submission.is_marked(3));
            assert_eq!(line.queue.recorded.load(Ordering::Relaxed), 2);
        });
    }
}

/// An allocation asks for what is behind a free, where nothing may be yet.
#[test]
fn a_ticket_that_is_not_there_yet_is_served_by_who_submits_it() {
    explore(3, || {
        let line = Line::new(0);
        let other = {
            let line = line.clone();
            thread::spawn(move || line.want(2))
        };
        // Somebody whose call the driver refused, and somebody who submits.
        line.submission.with(&line.queue, |_| ());
        line.submission.with(&line.queue, |_| line.queue.timeline.publish(2));
        other.join().unwrap();
        assert!(line.submission.is_marked(2), "nobody placed the marker");
        assert_eq!(line.queue.recorded.load(Ordering::Relaxed), 2);
    });
}

/// A device that refuses every marker holds nobody up.
#[test]
fn a_refused_marker_is_not_asked_for_for_ever() {
    explore(3, || {
        let line = Line::new(u32::MAX);
        let other = {
            let line = line.clone();
            thread::spawn(move || line.want(1))
        };
        line.submission.with(&line.queue, |_| line.queue.timeline.publish(2));
        line.want(2);
        other.join().unwrap();
        assert!(!line.submission.is_marked(1));
    });
}

/// An operation on one stream needs a marker on the other: it is placed before the own lock is
/// taken, so nobody holds two.
#[test]
fn two_submitters_never_wait_for_each_other() {
    explore(3, || {
        let lines = [Line::new(0), Line::new(0)];
        let submit = |own: usize, other: usize| {
            let (own, other) = (lines[own].clone(), lines[other].clone());
            move || {
                own.submission.with(&own.queue, |_| ()); // what is waited for already?
                other.submission.with(&other.queue, |locked| {
                    let tail = other.queue.timeline.submitted();
                    if !locked.is_marked(tail) {
                        locked.mark_tail(&other.queue);
                    }
                });
                own.submission.with(&own.queue, |locked| {
                    assert!(other.submission.is_marked(1), "there is an event to wait for");
                    own.queue.timeline.publish(own.queue.timeline.submitted() + 1);
                    locked.mark_tail(&own.queue);
                });
            }
        };
        let other = thread::spawn(submit(1, 0));
        submit(0, 1)();
        other.join().unwrap();
        for line in &lines {
            assert_eq!(line.queue.timeline.submitted(), 2);
            assert!(line.submission.is_marked(2));
        }
    });
}

// ---- sweep --------------------------------------------------------------------------------

#[test]
fn a_missed_sweep_is_made_up_for() {
    explore(3, || {
        let gate = Arc::new(SweepGate::new());
        // What each caller knows of the device, and which of it a whole sweep found. The gate alone
        // makes the one visible to the other.
        let known = Arc::new([0; 3].map(|_| AtomicBool::new(false)));
        let found = Arc::new([0; 3].map(Record::new));
        let caller = |index: usize| {
            let (gate, known, found) = (gate.clone(), known.clone(), found.clone());
            move || {
                known[index].store(true, Ordering::Relaxed);
                let swept = gate.run(|| {
                    for (known, found) in known.iter().zip(found.iter()) {
                        found.fetch_max(u64::from(known.load(Ordering::Relaxed)), Seen);
                    }
                });
                assert!(!swept || found[index].load(Seen) == 1, "swept, but not for itself");
            }
        };
        let others = [thread::spawn(caller(1)), thread::spawn(caller(2))];
        caller(0)();
        others.into_iter().for_each(|other| other.join().unwrap());
        let missed = found.iter().position(|found| found.load(Seen) == 0);
        assert_eq!(missed, None, "no sweep began after that call");
    });
}

/// Others put work on a stream on loan; whoever takes the debt over publishes a ticket behind it.
#[test]
fn what_a_loan_left_is_covered() {
    explore(3, || {
        let sharing = Arc::new(Sharing::new(false));
        // What is on the stream, and up to where tickets cover it. The sharing alone makes the one visible.
        let work = Arc::new([0; 2].map(|_| AtomicBool::new(false)));
        let covered = Arc::new([0; 2].map(Record::new));
        let borrower = |index: usize| {
            let (sharing, work, covered) = (sharing.clone(), work.clone(), covered.clone());
            move || {
                work[index].store(true, Ordering::Relaxed);
                sharing.end();
                // Who asks for everything on the stream finds it covered, or goes to the submission lock for it.
                if !sharing.is_owed() {
                    assert_eq!(
                        covered[index].load(Ordering::Relaxed),
                        1,
                        "seen as covered too early"
                    );
                }
            }
        };
        let submitter = || {
            if sharing.take_owed() {
                for (work, covered) in work.iter().zip(covered.iter()) {
                    covered.fetch_max(u64::from(work.load(Ordering::Relaxed)), Seen);
                }
                sharing.settle();
            }
        };
        sharing.begin();
        sharing.begin();
        let others = [thread::spawn(borrower(0)), thread::spawn(borrower(1))];
        submitter();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(!sharing.is_shared());
        submitter();
        assert!(!sharing.is_owed());
        assert!(covered.iter().all(|covered| covered.load(Seen) == 1), "a loan left work behind");
    });
}

// ---- registration -------------------------------------------------------------------------

/// The device is through and nobody has looked: the poller must, before it sleeps beyond what the
/// future is content with. Loom reports a deadlock if it does not.
#[test]
fn a_registration_is_never_slept_over() {
    // Without and with the stream at the poller, where somebody else waits for longer; due at once,
    // before, at and behind the end of the poller's first sleep.
    for (kept, due) in [false, true]
        .into_iter()
        .flat_map(|kept| [0, NAP - 1, NAP, NAP + 1, 2 * NAP].map(|due| (kept, due)))
    {
        explore(3, move || {
            let stream = StreamState::new(0);
            if kept {
                let other = &mut Wait::due(NAP);
                assert!(stream.poll_ticket(2, other, &Bell::default()).is_pending());
            }
            let bell = Bell::default();
            let resolved = Arc::new(Record::new(0));
            let task = {
                let (stream, bell, resolved) = (stream.clone(), bell.clone(), resolved.clone());
                thread::spawn(move || {
                    stream.device.store(1, Ordering::Release);
                    if stream.poll_ticket(1, &mut Wait::due(due), &bell).is_ready() {
                        resolved.store(1, Seen);
                        stream.sleeper.unpark();
                    }
                })
            };
            stream.run_poller(due, || bell.rang() || resolved.load(Seen) == 1);
            task.join().unwrap();
            assert!(bell.rang() || resolved.load(Seen) == 1);
        });
    }
}

/// The stream was with the poller, which is about to give it up.
/// `Clock` with a poller, and the poller of a device that is idle or lost.
struct Clock {
    deadlines: Deadlines<Bell>,
    now: AtomicU64,
    park: ParkState,
    sleeper: Sleeper,
}

impl Rounds for &Clock {
    fn round(&mut self) -> bool {
        self.deadlines.take_due(self.now.load(Ordering::Relaxed)).into_iter().for_each(Bell::wake);
        false
    }

    fn sleep_until(&mut self) -> u64 {
        self.deadlines.first().max(self.now.load(Ordering::Relaxed))
    }
}

impl Clock {
    /// A poll of `Deadline`: whether it is ready.
    fn poll(&self, due: u64, key: &mut Option<u64>, bell: &Bell) -> bool {
        if self.now.load(Ordering::Relaxed) >= due {
            return true;
        }
        let Ok(entered) = self.deadlines.enter(due, key, bell.clone()) else { return true };
        drop(entered.stale);
        if self.park.notify_before(due) {
            self.sleeper.unpark();
        }
        false
    }
}

/// Two tasks with deadlines of their own, one of whom goes, beside a poller that sleeps until the next one, and for ever where there is
/// none. Loom reports a deadlock if a deadline is slept over, or is entered beside the end of the clock and not told.
#[test]
fn a_deadline_is_never_slept_over() {
    for (due, ends) in [(1, false), (2, false), (3, false), (2, true)] {
        explore(3, move || {
            let clock = Arc::new(Clock {
                deadlines: Deadlines::new(),
                now: AtomicU64::new(0),
                park: ParkState::new(),
                sleeper: Sleeper::default(),
            });
            let (bell, ready) = (Bell::default(), Arc::new(Record::new(0)));
            let other = Bell::default();
            let mut gone = None;
            assert!(!clock.poll(2, &mut gone, &other));
            let task = {
                let (clock, bell, ready) = (clock.clone(), bell.clone(), ready.clone());
                thread::spawn(move || {
                    clock.deadlines.remove(2, gone.unwrap()).into_iter().for_each(drop);
                    if clock.poll(due, &mut None, &bell) {
                        ready.store(1, Seen);
                        clock.sleeper.unpark();
                    }
                })
            };
            while !bell.rang() && ready.load(Seen) == 0 {
                let mut rounds = &*clock;
                let Some(until) = clock.park.look(&mut rounds) else { continue };
                if ends {
                    clock.deadlines.end().into_iter().for_each(Bell::wake);
                    break;
                }
                if clock.park.commit(until) && !bell.rang() && ready.load(Seen) == 0 {
                    if until <= due {
                        thread::yield_now();
                        clock.now.store(until, Ordering::Relaxed);
                    } else {
                        clock.sleeper.park();
                    }
                }
                clock.park.resume();
            }
            task.join().unwrap();
            assert!(bell.rang() || ready.load(Seen) == 1);
        });
    }
}

#[test]
fn a_stream_given_up_beside_a_registration_comes_back() {
    explore(2, || {
        let stream = StreamState::new(1);
        stream.call(stream.queue.look_by(0));
        let bells = [Bell::default(), Bell::default()];
        let tasks = [1, 2].map(|ticket: u64| {
            let (stream, bell) = (stream.clone(), bells[ticket as usize - 1].clone());
            thread::spawn(move || {
                if ticket == 2 {
                    // The device goes on; a doorbell rings.
                    stream.device.store(2, Ordering::Release);
                    stream.call_before(0);
                }
                if stream.poll_ticket(ticket, &mut Wait::due(0), &bell).is_ready() {
                    bell.wake();
                    stream.sleeper.unpark();
                }
            })
        });
        stream.run_poller(0, || bells.iter().all(Bell::rang));
        tasks.into_iter().for_each(|task| task.join().unwrap());
    });
}

/// Something else than a waiter keeps the stream with the poller: what was lent, say.
#[test]
fn a_stream_given_up_beside_other_work_comes_back() {
    explore(3, || {
        let queue = Arc::new(WaitQueue::<Bell>::new());
        let lent = Arc::new(AtomicU64::new(0));
        assert!(queue.hand_over());
        let submitter = {
            let (queue, lent) = (queue.clone(), lent.clone());
            thread::spawn(move || {
                lent.store(1, Ordering::Relaxed);
                queue.hand_over()
            })
        };
        let given_up = queue.give_up(|| lent.load(Ordering::Relaxed) > 0);
        assert!(!given_up || submitter.join().unwrap(), "nobody has it");
    });
}

/// A future that checks looks for itself, and for who is registered; in the end the poller does.
#[test]
fn a_check_that_ends_registers() {
    explore(3, || {
        let stream = StreamState::new(0);
        let bells = [Bell::default(), Bell::default()];
        // What it waits for will be seen by the other's checks, or by the poller soon after.
        let other = &mut Wait::due(NAP);
        assert!(stream.poll_ticket(1, other, &bells[0]).is_pending());
        let task = {
            let (stream, bell) = (stream.clone(), bells[1].clone());
            thread::spawn(move || {
                let mut wait = Wait { checks: 1, due: NAP, ..Wait::default() };
                let mut ready = stream.poll_ticket(1, &mut wait, &bell).is_ready();
                if !ready {
                    ready = stream.poll_ticket(1, &mut wait, &bell).is_ready();
                }
                if ready {
                    assert!(wait.key.is_none(), "resolved, and still registered");
                    bell.wake();
                    stream.sleeper.unpark();
                }
            })
        };
        stream.device.store(1, Ordering::Release);
        stream.run_poller(NAP, || bells.iter().all(Bell::rang));
        task.join().unwrap();
        assert!(!stream.queue.is_waited_for(), "a waiter was left");
    });
}

#[test]
fn a_completion_beside_a_registration_wakes_it() {
    explore(3, || {
        let stream = StreamState::new(0);
        let bell = Bell::default();
        let task = {
            let (stream, bell) = (stream.clone(), bell.clone());
            thread::spawn(move || stream.poll_ticket(1, &mut Wait::due(0), &bell))
        };
        let other_task = {
            let stream = stream.clone();
            thread::spawn(move || stream.sweep())
        };
        stream.device.store(1, Ordering::Release);
        stream.sweep();
        let polled = task.join().unwrap();
        other_task.join().unwrap();
        assert!(polled.is_ready() || bell.rang(), "complete, and nobody told the task");
        assert_ne!(polled, Poll::Ready(Err(Lost)));
    });
}

#[test]
fn a_loss_is_seen_by_who_registers_beside_it() {
    explore(3, || {
        let stream = StreamState::new(1);
        let bells = [Bell::default(), Bell::default()];
        let task = {
            let (stream, bells) = (stream.clone(), bells.clone());
            thread::spawn(move || {
                // Complete, if somebody sweeps before the loss is known, and never complete.
                [1, 2].map(|ticket: u64| {
                    stream.poll_ticket(ticket, &mut Wait::due(0), &bells[ticket as usize - 1])
                })
            })
        };
        let loser = {
            let stream = stream.clone();
            thread::spawn(move || stream.lose())
        };
        // Whoever sweeps next resolves what waits, here somebody who sweeps another stream: at
        // once, or when the loser called.
        stream.mourn();
        loser.join().unwrap();
        stream.mourn();
        let polled = task.join().unwrap();
        for (polled, bell) in polled.into_iter().zip(bells) {
            assert!(polled.is_ready() || bell.rang(), "lost, and nobody told");
        }
    });
}

/// Nobody waits for a ticket, so the poller has no stream and sleeps without a time-out.
#[test]
fn a_loss_is_never_slept_over() {
    explore(3, || {
        let stream = StreamState::new(0);
        let bell = Bell::default();
        let resolved = Arc::new(Record::new(0));
        let watcher = {
            let (stream, bell, resolved) = (stream.clone(), bell.clone(), resolved.clone());
            thread::spawn(move || {
                if stream.poll_lost(&bell) {
                    resolved.store(1, Seen);
                    stream.sleeper.unpark();
                }
            })
        };
        let loser = {
            let stream = stream.clone();
            thread::spawn(move || stream.lose())
        };
        stream.run_poller(0, || bell.rang() || resolved.load(Seen) == 1);
        watcher.join().unwrap();
        loser.join().unwrap();
    });
}

/// The poller wakes a task for a window, beside whoever sees it complete.
#[test]
fn who_is_woken_ahead_of_time_is_woken_again() {
    explore(3, || {
        let stream = StreamState::new(0);
        let bell = Bell::default();
        assert!(stream.poll_ticket(1, &mut Wait::due(0), &bell).is_pending());
        let poller = {
            let (stream, bell) = (stream.clone(), bell.clone());
            thread::spawn(move || stream.queue.wake_first(|_| _ = bell.0.fetch_add(1, Seen)))
        };
        stream.device.store(1, Ordering::Release);
        stream.sweep();
        let ahead = poller.join().unwrap();
        let rang = bell.0.load(Seen);
        assert!(rang > u64::from(ahead), "only ahead of time");
    });
}

#[test]
fn each_poll_replaces_the_waker() {
    explore(3, || {
        let stream = StreamState::new(1);
        let (old, new) = (Bell::default(), Bell::default());
        let task = {
            let (stream, old, new) = (stream.clone(), old.clone(), new.clone());
            thread::spawn(move || {
                let mut wait = Wait::due(0);
                let first = stream.poll_ticket(1, &mut wait, &old);
                first.is_ready() || stream.poll_ticket(1, &mut wait, &new).is_ready()
            })
        };
        stream.sweep();
        let ready = task.join().unwrap();
        assert!(ready || new.rang(), "the waker of the last poll was not woken");
        assert!(!stream.queue.is_waited_for(), "a waiter was left");
    });
}

// ---- events and words ---------------------------------------------------------------------

/// What stands on a stream.
#[derive(Clone, Copy)]
enum Command {
    Event { ticket: u64, event: usize },
    Word(u64),
}

const EVENTS: usize = 3;

/// A device of one stream, and the books of its events.
#[derive(Default)]
struct Device {
    queue: std::sync::Mutex<VecDeque<Command>>,
    /// Records of each event that are still on the stream.
    pending: [Record; EVENTS],
    /// Handles of each event that somebody else than its marker has.
    shared: [Record; EVENTS],
    created: Record,
}

impl Device {
    fn record(&self, event: &EventHandle<u64>, ticket: u64) {
        let index = event.raw() as usize;
        assert_eq!(self.pending[index].load(Seen), 0, "recorded while it is pending");
        assert_eq!(self.shared[index].load(Seen), 0, "recorded while somebody waits for it");
        self.pending[index].fetch_add(1, Seen);
        self.queue.lock().unwrap().push_back(Command::Event { ticket, event: index });
    }

    /// Runs one command. `completed` and `word` are what the host can see of it.
    fn step(&self, reached: &AtomicU64, word: Option<&AtomicU64>) {
        let command = self.queue.lock().unwrap().pop_front();
        match command {
            Some(Command::Event { ticket, event }) => {
                self.pending[event].fetch_sub(1, Seen);
                reached.store(ticket, Ordering::Release);
            }
            Some(Command::Word(value)) => {
                if let Some(word) = word {
                    word.store(value, Ordering::Release);
                }
            }
            None => {}
        }
    }
}

struct Marker {
    ticket: u64,
    event: EventHandle<u64>,
}

/// The markers of a stream and the pool of its events.
struct Marked {
    timeline: Timeline,
    device: Device,
    reached: AtomicU64,
    markers: Plain<VecDeque<Marker>>,
    gate: SweepGate,
    pool: Arc<EventPool<u64>>,
}

impl Marked {
    /// Submits an operation with a marker behind it.
    fn submit(&self) {
        let ticket = self.timeline.submitted() + 1;
        self.timeline.publish(ticket);
        let event = self.pool.get(|_| {
            let index = self.device.created.fetch_add(1, Seen);
            Ok::<_, ()>(index)
        });
        let event = event.unwrap();
        self.device.record(&event, ticket);
        self.markers.lock().push_back(Marker { ticket, event });
    }

    fn ask(&self) {
        loop {
            let next = self.markers.lock().front().map(|marker| marker.ticket);
            let Some(ticket) = next else { return };
            if !self.timeline.is_complete(ticket) {
                if self.reached.load(Ordering::Acquire) < ticket {
                    return;
                }
                self.timeline.complete(ticket);
            }
            let mut done = Vec::new();
            let mut markers = self.markers.lock();
            while markers.front().is_some_and(|marker| marker.ticket <= ticket) {
                done.extend(markers.pop_front());
            }
            drop(markers);
        }
    }

    /// Orders another stream behind `ticket`.
    fn wait_for(&self, ticket: u64) {
        let event = {
            let markers = self.markers.lock();
            let index = markers.partition_point(|marker| marker.ticket < ticket);
            markers.get(index).map(|marker| {
                self.device.shared[marker.event.raw() as usize].fetch_add(1, Seen);
                marker.event.clone()
            })
        };
        if let Some(event) = event {
            thread::yield_now(); // the driver call
            self.device.shared[event.raw() as usize].fetch_sub(1, Seen);
        }
    }
}

#[test]
fn an_event_is_recycled_only_when_complete() {
    explore(3, || {
        let stream = Arc::new(Marked {
            timeline: Timeline::new(),
            device: Device::default(),
            reached: AtomicU64::new(0),
            markers: Plain::default(),
            gate: SweepGate::new(),
            pool: Arc::default(),
        });
        stream.submit();
        let device = {
            let stream = stream.clone();
            thread::spawn(move || {
                stream.device.step(&stream.reached, None);
                stream.gate.run(|| stream.ask());
            })
        };
        let waiter = {
            let stream = stream.clone();
            thread::spawn(move || stream.wait_for(1))
        };
        stream.submit();
        stream.gate.run(|| stream.ask());
        stream.submit();
        device.join().unwrap();
        waiter.join().unwrap();
        while stream.timeline.completed() < 3 {
            stream.device.step(&stream.reached, None);
            stream.gate.run(|| stream.ask());
        }
        let made = stream.device.created.load(Seen);
        assert_eq!(
            stream.pool.close(Arc::new(|_| ())).len() as u64,
            made,
            "every event came back, once"
        );
    });
}

/// A line of `Words`, and the stream that has it.
struct Worded {
    timeline: Timeline,
    device: Device,
    reached: AtomicU64,
    /// The line; the next stream to take it finds in it what was written last.
    word: AtomicU64,
    /// The last value that the stream was told to write.
    told: AtomicU64,
}

/// The state behind the lock of a stream with a word.
struct WordMarks;

impl Markable for WordMarks {
    type Context = Worded;

    fn timeline(stream: &Worded) -> &Timeline {
        &stream.timeline
    }

    fn mark_tail(&mut self, stream: &Worded, tail: u64) -> bool {
        stream.told.store(tail, Ordering::Relaxed);
        stream.device.queue.lock().unwrap().push_back(Command::Word(tail));
        true
    }
}

/// A future asks for a word while a submitter places an event: whichever comes last on the stream,
/// the line is free only when nothing will be written any more.
#[test]
fn a_word_line_is_reused_only_when_its_last_value_was_seen() {
    explore(3, || {
        let stream = Arc::new(Worded {
            timeline: Timeline::new(),
            device: Device::default(),
            reached: AtomicU64::new(0),
            word: AtomicU64::new(0),
            told: AtomicU64::new(0),
        });
        let submission = Arc::new(SubmissionLock::new(WordMarks));
        stream.timeline.publish(1);
        let task = {
            let (stream, submission) = (stream.clone(), submission.clone());
            thread::spawn(move || submission.want(&stream, 1))
        };
        let device = {
            let stream = stream.clone();
            thread::spawn(move || stream.device.step(&stream.reached, Some(&stream.word)))
        };
        // Another stream is ordered behind this one: `Turn::place_event`.
        submission.with(&stream, |locked| {
            let tail = stream.timeline.submitted();
            if !stream.timeline.is_complete(tail) {
                let event = Command::Event { ticket: tail, event: 0 };
                stream.device.pending[0].fetch_add(1, Seen);
                stream.device.queue.lock().unwrap().push_back(event);
                locked.publish_mark(tail);
            }
        });
        task.join().unwrap();
        // `StreamState::ask`, then `StreamState::drop`: nobody else has the stream any more, the device still may.
        stream.timeline.complete(stream.word.load(Ordering::Acquire));
        stream.timeline.complete(stream.reached.load(Ordering::Acquire));
        let seen = stream.word.load(Ordering::Acquire);
        let given_back = seen >= stream.told.load(Ordering::Relaxed);
        if given_back {
            // `Words::get`, for a stream that has submitted nothing.
            stream.word.store(0, Ordering::Relaxed);
        }
        device.join().unwrap();
        stream.device.step(&stream.reached, Some(&stream.word));
        stream.device.step(&stream.reached, Some(&stream.word));
        if given_back {
            assert_eq!(
                stream.word.load(Ordering::Acquire),
                0,
                "a late write reached the next stream"
            );
        }
    });
}

/// Work without a name, whose memory is a number.
type Outcome = LinkedOutcome<(), u8, &'static str>;

fn fail(outcome: &Arc<Outcome>) -> Vec<u8> {
    let mut poisoned = Vec::new();
    outcome.fail("own", || false, |()| "inherited", |_, _, written| poisoned.extend(written));
    poisoned
}

/// Two readers of one reader are asked while the work fails.
#[test]
fn what_a_told_reader_descends_from_does_not_fail() {
    explore(3, || {
        let (first, second) = (Outcome::new(()), Outcome::new(()));
        assert_eq!(second.descends_from(&first), None);
        let library = {
            let first = first.clone();
            thread::spawn(move || fail(&first))
        };
        let other = {
            let second = second.clone();
            thread::spawn(move || second.tell().is_ok())
        };
        let is_told = second.tell().is_ok();
        let other_is_told = other.join().unwrap();
        library.join().unwrap();
        assert!(
            !(is_told || other_is_told) || first.failure().is_none(),
            "it failed after a reader was told that it had not"
        );
        assert_eq!(first.failure().is_some(), second.failure().is_some());
    });
}

/// Nobody but the work keeps the outcome in the middle.
#[test]
fn a_failure_is_seen_through_what_it_has_reached() {
    explore(3, || {
        let (first, last) = (Outcome::new(()), Outcome::new(()));
        let middle = Outcome::new(());
        assert_eq!(middle.descends_from(&first), None);
        assert_eq!(last.descends_from(&middle), None);
        drop(middle);
        let library = {
            let first = first.clone();
            thread::spawn(move || fail(&first))
        };
        let is_told = last.tell().is_ok();
        library.join().unwrap();
        assert_eq!(is_told, first.failure().is_none());
    });
}

#[test]
fn a_failure_reaches_a_reader_that_is_linked_beside_it() {
    explore(3, || {
        let (work, reader) = (Outcome::new(()), Outcome::new(()));
        let library = {
            let work = work.clone();
            thread::spawn(move || fail(&work))
        };
        if let Some(failure) = reader.descends_from(&work) {
            drop(reader.inherit(&failure));
        }
        // It poisons what it wrote itself, or the failure does.
        let poisoned = reader.wrote(7, |_| true).map(|_| 7);
        let spread = library.join().unwrap();
        assert!(reader.failure().is_some());
        assert_eq!(poisoned.is_some(), spread.is_empty());
    });
}

#[test]
fn a_fork_finds_no_thread_in_its_turn() {
    explore(3, || {
        let turn = Arc::new(Turn::new(0));
        // What a lock protects, and how often it was changed.
        let state = Arc::new(AtomicU64::new(0));
        let (begun, ended) = (Arc::new(Record::new(0)), Arc::new(Record::new(0)));
        let works = {
            let (turn, state) = (turn.clone(), state.clone());
            let (begun, ended) = (begun.clone(), ended.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    if turn.try_begin() {
                        begun.fetch_add(1, Seen);
                        state.fetch_add(1, Ordering::Relaxed);
                        ended.fetch_add(1, Seen);
                        turn.end();
                    }
                }
            })
        };
        turn.hold();
        if turn.is_at_rest() {
            let turns = ended.load(Seen);
            assert_eq!(begun.load(Seen), turns, "it is in its turn");
            assert_eq!(state.load(Ordering::Relaxed), turns, "what it did is seen");
            thread::yield_now();
            assert_eq!(begun.load(Seen), turns, "it has begun another turn");
        }
        turn.let_go();
        works.join().unwrap();
        assert!(turn.try_begin(), "it goes on");
    });
}
