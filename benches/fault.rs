//! How long after a fault does everybody know?
//!
//! A kernel that traps behind a gate, and 1, 64 or 2,000 tasks that wait for what is behind it, on
//! eight streams. Measured is the time from the opening of the gate until the last task has its
//! `DeviceLost`, by default and with each of the other ways of learning of completions. Compared
//! with how long `cuStreamSynchronize` takes from the launch of such a kernel until it tells.
//!
//! A fault ends the use of the GPU in a process, so each figure comes from a process of its own.

#[path = "../tests/under_test/faulty.rs"]
mod faulty;
#[path = "measure.rs"]
mod measure;
#[path = "../tests/under_test/modes.rs"]
mod modes;
#[path = "raw/fault.rs"]
mod raw;

use std::process::Command;
use std::time::{Duration, Instant};

use gpu_await::testing::Gate;
use gpu_await::{Completion, LaunchConfig};
use measure::{print, us};

const CHILD: &str = "GPU_AWAIT_BENCH_FAULT";
const STREAMS: usize = 8;
const LIMIT: Duration = Duration::from_secs(20);

fn main() {
    if let Ok(what) = std::env::var(CHILD) {
        println!("{:.3}", us(child(&what)));
        return;
    }
    if measure::on_cuda() {
        print("fault.raw_synchronize.noticed_us", run("raw"), "us");
    }
    for (mode, tasks) in [
        (Completion::Adaptive, 1),
        (Completion::Adaptive, 64),
        (Completion::Adaptive, 2000),
        (Completion::Event, 2000),
        (Completion::Word, 2000),
        (Completion::Callback, 2000),
    ] {
        let name = match mode {
            Completion::Event => "event",
            Completion::Word => "word",
            Completion::Callback => "callback",
            _ => "await",
        };
        let resolved = run(&format!("{mode:?} {tasks}"));
        print(&format!("fault.{name}_{tasks}.resolved_us"), resolved, "us");
    }
}

/// Measures in a process of its own.
fn run(what: &str) -> f64 {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(std::env::args().skip(1)).env(CHILD, what);
    let output = command.output().expect("a child process");
    let out = String::from_utf8_lossy(&output.stdout);
    let printed = out.trim().parse().ok().filter(|_| output.status.success());
    printed.unwrap_or_else(|| {
        panic!("{what}: {}\n{out}\n{}", output.status, String::from_utf8_lossy(&output.stderr))
    })
}

fn child(what: &str) -> Duration {
    if what == "raw" {
        return raw::until_synchronize_fails(include_str!("../kernels/trap.ptx"));
    }
    let (mode, tasks) = what.split_once(' ').expect("a mode and a number");
    let mode = modes::ALL.into_iter().find(|known| format!("{known:?}") == mode).expect("a mode");
    let tasks: usize = tasks.parse().expect("a number");
    let device = measure::device_with(mode);
    measure::workers(4).block_on(async {
        let trap = faulty::faulty(&device).await;
        let streams: Vec<_> = (0..STREAMS).map(|_| device.stream().expect("a stream")).collect();
        let gate = Gate::close(&streams[0]).expect("a gate");
        streams[0].launch(&trap, LaunchConfig::new(1, 1), ()).queued().expect("submitted");
        for stream in &streams[1..] {
            stream.wait(&streams[0]).queued().expect("submitted");
        }
        let waiting: Vec<_> = (0..tasks)
            .map(|n| {
                let op = streams[n % STREAMS].zeros::<u8>(1);
                tokio::spawn(async move {
                    let resolved = op.await;
                    (Instant::now(), resolved.map(drop))
                })
            })
            .collect();
        // Long enough for each of them to have been polled; that each was is not needed.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let start = Instant::now();
        gate.open();
        let mut last = start;
        for task in waiting {
            let resolved = tokio::time::timeout(LIMIT, task).await.expect("it resolves");
            let (at, outcome) = resolved.expect("no task panics");
            // The stand-in driver runs no kernel, so none faults there.
            assert!(measure::is_smoke() || outcome.is_err_and(|error| error.is_device_lost()));
            last = last.max(at);
        }
        last - start
    })
}
