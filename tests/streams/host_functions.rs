//! What may be called inside a host function, a kernel's host twin and a waker, and what becomes of what a
//! host function captured.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::ThreadId;

use futures::FutureExt;
use gpu_await::testing::{self, DriverCall, Gate};
use gpu_await::{
    Device, DeviceKind, ErrorDetail, ErrorKind, Grid, Image, InOut, Kernel, LaunchConfig, Module,
    Result, Stream, kernels,
};

use crate::SOON;
use crate::under_test::eventually::eventually;
use crate::under_test::every_method;
use crate::under_test::every_method::Loaded;
use crate::under_test::inside::{Inside, World};

fn is_wrong_thread<T>(result: Result<T>) -> bool {
    result.is_err_and(|error| matches!(error.detail(), ErrorDetail::WrongThread { .. }))
}

/// A host function must not call the driver, and must not wait: each public method says so with a typed
/// error, or answers with what is known. All of them while a thread sits in the full queue of a stream
/// that waits for the host function, so that a call which takes that stream's lock deadlocks.
#[test]
fn every_public_method_inside_a_host_function() {
    let device = testing::device();
    every_method::run(&device, Inside::HostFn).unwrap();
}

/// The same under a stream's submission lock, in the closure of `enqueue`.
#[test]
fn every_public_method_inside_enqueue() {
    let device = testing::device();
    every_method::run(&device, Inside::Enqueue).unwrap();
}

/// Where the driver may be called, but whatever waits would wait for itself.
#[test]
fn no_public_method_blocks_inside_a_twin() {
    // CUDA has no twins.
    let device = Device::host();
    every_method::run(&device, Inside::Twin).unwrap();
}

#[test]
fn no_public_method_blocks_the_poller() {
    let device = testing::device();
    every_method::run(&device, Inside::Waker).unwrap();
}

// ---- what is asked, and what resolves -----------------------------------------------------------

/// A waker that says whether it was woken.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// It only registers there; the poller places the marker, asks, and wakes.
#[test]
fn an_op_polled_inside_a_host_function_resolves() -> Result<()> {
    let device = testing::device();
    let (host, other) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&other)?;
    let op = other.full(10, 7u8);
    // No marker of its own is placed behind it before that poll.
    other.zeros::<u8>(10).abandon();
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(woken.clone());
    let polled = host.host_fn(move || {
        let mut op = op;
        assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        (op, waker)
    });
    let (mut op, waker) = polled.synchronize()?;
    gate.open();
    let buffer = loop {
        // Perhaps first so that it looks for itself.
        eventually("it is woken", || woken.0.swap(false, Ordering::SeqCst));
        if let Poll::Ready(buffer) = op.poll_unpin(&mut Context::from_waker(&waker)) {
            break buffer?;
        }
    };
    assert_eq!(other.download(&buffer).synchronize()?, [7; 10]);
    Ok(())
}

/// Nothing is asked inside, and all the same the answer comes.
#[test]
fn what_is_asked_inside_a_host_function_is_answered() -> Result<()> {
    let device = testing::device();
    let (host, other) = (device.stream()?, device.stream()?);
    type Question = Box<dyn FnMut() -> bool + Send>;
    let questions = |op: gpu_await::Op<_>| -> Result<Vec<(&str, Question)>> {
        let event = other.record()?;
        let (idle, backlog) = (other.clone(), other.clone());
        let mut taken = other.full(10, 2u8);
        // With a marker, so that looking is all it takes.
        let (stats, marked) = (device.clone(), other.record()?);
        Ok(vec![
            ("Op::is_complete", Box::new(move || op.is_complete())),
            ("Op::try_take", Box::new(move || taken.try_take().is_some())),
            ("Event::is_complete", Box::new(move || event.is_complete())),
            ("Stream::is_idle", Box::new(move || idle.is_idle())),
            ("Stream::backlog", Box::new(move || backlog.backlog() == 0)),
            // The host function itself is in flight.
            (
                "Device::stats",
                Box::new(move || {
                    let _marked = &marked;
                    stats.stats().in_flight == 1
                }),
            ),
        ])
    };
    for number in 0..6 {
        let (mut name, gate) = ("", Gate::close(&other)?);
        let mut asked = questions(other.full(10, 1u8))?.into_iter().nth(number);
        let (tell, told) = channel();
        let inside = host.host_fn(move || {
            let Some((name, question)) = &mut asked else { return };
            tell.send((*name, question())).expect("somebody listens");
            eventually(name, question);
        });
        if let Ok((asked, answer)) = told.recv_timeout(SOON) {
            name = asked;
            assert!(!answer, "{name} before it is complete");
        }
        gate.open();
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| inside.synchronize()));
        assert!(matches!(ended, Ok(Ok(()))), "{name} is never answered");
    }
    device.synchronize()
}

// ---- what it captured, and what it leaves ------------------------------------------------------

/// The last handle of each kind, dropped by the driver's thread: it enqueues, and nothing else.
#[test]
fn what_a_host_function_captured_may_be_a_handle() -> Result<()> {
    let device = testing::device();
    let (host, held) = (device.stream()?, device.stream()?);
    let scale = kernels::scale::load_blocking(&device)?;
    let module = match device.kind() {
        DeviceKind::Cuda => {
            let image = Image::ptx(include_str!("../../kernels/spin.ptx"));
            Some(Module::load_blocking(&device, image)?)
        }
        _ => None,
    };
    let whole = testing::peer_device();
    let whole_stream = whole.stream()?;
    let frozen = held.full(10, 1u8).queued()?.freeze().synchronize()?;
    let gate = Gate::close(&held)?;
    // Each with work that is not complete when it is dropped.
    let stream = || -> Result<Stream> {
        let stream = device.stream()?;
        stream.wait(&held).queued()?;
        Ok(stream)
    };
    let last = stream()?;
    last.zeros::<u8>(100).abandon();
    let small = stream()?.zeros::<u8>(100).queued()?;
    let large = stream()?.zeros::<u8>(3 << 20).queued()?;
    let mut crossed = stream()?.zeros::<u8>(100).queued()?;
    held.fill(&mut crossed, 1).queued()?;
    let op = stream()?.batch(|q| q.download(&q.zeros::<u8>(100)?));
    let event = stream()?.record()?;
    let timed = stream()?.record_timed()?;
    let pinned = device.pinned::<u8>(100)?;
    let flag = device.pinned_flag()?;
    let pool = device.streams(1)?;
    let pooled = pool.try_acquire()?;
    pooled.wait(&held).queued()?;
    drop(pool);
    let captured = (
        (last, small, large, crossed, frozen),
        (op, event, timed, pinned, flag, pooled),
        (scale, module, whole_stream, whole),
    );
    let (tell, told) = channel();
    let inside = host.host_fn(move || {
        // All of it, and dropped at the end.
        let captured = captured;
        tell.send(captured.2.3.kind()).expect("somebody listens");
    });
    told.recv_timeout(SOON).expect("it runs");
    inside.synchronize()?;
    gate.open();
    device.synchronize()?;
    let x = host.full(10, 7u8).queued()?;
    assert_eq!(host.download(&x).synchronize()?, [7; 10]);
    drop(x);
    assert_eq!(device.stats().unreturned, 0);
    eventually("everything is given back", || {
        let stats = device.stats();
        stats.in_flight + stats.lent_bytes + stats.pending_bytes + stats.allocations == 0
    });
    Ok(())
}

/// Tells which thread drops it.
struct Tells(Sender<ThreadId>);

impl Drop for Tells {
    fn drop(&mut self) {
        self.0.send(std::thread::current().id()).ok();
    }
}

#[test]
fn what_a_host_function_leaves_is_dropped_off_the_drivers_thread() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let thread_of = |told: &Receiver<ThreadId>| told.recv_timeout(SOON).expect("it is dropped");
    let drivers = stream.host_fn(|| std::thread::current().id()).synchronize()?;
    // On the host device each stream has a thread.
    let others = other.host_fn(|| std::thread::current().id()).synchronize()?;
    let is_drivers = |thread| thread == drivers || thread == others;

    // A result that nobody takes: the future is dropped before and after.
    let (tell, told) = channel();
    let gate = Gate::close(&stream)?;
    drop(stream.host_fn({
        let tell = tell.clone();
        move || Tells(tell)
    }));
    gate.open();
    assert!(!is_drivers(thread_of(&told)), "a result");
    let op = stream.host_fn({
        let tell = tell.clone();
        move || Tells(tell)
    });
    stream.synchronize()?;
    drop(op);
    assert!(!is_drivers(thread_of(&told)), "a result whose future is dropped late");

    // The payload of a panic.
    drop(stream.host_fn({
        let tell = tell.clone();
        move || std::panic::resume_unwind(Box::new(Tells(tell)))
    }));
    assert!(!is_drivers(thread_of(&told)), "the payload of a panic");

    // A future that is dropped inside of another host function, with the result of the first.
    let op = stream.host_fn({
        let tell = tell.clone();
        move || Tells(tell)
    });
    stream.synchronize()?;
    eventually("nothing is lent", || device.stats().in_flight == 0);
    other.host_fn(move || drop(op)).synchronize()?;
    assert!(!is_drivers(thread_of(&told)), "a result whose future goes in a host function");

    // A closure that is refused there.
    let inner = other.clone();
    let refused = stream.host_fn(move || {
        let unused = Tells(tell);
        is_wrong_thread(inner.host_fn(move || drop(unused)).queued())
    });
    assert!(refused.synchronize()?);
    assert!(!is_drivers(thread_of(&told)), "a closure that is refused");
    Ok(())
}

gpu_await::kernel! {
    /// Faults.
    pub unsafe fn faults();
    launch = LaunchConfig::new(1, 1);
    host = panics;
}

fn panics(_: &Grid) {
    panic!("on purpose")
}

/// After a fault the driver calls nobody: who waits for a sender in the closure must hear of that all the
/// same, and a device that it captured must go.
#[test]
fn what_a_host_function_that_never_runs_captured_is_dropped() -> Result<()> {
    type Submit = fn(&Stream, Box<dyn FnOnce() + Send>);
    let submits: [(&str, Submit); 3] = [
        ("awaited", |stream, function| {
            let op = stream.host_fn(function);
            std::thread::spawn(|| op.synchronize().unwrap_err());
        }),
        ("abandoned", |stream, function| stream.host_fn(function).abandon()),
        ("in a batch", |stream, function| {
            let op = stream.batch(|q| q.host_fn(function));
            std::thread::spawn(|| op.synchronize().unwrap_err());
        }),
    ];
    for (what, submit) in submits {
        for loses in ["a twin", "a test", "nobody steps it"] {
            let (sender, receiver) = channel::<()>();
            let captured = |device: &Device, stream: &Stream| {
                let mine = (sender.clone(), device.clone(), stream.clone());
                Box::new(move || drop(mine))
            };
            match loses {
                "a twin" => {
                    let device = Device::host();
                    let stream = device.stream()?;
                    let gate = Gate::close(&stream)?;
                    faults::load_blocking(&device)?.launch(&stream).abandon();
                    submit(&stream, captured(&device, &stream));
                    gate.open();
                }
                "a test" => {
                    let (faults, handle) = testing::faults();
                    let device = testing::host_with(faults);
                    let stream = device.stream()?;
                    let _gate = Gate::close(&stream)?;
                    submit(&stream, captured(&device, &stream));
                    handle.lose_device("on purpose");
                    stream.done().synchronize().unwrap_err();
                }
                _ => {
                    let (device, stepper) = testing::manual();
                    let stream = device.stream()?;
                    submit(&stream, captured(&device, &stream));
                    drop(stepper);
                }
            }
            drop(sender);
            let told = receiver.recv_timeout(SOON);
            assert_eq!(told, Err(RecvTimeoutError::Disconnected), "{what}, lost by {loses}");
        }
    }
    Ok(())
}

// ---- twins and wakers --------------------------------------------------------------------------

type Twin = Kernel<(InOut<u32>,)>;

/// A kernel of the host device that does something with a stream when it runs.
fn twin(
    device: &Device,
    work: impl Fn() -> Vec<bool> + Send + Sync + 'static,
) -> Result<(Twin, Receiver<Vec<bool>>)> {
    let (tell, told) = channel();
    let tell = Mutex::new(tell);
    let kernel = Twin::host(device, "twin", move |_: &Grid, _: &mut [u32]| {
        drop(tell.lock().expect("unpoisoned").send(work()));
    })?;
    Ok((kernel, told))
}

/// On a host device a kernel is a Rust function, which could wait for its own stream.
#[test]
fn a_twin_is_refused_what_blocks_and_submits() -> Result<()> {
    let device = Device::host();
    let (stream, other) = (device.stream()?, device.stream()?);
    let (s, o, d) = (stream.clone(), other.clone(), device.clone());
    let (kernel, told) = twin(&device, move || {
        vec![
            is_wrong_thread(s.synchronize()),
            is_wrong_thread(d.synchronize()),
            is_wrong_thread(s.done().synchronize()),
            is_wrong_thread(s.zeros::<u8>(1).queued()),
            is_wrong_thread(o.zeros::<u8>(1).queued()),
            is_wrong_thread(s.record()),
            is_wrong_thread(o.wait(&s).queued()),
            is_wrong_thread(o.join([&s]).queued()),
            is_wrong_thread(s.host_fn(|| ()).queued()),
            is_wrong_thread(kernels::empty::load_blocking(&d)),
            // What is merely asked is answered.
            !s.is_idle(),
            !s.done().is_complete(),
            s.backlog() > 0,
            o.is_idle(),
            d.stats().in_flight > 0,
        ]
    })?;
    let mut x = stream.full(4, 1u32).queued()?;
    // It may not run before its launch was submitted.
    let gate = Gate::close(&stream)?;
    let launch = stream.launch(&kernel, LaunchConfig::new(1, 1), (&mut x,));
    gate.open();
    let answers = told.recv_timeout(SOON).expect("the twin returns");
    assert_eq!(answers, vec![true; answers.len()]);
    launch.synchronize()?;
    assert_eq!(stream.download(&x).synchronize()?, [1; 4]);
    Ok(())
}

/// A twin and a host function that step their own device get nothing, and hold up nobody.
#[test]
fn nothing_is_stepped_inside_a_step() -> Result<()> {
    let (device, stepper) = testing::manual();
    let stepper = Arc::new(stepper);
    let (a, b) = (device.stream()?, device.stream()?);
    let inner = stepper.clone();
    let (kernel, told) = twin(&device, move || vec![!inner.step(0)])?;
    let mut x = a.full(4, 1u32).queued()?;
    a.launch(&kernel, LaunchConfig::new(1, 1), (&mut x,)).queued()?;
    b.host_fn(|| ()).queued()?;
    let inner = stepper.clone();
    let mut op = a.host_fn(move || {
        inner.run_until_idle();
        inner.step(0)
    });
    stepper.run_until_idle();
    assert_eq!(told.recv_timeout(SOON), Ok(vec![true]));
    assert!(matches!(op.try_take(), Some(Ok(false))));
    Ok(())
}

/// A waker that does something where it is woken.
struct Does(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Does {
    fn wake(self: Arc<Self>) {
        let work = self.0.lock().expect("unpoisoned").take();
        if let Some(work) = work {
            work();
        }
    }
}

/// Every other future of the device would wait for as long.
#[test]
fn a_waker_on_the_poller_is_refused_what_blocks() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let (tell, told) = channel();
    let (s, o, d) = (stream.clone(), other.clone(), device.clone());
    let does = Does(Mutex::new(Some(Box::new(move || {
        let scoped = d.clone();
        let refused = vec![
            is_wrong_thread(s.record()),
            is_wrong_thread(s.record_timed()),
            is_wrong_thread(o.wait(&s).queued()),
            is_wrong_thread(o.join([&s]).queued()),
            is_wrong_thread(s.fork(1)),
            is_wrong_thread(o.scope_sync(|| scoped.zeros::<u8>(1).queued())),
            is_wrong_thread(s.synchronize()),
            is_wrong_thread(d.done().submitted()),
        ];
        drop(tell.send((std::thread::current().name().map(str::to_owned), refused)));
    }))));
    let waker = Waker::from(Arc::new(does));
    let gate = Gate::close(&stream)?;
    let mut op = stream.done();
    // Inside a host function it only registers, so that the poller wakes.
    let op = other
        .host_fn(move || {
            assert!(op.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
            op
        })
        .synchronize()?;
    gate.open();
    let (thread, refused) = told.recv_timeout(SOON).expect("it is woken");
    assert!(thread.is_some_and(|name| name.starts_with("gpu-await")));
    assert_eq!(refused, vec![true; refused.len()]);
    op.synchronize()
}

// ---- what the driver refuses -------------------------------------------------------------------

/// The driver answers 800 to calls inside host functions of other libraries, which have no role here.
#[test]
fn a_call_that_is_not_permitted_loses_no_device() -> Result<()> {
    let calls = [
        DriverCall::StreamCreate,
        DriverCall::StreamWaitEvent,
        DriverCall::EventCreate,
        DriverCall::EventRecord,
        DriverCall::EventQuery,
        DriverCall::EventRecordAll,
        DriverCall::WriteWord,
        DriverCall::HostFn,
        DriverCall::Alloc,
        DriverCall::Register,
        DriverCall::CopyToDevice,
        DriverCall::CopyToHost,
        DriverCall::CopyOnDevice,
        DriverCall::Fill,
        DriverCall::Launch,
    ];
    for call in calls {
        let (faults, handle) = testing::faults();
        let device = testing::host_with(faults);
        let (a, b) = (device.stream()?, device.stream()?);
        handle.fail_nth(call, 1, ErrorKind::InvalidCall);
        let work = || -> Result<()> {
            let x = a.upload(vec![1.0f32; 10]).queued()?;
            let mut y = a.full(10, 2.0f32).queued()?;
            a.copy(&x, &mut y).queued()?;
            kernels::scale::load_blocking(&device)?.launch(&a, 2.0, &mut y).queued()?;
            b.fill(&mut y, 3.0).queued()?;
            b.host_fn(|| ()).synchronize()?;
            b.download(&y).synchronize()?;
            device.stream()?.done().synchronize()?;
            device.done().synchronize()
        };
        // Which run makes the call depends on how fast the other stream is: there may be nothing to wait for.
        let refused: Vec<_> = (0..3).filter_map(|_| work().err()).collect();
        assert!(refused.len() <= 1, "{call:?}: the device works, {refused:?}");
        for error in refused {
            assert_eq!(error.kind(), ErrorKind::InvalidCall, "{call:?}: {error}");
        }
        assert!(device.lost().now_or_never().is_none(), "{call:?}");
    }
    Ok(())
}

// ---- the list and the sources ---------------------------------------------------------------

/// Types whose methods are plain arithmetic on plain data.
const PLAIN: &[&str] = &[
    "Copy2d",
    "CudaSource",
    "DriverCode",
    "Error",
    "Grid",
    "Image",
    "Geometry",
    // What `kernel!` expands to.
    "integer",
    "Make",
    "Int",
    "LaunchConfig",
    "Len",
    "Len2",
    "BatcherBuilder",
    "PoolShare",
    // What `src/sibling.rs` exports: no public interface.
    "ArgBlock",
    "Footprint",
    "Home",
    "KernelChain",
    "LibraryDevice",
    "ResultTarget",
    "Search",
    "Span",
    "UntypedKernel",
    "enqueue",
    "exit",
    "kernel_chain",
    "library",
    "mutable",
    "role",
    "untyped",
];

/// Methods of other types that neither call the driver nor take a lock that is held over a driver call.
const CALL_NO_DRIVER: &[&str] = &[
    // Of sibling crates.
    "PerProcess::get",
    "PerProcess::made",
    "PerProcess::new",
    "Process::is_here",
    "Process::remembered",
    // Called with `committed_bytes`.
    "GrowableBuffer::slice_mut",
    "GrowableBuffer::view_mut",
    "Region::new",
    "Region::report",
    "Region::last_run",
    "Region::dot",
    "OpSite::name",
    "OpSite::at",
    "Graph::dot",
    "Graph::report",
    "Queue::barrier",
    // They exist inside `enqueue` alone.
    "RawQueue::host",
    "RawQueue::host_each",
    "RawQueue::outcome",
    "RawQueue::try_host",
    "RawQueue::cudarc_stream",
    "RawQueue::each_launch",
    "RawSlice::cudarc",
    "MemoryLoan::slices",
    "DlpackTensor::address",
    "DlpackTensor::data_type",
    "DlpackTensor::device",
    "DlpackTensor::from_raw",
    "DlpackTensor::from_raw_unversioned",
    "DlpackTensor::into_raw",
    "DlpackTensor::into_raw_unversioned",
    "DlpackTensor::is_read_only",
    "DlpackTensor::shape",
    "DlpackTensor::strides",
    // In `tests/interop/foreign_memory.rs`.
    "MemoryLoan::complete",
    "MemoryLoan::outcome",
    "MemoryLoan::raw_stream",
    "MemoryLoan::reads_inputs_of",
    "WorkOutcome::fail",
    "WorkOutcome::failure",
    "MemoryLoan::end",
    "MemoryLoan::fail",
    "MemoryLoan::detach",
    "MemoryLoan::ready",
    "StreamLoan::handle",
    "DeviceBuffer::device_ptr",
    "Frozen::device_ptr",
    "PinnedBuffer::device_ptr",
    "View::device_ptr",
    "ViewMut::device_ptr",
    "RawQueue::context",
    "RawQueue::kind",
    "RawQueue::ordinal",
    "RawQueue::stream",
    "RawSlice::address",
    "RawSlice::as_mut_slice",
    "RawSlice::as_slice",
    "RawSlice::is_empty",
    "RawSlice::len",
    "RawSlice::size_bytes",
    "Uses::includes",
    "Uses::into_parts",
    "Uses::lends",
    "Uses::new",
    "Uses::reads",
    "Uses::updates",
    "Uses::writes",
    // what a device is, and options
    "Device::builder",
    "Device::graph_across",
    "builder::open_host",
    "memory::adopt_registered",
    "Device::kind",
    "Device::verifies",
    "Device::ordinal",
    "Device::name",
    "Device::multiprocessors",
    "Device::compute_capability",
    "Device::priority_range",
    "Device::default_stream",
    "Device::stream_builder",
    "Device::event_builder",
    "Partition::device",
    "Partition::multiprocessors",
    "Partition::stream_builder",
    "Stream::in_partition",
    "Stream::multiprocessors",
    "Occupancy::on",
    "StreamPool::builder",
    "StreamPool::with_high_priority",
    "StreamPool::with_patience",
    "StreamPool::with_share",
    "StreamPool::with_weight",
    "Batcher::builder",
    "Batcher::with_high_priority",
    "Batcher::with_patience",
    "Batcher::with_weight",
    "Batch::into_requests",
    // Runs the function of a batch: what that calls is refused there.
    "BatchTask::poll",
    "Batch::weight",
    // numbers and names
    "Stream::submitted",
    "Stream::completed",
    "Stream::id",
    "Stream::priority",
    "Stream::name",
    "Stream::current",
    "Op::ticket",
    "Op::is_terminated",
    "PooledStream::waited",
    "Kernel::name",
    "Kernel::attributes",
    "Kernel::occupancy",
    "kernel!::attributes",
    "kernel!::occupancy",
    "kernel!::kernel",
    // puts a scope around a future: `Scope::poll` enters it
    "Stream::scope_unordered",
    // ranges
    "DeviceBuffer::len",
    "DeviceBuffer::is_empty",
    "DeviceBuffer::size_bytes",
    "DeviceBuffer::slice",
    "DeviceBuffer::clear_poison",
    "DeviceBuffer::view",
    "DeviceBuffer::slice_mut",
    "DeviceBuffer::view_mut",
    "DeviceBuffer::split_at_mut",
    "DeviceBuffer::split_off",
    "DeviceBuffer::unsplit",
    "DeviceBuffer::chunks",
    "DeviceBuffer::chunks_mut",
    "DeviceBuffer::rows_of",
    "DeviceBuffer::rows_of_mut",
    "Frozen::rows_of",
    "View::rows_of",
    "ViewMut::rows_of_mut",
    "Shape2::rows",
    "Shape2::columns",
    "Shape2::pitch",
    "Shape2::is_dense",
    "View2::rows",
    "View2::columns",
    "View2::pitch",
    "View2::shape",
    "View2::device_ptr",
    "View2::slice",
    "View2::row",
    "ViewMut2::rows",
    "ViewMut2::columns",
    "ViewMut2::pitch",
    "ViewMut2::shape",
    "ViewMut2::device_ptr",
    "ViewMut2::view",
    "ViewMut2::slice_mut",
    "ViewMut2::row_mut",
    "ViewMut2::split_rows_at_mut",
    "ViewMut2::split_columns_at_mut",
    "DeviceSlab::len",
    "DeviceSlab::is_empty",
    "DeviceSlab::block_count",
    "DeviceSlab::block_len",
    "DeviceSlab::block",
    "DeviceSlab::block_mut",
    "DeviceSlab::blocks",
    "DeviceSlab::blocks_mut",
    "DeviceSlab::naming",
    "DeviceSlab::naming_mut",
    "NamedBlocksMut::reading",
    "HostSlab::len",
    "HostSlab::is_empty",
    "HostSlab::block_count",
    "HostSlab::block_len",
    "HostSlab::block",
    "HostSlab::block_mut",
    "HostSlab::blocks",
    "HostSlab::blocks_mut",
    "BlockTable::shape",
    "BlockTableMut::shape",
    "TableShape::blocks",
    "TableShape::block_len",
    "BlockSlices::get",
    "BlockSlices::iter",
    "BlockSlicesMut::get",
    "BlockSlicesMut::get_mut",
    "BlockSlicesMut::len",
    "BlockSlicesMut::is_empty",
    "Slice2::shape",
    "Slice2::row",
    "Slice2::iter",
    "SliceMut2::shape",
    "SliceMut2::row",
    "SliceMut2::row_mut",
    "SliceMut2::iter",
    "SliceMut2::iter_mut",
    "CudaCode::ptx",
    "CudaCode::source",
    "View::len",
    "View::is_empty",
    "View::slice",
    "View::cast",
    "View::chunks",
    "View::untracked",
    "ViewMut::len",
    "ViewMut::is_empty",
    "ViewMut::split_at_mut",
    "ViewMut::cast",
    "ViewMut::clear_poison",
    "ViewMut::chunks_mut",
    "ViewMut::view",
    "ViewMut::slice",
    "ViewMut::slice_mut",
    "ViewMut::untracked",
    "Frozen::len",
    "Frozen::is_empty",
    "Frozen::size_bytes",
    "Frozen::slice",
    "Frozen::part",
    "Mapped::view_mut",
    "SharedBuffer::descriptors",
    "SharedBuffer::view_mut",
    "SharedDescriptors::info",
    "SharedDescriptors::try_clone",
    "PinnedBuffer::len",
    "PinnedBuffer::is_empty",
    "PinnedBuffer::split_off",
    "PinnedBuffer::unsplit",
    "PinnedFlag::get",
    "PinnedFlag::set",
    "PinnedFlag::compare_exchange",
    // a handle, a switch, and plain data
    "Device::timeline",
    "DeviceTimeline::is_on",
    "DeviceTimeline::stop",
    "Trace::clock_error",
    "Trace::device",
    "Trace::dropped",
    "Trace::one_in",
    "Trace::operations",
    "Trace::report",
    "Trace::taken",
    "Trace::write_html",
    "Trace::write_perfetto",
    "TracedOp::device_time",
    // mark the stream as shared, and hand a number or an object out
    "Stream::as_raw",
    "Stream::to_cudarc",
    "Device::cudarc_context",
    // passes on to `Stream::from_raw`
    "Device::adopt",
    // what `kernel!` expands to: its own methods pass on to these
    "declared::erase",
    "plain::element",
    "plain::proof",
    "Plain::new",
    "Plain::or_zero",
    "Plain::get",
    "ArrayLen::is_empty",
    "ArrayLen::len",
    "ArrayLen::new",
    "TableLen::block_len",
    "TableLen::blocks",
    "TableLen::new",
    "RowsLen::columns",
    "RowsLen::is_dense",
    "RowsLen::new",
    "RowsLen::pitch",
    "RowsLen::rows",
    "integers::evaluate",
    "integers::evaluate_all",
    "integers::fit",
    "integers::none",
    "Declared::load",
    "Declared::load_blocking",
    "Declared::attributes",
    "Declared::kernel",
    "Declared::occupancy",
    // for tests: they panic where a device cannot be opened
    "testing::device",
    "testing::device_with",
    "testing::builder",
    "testing::peer_device",
    // for tests: host devices, which open anywhere, and what makes their calls fail
    "testing::host_with",
    "testing::host_with_completion",
    "testing::manual",
    "testing::manual_with",
    "testing::manual_with_faults",
    "testing::manual_with_faults_completion",
    "testing::faults",
    "FaultHandle::fail_nth",
    "FaultHandle::fail_nth_after_effect",
    "FaultHandle::lose_device",
    "FaultHandle::refuse_peers",
    "FaultHandle::record",
    "FaultHandle::calls",
    "Gate::timed_out",
    "Stepper::advance",
];

/// In the list of calls only where there is a GPU, or a host device.
const ON_ONE_KIND: &[&str] = &[
    "Device::from_cudarc",
    "DeviceBuilder::from_cudarc",
    "Device::adopt_cudarc",
    "Device::release_to_cudarc",
    "Module::kernel",
    "Kernel::host",
    "Stream::launch",
    "Device::launch",
    "Queue::launch",
];

/// A new public method is called in the list above, or named among those that call no driver.
#[test]
fn every_public_method_is_in_the_list() {
    let device = testing::device();
    let methods =
        every_method::every_method(&World::new(&device).unwrap(), &Loaded::new(&device).unwrap())
            .unwrap();
    let mut known: BTreeSet<String> = methods.names().into_iter().map(str::to_owned).collect();
    known.extend(CALL_NO_DRIVER.iter().chain(ON_ONE_KIND).map(|name| (*name).to_owned()));
    // Of drops there is no method.
    known.retain(|name| !name.ends_with("::drop"));
    // Where this process runs: packed tests run on another machine than the one that built them.
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    let root = root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let source = Surface::read(&Path::new(&root).join("src"));
    let found = source.methods();
    let missing: Vec<_> =
        found.difference(&known).filter(|name| !source.setters.contains(*name)).collect();
    assert!(missing.is_empty(), "neither called nor said to call no driver: {missing:#?}");
    let stale: Vec<_> = known.difference(&found).collect();
    assert!(stale.is_empty(), "no such public method: {stale:#?}");
}

/// The public types and methods of a crate, read from its sources, which are formatted.
#[derive(Default)]
struct Surface {
    types: BTreeSet<String>,
    /// Type and method.
    methods: BTreeSet<(String, String)>,
    /// Those of them that take `self` and return `Self`, by their names as in the lists: they keep an option.
    setters: BTreeSet<String>,
}

impl Surface {
    fn read(folder: &Path) -> Surface {
        let mut surface = Surface::default();
        surface.read_folder(folder);
        surface
    }

    /// Those of public types, and functions.
    fn methods(&self) -> BTreeSet<String> {
        let is_module = |name: &str| name.starts_with(char::is_lowercase);
        let known = self.methods.iter().filter(|(of, _)| is_module(of) || self.types.contains(of));
        let known = known.filter(|(of, _)| !PLAIN.contains(&of.as_str()));
        let name = |(of, name): &(String, String)| match of.as_str() {
            "op" => name.clone(),
            _ => format!("{of}::{name}"),
        };
        known.map(name).collect()
    }

    fn read_folder(&mut self, folder: &Path) {
        for entry in
            std::fs::read_dir(folder).expect("the sources").map(|entry| entry.unwrap().path())
        {
            if entry.is_dir() {
                self.read_folder(&entry);
            } else if entry.file_stem().is_some_and(|stem| stem != "must_not_compile") {
                self.read_file(&entry);
            }
        }
    }

    fn read_file(&mut self, path: &Path) {
        let module = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path).expect("a source");
        // Whose methods come next: of a type, of two, of nobody.
        let (mut owners, mut is_trait) = (vec![module.clone()], false);
        let lines: Vec<_> = text.lines().collect();
        for (at, line) in lines.iter().copied().enumerate() {
            let code = line.trim_start();
            if line == "}" {
                (owners, is_trait) = (vec![module.clone()], false);
            } else if code.starts_with("verbs! {") {
                owners = vec!["Stream".to_owned(), "Device".to_owned()];
            } else if code.starts_with("impl $on {") {
                // What `launch!` makes.
                owners = ["Stream", "Device", "Queue"].map(str::to_owned).to_vec();
            } else if code.starts_with("kernel! {") {
                owners = Vec::new();
            } else if code.starts_with("impl") {
                let (of, who) = code.split_once(" for ").unwrap_or(("", code));
                is_trait = !of.is_empty();
                let counts = !is_trait || of.ends_with("Future") || of.ends_with("Service<Q>");
                owners = counts.then(|| owner(who)).into_iter().collect();
            }
            for declares in ["pub struct ", "pub enum "] {
                if let Some(rest) = code.strip_prefix(declares) {
                    self.types.insert(word(rest));
                }
            }
            let Some(name) = method(code, is_trait) else { continue };
            if code.starts_with("$vis") {
                self.methods.insert(("kernel!".to_owned(), name));
                continue;
            }
            if is_setter(&lines[at..]) {
                self.setters.extend(owners.iter().map(|owner| format!("{owner}::{name}")));
            }
            self.methods.extend(owners.iter().map(|owner| (owner.clone(), name.clone())));
        }
    }
}

/// The type that an `impl` is of.
fn owner(code: &str) -> String {
    let mut rest = code.strip_prefix("impl").unwrap_or(code).trim_start();
    // `<...>` in front of the type.
    if rest.starts_with('<') {
        let mut depth = 0;
        let end = rest.find(|letter| {
            depth += i32::from(letter == '<') - i32::from(letter == '>');
            depth == 0
        });
        rest = &rest[end.map_or(0, |end| end + 1)..];
    }
    word(rest.trim_start())
}

fn word(text: &str) -> String {
    text.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
}

/// The name of the public function that a line declares; of any, in a trait's `impl`.
fn method(code: &str, is_trait: bool) -> Option<String> {
    let start = code.find("fn ")?;
    let before = code[..start].trim_end();
    let is_public = ["pub", "pub async", "pub unsafe", "pub async unsafe", "pub const"]
        .contains(&before)
        || ["$vis", "$vis async", "$vis unsafe"].contains(&before)
        || (is_trait && before.is_empty());
    let name = word(&code[start + 3..]);
    (is_public && !name.is_empty()).then_some(name)
}

/// Whether the function that begins here takes `self` and returns `Self`.
fn is_setter(lines: &[&str]) -> bool {
    let last = lines.iter().position(|line| line.ends_with('{')).unwrap_or(0);
    let signature: String = lines[..=last].iter().map(|line| line.trim_start()).collect();
    let takes_self = ["(self", "(mut self"].iter().any(|taken| signature.contains(taken));
    takes_self && signature.ends_with(" -> Self {")
}
