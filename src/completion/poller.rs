//! The poller: one thread a device, which asks so that nobody else has to.
//!
//! It owns the list of streams somebody waits for (or that owe memory), looks at each when its work
//! may be complete, and sleeps in between: see [`policy`](super::policy) for the phases. Its work
//! grows with busy streams, not with futures. A stream without a handle it keeps until its work is
//! complete. It holds its engine only while it looks, so a device
//! that nobody uses goes away, and the thread with it; it never joins itself. After the loss of its
//! device nobody needs it, and it ends.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::Thread;
use std::time::Duration;

use super::engine::Engine;
use super::lane::Lane;
use super::park::{Inbox, ParkState, Rounds};
use super::policy;
use crate::at_exit::UnderWay;
use crate::contain;
use crate::error::{DriverCode, Result};
use crate::thread_role::{self, Role};
use crate::{coop, system};

/// How a poller is told that there is something to look at.
pub(crate) struct Attention {
    park: ParkState,
    thread: OnceLock<Thread>,
    inbox: Inbox<Arc<Lane>>,
    stop: AtomicBool,
    /// Set when the device's last handle is gone: nobody will wait for its streams.
    hurries: AtomicBool,
    /// How often the poller decided when to look next.
    looks: AtomicU64,
    /// Whether it then kept streams that nobody waits for.
    lingers: AtomicBool,
}

impl Attention {
    pub(crate) fn new() -> Self {
        Attention {
            park: ParkState::new(),
            thread: OnceLock::new(),
            inbox: Inbox::new(),
            stop: AtomicBool::new(false),
            hurries: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            lingers: AtomicBool::new(false),
        }
    }

    /// Hands a lane to the poller, unless that has ended.
    pub(crate) fn add(&self, lane: Arc<Lane>) {
        match self.inbox.put(lane) {
            Ok(()) => self.call(),
            Err(lane) => let_go([lane]),
        }
    }

    /// Sees to it that the poller looks once more before it sleeps.
    pub(crate) fn call(&self) {
        self.call_before(0);
    }

    /// Sees to it that the poller looks before it sleeps beyond `due`.
    pub(crate) fn call_before(&self, due: u64) {
        if self.park.notify_before(due)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Lets go of streams as soon as nobody waits for them.
    pub(crate) fn hurry(&self) {
        // ORDERING: Relaxed: the call below orders it before the poller's next look.
        self.hurries.store(true, Ordering::Relaxed);
        self.call();
    }

    fn lingers_ns(&self) -> u64 {
        // ORDERING: Relaxed, as above.
        if self.hurries.load(Ordering::Relaxed) { HURRY_NS } else { policy::LINGER_NS }
    }

    fn looked(&self, lingers: bool) {
        self.lingers.store(lingers, Ordering::SeqCst);
        self.looks.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the poller decided more than `looks` times, and keeps no stream for a while only.
    fn has_let_go(&self, looks: u64) -> bool {
        let looked = self.looks.load(Ordering::SeqCst) > looks;
        self.inbox.is_closed() || (looked && !self.lingers.load(Ordering::SeqCst))
    }

    /// Ends the poller's thread.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.call();
    }

    fn must_stop(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || crate::at_exit::begun()
    }

    /// Nobody looks after streams any more: lets go of those that were handed over, and of those that
    /// will be.
    pub(crate) fn end(&self) {
        let_go(self.inbox.close());
    }

    /// Takes the lanes that were handed over.
    #[cfg(feature = "test-util")]
    pub(crate) fn take_incoming(&self) -> Vec<Arc<Lane>> {
        let mut lanes = Vec::new();
        self.inbox.take(&mut lanes);
        lanes
    }
}

/// Lets go of streams that nobody looks after any more. At the end of the process they stay: others may
/// still depend on what is pending there.
fn let_go(lanes: impl IntoIterator<Item = Arc<Lane>>) {
    let exits = crate::at_exit::begun();
    lanes.into_iter().for_each(|lane| if exits { std::mem::forget(lane) } else { drop(lane) });
}

/// Starts the poller of an engine.
pub(crate) fn spawn(engine: &Arc<Engine>) -> Result<()> {
    let attention = engine.attention.clone();
    let weak = Arc::downgrade(engine);
    exit::watch(&attention);
    let name = format!("gpu-await-{}", engine.label());
    let thread = contain::spawn(&name, move || run(&weak, &attention))
        .map_err(|_| DriverCode { call: "thread spawn", code: 304 })?;
    engine.attention.thread.get_or_init(|| thread);
    Ok(())
}

/// What the poller does next.
enum NextRound {
    /// Something moved, or is due in a moment.
    Again,
    /// Sleep until called, or until then.
    Park(u64),
    /// The device is lost, and everybody was told.
    End,
}

/// How long streams are kept that nobody waits for, once the device's last handle is gone.
const HURRY_NS: u64 = 50_000;

/// A sleep shorter than this is not worth its 3 µs.
const SPIN_NS: u64 = 3_000;

struct Poller {
    active: Vec<Arc<Lane>>,
    last_progress: u64,
    last_press: u64,
    last_probe: u64,
}

fn run(engine: &Weak<Engine>, attention: &Arc<Attention>) {
    let _role = thread_role::enter(Role::Poller);
    system::minimize_timer_slack();
    coop::prepare();
    let mut poller = Poller { active: Vec::new(), last_progress: 0, last_press: 0, last_probe: 0 };
    let mut spins = 0_u32;
    while !attention.must_stop() {
        // A subscriber of `tracing` may panic anywhere; wakers and destructors are contained where they
        // are called.
        let looked = contain::contain("what a poller called", || {
            let engine = engine.upgrade()?;
            Some((poller.look(&engine, attention), engine.now()))
        });
        let (next, now) = match looked {
            Some(Some(looked)) => looked,
            Some(None) => break,
            None => {
                attention.park.resume();
                (NextRound::Again, 0)
            }
        };
        match next {
            NextRound::Again => {
                spins += 1;
                if spins.is_multiple_of(16) {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
            NextRound::Park(until) => {
                // Once more: `stop` calls nobody who has not announced that it will sleep.
                if !attention.must_stop() && attention.park.commit(until) {
                    if until == u64::MAX {
                        std::thread::park();
                    } else {
                        let left = until.saturating_sub(now);
                        std::thread::park_timeout(Duration::from_nanos(left));
                    }
                }
                attention.park.resume();
            }
            NextRound::End => break,
        }
    }
    // Lanes keep their engine, and that keeps these.
    attention.end();
    let_go(poller.active);
}

/// One of its turns.
struct Round<'a> {
    poller: &'a mut Poller,
    engine: &'a Arc<Engine>,
    attention: &'a Attention,
}

impl Rounds for Round<'_> {
    fn round(&mut self) -> bool {
        self.poller.round(self.engine, self.attention)
    }

    fn sleep_until(&mut self) -> Option<u64> {
        let now = self.engine.now();
        let until = self.poller.next_look(self.engine, now, self.attention);
        let until = until.min(self.engine.deadlines.first());
        (until > now + SPIN_NS).then_some(until)
    }
}

impl Poller {
    fn look(&mut self, engine: &Arc<Engine>, attention: &Attention) -> NextRound {
        if engine.lost().is_some() {
            // Perhaps by a submitter, who wakes nobody.
            engine.mourn();
            // What is retired from now on goes at once.
            engine.sweep_retired(false);
            return NextRound::End;
        }
        let until = attention.park.look(&mut Round { poller: self, engine, attention });
        until.map_or(NextRound::Again, NextRound::Park)
    }

    /// Looks at every lane that is due, and whether the device is lost; true if anything moved.
    fn round(&mut self, engine: &Arc<Engine>, attention: &Attention) -> bool {
        // Here, and so once more after the poller announced its sleep: there may be no lane.
        engine.mourn();
        engine.wake_reclaimers();
        let mut moved = attention.inbox.take(&mut self.active);
        let now = engine.now();
        engine.deadlines.wake_due(now);
        let mut visited = false;
        for lane in self.active.iter().filter(|lane| lane.next_look() <= now) {
            visited = true;
            moved |= lane.visit(now);
        }
        if visited {
            engine.spent(engine.now() - now);
        }
        if now >= self.next_press() && self.owes(engine) {
            self.last_press = now;
            moved |= self.press(engine);
        }
        if moved {
            self.last_progress = now;
        }
        moved
    }

    /// When to look next, given that nothing moved.
    fn next_look(&mut self, engine: &Arc<Engine>, now: u64, attention: &Attention) -> u64 {
        let lingers_ns = attention.lingers_ns();
        // Nobody will use them again.
        self.active.retain(|lane| !(lane.is_deserted() && lane.deactivate()));
        let waited_for = self.active.iter().any(|lane| lane.has_waiters());
        let owes = self.owes(engine);
        if waited_for || owes {
            // Words and doorbells say nothing of a device that died; a query does.
            if now >= self.last_probe + policy::PROBE_NS {
                self.last_probe = now;
                engine.check_health().ok();
            }
        } else if now >= self.last_progress + lingers_ns {
            self.active.retain(|lane| !lane.deactivate());
        }
        attention.looked(!(waited_for || owes || self.active.is_empty()));
        let mut until = match (waited_for, owes) {
            (_, true) => self.next_press(),
            (true, false) => now + policy::PROBE_NS,
            (false, false) if self.active.is_empty() => return self.next_watch(engine, now),
            (false, false) => now + lingers_ns,
        };
        for lane in &self.active {
            until = until.min(lane.next_look());
        }
        // The next wait is as short, probably: it need not wake anybody.
        if now < engine.checkers.last() + policy::ALERT_FOR_NS {
            until = until.min(now + policy::CHECK_AGAIN_NS);
        }
        until
    }

    /// When to look after an idle device next.
    fn next_watch(&mut self, engine: &Engine, now: u64) -> u64 {
        if !engine.is_watched() {
            return u64::MAX;
        }
        if now >= self.last_probe + policy::WATCH_NS {
            self.last_probe = now;
            engine.check_health().ok();
        }
        self.last_probe + policy::WATCH_NS
    }

    /// When to see to what is owed; more rarely while nothing moves.
    fn next_press(&self) -> u64 {
        let age = self.last_press.saturating_sub(self.last_progress);
        self.last_press + (age / 4).clamp(policy::MARK_WITHIN_NS, policy::PROBE_NS)
    }

    /// Whether memory waits to be taken back or freed.
    fn owes(&self, engine: &Engine) -> bool {
        engine.has_retired() || self.active.iter().any(|lane| lane.has_dues())
    }

    /// Takes back what was lent and frees what was retired, and places the markers that this needs.
    /// True if anything moved.
    fn press(&mut self, engine: &Arc<Engine>) -> bool {
        let mut moved = false;
        for lane in self.active.iter().filter(|lane| lane.has_dues()) {
            moved |= lane.sweep();
            lane.press();
        }
        moved |= engine.sweep_retired(false);
        engine.sweep_retired(true) || moved
    }
}

/// Runs a device's last act on a thread of its own: it may wait for whatever else runs on the GPU,
/// and nobody's drop may. The end of the process waits for it, briefly.
pub(crate) fn last_act(act: impl FnOnce() + Send + 'static) {
    let Some(under_way) = UnderWay::begin() else { return };
    let leaving = Leaving::begin();
    let spawned = contain::spawn("gpu-await-close", move || {
        act();
        drop((under_way, leaving));
    });
    if spawned.is_err() {
        tracing::error!("no thread to close a device with: its memory stays registered");
    }
}

pub(crate) use exit::Leaving;

/// The end of the process.
mod exit {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Weak};
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    use super::Attention;

    /// Process state, and the only one of this crate: the pollers that must stop before the driver
    /// is torn down.
    static POLLERS: Mutex<Vec<Weak<Attention>>> = Mutex::new(Vec::new());

    /// How long the end of the process waits for either: for what leaves, and for what is under way.
    const PATIENCE: Duration = Duration::from_millis(200);

    /// Devices whose last handle is gone and that still have something of the driver's; and what is
    /// to be dropped elsewhere, which may be such a handle.
    static LEAVING: AtomicU32 = AtomicU32::new(0);

    /// Something that goes away, which the end of the process waits for before it stops anything.
    pub(crate) struct Leaving(());

    impl Leaving {
        pub(crate) fn begin() -> Self {
            LEAVING.fetch_add(1, Ordering::SeqCst);
            Leaving(())
        }
    }

    impl Drop for Leaving {
        fn drop(&mut self) {
            LEAVING.fetch_sub(1, Ordering::SeqCst);
        }
    }

    pub(super) fn watch(attention: &Arc<Attention>) {
        crate::at_exit::register(stop_pollers);
        let mut pollers = POLLERS.lock();
        pollers.retain(|poller| poller.strong_count() > 0);
        pollers.push(Arc::downgrade(attention));
    }

    /// Runs when `main` returned or `exit` was called, before the driver's own handlers.
    fn stop_pollers() {
        let pollers: Vec<_> = match POLLERS.try_lock() {
            Some(pollers) => pollers.iter().filter_map(Weak::upgrade).collect(),
            None => Vec::new(),
        };
        // What a device that was just dropped has goes with the help of its poller, which may keep a
        // stream whose owner is the last to have the device.
        let limit = Instant::now() + PATIENCE;
        let looks: Vec<_> =
            pollers.iter().map(|poller| poller.looks.load(Ordering::SeqCst)).collect();
        pollers.iter().for_each(|poller| poller.hurry());
        for (poller, looks) in pollers.iter().zip(looks) {
            wait_until(limit, || poller.has_let_go(looks));
        }
        wait_until(limit, || LEAVING.load(Ordering::SeqCst) == 0);
        crate::at_exit::begin();
        pollers.iter().for_each(|poller| poller.stop());
        // A poller is between driver calls in microseconds; one that is held by the driver (a
        // full queue never holds it) is not waited for.
        let limit = Instant::now() + PATIENCE;
        for poller in pollers {
            wait_until(limit, || poller.inbox.is_closed());
        }
        wait_until(limit, || !crate::at_exit::is_under_way());
    }

    fn wait_until(limit: Instant, holds: impl Fn() -> bool) {
        while !holds() && Instant::now() < limit {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
