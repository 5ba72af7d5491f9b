//! [`UniqueId`]: identifies a communicator while its ranks connect.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_await::DeviceKind;

use crate::error::{Error, Result};
use crate::nccl::{ID_BYTES, Nccl, RawId};
use crate::rendezvous::root::{self, Place};

/// For host devices. Followed by the tag, the proof, a number that may be shown, the port, the number of addresses, and the addresses.
const HOST: &[u8; 16] = b"gpu-await host 2";
const TAG: Range<usize> = 16..32;
const PROOF: Range<usize> = 32..40;
const SHOWN: Range<usize> = 40..56;
const PORT: Range<usize> = 56..58;
const COUNT: usize = 58;
const ADDRESSES: usize = 60;

/// The id of a communicator. One rank creates it, and all ranks [connect](crate::Communicator::builder) with it. It is plain bytes, to be
/// distributed by whatever the program has: a file, a queue, a key-value store. [`Group::join`](crate::Group::join) needs none.
///
/// Each communicator needs an id of its own: on host devices an id is refused once its ranks have met.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; ID_BYTES]);

impl UniqueId {
    /// The size of an id in bytes.
    pub const BYTES: usize = ID_BYTES;

    /// Creates an id for a kind of device. It works within a process, across processes, and across hosts: the ranks connect to this process,
    /// which has to run until all of them are connected, and may have ranks or none. Ranks on host devices then exchange elements over TCP,
    /// even within a process; [`Communicator::all`](crate::Communicator::all) does that in memory. Anyone who knows the id can connect, so keep
    /// it secret.
    ///
    /// An id for host devices contains the IPv4 addresses of this host. This process listens at one port for all of its ids.
    ///
    /// # Blocking
    /// For GPUs, NCCL is loaded on first use. Both kinds start a thread on first use.
    ///
    /// # Errors
    /// For GPUs [`Error::NoLibrary`], [`Error::OldLibrary`], [`Error::MissingSymbol`], [`Error::Nccl`]. For host devices
    /// [`Error::Address`], [`Error::Thread`]: this process cannot listen.
    ///
    /// # Source
    /// `ncclGetUniqueId`.
    pub fn new(kind: DeviceKind) -> Result<UniqueId> {
        if kind == DeviceKind::Cuda {
            return Ok(UniqueId(Nccl::get()?.unique_id()?.0));
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // ORDERING: Relaxed: only its value counts.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let Place { tag, proof, port, addresses } = root::place(number)?;
        let mut id = [0; ID_BYTES];
        id[..HOST.len()].copy_from_slice(HOST);
        id[TAG].copy_from_slice(&tag);
        id[PROOF].copy_from_slice(&proof.to_le_bytes());
        let shown = u128::from(std::process::id()) << 64 | u128::from(number);
        id[SHOWN].copy_from_slice(&shown.to_le_bytes());
        id[PORT].copy_from_slice(&port.to_le_bytes());
        id[COUNT] = addresses.len() as u8;
        for (bytes, address) in id[ADDRESSES..].chunks_exact_mut(4).zip(&addresses) {
            bytes.copy_from_slice(&address.octets());
        }
        Ok(UniqueId(id))
    }

    /// Restores an id from the bytes of [`to_bytes`](Self::to_bytes).
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// Returns the bytes of the id.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The placeholder of a group's communicator, whose ranks exchange the id themselves.
    pub(crate) fn of_group() -> UniqueId {
        UniqueId([0; ID_BYTES])
    }

    /// The id as NCCL takes it.
    pub(crate) fn for_gpus(self) -> Result<RawId> {
        if self.is_host() || self.0 == [0; ID_BYTES] {
            let reason = "it was made for host devices, or by nobody";
            return Err(Error::BadId { expected: "GPUs", reason });
        }
        Ok(RawId(self.0))
    }

    /// Where the ranks on host devices meet.
    pub(crate) fn place(self) -> Result<Place> {
        if !self.is_host() {
            let reason = "`UniqueId::new(DeviceKind::Host)` makes one";
            return Err(Error::BadId { expected: "host devices", reason });
        }
        let [mut tag, mut proof, mut port] = [[0; 16]; 3];
        for (bytes, at) in [(&mut tag, TAG), (&mut proof, PROOF), (&mut port, PORT)] {
            bytes[..at.len()].copy_from_slice(&self.0[at]);
        }
        let number = |bytes: [u8; 16]| u128::from_le_bytes(bytes) as u64;
        let octets = |bytes: &[u8]| Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]);
        let addresses = self.0[ADDRESSES..].chunks_exact(4).map(octets);
        let addresses = addresses.take(usize::from(self.0[COUNT])).collect();
        Ok(Place { tag, proof: number(proof), port: number(port) as u16, addresses })
    }

    fn is_host(self) -> bool {
        self.0.starts_with(HOST)
    }
}

/// A part that differs between ids; for host devices, not a secret one.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = if self.is_host() { SHOWN } else { 16..48 };
        f.write_str("UniqueId(")?;
        self.0[shown].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_survives_the_bytes() {
        let id = UniqueId::new(DeviceKind::Host).expect("an id");
        let place = UniqueId::from_bytes(id.to_bytes()).place().expect("a place");
        let last = place.addresses.last().copied();
        assert!(place.addresses.len() <= Place::MOST_ADDRESSES && place.port > 0);
        assert_eq!(last, Some(Ipv4Addr::LOCALHOST));
        let other = UniqueId::new(DeviceKind::Host).expect("an id").place().expect("a place");
        assert!(place.tag != other.tag && place.proof != other.proof);
        assert_eq!(place.port, other.port);
        let shown = format!("{id:?}");
        let secret: String = place.tag.iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!shown.contains(&secret[..16]), "{shown}");
    }
}
