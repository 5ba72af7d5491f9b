//! Replayed batches: the same results as without, whatever changes from run to run.

use std::ops::Range;
use std::time::Duration;

use futures::executor::block_on;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, ErrorKind, Frozen, InOut, Lent, Op, PinnedBuffer, Queue,
    Region, Result, Stream, kernels,
};
use proptest::prelude::*;

use crate::under_test::cases::config;

const BUFFERS: usize = 4;
const LEN: usize = 16;
const FROZEN: f32 = 3.0;

/// The two parts of one buffer.
type Own = (DeviceBuffer<f32>, Frozen<f32>);

#[derive(Clone, Debug)]
enum Step {
    Scale {
        to: Place,
    },
    Axpy {
        from: Place,
        to: Place,
    },
    Fill {
        to: Place,
        value: u8,
    },
    Copy {
        from: Place,
        to: Place,
    },
    Download {
        from: Place,
    },
    /// A fresh buffer in the place of one, which is dropped where it is used.
    Renew {
        buffer: usize,
        value: u8,
    },
    /// Two buffers change places.
    Swap {
        a: usize,
        b: usize,
    },
    /// The other stream uses it in the middle.
    Elsewhere {
        to: Place,
    },
    /// The stream is used beside its queue.
    Beside {
        to: Place,
    },
    /// A list of the other stream is written and launched in the middle of this one.
    Nested {
        from: Place,
        to: Place,
        /// A launch on this one's stream before it ends.
        between: bool,
    },
    /// The caller orders the uses of a part, beside one that is frozen, by the stream alone.
    Own {
        from: Source,
        to: Range<usize>,
    },
    FromOwn {
        from: Range<usize>,
        to: Place,
    },
    DownloadOwn {
        from: Range<usize>,
    },
}

#[derive(Clone, Debug)]
enum Source {
    /// It is scaled.
    Itself,
    Frozen,
    Tracked(usize),
}

#[derive(Clone, Debug)]
struct Place {
    buffer: usize,
    range: Range<usize>,
}

fn place() -> impl Strategy<Value = Place> {
    let range = prop_oneof![Just(0..LEN), Just(0..LEN / 2), Just(LEN / 2..LEN), Just(3..9)];
    (0..BUFFERS, range).prop_map(|(buffer, range)| Place { buffer, range })
}

fn step() -> impl Strategy<Value = Step> {
    let pair = (place(), 1..BUFFERS, 0..4).prop_map(|(from, other, kind)| {
        let to = Place { buffer: (from.buffer + other) % BUFFERS, range: from.range.clone() };
        if kind == 0 { Step::Copy { from, to } } else { Step::Axpy { from, to } }
    });
    prop_oneof![
        6 => place().prop_map(|to| Step::Scale { to }),
        8 => pair,
        1 => (place(), any::<u8>()).prop_map(|(to, value)| Step::Fill { to, value }),
        1 => place().prop_map(|from| Step::Download { from }),
        2 => (0..BUFFERS, any::<u8>()).prop_map(|(buffer, value)| Step::Renew { buffer, value }),
        2 => (0..BUFFERS, 0..BUFFERS).prop_map(|(a, b)| Step::Swap { a, b }),
        1 => place().prop_map(|to| Step::Elsewhere { to }),
        1 => place().prop_map(|to| Step::Beside { to }),
        1 => (place(), 1..BUFFERS, place(), any::<bool>()).prop_map(|(from, other, to, between)| {
            let to = Place { buffer: (from.buffer + other) % BUFFERS, range: to.range };
            Step::Nested { from, to, between }
        }),
        4 => (source(), place()).prop_map(|(from, to)| Step::Own { from, to: to.range }),
        2 => (place(), place())
            .prop_map(|(from, to)| (from.range, to.buffer))
            .prop_map(|(range, buffer)| Step::FromOwn { from: range.clone(), to: Place { buffer, range } }),
        1 => place().prop_map(|from| Step::DownloadOwn { from: from.range }),
    ]
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        2 => Just(Source::Itself),
        1 => Just(Source::Frozen),
        1 => (0..BUFFERS).prop_map(Source::Tracked),
    ]
}

/// How a program runs.
#[derive(Clone, Debug)]
struct Turn {
    which: usize,
    number: u8,
    /// On the other stream.
    is_swapped: bool,
    /// Before the next.
    is_awaited: bool,
    /// The buffers move on by so many places before it.
    moved: usize,
}

/// A few programs, and in which order they run, each with a number of its own.
fn runs() -> impl Strategy<Value = (Vec<Vec<Step>>, Vec<Turn>)> {
    let programs = prop::collection::vec(prop::collection::vec(step(), 0..12), 1..4);
    programs.prop_flat_map(|programs| {
        let count = programs.len();
        let moved = prop_oneof![3 => Just(0), 1 => 1..BUFFERS];
        let turn = (0..count, any::<u8>(), prop::bool::weighted(0.3), any::<bool>(), moved);
        let turn = turn.prop_map(|(which, number, is_swapped, is_awaited, moved)| Turn {
            which,
            number,
            is_swapped,
            is_awaited,
            moved,
        });
        (Just(programs), prop::collection::vec(turn, 1..12))
    })
}

/// What the steps give, one after the other. The last of the buffers is the part that the caller orders.
fn model(buffers: &mut [Vec<f32>], program: &[Step], a: f32) -> Vec<Vec<f32>> {
    let mut seen = Vec::new();
    let axpy = |buffers: &mut [Vec<f32>], source: Vec<f32>, to: usize, range: &Range<usize>| {
        let to = buffers[to][range.clone()].iter_mut();
        to.zip(source).for_each(|(y, x)| *y = a.mul_add(x, *y));
    };
    for step in program {
        match step {
            Step::Own { from: Source::Itself, to } => {
                buffers[BUFFERS][to.clone()].iter_mut().for_each(|x| *x *= a);
            }
            Step::Own { from, to } => {
                let source = match from {
                    Source::Tracked(buffer) => buffers[*buffer][to.clone()].to_vec(),
                    _ => vec![FROZEN; to.len()],
                };
                axpy(buffers, source, BUFFERS, to);
            }
            Step::FromOwn { from, to } => {
                let source = buffers[BUFFERS][from.clone()].to_vec();
                axpy(buffers, source, to.buffer, &to.range);
            }
            Step::DownloadOwn { from } => seen.push(buffers[BUFFERS][from.clone()].to_vec()),
            Step::Nested { from, to, between } => {
                let places = [Some(from), between.then_some(to), Some(to)];
                for Place { buffer, range } in places.into_iter().flatten() {
                    buffers[*buffer][range.clone()].iter_mut().for_each(|x| *x *= a);
                }
            }
            Step::Scale { to } | Step::Elsewhere { to } | Step::Beside { to } => {
                buffers[to.buffer][to.range.clone()].iter_mut().for_each(|x| *x *= a);
            }
            Step::Axpy { from, to } => {
                let source = buffers[from.buffer][from.range.clone()].to_vec();
                axpy(buffers, source, to.buffer, &to.range);
            }
            Step::Fill { to, value } => {
                buffers[to.buffer][to.range.clone()].fill(f32::from(*value));
            }
            Step::Copy { from, to } => {
                let source = buffers[from.buffer][from.range.clone()].to_vec();
                buffers[to.buffer][to.range.clone()].copy_from_slice(&source);
            }
            Step::Download { from } => seen.push(buffers[from.buffer][from.range.clone()].to_vec()),
            Step::Renew { buffer, value } => buffers[*buffer] = vec![f32::from(*value); LEN],
            Step::Swap { a, b } => buffers.swap(*a, *b),
        }
    }
    seen
}

struct Machine {
    stream: Stream,
    other: Stream,
    axpy: kernels::axpy,
    scale: kernels::scale,
    fill: kernels::fill,
    device: Device,
}

impl Machine {
    fn new(device: Device) -> Self {
        Machine {
            stream: device.stream().unwrap(),
            other: device.stream().unwrap(),
            axpy: kernels::axpy::load_blocking(&device).unwrap(),
            scale: kernels::scale::load_blocking(&device).unwrap(),
            fill: kernels::fill::load_blocking(&device).unwrap(),
            device,
        }
    }

    fn buffers(&self) -> Vec<DeviceBuffer<f32>> {
        (0..BUFFERS).map(|_| self.stream.full(LEN, 1.0).queued().unwrap()).collect()
    }

    /// A part that the caller orders, and the rest of its buffer, which is frozen.
    fn own(&self) -> Own {
        let mut own = self.stream.full(2 * LEN, FROZEN).queued().unwrap();
        let frozen = own.split_off(LEN).unwrap();
        let frozen = block_on(frozen.freeze()).unwrap();
        self.stream.fill(&mut own, 1.0).synchronize().unwrap();
        (own, frozen)
    }

    fn run(
        &self,
        (q, [here, other], nested): (&Queue<'_>, [&Stream; 2], &mut Region),
        buffers: &mut [DeviceBuffer<f32>],
        (own, frozen): &mut Own,
        program: &[Step],
        a: f32,
    ) -> Result<Vec<Lent<PinnedBuffer<f32>>>> {
        let mut seen = Vec::new();
        for step in program {
            match step {
                Step::Scale { to } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    self.scale.launch(q, a, &mut to)?;
                }
                Step::Axpy { from, to } => {
                    let [x, y] = buffers.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                    let (x, mut y) = (x.slice(from.range.clone())?, y.slice_mut(to.range.clone())?);
                    self.axpy.launch(q, a, &x, &mut y)?;
                }
                Step::Copy { from, to } => {
                    let [x, y] = buffers.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                    let (x, mut y) = (x.slice(from.range.clone())?, y.slice_mut(to.range.clone())?);
                    q.copy(&x, &mut y)?;
                }
                Step::Fill { to, value } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    q.fill(&mut to, f32::from(*value))?;
                }
                Step::Download { from } => {
                    seen.push(q.download(&buffers[from.buffer].slice(from.range.clone())?)?);
                }
                Step::Renew { buffer, value } => {
                    buffers[*buffer] = q.full(LEN, f32::from(*value))?
                }
                Step::Swap { a, b } => buffers.swap(*a, *b),
                Step::Elsewhere { to } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    self.scale.launch(other, a, &mut to).queued()?;
                }
                Step::Nested { from, to, between } => {
                    let [x, y] = buffers.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                    let (mut x, mut y) =
                        (x.slice_mut(from.range.clone())?, y.slice_mut(to.range.clone())?);
                    let op = other.replay(nested, |q2| {
                        self.scale.launch(q2, a, &mut x)?;
                        if *between {
                            self.scale.launch(q, a, &mut y)?;
                        }
                        self.scale.launch(q2, a, &mut y)
                    });
                    op.queued()?;
                }
                Step::Beside { to } => {
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    self.scale.launch(here, a, &mut to).queued()?;
                }
                Step::Own { from, to } => {
                    // SAFETY: one stream has all uses of this part, and the last is awaited before the drop.
                    let mut own = unsafe { own.slice_mut(to.clone())?.untracked() };
                    match from {
                        Source::Itself => self.scale.launch(q, a, &mut own)?,
                        Source::Frozen => {
                            self.axpy.launch(q, a, &frozen.slice(to.clone())?, &mut own)?
                        }
                        Source::Tracked(buffer) => self.axpy.launch(
                            q,
                            a,
                            &buffers[*buffer].slice(to.clone())?,
                            &mut own,
                        )?,
                    }
                }
                Step::FromOwn { from, to } => {
                    // SAFETY: as above.
                    let own = unsafe { own.slice(from.clone())?.untracked() };
                    let mut to = buffers[to.buffer].slice_mut(to.range.clone())?;
                    self.axpy.launch(q, a, &own, &mut to)?;
                }
                Step::DownloadOwn { from } => {
                    // SAFETY: as above.
                    let own = unsafe { own.slice(from.clone())?.untracked() };
                    seen.push(q.download(&own)?);
                }
            }
        }
        Ok(seen)
    }
}

fn check(machine: &Machine, programs: &[Vec<Step>], order: &[Turn]) {
    let (mut buffers, mut expected) = (machine.buffers(), vec![vec![1.0; LEN]; BUFFERS + 1]);
    let mut own = machine.own();
    let (mut region, mut nested) = (Region::new(), Region::new());
    let mut pending = Vec::new();
    for Turn { which, number, is_swapped, is_awaited, moved } in order {
        let (program, a) = (&programs[*which], f32::from(*number) / 256.0);
        let mut streams = [&machine.stream, &machine.other];
        if *is_swapped {
            streams.swap(0, 1);
        }
        let is_own = |step: &Step| {
            matches!(step, Step::Own { .. } | Step::FromOwn { .. } | Step::DownloadOwn { .. })
        };
        // What the caller orders is the stream's, whichever that is.
        let has_own = program.iter().any(is_own);
        if has_own {
            streams[0].wait(streams[1]).queued().unwrap();
        }
        buffers.rotate_left(*moved);
        expected[..BUFFERS].rotate_left(*moved);
        let op = streams[0].replay(&mut region, |q| {
            machine.run((q, streams, &mut nested), &mut buffers, &mut own, program, a)
        });
        if has_own {
            streams[1].wait(streams[0]).queued().unwrap();
        }
        pending.push((op, model(&mut expected, program, a)));
        if *is_awaited {
            settle(&mut pending, &region);
        }
    }
    settle(&mut pending, &region);
    for (buffer, expected) in buffers.iter().zip(&expected) {
        assert_eq!(block_on(machine.stream.download(buffer)).unwrap(), **expected);
    }
    assert_eq!(block_on(machine.stream.download(&own.0)).unwrap(), *expected[BUFFERS]);
    assert_eq!(block_on(machine.stream.download(&own.1)).unwrap(), [FROZEN; LEN]);
}

/// A run that is not awaited yet, and what it should read.
type Pending = (Op<Vec<PinnedBuffer<f32>>>, Vec<Vec<f32>>);

/// Awaits the runs, and compares what they read.
fn settle(pending: &mut Vec<Pending>, region: &Region) {
    for (op, wanted) in pending.drain(..) {
        for (seen, wanted) in block_on(op).unwrap().iter().zip(wanted) {
            assert_eq!(**seen, *wanted, "{:?}", region.report());
        }
    }
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn arguments_are_never_stale((programs, order) in runs()) {
        thread_local!(static MACHINE: Machine = Machine::new(testing::device()));
        MACHINE.with(|machine| check(machine, &programs, &order));
    }
}

#[tokio::test]
async fn a_shape_that_comes_twice_is_compiled() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, scale, .. } = &machine;
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    // Their first launches are on their own.
    axpy.launch(stream, 0.0, &x, &mut y).await?;
    scale.launch(stream, 1.0, &mut y).await?;
    let mut region = Region::new();
    for n in 0..5 {
        stream
            .replay(&mut region, |q| {
                axpy.launch(q, n as f32, &x, &mut y)?;
                scale.launch(q, 2.0, &mut y)?;
                axpy.launch(q, 1.0, &x, &mut y)
            })
            .await?;
    }
    let report = region.report();
    assert_eq!((report.plain, report.compiled, report.replayed), (1, 1, 3), "{report:?}");
    // Of three nodes one changes each time.
    assert_eq!((report.nodes_set, report.interrupted, report.refused), (3, 0, 0), "{report:?}");
    let mut expected = 0.0;
    (0..5).for_each(|n| expected = (expected + n as f32) * 2.0 + 1.0);
    assert_eq!(stream.download(&y).await?, [expected; LEN]);
    Ok(())
}

/// The caller orders uses of a part by their stream: in a list as well, whatever became of the other part.
#[tokio::test]
async fn untracked_beside_a_frozen_part() -> Result<()> {
    let machine = Machine::new(testing::device());
    let (mut own, _frozen) = machine.own();
    machine.scale.launch(&machine.stream, 1.0, &mut own).await?;
    let (mut region, mut seen) = (Region::new(), Vec::new());
    for _ in 0..3 {
        machine
            .stream
            .replay(&mut region, |q| {
                for _ in 0..2 {
                    // SAFETY: one stream has all uses, and each run is awaited.
                    machine.scale.launch(q, 2.0, &mut unsafe { own.view_mut().untracked() })?;
                }
                Ok(())
            })
            .await?;
        seen.push(machine.stream.download(&own).await?[0]);
    }
    assert!(region.dot().contains("n0 -> n1"), "{}", region.dot());
    assert_eq!(seen, [4.0, 16.0, 64.0]);
    Ok(())
}

/// What became of each list, and why, with the line that made the difference.
#[tokio::test]
async fn a_region_says_why() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, scale, fill, .. } = &machine;
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    axpy.launch(stream, 0.0, &x, &mut y).await?;
    scale.launch(stream, 1.0, &mut y).await?;
    let mut region = Region::new();
    let line = line!();
    let mut run = async |which: u32| {
        let op = stream.replay(&mut region, |q| {
            scale.launch(q, which as f32, &mut y)?;
            match which {
                0 | 1 => axpy.launch(q, 2.0, &x, &mut y)?,
                2 => scale.launch(q, 1.0, &mut y)?,
                3 => {}
                4 => drop(q.download(&y)?),
                // It was never launched before.
                _ => fill.launch(q, 0.0, &mut y)?,
            }
            scale.launch(q, 1.0, &mut y)
        });
        op.await.unwrap();
        let told: Vec<String> = region.last_run().iter().map(ToString::to_string).collect();
        told
    };
    let site = |name: &str, ahead: u32, column: u32| {
        format!("{name} at {}:{}:{column}", file!(), line + ahead)
    };
    assert_eq!(run(0).await, ["3 launches, launched one by one: it is the first"]);
    assert_eq!(run(0).await, ["3 launches, compiled"]);
    assert_eq!(run(1).await, ["3 launches, replayed, 1 node set"]);
    let differs = format!(
        "3 launches, launched one by one: {} is another launch than before",
        site("scale", 6, 28)
    );
    assert_eq!(run(2).await, [differs]);
    assert_eq!(run(3).await, ["2 launches, launched one by one: it is shorter than before"]);
    let [first, second] = &run(4).await[..] else { panic!("two lists") };
    assert_eq!(
        *first,
        format!(
            "1 launch, launched one by one: it is shorter than before; ended by {}",
            site("download", 8, 29)
        )
    );
    assert_eq!(second, "1 launch, launched one by one: it is the first");
    let [first, between, second] = &run(5).await[..] else { panic!("two lists") };
    assert_eq!(*first, format!("1 launch, compiled; ended by {}", site("fill", 10, 27)));
    let fill = site("fill", 10, 27);
    assert_eq!(*between, format!("1 launch, in no list: {fill} is the kernel's first launch"));
    assert_eq!(second, "1 launch, compiled");
    // The same kernels, one of which waits for another than before.
    let mut z = stream.full(LEN, 0.0f32).queued()?;
    for (other, wanted) in [(false, "first"), (false, "compiled"), (true, "axpy at")] {
        let mut region_of_edges = std::mem::take(&mut region);
        if wanted == "first" {
            region_of_edges = Region::new();
        }
        let op = stream.replay(&mut region_of_edges, |q| {
            scale.launch(q, 1.0, &mut y)?;
            axpy.launch(q, 1.0, if other { &x } else { &y }, &mut z)
        });
        op.await?;
        region = region_of_edges;
        let told = region.last_run()[0].to_string();
        assert!(told.contains(wanted), "{told}");
    }
    let dot = region.dot();
    assert!(dot.starts_with("digraph {") && dot.contains("scale\\n[1, 1, 1] x"), "{dot}");
    assert!(!dot.contains("->"), "they do not wait for each other: {dot}");
    Ok(())
}

/// `k(a, b); k(c, d)` is not `k(a, b); k(b, d)`.
#[tokio::test]
async fn other_edges_are_another_shape() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, .. } = &machine;
    let mut buffers = machine.buffers();
    let [a, b, c, d] = &mut buffers[..] else { unreachable!() };
    axpy.launch(stream, 0.0, &*a, b).await?;
    let mut region = Region::new();
    let mut runs = async |chained: bool| {
        let second = if chained { &*b } else { &*c };
        let op = stream.replay(&mut region, |q| {
            // SAFETY: both are on the queue's stream, one behind the other.
            axpy.launch(q, 1.0, &*a, d)?;
            axpy.launch(q, 1.0, second, d)
        });
        op.await?;
        Ok::<_, gpu_await::Error>(region.report())
    };
    // The same edges, at other addresses.
    runs(true).await?;
    runs(false).await?;
    let report = runs(true).await?;
    assert_eq!((report.plain, report.compiled, report.replayed), (1, 1, 1), "{report:?}");
    Ok(())
}

#[tokio::test]
async fn what_waits_in_the_middle_gets_it() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, other, scale, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    let op = stream.replay(&mut region, |q| {
        scale.launch(q, 3.0, &mut x)?;
        // Blocks: the list has to be on the stream for it.
        assert_eq!(other.download(&x).synchronize()?, [3.0; LEN]);
        scale.launch(q, 2.0, &mut x)?;
        stream.synchronize()?;
        scale.launch(q, 2.0, &mut x)?;
        // Another thread, which waits for what its own stream wrote.
        std::thread::scope(|scope| {
            let read = scope.spawn(|| other.download(&x).synchronize());
            assert_eq!(read.join().unwrap()?, [12.0; LEN]);
            Ok(())
        })
    });
    op.await?;
    assert_eq!(region.report().interrupted, 3);
    assert_eq!(stream.download(&x).await?, [12.0; LEN]);
    Ok(())
}

/// Behind launches of the list that wait for nothing.
#[tokio::test]
async fn a_later_launch_waits_for_another_stream() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, other, scale, axpy, fill, .. } = &machine;
    let [mut x, mut y] = [1.0f32, 0.0].map(|value| stream.full(LEN, value).queued().unwrap());
    scale.launch(stream, 1.0, &mut x).await?;
    axpy.launch(stream, 1.0, &y, &mut x).await?;
    fill.launch(stream, 0.0, &mut y).await?;
    let mut region = Region::new();
    for round in 1..5 {
        let gate = testing::Gate::close(other)?;
        fill.launch(other, round as f32, &mut y).queued()?;
        let op = stream.replay(&mut region, |q| {
            scale.launch(q, 0.0, &mut x)?;
            scale.launch(q, 1.0, &mut x)?;
            axpy.launch(q, 1.0, &y, &mut x)
        });
        gate.open();
        op.await?;
        assert_eq!(stream.download(&x).await?, [round as f32; LEN]);
    }
    Ok(())
}

#[tokio::test]
async fn an_error_or_a_panic_leaves_what_precedes_it() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, scale, axpy, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    let short = stream.full(1, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    for round in 0..4 {
        let op = stream.replay(&mut region, |q| {
            scale.launch(q, 2.0, &mut x)?;
            let mut aside = q.full(LEN, 0.0f32)?;
            axpy.launch(q, 1.0, &short, &mut aside)
        });
        let error = op.await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
        assert_eq!(stream.download(&x).await?, [f32::powi(2.0, round + 1); LEN]);
    }
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        drop(stream.replay(&mut region, |q| {
            scale.launch(q, 0.5, &mut x)?;
            if LEN > 0 {
                panic!("in the closure");
            }
            Ok(())
        }));
    }));
    assert!(panics.is_err());
    assert_eq!(stream.download(&x).await?, [8.0; LEN]);
    Ok(())
}

/// What the list has written already counts as written again, whatever failed in between.
#[tokio::test]
async fn an_overwrite_in_a_list_heals() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    let short = stream.full(1, 1.0f32).queued()?;
    let mut region = Region::new();
    for round in 0..4 {
        let op = stream.replay(&mut region, |q| {
            q.fill(&mut x, 7.0)?;
            axpy.launch(q, 1.0, &short, &mut x).unwrap_err();
            let error = q.download(&x).unwrap_err();
            assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
            q.fill(&mut x, 8.0)?;
            axpy.launch(q, 1.0, &short, &mut x).unwrap_err();
            q.fill(&mut x, round as f32)
        });
        op.await?;
        assert_eq!(stream.download(&x).await?, [round as f32; LEN]);
    }
    Ok(())
}

/// Of a size that is freed at once, with and without a limit, where the free has a ticket of its own.
#[tokio::test]
async fn what_is_dropped_in_the_closure_is_freed_behind_it() -> Result<()> {
    const LARGE: usize = 4 << 20;
    for limit in [None, Some(128 << 20)] {
        // It keeps this thread's turn on a GPU.
        let _turn = testing::device();
        let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
        let builder = Device::builder();
        let builder = match limit {
            Some(bytes) => builder.memory_limit_bytes(bytes),
            None => builder,
        };
        let machine = Machine::new(builder.named(&name)?);
        let Machine { stream, other, axpy, .. } = &machine;
        let mut y = stream.full(LARGE, 0.0f32).queued()?;
        axpy.launch(stream, 0.0, &stream.full(LARGE, 1.0f32).queued()?, &mut y).await?;
        let mut region = Region::new();
        for round in 1..=4 {
            let (x, aside) = (stream.full(LARGE, 1.0f32), stream.full(LARGE, 1.0f32).queued()?);
            let x = x.queued()?;
            let op = stream.replay(&mut region, |q| {
                axpy.launch(q, 1.0, &x, &mut y)?;
                drop(x);
                // Within a limit this free has the stream's next ticket.
                drop(aside);
                assert_eq!(other.download(&y).synchronize()?[0], round as f32);
                Ok(())
            });
            op.await?;
            assert_eq!(stream.download(&y).await?[LARGE - 1], round as f32);
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_is_dropped_in_the_closure_lives_until_it_ran() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, .. } = &machine;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    axpy.launch(stream, 0.0, &stream.full(LEN, 1.0f32).queued()?, &mut y).await?;
    let mut region = Region::new();
    for round in 1..=10 {
        let gate = Gate::close(stream)?;
        let op = stream.replay(&mut region, |q| {
            for n in 0..5 {
                let x = q.full(LEN, n as f32)?;
                axpy.launch(q, 1.0, &x, &mut y)?;
            }
            Ok(())
        });
        let others: Vec<_> =
            (0..10).map(|_| stream.full(LEN, -1.0f32).queued()).collect::<Result<_>>()?;
        gate.open();
        op.await?;
        drop(others);
        assert_eq!(stream.download(&y).await?, [10.0 * round as f32; LEN]);
    }
    Ok(())
}

/// Buffers that are made and dropped in the closure come from the stream's cache, at addresses that change places; what they
/// begin with is put in front of what was written down.
#[tokio::test]
async fn temporaries_are_no_operations() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, fill, .. } = &machine;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    axpy.launch(stream, 0.0, &stream.full(LEN, 1.0f32).queued()?, &mut y).await?;
    fill.launch(stream, 0.0, &mut y).await?;
    let mut region = Region::new();
    for round in 1..=10 {
        let op = stream.replay(&mut region, |q| {
            let (mut a, mut b) = (q.empty(LEN)?, q.empty(LEN)?);
            fill.launch(q, 1.0, &mut a)?;
            fill.launch(q, 10.0, &mut b)?;
            axpy.launch(q, 2.0, &a, &mut b)?;
            drop(a);
            let mut c = q.empty(LEN)?;
            fill.launch(q, 100.0, &mut c)?;
            axpy.launch(q, 1.0, &c, &mut b)?;
            drop(c);
            for d in [q.zeros(LEN)?, q.full(LEN, 0.25)?, q.upload(vec![0.75; LEN])?] {
                axpy.launch(q, 1.0, &d, &mut b)?;
            }
            axpy.launch(q, 1.0, &b, &mut y)
        });
        op.await?;
        assert_eq!(stream.download(&y).await?, [113.0 * round as f32; LEN]);
    }
    let report = region.report();
    assert_eq!((report.plain, report.compiled, report.replayed), (1, 1, 8), "{report:?}");
    Ok(())
}

/// What only the list keeps is there again behind it: what fits a batch fits a replayed one.
#[tokio::test]
async fn a_limit_of_memory_ends_a_list() -> Result<()> {
    const PART: usize = 600 << 10;
    let device = Device::builder().memory_limit_bytes(1 << 20).host();
    let stream = device.stream()?;
    let mut region = Region::new();
    for round in 0..4_u8 {
        let op = stream.replay(&mut region, |q| {
            let mut sum = q.zeros::<u8>(4)?;
            for part in 1..=3 {
                let fresh = q.full(PART, part * round)?;
                q.copy(&fresh.slice(..4)?, &mut sum)?;
            }
            q.download(&sum)
        });
        assert_eq!(op.await?, [3 * round; 4]);
        let told = region.last_run()[0].to_string();
        assert!(told.contains("ended by full at"), "{told}");
    }
    // What does not fit at all is an error as in a batch.
    let error = stream.replay(&mut region, |q| q.full(2 << 20, 1_u8).map(drop)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::OutOfMemory { .. }), "{error}");
    Ok(())
}

/// On a host device what does not wait for each other runs in the reverse order.
#[tokio::test]
async fn a_barrier_is_an_order_without_data() -> Result<()> {
    type Told = std::sync::Arc<std::sync::Mutex<Vec<u32>>>;
    let device = Device::host();
    let stream = device.stream()?;
    let told = Told::default();
    let tell = told.clone();
    let note =
        gpu_await::Kernel::<(u32,)>::host(&device, "note", move |_: &gpu_await::Grid, n: u32| {
            tell.lock().unwrap().push(n);
        })?;
    let config = gpu_await::LaunchConfig::new(1, 1);
    stream.launch(&note, config, (0,)).await?;
    for (barrier, wanted) in [(false, [5, 4, 3, 2, 1]), (true, [2, 1, 3, 5, 4])] {
        let mut region = Region::new();
        for _ in 0..2 {
            told.lock().unwrap().clear();
            let op = stream.replay(&mut region, |q| {
                q.launch(&note, config, (1,))?;
                q.launch(&note, config, (2,))?;
                if barrier {
                    q.barrier();
                }
                q.launch(&note, config, (3,))?;
                q.launch(&note, config, (4,))?;
                q.launch(&note, config, (5,))
            });
            op.await?;
        }
        assert_eq!(*told.lock().unwrap(), wanted);
        let graph = device.graph::<(), _, _>((note.clone(), barrier), |q, (note, barrier), ()| {
            let config = gpu_await::LaunchConfig::new(1, 1);
            q.launch(note, config, (1,))?;
            q.launch(note, config, (2,))?;
            if *barrier {
                q.barrier();
            }
            q.launch(note, config, (3,))?;
            q.launch(note, config, (4,))?;
            q.launch(note, config, (5,))
        });
        told.lock().unwrap().clear();
        graph.launch(&stream, ()).await?;
        assert_eq!(*told.lock().unwrap(), wanted);
    }
    Ok(())
}

/// In the same order each time, so that only what changed is set.
#[tokio::test]
async fn temporaries_come_back_where_they_were() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, axpy, fill, .. } = &machine;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    axpy.launch(stream, 0.0, &stream.full(LEN, 1.0f32).queued()?, &mut y).await?;
    fill.launch(stream, 0.0, &mut y).await?;
    let mut region = Region::new();
    for round in 0..6 {
        let op = stream.replay(&mut region, |q| {
            let parts = [q.empty(LEN)?, q.empty(LEN)?, q.empty(LEN)?];
            for (part, value) in parts.into_iter().zip([round, 10, 100]) {
                let mut part = part;
                fill.launch(q, value as f32, &mut part)?;
                axpy.launch(q, 1.0, &part, &mut y)?;
            }
            Ok(())
        });
        op.await?;
    }
    assert_eq!(stream.download(&y).await?, [15.0 + 6.0 * 110.0; LEN]);
    let report = region.report();
    // The first list was not launched as a graph, and its memory came from elsewhere.
    assert_eq!((report.replayed, report.nodes_set), (4, 4), "{report:?}");
    Ok(())
}

#[tokio::test]
async fn a_region_goes_while_it_runs() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { device, stream, scale, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let twice = |region: &mut Region, x: &mut DeviceBuffer<f32>| {
        stream.replay(region, |q| {
            scale.launch(q, 2.0, x)?;
            scale.launch(q, 2.0, x)
        })
    };
    for _ in 0..3 {
        let mut region = Region::new();
        twice(&mut region, &mut x).await?;
        twice(&mut region, &mut x).await?;
        let gate = Gate::close(stream)?;
        let ops = [twice(&mut region, &mut x), twice(&mut region, &mut x)];
        drop(region);
        gate.open();
        for op in ops {
            op.await?;
        }
    }
    assert_eq!(stream.download(&x).await?, [f32::powi(2.0, 24); LEN]);
    device.close(std::time::Duration::from_secs(10)).await
}

/// Whoever reads what is written down has it put on the stream; refused by the driver at that moment, it is not there for them.
#[test]
fn readers_of_a_list_that_is_refused_fail() {
    type Read = fn(&Stream, &Stream, &DeviceBuffer<u32>) -> Result<()>;
    let reads: [(&str, Read); 7] = [
        ("download elsewhere", |_, other, y| other.download(y).synchronize().map(drop)),
        ("download here", |here, _, y| here.download(y).synchronize().map(drop)),
        ("download_vec", |_, other, y| other.download_vec(y).synchronize().map(drop)),
        ("copy elsewhere", |_, other, y| {
            let mut to = other.zeros::<u32>(8).queued()?;
            other.copy(y, &mut to).queued()?;
            other.download(&to).synchronize().map(drop)
        }),
        ("batch", |_, other, y| other.batch(|q| q.download(y)).synchronize().map(drop)),
        ("replay elsewhere", |_, other, y| {
            let mut to = other.zeros::<u32>(8).queued()?;
            other.replay(&mut Region::new(), |q| q.copy(y, &mut to)).synchronize()
        }),
        ("replay here", |here, _, y| {
            let mut to = here.zeros::<u32>(8).queued()?;
            here.replay(&mut Region::new(), |q| q.copy(y, &mut to)).synchronize()
        }),
    ];
    for (what, read) in reads {
        for warm in [0, 3] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let (here, other) = (device.stream().unwrap(), device.stream().unwrap());
            let mut region = Region::new();
            let mut y = here.full(8, 0u32).synchronize().unwrap();
            for _ in 0..warm {
                here.replay(&mut region, |q| q.fill(&mut y, 5)).synchronize().unwrap();
            }
            let mut found = None;
            let replayed = here.replay(&mut region, |q| {
                let mut fresh = q.empty::<u32>(8)?;
                q.fill(&mut fresh, 5)?;
                handle.fail_nth(DriverCall::Launch, 1, ErrorKind::Driver);
                found = Some(read(&here, &other, &fresh));
                Ok(())
            });
            let error = found.expect("it was read").expect_err(what);
            assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{what}: {error}");
            replayed.synchronize().expect_err("the fill was refused");
        }
    }
}

/// It keeps what it counted and compiled.
#[tokio::test]
async fn a_panic_leaves_what_the_region_knows() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { device, stream, scale, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    for _ in 0..5 {
        let twice = stream.replay(&mut region, |q| {
            scale.launch(q, 2.0, &mut x)?;
            scale.launch(q, 0.5, &mut x)
        });
        twice.await?;
    }
    let before = region.report();
    assert_eq!((before.replayed, before.compiled, before.plain), (3, 1, 1));
    let panicking = std::panic::AssertUnwindSafe(|| {
        stream.replay(&mut region, |q| -> Result<()> {
            scale.launch(q, 4.0, &mut x)?;
            scale.launch(q, 0.25, &mut x)?;
            std::panic::resume_unwind(Box::new("in the closure"))
        })
    });
    assert!(std::panic::catch_unwind(panicking).is_err());
    // What precedes it was launched.
    let after = region.report();
    assert_eq!((after.replayed, after.compiled, after.plain), (4, 1, 1));
    assert_eq!((region.last_run().len(), device.stats().graphs), (1, 1));
    assert_eq!(stream.download(&x).await?, [1.0; LEN]);
    Ok(())
}

/// Of regions and graphs.
#[tokio::test]
async fn refusals_are_counted_alike() -> Result<()> {
    for call in [DriverCall::GraphSet, DriverCall::GraphLaunch, DriverCall::GraphCompile] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let scale = kernels::scale::load(&device).await?;
        let mut x = stream.full(LEN, 1.0f32).queued()?;
        scale.launch(&stream, 1.0, &mut x).await?;
        let graph =
            device.graph::<(InOut<f32>, f32), _, _>(scale.clone(), |q, scale, (mut x, a)| {
                scale.launch(q, a, &mut x)?;
                scale.launch(q, a, &mut x)
            });
        let mut region = Region::new();
        let mut replay = |x: &mut DeviceBuffer<f32>, a| {
            let op = stream.replay(&mut region, |q| {
                scale.launch(q, a, &mut *x)?;
                scale.launch(q, a, &mut *x)
            });
            let outcome = op.synchronize();
            (outcome.is_ok(), region.report(), region.last_run()[0].to_string())
        };
        // The first is launched one by one.
        replay(&mut x, 1.0);
        let warm = if call == DriverCall::GraphCompile { 0 } else { 2 };
        for _ in 0..warm {
            replay(&mut x, 1.0);
            graph.launch(&stream, (&mut x, 1.0)).await?;
        }
        let fails = call == DriverCall::GraphLaunch;
        handle.fail_nth(call, 1, ErrorKind::Driver);
        let (ok, of_region, line) = replay(&mut x, 2.0);
        assert_eq!(ok, !fails);
        assert_eq!(line.contains("failed"), fails, "{line}");
        stream.fill(&mut x, 1.0).await?;
        handle.fail_nth(call, 1, ErrorKind::Driver);
        assert_eq!(graph.launch(&stream, (&mut x, 2.0)).await.is_ok(), !fails);
        let of_graph = graph.report();
        let counted = |report: &gpu_await::Report| {
            (report.replayed, report.refused, report.nodes_set, report.compiled)
        };
        // All of them launch it once after it was compiled.
        let wanted = match call {
            DriverCall::GraphCompile => (0, 1, 0, 0),
            DriverCall::GraphSet => (1, 1, 0, 1),
            _ => (1, 0, 0, 1),
        };
        assert_eq!(counted(&of_region), wanted, "{call:?}: {of_region:?}");
        assert_eq!(counted(&of_graph), wanted, "{call:?}: {of_graph:?}");
        // The region was launched one by one before.
        assert_eq!(of_region.plain, of_graph.plain + 1, "{call:?}: {of_region:?} {of_graph:?}");
        assert_eq!(of_graph.plain, u64::from(!fails), "{call:?}: {of_graph:?}");
    }
    Ok(())
}

/// A driver without memory for graphs is asked less and less, and graphs that are not in use give theirs up.
#[tokio::test]
async fn a_driver_without_memory_for_graphs_is_left_in_peace() -> Result<()> {
    const RUNS: u64 = 100;
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(&stream, 1.0, &mut x).await?;
    let graph = device.graph::<(InOut<f32>, f32), _, _>(scale.clone(), |q, scale, (mut x, a)| {
        scale.launch(q, a, &mut x)?;
        scale.launch(q, a, &mut x)
    });
    let mut region = Region::new();
    for _ in 0..RUNS {
        handle.fail_nth(DriverCall::GraphCompile, 1, ErrorKind::OutOfMemory);
        let replayed = stream.replay(&mut region, |q| {
            scale.launch(q, 2.0, &mut x)?;
            scale.launch(q, 1.0, &mut x)
        });
        replayed.await?;
        for a in [0.5, 1.0] {
            handle.fail_nth(DriverCall::GraphCompile, 1, ErrorKind::OutOfMemory);
            graph.launch(&stream, (&mut x, a)).await?;
        }
        stream.fill(&mut x, 1.0).await?;
    }
    // Runs 2, 3, 5, 9, 17, and each sixteenth.
    assert_eq!(region.report().refused, 4 + (RUNS - 1) / 16);
    assert_eq!(region.report().plain, RUNS);
    assert_eq!(graph.report().refused, 4 + 2 * RUNS / 16);
    assert_eq!(graph.report().plain, 2 * RUNS);
    let lists = device.stats().lists;
    assert_eq!(lists.refused, region.report().refused + graph.report().refused);
    Ok(())
}

#[test]
fn idle_graphs_go_where_the_driver_has_no_memory_for_another() -> Result<()> {
    let (faults, handle) = testing::faults();
    let (device, stepper) = testing::manual_with_faults(faults);
    let stream = device.stream()?;
    let scale = kernels::scale::load_blocking(&device)?;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(&stream, 1.0, &mut x).queued()?;
    let mut regions = [Region::new(), Region::new()];
    let mut replay = |region: usize| {
        let replayed = stream.replay(&mut regions[region], |q| {
            scale.launch(q, 2.0, &mut x)?;
            scale.launch(q, 0.5, &mut x)
        });
        replayed.queued()?;
        stepper.run_until_idle();
        Ok::<_, gpu_await::Error>((device.stats().graphs, device.stats().graphs_evicted))
    };
    replay(0)?;
    assert_eq!(replay(0)?, (1, 0));
    replay(1)?;
    stepper.advance(Duration::from_secs(1));
    handle.fail_nth(DriverCall::GraphCompile, 1, ErrorKind::OutOfMemory);
    assert_eq!(replay(1)?, (0, 1));
    Ok(())
}

fn own_error() -> gpu_await::Error {
    let cause = gpu_await::ForeignError::from(std::sync::Arc::new(std::fmt::Error));
    ErrorDetail::Foreign { op: "half way".into(), cause }.into()
}

/// Of a closure that wrote more of them once.
#[tokio::test]
async fn lists_that_are_not_written_any_more_are_forgotten() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { device, stream, scale, .. } = &machine;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    let mut replay = |lists: usize, fails: bool, x: &mut DeviceBuffer<f32>| {
        let replayed = stream.replay(&mut region, |q| {
            for _ in 0..lists {
                scale.launch(q, 1.0, &mut *x)?;
                scale.launch(q, 1.0, &mut *x)?;
                let _nothing = q.host_fn(|| ())?;
            }
            if fails { Err(own_error()) } else { Ok(()) }
        });
        let _is_its_own = replayed.synchronize();
        (device.stats().graphs, region.report().replayed)
    };
    replay(20, false, &mut x);
    assert_eq!(replay(20, false, &mut x).0, 20);
    // A run that ends half way forgets nothing.
    assert_eq!(replay(1, true, &mut x).0, 20);
    let replayed = replay(20, false, &mut x);
    assert_eq!(replayed, (20, 21));
    assert_eq!(replay(1, false, &mut x).0, 20);
    assert_eq!(replay(1, false, &mut x).0, 1);
    assert_eq!(stream.download(&x).await?, [1.0; LEN]);
    Ok(())
}

fn lines(region: &Region) -> Vec<String> {
    let here = |line: &gpu_await::ListReport| {
        let line = line.to_string();
        // Without the places in this file.
        let mut words = line.split(' ').map(|word| word.split(':').next().unwrap_or(word));
        words.next().into_iter().chain(words).collect::<Vec<_>>().join(" ")
    };
    region.last_run().iter().map(here).collect()
}

#[tokio::test]
async fn last_run_says_what_interrupted() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { device, stream, scale, .. } = &machine;
    let [mut x, mut y] = [1.0f32, 1.0].map(|value| stream.full(LEN, value).queued().unwrap());
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    for _ in 0..3 {
        let op = stream.replay(&mut region, |q| {
            scale.launch(q, 2.0, &mut x)?;
            stream.fill(&mut y, 3.0).queued()?;
            scale.launch(q, 2.0, &mut x)?;
            scale.launch(q, 2.0, &mut x)?;
            let _nothing = q.host_fn(|| ())?;
            scale.launch(q, 2.0, &mut x)
        });
        op.await?;
    }
    let file = "tests/graphs/replay.rs";
    let wanted = [
        format!("1 launch, launched one by one it was interrupted; ended by fill at {file}"),
        format!("2 launches, replayed, 0 nodes set; ended by host_fn at {file}"),
        "1 launch, replayed, 0 nodes set".to_owned(),
    ];
    assert_eq!(lines(&region), wanted);
    let other = device.stream()?;
    let op = stream.replay(&mut region, |q| {
        scale.launch(q, 2.0, &mut x)?;
        other.wait(stream).queued()?;
        scale.launch(q, 2.0, &mut x)
    });
    op.await?;
    assert_eq!(region.last_run()[0].outcome, gpu_await::ListOutcome::Interrupted);
    assert_eq!(region.last_run().len(), 2);
    Ok(())
}

/// By another task that uses the stream now and then: the next run is replayed as the one before.
#[tokio::test]
async fn an_interruption_leaves_the_graph() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, scale, .. } = &machine;
    let [mut x, mut y] = [1.0f32, 1.0].map(|value| stream.full(LEN, value).queued().unwrap());
    scale.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    // In the middle, and behind the last launch.
    for interrupted_at in [None, None, None, Some(1), None, Some(3), None] {
        let op = stream.replay(&mut region, |q| {
            for at in 0..4 {
                scale.launch(q, 1.0, &mut x)?;
                if interrupted_at == Some(at) {
                    stream.fill(&mut y, 3.0).queued()?;
                }
            }
            let _nothing = q.host_fn(|| ())?;
            scale.launch(q, 1.0, &mut x)
        });
        op.await?;
    }
    // Two lists in each of seven runs: the first is compiled, replayed, interrupted, replayed, interrupted and replayed.
    let report = region.report();
    assert_eq!((report.interrupted, report.compiled, report.replayed), (2, 2, 8), "{report:?}");
    let wanted = [
        "4 launches, replayed, 0 nodes set; ended by host_fn at tests/graphs/replay.rs".to_owned(),
        "1 launch, replayed, 0 nodes set".to_owned(),
    ];
    assert_eq!(lines(&region), wanted);
    assert_eq!(stream.download(&x).await?, [1.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn last_run_says_what_differs() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { stream, scale, fill, .. } = &machine;
    let [mut x, mut y] = [1.0f32, 1.0].map(|value| stream.full(LEN, value).queued().unwrap());
    scale.launch(stream, 1.0, &mut x).await?;
    fill.launch(stream, 1.0, &mut x).await?;
    let mut region = Region::new();
    let mut run = |barrier: bool, more: usize, other: bool| {
        let op = stream.replay(&mut region, |q| {
            scale.launch(q, 1.0, &mut x)?;
            if barrier {
                q.barrier();
            }
            if other {
                return fill.launch(q, 1.0, &mut y);
            }
            scale.launch(q, 1.0, &mut y)?;
            (0..more).try_for_each(|_| scale.launch(q, 1.0, &mut y))
        });
        op.synchronize().unwrap();
        lines(&region).remove(0)
    };
    let plainly = "launches, launched one by one";
    run(false, 0, false);
    let at = "scale at tests/graphs/replay.rs";
    let wanted = format!("2 {plainly} {at} waits for other launches than before");
    assert_eq!(run(true, 0, false), wanted);
    assert_eq!(run(true, 1, false), format!("3 {plainly} {at} is one launch more than before"));
    assert_eq!(run(true, 0, false), format!("2 {plainly} it is shorter than before"));
    let wanted =
        format!("2 {plainly} fill at tests/graphs/replay.rs is another launch than before");
    assert_eq!(run(true, 0, true), wanted);
    Ok(())
}

#[tokio::test]
async fn places_are_the_callers() -> Result<()> {
    let machine = Machine::new(testing::device());
    let Machine { device, stream, scale, .. } = &machine;
    let mut x = stream.full(4, 1.0f32).queued()?;
    scale.launch(stream, 1.0, &mut x).await?;
    let event = device.event();
    let mut region = Region::new();
    let op = stream.replay(&mut region, |q| {
        scale.launch(q, 1.0, &mut x)?;
        let _vec = q.download_vec(&x)?;
        scale.launch(q, 1.0, &mut x)?;
        event.record_in(q)?;
        scale.launch(q, 1.0, &mut x)?;
        let uses = gpu_await::Uses::new("theirs").updates(&mut x);
        // SAFETY: it does nothing.
        unsafe { q.enqueue(uses, |_, _| Ok::<(), gpu_await::Error>(())) }?;
        scale.launch(q, 1.0, &mut x)
    });
    op.await?;
    let sites: Vec<_> =
        region.last_run().iter().filter_map(|list| list.ended_by.as_ref()).collect();
    assert_eq!(sites.len(), 3);
    for site in sites {
        assert!(site.at().file().ends_with("tests/graphs/replay.rs"), "{site}");
    }
    Ok(())
}
