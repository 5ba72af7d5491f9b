//! Runs a test of this binary in a process of its own: for faults, which are sticky, for what two processes
//! share, and for tests that look at their process or change it.
//!
//! A test is named by its path, as in `concat!(module_path!(), "::a_test")`.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use gpu_await::testing;

const VARIABLE: &str = "GPU_AWAIT_TEST_CHILD";

/// Whether this process is the child, and with what parameter.
pub(crate) fn parameter() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

/// Whether this process runs `test` alone; if it does not, one that does has passed, and no other test has used the GPU
/// meanwhile. Under Miri, which starts no process, tests are run one by one.
pub(crate) fn is_alone(test: &str) -> bool {
    let is_alone = cfg!(miri) || parameter().is_some();
    if !is_alone {
        // It keeps this thread's turn.
        let _turn = testing::device();
        run(test, "");
    }
    is_alone
}

/// The name that the test has for this binary.
fn name(test: &str) -> &str {
    test.split_once("::").expect("a path from the crate's root").1
}

/// What runs `test` of this binary as a child with `parameter`; its output is piped.
pub(crate) fn command(test: &str, parameter: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["--exact", name(test), "--nocapture", "--test-threads=1"]);
    command.env(VARIABLE, parameter);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs `test` of this binary as a child with `parameter`; panics with its output unless it passed
/// within a minute.
pub(crate) fn run(test: &str, parameter: &str) -> Output {
    run_command(command(test, parameter), test, parameter)
}

/// [`run`] of what [`command`] made.
pub(crate) fn run_command(mut command: Command, test: &str, parameter: &str) -> Output {
    let mut child = command.spawn().expect("a child process");
    let end = Instant::now() + Duration::from_secs(60);
    let mut late = false;
    while child.try_wait().expect("a child's state").is_none() {
        if Instant::now() > end {
            late = true;
            child.kill().expect("a child that can be ended");
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("a child's output");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && !late && out.contains("1 passed"),
        "{test} ({parameter}): {}{}\n{out}\n{err}",
        output.status,
        if late { ", hung" } else { "" },
    );
    output
}
