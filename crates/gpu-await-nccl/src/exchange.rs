//! How ranks of a host twin exchange elements: an [`Inbox`] a rank, and a [`Wire`] that puts messages into those of others.
//!
//! | a peer | messages that came | after them |
//! |---|---|---|
//! | is there | are received in order | are waited for |
//! | has ended | are received in order | its end is the receiver's error |
//!
//! # Invariants
//! 1. Sending never waits for the receiver to receive: inboxes have no bound. So calls that are made at once cannot wait for one
//!    another in a circle.
//! 2. Who waits is woken by a message, by the end of the peer, and by the failure of its communicator.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::call::Head;
use crate::error::{Error, LostCause, Result};
use crate::unique_id::UniqueId;

/// What a rank sends to another one for a call of both.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) head: Head,
    pub(crate) data: Arc<[u8]>,
}

/// How the ranks of a communicator reach one another.
pub(crate) trait Wire: fmt::Debug + Send + Sync {
    /// The inbox of a rank of this process.
    fn inbox(&self, rank: usize) -> Arc<Inbox>;

    fn send(&self, from: usize, to: usize, message: Message) -> std::result::Result<(), LostCause>;

    /// Tells the other ranks that this one aborted the communicator.
    fn abort(&self, from: usize);

    /// Tells the other ranks that this one sends nothing more.
    fn leave(&self, from: usize);

    /// The next way between the ranks that are left when some are excluded, whatever became of this one. Those of this process that
    /// are left, at least one, take it together.
    fn without(&self, excluded: &[usize], ranks: &[usize]) -> Arc<dyn Wire>;
}

/// What a rank was sent.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Debug)]
struct InboxState {
    peers: Vec<Peer>,
    failed: Option<LostCause>,
}

#[derive(Debug, Default)]
struct Peer {
    messages: VecDeque<Message>,
    ended: Option<LostCause>,
}

impl Inbox {
    pub(crate) fn new(world: usize) -> Arc<Inbox> {
        let peers = (0..world).map(|_| Peer::default()).collect();
        let state = Mutex::new(InboxState { peers, failed: None });
        Arc::new(Inbox { state, changed: Condvar::new() })
    }

    pub(crate) fn push(&self, from: usize, message: Message) {
        if let Some(peer) = self.state.lock().peers.get_mut(from) {
            peer.messages.push_back(message);
        }
        self.changed.notify_all();
    }

    /// Nothing more comes from that rank. The first reason counts.
    pub(crate) fn end_of(&self, from: usize, cause: LostCause) {
        if let Some(peer) = self.state.lock().peers.get_mut(from) {
            peer.ended.get_or_insert(cause);
        }
        self.changed.notify_all();
    }

    /// Nothing is received any more. The first reason counts.
    pub(crate) fn fail(&self, cause: LostCause) {
        self.state.lock().failed.get_or_insert(cause);
        self.changed.notify_all();
    }

    pub(crate) fn failed(&self) -> Option<LostCause> {
        self.state.lock().failed.clone()
    }

    /// The end of a peer, if one has ended.
    pub(crate) fn ended(&self) -> Option<LostCause> {
        self.state.lock().peers.iter().find_map(|peer| peer.ended.clone())
    }

    /// Waits for the next message of that rank.
    pub(crate) fn receive(&self, from: usize) -> std::result::Result<Message, LostCause> {
        self.receive_until(from, None).map_err(|cause| cause.unwrap_or(LostCause::Aborted))
    }

    /// [`receive`](Self::receive), for a time; without a cause it is over.
    pub(crate) fn receive_until(
        &self,
        from: usize,
        end: Option<Instant>,
    ) -> std::result::Result<Message, Option<LostCause>> {
        let mut state = self.state.lock();
        loop {
            if let Some(cause) = &state.failed {
                return Err(Some(cause.clone()));
            }
            let peer = &mut state.peers[from];
            if let Some(message) = peer.messages.pop_front() {
                return Ok(message);
            }
            if let Some(cause) = &peer.ended {
                return Err(Some(cause.clone()));
            }
            match end {
                None => self.changed.wait(&mut state),
                Some(end) if Instant::now() >= end => return Err(None),
                Some(end) => drop(self.changed.wait_until(&mut state, end)),
            }
        }
    }
}

/// The ranks of one process.
pub(crate) struct Hub {
    inboxes: Vec<Arc<Inbox>>,
    state: Mutex<Vec<bool>>,
    joined: Condvar,
    children: Mutex<Vec<Child>>,
}

/// A hub for some ranks of one, until each of them has taken it.
struct Child {
    hub: Arc<Hub>,
    excluded: Vec<usize>,
    /// Who has not taken it.
    absent: Vec<usize>,
}

/// Communicators that are coming together in this process, by their ids.
static HUBS: Mutex<Option<HashMap<UniqueId, Arc<Hub>>>> = Mutex::new(None);

impl Hub {
    /// Waits until every rank has come.
    pub(crate) fn join(
        id: UniqueId,
        world: usize,
        ranks: &[usize],
        end: Instant,
        limit: Duration,
    ) -> Result<Arc<dyn Wire>> {
        let hub = {
            let mut hubs = HUBS.lock();
            let hubs = hubs.get_or_insert_default();
            hubs.entry(id).or_insert_with(|| Hub::new(world)).clone()
        };
        let expected = hub.inboxes.len();
        if expected != world {
            return Err(Error::WrongWorld { rank: ranks[0], expected, found: world });
        }
        let mut here = hub.state.lock();
        if let Some(rank) = ranks.iter().find(|rank| here[**rank]) {
            return Err(Error::DuplicateRank { rank: *rank });
        }
        ranks.iter().for_each(|rank| here[*rank] = true);
        hub.joined.notify_all();
        while here.contains(&false) {
            if hub.joined.wait_until(&mut here, end).timed_out() && here.contains(&false) {
                let missing = (0..world).filter(|rank| !here[*rank]).collect();
                // They may try again.
                ranks.iter().for_each(|rank| here[*rank] = false);
                if !here.contains(&true) {
                    drop(here);
                    HUBS.lock().as_mut().and_then(|hubs| hubs.remove(&id));
                }
                return Err(Error::MissingRanks { missing, world, limit });
            }
        }
        drop(here);
        // An id is good for one communicator.
        HUBS.lock().as_mut().and_then(|hubs| hubs.remove(&id));
        Ok(hub)
    }

    pub(crate) fn new(world: usize) -> Arc<Hub> {
        let inboxes = (0..world).map(|_| Inbox::new(world)).collect();
        let (state, joined) = (Mutex::new(vec![false; world]), Condvar::new());
        Arc::new(Hub { inboxes, state, joined, children: Mutex::default() })
    }

    fn others(&self, from: usize) -> impl Iterator<Item = &Arc<Inbox>> {
        self.inboxes.iter().enumerate().filter(move |(rank, _)| *rank != from).map(|(_, to)| to)
    }
}

impl Wire for Hub {
    fn inbox(&self, rank: usize) -> Arc<Inbox> {
        self.inboxes[rank].clone()
    }

    fn send(&self, from: usize, to: usize, message: Message) -> std::result::Result<(), LostCause> {
        self.inboxes[to].push(from, message);
        Ok(())
    }

    fn abort(&self, from: usize) {
        self.others(from).for_each(|to| to.fail(LostCause::PeerAborted { rank: from }));
    }

    fn leave(&self, from: usize) {
        self.others(from).for_each(|to| to.end_of(from, LostCause::PeerLeft { rank: from }));
    }

    fn without(&self, excluded: &[usize], ranks: &[usize]) -> Arc<dyn Wire> {
        let mut children = self.children.lock();
        let is_next = |child: &Child| {
            child.excluded == excluded && ranks.iter().all(|rank| child.absent.contains(rank))
        };
        let at = children.iter().position(is_next).unwrap_or_else(|| {
            let left = (0..self.inboxes.len()).filter(|rank| !excluded.contains(rank));
            let absent: Vec<usize> = left.collect();
            let (hub, excluded) = (Hub::new(absent.len()), excluded.to_vec());
            children.push(Child { hub, excluded, absent });
            children.len() - 1
        });
        let child = &mut children[at];
        let hub = child.hub.clone();
        child.absent.retain(|rank| !ranks.contains(rank));
        if child.absent.is_empty() {
            children.remove(at);
        }
        hub
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("world", &self.inboxes.len()).finish()
    }
}
