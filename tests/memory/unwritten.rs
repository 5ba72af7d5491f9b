//! New memory has no past: nobody reads what nobody wrote, by whatever way.
//!
//! A buffer of known contents is dropped, and the next one has its memory: a stream's block cache
//! gives it out again, and so does the pool of pinned memory. Each test asks for the contents in
//! another way. That a host device fills fresh memory with a pattern hides nothing here: the calls
//! themselves are refused, and of host memory every byte is looked at.

use std::time::Duration;

use gpu_await::testing;
use gpu_await::{
    Copy2d, Device, DeviceBuffer, DeviceKind, ErrorDetail, ErrorKind, Grid, In, InOut, Kernel,
    LaunchConfig, Op, Out, PinnedBuffer, Result, Stream, kernels,
};

const SOON: Duration = Duration::from_secs(10);
/// What the memory held before.
const SECRET: u32 = 0x5EC2_E700;
const LEN: usize = 1000;

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A buffer that nobody wrote, in memory that held [`SECRET`].
fn unwritten(stream: &Stream) -> Result<DeviceBuffer<u32>> {
    drop(stream.full(LEN, SECRET).queued()?);
    stream.empty(LEN).queued()
}

fn is_refused<T>(op: Op<T>, start: u64, end: u64) {
    let error = op.submitted().map(drop).expect_err("nobody wrote it");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    match *error.detail() {
        ErrorDetail::Unwritten { start: s, end: e, .. } => assert_eq!((s, e), (start, end)),
        ref other => panic!("{other}"),
    }
    assert!(error.to_string().contains("zeros"), "{error}");
}

#[tokio::test]
async fn no_copy_shows_it() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let all = 4 * LEN as u64;
    let mut to = stream.zeros::<u32>(LEN).queued()?;
    let x = unwritten(&stream)?;
    is_refused(stream.download(&x), 0, all);
    is_refused(stream.download_vec(&x), 0, all);
    is_refused(stream.download_into(&x, device.pinned(LEN)?), 0, all);
    let rows = Copy2d::new(3, 5).source_start(7).source_pitch(10);
    is_refused(stream.download_2d(&x, device.pinned(LEN)?, rows), 28, 28 + 4 * 43);
    is_refused(stream.copy_2d(&x, &mut to, rows), 28, 28 + 4 * 43);
    is_refused(stream.copy(&x, &mut to), 0, all);
    is_refused(stream.download(&x.slice(3..5)?), 12, 20);
    is_refused(stream.download(&x.view().cast::<u8>()?.slice(3..5)?), 3, 5);
    let staged = soon(stream.download_staged(&x)).await.expect_err("nobody wrote it");
    assert!(matches!(staged.detail(), ErrorDetail::Unwritten { .. }), "{staged}");
    is_refused(x.freeze(), 0, all);
    Ok(())
}

#[tokio::test]
async fn no_copy_between_devices_shows_it() -> Result<()> {
    let (here, there) = (testing::device(), testing::peer_device());
    let (stream, other) = (here.stream()?, there.stream()?);
    let x = unwritten(&stream)?;
    let mut to = other.zeros::<u32>(LEN).queued()?;
    is_refused(other.copy(&x, &mut to), 0, 4 * LEN as u64);
    Ok(())
}

/// Kernels that read and write are refused; it is the kernel's promise to overwrite that lets it in.
#[tokio::test]
async fn no_kernel_reads_it() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (axpy, scale, add, fill) = (
        kernels::axpy::load(&device).await?,
        kernels::scale::load(&device).await?,
        kernels::add::load(&device).await?,
        kernels::fill::load(&device).await?,
    );
    let fresh = || -> Result<DeviceBuffer<f32>> {
        drop(stream.full(LEN, f32::from_bits(SECRET)).queued()?);
        stream.empty(LEN).queued()
    };
    let all = 4 * LEN as u64;
    let ones = stream.ones::<f32>(LEN).queued()?;
    let mut x = fresh()?;
    is_refused(scale.launch(&stream, 2.0, &mut x), 0, all);
    let mut x = fresh()?;
    is_refused(axpy.launch(&stream, 2.0, &ones, &mut x), 0, all);
    let x = fresh()?;
    let mut out = fresh()?;
    is_refused(add.launch(&stream, &ones, &x, &mut out), 0, all);
    // Half of it written: the other half is not.
    let mut x = fresh()?;
    fill.launch(&stream, 1.0, &mut x.slice_mut(..LEN / 2)?).queued()?;
    is_refused(stream.download(&x), all / 2, all);
    scale.launch(&stream, 2.0, &mut x.slice_mut(..LEN / 2)?).queued()?;
    assert_eq!(soon(stream.download(&x.slice(..LEN / 2)?)).await?, [2.0; LEN / 2]);
    is_refused(scale.launch(&stream, 2.0, &mut x), all / 2, all);
    // In parts, on two streams, and cast: all of it.
    let other = device.stream()?;
    let mut x = fresh()?;
    let (mut left, right) = x.split_at_mut(LEN / 2)?;
    fill.launch(&stream, 1.0, &mut left).queued()?;
    other.fill(&mut right.cast::<u8>()?, 0).queued()?;
    scale.launch(&stream, 3.0, &mut x).queued()?;
    assert_eq!(soon(stream.download(&x)).await?[LEN / 2 - 1..=LEN / 2], [3.0, 0.0]);
    Ok(())
}

/// A launch of nothing writes nothing, whatever it declares.
#[tokio::test]
async fn a_launch_of_nothing_writes_nothing() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let set = Kernel::<(Out<u32>,)>::host(&device, "set", |_: &Grid, x: &mut [u32]| x.fill(1))?;
    let mut x = unwritten(&stream)?;
    stream.launch(&set, LaunchConfig::nothing(), (&mut x,)).queued()?;
    is_refused(stream.download(&x), 0, 4 * LEN as u64);
    // One that is refused neither.
    let mut x = unwritten(&stream)?;
    let strict = set.require("x.len() < 10", |_, (x,)| x.len() < 10);
    assert!(stream.launch(&strict, LaunchConfig::new(1, 1), (&mut x,)).queued().is_err());
    assert!(soon(stream.download(&x)).await.is_err());
    Ok(())
}

/// What a run-time kernel declares is held as well.
#[tokio::test]
async fn a_runtime_kernel_is_held_to_its_types() -> Result<()> {
    let device = Device::host();
    let stream = device.stream()?;
    let twin = |_: &Grid, x: &[u32], y: &mut [u32]| y.copy_from_slice(x);
    let reads = Kernel::<(In<u32>, InOut<u32>)>::host(&device, "reads", twin)?;
    let overwrites = Kernel::<(In<u32>, Out<u32>)>::host(&device, "overwrites", twin)?;
    let one = LaunchConfig::new(1, 1);
    let (x, mut y) = (stream.full(LEN, 7_u32).queued()?, unwritten(&stream)?);
    is_refused(stream.launch(&reads, one, (&x, &mut y)), 0, 4 * LEN as u64);
    stream.launch(&overwrites, one, (&x, &mut y)).queued()?;
    stream.launch(&reads, one, (&x, &mut y)).queued()?;
    assert_eq!(soon(stream.download(&y)).await?, [7; LEN]);
    Ok(())
}

/// Rows with gaps write the rows alone: between them nothing changes, so something must be there.
#[tokio::test]
async fn gaps_between_rows_do_not_show_it() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let x = stream.ones::<u32>(LEN).queued()?;
    let gaps = Copy2d::new(1, 100).destination_pitch(10);
    let extent = 4 * (99 * 10 + 1);
    let mut y = unwritten(&stream)?;
    is_refused(stream.copy_2d(&x, &mut y, gaps), 0, extent);
    let mut y = unwritten(&stream)?;
    let mut pinned = device.pinned(LEN)?;
    pinned.fill(1);
    is_refused(stream.upload_2d(pinned, &mut y, gaps), 0, extent);
    // Without gaps the rows are all that is written.
    let mut y = unwritten(&stream)?;
    let dense = Copy2d::new(10, 10).destination_start(50);
    stream.copy_2d(&x, &mut y, dense).queued()?;
    is_refused(stream.download(&y), 0, 200);
    is_refused(stream.download(&y.slice(100..)?), 600, 4 * LEN as u64);
    assert_eq!(soon(stream.download(&y.slice(50..150)?)).await?, [1; 100]);
    // On memory that was written the gaps stay as they are.
    let mut y = stream.full(LEN, 9_u32).queued()?;
    stream.copy_2d(&x, &mut y, gaps).queued()?;
    assert_eq!(soon(stream.download(&y)).await?[..11], [1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 1]);
    Ok(())
}

/// Pinned memory of another request is zero before anybody gets it.
#[tokio::test]
async fn pinned_memory_has_no_past() -> Result<()> {
    fn used(device: &Device, bytes: usize) -> Result<()> {
        let mut before: Vec<PinnedBuffer<u8>> =
            (0..3).map(|_| device.pinned(bytes)).collect::<Result<_>>()?;
        before.iter_mut().for_each(|pinned| pinned.fill(0x5E));
        Ok(())
    }
    let device = testing::device();
    let stream = device.stream()?;
    for bytes in [1, 100, 5000, 1 << 20, (3 << 20) + 1] {
        used(&device, bytes)?;
        let fresh = [
            device.pinned::<u8>(bytes)?,
            stream.pinned::<u8>(bytes)?,
            soon(device.pinned_async::<u8>(bytes)).await?,
        ];
        for pinned in &fresh {
            assert_eq!(pinned.len(), bytes);
            assert!(pinned.iter().all(|byte| *byte == 0), "of {bytes} bytes");
        }
    }
    used(&device, 4)?;
    assert_eq!(device.pinned_flag()?.get(), 0);
    // Through a device buffer that it fills in part.
    used(&device, 4000)?;
    let mut pinned = stream.pinned::<u8>(4000)?;
    pinned[..10].fill(1);
    let x = stream.upload(pinned).queued()?;
    let back = soon(stream.download(&x)).await?;
    assert!(back[10..].iter().all(|byte| *byte == 0));
    // Rows into a pinned buffer leave its gaps.
    used(&device, 4000)?;
    let rows = Copy2d::new(1, 10).destination_pitch(100);
    let back = soon(stream.download_2d(&x, stream.pinned(4000)?, rows)).await?;
    assert_eq!(back.iter().filter(|byte| **byte != 0).count(), 10);
    Ok(())
}

/// An upload that fails in the middle leaves nothing that could be read.
#[tokio::test]
async fn a_failed_write_is_no_write() -> Result<()> {
    use gpu_await::testing::DriverCall;

    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults.spare_bytes_per_stream(1 << 20));
    let stream = device.stream()?;
    for call in [DriverCall::CopyToDevice, DriverCall::CopyRows, DriverCall::Fill] {
        let mut x = unwritten(&stream)?;
        handle.fail_nth(call, 1, ErrorKind::Unsupported);
        let rows = Copy2d::new(10, 10).source_pitch(20);
        let pinned = device.pinned(LEN)?;
        let failed = match call {
            DriverCall::CopyToDevice => stream.upload_into(pinned, &mut x).without_value(),
            DriverCall::CopyRows => stream.upload_2d(pinned, &mut x, rows).without_value(),
            _ => stream.fill(&mut x, 1),
        };
        assert!(failed.queued().is_err());
        assert!(soon(stream.download(&x)).await.is_err());
        assert!(soon(stream.download(&x.slice(500..)?)).await.is_err());
    }
    assert_eq!(device.kind(), DeviceKind::Host);
    Ok(())
}
