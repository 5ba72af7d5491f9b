//! The side of the process with rank 0.
//!
//! | stage | left when | a visitor that ends |
//! |---|---|---|
//! | ranks come | all are there: each is sent the table | is forgotten: its ranks may come again |
//! | they connect | all have said that they are connected: each is told to go on | ends it for all |
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::{
    CONNECTED, DUPLICATE, ENDED, Entry, GO, Hello, MISSING, Meeting, NAP, OTHER_WORLD, Peer,
    STATUS, TABLE, WELCOME, is_not_yet, margin, ranks_of,
};
use crate::error::{Error, Result};

/// How many refusals are remembered.
const MOST_REFUSED: usize = 16;
/// How long last words may take.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A process that has come.
struct Visitor {
    ranks: Vec<usize>,
    stream: TcpStream,
    entry: Entry,
    /// When it wants to know who is missing.
    tell_at: Option<Instant>,
    out: Vec<u8>,
    is_connected: bool,
}

enum Said {
    Nothing,
    Connected,
    Ended,
}

struct First<'a> {
    meeting: &'a Meeting,
    visitors: Vec<Visitor>,
    /// What was wrong with others.
    refused: Vec<Error>,
}

impl Meeting {
    /// Waits for the others, until all are connected.
    pub(super) fn listen(&self) -> Result<Vec<Peer>> {
        let bad = |error: std::io::Error| self.bad(&error);
        let addresses = self.resolve(&self.address)?;
        if self.ranks.len() == self.world {
            return Ok(Vec::new());
        }
        let listener = TcpListener::bind(&addresses[..]).map_err(bad)?;
        let acceptor = Acceptor::new(listener).map_err(bad)?;
        First { meeting: self, visitors: Vec::new(), refused: Vec::new() }.run(acceptor)
    }
}

impl First<'_> {
    fn run(mut self, mut acceptor: Acceptor) -> Result<Vec<Peer>> {
        loop {
            let come = acceptor.poll();
            // In front of those who come again.
            self.visitors.retain_mut(|visitor| !matches!(visitor.turn(), Said::Ended));
            come.into_iter().for_each(|(hello, stream, from)| self.welcome(hello, stream, from));
            let missing = self.missing();
            if missing.is_empty() {
                break;
            }
            self.wait(missing)?;
        }
        // Strangers are not listened to any more, and neither are those who come late.
        drop(acceptor);
        self.visitors.sort_by_key(|visitor| visitor.ranks.iter().min().copied());
        let mut table = vec![TABLE];
        table.extend((self.visitors.len() as u32).to_le_bytes());
        self.visitors.iter().for_each(|visitor| visitor.entry.put(&mut table));
        self.visitors.iter_mut().for_each(|visitor| visitor.out.extend(&table));
        loop {
            for at in 0..self.visitors.len() {
                match self.visitors[at].turn() {
                    Said::Nothing => {}
                    Said::Connected => self.visitors[at].is_connected = true,
                    Said::Ended => return Err(self.ended(at)),
                }
            }
            let waiting = self.visitors.iter().filter(|visitor| !visitor.is_connected);
            let missing: Vec<usize> = waiting.flat_map(|visitor| visitor.ranks.clone()).collect();
            if missing.is_empty() {
                break;
            }
            self.wait(missing)?;
        }
        self.say_last(&[GO]);
        let peer = |Visitor { ranks, stream, .. }: Visitor| Peer { ranks, stream };
        Ok(self.visitors.into_iter().map(peer).collect())
    }

    /// A moment, unless the time is over.
    fn wait(&mut self, missing: Vec<usize>) -> Result<()> {
        let Meeting { ref patience, world, .. } = *self.meeting;
        let limit = patience.limit;
        if patience.is_over() {
            // One that gives up only ends its connections.
            if patience.is_wanted() {
                self.say_last(&ranks_of(MISSING, &missing));
            }
            let refused = std::mem::take(&mut self.refused);
            return Err(Error::MissingRanks { missing, world, limit, refused });
        }
        let now = Instant::now();
        for visitor in &mut self.visitors {
            if visitor.tell_at.take_if(|at| *at <= now).is_some() {
                visitor.out.extend(ranks_of(STATUS, &missing));
            }
        }
        std::thread::sleep(NAP);
        Ok(())
    }

    fn missing(&self) -> Vec<usize> {
        let visitors = self.visitors.iter().flat_map(|visitor| &visitor.ranks);
        let here: HashSet<usize> = visitors.chain(&self.meeting.ranks).copied().collect();
        (0..self.meeting.world).filter(|rank| !here.contains(rank)).collect()
    }

    fn welcome(&mut self, hello: Hello, mut stream: TcpStream, from: SocketAddr) {
        let Hello { tag, world, limit, port, process, ranks } = hello;
        let expected = self.meeting.world;
        if tag != self.meeting.tag {
            return;
        }
        let taken = |rank: &&usize| {
            let visitors = self.visitors.iter().flat_map(|visitor| &visitor.ranks);
            visitors.chain(&self.meeting.ranks).any(|taken| taken == *rank)
        };
        let (error, code, number) = if world != expected {
            let error = Error::WrongWorld { rank: ranks[0], expected, found: world };
            (error, OTHER_WORLD, expected)
        } else if let Some(rank) = ranks.iter().find(taken).copied() {
            (Error::DuplicateRank { rank }, DUPLICATE, rank)
        } else {
            let entry = Entry {
                address: SocketAddr::new(from.ip(), port).to_string(),
                process,
                ranks: ranks.clone(),
            };
            // Early enough to reach it.
            let tell_at = Instant::now().checked_add(limit.saturating_sub(margin(limit)));
            let (out, is_connected) = (vec![WELCOME], false);
            self.visitors.push(Visitor { ranks, stream, entry, tell_at, out, is_connected });
            return;
        };
        if self.refused.len() < MOST_REFUSED {
            self.refused.push(error);
        }
        // A new connection takes a few bytes at once.
        stream.write_all(&[&[code][..], &(number as u32).to_le_bytes()].concat()).ok();
    }

    /// One of them has ended while they connect.
    fn ended(&mut self, at: usize) -> Error {
        let Visitor { ranks: gone, .. } = self.visitors.remove(at);
        self.say_last(&ranks_of(ENDED, &gone));
        self.meeting.ended(&gone)
    }

    /// Tells all of them, without waiting long.
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
    /// Writes and reads what there is.
    fn turn(&mut self) -> Said {
        if !self.flush() {
            return Said::Ended;
        }
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(1) if byte == [CONNECTED] => Said::Connected,
            Err(error) if is_not_yet(&error) => Said::Nothing,
            _ => Said::Ended,
        }
    }

    /// False: it has ended.
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
