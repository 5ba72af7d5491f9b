//! The Rust side of the stand-in driver: finding it, running a test under it, and its controls.
//!
//! A test runs itself again in a child process whose library path begins with the stand-in.

use std::env;
use std::ffi::{CString, OsString, c_char, c_int};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::SOURCES;

/// Set in a child that [`assert_child`] started.
pub const VARIABLE: &str = "GPU_AWAIT_STAND_IN";

/// A control that copies a text out, cut to a capacity, and returns the length of the whole.
type TextFn = extern "C" fn(*mut c_char, usize) -> usize;

/// The control of this name, with its type.
macro_rules! control {
    ($driver:ident, $name:ident($($type:ty),*) $(-> $result:ty)?) => {{
        let name = concat!(stringify!($name), "\0").as_bytes();
        // SAFETY: each control is named once, here below, with the type that it has in `controls.rs`.
        unsafe { $driver.function::<extern "C" fn($($type),*) $(-> $result)?>(name) }
    }};
}

/// How long a child may run.
const LIMIT: Duration = Duration::from_secs(60);

/// Whether this process is a child that [`assert_child`] started, so that `libcuda.so.1` is the
/// stand-in.
pub fn is_child() -> bool {
    env::var_os(VARIABLE).is_some_and(|value| value == "1")
}

/// A folder with the stand-in as `libcuda.so.1` and `libcuda.so`, removed when dropped.
pub struct Installed(PathBuf);

impl Installed {
    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A child's library path: this one's, with the folder in front of it.
    pub fn library_path(&self) -> OsString {
        let mut path = OsString::from(&self.0);
        if let Some(rest) = env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
            path.push(":");
            path.push(rest);
        }
        path
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        // What is left in a temporary folder harms nobody.
        drop(fs::remove_dir_all(&self.0));
    }
}

/// Copies the stand-in that cargo built into a fresh temporary folder.
///
/// The two names are one file: the loader tells libraries apart by file, and `gpu-await` and
/// `cudarc` open different names.
///
/// # Panics
/// If the stand-in is not beside this program.
pub fn install() -> Installed {
    install_without(&[])
}

/// As [`install`], as an older driver: without these functions, for whoever looks for them by name.
///
/// # Panics
/// As [`install`], and if the library has no name of those.
pub fn install_without(functions: &[&str]) -> Installed {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let built = built();
    // ORDERING: Relaxed, only the number's uniqueness matters.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder =
        env::temp_dir().join(format!("gpu-await-stand-in-{}-{number}", std::process::id()));
    let made = || -> io::Result<()> {
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder)?;
        let mut library = fs::read(&built)?;
        for function in functions {
            hide(&mut library, function);
        }
        fs::write(folder.join("libcuda.so.1"), library)?;
        fs::hard_link(folder.join("libcuda.so.1"), folder.join("libcuda.so"))
    };
    made().unwrap_or_else(|error| {
        panic!("the stand-in could not be put into {}: {error}", folder.display())
    });
    Installed(folder)
}

/// Gives an exported function a name that nobody looks for; it is found by its old one no more.
fn hide(library: &mut [u8], function: &str) {
    let name = format!("\0{function}\0").into_bytes();
    let mut at = 0;
    let mut found = false;
    while let Some(next) = find(&library[at..], &name) {
        at += next + 1;
        library[at] = b'-';
        found = true;
    }
    assert!(found, "the stand-in has no function {function}");
}

/// Where `name` begins in `bytes`, as libc looks for it: 10 MB take half a second in Rust without optimization.
fn find(bytes: &[u8], name: &[u8]) -> Option<usize> {
    // SAFETY: both pointers are of slices that live, with the lengths of these.
    let found = unsafe {
        libc::memmem(bytes.as_ptr().cast(), bytes.len(), name.as_ptr().cast(), name.len())
    };
    (!found.is_null()).then(|| found.addr() - bytes.as_ptr().addr())
}

/// The library that cargo made together with this program's client.
fn built() -> PathBuf {
    let program = env::current_exe().expect("this program has a path");
    let file = program.with_file_name("libstand_in_cuda.so");
    assert!(
        file.is_file(),
        "no {}: cargo builds it with every test that depends on `stand-in-cuda`; where a test \
         binary was copied, copy the library as well",
        file.display()
    );
    file
}

/// Runs one test of this binary again, alone in a child process, with the stand-in as its driver.
fn run_child(installed: &Installed, test_name: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env::current_exe().expect("the test binary has a path"));
    command.args(["--exact", test_name, "--nocapture", "--test-threads=1"]);
    command
        .env("LD_LIBRARY_PATH", installed.library_path())
        .env(VARIABLE, "1")
        .envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = wait(command.spawn().expect("the test binary runs again"), test_name);
    let ran_nothing = String::from_utf8_lossy(&output.stdout).contains("running 0 tests");
    assert!(!ran_nothing, "this binary has no test named {test_name}");
    output
}

/// Runs `body` in a child process under the stand-in, and checks there that nobody misused the
/// driver. To be called by a test, with a closure that stands in it.
///
/// # Panics
/// As [`assert_child`].
pub fn under_the_stand_in<F: FnOnce(&StandIn)>(body: F) {
    if !is_child() {
        return assert_child(test_of::<F>(), &[]);
    }
    let driver = StandIn::open();
    body(&driver);
    assert_eq!(driver.misuse(), [""; 0]);
}

/// The test that a closure of this type stands in, by the name that the harness has for it.
#[must_use]
pub fn test_of<F>() -> &'static str {
    let name = std::any::type_name::<F>().trim_end_matches("::{{closure}}");
    name.split_once("::").map_or(name, |(_, path)| path)
}

/// Runs one test of this binary again, alone in a child process, with the stand-in as its driver.
///
/// # Panics
/// If the child's test failed, which shows its output; if it runs longer than 60 s (it is killed), or if this binary has no test of
/// that name.
pub fn assert_child(test_name: &str, variables: &[(&str, &str)]) {
    assert_child_without(&[], test_name, variables);
}

/// As [`assert_child`], under an older driver: without these functions.
///
/// # Panics
/// As [`assert_child`] and [`install_without`].
pub fn assert_child_without(functions: &[&str], test_name: &str, variables: &[(&str, &str)]) {
    let device = std::env::var("GPU_AWAIT_TEST_DEVICE").unwrap_or_default();
    if device.starts_with("cuda") {
        println!("{test_name}: under the real driver there is nothing to see for the stand-in");
        return;
    }
    let output = run_child(&install_without(functions), test_name, variables);
    assert!(
        output.status.success(),
        "{test_name} failed under the stand-in ({}):\n{}",
        output.status,
        shown(&output)
    );
}

fn shown(output: &Output) -> String {
    format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Collects the child's output, and kills it when its time is up.
fn wait(mut child: Child, test_name: &str) -> Output {
    let stdout = collect(child.stdout.take());
    let stderr = collect(child.stderr.take());
    let deadline = Instant::now() + LIMIT;
    let mut late = false;
    let status = loop {
        match child.try_wait().expect("the child can be waited for") {
            Some(status) => break status,
            None if !late && Instant::now() > deadline => {
                late = true;
                child.kill().expect("the child can be killed");
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let [stdout, stderr] =
        [stdout, stderr].map(|reader| reader.join().expect("reading does not panic"));
    let output = Output { status, stdout, stderr };
    assert!(
        !late,
        "{test_name} did not end within {LIMIT:?} under the stand-in:\n{}",
        shown(&output)
    );
    output
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is shown all the same.
            drop(pipe.read_to_end(&mut bytes));
        }
        bytes
    })
}

/// The stand-in's controls, in a child process.
pub struct StandIn {
    library: libloading::Library,
}

/// Lets held commands go on when dropped, so that a failing test does not hang.
#[must_use = "held commands go on when this is dropped"]
pub struct Held<'a>(&'a StandIn);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.set_hold(0);
    }
}

impl StandIn {
    /// Opens the stand-in, by the name under which the process has it or will have it.
    ///
    /// # Panics
    /// In a process that [`assert_child`] did not start, or if `libcuda.so.1` is another driver or made of
    /// other sources.
    pub fn open() -> Self {
        assert!(is_child(), "the stand-in is only there in a process started by assert_child");
        // SAFETY: the stand-in runs no code when loaded; `install` put it first on the library
        // path.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }
            .expect("libcuda.so.1 is on the library path");
        // SAFETY: the symbol is only looked for, never called.
        let known = unsafe { library.get::<TextFn>(b"standin_sources\0") }.is_ok();
        assert!(known, "libcuda.so.1 is another driver than this client's stand-in");
        let driver = StandIn { library };
        let sources = driver.text(b"standin_sources\0");
        assert_eq!(sources, SOURCES, "the stand-in is made of other sources than its client");
        driver
    }

    /// The calls since the last clear: `cuLaunchKernel axpy stream=3 .. thread=12`, with
    /// `result=..` behind a failed one.
    pub fn calls(&self) -> Vec<String> {
        self.text(b"standin_log_copy\0").lines().map(str::to_owned).collect()
    }

    /// The calls' names only.
    pub fn names(&self) -> Vec<String> {
        let calls = self.calls();
        calls.iter().map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    /// Where kernels and fills run that were put on streams since the last clear: `axpy on=0-7`. From the
    /// first green context on.
    pub fn places(&self) -> Vec<String> {
        self.text(b"standin_places_copy\0").lines().map(str::to_owned).collect()
    }

    /// How many calls there were since the last clear.
    pub fn count(&self) -> u64 {
        control!(self, standin_log_count() -> u64)()
    }

    /// Forgets the calls so far.
    pub fn clear(&self) {
        control!(self, standin_log_clear())();
    }

    /// The number that the calls' `thread=` has for the calling thread.
    pub fn thread(&self) -> u64 {
        control!(self, standin_thread() -> u64)()
    }

    /// Has each release of a primary context take so long.
    pub fn slow_release(&self, takes: Duration) {
        control!(self, standin_slow_release(u64))(takes.as_millis() as u64);
    }

    /// Has each thread that called the driver take so long to end.
    pub fn slow_thread_end(&self, takes: Duration) {
        control!(self, standin_slow_thread_end(u64))(takes.as_millis() as u64);
    }

    /// How many of either have not returned.
    pub fn leaving(&self) -> u32 {
        control!(self, standin_leaving() -> u32)()
    }

    /// Forks, as `fork(2)` does, while no other thread is in the stand-in.
    ///
    /// # Safety
    /// The other threads of the process hold no lock that the child needs.
    pub unsafe fn fork(&self) -> c_int {
        control!(self, standin_fork() -> c_int)()
    }

    /// Stops every queued command until the guard is dropped.
    pub fn hold(&self) -> Held<'_> {
        self.set_hold(1);
        Held(self)
    }

    fn set_hold(&self, on: c_int) {
        control!(self, standin_hold(c_int))(on);
    }

    /// Runs event records, writes of words and the kernel `empty` within the call, where their stream
    /// is idle, so that the first question finds them complete.
    pub fn instant(&self, on: bool) {
        control!(self, standin_instant(c_int))(c_int::from(on));
    }

    /// Makes the `nth` call (1 is the next) of a driver function return `code` without doing
    /// anything.
    pub fn fail(&self, name: &str, nth: u64, code: i32) {
        self.inject(name, nth, code, 0);
    }

    /// As [`StandIn::fail`], after the call has done its work.
    pub fn fail_after_effect(&self, name: &str, nth: u64, code: i32) {
        self.inject(name, nth, code, 1);
    }

    /// Forgets the failures that did not strike yet, and counts them.
    pub fn forgive(&self) -> u64 {
        control!(self, standin_forgive() -> u64)()
    }

    fn inject(&self, name: &str, nth: u64, code: i32, after_effect: c_int) {
        type Fail = extern "C" fn(*const c_char, u64, c_int, c_int) -> c_int;
        let text = CString::new(name).expect("a function's name has no NUL");
        // SAFETY: the stand-in's function of this name has this type.
        let fail = unsafe { self.function::<Fail>(b"standin_fail\0") };
        assert_eq!(
            fail(text.as_ptr(), nth, code, after_effect),
            0,
            "the stand-in has no function {name}"
        );
    }

    /// Loses a device now: queued commands never run, and what talks to it returns `code`.
    pub fn lose(&self, ordinal: i32, code: i32) {
        assert_eq!(
            control!(self, standin_lose(c_int, c_int) -> c_int)(ordinal, code),
            0,
            "there is no device {ordinal}"
        );
    }

    /// A sentence about each wrong use of the driver since the start.
    pub fn misuse(&self) -> Vec<String> {
        self.text(b"standin_misuse_copy\0").lines().map(str::to_owned).collect()
    }

    /// How many "stream", "event", "memory", "registered", "module", "graph", "green", "shared", "context" or "command" live.
    pub fn live(&self, kind: &str) -> i64 {
        let text = CString::new(kind).expect("a kind's name has no NUL");
        let count = control!(self, standin_live(*const c_char) -> i64)(text.as_ptr());
        assert!(count >= 0, "the stand-in does not count {kind}");
        count
    }

    /// Gives every device so many bytes.
    pub fn set_memory(&self, total_bytes: u64) {
        control!(self, standin_set_memory(u64))(total_bytes);
    }

    /// Shows so many devices; before the first driver call.
    pub fn set_devices(&self, count: i32) {
        assert_eq!(
            control!(self, standin_set_devices(c_int) -> c_int)(count),
            0,
            "the stand-in cannot show {count} devices"
        );
    }

    /// Changes a device attribute (`CUdevice_attribute`).
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        control!(self, standin_set_attribute(c_int, c_int))(attribute, value);
    }

    /// Changes an attribute (`CUfunction_attribute`) of every kernel.
    pub fn set_function_attribute(&self, attribute: i32, value: i32) {
        control!(self, standin_set_function_attribute(c_int, c_int))(attribute, value);
    }

    /// Copies a text out; it may grow between asking its length and copying it.
    fn text(&self, name: &[u8]) -> String {
        // SAFETY: the stand-in's text functions all have this type.
        let copy = unsafe { self.function::<TextFn>(name) };
        let mut buffer: Vec<u8> = Vec::new();
        loop {
            let length = copy(buffer.as_mut_ptr().cast(), buffer.len());
            if length < buffer.len() {
                buffer.truncate(length);
                return String::from_utf8_lossy(&buffer).into_owned();
            }
            buffer = vec![0; length + length / 4 + 64];
        }
    }

    /// Looks a control or a driver function up; the name ends with a NUL.
    ///
    /// # Safety
    /// `F` is the type of the function of this name.
    ///
    /// # Panics
    /// If there is no such function.
    pub unsafe fn function<F: Copy>(&self, name: &[u8]) -> F {
        // SAFETY: of this type by this function's contract; the library is open for as long as
        // `self`.
        let symbol = unsafe { self.library.get::<F>(name) };
        *symbol.expect("the stand-in has a function of this name")
    }
}
