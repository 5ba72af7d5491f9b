//! Streams with options, the legacy default stream, and streams shared with cudarc.

use futures::FutureExt;
use gpu_await::{Completion, Device, ErrorDetail, Stream};

use super::{
    Line, MODES, async_under_the_stand_in, axpy, device_with, my_calls, my_names, soon,
    under_the_stand_in,
};

#[test]
fn a_streams_options_reach_the_driver() {
    under_the_stand_in(|driver| {
        let device = device_with(Completion::Adaptive);
        let made = |driver: &stand_in_cuda::StandIn| {
            let calls = my_calls(driver);
            let line = calls.iter().find(|line| Line(line).name() == "cuStreamCreateWithPriority");
            let line = line.expect("a stream was made");
            let value = |key| Line(line).value(key).expect("in the line").to_owned();
            (value("flags"), value("priority"))
        };
        driver.clear();
        let plain = device.stream().unwrap();
        assert_eq!(made(driver), ("1".to_owned(), "0".to_owned()));
        assert!(!my_names(driver).contains(&"cuStreamGetPriority".to_owned()));
        driver.clear();
        let urgent = device.stream_builder().priority(-100).non_blocking(false).build().unwrap();
        assert_eq!(made(driver), ("0".to_owned(), "-5".to_owned()));
        assert_eq!((plain.priority(), urgent.priority()), (0, -5));
        driver.fail("cuStreamGetPriority", 1, 999);
        let streams = driver.live("stream");
        assert!(device.stream_builder().priority(-1).build().is_err());
        assert_eq!(driver.live("stream"), streams, "what was made is destroyed");
    });
}

#[test]
fn the_legacy_default_stream_works_with_no_context_current() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let axpy = axpy(&device).await;
            let legacy = device.legacy_stream().unwrap();
            driver.clear();
            let x = legacy.upload(vec![1.0f32; 100]).queued().unwrap();
            let mut y = legacy.full(100, 2.0f32).queued().unwrap();
            let mut z = legacy.full(100, [2u32; 3]).queued().unwrap();
            axpy.launch(&legacy, 3.0, &x, &mut y).queued().unwrap();
            legacy.copy(&x, &mut y).queued().unwrap();
            legacy.fill(&mut z, [1, 2, 3]).queued().unwrap();
            legacy.wait(&device.stream().unwrap()).queued().unwrap();
            assert_eq!(soon(legacy.host_fn(|| 4)).await.unwrap(), 4);
            assert_eq!(soon(legacy.download(&y)).await.unwrap().len(), 100);
            legacy.record_timed().unwrap().synchronize().unwrap();
            soon(legacy.done()).await.unwrap();
            let _ = legacy.is_idle();
            let failed: Vec<_> =
                driver.calls().into_iter().filter(|l| l.contains("result=")).collect();
            let failed: Vec<_> =
                failed.iter().filter(|line| !line.contains("result=600")).collect();
            assert!(failed.is_empty(), "{mode:?}: {failed:#?}");
            assert!(!driver.names().contains(&"cuStreamWriteValue64_v2".to_owned()), "{mode:?}");
        }
    });
}

#[test]
fn an_operation_on_a_shared_stream_is_followed_by_an_event() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(1000, 1u32).queued().unwrap();
        soon(stream.done()).await.unwrap();
        driver.clear();
        stream.fill(&mut x, 2).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD32Async"]);
        // SAFETY: only looked at.
        let _handle = unsafe { stream.as_raw() };
        driver.clear();
        stream.fill(&mut x, 2).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD32Async", "cuEventRecord"]);
    });
}

#[test]
fn streams_go_to_cudarc_and_come_from_it() {
    async_under_the_stand_in(async |driver| {
        driver.set_devices(2);
        let (device, other) = (Device::cuda(0).unwrap(), Device::cuda(1).unwrap());
        let context = device.cudarc_context().unwrap();
        let theirs = context.new_stream().unwrap();
        // SAFETY: nobody captures it.
        let adopted = unsafe { device.adopt(&theirs) }.unwrap();
        assert_eq!(soon(adopted.host_fn(|| 5)).await.unwrap(), 5);
        let x = adopted.full(10, 1u8).queued().unwrap();
        drop(adopted);
        drop(theirs);
        super::eventually("cudarc destroys its stream, which no buffer keeps", || {
            driver.names().iter().filter(|name| *name == "cuStreamDestroy_v2").count() == 1
        });
        drop(x);

        let ours = device.stream().unwrap();
        // SAFETY: dropped before `ours`.
        let shown = unsafe { ours.to_cudarc() }.unwrap();
        // SAFETY: only looked at.
        let handle = unsafe { ours.as_raw() };
        assert_eq!(shown.cu_stream() as u64, handle);
        drop(shown);
        assert_eq!(soon(ours.host_fn(|| 6)).await.unwrap(), 6);

        // SAFETY: the stream lives; it is refused.
        let error = unsafe { Stream::from_raw(&other, handle, ()) }.unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
        assert!(Device::host().cudarc_context().is_err());
    });
}

#[test]
fn a_device_waits_for_streams_that_it_does_not_know() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            // One context, two handles that know nothing of each other's streams.
            let (device, somebody) = (device_with(mode), device_with(mode));
            let theirs = somebody.stream().unwrap();
            for _ in 0..3 {
                let gate = gpu_await::testing::Gate::close(&theirs).unwrap();
                driver.clear();
                let mut done = device.done();
                assert!(my_names(driver).contains(&"cuCtxRecordEvent".to_owned()));
                assert!((&mut done).now_or_never().is_none());
                soon(device.stream().unwrap().host_fn(|| ())).await.unwrap();
                assert!((&mut done).now_or_never().is_none(), "{mode:?}");
                gate.open();
                soon(done).await.unwrap();
                soon(theirs.done()).await.unwrap();
            }
            // A driver before 12.5 has no such call.
            driver.fail("cuCtxRecordEvent", 1, 801);
            driver.clear();
            soon(device.done()).await.unwrap();
            let calls = my_calls(driver);
            let legacy =
                |line: &&String| line.contains("cuEventRecord") && line.contains("stream=0");
            assert_eq!(calls.iter().filter(legacy).count(), 1, "{calls:#?}");
            // Somebody captures.
            driver.fail("cuCtxRecordEvent", 1, 900);
            let error = device.done().await.unwrap_err();
            assert!(error.to_string().contains("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"), "{error}");
        }
    });
}
