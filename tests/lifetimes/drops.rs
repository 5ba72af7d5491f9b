//! Dropping, abandoning and leaking at any moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, Stream, kernels};

use crate::under_test::completions;
use crate::under_test::settled::settled;

/// A task that is through is not kept by the device whose loss it might have been told.
#[test]
fn a_dropped_wait_for_a_loss_keeps_no_waker() {
    struct Quiet;
    impl std::task::Wake for Quiet {
        fn wake(self: Arc<Self>) {}
    }
    let device = testing::device();
    let quiet = Arc::new(Quiet);
    let waker = std::task::Waker::from(quiet.clone());
    let mut cx = std::task::Context::from_waker(&waker);
    let mut losses: Vec<_> = (0..10).map(|_| device.lost()).collect();
    for _ in 0..2 {
        for loss in &mut losses {
            assert!(futures::FutureExt::poll_unpin(loss, &mut cx).is_pending());
        }
    }
    assert_eq!(Arc::strong_count(&quiet), 12);
    drop(losses);
    assert_eq!(Arc::strong_count(&quiet), 2);
}

#[tokio::test]
async fn drop_before_completion_keeps_buffers() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let (mut pinned, mut expected) = (stream.pinned::<u32>(100_000)?, 0u64);
        for (index, x) in pinned.iter_mut().enumerate() {
            *x = index as u32;
            expected += index as u64;
        }
        let mut x = stream.zeros::<u32>(100_000).queued()?;
        let gate = Gate::close(&stream)?;
        drop(stream.upload_into(pinned, &mut x));
        // Had the block gone back to the pool, this would be it, and the copy would see zeros.
        let mut other = stream.pinned::<u32>(100_000)?;
        other.fill(0);
        assert!(device.stats().lent_bytes >= 400_000);
        gate.open();
        let sum: u64 = stream.download(&x).await?.iter().map(|x| u64::from(*x)).sum();
        assert_eq!(sum, expected);
        drop(x);
        settled(&device).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_time_out_returns_at_once_and_the_work_goes_on() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let x = stream.full(10, 4u8).queued()?;
        let gate = Gate::close(&stream)?;
        let mut times = Vec::new();
        for _ in 0..5 {
            let start = std::time::Instant::now();
            let late = tokio::time::timeout(Duration::from_millis(10), stream.download(&x)).await;
            assert!(late.is_err());
            times.push(start.elapsed());
        }
        // The quickest: another thread may have had the core.
        assert!(times.iter().any(|took| *took < Duration::from_millis(200)), "{times:?}");
        assert!(!gate.timed_out());
        gate.open();
        assert_eq!(stream.download(&x).await?, [4; 10]);
        drop(x);
        settled(&device).await;
        Ok(())
    })
    .await;
}

/// The last handle of a stream and memory of it, dropped at once by two threads: the memory is free when its free was run.
#[test]
fn memory_and_its_stream_dropped_at_once() {
    let device = Device::builder().memory_limit_bytes(64 << 20).host();
    let barrier = std::sync::Barrier::new(2);
    for round in 0..3000 {
        let stream = device.stream().unwrap();
        let x = stream.empty::<u8>(3 << 20).queued().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                drop(x);
            });
            barrier.wait();
            // So that it meets each step of the other one's.
            (0..round % 300).for_each(|_| std::hint::spin_loop());
            drop(stream);
        });
        let stats = device.stats();
        assert_eq!((stats.leaked_bytes, stats.unreturned), (0, 0), "round {round}");
    }
    futures::executor::block_on(device.close(crate::SOON)).unwrap();
    assert_eq!(device.stats().pending_bytes, 0);
}

/// Each operation, polled `polls` times, then dropped.
async fn drop_after(device: &Device, stream: &Stream, polls: usize) -> gpu_await::Result<()> {
    async fn poll_and_drop<T>(mut op: gpu_await::Op<T>, polls: usize) {
        for _ in 0..polls {
            if (&mut op).now_or_never().is_some() {
                return;
            }
            tokio::task::yield_now().await;
        }
    }
    let scale = kernels::scale::load(device).await?;
    let mut x = stream.full(1000, 1.0f32).queued()?;
    poll_and_drop(scale.launch(stream, 2.0, &mut x), polls).await;
    poll_and_drop(stream.upload(vec![1u8; 5000]), polls).await;
    poll_and_drop(stream.download(&x), polls).await;
    poll_and_drop(stream.download_vec(&x), polls).await;
    poll_and_drop(stream.fill(&mut x, 2.0), polls).await;
    poll_and_drop(stream.empty::<f64>(100), polls).await;
    poll_and_drop(stream.host_fn(|| vec![1; 100]), polls).await;
    poll_and_drop(stream.done(), polls).await;
    poll_and_drop(stream.record()?.done(), polls).await;
    poll_and_drop(device.done(), polls).await;
    poll_and_drop(stream.timed(|q| q.fill(&mut x, 1.0)), polls).await;
    let pinned = stream.pinned::<f32>(1000)?;
    poll_and_drop(stream.download_into(&x, pinned), polls).await;
    poll_and_drop(stream.batch(|q| Ok((q.download(&x)?, q.host_fn(|| 1)?))), polls).await;
    poll_and_drop(gpu_await::join_all([stream.host_fn(|| 1), stream.host_fn(|| 2)]), polls).await;
    Ok(())
}

#[tokio::test]
async fn every_operation_can_be_dropped_at_every_poll() {
    completions::each(|device| async move {
        for polls in [0, 1, 2, 3, 10, 1000] {
            let stream = device.stream()?;
            let gate = if polls % 2 == 1 { Some(Gate::close(&stream)?) } else { None };
            // Behind a gate nothing completes: loading a kernel comes first.
            if gate.is_none() {
                drop_after(&device, &stream, polls).await?;
            } else {
                let x = stream.full(100, 1u8).queued()?;
                let mut op = stream.download(&x);
                for _ in 0..polls {
                    assert!((&mut op).now_or_never().is_none());
                }
            }
            drop(gate);
            stream.done().await?;
        }
        settled(&device).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_leaked_op_leaks_memory_and_nothing_worse() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let x = stream.full(1000, 3u8).queued()?;
        for _ in 0..10 {
            let mut op = stream.download(&x);
            drop((&mut op).now_or_never());
            std::mem::forget(op);
        }
        assert_eq!(stream.download(&x).await?, [3; 1000]);
        stream.done().await
    })
    .await;
}

#[tokio::test]
async fn a_stream_dropped_with_work_pending_finishes_it() {
    completions::each(|device| async move {
        let ran = Arc::new(AtomicU32::new(0));
        let stream = device.stream()?;
        let gate = Gate::close(&stream)?;
        for _ in 0..5 {
            let ran = ran.clone();
            stream
                .host_fn(move || {
                    ran.fetch_add(1, Ordering::SeqCst);
                })
                .queued()?;
        }
        let x = stream.full(1000, 1u8).queued()?;
        drop((stream, x));
        gate.open();
        settled(&device).await;
        assert_eq!(ran.load(Ordering::SeqCst), 5);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn what_a_host_function_captured_is_dropped_in_the_end() {
    struct Counted(Arc<AtomicU32>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let drops = Arc::new(AtomicU32::new(0));
    let device = testing::device();
    let stream = device.stream().unwrap();
    for _ in 0..10 {
        let counted = Counted(drops.clone());
        // The result is abandoned: it is dropped when the device is through.
        drop(stream.host_fn(move || counted));
    }
    stream.done().await.unwrap();
    settled(&device).await;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    while drops.load(Ordering::SeqCst) < 10 {
        assert!(std::time::Instant::now() < end, "{} of 10", drops.load(Ordering::SeqCst));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

struct Panicking;
impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        panic!("a waker panics on purpose");
    }
}

struct Counting(AtomicU32);
impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn wakers_may_panic_and_be_replaced() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let gate = Gate::close(&stream)?;
        let mut bad = stream.done();
        let mut replaced = stream.done();
        let good = stream.done();
        let panicking = Waker::from(Arc::new(Panicking));
        let counting = Arc::new(Counting(AtomicU32::new(0)));
        // The first polls may be checks that wake their own task; later ones register.
        for _ in 0..1000 {
            let mut cx = Context::from_waker(&panicking);
            let poll = std::panic::AssertUnwindSafe(|| bad.poll_unpin(&mut cx));
            if let Ok(poll) = std::panic::catch_unwind(poll) {
                assert!(poll.is_pending());
            }
            let old = Waker::from(Arc::new(Counting(AtomicU32::new(0))));
            assert!(replaced.poll_unpin(&mut Context::from_waker(&old)).is_pending());
        }
        let waker = Waker::from(counting.clone());
        assert!(replaced.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        gate.open();
        good.await?;
        let end = std::time::Instant::now() + Duration::from_secs(5);
        while counting.0.load(Ordering::SeqCst) == 0 {
            assert!(std::time::Instant::now() < end, "the replacement was never woken");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(matches!(
            replaced.poll_unpin(&mut Context::from_waker(&waker)),
            Poll::Ready(Ok(()))
        ));
        bad.await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_many_streams_drop_and_finish() {
    completions::each(|device| async move {
        let streams: Vec<_> = (0..6).map(|_| device.stream()).collect::<Result<_, _>>()?;
        let scale = kernels::scale::load(&device).await?;
        let mut tasks = Vec::new();
        for task in 0..24u32 {
            let (streams, scale) = (streams.clone(), scale.clone());
            tasks.push(tokio::spawn(async move {
                for round in 0..20u32 {
                    let home = &streams[(task + round) as usize % 6];
                    let away = &streams[(task * 5 + round * 3) as usize % 6];
                    let start = (task * 100 + round) as f32;
                    let mut x = home.upload(vec![start; 300]).queued()?;
                    scale.launch(away, 2.0, &mut x).queued()?;
                    let op = home.download(&x);
                    if round % 4 == 3 {
                        drop(op);
                        continue;
                    }
                    drop(x);
                    assert_eq!(op.await?, [2.0 * start; 300]);
                }
                Ok::<(), gpu_await::Error>(())
            }));
        }
        for task in tasks {
            task.await.expect("no task panics")?;
        }
        settled(&device).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn what_a_host_function_returned_is_dropped_off_the_drivers_thread() {
    struct Says(std::sync::mpsc::Sender<std::thread::ThreadId>);
    impl Drop for Says {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).ok();
        }
    }
    completions::each(|device| async move {
        let stream = device.stream()?;
        let (sender, dropped) = std::sync::mpsc::channel();
        let says = Says(sender);
        let (ran, runs_on) = std::sync::mpsc::channel();
        let op = stream.host_fn(move || {
            ran.send(std::thread::current().id()).ok();
            says
        });
        drop(op);
        let driver = runs_on.recv_timeout(Duration::from_secs(5)).expect("it ran");
        let dropper = dropped.recv_timeout(Duration::from_secs(5)).expect("it was dropped");
        assert_ne!(dropper, driver);
        stream.done().await
    })
    .await;
}

#[test]
fn a_stream_whose_marker_was_refused_goes_away() {
    let (faults, handle) = testing::faults();
    let (device, step) =
        testing::manual_with_faults_completion(faults, gpu_await::Completion::Word);
    let streams = device.stats().streams;
    let stream = device.stream().unwrap();
    let empty = kernels::empty::load_blocking(&device).unwrap();
    let mut op = empty.launch(&stream);
    handle.fail_nth(testing::DriverCall::WriteWord, 1, gpu_await::ErrorKind::Driver);
    // It asks for a marker, and is given up with the stream before it asks again.
    assert!((&mut op).now_or_never().is_none());
    drop((op, stream));
    step.run_until_idle();
    assert_eq!(device.stats().streams, streams);
}

/// A write that was refused may come all the same. A second one of the same value would hide that it is late.
#[test]
fn no_word_is_written_behind_a_refused_one() {
    let (faults, handle) = testing::faults();
    let (device, step) =
        testing::manual_with_faults_completion(faults, gpu_await::Completion::Word);
    let stream = device.stream().unwrap();
    let empty = kernels::empty::load_blocking(&device).unwrap();
    handle.record();
    handle.fail_nth_after_effect(testing::DriverCall::WriteWord, 1, gpu_await::ErrorKind::Driver);
    for _ in 0..3 {
        let mut op = empty.launch(&stream);
        drop((&mut op).now_or_never());
        step.run_until_idle();
        op.now_or_never().expect("it is complete").unwrap();
    }
    let calls = handle.calls();
    let count = |name: &str| calls.iter().filter(|call| **call == name).count();
    assert_eq!(count("write_word"), 1, "{calls:?}");
    assert_eq!(count("event_record"), 2, "{calls:?}");
}

#[test]
fn streams_that_come_and_go_leave_no_events() {
    let (faults, handle) = testing::faults();
    let (device, step) = testing::manual_with_faults(faults);
    let stays = device.stream().unwrap();
    handle.record();
    for _ in 0..100 {
        let goes = device.stream().unwrap();
        let x = goes.full(10, 1u8).queued().unwrap();
        stays.wait(&goes.record().unwrap()).queued().unwrap();
        // With its marker still to come.
        drop((x, goes));
        step.run_until_idle();
    }
    let calls = handle.calls();
    let count = |name: &str| calls.iter().filter(|call| **call == name).count();
    let (made, gone) = (count("event_create"), count("event_destroy"));
    assert!(made - gone <= 20, "{made} made, {gone} destroyed");
}

#[test]
fn an_op_that_outlives_its_device_leaves_no_events() {
    let (faults, handle) = testing::faults();
    handle.record();
    let device = testing::host_with(faults);
    let op = device.stream().unwrap().done();
    drop(device);
    let end = std::time::Instant::now() + Duration::from_secs(10);
    // It says so, whether its device is still there or not.
    op.synchronize().unwrap();
    let count = |name: &str| handle.calls().iter().filter(|call| **call == name).count();
    while count("event_create") > count("event_destroy") {
        let (made, gone) = (count("event_create"), count("event_destroy"));
        assert!(std::time::Instant::now() < end, "{made} made, {gone} destroyed");
        std::thread::yield_now();
    }
}

#[test]
fn memory_lent_beside_a_loss_is_counted_when_its_stream_goes() {
    let (faults, handle) = testing::faults();
    let (device, _step) = testing::manual_with_faults(faults);
    let stream = device.stream().unwrap();
    let pinned = stream.pinned::<u8>(100).unwrap();
    let held = kernels::empty::load_blocking(&device).unwrap().launch(&stream);
    handle.lose_device("on purpose");
    // It learns of the loss from the marker of what is held, and lends its memory after that.
    assert!(stream.upload(pinned).queued().unwrap_err().is_device_lost());
    drop((held, stream));
    let stats = device.stats();
    assert_eq!(stats.lent_bytes, 0, "{stats:?}");
    assert!(stats.quarantined_bytes >= 100, "{stats:?}");
}
