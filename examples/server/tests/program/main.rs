//! The program `server`, from outside: as clients and attackers see it.

#[path = "../../../../tests/under_test/child.rs"]
#[cfg(unix)]
mod child;
#[path = "../under_test/server.rs"]
mod under_test;

mod attacks;
mod failing;
mod http;
mod isolated;
mod open_inference;
