//! Copies between the device and ordinary host memory, off the executor.

use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{Element, ErrorDetail, ErrorKind, Stream};

use crate::under_test::completions;
use crate::under_test::settled::settled;
use crate::under_test::taken_pool;

const SOON: Duration = Duration::from_secs(10);
/// Twelve parts and a bit: more than may be on their way at once on two cores.
const MANY: usize = 25_000_000;
/// What is copied in one go, in bytes.
const PART: usize = 2 << 20;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// [`settled`] beside uploads that were given up: the allocation of one may come late, from a thread of
/// its own, and has no marker.
async fn settled_late(stream: &Stream) {
    let settled = async {
        loop {
            stream.done().await.expect("no loss");
            let stats = stream.device().stats();
            if stats.in_flight + stats.lent_bytes + stats.pending_bytes + stats.allocations == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    soon(settled).await;
}

/// Without optimization, 25 million that are computed one by one take half a second. Those of a prime number come again and again: no
/// part is as another one.
fn numbers(len: usize) -> Vec<u32> {
    const AGAIN: u32 = 99_991;
    let first: Vec<u32> =
        (0..AGAIN.min(len as u32)).map(|n| n.wrapping_mul(2_654_435_761)).collect();
    let mut all = first.repeat(len.div_ceil(AGAIN as usize));
    all.truncate(len);
    all
}

#[tokio::test]
async fn staged_copies_give_back_what_was_given() {
    async fn there_and_back<T: Element + PartialEq>(stream: &Stream, data: Vec<T>) {
        let x = stream.upload_staged(data.clone()).await.unwrap();
        assert_eq!(x.len(), data.len());
        let back = stream.download_staged(&x).await.unwrap();
        assert!(back == data, "{} × {} bytes", data.len(), size_of::<T>());
        let (address, again) = (back.as_ptr(), stream.download_staged_into(&x, back));
        let again = again.await.unwrap();
        assert!(again == data && (again.as_ptr() == address || size_of_val(&*data) == 0));
        // Through the other path as well.
        assert!(stream.download_vec(&x).await.unwrap() == data);
    }
    completions::each(|device| async move {
        let stream = device.stream()?;
        for bytes in [0, 1, PART - 1, PART, PART + 1, 3 * PART + 5] {
            there_and_back(&stream, (0..bytes).map(|n| (n % 251) as u8).collect()).await;
        }
        there_and_back(&stream, (0..PART).map(|n| [n as u8, 1, (n >> 8) as u8]).collect()).await;
        there_and_back(&stream, (0..PART / 4).map(|n| [n as u64, 7]).collect()).await;
        there_and_back(&stream, numbers(MANY / 4)).await;
        settled(&device).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn every_source_can_be_staged() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let shared: std::sync::Arc<[u32]> = numbers(1000).into();
    let mut pinned = stream.pinned::<u32>(1000).unwrap();
    pinned.copy_from_slice(&shared);
    let sources = [
        stream.upload_staged(shared.clone()).await.unwrap(),
        stream.upload_staged(numbers(1000).into_boxed_slice()).await.unwrap(),
        stream.upload_staged(<[u32; 1000]>::try_from(numbers(1000)).unwrap()).await.unwrap(),
        stream.upload_staged(pinned).await.unwrap(),
    ];
    for x in sources {
        assert_eq!(stream.download(&x.slice(..).unwrap()).await.unwrap(), shared[..]);
        let part = stream.download_staged(&x.slice(10..20).unwrap()).await.unwrap();
        assert_eq!(part, shared[10..20]);
    }
}

#[tokio::test]
async fn a_staged_upload_returns_when_it_is_on_the_stream() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let gate = Gate::close(&stream).unwrap();
    let x = soon(stream.upload_staged(numbers(100_000))).await.unwrap();
    let mut back = stream.download(&x);
    assert!((&mut back).now_or_never().is_none(), "the stream is held");
    gate.open();
    assert_eq!(soon(back).await.unwrap(), numbers(100_000));
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn a_held_stream_delays_no_other_staged_copy() {
    let device = testing::device();
    let (held, free) = (device.stream().unwrap(), device.stream().unwrap());
    let data: std::sync::Arc<[u32]> = numbers(MANY).into();
    let z = free.upload_staged(data.clone()).await.unwrap();
    let gate = Gate::close(&held).unwrap();
    let mut stuck_up = Box::pin(held.upload_staged(data.clone()));
    let mut stuck_down = Box::pin(held.download_staged(&z));
    // As far as they come.
    let stuck = async { futures::join!(&mut stuck_up, &mut stuck_down) };
    assert!(tokio::time::timeout(Duration::from_millis(100), stuck).await.is_err());
    let x = soon(free.upload_staged(data.clone())).await.unwrap();
    assert!(soon(free.download_staged(&x)).await.unwrap() == *data);
    assert!(!gate.timed_out());
    gate.open();
    let y = soon(stuck_up).await.unwrap();
    assert!(soon(stuck_down).await.unwrap() == *data);
    assert!(soon(held.download_staged(&y)).await.unwrap() == *data);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_blocks_no_poll_of_a_staged_copy_and_delays_no_other() {
    let device = testing::device();
    let (full, free) = (device.stream().unwrap(), device.stream().unwrap());
    let data: std::sync::Arc<[u32]> = numbers(MANY / 8).into();
    let x = full.upload_staged(data.clone()).await.unwrap();
    let mut y = full.zeros::<u8>(1).await.unwrap();
    // What the other stream needs is there: making pinned memory, events or memory of the device's
    // pool would wait for the thread that the driver holds. Six parts up, perhaps on their way still,
    // and six down.
    let parts: Vec<_> = (0..12).map(|_| device.pinned::<u8>(PART).unwrap()).collect();
    drop(parts);
    let z = free.upload_staged(data.clone()).await.unwrap();
    drop(free.download_staged(&z).await.unwrap());
    drop(z);
    let gate = Gate::close(&full).unwrap();
    let submitter = std::thread::spawn({
        let full = full.clone();
        move || (0..1500).try_for_each(|_| full.fill(&mut y, 1).queued())
    });
    // Full when the number of submissions stands still; the thread then has the submission lock.
    let mut last = 0;
    while full.submitted() != last || last < 600 {
        last = full.submitted();
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    assert!(last < 1500, "the queue never filled");
    let start = std::time::Instant::now();
    let mut stuck: Vec<_> = (0..10).map(|_| Box::pin(full.upload_staged(data.clone()))).collect();
    for upload in &mut stuck {
        assert!(upload.as_mut().now_or_never().is_none());
    }
    let mut down = Box::pin(full.download_staged(&x));
    assert!((&mut down).now_or_never().is_none());
    assert!(start.elapsed() < Duration::from_secs(1), "a poll waited for the queue");
    let z = soon(free.upload_staged(data.clone())).await.unwrap();
    assert!(soon(free.download_staged(&z)).await.unwrap() == *data);
    assert!(!gate.timed_out());
    gate.open();
    for upload in stuck {
        soon(upload).await.unwrap();
    }
    assert!(soon(down).await.unwrap() == *data);
    submitter.join().unwrap().unwrap();
}

#[tokio::test]
async fn a_poll_of_a_staged_copy_submits_at_most_one_part() {
    /// The future's output and the most submissions of one of its polls; lets all that it waits for
    /// come between two polls.
    async fn polled<F: Future + Unpin>(stream: &Stream, mut future: F) -> (F::Output, u64) {
        let mut most = 0;
        loop {
            let before = stream.submitted();
            let output = (&mut future).now_or_never();
            // The first is the allocation, by another thread.
            most = most.max(if before == 0 { 0 } else { stream.submitted() - before });
            match output {
                Some(output) => return (output, most),
                None => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    }
    let device = testing::device();
    let (up, down) = (device.stream().unwrap(), device.stream().unwrap());
    let (x, most) = polled(&up, Box::pin(up.upload_staged(numbers(MANY)))).await;
    assert_eq!(most, 1, "up");
    down.wait(&up).await.unwrap();
    let x = x.unwrap();
    let (back, most) = polled(&down, Box::pin(down.download_staged(&x))).await;
    assert_eq!(most, 1, "down");
    assert!(back.unwrap() == numbers(MANY));
}

#[tokio::test]
async fn a_staged_copy_keeps_a_bounded_amount_pinned() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let parts = MANY * 4 / PART + 1;
    let x = stream.upload_staged(numbers(MANY)).await.unwrap();
    drop(stream.download_staged(&x).await.unwrap());
    let pinned = device.stats().pinned_bytes as usize >> 21;
    let cores = std::thread::available_parallelism().unwrap().get();
    // With the crew and with the device, up and down; and one for small things.
    let most = 4 * ((cores / 2).clamp(2, 8) + 2) + 1;
    assert!(pinned <= most && (most > parts || pinned < parts), "{pinned} of {parts} parts");
}

#[tokio::test]
async fn a_staged_copy_can_be_dropped_at_any_poll() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let data: std::sync::Arc<[u32]> = numbers(MANY / 8).into();
        let x = stream.upload_staged(data.clone()).await?;
        for polls in (0..20).chain([30, 100, 1000]) {
            let gate = if polls % 3 == 1 { Some(Gate::close(&stream)?) } else { None };
            let mut up = Box::pin(stream.upload_staged(data.clone()));
            let mut down = Box::pin(stream.download_staged(&x));
            let (mut up_done, mut down_done) = (false, false);
            for _ in 0..polls {
                up_done = up_done || (&mut up).now_or_never().is_some();
                down_done = down_done || (&mut down).now_or_never().is_some();
                tokio::task::yield_now().await;
            }
            drop((up, down, gate));
        }
        assert!(stream.download_staged(&x).await? == *data);
        drop(x);
        settled_late(&stream).await;
        // The crew is through as well: nobody else holds the data.
        soon(async {
            while std::sync::Arc::strong_count(&data) > 1 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn work_submitted_meanwhile_goes_between_the_parts_and_harms_nobody() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let mut y = stream.zeros::<u32>(1000).queued().unwrap();
    let mut upload = Box::pin(stream.upload_staged(numbers(MANY / 2)));
    let mut value = 0;
    let x = loop {
        if let Some(x) = (&mut upload).now_or_never() {
            break x.unwrap();
        }
        value += 1;
        stream.fill(&mut y, value).queued().unwrap();
        tokio::task::yield_now().await;
        stream.throttle(100).await.unwrap();
    };
    assert!(value > 0);
    assert_eq!(stream.download(&y).await.unwrap()[999], value);
    assert!(stream.download_staged(&x).await.unwrap() == numbers(MANY / 2));
}

#[tokio::test]
async fn a_staged_copy_that_fails_says_so_and_leaves_nothing() {
    for (call, nth) in [
        (DriverCall::Alloc, 1),
        (DriverCall::CopyToDevice, 1),
        (DriverCall::CopyToDevice, 4),
        (DriverCall::Register, 1),
    ] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream().unwrap();
        handle.fail_nth(call, nth, ErrorKind::Unsupported);
        let error = soon(stream.upload_staged(numbers(MANY / 4))).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{call:?}: {error}");
        // The same again.
        let x = soon(stream.upload_staged(numbers(MANY / 4))).await.unwrap();
        handle.fail_nth(DriverCall::CopyToHost, nth, ErrorKind::Unsupported);
        let error = soon(stream.download_staged(&x)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(soon(stream.download_staged(&x)).await.unwrap() == numbers(MANY / 4));
        drop(x);
        settled(&device).await;
    }
}

#[tokio::test]
async fn a_staged_copy_of_a_lost_or_closed_device_ends() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let x = stream.upload_staged(numbers(MANY / 4)).await.unwrap();
    let gate = Gate::close(&stream).unwrap();
    let mut up = Box::pin(stream.upload_staged(numbers(MANY)));
    let mut down = Box::pin(stream.download_staged(&x));
    let both = async { futures::join!(&mut up, &mut down) };
    assert!(tokio::time::timeout(Duration::from_millis(50), both).await.is_err());
    handle.lose_device("on purpose");
    assert_eq!(soon(up).await.unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(soon(down).await.unwrap_err().kind(), ErrorKind::DeviceLost);
    assert!(device.stats().quarantined_bytes > 0, "what was lent stays set aside");
    gate.open();

    let device = testing::device();
    let stream = device.stream().unwrap();
    device.close(SOON).await.unwrap();
    let closed = stream.upload_staged(vec![1u8; 10]).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
    let closed = stream.upload_staged(Vec::<u8>::new()).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn what_nobody_wrote_cannot_be_read_by_staging() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let x = stream.empty::<u8>(5_000_000).queued().unwrap();
    let error = stream.download_staged(&x).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
}

#[test]
fn staging_runs_on_any_executor_and_its_future_is_send() {
    fn is_send<T: Send>(value: T) -> T {
        value
    }
    let device = testing::device();
    let stream = device.stream().unwrap();
    let thread = std::thread::spawn(move || {
        let x = futures::executor::block_on(is_send(stream.upload_staged(numbers(MANY / 8))));
        let x = x.unwrap();
        futures::executor::block_on(is_send(stream.download_staged(&x))).unwrap()
    });
    assert!(thread.join().unwrap() == numbers(MANY / 8));
}

#[test]
fn blocking_work_needs_no_thread_of_the_runtime() {
    let (device, peer) = (testing::device(), testing::peer_device());
    let (runtime, release) = taken_pool::with_taken_pool();
    runtime.block_on(async {
        let stream = device.stream().unwrap();
        let x = soon(stream.upload_staged(numbers(MANY / 4))).await.unwrap();
        assert!(soon(stream.download_staged(&x)).await.unwrap() == numbers(MANY / 4));
        let into = soon(stream.download_staged_into(&x, Vec::new())).await.unwrap();
        assert!(into == numbers(MANY / 4));
        assert_eq!(soon(device.pinned_async::<u8>(3 << 20)).await.unwrap().len(), 3 << 20);
        soon(device.enable_peer(&peer)).await.unwrap();
        let fill = soon(gpu_await::kernels::fill::load(&device)).await.unwrap();
        drop((fill, x));
        soon(device.done()).await.unwrap();
        soon(device.trim(0)).await.unwrap();
        soon(device.trim_pinned(0)).await.unwrap();
        // A binary that no device takes: refused, and by the thread that loads.
        let image = gpu_await::Image::ptx("no such thing");
        assert!(soon(gpu_await::Module::load(&device, image)).await.is_err());
        let source = gpu_await::CudaSource::new("no such thing");
        assert!(soon(gpu_await::Module::compile(&device, source)).await.is_err());
        soon(device.close(SOON)).await.unwrap();
    });
    drop(release);
}

/// A runtime that ends takes the future; what is on the device goes on, and everything comes back.
#[test]
fn a_runtime_that_ends_leaves_staged_work_to_the_device() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let data: std::sync::Arc<[u32]> = numbers(MANY).into();
    let x = stream.upload(data.to_vec()).queued().unwrap();
    let gate = Gate::close(&stream).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let before = stream.submitted();
    let (up, down) = (stream.clone(), stream.clone());
    let source = data.clone();
    runtime.spawn(async move { up.upload_staged(source).await.map(drop) });
    runtime.spawn(async move { down.download_staged(&x).await.map(drop) });
    // An allocation and a part at least are on the stream.
    let end = std::time::Instant::now() + SOON;
    while stream.submitted() < before + 3 {
        assert!(std::time::Instant::now() < end, "{stream:?}");
        std::thread::yield_now();
    }
    let start = std::time::Instant::now();
    runtime.shutdown_timeout(SOON);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert!(!gate.timed_out());
    gate.open();
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        settled_late(&stream).await;
        // The crew is the device's and not the runtime's.
        let x = soon(stream.upload_staged(data.clone())).await.unwrap();
        assert!(soon(stream.download_staged(&x)).await.unwrap() == *data);
    });
    // By the crew, a moment later.
    while std::sync::Arc::strong_count(&data) > 1 {
        assert!(start.elapsed() < 3 * SOON, "the source is dropped");
        std::thread::yield_now();
    }
}
