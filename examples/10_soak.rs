//! Random work for a given time: does anything grow, hang or come out wrong?
//!
//! Eight tasks put random operations on shared streams; futures are awaited, dropped, given a time-out
//! or left in the middle by `select!`. Every value is compared with the host's. The time is cut into
//! rounds, each with a tokio runtime of its own; after each round everything must be given back, and
//! after the last one threads, handles and memory must be what they were after the first third.
//!
//! ```text
//! cargo run --release --example 10_soak -- 3600
//! ```
//!
//! Prints a line a round; ends with `flat`, or with what grew and the exit code 1.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu_await::{Device, Op, Result, Stream, kernels};

const TASKS: u64 = 8;
const STREAMS: usize = 4;
/// Rounds of so many seconds, but at least three.
const ROUND: f64 = 5.0;
/// What resident memory may grow by: the allocator keeps what its threads gave back.
const RSS_MORE: u64 = 16 << 20;
/// Threads that were told to end take a moment.
const PATIENCE: Duration = Duration::from_secs(5);

static OPERATIONS: AtomicU64 = AtomicU64::new(0);

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % end
    }
}

/// What must not grow.
#[derive(Clone, Copy)]
struct Held {
    threads: u64,
    handles: u64,
    rss: u64,
    /// Of the device's pool, and of the pinned one.
    pools: u64,
}

impl Held {
    fn now(device: &Device) -> Result<Held> {
        let count = |path| std::fs::read_dir(path).map_or(0, |entries| entries.count() as u64);
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let pages: u64 = statm.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        Ok(Held {
            threads: count("/proc/self/task"),
            handles: count("/proc/self/fd"),
            rss: pages * 4096,
            pools: device.memory()?.used_bytes + device.stats().pinned_used_bytes,
        })
    }

    fn grew(&self, since: &Held) -> Option<&'static str> {
        [
            ("threads", self.threads > since.threads),
            ("handles", self.handles > since.handles),
            ("resident memory", self.rss > since.rss + RSS_MORE),
            ("memory in the pools", self.pools > since.pools),
        ]
        .into_iter()
        .find_map(|(what, grew)| grew.then_some(what))
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Held { threads, handles, rss, pools } = self;
        let rss = rss / 1024;
        write!(f, "{threads} threads, {handles} handles, {rss} KiB resident, {pools} B in pools")
    }
}

struct Task {
    device: Device,
    streams: Vec<Stream>,
    axpy: kernels::axpy,
    spin: kernels::spin,
    random: Random,
}

impl Task {
    fn stream(&mut self) -> Stream {
        self.streams[self.random.below(STREAMS as u64) as usize].clone()
    }

    async fn run(mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            match self.random.below(8) {
                0..=2 => self.round_trip().await?,
                3 => self.host_fn().await?,
                4 => self.staged().await?,
                5 => self.late().await?,
                6 => self.race().await?,
                _ => self.own_stream().await?,
            }
            OPERATIONS.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Over three streams that nobody orders but the library.
    async fn round_trip(&mut self) -> Result<()> {
        let (a, b, c) = (self.stream(), self.stream(), self.stream());
        let (len, value) = (1 + self.random.below(20_000) as usize, self.random.below(1000) as f32);
        let x = a.upload(vec![value; len]).queued()?;
        let mut y = b.full(len, 1.0f32).queued()?;
        self.axpy.launch(&c, 2.0, &x, &mut y).queued()?;
        drop(x);
        match self.random.below(4) {
            0 => drop(b.download(&y)),
            1 => {
                let (y, n) = a.batch(|q| Ok((q.download_vec(&y)?, q.host_fn(|| 7)?))).await?;
                assert!(n == 7 && y.iter().all(|y| *y == 2.0 * value + 1.0), "a batch is wrong");
            }
            _ => {
                let y = a.download(&y).await?;
                assert!(y.iter().all(|y| *y == 2.0 * value + 1.0), "{} for {value}", y[0]);
            }
        }
        Ok(())
    }

    async fn host_fn(&mut self) -> Result<()> {
        let (stream, number) = (self.stream(), self.random.below(1000));
        let ops = [stream.host_fn(move || number), self.stream().host_fn(move || number + 1)];
        assert_eq!(gpu_await::join_all(ops).await?, [number, number + 1]);
        Ok(())
    }

    async fn staged(&mut self) -> Result<()> {
        let (stream, value) = (self.stream(), self.random.below(250) as u8);
        let x = stream.upload_staged(vec![value; 30_000]).await?;
        assert!(stream.download_staged(&x).await? == [value; 30_000], "a staged copy is wrong");
        Ok(())
    }

    /// A time-out; the work and what it uses go on.
    async fn late(&mut self) -> Result<()> {
        let (stream, limit) = (self.stream(), Duration::from_micros(self.random.below(200)));
        self.spin.launch(&stream, self.random.below(100_000)).queued()?;
        let x = stream.full(5000, 3u32).queued()?;
        match tokio::time::timeout(limit, stream.download(&x)).await {
            Ok(x) => assert!(x?.iter().all(|x| *x == 3), "a fill is wrong"),
            Err(_) => drop(x),
        }
        Ok(())
    }

    async fn race(&mut self) -> Result<()> {
        let (a, b) = (self.stream(), self.stream());
        let first: Op<u32> = a.host_fn(|| 1);
        let second: Op<u32> = b.host_fn(|| 2);
        tokio::select! {
            one = first => assert_eq!(one?, 1),
            two = second => assert_eq!(two?, 2),
        }
        Ok(())
    }

    /// A stream that is dropped with work on it, which others wait for.
    async fn own_stream(&mut self) -> Result<()> {
        let (own, other) = (self.device.stream()?, self.stream());
        let mut x = own.zeros::<u64>(1000).queued()?;
        own.fill(&mut x, 9).queued()?;
        other.wait(&own.record()?).queued()?;
        drop(own);
        assert!(other.download(&x).await?.iter().all(|x| *x == 9), "a fill is wrong");
        Ok(())
    }
}

/// One round, and until everything is given back.
fn round(device: &Device, streams: &[Stream], seconds: f64, seed: u64) -> Result<Held> {
    let workers =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = workers.expect("a tokio runtime");
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let task = Task {
                device: device.clone(),
                streams: streams.to_vec(),
                axpy: kernels::axpy::load(device).await?,
                spin: kernels::spin::load(device).await?,
                random: Random((seed * TASKS + task + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            };
            tasks.spawn(task.run(end));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no task panics")?;
        }
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            device.done().await?;
            let stats = device.stats();
            if (stats.allocations, stats.lent_bytes, stats.pending_bytes) == (0, 0, 0) {
                break;
            }
            assert!(Instant::now() < limit, "never given back: {stats:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        device.trim(0).await
    })?;
    drop(runtime);
    Held::now(device)
}

fn main() -> Result<()> {
    let argument = std::env::args().nth(1).unwrap_or_else(|| "5".to_owned());
    let Some(seconds) = argument.parse().ok().filter(|seconds: &f64| (0.0..1e9).contains(seconds))
    else {
        eprintln!("`{argument}` is no number of seconds: try `10_soak 60`");
        std::process::exit(2);
    };
    let rounds = ((seconds / ROUND) as u64).max(3);
    let device = Device::from_env()?;
    let streams: Vec<_> = (0..STREAMS).map(|_| device.stream()).collect::<Result<_>>()?;
    println!("device: {device}, {rounds} rounds");
    let mut warm = None;
    for number in 1..=rounds {
        let (before, start) = (OPERATIONS.load(Ordering::Relaxed), Instant::now());
        let held = round(&device, &streams, seconds / rounds as f64, number)?;
        let done = OPERATIONS.load(Ordering::Relaxed);
        let rate = (done - before) as f64 / start.elapsed().as_secs_f64();
        println!("round {number}: {done} operations, {rate:.0}/s, {held}");
        if number == rounds / 3 {
            warm = Some(held);
        }
    }
    let (warm, end) = (warm.expect("three rounds at least"), Instant::now() + PATIENCE);
    loop {
        let held = Held::now(&device)?;
        match held.grew(&warm) {
            None => break,
            Some(what) if Instant::now() > end => {
                eprintln!("{what} grew: from {warm} to {held}");
                std::process::exit(1);
            }
            Some(_) => std::thread::yield_now(),
        }
    }
    println!("flat");
    Ok(())
}
