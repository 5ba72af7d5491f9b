//! Batches: the verbs, defined once, and the values that a batch returns.
//!
//! | module | decides |
//! |---|---|
//! | [`queue`] | the verbs, and a closure's access to the stream |
//! | [`region`] | the state that a replayed batch keeps between runs |
//! | [`graph_list`] | where launches are recorded, and a graph's list while its closure runs |
//! | [`finish`] | how a batch becomes a future, and the outcome of work that fails when it runs |
//! | [`launch`] | launches, which replayed batches and graphs record |
//! | [`report`] | the outcome of lists and graphs, and why |
//! | [`allocate`] | new memory, and the retry where there is none |
//! | [`fill`] | filling memory, of buffers that are made filled or are there |
//! | [`transfer`] | copies of parts and rows |
//! | [`pieces`] | copies of many pieces |
//! | [`peer`] | copies between devices |
//! | [`settle`] | the values that a batch may return, and when they are ready |
//! | [`source`] | the host data that can be uploaded |
#![forbid(unsafe_code)]

mod allocate;
mod fill;
mod finish;
pub(crate) mod graph_list;
mod launch;
pub(crate) mod peer;
pub(crate) mod pieces;
pub(crate) mod queue;
pub(crate) mod region;
pub(crate) mod report;
pub(crate) mod settle;
pub(crate) mod source;
pub(crate) mod transfer;
