//! What copies of many pieces call, and each of these calls failing.

use gpu_await::{Completion, CopyBy, DeviceBuffer, ErrorDetail, ErrorKind, Mapped, Op, Stream};

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
