//! Other libraries: matrix products and transforms as operations, a call of your own library, memory that comes from
//! elsewhere and goes there.
//!
//! Prints what each gave; on a host device the CPU computes it.

use gpu_await::{Device, DeviceBuffer, DeviceKind, Op, RawQueue, RawSlice, Result, Stream, Uses};
use gpu_await_libs::{Activation, Blas, Complex, Fft};

type Status = std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// A library's call: fills memory with a byte, on a stream. On a GPU it is the driver's.
fn their_fill(queue: &RawQueue<'_>, value: u8, x: RawSlice<u8>) -> Status {
    if queue.kind() == DeviceKind::Host {
        // SAFETY: the stream runs this in an operation that declared all of `x` as written.
        return Ok(queue.host(move || unsafe { x.as_mut_slice() }.fill(value))?);
    }
    let raw = queue.stream() as cudarc::driver::sys::CUstream;
    // SAFETY: live memory of that length, and a live stream.
    Ok(unsafe { cudarc::driver::result::memset_d8_async(x.address(), value, x.len(), raw) }?)
}

/// The same as an operation.
fn fill(stream: &Stream, value: u8, x: &mut DeviceBuffer<u8>) -> Op<()> {
    let uses = Uses::new("their_fill").writes(x);
    // SAFETY: all of `x` is overwritten, on the stream.
    unsafe { stream.enqueue(uses, |queue, (x,)| their_fill(queue, value, x)) }
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::from_env()?;
    let stream = device.stream()?;
    println!("device:     {device}");

    // A plan is made once; a launch is an operation like any other.
    let (m, n, k) = (64, 32, 128);
    let layer = Blas::load(&device).await?.gemm::<f32>(m, n, k).bias();
    let layer = layer.activation(Activation::Relu).plan().await?;
    let x = stream.full(m * k, 0.5f32).queued()?;
    let weights = stream.full(k * n, 0.25f32).queued()?.freeze().await?;
    let bias = stream.full(n, 1.0f32).queued()?;
    let mut y = stream.empty(m * n).queued()?;
    layer.launch_with_bias(&stream, 1.0, &x, &weights, &bias, 0.0, &mut y).queued()?;
    println!("product:    {}", stream.download(&y.slice(..1)?).await?[0]);

    // Its input is what the product wrote, on another stream.
    let plan = Fft::load(&device).await?.real::<f32>(&[m * n]).plan().await?;
    let other = device.stream()?;
    let mut spectrum = other.empty::<Complex<f32>>(m * n / 2 + 1).queued()?;
    plan.forward(&other, &y, &mut spectrum).queued()?;
    println!("transform:  {}", other.download(&spectrum.slice(..1)?).await?[0]);

    // A call of a library that the crate never heard of.
    let mut bytes = stream.empty::<u8>(1000).queued()?;
    fill(&stream, 7, &mut bytes).queued()?;
    println!("their call: {}", other.download(&bytes).await?[999]);

    // Memory of somebody else's, kept by its owner until the last use is complete.
    if device.kind() == DeviceKind::Host {
        let theirs = vec![1u32, 2, 3].into_boxed_slice();
        let (ptr, len) = (theirs.as_ptr() as u64, theirs.len());
        // SAFETY: the box keeps the memory, and nobody else has it.
        let adopted = unsafe { device.adopt_memory::<u32>(ptr, len, theirs) }?;
        println!("adopted:    {:?}", stream.download(&adopted).await?);
    } else {
        let context = device.cudarc_context()?;
        let slice = context.default_stream().clone_htod(&[1u32, 2, 3]).expect("a copy");
        // SAFETY: it was written, and nobody captures its stream.
        let adopted = unsafe { device.adopt_cudarc(slice) }?;
        println!("adopted:    {:?}", stream.download(&adopted).await?);
    }
    Ok(())
}
