//! Random programs on a device without threads, beside a model of what each must give.
//!
//! A program puts work on streams, orders them, polls, drops and leaks futures, makes calls of the
//! driver fail, loses or closes the device, and chooses which stream runs its next command. Nothing in
//! it depends on a thread or on the time (one thread drops values of users, and nothing is asked of it
//! but that it does), so a seed does the same each time.
//!
//! Held: a future resolves once its task is polled after wake-ups alone; values are those of one step
//! after the other; a call fails if and only if a refusal struck it, or what it reads is poisoned, or
//! the device is gone, with the error of that; host functions run once, behind all that they were
//! ordered behind; in the end all memory is given back and what was lent is dropped. Memory that is
//! freed in use, or not ordered, loses the host device, which is then lost without a reason.
//!
//! | variable | effect |
//! |---|---|
//! | `GPU_AWAIT_SIMULATE_SECONDS` | runs each test for so long, from a fresh seed on |
//! | `GPU_AWAIT_SIMULATE` | what a failure printed: runs that program |

mod joined;
mod model;
mod program;
mod run;
mod watched;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime};

use gpu_await::Completion;
use program::{Action, Trouble};

use crate::under_test::child;
use crate::under_test::modes;

const SECONDS: &str = "GPU_AWAIT_SIMULATE_SECONDS";
const REPLAY: &str = "GPU_AWAIT_SIMULATE";

/// What a device that is lost leaves behind stays for the life of the process: so many programs a child,
/// where there are more than a few.
const CHILD: u64 = 1000;

/// A step with its number in the program of the seed.
type Steps = Vec<(usize, Action)>;

fn mode(seed: u64) -> Completion {
    modes::ALL[(seed % modes::ALL.len() as u64) as usize]
}

fn steps(seed: u64, trouble: Trouble) -> Steps {
    program::program(seed, trouble).into_iter().enumerate().collect()
}

/// What went wrong, if anything did.
fn failure(seed: u64, steps: &Steps) -> Option<String> {
    let ran = catch_unwind(AssertUnwindSafe(|| run::run(mode(seed), steps)));
    match ran {
        Ok(result) => result.err(),
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().map(|said| (*said).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
            Some(format!("panicked: {}", said.unwrap_or_default()))
        }
    }
}

/// The fewest steps that still fail, leaving out ever shorter runs of them.
fn shrink(seed: u64, mut steps: Steps) -> Steps {
    let mut len = steps.len() / 2;
    while len > 0 {
        let mut start = 0;
        while start < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(start..(start + len).min(steps.len()));
            if failure(seed, &fewer).is_some() {
                steps = fewer;
            } else {
                start += len;
            }
        }
        len /= 2;
    }
    steps
}

/// Shrinks what failed, and says how to run it again.
fn report(test: &str, seed: u64, failed: Steps) -> ! {
    let steps = shrink(seed, failed);
    let what = failure(seed, &steps).unwrap_or_else(|| "does not fail any more".to_owned());
    let numbers: Vec<_> = steps.iter().map(|(number, _)| number.to_string()).collect();
    let program: Vec<_> = steps.iter().map(|(n, action)| format!("  {n}: {action:?}")).collect();
    panic!(
        "{what}\nseed {seed}, {:?}:\n{}\nrun again with\n  {REPLAY}={seed}:{} cargo test --test programs simulation::{test}",
        mode(seed),
        program.join("\n"),
        numbers.join(","),
    );
}

/// The seed and the steps that `REPLAY` names.
fn replay(trouble: Trouble) -> Option<(u64, Steps)> {
    let value = std::env::var(REPLAY).ok()?;
    let (seed, numbers) = value.split_once(':').expect("a seed, a colon, and numbers of steps");
    let seed = seed.parse().expect("a seed");
    let chosen: Vec<usize> =
        numbers.split(',').map(|number| number.parse().expect("a step")).collect();
    let steps = steps(seed, trouble).into_iter().filter(|(number, _)| chosen.contains(number));
    Some((seed, steps.collect()))
}

/// Each device maps 2 MiB of pinned memory: in small pages only what is used of it has to be made.
#[cfg(target_os = "linux")]
fn without_huge_pages() {
    // SAFETY: it sets a flag of this process and touches no memory.
    let refused = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1_u64, 0_u64, 0_u64, 0_u64) };
    assert_eq!(refused, 0, "transparent huge pages cannot be turned off");
}

#[cfg(not(target_os = "linux"))]
fn without_huge_pages() {}

/// Runs `count` programs, or as many as the time that was asked for allows.
fn simulate(test: &str, trouble: Trouble, count: u64) {
    if let Some((seed, steps)) = replay(trouble) {
        steps.iter().for_each(|(number, action)| println!("{number}: {action:?}"));
        if let Some(what) = failure(seed, &steps) {
            panic!("{what}");
        }
        return;
    }
    without_huge_pages();
    if let Some(first) = child::parameter() {
        let first = first.parse().expect("a seed");
        (first..first + CHILD).for_each(|seed| one(test, seed, trouble));
        return;
    }
    let limit = std::env::var(SECONDS)
        .ok()
        .map(|seconds| Duration::from_secs(seconds.parse().expect("a number of seconds")));
    let first = limit.map_or(0, |_| {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos() as u64)
    });
    let (start, mut ran) = (Instant::now(), 0_u64);
    while limit.map_or(ran < count, |limit| start.elapsed() < limit) {
        if limit.is_some() && trouble == Trouble::Loss {
            child::run(&format!("{}::{test}", module_path!()), &(first + ran).to_string());
            ran += CHILD;
        } else {
            one(test, first + ran, trouble);
            ran += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let hour = ran as f64 / seconds * 3600.0;
    println!("{test}: {ran} schedules, {seconds:.1} s: {hour:.0} an hour");
}

/// Runs the program of a seed.
fn one(test: &str, seed: u64, trouble: Trouble) {
    let steps = steps(seed, trouble);
    if failure(seed, &steps).is_some() {
        report(test, seed, steps);
    }
}

#[test]
fn every_schedule_gives_what_one_step_after_the_other_gives() {
    let test = "every_schedule_gives_what_one_step_after_the_other_gives";
    simulate(test, Trouble::None, 2000);
}

#[test]
fn a_refused_call_fails_its_operation_and_its_readers_and_nobody_else() {
    let test = "a_refused_call_fails_its_operation_and_its_readers_and_nobody_else";
    simulate(test, Trouble::Refusals, 2000);
}

#[test]
fn a_loss_or_a_close_at_any_moment_resolves_every_future() {
    let test = "a_loss_or_a_close_at_any_moment_resolves_every_future";
    simulate(test, Trouble::Loss, 800);
}

#[test]
fn a_seed_makes_the_same_calls_each_time() {
    for seed in 0..60 {
        for trouble in [Trouble::None, Trouble::Refusals, Trouble::Loss] {
            let steps = steps(seed, trouble);
            let trace = || run::trace(mode(seed), &steps);
            let first = trace();
            assert!(first.len() > steps.len(), "seed {seed}: {first:?}");
            assert_eq!(first, trace(), "seed {seed}, {trouble:?}");
        }
    }
}
