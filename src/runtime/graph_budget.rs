//! [`GraphBudget`]: how many compiled graphs a device may have at once, and which is evicted for another.
//!
//! A graph is idle if its last launch is at least a [`PERIOD`] ago. A request at the limit evicts the least recently launched idle graph;
//! the scan is skipped until some graph can be idle. If none is idle, what happens depends on the [`PlaceClaim`]:
//!
//! | the list | evicts | if there is none |
//! |---|---|---|
//! | was launched less than [`OFTEN`] times without a graph | an idle graph | refused |
//! | was launched that often | a graph that was not launched in that time | refused, and the count restarts |
//! | cannot run without a graph | the least recently launched one that is not being launched | exceeds the limit |
//!
//! So graphs in use stay, however many lists compete for their places, and frequently launched lists displace rarely launched ones.
//!
//! More than 500 lines: half of it tests.
#![forbid(unsafe_code)]

use std::any::Any;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gpu_await_protocol::sync::Mutex;

use crate::error::DriverCode;

/// The default limit.
const LIMIT: usize = 1024;

/// The minimum time since an evicted graph's last launch.
const PERIOD: Duration = Duration::from_secs(1);

/// The minimum time between two scans: a thousand graphs take tens of microseconds.
const APART: Duration = Duration::from_millis(10);

/// How many times a list is launched without a graph before it claims the place of one not launched in that time; also the most launches
/// before the driver is asked again after a refusal. Of a thousand lists launched equally often at random moments, hardly one goes
/// unlaunched for that long.
const OFTEN: u32 = 16;

/// Which graph may lose its place to another at the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlaceClaim {
    /// An idle graph's.
    Idle,
    /// Or one that was not launched since that time.
    UnusedSince(u64),
    /// Any graph's; if none can go, the limit is exceeded.
    Any,
}

/// The launches of a list that has no graph, since it first asked for one.
#[derive(Default)]
pub(crate) struct Unserved {
    launches: u32,
    since_ns: u64,
    /// Consecutive refusals by the driver.
    refusals: u32,
}

impl Unserved {
    /// Counts another launch. Returns what it may claim, or `None` if it is too soon to ask the driver again.
    pub(crate) fn claim(&mut self, now_ns: u64) -> Option<PlaceClaim> {
        if self.launches == 0 {
            self.since_ns = now_ns;
        }
        self.launches += 1;
        if self.refusals > 0 {
            let apart = 1 << (self.refusals - 1).min(OFTEN.ilog2());
            return (self.launches >= apart).then_some(PlaceClaim::Idle);
        }
        if self.launches <= OFTEN {
            return Some(PlaceClaim::Idle);
        }
        self.launches = 1;
        Some(PlaceClaim::UnusedSince(std::mem::replace(&mut self.since_ns, now_ns)))
    }

    /// Records that there was no place for it.
    pub(crate) fn was_crowded_out(&mut self) {
        self.refusals = 0;
    }

    /// Records that the driver refused it.
    pub(crate) fn was_refused(&mut self) {
        self.launches = 0;
        self.refusals += 1;
    }
}

/// The outcomes of the lists of a [`Region`](crate::Region) (runs of launches between operations that a graph
/// cannot contain), or of the launches of a [`Graph`](crate::Graph). An empty list is neither launched nor counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Launched as the graph that was compiled for their shape.
    pub replayed: u64,
    /// Nodes of replayed graphs whose arguments were updated.
    pub nodes_set: u64,
    /// Compiled, and launched for the first time; in a region, because its shape came twice.
    pub compiled: u64,
    /// Launched operation by operation: the shape was new, or there was no
    /// [room](crate::DeviceBuilder::graph_limit) for its graph, or the driver refused.
    pub plain: u64,
    /// Those of them for which there was no room.
    pub no_place: u64,
    /// Interrupted and launched one by one: something else used the stream, or waited for their work.
    pub interrupted: u64,
    /// Compilations and updates that the driver refused; the work was launched operation by operation
    /// instead, where possible.
    pub refused: u64,
    /// Not launched, or only in part: the driver refused, the device is lost or closed, or a launch of a graph was refused
    /// (a missing input, an error of its closure). Not included in other counts except `compiled`. Operations that were
    /// refused inside a region's closure are not counted.
    pub failed: u64,
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Report) {
        self.replayed += other.replayed;
        self.nodes_set += other.nodes_set;
        self.compiled += other.compiled;
        self.plain += other.plain;
        self.no_place += other.no_place;
        self.interrupted += other.interrupted;
        self.refused += other.refused;
        self.failed += other.failed;
    }
}

/// A compiled graph, where its owner keeps it.
pub(crate) trait Evictable: Send + Sync {
    /// When it was launched last; a time of the engine's clock, in nanoseconds.
    fn used_ns(&self) -> u64;
    /// Whether it still has the place that was taken for it.
    fn has_place(&self) -> bool;
    /// Gives up the graph and its place, unless it is in use. The caller drops it, holding no lock.
    fn give_up(&self) -> Option<Evicted>;
}

/// A graph that was given up.
pub(crate) type Evicted = Box<dyn Any + Send>;

/// The graphs that a scan visited; this may hold the last reference to one.
type Seen = Vec<Arc<dyn Evictable>>;

pub(crate) struct GraphBudget {
    limit: usize,
    /// Grows under the lock of `known` alone.
    graphs: AtomicUsize,
    evicted: AtomicU64,
    known: Mutex<Known>,
    /// The outcomes of all lists.
    report: Mutex<Report>,
    refusal: Mutex<Option<DriverCode>>,
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
        GraphBudget {
            limit,
            graphs,
            evicted,
            known: Mutex::default(),
            report: Mutex::default(),
            refusal: Mutex::default(),
        }
    }

    /// How many compiled graphs there are.
    pub(crate) fn graphs(&self) -> usize {
        // ORDERING: Relaxed, here and below: the lock orders the decisions, and the rest is a statistic.
        self.graphs.load(Ordering::Relaxed)
    }

    /// How many were evicted.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// Takes a permit for a graph, kept by its owner until it [leaves](Self::leave); false if there is none.
    pub(crate) fn enter(&self, graph: Weak<dyn Evictable>, now_ns: u64, claim: PlaceClaim) -> bool {
        // Declared before the lock, so dropped after it.
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
            let unused_since_ns = match claim {
                PlaceClaim::Idle => None,
                PlaceClaim::UnusedSince(since_ns) => Some(since_ns),
                PlaceClaim::Any => Some(u64::MAX),
            };
            if let Some(since_ns) = unused_since_ns.filter(|_| evicted.is_none()) {
                let all = known.all.iter().filter_map(Weak::upgrade);
                let mut all: Vec<_> = all.map(|graph| (graph.used_ns(), graph)).collect();
                all.sort_by_key(|(used_ns, _)| *used_ns);
                let mut unused = all.iter().take_while(|(used_ns, _)| *used_ns < since_ns);
                evicted = unused.find_map(|(_, graph)| graph.give_up());
                seen.extend(all.into_iter().map(|(_, graph)| graph));
            }
            if evicted.is_some() {
                self.evicted.fetch_add(1, Ordering::Relaxed);
            } else if claim != PlaceClaim::Any {
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

    /// Evicts all idle graphs, to free their memory.
    pub(crate) fn evict_idle(&self, now_ns: u64) {
        // Dropped after the lock.
        let (mut seen, mut known) = (Seen::new(), self.known.lock());
        known.look_ns = 0;
        known.look(now_ns, &mut seen);
        let idle: Vec<_> = known.idle.drain(..).filter_map(|graph| graph.upgrade()).collect();
        drop(known);
        let evicted = idle.iter().filter_map(|graph| graph.give_up()).count() as u64;
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
    }

    /// The outcomes of the lists so far.
    pub(crate) fn report(&self) -> Report {
        *self.report.lock()
    }

    /// Counts the outcomes of lists; if the driver refused any of them, returns its last refusal that was not yet reported.
    pub(crate) fn count(&self, lists: &Report) -> Option<DriverCode> {
        let mut report = self.report.lock();
        *report += *lists;
        drop(report);
        if lists.refused > 0 { self.refusal.lock().take() } else { None }
    }

    /// Records that the driver refused to compile a graph or to set its nodes. The loss of a device is reported elsewhere.
    pub(crate) fn refused(&self, code: DriverCode) {
        *self.refusal.lock() = Some(code).filter(|code| !code.is_sticky());
    }
}

impl Known {
    /// Finds the idle graphs, unless no other can be idle yet.
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

    fn enter(budget: &GraphBudget, now_ns: u64, claim: PlaceClaim) -> Option<Arc<Owned>> {
        let graph = Arc::new(Owned {
            used_ns: AtomicU64::new(now_ns),
            is_held: AtomicBool::new(false),
            has_place: AtomicBool::new(true),
        });
        let weak: Weak<dyn Evictable> = Arc::<Owned>::downgrade(&graph);
        let evicted = budget.evicted();
        let entered = budget.enter(weak, now_ns, claim).then_some(graph);
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
        let kept: Vec<_> = (0..3).filter_map(|_| enter(&budget, 0, PlaceClaim::Idle)).collect();
        assert_eq!(kept.len(), 3);
        // A hundred take turns with them in each period.
        for turn in 0..1000 {
            if turn % 100 == 0 {
                use_all(&kept, turn * SECOND / 100);
            }
            assert!(enter(&budget, turn * SECOND / 100, PlaceClaim::Idle).is_none());
        }
        // One of them is not launched any more: it is evicted after a period.
        use_all(&kept, 10 * SECOND);
        let gone = (1000..).find(|turn| {
            use_all(&kept[1..], turn * SECOND / 100);
            enter(&budget, turn * SECOND / 100, PlaceClaim::Idle).is_some()
        });
        assert!(gone.is_some_and(|turn| (1100..=1101).contains(&turn)), "{gone:?}");
        assert!(!has_place(&kept[0]) && has_place(&kept[1]) && has_place(&kept[2]));
        assert_eq!((budget.graphs(), budget.evicted()), (3, 1));
    }

    /// The order of requests does not matter.
    #[test]
    fn the_time_counts_from_the_last_launch() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> = [0, SECOND / 2]
            .iter()
            .filter_map(|now| enter(&budget, *now, PlaceClaim::Idle))
            .collect();
        let third = enter(&budget, SECOND, PlaceClaim::Idle)
            .expect("the first was not launched for a second");
        assert!(!has_place(&kept[0]) && has_place(&kept[1]));
        assert!(enter(&budget, SECOND * 5 / 4, PlaceClaim::Idle).is_none());
        assert!(enter(&budget, SECOND * 3 / 2, PlaceClaim::Idle).is_some());
        assert!(!has_place(&kept[1]) && has_place(&third));
    }

    /// Seen to be idle, and launched since.
    #[test]
    fn what_is_used_again_stays() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> = (0..2).filter_map(|_| enter(&budget, 0, PlaceClaim::Idle)).collect();
        assert!(enter(&budget, 0, PlaceClaim::Idle).is_none());
        kept[0].is_held.store(true, Ordering::Relaxed);
        kept[1].is_held.store(true, Ordering::Relaxed);
        assert!(enter(&budget, SECOND, PlaceClaim::Idle).is_none(), "they cannot go");
        kept[0].is_held.store(false, Ordering::Relaxed);
        assert!(enter(&budget, SECOND + 1, PlaceClaim::Idle).is_none(), "they were asked just now");
        use_all(&kept[..1], SECOND + 2);
        assert!(enter(&budget, 2 * SECOND, PlaceClaim::Idle).is_none());
        assert!(enter(&budget, 2 * SECOND + SECOND / 10, PlaceClaim::Idle).is_some());
        assert!(!has_place(&kept[0]) && has_place(&kept[1]));
    }

    /// Lists that are launched on one device, and how many graphs were compiled for them.
    struct Launcher {
        budget: GraphBudget,
        graphs: Vec<(Option<Arc<Owned>>, Unserved)>,
        compiled: usize,
    }

    impl Launcher {
        fn new(count: usize, limit: usize) -> Self {
            let graphs = (0..count).map(|_| (None, Unserved::default())).collect();
            Launcher { budget: GraphBudget::new(Some(limit)), graphs, compiled: 0 }
        }

        /// Launches it, and returns whether it had a graph or got one.
        fn launch(&mut self, list: usize, now_ns: u64) -> bool {
            let (graph, unserved) = &mut self.graphs[list];
            if let Some(graph) = graph.as_ref().filter(|graph| has_place(graph)) {
                graph.used_ns.store(now_ns, Ordering::Relaxed);
                return true;
            }
            let Some(claim) = unserved.claim(now_ns) else { return false };
            *graph = enter(&self.budget, now_ns, claim);
            if graph.is_some() {
                *unserved = Unserved::default();
                self.compiled += 1;
            }
            graph.is_some()
        }
    }

    #[test]
    fn what_is_launched_often_takes_the_place_of_what_is_not() {
        let mut lists = Launcher::new(5, 4);
        let mut missed = 0;
        // Each of the first four once in 400 ms, the last one each millisecond.
        for ms in 0..10_000 {
            let now_ns = ms * SECOND / 1000;
            if ms % 100 == 0 {
                lists.launch((ms / 100 % 4) as usize, now_ns);
            }
            missed += u64::from(ms > 400 && !lists.launch(4, now_ns));
        }
        assert_eq!(missed, u64::from(OFTEN), "then it has a graph");
        // The first that is not launched for long loses its place, and finds none that is launched less.
        assert_eq!(lists.compiled, 5);
    }

    #[test]
    fn lists_that_are_launched_equally_often_leave_one_another_their_graphs() {
        // In turn.
        let mut lists = Launcher::new(33, 32);
        (0..33_000).for_each(|turn| _ = lists.launch(turn as usize % 33, turn * SECOND / 10_000));
        assert_eq!(lists.compiled, 32);
        // At random.
        let mut lists = Launcher::new(120, 100);
        let mut seed = 1u64;
        for turn in 0..240_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            lists.launch((seed >> 33) as usize % 120, turn * SECOND / 1_000_000);
        }
        // Hardly any: of 40,000 launches that find no place.
        assert!(lists.compiled < 110, "{}", lists.compiled);
    }

    #[test]
    fn a_driver_that_refused_is_asked_again_at_once_and_then_less_and_less() {
        let mut unserved = Unserved::default();
        let asked = |launch: &u64| {
            let asks = unserved.claim(*launch).is_some();
            if asks {
                unserved.was_refused();
            }
            asks
        };
        let asked: Vec<u64> = (1..=64).filter(asked).collect();
        assert_eq!(asked, [1, 2, 4, 8, 16, 32, 48, 64]);
        // Another has the place meanwhile.
        let mut first = (65..).filter(|launch| unserved.claim(*launch).is_some());
        assert_eq!(first.next(), Some(80));
        unserved.was_crowded_out();
        assert_eq!(unserved.claim(81), Some(PlaceClaim::UnusedSince(65)));
        assert_eq!(unserved.claim(82), Some(PlaceClaim::Idle));
    }

    #[test]
    fn idle_graphs_go_for_their_memory() {
        let budget = GraphBudget::new(Some(8));
        let kept: Vec<_> = (0..3).filter_map(|_| enter(&budget, 0, PlaceClaim::Idle)).collect();
        kept[0].used_ns.store(SECOND, Ordering::Relaxed);
        budget.evict_idle(SECOND);
        assert_eq!(budget.evicted(), 2);
        budget.evict_idle(SECOND);
        assert_eq!(budget.evicted(), 2);
        assert!(has_place(&kept[0]) && !has_place(&kept[1]) && !has_place(&kept[2]));
    }

    #[test]
    fn what_cannot_do_without_gets_a_place() {
        let budget = GraphBudget::new(Some(2));
        let kept: Vec<_> = (0..2).filter_map(|_| enter(&budget, 0, PlaceClaim::Idle)).collect();
        kept[0].is_held.store(true, Ordering::Relaxed);
        let third = enter(&budget, 0, PlaceClaim::Any).expect("in any case");
        assert!(!has_place(&kept[1]) && has_place(&kept[0]));
        third.is_held.store(true, Ordering::Relaxed);
        let fourth = enter(&budget, 0, PlaceClaim::Any).expect("though none can go");
        assert_eq!(budget.graphs(), 3);
        drop((kept, third, fourth));
    }

    #[test]
    fn what_is_gone_is_forgotten() {
        let budget = GraphBudget::new(Some(4));
        for _ in 0..1000 {
            drop(enter(&budget, 0, PlaceClaim::Idle).expect("there is always a place"));
            budget.leave();
        }
        // Evicted graphs leave too, while their owners keep them.
        let owned: Vec<_> = (0..1000).filter_map(|_| enter(&budget, 0, PlaceClaim::Any)).collect();
        assert_eq!((owned.len(), budget.graphs()), (1000, 4));
        owned.iter().filter(|graph| has_place(graph)).for_each(|_| budget.leave());
        assert!(budget.known.lock().all.len() <= 8);
        assert_eq!(budget.graphs(), 0);
    }
}
