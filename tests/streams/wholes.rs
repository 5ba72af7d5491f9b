//! Waiting for an operation, an event, a stream, a device, all devices.

use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{Device, DeviceKind, ErrorKind, Op, Result, join_all, kernels};

const SOON: Duration = Duration::from_secs(5);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("nothing held it up")
}

/// Whether `op` is held up: nothing else would keep it for so long.
async fn is_held_up<T>(op: &mut Op<T>) -> bool {
    tokio::time::timeout(Duration::from_millis(20), op).await.is_err()
}

#[tokio::test]
async fn four_granularities_from_fine_to_coarse() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let op = a.host_fn(|| 1);
    let first = Gate::close(&a)?;
    let event = a.record()?;
    let second = Gate::close(&a)?;
    let mut stream = a.done();
    let third = Gate::close(&b)?;
    let mut whole = device.done();

    assert_eq!(soon(op).await?, 1, "an operation");
    assert!(!event.is_complete());
    first.open();
    soon(event.done()).await?;
    assert!(is_held_up(&mut stream).await);
    second.open();
    soon(stream).await?;
    assert!(is_held_up(&mut whole).await);
    third.open();
    soon(whole).await?;
    assert!([first, second, third].iter().all(|gate| !gate.timed_out()));
    Ok(())
}

#[tokio::test]
async fn waiting_for_one_stream_leaves_the_others_busy() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&a)?;
    b.host_fn(|| ()).queued()?;
    soon(b.done()).await?;
    assert!(b.is_idle() && !a.is_idle(), "b has the marker of its await");
    gate.open();
    soon(a.done()).await
}

#[tokio::test]
async fn a_device_is_done_when_the_work_of_others_is() -> Result<()> {
    let device = testing::device();
    // On a GPU another handle of the same device is somebody else, with streams of his own.
    let somebody = match device.kind() {
        DeviceKind::Host => device.clone(),
        _ => testing::device(),
    };
    let theirs = somebody.stream()?;
    for _ in 0..3 {
        let gate = Gate::close(&theirs)?;
        let mut done = device.done();
        assert!(is_held_up(&mut done).await);
        gate.open();
        soon(done).await?;
        soon(theirs.done()).await?;
        assert!(!gate.timed_out());
    }
    assert!(soon(device.done()).await.is_ok() && device.done().synchronize().is_ok());
    device.synchronize()
}

#[tokio::test]
async fn a_device_is_done_when_streams_that_were_dropped_are() -> Result<()> {
    let device = testing::device();
    let spin = kernels::spin::load(&device).await?;
    for non_blocking in [true, false] {
        let stream = device.stream_builder().non_blocking(non_blocking).build()?;
        let start = Instant::now();
        spin.launch(&stream, 30_000_000).queued()?;
        drop(stream);
        let behind = device.legacy_stream()?.done();
        device.done().await?;
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(30), "the kernel was not waited for: {took:?}");
        assert!(behind.is_complete());
    }
    Ok(())
}

#[tokio::test]
async fn what_is_submitted_after_the_call_does_not_delay_it() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (early, late) = (device.done(), device.done());
    let gate = Gate::close(&stream)?;
    soon(late).await?;
    soon(early).await?;
    gate.open();
    soon(stream.done()).await?;
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn a_driver_that_cannot_tell_of_others_still_tells_of_ours_and_the_legacy_ones() -> Result<()>
{
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let ours = device.stream()?;
    let blocking = device.stream_builder().non_blocking(false).build()?;
    for stream in [&ours, &blocking] {
        let gate = Gate::close(stream)?;
        handle.fail_nth(DriverCall::EventRecordAll, 1, ErrorKind::Unsupported);
        let mut done = device.done();
        assert!(is_held_up(&mut done).await);
        gate.open();
        soon(done).await?;
    }
    // Another failure is told.
    handle.fail_nth(DriverCall::EventRecordAll, 1, ErrorKind::Driver);
    assert_eq!(device.done().await.unwrap_err().kind(), ErrorKind::Driver);
    soon(device.done()).await
}

#[tokio::test]
async fn a_closed_device_is_done_and_a_lost_one_says_so() -> Result<()> {
    let device = testing::device();
    device.zeros::<u8>(10).queued()?;
    soon(device.done()).await?;
    soon(device.close(SOON)).await?;
    soon(device.done()).await?;
    device.synchronize()?;

    let (faults, handle) = testing::faults();
    let lost = testing::host_with(faults);
    let gate = Gate::close(lost.default_stream())?;
    let done = lost.done();
    handle.lose_device("test");
    gate.open();
    assert_eq!(soon(done).await.unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(soon(lost.done()).await.unwrap_err().kind(), ErrorKind::DeviceLost);
    Ok(())
}

#[tokio::test]
async fn all_devices_are_done_when_each_is() -> Result<()> {
    let devices = [testing::device(), Device::host(), Device::host()];
    let gate = Gate::close(devices[0].default_stream())?;
    let mut done = Device::all_done(&devices);
    assert!(is_held_up(&mut done).await);
    gate.open();
    soon(done).await?;
    let mut none = Device::all_done([]);
    assert!((&mut none).now_or_never().expect("nothing to wait for").is_ok());
    // Streams of several devices as one future.
    soon(join_all(devices.iter().map(|device| device.default_stream().done()))).await.map(drop)
}

#[test]
fn a_device_that_is_stepped_is_done_when_its_streams_are() -> Result<()> {
    let (device, step) = testing::manual();
    let stream = device.stream()?;
    stream.host_fn(|| ()).queued()?;
    let mut done = device.done();
    assert!((&mut done).now_or_never().is_none());
    step.run_until_idle();
    done.now_or_never().expect("nothing is left to run")?;
    assert_eq!(device.stats().streams, 2, "the default one and that");
    Ok(())
}
