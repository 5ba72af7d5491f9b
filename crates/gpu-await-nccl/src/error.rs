//! Errors of the crate, and how they reach operations.
//!
//! | failure | is reported as |
//! |---|---|
//! | of making a communicator | an [`Error`] |
//! | of a call, at once or later | the operation's [`gpu_await::Error`], whose source chain has the [`Error`]: [`Error::of`] finds it |
//!
//! The operation's error names the operation, so the text of an [`Error`] does not.
#![forbid(unsafe_code)]

mod lost;

use std::time::Duration;

pub use self::lost::{CollectiveLost, LostCause};

/// A result with an [`Error`] of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a communicator could not be made, or a call was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No NCCL library could be loaded.
    #[error(
        "no NCCL: {reason}; looked for {}; install it (`pip install nvidia-nccl-cu13`, or the distribution's \
         `libnccl2`) and name its folder in `LD_LIBRARY_PATH`",
        .looked_for.join(", ")
    )]
    NoLibrary {
        /// The names that were tried.
        looked_for: Vec<String>,
        /// What the loader said.
        reason: String,
    },
    /// The NCCL library is too old.
    #[error(
        "NCCL {found} is too old: {needed} or newer is needed (`pip install nvidia-nccl-cu13`)"
    )]
    OldLibrary {
        /// The version of the library.
        found: String,
        /// The oldest that works.
        needed: &'static str,
    },
    /// The NCCL library, or the driver, lacks an entry point.
    #[error("{library} has no `{symbol}`: a newer one has")]
    MissingSymbol {
        /// Which library.
        library: &'static str,
        /// The entry point.
        symbol: &'static str,
    },
    /// NCCL refused a call.
    #[error("{call}: {text} ({code}){}", suffix(.detail))]
    Nccl {
        /// The entry point.
        call: &'static str,
        /// The number that NCCL returned.
        code: i32,
        /// What NCCL calls it.
        text: String,
        /// What NCCL says of its last error.
        detail: String,
    },
    /// The driver refused a call.
    #[error("{call} returned {code}")]
    Driver {
        /// The entry point.
        call: &'static str,
        /// The number that the driver returned.
        code: i32,
    },
    /// A thread could not be started.
    #[error("no thread for {what}: {reason}")]
    Thread {
        /// What it was for.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
    /// An error of gpu-await.
    #[error(transparent)]
    Runtime(#[from] gpu_await::Error),
    /// A communicator needs ranks.
    #[error("a world of {world} ranks, {local} of them in this process: at least one has to be")]
    NoRanks {
        /// Its size.
        world: usize,
        /// How many were given.
        local: usize,
    },
    /// A rank is not below the world size.
    #[error("rank {rank} does not exist: the ranks of a world of {world} are 0 to {}", .world.saturating_sub(1))]
    BadRank {
        /// The rank.
        rank: usize,
        /// The size of the communicator.
        world: usize,
    },
    /// A rank was given twice.
    #[error("rank {rank} is taken: give every process, or device, a rank of its own")]
    DuplicateRank {
        /// The rank.
        rank: usize,
    },
    /// Two ranks of one communicator would be on one GPU, which NCCL refuses.
    #[error("ranks {first} and {second} are both on {device}: give each rank a GPU of its own")]
    DuplicateDevice {
        /// A rank.
        first: usize,
        /// Another one.
        second: usize,
        /// The device of both.
        device: String,
    },
    /// A process of a group has a different number of devices than ranks.
    #[error(
        "{devices} devices for the ranks {ranks:?} of this process: give each rank one, in this order"
    )]
    DeviceCount {
        /// The ranks of this process.
        ranks: Vec<usize>,
        /// How many devices were given.
        devices: usize,
    },
    /// GPUs and host devices were mixed in one communicator.
    #[error("{first} and {second} cannot be in one communicator: use devices of one kind")]
    MixedDevices {
        /// A device.
        first: String,
        /// One of another kind.
        second: String,
    },
    /// Processes disagree about the number of ranks.
    #[error(
        "rank {rank} joined with a world size of {found}, the others with {expected}: start all ranks with the same size"
    )]
    WrongWorld {
        /// The rank that asked.
        rank: usize,
        /// The size of the world.
        expected: usize,
        /// The size that the rank gave.
        found: usize,
    },
    /// A world is larger than the crate supports.
    #[error("a world of {world} ranks is too large: {most} is the most")]
    WorldTooLarge {
        /// The size.
        world: usize,
        /// The largest one.
        most: usize,
    },
    /// The other processes go on without this one: one of them cannot reach it, or it did not call in time when they
    /// [recovered](crate::Group::recover).
    #[error(
        "rank {by} goes on without this process, which it could not reach, or which did not call in time: join a new group, or work alone"
    )]
    Excluded {
        /// A rank that says so.
        by: usize,
    },
    /// In [verify mode](gpu_await::DeviceBuilder::verify) a call waits until it is complete, before another rank's call is made.
    #[error(
        "ranks {ranks:?} of this process are on devices in verify mode, in which each would wait for the others: give each a process of its own, or verify without collectives"
    )]
    VerifyMode {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// A process calls for one agreement at a time.
    #[error(
        "this process calls `Group::recover` or `survivors` already: await that call, or drop it, before the next one"
    )]
    Recovering,
    /// Some ranks did not make the same call within the limit: to join, to connect. It is this process's view, and others may miss different ranks:
    /// [`Group::recover`](crate::Group::recover) agrees on the ranks to leave out, and does not fail for ranks that do not call it.
    #[error(
        "ranks {missing:?} of {world} did not come within {limit:?}, or left before the others came: see that each of them makes this call, or raise the limit; `Group::recover` goes on without those that do not call it{}",
        others(.refused)
    )]
    MissingRanks {
        /// The missing ranks.
        missing: Vec<usize>,
        /// How many there should be.
        world: usize,
        /// The time that was given.
        limit: Duration,
        /// The errors of processes that asked to join meanwhile and were refused; rank 0 of a group knows. A missing rank may be
        /// one of them.
        refused: Vec<Error>,
    },
    /// An address cannot be used.
    #[error("the address `{address}` cannot be used: {reason}")]
    Address {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// Nothing answered at the address within the limit, or the other side disconnected.
    #[error(
        "the rendezvous at {address} is closed: {reason}; check that rank 0 is running at this address"
    )]
    Closed {
        /// The address.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// The process that made a [`UniqueId`](crate::UniqueId) of host devices does not answer.
    #[error(
        "the process that made the unique id does not answer at {address}: {reason}; keep it running until every rank is connected"
    )]
    NoRoot {
        /// Where it was looked for.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// Bytes that are not a unique id, or one for another kind of device.
    #[error("this is not the unique id of a communicator of {expected}: {reason}")]
    BadId {
        /// The kind of devices.
        expected: &'static str,
        /// What is wrong.
        reason: &'static str,
    },
    /// A communicator could not be connected within its limit.
    #[error(
        "the communicator was not connected within {limit:?}: check that every rank connects with this id and world size"
    )]
    NotConnected {
        /// The time that was given.
        limit: Duration,
    },
    /// The remaining ranks of a communicator have no way to come together again.
    #[error(
        "{reason}: connect the remaining ranks with a new `UniqueId`, or use a `Group`, which can do without"
    )]
    CannotShrink {
        /// Why.
        reason: ShrinkRefusal,
    },
    /// A rank of another process.
    #[error("rank {rank} is not in this process; ranks {local:?} are")]
    NotLocal {
        /// The rank.
        rank: usize,
        /// Those that are here.
        local: Vec<usize>,
    },
    /// A verb that does not name a rank, on a communicator with several local ranks.
    #[error(
        "`{op}` does not say for which of the ranks {local:?} of this process: `group(|g| g.rank(..))` does, in a graph `in_graph_of`"
    )]
    SeveralRanks {
        /// The verb.
        op: &'static str,
        /// The ranks of this process.
        local: Vec<usize>,
    },
    /// An argument has the wrong length.
    #[error("{what} has {found} elements, expected {expected}")]
    WrongLength {
        /// The verb.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// How many elements it should have.
        expected: usize,
        /// How many it has.
        found: usize,
    },
    /// A length is not a multiple of the world size.
    #[error("{what} has {found} elements, not a multiple of the {world} ranks")]
    NotShared {
        /// The verb.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// How many elements it has.
        found: usize,
        /// The number of ranks.
        world: usize,
    },
    /// A rank sends to itself or receives from itself outside of a group.
    #[error("rank {rank} is the caller's own; copy on the device instead")]
    OwnRank {
        /// The verb.
        op: &'static str,
        /// The rank.
        rank: usize,
    },
    /// A recorded call was not submitted because the group's closure panicked.
    #[error("the call was not made: the closure of its group panicked")]
    NotCalled,
    /// The communicator was lost, before the call or while its work was pending.
    #[error(transparent)]
    Lost(#[from] CollectiveLost),
}

impl Error {
    /// Restates it as the error of the longer call that this one was part of: with that call's limit, world and rank numbers.
    pub(crate) fn of_call(
        mut self,
        limit: Duration,
        world: usize,
        rank_of: impl Fn(usize) -> usize,
    ) -> Error {
        match &mut self {
            Error::MissingRanks { missing, world: of, limit: given, .. } => {
                missing.iter_mut().for_each(|rank| *rank = rank_of(*rank));
                (*of, *given) = (world, limit);
            }
            Error::NotConnected { limit: given } => *given = limit,
            Error::Lost(CollectiveLost { rank, cause }) => {
                let ranks = cause.ranks_mut().iter_mut().chain([rank]);
                ranks.for_each(|rank| *rank = rank_of(*rank));
            }
            _ => {}
        }
        self
    }

    /// The operation that it belongs to, where it has none yet.
    pub(crate) fn op(&self) -> &'static str {
        match self {
            Error::SeveralRanks { op, .. }
            | Error::WrongLength { op, .. }
            | Error::NotShared { op, .. }
            | Error::OwnRank { op, .. } => op,
            _ => "collective",
        }
    }

    /// As the source of an operation's error. A gpu-await error is passed on as it is.
    pub(crate) fn into_source(self) -> Box<dyn std::error::Error + Send + Sync> {
        match self {
            Error::Runtime(error) => Box::new(error),
            error => Box::new(error),
        }
    }

    /// Finds the error of this crate in the source chain of an operation's error.
    ///
    /// # Examples
    /// ```
    /// # futures::executor::block_on(async {
    /// use gpu_await_nccl::{Communicator, Error, Reduction};
    /// let device = gpu_await::Device::host();
    /// let comm = Communicator::all(&[device.clone()]).await?;
    /// let x = device.ones::<f32>(4).queued()?;
    /// let mut y = device.zeros::<f32>(5).queued()?;
    /// let error = comm.all_reduce(&x, &mut y, Reduction::Sum).await.unwrap_err();
    /// assert!(matches!(Error::of(&error), Some(Error::WrongLength { expected: 4, found: 5, .. })));
    /// # Ok::<(), Error>(()) }).unwrap();
    /// ```
    #[must_use]
    pub fn of(error: &gpu_await::Error) -> Option<&Error> {
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = next {
            if let Some(ours) = error.downcast_ref::<Error>() {
                return Some(ours);
            }
            next = error.source();
        }
        None
    }

    /// Finds the [`CollectiveLost`] in the source chain of an operation's error. It may be that of another communicator, whose output the
    /// operation was to read. To recover, ask [`Communicator::lost`](crate::Communicator::lost) which communicator is lost, even when a
    /// call was refused because its input had failed.
    #[must_use]
    pub fn lost(error: &gpu_await::Error) -> Option<&CollectiveLost> {
        match Error::of(error) {
            Some(Error::Lost(lost)) => Some(lost),
            _ => None,
        }
    }
}

/// Why a communicator cannot shrink, in [`Error::CannotShrink`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShrinkRefusal {
    /// It was lost, and NCCL cannot shrink an aborted communicator.
    #[error("the communicator is lost ({cause}), and NCCL cannot shrink it any more")]
    Lost {
        /// Why it was lost.
        cause: LostCause,
    },
    /// The NCCL library has no `ncclCommShrink`.
    #[error("NCCL {found} cannot shrink a communicator; 2.27 can")]
    OldLibrary {
        /// The version of the library, as [`nccl_version`](crate::nccl_version) returns it.
        found: i32,
    },
    /// No rank is excluded, which NCCL refuses.
    #[error("no rank is excluded, and NCCL has no other way to connect the same ranks again")]
    NothingExcluded,
    /// A call on another thread is waiting for a rank that does not come, and cannot be interrupted without ending the communicator.
    #[error("a call of another thread is still connecting ranks")]
    Calling,
    /// The ranks have no connection.
    #[error("the ranks have no connection")]
    NotLinked,
}

fn others(refused: &[Error]) -> String {
    let texts: Vec<_> = refused.iter().map(Error::to_string).collect();
    if texts.is_empty() {
        String::new()
    } else {
        format!("; refused meanwhile: {}", texts.join("; "))
    }
}

fn suffix(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(": {detail}") }
}
