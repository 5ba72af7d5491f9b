//! Events with options: which driver events are made, and what an interprocess one costs.

use gpu_await::{Completion, EventProblem};

use super::{
    Line, Live, async_under_the_stand_in, device_with, my_calls, my_names, soon, under_the_stand_in,
};

#[test]
fn an_events_flags_reach_the_driver() {
    under_the_stand_in(|driver| {
        let device = device_with(Completion::Adaptive);
        let stream = device.stream().unwrap();
        let mut x = stream.zeros::<u8>(8).queued().unwrap();
        let flags = || {
            let calls = my_calls(driver);
            let made: Vec<_> = calls
                .iter()
                .map(|line| Line(line))
                .filter(|l| l.name() == "cuEventCreate")
                .collect();
            made.iter().map(|line| line.value("flags").unwrap().to_owned()).collect::<Vec<_>>()
        };
        let held = driver.hold();
        // A stream has some in stock: these use them up.
        let _marks: Vec<_> = (0..12)
            .map(|_| {
                stream.fill(&mut x, 1).queued().unwrap();
                stream.record().unwrap()
            })
            .collect();
        for (timed, expected) in [(false, "2"), (true, "0")] {
            let event = device.event_builder().timed(timed).build().unwrap();
            stream.fill(&mut x, 1).queued().unwrap();
            driver.clear();
            event.record(&stream).unwrap();
            assert_eq!(flags(), [expected]);
            // Again: another event of the pool's, the first may still be waited for.
            stream.fill(&mut x, 1).queued().unwrap();
            driver.clear();
            event.record(&stream).unwrap();
            assert_eq!(flags(), [expected]);
        }
        for (blocking, expected) in [(false, "6"), (true, "7")] {
            driver.clear();
            let builder = device.event_builder().interprocess(true).blocking_sync(blocking);
            let event = builder.build().unwrap();
            assert_eq!(flags(), [expected]);
            drop(event);
        }
        drop(held);
        stream.synchronize().unwrap();
    });
}

#[test]
fn an_interprocess_event_is_the_drivers_own_and_seen_through_a_ticket() {
    async_under_the_stand_in(async |driver| {
        for mode in super::MODES {
            let before = Live::now(driver);
            let device = device_with(mode);
            let stream = device.stream().unwrap();
            let other = device.stream().unwrap();
            let events = driver.live("event");
            let event = device.event_builder().interprocess(true).build().unwrap();
            driver.clear();
            let handle = event.export().unwrap();
            // SAFETY: the event lives.
            let imported = unsafe { device.import_event(&handle) }.unwrap();
            let named: Vec<_> =
                my_names(driver).into_iter().filter(|name| name.starts_with("cuIpc")).collect();
            assert_eq!(named, ["cuIpcGetEventHandle", "cuIpcOpenEventHandle"]);
            assert!(imported.is_complete(), "never recorded");

            let held = driver.hold();
            driver.clear();
            event.record(&stream).unwrap();
            assert_eq!(my_names(driver), ["cuEventRecord"]);
            assert!(!imported.is_complete() && !event.is_complete());
            driver.clear();
            other.wait(&imported).queued().unwrap();
            assert_eq!(my_names(driver), ["cuStreamWaitEvent"]);
            drop(held);
            soon(other.done()).await.unwrap();
            let gate = gpu_await::testing::Gate::close(&stream).unwrap();
            event.record(&stream).unwrap();
            let done = imported.done();
            soon(other.host_fn(|| ())).await.unwrap();
            assert!(!done.is_complete() && !imported.is_complete());
            gate.open();
            soon(done).await.unwrap();
            soon(other.done()).await.unwrap();
            soon(event.done()).await.unwrap();
            assert!(imported.is_complete());
            imported.synchronize().unwrap();
            // What is recorded by the importer is seen by the exporter.
            let held = driver.hold();
            imported.record(&other).unwrap();
            assert!(!event.is_complete());
            drop(held);
            soon(event.done()).await.unwrap();
            drop((event, imported, stream, other));
            super::eventually("the two handles are destroyed", || {
                driver.names().iter().filter(|name| *name == "cuEventDestroy_v2").count() >= 2
            });
            assert!(driver.live("event") >= events, "{mode:?}: no pooled event was destroyed");
            // So that the next one sees nothing of this device's end.
            drop((gate, device));
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}

#[test]
fn what_the_driver_says_of_an_interprocess_event_is_told() {
    under_the_stand_in(|driver| {
        let device = device_with(Completion::Adaptive);
        // SAFETY: the bytes are no event's; the stand-in says so.
        let error = unsafe { device.import_event(&[9; 64]) }.unwrap_err();
        assert!(error.to_string().contains("cuIpcOpenEventHandle"), "{error}");
        let events = driver.live("event");
        driver.fail("cuEventCreate", 1, 999);
        assert!(device.event_builder().interprocess(true).build().is_err());
        assert_eq!(driver.live("event"), events);
        let plain = device.event_builder().build().unwrap();
        let error = plain.export().unwrap_err();
        assert!(error.to_string().contains(&EventProblem::NotInterprocess.to_string()), "{error}");
    });
}
