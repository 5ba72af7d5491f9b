//! The worked examples that users bring along from elsewhere, with exact results.
//!
//! | from | examples |
//! |---|---|
//! | a stream-priority guide | two streams, naive, with the core started early, with events; submission order |
//! | a kernels-and-streams API | two uploads; timing with two events; compute, event, copy |
//! | a concurrency guide | host and device at once, creation, pinned and pageable, producer and consumer, two-stage readback, one program in three styles |

use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceBuffer, ErrorDetail, Kernel, LaunchConfig, Op, Result, Stream, join_all, kernels,
};

const SOON: Duration = Duration::from_secs(5);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("nothing held it up")
}

/// Whether `op` is held up: nothing else would keep it for so long.
async fn is_held_up<T>(op: &mut Op<T>) -> bool {
    tokio::time::timeout(Duration::from_millis(20), op).await.is_err()
}

// ---- a stream-priority guide --------------------------------------------------------------

/// Pre-processing on one stream, a core on another, nothing between them but the data.
#[tokio::test]
async fn naive_two_streams_are_awaited_one_after_the_other() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let (pre, core) = (device.stream()?, device.stream()?);
    let mut x = pre.full(1000, 1.0f32).queued()?;
    scale.launch(&pre, 2.0, &mut x).queued()?;
    let mut y = core.full(1000, 10.0f32).queued()?;
    scale.launch(&core, 3.0, &mut y).queued()?;
    pre.done().await?;
    core.done().await?;
    let (x, y) = (pre.download_vec(&x).await?, core.download_vec(&y).await?);
    assert_eq!((x, y), (vec![2.0; 1000], vec![30.0; 1000]));
    Ok(())
}

/// The core starts on the first half of the data while the second is still being prepared: the
/// library orders ranges by itself.
#[tokio::test]
async fn the_core_starts_when_the_first_half_is_prepared() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let (pre, core) = (device.stream()?, device.stream()?);
    let mut x = pre.upload((0..1000u16).map(f32::from).collect::<Vec<_>>()).queued()?;
    let (mut first, mut second) = x.split_at_mut(500)?;
    scale.launch(&pre, 2.0, &mut first).queued()?;
    let gate = Gate::close(&pre)?;
    scale.launch(&pre, 2.0, &mut second).queued()?;
    let prepared = pre.record_timed()?;
    scale.launch(&core, 10.0, &mut first).queued()?;
    let core_done = core.record_timed()?;
    scale.launch(&core, 10.0, &mut second).queued()?;
    soon(core_done.done()).await?;
    assert!(!prepared.is_complete());
    gate.open();
    soon(prepared.done()).await?;
    assert!(prepared.elapsed_since(&core_done)? > Duration::ZERO && !gate.timed_out());
    let x = soon(core.download_vec(&x)).await?;
    let expected: Vec<f32> = (0..1000u16).map(|n| 20.0 * f32::from(n)).collect();
    assert_eq!(x, expected, "both halves, each once");
    Ok(())
}

/// The same with an event, for work whose order no memory shows.
#[tokio::test]
async fn the_core_waits_for_an_event_and_the_second_half_goes_on_beside_it() -> Result<()> {
    let device = testing::device();
    let (pre, core) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&pre)?;
    let first = pre.host_fn(|| "first half");
    let half = pre.record()?;
    let second_gate = Gate::close(&pre)?;
    let second = pre.host_fn(|| "second half");
    // The host goes on at once; the core waits, on the device.
    core.wait(&half).queued()?;
    let mut work = core.host_fn(|| "core");
    assert!(is_held_up(&mut work).await);
    gate.open();
    assert_eq!(soon(first).await?, "first half");
    assert_eq!(soon(work).await?, "core");
    assert!(half.is_complete() && !second.is_complete(), "the core did not wait for the second");
    second_gate.open();
    assert_eq!(soon(second).await?, "second half");
    // Streams stay open: another stage, later.
    assert_eq!(soon(pre.host_fn(|| "third")).await?, "third");
    Ok(())
}

/// What must be done first is submitted first: on one stream that is exact, and measured.
#[tokio::test]
async fn what_is_submitted_first_is_done_first() -> Result<()> {
    const BULK: Duration = Duration::from_millis(10);
    let device = testing::device();
    let spin = kernels::spin::load(&device).await?;
    let stream = device.stream()?;
    let bulk = || (0..5).try_for_each(|_| spin.launch(&stream, 2_000_000).queued());

    spin.launch(&stream, 1_000_000).queued()?;
    let critical = stream.record_timed()?;
    bulk()?;
    let end = stream.record_timed()?;
    soon(end.done()).await?;
    let earlier = end.elapsed_since(&critical)?;
    assert!(earlier >= BULK, "{earlier:?} before the end of the rest");

    let start = stream.record_timed()?;
    bulk()?;
    spin.launch(&stream, 1_000_000).queued()?;
    let critical = stream.record_timed()?;
    soon(critical.done()).await?;
    let late = critical.elapsed_since(&start)?;
    assert!(late >= BULK, "submitted last, {late:?} after the start");
    Ok(())
}

/// Two host threads, each with a stream and a priority of its own, submitting and waiting at once.
#[test]
fn two_threads_with_streams_of_different_priority_submit_and_wait_at_once() -> Result<()> {
    let device = testing::device();
    let (lowest, highest) = device.priority_range();
    let threads = [lowest, highest].map(|priority| {
        let stream = device.stream_builder().priority(priority).build();
        std::thread::spawn(move || {
            let stream = stream?;
            assert_eq!(stream.priority(), priority);
            let mut sum = 0;
            for n in 0..50u32 {
                let x = stream.full(100, n).queued()?;
                sum += stream.download(&x).synchronize()?.iter().sum::<u32>();
            }
            stream.synchronize()?;
            Ok::<_, gpu_await::Error>(sum)
        })
    });
    for thread in threads {
        assert_eq!(thread.join().expect("it does not panic")?, 100 * (0..50).sum::<u32>());
    }
    Ok(())
}

// ---- a kernels-and-streams API ------------------------------------------------------------

#[tokio::test]
async fn two_uploads_on_two_streams() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let (mut x, mut y) = (device.pinned::<i32>(1024)?, device.pinned::<i32>(1024)?);
    x.iter_mut().zip(0..).for_each(|(x, n)| *x = n);
    y.fill(7);
    let (x, y) = (a.upload(x).queued()?, b.upload(y).queued()?);
    a.done().await?;
    b.done().await?;
    let (sum_x, sum_y) = a.download(&x).and(b.download(&y)).await?;
    assert_eq!((sum_x.iter().sum::<i32>(), sum_y.iter().sum::<i32>()), (523_776, 7 * 1024));
    drop((a, b));
    assert_eq!(x.len(), 1024, "buffers outlive their streams");
    Ok(())
}

#[tokio::test]
async fn a_kernel_is_timed_with_two_events_on_the_default_stream() -> Result<()> {
    let device = testing::device();
    let spin = kernels::spin::load(&device).await?;
    let (start, end) =
        (device.event_builder().timed(true).build()?, device.event_builder().timed(true).build()?);
    let stream = device.default_stream();
    start.record(stream)?;
    spin.launch(stream, 3_000_000).queued()?;
    end.record(stream)?;
    end.synchronize()?;
    let took = end.elapsed_since(&start)?.as_secs_f64();
    // No upper bound worth naming: others may keep the device busy in between.
    assert!((2.9e-3..10.0).contains(&took), "{took} s");
    Ok(())
}

#[tokio::test]
async fn a_compute_stream_an_event_and_a_copy_stream() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let (compute, copy) = (device.stream()?, device.stream()?);
    let mut x = compute.full(256, 3.0f32).queued()?;
    let gate = Gate::close(&compute)?;
    scale.launch(&compute, 7.0, &mut x).queued()?;
    let event = compute.record()?;
    copy.wait(&event).queued()?;
    let mut host = copy.download_into(&x, device.pinned(256)?);
    assert!(is_held_up(&mut host).await);
    gate.open();
    copy.synchronize()?;
    assert_eq!(host.await?, [21.0; 256]);
    Ok(())
}

// ---- a concurrency guide ------------------------------------------------------------------

#[tokio::test]
async fn a_launch_returns_before_the_kernel_ends_and_the_host_works_meanwhile() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let gate = Gate::close(&stream)?;
    let done = stream.host_fn(|| 1);
    let host: u64 = (1..=1000u64).map(|n| n * n).sum();
    assert!(!done.is_complete());
    gate.open();
    assert_eq!((host, soon(done).await?), (333_833_500, 1));
    assert!(!gate.timed_out());
    Ok(())
}

/// The device under test first, then the CPU as a device: both run at once, here asynchronously.
#[tokio::test]
async fn kernels_of_two_backends_run_together() -> Result<()> {
    let (device, cpu) = (testing::device(), Device::host());
    let scale = (kernels::scale::load(&device).await?, kernels::scale::load(&cpu).await?);
    let mut x = device.full(100, 1.0f32).queued()?;
    let mut y = cpu.full(100, 1.0f32).queued()?;
    let gate = Gate::close(device.default_stream())?;
    scale.0.launch(&device, 2.0, &mut x).queued()?;
    scale.1.launch(&cpu, 3.0, &mut y).queued()?;
    assert_eq!(soon(cpu.download(&y)).await?, [3.0; 100], "while the device is busy");
    gate.open();
    assert_eq!(soon(device.download(&x)).await?, [2.0; 100]);
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn arrays_are_made_without_waiting_also_on_two_devices_at_once() -> Result<()> {
    let (device, other) = (testing::device(), Device::host());
    let gate = Gate::close(device.default_stream())?;
    let zeros = device.zeros::<u8>(100).queued()?;
    let ones = device.ones::<f32>(100).queued()?;
    let full = device.full(100, 42i64).queued()?;
    let mut empty = device.empty::<u8>(100).queued()?;
    device.fill(&mut empty, 9).queued()?;
    let mut here = device.download_vec(&full);
    assert!(here.try_take().is_none());
    let there = other.full(100, 42i64).queued()?;
    assert_eq!(soon(other.download_vec(&there)).await?, [42; 100], "another device goes on");
    gate.open();
    assert_eq!(soon(here).await?, [42; 100]);
    assert_eq!(device.download_vec(&zeros).await?, [0; 100]);
    assert_eq!(device.download_vec(&ones).await?, [1.0; 100]);
    assert_eq!(device.download_vec(&empty).await?, [9; 100]);
    Ok(())
}

/// Neither blocks on the device: pageable memory is copied by the call, pinned memory is lent.
#[tokio::test]
async fn pageable_memory_is_staged_by_the_call_and_pinned_memory_is_lent() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.zeros::<u32>(1000).queued()?;
    let mut pinned = device.pinned::<u32>(1000)?;
    pinned.fill(6);
    // The staging buffer's size, so that it is there.
    drop(device.pinned::<u32>(1000)?);
    soon(stream.done()).await?;
    let gate = Gate::close(&stream)?;
    let mut pageable = vec![5u32; 1000];
    let x = stream.upload_from(&pageable).queued()?;
    // Ours again at once; what goes up is what it held at the call.
    pageable.fill(0);
    let mut back = stream.upload_into(pinned, &mut y);
    assert!(is_held_up(&mut back).await, "lent until the copy is complete");
    gate.open();
    assert_eq!(soon(back).await?[999], 6);
    assert_eq!(stream.download(&x).await?, [5; 1000]);
    assert_eq!(stream.download(&y).await?, [6; 1000]);
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn an_upload_goes_on_beside_a_busy_compute_stream() -> Result<()> {
    let device = testing::device();
    let (compute, transfer) = (device.stream()?, device.stream()?);
    let mut pinned = device.pinned::<u32>(1 << 16)?;
    pinned.fill(8);
    let gate = Gate::close(&compute)?;
    let x = soon(transfer.upload(pinned)).await?;
    assert!(!compute.is_idle());
    gate.open();
    assert!(soon(compute.download(&x)).await?.iter().all(|x| *x == 8));
    assert!(!gate.timed_out());
    Ok(())
}

/// A producer copies up, a consumer computes; each has unrelated work as well. `ordered` switches
/// the explicit wait: the data is ordered without it.
async fn produce_and_consume(device: &Device, ordered: bool) -> Result<Vec<f32>> {
    let axpy = kernels::axpy::load(device).await?;
    let (producer, consumer) = (device.stream()?, device.stream()?);
    let mut pinned = device.pinned::<f32>(1000)?;
    pinned.fill(3.0);
    let mut y = consumer.full(1000, 1.0f32).queued()?;
    let x = producer.upload(pinned).queued()?;
    if ordered {
        consumer.wait(&producer).queued()?;
    }
    let unrelated = producer.full(10, 1u8).queued()?;
    axpy.launch(&consumer, 2.0, &x, &mut y).queued()?;
    let also_unrelated = consumer.full(10, 2u8).queued()?;
    let (one, two) = producer.download(&unrelated).and(consumer.download(&also_unrelated)).await?;
    assert_eq!((&one[..], &two[..]), (&[1; 10][..], &[2; 10][..]));
    consumer.download_vec(&y).await
}

#[tokio::test]
async fn a_producer_and_a_consumer_on_two_streams() -> Result<()> {
    let device = testing::device();
    for ordered in [true, false] {
        assert_eq!(soon(produce_and_consume(&device, ordered)).await?, [7.0; 1000]);
    }
    Ok(())
}

/// The first array is processed while the second is in flight.
#[tokio::test]
async fn a_readback_in_two_stages_17_and_42() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (a, b) = (stream.full(1000, 17u32).queued()?, stream.full(1000, 42u32).queued()?);
    let first = stream.download(&a);
    let after_first = stream.record()?;
    let gate = Gate::close(&stream)?;
    let second = stream.download(&b);
    soon(after_first.done()).await?;
    let sum: u32 = soon(first).await?.iter().sum();
    assert_eq!(sum, 17_000);
    assert!(!second.is_complete(), "still in flight");
    gate.open();
    assert_eq!(soon(second).await?.iter().sum::<u32>(), 42_000);
    assert!(!gate.timed_out());
    Ok(())
}

/// Memory made on one stream cannot be used on another before it is there.
#[tokio::test]
async fn an_array_that_another_stream_still_makes_is_waited_for() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let stream = device.stream()?;
    let gate = Gate::close(device.default_stream())?;
    // Made on the current stream, behind the gate.
    let mut x = device.full(100, 4.0f32).queued()?;
    scale.launch(&stream, 2.0, &mut x).queued()?;
    let mut host = stream.download(&x);
    assert!(is_held_up(&mut host).await);
    gate.open();
    assert_eq!(soon(host).await?, [8.0; 100]);
    assert!(!gate.timed_out());
    Ok(())
}

/// A stream has one device: it decides where the work goes, whatever else is passed.
#[tokio::test]
async fn a_copy_runs_on_a_stream_of_its_destination() -> Result<()> {
    let (device, other) = (Device::host(), Device::host());
    let x = device.full(10, 3u8).queued()?;
    let mut y = other.zeros::<u8>(10).queued()?;
    let error = device.copy(&x, &mut y).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    other.copy(&x, &mut y).queued()?;
    assert_eq!(soon(other.download(&y)).await?, [3; 10]);
    let error = device.download(&y).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    Ok(())
}

/// `z = (2 x + y) * 10` where x and y are made side by side.
mod styles {
    use super::*;

    pub(super) struct Program {
        pub(super) device: Device,
        pub(super) axpy: kernels::axpy,
        pub(super) scale: kernels::scale,
    }

    impl Program {
        /// No stream in sight.
        pub(super) async fn without_streams(&self) -> Result<Vec<f32>> {
            let d = &self.device;
            let x = d.full(100, 3.0f32).queued()?;
            let mut y = d.full(100, 4.0f32).queued()?;
            self.axpy.launch(d, 2.0, &x, &mut y).queued()?;
            self.scale.launch(d, 10.0, &mut y).queued()?;
            d.download_vec(&y).await
        }

        /// The current stream, chosen by scopes.
        pub(super) async fn with_scopes(&self, a: &Stream, b: &Stream) -> Result<Vec<f32>> {
            let d = &self.device;
            let x = a.scope(async { d.full(100, 3.0f32).queued() }).await?;
            let mut y = b.scope(async { d.full(100, 4.0f32).queued() }).await?;
            a.scope(async {
                self.axpy.launch(d, 2.0, &x, &mut y).queued()?;
                b.scope_sync(|| self.scale.launch(d, 10.0, &mut y).queued())?;
                d.download_vec(&y).await
            })
            .await
        }

        /// Each call with its stream, and each wait said.
        pub(super) async fn with_streams(&self, a: &Stream, b: &Stream) -> Result<Vec<f32>> {
            let x: DeviceBuffer<f32> = a.full(100, 3.0f32).queued()?;
            let mut y = b.full(100, 4.0f32).queued()?;
            a.wait(b).queued()?;
            self.axpy.launch(a, 2.0, &x, &mut y).queued()?;
            b.wait(a).queued()?;
            self.scale.launch(b, 10.0, &mut y).queued()?;
            a.wait(b).queued()?;
            a.download_vec(&y).await
        }
    }
}

#[tokio::test]
async fn one_program_in_three_styles_has_one_result() -> Result<()> {
    let device = testing::device();
    let program = styles::Program {
        axpy: kernels::axpy::load(&device).await?,
        scale: kernels::scale::load(&device).await?,
        device: device.clone(),
    };
    let (a, b) = (device.stream()?, device.stream()?);
    for _ in 0..10 {
        let expected = vec![100.0f32; 100];
        assert_eq!(soon(program.without_streams()).await?, expected);
        assert_eq!(soon(program.with_scopes(&a, &b)).await?, expected);
        assert_eq!(soon(program.with_streams(&a, &b)).await?, expected);
    }
    Ok(())
}

/// Waits of the device alone, the host waits once.
#[tokio::test]
async fn a_pipeline_over_two_devices_has_one_host_wait() -> Result<()> {
    let (device, other) = (testing::device(), testing::device());
    let scale = kernels::scale::load(&device).await?;
    let (a, b) = (device.stream()?, other.stream()?);
    let gate = Gate::close(&a)?;
    let mut x = a.full(100, 1.0f32).queued()?;
    for _ in 0..3 {
        scale.launch(&a, 2.0, &mut x).queued()?;
        b.wait(&a).queued()?;
        b.host_fn(|| ()).queued()?;
        a.wait(&b).queued()?;
    }
    let mut y = b.zeros::<f32>(100).queued()?;
    b.copy(&x, &mut y).queued()?;
    let mut host = b.download(&y);
    assert!((&mut host).now_or_never().is_none());
    gate.open();
    assert_eq!(soon(host).await?, [8.0; 100]);
    assert!(!gate.timed_out());
    Ok(())
}

/// Handles of either size and any number of arguments: what a launch takes.
#[tokio::test]
async fn grids_of_one_two_and_three_dimensions_round_up() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let fill = kernels::fill::load(&device).await?;
    for n in [1, 255, 256, 257, 1000] {
        let mut x = stream.zeros::<f32>(n).queued()?;
        fill.launch(&stream, 1.5, &mut x).queued()?;
        assert_eq!(soon(stream.download_vec(&x)).await?, vec![1.5; n]);
    }
    let config = LaunchConfig::for_elements(1000);
    assert!(u64::from(config.grid_dim()[0]) * u64::from(config.block_dim()[0]) >= 1000);
    assert_eq!(LaunchConfig::new((2, 3), 8).grid_dim(), [2, 3, 1]);
    assert_eq!(LaunchConfig::new(2, (4, 2, 2)).block_dim(), [4, 2, 2]);
    if device.kind() == gpu_await::DeviceKind::Host {
        let nothing = Kernel::<()>::host(&device, "nothing", |_: &gpu_await::Grid| ())?;
        let shapes = [LaunchConfig::new((2, 3, 4), 1), LaunchConfig::new(1, (2, 3, 4))];
        let ops = shapes.map(|shape| stream.launch(&nothing, shape, ()));
        soon(join_all(ops)).await?;
    }
    Ok(())
}
