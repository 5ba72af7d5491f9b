//! How fast do many pieces move between a host slab and a device slab, and what does naming a thousand blocks cost?
//!
//! Pieces of 4 KiB, 64 KiB and 1 MiB, at places in no order, each way, with four operations of as many pieces in flight:
//!
//! | line | the pieces are moved by |
//! |---|---|
//! | `kernel` | `copy_many` with the kernel |
//! | `engines` | `copy_many` with the copy engines |
//! | `auto` | `copy_many` with its own choice |
//! | `single` | a copy each |
//! | `raw` | the bare driver, a call each, between memory of its own |
//!
//! `awaited` is one `copy_many` of 1,024 pieces of 4 KiB, from the call until its future is ready. `submit` is the call alone. `naming` is what a launch
//! costs more that names 1,000 blocks of 100,000 than one that names none, `naming_2` the same by two streams in turn.
//! Prints `name value unit`, medians.

#[path = "measure.rs"]
mod measure;
#[path = "raw/copies.rs"]
mod raw;

use std::collections::VecDeque;
use std::time::Instant;

use gpu_await::{
    CopyBy, Device, DeviceKind, DeviceSlab, HostSlab, LaunchConfig, Op, Stream, kernel,
};
use measure::{Sorted, print, rounds, us};
use raw::Copies;

kernel! {
    /// Touches nothing.
    unsafe fn touch(slab: &mut [u8]);
    launch = LaunchConfig::new(1, 1);
    ptx = ".version 8.0\n.target sm_60\n.address_size 64\n.visible .entry touch(.param .u64 a) { ret; }\n";
    host = |_: &gpu_await::Grid, _: &mut [u8]| ();
}

const IN_FLIGHT: usize = 4;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let device = measure::device();
    let raw = (device.kind() == DeviceKind::Cuda).then(|| Copies::new(1));
    for (size, block) in [("4k", 4 << 10), ("64k", 64 << 10), ("1m", 1 << 20)] {
        let pieces = if measure::is_smoke() { 8 } else { 1024.min((256 << 20) / block) };
        Way::new(&device, block, pieces).await.run(size, raw.as_ref()).await;
    }
    awaited(&device).await;
    naming(&device).await;
}

/// Slabs of so many blocks, and an order of them.
struct Way {
    stream: Stream,
    slab: DeviceSlab<u8>,
    host: HostSlab<u8>,
    from: Vec<u32>,
    to: Vec<u32>,
}

impl Way {
    async fn new(device: &Device, block: usize, pieces: usize) -> Way {
        let stream = device.stream().unwrap();
        let slab = stream.slab::<u8>(pieces, block).await.unwrap();
        let host = device.host_slab::<u8>(pieces, block).await.unwrap();
        // Each number once: 7 and 5 divide no number of blocks here.
        let order = |factor| (0..pieces).map(|at| (at * factor % pieces) as u32).collect();
        Way { stream, slab, host, from: order(7), to: order(5) }
    }

    fn up(&mut self, by: CopyBy) -> Op<()> {
        let from = self.host.blocks(&self.from).unwrap();
        let pieces = from.into_iter().zip(self.slab.blocks_mut(&self.to).unwrap()).collect();
        self.stream.copy_many(pieces, by)
    }

    fn down(&mut self, by: CopyBy) -> Op<()> {
        let from = self.slab.blocks(&self.from).unwrap();
        let pieces = from.into_iter().zip(self.host.blocks_mut(&self.to).unwrap()).collect();
        self.stream.copy_many(pieces, by)
    }

    /// The last one's future.
    fn single(&mut self, up: bool) -> Op<()> {
        let mut last = self.stream.done();
        for (from, to) in self.from.iter().zip(&self.to) {
            last = match up {
                true => {
                    let mut to = self.slab.block_mut(*to).unwrap();
                    self.stream.copy(&self.host.block(*from).unwrap(), &mut to)
                }
                false => {
                    let mut to = self.host.block_mut(*to).unwrap();
                    self.stream.copy(&self.slab.block(*from).unwrap(), &mut to)
                }
            };
        }
        last
    }

    async fn run(&mut self, size: &str, raw: Option<&Copies>) {
        for (way, up) in [("up", true), ("down", false)] {
            let name = |what: &str| format!("blocks.{way}_{size}.{what}_gb_s");
            for (what, by) in [
                ("kernel", CopyBy::Kernel),
                ("engines", CopyBy::CopyEngine),
                ("auto", CopyBy::Auto),
            ] {
                let copy = |all: &mut Way| if up { all.up(by) } else { all.down(by) };
                let speed = self.in_flight(copy).await;
                print(&name(what), speed, "GB/s");
            }
            let speed = self.in_flight(|all| all.single(up)).await;
            print(&name("single"), speed, "GB/s");
            if let Some(raw) = raw {
                print(&name("raw"), self.raw(raw, up), "GB/s");
            }
        }
    }

    fn bytes(&self) -> f64 {
        (self.from.len() * self.slab.block_len()) as f64
    }

    /// Gigabytes a second.
    async fn in_flight(&mut self, copy: impl Fn(&mut Way) -> Op<()>) -> f64 {
        copy(self).await.unwrap();
        let copies = rounds(40, 5);
        let mut found = Vec::new();
        for _ in 0..rounds(5, 1) {
            let (start, mut pending) = (Instant::now(), VecDeque::<Op<()>>::new());
            for _ in 0..copies {
                if pending.len() == IN_FLIGHT
                    && let Some(op) = pending.pop_front()
                {
                    op.await.unwrap();
                }
                pending.push_back(copy(self));
            }
            for op in pending {
                op.await.unwrap();
            }
            found.push(self.bytes() * copies as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        Sorted::new(found).p50()
    }

    fn raw(&self, raw: &Copies, up: bool) -> f64 {
        let (block, pieces) = (self.slab.block_len(), self.from.len());
        let (host, there) = (raw.pinned(block * pieces), raw.device(block * pieces));
        let mut found = Vec::new();
        for _ in 0..rounds(5, 1) {
            let (start, copies) = (Instant::now(), rounds(40, 5));
            for _ in 0..copies {
                for (from, to) in self.from.iter().zip(&self.to) {
                    let [from, to] = [*from, *to].map(|number| number as usize * block);
                    match up {
                        true => {
                            let to = raw::Device(there.0 + to as u64);
                            raw.upload(0, to, host.at(from), block);
                        }
                        false => {
                            let from = raw::Device(there.0 + from as u64);
                            raw.download(0, host.at(to), from, block);
                        }
                    }
                }
            }
            raw.synchronize(0);
            found.push(self.bytes() * copies as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        raw.free(there);
        Sorted::new(found).p50()
    }
}

async fn awaited(device: &Device) {
    let mut way = Way::new(device, 4 << 10, if measure::is_smoke() { 8 } else { 1024 }).await;
    for (what, by) in [("auto", CopyBy::Auto), ("engines", CopyBy::CopyEngine)] {
        let (mut ready, mut submit) = (Vec::new(), Vec::new());
        for _ in 0..rounds(200, 3) {
            let start = Instant::now();
            let op = way.up(by);
            submit.push(us(start.elapsed()));
            op.await.unwrap();
            ready.push(us(start.elapsed()));
        }
        print(&format!("blocks.1024x4k.{what}_awaited_us"), Sorted::new(ready).p50(), "us");
        print(&format!("blocks.1024x4k.{what}_submit_us"), Sorted::new(submit).p50(), "us");
    }
}

async fn naming(device: &Device) {
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let touch = touch::load(device).await.unwrap();
    let mut slab = streams[0].slab::<u8>(100_000, 16).await.unwrap();
    let named: Vec<u32> = (0..1000).map(|at| at * 97 % 100_000).collect();
    for (name, count) in [("naming", 1), ("naming_2", 2)] {
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..rounds(2000, 20) {
            let stream = &streams[round % count];
            for (blocks, times) in [&named[..], &[]].into_iter().zip(&mut times) {
                let start = Instant::now();
                touch.launch(stream, &mut slab.naming_mut(blocks).unwrap()).queued().unwrap();
                times.push(us(start.elapsed()));
            }
            if round % 100 == 99 {
                device.done().await.unwrap();
            }
        }
        let [named, none] = times.map(|times| Sorted::new(times).p50());
        print(&format!("blocks.{name}_1000_us"), named - none, "us");
    }
}
