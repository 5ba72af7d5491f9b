//! Drops of everything, in any order, with work in flight; and the end of the process.

use std::any::Any;
use std::sync::{Mutex, OnceLock};

use gpu_await::{Completion, Device, Stream};

use super::{
    Live, MODES, Random, SOON, async_under_the_stand_in, axpy, device_with, eventually, my_names,
    soon,
};
use stand_in_cuda::StandIn;

/// Everything of a device, with work on it that is held.
async fn everything(driver: &StandIn, mode: Completion) -> Vec<Box<dyn Any + Send>> {
    let device = device_with(mode);
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let axpy = axpy(&device).await;
    let x = a.upload(vec![1.0f32; 1000]).queued().unwrap();
    let mut y = a.full(1000, 2.0f32).queued().unwrap();
    let mut z = b.full(1000, 2.0f32).queued().unwrap();
    soon(device.done()).await.unwrap();
    let pinned = soon(a.download(&x)).await.unwrap();
    let spare = device.pinned::<u8>(100).unwrap();
    let flag = device.pinned_flag().unwrap();
    std::mem::forget(driver.hold());
    let upload = a.upload(vec![1.0f32; 5000]);
    let launch = axpy.launch(&a, 3.0, &x, &mut y);
    axpy.launch(&b, 3.0, &y, &mut z).queued().unwrap();
    let (mut left, mut right) = z.split_at_mut(500).unwrap();
    a.fill(&mut left, 1.0).queued().unwrap();
    b.fill(&mut right, 2.0).queued().unwrap();
    let event = b.record().unwrap();
    let timed = a.record_timed().unwrap();
    let download = b.download(&z);
    let host_fn = a.host_fn(|| vec![7; 100]);
    let again = b.upload_into(pinned, &mut y);
    let mut waiting = Box::pin(b.done());
    let polled = futures::poll!(&mut waiting);
    assert!(polled.is_pending());
    let mut watching = Box::pin(tokio::time::timeout(SOON, a.done()));
    assert!(futures::poll!(&mut watching).is_pending());
    vec![
        Box::new(upload),
        Box::new(launch),
        Box::new(event),
        Box::new(timed),
        Box::new(download),
        Box::new(host_fn),
        Box::new(again),
        Box::new(waiting),
        Box::new(watching),
        Box::new(spare),
        Box::new(flag),
        Box::new(x),
        Box::new(y),
        Box::new(z),
        Box::new(axpy),
        Box::new(a),
        Box::new(b),
        Box::new(device),
    ]
}

/// Lets held commands go on.
fn let_go(driver: &StandIn) {
    drop(driver.hold());
}

#[test]
fn drops_in_any_order_free_nothing_early_and_leave_nothing() {
    async_under_the_stand_in(async |driver| {
        let mut shuffle = Random(0x9E37_79B9_7F4A_7C15);
        for round in 0..40 {
            let mode = MODES[round % MODES.len()];
            let before = Live::now(driver);
            let mut things = everything(driver, mode).await;
            // Some go while everything is held, the rest when it runs.
            let free_before = driver.live("memory");
            for _ in 0..shuffle.below(things.len() + 1) {
                let index = shuffle.below(things.len());
                drop(things.swap_remove(index));
            }
            assert_eq!(driver.live("memory"), free_before, "held: nothing is freed");
            let_go(driver);
            while !things.is_empty() {
                let index = shuffle.below(things.len());
                drop(things.swap_remove(index));
                tokio::task::yield_now().await;
            }
            before.comes_back(driver, &[], &format!("round {round}, {mode:?}"));
            assert_eq!(driver.misuse(), [""; 0], "round {round}, {mode:?}");
        }
    });
}

#[test]
fn a_leaked_op_leaks_nothing_of_the_drivers() {
    async_under_the_stand_in(async |driver| {
        let before = Live::now(driver);
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
        std::mem::forget(stream.done());
        let bytes = device.stats().allocated_bytes;
        drop(x);
        soon(stream.zeros::<u8>(1)).await.unwrap();
        assert!(device.stats().allocated_bytes < bytes);
        drop((stream, device));
        before.comes_back(driver, &[], "a leaked op");
    });
}

#[test]
fn a_refused_word_keeps_no_page_of_a_stream_that_goes_before_it_is_through() {
    async_under_the_stand_in(async |driver| {
        let before = Live::now(driver);
        let builder = Device::builder().completion(Completion::Word);
        // Freed at once, behind all that has a ticket.
        let device = builder.spare_bytes_per_stream(0).cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(1000).queued().unwrap();
        driver.fail_after_effect("cuStreamWriteValue64_v2", 1, 1);
        // Marked, and awaited by nobody: the poller does not have the stream.
        for _ in 0..200 {
            stream.fill(&mut x, 1).queued().unwrap();
        }
        assert_eq!(driver.forgive(), 0, "a word was refused");
        eventually("all is complete", || stream.is_idle());
        let held = driver.hold();
        drop((x, stream));
        drop((held, device));
        before.comes_back(driver, &[], "a refused word");
    });
}

static STAND_IN: OnceLock<StandIn> = OnceLock::new();
static THINGS: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Registered before the crate's handler, so it runs after it. The lines of the last calls tell who
/// made them.
extern "C" fn at_exit() {
    let Some(driver) = STAND_IN.get() else { return };
    let count = driver.count();
    // Nobody looks any more when the work goes on, nor when the last owners go.
    drop(driver.hold());
    THINGS.lock().unwrap().drain(..).for_each(drop);
    std::thread::sleep(std::time::Duration::from_millis(100));
    if driver.count() != count || !driver.misuse().is_empty() {
        eprintln!("after main: {:#?}, {:#?}", driver.calls(), driver.misuse());
        // SAFETY: ends the process, with nothing in between.
        unsafe { libc::_exit(3) };
    }
}

/// The driver, in a child process that runs the test of that name and ends with `at_exit`; none in the parent, for which the child ran.
fn in_child(name: &str, at_exit: extern "C" fn()) -> Option<&'static StandIn> {
    if !stand_in_cuda::is_child() {
        stand_in_cuda::assert_child(name, &[]);
        return None;
    }
    let driver = STAND_IN.get_or_init(StandIn::open);
    // SAFETY: a plain function that lives as long as the program.
    unsafe { libc::atexit(at_exit) };
    Some(driver)
}

fn exit_with_work_pending(mode: Completion) {
    let name =
        format!("drops::the_process_ends_with_work_pending_{}", format!("{mode:?}").to_lowercase());
    let Some(driver) = in_child(&name, at_exit) else { return };
    let runtime = super::runtime();
    *THINGS.lock().unwrap() = runtime.block_on(everything(driver, mode));
    // As in a program that returns from `main` and has a runtime in a static.
    std::mem::forget(runtime);
}

#[test]
fn the_process_ends_with_work_pending_adaptive() {
    exit_with_work_pending(Completion::Adaptive);
}

#[test]
fn the_process_ends_with_work_pending_event() {
    exit_with_work_pending(Completion::Event);
}

#[test]
fn the_process_ends_with_work_pending_word() {
    exit_with_work_pending(Completion::Word);
}

#[test]
fn the_process_ends_with_work_pending_callback() {
    exit_with_work_pending(Completion::Callback);
}

/// Registered before the crate's handler, so it runs after it.
extern "C" fn nothing_is_left() {
    let Some(driver) = STAND_IN.get() else { return };
    let left = Live::settled(driver);
    if !left.is_nothing() {
        eprintln!("after main: {left:?}");
        // SAFETY: ends the process, with nothing in between.
        unsafe { libc::_exit(3) };
    }
}

/// Registered before the crate's handler, so it runs after it, and the driver's own would as well.
extern "C" fn nobody_is_in_the_driver() {
    let Some(driver) = STAND_IN.get() else { return };
    if driver.leaving() > 0 {
        eprintln!("after main: a thread is in the driver");
        // SAFETY: ends the process, with nothing in between.
        unsafe { libc::_exit(3) };
    }
}

/// A driver, or a tool under it, that takes its time to let a context go, is not torn down meanwhile.
#[test]
fn the_end_of_the_process_waits_for_a_device_that_closes() {
    const NAME: &str = "drops::the_end_of_the_process_waits_for_a_device_that_closes";
    let Some(driver) = in_child(NAME, nobody_is_in_the_driver) else { return };
    driver.slow_release(std::time::Duration::from_millis(1500));
    super::runtime().block_on(async {
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        soon(stream.upload(vec![1.0f32; 1000])).await.unwrap();
    });
}

/// As above; and threads whose owner goes only now do not end any more.
extern "C" fn no_thread_ends() {
    let Some(driver) = STAND_IN.get() else { return };
    nobody_is_in_the_driver();
    driver.slow_thread_end(SLOW);
    THINGS.lock().unwrap().drain(..).for_each(drop);
    std::thread::sleep(std::time::Duration::from_millis(100));
    nobody_is_in_the_driver();
}

const SLOW: std::time::Duration = std::time::Duration::from_millis(1000);

/// A driver, or a tool under it, that has things to do as a thread ends that called it, is not torn down meanwhile.
#[test]
fn the_end_of_the_process_waits_for_threads_that_end() {
    const NAME: &str = "drops::the_end_of_the_process_waits_for_threads_that_end";
    let Some(driver) = in_child(NAME, no_thread_ends) else { return };
    super::runtime().block_on(async {
        let devices = [(); 3].map(|()| Device::cuda(0).unwrap());
        for device in &devices {
            let stream = device.stream().unwrap();
            soon(stream.upload(vec![1.0f32; 1000])).await.unwrap();
            drop(stream);
            eventually("the thread for errands has one", || device.stats().streams == 1);
        }
        let [slow, quick, left] = devices;
        driver.slow_thread_end(SLOW);
        drop(slow);
        eventually("one of its threads is ending", || driver.leaving() > 0);
        driver.slow_thread_end(std::time::Duration::ZERO);
        drop(quick);
        THINGS.lock().unwrap().push(Box::new(left));
    });
}

/// What `main` drops as it returns is the driver's again before the process ends.
#[test]
fn a_process_that_drops_its_device_last_leaves_nothing() {
    const NAME: &str = "drops::a_process_that_drops_its_device_last_leaves_nothing";
    let Some(driver) = in_child(NAME, nothing_is_left) else { return };
    super::runtime().block_on(async {
        let devices = MODES.map(|mode| Device::builder().completion(mode).cuda(0).unwrap());
        for device in devices {
            let stream = device.stream().unwrap();
            let x = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
            soon(stream.download(&x)).await.unwrap();
            // The last handle goes where users' values are dropped.
            let last = SlowToDrop(device.clone());
            stream.host_fn(move || last).abandon();
            soon(stream.done()).await.unwrap();
        }
        // The poller has a look at an adopted stream, whose owner is the last handle.
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        // SAFETY: the owner keeps the stream, and nobody captures it.
        let handle = unsafe { stream.as_raw() };
        // SAFETY: as above.
        let adopted = unsafe { Stream::from_raw(&device, handle, stream) }.unwrap();
        let held = driver.hold();
        let mut op = adopted.upload(vec![1.0f32; 1000]);
        let waits = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(waits, &mut op).await.is_err(), "held");
        drop(held);
        soon(op).await.unwrap();
    });
}

struct SlowToDrop(#[expect(dead_code, reason = "only dropped")] Device);

impl Drop for SlowToDrop {
    fn drop(&mut self) {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Only the poller is left to find out that the other stream is through with the memory, and it has no
/// other reason to look at that.
#[test]
fn memory_of_two_streams_is_freed_though_nobody_awaits_anything() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
            soon(b.host_fn(|| ())).await.unwrap();
            let x = a.full(1000, 7u32).queued().unwrap();
            let mut y = b.zeros::<u32>(1000).queued().unwrap();
            soon(device.done()).await.unwrap();
            let held = driver.hold();
            driver.clear();
            b.copy(&x, &mut y).queued().unwrap();
            drop(x);
            // Behind the copy, for the drop.
            eventually("a marker", || {
                let names = driver.names();
                names.iter().any(|name| name == "cuEventRecord" || name.contains("WriteValue"))
            });
            drop(held);
            eventually("freed", || driver.live("memory") == 1);
        }
    });
}

/// How many streams were destroyed since the calls were cleared.
fn destroyed(driver: &StandIn) -> usize {
    driver.names().iter().filter(|name| *name == "cuStreamDestroy_v2").count()
}

/// Weights, and a stream for each request.
#[test]
fn streams_that_come_and_go_are_destroyed() {
    const MANY: usize = 300;
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            eventually("the device before is closed", || driver.live("stream") == 0);
            let device = device_with(mode);
            let weights = soon(device.full(1000, 1.0f32)).await.unwrap();
            let mut state = soon(device.full(1000, 2.0f32)).await.unwrap();
            // A doorbell comes with each stream, up to a number, and stays.
            driver.clear();
            drop((0..20).map(|_| device.stream().unwrap()).collect::<Vec<_>>());
            eventually("the doorbells alone", || destroyed(driver) == 20);
            let before = driver.live("stream");
            driver.clear();
            for number in 0..MANY {
                let stream = device.stream().unwrap();
                soon(stream.download(&weights)).await.unwrap();
                if number % 3 == 0 {
                    soon(stream.fill(&mut state, 3.0)).await.unwrap();
                }
            }
            eventually("destroyed", || driver.live("stream") == before);
            let names = driver.names();
            let count = |name: &str| names.iter().filter(|known| *known == name).count();
            assert_eq!(count("cuStreamDestroy_v2"), MANY, "{mode:?}");
            assert_eq!(device.stats().streams, 1, "{mode:?}");
            // An adopted one is not destroyed; its owner goes.
            let theirs = device.stream().unwrap();
            // SAFETY: the owner keeps the stream, and nobody captures it.
            let handle = unsafe { theirs.as_raw() };
            // SAFETY: as above.
            let adopted = unsafe { Stream::from_raw(&device, handle, theirs) }.unwrap();
            soon(adopted.download(&weights)).await.unwrap();
            adopted.fill(&mut state, 4.0).queued().unwrap();
            drop(adopted);
            eventually("its owner goes", || driver.live("stream") == before);
            assert_eq!(soon(device.download(&state)).await.unwrap()[0], 4.0);
        }
    });
}

#[test]
fn a_dropped_stream_is_waited_for_until_its_work_is_complete() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            eventually("the device before is closed", || driver.live("stream") == 0);
            let device = device_with(mode);
            let mut x = soon(device.full(1000, 1u32)).await.unwrap();
            driver.clear();
            drop((0..20).map(|_| device.stream().unwrap()).collect::<Vec<_>>());
            eventually("the doorbells alone", || destroyed(driver) == 20);
            let before = driver.live("stream");
            let stream = device.stream().unwrap();
            let held = driver.hold();
            stream.fill(&mut x, 2).queued().unwrap();
            drop(stream);
            for round in 0..3 {
                // The poller looks at it.
                tokio::time::sleep(std::time::Duration::from_millis(3)).await;
                driver.clear();
                device
                    .stream()
                    .unwrap()
                    .fill(&mut x.slice_mut(round..=round).unwrap(), 3)
                    .abandon();
                let names = my_names(driver);
                assert!(names.iter().any(|name| name == "cuStreamWaitEvent"), "{names:#?}");
                let names = driver.names();
                assert!(!names.iter().any(|name| name == "cuStreamDestroy_v2"), "{names:#?}");
            }
            drop(held);
            eventually("destroyed", || driver.live("stream") == before);
            assert_eq!(soon(device.download(&x)).await.unwrap()[..4], [3, 3, 3, 2]);
        }
    });
}

#[test]
fn what_a_dropped_stream_uses_goes_when_its_work_is_complete() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let before = Live::now(driver);
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            // A buffer keeps the stream that it was made on.
            let other = device.default_stream();
            let frozen = other.full(1000, 1.0f32).queued().unwrap().freeze();
            let frozen = soon(frozen).await.unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            soon(device.done()).await.unwrap();
            driver.clear();
            let held = driver.hold();
            axpy.launch(&stream, 3.0, &frozen, &mut y).queued().unwrap();
            let streams = device.stats().streams;
            drop((y, stream));
            assert_eq!(device.stats().streams, streams, "{mode:?}: its work goes on");
            drop((frozen, axpy));
            let ends = ["cuStreamDestroy_v2", "cuLibraryUnload"];
            // The poller looks again and again.
            for _ in 0..20 {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                // Both buffers.
                assert_eq!(device.stats().pending_bytes, 2 * 4096, "{mode:?}");
            }
            let names = driver.names();
            assert!(names.iter().all(|name| !ends.contains(&name.as_str())), "{names:#?}");
            drop(held);
            // Nobody asks: the poller does it by itself.
            eventually("all gone", || {
                let names = driver.names();
                let frees = names.iter().filter(|name| *name == "cuMemFreeAsync").count();
                frees == 2 && ends.iter().all(|end| names.iter().any(|name| name == end))
            });
            let stats = device.stats();
            assert_eq!((stats.pending_bytes, stats.streams), (0, streams - 1), "{mode:?}");
            drop(device);
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}
