//! Where markers, waits, words and doorbells go.

use std::future::Future;
use std::task::{Context, Poll, Waker};

use gpu_await::Completion;

use super::{
    Line, MODES, async_under_the_stand_in, axpy, device_with, eventually, my_calls, my_names,
    poll_once, soon,
};
use stand_in_cuda::StandIn;

const EVENT: &str = "cuEventRecord";
const FILL: &str = "cuMemsetD32Async";

/// The numbers of the streams that calls of this name were made on.
fn streams_of(calls: &[String], name: &str) -> Vec<u64> {
    let lines = calls.iter().map(|line| Line(line)).filter(|line| line.name() == name);
    lines.map(|line| line.value("stream").unwrap().parse().unwrap()).collect()
}

/// The driver's number of a stream.
fn number_of(driver: &StandIn, stream: &gpu_await::Stream) -> u64 {
    let mut x = stream.full(1, 0u8).queued().unwrap();
    driver.clear();
    stream.fill(&mut x, 1).queued().unwrap();
    streams_of(&my_calls(driver), "cuMemsetD8Async")[0]
}

#[test]
fn a_marker_goes_behind_a_held_op_just_before_the_next_submission() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let axpy = axpy(&device).await;
        let x = stream.full(1000, 1.0f32).queued().unwrap();
        let mut y = stream.full(1000, 2.0f32).queued().unwrap();
        soon(stream.done()).await.unwrap();
        let _held = driver.hold();
        driver.clear();
        let op = axpy.launch(&stream, 3.0, &x, &mut y);
        assert_eq!(my_names(driver), ["cuLaunchKernel"], "none before it matters");
        axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
        axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
        let expected = ["cuLaunchKernel", "cuEventRecord", "cuLaunchKernel", "cuLaunchKernel"];
        assert_eq!(my_names(driver), expected, "none behind queued ones");
        drop(op);
    });
}

#[test]
fn an_abandoned_op_gets_no_marker() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let axpy = axpy(&device).await;
        let x = stream.full(1000, 1.0f32).queued().unwrap();
        let mut y = stream.full(1000, 2.0f32).queued().unwrap();
        soon(stream.done()).await.unwrap();
        let _held = driver.hold();
        driver.clear();
        axpy.launch(&stream, 3.0, &x, &mut y).abandon();
        axpy.launch(&stream, 3.0, &x, &mut y).abandon();
        assert_eq!(my_names(driver), ["cuLaunchKernel", "cuLaunchKernel"]);
    });
}

#[test]
fn every_128_queued_operations_one_marker() {
    async_under_the_stand_in(async |driver| {
        for mode in [Completion::Event, Completion::Adaptive, Completion::Callback] {
            let marker = "cuEventRecord";
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.full(1000, 1.0f32).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            soon(stream.done()).await.unwrap();
            let _held = driver.hold();
            // A marker behind this one, so that the count begins at the next.
            let op = axpy.launch(&stream, 3.0, &x, &mut y);
            axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            driver.clear();
            (0..127 + 128).for_each(|_| axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap());
            let mut names = my_names(driver);
            // Events are made as they are needed, and used again.
            names.retain(|name| name == "cuLaunchKernel" || name == marker);
            let markers: Vec<_> =
                (0..names.len()).filter(|index| names[*index] == marker).collect();
            assert_eq!(markers, [127, 127 + 129], "{mode:?}");
            assert_eq!(names.len(), 127 + 128 + 2, "{mode:?}");
            drop(op);
        }
    });
}

#[test]
fn a_dependency_between_streams_is_one_event_and_one_wait() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let axpy = axpy(&device).await;
        let (a_number, b_number) = (number_of(driver, &a), number_of(driver, &b));
        let mut x = a.full(1000, 1.0f32).queued().unwrap();
        let mut y = b.full(1000, 2.0f32).queued().unwrap();
        let mut z = b.full(1000, 2.0f32).queued().unwrap();
        soon(device.done()).await.unwrap();
        let held = driver.hold();
        a.fill(&mut x, 3.0).queued().unwrap();

        driver.clear();
        axpy.launch(&b, 3.0, &x, &mut y).queued().unwrap();
        let calls = my_calls(driver);
        assert_eq!(streams_of(&calls, "cuLaunchKernel"), [b_number]);
        assert_eq!(streams_of(&calls, "cuStreamWaitEvent"), [b_number], "{calls:#?}");
        let records = streams_of(&calls, "cuEventRecord");
        assert_eq!(records.iter().filter(|stream| **stream == a_number).count(), 1, "{calls:#?}");
        let recorded = calls.iter().map(|line| Line(line)).find(|l| l.name() == "cuEventRecord");
        let waited = calls.iter().map(|line| Line(line)).find(|l| l.name() == "cuStreamWaitEvent");
        assert_eq!(recorded.unwrap().value("event"), waited.unwrap().value("event"));

        // The stream already waits for that point.
        driver.clear();
        axpy.launch(&b, 3.0, &x, &mut z).queued().unwrap();
        let calls = my_calls(driver);
        assert_eq!(streams_of(&calls, "cuStreamWaitEvent"), [0; 0], "{calls:#?}");
        assert!(!streams_of(&calls, "cuEventRecord").contains(&a_number), "{calls:#?}");

        // Two readers on b, one edge back.
        driver.clear();
        a.fill(&mut x, 4.0).queued().unwrap();
        let calls = my_calls(driver);
        assert_eq!(streams_of(&calls, "cuStreamWaitEvent"), [a_number], "{calls:#?}");
        drop(held);

        // Complete: nothing to wait for.
        soon(device.done()).await.unwrap();
        driver.clear();
        axpy.launch(&b, 3.0, &x, &mut y).queued().unwrap();
        let calls = my_calls(driver);
        assert_eq!(streams_of(&calls, "cuStreamWaitEvent"), [0; 0], "{calls:#?}");
        assert!(!streams_of(&calls, "cuEventRecord").contains(&a_number), "{calls:#?}");
    });
}

/// Once streams share buffers, operations are followed by events: where other streams wait for these.
#[test]
fn events_that_no_other_stream_waits_for_are_given_up() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let mut x = a.full(1000, 1.0f32).queued().unwrap();
        let mut y = b.full(1000, 2.0f32).queued().unwrap();
        let mut z = b.full(1000, 2.0f32).queued().unwrap();
        soon(device.done()).await.unwrap();
        let names = |driver: &StandIn| {
            let mut names = my_names(driver);
            names.retain(|name| name == EVENT || name == FILL);
            names
        };
        let fills = |times: usize, y: &mut _| {
            driver.clear();
            (0..times).for_each(|_| b.fill(y, 3.0).queued().unwrap());
            names(driver)
        };
        let held = driver.hold();
        let followed = [FILL, EVENT];
        assert_eq!(fills(1, &mut y), [FILL], "none is shared");
        a.copy(&y, &mut x).queued().unwrap();
        assert_eq!(fills(2, &mut z), followed.repeat(2));
        drop(held);
        soon(device.done()).await.unwrap();

        // No other stream waits for one.
        fills(1022, &mut z);
        soon(device.done()).await.unwrap();
        let _held = driver.hold();
        let all = fills(300, &mut z);
        let events = all.iter().filter(|name| *name == EVENT).count();
        assert_eq!(events, 2, "a marker every 128 commands");
        // One waits for more than what it depends on.
        let waits_for = |x: &mut _, y: &_| {
            driver.clear();
            a.copy(y, x).queued().unwrap();
            let calls = my_calls(driver);
            let wait =
                calls.iter().map(|call| Line(call)).find(|l| l.name() == "cuStreamWaitEvent");
            let event = wait.unwrap().value("event").unwrap().to_owned();
            let is_new = |call: &String| {
                let line = Line(call);
                line.name() == EVENT && line.value("event") == Some(event.as_str())
            };
            calls.iter().any(is_new)
        };
        assert_eq!((fills(1, &mut y).len(), fills(1, &mut z).len()), (1, 1));
        assert!(waits_for(&mut x, &y), "behind both fills");
        // From then on it does not.
        let all: Vec<_> = (0..300).flat_map(|_| fills(1, &mut z)).collect();
        assert_eq!(all, followed.repeat(300));
        assert_eq!((fills(1, &mut y).len(), fills(1, &mut z).len()), (2, 2));
        assert!(!waits_for(&mut x, &y), "behind the first of the two");
    });
}

#[test]
fn an_explicit_wait_is_one_event_and_one_wait() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let (a_number, b_number) = (number_of(driver, &a), number_of(driver, &b));
        let mut x = a.full(1000, 1.0f32).queued().unwrap();
        soon(device.done()).await.unwrap();
        let held = driver.hold();
        a.fill(&mut x, 3.0).queued().unwrap();
        driver.clear();
        b.wait(&a).queued().unwrap();
        let calls = my_calls(driver);
        assert_eq!(streams_of(&calls, "cuEventRecord"), [a_number], "{calls:#?}");
        assert_eq!(streams_of(&calls, "cuStreamWaitEvent"), [b_number], "{calls:#?}");
        driver.clear();
        b.wait(&a).queued().unwrap();
        assert_eq!(my_names(driver), [""; 0], "b waits for that already");
        drop(held);
        soon(device.done()).await.unwrap();
        driver.clear();
        b.wait(&a).queued().unwrap();
        assert_eq!(my_names(driver), [""; 0], "complete");
    });
}

#[test]
fn a_word_is_written_with_the_barrier_and_holds_the_ticket() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Word);
        let stream = device.stream().unwrap();
        let number = number_of(driver, &stream);
        let mut x = stream.full(1000, 1.0f32).queued().unwrap();
        soon(stream.done()).await.unwrap();
        driver.clear();
        let op = stream.fill(&mut x, 2.0);
        let ticket = op.ticket().unwrap().number;
        soon(op).await.unwrap();
        let calls = driver.calls();
        let writes: Vec<_> = calls
            .iter()
            .map(|line| Line(line))
            .filter(|line| line.name() == "cuStreamWriteValue64_v2")
            .collect();
        assert_eq!(writes.len(), 1, "{calls:#?}");
        assert_eq!(writes[0].value("flags"), Some("0"));
        assert_eq!(writes[0].value("stream"), Some(&*number.to_string()));
        assert_eq!(writes[0].value("value"), Some(&*ticket.to_string()));
        assert!(!calls.iter().any(|line| Line(line).name() == "cuEventRecord"), "{calls:#?}");
    });
}

#[test]
fn a_doorbell_rings_on_a_private_stream() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Callback);
        let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
        let users = [number_of(driver, &a), number_of(driver, &b)];
        let mut x = a.full(1000, 1.0f32).queued().unwrap();
        let mut y = b.full(1000, 1.0f32).queued().unwrap();
        soon(device.done()).await.unwrap();
        let held = driver.hold();
        driver.clear();
        let (op_a, op_b) = (a.fill(&mut x, 2.0), b.fill(&mut y, 2.0));
        let mut both = std::pin::pin!(async { tokio::try_join!(op_a, op_b) });
        let armed = || {
            let calls = driver.calls();
            calls.iter().filter(|line| Line(line).name() == "cuLaunchHostFunc").count() == 2
        };
        // Poll as an executor would until the poller has both.
        eventually("two doorbells", || {
            let polled = both.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Pending));
            armed()
        });
        let calls = driver.calls();
        let rings = streams_of(&calls, "cuLaunchHostFunc");
        let waits = streams_of(&calls, "cuStreamWaitEvent");
        assert_eq!(rings, waits, "each behind its marker: {calls:#?}");
        assert_ne!(rings[0], rings[1], "a bell serves one stream at a time");
        assert!(!rings.iter().any(|stream| users.contains(stream)), "{calls:#?}");
        drop(held);
        soon(both).await.unwrap();
    });
}

#[test]
fn other_modes_arm_no_doorbell() {
    async_under_the_stand_in(async |driver| {
        for mode in [Completion::Adaptive, Completion::Event, Completion::Word] {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let mut x = stream.full(1000, 1.0f32).queued().unwrap();
            soon(stream.done()).await.unwrap();
            let held = driver.hold();
            driver.clear();
            let mut op = stream.fill(&mut x, 2.0);
            assert!(!poll_once(&mut op));
            // Long enough for the poller to have slept and probed.
            eventually("probes", || {
                let calls = driver.calls();
                calls.iter().filter(|line| Line(line).name() == "cuStreamQuery").count() > 3
            });
            let calls = driver.calls();
            assert!(!calls.iter().any(|line| Line(line).name() == "cuLaunchHostFunc"));
            drop(held);
            soon(op).await.unwrap();
        }
    });
}

#[test]
fn what_could_break_a_capture_is_in_a_relaxed_bracket() {
    async_under_the_stand_in(async |driver| {
        const BRACKETED: [&str; 16] = [
            "cuDevicePrimaryCtxRetain",
            "cuDevicePrimaryCtxRelease_v2",
            "cuMemPoolCreate",
            "cuMemPoolDestroy",
            "cuEventQuery",
            "cuEventElapsedTime",
            "cuStreamQuery",
            "cuMemAllocFromPoolAsync",
            "cuMemFreeAsync",
            "cuMemPoolGetAttribute",
            "cuMemHostRegister_v2",
            "cuMemHostUnregister",
            "cuLibraryLoadData",
            "cuLibraryUnload",
            "cuEventCreate",
            "cuStreamCreateWithPriority",
        ];
        let mut seen = std::collections::BTreeSet::new();
        let mut calls = Vec::new();
        for mode in MODES {
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let axpy = axpy(&device).await;
            let x = stream.upload(vec![1.0f32; 1000]).queued().unwrap();
            let mut y = stream.full(1000, 2.0f32).queued().unwrap();
            axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            let mut launch = axpy.launch(&stream, 3.0, &x, &mut y);
            let _ = launch.is_complete();
            drop(launch.try_take());
            let start = stream.record_timed().unwrap();
            drop(device.pinned::<u8>(8 << 20).unwrap());
            assert_eq!(soon(stream.download(&y)).await.unwrap().len(), 1000);
            let mut z = y;
            let end = stream.record_timed().unwrap();
            soon(end.done()).await.unwrap();
            let _ = end.elapsed_since(&start).unwrap();
            device.synchronize().unwrap();
            let _ = device.memory().unwrap();
            // A wait that takes long: the poller asks how the device is.
            let held = driver.hold();
            let mut done = axpy.launch(&stream, 1.0, &x, &mut z);
            assert!(!poll_once(&mut done));
            let asked = |line: &String| Line(line).name() == "cuStreamQuery";
            eventually("a probe", || poll_once(&mut done) || driver.calls().iter().any(asked));
            drop(held);
            soon(done).await.unwrap();
            drop((x, z, axpy, start, end, launch, stream, device));
            eventually("the modules are unloaded", || driver.live("context") == 0);
            calls.extend(driver.calls());
            driver.clear();
        }
        for line in calls {
            let line = Line(&line);
            if BRACKETED.contains(&line.name()) {
                seen.insert(line.name().to_owned());
                assert!(line.has("relaxed"), "{}", line.0);
            }
            let work = ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord"];
            assert!(!(work.contains(&line.name()) && line.has("relaxed")), "put back: {}", line.0);
        }
        assert_eq!(seen.len(), BRACKETED.len(), "all were made: {seen:?}");
    });
}
