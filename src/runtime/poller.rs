//! The poller: one thread per device, which queries the driver on behalf of all waiters.
//!
//! It owns the list of streams that are waited for (or that have memory to free), looks at each when its work may be complete, and sleeps
//! in between: see [`cadence`](gpu_await_protocol::cadence) for the phases. Its work grows with busy streams, not with futures. A stream
//! without a handle is kept until its work is complete. The poller holds its engine only while it looks, so an unused device goes away, and
//! the thread with it; it never joins itself. For a lost device it only fires deadlines, once the waiters are woken.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Engine;
use super::attention::Attention;
use super::clock::Clock;
use super::registry;
use super::stream_state::StreamState;
use crate::error::{ErrorDetail, Result};
use crate::runtime::coop;
use crate::system;
use crate::thread::role::Role;
use crate::thread::{contain, native, role, turn};
use gpu_await_protocol::cadence;
use gpu_await_protocol::owed::Owed;
use gpu_await_protocol::park::Rounds;

/// Starts the poller of an engine.
pub(crate) fn spawn(engine: &Arc<Engine>) -> Result<()> {
    let attention = engine.pacing.attention.clone();
    let (weak, clock) = (Arc::downgrade(engine), engine.pacing.clock.clone());
    let name = format!("gpu-await-{}", engine.label());
    let thread = native::spawn(&name, Box::new(move || run(&weak, &attention, &clock)))
        .map_err(|_| ErrorDetail::NoThread { what: "a device's poller" })?;
    engine.pacing.attention.thread.get_or_init(|| thread);
    Ok(())
}

/// The shortest sleep between two rounds: another thread that waits for the core gets it for some 3 µs.
const NAP_NS: u64 = 1_000;

struct Poller {
    active: Vec<Arc<StreamState>>,
    last_progress: u64,
    last_press: u64,
    last_probe: u64,
    owed: Owed,
    /// While the cores are busy with others: the thread's CPU time when this turn began.
    turn_from: Option<u64>,
    /// How late the last sleep ended.
    late_ns: u64,
}

fn run(engine: &Weak<Engine>, attention: &Arc<Attention>, clock: &Clock) {
    let _role = role::enter(Role::Poller);
    system::minimize_timer_slack();
    system::ask_for_short_slices();
    coop::prepare();
    let mut poller = Poller::new();
    while !attention.must_stop() {
        turn::pause();
        // A subscriber of `tracing` may panic anywhere; wakers and destructors are contained where they
        // are called.
        let looked = contain::contain("what a poller called", || {
            let engine = engine.upgrade()?;
            Some((poller.look(&engine, attention), engine.pacing.now()))
        });
        let (until, now) = match looked {
            Some(Some(looked)) => looked,
            Some(None) => break,
            None => (None, 0),
        };
        // Checked again: `stop` only wakes a poller that has announced its sleep.
        if let Some(until) = until
            && !attention.must_stop()
            && attention.park.commit(until)
        {
            turn::rest(|| poller.sleep(now, until, clock));
        }
        attention.park.resume();
    }
    // Streams keep their engine, which keeps the streams that were handed over.
    if let Some(engine) = engine.upgrade() {
        // At the end of the process the device counts as lost.
        contain::contain("what a poller called", || engine.mourn());
        engine.registry.let_go_of_all();
    }
    clock.end();
    attention.end();
    registry::let_go(poller.active);
}

/// One round of the poller.
struct Round<'a> {
    poller: &'a mut Poller,
    engine: &'a Arc<Engine>,
    attention: &'a Attention,
}

impl Rounds for Round<'_> {
    fn round(&mut self) -> bool {
        let moved = match self.engine.state.lost() {
            Some(_) => self.poller.bury(self.engine),
            None => self.poller.round(self.engine),
        };
        self.engine.pacing.clock.tell();
        moved
    }

    fn sleep_until(&mut self) -> u64 {
        let now = self.engine.pacing.now();
        let until = match self.engine.state.lost() {
            Some(_) => {
                self.attention.looked(false);
                u64::MAX
            }
            None => self.poller.next_look(self.engine, now, self.attention),
        };
        // Each stream has its own due time: without a sleep in between, some stream would always be due.
        until.min(self.engine.pacing.clock.first()).max(now + NAP_NS)
    }
}

impl Poller {
    fn new() -> Self {
        Poller {
            active: Vec::new(),
            last_progress: 0,
            last_press: 0,
            last_probe: 0,
            owed: Owed::new(),
            turn_from: None,
            late_ns: 0,
        }
    }

    /// Sleeps until `until` or a call; if the cores are busy with others, first for the time it owes them.
    fn sleep(&mut self, now: u64, until: u64, clock: &Clock) {
        if until == u64::MAX {
            return std::thread::park();
        }
        let mut until = until;
        let mut left = until.saturating_sub(now);
        if let Some(turn_from) = self.turn_from {
            let turn_ns = system::thread_time_ns().saturating_sub(turn_from);
            let owed_ns = self.owed.sleep_ns(turn_ns);
            std::thread::sleep(Duration::from_nanos(owed_ns));
            (until, left) = (until.max(now + owed_ns), left.saturating_sub(owed_ns));
        }
        if left > 0 {
            std::thread::park_timeout(Duration::from_nanos(left));
        }
        self.late_ns = clock.now().saturating_sub(until);
        if let Some(turn_from) = &mut self.turn_from {
            *turn_from = system::thread_time_ns();
            self.owed.slept(self.late_ns > cadence::SLICE_NS);
        }
    }

    /// Until when to sleep; `None` if something moved, so that it is worth looking again.
    fn look(&mut self, engine: &Arc<Engine>, attention: &Attention) -> Option<u64> {
        attention.park.look(&mut Round { poller: self, engine, attention })
    }

    /// The device is lost: wakes its waiters and releases its streams.
    fn bury(&mut self, engine: &Arc<Engine>) -> bool {
        // A submitter may have found the loss; it wakes nobody.
        engine.mourn();
        // From now on retired and leftover values are freed at once.
        engine.sweep_retired(false);
        engine.background.send_left();
        engine.registry.let_go_of_all();
        registry::let_go(std::mem::take(&mut self.active));
        false
    }

    /// Looks at every stream that is due, and whether the device is lost; true if anything moved.
    fn round(&mut self, engine: &Arc<Engine>) -> bool {
        // Here, and so again after the poller announced its sleep: there may be no stream.
        engine.mourn();
        engine.memory.wake_reclaimers();
        let mut moved = engine.registry.take_handed_over(&mut self.active);
        let now = engine.pacing.now();
        self.begin_turn(engine, now);
        let mut visited = false;
        for stream in self.active.iter().filter(|stream| stream.waiters.next_look() <= now) {
            visited = true;
            moved |= stream.visit(now);
        }
        if visited {
            engine.pacing.spent(engine.pacing.now() - now);
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

    /// Notes whether the cores are busy with others, and the thread's CPU time so far.
    fn begin_turn(&mut self, engine: &Engine, now: u64) {
        engine.pacing.checkers.was_away(std::mem::take(&mut self.late_ns), now);
        if engine.pacing.checkers.may_yield(now) {
            self.turn_from = None;
        } else if self.turn_from.is_none() {
            self.turn_from = Some(system::thread_time_ns());
        }
    }

    /// When to look next, after a round in which nothing moved.
    fn next_look(&mut self, engine: &Arc<Engine>, now: u64, attention: &Attention) -> u64 {
        let lingers_ns = attention.lingers_ns();
        // Deserted streams will not be used again.
        self.active.retain(|stream| !(stream.is_deserted() && stream.deactivate()));
        let waited_for = self.active.iter().any(|stream| stream.waiters.is_waited_for());
        let owes = self.owes(engine);
        if waited_for || owes {
            // Words and doorbells do not reveal a dead device; a query does.
            if now >= self.last_probe + cadence::PROBE_NS {
                self.last_probe = now;
                engine.check_health().ok();
            }
        } else if now >= self.last_progress + lingers_ns {
            self.active.retain(|stream| !stream.deactivate());
            engine.state.ready_tasks.forget();
        }
        attention.looked(!(waited_for || owes || self.active.is_empty()));
        let mut until = match (waited_for, owes) {
            (_, true) => self.next_press(),
            (true, false) => now + cadence::PROBE_NS,
            (false, false) if self.active.is_empty() => return self.next_watch(engine, now),
            (false, false) => now + lingers_ns,
        };
        for stream in &self.active {
            until = until.min(stream.waiters.next_look());
        }
        until
    }

    /// When to check an idle device next.
    fn next_watch(&mut self, engine: &Engine, now: u64) -> u64 {
        // A reservation keeps waiting on an idle device as well.
        let reserves = engine.memory.account.lock().reservations.waiting() > 0;
        if !reserves && !engine.ending.is_watched() {
            return u64::MAX;
        }
        if now >= self.last_probe + cadence::WATCH_NS {
            self.last_probe = now;
            engine.check_health().ok();
        }
        self.last_probe + cadence::WATCH_NS
    }

    /// When to attend to owed work next; less often while nothing moves.
    fn next_press(&self) -> u64 {
        let age = self.last_press.saturating_sub(self.last_progress);
        self.last_press + (age / 4).clamp(cadence::MARK_WITHIN_NS, cadence::PROBE_NS)
    }

    /// Whether memory waits to be taken back or freed.
    fn owes(&self, engine: &Engine) -> bool {
        engine.memory.has_retired()
            || engine.background.left_without_a_thread() > 0
            || self.active.iter().any(|stream| stream.has_dues())
    }

    /// Takes back lent memory and frees retired memory, and places the markers that this needs. True if
    /// anything moved.
    fn press(&mut self, engine: &Arc<Engine>) -> bool {
        let mut moved = false;
        for stream in self.active.iter().filter(|stream| stream.has_dues()) {
            moved |= stream.sweep();
            stream.collect_freed();
            stream.press();
        }
        engine.background.send_left();
        moved |= engine.sweep_retired(false);
        engine.sweep_retired(true) || moved
    }
}
