//! The end: of a device, of a runtime, of the process. What is in flight drains or is left behind, and
//! nothing hangs.

#[cfg(target_os = "linux")]
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::{self, FaultHandle, Gate};
use gpu_await::{
    Completion, Device, DeviceKind, ErrorDetail, ErrorKind, InOut, Loss, Op, PinnedBuffer,
    RawQueue, RawSlice, Stream, Uses, kernels,
};

use crate::under_test::child;
use crate::under_test::host_threads;
use crate::under_test::modes;
use crate::under_test::taken_pool;

fn mode(name: &str) -> Completion {
    *modes::ALL.iter().find(|mode| format!("{mode:?}") == name).expect("a mode's name")
}

fn runtime() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().build().expect("tokio")
}

/// What another thread is taking back, or getting for nobody, is back when the close is over.
#[tokio::test]
async fn close_waits_for_who_takes_memory_back() {
    for round in 0..100 {
        let device = testing::device_with(modes::ALL[round % modes::ALL.len()]);
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<f32>(1000).await.unwrap();
        for _ in 0..8 {
            stream.upload_into(stream.pinned::<f32>(1000).unwrap(), &mut x).abandon();
        }
        let mut staged = Box::pin(stream.upload_staged(vec![1.0f32; 3 << 20]).fuse());
        for _ in 0..round / 4 {
            drop(futures::poll!(&mut staged));
            std::thread::yield_now();
        }
        let mut others = futures::future::join3(
            Box::pin(device.pinned_async::<u8>(3 << 20)),
            Box::pin(device.reserve_partition(1)),
            Box::pin(device.shared::<u8>(1000)),
        );
        drop(futures::poll!(&mut others));
        drop((staged, others));
        device.close(crate::SOON).await.unwrap();
        let stats = device.stats();
        let used =
            (stats.pinned_used_bytes, stats.lent_bytes, stats.partitions, stats.shared_bytes);
        assert_eq!(used, (0, 0, 0, 0), "round {round}");
    }
}

/// What the crate's own threads drop, frozen memory among it, is free when the close is over.
#[test]
fn close_frees_what_the_crate_drops() -> gpu_await::Result<()> {
    let nothing = |_: &RawQueue<'_>, _: (RawSlice<f32>,)| Ok::<_, gpu_await::Error>(());
    for round in 0..400 {
        let device = testing::device_with(modes::ALL[round % modes::ALL.len()]);
        let (stream, other) = (device.stream()?, device.stream()?);
        let fill = || stream.full(1000, 1.0f32).queued();
        let freeze = || block_on(fill()?.freeze());
        let (mut x, mut y) = (fill()?, fill()?);
        match round % 4 {
            // Kept by an operation.
            0 => {
                let uses = Uses::new("kept").updates(&mut x).keeps((freeze()?, fill()?));
                // SAFETY: nothing is put on the stream.
                unsafe { stream.enqueue(uses, nothing) }.queued()?;
            }
            // Kept by the memory of another library, which an operation keeps.
            1 => {
                let memory = vec![1.0f32; 10];
                let (ptr, owner) = (memory.as_ptr() as u64, (memory, freeze()?));
                if device.kind() == DeviceKind::Host {
                    // SAFETY: the owner keeps the memory, and nobody else uses it.
                    let adopted = unsafe { device.adopt_memory::<f32>(ptr, 10, owner) }?;
                    let uses = Uses::new("kept").updates(&mut x).keeps(adopted);
                    // SAFETY: nothing is put on the stream.
                    unsafe { stream.enqueue(uses, nothing) }.queued()?;
                }
            }
            // The state of a graph, and what it left on another stream.
            2 => {
                let axpy = block_on(kernels::axpy::load(&device))?;
                let graph = device.graph::<(InOut<f32>,), _, _>(
                    (axpy, freeze()?),
                    |q, (axpy, weights), (mut y,)| axpy.launch(q, 1.0, weights, &mut y),
                );
                graph.launch(&stream, (&mut y,)).queued()?;
                graph.launch(&other, (&mut x,)).queued()?;
            }
            // By a host function, on the thread of the stream.
            _ => {
                let kept = (freeze()?, fill()?);
                stream.host_fn(move || std::hint::black_box(&kept).0.len()).abandon();
            }
        }
        drop((x, y));
        block_on(device.close(Duration::from_secs(20)))?;
        assert_eq!(device.memory()?.used_bytes, 0, "round {round}: {:?}", device.stats());
    }
    Ok(())
}

/// A download behind a closed gate, polled once, so that the poller has it.
fn pending(device: &Device) -> (Gate, Op<PinnedBuffer<u8>>) {
    let stream = device.stream().expect("a stream");
    let x = stream.full(1 << 16, 1u8).queued().expect("memory");
    let gate = Gate::close(&stream).expect("a gate");
    let mut op = stream.download(&x);
    assert!(op.poll_unpin(&mut Context::from_waker(Waker::noop())).is_pending());
    (gate, op)
}

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn close_waits_for_what_is_in_flight() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let stream = device.stream().unwrap();
        let ran = Arc::new(AtomicU32::new(0));
        let gate = Gate::close(&stream).unwrap();
        for _ in 0..50 {
            let ran = ran.clone();
            let count = move || ran.fetch_add(1, Ordering::SeqCst);
            drop(stream.host_fn(count));
        }
        let opener = device.stream().unwrap();
        let late = opener.host_fn(move || gate.open());
        block_on(device.close(Duration::from_secs(20))).unwrap();
        assert_eq!(ran.load(Ordering::SeqCst), 50, "{mode:?}");
        assert!(late.now_or_never().is_some(), "{mode:?}: it was in flight as well");
        assert_eq!(stream.zeros::<u8>(1).queued().unwrap_err().kind(), ErrorKind::Closed);
    }
}

#[test]
fn close_gives_up_at_its_limit_and_what_the_device_uses_stays() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (gate, op) = pending(&device);
        let start = Instant::now();
        let error = block_on(device.close(Duration::from_millis(20))).unwrap_err();
        let ErrorDetail::TimedOut { what, limit_ms: 20, left } = error.detail() else {
            panic!("{error}")
        };
        assert!(what.starts_with("closing "), "{error}");
        assert!(left.operations >= 1 && left.streams == 1, "{mode:?}: {error}");
        assert_eq!((left.loans, left.permits), (0, 0), "{mode:?}: {error}");
        assert!(start.elapsed() < Duration::from_secs(5), "{mode:?}: {:?}", start.elapsed());
        assert!(device.stats().lent_bytes >= 1 << 16, "{mode:?}: {:?}", device.stats());
        drop(op);
        assert!(device.stats().lent_bytes >= 1 << 16, "{mode:?}: a drop frees nothing in use");
        gate.open();
        wait_until("what was lent comes back when the device is through", || {
            device.stats().lent_bytes == 0 && device.stats().allocations == 0
        });
    }
}

fn assert_timed_out(closed: gpu_await::Result<()>) {
    let error = closed.expect_err("the gate is closed");
    assert!(matches!(error.detail(), ErrorDetail::TimedOut { .. }), "{error}");
}

#[test]
fn close_needs_no_thread_of_the_runtime() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (gate, op) = pending(&device);
        let (runtime, release) = taken_pool::with_taken_pool();
        let start = Instant::now();
        let closed = runtime.block_on(async {
            let close = device.close(Duration::from_millis(200));
            tokio::time::timeout(Duration::from_secs(10), close).await
        });
        let took = start.elapsed();
        assert_timed_out(closed.expect("it returns at its limit"));
        assert!(took >= Duration::from_millis(200), "{mode:?}: {took:?}");
        assert!(took < Duration::from_secs(3), "{mode:?}: {took:?}");
        drop(release);
        gate.open();
        block_on(op).unwrap();
    }
}

#[test]
fn a_close_that_is_given_up_leaves_nothing() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (gate, op) = pending(&device);
        let runtime = runtime();
        let start = Instant::now();
        let given_up = runtime.block_on(async {
            let close = device.close(Duration::from_secs(15));
            tokio::time::timeout(Duration::from_millis(100), close).await
        });
        assert!(given_up.is_err(), "{mode:?}: the gate is closed");
        drop(runtime);
        assert!(start.elapsed() < Duration::from_secs(5), "{mode:?}: {:?}", start.elapsed());
        // Nor does one that is dropped while it has the poller keep its waker.
        let (waker, count) = counting();
        let mut close = Box::pin(device.close(Duration::from_secs(15)));
        assert!(close.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        drop((close, waker));
        assert_eq!(Arc::strong_count(&count), 1, "{mode:?}");
        gate.open();
        block_on(op).unwrap();
        // Again, now that all is complete: at once.
        block_on(device.close(Duration::ZERO)).unwrap();
    }
}

#[test]
fn close_has_no_limit_if_none_is_given() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let (gate, op) = pending(&device);
        let mut close = Box::pin(device.close(Duration::MAX));
        assert!(close.poll_unpin(&mut Context::from_waker(Waker::noop())).is_pending());
        gate.open();
        block_on(close).unwrap();
        assert!(op.is_complete(), "{mode:?}");
    }
}

#[test]
fn two_closes_keep_their_own_limits() {
    let device = testing::device();
    let (gate, op) = pending(&device);
    let runtime = runtime();
    let close = |limit| {
        runtime.spawn({
            let device = device.clone();
            async move { device.close(limit).await }
        })
    };
    let (long, short) = (close(Duration::from_secs(60)), close(Duration::from_millis(50)));
    assert_timed_out(runtime.block_on(short).expect("no panic"));
    assert!(!long.is_finished());
    gate.open();
    runtime.block_on(long).expect("no panic").unwrap();
    block_on(op).unwrap();
    // On another executor.
    let device = testing::device();
    let (gate, op) = pending(&device);
    let close = device.clone();
    let task = smol::spawn(async move { close.close(Duration::from_millis(50)).await });
    assert_timed_out(smol::block_on(task));
    gate.open();
    smol::block_on(device.close(Duration::from_secs(10))).unwrap();
    block_on(op).unwrap();
}

#[test]
fn close_tells_of_a_loss_and_not_of_its_limit() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (gate, op) = pending(&device);
    let mut close = Box::pin(device.close(Duration::from_secs(60)));
    assert!(close.poll_unpin(&mut Context::from_waker(Waker::noop())).is_pending());
    handle.lose_device("a test");
    let start = Instant::now();
    assert!(block_on(close).unwrap_err().is_device_lost());
    // That of a device that is lost waits for no limit.
    assert!(block_on(device.close(Duration::from_secs(60))).unwrap_err().is_device_lost());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    drop((gate, op));
}

/// Also at the end of all time.
#[test]
fn a_close_without_a_limit_waits_for_ever() {
    let (device, step) = testing::manual();
    let op = device.default_stream().host_fn(|| 5);
    step.advance(Duration::MAX);
    let mut close = Box::pin(device.close(Duration::MAX));
    let first = close.as_mut().poll(&mut Context::from_waker(std::task::Waker::noop()));
    assert!(first.is_pending(), "{first:?}");
    step.run_until_idle();
    block_on(close).unwrap();
    assert_eq!(block_on(op).unwrap(), 5);
}

/// The time of a stepped device is that of its steps.
#[test]
fn close_keeps_the_time_of_a_stepped_device() {
    let (device, step) = testing::manual();
    let stream = device.stream().unwrap();
    let op = stream.host_fn(|| 5);
    let (count, woken) = counting();
    let mut close = Box::pin(device.close(Duration::from_millis(200)));
    let poll = |close: &mut std::pin::Pin<Box<_>>| {
        Future::poll(std::pin::Pin::as_mut(close), &mut Context::from_waker(&count))
    };
    assert!(poll(&mut close).is_pending());
    step.advance(Duration::from_millis(199));
    assert!(poll(&mut close).is_pending());
    step.advance(Duration::from_millis(2));
    assert_eq!(woken.load(Ordering::SeqCst), 0, "nobody steps it");
    let std::task::Poll::Ready(closed) = poll(&mut close) else { panic!("its limit is over") };
    assert_timed_out(closed);
    // A step wakes it.
    let mut close = Box::pin(device.close(Duration::from_nanos(500)));
    assert!(poll(&mut close).is_pending());
    assert!(step.step(0));
    assert!(woken.load(Ordering::SeqCst) > 0);
    step.run_until_idle();
    block_on(close).unwrap();
    assert_eq!(block_on(op).unwrap(), 5);
}

/// A waker that counts.
fn counting() -> (Waker, Arc<AtomicU32>) {
    struct Counting(Arc<AtomicU32>);
    impl std::task::Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let woken = Arc::new(AtomicU32::new(0));
    (Waker::from(Arc::new(Counting(woken.clone()))), woken)
}

#[test]
fn a_device_dropped_with_work_in_flight_finishes_it() {
    for mode in modes::ALL {
        let ran = Arc::new(AtomicU32::new(0));
        let gate = {
            let device = testing::device_with(mode);
            let (gate, op) = pending(&device);
            let (stream, count) = (device.stream().unwrap(), ran.clone());
            drop(stream.host_fn(move || count.fetch_add(1, Ordering::SeqCst)));
            drop(op);
            gate
        };
        gate.open();
        wait_until("the work goes on without the device's handle", || {
            // Its own share, and none in a closure.
            ran.load(Ordering::SeqCst) == 1 && Arc::strong_count(&ran) == 1
        });
    }
}

#[test]
fn a_runtime_that_ends_takes_its_futures_and_leaves_the_work() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let stream = device.stream().unwrap();
        let (gate, op) = pending(&device);
        let ran = Arc::new(AtomicU32::new(0));
        let behind = Gate::close(&stream).unwrap();
        let ended = runtime();
        ended.spawn(op);
        for _ in 0..20 {
            let ran = ran.clone();
            ended.spawn(stream.host_fn(move || ran.fetch_add(1, Ordering::SeqCst)));
        }
        let start = Instant::now();
        ended.shutdown_timeout(Duration::from_secs(10));
        assert!(start.elapsed() < Duration::from_secs(5), "{mode:?}: {:?}", start.elapsed());
        assert_eq!(ran.load(Ordering::SeqCst), 0, "{mode:?}: the gate is closed");
        drop((gate, behind));
        // Another runtime goes on with the same streams.
        let other = runtime();
        let sum = other.block_on(async { stream.host_fn(|| 20).await });
        assert_eq!((sum.unwrap(), ran.load(Ordering::SeqCst)), (20, 20), "{mode:?}");
        wait_until("all is given back", || device.stats().lent_bytes == 0);
    }
}

#[test]
fn two_runtimes_use_one_device_at_once() {
    for mode in modes::ALL {
        let device = testing::device_with(mode);
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let runtimes = [runtime(), runtime()];
        let mut tasks = Vec::new();
        for n in 0..100_usize {
            let stream = streams[n % 2].clone();
            // Submitted by one, awaited by the other.
            let op = {
                let _inside = runtimes[n % 2].enter();
                stream.host_fn(move || n)
            };
            tasks.push((n, runtimes[1 - n % 2].spawn(op)));
        }
        for (n, task) in tasks {
            let value = block_on(task);
            assert_eq!(value.expect("no panic").unwrap(), n, "{mode:?}");
        }
    }
}

thread_local! {
    static KEPT: RefCell<Option<Op<PinnedBuffer<u8>>>> = const { RefCell::new(None) };
}

/// Ends the process in one of several ways, with a future pending behind a kernel that does not end
/// for a long time.
fn end_process(way: &str, device: &Device) {
    let (gate, op) = pending(device);
    std::mem::forget(gate);
    match way {
        "leaked" => std::mem::forget(op),
        "dropped" => drop(op),
        "thread_local" => KEPT.with(|kept| *kept.borrow_mut() = Some(op)),
        "awaited" => {
            let runtime = runtime();
            runtime.spawn(op);
            runtime.shutdown_background();
        }
        "blocked" => {
            std::thread::spawn(move || block_on(op));
        }
        "opening" => {
            // What is opened meanwhile is ended as well, or refused.
            std::thread::spawn(|| {
                while let Ok(device) = Device::builder().named("host") {
                    drop(device.stream().map(|stream| stream.host_fn(|| 1).abandon()));
                    std::thread::yield_now();
                }
            });
        }
        "exit" => {
            std::thread::spawn(move || block_on(op));
            std::process::exit(0);
        }
        _ => unreachable!("no such way"),
    }
}

#[test]
fn the_process_exits_whatever_becomes_of_its_futures() {
    const NAME: &str =
        concat!(module_path!(), "::the_process_exits_whatever_becomes_of_its_futures");
    let Some(parameter) = child::parameter() else {
        let ways = ["leaked", "dropped", "thread_local", "awaited", "blocked", "opening", "exit"];
        for (n, way) in ways.into_iter().enumerate() {
            let parameter = format!("{way} {:?}", modes::ALL[n % modes::ALL.len()]);
            if way == "exit" {
                let output = child::command(NAME, &parameter).output().expect("a child");
                assert_eq!(output.status.code(), Some(0), "{output:?}");
            } else {
                child::run(NAME, &parameter);
            }
        }
        return;
    };
    let (way, name) = parameter.split_once(' ').expect("a way and a mode");
    end_process(way, &testing::device_with(mode(name)));
}

static WATCHED: OnceLock<FaultHandle> = OnceLock::new();

/// Runs after the crate's own exit handler, which was registered later.
extern "C" fn watch_for_calls() {
    let handle = WATCHED.get().expect("set before it was registered");
    handle.record();
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        std::thread::yield_now();
    }
    let calls = handle.calls();
    if !calls.is_empty() {
        eprintln!("driver calls after main: {calls:?}");
        // SAFETY: it ends the process and touches nothing.
        unsafe { libc::_exit(3) };
    }
}

#[test]
fn nothing_calls_the_driver_after_main() {
    const NAME: &str = concat!(module_path!(), "::nothing_calls_the_driver_after_main");
    let Some(parameter) = child::parameter() else {
        for mode in modes::ALL {
            child::run(NAME, &format!("{mode:?}"));
        }
        return;
    };
    let (faults, handle) = testing::faults();
    assert!(WATCHED.set(handle).is_ok());
    // SAFETY: the handler is a function of this program, which stays loaded.
    assert_eq!(unsafe { libc::atexit(watch_for_calls) }, 0);
    let device = testing::host_with_completion(faults, mode(&parameter));
    let (gate, op) = pending(&device);
    // The poller has a future to look for, and memory to take back.
    std::mem::forget((gate, op, device));
}

static KEPT_TO_THE_END: OnceLock<Device> = OnceLock::new();

/// Runs after the crate's own exit handler, as above.
extern "C" fn ask_for_memory() {
    let device = KEPT_TO_THE_END.get().expect("set before it was registered");
    // More than is mapped ahead.
    let another = Device::builder().named("host").map(drop);
    let refused = [another, device.pinned::<u8>(16 << 20).map(drop), block_on(device.trim(0))];
    let kinds = refused.map(|refused| refused.err().map(|error| error.kind()));
    if kinds != [Some(ErrorKind::Closed); 3] {
        eprintln!("after main: {kinds:?}");
        // SAFETY: it ends the process and touches nothing.
        unsafe { libc::_exit(3) };
    }
}

/// Runs after the crate's own exit handler, as above; the driver's may have run before either.
extern "C" fn ask_a_driver_that_has_gone() {
    WATCHED
        .get()
        .expect("set before it was registered")
        .lose_device("its library has been unloaded");
    let device = KEPT_TO_THE_END.get().expect("set before it was registered");
    let refused = [device.stream().map(drop), block_on(device.trim(0))];
    let kinds = refused.map(|refused| refused.err().map(|error| error.kind()));
    if kinds != [Some(ErrorKind::Closed); 2] {
        eprintln!("after the driver: {kinds:?}");
        // SAFETY: it ends the process and touches nothing.
        unsafe { libc::_exit(3) };
    }
}

#[test]
fn a_driver_that_went_before_its_callers_is_no_loss() {
    const NAME: &str =
        concat!(module_path!(), "::a_driver_that_went_before_its_callers_is_no_loss");
    if child::parameter().is_none() {
        child::run(NAME, "");
        return;
    }
    let (faults, handle) = testing::faults();
    assert!(WATCHED.set(handle).is_ok());
    // SAFETY: the handler is a function of this program, which stays loaded.
    assert_eq!(unsafe { libc::atexit(ask_a_driver_that_has_gone) }, 0);
    let device = testing::host_with_completion(faults, Completion::Adaptive);
    assert!(KEPT_TO_THE_END.set(device).is_ok());
}

/// Tasks that still run then are told one thing, and not that memory or threads are scarce.
#[test]
fn what_is_refused_after_main_says_so() {
    const NAME: &str = concat!(module_path!(), "::what_is_refused_after_main_says_so");
    if child::parameter().is_none() {
        child::run(NAME, "");
        return;
    }
    // SAFETY: the handler is a function of this program, which stays loaded.
    assert_eq!(unsafe { libc::atexit(ask_for_memory) }, 0);
    assert!(KEPT_TO_THE_END.set(testing::device()).is_ok());
}

/// What `main` leaves to its exit handler.
struct Left {
    device: Device,
    stream: Stream,
    op: Op<PinnedBuffer<u8>>,
    waiter: JoinHandle<gpu_await::Result<PinnedBuffer<u8>>>,
    lost: Loss,
    stepped: (Device, Op<u32>),
}

static LEFT: Mutex<Option<Left>> = Mutex::new(None);

/// Runs after the crate's own exit handler, as above.
extern "C" fn go_on_behind_the_end() {
    let left = LEFT.lock().expect("no panic").take().expect("set before `main` returned");
    let Left { device, stream, op, waiter, lost, stepped } = left;
    let refused = [
        Device::builder().named("host").err(),
        device.stream().err(),
        stepped.0.stream().err(),
        block_on(stream.host_fn(|| 1)).err(),
        stream.zeros::<u8>(1).queued().err(),
        block_on(op).err(),
        waiter.join().expect("no panic").err(),
        Some(block_on(lost)),
        block_on(stepped.1).err(),
    ];
    let says_so = |error: &Option<gpu_await::Error>| {
        error.as_ref().is_some_and(|error| {
            matches!(error.detail(), ErrorDetail::ProcessEnding { .. })
                && error.kind() == ErrorKind::Closed
        })
    };
    // Each with its own line.
    let lines = [
        stream.zeros::<u8>(1).queued().err().and_then(|error| error.at()).map(|at| at.line()),
        stream.record().err().and_then(|error| error.at()).map(|at| at.line()),
    ];
    if !refused.iter().all(says_so) || lines != [Some(line!() - 3), Some(line!() - 2)] {
        eprintln!("behind the end: {refused:?}, in lines {lines:?}");
        // SAFETY: it ends the process and touches nothing.
        unsafe { libc::_exit(3) };
    }
}

/// Nobody looks at a device any more: what waits for it is told so, and what is new is refused.
#[test]
fn futures_behind_the_end_resolve() {
    const NAME: &str = concat!(module_path!(), "::futures_behind_the_end_resolve");
    let Some(parameter) = child::parameter() else {
        for mode in modes::ALL {
            child::run(NAME, &format!("{mode:?}"));
        }
        return;
    };
    // SAFETY: the handler is a function of this program, which stays loaded.
    assert_eq!(unsafe { libc::atexit(go_on_behind_the_end) }, 0);
    let device = testing::device_with(mode(&parameter));
    let (gate, op) = pending(&device);
    let (other_gate, other) = pending(&device);
    let waiter = std::thread::spawn(move || block_on(other));
    let (manual, step) = testing::manual();
    let stepped = (manual.clone(), manual.default_stream().host_fn(|| 5));
    let (stream, lost) = (device.stream().expect("a stream"), device.lost());
    std::mem::forget((gate, other_gate, step));
    *LEFT.lock().expect("no panic") = Some(Left { device, stream, op, waiter, lost, stepped });
}

#[cfg(target_os = "linux")]
mod growth {
    use std::future::Future;
    use std::pin::Pin;

    use gpu_await::{Batch, Batcher, Error, StreamPool};

    use super::*;
    use crate::fork::{forked, forked_in_quiet, others_sleep};

    /// What the exit of a process may take that waits for nothing: half of the shortest wait.
    const AT_ONCE: Duration = Duration::from_millis(100);

    /// Threads, handles and resident KiB of this process.
    fn held() -> (usize, usize, u64) {
        let count = |path| std::fs::read_dir(path).expect("Linux").count();
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
        let pages: u64 = statm.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
        (count("/proc/self/task"), count("/proc/self/fd"), pages * 4)
    }

    /// Lets the process have so much more address space: a thread's stack needs 2 MiB.
    fn limit_address_space(more: Option<u64>) {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
        let pages: u64 = statm.split(' ').next().and_then(|n| n.parse().ok()).expect("a number");
        let most = more.map_or(libc::RLIM_INFINITY, |more| pages * 4096 + more);
        let limit = libc::rlimit { rlim_cur: most, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the limit is read for the length of the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    }

    /// The quickest waits for nothing, and none for a thread.
    fn assert_at_once(exits: &[Duration]) {
        let is_quick = exits.iter().min().is_some_and(|exit| *exit < AT_ONCE);
        assert!(is_quick && exits.iter().all(|exit| *exit < Duration::from_secs(5)), "{exits:?}");
    }

    /// Gives a device a thread that the driver keeps: it pins memory beside a full queue.
    fn keep_busy(device: &Device) -> (Gate, JoinHandle<()>) {
        let stream = device.stream().expect("a stream");
        let gate = Gate::close(&stream).expect("a gate");
        let submitted = Arc::new(AtomicU32::new(0));
        let count = submitted.clone();
        let producer = std::thread::spawn(move || {
            for _ in 0..1100 {
                stream.host_fn(|| ()).abandon();
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        wait_until("the queue is full, and keeps the producer", || {
            submitted.load(Ordering::SeqCst) >= 1015 && others_sleep()
        });
        let mut pinned = Box::pin(device.pinned_async::<u8>(16 << 20));
        assert!(pinned.poll_unpin(&mut Context::from_waker(Waker::noop())).is_pending());
        wait_until("a thread pins memory", || {
            host_threads::threads_called("gpu-await-offlo") > 0 && others_sleep()
        });
        drop(pinned);
        (gate, producer)
    }

    fn busy() -> (Device, Gate, JoinHandle<()>) {
        let device = Device::host();
        let (gate, producer) = keep_busy(&device);
        (device, gate, producer)
    }

    /// What a call fails with, by its name.
    type Called<'c> = (&'static str, Pin<Box<dyn Future<Output = Option<Error>> + 'c>>);

    fn called<'c, T>(
        name: &'static str,
        call: impl Future<Output = gpu_await::Result<T>> + 'c,
    ) -> Called<'c> {
        (name, Box::pin(async { call.await.err() }))
    }

    /// Polls a future that waits for no other thread.
    fn polled<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        let mut cx = Context::from_waker(Waker::noop());
        // It yields in between.
        (0..100).find_map(|_| match future.poll_unpin(&mut cx) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        })
    }

    /// Whether they fail at once, because their device is the parent's.
    fn assert_forked(calls: &mut [Called<'_>]) {
        for (name, call) in calls {
            let refused = polled(call).unwrap_or_else(|| panic!("{name} waits for a thread"));
            let error = refused.unwrap_or_else(|| panic!("{name} is not refused"));
            assert!(matches!(error.detail(), ErrorDetail::Forked { .. }), "{name}: {error}");
            assert_eq!(error.kind(), ErrorKind::Closed);
        }
    }

    /// It has none of its parent's threads, and waits for none; nor for what its parent's threads were at.
    #[test]
    fn the_child_of_a_fork_ends_at_once() {
        const NAME: &str = concat!(module_path!(), "::the_child_of_a_fork_ends_at_once");
        let Some(parameter) = child::parameter() else {
            for parent in ["closed", "open", "busy"] {
                child::run(NAME, parent);
            }
            return;
        };
        let use_a_device = || {
            let device = Device::host();
            let stream = device.stream().expect("a stream");
            let x = stream.upload(vec![5u8; 1000]).queued().expect("memory");
            assert_eq!(block_on(stream.download(&x)).expect("no failure"), [5; 1000]);
            assert_eq!(block_on(device.host_fn(|| 5)).expect("no failure"), 5);
        };
        let before = held().0;
        (0..20).for_each(|_| use_a_device());
        wait_until("its threads end", || held().0 <= before);
        let open = (parameter == "open").then(|| {
            use_a_device();
            let device = Device::host();
            block_on(device.host_fn(|| 5)).expect("no failure");
            device
        });
        let busy = (parameter == "busy").then(busy);
        let exits = [0; 3].map(|_| forked_in_quiet(use_a_device));
        // A child of a child as well.
        let child_of_a_child = forked_in_quiet(|| {
            use_a_device();
            let exits = [0; 3].map(|_| forked_in_quiet(use_a_device));
            assert_at_once(&exits);
        });
        assert_at_once(&exits);
        assert!(child_of_a_child < Duration::from_secs(5), "{child_of_a_child:?}");
        // The parent goes on.
        use_a_device();
        if let Some((device, gate, producer)) = busy {
            gate.open();
            producer.join().expect("no panic");
            drop(device);
        }
        if let Some(device) = open {
            assert_eq!(block_on(device.host_fn(|| 6)).expect("no failure"), 6);
        }
    }

    /// A device is its process's: in the child of a fork its handles are refused, and neither hang nor block.
    #[test]
    fn inherited_handles_are_refused() {
        const NAME: &str = concat!(module_path!(), "::inherited_handles_are_refused");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let device = Device::host();
        let stream = device.stream().expect("a stream");
        let x = stream.full(1000, 7u8).queued().expect("memory");
        stream.synchronize().expect("no failure");
        let handles = (device.clone(), stream.clone(), device.stream().expect("a stream"));
        let (gate, mut pending) = pending(&device);
        let exit = forked_in_quiet(|| {
            let refused = [
                block_on(&mut pending).err(),
                block_on(stream.download(&x)).err(),
                stream.zeros::<u8>(1).queued().err(),
                device.stream().err(),
                device.memory().err(),
                stream.synchronize().err(),
                block_on(device.close(Duration::from_secs(5))).err(),
                Some(block_on(device.lost())),
            ];
            for refused in refused {
                let error = refused.expect("the parent's device");
                assert!(matches!(error.detail(), ErrorDetail::Forked { .. }), "{error}");
                assert_eq!(error.kind(), ErrorKind::Closed);
            }
            // Each with its own line.
            let first = stream.zeros::<u8>(1).queued().expect_err("the parent's device");
            let second = stream.record().expect_err("the parent's device");
            let line = |error: &Error| error.at().map(|at| at.line());
            assert_eq!((line(&first), line(&second)), (Some(line!() - 3), Some(line!() - 2)));
            let own = Device::host();
            assert_eq!(block_on(own.host_fn(|| 5)).expect("no failure"), 5);
            drop((x, handles, own));
        });
        assert!(exit < Duration::from_secs(5), "{exit:?}");
        gate.open();
        assert_eq!(block_on(pending).expect("the parent goes on")[0], 1);
    }

    /// The poller takes locks all the time while work completes and memory is freed: a fork waits until it holds none.
    #[test]
    fn a_child_of_a_busy_parent_waits_for_no_lock() {
        const NAME: &str = concat!(module_path!(), "::a_child_of_a_busy_parent_waits_for_no_lock");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let device = Device::host();
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let kept = streams[0].full(1000, 7u8).queued().unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        for round in 0..200 {
            // Awaited, dropped while it runs, freed, and a value that the reaper drops.
            let upload = |n: u8| streams[usize::from(n % 2)].upload(vec![n; 1 + 100 * round]);
            let mut ops: Vec<_> = (0..40).map(upload).collect();
            ops.iter_mut().for_each(|op| drop(op.poll_unpin(&mut cx)));
            drop(ops.split_off(20));
            let mut freed = streams[0].zeros::<u8>(1 << 16).queued().unwrap();
            streams[1].fill(&mut freed, 1).abandon();
            drop(freed);
            forked(|| {
                assert!(block_on(streams[0].download(&kept)).is_err());
                assert!(streams[1].zeros::<u8>(1).queued().is_err());
                assert!(block_on(device.close(Duration::from_secs(5))).is_err());
                drop((device.stats(), std::mem::take(&mut ops)));
            });
        }
        assert_eq!(block_on(streams[0].download(&kept)).unwrap(), [7; 1000]);
    }

    /// A thread that waits in this crate at a fork is in no list that the child inherits: the child's own threads get its stack.
    #[test]
    fn a_child_of_a_parent_that_waits_uses_a_device() {
        const NAME: &str =
            concat!(module_path!(), "::a_child_of_a_parent_that_waits_uses_a_device");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let device = Device::host();
        let stream = device.stream().expect("a stream");
        let gate = Gate::close(&stream).expect("a gate");
        let wait = |stream: Stream| move || stream.host_fn(|| ()).synchronize();
        let waiters: Vec<_> = (0..8).map(|_| std::thread::spawn(wait(stream.clone()))).collect();
        // They wait for one another as well, and sleep.
        let use_a_device = || {
            let device = Device::host();
            let streams = [(); 3].map(|()| device.stream().expect("a stream"));
            for _ in 0..3 {
                let stored = [0, 1, 2].map(|n| streams[n].upload(vec![5u8; 1000]).queued());
                for (stream, x) in streams.iter().zip(&stored) {
                    let x = x.as_ref().expect("memory");
                    assert_eq!(stream.download(x).synchronize().expect("no failure"), [5; 1000]);
                }
            }
        };
        for _ in 0..30 {
            forked_in_quiet(|| {
                std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(use_a_device))));
            });
        }
        gate.open();
        for waiter in waiters {
            waiter.join().expect("no panic").expect("no failure");
        }
    }

    /// A batcher works for the process that made it: elsewhere its calls fail, with a deadline and without, whether their batch has begun,
    /// they wait for one, or they are new; and its worker ends.
    #[test]
    fn calls_of_an_inherited_batcher_fail() {
        const NAME: &str = concat!(module_path!(), "::calls_of_an_inherited_batcher_fail");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        /// A batch that does not end.
        async fn endless<S>(_held: S) -> gpu_await::Result<Vec<gpu_await::Result<u32>>> {
            std::future::pending().await
        }
        let device = Device::host();
        let pool = device.streams(2).unwrap();
        let builder = || Batcher::builder().max_in_flight(1);
        let alone = builder().build(|numbers: Vec<u32>| endless(numbers));
        let pooled =
            builder().pool(&pool).build(|held, numbers: Batch<u32>| endless((held, numbers)));
        for (batcher, mut worker) in [alone, pooled] {
            let far = Instant::now() + Duration::from_secs(3600);
            let enter = || [("call", batcher.call(1)), ("call_by", batcher.call_by(2, far))];
            let mut calls = Vec::from(enter());
            assert!(polled(&mut worker).is_none());
            calls.extend(enter());
            assert!(polled(&mut worker).is_none());
            assert!(calls.iter_mut().all(|(_, call)| polled(call).is_none()), "they wait");
            let stats = batcher.stats();
            assert_eq!((stats.in_flight, stats.requests, stats.waiting), (1, 2, 2));
            forked_in_quiet(|| {
                let inherited = calls.iter_mut().map(|(name, call)| called(name, call));
                assert_forked(&mut inherited.collect::<Vec<_>>());
                assert_forked(&mut enter().map(|(name, call)| called(name, call)));
                assert!(polled(&mut worker).is_some(), "it has nothing to do");
            });
        }
    }

    /// What waits for a thread of the parent fails there, whether it is called in the child or was pending at the fork.
    #[test]
    fn a_child_waits_for_no_thread_of_its_parent() {
        const NAME: &str = concat!(module_path!(), "::a_child_waits_for_no_thread_of_its_parent");
        const FAR: Duration = Duration::from_secs(3600);
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        async fn echo(batch: Vec<u32>) -> gpu_await::Result<Vec<gpu_await::Result<u32>>> {
            Ok(batch.into_iter().map(Ok).collect())
        }
        let device = Device::host();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let x = stream.full(1000, 7u8).queued().unwrap();
        stream.synchronize().unwrap();
        let builder = StreamPool::builder().streams(&device, 1).max_in_flight(1);
        let pool = builder.build().unwrap();
        let held = pool.try_acquire().unwrap();
        let (batcher, worker) = Batcher::builder().max_delay(FAR).build(echo);
        let mut on_time = Box::pin(batcher.call_by(1, Instant::now() + FAR));
        assert!(polled(&mut on_time).is_none());
        let waiting = || {
            vec![
                // The first takes the threads for copies.
                called("upload_staged", stream.upload_staged(vec![1u8; 64 << 20])),
                called("download_staged", stream.download_staged(&x)),
                called("download_staged_into", stream.download_staged_into(&x, Vec::new())),
                called("record_timed_async", other.record_timed_async()),
                called("pinned_async", device.pinned_async::<u8>(4 << 20)),
                called("acquire", async { pool.acquire().await }),
                called("acquire_by", async { pool.acquire_by(Instant::now() + FAR).await }),
                called("drained_within", pool.drained_within(FAR)),
                called("drained_within", pool.drained_within(Duration::MAX)),
            ]
        };
        let closing = Device::host();
        let (closing_gate, op) = self::pending(&closing);
        let (gate, producer) = keep_busy(&device);
        let mut pending = waiting();
        pending.push(called("close", closing.close(FAR)));
        let mut all_wait = || {
            let ready = pending.iter_mut().find_map(|(name, call)| polled(call).map(|_| *name));
            assert_eq!(ready, None, "it waits for nothing");
        };
        all_wait();
        wait_until("all is quiet", others_sleep);
        all_wait();
        let mut drained = pool.drained();
        let exit = forked_in_quiet(|| {
            assert_forked(&mut pending);
            assert_forked(&mut waiting());
            assert_forked(&mut [
                called("trim", device.trim(0)),
                called("trim_pinned", device.trim_pinned(0)),
                called("close", device.close(FAR)),
            ]);
            assert!(polled(&mut drained).is_some(), "the pool's permits are the parent's");
            assert_forked(&mut [called("call_by", &mut on_time)]);
        });
        assert!(exit < Duration::from_secs(5), "{exit:?}");
        gate.open();
        closing_gate.open();
        producer.join().unwrap();
        drop(op);
        drop((held, on_time, worker));
        for (name, call) in pending {
            let failed = block_on(call);
            assert!(failed.is_none(), "{name}: {failed:?}");
        }
    }

    #[test]
    fn a_shortage_of_threads_passes() {
        const NAME: &str = concat!(module_path!(), "::a_shortage_of_threads_passes");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        // On a GPU the driver has threads and memory of its own.
        let device = Device::host();
        let streams: Vec<_> = (0..10).map(|_| device.stream().unwrap()).collect();
        for stream in &streams {
            assert_eq!(block_on(stream.host_fn(|| 1)).unwrap(), 1);
        }
        wait_until("their threads have begun, which takes memory", others_sleep);
        limit_address_space(Some(1 << 20));
        // Stacks of threads that have ended are used again: take them all.
        let spawn = || std::thread::Builder::new().spawn(std::thread::park);
        let others: Vec<_> = std::iter::from_fn(|| spawn().ok()).collect();
        let without_streams = held().0 - streams.len();
        drop(streams);
        // The poller destroys the first, which gives a thread back: that one destroys the others, and stays.
        wait_until("their threads end", || held().0 <= without_streams + 1);
        limit_address_space(None);
        drop((0..10).map(|_| device.stream().unwrap()).collect::<Vec<_>>());
        wait_until("their threads end", || held().0 <= without_streams + 1);
        others.into_iter().for_each(|other| {
            other.thread().unpark();
            other.join().unwrap();
        });
        assert_eq!(device.stats().unreturned, 0);
    }

    /// Deadlines need no thread of their own. A batcher without a pool has no device to tell them: it refuses such calls, and its batches wait
    /// for no delay.
    #[test]
    fn deadlines_need_no_thread() {
        const NAME: &str = concat!(module_path!(), "::deadlines_need_no_thread");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        const MOMENT: Duration = Duration::from_millis(20);
        async fn echo(batch: Vec<u32>) -> gpu_await::Result<Vec<gpu_await::Result<u32>>> {
            Ok(batch.into_iter().map(Ok).collect())
        }
        let device = Device::host();
        let builder = StreamPool::builder().streams(&device, 1).max_in_flight(1);
        let pool = builder.build().unwrap();
        let held = pool.try_acquire().unwrap();
        wait_until("its threads have begun, which takes memory", others_sleep);
        limit_address_space(Some(1 << 20));
        // Stacks of threads that have ended are used again: take them all.
        let spawn = || std::thread::Builder::new().spawn(std::thread::park);
        let others: Vec<_> = std::iter::from_fn(|| spawn().ok()).collect();
        let kinds = [
            block_on(pool.acquire_by(Instant::now() + MOMENT)).map(drop),
            block_on(pool.with_patience(MOMENT).acquire()).map(drop),
            block_on(pool.drained_within(MOMENT)),
        ]
        .map(|waited| waited.expect_err("it is held").kind());
        assert_eq!(kinds, [ErrorKind::TimedOut; 3]);
        let (batcher, worker) =
            Batcher::builder().pool(&pool).build(|_, batch| echo(batch.into_requests()));
        let late = block_on(batcher.call_by(1, Instant::now() + MOMENT));
        assert_eq!(late.expect_err("nobody polls the worker").kind(), ErrorKind::TimedOut);
        drop((batcher, worker));
        let builder = Batcher::builder().max_delay(Duration::from_secs(3600));
        let (batcher, worker) = builder.build(echo);
        let refused = block_on(batcher.call_by(1, Instant::now() + MOMENT));
        assert_eq!(refused.expect_err("nobody tells it").kind(), ErrorKind::Overloaded);
        assert_eq!(batcher.stats().closed, 1);
        let soon = batcher.call(2);
        let one = async move {
            let answer = soon.await;
            drop(batcher);
            answer
        };
        assert_eq!(block_on(futures::future::join(one, worker)).0.unwrap(), 2);
        limit_address_space(None);
        drop(held);
        others.into_iter().for_each(|other| {
            other.thread().unpark();
            other.join().unwrap();
        });
    }

    /// Its log has two events for each operation that nobody asked for: not a thread for each.
    #[test]
    fn a_timeline_that_nobody_read() {
        const NAME: &str = concat!(module_path!(), "::a_timeline_that_nobody_read");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let ended = Arc::new(AtomicBool::new(false));
        let most = std::thread::spawn({
            let ended = ended.clone();
            move || {
                let mut most = 0;
                while !ended.load(Ordering::Relaxed) {
                    most = most.max(host_threads::threads_called("gpu-await-close"));
                }
                most
            }
        });
        for _ in 0..3 {
            let device = Device::builder().timeline(10_000).host();
            let stream = device.stream().unwrap();
            let mut x = stream.zeros::<u32>(1).queued().unwrap();
            for n in 0..1000 {
                stream.fill(&mut x, n).queued().unwrap();
            }
            stream.synchronize().unwrap();
            drop((x, stream, device));
        }
        wait_until("they are closed", || host_threads::threads_called("gpu-await-close") == 0);
        ended.store(true, Ordering::Relaxed);
        // Each device has its own.
        let most = most.join().unwrap();
        assert!(most <= 9, "{most} threads");
    }

    /// A host device has no driver: what the system refuses is told as that.
    #[test]
    fn a_refused_thread_says_so() {
        const NAME: &str = concat!(module_path!(), "::a_refused_thread_says_so");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let device = Device::host();
        assert_eq!(block_on(device.host_fn(|| 1)).unwrap(), 1);
        wait_until("its threads have begun, which takes memory", others_sleep);
        limit_address_space(Some(1 << 20));
        let spawn = || std::thread::Builder::new().spawn(std::thread::park);
        let others: Vec<_> = std::iter::from_fn(|| spawn().ok()).collect();
        // Room for what is allocated here, and too little for the stack of a thread.
        limit_address_space(Some(1 << 20));
        let refused = [
            device.stream().map(drop),
            Device::builder().named("host").map(drop),
            block_on(device.trim(0)),
        ];
        limit_address_space(None);
        for (refused, whose) in refused.into_iter().zip(["stream", "stream", "executor"]) {
            let error = refused.unwrap_err();
            let ErrorDetail::NoThread { what } = error.detail() else { panic!("{error}") };
            assert!(what.contains(whose), "{error}");
            assert_eq!(error.kind(), ErrorKind::Overloaded);
        }
        // It passes.
        assert_eq!(block_on(device.stream().unwrap().host_fn(|| 1)).unwrap(), 1);
        others.into_iter().for_each(|other| {
            other.thread().unpark();
            other.join().unwrap();
        });
    }

    /// The numbers of `src/guide/limits.md`.
    #[test]
    fn threads_of_a_host_device() {
        const NAME: &str = concat!(module_path!(), "::threads_of_a_host_device");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let page = include_str!("../../src/guide/limits.md");
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
        let rows: Vec<(&str, &str)> = rows.filter_map(|row| row.split_once("` | ")).collect();
        let says = |thread: &str| {
            let row = rows.iter().find(|(name, _)| name.starts_with(thread));
            row.unwrap_or_else(|| panic!("no row of {thread}: {rows:?}")).1
        };
        // Names are cut to 15 bytes.
        let count = |thread: &str| host_threads::threads_called(&thread[..thread.len().min(15)]);
        let before = held().0;
        let device = Device::host();
        wait_until("it pins memory ahead", || count("gpu-await-offload") == 0 && others_sleep());
        let own = count("host:");
        assert!(says("host:").starts_with(&format!("one a stream, and {own} ")), "{own}");
        for thread in ["gpu-await-host", "gpu-await-reaper", "gpu-await-staging"] {
            assert_eq!(count(thread), 1, "{thread}");
            assert!(says(&thread[..14]).starts_with('1'), "{thread}");
        }
        assert_eq!(held().0 - before, 3 + own);
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let x = block_on(streams[0].upload_staged(vec![1u8; 64 << 20])).unwrap();
        block_on(streams[1].download_staged(&x)).unwrap();
        wait_until("what is done once has ended", || count("gpu-await-offload") == 0);
        let cores = std::thread::available_parallelism().unwrap().get();
        let staging = (cores / 2).clamp(2, 8);
        assert!(count("gpu-await-staging") <= staging);
        let (fewest, most) = (2 + own + 2 + 2, 2 + own + 2 + 8 + 1);
        let threads = held().0 - before;
        assert!((fewest - 1..=most).contains(&threads), "{threads}");
        let total = format!("{fewest} to {most} threads for two streams and a staged copy");
        assert!(page.contains(&total), "the page does not say: {total}");
    }

    #[test]
    fn values_go_without_another_thread() {
        const NAME: &str = concat!(module_path!(), "::values_go_without_another_thread");
        static LIVE: AtomicU32 = AtomicU32::new(0);
        struct Owner;
        impl Owner {
            fn new() -> Self {
                LIVE.fetch_add(1, Ordering::SeqCst);
                Owner
            }
        }
        impl Drop for Owner {
            fn drop(&mut self) {
                LIVE.fetch_sub(1, Ordering::SeqCst);
            }
        }
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        let device = Device::host();
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(100).queued().unwrap();
        stream.synchronize().unwrap();
        wait_until("its threads have begun, which takes memory", others_sleep);
        limit_address_space(Some(1 << 20));
        let spawn = || std::thread::Builder::new().spawn(std::thread::park);
        let others: Vec<_> = std::iter::from_fn(|| spawn().ok()).collect();
        // Room for what is allocated here, and too little for the stack of a thread.
        limit_address_space(Some(1 << 20));
        for _ in 0..100 {
            let uses = Uses::new("theirs").updates(&mut x).keeps(Owner::new());
            // SAFETY: it does nothing.
            let op = unsafe { stream.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) };
            op.queued().unwrap();
        }
        wait_until("what the work kept is dropped", || LIVE.load(Ordering::SeqCst) == 0);
        wait_until("nothing is left", || device.stats().unreturned == 0);
        let uses = Uses::new("theirs").updates(&mut x).keeps(Owner::new());
        // SAFETY: it does nothing.
        let op = unsafe { stream.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) };
        op.queued().unwrap();
        block_on(device.close(Duration::from_secs(10))).unwrap();
        assert_eq!(LIVE.load(Ordering::SeqCst), 0);
        limit_address_space(None);
        others.into_iter().for_each(|other| {
            other.thread().unpark();
            other.join().unwrap();
        });
    }

    fn open_and_close(times: usize) {
        for n in 0..times {
            let device = testing::device_with(modes::ALL[n % modes::ALL.len()]);
            let stream = device.stream().unwrap();
            let x = stream.upload(vec![7u8; 1000]).queued().unwrap();
            assert_eq!(block_on(stream.download(&x)).unwrap(), [7; 1000]);
            assert_eq!(block_on(stream.host_fn(|| 1)).unwrap(), 1);
            drop(x);
            if n % 2 == 0 {
                block_on(device.close(Duration::from_secs(20))).unwrap();
            }
        }
    }

    #[test]
    fn a_thousand_devices_opened_and_closed_leave_nothing() {
        const NAME: &str =
            concat!(module_path!(), "::a_thousand_devices_opened_and_closed_leave_nothing");
        if child::parameter().is_none() {
            child::run(NAME, "");
            return;
        }
        // A GPU's context goes with its last device, and takes long to make.
        let _context = testing::device();
        open_and_close(100);
        let (threads, handles, resident) = held();
        open_and_close(1000);
        wait_until("threads end", || held().0 <= threads);
        let after = held();
        assert!(after.1 <= handles, "{handles} handles, then {after:?}");
        assert!(after.2 <= resident + (8 << 10), "{resident} KiB, then {after:?}");
    }
}

/// Nobody calls the driver: the poller does, for who waits for the loss.
#[tokio::test]
async fn the_loss_of_an_idle_device_is_told() -> gpu_await::Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    device.stream()?.zeros::<u8>(4).await?;
    let told = tokio::spawn(device.lost());
    // Others come and go.
    for _ in 0..3 {
        assert!(device.lost().now_or_never().is_none());
    }
    handle.lose_device("a test");
    let error = tokio::time::timeout(Duration::from_secs(10), told).await.expect("it is told");
    assert!(error.expect("no panic").is_device_lost());
    Ok(())
}

/// The poller keeps streams for a while that nobody waits for; not those of a device that is gone.
#[tokio::test]
async fn what_a_device_had_goes_soon_after_its_last_handle() -> gpu_await::Result<()> {
    // Half of that while.
    const SOON: Duration = Duration::from_millis(10);
    let mut quickest = Duration::MAX;
    for _ in 0..10 {
        let (faults, handle) = testing::faults();
        handle.record();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let mut op = stream.host_fn(|| std::thread::sleep(Duration::from_millis(1)));
        // Looked for by the poller.
        tokio::time::timeout(Duration::from_secs(5), &mut op).await.expect("it ends")?;
        drop((op, stream, device));
        let start = Instant::now();
        let count = |call| handle.calls().into_iter().filter(|made| *made == call).count();
        while count("stream_destroy") < count("stream_create") {
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", handle.calls());
            std::thread::yield_now();
        }
        quickest = quickest.min(start.elapsed());
    }
    assert!(quickest < SOON, "{quickest:?}");
    Ok(())
}
