//! Copies of many pieces.

use std::sync::Arc;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    CopyBy, Device, DeviceBuffer, ErrorDetail, ErrorKind, In, InOut, Mapped, Op, PieceProblem,
    Region, Result, Stream, View, ViewMut, kernels,
};

const WAYS: [CopyBy; 3] = [CopyBy::Auto, CopyBy::CopyEngine, CopyBy::Kernel];

/// Pinned memory with a number for each byte.
fn numbered(stream: &Stream, len: usize) -> Result<Mapped<u8>> {
    let mut pinned = stream.pinned::<u8>(len)?;
    pinned.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + at / 251) as u8);
    Ok(pinned.into_mapped())
}

/// So many pieces of that length, each at the start of a stretch of `stride`, the sources in opposite order.
async fn there_and_back(stream: &Stream, by: CopyBy, pieces: usize, len: usize) -> Result<()> {
    let stride = len + 5;
    let mut host = numbered(stream, pieces * stride)?;
    let sent = host.host().await?.to_vec();
    let mut device = stream.zeros::<u8>(pieces * stride).queued()?;
    let mut other = stream.zeros::<u8>(pieces * stride).queued()?;
    let mut back = stream.pinned::<u8>(pieces * stride)?.into_mapped();
    let reversed = |at: usize| (pieces - 1 - at) * stride + 3..(pieces - 1 - at) * stride + 3 + len;

    let to = device.view_mut().chunks_mut(stride);
    let up = to.enumerate().map(|(at, to)| Ok((host.slice(reversed(at))?, first(to, len)?)));
    stream.copy_many(up.collect::<Result<_>>()?, by).queued()?;
    let to = other.view_mut().chunks_mut(stride);
    let across = to
        .enumerate()
        .map(|(at, to)| Ok((device.slice(at * stride..at * stride + len)?, first(to, len)?)));
    stream.copy_many(across.collect::<Result<_>>()?, by).queued()?;
    let to = back.view_mut().chunks_mut(stride);
    let down = to
        .enumerate()
        .map(|(at, to)| Ok((other.slice(at * stride..at * stride + len)?, first(to, len)?)));
    stream.copy_many(down.collect::<Result<_>>()?, by).await?;

    let back = back.host().await?;
    for at in 0..pieces {
        let piece = &back[at * stride..(at + 1) * stride];
        assert_eq!(piece[..len], sent[reversed(at)], "piece {at} of {pieces}, {by:?}");
        assert_eq!(piece[len..], [0; 5], "behind piece {at} of {pieces}, {by:?}");
    }
    Ok(())
}

fn first(view: ViewMut<'_, u8>, len: usize) -> Result<ViewMut<'_, u8>> {
    Ok(view.split_at_mut(len)?.0)
}

#[tokio::test]
async fn pieces_of_every_number_and_size() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    for by in WAYS {
        // Among a kernel's arguments, and in a table; of one part, and of several.
        for (pieces, len) in
            [(1, 1), (3, 16), (4, 4096), (170, 33), (171, 64), (1000, 7), (5, 40_001)]
        {
            there_and_back(&stream, by, pieces, len).await?;
        }
    }
    // Nothing to do.
    stream.copy_many::<u8>(Vec::new(), CopyBy::Auto).await?;
    let (x, mut y) = (stream.zeros::<u8>(4).queued()?, stream.zeros::<u8>(4).queued()?);
    stream.copy_many(vec![(x.slice(..0)?, y.slice_mut(..0)?)], CopyBy::Kernel).await?;
    Ok(())
}

/// What safe code cannot write down: two buffers of the same memory.
fn twice(stream: &Stream, len: usize) -> Result<[DeviceBuffer<u8>; 2]> {
    let owner = Arc::new(stream.zeros::<u8>(len).synchronize()?);
    let adopted = |owner: &Arc<DeviceBuffer<u8>>| {
        // SAFETY: the owner keeps the memory; the only copies that use both are refused.
        unsafe { stream.device().adopt_memory(owner.device_ptr(), len, owner.clone()) }
    };
    Ok([adopted(&owner)?, adopted(&owner)?])
}

/// Which piece is refused, and why.
fn refusal(stream: &Stream, pieces: Vec<(View<'_, u8>, ViewMut<'_, u8>)>) -> (usize, PieceProblem) {
    let error = stream.copy_many(pieces, CopyBy::Auto).queued().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    match error.detail() {
        ErrorDetail::BadPiece { piece, problem, .. } => (*piece, problem.clone()),
        _ => panic!("{error}"),
    }
}

#[tokio::test]
async fn pieces_that_overlap_are_refused() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let [mut x, mut again] = twice(&stream, 100)?;
    let y = stream.full(100, 1u8).queued()?;
    let mut z = stream.zeros::<u8>(100).queued()?;
    let submitted = stream.submitted();
    // Two write the same bytes.
    let pieces = vec![
        (y.slice(..10)?, x.slice_mut(20..30)?),
        (y.slice(50..60)?, z.slice_mut(..10)?),
        (y.slice(10..30)?, again.slice_mut(28..48)?),
    ];
    assert_eq!(refusal(&stream, pieces), (2, PieceProblem::Overlap { other: 0, bytes: 2 }));
    // One reads what another writes.
    let pieces =
        vec![(x.slice(40..60)?, z.slice_mut(..20)?), (y.slice(..1)?, again.slice_mut(59..60)?)];
    assert_eq!(refusal(&stream, pieces), (1, PieceProblem::Overlap { other: 0, bytes: 1 }));
    // One overlaps its own source.
    let pieces = vec![(x.slice(..20)?, again.slice_mut(10..30)?)];
    assert_eq!(refusal(&stream, pieces), (0, PieceProblem::Overlap { other: 0, bytes: 10 }));
    let pieces = vec![(y.slice(..20)?, z.slice_mut(..21)?)];
    let problem = PieceProblem::Lengths { source_len: 20, destination_len: 21 };
    assert_eq!(refusal(&stream, pieces), (0, problem));
    assert_eq!(stream.submitted(), submitted);
    // Two that read the same bytes, and neighbours.
    let (left, right) = z.split_at_mut(50)?;
    let pieces = vec![(y.slice(..50)?, left), (y.slice(25..75)?, right)];
    stream.copy_many(pieces, CopyBy::Auto).await
}

#[tokio::test]
async fn a_refused_copy_fails_every_destination() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let (x, unwritten) = (stream.full(8, 1u8).queued()?, stream.empty::<u8>(8).queued()?);
    for by in WAYS {
        let mut y = stream.zeros::<u8>(32).queued()?;
        let (left, right) = y.split_at_mut(16)?;
        let pieces = vec![(x.view(), first(left, 8)?), (unwritten.view(), first(right, 8)?)];
        let error = stream.copy_many(pieces, by).queued().unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Unwritten { .. }), "{error}");
        for (range, is_failed) in [(0..8, true), (8..16, false), (16..24, true), (24..32, false)] {
            let read = stream.download(&y.slice(range.clone())?).await;
            assert_eq!(read.is_err(), is_failed, "{range:?} after {by:?}");
        }
        // Copied again they are healed.
        let (left, right) = y.split_at_mut(16)?;
        stream
            .copy_many(vec![(x.view(), first(left, 8)?), (x.view(), first(right, 8)?)], by)
            .queued()?;
        assert_eq!(stream.download(&y.slice(..8)?).await?, [1; 8]);
    }
    Ok(())
}

/// Each driver call of it: what the copy was to write counts as failed, and the next one works.
#[tokio::test]
async fn a_call_that_fails_in_the_middle() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let (x, mut y) = (stream.full(40, 3u8).queued()?, stream.zeros::<u8>(40).queued()?);
    for (by, call, nth) in
        [(CopyBy::CopyEngine, DriverCall::CopyOnDevice, 3), (CopyBy::Kernel, DriverCall::Launch, 1)]
    {
        handle.fail_nth(call, nth, ErrorKind::Driver);
        let error = copy_in_tens(&stream, &x, &mut y, by).queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
        let error = stream.download(&y).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
        copy_in_tens(&stream, &x, &mut y, by).queued()?;
        assert_eq!(stream.download(&y).await?, [3; 40]);
    }
    Ok(())
}

fn copy_in_tens(
    stream: &Stream,
    x: &DeviceBuffer<u8>,
    y: &mut DeviceBuffer<u8>,
    by: CopyBy,
) -> Op<()> {
    let to = y.view_mut().chunks_mut(10);
    stream.copy_many(x.view().chunks(10).zip(to).collect(), by)
}

#[tokio::test]
async fn order_is_by_piece() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    for by in WAYS {
        let (mut x, mut y) = (a.full(100, 1u8).await?, a.zeros::<u8>(100).await?);
        let gate = Gate::close(&a)?;
        let (left, right) = y.split_at_mut(50)?;
        let pieces =
            vec![(x.slice(..10)?, first(left, 10)?), (x.slice(80..90)?, first(right, 10)?)];
        // Dropped: it goes on.
        drop(a.copy_many(pieces, by));
        // What no piece touches waits for nothing, nor does another reader.
        b.fill(&mut x.slice_mut(10..80)?, 2).await?;
        b.fill(&mut y.slice_mut(10..50)?, 3).await?;
        assert_eq!(b.download(&x.slice(85..90)?).await?, [1; 5]);
        // What one writes waits.
        let mut read = b.download(&y.slice(50..60)?);
        let write = b.fill(&mut x.slice_mut(80..81)?, 4);
        assert!((&mut read).now_or_never().is_none(), "{by:?}");
        gate.open();
        assert_eq!(read.await?, [1; 10]);
        write.await?;
        assert_eq!(
            b.download(&y.slice(..60)?).await?[..],
            [[1; 10], [3; 10], [3; 10], [3; 10], [3; 10], [1; 10]].concat()
        );
        assert!(!gate.timed_out());
    }
    Ok(())
}

/// By a way that is direct and by one through the host.
#[tokio::test]
async fn pieces_of_another_device() -> Result<()> {
    let (faults, handle) = testing::faults();
    let (own, far) = (testing::host_with(faults), Device::host());
    for (device, other, is_reached) in
        [(testing::device(), testing::peer_device(), true), (own, far, false)]
    {
        if !is_reached {
            handle.refuse_peers();
        }
        let (s, t) = (device.stream()?, other.stream()?);
        let (near, theirs) = (s.full(20, 1u8).queued()?, t.full(20, 2u8).queued()?);
        for by in WAYS {
            let mut y = s.zeros::<u8>(40).queued()?;
            let mut chunks = y.view_mut().chunks_mut(10);
            let sources =
                [theirs.slice(..10)?, near.slice(5..15)?, theirs.slice(10..)?, near.slice(10..)?];
            let pieces = sources.into_iter().zip(&mut chunks).collect();
            s.copy_many(pieces, by).queued()?;
            let expected = [[2; 10], [1; 10], [2; 10], [1; 10]].concat();
            assert_eq!(s.download(&y).await?, expected, "{by:?}, reached: {is_reached}");
        }
        // Neither a destination nor pinned memory of theirs.
        let mut to = t.zeros::<u8>(20).queued()?;
        let error =
            s.copy_many(vec![(near.view(), to.view_mut())], CopyBy::Auto).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
        let (pinned, mut y) = (t.pinned::<u8>(20)?.into_mapped(), s.zeros::<u8>(20).queued()?);
        let error =
            s.copy_many(vec![(pinned.view(), y.view_mut())], CopyBy::Auto).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn pieces_in_a_list_and_in_a_graph() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut region = Region::default();
    let x = stream.upload((0..1000u16).map(f32::from).collect::<Vec<_>>()).queued()?;
    // More than a launch's arguments hold, at other places in each run.
    for run in 0..4 {
        let mut y = stream.zeros::<f32>(400).queued()?;
        stream
            .replay(&mut region, |q| {
                let to = y.view_mut().chunks_mut(2);
                let from =
                    (0..200).map(|at| x.slice((at * 3 + run) % 900..(at * 3 + run) % 900 + 2));
                let pieces = from.zip(to).map(|(from, to)| Ok((from?, to)));
                q.copy_many(pieces.collect::<Result<_>>()?, CopyBy::Auto)?;
                scale.launch(q, 2.0, &mut y)
            })
            .queued()?;
        let y = stream.download(&y).await?;
        let expected = |at: usize| (((at / 2) * 3 + run) % 900 + at % 2) as f32 * 2.0;
        assert!((0..400).all(|at| y[at] == expected(at)), "run {run}");
    }
    let graph = device.graph::<(In<f32>, InOut<f32>), _, _>((), |q, (), (x, y)| {
        let (left, right) = y.split_at_mut(10)?;
        q.copy_many(vec![(x.slice(10..20)?, left), (x.slice(..10)?, right)], CopyBy::Auto)
    });
    let (x, mut y) = (
        stream.upload((0..20u8).map(f32::from).collect::<Vec<_>>()).queued()?,
        stream.zeros(20).queued()?,
    );
    for _ in 0..2 {
        graph.launch(&stream, (&x, &mut y)).queued()?;
        let expected: Vec<f32> = (10..20u8).chain(0..10).map(f32::from).collect();
        assert_eq!(stream.download(&y).await?, expected);
    }
    Ok(())
}
