//! Host values that are with a device: whoever has them last waits for their point.
//!
//! A [`Lent`] may leave the batch that made it: in a captured variable, in a `Vec` over several
//! batches, through another stream's batch or another device's. The future that hands it back waits
//! for the operation that it is lent to, wherever that is.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, FaultHandle, Gate};
use gpu_await::{
    Copy2d, Device, DeviceBuffer, Error, ErrorDetail, ErrorKind, Lent, Op, PinnedBuffer, Queue,
    Refused, Result, Stream,
};

use crate::under_test::modes;

const SOON: Duration = Duration::from_secs(10);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("in time")
}

/// A batch of `stream` that hands out what others lent.
fn settled<R: gpu_await::Settle>(stream: &Stream, lent: R) -> Op<R::Output> {
    stream.batch(|_| Ok(lent))
}

/// What `batch` lends of `stream`, carried out of it.
fn carried<R>(
    stream: &Stream,
    batch: impl FnOnce(&gpu_await::Queue<'_>) -> Result<R>,
) -> Result<R> {
    let mut kept = None;
    stream
        .batch(|queue| {
            kept = Some(batch(queue)?);
            Ok(())
        })
        .queued()?;
    Ok(kept.expect("the batch ran"))
}

fn is_pending<T>(op: &mut Op<T>) -> bool {
    !op.is_complete() && op.try_take().is_none() && op.now_or_never().is_none()
}

#[tokio::test]
async fn a_captured_download_waits() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let x = a.full(2, 7u32).await?;
    let gate = Gate::close(&a)?;
    let y = carried(&a, |queue| queue.download(&x))?;
    let mut op = settled(&b, y);
    assert!(is_pending(&mut op));
    gate.open();
    assert_eq!(soon(op).await?, [7, 7]);
    Ok(())
}

#[tokio::test]
async fn a_vec_over_batches_waits_for_all() -> Result<()> {
    let device = testing::device();
    let streams = [device.stream()?, device.stream()?, device.stream()?];
    let gates: Vec<_> = streams.iter().map(Gate::close).collect::<Result<_>>()?;
    let mut all = Vec::new();
    for (n, stream) in (0..).zip(&streams) {
        for _ in 0..2 {
            let x = stream.full(2, n).queued()?;
            stream
                .batch(|queue| {
                    all.push(queue.download(&x)?);
                    Ok(())
                })
                .queued()?;
        }
    }
    let last = device.stream()?;
    let mut op = last.batch(|queue| {
        all.push(queue.download(&queue.full(2, 3)?)?);
        Ok(all)
    });
    soon(last.done()).await?;
    for gate in gates {
        assert!(is_pending(&mut op));
        gate.open();
    }
    let all = soon(op).await?;
    let firsts: Vec<i32> = all.iter().map(|x| x[0]).collect();
    assert_eq!(firsts, [0, 0, 1, 1, 2, 2, 3]);
    Ok(())
}

#[tokio::test]
async fn a_captured_host_result_waits() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&a)?;
    let answer = carried(&a, |queue| queue.host_fn(|| 42))?;
    let mut op = settled(&b, answer);
    assert!(is_pending(&mut op));
    gate.open();
    assert_eq!(soon(op).await?, 42);
    Ok(())
}

/// Each shape that a batch may return, with a value of another stream inside.
#[tokio::test]
async fn every_shape_waits() -> Result<()> {
    type Value = Lent<PinnedBuffer<u32>>;
    async fn check<R: gpu_await::Settle>(
        make: impl FnOnce(&mut dyn FnMut() -> Value) -> R,
        sum: impl FnOnce(&R::Output) -> u32,
        expected: u32,
    ) -> Result<()> {
        let device = testing::device();
        let (a, b) = (device.stream()?, device.stream()?);
        let x = a.full(1, 7u32).await?;
        let gate = Gate::close(&a)?;
        let mut lend = || carried(&a, |queue| queue.download(&x)).expect("lent");
        let mut op = settled(&b, make(&mut lend));
        assert!(is_pending(&mut op), "{}", std::any::type_name::<R>());
        gate.open();
        assert_eq!(sum(&soon(op).await?), expected, "{}", std::any::type_name::<R>());
        Ok(())
    }
    check(|x| x(), |x| x[0], 7).await?;
    check(|x| (x(),), |x| x.0[0], 7).await?;
    check(|x| (1_u32, x()), |x| x.0 + x.1[0], 8).await?;
    check(|x| Some(x()), |x| x.as_ref().map_or(0, |x| x[0]), 7).await?;
    check(|x| [x(), x(), x()], |x| x.iter().map(|x| x[0]).sum(), 21).await?;
    check(|x| vec![x(), x()], |x| x.iter().map(|x| x[0]).sum(), 14).await?;
    check(|x| vec![Some((x(), 1_u32)), None], |x| x.iter().flatten().map(|x| x.0[0]).sum(), 7)
        .await?;
    check(|x| (Some([x()]), vec![(x(), x())]), |x| x.1[0].0[0] + x.1[0].1[0], 14).await
}

#[tokio::test]
async fn a_captured_vec_download_waits() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let x = a.full(3, 5u8).await?;
    let gate = Gate::close(&a)?;
    let y = carried(&a, |queue| queue.download_vec(&x))?;
    let mut op = settled(&b, y);
    assert!(is_pending(&mut op));
    gate.open();
    assert_eq!(soon(op).await?, [5; 3]);
    Ok(())
}

/// The host may write it again as soon as it is back: not while the device reads it.
#[tokio::test]
async fn a_captured_upload_waits() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.zeros::<u32>(1000).await?;
    let mut pinned = device.pinned(1000)?;
    pinned.fill(7);
    let gate = Gate::close(&a)?;
    let lent = carried(&a, |queue| queue.upload_into(pinned, &mut x).map_err(Error::from))?;
    let mut op = settled(&b, lent);
    assert!(is_pending(&mut op));
    gate.open();
    soon(op).await?.fill(9);
    assert_eq!(soon(a.download(&x)).await?, [7; 1000]);
    Ok(())
}

#[tokio::test]
async fn a_lent_of_another_device_waits() -> Result<()> {
    let (here, there) = (testing::device(), testing::device());
    let (a, b) = (here.stream()?, there.stream()?);
    let (x, y) = (a.full(2, 7u32).await?, b.full(2, 8u32).await?);
    let gate = Gate::close(&a)?;
    let first = carried(&a, |queue| queue.download(&x))?;
    let mut op = b.batch(|queue| Ok((first, queue.download(&y)?)));
    soon(b.done()).await?;
    assert!(is_pending(&mut op));
    gate.open();
    let (first, second) = soon(op).await?;
    assert_eq!((&first[..], &second[..]), (&[7, 7][..], &[8, 8][..]));
    Ok(())
}

/// A batch that fails keeps nobody's memory, and gives none of it out early.
#[tokio::test]
async fn a_failed_batch_leaves_lents_alone() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let x = a.full(1000, 7u32).await?;
    let gate = Gate::close(&a)?;
    let lent = carried(&a, |queue| queue.download(&x))?;
    let op = b.batch(|queue| {
        let _dropped = lent;
        queue.download(&x.slice(0..2000)?)
    });
    assert_eq!(op.submitted().expect_err("out of bounds").kind(), ErrorKind::InvalidCall);
    // Dropped, but with the device: the pool has not got it yet.
    assert!(device.stats().lent_bytes >= 4000);
    gate.open();
    soon(a.done()).await?;
    assert_eq!(soon(a.download(&x)).await?, [7; 1000]);
    Ok(())
}

#[tokio::test]
async fn a_lent_of_a_lost_device_is_not_handed_out() -> Result<()> {
    let (faults, handle) = testing::faults();
    let lost = testing::host_with(faults);
    let well = testing::device();
    let (a, b) = (lost.stream()?, well.stream()?);
    let x = a.full(2, 7u32).await?;
    let gate = Gate::close(&a)?;
    let lent = carried(&a, |queue| queue.download(&x))?;
    handle.lose_device("on purpose");
    let error = soon(settled(&b, lent)).await.expect_err("its device is lost");
    assert_eq!(error.kind(), ErrorKind::DeviceLost);
    drop(gate);
    // The batch's own device goes on.
    assert_eq!(soon(b.download(&b.full(1, 1u8).queued()?)).await?, [1]);
    Ok(())
}

/// An operation that is refused lends nothing; the driver's refusal in the middle neither.
#[tokio::test]
async fn a_refused_operation_lends_nothing() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (a, b) = (device.stream()?, device.stream()?);
    let x = a.full(2, 7u32).await?;
    handle.fail_nth(DriverCall::CopyToHost, 1, ErrorKind::Unsupported);
    let mut kept = None;
    let op = a.batch(|queue| {
        kept = Some(queue.download(&x)?);
        Ok(())
    });
    assert!(op.submitted().is_err() && kept.is_none());
    assert!(soon(settled(&b, kept)).await?.is_none());
    Ok(())
}

#[test]
fn a_lent_of_a_stepped_device_waits_for_its_steps() -> Result<()> {
    let (manual, stepper) = testing::manual();
    let other = Device::host();
    let (a, b) = (manual.stream()?, other.stream()?);
    let x = a.full(2, 7u32).queued()?;
    let lent = carried(&a, |queue| queue.download(&x))?;
    let mut op = settled(&b, lent);
    b.synchronize()?;
    assert!(is_pending(&mut op));
    stepper.run_until_idle();
    assert_eq!(op.try_take().expect("complete")?, [7, 7]);
    Ok(())
}

/// The usual case is one point, whatever the shape.
#[tokio::test]
async fn lents_of_one_stream_are_one_point() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let x = stream.full(2, 7u32).queued()?;
    let early = carried(&stream, |queue| queue.download(&x))?;
    let op = stream.batch(|queue| Ok((early, [queue.download(&x)?, queue.download(&x)?])));
    let shown = format!("{op:?}");
    assert_eq!(shown.matches("ticket").count(), 1, "{shown}");
    assert_eq!(op.ticket().expect("submitted").number, stream.submitted());
    let (early, late) = soon(op).await?;
    assert_eq!((early[0], late[1][1]), (7, 7));
    // Nothing new submitted: the point is the value's own.
    let early = carried(&stream, |queue| queue.download(&x))?;
    let number = stream.submitted();
    stream.zeros::<u8>(1).queued()?;
    assert_eq!(settled(&stream, early).ticket().expect("submitted").number, number);
    Ok(())
}

/// A buffer with known contents, and one to compare with.
fn frame(device: &Device) -> Result<(PinnedBuffer<u32>, usize)> {
    let mut frame = device.pinned(100)?;
    frame.fill(7);
    let at = frame.as_ptr().addr();
    Ok((frame, at))
}

fn is_back(refused: Refused<PinnedBuffer<u32>>, at: usize) -> bool {
    refused.value.is_some_and(|frame| frame.as_ptr().addr() == at && frame == [7; 100])
}

#[tokio::test]
async fn a_refused_call_hands_the_memory_back() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut x = stream.zeros::<u32>(99).await?;
    let outside = Copy2d::new(10, 11);
    let unwritten = stream.empty::<u32>(100).queued()?;

    let (frame, at) = self::frame(&device)?;
    let refused = stream.upload_into(frame, &mut x).accepted().expect_err("lengths");
    assert!(matches!(refused.error.detail(), ErrorDetail::LengthMismatch { .. }), "{refused}");
    let frame = refused.value.expect("back");
    let refused = stream.upload_2d(frame, &mut x, outside).accepted().expect_err("bounds");
    let frame = refused.value.expect("back");
    let refused = stream.download_into(&x, frame).accepted().expect_err("lengths");
    let frame = refused.value.expect("back");
    let refused = stream.download_into(&unwritten, frame).accepted().expect_err("unwritten");
    let frame = refused.value.expect("back");
    let refused = stream.download_2d(&x, frame, outside).accepted().expect_err("bounds");
    assert!(is_back(refused, at));

    // In a batch: the batch goes on, or `?` ends it.
    let (frame, at) = self::frame(&device)?;
    let mut kept = None;
    let op = stream.batch(|queue| {
        kept = Some(queue.upload_into(frame, &mut x).expect_err("lengths"));
        queue.fill(&mut x, 1)
    });
    soon(op).await?;
    assert!(is_back(kept.take().expect("kept"), at));
    let (frame, _) = self::frame(&device)?;
    let op = stream.batch(|queue| Ok(queue.upload_into(frame, &mut x)?));
    assert_eq!(op.accepted().expect_err("lengths").error.kind(), ErrorKind::InvalidCall);
    Ok(())
}

/// In the middle of a wake-up that says what is complete.
struct Within(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Within {
    fn wake(self: Arc<Self>) {
        if let Some(then) = self.0.lock().expect("no panic").take() {
            then();
        }
    }
}

/// Calls that cannot be submitted.
struct Impossible {
    stream: Stream,
    faults: FaultHandle,
    x: DeviceBuffer<u32>,
    short: DeviceBuffer<u32>,
}

type Taken = Refused<PinnedBuffer<u32>>;
type Call = fn(&mut Impossible, PinnedBuffer<u32>) -> Taken;

impl Impossible {
    const CALLS: [(&str, Call); 10] = [
        ("upload", |all, frame| {
            all.memory_is_out();
            all.stream.upload(frame).accepted().expect_err("no memory")
        }),
        ("upload_into", |all, frame| {
            all.stream.upload_into(frame, &mut all.short).accepted().expect_err("lengths")
        }),
        ("upload_2d", |all, frame| {
            all.stream.upload_2d(frame, &mut all.x, outside()).accepted().expect_err("bounds")
        }),
        ("download_into", |all, frame| {
            all.stream.download_into(&all.short, frame).accepted().expect_err("lengths")
        }),
        ("download_2d", |all, frame| {
            all.stream.download_2d(&all.x, frame, outside()).accepted().expect_err("bounds")
        }),
        ("Queue::upload", |all, frame| {
            all.memory_is_out();
            in_batch(&all.stream, |queue| queue.upload(frame).expect_err("no memory"))
        }),
        ("Queue::upload_into", |all, frame| {
            let short = &mut all.short;
            in_batch(&all.stream, |queue| queue.upload_into(frame, short).expect_err("lengths"))
        }),
        ("Queue::upload_2d", |all, frame| {
            let x = &mut all.x;
            let call = |queue: &Queue<'_>| queue.upload_2d(frame, x, outside());
            in_batch(&all.stream, |queue| call(queue).expect_err("bounds"))
        }),
        ("Queue::download_into", |all, frame| {
            let short = &all.short;
            in_batch(&all.stream, |queue| queue.download_into(short, frame).expect_err("lengths"))
        }),
        ("Queue::download_2d", |all, frame| {
            let call = |queue: &Queue<'_>| queue.download_2d(&all.x, frame, outside());
            in_batch(&all.stream, |queue| call(queue).expect_err("bounds"))
        }),
    ];

    /// The driver refuses an allocation's attempts.
    fn memory_is_out(&self) {
        for nth in [1, 2] {
            self.faults.fail_nth(DriverCall::Alloc, nth, ErrorKind::OutOfMemory);
        }
    }
}

/// More rows than there are.
fn outside() -> Copy2d {
    Copy2d::new(10, 11)
}

/// What a batch's call was refused with.
fn in_batch(stream: &Stream, call: impl FnOnce(&Queue<'_>) -> Taken) -> Taken {
    let mut kept = None;
    let batch = stream.batch(|queue| {
        kept = Some(call(queue));
        Ok(())
    });
    batch.queued().expect("it goes on");
    kept.expect("the batch ran")
}

/// Who hears of completion may go on before the stream has dropped its share of the memory.
#[test]
fn memory_that_just_came_back_comes_back_again() -> Result<()> {
    for (name, call) in Impossible::CALLS {
        let (faults, handle) = testing::faults();
        let (device, stepper) = testing::manual_with_faults(faults);
        let stream = device.stream()?;
        let mut x = stream.zeros(100).queued()?;
        let short = stream.zeros(99).queued()?;
        let (frame, at) = self::frame(&device)?;
        let op = Arc::new(Mutex::new(stream.upload_into(frame, &mut x)));
        let mut all = Impossible { stream, faults: handle, x, short };
        let (done, refused) = (op.clone(), Arc::new(Mutex::new(None)));
        let kept = refused.clone();
        let within = Within(Mutex::new(Some(Box::new(move || {
            let frame = done.lock().expect("no panic").try_take().expect("complete").expect("ran");
            *kept.lock().expect("no panic") = Some(call(&mut all, frame));
        }))));
        let waker = Waker::from(Arc::new(within));
        let polled = op.lock().expect("no panic").poll_unpin(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        stepper.run_until_idle();
        let refused = refused.lock().expect("no panic").take().expect("it was woken");
        assert!(is_back(refused, at), "{name}");
    }
    Ok(())
}

/// An upload that the device has no memory for can be tried again.
#[tokio::test]
async fn an_upload_without_memory_hands_the_data_back() -> Result<()> {
    let turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let device = Device::builder().memory_limit_bytes(1 << 20).named(&name)?;
    let stream = device.stream()?;
    let kept = stream.zeros::<u8>(1 << 20).await?;
    let (frame, at) = self::frame(&device)?;
    let refused = stream.upload(frame).accepted().expect_err("no memory");
    assert_eq!(refused.error.kind(), ErrorKind::OutOfMemory);
    assert!(is_back(refused, at));
    // Whatever it came in.
    let refused = stream.upload(vec![7_u32; 100]).accepted().expect_err("no memory");
    let data = refused.value.expect("back");
    drop(kept);
    let x = soon(stream.upload(data)).await?;
    assert_eq!(soon(stream.download(&x)).await?, [7; 100]);
    drop(turn);
    Ok(())
}

/// The same where it is the driver that has none.
#[tokio::test]
async fn an_upload_refused_by_the_driver_hands_back_what_it_did_not_use() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let gate = Gate::close(&stream)?;
    for nth in [1, 2] {
        handle.fail_nth(DriverCall::Alloc, nth, ErrorKind::OutOfMemory);
    }
    let (frame, at) = self::frame(&device)?;
    let refused = stream.upload(frame).accepted().expect_err("no memory");
    assert_eq!(refused.error.kind(), ErrorKind::OutOfMemory);
    assert!(is_back(refused, at));
    // Refused in the middle: the device may have begun.
    handle.fail_nth_after_effect(DriverCall::CopyToDevice, 1, ErrorKind::Unsupported);
    let mut x = stream.zeros::<u32>(100).queued()?;
    let (frame, at) = self::frame(&device)?;
    let refused = stream.upload_into(frame, &mut x).accepted().expect_err("refused");
    assert!(refused.value.is_none());
    let fresh = device.pinned::<u32>(100)?;
    assert_ne!(fresh.as_ptr().addr(), at, "with the device");
    gate.open();
    soon(stream.done()).await
}

#[tokio::test]
async fn memory_of_another_device_comes_back() -> Result<()> {
    let (here, there) = (testing::device(), testing::device());
    let stream = there.stream()?;
    let (mut x, y) = (stream.zeros::<u32>(100).await?, stream.zeros::<u32>(100).await?);
    let rows = Copy2d::new(10, 10);
    let (frame, at) = self::frame(&here)?;
    let frame = stream.upload(frame).accepted().expect_err("foreign").value.expect("back");
    let refused = stream.upload_into(frame, &mut x).accepted().expect_err("foreign");
    let frame = refused.value.expect("back");
    let refused = stream.download_into(&y, frame).accepted().expect_err("foreign");
    let frame = refused.value.expect("back");
    let refused = stream.download_2d(&y, frame, rows).accepted().expect_err("foreign");
    let frame = refused.value.expect("back");
    assert!(is_back(stream.upload_2d(frame, &mut x, rows).accepted().expect_err("foreign"), at));
    Ok(())
}

/// A closed device refuses, and keeps nothing either; `?` makes it a plain error.
#[tokio::test]
async fn a_closed_device_gives_the_memory_back() -> Result<()> {
    async fn plain(stream: &Stream, frame: PinnedBuffer<u32>) -> Result<()> {
        stream.upload(frame).accepted()?.await.map(drop)
    }
    let device = testing::device();
    let stream = device.stream()?;
    let ((frame, at), (other, _)) = (self::frame(&device)?, self::frame(&device)?);
    device.close(SOON).await?;
    assert!(is_back(stream.upload(frame).accepted().expect_err("closed"), at));
    assert_eq!(plain(&stream, other).await.expect_err("closed").kind(), ErrorKind::Closed);
    Ok(())
}

/// Every call that takes pinned memory can be queued: the memory goes home when it is complete.
#[tokio::test]
async fn without_its_value_an_upload_is_queued() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut x = stream.zeros::<u32>(400).await?;
    let (frame, at) = self::frame(&device)?;
    let gate = Gate::close(&stream)?;
    stream.upload_into(frame, &mut x.slice_mut(..100)?).without_value().queued()?;
    let (frame, _) = self::frame(&device)?;
    let rows = Copy2d::new(10, 10).destination_start(100).destination_pitch(20);
    stream.upload_2d(frame, &mut x, rows).without_value().queued()?;
    let last = stream.host_fn(|| 5).without_value();
    // Not home yet: the device has it.
    assert_ne!(device.pinned::<u32>(100)?.as_ptr().addr(), at);
    assert!(!last.is_complete());
    gate.open();
    soon(last).await?;
    let seen = soon(stream.download(&x)).await?;
    assert!(seen[..100].iter().all(|x| *x == 7));
    assert_eq!(seen[105..125], [[7; 5], [0; 5], [0; 5], [7; 5]].concat());
    soon(async {
        while device.stats().lent_bytes > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let error = stream.upload_into(device.pinned(3)?, &mut x).without_value().queued();
    assert_eq!(error.expect_err("lengths").kind(), ErrorKind::InvalidCall);
    Ok(())
}

/// Whoever submits beside a loss may lend something when all streams were looked at for that.
#[test]
fn what_is_lent_beside_a_loss_does_not_stay() {
    const THREADS: usize = 3;
    for round in 0..100 {
        let mode = modes::ALL[round % modes::ALL.len()];
        let (faults, handle) = testing::faults();
        let device = testing::host_with_completion(faults, mode);
        let streams: Vec<_> = (0..THREADS).map(|_| device.stream().unwrap()).collect();
        let submitted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for stream in &streams {
                scope.spawn(|| {
                    while let Ok(x) = stream.upload(vec![1_u8; 10_000]).queued() {
                        stream.download(&x).abandon();
                        submitted.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            while submitted.load(Ordering::SeqCst) < 3 + round {
                std::thread::yield_now();
            }
            handle.lose_device("on purpose");
        });
        let end = Instant::now() + SOON;
        while device.stats().lent_bytes != 0 {
            assert!(Instant::now() < end, "{mode:?}, round {round}: {:?}", device.stats());
            std::thread::yield_now();
        }
    }
}
