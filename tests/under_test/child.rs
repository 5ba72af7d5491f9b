//! Runs a test of this binary in a process of its own: for faults, which are sticky, and for what
//! two processes share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const VARIABLE: &str = "GPU_AWAIT_TEST_CHILD";

/// Whether this process is the child, and with what parameter.
pub(crate) fn parameter() -> Option<String> {
    std::env::var(VARIABLE).ok()
}

/// What runs `test` of this binary as a child with `parameter`; its output is piped.
pub(crate) fn command(test: &str, parameter: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
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
