//! Events in graphs: each launch records them.

use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, ErrorDetail, Event, EventProblem, Graph, InOut, Region, Result, kernels};

const SPIN_NS: u64 = 200_000;
const LEN: usize = 64;

/// Of a chain `record start, spin, record middle, spin, record end`, with how long it spins each time.
struct Timed {
    graph: Graph<(InOut<f32>, u64, u64)>,
    start: Event,
    middle: Event,
    end: Event,
}

async fn timed(device: &Device) -> Result<Timed> {
    let event = || device.event_builder().timed(true).build();
    let (start, middle, end) = (event()?, event()?, event()?);
    let spin = kernels::spin::load(device).await?;
    let state = (spin, [start.clone(), middle.clone(), end.clone()]);
    let graph = device.graph::<(InOut<f32>, u64, u64), _, _>(
        state,
        |q, (spin, [start, middle, end]), (mut y, first, second)| {
            start.record_in(q)?;
            spin.launch(q, first)?;
            middle.record_in(q)?;
            spin.launch(q, second)?;
            end.record_in(q)?;
            q.fill(&mut y, 1.0)
        },
    );
    Ok(Timed { graph, start, middle, end })
}

fn problem(result: Result<Duration>) -> EventProblem {
    match result.expect_err("there is no such time").detail() {
        ErrorDetail::Event { problem, .. } => *problem,
        other => panic!("{other}"),
    }
}

/// The launch of the middle is put on no stream.
#[tokio::test]
async fn each_launch_takes_the_time() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let Timed { graph, start, middle, end } = timed(&device).await?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    assert_eq!(problem(end.elapsed_since(&start)), EventProblem::Unrecorded);
    assert!(end.is_complete(), "never recorded, it has nothing to wait for");
    for (first, second) in [(1, 3), (1, 3), (3, 1), (2, 2)] {
        let gate = Gate::close(&stream)?;
        let op = graph.launch(&stream, (&mut y, first * SPIN_NS, second * SPIN_NS)).submitted()?;
        assert!(!end.is_complete());
        assert_eq!(problem(end.elapsed_since(&start)), EventProblem::Incomplete);
        gate.open();
        op.await?;
        let least = Duration::from_nanos(SPIN_NS * 19 / 20);
        let (before, behind) = (middle.elapsed_since(&start)?, end.elapsed_since(&middle)?);
        assert!(before >= least * first as u32 && behind >= least * second as u32);
        let (first, second) = (before.as_secs_f64(), behind.as_secs_f64());
        let whole = end.elapsed_since(&start)?.as_secs_f64();
        assert!((whole - first - second).abs() < 3e-6, "{whole} = {first} + {second}");
    }
    let report = graph.report();
    assert_eq!((report.compiled, report.replayed, report.refused), (1, 3, 0));
    assert!(graph.dot().contains("record"), "{}", graph.dot());
    Ok(())
}

/// It stands for the whole launch: for who awaits it, and for streams that wait for it.
#[tokio::test]
async fn an_event_of_a_graph_is_waited_for() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    for timed in [false, true] {
        let event = device.event_builder().timed(timed).build()?;
        let graph = device.graph::<(InOut<f32>,), _, _>(event.clone(), |q, event, (mut y,)| {
            event.record_in(q)?;
            q.fill(&mut y, 1.0)
        });
        let mut y = stream.zeros::<f32>(LEN).queued()?;
        for _ in 0..2 {
            let gate = Gate::close(&stream)?;
            graph.launch(&stream, (&mut y,)).queued()?;
            other.wait(&event).queued()?;
            let behind = other.host_fn(|| 5);
            assert!(event.done().now_or_never().is_none() && !other.is_idle());
            gate.open();
            assert_eq!(behind.await?, 5);
            event.done().await?;
            assert!(stream.is_idle());
        }
        // Recorded elsewhere, that is what it stands for; the next launch has it again.
        event.record(&other)?;
        event.done().await?;
        graph.launch(&stream, (&mut y,)).await?;
        assert!(event.is_complete());
    }
    Ok(())
}

/// As on the stream.
#[tokio::test]
async fn an_event_is_recorded_in_a_batch() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let spin = kernels::spin::load(&device).await?;
    let event = |timed| device.event_builder().timed(timed).build();
    let (start, end, mark) = (event(true)?, event(true)?, event(false)?);
    let work = |q: &gpu_await::Queue<'_>| {
        start.record_in(q)?;
        spin.launch(q, SPIN_NS)?;
        end.record_in(q)?;
        mark.record_in(q)
    };
    let mut region = Region::new();
    for round in 0..4 {
        match round % 2 {
            0 => stream.batch(work).await?,
            _ => stream.replay(&mut region, work).await?,
        }
        assert!(end.elapsed_since(&start)? >= Duration::from_nanos(SPIN_NS * 19 / 20));
        assert!(mark.is_complete());
    }
    Ok(())
}

#[tokio::test]
async fn what_no_launch_can_record() -> Result<()> {
    let (device, elsewhere) = (testing::device(), Device::host());
    let stream = device.stream()?;
    let mut y = stream.zeros::<f32>(LEN).queued()?;
    let foreign = elsewhere.event_builder().timed(true).build()?;
    let mut events = vec![(foreign, true)];
    if let Ok(shared) = device.event_builder().interprocess(true).build() {
        events.push((shared, false));
    }
    for (event, is_foreign) in events {
        let graph = device.graph::<(InOut<f32>,), _, _>(event, |q, event, (mut y,)| {
            q.fill(&mut y, 2.0)?;
            event.record_in(q)
        });
        let error = graph.launch(&stream, (&mut y,)).await.unwrap_err();
        match error.detail() {
            ErrorDetail::WrongDevice { .. } => assert!(is_foreign, "{error}"),
            ErrorDetail::NotInGraph { op } => assert!(!is_foreign && &**op == "record", "{error}"),
            other => panic!("{other}"),
        }
        stream.fill(&mut y, 0.0).await?;
    }
    Ok(())
}
