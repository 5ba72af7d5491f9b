//! What `gpu-await-algorithms` is made of, and no public interface: it changes with every release, without a word in the change log.
//!
//! The kernels launched through it are nobody's to check: whoever uses it vouches that a kernel takes the arguments that it is passed,
//! and touches the memory of its footprint alone.
#![forbid(unsafe_code)]

pub use crate::backend::{ArgBlock, HostTwin};
pub use crate::device::home::Home;
pub use crate::kernel::untyped::{
    ResultTarget, UntypedKernel, VerbParts, load, load_ahead, one, take_complete,
};
pub use crate::memory::view::Span;
pub use crate::submit::Footprint;
