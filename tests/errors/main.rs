//! What is refused or fails, who is told of it, and that nothing else comes to harm.

#[path = "../under_test"]
mod under_test {
    pub(crate) mod child;
    pub(crate) mod faulty;
    pub(crate) mod foreign;
    pub(crate) mod modes;
}

mod bad_input;
mod error_lines;
mod faults;
mod foreign_handles;
mod panics;
mod subscribers;
mod verify;
