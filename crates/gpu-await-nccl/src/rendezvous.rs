//! How processes find one another by one address: rank 0 listens there, and every other rank connects.
//!
//! | step | rank 0 | another rank |
//! |---|---|---|
//! | 1 | accepts, reads a hello | connects until somebody listens; says who it is, and where it listens itself |
//! | 2 | answers: welcome, or what is wrong with the hello | ends with that error |
//! | 3 | when all are there, sends where each listens; or who is missing, at its limit | ends with that error |
//! | 4 | – | connects to those with lower ranks, and is connected to by those with higher ones |
//!
//! A stranger that says nothing, or something else, is hung up on, and a second hello of a rank is refused; the others are not disturbed.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"gpuawait";
const VERSION: u32 = 1;
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
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) limit: Duration,
    pub(crate) end: Instant,
}

struct Hello {
    world: usize,
    rank: usize,
    port: u16,
}

impl Meeting {
    /// Blocks until every rank is connected with every other one: the connections by rank, none to itself.
    pub(crate) fn meet(&self) -> Result<Vec<Option<TcpStream>>> {
        if self.rank == 0 { self.listen() } else { self.visit() }
    }

    fn listen(&self) -> Result<Vec<Option<TcpStream>>> {
        let mut peers: Vec<Option<(TcpStream, SocketAddr)>> =
            (0..self.world).map(|_| None).collect();
        if self.world == 1 {
            return Ok(vec![None]);
        }
        let listener = TcpListener::bind(&*self.address).map_err(|error| self.bad(&error))?;
        listener.set_nonblocking(true).map_err(|error| self.bad(&error))?;
        while peers.iter().skip(1).any(Option::is_none) {
            if Instant::now() >= self.end {
                return Err(self.give_up(peers));
            }
            match listener.accept() {
                // A connection that ends, or a stranger's, is none.
                Ok((stream, from)) => drop(self.welcome(stream, from.ip(), &mut peers)),
                Err(_) => std::thread::sleep(NAP),
            }
        }
        let address = |peer: &Option<(TcpStream, SocketAddr)>| match peer {
            Some((_, address)) => address.to_string(),
            None => String::new(),
        };
        let mut table = vec![TABLE];
        for address in peers.iter().map(address) {
            table.push(address.len() as u8);
            table.extend(address.as_bytes());
        }
        let mut streams = Vec::new();
        for peer in peers {
            let Some((mut stream, _)) = peer else {
                streams.push(None);
                continue;
            };
            // If it has ended, whoever reads from it finds that.
            stream.write_all(&table).ok();
            streams.push(Some(stream));
        }
        Ok(streams)
    }

    fn welcome(
        &self,
        mut stream: TcpStream,
        from: IpAddr,
        peers: &mut [Option<(TcpStream, SocketAddr)>],
    ) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        let rest = self.end.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(rest.clamp(NAP, HELLO)))?;
        let Hello { world, rank, port } = read_hello(&mut stream)?;
        if world != self.world || rank >= world {
            stream.write_all(&[OTHER_WORLD])?;
            return stream.write_all(&(self.world as u32).to_le_bytes());
        }
        if rank == 0 || peers[rank].is_some() {
            return stream.write_all(&[DUPLICATE]);
        }
        stream.write_all(&[WELCOME])?;
        peers[rank] = Some((stream, SocketAddr::new(from, port)));
        Ok(())
    }

    /// Tells those who came who did not.
    fn give_up(&self, peers: Vec<Option<(TcpStream, SocketAddr)>>) -> Error {
        let missing: Vec<usize> = (1..self.world).filter(|rank| peers[*rank].is_none()).collect();
        let mut answer = vec![MISSING];
        answer.extend((missing.len() as u32).to_le_bytes());
        missing.iter().for_each(|rank| answer.extend((*rank as u32).to_le_bytes()));
        for (mut stream, _) in peers.into_iter().flatten() {
            stream.write_all(&answer).ok();
        }
        Error::MissingRanks { missing, world: self.world, limit: self.limit }
    }

    fn visit(&self) -> Result<Vec<Option<TcpStream>>> {
        let mut zero = self.call(&self.address)?;
        let local = zero.local_addr().map_err(|error| self.closed(&error))?;
        // Where the others can reach it: the address by which it reaches rank 0.
        let listener = TcpListener::bind((local.ip(), 0)).map_err(|error| self.closed(&error))?;
        let port = listener.local_addr().map_err(|error| self.closed(&error))?.port();
        self.write_hello(&mut zero, port).map_err(|error| self.closed(&error))?;
        let rest = self.end.saturating_duration_since(Instant::now()) + GRACE;
        zero.set_read_timeout(Some(rest)).map_err(|error| self.closed(&error))?;
        let table = self.answer(&mut zero)?;
        let mut streams: Vec<Option<TcpStream>> = (0..self.world).map(|_| None).collect();
        streams[0] = Some(zero);
        for (rank, address) in table.iter().enumerate().take(self.rank).skip(1) {
            let mut stream = self.call(address)?;
            self.write_hello(&mut stream, 0).map_err(|error| self.closed(&error))?;
            streams[rank] = Some(stream);
        }
        listener.set_nonblocking(true).map_err(|error| self.closed(&error))?;
        let end = self.end + GRACE;
        while streams.iter().skip(self.rank + 1).any(Option::is_none) {
            if Instant::now() >= end {
                let is_missing = |rank: &usize| streams[*rank].is_none();
                let missing = (self.rank + 1..self.world).filter(is_missing).collect();
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
            let Ok(Hello { world, rank, .. }) = hello else { continue };
            if world == self.world && rank > self.rank && rank < world {
                streams[rank].get_or_insert(stream);
            }
        }
        Ok(streams)
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

    /// Reads rank 0's answers, up to the addresses of all ranks.
    fn answer(&self, zero: &mut TcpStream) -> Result<Vec<String>> {
        let closed = |error: std::io::Error| self.closed(&error);
        loop {
            let [answer] = read_bytes(zero).map_err(closed)?;
            match answer {
                WELCOME => {}
                DUPLICATE => return Err(Error::DuplicateRank { rank: self.rank }),
                OTHER_WORLD => {
                    let expected = read_number(zero).map_err(closed)?;
                    let (rank, found) = (self.rank, self.world);
                    return Err(Error::WrongWorld { rank, expected, found });
                }
                MISSING => {
                    let count = read_number(zero).map_err(closed)?.min(self.world);
                    let missing = (0..count).map(|_| read_number(zero));
                    let missing = missing.collect::<std::io::Result<_>>().map_err(closed)?;
                    let (world, limit) = (self.world, self.limit);
                    return Err(Error::MissingRanks { missing, world, limit });
                }
                TABLE => {
                    let read = |_| {
                        let [len] = read_bytes(zero)?;
                        let mut text = vec![0; usize::from(len)];
                        zero.read_exact(&mut text)?;
                        Ok(String::from_utf8_lossy(&text).into_owned())
                    };
                    return (0..self.world)
                        .map(read)
                        .collect::<std::io::Result<_>>()
                        .map_err(closed);
                }
                _ => return Err(self.closed(&ErrorKind::InvalidData.into())),
            }
        }
    }

    fn write_hello(&self, stream: &mut TcpStream, port: u16) -> std::io::Result<()> {
        let mut hello = MAGIC.to_vec();
        hello.extend(VERSION.to_le_bytes());
        hello.extend((self.world as u32).to_le_bytes());
        hello.extend((self.rank as u32).to_le_bytes());
        hello.extend(port.to_le_bytes());
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
    let (world, rank) = (read_number(stream)?, read_number(stream)?);
    let port = u16::from_le_bytes(read_bytes(stream)?);
    Ok(Hello { world, rank, port })
}

fn read_bytes<const N: usize>(stream: &mut TcpStream) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_number(stream: &mut TcpStream) -> std::io::Result<usize> {
    Ok(u32::from_le_bytes(read_bytes(stream)?) as usize)
}
