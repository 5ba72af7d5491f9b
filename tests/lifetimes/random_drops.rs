//! Ten thousand drops in any order, of whatever is in the middle of anything: both pools end where
//! they began.
//!
//! The seed is fixed; what is complete at a drop is the device's business.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Completion, Device, DeviceBuffer, Event, Frozen, Op, PinnedBuffer, Stream, kernels,
};

use crate::under_test::modes;
use crate::under_test::random::Random;

const LEN: usize = 5000;
const LIVE: usize = 120;

/// Something that can be dropped.
enum Thing {
    Buffer(DeviceBuffer<f32>),
    Frozen(Frozen<f32>),
    Pinned(#[expect(dead_code, reason = "only dropped")] PinnedBuffer<f32>),
    Future(Pin<Box<dyn Future<Output = ()>>>),
    Stream(Stream),
    Event(#[expect(dead_code, reason = "only dropped")] Event),
    Gate(#[expect(dead_code, reason = "opens when it is dropped")] Gate),
}

struct Chaos {
    device: Device,
    other: Device,
    peer: Stream,
    axpy: kernels::axpy,
    random: Random,
    things: Vec<Thing>,
    drops: usize,
}

impl Chaos {
    fn new(mode: Completion, seed: u64) -> Self {
        let device = testing::device_with(mode);
        let other = testing::peer_device();
        let peer = other.stream().unwrap();
        let axpy = futures::executor::block_on(kernels::axpy::load(&device)).unwrap();
        let things = vec![Thing::Stream(device.stream().unwrap())];
        Chaos { device, other, peer, axpy, random: Random(seed), things, drops: 0 }
    }

    fn stream(&mut self) -> Stream {
        let is_stream = |thing: &Thing| match thing {
            Thing::Stream(stream) => Some(stream.clone()),
            _ => None,
        };
        let streams: Vec<_> = self.things.iter().filter_map(is_stream).collect();
        match streams.len() {
            0 => self.device.default_stream().clone(),
            count => streams[self.random.below(count)].clone(),
        }
    }

    /// The place of some buffer.
    fn buffer(&mut self) -> Option<usize> {
        let is_buffer = |index: &usize| matches!(self.things[*index], Thing::Buffer(_));
        let buffers: Vec<_> = (0..self.things.len()).filter(is_buffer).collect();
        (!buffers.is_empty()).then(|| buffers[self.random.below(buffers.len())])
    }

    fn make(&mut self) {
        let stream = self.stream();
        let kind = self.random.below(20);
        let made = match kind {
            0 => buffer(stream.zeros(LEN)),
            1 => buffer(stream.upload(vec![1.0; LEN])),
            2 => buffer(stream.full(1 + self.random.below(LEN), 2.0)),
            3 if self.count(|thing| matches!(thing, Thing::Stream(_))) < 8 => {
                Thing::Stream(self.device.stream().unwrap())
            }
            4 => Thing::Pinned(stream.pinned(1 + self.random.below(LEN)).unwrap()),
            5 => Thing::Event(stream.record().unwrap()),
            6 => future(stream.host_fn(|| vec![0u8; 100])),
            7 => future(stream.done()),
            // Short: nobody waits for it but what is behind it.
            8 if self.count(|thing| matches!(thing, Thing::Gate(_))) == 0 => {
                Thing::Gate(Gate::close_for(&stream, Duration::from_millis(3)).unwrap())
            }
            9 => {
                let stream = stream.clone();
                Thing::Future(Box::pin(async move {
                    let x = stream.upload_staged(vec![3.0f32; LEN]).await.unwrap();
                    drop(stream.download_staged(&x).await.unwrap());
                }))
            }
            10 => match self.buffer() {
                Some(at) => self.through_peer(&stream, at),
                None => return,
            },
            18 => match self.buffer() {
                Some(at) => self.freeze(at),
                None => return,
            },
            19 => match self.frozen() {
                Some(frozen) => self.read(&stream, &frozen),
                None => return,
            },
            _ => match self.buffer() {
                Some(at) => self.work_on(kind, &stream, at),
                None => return,
            },
        };
        self.things.push(made);
    }

    fn count(&self, is: impl Fn(&Thing) -> bool) -> usize {
        self.things.iter().filter(|thing| is(thing)).count()
    }

    fn work_on(&mut self, kind: usize, stream: &Stream, at: usize) -> Thing {
        let axpy = self.axpy.clone();
        let half = self.random.below(2) == 0;
        let Thing::Buffer(x) = &mut self.things[at] else { unreachable!("a buffer's place") };
        let len = x.len();
        match kind {
            11 => future(stream.download(x)),
            12 => future(stream.download_vec(&x.slice(..len / 2).unwrap())),
            13 => future(stream.fill(&mut x.slice_mut(len / 2..).unwrap(), 5.0)),
            14 => {
                let (mut left, right) = x.split_at_mut(len / 2).unwrap();
                let right = right.cast::<u32>().unwrap().cast::<f32>().unwrap();
                let mut right = right;
                let len = if half { left.len() } else { 0 };
                let mut left = left.slice_mut(..len).unwrap();
                future(stream.copy(&right.slice_mut(..len).unwrap(), &mut left))
            }
            15 => {
                let mut y = stream.zeros::<f32>(len).queued().unwrap();
                axpy.launch(stream, 2.0, &*x, &mut y).queued().unwrap();
                Thing::Buffer(y)
            }
            16 => {
                let pinned = stream.pinned::<f32>(len).unwrap();
                future(stream.upload_into(pinned, x).and(stream.done()))
            }
            _ => future(stream.batch(|queue| Ok((queue.download(x)?, queue.host_fn(|| ())?)))),
        }
    }

    /// A buffer of the other device, and back.
    fn through_peer(&mut self, stream: &Stream, at: usize) -> Thing {
        let Thing::Buffer(x) = &mut self.things[at] else { unreachable!("a buffer's place") };
        let mut there = self.peer.empty::<f32>(x.len()).queued().unwrap();
        self.peer.copy(x, &mut there).queued().unwrap();
        future(stream.copy(&there, x))
    }

    /// Sometimes nobody awaits it.
    fn freeze(&mut self, at: usize) -> Thing {
        let Thing::Buffer(x) = self.things.swap_remove(at) else {
            unreachable!("a buffer's place")
        };
        let frozen = x.freeze();
        match self.random.below(4) {
            0 => future(frozen),
            _ => Thing::Frozen(futures::executor::block_on(frozen).unwrap()),
        }
    }

    fn frozen(&mut self) -> Option<Frozen<f32>> {
        let mut things = self.things.iter();
        things.find_map(|thing| match thing {
            Thing::Frozen(frozen) => Some(frozen.clone()),
            _ => None,
        })
    }

    /// A read on a stream of its own or on another one, on either device.
    fn read(&mut self, stream: &Stream, frozen: &Frozen<f32>) -> Thing {
        let peer = self.peer.clone();
        let own = self.device.stream().unwrap();
        let stream = [stream, &own, &peer][self.random.below(3)];
        let mut y = stream.zeros::<f32>(frozen.len()).queued().unwrap();
        stream.copy(frozen, &mut y).queued().unwrap();
        match stream == &peer {
            true => future(peer.download(&y)),
            false => Thing::Buffer(y),
        }
    }

    fn drop_one(&mut self) {
        let at = self.random.below(self.things.len());
        let thing = self.things.swap_remove(at);
        if let Thing::Future(mut future) = thing {
            for _ in 0..self.random.below(4) {
                let mut cx = Context::from_waker(Waker::noop());
                if future.as_mut().poll(&mut cx).is_ready() {
                    break;
                }
            }
        }
        self.drops += 1;
    }

    fn run(&mut self, drops: usize) {
        while self.drops < drops {
            if self.things.len() < LIVE && self.random.below(LIVE) > self.things.len() / 2 {
                self.make();
            } else if !self.things.is_empty() {
                self.drop_one();
            }
        }
        while !self.things.is_empty() {
            self.drop_one();
        }
    }
}

fn future<T: 'static>(op: Op<T>) -> Thing {
    Thing::Future(Box::pin(async {
        drop(op.await.unwrap());
    }))
}

fn buffer(op: Op<DeviceBuffer<f32>>) -> Thing {
    Thing::Buffer(op.queued().unwrap())
}

/// What both pools have in use. The peer may be over the same GPU: its streams then keep memory of
/// the same pool for themselves, until they are told to give it back.
fn in_use(device: &Device, peer: &Device) -> [u64; 5] {
    // A driver does the books of its pool when it is asked to.
    device.synchronize().unwrap();
    for device in [peer, device] {
        futures::executor::block_on(device.trim(0)).unwrap();
    }
    let stats = device.stats();
    let used = device.memory().unwrap().used_bytes;
    [used, stats.allocations, stats.lent_bytes, stats.pending_bytes, stats.pinned_used_bytes]
}

fn drops(mode: Completion, seed: u64, count: usize) {
    let mut chaos = Chaos::new(mode, seed);
    let device = chaos.device.clone();
    let before = in_use(&device, &chaos.other);
    chaos.run(count);
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let after = in_use(&device, &chaos.other);
        if after == before {
            return;
        }
        let held = "device memory, allocations, lent, retired, pinned";
        let peer = chaos.other.stats();
        assert!(
            Instant::now() < end,
            "{mode:?}, {held}: {before:?} before, {after:?} now; peer: {peer:?}"
        );
        // A stream frees what was left to it when something is submitted, or the poller does.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn ten_thousand_drops_in_any_order_leave_both_pools_where_they_began() {
    drops(Completion::Adaptive, 0x9E37_79B9_7F4A_7C15, 10_000);
}

#[test]
fn drops_in_any_order_leave_the_pools_alone_in_every_mode() {
    for (seed, mode) in modes::ALL.into_iter().enumerate() {
        drops(mode, 77 + seed as u64, 1_500);
    }
}
