//! Slabs: memory in blocks of one size.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    CopyBy, Device, DeviceSlab, ErrorDetail, ErrorKind, HostSlab, In, InOut, ListOutcome, Op,
    Region, Result, Stream, kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const LEN: usize = 256;

/// Copies blocks up.
fn up(
    stream: &Stream,
    (host, from): (&HostSlab<f32>, &[u32]),
    (device, to): (&mut DeviceSlab<f32>, &[u32]),
) -> Result<Op<()>> {
    let pieces = host.blocks(from)?.into_iter().zip(device.blocks_mut(to)?).collect();
    Ok(stream.copy_many(pieces, CopyBy::Auto))
}

/// Copies blocks down.
fn down(
    stream: &Stream,
    (device, from): (&DeviceSlab<f32>, &[u32]),
    (host, to): (&mut HostSlab<f32>, &[u32]),
) -> Result<Op<()>> {
    let pieces = device.blocks(from)?.into_iter().zip(host.blocks_mut(to)?).collect();
    Ok(stream.copy_many(pieces, CopyBy::Auto))
}

#[tokio::test]
async fn a_new_slab_is_zeros() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    // Of memory that had other contents.
    drop(stream.full(10 * LEN, 7.0f32).queued()?);
    let slab = stream.slab::<f32>(10, LEN).queued()?;
    assert_eq!((slab.len(), slab.block_count(), slab.block_len()), (10 * LEN, 10, LEN));
    assert_eq!(stream.download(&slab).await?, [0.0; 10 * LEN]);
    let host = device.host_slab::<f32>(10, LEN).await?;
    assert_eq!((host.len(), host.block_count(), host.block_len()), (10 * LEN, 10, LEN));
    for block in 0..10 {
        assert_eq!(*host.host(block).await?, [0.0; LEN]);
    }
    for (blocks, block_len) in [(0, LEN), (10, 0)] {
        let mut slab = stream.slab::<f32>(blocks, block_len).queued()?;
        let host = device.host_slab::<f32>(blocks, block_len).await?;
        assert_eq!((slab.block_count(), host.block_count()), (0, 0));
        assert!(slab.block(0).is_err() && slab.naming_mut(&[0]).is_err() && host.block(0).is_err());
        slab.naming_mut(&[])?;
        assert!(stream.download(&slab).await?.is_empty());
    }
    assert_eq!(stream.slab::<u32>(0, usize::MAX).queued()?.block_count(), 0);
    assert_eq!(device.host_slab::<u32>(0, usize::MAX).await?.block_count(), 0);
    assert_eq!(stream.slab::<u32>(usize::MAX, 0).queued()?.block_count(), 0);
    let error = stream.slab::<u8>(1 << 32, 2).queued().unwrap_err();
    let ErrorDetail::TooLarge { len, .. } = error.detail() else { panic!("{error}") };
    assert_eq!(*len, 2 << 32);
    let error = device.host_slab::<u64>(1 << 31, usize::MAX / 2).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
    Ok(())
}

#[tokio::test]
async fn blocks_that_there_are_not() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut slab = stream.slab::<f32>(10, LEN).queued()?;
    let mut host = device.host_slab::<f32>(10, LEN).await?;
    let outside = [
        slab.block(10).err(),
        slab.block_mut(10).err(),
        slab.blocks(&[0, 10]).err(),
        slab.blocks_mut(&[0, u32::MAX]).err(),
        slab.naming(&[10]).err(),
        slab.naming_mut(&[3, 10, 4]).err(),
        host.block(10).err(),
        host.block_mut(10).err(),
        host.blocks_mut(&[10]).err(),
        host.host(10).await.err(),
        host.host_mut(10).await.err(),
        host.try_host(10).err(),
        host.try_host_mut(10).err(),
        host.idle(10).await.err(),
    ];
    for error in outside {
        let error = error.expect("there is no such block");
        let is_it =
            matches!(error.detail(), ErrorDetail::OutOfBounds { unit: "blocks", len: 10, .. });
        assert!(is_it, "{error}");
    }
    let detail = ErrorDetail::RepeatedBlock { block: 7, first: 1, second: 3 };
    assert_eq!(*slab.blocks_mut(&[3, 7, 4, 7]).unwrap_err().detail(), detail);
    assert_eq!(*host.blocks_mut(&[3, 7, 4, 7]).unwrap_err().detail(), detail);
    assert_eq!(slab.blocks(&[7, 7])?.len(), 2);
    slab.naming_mut(&[7, 7])?;
    Ok(())
}

#[tokio::test]
async fn blocks_are_ordered_one_by_one() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut slab = a.slab::<f32>(10, LEN).await?;
    let gate = Gate::close(&a)?;
    a.fill(&mut slab.block_mut(3)?, 1.0).queued()?;
    drop(a.download(&slab.block(5)?));
    // Other blocks, and another reader, wait for nothing.
    b.fill(&mut slab.block_mut(4)?, 2.0).await?;
    assert_eq!(b.download(&slab.block(5)?).await?, [0.0; LEN]);
    // Who reads what was written, and who writes what is read, wait.
    let mut read = b.download(&slab.block(3)?);
    let mut write = b.fill(&mut slab.block_mut(5)?, 3.0);
    assert!((&mut read).now_or_never().is_none() && (&mut write).now_or_never().is_none());
    let whole = a.download(&slab);
    gate.open();
    assert_eq!(read.await?, [1.0; LEN]);
    write.await?;
    let whole = whole.await?;
    let firsts: Vec<_> = whole.chunks(LEN).map(|block| block[0]).collect();
    assert_eq!(firsts, [0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(!gate.timed_out());
    Ok(())
}

#[tokio::test]
async fn the_host_gets_blocks_that_nobody_uses() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut slab = stream.slab::<f32>(8, LEN).await?;
    let mut host = device.host_slab::<f32>(8, LEN).await?;
    host.host_mut(2).await?.fill(2.0);
    stream.fill(&mut slab.block_mut(7)?, 7.0).await?;
    let gate = Gate::close(&stream)?;
    // Two copies read block 2 at once; one writes block 4.
    up(&stream, (&host, &[2]), (&mut slab, &[0]))?.queued()?;
    up(&stream, (&host, &[2, 3]), (&mut slab, &[1, 2]))?.queued()?;
    let idle = host.idle(2);
    down(&stream, (&slab, &[7]), (&mut host, &[4]))?.queued()?;
    assert_eq!(host.try_host(2)?.map(|block| block[0]), Some(2.0), "it is only read");
    assert!(host.try_host_mut(2)?.is_none() && host.try_host(4)?.is_none());
    assert!(host.host(4).now_or_never().is_none() && host.host_mut(2).now_or_never().is_none());
    assert!(idle.now_or_never().is_none());
    let other = host.try_host_mut(6)?.expect("nobody uses it");
    other.fill(6.0);
    let idle = host.idle(2);
    gate.open();
    idle.await?;
    host.try_host_mut(2)?.expect("nobody uses it any more").fill(0.0);
    assert_eq!(*host.host(4).await?, [7.0; LEN]);
    assert_eq!(*host.host_mut(4).await?, [7.0; LEN]);
    for block in [0, 1] {
        assert_eq!(stream.download(&slab.block(block)?).await?, [2.0; LEN]);
    }
    assert!(!gate.timed_out());
    Ok(())
}

/// Futures that are dropped take nothing with them, and the memory outlives its slab.
#[tokio::test]
async fn blocks_stay_with_their_slab() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut slab = stream.slab::<f32>(20, LEN).await?;
    let mut host = device.host_slab::<f32>(20, LEN).await?;
    let used = device.stats().pinned_used_bytes;
    for round in 0..30_u8 {
        let [from, to] = [round % 20, (round + 7) % 20].map(u32::from);
        host.host_mut(from).await?.fill(f32::from(round));
        drop(up(&stream, (&host, &[from]), (&mut slab, &[to]))?);
        drop(down(&stream, (&slab, &[to]), (&mut host, &[to]))?);
        assert_eq!(host.host(to).await?[LEN - 1], f32::from(round));
    }
    assert!(device.stats().pinned_used_bytes <= used, "nothing is taken beside the slab");
    let gate = Gate::close(&stream)?;
    let word = device.stats().pinned_used_bytes - used;
    host.host_mut(1).await?.fill(9.0);
    up(&stream, (&host, &[1]), (&mut slab, &[3]))?.queued()?;
    drop(host);
    assert!(device.stats().pinned_used_bytes >= used, "the device still reads it");
    gate.open();
    assert_eq!(stream.download(&slab.block(3)?).await?, [9.0; LEN]);
    let size = (20 * LEN * size_of::<f32>()) as u64;
    eventually("the memory is back", || device.stats().pinned_used_bytes + size <= used + word);
    Ok(())
}

#[tokio::test]
async fn a_loss_sets_the_slab_aside() -> Result<()> {
    for is_used in [false, true] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let mut slab = stream.slab::<f32>(4, LEN).await?;
        let host = device.host_slab::<f32>(4, LEN).await?;
        let gate = Gate::close(&stream)?;
        let before = device.stats();
        let copy =
            if is_used { Some(up(&stream, (&host, &[1]), (&mut slab, &[2]))?) } else { None };
        handle.lose_device("on purpose");
        assert!(stream.synchronize().unwrap_err().is_device_lost());
        if let Some(copy) = copy {
            assert!(copy.await.unwrap_err().is_device_lost());
        }
        assert!(host.host(1).await.unwrap_err().is_device_lost());
        drop((host, gate));
        let size = (4 * LEN * size_of::<f32>()) as u64;
        let set_aside = before.lent_bytes + if is_used { size } else { 0 };
        let end = Instant::now() + SOON;
        while device.stats().quarantined_bytes < set_aside && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(device.stats().quarantined_bytes, set_aside, "used: {is_used}");
    }
    Ok(())
}

#[tokio::test]
async fn errors_follow_blocks() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut slab = stream.slab::<f32>(8, LEN).await?;
    let mut host = device.host_slab::<f32>(8, LEN).await?;
    handle.fail_nth(DriverCall::CopyToDevice, 2, ErrorKind::Driver);
    up(&stream, (&host, &[0, 1, 2]), (&mut slab, &[5, 6, 7]))?.queued().unwrap_err();
    let is_upstream = |error: gpu_await::Error| {
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    };
    for block in [5, 6, 7] {
        is_upstream(stream.download(&slab.block(block)?).await.unwrap_err());
    }
    assert_eq!(stream.download(&slab.block(4)?).await?, [0.0; LEN]);
    is_upstream(stream.download(&slab).await.unwrap_err());
    is_upstream(scale.launch(&stream, 1.0, &mut slab.naming_mut(&[3, 5])?).await.unwrap_err());
    is_upstream(stream.download(&slab.block(3)?).await.unwrap_err());
    slab.block_mut(3)?.clear_poison()?;
    scale.launch(&stream, 1.0, &mut slab.naming_mut(&[3, 4])?).queued()?;
    // A part heals nothing, a block itself.
    stream.fill(&mut slab.block_mut(5)?.slice_mut(1..)?, 1.0).queued()?;
    is_upstream(stream.download(&slab.block(5)?).await.unwrap_err());
    for block in 4..8 {
        stream.fill(&mut slab.block_mut(block)?, 1.0).queued()?;
    }
    assert_eq!(stream.download(&slab).await?[4 * LEN..], [1.0; 4 * LEN]);
    // In the host's tier the same.
    handle.fail_nth(DriverCall::CopyToHost, 1, ErrorKind::Driver);
    down(&stream, (&slab, &[4]), (&mut host, &[4]))?.queued().unwrap_err();
    is_upstream(host.host(4).await.unwrap_err());
    is_upstream(host.try_host_mut(4).unwrap_err());
    assert_eq!(*host.host(5).await?, [0.0; LEN]);
    down(&stream, (&slab, &[4]), (&mut host, &[4]))?.queued()?;
    assert_eq!(*host.host(4).await?, [1.0; LEN]);
    Ok(())
}

/// The kernel is passed all of the slab, whatever the launch names.
#[tokio::test]
async fn a_slab_outlives_a_launch_that_names_nothing() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let scale = kernels::scale::load(&device).await?;
    let mut slab = a.slab::<f32>(8, LEN).await?;
    let used = device.memory()?.used_bytes;
    let gate = Gate::close(&b)?;
    let launch = scale.launch(&b, 2.0, &mut slab.naming_mut(&[])?);
    drop(slab);
    a.synchronize()?;
    assert_eq!(device.memory()?.used_bytes, used, "the launch still uses it");
    gate.open();
    launch.await
}

/// Other blocks in each run: the same graph.
#[tokio::test]
async fn a_list_keeps_its_shape_whatever_the_blocks() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut slab = stream.slab::<f32>(64, LEN).await?;
    let mut host = device.host_slab::<f32>(64, LEN).await?;
    for block in 0..64_u8 {
        host.host_mut(block.into()).await?.fill(f32::from(block));
    }
    scale.launch(&stream, 1.0, &mut slab).queued()?;
    let (mut region, mut out) = (Region::new(), stream.zeros::<f32>(LEN).queued()?);
    for run in 0..10_u32 {
        let at = |number: u32| (number * 5 + run * 7) % 64;
        let (from, to): (Vec<_>, Vec<_>) = (0..8).map(|n| (at(n), (at(n) + 9) % 64)).unzip();
        let op = stream.replay(&mut region, |q| {
            let pieces = host.blocks(&from)?.into_iter().zip(slab.blocks_mut(&to)?).collect();
            q.copy_many(pieces, CopyBy::Auto)?;
            // As the number of blocks that a real step names: another one each time.
            scale.launch(q, 1.0, &mut slab.naming_mut(&to[..run as usize % 7])?)?;
            q.copy(&slab.block(to[3])?, &mut out)
        });
        op.queued()?;
        assert_eq!(stream.download(&out).await?, [from[3] as f32; LEN], "run {run}");
        let outcomes: Vec<_> = region.last_run().iter().map(|list| &list.outcome).collect();
        // Once what is new, once compiled, and then no other shape.
        let is_right = match outcomes[..] {
            [outcome] => match run {
                0 | 1 => !matches!(outcome, ListOutcome::Differs { .. }),
                _ => matches!(outcome, ListOutcome::Replayed { .. }),
            },
            _ => false,
        };
        assert!(is_right, "run {run}: {outcomes:?}");
    }
    Ok(())
}

/// Others fail or are written meanwhile, and the host looks at its own: a graph knows what it was passed.
#[tokio::test]
async fn a_graph_uses_no_more_than_the_blocks_that_it_is_passed() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut slab = stream.slab::<f32>(4, LEN).queued()?;
    let mut host = device.host_slab::<f32>(4, LEN).await?;
    host.host_mut(2).await?.fill(3.0);
    let short = stream.zeros::<f32>(LEN - 1).queued()?;
    stream.copy_many(vec![(short.view(), slab.block_mut(0)?)], CopyBy::Auto).queued().unwrap_err();
    let used = device.memory()?.used_bytes;
    let graph = device.graph::<(In<f32>, InOut<f32>), _, _>((), |q, (), (from, to)| {
        q.copy_many(vec![(from, to)], CopyBy::Auto)
    });
    for block in [2, 3] {
        graph.launch(&stream, (&host.block(2)?, &mut slab.block_mut(block)?)).queued()?;
        assert_eq!(*host.host(2).await?, [3.0; LEN]);
        host.host_mut(1).await?.fill(4.0);
        assert_eq!(stream.download(&slab.block(block)?).await?, [3.0; LEN]);
    }
    assert!(stream.download(&slab.block(0)?).await.is_err());
    assert_eq!(stream.download(&slab.block(1)?).await?, [0.0; LEN]);
    graph.launch(&stream, (&slab.block(2)?, &mut slab_of_one(&stream)?.block_mut(0)?)).await?;
    drop((slab, host));
    eventually("nothing is kept", || device.memory().is_ok_and(|info| info.used_bytes < used));
    Ok(())
}

/// Of a launch that fails, what it was to write is gone; what it only read is not.
#[tokio::test]
async fn blocks_that_a_failed_launch_only_read_keep_what_they_have() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut slab = stream.slab::<f32>(8, LEN).queued()?;
    let short = stream.zeros::<f32>(LEN - 1).queued()?;
    stream.copy_many(vec![(short.view(), slab.block_mut(0)?)], CopyBy::Auto).queued().unwrap_err();
    // It reads block 0, which failed.
    let mut named = slab.naming_mut(&[3])?.reading(&[0, 5])?;
    scale.launch(&stream, 2.0, &mut named).await.unwrap_err();
    assert!(stream.download(&slab.block(3)?).await.is_err());
    assert_eq!(stream.download(&slab.block(5)?).await?, [0.0; LEN]);
    // Written and read: it is written.
    let mut named = slab.naming_mut(&[4])?.reading(&[4, 0])?;
    scale.launch(&stream, 2.0, &mut named).await.unwrap_err();
    assert!(stream.download(&slab.block(4)?).await.is_err());
    assert!(slab.naming_mut(&[1])?.reading(&[8]).is_err());
    Ok(())
}

fn slab_of_one(stream: &Stream) -> Result<DeviceSlab<f32>> {
    stream.slab(1, LEN).queued()
}

#[tokio::test]
async fn a_slab_of_another_device() -> Result<()> {
    let (a, b) = (testing::device(), testing::peer_device());
    let (s, t) = (a.stream()?, b.stream()?);
    let mut theirs = t.slab::<f32>(4, LEN).await?;
    let host = b.host_slab::<f32>(4, LEN).await?;
    t.fill(&mut theirs.block_mut(2)?, 5.0).queued()?;
    let mut ours = s.slab::<f32>(4, LEN).queued()?;
    // Their device's memory may be read, their pinned memory not.
    let pieces = theirs.blocks(&[2])?.into_iter().zip(ours.blocks_mut(&[3])?).collect();
    s.copy_many(pieces, CopyBy::Auto).queued()?;
    assert_eq!(s.download(&ours.block(3)?).await?, [5.0; LEN]);
    let error = up(&s, (&host, &[0]), (&mut ours, &[0]))?.queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    let scale = kernels::scale::load(&a).await?;
    let error = scale.launch(&s, 1.0, &mut theirs.naming_mut(&[1])?).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    let _: &Device = &b;
    Ok(())
}

/// The twin of a launch gets a slice of the whole slab, so nothing else may use any of it meanwhile.
#[tokio::test]
async fn a_twin_has_the_slab_for_itself() -> Result<()> {
    let device = Device::host();
    let (a, b) = (device.stream()?, device.stream()?);
    let scale = kernels::scale::load(&device).await?;
    let mut slab = a.slab::<f32>(8, LEN).await?;
    let gate = Gate::close(&a)?;
    scale.launch(&a, 2.0, &mut slab.naming_mut(&[1])?).queued()?;
    let mut fill = b.fill(&mut slab.block_mut(5)?, 1.0);
    assert!((&mut fill).now_or_never().is_none());
    gate.open();
    fill.await?;
    // One that reads it goes beside others that read, whatever it names.
    let add = kernels::add::load(&device).await?;
    let mut out = [a.zeros::<f32>(8 * LEN).await?, b.zeros::<f32>(8 * LEN).await?];
    let [x, y] = &mut out;
    let gate = Gate::close(&a)?;
    add.launch(&a, &slab.naming(&[1])?, &slab.naming(&[2])?, x).queued()?;
    add.launch(&b, &slab.naming(&[1])?, &slab.naming(&[])?, y).await?;
    let mut fill = b.fill(&mut slab.block_mut(3)?, 1.0);
    assert!((&mut fill).now_or_never().is_none());
    gate.open();
    fill.await
}
