//! What does a service lose that reserves the memory of each job, where jobs do not fit beside one another?
//!
//! Four lanes prove one circuit after another: a job takes three buffers of a size of its own, runs kernels over them that take some milliseconds, and frees them. The
//! limit holds less than the four largest jobs.
//!
//! | line | a job |
//! |---|---|
//! | `reserved` | awaits `Device::reserve` of what it takes |
//! | `permits` | awaits permits of a semaphore that has one for each MiB: the program knows all that is on the device |
//! | `neither` | takes its buffers, and begins anew after an error: what happens without either |
//!
//! `out_of_memory` counts allocations that failed. Prints `name value unit`; the ratio is of the medians of rounds in turn.

#[path = "hog.rs"]
mod hog;
#[path = "measure.rs"]
mod measure;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gpu_await::{Device, ErrorKind, LaunchConfig, Result, Stream};
use hog::spin;
use measure::{Sorted, print, rounds};
use tokio::sync::Semaphore;

const MIB: u64 = 1 << 20;
const LANES: usize = 4;
const JOBS: u64 = 12;

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Reserved,
    Permits,
    Neither,
}

struct Service {
    device: Device,
    spin: spin,
    permits: Semaphore,
    failed: AtomicU64,
    is_small: bool,
}

impl Service {
    /// The MiB of each of a job's buffers.
    fn sizes(&self, lane: usize, job: u64) -> [u64; 3] {
        let size = |of: u64| 32 + (lane as u64 * 37 + job * 53 + of * 29) % 97;
        [0, 1, 2].map(|of| if self.is_small { size(of) / 32 } else { size(of) })
    }

    async fn job(&self, stream: &Stream, sizes: [u64; 3]) -> Result<()> {
        let mut buffers = Vec::new();
        for size in sizes {
            buffers.push(stream.zeros::<u8>((size * MIB) as usize).queued()?);
            let ns = if self.is_small { 10_000 } else { 20_000 * size };
            self.spin.launch(stream, LaunchConfig::new(8, 128), ns).queued()?;
            if let Some(last) = buffers.last_mut() {
                stream.fill(last, 1).queued()?;
            }
        }
        drop(buffers);
        stream.done().await
    }

    /// The job, anew until its allocations succeed.
    async fn insist(&self, stream: &Stream, sizes: [u64; 3]) -> Result<()> {
        loop {
            match self.job(stream, sizes).await {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    // ORDERING: Relaxed: a count.
                    self.failed.fetch_add(1, Ordering::Relaxed);
                    stream.done().await?;
                }
                ended => return ended,
            }
        }
    }

    async fn lane(&self, lane: usize, way: Way) -> Result<()> {
        let stream = self.device.stream()?;
        for job in 0..JOBS {
            let sizes = self.sizes(lane, job);
            let all: u64 = sizes.iter().sum();
            match way {
                Way::Reserved => {
                    let reservation = self.device.reserve(all * MIB).await?;
                    self.insist(&reservation.stream(&stream)?, sizes).await?;
                }
                Way::Permits => {
                    let permits = self.permits.acquire_many(all as u32).await;
                    self.insist(&stream, sizes).await?;
                    drop(permits);
                }
                Way::Neither => self.insist(&stream, sizes).await?,
            }
        }
        Ok(())
    }

    /// Jobs a second.
    async fn run(self: &Arc<Self>, way: Way) -> Result<f64> {
        let start = Instant::now();
        let lane = |lane| {
            let service = self.clone();
            tokio::spawn(async move { service.lane(lane, way).await })
        };
        let lanes: Vec<_> = (0..LANES).map(lane).collect();
        for lane in lanes {
            lane.await.expect("no panic")?;
        }
        Ok((LANES as u64 * JOBS) as f64 / start.elapsed().as_secs_f64())
    }
}

fn main() -> Result<()> {
    let runtime = measure::workers(measure::cores());
    let is_small = measure::is_smoke();
    let limit = if is_small { 20 } else { 640 };
    let name = std::env::var(gpu_await::testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let device = Device::builder().memory_limit_bytes(limit * MIB).named(&name)?;
    runtime.block_on(async {
        let service = Arc::new(Service {
            spin: spin::load(&device).await?,
            permits: Semaphore::new(limit as usize),
            failed: AtomicU64::new(0),
            is_small,
            device,
        });
        let mut rates = [const { Vec::new() }; 3];
        let mut failed = [0; 3];
        for _ in 0..rounds(25, 1) {
            for (way, (rates, failed)) in [Way::Reserved, Way::Permits, Way::Neither]
                .into_iter()
                .zip(rates.iter_mut().zip(&mut failed))
            {
                rates.push(service.run(way).await?);
                // ORDERING: Relaxed: the lanes have ended.
                *failed += service.failed.swap(0, Ordering::Relaxed);
            }
        }
        let [reserved, permits, neither] = rates.map(|rates| Sorted::new(rates).p50());
        for (name, rate, failed) in [
            ("reserved", reserved, failed[0]),
            ("permits", permits, failed[1]),
            ("neither", neither, failed[2]),
        ] {
            print(&format!("prover.{name}.jobs_per_s"), rate, "count");
            print(&format!("prover.{name}.out_of_memory"), failed as f64, "count");
        }
        print("prover.reserved_over_permits", reserved / permits, "ratio");
        Ok(())
    })
}
