//! Retired memory and objects are freed when every stream that may use them has finished; no stream waits for that.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{DeviceStream, Engine};
use crate::backend::{DevicePtr, Query};
use crate::memory::reclaim::retired::{Block, LentBlock, Remnant, Retired, UserList};
use crate::runtime::event_pool::EventHandle;
use crate::runtime::progress::Progress;
use crate::thread::relax::Relax;
use crate::thread::{exit, role};
use gpu_await_protocol::timeline::Point;

/// Before a thread returns memory to the system it waits this long for frees that wait for nothing
/// themselves.
const FLUSH_FOR: Duration = Duration::from_millis(10);

impl<S: DeviceStream> Engine<S> {
    /// Frees memory, which is pending in the account, when every stream that used it has finished; no stream
    /// waits for that.
    pub(crate) fn retire(self: &Arc<Self>, what: Remnant, users: UserList<S>) {
        let engine = self.clone();
        self.memory.with_retired(|retired| retired.push(Retired { what, users, engine }));
        // After the entry: a thread that reads the new number finds it.
        self.background.count_retirement();
        if self.state.lost().is_some() {
            // There is no poller any more.
            self.sweep_retired(false);
        }
        self.pacing.attention.call();
    }

    /// Drops a value that holds no memory in any account, when its users have finished with it. After `main` it is leaked.
    pub(crate) fn retire_owner(self: &Arc<Self>, owner: impl Any + Send, users: UserList<S>) {
        if exit::begun() {
            return std::mem::forget(owner);
        }
        let what = Remnant::Foreign { ptr: DevicePtr::NULL, bytes: 0, owner: Box::new(owner) };
        self.retire(what, users);
    }

    /// Frees a block that one stream used exclusively, when that stream has finished with it.
    pub(crate) fn retire_block(self: &Arc<Self>, stream: &Arc<Progress<S>>, block: Block) {
        let users = [Point { stream: stream.clone(), ticket: block.ticket }];
        self.retire(Remnant::from(block), UserList::from_iter(users));
    }

    /// Frees retired values whose users are complete; if `press`, places the markers that this needs and
    /// looks at them. True if anything was freed.
    pub(crate) fn sweep_retired(self: &Arc<Self>, press: bool) -> bool {
        let (mut done, mut hopeless) = (SmallVec::<[Retired<S>; 8]>::new(), Vec::new());
        let mut set_aside = Vec::new();
        if press {
            self.memory.press_users();
        }
        // Asked only where it matters, and not under the lock: it looks at every stream.
        let idle = self.memory.has_retired_module() && self.is_idle();
        // An allocation must find all pending memory in one place or the other. Nothing allocates on a lost
        // device, and the lock's holder may come here.
        let _pressing = self.state.lost().is_none().then(|| self.memory.pressing.lock());
        self.memory.with_retired(|retired| {
            let mut index = 0;
            while index < retired.len() {
                let Retired { what, users, .. } = &mut retired[index];
                users.retain(|used| !used.is_complete());
                let is_hopeless = users.iter().any(|used| used.stream.is_hopeless(used.ticket));
                // Read after that: the device's own loss makes nothing hopeless.
                let lost = self.state.lost().is_some();
                if (is_hopeless || lost)
                    && !users.is_empty()
                    && let Some(block) = what.mapped()
                {
                    self.set_aside(&**block);
                    set_aside.push(retired.swap_remove(index));
                    continue;
                }
                if lost {
                    // Its own remaining work is left to the owner of the buried values, which waits for it.
                    users.retain(|used| used.stream.device().id != self.state.id);
                }
                // Unloading waits for everything that runs, so it waits until nothing does.
                let ready = match what {
                    Remnant::Memory { .. } | Remnant::Foreign { .. } => true,
                    Remnant::Module(_) => idle || lost,
                };
                if ready && users.is_empty() {
                    done.push(retired.swap_remove(index));
                } else if is_hopeless || lost {
                    // Its users may still get there at any time, and nothing searches a lost device.
                    hopeless.push(retired.swap_remove(index));
                } else {
                    index += 1;
                }
            }
        });
        let any = self.memory.collect_freeing(&*self.backend) || !done.is_empty();
        for retired in done {
            self.free_now(retired.what);
        }
        // These blocks stay mapped, but they hold the device, which must be free to go.
        drop(set_aside);
        for retired in hopeless {
            self.memory.give_up(retired.what.bytes());
            if let Remnant::Foreign { owner, .. } = retired.what {
                std::mem::forget(owner);
            }
        }
        any
    }

    /// Sets aside and counts a block that a device may still touch at any time.
    pub(crate) fn set_aside(&self, block: &dyn LentBlock) {
        // ORDERING: Relaxed: a statistic.
        self.state.counters.quarantined_bytes.fetch_add(block.quarantine(), Ordering::Relaxed);
    }

    /// Asks about the progress of every stream, updates the account, and wakes the waiters of complete work.
    pub(crate) fn look_everywhere(&self) {
        for stream in self.registry.streams() {
            stream.sweep();
            stream.collect_freed(false);
        }
        self.memory.collect_freeing(&*self.backend);
    }

    /// Counts memory whose free was just put on the private stream. With a limit it stays pending until that
    /// has run: it cannot be reused before.
    pub(crate) fn enter_free(&self, bytes: u64) {
        let limited = bytes > 0 && self.options.memory_limit.is_some();
        match limited.then(|| self.record_aside()).flatten() {
            Some(event) => {
                self.memory.enter_freeing(event, bytes);
            }
            None => self.memory.release(bytes),
        }
    }

    /// Puts memory back that was taken over from the private stream.
    pub(crate) fn put_freeing(&self, bytes: u64) {
        if bytes > 0 {
            self.enter_free(bytes);
        }
    }

    /// Frees `what` when everything submitted so far on the device is complete, and the points of `users` as
    /// well.
    pub(crate) fn retire_behind_all(self: &Arc<Self>, what: Remnant, mut users: UserList<S>) {
        for stream in self.registry.streams() {
            let stream = stream.progress().clone();
            users.push(Point { ticket: stream.timeline.submitted(), stream });
        }
        self.retire(what, users);
    }

    /// Frees what no stream uses any more.
    pub(crate) fn free_now(self: &Arc<Self>, what: Remnant) {
        let bytes = what.bytes();
        if self.state.lost().is_some() {
            self.memory.release(bytes);
            if let Remnant::Foreign { owner, .. } = what {
                self.background.bury(owner);
            }
            return;
        }
        let engine = self.clone();
        let free = move |what: &Remnant| match what.discard(&*engine.backend, engine.shares.private)
        {
            Ok(()) => engine.enter_free(bytes),
            Err(code) => drop(engine.leaked(bytes, code)),
        };
        match what {
            Remnant::Memory { .. } => free(&what),
            // Unloading may take long, and an owner's drop is user code: the caller may be the poller.
            Remnant::Module(_) | Remnant::Foreign { .. } => {
                self.background.reap(move || free(&what))
            }
        }
    }

    /// Whether no stream is known to have work.
    fn is_idle(&self) -> bool {
        self.registry.streams().iter().all(|stream| stream.progress().is_idle())
    }

    /// Updates the account with the frees on streams that are known to be complete, and ensures that the rest
    /// will be known.
    pub(crate) fn collect_freed(&self) {
        let may_ask = role::may_call_driver();
        for stream in self.registry.streams() {
            stream.collect_freed(may_ask);
        }
        self.memory.collect_freeing(&*self.backend);
    }

    /// An event behind the frees of retired memory; `None` if it cannot be had.
    pub(crate) fn behind_frees(&self) -> Option<EventHandle> {
        // Nothing would notice when it can be lent again.
        self.record_aside().inspect(EventHandle::spoil)
    }

    fn record_aside(&self) -> Option<EventHandle> {
        let event = self.pools.event().ok()?;
        // SAFETY: the private stream lives as long as the engine; the event is pooled, so nothing is
        // pending on it.
        let recorded = unsafe { self.backend.event_record(event.raw(), self.shares.private) };
        // It may have been recorded all the same: never to be lent again.
        recorded.inspect_err(|_| event.spoil()).ok().map(|()| event)
    }

    /// Empties the block caches of all streams. Waits for nothing.
    pub(crate) fn empty_caches(self: &Arc<Self>) {
        for stream in self.registry.streams() {
            stream.sweep();
            for block in stream.take_all_kept() {
                self.retire_block(stream.progress(), block);
            }
        }
    }

    /// Frees all that can be freed, for others. Blocks for a moment.
    pub(crate) fn flush(self: &Arc<Self>) {
        self.empty_caches();
        self.collect_freed();
        self.sweep_retired(true);
        if self.options.stepped {
            // Nothing runs them meanwhile.
            return;
        }
        // The frees themselves wait for nothing; a later allocation elsewhere can use the memory
        // once they ran.
        let (end, mut relax) = (Instant::now() + FLUSH_FOR, Relax::default());
        while Instant::now() < end {
            // SAFETY: the private stream lives as long as the engine.
            match unsafe { self.backend.stream_query(self.shares.private) } {
                Ok(Query::Pending) => relax.pause(),
                Ok(Query::Complete) | Err(_) => return,
            }
        }
    }
}
