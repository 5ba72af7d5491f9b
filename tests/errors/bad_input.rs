//! Bad input: a clear typed error, nothing lost, nothing hung.

use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{
    Axis, Device, DeviceKind, ErrorDetail, ErrorKind, Grid, Image, ImageProblem, In, InOut, Kernel,
    LaunchConfig, LaunchLimit, Module, kernel, kernels,
};

use crate::under_test::child;

fn empty_kernel(device: &Device) -> kernels::empty {
    futures::executor::block_on(kernels::empty::load(device)).unwrap()
}

#[test]
fn an_ordinal_out_of_range_names_the_count_or_the_missing_driver() {
    let error = Device::cuda(4711).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    match error.detail() {
        ErrorDetail::NoSuchDevice { ordinal: 4711, count } => assert_eq!(*count, Device::count()),
        ErrorDetail::NoDriver { reason } => assert!(reason.contains("libcuda"), "{reason}"),
        #[cfg(not(feature = "cuda"))]
        ErrorDetail::NotBuilt => {}
        other => panic!("{other}"),
    }
}

#[test]
fn device_names_are_checked() {
    for bad in ["gpu", "cuda:x", "cuda:-1", "host:1:2", "metal:0"] {
        let error = Device::builder().named(bad).unwrap_err();
        assert!(
            matches!(error.detail(), ErrorDetail::BadDeviceName { variable: None, value } if value == bad)
        );
        assert!(error.to_string().contains("expected `auto`"), "{error}");
    }
    assert_eq!(Device::builder().named("host").unwrap().kind(), DeviceKind::Host);
}

/// In a process of its own, as it has the variable.
#[test]
fn a_bad_variable_is_named() {
    const NAME: &str = concat!(module_path!(), "::a_bad_variable_is_named");
    if child::parameter().is_some() {
        println!("{}", Device::from_env().unwrap_err());
        return;
    }
    let mut command = child::command(NAME, "child");
    command.env("GPU_AWAIT_DEVICE", "gpu0");
    let output = child::run_command(command, NAME, "child");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let expected = "the environment variable GPU_AWAIT_DEVICE is `gpu0`: expected `auto`, `host`, `cuda` or `cuda:N`";
    assert!(said.contains(expected), "{said}");
}

kernel! {
    unsafe fn twin_panics(x: &mut [f32]);
    launch = LaunchConfig::for_elements(x.len());
    host = on_purpose;
}

fn on_purpose(_: &Grid, _: &mut [f32]) {
    panic!("on purpose");
}

#[test]
fn a_twins_panic_names_its_kernel() {
    let device = Device::host();
    let stream = device.stream().unwrap();
    let kernel = twin_panics::load_blocking(&device).unwrap();
    let mut x = stream.zeros(4).queued().unwrap();
    let error = kernel.launch(&stream, &mut x).synchronize().unwrap_err();
    assert!(error.is_device_lost());
    let said = error.to_string();
    assert!(said.contains("the host twin of `twin_panics` panicked: on purpose"), "{said}");
}

/// No dynamic shared memory is as good as any: a limit says so, where blocks and threads begin with 1.
#[test]
fn a_limit_says_whether_0_is_legal() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let empty = empty_kernel(&device);
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let kernel = unsafe { empty.kernel() };
    let said =
        |config: LaunchConfig| stream.launch(kernel, config, ()).queued().unwrap_err().to_string();
    let shared = said(LaunchConfig::new(1, 1).shared_mem_bytes(1 << 30));
    assert!(shared.contains("is 1073741824, but must be at most "), "{shared}");
    let threads = said(LaunchConfig::new(1, 1025));
    assert!(threads.contains("block_dim.x is 1025, but must be 1 to 1024"), "{threads}");
}

#[test]
fn launch_extents_are_checked_with_axis_asked_and_limit() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let empty = empty_kernel(&device);
    // SAFETY: it takes nothing and does nothing, whatever the geometry.
    let kernel = unsafe { empty.kernel() };
    let cases = [
        (LaunchConfig::new((0, 1), 1), LaunchLimit::Grid(Axis::X), 0),
        (LaunchConfig::new((1, 65_536), 1), LaunchLimit::Grid(Axis::Y), 65_536),
        (LaunchConfig::new((1, 1, 65_536), 1), LaunchLimit::Grid(Axis::Z), 65_536),
        (LaunchConfig::new(u32::MAX, 1), LaunchLimit::Grid(Axis::X), u64::from(u32::MAX)),
        (LaunchConfig::new(1, 0), LaunchLimit::Block(Axis::X), 0),
        (LaunchConfig::new(1, 1025), LaunchLimit::Block(Axis::X), 1025),
        (LaunchConfig::new(1, (1, 1, 65)), LaunchLimit::Block(Axis::Z), 65),
        (LaunchConfig::new(1, (1024, 2)), LaunchLimit::ThreadsPerBlock, 2048),
        (LaunchConfig::new(1, 1).shared_mem_bytes(1 << 30), LaunchLimit::SharedMemBytes, 1 << 30),
    ];
    for (config, expected, expected_asked) in cases {
        let before = stream.submitted();
        let error = stream.launch(kernel, config, ()).queued().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        match error.detail() {
            ErrorDetail::LaunchLimit { kernel, what, asked, limit } => {
                assert_eq!((kernel.as_str(), *what, *asked), ("empty", expected, expected_asked));
                assert!(*asked == 0 || *asked > *limit);
            }
            other => panic!("{other}"),
        }
        assert_eq!(stream.submitted(), before, "nothing was submitted");
    }
    // More than the default, less than the opt-in limit.
    stream
        .launch(kernel, LaunchConfig::new(1, 1).shared_mem_bytes(100 << 10), ())
        .synchronize()
        .unwrap();
}

#[test]
fn a_precondition_that_fails_says_its_text_and_the_values() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let matmul = futures::executor::block_on(kernels::matmul_tiled::load(&device)).unwrap();
    let a = stream.zeros::<f32>(6).queued().unwrap();
    let b = stream.zeros::<f32>(6).queued().unwrap();
    let mut c = stream.zeros::<f32>(5).queued().unwrap();
    let error = matmul.launch(&stream, &a, &b, &mut c, 2, 2, 3).queued().unwrap_err();
    match error.detail() {
        ErrorDetail::Precondition { kernel, requirement, values } => {
            assert_eq!(kernel, "matmul_tiled");
            assert!(requirement.contains("c.len()"), "{requirement}");
            assert!(values.contains("c.len() = 5") && values.contains("m = 2"), "{values}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn nothing_is_zero_length_everything() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let axpy = futures::executor::block_on(kernels::axpy::load(&device)).unwrap();
    let x = stream.upload(Vec::<f32>::new()).queued().unwrap();
    let mut y = stream.zeros::<f32>(0).queued().unwrap();
    let e = stream.empty::<f32>(0).queued().unwrap();
    axpy.launch(&stream, 1.0, &x, &mut y).synchronize().unwrap();
    stream.fill(&mut y, 3.0).synchronize().unwrap();
    stream.copy(&e, &mut y).synchronize().unwrap();
    assert!(stream.download(&y).synchronize().unwrap().is_empty());
    assert!(stream.download_vec(&e).synchronize().unwrap().is_empty());
    let pinned = stream.pinned::<f32>(0).unwrap();
    assert!(stream.upload_into(pinned, &mut y).synchronize().unwrap().is_empty());
    assert!(x.slice(0..0).unwrap().slice(..).is_ok());
    assert_eq!(stream.submitted(), 0, "nothing reached the device");
    stream.batch(|_| Ok(())).synchronize().unwrap();
    stream.done().synchronize().unwrap();
    assert!(gpu_await::join_all(Vec::<gpu_await::Op<()>>::new()).synchronize().unwrap().is_empty());
}

#[test]
fn ranges_and_lengths_are_checked() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let mut x = stream.zeros::<u8>(10).queued().unwrap();
    let mut y = stream.zeros::<u8>(5).queued().unwrap();
    for (start, end) in [(0, 11), (11, 11), (7, 3), (usize::MAX, usize::MAX)] {
        let error = x.slice(start..end).unwrap_err();
        assert!(
            matches!(error.detail(), ErrorDetail::OutOfBounds { len: 10, .. }),
            "{start}..{end}: {error}"
        );
    }
    assert!(x.slice(..=usize::MAX).is_err() && x.slice_mut(10..).is_ok());
    assert!(x.split_at_mut(11).is_err());
    let error = stream.copy(&x, &mut y).queued().unwrap_err();
    assert!(matches!(
        error.detail(),
        ErrorDetail::LengthMismatch { source_len: 10, destination_len: 5, .. }
    ));
    let pinned = stream.pinned::<u8>(3).unwrap();
    assert_eq!(
        stream.download_into(&x, pinned).synchronize().unwrap_err().kind(),
        ErrorKind::InvalidCall
    );
    assert_eq!(stream.download(&x).synchronize().unwrap(), [0; 10]);
}

#[test]
fn memory_that_nothing_wrote_cannot_be_read() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let mut x = stream.empty::<u32>(10).queued().unwrap();
    let error = stream.download(&x).synchronize().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { start: 0, end: 40, .. }), "{error}");
    stream.fill(&mut x.slice_mut(0..4).unwrap(), 7).queued().unwrap();
    let error = stream.download(&x).synchronize().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::Unwritten { start: 16, end: 40, .. }), "{error}");
    assert_eq!(stream.download(&x.slice(..4).unwrap()).synchronize().unwrap(), [7; 4]);
}

#[test]
fn buffers_and_kernels_of_another_device_are_refused() {
    let (a, b) = (testing::device(), testing::device());
    let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
    let mut x = s.full(4, 1.0f32).queued().unwrap();
    let scale = futures::executor::block_on(kernels::scale::load(&b)).unwrap();
    let error = scale.launch(&t, 2.0, &mut x).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { what: "a buffer", .. }), "{error}");
    let mut y = s.full(4, 1.0f32).queued().unwrap();
    let error = scale.launch(&s, 2.0, &mut y).queued().unwrap_err();
    assert!(
        matches!(error.detail(), ErrorDetail::WrongDevice { what: "the kernel", .. }),
        "{error}"
    );
    let error = t.download(&x).synchronize().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall);
    let pinned = a.pinned::<f32>(4).unwrap();
    let mut z = t.zeros::<f32>(4).queued().unwrap();
    assert!(t.upload_into(pinned, &mut z).synchronize().is_err());
}

#[test]
fn submitting_or_blocking_inside_a_host_function_is_refused() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let inner = stream.clone();
    let op = stream.host_fn(move || {
        let submit = inner.zeros::<u8>(10).queued().unwrap_err();
        let block = inner.synchronize().unwrap_err();
        let whole = inner.device().done().submitted().unwrap_err();
        [submit, block, whole]
    });
    for error in op.synchronize().unwrap() {
        assert!(matches!(error.detail(), ErrorDetail::WrongThread { .. }), "{error}");
    }
}

#[test]
fn a_panic_in_a_host_function_goes_on_in_its_awaiter_and_harms_nobody_else() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let op = stream.host_fn(|| -> u32 { panic!("on purpose") });
    let after = stream.host_fn(|| 7);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| op.synchronize()));
    let panic = panic.unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    assert_eq!(after.synchronize().unwrap(), 7);
}

#[test]
fn a_closed_device_refuses_work_on_every_handle() {
    futures::executor::block_on(async {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let x = stream.full(1000, 1u8).queued().unwrap();
        let pending = stream.download(&x);
        device.close(Duration::from_secs(10)).await.unwrap();
        assert_eq!(pending.await.unwrap().len(), 1000, "what was submitted completes");
        for error in [
            stream.zeros::<u8>(1).queued().map(drop).unwrap_err(),
            device.stream().map(drop).unwrap_err(),
            stream.pinned::<u8>(1).map(drop).unwrap_err(),
            kernels::empty::load(&device).await.map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        }
    });
}

#[test]
fn closing_gives_up_after_its_limit() {
    futures::executor::block_on(async {
        let device = testing::device();
        let stream = device.stream().unwrap();
        let gate = Gate::close(&stream).unwrap();
        let error = device.close(Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        gate.open();
        stream.done().await.unwrap();
    });
}

#[test]
#[should_panic(expected = "polled after it completed")]
fn polling_a_finished_future_says_so() {
    let device = testing::device();
    let mut op = device.stream().unwrap().done();
    assert!((&mut op).now_or_never().is_some());
    drop((&mut op).now_or_never());
}

#[test]
fn out_of_memory_names_its_figures_and_everything_goes_on() {
    let device = match testing::device().kind() {
        DeviceKind::Host => Device::builder().host_memory_bytes(10 << 20).host(),
        _ => testing::device(),
    };
    let stream = device.stream().unwrap();
    let kept = stream.full(1000, 5u8).queued().unwrap();
    let total = device.memory().unwrap().total_bytes;
    let error = stream.empty::<u8>(2 * total as usize).queued().unwrap_err();
    match *error.detail() {
        ErrorDetail::OutOfMemory {
            asked_bytes,
            free_bytes,
            total_bytes,
            limit_bytes: None,
            ..
        } => {
            assert_eq!((asked_bytes, total_bytes), (2 * total, total));
            assert!(free_bytes <= total_bytes && free_bytes > 0);
        }
        ref other => panic!("{other}"),
    }
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(stream.download(&kept).synchronize().unwrap(), vec![5u8; 1000]);
    let error = stream.empty::<u64>(usize::MAX / 2).queued().unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::TooLarge { element_bytes: 8, .. }), "{error}");
}

/// Whatever is asked: nothing is blamed on the driver, and everything goes on.
#[test]
fn absurd_sizes_are_too_large_or_out_of_memory() {
    let device = testing::device();
    let stream = device.stream().unwrap();
    let most = isize::MAX as usize;
    for len in [1 << 50, 1 << 60, most / 2, most - 511, most - 1, most, most + 1, usize::MAX] {
        let errors = [
            stream.empty::<u8>(len).queued().map(drop),
            stream.zeros::<u8>(len).queued().map(drop),
            stream.full::<u64>(len / 8, 7).queued().map(drop),
            stream.empty::<[u8; 3]>(len / 3).queued().map(drop),
            stream.empty::<f64>(len).queued().map(drop),
            device.pinned::<u8>(len).map(drop),
            device.pinned::<[u8; 3]>(len / 3).map(drop),
        ];
        for error in errors.map(|made| made.expect_err("nobody has so much")) {
            let too_large = matches!(error.detail(), ErrorDetail::TooLarge { .. });
            assert!(too_large || error.kind() == ErrorKind::OutOfMemory, "{len}: {error}");
        }
    }
    assert_eq!((device.stats().allocations, device.stats().allocated_bytes), (0, 0));
    let x = stream.full(3, 1u8).queued().unwrap();
    assert_eq!(stream.download(&x).synchronize().unwrap(), [1; 3]);
}

#[test]
fn memory_freed_is_there_for_the_next_request() {
    let device = match testing::device().kind() {
        DeviceKind::Host => Device::builder().host_memory_bytes(10 << 20).host(),
        _ => return, // 100 GB would be slow to no purpose; the stand-in driver shows it as well
    };
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    for _ in 0..20 {
        let x = a.full(6 << 20, 1u8).queued().unwrap();
        // Used by another stream: retired, and flushed by the next allocation.
        b.download(&x).synchronize().unwrap();
        drop(x);
    }
}

#[tokio::test]
async fn a_kernel_without_code_for_the_device_is_refused() {
    gpu_await::kernel! {
        unsafe fn gpus_alone(x: &mut [f32]);
        launch = LaunchConfig::for_elements(x.len());
        ptx = ".version 7.0";
    }
    gpu_await::kernel! {
        unsafe fn hosts_alone(x: &mut [f32]);
        launch = LaunchConfig::for_elements(x.len());
        host = |_, _| ();
    }
    let device = testing::device();
    let (error, name) = match device.kind() {
        DeviceKind::Host => (gpus_alone::load(&device).await.unwrap_err(), "gpus_alone"),
        _ => (hosts_alone::load(&device).await.unwrap_err(), "hosts_alone"),
    };
    assert!(
        matches!(error.detail(), ErrorDetail::NoImplementation { kernel, .. } if kernel == name)
    );
    let host = Device::host();
    let error = Module::load(&host, Image::ptx(".version 7.0")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// On a host device as well, which runs the twin: the mistake would show on a GPU alone.
#[tokio::test]
async fn an_entry_that_the_ptx_does_not_have() {
    gpu_await::kernel! {
        unsafe fn scales(a: f32, x: &mut [f32], n: u64 = x.len());
        launch = LaunchConfig::for_elements(x.len());
        ptx = include_str!("../../kernels/scale.ptx");
        host = |_, _, _, _| ();
    }
    gpu_await::kernel! {
        unsafe fn early(a: f32, x: &mut [f32], n: u64 = x.len());
        launch = LaunchConfig::for_elements(x.len());
        ptx = include_str!("../../kernels/scale.ptx").to_owned();
        programmatic = true;
        host = |_, _, _, _| ();
    }
    let device = testing::device();
    let errors =
        [scales::load(&device).await.unwrap_err(), early::load_blocking(&device).unwrap_err()];
    for (error, name) in errors.iter().zip(["scales", "early"]) {
        assert!(
            matches!(error.detail(), ErrorDetail::NoSuchKernel { kernel, there, .. } if kernel == name && *there == ["scale"]),
            "{error}"
        );
    }
}

#[tokio::test]
async fn ptx_that_does_not_compile_comes_with_the_log() {
    let device = testing::device();
    if device.kind() != DeviceKind::Cuda {
        return; // the stand-in driver shows it without a GPU
    }
    let ptx = ".version 7.0\n.target sm_60\n.address_size 64\nthis is no PTX\n";
    let error = Module::load(&device, Image::ptx(ptx).named("broken.ptx")).await.unwrap_err();
    match error.detail() {
        ErrorDetail::BadImage { image, log, .. } => {
            assert_eq!(image, "broken.ptx");
            assert!(log.contains("line 4"), "{log}");
        }
        other => panic!("{other}"),
    }
    let good = include_str!("../../kernels/axpy.ptx");
    let module = Module::load(&device, Image::ptx(good)).await.unwrap();
    // SAFETY: it is never launched.
    let error = unsafe { module.kernel::<(f32,)>("no_such_kernel") }.unwrap_err();
    assert!(
        matches!(error.detail(), ErrorDetail::NoSuchKernel { kernel, .. } if kernel == "no_such_kernel")
    );
}

/// It ended the process when the driver read it.
#[tokio::test]
async fn a_binary_as_text_is_refused() {
    let device = testing::device();
    let as_text = String::from_utf8(b"\x7fELF\x02\x01\x01\x07".to_vec()).unwrap();
    let error = Module::load(&device, Image::ptx(as_text)).await.unwrap_err();
    match (device.kind(), error.detail()) {
        (DeviceKind::Host, ErrorDetail::NoImplementation { .. }) => {}
        (
            DeviceKind::Cuda,
            ErrorDetail::BadImage { problem: ImageProblem::NotText { at: 0, .. }, .. },
        ) => {}
        (_, other) => panic!("{other}"),
    }
    device.stream().unwrap().full(4, 1u8).synchronize().unwrap();
}

#[test]
fn a_runtime_kernel_is_checked_like_a_declared_one() {
    let device = Device::host();
    let stream = device.stream().unwrap();
    let dot = Kernel::<(In<f32>, In<f32>, InOut<f32>)>::host(
        &device,
        "dot",
        |_: &Grid, x: &[f32], y: &[f32], out: &mut [f32]| {
            out[0] = x.iter().zip(y).map(|(x, y)| x * y).sum();
        },
    )
    .unwrap()
    .require("x.len() == y.len()", |_, (x, y, _)| x.len() == y.len())
    .require("out.len() == 1", |_, (_, _, out)| out.len() == 1);
    let x = stream.upload(vec![1.0f32, 2.0, 3.0]).queued().unwrap();
    let mut out = stream.zeros::<f32>(1).queued().unwrap();
    stream.launch(&dot, LaunchConfig::new(1, 1), (&x, &x, &mut out)).queued().unwrap();
    assert_eq!(stream.download(&out).synchronize().unwrap(), [14.0]);
    let short = x.slice(..2).unwrap();
    let error = stream.launch(&dot, LaunchConfig::new(1, 1), (&x, &short, &mut out)).queued();
    assert!(error.unwrap_err().to_string().contains("argument 1.len() = 2"));
}
