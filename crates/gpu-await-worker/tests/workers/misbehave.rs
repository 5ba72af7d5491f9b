//! What no service sends.

use std::fs;
use std::os::fd::RawFd;

/// Splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, most: u64) -> u64 {
        self.next() % most
    }

    /// A number as messages have it: mostly small, sometimes huge.
    fn number(&mut self, into: &mut Vec<u8>) {
        let most = [2, 4, 300, 70_000_000, u64::MAX][self.below(5) as usize];
        let mut value = self.below(most);
        while value > 0x7f {
            into.push(value as u8 | 0x80);
            value >>= 7;
        }
        into.push(value as u8);
    }
}

fn sockets() -> Vec<RawFd> {
    let sockets = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| {
        let path = fd.ok()?.path();
        let target = fs::read_link(&path).ok()?;
        let is_socket = target.to_string_lossy().starts_with("socket:");
        is_socket.then(|| path.file_name()?.to_str()?.parse::<RawFd>().ok()).flatten()
    });
    sockets.collect()
}

/// Sends what its supervisor does not expect, in the name of this process.
pub(crate) fn misbehave(seed: u64) {
    let mut random = Random(seed);
    let sockets = sockets();
    for _ in 0..1 + random.below(30) {
        let mut packet = Vec::new();
        match random.below(3) {
            0 => (0..random.below(200)).for_each(|_| packet.push(random.next() as u8)),
            1 => packet.resize(random.below(100_000) as usize, random.next() as u8),
            _ => {
                // The number of a message, and numbers where it has numbers.
                packet.push(random.below(13) as u8);
                (0..random.below(12)).for_each(|_| random.number(&mut packet));
            }
        }
        for socket in &sockets {
            // SAFETY: the packet is readable for its length; who owns the descriptor does not mind.
            unsafe {
                libc::send(
                    *socket,
                    packet.as_ptr().cast(),
                    packet.len(),
                    libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                )
            };
        }
    }
}

/// Sends a message with this beginning, and nothing else.
pub(crate) fn send(packet: &[u8]) {
    for socket in sockets() {
        // SAFETY: the packet is readable for its length; who owns the descriptor does not mind.
        unsafe {
            libc::send(
                socket,
                packet.as_ptr().cast(),
                packet.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
    }
}
