//! Waiting where cores are few: tasks that look for themselves must not keep the core from whom they wait for, in a
//! container with one core above all.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;

use futures::future::try_join_all;
use gpu_await::{Device, Error, Result, kernels};

use crate::under_test::child;

/// Polls of an await: a few. A task that kept the core was polled some 100 to 170 times, until its time slice was over.
const POLLS: u64 = 30;

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

/// Awaits, and counts how often that is polled.
async fn counted<F: Future + Unpin>(mut future: F, polls: &Cell<u64>) -> F::Output {
    poll_fn(|cx| {
        polls.set(polls.get() + 1);
        Pin::new(&mut future).poll(cx)
    })
    .await
}

/// However long it takes beside what else runs on that core: each poll that finds nothing lets the host device's streams,
/// which are threads, and the poller have it.
#[test]
fn one_core_is_left_to_the_device() -> Result<()> {
    if !child::is_alone(concat!(module_path!(), "::one_core_is_left_to_the_device")) {
        return Ok(());
    }
    const ROUNDS: u64 = 300;
    stay_on_one_core();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    for tasks in [1, 4] {
        let device = Device::host();
        let scale = kernels::scale::load_blocking(&device)?;
        let polls = Cell::new(0);
        let task = || async {
            let stream = device.stream()?;
            for value in 0..ROUNDS {
                let mut x = stream.full(16, value as f32).queued()?;
                scale.launch(&stream, 2.0, &mut x).queued()?;
                let y = counted(stream.download(&x), &polls).await?;
                assert_eq!(y, [2.0 * value as f32; 16]);
            }
            Ok::<_, Error>(())
        };
        runtime.block_on(try_join_all((0..tasks).map(|_| task())))?;
        let mean = polls.get() / (tasks * ROUNDS);
        assert!(mean < POLLS, "{tasks} tasks: {mean} polls an await");
    }
    Ok(())
}
