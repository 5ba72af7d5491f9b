//! Partitions as the driver sees them: what is split and made, where work runs, and what goes when.
//!
//! The stand-in writes down on which multiprocessors each kernel and fill runs ([`StandIn::places`]). It has 132: 15 groups of 8, and 12 in no
//! group.

use std::collections::BTreeSet;
use std::ffi::{CString, c_char, c_int, c_void};

use gpu_await::{
    Completion, Copy2d, Device, DeviceBuffer, ErrorDetail, ErrorKind, Graph, InOut, LaunchConfig,
    LaunchLimit, Partition, Region, Stream, Uses, kernels,
};
use gpu_await_algorithms::{Algorithms, ReduceOp, transform};
use stand_in_cuda::assert_child_without;

use super::{
    Line, Live, MODES, StandIn, async_under_the_stand_in, axpy, device_with, eventually, is_child,
    kernel_from, runtime, soon, test_of,
};
use crate::given_up::taken_again;

const LEN: usize = 1000;

async fn reserve(device: &Device, multiprocessors: u32) -> Partition {
    soon(device.reserve_partition(multiprocessors)).await.unwrap()
}

/// The calls of a name since the last clear.
fn calls_of(driver: &StandIn, name: &str) -> Vec<String> {
    driver.calls().into_iter().filter(|line| Line(line).name() == name).collect()
}

fn on(line: &str) -> &str {
    Line(line).value("on").expect("where")
}

/// Where what was put on streams since the last clear runs.
fn places(driver: &StandIn) -> BTreeSet<String> {
    driver.places().iter().map(|line| on(line).to_owned()).collect()
}

/// Something ran, and all of it there.
fn assert_inside(driver: &StandIn, inside: &str, what: &str) {
    let places = driver.places();
    assert!(!places.is_empty(), "{what}: nothing ran");
    assert!(places.iter().all(|line| on(line) == inside), "{what}: {places:?}");
    driver.clear();
}

type LaunchKernel = unsafe extern "C" fn(
    usize,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u64,
    *const *const c_void,
    *const *const c_void,
) -> c_int;

/// A kernel without parameters, loaded and launched as another library does.
struct Theirs<'d> {
    driver: &'d StandIn,
    module: usize,
    launch: TheirLaunch,
}

#[derive(Clone, Copy)]
struct TheirLaunch {
    function: usize,
    launch: LaunchKernel,
}

impl<'d> Theirs<'d> {
    fn load(driver: &'d StandIn) -> Self {
        type Find = extern "C" fn(*mut usize, usize, *const c_char) -> c_int;
        let text = CString::new(include_str!("../../kernels/empty.ptx")).unwrap();
        // SAFETY: the driver's function of this name has this type.
        let launch = unsafe { driver.function::<LaunchKernel>(b"cuLaunchKernel\0") };
        // SAFETY: likewise.
        let load = unsafe {
            driver.function::<extern "C" fn(*mut usize, *const c_char) -> c_int>(
                b"cuModuleLoadData\0",
            )
        };
        // SAFETY: likewise.
        let find = unsafe { driver.function::<Find>(b"cuModuleGetFunction\0") };
        let (mut module, mut function) = (0, 0);
        with_context(driver, || {
            assert_eq!(load(&raw mut module, text.as_ptr()), 0);
            assert_eq!(find(&raw mut function, module, c"empty".as_ptr()), 0);
        });
        Theirs { driver, module, launch: TheirLaunch { function, launch } }
    }
}

impl Drop for Theirs<'_> {
    fn drop(&mut self) {
        // SAFETY: the driver's function of this name has this type.
        let unload =
            unsafe { self.driver.function::<extern "C" fn(usize) -> c_int>(b"cuModuleUnload\0") };
        with_context(self.driver, || assert_eq!(unload(self.module), 0));
    }
}

impl TheirLaunch {
    fn on(self, stream: u64) -> Result<(), gpu_await::Error> {
        let none = std::ptr::null();
        // SAFETY: the kernel takes nothing, and its module is loaded.
        let code = unsafe { (self.launch)(self.function, 1, 1, 1, 1, 1, 1, 0, stream, none, none) };
        assert_eq!(code, 0);
        Ok(())
    }
}

/// Calls something with device 0's primary context current.
fn with_context(driver: &StandIn, calls: impl FnOnce()) {
    type Retain = extern "C" fn(*mut usize, c_int) -> c_int;
    // SAFETY: the driver's function of this name has this type.
    let retain = unsafe { driver.function::<Retain>(b"cuDevicePrimaryCtxRetain\0") };
    // SAFETY: likewise.
    let push =
        unsafe { driver.function::<extern "C" fn(usize) -> c_int>(b"cuCtxPushCurrent_v2\0") };
    // SAFETY: likewise.
    let pop =
        unsafe { driver.function::<extern "C" fn(*mut usize) -> c_int>(b"cuCtxPopCurrent_v2\0") };
    // SAFETY: likewise.
    let release = unsafe {
        driver.function::<extern "C" fn(c_int) -> c_int>(b"cuDevicePrimaryCtxRelease_v2\0")
    };
    let mut context = 0;
    assert_eq!((retain(&raw mut context, 0), push(context)), (0, 0));
    calls();
    assert_eq!((pop(&raw mut context), release(0)), (0, 0));
}

/// `x = a (a x)`, with work between that is captured.
async fn with_captured_work(device: &Device, theirs: &Theirs<'_>) -> Graph<(InOut<f32>, f32)> {
    let scale = soon(kernels::scale::load(device)).await.unwrap();
    let state = (scale, theirs.launch);
    device.graph::<(InOut<f32>, f32), _, _>(state, |q, (scale, launch), (mut x, a)| {
        scale.launch(q, a, &mut x)?;
        let (launch, uses) = (*launch, Uses::new("theirs").updates(&mut x).can_be_captured());
        // SAFETY: it puts a launch on the stream that uses nothing.
        unsafe { q.enqueue(uses, move |raw, _| launch.on(raw.stream())) }?;
        q.fill(&mut x, 1.0)?;
        scale.launch(q, a, &mut x)
    })
}

/// One split for the device's life, whose groups are joined; each set is another part of the device.
#[test]
fn the_device_is_split_once() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        assert_eq!(calls_of(driver, "cuDeviceGetDevResource"), [""; 0], "not before it is needed");
        let asked = [8, 16, 17, 12, 68];
        let mut shares = Vec::new();
        for multiprocessors in asked {
            shares.push(reserve(&device, multiprocessors).await);
        }
        let has: Vec<_> = shares.iter().map(Partition::multiprocessors).collect();
        assert_eq!(has, [8, 16, 24, 16, 68]);
        let splits = calls_of(driver, "cuDevSmResourceSplitByCount");
        assert_eq!(splits.len(), 2, "how many there are, and the groups: {splits:?}");
        let made = calls_of(driver, "cuGreenCtxCreate");
        let sets: Vec<&str> = made.iter().map(|line| on(line)).collect();
        assert_eq!(sets, ["0-7", "8-23", "24-47", "48-63", "64-131"]);
        let described = calls_of(driver, "cuDevResourceGenerateDesc");
        assert!(described.last().unwrap().contains("resources=8"), "7 groups and the rest");
    });
}

/// However often some join and leave, the driver makes a context for a set once: it keeps the memory of each.
#[test]
fn sets_are_made_once() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let mut random = super::Random(7);
        let mut known = 0;
        // Of one size there are as many sets as fit beside each other.
        for (asked, joins, most) in [(&[16][..], 20_000, 8), (&[8, 16, 32], 2_000, usize::MAX)] {
            let mut shares: Vec<Partition> = Vec::new();
            for _ in 0..joins {
                while shares.len() > 6 {
                    shares.swap_remove(random.below(shares.len()));
                }
                let asked = asked[random.below(asked.len())];
                shares.extend(device.reserve_partition(asked).await);
            }
            let made = calls_of(driver, "cuGreenCtxCreate");
            let sets: BTreeSet<&str> = made.iter().map(|line| on(line)).collect();
            assert_eq!(made.len(), sets.len(), "one for each set");
            assert_eq!(driver.live("green") as usize, made.len(), "kept");
            assert!(made.len() - known <= most, "{sets:?}");
            known = made.len();
        }
        assert_eq!(calls_of(driver, "cuGreenCtxDestroy"), [""; 0]);
    });
}

/// Everything that runs a kernel, on one stream of a partition.
async fn everything(driver: &StandIn, device: &Device, stream: &Stream, inside: &str) {
    let scale = soon(kernels::scale::load(device)).await.unwrap();
    let axpy = axpy(device).await;
    let theirs = Theirs::load(driver);
    let graph = with_captured_work(device, &theirs).await;
    let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
    let mut y = soon(stream.full(LEN, 2.0f32)).await.unwrap();
    driver.clear();
    axpy.launch(stream, 2.0, &x, &mut y).queued().unwrap();
    assert_inside(driver, inside, "a launch");
    let batch = stream.batch(|q| {
        scale.launch(q, 2.0, &mut y)?;
        q.fill(&mut x, 3.0)
    });
    batch.queued().unwrap();
    assert_inside(driver, inside, "a batch");
    let mut region = Region::new();
    for _ in 0..4 {
        let replayed = stream.replay(&mut region, |q| {
            scale.launch(q, 2.0, &mut y)?;
            q.fill(&mut x, 3.0)?;
            q.copy(&x, &mut y)?;
            q.copy_2d(&x, &mut y, Copy2d::new(10, 10).source_pitch(50))?;
            scale.launch(q, 2.0, &mut y)
        });
        replayed.queued().unwrap();
        assert_inside(driver, inside, "a replay");
    }
    for a in [2.0, 2.0, 3.0] {
        graph.launch(stream, (&mut y, a)).queued().unwrap();
        assert_inside(driver, inside, "a graph");
    }
    let mut out = soon(stream.zeros::<f32>(LEN)).await.unwrap();
    driver.clear();
    stream.inclusive_scan(&x, ReduceOp::Sum, &mut out).queued().unwrap();
    assert_inside(driver, inside, "a scan");
    let mut keys = soon(stream.full(100_000, 1u32)).await.unwrap();
    driver.clear();
    stream.sort(&mut keys).queued().unwrap();
    assert_inside(driver, inside, "a sort");
    stream.transform_in_place(transform!(|x| x + 1.0), (), &mut x).queued().unwrap();
    assert_inside(driver, inside, "a formula");
    stream.fill(&mut keys, 7).queued().unwrap();
    assert_inside(driver, inside, "a fill");
    let wide: DeviceBuffer<[u32; 3]> = soon(stream.full(LEN, [1, 2, 3])).await.unwrap();
    assert_inside(driver, inside, "a fill of a wide pattern");
    drop(wide);
    soon(stream.done()).await.unwrap();
}

/// Whatever puts work on a stream of a partition, and however: it runs there. No green context is made current.
#[test]
fn all_work_stays_inside() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let beside = reserve(&device, 8).await;
            let partition = reserve(&device, 16).await;
            let made = calls_of(driver, "cuGreenCtxCreate");
            let inside = on(made.last().unwrap()).to_owned();
            let stream = partition.stream().unwrap();
            everything(driver, &device, &stream, &inside).await;
            drop((beside, stream, partition));
        }
    });
}

/// The device's own partition has every stream that names no other, the crate's own too.
#[test]
fn a_device_in_a_partition() {
    async_under_the_stand_in(async |driver| {
        let device = Device::builder().partition(16).cuda(0).unwrap();
        eventually("the first slab", || device.stats().pinned_bytes > 0);
        let created =
            driver.names().iter().filter(|name| *name == "cuStreamCreateWithPriority").count();
        let (stream, thread) = (device.stream().unwrap(), device.thread_stream().unwrap());
        assert_eq!(created, 0, "no stream outside");
        everything(driver, &device, &stream, "0-15").await;
        everything(driver, &device, &thread, "0-15").await;
        everything(driver, &device, device.default_stream(), "0-15").await;
        assert_eq!(device.stats().streams_outside_partitions, 0);
        // Others are beside it.
        let other = reserve(&device, 16).await.stream().unwrap();
        everything(driver, &device, &other, "16-31").await;
    });
}

#[test]
fn no_green_context_is_current() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = reserve(&device, 16).await.stream().unwrap();
        let mut seen = Vec::new();
        let theirs = Theirs::load(driver);
        let graph = with_captured_work(&device, &theirs).await;
        let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
        for a in [1.0, 2.0] {
            graph.launch(&stream, (&mut x, a)).queued().unwrap();
        }
        soon(stream.done()).await.unwrap();
        drop((graph, x, stream, device));
        eventually("it goes", || driver.live("green") == 0);
        seen.extend(calls_of(driver, "cuCtxSetCurrent"));
        seen.extend(calls_of(driver, "cuCtxPushCurrent_v2"));
        assert!(!seen.is_empty());
        assert!(!seen.iter().any(|line| line.contains("green")), "{seen:?}");
    });
}

/// What is compiled once more for a stream elsewhere runs there.
#[test]
fn a_graph_runs_where_its_stream_is() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (left, right) = (reserve(&device, 8).await, reserve(&device, 8).await);
        let theirs = Theirs::load(driver);
        let graph = with_captured_work(&device, &theirs).await;
        let streams = [left.stream(), right.stream(), device.stream(), left.stream()];
        let mut x = soon(device.full(LEN, 1.0f32)).await.unwrap();
        for (stream, inside) in streams.into_iter().zip(["0-7", "8-15", "0-131", "0-7"]) {
            let stream = stream.unwrap();
            for a in [2.0, 2.0, 3.0] {
                driver.clear();
                soon(graph.launch(&stream, (&mut x, a))).await.unwrap();
                assert_eq!(places(driver), BTreeSet::from([inside.to_owned()]));
            }
        }
    });
}

/// Blocks that must be there at once are counted in the partition, before the driver is asked to launch them.
#[test]
fn what_is_resident_is_counted_inside() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = reserve(&device, 16).await.stream().unwrap();
        let text = include_str!("../../kernels/spin.ptx");
        let spin = kernel_from::<(u64,)>(&device, text, "spin").await;
        let cooperative = |blocks| LaunchConfig::new(blocks, 1024).cooperative();
        stream.launch(&spin, cooperative(32), (1,)).queued().unwrap();
        let refused = stream.launch(&spin, cooperative(33), (1,)).queued().unwrap_err();
        let ErrorDetail::LaunchLimit { what, asked, limit, .. } = refused.detail() else {
            panic!("{refused}")
        };
        assert_eq!((*what, *asked, *limit), (LaunchLimit::ResidentBlocks, 33, 32));
        let outside = device.stream().unwrap();
        outside.launch(&spin, cooperative(33), (1,)).queued().unwrap();
        // The driver knows of clusters, and is asked about the stream.
        let clusters = |blocks| LaunchConfig::new(blocks, 1024).cluster(2).cooperative();
        stream.launch(&spin, clusters(32), (1,)).queued().unwrap();
        let refused = stream.launch(&spin, clusters(34), (1,)).queued().unwrap_err();
        assert!(
            matches!(refused.detail(), ErrorDetail::LaunchLimit { limit: 32, .. }),
            "{refused}"
        );
        assert!(!driver.calls().iter().any(|line| line.contains("result=720")));
        soon(device.done()).await.unwrap();
    });
}

#[test]
fn none_left() {
    async_under_the_stand_in(async |_| {
        let device = device_with(Completion::Adaptive);
        let most = reserve(&device, 120).await;
        let refused = soon(device.reserve_partition(13)).await.unwrap_err();
        let ErrorDetail::NoPartition { asked, free, all, .. } = refused.detail() else {
            panic!("{refused}")
        };
        assert_eq!((*asked, *free, *all), (13, 12, 132));
        assert_eq!(refused.kind(), ErrorKind::Overloaded);
        assert_eq!(reserve(&device, 12).await.multiprocessors(), 12);
        let never = soon(device.reserve_partition(133)).await.unwrap_err();
        assert_eq!(never.kind(), ErrorKind::Unsupported);
        drop(most);
        reserve(&device, 132).await;
    });
}

/// What the driver refuses is told as it says it, nothing is left of it, and it is tried again.
#[test]
fn refusals() {
    async_under_the_stand_in(async |driver| {
        for (call, after_effect) in [
            ("cuDeviceGetDevResource", false),
            ("cuDevSmResourceSplitByCount", false),
            ("cuDevSmResourceSplitByCount", true),
            ("cuDevResourceGenerateDesc", true),
            ("cuGreenCtxCreate", false),
            ("cuCtxFromGreenCtx", false),
            ("cuCtxFromGreenCtx", true),
        ] {
            let device = device_with(Completion::Adaptive);
            match after_effect {
                true => driver.fail_after_effect(call, 1, 915),
                false => driver.fail(call, 1, 915),
            }
            let refused = soon(device.reserve_partition(16)).await.unwrap_err();
            let ErrorDetail::Driver { code, .. } = refused.detail() else { panic!("{refused}") };
            assert_eq!((code.call, code.code), (call, 915));
            assert_eq!((driver.live("green"), device.stats().partitions), (0, 0), "{call}");
            assert_eq!(reserve(&device, 132).await.multiprocessors(), 132, "{call}");
            drop(device);
            eventually("it goes", || driver.live("green") == 0);
        }
        // A device that is to be in one does not open.
        for call in ["cuGreenCtxCreate", "cuGreenCtxStreamCreate"] {
            driver.fail(call, 1, 914);
            eventually("those before go", || Live::now(driver).is_nothing());
            assert!(Device::builder().partition(8).cuda(0).is_err());
            eventually("it goes", || Live::now(driver).is_nothing());
            assert_eq!(driver.live("green"), 0, "{call}");
        }
    });
}

/// A driver that knows nothing of it says what is missing, and everything else works.
#[test]
fn an_older_driver() {
    const LATER: [&str; 5] = [
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
        "cuStreamGetCtx_v2",
    ];
    let body = async |driver: &StandIn| {
        let device = device_with(Completion::Adaptive);
        let refused = soon(device.reserve_partition(8)).await.unwrap_err();
        assert!(matches!(refused.detail(), ErrorDetail::Requires { .. }), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(Device::builder().partition(8).cuda(0).is_err());
        let stream = device.stream().unwrap();
        let x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
        assert_eq!(soon(stream.download(&x)).await.unwrap(), [1.0; LEN]);
        assert_eq!(driver.misuse(), [""; 0]);
    };
    if !is_child() {
        return assert_child_without(&LATER, test_name(&body), &[]);
    }
    runtime().block_on(body(&StandIn::open()));
}

fn test_name<F>(_: &F) -> &'static str {
    test_of::<F>()
}

/// Streams, graphs of all kinds and what is pending keep a share; it comes back behind them, and the driver's part stays.
#[test]
fn a_share_comes_back_behind_its_work() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let partition = reserve(&device, 132).await;
        let stream = partition.stream().unwrap();
        let theirs = Theirs::load(driver);
        let graph = with_captured_work(&device, &theirs).await;
        let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
        soon(graph.launch(&stream, (&mut x, 1.0))).await.unwrap();
        let held = driver.hold();
        graph.launch(&stream, (&mut x, 1.0)).abandon();
        drop((partition, stream));
        assert_eq!(device.stats().partitions, 1, "its stream's work is pending");
        drop(graph);
        assert_eq!(device.stats().partitions, 1);
        assert!(soon(device.reserve_partition(1)).await.is_err());
        drop(held);
        drop(x);
        eventually("it comes back", || device.stats().partitions == 0);
        assert_eq!(driver.live("graph"), 0, "behind its graphs");
        assert_eq!((calls_of(driver, "cuGreenCtxDestroy").len(), driver.live("green")), (0, 1));
        reserve(&device, 132).await;
        assert_eq!(driver.live("green"), 1, "used again");
    });
}

/// Who takes one waits for graphs and streams that were given up, which may end in any order.
#[test]
fn given_up_with_its_graph() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let theirs = Theirs::load(driver);
        for _ in 0..100 {
            let stream = reserve(&device, 132).await.stream().unwrap();
            let graph = with_captured_work(&device, &theirs).await;
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            let held = driver.hold();
            graph.launch(&stream, (&mut x, 1.0)).abandon();
            drop((graph, stream, x));
            let again = tokio::spawn({
                let device = device.clone();
                async move { soon(taken_again(&device, 132)).await }
            });
            tokio::task::yield_now().await;
            drop(held);
            assert_eq!(again.await.unwrap().multiprocessors(), 132);
        }
    });
}

/// A device's green contexts are destroyed when nothing is left of them: no stream, no graph.
#[test]
fn destroyed_behind_everything() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let stream = reserve(&device, 16).await.stream().unwrap();
            let other = reserve(&device, 8).await.stream().unwrap();
            let theirs = Theirs::load(driver);
            let graph = with_captured_work(&device, &theirs).await;
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            driver.clear();
            let held = driver.hold();
            graph.launch(&stream, (&mut x, 1.0)).abandon();
            graph.launch(&other, (&mut x, 2.0)).abandon();
            drop((device, stream));
            drop((graph, other, x));
            assert_eq!(driver.live("green"), 2);
            drop(held);
            eventually("they go", || driver.live("green") == 0);
            let destroyed = calls_of(driver, "cuGreenCtxDestroy");
            let all = destroyed.iter().all(|line| line.contains("streams=0 nodes=0"));
            assert!(all && destroyed.len() == 2, "{destroyed:?}");
            drop(theirs);
            eventually("all goes", || Live::now(driver).is_nothing());
        }
    });
}

#[test]
fn a_partition_of_another_device() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let (here, there) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let partition = reserve(&there, 8).await;
        let refused = here.stream_builder().partition(&partition).build().unwrap_err();
        assert!(matches!(refused.detail(), ErrorDetail::WrongDevice { .. }), "{refused}");
        assert!(refused.at().is_some());
        let stream = there.stream_builder().partition(&partition).priority(-100).build().unwrap();
        assert_eq!((stream.in_partition(), stream.priority()), (Some(partition.clone()), -5));
        let ordered = partition.stream_builder().non_blocking(false).build().unwrap_err();
        assert!(matches!(ordered.detail(), ErrorDetail::Unsupported { .. }), "{ordered}");
    });
}

/// A green context of another library, and a stream of it.
struct Foreign<'d> {
    driver: &'d StandIn,
    green: usize,
    stream: u64,
}

impl<'d> Foreign<'d> {
    /// Of the first multiprocessors.
    fn make(driver: &'d StandIn) -> Self {
        type Get = extern "C" fn(c_int, *mut [u64; 18], c_int) -> c_int;
        type Describe = extern "C" fn(*mut usize, *mut [u64; 18], u32) -> c_int;
        type Create = extern "C" fn(*mut usize, usize, c_int, u32) -> c_int;
        type Stream = extern "C" fn(*mut u64, usize, u32, c_int) -> c_int;
        type Split = extern "C" fn(
            *mut [u64; 18],
            *mut u32,
            *const [u64; 18],
            *mut [u64; 18],
            u32,
            u32,
        ) -> c_int;
        // SAFETY: the driver's function of this name has this type.
        let get = unsafe { driver.function::<Get>(b"cuDeviceGetDevResource\0") };
        // SAFETY: likewise.
        let split = unsafe { driver.function::<Split>(b"cuDevSmResourceSplitByCount\0") };
        // SAFETY: likewise.
        let describe = unsafe { driver.function::<Describe>(b"cuDevResourceGenerateDesc\0") };
        // SAFETY: likewise.
        let create = unsafe { driver.function::<Create>(b"cuGreenCtxCreate\0") };
        // SAFETY: likewise.
        let make_stream = unsafe { driver.function::<Stream>(b"cuGreenCtxStreamCreate\0") };
        let (mut all, mut group, mut count) = ([0; 18], [0; 18], 1);
        let (mut described, mut green, mut stream) = (0, 0, 0);
        with_context(driver, || {
            assert_eq!(get(0, &raw mut all, 1), 0);
            let none = std::ptr::null_mut();
            let code = split(&raw mut group, &raw mut count, &raw const all, none, 0, 8);
            assert_eq!((code, count), (0, 1));
            assert_eq!(describe(&raw mut described, &raw mut group, 1), 0);
            assert_eq!(create(&raw mut green, described, 0, 1), 0);
            assert_eq!(make_stream(&raw mut stream, green, 1, 0), 0);
        });
        Foreign { driver, green, stream }
    }

    fn destroy_context(&self) {
        // SAFETY: the driver's function of this name has this type.
        let destroy = unsafe {
            self.driver.function::<extern "C" fn(usize) -> c_int>(b"cuGreenCtxDestroy\0")
        };
        assert_eq!(destroy(self.green), 0);
    }

    fn adopted(&self, device: &Device) -> Stream {
        // SAFETY: the stream lives until the end of the process, and nobody captures it.
        unsafe { Stream::from_raw(device, self.stream, ()) }.unwrap()
    }
}

/// Taken back from another library, a stream of a partition is in it as before.
#[test]
fn an_adopted_stream_finds_its_partition() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (_beside, partition) = (reserve(&device, 8).await, reserve(&device, 16).await);
        let stream = partition.stream().unwrap();
        // SAFETY: nobody captures the stream.
        let handle = unsafe { stream.as_raw() };
        // SAFETY: the stream is kept.
        let adopted = unsafe { Stream::from_raw(&device, handle, stream.clone()) }.unwrap();
        assert_eq!(adopted.in_partition(), Some(partition.clone()));
        everything(driver, &device, &adopted, "8-23").await;
        drop((stream, partition));
        assert_eq!(device.stats().partitions, 2, "kept");
        drop(adopted);
        eventually("it comes back", || device.stats().partitions == 1);
    });
}

/// Streams of others' green contexts are accepted; what runs there stays there, and events lead both ways.
#[test]
fn a_stream_of_a_foreign_green_context() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let foreign = Foreign::make(driver);
            let (theirs, ours) = (foreign.adopted(&device), device.stream().unwrap());
            assert_eq!(theirs.in_partition(), None);
            let scale = soon(kernels::scale::load(&device)).await.unwrap();
            let graph =
                device.graph::<(InOut<f32>, f32), _, _>(scale.clone(), |q, scale, (mut x, a)| {
                    scale.launch(q, a, &mut x)?;
                    scale.launch(q, a, &mut x)
                });
            let mut x = soon(theirs.full(LEN, 1.0f32)).await.unwrap();
            driver.clear();
            let mut region = Region::new();
            for a in [2.0, 2.0, 3.0, 4.0] {
                graph.launch(&theirs, (&mut x, a)).queued().unwrap();
                assert_inside(driver, "0-7", "a graph");
                let replayed = theirs.replay(&mut region, |q| {
                    scale.launch(q, a, &mut x)?;
                    q.fill(&mut x, 3.0)?;
                    scale.launch(q, a, &mut x)
                });
                replayed.queued().unwrap();
                assert_inside(driver, "0-7", "a replay");
            }
            let held = driver.hold();
            theirs.fill(&mut x, 5.0).queued().unwrap();
            let there = ours.download(&x).submitted().unwrap();
            theirs.wait(&ours).queued().unwrap();
            drop(held);
            assert_eq!(soon(there).await.unwrap(), [5.0; LEN]);
            soon(theirs.done()).await.unwrap();
            // What is captured would run elsewhere, and so would the branches of a fork.
            assert_eq!(theirs.fork(1).unwrap_err().kind(), ErrorKind::Unsupported);
            let captured = Theirs::load(driver);
            let graph = with_captured_work(&device, &captured).await;
            driver.clear();
            let refused = soon(graph.launch(&theirs, (&mut x, 1.0))).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
            assert!(!driver.places().iter().any(|line| line.starts_with("empty")));
            assert!(device.stats().streams_outside_partitions == 0);
            drop((theirs, graph));
        }
    });
}

/// Where the owner destroys its context, what is pending on its stream and what comes after says so; the device goes on.
#[test]
fn a_foreign_context_that_goes() {
    async_under_the_stand_in(async |driver| {
        for (mode, code) in MODES.into_iter().flat_map(|mode| [(mode, 709), (mode, 917)]) {
            let device = device_with(mode);
            let foreign = Foreign::make(driver);
            let (theirs, ours) = (foreign.adopted(&device), device.stream().unwrap());
            let mut x = soon(theirs.full(LEN, 1.0f32)).await.unwrap();
            let mut y = soon(ours.full(LEN, 1.0f32)).await.unwrap();
            let detached = |error: gpu_await::Error| {
                let is_detached = matches!(
                    error.detail(),
                    ErrorDetail::StreamDetached { code: found, .. } if found.code == code
                );
                assert!(is_detached, "{mode:?}, {code}: {error}");
            };
            let held = driver.hold();
            let pending = tokio::spawn(theirs.fill(&mut x, 2.0).submitted().unwrap());
            tokio::task::yield_now().await;
            match code {
                709 => foreign.destroy_context(),
                _ => driver.fail("cuMemsetD32Async", 1, code),
            }
            detached(theirs.fill(&mut x, 3.0).queued().unwrap_err());
            detached(soon(pending).await.unwrap().unwrap_err());
            drop(held);
            // What it would have written is not known; what is elsewhere is.
            assert!(soon(ours.download(&x)).await.is_err());
            soon(ours.fill(&mut y, 4.0)).await.unwrap();
            assert_eq!(soon(ours.download(&y)).await.unwrap(), [4.0; LEN]);
            drop((theirs, x));
            // All of the device's streams, that one too if its work was not complete.
            if let Err(error) = soon(device.done()).await {
                detached(error);
            }
            soon(ours.done()).await.unwrap();
        }
    });
}

/// Counts and selections have as many blocks as their stream holds at once; reductions as many as everywhere: the number decides the order
/// in which is combined, and so the bits.
#[test]
fn grids_are_those_of_the_stream() {
    async_under_the_stand_in(async |driver| {
        const MANY: usize = 1 << 22;
        let device = device_with(Completion::Adaptive);
        let inside = reserve(&device, 8).await.stream().unwrap();
        let outside = device.stream().unwrap();
        let x = soon(outside.full(MANY, 1u32)).await.unwrap();
        let mut top = soon(outside.zeros::<u32>(100)).await.unwrap();
        let mut counts = soon(outside.zeros::<u64>(64)).await.unwrap();
        let mut sum = soon(outside.zeros::<u64>(1)).await.unwrap();
        let mut grids = |stream: &Stream, kernel: &str| {
            driver.clear();
            stream.top_k(&x, &mut top).queued().unwrap();
            stream.histogram(&x, 0..=100, &mut counts).queued().unwrap();
            stream.sum_into(&x, &mut sum).queued().unwrap();
            let launches = driver.calls().into_iter().filter(|line| line.contains(kernel));
            let blocks = |line: &String| {
                let grid = Line(line).value("grid")?;
                grid.split('x').next()?.parse::<u32>().ok()
            };
            launches.filter_map(|line| blocks(&line)).max().expect("it is launched")
        };
        for kernel in ["top_count", "top_filter", "top_last", "even_shared"] {
            let (there, here) = (grids(&outside, kernel), grids(&inside, kernel));
            assert!(here <= there.div_ceil(132) * 8 && here % 8 == 0, "{kernel}: {there}, {here}");
        }
        assert_eq!(grids(&outside, "sum_tiles"), grids(&inside, "sum_tiles"));
        soon(device.done()).await.unwrap();
    });
}
