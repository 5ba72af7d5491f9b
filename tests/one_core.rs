//! Waiting where cores are few: tasks that look for themselves must not keep the core from whom they wait for, in a
//! container with one core above all.

use std::time::{Duration, Instant};

use futures::executor::block_on;
use futures::future::try_join_all;
use gpu_await::{Completion, Device, Error, Result, kernels, testing};

const ALL: [Completion; 4] =
    [Completion::Adaptive, Completion::Event, Completion::Word, Completion::Callback];

/// Long before the first millisecond is over.
const SOON: Duration = Duration::from_micros(600);

/// Keeps the calling thread, and all that it starts from now on, on the core where it runs.
fn stay_on_one_core() {
    // SAFETY: takes nothing, and touches nothing.
    let core = unsafe { libc::sched_getcpu() };
    // SAFETY: all zeros is the empty set.
    let mut cores: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let core = usize::try_from(core).expect("a core");
    // SAFETY: the set is live, and no machine has more cores than it holds.
    unsafe { libc::CPU_SET(core, &mut cores) };
    // SAFETY: 0 is the calling thread; the set is live and of that size.
    let refused = unsafe { libc::sched_setaffinity(0, size_of_val(&cores), &raw const cores) };
    assert_eq!(refused, 0, "{}", std::io::Error::last_os_error());
}

/// How long tasks take for round trips, each on a stream of its own.
fn round_trips(mode: Completion, tasks: usize) -> Result<Duration> {
    let device = testing::device_with(mode);
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let task = |device: Device, scale: kernels::scale| async move {
        let stream = device.stream()?;
        for value in 0..400 / tasks {
            let mut x = stream.full(16, value as f32).queued()?;
            scale.launch(&stream, 2.0, &mut x).queued()?;
            assert_eq!(stream.download(&x).await?, [2.0 * value as f32; 16]);
        }
        Ok::<_, Error>(())
    };
    let scale = kernels::scale::load_blocking(&device)?;
    runtime.block_on(try_join_all((0..tasks).map(|_| task(device.clone(), scale.clone()))))?;
    let start = Instant::now();
    runtime.block_on(try_join_all((0..tasks).map(|_| task(device.clone(), scale.clone()))))?;
    Ok(start.elapsed())
}

/// Where the poller alone looks, nobody spins: what the default mode adds to that must not take the core from the
/// device's threads. It took 4 times as long, and 15 in a build that is optimized.
#[test]
fn one_core_is_left_to_the_device() -> Result<()> {
    stay_on_one_core();
    for tasks in [1, 4] {
        let quickest = |mode| -> Result<Duration> {
            let times: Result<Vec<_>> = (0..5).map(|_| round_trips(mode, tasks)).collect();
            Ok(times?.into_iter().min().unwrap_or_default())
        };
        let (event, adaptive) = (quickest(Completion::Event)?, quickest(Completion::Adaptive)?);
        assert!(2 * adaptive < 5 * event, "{tasks} tasks: {adaptive:?} against {event:?}");
    }
    Ok(())
}

/// A short wait is found late by some twenty microseconds in every mode, and by what a busy machine adds: half of
/// them stay far from the millisecond after which long waits are looked at.
#[test]
fn short_waits_end_soon_in_every_mode() -> Result<()> {
    for mode in ALL {
        let device = testing::device_with(mode);
        let stream = device.stream()?;
        let wait = || -> Result<Duration> {
            let start = Instant::now();
            block_on(stream.full(4096, 1_u8))?;
            Ok(start.elapsed())
        };
        let times: Result<Vec<_>> = (0..200).map(|_| wait()).collect();
        let mut times = times?;
        times.sort();
        let median = times[times.len() / 2];
        assert!(median < SOON, "{mode:?}: half took {median:?} or more");
    }
    Ok(())
}
