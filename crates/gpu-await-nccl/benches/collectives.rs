//! What does it cost to await a collective?
//!
//! Compared in one process, round by round in turn, over as many GPUs as there are (at most two processes, of one GPU each): collectives
//! through this crate (`ours`), and NCCL called barely, with `cuStreamSynchronize` on each stream (`bare`). Both in blocking
//! communicators, between the same buffers.
//!
//! | line | is |
//! |---|---|
//! | `all_reduce.8B.ours.us` | one call and its wait, median |
//! | `all_reduce.1MiB.bus.ours` | bus bandwidth of a burst that is waited for once, as `nccl-tests` counts it |
//! | `all_reduce.1MiB.bus.graph` | that of the same calls in a graph: one launch on each GPU |
//! | `all_reduce.1MiB.grouped.ours` | that of as many calls, of memory of their own, in one group, which NCCL makes few kernels of |
//! | `overlap.*` | kernels on one stream, a collective beside them: each alone, and both |
//! | `step.*` | kernel, all_reduce, kernel on every GPU: awaited once, and after each part |
//! | `two_processes.*` | the same with a process a GPU |
//!
//! | argument | does |
//! |---|---|
//! | `smoke` | few rounds; always so on the host device |
//! | `one_process` | leaves the two processes out |
//!
//! `collectives_torch.py` prints the lines of `torch.distributed`.

mod bare;
#[path = "../../../benches/measure.rs"]
mod measure;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bare::{Bare, Id};
use gpu_await::{Device, DeviceBuffer, DeviceKind, In, Op, Out, Stream, kernels};
use gpu_await_nccl::{Communicator, Reduction, UniqueId};
use measure::{Sorted, argument, is_smoke, on_cuda, print, us};

const OPS: [&str; 3] = ["all_reduce", "all_gather", "broadcast"];
/// With its own argument the bench is the second process.
const SECOND: &str = "second=";

/// The ranks of this process, and what they move.
struct Ranks {
    devices: Vec<Device>,
    comm: Communicator,
    bare: Option<Bare>,
    world: usize,
    x: Vec<DeviceBuffer<f32>>,
    y: Vec<DeviceBuffer<f32>>,
}

type Lane = (kernels::axpy, Stream, DeviceBuffer<f32>, DeviceBuffer<f32>);

impl Ranks {
    async fn new(id: UniqueId, bare: Option<Id>, world: usize, ranks: &[(usize, Device)]) -> Ranks {
        let mut builder = Communicator::builder(id, world);
        for (rank, device) in ranks {
            builder = builder.rank(*rank, device);
        }
        let comm = builder.connect().await.expect("a communicator");
        let bare = bare.and_then(|id| Bare::new(id, world, ranks));
        let devices: Vec<_> = ranks.iter().map(|(_, device)| device.clone()).collect();
        let len = sizes().last().expect("a size") / 4;
        let make = |device: &Device| device.ones::<f32>(len).queued().expect("memory");
        let (x, y) = (devices.iter().map(make).collect(), devices.iter().map(make).collect());
        Ranks { devices, comm, bare, world, x, y }
    }

    /// Puts a collective of so many bytes on the streams.
    fn ours(&mut self, op: &str, bytes: usize) -> Op<()> {
        let (len, world) = (bytes / 4, self.world);
        let mut memory: Vec<_> = (self.x.iter().zip(&mut self.y))
            .map(|(x, y)| {
                let shared = if op == "all_gather" { len / world } else { len };
                (x.slice(..shared).expect("x"), y.slice_mut(..shared_y(op, len, world)).expect("y"))
            })
            .collect();
        if let [(x, y)] = &mut *memory {
            return match op {
                "all_reduce" => self.comm.all_reduce(x, y, Reduction::Sum),
                "all_gather" => self.comm.all_gather(x, y),
                _ => self.comm.broadcast(x, y, 0),
            };
        }
        self.comm.group(|group| {
            for (rank, (x, y)) in memory.iter_mut().enumerate() {
                let calls = group.rank(rank)?;
                match op {
                    "all_reduce" => calls.all_reduce(&*x, y, Reduction::Sum)?,
                    "all_gather" => calls.all_gather(&*x, y)?,
                    _ => calls.broadcast(&*x, y, 0)?,
                }
            }
            Ok(())
        })
    }

    fn bare(&self, op: &str, bytes: usize) {
        let Some(bare) = &self.bare else { return };
        let (len, world) = (bytes / 4, self.world);
        bare.start();
        for (at, (x, y)) in self.x.iter().zip(&self.y).enumerate() {
            let (x, y) = (x.device_ptr(), y.device_ptr());
            match op {
                "all_reduce" => bare.all_reduce(at, x, y, len),
                "all_gather" => bare.all_gather(at, x, y, len / world),
                _ => bare.broadcast(at, x, y, len),
            }
        }
        bare.end();
    }

    fn synchronize(&self) {
        if let Some(bare) = &self.bare {
            bare.synchronize();
        }
    }

    /// One process and another one go through the same.
    async fn measure(&mut self, prefix: &str, prints: bool) {
        let print = |name: &str, value: f64, unit: &str| {
            if prints {
                print(name, value, unit);
            }
        };
        for op in OPS {
            for bytes in sizes() {
                let (rounds, burst) = effort(bytes);
                let (mut ours, mut bare) = (Vec::new(), Vec::new());
                let (mut ours_bus, mut bare_bus) = (Vec::new(), Vec::new());
                for round in 0..rounds {
                    for _ in 0..burst {
                        let start = Instant::now();
                        self.ours(op, bytes).await.expect("it runs");
                        let ours_took = us(start.elapsed());
                        let start = Instant::now();
                        self.bare(op, bytes);
                        self.synchronize();
                        // The first round warms up.
                        if round > 0 || rounds == 1 {
                            ours.push(ours_took);
                            bare.push(us(start.elapsed()));
                        }
                    }
                    let start = Instant::now();
                    for _ in 1..burst {
                        self.ours(op, bytes).queued().expect("it runs");
                    }
                    self.ours(op, bytes).await.expect("it runs");
                    let ours_took = start.elapsed();
                    let start = Instant::now();
                    (0..burst).for_each(|_| self.bare(op, bytes));
                    self.synchronize();
                    if round > 0 || rounds == 1 {
                        ours_bus.push(self.bus(op, bytes * burst, ours_took));
                        bare_bus.push(self.bus(op, bytes * burst, start.elapsed()));
                    }
                }
                let name = format!("{prefix}{op}.{}", size_name(bytes));
                print(&format!("{name}.ours.us"), Sorted::new(ours).p50(), "us");
                print(&format!("{name}.bus.ours"), Sorted::new(ours_bus).p50(), "GB/s");
                if self.bare.is_some() {
                    print(&format!("{name}.bare.us"), Sorted::new(bare).p50(), "us");
                    print(&format!("{name}.bus.bare"), Sorted::new(bare_bus).p50(), "GB/s");
                }
            }
        }
    }

    /// Puts a group of all_reduces on the streams, each of so many bytes.
    fn grouped(&mut self, calls: usize, bytes: usize) -> Op<()> {
        let (ranks, len) = (self.comm.ranks(), bytes / 4);
        let mut memory: Vec<Vec<_>> = (self.x.iter().zip(&mut self.y))
            .map(|(x, y)| x.chunks(len).zip(y.chunks_mut(len)).take(calls).collect())
            .collect();
        self.comm.group(|group| {
            for (rank, memory) in ranks.into_iter().zip(&mut memory) {
                let rank = group.rank(rank)?;
                for (x, y) in memory {
                    rank.all_reduce(&*x, y, Reduction::Sum)?;
                }
            }
            Ok(())
        })
    }

    fn grouped_bare(&self, calls: usize, bytes: usize) {
        let Some(bare) = &self.bare else { return };
        bare.start();
        for (at, (x, y)) in self.x.iter().zip(&self.y).enumerate() {
            for offset in (0..calls).map(|call| (call * bytes) as u64) {
                let (x, y) = (x.device_ptr() + offset, y.device_ptr() + offset);
                bare.all_reduce(at, x, y, bytes / 4);
            }
        }
        bare.end();
    }

    /// Bursts that are one group.
    async fn groups(&mut self, prefix: &str, prints: bool) {
        for bytes in in_bursts() {
            let (rounds, calls) = effort(bytes);
            let (mut ours, mut bare) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                let start = Instant::now();
                self.grouped(calls, bytes).await.expect("it runs");
                let ours_took = start.elapsed();
                let start = Instant::now();
                self.grouped_bare(calls, bytes);
                self.synchronize();
                if round > 0 || rounds == 1 {
                    ours.push(self.bus("all_reduce", calls * bytes, ours_took));
                    bare.push(self.bus("all_reduce", calls * bytes, start.elapsed()));
                }
            }
            if prints {
                let name = format!("{prefix}all_reduce.{}.grouped", size_name(bytes));
                print(&format!("{name}.ours"), Sorted::new(ours).p50(), "GB/s");
                if self.bare.is_some() {
                    print(&format!("{name}.bare"), Sorted::new(bare).p50(), "GB/s");
                }
            }
        }
    }

    /// Bursts that are launched as a graph on each device.
    async fn graphs(&mut self, prefix: &str, prints: bool) {
        for bytes in in_bursts() {
            let ((rounds, burst), len) = (effort(bytes), bytes / 4);
            let mut graphs = Vec::new();
            for (rank, device) in self.comm.ranks().into_iter().zip(&self.devices) {
                let state = (self.comm.clone(), rank, burst);
                let graph = device.graph::<(In<f32>, Out<f32>), _, _>(
                    state,
                    |q, (comm, rank, burst), (x, mut y)| {
                        let calls = comm.in_graph_of(q, *rank)?;
                        (0..*burst).try_for_each(|_| calls.all_reduce(&x, &mut y, Reduction::Sum))
                    },
                );
                graphs.push((graph, device.stream().expect("a stream")));
            }
            let mut times = Vec::new();
            for round in 0..rounds {
                let start = Instant::now();
                let memory = self.x.iter().zip(&mut self.y);
                let launches: Vec<_> = (graphs.iter().zip(memory))
                    .map(|((graph, stream), (x, y))| {
                        let x = x.slice(..len).expect("x");
                        let mut y = y.slice_mut(..len).expect("y");
                        graph.launch(stream, (&x, &mut y))
                    })
                    .collect();
                gpu_await::join_all(launches).await.expect("it runs");
                if round > 0 || rounds == 1 {
                    times.push(self.bus("all_reduce", bytes * burst, start.elapsed()));
                }
            }
            if prints {
                let name = format!("{prefix}all_reduce.{}.bus.graph", size_name(bytes));
                print(&name, Sorted::new(times).p50(), "GB/s");
            }
        }
    }

    /// As `nccl-tests` counts: what each link carries.
    fn bus(&self, op: &str, bytes: usize, took: Duration) -> f64 {
        let ranks = self.world as f64;
        let factor = match op {
            "all_reduce" => 2.0 * (ranks - 1.0) / ranks,
            "all_gather" => (ranks - 1.0) / ranks,
            _ => 1.0,
        };
        bytes as f64 * factor / took.as_secs_f64() / 1e9
    }

    /// For each device a kernel, a stream, and two arrays there.
    async fn lanes(&self, len: usize) -> Vec<Lane> {
        let mut lanes = Vec::new();
        for device in &self.devices {
            let axpy = kernels::axpy::load(device).await.expect("a kernel");
            let stream = device.stream().expect("a stream");
            let ones = || stream.ones::<f32>(len).queued().expect("memory");
            let (x, y) = (ones(), ones());
            lanes.push((axpy, stream, x, y));
        }
        lanes
    }

    /// Kernels on streams of their own, beside a collective.
    async fn overlap(&mut self) {
        let bytes = *sizes().last().expect("a size") / if is_smoke() { 1 } else { 4 };
        let (len, launches) = (bytes / 4, if is_smoke() { 1 } else { 20 });
        let mut lanes = self.lanes(len).await;
        let (mut kernels, mut collective, mut both) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..measure::rounds(20, 1) {
            for (what, times) in [(1, &mut kernels), (2, &mut collective), (3, &mut both)] {
                let start = Instant::now();
                let mut ops = Vec::new();
                if what & 2 != 0 {
                    ops.push(self.ours("all_reduce", bytes));
                }
                for (axpy, stream, x, y) in &mut lanes {
                    if what & 1 != 0 {
                        (0..launches)
                            .for_each(|_| axpy.launch(stream, 0.5, &*x, &mut *y).abandon());
                    }
                    ops.push(stream.done());
                }
                gpu_await::join_all(ops).await.expect("it runs");
                times.push(measure::ms(start.elapsed()));
            }
        }
        let p50 = |times| Sorted::new(times).p50();
        let (kernels, collective, both) = (p50(kernels), p50(collective), p50(both));
        print("overlap.kernels.ms", kernels, "ms");
        print("overlap.all_reduce.ms", collective, "ms");
        print("overlap.both.ms", both, "ms");
        print("overlap.both.of_sum", both / (kernels + collective), "ratio");
    }

    /// Kernel, all_reduce, kernel.
    async fn step(&mut self) {
        let len = if is_smoke() { 1 << 10 } else { 1 << 20 };
        let mut lanes = self.lanes(len).await;
        let (mut once, mut thrice) = (Vec::new(), Vec::new());
        for _ in 0..measure::rounds(500, 2) {
            for (is_once, times) in [(true, &mut once), (false, &mut thrice)] {
                let start = Instant::now();
                let mut ops: Vec<Op<()>> = Vec::new();
                for (axpy, stream, x, y) in &mut lanes {
                    ops.push(axpy.launch(stream, 0.001, &*x, &mut *y));
                }
                if !is_once {
                    gpu_await::join_all(ops).await.expect("it runs");
                }
                let reduced = self.comm.group(|group| {
                    for (rank, (_, _, _, y)) in lanes.iter_mut().enumerate() {
                        group.rank(rank)?.all_reduce_in_place(y, Reduction::Average)?;
                    }
                    Ok(())
                });
                if is_once {
                    reduced.queued().expect("it runs");
                } else {
                    reduced.await.expect("it runs");
                }
                let mut ops: Vec<Op<()>> = Vec::new();
                for (axpy, stream, x, y) in &mut lanes {
                    ops.push(axpy.launch(stream, 0.001, &*y, &mut *x));
                }
                gpu_await::join_all(ops).await.expect("it runs");
                times.push(us(start.elapsed()));
            }
        }
        let (once, thrice) = (Sorted::new(once).p50(), Sorted::new(thrice).p50());
        print("step.awaited_once.us", once, "us");
        print("step.awaited_thrice.us", thrice, "us");
    }
}

fn shared_y(op: &str, len: usize, world: usize) -> usize {
    if op == "all_gather" { len / world * world } else { len }
}

/// In bytes, from 8 B to 1 GiB.
fn sizes() -> Vec<usize> {
    let all =
        [8, 128, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30];
    let smoke = if on_cuda() { 5 } else { 3 };
    if is_smoke() { all[..smoke].to_vec() } else { all.to_vec() }
}

/// In bytes, where it counts how calls are made.
fn in_bursts() -> impl Iterator<Item = usize> {
    sizes().into_iter().filter(|bytes| is_smoke() || (16 << 10..=8 << 20).contains(bytes))
}

/// Rounds, and calls in each.
fn effort(bytes: usize) -> (usize, usize) {
    match bytes {
        _ if is_smoke() => (1, 2),
        0..=1_048_576 => (21, 20),
        1_048_577..=67_108_864 => (11, 10),
        _ => (6, 4),
    }
}

fn size_name(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes}B"),
        1024..1_048_576 => format!("{}KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{}MiB", bytes >> 20),
        _ => format!("{}GiB", bytes >> 30),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; 128] {
    let mut bytes = [0; 128];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal");
    }
    bytes
}

fn ids() -> (UniqueId, Id) {
    (UniqueId::new(DeviceKind::Cuda).expect("an id"), bare::unique_id())
}

/// A process a GPU: the second one is this program again.
async fn two_processes() {
    let (ours, bare) = ids();
    let ids = format!("{SECOND}{}{}", hex(&ours.to_bytes()), hex(&bare.0));
    let mut second = Command::new(std::env::current_exe().expect("a path"));
    second.arg(ids).args(std::env::args().skip(1)).stdout(Stdio::null());
    let mut second = second.spawn().expect("a process");
    let mut ranks = Ranks::new(ours, Some(bare), 2, &[(0, Device::cuda(0).expect("a GPU"))]).await;
    ranks.measure("two_processes.", true).await;
    ranks.groups("two_processes.", true).await;
    ranks.graphs("two_processes.", true).await;
    drop(ranks);
    assert!(second.wait().expect("its end").success());
}

async fn second(ids: &str) {
    let (ours, bare) = ids.split_at(256);
    let ranks = [(1, Device::cuda(1).expect("a GPU"))];
    let ours = UniqueId::from_bytes(unhex(ours));
    let mut ranks = Ranks::new(ours, Some(Id(unhex(bare))), 2, &ranks).await;
    ranks.measure("", false).await;
    ranks.groups("", false).await;
    ranks.graphs("", false).await;
}

async fn run() {
    if let Some(ids) = std::env::args().find_map(|arg| arg.strip_prefix(SECOND).map(str::to_owned))
    {
        return second(&ids).await;
    }
    if on_cuda() && gpu_await_nccl::nccl_version().is_err() {
        // Under a stand-in for the driver.
        return eprintln!("# no NCCL: nothing is measured");
    }
    let devices: Vec<Device> = match on_cuda() {
        true => (0..Device::count().min(8)).map(|at| Device::cuda(at).expect("a GPU")).collect(),
        false => vec![Device::host(), Device::host()],
    };
    let (id, bare) = match on_cuda() {
        true => ids(),
        false => (UniqueId::new(DeviceKind::Host).expect("an id"), Id([0; 128])),
    };
    eprintln!("# {} devices, NCCL {:?}", devices.len(), gpu_await_nccl::nccl_version().ok());
    let world = devices.len();
    let ranks: Vec<_> = devices.into_iter().enumerate().collect();
    let mut ranks = Ranks::new(id, on_cuda().then_some(bare), world, &ranks).await;
    ranks.measure("", true).await;
    ranks.groups("", true).await;
    ranks.graphs("", true).await;
    ranks.overlap().await;
    ranks.step().await;
    drop(ranks);
    if on_cuda() && world >= 2 && !argument("one_process") {
        two_processes().await;
    }
}

fn main() {
    measure::current_thread().block_on(run());
}
