//! A fault resolves everything with `DeviceLost`, whatever the way of learning of completions, and
//! then the driver is left alone.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Wake, Waker};

use gpu_await::{Completion, Error, ErrorDetail, ErrorKind, LaunchConfig, LossCause};

use super::{Line, async_under_the_stand_in, device_with, eventually, kernel_from, soon};
use stand_in_cuda::StandIn;

fn assert_lost(error: &Error, code: i32, what: &str) {
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{what}: {error}");
    match error.detail() {
        ErrorDetail::DeviceLost { device, cause: LossCause::Driver(found) } => {
            assert_eq!((&**device, found.code), ("cuda:0", code), "{what}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// Loses the device while everything there is is pending, by `fault`, and looks at all of it.
async fn lose(driver: &StandIn, mode: Completion, code: i32, by_kernel: bool) {
    let what = &*format!("{mode:?}, {code}");
    let device = device_with(mode);
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let trap = kernel_from::<()>(&device, include_str!("../../kernels/trap.ptx"), "trap").await;
    let x = a.upload(vec![1.0f32; 1000]).queued().unwrap();
    let mut y = b.full(1000, 2.0f32).queued().unwrap();
    let done = soon(a.download(&x)).await.unwrap();
    let mut before = a.fill(&mut y, 3.0);
    soon(&mut before).await.unwrap();
    let lost = tokio::task::LocalSet::new();
    let loss = device.lost();
    let watcher = lost.spawn_local(loss.clone());

    // Pending: never polled, polled, on either stream, joined, with lent memory, with memory that
    // two streams use and nobody owns any more.
    let held = driver.hold();
    let z = a.full(1000, 4.0f32).queued().unwrap();
    let mut fill = b.fill(&mut y, 3.0);
    assert!(Pin::new(&mut fill).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let unpolled = a.download(&z);
    let download = b.download(&z);
    let host_fn = b.host_fn(|| 7);
    let joined = gpu_await::join_all([a.done(), b.done()]);
    drop(z);
    if by_kernel {
        a.launch(&trap, LaunchConfig::new(1, 1), ()).queued().unwrap();
    }
    let behind = a.done();
    let timed = b.timed(|_| Ok(()));
    let waiter = tokio::spawn(b.download(&y));
    tokio::task::yield_now().await;
    if !by_kernel {
        driver.lose(0, code);
    }
    drop(held);

    if by_kernel {
        // What ran before the fault may be complete.
        drop(soon(unpolled).await);
        drop(soon(joined).await);
        drop(soon(fill).await);
        drop(soon(download).await);
        drop(soon(host_fn).await);
        drop(soon(timed).await);
        drop(soon(waiter).await.unwrap());
    } else {
        assert_lost(&soon(unpolled).await.unwrap_err(), code, what);
        assert_lost(&soon(joined).await.unwrap_err(), code, what);
        assert_lost(&soon(fill).await.unwrap_err(), code, what);
        assert_lost(&soon(download).await.unwrap_err(), code, what);
        assert_lost(&soon(host_fn).await.unwrap_err(), code, what);
        assert_lost(&soon(timed).await.unwrap_err(), code, what);
        assert_lost(&soon(waiter).await.unwrap().unwrap_err(), code, what);
    }
    assert_lost(&soon(behind).await.unwrap_err(), code, what);
    assert_lost(&soon(loss).await, code, what);
    assert_lost(&soon(lost.run_until(watcher)).await.unwrap(), code, what);

    // Later ones, of every kind.
    assert_lost(&soon(a.download(&x)).await.unwrap_err(), code, what);
    assert_lost(&a.fill(&mut y, 1.0).queued().unwrap_err(), code, what);
    assert_lost(&a.zeros::<u8>(1).queued().unwrap_err(), code, what);
    assert_lost(&soon(b.host_fn(|| 7)).await.unwrap_err(), code, what);
    assert_lost(&a.record().unwrap_err(), code, what);
    assert_lost(&a.record_timed().unwrap_err(), code, what);
    assert_lost(&device.stream().unwrap_err(), code, what);
    assert_lost(&device.pinned::<u8>(1).unwrap_err(), code, what);
    assert_lost(&device.memory().unwrap_err(), code, what);
    assert_lost(&device.synchronize().unwrap_err(), code, what);
    let image = gpu_await::Image::ptx(include_str!("../../kernels/spin.ptx"));
    assert_lost(&soon(gpu_await::Module::load(&device, image)).await.unwrap_err(), code, what);
    // What completed before the loss stays readable.
    assert!(before.is_complete());
    assert_eq!(&done[..3], [1.0; 3]);
    assert_eq!(device.stats().lent_bytes, 0, "{what}");

    // From here on the driver is left alone. A call that an errand was about to make as the device was lost is made.
    eventually("errands that had begun are over", errands_rest);
    driver.clear();
    drop((x, y, done, trap, a, b, device));
    eventually("the device's thread ends", || pollers() == 0);
    let calls = driver.calls();
    let calls: Vec<_> = calls.iter().map(|line| Line(line)).filter(|line| !line.asks()).collect();
    assert!(calls.is_empty(), "{what}: {:#?}", calls.iter().map(|line| line.0).collect::<Vec<_>>());
}

/// The pollers of this process: one a device.
fn pollers() -> usize {
    threads().filter(|thread| thread.contains("(gpu-await-cuda")).count()
}

/// Whether the threads for driver calls that may block wait for the next one.
fn errands_rest() -> bool {
    threads()
        .filter(|thread| thread.contains("(gpu-await-erran"))
        .all(|thread| thread.contains(") S "))
}

/// Of each thread: its number, its name and its state, among others.
fn threads() -> impl Iterator<Item = String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
}

macro_rules! each_mode {
    ($($name:ident: $mode:ident, $code:expr, $by_kernel:expr;)+) => {$(
        #[test]
        fn $name() {
            async_under_the_stand_in(async |driver| {
                lose(driver, Completion::$mode, $code, $by_kernel).await;
            });
        }
    )+};
}

each_mode! {
    a_trap_resolves_everything_adaptive: Adaptive, 719, true;
    a_trap_resolves_everything_event: Event, 719, true;
    a_trap_resolves_everything_word: Word, 719, true;
    a_trap_resolves_everything_callback: Callback, 719, true;
    a_lost_device_resolves_everything_adaptive: Adaptive, 700, false;
    a_lost_device_resolves_everything_event: Event, 214, false;
    a_lost_device_resolves_everything_word: Word, 715, false;
    a_lost_device_resolves_everything_callback: Callback, 700, false;
    a_launch_time_out_resolves_everything: Adaptive, 702, false;
    a_loss_with_a_code_that_nobody_knows_resolves_everything: Adaptive, 9999, false;
}

/// Whether it was woken; at that moment, how many others had been.
struct Woken(OnceLock<usize>, Vec<Arc<Woken>>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        let others = self.1.iter().filter(|other| other.0.get().is_some()).count();
        self.0.get_or_init(|| others);
    }
}

#[test]
fn a_loss_is_told_behind_what_it_fails() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Event);
        let streams = [(); 4].map(|()| device.stream().unwrap());
        let failed = [(); 4].map(|()| Arc::new(Woken(OnceLock::new(), Vec::new())));
        let told = Arc::new(Woken(OnceLock::new(), failed.to_vec()));
        let mut loss = device.lost();
        let waker = told.clone().into();
        assert!(Pin::new(&mut loss).poll(&mut Context::from_waker(&waker)).is_pending());
        let held = driver.hold();
        let mut done = streams.each_ref().map(|stream| {
            drop(stream.zeros::<u8>(100).queued().unwrap());
            stream.done()
        });
        for (done, waker) in done.iter_mut().zip(&failed) {
            let waker = waker.clone().into();
            assert!(Pin::new(done).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        driver.lose(0, 719);
        eventually("the loss is told", || told.0.get().is_some());
        assert_eq!(told.0.get(), Some(&streams.len()));
        drop(held);
    });
}

#[test]
fn a_sleeping_poller_tells_of_a_loss() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Callback);
        let stream = device.stream().unwrap();
        let held = driver.hold();
        let task = tokio::spawn(stream.zeros::<u8>(100));
        tokio::task::yield_now().await;
        let end = std::time::Instant::now() + super::SOON;
        while !driver.names().iter().any(|name| name == "cuLaunchHostFunc") {
            assert!(std::time::Instant::now() < end, "no doorbell was armed");
            tokio::task::yield_now().await;
        }
        driver.lose(0, 719);
        assert_lost(&soon(task).await.unwrap().unwrap_err(), 719, "nobody polled again");
        drop(held);
    });
}
