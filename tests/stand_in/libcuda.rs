//! A stand-in for NVIDIA's driver library: the calls that `gpu-await` makes, without a GPU.
//!
//! Built as a `cdylib` (the example target `stand_in_libcuda`), put on a child process's library
//! path as `libcuda.so.1`, it answers the driver's C interface with threads and ordinary memory,
//! writes every call down, and notices wrong ones. `README.md` beside this file lists the controls
//! and what is not modelled; `client.rs` is their Rust side.
//!
//! 1. Each stream is a queue with a worker thread of its own: commands run in the order of
//!    submission, later than the call.
//! 2. One mutex guards everything ([`world`]); it is released only while a host function runs or a
//!    kernel waits.
//! 3. A handle is never used twice, and device memory is looked up again when a command runs. So a
//!    stale handle or a use after free is *counted as misuse*, and never touches memory that is
//!    gone.
//! 4. A lost device (`trap`, `standin_lose`) stays lost: what was queued never runs, and what would
//!    talk to it fails.

#![warn(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block)]

#[path = "libcuda/abi.rs"]
mod abi;
#[path = "libcuda/controls.rs"]
mod controls;
#[path = "libcuda/device_calls.rs"]
mod device_calls;
#[path = "libcuda/engine.rs"]
mod engine;
#[path = "libcuda/entry_points.rs"]
mod entry_points;
#[path = "libcuda/event_calls.rs"]
mod event_calls;
#[path = "libcuda/journal.rs"]
mod journal;
#[path = "libcuda/kernel_calls.rs"]
mod kernel_calls;
#[path = "libcuda/memory.rs"]
mod memory;
#[path = "libcuda/memory_calls.rs"]
mod memory_calls;
#[path = "libcuda/module_calls.rs"]
mod module_calls;
#[path = "libcuda/ptx.rs"]
mod ptx;
#[path = "libcuda/stream_calls.rs"]
mod stream_calls;
#[path = "libcuda/world.rs"]
mod world;
