//! Candle devices, each with its stream and its own copy of the model.
//!
//! A candle device works on one stream, for good, and a tensor belongs to one device. So requests that should overlap
//! on the GPU take two devices, and each loads the weights. A [`Lane`] is such a device.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Tensor;
use gpu_await::{Device, DeviceBuffer, Op, PinnedBuffer, Result, Stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::block_in_place;

use crate::Failed;
use crate::model::{MAX_TOKENS, Model};

const LANES: usize = 2;

/// Requests in flight on one lane: enough to keep its stream busy. The driver takes about a thousand launches on one
/// stream, and then blocks the calling thread.
const IN_FLIGHT: usize = 2;

/// Launches and copies of one forward pass, rounded up: 141 kernels, 64 products, 82 copies of shapes and strides.
const COMMANDS: u32 = 400;

/// Takes requests in turn.
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    next: AtomicUsize,
}

/// A candle device, the stream that it works on, and the model there.
pub(crate) struct Lane {
    stream: Stream,
    model: Arc<Model>,
    permits: Arc<Semaphore>,
}

impl Lanes {
    /// Opens GPU 0 and loads the model; the host device without the feature `cuda`, or with `GPU_AWAIT_DEVICE=host`.
    /// Before serving: on a GPU, loading waits for everything that runs.
    pub(crate) async fn open() -> Result<Arc<Lanes>, Failed> {
        let opened = match std::env::var("GPU_AWAIT_DEVICE").as_deref() {
            #[cfg(feature = "cuda")]
            Ok("cuda:0" | "auto") | Err(_) => cuda::open(LANES)?,
            #[cfg(not(feature = "cuda"))]
            Ok("auto") | Err(_) => host::open(LANES)?,
            Ok("host") => host::open(LANES)?,
            Ok(other) => return Err(format!("GPU_AWAIT_DEVICE={other}: not built for it").into()),
        };
        let mut lanes = Vec::new();
        for (stream, candle) in opened {
            let model = Arc::new(Model::new(&candle)?);
            let lane = Lane { stream, model, permits: Arc::new(Semaphore::new(IN_FLIGHT)) };
            // candle loads kernels on first use, and so does cuBLAS.
            lane.queue(vec![0; MAX_TOKENS], lane.permit().await)?.await?;
            lanes.push(lane);
        }
        Ok(Arc::new(Lanes { lanes, next: AtomicUsize::new(0) }))
    }

    /// The device of all lanes.
    pub(crate) fn device(&self) -> Device {
        self.lanes[0].stream.device()
    }

    /// Waits for a permit, queues the forward pass, and waits for its result.
    ///
    /// candle makes hundreds of driver calls for one pass: tokio gives the executor's other tasks to another thread
    /// meanwhile.
    ///
    /// # Panics
    /// Outside of a multi-threaded runtime.
    pub(crate) async fn embed(&self, tokens: Vec<u32>) -> Result<PinnedBuffer<f32>> {
        let lane = self.next();
        let permit = lane.permit().await;
        block_in_place(|| lane.queue(tokens, permit))?.await
    }

    /// The lane whose turn it is.
    pub(crate) fn next(&self) -> &Lane {
        // ORDERING: Relaxed: a counter that publishes nothing.
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.lanes[turn % self.lanes.len()]
    }
}

impl Lane {
    pub(crate) async fn permit(&self) -> OwnedSemaphorePermit {
        self.permits.clone().acquire_owned().await.expect("never closed")
    }

    /// Queues an upload, candle's forward pass and a download, and returns their one future: nothing here waits for
    /// the device. The permit is released when the forward pass is complete, even if the future is dropped.
    ///
    /// The tokens are in the model's vocabulary, and at most [`MAX_TOKENS`].
    pub(crate) fn queue(
        &self,
        tokens: Vec<u32>,
        permit: OwnedSemaphorePermit,
    ) -> Result<Op<PinnedBuffer<f32>>> {
        let tokens = self.stream.upload(tokens).queued()?;
        let embedding = self.forward(tokens, permit)?;
        Ok(self.stream.download(&embedding))
    }

    /// candle's own way, for comparison.
    ///
    /// # Blocking
    /// Until the device has finished.
    pub(crate) fn embed_blocking(&self, tokens: &[u32]) -> candle_core::Result<Vec<f32>> {
        self.model.forward(&Tensor::new(tokens, self.model.device())?)?.to_vec1()
    }

    fn forward(
        &self,
        tokens: DeviceBuffer<u32>,
        permit: OwnedSemaphorePermit,
    ) -> Result<DeviceBuffer<f32>> {
        match self.stream.device().kind() {
            #[cfg(feature = "cuda")]
            gpu_await::DeviceKind::Cuda => cuda::forward(&self.stream, &self.model, tokens, permit),
            _ => host::forward(&self.stream, &self.model, tokens, permit),
        }
    }
}
