//! Which tasks of a device check for themselves, and which one stays awake (pure).
//!
//! A permit expires: a future that was leaked in the middle of a check loses its permit by the clock.
//!
//! A permit's holder yields between its polls. On an idle core that takes a microsecond; on a busy one it lasts until the neighbours have had their
//! slices of milliseconds, while a sleeping thread gets its core as soon as it is woken. So both yields and the poller's sleeps are timed.
//!
//! | the cores are | there are permits | until |
//! |---|---|---|
//! | our own | yes | a yield or a sleep ends more than [`SLICE_NS`] late |
//! | busy with others | none, no task is woken to check, and the poller sleeps as [`owed`](super::owed) says | [`BUSY_NS`] later; twice as long as the last time if that ended less than its own length ago, up to [`BUSY_MOST_NS`] |
//!
//! # Invariants
//! 1. At most [`CHECKERS`] permits to check are held, and one to stay awake (`permits_are_few_and_come_back`,
//!    `one_stays_awake_while_the_poller_wakes_often`).
//! 2. A yield that costs a slice is the last for a while, and the last for longer if the next one does as well
//!    (`a_costly_yield_is_the_last_for_a_while`, `busy_cores_are_tried_less_and_less`).
//! 3. A late holder cannot give back a permit that has gone to another task (`a_late_checker_returns_nothing`).
#![forbid(unsafe_code)]

use super::cadence::{BUSY_MOST_NS, BUSY_NS, CHECK_AGAIN_NS, CHECKERS, OFTEN_NS, SLICE_NS};
use crate::sync::{AtomicU64, Ordering};

/// The permits of one device.
#[derive(Debug)]
pub struct Checkers {
    /// The time until which each is held (0 if it is free).
    permits: [AtomicU64; CHECKERS],
    /// The same for the permit to stay awake.
    awake: AtomicU64,
    /// The time between two wake-ups by the poller: an average over about eight.
    gap_ns: AtomicU64,
    /// When it did so last.
    woke_at: AtomicU64,
    /// Until when the cores count as busy with others, and how long that lasts.
    busy_until: AtomicU64,
    busy_for: AtomicU64,
}

/// A permit that is held.
#[derive(Clone, Copy, Debug)]
pub struct CheckPermit {
    /// Its index; the permit to stay awake comes after those to check.
    index: u8,
    until: u64,
}

impl Checkers {
    /// All permits are free.
    #[inline]
    pub fn new() -> Self {
        Checkers {
            permits: std::array::from_fn(|_| AtomicU64::new(0)),
            awake: AtomicU64::new(0),
            gap_ns: AtomicU64::new(10 * OFTEN_NS),
            woke_at: AtomicU64::new(0),
            busy_until: AtomicU64::new(0),
            busy_for: AtomicU64::new(BUSY_NS),
        }
    }

    /// Whether permit holders may yield: the cores are not busy with others.
    #[inline]
    pub fn may_yield(&self, now: u64) -> bool {
        // ORDERING: Relaxed, here and below: a time, for a guess.
        self.busy_until.load(Ordering::Relaxed) <= now
    }

    /// Records that a yield that ended now took this long, or that a sleep ended this late.
    #[inline]
    pub fn was_away(&self, ns: u64, now: u64) {
        if ns > SLICE_NS {
            self.others_are_busy(now);
        }
    }

    #[cold]
    fn others_are_busy(&self, now: u64) {
        // ORDERING: Relaxed, as above.
        let (ended, known) = (&self.busy_until, self.busy_for.load(Ordering::Relaxed));
        // Read once: another thread may store a later time between two reads, and the difference would wrap.
        let Some(since) = now.checked_sub(ended.load(Ordering::Relaxed)) else { return };
        // The first time there is no earlier end, which counts as long ago.
        let is_soon = since < known && since < now;
        let busy_for = if is_soon { (2 * known).min(BUSY_MOST_NS) } else { BUSY_NS };
        self.busy_for.store(busy_for, Ordering::Relaxed);
        ended.store(now + busy_for, Ordering::Relaxed);
    }

    /// Takes a permit to check until `until`, if one is free and yields are cheap.
    #[inline]
    pub fn enter(&self, now: u64, until: u64) -> Option<CheckPermit> {
        if !self.may_yield(now) {
            return None;
        }
        for (index, slot) in (0..).zip(&self.permits) {
            // ORDERING: Relaxed throughout: a permit protects nothing.
            let held = slot.load(Ordering::Relaxed);
            if held <= now && exchange(slot, held, until) {
                return Some(CheckPermit { index, until });
            }
        }
        None
    }

    /// How many tasks check.
    #[inline]
    pub fn held(&self, now: u64) -> usize {
        // ORDERING: Relaxed, as above.
        self.permits.iter().filter(|permit| permit.load(Ordering::Relaxed) > now).count()
    }

    /// Whether no task checks or stays awake.
    #[inline]
    pub fn all_sleep(&self, now: u64) -> bool {
        // ORDERING: Relaxed, as above.
        self.awake.load(Ordering::Relaxed) <= now && self.held(now) == 0
    }

    /// Gives a permit back.
    #[inline]
    pub fn leave(&self, permit: CheckPermit) {
        // Fails if the time was over and another task took the permit.
        let slot = self.permits.get(usize::from(permit.index)).unwrap_or(&self.awake);
        exchange(slot, permit.until, 0);
    }

    /// The poller woke a task whose work is complete. Only the poller calls this.
    #[inline]
    pub fn woke(&self, now: u64) {
        // ORDERING: Relaxed, as above.
        let before = self.woke_at.load(Ordering::Relaxed);
        self.woke_at.store(now, Ordering::Relaxed);
        let (known, gap) = (self.gap_ns.load(Ordering::Relaxed), now.saturating_sub(before));
        let gap = known - known / 8 + gap.min(10 * OFTEN_NS) / 8;
        self.gap_ns.store(gap, Ordering::Relaxed);
    }

    /// Whether the poller wakes tasks often.
    #[inline]
    fn is_busy(&self, now: u64) -> bool {
        // ORDERING: Relaxed, as above.
        self.gap_ns.load(Ordering::Relaxed) < OFTEN_NS
            && now.saturating_sub(self.woke_at.load(Ordering::Relaxed)) < 4 * OFTEN_NS
    }

    /// Takes the permit to stay awake, if the poller wakes tasks often, all sleep, and yields are cheap.
    #[inline]
    pub fn stay_awake(&self, now: u64) -> Option<CheckPermit> {
        if !self.may_yield(now) || !self.is_busy(now) || !self.all_sleep(now) {
            return None;
        }
        // ORDERING: Relaxed, as above.
        let held = self.awake.load(Ordering::Relaxed);
        let permit = CheckPermit { index: u8::MAX, until: now + 2 * CHECK_AGAIN_NS };
        exchange(&self.awake, held, permit.until).then_some(permit)
    }

    /// Keeps it for longer, if that is still so and no other has it by now.
    #[inline]
    pub fn keep_awake(&self, permit: CheckPermit, now: u64) -> Option<CheckPermit> {
        let may_yield = self.may_yield(now);
        // Renewed now and then.
        if may_yield && now + CHECK_AGAIN_NS < permit.until {
            return Some(permit);
        }
        let until = if may_yield && self.is_busy(now) { now + 2 * CHECK_AGAIN_NS } else { 0 };
        let kept = exchange(&self.awake, permit.until, until) && until > 0;
        kept.then_some(CheckPermit { until, ..permit })
    }
}

#[inline]
fn exchange(slot: &AtomicU64, held: u64, until: u64) -> bool {
    // ORDERING: Relaxed, as above.
    slot.compare_exchange(held, until, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

impl CheckPermit {
    /// When it expires.
    #[inline]
    pub fn until(self) -> u64 {
        self.until
    }
}
