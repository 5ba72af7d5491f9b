//! How processes meet that share the id of host devices, and nothing else: the one that made it listens, for all of its ids.
//!
//! | step | the process that made the id | a process with ranks |
//! |---|---|---|
//! | 1 | accepts, reads a hello with the id's tag; answers with its proof, which only the id tells | tries the id's addresses until one knows the proof |
//! | 2 | enters its ranks, until all of them are there or it gives up | ends with what is wrong with the hello, or with who is missing |
//! | 3 | sends where each process listens | meets the others there, or in the process if all are in one |
//!
//! The process that made the id may have ranks or none; it talks with itself as with others.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::line::Line;
use super::{
    DUPLICATE, Entry, HELLO, Hello, MISSING, MOST_RANKS, Meeting, NAP, OTHER_WORLD, STATUS, TABLE,
    TRY, Tag, USED, connect, margin, put_ranks, ranks_of, read_bytes, read_hello,
};
use crate::error::{Error, Result};
use crate::exchange::{self, Gathered, Hub, Patience, Wire};
use crate::mesh::Mesh;
use crate::process::PerProcess;
use crate::unique_id::UniqueId;
use crate::{stats, system};

/// How often a process that waits is asked whether it still does.
const LOOK: Duration = Duration::from_millis(10);

/// What an id tells of where its ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) tag: Tag,
    pub(crate) proof: u64,
    pub(crate) port: u16,
    /// In the order in which they are tried.
    pub(crate) addresses: Vec<Ipv4Addr>,
}

/// What this process makes ids with. Nobody else can make one that it takes.
struct Root {
    port: u16,
    key: RandomState,
}

/// The processes that have come for an id.
struct Session {
    world: usize,
    waiting: Vec<Waiting>,
}

struct Waiting {
    entry: Entry,
    done: SyncSender<Arc<[u8]>>,
}

/// By the numbers of their ids.
static SESSIONS: PerProcess<Mutex<HashMap<u64, Session>>> = PerProcess::new(Mutex::default);
/// Numbers of ids whose ranks have met: each is good for one communicator.
static MET: PerProcess<Mutex<BTreeSet<u64>>> = PerProcess::new(Mutex::default);

/// A place for the ranks of an id to meet at. The first one starts a thread that listens.
pub(crate) fn place(number: u64) -> Result<Place> {
    let root = Root::get()?;
    let mut addresses = system::addresses();
    addresses.truncate(Place::MOST_ADDRESSES - 1);
    // Last: on another host it is somebody else's.
    addresses.push(Ipv4Addr::LOCALHOST);
    let (tag, proof) = root.sign(root.key.hash_one(("number", number)));
    Ok(Place { tag, proof, port: root.port, addresses })
}

/// Blocks until all ranks have come to the place of an id, and are connected.
pub(crate) fn meet(
    id: UniqueId,
    hello: exchange::Arrival,
    world: usize,
    patience: &Patience,
) -> Result<Gathered> {
    let place = id.place()?;
    let (tag, ranks, patience) = (place.tag, hello.ranks.clone(), patience.clone());
    let mut meeting = Meeting { address: String::new(), ranks, world, patience, tag };
    let (root, address) = meeting.reach(&place)?;
    meeting.address = address;
    let (table, listener) = meeting.enter(&root)?;
    let patience = &meeting.patience;
    let this = process();
    if table.iter().all(|entry| entry.process == this) {
        return Hub::join(id, world, hello, patience);
    }
    let peers = meeting.gather(listener, &table, None)?;
    let mesh = Mesh::new(meeting.ranks.clone(), peers)?;
    Arc::new(mesh.open_next(0, &(0..world).collect())).gather(hello, patience)
}

/// A number that no other process has.
pub(super) fn process() -> u64 {
    static PROCESS: OnceLock<RandomState> = OnceLock::new();
    PROCESS.get_or_init(RandomState::new).hash_one(std::process::id())
}

impl Place {
    pub(crate) const MOST_ADDRESSES: usize = 16;
}

impl Meeting {
    /// Connects to the process that made the id.
    fn reach(&self, place: &Place) -> Result<(TcpStream, String)> {
        let mut last = std::io::Error::from(ErrorKind::AddrNotAvailable);
        loop {
            for address in &place.addresses {
                let address = SocketAddr::from((*address, place.port));
                let wait = self.patience.rest().clamp(NAP, TRY);
                let reached = connect(&address, wait).and_then(|stream| {
                    let hello = Patience::of(self.patience.rest().min(HELLO));
                    let mut line = Line::new(&stream, &hello)?;
                    // It hears of the ranks when it is known to be the one.
                    line.write_all(&place.tag)?;
                    match read_bytes(&mut line)? {
                        proof if proof == place.proof.to_le_bytes() => Ok(stream),
                        _ => Err(ErrorKind::InvalidData.into()),
                    }
                });
                match reached {
                    Ok(stream) => return Ok((stream, address.to_string())),
                    Err(error) => last = error,
                }
            }
            if self.patience.is_over() {
                let addresses: Vec<_> = place.addresses.iter().map(Ipv4Addr::to_string).collect();
                let address = format!("{}, port {}", addresses.join(" or "), place.port);
                return Err(Error::NoRoot { address, reason: self.reason(&last) });
            }
            std::thread::sleep(NAP);
        }
    }
}

impl Root {
    fn get() -> Result<&'static Root> {
        static ROOT: PerProcess<Mutex<Option<&'static Root>>> = PerProcess::new(Mutex::default);
        let mut root = ROOT.get().lock();
        match *root {
            Some(root) => Ok(root),
            // If this is refused, the next call tries again.
            None => Ok(root.insert(Box::leak(Box::new(Root::start()?)))),
        }
    }

    fn start() -> Result<Root> {
        let listen = || {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            Ok::<_, std::io::Error>((listener.local_addr()?.port(), listener))
        };
        let (port, listener) = listen().map_err(|error| Error::Address {
            address: "0.0.0.0".to_owned(),
            reason: error.to_string(),
        })?;
        drop(stats::spawn("root", move || {
            for stream in listener.incoming() {
                match stream {
                    // Without a thread it is disconnected.
                    Ok(stream) if Strangers::is_one(&stream).is_ok() => {
                        drop(stats::spawn("welcome", move || {
                            drop(welcome(&stream));
                            Strangers::is_none(&stream);
                        }));
                    }
                    Ok(_) => {}
                    Err(_) => std::thread::sleep(NAP),
                }
            }
        })?);
        Ok(Root { port, key: RandomState::new() })
    }

    fn sign(&self, number: u64) -> (Tag, u64) {
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&number.to_le_bytes());
        // The child of a fork may have the keys of its parent.
        let hash = |what| self.key.hash_one((what, std::process::id(), number));
        tag[8..].copy_from_slice(&hash("tag").to_le_bytes());
        (tag, hash("proof"))
    }
}

/// A process has come, or a stranger, which does not get far.
fn welcome(stream: &TcpStream) -> std::io::Result<()> {
    let Ok(root) = Root::get() else { return Ok(()) };
    let hello = Patience::of(HELLO);
    let mut line = Line::new(stream, &hello)?;
    let tag: Tag = read_bytes(&mut line)?;
    let number = number_of(&tag);
    let (known, proof) = root.sign(number);
    if tag != known {
        return Ok(());
    }
    line.write_all(&proof.to_le_bytes())?;
    let Hello { tag: _, world, limit, port, process, ranks } = read_hello(&mut line)?;
    if world > MOST_RANKS {
        return Ok(());
    }
    Strangers::is_none(stream);
    let from = stream.peer_addr()?.ip();
    let entry = Entry { address: SocketAddr::new(from, port).to_string(), process, ranks };
    let answer = match enter(number, world, entry.clone()) {
        Err(refused) => refused,
        Ok(done) => match wait(stream, number, &done, limit) {
            Some(table) => table,
            None => leave(number, &entry, &done),
        },
    };
    Line::new(stream, &Patience::of(HELLO))?.write_all(&answer)
}

/// Connections that have not proved to know an id. Where there are more, the oldest is disconnected.
struct Strangers;

static STRANGERS: PerProcess<Mutex<VecDeque<TcpStream>>> = PerProcess::new(Mutex::default);

impl Strangers {
    const MOST: usize = 128;

    fn is_one(stream: &TcpStream) -> std::io::Result<()> {
        let mut strangers = STRANGERS.get().lock();
        strangers.push_back(stream.try_clone()?);
        if strangers.len() > Strangers::MOST
            && let Some(oldest) = strangers.pop_front()
        {
            oldest.shutdown(Shutdown::Both).ok();
        }
        Ok(())
    }

    fn is_none(stream: &TcpStream) {
        let Ok(address) = stream.peer_addr() else { return };
        STRANGERS
            .get()
            .lock()
            .retain(|other| other.peer_addr().is_ok_and(|other| other != address));
    }
}

fn number_of(tag: &Tag) -> u64 {
    tag[..8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// Enters a process; refused with what is wrong. What it gets tells when all are there.
fn enter(number: u64, world: usize, entry: Entry) -> Result<Receiver<Arc<[u8]>>, Arc<[u8]>> {
    let mut sessions = SESSIONS.get().lock();
    if MET.get().lock().contains(&number) {
        return Err(answer(USED, &[]));
    }
    let new = || Session { world, waiting: Vec::new() };
    let session = sessions.entry(number).or_insert_with(new);
    if session.world != world {
        return Err(answer(OTHER_WORLD, &(session.world as u32).to_le_bytes()));
    }
    let mut taken = session.waiting.iter().flat_map(|waiting| &waiting.entry.ranks);
    if let Some(rank) = taken.find(|rank| entry.ranks.contains(rank)) {
        return Err(answer(DUPLICATE, &(*rank as u32).to_le_bytes()));
    }
    let (done, receive) = sync_channel(1);
    session.waiting.push(Waiting { entry, done });
    if session.missing().is_empty()
        && let Some(mut session) = sessions.remove(&number)
    {
        MET.get().lock().insert(number);
        session.waiting.sort_by_key(|waiting| waiting.entry.ranks.iter().min().copied());
        let mut table = vec![TABLE];
        table.extend((session.waiting.len() as u32).to_le_bytes());
        session.waiting.iter().for_each(|waiting| waiting.entry.put(&mut table));
        let table: Arc<[u8]> = table.into();
        for waiting in session.waiting {
            // One that has just given up takes it too.
            waiting.done.send(table.clone()).ok();
        }
    }
    Ok(receive)
}

/// Waits until all are there. None: the process has hung up, which it does at its limit; a little before it is told who is missing.
fn wait(
    stream: &TcpStream,
    number: u64,
    done: &Receiver<Arc<[u8]>>,
    limit: Duration,
) -> Option<Arc<[u8]>> {
    let began = Instant::now();
    let mut tell_after = Some(limit.saturating_sub(margin(limit)));
    let peek = || {
        stream.set_nonblocking(true)?;
        let peeked = stream.peek(&mut [0]);
        stream.set_nonblocking(false)?;
        peeked
    };
    loop {
        if let Ok(table) = done.recv_timeout(LOOK) {
            return Some(table);
        }
        let is_there = peek().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        if !is_there || began.elapsed() >= limit + HELLO {
            return None;
        }
        if tell_after.take_if(|after| began.elapsed() >= *after).is_some() {
            let missing = SESSIONS.get().lock().get(&number)?.missing();
            let status = ranks_of(STATUS, &missing);
            Line::new(stream, &Patience::of(HELLO)).ok()?.write_all(&status).ok()?;
        }
    }
}

/// Takes a process back, unless all have come meanwhile; returns its answer.
fn leave(number: u64, entry: &Entry, done: &Receiver<Arc<[u8]>>) -> Arc<[u8]> {
    let mut sessions = SESSIONS.get().lock();
    if let Ok(table) = done.try_recv() {
        return table;
    }
    let Some(session) = sessions.get_mut(&number) else {
        return answer(MISSING, &0u32.to_le_bytes());
    };
    let mut missing = Vec::new();
    put_ranks(&mut missing, &session.missing());
    session.waiting.retain(|waiting| waiting.entry.ranks != entry.ranks);
    if session.waiting.is_empty() {
        sessions.remove(&number);
    }
    answer(MISSING, &missing)
}

impl Session {
    fn missing(&self) -> Vec<usize> {
        let mut here = vec![false; self.world];
        for rank in self.waiting.iter().flat_map(|waiting| &waiting.entry.ranks) {
            here[*rank] = true;
        }
        (0..self.world).filter(|rank| !here[*rank]).collect()
    }
}

fn answer(kind: u8, rest: &[u8]) -> Arc<[u8]> {
    [&[kind], rest].concat().into()
}
