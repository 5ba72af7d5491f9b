//! The same futures on every executor: nothing here needs tokio, and tokio needs nothing special.
//!
//! One program, [`everything`], is run by each executor to its end, within a time limit. Whatever it
//! waits for with a gate closed is polled by the executor first and completes later, so its waker
//! was used. `ThreadPool` of `futures` is not there: it needs a feature that this crate does not use.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use futures::channel::oneshot;
use futures::future::{self, Either};
use futures::task::SpawnExt;
use futures::{FutureExt, executor};
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, Result, kernels};

/// What a program here takes at most, however slow the machine.
const LIMIT: Duration = Duration::from_secs(60);

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A timer, of a runtime or of nobody's.
#[derive(Clone, Copy)]
struct Sleep(fn(Duration) -> Boxed<()>);

impl Sleep {
    const TOKIO: Sleep = Sleep(|time| Box::pin(tokio::time::sleep(time)));
    const SMOL: Sleep = Sleep(|time| Box::pin(smol::Timer::after(time).map(drop)));
    /// A thread that completes a future.
    const THREAD: Sleep = Sleep(|time| {
        let (sender, receiver) = oneshot::channel();
        std::thread::spawn(move || {
            std::thread::sleep(time);
            sender.send(()).ok();
        });
        Box::pin(receiver.map(drop))
    });
}

#[test]
fn every_future_resolves_in_block_on_of_futures() {
    within(|| executor::block_on(everything(testing::device(), Sleep::THREAD)));
}

#[test]
fn every_future_resolves_in_a_local_pool_of_futures() {
    within(|| {
        let mut pool = executor::LocalPool::new();
        let task = everything(testing::device(), Sleep::THREAD);
        let task = pool.spawner().spawn_with_handle(task).expect("the pool is alive");
        pool.run_until(task)
    });
}

#[test]
fn every_future_resolves_in_block_on_of_smol() {
    within(|| smol::block_on(everything(testing::device(), Sleep::SMOL)));
}

#[test]
fn every_future_resolves_on_the_executor_of_smol() {
    within(|| smol::block_on(smol::spawn(everything(testing::device(), Sleep::SMOL))));
}

#[test]
fn every_future_resolves_on_one_thread_of_tokio() {
    within(|| one_thread().block_on(everything(testing::device(), Sleep::TOKIO)));
}

#[test]
fn every_future_resolves_on_workers_of_tokio() {
    within(|| {
        let runtime = workers();
        let task = runtime.spawn(everything(testing::device(), Sleep::TOKIO));
        runtime.block_on(task).expect("no panic")
    });
}

/// Several tasks of one device at once, each woken for itself.
#[test]
fn many_tasks_resolve_on_the_executor_of_smol() {
    within(|| {
        let device = testing::device();
        let tasks: Vec<_> = (0..32).map(|n| smol::spawn(round_trip(device.clone(), n))).collect();
        tasks.into_iter().try_for_each(smol::block_on)
    });
}

#[test]
fn many_tasks_resolve_on_workers_of_tokio() {
    within(|| {
        let (device, runtime) = (testing::device(), workers());
        let tasks: Vec<_> = (0..32).map(|n| runtime.spawn(round_trip(device.clone(), n))).collect();
        let ended = tasks.into_iter().map(|task| runtime.block_on(task).expect("no panic"));
        ended.collect()
    });
}

/// Tokio is left while smol's executor still has an interest, and the other way round.
#[test]
fn an_op_that_one_executor_polled_resolves_on_another() {
    within(|| {
        let device = testing::device();
        let stream = device.stream()?;
        let x = stream.full(1000, 7u32).queued()?;
        let gate = Gate::close(&stream)?;
        let mut op = stream.download(&x);
        let one = one_thread();
        one.block_on(async { assert!(futures::poll!(&mut op).is_pending()) });
        drop(one);
        smol::block_on(async { assert!(futures::poll!(&mut op).is_pending()) });
        let x = executor::block_on(async {
            let (x, ()) = future::join(op, async { gate.open() }).await;
            x
        })?;
        assert_eq!(x, [7; 1000]);
        Ok(())
    });
}

/// The runtime would start a thread for blocking work: it is given none.
#[test]
fn blocking_work_starts_no_thread_of_the_runtime() {
    within(|| {
        let device = testing::device();
        let started = Arc::new(AtomicUsize::new(0));
        let count = started.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .on_thread_start(move || {
                count.fetch_add(1, Ordering::SeqCst);
            })
            .build()
            .expect("a runtime");
        runtime.block_on(device.pinned_async::<u8>(1 << 20))?.fill(1);
        runtime.block_on(device.trim_pinned(0))?;
        runtime.block_on(device.trim(0))?;
        executor::block_on(device.pinned_async::<u8>(3 << 20))?.fill(1);
        smol::block_on(device.pinned_async::<u8>(5 << 20))?.fill(1);
        assert_eq!(started.load(Ordering::SeqCst), 0);
        Ok(())
    });
}

/// A program that uses each kind of future. Ends with everything given back and the device closed.
async fn everything(device: Device, sleep: Sleep) -> Result<()> {
    round_trip(device.clone(), 1).await?;
    woken(&device).await?;
    joined(&device).await?;
    late(&device, sleep).await?;
    dropped(&device).await?;
    offloaded(&device).await?;
    scoped(&device).await?;
    let end = Instant::now() + LIMIT;
    loop {
        let stats = device.stats();
        if stats.in_flight + stats.lent_bytes + stats.pending_bytes + stats.allocations == 0 {
            break;
        }
        assert!(Instant::now() < end, "never given back: {stats:?}");
        sleep.0(Duration::from_millis(1)).await;
    }
    device.close(LIMIT).await
}

async fn round_trip(device: Device, n: usize) -> Result<()> {
    let (stream, len, a) = (device.stream()?, 100 * n, n as f32);
    let axpy = kernels::axpy::load(&device).await?;
    let x = stream.upload(vec![1.0f32; len]).await?;
    let mut y = stream.full(len, 2.0f32).queued()?;
    axpy.launch(&stream, a, &x, &mut y).await?;
    assert_eq!(stream.download_vec(&y).await?, vec![a + 2.0; len]);
    assert_eq!(stream.host_fn(move || n).await?, n);
    stream.record()?.done().await?;
    stream.throttle(0).await?;
    stream.done().await
}

/// Pending when the executor polls it, and woken.
async fn woken(device: &Device) -> Result<()> {
    let stream = device.stream()?;
    let x = stream.full(1000, 7u32).queued()?;
    let gate = Gate::close(&stream)?;
    let mut op = stream.download(&x);
    let mut polls = 0;
    let counted = future::poll_fn(|cx| {
        polls += 1;
        op.poll_unpin(cx)
    });
    let (x, ()) = future::join(counted, async { gate.open() }).await;
    assert_eq!(x?, [7; 1000]);
    assert!(polls > 1, "it was ready at once, the gate was closed");
    Ok(())
}

async fn joined(device: &Device) -> Result<()> {
    let streams: Vec<_> = (0..4).map(|_| device.stream()).collect::<Result<_>>()?;
    let gate = Gate::close(&streams[2])?;
    let numbers = gpu_await::join_all((0..4).map(|n| streams[n].host_fn(move || n)));
    let done = future::try_join_all(streams.iter().map(|stream| stream.done()));
    let (numbers, done, ()) = future::join3(numbers, done, async { gate.open() }).await;
    assert_eq!(numbers?, [0, 1, 2, 3]);
    assert_eq!(done?.len(), 4);
    device.done().await
}

/// A time-out by `select` against the runtime's timer: the work goes on.
async fn late(device: &Device, sleep: Sleep) -> Result<()> {
    let stream = device.stream()?;
    let x = stream.full(10, 4u8).queued()?;
    let gate = Gate::close(&stream)?;
    let op = stream.download(&x);
    let op = match future::select(op, sleep.0(Duration::from_millis(5))).await {
        Either::Left(_) => panic!("the gate was closed"),
        Either::Right(((), op)) => op,
    };
    gate.open();
    match future::select(op, sleep.0(LIMIT)).await {
        Either::Left((x, _)) => assert_eq!(x?, [4; 10]),
        Either::Right(_) => panic!("it never resolved"),
    }
    Ok(())
}

/// Dropped between a poll and the completion, with all that it uses.
async fn dropped(device: &Device) -> Result<()> {
    let stream = device.stream()?;
    let x = stream.upload(vec![3u32; 5000]).queued()?;
    let gate = Gate::close(&stream)?;
    let mut op = stream.download(&x);
    assert!(futures::poll!(&mut op).is_pending());
    assert!(device.stats().lent_bytes >= 20_000);
    drop((op, x));
    gate.open();
    stream.done().await
}

/// What blocks goes to threads of the crate's own, whatever the executor.
async fn offloaded(device: &Device) -> Result<()> {
    let stream = device.stream()?;
    let mut pinned = device.pinned_async::<u8>(2 << 20).await?;
    pinned.fill(9);
    let x = stream.upload(pinned).queued()?;
    let y = stream.upload_staged(vec![9u8; 5 << 20]).await?;
    let (x, y) = future::try_join(stream.download_staged(&x), stream.download_staged(&y)).await?;
    assert!(x.len() == 2 << 20 && y.len() == 5 << 20);
    assert!(x.iter().chain(&y).all(|byte| *byte == 9));
    device.trim(0).await?;
    device.trim_pinned(0).await?;
    Ok(())
}

/// A scope lasts over waits and is nobody else's.
async fn scoped(device: &Device) -> Result<()> {
    let (a, b) = (device.stream()?, device.stream()?);
    let work = |value: u32| async move {
        let x = device.full(100, value).queued()?;
        device.done().await?;
        let stream = device.current_stream();
        assert_eq!(device.download(&x).await?, [value; 100]);
        Ok::<_, gpu_await::Error>(stream.id())
    };
    let (on_a, on_b) = future::try_join(a.scope(work(1)), b.scope(work(2))).await?;
    assert_eq!((on_a, on_b), (a.id(), b.id()));
    assert_eq!(&device.current_stream(), device.default_stream());
    Ok(())
}

fn one_thread() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn workers() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}

/// Runs a program on a thread of its own: a waker that is lost is a failure, and no hang.
#[track_caller]
fn within(program: impl FnOnce() -> Result<()> + Send + 'static) {
    let (sender, ended) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let result = program();
        sender.send(()).ok();
        result
    });
    // Twice: on a GPU the tests take turns.
    let late = ended.recv_timeout(2 * LIMIT) == Err(RecvTimeoutError::Timeout);
    assert!(!late, "it hangs");
    match thread.join() {
        Ok(result) => result.expect("no error"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
