//! Memory that grows in place: what stays, what is taken back and when, what nobody may read.

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, ErrorDetail, ErrorKind, GrowableBuffer, InOut, Op, PinnedBuffer, Result, Uses, kernels,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::under_test::cases::config;
use crate::under_test::eventually::eventually;

/// What a GPU of today has, and the host device.
const STEP: u64 = 2 << 20;
const MIB: u64 = 1 << 20;
/// Elements of a step.
const N: usize = STEP as usize / 4;

fn limited(limit: u64) -> (Device, Device) {
    let turn = testing::device();
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    let device = Device::builder().memory_limit_bytes(limit).named(&name);
    (device.expect("the device under test"), turn)
}

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("in time")
}

async fn growable(device: &Device, steps: usize) -> Result<GrowableBuffer<u32>> {
    soon(device.growable(steps * N)).await
}

fn allocated(device: &Device) -> u64 {
    device.memory().expect("asked").allocated_bytes
}

fn is_unwritten<T: std::fmt::Debug>(result: Result<T>) -> bool {
    result.is_err_and(|error| matches!(error.detail(), ErrorDetail::Unwritten { .. }))
}

#[tokio::test]
async fn addresses_stay_while_it_lives() -> Result<()> {
    let device = testing::device();
    let before = allocated(&device);
    let mut table = growable(&device, 1 << 10).await?;
    assert_eq!((table.len(), table.committed_bytes(), allocated(&device)), (0, 0, before));
    soon(table.grow(N / 2)).await?;
    let address = table.device_ptr();
    device.fill(&mut table, 7).queued()?;
    for steps in [1, 3, 40] {
        soon(table.grow(steps * N)).await?;
        assert_eq!(table.device_ptr(), address);
        assert_eq!(table.committed_bytes(), steps as u64 * STEP);
        assert_eq!(allocated(&device), before + steps as u64 * STEP);
    }
    // One view of several steps, and contents from before.
    let mut behind = table.slice_mut(N / 2..)?;
    device.fill(&mut behind, 8).queued()?;
    let read = soon(device.download(&table)).await?;
    assert!(read[..N / 2].iter().all(|x| *x == 7) && read[N / 2..].iter().all(|x| *x == 8));
    soon(device.done()).await?;
    assert_eq!(soon(table.shrink(N + 1)).await?, 38 * STEP);
    assert_eq!(soon(device.download(&table.slice(..N)?)).await?[N / 2 - 1..=N / 2], [7, 8]);
    // Others get none of the addresses behind.
    let others: Result<Vec<_>> = (0..20).map(|_| device.zeros::<u32>(N).queued()).collect();
    let range = address..address + (1 << 10) * STEP;
    assert!(others?.iter().all(|other| !range.contains(&other.device_ptr())));
    let more = soon(device.growable::<u32>(N)).await?;
    drop((table, more));
    eventually("all of it is free", || allocated(&device) <= before + 20 * STEP);
    Ok(())
}

#[tokio::test]
async fn views_end_at_the_length() -> Result<()> {
    let device = testing::device();
    let mut table = growable(&device, 4).await?;
    let beyond = |error: gpu_await::Error, what: (usize, usize)| match *error.detail() {
        ErrorDetail::OutOfBounds { end, len, .. } => assert_eq!((end, len), what),
        ref other => panic!("{other}"),
    };
    beyond(table.slice(..1).unwrap_err(), (1, 0));
    beyond(soon(table.grow(4 * N + 1)).await.unwrap_err(), (4 * N + 1, 4 * N));
    soon(table.grow(100)).await?;
    // Committed, and no part of it.
    beyond(table.slice_mut(..101).unwrap_err(), (101, 100));
    soon(table.grow(50)).await?;
    assert_eq!(table.len(), 100);
    soon(table.shrink(200)).await?;
    assert_eq!(table.len(), 100);
    soon(table.shrink(10)).await?;
    beyond(table.slice(5..11).unwrap_err(), (11, 10));
    assert!(soon(device.growable::<u32>(usize::MAX)).await.is_err());
    Ok(())
}

#[tokio::test]
async fn what_was_cut_off_is_unwritten() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut table = growable(&device, 4).await?;
    soon(table.grow(2 * N)).await?;
    assert!(is_unwritten(soon(stream.download(&table)).await));
    soon(stream.fill(&mut table, 1)).await?;
    // In the middle of a step, and with the step in use: the memory stays.
    let gate = Gate::close(&stream)?;
    stream.fill(&mut table, 2).queued()?;
    assert_eq!(soon(table.shrink(100)).await?, 0);
    soon(table.grow(2 * N)).await?;
    assert_eq!(table.committed_bytes(), 2 * STEP);
    assert!(is_unwritten(stream.download(&table).submitted()));
    gate.open();
    assert_eq!(soon(stream.download(&table.slice(..100)?)).await?, [2; 100]);
    assert!(is_unwritten(soon(stream.download(&table.slice(100..101)?)).await));
    // A step that comes back.
    soon(stream.done()).await?;
    assert_eq!(soon(table.shrink(N)).await?, STEP);
    soon(table.grow(2 * N)).await?;
    assert!(is_unwritten(soon(stream.download(&table.slice(N..)?)).await));
    stream.fill(&mut table, 3).queued()?;
    assert_eq!(soon(stream.download(&table)).await?[2 * N - 1], 3);
    // A failure of what was cut off is forgotten with it, and nobody can go back to data.
    let scale = kernels::scale::load(&device).await?;
    let mut floats = soon(device.growable::<f32>(N)).await?;
    soon(floats.grow(10)).await?;
    stream.fill(&mut floats, 1.0).queued()?;
    let other = testing::peer_device().stream()?;
    assert!(scale.launch(&other, 1.0, &mut floats.view_mut()).queued().is_err());
    soon(floats.shrink(0)).await?;
    soon(floats.grow(10)).await?;
    assert!(floats.view_mut().clear_poison().is_err());
    Ok(())
}

/// Two streams: one step is held by work, the ones behind it are not.
#[tokio::test]
async fn a_step_in_use_stays() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let mut table = growable(&device, 8).await?;
    soon(table.grow(8 * N)).await?;
    soon(a.fill(&mut table, 1)).await?;
    let gate = Gate::close(&b)?;
    b.fill(&mut table.slice_mut(2 * N..2 * N + 1)?, 2).queued()?;
    let read = b.download(&table.slice(4 * N..4 * N + 1)?);
    assert_eq!(soon(table.shrink(N)).await?, 3 * STEP);
    assert_eq!((table.len(), table.committed_bytes()), (N, 5 * STEP));
    gate.open();
    assert_eq!(soon(read).await?, [1]);
    soon(b.done()).await?;
    assert_eq!(soon(table.shrink(N)).await?, 4 * STEP);
    assert_eq!(soon(a.download(&table)).await?, vec![1; N]);
    Ok(())
}

type Shared = Arc<Mutex<GrowableBuffer<f32>>>;

/// What a graph uses beside its arguments it will use again; what it was passed, it forgets.
#[test]
fn a_compiled_list_keeps_its_steps() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load_blocking(&device)?;
    let mut table = block_on(device.growable::<f32>(4 * N))?;
    block_on(table.grow(4 * N))?;
    stream.fill(&mut table, 1.0).synchronize()?;
    let shared: Shared = Arc::new(Mutex::new(table));
    let shrink = || block_on(shared.lock().expect("unpoisoned").shrink(0));
    let state = (scale.clone(), shared.clone());
    let graph = device.graph::<(f32,), _, _>(state, |queue, (scale, shared), (by,)| {
        let mut table = shared.lock().expect("unpoisoned");
        if table.is_empty() {
            return Ok(());
        }
        scale.launch(queue, by, &mut table.slice_mut(N..N + 10)?)
    });
    for by in [2.0, 3.0] {
        graph.launch(&stream, (by,)).synchronize()?;
    }
    let part = shared.lock().expect("unpoisoned");
    let read = stream.download(&part.slice(N..N + 1)?).synchronize()?;
    assert_eq!(read, [6.0]);
    drop(part);
    assert_eq!(shrink()?, 2 * STEP);
    drop(graph);
    assert_eq!(shrink()?, 2 * STEP);
    let passed = device.graph::<(InOut<f32>, f32), _, _>(scale, |queue, scale, (mut x, by)| {
        scale.launch(queue, by, &mut x)
    });
    let mut table = shared.lock().expect("unpoisoned");
    block_on(table.grow(2 * N))?;
    stream.fill(&mut *table, 1.0).queued()?;
    for by in [2.0, 3.0] {
        passed.launch(&stream, (&mut table.view_mut(), by)).synchronize()?;
    }
    assert_eq!(block_on(table.shrink(0))?, 2 * STEP);
    Ok(())
}

/// A region forgets its memory: its next run names what it uses.
#[tokio::test]
async fn a_replayed_list_keeps_nothing() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let scale = kernels::scale::load(&device).await?;
    let mut region = gpu_await::Region::new();
    let mut table = soon(device.growable::<f32>(4 * N)).await?;
    for steps in [1, 2, 3, 4, 2, 1] {
        soon(table.grow(steps * N)).await?;
        soon(table.shrink(steps * N)).await?;
        assert_eq!(table.committed_bytes(), steps as u64 * STEP);
        stream.fill(&mut table, 1.0).queued()?;
        let replayed = stream.replay(&mut region, |queue| {
            scale.launch(queue, 2.0, &mut table.view_mut())?;
            scale.launch(queue, 3.0, &mut table.view_mut())
        });
        soon(replayed).await?;
        let read = soon(stream.download(&table.slice(steps * N - 1..)?)).await?;
        assert_eq!(read, [6.0]);
    }
    Ok(())
}

#[tokio::test]
async fn a_detached_loan_keeps_its_steps() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let mut table = growable(&device, 2).await?;
    soon(table.grow(2 * N)).await?;
    soon(stream.fill(&mut table, 1)).await?;
    let mut part = table.slice_mut(N..)?;
    // SAFETY: nobody uses the memory until the loan is over, and no library does.
    let loan = unsafe { stream.lend_memory(Uses::new("loan").updates(&mut part)) }?;
    // SAFETY: as above.
    let loan = unsafe { loan.detach() };
    soon(stream.done()).await?;
    assert_eq!(soon(table.shrink(0)).await?, 0);
    loan.end()?;
    soon(stream.done()).await?;
    assert_eq!(soon(table.shrink(0)).await?, 2 * STEP);
    Ok(())
}

/// Another device's stream is a user like any other.
#[tokio::test]
async fn a_peer_keeps_its_steps() -> Result<()> {
    let (device, other) = (testing::device(), testing::peer_device());
    let (stream, theirs) = (device.stream()?, other.stream()?);
    let mut table = growable(&device, 2).await?;
    soon(table.grow(2 * N)).await?;
    soon(stream.fill(&mut table, 5)).await?;
    let mut copy = theirs.zeros::<u32>(N).queued()?;
    soon(theirs.done()).await?;
    let gate = Gate::close(&theirs)?;
    theirs.copy(&table.slice(N..)?, &mut copy).queued()?;
    assert_eq!(soon(table.shrink(0)).await?, 0);
    gate.open();
    assert_eq!(soon(theirs.download(&copy)).await?, vec![5; N]);
    soon(theirs.done()).await?;
    assert_eq!(soon(table.shrink(0)).await?, 2 * STEP);
    Ok(())
}

#[tokio::test]
async fn growth_is_within_the_limit() -> Result<()> {
    let (device, _turn) = limited(16 * MIB);
    let stream = device.stream()?;
    let mut table = growable(&device, 100).await?;
    // What a stream keeps makes room.
    let kept: Result<Vec<_>> = (0..12).map(|_| stream.zeros::<u8>(MIB as usize).queued()).collect();
    drop(kept?);
    soon(stream.done()).await?;
    soon(table.grow(7 * N)).await?;
    let error = soon(table.grow(9 * N)).await.unwrap_err();
    match *error.detail() {
        ErrorDetail::OutOfMemory { allocated_bytes, asked_bytes, .. } => {
            assert_eq!((allocated_bytes, asked_bytes), (14 * MIB, 4 * MIB), "{error}");
        }
        ref other => panic!("{other}"),
    }
    assert_eq!((table.len(), table.committed_bytes()), (7 * N, 7 * STEP));
    let error = stream.zeros::<u8>(3 * MIB as usize).queued().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(device.memory()?.free_bytes, 2 * MIB);
    // What is reserved is not given to it, and its memory to no reservation.
    let reservation = device.try_reserve(2 * MIB)?;
    assert_eq!(soon(table.grow(8 * N)).await.unwrap_err().kind(), ErrorKind::OutOfMemory);
    drop(reservation);
    assert!(device.try_reserve(2 * MIB + 1).is_err());
    soon(table.grow(8 * N)).await?;
    let waiting = tokio::spawn({
        let device = device.clone();
        async move { device.reserve(4 * MIB).await.map(drop) }
    });
    tokio::task::yield_now().await;
    assert_eq!(soon(table.shrink(5 * N)).await?, 3 * STEP);
    soon(waiting).await.expect("no panic")?;
    drop(table);
    eventually("it is free", || allocated(&device) == 0);
    Ok(())
}

/// Dropped while work uses it, from a growth on: it goes behind that.
#[tokio::test]
async fn it_goes_behind_its_uses() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let before = allocated(&device);
    let mut table = growable(&device, 4).await?;
    soon(table.grow(2 * N)).await?;
    a.fill(&mut table, 3).queued()?;
    soon(a.done()).await?;
    let gate = Gate::close(&b)?;
    let read = b.download(&table);
    let mut growing = Box::pin(async {
        let mut table = table;
        table.grow(4 * N).await.map(|()| table)
    });
    drop(futures::poll!(&mut growing));
    drop(growing);
    std::thread::sleep(Duration::from_millis(5));
    assert!(allocated(&device) >= before + 2 * STEP);
    gate.open();
    assert_eq!(soon(read).await?, vec![3; 2 * N]);
    eventually("it is free", || allocated(&device) == before);
    Ok(())
}

#[tokio::test]
async fn a_dropped_growth_leaves_the_length() -> Result<()> {
    let device = testing::device();
    let mut table = growable(&device, 8).await?;
    soon(table.grow(N)).await?;
    for round in 0..20 {
        match futures::poll!(Box::pin(table.grow(8 * N))) {
            Poll::Pending => assert_eq!(table.len(), N, "{round}"),
            // The other thread was quicker than this one.
            Poll::Ready(grown) => {
                grown?;
                soon(table.shrink(N)).await?;
            }
        }
        drop(futures::poll!(Box::pin(table.shrink(N))));
        soon(table.grow(2 * N)).await?;
        device.fill(&mut table, round).queued()?;
        assert_eq!(soon(device.download(&table)).await?, vec![round; 2 * N]);
        soon(table.shrink(N)).await?;
        assert_eq!(table.len(), N);
    }
    Ok(())
}

#[tokio::test]
async fn a_lost_or_closed_device_ends_it() -> Result<()> {
    let _turn = testing::device();
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let mut table = growable(&device, 4).await?;
    soon(table.grow(N)).await?;
    handle.lose_device("a test");
    assert!(soon(table.grow(2 * N)).await.unwrap_err().is_device_lost());
    assert!(soon(table.shrink(0)).await.unwrap_err().is_device_lost());
    assert!(soon(growable(&device, 1)).await.is_err());
    drop(table);
    eventually("the account is closed", || device.stats().allocated_bytes == 0);
    let device = Device::host();
    let mut table = growable(&device, 4).await?;
    soon(table.grow(N)).await?;
    soon(device.close(Duration::from_secs(10))).await?;
    assert_eq!(soon(table.grow(2 * N)).await.unwrap_err().kind(), ErrorKind::Closed);
    drop(table);
    eventually("the account is closed", || device.stats().allocated_bytes == 0);
    Ok(())
}

/// Without threads: the calls are made at once.
#[test]
fn it_grows_on_a_stepped_device() -> Result<()> {
    let _turn = testing::device();
    let (device, stepper) = testing::manual();
    let stream = device.stream()?;
    let mut table = block_on(device.growable::<u32>(4 * N))?;
    block_on(table.grow(2 * N))?;
    stream.fill(&mut table, 1).queued()?;
    assert_eq!(block_on(table.shrink(N))?, 0);
    stepper.run_until_idle();
    assert_eq!(block_on(table.shrink(N))?, STEP);
    Ok(())
}

// ---- random programs ----------------------------------------------------------------------------

const RESERVED: usize = 6;
/// Elements of a model's unit: two to a step, so that lengths are also inside of steps.
const UNIT: usize = N / 2;
const UNITS: usize = 2 * RESERVED;

#[derive(Clone, Debug)]
enum Step {
    Grow(usize),
    Shrink(usize),
    /// On a stream, so many units from there on.
    Fill(usize, usize, usize, u32),
    Upload(usize, usize, u32),
    Read(usize, usize, usize),
    Copy(usize, usize, usize),
    /// A growth that is dropped at its first poll, and a shrink likewise.
    Abandon(usize, bool),
    Close(usize),
    Open,
    /// A reservation of so many MiB, or the end of one.
    Reserve(u64),
    Unreserve,
    /// A buffer of so many MiB, from the reservation or not, and the drop of one.
    Make(u64, bool),
    Drop,
    Renew,
}

fn step() -> impl Strategy<Value = Step> {
    let unit = || 0..UNITS;
    prop_oneof![
        4 => (0..=UNITS).prop_map(Step::Grow),
        4 => (0..=UNITS).prop_map(Step::Shrink),
        4 => (0..2_usize, unit(), 1..4_usize, 1..100_u32)
            .prop_map(|(on, at, len, x)| Step::Fill(on, at, len, x)),
        2 => (0..2_usize, unit(), 1..100_u32).prop_map(|(on, at, x)| Step::Upload(on, at, x)),
        3 => (0..2_usize, unit(), 1..4_usize).prop_map(|(on, at, len)| Step::Read(on, at, len)),
        2 => (0..2_usize, unit(), unit()).prop_map(|(on, from, to)| Step::Copy(on, from, to)),
        1 => (0..=UNITS, any::<bool>()).prop_map(|(to, grows)| Step::Abandon(to, grows)),
        1 => (0..2_usize).prop_map(Step::Close),
        2 => Just(Step::Open),
        1 => (1..8_u64).prop_map(Step::Reserve),
        1 => Just(Step::Unreserve),
        2 => (1..6_u64, any::<bool>()).prop_map(|(mib, draws)| Step::Make(mib, draws)),
        2 => Just(Step::Drop),
        1 => Just(Step::Renew),
    ]
}

type Reads = Vec<(Op<PinnedBuffer<u32>>, Vec<u32>)>;

/// What a program knows: for each unit of the buffer its value, if one was written.
async fn random_growth(device: &Device, limit: u64, steps: &[Step]) -> Result<()> {
    let streams = [device.stream()?, device.stream()?];
    let mut table = growable(device, RESERVED).await?;
    let mut model: Vec<Option<u32>> = Vec::new();
    let (mut gates, mut reads): (Vec<Gate>, Reads) = (Vec::new(), Vec::new());
    let (mut reservation, mut buffers) = (None, Vec::new());
    let mut address = table.device_ptr();
    for step in steps {
        match *step {
            Step::Grow(units) => match soon(table.grow(units * UNIT)).await {
                Ok(()) => model.resize(units.max(model.len()), None),
                Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
            },
            Step::Shrink(units) => {
                soon(table.shrink(units * UNIT)).await?;
                model.truncate(units);
                if gates.is_empty() {
                    streams[0].synchronize()?;
                    streams[1].synchronize()?;
                    soon(table.shrink(units * UNIT)).await?;
                    let least = (model.len() as u64).div_ceil(2) * STEP;
                    assert_eq!(table.committed_bytes(), least);
                }
            }
            Step::Abandon(units, true) => {
                drop(futures::poll!(Box::pin(table.grow(units * UNIT))));
                // What it does at its first poll, it may do at once.
                model.resize((table.len() / UNIT).max(model.len()), None);
            }
            Step::Abandon(units, false) => {
                drop(futures::poll!(Box::pin(table.shrink(units * UNIT))));
                model.truncate(units);
            }
            Step::Fill(on, at, len, x) => {
                let end = (at + len).min(model.len());
                if at < end {
                    let mut part = table.slice_mut(at * UNIT..end * UNIT)?;
                    streams[on].fill(&mut part, x).queued()?;
                    model[at..end].fill(Some(x));
                }
            }
            Step::Upload(on, at, x) if at < model.len() => {
                let mut part = table.slice_mut(at * UNIT..(at + 1) * UNIT)?;
                streams[on].upload_into(device.pinned_async(UNIT).await?, &mut part).abandon();
                streams[on].fill(&mut part, x).queued()?;
                model[at] = Some(x);
            }
            Step::Read(on, at, len) => {
                let end = (at + len).min(model.len());
                if at >= end {
                    assert!(table.slice(at * UNIT..(at + len) * UNIT).is_err());
                    continue;
                }
                let read = streams[on].download(&table.slice(at * UNIT..end * UNIT)?).submitted();
                match model[at..end].iter().copied().collect::<Option<Vec<u32>>>() {
                    // As it is, or by a copy of such, which was refused.
                    None => {
                        assert!(read.is_err_and(|error| error.kind() == ErrorKind::InvalidCall))
                    }
                    Some(expected) => reads.push((read?, expected)),
                }
            }
            Step::Copy(on, from, to) if from < to && to < model.len() => {
                let (left, mut right) = table.view_mut().split_at_mut(to * UNIT)?;
                let source = left.slice(from * UNIT..(from + 1) * UNIT)?;
                let copied = streams[on].copy(&source, &mut right.slice_mut(..UNIT)?).queued();
                match model[from] {
                    Some(_) => copied?,
                    None => assert!(copied.is_err()),
                }
                model[to] = model[from];
            }
            Step::Close(on) if gates.is_empty() => gates.push(Gate::close(&streams[on])?),
            Step::Open => drop(gates.pop()),
            Step::Reserve(mib) if reservation.is_none() => {
                reservation = device.try_reserve(mib * MIB).ok();
            }
            Step::Unreserve => reservation = None,
            Step::Make(mib, draws) => {
                let stream = match (&reservation, draws) {
                    (Some(reservation), true) => {
                        let reservation: &gpu_await::Reservation = reservation;
                        // Behind a closed gate it would wait: not in this program.
                        let fits = reservation.left_bytes() >= mib * MIB;
                        let made =
                            reservation.stream(&streams[0])?.zeros::<u8>((mib * MIB) as usize);
                        let made = made.queued();
                        assert_eq!(made.is_ok(), fits, "{:?} {:?}", made.err(), device.memory());
                        buffers.extend(made);
                        continue;
                    }
                    _ => &streams[0],
                };
                buffers.extend(stream.zeros::<u8>((mib * MIB) as usize).queued().ok());
            }
            Step::Drop => drop(buffers.pop()),
            Step::Renew => {
                let fresh = growable(device, RESERVED).await?;
                address = fresh.device_ptr();
                table = fresh;
                model.clear();
            }
            _ => {}
        }
        assert_eq!((table.len(), table.device_ptr()), (model.len() * UNIT, address));
        let info = device.memory()?;
        let held = info.used_bytes + info.kept_bytes + info.leaked_bytes;
        assert!(held <= limit, "{info:?}");
    }
    drop(gates);
    for (read, expected) in reads {
        let read = soon(read).await?;
        for (unit, x) in expected.into_iter().enumerate() {
            assert!(read[unit * UNIT..(unit + 1) * UNIT].iter().all(|found| *found == x));
        }
    }
    soon(device.done()).await?;
    drop((table, buffers, reservation));
    eventually("all of it is free", || {
        device.memory().is_ok_and(|info| info.allocated_bytes == 0 && info.budgeted_bytes == 0)
    });
    Ok(())
}

#[test]
fn random_growth_beside_a_model() {
    const LIMIT: u64 = 16 * MIB;
    let (device, _turn) = limited(LIMIT);
    let mut runner = TestRunner::new(config(24));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let programs = prop::collection::vec(step(), 1..40);
    runner
        .run(&programs, |steps| {
            runtime.block_on(random_growth(&device, LIMIT, &steps)).expect("no error");
            Ok(())
        })
        .unwrap();
}
