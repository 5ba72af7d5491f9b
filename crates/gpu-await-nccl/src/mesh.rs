//! [`Mesh`]: the connections between the processes of a [`Group`](crate::Group), and the communicators that share them.
//!
//! | a peer's connection | means | what its channels see |
//! |---|---|---|
//! | says goodbye, then ends | the process has dropped its group | [`PeerLeft`](LostCause::PeerLeft), behind its messages |
//! | ends without | the process was killed, or its host is gone | [`PeerGone`](LostCause::PeerGone), behind its messages |
//!
//! A channel is a communicator's. Its number is made of its members and of how many they have had, so that all of them have the same. What
//! comes for a channel that is not open yet is kept; what comes for one that was closed is dropped.
//!
//! A process can have several ranks: they share its connections, and a frame names the ranks that it is from and for.
//!
//! # Invariants
//! 1. A thread a connection reads always, whatever its process does, so that writing never waits for a rank to receive.
//! 2. A frame is written whole, or its connection ends.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::call::Head;
use crate::error::{LostCause, Result};
use crate::exchange::{Inbox, Message, Wire};
use crate::rendezvous::Peer;
use crate::{stats, system};

/// How often a writer that a peer does not read from looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// How long it tells a peer of an end, which may be as stuck as what ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long it waits for that peer at most: its reader does nothing but read.
const STUCK: Duration = Duration::from_secs(30);

/// The channel's number, the kind, the sender's and the receiver's ranks in the channel, the length.
const HEADER: usize = 8 + 1 + 4 + 4 + 8;

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

/// What a frame is for.
#[derive(Clone, Copy, Debug)]
struct Label {
    number: u64,
    kind: Kind,
    from: usize,
    to: usize,
}

/// A process's connections to the others.
pub(crate) struct Mesh {
    own: Vec<usize>,
    links: Vec<Link>,
    registry: Arc<Registry>,
}

/// A connection to another process.
struct Link {
    ranks: Vec<usize>,
    stream: Mutex<TcpStream>,
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
    early: Vec<(u64, Frame)>,
    /// Channels so far, by what stands for their members.
    made: HashMap<u32, u32>,
    /// Ranks whose processes have ended, and whether they said goodbye.
    ended: HashMap<usize, bool>,
}

struct OpenChannel {
    /// By the ranks of the channel; none for those of other processes.
    inboxes: Arc<[Option<Arc<Inbox>>]>,
    /// Ranks of the mesh, by their ranks in the channel.
    members: Arc<[usize]>,
}

/// What a frame is, with ranks of its channel.
enum Frame {
    Message { from: usize, to: usize, message: Message },
    Abort { from: usize },
    Leave { from: usize },
}

/// The connections as a communicator has them.
pub(crate) struct MeshChannel {
    mesh: Arc<Mesh>,
    number: u64,
    members: Arc<[usize]>,
    inboxes: Arc<[Option<Arc<Inbox>>]>,
}

impl Mesh {
    /// Starts a reader a connection.
    pub(crate) fn new(own: Vec<usize>, peers: Vec<Peer>) -> Result<Arc<Mesh>> {
        let registry = Arc::new(Registry::default());
        let mut links = Vec::new();
        for Peer { ranks, stream } in peers {
            // A connection whose options cannot be set ends, and its peer with it: it is found by reading.
            stream.set_nodelay(true).ok();
            system::find_lost_hosts(&stream);
            stream.set_read_timeout(None).ok();
            stream.set_write_timeout(Some(LOOK)).ok();
            match stream.try_clone() {
                Ok(reading) => {
                    let (registry, ranks) = (registry.clone(), ranks.clone());
                    drop(stats::spawn("reader", move || read_all(&ranks, reading, &registry))?);
                }
                Err(_) => registry.end(&ranks, false),
            }
            links.push(Link { ranks, stream: Mutex::new(stream) });
        }
        Ok(Arc::new(Mesh { own, links, registry }))
    }

    /// Those of this process.
    pub(crate) fn own(&self) -> &[usize] {
        &self.own
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
        let inboxes = self.registry.open(number, &members, &self.own);
        MeshChannel { mesh, number, members, inboxes }
    }

    /// Writes a frame without data; a peer that does not take it finds that the connection has ended.
    fn tell(&self, link: &Link, label: Label) {
        let began = Instant::now();
        let is_wanted = || began.elapsed() < LAST_WORDS;
        link.write(label, [&[], &[]], is_wanted).ok();
    }
}

impl Link {
    /// Writes a frame; gives up when it is not wanted any more.
    fn write(
        &self,
        label: Label,
        parts: [&[u8]; 2],
        is_wanted: impl Fn() -> bool,
    ) -> std::io::Result<()> {
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>() as u64;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&label.number.to_le_bytes());
        header[8] = label.kind as u8;
        header[9..13].copy_from_slice(&(label.from as u32).to_le_bytes());
        header[13..17].copy_from_slice(&(label.to as u32).to_le_bytes());
        header[17..].copy_from_slice(&bytes.to_le_bytes());
        let mut stream = self.stream.lock();
        let [head, data] = parts;
        let written = [&header, head, data]
            .into_iter()
            .try_for_each(|part| write_all(&mut stream, part, &is_wanted));
        if written.is_err() {
            // A part of the frame may be there: what follows would be read as the rest of it.
            stream.shutdown(Shutdown::Both).ok();
        }
        written
    }
}

/// The reader ends when the peer has closed its side as well.
impl Drop for Mesh {
    fn drop(&mut self) {
        for link in &self.links {
            self.tell(link, Label { number: 0, kind: Kind::Goodbye, from: 0, to: 0 });
            link.stream.lock().shutdown(Shutdown::Write).ok();
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

    fn open(
        &self,
        number: u64,
        members: &Arc<[usize]>,
        own: &[usize],
    ) -> Arc<[Option<Arc<Inbox>>]> {
        let mut state = self.state.lock();
        let RegistryState { open, early, ended, .. } = &mut *state;
        let inbox = |member| own.contains(member).then(|| Inbox::new(members.len()));
        let inboxes: Arc<[_]> = members.iter().map(inbox).collect();
        let channel = OpenChannel { inboxes: inboxes.clone(), members: members.clone() };
        let (now, later) = early.drain(..).partition(|(to, _)| *to == number);
        *early = later;
        let now: Vec<_> = now;
        now.into_iter().for_each(|(_, frame)| channel.deliver(frame));
        ended.iter().for_each(|(from, left)| channel.end(*from, *left));
        open.insert(number, channel);
        inboxes
    }

    fn close(&self, number: u64) {
        let mut state = self.state.lock();
        state.open.remove(&number);
        state.closed.insert(number);
        state.early.retain(|(to, _)| *to != number);
    }

    fn deliver(&self, number: u64, frame: Frame) {
        let mut state = self.state.lock();
        if let Some(channel) = state.open.get(&number) {
            channel.deliver(frame);
        } else if !state.closed.contains(&number) {
            state.early.push((number, frame));
        }
    }

    /// A process has ended; with a goodbye it left.
    fn end(&self, ranks: &[usize], left: bool) {
        let mut state = self.state.lock();
        for rank in ranks {
            state.open.values().for_each(|channel| channel.end(*rank, left));
            state.ended.entry(*rank).or_insert(left);
        }
    }
}

impl OpenChannel {
    fn inboxes(&self) -> impl Iterator<Item = &Arc<Inbox>> {
        self.inboxes.iter().flatten()
    }

    fn deliver(&self, frame: Frame) {
        match frame {
            Frame::Message { from, to, message } => {
                if let Some(Some(inbox)) = self.inboxes.get(to) {
                    inbox.push(from, message);
                }
            }
            Frame::Abort { from } => {
                let cause = || LostCause::PeerAborted { rank: from };
                self.inboxes().for_each(|inbox| inbox.fail(cause()));
            }
            Frame::Leave { from } => {
                let cause = || LostCause::PeerLeft { rank: from };
                self.inboxes().for_each(|inbox| inbox.end_of(from, cause()));
            }
        }
    }

    fn end(&self, from: usize, left: bool) {
        let rank = self.members.iter().position(|member| *member == from);
        let Some(rank) = rank else { return };
        let cause = || match left {
            true => LostCause::PeerLeft { rank },
            false => LostCause::PeerGone { rank },
        };
        self.inboxes().for_each(|inbox| inbox.end_of(rank, cause()));
    }
}

impl MeshChannel {
    /// The connection to a rank of another process.
    fn link_to(&self, to: usize) -> Option<&Link> {
        let member = self.members.get(to)?;
        self.mesh.links.iter().find(|link| link.ranks.contains(member))
    }

    /// Tells every other process with ranks in the channel.
    fn tell_others(&self, kind: Kind, from: usize) {
        let is_in = |rank: &usize| self.members.contains(rank);
        for link in self.mesh.links.iter().filter(|link| link.ranks.iter().any(is_in)) {
            self.mesh.tell(link, Label { number: self.number, kind, from, to: 0 });
        }
    }

    fn own(&self, rank: usize) -> Option<&Arc<Inbox>> {
        self.inboxes.get(rank)?.as_ref()
    }
}

impl Wire for MeshChannel {
    fn inbox(&self, rank: usize) -> Arc<Inbox> {
        self.own(rank).cloned().unwrap_or_else(|| Inbox::new(self.members.len()))
    }

    fn send(&self, from: usize, to: usize, message: Message) -> std::result::Result<(), LostCause> {
        if let Some(inbox) = self.own(to) {
            inbox.push(from, message);
            return Ok(());
        }
        let failed = || self.own(from).and_then(|inbox| inbox.failed());
        let gone = || failed().unwrap_or(LostCause::PeerGone { rank: to });
        let Some(link) = self.link_to(to) else { return Err(gone()) };
        let Message { head, data } = message;
        let parts = [&head.to_bytes()[..], &data[..]];
        let label = Label { number: self.number, kind: Kind::Data, from, to };
        link.write(label, parts, || failed().is_none()).map_err(|_| gone())
    }

    fn abort(&self, from: usize) {
        self.tell_others(Kind::Abort, from);
    }

    fn leave(&self, from: usize) {
        self.tell_others(Kind::Leave, from);
    }

    fn without(&self, excluded: &[usize], _ranks: &[usize]) -> Arc<dyn Wire> {
        let is_left = |(rank, _): &(usize, &usize)| !excluded.contains(rank);
        let members = self.members.iter().enumerate().filter(is_left).map(|(_, member)| *member);
        Arc::new(self.mesh.open_next(&members.collect()))
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
fn read_all(ranks: &[usize], mut stream: TcpStream, registry: &Registry) {
    let left = loop {
        match read_frame(&mut stream) {
            Ok((Label { kind: Kind::Goodbye, .. }, _)) => break true,
            Ok((Label { number, kind, from, to }, data)) => {
                let frame = match kind {
                    Kind::Data => {
                        message(&data).map(|message| Frame::Message { from, to, message })
                    }
                    Kind::Abort => Some(Frame::Abort { from }),
                    _ => Some(Frame::Leave { from }),
                };
                let Some(frame) = frame else { break false };
                registry.deliver(number, frame);
            }
            Err(_) => break false,
        }
    };
    registry.end(ranks, left);
    // Until the peer closes its side: an end with something unread would take back what was written last.
    std::io::copy(&mut stream, &mut std::io::sink()).ok();
}

fn message(bytes: &[u8]) -> Option<Message> {
    let (head, data) = bytes.split_first_chunk::<{ Head::BYTES }>()?;
    Some(Message { head: Head::from_bytes(*head), data: data.into() })
}

fn read_frame(stream: &mut TcpStream) -> std::io::Result<(Label, Vec<u8>)> {
    let mut header = [0; HEADER];
    stream.read_exact(&mut header)?;
    let number =
        |at: Range<usize>| header[at].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let kind = *Kind::ALL.get(usize::from(header[8])).ok_or(ErrorKind::InvalidData)?;
    let (from, to) = (number(9..13) as usize, number(13..17) as usize);
    let (label, bytes) = (Label { number: number(0..8), kind, from, to }, number(17..HEADER));
    let mut data = Vec::new();
    // As much as comes, whatever was announced.
    if stream.take(bytes).read_to_end(&mut data)? as u64 != bytes {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((label, data))
}
