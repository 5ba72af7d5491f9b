//! [`Mesh`]: the connections between the processes of a [`Group`](crate::Group), or of an id, and the communicators that share them. A process
//! that has all ranks has no connections.
//!
//! | a peer's connection | means | what its channels see |
//! |---|---|---|
//! | says goodbye, then ends | the process has dropped its group | [`PeerLeft`](LostCause::PeerLeft), after its messages |
//! | ends without | the process was killed, or its host is gone | [`PeerGone`](LostCause::PeerGone), after its messages |
//! | sends something that is not a frame | it is a foreign program, and is disconnected | [`BadMessage`](LostCause::BadMessage) |
//!
//! Each communicator has a channel. The channel's number is derived from its members and how many channels they have had, so that all
//! processes compute the same; the [`registry`] decides how they come together.
//!
//! A process can have several ranks: they share its connections, and a frame names the ranks that it is from and for.
//!
//! # Invariants
//! 1. One thread per connection always reads, whatever its process does, so that writing never waits for a rank to receive.
//! 2. A frame is written whole, or its connection ends.
#![forbid(unsafe_code)]

mod agreement;
mod frame;
mod link;
mod reader;
mod registry;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

pub(crate) use self::frame::Arrival;
use self::frame::{Kind, Label};
use self::link::{Link, Written};
use self::reader::Reader;
use self::registry::{End, Inboxes, Party, Registry};
use crate::error::{CollectiveLost, Error, LostCause, Result};
use crate::exchange::{Inbox, Message, Purpose};
use crate::patience::Patience;
use crate::rendezvous::Peer;
use crate::stats;

/// A process's connections to the others.
pub(crate) struct Mesh {
    own: Vec<usize>,
    links: Vec<Arc<Link>>,
    registry: Arc<Registry>,
    /// Held by the one agreement at a time.
    agreeing: Arc<Mutex<()>>,
    /// This process is calling for an agreement.
    is_calling: Arc<AtomicBool>,
}

/// A process that is calling for an agreement.
pub(crate) struct Calling(Arc<AtomicBool>);

impl Drop for Calling {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A communicator's view of the connections.
pub(crate) struct Channel {
    mesh: Arc<Mesh>,
    number: u64,
    /// The agreement that its members come from; 0 is none.
    epoch: u64,
    members: Arc<[usize]>,
    inboxes: Inboxes,
    /// All have come, or all know that they have not.
    is_settled: AtomicBool,
}

impl Mesh {
    /// Starts a reader for each connection.
    pub(crate) fn new(own: Vec<usize>, peers: Vec<Peer>) -> Result<Arc<Mesh>> {
        let registry = Arc::new(Registry::default());
        registry.state.lock().links = peers.iter().map(|peer| peer.ranks.clone()).collect();
        let (mut links, agreeing) = (Vec::new(), Arc::<Mutex<()>>::default());
        for (at, Peer { ranks, stream }) in peers.into_iter().enumerate() {
            // A connection whose options cannot be set ends, and its peer with it: the read finds that.
            let link = Arc::new(Link::new(ranks.clone(), stream));
            let reading = link.reader().map_err(|error| {
                // Too many open files: not the peer's fault.
                Error::Thread { what: "reader", reason: error.to_string() }
            })?;
            let (registry, own, agreeing) = (registry.clone(), own.clone(), agreeing.clone());
            let reader = Reader { at, ranks, link: Arc::downgrade(&link), registry, own, agreeing };
            links.push(link);
            drop(stats::spawn("reader", move || reader.read_all(reading))?);
        }
        Ok(Arc::new(Mesh { own, links, registry, agreeing, is_calling: Arc::default() }))
    }

    /// Begins a call for an agreement and what follows it. The other processes would take a second call for the next agreement.
    pub(crate) fn call(&self) -> Result<Calling> {
        match self.is_calling.swap(true, Ordering::SeqCst) {
            false => Ok(Calling(self.is_calling.clone())),
            true => Err(Error::Recovering),
        }
    }

    /// The ranks of this process.
    pub(crate) fn own(&self) -> &[usize] {
        &self.own
    }

    /// The ranks whose processes have ended, or left.
    pub(crate) fn ended(&self) -> Vec<usize> {
        let mut ended: Vec<_> = self.registry.state.lock().ended.keys().copied().collect();
        ended.sort_unstable();
        ended
    }

    /// Opens the next channel of these members, in ascending order.
    pub(crate) fn open_next(self: &Arc<Self>, epoch: u64, members: &Arc<[usize]>) -> Arc<Channel> {
        let (number, inboxes) = self.registry.open_next(epoch, members, &self.own);
        let (mesh, members, is_settled) = (self.clone(), members.clone(), AtomicBool::new(false));
        Arc::new(Channel { mesh, number, epoch, members, inboxes, is_settled })
    }

    /// Writes a small frame; a peer that does not take it turns out to be gone.
    fn tell(&self, link: &Link, label: Label, rest: &[u8]) {
        if let Written::Broken = link.tell(label, rest) {
            self.registry.await_end(&link.ranks);
        }
    }
}

/// The reader ends when the peer has closed its side as well.
impl Drop for Mesh {
    fn drop(&mut self) {
        for link in &self.links {
            link.tell(Label::of(0, Kind::Goodbye), &[]);
            link.close();
        }
    }
}

impl Channel {
    /// Waits until every rank has come and confirmed; returns what each process said, and the channel that they are in. A process that gives up
    /// tells the others.
    pub(crate) fn gather(
        self: Arc<Self>,
        hello: &Arrival,
        patience: &Patience,
    ) -> Result<(Arc<[Arrival]>, Arc<Channel>)> {
        let mut channel = self;
        loop {
            let gathered = channel.gather_once(hello, patience);
            channel.settle();
            match gathered {
                Ok(Some(hellos)) => return Ok((hellos, channel)),
                // All of them go on to the next channel.
                Ok(None) => {
                    let Channel { mesh, epoch, members, .. } = &*channel;
                    channel = mesh.open_next(*epoch, members);
                }
                Err(error) => {
                    channel.tell_others(Kind::GaveUp, 0, &[]);
                    return Err(error);
                }
            }
        }
    }

    /// The inbox of a rank of this process.
    pub(crate) fn inbox(&self, rank: usize) -> Arc<Inbox> {
        self.own(rank).cloned().unwrap_or_else(Inbox::new)
    }

    pub(crate) fn send(
        &self,
        from: usize,
        to: usize,
        message: Message,
    ) -> std::result::Result<(), LostCause> {
        if let Some(inbox) = self.own(to) {
            inbox.push(from, message);
            return Ok(());
        }
        let failed = || self.own(from).and_then(|inbox| inbox.failed());
        let gone = || failed().unwrap_or_else(|| self.end_of(to));
        let Some(link) = self.link_to(to) else { return Err(gone()) };
        let Message { purpose, head, data } = message;
        let head = head.to_bytes();
        let (kind, rest) = match purpose {
            Purpose::Data => (Kind::Data, head.to_vec()),
            Purpose::Signature => (Kind::Signature, head.to_vec()),
            Purpose::Waits(number) => {
                (Kind::Waits, [&number.to_le_bytes()[..], &head[..]].concat())
            }
        };
        let label = Label { from, to, ..Label::of(self.number, kind) };
        match link.write(label, [&rest, &data], || failed().is_none()) {
            Written::Whole => Ok(()),
            Written::NotBegun => Err(gone()),
            Written::Broken => {
                // Before the caller learns of it.
                self.mesh.registry.await_end(&link.ranks);
                Err(gone())
            }
        }
    }

    /// Tells `from` that `by` has taken this many of its bytes.
    pub(crate) fn taken(&self, by: usize, from: usize, bytes: u64) {
        match (self.own(from), self.link_to(from)) {
            (Some(inbox), _) => inbox.took(by, bytes),
            (None, Some(link)) => {
                let label = Label { from: by, to: from, ..Label::of(self.number, Kind::Taken) };
                self.mesh.tell(link, label, &bytes.to_le_bytes());
            }
            (None, None) => {}
        }
    }

    /// Tells the other ranks that these ranks lost the communicator, and why.
    pub(crate) fn fail(&self, own: &[usize], cause: &LostCause) {
        self.tell_others(Kind::Lost, own[0], &cause.told(own[0]).to_bytes());
    }

    /// Tells the other ranks that these ranks send nothing more.
    pub(crate) fn leave(&self, own: &[usize]) {
        for rank in own {
            let calls = self.own(*rank).map_or(0, |inbox| inbox.calls());
            self.tell_others(Kind::Leave, *rank, &calls.to_le_bytes());
        }
    }

    /// The next channel of the ranks that are left when some are excluded, whatever happened to this one.
    pub(crate) fn without(&self, excluded: &[usize]) -> Arc<Channel> {
        let is_left = |(rank, _): &(usize, &usize)| !excluded.contains(rank);
        let members = self.members.iter().enumerate().filter(is_left).map(|(_, member)| *member);
        self.mesh.open_next(self.epoch, &members.collect())
    }

    /// The other processes with ranks in the channel.
    fn others(&self) -> impl Iterator<Item = (usize, &Arc<Link>)> {
        let is_in = |rank: &usize| self.members.binary_search(rank).is_ok();
        let links = self.mesh.links.iter().enumerate();
        links.filter(move |(_, link)| link.ranks.iter().any(is_in))
    }

    /// The connection to a rank of another process.
    fn link_to(&self, to: usize) -> Option<&Arc<Link>> {
        let member = self.members.get(to)?;
        self.mesh.links.iter().find(|link| link.ranks.contains(member))
    }

    /// Sends to every other process with ranks in the channel.
    fn tell_others(&self, kind: Kind, from: usize, rest: &[u8]) {
        for (_, link) in self.others() {
            self.mesh.tell(link, Label { from, ..Label::of(self.number, kind) }, rest);
        }
    }

    fn own(&self, rank: usize) -> Option<&Arc<Inbox>> {
        self.inboxes.get(&rank)
    }

    /// The ranks of a connection, as the channel numbers them.
    fn ranks_of(&self, link: &Link) -> Vec<usize> {
        link.ranks.iter().filter_map(|rank| self.members.binary_search(rank).ok()).collect()
    }

    /// Waits until every rank is connected; `None` if one gave up.
    fn gather_once(&self, hello: &Arrival, patience: &Patience) -> Result<Option<Arc<[Arrival]>>> {
        self.tell_others(Kind::Hello, 0, &hello.to_bytes());
        if !self.wait_for(hello, patience, |party| party.hello.is_some(), false)? {
            return Ok(None);
        }
        self.tell_others(Kind::Ready, 0, &[]);
        if !self.wait_for(hello, patience, |party| party.is_ready, true)? {
            return Ok(None);
        }
        let state = self.mesh.registry.state.lock();
        let Some(channel) = state.open.get(&self.number) else { return Ok(None) };
        let introduced = |(at, link): (usize, &Arc<Link>)| {
            let hello = channel.parties.get(&at)?.hello.clone()?;
            Some(Arrival { ranks: self.ranks_of(link), ..hello })
        };
        Ok(Some(self.others().filter_map(introduced).chain([hello.clone()]).collect()))
    }

    /// Returns false if a process gave up. The last wait ends for all at once, or this process is told.
    fn wait_for(
        &self,
        hello: &Arrival,
        patience: &Patience,
        has_come: impl Fn(&Party) -> bool,
        is_last: bool,
    ) -> Result<bool> {
        let registry = &self.mesh.registry;
        let mut state = registry.state.lock();
        let lost = |cause| Error::Lost(CollectiveLost { rank: hello.ranks[0], cause });
        let missing = loop {
            let ended = |link: &Link| link.ranks.iter().find_map(|rank| state.ended.get(rank));
            if let Some((link, end)) =
                self.others().find_map(|(_, link)| Some((link, ended(link)?)))
            {
                let rank = self.ranks_of(link)[0];
                return Err(lost(end.cause(rank)));
            }
            let Some(channel) = state.open.get_mut(&self.number) else { return Ok(false) };
            if channel.parties.values().any(|party| party.gave_up) {
                return Ok(false);
            }
            if let Some(cause) = channel.inboxes.values().find_map(|inbox| inbox.failed()) {
                return Err(lost(cause));
            }
            let here = |at| channel.parties.get(&at).is_some_and(&has_come);
            let missing: Vec<_> = self.others().filter(|(at, _)| !here(*at)).collect();
            // Do not meet on behalf of a call that was given up.
            if missing.is_empty() && (is_last || patience.is_wanted()) {
                channel.is_complete = is_last;
                return Ok(true);
            }
            let called = |(at, link): &(usize, &Arc<Link>)| {
                Some((state.caller(*at)?, self.ranks_of(link)[0]))
            };
            if let Some((caller, teller)) = missing.iter().find_map(called) {
                // The caller need not be a member of the channel.
                let rank = self.members.binary_search(&caller).unwrap_or(teller);
                return Err(lost(LostCause::PeerRecovers { rank }));
            }
            if patience.is_over() {
                break missing;
            }
            registry.changed.wait_until(&mut state, patience.next_look());
        };
        drop(state);
        let mut missing: Vec<_> =
            missing.into_iter().flat_map(|(_, link)| self.ranks_of(link)).collect();
        missing.sort_unstable();
        Err(patience.missing(missing, self.members.len()))
    }

    /// How the process of a rank ended.
    fn end_of(&self, rank: usize) -> LostCause {
        let state = self.mesh.registry.state.lock();
        let end = self.members.get(rank).and_then(|member| state.ended.get(member));
        end.unwrap_or(&End::Gone).cause(rank)
    }

    fn settle(&self) {
        // ORDERING: Relaxed: only its value counts.
        self.is_settled.store(true, Ordering::Relaxed);
    }
}

/// A channel that was never gathered is given up, or the others would wait for it.
impl Drop for Channel {
    fn drop(&mut self) {
        let (mesh, number) = (self.mesh.clone(), self.number);
        mesh.registry.close(number);
        if std::mem::replace(self.is_settled.get_mut(), true) {
            return;
        }
        let others: Vec<usize> = self.others().map(|(at, _)| at).collect();
        // Writing may wait, which this must not do.
        drop(stats::spawn("give-up", move || {
            let label = Label::of(number, Kind::GaveUp);
            others.into_iter().for_each(|at| mesh.tell(&mesh.links[at], label, &[]));
        }));
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, members) = (self.number, &self.members);
        write!(f, "Channel({number:#x} of {members:?})")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::frame::{Frame, Proposal, Step};
    use super::*;
    use crate::unique_id::UniqueId;

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let there = TcpStream::connect(address).expect("it listens");
        (listener.accept().expect("it has connected").0, there)
    }

    /// Connections are read in any order: the first caller is named, whichever process reports it first, and to any.
    #[test]
    fn the_first_caller_is_named() {
        let (to_zero, mut zero) = connection();
        let (to_one, mut one) = connection();
        let peer = |rank, stream| Peer { ranks: vec![rank], stream };
        let mesh = Mesh::new(vec![2], vec![peer(0, to_zero), peer(1, to_one)]).expect("a mesh");
        let called = Proposal {
            generation: 1,
            step: Step::Called,
            left: vec![0, 1, 2],
            gone: Vec::new(),
            caller: 1,
        };
        tell(&mut zero, Kind::Agree, &called.to_bytes());
        let channel = mesh.open_next(0, &[0, 1, 2].into());
        let (ranks, id) = (vec![2], UniqueId::of_group());
        let hello = Arrival { ranks, is_gpu: false, shrink: false, id };
        let lost = channel.gather(&hello, &Patience::of(Duration::from_secs(60)));
        let Err(Error::Lost(CollectiveLost { cause, .. })) = lost else { panic!("it is lost") };
        assert!(matches!(cause, LostCause::PeerRecovers { rank: 1 }), "{cause:?}");

        // Then this process calls as well.
        let patience = Patience::of(Duration::from_millis(1));
        tell(&mut zero, Kind::Noted, &[]);
        tell(&mut one, Kind::Noted, &[]);
        mesh.agree(&[0, 1, 2], &patience).expect("alone, as the others say nothing");
        let told = hear(&mut zero);
        assert_eq!((told.generation, told.caller), (1, 1));
    }

    /// Its earlier agreement counts, not that it was considered gone at that point.
    #[test]
    fn one_that_agrees_as_it_is_left_out() {
        let (to_one, mut one) = connection();
        let mesh =
            Mesh::new(vec![0], vec![Peer { ranks: vec![1], stream: to_one }]).expect("a mesh");
        let agreeing = std::thread::spawn(move || {
            mesh.agree(&[0, 1], &Patience::of(Duration::from_millis(1)))
        });
        let (left, gone) = (vec![0, 1], Vec::new());
        let first = hear(&mut one);
        assert_eq!((&first.left, &first.gone), (&left, &gone));
        while hear(&mut one).gone != [1] {}
        let agreed = Proposal { step: Step::Agreed, ..first };
        tell(&mut one, Kind::Agree, &agreed.to_bytes());
        tell(&mut one, Kind::Noted, &[]);
        let (members, _) = agreeing.join().expect("no panic").expect("one group");
        assert_eq!(members, left);
    }

    #[test]
    fn who_is_left_out_notes_it() {
        let (to_zero, mut zero) = connection();
        let mesh =
            Mesh::new(vec![1], vec![Peer { ranks: vec![0], stream: to_zero }]).expect("a mesh");
        let (left, gone) = (vec![0], vec![1]);
        let alone = Proposal { generation: 1, step: Step::Called, left, gone, caller: 0 };
        tell(&mut zero, Kind::Agree, &alone.to_bytes());
        assert!(matches!(frame::read(&mut zero, |_| false), Ok((_, Frame::Noted))));
        let late = mesh.agree(&[0, 1], &Patience::of(Duration::from_secs(60)));
        assert!(matches!(late, Err(Error::Excluded { by: 0 })), "{late:?}");
    }

    fn tell(stream: &mut TcpStream, kind: Kind, rest: &[u8]) {
        let header = Label::of(0, kind).to_bytes(rest.len());
        stream.write_all(&[&header[..], rest].concat()).expect("it is read");
    }

    /// The next proposal.
    fn hear(stream: &mut TcpStream) -> Proposal {
        loop {
            match frame::read(stream, |_| false) {
                Ok((_, Frame::Agree(told))) => break told,
                Ok(_) => {}
                Err(_) => panic!("it tells"),
            }
        }
    }
}
