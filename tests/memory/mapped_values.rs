//! `Op::map_value`: when its function is called, and when it is not.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures::executor::block_on;
use futures::{FutureExt, TryFutureExt};
use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceBuffer, Op, Result, join_all};

#[test]
fn a_mapped_value_is_made_when_it_is_complete() -> Result<()> {
    let stream = testing::device().stream()?;
    let x = stream.upload(vec![1u32, 2, 3]).queued()?;
    let gate = Gate::close(&stream)?;
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let mut sum = stream.download(&x).map_value(move |x| {
        counted.fetch_add(1, Ordering::SeqCst);
        x.iter().sum::<u32>()
    });
    let ticket = sum.ticket();
    assert!((&mut sum).now_or_never().is_none() && sum.try_take().is_none());
    assert!(!sum.is_complete() && calls.load(Ordering::SeqCst) == 0);
    gate.open();
    let sum = sum.map_value(|sum| sum + 1);
    assert_eq!(sum.ticket(), ticket);
    assert_eq!(block_on(sum)?, 7);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    Ok(())
}

/// As many as hold the `Arc` say whether the function is gone.
fn never_called<T: Send + 'static>(op: Op<T>, alive: &Arc<()>) -> Op<()> {
    let held = alive.clone();
    op.map_value(move |_| unreachable!("called with {held:?}"))
}

#[test]
fn a_function_without_a_value_is_dropped() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let unwritten = stream.empty::<u8>(4).queued()?;
    let alive = Arc::new(());
    let refused = never_called(stream.download(&unwritten), &alive);
    assert!(refused.is_complete() && block_on(refused).is_err());
    assert_eq!(Arc::strong_count(&alive), 1);

    let gate = Gate::close(&stream)?;
    let pending = never_called(stream.done(), &alive);
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(pending);
    never_called(stream.done(), &alive).abandon();
    never_called(stream.done(), &alive).queued()?;
    drop(never_called(stream.done(), &alive).without_value());
    assert_eq!(Arc::strong_count(&alive), 1);
    gate.open();
    stream.synchronize()
}

#[test]
fn a_panic_of_the_function_is_the_polls() -> Result<()> {
    let stream = testing::device().stream()?;
    let mut op = stream.done().map_value(|()| -> u32 { panic!("of the function") });
    let caught = catch_unwind(AssertUnwindSafe(|| block_on(&mut op))).unwrap_err();
    assert_eq!(caught.downcast_ref::<&str>(), Some(&"of the function"));
    assert!(op.is_complete() && op.try_take().is_none());
    assert!(catch_unwind(AssertUnwindSafe(|| (&mut op).now_or_never())).is_err());
    drop(op);
    // The others of a join are complete all the same.
    let joined =
        join_all([stream.done().map_value(|()| 1), stream.done().map_value(|()| panic!())]);
    assert!(catch_unwind(AssertUnwindSafe(|| joined.synchronize())).is_err());
    stream.done().synchronize()
}

#[test]
fn a_mapped_operation_joins_and_waits_in_place() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let x = a.upload(vec![1u8, 2]).queued()?;
    let last = a.download(&x).map_value(|x| x[1]);
    let len = b.upload(vec![0u8; 9]).map_value(|y: DeviceBuffer<u8>| y.len());
    assert_eq!(last.and(len).synchronize()?, (2, 9));
    // What it is not called is still the traits'.
    let plain = a.done().map(|done| done.is_ok()).boxed();
    let ok = a.done().map_ok(|()| 3).boxed();
    assert!(block_on(plain) && block_on(ok)? == 3);
    Ok(())
}
