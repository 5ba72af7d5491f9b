//! [`Acceptor`]: accepts all processes at once. None waits for another one to speak, and one that does not speak is disconnected.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use super::HELLO;
use super::hello::Hello;

/// Connections that have not identified themselves. Beyond this many, the oldest is disconnected.
const MOST: usize = 128;

pub(super) struct Acceptor {
    listener: TcpListener,
    callers: VecDeque<Caller>,
}

/// A process that has identified itself. Its stream does not block.
pub(super) struct Come {
    pub(super) hello: Hello,
    pub(super) stream: TcpStream,
    pub(super) from: SocketAddr,
}

/// A process that has not said everything yet.
struct Caller {
    stream: TcpStream,
    from: SocketAddr,
    bytes: Vec<u8>,
    end: Instant,
}

enum Heard {
    All(Hello),
    Part,
    /// It ended, or is a stranger.
    Nothing,
}

impl Acceptor {
    pub(super) fn new(listener: TcpListener) -> std::io::Result<Acceptor> {
        listener.set_nonblocking(true)?;
        Ok(Acceptor { listener, callers: VecDeque::new() })
    }

    /// Blocks until a process connects, unless one has connected and is still identifying itself.
    pub(super) fn wait(&mut self) {
        if self.callers.is_empty() && self.listener.set_nonblocking(false).is_ok() {
            self.accept();
            self.listener.set_nonblocking(true).ok();
        }
    }

    /// Returns false if nobody has come.
    fn accept(&mut self) -> bool {
        let Ok((stream, from)) = self.listener.accept() else { return false };
        if stream.set_nonblocking(true).is_ok() {
            let (bytes, end) = (Vec::new(), Instant::now() + HELLO);
            self.callers.push_back(Caller { stream, from, bytes, end });
        }
        true
    }

    /// The processes that have identified themselves since the last time.
    pub(super) fn poll(&mut self) -> Vec<Come> {
        // More are accepted in the next turn.
        let _all = (0..MOST).all(|_| self.accept());
        let mut come = Vec::new();
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.hear() {
                Heard::All(hello) => {
                    let Caller { stream, from, .. } = caller;
                    come.push(Come { hello, stream, from });
                }
                Heard::Part if Instant::now() < caller.end => self.callers.push_back(caller),
                Heard::Part | Heard::Nothing => {}
            }
        }
        let more = self.callers.len().saturating_sub(MOST);
        self.callers.drain(..more);
        come
    }
}

impl Caller {
    fn hear(&mut self) -> Heard {
        loop {
            let Some(wanted) = Hello::length(&self.bytes) else { return Heard::Nothing };
            let have = self.bytes.len();
            if have == wanted {
                return Hello::read(&mut &self.bytes[..]).map_or(Heard::Nothing, Heard::All);
            }
            self.bytes.resize(wanted, 0);
            let read = self.stream.read(&mut self.bytes[have..]);
            self.bytes.truncate(have + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) => return Heard::Nothing,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Part,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Heard::Nothing,
            }
        }
    }
}
