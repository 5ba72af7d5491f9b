//! candle on a GPU: gpu-await adopts the stream of each candle device, and memory changes hands without a copy.
//!
//! | step | calls | whose memory |
//! |---|---|---|
//! | tokens in | [`Stream::upload`], [`Device::release_to_cudarc`], `CudaStorage::wrap_cuda_slice` | gpu-await's, then candle's |
//! | forward pass | [`Stream::enqueue`] around `Model::forward` | candle's, from the same context |
//! | embedding out | [`Stream::adopt_memory`], [`Stream::download`] | candle's, kept by the buffer |

use std::sync::Arc;

use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DevicePtr};
use candle_core::{CudaDevice, Error, Storage, Tensor};
use gpu_await::{Device, DeviceBuffer, RawQueue, Result, Stream, Uses};
use tokio::sync::OwnedSemaphorePermit;

use super::COMMANDS;
use crate::Failed;
use crate::model::Model;

/// candle makes a stream for each device; the constructor that would take one of ours is private.
pub(super) fn open(count: usize) -> Result<Vec<(Stream, candle_core::Device)>, Failed> {
    // On the primary context of GPU 0, all of them.
    let candles = (0..count).map(|_| CudaDevice::new_with_stream(0));
    let candles: Vec<CudaDevice> = candles.collect::<candle_core::Result<_>>()?;
    let device = Device::from_cudarc(candles[0].cuda_stream().context())?;
    let adopt = |candle: CudaDevice| {
        // SAFETY: each tensor of this device stays on its one stream: what comes from elsewhere or goes elsewhere
        // does so through gpu-await, which orders it. Without tracking, no tensor makes two events.
        unsafe { candle.disable_event_tracking() };
        // SAFETY: nobody captures candle's stream.
        let stream = unsafe { device.adopt(&candle.cuda_stream()) }?;
        Ok((stream, candle_core::Device::Cuda(candle)))
    };
    candles.into_iter().map(adopt).collect()
}

pub(super) fn forward(
    stream: &Stream,
    model: &Model,
    tokens: DeviceBuffer<u32>,
    permit: OwnedSemaphorePermit,
) -> Result<DeviceBuffer<f32>> {
    let candle = model.device().as_cuda_device().expect("a lane of a GPU").clone();
    let theirs = candle.cuda_stream();
    // SAFETY: nobody captures candle's stream.
    let tokens = unsafe { stream.device().release_to_cudarc(tokens, &theirs) }?;

    let mut output = None;
    let call = |_: &RawQueue<'_>, ()| -> candle_core::Result<()> {
        let len = tokens.len();
        let tokens = Storage::Cuda(CudaStorage::wrap_cuda_slice(tokens, candle));
        let tokens = Tensor::from((tokens, len));
        output = Some(Output::of(model.forward(&tokens)?)?);
        Ok(())
        // The memory of `tokens` is freed here, in stream order, with the context current.
    };
    let uses = Uses::new("candle").keeps(permit).commands(COMMANDS);
    // SAFETY: candle puts all of its work on its device's stream, which is this one, and touches memory of its own
    // alone, which it frees in stream order. The host memory that it copies from is ordinary: the driver has read it
    // when the call returns.
    unsafe { stream.enqueue(uses, call) }.queued()?;

    let output = output.expect("the call succeeded");
    let (ptr, len) = (output.ptr, output.len);
    // SAFETY: `len` elements that candle wrote on this stream; the tensor keeps them, and nobody else has it.
    unsafe { stream.adopt_memory(ptr, len, output) }
}

/// A contiguous tensor of `f32`, where its memory is, and the context that is current when it is freed.
struct Output {
    tensor: Option<Tensor>,
    context: Arc<CudaContext>,
    ptr: u64,
    len: usize,
}

impl Output {
    fn of(tensor: Tensor) -> candle_core::Result<Output> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(cuda) = &*storage else { candle_core::bail!("not on a GPU") };
        let Some((from, to)) = layout.contiguous_offsets() else {
            return Err(Error::RequiresContiguous { op: "adopt_memory" });
        };
        let slice = cuda.as_cuda_slice::<f32>()?.slice(from..to);
        let theirs = cuda.device.cuda_stream();
        let (ptr, recorded) = slice.device_ptr(&theirs);
        drop(recorded);
        let (context, len) = (theirs.context().clone(), to - from);
        drop(storage);
        Ok(Output { tensor: Some(tensor), context, ptr, len })
    }
}

impl Drop for Output {
    /// On a thread of gpu-await, where no context is current; cudarc takes the current one.
    fn drop(&mut self) {
        self.context.bind_to_thread().ok();
        drop(self.tensor.take());
    }
}
