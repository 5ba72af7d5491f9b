//! Random programs of algorithms, against plain Rust: verb by verb, as batches and as replayed ones, from several threads at
//! once over one device, at odd offsets, on numbers of elements that the device alone knows.
//!
//! `PROPTEST_CASES` says how many; the images that a GPU runs are chosen as in every test of algorithms.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::ops::Range;
use std::thread;

use futures::executor::block_on;
use gpu_await::{Device, DeviceBuffer, Queue, Region, Result, Stream, testing};
use gpu_await_algorithms::{Algorithms, Compare, ReduceOp, Scalar, SequenceMut};
use proptest::prelude::*;

use crate::under_test::cases::config;

const ARRAYS: usize = 3;
const BINS: usize = 7;

/// What plain Rust does with an element. Values are below 256, and sums wrap.
trait Value: Scalar + Ord + Debug {
    fn of(number: usize) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! values {
    ($($type:ident)+) => {$(
        impl Value for $type {
            fn of(number: usize) -> Self {
                number as u8 as $type
            }
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    )+};
}
values!(u8 u32 i64);

#[derive(Clone, Debug)]
enum Step {
    Sort {
        on: usize,
        descending: bool,
    },
    Scan {
        from: usize,
        exclusive: bool,
        greatest: bool,
    },
    CopyIf {
        from: usize,
        above: u8,
    },
    /// What was selected is sorted; how much that is the device alone knows.
    CopyIfAndSort {
        from: usize,
        above: u8,
    },
    Unique {
        from: usize,
    },
    Partition {
        from: usize,
        below: u8,
    },
    TopK {
        from: usize,
        k: usize,
    },
    Histogram {
        from: usize,
    },
    Runs {
        from: usize,
    },
    Sum {
        from: usize,
    },
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Verbs,
    Batch,
    Replay,
}

/// Programs, and which of them are run one after the other on the same memory, and how.
#[derive(Clone, Debug)]
struct Case {
    len: usize,
    /// Each program works on this part of the arrays.
    part: (usize, usize),
    programs: Vec<Vec<Step>>,
    runs: Vec<(usize, Way)>,
    threads: usize,
    seed: usize,
}

fn step() -> impl Strategy<Value = Step> {
    let from = 0..ARRAYS;
    prop_oneof![
        (from.clone(), any::<bool>()).prop_map(|(on, descending)| Step::Sort { on, descending }),
        (from.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(from, exclusive, greatest)| Step::Scan { from, exclusive, greatest }),
        (from.clone(), any::<u8>()).prop_map(|(from, above)| Step::CopyIf { from, above }),
        (from.clone(), any::<u8>()).prop_map(|(from, above)| Step::CopyIfAndSort { from, above }),
        from.clone().prop_map(|from| Step::Unique { from }),
        (from.clone(), any::<u8>()).prop_map(|(from, below)| Step::Partition { from, below }),
        (from.clone(), 1..20usize).prop_map(|(from, k)| Step::TopK { from, k }),
        from.clone().prop_map(|from| Step::Histogram { from }),
        from.clone().prop_map(|from| Step::Runs { from }),
        from.prop_map(|from| Step::Sum { from }),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let len = prop_oneof![12 => 1..300usize, 4 => 300..5_000usize, 1 => 5_000..40_000usize];
    let programs = prop::collection::vec(prop::collection::vec(step(), 1..6), 1..3);
    let way = prop_oneof![1 => Just(Way::Verbs), 1 => Just(Way::Batch), 3 => Just(Way::Replay)];
    let runs = prop::collection::vec((0..2usize, way), 1..6);
    let threads = prop_oneof![6 => Just(1), 1 => Just(3)];
    (len, 0..9usize, 0..9usize, programs, runs, threads, 1..1000usize).prop_map(
        |(len, start, less, programs, runs, threads, seed)| {
            let start = start.min(len - 1);
            let end = len - less.min(len - start - 1);
            Case { len, part: (start, end), programs, runs, threads, seed }
        },
    )
}

/// What a program works on, on the device or in plain Rust.
#[derive(Clone, Debug, PartialEq)]
struct Plain<T> {
    arrays: Vec<Vec<T>>,
    /// How many were selected, and a sum.
    count: u64,
    sum: Vec<T>,
    bins: Vec<u64>,
    lengths: Vec<u64>,
}

struct OnDevice<T: Scalar> {
    arrays: Vec<DeviceBuffer<T>>,
    count: DeviceBuffer<u64>,
    sum: DeviceBuffer<T>,
    bins: DeviceBuffer<u64>,
    lengths: DeviceBuffer<u64>,
}

impl<T: Value> Plain<T> {
    fn new(len: usize, seed: usize) -> Self {
        // Runs of equal values are common.
        let value = |at: usize, which: usize| {
            T::of((at / (1 + seed % 4)).wrapping_mul(seed * 2 + 1 + which) >> (seed % 5))
        };
        let array = |which| (0..len).map(|at| value(at, which)).collect();
        Plain {
            arrays: (0..ARRAYS).map(array).collect(),
            count: 0,
            sum: vec![T::of(0)],
            bins: vec![0; BINS],
            lengths: vec![0; len],
        }
    }

    fn run(&mut self, step: &Step, part: Range<usize>) {
        let to = |from: usize| (from + 1) % ARRAYS;
        let source = |from: usize, plain: &Self| plain.arrays[from][part.clone()].to_vec();
        match *step {
            Step::Sort { on, descending } => {
                let part = &mut self.arrays[on][part];
                part.sort_unstable();
                if descending {
                    part.reverse();
                }
            }
            Step::Scan { from, exclusive, greatest } => {
                let x = source(from, self);
                let by = |a: T, b: T| if greatest { a.max(b) } else { a.plus(b) };
                let mut total = T::of(3);
                for (at, out) in self.arrays[to(from)][part].iter_mut().enumerate() {
                    if exclusive {
                        *out = total;
                        total = by(total, x[at]);
                    } else {
                        total = if at == 0 { x[at] } else { by(total, x[at]) };
                        *out = total;
                    }
                }
            }
            Step::CopyIf { from, above } => {
                let x = source(from, self);
                let kept: Vec<T> =
                    x.into_iter().filter(|x| *x > T::of(usize::from(above))).collect();
                self.count = kept.len() as u64;
                self.arrays[to(from)][part][..kept.len()].copy_from_slice(&kept);
            }
            Step::CopyIfAndSort { from, above } => {
                self.run(&Step::CopyIf { from, above }, part.clone());
                let count = self.count as usize;
                self.arrays[to(from)][part][..count].sort_unstable();
            }
            Step::Unique { from } => {
                let mut x = source(from, self);
                x.dedup();
                self.count = x.len() as u64;
                self.arrays[to(from)][part][..x.len()].copy_from_slice(&x);
            }
            Step::Partition { from, below } => {
                let x = source(from, self);
                let (yes, no): (Vec<T>, Vec<T>) =
                    x.into_iter().partition(|x| *x < T::of(usize::from(below)));
                self.count = yes.len() as u64;
                self.arrays[to(from)][part.clone()][..yes.len()].copy_from_slice(&yes);
                self.arrays[to(to(from))][part][..no.len()].copy_from_slice(&no);
            }
            Step::TopK { from, k } => {
                let mut x = source(from, self);
                x.sort_unstable_by(|a, b| b.cmp(a));
                let k = k.min(x.len());
                self.arrays[to(from)][part][..k].copy_from_slice(&x[..k]);
            }
            Step::Histogram { from } => {
                let levels = levels::<T>();
                self.bins.fill(0);
                for x in source(from, self) {
                    let bin = levels.iter().rposition(|level| *level <= x);
                    // The last bin has its upper level as well.
                    match bin {
                        Some(bin) if bin < BINS => self.bins[bin] += 1,
                        Some(_) if x == levels[BINS] => self.bins[BINS - 1] += 1,
                        _ => {}
                    }
                }
            }
            Step::Runs { from } => {
                let mut runs: Vec<(T, u64)> = Vec::new();
                for x in source(from, self) {
                    match runs.last_mut() {
                        Some((value, length)) if *value == x => *length += 1,
                        _ => runs.push((x, 1)),
                    }
                }
                self.count = runs.len() as u64;
                for (at, (value, length)) in runs.into_iter().enumerate() {
                    self.arrays[to(from)][part.start + at] = value;
                    self.lengths[part.start + at] = length;
                }
            }
            Step::Sum { from } => {
                self.sum[0] = source(from, self).into_iter().fold(T::of(1), T::plus);
            }
        }
    }
}

/// One more than there are bins, within what values are.
fn levels<T: Value>() -> Vec<T> {
    (0..=BINS).map(|level| T::of(level * 18)).collect()
}

impl<T: Value> OnDevice<T> {
    fn new(stream: &Stream, plain: &Plain<T>) -> Result<Self> {
        let arrays = plain.arrays.iter().map(|array| stream.upload(array.clone()).queued());
        Ok(OnDevice {
            arrays: arrays.collect::<Result<_>>()?,
            count: stream.zeros(1).queued()?,
            sum: stream.full(1, T::of(0)).queued()?,
            bins: stream.zeros(BINS).queued()?,
            lengths: stream.zeros(plain.lengths.len()).queued()?,
        })
    }

    fn run(
        &mut self,
        q: &Queue<'_>,
        step: &Step,
        part: Range<usize>,
        levels: &DeviceBuffer<T>,
    ) -> Result<()> {
        let (Step::Sort { on: from, .. }
        | Step::Scan { from, .. }
        | Step::CopyIf { from, .. }
        | Step::CopyIfAndSort { from, .. }
        | Step::Unique { from }
        | Step::Partition { from, .. }
        | Step::TopK { from, .. }
        | Step::Histogram { from }
        | Step::Runs { from }
        | Step::Sum { from }) = *step;
        let next = (from + 1) % ARRAYS;
        let [x, to, third] =
            self.arrays.get_disjoint_mut([from, next, (next + 1) % ARRAYS]).expect("three");
        let count = &mut self.count;
        match *step {
            Step::Sort { descending, .. } => {
                let mut x = x.slice_mut(part)?;
                if descending { q.sort_descending(&mut x) } else { q.sort(&mut x) }
            }
            Step::Scan { exclusive, greatest, .. } => {
                let (x, mut to) = (x.slice(part.clone())?, to.slice_mut(part)?);
                let by = if greatest { ReduceOp::Max } else { ReduceOp::Sum };
                match exclusive {
                    true => q.exclusive_scan(&x, by, T::of(3), &mut to),
                    false => q.inclusive_scan(&x, by, &mut to),
                }
            }
            Step::CopyIf { above, .. } | Step::CopyIfAndSort { above, .. } => {
                let (x, mut to) = (x.slice(part.clone())?, to.slice_mut(part)?);
                let above = Compare::Greater(T::of(usize::from(above)));
                q.copy_if_into(&x, above, &mut to, count)?;
                if matches!(step, Step::CopyIfAndSort { .. }) {
                    q.sort(&mut to.up_to_mut(count)?)?;
                }
                Ok(())
            }
            Step::Unique { .. } => {
                q.unique_into(&x.slice(part.clone())?, &mut to.slice_mut(part)?, count)
            }
            Step::Partition { below, .. } => {
                let (mut to, mut others) =
                    (to.slice_mut(part.clone())?, third.slice_mut(part.clone())?);
                let below = Compare::Less(T::of(usize::from(below)));
                q.partition_into(&x.slice(part)?, below, &mut to, &mut others, count)
            }
            Step::TopK { k, .. } => {
                let k = k.min(part.len());
                let mut to = to.slice_mut(part.start..part.start + k)?;
                q.top_k(&x.slice(part)?, &mut to)
            }
            Step::Histogram { .. } => q.histogram_between(&x.slice(part)?, levels, &mut self.bins),
            Step::Runs { .. } => {
                let mut lengths = self.lengths.slice_mut(part.clone())?;
                let mut to = to.slice_mut(part.clone())?;
                q.run_length_encode_into(&x.slice(part)?, &mut to, &mut lengths, count)
            }
            Step::Sum { .. } => {
                q.reduce_into(&x.slice(part)?, ReduceOp::Sum, T::of(1), &mut self.sum)
            }
        }
    }

    fn down(&self, stream: &Stream) -> Result<Plain<T>> {
        let arrays = self.arrays.iter().map(|array| block_on(stream.download_vec(array)));
        Ok(Plain {
            arrays: arrays.collect::<Result<_>>()?,
            count: block_on(stream.download(&self.count))?[0],
            sum: block_on(stream.download_vec(&self.sum))?,
            bins: block_on(stream.download_vec(&self.bins))?,
            lengths: block_on(stream.download_vec(&self.lengths))?,
        })
    }
}

fn check<T: Value>(stream: &Stream, case: &Case) -> Result<()> {
    let part = case.part.0..case.part.1;
    let mut plain = Plain::<T>::new(case.len, case.seed);
    let mut on_device = OnDevice::new(stream, &plain)?;
    let levels = stream.upload(levels::<T>()).queued()?;
    let mut regions: Vec<Region> = case.programs.iter().map(|_| Region::new()).collect();
    for (which, way) in &case.runs {
        let which = which % case.programs.len();
        let program = &case.programs[which];
        let mut all = |q: &Queue<'_>| {
            program.iter().try_for_each(|step| on_device.run(q, step, part.clone(), &levels))
        };
        match way {
            Way::Verbs => {
                for step in program {
                    let one = stream.batch(|q| on_device.run(q, step, part.clone(), &levels));
                    one.queued()?;
                }
            }
            Way::Batch => stream.batch(&mut all).queued()?,
            Way::Replay => stream.replay(&mut regions[which], &mut all).queued()?,
        }
        program.iter().for_each(|step| plain.run(step, part.clone()));
    }
    assert_eq!(on_device.down(stream)?, plain);
    Ok(())
}

fn check_on_threads<T: Value>(device: &Device, case: &Case) {
    thread::scope(|scope| {
        for thread in 0..case.threads {
            let case = Case { seed: case.seed + thread, ..case.clone() };
            scope.spawn(move || {
                let stream = device.stream().expect("a stream");
                check::<T>(&stream, &case).expect("no error");
            });
        }
    });
}

proptest! {
    #![proptest_config(config(60))]

    #[test]
    fn algorithms_are_right(case in case(), which in 0..3usize) {
        thread_local!(static DEVICE: Device = testing::device());
        DEVICE.with(|device| match which {
            0 => check_on_threads::<u8>(device, &case),
            1 => check_on_threads::<u32>(device, &case),
            _ => check_on_threads::<i64>(device, &case),
        });
    }
}
