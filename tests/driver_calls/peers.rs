//! Copies between two GPUs.

use gpu_await::{Device, ErrorDetail, InOut, kernels};

use super::foreign::Pair;
use super::foreign_arrays;
use super::{Line, async_under_the_stand_in, my_calls, my_names, soon, under_the_stand_in};

/// What shows one device's memory to another one.
const ACCESS: [&str; 3] = ["cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess", "cuMemPoolSetAccess"];

#[test]
fn access_is_enabled_once_a_pair_and_a_copy_is_one_driver_call() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let (a, b) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let x = soon(s.upload(vec![7u8; 1000])).await.unwrap();
        let mut y = soon(t.zeros::<u8>(1000)).await.unwrap();
        driver.clear();
        t.copy(&x, &mut y).queued().unwrap();
        let calls = my_calls(driver);
        let access: Vec<_> =
            calls.iter().filter(|call| ACCESS.contains(&Line(call).name())).collect();
        let names: Vec<_> = access.iter().map(|call| Line(call).name()).collect();
        assert_eq!(names, ACCESS, "{calls:#?}");
        // Device 1 asks for device 0's memory.
        assert!(Line(access[0]).has("device=1") && Line(access[0]).has("peer=0"), "{calls:#?}");
        // CU_MEM_LOCATION_TYPE_DEVICE, and reading and writing.
        assert!(
            Line(access[2]).has("location=1:1") && Line(access[2]).has("flags=3"),
            "{calls:#?}"
        );
        assert_eq!(my_names(driver).pop().unwrap(), "cuMemcpyPeerAsync");
        driver.clear();
        t.copy(&x, &mut y).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemcpyPeerAsync"]);
        assert_eq!(soon(t.download(&y)).await.unwrap(), [7; 1000]);
        // The other direction is another pair; once more does nothing.
        assert!(soon(a.enable_peer(&b)).await.unwrap());
        driver.clear();
        assert!(soon(a.enable_peer(&b)).await.unwrap() && soon(b.enable_peer(&a)).await.unwrap());
        assert!(driver.names().iter().all(|name| !ACCESS.contains(&name.as_str())));
        // The same GPU, opened twice, needs none.
        let again = Device::cuda(0).unwrap();
        driver.clear();
        assert!(soon(again.enable_peer(&a)).await.unwrap());
        assert!(driver.names().iter().all(|name| !ACCESS.contains(&name.as_str())));
        drop((x, y));
    });
}

/// One launch, whose nodes name their GPU's context.
#[test]
fn a_graph_of_two_gpus_is_one_launch() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let devices = [Device::cuda(0).unwrap(), Device::cuda(1).unwrap()];
        let (s, t) = (devices[0].stream().unwrap(), devices[1].stream().unwrap());
        let kernels = (
            soon(kernels::scale::load(&devices[0])).await.unwrap(),
            soon(kernels::scale::load(&devices[1])).await.unwrap(),
        );
        let graph = devices[0].graph_across::<(InOut<f32>, InOut<f32>, f32), _, _, 1>(
            [&devices[1]],
            kernels,
            |q, [other], (here, there), (mut x, mut y, a)| {
                here.launch(q, a, &mut x)?;
                there.launch(other, a, &mut y)
            },
        );
        let (mut x, mut y) =
            (soon(s.full(5, 1.0f32)).await.unwrap(), soon(t.full(5, 2.0f32)).await.unwrap());
        for (a, calls) in [
            (3.0, &["cuGraphAddKernelNode_v2", "cuGraphAddKernelNode_v2", "cuGraphLaunch"][..]),
            (3.0, &["cuGraphLaunch"]),
            (
                2.0,
                &[
                    "cuGraphExecKernelNodeSetParams_v2",
                    "cuGraphExecKernelNodeSetParams_v2",
                    "cuGraphLaunch",
                ],
            ),
        ] {
            driver.clear();
            soon(graph.launch(&s, (&mut x, &mut y, a))).await.unwrap();
            let names = driver.names();
            let of_nodes = |name: &&String| name.contains("KernelNode") || name.contains("Launch");
            assert_eq!(names.iter().filter(of_nodes).collect::<Vec<_>>(), calls);
        }
        soon(async { futures::try_join!(s.done(), t.done()) }).await.unwrap();
        let host = Device::host();
        let mixed = devices[0].graph_across::<(InOut<f32>,), _, _, 1>(
            [&host],
            kernels::scale::load(&host).await.unwrap(),
            |_, [other], scale, (mut x,)| scale.launch(other, 2.0, &mut x),
        );
        let error = soon(mixed.launch(&s, (&mut x,))).await.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
        drop((x, y));
    });
}

#[test]
fn a_gpu_that_takes_no_more_peers_copies_through_the_host() {
    async_under_the_stand_in(async |driver| {
        const TOO_MANY_PEERS: i32 = 711;
        driver.set_devices(2);
        let (a, b) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let (s, t) = (a.stream().unwrap(), b.stream().unwrap());
        let data = (0..=255).collect::<Vec<u8>>().repeat(23 << 12);
        let len = data.len();
        let x = soon(s.upload(data.clone())).await.unwrap();
        let mut y = soon(t.zeros::<u8>(len)).await.unwrap();
        driver.fail("cuCtxEnablePeerAccess", 1, TOO_MANY_PEERS);
        driver.clear();
        let held = driver.hold();
        let copy = t.copy(&x, &mut y);
        let names = my_names(driver);
        drop(held);
        soon(copy).await.unwrap();
        let count = |name: &str| names.iter().filter(|known| *known == name).count();
        assert_eq!((count("cuMemcpyDtoHAsync_v2"), count("cuMemcpyHtoDAsync_v2")), (6, 6));
        // The source's, on which the parts come down.
        assert_eq!((count("cuMemcpyPeerAsync"), count("cuStreamCreateWithPriority")), (0, 1));
        // Each part up waits for its part down; from the fifth on the block must be empty as well.
        assert_eq!(count("cuStreamWaitEvent"), 6 + 2);
        let y = soon(t.download(&y)).await.unwrap();
        assert!(y[..] == data);
        drop(x);
    });
}

#[test]
fn handles_of_another_gpu_never_reach_the_driver() {
    under_the_stand_in(|driver| {
        driver.set_devices(2);
        let (a, b) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let (again, host) = (Device::cuda(0).unwrap(), Device::host());
        let pairs = [(&a, &b), (&b, &a), (&a, &again), (&a, &host), (&host, &a)];
        let complaints = |(ours, theirs)| {
            let pair = Pair::new(ours, theirs);
            [pair.complaints(), pair.complaints_of(foreign_arrays::PROBES)].concat()
        };
        let complaints = pairs.map(complaints).concat();
        assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
        assert_eq!(driver.misuse(), [""; 0]);
    });
}
