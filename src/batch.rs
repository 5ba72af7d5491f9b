//! The verbs, once: what a batch does and returns.
//!
//! | module | decides |
//! |---|---|
//! | [`queue`] | the verbs, and what a closure sees of the stream |
//! | [`region`] | what a batch remembers that is replayed |
//! | [`draft`] | the list of a graph, while its closure runs |
//! | [`late`] | what becomes of a batch whose work fails when it runs |
//! | [`launch`] | launches, which replayed batches and graphs write down |
//! | [`report`] | what became of lists and graphs, and why |
//! | [`fill`] | new memory, and filling it |
//! | [`transfer`] | copies of parts and rows |
//! | [`peer`] | copies between devices |
//! | [`settle`] | what a batch may return, and when that is ready |
//! | [`source`] | what can be uploaded |
#![forbid(unsafe_code)]

pub(crate) mod draft;
mod fill;
mod finish;
mod launch;
pub(crate) mod peer;
pub(crate) mod queue;
pub(crate) mod region;
pub(crate) mod report;
pub(crate) mod settle;
pub(crate) mod source;
pub(crate) mod transfer;
