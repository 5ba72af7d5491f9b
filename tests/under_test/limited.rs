//! Random programs under a memory limit, and programs whose figures are known.

use std::time::Duration;

use gpu_await::testing::Gate;
use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, ErrorKind, MemoryInfo, Op, Result, Stats, Stream,
};
use proptest::prelude::*;

/// How long anything may take that must not hang.
const SOON: Duration = Duration::from_secs(10);
const KIB: u64 = 1 << 10;
const MIB: usize = 1 << 20;
/// How much of each end of a buffer is written and read.
const END: usize = 1 << 10;

/// A program, and what it may hold.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) limit: u64,
    /// Whether an allocation waits for what other streams still use.
    pub(crate) waits: bool,
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    /// On a stream.
    Make(usize, Size),
    /// A buffer, by a stream.
    Use(usize, usize),
    /// A buffer, after its last use by a stream.
    Drop(usize, usize),
    Close(usize),
    Open,
    /// The stream goes, with what it keeps.
    Renew(usize),
}

#[derive(Clone, Copy, Debug)]
enum Size {
    Bytes(u64),
    /// So many thousandths of the limit.
    Part(u64),
}

/// What a program works with.
pub(crate) type Streams = [Stream; 3];

/// The streams of a device. What a driver loads when it is first used, and would wait for a gate with, is loaded.
pub(crate) async fn streams(device: &Device) -> Result<Streams> {
    let streams = [device.stream()?, device.stream()?, device.stream()?];
    for bytes in [512, 3_001, 3_002, 3_004, 3_008] {
        let made = Marked::make(&streams[0], bytes, 1)?;
        for end in made.read(&streams[0])? {
            soon(end).await?;
        }
    }
    drop(Gate::close(&streams[0])?);
    soon(device.done()).await?;
    Ok(streams)
}

/// Programs with limits of 1 MiB, doubled up to so many times.
pub(crate) fn programs(doublings: u32) -> impl Strategy<Value = Program> {
    let size = prop_oneof![
        2 => (0..9_u32).prop_map(|power| Size::Bytes(512 << power)),
        3 => (1..=1000_u64).prop_map(Size::Part),
        3 => (1..=12_u64).prop_map(|n| Size::Part(25 * n)),
        // Halves, quarters, and all of it.
        1 => prop_oneof![Just(250), Just(500), Just(750), Just(1000)].prop_map(Size::Part),
    ];
    let stream = 0..3_usize;
    let step = prop_oneof![
        8 => (stream.clone(), size).prop_map(|(stream, size)| Step::Make(stream, size)),
        3 => (0..20_usize, stream.clone()).prop_map(|(buffer, stream)| Step::Use(buffer, stream)),
        6 => (0..20_usize, stream.clone()).prop_map(|(buffer, stream)| Step::Drop(buffer, stream)),
        1 => stream.clone().prop_map(Step::Close),
        1 => Just(Step::Open),
        1 => stream.prop_map(Step::Renew),
    ];
    let steps = prop::collection::vec(step, 1..60);
    let parts = (0..=doublings, any::<bool>(), steps);
    parts.prop_map(|(power, waits, steps)| Program { limit: (MIB as u64) << power, waits, steps })
}

pub(crate) fn held(stats: &Stats) -> u64 {
    stats.allocated_bytes + stats.pending_bytes + stats.kept_bytes + stats.leaked_bytes
}

/// All of the limit.
fn sum(info: &MemoryInfo) -> u64 {
    let MemoryInfo { free_bytes, allocated_bytes, pending_bytes, kept_bytes, leaked_bytes, .. } =
        info;
    free_bytes + allocated_bytes + pending_bytes + kept_bytes + leaked_bytes
}

fn is_out_of_memory(error: &gpu_await::Error) -> bool {
    error.kind() == ErrorKind::OutOfMemory
}

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A buffer whose ends are marked.
struct Marked {
    buffer: DeviceBuffer<u8>,
    mark: u8,
}

impl Marked {
    fn make(stream: &Stream, bytes: u64, mark: u8) -> Result<Marked> {
        let buffer = stream.empty(bytes as usize).queued()?;
        let mut made = Marked { buffer, mark };
        made.mark(stream, mark)?;
        Ok(made)
    }

    fn mark(&mut self, stream: &Stream, mark: u8) -> Result<()> {
        self.mark = mark;
        let len = self.buffer.len();
        stream.fill(&mut self.buffer.slice_mut(..len.min(END))?, mark).queued()?;
        if len > END {
            stream.fill(&mut self.buffer.slice_mut((len - END).max(END)..)?, mark).queued()?;
        }
        Ok(())
    }

    fn read(&self, stream: &Stream) -> Result<[Op<gpu_await::PinnedBuffer<u8>>; 2]> {
        let len = self.buffer.len();
        let first = stream.download(&self.buffer.slice(..len.min(END))?);
        let tail = if len > END { (len - END).max(END) } else { 0 };
        Ok([first, stream.download(&self.buffer.slice(tail..)?)])
    }
}

/// Runs a program: what is free is given at once, and so is what fits beside the buffers that are alive; told to fail, or
/// on a full device, after `reclaimed`. Never more than the limit is held, what is refused is told with figures that add up, and nobody
/// writes to another one's memory.
pub(crate) async fn run(device: &Device, streams: &mut Streams, program: &Program) -> Result<()> {
    let limit = program.limit;
    // A driver that has no more than the limit may have put others where a free was that is still to run.
    let has_more = device.memory()?.total_bytes > limit;
    let mut buffers: Vec<Marked> = Vec::new();
    let mut reads = Vec::new();
    let mut gates: Vec<Gate> = Vec::new();
    let mut mark = 0_u8;
    for step in &program.steps {
        mark = mark.wrapping_add(1);
        match *step {
            Step::Make(stream, size) => {
                let bytes = match size {
                    Size::Bytes(bytes) => bytes,
                    Size::Part(thousandths) => limit * thousandths / 1000,
                };
                let block = bytes.next_multiple_of(512);
                let make = || Marked::make(&streams[stream], bytes, mark);
                let before = device.stats();
                let free = limit - held(&before);
                let fits = before.allocated_bytes + block <= limit;
                let at_once = has_more && (block <= free || program.waits && fits);
                let made = match make() {
                    Err(error) if is_out_of_memory(&error) && fits => {
                        assert!(!at_once, "{block} of {free} free: {error}");
                        gates.clear();
                        soon(streams[stream].reclaimed(bytes)).await?;
                        Ok(make()?)
                    }
                    made => made,
                };
                match made {
                    Ok(made) => buffers.push(made),
                    Err(error) => {
                        assert!(is_out_of_memory(&error) && !fits, "{error}");
                        let [_, allocated, pending, kept, _] = told(&error);
                        let told = told_free(&error);
                        assert_eq!(told + allocated + pending + kept, limit, "{error}");
                        let info = device.memory()?;
                        assert_eq!(sum(&info), limit, "{info:?}");
                        // The poller frees what is complete meanwhile.
                        assert!(
                            (free..=info.free_bytes).contains(&told),
                            "{free} {error} {info:?}"
                        );
                        let never = soon(streams[stream].reclaimed(bytes)).await;
                        assert!(never.is_err_and(|error| is_out_of_memory(&error)));
                    }
                }
            }
            Step::Use(buffer, stream) if !buffers.is_empty() => {
                let index = buffer % buffers.len();
                buffers[index].mark(&streams[stream], mark)?;
            }
            Step::Drop(buffer, stream) if !buffers.is_empty() => {
                let dropped = buffers.swap_remove(buffer % buffers.len());
                if mark.is_multiple_of(2) {
                    reads.push((dropped.read(&streams[stream])?, dropped.mark));
                }
            }
            Step::Close(stream) if gates.len() < 2 => gates.push(Gate::close(&streams[stream])?),
            Step::Open => gates.clear(),
            Step::Renew(stream) => streams[stream] = device.stream()?,
            Step::Use(..) | Step::Drop(..) | Step::Close(_) => {}
        }
        let stats = device.stats();
        assert!(held(&stats) <= limit, "{stats:?}");
    }
    drop(gates);
    for marked in &buffers {
        reads.push((marked.read(&streams[0])?, marked.mark));
    }
    for (ends, mark) in reads {
        for end in ends {
            assert!(soon(end).await?.iter().all(|byte| *byte == mark));
        }
    }
    drop(buffers);
    // All of it comes back.
    soon(streams[0].reclaimed(limit)).await?;
    let stats = device.stats();
    assert_eq!((stats.allocated_bytes, stats.leaked_bytes, stats.allocations), (0, 0, 0));
    let info = device.memory()?;
    assert_eq!(sum(&info), limit, "{info:?}");
    assert!(info.used_peak_bytes <= limit, "{info:?}");
    Ok(())
}

/// What fits beside what is held is there, whatever chunks a driver's pool has and whatever holes are in them.
pub(crate) async fn fits_beside_holes(open: impl Fn(u64) -> Device) -> Result<()> {
    // Less than a chunk, in the first one.
    let device = open(64 << 20);
    let stream = device.stream()?;
    let small = stream.full(512, 1u8).queued()?;
    let large = stream.full(60 * MIB, 2u8).queued()?;
    let seen = soon(stream.download(&small)).await?;
    assert!(seen.iter().all(|byte| *byte == 1));
    drop((small, large));
    // Four chunks, a small part of each.
    let device = open(145 << 20);
    let stream = device.stream()?;
    let mut small = Vec::new();
    for _ in 0..4 {
        let large = stream.full(24 * MIB, 1u8).queued()?;
        small.push((stream.full(6 * MIB, 2u8).queued()?, large));
    }
    let small: Vec<_> = small.into_iter().map(|(small, _)| small).collect();
    soon(stream.done()).await?;
    assert_eq!(device.memory()?.free_bytes, 121 << 20);
    let large = stream.full(121 * MIB, 3u8).queued()?;
    soon(stream.done()).await?;
    let info = device.memory()?;
    assert_eq!((info.allocated_bytes, info.free_bytes), (145 << 20, 0));
    drop((small, large));
    Ok(())
}

/// A program, and what it holds at each of its points: allocated, pending, kept, and used at most, in
/// KiB.
pub(crate) async fn figures(device: &Device) -> Result<Vec<[u64; 4]>> {
    let (a, b) = (device.stream()?, device.stream()?);
    let mut seen = Vec::new();
    let mut look = || {
        let info = device.memory().expect("asked");
        let stats = device.stats();
        let figures = [info.allocated_bytes, info.pending_bytes, info.kept_bytes];
        assert_eq!(figures, [stats.allocated_bytes, stats.pending_bytes, stats.kept_bytes]);
        assert_eq!(info.used_bytes, info.allocated_bytes + info.pending_bytes);
        let [allocated, pending, kept] = figures;
        seen.push([allocated, pending, kept, info.used_peak_bytes].map(|bytes| bytes / KIB));
    };
    look();
    let gate = Gate::close(&a)?;
    let small = a.zeros::<u8>(100_000).queued()?;
    let large = a.zeros::<u8>(3 * MIB - 5).queued()?;
    let mut shared = a.zeros::<u8>(2 * MIB).queued()?;
    look();
    drop(small);
    drop(large);
    look();
    b.fill(&mut shared, 1).queued()?;
    drop(shared);
    look();
    // The first has the small one's memory, the second that of the free in front of it.
    let again = a.zeros::<u8>(99_000).queued()?;
    let part = a.zeros::<u8>(MIB).queued()?;
    look();
    gate.open();
    soon(device.done()).await?;
    soon(async {
        while device.stats().pending_bytes > 0 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    })
    .await;
    look();
    drop((again, part));
    look();
    soon(device.trim(0)).await?;
    soon(async {
        while device.stats().pending_bytes > 0 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    })
    .await;
    look();
    Ok(seen)
}

/// What [`figures`] tells, whatever the device.
pub(crate) const FIGURES: [[u64; 4]; 8] = [
    [0, 0, 0, 0],
    [112 + 3072 + 2048, 0, 0, 5232],
    [2048, 3072, 112, 5232],
    [0, 5120, 112, 5232],
    [112 + 1024, 4096, 0, 5232],
    [112 + 1024, 0, 0, 5232],
    [0, 0, 112 + 1024, 5232],
    [0, 0, 0, 5232],
];

/// What an error says of memory: what is reclaimable, allocated, pending, kept, and the limit.
pub(crate) fn told(error: &gpu_await::Error) -> [u64; 5] {
    match *error.detail() {
        ErrorDetail::OutOfMemory {
            reclaimable_bytes,
            allocated_bytes,
            pending_bytes,
            kept_bytes,
            limit_bytes,
            ..
        } => {
            let limit = limit_bytes.unwrap_or(0);
            [reclaimable_bytes, allocated_bytes, pending_bytes, kept_bytes, limit]
        }
        ref other => panic!("{other}"),
    }
}

/// The free bytes that an error tells.
pub(crate) fn told_free(error: &gpu_await::Error) -> u64 {
    match *error.detail() {
        ErrorDetail::OutOfMemory { free_bytes, .. } => free_bytes,
        ref other => panic!("{other}"),
    }
}
