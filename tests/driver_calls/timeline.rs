//! What the timeline adds to the driver's work.

use gpu_await::Completion;
use gpu_await::testing::Gate;

use super::{Live, async_under_the_stand_in, axpy, device_with, my_names, soon};

#[test]
fn a_traced_launch_is_between_two_records() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Event);
        let stream = device.stream().unwrap();
        let axpy = axpy(&device).await;
        let x = stream.full(1000, 1.0f32).queued().unwrap();
        let mut y = stream.full(1000, 2.0f32).queued().unwrap();
        axpy.launch(&stream, 3.0, &x, &mut y).await.unwrap();
        let mut launched = |timeline: fn(&gpu_await::DeviceTimeline)| {
            timeline(&device.timeline());
            driver.clear();
            axpy.launch(&stream, 3.0, &x, &mut y).queued().unwrap();
            my_names(driver)
        };
        let (launch, record) = ("cuLaunchKernel", "cuEventRecord");
        assert_eq!(launched(|_| ()), [launch]);
        assert_eq!(launched(|timeline| timeline.start(10).unwrap()), [record, launch, record]);
        assert_eq!(launched(|timeline| timeline.stop()), [launch]);
        soon(stream.done()).await.unwrap();
        let trace = device.timeline().snapshot().unwrap();
        assert!(trace.operations()[0].device_time().is_some(), "{trace:?}");
    });
}

/// Also what left the log before it was complete: the driver has as many events as before.
#[test]
fn events_of_the_timeline_are_destroyed() {
    /// With their events fewer commands than make a stream crowded.
    const OPS: i64 = 250;
    async_under_the_stand_in(async |driver| {
        let before = Live::settled(driver);
        for capacity in [1, 1000] {
            let device = device_with(Completion::Event);
            let stream = device.stream().unwrap();
            let mut x = stream.zeros::<u8>(100).queued().unwrap();
            device.timeline().start(capacity).unwrap();
            let events = driver.live("event");
            let gate = Gate::close(&stream).unwrap();
            for _ in 0..OPS {
                stream.fill(&mut x, 1).queued().unwrap();
            }
            gate.open();
            soon(stream.done()).await.unwrap();
            if capacity == 1 {
                // Each was destroyed when the next one was made. The poller has a few of its own behind the gate.
                let now = driver.live("event");
                assert!(now <= events + OPS / 12, "{events} before, {now} now");
            }
            drop((x, stream, device, gate));
            before.comes_back(driver, &[], "a timeline of its device");
        }
    });
}
