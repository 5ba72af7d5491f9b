//! [`GraphBudget`]: how many compiled graphs a device may have at once, and which is evicted for another.
//!
//! A graph is idle if its last launch is at least a [`PERIOD`] ago. A request at the limit evicts the least recently launched idle graph;
//! the scan is skipped until some graph can be idle. If none is idle the request is refused, unless the graph cannot run without being
//! compiled. So graphs in use stay, however many take turns, and in each period at most as many graphs are compiled in vain as the limit
//! allows.
#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gpu_await_protocol::sync::Mutex;

/// The default limit.
const LIMIT: usize = 1024;

/// The minimum time since an evicted graph's last launch.
const PERIOD: Duration = Duration::from_secs(1);

/// The minimum time between two scans: a thousand graphs take tens of microseconds.
const APART: Duration = Duration::from_millis(10);

/// A compiled graph, where its owner keeps it.
pub(crate) trait Evictable: Send + Sync {
    /// When it was launched last; a time of the engine's clock, in nanoseconds.
    fn used_ns(&self) -> u64;
    /// Whether it still has the place that was taken for it.
    fn has_place(&self) -> bool;
    /// Gives it up, and its place, unless it is in use. Returns it, for the caller to drop under no lock.
    fn give_up(&self) -> Option<Evicted>;
}

/// A graph that was given up.
pub(crate) type Evicted = Box<dyn Any + Send>;

/// The graphs that were looked at: the last owner of one may be here.
type Seen = Vec<Arc<dyn Evictable>>;

pub(crate) struct GraphBudget {
    limit: usize,
    /// Grows under the lock of `known` alone.
    graphs: AtomicUsize,
    evicted: AtomicU64,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    all: Vec<Weak<dyn Evictable>>,
    /// The graphs that the last scan found idle, the longest idle last.
    idle: Vec<Weak<dyn Evictable>>,
    /// No other graph can be idle before this time.
    look_ns: u64,
}

impl GraphBudget {
    pub(crate) fn new(limit: Option<usize>) -> Self {
        let limit = limit.unwrap_or(LIMIT).max(1);
        let (graphs, evicted) = (AtomicUsize::new(0), AtomicU64::new(0));
        GraphBudget { limit, graphs, evicted, known: Mutex::default() }
    }

    /// How many there are.
    pub(crate) fn graphs(&self) -> usize {
        // ORDERING: Relaxed, here and below: the lock orders the decisions, and the rest is a statistic.
        self.graphs.load(Ordering::Relaxed)
    }

    /// How many went for others.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Takes a permit for a graph, which its owner keeps until it [leaves](Self::leave); false if there is none. A graph that
    /// cannot run without one gets it in any case.
    pub(crate) fn enter(&self, graph: Weak<dyn Evictable>, now_ns: u64, in_any_case: bool) -> bool {
        // In front of the lock, and so dropped behind it.
        let (mut seen, mut evicted) = (Seen::new(), None);
        let mut known = self.known.lock();
        if self.graphs() >= self.limit {
            known.look(now_ns, &mut seen);
            while evicted.is_none()
                && let Some(idle) = known.idle.pop()
            {
                let Some(idle) = idle.upgrade() else { continue };
                if is_idle(&*idle, now_ns) {
                    evicted = idle.give_up();
                }
                seen.push(idle);
            }
            if evicted.is_none() && in_any_case {
                let all = known.all.iter().filter_map(Weak::upgrade);
                let mut all: Vec<_> = all.map(|graph| (graph.used_ns(), graph)).collect();
                all.sort_by_key(|(used_ns, _)| *used_ns);
                evicted = all.iter().find_map(|(_, graph)| graph.give_up());
                seen.extend(all.into_iter().map(|(_, graph)| graph));
            }
            if evicted.is_some() {
                self.evicted.fetch_add(1, Ordering::Relaxed);
            } else if !in_any_case {
                return false;
            }
        }
        if known.all.len() >= 2 * self.limit {
            known.all.retain(|graph| {
                let Some(graph) = graph.upgrade() else { return false };
                let has_place = graph.has_place();
                seen.push(graph);
                has_place
            });
        }
        known.all.push(graph);
        self.graphs.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Gives a place back.
    pub(crate) fn leave(&self) {
        self.graphs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Known {
    /// Finds out which are idle, if any may be that was not.
    fn look(&mut self, now_ns: u64, seen: &mut Seen) {
        if now_ns < self.look_ns {
            return;
        }
        let Known { all, idle: found, look_ns } = self;
        let mut idle: Vec<(u64, Weak<dyn Evictable>)> = Vec::new();
        let mut oldest_ns = now_ns;
        all.retain(|graph| {
            let Some(known) = graph.upgrade() else { return false };
            let (used_ns, has_place) = (known.used_ns(), known.has_place());
            if has_place && is_idle(&*known, now_ns) {
                idle.push((used_ns, graph.clone()));
            } else if has_place {
                oldest_ns = oldest_ns.min(used_ns);
            }
            seen.push(known);
            has_place
        });
        idle.sort_by_key(|(used_ns, _)| std::cmp::Reverse(*used_ns));
        *found = idle.into_iter().map(|(_, graph)| graph).collect();
        *look_ns = (oldest_ns + PERIOD.as_nanos() as u64).max(now_ns + APART.as_nanos() as u64);
    }
}

fn is_idle(graph: &dyn Evictable, now_ns: u64) -> bool {
    now_ns.saturating_sub(graph.used_ns()) >= PERIOD.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    struct Owned {
        used_ns: AtomicU64,
        is_held: AtomicBool,
        has_place: AtomicBool,
    }

    impl Evictable for Owned {
        fn used_ns(&self) -> u64 {
            self.used_ns.load(Ordering::Relaxed)
        }

        fn has_place(&self) -> bool {
            has_place(self)
        }

        fn give_up(&self) -> Option<Evicted> {
            let is_held = self.is_held.load(Ordering::Relaxed);
            let gave_up = !is_held && self.has_place.swap(false, Ordering::Relaxed);
            gave_up.then(|| Box::new(()) as Evicted)
        }
    }

    fn enter(budget: &GraphBudget, now_ns: u64, in_any_case: bool) -> Option<Arc<Owned>> {
        let graph = Arc::new(Owned {
            used_ns: AtomicU64::new(now_ns),
            is_held: AtomicBool::new(false),
            has_place: AtomicBool::new(true),
        });
        let weak: Weak<dyn Evictable> = Arc::<Owned>::downgrade(&graph);
        let evicted = budget.evicted();
        let entered = budget.enter(weak, now_ns, in_any_case).then_some(graph);
        // Standing in for the evicted graphs, which would leave.
        (evicted..budget.evicted()).for_each(|_| budget.leave());
        entered
    }

    fn use_all(graphs: &[Arc<Owned>], now_ns: u64) {
        graphs.iter().for_each(|graph| graph.used_ns.store(now_ns, Ordering::Relaxed));
    }

    fn has_place(graph: &Owned) -> bool {
        graph.has_place.load(Ordering::Relaxed)
    }

    #[test]
    fn what_is_in_use_stays_and_what_is_idle_goes() {
        let budget = GraphBudget::new(Some(3));
        let kept: Vec<_> = (0..3).filter_map(|_| enter(&budget, 0, false)).collect();
        assert_eq!(kept.len(), 3);
        // A hundred take turns with them in each period.
        for turn in 0..1000 {
            if turn % 100 == 0 {
                use_all(&kept, turn * SECOND / 100);
            }
            assert!(enter(&budget, turn * SECOND / 100, false).is_none());
        }
        // One of them is not launched any more: it is evicted after a period.
        use_all(&kept, 10 * SECOND);
        let gone = (1000..).find(|turn| {
            use_all(&kept[1..], turn * SECOND / 100);
            enter(&budget, turn * SECOND / 100, false).is_some()
        });
        assert!(gone.is_some_and(|turn| (1100..=1101).contains(&turn)), "{gone:?}");
        assert!(!has_place(&kept[0]) && has_place(&kept[1]) && has_place(&kept[2]));
        assert_eq!((budget.graphs(), budget.evicted()), (3, 1));
    }

    /// The order of requests does not matter.
    #[test]
    fn the_time_counts_from_the_last_launch() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> =
            [0, SECOND / 2].iter().filter_map(|now| enter(&budget, *now, false)).collect();
        let third = enter(&budget, SECOND, false).expect("the first was not launched for a second");
        assert!(!has_place(&kept[0]) && has_place(&kept[1]));
        assert!(enter(&budget, SECOND * 5 / 4, false).is_none());
        assert!(enter(&budget, SECOND * 3 / 2, false).is_some());
        assert!(!has_place(&kept[1]) && has_place(&third));
    }

    /// Seen to be idle, and launched since.
    #[test]
    fn what_is_used_again_stays() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> = (0..2).filter_map(|_| enter(&budget, 0, false)).collect();
        assert!(enter(&budget, 0, false).is_none());
        kept[0].is_held.store(true, Ordering::Relaxed);
        kept[1].is_held.store(true, Ordering::Relaxed);
        assert!(enter(&budget, SECOND, false).is_none(), "they cannot go");
        kept[0].is_held.store(false, Ordering::Relaxed);
        assert!(enter(&budget, SECOND + 1, false).is_none(), "they were asked just now");
        use_all(&kept[..1], SECOND + 2);
        assert!(enter(&budget, 2 * SECOND, false).is_none());
        assert!(enter(&budget, 2 * SECOND + SECOND / 10, false).is_some());
        assert!(!has_place(&kept[0]) && has_place(&kept[1]));
    }

    #[test]
    fn what_cannot_do_without_gets_a_place() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> = (0..2).filter_map(|_| enter(&budget, 0, false)).collect();
        kept[0].is_held.store(true, Ordering::Relaxed);
        let third = enter(&budget, 0, true).expect("in any case");
        assert!(!has_place(&kept[1]) && has_place(&kept[0]));
        third.is_held.store(true, Ordering::Relaxed);
        let fourth = enter(&budget, 0, true).expect("though none can go");
        assert_eq!(budget.graphs(), 3);
        drop((kept, third, fourth));
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let budget = GraphBudget::new(Some(4));
        for _ in 0..1000 {
            drop(enter(&budget, 0, false).expect("there is always a place"));
            budget.leave();
        }
        // Evicted graphs leave too, while their owners keep them.
        let owned: Vec<_> = (0..1000).filter_map(|_| enter(&budget, 0, true)).collect();
        assert_eq!((owned.len(), budget.graphs()), (1000, 4));
        owned.iter().filter(|graph| has_place(graph)).for_each(|_| budget.leave());
        assert!(budget.known.lock().all.len() <= 8);
        assert_eq!(budget.graphs(), 0);
    }
}
