//! What a missing or refusing driver looks like to the caller.

use std::future::Future;
use std::process::Command;
use std::sync::mpsc;
use std::task::{Context, Wake, Waker};
use std::{env, fs};

use gpu_await::{
    Completion, Device, DeviceKind, ErrorDetail, ErrorKind, Image, ImageProblem, Module,
};
use gpu_await_algorithms::Algorithms;

use super::{
    Line, OURS, async_under_the_stand_in, device_with, eventually, soon, under_the_stand_in,
};

#[test]
fn ptx_that_does_not_compile_shows_the_log_and_the_line() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let image = Image::ptx(".visible .entry a()\n{\n  syntax error;\n}").named("broken");
        let error = soon(Module::load(&device, image)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        match error.detail() {
            ErrorDetail::BadImage { image, problem: ImageProblem::Driver(code), log } => {
                assert_eq!((&**image, code.code), ("broken", 218));
                assert!(log.contains("line 7") && log.contains("Parsing error"), "{log}");
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains("CUDA_ERROR_INVALID_PTX"), "{error}");
        assert!(error.to_string().contains("line 7"), "{error}");
        // No text at all.
        let error = soon(Module::load(&device, Image::ptx(""))).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::BadImage { .. }), "{error}");
        assert_eq!(driver.live("module"), OURS);
        soon(device.default_stream().zeros::<u8>(5)).await.unwrap();
    });
}

/// The driver takes a format from the first bytes, and reads text up to a NUL.
#[test]
fn what_is_no_image_never_reaches_the_driver() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        driver.clear();
        // No file of that kind, and a binary by the door for text.
        for bytes in [b"PK\x03\x04".to_vec(), vec![1, 2, 3]] {
            // SAFETY: the driver never sees them.
            let image = unsafe { Image::binary(bytes) }.named("an archive");
            let error = soon(Module::load(&device, image)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidCall);
            let ErrorDetail::BadImage { problem: ImageProblem::UnknownForm { .. }, .. } =
                error.detail()
            else {
                panic!("{error:?}");
            };
            assert!(error.to_string().contains("an archive"), "{error}");
        }
        for text in ["\x7fELF\x02\x01\x01\x07", ".version 8.0\n\0.entry f()"] {
            let error = soon(Module::load(&device, Image::ptx(text))).await.unwrap_err();
            let ErrorDetail::BadImage { problem: ImageProblem::NotText { .. }, .. } =
                error.detail()
            else {
                panic!("{error:?}");
            };
        }
        assert!(!driver.names().contains(&"cuLibraryLoadData".to_owned()), "{:?}", driver.names());
    });
}

#[test]
fn a_kernel_that_is_not_in_the_image_is_named() {
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let image = Image::ptx(include_str!("../../kernels/spin.ptx")).named("spin.ptx");
        let module = soon(Module::load(&device, image)).await.unwrap();
        // SAFETY: there is no such kernel.
        let error = unsafe { module.kernel::<(u64,)>("spun") }.unwrap_err();
        match error.detail() {
            ErrorDetail::NoSuchKernel { image, kernel, there } => {
                assert_eq!((&**image, &**kernel), ("spin.ptx", "spun"));
                assert_eq!(there[..], ["spin"]);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(error.to_string(), "`spin.ptx` has no kernel `spun`, but `spin`");
        // What a compiler makes of a kernel without `extern "C"`.
        let text = include_str!("../../kernels/spin.ptx").replace("spin", "_Z4spinPfj");
        let mangled = soon(Module::load(&device, Image::ptx(text).named("spin.cu"))).await;
        // SAFETY: there is no such kernel.
        let error = unsafe { mangled.unwrap().kernel::<(u64,)>("spin") }.unwrap_err();
        let told = "`spin.cu` has no kernel `spin`, but `_Z4spinPfj`, its name in C++: declare it `extern \"C\" __global__`";
        assert_eq!(error.to_string(), told);
        // SAFETY: a name that no kernel can have.
        let error = unsafe { module.kernel::<(u64,)>("sp\0in") }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    });
}

/// A library that cannot be loaded stands first on the path: on a machine with a driver, too, this
/// is a process without one.
#[test]
fn without_a_driver_there_is_the_host_device() {
    const NAME: &str = "errors::without_a_driver_there_is_the_host_device";
    const VARIABLE: &str = "GPU_AWAIT_NO_DRIVER";
    if env::var_os(VARIABLE).is_none() {
        let folder = env::temp_dir().join(format!("gpu-await-no-driver-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in ["libcuda.so.1", "libcuda.so"] {
            fs::write(folder.join(name), "no library").unwrap();
        }
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]).env(VARIABLE, "1");
        command.env("LD_LIBRARY_PATH", &folder);
        let output = command.output().unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        return;
    }
    let error = Device::cuda(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    match error.detail() {
        ErrorDetail::NoDriver { reason } => assert!(reason.contains("libcuda.so.1"), "{reason}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(Device::count(), 0);
    let device = Device::cuda_or_host().unwrap();
    assert_eq!(device.kind(), DeviceKind::Host);
    let stream = device.default_stream();
    let x = stream.full(2, 7u8).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [7, 7]);
}

#[test]
fn a_driver_without_devices_means_the_host_device() {
    under_the_stand_in(|driver| {
        driver.set_devices(0);
        let error = Device::cuda(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let ErrorDetail::NoSuchDevice { ordinal: 0, count: 0 } = error.detail() else {
            panic!("{error:?}");
        };
        assert_eq!(Device::count(), 0);
        assert_eq!(Device::cuda_or_host().unwrap().kind(), DeviceKind::Host);
    });
}

#[test]
fn a_driver_that_finds_no_gpu_means_the_host_device() {
    under_the_stand_in(|driver| {
        // Each call asks again.
        (1..=3).for_each(|nth| driver.fail("cuInit", nth, 100));
        let error = Device::cuda(0).unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::NoDriver { .. }), "{error:?}");
        assert!(error.to_string().contains("libcuda.so"), "{error}");
        assert_eq!(Device::count(), 0);
        assert_eq!(Device::cuda_or_host().unwrap().kind(), DeviceKind::Host);
    });
}

/// Codes with which a driver says that it does not work, or not yet, and what must be among the words.
const BROKEN: [(i32, &str); 8] = [
    (3, "fork"),
    (34, "stub"),
    (46, "compute mode"),
    (101, "CUDA_VISIBLE_DEVICES"),
    (802, "fabric manager"),
    (803, "kernel module"),
    (804, "cuda-compat"),
    (999, "/dev/nvidia"),
];

/// The events of this crate, as lines.
#[derive(Clone, Default)]
struct Events(std::sync::Arc<std::sync::Mutex<Vec<String>>>);

impl Events {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl tracing::field::Visit for &Events {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let mut events = self.0.lock().unwrap();
        let line = events.last_mut().unwrap();
        *line += &format!(" {field}={value:?}");
    }
}

impl tracing::Subscriber for Events {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::INFO && metadata.target().starts_with("gpu_await")
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        self.0.lock().unwrap().push(event.metadata().level().to_string());
        let mut visitor = self;
        event.record(&mut visitor);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// `cuInit` fails: the error names the file and the code, says what to do, and nothing is remembered.
#[test]
fn a_driver_that_does_not_work_says_so() {
    under_the_stand_in(|driver| {
        let events = Events::default();
        let _guard = tracing::subscriber::set_default(events.clone());
        for (code, words) in BROKEN {
            driver.fail("cuInit", 1, code);
            let error = Device::cuda(0).unwrap_err();
            let ErrorDetail::BrokenDriver { library, code: returned } = error.detail() else {
                panic!("{error:?}");
            };
            assert_eq!((returned.call, returned.code), ("cuInit", code));
            assert!(library.starts_with('/') && library.contains("libcuda.so"), "{library}");
            let text = error.to_string();
            assert!(text.contains(library) && text.contains(words), "{text}");
            let name = returned.name().unwrap();
            assert!(text.contains(name) && text.contains(&code.to_string()), "{text}");
            driver.fail("cuInit", 1, code);
            assert_eq!(Device::count(), 0);
            events.take();
            driver.fail("cuInit", 1, code);
            match (code, Device::cuda_or_host()) {
                // The toolkit's stub: there is no driver.
                (34, fallen) => {
                    assert_eq!(fallen.unwrap().kind(), DeviceKind::Host);
                    let told = events.take();
                    let tells = |line: &String| line.starts_with("WARN") && line.contains("stub");
                    assert!(told.iter().any(tells), "{told:?}");
                }
                // A node that waits for its fabric manager does not serve from the CPU.
                (_, refused) => assert_eq!(refused.unwrap_err(), error),
            }
        }
        // It works from now on, and is not asked again.
        assert_eq!(Device::count(), 1);
        assert_eq!(Device::cuda_or_host().unwrap().kind(), DeviceKind::Cuda);
        driver.fail("cuInit", 1, 802);
        assert_eq!(Device::count(), 1);
        assert_eq!(driver.forgive(), 1);
    });
}

/// The same codes from the calls behind `cuInit`.
#[test]
fn a_gpu_that_cannot_be_opened_says_so() {
    under_the_stand_in(|driver| {
        for call in ["cuDeviceGetCount", "cuDevicePrimaryCtxRetain"] {
            for (code, words) in BROKEN.into_iter().filter(|(code, _)| *code != 34) {
                driver.fail(call, 1, code);
                let error = Device::cuda_or_host().unwrap_err();
                let ErrorDetail::BrokenDriver { code: returned, .. } = error.detail() else {
                    panic!("{call}: {error:?}");
                };
                assert_eq!((returned.call, returned.code), (call, code));
                assert!(error.to_string().contains(words), "{error}");
                // The number of GPUs is asked for once.
                if call != "cuDeviceGetCount" {
                    Device::cuda(0).unwrap();
                }
            }
            Device::cuda(0).unwrap();
        }
    });
}

#[test]
fn what_a_gpu_lacks_is_named() {
    under_the_stand_in(|driver| {
        // CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        driver.set_attribute(115, 0);
        let error = Device::cuda_or_host().unwrap_err();
        let ErrorDetail::Requires { requirement, .. } = error.detail() else { panic!("{error:?}") };
        assert!(requirement.starts_with("memory pools"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        driver.set_attribute(115, 1);
        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        driver.set_attribute(75, 7);
        driver.set_attribute(76, 5);
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let x = stream.full(100, 1u32).queued().unwrap();
        let error = stream.sum(&x).synchronize().map(drop).unwrap_err();
        let ErrorDetail::Requires { requirement, .. } = error.detail() else { panic!("{error:?}") };
        assert_eq!(*requirement, "compute capability 8.0");
        assert!(error.to_string().contains("7.5"), "{error}");
    });
}

#[test]
fn a_gpu_that_does_not_work_is_not_passed_over() {
    under_the_stand_in(|driver| {
        driver.fail("cuDevicePrimaryCtxRetain", 1, 46);
        let error = Device::cuda_or_host().unwrap_err();
        assert!(error.to_string().contains("46"), "{error}");
    });
}

#[test]
fn an_ordinal_out_of_range_is_told_the_count() {
    under_the_stand_in(|driver| {
        driver.set_devices(2);
        assert_eq!(Device::count(), 2);
        for asked in [2, 3, usize::MAX] {
            match Device::cuda(asked).unwrap_err().detail() {
                ErrorDetail::NoSuchDevice { ordinal, count: 2 } => assert_eq!(*ordinal, asked),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(Device::cuda(1).unwrap().ordinal(), 1);
    });
}

#[test]
fn out_of_memory_says_how_much_and_harms_nobody() {
    async_under_the_stand_in(async |driver| {
        const MIB: usize = 1 << 20;
        driver.set_memory(64 << 20);
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.full(40 * MIB, 7u8).queued().unwrap();
        let error = stream.zeros::<u8>(30 * MIB).queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        match *error.detail() {
            ErrorDetail::OutOfMemory { asked_bytes, free_bytes, total_bytes, .. } => {
                assert_eq!((asked_bytes, total_bytes), (30 << 20, 64 << 20));
                assert_eq!(free_bytes, 24 << 20);
            }
            ref other => panic!("{other:?}"),
        }
        // Everything goes on.
        let y = soon(stream.full(20 * MIB, 8u8)).await.unwrap();
        assert_eq!(soon(stream.download(&x)).await.unwrap()[40 * MIB - 1], 7);
        drop((x, y));
        // Behind the frees; the stand-in counts memory as free when its stream was there.
        soon(stream.zeros::<u8>(1)).await.unwrap();
        soon(stream.zeros::<u8>(60 * MIB)).await.unwrap();
    });
}

/// Says on which thread it was called, and keeps that thread until it may go.
struct Stuck(std::sync::Mutex<(mpsc::Sender<()>, mpsc::Receiver<()>)>);

impl Wake for Stuck {
    fn wake(self: std::sync::Arc<Self>) {
        let (arrived, go) = &*self.0.lock().unwrap();
        let _ = arrived.send(());
        let _ = go.recv_timeout(super::SOON);
    }
}

#[test]
fn an_allocation_about_to_fail_flushes_what_is_retired() {
    async_under_the_stand_in(async |driver| {
        const MIB: usize = 1 << 20;
        driver.set_memory(64 << 20);
        let device = device_with(Completion::Event);
        let streams =
            [device.stream().unwrap(), device.stream().unwrap(), device.stream().unwrap()];
        let [a, b, c] = &streams;

        // Keep the poller from doing it: it is stuck in a waker.
        let (arrived, at_waker) = mpsc::channel();
        let (release, go) = mpsc::channel();
        let waker = Waker::from(std::sync::Arc::new(Stuck(std::sync::Mutex::new((arrived, go)))));
        let held = driver.hold();
        let mut z = c.full(8, 0u8);
        let polled = std::pin::Pin::new(&mut z).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        let mut x = a.full(40 * MIB, 7u8).queued().unwrap();
        b.fill(&mut x, 8).queued().unwrap();
        drop(held);
        at_waker.recv_timeout(super::SOON).expect("the poller wakes the future");

        driver.clear();
        drop(x);
        assert_eq!(device.stats().pending_bytes, 40 << 20, "two streams used it");
        eventually("both are through", || a.done().is_complete() && b.done().is_complete());
        assert!(!driver.calls().iter().any(|line| Line(line).name() == "cuMemFreeAsync"));
        driver.clear();
        let y = a.full(50 * MIB, 9u8).queued().expect("there is room once the retired is freed");
        let calls = driver.calls();
        let allocations: Vec<_> = calls
            .iter()
            .map(|line| Line(line))
            .filter(|l| l.name() == "cuMemAllocFromPoolAsync")
            .collect();
        assert_eq!(allocations.len(), 2, "{calls:#?}");
        assert_eq!(allocations[0].value("result"), Some("2"));
        assert_eq!(allocations[1].value("result"), None);
        release.send(()).unwrap();
        drop(y);
        soon(z).await.unwrap();
    });
}
