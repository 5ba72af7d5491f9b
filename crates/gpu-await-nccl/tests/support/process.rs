//! Ranks that are processes: the test's own program again, which runs the test `child` of a file.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use gpu_await::Device;

use super::on_gpus;

/// What a child does: `work 1 3 127.0.0.1:2000`; several ranks are `0,1`.
const JOB: &str = "GPU_AWAIT_NCCL_TEST_JOB";

/// What this process was started for.
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) ranks: Vec<usize>,
    pub(crate) world: usize,
    /// Or the bytes of an id, or `-` for a new one.
    pub(crate) address: String,
}

impl Job {
    /// None if nobody started it as a child.
    pub(crate) fn here() -> Option<Job> {
        let job = std::env::var(JOB).ok()?;
        let mut words = job.split(' ').map(str::to_owned);
        let mut word = || words.next().expect("a job");
        let (name, ranks, world, address) = (word(), word(), word(), word());
        let ranks = ranks.split(',').map(|rank| rank.parse().expect("a rank")).collect();
        Some(Job { name, ranks, world: world.parse().expect("a world"), address })
    }
}

/// A device a rank: of all processes of the world, each has its own GPUs.
pub(crate) fn devices(ranks: &[usize]) -> Vec<Device> {
    let device = |rank: &usize| match on_gpus() {
        true => Device::cuda(*rank).expect("a GPU"),
        false => Device::host(),
    };
    ranks.iter().map(device).collect()
}

/// In a child: waits until it [goes](Rank::goes) on.
pub(crate) fn go() {
    std::io::stdin().read_line(&mut String::new()).expect("a line");
}

pub(crate) struct Rank {
    pub(crate) child: Child,
    lines: BufReader<ChildStdout>,
}

impl Rank {
    pub(crate) fn start(
        mut command: Command,
        job: &str,
        ranks: &[usize],
        world: usize,
        address: &str,
    ) -> Rank {
        let child = if job == "half" { "halves::child" } else { "processes::child" };
        let test = [child, "--exact", "--ignored", "--nocapture"];
        let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
        let job = format!("{job} {} {world} {address}", ranks.join(","));
        let command = command.args(test).env(JOB, job);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Rank { child, lines }
    }

    pub(crate) fn here(job: &str, ranks: &[usize], world: usize, address: &str) -> Rank {
        let this = std::env::current_exe().expect("a path");
        Rank::start(Command::new(this), job, ranks, world, address)
    }

    /// Waits until it says that; returns what follows.
    pub(crate) fn says(&mut self, wanted: &str) -> String {
        let mut all = String::new();
        loop {
            let before = all.len();
            self.lines.read_line(&mut all).expect("lines");
            assert!(all.len() > before, "it ended without `{wanted}`:\n{all}");
            if let Some((_, rest)) = all[before..].split_once(wanted) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Lets one that [waits](go) go on.
    pub(crate) fn goes(&mut self) {
        self.child.stdin.as_mut().expect("piped").write_all(b"go\n").expect("it reads");
    }

    /// Stops it, and waits until each of its threads is: the signal is one thread's at first, which may wait for its turn.
    #[cfg(target_os = "linux")]
    pub(crate) fn stops(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.child.id());
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = task.and_then(|task| std::fs::read_to_string(task.path().join("stat")));
            // A thread that has ended since is stopped as well.
            stat.map_or(true, |stat| stat.contains(") T "))
        };
        while !std::fs::read_dir(&tasks).expect("its threads").all(is_stopped) {
            std::thread::yield_now();
        }
    }

    /// Sends a signal, `CONT` for example.
    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args(["-s", signal, &id]).status();
        assert!(status.expect("kill").success(), "{signal}");
    }

    pub(crate) fn works(&mut self) {
        self.says("working");
    }

    pub(crate) fn ends_well(mut self) {
        self.says("done");
        assert!(self.child.wait().expect("its end").success());
    }
}

/// Nothing is left running, whatever happens.
impl Drop for Rank {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
