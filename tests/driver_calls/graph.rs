//! Graphs as the driver sees them.

use gpu_await::{
    Completion, Device, DeviceBuffer, ErrorDetail, Graph, InOut, Region, Uses, kernels,
};

use super::{MODES, OURS, async_under_the_stand_in, device_with, eventually, soon};

const LEN: usize = 100;

/// `x = b (a x)`.
async fn scaled(device: &Device) -> Graph<(InOut<f32>, f32, f32)> {
    let scale = soon(kernels::scale::load(device)).await.unwrap();
    device.graph::<(InOut<f32>, f32, f32), _, _>(scale, |q, scale, (mut x, a, b)| {
        scale.launch(q, a, &mut x)?;
        scale.launch(q, b, &mut x)
    })
}

fn is_of_the_graph(call: &String) -> bool {
    call.starts_with("cuGraph") || call == "cuLaunchKernel"
}

#[test]
fn one_call_for_what_was_launched_before() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let graph = scaled(&device).await;
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            driver.clear();
            soon(graph.launch(&stream, (&mut x, 2.0, 3.0))).await.unwrap();
            let calls: Vec<_> = driver.names().into_iter().filter(is_of_the_graph).collect();
            let compiled = [
                "cuGraphCreate",
                "cuGraphAddKernelNode_v2",
                "cuGraphAddKernelNode_v2",
                "cuGraphInstantiateWithFlags",
                "cuGraphLaunch",
            ];
            assert_eq!(calls, compiled);
            for (values, wanted) in [
                ((2.0, 3.0), &["cuGraphLaunch"][..]),
                ((2.0, 4.0), &["cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch"]),
                ((2.0, 4.0), &["cuGraphLaunch"]),
            ] {
                driver.clear();
                soon(graph.launch(&stream, (&mut x, values.0, values.1))).await.unwrap();
                let calls: Vec<_> = driver.names().into_iter().filter(is_of_the_graph).collect();
                assert_eq!(calls, wanted);
            }
            drop(graph);
            eventually("the graph goes", || driver.live("graph") == 0);
        }
    });
}

/// Whatever the driver refuses, a launch puts its kernels on the stream, and nothing is left of what was begun.
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
            let device = device_with(Completion::Adaptive);
            let stream = device.stream().unwrap();
            let graph = scaled(&device).await;
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            if after_effect {
                driver.fail_after_effect(call, 1, 1);
            } else {
                driver.fail(call, 1, 1);
            }
            for n in 0..4 {
                driver.clear();
                soon(graph.launch(&stream, (&mut x, 2.0, n as f32))).await.unwrap();
                let count = |name: &str| driver.names().iter().filter(|call| *call == name).count();
                let launches = (count("cuGraphLaunch"), count("cuLaunchKernel"));
                assert!(matches!(launches, (1, 0) | (0, 2)), "{call}: {launches:?}");
            }
            let report = graph.report();
            assert_eq!(report.refused, 1, "{call}: {report:?}");
            drop(graph);
            eventually("the graph goes", || driver.live("graph") == 0);
        }
    });
}

/// It stays until its last launch is through; what streams had of it goes with these.
#[test]
fn a_graph_goes_with_its_streams() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let graph = scaled(&device).await;
        let kept = device.stream().unwrap();
        let mut x = soon(kept.full(LEN, 1.0f32)).await.unwrap();
        soon(graph.launch(&kept, (&mut x, 2.0, 2.0))).await.unwrap();
        for _ in 0..5 {
            let stream = device.stream().unwrap();
            soon(graph.launch(&stream, (&mut x, 1.0, 1.0))).await.unwrap();
        }
        // Those of streams that are gone go when another one comes; each is two handles.
        eventually("they go", || {
            let stream = device.stream().unwrap();
            graph.launch(&stream, (&mut x, 1.0, 1.0)).synchronize().unwrap();
            driver.live("graph") <= 6
        });
        let held = driver.hold();
        let op = graph.launch(&kept, (&mut x, 2.0, 3.0)).submitted().unwrap();
        drop(graph);
        assert!(driver.live("graph") >= 2);
        drop(held);
        soon(op).await.unwrap();
        eventually("the graph goes", || driver.live("graph") == 0);
    });
}

/// Where the kernels for that do not load, a fill ends the list of a replayed batch, and is no part of a graph.
#[test]
fn a_device_without_its_own_kernels() {
    async_under_the_stand_in(async |driver| {
        for (call, nth, fills) in [
            // The stand-in loads no machine code: then PTX.
            ("cuLibraryLoadData", 2, false),
            ("cuLibraryLoadData", 4, true),
            ("cuLibraryGetKernel", 1, false),
            ("cuLibraryGetKernel", 9, true),
        ] {
            driver.fail(call, nth, 200);
            let device = device_with(Completion::Adaptive);
            driver.forgive();
            let loaded = if nth == 9 { OURS } else { OURS - 1 };
            assert_eq!(driver.live("module"), loaded, "{call}");
            let stream = device.stream().unwrap();
            let scale = soon(kernels::scale::load(&device)).await.unwrap();
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            let graph =
                device.graph::<(InOut<f32>,), _, _>((), |q, (), (mut x,)| q.fill(&mut x, 2.0));
            match soon(graph.launch(&stream, (&mut x,))).await {
                Ok(()) => assert!(fills, "{call}"),
                Err(error) => {
                    assert!(!fills, "{call}");
                    assert!(matches!(error.detail(), ErrorDetail::NotInGraph { .. }), "{error}");
                    soon(stream.fill(&mut x, 1.0)).await.unwrap();
                }
            }
            let mut region = Region::new();
            for _ in 0..3 {
                let op = stream.replay(&mut region, |q| {
                    scale.launch(q, 2.0, &mut x)?;
                    q.fill(&mut x, 1.0)?;
                    scale.launch(q, 2.0, &mut x)
                });
                soon(op).await.unwrap();
            }
            assert_eq!(region.last_run().len(), if fills { 1 } else { 2 }, "{call}");
            drop((graph, region, scale, x, stream, device));
            eventually("all modules go", || driver.live("module") == 0);
        }
    });
}

/// Others' work is captured on a stream that nothing else uses, and is one node; what was made of it goes with the graph.
#[test]
fn captured_work() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let scale = soon(kernels::scale::load(&device)).await.unwrap();
        let graph = device.graph::<(InOut<f32>, f32), _, _>(scale, |q, scale, (mut x, a)| {
            scale.launch(q, a, &mut x)?;
            let uses = Uses::new("theirs").updates(&mut x).can_be_captured();
            // SAFETY: it puts nothing on the stream.
            unsafe { q.enqueue(uses, |_, _| Ok::<_, gpu_await::Error>(())) }?;
            scale.launch(q, a, &mut x)
        });
        let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
        let calls = |x: &mut DeviceBuffer<f32>, a: f32| {
            driver.clear();
            let op = graph.launch(&stream, (x, a));
            let launched = op.synchronize();
            let is_one = |call: &String| {
                is_of_the_graph(call)
                    || call.contains("BeginCapture")
                    || call.contains("EndCapture")
            };
            let calls: Vec<_> = driver.calls().into_iter().filter(is_one).collect();
            (launched, calls)
        };
        let (launched, first) = calls(&mut x, 1.0);
        launched.unwrap();
        let names = first.iter().map(|call| call.split(' ').next().unwrap());
        let expected = [
            "cuStreamBeginCapture_v2",
            "cuStreamEndCapture",
            "cuGraphCreate",
            "cuGraphAddKernelNode_v2",
            "cuGraphAddChildGraphNode",
            "cuGraphAddKernelNode_v2",
            "cuGraphInstantiateWithFlags",
            "cuGraphLaunch",
        ];
        assert!(names.eq(expected), "{first:?}");
        assert!(first[0].contains("mode=2"), "relaxed: {}", first[0]);
        let (launched, again) = calls(&mut x, 1.0);
        launched.unwrap();
        assert_eq!(again.len(), 1, "{again:?}");
        // Other values: captured and compiled again. Refused, it is an error, and tried again.
        for call in [
            "cuStreamBeginCapture_v2",
            "cuStreamEndCapture",
            "cuGraphAddChildGraphNode",
            "cuGraphInstantiateWithFlags",
        ] {
            driver.fail(call, 1, 1);
            let (refused, _) = calls(&mut x, 2.0);
            assert!(refused.is_err(), "{call}");
            soon(stream.fill(&mut x, 1.0)).await.unwrap();
        }
        drop(graph);
        eventually("all of it goes", || driver.live("graph") == 0);
        drop((x, stream, device));
        eventually("the stream of captures goes", || driver.live("stream") == 0);
    });
}

/// The driver records it in each launch, at its place; it goes back to the pool with the last of its users.
#[test]
fn an_event_in_a_graph() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let scale = soon(kernels::scale::load(&device)).await.unwrap();
            let event = device.event_builder().timed(true).build().unwrap();
            let state = (scale, event.clone());
            let graph =
                device.graph::<(InOut<f32>, f32), _, _>(state, |q, (scale, event), (mut x, a)| {
                    scale.launch(q, a, &mut x)?;
                    event.record_in(q)?;
                    scale.launch(q, a, &mut x)
                });
            let mut x = soon(stream.full(LEN, 1.0f32)).await.unwrap();
            driver.clear();
            for a in [2.0, 3.0, 3.0] {
                soon(graph.launch(&stream, (&mut x, a))).await.unwrap();
                assert!(event.elapsed_since(&event).unwrap().is_zero());
            }
            let calls: Vec<_> = driver.names().into_iter().filter(is_of_the_graph).collect();
            let wanted = [
                "cuGraphCreate",
                "cuGraphAddKernelNode_v2",
                "cuGraphAddEventRecordNode",
                "cuGraphAddKernelNode_v2",
                "cuGraphInstantiateWithFlags",
                "cuGraphLaunch",
                "cuGraphExecKernelNodeSetParams_v2",
                "cuGraphExecKernelNodeSetParams_v2",
                "cuGraphLaunch",
                "cuGraphLaunch",
            ];
            assert_eq!(calls, wanted);
            drop((graph, event));
            eventually("the graph goes", || driver.live("graph") == 0);
        }
    });
}
