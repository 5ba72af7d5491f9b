//! [`Link`]: a connection to another process. Writers take turns; one thread reads.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::frame::Label;
use crate::system;

/// How often a writer checks whether its frame is still wanted while the peer does not read.
const LOOK: Duration = Duration::from_millis(100);
/// How long to spend telling a peer of an end: the peer may be as stuck as whatever ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The longest wait for that peer, whose reader does nothing but read.
const STUCK: Duration = Duration::from_secs(30);

pub(super) struct Link {
    pub(super) ranks: Vec<usize>,
    stream: Mutex<TcpStream>,
}

/// What became of a frame.
pub(super) enum Written {
    Whole,
    /// None of it: it was no longer wanted.
    NotBegun,
    /// The connection has ended.
    Broken,
}

/// The reader's side.
pub(super) struct Reading(TcpStream);

impl Link {
    pub(super) fn new(ranks: Vec<usize>, stream: TcpStream) -> Link {
        stream.set_nonblocking(false).ok();
        stream.set_nodelay(true).ok();
        system::find_lost_hosts(&stream);
        stream.set_read_timeout(None).ok();
        stream.set_write_timeout(Some(LOOK)).ok();
        Link { ranks, stream: Mutex::new(stream) }
    }

    pub(super) fn reader(&self) -> std::io::Result<Reading> {
        self.stream.lock().try_clone().map(Reading)
    }

    /// Writes a frame; gives up when it is no longer wanted. A frame that has been started is written for a little longer: without its
    /// rest the connection has to end.
    pub(super) fn write(
        &self,
        label: Label,
        parts: [&[u8]; 2],
        is_wanted: impl Fn() -> bool,
    ) -> Written {
        let header = label.to_bytes(parts.iter().map(|part| part.len()).sum());
        let mut stream = loop {
            if let Some(stream) = self.stream.try_lock_for(LOOK) {
                break stream;
            }
            if !is_wanted() {
                return Written::NotBegun;
            }
        };
        let [head, data] = parts;
        let (mut begun, mut moved) = (false, Instant::now());
        for mut part in [&header, head, data] {
            while !part.is_empty() {
                let error = match stream.write(part) {
                    Ok(0) => ErrorKind::WriteZero,
                    Ok(written) => {
                        part = &part[written..];
                        (begun, moved) = (true, Instant::now());
                        continue;
                    }
                    Err(error) => error.kind(),
                };
                let waits = match error {
                    ErrorKind::Interrupted => true,
                    ErrorKind::WouldBlock | ErrorKind::TimedOut if is_wanted() => {
                        moved.elapsed() < STUCK
                    }
                    ErrorKind::WouldBlock | ErrorKind::TimedOut if !begun => {
                        return Written::NotBegun;
                    }
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => moved.elapsed() < LAST_WORDS,
                    _ => false,
                };
                if !waits {
                    stream.shutdown(Shutdown::Both).ok();
                    return Written::Broken;
                }
            }
        }
        Written::Whole
    }

    /// Writes a small frame, spending little time on it.
    pub(super) fn tell(&self, label: Label, rest: &[u8]) -> Written {
        let began = Instant::now();
        self.write(label, [rest, &[]], || began.elapsed() < LAST_WORDS)
    }

    /// Nothing more is written.
    pub(super) fn close(&self) {
        self.stream.lock().shutdown(Shutdown::Write).ok();
    }
}

impl Reading {
    pub(super) fn stream(&mut self) -> &mut TcpStream {
        &mut self.0
    }

    /// Reads until the peer closes its side: ending with unread data would discard what was written last. A stranger is disconnected.
    pub(super) fn drain(mut self, is_stranger: bool) {
        if is_stranger {
            self.0.shutdown(Shutdown::Both).ok();
        }
        std::io::copy(&mut self.0, &mut std::io::sink()).ok();
    }
}
