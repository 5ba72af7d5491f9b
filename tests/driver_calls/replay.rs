//! Replayed batches as the driver sees them.

use gpu_await::{Completion, Device, DeviceBuffer, Op, Region, Stream, kernels};

use super::{MODES, StandIn, async_under_the_stand_in, device_with, eventually, soon};

const LEN: usize = 100;

struct Chain {
    stream: Stream,
    axpy: kernels::axpy,
    scale: kernels::scale,
    x: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
}

impl Chain {
    /// With kernels that were launched before.
    async fn new(device: &Device) -> Chain {
        let stream = device.stream().unwrap();
        let axpy = soon(kernels::axpy::load(device)).await.unwrap();
        let scale = soon(kernels::scale::load(device)).await.unwrap();
        let (x, mut y) = (stream.full(LEN, 1.0f32), stream.full(LEN, 2.0f32).queued().unwrap());
        let x = x.queued().unwrap();
        soon(axpy.launch(&stream, 0.0, &x, &mut y)).await.unwrap();
        soon(scale.launch(&stream, 1.0, &mut y)).await.unwrap();
        Chain { stream, axpy, scale, x, y }
    }

    fn replay(&mut self, region: &mut Region, a: f32) -> Op<()> {
        let Chain { stream, axpy, scale, x, y } = self;
        stream.replay(region, |q| {
            axpy.launch(q, a, &*x, y)?;
            scale.launch(q, 2.0, y)?;
            axpy.launch(q, 1.0, &*x, y)
        })
    }
}

fn graph_calls(driver: &StandIn) -> Vec<String> {
    let calls = driver.names().into_iter();
    calls.filter(|call| call.starts_with("cuGraph") || call == "cuLaunchKernel").collect()
}

#[test]
fn what_changed_is_set_and_one_call_launches_it() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let mut chain = Chain::new(&device_with(mode)).await;
            let mut region = Region::new();
            driver.clear();
            soon(chain.replay(&mut region, 0.0)).await.unwrap();
            assert_eq!(graph_calls(driver), ["cuLaunchKernel"; 3]);
            driver.clear();
            soon(chain.replay(&mut region, 1.0)).await.unwrap();
            let calls = graph_calls(driver);
            let [create, nodes @ .., instantiate, launch] = &calls[..] else { panic!("{calls:?}") };
            assert_eq!((&**create, &**launch), ("cuGraphCreate", "cuGraphLaunch"));
            assert_eq!(
                (nodes, &**instantiate),
                (
                    &["cuGraphAddKernelNode_v2"; 3].map(str::to_owned)[..],
                    "cuGraphInstantiateWithFlags"
                )
            );
            driver.clear();
            soon(chain.replay(&mut region, 2.0)).await.unwrap();
            assert_eq!(graph_calls(driver), ["cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"]);
            driver.clear();
            soon(chain.replay(&mut region, 2.0)).await.unwrap();
            assert_eq!(graph_calls(driver), ["cuGraphLaunch"]);
            assert_eq!(chain.stream.submitted() - chain.stream.completed(), 0);
            drop(region);
            eventually("the graph goes", || driver.live("graph") == 0);
        }
    });
}

/// Whatever the driver refuses, the next run is right again, and nothing is left.
#[test]
fn refusals() {
    async_under_the_stand_in(async |driver| {
        for (call, after_effect) in [
            ("cuGraphCreate", false),
            ("cuGraphAddKernelNode_v2", false),
            ("cuGraphAddKernelNode_v2", true),
            ("cuGraphInstantiateWithFlags", false),
            ("cuGraphExecKernelNodeSetParams_v2", false),
            ("cuGraphExecKernelNodeSetParams_v2", true),
        ] {
            let mut chain = Chain::new(&device_with(Completion::Adaptive)).await;
            let mut region = Region::new();
            if after_effect {
                driver.fail_after_effect(call, 1, 1);
            } else {
                driver.fail(call, 1, 1);
            }
            for n in 0..6 {
                soon(chain.replay(&mut region, n as f32)).await.unwrap();
            }
            let report = region.report();
            assert_eq!(report.refused, 1, "{call}: {report:?}");
            assert!(report.replayed >= 1, "{call}: {report:?}");
            drop(region);
            eventually("the graph goes", || driver.live("graph") == 0);
        }
        // A launch that is refused is an error, and what it would have written is poisoned.
        let mut chain = Chain::new(&device_with(Completion::Adaptive)).await;
        let mut region = Region::new();
        driver.fail("cuGraphLaunch", 1, 1);
        soon(chain.replay(&mut region, 1.0)).await.unwrap();
        let error = soon(chain.replay(&mut region, 1.0)).await.unwrap_err();
        assert!(error.to_string().contains("cuGraphLaunch"), "{error}");
        let error = soon(chain.stream.download(&chain.y)).await.unwrap_err();
        assert!(error.to_string().contains("axpy"), "{error}");
        soon(chain.stream.fill(&mut chain.y, 1.0)).await.unwrap();
        soon(chain.replay(&mut region, 1.0)).await.unwrap();
    });
}

/// A graph goes when its last launch is through, and not before.
#[test]
fn a_region_goes_while_it_runs() {
    async_under_the_stand_in(async |driver| {
        let mut chain = Chain::new(&device_with(Completion::Adaptive)).await;
        let mut region = Region::new();
        for _ in 0..3 {
            soon(chain.replay(&mut region, 1.0)).await.unwrap();
        }
        let held = driver.hold();
        let op = chain.replay(&mut region, 3.0).submitted().unwrap();
        drop((region, chain));
        assert_eq!(driver.live("graph"), 2);
        drop(held);
        soon(op).await.unwrap();
        eventually("the graph goes", || driver.live("graph") == 0);
    });
}

/// What streams had of a region goes with them.
#[test]
fn a_region_forgets_streams_that_are_gone() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let Chain { axpy, x, mut y, .. } = Chain::new(&device).await;
        let mut region = Region::new();
        let mut run = |stream: &Stream| {
            for _ in 0..2 {
                let op = stream.replay(&mut region, |q| axpy.launch(q, 1.0, &x, &mut y));
                op.synchronize().unwrap();
            }
        };
        for _ in 0..5 {
            run(&device.stream().unwrap());
        }
        eventually("they go", || driver.live("graph") == 0);
        assert_eq!(device.stats().graphs, 0);
        let stream = device.stream().unwrap();
        run(&stream);
        // Each is two handles.
        assert_eq!((device.stats().graphs, driver.live("graph")), (1, 2));
        drop(region);
        eventually("all of them go", || driver.live("graph") == 0);
        assert_eq!(device.stats().graphs, 0);
    });
}

/// A list that makes a buffer has it where the last run had its own, and the graph, whose arguments are as they were, runs with the memory that is there now.
#[test]
fn memory_at_an_old_address() {
    async_under_the_stand_in(async |driver| {
        let device = Device::builder().spare_bytes_per_stream(0).cuda(0).unwrap();
        let mut chain = Chain::new(&device).await;
        let mut region = Region::new();
        for _ in 0..30 {
            let op = chain.stream.replay(&mut region, |q| {
                let mut fresh = q.zeros(1000)?;
                chain.scale.launch(q, 1.0, &mut fresh)?;
                chain.scale.launch(q, 1.0, &mut chain.y)
            });
            op.queued().unwrap();
        }
        soon(chain.stream.done()).await.unwrap();
        assert!(region.report().replayed > 0, "{:?}", region.report());
        assert_eq!(driver.misuse(), [""; 0]);
    });
}
