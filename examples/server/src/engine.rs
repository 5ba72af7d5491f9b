//! What computes on one device: admission, micro-batches and the model. In the server's process, or in a worker's (`isolated.rs`).
//!
//! Whoever awaits an answer here may give it up at any point: what is on the device goes on, its memory comes back when the device has
//! finished, and the permit of the pool only then.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ::metrics::histogram;
use gpu_await::{Batcher, Device, PinnedBuffer, PoolShare, StreamPool};

use crate::budget::Reserved;
use crate::embed_mean::WIDTH;
use crate::embedder::{self, Embed, Embedded};
use crate::failure::Failure;
use crate::health::Health;
use crate::model::{Model, Times};
use crate::options::Options;
use crate::wire::{Input, Matmul};

pub(crate) struct Engine {
    device: Device,
    pub pool: StreamPool,
    products: StreamPool,
    model: Arc<Model>,
    embedder: Batcher<Embed, Embedded, gpu_await::Error>,
    /// Of an engine that is watched.
    health: Option<Arc<Health>>,
}

/// Whether requests are answered, for probes.
pub(crate) struct State {
    /// Otherwise whoever runs the server should start it again.
    pub is_live: bool,
    /// Otherwise requests should go elsewhere.
    pub is_ready: bool,
    pub text: String,
}

/// A metric: its name, its value, what it is.
pub(crate) type Figure = (&'static str, u64, &'static str);

impl Engine {
    /// Loads the model and makes what serves it. Inside a runtime: it starts tasks.
    ///
    /// # Errors
    /// A model that does not load; a device without room for it.
    pub(crate) async fn start(device: Device, options: &Options) -> gpu_await::Result<Engine> {
        let model = Arc::new(Model::load(&device).await?);
        let pool = StreamPool::builder()
            .streams(&device, options.streams)
            .max_in_flight(options.max_in_flight)
            .max_waiting(options.max_waiting)
            // A request that cannot be answered by then is refused at once, and nobody computes for callers that have gone.
            .patience(options.request_timeout_ms)
            // Products take long, and others stand behind them on the device: half of the permits are never theirs.
            .share(PoolShare::new("matmul").max_in_flight(options.max_in_flight.div_ceil(2)))
            .share(PoolShare::new("embed"))
            .build()?;
        let (embedder, worker) = embedder::start(
            &pool.with_share("embed")?,
            model.clone(),
            options.max_waiting,
            options.request_timeout_ms,
        );
        tokio::spawn(worker);
        let products = pool.with_share("matmul")?;
        Ok(Engine { device, pool, products, model, embedder, health: None })
    }

    /// Has the device looked at now and then, within `limit`.
    ///
    /// # Errors
    /// A device that is lost.
    pub(crate) fn watched(mut self, limit: Duration) -> gpu_await::Result<Engine> {
        self.health = Some(Health::watch(self.model.clone(), self.device.stream()?, limit));
        Ok(self)
    }

    /// What an input gives, encoded, and the times that it took. What is `reserved` is for the input, which goes as soon as it is in pinned
    /// memory.
    pub(crate) async fn compute<T>(
        &self,
        input: Input,
        reserved: Reserved,
        encode: impl FnOnce(&[f32]) -> T,
    ) -> Result<(T, Times), Failure> {
        match input {
            Input::Matmul(Matmul { shape, a, b }) => {
                let fill = move |inputs: &mut [f32]| {
                    inputs[..a.len()].copy_from_slice(&a);
                    inputs[a.len()..].copy_from_slice(&b);
                    drop((a, b, reserved));
                };
                let (c, times) = self.multiply(shape, (), fill).await?;
                Ok((encode(&c), times))
            }
            Input::Embed(tokens) => {
                let (embedding, times) = self.look_up(tokens, Box::new(())).await?;
                Ok((encode(&embedding), times))
            }
        }
    }

    /// The GPU's part of a product: `fill` writes `a` and `b` one behind the other. `waits` is dropped when the product has a stream.
    pub(crate) async fn multiply(
        &self,
        [m, k, n]: [usize; 3],
        waits: impl Send,
        fill: impl FnOnce(&mut [f32]),
    ) -> gpu_await::Result<(PinnedBuffer<f32>, Times)> {
        let stream = self.products.acquire().await?;
        drop(waits);
        let queue = stream.waited();
        histogram!("server_queue_seconds").record(queue);
        // Pinned, so that copies need no thread; where its pool has to grow, that is off the executor. Behind the wait for a stream: pinned
        // memory is bounded by what is in flight.
        let mut inputs = self.device.pinned_async(m * k + k * n).await?;
        fill(&mut inputs);
        let c = self.device.pinned_async(m * n).await?;
        let result = self.model.matmul(&stream, [m, k, n], inputs, c); // on the device from here on
        let (c, gpu) = result.await?; // the one wait for it
        histogram!("server_gpu_seconds", "route" => "/matmul").record(gpu);
        Ok((c, Times { queue, gpu }))
    }

    /// Waits with others for a batch; a request that is dropped before leaves it. `waits` is dropped when the batch has a stream.
    pub(crate) async fn look_up(
        &self,
        tokens: Vec<u32>,
        waits: Box<dyn Send + Sync>,
    ) -> gpu_await::Result<([f32; WIDTH], Times)> {
        let embedder = self.embedder.with_weight(tokens.len() as u64);
        let request = Embed { tokens, since: Instant::now(), waits };
        let Embedded { embedding, times } = embedder.call(request).await?;
        Ok((embedding, times))
    }

    pub(crate) fn state(&self) -> State {
        let is_good = self.health.as_ref().is_none_or(|health| health.is_good());
        let text = if is_good { "ok" } else { "the device is stalled" };
        State { is_live: is_good, is_ready: is_good, text: text.to_owned() }
    }

    /// Waits until it cannot compute any more, and says why.
    pub(crate) async fn lost(&self) -> crate::Error {
        self.device.lost().await.into()
    }

    /// Ends it, once the device has finished what is on it.
    ///
    /// # Errors
    /// That takes longer than `limit`; the device is lost.
    pub(crate) async fn close(&self, limit: Duration) -> gpu_await::Result<()> {
        self.pool.close();
        // Requests that were given up may still be on the device.
        self.device.close(limit).await
    }

    /// What it computes on.
    pub(crate) fn name(&self) -> String {
        self.device.to_string()
    }

    pub(crate) fn gauges(&self) -> Vec<Figure> {
        let (pool, device, embed) = (self.pool.stats(), self.device.stats(), self.embedder.stats());
        vec![
            ("server_pool_in_flight", pool.in_flight as u64, "requests on the device"),
            ("server_pool_waiting", pool.waiting as u64, "requests that wait for a stream"),
            ("server_embed_waiting", embed.waiting as u64, "requests that wait for a batch"),
            ("server_device_operations_in_flight", device.in_flight, "operations on the device"),
            ("server_device_allocated_bytes", device.allocated_bytes, "device memory"),
            ("server_device_allocations", device.allocations, "buffers"),
            ("server_device_pending_bytes", device.pending_bytes, "memory that waits to be freed"),
            ("server_device_lent_bytes", device.lent_bytes, "host memory lent to operations"),
            ("server_device_pinned_bytes", device.pinned_bytes, "pinned memory"),
            ("server_device_pinned_used_bytes", device.pinned_used_bytes, "pinned memory in use"),
        ]
    }

    pub(crate) fn counters(&self) -> Vec<Figure> {
        let (pool, device, embed) = (self.pool.stats(), self.device.stats(), self.embedder.stats());
        let expired =
            "requests that waited until it was too late: 429, or 503 once their time is over";
        vec![
            ("server_pool_refused_total", pool.refused, "requests that the pool refused: 429"),
            ("server_pool_expired_total", pool.expired, expired),
            ("server_embed_refused_total", embed.refused, "requests that the batcher refused: 429"),
            ("server_embed_expired_total", embed.expired, expired),
            ("server_device_wake_ups_total", device.wake_ups, "tasks woken by the device's poller"),
        ]
    }
}
