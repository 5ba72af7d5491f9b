//! candle on the CPU: the stream's worker runs the forward pass, in stream order.

use std::sync::Arc;

use candle_core::Tensor;
use gpu_await::{Device, DeviceBuffer, RawQueue, RawSlice, Result, Stream, Uses};
use tokio::sync::OwnedSemaphorePermit;

use super::COMMANDS;
use crate::model::{Model, WIDTH};

pub(super) fn open(count: usize) -> Result<Vec<(Stream, candle_core::Device)>> {
    let device = Device::host();
    (0..count).map(|_| Ok((device.stream()?, candle_core::Device::Cpu))).collect()
}

pub(super) fn forward(
    stream: &Stream,
    model: &Arc<Model>,
    tokens: DeviceBuffer<u32>,
    permit: OwnedSemaphorePermit,
) -> Result<DeviceBuffer<f32>> {
    let mut embedding = stream.empty(WIDTH).queued()?;
    let model = model.clone();
    let call = |queue: &RawQueue<'_>, (tokens, embedding): (RawSlice<u32>, RawSlice<f32>)| {
        queue.host(move || {
            // SAFETY: the operation reads `tokens`.
            let tokens = unsafe { tokens.as_slice() };
            let output = Tensor::new(tokens, &candle_core::Device::Cpu)
                .and_then(|tokens| model.forward(&tokens))
                .and_then(|output| output.to_vec1::<f32>())
                .expect("tokens of the vocabulary");
            // SAFETY: the operation overwrites `embedding`.
            unsafe { embedding.as_mut_slice() }.copy_from_slice(&output);
        })
    };
    let uses = Uses::new("candle").reads(&tokens).writes(&mut embedding);
    let uses = uses.keeps(permit).commands(COMMANDS);
    // SAFETY: it reads `tokens` and overwrites all of `embedding`, on the stream.
    unsafe { stream.enqueue(uses, call) }.queued()?;
    Ok(embedding)
}
