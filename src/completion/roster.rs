//! The streams of a device: those in use, and those that nobody has any more while their work goes on.
//!
//! | a stream is | from | until |
//! |---|---|---|
//! | present | its lane is made | the lane's drop: in its course nobody can have it any more |
//! | departed | a drop with work that is not known to be complete | that is complete |
//! | gone | a drop without such work, or the loss of the device | |
//!
//! # Invariants
//! 1. A stream is here until its work is complete or its device lost, so that who waits for
//!    everything on the device finds it
//!    (`a_frozen_buffer_outlives_the_reads_of_a_dropped_stream`).
//! 2. A departed stream of ours is destroyed when its work is complete, once. It keeps its engine.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::engine::Engine;
use super::events::EventHandle;
use super::lane::Lane;
use crate::backend::{Call, Query, RawStream};

#[derive(Default)]
pub(crate) struct Roster {
    entries: Mutex<Vec<Entry>>,
    departed: AtomicUsize,
    /// Held by who asks after departed streams.
    asking: Mutex<()>,
}

struct Entry {
    id: u64,
    state: State,
}

enum State {
    Present(Weak<Lane>),
    Departed(Departed),
}

/// A stream without a lane.
pub(crate) struct Departed {
    pub(crate) tells: Tells,
    /// `None` where nobody would let go of it: a device without a poller.
    pub(crate) engine: Option<Arc<Engine>>,
}

/// What tells whether a departed stream's work is complete.
#[derive(Clone)]
pub(crate) enum Tells {
    /// The stream, which is ours to destroy then.
    Stream(RawStream),
    /// An event behind all of our work on a stream of somebody else's.
    Event(EventHandle),
    /// The driver refused that event: nothing will.
    Nothing,
}

/// Ids of streams.
pub(crate) type Ids = SmallVec<[u64; 2]>;

impl Roster {
    pub(crate) fn enlist(&self, id: u64, lane: Weak<Lane>) {
        self.entries.lock().push(Entry { id, state: State::Present(lane) });
    }

    /// The streams in use.
    pub(crate) fn lanes(&self) -> Vec<Arc<Lane>> {
        self.entries.lock().iter().filter_map(Entry::lane).collect()
    }

    /// One of them, by any number; `None` if that would wait for somebody.
    pub(crate) fn pick(&self, number: usize) -> Option<Arc<Lane>> {
        let entries = self.entries.try_lock()?;
        entries.get(number % entries.len().max(1))?.lane()
    }

    /// The streams in use, and the ids of those that nobody can have any more.
    pub(crate) fn everybody(&self) -> (Vec<Arc<Lane>>, Ids) {
        let (mut lanes, mut others) = (Vec::new(), Ids::new());
        for entry in &*self.entries.lock() {
            match entry.lane() {
                Some(lane) => lanes.push(lane),
                None => others.push(entry.id),
            }
        }
        (lanes, others)
    }

    /// Forgets those of `ids` whose work is complete.
    pub(crate) fn retain_known(&self, ids: &mut Ids) {
        if !ids.is_empty() {
            let entries = self.entries.lock();
            ids.retain(|id| entries.iter().any(|entry| entry.id == *id));
        }
    }

    /// Takes a lane's leave, which is being dropped.
    pub(crate) fn leave(&self, id: u64, departed: Option<Departed>) {
        let mut entries = self.entries.lock();
        let Some(at) = entries.iter().position(|entry| entry.id == id) else { return };
        match departed {
            Some(departed) => {
                entries[at].state = State::Departed(departed);
                // ORDERING: Relaxed: a hint; who must act on it is called afterwards.
                self.departed.fetch_add(1, Ordering::Relaxed);
            }
            None => drop(entries.swap_remove(at)),
        }
    }

    pub(crate) fn has_departed(&self) -> bool {
        // ORDERING: Relaxed, as above.
        self.departed.load(Ordering::Relaxed) > 0
    }

    /// Asks after departed streams and takes out those that are through; all of them if `all`. Whoever
    /// gets one destroys it.
    pub(crate) fn take_through(
        &self,
        all: bool,
        mut ask: impl FnMut(&Tells) -> Call<Query>,
    ) -> Call<SmallVec<[Departed; 2]>> {
        let mut through = SmallVec::new();
        // One at a time: nobody asks after a stream that another one destroys.
        let Some(_asking) = self.asking.try_lock().filter(|_| self.has_departed()) else {
            return Ok(through);
        };
        let departed: SmallVec<[(u64, Tells); 2]> =
            self.entries.lock().iter().filter_map(Entry::departed).collect();
        for (id, tells) in departed {
            if all || ask(&tells)? == Query::Complete {
                through.extend(self.take(id));
            }
        }
        Ok(through)
    }

    /// Takes out what is left when the engine goes.
    pub(crate) fn drain(&mut self) -> Vec<RawStream> {
        let left = self.entries.get_mut().drain(..);
        let streams = left.filter_map(|entry| match entry.state {
            State::Departed(Departed { tells: Tells::Stream(stream), .. }) => Some(stream),
            _ => None,
        });
        streams.collect()
    }

    fn take(&self, id: u64) -> Option<Departed> {
        let mut entries = self.entries.lock();
        let at = entries.iter().position(|entry| entry.id == id)?;
        match entries.swap_remove(at).state {
            State::Departed(departed) => {
                // ORDERING: Relaxed, as above.
                self.departed.fetch_sub(1, Ordering::Relaxed);
                Some(departed)
            }
            State::Present(_) => unreachable!("ids are never used again"),
        }
    }
}

impl Entry {
    fn lane(&self) -> Option<Arc<Lane>> {
        match &self.state {
            State::Present(lane) => lane.upgrade(),
            State::Departed(_) => None,
        }
    }

    fn departed(&self) -> Option<(u64, Tells)> {
        match &self.state {
            State::Present(_) => None,
            State::Departed(departed) => Some((self.id, departed.tells.clone())),
        }
    }
}
