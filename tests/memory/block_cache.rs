//! Nobody notices what a stream keeps of freed memory.

use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceKind, ErrorKind, Grid, Kernel, LaunchConfig, Out, Result, kernels};

use crate::under_test::cases::sample;

/// Used bytes of the pool, on the host device, where nobody else allocates.
fn used(device: &Device) -> u64 {
    device.memory().expect("asked").used_bytes
}

/// The second buffer may have the memory of the first while that is still being written.
#[tokio::test]
async fn what_is_freed_is_used_again_behind_its_last_use() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    for round in sample(0..50) {
        let gate = Gate::close(&stream)?;
        let n = 1000 + round;
        let mut x = stream.full(n, 1.0f32).queued()?;
        scale.launch(&stream, 3.0, &mut x).queued()?;
        let x_later = stream.download(&x);
        drop(x);
        let y = stream.full(n, 2.0f32).queued()?;
        let y_later = stream.download(&y);
        gate.open();
        assert!(x_later.await?.iter().all(|x| *x == 3.0));
        assert!(y_later.await?.iter().all(|y| *y == 2.0));
    }
    Ok(())
}

#[tokio::test]
async fn what_was_never_written_is_still_not_read() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    drop(stream.full(100, 7u32).queued()?);
    let again = stream.empty::<u32>(100).queued()?;
    let error = stream.download(&again).await.expect_err("nothing wrote it");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    Ok(())
}

/// On a host device memory that is used again looks as fresh memory does.
#[tokio::test]
async fn old_contents_do_not_hide_that_nothing_was_written() -> Result<()> {
    if testing::device().kind() != DeviceKind::Host {
        return Ok(()); // a GPU leaves what was there
    }
    let (faults, _handle) = testing::faults();
    let device = testing::host_with(faults.spare_bytes_per_stream(1 << 20));
    let stream = device.stream()?;
    // It says that it overwrites its array, and does not.
    let idle = Kernel::<(Out<u32>,)>::host(&device, "idle", |_: &Grid, _: &mut [u32]| ())?;
    drop(stream.full(100, 7u32).queued()?);
    let mut again = stream.empty(100).queued()?;
    stream.launch(&idle, LaunchConfig::new(1, 1), (&mut again,)).queued()?;
    assert_eq!(stream.download(&again).await?, [0xA5A5_A5A5; 100]);
    Ok(())
}

#[tokio::test]
async fn what_is_kept_does_not_count_as_used_and_is_given_back() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let before = used(&device);
    for n in 1..20 {
        stream.zeros::<u8>(n * 10_000).await?;
    }
    stream.done().await?;
    assert_eq!(device.stats().allocations, 0);
    assert!(used(&device) <= before, "nobody holds it");
    device.trim(0).await?;
    assert!(used(&device) <= before);
    drop(stream);
    Ok(())
}

#[tokio::test]
async fn what_a_stream_keeps_is_there_for_others_before_they_fail() -> Result<()> {
    const BYTES: u64 = 1 << 20;
    let device = Device::builder().host_memory_bytes(8 * BYTES).host();
    if testing::device().kind() != DeviceKind::Host {
        return Ok(()); // a GPU has too much memory to run out of it here
    }
    let (a, b) = (device.stream()?, device.stream()?);
    let parts: Result<Vec<_>> = (0..7).map(|_| a.zeros::<u8>(BYTES as usize).queued()).collect();
    drop(parts?);
    a.done().await?;
    b.zeros::<u8>(7 * BYTES as usize).await?;
    Ok(())
}

/// Work still uses what the stream keeps when its last handle goes.
#[tokio::test]
async fn a_stream_that_goes_gives_back_what_it_kept() -> Result<()> {
    let device = testing::device();
    let before = used(&device);
    for _ in sample(0..20) {
        let stream = device.stream()?;
        let gate = Gate::close(&stream)?;
        drop(stream.full(5000, 1u32).queued()?);
        let last = stream.done();
        drop(stream);
        gate.open();
        last.await?;
    }
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while used(&device) > before {
        assert!(std::time::Instant::now() < end, "{} bytes are left", used(&device) - before);
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    Ok(())
}
