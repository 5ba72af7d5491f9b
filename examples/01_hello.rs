//! Upload, one kernel, download; one wait in all.
//!
//! Shows the shape of every program: submit now, get a future, await only where the host needs the
//! result. Prints the device it ran on, how long the submissions took and when the numbers were there.
//!
//! ```text
//! cargo run --example 01_hello                            # GPU 0, or the host device without one
//! GPU_AWAIT_DEVICE=host cargo run --example 01_hello      # the host device, always
//! ```

use std::time::Instant;

use gpu_await::{Device, kernels};

const N: usize = 1 << 20;

#[tokio::main]
async fn main() -> gpu_await::Result<()> {
    let device = Device::from_env()?;
    let stream = device.stream()?;
    let axpy = kernels::axpy::load(&device).await?; // PTX on a GPU, a Rust function on the host device
    println!("device:     {device}");

    let x: Vec<f32> = (0..N).map(|i| (i % 1000) as f32).collect();

    let start = Instant::now();
    let x = stream.upload(x).queued()?; // on the stream when the call returns; the host does not wait
    let mut y = stream.full(N, 2.0f32).queued()?;
    axpy.launch(&stream, 3.0, &x, &mut y).queued()?; // y = 3 x + y
    let y = stream.download(&y); // a future of the numbers
    let submitted = start.elapsed();

    let y = y.await?; // the one host wait
    let done = start.elapsed();

    println!("submitted:  4 operations in {submitted:.1?}");
    println!("back after: {done:.1?}, {N} elements up and down");

    for (i, y) in y.iter().enumerate() {
        let expected = 3.0f32.mul_add((i % 1000) as f32, 2.0);
        assert_eq!(*y, expected, "element {i}");
    }
    println!("checked:    all {N} elements are 3 x + 2");
    Ok(())
}
