//! The service that the benches call: small kernels, payloads, and every way to die.

use std::time::{Duration, Instant};

use gpu_await::{DeviceBuffer, Frozen, Grid, LaunchConfig, Stream, kernel};
use gpu_await_worker::{
    Failure, Host, KeptMut, KeptState, Payloads, Restart, Service, Worker, WorkerBuilder, gpus,
};
use serde::{Deserialize, Serialize};

kernel! {
    /// `y = weights * x`.
    unsafe fn scale(x: f32, weights: &[f32], y: &mut [f32]) where weights.len() == y.len();
    launch = LaunchConfig::for_elements(y.len());
    ptx = include_str!("../examples/17_worker.ptx");
    host = twin::scale;
}

kernel! {
    /// Faults, or never ends.
    unsafe fn faulty(endless: u32, y: &mut [f32]);
    launch = LaunchConfig::new(1, 1);
    ptx = include_str!("../examples/17_worker.ptx");
    host = twin::faulty;
}

mod twin {
    use super::Grid;

    pub(super) fn scale(_: &Grid, x: f32, weights: &[f32], y: &mut [f32]) {
        y.iter_mut().zip(weights).for_each(|(y, weight)| *y = weight * x);
    }

    pub(super) fn faulty(_: &Grid, endless: u32, _: &mut [f32]) {
        if endless != 0 {
            std::thread::sleep(std::time::Duration::MAX);
        }
        panic!("an illegal address");
    }
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Up, a kernel, down.
    Small(Vec<f32>),
    /// The same; answers with how long that took, in microseconds.
    Timed(Vec<f32>),
    /// Nothing of the device.
    Echo(Vec<f32>),
    /// Copies the payload to the device, so often; answers with the time of the best one in seconds.
    Payload(u32),
    Fault,
    Endless,
    /// Launches what faults, and is answered before.
    Leave,
    /// Writes all of the memory that processes write, and answers with what is there; or loses the device half-way, or never ends there.
    Write(Option<Half>),
}

/// How a write does not come to its end.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) enum Half {
    Fault,
    Endless,
}

/// The variable that says how many bytes of memory processes write.
pub(crate) const WRITES: &str = "GPU_AWAIT_BENCH_WRITES_BYTES";

/// The variable that names a file which lets one process start.
pub(crate) const ONCE: &str = "GPU_AWAIT_BENCH_STARTS_ONCE";

/// The work of a small request.
pub(crate) struct Small {
    stream: Stream,
    scale: scale,
}

impl Small {
    pub(crate) async fn new(device: &gpu_await::Device) -> gpu_await::Result<Self> {
        Ok(Small { stream: device.stream()?, scale: scale::load(device).await? })
    }

    pub(crate) async fn run(&self, x: Vec<f32>) -> gpu_await::Result<Vec<f32>> {
        let x = self.stream.upload(x).queued()?;
        let mut y = self.stream.zeros::<f32>(x.len()).queued()?;
        self.scale.launch(&self.stream, 2.0, &x, &mut y).queued()?;
        Ok(self.stream.download(&y).await?.to_vec())
    }
}

pub(crate) struct Bench {
    small: Small,
    faulty: faulty,
    /// Mapped, as a model's would be.
    _weights: Option<Frozen<u32>>,
    cache: tokio::sync::Mutex<Option<KeptMut<u32>>>,
}

impl Service for Bench {
    /// How many bytes are kept.
    type Config = usize;
    type Request = Ask;
    type Response = Vec<f32>;

    async fn start(kept_bytes: usize, host: &Host) -> Result<Self, Failure> {
        // A device that is lost with its first process.
        if let Some(file) = std::env::var_os(ONCE) {
            std::fs::remove_file(file)?;
        }
        let weights = match kept_bytes / 4 {
            0 => None,
            len => Some(
                host.keep("weights", len, async |weights| {
                    let device = weights.device().clone();
                    device.fill(weights.memory(), 7).await?;
                    Ok(())
                })
                .await?,
            ),
        };
        let device = host.device();
        let written = std::env::var(WRITES).ok().and_then(|bytes| bytes.parse::<usize>().ok());
        let cache = written.map(|bytes| host.keep_mut("cache", bytes / 4)).transpose()?;
        Ok(Bench {
            small: Small::new(device).await?,
            faulty: faulty::load(device).await?,
            _weights: weights,
            cache: cache.into(),
        })
    }

    async fn call(&self, ask: Ask, payloads: &mut Payloads) -> Result<Vec<f32>, Failure> {
        let stream = &self.small.stream;
        match ask {
            Ask::Small(x) => Ok(self.small.run(x).await?),
            Ask::Timed(x) => {
                let begun = Instant::now();
                self.small.run(x).await?;
                Ok(vec![begun.elapsed().as_secs_f32() * 1e6])
            }
            Ask::Echo(x) => Ok(x),
            Ask::Payload(_) => {
                let payload = payloads.request().ok_or_else(|| Failure::new("no payload"))?;
                let begun = Instant::now();
                let _on_device: DeviceBuffer<f32> = payload.upload(stream).await?;
                Ok(vec![begun.elapsed().as_secs_f32()])
            }
            Ask::Write(half) => self.write(half).await,
            Ask::Leave => {
                let mut y = stream.zeros::<f32>(1).queued()?;
                self.faulty.launch(stream, 0, &mut y).queued()?;
                Ok(Vec::new())
            }
            Ask::Fault | Ask::Endless => {
                let endless = u32::from(matches!(ask, Ask::Endless));
                let mut y = stream.zeros::<f32>(1).queued()?;
                self.faulty.launch(stream, endless, &mut y).await?;
                Ok(Vec::new())
            }
        }
    }
}

impl Bench {
    /// Answers with whether a writer had died, and one element as it was and as it is.
    async fn write(&self, half: Option<Half>) -> Result<Vec<f32>, Failure> {
        let mut cache = self.cache.lock().await;
        let cache = cache.as_mut().ok_or_else(|| Failure::new("nothing is kept"))?;
        let stream = &self.small.stream;
        let died = matches!(cache.state().await?, KeptState::WriterDied { .. });
        let last = cache.memory().await?.len() - 1;
        let before = stream.download(&cache.memory().await?.slice(last..)?).await?[0];
        let write = async |mut memory: gpu_await::ViewMut<'_, u32>| {
            stream.fill(&mut memory, before + 1).queued()?;
            if let Some(half) = half {
                println!("it writes");
                let mut y = stream.zeros::<f32>(1).queued()?;
                self.faulty.launch(stream, u32::from(half == Half::Endless), &mut y).await?;
            }
            Ok(())
        };
        cache.write(write).await?;
        let after = stream.download(&cache.memory().await?.slice(last..)?).await?[0];
        Ok(vec![f32::from(died), before as f32, after as f32])
    }
}

/// On the device that `GPU_AWAIT_TEST_DEVICE` names: `cuda:0` is the first GPU, anything else the host device.
pub(crate) fn on_gpu() -> bool {
    std::env::var("GPU_AWAIT_TEST_DEVICE").is_ok_and(|device| device.starts_with("cuda"))
}

/// With an argument it only shows that it runs.
pub(crate) fn is_smoke() -> bool {
    std::env::args().any(|argument| argument == "smoke" || argument == "all-modes")
}

pub(crate) fn builder(kept_bytes: usize) -> WorkerBuilder<Bench> {
    let restart = Restart { settled: Duration::ZERO, ..Restart::default() };
    let builder = Worker::<Bench>::builder(kept_bytes).restart(restart);
    match gpus().expect("GPUs are listed").first() {
        Some(gpu) if on_gpu() => builder.gpu(gpu.uuid.clone()),
        _ => builder,
    }
}

pub(crate) fn print(name: &str, value: f64, unit: &str) {
    println!("{name} {value:.3} {unit}");
}

/// The value that so much of the rest is below.
pub(crate) fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part) as usize]
}
