//! Taking a partition again that was given up just now.

use std::time::{Duration, Instant};

use gpu_await::{Device, ErrorKind, Partition};

/// For how long the library waits for what ends.
const WAITS: Duration = Duration::from_millis(100);

/// It is refused only where the library has waited for as long as it does, and the machine was too busy.
pub(crate) async fn taken_again(device: &Device, multiprocessors: u32) -> Partition {
    loop {
        let asked = Instant::now();
        match device.reserve_partition(multiprocessors).await {
            Ok(partition) => return partition,
            Err(refused) => {
                assert_eq!(refused.kind(), ErrorKind::Overloaded, "{refused}");
                assert!(asked.elapsed() >= WAITS, "{refused}, after {:?}", asked.elapsed());
            }
        }
    }
}
