//! How ranks of a host twin exchange elements: one [`Inbox`] per rank, into which a [channel](crate::mesh::Channel) puts the messages of others.
//!
//! | a peer | messages that came | after them |
//! |---|---|---|
//! | is there | are received in order | are waited for |
//! | has left | are received in order | its end is the receiver's error, also in a collective call that it did not make |
//! | is gone | are received in order | its end is the error of every call that still waits, for any rank, [a moment](LAST_WORK) later |
//!
//! # Invariants
//! 1. What one rank has sent and another has not taken is bounded by [`ROOM`] and the calls of one group: a rank
//!    waits for [room](Inbox::wait_for_room) after each group (`sends_are_bounded`).
//! 2. Within a group sending never waits for the receiver: concurrent calls cannot wait for one another in a cycle.
//! 3. A waiting rank is woken by a message, by the end of the peer, and by the failure of its communicator.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::call::Head;
use crate::error::LostCause;

/// How many bytes may be in flight from one rank to another before the sender waits.
pub(crate) const ROOM: u64 = 4 << 20;
/// How much a receiver takes before it acknowledges.
const TOLD: u64 = ROOM / 16;
/// How long work that was pending when a process ended may still wait for others: it may be complete there, and nearly so here.
pub(crate) const LAST_WORK: Duration = Duration::from_millis(200);
/// What a message takes besides its data.
const OVERHEAD: u64 = 64;

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Elements of a call that both ranks make.
    Data,
    /// The sender has made a collective call; the receiver compares.
    Signature,
    /// The sender waits for the receiver's send of that number, and sends nothing until it has come.
    Waits(u64),
}

/// What a rank sends to another one.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) purpose: Purpose,
    pub(crate) head: Head,
    pub(crate) data: Arc<[u8]>,
}

impl Message {
    pub(crate) fn cost(&self) -> u64 {
        match self.purpose {
            Purpose::Data => self.data.len() as u64 + OVERHEAD,
            // Few: one per call, each of which is answered, and one per message.
            Purpose::Signature | Purpose::Waits(_) => 0,
        }
    }
}

/// What a rank was sent.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    /// Peers that something is known about.
    peers: HashMap<usize, Peer>,
    failed: Option<LostCause>,
    /// Collective calls that this rank has made.
    calls: u64,
    /// Some peer has ended.
    has_ended: bool,
}

#[derive(Debug)]
struct Ended {
    cause: LostCause,
    /// For a rank that has left: how many collective calls it made.
    calls: Option<u64>,
    since: Instant,
}

#[derive(Debug, Default)]
struct Peer {
    messages: VecDeque<Message>,
    ended: Option<Ended>,
    /// Bytes sent to it that it has not taken.
    on_the_way: u64,
    /// Bytes taken from it that it has not been told about.
    untold: u64,
    /// How many sends to it and receives from it there were.
    sends: u64,
    receives: u64,
}

impl Inbox {
    pub(crate) fn new() -> Arc<Inbox> {
        Arc::default()
    }

    pub(crate) fn push(&self, from: usize, message: Message) {
        let mut state = self.state.lock();
        let messages = &mut state.peers.entry(from).or_default().messages;
        let waits = |message: &Message| matches!(message.purpose, Purpose::Waits(_));
        // The latest of them supersedes the others.
        if waits(&message) && messages.back().is_some_and(waits) {
            messages.pop_back();
        }
        messages.push_back(message);
        drop(state);
        self.changed.notify_all();
    }

    /// Nothing more comes from that rank; `calls` is how many collective calls it made, if it left. The first reason counts.
    pub(crate) fn end_of(&self, from: usize, cause: LostCause, calls: Option<u64>) {
        let ended = Ended { cause, calls, since: Instant::now() };
        let mut state = self.state.lock();
        state.has_ended = true;
        state.peers.entry(from).or_default().ended.get_or_insert(ended);
        drop(state);
        self.changed.notify_all();
    }

    /// This rank makes a collective call.
    pub(crate) fn calls_one(&self) {
        self.state.lock().calls += 1;
    }

    pub(crate) fn calls(&self) -> u64 {
        self.state.lock().calls
    }

    /// Nothing is received any more. The first reason counts.
    pub(crate) fn fail(&self, cause: LostCause) {
        self.state.lock().failed.get_or_insert(cause);
        self.changed.notify_all();
    }

    pub(crate) fn failed(&self) -> Option<LostCause> {
        self.state.lock().failed.clone()
    }

    /// The end of a peer, if one has ended: preferably one whose process is gone.
    pub(crate) fn ended(&self) -> Option<LostCause> {
        let state = self.state.lock();
        let ended = || state.peers.values().filter_map(|peer| Some(&peer.ended.as_ref()?.cause));
        let gone = ended().find(|cause| cause.gone().is_some());
        gone.or_else(|| ended().next()).cloned()
    }

    /// Counts a message as in flight to a rank.
    pub(crate) fn sends(&self, to: usize, message: &Message, is_send: bool) {
        let mut state = self.state.lock();
        let peer = state.peers.entry(to).or_default();
        peer.on_the_way += message.cost();
        peer.sends += u64::from(is_send);
    }

    /// A rank has taken this many bytes.
    pub(crate) fn took(&self, peer: usize, bytes: u64) {
        if let Some(peer) = self.state.lock().peers.get_mut(&peer) {
            peer.on_the_way = peer.on_the_way.saturating_sub(bytes);
        }
        self.changed.notify_all();
    }

    /// Waits until no rank has more in flight than there is room for.
    pub(crate) fn wait_for_room(&self) -> std::result::Result<(), LostCause> {
        let mut state = self.state.lock();
        loop {
            if let Some(cause) = &state.failed {
                return Err(cause.clone());
            }
            let mut full = state.peers.values().filter(|peer| peer.on_the_way > ROOM);
            let Some(first) = full.next() else { return Ok(()) };
            if let Some(ended) = &first.ended {
                return Err(ended.cause.clone());
            }
            self.wait(&mut state, false)?;
        }
    }

    /// Waits until something has changed, or waiting has become futile.
    fn wait(
        &self,
        state: &mut MutexGuard<'_, InboxState>,
        is_collective: bool,
    ) -> std::result::Result<(), LostCause> {
        match state.doom(is_collective) {
            Some((cause, at)) if at <= Instant::now() => return Err(cause),
            Some((_, at)) => drop(self.changed.wait_until(state, at)),
            None => self.changed.wait(state),
        }
        Ok(())
    }

    /// Counts a receive from a rank, and returns its number if it has to wait.
    pub(crate) fn begins_to_receive(&self, from: usize) -> Option<u64> {
        let mut state = self.state.lock();
        let peer = state.peers.entry(from).or_default();
        peer.receives += 1;
        peer.messages.is_empty().then_some(peer.receives)
    }

    /// Whether a rank that waits for that send waits in vain, because it has not been made.
    pub(crate) fn has_not_sent(&self, to: usize, number: u64) -> bool {
        self.state.lock().peers.get(&to).is_none_or(|peer| peer.sends < number)
    }

    /// Waits for the next message of that rank; also returns how many taken bytes to acknowledge to its sender.
    /// `is_collective`: the waiting call is one of all ranks.
    pub(crate) fn receive(
        &self,
        from: usize,
        is_collective: bool,
    ) -> std::result::Result<(Message, u64), LostCause> {
        let mut state = self.state.lock();
        loop {
            if let Some(cause) = &state.failed {
                return Err(cause.clone());
            }
            let peer = state.peers.entry(from).or_default();
            if let Some(message) = peer.messages.pop_front() {
                peer.untold += message.cost();
                let told = if peer.untold < TOLD { 0 } else { std::mem::take(&mut peer.untold) };
                return Ok((message, told));
            }
            if let Some(ended) = &peer.ended {
                return Err(ended.cause.clone());
            }
            self.wait(&mut state, is_collective)?;
        }
    }
}

impl InboxState {
    /// The end of a rank that makes waiting for others futile, and from when on.
    fn doom(&self, is_collective: bool) -> Option<(LostCause, Instant)> {
        if !self.has_ended {
            return None;
        }
        let ended = self.peers.values().filter_map(|peer| peer.ended.as_ref());
        let doom = |ended: &Ended| match ended.calls {
            None => Some((ended.cause.clone(), ended.since + LAST_WORK)),
            Some(calls) => {
                (is_collective && calls < self.calls).then(|| (ended.cause.clone(), ended.since))
            }
        };
        ended.filter_map(doom).min_by_key(|(_, at)| *at)
    }
}
