//! [`UniqueId`]: what ranks find one another by.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpu_await::DeviceKind;

use crate::error::{Error, Result};
use crate::nccl::{ID_BYTES, Nccl, RawId};

const HOST: &[u8; 16] = b"gpu-await host 1";

/// The id of a communicator: one rank makes it, and every rank [connects](crate::Communicator::builder) with it. It is
/// bytes, for whatever carries them: a file, a queue, a store; [`Group::join`](crate::Group::join) for who has nothing.
///
/// An id is good for one communicator.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; ID_BYTES]);

impl UniqueId {
    /// The number of bytes of an id.
    pub const BYTES: usize = ID_BYTES;

    /// Makes an id for devices of a kind: GPUs find one another on any host; the ranks of a host twin are in one process, and with
    /// [`Group::join`](crate::Group::join) in several.
    ///
    /// # Blocking
    /// On GPUs, the first in a process: NCCL is loaded and starts a thread that the ranks will talk to.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::OldLibrary`]; what NCCL says.
    ///
    /// # Source
    /// `ncclGetUniqueId`.
    pub fn new(kind: DeviceKind) -> Result<UniqueId> {
        if kind == DeviceKind::Cuda {
            return Ok(UniqueId(Nccl::get()?.unique_id()?.0));
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut id = [0; ID_BYTES];
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // ORDERING: Relaxed: only its value counts.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        id[..16].copy_from_slice(HOST);
        id[16..24].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
        id[24..32].copy_from_slice(&number.to_le_bytes());
        id[32..48].copy_from_slice(&since.as_nanos().to_le_bytes());
        Ok(UniqueId(id))
    }

    /// Takes the bytes of an id that another process made.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// Returns the bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// That of a group's, whose ranks have met already.
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

    pub(crate) fn check_for_host(self) -> Result<()> {
        let reason = "`UniqueId::new(DeviceKind::Host)` makes one";
        if self.is_host() {
            return Ok(());
        }
        Err(Error::BadId { expected: "host devices", reason })
    }

    fn is_host(self) -> bool {
        self.0.starts_with(HOST)
    }
}

/// The first bytes that differ.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(")?;
        self.0[16..48].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}
