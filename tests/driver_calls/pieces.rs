//! What copies of many pieces and slabs call, and each of these calls failing.

use gpu_await::{
    BlockTable, Completion, CopyBy, DeviceBuffer, ErrorDetail, ErrorKind, Mapped, Op, Stream,
    kernels,
};

use super::{Line, async_under_the_stand_in, device_with, my_calls, my_names, soon};

const PIECE: usize = 4096;

/// As many pieces as the buffer has room for, up from pinned memory or down to it.
fn up(stream: &Stream, host: &Mapped<u8>, to: &mut DeviceBuffer<u8>, by: CopyBy) -> Op<()> {
    let to = to.view_mut().chunks_mut(PIECE);
    stream.copy_many(host.chunks(PIECE).zip(to).collect(), by)
}

fn down(stream: &Stream, from: &DeviceBuffer<u8>, host: &mut Mapped<u8>, by: CopyBy) -> Op<()> {
    let to = host.view_mut().chunks_mut(PIECE);
    stream.copy_many(from.chunks(PIECE).zip(to).collect(), by)
}

#[test]
fn a_call_a_piece_or_one_launch() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        // A table is in this memory, and is no other call.
        drop(stream.pinned::<u8>(8192).unwrap());
        for (pieces, by, is_kernel) in [
            (3, CopyBy::Auto, false),
            (4, CopyBy::Auto, true),
            (171, CopyBy::Auto, true),
            (171, CopyBy::CopyEngine, false),
            (1, CopyBy::Kernel, true),
        ] {
            let mut host = stream.pinned::<u8>(pieces * PIECE).unwrap().into_mapped();
            let mut x = soon(stream.zeros::<u8>(pieces * PIECE)).await.unwrap();
            let mut y = soon(stream.zeros::<u8>(pieces * PIECE)).await.unwrap();
            let calls = |call: &str, copy: Op<()>| {
                copy.queued().unwrap();
                let mut names = my_names(driver);
                // Lent memory gets a marker within a millisecond, from this thread or the poller.
                names.retain(|name| name != "cuEventRecord");
                match is_kernel {
                    true => assert_eq!(names, ["cuLaunchKernel"], "{pieces} by {by:?}"),
                    false => assert_eq!(names, vec![call; pieces], "{pieces} by {by:?}"),
                }
                if is_kernel {
                    let calls = my_calls(driver);
                    let line = calls.iter().map(|call| Line(call));
                    let line =
                        line.into_iter().find(|line| line.name() == "cuLaunchKernel").unwrap();
                    // A part of 16 KiB a block, on eight multiprocessors.
                    let grid = format!("grid={}x1x1", pieces.min(64));
                    assert!(line.0.contains("copy_pieces") && line.has(&grid), "{}", line.0);
                    let is_table = line.0.contains("args=(registered");
                    assert_eq!(is_table, pieces > 170, "{}", line.0);
                }
            };
            driver.clear();
            calls("cuMemcpyHtoDAsync_v2", up(&stream, &host, &mut x, by));
            driver.clear();
            let to = y.view_mut().chunks_mut(PIECE);
            let across = stream.copy_many(x.chunks(PIECE).zip(to).collect(), by);
            calls("cuMemcpyDtoDAsync_v2", across);
            driver.clear();
            calls("cuMemcpyDtoHAsync_v2", down(&stream, &y, &mut host, by));
            soon(host.host()).await.unwrap();
        }
    });
}

/// What was to be written has failed, and the next copy works.
#[test]
fn each_call_of_a_copy_fails() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let host = stream.pinned::<u8>(5 * PIECE).unwrap().into_mapped();
        let mut x = soon(stream.zeros::<u8>(5 * PIECE)).await.unwrap();
        for (by, call, times) in
            [(CopyBy::CopyEngine, "cuMemcpyHtoDAsync_v2", 5), (CopyBy::Kernel, "cuLaunchKernel", 1)]
        {
            for nth in 1..=times {
                driver.fail(call, nth, 999);
                let error = up(&stream, &host, &mut x, by).queued().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
                let error = soon(stream.download(&x.slice(..1).unwrap())).await.unwrap_err();
                assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
                soon(up(&stream, &host, &mut x, by)).await.unwrap();
                soon(stream.download(&x)).await.unwrap();
            }
        }
    });
}

/// Where the kernel does not load, the copy engines move everything, in a list they end that.
#[test]
fn a_device_without_the_kernel() {
    async_under_the_stand_in(async |driver| {
        // The stand-in loads no machine code: the last of the three images in PTX.
        driver.fail("cuLibraryLoadData", 6, 200);
        let device = device_with(Completion::Adaptive);
        driver.forgive();
        let stream = device.stream().unwrap();
        let host = stream.pinned::<u8>(9 * PIECE).unwrap().into_mapped();
        let mut x = soon(stream.zeros::<u8>(9 * PIECE)).await.unwrap();
        driver.clear();
        up(&stream, &host, &mut x, CopyBy::Auto).queued().unwrap();
        let mut names = my_names(driver);
        names.retain(|name| name != "cuEventRecord");
        assert_eq!(names, ["cuMemcpyHtoDAsync_v2"; 9]);
        let error = soon(up(&stream, &host, &mut x, CopyBy::Kernel)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
}

/// Two launches that name other blocks of a slab run side by side; those that name one of each other's are ordered by one wait.
#[test]
fn launches_wait_for_the_blocks_that_they_name() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let scale = soon(kernels::scale::load(&device)).await.unwrap();
        let mut slab = soon(a.slab::<f32>(2000, 16)).await.unwrap();
        // Both streams have used it, and events follow uses that are to be exact.
        scale.launch(&a, 1.0, &mut slab).queued().unwrap();
        soon(scale.launch(&b, 1.0, &mut slab)).await.unwrap();
        let held = driver.hold();
        let even: Vec<u32> = (0..1000).map(|at| at * 2).collect();
        scale.launch(&a, 1.0, &mut slab.naming_mut(&even).unwrap()).queued().unwrap();
        let calls = |launch: Op<()>| {
            launch.queued().unwrap();
            let names = my_names(driver);
            driver.clear();
            (names.iter().filter(|name| *name == "cuStreamWaitEvent").count(), names)
        };
        driver.clear();
        // Beside it.
        let odd: Vec<u32> = even.iter().map(|at| at + 1).collect();
        let (waits, names) = calls(scale.launch(&b, 1.0, &mut slab.naming_mut(&odd).unwrap()));
        assert_eq!(waits, 0, "{names:?}");
        let (waits, names) = calls(b.fill(&mut slab.block_mut(7).unwrap(), 1.0));
        assert_eq!(waits, 0, "{names:?}");
        let (waits, names) = calls(scale.launch(&b, 1.0, &mut slab.naming_mut(&[]).unwrap()));
        assert_eq!(waits, 0, "{names:?}");
        // Behind it, once.
        let (waits, names) =
            calls(scale.launch(&b, 1.0, &mut slab.naming_mut(&[3, 1998, 4]).unwrap()));
        assert_eq!(waits, 1, "{names:?}");
        let (waits, names) = calls(b.fill(&mut slab.block_mut(8).unwrap(), 1.0));
        assert_eq!(waits, 0, "it is behind that already: {names:?}");
        // The other way round: behind what the second stream did with one of these.
        let (waits, names) = calls(scale.launch(&a, 1.0, &mut slab.naming_mut(&even).unwrap()));
        assert_eq!(waits, 1, "{names:?}");
        // A use of all of it is behind all.
        let (waits, names) = calls(scale.launch(&b, 1.0, &mut slab));
        assert_eq!(waits, 1, "{names:?}");
        // What both only read orders nothing; what one reads and the other writes does.
        let mut step = slab.naming_mut(&[1000]).unwrap().reading(&[1, 3, 5, 1000]).unwrap();
        calls(scale.launch(&a, 1.0, &mut step));
        let mut step = slab.naming_mut(&[1001]).unwrap().reading(&[1, 3, 5]).unwrap();
        let (waits, names) = calls(scale.launch(&b, 1.0, &mut step));
        assert_eq!(waits, 0, "{names:?}");
        let (waits, names) = calls(b.fill(&mut slab.block_mut(5).unwrap(), 1.0));
        assert_eq!(waits, 1, "{names:?}");
        drop(held);
        soon(device.done()).await.unwrap();
    });
}

/// Each call that makes slabs and tables is refused once: what was taken comes back, and the next one works.
#[test]
fn slabs_and_tables_that_are_refused() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        for call in ["cuMemAllocFromPoolAsync", "cuMemsetD8Async"] {
            driver.fail(call, 1, 999);
            let error = stream.slab::<f32>(1000, 1024).queued().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Driver, "{call}: {error}");
            driver.forgive();
            drop(soon(stream.slab::<f32>(1000, 1024)).await.unwrap());
        }
        driver.fail("cuMemHostRegister_v2", 1, 999);
        let error = soon(device.host_slab::<f32>(1000, 1024)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
        let mut host = soon(device.host_slab::<f32>(1000, 1024)).await.unwrap();
        soon(host.host_mut(999)).await.unwrap().fill(1.0);
        let slab = soon(stream.slab::<f32>(10, 16)).await.unwrap();
        driver.fail("cuMemcpyHtoDAsync_v2", 1, 999);
        let table = BlockTable::new(&stream, slab.blocks(&[1, 2]).unwrap());
        assert_eq!(table.unwrap_err().kind(), ErrorKind::Driver);
        BlockTable::new(&stream, slab.blocks(&[1, 2]).unwrap()).unwrap();
    });
}

/// The kernel takes what eight multiprocessors hold, or the partition of its stream.
#[test]
fn the_kernel_takes_no_more_than_its_share() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let share = soon(device.reserve_partition(16)).await.unwrap();
        for (stream, blocks) in [(device.stream().unwrap(), 64), (share.stream().unwrap(), 128)] {
            let host = stream.pinned::<u8>(400 * PIECE).unwrap().into_mapped();
            let mut x = soon(stream.zeros::<u8>(400 * PIECE)).await.unwrap();
            driver.clear();
            up(&stream, &host, &mut x, CopyBy::Auto).queued().unwrap();
            let calls = my_calls(driver);
            let grid = format!("grid={blocks}x1x1");
            assert!(calls.iter().any(|call| Line(call).has(&grid)), "{blocks}: {calls:#?}");
        }
    });
}
