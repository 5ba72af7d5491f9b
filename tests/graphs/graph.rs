//! Graphs: what their launches compute, whatever is passed; what they keep, and what they refuse.

use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use futures::executor::block_on;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceBuffer, DlpackConsumer, Error, ErrorDetail, ErrorKind, ForeignError, Frozen,
    Graph, In, InOut, Mapped, Out, Queue, Refused, Region, Result, Stream, Uses, ViewMut, kernels,
};
use proptest::prelude::*;

use crate::SOON;
use crate::under_test::cases::config;
use crate::under_test::eventually::eventually;

const BUFFERS: usize = 3;
const LEN: usize = 16;
const FROZEN: f32 = 3.0;

// ---- as without a graph -------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    Scale {
        to: Place,
    },
    Axpy {
        from: Place,
        to: Place,
    },
    /// By way of fresh memory.
    Through {
        from: Place,
        to: Place,
    },
    /// The graph's own memory, which its launches share.
    Scratch {
        from: Place,
        to: Place,
    },
    /// Only for some values.
    Sometimes {
        to: Place,
    },
    Fill {
        to: Place,
    },
    Copy {
        from: Place,
        to: Place,
    },
    /// Into a part of the graph's own memory whose uses the caller orders, and from there; its other part is frozen.
    Own {
        from: Source,
        to: Range<usize>,
    },
    FromOwn {
        to: Place,
    },
}

#[derive(Clone, Debug)]
enum Source {
    /// It is scaled.
    Itself,
    Frozen,
    Passed(usize),
}

#[derive(Clone, Debug)]
struct Place {
    buffer: usize,
    range: Range<usize>,
}

/// A launch: which buffer is passed for which slot, the value, the stream, and how much of each buffer.
#[derive(Clone, Debug)]
struct Run {
    first: usize,
    a: u8,
    on_other: bool,
    short: bool,
    /// Something else in front of it.
    aside: Option<usize>,
}

fn place() -> impl Strategy<Value = Place> {
    let range = prop_oneof![Just(0..8), Just(0..4), Just(4..8), Just(3..6)];
    (0..BUFFERS, range).prop_map(|(buffer, range)| Place { buffer, range })
}

fn pair() -> impl Strategy<Value = (Place, Place)> {
    (place(), 1..BUFFERS).prop_map(|(from, other)| {
        let to = Place { buffer: (from.buffer + other) % BUFFERS, range: from.range.clone() };
        (from, to)
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => place().prop_map(|to| Step::Scale { to }),
        4 => pair().prop_map(|(from, to)| Step::Axpy { from, to }),
        2 => pair().prop_map(|(from, to)| Step::Through { from, to }),
        1 => pair().prop_map(|(from, to)| Step::Scratch { from, to }),
        1 => place().prop_map(|to| Step::Sometimes { to }),
        1 => place().prop_map(|to| Step::Fill { to }),
        2 => pair().prop_map(|(from, to)| Step::Copy { from, to }),
        3 => (source(), place()).prop_map(|(from, to)| Step::Own { from, to: to.range }),
        2 => place().prop_map(|to| Step::FromOwn { to }),
    ]
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        2 => Just(Source::Itself),
        1 => Just(Source::Frozen),
        1 => (0..BUFFERS).prop_map(Source::Passed),
    ]
}

fn run() -> impl Strategy<Value = Run> {
    // Few values, so that some come again.
    let aside = prop::option::weighted(0.3, 0..BUFFERS);
    (0..BUFFERS, 0_u8..4, any::<bool>(), any::<bool>(), aside)
        .prop_map(|(first, a, on_other, short, aside)| Run { first, a, on_other, short, aside })
}

struct Program {
    steps: Vec<Step>,
    axpy: kernels::axpy,
    scale: kernels::scale,
    fill: kernels::fill,
    scratch: Mutex<DeviceBuffer<f32>>,
    own: Mutex<DeviceBuffer<f32>>,
    frozen: Frozen<f32>,
}

type Three = (InOut<f32>, InOut<f32>, InOut<f32>, f32);

fn write(
    q: &Queue<'_>,
    program: &Program,
    (x, y, z, a): (ViewMut<'_, f32>, ViewMut<'_, f32>, ViewMut<'_, f32>, f32),
) -> Result<()> {
    let Program { steps, axpy, scale, fill, scratch, own, frozen } = program;
    let mut views = [x, y, z];
    for step in steps {
        match step {
            Step::Scale { to } => {
                scale.launch(q, a, &mut views[to.buffer].slice_mut(to.range.clone())?)?;
            }
            Step::Sometimes { to } if a > 0.4 => {
                scale.launch(q, 3.0, &mut views[to.buffer].slice_mut(to.range.clone())?)?;
            }
            Step::Sometimes { .. } => {}
            Step::Fill { to } => {
                q.fill(&mut views[to.buffer].slice_mut(to.range.clone())?, a)?;
            }
            Step::Copy { from, to } => {
                let [x, y] = views.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                q.copy(&x.slice_mut(from.range.clone())?, &mut y.slice_mut(to.range.clone())?)?;
            }
            Step::Axpy { from, to } => {
                let [x, y] = views.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                let x = x.slice_mut(from.range.clone())?;
                axpy.launch(q, a, &x, &mut y.slice_mut(to.range.clone())?)?;
            }
            Step::Through { from, to } => {
                let mut fresh = q.empty(from.range.len())?;
                fill.launch(q, 2.0, &mut fresh)?;
                let [x, y] = views.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                let x = x.slice_mut(from.range.clone())?;
                axpy.launch(q, a, &x, &mut fresh)?;
                axpy.launch(q, 1.0, &fresh, &mut y.slice_mut(to.range.clone())?)?;
            }
            Step::Scratch { from, to } => {
                let mut scratch = scratch.lock().unwrap();
                let mut scratch = scratch.slice_mut(from.range.clone())?;
                fill.launch(q, 1.0, &mut scratch)?;
                let [x, y] = views.get_disjoint_mut([from.buffer, to.buffer]).unwrap();
                let x = x.slice_mut(from.range.clone())?;
                axpy.launch(q, a, &x, &mut scratch)?;
                axpy.launch(q, 1.0, &scratch, &mut y.slice_mut(to.range.clone())?)?;
            }
            Step::Own { from, to } => {
                let mut own = own.lock().unwrap();
                // SAFETY: one stream has all uses of this part, and the graph keeps it until they are complete.
                let mut own = unsafe { own.slice_mut(to.clone())?.untracked() };
                match from {
                    Source::Itself => scale.launch(q, a, &mut own)?,
                    Source::Frozen => axpy.launch(q, a, &frozen.slice(to.clone())?, &mut own)?,
                    Source::Passed(number) => {
                        let x = views[*number].slice(to.clone())?;
                        axpy.launch(q, a, &x, &mut own)?;
                    }
                }
            }
            Step::FromOwn { to } => {
                let own = own.lock().unwrap();
                // SAFETY: as above.
                let own = unsafe { own.slice(to.range.clone())?.untracked() };
                axpy.launch(q, a, &own, &mut views[to.buffer].slice_mut(to.range.clone())?)?;
            }
        }
    }
    Ok(())
}

/// The last of the buffers is the part that the caller orders.
fn model(buffers: &mut [Vec<f32>], start: usize, steps: &[Step], first: usize, a: f32) {
    let at = |place: &Place| {
        ((place.buffer + first) % BUFFERS, start + place.range.start..start + place.range.end)
    };
    let axpy = |buffers: &mut [Vec<f32>], to: &Place, a: f32, source: Vec<f32>| {
        let (to, range) = at(to);
        buffers[to][range].iter_mut().zip(source).for_each(|(y, x)| *y = a.mul_add(x, *y));
    };
    let scale = |buffers: &mut [Vec<f32>], to: &Place, a: f32| {
        let (to, range) = at(to);
        buffers[to][range].iter_mut().for_each(|x| *x *= a);
    };
    for step in steps {
        match step {
            Step::Scale { to } => scale(buffers, to, a),
            Step::Sometimes { to } if a > 0.4 => scale(buffers, to, 3.0),
            Step::Sometimes { .. } => {}
            Step::Fill { to } => {
                let (to, range) = at(to);
                buffers[to][range].fill(a);
            }
            Step::Copy { from, to } => {
                let (from, range) = at(from);
                let source = buffers[from][range].to_vec();
                let (to, range) = at(to);
                buffers[to][range].copy_from_slice(&source);
            }
            Step::Axpy { from, to } => {
                let (from, range) = at(from);
                let source = buffers[from][range].to_vec();
                axpy(buffers, to, a, source);
            }
            Step::Through { from, to } | Step::Scratch { from, to } => {
                let base: f32 = if matches!(step, Step::Through { .. }) { 2.0 } else { 1.0 };
                let (from, range) = at(from);
                let source = buffers[from][range].iter().map(|x| a.mul_add(*x, base)).collect();
                axpy(buffers, to, 1.0, source);
            }
            Step::Own { from: Source::Itself, to } => {
                buffers[BUFFERS][to.clone()].iter_mut().for_each(|x| *x *= a);
            }
            Step::Own { from, to } => {
                let source = match from {
                    Source::Passed(number) => {
                        let (from, range) = at(&Place { buffer: *number, range: to.clone() });
                        buffers[from][range].to_vec()
                    }
                    _ => vec![FROZEN; to.len()],
                };
                let own = buffers[BUFFERS][to.clone()].iter_mut();
                own.zip(source).for_each(|(y, x)| *y = a.mul_add(x, *y));
            }
            Step::FromOwn { to } => {
                let source = buffers[BUFFERS][to.range.clone()].to_vec();
                axpy(buffers, to, a, source);
            }
        }
    }
}

fn check(device: &Device, steps: &[Step], runs: &[Run]) {
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let load = |device| kernels::scale::load_blocking(device).unwrap();
    let mut own = streams[0].full(2 * LEN, FROZEN).queued().unwrap();
    let frozen = block_on(own.split_off(LEN).unwrap().freeze()).unwrap();
    streams[0].fill(&mut own, 1.0).synchronize().unwrap();
    // What the caller orders has one stream.
    let is_own = |step: &Step| matches!(step, Step::Own { .. } | Step::FromOwn { .. });
    let has_own = steps.iter().any(is_own);
    let program = Program {
        steps: steps.to_vec(),
        axpy: kernels::axpy::load_blocking(device).unwrap(),
        scale: load(device),
        fill: kernels::fill::load_blocking(device).unwrap(),
        scratch: Mutex::new(streams[0].zeros(LEN).queued().unwrap()),
        own: Mutex::new(own),
        frozen,
    };
    let graph = device.graph::<Three, _, _>(program, write);
    let mut buffers: Vec<DeviceBuffer<f32>> =
        (0..BUFFERS).map(|n| streams[0].full(LEN, n as f32).queued().unwrap()).collect();
    let mut expected: Vec<Vec<f32>> = (0..BUFFERS).map(|n| vec![n as f32; LEN]).collect();
    expected.push(vec![1.0; LEN]);
    let scale = load(device);
    for Run { first, a, on_other, short, aside } in runs {
        let (a, stream) = (f32::from(*a) / 4.0, &streams[usize::from(*on_other && !has_own)]);
        if let Some(aside) = aside {
            scale.launch(&streams[0], 0.5, &mut buffers[*aside]).queued().unwrap();
            expected[*aside].iter_mut().for_each(|x| *x *= 0.5);
        }
        let mut order: Vec<&mut DeviceBuffer<f32>> = buffers.iter_mut().collect();
        order.rotate_left(*first);
        let [x, y, z] = &mut order[..] else { unreachable!() };
        // All of it, or the second half.
        let start = if *short { 8 } else { 0 };
        let (mut x, mut y, mut z) = (
            x.slice_mut(start..).unwrap(),
            y.slice_mut(start..).unwrap(),
            z.slice_mut(start..).unwrap(),
        );
        graph.launch(stream, (&mut x, &mut y, &mut z, a)).queued().unwrap();
        model(&mut expected, start, steps, *first, a);
    }
    for (buffer, expected) in buffers.iter().zip(&expected) {
        assert_eq!(
            block_on(streams[1].download(buffer)).unwrap(),
            **expected,
            "{:?}",
            graph.report()
        );
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn arguments_are_never_stale(steps in prop::collection::vec(step(), 0..10), runs in prop::collection::vec(run(), 1..12)) {
        thread_local!(static DEVICE: Device = testing::device());
        DEVICE.with(|device| check(device, &steps, &runs));
    }
}

/// The caller orders uses of a part by their stream: in a graph as well, whatever became of the other part.
#[tokio::test]
async fn untracked_beside_a_frozen_part() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut own = stream.full(2 * LEN, 1.0f32).queued()?;
    let _frozen = own.split_off(LEN)?.freeze().await?;
    stream.synchronize()?;
    let state = (kernels::scale::load(&device).await?, Mutex::new(own));
    let graph = device.graph::<(Out<f32>,), _, _>(state, |q, (scale, own), (mut y,)| {
        let mut own = own.lock().unwrap();
        for _ in 0..2 {
            // SAFETY: one stream has all uses, and each launch is awaited.
            scale.launch(q, 2.0, &mut unsafe { own.view_mut().untracked() })?;
        }
        // SAFETY: as above.
        q.copy(&unsafe { own.view().untracked() }, &mut y)
    });
    let (mut y, mut seen) = (stream.zeros::<f32>(LEN).queued()?, Vec::new());
    for _ in 0..3 {
        graph.launch(&stream, (&mut y,)).await?;
        seen.push(stream.download(&y).await?[0]);
    }
    let dot = graph.dot();
    assert!(dot.contains("n0 -> n1") && dot.contains("n1 -> n2"), "{dot}");
    assert_eq!(seen, [4.0, 16.0, 64.0]);
    Ok(())
}

// ---- when the closure runs ----------------------------------------------------------------------

struct Counted {
    axpy: kernels::axpy,
    scale: kernels::scale,
    runs: std::sync::Arc<std::sync::atomic::AtomicUsize>,
}

type Pair = (In<f32>, InOut<f32>, f32);

/// `y = 2 (y + a x)`, and how often the closure ran.
fn counted(device: &Device) -> (Graph<Pair>, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    let runs = std::sync::Arc::<std::sync::atomic::AtomicUsize>::default();
    let state = Counted {
        axpy: kernels::axpy::load_blocking(device).unwrap(),
        scale: kernels::scale::load_blocking(device).unwrap(),
        runs: runs.clone(),
    };
    let graph =
        device.graph::<Pair, _, _>(state, |q, Counted { axpy, scale, runs }, (x, mut y, a)| {
            runs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            axpy.launch(q, a, &x, &mut y)?;
            scale.launch(q, 2.0, &mut y)
        });
    (graph, runs)
}

#[tokio::test]
async fn the_closure_runs_for_what_is_new() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let (graph, runs) = counted(&device);
    let ran = || runs.load(std::sync::atomic::Ordering::Relaxed);
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    for _ in 0..3 {
        graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    }
    assert_eq!((ran(), stream.download(&y).await?[0]), (1, 14.0));
    // Another value, another buffer, another length; the last ones again; another stream.
    graph.launch(&stream, (&x, &mut y, 0.0)).await?;
    let mut z = stream.full(LEN, 0.0f32).queued()?;
    graph.launch(&stream, (&x, &mut z, 0.0)).await?;
    graph.launch(&stream, (&x.slice(..4)?, &mut z.slice_mut(..4)?, 1.0)).await?;
    graph.launch(&stream, (&x.slice(..4)?, &mut z.slice_mut(..4)?, 1.0)).await?;
    assert_eq!(ran(), 4);
    graph.clone().launch(&other, (&x, &mut z, 1.0)).await?;
    graph.launch(&stream, (&x.slice(..4)?, &mut z.slice_mut(..4)?, 1.0)).await?;
    assert_eq!(ran(), 5);
    assert_eq!(stream.download(&z).await?[..5], [30.0, 30.0, 30.0, 30.0, 2.0]);
    let report = graph.report();
    assert_eq!((report.compiled, report.replayed, report.refused), (2, 7, 0), "{report:?}");
    // The value; one address of each; nothing but lengths, grids, and values.
    assert_eq!(report.nodes_set, 1 + 2 + 2, "{report:?}");
    let dot = graph.dot();
    assert_eq!((dot.matches(" -> ").count(), dot.matches("axpy").count()), (2, 2), "{dot}");
    // In a batch it is an operation like any other.
    let fresh = stream.batch(|q| {
        let mut fresh = q.full(LEN, 1.0f32)?;
        graph.launch(q, (&x, &mut fresh, 2.0))?;
        q.download(&fresh)
    });
    assert_eq!(fresh.await?, [6.0; LEN]);
    Ok(())
}

/// Mapped memory for a slot; the default stream; the time that it took.
#[tokio::test]
async fn wherever_a_launch_goes() -> Result<()> {
    let device = testing::device();
    let (graph, _) = counted(&device);
    let stream = device.stream()?;
    let mut request = stream.pinned::<f32>(LEN)?;
    request.fill(3.0);
    let (x, mut y) = (request.into_mapped(), stream.full(LEN, 1.0f32).queued()?);
    graph.launch(&stream, (&x, &mut y, 2.0)).await?;
    let mut answer = stream.pinned::<f32>(LEN)?.into_mapped();
    stream.fill(&mut answer, 0.0).queued()?;
    graph.launch(&stream, (&y, &mut answer, 1.0)).queued()?;
    assert_eq!(*answer.host().await?, [28.0; LEN]);
    let default = device.default_stream();
    for _ in 0..2 {
        graph.launch(default, (&x, &mut y, 0.0)).await?;
    }
    let ((), _time) = stream.timed(|q| graph.launch(q, (&x, &mut y, 0.0))).await?;
    assert_eq!(device.download(&y).await?, [14.0 * 8.0; LEN]);
    Ok(())
}

/// Its own memory comes back where it was, so that only what changed is set.
#[tokio::test]
async fn temporaries_come_back_where_they_were() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let kernels = (kernels::fill::load(&device).await?, kernels::axpy::load(&device).await?);
    let graph = device.graph::<(InOut<f32>, f32), _, _>(kernels, |q, (fill, axpy), (mut y, a)| {
        for value in [a, 10.0, 100.0] {
            let mut part = q.empty(LEN)?;
            fill.launch(q, value, &mut part)?;
            axpy.launch(q, 1.0, &part, &mut y)?;
        }
        Ok(())
    });
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    for round in 0..6 {
        graph.launch(&stream, (&mut y, round as f32)).await?;
    }
    assert_eq!(stream.download(&y).await?, [15.0 + 6.0 * 110.0; LEN]);
    let report = graph.report();
    assert_eq!((report.compiled, report.replayed, report.nodes_set), (1, 5, 5), "{report:?}");
    Ok(())
}

#[tokio::test]
async fn a_graph_is_ordered_with_other_streams() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let (graph, _) = counted(&device);
    let (mut x, mut y) = (other.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    for round in 0..2 {
        // Its input comes from there, its output is read there.
        let gate = Gate::close(&other)?;
        other.fill(&mut x, 3.0).queued()?;
        let op = graph.launch(&stream, (&x, &mut y, 1.0));
        assert!(!op.is_complete());
        let seen = other.download(&y);
        gate.open();
        assert_eq!(seen.await?, [[6.0; LEN], [18.0; LEN]][round]);
        op.await?;
    }
    Ok(())
}

/// The list that a launch of the graph ends is the last to keep the memory of a dropped buffer.
#[tokio::test]
async fn a_graph_ends_the_list_of_a_replay() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (graph, _) = counted(&device);
    let axpy = kernels::axpy::load(&device).await?;
    let x = stream.full(LEN, 1.0f32).queued()?;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    axpy.launch(&stream, 0.0, &x, &mut y).await?;
    let mut region = Region::new();
    let mut wanted = 0.0;
    for _ in 0..3 {
        let replayed = stream.replay(&mut region, |q| {
            let through = q.full(LEN, 3.0f32)?;
            axpy.launch(q, 1.0, &through, &mut y)?;
            drop(through);
            graph.launch(q, (&x, &mut y, 1.0))
        });
        replayed.await?;
        wanted = 2.0 * (wanted + 3.0) + 2.0;
        assert_eq!(stream.download(&y).await?, [wanted; LEN]);
    }
    Ok(())
}

/// A graph on each of two devices, launched together, with what the second needs of the first copied between them: nothing is
/// waited for but the end.
#[tokio::test]
async fn graphs_of_two_devices_are_launched_together() -> Result<()> {
    let devices = [testing::device(), testing::peer_device()];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let graphs = [counted(&devices[0]).0, counted(&devices[1]).0];
    let x = streams[0].full(LEN, 1.0f32).queued()?;
    let mut y = streams[0].full(LEN, 0.0f32).queued()?;
    let (mut inbox, mut z) =
        (streams[1].empty(LEN).queued()?, streams[1].full(LEN, 0.0f32).queued()?);
    let mut wanted = (0.0, 0.0);
    for _ in 0..10 {
        // Slow, so that whoever does not wait reads what was there before.
        let gate = Gate::close(&streams[0])?;
        let first = graphs[0].launch(&streams[0], (&x, &mut y, 1.0));
        streams[1].copy(&y, &mut inbox).queued()?;
        let second = graphs[1].launch(&streams[1], (&inbox, &mut z, 1.0));
        gate.open();
        futures::try_join!(first, second)?;
        wanted.0 = 2.0 * wanted.0 + 2.0;
        wanted.1 = 2.0 * (wanted.1 + wanted.0);
        assert_eq!(streams[0].download(&y).await?, [wanted.0; LEN]);
        assert_eq!(streams[1].download(&z).await?, [wanted.1; LEN]);
    }
    let reports = [graphs[0].report(), graphs[1].report()];
    assert!(
        reports.iter().all(|report| (report.compiled, report.replayed) == (1, 9)),
        "{reports:?}"
    );
    Ok(())
}

// ---- what it keeps ------------------------------------------------------------------------------

#[tokio::test]
async fn what_was_passed_is_not_kept() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (graph, _) = counted(&device);
    let x = stream.full(LEN, 1.0f32).queued()?;
    let before = device.memory()?.used_bytes;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    drop(y);
    eventually("it is freed", || device.memory().is_ok_and(|now| now.used_bytes == before));
    // At the same address, most likely, and another buffer all the same.
    let mut z = stream.full(LEN, 5.0f32).queued()?;
    graph.launch(&stream, (&x, &mut z, 1.0)).await?;
    assert_eq!(stream.download(&z).await?, [12.0; LEN]);
    Ok(())
}

/// What the graph owns stays until its last launch is complete, and goes then.
#[tokio::test]
async fn a_graph_goes_while_it_runs() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = kernels::axpy::load(&device).await?;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    let before = device.memory()?.used_bytes;
    let weights = stream.full(LEN, 2.0f32).queued()?;
    let fill = kernels::fill::load(&device).await?;
    let graph = device.graph::<(InOut<f32>,), _, _>(
        (axpy, fill, weights),
        |q, (axpy, fill, weights), (mut y,)| {
            let mut fresh = q.empty(LEN)?;
            fill.launch(q, 1.0, &mut fresh)?;
            axpy.launch(q, 3.0, weights, &mut fresh)?;
            axpy.launch(q, 1.0, &fresh, &mut y)
        },
    );
    graph.launch(&stream, (&mut y,)).await?;
    let gate = Gate::close(&stream)?;
    let ops = [graph.launch(&stream, (&mut y,)), graph.clone().launch(&stream, (&mut y,))];
    drop(graph);
    // Who gets memory now gets none of the graph's before that is complete.
    let others = device.stream()?;
    let other = others.full(LEN, 100.0f32);
    gate.open();
    let other = other.await?;
    for op in ops {
        op.await?;
    }
    assert_eq!(stream.download(&y).await?, [21.0; LEN]);
    assert_eq!(others.download(&other).await?, [100.0; LEN]);
    drop(other);
    eventually("its memory is freed", || device.memory().is_ok_and(|now| now.used_bytes == before));
    Ok(())
}

/// Its memory keeps no stream open that nobody else has.
#[tokio::test]
async fn streams_that_go_take_what_they_had() -> Result<()> {
    const STREAMS: usize = 40;
    let device = testing::device();
    let kept = device.stream()?;
    let graph = device.graph::<(InOut<f32>,), _, _>((), |q, (), (mut y,)| {
        let (a, b) = (q.full(LEN, 5.0f32)?, q.zeros::<f32>(LEN)?);
        drop(b);
        q.copy(&a, &mut y)
    });
    let mut y = kept.full(LEN, 0.0f32).queued()?;
    for _ in 0..STREAMS {
        graph.launch(&kept, (&mut y,)).queued()?;
        let stream = device.stream()?;
        graph.launch(&stream, (&mut y,)).await?;
    }
    assert_eq!(kept.download(&y).await?, [5.0; LEN]);
    // Those of the last go when another one comes.
    eventually("they go", || {
        let stream = device.stream().unwrap();
        graph.launch(&stream, (&mut y,)).synchronize().unwrap();
        let stats = device.stats();
        stats.graphs <= 4 && stats.streams <= 6 && stats.allocations <= 12
    });
    Ok(())
}

/// Streams go when nobody has them but a graph and a region, complete, and take what was compiled for them.
#[tokio::test]
async fn streams_go_without_another_launch() -> Result<()> {
    const STREAMS: usize = 10;
    let device = testing::device();
    let kept = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let graph = device.graph::<(InOut<f32>,), _, _>(scale.clone(), |q, scale, (mut y,)| {
        let mut a = q.full(LEN, 5.0f32)?;
        scale.launch(q, 1.0, &mut a)?;
        q.copy(&a, &mut y)
    });
    let (mut region, mut y) = (Region::new(), kept.full(LEN, 0.0f32).queued()?);
    scale.launch(&kept, 1.0, &mut y).await?;
    let before = device.stats();
    let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<Stream>>>()?;
    for stream in &streams {
        graph.launch(stream, (&mut y,)).queued()?;
        for _ in 0..3 {
            let twice = stream.replay(&mut region, |q| {
                scale.launch(q, 1.0, &mut y)?;
                scale.launch(q, 1.0, &mut y)
            });
            twice.queued()?;
        }
    }
    kept.download(&y).await?;
    assert_eq!(device.stats().graphs, 2 * STREAMS as u64);
    let gate = Gate::close(&streams[0])?;
    graph.launch(&streams[0], (&mut y,)).queued()?;
    drop(streams);
    gate.open();
    drop(gate);
    assert_eq!(kept.download(&y).await?, [5.0; LEN]);
    eventually("they go", || {
        let now = device.stats();
        now.graphs == 0 && now.streams == before.streams && now.allocations == before.allocations
    });
    // It computes the same on another one.
    let stream = device.stream()?;
    kept.fill(&mut y, 0.0).queued()?;
    graph.launch(&stream, (&mut y,)).await?;
    assert_eq!(kept.download(&y).await?, [5.0; LEN]);
    Ok(())
}

/// Of what the queue of a stream holds.
#[tokio::test]
async fn a_launch_is_one_command() -> Result<()> {
    const NODES: usize = 10;
    const LAUNCHES: u64 = 400;
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let graph = device.graph::<(InOut<f32>,), _, _>(scale.clone(), |q, scale, (mut y,)| {
        (0..NODES).try_for_each(|_| scale.launch(q, 1.0, &mut y))
    });
    let (mut region, mut y) = (Region::new(), stream.full(LEN, 2.0f32).queued()?);
    let each = |region: &mut Region, y: &mut DeviceBuffer<f32>| {
        stream.replay(region, |q| (0..NODES).try_for_each(|_| scale.launch(q, 1.0, y)))
    };
    for _ in 0..3 {
        graph.launch(&stream, (&mut y,)).await?;
        each(&mut region, &mut y).await?;
    }
    let gate = Gate::close_for(&stream, SOON)?;
    let before = stream.submitted();
    for _ in 0..LAUNCHES {
        graph.launch(&stream, (&mut y,)).queued()?;
        each(&mut region, &mut y).queued()?;
    }
    assert!(!gate.timed_out(), "the queue is full");
    assert_eq!(stream.submitted() - before, 2 * LAUNCHES);
    assert!(stream.backlog() >= 2 * LAUNCHES);
    gate.open();
    assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    Ok(())
}

/// The state may be what keeps something else that the launches use.
#[tokio::test]
async fn the_state_stays_until_the_launches_are_complete() -> Result<()> {
    struct State(std::sync::mpsc::Sender<()>, kernels::fill);
    impl Drop for State {
        fn drop(&mut self) {
            self.0.send(()).ok();
            panic!("in the state's drop");
        }
    }
    // Compiled; refused before, and refused in the launch that is under way.
    for (refused, refused_now) in [(false, false), (true, false), (false, true)] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let (dropped, is_dropped) = std::sync::mpsc::channel();
        let state = State(dropped, kernels::fill::load(&device).await?);
        let graph = device.graph::<(InOut<f32>,), _, _>(Mutex::new(state), |q, state, (mut y,)| {
            state.lock().unwrap().1.launch(q, 1.0, &mut y)
        });
        let mut y = stream.full(LEN, 0.0f32).queued()?;
        if refused || refused_now {
            handle.fail_nth(gpu_await::testing::DriverCall::GraphCompile, 1, ErrorKind::Driver);
        }
        if !refused_now {
            graph.launch(&stream, (&mut y,)).await?;
        }
        let gate = Gate::close(&stream)?;
        let op = graph.launch(&stream, (&mut y,)).submitted()?;
        drop(graph);
        stream.wait(&stream).queued()?;
        device.stream()?.done().await?;
        assert!(is_dropped.try_recv().is_err(), "a launch is under way");
        gate.open();
        op.await?;
        is_dropped.recv_timeout(SOON).expect("it goes");
    }
    Ok(())
}

/// Where nothing may be submitted, and no driver call made.
#[tokio::test]
async fn a_graph_is_dropped_by_a_host_function() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let before = device.memory()?.used_bytes;
    let kernels = (kernels::fill::load(&device).await?, kernels::axpy::load(&device).await?);
    let weights = stream.full(LEN, 2.0f32).queued()?;
    let state = (kernels, weights);
    let graph =
        device.graph::<(InOut<f32>,), _, _>(state, |q, ((fill, axpy), weights), (mut y,)| {
            let mut part = q.empty(LEN)?;
            fill.launch(q, 1.0, &mut part)?;
            axpy.launch(q, 1.0, weights, &mut part)?;
            axpy.launch(q, 1.0, &part, &mut y)
        });
    let mut region = Region::new();
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    for _ in 0..3 {
        let op = stream.replay(&mut region, |q| {
            let ((fill, axpy), mut part) = (kernels_of(&device)?, q.empty(LEN)?);
            fill.launch(q, 1.0, &mut part)?;
            axpy.launch(q, 1.0, &part, &mut y)
        });
        op.await?;
        graph.launch(&stream, (&mut y,)).await?;
    }
    assert_eq!(stream.download(&y).await?, [12.0; LEN]);
    drop(y);
    stream.host_fn(move || drop((graph, region))).await?;
    eventually("the graphs go", || device.stats().graphs == 0);
    eventually("their memory goes", || device.memory().is_ok_and(|now| now.used_bytes == before));
    Ok(())
}

fn kernels_of(device: &Device) -> Result<(kernels::fill, kernels::axpy)> {
    Ok((kernels::fill::load_blocking(device)?, kernels::axpy::load_blocking(device)?))
}

/// A buffer of a graph's that got out of it is memory that its launches use: nobody gets it for anything that is not ordered
/// with them.
#[tokio::test]
async fn memory_of_a_graph_is_ordered_wherever_it_is() -> Result<()> {
    static OUT: Mutex<Vec<DeviceBuffer<f32>>> = Mutex::new(Vec::new());
    static MAPPED: Mutex<Option<Mapped<f32>>> = Mutex::new(None);
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let state = (
        scale,
        Mutex::new(Some(stream.full(LEN, 1.0f32).queued()?)),
        Mutex::new(Some(stream.full(LEN, 1.0f32).queued()?)),
        Mutex::new(Some(stream.pinned::<f32>(LEN)?.into_mapped())),
    );
    let graph = device.graph::<(), _, _>(state, |q, (scale, a, b, mapped), ()| {
        for buffer in [a, b] {
            let mut buffer = buffer.lock().unwrap();
            scale.launch(q, 2.0, buffer.as_mut().expect("it ran once"))?;
            OUT.lock().unwrap().extend(buffer.take());
        }
        let mut mapped = mapped.lock().unwrap();
        scale.launch(q, 2.0, mapped.as_mut().expect("it ran once"))?;
        *MAPPED.lock().unwrap() = mapped.take();
        Ok(())
    });
    graph.launch(&stream, ()).await?;
    let (a, mut b) = {
        let mut out = OUT.lock().unwrap();
        (out.remove(0), out.remove(0))
    };
    let mut mapped = MAPPED.lock().unwrap().take().unwrap();
    let Refused { error: frozen, value: a } = a.freeze().accepted().map(drop).unwrap_err();
    assert!(matches!(frozen.detail(), ErrorDetail::KeptByGraph { .. }), "{frozen}");
    assert_eq!(*stream.download(&a.expect("it comes back")).await?, [2.0; LEN]);
    let host = mapped.host().await.unwrap_err();
    assert!(matches!(host.detail(), ErrorDetail::KeptByGraph { op: "host" }), "{host}");
    // SAFETY: refused.
    let lent = unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut b)) }.map(drop);
    let lent = lent.unwrap_err();
    assert!(matches!(lent.detail(), ErrorDetail::KeptByGraph { .. }), "{lent}");
    let released = b.into_dlpack(&[LEN], DlpackConsumer::Synchronized).map(drop).unwrap_err();
    assert!(matches!(released.error.detail(), ErrorDetail::KeptByGraph { .. }), "{released}");
    graph.launch(&stream, ()).await?;
    drop(graph);
    assert_eq!(*mapped.host().await?, [0.0; LEN]);
    Ok(())
}

// ---- what it refuses ----------------------------------------------------------------------------

#[tokio::test]
async fn what_is_no_part_of_a_graph() -> Result<()> {
    type Body = fn(&Queue<'_>, &mut ViewMut<'_, f32>) -> Result<()>;
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    let bodies: [Body; 6] = [
        |q, _| Ok(q.upload(vec![1.0f32]).map(drop)?),
        |q, y| q.download(&*y).map(drop),
        |q, _| q.host_fn(|| ()).map(drop),
        |q, _| q.record_timed().map(drop),
        // SAFETY: it is refused.
        |q, y| unsafe {
            q.enqueue(Uses::new("theirs").updates(y), |_, _| Ok::<_, gpu_await::Error>(()))
        },
        |_, _| panic!("in the closure"),
    ];
    for body in bodies {
        let graph = device.graph::<(InOut<f32>,), _, _>(body, |q, body, (mut y,)| body(q, &mut y));
        let launched = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            graph.launch(&stream, (&mut y,))
        }));
        let Ok(op) = launched else { continue };
        let error = op.await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::NotInGraph { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        // What it would have written counts as failed.
        assert!(matches!(
            stream.download(&y).await.unwrap_err().detail(),
            ErrorDetail::Upstream { .. }
        ));
        stream.fill(&mut y, 1.0).queued()?;
    }
    assert_eq!(stream.download(&y).await?, [1.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_with_a_launch() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (graph, _) = counted(&device);
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 1.0f32).queued()?);
    // The kernels' own conditions, of what is passed.
    let error = graph.launch(&stream, (&x.slice(..3)?, &mut y, 1.0)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Precondition { .. }), "{error}");
    assert!(matches!(
        stream.download(&y).await.unwrap_err().detail(),
        ErrorDetail::Upstream { .. }
    ));
    // Another one after that, into memory whose contents failed: it reads them.
    let error = graph.launch(&stream, (&x, &mut y, 1.0)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    stream.fill(&mut y, 1.0).queued()?;
    graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    assert_eq!(stream.download(&y).await?, [4.0; LEN]);
    // Memory that nobody wrote is read; overwritten as a whole it may be passed.
    let mut unwritten = stream.empty::<f32>(LEN).queued()?;
    let error = graph.launch(&stream, (&x, &mut unwritten, 1.0)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
    let fill = kernels::fill::load(&device).await?;
    let whole = device.graph::<(Out<f32>, usize), _, _>(fill, |q, fill, (mut y, len)| {
        fill.launch(q, 7.0, &mut y.slice_mut(..len)?)
    });
    let mut unwritten = stream.empty::<f32>(LEN).queued()?;
    whole.launch(&stream, (&mut unwritten, 4)).await?;
    let rest = stream.download(&unwritten).await.unwrap_err();
    assert!(matches!(rest.detail(), ErrorDetail::Unwritten { .. }), "{rest}");
    assert_eq!(stream.download(&unwritten.slice(..4)?).await?, [7.0; 4]);
    whole.launch(&stream, (&mut unwritten, LEN)).await?;
    assert_eq!(stream.download(&unwritten).await?, [7.0; LEN]);
    // Another device's buffers, and stream.
    let peer = testing::peer_device();
    let there = peer.stream()?;
    let theirs = there.full(LEN, 1.0f32).queued()?;
    let error = graph.launch(&stream, (&theirs, &mut y, 1.0)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    let error = graph.launch(&there, (&x, &mut y, 1.0)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

/// A graph in its own closure, on a queue that is no graph's.
#[tokio::test]
async fn a_graph_inside_itself() -> Result<()> {
    type Own = (Graph<(InOut<f32>,)>, Stream);
    static SELF: Mutex<Option<Own>> = Mutex::new(None);
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let graph = device.graph::<(InOut<f32>,), _, _>(scale, |q, scale, (mut y,)| {
        let own = SELF.lock().unwrap().take();
        if let Some((graph, stream)) = own {
            let on_queue = graph.launch(q, (&mut y,)).unwrap_err();
            assert!(matches!(on_queue.detail(), ErrorDetail::NotInGraph { .. }), "{on_queue}");
            // On a stream it is any other launch, and the closure runs once more.
            stream.fill(&mut y, 1.0).queued()?;
            graph.launch(&stream, (&mut y,)).queued()?;
        }
        scale.launch(q, 3.0, &mut y)
    });
    *SELF.lock().unwrap() = Some((graph.clone(), stream.clone()));
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    graph.launch(&stream, (&mut y,)).await?;
    assert_eq!(stream.download(&y).await?, [9.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn the_end_of_a_device() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let (graph, _) = counted(&device);
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 1.0f32).queued()?);
    graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    handle.lose_device("test");
    let error = graph.launch(&stream, (&x, &mut y, 1.0)).await.unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    drop(graph);
    let device = Device::host();
    let stream = device.stream()?;
    let (graph, _) = counted(&device);
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 1.0f32).queued()?);
    graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    device.close(Duration::from_secs(10)).await?;
    let error = graph.launch(&stream, (&x, &mut y, 1.0)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    Ok(())
}

/// Whatever the driver refuses of compiling and setting, a launch computes what it should.
#[tokio::test]
async fn refused_graphs_are_launched_one_by_one() -> Result<()> {
    use gpu_await::testing::DriverCall::{GraphCompile, GraphLaunch, GraphSet, Launch};
    for (call, nth) in [(GraphCompile, 1), (GraphSet, 1), (GraphSet, 3)] {
        for after_effect in [false, true] {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream()?;
            let (graph, _) = counted(&device);
            if after_effect {
                handle.fail_nth_after_effect(call, nth, ErrorKind::Driver);
            } else {
                handle.fail_nth(call, nth, ErrorKind::Driver);
            }
            let (x, mut y) =
                (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
            let mut expected = 0.0;
            for round in 0..12 {
                let a = (round / 2 % 3) as f32;
                graph.launch(&stream, (&x, &mut y, a)).await?;
                expected = (expected + a) * 2.0;
                assert_eq!(stream.download(&y).await?, [expected; LEN], "{call:?}, round {round}");
            }
            let report = graph.report();
            assert_eq!(report.refused, 1, "{call:?}: {report:?}");
        }
    }
    // Launches that are refused are errors, and what they would have written is not there.
    for call in [GraphLaunch, Launch] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let (graph, _) = counted(&device);
        let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
        if call == Launch {
            handle.fail_nth(GraphCompile, 1, ErrorKind::Driver);
            handle.fail_nth(Launch, 2, ErrorKind::Driver);
        } else {
            handle.fail_nth(GraphLaunch, 1, ErrorKind::Driver);
        }
        graph.launch(&stream, (&x, &mut y, 1.0)).await.unwrap_err();
        let error = stream.download(&y).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        stream.fill(&mut y, 1.0).queued()?;
        graph.launch(&stream, (&x, &mut y, 1.0)).await?;
        assert_eq!(stream.download(&y).await?, [4.0; LEN]);
    }
    Ok(())
}

/// From many threads, on a few streams.
#[test]
fn many_threads_launch_one_graph() -> Result<()> {
    let device = testing::device();
    let streams = [device.stream()?, device.stream()?];
    let (graph, _) = counted(&device);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (graph, stream) = (graph.clone(), &streams[thread % 2]);
            scope.spawn(move || {
                let x = stream.full(LEN, 1.0f32).queued().unwrap();
                let mut y = stream.full(LEN, 0.0f32).queued().unwrap();
                let mut expected = 0.0;
                for round in 0..50 {
                    let a = ((round + thread) % 3) as f32;
                    graph.launch(stream, (&x, &mut y, a)).queued().unwrap();
                    expected = (expected + a) * 2.0;
                    if round % 8 == 7 {
                        stream.fill(&mut y, 0.0).queued().unwrap();
                        expected = 0.0;
                    }
                }
                assert_eq!(block_on(stream.download(&y)).unwrap(), [expected; LEN]);
            });
        }
    });
    Ok(())
}

/// What is passed is the caller's, whatever the closure writes about it, and may be lent meanwhile.
#[test]
fn what_was_passed_is_in_no_graph() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(In<f32>, InOut<f32>, f32), _, _>(
        (axpy, other),
        |q, (axpy, other), (x, mut y, a)| {
            axpy.launch(q, a, &x, &mut y)?;
            // SAFETY: nobody uses it.
            let loan = unsafe { other.lend_memory(Uses::new("theirs").reads(&x)) }?;
            loan.end()
        },
    );
    let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 1.0f32).queued()?);
    for a in 0..3_u8 {
        graph.launch(&stream, (&x, &mut y, f32::from(a))).synchronize()?;
    }
    assert_eq!(*stream.download(&y).synchronize()?, [4.0; LEN]);
    Ok(())
}

/// A graph keeps the part of a buffer that it uses, and no more.
#[tokio::test]
async fn the_other_part_is_in_no_graph() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut kept = stream.full(2 * LEN, 1.0f32).queued()?;
    let mut other = kept.split_off(LEN)?;
    let out = Arc::new(Mutex::new(None));
    let state = (scale, Mutex::new(Some(kept)), out.clone());
    let graph = device.graph::<(), _, _>(state, |q, (scale, kept, out), ()| {
        let mut kept = kept.lock().unwrap().take().expect("it runs once");
        scale.launch(q, 2.0, &mut kept)?;
        *out.lock().unwrap() = Some(kept);
        Ok(())
    });
    graph.launch(&stream, ()).await?;
    // SAFETY: nobody uses it.
    unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut other)) }?.end()?;
    let other = other.freeze().await?;
    assert_eq!(*stream.download(&other).await?, [1.0; LEN]);
    let kept = out.lock().unwrap().take().expect("the closure ran");
    let Refused { error, value: kept } = kept.freeze().accepted().map(drop).unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::KeptByGraph { .. }), "{error}");
    drop(graph);
    kept.expect("it comes back").freeze().await.map(drop)
}

/// A closure that goes on behind a launch that failed runs in the next launch as well, and that one fails again.
#[test]
fn a_failure_that_the_closure_ignores_is_one_of_each_launch() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(In<f32>, InOut<f32>, InOut<f32>), _, _>(
        axpy,
        |q, axpy, (x, mut y, mut z)| {
            drop(axpy.launch(q, 1.0, &x.slice(1..)?, &mut z));
            axpy.launch(q, 1.0, &x, &mut y)
        },
    );
    let x = stream.full(LEN, 1.0f32).queued()?;
    let (mut y, mut z) = (stream.full(LEN, 0.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    for launch in 1..4_u8 {
        stream.fill(&mut z, 5.0).queued()?;
        graph.launch(&stream, (&x, &mut y, &mut z)).queued()?;
        assert_eq!(*stream.download(&y).synchronize()?, [f32::from(launch); LEN]);
        let error = stream.download(&z).synchronize().unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{launch}: {error}");
    }
    Ok(())
}

/// What a refused call was to write is not what the rest of the list makes of it.
#[test]
fn a_failure_that_the_closure_ignores_fails_a_list_that_uses_its_output() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(In<f32>, InOut<f32>, Out<f32>, u32), _, _>(
        axpy,
        |q, axpy, (x, mut y, mut z, way)| {
            q.fill(&mut z, 1.0)?;
            drop(axpy.launch(q, 1.0, &x.slice(1..)?, &mut z));
            if way == 0 { axpy.launch(q, 1.0, &z, &mut y) } else { Ok(()) }
        },
    );
    let x = stream.full(LEN, 1.0f32).queued()?;
    let (mut y, mut z) = (stream.full(LEN, 0.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
    for way in [0, 1, 1, 0] {
        let error = graph.launch(&stream, (&x, &mut y, &mut z, way)).queued().unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        assert!(stream.download(&z).synchronize().is_err());
        assert!(stream.download(&y).synchronize().is_err());
        stream.fill(&mut y, 0.0).queued()?;
        stream.fill(&mut z, 0.0).queued()?;
    }
    assert_eq!(graph.report().failed, 4);
    Ok(())
}

fn own_error() -> Error {
    let cause = ForeignError::from(Arc::new(std::fmt::Error));
    ErrorDetail::Foreign { op: "the closure".into(), cause }.into()
}

/// The next launch is what its closure writes, and not what was compiled before the one that failed.
#[test]
fn a_failing_closure_leaves_nothing_of_its_list() -> Result<()> {
    let device = testing::device();
    let streams = [device.stream()?, device.stream()?];
    let scale = kernels::scale::load_blocking(&device)?;
    let graph =
        device.graph::<(InOut<f32>, u32, u32), _, _>(scale, |q, scale, (mut y, way, fails)| {
            match way {
                0 => scale.launch(q, 2.0, &mut y)?,
                _ => q.fill(&mut y, 7.0)?,
            }
            if fails == 1 { Err(own_error()) } else { Ok(()) }
        });
    for stream in streams {
        let mut y = stream.full(LEN, 1.0f32).queued()?;
        let mut other = stream.full(LEN, 1.0f32).queued()?;
        graph.launch(&stream, (&mut other, 0, 0)).queued()?;
        graph.launch(&stream, (&mut y, 1, 1)).queued().unwrap_err();
        stream.fill(&mut y, 1.0).queued()?;
        graph.launch(&stream, (&mut y, 1, 0)).queued()?;
        assert_eq!(stream.download(&y).synchronize()?, [7.0; LEN]);
        assert_eq!(stream.download(&other).synchronize()?, [2.0; LEN]);
    }
    Ok(())
}

#[tokio::test]
async fn a_graph_without_nodes_needs_its_device() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let graph = device.graph::<(u32,), _, _>((), |_, (), _| Ok(()));
    graph.launch(&stream, (1,)).await?;
    device.close(SOON).await?;
    for value in [1, 2] {
        let error = graph.launch(&stream, (value,)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Closed { .. }), "{error}");
    }
    Ok(())
}

/// Nor does one that fails beside another launch take that one's place.
#[test]
fn a_failing_closure_leaves_the_launch_beside_it_alone() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    for is_compiled in [false, true] {
        let meet = Arc::new(Barrier::new(2));
        let state =
            (kernels::scale::load_blocking(&device)?, kernels::fill::load_blocking(&device)?);
        let graph = device.graph::<(InOut<f32>, f32), _, _>(
            (state, meet.clone()),
            |q, ((scale, fill), meet), (mut y, a)| {
                if a != 99.0 {
                    return scale.launch(q, a, &mut y);
                }
                fill.launch(q, 99.0, &mut y)?;
                meet.wait();
                meet.wait();
                Err(own_error())
            },
        );
        let mut x = stream.full(LEN, 1.0f32).queued()?;
        let mut y = stream.full(LEN, 1.0f32).queued()?;
        if is_compiled {
            graph.launch(&stream, (&mut x, 1.0)).queued()?;
        }
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| graph.launch(&stream, (&mut x, 99.0)).queued());
            meet.wait();
            let launched = graph.launch(&stream, (&mut y, 2.0)).queued();
            meet.wait();
            failing.join().expect("no panic").unwrap_err();
            launched
        })?;
        stream.fill(&mut x, 1.0).queued()?;
        graph.launch(&stream, (&mut y, 2.0)).queued()?;
        assert_eq!(stream.download(&y).synchronize()?, [4.0; LEN], "{is_compiled}");
        assert_eq!(stream.download(&x).synchronize()?, [1.0; LEN], "{is_compiled}");
    }
    Ok(())
}

/// What a run left that failed or was interrupted is drawn without edges, which it has not.
#[test]
fn what_is_not_finished_has_no_edges() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = kernels::axpy::load_blocking(&device)?;
    let scale = kernels::scale::load_blocking(&device)?;
    let state = (axpy, scale.clone());
    let graph = device.graph::<(In<f32>, InOut<f32>, u32), _, _>(
        state,
        |q, (axpy, scale), (x, mut y, way)| {
            if way == 1 {
                scale.launch(q, 2.0, &mut y)?;
                return axpy.launch(q, 1.0, &x.slice(1..)?, &mut y);
            }
            (0..3).try_for_each(|_| axpy.launch(q, 1.0, &x, &mut y))
        },
    );
    let x = stream.full(LEN, 1.0f32).queued()?;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    graph.launch(&stream, (&x, &mut y, 0)).queued()?;
    assert_eq!(graph.dot().matches("->").count(), 2);
    graph.launch(&stream, (&x, &mut y, 1)).queued().unwrap_err();
    assert_eq!(graph.dot().matches("->").count(), 0);
    let mut region = Region::new();
    for way in [0, 0, 1, 0, 0] {
        let mut z = stream.full(LEN, 0.0f32).queued()?;
        stream
            .replay(&mut region, |q| {
                scale.launch(q, 2.0, &mut z)?;
                if way == 1 {
                    stream.fill(&mut y, 0.0).queued()?;
                    return Ok(());
                }
                (0..3).try_for_each(|_| scale.launch(q, 2.0, &mut z))
            })
            .queued()?;
        assert!(region.dot().matches("->").count() <= 3);
    }
    Ok(())
}

/// All that was passed to be written, and not only what the launches touch.
#[test]
fn a_failed_launch_fails_what_was_passed() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(In<f32>, InOut<f32>), _, _>(axpy, |q, axpy, (x, mut y)| {
        axpy.launch(q, 1.0, &x, &mut y.slice_mut(..LEN / 2)?)
    });
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    let written = stream.full(LEN / 2, 0.0f32).queued()?;
    for is_drawn in [false, true] {
        if is_drawn {
            graph.launch(&stream, (&written, &mut y)).queued()?;
        }
        let unwritten = stream.empty::<f32>(LEN / 2).queued()?;
        graph.launch(&stream, (&unwritten, &mut y)).queued().unwrap_err();
        for part in [..LEN / 2, ..LEN] {
            let part = y.slice(part.end - LEN / 2..part.end)?;
            assert!(stream.download(&part).synchronize().is_err());
        }
        stream.fill(&mut y, 0.0).queued()?;
    }
    Ok(())
}

/// A launch that is refused leaves the compiled graph with other arguments than those it was refused for: the next one with the
/// same sets them. Refused for its data, or by the driver, wherever that is asked.
#[test]
fn a_refused_launch_leaves_what_was_set() {
    type Slots = (In<f32>, InOut<f32>, f32);
    use DriverCall as Call;
    let driver = [
        Call::GraphCompile,
        Call::GraphSet,
        Call::GraphLaunch,
        Call::Launch,
        Call::Alloc,
        Call::StreamWaitEvent,
        Call::EventRecord,
        Call::EventCreate,
    ];
    let refusals: Vec<Option<(Call, u64, bool)>> = driver
        .into_iter()
        .flat_map(|call| {
            (1..4).flat_map(move |nth| [false, true].map(|after| Some((call, nth, after))))
        })
        .chain([None])
        .collect();
    let mut refused = 0;
    for has_temporary in [false, true] {
        for refusal in &refusals {
            for retries in [1, 2] {
                let (faults, handle) = testing::faults();
                let device = testing::host_with(faults);
                let axpy = kernels::axpy::load_blocking(&device).unwrap();
                let graph: Graph<Slots> = if has_temporary {
                    device.graph::<Slots, _, _>(axpy, |q, axpy, (x, mut y, a)| {
                        let mut through = q.zeros::<f32>(x.len())?;
                        axpy.launch(q, a, &x, &mut through)?;
                        axpy.launch(q, 1.0, &through, &mut y)
                    })
                } else {
                    device.graph::<Slots, _, _>(axpy, |q, axpy, (x, mut y, a)| {
                        axpy.launch(q, a, &x, &mut y)
                    })
                };
                let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
                let x = stream.full(8, 1.0f32).queued().unwrap();
                let mut first = stream.full(8, 0.0f32).queued().unwrap();
                let mut second = match refusal {
                    // Memory that nothing wrote.
                    None => stream.empty::<f32>(8).queued().unwrap(),
                    Some(_) => stream.full(8, 0.0f32).queued().unwrap(),
                };
                graph.launch(&stream, (&x, &mut first, 3.0)).synchronize().unwrap();
                if let Some((call, nth, after)) = *refusal {
                    // Something to wait for, in front.
                    other.fill(&mut second, 0.0).queued().unwrap();
                    match after {
                        true => handle.fail_nth_after_effect(call, nth, ErrorKind::Driver),
                        false => handle.fail_nth(call, nth, ErrorKind::Driver),
                    }
                }
                for _ in 0..retries {
                    let launched = graph.launch(&stream, (&x, &mut second, 3.0)).synchronize();
                    refused += u32::from(launched.is_err());
                    while stream.fill(&mut second, 0.0).synchronize().is_err() {}
                }
                // One more may be refused: the n-th call was not reached before.
                while graph.launch(&stream, (&x, &mut second, 3.0)).synchronize().is_err() {
                    while stream.fill(&mut second, 0.0).synchronize().is_err() {}
                }
                let what = format!("temporary {has_temporary}, {refusal:?}, {retries}");
                for y in [&first, &second] {
                    let found = (0..3).find_map(|_| stream.download(y).synchronize().ok());
                    assert_eq!(found.expect(&what)[..], [3.0; 8], "{what}");
                }
            }
        }
    }
    assert!(refused > 30, "{refused}");
}

#[tokio::test]
async fn what_is_told_of_kept_pinned_memory() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mapped = Arc::new(Mutex::new(Some(stream.pinned::<f32>(LEN)?.into_mapped())));
    let graph = device.graph::<(f32,), _, _>(mapped.clone(), |q, mapped, (value,)| {
        q.fill(mapped.lock().unwrap().as_mut().unwrap(), value)
    });
    graph.launch(&stream, (2.0,)).await?;
    let mapped = mapped.lock().unwrap().take().unwrap();
    let error = mapped.into_pinned().await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::KeptByGraph { op: "into_pinned" }), "{error}");
    Ok(())
}

/// Each launch is counted once, those of which nothing was submitted among the failed.
#[tokio::test]
async fn launches_that_are_refused_are_counted() -> Result<()> {
    let device = testing::device();
    let (stream, elsewhere) = (device.stream()?, Device::host().stream()?);
    let graph =
        device.graph::<(In<f32>, InOut<f32>), _, _>((), |q, (), (x, mut y)| q.copy(&x, &mut y));
    let (x, mut y) = (stream.zeros::<f32>(4).queued()?, stream.zeros::<f32>(5).queued()?);
    for _ in 0..3 {
        stream.fill(&mut y, 0.0).queued()?;
        graph.launch(&stream, (&x, &mut y)).await.expect_err("another length");
    }
    let (far, mut far_too) =
        (elsewhere.zeros::<f32>(4).queued()?, elsewhere.zeros::<f32>(4).queued()?);
    graph.launch(&elsewhere, (&far, &mut far_too)).await.expect_err("another device");
    assert_eq!(graph.report().failed, 4, "{:?}", graph.report());
    Ok(())
}
