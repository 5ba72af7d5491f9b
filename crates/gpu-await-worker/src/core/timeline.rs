//! The timeline of a worker's device, on its way from the process to the callers that asked for it.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | none | nobody asked | `ask` of a process that serves → on its way |
//! | on its way | this process was asked; so much of it is here, and these callers wait | its last part, its failure, the end of the process → none |
//!
//! It comes in parts, each a message of the usual size, between answers. Callers that ask meanwhile get the same one.
//!
//! # Invariants
//! 1. The front never holds more than [`MOST_TIMELINE`] bytes of it; a process that sends more, or sends what nobody asked for, breaks the
//!    protocol (`a_wrong_message_is_the_fault_of_who_sends_it`).
//! 2. Every request is answered, even if the process ends (`a_timeline_ends_with_its_process`).
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Core;
use crate::after::{After, Reader, Timeline};
use crate::error::{Error, Result};
use crate::frame::{MOST_TIMELINE, TimelinePart, ToProcess};
use crate::life::Role;

/// A timeline that is on its way.
#[derive(Debug)]
pub(crate) struct Fetch {
    from: u32,
    bytes: Vec<u8>,
    readers: Vec<Reader>,
}

impl Core {
    /// Asks the main process for its timeline, unless it was asked.
    pub(crate) fn ask_timeline(&mut self, reader: Reader, after: &mut After) {
        if let Some(error) = &self.ended {
            return after.readers.push((reader, Err(error.clone())));
        }
        if let Some(fetch) = &mut self.fetch {
            return fetch.readers.push(reader);
        }
        let is_serving = self.life.is_serving();
        let main = self.seats[Role::Main].process.as_mut();
        match main.filter(|process| is_serving && !process.is_falling()) {
            None => after.readers.push((reader, Ok(None))),
            Some(process) => {
                process.tell(&ToProcess::Timeline, Vec::new());
                after.wake |= process.has_to_send();
                let from = process.incarnation;
                self.fetch = Some(Fetch { from, bytes: Vec::new(), readers: vec![reader] });
            }
        }
    }

    /// A part of it came; returns how that breaks the protocol, if it does.
    pub(super) fn hear_timeline(
        &mut self,
        from: u32,
        part: TimelinePart,
        body: &[u8],
        after: &mut After,
    ) -> Result<(), &'static str> {
        let fetch = self.fetch.as_mut().filter(|fetch| fetch.from == from);
        let fetch = fetch.ok_or("a timeline that nobody asked for")?;
        if fetch.bytes.len() + body.len() > MOST_TIMELINE {
            return Err("a timeline that is too long");
        }
        if part != TimelinePart::Failed {
            fetch.bytes.extend_from_slice(body);
        }
        match part {
            TimelinePart::More => {}
            TimelinePart::Last => self.end_timeline(after, |bytes| Ok(Some(bytes))),
            TimelinePart::Failed => {
                let why = String::from_utf8_lossy(body).into_owned();
                self.end_timeline(after, |_| Err(Error::Service(why.clone())));
            }
        }
        Ok(())
    }

    /// That process is gone.
    pub(super) fn lose_timeline(
        &mut self,
        from: u32,
        error: impl Fn() -> Error,
        after: &mut After,
    ) {
        if self.fetch.as_ref().is_some_and(|fetch| fetch.from == from) {
            self.end_timeline(after, |_| Err(error()));
        }
    }

    pub(super) fn end_timeline(
        &mut self,
        after: &mut After,
        how: impl Fn(Timeline) -> Result<Option<Timeline>>,
    ) {
        let Some(Fetch { bytes, readers, .. }) = self.fetch.take() else { return };
        let bytes = Arc::new(bytes);
        for reader in readers {
            after.readers.push((reader, how(bytes.clone())));
        }
    }
}
