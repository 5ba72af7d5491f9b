//! Values that work keeps, which hold a handle of the device that keeps them: nothing stays behind a loss or a close.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use futures::executor::block_on;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DlpackConsumer, Error, ErrorKind, Result, Stream, Uses};

use crate::under_test::child;
use crate::under_test::eventually::eventually;

/// A value that is counted while it lives, and whatever it keeps alive.
struct Counted(Arc<AtomicUsize>, #[expect(dead_code, reason = "is kept")] Box<dyn Any + Send>);

impl Counted {
    fn new(alive: &Arc<AtomicUsize>, keeps: impl Send + 'static) -> Counted {
        alive.fetch_add(1, Ordering::SeqCst);
        Counted(alive.clone(), Box::new(keeps))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

type Way = fn(&Device, &Stream, &Arc<AtomicUsize>) -> Result<()>;

fn keep(stream: &Stream, value: Counted) -> Result<()> {
    // SAFETY: nothing is put on the stream.
    unsafe { stream.enqueue(Uses::new("keep").keeps(value), |_, ()| Ok::<_, Error>(())) }.queued()
}

/// Ways to make work keep a handle of its own device.
const WAYS: &[(&str, Way)] = &[
    ("a stream", |_, s, alive| keep(s, Counted::new(alive, s.clone()))),
    ("the device", |d, s, alive| keep(s, Counted::new(alive, d.clone()))),
    ("a buffer", |_, s, alive| {
        let memory = s.zeros::<u8>(1 << 20).queued()?;
        keep(s, Counted::new(alive, memory))
    }),
    ("pinned memory", |d, s, alive| keep(s, Counted::new(alive, d.pinned::<u8>(1 << 10)?))),
    ("an owner", |d, s, alive| {
        let memory = s.zeros::<u8>(64).queued()?;
        let (ptr, owner) = (memory.device_ptr(), Counted::new(alive, (memory, s.clone())));
        // SAFETY: the owner keeps the memory.
        let mut x = unsafe { d.adopt_memory::<u8>(ptr, 64, owner) }?;
        s.fill(&mut x, 1).queued()
    }),
    ("a tensor", |d, s, alive| {
        let kept = s.zeros::<u8>(64).queued()?;
        let (ptr, owner) = (kept.device_ptr(), Counted::new(alive, kept));
        // SAFETY: the owner keeps the memory.
        let x = unsafe { d.adopt_memory::<u8>(ptr, 64, owner) }?;
        let tensor = x.into_dlpack(&[64], DlpackConsumer::Unordered)?;
        // SAFETY: nobody else uses it.
        let mut x = unsafe { s.adopt_dlpack::<u8>(tensor) }?;
        s.fill(&mut x, 1).queued()
    }),
];

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

#[test]
fn a_lost_device_goes_with_what_keeps_it() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::a_lost_device_goes_with_what_keeps_it")) {
        return Ok(());
    }
    let before = threads();
    for (name, way) in WAYS {
        let alive = Arc::new(AtomicUsize::new(0));
        for _ in 0..5 {
            let (faults, handle) = testing::faults();
            let device = testing::host_with(faults);
            let stream = device.stream()?;
            stream.synchronize()?;
            let gate = Gate::close(&stream)?;
            way(&device, &stream, &alive)?;
            handle.lose_device("on purpose");
            assert_eq!(stream.synchronize().unwrap_err().kind(), ErrorKind::DeviceLost);
            drop((gate, stream, device));
        }
        eventually(name, || alive.load(Ordering::SeqCst) == 0);
    }
    eventually("threads", || threads() <= before + 2);
    Ok(())
}

/// The loss comes while somebody looks whether what was given up is still used.
#[test]
fn a_loss_among_what_was_given_up_drops_every_owner() -> Result<()> {
    let alive = Arc::new(AtomicUsize::new(0));
    for _ in 0..60 {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let stream = device.stream()?;
        let gate = Gate::close(&stream)?;
        for _ in 0..500 {
            let theirs = vec![0_u8; 64].into_boxed_slice();
            let (ptr, owner) = (theirs.as_ptr() as u64, Counted::new(&alive, theirs));
            // SAFETY: the owner keeps the memory.
            let mut x = unsafe { device.adopt_memory::<u8>(ptr, 64, owner) }?;
            stream.fill(&mut x, 1).queued()?;
        }
        std::thread::scope(|threads| {
            // Asks again and again whether it is.
            threads.spawn(|| while block_on(device.trim(0)).is_ok() {});
            handle.lose_device("on purpose");
        });
        assert_eq!(stream.synchronize().unwrap_err().kind(), ErrorKind::DeviceLost);
        drop((gate, stream, device));
    }
    eventually("owners", || alive.load(Ordering::SeqCst) == 0);
    Ok(())
}

/// What keeps memory that another device reads stays, though its own device is lost.
#[test]
fn a_loss_leaves_memory_to_a_reader_of_another_device() -> Result<()> {
    let alive = Arc::new(AtomicUsize::new(0));
    let (faults, handle) = testing::faults();
    let (device, reader) = (testing::host_with(faults), Device::host());
    block_on(reader.enable_peer(&device))?;
    let (stream, there) = (device.stream()?, reader.stream()?);
    let adopted = || {
        let theirs = vec![7_u8; 64].into_boxed_slice();
        let (ptr, owner) = (theirs.as_ptr() as u64, Counted::new(&alive, theirs));
        // SAFETY: the owner keeps the memory.
        unsafe { stream.adopt_memory::<u8>(ptr, 64, owner) }
    };
    let (x, unread) = (adopted()?, adopted()?);
    let mut y = there.zeros::<u8>(64).queued()?;
    let gate = Gate::close(&there)?;
    there.copy(&x, &mut y).queued()?;
    handle.lose_device("on purpose");
    assert_eq!(block_on(device.lost()).kind(), ErrorKind::DeviceLost);
    drop(x);
    drop(unread);
    eventually("what nobody reads", || alive.load(Ordering::SeqCst) <= 1);
    drop(gate);
    assert_eq!(block_on(there.download(&y))?, [7; 64]);
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    Ok(())
}

#[test]
fn a_device_that_nobody_steps_goes_with_what_keeps_it() -> Result<()> {
    for (name, way) in WAYS {
        let alive = Arc::new(AtomicUsize::new(0));
        for _ in 0..5 {
            let (device, stepper) = testing::manual();
            let stream = device.stream()?;
            way(&device, &stream, &alive)?;
            drop(stepper);
            drop((stream, device));
        }
        eventually(name, || alive.load(Ordering::SeqCst) == 0);
    }
    Ok(())
}

/// What is being submitted when the stepper goes resolves as well.
#[test]
fn a_stepper_dropped_inside_enqueue_closes_that_operation() -> Result<()> {
    let alive = Arc::new(AtomicUsize::new(0));
    let (device, stepper) = testing::manual();
    let stream = device.stream()?;
    let kept = Counted::new(&alive, ());
    let mut stepper = Some(stepper);
    // SAFETY: nothing is put on the stream.
    let op = unsafe {
        stream.enqueue(Uses::new("last").keeps(kept), |_, ()| {
            drop(stepper.take());
            Ok::<_, Error>(())
        })
    };
    let Some(closed) = op.now_or_never() else { panic!("it stays pending") };
    assert_eq!(closed.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(stream.done().now_or_never().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    drop((stream, device));
    eventually("what it kept", || alive.load(Ordering::SeqCst) == 0);
    Ok(())
}
