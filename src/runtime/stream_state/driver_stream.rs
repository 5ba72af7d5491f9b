//! [`DriverStream`]: the driver's stream under a stream, who owns it, and who else uses it.
//!
//! | origin | destroyed by | other libraries put work on it | its multiprocessors |
//! |---|---|---|---|
//! | created by this crate | this crate | during loans; permanently once its raw handle was shared | those of its partition |
//! | adopted | its owner | always | those of its partition, if this device knows the partition |
//! | the engine's own | the engine | no | those of the device's default partition |

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::backend::{Backend, DriverResult, Query, RawStream, StreamOptions};
use crate::runtime::partitions::{EndingShare, Share};
use gpu_await_protocol::sharing::Sharing;

/// The owner of an adopted stream.
pub(crate) type Owner = Box<dyn Any + Send + Sync>;

/// Who owns the driver's stream; the rows of the table.
pub(super) enum Origin {
    Ours,
    Adopted(Option<Owner>),
    Engine,
}

pub(crate) struct DriverStream {
    pub(crate) raw: RawStream,
    options: StreamOptions,
    name: Option<Box<str>>,
    /// The multiprocessors that it is confined to.
    partition: Option<Arc<Share>>,
    /// Set once it has no handle.
    ending: OnceLock<EndingShare>,
    /// This crate destroys it.
    owned: bool,
    /// The owner of an adopted stream, if there is one.
    owner: Option<Owner>,
    /// Which others put work on it.
    pub(crate) sharing: Sharing,
    /// Another library's last calls took long, or it made none yet.
    foreign_takes_long: AtomicBool,
}

impl DriverStream {
    pub(super) fn new(
        raw: RawStream,
        options: StreamOptions,
        name: Option<Box<str>>,
        partition: Option<Arc<Share>>,
        origin: Origin,
    ) -> Self {
        let (owned, is_shared, owner) = match origin {
            Origin::Ours => (true, false, None),
            Origin::Adopted(owner) => (false, true, owner),
            Origin::Engine => (false, false, None),
        };
        DriverStream {
            raw,
            options,
            name,
            partition,
            ending: OnceLock::new(),
            owned,
            owner,
            sharing: Sharing::new(is_shared),
            foreign_takes_long: AtomicBool::new(true),
        }
    }

    /// How it was made; see [`is_blocking`](Self::is_blocking) for the driver's answer.
    pub(crate) fn options(&self) -> StreamOptions {
        self.options
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn is_owned(&self) -> bool {
        self.owned
    }

    /// Takes the owner of an adopted stream that ends.
    pub(super) fn take_owner(&mut self) -> Option<Owner> {
        self.owner.take()
    }

    /// The share of the multiprocessors that it is confined to.
    pub(crate) fn partition(&self) -> Option<&Arc<Share>> {
        self.partition.as_ref()
    }

    /// Called when it has no handle any more.
    pub(super) fn ends(&self) {
        self.partition.iter().for_each(|share| {
            self.ending.get_or_init(|| share.clone().ending());
        });
    }

    /// Gives up its share, once its work is complete.
    pub(super) fn leave_partition(&mut self) {
        drop((self.partition.take(), self.ending.take()));
    }

    /// Whether others confined it, to multiprocessors that this crate does not know. Their context may be destroyed at any time, with what
    /// was compiled for it or captured in it: so neither is done.
    pub(crate) fn is_confined_by_others(&self) -> bool {
        self.partition.is_none() && self.options.partition.is_some()
    }

    /// How many multiprocessors its work runs on.
    pub(crate) fn multiprocessors(&self, backend: &dyn Backend) -> u32 {
        let all = backend.limits().multiprocessors;
        self.partition.as_ref().map_or(all, |share| share.multiprocessors())
    }

    /// Whether it may hold work that is in no operation, or be ordered behind another stream's work.
    pub(crate) fn may_have_work_of_others(&self) -> bool {
        self.sharing.is_shared() || self.sharing.is_owed() || self.options.blocking
    }

    /// Whether the calls of another library are expected to take long: as the last time, or for the first time.
    pub(crate) fn foreign_takes_long(&self) -> bool {
        // ORDERING: Relaxed, here and below: a guess.
        self.foreign_takes_long.load(Ordering::Relaxed)
    }

    /// Records whether another library's calls took long.
    pub(crate) fn foreign_took_long(&self, long: bool) {
        self.foreign_takes_long.store(long, Ordering::Relaxed);
    }

    /// Whether nothing is left on it, other libraries' work included, by asking the driver.
    pub(super) fn is_through(&self, backend: &dyn Backend) -> DriverResult<bool> {
        // SAFETY: the driver stream is this one's, or its owner keeps it.
        let answer = unsafe { backend.stream_query(self.raw) }?;
        Ok(answer == Query::Complete)
    }

    /// Whether it is ordered with the legacy default stream.
    pub(crate) fn is_blocking(&self, backend: &dyn Backend) -> DriverResult<bool> {
        if self.raw.0 == RawStream::LEGACY.0 {
            return Ok(true);
        }
        // SAFETY: the driver stream is this one's, or its owner keeps it.
        let info = unsafe { backend.stream_info(self.raw) }?;
        Ok(info.blocking)
    }
}
