//! The child of a fork, as the driver sees it: not at all. Its memory of the driver is a copy, what it maps is its parent's.
#![cfg(target_os = "linux")]

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use futures::FutureExt;
use gpu_await::{Completion, Device, DeviceBuffer, Graph, In, InOut, Op, Region, Stream, kernels};
use gpu_await_algorithms::{Algorithms, transform};

use super::{StandIn, async_under_the_stand_in, device_with, eventually, soon};

/// What the parent has, with work of its on the device.
struct Parent {
    device: Device,
    stream: Stream,
    scale: kernels::scale,
    x: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
    graph: Graph<(In<f32>, InOut<f32>)>,
    region: Region,
}

/// Whether no other thread runs, in two looks.
fn others_sleep() -> bool {
    let states = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
    };
    (0..2).all(|_| states().filter(|state| !state.contains(") S ")).count() == 1)
}

fn ends<T>(_: T) {}

/// Every call that could reach the driver, each of which ends with an error or without one.
fn call_all(parent: &mut Parent) {
    let Parent { device, stream, scale, x, y, graph, region } = parent;
    macro_rules! blocked { ($($call:expr;)+) => { $( ends(futures::executor::block_on($call)); )+ } }
    macro_rules! called { ($($call:expr;)+) => { $( ends($call); )+ } }
    called! {
        device.stream();
        stream.zeros::<f32>(10).queued();
        stream.upload(vec![1.0f32]).synchronize();
        stream.copy(x, y).queued();
        stream.fill(y, 1.0).queued();
        scale.launch(stream, 1.0, y).queued();
        stream.transform_in_place(transform!(|x| x + 1.0), (), &mut *y).queued();
        device.synchronize();
        stream.synchronize();
        stream.record();
        stream.batch(|q| q.zeros::<f32>(10)).queued();
        stream.replay(region, |q| q.fill(y, 0.0)).queued();
        graph.launch(stream, (&*x, &mut *y)).queued();
        stream.slab::<f32>(2, 2).queued();
        device.memory();
        device.stats();
        stream.is_idle();
        stream.backlog();
        device.pinned::<u8>(10);
        device.pinned::<u8>(100 << 20);
        device.pinned_flag();
        device.event();
        kernels::scale::load_blocking(device);
        Device::cuda(0);
        Device::cuda_or_host();
    }
    blocked! {
        stream.download(x);
        stream.sum(x);
        stream.done();
        device.done();
        Device::all_done([&*device]);
        device.lost();
        device.reserve(10);
        device.growable::<u8>(10);
        device.trim(0);
        device.reserve_partition(1);
        device.host_slab::<f32>(1 << 12, 1 << 10);
        device.pinned_async::<u8>(10);
        stream.upload_staged(vec![1f32; 1 << 20]);
        stream.download_staged(x);
        kernels::add::load(device);
        device.close(Duration::from_secs(1));
    }
}

fn parent(completion: Completion) -> Parent {
    let device = device_with(completion);
    let stream = device.stream().unwrap();
    let x = stream.full(100, 1.0f32).queued().unwrap();
    let mut y = stream.full(100, 2.0f32).queued().unwrap();
    let scale = kernels::scale::load_blocking(&device).unwrap();
    let graph =
        device.graph::<(In<f32>, InOut<f32>), _, _>((), |q, (), (x, mut y)| q.copy(&x, &mut y));
    scale.launch(&stream, 1.0, &mut y).synchronize().unwrap();
    Parent { device, stream, scale, x, y, graph, region: Region::new() }
}

/// How a child ended that called everything: with the calls that it made, or by a signal of its own if a lock that another thread held at the fork
/// stayed locked.
fn status_of_a_child(
    driver: &StandIn,
    mut parent: Parent,
    mut pending: Op<()>,
) -> (c_int, Parent, Op<()>) {
    eventually("no other thread runs: it may hold a lock", others_sleep);
    driver.clear();
    // SAFETY: the other threads of this process sleep, and hold no lock that the child needs, or it ends.
    let child = unsafe { driver.fork() };
    if child == 0 {
        // SAFETY: the calls take integers, and affect this process alone.
        unsafe { libc::alarm(3) };
        driver.clear();
        let called = catch_unwind(AssertUnwindSafe(|| {
            call_all(&mut parent);
            drop((&mut pending).now_or_never());
            drop((pending, parent));
        }));
        let made = driver.names();
        if called.is_err() || !made.is_empty() {
            eprintln!("the child called {made:?}");
        }
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(called.is_err() || !made.is_empty())) };
    }
    let mut status = -1;
    // SAFETY: the status is written for the length of the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    (status, parent, pending)
}

/// Whatever the child of a fork calls, while its parent's work runs, and whatever it drops: not one call reaches the driver.
#[test]
fn a_child_makes_no_call() {
    async_under_the_stand_in(async |driver| {
        for completion in super::MODES {
            let mut parent = parent(completion);
            let held = driver.hold();
            let mut pending = parent.scale.launch(&parent.stream, 2.0, &mut parent.y);
            drop((&mut pending).now_or_never());
            let mut status = libc::SIGALRM;
            for _ in 0..5 {
                if status == libc::SIGALRM {
                    (status, parent, pending) = status_of_a_child(driver, parent, pending);
                }
            }
            assert_eq!(status, 0, "{completion:?}");
            drop(held);
            soon(pending).await.unwrap();
            soon(parent.stream.done()).await.unwrap();
        }
    });
}
