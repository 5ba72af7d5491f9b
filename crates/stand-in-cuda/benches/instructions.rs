//! Did an operation get dearer? In instructions, which have no noise.
//!
//! Counted by callgrind on the stand-in driver, which completes all of them within the call; compared with the
//! figures in `instructions.txt` beside this file:
//!
//! | line | one of these |
//! |---|---|
//! | `queued` | a launch of the kernel `empty`, with `.queued()` |
//! | `partition` | the same on a stream in a partition |
//! | `await` | the first, awaited |
//! | `enqueue` | an `enqueue` of nothing |
//! | `shared` | an `enqueue` of nothing that updates a buffer, where streams share buffers, and no other waits for this one |
//! | `replay_changed` | a node of a replayed list of 200 launches, each with another value than in the run before |
//! | `replay_same` | a node of one in which nothing changed |
//! | `replay_moved` | a node of one in which one buffer of several is at another address |
//!
//! | argument | does |
//! |---|---|
//! | none | prints the counts, if there is a valgrind |
//! | `check` | fails if a count is more than 5 % above its figure |
//! | `update` | writes the figures: `cargo bench -p stand-in-cuda -- update` |
//!
//! The figures' first line is the compiler that made them. Another one may count otherwise: that is
//! said, and the figures hold all the same.
//!
//! Here and not among the benches of `gpu-await`: so little else is built with optimization for it.
//!
//! # What is counted
//! 1. The instructions of this program's own code (this crate, and what is linked into it) on the
//!    thread that submits and awaits, and of the copies (`memcpy` and its like) that it calls: a value of some
//!    hundred bytes that is moved is one. Not the driver's, nothing else of libc's, not the poller's.
//! 2. The difference between a run of 2 N operations and one of N, after the same warm-up, divided by N: the start-up
//!    cost cancels out. `shared` runs each three times and takes the lower count.
//! 3. Always the same path: an await finds its operation complete the first time that it asks, and
//!    that thread's clock moves by 50 ns a reading, because under callgrind everything takes long and
//!    the engine would settle for a long wait.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use futures::executor::block_on;
use gpu_await::{Device, DeviceBuffer, Error, RawQueue, Region, Stream, Uses, kernels};

/// N: a multiple of the launches after which a marker is placed.
const OPERATIONS: u32 = 4096;
const MOST: f64 = 1.05;
/// What a child counts: `queued 1024`.
const WORK: &str = "GPU_AWAIT_COUNTED_WORK";
const WAYS: [&str; 8] = [
    "queued",
    "partition",
    "await",
    "enqueue",
    "shared",
    "replay_changed",
    "replay_same",
    "replay_moved",
];
/// The launches of a replayed list.
const LIST: u32 = 200;
/// N of replays: each is a list.
const REPLAYS: u32 = 32;

fn main() -> ExitCode {
    if let Ok(work) = std::env::var(WORK) {
        let (way, operations) = work.split_once(' ').expect("a way and a number");
        counted_work(way, operations.parse().expect("a number"));
        return ExitCode::SUCCESS;
    }
    if let Some(missing) = missing() {
        eprintln!("# nothing is counted without {missing}");
        let must = argument("check") || argument("update");
        return if must { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let counts = WAYS.map(|way| (format!("instructions.{way}.per_op"), per_operation(way)));
    for (name, count) in &counts {
        println!("{name} {count:.1} count");
    }
    if argument("update") {
        let mut text = format!("# {} {}\n", compiler(), std::env::consts::ARCH);
        for (name, count) in &counts {
            writeln!(text, "{name} {count:.1}").expect("a string takes it");
        }
        std::fs::write(figures(), text).expect("the figures are written");
    }
    if argument("check") && !holds(&counts) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn argument(name: &str) -> bool {
    std::env::args().skip(1).any(|given| given == name)
}

/// What is needed and not there.
fn missing() -> Option<&'static str> {
    let valgrind = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    match valgrind {
        _ if cfg!(debug_assertions) => Some("optimization: use `cargo bench`"),
        Err(_) => Some("valgrind"),
        Ok(_) => None,
    }
}

fn figures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.txt")
}

/// The compiler that is used here, in words.
fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output().expect("a compiler");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Compares with the figures, and says how.
fn holds(counts: &[(String, f64)]) -> bool {
    let text = std::fs::read_to_string(figures()).expect("benches/instructions.txt");
    let here = format!("# {} {}", compiler(), std::env::consts::ARCH);
    let there = text.lines().next().unwrap_or_default();
    if there != here {
        eprintln!("# the figures are of another compiler or machine: {there}; here: {here}");
    }
    let mut holds = true;
    for (name, count) in counts {
        let line = text.lines().find_map(|line| line.strip_prefix(name.as_str()));
        let figure: f64 = line.and_then(|f| f.trim().parse().ok()).expect("a figure of this name");
        let percent = 100.0 * (count / figure - 1.0);
        eprintln!("# {name}: {count:.1}, committed {figure:.1}, {percent:+.2} %");
        if count / figure > MOST {
            eprintln!("# {name} rose by more than 5 %: find out why, or commit an update");
            holds = false;
        } else if figure / count > MOST {
            eprintln!("# {name} fell by more than 5 %: commit an update");
        }
    }
    holds
}

fn per_operation(way: &str) -> f64 {
    // If the poller is late, the submitting thread queries shared streams itself: 140 instructions more, by chance.
    let runs = if way == "shared" { 3 } else { 1 };
    let (number, operations) = match way {
        _ if way.starts_with("replay") => (REPLAYS, REPLAYS * LIST),
        _ => (OPERATIONS, OPERATIONS),
    };
    let least = |number| (0..runs).map(|_| instructions(way, number)).min();
    let (once, twice) = (least(number), least(2 * number));
    let more = twice.expect("a run") as f64 - once.expect("a run") as f64;
    more / f64::from(operations)
}

/// Runs this program again under callgrind, and returns what its main thread executed of it.
fn instructions(way: &str, operations: u32) -> u64 {
    let this = std::env::current_exe().expect("this program has a path");
    let installed = stand_in_cuda::install();
    let mut out = OsString::from("--callgrind-out-file=");
    out.push(installed.path().join("profile"));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--separate-threads=yes", "--quiet"])
        .arg(out)
        .arg(&this)
        .env(WORK, format!("{way} {operations}"))
        .env(stand_in_cuda::VARIABLE, "1")
        .env("LD_LIBRARY_PATH", installed.library_path())
        .output()
        .expect("valgrind runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The first thread's, which is the main one.
    let profile = std::fs::read_to_string(installed.path().join("profile-01"));
    executed(&profile.expect("callgrind wrote a profile"), &this)
}

/// The instructions of one object's own code in a profile, and of the copies that it calls.
///
/// # Source
/// "Callgrind Format Specification" of the valgrind manual: `ob=(1) path` names the object of the
/// cost lines that follow, `cfn=(2) name` the function of the next call; later `ob=(1)` and `cfn=(2)` do. The
/// line behind `calls=` is what the callee cost.
fn executed(profile: &str, object: &Path) -> u64 {
    let mut names = BTreeMap::new();
    let (mut ours, mut copies, mut callee, mut sum) = (false, false, false, 0);
    for line in profile.lines() {
        let (key, value) = line.split_once('=').unwrap_or(("", line));
        match key {
            "ob" | "cob" | "fn" | "cfn" => {
                let (id, name) = value.split_once(' ').unwrap_or((value, ""));
                let key_of_name = (key.ends_with("fn"), id);
                if !name.is_empty() {
                    names.insert(key_of_name, name);
                }
                let name = names.get(&key_of_name);
                if key == "ob" {
                    ours = name.is_some_and(|name| Path::new(name) == object);
                } else if key == "cfn" {
                    copies = name.is_some_and(|name| {
                        ["memcpy", "memmove", "memset"].iter().any(|copy| name.contains(copy))
                    });
                }
            }
            "calls" => callee = true,
            "" if line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) => {
                if ours && (!callee || copies) {
                    let cost = line.rsplit(' ').next().and_then(|cost| cost.parse::<u64>().ok());
                    sum += cost.expect("a cost");
                }
                callee = false;
            }
            _ => {}
        }
    }
    assert!(sum > 0, "callgrind saw nothing of {}", object.display());
    sum
}

/// What a child does: opens the device, warms up, and executes so many operations.
fn counted_work(way: &str, operations: u32) {
    let driver = stand_in_cuda::StandIn::open();
    driver.instant(true);
    clock::virtualize();
    let device = Device::cuda(0).expect("the stand-in has a device");
    if way.starts_with("replay") {
        replay(&device, way, operations);
        return assert_eq!(driver.misuse(), [""; 0]);
    }
    block_on(async {
        let stream = match way {
            "partition" => device.reserve_partition(1).await.expect("is free").stream(),
            _ => device.stream(),
        };
        let stream = stream.expect("a stream");
        let empty = kernels::empty::load(&device).await.expect("loads");
        let mut x = match way {
            "shared" => Some(shared_buffer(&driver, &device, &stream).await),
            _ => None,
        };
        let warm_up = [("await", 256), ("queued", 2 * OPERATIONS)];
        for (way, operations) in warm_up.into_iter().chain([(way, 64), (way, operations)]) {
            for _ in 0..operations {
                match way {
                    "queued" | "partition" => empty.launch(&stream).queued().expect("is accepted"),
                    "await" => empty.launch(&stream).await.expect("completes"),
                    "enqueue" => {
                        let nothing = |_: &RawQueue<'_>, ()| Ok::<_, Error>(());
                        // SAFETY: nothing is put on the stream.
                        let op = unsafe { stream.enqueue(Uses::new("none"), nothing) };
                        op.queued().expect("is accepted");
                    }
                    _ => update(&stream, x.as_mut().expect("made above")),
                }
            }
            stream.done().await.expect("completes");
            driver.clear();
        }
    });
    assert_eq!(driver.misuse(), [""; 0]);
}

#[inline(never)]
fn update(stream: &Stream, x: &mut DeviceBuffer<u8>) {
    let uses = Uses::new("none").updates(x);
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(uses, |_, _| Ok::<_, Error>(())) };
    op.queued().expect("is accepted");
}

/// Replays of a chain of launches on a few buffers, as a layer of a model is.
#[inline(never)]
fn replay(device: &Device, way: &str, lists: u32) {
    let stream = device.stream().expect("a stream");
    let axpy = kernels::axpy::load_blocking(device).expect("loads");
    let buffer = || stream.full(16, 1.0f32).queued().expect("is accepted");
    let mut buffers: [_; 8] = std::array::from_fn(|_| buffer());
    // Takes the place of the first in every other run.
    let mut other = buffer();
    let mut region = Region::new();
    for run in 0..lists + 64 {
        let a = if way == "replay_changed" { run as f32 } else { 1.0 };
        if way == "replay_moved" {
            std::mem::swap(&mut buffers[0], &mut other);
        }
        let op = stream.replay(&mut region, |q| {
            for node in 0..LIST as usize {
                let at = node % (buffers.len() - 1);
                let [x, y] = buffers.get_disjoint_mut([at, at + 1]).expect("two of them");
                axpy.launch(q, a + node as f32, &*x, y)?;
            }
            Ok(())
        });
        block_on(op).expect("completes");
    }
    // The first launch of the kernel is in no list, so that the second list is longer.
    assert_eq!(region.report().replayed, u64::from(lists + 64 - 3));
}

/// A buffer that another stream has read, while it was written.
async fn shared_buffer(
    driver: &stand_in_cuda::StandIn,
    device: &Device,
    stream: &Stream,
) -> DeviceBuffer<u8> {
    // Fills and copies are not complete within the call.
    driver.instant(false);
    let other = device.stream().expect("a stream");
    let mut x = stream.zeros(16).queued().expect("is accepted");
    let mut y = other.zeros(16).queued().expect("is accepted");
    let held = driver.hold();
    stream.fill(&mut x, 1).queued().expect("is accepted");
    other.copy(&x, &mut y).queued().expect("is accepted");
    drop(held);
    device.done().await.expect("completes");
    driver.instant(true);
    x
}

/// A clock of this program's own, in place of libc's.
mod clock {
    use std::cell::Cell;
    use std::ffi::{c_int, c_long};

    const STEP_NS: c_long = 50;

    thread_local! {
        /// The last reading, on a thread whose clock is virtual.
        static LAST: Cell<Option<libc::timespec>> = const { Cell::new(None) };
    }

    /// From now on, the calling thread's clock moves by [`STEP_NS`] a reading.
    pub(super) fn virtualize() {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        LAST.set(Some(now));
    }

    /// What `std` calls to read a clock: of the same name and type as libc's, and in this program
    /// instead of it.
    #[unsafe(no_mangle)]
    extern "C" fn clock_gettime(clock: libc::clockid_t, time: &mut libc::timespec) -> c_int {
        let Some(mut now) = LAST.get().filter(|_| clock == libc::CLOCK_MONOTONIC) else {
            // SAFETY: the system call fills the `timespec`, which is live.
            let code = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, &raw mut *time) };
            return code as c_int;
        };
        now.tv_nsec += STEP_NS;
        if now.tv_nsec >= 1_000_000_000 {
            now = libc::timespec { tv_sec: now.tv_sec + 1, tv_nsec: 0 };
        }
        LAST.set(Some(now));
        *time = now;
        0
    }
}
