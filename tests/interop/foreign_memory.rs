//! Memory of other libraries as buffers, buffers lent to other libraries, and streams lent to them: what is ordered,
//! what is kept, and what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Device, DeviceBuffer, DeviceKind, ErrorDetail, ErrorKind, MemoryProblem, RawQueue, Result,
    Stream, Uses, kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;

const LEN: usize = 1000;

/// Keeps memory of another library, and tells when it is dropped, on which thread.
struct Owner {
    _memory: DeviceBuffer<f32>,
    told: Sender<Option<String>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.told.send(std::thread::current().name().map(str::to_owned)).ok();
    }
}

/// Memory of another library: on a GPU what another device made of the same GPU has.
struct Theirs {
    stream: Stream,
    ptr: u64,
    owner: Owner,
    dropped: Receiver<Option<String>>,
}

/// The other library is another handle of the same device's: its tickets and its hazards are its own, because only the
/// address and the raw stream leave it.
fn theirs(device: &Device, value: f32) -> Result<Theirs> {
    let stream = device.stream()?;
    let memory = stream.full(LEN, value).synchronize()?;
    let (told, dropped) = channel();
    Ok(Theirs { ptr: memory.device_ptr(), stream, owner: Owner { _memory: memory, told }, dropped })
}

/// A stream of the other library's, as this one sees it.
fn adopted(device: &Device, theirs: &Stream) -> Result<Stream> {
    // SAFETY: the owner below keeps the stream.
    let handle = unsafe { theirs.as_raw() };
    // SAFETY: the owner keeps the stream, and nobody captures it.
    unsafe { Stream::from_raw(device, handle, theirs.clone()) }
}

// ---- memory that is adopted ---------------------------------------------------------------------

#[tokio::test]
async fn a_buffer_like_any_other() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let Theirs { ptr, owner, dropped, .. } = theirs(&device, 3.0)?;
    let used = device.memory()?.allocated_bytes;
    // SAFETY: the owner keeps the memory, and nobody else uses it.
    let mut x = unsafe { device.adopt_memory::<f32>(ptr, LEN, owner) }?;
    assert_eq!((x.device_ptr(), x.len()), (ptr, LEN));
    assert_eq!(device.memory()?.allocated_bytes, used);
    let axpy = kernels::axpy::load(&device).await?;
    let ones = a.ones(LEN).queued()?;
    // Ordered across streams, by ranges.
    let gate = Gate::close(&a)?;
    axpy.launch(&a, 2.0, &ones, &mut x).queued()?;
    let seen = b.download(&x.slice(10..20)?);
    assert!(!seen.is_complete());
    gate.open();
    assert_eq!(seen.await?, [5.0; 10]);
    let (mut left, mut right) = x.split_at_mut(500)?;
    a.fill(&mut left, 1.0).queued()?;
    b.fill(&mut right, 2.0).queued()?;
    let frozen = x.freeze().await?;
    assert_eq!(&b.download(&frozen).await?[499..501], [1.0, 2.0]);
    assert!(dropped.try_recv().is_err());
    drop(frozen);
    assert_eq!(dropped.recv_timeout(SOON).expect("it goes").as_deref(), Some("gpu-await-reaper"));
    assert_eq!(device.stats().unreturned, 0);
    Ok(())
}

#[tokio::test]
async fn the_owner_goes_behind_the_last_use() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let Theirs { ptr, owner, dropped, .. } = theirs(&device, 3.0)?;
    // SAFETY: the owner keeps the memory, and nobody else uses it.
    let x = unsafe { device.adopt_memory::<f32>(ptr, LEN, owner) }?;
    let (first, second) = (Gate::close(&a)?, Gate::close(&b)?);
    let copies = (a.download(&x), b.download(&x));
    drop(x);
    first.open();
    copies.0.await?;
    a.done().await?;
    assert!(dropped.try_recv().is_err());
    second.open();
    assert_eq!(copies.1.await?, [3.0; LEN]);
    dropped.recv_timeout(SOON).expect("it goes");
    Ok(())
}

/// A slow producer on a stream of theirs, behind which the memory is adopted.
#[tokio::test]
async fn adopted_behind_their_stream() -> Result<()> {
    let device = testing::device();
    let mut them = theirs(&device, 1.0)?;
    let stream = adopted(&device, &them.stream)?;
    let gate = Gate::close(&them.stream)?;
    them.stream.fill(&mut them.owner._memory, 7.0).queued()?;
    // SAFETY: the owner keeps the memory; its writer is on that stream.
    let x = unsafe { stream.adopt_memory::<f32>(them.ptr, LEN, them.owner) }?;
    // What they do later is not waited for.
    let later = Gate::close(&them.stream)?;
    let seen = device.stream()?.download(&x);
    assert!(!seen.is_complete());
    gate.open();
    assert_eq!(seen.await?, [7.0; LEN]);
    assert!(!later.timed_out());
    Ok(())
}

#[tokio::test]
async fn an_empty_one_has_an_owner_as_well() -> Result<()> {
    let device = testing::device();
    let owner = Arc::new(());
    // SAFETY: there is no memory.
    let x = unsafe { device.adopt_memory::<u64>(0, 0, owner.clone()) }?;
    assert_eq!(device.download(&x).await?, [0_u64; 0]);
    drop(x);
    eventually("it is dropped", || Arc::strong_count(&owner) == 1);
    Ok(())
}

#[test]
fn what_is_wrong_with_an_address() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let Theirs { ptr, owner: _kept, .. } = theirs(&device, 3.0)?;
    let owner = Arc::new(());
    let adopt = |ptr: u64, len: usize| {
        // SAFETY: refused.
        let refused = unsafe { device.adopt_memory::<f32>(ptr, len, owner.clone()) };
        refused.unwrap_err()
    };
    let problem = |error: &gpu_await::Error| match error.detail() {
        ErrorDetail::BadMemory { problem, .. } => problem.clone(),
        _ => panic!("{error}"),
    };
    let error = adopt(0, 1);
    assert_eq!(problem(&error), MemoryProblem::Null);
    assert!(!error.to_string().contains("driver"), "a host device has none: {error}");
    assert_eq!(problem(&adopt(u64::MAX - 3, 4)), MemoryProblem::NotDeviceMemory);
    let error = adopt(ptr + 2, 1);
    assert_eq!(problem(&error), MemoryProblem::Misaligned { alignment: 4 });
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    let error = adopt(ptr, usize::MAX / 2);
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { .. }), "{error}");
    if device.kind() == DeviceKind::Cuda {
        let host = Box::new([0.0_f32; 4]);
        assert_eq!(problem(&adopt(host.as_ptr() as u64, 4)), MemoryProblem::NotDeviceMemory);
        assert_eq!(
            problem(&adopt(stream.pinned::<f32>(4)?.device_ptr(), 4)),
            MemoryProblem::NotDeviceMemory
        );
        let error = adopt(ptr, 1 << 30);
        assert!(matches!(problem(&error), MemoryProblem::OutOfBounds { .. }), "{error}");
    }
    assert_eq!(Arc::strong_count(&owner), 1, "a refused owner is dropped");
    futures::executor::block_on(device.close(SOON))?;
    assert_eq!(adopt(ptr, 1).kind(), ErrorKind::Closed);
    Ok(())
}

#[tokio::test]
async fn an_owner_goes_with_a_lost_device() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let memory = vec![1.0_f32; LEN].into_boxed_slice();
    let (told, dropped) = channel();
    struct Owner(#[expect(dead_code, reason = "kept")] Box<[f32]>, Sender<()>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.1.send(()).ok();
        }
    }
    let ptr = memory.as_ptr() as u64;
    // SAFETY: the owner keeps the memory.
    let x = unsafe { device.adopt_memory::<f32>(ptr, LEN, Owner(memory, told)) }?;
    let stream = device.stream()?;
    let gate = Gate::close(&stream)?;
    let op = stream.download(&x);
    handle.lose_device("unplugged");
    assert!(op.await.unwrap_err().is_device_lost());
    drop(x);
    gate.open();
    // A command may be inside the memory until the device runs nothing any more.
    drop((stream, device, gate));
    dropped.recv_timeout(SOON).expect("it goes");
    Ok(())
}

// ---- memory that is lent ------------------------------------------------------------------------

/// Their work waits for ours, and ours for what is on their stream when the loan ends.
#[tokio::test]
async fn lent_and_given_back_in_order() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let x = ours.full(LEN, 2.0f32).queued()?;
    let mut y = ours.full(LEN, 0.0f32).queued()?;
    let before = Gate::close(&ours)?;
    ours.fill(&mut y, 5.0).queued()?;
    let kept = Arc::new(());
    let uses = Uses::new("theirs").reads(&x).updates(&mut y).keeps(kept.clone());
    // SAFETY: they work on that stream, within the ranges, until the end.
    let loan = unsafe { stream.lend_memory(uses) }?;
    let (from, to) = loan.slices();
    assert_eq!((from.len(), to.len()), (LEN, LEN));
    // Their work: a look, and something slow.
    let reached = Arc::new(AtomicBool::new(false));
    let mark = reached.clone();
    raw.host_fn(move || mark.store(true, Ordering::SeqCst)).abandon();
    let slow = Gate::close(&raw)?;
    loan.end()?;
    assert!(!reached.load(Ordering::SeqCst), "their stream waits for what wrote it");
    before.open();
    eventually("their work runs", || reached.load(Ordering::SeqCst));
    let seen = ours.download(&y);
    assert!(!seen.is_complete(), "we wait for their work");
    // Reading what they read waits for nothing.
    assert_eq!(device.stream()?.download(&x).await?, [2.0; LEN]);
    assert_eq!(Arc::strong_count(&kept), 2);
    slow.open();
    assert_eq!(seen.await?, [5.0; LEN]);
    eventually("it is dropped", || Arc::strong_count(&kept) == 1);
    Ok(())
}

#[tokio::test]
async fn a_dropped_loan_ends() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let mut y = ours.empty::<f32>(LEN).queued()?;
    // SAFETY: they do nothing.
    let loan = unsafe { stream.lend_memory(Uses::new("theirs").writes(&mut y)) }?;
    let gate = Gate::close(&raw)?;
    drop(loan);
    let seen = ours.download(&y);
    assert!(!seen.is_complete());
    gate.open();
    seen.await?;
    Ok(())
}

#[tokio::test]
async fn a_refused_loan_lends_nothing() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let unwritten = ours.empty::<f32>(LEN).queued()?;
    let kept = Arc::new(());
    let uses = Uses::new("theirs").reads(&unwritten).keeps(kept.clone());
    // SAFETY: refused.
    let refused = unsafe { stream.lend_memory(uses) }.expect_err("nobody wrote it");
    assert!(matches!(refused.detail(), ErrorDetail::Unwritten { .. }), "{refused}");
    assert_eq!(Arc::strong_count(&kept), 1);
    let pinned = testing::peer_device().pinned::<u8>(10)?;
    // SAFETY: refused.
    let refused = unsafe { stream.lend_memory(Uses::new("theirs").lends(&pinned)) };
    let refused = refused.expect_err("it is another device's");
    assert!(matches!(refused.detail(), ErrorDetail::WrongDevice { .. }), "{refused}");
    Ok(())
}

/// A library that fails late: nobody reads what it should have written, until that is overwritten, behind its work.
#[tokio::test]
async fn a_loan_of_a_library_that_fails() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let x = ours.full(LEN, 2.0f32).queued()?;
    let mut y = ours.full(LEN, 1.0f32).queued()?;
    let uses = Uses::new("theirs").reads(&x).updates(&mut y);
    // SAFETY: they do nothing.
    let loan = unsafe { stream.lend_memory(uses) }?;
    let gate = Gate::close(&raw)?;
    let error = loan.fail(std::io::Error::other("no more of it"));
    assert!(matches!(error.detail(), ErrorDetail::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("theirs") && error.to_string().contains("no more of it"));
    let refused = ours.download(&y).await.unwrap_err();
    assert!(matches!(refused.detail(), ErrorDetail::Upstream { .. }), "{refused}");
    assert!(refused.to_string().contains("no more of it"), "{refused}");
    assert_eq!(device.stream()?.download(&x).await?, [2.0; LEN]);
    ours.fill(&mut y, 3.0).queued()?;
    let seen = ours.download(&y);
    assert!(!seen.is_complete(), "it waits for what they put there");
    gate.open();
    assert_eq!(seen.await?, [3.0; LEN]);
    Ok(())
}

/// The library failed, whatever becomes of its error.
#[tokio::test]
async fn a_loan_whose_error_panics() -> Result<()> {
    struct Panics;
    impl From<Panics> for Box<dyn std::error::Error + Send + Sync> {
        fn from(_: Panics) -> Self {
            panic!("no error of that")
        }
    }
    let device = testing::device();
    let stream = device.stream()?;
    let mut y = stream.full(LEN, 1.0f32).queued()?;
    // SAFETY: they do nothing.
    let loan = unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut y)) }?;
    let failed = std::panic::AssertUnwindSafe(|| loan.fail(Panics));
    let panic = std::panic::catch_unwind(failed).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"no error of that"));
    let refused = stream.download(&y).await.unwrap_err();
    assert!(refused.to_string().contains("no error of that"), "{refused}");
    Ok(())
}

/// A loan goes to their thread, and the buffer with it, or away before.
#[tokio::test]
async fn a_loan_that_outlives_its_borrows() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let before = device.memory()?.used_bytes;
    let kept = Arc::new(());
    for buffer_goes_first in [false, true] {
        let mut y = ours.full(LEN, 1.0f32).queued()?;
        let uses = Uses::new("theirs").updates(&mut y).keeps(kept.clone());
        // SAFETY: they work on that stream.
        let loan = unsafe { stream.lend_memory(uses) }?;
        // SAFETY: nothing else uses `y` until the end.
        let loan = unsafe { loan.detach() };
        let gate = Gate::close(&raw)?;
        let theirs = std::thread::spawn(move || {
            if buffer_goes_first {
                drop(y);
                return loan.end().map(|()| None);
            }
            loan.end().map(|()| Some(y))
        });
        let y = theirs.join().expect("it does not panic")?;
        assert!(device.memory()?.used_bytes > before, "their work may use it");
        assert_eq!(Arc::strong_count(&kept), 2);
        gate.open();
        if let Some(y) = y {
            assert_eq!(ours.download(&y).await?, [1.0; LEN]);
        }
        eventually("it is dropped", || Arc::strong_count(&kept) == 1);
        eventually("it is freed", || device.memory().is_ok_and(|now| now.used_bytes == before));
    }
    Ok(())
}

/// A library that uses no stream: its thread waits until what the others did is complete, and they find what it wrote.
#[tokio::test]
async fn a_loan_for_a_thread_of_the_host() -> Result<()> {
    let device = testing::device();
    let (ours, other) = (device.stream()?, device.stream()?);
    let mut y = ours.full(LEN, 1.0f32).queued()?;
    let gate = Gate::close(&other)?;
    other.fill(&mut y, 9.0).queued()?;
    // SAFETY: nothing is used until it is ready.
    let loan = unsafe { ours.lend_memory(Uses::new("theirs").updates(&mut y)) }?;
    // SAFETY: nothing else uses `y` until the end.
    let loan = unsafe { loan.detach() };
    // What comes later is not waited for.
    let later = Gate::close(&ours)?;
    let ready = loan.ready();
    assert!(!ready.is_complete(), "somebody else writes it");
    gate.open();
    ready.await?;
    assert!(!later.timed_out());
    let theirs = std::thread::spawn(move || {
        if loan.slices().0.len() == LEN && device.kind() == DeviceKind::Host {
            // SAFETY: it is a host device, and the loan is ready.
            let there = unsafe { loan.slices().0.as_mut_slice() };
            assert_eq!(there, [9.0; LEN]);
            there.fill(3.0);
        }
        loan.end().map(|()| device.kind())
    });
    let kind = theirs.join().expect("it does not panic")?;
    later.open();
    let expected = if kind == DeviceKind::Host { 3.0 } else { 9.0 };
    assert_eq!(other.download(&y).await?, [expected; LEN]);
    Ok(())
}

/// Where nothing can be submitted, the loan cannot end: nobody reads the memory, and it is never freed.
#[tokio::test]
async fn a_loan_that_cannot_end() -> Result<()> {
    let device = testing::device();
    let (ours, raw) = (device.stream()?, device.stream()?);
    let stream = adopted(&device, &raw)?;
    let mut y = ours.full(LEN, 1.0f32).queued()?;
    let unreturned = device.stats().unreturned;
    // SAFETY: they do nothing.
    let loan = unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut y)) }?;
    let nothing = |_: &gpu_await::RawQueue<'_>, ()| {
        let error = loan.end().unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongThread { .. }), "{error}");
        Ok::<_, gpu_await::Error>(())
    };
    // SAFETY: nothing is put on the stream.
    unsafe { ours.enqueue(Uses::new("nothing"), nothing) }.await?;
    assert_eq!(device.stats().unreturned, unreturned + 1);
    let error = ours.download(&y).await.unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
    Ok(())
}

/// The memory of a loan that is dropped where nothing can be submitted counts as leaked, from the drop of its buffer on.
#[tokio::test]
async fn a_loan_dropped_in_a_host_function() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    for keeps_buffer in [true, false] {
        let before = device.stats();
        let mut y = stream.full(LEN, 1.0f32).queued()?;
        let block = device.stats().allocated_bytes - before.allocated_bytes;
        // SAFETY: they do nothing.
        let loan = unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut y)) }?;
        // SAFETY: as above.
        let loan = unsafe { loan.detach() };
        let y = keeps_buffer.then_some(y);
        stream.host_fn(move || drop(loan)).await?;
        assert_eq!(device.stats().unreturned, before.unreturned + 1);
        if let Some(y) = y {
            assert_eq!(device.stats().leaked_bytes, before.leaked_bytes, "its buffer is there");
            drop(y);
        }
        let stats = device.stats();
        assert_eq!(stats.leaked_bytes, before.leaked_bytes + block, "keeps: {keeps_buffer}");
        assert_eq!(stats.allocated_bytes, before.allocated_bytes);
        assert_eq!(stats.allocations, before.allocations);
        assert_eq!(stats.unreturned, before.unreturned + 1);
        // Nobody else gets it.
        drop(stream.full(LEN, 2.0f32).await?);
    }
    Ok(())
}

// ---- streams that are lent ----------------------------------------------------------------------

/// What another library puts on a stream on loan is awaited, although no operation came behind it.
#[tokio::test]
async fn a_lent_stream_is_awaited() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    stream.zeros::<u8>(1).await?;
    // SAFETY: the loan keeps the stream, and nobody captures it.
    let loan = unsafe { stream.lend_raw() };
    // SAFETY: as above.
    let theirs = unsafe { Stream::from_raw(&device, loan.handle(), ()) }?;
    let gate = Gate::close(&theirs)?;
    assert!(!stream.is_idle());
    drop(theirs);
    drop(loan);
    assert!(!stream.is_idle());
    let (done, event) = (stream.done(), stream.record()?);
    let other = device.stream()?;
    let behind = other.wait(&stream);
    for op in [&done, &behind] {
        assert!(!op.is_complete());
    }
    assert!(!event.is_complete());
    gate.open();
    done.await?;
    behind.await?;
    assert!(stream.is_idle());
    Ok(())
}

/// The next operation stands behind what the loan left: its future waits for that.
#[tokio::test]
async fn an_operation_behind_a_loan() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let loans = [(), ()].map(|()| {
        // SAFETY: the loans keep the stream, and nobody captures it.
        unsafe { stream.lend_raw() }
    });
    let [first, second] = loans;
    drop(first);
    // SAFETY: as above.
    let theirs = unsafe { Stream::from_raw(&device, second.handle(), ()) }?;
    let gate = Gate::close(&theirs)?;
    drop((theirs, second));
    let op = stream.full(10, 4u8);
    assert!(!op.is_complete());
    gate.open();
    assert_eq!(stream.download(&op.await?).await?, [4; 10]);
    Ok(())
}

/// Who closes a device may unload the code of what it kept.
#[tokio::test]
async fn a_closed_device_has_dropped_what_it_kept() -> Result<()> {
    for round in 0..200 {
        let device = testing::device();
        let stream = device.stream()?;
        let kept = Arc::new(());
        let Theirs { ptr, owner, .. } = theirs(&device, 3.0)?;
        // SAFETY: the owner keeps it.
        let mut x = unsafe { device.adopt_memory::<f32>(ptr, LEN, (owner, kept.clone())) }?;
        for _ in 0..10 {
            let uses = Uses::new("kept").updates(&mut x).keeps(kept.clone());
            // SAFETY: nothing is put on the stream.
            unsafe { stream.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) }.queued()?;
            let held = kept.clone();
            stream.host_fn(move || drop(held)).abandon();
        }
        drop(x);
        device.close(SOON).await?;
        assert_eq!(Arc::strong_count(&kept), 1, "round {round}");
    }
    Ok(())
}

/// A value that closes its device when it is dropped waits for no drop behind it.
#[tokio::test]
async fn a_kept_value_may_close_its_device() -> Result<()> {
    struct Closes(Option<Device>, std::sync::mpsc::Sender<Result<()>>);
    impl Drop for Closes {
        fn drop(&mut self) {
            let device = self.0.take().expect("dropped once");
            let closed = futures::executor::block_on(device.close(Duration::MAX));
            self.1.send(closed).ok();
        }
    }
    let device = testing::device();
    let stream = device.stream()?;
    let (sender, closed) = std::sync::mpsc::channel();
    let mut x = stream.zeros::<u8>(LEN).queued()?;
    let uses = Uses::new("kept").writes(&mut x).keeps(Closes(Some(device), sender));
    // SAFETY: nothing is put on the stream, and nobody reads.
    unsafe { stream.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) }.await?;
    closed.recv_timeout(SOON).expect("in time")
}

/// A close waits for loans, within its limit; afterwards they end behind what is on the stream, and everything comes back.
#[tokio::test]
async fn a_loan_ends_after_the_close() -> Result<()> {
    for with_work in [false, true] {
        let kept = Arc::new(());
        let device = testing::device();
        let stream = device.stream()?;
        let mut x = stream.zeros::<f32>(LEN).queued()?;
        let mut z = stream.zeros::<f32>(LEN).queued()?;
        let uses = Uses::new("lent").updates(&mut x).keeps(kept.clone());
        // SAFETY: nobody uses it but what is enqueued here.
        let loan = unsafe { stream.lend_memory(uses) }?;
        assert_eq!(device.stats().loans, 1);
        if with_work {
            stream.fill(&mut z, 1.0).queued()?;
        }
        let error = device.close(Duration::from_millis(20)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::TimedOut { .. }), "{error}");
        assert!(error.to_string().contains("on loan"), "{error}");
        assert!(matches!(error.detail(), ErrorDetail::TimedOut { left, .. } if left.loans == 1));
        loan.end()?;
        assert_eq!(device.stats().loans, 0);
        drop((x, z));
        device.close(SOON).await?;
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!((device.stats().allocations, device.memory()?.used_bytes), (0, 0));
        drop((stream, device));
    }
    Ok(())
}

/// The last loan that ends, or cannot, lets the close go on, which waits for what the library left on its stream.
#[tokio::test]
async fn a_close_waits_for_loans() -> Result<()> {
    for can_end in [true, false] {
        let device = testing::device();
        let (ours, raw) = (device.stream()?, device.stream()?);
        let stream = adopted(&device, &raw)?;
        let lend = || -> Result<_> {
            let mut x = ours.zeros::<f32>(LEN).queued()?;
            // SAFETY: they do nothing.
            let loan = unsafe { stream.lend_memory(Uses::new("lent").updates(&mut x)) }?;
            // SAFETY: nothing else uses it.
            Ok((unsafe { loan.detach() }, x))
        };
        let ((first, x), (second, y)) = (lend()?, lend()?);
        let gate = Gate::close(&raw)?;
        let mut close = tokio::spawn({
            let device = device.clone();
            async move { device.close(SOON).await }
        });
        let mut is_over = async || {
            let some = Duration::from_millis(20);
            tokio::time::timeout(some, &mut close).await.is_ok()
        };
        drop((first, x));
        gate.open();
        assert!(!is_over().await, "a loan is open");
        if can_end {
            std::thread::spawn(move || second.end()).join().expect("no panic")?;
            drop(y);
        } else {
            // As in a twin: nothing can be submitted there.
            let other = testing::device();
            let theirs = other.stream()?;
            theirs.host_fn(move || drop((second, y))).await?;
        }
        close.await.expect("no panic")?;
        assert_eq!(device.stats().loans, 0);
    }
    Ok(())
}

/// A loan does not keep the loss of the device from who closes it.
#[tokio::test]
async fn a_close_with_a_loan_is_told_of_a_loss() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    let mut x = stream.zeros::<f32>(LEN).queued()?;
    // SAFETY: they do nothing.
    let loan = unsafe { stream.lend_memory(Uses::new("lent").updates(&mut x)) }?;
    stream.done().await?;
    let close = tokio::spawn({
        let device = device.clone();
        async move { device.close(Duration::MAX).await }
    });
    while stream.zeros::<u8>(1).queued().is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!close.is_finished(), "a loan is open");
    handle.lose_device("unplugged");
    assert!(close.await.expect("no panic").unwrap_err().is_device_lost());
    assert!(loan.end().unwrap_err().is_device_lost());
    assert_eq!(device.stats().loans, 0);
    Ok(())
}

/// What the end of a loan puts behind the work that a close is waiting for is waited for as well.
#[tokio::test]
async fn a_loan_ends_while_a_close_waits_for_work() -> Result<()> {
    for is_dropped in [false, true] {
        let device = testing::device();
        let stream = device.stream()?;
        let mut x = stream.zeros::<f32>(LEN).await?;
        // SAFETY: nobody uses it.
        let loan = unsafe { stream.lend_memory(Uses::new("lent").updates(&mut x)) }?;
        // SAFETY: as above.
        let loan = unsafe { loan.detach() };
        let gate = Gate::close(&stream)?;
        let mut close = Box::pin(device.close(Duration::MAX));
        // It waits for the gate once it does not go on by itself.
        for _ in 0..100 {
            assert!((&mut close).now_or_never().is_none());
            tokio::task::yield_now().await;
        }
        loan.end()?;
        let kept = (!is_dropped).then_some(x);
        gate.open();
        tokio::time::timeout(SOON, close).await.expect("nothing is left")?;
        drop(kept);
    }
    Ok(())
}

/// The producer of what a loan reads fails when it runs, when the loan has begun: it ends all the same, and what it wrote has
/// failed as well.
#[tokio::test]
async fn a_loan_ends_whose_producer_failed_late() -> Result<()> {
    enum How {
        End,
        Fail,
        Drop,
    }
    for how in [How::End, How::Fail, How::Drop] {
        let device = Device::host();
        let stream = device.stream()?;
        let kept = Arc::new(());
        let mut x = stream.zeros::<f32>(LEN).queued()?;
        let mut y = stream.zeros::<f32>(LEN).queued()?;
        let gate = Gate::close(&stream)?;
        let uses = Uses::new("late").writes(&mut x);
        let fails = |queue: &RawQueue<'_>, _| queue.try_host(|| Err::<(), _>("status 5"));
        // SAFETY: it does nothing.
        let late = unsafe { stream.enqueue(uses, fails) };
        let uses = Uses::new("theirs").reads(&x).writes(&mut y).keeps(kept.clone());
        // SAFETY: nothing is put on the stream, and nobody uses what it writes.
        let loan = unsafe { stream.lend_memory(uses) }?;
        gate.open();
        assert_eq!(late.await.unwrap_err().kind(), ErrorKind::Foreign);
        assert!(matches!(loan.ready().await.unwrap_err().detail(), ErrorDetail::Upstream { .. }));
        let (said, cause) = match how {
            How::End => (Some(loan.end().unwrap_err()), "status 5"),
            How::Fail => (Some(loan.fail("their own")), "their own"),
            How::Drop => {
                drop(loan);
                (None, "status 5")
            }
        };
        for error in said.into_iter().chain(stream.download(&y).await.err()) {
            let causes: Vec<String> = causes(&error);
            assert!(causes.iter().any(|found| found.contains(cause)), "{causes:?}");
        }
        assert!(stream.download(&y).await.is_err());
        drop((x, y));
        device.close(SOON).await?;
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!((device.stats().unreturned, device.stats().allocations), (0, 0));
    }
    Ok(())
}

fn causes(error: &(dyn std::error::Error + 'static)) -> Vec<String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect()
}

/// What a close waits for is told: here an owner that takes long to go, and another one behind it.
#[tokio::test]
async fn a_close_tells_of_owners_that_are_dropped() -> Result<()> {
    struct Slow(std::sync::mpsc::Receiver<()>);
    impl Drop for Slow {
        fn drop(&mut self) {
            self.0.recv_timeout(SOON).ok();
        }
    }
    let device = Device::host();
    let theirs = [1.0_f32; 10];
    let (go_on, goes_on) = channel();
    for owner in [Some(Slow(goes_on)), None] {
        // SAFETY: the array lives longer than the device.
        drop(unsafe { device.adopt_memory::<f32>(theirs.as_ptr() as u64, 10, owner) }?);
    }
    let error = device.close(Duration::from_millis(50)).await.unwrap_err();
    let ErrorDetail::TimedOut { left, .. } = error.detail() else { panic!("{error}") };
    assert_eq!((left.drops, left.operations, left.loans), (2, 0, 0), "{error}");
    go_on.send(()).expect("it waits");
    device.close(SOON).await
}

/// Memory that is lent counts though its buffer is gone, and the error says what helps.
#[tokio::test]
async fn out_of_memory_that_is_on_loan() -> Result<()> {
    let device = Device::builder().memory_limit_bytes(4096).host();
    let stream = device.stream()?;
    let mut x = stream.zeros::<f32>(1024).queued()?;
    // SAFETY: nobody does anything.
    let loan = unsafe { stream.lend_memory(Uses::new("theirs").updates(&mut x)) }?;
    // SAFETY: nothing else uses it.
    let loan = unsafe { loan.detach() };
    drop(x);
    let error = stream.zeros::<f32>(1).queued().unwrap_err();
    let ErrorDetail::OutOfMemory { advice, .. } = error.detail() else { panic!("{error}") };
    assert_eq!(*advice, gpu_await::MemoryAdvice::EndLoans);
    assert!(error.to_string().contains("end loans of memory"), "{error}");
    loan.end()?;
    stream.done().await?;
    stream.zeros::<f32>(1).queued()?;
    Ok(())
}
