//! How processes find one another by one address: the one with rank 0 listens there, and every other one connects.
//!
//! | step | the process with rank 0 | another process |
//! |---|---|---|
//! | 1 | accepts, reads a hello | connects until somebody listens; says which ranks it has, and where it listens itself |
//! | 2 | answers: welcome, or what is wrong with the hello | ends with that error |
//! | 3 | when all ranks are there, sends where each process listens; or which are missing, at its limit | ends with that error |
//! | 4 | – | connects to processes in front of it in that table, and is connected to by those behind it; says that it is connected |
//! | 5 | when all are connected, tells them to go on; or who has ended | goes on |
//!
//! A stranger that says nothing, or something else, is disconnected, and a second hello of a rank is refused; the others are not disturbed,
//! nor do they wait for it. All of it has one deadline, the caller's limit.
#![forbid(unsafe_code)]

mod acceptor;
mod attempt;
mod first;
mod line;
pub(crate) mod root;

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use self::acceptor::Acceptor;
use self::attempt::Attempt;
use self::line::Line;
use crate::error::{Error, Result};
use crate::exchange::Patience;
use crate::stats;

const MAGIC: &[u8; 8] = b"gpuawait";
const VERSION: u32 = 6;
/// A hello without its ranks.
const HELLO_BYTES: usize = 8 + 4 + 16 + 4 + 4 + 2 + 8 + 4;
/// The largest world.
pub(crate) const MOST_RANKS: usize = 1 << 16;
/// Between two looks at who has come.
const NAP: Duration = Duration::from_millis(2);
/// How long a stranger may take to say who it is.
const HELLO: Duration = Duration::from_secs(2);
/// How long one try to connect may take.
const TRY: Duration = Duration::from_secs(2);

const WELCOME: u8 = 0;
const DUPLICATE: u8 = 1;
const OTHER_WORLD: u8 = 2;
const MISSING: u8 = 3;
const TABLE: u8 = 4;
/// Who is missing at the visitor's limit; rank 0 goes on.
const STATUS: u8 = 5;
const GO: u8 = 6;
const ENDED: u8 = 7;
/// Of an id.
const USED: u8 = 8;
/// What a visitor says.
const CONNECTED: u8 = 1;

/// What the processes of one rendezvous say to one another; a group's is zero.
pub(crate) type Tag = [u8; 16];

/// Who meets whom, where, and until when.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    pub(crate) address: String,
    /// Of this process.
    pub(crate) ranks: Vec<usize>,
    pub(crate) world: usize,
    pub(crate) patience: Patience,
    pub(crate) tag: Tag,
}

/// Another process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) ranks: Vec<usize>,
    pub(crate) stream: TcpStream,
}

enum Answer {
    Welcome,
    Status(Vec<usize>),
    No(Error),
    /// Or to go on.
    Table(Vec<Entry>),
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

impl Meeting {
    /// Blocks until every process is connected with every other one.
    pub(crate) fn meet(&self) -> Result<Vec<Peer>> {
        let _attempt = Attempt::begin(self);
        if self.ranks.contains(&0) { self.listen() } else { self.visit() }
    }

    fn visit(&self) -> Result<Vec<Peer>> {
        let closed = |error: std::io::Error| self.closed(&error);
        let zero = self.call(&self.address, None)?;
        let (table, listener) = self.enter(&zero)?;
        let visitors = table.iter().flat_map(|entry| &entry.ranks);
        let visitors: HashSet<usize> = visitors.copied().collect();
        let ranks = (0..self.world).filter(|rank| !visitors.contains(rank)).collect();
        let mut peers = self.gather(listener, &table, Some(&zero))?;
        let mut line = Line::new(&zero, &self.patience).map_err(closed)?;
        line.write_all(&[CONNECTED]).map_err(closed)?;
        self.answer(line, GO)?;
        peers.push(Peer { ranks, stream: zero });
        Ok(peers)
    }

    /// Says hello to the process that others come to as well; returns the table, and where this one listens.
    fn enter(&self, root: &TcpStream) -> Result<(Vec<Entry>, TcpListener)> {
        let closed = |error: std::io::Error| self.closed(&error);
        // Where the others can reach it: the address by which it reaches that process.
        let local = root.local_addr().map_err(closed)?;
        let listener = TcpListener::bind((local.ip(), 0)).map_err(closed)?;
        let port = listener.local_addr().map_err(closed)?.port();
        self.write_hello(root, port).map_err(closed)?;
        let line = Line::new(root, &self.patience).map_err(closed)?;
        Ok((self.answer(line, TABLE)?, listener))
    }

    /// Connects with the others in the table, unless the process with rank 0 tells that one of them has ended.
    fn gather(
        &self,
        listener: TcpListener,
        table: &[Entry],
        zero: Option<&TcpStream>,
    ) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        let closed = |error: std::io::Error| self.closed(&error);
        let Some(own) = table.iter().position(|entry| entry.ranks == self.ranks) else {
            return Err(self.closed(&ErrorKind::InvalidData.into()));
        };
        // The system accepts for those who listen later.
        for Entry { address, ranks, .. } in &table[..own] {
            let stream = self.call(address, zero)?;
            self.write_hello(&stream, 0).map_err(closed)?;
            peers.push(Peer { ranks: ranks.clone(), stream });
        }
        let behind = table[own + 1..].iter().map(|entry| entry.ranks.clone());
        let mut behind: HashSet<Vec<usize>> = behind.collect();
        let mut acceptor = Acceptor::new(listener).map_err(closed)?;
        while !behind.is_empty() {
            for (Hello { tag, world, ranks, .. }, stream, _) in acceptor.poll() {
                if (tag, world) == (self.tag, self.world) && behind.remove(&ranks) {
                    peers.push(Peer { ranks, stream });
                }
            }
            self.hear(zero)?;
            if self.patience.is_over() {
                let mut missing: Vec<usize> = behind.into_iter().flatten().collect();
                missing.sort_unstable();
                return Err(self.missing(missing));
            }
            std::thread::sleep(NAP);
        }
        Ok(peers)
    }

    /// The addresses of a name. Asking for them may take as long as it likes.
    fn resolve(&self, address: &str) -> Result<Vec<SocketAddr>> {
        if let Ok(address) = address.parse() {
            return Ok(vec![address]);
        }
        let (name, (send, receive)) = (address.to_owned(), sync_channel(1));
        drop(stats::spawn("resolve", move || {
            let found = name.to_socket_addrs().map(|found| found.collect::<Vec<_>>());
            send.send(found).ok();
        })?);
        let none = || std::io::Error::from(ErrorKind::AddrNotAvailable);
        match receive.recv_timeout(self.patience.rest()) {
            Ok(Ok(found)) if found.is_empty() => Err(self.bad(&none())),
            Ok(found) => found.map_err(|error| self.bad(&error)),
            Err(_) => Err(self.bad(&ErrorKind::TimedOut.into())),
        }
    }

    /// What the process with rank 0 tells meanwhile. Without one nobody does.
    fn hear(&self, zero: Option<&TcpStream>) -> Result<()> {
        let Some(zero) = zero else { return Ok(()) };
        let closed = |error: std::io::Error| self.closed(&error);
        zero.set_nonblocking(true).map_err(closed)?;
        match zero.peek(&mut [0]) {
            Err(error) if is_not_yet(&error) => Ok(()),
            _ => {
                let mut line = Line::new(zero, &self.patience).map_err(closed)?;
                match self.read_answer(&mut line, GO).map_err(closed)? {
                    Answer::No(error) => Err(error),
                    // Who is missing is known here.
                    _ => Ok(()),
                }
            }
        }
    }

    /// Connects, until somebody listens.
    fn call(&self, address: &str, zero: Option<&TcpStream>) -> Result<TcpStream> {
        let candidates = self.resolve(address)?;
        loop {
            for candidate in &candidates {
                let rest = self.patience.rest();
                match connect(candidate, rest.clamp(NAP, TRY)) {
                    Ok(stream) => return Ok(stream),
                    Err(error) if self.patience.is_over() => return Err(self.closed(&error)),
                    Err(_) => std::thread::sleep(NAP.min(rest)),
                }
            }
            self.hear(zero)?;
        }
    }

    /// Reads answers, up to the one that is wanted: the table, or to go on.
    fn answer(&self, mut line: Line<'_>, wanted: u8) -> Result<Vec<Entry>> {
        let mut status = None;
        loop {
            match (self.read_answer(&mut line, wanted), status.take()) {
                (Ok(Answer::Table(table)), _) => return Ok(table),
                (Ok(Answer::Welcome), told) => status = told,
                (Ok(Answer::Status(missing)), _) => status = Some(missing),
                (Ok(Answer::No(error)), _) => return Err(error),
                (Err(error), Some(missing)) if error.kind() == ErrorKind::TimedOut => {
                    // It may come again at once, and is no duplicate of itself then.
                    line.leave();
                    return Err(self.missing(missing));
                }
                (Err(error), _) => return Err(self.closed(&error)),
            }
        }
    }

    fn read_answer(&self, line: &mut Line<'_>, wanted: u8) -> std::io::Result<Answer> {
        let [answer] = read_bytes(line)?;
        Ok(match answer {
            WELCOME => Answer::Welcome,
            DUPLICATE => Answer::No(Error::DuplicateRank { rank: read_number(line)? }),
            OTHER_WORLD => {
                let (rank, expected, found) = (self.ranks[0], read_number(line)?, self.world);
                Answer::No(Error::WrongWorld { rank, expected, found })
            }
            STATUS => Answer::Status(read_ranks(line, self.world)?),
            MISSING => Answer::No(self.missing(read_ranks(line, self.world)?)),
            ENDED => Answer::No(self.ended(&read_ranks(line, self.world)?)),
            USED => {
                let reason = "it has connected a communicator already; make another one";
                Answer::No(Error::BadId { expected: "host devices", reason })
            }
            GO if wanted == GO => Answer::Table(Vec::new()),
            TABLE if wanted == TABLE => {
                let count = read_number(line)?;
                if count > self.world {
                    return Err(ErrorKind::InvalidData.into());
                }
                let read = |_| {
                    let [len] = read_bytes(line)?;
                    let mut text = vec![0; usize::from(len)];
                    line.read_exact(&mut text)?;
                    let address = String::from_utf8_lossy(&text).into_owned();
                    let process = u64::from_le_bytes(read_bytes(line)?);
                    Ok(Entry { address, process, ranks: read_ranks(line, self.world)? })
                };
                Answer::Table((0..count).map(read).collect::<std::io::Result<_>>()?)
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }

    fn missing(&self, missing: Vec<usize>) -> Error {
        let (world, limit, refused) = (self.world, self.patience.limit, Vec::new());
        Error::MissingRanks { missing, world, limit, refused }
    }

    /// Some ranks have ended while all connected.
    fn ended(&self, ranks: &[usize]) -> Error {
        let reason = format!("ranks {ranks:?} disconnected while all were connecting");
        Error::Closed { address: self.address.clone(), reason }
    }

    fn write_hello(&self, stream: &TcpStream, port: u16) -> std::io::Result<()> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend(self.tag);
        hello.extend((self.world as u32).to_le_bytes());
        let rest = self.patience.rest().as_millis();
        hello.extend(u32::try_from(rest).unwrap_or(u32::MAX).to_le_bytes());
        hello.extend(port.to_le_bytes());
        hello.extend(root::process().to_le_bytes());
        put_ranks(&mut hello, &self.ranks);
        Line::new(stream, &self.patience)?.write_all(&hello)
    }

    fn bad(&self, error: &std::io::Error) -> Error {
        Error::Address { address: self.address.clone(), reason: self.reason(error) }
    }

    /// What the system said, in terms of a rendezvous.
    fn reason(&self, error: &std::io::Error) -> String {
        match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                format!("no answer within {:?}", self.patience.limit)
            }
            ErrorKind::InvalidData => {
                "what answers is another program, or another version of this crate".to_owned()
            }
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                "the other side disconnected".to_owned()
            }
            _ if self.patience.is_over() => format!("{error}, for {:?}", self.patience.limit),
            _ => error.to_string(),
        }
    }

    fn closed(&self, error: &std::io::Error) -> Error {
        let (address, reason) = (self.address.clone(), self.reason(error));
        match self.tag == Tag::default() {
            true => Error::Closed { address, reason },
            false => Error::NoRoot { address, reason },
        }
    }
}

/// Whether a stream that does not block has nothing to say so far, or takes nothing.
fn is_not_yet(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn connect(address: &SocketAddr, wait: Duration) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(address, wait).and_then(no_own)
}

/// Where nobody listens at a port of this host, the system may take just that for the caller's own, and connect it with itself.
fn no_own(stream: TcpStream) -> std::io::Result<TcpStream> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

fn read_hello(stream: &mut impl Read) -> std::io::Result<Hello> {
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

/// How long before its limit a process is told who is missing: early enough to reach it.
fn margin(limit: Duration) -> Duration {
    (limit / 8).clamp(NAP, Duration::from_millis(500))
}

/// An answer with ranks.
fn ranks_of(code: u8, ranks: &[usize]) -> Vec<u8> {
    let mut bytes = vec![code];
    put_ranks(&mut bytes, ranks);
    bytes
}

/// Ranks of a world: how many, and each.
fn read_ranks(stream: &mut impl Read, world: usize) -> std::io::Result<Vec<usize>> {
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

fn read_bytes<const N: usize>(stream: &mut impl Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_number(stream: &mut impl Read) -> std::io::Result<usize> {
    Ok(u32::from_le_bytes(read_bytes(stream)?) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a port in the range of those that the system chooses it chooses that itself sooner or later: the even ones on Linux.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_connection_with_itself() {
        let free = || {
            let listener = TcpListener::bind("127.0.0.1:0").ok()?;
            let port = listener.local_addr().ok()?.port() & !1;
            drop(listener);
            TcpListener::bind(("127.0.0.1", port)).ok()?.local_addr().ok()
        };
        let address = std::iter::from_fn(|| Some(free())).flatten().next().expect("a free port");
        let connected = (0..1_000_000).find_map(|_| TcpStream::connect(address).ok());
        let own = connected.expect("a connection");
        assert_eq!(own.local_addr().expect("one side"), own.peer_addr().expect("the other"));
        let error = no_own(own).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        connect(&address, TRY).expect("one that listens");
    }
}
