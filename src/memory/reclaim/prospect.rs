//! How much memory an allocation could have, and when.
//!
//! | memory that is | is available |
//! |---|---|
//! | unused, within the limit | at once |
//! | cached, freed, or being freed on a stream | at once if its uses are complete or the stream's own, else behind them ([`Pressure`]) |
//! | freed, and used by another device | when that device has finished with it |
//! | being moved by another thread: in the account, but in no list | when that thread has put it back |
//!
//! All of it is examined under the lock under which memory moves ([`claim`](super::claim), invariant 3).
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::pressure::Pressure;
use super::retired::{Block, Remnant};
use crate::backend::DevicePtr;
use crate::runtime::progress::StreamRef;
use crate::runtime::stream_state::StreamState;
use crate::runtime::{Engine, Retired, UserList};
use gpu_await_protocol::account::{Figures, block};

/// Memory that could be taken over.
pub(crate) struct Candidate {
    pub(crate) from: From,
    pub(crate) bytes: u64,
    /// The points that other streams must reach first.
    pub(crate) waits: UserList,
}

pub(crate) enum From {
    /// The cache of a stream.
    Kept(StreamRef<StreamState>, Block),
    /// A deferred free.
    Deferred(StreamRef<StreamState>, Block),
    /// Frees on a stream, by their ticket.
    Freed(StreamRef<StreamState>, u64),
    Retired(DevicePtr),
    /// Cannot be taken over, and will become free by itself.
    Nobody,
}

/// The outlook for an allocation, with its figures.
pub(crate) struct Outlook {
    pub(crate) prospect: Prospect,
    pub(crate) figures: Figures,
    /// The room within the limit.
    pub(crate) room: u64,
    /// Cached memory that is still in use.
    pub(crate) kept_in_use: u64,
    /// Whether the driver refused a block of that size, and no memory has moved since.
    pub(crate) driver_refused: bool,
}

/// When an allocation fits.
pub(crate) enum Prospect {
    /// It fits.
    Fits,
    /// It may fit when some of these are complete, when a buffer is dropped, or when a reservation ends.
    Later(UserList),
    /// Only dropping buffers that draw from no reservation could make it fit.
    Never,
}

impl Engine {
    /// The memory that `stream` could take over, with the waits that it needs: everything pending or cached,
    /// except memory freed in order on `stream`.
    pub(crate) fn candidates(
        &self,
        streams: &[StreamRef<StreamState>],
        stream: &Arc<StreamState>,
    ) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for other in streams {
            if other.progress.waits_for_others() {
                // A stuck stream leaks the memory here, since waiting for it would never end.
                other.collect_freed();
            }
            let own = other.progress.id == stream.progress.id;
            let waits = |ticket| {
                let waits = (!own && !other.progress.timeline.is_complete(ticket))
                    .then(|| other.point(ticket));
                UserList::from_iter(waits)
            };
            let candidate = |from: fn(StreamRef<StreamState>, Block) -> From, block: Block| {
                let from = from(other.clone(), block);
                Candidate { from, bytes: block.bytes, waits: waits(block.ticket) }
            };
            let kept = other.memory.kept_blocks().into_iter();
            candidates.extend(kept.map(|block| candidate(From::Kept, block)));
            let deferred = other.memory.deferred_blocks().into_iter();
            candidates.extend(deferred.map(|block| candidate(From::Deferred, block)));
            if !own {
                candidates.extend(other.memory.frees_in_order().into_iter().map(|freed| {
                    Candidate {
                        from: From::Freed(other.clone(), freed.ticket),
                        bytes: freed.bytes,
                        waits: UserList::from_iter([other.point(freed.behind)]),
                    }
                }));
            }
        }
        self.memory.with_retired(|retired| {
            candidates.extend(retired.iter().map(|retired| self.candidate(retired, stream)));
        });
        candidates
    }

    fn candidate(&self, retired: &Retired, stream: &Arc<StreamState>) -> Candidate {
        let waits = retired.users.iter();
        let waits = waits
            .filter(|used| used.stream.id != stream.progress.id && !used.is_complete())
            .cloned();
        let waits = UserList::from_iter(waits);
        let ours = waits.iter().all(|used| used.stream.device().id == self.state.id);
        let hopeless = waits.iter().any(|used| used.stream.is_hopeless(used.ticket));
        let from = match retired.what {
            Remnant::Memory { ptr, .. } if ours && !hopeless => From::Retired(ptr),
            Remnant::Memory { .. } | Remnant::Module(_) | Remnant::Foreign { .. } => From::Nobody,
        };
        let waits = if hopeless { UserList::new() } else { waits };
        Candidate { from, bytes: retired.what.bytes(), waits }
    }

    /// Whether `stream` could now get a block that it was just refused, counting memory that it may take over
    /// and memory that another thread is moving.
    pub(crate) fn is_there(
        &self,
        stream: &Arc<StreamState>,
        block: u64,
        budget: Option<usize>,
    ) -> bool {
        let streams = self.registry.streams();
        let _pressing = self.memory.pressing.lock();
        let may_wait = self.options.on_pressure == Pressure::Wait;
        let (mut usable, mut not) = (self.memory.freeing_bytes() + stream.memory.freed_bytes(), 0);
        for Candidate { from, bytes, waits } in self.candidates(&streams, stream) {
            let may_go = !matches!(from, From::Nobody) && (may_wait || waits.is_empty());
            *if may_go { &mut usable } else { &mut not } += bytes;
        }
        let account = self.memory.account.lock();
        let Figures { pending, kept, .. } = account.figures();
        let in_hand = (pending + kept).saturating_sub(usable + not);
        account.lacks(block, usable + in_hand, budget) == 0
    }

    /// The outlook for a buffer of this many bytes on `stream`. A size that the driver refused does not fit until
    /// memory moves, whatever the account says: the driver's pool does not merge memory that streams have yet to
    /// free. If the driver refused although fresh memory suffices by all figures, returned memory helps only if it
    /// is enough by itself. `within_reach` is all that the device can give, regardless of the limit.
    pub(crate) fn outlook(
        &self,
        stream: &Arc<StreamState>,
        bytes: u64,
        within_reach: u64,
        budget: Option<usize>,
    ) -> Outlook {
        let block = block(bytes);
        self.collect_freed();
        let streams = self.registry.streams();
        let _pressing = self.memory.pressing.lock();
        let candidates = self.candidates(&streams, stream);
        let at_once = candidates
            .iter()
            .filter(|candidate| candidate.waits.is_empty())
            .filter(|candidate| !matches!(candidate.from, From::Nobody));
        let at_once = stream.memory.freed_bytes()
            + self.memory.freeing_bytes()
            + at_once.map(|candidate| candidate.bytes).sum::<u64>();
        let kept_in_use = candidates
            .iter()
            .filter(|kept| matches!(kept.from, From::Kept(..)) && !kept.waits.is_empty())
            .map(|kept| kept.bytes)
            .sum();
        let (room, [most, ever], figures, driver_refused) = {
            let account = self.memory.account.lock();
            let most = [account.most(budget), account.most_without_budgets(budget)];
            let mut figures = account.figures();
            // The rest of its own budget is available to it.
            figures.budgeted -= budget.map_or(0, |budget| account.reservations.left_of(budget));
            (account.room(budget), most, figures, account.is_refused(block))
        };
        let left = within_reach.saturating_sub(figures.held());
        let fresh = room.min(left);
        let fits = block <= most && at_once.saturating_add(fresh) >= block;
        let is = |prospect| Outlook { prospect, figures, room, kept_in_use, driver_refused };
        if fits && !driver_refused {
            return is(Prospect::Fits);
        }
        let comes_back = figures.pending + figures.kept;
        let of_reservations = if budget.is_none() { figures.drawn } else { 0 };
        let hopeless = ever.min(left.saturating_add(comes_back + of_reservations)) < block;
        let in_vain = comes_back == 0 || (fresh >= block && comes_back < block);
        if hopeless || (driver_refused && in_vain) {
            return is(Prospect::Never);
        }
        if block > most {
            // Only the end of a reservation helps, which is reported as memory that moves.
            return is(Prospect::Later(UserList::new()));
        }
        let of_stream = stream.memory.frees_in_order().into_iter();
        let of_stream = of_stream.map(|freed| stream.point(freed.behind));
        let mut waits = UserList::new();
        for used in candidates.into_iter().flat_map(|candidate| candidate.waits).chain(of_stream) {
            match waits.iter_mut().find(|known| known.stream.id == used.stream.id) {
                Some(known) => known.ticket = known.ticket.min(used.ticket),
                None => waits.push(used),
            }
        }
        // The ticket behind a free may not be issued yet: the one before it will do.
        for used in &mut waits {
            used.ticket = used.ticket.min(used.stream.timeline.submitted());
        }
        is(Prospect::Later(waits))
    }
}

/// A future's registration as a waiter for memory.
pub(crate) struct Reclaimer {
    engine: Arc<Engine>,
    key: usize,
}

impl Reclaimer {
    pub(crate) fn new(engine: &Arc<Engine>) -> Self {
        Reclaimer { engine: engine.clone(), key: engine.memory.reclaimers.enter() }
    }

    /// Rises when memory moves.
    pub(crate) fn version(&self) -> u64 {
        self.engine.memory.account.lock().version()
    }

    /// Whether memory moved since `version`, or the device is lost; if not, `waker` is woken then. In the child of a fork it is never woken.
    pub(crate) fn poll(&self, version: u64, waker: &std::task::Waker) -> bool {
        self.engine.memory.reclaimers.wait(self.key, version, waker);
        self.version() != version || self.engine.state.lost().is_some()
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        self.engine.memory.reclaimers.leave(self.key);
    }
}
