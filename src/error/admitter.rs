//! [`Admitter`]: the pool or batcher that admits or refuses a request.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

/// The pool (and its share) or batcher that admits or refuses requests.
///
/// Displayed as `the stream pool` or `the batcher`, followed by its names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Admitter {
    /// Whether it is a pool or a batcher.
    pub kind: AdmitterKind,
    /// Its name, if it has one: [`StreamPoolBuilder::name`](crate::StreamPoolBuilder::name),
    /// [`BatcherBuilder::name`](crate::BatcherBuilder::name).
    pub name: Option<Arc<str>>,
    /// The [share](crate::StreamPool::with_share) of the pool that the request counted towards; `None` for requests that name none.
    pub share: Option<Arc<str>>,
}

/// The kinds of [`Admitter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AdmitterKind {
    /// A [`StreamPool`](crate::StreamPool).
    StreamPool,
    /// A [`Batcher`](crate::Batcher).
    Batcher,
}

impl fmt::Display for AdmitterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AdmitterKind::StreamPool => "stream pool",
            AdmitterKind::Batcher => "batcher",
        })
    }
}

impl fmt::Display for Admitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {}", self.kind)?;
        if let Some(name) = &self.name {
            write!(f, " `{name}`")?;
        }
        match &self.share {
            Some(share) => write!(f, " (share `{share}`)"),
            None => Ok(()),
        }
    }
}
