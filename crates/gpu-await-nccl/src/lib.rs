//! Awaitable collectives on NCCL, for [`gpu-await`](gpu_await): many GPUs and many hosts.
//!
//! NCCL moves the data. A collective is an [`Op`](gpu_await::Op) like any other: it is on its stream when the call returns, it is
//! ordered against kernels and copies by the memory it uses, and it can be awaited, joined and timed out. If a peer dies, a rank
//! never calls or NCCL reports an error, pending operations resolve with [`CollectiveLost`] and the process keeps running.
//!
//! ```
//! # futures::executor::block_on(async {
//! use gpu_await::Device;
//! use gpu_await_nccl::{Communicator, Reduction};
//!
//! let device = Device::host(); // `Device::cuda(0)?`
//! let comm = Communicator::all(&[device.clone()]).await?; // a world of one: every GPU of the process
//! let mut gradients = device.ones::<f32>(1024).queued()?; // a kernel's output
//! comm.all_reduce_in_place(&mut gradients, Reduction::Average).queued()?; // behind it, on the device
//! let gradients = device.download(&gradients).await?; // the one host wait
//! # assert_eq!(gradients, [1.0; 1024]);
//! # Ok::<(), gpu_await_nccl::Error>(()) }).unwrap();
//! ```
//!
//! # Making a communicator
//!
//! | ranks | use |
//! |---|---|
//! | all in this process | [`Communicator::all`] |
//! | in several processes or hosts that can reach one address | [`Group::join`]; with several ranks in a process [`Group::join_ranks`] |
//! | in several processes that share a store of their own | [`UniqueId`] and [`Communicator::builder`] |
//! | of another one, without some ranks | [`Communicator::shrink`] |
//! | of the remaining ranks of a group | [`Group::recover`] |
//!
//! # Devices
//! On GPUs the transport is NCCL 2.19 or newer, loaded at run time: `libnccl.so.2` from `LD_LIBRARY_PATH`, from the system, or as the
//! process has already loaded it. On host devices it is the *host twin*, Rust functions that exchange elements within a process and over
//! TCP, for tests without GPUs. Both share every check, name and error.
//!
//! The twin also detects what NCCL does not: collective calls that disagree in verb, reduction, root, type or length, and two ranks that
//! wait to receive from each other. The communicator is then lost with [`LostCause::Mismatch`]. It cannot detect a rank that calls
//! nothing, or a send that nobody receives: set a limit. A send completes at once while less than 4 MiB are in flight between the two
//! ranks, and waits for its receiver otherwise.
//!
//! # Graphs
//! [`Communicator::in_graph`] writes every verb to a [`Graph`](gpu_await::Graph), where it is captured, and
//! [groups](GraphCalls::group) of them: what neighbours exchange between two steps of a simulation, for example.

// Tests and examples may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod call;
mod communicator;
mod element;
mod error;
mod exchange;
mod group;
mod local;
mod mesh;
mod nccl;
mod patience;
mod quiet;
mod rendezvous;
mod stats;
mod sync;
mod system;
mod transport;
mod unique_id;
mod watchdog;

pub use communicator::builder::CommunicatorBuilder;
pub use communicator::group::{GroupCalls, RankCalls};
pub use communicator::in_graph::GraphCalls;
pub use communicator::{Communicator, nccl_version};
pub use element::{CollectiveElement, ElementType, Reduction};
pub use error::{CollectiveLost, Error, LostCause, Result, ShrinkRefusal};
pub use group::Group;
pub use local::LocalDevices;
pub use stats::{Stats, stats};
pub use unique_id::UniqueId;

/// Wraps an error of this crate as an operation's error, for `?` in the closure of [`Communicator::group`] and in functions
/// that return [`gpu_await::Result`].
impl From<Error> for gpu_await::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Runtime(error) => error,
            error => {
                let (op, cause) = (error.op().into(), error.into_source().into());
                gpu_await::ErrorDetail::Foreign { op, cause }.into()
            }
        }
    }
}
