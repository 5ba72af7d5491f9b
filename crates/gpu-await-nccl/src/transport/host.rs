//! The host twin: collectives of host devices, by functions on their streams that exchange elements and reduce them in the order of the
//! ranks.
//!
//! A rank's calls of one group are one function: it sends everything first, without waiting, then receives, and then waits until what
//! it sent has been taken, up to a bound.
//!
//! # Calls that disagree
//! Each collective call begins with its signature (verb, reduction, root, type, length), which goes to the next rank of a ring and is
//! compared there: if not all are equal, two neighbours differ. A receive that has to wait says so to its peer: a peer that
//! waits for this rank as well finds that neither can go on. Both lose the communicator, with the two calls named; NCCL would
//! hang, or worse.
//!
//! # Invariants
//! 1. The function reports its failure before it returns: nobody has seen its ticket complete by then.
//! 2. Memory is touched only inside the function, between the beginning and the end of its loan on that stream.

use std::sync::{Arc, Weak};

use gpu_await::{RawQueue, Uses, WorkOutcome};

use super::{CallOwner, LocalRank, Placed, Shrink, Transport};
use crate::call::{Call, Verb};
use crate::element::reduce;
use crate::error::{CollectiveLost, Error, LostCause, ShrinkRefusal};
use crate::exchange::{Inbox, Message, Purpose};
use crate::mesh::Channel;

type Lost<T> = std::result::Result<T, LostCause>;

pub(crate) struct HostTransport {
    channel: Arc<Channel>,
    ranks: Vec<usize>,
    inboxes: Vec<Arc<Inbox>>,
    world: usize,
}

/// A rank's calls of a group, on their way to its stream.
struct Work {
    channel: Arc<Channel>,
    inbox: Arc<Inbox>,
    rank: usize,
    world: usize,
    calls: Vec<Call>,
    outcome: Option<WorkOutcome>,
    owner: Weak<dyn CallOwner>,
}

impl HostTransport {
    pub(crate) fn new(channel: Arc<Channel>, world: usize, ranks: Vec<usize>) -> Self {
        let inboxes = ranks.iter().map(|rank| channel.inbox(*rank)).collect();
        HostTransport { channel, ranks, inboxes, world }
    }
}

impl Transport for HostTransport {
    fn operations(&self) -> u64 {
        // Two for the loan, and one for the function.
        3
    }

    fn submit(
        &self,
        ranks: &[LocalRank],
        parts: &[Placed<'_, '_>],
        owner: &Weak<dyn CallOwner>,
    ) -> Lost<()> {
        for &Placed { at, calls, loan } in parts {
            let local = &ranks[at];
            let work = Work {
                channel: self.channel.clone(),
                inbox: self.inboxes[at].clone(),
                rank: local.rank,
                world: self.world,
                calls: calls.to_vec(),
                outcome: Some(loan.outcome()),
                owner: owner.clone(),
            };
            // SAFETY: the memory of the calls is lent to this stream, behind whose loans the function is; they end behind it.
            let put = unsafe {
                local
                    .stream
                    .enqueue(Uses::new("collective"), |queue, ()| queue.host(move || work.run()))
            };
            put.queued().map_err(|error| LostCause::DeviceLost { rank: local.rank, error })?;
        }
        Ok(())
    }

    fn capture(
        &self,
        (at, local): (usize, &LocalRank),
        queue: &RawQueue<'_>,
        calls: &[Call],
        owner: &Weak<dyn CallOwner>,
    ) -> Result<(), Error> {
        let work = Work {
            channel: self.channel.clone(),
            inbox: self.inboxes[at].clone(),
            rank: local.rank,
            world: self.world,
            calls: calls.to_vec(),
            // The outcomes of its launches belong to the communicator, which is lost if the function fails.
            outcome: None,
            owner: owner.clone(),
        };
        Ok(queue.host_each(move || work.run())?)
    }

    fn kept_by_graphs(&self) -> Arc<()> {
        Arc::default()
    }

    fn can_shrink(&self) -> bool {
        false
    }

    /// Its ranks meet again through their channel.
    fn shrink(&self, _: &[LocalRank], _: Shrink<'_>) -> Result<Box<dyn Transport>, Error> {
        Err(Error::CannotShrink { reason: ShrinkRefusal::NotLinked })
    }

    fn look(&self) -> Option<LostCause> {
        self.inboxes.iter().find_map(|inbox| inbox.failed())
    }

    fn refusal(&self) -> Option<LostCause> {
        let gone = |inbox: &Arc<Inbox>| inbox.ended().filter(|cause| cause.gone().is_some());
        self.look().or_else(|| self.inboxes.iter().find_map(gone))
    }

    fn abort(&self, cause: &LostCause) {
        self.inboxes.iter().for_each(|inbox| inbox.fail(cause.clone()));
        self.channel.fail(&self.ranks, cause);
    }

    fn finish(&self) {
        self.channel.leave(&self.ranks);
    }
}

impl Work {
    fn run(&self) {
        let calls = || self.calls.iter();
        // Nothing is copied if the communicator is lost.
        let done = (self.inbox.failed().map_or(Ok(()), Err))
            .and_then(|()| calls().try_for_each(|call| self.post(call)))
            .and_then(|()| calls().try_for_each(|call| self.finish(call)))
            .and_then(|()| self.inbox.wait_for_room());
        let Err(cause) = done else { return };
        let owner = self.owner.upgrade();
        let cause = owner.map_or(cause.clone(), |owner| owner.fail(cause));
        let error = Error::Lost(CollectiveLost { rank: self.rank, cause });
        if let Some(outcome) = &self.outcome {
            outcome.fail(error.clone());
        }
    }

    /// Sends what others need for a call.
    fn post(&self, call: &Call) -> Lost<()> {
        let own = call.bytes();
        self.sign(call)?;
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

    /// Receives what a call needs from others, and writes its result.
    fn finish(&self, call: &Call) -> Lost<()> {
        let own = call.bytes();
        self.compare(call)?;
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
            // In place there is nothing to do: input and output are the same memory.
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
            Verb::Receive(peer) => {
                self.say_that_it_waits(call, peer)?;
                self.receive_into(call, peer, 0)?;
            }
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
        let data = read(call.from, bytes);
        self.others().try_for_each(|peer| self.post_to(call, peer, data.clone()))
    }

    /// Sends the call's bytes, starting at an offset.
    fn send(&self, call: &Call, peer: usize, at: usize) -> Lost<()> {
        self.post_to(call, peer, read(call.from + at as u64, call.bytes()))
    }

    fn post_to(&self, call: &Call, peer: usize, data: Arc<[u8]>) -> Lost<()> {
        let message = Message { purpose: Purpose::Data, head: call.head(), data };
        self.inbox.sends(peer, &message, matches!(call.verb, Verb::Send(_)));
        self.channel.send(self.rank, peer, message)
    }

    /// Whether all ranks must make the same call.
    fn is_collective(&self, call: &Call) -> bool {
        self.world > 1 && !matches!(call.verb, Verb::Send(_) | Verb::Receive(_))
    }

    /// Sends a call's signature to the next rank of the ring.
    fn sign(&self, call: &Call) -> Lost<()> {
        if !self.is_collective(call) {
            return Ok(());
        }
        self.inbox.calls_one();
        let (purpose, head, data) = (Purpose::Signature, call.head(), Arc::new([]));
        self.channel.send(self.rank, (self.rank + 1) % self.world, Message { purpose, head, data })
    }

    /// Compares a call's signature with that of the previous rank.
    fn compare(&self, call: &Call) -> Lost<()> {
        if !self.is_collective(call) {
            return Ok(());
        }
        let peer = (self.rank + self.world - 1) % self.world;
        self.next(call, peer, Purpose::Signature).map(drop)
    }

    /// Tells a rank that this one is waiting for its send, if it is.
    fn say_that_it_waits(&self, call: &Call, peer: usize) -> Lost<()> {
        if peer == self.rank {
            return Ok(());
        }
        let Some(number) = self.inbox.begins_to_receive(peer) else { return Ok(()) };
        let (purpose, head, data) = (Purpose::Waits(number), call.signature(), Arc::new([]));
        self.channel.send(self.rank, peer, Message { purpose, head, data })
    }

    /// The next message of a rank, which must belong to the same call.
    fn next(&self, call: &Call, peer: usize, purpose: Purpose) -> Lost<Arc<[u8]>> {
        loop {
            let (message, told) = self.inbox.receive(peer, self.is_collective(call))?;
            if told > 0 {
                self.channel.taken(self.rank, peer, told);
            }
            let Message { purpose: theirs, head, data } = message;
            let waits_in_vain = match theirs {
                Purpose::Waits(number) => self.inbox.has_not_sent(peer, number),
                _ => false,
            };
            // The message has come meanwhile.
            if matches!(theirs, Purpose::Waits(_)) && !waits_in_vain {
                continue;
            }
            if head != call.head() || waits_in_vain {
                let calls = [call.signature().to_string(), head.to_string()];
                return Err(LostCause::Mismatch { ranks: [self.rank, peer], calls });
            }
            // If every rank does what it says, both are as expected.
            let expected = if purpose == Purpose::Data { call.message_bytes() } else { 0 };
            if theirs != purpose || data.len() != expected {
                let (found, head) = (data.len(), head.to_string());
                let reason = format!("{theirs:?} for {head} of {found} bytes, not {expected}");
                return Err(LostCause::BadMessage { rank: peer, reason });
            }
            return Ok(data);
        }
    }

    fn receive(&self, call: &Call, peer: usize) -> Lost<Arc<[u8]>> {
        self.next(call, peer, Purpose::Data)
    }

    fn receive_into(&self, call: &Call, peer: usize, at: usize) -> Lost<()> {
        let data = self.receive(call, peer)?;
        write(call.to + at as u64, &data);
        Ok(())
    }

    /// The data of all ranks, in order.
    fn gather(&self, call: &Call, own: Arc<[u8]>) -> Lost<Vec<Arc<[u8]>>> {
        let of = |peer| if peer == self.rank { Ok(own.clone()) } else { self.receive(call, peer) };
        (0..self.world).map(of).collect()
    }
}

fn slices(all: &[Arc<[u8]>]) -> Vec<&[u8]> {
    all.iter().map(|data| &**data).collect()
}

/// A copy of lent memory: input and output may be the same.
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
