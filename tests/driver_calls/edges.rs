//! Which edges of graphs are programmatic, what a driver that refuses them leaves, and what the switch holds back.

use std::sync::{Arc, Mutex};

use gpu_await::{
    Completion, Device, DeviceBuffer, DeviceBuilder, ErrorKind, InOut, Overlap, Overlaps, Region,
    Result, Stream, kernels,
};
use gpu_await_algorithms::{Algorithms, transform};

use stand_in_cuda::{assert_child, is_child};

use super::overlap::early;
use super::{StandIn, async_under_the_stand_in, my_calls, soon};

const ADD: &str = "cuGraphAddDependencies_v2";
const NODE: &str = "cuGraphAddKernelNode_v2";
const INSTANTIATE: &str = "cuGraphInstantiateWithFlags";
const VARIABLE: &str = "GPU_AWAIT_OVERLAP";
/// Kernels in a row.
const LEN: usize = 4;
const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;

struct Chain {
    device: Device,
    stream: Stream,
    early: early,
    y: DeviceBuffer<f32>,
    region: Region,
}

impl Chain {
    /// One that ran once.
    async fn new(builder: DeviceBuilder) -> Chain {
        let device = builder.completion(Completion::Adaptive).cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let early = soon(early::load(&device)).await.unwrap();
        let mut y = soon(stream.full(100, 1.0f32)).await.unwrap();
        soon(early.launch(&stream, &mut y)).await.unwrap();
        let mut chain = Chain { device, stream, early, y, region: Region::new() };
        chain.run().await.unwrap();
        chain
    }

    async fn with_edges() -> Chain {
        Chain::new(Device::builder().overlap(Overlap::LaunchesAndEdges)).await
    }

    async fn run(&mut self) -> Result<()> {
        let Chain { stream, early, y, region, .. } = self;
        soon(stream.replay(region, |q| (0..LEN).try_for_each(|_| early.launch(q, &mut *y)))).await
    }

    fn overlaps(&self) -> Overlaps {
        self.device.stats().overlaps
    }

    fn dashed(&self) -> usize {
        let dot = self.region.dot();
        assert_eq!(dot.matches(" -> ").count(), LEN - 1, "{dot}");
        dot.matches("dashed").count()
    }
}

/// Lines that tell of the attribute, or of programmatic edges.
fn told(driver: &StandIn) -> (usize, usize) {
    let calls = driver.calls();
    let count = |what: &str| calls.iter().filter(|line| line.contains(what)).count();
    (count(" programmatic thread"), count("programmatic=1"))
}

/// A refusal that may pass is no word about edges: the list is launched one by one, as without them, and the next run has them.
#[test]
fn refusals_that_pass() {
    async_under_the_stand_in(async |driver| {
        let calls = [("cuGraphCreate", 1, OUT_OF_MEMORY), (NODE, 2, OUT_OF_MEMORY), (NODE, 1, 1)];
        for (call, nth, code) in calls.into_iter().chain([(INSTANTIATE, 1, OUT_OF_MEMORY)]) {
            let mut chain = Chain::with_edges().await;
            driver.fail(call, nth, code);
            chain.run().await.unwrap();
            assert_eq!(driver.forgive(), 0);
            let report = chain.region.report();
            assert_eq!((report.refused, report.compiled), (1, 0), "{call} {code}");
            assert_eq!(chain.dashed(), 0, "{call} {code}");
            let before = chain.overlaps();
            chain.run().await.unwrap();
            let after = chain.overlaps();
            assert_eq!(chain.region.report().compiled, 1, "{call} {code}");
            assert_eq!(after.allowed - before.allowed, LEN as u64 - 1, "{call} {code}");
            assert_eq!((after.refused, chain.dashed()), (0, LEN - 1), "{call} {code}");
        }
    });
}

/// A graph that had no memory is compiled at a later launch.
#[test]
fn graphs_whose_refusal_passes() {
    async_under_the_stand_in(async |driver| {
        let Chain { device, stream, early, mut y, .. } = Chain::with_edges().await;
        let graph = device.graph::<(InOut<f32>,), _, _>(early, |q, early, (mut y,)| {
            (0..LEN).try_for_each(|_| early.launch(q, &mut y))
        });
        driver.fail(INSTANTIATE, 1, OUT_OF_MEMORY);
        for dashed in [0, LEN - 1] {
            soon(graph.launch(&stream, (&mut y,))).await.unwrap();
            assert_eq!(graph.dot().matches("dashed").count(), dashed, "{:?}", graph.report());
        }
        assert_eq!((graph.report().plain, graph.report().compiled), (1, 1));
    });
}

/// What the driver does not know is not asked of that graph again, and not drawn.
#[test]
fn edges_that_are_not_known() {
    async_under_the_stand_in(async |driver| {
        for (call, code) in [(ADD, 1), (ADD, 500), (ADD, 801), (INSTANTIATE, 801)] {
            let mut chain = Chain::with_edges().await;
            driver.fail(call, 1, code);
            let before = chain.overlaps();
            for _ in 0..2 {
                chain.run().await.unwrap();
            }
            let after = chain.overlaps();
            assert_eq!(after.allowed, before.allowed, "{call} {code}");
            assert_eq!(after.refused - before.refused, 2 * (LEN as u64 - 1), "{call} {code}");
            assert_eq!((chain.region.report().refused, chain.dashed()), (0, 0), "{call} {code}");
        }
    });
}

/// A code that says that the device is lost is heard, whatever could be tried after it.
#[test]
fn losses_are_not_swallowed() {
    async_under_the_stand_in(async |driver| {
        let lost = |result: Result<()>, what: &str| {
            let error = result.expect_err(what);
            assert_eq!(error.kind(), ErrorKind::DeviceLost, "{what}: {error}");
        };
        for call in [ADD, INSTANTIATE, "cuGraphCreate", NODE] {
            let mut chain = Chain::with_edges().await;
            driver.clear();
            driver.fail(call, 1, ILLEGAL_ADDRESS);
            lost(chain.run().await, call);
            let launched = driver.names().iter().any(|name| name.starts_with("cuLaunch"));
            assert!(!launched, "{call}: {:?}", driver.names());
            lost(chain.stream.full(1, 1.0f32).queued().map(drop), call);
        }
        let mut chain = Chain::with_edges().await;
        chain.run().await.unwrap();
        chain.y = chain.stream.full(100, 1.0f32).queued().unwrap();
        let set = "cuGraphExecKernelNodeSetParams_v2";
        driver.fail(set, 1, ILLEGAL_ADDRESS);
        lost(chain.run().await, set);
        for (call, launches) in [(INSTANTIATE, 1), (set, 2)] {
            let Chain { device, stream, early, mut y, .. } = Chain::with_edges().await;
            let graph = device.graph::<(InOut<f32>,), _, _>(early, |q, early, (mut y,)| {
                (0..LEN).try_for_each(|_| early.launch(q, &mut y))
            });
            driver.fail(call, 1, ILLEGAL_ADDRESS);
            for launch in 1..=launches {
                let launched = soon(graph.launch(&stream, (&mut y,))).await;
                if launch < launches {
                    launched.unwrap();
                    y = stream.full(100, 1.0f32).queued().unwrap();
                } else {
                    lost(launched, call);
                }
            }
        }
    });
}

/// A kernel's first launch ends the list in front of it, so the first run has two lists, and the later ones have one.
#[test]
fn lists_of_an_earlier_shape_are_not_drawn() {
    async_under_the_stand_in(async |_| {
        let Chain { device, stream, early, mut y, .. } = Chain::with_edges().await;
        let empty = soon(kernels::empty::load(&device)).await.unwrap();
        let mut region = Region::new();
        let mut drawn = Vec::new();
        for _ in 0..3 {
            let run = stream.replay(&mut region, |q| {
                early.launch(q, &mut y)?;
                empty.launch(q)?;
                early.launch(q, &mut y)
            });
            soon(run).await.unwrap();
            let dot = region.dot();
            drawn.push((dot.matches("subgraph").count(), dot.matches("[label").count()));
        }
        assert_eq!(drawn, [(2, 2), (1, 3), (1, 3)]);
    });
}

/// What a setting lets through: launches with the attribute, of two launches and two formulas, and programmatic edges in a graph.
async fn let_through(driver: &StandIn, builder: DeviceBuilder) -> (usize, usize, Overlaps) {
    let mut chain = Chain::new(builder).await;
    let formula = |chain: &mut Chain| {
        let Chain { stream, y, .. } = chain;
        stream.transform_in_place(transform!(|x| x + 1.0), (), y).queued().unwrap();
    };
    formula(&mut chain);
    driver.clear();
    let before = chain.overlaps();
    for _ in 0..2 {
        formula(&mut chain);
        chain.early.launch(&chain.stream, &mut chain.y).queued().unwrap();
    }
    chain.run().await.unwrap();
    assert_eq!(chain.region.report().compiled, 1);
    let (launches, edges) = told(driver);
    let (after, mut held) = (chain.overlaps(), Overlaps::default());
    held.allowed = after.allowed - before.allowed;
    held.switched_off = after.switched_off - before.switched_off;
    assert_eq!(chain.dashed(), edges);
    (launches, edges, held)
}

fn expect(found: (usize, usize, Overlaps), overlap: Overlap) {
    let in_graph = LEN - 1;
    let (launches, edges) = match overlap {
        Overlap::Off => (0, 0),
        Overlap::Launches => (4, 0),
        _ => (4, in_graph),
    };
    let (found_launches, found_edges, counted) = found;
    assert_eq!((found_launches, found_edges), (launches, edges), "{overlap:?}");
    let allowed = (launches + edges) as u64;
    let all = (4 + in_graph) as u64;
    assert_eq!((counted.allowed, counted.switched_off), (allowed, all - allowed), "{overlap:?}");
}

#[test]
fn one_switch_for_all_of_it() {
    async_under_the_stand_in(async |driver| {
        for overlap in [Overlap::Off, Overlap::Launches, Overlap::LaunchesAndEdges] {
            expect(let_through(driver, Device::builder().overlap(overlap)).await, overlap);
        }
        expect(let_through(driver, Device::builder()).await, Overlap::Launches);
    });
}

/// The environment decides where the program does not.
#[test]
fn the_variable_is_the_default() {
    const VALUES: [(&str, Overlap); 5] = [
        ("off", Overlap::Off),
        ("launches", Overlap::Launches),
        ("launches-and-edges", Overlap::LaunchesAndEdges),
        ("on", Overlap::Off),
        ("", Overlap::Off),
    ];
    if !is_child() {
        for (value, _) in VALUES {
            assert_child("edges::the_variable_is_the_default", &[(VARIABLE, value)]);
        }
        return;
    }
    async_under_the_stand_in(async |driver| {
        let value = std::env::var(VARIABLE).unwrap();
        let (_, overlap) = VALUES.iter().find(|(known, _)| *known == value).unwrap();
        expect(let_through(driver, Device::builder()).await, *overlap);
        let own = Overlap::LaunchesAndEdges;
        expect(let_through(driver, Device::builder().overlap(own)).await, own);
    });
}

#[derive(Clone, Default)]
struct Submissions(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for &Submissions {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        if ["op", "early"].contains(&field.name()) {
            self.0.lock().unwrap().push(format!("{field}={value:?}"));
        }
    }
}

impl tracing::Subscriber for Submissions {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "gpu_await::submit"
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let mut visitor = self;
        event.record(&mut visitor);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// The event of a submission says whether the launch carries the attribute.
#[test]
fn events_say_which_launches_may_be_early() {
    async_under_the_stand_in(async |driver| {
        let Chain { stream, early, mut y, .. } = Chain::with_edges().await;
        early.launch(&stream, &mut y).queued().unwrap();
        let submissions = Submissions::default();
        let guard = tracing::subscriber::set_default(submissions.clone());
        driver.clear();
        early.launch(&stream, &mut y).queued().unwrap();
        stream.host_fn(|| ()).queued().unwrap();
        early.launch(&stream, &mut y).queued().unwrap();
        drop(guard);
        let launches = my_calls(driver);
        let launches = launches.iter().filter(|line| line.starts_with("cuLaunchKernel"));
        let carried: Vec<bool> = launches.map(|line| line.contains(" programmatic")).collect();
        assert_eq!(carried, [true, false]);
        assert_eq!(
            *submissions.0.lock().unwrap(),
            ["op=early", "early=true", "op=host_fn", "early=false", "op=early", "early=false"]
        );
    });
}
