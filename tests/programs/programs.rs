//! Programs that users would write, small: they must stay this pleasant.
//!
//! On the host device, and on a GPU with `GPU_AWAIT_TEST_DEVICE=cuda:0`. Frames from a socket and a
//! kernel of one's own are the examples `05_frames` and `06_own_kernel`.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceBuffer, ErrorKind, Frozen, Result, Stream, StreamPool, join_all, kernels,
};
use tokio::time::timeout;

/// No test waits longer than this for a device that works.
const SOON: Duration = Duration::from_secs(20);

mod an_inference_service {
    use super::*;

    /// No generics, no lifetimes.
    #[derive(Clone)]
    struct App {
        device: Device,
        pool: StreamPool,
        weights: [Frozen<f32>; 2],
        matmul: kernels::matmul_tiled,
    }

    const WIDTH: usize = 32;

    /// What a web framework would turn into a response.
    #[derive(Debug, PartialEq)]
    struct Status(u16);

    impl<E: Into<gpu_await::Error>> From<E> for Status {
        fn from(error: E) -> Self {
            Status(match error.into().kind() {
                ErrorKind::InvalidCall => 400,
                ErrorKind::Overloaded | ErrorKind::OutOfMemory | ErrorKind::TimedOut => 503,
                _ => 500,
            })
        }
    }

    impl App {
        async fn start(device: Device) -> Result<App> {
            let stream = device.stream()?;
            // Twice and three times the unit matrix.
            let weight = |factor: f32| {
                let unit = |i: usize| if i.is_multiple_of(WIDTH + 1) { factor } else { 0.0 };
                stream.upload((0..WIDTH * WIDTH).map(unit).collect::<Vec<_>>())
            };
            let (two, three) = weight(2.0).and(weight(3.0)).await?;
            let weights = [two.freeze().await?, three.freeze().await?];
            let matmul = kernels::matmul_tiled::load(&device).await?;
            Ok(App { pool: device.streams(2)?, device, weights, matmul })
        }

        async fn infer(self, x: Vec<f32>) -> std::result::Result<Vec<f32>, Status> {
            let acquired = timeout(SOON, self.pool.acquire()).await;
            let stream = acquired.map_err(|_| Status(503))??;
            let y = forward(&stream, &self, x)?;
            let Ok(y) = timeout(SOON, stream.download(&y)).await else { return Err(Status(503)) };
            Ok(y?.to_vec())
        }
    }

    /// A plain function: queues, never waits.
    fn forward(stream: &Stream, app: &App, x: Vec<f32>) -> Result<DeviceBuffer<f32>> {
        let mut h = stream.upload(x).queued()?;
        let width = WIDTH as u32;
        for weight in &app.weights {
            let mut y = stream.empty(WIDTH).queued()?;
            app.matmul.launch(stream, &h, weight, &mut y, 1, width, width).queued()?;
            h = y; // the old one is freed in stream order
        }
        Ok(h)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn answers_many_requests_at_once() {
        let app = App::start(testing::device()).await.unwrap();
        let requests = (0..64).map(|i| tokio::spawn(app.clone().infer(vec![i as f32; WIDTH])));
        for (i, request) in requests.collect::<Vec<_>>().into_iter().enumerate() {
            assert_eq!(request.await.unwrap().unwrap(), [6.0 * i as f32; WIDTH]);
        }
        app.device.close(SOON).await.unwrap();
    }

    #[tokio::test]
    async fn tells_a_bad_request_from_a_closed_device() {
        let app = App::start(testing::device()).await.unwrap();
        assert_eq!(app.clone().infer(vec![1.0; WIDTH + 1]).await, Err(Status(400)));
        assert_eq!(app.clone().infer(vec![1.0; WIDTH]).await, Ok(vec![6.0; WIDTH]));
        app.device.close(SOON).await.unwrap();
        assert_eq!(app.infer(vec![1.0; WIDTH]).await, Err(Status(500)));
    }

    #[tokio::test]
    async fn a_time_out_gives_the_caller_its_answer_back_and_the_device_goes_on() {
        let app = App::start(testing::device()).await.unwrap();
        let stream = app.device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let y = forward(&stream, &app, vec![1.0; WIDTH]).unwrap();
        let too_late = timeout(Duration::from_millis(5), stream.download(&y)).await;
        assert!(too_late.is_err());
        gate.open();
        assert_eq!(stream.download(&y).await.unwrap(), [6.0; WIDTH]);
        assert!(!gate.timed_out());
    }
}

mod several_devices_in_data_parallel {
    use super::*;

    const N: usize = 1000;

    struct Rank {
        stream: Stream,
        step: kernels::axpy,
        accumulate: kernels::axpy,
        x: DeviceBuffer<f32>,
        gradient: DeviceBuffer<f32>,
        inbox: DeviceBuffer<f32>,
    }

    /// A device each; with one GPU they are opened side by side on it.
    async fn rank(index: usize) -> Result<Rank> {
        let device = testing::device();
        let stream = device.stream()?;
        Ok(Rank {
            step: kernels::axpy::load(&device).await?,
            accumulate: kernels::axpy::load(&device).await?,
            x: stream.full(N, index as f32 + 1.0).queued()?,
            gradient: stream.zeros(N).queued()?,
            inbox: stream.empty(N).queued()?,
            stream,
        })
    }

    #[tokio::test]
    async fn gradients_are_summed_on_the_root_with_one_host_wait() {
        let mut ranks = [rank(0).await.unwrap(), rank(1).await.unwrap(), rank(2).await.unwrap()];
        all_reduce(&mut ranks).await.unwrap();
        for rank in &ranks {
            let gradient = rank.stream.download(&rank.gradient).await.unwrap();
            assert!(gradient.iter().all(|g| *g == 2.0 * (1.0 + 2.0 + 3.0)), "{}", gradient[0]);
        }
    }

    async fn all_reduce(ranks: &mut [Rank]) -> Result<()> {
        for r in ranks.iter_mut() {
            r.step.launch(&r.stream, 2.0, &r.x, &mut r.gradient).queued()?;
        }
        let (root, rest) = ranks.split_first_mut().expect("at least one");
        for r in rest.iter() {
            // No host wait anywhere: order across devices is the library's.
            root.stream.copy(&r.gradient, &mut root.inbox).queued()?;
            root.accumulate.launch(&root.stream, 1.0, &root.inbox, &mut root.gradient).queued()?;
        }
        for r in rest.iter_mut() {
            r.stream.copy(&root.gradient, &mut r.gradient).queued()?;
        }
        let done = join_all(ranks.iter().map(|r| r.stream.done()));
        timeout(SOON, done).await.expect("in time").map(drop)
    }

    #[tokio::test]
    async fn a_launch_takes_only_memory_of_its_own_device() {
        let (a, mut b) = (rank(0).await.unwrap(), rank(1).await.unwrap());
        let launch = b.step.launch(&b.stream, 1.0, &a.x, &mut b.gradient);
        let error = launch.queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        assert!(error.to_string().contains("belongs to"), "{error}");
    }
}

mod coming_from_warp_or_pytorch {
    use super::*;

    const N: usize = 10_000;

    #[tokio::test]
    async fn streams_events_waits_and_times() {
        let device = testing::device();
        let (s1, s2) = (device.stream().unwrap(), device.stream().unwrap());
        let axpy = kernels::axpy::load(&device).await.unwrap();
        let spin = kernels::spin::load(&device).await.unwrap();
        let x = device.default_stream().upload(vec![1f32; N]).queued().unwrap();
        let mut y = s1.zeros::<f32>(N).queued().unwrap();
        let mut z = s2.zeros::<f32>(N).queued().unwrap();

        let op = s1.timed(|s| {
            spin.launch(s, 2_000_000)?;
            axpy.launch(s, 2.0, &x, &mut y)
        });
        let ((), device_time) = op.await.unwrap();
        assert!(device_time >= Duration::from_millis(2), "{device_time:?}");

        let t0 = s2.record_timed().unwrap();
        spin.launch(&s2, 3_000_000).queued().unwrap();
        axpy.launch(&s2, 2.0, &y, &mut z).queued().unwrap();
        let t1 = s2.record_timed().unwrap();
        // `wait_stream` and `wait_event` are one verb; an operation is a mark as well.
        s1.wait(&s2).queued().unwrap();
        s1.wait(&t1).queued().unwrap();
        s1.wait(&s2.done()).queued().unwrap();
        assert_eq!(s1.download(&z).await.unwrap()[N - 1], 4.0);
        t1.done().await.unwrap();
        let elapsed = t1.elapsed_since(&t0).unwrap();
        assert!(elapsed >= Duration::from_millis(3), "{elapsed:?}");
    }

    #[tokio::test]
    async fn a_wait_orders_host_functions_of_two_streams() {
        let device = testing::device();
        let (s1, s2) = (device.stream().unwrap(), device.stream().unwrap());
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let push = |stream: &Stream, what: &'static str| {
            let order = order.clone();
            stream.host_fn(move || order.lock().unwrap().push(what))
        };
        let gate = Gate::close(&s1).unwrap();
        push(&s1, "first").queued().unwrap();
        s2.wait(&s1).queued().unwrap();
        let mut second = push(&s2, "second");
        assert!(timeout(Duration::from_millis(50), &mut second).await.is_err(), "it did not wait");
        gate.open();
        timeout(SOON, second).await.expect("in time").unwrap();
        assert_eq!(*order.lock().unwrap(), ["first", "second"]);
    }

    /// `synchronize` blocks a thread: not from async code.
    #[test]
    fn the_blocking_style_works_without_a_runtime() {
        let device = testing::device();
        let axpy = futures::executor::block_on(kernels::axpy::load(&device)).unwrap();
        let stream = device.default_stream();
        let x = stream.upload([1f32, 2.0, 3.0]).queued().unwrap();
        let mut y = stream.ones::<f32>(3).queued().unwrap();
        axpy.launch(stream, 10.0, &x, &mut y).queued().unwrap();
        assert_eq!(stream.download_vec(&y).synchronize().unwrap(), [11.0, 21.0, 31.0]);
        device.synchronize().unwrap();
        assert!(stream.is_idle());
    }
}

/// These need no device: the manual and the fault-injecting one are always on the host.
mod a_test_author {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn nothing_runs_before_the_test_steps_and_nothing_is_left_after() {
        let (device, step) = testing::manual();
        let stream = device.stream().unwrap();
        let y = stream.full(4, 1u32).queued().unwrap();
        let mut op = stream.download(&y);
        assert!((&mut op).now_or_never().is_none());
        drop(op);
        drop(y);
        step.run_until_idle();
        let stats = device.stats();
        assert_eq!((stats.in_flight, stats.lent_bytes, stats.allocations), (0, 0, 0), "{stats:?}");
    }

    /// tokio's paused clock jumps when the runtime sees nothing to do; a manual device is stepped,
    /// so the clock moves only when the test says so.
    #[tokio::test(start_paused = true)]
    async fn a_time_out_under_the_paused_clock() {
        let (device, step) = testing::manual();
        let stream = device.stream().unwrap();
        let y = stream.full(4, 1u32).queued().unwrap();
        let mut op = stream.download(&y);
        assert!(timeout(Duration::from_secs(3600), &mut op).await.is_err(), "nobody stepped");
        step.run_until_idle();
        assert_eq!(timeout(Duration::from_secs(3600), op).await.unwrap().unwrap(), [1; 4]);
    }

    #[tokio::test]
    async fn an_allocation_that_fails_twice_is_out_of_memory() {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream().unwrap();
        stream.zeros::<u8>(10).queued().unwrap();
        // Before it gives up the runtime frees what it can and tries once more.
        handle.fail_nth(DriverCall::Alloc, 1, ErrorKind::OutOfMemory);
        handle.fail_nth(DriverCall::Alloc, 2, ErrorKind::OutOfMemory);
        let error = stream.zeros::<u8>(10).queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        stream.zeros::<u8>(10).await.unwrap();
    }

    #[tokio::test]
    async fn a_loss_resolves_what_a_gate_holds() {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let op = stream.done();
        assert!(timeout(Duration::from_millis(5), op).await.is_err());
        let held = stream.done();
        handle.lose_device("test");
        let error = timeout(SOON, held).await.expect("it resolves").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        gate.open();
        assert_eq!(stream.done().await.unwrap_err().kind(), ErrorKind::DeviceLost);
        assert!(timeout(SOON, device.lost()).await.expect("told").is_device_lost());
    }
}
