//! Pinned memory that kernels use in place.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU32;
use std::time::Instant;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, ErrorDetail, ErrorKind, Flag, Grid, Kernel, LaunchConfig, Mapped, PinnedBuffer, Result,
    kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const LEN: usize = 1000;

#[tokio::test]
async fn the_host_gets_its_slice_behind_every_use() -> Result<()> {
    let device = testing::device();
    let scale = kernels::scale::load(&device).await?;
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.pinned::<f32>(LEN)?.into_mapped();
    x.host().await?.fill(3.0);
    let mut y = a.zeros::<f32>(LEN).await?;

    let gates = [Gate::close(&a)?, Gate::close(&b)?];
    scale.launch(&a, 2.0, &mut x).queued()?;
    b.copy(&x, &mut y).queued()?;
    {
        let mut host = Box::pin(x.host());
        assert!((&mut host).now_or_never().is_none(), "a kernel writes it");
        gates[0].open();
        a.synchronize()?;
        assert!((&mut host).now_or_never().is_none(), "a copy reads it");
        gates[1].open();
        let host = host.await?;
        assert_eq!(*host, [6.0; LEN]);
        host.fill(1.0);
    }
    assert!(gates.iter().all(|gate| !gate.timed_out()));
    // The copy had what the kernel wrote, and the next kernel has what the host wrote.
    assert_eq!(b.download(&y).await?, [6.0; LEN]);
    scale.launch(&b, 5.0, &mut x).queued()?;
    assert_eq!(*x.host().await?, [5.0; LEN]);
    Ok(())
}

#[tokio::test]
async fn a_request_in_place() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let add = kernels::add::load(&device).await?;
    let mut request = stream.pinned::<f32>(LEN)?;
    // Parts of one buffer, at odd places.
    let mut second = request.split_off(LEN - 7)?;
    let rest = second.split_off(3)?;
    second.copy_from_slice(&[1.0, 2.0, 3.0]);
    let address = second.as_ptr();
    let input: Mapped<f32> = second.into_mapped();
    let mut output = rest.into_mapped();
    assert_eq!((input.len(), output.len(), input.is_empty()), (3, 4, false));
    let mut sum = output.view_mut();
    add.launch(&stream, &input, &input, &mut sum.slice_mut(1..)?).queued()?;
    assert_eq!(*output.into_pinned().await?, [0.0, 2.0, 4.0, 6.0]);
    let second = input.into_pinned().await?;
    assert_eq!((second.as_ptr(), &second[..]), (address, &[1.0, 2.0, 3.0][..]));

    let empty = stream.pinned::<f32>(0)?.into_mapped();
    add.launch(&stream, &empty, &empty, &mut stream.zeros(0).queued()?).queued()?;
    assert!(empty.into_pinned().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_dropped_mapping_stays_until_its_kernel_ends() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let in_use = || device.stats().pinned_used_bytes;
    let before = in_use();
    let mut ways: Vec<fn(Mapped<f32>)> = vec![drop];
    ways.push(|x| x.into_pinned().abandon());
    ways.push(|x| drop(x.into_pinned()));
    for give_up in ways {
        let mut x = stream.pinned::<f32>(LEN)?.into_mapped();
        let gate = Gate::close(&stream)?;
        scale.launch(&stream, 2.0, &mut x).queued()?;
        give_up(x);
        // What is written now is not what the kernel may still touch.
        let others: Vec<_> = (0..8).map(|_| stream.pinned::<f32>(LEN)).collect::<Result<_>>()?;
        assert!(in_use() > before + 8 * 4 * LEN as u64, "{:?}", device.stats());
        gate.open();
        stream.synchronize()?;
        assert!(others.iter().all(|other| other.iter().all(|x| *x == 0.0)));
        assert!(!gate.timed_out());
        drop((others, gate));
        eventually("it is back in its pool", || in_use() <= before);
    }
    Ok(())
}

#[tokio::test]
async fn what_was_not_written_is_told() -> Result<()> {
    let device = testing::device();
    let other = gpu_await::Device::host();
    let stream = device.stream()?;
    let add = kernels::add::load(&device).await?;
    let mut x = stream.pinned::<f32>(4)?.into_mapped();
    let unwritten = stream.empty::<f32>(4).queued()?;
    add.launch(&stream, &unwritten, &unwritten, &mut x).queued().unwrap_err();
    let error = x.host().await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    stream.fill(&mut x, 2.0).queued()?;
    assert_eq!(*x.host().await?, [2.0; 4]);
    let error = other.default_stream().fill(&mut x, 2.0).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    device.close(SOON).await?;
    assert_eq!(x.host().await.unwrap_err().kind(), ErrorKind::Closed);
    Ok(())
}

#[test]
fn a_lost_device_tells_its_loss() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let mut x = stream.pinned::<u8>(LEN)?.into_mapped();
    let gate = Gate::close(&stream)?;
    let pending = stream.fill(&mut x, 1);
    handle.lose_device("on purpose");
    assert_eq!(pending.synchronize().unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(futures::executor::block_on(x.host()).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(stream.pinned::<u8>(LEN).unwrap_err().kind(), ErrorKind::DeviceLost);
    drop(gate);
    assert_eq!(x.into_pinned().synchronize().unwrap_err().kind(), ErrorKind::DeviceLost);
    Ok(())
}

/// By the loss of its own device, and of another one that its stream waits for.
#[test]
fn what_a_loss_sets_aside_is_counted_once() -> Result<()> {
    const BLOCK: u64 = 1024;
    const WORD: u64 = 128;
    for (waits, drops_first) in [(false, false), (false, true), (true, false), (true, true)] {
        let name = format!("of another: {waits}, dropped first: {drops_first}");
        let (faults, handle) = testing::faults();
        let lost = testing::host_with(faults);
        let theirs = lost.stream()?;
        let device = if waits { Device::host() } else { lost.clone() };
        let stream = device.stream()?;
        let map = || stream.pinned::<u8>(LEN).map(PinnedBuffer::into_mapped);
        let (mut written, mut read, mut idle, flag) =
            (map()?, map()?, map()?, device.pinned_flag()?);
        let mut copied = map()?;
        stream.fill(&mut idle, 1).synchronize()?;
        stream.fill(&mut read, 1).synchronize()?;
        let twin = |_: &Grid, _: &AtomicU32| ();
        let kernel = Kernel::<(Flag,)>::host(&device, "flagged", twin)?;
        let gate = Gate::close(&theirs)?;
        stream.wait(&theirs).queued()?;
        // With the gate's own word.
        let before = device.stats();
        for _ in 0..3 {
            stream.fill(&mut written, 1).queued()?;
            stream.copy(&read, &mut copied).queued()?;
            stream.launch(&kernel, LaunchConfig::new(1, 1), (&flag,)).queued()?;
        }
        let drops = || drop((written, read, copied, idle, flag, kernel));
        let loses = || {
            handle.lose_device("on purpose");
            assert!(theirs.synchronize().unwrap_err().is_device_lost());
        };
        if drops_first {
            drops();
            loses();
        } else {
            loses();
            drops();
        }
        drop((stream, theirs));
        let set_aside = 3 * BLOCK + WORD + before.lent_bytes;
        let counted = || {
            let stats = device.stats();
            (stats.lent_bytes, stats.quarantined_bytes)
        };
        let end = Instant::now() + SOON;
        while counted() != (0, set_aside) {
            assert!(Instant::now() < end, "{name}: {:?}, not {set_aside}", counted());
            std::thread::yield_now();
        }
        drop(gate);
        eventually(&name, || device.stats().pinned_used_bytes == before.pinned_used_bytes - BLOCK);
        assert_eq!(counted(), (0, set_aside), "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_thousand_requests_leave_nothing() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let before = device.stats().pinned_used_bytes;
    for request in 0..1000 {
        let mut x = stream.pinned::<f32>(64)?;
        x.fill(request as f32);
        let mut x = x.into_mapped();
        scale.launch(&stream, 2.0, &mut x).queued()?;
        assert_eq!(*x.into_pinned().await?, [2.0 * request as f32; 64]);
    }
    eventually("all is back", || device.stats().pinned_used_bytes <= before);
    Ok(())
}
