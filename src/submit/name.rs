//! What an operation is called in messages.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

/// What an operation is called in messages.
#[derive(Clone, Copy)]
pub(super) enum Name<'a> {
    Verb(&'static str),
    Kernel(&'a Arc<str>),
}

impl Name<'_> {
    pub(super) fn to_arc(self) -> Arc<str> {
        match self {
            Name::Verb(name) => Arc::from(name),
            Name::Kernel(name) => Arc::clone(name),
        }
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Name::Verb(name) => name,
            Name::Kernel(name) => name,
        })
    }
}
