//! Processes that compute on a GPU for [`gpu-await`](gpu_await): a fault ends one of them, and the service goes on.
#![deny(unsafe_op_in_unsafe_fn)]

mod calls;
mod child;
mod codec;
mod core;
mod error;
mod frame;
mod gpus;
mod group;
mod heart;
mod host;
mod inputs;
mod keep;
mod kept;
mod leases;
mod life;
mod log;
#[cfg(test)]
mod models;
mod options;
mod payload;
mod pending;
mod process;
mod program;
mod registered;
mod restart;
mod serve;
mod service;
mod slab;
mod supervisor;
mod system;
mod worker;

pub use calls::Guilt;
pub use error::{Cause, Error, Result, WorkerLost};
pub use gpus::{Gpu, gpus};
pub use host::{Filling, Host};
pub use inputs::{Payloads, RequestPayload, ResponsePayload};
pub use keep::{KeptMemory, forget_kept, kept};
pub use payload::{Lease, Payload};
pub use pending::{Answer, AnswerWithPayload, Call};
pub use program::{init, testing};
pub use restart::Restart;
pub use service::{Failure, Service, Services};
pub use worker::{Health, Recovery, Stats, Worker, WorkerBuilder};
