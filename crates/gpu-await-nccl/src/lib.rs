//! Awaitable collectives on NCCL, for [`gpu-await`](gpu_await): many GPUs and many hosts.
//!
//! NCCL moves the data; a collective is an [`Op`](gpu_await::Op) like any other: on its stream when the call returns, ordered against
//! kernels and copies by the memory that it uses, awaited, joined, given a time limit. A peer that dies, a rank that never calls, an
//! error of NCCL's resolve what is pending with [`CollectiveLost`], and the process goes on.
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
//! # Which ranks are where
//!
//! | ranks | made by |
//! |---|---|
//! | all in this process | [`Communicator::all`] |
//! | in several processes or hosts, which can reach one address | [`Group::join`] |
//! | in several processes, with a store of their own | [`UniqueId`] and [`Communicator::builder`] |
//!
//! # Devices
//! On GPUs NCCL does the work: 2.19 or newer, loaded at run time (`libnccl.so.2`, from `LD_LIBRARY_PATH`, the system or a library that
//! the process has loaded already). On host devices functions do it, in one process and over TCP: the *host twin*, for tests without
//! GPUs. Its checks, names and errors are the same, and it finds mistakes that NCCL does not: ranks whose calls differ.
//!
//! # Graphs
//! Collectives are not parts of a [`Graph`](gpu_await::Graph): the loan of memory that orders them lasts longer than a call.

mod call;
mod communicator;
mod element;
mod error;
mod exchange;
mod group;
mod mesh;
mod nccl;
mod rendezvous;
mod stats;
mod system;
mod transport;
mod unique_id;
mod watchdog;

pub use communicator::builder::CommunicatorBuilder;
pub use communicator::group::{GroupCalls, RankCalls};
pub use communicator::{Communicator, nccl_version};
pub use element::{CollectiveElement, ElementType, Reduction};
pub use error::{CollectiveLost, Error, LostCause, Result};
pub use group::Group;
pub use stats::{Stats, stats};
pub use unique_id::UniqueId;

/// An error of this crate as an operation's: in the closure of [`Communicator::group`], and where a function returns
/// [`gpu_await::Result`].
impl From<Error> for gpu_await::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Runtime(error) => error,
            error => {
                let cause = std::sync::Arc::new(error);
                gpu_await::ErrorDetail::Foreign { op: "collective".into(), cause }.into()
            }
        }
    }
}
