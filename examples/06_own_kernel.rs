//! A kernel of your own: a row-wise soft-max, with its CUDA source, its PTX and its host twin.
//!
//! The source is `kernels/softmax.cu`; `kernels/build.py` made the PTX beside it, so nobody who
//! builds this needs a CUDA compiler. Prints the largest error against an `f64` reference, what a
//! wrong call is told, and how long a row took.

use std::time::Instant;

use gpu_await::{Device, DeviceBuffer, ErrorKind, LaunchConfig, Readable, Result, Stream, kernel};

kernel! {
    /// `y[r, :] = softmax(x[r, :])`, row-major.
    unsafe fn softmax(x: &[f32], y: Out<[f32]>, rows: u32, cols: u32)
        where x.len() == rows * cols, y.len() == x.len();
    launch = if y.is_empty() {
        LaunchConfig::for_elements(0) // nothing to do: no launch
    } else {
        LaunchConfig::new(rows, 256) // a block a row
    };
    ptx = include_str!("../kernels/softmax.ptx");
    host = twin::softmax;
}

mod twin {
    use gpu_await::Grid;

    /// The same on the CPU: called once a launch, for the whole grid, with exclusive slices.
    pub(super) fn softmax(_: &Grid, x: &[f32], y: &mut [f32], _rows: u32, cols: u32) {
        let cols = cols.max(1) as usize;
        for (x, y) in x.chunks(cols).zip(y.chunks_mut(cols)) {
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = (x - most).exp());
            let sum: f32 = y.iter().sum();
            y.iter_mut().for_each(|y| *y /= sum);
        }
    }
}

/// What a library would offer: queues, never waits, and takes buffers and views alike.
fn apply(k: &softmax, s: &Stream, x: &impl Readable<f32>, rows: u32) -> Result<DeviceBuffer<f32>> {
    let mut y = s.empty(x.len()).queued()?;
    k.launch(s, x, &mut y, rows, x.len() as u32 / rows.max(1)).queued()?;
    Ok(y)
}

#[tokio::main]
async fn main() -> Result<()> {
    const ROWS: u32 = 1000;
    const COLS: usize = 777;
    let device = Device::from_env()?;
    let stream = device.stream()?;
    let softmax = softmax::load(&device).await?;
    println!("device:        {device}");

    let x: Vec<f32> =
        (0..ROWS as usize * COLS).map(|i| ((i * 7919) % 2003) as f32 / 100.0).collect();
    let on_device = stream.upload_from(&x).await?;
    let start = Instant::now();
    let y = apply(&softmax, &stream, &on_device, ROWS)?;
    let y = stream.download(&y).await?;
    let took = start.elapsed();

    let mut worst = 0.0f64;
    for (x, y) in x.chunks(COLS).zip(y.chunks(COLS)) {
        let most = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = x.iter().map(|x| (f64::from(*x) - most).exp()).sum();
        for (x, y) in x.iter().zip(y) {
            worst = worst.max((f64::from(*y) - (f64::from(*x) - most).exp() / sum).abs());
        }
    }
    println!("largest error: {worst:.1e} over {} elements", x.len());
    println!("time:          {took:.1?}, with the copy back, for {ROWS} rows of {COLS}");
    assert!(worst < 1e-6, "the soft-max is wrong by {worst}");

    let mut y = stream.empty(3).queued()?;
    let error =
        softmax.launch(&stream, &on_device, &mut y, ROWS, COLS as u32).queued().unwrap_err();
    println!("a wrong call:  {error}");
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    Ok(())
}
