//! Training that goes on without a process that died. Without arguments it starts three on this host, or as many as there are GPUs if
//! those are fewer, one of which ends itself in the middle.
//!
//! Each process keeps the weights of its last two checkpoints on the host: another may not have reached the last one. When the
//! communicator is lost, those who are left agree on the oldest of their newest checkpoints, and continue from there.
//!
//! Prints where each process continues, and what the weights become. A process has the GPU of its rank, or a host device.
//!
//! ```text
//! cargo run --release -p gpu-await-nccl --example recovery
//! recovery 0 3 10.0.0.1:29500      # on the host 10.0.0.1; `recovery 1 3 ..`, `recovery 2 3 ..` on others
//! ```
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::Duration;

use gpu_await::{Device, DeviceBuffer, Result, Stream, kernels};
use gpu_await_nccl::{Communicator, Group, Reduction};

const N: usize = 1 << 12;
const STEPS: u32 = 40;
const KEEP_EVERY: u32 = 5;
/// The last rank ends itself there.
const FATAL: u32 = 18;
const RATE: f32 = 0.5;

struct Training {
    axpy: kernels::axpy,
    stream: Stream,
    target: DeviceBuffer<f32>,
    weights: DeviceBuffer<f32>,
    gradients: DeviceBuffer<f32>,
}

impl Training {
    async fn new(device: &Device, target: f32) -> Result<Training> {
        let (axpy, stream) = (kernels::axpy::load(device).await?, device.stream()?);
        let target = stream.full(N, target).queued()?;
        let (weights, gradients) = (stream.full(N, 10.0).queued()?, stream.zeros(N).queued()?);
        Ok(Training { axpy, stream, target, weights, gradients })
    }

    /// Pulls the weights to the mean of all targets. Awaits its last operation: what failed in front of it reaches that through the
    /// memory. A `stream.done()` would only say that the stream has run.
    async fn step(&mut self, comm: &Communicator) -> Result<()> {
        let Training { axpy, stream, target, weights, gradients } = self;
        stream.fill(gradients, 0.0).queued()?;
        axpy.launch(stream, 1.0, &*weights, &mut *gradients).queued()?;
        axpy.launch(stream, -1.0, &*target, &mut *gradients).queued()?;
        comm.all_reduce_in_place(gradients, Reduction::Average).queued()?;
        axpy.launch(stream, -RATE, &*gradients, &mut *weights).await
    }

    /// Some ranks may have done a step that others have not, so that their checkpoints differ: the oldest of the newest is one that
    /// all have. The weights may have failed, all of them or a part, and are overwritten.
    async fn restore(&mut self, comm: &Communicator, kept: &[Checkpoint]) -> Result<u32> {
        let newest = kept.last().map_or(0, |kept| kept.step);
        let mut agreed = self.stream.full(1, newest).queued()?;
        comm.all_reduce_in_place(&mut agreed, Reduction::Min).queued()?;
        let agreed = self.stream.download(&agreed).await?[0];
        let kept = kept.iter().find(|kept| kept.step == agreed).expect("one of the last two");
        self.weights = self.stream.upload(kept.weights.clone()).queued()?;
        Ok(agreed)
    }
}

struct Checkpoint {
    step: u32,
    weights: Vec<f32>,
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, world, address] = &arguments[..] else { return start_all() };
    let (rank, world) = (rank.parse::<usize>()?, world.parse()?);
    let device = match Device::count() {
        0 => Device::host(),
        count => Device::cuda(rank % count)?,
    };
    // A rank that is alive and does not call is found by the limit.
    let limit = Duration::from_secs(10);
    let mut group = Group::join(address, rank, world).await?;
    let mut comm = group.builder(&device).limit(limit).connect().await?;
    let mut training = Training::new(&device, rank as f32).await?;

    let (mut step, mut kept, mut restores) = (0, Vec::new(), false);
    while step < STEPS {
        let is_due = kept.last().is_none_or(|kept: &Checkpoint| kept.step < step);
        if step % KEEP_EVERY == 0 && is_due && !restores {
            let weights = training.stream.download_vec(&training.weights).await?;
            kept.push(Checkpoint { step, weights });
            kept.drain(..kept.len().saturating_sub(2));
        }
        if (rank, step) == (world - 1, FATAL) {
            std::process::abort();
        }
        let next = match restores {
            true => training.restore(&comm, &kept).await,
            false => training.step(&comm).await.map(|()| step + 1),
        };
        match next {
            Ok(next) => {
                if restores {
                    println!("rank {rank} of {:?}, from step {next}", group.original_ranks());
                    kept.retain(|kept| kept.step <= next);
                }
                (step, restores) = (next, false);
            }
            Err(error) if comm.lost().is_some() => {
                println!("rank {rank}, step {step}: {error}");
                // The ranks are numbered anew; this program keeps the original ones for its data.
                (group, comm) = group.recover(&device).await?;
                comm.set_limit(Some(limit));
                restores = true;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let weights = training.stream.download(&training.weights).await?;
    println!("rank {rank}: every weight is {:.3}", weights[0]);
    let mean = group.original_ranks().iter().sum::<usize>() as f32 / group.world() as f32;
    assert!(weights.iter().all(|weight| (weight - mean).abs() < 1e-2), "{}", weights[0]);
    Ok(())
}

fn start_all() -> std::result::Result<(), Box<dyn std::error::Error>> {
    // Two ranks need two GPUs, or none.
    let world = match Device::count() {
        0 => 3,
        count => count.clamp(2, 3),
    };
    // Nobody else has the port now; in a program it is a number that all know.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        let this = std::env::current_exe()?;
        let arguments = [rank.to_string(), world.to_string(), format!("127.0.0.1:{port}")];
        Command::new(this).args(arguments).spawn()
    };
    let processes = (0..world).map(start).collect::<std::io::Result<Vec<_>>>()?;
    for (rank, mut process) in processes.into_iter().enumerate() {
        assert_eq!(process.wait()?.success(), rank < world - 1, "rank {rank}");
    }
    println!("{} of {world} trained to the end", world - 1);
    Ok(())
}
