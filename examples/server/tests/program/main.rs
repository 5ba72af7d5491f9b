//! The program `server`, from outside: as clients, attackers, collectors and browsers see it.

#[path = "../../../../tests/under_test/browser.rs"]
#[cfg(unix)]
mod browser;
#[path = "../under_test/server.rs"]
mod under_test;

mod attacks;
mod http;
mod open_inference;
mod page;
mod traces;
