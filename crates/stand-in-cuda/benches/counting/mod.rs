//! What programs of this folder have in common: they count instructions of their own, and compare them with figures.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

const MOST: f64 = 1.05;
/// What a child counts: `queued 1024`.
const WORK: &str = "GPU_AWAIT_COUNTED_WORK";

/// A line of a program.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    /// N, which the work does twice, and how many operations each of them is.
    pub(crate) number: u32,
    pub(crate) operations: u32,
    /// How often it is counted; the lowest count is taken.
    pub(crate) runs: u32,
}

/// To be called behind the first N, and behind the second: what is between is counted.
pub(crate) fn mark() {
    counting_mark();
}

/// Callgrind knows it by this name.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn counting_mark() {
    std::hint::black_box(());
}

/// The program: `work` does twice so many of a way, under callgrind. The figures are in a file of `figures`' name.
pub(crate) fn main(figures: &str, ways: &[Way], work: fn(&str, u32)) -> ExitCode {
    if let Ok(counted) = std::env::var(WORK) {
        let (way, number) = counted.split_once(' ').expect("a way and a number");
        clock::virtualize();
        work(way, number.parse().expect("a number"));
        return ExitCode::SUCCESS;
    }
    if let Some(missing) = missing() {
        eprintln!("# nothing is counted without {missing}");
        let must = argument("check") || argument("update");
        return if must { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let figures = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches").join(figures);
    let counts =
        ways.iter().map(|way| (format!("instructions.{}.per_op", way.name), per_operation(way)));
    let counts: Vec<_> = counts.collect();
    for (name, count) in &counts {
        println!("{name} {count:.1} count");
    }
    if argument("update") {
        let mut text = format!("# {} {}\n", compiler(), std::env::consts::ARCH);
        for (name, count) in &counts {
            writeln!(text, "{name} {count:.1}").expect("a string takes it");
        }
        std::fs::write(&figures, text).expect("the figures are written");
    }
    if argument("check") && !holds(&figures, &counts) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
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

/// The compiler that is used here, in words.
fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output().expect("a compiler");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Compares with the figures, and says how.
fn holds(figures: &Path, counts: &[(String, f64)]) -> bool {
    let text = std::fs::read_to_string(figures).expect("the figures");
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

fn per_operation(way: &Way) -> f64 {
    let least = (0..way.runs).map(|_| instructions(way.name, way.number)).min();
    least.expect("a run") as f64 / f64::from(way.number * way.operations)
}

/// Runs this program again under callgrind, and returns what its main thread executed of it between the marks.
fn instructions(way: &str, number: u32) -> u64 {
    let this = std::env::current_exe().expect("this program has a path");
    let installed = stand_in_cuda::install();
    let mut out = OsString::from("--callgrind-out-file=");
    out.push(installed.path().join("profile"));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--separate-threads=yes", "--quiet"])
        .arg("--dump-before=counting_mark")
        .arg(out)
        .arg(&this)
        .env(WORK, format!("{way} {number}"))
        .env(stand_in_cuda::VARIABLE, "1")
        .env("LD_LIBRARY_PATH", installed.library_path())
        .output()
        .expect("valgrind runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // What was executed before the second mark and behind the first one; of the first thread, which is the main one.
    let profile = std::fs::read_to_string(installed.path().join("profile.2-01"));
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
