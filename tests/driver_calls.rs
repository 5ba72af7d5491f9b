//! Exactly which driver calls the cuda backend makes, seen by the stand-in driver.
//!
//! Every test runs itself again in a child process whose `libcuda.so.1` is the stand-in (see
//! `crates/stand-in-cuda/README.md`), so none of them needs a GPU and none of them leaves anything behind.
//!
//! | room | asks |
//! |---|---|
//! | `compile` | what CUDA C++ is compiled to, and what is said where it cannot be |
//! | `counts` | how many calls and allocations an operation costs |
//! | `launches` | what a launch asks the driver first, and what is refused without it |
//! | `markers` | which marker an operation gets, and which one is asked |
//! | `order` | where markers, waits, words and doorbells go |
//! | `context` | whether the calling thread is left as it was found |
//! | `errors` | what a missing or refusing driver looks like to the caller |
//! | `failures` | what is left when the n-th call of a kind fails |
//! | `host_functions` | that inside one nothing calls the driver, and that its refusal loses no device |
//! | `loss` | what a fault resolves, and that the driver is then left alone |
//! | `shared` | what streams with options, and those that others use as well, cost |
//! | `shared_memory` | memory that several processes share: its calls, and each of them failing |
//! | `cudarc` | memory and streams that go to cudarc and come from it |
//! | `events` | which events of the driver's stand behind ours |
//! | `staged` | what a staged copy makes that the next one needs as well |
//! | `memory` | which pool memory comes from, and what is held of it under a limit |
//! | `unwritten` | whether memory that is used again shows what was there |
//! | `overlap` | which launches and nodes may start while the one in front of them still ends |
//! | `edges` | which edges of graphs are programmatic, what a driver that refuses them leaves, and what the switch holds back |
//! | `partitions` | what is split, where work of a partition runs, and what goes when |
//! | `pieces` | what copies of many pieces call, and each of these calls failing |
//! | `peers` | copies between GPUs, and handles of another one |
//! | `libraries` | what is said where NVIDIA's libraries cannot be used |
//! | `drops` | drops in any order, and the end of the process |

#![cfg(all(feature = "cuda", target_os = "linux"))]

/// Modules that a device loads for itself when it is opened.
const OURS: i64 = 3;

#[path = "under_test/eventually.rs"]
mod eventually;
#[path = "under_test/foreign.rs"]
mod foreign;
#[path = "../crates/gpu-await-algorithms/tests/under_test/foreign_arrays.rs"]
mod foreign_arrays;
#[path = "under_test/given_up.rs"]
mod given_up;
#[path = "under_test/limited.rs"]
mod limited;
#[path = "under_test/random.rs"]
mod random;
#[path = "under_test/slices.rs"]
mod slices;

#[path = "driver_calls/algorithms.rs"]
mod algorithms;
#[path = "driver_calls/compile.rs"]
mod compile;
#[path = "driver_calls/context.rs"]
mod context;
#[path = "driver_calls/counts.rs"]
mod counts;
#[path = "driver_calls/cudarc.rs"]
mod cudarc_types;
#[path = "driver_calls/drops.rs"]
mod drops;
#[path = "driver_calls/edges.rs"]
mod edges;
#[path = "driver_calls/elementwise.rs"]
mod elementwise;
#[path = "driver_calls/errors.rs"]
mod errors;
#[path = "driver_calls/events.rs"]
mod events;
#[path = "driver_calls/failures.rs"]
mod failures;
#[path = "driver_calls/forks.rs"]
mod forks;
#[path = "driver_calls/gates.rs"]
mod gates;
#[path = "driver_calls/graph.rs"]
mod graph;
#[path = "driver_calls/growable.rs"]
mod growable;
#[path = "driver_calls/host_functions.rs"]
mod host_functions;
#[path = "driver_calls/launches.rs"]
mod launches;
#[path = "driver_calls/libraries.rs"]
mod libraries;
#[path = "driver_calls/loss.rs"]
mod loss;
#[path = "driver_calls/markers.rs"]
mod markers;
#[path = "driver_calls/memory.rs"]
mod memory;
#[path = "driver_calls/order.rs"]
mod order;
#[path = "driver_calls/overlap.rs"]
mod overlap;
#[path = "driver_calls/partitions.rs"]
mod partitions;
#[path = "driver_calls/peers.rs"]
mod peers;
#[path = "driver_calls/pieces.rs"]
mod pieces;
#[path = "driver_calls/replay.rs"]
mod replay;
#[path = "driver_calls/reservations.rs"]
mod reservations;
#[path = "driver_calls/shared.rs"]
mod shared;
#[path = "driver_calls/shared_memory.rs"]
mod shared_memory;
#[path = "driver_calls/staged.rs"]
mod staged;
#[path = "driver_calls/timeline.rs"]
mod timeline;
#[path = "driver_calls/unwritten.rs"]
mod unwritten;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use eventually::eventually;
use gpu_await::{Completion, Device, Kernel, Op, Stream, kernels};
use random::Random;
use stand_in_cuda::{StandIn, assert_child, is_child, test_of, under_the_stand_in};

/// Every way of learning of completions.
const MODES: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];

/// How long anything may take that must not hang.
const SOON: Duration = Duration::from_secs(5);

/// As [`under_the_stand_in`], with an async body that may take five seconds at any one await of
/// [`soon`].
fn async_under_the_stand_in<F>(body: F)
where
    F: AsyncFnOnce(&StandIn),
{
    if !is_child() {
        return assert_child(test_of::<F>(), &[]);
    }
    let driver = StandIn::open();
    // Of one type for all tests: a runtime is much to compile.
    let body: Pin<Box<dyn Future<Output = ()> + '_>> = Box::pin(body(&driver));
    runtime().block_on(body);
    assert_eq!(driver.misuse(), [""; 0]);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
}

/// Awaits what must not hang.
async fn soon<F: Future>(future: F) -> F::Output {
    match tokio::time::timeout(SOON, future).await {
        Ok(output) => output,
        Err(_) => panic!("nothing within {SOON:?}"),
    }
}

/// A device whose streams keep nothing that is freed, so that each buffer is an allocation. It has made
/// the calls that opening it makes in the background.
fn device_with(mode: Completion) -> Device {
    let device = Device::builder()
        .completion(mode)
        .spare_bytes_per_stream(0)
        .cuda(0)
        .expect("the stand-in has a device");
    eventually("the first slab", || device.stats().pinned_bytes > 0);
    device
}

/// What a stream remembers of the waits for its work: in the mode `Adaptive`, that decides how it is
/// marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remembers {
    Nothing,
    ShortWaits,
    ALongWait,
}

/// Polls once with a waker that nobody hears.
fn poll_once<T>(op: &mut Op<T>) -> bool {
    Pin::new(op).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

fn stream_after_short_waits(driver: &StandIn, device: &Device, empty: &kernels::empty) -> Stream {
    // Complete within the call, so that the wait takes no time at all, unless the poller looks at the
    // stream just then.
    driver.instant(true);
    let end = Instant::now() + SOON;
    loop {
        let stream = device.stream().expect("a stream");
        if poll_once(&mut empty.launch(&stream)) {
            driver.instant(false);
            return stream;
        }
        assert!(Instant::now() < end, "no wait of no length within {SOON:?}");
        drop_stream(driver, stream);
    }
}

/// Drops a stream, and waits until the device's thread has destroyed the driver's.
fn drop_stream(driver: &StandIn, stream: Stream) {
    let destroyed =
        || driver.calls().iter().filter(|call| Line(call).name() == "cuStreamDestroy_v2").count();
    let before = destroyed();
    drop(stream);
    eventually("the stream is destroyed", || destroyed() > before);
}

/// A stream that remembers that.
async fn stream_that(driver: &StandIn, device: &Device, remembers: Remembers) -> Stream {
    let mut stream = device.stream().expect("a stream");
    let modules = driver.live("module");
    match remembers {
        Remembers::Nothing => {}
        Remembers::ShortWaits => {
            let empty = kernels::empty::load(device).await.expect("loads");
            let other = stream_after_short_waits(driver, device, &empty);
            drop_stream(driver, std::mem::replace(&mut stream, other));
        }
        Remembers::ALongWait => {
            let spin = kernels::spin::load(device).await.expect("loads");
            // Of one whose end is seen by chance, while the task is about to ask, it would remember nothing.
            for _ in 0..3 {
                soon(spin.launch(&stream, 1_000_000)).await.expect("completes");
            }
        }
    }
    // So that what comes next sees nothing of the kernel's end.
    eventually("the kernel is unloaded", || driver.live("module") <= modules);
    stream
}

/// A kernel of `kernels/` with any parameters, by its text.
async fn kernel_from<S: gpu_await::Signature>(
    device: &Device,
    ptx: &'static str,
    name: &str,
) -> Kernel<S> {
    let module = gpu_await::Module::load(device, gpu_await::Image::ptx(ptx)).await.expect("loads");
    // SAFETY: the stand-in's kernels touch what its README says, within the memory they are given.
    unsafe { module.kernel(name) }.expect("is there")
}

async fn axpy(device: &Device) -> kernels::axpy {
    kernels::axpy::load(device).await.expect("axpy loads")
}

/// A line of the journal.
struct Line<'a>(&'a str);

impl<'a> Line<'a> {
    fn name(&self) -> &'a str {
        self.0.split(' ').next().unwrap_or_default()
    }

    fn has(&self, word: &str) -> bool {
        self.0.split(' ').any(|part| part == word)
    }

    /// The value of `key=value`.
    fn value(&self, key: &str) -> Option<&'a str> {
        self.0.split(' ').find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
    }

    fn thread(&self) -> u64 {
        self.value("thread").and_then(|thread| thread.parse().ok()).expect("a thread's number")
    }

    /// Asking how far the device is, and the brackets around it: what anybody may do at any time.
    fn asks(&self) -> bool {
        ["cuEventQuery", "cuStreamQuery", "cuThreadExchangeStreamCaptureMode"]
            .contains(&self.name())
    }
}

/// The calls of the calling thread that are no questions.
fn my_calls(driver: &StandIn) -> Vec<String> {
    let me = driver.thread();
    let mut calls = driver.calls();
    calls.retain(|line| Line(line).thread() == me && !Line(line).asks());
    calls
}

/// Their names.
fn my_names(driver: &StandIn) -> Vec<String> {
    my_calls(driver).iter().map(|line| Line(line).name().to_owned()).collect()
}

/// What lives in the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Live([(&'static str, i64); 8]);

impl Live {
    const KINDS: [&'static str; 8] =
        ["stream", "event", "memory", "registered", "module", "graph", "pool", "context"];

    /// When everything that was put on streams is complete: what is freed there lives until then.
    fn settled(driver: &StandIn) -> Live {
        let end = Instant::now() + SOON;
        while driver.live("command") > 0 {
            assert!(Instant::now() < end, "commands do not end");
            std::thread::yield_now();
        }
        Live::now(driver)
    }

    fn now(driver: &StandIn) -> Live {
        Live(Live::KINDS.map(|kind| (kind, driver.live(kind))))
    }

    fn is_nothing(&self) -> bool {
        self.0.iter().all(|(_, count)| *count == 0)
    }

    fn of(&self, kind: &str) -> i64 {
        self.0.iter().find(|(known, _)| *known == kind).expect("a kind").1
    }

    /// Waits until as much lives as before, but for `left` of the kinds that are named there.
    fn comes_back(&self, driver: &StandIn, left: &[(&str, i64)], context: &str) {
        let end = Instant::now() + SOON;
        loop {
            let now = Live::now(driver);
            let same = Live::KINDS.iter().all(|kind| {
                let may_be_left =
                    left.iter().find(|(name, _)| name == kind).map_or(0, |(_, most)| *most);
                (0..=may_be_left).contains(&(now.of(kind) - self.of(kind)))
            });
            if same {
                return;
            }
            assert!(Instant::now() < end, "{context}: {self:?} lived before, {now:?} lives now");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts for each thread.
struct Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no count any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's layout, as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Waits once for a lock: the first time that a thread does, the lock's library allocates.
fn contend() {
    static LOCK: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let guard = LOCK.lock();
    std::thread::scope(|scope| {
        let (here, there) = std::sync::mpsc::channel();
        scope.spawn(move || {
            let _guard = LOCK.lock();
            here.send(()).expect("the other end is there");
            std::thread::sleep(Duration::from_millis(20));
        });
        drop(guard);
        there.recv().expect("the thread has the lock");
        drop(LOCK.lock());
    });
}

/// The allocations that `work` makes on this thread.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}
