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

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"gpuawait";
const VERSION: u32 = 2;
/// More are not believed.
const MOST_RANKS: usize = 1 << 16;
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

/// Who meets whom, where, and until when.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub(crate) address: String,
    /// Of this process.
    pub(crate) ranks: Vec<usize>,
    pub(crate) world: usize,
    pub(crate) limit: Duration,
    pub(crate) end: Instant,
}

/// Another process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) ranks: Vec<usize>,
    pub(crate) stream: TcpStream,
}

struct Hello {
    world: usize,
    ranks: Vec<usize>,
    port: u16,
}

/// A process that has come to the one with rank 0.
struct Visitor {
    peer: Peer,
    /// Where it listens.
    address: SocketAddr,
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
        for Visitor { peer, address } in &visitors {
            let address = address.to_string();
            table.push(address.len() as u8);
            table.extend(address.as_bytes());
            put_ranks(&mut table, &peer.ranks);
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
        let Hello { world, ranks, port } = read_hello(&mut stream)?;
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
        visitors.push(Visitor { peer: Peer { ranks, stream }, address });
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
        let closed = |error: std::io::Error| self.closed(&error);
        let mut zero = self.call(&self.address)?;
        let local = zero.local_addr().map_err(closed)?;
        // Where the others can reach it: the address by which it reaches rank 0.
        let listener = TcpListener::bind((local.ip(), 0)).map_err(closed)?;
        let port = listener.local_addr().map_err(closed)?.port();
        self.write_hello(&mut zero, port).map_err(closed)?;
        let rest = self.end.saturating_duration_since(Instant::now()) + GRACE;
        zero.set_read_timeout(Some(rest)).map_err(closed)?;
        let table = self.answer(&mut zero)?;
        let is_own = |(_, ranks): &(String, Vec<usize>)| *ranks == self.ranks;
        let Some(own) = table.iter().position(is_own) else {
            return Err(self.closed(&ErrorKind::InvalidData.into()));
        };
        let behind: Vec<_> = table[own + 1..].iter().map(|(_, ranks)| ranks.clone()).collect();
        let visitors = table.iter().flat_map(|(_, ranks)| ranks);
        let visitors: HashSet<usize> = visitors.copied().collect();
        let ranks = (0..self.world).filter(|rank| !visitors.contains(rank)).collect();
        let mut peers = vec![Peer { ranks, stream: zero }];
        for (address, ranks) in &table[..own] {
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
            let Ok(Hello { world, ranks, .. }) = hello else { continue };
            if world == self.world && behind.contains(&ranks) && !here(&&ranks) {
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

    /// Reads rank 0's answers, up to the table of the other processes: where each listens, and its ranks.
    fn answer(&self, zero: &mut TcpStream) -> Result<Vec<(String, Vec<usize>)>> {
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
                        Ok((address, read_ranks(zero, self.world)?))
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
        hello.extend((self.world as u32).to_le_bytes());
        hello.extend(port.to_le_bytes());
        put_ranks(&mut hello, &self.ranks);
        stream.write_all(&hello)
    }

    fn bad(&self, error: &std::io::Error) -> Error {
        Error::Address { address: self.address.clone(), reason: error.to_string() }
    }

    fn closed(&self, error: &std::io::Error) -> Error {
        Error::Closed { address: self.address.clone(), reason: error.to_string() }
    }
}

fn read_hello(stream: &mut TcpStream) -> std::io::Result<Hello> {
    let magic: [u8; 8] = read_bytes(stream)?;
    let version = read_number(stream)?;
    if magic != *MAGIC || version != VERSION as usize {
        return Err(ErrorKind::InvalidData.into());
    }
    let world = read_number(stream)?;
    let port = u16::from_le_bytes(read_bytes(stream)?);
    let ranks = read_ranks(stream, world)?;
    if ranks.is_empty() {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(Hello { world, ranks, port })
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
