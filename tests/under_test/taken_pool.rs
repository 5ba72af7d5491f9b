//! A runtime whose blocking pool has no thread left.

use std::time::Duration;

/// A runtime whose one thread for blocking work is taken until the sender is dropped.
pub(crate) fn with_taken_pool() -> (tokio::runtime::Runtime, std::sync::mpsc::Sender<()>) {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(2).max_blocking_threads(1).enable_all().build();
    let runtime = runtime.expect("tokio");
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (taken, is_taken) = std::sync::mpsc::channel();
    runtime.spawn_blocking(move || {
        taken.send(()).ok();
        released.recv_timeout(Duration::from_secs(60)).ok();
    });
    is_taken.recv_timeout(Duration::from_secs(10)).expect("a thread");
    (runtime, release)
}
