//! What is lent to a stream: host memory, users' values, and callbacks for the driver.
//!
//! | a lent value | when its ticket is complete | when it never will be |
//! |---|---|---|
//! | our own host memory | is dropped | is quarantined: the copy engines may not have stopped |
//! | a callback | is dropped by the reaper | its closure is taken, and both are dropped by the reaper |
//! | a value that the work needs | is dropped by the reaper | is buried with a lost device; otherwise leaked, and counted |
//!
//! At the end of the process the device's work goes on, and what is lent stays where it is.
#![forbid(unsafe_code)]

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::StreamState;
use super::markers::Counted;
use crate::memory::reclaim::retired::LentBlock;
use crate::runtime::engine::Engine;
use crate::thread::exit;
use gpu_await_protocol::timeline::Timeline;

/// A lent value.
pub(crate) enum Payload {
    /// Our own memory: dropping it is cheap and calls nobody.
    Memory(Arc<dyn LentBlock>),
    /// A user's callback for the driver: dropped by the reaper.
    Callback(Box<dyn Callback>),
    /// A user's value that the work needs: dropped by the reaper, also after the loss of the device; never
    /// if the stream waits for ever.
    Kept(Box<dyn Any + Send>),
}

/// A share of a callback for the driver; dropped like any other once it was called.
pub(crate) trait Callback: Any + Send {
    /// On a device that makes no progress any more: takes the user's closure, unless it was called. If the
    /// driver calls all the same, nothing happens.
    fn give_up(&self) -> Option<Box<dyn Any + Send>>;
}

/// A value that the device may touch until `ticket` is complete.
struct LentMemory {
    ticket: u64,
    bytes: u64,
    payload: Payload,
}

/// The values lent to a stream, in the order of their tickets.
#[derive(Default)]
pub(super) struct LentQueue(Counted<VecDeque<LentMemory>>);

impl LentQueue {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lends host memory to the device until `ticket` is complete.
    pub(super) fn lend(
        &self,
        engine: &Engine<StreamState>,
        ticket: u64,
        bytes: u64,
        payload: Payload,
    ) {
        // ORDERING: Relaxed: a statistic; added before the thread that takes the memory back subtracts it.
        engine.state.counters.lent_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.0.lock().push_back(LentMemory { ticket, bytes, payload });
    }

    /// Takes back lent memory that the device has finished with, and sends users' values to be dropped.
    pub(super) fn take_back(&self, engine: &Engine<StreamState>, timeline: &Timeline) {
        // A submitter's concurrent additions are not complete yet.
        while !self.0.is_empty() {
            let mut blocks: SmallVec<[Arc<dyn LentBlock>; 8]> = SmallVec::new();
            let mut any = false;
            {
                let mut lent = self.0.lock();
                let completed = timeline.completed();
                while blocks.len() < 8 && lent.front().is_some_and(|l| l.ticket <= completed) {
                    let Some(lent) = lent.pop_front() else { break };
                    any = true;
                    // ORDERING: Relaxed: a statistic.
                    engine.state.counters.lent_bytes.fetch_sub(lent.bytes, Ordering::Relaxed);
                    match lent.payload {
                        Payload::Memory(memory) => blocks.push(memory),
                        // Under the lock: a thread that finds it empty also finds them sent.
                        Payload::Callback(callback) => engine.background.drop_later(callback),
                        Payload::Kept(value) => engine.background.drop_later(value),
                    }
                }
            }
            if !any {
                return;
            }
        }
    }

    /// Returns when no other thread is taking something back.
    pub(super) fn wait_for_takers(&self) {
        drop(self.0.lock());
    }

    /// Quarantines memory lent to a lost device.
    pub(super) fn quarantine(&self, engine: &Engine<StreamState>) {
        for LentMemory { bytes, payload, .. } in self.take_all() {
            give_up(engine, payload);
            // ORDERING: Relaxed: a statistic.
            engine.state.counters.lent_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Releases what is left on a stream that nothing steps any more.
    pub(super) fn give_up(&self, engine: &Engine<StreamState>) {
        self.take_all().into_iter().for_each(|lent| give_up(engine, lent.payload));
    }

    fn take_all(&self) -> VecDeque<LentMemory> {
        std::mem::take(&mut *self.0.lock())
    }
}

/// Releases a lent value whose use will never be seen to end. At the end of the process the device may go on, and the
/// value stays.
fn give_up(engine: &Engine<StreamState>, payload: Payload) {
    if exit::begun() {
        return std::mem::forget(payload);
    }
    match payload {
        // It holds its device, which must not stay as well.
        Payload::Memory(memory) => engine.set_aside(&*memory),
        Payload::Callback(callback) => {
            if let Some(function) = callback.give_up() {
                engine.background.drop_later(function);
            }
            engine.background.drop_later(callback);
        }
        Payload::Kept(value) if engine.state.lost().is_some() => engine.background.bury(value),
        Payload::Kept(value) => {
            std::mem::forget(value);
            engine.state.count_unreturned();
        }
    }
}
