//! The host twin: collectives of host devices, by functions on their streams that exchange elements and reduce them in the order of the
//! ranks.
//!
//! A rank's calls of one group are one function: it sends everything first, which waits for nobody, and then receives. A call whose
//! counterpart is another call, size or type loses the communicator, with both named; NCCL would hang, or worse.
//!
//! # Invariants
//! 1. The function tells of its failure before it returns: nobody has seen its ticket complete.
//! 2. Memory is touched only inside the function, between the beginning and the end of its loan on that stream.

use std::sync::{Arc, Weak};

use gpu_await::{RawQueue, Uses, WorkOutcome};

use super::{LocalRank, Placed, Shrink, Transport};
use crate::call::{Call, Verb};
use crate::communicator::shared::Shared;
use crate::element::reduce;
use crate::error::{CollectiveLost, Error, LostCause, ShrinkRefusal};
use crate::exchange::{Inbox, Message, Wire};

type Lost<T> = std::result::Result<T, LostCause>;

pub(crate) struct HostTransport {
    wire: Arc<dyn Wire>,
    ranks: Vec<usize>,
    inboxes: Vec<Arc<Inbox>>,
    world: usize,
}

/// A rank's calls of a group, on their way to its stream.
struct Work {
    wire: Arc<dyn Wire>,
    inbox: Arc<Inbox>,
    rank: usize,
    world: usize,
    calls: Vec<Call>,
    outcomes: Vec<WorkOutcome>,
    shared: Weak<Shared>,
}

impl HostTransport {
    pub(crate) fn new(wire: Arc<dyn Wire>, world: usize, ranks: Vec<usize>) -> Self {
        let inboxes = ranks.iter().map(|rank| wire.inbox(*rank)).collect();
        HostTransport { wire, ranks, inboxes, world }
    }
}

impl Transport for HostTransport {
    fn submit(&self, ranks: &[LocalRank], calls: &[Placed], shared: &Weak<Shared>) -> Lost<()> {
        for (at, local) in ranks.iter().enumerate() {
            let mine = || calls.iter().filter(|placed| placed.at == at);
            if mine().next().is_none() {
                continue;
            }
            let work = Work {
                wire: self.wire.clone(),
                inbox: self.inboxes[at].clone(),
                rank: local.rank,
                world: self.world,
                calls: mine().map(|placed| placed.call).collect(),
                outcomes: mine().map(|placed| placed.outcome.clone()).collect(),
                shared: shared.clone(),
            };
            // SAFETY: the memory of the calls is lent to this stream, behind whose loans the function is; they end behind it.
            let put = unsafe {
                local
                    .stream
                    .enqueue(Uses::new("collective"), |queue, ()| queue.host(move || work.run()))
            };
            put.queued().map_err(|error| LostCause::DeviceLost { error })?;
        }
        Ok(())
    }

    fn capture(
        &self,
        (at, local): (usize, &LocalRank),
        queue: &RawQueue<'_>,
        call: Call,
        shared: &Weak<Shared>,
    ) -> Result<(), Error> {
        let work = Work {
            wire: self.wire.clone(),
            inbox: self.inboxes[at].clone(),
            rank: local.rank,
            world: self.world,
            calls: vec![call],
            // Those of its launches are the communicator's, which it loses if it fails.
            outcomes: Vec::new(),
            shared: shared.clone(),
        };
        Ok(queue.host_each(move || work.run())?)
    }

    fn can_shrink(&self) -> bool {
        false
    }

    /// Its ranks meet again by their wire.
    fn shrink(&self, _: &[LocalRank], _: Shrink<'_>) -> Result<Box<dyn Transport>, Error> {
        Err(Error::CannotShrink { reason: ShrinkRefusal::NotLinked })
    }

    fn look(&self) -> Option<LostCause> {
        self.inboxes.iter().find_map(|inbox| inbox.failed())
    }

    fn abort(&self, cause: &LostCause) {
        self.inboxes.iter().for_each(|inbox| inbox.fail(cause.clone()));
        self.ranks.iter().for_each(|rank| self.wire.abort(*rank));
    }

    fn finish(&self) {
        self.ranks.iter().for_each(|rank| self.wire.leave(*rank));
    }
}

impl Work {
    fn run(&self) {
        let done = self.calls.iter().try_for_each(|call| self.post(call));
        let done = done.and_then(|()| self.calls.iter().try_for_each(|call| self.finish(call)));
        let Err(cause) = done else { return };
        let shared = self.shared.upgrade();
        let cause = shared.map_or(cause.clone(), |shared| shared.fail(cause));
        let error = Error::Lost(CollectiveLost { rank: self.rank, cause });
        self.outcomes.iter().for_each(|outcome| outcome.fail(error.clone()));
    }

    /// Sends what others need of a call.
    fn post(&self, call: &Call) -> Lost<()> {
        let own = call.bytes();
        match call.verb {
            Verb::AllReduce(_) | Verb::AllGather => self.send_to_others(call, own),
            Verb::Reduce(_, root) if self.rank != root => self.send(call, root, 0),
            Verb::Broadcast(root) if self.rank == root => self.send_to_others(call, own),
            Verb::Barrier => self.send_to_others(call, 0),
            Verb::Send(peer) => self.send(call, peer, 0),
            Verb::ReduceScatter(_) | Verb::AllToAll => {
                self.others().try_for_each(|peer| self.send(call, peer, peer * own))
            }
            Verb::Reduce(..) | Verb::Broadcast(_) | Verb::Receive(_) => Ok(()),
        }
    }

    /// Receives what a call needs of others, and writes its result.
    fn finish(&self, call: &Call) -> Lost<()> {
        let own = call.bytes();
        match call.verb {
            Verb::AllReduce(by) => {
                let all = self.gather(call, read(call.from, own))?;
                reduce(call.element, by, &slices(&all), bytes_mut(call.to, own));
            }
            Verb::Reduce(by, root) if self.rank == root => {
                let all = self.gather(call, read(call.from, own))?;
                reduce(call.element, by, &slices(&all), bytes_mut(call.to, own));
            }
            Verb::ReduceScatter(by) => {
                let share = read(call.from + (self.rank * own) as u64, own);
                let all = self.gather(call, share)?;
                reduce(call.element, by, &slices(&all), bytes_mut(call.to, own));
            }
            Verb::Broadcast(root) if self.rank != root => self.receive_into(call, root, 0)?,
            // In place there is nothing to do: who receives and who sends have the same memory.
            Verb::Broadcast(_) => write(call.to, &read(call.from, own)),
            Verb::AllGather => {
                write(call.to + (self.rank * own) as u64, &read(call.from, own));
                self.others().try_for_each(|peer| self.receive_into(call, peer, peer * own))?;
            }
            Verb::AllToAll => {
                let at = (self.rank * own) as u64;
                write(call.to + at, &read(call.from + at, own));
                self.others().try_for_each(|peer| self.receive_into(call, peer, peer * own))?;
            }
            Verb::Receive(peer) => self.receive_into(call, peer, 0)?,
            Verb::Barrier => {
                self.others().try_for_each(|peer| self.receive(call, peer).map(drop))?
            }
            Verb::Send(_) | Verb::Reduce(..) => {}
        }
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world).filter(move |peer| *peer != rank)
    }

    fn send_to_others(&self, call: &Call, bytes: usize) -> Lost<()> {
        let message = Message { head: call.head(), data: read(call.from, bytes) };
        self.others().try_for_each(|peer| self.wire.send(self.rank, peer, message.clone()))
    }

    /// The call's bytes from a place on.
    fn send(&self, call: &Call, peer: usize, at: usize) -> Lost<()> {
        let data = read(call.from + at as u64, call.bytes());
        self.wire.send(self.rank, peer, Message { head: call.head(), data })
    }

    fn receive(&self, call: &Call, peer: usize) -> Lost<Arc<[u8]>> {
        let Message { head, data } = self.inbox.receive(peer)?;
        let ours = call.head();
        if head == ours {
            return Ok(data);
        }
        let (ours, theirs) = (ours.to_string(), head.to_string());
        Err(LostCause::Mismatch { peer, ours, theirs })
    }

    fn receive_into(&self, call: &Call, peer: usize, at: usize) -> Lost<()> {
        let data = self.receive(call, peer)?;
        write(call.to + at as u64, &data);
        Ok(())
    }

    /// What every rank has, in their order.
    fn gather(&self, call: &Call, own: Arc<[u8]>) -> Lost<Vec<Arc<[u8]>>> {
        let of = |peer| if peer == self.rank { Ok(own.clone()) } else { self.receive(call, peer) };
        (0..self.world).map(of).collect()
    }
}

fn slices(all: &[Arc<[u8]>]) -> Vec<&[u8]> {
    all.iter().map(|data| &**data).collect()
}

/// A copy of lent memory: what is read and what is written may be the same.
fn read(address: u64, bytes: usize) -> Arc<[u8]> {
    if bytes == 0 {
        return Arc::new([]);
    }
    // SAFETY: the callers are functions of a stream that the memory is lent to, in front of the end of the loan; its length was
    // checked against the call, and nothing writes it meanwhile. Elements are plain data.
    let memory = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
    memory.into()
}

fn bytes_mut<'a>(address: u64, bytes: usize) -> &'a mut [u8] {
    if bytes == 0 {
        return &mut [];
    }
    // SAFETY: as in `read`, and nothing else reads it either: what was read of it was copied. The slice is gone when the function
    // returns.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }
}

fn write(address: u64, data: &[u8]) {
    bytes_mut(address, data.len()).copy_from_slice(data);
}
