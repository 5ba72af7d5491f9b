//! Processes that meet at an address: on one host or on many. Without arguments it starts two on this one.
//!
//! Prints what each rank receives, and how long it took. A process has the GPU of its rank, or a host device.
//!
//! ```text
//! cargo run --release -p gpu-await-nccl --example two_processes
//! two_processes 0 2 10.0.0.1:29500      # on the host 10.0.0.1
//! two_processes 1 2 10.0.0.1:29500      # on another one
//! ```
#![forbid(unsafe_code)]

use std::process::Command;
use std::time::{Duration, Instant};

use gpu_await::Device;
use gpu_await_nccl::{Error, Group, Reduction};

const N: usize = 1 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, world, address] = &arguments[..] else { return start_two() };
    let (rank, world) = (rank.parse()?, world.parse()?);

    let group = Group::join(address, rank, world).await?;
    let device = match Device::count() {
        0 => Device::host(),
        count => Device::cuda(rank % count)?,
    };
    // An operation that takes longer loses the communicator, and never the process.
    let comm = group.builder(&device).limit(Duration::from_secs(10)).connect().await?;
    println!("rank {rank} of {world} on {device}");

    let mut x = device.full(N, rank as f32 + 1.0).queued()?;
    let start = Instant::now();
    match comm.all_reduce_in_place(&mut x, Reduction::Sum).await {
        Ok(()) => println!("rank {rank}: reduced {N} numbers in {:.1?}", start.elapsed()),
        Err(error) if Error::lost(&error).is_some() => {
            println!("rank {rank}: {error}; gone: {:?}", group.gone());
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    let sum = device.download(&x).await?[0];
    println!("rank {rank}: each is {sum}");
    assert_eq!(sum, (world * (world + 1) / 2) as f32);
    Ok(())
}

fn start_two() -> Result<(), Box<dyn std::error::Error>> {
    // Nobody else has the port now; in a program it is a number that all know.
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        let this = std::env::current_exe()?;
        Command::new(this).args([&rank.to_string(), "2", &format!("127.0.0.1:{port}")]).spawn()
    };
    // Two ranks need two GPUs, or none.
    for mut process in [start(0)?, start(1)?] {
        assert!(process.wait()?.success());
    }
    Ok(())
}
