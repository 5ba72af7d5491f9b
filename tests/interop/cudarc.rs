//! Memory that goes to cudarc and comes back, on a GPU; `driver_calls/cudarc.rs` shows the same under the stand-in
//! driver. Without a GPU there is nothing to see here.

#![cfg(feature = "cuda")]

use gpu_await::{Device, DeviceKind, Result, kernels, testing};

use crate::under_test::slices;

/// The device under test, if it is a GPU.
fn gpu() -> Option<Device> {
    Some(testing::device()).filter(|device| device.kind() == DeviceKind::Cuda)
}

#[test]
fn slices_in_a_thousand_random_orders() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    (1..=5).try_for_each(|seed| slices::random_orders(&device, 200, seed))
}

#[tokio::test]
async fn a_kernel_on_a_slice() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let context = device.cudarc_context()?;
    let theirs = context.new_stream().expect("a stream");
    let axpy = kernels::axpy::load(&device).await?;
    let stream = device.stream()?;
    let slice = theirs.clone_htod(&[1.0f32; 1000]).expect("a copy");
    // SAFETY: it was written, and nobody captures its stream.
    let mut y = unsafe { device.adopt_cudarc(slice) }?;
    let x = stream.full(1000, 2.0f32).queued()?;
    axpy.launch(&stream, 3.0, &x, &mut y).queued()?;
    // SAFETY: nobody captures the stream.
    let slice = unsafe { device.release_to_cudarc(y, &theirs) }?;
    assert_eq!(theirs.clone_dtoh(&slice).expect("a copy"), [7.0; 1000]);
    Ok(())
}

#[tokio::test]
async fn a_device_of_their_context() -> Result<()> {
    let Some(device) = gpu() else { return Ok(()) };
    let context = cudarc::driver::CudaContext::new(device.ordinal()).expect("a context");
    let second = Device::from_cudarc(&context)?;
    let x = second.full(100, 4u8).queued()?;
    // SAFETY: nobody captures the stream.
    let slice = unsafe { second.release_to_cudarc(x, &context.default_stream()) }?;
    drop(second);
    assert_eq!(context.default_stream().clone_dtoh(&slice).expect("a copy"), [4; 100]);
    Ok(())
}
