//! What memory pools reserve: whole chunks, in which allocations have places.
//!
//! As a driver's pool was seen to do it: it takes 32 MiB or a multiple of that at a time, counts those against its `maxSize`, and joins
//! neither the ends of two chunks nor the pieces that are free in one. A chunk goes back when it is empty and the pool is trimmed.
//!
//! A device that has less left gives what it has. Beyond that, memory is counted in bytes alone, as if the driver joined the pieces.

use std::collections::BTreeMap;

use crate::abi::{Address, Handle};

/// What a pool takes from a device at a time.
const CHUNK_BYTES: u64 = 32 << 20;

/// The chunks of all pools.
pub(crate) struct Chunks {
    chunks: BTreeMap<u64, Chunk>,
    made: u64,
    /// The most that each pool ever had.
    high: BTreeMap<Handle, u64>,
}

struct Chunk {
    pool: Handle,
    device: usize,
    bytes: u64,
    /// Whether its pool was destroyed: it goes with its last allocation.
    is_abandoned: bool,
    /// Where each allocation begins and ends.
    places: BTreeMap<Address, (u64, u64)>,
}

/// Where an allocation will be.
pub(crate) struct Spot {
    pool: Handle,
    device: usize,
    start: u64,
    bytes: u64,
    in_chunk: In,
}

enum In {
    Chunk(u64),
    /// A new one, of so many bytes.
    New(u64),
    /// The device has no room for another chunk.
    None,
}

impl Chunks {
    pub(crate) const fn new() -> Self {
        Chunks { chunks: BTreeMap::new(), made: 0, high: BTreeMap::new() }
    }

    /// What a pool has reserved, and the most that it ever had.
    pub(crate) fn of_pool(&self, pool: Handle) -> (u64, u64) {
        let reserved = self.reserved(|chunk| chunk.pool == pool);
        (reserved, self.high.get(&pool).copied().unwrap_or_default())
    }

    /// What all pools of a device have reserved.
    pub(crate) fn of_device(&self, device: usize) -> u64 {
        self.reserved(|chunk| chunk.device == device)
    }

    fn reserved(&self, of: impl Fn(&Chunk) -> bool) -> u64 {
        self.chunks.values().filter(|chunk| of(chunk)).map(|chunk| chunk.bytes).sum()
    }

    /// Where an allocation could be, over allocations that are out of its way; `None`: the pool would have more than
    /// `max_bytes`. `device_left` is what the device has left for chunks.
    pub(crate) fn find(
        &self,
        (pool, device): (Handle, usize),
        bytes: u64,
        max_bytes: u64,
        device_left: u64,
        is_out_of_the_way: impl Fn(Address) -> bool,
    ) -> Option<Spot> {
        let spot = |start, in_chunk| Some(Spot { pool, device, start, bytes, in_chunk });
        for (&number, chunk) in self.chunks.iter().filter(|(_, chunk)| chunk.pool == pool) {
            if let Some(start) = chunk.hole(bytes, &is_out_of_the_way) {
                return spot(start, In::Chunk(number));
            }
        }
        let new = bytes.checked_next_multiple_of(CHUNK_BYTES)?;
        if self.of_pool(pool).0.saturating_add(new) > max_bytes {
            return None;
        }
        match new.min(device_left) {
            new if new < bytes => spot(0, In::None),
            new => spot(0, In::New(new)),
        }
    }

    /// The allocation is there.
    pub(crate) fn place(&mut self, address: Address, spot: &Spot) {
        let Spot { pool, device, start, bytes, .. } = *spot;
        let number = match spot.in_chunk {
            In::None => return,
            In::Chunk(number) => number,
            In::New(bytes) => {
                self.made += 1;
                let chunk =
                    Chunk { pool, device, bytes, is_abandoned: false, places: BTreeMap::new() };
                self.chunks.insert(self.made, chunk);
                let reserved = self.of_pool(pool).0;
                let high = self.high.entry(pool).or_default();
                *high = (*high).max(reserved);
                self.made
            }
        };
        if let Some(chunk) = self.chunks.get_mut(&number) {
            chunk.places.insert(address, (start, start + bytes));
        }
    }

    /// The allocation is gone.
    pub(crate) fn leave(&mut self, address: Address) {
        self.chunks.retain(|_, chunk| {
            chunk.places.remove(&address);
            !chunk.is_abandoned || !chunk.places.is_empty()
        });
    }

    /// The pool is destroyed.
    pub(crate) fn abandon(&mut self, pool: Handle) {
        self.trim(pool, 0);
        let left = self.chunks.values_mut().filter(|chunk| chunk.pool == pool);
        left.for_each(|chunk| chunk.is_abandoned = true);
        self.high.remove(&pool);
    }

    /// Returns empty chunks of a pool, until it has no more than `keep_bytes` or none is empty.
    pub(crate) fn trim(&mut self, pool: Handle, keep_bytes: u64) {
        let mut reserved = self.of_pool(pool).0;
        self.chunks.retain(|_, chunk| {
            let goes = chunk.pool == pool && chunk.places.is_empty() && reserved > keep_bytes;
            reserved -= if goes { chunk.bytes } else { 0 };
            !goes
        });
    }
}

impl Chunk {
    /// The first place with so many bytes.
    fn hole(&self, bytes: u64, is_out_of_the_way: impl Fn(Address) -> bool) -> Option<u64> {
        let in_the_way = self.places.iter().filter(|(address, _)| !is_out_of_the_way(**address));
        let mut taken: Vec<(u64, u64)> = in_the_way.map(|(_, place)| *place).collect();
        taken.sort_unstable();
        taken.push((self.bytes, self.bytes));
        let mut start = 0;
        for (next, end) in taken {
            if start + bytes <= next {
                return Some(start);
            }
            start = start.max(end);
        }
        None
    }
}
