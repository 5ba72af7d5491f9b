//! The end of the front, however it comes.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::twin::{Do, eventually, lives, run, worker};

const FRONT: &str = "GPU_AWAIT_TEST_FRONT";

/// A front that says which process it has and calls it without end: in a process of its own.
#[test]
fn a_front_to_be_killed() {
    if std::env::var_os(FRONT).is_none() {
        return;
    }
    run(async {
        println!("front");
        let worker = worker().spawn().await.unwrap();
        println!("process {}", worker.stats().process.unwrap());
        loop {
            let endless = worker.call(Do::Loop).send();
            drop(worker.call(Do::Double(vec![1.0])).deadline(Duration::from_millis(50)).await);
            drop(endless);
        }
    });
}

/// `GPU_AWAIT_TEST_KILLS` says how often.
#[test]
fn a_killed_front_takes_its_processes_with_it() {
    let kills = std::env::var("GPU_AWAIT_TEST_KILLS").ok().and_then(|text| text.parse().ok());
    for round in 0..kills.unwrap_or(12u64) {
        let program = std::env::current_exe().unwrap();
        let mut front = Command::new(program)
            .args(["--exact", "front::a_front_to_be_killed", "--nocapture", "--test-threads=1"])
            .env(FRONT, "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(front.stdout.take().unwrap()).lines();
        let mut wait_for = |wanted: &str| loop {
            let line = lines.next().unwrap().unwrap();
            if let Some((_, rest)) = line.split_once(wanted) {
                return rest.trim().to_owned();
            }
        };
        wait_for("front");
        // At any point of the start, or later.
        let mut process = None;
        if round % 2 == 0 {
            process = wait_for("process").parse::<u32>().ok();
        }
        let until = Instant::now() + Duration::from_micros(round * 1709 % 20_000);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let children = children_of(front.id());
        front.kill().unwrap();
        front.wait().unwrap();
        let killed = Instant::now();
        for process in children.into_iter().chain(process) {
            eventually("the process is gone", || !lives(process));
        }
        assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    }
}

fn children_of(parent: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()
        })
        .collect()
}
