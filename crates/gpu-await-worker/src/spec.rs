//! [`Spec`]: what is fixed about a worker from its start.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use crate::frame::MOST_HEADER;
use crate::kept::Key;
use crate::lender::Lender;
use crate::options::Options;
use crate::program::Program;
use crate::slab::Slab;
use crate::supervisor::Supervised;
#[cfg(test)]
use crate::trips::Trips;

/// What its processes are started with, and what they share.
#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) options: Options,
    pub(crate) service: &'static str,
    pub(crate) config: Vec<u8>,
    pub(crate) program: &'static Program,
    /// The memory for payloads of requests. Its processes can only read it, so it serves one after the other.
    pub(crate) requests: Arc<Slab>,
    /// The worker, as seen by what it lends.
    pub(crate) lender: Weak<dyn Lender>,
    /// The worker, as the supervisor sees it.
    pub(crate) supervised: Weak<dyn Supervised>,
    #[cfg(test)]
    pub(crate) trips: Trips,
}

impl Spec {
    /// Tells the worker from others, for as long as it lives.
    pub(crate) fn number(&self) -> usize {
        self.lender.as_ptr().addr()
    }

    /// The key under which memory of that name is kept.
    pub(crate) fn key(&self, name: &str) -> Key {
        (self.options.gpu.clone(), name.to_owned())
    }

    /// Its longest packet.
    pub(crate) fn packet_bytes(&self) -> usize {
        self.options.most_message_bytes as usize + MOST_HEADER
    }
}
