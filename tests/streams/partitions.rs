//! Shares of a device's multiprocessors: who has which, and what is told.

use std::future::Future;
use std::task::Context;

use gpu_await::testing;
use gpu_await::{Device, ErrorDetail, ErrorKind, LaunchConfig, Occupancy, Result, kernels};

use crate::under_test::child;
use crate::under_test::given_up::taken_again;

#[tokio::test]
async fn shares_are_taken_and_come_back() -> Result<()> {
    let device = testing::device();
    let all = device.multiprocessors();
    let first = device.reserve_partition(1).await?;
    assert!((1..=all).contains(&first.multiprocessors()));
    assert_eq!(device.stats().partitions, 1);
    let rest = all - first.multiprocessors();
    let refused = device.reserve_partition(rest + 1).await.unwrap_err();
    let ErrorDetail::NoPartition { asked, free, all: of, .. } = *refused.detail() else {
        panic!("{refused}")
    };
    assert_eq!((asked, free, of, refused.kind()), (rest + 1, rest, all, ErrorKind::Overloaded));
    assert_eq!(device.reserve_partition(all + 1).await.unwrap_err().kind(), ErrorKind::Unsupported);
    // A stream keeps its share.
    let stream = first.stream()?;
    assert_eq!(stream.in_partition().as_ref(), Some(&first));
    assert_eq!(stream.multiprocessors(), first.multiprocessors());
    assert!(device.stats().streams_outside_partitions > 0, "the device's own");
    drop(first);
    assert_eq!(device.stats().partitions, 1);
    stream.zeros::<f32>(100).await?;
    drop(stream);
    device.close(crate::SOON).await?;
    assert_eq!(device.stats().partitions, 0);
    Ok(())
}

/// What was given up just now can be had again: streams whose work is complete, reservations that were dropped.
#[tokio::test]
async fn what_was_given_up_is_free() -> Result<()> {
    let device = testing::device();
    let all = device.multiprocessors();
    for _ in 0..50 {
        let stream = taken_again(&device, all).await.stream()?;
        stream.host_fn(|| ()).await?;
        drop(stream);
        drop(futures::poll!(Box::pin(device.reserve_partition(all))));
    }
    let held = taken_again(&device, all).await;
    assert_eq!(device.stats().unreserved_multiprocessors, 0);
    assert_eq!(device.reserve_partition(0).await.unwrap_err().kind(), ErrorKind::Overloaded);
    drop(held);
    assert_eq!(device.stats().unreserved_multiprocessors, all);
    Ok(())
}

/// However many ask at once, there is one thread for them.
#[test]
fn reservations_have_one_thread() {
    const NAME: &str = concat!(module_path!(), "::reservations_have_one_thread");
    if child::parameter().is_none() {
        child::run(NAME, "child");
        return;
    }
    let device = testing::device();
    let threads = || std::fs::read_dir("/proc/self/task").expect("a Linux system").count();
    let before = threads();
    let mut reservations: Vec<_> =
        (0..100).map(|_| Box::pin(device.reserve_partition(1))).collect();
    for reservation in &mut reservations {
        let waker = futures::task::noop_waker();
        drop(reservation.as_mut().poll(&mut Context::from_waker(&waker)));
    }
    // The device may have started some of its own meanwhile.
    assert!(threads() < before + 10, "{before} threads before, {} after", threads());
}

/// Blocks that all run at once are counted for the stream that they are to run on.
#[tokio::test]
async fn the_occupancy_of_a_stream() -> Result<()> {
    let (device, other) = (testing::device(), Device::host());
    let scale = kernels::scale::load(&device).await?;
    let inside = device.reserve_partition(1).await?.stream()?;
    let config = LaunchConfig::new(1, 64);
    let resident = |occupancy: Occupancy<'_>| occupancy.resident_blocks(&config);
    let all = resident(scale.occupancy())?;
    let here = resident(scale.occupancy().on(&inside))?;
    assert_eq!(here * device.multiprocessors(), all * inside.multiprocessors());
    let refused = resident(scale.occupancy().on(other.default_stream())).unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::WrongDevice { .. }), "{refused}");
    let whole = Device::builder().partition(1).host();
    let scale = kernels::scale::load(&whole).await?;
    assert_eq!(resident(scale.occupancy())?, whole.default_stream().multiprocessors());
    Ok(())
}

/// A scope on a stream of a partition has everything in it that names no stream.
#[tokio::test]
async fn a_scope_in_a_partition() -> Result<()> {
    let device = testing::device();
    let partition = device.reserve_partition(1).await?;
    let stream = partition.stream_builder().name("inside").build()?;
    let inside = stream.scope(async {
        let x = device.full(10, 3u32).queued()?;
        assert_eq!(device.download(&x).await?, [3; 10]);
        Ok::<_, gpu_await::Error>(device.current_stream().in_partition())
    });
    assert_eq!(inside.await?, Some(partition.clone()));
    assert_eq!(device.current_stream().in_partition(), None);
    assert_eq!(stream.name(), Some("inside"));
    Ok(())
}

/// Branches are where their stream is.
#[tokio::test]
async fn a_fork_stays_in_its_partition() -> Result<()> {
    let device = testing::device();
    let partition = device.reserve_partition(1).await?;
    let (inside, outside) = (partition.stream()?, device.stream()?);
    for branch in inside.fork(2)? {
        assert_eq!(branch.in_partition().as_ref(), Some(&partition));
        assert!(branch.fork(1)?[0].in_partition().is_some());
    }
    assert!(outside.fork(1)?[0].in_partition().is_none());
    Ok(())
}

/// Streams that name no partition are in the device's own.
#[tokio::test]
async fn a_device_in_a_partition() -> Result<()> {
    let device = Device::builder().partition(1).host();
    let own = device.default_stream().in_partition().expect("it is in one");
    assert_eq!(device.stream()?.in_partition().as_ref(), Some(&own));
    assert_eq!(device.thread_stream()?.in_partition().as_ref(), Some(&own));
    assert_eq!((device.stats().partitions, device.stats().streams_outside_partitions), (1, 0));
    let x = device.full(10, 3u32).queued()?;
    assert_eq!(device.download(&x).await?, [3; 10]);
    Ok(())
}

/// The timeline says which partition a stream is in.
#[tokio::test]
async fn the_timeline_names_partitions() -> Result<()> {
    let device = testing::device();
    device.timeline().start(10)?;
    let partition = device.reserve_partition(1).await?;
    let (inside, outside) = (partition.stream()?, device.stream()?);
    let mut x = inside.zeros::<u8>(10).await?;
    outside.fill(&mut x, 1).await?;
    let trace = device.timeline().snapshot()?;
    let partitions: Vec<_> = trace.operations().iter().map(|op| op.partition).collect();
    assert_eq!(partitions, [Some(partition.multiprocessors()), None]);
    let mut page = Vec::new();
    trace.write_perfetto(&mut page).expect("memory takes it");
    let label = format!("(partition of {})", partition.multiprocessors());
    assert!(String::from_utf8_lossy(&page).contains(&label));
    Ok(())
}
