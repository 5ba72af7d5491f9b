//! A stand-in for NVIDIA's driver library: the calls that `gpu-await` makes, without a GPU.
//!
//! Built as a `cdylib` and put on a child process's library path as `libcuda.so.1`, it answers the
//! driver's C interface with threads and ordinary memory, writes every call down, and notices wrong
//! ones. Built as an `rlib`, it is the client: it finds that library, runs a test under it, and has
//! its controls. `README.md` lists the controls and what is not modelled.
//!
//! 1. Each stream is a queue with a worker thread of its own: commands run in the order of
//!    submission, later than the call (`a_stream_runs_its_commands_in_order`).
//! 2. One mutex guards everything (`world`); it is released only while a host function runs or a
//!    kernel waits.
//! 3. A handle is never used twice, and device memory is looked up again when a command runs. So a
//!    stale handle or a use after free is *counted as misuse*, and never touches memory that is
//!    gone (`a_destroyed_handle_is_misuse`, `memory_that_goes_before_its_command_is_misuse`).
//! 4. A lost device (`trap`, `standin_lose`) stays lost: what was queued never runs, and what would
//!    talk to it fails (`a_lost_device_stays_lost`).

mod abi;
mod chunks;
mod client;
mod controls;
mod copy_calls;
mod device_calls;
mod engine;
mod entry_points;
mod event_calls;
mod graph_calls;
mod greens;
mod journal;
mod kernel_calls;
mod library_calls;
mod memory;
mod memory_calls;
mod module_calls;
mod partition_calls;
mod points;
mod ptx;
mod shared;
mod shared_calls;
mod stream;
mod stream_calls;
mod world;

pub use client::{
    Held, Installed, StandIn, VARIABLE, assert_child, assert_child_without, install,
    install_without, is_child, test_of, under_the_stand_in,
};

/// Which sources this is made of: the driver's must be its client's.
const SOURCES: &str = env!("STAND_IN_SOURCES");
