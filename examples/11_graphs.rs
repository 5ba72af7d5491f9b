//! Many small kernels: launched one by one, as a batch, as a replayed batch and as a graph, with the time from the first call until
//! the result was awaited, and what the graph looks like.
//!
//! Each request adds up three branches of the same input, each with its own scratch memory. They are written one after the
//! other; which of them wait for which is found in what they touch:
//!
//! ```text
//!          x                   
//!    /     |     \             zeros: t = 0
//!  zeros zeros zeros           axpy: t += a x
//!  axpy  axpy  axpy            scale: t *= 0.5
//!  scale scale scale           
//!    \     |     /             axpy: y += t, one behind the other
//!     axpy axpy axpy -> y      
//! ```
//!
//! The picture behind the times is in the DOT language: `cargo run --release --example 11_graphs | sed -n '/digraph/,$p' | dot -Tsvg`.

use std::time::{Duration, Instant};

use gpu_await::{Device, DeviceBuffer, In, InOut, Op, Queue, Region, Result, kernels};

const LEN: usize = 1024;
const BRANCHES: usize = 3;
const REQUESTS: usize = 300;

#[derive(Clone)]
struct Kernels {
    axpy: kernels::axpy,
    scale: kernels::scale,
}

impl Kernels {
    /// `y += (a + 0) x / 2 + (a + 1) x / 2 + ..`: the same lines for a batch, a replayed batch and a graph.
    fn request(
        &self,
        q: &Queue<'_>,
        x: &impl gpu_await::Readable<f32>,
        y: &mut impl gpu_await::Writable<f32>,
        a: f32,
    ) -> Result<()> {
        for branch in 0..BRANCHES {
            let mut t = q.zeros(LEN)?;
            self.axpy.launch(q, a + branch as f32, x, &mut t)?;
            self.scale.launch(q, 0.5, &mut t)?;
            self.axpy.launch(q, 1.0, &t, y)?;
        }
        Ok(())
    }
}

/// The median time of requests with other values each time, or with the same one.
async fn median(changes: bool, mut request: impl FnMut(f32) -> Result<Op<()>>) -> Result<Duration> {
    let mut times = Vec::new();
    for n in 0..REQUESTS {
        let start = Instant::now();
        request(if changes { n as f32 * 0.01 } else { 1.0 })?.await?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok(times[REQUESTS / 2])
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let stream = device.stream()?;
    let kernels = Kernels {
        axpy: kernels::axpy::load(&device).await?,
        scale: kernels::scale::load(&device).await?,
    };
    let x = stream.full(LEN, 1.0f32).queued()?;
    let fresh = || stream.full(LEN, 0.0f32).queued();
    println!("device: {device}; {} kernels a request", 4 * BRANCHES);

    let mut y = fresh()?;
    let one_by_one = median(true, |a| {
        for branch in 0..BRANCHES {
            let mut t = stream.zeros(LEN).queued()?;
            kernels.axpy.launch(&stream, a + branch as f32, &x, &mut t).queued()?;
            kernels.scale.launch(&stream, 0.5, &mut t).queued()?;
            kernels.axpy.launch(&stream, 1.0, &t, &mut y).queued()?;
        }
        Ok(stream.done())
    })
    .await?;
    println!("one by one                {one_by_one:>9.1?}");

    let mut y = fresh()?;
    let batch = median(true, |a| Ok(stream.batch(|q| kernels.request(q, &x, &mut y, a)))).await?;
    println!("batch                     {batch:>9.1?}");

    let (mut y, mut region) = (fresh()?, Region::new());
    let replayed =
        median(true, |a| Ok(stream.replay(&mut region, |q| kernels.request(q, &x, &mut y, a))));
    let replayed = replayed.await?;
    println!("replay, other values      {replayed:>9.1?}   {:?}", region.report());

    let graph = device
        .graph::<(In<f32>, InOut<f32>, f32), _, _>(kernels.clone(), |q, kernels, (x, mut y, a)| {
            kernels.request(q, &x, &mut y, a)
        });
    let mut z = fresh()?;
    let changed = median(true, |a| Ok(graph.launch(&stream, (&x, &mut z, a)))).await?;
    println!("graph, other values       {changed:>9.1?}");
    assert_eq!(*stream.download(&y).await?, *stream.download(&z).await?, "the same sums");
    let unchanged = median(false, |a| Ok(graph.launch(&stream, (&x, &mut z, a)))).await?;
    println!("graph, the same arguments {unchanged:>9.1?}   {:?}\n", graph.report());

    // Runs beside other operations like any of them.
    let seen: DeviceBuffer<f32> = stream
        .batch(|q| {
            let mut y = q.full(LEN, 1.0f32)?;
            graph.launch(q, (&x, &mut y, 1.0))?;
            Ok(y)
        })
        .await?;
    assert_eq!(stream.download(&seen).await?[0], 1.0 + (1.0 + 2.0 + 3.0) / 2.0);
    print!("{}", graph.dot());
    Ok(())
}
