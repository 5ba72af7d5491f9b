//! Ranks that are processes, and what looks at its own process: nothing else runs beside them.

#[path = "../../../../tests/under_test/child.rs"]
mod child;
#[path = "../support/mod.rs"]
mod support;

mod forks;
mod halves;
mod processes;
