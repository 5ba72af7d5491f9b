//! A queue whose receivers sleep without a yield: `crossbeam`'s own yield up to four times before they sleep, and a yield on a busy core
//! lasts as long as a neighbour's slice.
//!
//! # Invariants
//! 1. A sender that finds no sleepers has sent before any receiver's last look: it counts the sleepers under the lock under which they
//!    look (`what_is_sent_wakes_a_receiver`).
//! 2. Receivers end when the last sender is gone and nothing is left (`receivers_end_with_the_senders`).
#![forbid(unsafe_code)]

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::TryRecvError;

use super::turn;
use crate::thread::process::Process;

/// Looks before a receiver sleeps: some µs, for a caller that sends again and again.
const LOOKS: u32 = 100;

/// A new queue.
pub(crate) fn inbox<T>() -> (Sender<T>, Receiver<T>) {
    let (items, taken) = crossbeam_channel::unbounded();
    let sleepers = Arc::new(Sleepers::default());
    let ring = Ring { sleepers: sleepers.clone(), process: Process::remembered() };
    (Sender { items, ring }, Receiver { items: taken, sleepers })
}

/// Receivers that sleep.
#[derive(Default)]
struct Sleepers {
    /// How many.
    count: Mutex<usize>,
    wakes: Condvar,
}

impl Sleepers {
    /// The standard library's lock does not yield; nothing panics under it.
    fn count(&self) -> MutexGuard<'_, usize> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes all receivers when it is dropped, after its sender.
struct Ring {
    sleepers: Arc<Sleepers>,
    /// The receivers' process. One of them may hold the lock when the process forks: it rests with it.
    process: Process,
}

impl Ring {
    /// Whether a receiver of this process sleeps.
    fn is_awaited(&self) -> bool {
        self.process.is_here() && *self.sleepers.count() > 0
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.is_awaited() {
            self.sleepers.wakes.notify_all();
        }
    }
}

/// The sending end.
pub(crate) struct Sender<T> {
    // Dropped first.
    items: crossbeam_channel::Sender<T>,
    ring: Ring,
}

impl<T> Sender<T> {
    /// Whether the receivers are in this process, not in an ancestor.
    pub(crate) fn is_here(&self) -> bool {
        self.ring.process.is_here()
    }

    /// Sends an item, or returns it if all receivers are gone.
    pub(crate) fn send(&self, item: T) -> Result<(), T> {
        self.items.send(item).map_err(|unsent| unsent.0)?;
        if self.ring.is_awaited() {
            self.ring.sleepers.wakes.notify_one();
        }
        Ok(())
    }
}

/// A receiving end. Several share the items.
pub(crate) struct Receiver<T> {
    items: crossbeam_channel::Receiver<T>,
    sleepers: Arc<Sleepers>,
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Receiver { items: self.items.clone(), sleepers: self.sleepers.clone() }
    }
}

/// Why a receiver came back without an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nothing {
    /// Time ran out.
    Yet,
    /// The senders are gone.
    More,
}

impl<T> Receiver<T> {
    /// Takes an item that is there.
    pub(crate) fn try_recv(&self) -> Option<T> {
        self.items.try_recv().ok()
    }

    /// Blocks until there is an item, at most until `until`.
    pub(crate) fn recv_until(&self, until: Option<Instant>) -> Result<T, Nothing> {
        turn::pause();
        for _ in 0..LOOKS {
            match self.items.try_recv() {
                Ok(item) => return Ok(item),
                Err(TryRecvError::Disconnected) => return Err(Nothing::More),
                Err(TryRecvError::Empty) => std::hint::spin_loop(),
            }
        }
        let mut count = self.sleepers.count();
        *count += 1;
        let received = loop {
            match self.items.try_recv() {
                Ok(item) => break Ok(item),
                Err(TryRecvError::Disconnected) => break Err(Nothing::More),
                Err(TryRecvError::Empty) => {}
            }
            let wakes = &self.sleepers.wakes;
            count = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => turn::rest(|| wakes.wait(count)).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => break Err(Nothing::Yet),
                Some(left) => {
                    let slept = turn::rest(|| wakes.wait_timeout(count, left));
                    slept.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        *count -= 1;
        received
    }

    /// The items as they come, until the senders are gone.
    pub(crate) fn iter(&self) -> impl Iterator<Item = T> {
        std::iter::from_fn(|| self.recv_until(None).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_sent_wakes_a_receiver() {
        let (sender, receiver) = inbox();
        let (back, answers) = inbox();
        let other = receiver.clone();
        std::thread::scope(|scope| {
            for receiver in [receiver, other] {
                let back = &back;
                scope.spawn(move || receiver.iter().for_each(|n: u32| back.send(n).unwrap()));
            }
            for n in 0..2000 {
                sender.send(n).unwrap();
                if n % 7 == 0 {
                    assert_eq!(answers.recv_until(None), Ok(n));
                    continue;
                }
                // Both may have one.
                assert!(answers.recv_until(None).is_ok());
            }
            drop(sender);
        });
        assert_eq!(answers.try_recv(), None);
    }

    #[test]
    fn receivers_end_with_the_senders() {
        let (sender, receiver) = inbox();
        sender.send(1).unwrap();
        let received = std::thread::scope(|scope| {
            let thread = scope.spawn(move || receiver.iter().collect::<Vec<i32>>());
            sender.send(2).unwrap();
            drop(sender);
            thread.join().unwrap()
        });
        assert_eq!(received, [1, 2]);
        let (sender, receiver) = inbox();
        drop(receiver);
        assert_eq!(sender.send(3), Err(3));
    }

    #[test]
    fn a_time_ends_a_wait() {
        let (sender, receiver) = inbox::<()>();
        let start = Instant::now();
        let until = start + Duration::from_millis(20);
        assert_eq!(receiver.recv_until(Some(until)), Err(Nothing::Yet));
        assert!(start.elapsed() >= Duration::from_millis(20));
        drop(sender);
        assert_eq!(receiver.recv_until(Some(until)), Err(Nothing::More));
    }
}
