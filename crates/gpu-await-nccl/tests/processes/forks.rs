//! The child of a fork: its ids, communicators, counters and watchdog are its own.
#![cfg(unix)]

use std::time::{Duration, Instant};

use futures::executor::block_on;
use gpu_await::{Device, DeviceKind};
use gpu_await_nccl::{Communicator, Error, LostCause, Reduction, UniqueId, stats};

use crate::child;

const LIMIT: Duration = Duration::from_secs(10);

/// Two communicators of a rank each, which meet at a new id, and so over this process's listener.
fn connect(device: &Device) -> (UniqueId, Vec<Communicator>) {
    let id = UniqueId::new(DeviceKind::Host).expect("an id");
    let rank = |rank| Communicator::builder(id, 2).limit(LIMIT).rank(rank, device).connect();
    let comms = block_on(futures::future::try_join_all((0..2).map(rank)));
    (id, comms.expect("connected"))
}

/// Uses them, and loses them by their limit, which the watchdog keeps.
fn use_and_lose(device: &Device, comms: &[Communicator]) {
    let mut sums: Vec<_> =
        (0..2).map(|_| device.ones::<f32>(10).queued().expect("memory")).collect();
    let ops = comms.iter().zip(&mut sums);
    let ops: Vec<_> = ops.map(|(comm, x)| comm.all_reduce_in_place(x, Reduction::Sum)).collect();
    block_on(futures::future::try_join_all(ops)).expect("no failure");
    let sum = block_on(device.download(&sums[0])).expect("no failure");
    assert_eq!(sum[..], [2.0; 10]);
    comms[0].set_limit(Some(Duration::from_millis(50)));
    // The other rank never comes.
    let error = block_on(comms[0].all_reduce_in_place(&mut sums[0], Reduction::Sum)).unwrap_err();
    let lost = Error::lost(&error).expect("of a lost communicator");
    assert!(matches!(lost.cause, LostCause::TimedOut { .. }), "{error}");
}

#[test]
fn the_child_of_a_fork() {
    if child::parameter().is_none() {
        child::run(concat!(module_path!(), "::the_child_of_a_fork"), "");
        return;
    }
    let device = Device::host();
    let (id, comms) = connect(&device);
    use_and_lose(&device, &comms);
    let (other, kept) = connect(&device);
    assert!(stats().communicators >= 2 && stats().lost_communicators >= 1, "{:?}", stats());
    // SAFETY: the other threads of this process sleep, and hold no lock that the child needs.
    let forked = unsafe { libc::fork() };
    if forked == 0 {
        let done = std::panic::catch_unwind(|| {
            let zero = stats();
            assert_eq!(
                (zero.communicators, zero.lost_communicators, zero.threads_in_nccl),
                (0, 0, 0)
            );
            let device = Device::host();
            let (own, comms) = connect(&device);
            assert!(own != id && own != other);
            use_and_lose(&device, &comms);
        });
        std::process::exit(i32::from(done.is_err()));
    }
    let (mut status, end) = (-1, Instant::now() + Duration::from_secs(50));
    // SAFETY: the status is written for the length of the call.
    while unsafe { libc::waitpid(forked, &raw mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > end {
            // SAFETY: it is this process's child, and was not waited for.
            unsafe { libc::kill(forked, libc::SIGKILL) };
            panic!("the child waits for something");
        }
        std::thread::yield_now();
    }
    assert_eq!(status, 0);
    // The parent's go on.
    use_and_lose(&device, &kept);
}
