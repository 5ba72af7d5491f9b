//! Steps of data-parallel training: on each device a kernel makes gradients, their average goes to all devices, a kernel takes the step.
//! One wait at the end.
//!
//! Prints the devices, how long the submissions took, and the time until the weights were there. Without a GPU two host devices
//! take part.
//!
//! ```text
//! cargo run --release -p gpu-await-nccl --example data_parallel
//! ```
#![forbid(unsafe_code)]

use std::time::Instant;

use gpu_await::{Device, kernels};
use gpu_await_nccl::{Communicator, Reduction};

const N: usize = 1 << 16;
const STEPS: usize = 20;
const RATE: f32 = 0.5;

#[tokio::main]
async fn main() -> gpu_await::Result<()> {
    let devices: Vec<Device> = match Device::count() {
        0 => vec![Device::host(), Device::host()],
        count => (0..count).map(Device::cuda).collect::<gpu_await::Result<_>>()?,
    };
    let comm = Communicator::all(&devices).await?;
    let mut ranks = Vec::new();
    for (rank, device) in devices.iter().enumerate() {
        println!("rank {rank}: {device}");
        let (axpy, stream) = (kernels::axpy::load(device).await?, device.stream()?);
        // Each rank pulls the weights to a number of its own; together they go to the mean.
        let target = stream.full(N, rank as f32).queued()?;
        let weights = stream.full(N, 10.0f32).queued()?;
        let gradients = stream.zeros::<f32>(N).queued()?;
        ranks.push((axpy, stream, target, weights, gradients));
    }

    let start = Instant::now();
    for _ in 0..STEPS {
        for (axpy, stream, target, weights, gradients) in &mut ranks {
            stream.fill(gradients, 0.0).queued()?;
            axpy.launch(stream, 1.0, &*weights, &mut *gradients).queued()?;
            axpy.launch(stream, -1.0, &*target, &mut *gradients).queued()?; // weights - target
        }
        // Behind the kernels, and in front of the next ones, by the memory that they use.
        comm.group(|g| {
            for (rank, (.., gradients)) in ranks.iter_mut().enumerate() {
                g.rank(rank)?.all_reduce_in_place(gradients, Reduction::Average)?;
            }
            Ok(())
        })
        .queued()?;
        for (axpy, stream, _, weights, gradients) in &mut ranks {
            axpy.launch(stream, -RATE, &*gradients, &mut *weights).queued()?;
        }
    }
    let downloads = ranks.iter().map(|(_, stream, _, weights, _)| stream.download(weights));
    let weights = gpu_await::join_all(downloads);
    let submitted = start.elapsed();
    let weights = weights.await?; // the one host wait
    println!("submitted:  {STEPS} steps in {submitted:.1?}");
    println!("back after: {:.1?}", start.elapsed());

    let mean = (devices.len() - 1) as f32 / 2.0;
    for weights in weights {
        assert!(weights.iter().all(|weight| (weight - mean).abs() < 1e-3), "{}", weights[0]);
    }
    println!("every weight is {mean}, the mean of the ranks' targets, on every rank");
    Ok(())
}
