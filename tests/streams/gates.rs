//! Gates that nobody opens: their own limit does, and they hold up nothing from then on.

use std::time::{Duration, Instant};

use gpu_await::testing::{self, Gate};
use gpu_await::{Device, DeviceKind, Result, Stream, kernels};

/// The limit of a gate.
const LIMIT: Duration = Duration::from_secs(1);

/// What a call may take that no gate holds up: on a GPU a kernel is loaded in milliseconds, and a device of a context that is
/// there is opened in some more.
const AT_ONCE: Duration = Duration::from_secs(2);

/// A device of the same name as the one that tests run on, beside it.
fn another() -> Result<Device> {
    let name = std::env::var(testing::TEST_DEVICE).unwrap_or_else(|_| "host".to_owned());
    Device::builder().named(&name)
}

fn took<R>(call: impl FnOnce() -> R) -> (R, Duration) {
    let start = Instant::now();
    (call(), start.elapsed())
}

/// Waits for the kernels of the gates, which end by themselves; on the host, for nothing but their words.
fn wait_for_limits(gates: &[Gate]) {
    let end = Instant::now() + LIMIT * gates.len() as u32 + Duration::from_secs(10);
    while !gates.iter().all(Gate::timed_out) {
        assert!(Instant::now() < end, "a gate's kernel does not keep its limit");
        std::thread::yield_now();
    }
}

/// Measured from the moment at which the last gate's word says that its limit has passed, while all gates are still held: the
/// load of a kernel, which waits for all kernels that run, and a second device, which loads some and pins memory.
fn assert_nothing_is_held_up(device: &Device, gates: &[Gate], what: &str) -> Result<()> {
    wait_for_limits(gates);
    let (loaded, load) = took(|| kernels::scale::load_blocking(device));
    drop(loaded?);
    let (opened, open) = took(another);
    let (stream, made) = took(|| opened.and_then(|device| device.stream()));
    let (ran, run) =
        took(|| stream.and_then(|stream| stream.zeros::<u8>(100).synchronize().map(drop)));
    ran?;
    eprintln!("{what}: load {load:?}, open {open:?}, stream {made:?}, run {run:?}");
    let slowest = [load, open, made, run].into_iter().max();
    assert!(slowest < Some(AT_ONCE), "{what}: load {load:?}, open {open:?}, {made:?}, {run:?}");
    Ok(())
}

#[test]
fn a_gate_past_its_limit() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let gate = [Gate::close_for(&stream, LIMIT)?];
    assert_nothing_is_held_up(&device, &gate, "one gate")?;
    // What was behind it went on.
    stream.synchronize()
}

/// Each of several streams, and two in a row on one of them: the second one's limit begins with its kernel.
#[test]
fn several_gates_past_their_limits() -> Result<()> {
    let device = testing::device();
    let streams: Vec<Stream> = (0..4).map(|_| device.stream()).collect::<Result<_>>()?;
    let gates = streams.iter().chain(&streams[..1]).map(|stream| Gate::close_for(stream, LIMIT));
    let gates: Vec<Gate> = gates.collect::<Result<_>>()?;
    assert_nothing_is_held_up(&device, &gates, "five gates")?;
    streams.iter().try_for_each(Stream::synchronize)
}

/// Behind each gate a kernel that takes the whole device for a moment: when the limits have passed, these run, and the load waits
/// for them and no longer.
#[test]
fn gates_in_front_of_kernels_that_fill_the_device() -> Result<()> {
    let device = testing::device();
    let streams: Vec<Stream> = (0..4).map(|_| device.stream()).collect::<Result<_>>()?;
    let axpy = kernels::axpy::load_blocking(&device)?;
    let len = if device.kind() == DeviceKind::Cuda { 64 << 20 } else { 1 << 16 };
    let x = device.default_stream().full(len, 1.0f32).queued()?;
    let ys = streams.iter().map(|stream| stream.full(len, 1.0f32).queued());
    let mut ys = ys.collect::<Result<Vec<_>>>()?;
    streams.iter().try_for_each(Stream::synchronize)?;
    let gates = streams.iter().map(|stream| Gate::close_for(stream, LIMIT));
    let gates: Vec<Gate> = gates.collect::<Result<_>>()?;
    for (stream, y) in streams.iter().zip(&mut ys) {
        for _ in 0..20 {
            axpy.launch(stream, 1.0, &x, y).queued()?;
        }
    }
    assert_nothing_is_held_up(&device, &gates, "gates in front of work")?;
    for (stream, y) in streams.iter().zip(&ys) {
        let part = y.slice(..10)?;
        assert_eq!(stream.download(&part).synchronize()?[..], [21.0; 10]);
    }
    Ok(())
}

/// A load that begins while gates are closed returns when the last one's limit has passed.
#[test]
fn a_load_beside_a_closed_gate() -> Result<()> {
    let device = testing::device();
    let stream = device.stream()?;
    let gate = Gate::close_for(&stream, LIMIT)?;
    let (loaded, load) = took(|| kernels::scale::load_blocking(&device));
    loaded?;
    assert!(load < LIMIT + AT_ONCE, "{load:?}");
    wait_for_limits(&[gate]);
    stream.synchronize()
}
