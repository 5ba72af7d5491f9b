//! Every plan inside a host function, a submission lock, a twin and a waker; and the line that an error names.

use std::collections::BTreeSet;
use std::path::Path;

use gpu_await::{Device, Result, StreamPool, testing};
use gpu_await_libs::{Blas, Fft};

use crate::under_test::every_plan;
use crate::under_test::every_plan::Plans;
use crate::under_test::inside::{Inside, World};

/// As `every_public_method_inside_a_host_function` in `tests/streams/host_functions.rs`.
#[test]
fn every_plan_inside_a_host_function() {
    every_plan::run(&testing::device(), Inside::HostFn).unwrap();
}

#[test]
fn every_plan_inside_enqueue() {
    every_plan::run(&testing::device(), Inside::Enqueue).unwrap();
}

#[test]
fn no_plan_blocks_inside_a_twin() {
    // CUDA has no twins.
    every_plan::run(&Device::host(), Inside::Twin).unwrap();
}

#[test]
fn no_plan_blocks_the_poller() {
    every_plan::run(&testing::device(), Inside::Waker).unwrap();
}

/// Methods that neither call the driver nor a library.
const CALL_NOTHING: &[&str] =
    &["Blas::gemm", "Gemm::workspace_bytes", "Fft::complex", "Fft::real", "$plan::work_bytes"];

/// A new method is called in all of these places, or named above.
#[test]
fn every_plan_is_in_the_list() {
    // Where this process runs: packed tests run on another machine than the one that built them.
    let root = std::env::var_os("CARGO_MANIFEST_DIR");
    let root = root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut found = BTreeSet::new();
    for file in ["src/blas.rs", "src/fft.rs"] {
        let (text, mut owner) = (std::fs::read_to_string(Path::new(&root).join(file)).unwrap(), "");
        for line in text.lines().map(str::trim_start) {
            let word = |text: &'_ str| text.find(['<', '(', ' ']).unwrap_or(text.len());
            if let Some(rest) = line.strip_prefix("impl") {
                let of = rest.split_once("> ").map_or(rest, |(_, of)| of).trim_start();
                owner = &of[..word(of)];
            }
            let start = ["pub fn ", "pub async fn "].iter().find_map(|it| line.strip_prefix(it));
            // One that takes and returns itself keeps an option.
            if let Some(rest) = start.filter(|rest| !rest.contains("(mut self")) {
                found.insert(format!("{owner}::{}", &rest[..word(rest)]));
            }
        }
    }
    assert!(found.len() > 20, "only {found:?}: is the reader broken?");
    let device = Device::host();
    let (world, plans) = (World::new(&device).unwrap(), Plans::new(&device).unwrap());
    let list = every_plan::every_plan(&world, &plans).unwrap();
    let known: BTreeSet<String> =
        list.names().into_iter().chain(CALL_NOTHING.iter().copied()).map(str::to_owned).collect();
    assert_eq!(found, known);
}

/// An error names the line that launched, on whatever it was.
#[test]
fn errors_name_the_line() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let pool = StreamPool::builder().streams(&device, 1).build().unwrap();
    let pooled = pool.try_acquire().unwrap();
    let fft = Fft::load_blocking(&device).unwrap().complex::<f32>(&[4]).plan_blocking().unwrap();
    let blas = Blas::load_blocking(&device).unwrap();
    let gemm = blas.gemm::<f32>(2, 2, 2).plan_blocking().unwrap();
    // Never written: refused where the operation is submitted, behind the checks of the plans.
    let (x, mut y) = (stream.empty::<f32>(4).queued().unwrap(), stream.zeros(4).queued().unwrap());
    let (s, mut t) = (stream.empty(4).queued().unwrap(), stream.zeros(4).queued().unwrap());
    let mut lines = Vec::new();
    let mut refused = |result: Result<()>, line: u32| {
        let at = result.unwrap_err().at().map(|at| (at.file(), at.line()));
        lines.push((at, Some((file!(), line))));
    };
    macro_rules! on {
        ($($on:expr),+) => {$(
            refused(gemm.launch($on, 1.0, &x, &x, 0.0, &mut y).queued(), line!());
            refused(fft.forward($on, &s, &mut t).queued(), line!());
        )+};
    }
    on!(&stream, &device, &pooled);
    let op = stream.batch(|q| gemm.launch(q, 1.0, &x, &x, 0.0, &mut y));
    refused(op.queued(), line!() - 1);
    for (at, expected) in lines {
        assert_eq!(at, expected);
    }
}
