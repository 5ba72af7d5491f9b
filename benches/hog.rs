//! What the benches of neighbours share: a tenant that fills the multiprocessors of its streams.
#![allow(dead_code, reason = "each bench uses a part of it")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::{Device, LaunchConfig, Result, Stream, kernel};
use tokio::runtime::Runtime;

use super::measure::{rounds, window};

kernel! {
    /// Keeps each block busy for so long.
    pub(crate) unsafe fn spin(duration_ns: u64);
    ptx = include_str!("../kernels/spin.ptx");
    host = |_: &gpu_await::Grid, ns: u64| thread::sleep(Duration::from_nanos(ns));
}

pub(crate) const HOG_NS: u64 = 2_000_000;
/// Blocks of 1024 threads of a launch, for each multiprocessor: four times what it holds.
pub(crate) const HOG_BLOCKS: u32 = 8;

/// Keeps multiprocessors busy until it is dropped, from each of some streams.
pub(crate) struct Hog {
    launched: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<Result<()>>>,
}

impl Hog {
    /// Fills the multiprocessors of each stream, a few launches ahead.
    pub(crate) fn start(runtime: &Runtime, spin: &spin, streams: Vec<Stream>) -> Hog {
        Self::run(runtime, streams, async |stream| {
            let (spin, config) =
                (spin.clone(), LaunchConfig::new(HOG_BLOCKS * stream.multiprocessors(), 1024));
            Ok(move |stream: &Stream| spin.launch(stream, config, HOG_NS).queued())
        })
    }

    /// Copies memory of the device on each of the streams.
    pub(crate) fn copying(runtime: &Runtime, streams: Vec<Stream>) -> Hog {
        // In words of 32 bits: half a gibibyte.
        let len = rounds(1 << 27, 1 << 10);
        Self::run(runtime, streams, async |stream| {
            let (from, mut to) = (stream.zeros::<u32>(len).await?, stream.zeros(len).await?);
            Ok(move |stream: &Stream| stream.copy(&from, &mut to).queued())
        })
    }

    /// `prepare` returns what puts one operation on its stream.
    fn run<P>(
        runtime: &Runtime,
        streams: Vec<Stream>,
        prepare: impl AsyncFn(&Stream) -> Result<P>,
    ) -> Hog
    where
        P: FnMut(&Stream) -> Result<()> + Send + 'static,
    {
        let launched = Arc::new(AtomicU64::new(0));
        let task = |stream: Stream| {
            let launched = launched.clone();
            let mut put = runtime.block_on(prepare(&stream)).expect("memory");
            runtime.spawn(async move {
                loop {
                    put(&stream)?;
                    // ORDERING: Relaxed: a statistic.
                    launched.fetch_add(1, Ordering::Relaxed);
                    stream.throttle(3).await?;
                }
            })
        };
        let tasks = streams.into_iter().map(task).collect();
        thread::sleep(window(Duration::from_millis(100)));
        Hog { launched, tasks }
    }

    /// Launches of one multiprocessor a second, over a phase.
    pub(crate) fn rate(&self, phase: Duration) -> f64 {
        let (before, start) = (self.launched.load(Ordering::Relaxed), Instant::now());
        thread::sleep(window(phase));
        let launched = self.launched.load(Ordering::Relaxed) - before;
        launched as f64 / start.elapsed().as_secs_f64()
    }

    pub(crate) fn stop(self, runtime: &Runtime, device: &Device) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
        runtime.block_on(device.done()).expect("it ends");
    }
}
