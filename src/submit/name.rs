//! The name of an operation in messages.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use tracing::level_filters::LevelFilter;

use crate::runtime::stream_state::StreamState;
use crate::thread::contain;

/// An operation's name in messages.
#[derive(Clone, Copy)]
pub(crate) enum Name<'a> {
    Verb(&'static str),
    Kernel(&'a Arc<str>),
}

impl Name<'_> {
    /// Emits the submission's event once all bookkeeping is done: a subscriber is foreign code that may use
    /// the stream, or panic.
    #[inline]
    pub(crate) fn told(self, stream: &Arc<StreamState>, ticket: u64) {
        // What the event asks first, which is all that happens where nobody listens.
        if LevelFilter::current() >= LevelFilter::TRACE {
            self.tell(stream, ticket);
        }
    }

    #[cold]
    fn tell(self, stream: &Arc<StreamState>, ticket: u64) {
        let op = self;
        let early = stream.overlap.was_allowed(ticket);
        contain::log(|| {
            tracing::trace!(target: "gpu_await::submit", stream = stream.id(), name = stream.driver.name(), ticket, %op, early);
        });
    }

    /// The kernel's name, or else the operation's.
    pub(crate) fn of_kernel(&self) -> Result<&Arc<str>, &'static str> {
        match self {
            Name::Verb(name) => Err(name),
            Name::Kernel(name) => Ok(name),
        }
    }

    pub(crate) fn to_owned(self) -> OwnedName {
        match self {
            Name::Verb(name) => OwnedName::Verb(name),
            Name::Kernel(name) => OwnedName::Kernel(Arc::clone(name)),
        }
    }

    pub(crate) fn to_arc(self) -> Arc<str> {
        match self {
            Name::Verb(name) => Arc::from(name),
            Name::Kernel(name) => Arc::clone(name),
        }
    }
}

/// A name that is kept.
#[derive(Clone)]
pub(crate) enum OwnedName {
    Verb(&'static str),
    Kernel(Arc<str>),
}

impl OwnedName {
    pub(crate) fn to_arc(&self) -> Arc<str> {
        match self {
            OwnedName::Verb(name) => Arc::from(*name),
            OwnedName::Kernel(name) => Arc::clone(name),
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
