//! What is on the device when, and what waits for what.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceKind, ErrorKind, LaunchConfig, join_all, kernels};

use crate::under_test::completions;

const SOON: Duration = Duration::from_secs(5);

#[tokio::test]
async fn try_join_has_both_launches_on_the_device_before_the_first_poll() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        let fill = kernels::fill::load(&device).await?;
        let mut x = a.empty::<f32>(100).queued()?;
        let mut y = b.empty::<f32>(100).queued()?;
        let (before_a, before_b) = (a.submitted(), b.submitted());
        let both =
            futures::future::try_join(fill.launch(&a, 1.0, &mut x), fill.launch(&b, 2.0, &mut y));
        assert_eq!((a.submitted(), b.submitted()), (before_a + 1, before_b + 1));
        both.await?;
        assert_eq!(a.download(&x).await?[99], 1.0);
        assert_eq!(b.download(&y).await?[99], 2.0);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn two_streams_of_one_program_run_beside_each_other() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let gate = Gate::close(&a).unwrap();
    let y = b.full(10, 3u16).queued().unwrap();
    let y = tokio::time::timeout(SOON, b.download(&y)).await.expect("b is not held up").unwrap();
    assert_eq!(y, [3; 10]);
    gate.open();
    a.done().await.unwrap();
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn work_on_a_buffer_is_ordered_across_streams() {
    completions::each(|device| async move {
        let streams = [device.stream()?, device.stream()?, device.stream()?];
        let scale = kernels::scale::load(&device).await?;
        let mut x = streams[0].full(10_000, 1.0f32).queued()?;
        let mut expected = 1.0f32;
        for round in 0..60 {
            let factor = if round % 2 == 0 { 2.0 } else { 0.5 * 1.25 };
            scale.launch(&streams[round % 3], factor, &mut x).queued()?;
            expected *= factor;
        }
        let x = streams[1].download(&x).await?;
        assert!(x.iter().all(|x| *x == expected));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn halves_are_filled_by_two_streams_at_once() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let mut x = a.zeros::<u32>(100).queued().unwrap();
    a.done().await.unwrap();
    let (mut left, mut right) = x.split_at_mut(30).unwrap();
    let gate = Gate::close(&a).unwrap();
    a.fill(&mut left, 1).queued().unwrap();
    let right_done = b.fill(&mut right, 2);
    tokio::time::timeout(SOON, right_done).await.expect("halves do not wait").unwrap();
    gate.open();
    let x = b.download(&x).await.unwrap();
    assert!(x[..30].iter().all(|x| *x == 1) && x[30..].iter().all(|x| *x == 2));
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn readers_on_two_streams_do_not_wait_for_each_other() {
    let device = testing::device();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let x = a.full(100, 9u8).queued().unwrap();
    a.done().await.unwrap();
    let gate = Gate::close(&a).unwrap();
    let held = a.download(&x);
    let free = tokio::time::timeout(SOON, b.download(&x)).await.expect("readers overlap").unwrap();
    assert_eq!(free, [9; 100]);
    gate.open();
    assert_eq!(held.await.unwrap(), [9; 100]);
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn a_writer_waits_for_readers_of_other_streams() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        let mut x = a.full(1000, 1u32).queued()?;
        a.done().await?;
        let gate = Gate::close(&a)?;
        let before = a.download(&x);
        let mut overwrite = b.fill(&mut x, 2);
        assert!((&mut overwrite).now_or_never().is_none());
        gate.open();
        assert!(before.await?.iter().all(|x| *x == 1), "the reader saw the old data");
        overwrite.await?;
        assert!(b.download(&x).await?.iter().all(|x| *x == 2));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn wait_orders_streams_behind_a_stream_an_event_and_an_op() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        let count = Arc::new(AtomicU32::new(0));
        let add = |n: u32| {
            let count = count.clone();
            move || count.fetch_add(n, Ordering::SeqCst)
        };
        let gate = Gate::close(&a)?;
        let first = a.host_fn(add(1));
        let event = a.record()?;
        b.wait(&event).queued()?;
        b.wait(&first).queued()?;
        b.wait(&a).queued()?;
        let second = b.host_fn(add(10));
        assert_eq!(count.load(Ordering::SeqCst), 0);
        gate.open();
        assert_eq!(first.await?, 0);
        assert_eq!(second.await?, 1);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_stream_is_first_in_first_out_across_kinds_of_work() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let scale = kernels::scale::load(&device).await?;
        let mut x = stream.upload(vec![1.0f32; 64]).queued()?;
        let mut seen = Vec::new();
        for _ in 0..20 {
            scale.launch(&stream, 2.0, &mut x).queued()?;
            seen.push(stream.download(&x));
            stream.host_fn(|| ()).queued()?;
        }
        let mut expected = 1.0;
        for seen in seen {
            expected *= 2.0;
            assert_eq!(seen.await?, [expected; 64]);
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn throttle_keeps_a_producer_below_its_limit() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let empty = kernels::empty::load(&device).await?;
        for _ in 0..3000 {
            stream.throttle(256).await?;
            empty.launch(&stream).queued()?;
            assert!(stream.submitted() - stream.completed() <= 257);
        }
        stream.done().await?;
        assert_eq!(stream.backlog(), 0);
        assert_eq!(stream.submitted(), 3000);
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_in_a_full_queue_does_not_block_poll_of_that_stream() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let empty = kernels::empty::load(&device).await?;
        empty.launch(&stream).await?;
        let mut early = stream.host_fn(|| 5);
        let gate = Gate::close(&stream)?;
        assert_eq!((&mut early).await?, 5);
        let mut late = stream.host_fn(|| 6);
        let submitter = std::thread::spawn({
            let (stream, empty) = (stream.clone(), empty.clone());
            move || (0..1500).try_for_each(|_| empty.launch(&stream).queued())
        });
        // Full when the number of submissions stands still.
        let mut last = stream.submitted();
        loop {
            tokio::time::sleep(Duration::from_millis(60)).await;
            let now = stream.submitted();
            if now == last {
                break;
            }
            last = now;
        }
        assert!(last < 1500, "the queue never filled");
        // Of a few: another thread may have had the core.
        let polls = (0..10).map(|_| {
            let start = Instant::now();
            assert!((&mut late).now_or_never().is_none());
            start.elapsed()
        });
        let polled = polls.min().expect("some");
        assert!(polled < Duration::from_millis(20), "poll took {polled:?}");
        assert!(!gate.timed_out(), "a poll waited for the queue");
        gate.open();
        assert_eq!(late.await?, 6);
        submitter.join().expect("the submitter ends")?;
        stream.done().await
    })
    .await;
}

#[tokio::test]
async fn a_batch_is_one_future_and_hands_everything_back() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let scale = kernels::scale::load(&device).await?;
        let mut pinned = stream.pinned::<f32>(256)?;
        pinned.fill(1.5);
        let mut x = stream.empty::<f32>(256).queued()?;
        let out = stream.pinned::<f32>(256)?;
        let ((pinned, out), (x, answer)) = stream
            .batch(|queue| {
                let pinned = queue.upload_into(pinned, &mut x)?;
                scale.launch(queue, 2.0, &mut x)?;
                let out = queue.download_into(&x, out)?;
                let answer = queue.host_fn(|| 42)?;
                Ok(((pinned, out), (x, answer)))
            })
            .await?;
        assert_eq!((pinned[255], out[255], x.len(), answer), (1.5, 3.0, 256, 42));
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn join_all_and_and_give_every_value() {
    let device = testing::device();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let ops = (0..50u32).map(|n| streams[n as usize % 2].host_fn(move || n));
    assert_eq!(join_all(ops).await.unwrap(), (0..50).collect::<Vec<_>>());
    let x = streams[0].upload(vec![1u8, 2]).and(streams[1].upload(vec![3u8]));
    let (x, y) = x.queued().unwrap();
    let both = streams[0].download(&x).and(streams[1].download(&y)).await.unwrap();
    assert_eq!((&both.0[..], &both.1[..]), (&[1, 2][..], &[3][..]));
}

#[tokio::test]
async fn events_measure_time_on_the_device() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let spin = kernels::spin::load(&device).await?;
        spin.launch(&stream, 1_000).await?;
        let ((), time) = stream.timed(|stream| spin.launch(stream, 3_000_000)).await?;
        // No upper bound worth naming: others may keep the device busy in between.
        assert!((2.9e-3..10.0).contains(&time.as_secs_f64()), "{time:?}");
        let (start, plain) = (stream.record_timed()?, stream.record()?);
        let error = plain.elapsed_since(&start).unwrap_err();
        assert!(error.to_string().contains("not recorded with timing"), "{error}");
        let gate = Gate::close(&stream)?;
        let end = stream.record_timed()?;
        let error = end.elapsed_since(&start).unwrap_err();
        assert!(error.to_string().contains("not complete"), "{error}");
        gate.open();
        end.done().await?;
        assert!(end.elapsed_since(&start)? > Duration::ZERO);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn copies_with_offsets_land_where_they_should() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let x = stream.upload((0..100u16).collect::<Vec<_>>()).queued().unwrap();
    let mut y = stream.zeros::<u16>(50).queued().unwrap();
    stream.copy(&x.slice(10..20).unwrap(), &mut y.slice_mut(40..).unwrap()).queued().unwrap();
    let y = stream.download(&y.slice(35..).unwrap()).await.unwrap();
    assert_eq!(y, [0, 0, 0, 0, 0, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
}

#[tokio::test]
async fn fills_of_every_element_size_write_every_byte() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    async fn check<T: gpu_await::Element + PartialEq + std::fmt::Debug>(
        stream: &gpu_await::Stream,
        value: T,
    ) {
        for len in [1, 2, 77, 70_000] {
            let x = stream.full(len, value).queued().unwrap();
            let x = stream.download(&x).await.unwrap();
            assert!(x.len() == len && x.iter().all(|x| *x == value), "{value:?} × {len}");
        }
    }
    check(&stream, 0x5Au8).await;
    check(&stream, 0x1234u16).await;
    check(&stream, 0x1234_5678u32).await;
    check(&stream, 1.0f64).await;
    check(&stream, 0x0102_0304_0506_0708u64).await;
    check(&stream, [1u8, 2, 3]).await;
    check(&stream, [1u32, 2, 3]).await;
    check(&stream, [1u32, 2, 3, 4]).await;
    check(&stream, 0x0102_0304_0506_0708_090A_0B0C_0D0E_0F10u128).await;
    check(&stream, half::f16::from_f32(1.5)).await;
    let error = stream.full(3, [1u64, 2, 3]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn two_devices_of_one_process_work_at_once() {
    let (a, b) = (testing::device(), testing::device());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let scale = kernels::scale::load(&b).await.unwrap();
    let gate = Gate::close(&s).unwrap();
    let mut y = t.full(10, 2.0f32).queued().unwrap();
    scale.launch(&t, 4.0, &mut y).queued().unwrap();
    let y = tokio::time::timeout(SOON, t.download(&y)).await.expect("the other device goes on");
    assert_eq!(y.unwrap(), [8.0; 10]);
    gate.open();
    s.done().await.unwrap();
    assert!(!gate.timed_out());
}

#[tokio::test]
async fn a_buffer_crosses_devices_with_no_host_wait() {
    let (a, b) = (testing::device(), testing::device());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let (scale_a, scale_b) =
        (kernels::scale::load(&a).await.unwrap(), kernels::scale::load(&b).await.unwrap());
    let mut x = s.full(1000, 1.0f32).queued().unwrap();
    let mut y = t.zeros::<f32>(1000).queued().unwrap();
    for _ in 0..10 {
        scale_a.launch(&s, 2.0, &mut x).queued().unwrap();
        t.copy(&x, &mut y).queued().unwrap();
        scale_b.launch(&t, 3.0, &mut y).queued().unwrap();
        s.copy(&y, &mut x).queued().unwrap();
    }
    assert_eq!(s.download(&x).await.unwrap()[999], 6.0f32.powi(10));
}

#[tokio::test]
async fn matmul_matches_its_twin_bit_for_bit() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let matmul = kernels::matmul_tiled::load(&device).await.unwrap();
    for (m, n, k) in [(1, 1, 1), (16, 16, 16), (17, 33, 65), (100, 1, 50), (5, 7, 0)] {
        let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut expected = vec![0.0f32; m * n];
        for row in 0..m {
            for column in 0..n {
                let sum = &mut expected[row * n + column];
                for step in 0..k {
                    *sum = a[row * k + step].mul_add(b[step * n + column], *sum);
                }
            }
        }
        let a = stream.upload(a).queued().unwrap();
        let b = stream.upload(b).queued().unwrap();
        let mut c = stream.empty(m * n).queued().unwrap();
        matmul.launch(&stream, &a, &b, &mut c, m as u32, n as u32, k as u32).queued().unwrap();
        assert_eq!(stream.download(&c).await.unwrap(), expected, "{m} {n} {k}");
    }
}

gpu_await::kernel! {
    /// `scale`, in a geometry that the caller chooses.
    unsafe fn scale_in_any_grid(a: f32, x: &mut [f32], n: u64 = x.len())
        where |config| config.block_dim()[1] == 1, !x.is_empty();
    ptx = include_str!("../../kernels/scale.ptx");
    entry = "scale";
    host = scale_twin;
}

fn scale_twin(_: &gpu_await::Grid, a: f32, x: &mut [f32], n: u64) {
    assert_eq!(x.len() as u64, n);
    x.iter_mut().for_each(|x| *x *= a);
}

#[tokio::test]
async fn a_kernel_may_leave_its_geometry_to_the_caller() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let scale = scale_in_any_grid::load(&device).await.unwrap();
    let mut x = stream.full(1000, 3.0f32).queued().unwrap();
    scale.launch(&stream, LaunchConfig::new(7, 64), 2.0, &mut x).queued().unwrap();
    assert!(stream.download(&x).await.unwrap().iter().all(|x| *x == 6.0));
    let config = LaunchConfig::new(7, (64, 2));
    let error = scale.launch(&stream, config, 2.0, &mut x).queued().unwrap_err();
    assert!(error.to_string().contains("config.block_dim()[1] == 1"), "{error}");
}

#[tokio::test]
async fn launch_geometry_reaches_the_kernel() {
    let device = testing::device();
    if device.kind() != DeviceKind::Host {
        return; // the CUDA side is shown by every kernel's result
    }
    let stream = device.stream().unwrap();
    let (sender, seen) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let kernel =
        gpu_await::Kernel::<(u32,)>::host(&device, "look", move |grid: &gpu_await::Grid, n| {
            sender.lock().unwrap().send((*grid, n)).unwrap();
        })
        .unwrap();
    let config = LaunchConfig::new((3, 2), (16, 4, 2)).shared_mem_bytes(96);
    stream.launch(&kernel, config, (7u32,)).await.unwrap();
    let (grid, n) = seen.recv().unwrap();
    assert_eq!((grid.grid_dim, grid.block_dim, n), ([3, 2, 1], [16, 4, 2], 7));
    assert_eq!((grid.shared_mem_bytes, grid.threads()), (96, 6 * 128));
}
