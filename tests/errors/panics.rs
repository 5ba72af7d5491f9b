//! Panics of foreign code, whose payloads panic when they are dropped: they end no thread of the
//! crate's, and everybody else of that device is served afterwards.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, panic_any};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Batcher, Device, Error, Grid, Kernel, LaunchConfig, Op};

use crate::under_test::child;

const SOON: Duration = Duration::from_secs(10);

/// A payload; dropped, it panics with one that is dropped so one time less often.
struct Bomb(u32);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            panic_any(Bomb(self.0 - 1));
        }
    }
}

/// Says nothing of bombs: a child whose output nobody reads would be held up by it.
fn quietly() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic.payload().is::<Bomb>() {
                print(panic);
            }
        }));
    });
}

/// Twice, and for ever.
const DEPTHS: [u32; 2] = [2, u32::MAX];

/// A value whose drop panics, once.
struct Explosive(u32);

impl Drop for Explosive {
    fn drop(&mut self) {
        panic_any(Bomb(self.0));
    }
}

/// Says that it was dropped.
struct Told(Arc<AtomicBool>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Panics on every thread but its own.
struct Foreign {
    here: ThreadId,
    depth: u32,
    woken: AtomicU32,
}

impl Foreign {
    fn new(depth: u32) -> Arc<Self> {
        let (here, woken) = (thread::current().id(), AtomicU32::new(0));
        Arc::new(Foreign { here, depth, woken })
    }

    /// One that panics here as well.
    fn everywhere(depth: u32) -> Arc<Self> {
        thread::spawn(move || Foreign::new(depth)).join().expect("no panic")
    }
}

impl Wake for Foreign {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if thread::current().id() != self.here {
            self.woken.fetch_add(1, Ordering::SeqCst);
            panic_any(Bomb(self.depth));
        }
    }
}

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + SOON;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        thread::yield_now();
    }
}

/// Polls `future` until it is ready, with a waker of a thread that does nothing else.
fn drive<F: Future>(future: F, waker: &Waker) -> F::Output {
    let mut future = pin!(future);
    let end = Instant::now() + SOON;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(waker)) {
            return output;
        }
        assert!(Instant::now() < end, "nobody does what it waits for");
        thread::yield_now();
    }
}

/// Whether `op` is resolved by wake-ups alone: the poller's.
async fn soon<T>(op: Op<T>) -> gpu_await::Result<T> {
    tokio::time::timeout(SOON, op).await.expect("somebody wakes it")
}

/// Everybody else of the device is served: by its streams, its poller, its reaper and its crew.
async fn is_served(device: &Device) {
    for _ in 0..3 {
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let mut op = stream.host_fn(|| 7);
        assert!((&mut op).now_or_never().is_none(), "the gate is closed");
        gate.open();
        assert_eq!(soon(op).await.unwrap(), 7);
    }
    let told = Arc::new(AtomicBool::new(false));
    let value = Told(told.clone());
    drop(device.default_stream().host_fn(move || value));
    wait_until("the reaper drops it", || told.load(Ordering::SeqCst));
    let staged = async {
        let stream = device.stream().unwrap();
        let x = stream.upload_staged(vec![3u8; 5 << 20]).await.unwrap();
        stream.download_staged(&x).await.unwrap()
    };
    let staged = tokio::time::timeout(SOON, staged).await.expect("the crew copies");
    assert!(staged.len() == 5 << 20 && staged.iter().all(|byte| *byte == 3));
}

#[tokio::test]
async fn a_waker_whose_panic_panics_ends_nothing() {
    quietly();
    for depth in DEPTHS {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let (mut bad, good) = (stream.done(), stream.done());
        let mut lost = device.lost();
        let foreign = Foreign::new(depth);
        let waker = Waker::from(foreign.clone());
        let mut cx = Context::from_waker(&waker);
        // Until it no longer looks for itself, but waits to be woken.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            assert!(bad.poll_unpin(&mut cx).is_pending());
        }
        assert!(lost.poll_unpin(&mut cx).is_pending());
        gate.open();
        // Nobody else looks before.
        wait_until("the poller calls the waker", || foreign.woken.load(Ordering::SeqCst) > 0);
        soon(good).await.unwrap();
        is_served(&device).await;
    }
}

/// A transfer wakes its own task between its parts.
#[tokio::test]
async fn a_waker_that_panics_ends_no_transfer() {
    quietly();
    for depth in DEPTHS {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let waker = Waker::from(Foreign::everywhere(depth));
        let all: Vec<u32> = (0..3_000_000).collect();
        let there_and_back = || {
            let x = drive(stream.upload_staged(all.clone()), &waker).unwrap();
            drive(stream.download_staged(&x), &waker).unwrap()
        };
        let back = std::panic::catch_unwind(AssertUnwindSafe(there_and_back));
        // Not dropped: it panics.
        let back = back.map_err(std::mem::forget).expect("no panic comes out of a poll");
        assert!(back == all);
        is_served(&device).await;
    }
}

#[tokio::test]
async fn a_value_that_panics_in_its_drop_ends_nothing() {
    quietly();
    for depth in DEPTHS {
        let device = testing::device();
        let stream = device.stream().unwrap();
        // Nobody takes what they return; who drops a future with its result has the panic.
        let gate = Gate::close(&stream).unwrap();
        drop(stream.host_fn(move || Explosive(depth)));
        drop(stream.host_fn(move || -> u32 { panic_any(Bomb(depth)) }));
        gate.open();
        soon(stream.done()).await.unwrap();
        is_served(&device).await;
    }
}

/// The result of a host function outlives its device, and is dropped where nothing of the user's may be.
#[tokio::test]
async fn a_result_without_a_device_may_panic_in_its_drop() {
    quietly();
    for depth in DEPTHS {
        let (faults, handle) = testing::faults();
        handle.record();
        let gone = testing::host_with(faults);
        let stream = gone.stream().unwrap();
        let op = stream.host_fn(move || Explosive(depth));
        soon(stream.done()).await.unwrap();
        drop((stream, gone));
        let count = |call| handle.calls().into_iter().filter(|made| *made == call).count();
        wait_until("the device goes", || count("stream_destroy") == count("stream_create"));
        let device = testing::device();
        let dropped = device.default_stream().host_fn(move || drop(op));
        soon(dropped).await.unwrap();
        is_served(&device).await;
    }
}

#[tokio::test]
async fn a_panic_of_a_host_function_reaches_its_future() {
    quietly();
    let device = testing::device();
    let stream = device.stream().unwrap();
    let op = stream.host_fn(|| -> u32 { panic_any(Bomb(2)) });
    let panicked = AssertUnwindSafe(soon(op)).catch_unwind().await;
    std::mem::forget(panicked.expect_err("it goes on with the panic"));
    is_served(&device).await;
}

/// Each thread of the crew's wakes somebody, and so do the threads of offloaded work.
#[tokio::test]
async fn a_panic_beside_offloaded_work_ends_nothing() {
    quietly();
    for depth in DEPTHS {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let foreign = Foreign::new(depth);
        let waker = Waker::from(foreign.clone());
        let end = Instant::now() + SOON;
        while foreign.woken.load(Ordering::SeqCst) < 20 {
            assert!(Instant::now() < end, "{:?}", foreign.woken);
            let x = drive(stream.upload_staged(vec![1u8; 9 << 20]), &waker).unwrap();
            let back = drive(stream.download_staged(&x), &waker).unwrap();
            assert!(back.iter().all(|byte| *byte == 1));
            drive(device.trim_pinned(0), &waker).unwrap();
            drive(device.pinned_async::<u8>(1 << 20), &waker).unwrap();
        }
        is_served(&device).await;
    }
}

#[tokio::test]
async fn a_twin_whose_panic_panics_loses_its_device_and_resolves_all() {
    quietly();
    for depth in DEPTHS {
        let device = Device::host();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let run = move |_: &Grid| panic_any(Bomb(depth));
        let kernel: Kernel<()> = Kernel::host(&device, "bomb", run).unwrap();
        let gate = Gate::close(&stream).unwrap();
        let launched = stream.launch(&kernel, LaunchConfig::new(1, 1), ());
        let behind = stream.host_fn(|| 1);
        let elsewhere = other.wait(&stream);
        gate.open();
        assert!(soon(launched).await.unwrap_err().is_device_lost());
        assert!(soon(behind).await.unwrap_err().is_device_lost());
        assert!(soon(elsewhere).await.unwrap_err().is_device_lost());
    }
}

/// The last to have a twin may be the thread that runs it.
#[tokio::test]
async fn what_a_twin_captured_may_panic_in_its_drop() {
    quietly();
    for depth in DEPTHS {
        let device = Device::host();
        let stream = device.stream().unwrap();
        let captured = Explosive(depth);
        let run = move |_: &Grid| assert!(std::ptr::from_ref(&captured).is_aligned());
        let kernel: Kernel<()> = Kernel::host(&device, "captures", run).unwrap();
        let gate = Gate::close(&stream).unwrap();
        let op = stream.launch(&kernel, LaunchConfig::new(1, 1), ());
        drop(kernel);
        let behind = stream.host_fn(|| 1);
        gate.open();
        soon(op).await.unwrap();
        assert_eq!(soon(behind).await.unwrap(), 1);
        is_served(&device).await;
    }
}

/// The same behind a fault: then it is dropped without having run.
#[tokio::test]
async fn what_an_unused_twin_captured_may_panic_in_its_drop() {
    quietly();
    for depth in DEPTHS {
        let device = Device::host();
        let stream = device.stream().unwrap();
        let fault = |_: &Grid| panic!("on purpose");
        let fault: Kernel<()> = Kernel::host(&device, "fault", fault).unwrap();
        let captured = Explosive(depth);
        let run = move |_: &Grid| assert!(std::ptr::from_ref(&captured).is_aligned());
        let kernel: Kernel<()> = Kernel::host(&device, "captures", run).unwrap();
        let gate = Gate::close(&stream).unwrap();
        let ops = [&fault, &kernel, &fault].map(|kernel| {
            let shape = LaunchConfig::new(1, 1);
            stream.launch(kernel, shape, ())
        });
        drop(kernel);
        gate.open();
        for op in ops {
            assert!(soon(op).await.unwrap_err().is_device_lost());
        }
    }
}

#[tokio::test]
async fn a_batch_whose_panic_panics_ends_only_itself() {
    quietly();
    async fn answer<T>(call: impl Future<Output = T>) -> T {
        tokio::time::timeout(SOON, call).await.expect("an answer")
    }
    for depth in DEPTHS {
        let run = move |batch: Vec<u32>| {
            assert!(!batch.is_empty());
            if batch.contains(&1) {
                panic_any(Bomb(depth));
            }
            // Dropped with the future, after its end.
            let kept = batch.contains(&2).then(|| Explosive(depth));
            std::future::poll_fn(move |_| {
                assert!(std::ptr::from_ref(&kept).is_aligned());
                if batch.contains(&3) {
                    panic_any(Bomb(depth));
                }
                Poll::Ready(Ok::<_, Error>(batch.iter().map(|n| Ok(*n)).collect()))
            })
        };
        let (batcher, worker) = Batcher::builder().max_len(2).build(run);
        let worker = tokio::spawn(worker);
        assert!(answer(batcher.call(1)).await.is_err());
        assert_eq!(answer(batcher.call(2)).await.unwrap(), 2);
        assert!(answer(batcher.call(3)).await.is_err());
        // The one beside it is answered as well.
        let waker = Waker::from(Foreign::everywhere(depth));
        let (mut woken, beside) = (batcher.call(5), batcher.call(6));
        assert!(woken.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(answer(beside).await.unwrap(), 6);
        assert_eq!(answer(batcher.call(7)).await.unwrap(), 7);
        drop((batcher, woken));
        tokio::time::timeout(SOON, worker).await.expect("it ends").expect("no panic");
    }
}

/// Whoever drops the worker drops the requests that wait, and tells everybody.
#[tokio::test]
async fn requests_that_panic_in_their_drop_keep_no_end_from_others() {
    quietly();
    let run = |batch: Vec<Option<Explosive>>| async move {
        Ok::<_, Error>(batch.iter().map(|_| Ok(())).collect())
    };
    let (batcher, worker) = Batcher::builder().build(run);
    let calls = [Some(Explosive(2)), None, Some(Explosive(2)), None].map(|q| batcher.call(q));
    drop(worker);
    for call in calls {
        let answer = tokio::time::timeout(SOON, call).await.expect("an answer");
        assert_eq!(answer.expect_err("nobody runs it").kind(), gpu_await::ErrorKind::Closed);
    }
}

/// A subscriber is foreign code as well; one for the whole process, in a process of its own.
#[test]
fn a_subscriber_that_panics_ends_nothing() {
    const NAME: &str = concat!(module_path!(), "::a_subscriber_that_panics_ends_nothing");
    if child::parameter().is_none() {
        child::run(NAME, "");
        return;
    }
    quietly();
    struct Panicking;
    impl tracing::Subscriber for Panicking {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() == tracing::Level::ERROR
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            panic_any(Bomb(2));
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }
    tracing::subscriber::set_global_default(Panicking).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let mut bad = stream.done();
        drop(stream.host_fn(|| -> u32 { panic!("on purpose") }));
        drop(stream.host_fn(|| Explosive(2)));
        let waker = Waker::from(Foreign::new(2));
        for _ in 0..1000 {
            assert!(bad.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        }
        gate.open();
        soon(stream.done()).await.unwrap();
        is_served(&device).await;
        // A loss is told, whatever becomes of the message.
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let told = device.lost();
        handle.lose_device("a test");
        let told = tokio::time::timeout(SOON, told).await;
        assert!(told.expect("it is told").is_device_lost());
    });
}

/// Panics in one kind of call, on each event and span of the crate.
struct PanicsAt(&'static str);

impl PanicsAt {
    const KINDS: [&'static str; 7] =
        ["enabled", "new_span", "event", "record", "enter", "exit", "close"];

    fn at(&self, kind: &str) {
        if self.0 == kind {
            panic_any(Bomb(2));
        }
    }
}

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for PanicsAt {
    fn enabled(
        &self,
        metadata: &tracing::Metadata<'_>,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) -> bool {
        let is_ours = metadata.target().starts_with("gpu_await");
        if is_ours {
            self.at("enabled");
        }
        is_ours || metadata.target() == "test"
    }
    fn register_callsite(
        &self,
        _: &'static tracing::Metadata<'static>,
    ) -> tracing::subscriber::Interest {
        // Asked each time.
        tracing::subscriber::Interest::sometimes()
    }
    fn on_new_span(
        &self,
        span: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        if span.metadata().target() != "test" {
            self.at("new_span");
        }
    }
    fn on_event(&self, _: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        self.at("event");
    }
    fn on_record(
        &self,
        _: &tracing::span::Id,
        _: &tracing::span::Record<'_>,
        _: tracing_subscriber::layer::Context<'_, S>,
    ) {
        self.at("record");
    }
    fn on_enter(&self, _: &tracing::span::Id, _: tracing_subscriber::layer::Context<'_, S>) {
        if !IN_TEST.get() {
            self.at("enter");
        }
    }
    fn on_exit(&self, _: &tracing::span::Id, _: tracing_subscriber::layer::Context<'_, S>) {
        if !IN_TEST.get() {
            self.at("exit");
        }
    }
    fn on_close(&self, _: tracing::span::Id, _: tracing_subscriber::layer::Context<'_, S>) {
        self.at("close");
    }
}

thread_local! {
    /// The test itself enters a span.
    static IN_TEST: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A waker whose drop panics.
struct DropsBadly;

impl Wake for DropsBadly {
    fn wake(self: Arc<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for DropsBadly {
    fn drop(&mut self) {
        panic_any(Bomb(2));
    }
}

/// Polls it once, with such a waker.
fn poll_badly<F: Future>(future: std::pin::Pin<&mut F>) {
    let waker = Waker::from(Arc::new(DropsBadly));
    assert!(future.poll(&mut Context::from_waker(&waker)).is_pending());
    // The future has the last one.
    drop(waker);
}

/// Runs it, which panics on purpose. If anything else panics meanwhile, the process ends.
fn unwinds(what: &str, run: impl FnOnce()) {
    eprintln!("unwinding: {what}");
    let payload = std::panic::catch_unwind(AssertUnwindSafe(run)).expect_err("on purpose");
    assert!(payload.is::<Bomb>(), "{what}");
    std::mem::forget(payload);
}

fn on_purpose() {
    panic_any(Bomb(0));
}

/// Foreign code that runs in a drop while its caller unwinds: a panic there would end the process.
fn unwind_everywhere() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = gpu_await::kernels::axpy::load_blocking(&device).unwrap();
    let x = stream.full(100, 1.0f32).queued().unwrap();
    let mut y = stream.full(100, 1.0f32).queued().unwrap();
    let mut region = gpu_await::Region::new();
    unwinds("a replayed batch", || {
        stream
            .replay(&mut region, |q| {
                axpy.launch(q, 1.0, &x, &mut y)?;
                on_purpose();
                Ok(())
            })
            .abandon();
        // The batch contains the panic and makes an error of it.
        on_purpose();
    });
    unwinds("a submission while unwinding", || {
        struct Submits<'a>(&'a gpu_await::Stream);
        impl Drop for Submits<'_> {
            fn drop(&mut self) {
                self.0.host_fn(|| ()).abandon();
                drop(self.0.zeros::<u8>(10).queued());
            }
        }
        let _submits = Submits(&stream);
        on_purpose();
    });
    let gate = Gate::close(&stream).unwrap();
    unwinds("an operation", || {
        let mut op = pin!(stream.host_fn(|| ()));
        poll_badly(op.as_mut());
        on_purpose();
    });
    // Devices are opened below, and have gates of their own: both wait for a gate that is closed.
    gate.open();
    unwinds("a loss", || {
        let mut lost = pin!(device.lost());
        poll_badly(lost.as_mut());
        on_purpose();
    });
    unwinds("a close", || {
        let other = testing::device();
        let busy = other.stream().unwrap();
        let _gate = Gate::close(&busy).unwrap();
        let mut close = pin!(other.close(SOON));
        poll_badly(close.as_mut());
        on_purpose();
    });
    unwinds("an acquire", || {
        let pool =
            gpu_await::StreamPool::builder().max_in_flight(1).streams(&device, 1).build().unwrap();
        let _held = pool.acquire().now_or_never().unwrap().unwrap();
        let mut waits = pin!(pool.acquire());
        poll_badly(waits.as_mut());
        on_purpose();
    });
    unwinds("an acquire whose deadline has passed", || {
        let pool =
            gpu_await::StreamPool::builder().max_in_flight(1).streams(&device, 1).build().unwrap();
        let _held = pool.acquire().now_or_never().unwrap().unwrap();
        // On a busy machine the first ones may pass before they are polled.
        let _waits = [1, 10, 100, 1000].into_iter().find_map(|ms| {
            let soon = Instant::now() + Duration::from_millis(ms);
            let mut waits = Box::pin(pool.acquire_by(soon));
            let polled = waits.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            while Instant::now() < soon {
                std::hint::spin_loop();
            }
            polled.is_pending().then_some(waits)
        });
        on_purpose();
    });
    unwinds("a throttle and a wait for memory", || {
        let limited = gpu_await::Device::builder().memory_limit_bytes(1 << 20).host();
        let busy = limited.stream().unwrap();
        let _gate = Gate::close(&busy).unwrap();
        let held = busy.zeros::<u8>(900 << 10).queued().unwrap();
        drop(held);
        let mut reclaimed = Box::pin(limited.reclaimed(900 << 10));
        let waker = Waker::noop();
        if reclaimed.poll_unpin(&mut Context::from_waker(waker)).is_pending() {
            poll_badly(reclaimed.as_mut());
        }
        on_purpose();
    });
    let (batcher, worker) = Batcher::builder().build(|batch: Vec<Option<Explosive>>| async move {
        Ok::<_, Error>(batch.iter().map(|_| Ok(())).collect())
    });
    unwinds("a call", || {
        let span = tracing::info_span!(target: "test", "a request");
        IN_TEST.set(true);
        let call = span.in_scope(|| batcher.call(Some(Explosive(2))));
        IN_TEST.set(false);
        // The request has the last one.
        std::mem::drop(std::panic::catch_unwind(AssertUnwindSafe(|| drop(span))));
        let mut call = pin!(call);
        poll_badly(call.as_mut());
        on_purpose();
    });
    unwinds("a batcher's worker", || {
        let mut worker = pin!(worker);
        poll_badly(worker.as_mut());
        on_purpose();
    });
    unwinds("a gate that its limit opened", || {
        let late = device.stream().unwrap();
        let gate = Gate::close_for(&late, Duration::from_millis(1)).unwrap();
        late.synchronize().unwrap();
        assert!(gate.timed_out());
        on_purpose();
    });
    stream.synchronize().unwrap();
}

/// Whatever a subscriber panics at, no call of this crate panics and no process ends, while the caller unwinds and
/// otherwise.
#[test]
fn a_subscriber_that_panics_at_everything() {
    const NAME: &str = concat!(module_path!(), "::a_subscriber_that_panics_at_everything");
    let Some(kind) = child::parameter() else {
        for kind in PanicsAt::KINDS {
            child::run(NAME, kind);
        }
        return;
    };
    quietly();
    let kind = PanicsAt::KINDS.into_iter().find(|known| **known == kind).expect("a kind");
    let subscriber = tracing_subscriber::registry();
    let subscriber = tracing_subscriber::layer::SubscriberExt::with(subscriber, PanicsAt(kind));
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = testing::device();
        device.timeline().start(100).unwrap();
        is_served(&device).await;
        drop(device.timeline().snapshot());
        let stream = device.stream().unwrap();
        let axpy = gpu_await::kernels::axpy::load(&device).await.unwrap();
        let x = stream.full(100, 1.0f32).queued().unwrap();
        let mut y = stream.full(100, 1.0f32).queued().unwrap();
        let mut region = gpu_await::Region::new();
        for _ in 0..3 {
            let op = stream.replay(&mut region, |q| axpy.launch(q, 1.0, &x, &mut y));
            soon(op).await.unwrap();
        }
        assert_eq!(soon(stream.download(&y)).await.unwrap()[..], [4.0; 100]);
        let auto = gpu_await::Device::cuda_or_host().unwrap();
        is_served(&auto).await;
        // A subscriber's panic is not the batch's.
        let (batcher, worker) = Batcher::builder().build(|batch: Vec<u32>| async move {
            Ok::<_, Error>(batch.into_iter().map(Ok).collect())
        });
        let worker = tokio::spawn(worker);
        let span = tracing::info_span!(target: "test", "a request");
        IN_TEST.set(true);
        let call = span.in_scope(|| batcher.call(7));
        IN_TEST.set(false);
        std::mem::forget(span);
        let answer = tokio::time::timeout(SOON, call).await.expect("an answer");
        assert_eq!(answer.unwrap(), 7);
        drop(batcher);
        tokio::time::timeout(SOON, worker).await.expect("it ends").expect("no panic");
    });
    unwind_everywhere();
}
