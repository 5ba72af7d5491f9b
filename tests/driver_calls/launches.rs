//! What a launch asks the driver first, and what is refused without it.

use gpu_await::{
    Completion, Device, ErrorDetail, ErrorKind, Flag, In, InOut, Kernel, LaunchConfig, LaunchLimit,
    Out, Stream, Value,
};

use super::{
    Line, StandIn, async_under_the_stand_in, device_with, eventually, kernel_from, my_calls,
    my_names, soon,
};

const MULTIPROCESSORS: u32 = 132;
const MOST_SHARED: u32 = 232_448;

/// A stream, and a kernel that takes no time whatever its geometry.
async fn set_up(device: &Device) -> (Stream, Kernel<(u64,)>) {
    let ptx = include_str!("../../kernels/spin.ptx");
    (device.stream().unwrap(), kernel_from(device, ptx, "spin").await)
}

fn launch(stream: &Stream, spin: &Kernel<(u64,)>, config: LaunchConfig) -> gpu_await::Result<()> {
    stream.launch(spin, config, (0,)).queued()
}

/// The calls without those that make a context current and back.
fn named(driver: &StandIn) -> Vec<String> {
    let mut names = my_names(driver);
    names.retain(|name| !name.starts_with("cuCtx"));
    names
}

/// The limit that a launch was refused for, with what was asked and what is allowed.
fn refused(result: gpu_await::Result<()>) -> (LaunchLimit, u64, u64) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    match error.detail() {
        ErrorDetail::LaunchLimit { what, asked, limit, .. } => (*what, *asked, *limit),
        other => panic!("{other}"),
    }
}

#[test]
fn more_shared_memory_than_the_default_is_asked_for_once_and_up_to_the_limit() {
    async_under_the_stand_in(async |driver| {
        driver.set_function_attribute(1, 2048); // static shared memory
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        let config = LaunchConfig::new(1, 32);
        driver.clear();
        launch(&stream, &spin, config.shared_mem_bytes(49_152 - 2048)).unwrap();
        assert_eq!(named(driver), ["cuLaunchKernel"], "the default is enough");
        driver.clear();
        // The static counts as well: a little less than the default is too much already.
        launch(&stream, &spin, config.shared_mem_bytes(49_152 - 2047)).unwrap();
        assert_eq!(named(driver), ["cuFuncSetAttribute", "cuLaunchKernel"]);
        let calls = my_calls(driver);
        let set = calls.iter().find(|line| Line(line).name() == "cuFuncSetAttribute").unwrap();
        assert_eq!(Line(set).value("value"), Some(&*(MOST_SHARED - 2048).to_string()), "{set}");
        assert!(Line(set).has("relaxed"), "it may break another thread's capture: {set}");
        driver.clear();
        for shared in [MOST_SHARED - 2048, 60_000] {
            launch(&stream, &spin, config.shared_mem_bytes(shared)).unwrap();
        }
        assert_eq!(named(driver), ["cuLaunchKernel", "cuLaunchKernel"]);
        driver.clear();
        let over = MOST_SHARED - 2047;
        let error = launch(&stream, &spin, config.shared_mem_bytes(over));
        let (asked, limit) = (u64::from(over), u64::from(over) - 1);
        assert_eq!(refused(error), (LaunchLimit::SharedMemBytes, asked, limit));
        assert_eq!(my_names(driver), [""; 0]);
        soon(stream.done()).await.unwrap();
    });
}

#[test]
fn a_refused_opt_in_is_told_and_tried_again_by_the_next_launch() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        let config = LaunchConfig::new(1, 32).shared_mem_bytes(100_000);
        driver.fail("cuFuncSetAttribute", 1, 999);
        let error = launch(&stream, &spin, config).unwrap_err();
        assert!(
            matches!(error.detail(), ErrorDetail::Driver { code, .. } if code.code == 999),
            "{error}"
        );
        launch(&stream, &spin, config).unwrap();
        soon(stream.done()).await.unwrap();
    });
}

#[test]
fn a_block_beyond_the_kernels_own_limit_is_told_whether_it_is_the_registers() {
    async_under_the_stand_in(async |driver| {
        driver.set_function_attribute(0, 256); // threads of a block of this kernel
        driver.set_function_attribute(4, 200); // registers
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        assert_eq!(spin.attributes().registers, 200);
        driver.clear();
        let error = launch(&stream, &spin, LaunchConfig::new(1, (32, 16)));
        assert_eq!(refused(error), (LaunchLimit::RegistersPerBlock, 512 * 200, 65_536));
        // Few enough registers: then it was compiled for no more (`__launch_bounds__`).
        let error = launch(&stream, &spin, LaunchConfig::new(1, 257));
        assert_eq!(refused(error), (LaunchLimit::KernelThreadsPerBlock, 257, 256));
        assert_eq!(my_names(driver), [""; 0], "the driver was not asked");
        launch(&stream, &spin, LaunchConfig::new(1, 256)).unwrap();
    });
}

#[test]
fn a_cooperative_launch_asks_how_many_blocks_are_resident() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        driver.clear();
        let config = LaunchConfig::new(2 * MULTIPROCESSORS, 1024).cooperative();
        launch(&stream, &spin, config).unwrap();
        let expected = ["cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuLaunchCooperativeKernel"];
        assert_eq!(named(driver), expected);
        let calls = my_calls(driver);
        let asked = calls.iter().find(|line| Line(line).name() == expected[0]).unwrap();
        assert!(Line(asked).has("block=1024") && Line(asked).has("relaxed"), "{asked}");
        driver.clear();
        let over = LaunchConfig::new((2, MULTIPROCESSORS + 1), 1024).cooperative();
        let limit = u64::from(2 * MULTIPROCESSORS);
        let refusal = (LaunchLimit::ResidentBlocks, limit + 2, limit);
        assert_eq!(refused(launch(&stream, &spin, over)), refusal);
        assert_eq!(named(driver), [expected[0]], "nothing was launched");
        // Not cooperative, the same grid is as good as any.
        launch(&stream, &spin, LaunchConfig::new((2, MULTIPROCESSORS + 1), 1024)).unwrap();
        soon(stream.done()).await.unwrap();
    });
}

#[test]
fn a_launch_with_clusters_tells_the_driver_which() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        let config = LaunchConfig::new((4, 6, 2), 64).cluster((2, 3));
        for (config, cooperative) in [(config, false), (config.cooperative(), true)] {
            driver.clear();
            launch(&stream, &spin, config).unwrap();
            assert_eq!(named(driver), ["cuOccupancyMaxActiveClusters", "cuLaunchKernelEx"]);
            let calls = my_calls(driver);
            let launched = Line(calls.last().unwrap());
            assert!(launched.has("grid=4x6x2") && launched.has("block=64x1x1"), "{calls:?}");
            assert!(launched.has("cluster=2x3x1"), "{calls:?}");
            assert_eq!(launched.has("cooperative"), cooperative, "{calls:?}");
        }
        // A cluster of one block is none.
        driver.clear();
        launch(&stream, &spin, LaunchConfig::new(7, 64).cluster(1)).unwrap();
        assert_eq!(named(driver), ["cuLaunchKernel"]);
        soon(stream.done()).await.unwrap();
    });
}

#[test]
fn a_device_without_clusters_or_cooperative_launches_says_so() {
    async_under_the_stand_in(async |driver| {
        driver.set_attribute(95, 0);
        driver.set_attribute(120, 0);
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        driver.clear();
        let config = LaunchConfig::new(8, 64);
        for (config, word) in [(config.cluster(2), "clusters"), (config.cooperative(), "cooperat")]
        {
            let error = launch(&stream, &spin, config).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(word), "{error}");
        }
        assert_eq!(my_names(driver), [""; 0], "the driver was not asked");
    });
}

#[test]
fn the_best_block_is_the_largest_of_those_with_most_active_threads() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (_stream, spin) = set_up(&device).await;
        let best = |shared: fn(u32) -> u32, limit| spin.occupancy().best_block(shared, limit);
        let grid = |blocks: u32| blocks * MULTIPROCESSORS;
        assert_eq!(best(|_| 0, None).unwrap(), (grid(2), 1024));
        assert_eq!(best(|_| 0, Some(512)).unwrap(), (grid(4), 512));
        let sized = [1024, 1025].map(|n| spin.occupancy().config_for_elements(n).unwrap());
        assert_eq!(sized, [LaunchConfig::new(1, 1024), LaunchConfig::new(2, 1024)]);
        // 14 warps leave eight of the 64 slots empty, 12 leave four, 8 leave none.
        assert_eq!(best(|_| 0, Some(420)).unwrap(), (grid(8), 256));
        // 116 KB a block is the most of which two fit.
        driver.clear();
        assert_eq!(best(|block| block * 180, None).unwrap(), (grid(2), 640));
        let raised = my_names(driver).iter().filter(|name| **name == "cuFuncSetAttribute").count();
        assert_eq!(raised, 1, "or the driver would say that none fits");
        // Too much for every block but the small ones.
        let (_, block) = best(|block| if block > 96 { 1 << 20 } else { 100_000 }, None).unwrap();
        assert_eq!(block, 96);
        let error = best(|_| 1 << 20, None).map(drop);
        let limit = u64::from(MOST_SHARED);
        assert_eq!(refused(error), (LaunchLimit::SharedMemBytes, 1 << 20, limit));
    });
}

#[test]
fn a_host_function_does_not_ask_the_driver_about_a_kernel() {
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let (stream, spin) = set_up(&device).await;
        let inner = stream.clone();
        let refusals = stream.host_fn(move || {
            let config = LaunchConfig::new(8, 64);
            let launch = |config| launch(&inner, &spin, config).unwrap_err();
            vec![
                launch(config.cooperative()),
                launch(config.cluster(2)),
                launch(config.shared_mem_bytes(100_000)),
                spin.occupancy().active_blocks(64, 0).unwrap_err(),
                spin.occupancy().best_block(|_| 0, None).unwrap_err(),
            ]
        });
        for error in soon(refusals).await.unwrap() {
            assert!(matches!(error.detail(), ErrorDetail::WrongThread { .. }), "{error}");
        }
    });
}

/// Loads a kernel of that text, declared so.
async fn declared<S: gpu_await::Signature>(
    device: &Device,
    ptx: &'static str,
    name: &str,
) -> gpu_await::Result<Kernel<S>> {
    let module = soon(gpu_await::Module::load(device, gpu_await::Image::ptx(ptx))).await?;
    // SAFETY: never launched.
    unsafe { module.kernel(name) }
}

/// How many parameters are declared and compiled, and what the message says of the first that differs.
fn differs<S: gpu_await::Signature>(
    loaded: gpu_await::Result<Kernel<S>>,
) -> (usize, usize, String) {
    let error = loaded.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidCall, "{error}");
    match error.detail() {
        ErrorDetail::WrongParameters { declared, compiled, .. } => {
            (declared.len(), compiled.len(), error.to_string())
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_wrong_signature_is_refused_at_load() {
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let axpy = include_str!("../../kernels/axpy.ptx");
        type Right = (f32, In<f32>, InOut<f32>, u64);
        declared::<Right>(&device, axpy, "axpy").await.unwrap();

        type OneTooFew = (f32, In<f32>, InOut<f32>);
        let (declared_count, compiled, text) =
            differs(declared::<OneTooFew>(&device, axpy, "axpy").await);
        assert_eq!((declared_count, compiled), (3, 4));
        let said = "parameter 3 is not declared, compiled 8 bytes at offset 24";
        assert!(text.contains("`axpy`") && text.contains(said), "{text}");

        type OneTooMany = (f32, In<f32>, InOut<f32>, u64, u32);
        let (declared_count, compiled, text) =
            differs(declared::<OneTooMany>(&device, axpy, "axpy").await);
        assert_eq!((declared_count, compiled), (5, 4));
        assert!(text.contains("declared 4 bytes at offset 32, not compiled"), "{text}");

        type AnotherSize = (f32, In<f32>, InOut<f32>, u32);
        let (.., text) = differs(declared::<AnotherSize>(&device, axpy, "axpy").await);
        let said = "declared 4 bytes at offset 24, compiled 8 bytes at offset 24";
        assert!(text.contains(said), "{text}");

        // As many bytes in all, and in another order.
        type AnotherOrder = (In<f32>, f32, InOut<f32>, u64);
        let (.., text) = differs(declared::<AnotherOrder>(&device, axpy, "axpy").await);
        assert!(text.contains("parameter 0"), "{text}");

        let empty = include_str!("../../kernels/empty.ptx");
        declared::<()>(&device, empty, "empty").await.unwrap();
        assert_eq!(differs(declared::<(u8,)>(&device, empty, "empty").await).1, 0);
        let gate = include_str!("../../kernels/gate.ptx");
        declared::<(Flag, u64)>(&device, gate, "gate").await.unwrap();
    });
}

#[test]
fn structs_by_value_count_with_their_alignment() {
    #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C, align(16))]
    struct Aligned([f32; 4]);

    const PTX: &str = ".visible .entry aligned(\n.param .u8 a,\n.param .align 16 .b8 b[16],\n\
                       .param .align 4 .b8 c[12],\n.param .align 2 .b8 d[2],\n.param .u64 e\n)";
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        type Right = (u8, Value<Aligned>, Value<[f32; 3]>, half::f16, Out<u8>);
        declared::<Right>(&device, PTX, "aligned").await.unwrap();
        // As large, and less aligned: it would begin at byte 4.
        type Unaligned = (u8, Value<[f32; 4]>, Value<[f32; 3]>, half::f16, Out<u8>);
        let (.., text) = differs(declared::<Unaligned>(&device, PTX, "aligned").await);
        let said = "parameter 1 is declared 16 bytes at offset 4, compiled 16 bytes at offset 16";
        assert!(text.contains(said), "{text}");
    });
}

#[test]
fn a_declared_struct_is_checked_at_load() {
    use gpu_await::bytemuck::{Pod, Zeroable};

    #[derive(Clone, Copy, Debug, Pod, Zeroable)]
    #[bytemuck(crate = "gpu_await::bytemuck")]
    #[repr(C)]
    struct Line {
        slope: f64,
        len: u64,
    }
    #[derive(Clone, Copy, Debug, Pod, Zeroable)]
    #[bytemuck(crate = "gpu_await::bytemuck")]
    #[repr(C)]
    struct Unaligned {
        slope: [f32; 2],
        len: [u32; 2],
    }
    const PTX: &str = ".version 7.0\n.target sm_60\n.address_size 64\n.visible .entry line(\n.param .u32 n,\n\
                       .param .align 8 .b8 line[16]\n)";
    gpu_await::kernel! { unsafe fn right(n: u32, line: Line); ptx = PTX; entry = "line"; }
    gpu_await::kernel! { unsafe fn too_large(n: u32, line: [Line; 2]); entry = "line"; ptx = PTX; }
    gpu_await::kernel! { unsafe fn unaligned(n: u32, line: Unaligned); entry = "line"; ptx = PTX; }
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let right = soon(right::load(&device)).await.unwrap();
        let line = Line { slope: 1.0, len: 3 };
        right.launch(&device.stream().unwrap(), LaunchConfig::new(1, 1), 1, line).queued().unwrap();
        for (error, said) in [
            (soon(too_large::load(&device)).await.map(drop), "declared 32 bytes at offset 8"),
            (soon(unaligned::load(&device)).await.map(drop), "declared 16 bytes at offset 4"),
        ] {
            let text = error.unwrap_err().to_string();
            assert!(
                text.contains(said) && text.contains("compiled 16 bytes at offset 8"),
                "{text}"
            );
        }
    });
}

/// As many as a declaration has: launched alone, and as a node that is compiled and set.
#[test]
fn sixteen_parameters_reach_the_driver() {
    gpu_await::kernel! {
        unsafe fn sixteen(
            a: u32, b: u32, c: u32, d: u32, e: u32, f: u32, g: u32, h: u32,
            i: u32, j: u32, k: u32, l: u32, m: u32, n: u32, o: u32, p: u32,
        );
        launch = LaunchConfig::new(1, 1);
        ptx = PTX;
    }
    const PTX: &str = ".version 7.0\n.target sm_60\n.address_size 64\n.visible .entry sixteen(\n\
                       .param .u32 a,\n.param .u32 b,\n.param .u32 c,\n.param .u32 d,\n\
                       .param .u32 e,\n.param .u32 f,\n.param .u32 g,\n.param .u32 h,\n\
                       .param .u32 i,\n.param .u32 j,\n.param .u32 k,\n.param .u32 l,\n\
                       .param .u32 m,\n.param .u32 n,\n.param .u32 o,\n.param .u32 p\n)";
    async_under_the_stand_in(async |_driver| {
        let device = device_with(Completion::Adaptive);
        let (stream, sixteen) = (device.stream().unwrap(), sixteen::load(&device));
        let sixteen = soon(sixteen).await.unwrap();
        let mut region = gpu_await::Region::new();
        for last in 0..5 {
            let run = stream.replay(&mut region, |q| {
                sixteen.launch(q, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, last)
            });
            soon(run).await.unwrap();
        }
        assert_eq!(region.report().nodes_set, 2, "{:?}", region.report());
    });
}

#[test]
fn a_wrong_declaration_does_not_load() {
    gpu_await::kernel! {
        /// One parameter is missing.
        unsafe fn forgetful(a: f32, x: &mut [f32]);
        launch = LaunchConfig::for_elements(x.len());
        ptx = include_str!("../../kernels/scale.ptx");
        entry = "scale";
    }
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let error = soon(forgetful::load(&device)).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongParameters { .. }), "{error}");
        assert!(forgetful::load_blocking(&device).is_err());
        // A driver before 12.4 does not tell.
        driver.fail("cuFuncGetParamInfo", 1, 801);
        soon(forgetful::load(&device)).await.unwrap();
    });
}

#[test]
fn parameters_are_asked_for_at_load_alone() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let asked = || driver.names().iter().filter(|name| *name == "cuFuncGetParamInfo").count();
        driver.clear();
        let scale = gpu_await::kernels::scale::load_blocking(&device).unwrap();
        assert_eq!(asked(), 4, "three, and where they end");
        let calls = driver.calls();
        let questions = calls.iter().filter(|line| Line(line).name() == "cuFuncGetParamInfo");
        assert!(questions.into_iter().all(|line| Line(line).has("relaxed")), "{calls:#?}");
        let stream = device.stream().unwrap();
        let mut x = stream.full(8, 1.0f32).queued().unwrap();
        driver.clear();
        soon(scale.launch(&stream, 2.0, &mut x)).await.unwrap();
        assert_eq!(asked(), 0);
    });
}

/// Each load waits for all that runs on the GPU: five kernels of one file wait once. The module stays for the last of them.
#[test]
fn kernels_of_one_text_share_its_module() {
    const PTX: &str = ".version 7.0\n.target sm_60\n.address_size 64\n.visible .entry one(\n.param .u32 n\n)\n\
                       .visible .entry two(\n.param .u32 n\n)\n";
    const OTHER: &str =
        ".version 7.1\n.target sm_60\n.address_size 64\n.visible .entry one(\n.param .u32 n\n)\n";
    gpu_await::kernel! { unsafe fn one(n: u32); ptx = PTX; }
    gpu_await::kernel! { unsafe fn two(n: u32); ptx = PTX.to_owned(); }
    gpu_await::kernel! { unsafe fn three(n: u32); ptx = PTX; }
    gpu_await::kernel! { unsafe fn other(n: u32); ptx = OTHER; entry = "one"; }
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        soon(device.done()).await.unwrap();
        driver.clear();
        let count = |call: &str| driver.names().iter().filter(|name| *name == call).count();
        // At once: one loads, and the others wait for it.
        let loads = soon(async { futures::join!(one::load(&device), two::load(&device)) });
        let (one_, two_) = loads.await;
        let (one_, two_) = (one_.unwrap(), two_.unwrap());
        // Beside these: alone, and first, it would load the text and unload it.
        match *soon(three::load(&device)).await.unwrap_err().detail() {
            ErrorDetail::NoSuchKernel { ref image, ref there, .. } => {
                assert_eq!((image.as_str(), there.len()), ("three", 2));
            }
            ref detail => panic!("{detail}"),
        }
        assert_eq!(count("cuLibraryLoadData"), 1);
        let other = soon(other::load(&device)).await.unwrap();
        assert_eq!(count("cuLibraryLoadData"), 2);
        two_.launch(&stream, LaunchConfig::new(1, 1), 1).queued().unwrap();
        drop((two_, other));
        eventually("the other is unloaded", || count("cuLibraryUnload") == 1);
        one_.launch(&stream, LaunchConfig::new(1, 1), 1).queued().unwrap();
        let again = soon(two::load(&device)).await.unwrap();
        assert_eq!(count("cuLibraryLoadData"), 2);
        drop((one_, again));
        eventually("both are unloaded", || count("cuLibraryUnload") == 2);
        soon(two::load(&device)).await.unwrap();
        assert_eq!(count("cuLibraryLoadData"), 3);
    });
}
