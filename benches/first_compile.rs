//! What does a process pay for its first CUDA C++, and how much less if another process compiled it before?
//!
//! Each figure is the median of processes of their own, which open a device and then compile and load one source, once: with no
//! disk cache (`fresh`) and with one that has the source (`cached`).
//!
//! | line | is |
//! |---|---|
//! | `first_compile.SOURCE.WHO.ms` | finding NVRTC, compiling or reading, and loading the module |
//! | `first_compile.SOURCE.ratio` | cached by fresh |
//!
//! `small` has one kernel, `large` fifty instances of one that has loops to unroll. Without NVRTC it prints nothing.

#[path = "measure.rs"]
mod measure;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use std::{env, fs};

use gpu_await::{CudaSource, Module};
use measure::{print, rounds};

const CHILD: &str = "GPU_AWAIT_FIRST_COMPILE";
const CACHE: &str = "GPU_AWAIT_CACHE_DIR";

fn source(name: &str) -> CudaSource {
    let text = r#"
        template <int N> __global__ void powers(float* x, unsigned n) {
            unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= n) return;
            float sum = 0, power = 1;
            #pragma unroll
            for (int term = 0; term < N; term++) sum += power *= x[i] * term;
            x[i] = sum;
        }"#;
    let instances = if name == "small" { 8..9 } else { 14..64 };
    instances.fold(CudaSource::new(text), |source, n| source.instance(format!("powers<{n}>")))
}

/// In a process of its own.
fn child(name: &str) {
    let device = measure::device();
    let start = Instant::now();
    match futures::executor::block_on(Module::compile(&device, source(name))) {
        Ok(_) => println!("{}", start.elapsed().as_secs_f64() * 1e3),
        Err(error) => eprintln!("# nothing to compare: {error}"),
    }
}

/// How many milliseconds it took, if there is a compiler.
fn in_a_process(name: &str, cache: &str) -> Option<f64> {
    let program = env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.args(env::args().skip(1)).env(CHILD, name).env(CACHE, cache);
    let output = command.stderr(Stdio::inherit()).output().expect("a process");
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

fn compare(name: &str, cache: &Path) {
    let cache = cache.to_str().expect("a path in UTF-8");
    if in_a_process(name, cache).is_none() {
        return;
    }
    let (mut fresh, mut cached) = (Vec::new(), Vec::new());
    for _ in 0..rounds(21, 2) {
        fresh.extend(in_a_process(name, ""));
        cached.extend(in_a_process(name, cache));
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let (fresh, cached) = (median(&mut fresh), median(&mut cached));
    print(&format!("first_compile.{name}.fresh.ms"), fresh, "ms");
    print(&format!("first_compile.{name}.cached.ms"), cached, "ms");
    print(&format!("first_compile.{name}.ratio"), cached / fresh, "ratio");
}

fn main() {
    if let Ok(name) = env::var(CHILD) {
        return child(&name);
    }
    let folder = env::temp_dir().join(format!("gpu-await-first-compile-{}", std::process::id()));
    for name in ["small", "large"] {
        compare(name, &folder);
    }
    fs::remove_dir_all(&folder).ok();
}
