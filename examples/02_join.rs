//! Joining, racing, giving up: an operation is a future like any other.
//!
//! Prints five lines, each with the time since the start of its step:
//!
//! 1. `try_join!` of two streams takes as long as the longer one, not as both;
//! 2. `timeout` gives up on a long kernel on time: the wait ends, the kernel goes on;
//! 3. `select!` polls `&mut op`, so losing the race loses nothing;
//! 4. dropping a future neither blocks nor cancels nor frees what the device still uses;
//! 5. afterwards everything still works.

use std::time::{Duration, Instant};

use gpu_await::{Device, kernels};
use tokio::time::{sleep, timeout};

const LONG: Duration = Duration::from_millis(200);

#[tokio::main]
async fn main() -> gpu_await::Result<()> {
    let device = Device::from_env()?;
    let (a, b) = (device.stream()?, device.stream()?);
    let spin = kernels::spin::load(&device).await?; // keeps one thread of the device busy for so long
    let long = LONG.as_nanos() as u64;
    println!("device: {device}");

    let start = Instant::now();
    // Both are on the device before either is polled: the macro's arguments are evaluated first.
    tokio::try_join!(spin.launch(&a, long), spin.launch(&b, long / 2))?;
    let both = start.elapsed();
    println!("1. 200 ms and 100 ms, joined:    {both:.1?}");
    assert!(both >= LONG && both < LONG * 7 / 5, "they ran one after the other: {both:?}");

    let start = Instant::now();
    let too_late = timeout(Duration::from_millis(20), spin.launch(&a, long)).await;
    let gave_up = start.elapsed();
    println!("2. gave up after 20 ms:          {gave_up:.1?}");
    assert!(too_late.is_err() && gave_up < LONG / 2, "the time-out was late: {gave_up:?}");

    let start = Instant::now();
    let mut op = spin.launch(&b, long / 2); // outside of the loop: a call inside would launch each time
    let mut ticks = 0;
    loop {
        tokio::select! {
            done = &mut op => { done?; break }
            () = sleep(Duration::from_millis(10)) => ticks += 1, // the host does something else
        }
    }
    println!("3. {ticks} ticks beside 100 ms:       {:.1?}", start.elapsed());
    assert!(ticks >= 2, "the kernel held the loop up");

    let start = Instant::now();
    let x = a.upload(vec![7u32; 1000]).queued()?;
    spin.launch(&a, long).queued()?;
    let op = a.download(&x);
    drop(op); // abandons: the copy still happens, into memory that the library keeps until then
    drop(x); // freed in stream order, behind that copy
    let dropped = start.elapsed();
    println!("4. dropped with work pending:    {dropped:.1?}");
    assert!(dropped < LONG / 2, "a drop blocked: {dropped:?}");

    let start = Instant::now();
    let y = a.full(1000, 9u32).queued()?;
    assert_eq!(a.download(&y).await?, [9; 1000]);
    device.done().await?;
    println!("5. the next numbers were right:  {:.1?}, behind what was pending", start.elapsed());
    assert_eq!(device.stats().in_flight, 0);
    Ok(())
}
