//! Which marker an operation gets, and which one is asked.
//!
//! In the mode `Adaptive`, a word goes behind what somebody waits for if all that the stream
//! remembers is short and fewer than two tasks check; every other marker is an event.

use std::time::Instant;

use gpu_await::{Completion, Op, Stream, kernels};

use super::{
    Line, Live, Remembers, SOON, async_under_the_stand_in, device_with, my_names, poll_once, soon,
    stream_after_short_waits, stream_that,
};
use stand_in_cuda::StandIn;

const EVENT: &str = "cuEventRecord";
const WORD: &str = "cuStreamWriteValue64_v2";
const LAUNCH: &str = "cuLaunchKernel";

/// What a launch of `empty` and its first poll put on the stream, while the device is held.
fn polled(driver: &StandIn, empty: &kernels::empty, stream: &Stream) -> (Vec<String>, Op<()>) {
    driver.clear();
    let mut op = empty.launch(stream);
    assert!(!poll_once(&mut op), "held");
    (my_names(driver), op)
}

#[test]
fn a_new_stream_has_eight_events_and_a_word() {
    async_under_the_stand_in(async |driver| {
        // With a page of words; streams made for a stream: its own, and one for a doorbell.
        for (mode, pages, streams) in [
            (Completion::Adaptive, 1, 1),
            (Completion::Event, 0, 1),
            (Completion::Word, 1, 1),
            (Completion::Callback, 0, 2),
        ] {
            let before = Live::now(driver);
            let device = device_with(mode);
            // The device's own, and its first: whichever is made first registers the page. Beside it there is
            // a slab of pinned memory.
            let first = device.default_stream().clone();
            assert_eq!(driver.live("registered") - before.of("registered"), pages + 1, "{mode:?}");
            driver.clear();
            let second = device.stream().unwrap();
            let names = my_names(driver);
            let count = |name| names.iter().filter(|known| *known == name).count();
            assert_eq!(count("cuStreamCreateWithPriority"), streams, "{mode:?}: {names:#?}");
            assert_eq!(count("cuEventCreate"), 8, "{mode:?}: {names:#?}");
            assert_eq!(count("cuMemHostRegister_v2"), 0, "{mode:?}: a line of the first's page");
            // They are used before others are made.
            let empty = kernels::empty::load(&device).await.unwrap();
            let held = driver.hold();
            driver.clear();
            let ops: Vec<_> = (0..5).map(|_| empty.launch(&second)).collect();
            assert!(!my_names(driver).iter().any(|name| name == "cuEventCreate"), "{mode:?}");
            drop(held);
            soon(gpu_await::join_all(ops)).await.unwrap();
            drop((first, second, empty, device));
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}

/// A stream's last act, or an event's, may be the device's as well.
#[test]
fn a_device_that_goes_takes_the_events_of_its_streams_along() {
    async_under_the_stand_in(async |driver| {
        for mode in super::MODES {
            let before = Live::now(driver);
            let device = device_with(mode);
            drop(device);
            before.comes_back(driver, &[], &format!("{mode:?}, nothing was done"));
            let device = device_with(mode);
            let event = device.stream().unwrap().record_timed().unwrap();
            drop(device);
            drop(event);
            before.comes_back(driver, &[], &format!("{mode:?}"));
        }
    });
}

#[test]
fn what_is_awaited_gets_a_word_where_waits_were_short() {
    async_under_the_stand_in(async |driver| {
        for (remembers, marker) in [
            (Remembers::Nothing, EVENT),
            (Remembers::ShortWaits, WORD),
            (Remembers::ALongWait, EVENT),
        ] {
            let device = device_with(Completion::Adaptive);
            let empty = kernels::empty::load(&device).await.unwrap();
            let stream = stream_that(driver, &device, remembers).await;
            let held = driver.hold();
            let (names, op) = polled(driver, &empty, &stream);
            assert_eq!(names, [LAUNCH, marker], "remembers {remembers:?}");
            drop(held);
            soon(op).await.unwrap();
        }
    });
}

#[test]
fn a_word_is_read_without_a_question() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let empty = kernels::empty::load(&device).await.unwrap();
        let mut stream = stream_that(driver, &device, Remembers::ShortWaits).await;
        driver.instant(true);
        driver.clear();
        // The poller may look at the stream just then; not always.
        while !(0..10).all(|_| poll_once(&mut empty.launch(&stream))) {
            stream = stream_that(driver, &device, Remembers::ShortWaits).await;
            driver.instant(true);
            driver.clear();
        }
        let me = driver.thread();
        let mut calls = driver.calls();
        calls.retain(|line| Line(line).thread() == me);
        let names: Vec<_> = calls.iter().map(|line| Line(line).name()).collect();
        assert_eq!(names, [LAUNCH, WORD].repeat(10));
    });
}

#[test]
fn while_two_tasks_check_events_are_the_markers() {
    async_under_the_stand_in(async |driver| {
        // A check is over after 30 us, a wait that is not short is remembered as well, and where the cores are busy no task of a device
        // checks for a while. So this thread may be too slow for many tries beside other programs, but not always.
        let (mut beside, mut behind) = (false, false);
        let end = Instant::now() + 8 * SOON;
        while !(beside && behind) {
            assert!(
                Instant::now() < end,
                "beside two that check {beside}, when they gave up {behind}"
            );
            let device = device_with(Completion::Adaptive);
            let empty = kernels::empty::load(&device).await.unwrap();
            let stream = || stream_after_short_waits(driver, &device, &empty);
            let streams = [stream(), stream(), stream()];
            let held = driver.hold();
            let mut ops: Vec<_> = streams.iter().map(|stream| empty.launch(stream)).collect();
            driver.clear();
            assert!(!ops.iter_mut().any(poll_once), "held");
            // Beside none, one and two that check.
            beside |= my_names(driver) == [WORD, WORD, EVENT];
            // They gave up.
            let (names, op) = polled(driver, &empty, &streams[2]);
            behind |= names == [LAUNCH, WORD];
            drop(held);
            soon(op).await.unwrap();
            soon(device.done()).await.unwrap();
        }
    });
}

#[test]
fn a_stream_that_remembers_a_long_wait_is_not_marked_by_a_word() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let empty = kernels::empty::load(&device).await.unwrap();
        let stream = stream_that(driver, &device, Remembers::ALongWait).await;
        driver.clear();
        // Not more: of five kinds of waits it remembers the newest four.
        for instant in [true, false, true] {
            driver.instant(instant);
            soon(empty.launch(&stream)).await.unwrap();
        }
        let names = driver.names();
        let count = |name| names.iter().filter(|known| *known == name).count();
        assert_eq!((count(LAUNCH), count(EVENT), count(WORD)), (3, 3, 0));
    });
}

#[test]
fn markers_that_nobody_awaits_are_events() {
    async_under_the_stand_in(async |driver| {
        let device = device_with(Completion::Adaptive);
        let empty = kernels::empty::load(&device).await.unwrap();
        let stream = stream_that(driver, &device, Remembers::ShortWaits).await;
        let held = driver.hold();
        driver.clear();
        let op = empty.launch(&stream);
        empty.launch(&stream).queued().unwrap();
        assert_eq!(my_names(driver), [LAUNCH, EVENT, LAUNCH], "in front of the next submission");
        driver.clear();
        (0..127).for_each(|_| empty.launch(&stream).queued().unwrap());
        let names = my_names(driver);
        assert_eq!(names[..127], [LAUNCH; 127]);
        assert_eq!(names[127..], [EVENT], "behind 128 commands");
        drop(held);
        soon(op).await.unwrap();
        soon(stream.done()).await.unwrap();
    });
}

/// The questions that a look takes, by anybody.
fn questions(driver: &StandIn, look: impl FnOnce()) -> usize {
    driver.clear();
    look();
    driver.names().iter().filter(|name| *name == "cuEventQuery").count()
}

#[test]
fn a_complete_marker_speaks_for_all_in_front_of_it() {
    async_under_the_stand_in(async |driver| {
        for mode in [Completion::Adaptive, Completion::Event, Completion::Callback] {
            let device = device_with(mode);
            let empty = kernels::empty::load(&device).await.unwrap();
            let stream = device.stream().unwrap();
            driver.instant(true);
            // Each gets its marker when the next is launched, the last one when it is asked for.
            let ops: Vec<_> = (0..4).map(|_| empty.launch(&stream)).collect();
            let asked = questions(driver, || assert!(ops[3].is_complete()));
            assert_eq!(asked, 1, "{mode:?}");
            let asked = questions(driver, || assert!(ops.iter().all(Op::is_complete)));
            assert_eq!(asked, 0, "{mode:?}: known");
            driver.instant(false);
        }
    });
}

#[test]
fn the_newest_complete_marker_is_found_with_few_questions() {
    async_under_the_stand_in(async |driver| {
        // So many markers are complete, the rest are pending: so many questions. With more than the stream
        // has events for, one before another is made.
        for (complete, pending, most) in
            [(0, 1, 1), (0, 8, 4), (1, 1, 2), (4, 4, 5), (7, 1, 3), (99, 1, 3), (1, 99, 14)]
        {
            let device = device_with(Completion::Event);
            let empty = kernels::empty::load(&device).await.unwrap();
            let stream = device.stream().unwrap();
            driver.instant(true);
            let mut ops: Vec<_> = (0..=complete).map(|_| empty.launch(&stream)).collect();
            // The marker of the last of these comes with the next launch, or when it is asked for.
            let held = driver.hold();
            ops.extend((1..pending).map(|_| empty.launch(&stream)));
            let newest = ops.last().unwrap();
            let asked = questions(driver, || assert!(!newest.is_complete()));
            assert_eq!(asked, most, "{complete} complete, {pending} pending");
            assert_eq!(stream.completed(), complete as u64);
            drop(held);
            driver.instant(false);
            soon(gpu_await::join_all(ops)).await.unwrap();
        }
    });
}
