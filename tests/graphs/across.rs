//! Graphs of two devices: what they compute beside a model, how they are ordered with other work, and what becomes of them when one of the
//! devices goes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, ErrorKind, Graph, InOut, Queue, Result, Stream, ViewMut,
    kernels,
};
use tokio::time::timeout;

use crate::SOON;
use crate::under_test::cases;
use crate::under_test::random::Random;

const LEN: usize = 16;
/// Buffers of a device.
const HERE: usize = 3;
const ALL: usize = 2 * HERE;

type Slots = (InOut<f32>, InOut<f32>, InOut<f32>, InOut<f32>, InOut<f32>, InOut<f32>, u32);

/// Buffers by their numbers: those of the first device come first. All but a copy is done by the device of the buffer that is written.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// `y += a x`, of one device.
    Axpy {
        a: f32,
        x: usize,
        y: usize,
    },
    Scale {
        a: f32,
        x: usize,
    },
    /// Of `len` elements from `start` on.
    Fill {
        value: f32,
        x: usize,
        start: usize,
        len: usize,
    },
    /// Of as many; of either device.
    Copy {
        from: usize,
        to: usize,
        start: usize,
        at: usize,
        len: usize,
    },
    /// Memory of the closure's: `y += a`.
    Through {
        a: f32,
        y: usize,
    },
}

impl Step {
    fn any(random: &mut Random) -> Step {
        let (x, a) = (random.below(ALL), 1.0 + random.below(2) as f32);
        let len = 1 + random.below(LEN);
        let (start, at) = (random.below(LEN - len + 1), random.below(LEN - len + 1));
        let beside =
            |random: &mut Random| x / HERE * HERE + (x + 1 + random.below(HERE - 1)) % HERE;
        match random.below(6) {
            0 | 1 => Step::Axpy { a, x, y: beside(random) },
            2 => Step::Scale { a, x },
            3 => Step::Fill { value: a, x, start, len },
            4 => Step::Copy { from: x, to: (x + 1 + random.below(ALL - 1)) % ALL, start, at, len },
            _ => Step::Through { a, y: x },
        }
    }

    /// Another one of the same shape.
    fn changed(self, random: &mut Random) -> Step {
        let new = 1.0 + random.below(2) as f32;
        match self {
            Step::Axpy { x, y, .. } => Step::Axpy { a: new, x, y },
            Step::Scale { x, .. } => Step::Scale { a: new, x },
            Step::Fill { x, start, len, .. } => Step::Fill { value: new, x, start, len },
            Step::Through { y, .. } => Step::Through { a: new, y },
            Step::Copy { .. } => self,
        }
    }

    fn write(
        self,
        queues: [&Queue<'_>; 2],
        kernels: &[(kernels::axpy, kernels::scale); 2],
        buffers: &mut [ViewMut<'_, f32>; ALL],
    ) -> Result<()> {
        match self {
            Step::Axpy { a, x, y } => {
                let [from, to] = buffers.get_disjoint_mut([x, y]).expect("two of them");
                kernels[y / HERE].0.launch(queues[y / HERE], a, &*from, to)
            }
            Step::Scale { a, x } => {
                kernels[x / HERE].1.launch(queues[x / HERE], a, &mut buffers[x])
            }
            Step::Fill { value, x, start, len } => {
                queues[x / HERE].fill(&mut buffers[x].slice_mut(start..start + len)?, value)
            }
            Step::Copy { from, to, start, at, len } => {
                let [source, target] = buffers.get_disjoint_mut([from, to]).expect("two of them");
                let source = source.slice(start..start + len)?;
                queues[to / HERE].copy(&source, &mut target.slice_mut(at..at + len)?)
            }
            Step::Through { a, y } => {
                let (queue, (axpy, _)) = (queues[y / HERE], &kernels[y / HERE]);
                let ones = queue.full(LEN, 1.0f32)?;
                axpy.launch(queue, a, &ones, &mut buffers[y])
            }
        }
    }

    fn compute(self, buffers: &mut [[f32; LEN]; ALL]) {
        match self {
            Step::Axpy { a, x, y } => {
                let from = buffers[x];
                buffers[y].iter_mut().zip(from).for_each(|(y, x)| *y += a * x);
            }
            Step::Scale { a, x } => buffers[x].iter_mut().for_each(|x| *x *= a),
            Step::Fill { value, x, start, len } => buffers[x][start..start + len].fill(value),
            Step::Copy { from, to, start, at, len } => {
                let source = buffers[from];
                buffers[to][at..at + len].copy_from_slice(&source[start..start + len]);
            }
            Step::Through { a, y } => buffers[y].iter_mut().for_each(|y| *y += a),
        }
    }
}

type Program = Arc<Mutex<Vec<Step>>>;

/// A graph of both devices that does what the program says.
async fn of_both(devices: &[Device; 2]) -> Result<(Graph<Slots>, Program)> {
    let program = Program::default();
    let load = async |device| {
        Ok::<_, gpu_await::Error>((
            kernels::axpy::load(device).await?,
            kernels::scale::load(device).await?,
        ))
    };
    let kernels = [load(&devices[0]).await?, load(&devices[1]).await?];
    let graph = devices[0].graph_across::<Slots, _, _, 1>(
        [&devices[1]],
        (kernels, Arc::clone(&program)),
        |q, [other], (kernels, program), (a, b, c, d, e, f, _)| {
            let mut buffers = [a, b, c, d, e, f];
            let steps = program.lock().unwrap_or_else(PoisonError::into_inner).clone();
            steps.into_iter().try_for_each(|step| step.write([q, other], kernels, &mut buffers))
        },
    );
    Ok((graph, program))
}

fn set(program: &Program, steps: Vec<Step>) {
    *program.lock().unwrap_or_else(PoisonError::into_inner) = steps;
}

fn launch(
    graph: &Graph<Slots>,
    stream: &Stream,
    buffers: &mut [DeviceBuffer<f32>],
    number: u32,
) -> gpu_await::Op<()> {
    let [a, b, c, d, e, f] = buffers else { unreachable!("as many as slots") };
    graph.launch(stream, (a, b, c, d, e, f, number))
}

/// Values from 1 on, by buffer and element.
fn first_values() -> [[f32; LEN]; ALL] {
    std::array::from_fn(|buffer| std::array::from_fn(|i| (1 + (buffer + i) % 5) as f32))
}

/// Half of the launches have the shape of the one before. Each begins behind work of both devices that nobody waited for, and its results
/// are read by each.
#[tokio::test]
async fn random_programs_of_two_devices_beside_a_model() -> Result<()> {
    let devices = [testing::device(), testing::peer_device()];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let (graph, program) = of_both(&devices).await?;
    let mut random = Random(0x5EED_0D1E);
    let mut buffers = Vec::new();
    for number in 0..ALL {
        buffers.push(streams[number / HERE].zeros(LEN).queued()?);
    }
    let mut steps: Vec<Step> = Vec::new();
    let programs = cases::config(200).cases;
    for number in 0..programs {
        steps = match random.below(2) {
            0 if !steps.is_empty() => steps.iter().map(|step| step.changed(&mut random)).collect(),
            _ => (0..1 + random.below(12)).map(|_| Step::any(&mut random)).collect(),
        };
        let mut wanted = first_values();
        for (at, values) in wanted.iter().enumerate() {
            let values = streams[at / HERE].upload(values.to_vec()).queued()?;
            streams[at / HERE].copy(&values, &mut buffers[at]).queued()?;
        }
        set(&program, steps.clone());
        let launched = launch(&graph, &streams[0], &mut buffers, number);
        steps.iter().for_each(|step| step.compute(&mut wanted));
        let mut found = Vec::new();
        for (at, buffer) in buffers.iter().enumerate() {
            found.push(streams[at / HERE].download(buffer));
        }
        launched.await?;
        for (at, found) in found.into_iter().enumerate() {
            assert_eq!(*found.await?, wanted[at], "buffer {at} of program {number}: {steps:?}");
        }
    }
    let report = graph.report();
    assert!(report.replayed > u64::from(programs) / 4 && report.plain == 0, "{report:?}");
    Ok(())
}

/// A halo each way, again and again: nothing is waited for but the end.
#[tokio::test]
async fn what_waits_for_a_graph_of_two_devices_is_behind_all_of_it() -> Result<()> {
    let devices = [testing::device(), testing::peer_device()];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let (graph, program) = of_both(&devices).await?;
    let mut buffers = Vec::new();
    for number in 0..ALL {
        buffers.push(streams[number / HERE].full(LEN, 1.0f32).queued()?);
    }
    let halo = |from, to| Step::Copy { from, to, start: 0, at: LEN / 2, len: LEN / 2 };
    let steps = vec![
        Step::Scale { a: 2.0, x: 0 },
        Step::Scale { a: 2.0, x: HERE },
        halo(0, HERE),
        halo(HERE, 1),
    ];
    set(&program, steps.clone());
    let mut wanted = [[1.0; LEN]; ALL];
    for _ in 0..5 {
        let gate = Gate::close(&streams[1])?;
        // The other device's part waits for this, and with it all of the graph.
        streams[1].fill(&mut buffers[HERE], 1.0).queued()?;
        wanted[HERE] = [1.0; LEN];
        let launched = launch(&graph, &streams[0], &mut buffers, 0);
        let found = streams[1].download(&buffers[HERE]);
        assert!(!streams[0].is_idle(), "it waits");
        gate.open();
        steps.iter().for_each(|step| step.compute(&mut wanted));
        timeout(SOON, launched).await.expect("it ends")?;
        assert_eq!(found.await?, wanted[HERE]);
        assert_eq!(streams[0].download(&buffers[1]).await?, wanted[1]);
    }
    Ok(())
}

#[tokio::test]
async fn a_device_that_goes_takes_the_launch_along() -> Result<()> {
    let (faults, handle) = testing::faults();
    let devices = [Device::host(), testing::host_with(faults)];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let stream = &streams[0];
    let (graph, program) = of_both(&devices).await?;
    let mut buffers = Vec::new();
    for number in 0..ALL {
        buffers.push(streams[number / HERE].full(LEN, 1.0f32).await?);
    }
    set(&program, vec![Step::Scale { a: 2.0, x: 0 }, Step::Scale { a: 2.0, x: HERE }]);
    launch(&graph, stream, &mut buffers, 0).await?;
    let gate = Gate::close(stream)?;
    let held_up = launch(&graph, stream, &mut buffers, 0);
    handle.lose_device("on purpose");
    assert!(streams[1].zeros::<f32>(1).await.unwrap_err().is_device_lost());
    let error = timeout(SOON, held_up).await.expect("it is told").unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::DeviceLost);
    assert!(!error.is_device_lost(), "its own device is well");
    gate.open();
    for number in 1..3 {
        let error = launch(&graph, &devices[0].stream()?, &mut buffers, number).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
    }
    // What is its own device's goes on.
    let other = devices[0].stream()?;
    let free = other.full(LEN, 3.0f32).await?;
    assert_eq!(other.download(&free).await?, [3.0; LEN]);
    Ok(())
}

/// Its nodes may end all the same, and those of the device that is left may have read what the other did not write.
#[tokio::test]
async fn nobody_reads_what_a_launch_wrote_that_lost_a_device() -> Result<()> {
    for is_told in [true, false] {
        let (faults, handle) = testing::faults();
        let devices = [Device::host(), testing::host_with(faults)];
        let streams = [devices[0].stream()?, devices[1].stream()?];
        let (graph, program) = of_both(&devices).await?;
        let mut buffers = Vec::new();
        for number in 0..ALL {
            buffers.push(streams[number / HERE].full(LEN, 1.0f32).await?);
        }
        set(&program, vec![Step::Scale { a: 2.0, x: 0 }]);
        launch(&graph, &streams[0], &mut buffers, 0).await?;
        let gate = Gate::close(&streams[0])?;
        let mut launched = launch(&graph, &streams[0], &mut buffers, 0);
        let (tell, has_run) = std::sync::mpsc::channel();
        streams[0].host_fn(move || tell.send(()).expect("the test waits")).queued()?;
        handle.lose_device("on purpose");
        assert!(streams[1].zeros::<f32>(1).await.unwrap_err().is_device_lost());
        if is_told {
            let told = timeout(SOON, &mut launched).await.expect("it is told").unwrap_err();
            assert!(matches!(told.detail(), ErrorDetail::DependencyLost { .. }), "{told}");
        }
        gate.open();
        has_run.recv_timeout(SOON).expect("it is behind the node, which runs");
        // Asks the device.
        assert!(streams[0].is_idle(), "it is complete or never will be");
        let other = devices[0].stream()?;
        for stream in [&other, &streams[0]] {
            let read = timeout(SOON, stream.download(&buffers[0])).await.expect("it is told");
            let error = read.expect_err("nobody knows whether it is right");
            assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
        }
        if !is_told {
            let told = timeout(SOON, launched).await.expect("it is told").unwrap_err();
            assert!(matches!(told.detail(), ErrorDetail::DependencyLost { .. }), "{told}");
        }
    }
    Ok(())
}

/// Also a launch without a node there, which would run, is refused, and what is behind it is not.
#[tokio::test]
async fn a_device_that_is_gone_refuses_the_next_launch() -> Result<()> {
    for is_lost in [true, false] {
        let (faults, handle) = testing::faults();
        let devices = [Device::host(), testing::host_with(faults)];
        let stream = devices[0].stream()?;
        let there = devices[1].stream()?;
        let (graph, program) = of_both(&devices).await?;
        let mut buffers = Vec::new();
        for number in 0..ALL {
            let on = if number < HERE { &stream } else { &there };
            buffers.push(on.full(LEN, 1.0f32).await?);
        }
        set(&program, vec![Step::Scale { a: 2.0, x: 0 }]);
        for _ in 0..2 {
            launch(&graph, &stream, &mut buffers, 0).await?;
        }
        if is_lost {
            handle.lose_device("on purpose");
            assert!(there.zeros::<f32>(1).await.unwrap_err().is_device_lost());
        } else {
            devices[1].close(SOON).await?;
        }
        let gate = Gate::close(&stream)?;
        let refused = launch(&graph, &stream, &mut buffers, 0);
        let behind = stream.full(LEN, 3.0f32);
        gate.open();
        let error = refused.await.unwrap_err();
        match error.detail() {
            ErrorDetail::DependencyLost { .. } => assert!(is_lost, "{error}"),
            ErrorDetail::Closed { .. } => assert!(!is_lost, "{error}"),
            _ => panic!("{error}"),
        }
        assert_eq!(stream.download(&behind.await?).await?, [3.0; LEN]);
    }
    Ok(())
}

/// Its nodes are work of their devices, whichever stream launched them.
#[tokio::test]
async fn a_close_of_any_device_waits_for_the_launch() -> Result<()> {
    for closed in 0..2 {
        let devices = [testing::device(), testing::peer_device()];
        let streams = [devices[0].stream()?, devices[1].stream()?];
        let (graph, program) = of_both(&devices).await?;
        let mut buffers = Vec::new();
        for number in 0..ALL {
            buffers.push(streams[number / HERE].full(LEN, 1.0f32).await?);
        }
        set(&program, vec![Step::Scale { a: 2.0, x: 0 }, Step::Scale { a: 2.0, x: HERE }]);
        launch(&graph, &streams[0], &mut buffers, 0).await?;
        let gate = Gate::close(&streams[0])?;
        let launch = launch(&graph, &streams[0], &mut buffers, 0);
        let device = &devices[closed];
        assert!(device.stats().in_flight > 0);
        let mut done = device.done();
        let mut close = Box::pin(device.close(SOON));
        assert!(futures::poll!(&mut done).is_pending(), "it is held up");
        assert!(futures::poll!(&mut close).is_pending(), "it is held up");
        let left = device.close(Duration::ZERO).await.unwrap_err();
        let ErrorDetail::TimedOut { left, .. } = left.detail() else { panic!("{left}") };
        assert!(left.operations > 0, "{left:?}");
        gate.open();
        timeout(SOON, launch).await.expect("it is launched")?;
        timeout(SOON, done).await.expect("it is done")?;
        close.await?;
        assert_eq!(device.stats().in_flight, 0);
    }
    Ok(())
}

#[tokio::test]
async fn what_a_graph_of_two_devices_refuses() -> Result<()> {
    let devices = [testing::device(), testing::peer_device()];
    let streams = [devices[0].stream()?, devices[1].stream()?];
    let scale =
        [kernels::scale::load(&devices[0]).await?, kernels::scale::load(&devices[1]).await?];
    let mut x = streams[1].full(LEN, 1.0f32).await?;
    // A kernel, or memory, of the other queue's device.
    let kernel = devices[0].graph_across::<(InOut<f32>,), _, _, 1>(
        [&devices[1]],
        scale[0].clone(),
        |_, [other], scale, (mut x,)| scale.launch(other, 2.0, &mut x),
    );
    let memory = devices[0].graph_across::<(InOut<f32>,), _, _, 1>(
        [&devices[1]],
        scale[0].clone(),
        |q, _, scale, (mut x,)| scale.launch(q, 2.0, &mut x),
    );
    for graph in [kernel, memory] {
        let error = graph.launch(&streams[0], (&mut x,)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
        streams[1].fill(&mut x, 1.0).await?;
    }
    let good = devices[0].graph_across::<(InOut<f32>,), _, _, 1>(
        [&devices[1]],
        scale[1].clone(),
        |_, [other], scale, (mut x,)| scale.launch(other, 2.0, &mut x),
    );
    // It belongs to the first.
    let error = good.launch(&streams[1], (&mut x,)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    streams[1].fill(&mut x, 1.0).await?;
    good.launch(&streams[0], (&mut x,)).await?;
    assert_eq!(streams[1].download(&x).await?, [2.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn what_goes_through_the_host_is_in_no_graph() -> Result<()> {
    let (faults, handle) = testing::faults();
    let devices = [testing::host_with(faults), Device::host()];
    handle.refuse_peers();
    let stream = devices[0].stream()?;
    let graph = devices[0].graph_across::<(InOut<f32>, InOut<f32>), _, _, 1>(
        [&devices[1]],
        (),
        |q, _, (), (mut to, from)| q.copy(&from, &mut to),
    );
    let (mut to, mut from) =
        (stream.zeros::<f32>(LEN).await?, devices[1].stream()?.full(LEN, 1.0f32).await?);
    let error = graph.launch(&stream, (&mut to, &mut from)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::NotInGraph { .. }), "{error}");
    devices[0].close(Duration::from_secs(5)).await
}

#[tokio::test]
async fn a_partition_of_another_device_is_not_left() -> Result<()> {
    let first = Device::host();
    let second = Device::builder().partition(1).host();
    let scale = kernels::scale::load(&second).await?;
    let graph = first.graph_across::<(InOut<f32>,), _, _, 1>(
        [&second],
        scale,
        |_, [other], scale, (mut x,)| scale.launch(other, 2.0, &mut x),
    );
    let mut x = second.stream()?.full(LEN, 1.0f32).await?;
    let error = graph.launch(&first.stream()?, (&mut x,)).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unsupported { .. }), "{error}");
    Ok(())
}
