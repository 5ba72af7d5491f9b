//! The end of the front, however it comes.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpu_await_worker::{Restart, Worker};

use crate::twin::{Do, Start, Twin, eventually, lives, lost, run, worker};

const FRONT: &str = "GPU_AWAIT_TEST_FRONT";
/// Names the processes of a worker, and whatever they start.
const FAMILY: &str = "GPU_AWAIT_TEST_FAMILY";

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

/// A front that has its program's file to itself, changes it, and restarts its worker: in a process of its own.
#[test]
fn a_front_whose_program_changes() {
    let Ok(program) = std::env::var(FRONT) else { return };
    if !program.starts_with('/') {
        return;
    }
    run(async {
        let (first_delay, most_delay) = (Duration::from_millis(1), Duration::from_millis(20));
        let restart = Restart { first_delay, most_delay, ..Restart::default() };
        let worker = worker().restart(restart).spawn().await.unwrap();
        let file = std::fs::File::open(&program).unwrap();
        let dies = async || lost(worker.call(Do::Abort).await);
        let may = |mode| std::fs::set_permissions(&program, PermissionsExt::from_mode(mode));
        // As by `touch`.
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        dies().await;
        worker.serving().await.expect("it is the same program");
        // What the system refuses is said, until it refuses no more.
        may(0o644).unwrap();
        dies().await;
        eventually("it is refused", || worker.stats().refused_starts > 1);
        let text = worker.health().to_string();
        for part in ["signal 6", "executing the program", "(os error 13)"] {
            assert!(text.contains(part), "{text}");
        }
        may(0o755).unwrap();
        worker.serving().await.unwrap();
        // Another file in its place, or none.
        std::fs::rename(&program, format!("{program}.old")).unwrap();
        std::fs::write(&program, "another program").unwrap();
        dies().await;
        worker.serving().await.unwrap();
        std::fs::remove_file(format!("{program}.old")).unwrap();
        dies().await;
        worker.serving().await.unwrap();
    });
}

#[test]
fn what_a_change_of_the_program_does() {
    let path = std::env::temp_dir().join(format!("gpu-await-changed-{}", std::process::id()));
    // By another process: a fork of this one would keep the file open for writing, and what is open so is not executed.
    let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&path).status();
    assert!(copied.unwrap().success());
    let front = Command::new(&path)
        .args(["--exact", "front::a_front_whose_program_changes", "--nocapture"])
        .env(FRONT, &path)
        .output();
    drop(std::fs::remove_file(&path));
    let front = front.unwrap();
    assert!(front.status.success(), "{}", String::from_utf8_lossy(&front.stderr));
}

/// A front whose worker is in the state that `FRONT` names, with a program that its service started: in a process of its own.
#[test]
fn a_front_with_a_family() {
    let (Ok(state), Ok(family)) = (std::env::var(FRONT), std::env::var(FAMILY)) else { return };
    run(async {
        let delay = Duration::from_secs(if state == "starts" { 3600 } else { 0 });
        let start = Start { program: true, delay, ..Start::default() };
        let worker = Worker::<Twin>::builder(start).threads(2).env(FAMILY, family);
        let worker = worker.begin().unwrap();
        // A fork of the front has its end of the socket, for as long as it lives.
        // SAFETY: the child calls nothing but what may be called after a fork.
        if unsafe { libc::fork() } == 0 {
            // SAFETY: ends the child, whatever it waits for.
            unsafe { libc::alarm(20) };
            loop {
                // SAFETY: waits, and touches no memory.
                unsafe { libc::pause() };
            }
        }
        let _runs = match state.as_str() {
            "starts" => None,
            "runs" => Some(worker.call(Do::Loop).send()),
            "stopped" => Some(worker.call(Do::Stop).send()),
            _ => {
                worker.call(Do::BlockSignals).await.unwrap();
                Some(worker.call(Do::Loop).send())
            }
        };
        println!("front is ready");
        tokio::time::sleep(Duration::from_secs(3600)).await;
    });
}

#[test]
fn nothing_of_a_worker_survives_a_killed_front() {
    for state in ["runs", "stopped", "blocks signals", "starts"] {
        let family = format!("{}-{}", std::process::id(), state.replace(' ', "-"));
        let program = std::env::current_exe().unwrap();
        let mut front = Command::new(program)
            .args(["--exact", "front::a_front_with_a_family", "--nocapture", "--test-threads=1"])
            .env(FRONT, state)
            .env(FAMILY, &family)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(front.stdout.take().unwrap()).lines();
        while !lines.next().unwrap().unwrap().contains("front is ready") {}
        // The fork of the front has the variable as well, and so has the front.
        let of_workers = || {
            let mut all = family_of(&family);
            all.retain(|pid| is_of_a_worker(*pid));
            all
        };
        eventually("the worker's process and its program", || of_workers().len() == 2);
        if state == "stopped" {
            eventually("it is stopped", || of_workers().into_iter().any(is_stopped));
        }
        front.kill().unwrap();
        let killed = Instant::now();
        front.wait().unwrap();
        while of_workers().into_iter().any(lives) {
            assert!(killed.elapsed() < Duration::from_secs(1), "{state}: {:?}", of_workers());
            std::thread::sleep(Duration::from_millis(2));
        }
        for fork in family_of(&family) {
            // SAFETY: signals the fork of the front, which carries this test's name.
            unsafe { libc::kill(fork as libc::pid_t, libc::SIGKILL) };
        }
    }
}

/// Processes that carry this name in their environment.
fn family_of(name: &str) -> Vec<u32> {
    let wanted = format!("{FAMILY}={name}");
    let has = |pid: &u32| has_variable(*pid, &wanted);
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|pid| pid.file_name().to_str()?.parse().ok()).filter(has).collect()
}

/// Whether it is a worker's process, or was started by one.
fn is_of_a_worker(pid: u32) -> bool {
    has_variable(pid, "GPU_AWAIT_WORKER_OF=")
}

fn has_variable(pid: u32, start: &str) -> bool {
    let all = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    all.split(|byte| *byte == 0).any(|variable| variable.starts_with(start.as_bytes()))
}

pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
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
