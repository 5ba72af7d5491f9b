//! Threads of the crate, and whose code a thread runs.
//!
//! | module | decides |
//! |---|---|
//! | [`worker`] | what a background thread is; work that has one for itself |
//! | [`crew`] | which work of a device is done off the executor, and by how many threads |
//! | [`reaper`] | what users lent is dropped by a thread of its own |
//! | [`contain`] | a panic of foreign code ends no thread |
//! | [`role`] | what code on this thread may do |
//! | [`exit`] | what ends before `main` has returned |
#![forbid(unsafe_code)]

pub(crate) mod contain;
pub(crate) mod crew;
pub(crate) mod exit;
pub(crate) mod reaper;
pub(crate) mod role;
pub(crate) mod worker;
