//! A device that faults: every pending and every later future resolves with an error, in each
//! completion mode, and nothing hangs. Each in a child process, because a fault is sticky.

use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{Completion, DeviceKind, ErrorDetail, ErrorKind, LaunchConfig, kernels};

use crate::under_test::child;
use crate::under_test::faulty::faulty;
use crate::under_test::modes;

fn mode(name: &str) -> Completion {
    *modes::ALL.iter().find(|mode| format!("{mode:?}") == name).expect("a mode's name")
}

#[test]
fn a_fault_resolves_every_pending_and_later_future() {
    const NAME: &str = concat!(module_path!(), "::a_fault_resolves_every_pending_and_later_future");
    let Some(parameter) = child::parameter() else {
        for mode in modes::ALL {
            for futures in [1, 64, 2000] {
                for streams in [1, 8] {
                    child::run(NAME, &format!("{mode:?} {futures} {streams}"));
                }
            }
        }
        return;
    };
    let mut words = parameter.split(' ');
    let mode = mode(words.next().expect("a mode"));
    let futures: usize = words.next().and_then(|n| n.parse().ok()).expect("futures");
    let streams: usize = words.next().and_then(|n| n.parse().ok()).expect("streams");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("tokio");
    runtime.block_on(async move {
        let device = testing::device_with(mode);
        let trap = faulty(&device).await;
        let spin = kernels::spin::load(&device).await.expect("spin loads");
        let streams: Vec<_> = (0..streams).map(|_| device.stream().expect("a stream")).collect();
        let x = streams[0].upload(vec![7u32; 1000]).await.expect("before the fault");
        let readable = streams[0].download(&x).await.expect("before the fault");
        let mut tasks = Vec::new();
        let config = LaunchConfig::new(1, 1);
        for (n, stream) in streams.iter().enumerate() {
            match stream.launch(&trap, config, ()).queued() {
                Ok(()) => {}
                // The first one may have struck already.
                Err(error) => assert!(n > 0 && error.is_device_lost(), "{error}"),
            }
        }
        for n in 0..futures {
            // At most 900 a stream: the queue of a device that stands still is short.
            let stream = &streams[n % streams.len()];
            if stream.submitted() - stream.completed() > 900 {
                break;
            }
            match n % 3 {
                0 => tasks.push(tokio::spawn(spin.launch(stream, 1000))),
                1 => tasks.push(tokio::spawn(stream.host_fn(|| ()))),
                _ => tasks.push(tokio::spawn(stream.done())),
            }
        }
        let start = Instant::now();
        for task in tasks {
            let error = tokio::time::timeout(Duration::from_secs(20), task)
                .await
                .expect("every future resolves")
                .expect("no task panics")
                .expect_err("the device faulted");
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        }
        let resolved = start.elapsed();
        let lost = device.lost().await;
        assert!(matches!(lost.detail(), ErrorDetail::DeviceLost { .. }), "{lost}");
        for _ in 0..3 {
            for stream in &streams {
                let error = stream.upload(vec![1u8; 10]).await.expect_err("lost");
                assert_eq!(error.kind(), ErrorKind::DeviceLost);
                assert_eq!(stream.done().await.expect_err("lost").kind(), ErrorKind::DeviceLost);
                assert!(stream.host_fn(|| 1).await.is_err());
                assert!(stream.record().is_err());
            }
        }
        assert!(device.stream().is_err());
        assert_eq!(readable[999], 7, "host memory stays readable");
        assert!(device.close(Duration::from_secs(5)).await.is_err(), "close returns");
        println!("resolved after {resolved:?}");
    });
}

#[test]
fn memory_lent_at_a_fault_is_quarantined_and_counted() {
    const NAME: &str =
        concat!(module_path!(), "::memory_lent_at_a_fault_is_quarantined_and_counted");
    if child::parameter().is_none() {
        child::run(NAME, "");
        return;
    }
    futures::executor::block_on(async {
        let device = testing::device();
        let trap = faulty(&device).await;
        let stream = device.stream().expect("a stream");
        let mut x = stream.zeros::<u8>(1 << 20).await.expect("before the fault");
        let pinned = stream.pinned::<u8>(1 << 20).expect("pinned memory");
        stream.launch(&trap, LaunchConfig::new(1, 1), ()).queued().expect("submitted");
        let error = stream.upload_into(pinned, &mut x).await.expect_err("lost");
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        let stats = device.stats();
        assert_eq!(stats.lent_bytes, 0);
        assert!(stats.quarantined_bytes == 0 || stats.quarantined_bytes >= 1 << 20, "{stats:?}");
    });
}

/// What would submit nothing fails as well once the loss is known: a loop that ends with an error ends.
#[test]
fn nothing_succeeds_after_a_known_loss() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().expect("a stream");
    let event = stream.record().expect("an event");
    stream.done().synchronize().expect("before the loss");
    handle.lose_device("on purpose");
    assert!(device.done().synchronize().is_err(), "asks the device");
    futures::executor::block_on(async {
        assert!(stream.throttle(0).await.is_err());
        assert!(stream.throttle(9).await.is_err());
        assert!(stream.done().await.is_err());
        assert!(stream.wait(&event).await.is_err());
        assert!(stream.join(Vec::<&gpu_await::Stream>::new()).await.is_err());
        assert!(stream.batch(|_| Ok(())).await.is_err());
        // What was complete before the loss was complete.
        event.done().await.expect("complete before");
    });
}

#[test]
fn another_device_goes_on_and_dependants_are_told() {
    const NAME: &str = concat!(module_path!(), "::another_device_goes_on_and_dependants_are_told");
    if testing::device().kind() == DeviceKind::Cuda {
        return; // one GPU is one context: the fault is everybody's
    }
    if child::parameter().is_none() {
        child::run(NAME, "");
        return;
    }
    futures::executor::block_on(async {
        let (a, b) = (testing::device(), testing::device());
        let trap = faulty(&a).await;
        let (s, t) = (a.stream().expect("a"), b.stream().expect("b"));
        let mut y = t.zeros::<u32>(100).queued().expect("b works");
        let gate = Gate::close(&s).expect("a gate");
        s.launch(&trap, LaunchConfig::new(1, 1), ()).queued().expect("submitted");
        let x = s.full(100, 1u32).queued().expect("submitted");
        let dependent = t.copy(&x, &mut y);
        gate.open();
        let error = dependent.await.expect_err("the input never comes");
        assert!(matches!(error.detail(), ErrorDetail::DependencyLost { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        let free = b.stream().expect("b works");
        let z = free.full(10, 3u8).queued().expect("b works");
        assert_eq!(free.download(&z).await.expect("b works"), [3; 10]);
    });
}

#[test]
fn the_process_exits_cleanly_with_work_pending() {
    const NAME: &str = concat!(module_path!(), "::the_process_exits_cleanly_with_work_pending");
    let Some(parameter) = child::parameter() else {
        for mode in modes::ALL {
            child::run(NAME, &format!("{mode:?}"));
        }
        return;
    };
    let device = testing::device_with(mode(&parameter));
    let stream = device.stream().expect("a stream");
    let spin = futures::executor::block_on(kernels::spin::load(&device)).expect("spin loads");
    // Memory for all that follows: making it may take as long as the kernel.
    let x = stream.zeros::<u8>(1 << 20).queued().expect("submitted");
    drop(futures::executor::block_on(stream.download(&x)).expect("downloads"));
    spin.launch(&stream, 300_000_000).queued().expect("submitted");
    let launched = std::time::Instant::now();
    let op = stream.download(&x);
    // Polled, so that the poller has it, and then leaked with everything else.
    let mut op = Box::pin(op);
    let waker = std::task::Waker::noop();
    let polled = op.as_mut().poll(&mut std::task::Context::from_waker(waker));
    assert!(polled.is_pending(), "{polled:?} {:?} after the launch", launched.elapsed());
    std::mem::forget((op, x, stream, device));
}
