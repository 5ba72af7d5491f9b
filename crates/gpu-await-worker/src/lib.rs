//! Processes that compute on a GPU for [`gpu-await`](gpu_await): a fault ends one of them, and the service goes on.
//!
//! A GPU fault ends every context of its process for good, and a kernel that never ends holds its stream forever: both end with the process
//! alone. So here a [`Service`] computes in a process that may die, and a [`Worker`] in the front calls it, kills it, and starts it again. The
//! front makes no CUDA calls.
//!
//! | to | see |
//! |---|---|
//! | say what a process does | [`Service`], [`Host`], [`Failure`] |
//! | let workers run in a program | [`init`], [`test_main!`] |
//! | start a worker, place it, limit it | [`Worker::builder`], [`gpus`], [`gpu_named`], [`Restart`] |
//! | have another process take over at once | [`WorkerBuilder::standby`] |
//! | have its process replaced before it dies | [`Worker::replace`], [`WorkerBuilder::replace`], [`Replace`] |
//! | have one on each GPU, called as one | [`Group`] |
//! | call it | [`Worker::call`], [`Call`], [`Answer`]; with tower (feature `tower`), `Worker::service` |
//! | refuse what killed processes | [`WorkerBuilder::blame`], [`Blame`], [`Call::key`], [`Call::client`] |
//! | end a call that takes too long, with its process | [`Call::within`]; in the process [`Payloads::pause_limit`] |
//! | send and get large data | [`Lease`], [`Payload`]; in the process [`Payloads`] |
//! | keep weights on the GPU across deaths | [`Host::keep`], [`kept`], [`forget_kept`] |
//! | keep state on the GPU that processes write | [`Host::keep_mut`], [`KeptMut`], [`KeptState`] |
//! | return an answer only once the device is known to be healthy | [`WorkerBuilder::hold_answers`] |
//! | answer `/healthz` | [`Worker::health`], [`Group::health`] |
//! | see what its device does | [`WorkerBuilder::timeline`], [`Worker::timeline`] |
//! | know what went wrong | [`Error`], [`WorkerLost`], [`Cause`], [`Guilt`], [`Worker::stats`], [`Worker::log`], [`Worker::revive`] |
//!
//! Every call ends exactly once. Calls go from any executor; the process runs on a tokio runtime of its own. One thread of the front looks
//! after all workers, and one starts their processes.
//!
//! On Linux from 5.3 on; elsewhere a program compiles, and `spawn` is an [`Error::Unsupported`]. The crate's `DESIGN.md` has the states, the decisions and what is left out; the guide of `gpu-await` has a page
//! [when the GPU faults](gpu_await::guide::faults).
//!
//! # Events
//! Of `tracing`, each with the `service`, and with the `pid` where there is one:
//!
//! | level | message | with |
//! |---|---|---|
//! | info | a worker's process started | `standby`: whether it is one |
//! | debug | a worker's process said hello | `started`: how long before |
//! | info | a worker serves | `recovery`: how long the steps took |
//! | info | a worker's process is killed | `cause` |
//! | info | a worker's process ended, as it was asked to | |
//! | warn | a worker's process died | `cause`; `killed`: how long before, if it was |
//! | warn | a worker's process was not started | `why`: what was tried, and the error of the system |
//! | warn | a request is refused: it killed a process | `key`, `client`: hashes, which differ from one run of the program to the next; `refused_for` |
//! | info | a request is watched: a process died with it | `key`, `client` |
//! | warn | a client is refused: its requests killed processes | `client`, `refused_for` |
//! | info | a worker's next process waits | `delay` |
//! | info | a standby is ready | |
//! | info | a replacement is ready | |
//! | info | a standby takes over | `ready`: whether it serves by now |
//! | error | no standby is started any more | `cause`: of the last death, or what the system refused; the same for replacements |
//! | info | a worker's process is to be replaced | `why`: the limit that it reached, or `demand` |
//! | info | a replacement takes over | |
//! | warn | a worker's process is stopped or traced | `standby`: whether it is one, or was replaced |
//! | info | a worker's process runs again | `standby`: likewise |
//! | warn | the executor of a worker's process is blocked | |
//! | error | a killed process does not go: set aside | |
//! | info | a process that was set aside is gone | |
//! | error | a worker is given up | `why`: the causes and the log |
//! | info | a worker that was given up begins anew | |
//! | error | kept memory is set aside: something that a process left behind has it | `name` |
//! | info | a worker is closing | |
//! | info | a worker was closed | |
//!
//! Each is emitted once per occurrence; two in quick succession may come in the other order, since two threads emit them.
//!
//! # Operation
//! A worker takes six descriptors of the front while its process lives, and six more with a standby, or while its process is replaced, and two threads serve all workers. As process 1 of a container the front
//! also gets the orphans of others: an init (`tini`, `docker run --init`) reaps them. A program that ignores `SIGCHLD` never learns how a
//! process ended ([`Cause::Unknown`]).
//!
//! # Examples
//! ```no_run
//! use std::time::Duration;
//!
//! use gpu_await_worker::{Error, Failure, Host, Payloads, Service, Worker, init};
//!
//! struct Double(gpu_await::Stream);
//!
//! impl Service for Double {
//!     type Config = ();
//!     type Request = Vec<f32>;
//!     type Response = Vec<f32>;
//!
//!     async fn start((): (), host: &Host) -> Result<Self, Failure> {
//!         Ok(Double(host.device().stream()?))
//!     }
//!
//!     async fn call(&self, x: Vec<f32>, _: &mut Payloads) -> Result<Vec<f32>, Failure> {
//!         let x = self.0.upload(x).queued()?;
//!         Ok(self.0.download(&x).await?.iter().map(|x| 2.0 * x).collect())
//!     }
//! }
//!
//! fn main() -> Result<(), Error> {
//!     init::<Double>();
//!     futures::executor::block_on(async {
//!         let worker = Worker::<Double>::builder(()).spawn().await?;
//!         let call = worker.call(vec![1.0, 2.0]).within(Duration::from_secs(1)).idempotent();
//!         assert_eq!(call.await?, [2.0, 4.0]);
//!         Ok(())
//!     })
//! }
//! ```
// Tests and examples may unwrap, the library may not.
#![cfg_attr(not(test), warn(clippy::unwrap_used))]
#![deny(unsafe_op_in_unsafe_fn)]

#[cfg(target_os = "linux")]
mod after;
#[cfg(target_os = "linux")]
mod blame;
#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod child;
#[cfg(target_os = "linux")]
mod codec;
#[cfg(target_os = "linux")]
mod core;
#[cfg(not(target_os = "linux"))]
mod elsewhere;
mod error;
mod failure;
#[cfg(target_os = "linux")]
mod frame;
#[cfg(target_os = "linux")]
mod gpus;
#[cfg(target_os = "linux")]
mod health;
#[cfg(target_os = "linux")]
mod heart;
#[cfg(target_os = "linux")]
mod host;
#[cfg(target_os = "linux")]
mod inputs;
#[cfg(target_os = "linux")]
mod inside;
#[cfg(target_os = "linux")]
mod keep;
#[cfg(target_os = "linux")]
mod kept;
#[cfg(target_os = "linux")]
mod kept_mut;
#[cfg(target_os = "linux")]
mod last_words;
#[cfg(target_os = "linux")]
mod leases;
#[cfg(target_os = "linux")]
mod lender;
#[cfg(target_os = "linux")]
mod life;
#[cfg(target_os = "linux")]
mod link;
#[cfg(target_os = "linux")]
mod log;
#[cfg(target_os = "linux")]
mod members;
#[cfg(all(test, target_os = "linux"))]
mod models;
#[cfg(target_os = "linux")]
mod mutable;
#[cfg(target_os = "linux")]
mod options;
#[cfg(target_os = "linux")]
mod payload;
#[cfg(target_os = "linux")]
mod pending;
#[cfg(target_os = "linux")]
mod probe;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod program;
#[cfg(target_os = "linux")]
mod registered;
#[cfg(target_os = "linux")]
mod replace;
#[cfg(target_os = "linux")]
mod restart;
#[cfg(target_os = "linux")]
#[cfg_attr(
    not(feature = "tower"),
    allow(dead_code, reason = "only a tower service waits for room")
)]
mod room;
#[cfg(target_os = "linux")]
mod route;
#[cfg(target_os = "linux")]
mod serve;
mod service;
#[cfg(target_os = "linux")]
mod slab;
#[cfg(target_os = "linux")]
mod spec;
#[cfg(target_os = "linux")]
mod stats;
#[cfg(target_os = "linux")]
mod supervisor;
#[cfg(target_os = "linux")]
mod system;
#[cfg(target_os = "linux")]
mod ticket;
#[cfg(all(feature = "tower", target_os = "linux"))]
mod tower;
#[cfg(all(test, target_os = "linux"))]
mod trips;
#[cfg(target_os = "linux")]
mod unpolled;
#[cfg(target_os = "linux")]
mod watch;
#[cfg(target_os = "linux")]
mod worker;
#[cfg(target_os = "linux")]
mod workers;

#[cfg(target_os = "linux")]
pub use blame::Blame;
#[cfg(not(target_os = "linux"))]
pub use elsewhere::{Host, Payloads, Worker, WorkerBuilder, init};
pub use error::{Cause, Error, Guilt, Result, WorkerLost};
pub use failure::Failure;
#[cfg(target_os = "linux")]
pub use gpus::{Gpu, gpu_named, gpus};
#[cfg(target_os = "linux")]
pub use health::{GroupHealth, Health, WorkerHealth};
#[cfg(target_os = "linux")]
pub use host::{Filling, Host};
#[cfg(target_os = "linux")]
pub use inputs::{PausedLimit, Payloads, RequestPayload, ResponsePayload};
#[cfg(target_os = "linux")]
pub use keep::{KeptMemory, forget_kept, kept};
#[cfg(target_os = "linux")]
pub use kept_mut::{KeptMut, KeptState};
#[cfg(target_os = "linux")]
pub use payload::{Lease, Payload};
#[cfg(target_os = "linux")]
pub use pending::{Answer, AnswerWithPayload, Call};
#[cfg(target_os = "linux")]
pub use program::{init, testing};
#[cfg(target_os = "linux")]
pub use replace::Replace;
#[cfg(target_os = "linux")]
pub use restart::Restart;
pub use service::{Service, Services};
#[cfg(target_os = "linux")]
pub use stats::{Recovery, Stats};
#[cfg(all(feature = "tower", target_os = "linux"))]
pub use tower::CallService;
#[cfg(target_os = "linux")]
pub use worker::{Worker, WorkerBuilder};
#[cfg(target_os = "linux")]
pub use workers::{Group, GroupStats};
