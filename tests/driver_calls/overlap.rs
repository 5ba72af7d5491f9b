//! Which launches the driver may start while the launch in front of them still ends, and which edges of graphs are programmatic.

use gpu_await::{
    Completion, Device, DeviceBuffer, DeviceBuilder, Error, ErrorDetail, ImageProblem,
    LaunchConfig, NotProgrammatic, Op, Overlap, Region, Stream, Uses, kernel, kernels,
};
use gpu_await_algorithms::{Algorithms, transform};

use stand_in_cuda::{assert_child_without, is_child};

use super::{
    Line, StandIn, async_under_the_stand_in, device_with, eventually, my_calls, my_names, soon,
};

const LEN: usize = 100;
/// Older drivers have no programmatic edges.
const EDGES: &str = "cuGraphAddDependencies_v2";

struct Formulas {
    device: Device,
    stream: Stream,
    x: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
}

impl Formulas {
    /// With a formula that was launched before.
    async fn new() -> Formulas {
        Formulas::on(Device::builder().overlap(Overlap::LaunchesAndEdges)).await
    }

    async fn on(builder: DeviceBuilder) -> Formulas {
        let device = builder.completion(Completion::Adaptive).spare_bytes_per_stream(0);
        let device = device.cuda(0).expect("the stand-in has a device");
        eventually("the first slab", || device.stats().pinned_bytes > 0);
        let stream = device.stream().unwrap();
        let x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
        let y = soon(stream.full(LEN, 2.0f32)).await.unwrap();
        let mut formulas = Formulas { device, stream, x, y };
        formulas.step().queued().unwrap();
        formulas
    }

    fn step(&mut self) -> Op<()> {
        self.stream.transform_in_place(transform!(|x| x + 1.0), (), &mut self.y)
    }

    /// Whether each of a few launches may overlap with what is in front of it.
    fn overlap(&mut self, driver: &StandIn, count: usize) -> Vec<bool> {
        driver.clear();
        (0..count).for_each(|_| self.step().queued().unwrap());
        overlapping(driver)
    }
}

fn overlapping(driver: &StandIn) -> Vec<bool> {
    let launches = my_calls(driver).into_iter();
    let launches = launches.filter(|line| Line(line).name().starts_with("cuLaunchKernel"));
    launches.map(|line| line.contains(" programmatic")).collect()
}

/// Something of another library, as far as this crate knows.
fn put_theirs(stream: &Stream) {
    // SAFETY: nothing is put on the stream.
    let op = unsafe { stream.enqueue(Uses::new("theirs"), |_, ()| Ok::<_, Error>(())) };
    op.queued().unwrap();
}

/// The fates of a replayed chain's two edges in its first launch as a graph (programmatic, or refused), and the calls that added such edges.
async fn replayed(driver: &StandIn, is_refused: bool) -> (u64, u64, usize) {
    replayed_on(Formulas::new().await, driver, is_refused).await
}

async fn replayed_on(
    mut formulas: Formulas,
    driver: &StandIn,
    is_refused: bool,
) -> (u64, u64, usize) {
    let Formulas { device, stream, y, .. } = &mut formulas;
    let mut region = Region::new();
    let mut replay = || {
        stream.replay(&mut region, |q| {
            (0..3).try_for_each(|_| q.transform_in_place(transform!(|x| x + 1.0), (), &mut *y))
        })
    };
    for _ in 0..2 {
        soon(replay()).await.unwrap();
    }
    if is_refused {
        driver.fail(EDGES, 1, 1);
    }
    driver.clear();
    let before = device.stats().overlaps;
    soon(replay()).await.unwrap();
    let after = device.stats().overlaps;
    assert_eq!(region.report().compiled, 1, "{:?}", region.last_run());
    let calls = driver.names().iter().filter(|call| *call == EDGES).count();
    (after.allowed - before.allowed, after.refused - before.refused, calls)
}

/// What a list puts in front of its launches is between them and the launch in front of the list.
#[test]
fn behind_what_a_list_puts_in_front() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let early = soon(early::load(&device)).await.unwrap();
        let (mut y, data) = (soon(stream.zeros::<f32>(LEN)).await.unwrap(), [1.0; LEN]);
        early.launch(&stream, &mut y).queued().unwrap();
        driver.clear();
        let mut region = Region::new();
        let list = stream.replay(&mut region, |q| {
            early.launch(q, &mut y)?;
            let mut fresh = q.upload_from(&data)?;
            early.launch(q, &mut fresh)
        });
        list.queued().unwrap();
        let calls = my_names(driver);
        let first = |name: &str| calls.iter().position(|call| call.starts_with(name)).unwrap();
        assert!(first("cuMemcpyHtoDAsync") < first("cuLaunchKernel"), "{calls:?}");
        assert_eq!(overlapping(driver), [false, true]);
        early.launch(&stream, &mut y).queued().unwrap();
        assert_eq!(overlapping(driver), [false, true, true]);
    });
}

/// Directly behind anything but a launch of ours the driver is told nothing, and a launch behind that one may overlap again.
#[test]
fn behind_launches_alone() {
    async_under_the_stand_in(async |driver| {
        let mut formulas = Formulas::new().await;
        let (device, stream) = (formulas.device.clone(), formulas.stream.clone());
        let other = device.stream().unwrap();
        let empty = soon(kernels::empty::load(&device)).await.unwrap();
        assert_eq!(formulas.overlap(driver, 3), [true; 3]);
        let before = device.stats().overlaps;
        put_theirs(&stream);
        assert_eq!(formulas.overlap(driver, 3), [false, true, true]);
        // Memory from the stream's cache is nothing on the stream.
        drop(stream.empty::<f32>(LEN).queued().unwrap());
        assert_eq!(formulas.overlap(driver, 2), [true, true]);
        put_theirs(&stream);
        drop(stream.empty::<f32>(LEN).queued().unwrap());
        drop(stream.empty::<f32>(LEN).queued().unwrap());
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        // A launch that does not wait first is behind everything.
        put_theirs(&stream);
        empty.launch(&stream).queued().unwrap();
        assert_eq!(formulas.overlap(driver, 1), [true]);
        stream.copy(&formulas.x, &mut formulas.y).queued().unwrap();
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        stream.host_fn(|| ()).queued().unwrap();
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        let recorded = stream.record().unwrap();
        assert_eq!(formulas.overlap(driver, 1).len(), 1);
        drop(recorded);
        let held = driver.hold();
        other.fill(&mut formulas.x, 3.0).queued().unwrap();
        stream.wait(&other).queued().unwrap();
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        drop(held);
        let after = device.stats().overlaps;
        assert!(after.allowed > before.allowed);
        assert!(after.behind_other_work >= before.behind_other_work + 5, "{after:?}");
        soon(stream.done()).await.unwrap();
    });
}

/// While others have the handle, and directly behind their work.
#[test]
fn never_beside_others() {
    async_under_the_stand_in(async |driver| {
        let mut formulas = Formulas::new().await;
        let stream = formulas.stream.clone();
        // SAFETY: nobody captures the stream, and the handle is not kept.
        let loan = unsafe { stream.lend_raw() };
        assert_eq!(formulas.overlap(driver, 2), [false, false]);
        drop(loan);
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        assert_eq!(formulas.device.stats().overlaps.on_shared_streams, 2);
        // SAFETY: as above.
        let _handle = unsafe { stream.as_raw() };
        assert_eq!(formulas.overlap(driver, 2), [false, false]);
        soon(stream.done()).await.unwrap();
    });
}

/// What is in front of a refused launch is in front of the next one.
#[test]
fn behind_a_refused_launch() {
    async_under_the_stand_in(async |driver| {
        let mut formulas = Formulas::new().await;
        let (device, stream) = (formulas.device.clone(), formulas.stream.clone());
        let empty = soon(kernels::empty::load(&device)).await.unwrap();
        soon(empty.launch(&stream)).await.unwrap();
        put_theirs(&stream);
        driver.fail("cuLaunchKernel", 1, 1);
        empty.launch(&stream).queued().unwrap_err();
        assert_eq!(formulas.overlap(driver, 2), [false, true]);
        put_theirs(&stream);
        driver.fail("cuLaunchKernel", 1, 1);
        formulas.step().queued().unwrap_err();
        driver.clear();
        // What the refused one writes has failed with it.
        let Formulas { x, y, .. } = &mut formulas;
        stream.transform(transform!(|x| x + 1.0), (&*x,), y).queued().unwrap();
        assert_eq!(overlapping(driver), [false]);
        assert_eq!(formulas.overlap(driver, 1), [true]);
        soon(stream.done()).await.unwrap();
    });
}

/// A kernel of the user's that waits first; one with a guard in front of the wait is refused.
#[test]
fn declared_kernels() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let (mut y, early) = (stream.zeros(LEN).queued().unwrap(), early::load_blocking(&device));
        let early = early.unwrap();
        early.launch(&stream, &mut y).queued().unwrap();
        driver.clear();
        (0..2).for_each(|_| early.launch(&stream, &mut y).queued().unwrap());
        assert_eq!(overlapping(driver), [true, true]);
        let error = guarded::load_blocking(&device).unwrap_err();
        let ErrorDetail::NotProgrammatic { declaration, kernel, reason } = error.detail() else {
            panic!("{error}")
        };
        assert_eq!((&**declaration, &**kernel), ("driver_calls::overlap::guarded", "guarded"));
        assert!(matches!(reason, NotProgrammatic::TooEarly { .. }), "{reason}");
        soon(stream.done()).await.unwrap();
    });
}

/// A text is loaded once, whatever of it is refused; and one that the driver would not read to its end is no image.
#[test]
fn kernels_of_one_text() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        driver.clear();
        let refused = |loaded: gpu_await::Result<()>, by: &str| {
            let error = loaded.unwrap_err();
            let ErrorDetail::NotProgrammatic { kernel, reason, .. } = error.detail() else {
                panic!("{error}")
            };
            assert_eq!((&**kernel, reason), ("late", &NotProgrammatic::NoWait));
            assert!(error.to_string().contains(by), "{error}");
        };
        refused(late::load_blocking(&device).map(drop), "overlap::late");
        let loads = || driver.names().iter().filter(|call| *call == "cuLibraryLoadData").count();
        assert_eq!(loads(), 0);
        let _first = first::load_blocking(&device).unwrap();
        let _second = first::load_blocking(&device).unwrap();
        refused(late::load_blocking(&device).map(drop), "overlap::late");
        assert_eq!(loads(), 1);
        let error = cut::load_blocking(&device).unwrap_err();
        let ErrorDetail::BadImage { problem, .. } = error.detail() else { panic!("{error}") };
        assert!(matches!(problem, ImageProblem::NotText { byte: 0, .. }), "{error}");
        assert_eq!(loads(), 1);
    });
}

const BOTH: &str = ".version 8.0\n.target sm_90\n.address_size 64\n\
    .visible .entry first(.param .u64 y, .param .u64 n)\n{ griddepcontrol.wait; ret; }\n\
    .visible .entry late(.param .u64 y, .param .u64 n)\n{ ret; }\n";

kernel! {
    unsafe fn first(y: &mut [f32], n: u64 = y.len());
    launch = LaunchConfig::for_elements(y.len());
    ptx = BOTH;
    programmatic = true;
}

kernel! {
    unsafe fn late(y: &mut [f32], n: u64 = y.len());
    launch = LaunchConfig::for_elements(y.len());
    ptx = BOTH;
    programmatic = true;
}

kernel! {
    unsafe fn cut(y: &mut [f32], n: u64 = y.len());
    launch = LaunchConfig::for_elements(y.len());
    ptx = ".version 8.0\n.target sm_90\n.visible .entry cut(.param .u64 y, .param .u64 n)\n{ griddepcontrol.wait; \0 ret; }";
    programmatic = true;
}

kernel! {
    /// Does nothing, behind what is in front of it.
    pub(super) unsafe fn early(y: &mut [f32], n: u64 = y.len());
    programmatic = true;
    launch = LaunchConfig::for_elements(y.len());
    ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry early(.param .u64 y, .param .u64 n)\n{
        griddepcontrol.wait; ret; }";
}

kernel! {
    /// Leaves without waiting.
    unsafe fn guarded(y: &mut [f32], n: u64 = y.len());
    launch = LaunchConfig::for_elements(y.len());
    ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry guarded(.param .u64 y, .param .u64 n)\n{
        .reg .pred %p1; @%p1 ret; griddepcontrol.wait; ret; }";
    programmatic = true;
}

/// A replayed chain of formulas has a programmatic edge between any two, a fork has none where two lists meet.
#[test]
fn edges_of_a_chain() {
    async_under_the_stand_in(async |driver| {
        let mut formulas = Formulas::new().await;
        let Formulas { device, stream, x, y } = &mut formulas;
        let mut z = soon(stream.full(LEN, 2.0f32)).await.unwrap();
        let mut region = Region::new();
        let mut replay = |region: &mut Region| {
            stream.replay(region, |q| {
                for _ in 0..4 {
                    q.transform_in_place(transform!(|x| x + 1.0), (), &mut *y)?;
                }
                q.transform_in_place(transform!(|x| x + 1.0), (), &mut z)?;
                q.transform_in_place(transform!(|y, x, z| x + y + z), (&*x, &z), &mut *y)
            })
        };
        for _ in 0..2 {
            soon(replay(&mut region)).await.unwrap();
        }
        driver.clear();
        let before = device.stats().overlaps;
        for _ in 0..3 {
            soon(replay(&mut region)).await.unwrap();
        }
        assert_eq!(region.report().refused, 0, "{:?}", region.last_run());
        let dot = region.dot();
        assert_eq!((dot.matches("dashed").count(), dot.matches(" -> ").count()), (3, 5), "{dot}");
        let after = device.stats().overlaps;
        let replayed = region.report().replayed + region.report().compiled;
        assert!(after.allowed > before.allowed && after.behind_several > before.behind_several);
        assert!(replayed > 0 && driver.misuse().is_empty());
    });
}

/// Where the driver refuses programmatic edges, or is older, all are full, and nothing fails.
#[test]
fn full_edges_where_refused() {
    async_under_the_stand_in(async |driver| {
        let (programmatic, refused, calls) = replayed(driver, true).await;
        assert_eq!((programmatic, refused, calls), (0, 2, 1));
        let (programmatic, refused, calls) = replayed(driver, false).await;
        assert_eq!((programmatic, refused, calls), (2, 0, 2));
    });
}

/// Who asks for nothing has them full, and none is counted as allowed or refused.
#[test]
fn full_edges_by_default() {
    async_under_the_stand_in(async |driver| {
        let formulas = Formulas::on(Device::builder()).await;
        assert_eq!(replayed_on(formulas, driver, false).await, (0, 0, 0));
    });
}

#[test]
fn full_edges_on_older_drivers() {
    if !is_child() {
        return assert_child_without(&[EDGES], "overlap::full_edges_on_older_drivers", &[]);
    }
    async_under_the_stand_in(async |driver| {
        assert_eq!(replayed(driver, false).await, (0, 2, 0));
    });
}
