//! The timeline: what operations were, when, and what they waited for.
//!
//! Times of the device are compared with the host's within the error that the trace says, which is one of this run.

use std::collections::{BTreeMap, HashMap};
use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpu_await::testing::{self, Gate};
use gpu_await::{
    Copy2d, Device, DeviceKind, GapCause, Region, Result, Stream, Trace, TracedOp, TracedWork,
    kernels,
};
use proptest::prelude::*;

use crate::under_test::alone;
use crate::under_test::cases::config;

fn traced(capacity: usize) -> Result<(Device, Stream)> {
    let device = alone::device();
    let stream = device.stream()?;
    device.timeline().start(capacity)?;
    Ok((device, stream))
}

fn find<'t>(trace: &'t Trace, name: &str) -> &'t TracedOp {
    let found = trace.operations().iter().find(|op| &*op.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {trace:?}"))
}

/// The times on the host's clock that bound those of the device: error and rounding aside.
fn assert_in_order(op: &TracedOp) {
    let error = op.clock_error + Duration::from_nanos(2);
    let (started, completed) = op.device_time().unwrap_or_else(|| panic!("no times in {op:?}"));
    assert!(op.submitted <= started + error, "{op:?}");
    assert!(started <= completed, "{op:?}");
    let seen = op.seen.unwrap_or_else(|| panic!("not seen: {op:?}"));
    assert!(completed <= seen + error, "{op:?}");
    assert!(op.woken.is_none_or(|woken| seen <= woken), "{op:?}");
    assert!(op.polled.is_none_or(|polled| op.woken.unwrap_or(seen) <= polled), "{op:?}");
}

#[tokio::test]
async fn fills_and_copies_are_so_whoever_makes_them() -> Result<()> {
    let (device, stream) = traced(100)?;
    let x = stream.full(1000, 0.1_f64).queued()?;
    let mut y = stream.full(1000, 0.2_f64).queued()?;
    stream.fill(&mut y, 0.3).queued()?;
    stream.copy_2d(&x, &mut y, Copy2d::new(3, 100).source_pitch(10)).queued()?;
    stream.copy(&x, &mut y).await?;
    let trace = device.timeline().snapshot()?;
    let seen: Vec<_> = trace.operations().iter().map(|op| (op.work, op.bytes)).collect();
    let fill = (TracedWork::Fill, 8000);
    let copies = [(TracedWork::Copy, 2400), (TracedWork::Copy, 8000)];
    assert_eq!(seen, [fill, fill, fill, copies[0], copies[1]]);
    Ok(())
}

#[tokio::test]
async fn parts_of_a_staged_copy_are_at_its_line() -> Result<()> {
    let (device, stream) = traced(100)?;
    let lines = Location::caller().line() + 1;
    let x = stream.upload_staged(vec![1_u8; 5 << 20]).await?;
    stream.download_staged(&x).await?;
    stream.download_staged_into(&x, Vec::new()).await?;
    let trace = device.timeline().snapshot()?;
    let (mut seen, mut allocations) = (BTreeMap::new(), 0);
    for op in trace.operations() {
        assert_eq!(op.at.file(), file!(), "{op:?}");
        *seen.entry(op.at.line() - lines).or_insert(0) += 1;
        allocations += u64::from((op.work, op.bytes) == (TracedWork::Order, 0));
    }
    assert_eq!((seen, allocations), (BTreeMap::from([(0, 4), (1, 3), (2, 3)]), 1));
    Ok(())
}

#[tokio::test]
async fn six_times_of_an_operation() -> Result<()> {
    let (device, stream) = traced(100)?;
    let scale = kernels::scale::load(&device).await?;
    let mut x = stream.upload(vec![1.0_f32; 1000]).queued()?;
    let at = Location::caller();
    scale.launch(&stream, 2.0, &mut x).await?;
    stream.download(&x).await?;
    let trace = device.timeline().snapshot()?;
    assert_eq!((trace.operations().len(), trace.dropped()), (3, 0));
    trace.operations().iter().for_each(assert_in_order);
    let buffers: Vec<u64> = trace.operations().iter().map(|op| op.buffers_bytes).collect();
    assert_eq!(buffers, [4096; 3]);
    let upload = find(&trace, "upload");
    assert_eq!((upload.work, upload.bytes), (TracedWork::ToDevice, 4000));
    assert_eq!((upload.woken, upload.polled), (None, None), "nobody awaits it");
    let launch = find(&trace, "scale");
    assert_eq!((launch.work, launch.launches), (TracedWork::Kernel, 1));
    assert_eq!((launch.grid_dim, launch.block_dim), ([4, 1, 1], [256, 1, 1]));
    assert_eq!((launch.at.file(), launch.at.line()), (at.file(), at.line() + 1));
    assert!(launch.polled.is_some());
    let download = find(&trace, "download");
    assert_eq!((download.work, download.bytes), (TracedWork::ToHost, 4000));
    assert_eq!(download.ticket.number, launch.ticket.number + 1);
    Ok(())
}

#[tokio::test]
async fn a_gate_is_seen_in_the_times() -> Result<()> {
    let (device, stream) = traced(100)?;
    let gate = Gate::close(&stream)?;
    let behind = stream.host_fn(|| ());
    let held = Duration::from_millis(20);
    let waits = std::thread::spawn(move || {
        std::thread::sleep(held);
        gate.open();
    });
    behind.await?;
    waits.join().expect("no panic");
    let trace = device.timeline().snapshot()?;
    let op = trace.operations().last().expect("the function");
    assert_in_order(op);
    assert_eq!(op.work, TracedWork::HostFn);
    // It was submitted before the thread began.
    let started = op.started.expect("a time");
    assert!(started + op.clock_error >= op.submitted + held, "{op:?}");
    Ok(())
}

#[tokio::test]
async fn who_waited_for_whom() -> Result<()> {
    let (device, a) = traced(100)?;
    let b = device.stream_builder().name("reader").build()?;
    let mut x = a.full(1000, 1.0_f32).queued()?;
    let y = b.full(10, 1.0_f32).await?;
    let gate = Gate::close(&a)?;
    a.fill(&mut x, 2.0).queued()?;
    let read = b.download(&x);
    gate.open();
    assert_eq!(read.await?[0], 2.0);
    drop(y);
    let trace = device.timeline().snapshot()?;
    let (fill, read) = (find(&trace, "fill"), find(&trace, "download"));
    assert_eq!(read.waits_for, [fill.ticket]);
    assert_eq!(read.stream_name.as_deref(), Some("reader"));
    let report = trace.report();
    let gap = report.gaps.iter().find(|gap| gap.before == read.ticket).expect("the reader's");
    let GapCause::Stream { ticket, name, stream } = &gap.because else { panic!("{report}") };
    assert_eq!((*ticket, &**name, stream.id), (fill.ticket, "fill", fill.ticket.stream));
    Ok(())
}

#[tokio::test]
async fn the_log_is_bounded() -> Result<()> {
    let (device, stream) = traced(10)?;
    let mut x = stream.zeros::<u8>(100).queued()?;
    for n in 0..5000 {
        stream.fill(&mut x, n as u8).queued()?;
    }
    stream.done().await?;
    let trace = device.timeline().snapshot()?;
    assert_eq!((trace.operations().len(), trace.dropped()), (10, 4991));
    let numbers: Vec<u64> = trace.operations().iter().map(|op| op.ticket.number).collect();
    assert!(numbers.is_sorted_by(|a, b| a + 1 == *b), "{numbers:?}");
    trace.operations().iter().for_each(assert_in_order);
    Ok(())
}

#[tokio::test]
async fn sampled_stopped_and_started_again() -> Result<()> {
    let device = alone::device();
    let stream = device.stream()?;
    let mut x = stream.zeros::<u8>(100).queued()?;
    let mut fill = |times| (0..times).try_for_each(|n| stream.fill(&mut x, n).queued());
    let timeline = device.timeline();
    fill(10)?;
    assert!(!timeline.is_on() && timeline.snapshot()?.operations().is_empty());
    timeline.start_sampled(100, 10)?;
    fill(100)?;
    assert_eq!(timeline.snapshot()?.operations().len(), 10);
    timeline.stop();
    fill(100)?;
    assert_eq!(timeline.snapshot()?.operations().len(), 10, "what is there stays");
    timeline.start(100)?;
    fill(7)?;
    assert!(timeline.is_on());
    assert_eq!(timeline.snapshot()?.operations().len(), 7);
    Ok(())
}

/// More than are asked at once, from several threads, some of whose operations nobody awaits.
#[test]
fn every_operation_of_many_threads() -> Result<()> {
    const EACH: usize = 1500;
    let (device, _) = traced(usize::MAX)?;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let stream = device.stream().expect("a stream");
            scope.spawn(move || {
                let mut x = stream.zeros::<u8>(100).queued().expect("memory");
                for n in 0..EACH {
                    let op = stream.fill(&mut x, n as u8);
                    match n % 100 {
                        99 => op.synchronize().expect("a fill"),
                        _ => op.queued().expect("a fill"),
                    }
                }
            });
        }
    });
    futures::executor::block_on(device.done())?;
    let trace = device.timeline().snapshot()?;
    assert_eq!(trace.operations().len(), 4 * (EACH + 1));
    let mut ends = HashMap::new();
    for op in trace.operations() {
        assert_in_order(op);
        let (started, completed) = op.device_time().expect("times");
        let end = ends.insert(op.ticket.stream, (op.ticket.number, completed));
        let is_behind =
            |(number, end): (u64, Duration)| number < op.ticket.number && end <= started;
        assert!(end.is_none_or(is_behind), "operations of one stream overlap: {op:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_replayed_list_is_one() -> Result<()> {
    let (device, stream) = traced(100)?;
    let axpy = kernels::axpy::load(&device).await?;
    let x = stream.full(1000, 1.0_f32).queued()?;
    let mut y = stream.full(1000, 0.0_f32).queued()?;
    let mut region = Region::new();
    for _ in 0..4 {
        stream
            .replay(&mut region, |q| (0..3).try_for_each(|_| axpy.launch(q, 1.0, &x, &mut y)))
            .await?;
    }
    let trace = device.timeline().snapshot()?;
    let lists: Vec<_> =
        trace.operations().iter().filter(|op| op.work == TracedWork::List).collect();
    assert_eq!(lists.len(), 4, "{trace:?}");
    for (at, op) in lists.into_iter().enumerate() {
        assert_in_order(op);
        // A kernel's first launch is not written to a list.
        let name = if at == 0 { "axpy and 1 more" } else { "axpy and 2 more" };
        assert_eq!(&*op.name, name);
    }
    Ok(())
}

#[tokio::test]
async fn what_is_lost_or_refused_leaves_no_gap() -> Result<()> {
    let (device, stream) = traced(100)?;
    let x = stream.zeros::<f32>(10).queued()?;
    let mut y = stream.zeros::<f32>(20).queued()?;
    stream.copy(&x, &mut y).queued().unwrap_err();
    stream.fill(&mut y, 1.0).await?;
    let names: Vec<_> = device.timeline().snapshot()?.operations().to_vec();
    let names: Vec<_> = names.iter().map(|op| op.name.to_string()).collect();
    assert_eq!(names, ["zeros", "zeros", "fill"], "what was not submitted is not there");
    Ok(())
}

/// On a stepped device times are those of its own clock, and none is the device's.
#[test]
fn of_a_stepped_device() -> Result<()> {
    let (device, stepper) = testing::manual();
    let stream = device.stream()?;
    device.timeline().start(100)?;
    let mut x = stream.zeros::<u8>(100).queued()?;
    let mut fill = Box::pin(stream.fill(&mut x, 1));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    while fill.as_mut().poll(&mut cx).is_pending() {
        let _ = stepper.step(1);
    }
    let trace = device.timeline().snapshot()?;
    assert_eq!(trace.operations().len(), 2);
    for op in trace.operations() {
        assert_eq!(op.device_time(), None);
        assert!(op.seen.is_some_and(|seen| op.submitted <= seen), "{op:?}");
    }
    Ok(())
}

async fn example() -> Result<Trace> {
    let (device, a) = traced(1000)?;
    let b = device.stream_builder().name("quotes \" and \\").build()?;
    let scale = kernels::scale::load(&device).await?;
    let mut x = a.upload(vec![1.0_f32; 100_000]).queued()?;
    for _ in 0..20 {
        scale.launch(&a, 1.0, &mut x).queued()?;
        b.download(&x).await?;
    }
    device.timeline().snapshot()
}

/// The fields of a message of protocol buffers: their numbers, with a number or bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (byte, rest) = bytes.split_first().expect("a byte");
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return value;
            }
        }
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let (number, len) = match tag & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (u64::from_le_bytes(bytes[..8].try_into().expect("eight")), 8),
            2 => (0, varint(&mut bytes) as usize),
            other => panic!("type {other}"),
        };
        let (value, rest) = bytes.split_at(len);
        bytes = rest;
        found.push((tag >> 3, number, value));
    }
    found
}

fn number(message: &[u8], field: u64) -> Option<u64> {
    fields(message).into_iter().find(|found| found.0 == field).map(|found| found.1)
}

/// The messages of one field.
fn messages(message: &[u8], field: u64) -> Vec<&[u8]> {
    let found = fields(message).into_iter().filter(|found| found.0 == field);
    found.map(|found| found.2).collect()
}

/// The tracks of Perfetto's trace: their numbers, with their names and their parents.
fn tracks(trace: &[u8]) -> HashMap<u64, (String, Option<u64>)> {
    let described = messages(trace, 1).into_iter().flat_map(|packet| messages(packet, 60));
    let track = |track| {
        let name = String::from_utf8(messages(track, 2)[0].to_vec()).expect("a name");
        (number(track, 1).expect("its number"), (name, number(track, 5)))
    };
    described.map(track).collect()
}

/// The names of the tracks below the one with a name that ends like that.
fn tracks_below(tracks: &HashMap<u64, (String, Option<u64>)>, end: &str) -> Vec<String> {
    let parent = tracks.iter().find(|(_, (name, _))| name.ends_with(end)).expect("it").0;
    let below = tracks.values().filter(|(_, of)| *of == Some(*parent));
    below.map(|(name, _)| name.clone()).collect()
}

/// By the numbers of Perfetto's schema; CI has Perfetto's own library read one as well (`tests/timeline.py`).
#[tokio::test]
async fn a_file_for_perfetto() -> Result<()> {
    let trace = example().await?;
    let mut file = Vec::new();
    trace.write_perfetto(&mut file).expect("memory");
    let tracks = tracks(&file);
    let streams = tracks_below(&tracks, "on the device");
    assert!(streams.len() == 2 && streams.iter().any(|name| name.contains("quotes \" and \\")));
    let (mut begun, mut begins, mut ends, mut last) = (HashMap::new(), vec![], vec![], 0);
    for packet in messages(&file, 1) {
        let [event] = messages(packet, 11)[..] else { continue };
        let at = number(packet, 8).expect("a time");
        assert!(last <= at, "in the order of their times");
        last = at;
        let track = number(event, 11).expect("a track");
        assert!(tracks.contains_key(&track), "{track}");
        match number(event, 9) {
            Some(1) => *begun.entry(track).or_insert(0) += 1,
            Some(2) => *begun.get_mut(&track).expect("it began") -= 1,
            _ => {}
        }
        assert!(begun.values().all(|open| (0..=1).contains(open)), "they overlap");
        let flows = |field| fields(event).into_iter().filter(move |found| found.0 == field);
        begins.extend(flows(47).map(|flow| flow.1));
        ends.extend(flows(48).map(|flow| flow.1));
    }
    assert!(begun.values().all(|open| *open == 0), "all of them end");
    begins.sort_unstable();
    ends.sort_unstable();
    assert_eq!(begins, ends);
    assert!(!begins.is_empty(), "the downloads wait for the launches, and the launches for those");
    Ok(())
}

#[tokio::test]
async fn the_task_of_an_operation() -> Result<()> {
    let (device, _) = traced(100)?;
    let work = async |device: Device| -> Result<Option<u64>> {
        let stream = device.stream()?;
        stream.full(1000, 1.0_f32).await?;
        let task = tokio::task::try_id().map(|id| id.to_string());
        Ok(task.map(|id| id.parse().expect("a number")))
    };
    let tasks = [(); 2].map(|()| {
        let (device, work) = (device.clone(), work);
        tokio::spawn(async move { work(device).await })
    });
    let mut ran = vec![work(device.clone()).await?];
    for task in tasks {
        ran.push(task.await.expect("no panic")?);
    }
    assert_eq!(ran.iter().flatten().count(), 2, "`block_on` is no task: {ran:?}");
    let trace = device.timeline().snapshot()?;
    assert!(trace.operations().iter().map(|op| op.task).eq(ran.iter().copied()), "{trace:?}");
    let mut file = Vec::new();
    trace.write_perfetto(&mut file).expect("memory");
    let mut shown = tracks_below(&tracks(&file), "in tasks");
    let mut expected: Vec<_> = ran.iter().flatten().map(|task| format!("task {task}")).collect();
    shown.sort();
    expected.sort();
    assert_eq!(shown, expected);
    Ok(())
}

/// Operations that are submitted and complete while a snapshot is taken.
#[test]
fn nothing_is_seen_before_it_is_submitted() -> Result<()> {
    let (device, _) = traced(2000)?;
    let ends = AtomicBool::new(false);
    let (looks, operations) = std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| -> Result<()> {
                let stream = device.stream()?;
                while !ends.load(Ordering::SeqCst) {
                    (0..20).try_for_each(|_| stream.full(4, 1_u32).queued().map(drop))?;
                    stream.done().synchronize()?;
                }
                Ok(())
            });
        }
        let mut looks = Vec::new();
        let mut operations = 0;
        for _ in 0..300 {
            let Ok(trace) = device.timeline().snapshot() else { break };
            operations += trace.operations().len();
            let early = |op: &&TracedOp| op.seen.is_some_and(|seen| seen < op.submitted);
            looks.extend(trace.operations().iter().find(early).cloned());
        }
        ends.store(true, Ordering::SeqCst);
        (looks, operations)
    });
    assert!(operations > 0 && looks.is_empty(), "{:?}", looks.first());
    Ok(())
}

#[tokio::test]
async fn a_report() -> Result<()> {
    let trace = example().await?;
    let report = trace.report();
    let count = |name| report.operations.iter().find(|op| &*op.name == name).map(|op| op.count);
    assert_eq!((count("scale"), count("download"), count("upload")), (Some(20), Some(20), Some(1)));
    assert!(report.busy <= report.length, "{report}");
    for op in &report.operations {
        assert!(op.p50 <= op.p99 && op.p99 <= op.total, "{report}");
    }
    assert!(
        !report.gaps.is_empty()
            && report.gaps.is_sorted_by_key(|gap| std::cmp::Reverse(gap.length))
    );
    Ok(())
}

/// What goes from the log may still be on the device: nobody else gets its events. (A stream of a GPU takes 1,021 launches, or a third
/// of them with their times.)
#[tokio::test]
async fn events_that_are_pending_are_not_lent() -> Result<()> {
    for starts_again in [false, true] {
        let (device, a) = traced(1)?;
        let b = device.stream()?;
        let mut x = a.zeros::<u8>(100).await?;
        let (first, second) = (Gate::close(&a)?, Gate::close(&b)?);
        for n in 0..300 {
            a.fill(&mut x, n as u8).queued()?;
        }
        if starts_again {
            device.timeline().start(1)?;
        }
        device.timeline().stop();
        let marks: Vec<_> = (0..300).map(|_| b.record_timed()).collect::<Result<_>>()?;
        first.open();
        a.done().await?;
        assert!(!first.timed_out() && !second.timed_out());
        assert!(marks.iter().all(|mark| !mark.is_complete()), "b is held up");
        second.open();
        b.done().await?;
        assert!(marks.iter().all(gpu_await::Event::is_complete));
    }
    Ok(())
}

/// What it did is what one wants to know of a device that is lost.
#[tokio::test]
async fn of_a_device_that_is_lost() -> Result<()> {
    let (faults, handle) = testing::faults();
    let device = testing::host_with(faults);
    let stream = device.stream()?;
    device.timeline().start(100)?;
    let mut x = stream.zeros::<u8>(100).await?;
    assert!(device.timeline().snapshot()?.operations()[0].device_time().is_some());
    let gate = Gate::close(&stream)?;
    let pending = stream.fill(&mut x, 1);
    handle.lose_device("a test");
    pending.await.unwrap_err();
    gate.open();
    let trace = device.timeline().snapshot()?;
    let op = trace.operations().last().expect("the fill");
    assert_eq!((&*op.name, op.completed, op.polled), ("fill", None, None));
    assert!(device.timeline().start(10).is_err());
    Ok(())
}

/// What is logged is one of ten: what is between two of them is not known.
#[tokio::test]
async fn a_sampled_log_has_no_gaps() -> Result<()> {
    let (device, stream) = traced(1000)?;
    device.timeline().start_sampled(1000, 10)?;
    let mut x = stream.zeros::<u8>(100).queued()?;
    for n in 0..200 {
        stream.fill(&mut x, n).await?;
    }
    let trace = device.timeline().snapshot()?;
    let report = trace.report();
    assert_eq!((trace.one_in(), report.one_in, report.operations[0].count), (10, 10, 20));
    assert!(report.gaps.is_empty() && report.advice.is_empty(), "{report}");
    assert!(report.to_string().contains("with one operation of 10"), "{report}");
    device.timeline().start(0)?;
    assert!(!device.timeline().is_on());
    Ok(())
}

/// An operation of the log before is still on the device.
#[tokio::test]
async fn started_again_beside_an_operation() -> Result<()> {
    let device = alone::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    for _ in 0..20 {
        device.timeline().start(100)?;
        let gate = Gate::close(&stream)?;
        stream.host_fn(|| ()).abandon();
        device.timeline().start(100)?;
        let behind = stream.host_fn(|| ());
        other.host_fn(|| ()).await?;
        gate.open();
        behind.await?;
        let trace = device.timeline().snapshot()?;
        assert_eq!(trace.operations().len(), 2);
        trace.operations().iter().for_each(assert_in_order);
    }
    Ok(())
}

#[tokio::test]
async fn odd_names() -> Result<()> {
    let device = alone::device();
    let name = "\u{1b}[31m\n\0".to_owned() + &"ä".repeat(70_000);
    let stream = device.stream_builder().name(&name).build()?;
    device.timeline().start(100)?;
    // The stream is idle in between, which the report says of it by its name.
    stream.host_fn(|| ()).await?;
    stream.host_fn(|| ()).await?;
    let report = device.timeline().snapshot()?.report().to_string();
    assert!(report.contains("äää…\" idle for") && report.len() < 5000, "{report}");
    assert!(!report.contains('\u{1b}'), "{report}");
    Ok(())
}

/// One that is on the device, and one behind it, when the trace is taken.
#[tokio::test]
async fn what_runs_is_in_the_trace() -> Result<()> {
    let (device, stream) = traced(100)?;
    let gate = Gate::close(&stream)?;
    let (began, begins) = std::sync::mpsc::channel();
    let (go_on, goes_on) = std::sync::mpsc::channel::<()>();
    let running = stream.host_fn(move || {
        began.send(()).ok();
        goes_on.recv_timeout(Duration::from_secs(10)).ok();
    });
    let behind = stream.host_fn(|| ());
    gate.open();
    begins.recv_timeout(Duration::from_secs(10)).expect("it begins");
    let trace = device.timeline().snapshot()?;
    // The gate's is complete, though nobody had looked.
    let [gate, first, second] = trace.operations() else { panic!("{trace:?}") };
    assert_in_order(gate);
    assert!(first.started.is_some(), "{trace:?}");
    assert_eq!((second.started, first.completed), (None, None));
    assert!(first.started <= Some(trace.taken().0 + first.clock_error), "{trace:?}");
    let report = trace.report();
    assert_eq!(report.running.len(), 1);
    assert!(report.to_string().contains("has run host_fn for"), "{report}");
    go_on.send(()).expect("it waits");
    running.await?;
    behind.await?;
    let trace = device.timeline().snapshot()?;
    trace.operations().iter().for_each(assert_in_order);
    Ok(())
}

/// A step of a random program: what it reads, if anything, what it writes, and on which stream.
#[derive(Clone, Copy, Debug)]
struct Step {
    from: Option<usize>,
    to: usize,
    stream: usize,
}

fn step() -> impl Strategy<Value = Step> {
    (prop::option::of(0..3_usize), 0..3_usize, 0..3_usize).prop_map(|(from, to, stream)| {
        let from = from.filter(|from| *from != to);
        Step { from, to, stream }
    })
}

proptest! {
    #![proptest_config(config(40))]

    /// What uses the same memory is in the trace in the order of the program, on whatever streams.
    #[test]
    fn the_order_of_the_program(steps in prop::collection::vec(step(), 1..60)) {
        let (device, first) = traced(1000).expect("a device");
        let streams = [first, device.stream().expect("a stream"), device.stream().expect("a stream")];
        let made = [(); 3].map(|()| streams[0].zeros::<u8>(10_000).queued().expect("memory"));
        let mut buffers: Vec<_> = made.into_iter().map(Some).collect();
        for Step { from, to, stream } in &steps {
            let (mut written, stream) = (buffers[*to].take().expect("it is here"), &streams[*stream]);
            let op = match from {
                Some(from) => stream.copy(buffers[*from].as_ref().expect("another"), &mut written),
                None => stream.fill(&mut written, 1),
            };
            op.queued().expect("it goes on");
            buffers[*to] = Some(written);
        }
        device.synchronize().expect("all of it");
        let trace = device.timeline().snapshot().expect("a trace");
        let ops = &trace.operations()[3..];
        prop_assert_eq!(ops.len(), steps.len());
        for (at, (later, op)) in steps.iter().zip(ops).enumerate() {
            for (earlier, before) in steps[..at].iter().zip(ops) {
                let conflict = later.from == Some(earlier.to)
                    || later.to == earlier.to
                    || earlier.from == Some(later.to);
                let (end, start) = (before.completed.expect("a time"), op.started.expect("a time"));
                let error = before.clock_error.max(op.clock_error) + Duration::from_nanos(2);
                prop_assert!(!conflict || end <= start + error, "{:?} and {:?}", before, op);
            }
        }
    }
}

#[test]
fn from_the_builder() -> Result<()> {
    let device = Device::builder().timeline(5).host();
    assert!(device.timeline().is_on());
    let stream = device.stream()?;
    let x = stream.zeros::<u8>(10).synchronize()?;
    drop(x);
    assert_eq!(device.timeline().snapshot()?.operations().len(), 1);
    assert!(!Device::builder().timeline(0).host().timeline().is_on());
    Ok(())
}

/// Where no driver call may be made nothing is started or read.
#[tokio::test]
async fn inside_of_a_host_function() -> Result<()> {
    let (device, stream) = traced(10)?;
    let inside = device.timeline();
    let refused = stream.host_fn(move || (inside.start(10).is_err(), inside.snapshot().is_err()));
    assert_eq!(refused.await?, (true, true));
    Ok(())
}

/// A library that uses the legacy default stream now and then orders streams that wait for that one, and the trace says so.
#[tokio::test]
async fn work_on_the_default_stream_is_named() -> Result<()> {
    let device = alone::device();
    let spin = kernels::spin::load(&device).await?;
    for is_there in [false, true] {
        device.timeline().start(1000)?;
        let named = |name| device.stream_builder().name(name).non_blocking(false).build();
        let (a, b) = (named("a")?, named("b")?);
        let legacy = device.legacy_stream()?;
        let mut x = a.zeros::<u8>(100).await?;
        let gate = Gate::close(&legacy)?;
        for _ in 0..20 {
            for stream in [&a, &b] {
                spin.launch(stream, 200_000).queued()?;
                if is_there {
                    legacy.fill(&mut x, 1).queued()?;
                }
            }
        }
        gate.open();
        tokio::try_join!(a.done(), b.done())?;
        let report = device.timeline().snapshot()?.report();
        let told = report.advice.iter().map(ToString::to_string);
        let told: Vec<_> = told.filter(|told| told.contains("never ran at once")).collect();
        let of_both = told.iter().any(|told| told.contains("\"a\" and stream"));
        let of_legacy = told.iter().any(|told| told.contains("\"legacy default\""));
        match (is_there, device.kind()) {
            (true, _) => assert!(of_both && of_legacy, "{report}"),
            (false, DeviceKind::Cuda) => assert!(!of_both, "{report}"),
            // Whether its threads run at once is the machine's business.
            (false, _) => {}
        }
    }
    Ok(())
}
