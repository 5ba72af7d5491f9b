//! [`UniqueId`]: identifies a communicator while its ranks connect.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use gpu_await::DeviceKind;

use crate::error::{Error, Result};
use crate::nccl::{ID_BYTES, Nccl, RawId};

const HOST: &[u8; 16] = b"gpu-await host 1";

/// The id of a communicator. One rank creates it, and all ranks [connect](crate::Communicator::builder) with it. It is plain bytes, to be
/// distributed by whatever the program has: a file, a queue, a key-value store. [`Group::join`](crate::Group::join) needs none.
///
/// Each communicator needs an id of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId([u8; ID_BYTES]);

impl UniqueId {
    /// The size of an id in bytes.
    pub const BYTES: usize = ID_BYTES;

    /// Creates an id for a kind of device. An id for GPUs works across hosts. One for host devices works within this process; across
    /// processes use [`Group::join`](crate::Group::join).
    ///
    /// # Blocking
    /// For GPUs, NCCL is loaded on first use and starts a thread that the other ranks connect to.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::OldLibrary`], [`Error::MissingSymbol`], [`Error::Nccl`].
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

/// A part that differs between ids.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(")?;
        self.0[16..48].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}
