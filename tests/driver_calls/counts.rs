//! How many driver calls and allocations an operation costs.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use gpu_await::{Completion, Device, RawQueue, RawSlice, Uses, kernels};

use super::{
    Line, Live, MODES, Remembers, allocations, async_under_the_stand_in, axpy, contend,
    device_with, my_calls, my_names, poll_once, soon, stream_that,
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

/// The bracket around another library's work makes the context current and puts back what was. If the library took
/// long the last time, an event goes in front, on a stream that is busy. What comes behind costs what it did.
#[test]
fn what_enqueue_adds() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(1000, 1u8).queued().unwrap();
        soon(stream.done()).await.unwrap();
        let mut enqueue = |takes: Duration| {
            driver.clear();
            let uses = Uses::new("nothing").updates(&mut x);
            let call = |_: &RawQueue<'_>, _: (RawSlice<u8>,)| {
                let begin = Instant::now();
                while begin.elapsed() < takes {}
                Ok::<_, gpu_await::Error>(())
            };
            // SAFETY: nothing is put on the stream.
            unsafe { stream.enqueue(uses, call) }.queued().unwrap();
            my_names(driver)
        };
        let (quick, slow) = (Duration::ZERO, Duration::from_micros(60));
        // The stand-in does not write down exchanges of the capture mode.
        let bracket = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetCurrent", "cuCtxSetCurrent"];
        // Nothing is in front that anybody could wait for.
        assert_eq!(enqueue(slow), bracket);
        let behind_slow = enqueue(quick);
        assert_eq!(
            (&*behind_slow[0], &behind_slow[1..]),
            ("cuEventRecord", &bracket.map(str::to_owned)[..])
        );
        // This thread may have to wait for its core in a quick one.
        super::eventually("no event behind a quick one", || enqueue(quick) == bracket);
        driver.clear();
        stream.fill(&mut x, 1).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD8Async"]);
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
        // Freed at the end: whoever looks next would free it, this thread in front of its allocation as well.
        let _first = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
        soon(stream.done()).await.unwrap();
        driver.clear();
        let x = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
        // Allocating needs the device's context, which this thread does not have.
        let expected = [
            "cuCtxGetCurrent",
            "cuCtxSetCurrent",
            "cuMemAllocFromPoolAsync",
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
fn queued_zeros_are_an_allocation_and_a_fill_and_their_drop_is_a_free() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let _first = stream.zeros::<f32>(1 << 18).queued().unwrap();
        soon(stream.done()).await.unwrap();
        driver.clear();
        let x = stream.zeros::<f32>(1 << 18).queued().unwrap();
        let expected = [
            "cuCtxGetCurrent",
            "cuCtxSetCurrent",
            "cuMemAllocFromPoolAsync",
            "cuCtxSetCurrent",
            "cuMemsetD8Async",
        ];
        assert_eq!(my_names(driver), expected);
        driver.clear();
        drop(x);
        let expected = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuMemFreeAsync", "cuCtxSetCurrent"];
        assert_eq!(my_names(driver), expected);
    });
}

/// A stream uses again what was freed on it: no call allocates, none frees, until it goes.
#[test]
fn a_buffer_of_a_size_that_was_freed_costs_its_copy_alone() {
    async_under_the_stand_in(async |driver| {
        let before = Live::now(driver);
        let device = Device::cuda(0).unwrap();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        drop(stream.upload(vec![1.0f32; 1000]).queued().unwrap());
        driver.clear();
        // Of the same rounded size: 4,096 bytes.
        for len in [1000, 1024, 900] {
            drop(stream.upload(vec![1.0f32; len]).queued().unwrap());
        }
        // Lent memory gets a marker within a millisecond, from this thread or the poller.
        let mut names = my_names(driver);
        names.retain(|name| name != "cuEventRecord");
        assert_eq!(names, ["cuMemcpyHtoDAsync_v2"; 3]);
        driver.clear();
        drop(other.upload(vec![1.0f32; 1000]).queued().unwrap());
        drop(stream.upload(vec![1.0f32; 800]).queued().unwrap());
        let allocations =
            my_names(driver).into_iter().filter(|name| name == "cuMemAllocFromPoolAsync");
        assert_eq!(allocations.count(), 2, "another stream's, and another size");
        drop((stream, other, device));
        before.comes_back(driver, &[], "what the streams kept");
    });
}

#[test]
fn rows_are_one_launch_and_rows_without_gaps_a_plain_copy() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let x = stream.upload((0..100u16).collect::<Vec<_>>()).queued().unwrap();
        let mut y = stream.full(100, 7u16).queued().unwrap();
        let rows = gpu_await::Copy2d::new(3, 4).source_start(5).source_pitch(20);
        let rows = rows.destination_start(2).destination_pitch(10);
        let pinned = stream.pinned::<u16>(100).unwrap();
        soon(stream.done()).await.unwrap();

        driver.clear();
        stream.copy_2d(&x, &mut y, rows).queued().unwrap();
        assert_eq!(my_names(driver), ["cuLaunchKernel"]);

        driver.clear();
        let pinned = soon(stream.download_2d(&x, pinned, rows)).await.unwrap();
        assert_eq!((pinned[2], pinned[34]), (5, 67));
        let calls = my_calls(driver);
        let copies: Vec<_> =
            calls.iter().filter(|call| call.contains("cuMemcpy2DAsync_v2")).collect();
        assert_eq!(copies.len(), 1, "{calls:#?}");
        let call = Line(copies[0]);
        for word in ["from=memory1+10", "to_pitch=20", "from_pitch=40", "width=6", "height=4"] {
            assert!(call.has(word), "{word}: {calls:#?}");
        }
        let back = gpu_await::Copy2d::new(3, 4).source_start(2).source_pitch(10);
        let back = back.destination_start(2).destination_pitch(10);
        soon(stream.upload_2d(pinned, &mut y, back)).await.unwrap();
        let seen = soon(stream.download(&y)).await.unwrap();
        assert_eq!((seen[2..6].to_vec(), seen[34]), (vec![5, 6, 7, 7], 67));

        driver.clear();
        stream.copy_2d(&x, &mut y, gpu_await::Copy2d::new(25, 4)).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemcpyDtoDAsync_v2"]);
    });
}

#[test]
fn the_pools_threshold_and_trimming_are_the_drivers() {
    async_under_the_stand_in(async |driver| {
        let builder = Device::builder().release_threshold_bytes(12_345);
        let device = builder.cuda(0).unwrap();
        let calls = driver.calls();
        // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD.
        let set = calls.iter().rfind(|call| call.contains("cuMemPoolSetAttribute attribute=4"));
        assert!(Line(set.unwrap()).has("value=12345"), "{calls:#?}");
        driver.clear();
        soon(device.trim(777)).await.unwrap();
        let calls = driver.calls();
        let trim = calls.iter().find(|call| Line(call).name() == "cuMemPoolTrimTo").unwrap();
        assert!(Line(trim).has("keep=777") && Line(trim).has("relaxed"), "{trim}");
    });
}

#[test]
fn an_awaited_launch_is_two_driver_calls_and_questions() {
    const EVENT: &str = "cuEventRecord";
    const WORD: &str = "cuStreamWriteValue64_v2";
    async_under_the_stand_in(async |driver| {
        for (mode, remembers, marker) in [
            (Completion::Adaptive, Remembers::Nothing, EVENT),
            (Completion::Adaptive, Remembers::ShortWaits, WORD),
            (Completion::Adaptive, Remembers::ALongWait, EVENT),
            (Completion::Event, Remembers::ShortWaits, EVENT),
            (Completion::Callback, Remembers::ShortWaits, EVENT),
        ] {
            let before = Live::now(driver);
            let device = device_with(mode);
            let stream = stream_that(driver, &device, remembers).await;
            let axpy = axpy(&device).await;
            // Queued, so that the stream learns nothing else.
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            for _ in 0..3 {
                axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            }
            driver.clear();
            soon(axpy.launch(&stream, 3.0, &x, &mut y)).await.unwrap();
            let me = driver.thread();
            let calls = driver.calls();
            let context = format!("{mode:?}, remembers {remembers:?}");
            assert_eq!(my_names(driver), ["cuLaunchKernel", marker], "{context}");
            // One bracket is two exchanges around one question.
            let mine: Vec<_> = calls.iter().map(|line| Line(line)).collect();
            let mine: Vec<_> = mine.into_iter().filter(|line| line.thread() == me).collect();
            let count = |name| mine.iter().filter(|line| line.name() == name).count();
            let questions = count("cuEventQuery") + count("cuStreamQuery");
            assert_eq!(count("cuThreadExchangeStreamCaptureMode"), 2 * questions, "{context}");
            assert_eq!(count("cuStreamQuery"), 0, "{context}: a marker is asked, not a stream");
            // Doorbells belong to the modes that ring: see `order`.
            if mode == Completion::Event {
                let others: Vec<_> = calls.iter().filter(|l| Line(l).thread() != me).collect();
                assert!(others.iter().all(|line| Line(line).asks()), "{others:#?}");
            }
            // So that the next one sees nothing of this device's end.
            drop((x, y, stream, axpy, device));
            before.comes_back(driver, &[], &context);
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

/// The least of a few runs: what one of them does for the first time, as to sleep beside a busy neighbour, may allocate.
fn warm(mut run: impl FnMut()) -> u64 {
    (0..4).map(|_| allocations(&mut run)).min().unwrap()
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
            let count = warm(|| (0..200).for_each(|_| go()));
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
            let count = warm(|| (0..200).for_each(|_| go()));
            assert_eq!(count, 0, "{mode:?}");
        }
    });
}

#[test]
fn joined_launches_are_on_the_device_before_the_first_poll() {
    async_under_the_stand_in(async |driver| {
        for (remembers, marker) in [
            (Remembers::Nothing, "cuEventRecord"),
            (Remembers::ShortWaits, "cuStreamWriteValue64_v2"),
            (Remembers::ALongWait, "cuEventRecord"),
        ] {
            let device = device_with(Completion::Adaptive);
            let a = stream_that(driver, &device, remembers).await;
            let b = stream_that(driver, &device, remembers).await;
            let axpy = axpy(&device).await;
            let (x, v) =
                (a.full(1000, 1.0f32).queued().unwrap(), b.full(9, 1.0f32).queued().unwrap());
            let (mut y, mut w) =
                (a.full(1000, 2.0f32).queued().unwrap(), b.full(9, 2.0f32).queued().unwrap());
            // In front of a kernel's first launch, which may take long, comes an event.
            let first = device.stream().unwrap();
            let (u, mut z) = (first.zeros(1).queued().unwrap(), first.zeros(1).queued().unwrap());
            axpy.launch(&first, 1.0, &u, &mut z).queued().unwrap();
            driver.clear();
            let held = driver.hold();
            let mut joined = pin!(async {
                tokio::try_join!(axpy.launch(&a, 3.0, &x, &mut y), axpy.launch(&b, 3.0, &v, &mut w))
            });
            let polled = joined.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Pending), "held");
            assert_eq!(
                my_names(driver),
                ["cuLaunchKernel", "cuLaunchKernel", marker, marker],
                "the launches first, then the markers of the polls; remembers {remembers:?}"
            );
            drop(held);
            soon(joined).await.unwrap();
        }
    });
}

#[test]
fn joined_operations_get_their_markers_together() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let a = stream_that(driver, &device, Remembers::Nothing).await;
        let b = stream_that(driver, &device, Remembers::Nothing).await;
        let empty = kernels::empty::load(&device).await.unwrap();
        // In front of a kernel's first launch, which may take long, comes an event.
        empty.launch(&device.stream().unwrap()).queued().unwrap();
        let held = driver.hold();
        driver.clear();
        let mut joined = gpu_await::join_all([empty.launch(&a), empty.launch(&b)]);
        assert!(!poll_once(&mut joined), "held");
        let expected = ["cuLaunchKernel", "cuLaunchKernel", "cuEventRecord", "cuEventRecord"];
        assert_eq!(my_names(driver), expected);
        drop(held);
        soon(joined).await.unwrap();
    });
}

/// Nothing, unless somebody waits for its beginning, or the borrower puts much on the stream.
#[test]
fn what_a_loan_adds() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.full(1000, 1u8).queued().unwrap();
        soon(stream.done()).await.unwrap();
        let mut lend = |commands: u32, is_awaited: bool| {
            driver.clear();
            let uses = Uses::new("theirs").updates(&mut x).commands(commands);
            // SAFETY: nothing uses the memory.
            let loan = unsafe { stream.lend_memory(uses) }.unwrap();
            let ready = is_awaited.then(|| loan.ready());
            loan.complete().queued().unwrap();
            drop(ready);
            my_names(driver)
        };
        assert_eq!(lend(1, false), [""; 0]);
        assert_eq!(lend(1, true), ["cuEventRecord"], "in front of the end");
        assert_eq!(lend(128, false), ["cuEventRecord"], "so that the depth of the queue is known");
    });
}

/// A memset where the driver has one for the value at that address, and otherwise one launch.
#[test]
fn a_fill_is_a_memset_or_a_launch() {
    async_under_the_stand_in(async |driver| {
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(64).queued().unwrap();
        soon(stream.done()).await.unwrap();
        for (offset, value, expected) in [
            (0, [1, 2, 3, 4], "cuMemsetD32Async"),
            (1, [1, 2, 3, 4], "cuLaunchKernel"),
            (2, [1, 2, 3, 4], "cuLaunchKernel"),
            (2, [1, 2, 1, 2], "cuMemsetD16Async"),
            (3, [1, 2, 1, 2], "cuLaunchKernel"),
            (3, [7, 7, 7, 7], "cuMemsetD8Async"),
        ] {
            driver.clear();
            let mut part = x.slice_mut(offset..offset + 40).unwrap().cast::<[u8; 4]>().unwrap();
            stream.fill(&mut part, value).queued().unwrap();
            assert_eq!(my_names(driver), [expected], "at {offset}");
            // The stand-in runs no kernel.
            if expected != "cuLaunchKernel" {
                let seen = soon(stream.download(&x)).await.unwrap();
                assert_eq!(seen[offset..offset + 40], value.repeat(10), "at {offset}");
            }
        }
        driver.clear();
        drop(stream.full(40, [1u8, 2, 3]).queued().unwrap());
        let names = my_names(driver);
        let is_fill = |name: &&String| name.starts_with("cuMemset") || **name == "cuLaunchKernel";
        assert_eq!(names.iter().filter(is_fill).collect::<Vec<_>>(), ["cuLaunchKernel"]);
    });
}

/// Where the kernel could not be loaded, byte by byte.
#[test]
fn fills_without_a_kernel_are_memsets() {
    async_under_the_stand_in(async |driver| {
        (1..=2).for_each(|nth| driver.fail("cuLibraryLoadData", nth, 209));
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(64).queued().unwrap();
        soon(stream.done()).await.unwrap();
        driver.clear();
        let mut part = x.slice_mut(1..41).unwrap().cast::<[u8; 4]>().unwrap();
        stream.fill(&mut part, [1, 2, 3, 4]).queued().unwrap();
        assert_eq!(my_names(driver), ["cuMemsetD2D8Async"; 4]);
        let seen = soon(stream.download(&x)).await.unwrap();
        assert_eq!(seen[1..41], [1, 2, 3, 4].repeat(10));
    });
}

/// A size that is no size at all is an invalid value to some drivers.
#[test]
fn an_absurd_size_is_out_of_memory_whatever_the_driver_says() {
    async_under_the_stand_in(async |driver| {
        let device = Device::cuda(0).unwrap();
        let stream = device.stream().unwrap();
        for code in [1, 2] {
            for nth in [1, 2] {
                driver.fail("cuMemAllocFromPoolAsync", nth, code);
            }
            let error = stream.empty::<u8>(isize::MAX as usize).queued().unwrap_err();
            assert_eq!(error.kind(), gpu_await::ErrorKind::OutOfMemory, "{code}: {error}");
            driver.forgive();
        }
    });
}
