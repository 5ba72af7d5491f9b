//! The internals that `gpu-await-algorithms`, `gpu-await-libs`, `gpu-await-nccl` and `gpu-await-worker` are built on. Not a public interface: it
//! changes with every release, without a word in the change log.
//!
//! Nothing checks the kernels launched through it: the caller vouches that a kernel takes the arguments passed to it,
//! and touches only the memory of its footprint.
#![forbid(unsafe_code)]

pub use crate::backend::{ArgBlock, HostTwin};
pub use crate::device::builder::open_host;
pub use crate::device::home::Home;
pub use crate::interop::library_device::LibraryDevice;
pub use crate::interop::memory::adopt_registered;
pub use crate::kernel::untyped::{
    ResultTarget, UntypedKernel, VerbParts, load, load_ahead, off_executor, one, rows_span,
    rows_span_mut, take_complete,
};
pub use crate::memory::view::Span;
#[cfg(target_os = "linux")]
pub use crate::shared::mutable;
pub use crate::submit::{Footprint, KernelChain, is_captured, partition_of, refuse};
pub use crate::system::library::{NotFound, Search, once, opened};
pub use crate::thread::exit::register_again;
pub use crate::thread::process::{PerProcess, Process};
pub use crate::thread::role::check as check_thread;
pub use gpu_await_protocol::lock;
pub use gpu_await_protocol::sync::{Mutex, MutexGuard};
