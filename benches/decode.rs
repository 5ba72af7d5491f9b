//! What does a step of a decoder over a cache of blocks cost, and what does it wait for beside onboarding?
//!
//! A step serves 64 requests that have 4 blocks of 64 KiB each: a kernel fetches the 256 numbers of their blocks from mapped host memory, 16 kernels read
//! all of these blocks and write the last one of each request, and the last of them leaves 64 results in mapped host memory. So the step needs no copy
//! engine, which other copies may keep busy. Blocks of requests change hands between steps.
//!
//! | line | the step |
//! |---|---|
//! | `tracked` | names its blocks, each launch in a call; no unsafe code but the kernel's declaration |
//! | `by_hand` | the same over untracked memory, which the program orders itself |
//! | `replayed`, `replayed_by_hand` | the same as a replayed batch |
//!
//! `alone`, `beside_engines`, `beside_kernel`, `beside_partition`: the replayed step while nothing, or copies of 64 blocks each from a host slab to other
//! blocks of the same slab, four in flight, run on another stream: by the copy engines, by the kernel, by the kernel in a partition of 8 multiprocessors (with the
//! step in the rest; `alone_in_rest` is that step alone).
//! `decode.differs` counts replays after the second that were not the compiled list. Prints `name value unit`. The targets: `tracked` and `replayed` at most
//! 1.03 times what is by hand; beside the copy engines and in partitions a p99 of at most 1.10 times that alone. Without NVRTC, which compiles its kernels, nothing
//! is printed, so `benches/lines.txt` has none of these.

#[path = "measure.rs"]
mod measure;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu_await::{
    CopyBy, Device, DeviceBuffer, DeviceSlab, ErrorDetail, Grid, HostSlab, LaunchConfig,
    ListOutcome, Mapped, Op, Queue, Region, Result, Stream, kernel,
};
use measure::{Sorted, print, rounds, us, window};
use tokio::runtime::Runtime;

const REQUESTS: usize = 64;
const EACH: usize = 4;
const LAYERS: usize = 16;
/// Elements of a block.
const BLOCK: usize = 16 << 10;
/// Of the slab: the requests' and as many for onboarding.
const BLOCKS: usize = 2048;
const PHASE: Duration = Duration::from_millis(1500);

kernel! {
    /// `out[r]` is the sum of the first 1,024 elements of the blocks of request `r`, of which the last one gets it as its first element. An index that is
    /// too large touches nothing.
    unsafe fn attend(slab: &mut [f32], blocks: &[u32], out: Out<[f32]>, block_len: u32, each: u32, n: u64 = slab.len())
        where blocks.len() == out.len() * each;
    launch = LaunchConfig::new(out.len(), 256);
    cuda = "extern \"C\" __global__ void attend(float* slab, const unsigned* blocks, float* out, unsigned block_len, unsigned each, unsigned long long n) {
        __shared__ float sum;
        if (threadIdx.x == 0) sum = 0.0f;
        __syncthreads();
        float mine = 0.0f;
        unsigned long long last = n;
        for (unsigned b = 0; b < each; ++b) {
            last = blocks[blockIdx.x * each + b] * (unsigned long long)block_len;
            for (unsigned i = threadIdx.x; i < 1024; i += blockDim.x)
                if (last + i < n) mine += slab[last + i];
        }
        atomicAdd(&sum, mine);
        __syncthreads();
        if (threadIdx.x == 0) {
            out[blockIdx.x] = sum;
            if (last < n) slab[last] = sum * 0.125f;
        }
    }";
    host = attend_twin;
}

fn attend_twin(
    _: &Grid,
    slab: &mut [f32],
    blocks: &[u32],
    out: &mut [f32],
    block_len: u32,
    each: u32,
    _: u64,
) {
    for (out, mine) in out.iter_mut().zip(blocks.chunks(each as usize)) {
        let mut all: Vec<_> = slab.chunks_exact_mut(block_len as usize).collect();
        let block = |number: &u32| all.get(*number as usize);
        *out = mine.iter().filter_map(block).flat_map(|block| &block[..1024]).sum();
        if let Some(block) = mine.last().and_then(|number| all.get_mut(*number as usize)) {
            block[0] = *out * 0.125;
        }
    }
}

kernel! {
    /// `to[i] = from[i]`, of which `from` is host memory.
    unsafe fn fetch(from: &[u32], to: Out<[u32]>, n: u32 = to.len()) where from.len() == to.len();
    launch = LaunchConfig::for_elements(to.len());
    cuda = "extern \"C\" __global__ void fetch(const unsigned* from, unsigned* to, unsigned n) {
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) to[i] = from[i];
    }";
    host = |_: &Grid, from: &[u32], to: &mut [u32], _: u32| to.copy_from_slice(from);
}

struct Cache {
    stream: Stream,
    attend: attend,
    fetch: fetch,
    asked: Mapped<u32>,
    answers: Mapped<f32>,
    slab: Arc<Mutex<DeviceSlab<f32>>>,
    /// For who orders by hand.
    bare: DeviceBuffer<f32>,
    numbers: DeviceBuffer<u32>,
    region: Region,
    bare_region: Region,
    /// By request, one behind the other.
    blocks: Vec<u32>,
    steps: u32,
    differs: usize,
}

impl Cache {
    async fn new(stream: Stream) -> Result<Cache> {
        Ok(Cache {
            attend: attend::load(&stream.device()).await?,
            slab: Arc::new(Mutex::new(stream.slab(BLOCKS, BLOCK).await?)),
            bare: stream.zeros(BLOCKS * BLOCK).await?,
            fetch: fetch::load(&stream.device()).await?,
            asked: stream.pinned(REQUESTS * EACH)?.into_mapped(),
            answers: stream.pinned(REQUESTS)?.into_mapped(),
            numbers: stream.zeros(REQUESTS * EACH).await?,
            region: Region::new(),
            bare_region: Region::new(),
            blocks: (0..(REQUESTS * EACH) as u32).collect(),
            steps: 0,
            differs: 0,
            stream,
        })
    }

    /// One request ends, another one has its blocks in another order.
    async fn change(&mut self) -> Result<()> {
        let request = self.steps as usize % REQUESTS;
        self.steps += 1;
        self.blocks[request * EACH..][..EACH].rotate_left(1);
        self.asked.host().await?.copy_from_slice(&self.blocks);
        Ok(())
    }

    async fn step(&mut self, is_tracked: bool) -> Result<()> {
        self.change().await?;
        let (written, read) = named(&self.blocks);
        let (len, each) = (BLOCK as u32, EACH as u32);
        let Cache { stream, attend, fetch, asked, answers, numbers, .. } = self;
        fetch.launch(stream, &*asked, numbers).queued()?;
        if is_tracked {
            let mut slab = self.slab.lock().unwrap();
            let mut named = slab.naming_mut(&written)?.reading(&read)?;
            for _ in 0..LAYERS {
                attend.launch(stream, &mut named, numbers, answers, len, each).queued()?;
            }
        } else {
            for _ in 0..LAYERS {
                // SAFETY: one stream uses it, and it outlives the await.
                let mut slab = unsafe { self.bare.view_mut().untracked() };
                attend.launch(stream, &mut slab, numbers, answers, len, each).queued()?;
            }
        }
        self.answers.host().await.map(drop)
    }

    async fn replayed(&mut self, is_tracked: bool) -> Result<()> {
        self.change().await?;
        let (written, read) = named(&self.blocks);
        let (len, each) = (BLOCK as u32, EACH as u32);
        let Cache { attend, fetch, asked, answers, slab, bare, numbers, stream, .. } = self;
        let region = if is_tracked { &mut self.region } else { &mut self.bare_region };
        {
            let mut slab = slab.lock().unwrap();
            let mut named = slab.naming_mut(&written)?.reading(&read)?;
            let list = stream.replay(region, |q: &Queue<'_>| {
                fetch.launch(q, &*asked, numbers)?;
                (0..LAYERS).try_for_each(|_| {
                    if is_tracked {
                        return attend.launch(q, &mut named, numbers, answers, len, each);
                    }
                    // SAFETY: one stream uses it, and it outlives the await.
                    let mut slab = unsafe { bare.view_mut().untracked() };
                    attend.launch(q, &mut slab, numbers, answers, len, each)
                })
            });
            list.queued()?;
        }
        let mut lists = region.last_run().iter();
        let is_right = lists.all(|list| matches!(list.outcome, ListOutcome::Replayed { .. }));
        self.differs += usize::from(self.steps > 8 && !is_right);
        self.answers.host().await.map(drop)
    }
}

/// The blocks that a step writes, and those that it only reads.
fn named(blocks: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let requests = blocks.chunks_exact(EACH);
    let split = |mine: &[u32]| (mine[EACH - 1], mine[..EACH - 1].to_vec());
    let (written, read): (Vec<u32>, Vec<Vec<u32>>) = requests.map(split).unzip();
    (written, read.concat())
}

/// Four copies in flight, for ever.
async fn onboard(stream: Stream, slab: Arc<Mutex<DeviceSlab<f32>>>, by: CopyBy) -> Result<()> {
    let host: HostSlab<f32> = stream.device().host_slab(BLOCKS / 2, BLOCK).await?;
    let mut pending = VecDeque::<Op<()>>::new();
    let (half, count) = (BLOCKS as u32 / 2, 64);
    for first in (0..half).step_by(count).cycle() {
        if pending.len() == 4
            && let Some(op) = pending.pop_front()
        {
            op.await?;
        }
        let from: Vec<u32> = (first..first + count as u32).collect();
        let to: Vec<u32> = from.iter().map(|number| half + number).collect();
        let mut slab = slab.lock().unwrap();
        let pieces = host.blocks(&from)?.into_iter().zip(slab.blocks_mut(&to)?).collect();
        pending.push_back(stream.copy_many(pieces, by));
    }
    Ok(())
}

/// Replayed steps, for a phase, in a task.
fn steps(runtime: &Runtime, mut cache: Cache) -> Result<(Sorted, Cache)> {
    measure::on_worker(runtime, async move {
        let (mut times, end) = (Vec::new(), Instant::now() + window(PHASE));
        while times.len() < rounds(20, 2) || Instant::now() < end {
            let start = Instant::now();
            cache.replayed(true).await?;
            times.push(us(start.elapsed()));
        }
        Ok((Sorted::new(times), cache))
    })
}

fn told(line: &str, times: &Sorted) {
    print(&format!("decode.{line}.p50_us"), times.p50(), "us");
    print(&format!("decode.{line}.p99_us"), times.p99(), "us");
}

fn main() -> Result<()> {
    let (device, runtime) = (measure::device(), measure::workers(measure::cores()));
    let mut cache = match runtime.block_on(Cache::new(device.stream()?)) {
        Err(error) if matches!(error.detail(), ErrorDetail::NoCompiler { .. }) => {
            eprintln!("# {error}");
            return Ok(());
        }
        made => made?,
    };
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..rounds(2000, 3) {
        for (way, times) in times.iter_mut().enumerate() {
            let (is_tracked, start) = (way % 2 == 0, Instant::now());
            runtime.block_on(async {
                if way < 2 {
                    cache.step(is_tracked).await
                } else {
                    cache.replayed(is_tracked).await
                }
            })?;
            times.push(us(start.elapsed()));
        }
    }
    let names = ["tracked", "by_hand", "replayed", "replayed_by_hand"];
    names.iter().zip(times).for_each(|(name, times)| told(name, &Sorted::new(times)));
    print("decode.differs", cache.differs as f64, "count");

    let (alone, mut cache) = steps(&runtime, cache)?;
    told("alone", &alone);
    for (line, by) in [("beside_engines", CopyBy::CopyEngine), ("beside_kernel", CopyBy::Kernel)] {
        let copies = runtime.spawn(onboard(device.stream()?, cache.slab.clone(), by));
        let times;
        (times, cache) = steps(&runtime, cache)?;
        told(line, &times);
        copies.abort();
    }
    drop(cache);
    in_partitions(&device, &runtime)
}

fn in_partitions(device: &Device, runtime: &Runtime) -> Result<()> {
    let all = device.multiprocessors();
    let reserved = |multiprocessors| runtime.block_on(device.reserve_partition(multiprocessors));
    // A host device may have too few.
    let Ok(small) = reserved(8.min(all / 2).max(1)) else { return Ok(()) };
    let Ok(rest) = reserved(all - small.multiprocessors()) else { return Ok(()) };
    let cache = runtime.block_on(Cache::new(rest.stream()?))?;
    let (alone, cache) = steps(runtime, cache)?;
    told("alone_in_rest", &alone);
    let copies = runtime.spawn(onboard(small.stream()?, cache.slab.clone(), CopyBy::Kernel));
    let (beside, _cache) = steps(runtime, cache)?;
    told("beside_partition", &beside);
    copies.abort();
    Ok(())
}
