//! [`Coordinator`]: the process that the others of a world come to. It knows which have come, and when all are connected: for a group it is rank
//! 0's process, and for an id the one that made it, whose own ranks come to it as others do.
//!
//! | stage | left when | a visitor that ends |
//! |---|---|---|
//! | ranks come | all are there: each is sent the table | is forgotten: its ranks may come again |
//! | they connect | all have said that they are connected: each is told to go on | ends it for all |
//!
//! A visitor ends when its connection does, or when it stays past its own limit, as a stopped process does. Shortly before that limit it is told
//! which ranks are missing.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::acceptor::{Acceptor, Come};
use super::hello::{Entry, Hello, Tag, ranks_of};
use super::{
    CONNECTED, DUPLICATE, ENDED, GO, HELLO, LAST_WORDS, MISSING, Meeting, NAP, OTHER_WORLD, Peer,
    STATUS, TABLE, WELCOME, is_not_yet,
};
use crate::error::{Error, Result};

/// How many refusals are remembered.
const MOST_REFUSED: usize = 16;

pub(super) struct Coordinator {
    world: usize,
    /// Ranks that are here from the start.
    own: Vec<usize>,
    visitors: Vec<Visitor>,
    /// The errors of refused processes.
    refused: Vec<Error>,
    is_complete: bool,
}

/// The outcome of a turn.
pub(super) enum Turn {
    /// Ranks are still coming.
    Coming,
    /// All are there, and are connecting.
    Connecting,
    /// All have connected, and were told to go on.
    Connected(Vec<Peer>),
    /// These ended while all were connecting, and the others were told.
    Ended(Vec<usize>),
}

/// A process that has come.
struct Visitor {
    entry: Entry,
    stream: TcpStream,
    /// When to tell it which ranks are missing.
    tell_at: Option<Instant>,
    /// When it should be gone.
    end: Option<Instant>,
    out: Vec<u8>,
    is_connected: bool,
}

impl Meeting {
    /// Waits for the others of a group, until all are connected.
    pub(super) fn listen(&self) -> Result<Vec<Peer>> {
        let bad = |error: std::io::Error| self.bad(&error);
        let addresses = self.resolve(&self.address)?;
        if self.ranks.len() == self.world {
            return Ok(Vec::new());
        }
        let listener = TcpListener::bind(&addresses[..]).map_err(bad)?;
        let mut acceptor = Some(Acceptor::new(listener).map_err(bad)?);
        let mut coordinator = Coordinator::new(self.world, self.ranks.clone());
        loop {
            let come = acceptor.as_mut().map(Acceptor::poll).unwrap_or_default();
            match coordinator.turn() {
                Turn::Coming => {}
                // From here on neither strangers nor latecomers are heard.
                Turn::Connecting => acceptor = None,
                Turn::Connected(peers) => return Ok(peers),
                Turn::Ended(ranks) => return Err(self.ended(ranks)),
            }
            let of_group = come.into_iter().filter(|come| come.hello.tag == Tag::default());
            of_group.for_each(|come| coordinator.welcome(come));
            if self.patience.is_over() {
                let missing = coordinator.missing();
                // A process that gives up only ends its connections.
                if self.patience.is_wanted() {
                    coordinator.say_last(&ranks_of(MISSING, &missing));
                }
                let (limit, refused) = (self.patience.limit, coordinator.refused);
                return Err(Error::MissingRanks { missing, world: self.world, limit, refused });
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Coordinator {
    pub(super) fn new(world: usize, own: Vec<usize>) -> Coordinator {
        let (visitors, refused) = (Vec::new(), Vec::new());
        Coordinator { world, own, visitors, refused, is_complete: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.visitors.is_empty()
    }

    /// Reads from the visitors, and tells them what they wait for; does not block. Runs before new ones are [welcomed](Self::welcome): a
    /// process that has ended may come again.
    pub(super) fn turn(&mut self) -> Turn {
        if !self.is_complete {
            self.visitors.retain_mut(Visitor::turn);
            let here = self.visitors.iter().map(|visitor| visitor.entry.ranks.len());
            if self.own.len() + here.sum::<usize>() < self.world {
                self.tell_who_is_missing();
                return Turn::Coming;
            }
            self.is_complete = true;
            self.visitors.sort_by_key(|visitor| visitor.entry.ranks.iter().min().copied());
            let mut table = vec![TABLE];
            table.extend((self.visitors.len() as u32).to_le_bytes());
            self.visitors.iter().for_each(|visitor| visitor.entry.put(&mut table));
            self.visitors.iter_mut().for_each(|visitor| visitor.out.extend(&table));
        }
        if let Some(at) = self.visitors.iter_mut().position(|visitor| !visitor.turn()) {
            let gone = self.visitors.remove(at).entry.ranks;
            self.say_last(&ranks_of(ENDED, &gone));
            return Turn::Ended(gone);
        }
        if !self.visitors.iter().all(|visitor| visitor.is_connected) {
            self.tell_who_is_missing();
            return Turn::Connecting;
        }
        self.say_last(&[GO]);
        let peer = |Visitor { entry, stream, .. }| Peer { ranks: entry.ranks, stream };
        Turn::Connected(self.visitors.drain(..).map(peer).collect())
    }

    /// A process has come. It is refused if one of its ranks is here already, or its world is a different one.
    pub(super) fn welcome(&mut self, Come { hello, mut stream, from }: Come) {
        let Hello { tag: _, world, limit, port, ranks } = hello;
        let (expected, here) = (self.world, self.ranks_of(|_| true));
        let (error, code, number) = if world != expected {
            let error = Error::WrongWorld { rank: ranks[0], expected, found: world };
            (error, OTHER_WORLD, expected)
        } else if let Some(rank) = ranks.iter().find(|rank| here.contains(rank)).copied() {
            (Error::DuplicateRank { rank }, DUPLICATE, rank)
        } else {
            let entry = Entry { address: SocketAddr::new(from.ip(), port).to_string(), ranks };
            // Early enough for the message to arrive.
            let margin = (limit / 8).clamp(NAP, Duration::from_millis(500));
            let after = |wait| Instant::now().checked_add(wait);
            let (tell_at, end) = (after(limit.saturating_sub(margin)), after(limit + HELLO));
            let (out, is_connected) = (vec![WELCOME], false);
            self.visitors.push(Visitor { entry, stream, tell_at, end, out, is_connected });
            return;
        };
        if self.refused.len() < MOST_REFUSED {
            self.refused.push(error);
        }
        // A new connection has room for a few bytes.
        stream.write_all(&[&[code][..], &(number as u32).to_le_bytes()].concat()).ok();
    }

    /// The ranks of this process and of the chosen visitors.
    fn ranks_of(&self, is_one: impl Fn(&Visitor) -> bool) -> HashSet<usize> {
        let visitors = self.visitors.iter().filter(|visitor| is_one(visitor));
        visitors.flat_map(|visitor| &visitor.entry.ranks).chain(&self.own).copied().collect()
    }

    /// The ranks that have not come or, where all have, not connected.
    fn missing(&self) -> Vec<usize> {
        let here = self.ranks_of(|visitor| !self.is_complete || visitor.is_connected);
        (0..self.world).filter(|rank| !here.contains(rank)).collect()
    }

    /// Tells the visitors whose limit is near.
    fn tell_who_is_missing(&mut self) {
        let now = Instant::now();
        let is_due = |visitor: &Visitor| visitor.tell_at.is_some_and(|at| at <= now);
        if self.visitors.iter().any(is_due) {
            let status = ranks_of(STATUS, &self.missing());
            for visitor in self.visitors.iter_mut().filter(|visitor| is_due(visitor)) {
                visitor.tell_at = None;
                visitor.out.extend(&status);
            }
        }
    }

    /// Tells all visitors, without waiting long.
    fn say_last(&mut self, bytes: &[u8]) {
        self.visitors.iter_mut().for_each(|visitor| visitor.out.extend(bytes));
        let end = Instant::now() + LAST_WORDS;
        loop {
            let mut unsaid = 0;
            for visitor in &mut self.visitors {
                unsaid += usize::from(visitor.flush() && !visitor.out.is_empty());
            }
            if unsaid == 0 || Instant::now() >= end {
                return;
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Visitor {
    /// Writes and reads what it can. Returns false if the visitor has ended.
    fn turn(&mut self) -> bool {
        if !self.flush() || self.end.is_some_and(|end| end <= Instant::now()) {
            return false;
        }
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(1) if byte == [CONNECTED] => {
                self.is_connected = true;
                true
            }
            Ok(_) => false,
            Err(error) => is_not_yet(&error),
        }
    }

    /// Returns false if the visitor has ended.
    fn flush(&mut self) -> bool {
        while !self.out.is_empty() {
            match self.stream.write(&self.out) {
                Ok(0) => return false,
                Ok(written) => drop(self.out.drain(..written)),
                Err(error) => return is_not_yet(&error),
            }
        }
        true
    }
}
