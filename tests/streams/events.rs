//! Events: recorded, recorded again, waited for, timed, and shared between processes.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;

use futures::FutureExt;
use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceKind, ErrorDetail, ErrorKind, EventProblem, Op, Result};

use crate::under_test::child;

const SOON: Duration = Duration::from_secs(5);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.expect("nothing held it up")
}

/// Whether `op` is held up: nothing else would keep it for so long.
async fn is_held_up<T>(op: &mut Op<T>) -> bool {
    tokio::time::timeout(Duration::from_millis(20), op).await.is_err()
}

fn problem(error: &gpu_await::Error) -> Option<(&'static str, EventProblem)> {
    match error.detail() {
        ErrorDetail::Event { which, problem } => Some((which, *problem)),
        _ => None,
    }
}

#[tokio::test]
async fn an_event_completes_when_its_stream_gets_there_and_later_work_does_not_delay_it()
-> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    for timed in [false, true] {
        let event = device.event_builder().timed(timed).build()?;
        let gate = Gate::close(&a)?;
        event.record(&a)?;
        assert!(!event.is_complete());
        let later = Gate::close(&a)?;
        b.wait(&event).queued()?;
        let mut behind = b.host_fn(|| 4);
        assert!(is_held_up(&mut behind).await);
        assert!(event.done().now_or_never().is_none());
        gate.open();
        soon(event.done()).await?;
        assert!(event.is_complete() && !a.is_idle());
        assert_eq!(soon(behind).await?, 4);
        later.open();
        soon(a.done()).await?;
        assert!(!later.timed_out());
    }
    Ok(())
}

#[tokio::test]
async fn recording_again_leaves_who_waits_for_the_first_point() -> Result<()> {
    let device = testing::device();
    let (a, b, c) = (device.stream()?, device.stream()?, device.stream()?);
    for timed in [false, true] {
        let event = device.event_builder().timed(timed).build()?;
        let clone = event.clone();
        let (first, second) = (Gate::close(&a)?, Gate::close(&b)?);
        event.record(&a)?;
        c.wait(&event).queued()?;
        let (on_the_first, done) = (c.host_fn(|| 1), event.done());
        event.record(&b)?;
        first.open();
        assert_eq!(soon(on_the_first).await?, 1);
        soon(done).await?;
        assert!(!event.is_complete() && !clone.is_complete(), "clones are the same event");
        second.open();
        soon(clone.done()).await?;
        assert!(event.is_complete() && !second.timed_out());
    }
    Ok(())
}

#[tokio::test]
async fn an_event_that_was_never_recorded_has_nothing_to_wait_for() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let event = device.event();
    assert!(event.is_complete());
    soon(event.done()).await?;
    event.synchronize()?;
    soon(stream.wait(&event)).await?;
    assert_eq!(format!("{event:?}"), "Event(never recorded)");
    Ok(())
}

#[test]
fn a_thread_synchronizes_with_an_event_of_either_kind() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    for blocking in [false, true] {
        let event = device.event_builder().blocking_sync(blocking).build()?;
        let gate = Gate::close(&stream)?;
        event.record(&stream)?;
        let (sender, passed) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn({
            let event = event.clone();
            move || {
                let result = event.synchronize();
                sender.send(()).ok();
                result
            }
        });
        assert!(passed.recv_timeout(Duration::from_millis(20)).is_err());
        gate.open();
        passed.recv_timeout(SOON).expect("the thread goes on");
        waiter.join().expect("it does not panic")?;
    }
    Ok(())
}

#[tokio::test]
async fn elapsed_time_says_what_is_missing_in_order() -> Result<()> {
    let (device, other) = (testing::device(), testing::device());
    let (stream, elsewhere) = (device.stream()?, other.stream()?);
    let timed = |device: &Device| device.event_builder().timed(true).build();
    let plain = device.event();
    let (start, end, far) = (timed(&device)?, timed(&device)?, timed(&other)?);
    let missing = |error: gpu_await::Error| {
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
        problem(&error).expect("it is the event's")
    };
    // Each call lacks all that the later ones lack as well.
    let gate = Gate::close(&stream)?;
    let (from, to) = ("the start event", "the end event");
    assert_eq!(missing(far.elapsed_since(&plain).unwrap_err()), (from, EventProblem::Untimed));
    assert_eq!(missing(plain.elapsed_since(&far).unwrap_err()), (to, EventProblem::Untimed));
    assert_eq!(missing(far.elapsed_since(&start).unwrap_err()), (to, EventProblem::Unrecorded));
    far.record(&elsewhere)?;
    soon(far.done()).await?;
    assert_eq!(missing(far.elapsed_since(&start).unwrap_err()), (from, EventProblem::Unrecorded));
    start.record(&stream)?;
    assert_eq!(missing(far.elapsed_since(&start).unwrap_err()), (from, EventProblem::Incomplete));
    assert_eq!(missing(start.elapsed_since(&far).unwrap_err()), (to, EventProblem::Incomplete));
    gate.open();
    soon(start.done()).await?;
    let error = far.elapsed_since(&start).unwrap_err();
    assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    end.record(&stream)?;
    soon(end.done()).await?;
    assert!(end.elapsed_since(&start)? > Duration::ZERO);
    assert_eq!(end.elapsed_since(&end)?, Duration::ZERO);
    Ok(())
}

#[test]
fn an_event_is_recorded_on_streams_of_its_own_device_alone() -> Result<()> {
    let (device, other) = (testing::device(), testing::device());
    let stream = other.stream()?;
    for timed in [false, true] {
        let event = device.event_builder().timed(timed).build()?;
        let error = event.record(&stream).unwrap_err();
        assert!(matches!(error.detail(), ErrorDetail::WrongDevice { .. }), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_stream_waits_for_an_event_of_another_device_and_the_host_goes_on() -> Result<()> {
    let (device, other) = (testing::device(), testing::device());
    let (a, b) = (device.stream()?, other.stream()?);
    let gate = Gate::close(&a)?;
    let event = a.record()?;
    b.wait(&event).queued()?;
    let mut behind = b.host_fn(|| 5);
    assert!(is_held_up(&mut behind).await);
    gate.open();
    assert_eq!(soon(behind).await?, 5);
    assert!(!gate.timed_out());
    Ok(())
}

#[test]
fn dropping_a_pending_event_is_safe() -> Result<()> {
    let device = testing::device();
    let (a, b) = (device.stream()?, device.stream()?);
    let gate = Gate::close(&a)?;
    let event = device.event_builder().timed(true).build()?;
    event.record(&a)?;
    b.wait(&event).queued()?;
    drop(event);
    drop(a.record()?);
    let behind = b.host_fn(|| 6);
    gate.open();
    assert_eq!(behind.synchronize()?, 6);
    a.synchronize()
}

#[test]
fn what_an_event_was_not_made_for_is_a_typed_error() -> Result<()> {
    let device = testing::device();
    let error = device.event_builder().timed(true).interprocess(true).build().unwrap_err();
    assert_eq!(problem(&error), Some(("the event", EventProblem::InterprocessTimed)));
    let error = device.event().export().unwrap_err();
    assert_eq!(problem(&error), Some(("the event", EventProblem::NotInterprocess)));
    if device.kind() == DeviceKind::Host {
        let error = device.event_builder().interprocess(true).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        // SAFETY: nothing is opened on a host device.
        let error = unsafe { device.import_event(&[0; 64]) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; 64] {
    let digits = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex");
    std::array::from_fn(digits)
}

/// The other process: opens the event, says so, and then that it was passed.
async fn watch(handle: &str) -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    // SAFETY: the parent keeps the event until this process has ended.
    let event = unsafe { device.import_event(&unhex(handle)) }?;
    assert!(!event.is_complete(), "recorded behind a gate");
    stream.wait(&event).queued()?;
    let mut behind = stream.host_fn(|| 1);
    let mut done = event.done();
    assert!(is_held_up(&mut behind).await && is_held_up(&mut done).await);
    println!("waiting");
    std::io::stdout().flush().expect("a pipe");
    tokio::time::timeout(Duration::from_secs(15), done)
        .await
        .expect("the parent opens its gate")?;
    assert_eq!(soon(behind).await?, 1);
    assert!(event.is_complete());
    Ok(())
}

#[tokio::test]
async fn two_processes_share_an_event() -> Result<()> {
    const THIS: &str = concat!(module_path!(), "::two_processes_share_an_event");
    if let Some(handle) = child::parameter() {
        return watch(&handle).await;
    }
    let device = testing::device();
    if device.kind() == DeviceKind::Host {
        // There is no such event on the host device: `what_an_event_was_not_made_for..`.
        let error = device.event_builder().interprocess(true).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        return Ok(());
    }
    let stream = device.stream()?;
    let event = device.event_builder().interprocess(true).build()?;
    let handle = event.export()?;
    let gate = Gate::close(&stream)?;
    event.record(&stream)?;
    assert!(!event.is_complete());
    let mut other = child::command(THIS, &hex(&handle))
        .stderr(Stdio::inherit())
        .spawn()
        .expect("a child process");
    let mut lines = BufReader::new(other.stdout.take().expect("its output is piped")).lines();
    let waits = lines.by_ref().map_while(|line| line.ok()).any(|line| line.contains("waiting"));
    gate.open();
    // To its end, so that it never writes into a closed pipe.
    lines.for_each(drop);
    let status = other.wait().expect("a child's end");
    assert!(waits && status.success() && !gate.timed_out(), "{status}");
    soon(event.done()).await?;
    assert!(event.is_complete());
    Ok(())
}

/// Taken the wrong way round, it is said so: not a time of zero.
#[tokio::test]
async fn a_start_behind_the_end_is_an_error() -> Result<()> {
    let device = testing::device();
    let (stream, other) = (device.stream()?, device.stream()?);
    let spin = gpu_await::kernels::spin::load(&device).await?;
    let first = stream.record_timed()?;
    spin.launch(&stream, 200_000).queued()?;
    let second = stream.record_timed()?;
    // The same between two streams.
    other.wait(&second).queued()?;
    spin.launch(&other, 200_000).queued()?;
    let third = other.record_timed()?;
    soon(third.done()).await?;
    for (start, end) in [(&first, &second), (&second, &third), (&first, &third)] {
        assert!(end.elapsed_since(start)? >= Duration::from_micros(190));
        let error = start.elapsed_since(end).expect_err("the wrong way round");
        assert_eq!(problem(&error), Some(("the start event", EventProblem::BehindEnd)));
        assert_eq!(error.kind(), ErrorKind::InvalidCall);
    }
    assert_eq!(first.elapsed_since(&first)?, Duration::ZERO);
    Ok(())
}
