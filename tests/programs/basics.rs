//! The main job, on whatever device the tests run on.

use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{DeviceBuffer, ErrorDetail, ErrorKind, kernels};

use crate::under_test::completions;

#[tokio::test]
async fn upload_axpy_download_gives_the_right_numbers() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let axpy = kernels::axpy::load(&device).await?;
        for n in [1, 255, 256, 257, 100_000] {
            let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let x = stream.upload(x).queued()?;
            let mut y = stream.full(n, 2.0f32).queued()?;
            axpy.launch(&stream, 3.0, &x, &mut y).queued()?;
            let y = stream.download(&y).await?;
            assert!(y.iter().enumerate().all(|(i, y)| *y == 3.0f32.mul_add(i as f32, 2.0)));
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn an_op_in_front_of_a_gate_resolves() {
    completions::each(|device| async move {
        let stream = device.stream()?;
        let x = stream.upload(vec![1u32, 2, 3]).queued()?;
        let before = stream.download(&x);
        let queued_before = stream.done();
        let gate = Gate::close(&stream)?;
        let after = stream.download(&x);
        assert_eq!(before.await?, [1, 2, 3]);
        queued_before.await?;
        let mut after = after;
        assert!((&mut after).now_or_never().is_none(), "the gate is closed");
        gate.open();
        assert_eq!(after.await?, [1, 2, 3]);
        assert!(!gate.timed_out());
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_consumer_of_data_from_before_a_gate_does_not_wait_for_the_gate() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        let x = a.full(1000, 7u32).queued()?;
        let gate = Gate::close(&a)?;
        let y = b.download(&x);
        let y = tokio::time::timeout(Duration::from_secs(5), y).await.expect("not held up")?;
        assert_eq!(y.len(), 1000);
        assert!(y.iter().all(|y| *y == 7));
        gate.open();
        a.done().await?;
        assert!(!gate.timed_out());
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn dropping_a_buffer_that_a_gated_stream_uses_stalls_nobody() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        let x = b.full(1 << 20, 7u8).queued()?;
        let gate = Gate::close(&a)?;
        let y = a.download(&x);
        drop(x);
        let z = tokio::time::timeout(Duration::from_secs(5), b.zeros::<u8>(1 << 20)).await;
        let z = z.expect("the other stream goes on")?;
        tokio::time::timeout(Duration::from_secs(5), b.done()).await.expect("b is not held up")?;
        gate.open();
        assert!(y.await?.iter().all(|y| *y == 7));
        drop(z);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn an_allocation_does_not_wait_for_memory_freed_behind_a_gate() {
    completions::each(|device| async move {
        let (a, b) = (device.stream()?, device.stream()?);
        for _ in 0..3 {
            let x = a.full(3 << 20, 7u8).queued()?;
            a.done().await?;
            let gate = Gate::close(&a)?;
            // Freed in place, which is behind the gate.
            drop(x);
            let y = b.full(3 << 20, 8u8).queued()?;
            let y = tokio::time::timeout(Duration::from_secs(5), b.download(&y)).await;
            assert!(y.expect("no stream waits for a drop")?.iter().all(|y| *y == 8));
            gate.open();
            a.done().await?;
            assert!(!gate.timed_out());
        }
        Ok(())
    })
    .await;
}

/// A long-lived buffer that every request updates: one invalid call, and an hour of requests behind it.
/// An error for each of them around the one before would overflow the stack that prints or drops it.
#[tokio::test]
async fn an_error_handed_on_stays_as_short_as_it_was() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let wrong = stream.zeros::<f32>(3).queued().unwrap();
    let right = stream.zeros::<f32>(4).queued().unwrap();
    let mut y = stream.zeros::<f32>(4).queued().unwrap();
    axpy.launch(&stream, 1.0, &wrong, &mut y).queued().unwrap_err();
    let mut len = None;
    for _ in 0..100_000 {
        let error = axpy.launch(&stream, 1.0, &right, &mut y).queued().unwrap_err();
        let sources = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source());
        assert_eq!(sources.take(10).count(), 2, "the reader's, and what failed first");
        assert_eq!(error.to_string().len(), *len.get_or_insert(error.to_string().len()));
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
    }
    let error = stream.download(&y).await.unwrap_err();
    assert!(error.to_string().contains("x.len() == y.len()"), "{error}");
}

#[tokio::test]
async fn a_failed_producer_is_named_to_its_reader_until_an_overwrite_heals() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let x = stream.zeros::<f32>(3).queued().unwrap();
    let mut y = stream.zeros::<f32>(4).queued().unwrap();
    let error = axpy.launch(&stream, 1.0, &x, &mut y).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    let text = error.to_string();
    assert!(text.contains("x.len() == y.len()") && text.contains("y.len() = 4"), "{text}");
    let error = stream.download(&y).await.unwrap_err();
    match error.detail() {
        ErrorDetail::Upstream { producer, .. } => assert_eq!(&**producer, "axpy"),
        other => panic!("{other}"),
    }
    assert_eq!(stream.download(&x).await.unwrap(), [0.0; 3], "nobody else fails");
    stream.fill(&mut y, 5.0).queued().unwrap();
    assert_eq!(stream.download(&y).await.unwrap(), [5.0; 4]);
}

#[tokio::test]
async fn cleared_poison_uncovers_what_was_written() {
    let device = testing::device();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let short = stream.full(2, 1.0f32).queued().unwrap();
    let x = stream.full(4, 1.0f32).queued().unwrap();
    let mut y = stream.full(4, 3.0f32).queued().unwrap();
    axpy.launch(&stream, 1.0, &short, &mut y).queued().unwrap_err();
    stream.download(&y).await.unwrap_err();
    y.clear_poison().unwrap();
    axpy.launch(&other, 2.0, &x, &mut y).queued().unwrap();
    assert_eq!(stream.download(&y).await.unwrap(), [5.0; 4]);

    // What should have been overwritten holds nobody knows what; the rest is there again.
    axpy.launch(&stream, 1.0, &short, &mut y).queued().unwrap_err();
    let mut half = y.slice_mut(..2).unwrap();
    stream.copy(&x, &mut half).queued().unwrap_err();
    let error = y.clear_poison().unwrap_err();
    match error.detail() {
        ErrorDetail::Upstream { op, producer, .. } => {
            assert_eq!((&**op, &**producer), ("clear_poison", "copy"));
        }
        other => panic!("{other}"),
    }
    assert_eq!(stream.download(&y.slice(2..).unwrap()).await.unwrap(), [5.0; 2]);
    stream.download(&y).await.unwrap_err();
    stream.fill(&mut y, 7.0).queued().unwrap();
    y.clear_poison().unwrap();
    assert_eq!(stream.download(&y).await.unwrap(), [7.0; 4]);

    // What nobody wrote is not there afterwards either.
    let mut y = stream.empty::<f32>(4).queued().unwrap();
    y.clear_poison().unwrap_err();
    axpy.launch(&stream, 1.0, &x, &mut y).queued().unwrap_err();
    y.clear_poison().unwrap_err();
    stream.download(&y).await.unwrap_err();
}

/// An overwrite that the driver refuses counts as entered, and is not on the device.
#[tokio::test]
async fn cleared_poison_of_a_refused_overwrite() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let mut x = stream.empty::<u32>(4).queued().unwrap();
    handle.fail_nth(testing::DriverCall::Fill, 1, ErrorKind::Unsupported);
    stream.fill(&mut x, 1).queued().unwrap_err();
    x.clear_poison().unwrap_err();
    stream.download(&x).await.unwrap_err();
}

/// A launch needs memory of its own on a GPU, and so may any other call.
#[tokio::test]
async fn memory_that_runs_out_is_told_as_that() {
    use testing::DriverCall::{CopyToHost, Fill, Launch, StreamCreate};
    for call in [Launch, Fill, CopyToHost, StreamCreate] {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream().unwrap();
        let scale = kernels::scale::load(&device).await.unwrap();
        let mut x = stream.full(10, 1.0f32).queued().unwrap();
        let work = async |x: &mut DeviceBuffer<f32>| {
            let stream = device.stream()?;
            stream.fill(x, 2.0).queued()?;
            scale.launch(&stream, 2.0, x).queued()?;
            stream.download(&*x).await
        };
        for (kind, code) in [(ErrorKind::OutOfMemory, 2), (ErrorKind::Unsupported, 801)] {
            handle.fail_nth(call, 1, kind);
            let error = work(&mut x).await.expect_err("it is refused");
            assert_eq!(error.kind(), kind, "{call:?}: {error}");
            assert!(error.to_string().contains(&format!("returned {code} ")), "{error}");
        }
        assert_eq!(work(&mut x).await.unwrap(), [4.0; 10]);
    }
}

#[tokio::test]
async fn each_part_keeps_the_cause_of_its_own_failure() {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream().unwrap();
    let axpy = kernels::axpy::load(&device).await.unwrap();
    let scale = kernels::scale::load(&device).await.unwrap();
    let nothing = stream.empty::<f32>(5).queued().unwrap();
    let mut x = stream.full(10, 1.0f32).queued().unwrap();
    handle.fail_nth(testing::DriverCall::Launch, 1, ErrorKind::Driver);
    assert!(scale.launch(&stream, 2.0, &mut x).queued().is_err());
    // Another failure in the second half, which one more launch of the first kernel hands on.
    let mut half = x.slice_mut(5..).unwrap();
    assert!(axpy.launch(&stream, 2.0, &nothing, &mut half).queued().is_err());
    assert!(scale.launch(&stream, 2.0, &mut half).queued().is_err());
    for (range, expected) in [(0..5, ErrorKind::Driver), (5..10, ErrorKind::InvalidCall)] {
        let error = stream.download(&x.slice(range).unwrap()).await.unwrap_err();
        assert_eq!(error.kind(), expected, "{error}");
    }
}
