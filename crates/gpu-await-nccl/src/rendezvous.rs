//! How processes find one another by one address: the one with rank 0 listens there, and every other one connects.
//!
//! | step | the process with rank 0 | another process |
//! |---|---|---|
//! | 1 | accepts, reads a hello | connects until somebody listens; says which ranks it has, and where it listens itself |
//! | 2 | answers: welcome, or what is wrong with the hello | ends with that error |
//! | 3 | when all ranks are there, sends where each process listens; or which are missing, at its limit | ends with that error |
//! | 4 | – | connects to processes in front of it in that table, and is connected to by those behind it |
//!
//! A stranger that says nothing, or something else, is hung up on, and a second hello of a rank is refused; the others are not disturbed.
#![forbid(unsafe_code)]

pub(crate) mod root;

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"gpuawait";
const VERSION: u32 = 3;
/// The largest world.
pub(crate) const MOST_RANKS: usize = 1 << 16;
/// Between two looks at who has come.
const NAP: Duration = Duration::from_millis(2);
/// How long a stranger may take to say who it is.
const HELLO: Duration = Duration::from_secs(2);
/// What rank 0's answer at its limit takes to arrive.
const GRACE: Duration = Duration::from_secs(1);

const WELCOME: u8 = 0;
const DUPLICATE: u8 = 1;
const OTHER_WORLD: u8 = 2;
const MISSING: u8 = 3;
const TABLE: u8 = 4;

/// What the processes of one rendezvous say to one another; a group's is zero.
pub(crate) type Tag = [u8; 16];

/// Who meets whom, where, and until when.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub(crate) address: String,
    /// Of this process.
    pub(crate) ranks: Vec<usize>,
    pub(crate) world: usize,
    pub(crate) limit: Duration,
    pub(crate) end: Instant,
    pub(crate) tag: Tag,
}

/// Another process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) ranks: Vec<usize>,
    pub(crate) stream: TcpStream,
}

struct Hello {
    tag: Tag,
    world: usize,
    /// How long it waits.
    limit: Duration,
    port: u16,
    process: u64,
    ranks: Vec<usize>,
}

/// A process in the table.
#[derive(Clone, Debug)]
struct Entry {
    /// Where it listens.
    address: String,
    process: u64,
    ranks: Vec<usize>,
}

/// A process that has come to the one with rank 0.
struct Visitor {
    peer: Peer,
    address: SocketAddr,
    process: u64,
}

impl Meeting {
    /// Blocks until every process is connected with every other one.
    pub(crate) fn meet(&self) -> Result<Vec<Peer>> {
        if self.ranks.contains(&0) { self.listen() } else { self.visit() }
    }

    /// Ranks of processes that have not come.
    fn missing(&self, visitors: &[Visitor]) -> Vec<usize> {
        let visitors = visitors.iter().flat_map(|visitor| &visitor.peer.ranks);
        let here: HashSet<usize> = visitors.chain(&self.ranks).copied().collect();
        (0..self.world).filter(|rank| !here.contains(rank)).collect()
    }

    fn listen(&self) -> Result<Vec<Peer>> {
        let mut visitors: Vec<Visitor> = Vec::new();
        if self.ranks.len() == self.world {
            return Ok(Vec::new());
        }
        let listener = TcpListener::bind(&*self.address).map_err(|error| self.bad(&error))?;
        listener.set_nonblocking(true).map_err(|error| self.bad(&error))?;
        loop {
            let missing = self.missing(&visitors);
            if missing.is_empty() {
                break;
            }
            if Instant::now() >= self.end {
                return Err(self.give_up(missing, visitors));
            }
            match listener.accept() {
                // A connection that ends, or a stranger's, is none.
                Ok((stream, from)) => drop(self.welcome(stream, from, &mut visitors)),
                Err(_) => std::thread::sleep(NAP),
            }
        }
        visitors.sort_by_key(|visitor| visitor.peer.ranks.iter().min().copied());
        let mut table = vec![TABLE];
        table.extend((visitors.len() as u32).to_le_bytes());
        for Visitor { peer, address, process } in &visitors {
            let (address, ranks) = (address.to_string(), peer.ranks.clone());
            Entry { address, process: *process, ranks }.put(&mut table);
        }
        for Visitor { peer, .. } in &mut visitors {
            // If it has ended, whoever reads from it finds that.
            peer.stream.write_all(&table).ok();
        }
        Ok(visitors.into_iter().map(|visitor| visitor.peer).collect())
    }

    fn welcome(
        &self,
        mut stream: TcpStream,
        from: SocketAddr,
        visitors: &mut Vec<Visitor>,
    ) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        let rest = self.end.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(rest.clamp(NAP, HELLO)))?;
        let Hello { tag, world, port, process, ranks, .. } = read_hello(&mut stream)?;
        if tag != self.tag {
            return Ok(());
        }
        if world != self.world {
            stream.write_all(&[OTHER_WORLD])?;
            return stream.write_all(&(self.world as u32).to_le_bytes());
        }
        let mut taken = visitors.iter().flat_map(|visitor| &visitor.peer.ranks).chain(&self.ranks);
        if let Some(rank) = taken.find(|rank| ranks.contains(rank)) {
            stream.write_all(&[DUPLICATE])?;
            return stream.write_all(&(*rank as u32).to_le_bytes());
        }
        stream.write_all(&[WELCOME])?;
        let address = SocketAddr::new(from.ip(), port);
        visitors.push(Visitor { peer: Peer { ranks, stream }, address, process });
        Ok(())
    }

    /// Tells those who came who did not.
    fn give_up(&self, missing: Vec<usize>, visitors: Vec<Visitor>) -> Error {
        let mut answer = vec![MISSING];
        put_ranks(&mut answer, &missing);
        for mut visitor in visitors {
            visitor.peer.stream.write_all(&answer).ok();
        }
        Error::MissingRanks { missing, world: self.world, limit: self.limit }
    }

    fn visit(&self) -> Result<Vec<Peer>> {
        let mut zero = self.call(&self.address)?;
        let (table, listener) = self.enter(&mut zero)?;
        let visitors = table.iter().flat_map(|entry| &entry.ranks);
        let visitors: HashSet<usize> = visitors.copied().collect();
        let ranks = (0..self.world).filter(|rank| !visitors.contains(rank)).collect();
        self.gather(&listener, &table, vec![Peer { ranks, stream: zero }])
    }

    /// Says hello to the process that others come to as well; returns the table, and where this one listens.
    fn enter(&self, root: &mut TcpStream) -> Result<(Vec<Entry>, TcpListener)> {
        let closed = |error: std::io::Error| self.closed(&error);
        // Where the others can reach it: the address by which it reaches that process.
        let local = root.local_addr().map_err(closed)?;
        let listener = TcpListener::bind((local.ip(), 0)).map_err(closed)?;
        let port = listener.local_addr().map_err(closed)?.port();
        self.write_hello(root, port).map_err(closed)?;
        let rest = self.end.saturating_duration_since(Instant::now()) + GRACE;
        root.set_read_timeout(Some(rest)).map_err(closed)?;
        Ok((self.answer(root)?, listener))
    }

    /// Connects with the others in the table.
    fn gather(
        &self,
        listener: &TcpListener,
        table: &[Entry],
        mut peers: Vec<Peer>,
    ) -> Result<Vec<Peer>> {
        let closed = |error: std::io::Error| self.closed(&error);
        let Some(own) = table.iter().position(|entry| entry.ranks == self.ranks) else {
            return Err(self.closed(&ErrorKind::InvalidData.into()));
        };
        let behind: Vec<_> = table[own + 1..].iter().map(|entry| entry.ranks.clone()).collect();
        for Entry { address, ranks, .. } in &table[..own] {
            let mut stream = self.call(address)?;
            self.write_hello(&mut stream, 0).map_err(closed)?;
            peers.push(Peer { ranks: ranks.clone(), stream });
        }
        listener.set_nonblocking(true).map_err(closed)?;
        let end = self.end + GRACE;
        loop {
            let here = |ranks: &&Vec<usize>| peers.iter().any(|peer| peer.ranks == **ranks);
            let missing: Vec<usize> =
                behind.iter().filter(|ranks| !here(ranks)).flatten().copied().collect();
            if missing.is_empty() {
                return Ok(peers);
            }
            if Instant::now() >= end {
                return Err(Error::MissingRanks { missing, world: self.world, limit: self.limit });
            }
            let Ok((mut stream, _)) = listener.accept() else {
                std::thread::sleep(NAP);
                continue;
            };
            let hello = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_read_timeout(Some(HELLO)))
                .and_then(|()| read_hello(&mut stream));
            // A stranger is hung up on.
            let Ok(Hello { tag, world, ranks, .. }) = hello else { continue };
            if (tag, world) == (self.tag, self.world) && behind.contains(&ranks) && !here(&&ranks) {
                peers.push(Peer { ranks, stream });
            }
        }
    }

    /// Connects, until somebody listens.
    fn call(&self, address: &str) -> Result<TcpStream> {
        loop {
            let mut candidates = address.to_socket_addrs().map_err(|error| self.bad(&error))?;
            let Some(candidate) = candidates.next() else {
                return Err(self.bad(&std::io::Error::from(ErrorKind::AddrNotAvailable)));
            };
            let rest = self.end.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(&candidate, rest.max(NAP)) {
                Ok(stream) => return Ok(stream),
                Err(error) if rest.is_zero() => return Err(self.closed(&error)),
                Err(_) => std::thread::sleep(NAP.min(rest)),
            }
        }
    }

    /// Reads the answers to a hello, up to the table.
    fn answer(&self, zero: &mut TcpStream) -> Result<Vec<Entry>> {
        let closed = |error: std::io::Error| self.closed(&error);
        loop {
            let [answer] = read_bytes(zero).map_err(closed)?;
            match answer {
                WELCOME => {}
                DUPLICATE => {
                    let rank = read_number(zero).map_err(closed)?;
                    return Err(Error::DuplicateRank { rank });
                }
                OTHER_WORLD => {
                    let expected = read_number(zero).map_err(closed)?;
                    let (rank, found) = (self.ranks[0], self.world);
                    return Err(Error::WrongWorld { rank, expected, found });
                }
                MISSING => {
                    let missing = read_ranks(zero, self.world).map_err(closed)?;
                    let (world, limit) = (self.world, self.limit);
                    return Err(Error::MissingRanks { missing, world, limit });
                }
                TABLE => {
                    let count = read_number(zero).map_err(closed)?.min(self.world);
                    let read = |_| {
                        let [len] = read_bytes(zero)?;
                        let mut text = vec![0; usize::from(len)];
                        zero.read_exact(&mut text)?;
                        let address = String::from_utf8_lossy(&text).into_owned();
                        let process = u64::from_le_bytes(read_bytes(zero)?);
                        Ok(Entry { address, process, ranks: read_ranks(zero, self.world)? })
                    };
                    return (0..count).map(read).collect::<std::io::Result<_>>().map_err(closed);
                }
                _ => return Err(self.closed(&ErrorKind::InvalidData.into())),
            }
        }
    }

    fn write_hello(&self, stream: &mut TcpStream, port: u16) -> std::io::Result<()> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend(self.tag);
        hello.extend((self.world as u32).to_le_bytes());
        let rest = self.end.saturating_duration_since(Instant::now()).as_millis();
        hello.extend(u32::try_from(rest).unwrap_or(u32::MAX).to_le_bytes());
        hello.extend(port.to_le_bytes());
        hello.extend(root::process().to_le_bytes());
        put_ranks(&mut hello, &self.ranks);
        stream.write_all(&hello)
    }

    fn bad(&self, error: &std::io::Error) -> Error {
        Error::Address { address: self.address.clone(), reason: error.to_string() }
    }

    fn closed(&self, error: &std::io::Error) -> Error {
        let (address, reason) = (self.address.clone(), error.to_string());
        match self.tag == Tag::default() {
            true => Error::Closed { address, reason },
            false => Error::NoRoot { address, reason },
        }
    }
}

fn read_hello(stream: &mut TcpStream) -> std::io::Result<Hello> {
    let magic: [u8; 8] = read_bytes(stream)?;
    let version = read_number(stream)?;
    if magic != *MAGIC || version != VERSION as usize {
        return Err(ErrorKind::InvalidData.into());
    }
    let tag = read_bytes(stream)?;
    let (world, limit) = (read_number(stream)?, read_number(stream)?);
    let port = u16::from_le_bytes(read_bytes(stream)?);
    let process = u64::from_le_bytes(read_bytes(stream)?);
    let (limit, ranks) = (Duration::from_millis(limit as u64), read_ranks(stream, world)?);
    if ranks.is_empty() {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(Hello { tag, world, limit, port, process, ranks })
}

impl Entry {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.address.len() as u8);
        bytes.extend(self.address.as_bytes());
        bytes.extend(self.process.to_le_bytes());
        put_ranks(bytes, &self.ranks);
    }
}

fn put_ranks(bytes: &mut Vec<u8>, ranks: &[usize]) {
    bytes.extend((ranks.len() as u32).to_le_bytes());
    ranks.iter().for_each(|rank| bytes.extend((*rank as u32).to_le_bytes()));
}

/// Ranks of a world: how many, and each.
fn read_ranks(stream: &mut TcpStream, world: usize) -> std::io::Result<Vec<usize>> {
    let count = read_number(stream)?;
    if count > world.min(MOST_RANKS) {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; 4 * count];
    stream.read_exact(&mut bytes)?;
    let number =
        |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    let ranks: Vec<usize> = bytes.chunks_exact(4).map(number).collect();
    match ranks.iter().all(|rank| *rank < world) {
        true => Ok(ranks),
        false => Err(ErrorKind::InvalidData.into()),
    }
}

fn read_bytes<const N: usize>(stream: &mut TcpStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_number(stream: &mut TcpStream) -> std::io::Result<usize> {
    Ok(u32::from_le_bytes(read_bytes(stream)?) as usize)
}
