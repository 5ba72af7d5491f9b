//! Shares of a device's multiprocessors: who has which, and what is told.

use gpu_await::testing;
use gpu_await::{ErrorDetail, ErrorKind, Result};

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
