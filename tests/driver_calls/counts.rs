//! How many driver calls and allocations an operation costs.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use gpu_await::Completion;

use super::{
    Line, MODES, allocations, async_under_the_stand_in, axpy, contend, device_with, my_calls,
    my_names, soon,
};

#[test]
fn a_queued_launch_is_one_driver_call() {
    async_under_the_stand_in(async |driver| {
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            for _ in 0..3 {
                axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            }
            soon(stream.done()).await.unwrap();
            driver.clear();
            axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            let me = driver.thread();
            let mut calls = driver.calls();
            calls.retain(|line| Line(line).thread() == me);
            assert_eq!(calls.len(), 1, "{mode:?}: {calls:#?}");
            assert_eq!(Line(&calls[0]).name(), "cuLaunchKernel", "{mode:?}");
        }
    });
}

#[test]
fn a_queued_copy_or_fill_is_one_driver_call() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.full(1000, 1.0f32).queued().unwrap();
        let mut y = stream.full(1000, 2.0f32).queued().unwrap();
        let mut z = stream.full(1000, 2u8).queued().unwrap();
        let mut w = stream.full(1000, 2u16).queued().unwrap();
        soon(stream.done()).await.unwrap();

        driver.clear();
        stream.copy(&x, &mut y).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemcpyDtoDAsync_v2"]);
        driver.clear();
        stream.fill(&mut y, 3.0).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD32Async"]);
        driver.clear();
        stream.fill(&mut z, 3).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD8Async"]);
        driver.clear();
        stream.fill(&mut w, 0x102).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD16Async"]);
        driver.clear();
        stream.copy(&x.slice(..10).unwrap(), &mut y.slice_mut(5..15).unwrap()).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemcpyDtoDAsync_v2"]);
    });
}

#[test]
fn a_queued_upload_is_an_allocation_and_a_copy() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        drop(stream.upload(vec![1.0f32; 1000]).queued().unwrap());
        soon(stream.done()).await.unwrap();
        driver.clear();
        let x = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
        // Allocating needs the device's context, which this thread does not have.
        let expected = [
            "cuCtxGetCurrent",
            "cuCtxSetCurrent",
            "cuMemAllocAsync",
            "cuCtxSetCurrent",
            "cuMemcpyHtoDAsync_v2",
        ];
        assert_eq!(my_names(driver), expected);
        let copy = my_calls(driver).pop().unwrap();
        assert!(!Line(&copy).has("pageable"), "from pinned memory: {copy}");
        drop(x);
    });
}

#[test]
fn an_awaited_launch_is_two_driver_calls_and_questions() {
    async_under_the_stand_in(async |driver| {
        for mode in [Completion::Adaptive, Completion::Event, Completion::Callback] {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            for _ in 0..3 {
                soon(axpy.launch(&stream, 3.0, &x, &mut y)).await.unwrap();
            }
            soon(stream.done()).await.unwrap();
            driver.clear();
            soon(axpy.launch(&stream, 3.0, &x, &mut y)).await.unwrap();
            let me = driver.thread();
            let calls = driver.calls();
            assert_eq!(my_names(driver), ["cuLaunchKernel", "cuEventRecord"], "{mode:?}");
            // One bracket is two exchanges around one question.
            let mine: Vec<_> = calls.iter().map(|line| Line(line)).collect();
            let mine: Vec<_> = mine.into_iter().filter(|line| line.thread() == me).collect();
            let count = |name| mine.iter().filter(|line| line.name() == name).count();
            let questions = count("cuEventQuery") + count("cuStreamQuery");
            assert_eq!(count("cuThreadExchangeStreamCaptureMode"), 2 * questions, "{mode:?}");
            assert_eq!(count("cuStreamQuery"), 0, "{mode:?}: a marker is asked, not a stream");
            // Doorbells belong to the modes that ring: see `order`.
            if mode == Completion::Event {
                let others: Vec<_> = calls.iter().filter(|l| Line(l).thread() != me).collect();
                assert!(others.iter().all(|line| Line(line).asks()), "{others:#?}");
            }
        }
    });
}

#[test]
fn in_word_mode_an_awaited_launch_is_two_driver_calls_and_no_question() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Word);
        let stream = device.stream().unwrap();
        let axpy = axpy(&device).await;
        let x = stream.full(1000, 1.0f32).queued().unwrap();
        let mut y = stream.full(1000, 2.0f32).queued().unwrap();
        soon(axpy.launch(&stream, 3.0, &x, &mut y)).await.unwrap();
        driver.clear();
        let launch = axpy.launch(&stream, 3.0, &x, &mut y);
        soon(launch).await.unwrap();
        let me = driver.thread();
        let mut names = driver.calls();
        // Whoever comes first writes the word: a future or the poller.
        names.retain(|line| Line(line).thread() == me || !Line(line).asks());
        let names: Vec<_> = names.iter().map(|line| Line(line).name()).collect();
        assert_eq!(names, ["cuLaunchKernel", "cuStreamWriteValue64_v2"]);
    });
}

#[test]
fn a_queued_launch_allocates_nothing() {
    async_under_the_stand_in(async |_driver| {
        contend();
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            let mut go = || axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            // Far enough for markers on the way.
            (0..1000).for_each(|_| go());
            soon(stream.done()).await.unwrap();
            (0..1000).for_each(|_| go());
            soon(stream.done()).await.unwrap();
            let count = allocations(|| (0..200).for_each(|_| go()));
            assert_eq!(count, 0, "{mode:?}");
        }
    });
}

#[test]
fn an_awaited_launch_allocates_nothing() {
    async_under_the_stand_in(async |_driver| {
        contend();
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            let mut go = || {
                futures::executor::block_on(axpy.launch(&stream, 3.0, &x, &mut y)).unwrap();
            };
            (0..100).for_each(|_| go());
            let count = allocations(|| (0..200).for_each(|_| go()));
            assert_eq!(count, 0, "{mode:?}");
        }
    });
}

#[test]
fn joined_launches_are_on_the_device_before_the_first_poll() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let axpy = axpy(&device).await;
        let (x, v) = (a.full(1000, 1.0f32).queued().unwrap(), b.full(9, 1.0f32).queued().unwrap());
        let (mut y, mut w) =
            (a.full(1000, 2.0f32).queued().unwrap(), b.full(9, 2.0f32).queued().unwrap());
        // Two events for markers, to be used again.
        soon(async { tokio::try_join!(a.fill(&mut y, 2.0), b.fill(&mut w, 2.0)) }).await.unwrap();
        let held = driver.hold();
        let (before, behind) = (a.fill(&mut y, 2.0), b.fill(&mut w, 2.0));
        let (more, most) = (a.fill(&mut y, 2.0), b.fill(&mut w, 2.0));
        drop(held);
        soon(gpu_await::join_all([before, behind, more, most])).await.unwrap();
        driver.clear();
        let held = driver.hold();
        let mut joined = pin!(async {
            tokio::try_join!(axpy.launch(&a, 3.0, &x, &mut y), axpy.launch(&b, 3.0, &v, &mut w))
        });
        let polled = joined.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Pending), "held");
        let names = my_names(driver);
        assert_eq!(
            names,
            ["cuLaunchKernel", "cuLaunchKernel", "cuEventRecord", "cuEventRecord"],
            "the launches first, then the markers of the polls"
        );
        drop(held);
        soon(joined).await.unwrap();
    });
}
