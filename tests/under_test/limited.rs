//! Random programs under a memory limit, and one program whose figures are known.

use std::time::Duration;

use gpu_await::testing::Gate;
use gpu_await::{Device, DeviceBuffer, ErrorDetail, ErrorKind, Result, Stats, Stream};
use proptest::prelude::*;

/// How long anything may take that must not hang.
const SOON: Duration = Duration::from_secs(10);
const KIB: u64 = 1 << 10;
const MIB: usize = 1 << 20;
const STREAMS: usize = 3;

/// What the programs may hold.
pub(crate) const LIMIT: u64 = 4 << 20;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// On a stream, of a size in blocks of which nothing is rounded.
    Make(usize, u64),
    /// A buffer, by a stream.
    Use(usize, usize),
    Drop(usize),
    Close(usize),
    Open,
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![
        (0..6_u32).prop_map(|power| (16 * KIB) << power),
        (1..=3_u64).prop_map(|mib| mib * KIB * KIB),
    ];
    let step = prop_oneof![
        8 => (0..STREAMS, size).prop_map(|(stream, size)| Step::Make(stream, size)),
        3 => (0..20_usize, 0..STREAMS).prop_map(|(buffer, stream)| Step::Use(buffer, stream)),
        6 => (0..20_usize).prop_map(Step::Drop),
        1 => (0..STREAMS).prop_map(Step::Close),
        1 => Just(Step::Open),
    ];
    prop::collection::vec(step, 1..60)
}

pub(crate) fn held(stats: &Stats) -> u64 {
    stats.allocated_bytes + stats.pending_bytes + stats.kept_bytes
}

fn is_out_of_memory(error: &gpu_await::Error) -> bool {
    error.kind() == ErrorKind::OutOfMemory
}

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// Runs a program: what fits beside the buffers that are alive is made, at the second attempt at the
/// latest, and never more than the limit is held.
pub(crate) async fn run(device: &Device, steps: &[Step]) -> Result<()> {
    let streams: Result<Vec<Stream>> = (0..STREAMS).map(|_| device.stream()).collect();
    let streams = streams?;
    let mut buffers: Vec<DeviceBuffer<u8>> = Vec::new();
    let mut gates: Vec<Gate> = Vec::new();
    for step in steps {
        match *step {
            Step::Make(stream, size) => {
                let make = || streams[stream].full(size as usize, 7u8).queued();
                let fits = device.stats().allocated_bytes + size <= LIMIT;
                let made = match make() {
                    Err(error) if is_out_of_memory(&error) && fits => {
                        gates.clear();
                        soon(streams[stream].reclaimed(size)).await?;
                        Ok(make()?)
                    }
                    made => made,
                };
                match made {
                    Ok(buffer) => buffers.push(buffer),
                    Err(error) => {
                        assert!(is_out_of_memory(&error) && !fits, "{error}");
                        let never = soon(streams[stream].reclaimed(size)).await;
                        assert!(never.is_err_and(|error| is_out_of_memory(&error)));
                    }
                }
            }
            Step::Use(buffer, stream) if !buffers.is_empty() => {
                let index = buffer % buffers.len();
                streams[stream].fill(&mut buffers[index], 9).queued()?;
            }
            Step::Drop(buffer) if !buffers.is_empty() => {
                drop(buffers.swap_remove(buffer % buffers.len()));
            }
            Step::Close(stream) if gates.len() < 2 => gates.push(Gate::close(&streams[stream])?),
            Step::Open => gates.clear(),
            Step::Use(..) | Step::Drop(_) | Step::Close(_) => {}
        }
        let stats = device.stats();
        assert!(held(&stats) <= LIMIT, "{stats:?}");
    }
    drop(gates);
    for buffer in &buffers {
        let seen = soon(streams[0].download(buffer)).await?;
        assert!(seen.iter().all(|byte| [7, 9].contains(byte) && *byte == seen[0]));
    }
    drop(buffers);
    soon(device.done()).await?;
    soon(async {
        while device.stats().pending_bytes > 0 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    })
    .await;
    let stats = device.stats();
    assert_eq!((stats.allocated_bytes, stats.leaked_bytes, stats.allocations), (0, 0, 0));
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
