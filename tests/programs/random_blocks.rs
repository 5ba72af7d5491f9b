//! Random programs on slabs against a sequential model: copies of many pieces, launches that name blocks, tables, replayed batches, blocks in the
//! host's hands, and futures that are dropped, on three streams some of which are held up.

use std::cell::Cell;
use std::task::{Context, Poll, Waker};

use futures::executor::block_on;
use gpu_await::testing::{self, Gate, Stepper};
use gpu_await::{
    BlockSlicesMut, BlockTableMut, CopyBy, Device, DeviceSlab, Grid, HostSlab, LaunchConfig, Op,
    Queue, Region, Result, Stream, kernel,
};
use proptest::prelude::*;

use crate::under_test::cases::config;

const BLOCKS: u32 = 9;
const LEN: usize = 8;
const STREAMS: usize = 3;

kernel! {
    /// Adds `by` and the other blocks' elements to the first `written` of the blocks that the indices are of; an index that is too large touches
    /// nothing.
    unsafe fn add_named(slab: &mut [u32], blocks: &[u32], count: u32 = blocks.len(), n: u32 = slab.len(), written: u32, by: u32);
    launch = LaunchConfig::new(1, 64);
    cuda = "extern \"C\" __global__ void add_named(unsigned* slab, const unsigned* blocks, unsigned count, unsigned n, unsigned written, unsigned by) {
        for (unsigned i = threadIdx.x; i < written * 8; i += blockDim.x) {
            unsigned sum = by;
            for (unsigned read = written; read < count; ++read) {
                unsigned long long at = blocks[read] * 8ull + i % 8;
                if (at < n) sum += slab[at];
            }
            unsigned long long at = blocks[i / 8] * 8ull + i % 8;
            if (at < n) slab[at] += sum;
        }
    }";
    host = add_named_twin;
}

fn add_named_twin(
    _: &Grid,
    slab: &mut [u32],
    blocks: &[u32],
    _: u32,
    _: u32,
    written: u32,
    by: u32,
) {
    let mut all: Vec<_> = slab.chunks_exact_mut(LEN).collect();
    add_blocks(&mut all, blocks, written as usize, by);
}

fn add_blocks(slab: &mut [impl AsMut<[u32]>], blocks: &[u32], written: usize, by: u32) {
    let (written, read) = blocks.split_at(written);
    let mut sums = [by; LEN];
    let mut each = |block: &u32, step: &mut dyn FnMut(&mut u32, &mut u32)| {
        let block = slab.get_mut(*block as usize).into_iter().flat_map(AsMut::as_mut);
        block.zip(&mut sums).for_each(|(x, sum)| step(x, sum));
    };
    read.iter().for_each(|block| each(block, &mut |x, sum| *sum = sum.wrapping_add(*x)));
    written.iter().for_each(|block| each(block, &mut |x, sum| *x = x.wrapping_add(*sum)));
}

kernel! {
    /// Adds `by` to the blocks of a table.
    unsafe fn add_table(blocks: &mut [&mut [u32]], count: u32 = blocks.blocks(), n: u32 = blocks.block_len(), by: u32);
    launch = LaunchConfig::new(1, 64);
    cuda = "extern \"C\" __global__ void add_table(unsigned* const* blocks, unsigned count, unsigned n, unsigned by) {
        for (unsigned i = threadIdx.x; i < count * n; i += blockDim.x) blocks[i / n][i % n] += by;
    }";
    host = add_table_twin;
}

fn add_table_twin(_: &Grid, mut blocks: BlockSlicesMut<'_, u32>, _: u32, _: u32, by: u32) {
    for number in 0..blocks.len() {
        let block = blocks.get_mut(number).expect("there is one");
        block.iter_mut().for_each(|x| *x = x.wrapping_add(by));
    }
}

/// What becomes of a future.
#[derive(Clone, Copy, Debug)]
enum End {
    Queued,
    Dropped,
    Awaited,
}

#[derive(Clone, Debug)]
enum Work {
    Up(Vec<(u32, u32)>, CopyBy),
    Down(Vec<(u32, u32)>, CopyBy),
    /// Within the device's slab: the first half of these blocks to the second.
    Across(Vec<u32>, CopyBy),
    /// The first so many are written, the others read.
    Named(Vec<u32>, usize, u32),
    Fill(u32, u32),
    FillPart(u32, usize, u32),
}

#[derive(Clone, Debug)]
enum Step {
    Work(Work, usize, End),
    Replay(Vec<Work>, usize, End),
    /// Blocks of both tiers.
    Table(Vec<u32>, Vec<u32>, u32, usize, End),
    FillHost(u32, u32, usize, End),
    HostWrites(u32, u32),
    HostReads(u32),
    HostTries(u32),
    Download(u32, usize),
    /// The stream does nothing until the host waits for something.
    Hold(usize),
    /// Another slab in the place of the device's, which goes with whatever uses it.
    Renew(usize),
}

fn distinct(most: usize) -> impl Strategy<Value = Vec<u32>> {
    Just((0..BLOCKS).collect::<Vec<_>>())
        .prop_shuffle()
        .prop_flat_map(move |all| (0..=most).prop_map(move |len| all[..len].to_vec()))
}

fn work() -> impl Strategy<Value = Work> {
    let by = prop_oneof![Just(CopyBy::Auto), Just(CopyBy::CopyEngine), Just(CopyBy::Kernel)];
    let pairs = || {
        (distinct(6), prop::collection::vec(0..BLOCKS, 6))
            .prop_map(|(to, from)| from.into_iter().zip(to).collect::<Vec<_>>())
    };
    prop_oneof![
        2 => (pairs(), by.clone()).prop_map(|(pairs, by)| Work::Up(pairs, by)),
        2 => (pairs(), by.clone()).prop_map(|(pairs, by)| Work::Down(pairs, by)),
        1 => (distinct(8), by).prop_map(|(blocks, by)| Work::Across(blocks, by)),
        4 => (distinct(7), 0..8_usize, 1..9_u32)
            .prop_map(|(blocks, written, by)| Work::Named(blocks.clone(), written.min(blocks.len()), by)),
        1 => (0..BLOCKS, any::<u32>()).prop_map(|(block, value)| Work::Fill(block, value)),
        1 => (0..BLOCKS, 0..LEN, any::<u32>()).prop_map(|(block, from, value)| Work::FillPart(block, from, value)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let end = prop_oneof![3 => Just(End::Queued), 2 => Just(End::Dropped), 1 => Just(End::Awaited)];
    let on = 0..STREAMS;
    prop_oneof![
        8 => (work(), on.clone(), end.clone()).prop_map(|(work, on, end)| Step::Work(work, on, end)),
        2 => (prop::collection::vec(work(), 0..4), on.clone(), end.clone())
            .prop_map(|(works, on, end)| Step::Replay(works, on, end)),
        2 => (distinct(4), distinct(4), 1..9_u32, on.clone(), end.clone())
            .prop_map(|(device, host, by, on, end)| Step::Table(device, host, by, on, end)),
        1 => (0..BLOCKS, any::<u32>(), on.clone(), end)
            .prop_map(|(block, value, on, end)| Step::FillHost(block, value, on, end)),
        1 => (0..BLOCKS, any::<u32>()).prop_map(|(block, value)| Step::HostWrites(block, value)),
        2 => (0..BLOCKS).prop_map(Step::HostReads),
        1 => (0..BLOCKS).prop_map(Step::HostTries),
        1 => (0..BLOCKS, on.clone()).prop_map(|(block, on)| Step::Download(block, on)),
        2 => on.clone().prop_map(Step::Hold),
        1 => on.prop_map(Step::Renew),
    ]
}

type Tier = Vec<[u32; LEN]>;

/// How the device gets on.
enum Pace {
    /// On threads of its own.
    Real,
    /// By commands that these numbers choose, over and over.
    Stepped(Stepper, Vec<usize>, Cell<usize>),
}

struct World {
    pace: Pace,
    device: Device,
    streams: Vec<Stream>,
    regions: Vec<Region>,
    gates: Vec<Gate>,
    slab: DeviceSlab<u32>,
    host: HostSlab<u32>,
    add_named: add_named,
    add_table: add_table,
    model: (Tier, Tier),
}

impl World {
    fn new(device: &Device, pace: Pace) -> Result<World> {
        let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
        let zeros = || vec![[0; LEN]; BLOCKS as usize];
        Ok(World {
            pace,
            slab: streams[0].slab(BLOCKS as usize, LEN).queued()?,
            host: block_on(device.host_slab(BLOCKS as usize, LEN))?,
            regions: (0..STREAMS).map(|_| Region::new()).collect(),
            gates: Vec::new(),
            add_named: add_named::load_blocking(device)?,
            add_table: add_table::load_blocking(device)?,
            model: (zeros(), zeros()),
            device: device.clone(),
            streams,
        })
    }

    /// Awaits a future: everything may get on.
    fn wait<F: Future>(pace: &Pace, gates: &mut Vec<Gate>, future: F) -> F::Output {
        gates.clear();
        let Pace::Stepped(stepper, choices, at) = pace else { return block_on(future) };
        let mut future = std::pin::pin!(future);
        loop {
            let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(output) = polled {
                return output;
            }
            at.set(at.get() + 1);
            let _ = stepper.step(choices[at.get() % choices.len()]);
        }
    }

    fn end(&mut self, op: Op<()>, end: End) -> Result<()> {
        match end {
            End::Queued => op.queued(),
            End::Dropped => {
                drop(op);
                Ok(())
            }
            End::Awaited => Self::wait(&self.pace, &mut self.gates, op),
        }
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        match step {
            Step::Work(work, on, end) => {
                let stream = self.streams[*on].clone();
                let World { slab, host, add_named, .. } = self;
                let indices = uploaded(&stream, std::slice::from_ref(work))?;
                let op = stream.batch(|q| put(q, work, &indices[0], slab, host, add_named));
                self.predict(work);
                self.end(op, *end)?;
            }
            Step::Replay(works, on, end) => {
                let stream = self.streams[*on].clone();
                let World { slab, host, add_named, regions, .. } = self;
                let indices = uploaded(&stream, works)?;
                let op = stream.replay(&mut regions[*on], |q| {
                    let mut all = works.iter().zip(&indices);
                    all.try_for_each(|(work, indices)| put(q, work, indices, slab, host, add_named))
                });
                works.iter().for_each(|work| self.predict(work));
                self.end(op, *end)?;
            }
            Step::Table(device, host, by, on, end) => {
                let stream = self.streams[*on].clone();
                let mut blocks = self.slab.blocks_mut(device)?;
                blocks.extend(self.host.blocks_mut(host)?);
                let mut table = BlockTableMut::new(&stream, blocks)?;
                let op = self.add_table.launch(&stream, &mut table, *by);
                drop(table);
                let tiers = [(&mut self.model.0, device), (&mut self.model.1, host)];
                for (tier, blocks) in tiers {
                    blocks.iter().for_each(|at| {
                        tier[*at as usize].iter_mut().for_each(|x| *x = x.wrapping_add(*by))
                    });
                }
                self.end(op, *end)?;
            }
            Step::FillHost(block, value, on, end) => {
                let op = self.streams[*on].fill(&mut self.host.block_mut(*block)?, *value);
                self.model.1[*block as usize] = [*value; LEN];
                self.end(op, *end)?;
            }
            Step::HostWrites(block, value) => {
                let World { pace, gates, host, .. } = self;
                let found = Self::wait(pace, gates, host.host_mut(*block))?;
                assert_eq!(*found, self.model.1[*block as usize]);
                found.fill(*value);
                self.model.1[*block as usize] = [*value; LEN];
            }
            Step::HostReads(block) => {
                let World { pace, gates, host, .. } = self;
                let found = Self::wait(pace, gates, host.host(*block))?;
                assert_eq!(*found, self.model.1[*block as usize]);
            }
            // Whatever runs: what is lent is right.
            Step::HostTries(block) => {
                if let Some(found) = self.host.try_host(*block)? {
                    assert_eq!(*found, self.model.1[*block as usize]);
                }
                if let Some(found) = self.host.try_host_mut(*block)? {
                    assert_eq!(*found, self.model.1[*block as usize]);
                    found[0] = 77;
                    self.model.1[*block as usize][0] = 77;
                }
            }
            Step::Download(block, on) => {
                let op = self.streams[*on].download(&self.slab.block(*block)?);
                let found = Self::wait(&self.pace, &mut self.gates, op)?;
                assert_eq!(found, self.model.0[*block as usize]);
            }
            // A gate would hold up the thread that steps, which chooses anyway.
            Step::Hold(on) => match &self.pace {
                Pace::Real => self.gates.push(Gate::close(&self.streams[*on])?),
                Pace::Stepped(stepper, ..) => drop(stepper.step(*on)),
            },
            Step::Renew(on) => {
                self.slab = self.streams[*on].slab(BLOCKS as usize, LEN).queued()?;
                self.model.0 = vec![[0; LEN]; BLOCKS as usize];
            }
        }
        Ok(())
    }

    fn predict(&mut self, work: &Work) {
        let (device, host) = (&mut self.model.0, &mut self.model.1);
        match work {
            Work::Up(pairs, _) => {
                pairs.iter().for_each(|(from, to)| device[*to as usize] = host[*from as usize]);
            }
            Work::Down(pairs, _) => {
                pairs.iter().for_each(|(from, to)| host[*to as usize] = device[*from as usize]);
            }
            Work::Across(blocks, _) => {
                let (from, to) = blocks.split_at(blocks.len() / 2);
                from.iter()
                    .zip(to)
                    .for_each(|(from, to)| device[*to as usize] = device[*from as usize]);
            }
            Work::Named(blocks, written, by) => add_blocks(device, blocks, *written, *by),
            Work::Fill(block, value) => device[*block as usize] = [*value; LEN],
            Work::FillPart(block, from, value) => device[*block as usize][*from..].fill(*value),
        }
    }

    fn check(&mut self) -> Result<()> {
        for block in 0..BLOCKS {
            let World { pace, gates, host, .. } = self;
            let found = Self::wait(pace, gates, host.host(block))?;
            assert_eq!(*found, self.model.1[block as usize], "host {block}");
        }
        let all = self.streams[1].download(&self.slab);
        let all = Self::wait(&self.pace, &mut self.gates, all)?;
        for (block, (found, expected)) in all.chunks(LEN).zip(&self.model.0).enumerate() {
            assert_eq!(found, expected, "device {block}");
        }
        Self::wait(&self.pace, &mut self.gates, self.device.done())
    }
}

/// The indices of each, in front of a list.
fn uploaded(stream: &Stream, works: &[Work]) -> Result<Vec<gpu_await::DeviceBuffer<u32>>> {
    let indices = works.iter().map(|work| match work {
        Work::Named(blocks, ..) => stream.upload_from(blocks).queued(),
        _ => stream.zeros(0).queued(),
    });
    indices.collect()
}

fn put(
    q: &Queue<'_>,
    work: &Work,
    indices: &gpu_await::DeviceBuffer<u32>,
    slab: &mut DeviceSlab<u32>,
    host: &mut HostSlab<u32>,
    add: &add_named,
) -> Result<()> {
    let split = |pairs: &[(u32, u32)]| -> (Vec<u32>, Vec<u32>) { pairs.iter().copied().unzip() };
    match work {
        Work::Up(pairs, by) => {
            let (from, to) = split(pairs);
            let pieces = host.blocks(&from)?.into_iter().zip(slab.blocks_mut(&to)?);
            q.copy_many(pieces.collect(), *by)
        }
        Work::Down(pairs, by) => {
            let (from, to) = split(pairs);
            let pieces = slab.blocks(&from)?.into_iter().zip(host.blocks_mut(&to)?);
            q.copy_many(pieces.collect(), *by)
        }
        Work::Across(blocks, by) => {
            let mut all = slab.blocks_mut(blocks)?;
            let to = all.split_off(blocks.len() / 2);
            let pieces = all.iter().zip(to).map(|(from, to)| (from.view(), to));
            q.copy_many(pieces.collect(), *by)
        }
        Work::Named(blocks, written, by) => {
            let (write, read) = blocks.split_at(*written);
            let mut slab = slab.naming_mut(write)?.reading(read)?;
            add.launch(q, &mut slab, indices, *written as u32, *by)
        }
        Work::Fill(block, value) => q.fill(&mut slab.block_mut(*block)?, *value),
        Work::FillPart(block, from, value) => {
            q.fill(&mut slab.block_mut(*block)?.slice_mut(*from..)?, *value)
        }
    }
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn slabs_hold_what_a_sequential_program_leaves(steps in prop::collection::vec(step(), 1..40)) {
        run(&testing::device(), Pace::Real, &steps).unwrap();
    }

    /// In every order that the waits allow.
    #[test]
    fn slabs_of_a_stepped_device(
        steps in prop::collection::vec(step(), 1..40), choices in prop::collection::vec(0..STREAMS, 1..60),
    ) {
        let (device, stepper) = testing::manual();
        run(&device, Pace::Stepped(stepper, choices, Cell::new(0)), &steps).unwrap();
    }
}

fn run(device: &Device, pace: Pace, steps: &[Step]) -> Result<()> {
    let mut world = World::new(device, pace)?;
    steps.iter().try_for_each(|step| world.step(step))?;
    world.check()
}
