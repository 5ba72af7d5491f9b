//! A producer and a consumer on two streams, with no host wait in between.
//!
//! The producer fills two slots in turn; the consumer adds each to a sum. A slot must not be read
//! before it is full, nor filled again before it was read. Nothing in the program says so: the
//! library orders work on the same memory by itself, *on the device*. The host is far ahead.
//!
//! Prints how long the host took to submit everything, how long the device took to do it, and the sum.

use std::time::{Duration, Instant};

use gpu_await::{Device, kernels};

const N: usize = 10_000;
const ROUNDS: usize = 50;
const PRODUCING: Duration = Duration::from_millis(2);

#[tokio::main]
async fn main() -> gpu_await::Result<()> {
    let device = Device::from_env()?;
    let (producer, consumer) = (device.stream()?, device.stream()?);
    let axpy = kernels::axpy::load(&device).await?;
    let spin = kernels::spin::load(&device).await?;
    println!("device: {device}");

    let mut slots = [producer.empty::<f32>(N).queued()?, producer.empty::<f32>(N).queued()?];
    let mut sum = consumer.zeros::<f32>(N).queued()?;
    device.done().await?;

    let begin = producer.record_timed()?;
    let start = Instant::now();
    for round in 0..ROUNDS {
        let slot = &mut slots[round % 2];
        spin.launch(&producer, PRODUCING.as_nanos() as u64).queued()?; // producing takes a while
        producer.fill(slot, round as f32).queued()?; // waits for the consumer of two rounds ago
        axpy.launch(&consumer, 1.0, slot, &mut sum).queued()?; // waits for this fill
    }
    // Work that shares no memory is ordered by saying so: a stream, an event or an operation.
    producer.wait(&consumer).queued()?;
    let end = producer.record_timed()?;
    let submitted = start.elapsed();

    let sum = consumer.download(&sum).await?; // the one host wait
    end.done().await?;
    let device_time = end.elapsed_since(&begin)?;

    println!("host:   {} operations submitted in {submitted:.1?}", 3 * ROUNDS);
    println!("device: ran them in {device_time:.1?} ({ROUNDS} rounds of {PRODUCING:?} at least)");
    println!("sum:    {} everywhere", sum[0]);

    let expected = (ROUNDS * (ROUNDS - 1) / 2) as f32;
    assert!(sum.iter().all(|value| *value == expected), "a slot was read early or filled early");
    assert!(device_time >= PRODUCING * ROUNDS as u32, "the rounds did not run in order");
    assert!(submitted < device_time / 2, "the host waited in between: {submitted:?}");
    Ok(())
}
