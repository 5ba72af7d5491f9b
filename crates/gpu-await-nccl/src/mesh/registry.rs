//! [`Registry`]: what the readers of a mesh have heard, and which channel is to hear it.
//!
//! | a process, for a channel | means |
//! |---|---|
//! | hello | it connects |
//! | ready | it has heard every hello, and goes on unless a process gives up |
//! | gave up | it does not connect this channel: all of them go on to the next channel of these members |
//!
//! # Invariants
//! 1. What is kept for channels that are not open is bounded for each connection, and contains no data (`early_frames_are_bounded`).
//! 2. The end of a process is entered before anything fails because of it: a caller that awaits the failure finds the rank in `gone`.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::frame::{Arrival, Frame, Label, Proposal};
use crate::error::LostCause;
use crate::exchange::Inbox;

/// For how many channels that are not open a connection's frames are kept.
const MOST_EARLY: usize = 4096;

/// The inboxes of this process, by ranks of a channel.
pub(super) type Inboxes = Arc<HashMap<usize, Arc<Inbox>>>;

#[derive(Default)]
pub(super) struct Registry {
    pub(super) state: Mutex<RegistryState>,
    /// A process has come, is ready, gave up, ended, or proposed something.
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub(super) struct RegistryState {
    /// The ranks of each connection.
    pub(super) links: Vec<Vec<usize>>,
    pub(super) open: HashMap<u64, OpenChannel>,
    /// By connection, then by number: channels that are not open.
    early: HashMap<usize, BTreeMap<u64, Party>>,
    /// How many channels there have been, by the hash of their members.
    made: HashMap<u32, u32>,
    /// Ranks whose processes have ended.
    pub(super) ended: HashMap<usize, End>,
    /// Connections that have ended, or whose processes know that they are left out.
    pub(super) noted: HashSet<usize>,
    /// By connection.
    pub(super) proposals: HashMap<usize, Proposal>,
    pub(super) generation: u64,
}

/// How a process ended.
#[derive(Clone, Debug)]
pub(super) enum End {
    /// It said goodbye.
    Left,
    Gone,
    /// It was disconnected, because it sent something that is not a message.
    Junk(String),
}

impl End {
    pub(super) fn cause(&self, rank: usize) -> LostCause {
        match self {
            End::Left => LostCause::PeerLeft { rank },
            End::Gone => LostCause::PeerGone { rank },
            End::Junk(reason) => LostCause::BadMessage { rank, reason: reason.clone() },
        }
    }
}

/// What another process has said about a channel.
#[derive(Clone, Debug, Default)]
pub(super) struct Party {
    pub(super) hello: Option<Arrival>,
    pub(super) is_ready: bool,
    pub(super) gave_up: bool,
}

pub(super) struct OpenChannel {
    pub(super) inboxes: Inboxes,
    /// Ranks of the mesh, indexed by ranks in the channel; in ascending order.
    pub(super) members: Arc<[usize]>,
    /// By connection.
    pub(super) parties: HashMap<usize, Party>,
    /// Every process is ready.
    pub(super) is_complete: bool,
}

impl Registry {
    /// Opens the next channel of these members that nobody has given up.
    pub(super) fn open_next(
        &self,
        epoch: u64,
        members: &Arc<[usize]>,
        own: &[usize],
    ) -> (u64, Inboxes) {
        // FNV-1a: the same in every process.
        let step = |hash: u32, word: u32| (hash ^ word).wrapping_mul(0x0100_0193);
        let words = members.iter().map(|member| *member as u32);
        let epoch = [epoch as u32, (epoch >> 32) as u32];
        let key = epoch.into_iter().chain(words).fold(0x811c_9dc5, step);
        let mut state = self.state.lock();
        loop {
            let made = state.made.entry(key).or_default();
            *made += 1;
            let number = u64::from(key) << 32 | u64::from(*made);
            let mut parties = HashMap::new();
            for (link, channels) in &mut state.early {
                if let Some(party) = channels.remove(&number) {
                    parties.insert(*link, party);
                }
            }
            if !parties.values().any(|party| party.gave_up) {
                return (number, state.open(number, members, own, parties));
            }
        }
    }

    pub(super) fn close(&self, number: u64) {
        self.state.lock().open.remove(&number);
    }

    /// Whether elements for a channel are wanted, and may come from that connection.
    pub(super) fn takes(&self, link: usize, number: u64) -> bool {
        let state = self.state.lock();
        let party = state.open.get(&number).and_then(|channel| channel.parties.get(&link));
        party.is_some_and(|party| party.is_ready)
    }

    /// Handles a frame of a connection; false if it is not one that may arrive there.
    pub(super) fn deliver(&self, link: usize, label: Label, frame: Frame) -> bool {
        let mut state = self.state.lock();
        let is_good = state.deliver(link, label, frame);
        drop(state);
        self.changed.notify_all();
        is_good
    }

    /// Waits until the reader of a broken connection has reached its end: it may first have to read why the peer has gone.
    pub(super) fn await_end(&self, ranks: &[usize]) {
        let mut state = self.state.lock();
        while !ranks.iter().all(|rank| state.ended.contains_key(rank)) {
            self.changed.wait(&mut state);
        }
    }

    /// The connection to a process has ended.
    pub(super) fn end(&self, link: usize, ranks: &[usize], end: &End) {
        let mut state = self.state.lock();
        state.noted.insert(link);
        state.end(ranks, end);
        drop(state);
        self.changed.notify_all();
    }
}

impl RegistryState {
    fn open(
        &mut self,
        number: u64,
        members: &Arc<[usize]>,
        own: &[usize],
        parties: HashMap<usize, Party>,
    ) -> Inboxes {
        let place = |own: &usize| members.binary_search(own).ok();
        let inboxes: HashMap<_, _> =
            own.iter().filter_map(place).map(|rank| (rank, Inbox::new())).collect();
        let inboxes = Arc::new(inboxes);
        let (members, is_complete) = (members.clone(), false);
        let channel = OpenChannel { inboxes: inboxes.clone(), members, parties, is_complete };
        self.ended.iter().for_each(|(member, end)| channel.end(*member, end));
        self.open.insert(number, channel);
        inboxes
    }

    /// The rank that called first, if another process has called for an agreement that this process has not yet been called for.
    pub(super) fn caller(&self, link: usize) -> Option<usize> {
        let theirs = self.proposals.get(&link)?;
        (theirs.generation > self.generation).then_some(theirs.caller)
    }

    pub(super) fn end(&mut self, ranks: &[usize], end: &End) {
        for rank in ranks {
            self.ended.entry(*rank).or_insert_with(|| end.clone());
        }
        for (rank, channel) in ranks.iter().flat_map(|r| self.open.values().map(move |c| (r, c))) {
            channel.end(*rank, end);
        }
    }

    fn deliver(&mut self, link: usize, label: Label, frame: Frame) -> bool {
        let Label { number, from, to, .. } = label;
        if let Frame::Agree(proposal) = frame {
            self.proposals.insert(link, proposal);
            return true;
        }
        if let Frame::Noted = frame {
            self.noted.insert(link);
            return true;
        }
        let Some(channel) = self.open.get_mut(&number) else {
            self.keep(link, number, frame);
            return true;
        };
        match frame {
            Frame::Hello(hello) => channel.parties.entry(link).or_default().hello = Some(hello),
            Frame::Ready => channel.parties.entry(link).or_default().is_ready = true,
            Frame::GaveUp => {
                channel.parties.entry(link).or_default().gave_up = true;
                // It ran out of time while the last word was on its way.
                let place = |rank| channel.members.binary_search(rank).ok();
                let rank = self.links[link].iter().find_map(place);
                if let (true, Some(rank)) = (channel.is_complete, rank) {
                    channel.fail(&LostCause::PeerLeft { rank });
                }
            }
            frame => {
                // A rank speaks only for itself.
                let speaks =
                    channel.members.get(from).is_some_and(|m| self.links[link].contains(m));
                return speaks && self.deliver_open(number, from, to, frame);
            }
        }
        true
    }

    /// Handles what ranks of a channel say to one another.
    fn deliver_open(&mut self, number: u64, from: usize, to: usize, frame: Frame) -> bool {
        let Some(channel) = self.open.get(&number) else { return true };
        match frame {
            Frame::Message(message) => match channel.inboxes.get(&to) {
                Some(inbox) => inbox.push(from, message),
                None => return false,
            },
            Frame::Taken(bytes) => match channel.inboxes.get(&to) {
                Some(inbox) => inbox.took(from, bytes),
                None => return false,
            },
            Frame::Leave(calls) => {
                let cause = || LostCause::PeerLeft { rank: from };
                channel.inboxes.values().for_each(|inbox| inbox.end_of(from, cause(), Some(calls)));
            }
            Frame::Lost(bytes) => {
                let members = channel.members.clone();
                let Some(cause) = LostCause::from_bytes(&bytes, members.len()) else {
                    return false;
                };
                if let Some(rank) = cause.gone()
                    && !channel.inboxes.contains_key(&rank)
                {
                    let is_in = |ranks: &&Vec<usize>| ranks.contains(&members[rank]);
                    let ranks = self.links.iter().find(is_in).cloned().unwrap_or_default();
                    self.end(&ranks, &End::Gone);
                }
                if let Some(channel) = self.open.get(&number) {
                    channel.fail(&cause);
                }
            }
            _ => {}
        }
        true
    }

    /// Keeps a frame for a channel that is not open yet, which excludes channels that were closed or skipped.
    fn keep(&mut self, link: usize, number: u64, frame: Frame) {
        let made = self.made.get(&((number >> 32) as u32)).copied().unwrap_or_default();
        if number as u32 <= made {
            return;
        }
        let channels = self.early.entry(link).or_default();
        let party = match frame {
            Frame::Hello(hello) => Party { hello: Some(hello), ..Party::default() },
            Frame::GaveUp => Party { gave_up: true, ..Party::default() },
            // A process is ready only once it has heard of this one.
            _ => return,
        };
        channels.insert(number, party);
        if channels.len() > MOST_EARLY {
            channels.pop_first();
        }
    }
}

impl OpenChannel {
    fn fail(&self, cause: &LostCause) {
        self.inboxes.values().for_each(|inbox| inbox.fail(cause.clone()));
    }

    fn end(&self, member: usize, end: &End) {
        let Ok(rank) = self.members.binary_search(&member) else { return };
        let calls = if let End::Left = end { Some(0) } else { None };
        self.inboxes.values().for_each(|inbox| inbox.end_of(rank, end.cause(rank), calls));
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Kind;
    use super::*;
    use crate::unique_id::UniqueId;

    #[test]
    fn early_frames_are_bounded() {
        let registry = Registry::default();
        registry.state.lock().links = vec![vec![1]];
        let members: Arc<[usize]> = [0, 1].into();
        let (first, _) = registry.open_next(0, &members, &[0]);
        registry.close(first);
        let hello = || {
            let id = UniqueId::of_group();
            Frame::Hello(Arrival { ranks: Vec::new(), is_gpu: false, shrink: false, id })
        };
        for at in 0..3 * MOST_EARLY as u64 {
            assert!(registry.deliver(0, Label::of(first + 1 + at, Kind::Hello), hello()));
            assert!(!registry.takes(0, first + 1 + at), "no elements");
            // A channel that is over is forgotten.
            assert!(registry.deliver(0, Label::of(first, Kind::Hello), hello()));
        }
        assert_eq!(registry.state.lock().early[&0].len(), MOST_EARLY);
    }

    /// A rank that is reported gone is gone, whatever its own connection says.
    #[test]
    fn told_to_be_gone() {
        let registry = Registry::default();
        registry.state.lock().links = vec![vec![1], vec![2, 3]];
        let members: Arc<[usize]> = (0..4).collect();
        let (number, inboxes) = registry.open_next(0, &members, &[0]);
        let bytes = LostCause::PeerGone { rank: 3 }.to_bytes();
        let label = Label { from: 1, ..Label::of(number, Kind::Lost) };
        assert!(registry.deliver(0, label, Frame::Lost(bytes.clone())));
        assert!(matches!(inboxes[&0].failed(), Some(LostCause::PeerGone { rank: 3 })));
        let ended = |rank| registry.state.lock().ended.contains_key(&rank);
        assert_eq!([1, 2, 3].map(ended), [false, true, true], "of one process");
        // A rank speaks only for itself.
        let label = Label { from: 2, ..Label::of(number, Kind::Lost) };
        assert!(!registry.deliver(0, label, Frame::Lost(bytes)));
    }

    /// A process that gave up a channel goes on to the next one, and so do the others, even those that have not come yet.
    #[test]
    fn a_channel_that_was_given_up() {
        let registry = Registry::default();
        registry.state.lock().links = vec![vec![1]];
        let members: Arc<[usize]> = [0, 1].into();
        let (first, _) = registry.open_next(0, &members, &[0]);
        for number in [first + 1, first + 2] {
            assert!(registry.deliver(0, Label::of(number, Kind::GaveUp), Frame::GaveUp));
        }
        let (next, _) = registry.open_next(0, &members, &[0]);
        assert_eq!(next, first + 3);
        let (other, _) = registry.open_next(1, &members, &[0]);
        assert_ne!(other >> 32, first >> 32, "of another agreement");
    }
}
