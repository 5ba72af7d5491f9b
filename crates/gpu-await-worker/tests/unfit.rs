//! Processes that cannot serve: in a binary of its own, whose processes run inside of a runtime, or may have few descriptors.

mod nothing;

use std::time::Duration;

use futures::executor::block_on;
use gpu_await_worker::{Error, Worker, testing};

use nothing::Nothing;

/// How many descriptors a process may have.
const FILES: &str = "GPU_AWAIT_TEST_FILES";

/// How many MiB of addresses a process may take beside those that it has.
const SPACE: &str = "GPU_AWAIT_TEST_SPACE";

/// What a process of the worker runs: inside of a runtime, as under `#[tokio::main]`, unless it is to have few descriptors, or little space.
#[test]
fn gpu_await_worker_child() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (resource, most) = match (number(FILES), number(SPACE)) {
        (Some(files), _) => (libc::RLIMIT_NOFILE, files),
        (_, Some(space)) => {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
            (libc::RLIMIT_AS, (pages << 12) + (space << 20))
        }
        _ => {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            return runtime.block_on(async { testing::child::<Nothing>() });
        }
    };
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: reads a value of this function's.
    unsafe { libc::setrlimit(resource, &raw const limit) };
    testing::child::<Nothing>();
}

/// A runtime whose threads are refused panics, and its end waits for those that it has.
#[test]
fn a_runtime_that_is_refused_threads_ends() {
    testing::init::<Nothing>(module_path!());
    // Enough for what it maps, and for some of the threads.
    let worker = Worker::<Nothing>::builder(()).threads(200).env(SPACE, "768");
    let error = block_on(worker.start_limit(Duration::from_secs(10)).spawn()).unwrap_err();
    let text = error.to_string();
    let why =
        "building its runtime, in its process: Resource temporarily unavailable (os error 11)";
    assert!(text.contains(why), "{text}");
}

/// Whatever it is that the system refuses a process, its error is in the text.
#[test]
fn what_a_process_is_refused_is_said() {
    testing::init::<Nothing>(module_path!());
    for (refused, most) in (3..100).enumerate() {
        let worker = Worker::<Nothing>::builder(()).threads(2).env(FILES, most.to_string());
        let Err(error) = block_on(worker.spawn()) else {
            assert!(refused > 5, "{refused}");
            return;
        };
        let text = error.to_string();
        println!("with {most}: {text}");
        assert!(text.contains("in its process: ") && text.contains("(os error 24)"), "{text}");
    }
    panic!("it never serves");
}

#[test]
fn an_init_inside_of_a_runtime_says_so() {
    testing::init::<Nothing>(module_path!());
    for threads in [1, 2] {
        block_on(async {
            let worker = Worker::<Nothing>::builder(()).threads(threads).begin().unwrap();
            let error = worker.serving().await.unwrap_err();
            assert!(matches!(error, Error::GivenUp { .. }), "{error:?}");
            let health = worker.health();
            for text in [error.to_string(), health.to_string()] {
                for part in ["inside of an async runtime", "`#[tokio::main]`", "plain `fn main()`"]
                {
                    assert!(text.contains(part), "{text}");
                }
            }
        });
    }
}
