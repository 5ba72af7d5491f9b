//! The memory limit: what counts against it, and what an allocation does that does not fit.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceKind, ErrorDetail, ErrorKind, InOut, MemoryAdvice, Pressure, Result, Stream,
    kernels,
};
use proptest::test_runner::TestRunner;

use crate::under_test::cases::config;
use crate::under_test::limited;
use crate::under_test::random::Random;

const MIB: usize = 1 << 20;
/// What a driver's pool takes at a time.
const GRAIN: u64 = 32 << 20;

/// A device of the kind under test, with options. The other one keeps this thread's turn on a GPU.
fn opened(builder: gpu_await::DeviceBuilder) -> (Device, Device) {
    let turn = testing::device();
    (named(builder), turn)
}

/// Another one, for a thread that has its turn.
fn named(builder: gpu_await::DeviceBuilder) -> Device {
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    builder.named(&name).expect("the device under test")
}

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("in time")
}

fn reserved(device: &Device) -> u64 {
    device.memory().expect("asked").reserved_bytes
}

/// Six streams, each held up, each with 48 MiB whose free waits there: 288 MiB.
#[tokio::test]
async fn frees_that_wait_count() -> Result<()> {
    const LIMIT: u64 = 64 << 20;
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(LIMIT));
    let mut gates = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..6 {
        let stream = device.stream()?;
        gates.push(Gate::close(&stream)?);
        drop(stream.zeros::<u8>(48 * MIB).queued()?);
        streams.push(stream);
    }
    drop(gates);
    for stream in &streams {
        stream.done().await?;
        assert!(reserved(&device) <= LIMIT, "{:?}", device.memory());
    }
    assert!(device.memory()?.reserved_peak_bytes <= LIMIT, "{:?}", device.memory());
    Ok(())
}

/// Twenty streams that may keep 8 MiB each: 160 MiB.
#[tokio::test]
async fn block_caches_count() -> Result<()> {
    const LIMIT: u64 = 16 << 20;
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(LIMIT));
    let streams: Result<Vec<_>> = (0..20).map(|_| device.stream()).collect();
    for stream in streams? {
        let blocks: Result<Vec<_>> = (0..8).map(|_| stream.zeros::<u8>(MIB).queued()).collect();
        drop(blocks?);
        stream.done().await?;
    }
    let peak = device.memory()?.reserved_peak_bytes;
    assert!(peak <= LIMIT.next_multiple_of(GRAIN), "{peak}");
    Ok(())
}

/// A driver's pool reserves whole chunks: what it cannot use of them does not count.
#[tokio::test]
async fn what_fits_beside_holes_is_given() -> Result<()> {
    let (_first, _turn) = opened(Device::builder());
    limited::fits_beside_holes(|limit| named(Device::builder().memory_limit_bytes(limit))).await
}

/// After `synchronize()` the same call succeeds.
#[tokio::test]
async fn what_only_waits_is_taken_over() -> Result<()> {
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(64 << 20));
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.zeros::<u8>(40 * MIB).queued()?;
    let gate = Gate::close(&a)?;
    a.fill(&mut x, 1).queued()?;
    b.fill(&mut x, 2).queued()?;
    drop(x);
    let y = b.full(40 * MIB, 3u8).queued()?;
    let z = b.download(&y.slice(..10)?);
    gate.open();
    assert_eq!(z.await?, [3; 10]);
    Ok(())
}

/// A stream's own memory needs no wait: deep queues of temporaries do not grow.
#[tokio::test]
async fn a_deep_queue_of_temporaries_does_not_grow() -> Result<()> {
    const LIMIT: u64 = 6 << 20;
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(pressure);
        let (device, _turn) = opened(builder);
        let stream = device.stream()?;
        let gate = Gate::close(&stream)?;
        for n in 0..100 {
            // Of changing sizes, so that no block fits the next.
            drop(stream.zeros::<u8>(2 * MIB + (n * 7 % 20) * MIB / 10).queued()?);
            // How much of it is pending depends on who was at the stream when it was dropped; without
            // being used again, the third would be refused.
            let stats = device.stats();
            assert!(limited::held(&stats) <= LIMIT, "{stats:?}");
        }
        gate.open();
        soon(stream.done()).await?;
        assert_eq!(device.stats().pending_bytes, 0);
        let peak = device.memory()?.reserved_peak_bytes;
        assert!(peak <= LIMIT.next_multiple_of(GRAIN), "{peak}");
    }
    Ok(())
}

/// Whatever holds it: a block cache, a free on a stream, several streams.
#[tokio::test]
async fn a_block_taken_over_waits_for_its_last_use() -> Result<()> {
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(8 << 20));
    let (a, b, c) = (device.stream()?, device.stream()?, device.stream()?);
    let scale = kernels::scale::load(&device).await?;
    let n = MIB / 4;
    for round in 0..12 {
        let gate = Gate::close(&a)?;
        let mut pieces = Vec::new();
        let mut later = Vec::new();
        for _ in 0..[8, 4, 2][round % 3] {
            let mut x = a.full(n * 8 / [8, 4, 2][round % 3], 1.0f32).queued()?;
            scale.launch(&a, 3.0, &mut x).queued()?;
            if round % 2 == 1 {
                scale.launch(&b, 2.0, &mut x).queued()?;
                later.push((b.download(&x), 6.0));
            } else {
                later.push((a.download(&x), 3.0));
            }
            pieces.push(x);
        }
        drop(pieces);
        // All of it, in one piece.
        let y = c.full(8 * n, 5.0f32).queued()?;
        later.push((c.download(&y), 5.0));
        let waiting = soon_pending(&mut later).await;
        assert!(waiting, "it waits for the gate");
        drop(y);
        gate.open();
        for (op, expected) in later {
            assert!(soon(op).await?.iter().all(|x| *x == expected));
        }
        let stats = device.stats();
        assert!(limited::held(&stats) <= 8 << 20, "{stats:?}");
    }
    Ok(())
}

/// Whether the last of them is not ready at once.
async fn soon_pending<T>(ops: &mut [(gpu_await::Op<T>, f32)]) -> bool {
    let last = &mut ops.last_mut().expect("one").0;
    futures::poll!(last).is_pending()
}

/// Told to fail, an allocation waits for no other stream, and says what would help.
#[tokio::test]
async fn under_fail_reclaimed_says_when() -> Result<()> {
    const LIMIT: u64 = 64 << 20;
    let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    let kept = b.zeros::<u8>(10 * MIB).queued()?;
    let gate = Gate::close(&a)?;
    drop(a.zeros::<u8>(40 * MIB).queued()?);
    let error = b.zeros::<u8>(30 * MIB).queued().unwrap_err();
    assert_eq!(limited::told(&error), [40 << 20, 10 << 20, 40 << 20, 0, LIMIT]);
    assert!(error.to_string().contains("await `reclaimed`"), "{error}");
    // What the stream itself gave up it has at once, with what is free.
    drop(a.zeros::<u8>(50 * MIB).queued()?);
    let mut reclaimed = Box::pin(b.reclaimed(30 << 20));
    assert!(futures::poll!(&mut reclaimed).is_pending());
    // Given up, and awaited again.
    drop(reclaimed);
    let mut reclaimed = Box::pin(b.reclaimed(30 << 20));
    assert!(futures::poll!(&mut reclaimed).is_pending());
    gate.open();
    soon(reclaimed).await?;
    let y = b.full(30 * MIB, 5u8).queued()?;
    assert_eq!(soon(b.download(&y.slice(..3)?)).await?, [5; 3]);
    // Beside the buffers there is no room for that, whatever completes.
    let error = soon(b.reclaimed(25 << 20)).await.unwrap_err();
    assert_eq!(limited::told(&error)[1], 40 << 20);
    assert!(
        error.to_string().contains(": drop buffers, ask for less, or raise the limit"),
        "{error}"
    );
    soon(b.reclaimed(24 << 20)).await?;
    soon(device.reclaimed(24 << 20)).await?;
    drop((kept, y));
    soon(device.done()).await?;
    // There are no buffers to drop.
    let error = soon(b.reclaimed(LIMIT + 1)).await.unwrap_err();
    assert!(error.to_string().contains(": ask for less, or raise the limit"), "{error}");
    Ok(())
}

#[tokio::test]
async fn a_reclaimed_future_hears_of_a_drop() -> Result<()> {
    const LIMIT: u64 = 16 << 20;
    let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    for round in 0..50 {
        let gate = Gate::close(&a)?;
        drop(a.zeros::<u8>(9 * MIB).queued()?);
        let x = b.zeros::<u8>(7 * MIB).queued()?;
        soon(b.done()).await?;
        let waiting = tokio::spawn({
            let b = b.clone();
            async move { b.reclaimed(7 << 20).await }
        });
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        // On a thread of its own: nobody polls for it.
        std::thread::spawn(move || drop(x)).join().expect("drops");
        soon(waiting).await.expect("no panic")?;
        assert!(!gate.timed_out());
        gate.open();
        soon(device.done()).await?;
    }
    Ok(())
}

/// Nobody has the stream any more that the memory waits for.
#[tokio::test]
async fn memory_of_a_dropped_stream_is_reclaimed() -> Result<()> {
    const LIMIT: u64 = 16 << 20;
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(pressure);
        let (device, _turn) = opened(builder);
        let (a, c) = (device.stream()?, device.stream()?);
        let gate = Gate::close(&c)?;
        a.wait(&c).queued()?;
        let small = a.zeros::<u8>(MIB).queued()?;
        drop(a.zeros::<u8>(9 * MIB).queued()?);
        drop((small, a));
        let b = device.stream()?;
        // What it keeps goes with it.
        let stats = device.stats();
        assert_eq!((stats.pending_bytes, stats.kept_bytes), (9 << 20, 1 << 20));
        let reclaimed = b.reclaimed(9 << 20);
        let open = async {
            tokio::task::yield_now().await;
            gate.open();
        };
        let (reclaimed, ()) = soon(async { tokio::join!(reclaimed, open) }).await;
        reclaimed?;
        // And what it kept.
        soon(b.reclaimed(LIMIT)).await?;
        soon(b.zeros::<u8>(16 * MIB)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_or_closed_device_reclaims_nothing() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (a, b) = (device.stream()?, device.stream()?);
    let total = device.memory()?.total_bytes;
    let gate = Gate::close(&a)?;
    drop(a.empty::<u8>((total - (1 << 20)) as usize).queued()?);
    let mut reclaimed = Box::pin(b.reclaimed(total - (2 << 20)));
    assert!(futures::poll!(&mut reclaimed).is_pending());
    handle.lose_device("on purpose");
    assert!(soon(reclaimed).await.unwrap_err().is_device_lost());
    drop(gate);
    let device = Device::host();
    device.close(Duration::from_secs(1)).await?;
    let error = soon(device.default_stream().reclaimed(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    Ok(())
}

/// Counted for good, and against the limit: on the stream, behind several, and taken over.
#[tokio::test]
async fn a_refused_free_is_counted() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let (a, b) = (device.stream()?, device.stream()?);
    handle.fail_nth(DriverCall::Free, 1, ErrorKind::Unsupported);
    drop(a.zeros::<u8>(5000).queued()?);
    assert_eq!(device.stats().leaked_bytes, 5120);
    let mut x = a.zeros::<u8>(2000).queued()?;
    b.fill(&mut x, 1).queued()?;
    handle.fail_nth(DriverCall::Free, 1, ErrorKind::Unsupported);
    drop(x);
    soon(async {
        while device.stats().leaked_bytes < 5120 + 2048 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    // Beside an operation that failed.
    handle.fail_nth(DriverCall::Fill, 1, ErrorKind::Unsupported);
    handle.fail_nth(DriverCall::Free, 1, ErrorKind::Unsupported);
    assert!(a.zeros::<u8>(1000).queued().is_err());
    let stats = device.stats();
    assert_eq!((stats.leaked_bytes, stats.allocated_bytes, stats.pending_bytes), (8192, 0, 0));
    assert_eq!(device.memory()?.leaked_bytes, 8192);
    // The device goes on.
    assert_eq!(soon(a.download(&a.full(9, 7u8).queued()?)).await?, [7; 9]);
    Ok(())
}

#[tokio::test]
async fn the_figures_are_those_of_every_device() -> Result<()> {
    let (device, _turn) = opened(Device::builder());
    assert_eq!(limited::figures(&device).await?, limited::FIGURES);
    Ok(())
}

/// From 1 MiB to 1 GiB on a GPU, and to 16 MiB on a host device. All programs with a limit share a device, and the holes in
/// its pool.
#[test]
fn random_programs_stay_within_the_limit() {
    let (first, _turn) = opened(Device::builder());
    let is_host = first.kind() == DeviceKind::Host;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let devices = RefCell::new(HashMap::new());
    let programs = limited::programs(if is_host { 4 } else { 10 });
    let (start, config) = (Instant::now(), config(48));
    let cases = config.cases;
    let outcome = TestRunner::new(config).run(&programs, |program| {
        let limit = (program.limit, program.waits);
        // Where the program fails, it is not put back.
        let known = devices.borrow_mut().remove(&limit);
        let (device, mut streams) = known.unwrap_or_else(|| {
            let pressure = if program.waits { Pressure::Wait } else { Pressure::Fail };
            let builder = Device::builder().memory_limit_bytes(program.limit).on_pressure(pressure);
            let device = named(builder.spare_bytes_per_stream(program.limit / 4));
            let streams = runtime.block_on(limited::streams(&device)).expect("streams");
            (device, streams)
        });
        let run = limited::run(&device, &mut streams, &program);
        runtime.block_on(run).expect("only what the model says");
        let info = device.memory().expect("asked");
        assert!(!is_host || info.reserved_peak_bytes <= program.limit, "{info:?}");
        devices.borrow_mut().insert(limit, (device, streams));
        Ok(())
    });
    println!("{cases} programs in {:?}", start.elapsed());
    for ((limit, _), (device, _)) in &*devices.borrow() {
        println!("{limit}: {} reserved at most", device.memory().unwrap().reserved_peak_bytes);
    }
    outcome.unwrap_or_else(|failed| panic!("{failed}"));
}

/// What cannot be there takes nothing from anybody, and makes nobody wait.
#[tokio::test]
async fn a_hopeless_allocation_disturbs_nobody() -> Result<()> {
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(16 << 20));
    let (a, b) = (device.stream()?, device.stream()?);
    drop((a.zeros::<u8>(5000).queued()?, b.zeros::<u8>(5000).queued()?));
    let _held = a.zeros::<u8>(9 * MIB).queued()?;
    soon(device.done()).await?;
    let gate = Gate::close(&a)?;
    drop(a.zeros::<u8>(3 * MIB).queued()?);
    let before = device.stats();
    assert!(before.kept_bytes > 0 && before.pending_bytes == 3 << 20, "{before:?}");
    for bytes in [8 * MIB, 1 << 40] {
        assert_eq!(b.empty::<u8>(bytes).queued().unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
    let after = device.stats();
    assert_eq!((after.kept_bytes, after.pending_bytes), (before.kept_bytes, before.pending_bytes));
    // Nothing on the stream waits for the gate.
    soon(b.host_fn(|| ())).await?;
    assert!(!gate.timed_out());
    Ok(())
}

/// A block is rounded so that it can be kept; not where that is what does not fit.
#[tokio::test]
async fn a_block_that_does_not_fit_is_not_rounded() -> Result<()> {
    for pressure in [Pressure::Wait, Pressure::Fail] {
        let builder = Device::builder().memory_limit_bytes(1_000_000).on_pressure(pressure);
        let (device, _turn) = opened(builder);
        let stream = device.stream()?;
        for bytes in [950_000, 999_424] {
            let x = stream.full(bytes, 7u8).queued()?;
            assert_eq!(device.stats().allocated_bytes, bytes.next_multiple_of(512) as u64);
            assert!(soon(stream.download(&x)).await?.iter().all(|byte| *byte == 7));
            drop(x);
            soon(stream.reclaimed(999_424)).await?;
        }
        // Beside a buffer that leaves room for the one, and not for the other.
        let _held = stream.zeros::<u8>(1024).queued()?;
        drop(stream.zeros::<u8>(950_000).queued()?);
        assert!(stream.zeros::<u8>(999_424).queued().is_err());
    }
    Ok(())
}

fn advice(error: &gpu_await::Error) -> MemoryAdvice {
    match *error.detail() {
        ErrorDetail::OutOfMemory { advice, driver_refused: false, .. } => advice,
        ref other => panic!("{other}"),
    }
}

/// What a stream keeps while its work goes on is not free, and comes free by itself.
#[tokio::test]
async fn what_is_kept_and_in_use_is_reclaimable() -> Result<()> {
    const LIMIT: u64 = 64 << 10;
    let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    let mut x = a.zeros::<u8>(40 << 10).await?;
    let gate = Gate::close(&a)?;
    a.fill(&mut x, 1).queued()?;
    drop(x);
    let refused = b.empty::<u8>(40 << 10).queued().unwrap_err();
    match *refused.detail() {
        ErrorDetail::OutOfMemory { reclaimable_bytes, free_bytes, kept_bytes, advice, .. } => {
            assert_eq!((reclaimable_bytes, kept_bytes), (40 << 10, 40 << 10), "{refused}");
            assert_eq!(free_bytes, LIMIT - (40 << 10), "{refused}");
            assert_eq!(device.memory()?.free_bytes, free_bytes);
            assert_eq!(advice, MemoryAdvice::Reclaim, "{refused}");
        }
        ref other => panic!("{other}"),
    }
    gate.open();
    soon(b.reclaimed(40 << 10)).await?;
    b.empty::<u8>(40 << 10).queued()?;
    Ok(())
}

/// A full cache whose last uses have not run: `memory` and the error say the same, and it adds up.
#[tokio::test]
async fn kept_and_in_use_is_not_free() -> Result<()> {
    const LIMIT: u64 = 8 << 20;
    let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    let blocks: Result<Vec<_>> = (0..8).map(|_| a.zeros::<u8>(MIB).queued()).collect();
    let mut blocks = blocks?;
    soon(a.done()).await?;
    let gate = Gate::close(&a)?;
    for block in &mut blocks {
        a.fill(block, 1).queued()?;
    }
    drop(blocks);
    let info = device.memory()?;
    assert_eq!((info.free_bytes, info.kept_bytes, info.pending_bytes), (0, LIMIT, 0), "{info:?}");
    let refused = b.empty::<u8>(3 * MIB).queued().unwrap_err();
    assert_eq!(limited::told(&refused), [LIMIT, 0, 0, LIMIT, LIMIT], "{refused}");
    assert_eq!(limited::told_free(&refused), 0, "{refused}");
    gate.open();
    soon(b.reclaimed(3 << 20)).await?;
    b.empty::<u8>(3 * MIB).queued()?;
    Ok(())
}

/// Work that was queued behind the last use of what was given up delays nobody who needs the memory.
#[tokio::test]
async fn what_was_given_up_comes_free_behind_its_last_use() -> Result<()> {
    for (limit, bytes) in [(64 << 10, 40 << 10), (8 << 20, 6 << 20)] {
        let builder = Device::builder().memory_limit_bytes(limit).on_pressure(Pressure::Fail);
        let (device, _turn) = opened(builder);
        let (a, b) = (device.stream()?, device.stream()?);
        let spin = kernels::spin::load(&device).await?;
        let mut x = a.zeros::<u8>(bytes).await?;
        spin.launch(&a, 10_000_000).queued()?;
        a.fill(&mut x, 1).queued()?;
        drop(x);
        spin.launch(&a, 400_000_000).queued()?;
        soon(b.reclaimed(bytes as u64)).await?;
        assert!(a.backlog() > 0, "{bytes}: what is behind is done as well");
        b.empty::<u8>(bytes).queued()?;
        soon(a.done()).await?;
    }
    Ok(())
}

/// `reclaimed` is recommended where it waits, and not where it would refuse.
#[tokio::test]
async fn the_advice_is_what_helps() -> Result<()> {
    const LIMIT: u64 = 1 << 20;
    let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    drop(a.zeros::<u8>(256 << 10).queued()?);
    let held = a.zeros::<u8>(512 << 10).queued()?;
    soon(device.done()).await?;
    // What is kept is counted as that alone.
    let error = b.zeros::<u8>(768 << 10).queued().unwrap_err();
    assert_eq!(advice(&error), MemoryAdvice::DropBuffers);
    assert!(error.to_string().contains("262144 free within the limit of 1048576"), "{error}");
    assert!(error.to_string().contains("or raise the limit"), "{error}");
    assert_eq!(limited::told(&error)[0], 0);
    let error = soon(b.reclaimed(768 << 10)).await.unwrap_err();
    assert_eq!(advice(&error), MemoryAdvice::DropBuffers);
    // Kept by a stream that still uses it.
    let gate = Gate::close(&a)?;
    drop(a.zeros::<u8>(512 << 10).queued()?);
    let error = b.zeros::<u8>(512 << 10).queued().unwrap_err();
    assert_eq!(advice(&error), MemoryAdvice::Reclaim);
    let mut reclaimed = Box::pin(b.reclaimed(512 << 10));
    assert!(futures::poll!(&mut reclaimed).is_pending());
    gate.open();
    soon(reclaimed).await?;
    drop(b.zeros::<u8>(512 << 10).queued()?);
    drop(held);
    Ok(())
}

fn driver_refused(error: &gpu_await::Error) -> (MemoryAdvice, u64) {
    match *error.detail() {
        ErrorDetail::OutOfMemory { advice, pending_bytes, driver_refused: true, .. } => {
            (advice, pending_bytes)
        }
        ref other => panic!("{other}"),
    }
}

/// A device that claims more than there is, and refuses what it cannot have: nothing that comes back
/// would be enough.
#[tokio::test]
async fn waiting_is_not_advised_where_it_cannot_help() -> Result<()> {
    let device = Device::builder().host_memory_bytes(u64::MAX).host();
    let stream = device.stream()?;
    for bytes in [usize::MAX / 2, 1 << 62] {
        let gate = Gate::close(&stream)?;
        // More than a stream keeps.
        drop(stream.zeros::<u8>(3 * MIB).queued()?);
        let error = stream.empty::<u8>(bytes).queued().unwrap_err();
        assert_eq!(driver_refused(&error), (MemoryAdvice::DropBuffers, 3 << 20), "{error}");
        let error = soon(stream.reclaimed(bytes as u64)).await.unwrap_err();
        assert_eq!(driver_refused(&error), (MemoryAdvice::DropBuffers, 3 << 20), "{error}");
        gate.open();
        soon(device.done()).await?;
    }
    Ok(())
}

/// Neither what streams kept before, nor what is dropped later.
#[tokio::test]
async fn a_closed_device_keeps_nothing() -> Result<()> {
    for limit in [u64::MAX, 16 << 20] {
        let (device, _turn) = opened(Device::builder().memory_limit_bytes(limit));
        let streams = [device.stream()?, device.stream()?];
        let held = streams[0].zeros::<u8>(MIB).queued()?;
        for stream in &streams {
            drop(stream.zeros::<u8>(MIB).queued()?);
        }
        assert_eq!(device.stats().kept_bytes, 2 << 20);
        device.close(Duration::from_secs(10)).await?;
        assert_eq!(device.stats().kept_bytes, 0);
        drop(held);
        assert_eq!(device.stats().kept_bytes, 0);
        soon(async {
            while limited::held(&device.stats()) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }
    Ok(())
}

/// A close that is given up closes all the same: what streams keep goes when they are through, and who
/// waits for memory is told at once.
#[tokio::test]
async fn a_close_that_times_out_leaves_no_caches_and_nobody_waiting() -> Result<()> {
    let builder = Device::builder().memory_limit_bytes(4 << 20).on_pressure(Pressure::Fail);
    let (device, _turn) = opened(builder);
    let (a, b) = (device.stream()?, device.stream()?);
    drop(b.zeros::<u8>(100_000).queued()?);
    b.done().await?;
    assert!(device.stats().kept_bytes > 0);
    let gate = Gate::close(&a)?;
    drop(a.zeros::<u8>(3 * MIB).queued()?);
    let mut waiting = std::pin::pin!(b.reclaimed(3 << 20));
    assert!(futures::poll!(&mut waiting).is_pending());
    let closed = device.close(Duration::ZERO).await;
    assert_eq!(closed.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(soon(waiting).await.unwrap_err().kind(), ErrorKind::Closed);
    gate.open();
    soon(async {
        while device.stats().in_flight > 0 || device.stats().pending_bytes > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(device.stats().kept_bytes, 0);
    Ok(())
}

/// Six streams whose work takes a while, buffers that cross them, drops at random: what the device
/// holds never exceeds the limit, at no step and in between.
#[test]
fn streams_that_cross_stay_within_the_limit() -> Result<()> {
    const LIMIT: u64 = 64 << 20;
    for (seed, pressure) in [(1, Pressure::Fail), (2, Pressure::Wait)] {
        let builder = Device::builder().memory_limit_bytes(LIMIT).on_pressure(pressure);
        let (device, _turn) = opened(builder);
        let streams: Result<Vec<_>> = (0..6).map(|_| device.stream()).collect();
        let (mut streams, spin) = (streams?, kernels::spin::load_blocking(&device)?);
        let mut random = Random(0x5EED + seed);
        let mut buffers = Vec::new();
        let mut made = 0;
        for step in 0..800 {
            let stream = &streams[random.below(6)];
            match random.below(8) {
                0..4 => match stream.zeros::<u8>((1 + random.below(40)) * MIB).queued() {
                    // Half of them are dropped at once: their frees are behind what made them.
                    Ok(buffer) => {
                        made += 1;
                        buffers.extend(Some(buffer).filter(|_| made % 2 == 0));
                    }
                    Err(error) if error.kind() == ErrorKind::OutOfMemory => {}
                    Err(error) => return Err(error),
                },
                4 => spin.launch(stream, random.below(200_000) as u64).queued()?,
                5 => drop(stream.host_fn(std::thread::yield_now).submitted()?),
                6 if !buffers.is_empty() => {
                    let index = random.below(buffers.len());
                    stream.fill(&mut buffers[index], step as u8).queued()?;
                }
                _ => {
                    match random.below(12) {
                        // The free that follows waits for nothing, and has yet to run.
                        0..4 => device.synchronize()?,
                        4 => streams[random.below(6)] = device.stream()?,
                        _ => {}
                    }
                    if !buffers.is_empty() {
                        drop(buffers.swap_remove(random.below(buffers.len())));
                    }
                }
            }
            let info = device.memory()?;
            let held = info.allocated_bytes + info.pending_bytes + info.kept_bytes;
            assert!(held <= LIMIT && held + info.free_bytes == LIMIT, "step {step}: {info:?}");
            assert!(info.used_peak_bytes <= LIMIT, "up to step {step}: {info:?}");
            // A GPU's driver counts chunks, and the holes in them.
            let is_host = device.kind() == DeviceKind::Host;
            assert!(!is_host || info.reserved_peak_bytes <= LIMIT, "up to step {step}: {info:?}");
        }
        assert!(made > 80, "{made} buffers");
    }
    Ok(())
}

/// Four threads, each with up to two buffers of an eighth of the limit that another stream used as well:
/// whoever asks finds the rest in use, in a cache, freed, given up, or in another thread's hands.
#[test]
fn what_fits_is_not_refused_whatever_other_threads_do() -> Result<()> {
    const LIMIT: u64 = 8 << 20;
    let builder = Device::builder().memory_limit_bytes(LIMIT).spare_bytes_per_stream(1 << 20);
    let (device, _turn) = opened(builder);
    let streams: Result<Vec<_>> = (0..4).map(|_| device.stream()).collect();
    let streams = &streams?;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut random = Random(0x5EED + thread as u64);
                let mut held = None;
                for _ in 0..2_000 {
                    let len = MIB >> random.below(3);
                    let mut made = streams[thread].full(len, 1u8).queued().expect("it fits");
                    let other = &streams[random.below(4)];
                    other.fill(&mut made, 2).queued().expect("fills");
                    held = Some(made);
                }
                drop(held);
            });
        }
    });
    Ok(())
}

/// What closures of graphs made is there for others, and made again when the graph is launched.
#[test]
fn memory_of_graphs_is_given_up_for_others() -> Result<()> {
    const LEN: usize = MIB / 4;
    const STREAMS: usize = 7;
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(8 * MIB as u64));
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(InOut<f32>,), _, _>(axpy, |q, axpy, (mut y,)| {
        let through = q.full(LEN, 1.0f32)?;
        axpy.launch(q, 1.0, &through, &mut y)
    });
    let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
    let launch = |stream: &Stream| -> Result<()> {
        let mut y = stream.full(LEN, 2.0f32).queued()?;
        graph.launch(stream, (&mut y,)).queued()?;
        assert_eq!(*stream.download(&y).synchronize()?, [3.0f32; LEN]);
        Ok(())
    };
    let two = || -> Result<()> {
        let stream = device.stream()?;
        drop(stream.zeros::<u8>(2 * MIB).queued()?);
        stream.synchronize()
    };
    for _ in 0..2 {
        streams.iter().try_for_each(launch)?;
        two()?;
    }
    streams.iter().try_for_each(launch)?;
    futures::executor::block_on(device.stream()?.reclaimed(2 * MIB as u64))?;
    two()?;
    streams.iter().try_for_each(launch)?;
    futures::executor::block_on(device.trim(0))?;
    assert_eq!(device.stats().allocated_bytes, 0);
    launch(&streams[0])
}

/// One task drops the last handle of a stream while another takes the memory that a graph keeps for it.
#[test]
fn streams_go_while_graphs_give_up_memory() {
    // A second of them met the lock under which streams ended, in each of four runs.
    const ROUNDS: usize = 500;
    let (round_ended, rounds) = mpsc::channel();
    let runs = thread::spawn(move || streams_and_takers(ROUNDS, &|| round_ended.send(()).is_ok()));
    // The device is open, after other tests' turns on a GPU.
    rounds.recv().expect("it opens");
    for round in 0..ROUNDS {
        match rounds.recv_timeout(Duration::from_secs(20)) {
            Ok(()) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("round {round} does not end"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    runs.join().expect("no panic").expect("no error");
}

fn streams_and_takers(rounds: usize, ended: &dyn Fn() -> bool) -> Result<()> {
    const LEN: usize = MIB / 16;
    const KEPT: usize = 12;
    let (device, _turn) = opened(Device::builder().memory_limit_bytes(8 * MIB as u64));
    let axpy = kernels::axpy::load_blocking(&device)?;
    let graph = device.graph::<(InOut<f32>,), _, _>(axpy, |q, axpy, (mut y,)| {
        let kept = (0..KEPT).map(|_| q.empty(LEN)).collect::<Result<Vec<_>>>()?;
        kept.into_iter().try_for_each(|mut kept| {
            let mut used = kept.slice_mut(..y.len())?;
            q.fill(&mut used, 1.0)?;
            axpy.launch(q, 1.0, &used, &mut y)
        })
    });
    let other = device.stream()?;
    let mut y = other.full(16, 0.0f32).queued()?;
    ended();
    for round in 0..rounds {
        let stream = device.stream()?;
        graph.launch(&stream, (&mut y,)).synchronize()?;
        let start = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                drop(stream);
            });
            start.wait();
            match round % 8 {
                0 => drop(futures::executor::block_on(device.trim(0))),
                1 => drop(futures::executor::block_on(other.reclaimed(6 * MIB as u64))),
                // Another task's stream may not have given its blocks back yet.
                _ => drop(other.empty::<u8>(6 * MIB).submitted()),
            }
        });
        if !ended() {
            break;
        }
    }
    other.synchronize()
}
