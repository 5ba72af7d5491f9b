//! [`Acceptor`]: where processes come in, all of them at once. Nobody waits for another one to speak, and who does not is disconnected.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use super::{HELLO, HELLO_BYTES, Hello, MAGIC, MOST_RANKS, read_hello};

/// Connections that have not said who they are. Where there are more, the oldest is disconnected.
const MOST: usize = 128;

pub(super) struct Acceptor {
    listener: TcpListener,
    callers: VecDeque<Caller>,
}

/// Somebody who has not said everything yet.
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

    /// Those who have said who they are since the last time. Their streams do not block.
    pub(super) fn poll(&mut self) -> Vec<(Hello, TcpStream, SocketAddr)> {
        for _ in 0..MOST {
            let Ok((stream, from)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                let (bytes, end) = (Vec::new(), Instant::now() + HELLO);
                self.callers.push_back(Caller { stream, from, bytes, end });
            }
        }
        let mut come = Vec::new();
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.hear() {
                Heard::All(hello) => come.push((hello, caller.stream, caller.from)),
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
            let Some(wanted) = self.wanted() else { return Heard::Nothing };
            let have = self.bytes.len();
            if have == wanted {
                return read_hello(&mut &self.bytes[..]).map_or(Heard::Nothing, Heard::All);
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

    /// How long its hello is, as far as it is known; none if this is no hello.
    fn wanted(&self) -> Option<usize> {
        let start = MAGIC.len().min(self.bytes.len());
        if self.bytes[..start] != MAGIC[..start] {
            return None;
        }
        let fixed = self.bytes.get(..HELLO_BYTES).and_then(|fixed| fixed.split_last_chunk());
        let Some((_, count)) = fixed else { return Some(HELLO_BYTES) };
        let count = u32::from_le_bytes(*count) as usize;
        (count <= MOST_RANKS).then_some(HELLO_BYTES + 4 * count)
    }
}
