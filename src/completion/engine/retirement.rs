//! What was given up goes when every stream that may use it is through; no stream waits for that.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smallvec::{SmallVec, smallvec};

use super::Engine;
use crate::backend::{DevicePtr, Query};
use crate::completion::retired::{Remnant, Retired, UserList};
use crate::completion::roster::{Departed, Tells};
use crate::hazard::Use;

/// An allocation about to fail waits so long for frees that wait for nothing themselves.
const FLUSH_FOR: Duration = Duration::from_millis(10);

impl Engine {
    /// Frees memory when every stream that used it is through; no stream waits for that.
    pub(crate) fn retire(self: &Arc<Self>, retired: Retired) {
        if let Remnant::Memory { bytes, .. } = retired.what {
            // ORDERING: Relaxed: a statistic.
            self.counters.retired_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        self.retired.lock().push(retired);
        if self.lost.get().is_some() {
            // There is no poller any more.
            self.sweep_retired(false);
        }
        self.attention.call();
    }

    /// Frees memory that a stream kept for itself, when that stream is through, which nobody has any
    /// more.
    pub(crate) fn retire_spare(self: &Arc<Self>, ptr: DevicePtr, lane: u64) {
        let departed = smallvec![lane];
        self.retire(Retired { what: Remnant::Spare(ptr), users: UserList::new(), departed });
    }

    /// Frees memory that a stream kept for itself, and that no work uses any more.
    pub(crate) fn free_spare(self: &Arc<Self>, ptr: DevicePtr) {
        self.free_now(Remnant::Spare(ptr));
    }

    /// Whether something is to be freed, or a stream to be destroyed, when work is complete.
    pub(crate) fn has_retired(&self) -> bool {
        self.roster.has_departed() || !self.retired.lock().is_empty()
    }

    fn has_retired_module(&self) -> bool {
        self.retired.lock().iter().any(|retired| matches!(retired.what, Remnant::Module(_)))
    }

    /// Frees what is complete among the retired; if `press`, places the markers that this needs and
    /// asks after them.
    /// True if anything was freed.
    pub(crate) fn sweep_retired(self: &Arc<Self>, press: bool) -> bool {
        let mut done: SmallVec<[Retired; 8]> = SmallVec::new();
        let mut through = UserList::new();
        self.sweep_departed();
        if press {
            self.press_users();
        }
        // Asked only where it matters, and not under the lock: it looks at every stream.
        let idle = self.has_retired_module() && self.is_idle();
        {
            let mut retired = self.retired.lock();
            if self.lost.get().is_some() {
                // Their streams will not get there. They hold this engine: let go of them.
                done.extend(retired.drain(..));
            }
            let mut index = 0;
            while index < retired.len() {
                let users = std::mem::take(&mut retired[index].users);
                let (complete, waiting): (UserList, UserList) =
                    users.into_iter().partition(|used| used.lane.is_complete(used.ticket));
                retired[index].users = waiting;
                self.roster.retain_known(&mut retired[index].departed);
                // Dropped after the lock: it may be the last of a stream.
                through.extend(complete);
                // Unloading waits for everything that runs: only when nothing does.
                let ready = match retired[index].what {
                    Remnant::Memory { .. } | Remnant::Spare(_) => true,
                    Remnant::Module(_) => idle,
                };
                let used = !retired[index].users.is_empty() || !retired[index].departed.is_empty();
                if ready && !used {
                    done.push(retired.swap_remove(index));
                } else {
                    index += 1;
                }
            }
        }
        drop(through);
        let any = !done.is_empty();
        for retired in done {
            self.free_now(retired.what);
        }
        any
    }

    /// Asks how far the streams are that the retired wait for: perhaps nobody else does.
    fn press_users(&self) {
        let mut users = UserList::new();
        for retired in &*self.retired.lock() {
            for used in &retired.users {
                match users.iter_mut().find(|known| known.lane == used.lane) {
                    Some(known) => known.ticket = known.ticket.max(used.ticket),
                    None => users.push(used.clone()),
                }
            }
        }
        for Use { lane, ticket } in users {
            lane.want(ticket);
            lane.sweep();
        }
    }

    /// Destroys streams that nobody has any more and whose work is complete.
    fn sweep_departed(&self) {
        let lost = self.lost.get().is_some();
        let through = self.roster.take_through(lost, |tells| match tells {
            // SAFETY: the stream is destroyed below, by who took it out, and by nobody beside this.
            Tells::Stream(stream) => unsafe { self.backend.stream_query(*stream) },
            // SAFETY: the handle keeps the event.
            Tells::Event(event) => unsafe { self.backend.event_query(event.raw()) },
            Tells::Nothing => Ok(Query::Pending),
        });
        let through = match through {
            Ok(through) => through,
            Err(code) => return drop(self.refused(code)),
        };
        for Departed { tells, engine } in through {
            if let (Tells::Stream(stream), false) = (&tells, lost) {
                // SAFETY: the stream was ours and is through, and taken out once.
                if let Err(error) = unsafe { self.backend.stream_destroy(*stream) } {
                    tracing::warn!(%error, "a stream was not destroyed");
                }
            }
            // An event goes back to the engine's pool.
            drop(tells);
            drop(engine);
        }
    }

    /// Gives `what` up when what was submitted so far, anywhere on the device, is complete, and what
    /// `users` say.
    pub(crate) fn retire_behind_all(self: &Arc<Self>, what: Remnant, mut users: UserList) {
        let (lanes, departed) = self.roster.everybody();
        users.extend(lanes.into_iter().map(|lane| Use { ticket: lane.submitted(), lane }));
        self.retire(Retired { what, users, departed });
    }

    /// Frees what no stream uses any more.
    fn free_now(self: &Arc<Self>, what: Remnant) {
        if let Remnant::Memory { bytes, .. } = what {
            // ORDERING: Relaxed: a statistic.
            self.counters.retired_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.count_free(bytes);
        }
        if self.lost.get().is_some() {
            return;
        }
        let engine = self.clone();
        let free = move || {
            if let Err(code) = what.discard(&*engine.backend, engine.private) {
                let error = engine.refused(code);
                tracing::warn!(device = %engine.label, %error, "a free was refused");
            }
        };
        match what {
            Remnant::Memory { .. } | Remnant::Spare(_) => free(),
            // It may take its time, and the caller may be the poller.
            Remnant::Module(_) => self.reaper.send(free),
        }
    }

    /// Whether no stream is known to have work.
    fn is_idle(&self) -> bool {
        let (lanes, departed) = self.roster.everybody();
        departed.is_empty() && lanes.iter().all(|lane| lane.is_complete(lane.submitted()))
    }

    /// Frees all that can be freed, for an allocation that is about to fail, or for others.
    pub(crate) fn flush_retired(self: &Arc<Self>) {
        for lane in self.lanes() {
            lane.sweep();
            lane.give_back_spares();
        }
        self.sweep_retired(true);
        if self.options.stepped {
            // Nobody runs them meanwhile.
            return;
        }
        // The frees themselves wait for nothing; a later allocation elsewhere can use the memory
        // once they ran.
        let end = Instant::now() + FLUSH_FOR;
        while Instant::now() < end {
            // SAFETY: the private stream lives as long as the engine.
            match unsafe { self.backend.stream_query(self.private) } {
                Ok(Query::Pending) => std::thread::yield_now(),
                Ok(Query::Complete) | Err(_) => return,
            }
        }
    }
}
