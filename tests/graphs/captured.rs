//! Work of other libraries as a part of graphs: captured once for what is passed, ordered with the launches around it, and
//! what becomes of it when it fails, or is dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceKind, ErrorDetail, ErrorKind, Graph, In, InOut, PinnedBuffer, Queue, RawQueue,
    RawSlice, Result, Uses, View, ViewMut, WorkOutcome, kernels,
};
use proptest::prelude::*;

use crate::under_test::eventually::eventually;

const LEN: usize = 64;
/// The other library's copy: by the driver on a GPU, by a twin on a host device.
fn their_copy(queue: &RawQueue<'_>, from: RawSlice<f32>, to: RawSlice<f32>) -> Result<()> {
    if queue.kind() == DeviceKind::Host {
        return queue.host_each(move || {
            // SAFETY: the stream runs this in an operation that declared it as read.
            let from = unsafe { from.as_slice() };
            // SAFETY: likewise, as written.
            let to = unsafe { to.as_mut_slice() };
            to.copy_from_slice(from);
        });
    }
    let stream = queue.stream() as cudarc::driver::sys::CUstream;
    let (from, to, bytes) = (from.address(), to.address(), to.size_bytes());
    // SAFETY: live ranges of that length, and a live stream.
    unsafe { cudarc::driver::result::memcpy_dtod_async(to, from, bytes, stream) }.expect("a copy");
    Ok(())
}

/// `y = 2 x` and then `y = a y`, the copy by the other library; counts how often the closure ran.
struct Doubled {
    scale: kernels::scale,
    runs: Arc<AtomicUsize>,
}

type Pair = (In<f32>, InOut<f32>, f32);

fn doubled(device: &Device) -> Result<(Graph<Pair>, Arc<AtomicUsize>)> {
    let runs = Arc::new(AtomicUsize::new(0));
    let state = Doubled { scale: kernels::scale::load_blocking(device)?, runs: runs.clone() };
    let graph = device.graph::<Pair, _, _>(state, |q, state, (x, mut y, a)| {
        state.runs.fetch_add(1, Ordering::Relaxed);
        state.scale.launch(q, 5.0, &mut y)?;
        let uses = Uses::new("their copy").reads(&x).writes(&mut y).can_be_captured();
        // SAFETY: the copy reads and writes what is declared, on the stream, and may be repeated.
        unsafe { q.enqueue(uses, |queue, (from, to)| their_copy(queue, from, to)) }?;
        state.scale.launch(q, 2.0, &mut y)?;
        state.scale.launch(q, a, &mut y)
    });
    Ok((graph, runs))
}

#[tokio::test]
async fn it_is_captured_once_for_what_is_passed() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (graph, runs) = doubled(&device)?;
    let mut x = stream.full(LEN, 1.0f32).queued()?;
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    for round in 0..5 {
        stream.fill(&mut x, round as f32).queued()?;
        graph.launch(&stream, (&x, &mut y, 3.0)).await?;
        assert_eq!(stream.download(&y).await?, [6.0 * round as f32; LEN]);
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    let report = graph.report();
    assert_eq!((report.compiled, report.replayed), (1, 4), "{report:?}");
    assert!(graph.dot().contains("their copy"), "{}", graph.dot());
    // Its addresses are part of what was captured.
    let mut z = stream.full(LEN, 0.0f32).queued()?;
    graph.launch(&stream, (&x, &mut z, 3.0)).await?;
    assert_eq!(stream.download(&z).await?, [24.0; LEN]);
    assert_eq!((runs.load(Ordering::Relaxed), graph.report().compiled), (2, 2));
    Ok(())
}

/// Whatever is passed, in whatever order, on two streams.
fn check(device: &Device, launches: &[(usize, usize, u8, bool)]) {
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let (graph, _) = doubled(device).unwrap();
    let mut model: Vec<f32> = (0..4).map(|n| 1.0 + n as f32).collect();
    let fill = |value: &f32| streams[0].full(LEN, *value).queued().unwrap();
    let mut buffers: Vec<_> = model.iter().map(fill).collect();
    for (from, other, a, on_other) in launches {
        let (from, to) = (*from, (from + other) % model.len());
        let a = f32::from(*a) / 2.0;
        let [x, y] = buffers.get_disjoint_mut([from, to]).unwrap();
        graph.launch(&streams[usize::from(*on_other)], (&*x, y, a)).queued().unwrap();
        model[to] = model[from] * 2.0 * a;
    }
    for (buffer, value) in buffers.iter().zip(model) {
        let found = futures::executor::block_on(streams[1].download(buffer)).unwrap();
        assert_eq!(found, [value; LEN]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_passed(launches in prop::collection::vec((0..4_usize, 1..4_usize, 0..5_u8, any::<bool>()), 1..20)) {
        check(&testing::device(), &launches);
    }
}

// ---- what it refuses ----------------------------------------------------------------------------

#[tokio::test]
async fn what_cannot_be_captured() -> Result<()> {
    type Body = fn(&Queue<'_>, &mut ViewMut<'_, f32>, &PinnedBuffer<f32>) -> Result<()>;
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    let bodies: [(Body, ErrorKind); 4] = [
        // Not said to be.
        (
            |q, y, _| {
                let uses = Uses::new("a").updates(y);
                // SAFETY: it puts nothing on the stream.
                unsafe { q.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) }
            },
            ErrorKind::InvalidCall,
        ),
        // Once is not enough; and on a GPU it is no host device.
        (
            |q, y, _| {
                let uses = Uses::new("b").updates(y).can_be_captured();
                // SAFETY: as above.
                unsafe { q.enqueue(uses, |queue, _| queue.host(|| ())) }
            },
            ErrorKind::Unsupported,
        ),
        (
            |q, y, pinned| {
                let uses = Uses::new("c").updates(y).lends(pinned).can_be_captured();
                // SAFETY: as above.
                unsafe { q.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) }
            },
            ErrorKind::InvalidCall,
        ),
        (
            |q, y, _| {
                let uses = Uses::new("d").updates(y).can_be_captured();
                // SAFETY: as above.
                unsafe { q.enqueue(uses, |_, _| Err::<(), _>(std::fmt::Error)) }
            },
            ErrorKind::Foreign,
        ),
    ];
    for (number, (body, kind)) in bodies.into_iter().enumerate() {
        let state = (body, device.pinned::<f32>(3)?);
        let graph = device.graph::<(InOut<f32>,), _, _>(state, |q, (body, pinned), (mut y,)| {
            body(q, &mut y, pinned)
        });
        let error = graph.launch(&stream, (&mut y,)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{number}: {error}");
        let error = stream.download(&y).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{number}: {error}");
        stream.fill(&mut y, 1.0).queued()?;
    }
    assert_eq!(stream.download(&y).await?, [1.0; LEN]);
    Ok(())
}

/// A panic of the closure goes on, and what it would have written is not there. Captures go on working.
#[tokio::test]
async fn a_panic_while_it_is_captured() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    let graph = device.graph::<(InOut<f32>,), _, _>((), |q, (), (mut y,)| {
        let uses = Uses::new("theirs").updates(&mut y).can_be_captured();
        // SAFETY: it puts nothing on the stream.
        unsafe { q.enqueue(uses, |_, _| -> Result<()> { panic!("in their code") }) }
    });
    let launched = catch_unwind(AssertUnwindSafe(|| graph.launch(&stream, (&mut y,))));
    assert!(launched.is_err());
    let error = stream.download(&y).await.unwrap_err();
    assert!(error.to_string().contains("in their code"), "{error}");
    let (graph, _) = doubled(&device)?;
    let x = stream.full(LEN, 1.0f32).queued()?;
    stream.fill(&mut y, 1.0).queued()?;
    graph.launch(&stream, (&x, &mut y, 1.0)).await?;
    assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    Ok(())
}

/// Refused by the driver it is an error, as nothing else can run it, and the next launch tries again.
#[tokio::test]
async fn refusals() -> Result<()> {
    use DriverCall::{Foreign, GraphCapture, GraphCompile, GraphLaunch, GraphSet};
    for call in [GraphCapture, Foreign, GraphCompile, GraphLaunch, GraphSet] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let (graph, _) = doubled(&device)?;
        let (x, mut y) = (stream.full(LEN, 1.0f32).queued()?, stream.full(LEN, 0.0f32).queued()?);
        handle.fail_nth(call, 1, ErrorKind::Driver);
        let launched = graph.launch(&stream, (&x, &mut y, 1.0)).await;
        // A host device launches one by one what it does not compile, and has nothing to set yet.
        assert_eq!(launched.is_ok(), matches!(call, GraphCompile | GraphSet), "{call:?}");
        for a in [2.0, 2.0, 3.0] {
            stream.fill(&mut y, 1.0).queued()?;
            graph.launch(&stream, (&x, &mut y, a)).await?;
            assert_eq!(stream.download(&y).await?, [2.0 * a; LEN], "{call:?}");
        }
    }
    Ok(())
}

// ---- launches that fail -------------------------------------------------------------------------

/// A library that is told of its launches: what it was told, and whether it refuses.
#[derive(Clone, Default)]
struct Library(Arc<Mutex<(Vec<WorkOutcome>, bool)>>);

impl Library {
    fn told(&self) -> Vec<WorkOutcome> {
        self.0.lock().unwrap().0.clone()
    }

    fn refuse(&self, refuses: bool) {
        self.0.lock().unwrap().1 = refuses;
    }

    /// Its copy of `x` to `y`.
    fn copy(&self, q: &Queue<'_>, x: &View<'_, f32>, y: &mut ViewMut<'_, f32>) -> Result<()> {
        let uses = Uses::new("their copy").reads(x).writes(y).can_be_captured();
        let library = self.clone();
        let copy = move |queue: &RawQueue<'_>, (from, to): (RawSlice<f32>, RawSlice<f32>)| {
            queue.each_launch(move |outcome| {
                let (told, refuses) = &mut *library.0.lock().unwrap();
                told.push(outcome);
                if *refuses { Err("their library is down") } else { Ok(()) }
            })?;
            their_copy(queue, from, to)
        };
        // SAFETY: the copy reads and writes what is declared, on the stream, and may be repeated.
        unsafe { q.enqueue(uses, copy) }
    }

    fn graph(&self, device: &Device) -> Graph<(In<f32>, InOut<f32>)> {
        device.graph(self.clone(), |q, library, (x, mut y)| library.copy(q, &x, &mut y))
    }
}

/// A launch that fails late fails alone.
#[tokio::test]
async fn each_launch_has_an_outcome() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let library = Library::default();
    let graph = library.graph(&device);
    let (x, mut y) = (stream.full(LEN, 2.0f32).queued()?, stream.zeros::<f32>(LEN).queued()?);
    graph.launch(&stream, (&x, &mut y)).await?;
    assert!(library.told()[0].is_complete());
    let gate = Gate::close(&stream)?;
    let failed = graph.launch(&stream, (&x, &mut y)).submitted()?;
    let read = other.download(&y).submitted()?;
    let outcome = library.told().pop().expect("told");
    assert!(!outcome.is_complete());
    outcome.fail("nobody sent it");
    gate.open();
    let error = failed.await.unwrap_err();
    assert_eq!(error.detail().to_string(), "their copy: nobody sent it");
    assert!(outcome.is_complete());
    for error in [read.await.unwrap_err(), stream.download(&y).await.unwrap_err()] {
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    }
    stream.fill(&mut y, 0.0).queued()?;
    graph.launch(&stream, (&x, &mut y)).await?;
    // Too late.
    library.told().iter().for_each(|outcome| outcome.fail("late"));
    assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    assert_eq!((library.told().len(), graph.report().compiled), (3, 1));
    Ok(())
}

/// Its peers may wait for it.
#[tokio::test]
async fn a_refused_launch_is_told() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let library = Library::default();
    let graph = library.graph(&device);
    let (mut x, mut y) = (stream.full(LEN, 2.0f32).queued()?, stream.zeros::<f32>(LEN).queued()?);
    let short = stream.zeros::<f32>(1).queued()?;
    // Before it is compiled, and after.
    for round in [0, 2] {
        // What a refused copy would have written counts as failed.
        stream.copy(&short, &mut x).queued().expect_err("it is too short");
        let error = graph.launch(&stream, (&x, &mut y)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        assert_eq!(library.told().len(), round + 1);
        let told = library.told().pop().expect("told");
        assert!(told.failure().is_some_and(|told| told == error), "{error}");
        assert!(told.is_complete(), "it never runs");
        stream.fill(&mut x, 2.0).queued()?;
        graph.launch(&stream, (&x, &mut y)).await?;
        assert_eq!(library.told().len(), round + 2);
        assert!(library.told().pop().expect("told").failure().is_none());
        assert_eq!(stream.download(&y).await?, [2.0; LEN]);
    }
    Ok(())
}

#[tokio::test]
async fn a_library_refuses_a_launch() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let library = Library::default();
    let graph = library.graph(&device);
    let (x, mut y) = (stream.full(LEN, 2.0f32).queued()?, stream.zeros::<f32>(LEN).queued()?);
    // Before it is compiled, and after.
    for round in 1..=2 {
        library.refuse(true);
        let error = graph.launch(&stream, (&x, &mut y)).await.unwrap_err();
        assert_eq!(error.detail().to_string(), "their copy: their library is down");
        assert!(library.told().last().expect("told").is_complete(), "it never runs");
        let error = stream.download(&y).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        library.refuse(false);
        stream.fill(&mut y, 0.0).queued()?;
        graph.launch(&stream, (&x, &mut y)).await?;
        assert_eq!(stream.download(&y).await?, [2.0; LEN]);
        assert_eq!(graph.report().failed, round);
    }
    Ok(())
}

/// Outside of a graph the operation is the one launch.
#[tokio::test]
async fn a_launch_that_is_no_graphs() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let library = Library::default();
    let (x, mut y) = (stream.full(LEN, 2.0f32).queued()?, stream.zeros::<f32>(LEN).queued()?);
    stream.batch(|q| library.copy(q, &x.view(), &mut y.view_mut())).await?;
    assert_eq!(library.told().len(), 1);
    let gate = Gate::close(&stream)?;
    let failed = stream.batch(|q| library.copy(q, &x.view(), &mut y.view_mut())).submitted()?;
    library.told()[1].fail("nobody sent it");
    gate.open();
    assert_eq!(failed.await.unwrap_err().detail().to_string(), "their copy: nobody sent it");
    library.refuse(true);
    let refused = stream.batch(|q| library.copy(q, &x.view(), &mut y.view_mut()));
    assert_eq!(
        refused.await.unwrap_err().detail().to_string(),
        "their copy: their library is down"
    );
    Ok(())
}

// ---- what it keeps ------------------------------------------------------------------------------

/// A value with which nothing is launched.
const REFUSED: f32 = 9.0;

/// Counts its drops; whether its operation began, so that the reaper has it.
struct Kept(Arc<AtomicUsize>, bool);

impl Drop for Kept {
    fn drop(&mut self) {
        if self.1 {
            assert_eq!(std::thread::current().name(), Some("gpu-await-reaper"));
        }
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A graph of an operation that keeps a value for each capture.
fn keeping(device: &Device) -> (Graph<(InOut<f32>, f32)>, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    let graph =
        device.graph::<(InOut<f32>, f32), _, _>(dropped.clone(), |q, dropped, (mut y, a)| {
            let kept = Kept(dropped.clone(), a < REFUSED);
            let uses = Uses::new("theirs").writes(&mut y).keeps(kept).can_be_captured();
            let fill = move |queue: &RawQueue<'_>, (y,): (RawSlice<f32>,)| {
                if queue.kind() != DeviceKind::Host {
                    return Ok(());
                }
                queue.host_each(move || {
                    // SAFETY: the operation declares it as written.
                    let y = unsafe { y.as_mut_slice() };
                    y.fill(a);
                })
            };
            // SAFETY: on a host device it fills what it declares; elsewhere nobody looks.
            unsafe { q.enqueue(uses, fill) }
        });
    (graph, dropped)
}

#[tokio::test]
async fn what_it_keeps_goes_with_the_graph() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (graph, dropped) = keeping(&device);
    let mut y = stream.full(LEN, 0.0f32).queued()?;
    for _ in 0..3 {
        graph.launch(&stream, (&mut y, 1.0)).await?;
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    // Another value is another capture.
    graph.launch(&stream, (&mut y, 2.0)).await?;
    eventually("the first goes", || dropped.load(Ordering::SeqCst) == 1);
    let gate = Gate::close(&stream)?;
    let op = graph.launch(&stream, (&mut y, 2.0)).submitted()?;
    drop(graph);
    assert_eq!(dropped.load(Ordering::SeqCst), 1, "a launch is under way");
    gate.open();
    op.await?;
    eventually("the second goes", || dropped.load(Ordering::SeqCst) == 2);
    Ok(())
}

/// A graph that finds no place is launched one by one: what captured work keeps stays all the same, also if the graph is
/// dropped or written anew behind it.
#[tokio::test]
async fn what_it_keeps_stays_without_a_place() -> Result<()> {
    for dropped_first in [false, true] {
        let device = Device::builder().graph_limit(1).host();
        let (stream, other) = (device.stream()?, device.stream()?);
        let ((holder, held), (graph, dropped)) = (keeping(&device), keeping(&device));
        let mut x = other.full(LEN, 0.0f32).queued()?;
        for _ in 0..2 {
            holder.launch(&other, (&mut x, 1.0)).await?;
        }
        let mut y = stream.full(LEN, 0.0f32).queued()?;
        let gate = Gate::close(&stream)?;
        let op = graph.launch(&stream, (&mut y, 1.0)).submitted()?;
        // Another value is another capture.
        let next = (!dropped_first)
            .then(|| graph.launch(&stream, (&mut y, 2.0)).submitted())
            .transpose()?;
        assert_eq!(graph.report().compiled, 0, "the other has the place");
        drop(graph);
        // What would be dropped is dropped in front of what the other keeps.
        drop(holder);
        eventually("the other's goes", || held.load(Ordering::SeqCst) == 1);
        assert_eq!(dropped.load(Ordering::SeqCst), 0, "a launch is under way");
        gate.open();
        op.await?;
        let mut captures = 1;
        if let Some(next) = next {
            next.await?;
            captures = 2;
        }
        eventually("they go", || dropped.load(Ordering::SeqCst) == captures);
    }
    Ok(())
}

#[tokio::test]
async fn what_it_keeps_goes_with_a_lost_device() -> Result<()> {
    for before in [false, true] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let (graph, dropped) = keeping(&device);
        let mut y = stream.full(LEN, 0.0f32).queued()?;
        graph.launch(&stream, (&mut y, 1.0)).await?;
        if before {
            drop(graph);
            handle.lose_device("on purpose");
        } else {
            handle.lose_device("on purpose");
            graph.launch(&stream, (&mut y, 1.0)).await.unwrap_err();
            graph.launch(&stream, (&mut y, REFUSED)).await.unwrap_err();
            drop(graph);
        }
        drop((y, stream, device));
        let expected = if before { 1 } else { 2 };
        eventually("they go", || dropped.load(Ordering::SeqCst) == expected);
    }
    Ok(())
}
