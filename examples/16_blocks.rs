//! A cache of blocks in two tiers, as a server of language models keeps one: who may use a block when, and who says so?
//!
//! Requests append tokens to blocks in device memory. When those run out, the request that was used least recently moves to pinned host memory, and
//! back when its turn comes. Some requests are cancelled in the middle of anything.
//!
//! | what happens to a block | the cache says | the library orders |
//! |---|---|---|
//! | it moves to the host's tier | `copy_many`, and that the block is free, at once | whoever writes it next behind the copy |
//! | it moves back | the same, the other way round | tokens behind the copy |
//! | it is read | gather the blocks, download | writers that come later behind the read |
//! | its request is cancelled | that it is free | as above: what was submitted goes on |
//! | another request gets it | a fill of all of it | that behind its last use; what failed with the old contents is gone |
//!
//! Nothing waits on the host, but for the reads: each one is compared with a checksum of the tokens. Moves go by a stream of their own.
//!
//! Prints what moved, and `all checksums right`.

use std::sync::{Arc, Mutex};

use gpu_await::{CopyBy, Device, DeviceSlab, HostSlab, Op, PinnedBuffer, Result, Stream};

/// Tokens of a block, and how many blocks each tier has.
const BLOCK: usize = 64;
const DEVICE_BLOCKS: usize = 60;
const HOST_BLOCKS: usize = 400;
const REQUESTS: usize = 32;
const STEPS: u64 = 80;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Tier {
    #[default]
    Device,
    Host,
}

#[derive(Default)]
struct Request {
    tier: Tier,
    blocks: Vec<u32>,
    tokens: usize,
    used_at: u64,
}

struct Cache {
    steps: Stream,
    moves: Stream,
    device: DeviceSlab<u32>,
    host: HostSlab<u32>,
    /// Free blocks of either tier.
    free_on_device: Vec<u32>,
    free_on_host: Vec<u32>,
    requests: Vec<Request>,
    clock: u64,
    blocks_out: usize,
    blocks_in: usize,
}

impl Cache {
    async fn new(device: &Device) -> Result<Cache> {
        let steps = device.stream()?;
        Ok(Cache {
            moves: device.stream()?,
            device: steps.slab(DEVICE_BLOCKS, BLOCK).queued()?,
            host: device.host_slab(HOST_BLOCKS, BLOCK).await?,
            free_on_device: (0..DEVICE_BLOCKS as u32).collect(),
            free_on_host: (0..HOST_BLOCKS as u32).collect(),
            requests: (0..REQUESTS).map(|_| Request::default()).collect(),
            clock: 0,
            blocks_out: 0,
            blocks_in: 0,
            steps,
        })
    }

    /// Puts the tokens behind those that the request has.
    fn append(&mut self, id: usize, tokens: &[u32]) -> Result<()> {
        self.bring_in(id)?;
        for token in tokens {
            let at = self.requests[id].tokens;
            if at == self.requests[id].blocks.len() * BLOCK {
                self.make_room(1, id)?;
                let block = self.free_on_device.pop().expect("there is room");
                self.requests[id].blocks.push(block);
                // All of it: whatever failed while another request had it is no matter of this one.
                self.steps.fill(&mut self.device.block_mut(block)?, 0).queued()?;
            }
            let block = self.requests[id].blocks[at / BLOCK];
            let place = at % BLOCK..at % BLOCK + 1;
            let mut block = self.device.block_mut(block)?;
            self.steps.fill(&mut block.slice_mut(place)?, *token).queued()?;
            self.requests[id].tokens += 1;
        }
        Ok(())
    }

    /// Gathers all tokens of the request: what they are now, whatever becomes of the blocks.
    fn read(&mut self, id: usize) -> Result<Op<PinnedBuffer<u32>>> {
        self.bring_in(id)?;
        let request = &self.requests[id];
        let mut all = self.steps.empty::<u32>(request.tokens).queued()?;
        let pieces = self.device.blocks(&request.blocks)?.into_iter().zip(all.chunks_mut(BLOCK));
        let pieces = pieces.map(|(block, to)| Ok((block.slice(..to.len())?, to)));
        self.steps.copy_many(pieces.collect::<Result<_>>()?, CopyBy::Auto).queued()?;
        Ok(self.steps.download(&all))
    }

    /// Its blocks are free at once. What still uses them is on the streams, in front of whatever uses them next.
    fn release(&mut self, id: usize) {
        let Request { tier, blocks, .. } = std::mem::take(&mut self.requests[id]);
        match tier {
            Tier::Device => self.free_on_device.extend(blocks),
            Tier::Host => self.free_on_host.extend(blocks),
        }
    }

    /// Has the request in device memory.
    fn bring_in(&mut self, id: usize) -> Result<()> {
        self.clock += 1;
        self.requests[id].used_at = self.clock;
        if self.requests[id].tier == Tier::Device {
            return Ok(());
        }
        let from = self.requests[id].blocks.clone();
        self.make_room(from.len(), id)?;
        let left = self.free_on_device.len() - from.len();
        let to = self.free_on_device[left..].to_vec();
        let pieces = self.host.blocks(&from)?.into_iter().zip(self.device.blocks_mut(&to)?);
        self.moves.copy_many(pieces.collect(), CopyBy::Auto).queued()?;
        // Behind whatever may fail: no block is lost.
        self.free_on_device.truncate(left);
        self.blocks_in += from.len();
        self.free_on_host.extend(from);
        (self.requests[id].tier, self.requests[id].blocks) = (Tier::Device, to);
        Ok(())
    }

    /// Moves other requests out until so many blocks of the device are free.
    fn make_room(&mut self, blocks: usize, for_whom: usize) -> Result<()> {
        while self.free_on_device.len() < blocks {
            let others = self.requests.iter().enumerate().filter(|(id, request)| {
                *id != for_whom && request.tier == Tier::Device && !request.blocks.is_empty()
            });
            let oldest = others.min_by_key(|(_, request)| request.used_at);
            let (id, _) = oldest.expect("one request is smaller than the tier");
            let from = self.requests[id].blocks.clone();
            let left = self.free_on_host.len() - from.len();
            let to = self.free_on_host[left..].to_vec();
            let pieces = self.device.blocks(&from)?.into_iter().zip(self.host.blocks_mut(&to)?);
            self.moves.copy_many(pieces.collect(), CopyBy::Auto).queued()?;
            self.free_on_host.truncate(left);
            self.blocks_out += from.len();
            self.free_on_device.extend(from);
            (self.requests[id].tier, self.requests[id].blocks) = (Tier::Host, to);
        }
        Ok(())
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % end
    }
}

/// Order counts.
fn checksum(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0, |sum, token| sum.wrapping_mul(31).wrapping_add(u64::from(*token)))
}

/// One request after the other in one place. Returns how many reads were right, and how many were cancelled.
async fn client(cache: Arc<Mutex<Cache>>, id: usize) -> Result<(usize, usize)> {
    let mut random = Random(0x9E37_79B9 + id as u64 * 977);
    let (mut tokens, mut right, mut cancelled) = (Vec::new(), 0, 0);
    for _ in 0..STEPS {
        let new: Vec<u32> = (0..random.below(24)).map(|_| random.below(1 << 32) as u32).collect();
        // Locked for the calls, which put work on streams, and never over an await.
        let with = || cache.lock().expect("no panic");
        match random.below(12) {
            _ if tokens.len() > 8 * BLOCK => {
                tokens.clear();
                with().release(id);
            }
            0 => {
                // In the middle of a read that nobody wants any more.
                drop(with().read(id)?);
                tokens.clear();
                with().release(id);
                cancelled += 1;
            }
            1..4 => {
                let read = with().read(id)?;
                // Others, and this one, go on meanwhile.
                with().append(id, &new)?;
                let read = read.await?;
                assert_eq!(checksum(&read), checksum(&tokens), "request {id}");
                (right, tokens) = (right + 1, [&tokens[..], &new].concat());
            }
            _ => {
                with().append(id, &new)?;
                tokens.extend(new);
            }
        }
        tokio::task::yield_now().await;
    }
    Ok((right, cancelled))
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let cache = Arc::new(Mutex::new(Cache::new(&device).await?));
    let clients = (0..REQUESTS).map(|id| tokio::spawn(client(cache.clone(), id)));
    let (mut right, mut cancelled) = (0, 0);
    for client in clients.collect::<Vec<_>>() {
        let (reads, drops) = client.await.expect("no panic")?;
        (right, cancelled) = (right + reads, cancelled + drops);
    }
    device.done().await?;
    let cache = cache.lock().expect("no panic");
    println!("{} blocks to the host's tier, {} back", cache.blocks_out, cache.blocks_in);
    println!("{right} reads, {cancelled} requests cancelled in the middle of one");
    println!("all checksums right");
    Ok(())
}
