//! [`Reader`]: the thread that reads a connection, hands over what it reads, and waits for nothing else.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::frame::{self, Frame, Kind, Label, Unread};
use super::link::{Link, Reading};
use super::registry::{End, Registry};
use crate::stats;

/// A process's end of a connection.
pub(super) struct Reader {
    pub(super) at: usize,
    pub(super) ranks: Vec<usize>,
    /// Gone with the mesh: its descriptor does not wait for a stopped peer.
    pub(super) link: Weak<Link>,
    pub(super) registry: Arc<Registry>,
    pub(super) own: Vec<usize>,
    pub(super) agreeing: Arc<Mutex<()>>,
}

impl Reader {
    /// Reads until the connection ends.
    pub(super) fn read_all(&self, mut reading: Reading) {
        let end = loop {
            match frame::read(reading.stream(), |number| self.registry.takes(self.at, number)) {
                Ok((_, Frame::Goodbye)) => break End::Left,
                Ok((_, Frame::Unwanted)) => {}
                Ok((label, frame)) => {
                    let is_left_out = matches!(&frame, Frame::Agree(proposal)
                        if proposal.gone.iter().any(|rank| self.own.contains(rank)));
                    if !self.registry.deliver(self.at, label, frame) {
                        break End::Junk("a frame for ranks that are not its own".to_owned());
                    }
                    if is_left_out {
                        self.note();
                    }
                }
                Err(Unread::Ended) => break End::Gone,
                Err(Unread::Junk(reason)) => break End::Junk(reason),
            }
        };
        self.registry.end(self.at, &self.ranks, &end);
        reading.drain(matches!(end, End::Junk(_)));
    }

    /// Tells the others that this process knows it is left out, after any agreement that it came to before.
    fn note(&self) {
        let Some(link) = self.link.upgrade() else { return };
        let agreeing = self.agreeing.clone();
        // This may wait and write, which the reader thread never does.
        drop(stats::spawn("left-out", move || {
            drop(agreeing.lock());
            link.tell(Label::of(0, Kind::Noted), &[]);
        }));
    }
}
