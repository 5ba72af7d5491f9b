//! The last lines that a process wrote (pure).
//!
//! # Invariants
//! 1. It never holds more than its capacity; the oldest bytes go first and are counted (`a_log_keeps_the_end`).
#![forbid(unsafe_code)]

use std::collections::VecDeque;

/// A bounded buffer that drops its oldest bytes.
#[derive(Debug)]
pub(crate) struct Log {
    bytes: VecDeque<u8>,
    capacity: usize,
    dropped: u64,
}

impl Log {
    pub(crate) fn new(capacity: usize) -> Self {
        Log { bytes: VecDeque::new(), capacity, dropped: 0 }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(self.capacity)..];
        let over = (self.bytes.len() + kept.len()).saturating_sub(self.capacity);
        self.dropped += (over + bytes.len() - kept.len()) as u64;
        self.bytes.drain(..over);
        self.bytes.extend(kept);
    }

    /// Its last lines, at most `most` bytes.
    pub(crate) fn last_lines(&self, most: usize) -> String {
        let (front, back) = self.bytes.as_slices();
        let all = [front, back].concat();
        let last = &all[all.len().saturating_sub(most)..];
        // From the beginning of a line on, if there is one.
        let line = last.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let start = if last.len() == all.len() || line == last.len() { 0 } else { line };
        String::from_utf8_lossy(&last[start..]).into_owned()
    }

    /// Its text. Says how many bytes are missing in front.
    pub(crate) fn text(&self) -> String {
        let (front, back) = self.bytes.as_slices();
        let text = String::from_utf8_lossy(&[front, back].concat()).into_owned();
        match self.dropped {
            0 => text,
            dropped => format!("[{dropped} bytes before this were dropped]\n{text}"),
        }
    }
}
