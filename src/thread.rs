//! The crate's threads, and the roles of threads.
//!
//! | module | decides |
//! |---|---|
//! | [`worker`] | what a background thread is; tasks that get a thread of their own |
//! | [`crew`] | which work of a device is done off the executor, and by how many threads |
//! | [`reaper`] | a thread that drops users' values |
//! | [`inbox`] | how a thread waits for its next task |
//! | [`turn`] | when a thread holds no lock, so that the process may fork |
//! | [`relax`] | how a thread that looks again and again lets others run |
//! | [`process`] | what a forked child begins anew, and what runs around a fork |
//! | [`native`] | how a thread starts and ends |
//! | [`contain`] | a panic of foreign code ends no thread |
//! | [`role`] | what code on this thread may do |
//! | [`locks`] | nothing ends under a lock |
//! | [`exit`] | what ends before `main` has returned |

pub(crate) mod contain;
pub(crate) mod crew;
pub(crate) mod exit;
pub(crate) mod inbox;
pub(crate) mod locks;
pub(crate) mod native;
pub(crate) mod process;
pub(crate) mod reaper;
pub(crate) mod relax;
pub(crate) mod role;
pub(crate) mod turn;
pub(crate) mod worker;
