//! Reading and writing with one deadline for all of it, however slow the other side is.
#![forbid(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::LAST_WORDS;
use crate::patience::{LOOK, Patience};

/// A blocking stream, and the deadline for using it.
pub(super) struct Line<'a> {
    stream: &'a TcpStream,
    patience: &'a Patience,
}

impl<'a> Line<'a> {
    pub(super) fn new(stream: &'a TcpStream, patience: &'a Patience) -> std::io::Result<Self> {
        stream.set_nonblocking(false)?;
        Ok(Line { stream, patience })
    }

    /// Tries until the deadline; each try lasts as long as the stream blocks.
    fn until_over(
        &self,
        wait: impl Fn(&TcpStream, Option<Duration>) -> std::io::Result<()>,
        mut once: impl FnMut(&TcpStream) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        while !self.patience.is_over() {
            let rest = self.patience.rest().clamp(Duration::from_millis(1), LOOK);
            wait(self.stream, Some(rest))?;
            match once(self.stream) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                done => return done,
            }
        }
        Err(ErrorKind::TimedOut.into())
    }
}

impl Read for Line<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.until_over(TcpStream::set_read_timeout, |mut stream| stream.read(into))
    }
}

impl Write for Line<'_> {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        self.until_over(TcpStream::set_write_timeout, |mut stream| stream.write(from))
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Says that this side is leaving, and waits a moment for the other one to hear it.
pub(super) fn leave(mut stream: &TcpStream) {
    stream.shutdown(Shutdown::Write).ok();
    let end = Instant::now() + LAST_WORDS;
    while Instant::now() < end {
        stream.set_read_timeout(Some(LOOK)).ok();
        if let Ok(0) = stream.read(&mut [0; 64]) {
            return;
        }
    }
}
