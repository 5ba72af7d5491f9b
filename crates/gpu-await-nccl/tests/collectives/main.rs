//! Collectives of ranks that are tasks of one process.

#[path = "../../../../tests/under_test/child.rs"]
mod child;
#[path = "../support/mod.rs"]
mod support;

mod again;
mod causes;
mod failures;
mod in_graph;
mod left_out;
mod limits;
mod random;
mod rendezvous;
mod shrink;
mod strangers;
mod verbs;
