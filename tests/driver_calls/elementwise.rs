//! Elementwise algorithms as the driver sees them: a module once, then a launch each.

use gpu_await::{Completion, ErrorDetail, In, InOut, Result, Stream};
use gpu_await_algorithms::{Algorithms, Preload, transform};

use super::{Line, OURS, StandIn, async_under_the_stand_in, device_with, my_calls, my_names, soon};

const LEN: usize = 100_000;

/// The calls without those that make a context current and back.
fn named(driver: &StandIn) -> Vec<String> {
    let mut names = my_names(driver);
    names.retain(|name| !name.starts_with("cuCtx"));
    names
}

/// How many calls have to do with loading.
fn modules(driver: &StandIn) -> usize {
    my_names(driver).iter().filter(|name| name.starts_with("cuLibrary")).count()
}

#[test]
fn one_launch_each_once_loaded() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.full(LEN, 1.0f32).queued().unwrap();
        let mut y = stream.full(LEN, 1.0f32).queued().unwrap();
        let mut flags = stream.zeros::<u8>(LEN).queued().unwrap();
        let mut index = stream.zeros::<u32>(LEN).queued().unwrap();
        let mut all = |times: usize| -> Result<()> {
            for _ in 0..times {
                stream
                    .transform_in_place(transform!(|a, x, y| a * x + y), (2.0, &x), &mut y)
                    .queued()?;
                stream.transform(transform!(|x| x.exp()), (&x,), &mut y).queued()?;
                stream.transform_flags(transform!(|x| x.gt(0.0)), (&x,), &mut flags).queued()?;
                stream.sequence(0, 1, &mut index).queued()?;
                stream.cast(&index, &mut y).queued()?;
                stream.gather(&x, &index, &mut y).queued()?;
                stream.scatter(&x, &index, &mut y).queued()?;
            }
            Ok(())
        };
        all(1).unwrap();
        assert_eq!(driver.live("module") - OURS, 7);
        driver.clear();
        all(3).unwrap();
        // Each may start while the one before it ends.
        assert!(my_calls(driver).iter().all(|line| line.contains(" programmatic")));
        assert_eq!(named(driver), ["cuLaunchKernelEx"; 21]);
        assert_eq!(driver.live("module") - OURS, 7);
        soon(stream.done()).await.unwrap();
    });
}

/// The grid is as large as the length wants it.
#[test]
fn the_grid_follows_the_length() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(LEN, 1.0f32).queued().unwrap();
        let mut add = |len: usize| {
            let mut part = x.slice_mut(..len).unwrap();
            stream.transform_in_place(transform!(|x| x + 1.0), (), &mut part).queued().unwrap();
        };
        add(1);
        driver.clear();
        // 256 threads, four vectors each.
        for (len, blocks) in
            [(0, None), (1, Some("1")), (4096, Some("1")), (4097, Some("2")), (LEN, Some("25"))]
        {
            driver.clear();
            add(len);
            let calls = my_calls(driver);
            let launch = calls.iter().find(|line| Line(line).name() == "cuLaunchKernelEx");
            let grid = launch.and_then(|line| Line(line).value("grid"));
            let expected = blocks.map(|blocks| format!("{blocks}x1x1"));
            assert_eq!(grid.map(str::to_owned), expected, "{len}: {calls:?}");
        }
        soon(stream.done()).await.unwrap();
    });
}

#[test]
fn loaded_once() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let axpy = transform!(|a, x, y| a * x + y);
        let loads = || async { device.preload_transform::<(f32, In<f32>, InOut<f32>)>(axpy).await };
        let (a, b, c) = soon(async { futures::join!(loads(), loads(), loads()) }).await;
        (a.and(b).and(c)).unwrap();
        assert_eq!(driver.live("module") - OURS, 1);
        // From another thread at the same time, and for another type.
        let streams: Vec<Stream> = (0..4).map(|_| device.stream().unwrap()).collect();
        std::thread::scope(|scope| {
            for stream in &streams {
                scope.spawn(move || {
                    let x = stream.full(8, 1u16).queued().unwrap();
                    let mut y = stream.full(8, 1u16).queued().unwrap();
                    stream.transform_in_place(axpy, (3, &x), &mut y).queued().unwrap();
                });
            }
        });
        assert_eq!(driver.live("module") - OURS, 2);
        let stream = device.stream().unwrap();
        let x = stream.full(8, 1.0f32).queued().unwrap();
        let mut y = stream.full(8, 1.0f32).queued().unwrap();
        driver.clear();
        stream.transform_in_place(axpy, (3.0, &x), &mut y).queued().unwrap();
        assert_eq!(modules(driver), 0, "preloaded");
        soon(device.preload_sequence::<f32>()).await.unwrap();
        soon(device.preload_cast::<f32, u8>()).await.unwrap();
        soon(device.preload_gather::<f32, u32>()).await.unwrap();
        soon(device.preload_scatter::<f32, u32>()).await.unwrap();
        let mut bytes = stream.zeros::<u8>(8).queued().unwrap();
        let index = stream.zeros::<u32>(8).queued().unwrap();
        driver.clear();
        stream.sequence(0.0, 1.0, &mut y).queued().unwrap();
        stream.cast(&y, &mut bytes).queued().unwrap();
        stream.gather(&x, &index, &mut y).queued().unwrap();
        stream.scatter(&x, &index, &mut y).queued().unwrap();
        assert_eq!(modules(driver), 0, "preloaded");
        soon(device.done()).await.unwrap();
    });
}

/// What the driver does not load poisons the output, and is tried again.
#[test]
fn a_kernel_that_does_not_load() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(8, 1i64).queued().unwrap();
        for call in ["cuLibraryLoadData", "cuLibraryGetKernel"] {
            driver.fail(call, 1, 209);
            let double = transform!(|x| x * 2);
            let error = stream.transform_in_place(double, (), &mut x).queued().unwrap_err();
            let code = match error.detail() {
                ErrorDetail::BadImage { image, problem, .. } => {
                    assert_eq!(image, "transform");
                    problem.to_string()
                }
                other => other.to_string(),
            };
            assert!(code.contains("209"), "{call}: {code}");
            let error = soon(stream.download(&x)).await.unwrap_err();
            assert!(matches!(error.detail(), ErrorDetail::Upstream { .. }), "{error}");
            stream.fill(&mut x, 1).queued().unwrap();
            assert_eq!(driver.live("module") - OURS, 0);
        }
        stream.transform_in_place(transform!(|x| x * 2), (), &mut x).queued().unwrap();
        soon(stream.done()).await.unwrap();
    });
}
