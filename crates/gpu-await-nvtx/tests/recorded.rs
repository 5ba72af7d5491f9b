//! What a tool that listens to NVTX is told: one that is compiled here, in a process on the stand-in driver.

use std::path::{Path, PathBuf};
use std::process::Command;

use gpu_await::{Device, kernels};
use gpu_await_nvtx::{SpanRanges, name_stream};
use stand_in_cuda::{assert_child, is_child};
use tracing::{Instrument, info_span};
use tracing_subscriber::layer::SubscriberExt;

fn recorder(folder: &Path) -> PathBuf {
    let library = folder.join("librecorder.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorder.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&library).arg(source);
    assert!(compiler.status().expect("a C compiler, as for NVTX itself").success());
    library
}

#[test]
fn spans_and_names_of_streams() {
    const NAME: &str = "spans_and_names_of_streams";
    if is_child() {
        return program();
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (library, record) = (recorder(&folder), folder.join("nvtx-record"));
    let path = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let (library, record_path) = (path(&library), path(&record));
    assert_child(NAME, &[("NVTX_INJECTION64_PATH", &library), ("RECORD", &record_path)]);
    let told = std::fs::read_to_string(record).expect("it was told something");
    let lines: Vec<&str> = told.lines().collect();
    let (names, ranges): (Vec<&str>, Vec<&str>) =
        lines.iter().partition(|line| line.starts_with("stream "));
    let named =
        |name: &str| names.iter().any(|line| line.starts_with("stream 0x") && line.ends_with(name));
    assert_eq!(names.len(), 2, "{told}");
    assert!(named(" decode") && named(" stream 3"), "{told}");
    // A task that waits once is polled twice, and dropped inside of its span.
    let polled = ["push request", "pop"];
    let first = ["domain gpu-await", "push Größe", "push request", "pop", "pop"];
    assert_eq!(ranges, [&first[..], &polled, &polled].concat(), "{told}");
}

fn program() {
    let subscriber = tracing_subscriber::registry().with(SpanRanges::new());
    tracing::subscriber::set_global_default(subscriber).expect("the only one");
    let device = Device::cuda(0).expect("the stand-in");
    let a = device.stream_builder().name("decode").build().expect("a stream");
    let b = device.stream().expect("a stream");
    name_stream(&a);
    name_stream(&b);
    name_stream(&Device::host().stream().expect("a stream"));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let _kernel = runtime.block_on(kernels::scale::load(&device)).expect("a kernel");
    let waits = async {
        let mut is_first = true;
        std::future::poll_fn(|cx| match std::mem::replace(&mut is_first, false) {
            true => {
                cx.waker().wake_by_ref();
                std::task::Poll::Pending
            }
            false => std::task::Poll::Ready(()),
        })
        .await;
    };
    let mut work = std::pin::pin!(waits.instrument(info_span!("request")));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let first = info_span!("Größe").in_scope(|| work.as_mut().poll(&mut cx));
    assert!(first.is_pending());
    assert!(work.as_mut().poll(&mut cx).is_ready());
}
