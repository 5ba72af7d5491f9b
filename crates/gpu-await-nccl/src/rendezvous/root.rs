//! The ids of host devices that this process makes, and the thread that coordinates their ranks: processes that share nothing but an id
//! come to the process that made it, which may have ranks or none.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use parking_lot::Mutex;

use super::acceptor::Acceptor;
use super::coordinator::{Coordinator, Turn};
use super::hello::Tag;
use super::{MOST_RANKS, NAP, USED};
use crate::error::{Error, Result};
use crate::{stats, system};
use gpu_await::sibling::PerProcess;

/// Where the ranks of an id meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) tag: [u8; 16],
    /// The answer of the process that made it, which nobody else knows.
    pub(crate) proof: u64,
    pub(crate) port: u16,
    /// In the order in which they are tried.
    pub(crate) addresses: Vec<Ipv4Addr>,
}

/// The secrets that this process makes ids with. Nobody else can make one that it accepts.
struct Root {
    port: u16,
    key: RandomState,
}

/// A place for the ranks of an id to meet at. The first one starts a thread that listens.
pub(crate) fn place(number: u64) -> Result<Place> {
    let root = Root::get()?;
    let mut addresses = system::addresses();
    addresses.truncate(Place::MOST_ADDRESSES - 1);
    // Last, because on another host this address is a different machine.
    addresses.push(Ipv4Addr::LOCALHOST);
    let (tag, proof) = root.sign(root.key.hash_one(("number", number)));
    Ok(Place { tag, proof, port: root.port, addresses })
}

impl Place {
    pub(crate) const MOST_ADDRESSES: usize = 16;

    pub(super) fn socket_addresses(&self) -> Vec<SocketAddr> {
        self.addresses.iter().map(|address| SocketAddr::from((*address, self.port))).collect()
    }

    /// What its ranks say: only the whole id reveals it.
    pub(super) fn password(&self) -> Tag {
        password(self.tag, self.proof)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<_> = self.addresses.iter().map(Ipv4Addr::to_string).collect();
        write!(f, "{}, port {}", addresses.join(" or "), self.port)
    }
}

impl Root {
    fn get() -> Result<&'static Root> {
        static ROOT: PerProcess<Mutex<Option<&'static Root>>> = PerProcess::new(Mutex::default);
        let mut root = ROOT.get().lock();
        match *root {
            Some(root) => Ok(root),
            // If starting fails, the next call tries again.
            None => Ok(root.insert(Root::start()?)),
        }
    }

    fn start() -> Result<&'static Root> {
        let listen = || {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            Ok::<_, std::io::Error>((listener.local_addr()?.port(), Acceptor::new(listener)?))
        };
        let (port, acceptor) = listen().map_err(|error| Error::Address {
            address: "0.0.0.0".to_owned(),
            reason: error.to_string(),
        })?;
        let root: &Root = Box::leak(Box::new(Root { port, key: RandomState::new() }));
        drop(stats::spawn("root", move || root.coordinate(acceptor))?);
        Ok(root)
    }

    /// Processes that have not proved to know an id get no further than the acceptor.
    fn coordinate(&self, mut acceptor: Acceptor) {
        let mut coordinators: HashMap<u64, Coordinator> = HashMap::new();
        // Each id is good for one communicator.
        let mut used = BTreeSet::new();
        loop {
            if coordinators.is_empty() {
                acceptor.wait();
            }
            let come = acceptor.poll();
            coordinators.retain(|number, coordinator| {
                let turn = coordinator.turn();
                if let Turn::Coming = turn {
                    return !coordinator.is_empty();
                }
                used.insert(*number);
                matches!(turn, Turn::Connecting)
            });
            for mut come in come {
                let (number, world) = (number_of(come.hello.tag), come.hello.world);
                let (tag, proof) = self.sign(number);
                if come.hello.tag != password(tag, proof) || world > MOST_RANKS {
                    continue;
                }
                // A new connection has room for a few bytes.
                come.stream.write_all(&proof.to_le_bytes()).ok();
                if used.contains(&number) {
                    come.stream.write_all(&[USED]).ok();
                    continue;
                }
                let new = || Coordinator::new(world, Vec::new());
                coordinators.entry(number).or_insert_with(new).welcome(come);
            }
            std::thread::sleep(NAP);
        }
    }

    fn sign(&self, number: u64) -> (Tag, u64) {
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&number.to_le_bytes());
        // A forked child may have the keys of its parent.
        let hash = |what| self.key.hash_one((what, std::process::id(), number));
        tag[8..].copy_from_slice(&hash("tag").to_le_bytes());
        (tag, hash("proof"))
    }
}

fn number_of(tag: Tag) -> u64 {
    tag[..8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The proof itself is the answer, so it is not sent.
fn password(mut tag: Tag, proof: u64) -> Tag {
    tag[8..].iter_mut().zip(proof.to_le_bytes()).for_each(|(byte, proof)| *byte ^= proof);
    tag
}
