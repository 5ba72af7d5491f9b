//! What is a pool still good for when more is asked of it than the device can do?
//!
//! Callers come 1 to 50 times as often as the device could serve them, whether it does or not, and give up after 250 ms. A
//! kernel takes about 10 ms (a host function on a stream of one pool of 8 permits, so that each device runs it alike). Compared are a pool that knows nothing of that
//! (`fifo`: a time-out around `acquire`) and one that was told (`deadlines`: `acquire_by`), in the same process, one after the other.
//!
//! | line | is |
//! |---|---|
//! | `overload.capacity_per_s` | answers a second of 8 callers that ask again and again |
//! | `overload.Nx.fifo.goodput`, `overload.Nx.deadlines.goodput` | answers in time, over that |
//! | `overload.Nx.deadlines.refused_p99_ms` | how long those waited that were refused or told that it is too late |
//! | `overload.Nx.deadlines.answered_p50_ms` | how long those took that were answered in time |

#[path = "measure.rs"]
mod measure;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_await::{PooledStream, Result, StreamPool};
use measure::{Sorted, ms, print};
use parking_lot::Mutex;
use tokio::time::{sleep_until, timeout_at};

const PERMITS: usize = 8;
const KERNEL: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_millis(250);
const OVER: [u32; 5] = [1, 2, 5, 25, 50];

#[derive(Clone, Copy, PartialEq)]
enum Admission {
    Fifo,
    Deadlines,
}

#[derive(Default)]
struct Answers {
    in_time: AtomicU64,
    took: Mutex<Vec<f64>>,
    refused_after: Mutex<Vec<f64>>,
}

fn main() {
    let device = measure::device();
    let window = if measure::is_smoke() && !measure::argument("full") {
        Duration::from_millis(400)
    } else {
        Duration::from_secs(5)
    };
    let runtime = measure::workers(2);
    let pool = || {
        let builder = StreamPool::builder().streams(&device, 1).max_in_flight(PERMITS);
        builder.max_waiting(100_000).build().expect("a pool")
    };
    let capacity = runtime.block_on(capacity(&pool(), window));
    print("overload.capacity_per_s", capacity, "count");
    for over in OVER {
        for admission in [Admission::Fifo, Admission::Deadlines] {
            let answers = runtime.block_on(serve(pool(), admission, capacity, over, window));
            let name = match admission {
                Admission::Fifo => "fifo",
                Admission::Deadlines => "deadlines",
            };
            let in_time = answers.in_time.load(Ordering::SeqCst) as f64 / window.as_secs_f64();
            print(&format!("overload.{over}x.{name}.goodput"), in_time / capacity, "ratio");
            if admission == Admission::Fifo {
                continue;
            }
            let mut refused = std::mem::take(&mut *answers.refused_after.lock());
            refused.push(0.0);
            let refused = Sorted::new(refused).p99();
            print(&format!("overload.{over}x.{name}.refused_p99_ms"), refused, "ms");
            let mut took = std::mem::take(&mut *answers.took.lock());
            took.push(0.0);
            print(
                &format!("overload.{over}x.{name}.answered_p50_ms"),
                Sorted::new(took).p50(),
                "ms",
            );
        }
    }
}

async fn run(stream: PooledStream) -> Result<()> {
    stream.host_fn(|| std::thread::sleep(KERNEL)).await
}

/// Answers a second of as many callers as there are permits.
async fn capacity(pool: &StreamPool, window: Duration) -> f64 {
    let start = Instant::now();
    let caller = || async {
        let mut answers = 0u32;
        while answers == 0 || start.elapsed() < window {
            run(pool.acquire().await.expect("a permit")).await.expect("it runs");
            answers += 1;
        }
        answers
    };
    let answers: u32 = futures::future::join_all((0..PERMITS).map(|_| caller())).await.iter().sum();
    f64::from(answers) / start.elapsed().as_secs_f64()
}

/// Callers that come at `over` times the capacity: those of half a window before it is counted, so that the queue stands.
async fn serve(
    pool: StreamPool,
    admission: Admission,
    capacity: f64,
    over: u32,
    window: Duration,
) -> Arc<Answers> {
    let answers = Arc::new(Answers::default());
    let every = Duration::from_secs_f64(1.0 / capacity / f64::from(over));
    let counts_from = Instant::now() + window / 2;
    let (mut next, end) = (Instant::now(), counts_from + window);
    while next < end {
        sleep_until(next.into()).await;
        let came = next;
        next += every;
        let (pool, answers) = (pool.clone(), answers.clone());
        tokio::spawn(async move {
            let deadline = came + PATIENCE;
            let asked = async {
                let stream = match admission {
                    Admission::Fifo => pool.acquire().await?,
                    Admission::Deadlines => pool.acquire_by(deadline).await?,
                };
                run(stream).await
            };
            let answered = timeout_at(deadline.into(), asked).await;
            let now = Instant::now();
            if now < counts_from || now >= end {
                return;
            }
            match answered {
                Ok(Ok(())) => {
                    answers.in_time.fetch_add(1, Ordering::SeqCst);
                    answers.took.lock().push(ms(now - came));
                }
                Ok(Err(_)) => answers.refused_after.lock().push(ms(now - came)),
                // The caller gave up; its kernel runs all the same.
                Err(_) => {}
            }
        });
    }
    timeout_at((end + PATIENCE).into(), pool.drained()).await.ok();
    answers
}
