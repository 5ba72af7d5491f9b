//! [`Mesh`]: the connections between the processes of a [`Group`](crate::Group), and the communicators that share them.
//!
//! | a peer's connection | means | what its channels see |
//! |---|---|---|
//! | says goodbye, then ends | the process has dropped its group | [`PeerLeft`](LostCause::PeerLeft), behind its messages |
//! | ends without | the process was killed, or its host is gone | [`PeerGone`](LostCause::PeerGone), behind its messages |
//!
//! A channel is a communicator's. Its number is made of its members and of how many they have had, so that all of them have the same. What comes for a channel that is
//! not open yet is kept; what comes for one that was closed is dropped.
//!
//! # Invariants
//! 1. A thread a connection reads always, whatever its process does, so that writing never waits for a rank to receive.
//! 2. A frame is written whole, or its connection ends.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::call::Head;
use crate::error::{LostCause, Result};
use crate::exchange::{Inbox, Message, Wire};
use crate::{stats, system};

/// How often a writer that a peer does not read from looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// How long it tells a peer of an end, which may be as stuck as what ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long it waits for that peer at most: its reader does nothing but read.
const STUCK: Duration = Duration::from_secs(30);

const HEADER: usize = 8 + 1 + 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Abort,
    Leave,
    Goodbye,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Data, Kind::Abort, Kind::Leave, Kind::Goodbye];
}

/// A process's connections to the others.
pub(crate) struct Mesh {
    rank: usize,
    /// By rank; none to itself.
    links: Vec<Option<Mutex<TcpStream>>>,
    registry: Arc<Registry>,
}

/// What readers deliver to.
#[derive(Default)]
struct Registry {
    state: Mutex<RegistryState>,
}

#[derive(Default)]
struct RegistryState {
    open: HashMap<u64, OpenChannel>,
    closed: HashSet<u64>,
    early: Vec<(u64, usize, Frame)>,
    /// Channels so far, by what stands for their members.
    made: HashMap<u32, u32>,
    ended: HashMap<usize, LostCause>,
}

struct OpenChannel {
    inbox: Arc<Inbox>,
    /// Ranks of the mesh, by their ranks in the channel.
    members: Arc<[usize]>,
}

enum Frame {
    Message(Message),
    Abort,
    Leave,
}

/// The connections as a communicator has them.
pub(crate) struct MeshChannel {
    mesh: Arc<Mesh>,
    number: u64,
    members: Arc<[usize]>,
    inbox: Arc<Inbox>,
}

impl Mesh {
    /// Starts a reader a connection.
    pub(crate) fn new(rank: usize, connections: Vec<Option<TcpStream>>) -> Result<Arc<Mesh>> {
        let registry = Arc::new(Registry::default());
        let mut links = Vec::new();
        for (peer, connection) in connections.into_iter().enumerate() {
            let Some(stream) = connection else {
                links.push(None);
                continue;
            };
            // A connection whose options cannot be set ends, and its peer with it: it is found by reading.
            stream.set_nodelay(true).ok();
            system::find_lost_hosts(&stream);
            stream.set_read_timeout(None).ok();
            stream.set_write_timeout(Some(LOOK)).ok();
            match stream.try_clone() {
                Ok(reading) => {
                    let registry = registry.clone();
                    drop(stats::spawn("reader", move || read_all(peer, reading, &registry))?);
                }
                Err(_) => registry.end(peer, LostCause::PeerGone { rank: peer }),
            }
            links.push(Some(Mutex::new(stream)));
        }
        Ok(Arc::new(Mesh { rank, links, registry }))
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Those whose processes have ended, or left.
    pub(crate) fn ended(&self) -> Vec<usize> {
        let mut ended: Vec<_> = self.registry.state.lock().ended.keys().copied().collect();
        ended.sort_unstable();
        ended
    }

    /// Opens the next channel of these members.
    pub(crate) fn open_next(self: &Arc<Self>, members: &Arc<[usize]>) -> MeshChannel {
        let number = self.registry.next_of(members);
        let (mesh, members) = (self.clone(), members.clone());
        let inbox = self.registry.open(number, &members);
        MeshChannel { mesh, number, members, inbox }
    }

    /// Writes a frame without data; a peer that does not take it finds that the connection has ended.
    fn tell(&self, to: usize, number: u64, kind: Kind) {
        let began = Instant::now();
        let is_wanted = || began.elapsed() < LAST_WORDS;
        self.write(to, (number, kind), [&[], &[]], is_wanted).ok();
    }

    /// Writes a frame; gives up when it is not wanted any more.
    fn write(
        &self,
        to: usize,
        (number, kind): (u64, Kind),
        parts: [&[u8]; 2],
        is_wanted: impl Fn() -> bool,
    ) -> std::result::Result<(), LostCause> {
        let Some(Some(link)) = self.links.get(to) else { return Ok(()) };
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>() as u64;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&number.to_le_bytes());
        header[8] = kind as u8;
        header[9..].copy_from_slice(&bytes.to_le_bytes());
        let mut stream = link.lock();
        let [head, data] = parts;
        let written = [&header, head, data]
            .into_iter()
            .try_for_each(|part| write_all(&mut stream, part, &is_wanted));
        written.map_err(|_| {
            // A part of the frame may be there: what follows would be read as the rest of it.
            stream.shutdown(Shutdown::Both).ok();
            LostCause::PeerGone { rank: to }
        })
    }
}

/// The reader ends when the peer has closed its side as well.
impl Drop for Mesh {
    fn drop(&mut self) {
        for peer in 0..self.links.len() {
            self.tell(peer, 0, Kind::Goodbye);
            if let Some(link) = &self.links[peer] {
                link.lock().shutdown(Shutdown::Write).ok();
            }
        }
    }
}

impl Registry {
    fn next_of(&self, members: &[usize]) -> u64 {
        // FNV-1a: the same in every process.
        let step = |hash: u32, member: &usize| (hash ^ *member as u32).wrapping_mul(0x0100_0193);
        let members = members.iter().fold(0x811c_9dc5, step);
        let mut state = self.state.lock();
        let made = state.made.entry(members).or_default();
        *made += 1;
        u64::from(members) << 32 | u64::from(*made)
    }

    fn open(&self, number: u64, members: &Arc<[usize]>) -> Arc<Inbox> {
        let mut state = self.state.lock();
        let RegistryState { open, early, ended, .. } = &mut *state;
        let inbox = Inbox::new(members.len());
        let channel = OpenChannel { inbox: inbox.clone(), members: members.clone() };
        let (now, later) = early.drain(..).partition(|(to, ..)| *to == number);
        *early = later;
        let now: Vec<_> = now;
        now.into_iter().for_each(|(_, from, frame)| channel.deliver(from, frame));
        ended.iter().for_each(|(from, cause)| channel.end(*from, cause));
        open.insert(number, channel);
        inbox
    }

    fn close(&self, number: u64) {
        let mut state = self.state.lock();
        state.open.remove(&number);
        state.closed.insert(number);
        state.early.retain(|(to, ..)| *to != number);
    }

    fn deliver(&self, number: u64, from: usize, frame: Frame) {
        let mut state = self.state.lock();
        if let Some(channel) = state.open.get(&number) {
            channel.deliver(from, frame);
        } else if !state.closed.contains(&number) {
            state.early.push((number, from, frame));
        }
    }

    fn end(&self, from: usize, cause: LostCause) {
        let mut state = self.state.lock();
        state.open.values().for_each(|channel| channel.end(from, &cause));
        state.ended.entry(from).or_insert(cause);
    }
}

impl OpenChannel {
    fn member(&self, from: usize) -> Option<usize> {
        self.members.iter().position(|member| *member == from)
    }

    fn deliver(&self, from: usize, frame: Frame) {
        let Some(rank) = self.member(from) else { return };
        match frame {
            Frame::Message(message) => self.inbox.push(rank, message),
            Frame::Abort => self.inbox.fail(LostCause::PeerAborted { rank }),
            Frame::Leave => self.inbox.end_of(rank, LostCause::PeerLeft { rank }),
        }
    }

    fn end(&self, from: usize, cause: &LostCause) {
        let Some(rank) = self.member(from) else { return };
        let cause = match cause {
            LostCause::PeerLeft { .. } => LostCause::PeerLeft { rank },
            _ => LostCause::PeerGone { rank },
        };
        self.inbox.end_of(rank, cause);
    }
}

impl MeshChannel {
    fn others(&self) -> impl Iterator<Item = usize> {
        self.members.iter().copied().filter(|member| *member != self.mesh.rank)
    }
}

impl Wire for MeshChannel {
    fn inbox(&self, _rank: usize) -> Arc<Inbox> {
        self.inbox.clone()
    }

    fn send(&self, from: usize, to: usize, message: Message) -> std::result::Result<(), LostCause> {
        if from == to {
            self.inbox.push(from, message);
            return Ok(());
        }
        let Message { head, data } = message;
        let is_wanted = || self.inbox.failed().is_none();
        let parts = [&head.to_bytes()[..], &data[..]];
        self.mesh
            .write(self.members[to], (self.number, Kind::Data), parts, is_wanted)
            .map_err(|_| self.inbox.failed().unwrap_or(LostCause::PeerGone { rank: to }))
    }

    fn abort(&self, _from: usize) {
        self.others().for_each(|peer| self.mesh.tell(peer, self.number, Kind::Abort));
    }

    fn leave(&self, _from: usize) {
        self.others().for_each(|peer| self.mesh.tell(peer, self.number, Kind::Leave));
    }
}

impl Drop for MeshChannel {
    fn drop(&mut self) {
        self.mesh.registry.close(self.number);
    }
}

impl fmt::Debug for MeshChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, members) = (self.number, &self.members);
        write!(f, "MeshChannel({number:#x} of {members:?})")
    }
}

fn write_all(
    stream: &mut TcpStream,
    mut bytes: &[u8],
    is_wanted: &impl Fn() -> bool,
) -> std::io::Result<()> {
    let mut moved = Instant::now();
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => {
                bytes = &bytes[written..];
                moved = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
                    && is_wanted()
                    && moved.elapsed() < STUCK => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads until the connection ends.
fn read_all(peer: usize, mut stream: TcpStream, registry: &Registry) {
    let cause = loop {
        match read_frame(&mut stream) {
            Ok((_, Kind::Goodbye, _)) => break LostCause::PeerLeft { rank: peer },
            Ok((number, kind, data)) => {
                let frame = match kind {
                    Kind::Data => message(&data),
                    Kind::Abort => Some(Frame::Abort),
                    _ => Some(Frame::Leave),
                };
                let Some(frame) = frame else { break LostCause::PeerGone { rank: peer } };
                registry.deliver(number, peer, frame);
            }
            Err(_) => break LostCause::PeerGone { rank: peer },
        }
    };
    registry.end(peer, cause);
    // Until the peer closes its side: an end with something unread would take back what was written last.
    std::io::copy(&mut stream, &mut std::io::sink()).ok();
}

fn message(bytes: &[u8]) -> Option<Frame> {
    let (head, data) = bytes.split_first_chunk::<{ Head::BYTES }>()?;
    Some(Frame::Message(Message { head: Head::from_bytes(*head), data: data.into() }))
}

fn read_frame(stream: &mut TcpStream) -> std::io::Result<(u64, Kind, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (number, bytes) = (word(0), word(9));
    let kind = Kind::ALL.get(usize::from(header[8])).ok_or(ErrorKind::InvalidData)?;
    let mut data = Vec::new();
    // As much as comes, whatever was announced.
    if stream.take(bytes).read_to_end(&mut data)? as u64 != bytes {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((number, *kind, data))
}
