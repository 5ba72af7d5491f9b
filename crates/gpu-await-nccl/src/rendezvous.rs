//! How processes find one another: at an address, where the process with rank 0 of a group listens, or by an [id](root), at the process that
//! made it. The process that they come to runs a [`Coordinator`](coordinator::Coordinator).
//!
//! | step | the coordinator | another process |
//! |---|---|---|
//! | 1 | accepts, reads a hello | tries to connect until somebody listens; says which ranks it has, and where it listens itself |
//! | 2 | answers, for an id with its proof first: welcome, or the error of the hello | ends with that error |
//! | 3 | when all ranks are there, sends where each process listens; or which are missing, at the limit of either | ends with that error |
//! | 4 | – | connects to the processes before it in that table, and accepts those after it; says that it is connected |
//! | 5 | when all are connected, tells them to go on; or which have ended | goes on |
//!
//! A stranger that says nothing, or something else, is disconnected, and a second hello of a rank is refused; the others are neither disturbed
//! nor delayed. All of it has one deadline, the caller's limit; only the report of missing ranks may take [a moment](LATE) longer.
#![forbid(unsafe_code)]

mod acceptor;
mod attempt;
mod coordinator;
mod hello;
mod line;
pub(crate) mod root;

use std::collections::HashSet;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use self::acceptor::{Acceptor, Come};
use self::attempt::Attempt;
use self::hello::{Entry, Hello, Tag, read_bytes, read_number, read_ranks};
use self::line::Line;
use self::root::Place;
use crate::error::{Error, Result};
use crate::patience::Patience;
use crate::stats;

/// The largest world.
pub(crate) const MOST_RANKS: usize = 1 << 16;
/// The pause between two checks for arrivals.
const NAP: Duration = Duration::from_millis(2);
/// How long a stranger may take to identify itself.
const HELLO: Duration = Duration::from_secs(2);
/// How long one try to connect may take.
const TRY: Duration = Duration::from_secs(2);
/// How long past its limit a welcome process waits for the list of missing ranks, which should have come before.
const LATE: Duration = Duration::from_millis(500);
/// How long last words may take.
const LAST_WORDS: Duration = Duration::from_millis(100);

const WELCOME: u8 = 0;
const DUPLICATE: u8 = 1;
const OTHER_WORLD: u8 = 2;
const MISSING: u8 = 3;
const TABLE: u8 = 4;
/// The ranks missing at the visitor's limit; the coordinator goes on.
const STATUS: u8 = 5;
const GO: u8 = 6;
const ENDED: u8 = 7;
/// For an id.
const USED: u8 = 8;
/// What a visitor says.
const CONNECTED: u8 = 1;

/// Which ranks meet, where, and until when.
#[derive(Clone, Debug)]
pub(crate) struct Meeting {
    address: String,
    /// For an id.
    place: Option<Place>,
    /// The ranks of this process.
    ranks: Vec<usize>,
    world: usize,
    patience: Patience,
}

/// Whether a process can have these ranks.
pub(crate) fn check_ranks(ranks: &[usize], world: usize) -> Result<()> {
    if world == 0 || ranks.is_empty() {
        return Err(Error::NoRanks { world, local: ranks.len() });
    }
    if world > MOST_RANKS {
        return Err(Error::WorldTooLarge { world, most: MOST_RANKS });
    }
    let mut taken = HashSet::new();
    ranks.iter().try_for_each(|&rank| match taken.insert(rank) {
        _ if rank >= world => Err(Error::BadRank { rank, world }),
        true => Ok(()),
        false => Err(Error::DuplicateRank { rank }),
    })
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
    /// Also stands for going on.
    Table(Vec<Entry>),
}

impl Meeting {
    /// A group's meeting, at an address.
    pub(crate) fn at(
        address: String,
        ranks: Vec<usize>,
        world: usize,
        patience: Patience,
    ) -> Meeting {
        Meeting { address, place: None, ranks, world, patience }
    }

    /// An id's meeting.
    pub(crate) fn of_id(
        place: Place,
        ranks: Vec<usize>,
        world: usize,
        patience: Patience,
    ) -> Meeting {
        Meeting { address: place.to_string(), place: Some(place), ranks, world, patience }
    }

    /// Blocks until all processes are connected with one another.
    pub(crate) fn meet(&self) -> Result<Vec<Peer>> {
        let _attempt = Attempt::begin(self);
        match self.place.is_none() && self.ranks.contains(&0) {
            true => self.listen(),
            false => self.visit(),
        }
    }

    fn visit(&self) -> Result<Vec<Peer>> {
        let closed = |error: std::io::Error| self.closed(&error);
        let (coordinator, listener) = self.reach()?;
        let table = self.answer(&coordinator, TABLE)?;
        let mut peers = self.gather(listener, &table, &coordinator)?;
        let mut line = Line::new(&coordinator, &self.patience).map_err(closed)?;
        line.write_all(&[CONNECTED]).map_err(closed)?;
        self.answer(&coordinator, GO)?;
        let visitors = table.iter().flat_map(|entry| &entry.ranks);
        let visitors: HashSet<usize> = visitors.copied().collect();
        let ranks: Vec<usize> = (0..self.world).filter(|rank| !visitors.contains(rank)).collect();
        // With an id all ranks are visitors.
        if !ranks.is_empty() {
            peers.push(Peer { ranks, stream: coordinator });
        }
        Ok(peers)
    }

    /// The tag that its processes send one another.
    fn tag(&self) -> Tag {
        self.place.as_ref().map_or(Tag::default(), Place::password)
    }

    /// Connects to the coordinator, and says hello; also returns the listener of this process.
    fn reach(&self) -> Result<(TcpStream, TcpListener)> {
        let Some(place) = &self.place else {
            let zero = self.call(&self.resolve(&self.address)?, None, connect)?;
            let listener =
                self.greet(&zero, &self.patience).map_err(|error| self.closed(&error))?;
            return Ok((zero, listener));
        };
        // One of these addresses may belong to another host.
        self.call(&place.socket_addresses(), None, |address, wait| {
            let (stream, hello) = (connect(address, wait)?, self.patience.at_most(HELLO));
            let listener = self.greet(&stream, &hello)?;
            match read_bytes(&mut Line::new(&stream, &hello)?)? {
                proof if proof == place.proof.to_le_bytes() => Ok((stream, listener)),
                _ => Err(ErrorKind::InvalidData.into()),
            }
        })
    }

    /// Says hello to the coordinator, and listens where the others can reach this process: at the address that reaches the coordinator.
    fn greet(&self, coordinator: &TcpStream, patience: &Patience) -> std::io::Result<TcpListener> {
        let listener = TcpListener::bind((coordinator.local_addr()?.ip(), 0))?;
        let hello = self.hello(listener.local_addr()?.port());
        Line::new(coordinator, patience)?.write_all(&hello)?;
        Ok(listener)
    }

    /// Connects with the others in the table, unless the coordinator reports that one of them has ended.
    fn gather(
        &self,
        listener: TcpListener,
        table: &[Entry],
        coordinator: &TcpStream,
    ) -> Result<Vec<Peer>> {
        let mut peers = Vec::new();
        let closed = |error: std::io::Error| self.closed(&error);
        let Some(own) = table.iter().position(|entry| entry.ranks == self.ranks) else {
            return Err(self.closed(&ErrorKind::InvalidData.into()));
        };
        // The system accepts on behalf of processes that listen later.
        for Entry { address, ranks, .. } in &table[..own] {
            let stream = self.call(&self.resolve(address)?, Some(coordinator), connect)?;
            let mut line = Line::new(&stream, &self.patience).map_err(closed)?;
            line.write_all(&self.hello(0)).map_err(closed)?;
            peers.push(Peer { ranks: ranks.clone(), stream });
        }
        let behind = table[own + 1..].iter().map(|entry| entry.ranks.clone());
        let mut behind: HashSet<Vec<usize>> = behind.collect();
        let mut acceptor = Acceptor::new(listener).map_err(closed)?;
        while !behind.is_empty() {
            for Come { hello: Hello { tag, world, ranks, .. }, stream, .. } in acceptor.poll() {
                if (tag, world) == (self.tag(), self.world) && behind.remove(&ranks) {
                    peers.push(Peer { ranks, stream });
                }
            }
            self.hear(coordinator)?;
            if self.patience.is_over() {
                let mut missing: Vec<usize> = behind.into_iter().flatten().collect();
                missing.sort_unstable();
                return Err(self.missing(missing));
            }
            std::thread::sleep(NAP);
        }
        Ok(peers)
    }

    /// The addresses of a name. The lookup may take any time.
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

    /// Reads what the coordinator says meanwhile.
    fn hear(&self, coordinator: &TcpStream) -> Result<()> {
        let closed = |error: std::io::Error| self.closed(&error);
        coordinator.set_nonblocking(true).map_err(closed)?;
        match coordinator.peek(&mut [0]) {
            Err(error) if is_not_yet(&error) => Ok(()),
            _ => {
                let mut line = Line::new(coordinator, &self.patience).map_err(closed)?;
                match self.read_answer(&mut line, GO).map_err(closed)? {
                    Answer::No(error) => Err(error),
                    // The missing ranks are known here.
                    _ => Ok(()),
                }
            }
        }
    }

    /// Tries addresses, until one answers.
    fn call<T>(
        &self,
        addresses: &[SocketAddr],
        coordinator: Option<&TcpStream>,
        once: impl Fn(&SocketAddr, Duration) -> std::io::Result<T>,
    ) -> Result<T> {
        for address in addresses.iter().cycle() {
            let rest = self.patience.rest();
            match once(address, rest.clamp(NAP, TRY)) {
                Ok(reached) => return Ok(reached),
                Err(error) if self.patience.is_over() => return Err(self.closed(&error)),
                Err(_) => std::thread::sleep(NAP.min(rest)),
            }
            coordinator.map_or(Ok(()), |coordinator| self.hear(coordinator))?;
        }
        Err(self.bad(&ErrorKind::AddrNotAvailable.into()))
    }

    /// Reads answers up to the wanted one: the table, or the go-ahead.
    fn answer(&self, coordinator: &TcpStream, wanted: u8) -> Result<Vec<Entry>> {
        let (late, mut is_welcome, mut status) = (self.patience.longer(LATE), false, None);
        loop {
            let is_told = !is_welcome || status.is_some();
            let patience = if is_told { &self.patience } else { &late };
            let line = Line::new(coordinator, patience);
            match (line.and_then(|mut line| self.read_answer(&mut line, wanted)), status.take()) {
                (Ok(Answer::Table(table)), _) => return Ok(table),
                (Ok(Answer::Welcome), told) => (is_welcome, status) = (true, told),
                (Ok(Answer::Status(missing)), _) => status = Some(missing),
                (Ok(Answer::No(error)), _) => return Err(error),
                (Err(error), Some(missing)) if error.kind() == ErrorKind::TimedOut => {
                    // It may come again at once, and must not be a duplicate of itself then.
                    line::leave(coordinator);
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
            ENDED => Answer::No(self.ended(read_ranks(line, self.world)?)),
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
                let read = |_| Entry::read(line, self.world);
                Answer::Table((0..count).map(read).collect::<std::io::Result<_>>()?)
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }

    fn missing(&self, missing: Vec<usize>) -> Error {
        self.patience.missing(missing, self.world)
    }

    /// Some ranks ended while all were connecting.
    fn ended(&self, ranks: Vec<usize>) -> Error {
        if self.place.is_some() {
            return self.missing(ranks);
        }
        let reason = format!("ranks {ranks:?} disconnected while all were connecting");
        Error::Closed { address: self.address.clone(), reason }
    }

    /// The hello of a process that listens at that port.
    fn hello(&self, port: u16) -> Vec<u8> {
        let (tag, world, limit) = (self.tag(), self.world, self.patience.rest());
        Hello { tag, world, limit, port, ranks: self.ranks.clone() }.to_bytes()
    }

    fn bad(&self, error: &std::io::Error) -> Error {
        Error::Address { address: self.address.clone(), reason: self.reason(error) }
    }

    /// The system's error, in terms of a rendezvous.
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
        match self.place {
            None => Error::Closed { address, reason },
            Some(_) => Error::NoRoot { address, reason },
        }
    }
}

/// Whether a non-blocking stream just has nothing to read yet, or takes nothing.
fn is_not_yet(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn connect(address: &SocketAddr, wait: Duration) -> std::io::Result<TcpStream> {
    TcpStream::connect_timeout(address, wait).and_then(no_own)
}

/// If nobody listens at a port of this host, the system may choose that very port for the caller, and connect it to itself.
fn no_own(stream: TcpStream) -> std::io::Result<TcpStream> {
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the port is in the range that the system chooses from, it chooses that very port sooner or later: the even ones on Linux.
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
