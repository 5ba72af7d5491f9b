//! [`Hello`] and the table of [`Entry`]s: what processes say about themselves at a rendezvous, as bytes.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::time::Duration;

use super::MOST_RANKS;

const MAGIC: &[u8; 8] = b"gpuawait";
const VERSION: u32 = 7;
/// The length of a hello without its ranks.
const FIXED: usize = 8 + 4 + 16 + 4 + 4 + 2 + 4;

/// Identifies the meeting; a group's is zero.
pub(super) type Tag = [u8; 16];

pub(super) struct Hello {
    pub(super) tag: Tag,
    pub(super) world: usize,
    /// How long it waits.
    pub(super) limit: Duration,
    /// Where it listens.
    pub(super) port: u16,
    pub(super) ranks: Vec<usize>,
}

/// A process in the table.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Where it listens.
    pub(super) address: String,
    pub(super) ranks: Vec<usize>,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.tag);
        bytes.extend((self.world as u32).to_le_bytes());
        let limit = u32::try_from(self.limit.as_millis()).unwrap_or(u32::MAX);
        bytes.extend(limit.to_le_bytes());
        bytes.extend(self.port.to_le_bytes());
        put_ranks(&mut bytes, &self.ranks);
        bytes
    }

    pub(super) fn read(stream: &mut impl Read) -> std::io::Result<Hello> {
        let magic: [u8; 8] = read_bytes(stream)?;
        let version = read_number(stream)?;
        if magic != *MAGIC || version != VERSION as usize {
            return Err(ErrorKind::InvalidData.into());
        }
        let tag = read_bytes(stream)?;
        let (world, limit) = (read_number(stream)?, read_number(stream)?);
        let port = u16::from_le_bytes(read_bytes(stream)?);
        let (limit, ranks) = (Duration::from_millis(limit as u64), read_ranks(stream, world)?);
        let distinct: HashSet<&usize> = ranks.iter().collect();
        if ranks.is_empty() || distinct.len() < ranks.len() {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(Hello { tag, world, limit, port, ranks })
    }

    /// The length of the hello that begins with these bytes, as far as they tell; `None` if it is not a hello.
    pub(super) fn length(bytes: &[u8]) -> Option<usize> {
        let start = MAGIC.len().min(bytes.len());
        if bytes[..start] != MAGIC[..start] {
            return None;
        }
        let fixed = bytes.get(..FIXED).and_then(|fixed| fixed.split_last_chunk());
        let Some((_, count)) = fixed else { return Some(FIXED) };
        let count = u32::from_le_bytes(*count) as usize;
        (count <= MOST_RANKS).then_some(FIXED + 4 * count)
    }
}

impl Entry {
    pub(super) fn put(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.address.len() as u8);
        bytes.extend(self.address.as_bytes());
        put_ranks(bytes, &self.ranks);
    }

    pub(super) fn read(stream: &mut impl Read, world: usize) -> std::io::Result<Entry> {
        let [len] = read_bytes(stream)?;
        let mut text = vec![0; usize::from(len)];
        stream.read_exact(&mut text)?;
        let address = String::from_utf8_lossy(&text).into_owned();
        Ok(Entry { address, ranks: read_ranks(stream, world)? })
    }
}

fn put_ranks(bytes: &mut Vec<u8>, ranks: &[usize]) {
    bytes.extend((ranks.len() as u32).to_le_bytes());
    ranks.iter().for_each(|rank| bytes.extend((*rank as u32).to_le_bytes()));
}

/// An answer with ranks.
pub(super) fn ranks_of(code: u8, ranks: &[usize]) -> Vec<u8> {
    let mut bytes = vec![code];
    put_ranks(&mut bytes, ranks);
    bytes
}

/// Ranks of a world: how many, and each.
pub(super) fn read_ranks(stream: &mut impl Read, world: usize) -> std::io::Result<Vec<usize>> {
    let count = read_number(stream)?;
    if count > world.min(MOST_RANKS) {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; 4 * count];
    stream.read_exact(&mut bytes)?;
    let number =
        |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    let ranks: Vec<usize> = bytes.chunks_exact(4).map(number).collect();
    match ranks.iter().all(|rank| *rank < world) {
        true => Ok(ranks),
        false => Err(ErrorKind::InvalidData.into()),
    }
}

pub(super) fn read_bytes<const N: usize>(stream: &mut impl Read) -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn read_number(stream: &mut impl Read) -> std::io::Result<usize> {
    Ok(u32::from_le_bytes(read_bytes(stream)?) as usize)
}
